"""What users call to simulate a run."""

from __future__ import annotations

from collections.abc import Sequence

from tf_recsync.modes import ModeConfig
from tf_recsync.simulation import _servers
from tf_recsync.simulation._click_model import ClickModel
from tf_recsync.simulation._result import Result
from tf_recsync.simulation._settings import Network, Server
from tf_recsync.testing.slowdown import Slowdown


def run(
    mode: ModeConfig,
    *,
    workers: int,
    ps: int = 1,
    compute_seconds: float | Sequence[float],
    steps: int,
    slowdown: Slowdown | None = None,
    noise: float = 0.0,
    network: Network | None = None,
    server: Server | None = None,
    pull_bytes: int = 0,
    push_bytes: int = 0,
    reader_seconds: float = 0.0,
    reader_ahead: int = 2,
    warmup_steps: int = 0,
    cooldown_steps: int = 0,
    model: ClickModel | None = None,
    seed: int = 0,
) -> Result:
    """Simulates workers that train on parameter servers, in virtual time.

    Token lists, gradient buffers and the counters of staleness are those of real servers. Time
    passes as fast as it can be computed. The same arguments give the same result.

    Args:
        mode: one of `recsync.modes`. `Hogwild` takes the time of `Async`, and no update is lost.
        workers: how many there are, an int of at least 1.
        ps: how many parameter servers there are, an int of at least 1, the default. All get equal
            shares of what is pulled and pushed.
        compute_seconds: how long a step computes, in seconds, from 0 to a million: a number, or one
            for each worker.
        steps: how many steps all workers do together, an int of at least 1.
        slowdown: by which compute times are multiplied, of `recsync.testing`; None (the default)
            for none. The seconds that it gets are those since all began.
        noise: sigma of a lognormal factor of mean 1, by which compute times are multiplied, too,
            for each step another; from 0, the default, to 5.
        network: None (the default) for one without limits.
        server: the processor of each parameter server; None (the default) for one that takes no
            time.
        pull_bytes: what a step pulls from all servers together, an int of at least 0, the
            default.
        push_bytes: what it pushes, in the same way.
        reader_seconds: how long a worker's reader takes for a batch, at least 0. Defaults to 0.0.
        reader_ahead: how many batches the reader keeps ready, which no other worker gets; an int
            of at least 0. Defaults to 2, as in this package's strategies; with 0 it begins when
            the step before is done.
        warmup_steps: the first steps, which are left out of what is reported; an int from 0, the
            default, to `steps` - 1. All workers begin at the same time, with a staleness that
            rises from 1: take some tens for each of them.
        cooldown_steps: the last steps, which are left out, too; an int from 0, the default, to
            less than the others. Slow workers end later, as each has batches of its own: some
            for each of them.
        model: what the workers learn; None (the default) for nothing: then only time passes. How
            long steps take and what they pull and push does not depend on it.
        seed: of the noise, an int of 64 bits. Defaults to 0.

    Returns:
        A `Result`.

    Raises:
        ValueError: if an argument is wrong.

    Example:

    >>> import tf_recsync as recsync
    >>> result = recsync.simulation.run(
    ...     recsync.modes.Async(), workers=8, compute_seconds=0.1, steps=160, warmup_steps=8
    ... )
    >>> result.staleness.dense.mean  # Of workers of equal speed, it is their number.
    8.0
    >>> round(result.steps_per_second)
    80
    """
    if not isinstance(mode, ModeConfig):
        raise ValueError(f"mode must be one of recsync.modes, not {mode!r}")
    return _servers.simulate(
        mode,
        workers=workers,
        ps=ps,
        compute_seconds=compute_seconds,
        steps=steps,
        slowdown=slowdown,
        noise=noise,
        network=Network() if network is None else network,
        server=Server() if server is None else server,
        pull_bytes=pull_bytes,
        push_bytes=push_bytes,
        reader_seconds=reader_seconds,
        reader_ahead=reader_ahead,
        warmup_steps=warmup_steps,
        cooldown_steps=cooldown_steps,
        model=model,
        seed=seed,
    )
