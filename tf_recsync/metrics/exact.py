"""Areas under the ROC curve of predictions that are all at hand, exact."""

from __future__ import annotations

from typing import Any

import numpy as np


def exact_auc(labels: Any, predictions: Any, sample_weight: Any = None) -> float:
    """Returns the area under the ROC curve, without the thresholds of a Keras metric.

    It is the chance that an example with label 1 has a higher prediction than one with label 0,
    where equal predictions count a half. Takes a sort of the examples: a second for five million.

    Args:
        labels: 0 or 1, array-like, `[n]` or `[n, 1]`.
        predictions: Probabilities, logits or other scores, `[n]` or `[n, 1]`; only their order
            counts.
        sample_weight: Weights of the examples, not negative, `[n]` or `[n, 1]`. None (the default)
            means 1.

    Returns:
        The area, from 0 to 1; NaN if the weight of the examples with label 0, or of those with
        label 1, is 0, as the area is not defined then.

    Raises:
        ValueError: If shapes differ, labels are other than 0 and 1, predictions are NaN, or a
            weight is negative or not finite.

    Example:
        >>> exact_auc([0, 0, 1, 1], [0.1, 0.4, 0.4, 0.9])
        0.875
    """
    labels, predictions, weights = _checked(labels, predictions, sample_weight)
    areas, _ = _areas(labels, predictions, weights, np.zeros(len(labels), np.int8))
    return float(areas[0]) if len(areas) else float("nan")


def group_auc(labels: Any, predictions: Any, groups: Any, sample_weight: Any = None) -> float:
    """Returns the mean of the areas under the ROC curves of groups, such as users (GAUC).

    The area of a group tells how well its examples are ordered among each other: what a ranking
    shown to one user depends on. Each group counts as much as its impressions, the sum of its
    weights. Groups whose examples all have one label, or whose other examples weigh nothing, have
    no area and are left out.

    Reference: Zhou et al., "Deep Interest Network for Click-Through Rate Prediction", 2018,
    section 6.2.

    Args:
        labels: 0 or 1, array-like, `[n]` or `[n, 1]`.
        predictions: Probabilities, logits or other scores, `[n]` or `[n, 1]`; only their order
            within a group counts, and equal ones count a half.
        groups: The group of each example, integers or strings, `[n]` or `[n, 1]`.
        sample_weight: Weights of the examples, not negative, `[n]` or `[n, 1]`. None (the default)
            means 1.

    Returns:
        The mean, from 0 to 1; NaN if no group has both labels.

    Raises:
        ValueError: If shapes differ, labels are other than 0 and 1, predictions are NaN, or a
            weight is negative or not finite.

    Example:
        >>> labels, predictions = [1, 0, 1, 0, 0], [0.9, 0.4, 0.1, 0.2, 0.05]
        >>> group_auc(labels, predictions, groups=["anna", "anna", "bob", "bob", "bob"])
        0.7
    """
    labels, predictions, weights = _checked(labels, predictions, sample_weight)
    names = _column("groups", groups)
    _check_size("groups", names, labels)
    _, numbers = np.unique(names, return_inverse=True)
    areas, impressions = _areas(labels, predictions, weights, numbers)
    defined = ~np.isnan(areas)
    if not defined.any():
        return float("nan")
    return float(np.average(areas[defined], weights=impressions[defined]))


def _areas(
    labels: np.ndarray, predictions: np.ndarray, weights: np.ndarray, groups: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The area of each group, NaN where it has none, and its weight."""
    if not len(labels):
        return np.zeros(0), np.zeros(0)
    order = np.lexsort((predictions, groups))
    weights, is_positive = weights[order], labels[order] != 0
    is_first = _differs_from_the_one_before(groups[order])
    ties = np.flatnonzero(is_first | _differs_from_the_one_before(predictions[order]))
    # For each set of equal predictions in a group, the weights of both labels.
    positives = np.add.reduceat(np.where(is_positive, weights, 0.0), ties)
    negatives = np.add.reduceat(np.where(is_positive, 0.0, weights), ties)
    first = np.searchsorted(ties, np.flatnonzero(is_first))
    # The weight of label 0 below, in the group.
    below = np.cumsum(negatives) - negatives
    below -= np.repeat(below[first], np.diff(np.append(first, len(ties))))
    won = np.add.reduceat(positives * (below + negatives / 2), first)
    totals = [np.add.reduceat(part, first) for part in (positives, negatives)]
    pairs = totals[0] * totals[1]
    areas = np.divide(won, pairs, out=np.full(len(first), np.nan), where=pairs > 0)
    return areas, totals[0] + totals[1]


def _differs_from_the_one_before(values: np.ndarray) -> np.ndarray:
    return np.concatenate([[True], values[1:] != values[:-1]])


def _checked(
    labels: Any, predictions: Any, sample_weight: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Labels, predictions and weights as vectors."""
    labels = _column("labels", labels)
    wrong = labels[(labels != 0) & (labels != 1)]
    if len(wrong):
        raise ValueError(f"labels: has {wrong[0]}, must be 0 or 1.")
    predictions = _column("predictions", predictions)
    _check_size("predictions", predictions, labels)
    if np.isnan(predictions).any():
        raise ValueError("predictions: has NaN, must be numbers.")
    weights = np.ones(len(labels)) if sample_weight is None else sample_weight
    weights = _column("sample_weight", weights).astype(np.float64)
    _check_size("sample_weight", weights, labels)
    wrong = weights[~((weights >= 0) & np.isfinite(weights))]
    if len(wrong):
        raise ValueError(f"sample_weight: has {wrong[0]}, must be finite and at least 0.")
    return labels, predictions, weights


def _column(argument: str, values: Any) -> np.ndarray:
    values = np.asarray(values)
    if values.ndim not in (1, 2) or values.shape[1:] not in ((), (1,)):
        raise ValueError(f"{argument}: has shape {values.shape}, must be [n] or [n, 1].")
    return values.reshape(-1)


def _check_size(argument: str, values: np.ndarray, labels: np.ndarray) -> None:
    if len(values) != len(labels):
        raise ValueError(
            f"{argument}: has {len(values)} elements, must have {len(labels)} as labels has."
        )
