"""The area under the ROC curve, counted in one op."""

from typing import Any

import keras
import tensorflow as tf
from keras import ops

from tf_recsync import ops as recsync_ops
from tf_recsync._checks import check_bool, integer
from tf_recsync._deprecation import keywords_after
from tf_recsync.metrics.examples import examples_of
from tf_recsync.optimizers.plain_update import in_xla_context

_MOST_THRESHOLDS = 2**24  # Among more, a float32 can't name each.
_SPACINGS = ("logit", "linear")
_LOGIT_RANGE = 17.0  # As in cc/engine/click_metrics.h.


@keras.saving.register_keras_serializable(package="tf_recsync")
class AUC(keras.metrics.Metric):
    """The area under the ROC curve of a binary classifier.

    Examples are counted between thresholds, so that the states of several workers can be merged by
    adding them up. Those between two thresholds are not told apart. By default the logits of the
    thresholds are at equal distances of 0.004, which puts the value within .001 of the exact one
    for click models: predictions around .001 are told apart as well as those around .5 or .999.
    `recsync.metrics.exact_auc` gives the exact value of predictions that are all at hand.

    With `num_thresholds=200, spacing="linear"` it is the value of `keras.metrics.AUC` with its
    defaults. It differs in that a step costs one op instead of some forty, and that examples are
    counted in float64. Keras adds up in float32, which loses the small counts of a batch beside
    billions. For other curves use `keras.metrics.AUC`.

    The value is 0 before any data, and while there are only positive or only negative examples.

    Args:
        num_thresholds: Number of thresholds, from 2 to 2^24. Default 8193. The metric's state is
            two float64 numbers for each.
        spacing: What the thresholds divide evenly: `"logit"` (the default) logits from -17 to 17,
            which are probabilities from 4e-8 to 1 - 4e-8; those beyond are counted as the nearest
            of these. `"linear"` divides probabilities from 0 to 1.
        from_logits: Whether predictions are logits rather than probabilities. Default False.
        name: Name of the metric. Default `"auc"`.
        dtype: dtype of the result. None (the default) means `keras.config.floatx()`.

    Raises:
        ValueError: If `num_thresholds` or `spacing` is out of range.

    Example:
        >>> metric = AUC()
        >>> metric.update_state([0.0, 0.0, 1.0, 1.0], [0.01, 0.014, 0.012, 0.02])
        >>> float(metric.result())
        0.75
    """

    @keywords_after(1)
    def __init__(
        self,
        num_thresholds: int = 8193,
        *,
        from_logits: bool = False,
        name: str = "auc",
        dtype: Any = None,
        spacing: str = "logit",
    ) -> None:
        """See the class."""
        super().__init__(name=name, dtype=dtype)
        num_thresholds = integer("num_thresholds", num_thresholds, 2, _MOST_THRESHOLDS)
        check_bool("from_logits", from_logits)
        if spacing not in _SPACINGS:
            allowed = " or ".join(map(repr, _SPACINGS))
            raise ValueError(f"spacing={spacing!r}: must be {allowed}.")
        self.num_thresholds = num_thresholds
        self.spacing = spacing
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
                spacing=self.spacing,
            )
        self.buckets.assign(new)

    def _scores(self, labels: tf.Tensor, predictions: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
        """What the op adds, in stock ops, for XLA."""
        count = self.num_thresholds - 1
        # Where in the range that is divided, from 0 to 1.
        if self.spacing == "linear":
            shares = tf.sigmoid(predictions) if self.from_logits else predictions
        else:
            logits = predictions
            if not self.from_logits:
                probabilities = tf.clip_by_value(predictions, 0, 1)
                logits = tf.math.log(probabilities / (1 - probabilities))
            shares = (tf.clip_by_value(logits, -_LOGIT_RANGE, _LOGIT_RANGE) + _LOGIT_RANGE) / (
                2 * _LOGIT_RANGE
            )
        places = tf.maximum(tf.math.ceil(tf.clip_by_value(shares, 0, 1) * count) - 1, 0)
        positive = tf.cast(labels != 0, tf.int32)
        places = tf.cast(places, tf.int32) + count * positive
        # A negative place is none.
        places = tf.where(tf.math.is_nan(predictions), -1, places)
        weights = tf.cast(weights * tf.ones_like(labels), tf.float64)
        return tf.reshape(tf.math.unsorted_segment_sum(weights, places, 2 * count), [2, count])

    def result(self) -> Any:
        """Returns the area under the curve of all examples so far, a scalar."""
        buckets = ops.convert_to_tensor(self.buckets)
        area = _area(buckets) if in_xla_context() else recsync_ops.area_under_curve(buckets)
        return ops.cast(area, self.dtype)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make an equal metric."""
        return {
            **super().get_config(),
            "num_thresholds": self.num_thresholds,
            "spacing": self.spacing,
            "from_logits": self.from_logits,
        }


def _area(buckets: tf.Tensor) -> tf.Tensor:
    """What the op computes, in stock ops, for XLA."""
    negatives, positives = tf.unstack(buckets)
    below = tf.cumsum(negatives)
    won = tf.reduce_sum(positives * (below - negatives / 2))
    return tf.math.divide_no_nan(won, tf.reduce_sum(positives) * below[-1])
