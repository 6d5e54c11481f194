"""Wrong inputs of the metrics' ops are named, and harm nothing."""

import pytest
import tensorflow as tf

from tf_recsync import ops

INVALID = tf.errors.InvalidArgumentError
GOOD = {
    "labels": tf.constant([0.0, 1.0]),
    "predictions": tf.constant([0.2, 0.7]),
    "weights": tf.constant([1.0]),
}
SUMS = {name: tf.constant(0.0, tf.float64) for name in ("loss_sum", "label_sum", "weight_sum")}
BUCKETS = {"buckets": tf.zeros([2, 4], tf.float64)}
OPS = {"add_log_loss": (ops.add_log_loss, SUMS), "add_scores": (ops.add_scores, BUCKETS)}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": tf.zeros([2, 1])}, r"labels must be a vector, not \[2,1\]"),
        ({"predictions": tf.zeros([3])}, r"predictions must be shaped like labels, \[2\], not"),
        ({"predictions": tf.zeros([2, 1])}, "predictions must be shaped like labels"),
        ({"weights": tf.zeros([3])}, r"weights must be shaped like labels, \[2\], or \[1\], not"),
        ({"weights": tf.zeros([])}, "weights must be shaped like labels"),
        ({"weights": tf.zeros([0])}, "weights must be shaped like labels"),
    ],
)
def test_examples_of_wrong_shapes_are_refused(op, changes, message):
    call, sums = OPS[op]
    call(**sums, **GOOD)
    with pytest.raises(INVALID, match=message):
        call(**sums, **{**GOOD, **changes})
    if all(tensor.shape.rank != 1 for tensor in changes.values()):
        with pytest.raises(ValueError, match="rank|Shapes"):
            tf.function(lambda: call(**sums, **{**GOOD, **changes}))()


@pytest.mark.parametrize("name", SUMS)
def test_sums_that_are_no_scalars_are_refused(name):
    with pytest.raises(INVALID, match=f"{name} must be a scalar"):
        ops.add_log_loss(**{**SUMS, name: tf.zeros([1], tf.float64)}, **GOOD)


@pytest.mark.parametrize("shape", [[4], [3, 4], [2, 0], [2, 4, 1]])
def test_buckets_of_wrong_shapes_are_refused(shape):
    with pytest.raises(INVALID, match="buckets must be"):
        ops.add_scores(tf.zeros(shape, tf.float64), **GOOD)
    with pytest.raises(INVALID, match="buckets must be"):
        ops.area_under_curve(tf.zeros(shape, tf.float64))


def test_spacings_that_there_are_not_are_refused():
    with pytest.raises(INVALID, match="spacing"):
        ops.add_scores(**BUCKETS, **GOOD, spacing="log")


@pytest.mark.parametrize("epsilon", [0.0, -1.0, 0.5, float("nan")])
def test_bounds_of_probabilities_that_are_none_are_refused(epsilon):
    with pytest.raises(INVALID, match="epsilon must be between 0 and 0.5"):
        ops.add_log_loss(**SUMS, **GOOD, epsilon=epsilon)


def test_no_examples_change_nothing():
    none = {"labels": [], "predictions": [], "weights": [1.0]}
    assert [float(x) for x in ops.add_log_loss(**SUMS, **none)] == [0.0] * 3
    assert float(tf.reduce_sum(ops.add_scores(**BUCKETS, **none))) == 0.0


def test_shapes_are_inferred():
    @tf.function(input_signature=[tf.TensorSpec([None])] * 3)
    def call(*examples):
        return ops.add_log_loss(*SUMS.values(), *examples), ops.add_scores(
            BUCKETS["buckets"], *examples
        )

    sums, buckets = call.get_concrete_function().output_shapes
    area = tf.function(lambda: ops.area_under_curve(BUCKETS["buckets"])).get_concrete_function()
    assert area.output_shapes.rank == 0
    assert [shape.rank for shape in sums] == [0] * 3
    assert buckets.as_list() == [2, 4]
