"""Right arguments of the ops that work on variables and tensors alone; see fuzz_calls.py."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf
from fuzz_world import World

from tf_recsync import staleness
from tf_recsync.ops import library

# Of rows of bfloat16 tables, as ops are told of it.
_ROUNDINGS = [[], [0, 0, 1, 2, -5], [0, 0, 0, 1, 5, 0, 1, 0, 3, 9]]


def staleness_weights(w: World) -> dict:
    return {
        "staleness_decay": w.choose(["constant", "inverse_power", "threshold"]),
        "staleness_power": 0.5,
        "staleness_baseline": 1.0,
        "staleness_normalized": w.chance(0.5),
        "staleness_iota": float(w.small()),
    }


def _update(rule: str, table: bool) -> Callable[[World], dict]:
    def recipe(w: World) -> dict:
        if table:
            shapes, beside = [(r, c) for r, c in w.tables], [(r,) for r, _ in w.tables]
        else:
            shapes, beside = [(size,) for size in w.sizes], [()] * len(w.sizes)
        n = len(shapes)
        narrow = table and w.chance(0.2)

        def ints(shape_list, value=0, dtype=np.int64):
            return [w.variable(np.full(s, value, dtype)) for s in shape_list]

        counted = np.int32 if table else np.int64

        values = [tf.cast(w.floats(*s), tf.bfloat16 if narrow else tf.float32) for s in shapes]
        arguments = {
            "variables": [w.variable(v) for v in values],
            "versions": ints(beside, 3),
            "counters": ints([(staleness.COUNTERS,)] * n),
            "last_periods": [],
            "last_updates": [],
            "learning_rate": 0.1,
            "global_step": w.small(1, 9),
            "nonfinite": w.choose(["apply", "skip", "error"]),
            "names": w.choose([[], ["a"], ["a", "b", "c"]]),
            **staleness_weights(w),
        }
        if w.chance(0.5):
            arguments |= {"swap_period": w.small(1, 3), "swap_decay": 0.5, "swap_offset": w.small()}
            arguments["last_periods"] = ints(beside, dtype=counted)
        if w.chance(0.3):
            arguments |= {"update_sensitivity": 1.0, "target_deviation": float(w.small(0, 1))}
            arguments["target_mean"] = float(w.small(0, 1))
            arguments["deviation_window"] = w.small(1, 3)
            arguments["last_updates"] = [w.variable(np.ones(s, np.float32)) for s in beside]
        if rule == "adam":
            arguments |= {"last_steps": ints(beside, dtype=counted), "beta_1": 0.9, "beta_2": 0.99}
            if table:
                arguments |= {"lazy": w.chance(0.5), "several_counters": w.chance(0.5)}
        if rule == "ftrl":
            arguments |= {"learning_rate_power": -0.5, "l1": 0.1, "l2": 0.1, "beta": 0.0}
        if rule in ("adagrad", "rowwise_adagrad", "adam"):
            arguments["epsilon"] = 1e-7
        accumulators = {
            "sgd": [],
            "adagrad": ["accumulators"],
            "rowwise_adagrad": ["accumulators"],
            "adam": ["momentums", "velocities"],
            "ftrl": ["accumulators", "linears"],
        }
        for name in accumulators[rule]:
            own_shapes = beside if rule == "rowwise_adagrad" else shapes
            arguments[name] = [w.variable(np.ones(s, np.float32)) for s in own_shapes]
        if table:
            rows = packed_rows(w, w.tables)
            vectors = rows.pop("vectors")
            size = sum(c * v for (_, c), v in zip(w.tables, vectors, strict=True))
            pulled = len(rows["indices"])
            arguments |= rows | log_decays(w, w.tables)
            arguments["rounding"] = w.choose(_ROUNDINGS)
        else:
            size, pulled = sum(w.sizes), n
            arguments["hogwild"] = w.chance(0.4)
        arguments["gradient"] = tf.cast(w.floats(size), w.gradient_dtype())
        given = pulled if w.chance(0.7) else 0
        arguments["pulled_versions"] = w.rng.integers(0, 4, given).astype(np.int64)
        return arguments

    return recipe


def log_decays(w: World, tables: list[tuple[int, int]]) -> dict:
    decayed = [number for number in range(len(tables)) if w.chance(0.3)]
    sizes = [tables[number][0] + 2 for number in decayed]
    return {"log_decays": [w.variable(-w.rng.random(n)) for n in sizes], "decayed": decayed}


def _decay_weights(w: World) -> dict:
    return {
        "variables": dense_variables(w) if w.chance(0.5) else [],
        "log_decays": log_decays(w, w.tables)["log_decays"],
        "learning_rate": 0.1,
        "weight_decay": float(w.small(0, 11)),
    }


def _settle_decay(w: World) -> dict:
    dtype = w.choose([tf.float32, tf.bfloat16])
    return {
        "variables": [w.variable(tf.cast(w.floats(*shape), dtype)) for shape in w.tables],
        "log_decays": [w.variable(-w.rng.random(rows + 2)) for rows, _ in w.tables],
        "rounding": w.choose(_ROUNDINGS),
    }


def packed_rows(w: World, tables: list[tuple[int, int]], dtype=None) -> dict:
    counts = [w.small(0, 6) if rows > 0 else 0 for rows, _ in tables]
    ids = [w.rng.integers(0, max(r, 1), c) for (r, _), c in zip(tables, counts, strict=True)]
    dtype = w.choose([np.int32, np.int64]) if dtype is None else dtype
    pooled = w.chance(0.5)
    bags = [np.sort(w.rng.integers(0, 3, c)) for c in counts]
    return {
        "indices": np.concatenate(ids).astype(dtype),
        "counts": np.array(counts, np.int64),
        "bags": (np.concatenate(bags) if pooled else np.zeros(0)).astype(np.int32),
        "scales": w.floats(sum(counts) if w.chance(0.5) else 0),
        "bag_counts": np.full(len(tables) if pooled else 0, 3, np.int64),
        "vectors": [3 if pooled else c for c in counts],
    }


def _gather_rows(w: World) -> dict:
    tables = [w.variable(w.floats(*shape)) for shape in w.tables]
    versions = [w.variable(np.zeros(rows, np.int64)) for rows, _ in w.tables]
    rows = packed_rows(w, w.tables)
    del rows["vectors"]
    rows |= log_decays(w, w.tables)
    return {"variables": tables, "versions": versions if w.chance(0.7) else [], **rows}


def _key_place(w: World) -> dict:
    partitions = w.choose([1, 2, 4])
    shards = w.choose([n for n in (1, 2, 4) if n <= partitions])
    place = {"partitions": partitions, "shard": w.small(0, shards - 1), "shards": shards}
    return {**place, "min_count": w.choose([1, 2, 255])}


def _key_sizes(w: World) -> dict:
    return {"rows": w.choose([2, 8, 50]), **_key_place(w)}


def _key_entries(w: World, rows: int) -> np.ndarray:
    extremes = [0, 1, -1, 2**63 - 1, -(2**63)]
    keys = w.rng.choice([*extremes, *range(50)], rows)
    return np.stack([keys, w.rng.choice([0, 1, 2**24 + 1, *extremes], rows)], 1)


def _used_rows(w: World) -> dict:
    return {"entries": w.variable(_key_entries(w, w.choose([0, 3, 50])))}


def _find_rows(w: World) -> dict:
    rows, width = w.choose([4, 50, 300]), w.choose([0, 1, 4])
    place = _key_place(w)
    index, sketch = map(int, library.recsync_key_sizes(rows=rows, **place))
    is_garbage = w.chance(0.2)
    words = w.rng.integers(-(2**31), 2**31, index) if is_garbage else np.zeros(index)
    besides = [w.floats(rows, width), w.floats(rows), np.zeros(rows, np.int32)][: w.small(0, 3)]
    n = w.small(0, 100)
    versions = w.rng.choice([0, 2**40, 2**62, -1], rows)
    values = tf.cast(w.floats(rows, width), w.choose([tf.float32, tf.bfloat16]))
    log_decays = -w.rng.random(rows + 2)
    return {
        "table": w.variable(values),
        "entries": w.variable(_key_entries(w, rows) if w.chance(0.3) else np.zeros([rows, 2], int)),
        "index": w.variable(words.astype(np.int32)),
        "counts": w.variable(w.rng.choice([0, 2**62, -1], 8)),
        "sketches": [w.variable(np.zeros(sketch, np.int8))] if sketch else [],
        "versions": [w.variable(versions)] if w.chance(0.7) else [],
        "beside": [w.variable(one) for one in besides],
        "log_decays": [w.variable(log_decays)] if w.chance(0.3) else [],
        "means": [w.variable(w.rng.choice([0, 5, 1e300, np.nan], 2 + width))]
        if w.chance(0.5)
        else [],
        "keys": w.rng.integers(-(2**63), 2**63 - 1, n) if w.chance(0.3) else np.arange(n),
        "expected": w.rng.choice([0, 2**40], n) if w.chance(0.3) else np.zeros(0, np.int64),
        "inserts": w.chance(0.7),
        "eviction": w.choose(["least_recent", "least_frequent"]),
        "half_life": w.choose([0, 1, 1000]),
        "max_idle": w.choose([0, 1, 1000]),
        "keeps_time": w.chance(0.3),
        "probability": w.choose([1.0, 1.0, 0.5, 1e-30]),
        "trains_unknown": w.chance(0.5),
        "mean_rows": w.choose([0, 16, 2**62]),
        "distribution": w.choose(["constant", "uniform", "normal"]),
        "parameters": [0.0, 1.0],
        "seed": w.small(),
        "beside_values": [0.5] * len(besides),
        **place,
    }


def _copy_rows(w: World) -> dict:
    rows, width = w.tables[0]
    return {
        "variables": [w.variable(w.floats(rows, width)), w.variable(np.zeros(rows, np.int64))],
        "rows": w.rng.integers(0, max(rows, 1), w.small() if rows else 0).astype(np.int64),
        "dtypes": [tf.float32, tf.int64],
        **log_decays(w, w.tables[:1]),
    }


def _changed_rows(w: World) -> dict:
    rows, _ = w.tables[0]
    begin = w.small(0, rows)
    return {
        "versions": w.variable(w.rng.integers(0, 2, rows)),
        "saved": w.variable(w.rng.integers(0, 2, rows)),
        "begin": np.int64(begin),
        "end": np.int64(w.small(begin, rows)),
    }


def dense_variables(w: World) -> list[tf.Tensor]:
    return [w.variable(w.floats(size)) for size in w.sizes]


def _pull_dense(w: World) -> dict:
    return {
        "variables": dense_variables(w),
        "versions": [w.variable(np.int64(0)) for _ in w.sizes],
        "others": [w.floats(w.small()) for _ in range(w.small(0, 2))],
    }


def _pull_table(w: World) -> dict:
    rows, width = w.tables[0]
    return {
        "variable": w.variable(w.floats(rows, width)),
        "versions": w.variable(np.zeros(rows, np.int64)),
        "shape": [rows, width],
        **log_decays(w, w.tables[:1]),
    }


def _interpolate(w: World) -> dict:
    return {
        "variables": dense_variables(w),
        "target": w.floats(sum(w.sizes)),
        "alpha": w.rng.random(),
        "hogwild": w.chance(0.5),
        "answer": w.chance(0.5),
    }


def _groups(w: World, pieces: int) -> list[int]:
    groups = []
    while pieces:
        groups.append(w.small(1, pieces))
        pieces -= groups[-1]
    return groups


def _pack(w: World) -> dict:
    dtype = w.choose([np.float32, np.int64])
    pieces = [w.floats(w.small(0, 40)).astype(dtype) for _ in range(w.small(1, 4))]
    return {"pieces": pieces, "groups": _groups(w, len(pieces))}


def _unpack(w: World) -> dict:
    pieces = _pack(w)
    packed = library.recsync_pack(**pieces)
    sizes = np.array([len(p) for p in pieces["pieces"]], np.int64)
    if w.chance(0.3):
        sizes[-1] = -1
    return {"packed": packed, "sizes": sizes, "groups": pieces["groups"], "N": len(sizes)}


def _examples(w: World, dtype) -> dict:
    n = w.small(0, 9)
    return {
        "labels": w.rng.integers(0, 2, n).astype(dtype),
        "predictions": w.rng.random(n).astype(dtype),
        "weights": w.rng.random(n if w.chance(0.7) else 1).astype(dtype),
        "from_logits": w.chance(0.5),
    }


def _add_log_loss(w: World) -> dict:
    sums = dict.fromkeys(["loss_sum", "label_sum", "weight_sum"], np.float64(1))
    return {**sums, **_examples(w, w.choose([np.float32, np.float64])), "epsilon": 1e-7}


def _add_scores(w: World) -> dict:
    buckets = np.zeros([2, w.small(1, 9)])
    examples = _examples(w, w.choose([np.float32, np.float64]))
    return {"buckets": buckets, **examples, "spacing": w.choose(["linear", "logit"])}


def _mean_normalize(w: World) -> dict:
    rows, features = w.small(), w.small()
    x = tf.cast(w.floats(rows, features), w.gradient_dtype())
    return {"x": x, "alpha": w.floats(features), "beta": w.floats(features), "epsilon": 1e-3}


def _mean_normalize_grad(w: World) -> dict:
    forward = _mean_normalize(w)
    return {
        "dy": forward["x"],
        "x": forward["x"],
        "alpha": forward["alpha"],
        "mean": forward["beta"],
        "epsilon": 1e-3,
    }


def _encode_int8(w: World) -> dict:
    return {"x": w.floats(w.small(), w.small())}


def _decode_int8(w: World) -> dict:
    rows, columns = w.small(), w.small()
    return {"codes": np.ones((rows, columns), np.int8), "scales": w.floats(rows)}


def _restore_gradient(w: World) -> dict:
    values = w.floats(w.small(0, 8))
    kept = values.shape[0]
    size = kept + w.small(0, 20)
    bits = np.arange(-(-size // 8) * 8) < kept
    mask = np.packbits(bits, bitorder="little") if size > kept else np.zeros(0, np.uint8)
    if w.chance(0.5):
        values = tf.cast(values, tf.bfloat16)
    return {"mask": mask, "values": values, "shape": np.array([size], np.int64)}


def _route_ids(w: World) -> dict:
    batch, tables = w.small(), w.small(1, 3)
    count = w.small(1, 3)
    dtype = w.choose([np.int32, np.int64])
    lengths = [w.small(0, 2) for _ in range(count)]
    weighted = [w.chance(0.3) for _ in range(count)]
    rows = [w.small(1, 20) for _ in range(count)]
    shards = [w.small(1, 3) for _ in range(count)]
    ids, splits, weights = [], [], []
    for f, length in enumerate(lengths):
        each = [w.small(0, 3) for _ in range(batch)] if length == 0 else [length] * batch
        if length == 0:
            splits.append(np.cumsum([0, *each]).astype(np.int64))
        ids.append(w.rng.integers(0, rows[f], sum(each)).astype(dtype))
        if weighted[f]:
            weights.append(w.floats(sum(each)))
    return {
        "ids": ids,
        "splits": splits,
        "weights": weights,
        "P": tables,
        "features": [f"f{f}" for f in range(count)],
        "tables": [f"t{f}" for f in range(count)],
        "table_rows": rows,
        "lengths": lengths,
        "weighted": weighted,
        "combiners": [w.choose(["sum", "mean", "sqrtn"]) for _ in range(count)],
        "out_of_range": [w.choose(["error", "clip", "hash"]) for _ in range(count)],
        "partitions": [w.choose([0, 0, 1, 4]) for _ in range(count)],
        "shard_counts": shards,
        "shard_tables": [w.small(0, tables - 1) for _ in range(sum(shards))],
        "shard_offsets": [w.small(0, 9) for _ in range(sum(shards))],
        "has_bags": [True] * tables,
        "has_scales": [True] * tables,
    }


def _slots(w: World) -> dict:
    """One physical table for each feature, which all examples have."""
    batch = w.small(1, 4)
    dimensions = [w.small(1, 4) for _ in range(w.small(1, 3))]
    slots = [np.arange(batch, dtype=np.int32) + f * batch for f in range(len(dimensions))]
    shared = [w.chance(0.5) for _ in dimensions]
    vectors = [2 if s else batch for s in shared]
    sources = [w.rng.integers(0, 2, batch if s else 0).astype(np.int32) for s in shared]
    return {
        "batch": batch,
        "dimensions": dimensions,
        "slots": slots,
        "sources": sources,
        "vectors": vectors,
    }


def _assemble(w: World) -> dict:
    s = _slots(w)
    pooled = [w.floats(v, d) for v, d in zip(s.pop("vectors"), s["dimensions"], strict=True)]
    return {**s, "batch": np.int64(s["batch"]), "pooled": pooled}


def _assemble_grad(w: World) -> dict:
    s = _slots(w)
    gradient = w.floats(s.pop("batch"), sum(s["dimensions"]))
    return {
        **s,
        "gradient": gradient,
        "vectors": np.array(s["vectors"], np.int32),
        "table_dimensions": s["dimensions"],
    }


def _initial_rows(w: World) -> dict:
    n = w.small()
    counts = [w.small(1, 4) for _ in range(n)]
    return {
        "dtype": w.choose([tf.float32, tf.bfloat16]),
        "dimension": w.small(0, 9),
        "rows": [w.small(0, 300) for _ in range(n)],
        "indices": [w.small(0, count - 1) for count in counts],
        "counts": counts,
        "distributions": [
            w.choose(["constant", "uniform", "normal", "truncated_normal"]) for _ in range(n)
        ],
        "parameters": [0.0, 1.0] * n,
        "seeds": [w.small() for _ in range(n)],
    }


RECIPES: dict[str, Callable[[World], dict]] = {
    **{f"{r}_dense": _update(r, False) for r in ("sgd", "adagrad", "adam", "ftrl")},
    **{
        f"{r}_rows": _update(r, True) for r in ("sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl")
    },
    "gather_rows": _gather_rows,
    "copy_rows": _copy_rows,
    "key_sizes": _key_sizes,
    "used_rows": _used_rows,
    "find_rows": _find_rows,
    "changed_rows": _changed_rows,
    "pull_dense": _pull_dense,
    "pull_table": _pull_table,
    "decay_weights": _decay_weights,
    "settle_decay": _settle_decay,
    "next_global_step": lambda w: {"global_step": w.variable(np.int64(1))},
    "snapshot": lambda w: {"variables": dense_variables(w)},
    "read_packed": lambda w: {
        "resources": dense_variables(w),
        "tails": [np.arange(w.small(), dtype=np.int64) for _ in range(w.small(0, 2))],
    },
    "interpolate": _interpolate,
    "pack": _pack,
    "unpack": _unpack,
    "add_log_loss": _add_log_loss,
    "add_scores": _add_scores,
    "area_under_curve": lambda w: {"buckets": np.ones([2, w.small(1, 9)])},
    "mean_normalize": _mean_normalize,
    "mean_normalize_grad": _mean_normalize_grad,
    "encode_int8": _encode_int8,
    "decode_int8": _decode_int8,
    "restore_gradient": _restore_gradient,
    "route_ids": _route_ids,
    "assemble": _assemble,
    "assemble_grad": _assemble_grad,
    "initial_rows": _initial_rows,
    "delay": lambda w: {"seconds": 0.001},
    "transfer": lambda w: {
        "message": w.floats(w.small()),
        "bytes_per_second": 1e6,
        "passage": w.choose(["", "another"]),
    },
    "computed": lambda w: {
        "results": [w.floats(w.small()) for _ in range(w.small(1))],
        "flop": 1e3,
        "flops_per_second": 1e6,
    },
    "reserved": lambda w: {},
    "resident_memory": lambda w: {},
    "server_threads": lambda w: {"threads": w.small(1, 4)},
    "limit_parallelism": lambda w: {"limit": w.small(1, 4)},
}
