"""Keras callbacks that report on distributed training."""

from tf_recsync.callbacks.group_auc import GroupAUC
from tf_recsync.callbacks.hop_report import HopReport
from tf_recsync.callbacks.timeline import HopTimeline, Timeline
from tf_recsync.callbacks.training_report import ShadowReport, TrainingReport
from tf_recsync.callbacks.worker_events import WorkerEvents
from tf_recsync.checkpoint.callback import Checkpoint, SavedCheckpoint
from tf_recsync.prometheus import Prometheus
from tf_recsync.publishing import Publication, Publish
from tf_recsync.run_status import Status

__all__ = [
    "Checkpoint",
    "GroupAUC",
    "HopReport",
    "HopTimeline",
    "Prometheus",
    "Publication",
    "Publish",
    "SavedCheckpoint",
    "ShadowReport",
    "Status",
    "Timeline",
    "TrainingReport",
    "WorkerEvents",
]
