"""Metrics for click models."""

from tf_recsync.metrics.auc import AUC
from tf_recsync.metrics.calibration import Calibration
from tf_recsync.metrics.exact import exact_auc, group_auc
from tf_recsync.metrics.normalized_entropy import NormalizedEntropy

__all__ = ["AUC", "Calibration", "NormalizedEntropy", "exact_auc", "group_auc"]
