"""Calls of the custom ops with arguments that are mostly right; fuzz_ops.py runs this.

Usage: fuzz_calls.py SEED FIRST CALLS [--verbose]

Makes the calls FIRST to FIRST + CALLS - 1 of a seed. Before each it writes a line with its number
and its op to the standard output, after the last one "end". A call depends on the seed and its
number alone: it makes its own variables and resources. It begins as a right one, and in most of
them arguments are then replaced by others: other shapes, other types, numbers that are no rows or
sizes, other handles or one twice. An error is what may come of it; a process that ends, or a call
that does not, is what fuzz_ops.py looks for.
"""

from __future__ import annotations

import argparse
import inspect
import resource
import sys
import threading
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import cancellation
from tensorflow.python.framework import op_def_registry

from tf_recsync import staleness
from tf_recsync.ops import library

# What may be allocated beside what TensorFlow takes: more is refused to us, not taken from others.
MEMORY = 1 << 30
# Longer than any wait that nobody ends: whoever is still there then hangs.
PATIENCE = 600.0
MOST_OUTPUTS = 100
INTEGERS = [0, 1, -1, 2, 3, 7, 2**20 + 1, 2**31 - 1, 2**31, -(2**31), 2**40, 2**61, 2**62]
INTEGERS += [2**63 - 1, -(2**63)]
FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, 1e30, float("inf"), -float("inf"), float("nan")]
WAITING = {"delay", "transfer", "take_token", "hop_next", "hop_enter", "hop_send"}
WAITING |= {"hop_receive", "hop_collect"}


def ops() -> list[str]:
    """The names of all ops of the library, as its functions are called without `recsync_`."""
    names = [n.removeprefix("recsync_") for n in dir(library) if n.startswith("recsync_")]
    return sorted(n for n in names if not n.endswith("_eager_fallback"))


class World:
    """The variables, resources and right arguments of one call, made from its random numbers."""

    def __init__(self, rng: np.random.Generator, name: str):
        self.rng = rng
        self._name = name
        self._kept: list[tf.Variable] = []
        self._resources: dict[str, tf.Tensor] = {}
        self.tables = [(self.small(), self.small()) for _ in range(self.small(1, 3))]
        self.sizes = [self.small(0, 9) for _ in range(self.small(1, 3))]
        self.iteration = 0
        self.tokens = self.workers = None

    # Numbers.

    def small(self, least: int = 0, most: int = 5) -> int:
        return int(self.rng.integers(least, most + 1))

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def choose(self, values: Sequence):
        return values[int(self.rng.integers(len(values)))]

    def floats(self, *shape: int, dtype=np.float32) -> np.ndarray:
        return self.rng.normal(size=shape).astype(dtype)

    # What the ops work on.

    def variable(self, value: np.ndarray) -> tf.Tensor:
        self._kept.append(tf.Variable(value))
        return self._kept[-1].handle

    def handles(self) -> list[tf.Tensor]:
        """All that there are, an uninitialized one and those of resources among them."""
        missing = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[2], shared_name="never_assigned")
        return [v.handle for v in self._kept] + [*self._resources.values(), missing]

    def made(self, kind: str) -> tf.Tensor:
        if kind not in self._resources:
            arguments = RECIPES[kind](self)
            self._resources[kind] = getattr(library, f"recsync_{kind}")(**arguments)
        return self._resources[kind]

    def destroy(self) -> None:
        """Ends the resources, and with them all that wait for them."""
        for handle in self._resources.values():
            tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)

    def shared_name(self) -> str:
        return self._name

    def gradient_dtype(self):
        return self.choose([tf.float32, tf.float32, tf.float16, tf.bfloat16])


# Right arguments of each op.


def _staleness(w: World) -> dict:
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

        def ints(shape_list, value=0):
            return [w.variable(np.full(s, value, np.int64)) for s in shape_list]

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
            **_staleness(w),
        }
        if w.chance(0.5):
            arguments |= {"swap_period": w.small(1, 3), "swap_decay": 0.5, "swap_offset": w.small()}
            arguments["last_periods"] = ints(beside)
        if w.chance(0.3):
            arguments |= {"update_sensitivity": 1.0, "target_deviation": float(w.small(0, 1))}
            arguments["target_mean"] = float(w.small(0, 1))
            arguments["deviation_window"] = w.small(1, 3)
            arguments["last_updates"] = [w.variable(np.ones(s, np.float32)) for s in beside]
        if rule == "adam":
            arguments |= {"last_steps": ints(beside), "beta_1": 0.9, "beta_2": 0.99}
            if table:
                arguments["lazy"] = w.chance(0.5)
        if rule == "ftrl":
            arguments |= {"learning_rate_power": -0.5, "l1": 0.1, "l2": 0.1, "beta": 0.0}
        if rule in ("adagrad", "adam"):
            arguments["epsilon"] = 1e-7
        accumulators = {"sgd": [], "adagrad": ["accumulators"], "adam": ["momentums", "velocities"]}
        for name in accumulators.get(rule, ["accumulators", "linears"]):
            arguments[name] = [w.variable(np.ones(s, np.float32)) for s in shapes]
        if table:
            rows = _packed_rows(w, w.tables)
            vectors = rows.pop("vectors")
            size = sum(c * v for (_, c), v in zip(w.tables, vectors, strict=True))
            pulled = len(rows["indices"])
            arguments |= rows
        else:
            size, pulled = sum(w.sizes), n
            arguments["hogwild"] = w.chance(0.4)
        arguments["gradient"] = tf.cast(w.floats(size), w.gradient_dtype())
        given = pulled if w.chance(0.7) else 0
        arguments["pulled_versions"] = w.rng.integers(0, 4, given).astype(np.int64)
        return arguments

    return recipe


def _packed_rows(w: World, tables: list[tuple[int, int]], dtype=None) -> dict:
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
    rows = _packed_rows(w, w.tables)
    del rows["vectors"]
    return {"variables": tables, "versions": versions if w.chance(0.7) else [], **rows}


def _dense_variables(w: World) -> list[tf.Tensor]:
    return [w.variable(w.floats(size)) for size in w.sizes]


def _pull_dense(w: World) -> dict:
    return {
        "variables": _dense_variables(w),
        "versions": [w.variable(np.int64(0)) for _ in w.sizes],
        "others": [w.floats(w.small()) for _ in range(w.small(0, 2))],
    }


def _pull_table(w: World) -> dict:
    rows, width = w.tables[0]
    return {
        "variable": w.variable(w.floats(rows, width)),
        "versions": w.variable(np.zeros(rows, np.int64)),
        "shape": [rows, width],
    }


def _interpolate(w: World) -> dict:
    return {
        "variables": _dense_variables(w),
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


def _gradient_buffer(w: World) -> dict:
    return {
        "shared_name": w.shared_name(),
        "capacity": w.small(1, 3),
        "divisor": 2.0,
        "drop_late": w.chance(0.5),
        "dense_size": sum(w.sizes),
        "dense_count": len(w.sizes),
        "table_rows": [rows for rows, _ in w.tables],
        "table_widths": [width for _, width in w.tables],
        **_staleness(w),
    }


def _push_to_buffer(w: World) -> dict:
    buffer = w.made("gradient_buffer")
    chosen = [w.small(0, len(w.tables) - 1) for _ in range(w.small(0, 3))]
    rows = {"indices": np.zeros(0, np.int64), "counts": np.zeros(0, np.int64), "vectors": []}
    rows |= {"bags": np.zeros(0, np.int32), "scales": np.zeros(0, np.float32)}
    rows |= {"bag_counts": np.zeros(0, np.int64)}
    tables = [w.tables[t] for t in chosen]
    if tables:
        rows = _packed_rows(w, tables, np.int64)
    vectors = rows.pop("vectors")
    size = sum(c * v for (_, c), v in zip(tables, vectors, strict=True))
    dense, versions = w.chance(0.7), w.chance(0.5)
    return {
        "buffer": buffer,
        "token_index": w.small(),
        "token_value": w.small(0, 1),
        "pulled_step": 0,
        "dense": w.floats(sum(w.sizes) if dense else 0),
        "dense_versions": np.zeros(len(w.sizes) if dense and versions else 0, np.int64),
        "gradient": w.floats(size),
        "pulled_versions": np.zeros(len(rows["indices"]) if versions else 0, np.int64),
        "tables": chosen,
        **rows,
    }


def _of_buffer(**arguments) -> Callable[[World], dict]:
    def recipe(w: World) -> dict:
        return {"buffer": w.made("gradient_buffer"), **{n: a(w) for n, a in arguments.items()}}

    return recipe


def _token_list(w: World) -> dict:
    gate = w.choose(["none", "step", "clock"])
    return {
        "shared_name": w.shared_name(),
        "repeats": w.small(1, 4),
        "gate": gate,
        "clock_bound": w.small() if gate == "clock" else 0,
        "servers": 3,
        "workers": 3,
    }


def _of_tokens(**arguments) -> Callable[[World], dict]:
    def recipe(w: World) -> dict:
        return {"list": w.made("token_list"), **{n: a(w) for n, a in arguments.items()}}

    return recipe


def _hop_worker(w: World) -> dict:
    mode = w.choose(["tokens", "acks", "plain"])
    senders = [1, 2, 3][: w.small(1, 3)]
    backups = w.small(0, len(senders)) if mode == "tokens" else 0
    return {
        "shared_name": w.shared_name(),
        "in_neighbors": senders,
        "weights": [0.25] * len(senders),
        "out_neighbors": [1, 2, 3][w.small(0, 2) :],
        "max_iteration_gap": w.small(1, 4) if mode == "tokens" else 0,
        "slots": w.small(1, 5),
        "capacity": w.small(1, 12),
        "backup_workers": backups,
        "staleness_bound": w.small(-1, 1) if mode == "acks" else w.small(-1, 3),
        "max_jump": w.small(1, 4) if mode == "tokens" else 1,
        "jump_trigger": w.small(),
        "notify_ack": mode == "acks",
        "gap_bounds": [w.small(-1, 3) for _ in senders] if w.chance(0.5) else [],
    }


def _of_hop(**arguments) -> Callable[[World], dict]:
    def recipe(w: World) -> dict:
        return {"worker": w.made("hop_worker"), **{n: a(w) for n, a in arguments.items()}}

    return recipe


def _parameters(w: World) -> np.ndarray:
    return w.floats(sum(w.sizes))


def _ints(least: int = 0, most: int = 5) -> Callable[[World], int]:
    return lambda w: w.small(least, most)


def _next_iteration(w: World) -> int:
    w.iteration += 1
    return w.iteration - 1


RECIPES: dict[str, Callable[[World], dict]] = {
    **{f"{r}_dense": _update(r, False) for r in ("sgd", "adagrad", "adam", "ftrl")},
    **{f"{r}_rows": _update(r, True) for r in ("sgd", "adagrad", "adam", "ftrl")},
    "gather_rows": _gather_rows,
    "pull_dense": _pull_dense,
    "pull_table": _pull_table,
    "next_global_step": lambda w: {"global_step": w.variable(np.int64(1))},
    "snapshot": lambda w: {"variables": _dense_variables(w)},
    "interpolate": _interpolate,
    "pack": _pack,
    "unpack": _unpack,
    "add_log_loss": _add_log_loss,
    "add_scores": _add_scores,
    "area_under_curve": lambda w: {"buckets": np.ones([2, w.small(1, 9)])},
    "mean_normalize": _mean_normalize,
    "mean_normalize_grad": _mean_normalize_grad,
    "route_ids": _route_ids,
    "assemble": _assemble,
    "assemble_grad": _assemble_grad,
    "delay": lambda w: {"seconds": 0.001},
    "transfer": lambda w: {"message": w.floats(w.small()), "bytes_per_second": 1e6},
    "server_threads": lambda w: {"threads": w.small(1, 4)},
    "limit_parallelism": lambda w: {"limit": w.small(1, 4)},
    "gradient_buffer": _gradient_buffer,
    "push_to_buffer": _push_to_buffer,
    "flush_buffer": _of_buffer(),
    "buffer_applied": _of_buffer(ready=lambda w: w.chance(0.8), step=_ints(1, 2)),
    "gradient_buffer_step": _of_buffer(),
    "gradient_buffer_state": _of_buffer(),
    "restore_buffer": _of_buffer(step=_ints()),
    "token_list": _token_list,
    "take_token": _of_tokens(worker=_ints(0, 2)),
    "lose_worker": _of_tokens(worker=_ints(0, 2)),
    "leave_tokens": _of_tokens(worker=_ints(0, 2)),
    "report_step": _of_tokens(server=_ints(0, 2), step=_ints()),
    "seek_tokens": _of_tokens(step=_ints()),
    "token_list_state": _of_tokens(),
    "hop_worker": _hop_worker,
    "hop_begin": _of_hop(first=_ints(0, 1)),
    "hop_next": _of_hop(variables=_dense_variables, T=lambda w: tf.float32),
    "hop_enter": _of_hop(
        iteration=_next_iteration, update=_parameters, send=lambda w: w.chance(0.6)
    ),
    "hop_send": _of_hop(update=_parameters),
    "hop_receive": _of_hop(
        iteration=_ints(0, 2),
        base=_parameters,
        variables=_dense_variables,
        relative=lambda w: w.chance(0.5),
    ),
    "hop_collect": _of_hop(neighbor=_ints(1, 3), T=lambda w: tf.float32),
    "hop_ask": _of_hop(neighbor=_ints(1, 3), number=_ints(), progress=_ints(), iteration=_ints()),
    "hop_deliver": _of_hop(
        neighbor=_ints(1, 3), number=_ints(1, 9), iteration=_ints(0, 3), update=_parameters
    ),
    "hop_carried": _of_hop(
        neighbor=_ints(1, 3), number=_ints(), iteration=_ints(-1), began=_ints()
    ),
    "hop_set_neighbor": _of_hop(
        neighbor=_ints(0, 4),
        since=_ints(),
        until=lambda w: w.choose([-1, w.small(), 2**63 - 1]),
    ),
    "hop_close_outboxes": _of_hop(),
    "hop_hold": _of_hop(held=lambda w: w.chance(0.5)),
    "hop_interrupt": _of_hop(),
    "hop_state": _of_hop(),
    "hop_events": _of_hop(),
}

# Ops that are called one after the other, and at the same time, on the same resources.
FAMILIES = {
    "buffer": ["push_to_buffer"] * 6
    + ["flush_buffer", "buffer_applied", "gradient_buffer_step", "gradient_buffer_state"]
    + ["restore_buffer", "gradient_buffer"],
    "tokens": ["take_token"] * 4
    + ["lose_worker", "leave_tokens", "report_step", "report_step", "seek_tokens"]
    + ["token_list_state", "token_list"],
    "hop": [name for name in RECIPES if name.startswith("hop_")]
    + ["hop_deliver", "hop_receive", "hop_next", "hop_enter", "hop_deliver"],
}
STATELESS = [n for n in RECIPES if not any(n in family for family in FAMILIES.values())]


# What makes them wrong.


def _other_integer(w: World, value: int) -> int:
    return w.choose([*INTEGERS, value + 1, value - 1, value + w.small(-9, 9)])


def _other_array(w: World, value: np.ndarray) -> np.ndarray:
    """Another shape, or other elements."""
    kind = w.small(0, 6)
    if kind == 0:
        return value[..., None]
    if kind == 1:
        return np.zeros([w.small(0, 3) for _ in range(w.small(0, 3))], value.dtype)
    if kind == 2 and value.ndim:
        return value[: w.small(0, len(value))]
    if kind == 3 and value.ndim:
        return np.concatenate([value, value[: w.small(1, 3)]])
    changed = np.array(value)
    for _ in range(w.small(1, 3)):
        if not changed.size:
            break
        at = tuple(int(w.rng.integers(s)) for s in changed.shape)
        if changed.dtype.kind in "iu":
            limits = np.iinfo(changed.dtype)
            other = _other_integer(w, int(changed[at]))
            changed[at] = min(max(other, limits.min), limits.max)
        elif changed.dtype.kind == "b":
            changed[at] = not changed[at]
        else:
            with np.errstate(over="ignore"):
                changed[at] = w.choose(FLOATS)
    return changed


def _other_list(w: World, value: list) -> list:
    changed = list(value)
    kind = w.small(0, 4)
    if kind == 0 and changed:
        del changed[w.small(0, len(changed) - 1)]
    elif kind == 1 and changed:
        changed.append(w.choose(changed))
    elif kind == 2 and len(changed) > 1:
        changed[0], changed[-1] = changed[-1], changed[0]
    elif changed:
        at = w.small(0, len(changed) - 1)
        changed[at] = other(w, changed[at])
    else:
        changed = [w.choose([0, 1, -1])]
    return changed


def other(w: World, value):
    """Another value for an argument, of its kind mostly."""
    if isinstance(value, tf.DType):
        return w.choose([tf.float32, tf.float64, tf.int64])
    if isinstance(value, tf.Tensor):
        if value.dtype == tf.resource:
            return w.choose(w.handles())
        if value.dtype in (tf.bfloat16, tf.float16):
            changed = _other_array(w, tf.cast(value, tf.float32).numpy())
            return tf.cast(changed, w.gradient_dtype())
        return _other_array(w, value.numpy())
    if isinstance(value, (np.ndarray, np.generic)):
        return _other_array(w, np.asarray(value))
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return _other_integer(w, value) if w.chance(0.9) else [value] * w.small(0, 2)
    if isinstance(value, float):
        return w.choose(FLOATS)
    if isinstance(value, str):
        return w.choose(["", "none", "sum", "other", value])
    if isinstance(value, list):
        return _other_list(w, value)
    raise TypeError(f"no other value for {value!r}")


def arguments_of(w: World, name: str) -> dict:
    """Arguments of an op, some of them wrong in most calls."""
    arguments = RECIPES[name](w)
    if w.chance(0.3):
        return arguments
    names = [n for n in arguments if n != "shared_name"]
    for _ in range(w.choose([1, 1, 1, 2, 3])):
        if names:
            changed = w.choose(names)
            arguments[changed] = other(w, arguments[changed])
    return _bounded(arguments)


def _bounded(arguments: dict) -> dict:
    """Without a million outputs, of which TensorFlow itself dies, of its own ops as well."""
    counts = {n: arguments[n] for n in ("N", "P") if isinstance(arguments.get(n), int)}
    return arguments | {n: min(count, MOST_OUTPUTS) for n, count in counts.items()}


# How they are called.


def _definition(name: str):
    return op_def_registry.get("Recsync" + "".join(part.title() for part in name.split("_")))


def _tensors(name: str, arguments: dict) -> dict:
    """The inputs among the arguments of an op, as tensors."""
    tensors = {}
    for argument in _definition(name).input_arg:
        dtype = tf.as_dtype(argument.type) if argument.type else None

        def convert(value, dtype=dtype):
            return tf.convert_to_tensor(value, dtype=dtype)

        value = arguments[argument.name]
        is_list = argument.number_attr and isinstance(value, list)
        tensors[argument.name] = [convert(v) for v in value] if is_list else convert(value)
    return tensors


_functions: dict[str, Callable] = {}


def _traced(function: Callable, tensors: dict, others: dict) -> Callable:
    """A function that calls an op; the same for the same, as tracing it takes long."""
    key = repr((function.__name__, tensors, others))
    if key not in _functions:

        def body(tensors):
            result = function(**tensors, **others)
            return None if isinstance(result, tf.Operation) else result

        concrete = tf.function(body, autograph=False).get_concrete_function(tensors)
        if len(_functions) > 500:
            _functions.clear()
        _functions[key] = concrete
    return _functions[key]


class Calls:
    """The calls of one number: what they are, and making them."""

    def __init__(self, seed: int, number: int):
        self._w = w = World(np.random.default_rng([seed, number]), f"fuzz_{seed}_{number}")
        family = w.choose([*["stateless"] * 4, "buffer", "tokens", "hop"])
        if family == "stateless":
            # Of some arguments there are two calls at a time, on the same variables.
            names = [w.choose(STATELESS)] * w.choose([1, 1, 1, 2])
        else:
            names = [w.choose(FAMILIES[family]) for _ in range(w.small(1, 6))]
        self.title = " ".join(names)
        self._names = names
        self._together = w.chance(0.2) and len(names) > 1
        self._seconds = w.choose([0.0, 0.0, 0.002, 0.02])
        self._cancels = w.chance(0.5)
        self._traced = w.chance(0.1)
        self._unexpected: list[BaseException] = []

    def run(self, verbose: bool) -> None:
        w = self._w
        waits, managers = [], []
        made: list[tuple[str, dict]] = []
        try:
            for i, name in enumerate(self._names):
                if i and made and name == made[0][0] and name in STATELESS:
                    again = dict(made[0][1])  # the same variables, in another order perhaps
                    changed = w.choose(list(again))
                    again[changed] = other(w, again[changed])
                    made.append((name, _bounded(again)))
                else:
                    made.append((name, arguments_of(w, name)))
        except (tf.errors.OpError, ValueError, TypeError) as error:
            if verbose:
                sys.stderr.write(f"not made: {error}\n")
        for name, arguments in made:
            if verbose:
                sys.stderr.write(f"{name}({arguments})\n")
            manager = cancellation.CancellationManager()
            call = self._call_of(name, arguments, manager)
            if name in WAITING or self._together:
                managers.append(manager)
                waits.append(threading.Thread(target=self._make, args=(call, verbose)))
                waits[-1].start()
            else:
                self._make(call, verbose)
        for thread in waits:
            thread.join(self._seconds)
        if self._cancels:
            for manager in managers:
                manager.start_cancel()
        w.destroy()
        for manager in managers:  # What does not wait for a resource, too.
            manager.start_cancel()
        for thread in waits:
            thread.join(PATIENCE)
        if self._unexpected:
            raise self._unexpected[0]

    def _call_of(self, name: str, arguments: dict, manager) -> Callable[[], object]:
        function = getattr(library, f"recsync_{name}")
        if name not in WAITING and not self._traced:
            return lambda: function(**arguments)

        def traced():
            # An eager op can't be cancelled; nor can one that a function calls with constants
            # alone, which is called while the function is optimized.
            tensors = _tensors(name, arguments)
            others = {n: a for n, a in arguments.items() if n not in tensors}
            specs = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), tensors)
            concrete = _traced(function, specs, others)
            return manager.get_cancelable_function(concrete)(tensors)

        return traced

    def _make(self, call: Callable[[], object], verbose: bool) -> None:
        try:
            call()
            said = "fine"
        except (tf.errors.OpError, ValueError, TypeError, OverflowError) as error:
            said = str(error)
        except SystemError as error:
            # An int too large for TensorFlow's conversion of an attribute, as CPython puts it.
            if not isinstance(error.__cause__, OverflowError):
                self._unexpected.append(error)
            said = repr(error)
        except BaseException as error:  # noqa: BLE001  (raised by the main thread)
            self._unexpected.append(error)
            said = repr(error)
        if verbose:
            sys.stderr.write(f"  {said}\n")


def limit_memory() -> None:
    """Has this process refused what would take more than MEMORY beside what it has."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))


def uncovered() -> list[str]:
    """Ops of the library, or inputs and attributes of theirs, that no call has."""
    missing = [name for name in ops() if name not in RECIPES]
    for name in set(ops()) & set(RECIPES):
        given = inspect.signature(getattr(library, f"recsync_{name}")).parameters
        arguments = set()
        for seed in range(30):
            world = World(np.random.default_rng(seed), f"cover_{name}_{seed}")
            arguments |= set(RECIPES[name](world))
            world.destroy()
        # Others are what the inputs say; a container is a name as another.
        missing += [f"{name}: {a}" for a in given if a not in arguments | {"name", "container"}]
        missing += [f"{name}: no argument {a}" for a in sorted(arguments - set(given))]
    return missing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("first", type=int)
    parser.add_argument("calls", type=int)
    parser.add_argument("--verbose", action="store_true")
    flags = parser.parse_args()
    tf.constant(1) + 1  # TensorFlow's threads are there, and count as its own memory.
    Calls(0, 0).run(verbose=False)
    limit_memory()
    for number in range(flags.first, flags.first + flags.calls):
        calls = Calls(flags.seed, number)
        sys.stdout.write(f"{number} {calls.title}\n")
        sys.stdout.flush()
        calls.run(flags.verbose)
    sys.stdout.write("end\n")


if __name__ == "__main__":
    main()
