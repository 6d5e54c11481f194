"""The ops beside the model that embedding collections call: what they refuse, and gradients."""

import numpy as np
import pytest
import tensorflow as tf

from tf_recsync import ops

INVALID = tf.errors.InvalidArgumentError


def route(**changes):
    """Two features, one with bags, on two physical tables."""
    arguments = {
        "ids": [tf.constant([1, 2], tf.int64), tf.constant([3, 4, 5], tf.int64)],
        "splits": [tf.constant([0, 1, 3], tf.int64)],
        "weights": [],
        "P": 2,
        "features": ["a", "b"],
        "tables": ["as", "bs"],
        "table_rows": [10, 20],
        "lengths": [1, 0],
        "weighted": [False, False],
        "combiners": ["sum", "mean"],
        "out_of_range": ["error", "error"],
        "partitions": [0, 0],
        "shard_counts": [1, 1],
        "shard_tables": [0, 1],
        "shard_offsets": [0, 5],
        "has_bags": [False, True],
        "has_scales": [False, True],
    }
    return ops.route_ids(**{**arguments, **changes})


def int64(*values):
    return tf.constant(values, tf.int64)


def test_a_batch_is_routed_to_rows_bags_and_slots():
    batch, rows, bags, scales, slots, sources = route()
    assert int(batch) == 2
    assert [r.numpy().tolist() for r in rows] == [[1, 2], [8, 9, 10]]
    assert [b.numpy().tolist() for b in bags] == [[], [0, 1, 1]]
    assert [s.numpy().tolist() for s in scales] == [[], [1.0, 0.5, 0.5]]
    assert [s.numpy().tolist() for s in slots] == [[0, 1], [2, 3]]
    assert [s.numpy().tolist() for s in sources] == [[0, 1], []]


def test_an_empty_batch_is_routed_to_nothing():
    batch, rows, *_ = route(ids=[int64(), int64()], splits=[int64(0)])
    assert int(batch) == 0
    assert [r.shape[0] for r in rows] == [0, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids": [int64(1, 2), int64(3, 4)]}, "row splits of feature b go from 0 to 3"),
        ({"splits": [int64(0, 2, 1)]}, "row splits of feature b"),
        ({"splits": [int64()]}, "row splits of feature b are missing"),
        ({"splits": []}, "row splits of feature b are missing"),
        ({"splits": [int64(0, 1, 3)] * 2}, "2 splits for 1 ragged"),
        ({"weights": [tf.ones([3])]}, "1 weights for 0 weighted"),
        ({"weighted": [False, True]}, "feature b of table bs has 3 ids, but 0 weights"),
        ({"ids": [int64(1, 2, 3), int64(3, 4, 5)]}, "feature b of table bs has 2 examples"),
        ({"ids": [int64(1, 10), int64(3, 4, 5)]}, "feature a has id 10 at position 1, table as"),
        ({"ids": [int64(1, 2), int64(3, -4, 5)]}, "feature b has id -4 at position 1, table bs"),
        ({"ids": [tf.constant([[1], [2]], tf.int64), int64(3, 4, 5)]}, "must be vectors|rank 1"),
        ({"features": ["a"]}, "features must have 2 values, not 1"),
        ({"shard_tables": [0]}, "shard_tables must have 2 values, not 1"),
        ({"shard_tables": [0, 2]}, "shard 0 of feature b can't be at row 5 of physical table 2"),
        ({"shard_offsets": [0, -5]}, "shard 0 of feature b can't be at row -5"),
        (
            {"shard_counts": [1, 0], "shard_tables": [0], "shard_offsets": [0]},
            "shard_counts must be from 1 to .*, not 0 for feature b",
        ),
        ({"table_rows": [0, 20]}, "table_rows must be at least 1 .* not 0 and 1 for feature a"),
        ({"lengths": [-1, 0]}, "lengths at least 0, not 10 and -1 for feature a"),
        ({"combiners": ["sum", "max"]}, "combiners can't be 'max'"),
        ({"out_of_range": ["error", "wrap"]}, "out_of_range can't be 'wrap'"),
        ({"has_bags": [False, False]}, "has_bags must be true for the table of feature b"),
        ({"has_scales": [False, False]}, "has_scales must be true for the table of feature b"),
    ],
)
def test_bad_routing_is_refused_with_what_is_wrong(changes, message):
    with pytest.raises((INVALID, ValueError), match=message):
        route(**changes)


NONE = tf.zeros([0], tf.int32)


def assemble(**changes):
    """Two examples of features of dimensions 2 and 1; the second table shares a vector."""
    arguments = {
        "batch": int64(2)[0],
        "pooled": [tf.constant([[1.0, 2.0], [3.0, 4.0]]), tf.constant([[5.0]])],
        "slots": [tf.constant([0, 1]), tf.constant([2, 3])],
        "sources": [NONE, tf.constant([0, 0])],
        "dimensions": [2, 1],
    }
    return ops.assemble(**{**arguments, **changes})


def test_vectors_are_put_side_by_side_and_gradients_of_shared_ones_added_up():
    np.testing.assert_array_equal(assemble(), [[1, 2, 5], [3, 4, 5]])
    pooled = [tf.constant([[1.0, 2.0], [3.0, 4.0]]), tf.constant([[5.0]])]
    with tf.GradientTape() as tape:
        tape.watch(pooled)
        total = tf.reduce_sum(assemble(pooled=pooled) * [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    first, second = tape.gradient(total, pooled)
    np.testing.assert_array_equal(first, [[1, 2], [4, 5]])
    np.testing.assert_array_equal(second, [[9]])


def test_partial_pools_of_a_slot_are_added_and_missing_ones_are_zero():
    vectors = assemble(
        pooled=[tf.constant([[1.0, 2.0]]), tf.constant([[10.0, 20.0]])],
        slots=[tf.constant([1]), tf.constant([1])],
        sources=[NONE, NONE],
    )
    np.testing.assert_array_equal(vectors, [[0, 0, 0], [11, 22, 0]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": int64(-1)[0]}, "batch must be at least 0, not -1"),
        ({"batch": int64(2, 2)}, "batch must be a scalar"),
        ({"batch": int64(1)[0]}, "slots holds"),
        ({"slots": [tf.constant([0, 4]), tf.constant([2, 3])]}, "slots holds 4"),
        ({"slots": [tf.constant([0, -1]), tf.constant([2, 3])]}, "slots holds -1"),
        ({"slots": [tf.constant([0, 2]), tf.constant([2, 3])]}, "slot of a feature of dimension 2"),
        ({"slots": [tf.constant([0]), tf.constant([2, 3])]}, "1 slots for 2 vectors"),
        ({"sources": [NONE, tf.constant([0])]}, "2 slots for 1 vectors and 1 sources"),
        ({"sources": [NONE, tf.constant([0, 1])]}, "sources holds 1, there are 1 vectors"),
        ({"sources": [NONE, tf.constant([0, -1])]}, "sources holds -1"),
        ({"pooled": [tf.constant([1.0, 2.0]), tf.constant([[5.0]])]}, "pooled must be"),
        ({"dimensions": [2, 0]}, "dimensions must be positive and at most .*, not 2, 0"),
    ],
)
def test_bad_assembling_is_refused_with_what_is_wrong(changes, message):
    with pytest.raises(INVALID, match=message):
        assemble(**changes)
