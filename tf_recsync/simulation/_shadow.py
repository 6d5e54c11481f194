"""ShadowSync in virtual time: trainers that hold copies, synchronized beside training."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from tf_recsync.simulation._groups import MOST_IN_GROUPS, GroupResult, simulate_groups
from tf_recsync.simulation._learning import LogisticRegression
from tf_recsync.simulation._settings import MOST_SECONDS, check_count, check_number
from tf_recsync.synchronization.shadow_algorithms import Algorithm
from tf_recsync.synchronization.shadow_schedule import Foreground, Shadow


def simulate_shadow(
    algorithm: Algorithm | None,
    mode: Literal["shadow"] | Shadow | Foreground,
    compute: Callable[[int, int, float], float],
    *,
    trainers: int,
    threads_per_trainer: int = 1,
    factor: Callable[[int, int, float], float] | None = None,
    sync_ps: int | None = None,
    parameter_bytes: int,
    steps: int | None = None,
    seconds: float | None = None,
    memory_seconds: float = 0.0,
    bandwidth: float = math.inf,
    sync_ps_bandwidth: float = math.inf,
    duplex: bool = True,
    latency: float = 0.0,
    batch_size: int | None = None,
    model: LogisticRegression | None = None,
    loss_seconds: float = 1.0,
) -> GroupResult:
    """Runs trainers with copies of the dense parameters in virtual time, as `ShadowSyncStrategy`.

    When copies are synchronized is decided as in `ShadowSyncStrategy`, and they move by the
    engine's own interpolation. Tables on embedding PSs are not simulated: what a step needs of
    them is a part of its time.

    Args:
        algorithm: `EASGD`, `ModelAveraging` or `BMUF`; None for trainers that are not
            synchronized.
        mode: "shadow", a `Shadow` or a `Foreground`.
        compute: gives the seconds that a step computes, at least 0: of the trainer's index, the
            steps that its threads have begun, and the seconds since training began.
        trainers: how many there are, at least 1.
        threads_per_trainer: at least 1, the default.
        factor: gives by which what a step takes of its trainer, computing and memory, is
            multiplied, at least 0 and finite; of the same. None (the default): 1.
        sync_ps: how many sync PSs there are; None (the default): 1 with EASGD, else 0.
        parameter_bytes: of a copy, at least 0.
        steps: of all threads together, at least 1; None (the default): without end.
        seconds: after which everything stops, positive; None (the default): not before the steps
            are done. One of the two must be given.
        memory_seconds: of a step after it has computed, in which the trainer's memory serves only
            its thread, at least 0. Default 0.
        bandwidth: of a trainer's network card, bytes per second in each direction, positive;
            infinite by default.
        sync_ps_bandwidth: of a sync PS's, in the same way.
        duplex: whether network cards send and receive at the same time (the default), or have
            their bandwidth for both directions together.
        latency: seconds of a message, one way, at least 0. Default 0.
        batch_size: the examples of a step, for examples per second; None (the default): the
            model's, or not known.
        model: what is learned, by plain gradient descent; None (the default): only time passes.
        loss_seconds: of virtual time between two looks at the loss, positive. Default 1.

    Returns:
        What it came to.

    Raises:
        ValueError: if an argument is wrong; or if synchronizations in the background would take
            no time at all, so that there would be no end of them.

    >>> import tf_recsync as recsync
    >>> from tf_recsync.simulation._shadow import simulate_shadow
    >>> result = simulate_shadow(
    ...     recsync.EASGD(alpha=0.5),
    ...     recsync.Foreground(gap=5),
    ...     lambda trainer, step, now: 0.1,
    ...     trainers=2,
    ...     parameter_bytes=1000,
    ...     steps=100,
    ... )
    >>> round(result.steps_per_second, 6), result.average_sync_gap
    (20.0, 5.0)
    """
    check_count("trainers", trainers, 1, MOST_IN_GROUPS)
    check_count("threads_per_trainer", threads_per_trainer, 1, MOST_IN_GROUPS)
    check_number("memory_seconds", memory_seconds, most=MOST_SECONDS)
    # A trainer's memory is a device that serves one thread after the other: a unit a nanosecond.
    nanoseconds = round(1e9 * memory_seconds)
    return simulate_groups(
        algorithm,
        mode,
        compute,
        factor,
        groups=trainers,
        trainers_per_group=1,
        threads=threads_per_trainer,
        servers=0,
        stages=[[(-1, nanoseconds, 0, 0, False, False)]] if nanoseconds else [],
        trainer_flops=1e9,
        server_flops=math.inf,
        sync_ps=sync_ps,
        parameter_bytes=parameter_bytes,
        steps=steps,
        seconds=seconds,
        bandwidth=bandwidth,
        server_bandwidth=math.inf,
        sync_ps_bandwidth=sync_ps_bandwidth,
        duplex=duplex,
        latency=latency,
        batch_size=batch_size,
        model=model,
        loss_seconds=loss_seconds,
    )
