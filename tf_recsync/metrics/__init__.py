"""Metrics for click models."""

from tf_recsync.metrics.auc import AUC
from tf_recsync.metrics.normalized_entropy import NormalizedEntropy

__all__ = ["AUC", "NormalizedEntropy"]
