"""The area under the ROC curve, counted in one op."""

from typing import Any

import keras
import tensorflow as tf
from keras import ops

from tf_recsync import ops as recsync_ops
from tf_recsync.metrics.examples import examples_of
from tf_recsync.optimizers.plain_update import in_xla_context

_MOST_THRESHOLDS = 2**24  # Among more, a float32 can't name each.


@keras.saving.register_keras_serializable(package="tf_recsync")
class AUC(keras.metrics.Metric):
    """The area under the ROC curve of a binary classifier.

    The same value as that of `keras.metrics.AUC` with its defaults, with two differences: a step
    costs one op instead of some forty, however many thresholds there are, and examples are counted
    in float64. Keras adds up in float32, which loses the small counts of a batch beside billions.

    For other curves use `keras.metrics.AUC`.

    The value is 0 before any data, and while there are only positive or only negative examples.

    Args:
        num_thresholds: Thresholds, from 0 to 1 at equal distances, from 2 to 2^24; examples between
            two of them are not told apart. Default 200, as in Keras. Click models whose
            predictions are all small want more: 10,000 cost hardly more.
        from_logits: Whether predictions are logits rather than probabilities. Default False.
        name: Name of the metric. Default `"auc"`.
        dtype: dtype of the result. None (the default) means `keras.config.floatx()`.

    Raises:
        ValueError: If `num_thresholds` is out of range.

    Example:
        >>> metric = AUC()
        >>> metric.update_state([0.0, 0.0, 1.0, 1.0], [0.1, 0.6, 0.4, 0.9])
        >>> float(metric.result())
        0.75
    """

    def __init__(
        self,
        num_thresholds: int = 200,
        from_logits: bool = False,
        name: str = "auc",
        dtype: Any = None,
    ) -> None:
        """See the class."""
        super().__init__(name=name, dtype=dtype)
        if isinstance(num_thresholds, bool) or not isinstance(num_thresholds, int):
            raise ValueError(f"num_thresholds={num_thresholds!r}: must be an int.")
        if not 2 <= num_thresholds <= _MOST_THRESHOLDS:
            raise ValueError(
                f"num_thresholds={num_thresholds}: must be from 2 to {_MOST_THRESHOLDS}."
            )
        self.num_thresholds = num_thresholds
        self.from_logits = from_logits
        self._direction = "up"
        # Of negative examples, then of positive ones, by their predictions.
        self.buckets = self.add_variable(
            shape=(2, num_thresholds - 1), initializer="zeros", dtype="float64", name="buckets"
        )

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds examples.

        Args:
            y_true: Labels, `[batch]` or `[batch, 1]`: positive if not 0.
            y_pred: Probabilities or logits, `[batch]` or `[batch, 1]`. Those that are NaN are left
                out.
            sample_weight: Weights, `[batch]`, `[batch, 1]` or a scalar. None (the default) means 1.

        Raises:
            ValueError: If the numbers of labels, predictions and weights are known to differ.
        """
        labels, predictions, weights = examples_of(y_true, y_pred, sample_weight)
        if in_xla_context():
            new = self.buckets + self._scores(labels, predictions, weights)
        else:
            new = recsync_ops.add_scores(
                ops.convert_to_tensor(self.buckets),
                labels,
                predictions,
                weights,
                from_logits=self.from_logits,
            )
        self.buckets.assign(new)

    def _scores(self, labels: tf.Tensor, predictions: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
        """What the op adds, in stock ops, for XLA."""
        count = self.num_thresholds - 1
        if self.from_logits:
            predictions = tf.sigmoid(predictions)
        places = tf.maximum(tf.math.ceil(tf.clip_by_value(predictions, 0, 1) * count) - 1, 0)
        positive = tf.cast(labels != 0, tf.int32)
        places = tf.cast(places, tf.int32) + count * positive
        # A negative place is none.
        places = tf.where(tf.math.is_nan(predictions), -1, places)
        weights = tf.cast(weights * tf.ones_like(labels), tf.float64)
        return tf.reshape(tf.math.unsorted_segment_sum(weights, places, 2 * count), [2, count])

    def result(self) -> Any:
        """Returns the area under the curve of all examples so far, a scalar."""
        buckets = ops.convert_to_tensor(self.buckets)
        # Of those with a higher prediction than each threshold, the highest threshold first: the
        # shares of the negative (x) and the positive examples (y).
        above = ops.cumsum(ops.flip(buckets, axis=1), axis=1)
        total = above[:, -1:]
        shares = above / ops.where(total > 0, total, ops.ones_like(total))
        shares = ops.concatenate([ops.zeros_like(total), shares], axis=1)
        x, y = shares[0], shares[1]
        area = ops.sum((x[1:] - x[:-1]) * (y[1:] + y[:-1])) / 2.0
        return ops.cast(area, self.dtype)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make an equal metric."""
        return {
            **super().get_config(),
            "num_thresholds": self.num_thresholds,
            "from_logits": self.from_logits,
        }
