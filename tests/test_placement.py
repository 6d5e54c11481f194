"""Tables are spread over the parameter servers evenly, completely and within their memory."""

import functools
import itertools
import json
import math
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_recsync.embedding.bin_packing import plan_placement
from tf_recsync.embedding.config import FeatureConfig, TableConfig, check_configs
from tf_recsync.embedding.placement import PlacementPlan, Shard
from tf_recsync.embedding.profile import profile_costs

# 26 tables as uneven as those of a click data set: two of them make up most of the rows.
SKEWED_ROWS = [
    *(9_000_000, 5_500_000, 900_000, 300_000, 280_000, 140_000, 90_000, 40_000, 12_000, 11_000),
    *(7_500, 5_600, 5_600, 3_100, 2_100, 1_400, 600, 580, 300, 100, 24, 18, 15, 10, 4, 3),
]


def table(name, rows=1000, dimension=4, **kwargs):
    return TableConfig(name, rows, dimension, **kwargs)


def tables_of(sizes, **kwargs):
    return [table(f"t{i}", rows, **kwargs) for i, rows in enumerate(sizes)]


def costs_of(costs):
    return {f"t{i}": cost for i, cost in enumerate(costs)}


def round_robin(tables, ps):
    """The plan that takes the servers in turn, without a look at the tables."""
    return PlacementPlan(
        ps, [Shard(t.name, 0, 1, t.rows, i % ps, t.bytes) for i, t in enumerate(tables)]
    )


def optimum(costs, ps):
    """The smallest largest load of all ways to place whole tables."""
    return min(
        np.bincount(places, costs, ps).max()
        for places in itertools.product(range(ps), repeat=len(costs))
    )


def counts(plan):
    return {name: len(plan.shards_of(name)) for name in plan.tables}


@pytest.mark.parametrize("ps", [2, 3, 4, 8, 16])
def test_skewed_tables_come_within_a_tenth_of_the_mean_and_beat_round_robin(ps):
    tables = tables_of(SKEWED_ROWS)
    plan = plan_placement(tables, ps)
    assert plan.imbalance <= 1.1
    assert round_robin(tables, ps).imbalance > 1.2
    assert plan.loads.sum() == pytest.approx(sum(t.bytes for t in tables))
    # Most tables remain whole.
    assert sum(count > 1 for count in counts(plan).values()) <= 6


def test_measured_costs_count_rather_than_sizes():
    costs = costs_of([8.0, 1.0, 1.0, 1.0, 1.0])
    plan = plan_placement(tables_of([10, 10**6, 10**6, 10**6, 10**6]), 3, costs)
    np.testing.assert_allclose(sum(plan.loads), 12)
    assert plan.loads.max() <= 4.4
    assert counts(plan) == {"t0": 2, "t1": 1, "t2": 1, "t3": 1, "t4": 1}


@pytest.mark.parametrize("unit", [5e-324, 1e-200, 1e300])
def test_the_unit_of_the_costs_does_not_matter(unit):
    costs = [8, 4, 2, 1, 1]
    plan = plan_placement(tables_of([1000] * 5), 3, costs_of([cost * unit for cost in costs]))
    assert counts(plan) == counts(plan_placement(tables_of([1000] * 5), 3, costs_of(costs)))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.integers(2, 3))
def test_whole_tables_are_within_four_thirds_of_the_optimum(costs, ps):
    tables = tables_of([1000] * len(costs), shards=1)
    plan = plan_placement(tables, ps, costs_of(costs))
    assert plan.loads.max() <= 4 / 3 * optimum(costs, ps) * (1 + 1e-9)


def test_swaps_find_the_optimum_that_placing_by_cost_misses():
    # By decreasing cost alone: 3 + 2 + 2 against 3 + 2.
    plan = plan_placement(tables_of([9] * 5, shards=1), 2, costs_of([3, 3, 2, 2, 2]))
    assert plan.loads.tolist() == [6, 6]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.just(0.0) | st.floats(1e-6, 1000), min_size=1, max_size=12),
    st.integers(1, 6),
)
def test_the_bound_holds_whenever_all_tables_may_be_split(costs, ps):
    plan = plan_placement(tables_of([1000] * len(costs)), ps, costs_of(costs))
    assert plan.imbalance <= 1.1 * (1 + 1e-6)
    for name in plan.tables:
        shards = plan.shards_of(name)
        assert len({shard.ps for shard in shards}) == len(shards)


def test_tables_that_balance_by_themselves_are_not_split():
    assert set(counts(plan_placement(tables_of([5, 4, 3, 3, 3]), 2)).values()) == {1}
    assert set(counts(plan_placement(tables_of([1000] * 12), 4)).values()) == {1}


@pytest.mark.parametrize(
    "costs, ps, fewest",
    [
        ([1], 4, 4),
        ([1, 1], 3, 6),  # thirds of both: halves cannot be even
        ([139, 137, 216], 2, 4),
        ([205, 248, 114, 142, 292], 4, 7),
        ([388, 146, 266, 159], 4, 8),
    ],
)
def test_no_more_shards_than_the_bound_needs(costs, ps, fewest):
    """The fewest shards are known from trying all splits and placements."""
    plan = plan_placement(tables_of([1000] * len(costs)), ps, costs_of(costs))
    assert plan.imbalance <= 1.1
    assert len(plan.shards) == fewest


def test_one_server_holds_every_table_whole():
    plan = plan_placement(tables_of(SKEWED_ROWS), 1)
    assert len(plan.shards) == len(SKEWED_ROWS)
    assert plan.imbalance == 1


def test_a_table_that_may_not_be_split_does_not_split_the_others():
    plan = plan_placement([table("big", 10_000, shards=1), *tables_of([100, 100, 100])], 3)
    assert set(counts(plan).values()) == {1}
    assert plan.loads.max() == table("big", 10_000).bytes


def test_a_table_has_no_more_shards_than_rows():
    plan = plan_placement(
        [table("tiny", 2), *tables_of([100] * 4)], 4, {"tiny": 9} | costs_of([1] * 4)
    )
    assert counts(plan)["tiny"] == 2


def test_explicit_shards_are_honoured_on_different_servers():
    plan = plan_placement([table("a", shards=3), table("b", shards=4), table("c", shards=1)], 4)
    assert counts(plan) == {"a": 3, "b": 4, "c": 1}
    for name in "abc":
        assert len({shard.ps for shard in plan.shards_of(name)}) == len(plan.shards_of(name))


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 5), st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_every_row_of_a_table_is_in_exactly_one_shard(data, ps, sizes):
    tables = []
    for i, rows in enumerate(sizes):
        shards = data.draw(st.none() | st.integers(1, min(rows, ps)))
        tables.append(table(f"t{i}", rows, shards=shards))
    plan = plan_placement(tables, ps)
    assert plan.tables == tuple(t.name for t in tables)
    for t in tables:
        found = [
            local * shard.count + shard.index
            for shard in plan.shards_of(t.name)
            for local in range(shard.rows)
        ]
        assert sorted(found) == list(range(t.rows))


def test_the_same_arguments_give_the_same_plan():
    tables = tables_of(SKEWED_ROWS)
    assert plan_placement(tables, 8) == plan_placement(list(tables), 8)
    assert plan_placement(tables, 8) != plan_placement(tables, 9)


def test_tables_without_any_cost_are_spread_by_memory():
    plan = plan_placement(tables_of([1000] * 8), 4, costs_of([0] * 8))
    assert plan.imbalance == 1
    assert len(set(plan.memory)) == 1


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 200), st.floats(0, 10), st.booleans()), min_size=1, max_size=8
    ),
    st.integers(1, 4),
    st.floats(1.2, 3),
)
def test_no_server_gets_more_than_its_memory(sizes, ps, slack):
    tables = [table(f"t{i}", rows, shards=1 if w else None) for i, (rows, _, w) in enumerate(sizes)]
    limit = int(slack * sum(2 * t.bytes for t in tables) / ps)
    try:
        plan = plan_placement(tables, ps, costs_of([cost for _, cost, _ in sizes]), limit)
    except ValueError as error:
        # Only pieces that cannot be made smaller are an excuse.
        spare = limit - sum(2 * t.bytes for t in tables) / ps
        pieces = [2 * t.bytes if t.shards else 32 * -(-t.rows // ps) for t in tables]
        assert max(pieces) > spare, error
        return
    assert plan.memory.max() <= limit
    assert plan.memory.sum() == sum(2 * t.bytes for t in tables)


def test_memory_counts_values_accumulators_and_overhead():
    tables = [table("a", rows=10, dimension=4, dtype="bfloat16")]
    arguments = {"bytes_per_row_overhead": 3, "slots": 2}
    plan = plan_placement(tables, 1, memory_limit=10 * (8 + 32 + 3), **arguments)
    assert plan.memory.tolist() == [10 * (8 + 32 + 3)]
    with pytest.raises(ValueError, match="'a': its 430 bytes do not fit into memory_limit=429"):
        plan_placement(tables, 1, memory_limit=429, **arguments)


def test_memory_splits_a_table_that_costs_nothing():
    plan = plan_placement([table("a", 1000), table("b", 10)], 4, {"a": 0, "b": 1}, 32 * 400)
    assert counts(plan)["a"] == 3
    assert plan.memory.max() <= 32 * 400


def test_memory_may_be_any_number_of_bytes():
    tables = [table("a", 1000), table("b", 10)]  # The first one has to be split.
    for limit in (32.0 * 600, 32 * 600 + 0.5, np.float32(32 * 600), np.int64(32 * 600)):
        assert plan_placement(tables, 2, memory_limit=limit) == plan_placement(
            tables, 2, memory_limit=32 * 600
        )
    assert plan_placement(tables, 2, memory_limit=math.inf) == plan_placement(tables, 2)
    with pytest.raises(ValueError, match="'a': its 32000 bytes do not fit into memory_limit=9600"):
        plan_placement(tables, 2, memory_limit=9600.9)


def test_room_is_found_where_placing_by_cost_alone_fails():
    # By cost the two small tables take one server each and leave no room for the large one.
    tables = tables_of([30, 30, 100], shards=1)
    plan = plan_placement(tables, 2, costs_of([9, 8, 1]), memory_limit=32 * 100)
    assert sorted(plan.memory) == [32 * 60, 32 * 100]


@pytest.mark.parametrize(
    "tables, message",
    [
        ([table("a", 1000)], r"'a': its 32000 bytes .* memory_limit=9600 .* in 2 shards"),
        ([table("a", 400, shards=1)], r"'a': its 12800 bytes .* memory_limit=9600 .* in 1 shards"),
        (tables_of([250] * 3, shards=1), r"3 tables take 24000 bytes, the largest, 't0', 8000"),
    ],
)
def test_tables_too_large_for_the_memory_are_named(tables, message):
    with pytest.raises(ValueError, match=message):
        plan_placement(tables, 2, memory_limit=9600)


def test_a_saved_plan_is_loaded_again(tmp_path):
    plan = plan_placement(tables_of(SKEWED_ROWS), 3, costs_of(np.linspace(0.1, 1 / 3, 26)))
    plan.save(tmp_path / "plan.json")
    assert PlacementPlan.load(str(tmp_path / "plan.json")) == plan
    content = json.loads((tmp_path / "plan.json").read_text())
    assert (content["version"], content["ps"]) == (1, 3)


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "not a placement plan"),
        ("[]", "not a placement plan"),
        ('{"ps": 1}', "not a placement plan: 'version'"),
        ('{"version": 2, "ps": 1, "shards": []}', "version 2; this release reads version 1"),
        ('{"version": 1, "ps": 0, "shards": []}', "not a placement plan: ps must be"),
        ('{"version": 1, "ps": 1, "shards": [{"table": "a"}]}', "not a placement plan"),
    ],
)
def test_a_file_that_is_no_plan_is_rejected_by_name(tmp_path, text, message):
    path = tmp_path / "wrong.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        PlacementPlan.load(path)
    assert str(path) in str(error.value)


def test_a_plan_prints_load_memory_and_shards_of_each_server():
    lines = str(plan_placement(tables_of([1000, 10]), 2)).splitlines()
    assert lines[0] == "2 tables in 3 shards on 2 PS, largest load 1.01 times the mean"
    assert lines[2].split() == ["0", "8160", "15.9", "KiB", "t0[0/2],", "t1"]
    assert lines[3].split() == ["1", "8000", "15.6", "KiB", "t0[1/2]"]


@pytest.mark.parametrize(
    "shards, message",
    [
        ([("a", 0, 1, 5, 2)], r"shard a: ps=2 must be from 0 to 1"),
        ([("a", 0, 2, 5, 0)], r"'a': its shards must be all"),
        ([("a", 0, 1, 5, 0), ("a", 0, 1, 5, 1)], r"'a': its shards must be all"),
        ([("a", 0, 2, 5, 0), ("a", 1, 2, 3, 1)], r"'a': shards with \[5, 3\] rows"),
        ([("a", 0, 2, 5, 1), ("a", 1, 2, 5, 1)], r"'a': its shards must be on different PS"),
    ],
)
def test_a_plan_that_loses_or_repeats_rows_is_rejected(shards, message):
    with pytest.raises(ValueError, match=message):
        PlacementPlan(2, [Shard(*shard, cost=1.0) for shard in shards])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"index": 2}, r"index=2 must be from 0 to 1"),
        ({"count": 0}, r"count=0 must be at least 1"),
        ({"ps": -1}, r"ps=-1"),
        ({"cost": float("nan")}, r"cost=nan"),
    ],
)
def test_a_shard_out_of_range_is_rejected(arguments, message):
    good = {"table": "a", "index": 0, "count": 2, "rows": 5, "ps": 0, "cost": 1.0}
    with pytest.raises(ValueError, match=message):
        Shard(**(good | arguments))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"tables": []}, "at least one table"),
        ({"tables": [table("a"), table("a")]}, r"\['a'\]"),
        ({"tables": [table("a", shards=3)]}, r"table 'a': shards=3 must be at most ps=2"),
        ({"ps": 0}, "ps must be .*, got 0"),
        ({"ps": 1.5}, "ps must be .*, got 1.5"),
        ({"costs": {}}, "'a' is missing"),
        ({"costs": {"a": 1, "b": 1}}, r"costs\['b'\]"),
        ({"costs": {"a": -1}}, r"costs\['a'\]=-1"),
        ({"costs": {"a": float("inf")}}, r"costs\['a'\]=inf"),
        ({"memory_limit": 0}, "memory_limit must be None or .* at least 1, not 0"),
        ({"memory_limit": "8GB"}, "memory_limit must be None or a number of bytes, .* '8GB'"),
        ({"slots": -1}, "slots must be .*, got -1"),
        ({"bytes_per_row_overhead": -1}, "bytes_per_row_overhead must be .*, got -1"),
        ({"tables": table("a")}, "tables=.*: must be a sequence of TableConfigs, not a single"),
        ({"tables": [table("a"), "b"]}, "tables=.*: must have TableConfigs, not 'b'"),
        ({"together": ["a"]}, r"together='a': must be a sequence of texts.* as \('a',\)"),
    ],
)
def test_wrong_arguments_of_the_planner_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan_placement(**({"tables": [table("a")], "ps": 2} | arguments))


def test_a_plan_for_an_iterator_of_tables_and_numbers_of_numpy_can_be_saved():
    tables = [table("a"), table("b")]
    plan = plan_placement(iter(tables), np.int64(2), costs={"a": np.float32(1), "b": 2})
    assert json.loads(json.dumps(plan.get_config()))["ps"] == 2
    assert plan == plan_placement(tables, 2, costs={"a": 1, "b": 2})


def test_shards_of_an_unknown_table_are_an_error():
    with pytest.raises(ValueError, match=r"'b': must be one of \['a'\]"):
        plan_placement([table("a")], 1).shards_of("b")


def test_profiled_costs_are_the_median_seconds_of_each_table(monkeypatch):
    tables = [table("slow"), table("fast")]
    features = [FeatureConfig(n, t) for n, t in [("x", "slow"), ("y", "fast"), ("z", "slow")]]
    batches = [{"x": np.array([[1], [2]]), "y": np.array([3]), "z": [4], "w": None}] * 5
    calls, now = [], [5.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def lookup(name, ids):
        # The first batch is slow, as that of a real run, and one is interrupted.
        now[0] += 0.25 if name == "slow" else 0.125
        now[0] += {0: 64.0, 1: 64.0, 5: 8.0}.get(len(calls), 0.0)
        calls.append((name, ids.tolist()))

    costs = profile_costs(tables, features, batches, lookup)
    assert calls == [("slow", [1, 2, 4]), ("fast", [3])] * 5
    assert costs == {"slow": 0.25, "fast": 0.125}
    assert list(costs) == ["slow", "fast"]


@pytest.mark.parametrize(
    "batches, message",
    [
        ([], "at least one batch"),
        ([{"x": np.array([1])}, {"v": 1}], r"batch 1: the feature 'x' is not among \['v'\]"),
        ([{"x": np.array([0.5])}], "batch 0: the ids of the feature 'x' must be integers"),
    ],
)
def test_batches_that_cannot_be_profiled_are_rejected(batches, message):
    with pytest.raises(ValueError, match=message):
        profile_costs([table("a")], [FeatureConfig("x", "a")], batches, lambda *_: None)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"name": ""}, "name=''"),
        ({"rows": 0}, "rows must be an integer of at least 1, got 0"),
        ({"rows": True}, "rows must be .*, got True"),
        ({"dimension": 1.5}, "dimension must be .*, got 1.5"),
        ({"combiner": "max"}, "combiner='max': must be one of 'sum', 'mean', 'sqrtn'"),
        ({"dtype": "int8"}, "dtype='int8': must be one of 'float32', 'bfloat16'"),
        ({"dtype": tf.float16}, "dtype='float16': must be one of 'float32', 'bfloat16'"),
        ({"dtype": None}, "dtype=None: must be one of 'float32', 'bfloat16'"),
        ({"shards": 0}, "shards must be .*, got 0"),
        ({"shards": 11}, "shards=11: must be None or at most rows=10"),
        ({"rows": 2**60}, r"rows=1152921504606846976 .* less than 2\*\*63 bytes, not 9.2e\+18"),
    ],
)
def test_wrong_arguments_of_a_table_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        TableConfig(**({"name": "a", "rows": 10, "dimension": 2} | arguments))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"name": ""}, "name=''"),
        ({"table": None}, "table=None"),
        ({"out_of_range": "drop"}, "out_of_range='drop': must be one of 'error', 'clip', 'hash'"),
    ],
)
def test_wrong_arguments_of_a_feature_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        FeatureConfig(**({"name": "x", "table": "a"} | arguments))


@pytest.mark.parametrize(
    "initializer",
    [
        "zeros",
        keras.initializers.RandomNormal(stddev=0.5, seed=3),
        {"class_name": "Constant", "config": {"value": 0.25}},
    ],
)
def test_a_table_survives_its_configuration_as_json(initializer):
    original = table("a", initializer=initializer, combiner="sqrtn", shards=2, dtype="bfloat16")
    copy = TableConfig.from_config(json.loads(json.dumps(original.get_config())))
    assert copy == original
    assert hash(copy) == hash(original)
    assert copy != table("a", initializer="ones", combiner="sqrtn", shards=2, dtype="bfloat16")
    np.testing.assert_array_equal(
        *(keras.initializers.get(t.initializer)((2, 3)) for t in (original, copy))
    )


def test_a_type_may_be_that_of_tensorflow_or_numpy():
    for dtype in (tf.bfloat16, keras.dtype_policies.get("bfloat16").compute_dtype):
        assert table("a", dtype=dtype) == table("a", dtype="bfloat16")
    for dtype in (tf.float32, np.dtype("float32"), np.float32):
        assert json.dumps(table("a", dtype=dtype).get_config()) == json.dumps(
            table("a").get_config()
        )


def test_a_callable_without_a_configuration_is_equal_to_itself_alone():
    class Zeros:
        def __call__(self, rows, dtype):
            return np.zeros([len(rows), 4], dtype)

    for initializer in (functools.partial(np.zeros), Zeros()):
        one = table("a", initializer=initializer)
        assert one == table("a", initializer=initializer)
        assert one != table("a", initializer="zeros") and one != table("a", initializer=Zeros())
        with pytest.raises(ValueError, match="table 'a': initializer .* has no configuration"):
            one.get_config()


def test_a_feature_survives_its_configuration():
    assert json.dumps(FeatureConfig("x", "a", padding=np.int64(-1)).get_config())
    feature = FeatureConfig("x", "a", "clip")
    assert FeatureConfig.from_config(json.loads(json.dumps(feature.get_config()))) == feature
    assert feature != FeatureConfig("x", "a", "hash")


def test_the_memory_of_a_table_follows_its_type():
    assert table("a", 10, 4).bytes == 160
    assert table("a", 10, 4, dtype="bfloat16").bytes == 80


@pytest.mark.parametrize(
    "tables, features, message",
    [
        ([], [("x", "a")], "at least one table"),
        (["a"], [], "at least one feature"),
        (["a", "a"], [("x", "a")], r"tables: every name may occur once, not \['a'\]"),
        (["a"], [("x", "a"), ("x", "a")], r"features: every name may occur once, not \['x'\]"),
        (["a"], [("x", "b")], r"feature 'x': its table 'b' is not among the tables \['a'\]"),
        (["a", "b"], [("x", "a")], r"table 'b': none of the features \['x'\]"),
    ],
)
def test_tables_and_features_that_do_not_match_are_named(tables, features, message):
    with pytest.raises(ValueError, match=message):
        check_configs([table(name) for name in tables], [FeatureConfig(*f) for f in features])
