"""Normalized entropy, the log loss relative to that of predicting the mean click rate."""

from typing import Any

import keras
import numpy as np
from keras import ops

from tf_recsync import ops as recsync_ops
from tf_recsync._checks import check_bool, number
from tf_recsync.metrics.examples import examples_of
from tf_recsync.optimizers.plain_update import in_xla_context


@keras.saving.register_keras_serializable(package="tf_recsync")
class NormalizedEntropy(keras.metrics.Metric):
    """Mean log loss divided by the entropy of the mean label.

    A model that predicts the mean label for every example has the value 1, and lower is better.
    Dividing makes values comparable between data sets with different click rates (He et al.,
    "Practical Lessons from Predicting Clicks on Ads at Facebook", 2014).

    The value is 0 before any data, like that of `keras.metrics.Mean`, and NaN while all labels are
    0 or all are 1, where the entropy is 0 and the quotient is not defined.

    The state is three sums in float64 (weighted log loss, weighted labels, weights), so that the
    state of several workers can be merged by adding it up, and billions of examples do not lose
    precision.

    Args:
        name: Name of the metric. Default `"normalized_entropy"`.
        from_logits: Whether predictions are logits rather than probabilities. Default False.
        epsilon: Probabilities are clipped to between this and 1 minus this, with 0 < epsilon < 0.5;
            unused with logits. Default 1e-7.
        dtype: dtype of the result. None (the default) means `keras.config.floatx()`.

    Raises:
        ValueError: If `epsilon` is out of range.

    Example:
        >>> metric = NormalizedEntropy()
        >>> metric.update_state([[1.0], [0.0]], [[0.5], [0.5]])
        >>> round(float(metric.result()), 4)
        1.0
    """

    def __init__(
        self,
        name: str = "normalized_entropy",
        from_logits: bool = False,
        epsilon: float = 1e-7,
        dtype: Any = None,
    ) -> None:
        """See the class."""
        super().__init__(name=name, dtype=dtype)
        check_bool("from_logits", from_logits)
        # The op takes it as float32, in which other numbers are 0 or 0.5.
        least, most = np.nextafter(np.float32([0.0, 0.5]), np.float32([1.0, 0.0])).tolist()
        allowed = "greater than 0 and less than 0.5"
        epsilon = number("epsilon", epsilon, least=least, most=most, allowed=allowed)
        self.from_logits = from_logits
        self.epsilon = epsilon
        self._direction = "down"
        self.loss_sum = self._add_sum("loss_sum")
        self.label_sum = self._add_sum("label_sum")
        self.weight_sum = self._add_sum("weight_sum")

    def _add_sum(self, name: str) -> keras.Variable:
        return self.add_variable(shape=(), initializer="zeros", dtype="float64", name=name)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds examples.

        Args:
            y_true: Labels from 0 to 1, `[batch]` or `[batch, 1]`.
            y_pred: Probabilities or logits, `[batch]` or `[batch, 1]`.
            sample_weight: Weights, `[batch]`, `[batch, 1]` or a scalar. None (the default) means 1.

        Raises:
            ValueError: If the numbers of labels, predictions and weights are known to differ.
        """
        labels, predictions, weights = examples_of(y_true, y_pred, sample_weight)
        sums = (self.loss_sum, self.label_sum, self.weight_sum)
        if in_xla_context():
            added = self._sums(*(ops.cast(x, "float64") for x in (labels, predictions, weights)))
            new = [total + values for total, values in zip(sums, added, strict=True)]
        else:
            new = recsync_ops.add_log_loss(
                *(ops.convert_to_tensor(total) for total in sums),
                labels,
                predictions,
                weights,
                from_logits=self.from_logits,
                epsilon=self.epsilon,
            )
        for total, value in zip(sums, new, strict=True):
            total.assign(value)

    def _sums(self, labels: Any, predictions: Any, weights: Any) -> list[Any]:
        """What the op adds, in stock ops, for XLA."""
        if self.from_logits:
            # log(1 + exp(x)) - label * x without overflow.
            losses = ops.maximum(predictions, 0.0) - labels * predictions
            losses += ops.log1p(ops.exp(-ops.abs(predictions)))
        else:
            predictions = ops.clip(predictions, self.epsilon, 1.0 - self.epsilon)
            losses = -labels * ops.log(predictions) - (1.0 - labels) * ops.log1p(-predictions)
        weights = weights * ops.ones_like(labels)
        return [ops.sum(values) for values in (losses * weights, labels * weights, weights)]

    def result(self) -> Any:
        """Returns the normalized entropy of all examples so far, a scalar."""
        weight = ops.convert_to_tensor(self.weight_sum)
        empty = ops.equal(weight, 0.0)
        weight = ops.where(empty, ops.ones_like(weight), weight)
        loss = self.loss_sum / weight
        rate = self.label_sum / weight
        undefined = ops.logical_or(rate <= 0.0, rate >= 1.0)
        safe_rate = ops.where(undefined, 0.5 * ops.ones_like(rate), rate)
        entropy = -safe_rate * ops.log(safe_rate) - (1.0 - safe_rate) * ops.log1p(-safe_rate)
        value = ops.where(undefined, float("nan") * ops.ones_like(loss), loss / entropy)
        value = ops.where(empty, ops.zeros_like(value), value)
        return ops.cast(value, self.dtype)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make an equal metric."""
        return {
            **super().get_config(),
            "from_logits": self.from_logits,
            "epsilon": self.epsilon,
        }
