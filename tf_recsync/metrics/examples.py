"""The examples of a batch, as metrics get them from Keras."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops


def examples_of(y_true: Any, y_pred: Any, sample_weight: Any) -> tuple[Any, Any, Any]:
    """Labels, predictions and weights as vectors of one dtype, float32 or float64.

    Args:
        y_true: labels, `[batch]` or `[batch, 1]`.
        y_pred: predictions, alike.
        sample_weight: weights, alike, or a scalar; None means 1.

    Returns:
        Labels `[n]`, predictions `[n]`, and weights `[n]` or `[1]`, which is for all.

    Raises:
        ValueError: if their numbers are known to differ.
    """
    predictions = ops.convert_to_tensor(y_pred)
    is_double = keras.backend.standardize_dtype(predictions.dtype) == "float64"
    dtype = "float64" if is_double else "float32"
    labels, predictions = _flat(y_true, dtype), _flat(predictions, dtype)
    _check_size("y_pred", predictions, labels)
    weights = _flat(1.0 if sample_weight is None else sample_weight, dtype)
    if weights.shape[0] != 1:
        _check_size("sample_weight", weights, labels)
    return labels, predictions, weights


def _flat(values: Any, dtype: str) -> Any:
    return ops.reshape(ops.cast(ops.convert_to_tensor(values), dtype), (-1,))


def _check_size(name: str, values: Any, labels: Any) -> None:
    size, expected = values.shape[0], labels.shape[0]
    if None not in (size, expected) and size != expected:
        raise ValueError(f"{name}: has {size} elements, must have {expected} as y_true has.")
