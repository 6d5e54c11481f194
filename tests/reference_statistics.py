"""What tests compare metrics and data with: AUC, log loss, linear models, by their definitions.

In numpy, and not by scikit-learn: where that is installed, Keras imports it in every process, which
then takes a third longer to start.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def auc(labels, scores, weights=None) -> float:
    """The probability that a positive example has a higher score than a negative one.

    Args:
        labels: 0 or 1, [n].
        scores: of any scale, [n]. Equal scores count a half.
        weights: of the examples, [n]; None for equal ones.
    """
    scores = np.asarray(scores, np.float64)
    weights = np.ones(len(scores)) if weights is None else np.asarray(weights, np.float64)
    positive = np.asarray(labels) == 1
    order = np.argsort(scores[~positive])
    negatives = scores[~positive][order]
    below = np.concatenate([[0.0], np.cumsum(weights[~positive][order])])  # Weight of the first n.
    sides = [np.searchsorted(negatives, scores[positive], side) for side in ("left", "right")]
    wins = (below[sides[0]] + below[sides[1]]) / 2
    return float(np.average(wins, weights=weights[positive]) / below[-1])


def log_loss(labels, probabilities, weights=None) -> float:
    """The mean of -log of the probability of what happened."""
    labels, p = np.asarray(labels, np.float64), np.asarray(probabilities, np.float64)
    losses = -(labels * np.log(p) + (1 - labels) * np.log1p(-p))
    return float(np.average(losses, weights=weights))


def one_hot(ids: Sequence[np.ndarray]) -> list[np.ndarray]:
    """One column for each id of each feature that the first part has; others get zeros.

    Args:
        ids: parts of the data, [examples, features] each.
    """
    known = [np.unique(column) for column in ids[0].T]
    return [
        np.hstack([column[:, None] == k for column, k in zip(part.T, known, strict=True)]).astype(
            np.float64
        )
        for part in ids
    ]


def logistic_regression(inputs: np.ndarray, labels: np.ndarray, rounds: int = 8) -> np.ndarray:
    """The weights of a logistic regression and, last, its bias, by Newton's method.

    Args:
        inputs: [examples, features].
        labels: 0 or 1, [examples].
        rounds: steps of Newton's method.
    """
    x = np.hstack([inputs, np.ones((len(inputs), 1))])
    ridge = np.ones(x.shape[1])  # Half the squared weights are added to the sum of the losses.
    ridge[-1] = 1e-6
    w = np.zeros(x.shape[1])
    for _ in range(rounds):
        p = 1 / (1 + np.exp(-x @ w))
        gradient = x.T @ (p - labels) + ridge * w
        hessian = (x * (p * (1 - p))[:, None]).T @ x + np.diag(ridge)
        w -= np.linalg.solve(hessian, gradient)
    return w
