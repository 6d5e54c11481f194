"""Decentralized training (Hop) in virtual time, on the engine's own workers."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import numpy as np

from tf_recsync import _engine
from tf_recsync._checks import check_at_least, check_bool
from tf_recsync._figures import new_figure
from tf_recsync.simulation._learning import (
    MOST_BYTES,
    LinkUse,
    LogisticRegression,
    Loss,
    check_model,
    checked_bandwidth,
    draw_losses,
    limits,
    seconds_to,
    table,
)
from tf_recsync.simulation._pictures import FIRST, SECOND, draw_numbers
from tf_recsync.simulation._result import as_json
from tf_recsync.simulation._settings import check_count, check_number
from tf_recsync.synchronization.events import Event, write_trace
from tf_recsync.synchronization.hop_protocol import Protocol
from tf_recsync.synchronization.hop_reports import Reports, State, WorkerReport
from tf_recsync.synchronization.sync_report import SyncReport, per_second


@dataclasses.dataclass(frozen=True)
class HopResult:
    """What simulated decentralized training came to. All times are of virtual time.

    Attributes:
        protocol: how workers exchanged parameters.
        seconds: when the last step ended, or everything stopped.
        steps: finished steps, by worker.
        hop_report: as `HopStrategy.hop_report` gives.
        sync_report: as `HopStrategy.sync_report` gives.
        largest_gaps: int64 [n, n]: how far worker i was ahead of worker j at most, in
            iterations, before the first worker left at the end.
        losses: in the order of time; empty if nothing was learned.
        links: of each machine.
        events: as `Recording.events`
            gives, in microseconds; empty if they were not recorded.
    """

    protocol: Protocol
    seconds: float
    steps: tuple[int, ...]
    hop_report: list[WorkerReport]
    sync_report: SyncReport
    largest_gaps: np.ndarray
    losses: tuple[Loss, ...] = ()
    links: tuple[LinkUse, ...] = ()
    events: tuple[Event, ...] = ()

    @property
    def bounds(self) -> np.ndarray:
        """[n, n]: how far worker i may be ahead of worker j (table 1 of the paper).

        Infinite if unbounded.
        """
        return self.protocol.bounds()

    @property
    def steps_per_second(self) -> float:
        """Of all workers together; infinite if they took no time."""
        return per_second(sum(self.steps), self.seconds)

    @property
    def seconds_per_iteration(self) -> float:
        """Of a worker, on the average; iterations that were skipped count as none."""
        return self.seconds * len(self.steps) / sum(self.steps) if any(self.steps) else 0.0

    def seconds_to(self, loss: float) -> float | None:
        """When the loss was first found to be at most this; None if never.

        Args:
            loss: what it has to come to.
        """
        return seconds_to(self.losses, loss)

    def write_timeline(self, path: str | os.PathLike[str]) -> None:
        """Writes what workers did when, as `callbacks.Timeline` does.

        Args:
            path: of the file, a `.json`. Its folder must exist.
        """
        write_trace(path, len(self.steps), lambda: self.events)

    def as_dict(self) -> dict[str, Any]:
        """The figures, as JSON has them: numbers, texts, lists and dicts of these.

        Lists are by worker; events are left out. None stands for what is not finite.
        """
        reports = self.hop_report
        found = {
            "simulated": True,
            "topology": self.protocol.topology.name,
            "seconds": self.seconds,
            "steps": list(self.steps),
            "steps_per_second": self.steps_per_second,
            "examples_per_second": self.sync_report.examples_per_second,
            "seconds_per_iteration": self.seconds_per_iteration,
            "waited_for_updates": [report.waited_for_updates for report in reports],
            "waited_for_tokens": [report.waited_for_tokens for report in reports],
            "iterations_skipped": [report.iterations_skipped for report in reports],
            "largest_gaps": self.largest_gaps.tolist(),
            "bounds": self.bounds.tolist(),
            "links": [dataclasses.asdict(link) for link in self.links],
            "losses": [dataclasses.asdict(look) for look in self.losses],
        }
        return as_json(found)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws steps, waits and iteration gaps by worker, and the loss if one was learned.

        Args:
            path: of the picture; its ending says the format, such as ".png" or ".svg".

        Raises:
            ImportError: if matplotlib is not installed.
        """
        columns = 4 if self.losses else 3
        figure = new_figure(3.7 * columns, 3.4, "HopResult.plot")
        of_steps, of_waits, gaps, *learned = figure.subplots(1, columns)
        draw_numbers(of_steps, self.steps, "worker", "steps")
        total = max(self.seconds, 1e-300)
        updates = [report.waited_for_updates / total for report in self.hop_report]
        tokens = [report.waited_for_tokens / total for report in self.hop_report]
        workers = range(len(self.steps))
        of_waits.bar(workers, updates, color=FIRST, label="for updates")
        of_waits.bar(workers, tokens, bottom=updates, color=SECOND, label="for tokens")
        of_waits.set_ylim(0, 1)
        of_waits.set_xlabel("worker")
        of_waits.set_ylabel("share of its time that it waits")
        of_waits.legend(fontsize=7)
        image = gaps.imshow(self.largest_gaps, cmap="Blues")
        figure.colorbar(image, ax=gaps, fraction=0.046)
        gaps.set_title("largest iteration gaps", fontsize=9)
        gaps.set_xlabel("ahead of worker")
        gaps.set_ylabel("worker")
        for axes in learned:
            draw_losses(axes, self.losses)
        figure.suptitle(
            f"simulated: {self.protocol.topology.name}, {len(self.steps)} workers, "
            f"{self.steps_per_second:.5g} steps a second",
            fontsize=10,
        )
        figure.savefig(path, dpi=120)

    def __str__(self) -> str:
        waited = [r.waited_for_updates for r in self.hop_report]
        tokens = [r.waited_for_tokens for r in self.hop_report]
        total = max(self.seconds * len(self.steps), 1e-300)
        lines = [
            ("simulated seconds", f"{self.seconds:.3f}"),
            ("steps", f"{sum(self.steps)} of {len(self.steps)} workers"),
            ("steps per second", f"{self.steps_per_second:.2f}"),
            ("seconds per iteration", f"{self.seconds_per_iteration:.4f}"),
            ("waiting for updates", f"{sum(waited) / total:.1%} of the workers' time"),
            ("waiting for tokens or acknowledgements", f"{sum(tokens) / total:.1%}"),
            ("largest iteration gap", f"{int(self.largest_gaps.max(initial=0))}"),
            ("iterations skipped", f"{sum(r.iterations_skipped for r in self.hop_report)}"),
        ]
        if self.losses:
            lines.append(("loss", f"{self.losses[-1].loss:.5f}"))
        return table(lines)


def simulate_hop(
    protocol: Protocol,
    compute: Callable[[int, int, float], float],
    *,
    steps: int | None = None,
    seconds: float | None = None,
    machines: Sequence[int] | None = None,
    bandwidth: float | Sequence[float] = math.inf,
    duplex: bool = True,
    latency: float = 0.0,
    update_bytes: int = 0,
    batch_size: int | None = None,
    model: LogisticRegression | None = None,
    loss_seconds: float = 1.0,
    target_loss: float | None = None,
    record_events: bool = False,
) -> HopResult:
    """Runs decentralized training in virtual time.

    The workers are those of the product: the same C++ class decides who waits for whom. A step
    and the ways of an update are as in cc/simulation/hop_cluster.h. All workers take steps from
    one pool, as batches of a dataset; one that finds none left leaves.

    Args:
        protocol: of `hop_checks.checked_protocol`, as `HopStrategy` and `Hop` have.
        compute: gives the seconds that a worker computes in a step, at least 0: of the worker's
            index, the steps that it has done, and the seconds since training began.
        steps: of all workers together, at least 1; None (the default): without end.
        seconds: after which everything stops, positive; None (the default): not before the steps
            are done. One of the two must be given.
        machines: of each worker, on which machine it is, from 0 on; None (the default): each on
            one of its own.
        bandwidth: in bytes per second, of each machine's network card in each direction, or one
            for all; positive. Default infinite.
        duplex: whether a network card sends and receives at the same time (the default). If not,
            it has the bandwidth for both directions together, as the links that
            `recsync.testing.set_bandwidth` limits.
        latency: seconds of a message from one machine to another, at least 0. Default 0.
        update_bytes: of an update, at least 0. Default 0.
        batch_size: the examples of a step, for examples per second; None (the default): the
            model's, or not known.
        model: what is learned; None (the default): nothing, only time passes.
        loss_seconds: of virtual time between two looks at the loss, positive. Default 1.
        target_loss: at least 0, at which training ends when a look finds it reached; None (the
            default): not.
        record_events: whether what workers do is kept. Default False.

    Returns:
        What it came to.

    Raises:
        ValueError: if an argument is wrong.

    >>> from tf_recsync import topology
    >>> from tf_recsync.simulation._hop import simulate_hop
    >>> from tf_recsync.strategies.hop_checks import checked_protocol
    >>> protocol = checked_protocol(
    ...     topology.ring(4), 5, 0, None, None, "parallel", "token_queue", True
    ... )
    >>> simulate_hop(protocol, lambda worker, step, now: 0.5, steps=40).seconds
    5.0
    """
    size = protocol.topology.size
    machines = _checked_machines(machines, size)
    bandwidths = _checked_bandwidths(bandwidth, max(machines) + 1)
    most_steps, most_seconds = limits(steps, seconds)
    check_number("loss_seconds", loss_seconds, positive=True)
    check_count("update_bytes", update_bytes, most=MOST_BYTES)
    check_bool("duplex", duplex)
    check_model(model)
    check_bool("record_events", record_events)
    check_number("latency", latency)
    if batch_size is not None:
        check_at_least("batch_size", batch_size, 1)
    if target_loss is not None:
        check_number("target_loss", target_loss)
        if model is None:
            raise ValueError(f"target_loss needs a model to be learned, got {target_loss!r}")
    told = _engine.run_hop_cluster(
        workers=[protocol.options(worker) for worker in range(size)],
        serial=protocol.is_serial,
        compute_seconds=compute,
        machines=machines,
        bytes_per_second=bandwidths,
        duplex=duplex,
        latency=latency,
        update_bytes=update_bytes,
        steps=most_steps,
        seconds=most_seconds,
        keeps_events=record_events,
        problem=None if model is None else model.problem(),
        learning_rate=0.0 if model is None else model.learning_rate,
        momentum=0.0 if model is None else model.momentum,
        loss_seconds=loss_seconds,
        target_loss=-math.inf if target_loss is None else target_loss,
    )
    reports = Reports([protocol.topology.in_neighbors(worker) for worker in range(size)])
    for worker, state in enumerate(told["states"]):
        reports.update(worker, State.of(**state))
    if batch_size is None and model is not None:
        batch_size = model.batch_size
    return _result(protocol, told, reports.all(), update_bytes, batch_size)


def _result(
    protocol: Protocol,
    told: dict[str, Any],
    reports: list[WorkerReport],
    update_bytes: int,
    batch_size: int | None,
) -> HopResult:
    sync = SyncReport(
        syncs=told["steps"],
        seconds=[r.waited_for_updates + r.waited_for_tokens for r in reports],
        steps=sum(told["steps"]),
        trained_seconds=told["seconds"],
        elements=update_bytes // 4,
        sync_ps_bytes=0,
        local_batch_size=batch_size,
    )
    return HopResult(
        protocol=protocol,
        seconds=told["seconds"],
        steps=tuple(told["steps"]),
        hop_report=reports,
        sync_report=sync,
        largest_gaps=told["largest_gaps"],
        losses=tuple(Loss(*look) for look in told["losses"]),
        links=tuple(LinkUse(*traffic) for traffic in told["traffic"]),
        events=tuple(Event(*row) for row in told["events"].tolist()),
    )


def _checked_machines(machines: Sequence[int] | None, workers: int) -> list[int]:
    if machines is None:
        return list(range(workers))
    machines = list(machines)
    if len(machines) != workers:
        raise ValueError(
            f"machines must be one for each of the {workers} workers, not {len(machines)}"
        )
    for machine in machines:
        check_at_least("machines", machine, 0)
    # A number of which nobody is would be a link that nobody has.
    if set(machines) != set(range(len(set(machines)))):
        raise ValueError(f"machines must be numbered from 0 on without gaps, not {machines!r}")
    return [int(machine) for machine in machines]


def _checked_bandwidths(bandwidth: float | Sequence[float], machines: int) -> list[float]:
    given = [bandwidth] * machines if isinstance(bandwidth, Real) else list(bandwidth)
    if len(given) != machines:
        raise ValueError(f"bandwidth must be one for all, or {machines}, not {len(given)}")
    return [checked_bandwidth("bandwidth", one) for one in given]
