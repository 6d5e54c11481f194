"""What a simulation of parameter servers found."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

import numpy as np

from tf_recsync import staleness
from tf_recsync._figures import new_figure
from tf_recsync.simulation._pictures import FIRST, SECOND, draw_shares, draw_staleness
from tf_recsync.synchronization import aggregation

_CAUSES = ("data", "token", "pull", "compute", "push")


@dataclasses.dataclass(frozen=True)
class Times:
    """Where the workers' time has gone: float64 [workers] each, in seconds of virtual time.

    Attributes:
        data: waits for batches.
        token: waits for tokens: for other workers, and for the messages.
        pull: from then on until the parameters are there.
        compute: until the gradients are there.
        push: until all servers are done with them.
        steps: the steps that each worker has done, int64 [workers].
    """

    data: np.ndarray
    token: np.ndarray
    pull: np.ndarray
    compute: np.ndarray
    push: np.ndarray
    steps: np.ndarray

    def shares(self) -> dict[str, float]:
        """Of the time of all workers together, what went where; by the attributes' names."""
        sums = {cause: float(getattr(self, cause).sum()) for cause in _CAUSES}
        total = sum(sums.values())
        return {cause: value / total if total else 0.0 for cause, value in sums.items()}


@dataclasses.dataclass(frozen=True)
class Utilization:
    """For which share of the time something was busy.

    Attributes:
        processors: of each server, the mean of its threads; float64 [ps].
        server_in: its link from the network, float64 [ps]; 0 where bandwidth has no limit.
        server_out: its link into the network, float64 [ps].
        worker_in: the link from the network of each of the workers' machines.
        worker_out: its link into the network.
    """

    processors: np.ndarray
    server_in: np.ndarray
    server_out: np.ndarray
    worker_in: np.ndarray
    worker_out: np.ndarray


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """How good the model was in the course of a run.

    Attributes:
        steps: the steps that all workers had done together.
        seconds: since all began, in virtual time.
        auc: on the model's examples for tests; with a drift, on those of the day that follows.
        bayes_auc: of the true probabilities, on the same examples.
    """

    steps: int
    seconds: float
    auc: float
    bayes_auc: float


@dataclasses.dataclass(frozen=True)
class Result:
    """What a simulated run of workers on parameter servers gave. Nothing of it was measured.

    All but `seconds` and `steps` is of the time after the `warmup_steps` and before the
    `cooldown_steps`. Of `aggregation`, three attributes are exceptions: `global_step` counts from
    the beginning of the run, `age_max` is that of the warm-up, too, and `left_over` is what is left
    over at the end of the run.

    Attributes:
        mode: the name of the mode.
        workers: how many there were.
        ps: how many parameter servers.
        seconds: how long the run took, in virtual time.
        steps: the steps that all workers have done together.
        steps_per_second: of all workers together.
        staleness: as `strategy.staleness(model)` gives it. Each server counts the pushes to it as
            those to one dense variable, whose path is "ps:0" for the first. Of a model's rows
            on it, which `rows` sums up, the path is "ps:0/rows".
        aggregation: as `strategy.aggregation(model)` gives it; None in modes without tokens.
        utilization: how busy processors and links were.
        times: where the workers' time has gone.
        auc: of the model at the end, on its examples for tests, with a drift on those of the day
            that follows; None without one.
        bayes_auc: of the true probabilities, on the same examples.
        evaluations: in the course of the run, in its order.
    """

    mode: str
    workers: int
    ps: int
    seconds: float
    steps: int
    steps_per_second: float
    staleness: staleness.Report
    aggregation: aggregation.Report | None
    utilization: Utilization
    times: Times
    auc: float | None = None
    bayes_auc: float | None = None
    evaluations: tuple[Evaluation, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The figures in short, as JSON has them: numbers, texts, lists and dicts of these.

        None stands for what is not finite.
        """
        found: dict[str, Any] = {
            "simulated": True,
            "mode": self.mode,
            "workers": self.workers,
            "ps": self.ps,
            "seconds": self.seconds,
            "steps": self.steps,
            "steps_per_second": self.steps_per_second,
            "staleness": in_short(self.staleness.dense),
            "shares_of_time": self.times.shares(),
            "utilization": {
                field.name: float(getattr(self.utilization, field.name).mean())
                for field in dataclasses.fields(Utilization)
            },
        }
        if self.aggregation is not None:
            counts = dataclasses.asdict(self.aggregation)
            del counts["staleness"]
            found["aggregation"] = counts
        if self.auc is not None:
            found["rows_staleness"] = in_short(self.staleness.rows)
            found["auc"], found["bayes_auc"] = self.auc, self.bayes_auc
            found["evaluations"] = [dataclasses.asdict(one) for one in self.evaluations]
        return as_json(found)

    def __str__(self) -> str:
        """A table of the figures."""
        stale = self.staleness.dense
        shares = ", ".join(f"{cause} {share:.1%}" for cause, share in self.times.shares().items())
        lines = [
            f"simulated: {self.mode}, {self.workers} workers, {self.ps} parameter servers",
            f"  steps        {self.steps} in {self.seconds:.6g} s, {self.steps_per_second:.6g} a "
            "second",
            f"  staleness    mean {stale.mean:.6g}, variance {stale.deviation**2:.6g}, "
            f"max {stale.max}",
            f"  time goes to {shares}",
            f"  busy         {self._busy()}",
        ]
        if self.aggregation is not None:
            one = self.aggregation
            lines.append(
                f"  pushes       {one.included} included ({one.decayed} decayed), "
                f"{one.excluded} excluded, {one.late} late, {one.left_over} left over; "
                f"global step {one.global_step}"
            )
        if self.auc is not None:
            rows = self.staleness.rows
            lines.append(
                f"  AUC          {self.auc:.5f}, of the true probabilities {self.bayes_auc:.5f}; "
                f"staleness of rows: mean {rows.mean:.6g}, variance {rows.deviation**2:.6g}"
            )
        return "\n".join(lines)

    def _busy(self) -> str:
        """How busy processors and links were, on average and at most."""
        parts = []
        for field in dataclasses.fields(Utilization):
            share = getattr(self.utilization, field.name)
            mean, most = f"{share.mean():.1%}", f"{share.max():.1%}"
            parts.append(f"{field.name} {mean}" + (f" (most {most})" if most != mean else ""))
        return ", ".join(parts)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the staleness, where the workers' time goes, and how busy servers and links are.

        Args:
            path: of the picture; its ending says the format, such as ".png" or ".svg".

        Raises:
            ImportError: if matplotlib is not installed.
        """
        columns = 4 if self.evaluations else 3
        figure = new_figure(3.7 * columns, 3.4, "Result.plot")
        stale, of_time, busy, *learned = figure.subplots(1, columns)
        draw_staleness(stale, self.staleness.dense, "pushes")
        draw_shares(of_time, self.times.shares(), "share of the workers' time")
        shares = {
            field.name: float(getattr(self.utilization, field.name).mean())
            for field in dataclasses.fields(Utilization)
        }
        draw_shares(busy, shares, "busy, mean of all")
        for axes in learned:
            steps = [one.steps for one in self.evaluations]
            axes.plot(steps, [one.auc for one in self.evaluations], ".-", color=FIRST)
            best = [one.bayes_auc for one in self.evaluations]
            axes.plot(steps, best, color=SECOND, linestyle=":")
            axes.set_xlabel("steps of all workers")
            axes.set_ylabel("AUC; dotted: the best possible")
        figure.suptitle(
            f"simulated: {self.mode}, {self.workers} workers, {self.ps} PSs, "
            f"{self.steps_per_second:.5g} steps a second",
            fontsize=10,
        )
        figure.savefig(path, dpi=120)


def as_json(value: Any) -> Any:
    """The same with None for numbers that are not finite, which JSON does not know."""
    if isinstance(value, dict):
        return {name: as_json(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def in_short(statistics: staleness.Statistics) -> dict[str, Any]:
    """Statistics as JSON has them."""
    return {
        "mean": statistics.mean,
        "variance": statistics.deviation**2,
        "max": statistics.max,
        "histogram": [list(bucket) for bucket in statistics.histogram],
    }
