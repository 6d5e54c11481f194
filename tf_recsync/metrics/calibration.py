"""Calibration, the clicks that were predicted relative to those that happened."""

from typing import Any

import keras
from keras import ops

from tf_recsync._checks import check_bool
from tf_recsync.metrics.examples import examples_of


@keras.saving.register_keras_serializable(package="tf_recsync")
class Calibration(keras.metrics.Metric):
    """Sum of the predictions divided by the sum of the labels.

    A model that predicts as many clicks as happen has the value 1. Above 1 it predicts too many,
    below 1 too few (He et al., "Practical Lessons from Predicting Clicks on Ads at Facebook",
    2014). The AUC does not show that, as it is the same for predictions of any scale.

    The value is 0 before any data, like that of `keras.metrics.Mean`, and infinite while all labels
    are 0.

    The state is two sums in float64 (weighted predictions, weighted labels), so that the state of
    several workers can be merged by adding it up, and billions of examples do not lose precision.

    Args:
        name: Name of the metric. Default `"calibration"`.
        from_logits: Whether predictions are logits rather than probabilities. Default False.
        dtype: dtype of the result. None (the default) means `keras.config.floatx()`.

    Example:
        >>> metric = Calibration()
        >>> metric.update_state([[1.0], [0.0]], [[0.75], [0.5]])
        >>> float(metric.result())
        1.25
    """

    def __init__(
        self, name: str = "calibration", from_logits: bool = False, dtype: Any = None
    ) -> None:
        """See the class."""
        super().__init__(name=name, dtype=dtype)
        check_bool("from_logits", from_logits)
        self.from_logits = from_logits
        # Of predictions, then of labels. One variable, as each costs a worker messages.
        self.sums = self.add_variable(shape=(2,), initializer="zeros", dtype="float64", name="sums")

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
        if self.from_logits:
            predictions = ops.sigmoid(predictions)
        values = ops.cast(ops.stack([predictions, labels]), "float64")
        if sample_weight is not None:
            values = values * ops.cast(weights, "float64")
        self.sums.assign_add(ops.sum(values, axis=1))

    def result(self) -> Any:
        """Returns the calibration of all examples so far, a scalar."""
        predicted, clicked = ops.unstack(ops.convert_to_tensor(self.sums), 2)
        empty = ops.logical_and(ops.equal(predicted, 0.0), ops.equal(clicked, 0.0))
        value = predicted / ops.where(empty, ops.ones_like(clicked), clicked)
        return ops.cast(value, self.dtype)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make an equal metric."""
        return {**super().get_config(), "from_logits": self.from_logits}
