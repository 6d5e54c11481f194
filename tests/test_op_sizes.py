"""Sizes that no tensor has, only an input or an attribute says so: errors, not an abort."""

import numpy as np
import pytest
import tensorflow as tf

from tf_recsync import ops, staleness
from tf_recsync.ops import gradient_buffer

MOST = 2**31 - 1  # elements; said in the errors
NO_VECTORS = [np.zeros([0, 2], np.float32)]
NO_INTS = [np.zeros([0], np.int32)]


def assemble(batch, dimension=2):
    return ops.assemble(np.int64(batch), NO_VECTORS, NO_INTS, NO_INTS, dimensions=[dimension])


def take_apart(vectors, dimension):
    return ops.library.recsync_assemble_grad(
        np.zeros([1, 2], np.float32),
        np.array([vectors], np.int32),
        NO_INTS,
        NO_INTS,
        dimensions=[2],
        table_dimensions=[dimension],
    )


def gather(width, *bag_counts):
    tables = [tf.Variable(tf.zeros([1, width])) for _ in bag_counts]
    return ops.gather_rows(
        [t.handle for t in tables],
        [],
        np.zeros([0], np.int64),
        np.zeros([len(tables)], np.int64),
        bags=np.zeros([0], np.int32),
        bag_counts=np.array(bag_counts, np.int64),
    )


def route(**changes):
    good = {"table_rows": [1], "shard_counts": [1], "shard_offsets": [0]}
    return ops.route_ids(
        ids=[np.zeros([0], np.int64)],
        splits=[],
        weights=[],
        P=1,
        features=["f"],
        tables=["t"],
        lengths=[1],
        weighted=[False],
        combiners=["sum"],
        out_of_range=["clip"],
        partitions=[0],
        shard_tables=[0],
        has_bags=[False],
        has_scales=[False],
        **(good | changes),
    )


def buffer(**sizes):
    good = {"dense_size": 1, "dense_count": 1, "table_rows": [], "table_widths": []}
    return ops.library.recsync_gradient_buffer(
        shared_name="too_large", capacity=1, divisor=1.0, **(good | sizes)
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: assemble(2**62),
            f"batch x dimensions must be at most {MOST} elements, not {2**62} x 2",
        ),
        (lambda: assemble(2**30), f"batch x dimensions .*{MOST} elements, not {2**30} x 2"),
        (lambda: assemble(-(2**62)), f"batch must be at least 0, not -{2**62}"),
        (lambda: assemble(1, MOST + 1), f"dimensions must be positive and at most {MOST} together"),
        (lambda: assemble(1, 2**62), f"dimensions must be .* not {2**62}"),
        (
            lambda: take_apart(MOST, MOST),
            f"vectors x table_dimensions must be at most {MOST} elements, not {MOST} x {MOST}",
        ),
        (lambda: take_apart(-1, 2), "vectors must be at least 0, not -1"),
        (lambda: take_apart(1, 2**62), f"table_dimensions must be .* not {2**62}"),
        (
            lambda: gather(2, MOST),
            rf"bag_counts\[0\] = {MOST} vectors of 2 floats are too many: .* at most {MOST} floats",
        ),
        (lambda: gather(1, MOST, 1), r"bag_counts\[1\] = 1 vectors of 1 floats are too many"),
        (lambda: gather(2, 2**62), rf"bag_counts\[0\] = {2**62} is not in"),
        (lambda: route(shard_counts=[2**62]), f"shard_counts must be from 1 to .*, not {2**62}"),
        (
            lambda: route(table_rows=[2**63 - 1], shard_offsets=[1]),
            "shard 0 of feature f can't be at row 1",
        ),
        (lambda: buffer(dense_size=2**40), f"dense_size must be from 0 to {MOST}, not {2**40}"),
        (lambda: buffer(dense_count=2**40), f"dense_count must be from 0 to {MOST}, not {2**40}"),
        (
            lambda: buffer(table_rows=[1], table_widths=[2**62]),
            f"table 0 must have at least 0 rows, of 0 to {MOST} floats, not 1 rows of {2**62}",
        ),
    ],
)
def test_a_size_that_cannot_be_meant_is_refused_by_name(call, message):
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match=message):
        call()


def test_a_table_without_rows_may_have_any_shape_that_can_be_counted():
    table = tf.Variable(tf.zeros([0, 2**40, 2**40]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="rows of a table of shape .* large"):
        ops.gather_rows([table.handle], [], np.zeros([0], np.int64), np.zeros([1], np.int64))


@pytest.mark.parametrize("shape", [(0, 2**31, 2**31), (1, 2**62, 0)])
def test_rows_of_a_table_without_elements_are_copied_if_their_shape_can_be_counted(shape):
    table = tf.Variable(tf.zeros(shape))
    copied = {"variables": [table.handle], "log_decays": [], "dtypes": [tf.float32]}
    with pytest.raises(tf.errors.InvalidArgumentError, match="overflow"):
        ops.copy_rows(rows=np.zeros([5], np.int64), **copied)
    none = ops.copy_rows(rows=np.zeros([0], np.int64), **copied)
    assert none.values[0].shape == (0, *shape[1:])


@pytest.mark.parametrize("width", [2**33, 2**62])
def test_rows_that_all_move_take_no_memory_where_there_are_none(width):
    tables = [tf.Variable(tf.zeros([0, width])) for _ in range(3)]
    versions, steps = (tf.Variable(tf.zeros([0], dtype)) for dtype in (tf.int64, tf.int32))
    counters = tf.Variable(tf.zeros([staleness.COUNTERS], tf.int64))
    (table,), (momentum,), (velocity,) = ([t.handle] for t in tables)
    ops.adam_rows(
        variables=[table],
        momentums=[momentum],
        velocities=[velocity],
        versions=[versions.handle],
        counters=[counters.handle],
        last_periods=[],
        last_updates=[],
        last_steps=[steps.handle],
        gradient=np.zeros([0], np.float32),
        indices=np.zeros([0], np.int64),
        counts=np.zeros([1], np.int64),
        pulled_versions=np.zeros([0], np.int64),
        learning_rate=0.1,
        global_step=np.int64(1),
        lazy=False,
    )


def test_rows_that_have_no_elements_are_not_counted_beyond_what_a_number_holds():
    table = tf.Variable(tf.zeros([2**63 - 1, 0]))
    log_decays = tf.Variable(tf.zeros([2], tf.float64))
    message = f"must have at most {2**40} rows, not {2**63 - 1}"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        ops.settle_decay([table.handle], [log_decays.handle])


def test_a_large_buffer_takes_memory_only_with_a_gradient_of_its_size():
    # 8 GB each, if they were allocated at once.
    handles = [
        gradient_buffer.gradient_buffer(
            f"large_{i}",
            capacity=1,
            divisor=1.0,
            weight=staleness.Constant(),
            drop_late=False,
            dense_size=MOST,
            dense_count=1,
            table_rows=[],
            table_widths=[],
        )
        for i in range(64)
    ]
    for handle in handles:
        assert gradient_buffer.gradient_buffer_step(handle).step.numpy() == 0
        tf.raw_ops.DestroyResourceOp(resource=handle)
