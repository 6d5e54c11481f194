"""Bad inputs of the ops fail by name and harm nothing; good ones harm no reader."""

import re
import threading

import numpy as np
import pytest
import tensorflow as tf
from test_update_ops import COUNTERS, RNG, State, pull, push

from tf_recsync import ops

INVALID = tf.errors.InvalidArgumentError


def unassigned(dtype=tf.float32, shape=()):
    return tf.raw_ops.VarHandleOp(dtype=dtype, shape=shape, shared_name="", name="never_assigned")


def variable(shape, dtype=tf.int64):
    return tf.Variable(tf.zeros(shape, dtype))


def handle(shape, dtype=tf.int64, kept=[]):  # noqa: B006  (a handle does not keep its variable)
    kept.append(variable(shape, dtype))
    return kept[-1].handle


def case(name, message, **changes):
    return pytest.param(message, lambda s: {k: v(s) for k, v in changes.items()}, id=name)


def const(value, *args):
    return lambda _: tf.constant(value, *args)


def plain(value):
    return lambda _: value


# What an update of either kind must refuse; each name is the change from a good update.
COMMON = [
    case(
        "a learning rate for each variable",
        "learning_rate must be a scalar",
        learning_rate=const([0.1]),
    ),
    case("a vector of steps", "global_step must be a scalar", global_step=const([1], tf.int64)),
    case("step 0", "global_step .* 0", global_step=plain(0)),
    case("a negative step", "global_step .* -3", global_step=plain(-3)),
    case(
        "a matrix of versions",
        "pulled_versions must be a vector",
        pulled_versions=const([[0]], tf.int64),
    ),
    case(
        "too many versions",
        "pulled_versions must hold . versions or none, not 5",
        pulled_versions=const([0] * 5, tf.int64),
    ),
    case("a negative period", "swap_period .* -1", swap_period=plain(-1)),
    case("a decay of 0", "swap_decay .* 0", swap_decay=plain(0.0)),
    case("a decay above 1", "swap_decay .* 1.5", swap_decay=plain(1.5)),
    case("a decay that is no number", "swap_decay .* nan", swap_decay=plain(float("nan"))),
    case(
        "an offset before the first step",
        r"global_step \+ swap_offset must be at least 0, not 1 \+ -2",
        swap_period=plain(5),
        swap_offset=plain(-2),
        last_periods=lambda s: [s.period.handle],
    ),
    case("an unknown weight", "staleness_decay .* not linear", staleness_decay=plain("linear")),
    case("a power of 0", "staleness_power .* 0", staleness_power=plain(0.0)),
    case("a baseline below 1", "staleness_baseline .* 0.5", staleness_baseline=plain(0.5)),
    case("a negative iota", "staleness_iota .* -1", staleness_iota=plain(-1.0)),
    case(
        "an infinite sensitivity",
        "update_sensitivity .* inf",
        update_sensitivity=plain(float("inf")),
        last_updates=lambda s: [s.length.handle],
    ),
    case("a negative deviation", "target_deviation .* -1", target_deviation=plain(-1.0)),
    case("a negative mean", "target_mean .* -1", target_mean=plain(-1.0)),
    case("a window of 0 pushes", "deviation_window .* 0", deviation_window=plain(0)),
    case("a negative epsilon", "epsilon .* -1", epsilon=plain(-1.0)),
    case(
        "no periods with SWAP",
        "last_periods must hold 1 variables .*, not 0",
        swap_period=plain(5),
        last_periods=plain([]),
    ),
    case(
        "periods without SWAP",
        "last_periods must hold 0 variables .*, not 1",
        last_periods=lambda s: [s.period.handle],
    ),
    case(
        "two periods",
        "last_periods must hold 1 variables .*, not 2",
        swap_period=plain(5),
        last_periods=lambda s: [s.period.handle, s.version.handle],
    ),
    case(
        "no lengths with sensitivity",
        "last_updates must hold 1 variables .*, not 0",
        update_sensitivity=plain(1.0),
        last_updates=plain([]),
    ),
    case(
        "lengths without sensitivity",
        "last_updates must hold 0 variables .*, not 1",
        last_updates=lambda s: [s.length.handle],
    ),
    case(
        "lengths of another type",
        "last_updates must be a variable of float, not int(32|64)",
        update_sensitivity=plain(1.0),
        last_updates=lambda s: [s.period.handle],
    ),
    case(
        "periods of another shape",
        r"last_periods must have shape .*, not \[9\]",
        swap_period=plain(5),
        last_periods=lambda s: [handle([9], s.period.dtype)],
    ),
    case(
        "periods of another type",
        "last_periods must be a variable of int(32, not int64|64, not int32)",
        swap_period=plain(5),
        last_periods=lambda s: [
            handle(s.period.shape, tf.int64 if s.period.dtype == tf.int32 else tf.int32)
        ],
    ),
]
DENSE = [
    case(
        "a short gradient",
        "gradient must hold the variables' 6 elements, not 5",
        gradient=const([1.0] * 5),
    ),
    case(
        "a long gradient",
        "gradient must hold the variables' 6 elements, not 7",
        gradient=const([1.0] * 7),
    ),
    case(
        "a gradient of the variable's shape",
        "gradient must be a vector",
        gradient=const([[1.0] * 3] * 2),
    ),
    case(
        "a version of the future",
        r"pulled_versions holds 1, which is not in \[0, 0\]",
        pulled_versions=const([1], tf.int64),
    ),
    case("a negative version", "pulled_versions .* -1", pulled_versions=const([-1], tf.int64)),
    case(
        "a variable of doubles",
        "variable.* must be .* of float, not double",
        variables=lambda s: [handle([2, 3], tf.float64)],
    ),
    case(
        "accumulators of another shape",
        r"accumulator must have shape \[2,3\], not \[3,2\]",
        accumulators=lambda s: [handle([3, 2], tf.float32)],
    ),
    case(
        "versions of another type",
        "versions must be a variable of int64, not float",
        versions=lambda s: [handle([], tf.float32)],
    ),
    case(
        "a version for each row",
        r"versions must have shape \[\], not \[2\]",
        versions=lambda s: [handle([2])],
    ),
    case(
        "few counters",
        rf"counters must have shape \[{COUNTERS}\], not \[4\]",
        counters=lambda s: [handle([4])],
    ),
    case(
        "the variable as its accumulator",
        "the same variable .* twice",
        accumulators=lambda s: [s.value.handle],
    ),
    case(
        "a variable never assigned",
        r"variables\[0\] \(.*\) is not an initialized variable",
        variables=lambda s: [unassigned(shape=(2, 3))],
    ),
    case(
        "a version never assigned",
        r"versions\[0\] \(.*\) is not an initialized variable",
        versions=lambda s: [unassigned(tf.int64)],
    ),
]
ROWS = [
    case(
        "a negative row",
        r"indices\[1\] = -1 is not a row of \[0, 2\)",
        indices=const([0, -1], tf.int64),
    ),
    case(
        "a row beyond the table",
        r"indices\[0\] = 2 is not a row of \[0, 2\)",
        indices=const([2, 0]),
    ),
    case("a matrix of rows", "indices must be a vector", indices=const([[0, 1]])),
    case(
        "a short gradient",
        "gradient must hold the rows' 6 elements, not 5",
        gradient=const([1.0] * 5),
    ),
    case(
        "counts of other sums",
        "counts must add up to the 2 indices, not 1",
        counts=const([1], tf.int64),
    ),
    case(
        "a negative count",
        "counts must add up to the 2 indices, not -2",
        counts=const([-2], tf.int64),
    ),
    case(
        "counts of more tables",
        r"counts must have shape \[1\], not \[2\]",
        counts=const([1, 1], tf.int64),
    ),
    case(
        "a version of the future",
        r"pulled_versions holds 4, which is not in \[0, 0\]",
        pulled_versions=const([0, 4], tf.int64),
    ),
    case("a negative version", "pulled_versions .* -1", pulled_versions=const([0, -1], tf.int64)),
    case(
        "a table of doubles",
        "variables? must be a variable of float or bfloat16, not double",
        variables=lambda s: [handle([2, 3], tf.float64)],
    ),
    case(
        "a table without rows",
        "a table must have rows",
        variables=lambda s: [handle([], tf.float32)],
    ),
    case(
        "one version for the table",
        r"versions must have shape \[2\], not \[\]",
        versions=lambda s: [handle([])],
    ),
    case(
        "few counters",
        rf"counters must have shape \[{COUNTERS}\], not \[4\]",
        counters=lambda s: [handle([4])],
    ),
    case(
        "the table as its accumulator",
        "the same variable .* twice",
        accumulators=lambda s: [s.value.handle],
    ),
    case(
        "a table never assigned",
        r"variables\[0\] \(.*\) is not an initialized variable",
        variables=lambda s: [unassigned(shape=(2, 3))],
    ),
]


def check_refusal(state, message, changes, good, ids=None):
    before = state.everything()
    with pytest.raises(INVALID) as failure:
        push("adagrad", state, **(good | {"ids": ids} | changes(state)))
    assert re.search(message, str(failure.value)), failure.value
    for old, new in zip(before, state.everything(), strict=True):
        np.testing.assert_array_equal(old, new)
    # Nothing stays locked: a good update follows, on a thread that may be given up.
    after = threading.Thread(
        target=push, args=("adagrad", state), kwargs=good | {"ids": ids}, daemon=True
    )
    after.start()
    after.join(60)
    assert not after.is_alive()
    assert np.all(state.version == 1)


@pytest.mark.parametrize(("message", "changes"), COMMON + DENSE)
def test_a_bad_dense_push_is_refused_by_name_and_changes_nothing(message, changes):
    check_refusal(State(np.ones((2, 3))), message, changes, {"gradient": tf.ones([6])})


@pytest.mark.parametrize(("message", "changes"), COMMON + ROWS)
def test_a_bad_push_of_rows_is_refused_by_name_and_changes_nothing(message, changes):
    state = State(np.ones((2, 3)), table=True)
    check_refusal(state, message, changes, {"gradient": tf.ones([2, 3])}, ids=[0, 1])


@pytest.mark.parametrize("table", [False, True])
def test_a_packed_push_that_fails_for_one_variable_changes_none(table):
    states = [State([1.0, 1.0], table), State([1.0], table)]
    before = [s.everything() for s in states]
    ids = {"ids": [0, 1, 0], "counts": tf.constant([2, 1], tf.int64)} if table else {}
    with pytest.raises(INVALID, match="which is not in"):
        push("sgd", states, tf.ones([3]), pulled=[0, 0, 1] if table else [0, 1], **ids)
    for old, state in zip(before, states, strict=True):
        for a, b in zip(old, state.everything(), strict=True):
            np.testing.assert_array_equal(a, b)


def test_one_variable_twice_in_a_packed_push_is_refused():
    state = State([1.0, 1.0])
    with pytest.raises(INVALID, match="twice"):
        push("sgd", [state, state], tf.ones([4]))
    assert state.version.numpy() == 0


def gather(table, versions, counts=(1,)):
    return ops.gather_rows([table.handle], [versions.handle], [0], tf.constant(counts, tf.int64))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s, t: pull(t, [0, 5]), r"indices\[1\] = 5 is not a row of \[0, 2\)"),
        (lambda s, t: pull(t, tf.constant([[-1]], tf.int64)), r"indices\[0\] = -1 is not a row"),
        (lambda s, t: gather(t.value, t.version, [1, 1]), r"counts must have shape \[1\]"),
        (
            lambda s, t: gather(t.value, t.version, [2]),
            "counts must add up to the 1 indices, not 2",
        ),
        (lambda s, t: gather(t.value, s.version), r"versions must have shape \[2\], not \[\]"),
        (
            lambda s, t: gather(t.period, t.version),
            "variables? must be a variable of float or bfloat16, not int32",
        ),
        (lambda s, t: gather(t.value, t.value), "twice"),
        (
            lambda s, t: ops.gather_rows([t.value.handle], [t.version.handle] * 2, [0], [1]),
            "versions must be one for each of the 1 variables, or none, not 2",
        ),
        (
            lambda s, t: ops.gather_rows([unassigned()], [t.version.handle], [0], [1]),
            r"variables\[0\] \(.*\) is not an initialized variable",
        ),
        (
            lambda s, t: ops.pull_dense([s.value.handle], [t.version.handle]),
            r"versions\[0\] must be a scalar, not \[2\]",
        ),
        (
            lambda s, t: ops.pull_dense([s.version.handle], [s.version.handle]),
            "must be a variable of float, not int64",
        ),
        (lambda s, t: ops.pull_dense([s.value.handle], [s.value.handle]), "twice|int64"),
        (
            lambda s, t: ops.pull_dense([unassigned()], [s.version.handle]),
            r"variables\[0\] \(.*\) is not an initialized variable",
        ),
    ],
)
def test_a_bad_pull_is_refused_by_name(call, message):
    dense, table = State(np.ones((2, 3))), State(np.ones((2, 3)), table=True)
    with pytest.raises(INVALID, match=message):
        call(dense, table)
    push("sgd", dense, tf.ones([6]))
    push("sgd", table, tf.ones([2, 3]), ids=[0, 1])


def test_a_whole_table_is_pulled_with_its_versions():
    table = State(RNG.normal(size=(5, 2)), table=True)
    push("sgd", table, tf.ones([2, 2]), ids=[4, 1])
    values, versions = ops.pull_table(table.value.handle, table.version.handle, shape=[5, 2])
    np.testing.assert_array_equal(values, table.value)
    assert versions.numpy().tolist() == [0, 1, 0, 0, 1]
    kept = values.numpy()
    push("sgd", table, tf.ones([5, 2]), ids=range(5))
    np.testing.assert_array_equal(values, kept)
    with pytest.raises(INVALID, match=r"\[5,2\]"):
        ops.pull_table(table.value.handle, table.version.handle, shape=[5, 3])


@pytest.mark.parametrize("table", [False, True])
def test_what_stock_ops_read_before_an_update_keeps_its_values(table):
    state = State(RNG.normal(size=(64, 32)), table)
    everything = [state.value, state.accumulator, state.version, state.counters]
    for _ in range(3):
        read = [v.read_value() for v in everything]
        kept = [np.array(r) for r in read]
        push(
            "adagrad",
            state,
            tf.ones((64, 32) if table else (2048,)),
            ids=range(64) if table else None,
        )
        for tensor, old, now in zip(read, kept, everything, strict=True):
            np.testing.assert_array_equal(tensor, old)
            assert not np.array_equal(now, old)
        # Stock updates of the same variables go on working in between.
        state.value.assign_add(tf.ones_like(state.value))


def test_stock_gathers_read_a_table_between_updates():
    state = State(RNG.normal(size=(6, 3)), table=True)
    push("sgd", state, tf.ones([2, 3]), ids=[1, 4])
    before = tf.gather(state.value, [4, 4, 0])
    kept = before.numpy()
    np.testing.assert_array_equal(kept, state.value.numpy()[[4, 4, 0]])
    push("sgd", state, tf.ones([1, 3]), ids=[4], lr=0.5)
    np.testing.assert_array_equal(before, kept)
    np.testing.assert_allclose(tf.gather(state.value, 4), kept[0] - 0.5, rtol=1e-6)


@pytest.mark.parametrize("table", [False, True])
def test_a_checkpoint_between_updates_brings_everything_back(table, tmp_path):
    state = State(RNG.normal(size=(6, 3)), table)

    def update():
        push(
            "adagrad",
            state,
            tf.ones((2, 3) if table else (18,)),
            ids=[1, 4] if table else None,
            swap_period=1,
            swap_decay=0.5,
            step=int(np.max(state.version)) + 1,
        )

    parts = {name: v for name, v in vars(state).items() if isinstance(v, tf.Variable)}
    checkpoint = tf.train.Checkpoint(**parts)
    update()
    saved = state.everything()
    path = checkpoint.write(str(tmp_path / "state"))
    update()
    later = state.everything()
    checkpoint.read(path).assert_consumed()
    for old, now in zip(saved, state.everything(), strict=True):
        np.testing.assert_array_equal(old, now)
    update()  # training goes on from there, as it did
    for old, now in zip(later, state.everything(), strict=True):
        np.testing.assert_array_equal(old, now)


def test_shapes_are_inferred_where_batches_are_of_unknown_size():
    table, dense = State(np.ones((4, 3)), table=True), State(np.ones((2, 2)))

    @tf.function(input_signature=[tf.TensorSpec([None, 5], tf.int64), tf.TensorSpec([None])])
    def step(ids, gradient):
        values, versions = pull(table, ids)
        packed, dense_versions = pull(dense)
        push("sgd", dense, gradient, dense_versions)
        push(
            "sgd",
            table,
            tf.reshape(values, [-1, 3]),
            tf.reshape(versions, [-1]),
            tf.reshape(ids, [-1]),
        )
        return values, versions, packed, dense_versions

    shapes = step.get_concrete_function().output_shapes
    assert [s.rank for s in shapes] == [3, 2, 1, 1]
    assert shapes[3].as_list() == [1]
    assert step(np.zeros((2, 5)), np.ones(4))[0].shape == (2, 5, 3)
    assert dense.version.numpy() == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"learning_rate": [0.1]},
        {"global_step": [1]},
        {"pulled_versions": [[0]]},
        {"gradient": [[1.0] * 6]},
    ],
)
def test_a_dense_push_of_the_wrong_rank_fails_while_it_is_traced(changes):
    state = State(np.ones((2, 3)))
    with pytest.raises(ValueError, match="(?i)rank"):
        tf.function(lambda: push("sgd", state, **({"gradient": [1.0] * 6} | changes)))()
    assert state.version.numpy() == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": [0.1]}, "rank"),
        ({"indices": [[0, 1]]}, "rank"),
        ({"counts": 2}, "rank"),
    ],
)
def test_a_push_of_rows_of_the_wrong_rank_fails_while_it_is_traced(changes, message):
    state = State(np.ones((2, 3)), table=True)
    good = {"gradient": [[1.0] * 3] * 2, "ids": [0, 1]}
    with pytest.raises(ValueError, match=message):
        tf.function(lambda: push("adagrad", state, **(good | changes)))()
    assert not np.any(state.version)
