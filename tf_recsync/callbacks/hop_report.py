"""What the workers of decentralized training did in each epoch (Hop)."""

from __future__ import annotations

import dataclasses
import os

import tensorflow as tf

from tf_recsync._checks import check_bool
from tf_recsync._deprecation import without_strategy
from tf_recsync.callbacks.strategy_callback import EpochReport, mean_data_wait
from tf_recsync.synchronization.hop_reports import WorkerReport


class HopReport(EpochReport):
    """Adds what workers of a `HopStrategy` did in each epoch to its logs, and to TensorBoard.

    To the progress bar and `History` it adds, over all workers: `iterations_per_second` (the
    mean of a worker's), `waiting` (the share of their time that they waited for neighbors),
    `data_wait` (the same for batches), `updates_used`, `sends_saved`, `stale_updates` (that
    came too late), and `jumps`. Put it before callbacks that read those logs.

    With a `log_dir`, TensorBoard gets the same as `recsync/...`, and every field of each
    worker's `WorkerReport` as `worker_0/updates_used` and so on: what it did in the epoch, but
    for `iteration`, where it stands. `worker_0/waiting_seconds` is the sum of both waits.

    Args:
        log_dir: a folder for TensorBoard, or None (the default).
        per_worker: whether the progress bar and `History` get each worker's values, too,
            under the same names as in TensorBoard. Default False.

    Raises:
        ValueError: if `per_worker` is no bool; when training begins, if the strategy is no
            `HopStrategy`.
        ImportError: if there is a `log_dir`, and the package `tensorboard` is not installed.

    Example:

    >>> import tf_recsync as recsync
    >>> callbacks = [recsync.callbacks.HopReport(per_worker=True)]

    Then `model.fit(dataset, callbacks=callbacks).history["worker_3/waiting_seconds"]` has a value
    for each epoch.
    """

    _needs = "topology"

    @without_strategy
    def __init__(self, log_dir: str | os.PathLike | None = None, per_worker: bool = False):
        super().__init__(log_dir)
        check_bool("per_worker", per_worker)
        self._per_worker = per_worker
        self._before: list[WorkerReport] = []
        self._data_wait = 0.0

    def _begin(self):
        self._data_wait = mean_data_wait(self._strategy, self.model)
        self._before = self._strategy.hop_report(self.model)

    def _report(self, epoch, logs):
        seconds = self._seconds
        now = self._strategy.hop_report(self.model)
        done = [_gained(then, report) for then, report in zip(self._before, now, strict=True)]

        def total(name: str) -> float:
            return sum(worker[name] for worker in done)

        report = {
            "iterations_per_second": total("iteration") / len(done) / seconds,
            "waiting": total("waiting_seconds") / len(done) / seconds,
            "data_wait": (mean_data_wait(self._strategy, self.model) - self._data_wait) / seconds,
            "updates_used": total("updates_used"),
            "sends_saved": total("sends_saved"),
            "stale_updates": total("stale_updates_dropped"),
            "jumps": total("jumps"),
        }
        workers = {
            f"worker_{worker}/{name}": now[worker].iteration if name == "iteration" else value
            for worker, values in enumerate(done)
            for name, value in values.items()
        }
        if logs is not None:
            logs.update(report, **(workers if self._per_worker else {}))
        if self._writer is None:
            return
        with self._writer.as_default(step=epoch):
            for name, value in report.items():
                tf.summary.scalar(f"recsync/{name}", value)
            for name, value in workers.items():
                tf.summary.scalar(name, value)
        self._writer.flush()


def _gained(then: WorkerReport, now: WorkerReport) -> dict[str, float]:
    """What a worker has done between two reports, by the names of the fields."""
    fields = [field.name for field in dataclasses.fields(WorkerReport)]
    gained = {name: getattr(now, name) - getattr(then, name) for name in fields}
    waited = gained["waited_for_updates"] + gained["waited_for_tokens"]
    return {**gained, "waiting_seconds": waited}
