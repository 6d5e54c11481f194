"""What a gradient buffer refuses, by name; nothing of it changes the buffer."""

import pytest
import tensorflow as tf
from test_gradient_buffer import CPU, Model

import tf_recsync as recsync
from tf_recsync import staleness
from tf_recsync.ops import gradient_buffer as buffer_ops
from tf_recsync.synchronization.gradient_buffer import GradientBuffer

INVALID = tf.errors.InvalidArgumentError


def make(name, **changes):
    options = {
        "capacity": 2,
        "divisor": 2.0,
        "weight": staleness.Constant(),
        "drop_late": False,
        "dense_size": 8,
        "dense_count": 2,
        "table_rows": [12, 5],
        "table_widths": [4, 1],
    }
    return buffer_ops.gradient_buffer(name, **(options | changes))


def destroy(handle):
    tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=False)


def test_buffers_of_one_name_are_one_until_it_is_destroyed():
    one, other = make("same"), make("same")
    buffer_ops.restore_buffer(one, 3)
    assert buffer_ops.gradient_buffer_step(other).step.numpy() == 3
    with pytest.raises(INVALID, match="same is a gradient buffer of other options: capacity 2.*"):
        make("same", capacity=3)
    destroy(one)
    with pytest.raises(tf.errors.NotFoundError):
        buffer_ops.gradient_buffer_step(other)
    again = make("same", capacity=3)
    assert buffer_ops.gradient_buffer_step(again).step.numpy() == 0
    destroy(again)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"capacity": 0}, "capacity must be at least 1, not 0"),
        ({"divisor": 0.0}, "divisor must be positive and finite, not 0"),
        ({"divisor": float("nan")}, "divisor must be positive and finite, not nan"),
        ({"dense_size": -1}, "dense_size must be from 0 to 2147483647, not -1"),
        ({"dense_count": -1}, "dense_count must be from 0 to 2147483647, not -1"),
        (
            {"table_rows": [1]},
            "table_rows and table_widths must be of the same tables, not 1 and 2",
        ),
        ({"table_rows": [1, -2]}, "table 1 must have at least 0 rows, .* not -2 rows of 1"),
    ],
)
def test_a_bad_buffer_is_refused_by_name(changes, message):
    with pytest.raises(INVALID, match=message):
        make("bad", **changes)


def test_bad_attributes_of_the_weight_are_refused_by_name():
    for changes, message in [
        ({"staleness_decay": "linear"}, "staleness_decay .* not linear"),
        ({"staleness_power": 0.0}, "staleness_power must be positive, not 0"),
        ({"staleness_baseline": 0.5}, "staleness_baseline must be at least 1, not 0.5"),
        ({"staleness_iota": -1.0}, "staleness_iota must be at least 0, not -1"),
    ]:
        with pytest.raises(INVALID, match=message):
            recsync.ops.library.recsync_gradient_buffer(
                shared_name="bad", capacity=1, divisor=1.0, **changes
            )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"capacity": 1, "weight": staleness.InversePower(update_sensitivity=1.0)},
            "weight must depend on the token's age alone",
        ),
        (
            {"capacity": 1, "weight": staleness.InversePower(rescale=staleness.Rescale(2.0))},
            "weight must depend on the token's age alone",
        ),
    ],
)
def test_bad_options_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        GradientBuffer(CPU, [], [], **options)
    with pytest.raises(ValueError, match="name must be a non-empty str, not ''"):
        make("")


def ints(*values):
    return tf.constant(values, tf.int64)


GOOD = {
    "token_index": 1,
    "token_value": 0,
    "ticket": 0,
    "pulled_step": 0,
    "dense": [1.0] * 8,
    "dense_versions": ints(0, 0),
    "gradient": [1.0] * 9,
    "indices": ints(11, 0, 4),
    "counts": ints(2, 1),
    "bags": tf.zeros([0], tf.int32),
    "scales": [],
    "bag_counts": ints(),
    "pulled_versions": ints(0, 0, 0),
    "tables": [0, 1],
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_index": [0]}, "token_index must be a scalar, not .1."),
        ({"token_index": -1}, "token_index must be at least 0, not -1"),
        ({"token_value": -1}, "token_value must be at least 0, not -1"),
        ({"ticket": -1}, "ticket must be at least 0, not -1"),
        ({"pulled_step": -1}, "pulled_step must be at least 0, not -1"),
        ({"pulled_step": 1}, r"pulled_step = 1 is not in \[0, 0\]"),
        ({"dense": [1.0]}, "dense must hold 8 elements or none, not 1"),
        ({"dense": [[1.0] * 8]}, "dense must be a vector"),
        ({"dense_versions": ints(0)}, "dense_versions must hold 2 elements or none, not 1"),
        ({"dense_versions": ints(0, -4)}, r"dense_versions\[1\] = -4 is negative"),
        ({"tables": [0, 2]}, r"tables\[1\] = 2 is not one of the buffer's 2 tables"),
        ({"tables": [-1, 1]}, r"tables\[0\] = -1 is not one of the buffer's 2 tables"),
        ({"tables": [0]}, r"counts must have shape \[1\], not \[2\]"),
        ({"tables": [1, 0]}, "gradient must hold the rows' 6 elements, not 9"),
        ({"gradient": [1.0] * 8}, "gradient must hold the rows' 9 elements, not 8"),
        ({"indices": ints(12, 0, 4)}, r"row id 12 of table 0, .* 0, is not in \[0, 12\)"),
        ({"indices": ints(11, 0, -1)}, r"row id -1 of table 1, .* 0, is not in \[0, 5\)"),
        ({"counts": ints(2, 2)}, "counts must add up to the 3 indices, not 2 2"),
        ({"bags": [0, 0, 0]}, r"bags must have shape \[0\] with empty bag_counts, not \[3\]"),
        ({"scales": [1.0]}, r"scales must have shape \[3\] or \[0\], not \[1\]"),
        ({"pulled_versions": ints(0)}, "pulled_versions must hold 3 elements or none, not 1"),
        ({"pulled_versions": ints(0, -7, 0)}, "the version -7 pulled of a row of table 0"),
    ],
)
def test_a_bad_push_is_refused_by_name_and_changes_nothing(changes, message):
    handle = make("wrong inputs")
    push = recsync.ops.library.recsync_push_to_buffer
    with pytest.raises(INVALID, match=message):
        push(handle, **(GOOD | changes))
    assert not buffer_ops.gradient_buffer_state(handle).numpy().any()
    push(handle, **GOOD)
    assert push(handle, **GOOD).ready
    destroy(handle)


def test_pushes_with_and_without_versions_do_not_mix_in_a_step():
    handle = make("mixed")
    push = recsync.ops.library.recsync_push_to_buffer
    push(handle, **GOOD)
    with pytest.raises(INVALID, match="dense_versions must hold 2 versions, like those"):
        push(handle, **(GOOD | {"dense_versions": ints()}))
    with pytest.raises(INVALID, match="the gradients of rows must come with versions, like"):
        push(handle, **(GOOD | {"pulled_versions": ints()}))
    assert push(handle, **GOOD).ready
    destroy(handle)


def test_other_bad_calls_are_refused_by_name():
    model = Model()
    buffer = model.buffer(1, drop_late=True)
    with pytest.raises(INVALID, match="token_value = 1 is ahead of step = 0"):
        buffer.push(0, 1, 0)
    with pytest.raises(INVALID, match=r"step = 1 is not in \[1, 0\], the steps given out"):
        buffer_ops.buffer_applied(buffer.handle, True, 1)
    with pytest.raises((INVALID, ValueError), match="tickets must be a vector|rank 1"):
        buffer.revoke(3)
    with pytest.raises((INVALID, ValueError), match="token_indices must be a vector|rank 1"):
        buffer.spend(0, 3, 1)
    with pytest.raises(INVALID, match="token_value must be from 0 to .*, not -1"):
        buffer.spend(-1, [3], 1)
    with pytest.raises(INVALID, match="ticket must be from 0 to .*, not -1"):
        buffer.spend(0, [3], -1)
    with pytest.raises(INVALID, match="counts late pushes does not know its tokens"):
        model.buffer(1).spend(0, [3], 1)
    with pytest.raises(INVALID, match="step must be from 0 to .*, not -1"):
        buffer.restore(-1)
    with pytest.raises(ValueError, match="tables must be tables of the buffer, not d0/kernel"):
        buffer.push(0, 0, 0, tables=model.dense_states[:1])
    with pytest.raises(ValueError, match="tables, values and rows must be given together"):
        buffer.push(0, 0, 0, tables=model.table_states)
    with pytest.raises((INVALID, tf.errors.NotFoundError)):
        buffer_ops.gradient_buffer_step(tf.Variable(1.0).handle)


@pytest.mark.parametrize("rank", [{"token_value": [0]}, {"indices": ints()[tf.newaxis]}])
def test_a_push_of_the_wrong_rank_fails_while_it_is_traced(rank):
    handle = make("ranks")
    with pytest.raises(ValueError, match="(?i)rank"):
        tf.function(lambda: recsync.ops.library.recsync_push_to_buffer(handle, **(GOOD | rank)))()
    destroy(handle)
