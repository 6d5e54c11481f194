"""What users call to simulate workers, or groups of them, that have copies of the parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from tf_recsync.simulation._compute import ComputeTime, StepFactor
from tf_recsync.simulation._groups import MOST_IN_GROUPS, GroupResult
from tf_recsync.simulation._hierarchical import GroupStep, simulate_hierarchical
from tf_recsync.simulation._hop import HopResult, simulate_hop
from tf_recsync.simulation._learning import LogisticRegression
from tf_recsync.simulation._settings import MOST_OF_ALL, Network, check_count
from tf_recsync.simulation._shadow import simulate_shadow
from tf_recsync.strategies.hop_checks import checked_protocol
from tf_recsync.synchronization.hop_protocol import Skip
from tf_recsync.synchronization.shadow_algorithms import Algorithm
from tf_recsync.synchronization.shadow_schedule import Foreground, Shadow
from tf_recsync.testing.slowdown import Slowdown
from tf_recsync.topology import Topology


def run_hop(
    topology: Topology,
    *,
    compute_seconds: float | Sequence[float],
    steps: int | None = None,
    seconds: float | None = None,
    max_iteration_gap: int | None | Literal["default"] = "default",
    backup_workers: int | Sequence[int] = 0,
    staleness_bound: int | None = None,
    skip: Skip | None = None,
    order: Literal["parallel", "serial"] = "parallel",
    protocol: Literal["token_queue", "notify_ack"] = "token_queue",
    slowdown: Slowdown | None = None,
    noise: float = 0.0,
    network: Network | None = None,
    update_bytes: int = 0,
    batch_size: int | None = None,
    model: LogisticRegression | None = None,
    loss_seconds: float = 1.0,
    target_loss: float | None = None,
    record_events: bool = False,
    seed: int = 0,
) -> HopResult:
    """Simulates decentralized training, as `HopStrategy` trains, in virtual time.

    The workers are those of the product: the same C++ class decides who waits for whom. All take
    their steps from one pool, as batches of a dataset.

    Reference: Luo et al. 2019, "Hop: Heterogeneity-aware Decentralized Training".

    Args:
        topology: of `recsync.topology`; it says how many workers there are.
        compute_seconds: how long a step computes, in seconds, from 0 to a million: a number, or one
            for each worker.
        steps: of all workers together, an int of at least 1; None (the default): without end.
        seconds: after which everything stops, positive; None (the default): not before the steps
            are done. One of the two must be given.
        max_iteration_gap: as of `HopStrategy`, as are the five that follow.
        backup_workers: see there.
        staleness_bound: see there.
        skip: see there.
        order: see there.
        protocol: see there.
        slowdown: by which compute times are multiplied, of `recsync.testing`; None (the default)
            for none.
        noise: sigma of a lognormal factor of mean 1, for each step another; from 0, the
            default, to 5.
        network: None (the default) for one without limits; of the links, only those of workers
            count.
        update_bytes: of the parameters that a worker sends to a neighbor, at least 0, the default.
        batch_size: the examples of a step, for examples per second; None (the default): the
            model's, or not known.
        model: what is learned; None (the default): nothing, only time passes.
        loss_seconds: of virtual time between two looks at the loss, positive; default 1.
        target_loss: at least 0, at which training ends when a look finds it reached; None (the
            default): it does not.
        record_events: whether the result keeps what workers do, for `write_timeline`; default
            False.
        seed: of the noise, an int of 64 bits. Defaults to 0.

    Returns:
        What it came to.

    Raises:
        ValueError: if an argument is wrong; or if steps take no time, and only `seconds` is given,
            so that there would be no end of them.

    Example:
        A worker that is three times as slow holds up a ring of four:

        >>> import tf_recsync as recsync
        >>> slow = recsync.testing.SlowWorkers(3.0, [1])
        >>> for slowdown in (None, slow):
        ...     result = recsync.simulation.run_hop(
        ...         recsync.topology.ring(4), compute_seconds=0.5, steps=400, slowdown=slowdown
        ...     )
        ...     print(f"{result.steps_per_second:.1f} steps a second")
        8.0 steps a second
        2.7 steps a second
    """
    if not isinstance(topology, Topology):
        raise ValueError(f"topology must be one of recsync.topology, not {topology!r}")
    links = _network(network)
    each = links.workers_per_machine
    return simulate_hop(
        checked_protocol(
            topology,
            *(max_iteration_gap, backup_workers, staleness_bound, skip, order, protocol),
            check_invariants=False,
        ),
        ComputeTime(compute_seconds, topology.size, slowdown, noise, seed),
        steps=steps,
        seconds=seconds,
        machines=[worker // each for worker in range(topology.size)],
        bandwidth=_limit(links.bandwidth),
        latency=links.latency,
        update_bytes=update_bytes,
        batch_size=batch_size,
        model=model,
        loss_seconds=loss_seconds,
        target_loss=target_loss,
        record_events=record_events,
    )


def run_shadow_sync(
    algorithm: Algorithm | None,
    *,
    trainers: int,
    compute_seconds: float | Sequence[float],
    parameter_bytes: int,
    steps: int | None = None,
    seconds: float | None = None,
    mode: Literal["shadow"] | Shadow | Foreground = "shadow",
    threads_per_trainer: int = 1,
    sync_ps: int | None = None,
    memory_seconds: float = 0.0,
    slowdown: Slowdown | None = None,
    noise: float = 0.0,
    network: Network | None = None,
    batch_size: int | None = None,
    model: LogisticRegression | None = None,
    loss_seconds: float = 1.0,
    seed: int = 0,
) -> GroupResult:
    """Simulates trainers that have copies of the parameters, as of `ShadowSyncStrategy`.

    Time is virtual. When copies are synchronized is decided as there, and they move by the
    engine's own interpolation. Tables on embedding PSs are not simulated: what a step needs of
    them is a part of its time.

    Reference: Zheng et al. 2021, "ShadowSync".

    Args:
        algorithm: `recsync.EASGD`, `ModelAveraging` or `BMUF`, of which subclasses are refused;
            None for trainers that are not synchronized.
        trainers: how many there are, an int of at least 1.
        compute_seconds: how long a step of a thread computes: a number, or one for each trainer.
        parameter_bytes: of a copy, an int of at least 0.
        steps: of all threads together, an int of at least 1; None (the default): without end.
        seconds: after which everything stops, positive; None (the default): not before the steps
            are done. One of the two must be given.
        mode: "shadow" (the default), a `recsync.Shadow` or a `recsync.Foreground`.
        threads_per_trainer: an int of at least 1, the default.
        sync_ps: how many sync PSs there are; None (the default): 1 with EASGD, else 0.
        memory_seconds: of a step after it has computed, in which the trainer's memory serves only
            its thread, at least 0, the default.
        slowdown: of `recsync.testing`, by which compute and memory times are multiplied; None
            (the default) for none.
        noise: as of `run_hop`, of the same.
        network: None (the default) for one without limits. A trainer has a machine of its own;
            `server_bandwidth` is that of a sync PS's links.
        batch_size: the examples of a step, for examples per second; None (the default): the
            model's, or not known.
        model: what is learned, by plain gradient descent; None (the default): only time passes.
        loss_seconds: of virtual time between two looks at the loss, positive; default 1.
        seed: of the noise, an int of 64 bits. Defaults to 0.

    Returns:
        What it came to.

    Raises:
        ValueError: if an argument is wrong; or if synchronizations in the background would take
            no time at all, or steps where only `seconds` is given, so that there would be no end
            of them.

    Example:

    >>> import tf_recsync as recsync
    >>> result = recsync.simulation.run_shadow_sync(
    ...     recsync.EASGD(alpha=0.5),
    ...     trainers=2,
    ...     compute_seconds=0.1,
    ...     parameter_bytes=1_000_000,
    ...     steps=200,
    ...     network=recsync.simulation.Network(bandwidth=1e6, server_bandwidth=4e6),
    ... )
    >>> round(result.steps_per_second), result.average_sync_gap > 1
    (20, True)
    """
    check_count("trainers", trainers, 1, MOST_IN_GROUPS)
    return simulate_shadow(
        algorithm,
        mode,
        ComputeTime(compute_seconds, trainers),
        trainers=trainers,
        threads_per_trainer=threads_per_trainer,
        factor=StepFactor(trainers, slowdown, noise, seed),
        sync_ps=sync_ps,
        parameter_bytes=parameter_bytes,
        steps=steps,
        seconds=seconds,
        memory_seconds=memory_seconds,
        batch_size=batch_size,
        model=model,
        loss_seconds=loss_seconds,
        **_bandwidths(network, "sync_ps_bandwidth"),
    )


def run_hierarchical(
    algorithm: Algorithm | None,
    step: GroupStep,
    *,
    groups: int,
    trainers_per_group: int,
    trainer_flops: float,
    ps_flops: float,
    parameter_bytes: int,
    steps: int | None = None,
    seconds: float | None = None,
    mode: Literal["shadow"] | Shadow | Foreground = "shadow",
    nets_per_trainer: int = 1,
    sync_ps: int | None = None,
    lookup_seconds: float | Sequence[float] = 0.0,
    slowdown: Slowdown | None = None,
    noise: float = 0.0,
    network: Network | None = None,
    batch_size: int | None = None,
    model: LogisticRegression | None = None,
    loss_seconds: float = 1.0,
    seed: int = 0,
) -> GroupResult:
    """Simulates groups of trainers and parameter servers, as of `HierarchicalStrategy`.

    The nets of a trainer share its device, and all nets of a group its group PSs: each device does
    one thing after the other. Updates are applied as they come (Hogwild). Each group PS
    synchronizes its shard of the parameters by itself.

    Reference: "Hierarchical Training", sections 3 and 4.

    Args:
        algorithm: `recsync.EASGD`, `ModelAveraging` or `BMUF`, of which subclasses are refused;
            None for groups that are not synchronized.
        step: what a step has the devices do, such as `GroupStep.of(plan)`; it says how many group
            PSs a group has.
        groups: how many there are, an int of at least 1.
        trainers_per_group: an int of at least 1.
        trainer_flops: the floating-point operations that a trainer does in a second, in all its
            nets together; positive.
        ps_flops: those that a group PS does in a second; positive.
        parameter_bytes: of a group's copy, an int of at least 0.
        steps: of all nets together, an int of at least 1; None (the default): without end.
        seconds: after which everything stops, positive; None (the default): not before the steps
            are done. One of the two must be given.
        mode: "shadow" (the default), a `recsync.Shadow` or a `recsync.Foreground`.
        nets_per_trainer: an int of at least 1, the default.
        sync_ps: how many sync PSs there are; None (the default): 1 with EASGD, else 0.
        lookup_seconds: that a step takes before all else, as for lookups of tables: a number, or
            one for each trainer; default 0.
        slowdown: of `recsync.testing`, by which that time and what a step has its trainer do are
            multiplied; group PSs do not get slower. None (the default) for none.
        noise: as of `run_hop`, of the same.
        network: None (the default) for one without limits. A trainer has a machine of its own;
            `server_bandwidth` is that of the links of group PSs and sync PSs.
        batch_size: the examples of a step, for examples per second; None (the default): the
            model's, or not known.
        model: what is learned, by plain gradient descent; None (the default): only time passes.
        loss_seconds: of virtual time between two looks at the loss, positive; default 1.
        seed: of the noise, an int of 64 bits. Defaults to 0.

    Returns:
        What it came to.

    Raises:
        ValueError: if an argument is wrong; or if synchronizations in the background would take
            no time at all, or steps where only `seconds` is given, so that there would be no end
            of them.

    Example:
        Half a second for each step, in two groups of one trainer:

        >>> import tf_recsync as recsync
        >>> step = recsync.simulation.GroupStep(trainer_flop=2e9, ps_flop=(3e9,), ps_bytes=(0,))
        >>> result = recsync.simulation.run_hierarchical(
        ...     None,
        ...     step,
        ...     groups=2,
        ...     trainers_per_group=1,
        ...     trainer_flops=1e10,
        ...     ps_flops=1e10,
        ...     parameter_bytes=0,
        ...     steps=20,
        ... )
        >>> round(result.steps_per_second, 6)
        4.0
    """
    check_count("groups", groups, 1, MOST_IN_GROUPS)
    check_count("trainers_per_group", trainers_per_group, 1, MOST_IN_GROUPS)
    trainers = groups * trainers_per_group
    check_count("groups * trainers_per_group", trainers, 1, MOST_OF_ALL)
    return simulate_hierarchical(
        algorithm,
        mode,
        step,
        groups=groups,
        trainers_per_group=trainers_per_group,
        nets_per_trainer=nets_per_trainer,
        trainer_flops=trainer_flops,
        ps_flops=ps_flops,
        compute=ComputeTime(lookup_seconds, trainers, argument="lookup_seconds"),
        factor=StepFactor(trainers, slowdown, noise, seed),
        sync_ps=sync_ps,
        parameter_bytes=parameter_bytes,
        steps=steps,
        seconds=seconds,
        batch_size=batch_size,
        model=model,
        loss_seconds=loss_seconds,
        **_bandwidths(network, "ps_bandwidth", "sync_ps_bandwidth"),
    )


def _network(network: Network | None) -> Network:
    if network is not None and not isinstance(network, Network):
        raise ValueError(f"network must be a recsync.simulation.Network or None, not {network!r}")
    return Network() if network is None else network


def _limit(bandwidth: float | None) -> float:
    return math.inf if bandwidth is None else bandwidth


def _bandwidths(network: Network | None, *servers: str) -> dict[str, Any]:
    """The arguments that say what a network of trainers, each on its own machine, is like."""
    links = _network(network)
    if links.workers_per_machine != 1:
        raise ValueError(
            "workers_per_machine of the network must be 1, as each trainer has a machine of its "
            f"own here, not {links.workers_per_machine}"
        )
    own = links.bandwidth if links.server_bandwidth is None else links.server_bandwidth
    of_servers = dict.fromkeys(servers, _limit(own))
    return {"bandwidth": _limit(links.bandwidth), "latency": links.latency, **of_servers}
