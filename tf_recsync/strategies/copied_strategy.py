"""The common base of strategies whose groups of workers have copies of their own."""

from __future__ import annotations

import dataclasses
from typing import Literal

import keras
import numpy as np

from tf_recsync.strategies.fit_strategy import FitStrategy
from tf_recsync.strategies.model_variables import variables_of
from tf_recsync.synchronization.copies import is_copied
from tf_recsync.synchronization.sync_report import SyncCounts, SyncReport
from tf_recsync.synchronization.synchronizer import Synchronizer
from tf_recsync.synchronization.worker_states import WorkerStates


class CopiedStrategy(FitStrategy):
    """Groups of workers, each with a copy of the dense parameters and what belongs to them.

    A group of one worker without servers holds its copy itself.
    """

    _read: str | int  # What users see of the copies: "mean", or the number of a group.

    def copies(self, model: keras.Model) -> list[list[np.ndarray] | None]:
        """The parameters of each group: of each worker that is a group of its own.

        Args:
            model: a model that was compiled in this strategy's scope.

        Returns:
            For each group, by its number, arrays like those of `model.trainable_variables`
            that are not on embedding PSs; all the same before the model has trained. None for
            a group that is lost.
        """
        synchronizer = self._synchronizer(model)
        copied = [v for v in model.trainable_variables if is_copied(v)]
        if synchronizer is None or not synchronizer.copies.has_any:
            return [[np.asarray(v) for v in copied]] * len(self._arrangement.groups)
        with self._guard.watched():
            return synchronizer.copies.by_group([v._value for v in copied])

    def worker_states(self, model: keras.Model) -> WorkerStates:
        """The copy of each group and what keeps them together, for a `tf.train.Checkpoint`.

        What a checkpoint keeps of the model alone is the output: one group's copy, or the mean,
        and the tables. With this, each group goes on with its own copy, optimizer state included;
        ShadowSync's central copy, or BMUF's global parameters, with theirs; Hop's workers, or
        groups, with their iterations. On another number of groups all begin with the mean; the
        number of servers that hold copies or the central one may change, and which layers are
        trained (`trainable` before `compile`) may not. Save and restore between
        epochs: a checkpoint that is saved while workers train has each of them as it is at some
        moment.

        Args:
            model: a built model that was compiled in this strategy's scope.

        Returns:
            What goes into the checkpoint, beside the model.

        Raises:
            ValueError: if the model is not built, or from elsewhere.

        Example:

        ```python
        checkpoint = tf.train.Checkpoint(model=model, workers=strategy.worker_states(model))
        checkpoint.save("checkpoints/clicks")
        checkpoint.restore(tf.train.latest_checkpoint("checkpoints")).assert_consumed()
        ```
        """
        if not model.built or model.optimizer is None:
            raise ValueError(f"model {model.name} must be built and compiled")

        def synchronizer() -> Synchronizer:
            self.attach(model)
            return model.train_function.ensure_synchronizer()

        synchronizer()
        return WorkerStates(synchronizer, lambda: variables_of(model), self._guard.watched)

    def sync_report(self, model: keras.Model) -> SyncReport:
        """What synchronization has done since the model began to train.

        Under a `HopStrategy` each step of a worker has an exchange, which counts as one.

        Args:
            model: a model that was compiled in this strategy's scope.

        Returns:
            Counts and times, all 0 before the model has trained.

        Raises:
            RuntimeError: if a sync PS is lost, or silent for `silence_timeout` seconds.
        """
        synchronizer = self._synchronizer(model)
        if synchronizer is None:
            return SyncCounts(len(self._arrangement.groups)).report(shards=1, elements=0)
        batch = model.train_function.local_batch_size
        with self._guard.watched():
            return dataclasses.replace(synchronizer.report(), local_batch_size=batch)

    def average_sync_gap(
        self, model: keras.Model, by: Literal["counters", "bytes"] = "counters"
    ) -> float:
        """The steps that a group does from one synchronization to the next, on average.

        Under a `ShadowSyncStrategy` or a `HopStrategy` each worker is a group.

        Reference: Zheng et al. 2021, "ShadowSync", section 4.1.1, which measures it in both ways.

        Args:
            model: a model that was compiled in this strategy's scope.
            by: "counters" (the default): steps over synchronizations, as they were counted;
                "bytes": steps over what the sync PSs have received and sent, in sizes of the
                parameters, there and back.

        Returns:
            The gap in steps; infinite before the first synchronization, and by bytes where
            there are no sync PSs.

        Raises:
            ValueError: if `by` is anything else.
        """
        if by not in ("counters", "bytes"):
            raise ValueError(f'by must be "counters" or "bytes", not {by!r}')
        report = self.sync_report(model)
        syncs = sum(report.syncs)
        if by == "bytes":
            syncs = report.sync_ps_bytes / (8 * report.elements) if report.elements else 0
        return report.steps / syncs if syncs else float("inf")

    def _synchronizer(self, model: keras.Model) -> Synchronizer | None:
        return getattr(model.train_function, "synchronizer", None)
