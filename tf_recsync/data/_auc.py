"""The exact area under the ROC curve."""

import numpy as np


def exact_auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Returns the chance that a row with label 1 has a higher score than one with label 0.

    Args:
        labels: `[rows]`, 0 or 1, both at least once.
        scores: `[rows]`; equal ones count a half.
    """
    positives = float(labels.sum())
    negatives = len(labels) - positives
    # The sum of the ranks of the rows with label 1, with the mean rank for equal scores.
    _, group, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[group]
    rank_sum = float(ranks[labels > 0].sum())
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)
