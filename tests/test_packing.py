"""Messages put together and taken apart, against concatenations in numpy."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from test_update_ops import State

from tf_recsync import ops

ALIGNMENT = 64  # Bytes, of the buffers of TensorFlow's tensors.
INVALID = tf.errors.InvalidArgumentError


def address(tensor):
    return np.asarray(memoryview(tensor)).ctypes.data


def numbers(sizes, dtype):
    """Vectors of these sizes of numbers that occur once."""
    ends = np.cumsum([1, *sizes])
    return [np.arange(a, b).astype(dtype) for a, b in zip(ends[:-1], ends[1:], strict=True)]


@settings(deadline=None, max_examples=200)
@given(
    groups=st.lists(st.lists(st.integers(0, 40), max_size=4), min_size=1, max_size=6).filter(any),
    dtype=st.sampled_from([np.float32, np.int64]),
    rest=st.booleans(),
)
def test_what_is_packed_is_unpacked(groups, dtype, rest):
    sizes = [size for group in groups for size in group]
    pieces = numbers(sizes, dtype)
    given_pieces = iter(pieces)
    packed = ops.pack([[tf.constant(next(given_pieces)) for _ in group] for group in groups])
    assert packed.dtype == dtype
    # Nothing is lost, and nothing but zeros is added, fewer than a group's start needs.
    values = packed.numpy()
    np.testing.assert_array_equal(values[values != 0], np.concatenate(pieces))
    gap = ALIGNMENT // np.dtype(dtype).itemsize
    assert len(values) <= sum(sizes) + (gap - 1) * sum(map(any, groups))
    asked = [list(group) for group in groups]
    if rest:
        next(group for group in reversed(asked) if group)[-1] = -1
    unpacked = ops.unpack(packed, asked)
    for piece, expected in zip(unpacked, pieces, strict=True):
        np.testing.assert_array_equal(piece, expected)


@pytest.mark.parametrize("dtype", [tf.float32, tf.int64])
def test_the_first_piece_of_a_group_is_taken_where_it_lies(dtype):
    groups = [[1], [3, 5], [7], [16, 16, 2], [2, 2], [4, 4], [8, 4, 4], [12, 1]]
    packed = ops.pack([[tf.ones(size, dtype) for size in group] for group in groups])
    pieces = iter(ops.unpack(packed, groups))
    begin, end = address(packed), address(packed) + packed.shape[0] * dtype.size
    for group in groups:
        first = next(pieces)
        assert begin <= address(first) < end
        assert address(first) % ALIGNMENT == 0
        # Others are copied where an op could not take them as they lie.
        inside = [begin <= address(next(pieces)) < end for _ in group[1:]]
        starts = np.cumsum(group)[:-1] * dtype.size
        assert inside == [start % ALIGNMENT == 0 for start in starts]


@pytest.mark.parametrize("size", [213_000, 430_001, 850_000, 1_700_000, 1_710_000, 5_000_000])
def test_a_large_message_is_packed_by_several_threads_as_by_one(size):
    sizes = [size, 5, 0, size - 63, 1]
    pieces = numbers(sizes, np.int64)
    packed = ops.pack([[tf.constant(piece)] for piece in pieces])
    for piece, expected in zip(ops.unpack(packed, [[s] for s in sizes]), pieces, strict=True):
        np.testing.assert_array_equal(piece, expected)
    # Pieces that are copied, as they are not the first of their group.
    one = ops.pack([[tf.constant(piece) for piece in pieces]])
    for piece, expected in zip(ops.unpack(one, [sizes]), pieces, strict=True):
        np.testing.assert_array_equal(piece, expected)


def test_neighbours_are_unpacked_as_one_piece_and_sizes_may_be_tensors():
    packed = ops.pack([[tf.constant([1.0])], [tf.constant([[2.0], [3.0]]), tf.constant(4.0)]])

    @tf.function
    def unpack(size):
        pieces = ops.unpack(packed, [[1], [size]])
        assert pieces[0].shape == [1]
        return pieces

    assert [piece.numpy().tolist() for piece in unpack(tf.constant(3))] == [[1.0], [2.0, 3.0, 4.0]]


def test_dense_variables_are_pulled_as_if_packed():
    states = [State(np.arange(n) + 1.0) for n in (3, 16, 0, 1)]
    others = [tf.constant([[7.0, 8.0]]), tf.constant([]), tf.constant(9.0)]
    packed, _ = ops.pull_dense(
        [s.value.handle for s in states], [s.version.handle for s in states], others
    )
    expected = ops.pack([[s.value.value()] for s in states] + [[other] for other in others])
    np.testing.assert_array_equal(packed, expected)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([[5], [3]], "of 20 elements, not of 19"),
        ([[4], [5]], "of 20 elements, not of 21"),
        ([[17], [-1]], "of 20 elements, not of 33"),
        ([[21], [-1]], "pieces of 20 elements, the last one -1 for the rest, not 21"),
        ([[-1], [4]], "pieces of 20 elements, the last one -1 for the rest, not -1"),
        ([[4], [-2]], "pieces of 20 elements, the last one -1 for the rest, not -2"),
        ([[2**62], [2**62]], "not 4611686018427387904"),
        ([[19]], "of 20 elements, not of 19"),
    ],
)
def test_sizes_that_are_not_those_of_the_pieces_are_refused(groups, message):
    packed = ops.pack([[tf.ones(4)], [tf.ones(4)]])
    with pytest.raises(INVALID, match=message):
        ops.unpack(packed, groups)


def test_bad_groups_and_shapes_are_refused_by_name():
    with pytest.raises(ValueError, match="groups must have a tensor"):
        ops.pack([[], []])
    with pytest.raises(INVALID, match=r"groups must be .* add up to 2, not \[1, 2\]"):
        ops.library.recsync_pack([[1.0], [2.0]], groups=[1, 2])
    with pytest.raises(INVALID, match=r"groups must be .* add up to 2, not \[3, -1\]"):
        ops.library.recsync_unpack([1.0], [1, 0], N=2, groups=[3, -1])
    with pytest.raises(INVALID, match=r"sizes must have shape \[2\], not \[3\]"):
        ops.library.recsync_unpack([1.0], [1, 0, 0], N=2, groups=[2])
    with pytest.raises(INVALID, match=r"packed must be a vector, not \[1,1\]|rank 1"):
        ops.library.recsync_unpack([[1.0]], [1, 0], N=2, groups=[2])
