"""Groups of trainers with copies of their own, simulated by `cc/simulation/group_cluster.h`."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tf_recsync import _engine, staleness
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
from tf_recsync.simulation._pictures import draw_numbers, draw_shares, draw_staleness
from tf_recsync.simulation._result import as_json, in_short
from tf_recsync.simulation._settings import check_count, check_number
from tf_recsync.synchronization.shadow_algorithms import BMUF, EASGD, Algorithm, ModelAveraging
from tf_recsync.synchronization.shadow_schedule import Foreground, Shadow
from tf_recsync.synchronization.sync_report import SyncReport, per_second

# Of groups, and of what each of them has; as in cc/simulation/group_cluster.cc.
MOST_IN_GROUPS = 2**14

# (device or -1 for the trainer, FLOP, bytes to it, bytes back, reads, updates) of each use.
Stages = Sequence[Sequence[tuple[int, int, int, int, bool, bool]]]


@dataclasses.dataclass(frozen=True)
class GroupResult:
    """What simulated groups of trainers came to. All times are of virtual time.

    Attributes:
        seconds: how long the run took.
        steps: finished steps, by trainer.
        sync_report: as `strategy.sync_report(model)` gives.
        staleness: of the updates of dense parameters, as `strategy.staleness(model)` gives it:
            within a copy, which others update as well. The path of a variable is
            "group:0/shard:0" for the first; `rows` is empty.
        links: the machines of the trainers, then of the groups' servers, then the sync PSs.
        trainers_busy: for which share of the time each trainer's device computed for stages.
        servers_busy: for which share of the time each group PS computed, group by group.
        losses: of the first group's copy, in the order of time; empty if nothing was learned.
    """

    seconds: float
    steps: tuple[int, ...]
    sync_report: SyncReport
    staleness: staleness.Report
    links: tuple[LinkUse, ...]
    trainers_busy: tuple[float, ...]
    servers_busy: tuple[float, ...]
    losses: tuple[Loss, ...] = ()

    @property
    def steps_per_second(self) -> float:
        """Of all trainers together; infinite if they took no time."""
        return per_second(sum(self.steps), self.seconds)

    @property
    def examples_per_second(self) -> float | None:
        """EPS, of all trainers together; None if the batch size is not known."""
        return self.sync_report.examples_per_second

    @property
    def average_sync_gap(self) -> float:
        """As `strategy.average_sync_gap(model)`: the steps of a group for each synchronization.

        Infinite without any.
        """
        syncs = sum(self.sync_report.syncs)
        return self.sync_report.steps / syncs if syncs else math.inf

    def seconds_to(self, loss: float) -> float | None:
        """When the loss was first found to be at most this; None if never.

        Args:
            loss: what it has to come to.
        """
        return seconds_to(self.losses, loss)

    def as_dict(self) -> dict[str, Any]:
        """The figures, as JSON has them: numbers, texts, lists and dicts of these.

        Lists are as the attributes have them, and None stands for what is not finite.
        """
        found = {
            "simulated": True,
            "seconds": self.seconds,
            "steps": list(self.steps),
            "steps_per_second": self.steps_per_second,
            "examples_per_second": self.examples_per_second,
            "syncs": list(self.sync_report.syncs),
            "average_sync_gap": self.average_sync_gap,
            "staleness": in_short(self.staleness.dense),
            "trainers_busy": list(self.trainers_busy),
            "servers_busy": list(self.servers_busy),
            "links": [dataclasses.asdict(link) for link in self.links],
            "losses": [dataclasses.asdict(look) for look in self.losses],
        }
        return as_json(found)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws steps, synchronizations and staleness, and what else there is.

        That is how busy devices are, and the loss if one was learned.

        Args:
            path: of the picture; its ending says the format, such as ".png" or ".svg".

        Raises:
            ImportError: if matplotlib is not installed.
        """
        parts = {"trainers": self.trainers_busy, "group PSs": self.servers_busy}
        shares = {name: float(np.mean(busy)) for name, busy in parts.items() if any(busy)}
        columns = 3 + bool(shares) + bool(self.losses)
        figure = new_figure(3.7 * columns, 3.4, "GroupResult.plot")
        of_steps, of_syncs, stale, *others = figure.subplots(1, columns)
        draw_numbers(of_steps, self.steps, "trainer", "steps")
        draw_numbers(of_syncs, self.sync_report.syncs, "group", "synchronizations")
        draw_staleness(stale, self.staleness.dense, "updates")
        if shares:
            draw_shares(others[0], shares, "busy, mean of all")
        if self.losses:
            draw_losses(others[-1], self.losses)
        figure.suptitle(
            f"simulated: {len(self.steps)} trainers, {self.steps_per_second:.5g} steps a second, "
            f"average sync gap {self.average_sync_gap:.4g}",
            fontsize=10,
        )
        figure.savefig(path, dpi=120)

    def __str__(self) -> str:
        stale = self.staleness.dense
        lines = [
            ("simulated seconds", f"{self.seconds:.3f}"),
            ("steps", f"{sum(self.steps)} of {len(self.steps)} trainers"),
            ("steps per second", f"{self.steps_per_second:.2f}"),
            ("average sync gap", f"{self.average_sync_gap:.2f} steps"),
            ("staleness in a group", f"mean {stale.mean:.4g}, max {stale.max}"),
        ]
        if self.examples_per_second is not None:
            lines.insert(3, ("examples per second", f"{self.examples_per_second:.1f}"))
        for name, busy in (
            ("trainers are busy", self.trainers_busy),
            ("group PSs are busy", self.servers_busy),
        ):
            if any(busy):
                lines.append((name, f"{np.mean(busy):.1%}, the busiest {max(busy):.1%}"))
        if self.losses:
            lines.append(("loss", f"{self.losses[-1].loss:.5f}"))
        return table(lines)


def simulate_groups(
    algorithm: Algorithm | None,
    mode: str | Shadow | Foreground,
    compute: Callable[[int, int, float], float],
    factor: Callable[[int, int, float], float] | None,
    *,
    groups: int,
    trainers_per_group: int,
    threads: int,
    servers: int,
    stages: Stages,
    trainer_flops: float,
    server_flops: float,
    sync_ps: int | None,
    parameter_bytes: int,
    steps: int | None,
    seconds: float | None,
    bandwidth: float,
    server_bandwidth: float,
    sync_ps_bandwidth: float,
    duplex: bool,
    latency: float,
    batch_size: int | None,
    model: LogisticRegression | None,
    loss_seconds: float,
) -> GroupResult:
    """Checks the arguments of `simulate_shadow` or `simulate_hierarchical`, and runs it."""
    told = run_groups(
        algorithm,
        mode,
        compute,
        factor=factor,
        groups=groups,
        trainers=trainers_per_group,
        threads=threads,
        servers=servers,
        stages=stages,
        trainer_per_second=checked_bandwidth("trainer_flops", trainer_flops),
        server_per_second=checked_bandwidth("ps_flops", server_flops),
        trainer_bytes_per_second=checked_bandwidth("bandwidth", bandwidth),
        server_bytes_per_second=checked_bandwidth("ps_bandwidth", server_bandwidth),
        sync_ps_bytes_per_second=checked_bandwidth("sync_ps_bandwidth", sync_ps_bandwidth),
        duplex=duplex,
        latency=latency,
        sync_ps=sync_ps,
        parameter_bytes=parameter_bytes,
        limits_given=(steps, seconds),
        model=model,
        loss_seconds=loss_seconds,
        keeps_log=False,
    )
    if batch_size is not None:
        check_at_least("batch_size", batch_size, 1)
    elif model is not None:
        batch_size = model.batch_size
    return _result(told, max(servers, 1), parameter_bytes, batch_size)


def run_groups(
    algorithm: Algorithm | None,
    mode: str | Shadow | Foreground,
    compute: Callable[[int, int, float], float],
    *,
    factor: Callable[[int, int, float], float] | None = None,
    sync_ps: int | None,
    parameter_bytes: int,
    limits_given: tuple[int | None, float | None],
    model: LogisticRegression | None,
    loss_seconds: float,
    latency: float,
    duplex: bool,
    **given: Any,
) -> dict[str, Any]:
    """What the engine tells of a run; see `run_group_cluster` in cc/python."""
    check_count("parameter_bytes", parameter_bytes, most=MOST_BYTES)
    check_number("latency", latency)
    check_number("loss_seconds", loss_seconds, positive=True)
    check_bool("duplex", duplex)
    check_model(model)
    if model is not None and model.momentum:
        raise ValueError(f"momentum must be 0 where copies have threads, not {model.momentum!r}")
    most_steps, most_seconds = limits(*limits_given)
    synchronization = _synchronization(algorithm, mode)
    return _engine.run_group_cluster(
        compute_seconds=compute,
        factor=factor,
        sync_ps=_checked_sync_ps(sync_ps, algorithm),
        **synchronization,
        bytes=parameter_bytes,
        steps=most_steps,
        seconds=most_seconds,
        problem=None if model is None else model.problem(),
        learning_rate=0.0 if model is None else model.learning_rate,
        loss_seconds=loss_seconds,
        latency=latency,
        duplex=duplex,
        **given,
    )


def _checked_sync_ps(sync_ps: int | None, algorithm: Algorithm | None) -> int:
    """How many sync PSs there are."""
    is_central = algorithm is not None and algorithm.is_central
    if sync_ps is None:
        return int(is_central)
    check_count("sync_ps", sync_ps, most=MOST_IN_GROUPS)
    if is_central != (sync_ps > 0):
        allowed = "at least 1 with EASGD" if is_central else "0 without EASGD"
        raise ValueError(f"sync_ps must be {allowed}, not {sync_ps}")
    return sync_ps


def _synchronization(
    algorithm: Algorithm | None, mode: str | Shadow | Foreground
) -> dict[str, Any]:
    """The arguments of the engine for how copies are synchronized, and when."""
    found = {"algorithm": "none", "alpha": 0.0, "eta": 0.0, "momentum": 0.0, "nesterov": False}
    # A subclass may synchronize otherwise, which the engine would not know.
    if type(algorithm) is EASGD:
        found |= {"algorithm": "easgd", "alpha": algorithm.alpha}
    elif type(algorithm) is ModelAveraging:
        found |= {"algorithm": "model_averaging", "alpha": algorithm.alpha}
    elif type(algorithm) is BMUF:
        found |= {
            "algorithm": "bmuf",
            "alpha": algorithm.alpha,
            "eta": algorithm.eta,
            "momentum": algorithm.momentum,
            "nesterov": algorithm.nesterov,
        }
    elif algorithm is not None:
        raise ValueError(
            f"algorithm must be EASGD, ModelAveraging, BMUF or None, not {algorithm!r}"
        )
    elif mode != "shadow":
        raise ValueError(f'mode must be "shadow" without an algorithm, not {mode!r}')
    if isinstance(mode, Foreground):
        if mode.gap is not None:
            check_count("gap", mode.gap, 1)
            return found | {"schedule": "gap", "gap": mode.gap, "interval": 0.0}
        return found | {"schedule": "interval", "gap": 1, "interval": mode.interval}
    if mode == "shadow":
        mode = Shadow()
    if not isinstance(mode, Shadow):
        raise ValueError(f'mode must be "shadow", a Shadow or a Foreground, not {mode!r}')
    return found | {"schedule": "background", "gap": 1, "interval": mode.min_interval}


def _result(
    told: dict[str, Any], shards: int, parameter_bytes: int, batch_size: int | None
) -> GroupResult:
    of = staleness.Statistics.from_counters
    holders = {
        f"group:{number // shards}/shard:{number % shards}": of([counters])
        for number, counters in enumerate(told["staleness"])
    }
    seconds = told["seconds"]

    def shares(busy: Sequence[float]) -> tuple[float, ...]:
        # A sum of many times may be more than their end, by what is rounded.
        return tuple(min(one / seconds, 1.0) if seconds else 0.0 for one in busy)

    return GroupResult(
        seconds=seconds,
        steps=tuple(told["steps"]),
        sync_report=SyncReport(
            syncs=[syncs // shards for syncs in told["syncs"]],
            seconds=told["sync_seconds"],
            steps=sum(told["steps"]),
            trained_seconds=seconds,
            elements=parameter_bytes // 4,
            sync_ps_bytes=told["sync_ps_bytes"],
            local_batch_size=batch_size,
        ),
        staleness=staleness.Report(
            dense=staleness.Statistics.sum(holders.values()), rows=of([]), variables=holders
        ),
        links=tuple(LinkUse(*traffic) for traffic in told["traffic"]),
        trainers_busy=shares(told["trainers_busy"]),
        servers_busy=shares(told["servers_busy"]),
        losses=tuple(Loss(*look) for look in told["losses"]),
    )
