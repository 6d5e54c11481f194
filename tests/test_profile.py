"""Costs measured by our kernels, and the placement that is planned from them, on a cluster."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_recsync as recsync
from tf_recsync import ops
from tf_recsync.embedding import profile
from tf_recsync.layers import EmbeddingCollection, FeatureConfig, TableConfig

BATCH = 256
# Few, many or very many ids of an example, in tables whose sizes say nothing about it. By turns,
# the first of three servers has most; no table has much more than a third of all.
IDS = {"a": 40, "b": 1, "c": 5, "d": 30, "e": 10, "f": 1, "g": 20, "h": 3}
SIZES = [20_000, 90_000, 15_000, 60_000, 12_000, 70_000, 10_000, 50_000]
ROWS = dict(zip(IDS, SIZES, strict=True))


def tables_and_features(dimension=8, **kwargs):
    tables = [TableConfig(name, rows, dimension, **kwargs) for name, rows in ROWS.items()]
    return tables, [FeatureConfig(f"ids_{name}", name) for name in ROWS]


def data(batches: int = 8) -> tf.data.Dataset:
    rng = np.random.default_rng(2)
    n = BATCH * batches
    features = {f"ids_{t}": rng.integers(0, ROWS[t], (n, k)) for t, k in IDS.items()}
    labels = rng.integers(0, 2, (n, 1)).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((features, labels)).batch(BATCH)


def imbalance(loads: np.ndarray) -> float:
    return loads.max() / loads.mean()


def test_a_plan_from_a_profile_is_what_the_servers_hold(clusters, tmp_path):
    strategy = clusters.strategy(workers=1, ps=3)
    tables, features = tables_and_features()
    optimizer = recsync.optimizers.Adagrad(0.1)
    costs = recsync.profile_costs(tables, features, data(), optimizer=optimizer)
    assert not optimizer.built
    plan = recsync.plan_placement(tables, 3, costs)
    assert plan.imbalance <= 1.1
    round_robin = np.bincount(np.arange(len(tables)) % 3, list(costs.values()))
    assert imbalance(round_robin) > 1.3
    # What the clock said, against what is known: rows looked up for an example.
    rows = np.zeros(3)
    for shard in plan.shards:
        rows[shard.ps] += IDS[shard.table] / shard.count
    by_turns = np.bincount(np.arange(len(tables)) % 3, list(IDS.values()))
    assert imbalance(rows) < 1.3 < 2 < imbalance(by_turns)

    plan.save(tmp_path / "plan.json")
    plan = recsync.PlacementPlan.load(tmp_path / "plan.json")
    with strategy.scope():
        inputs = {f"ids_{t}": keras.Input((k,), dtype="int64") for t, k in IDS.items()}
        layer = EmbeddingCollection(tables, features, placement=plan, concatenate=True)
        model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(layer(inputs)))
        model.compile(recsync.optimizers.Adagrad(0.1), "binary_crossentropy")
    assert layer.placement == plan
    held = {ps: set() for ps in range(3)}
    for variable in layer.variables:
        ps = tf.DeviceSpec.from_string(variable.value.device).task
        held[ps] |= {(piece.table, piece.index) for piece in variable.physical_table.pieces}
    assert held == {ps: {(s.table, s.index) for s in plan.shards if s.ps == ps} for ps in range(3)}
    before = layer.table_values("a")
    history = model.fit(data(), verbose=0).history
    assert np.isfinite(history["loss"]).all()
    assert not np.array_equal(layer.table_values("a"), before)


@pytest.mark.full
def test_more_rows_cost_more_with_and_without_updates():
    tables, features = tables_and_features()
    lookups = recsync.profile_costs(tables, features, data())
    both = recsync.profile_costs(tables, features, data(), optimizer=recsync.optimizers.Adam())
    for costs in (lookups, both):
        assert list(costs) == list(ROWS)
        assert costs["a"] > costs["e"] > costs["b"]
        # 40 rows for an example against 5.
        assert 4 < costs["a"] / costs["c"] < 16
    assert all(both[table] > lookups[table] for table in ("a", "d", "g"))


def test_kernels_may_use_all_threads_again_when_costs_are_known():
    before = int(ops.limit_parallelism(3))
    recsync.profile_costs([TableConfig("a", 10, 4)], [FeatureConfig("x", "a")], [{"x": [1, 2]}])
    assert int(ops.limit_parallelism(before)) == 3
    for wrong in (0, -1, [1, 2]):
        with pytest.raises(tf.errors.InvalidArgumentError, match="limit must be"):
            ops.limit_parallelism(wrong)
    with pytest.raises(ValueError, match="rank 0"):
        tf.function(lambda: ops.limit_parallelism([1, 2]))()


@pytest.mark.full
def test_wide_rows_cost_more():
    narrow, wide = tables_and_features(4), tables_and_features(256)
    costs = [recsync.profile_costs(*tables, data())["a"] for tables in (narrow, wide)]
    assert costs[1] > 1.5 * costs[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_form_of_ids_and_huge_tables_are_profiled(dtype):
    tables = [TableConfig("huge", 10**12, 4, combiner="mean", shards=4, dtype=dtype)]
    features = [FeatureConfig(name, "huge", "hash") for name in ("one", "bag", "ragged", "sparse")]
    ragged = tf.ragged.constant([[1, -2, 3], [], [10**15]], dtype=tf.int64)
    batch = {
        "one": np.array([1, 2, 3]),
        "bag": tf.constant([[1, 2], [3, 4], [5, 6]]),
        "ragged": ragged,
        "sparse": ragged.to_sparse(),
        "unknown": "ignored",
    }
    optimizer = recsync.optimizers.Adam(0.1, swap=recsync.Swap(period=3, decay=0.5))
    for batches in ([batch], [(batch, 1)] * 3):
        costs = recsync.profile_costs(tables, features, batches, optimizer=optimizer)
        assert 0 <= costs["huge"] < 0.1


def test_the_stand_in_repeats_rows_as_the_batches_do():
    table, feature = TableConfig("a", 10**9, 4, combiner="mean"), FeatureConfig("x", "a")
    ids = [[[7, 7], [10**8, 3]], [[3, 10**9 - 1], [7, 3]]]
    batches = [{"x": np.array(batch)} for batch in ids]
    first, second = profile._bags(table, [feature], batches)
    found = np.concatenate([first.ids, second.ids])
    assert sorted(set(found)) == [0, 1, 2, 3]
    same = found[:, None] == found
    flat = np.array(ids).ravel()
    np.testing.assert_array_equal(same, flat[:, None] == flat)
    assert first.bags.numpy().tolist() == [0, 0, 1, 1]
    assert first.scales.numpy().tolist() == [0.5] * 4


@pytest.mark.parametrize("combiner", ["sum", None])
def test_padding_is_not_looked_up_and_ids_of_sequences_one_by_one(combiner):
    table = TableConfig("a", 100, 4, combiner=combiner)
    features = [FeatureConfig("x", "a", padding=-1), FeatureConfig("y", "a")]
    batch = {"x": np.array([[7, -1], [8, 9]]), "y": np.array([7, 3])}
    (request,) = profile._bags(table, features, [batch])
    assert request.ids.shape == (5,) and len(set(request.ids.numpy())) == 4
    bags = None if request.bags is None else request.bags.numpy().tolist()
    assert bags == ([0, 1, 1, 2, 3] if combiner else None)
    looked_up = []
    recsync.profile_costs([table], features, [batch], lambda _, ids: looked_up.extend(ids))
    assert looked_up == [7, 8, 9, 7, 3]


def test_strings_are_looked_up_in_tables_with_keys():
    tables = [TableConfig(name, 100_000, 8, keys="any") for name in ("users", "films")]
    features = [FeatureConfig("user", "users"), FeatureConfig("film", "films", padding="")]
    films = np.array([[f"{n}-{i}" for i in range(20)] + [""] * 30 for n in range(BATCH)])
    batch = {"user": tf.constant([f"{n}" for n in range(BATCH)]), "film": tf.constant(films)}
    costs = recsync.profile_costs(tables, features, [batch], optimizer=recsync.optimizers.SGD(0.1))
    assert costs["films"] > costs["users"]
    found = {}
    arrays = {"user": np.array([f"{n}" for n in range(BATCH)]), "film": films}
    for given in (batch, arrays):
        recsync.profile_costs(
            tables, features, [given], lambda name, ids: found.update({name: ids})
        )
        assert found["users"].tolist() == [b"%d" % n for n in range(BATCH)]
        assert len(found["films"]) == 20 * BATCH and b"" not in found["films"]


def test_a_batch_without_ids_costs_nothing_to_speak_of():
    empty = {"x": tf.RaggedTensor.from_row_lengths(tf.zeros([0], tf.int64), [0, 0])}
    costs = recsync.profile_costs(
        [TableConfig("a", 10, 4)],
        [FeatureConfig("x", "a")],
        [empty],
        optimizer=recsync.optimizers.SGD(0.1),
    )
    assert 0 <= costs["a"] < 1e-3


def test_no_more_batches_than_asked_for_are_taken():
    taken = []

    def endless():
        while True:
            taken.append(1)
            yield {"x": np.array([1, 2])}

    recsync.profile_costs([TableConfig("a", 10, 4)], [FeatureConfig("x", "a")], endless(), steps=3)
    assert len(taken) == 3


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"batches": []}, "at least one batch"),
        ({"batches": [np.zeros(3)]}, "a batch must be a mapping .* not ndarray"),
        ({"batches": [({"y": [1]}, 0)]}, r"batch 0: the feature 'x' is not among \['y'\]"),
        ({"batches": [{"x": tf.ragged.constant([[0.5]])}]}, "'x' must be integers, not float32"),
        (
            {"batches": [{"x": tf.constant(["a"])}]},
            "'x' must be integers, not string; a table with keys='any' takes strings",
        ),
        ({"steps": 0}, "steps must be an integer of at least 1, got 0"),
        ({"optimizer": keras.optimizers.SGD()}, "must be an optimizer of tf_recsync.optimizers"),
        (
            {"optimizer": recsync.optimizers.SGD(), "lookup": lambda *_: None},
            "optimizer: must be None where a lookup",
        ),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    good = {"batches": [{"x": np.array([1])}]}
    with pytest.raises(ValueError, match=message):
        recsync.profile_costs(
            [TableConfig("a", 10, 4)], [FeatureConfig("x", "a")], **(good | arguments)
        )


def test_ids_out_of_range_name_feature_and_table():
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="feature x has id 10 .* table a has rows"
    ):
        recsync.profile_costs(
            [TableConfig("a", 10, 4)], [FeatureConfig("x", "a")], [{"x": np.array([10])}]
        )


def test_a_strategys_scope_is_refused():
    with (
        tf.distribute.OneDeviceStrategy("/cpu:0").scope(),
        pytest.raises(ValueError, match="outside of a strategy's scope"),
    ):
        recsync.profile_costs(
            [TableConfig("a", 10, 4)], [FeatureConfig("x", "a")], [{"x": np.array([1])}]
        )
