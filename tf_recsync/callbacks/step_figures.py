"""Figures of the last steps for TensorBoard, by worker and by server."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Set

import keras
import tensorflow as tf
from absl import logging

from tf_recsync.staleness import Report, Statistics
from tf_recsync.synchronization.events import Recording, Total

# What workers do, by what of it is recorded.
_SHARES = {
    "computing": ("compute",),
    "waiting_for_data": ("wait for a batch",),
    "waiting_for_tokens": ("wait for tokens",),
    "waiting_for_servers": ("pull", "push", "push and pull"),
    "waiting_for_neighbors": ("wait for updates",),
}
# The charts of TensorBoard's custom scalars, by the groups that they stand in: of each, the prefix
# of its tags, and its title.
_CHARTS = {
    "Speed": {
        "examples_per_second": "Examples per second, by worker",
        "batches_per_second": "Batches per second, by worker",
    },
    "What workers do": {
        "computing": "Share of time that a worker computes",
        "waiting_for_data": "Share of time that it waits for batches",
        "waiting_for_tokens": "Share of time that it waits for tokens",
        "waiting_for_servers": "Share of time that it pulls and pushes",
        "waiting_for_neighbors": "Share of time that it waits for neighbors' updates",
    },
    "Staleness": {"staleness": "Staleness: mean, 99th percentile and maximum"},
    "Servers": {
        "server_bytes": "Memory of servers' processes, in bytes",
        "losses": "What was lost with workers",
        "tables": "Keys of tables",
    },
}


def staleness_since(now: Report, before: Report) -> Statistics:
    """What was measured between two reports; of rows, where no dense variable is pushed."""
    if now.dense.count:
        return now.dense.since(before.dense)
    return now.rows.since(before.rows)


class StepFigures:
    """Writes the figures of the steps since the last time.

    Args:
        model: a model whose strategy is one of this package, about to train.
        writer: where the figures go.
    """

    def __init__(self, model: keras.Model, writer: tf.summary.SummaryWriter):
        self._model = model
        self._strategy = model.distribute_strategy
        self._writer = writer
        self._recording: Recording = self._strategy.record_events(model, 1, self.close)
        self._seen: set[str] = set()  # Of _SHARES, those that ever were above 0.
        self._charted: set[str] = set()  # The prefixes of the figures that have a chart.
        self.skip()

    def skip(self) -> None:
        """The next figures are those from now on."""
        self._at = time.monotonic()
        self._totals = self._recording.totals()
        self._staleness = self._strategy.staleness(self._model)

    def write(self, step: int) -> None:
        """Writes the figures since the last time; none while a server is gone.

        Args:
            step: where they stand: the batches that were trained on so far.
        """
        try:
            self._write(step)
        except (tf.errors.OpError, RuntimeError) as error:
            # Training may go on when it is back; if not, it says so itself.
            logging.debug("figures of the last steps are left out: %s", error)

    def _write(self, step: int) -> None:
        strategy, before, at = self._strategy, self._totals, self._at
        staleness = self._staleness
        self.skip()
        seconds = max(self._at - at, 1e-9)
        figures: dict[str, float] = {}
        for worker, totals in self._totals.items():
            figures |= self._of_worker(worker, before.get(worker, {}), totals, seconds)
        measured = staleness_since(self._staleness, staleness)
        if measured.count:
            figures["staleness/mean"] = measured.mean
            figures["staleness/p99"] = measured.quantile(0.99)
            figures["staleness/max"] = measured.max
        for server in strategy.memory(self._model):
            if server.resident is not None:
                figures[f"server_bytes/{server.job}_{server.index}"] = server.resident
        for name, value in dataclasses.asdict(strategy.losses(self._model)).items():
            figures[f"losses/{name}"] = value
        for table, counts in strategy.tables(self._model).items():
            for name, value in dataclasses.asdict(counts).items():
                figures[f"tables/{table}/{name}"] = value
        with self._writer.as_default(step=step):
            for name, value in figures.items():
                tf.summary.scalar(name, value)
            prefixes = {name.partition("/")[0] for name in figures}
            if not prefixes <= self._charted:
                self._charted |= prefixes
                tf.summary.experimental.write_raw_pb(_layout(self._charted))
        self._writer.flush()

    def close(self) -> None:
        """No figures are written any more."""
        self._recording.stop()

    def _of_worker(
        self, worker: int, before: dict[str, Total], now: dict[str, Total], seconds: float
    ) -> dict[str, float]:
        """A worker's figures of so many seconds."""

        def gained(activity: str) -> Total:
            then = before.get(activity, Total(0, 0.0))
            own = now[activity]
            return Total(own.count - then.count, own.seconds - then.seconds)

        steps = gained("compute").count / seconds
        size = self._model.train_function.local_batch_size
        speed = ("batches_per_second", steps)
        if size is not None:
            speed = ("examples_per_second", steps * size)
        spent = {
            name: sum(gained(activity).seconds for activity in activities)
            for name, activities in _SHARES.items()
        }
        self._seen.update(name for name, own in spent.items() if own > 0)
        # Of the time of the steps that have ended, as one may be longer than the time between.
        total = max(sum(spent.values()), 1e-9)
        shares = {name: spent[name] / total for name in spent if name in self._seen}
        return {f"{name}/worker_{worker}": value for name, value in (speed, *shares.items())}


def _layout(prefixes: Set[str]) -> bytes:
    """What TensorBoard's custom scalars show: a chart for each figure, of all workers.

    Args:
        prefixes: of the figures that there are.
    """
    from tensorboard.plugins.custom_scalar import layout_pb2, summary

    categories = [
        layout_pb2.Category(
            title=group,
            chart=[
                layout_pb2.Chart(
                    title=title,
                    multiline=layout_pb2.MultilineChartContent(tag=[f"^{prefix}/"]),
                )
                for prefix, title in charts.items()
                if prefix in prefixes
            ],
        )
        for group, charts in _CHARTS.items()
        if not prefixes.isdisjoint(charts)
    ]
    return summary.pb(layout_pb2.Layout(category=categories)).SerializeToString()
