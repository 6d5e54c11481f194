"""Workers on parameter servers, simulated by `cc/simulation/server_simulation.h`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tf_recsync import _engine, staleness
from tf_recsync._checks import check_seed
from tf_recsync.modes import ModeConfig
from tf_recsync.simulation._click_model import ClickModel
from tf_recsync.simulation._factors import Factors
from tf_recsync.simulation._result import Evaluation, Result, Times, Utilization
from tf_recsync.simulation._settings import (
    MOST_NOISE,
    MOST_OF_ALL,
    MOST_SECONDS,
    Network,
    Server,
    check_count,
    check_number,
)
from tf_recsync.synchronization import aggregation
from tf_recsync.synchronization.gradient_buffer import State
from tf_recsync.synchronization.sync_report import per_second
from tf_recsync.testing.slowdown import Slowdown

# As in cc/simulation/server_simulation.cc.
_MOST_STEPS = 2**40
_MOST_BYTES = 2**50  # Of all servers together.


def simulate(
    config: ModeConfig,
    workers: int,
    ps: int,
    compute_seconds: float | Sequence[float],
    steps: int,
    slowdown: Slowdown | None,
    noise: float,
    network: Network,
    server: Server,
    pull_bytes: int,
    push_bytes: int,
    reader_seconds: float,
    reader_ahead: int,
    warmup_steps: int,
    cooldown_steps: int,
    model: ClickModel | None,
    seed: int,
) -> Result:
    """Checks the arguments of `run`, and runs it."""
    _check(
        workers, ps, steps, warmup_steps, cooldown_steps, reader_ahead, pull_bytes, push_bytes, seed
    )
    check_number("noise", noise, most=MOST_NOISE)
    check_number("reader_seconds", reader_seconds, most=MOST_SECONDS)
    for name, value, kind in (("network", network, Network), ("server", server, Server)):
        if not isinstance(value, kind):
            raise ValueError(f"{name} must be a recsync.simulation.{kind.__name__}, not {value!r}")
    if model is not None and not isinstance(model, ClickModel):
        raise ValueError(f"model must be a recsync.simulation.ClickModel or None, not {model!r}")
    mode = config.on(workers)
    check_count("staleness_bound", mode.clock_bound)
    check_count("the batches of a global batch", mode.repeats, 1, MOST_OF_ALL)
    factors = None if slowdown is None else Factors(slowdown, workers, steps // workers + 1)
    bandwidth = math.inf if network.bandwidth is None else float(network.bandwidth)
    of_servers = bandwidth if network.server_bandwidth is None else float(network.server_bandwidth)
    found = _engine.simulate_servers(
        workers=workers,
        servers=ps,
        steps=steps,
        warmup_steps=warmup_steps,
        cooldown_steps=cooldown_steps,
        seed=seed,
        uses_tokens=mode.uses_tokens,
        uses_buffers=mode.uses_buffers,
        gate=mode.gate,
        repeats=mode.repeats,
        clock_bound=mode.clock_bound,
        capacity=mode.capacity,
        drop_late=mode.drop_late,
        weight=mode.weight.short_attributes(),
        flush=mode.last_global_batch == "weigh",
        compute_seconds=_by_worker(compute_seconds, workers),
        noise=noise,
        more_factors=factors.block if factors and not factors.depend_on_time else None,
        factor=factors.one if factors and factors.depend_on_time else None,
        reader_seconds=reader_seconds,
        reader_ahead=reader_ahead,
        worker_bandwidth=bandwidth,
        server_bandwidth=of_servers,
        latency=network.latency,
        workers_per_machine=network.workers_per_machine,
        pull_bytes=pull_bytes,
        push_bytes=push_bytes,
        threads=server.threads,
        seconds_per_pull=server.seconds_per_pull,
        seconds_per_application=server.seconds_per_application,
        seconds_per_byte=server.seconds_per_byte,
        model=None if model is None else model.attributes(config.local_batch_size),
        evaluate_every=max(1, steps // model.evaluations) if model and model.evaluations else 0,
    )
    before, after = found["before"], found["after"]
    return Result(
        mode=mode.name,
        workers=int(workers),
        ps=int(ps),
        seconds=found["seconds"],
        steps=int(steps),
        steps_per_second=per_second(
            after["steps"] - before["steps"], after["seconds"] - before["seconds"]
        ),
        staleness=_staleness(before, after),
        aggregation=_aggregation(before, after, found["left_over"]) if mode.uses_tokens else None,
        utilization=_utilization(before, after, server.threads),
        times=_times(before, after),
        auc=found.get("auc"),
        bayes_auc=found.get("bayes_auc"),
        evaluations=tuple(Evaluation(*one) for one in found.get("evaluations", ())),
    )


def _check(
    workers: int,
    ps: int,
    steps: int,
    warmup_steps: int,
    cooldown_steps: int,
    reader_ahead: int,
    pull_bytes: int,
    push_bytes: int,
    seed: int,
) -> None:
    """Checks what is an integer."""
    check_count("workers", workers, 1, MOST_OF_ALL)
    check_count("ps", ps, 1, MOST_OF_ALL)
    check_count("steps", steps, 1, _MOST_STEPS)
    check_count("warmup_steps", warmup_steps)
    if warmup_steps >= steps:
        raise ValueError(f"warmup_steps must be less than steps={steps}, not {warmup_steps}")
    check_count("cooldown_steps", cooldown_steps)
    if warmup_steps + cooldown_steps >= steps:
        raise ValueError(
            f"cooldown_steps must be less than steps - warmup_steps={steps - warmup_steps}, not "
            f"{cooldown_steps}"
        )
    check_count("reader_ahead", reader_ahead, most=MOST_OF_ALL)
    check_count("pull_bytes", pull_bytes, most=_MOST_BYTES)
    check_count("push_bytes", push_bytes, most=_MOST_BYTES)
    check_seed(seed)


def _by_worker(compute_seconds: float | Sequence[float], workers: int) -> list[float]:
    """The compute time of each worker."""
    if isinstance(compute_seconds, (Sequence, np.ndarray)) and not isinstance(compute_seconds, str):
        seconds = [float(s) if isinstance(s, np.number) else s for s in compute_seconds]
        if len(seconds) != workers:
            raise ValueError(
                f"compute_seconds must be a number, or one for each of {workers} workers, not "
                f"{len(seconds)} numbers"
            )
        for w, value in enumerate(seconds):
            check_number(f"compute_seconds[{w}]", value, most=MOST_SECONDS)
        return seconds
    check_number("compute_seconds", compute_seconds, most=MOST_SECONDS)
    return [float(compute_seconds)] * workers


def _staleness(before: dict[str, Any], after: dict[str, Any]) -> staleness.Report:
    """The staleness since an earlier state."""

    def pushes(state: dict[str, Any]) -> list[np.ndarray]:
        return [buffer["staleness"] for buffer in state["buffers"]] or list(state["staleness"])

    def rows(state: dict[str, Any]) -> list[np.ndarray]:
        return list(state["rows_staleness"])

    def since(get: Callable[[dict[str, Any]], list[np.ndarray]]) -> list[staleness.Statistics]:
        of = staleness.Statistics.from_counters
        pairs = zip(get(before), get(after), strict=True)
        return [of([late]).since(of([early])) for early, late in pairs]

    by_name = {f"ps:{s}": one for s, one in enumerate(since(pushes))}
    by_name.update({f"ps:{s}/rows": one for s, one in enumerate(since(rows))})
    of_sum = staleness.Statistics.sum
    return staleness.Report(
        dense=of_sum(one for name, one in by_name.items() if not name.endswith("/rows")),
        rows=of_sum(one for name, one in by_name.items() if name.endswith("/rows")),
        variables=by_name,
    )


def _aggregation(
    before: dict[str, Any], after: dict[str, Any], left_over: int
) -> aggregation.Report:
    """What became of pushes since an earlier state."""
    states, latest = [], ("step", "applied", "pending", "age_max")
    for early, late in zip(before["buffers"], after["buffers"], strict=True):
        counts = {
            name: value if name in latest else value - early[name]
            for name, value in late.items()
            if name != "staleness"
        }
        of = staleness.Statistics.from_counters
        measured = of([late["staleness"]]).since(of([early["staleness"]]))
        states.append(State(**counts, staleness=measured))
    step = max((state.step for state in states), default=0)
    nothing = dict.fromkeys(("abandoned", "lost", "reissued"), 0)
    return aggregation.Report.of(states, global_step=step, left_over=left_over, **nothing)


def _utilization(before: dict[str, Any], after: dict[str, Any], threads: int) -> Utilization:
    """How busy all was since an earlier state."""
    seconds = after["seconds"] - before["seconds"]

    def share(name: str, of: int = 1) -> np.ndarray:
        busy = after[name] - before[name]
        # Links have whole nanoseconds.
        return np.minimum(busy / (seconds * of), 1.0) if seconds else np.zeros_like(busy)

    return Utilization(
        processors=share("processor", threads),
        server_in=share("server_in"),
        server_out=share("server_out"),
        worker_in=share("worker_in"),
        worker_out=share("worker_out"),
    )


def _times(before: dict[str, Any], after: dict[str, Any]) -> Times:
    """Where the workers' time has gone since an earlier state."""
    data, token, pull, compute, push, steps = (after["times"] - before["times"]).T
    return Times(data, token, pull, compute, push, steps.astype(np.int64))
