"""Normalized entropy, the log loss relative to that of predicting the mean click rate."""

from typing import Any

import keras
from keras import ops


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
        if not 0 < epsilon < 0.5:
            raise ValueError(f"epsilon={epsilon}: must be greater than 0 and less than 0.5.")
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
        labels = _flat(y_true)
        predictions = _flat(y_pred)
        _check_size("y_pred", predictions, labels)
        if self.from_logits:
            # log(1 + exp(x)) - label * x without overflow.
            losses = ops.maximum(predictions, 0.0) - labels * predictions
            losses += ops.log1p(ops.exp(-ops.abs(predictions)))
        else:
            predictions = ops.clip(predictions, self.epsilon, 1.0 - self.epsilon)
            losses = -labels * ops.log(predictions) - (1.0 - labels) * ops.log1p(-predictions)
        weights = ops.ones_like(labels)
        if sample_weight is not None:
            sample_weight = _flat(sample_weight)
            if sample_weight.shape[0] != 1:
                _check_size("sample_weight", sample_weight, labels)
            weights = weights * sample_weight
        for total, values in (
            (self.loss_sum, losses * weights),
            (self.label_sum, labels * weights),
            (self.weight_sum, weights),
        ):
            total.assign(total + ops.sum(values))

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


def _flat(values: Any) -> Any:
    """Returns values of any shape as float64 `[n]`."""
    return ops.reshape(ops.cast(ops.convert_to_tensor(values), "float64"), (-1,))


def _check_size(name: str, values: Any, labels: Any) -> None:
    """Raises ValueError if two vectors are known to have different sizes."""
    size, expected = values.shape[0], labels.shape[0]
    if None not in (size, expected) and size != expected:
        raise ValueError(f"{name}: has {size} elements, must have {expected} as y_true has.")
