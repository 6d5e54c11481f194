"""Hierarchical training in virtual time: groups of trainers and parameter servers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

from tf_recsync.placement import OperatorPlan
from tf_recsync.simulation._groups import MOST_IN_GROUPS, GroupResult, simulate_groups
from tf_recsync.simulation._learning import MOST_BYTES, LogisticRegression
from tf_recsync.simulation._settings import check_count, check_number
from tf_recsync.synchronization.shadow_algorithms import Algorithm
from tf_recsync.synchronization.shadow_schedule import Foreground, Shadow


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupStep:
    """What a step of one net has the devices of its group do.

    A forward part on all group PSs at once, then what the trainer does, then a backward part on
    all group PSs, at whose end each applies the update of its parameters.

    Attributes:
        trainer_flop: floating-point operations on the trainer, at least 0.
        ps_flop: on each group PS, at least 0.
        ps_bytes: that travel to and from each group PS, together, at least 0: a quarter each for
            what the forward and the backward part get and give.
        forward_share: of the operations of the group PSs, from 0 to 1. Default one third: the
            backward part has two gradients to compute, of the inputs and of the weights.

    Raises:
        ValueError: if an attribute is wrong.

    Example:

    >>> import tf_recsync as recsync
    >>> step = recsync.simulation.GroupStep(
    ...     trainer_flop=1e9, ps_flop=(2e9, 1e9), ps_bytes=(4000, 4000)
    ... )
    >>> step.servers
    2
    """

    trainer_flop: float
    ps_flop: tuple[float, ...]
    ps_bytes: tuple[int, ...]
    forward_share: float = 1 / 3

    def __post_init__(self) -> None:
        check_count("trainer_flop", self.trainer_flop, whole=False)
        if not self.ps_flop or len(self.ps_flop) != len(self.ps_bytes):
            raise ValueError(
                "ps_flop and ps_bytes must be of the same group PSs, at least one, not of "
                f"{len(self.ps_flop)} and {len(self.ps_bytes)}"
            )
        for flop, count in zip(self.ps_flop, self.ps_bytes, strict=True):
            check_count("ps_flop", flop, whole=False)
            check_count("ps_bytes", count, most=MOST_BYTES)
        check_number("forward_share", self.forward_share)
        if self.forward_share > 1:
            raise ValueError(f"forward_share must be from 0 to 1, not {self.forward_share!r}")

    @classmethod
    def of(cls, plan: OperatorPlan) -> GroupStep:
        """What an operator plan has the devices do.

        A message from one group PS to another counts as one to the trainer and one from it.

        Args:
            plan: with one server or more.
        """
        resources, loads = plan.resources, plan.loads
        servers = slice(0, resources.servers)
        flop = loads.processor[servers] * resources.server_flops_per_second / resources.nets
        count = loads.network[servers] * resources.bytes_per_second / resources.nets
        return cls(
            trainer_flop=float(loads.processor[-1] * resources.trainer_flops_per_second),
            ps_flop=tuple(flop.tolist()),
            ps_bytes=tuple(round(one) for one in count.tolist()),
        )

    @property
    def servers(self) -> int:
        """How many group PSs a group has."""
        return len(self.ps_flop)

    def stages(self) -> list[list[tuple[int, int, int, int, bool, bool]]]:
        """As the engine takes them."""
        forward, backward = [], []
        for server, (flop, count) in enumerate(zip(self.ps_flop, self.ps_bytes, strict=True)):
            first = round(flop * self.forward_share)
            quarters = [count * (i + 1) // 4 - count * i // 4 for i in range(4)]
            forward.append((server, first, *quarters[:2], True, False))
            backward.append((server, round(flop) - first, *quarters[2:], False, True))
        trainer = (-1, round(self.trainer_flop), 0, 0, False, False)
        return [forward, [trainer], backward]


def simulate_hierarchical(
    algorithm: Algorithm | None,
    mode: Literal["shadow"] | Shadow | Foreground,
    step: GroupStep,
    *,
    groups: int,
    trainers_per_group: int,
    nets_per_trainer: int = 1,
    trainer_flops: float,
    ps_flops: float,
    compute: Callable[[int, int, float], float] | None = None,
    factor: Callable[[int, int, float], float] | None = None,
    sync_ps: int | None = None,
    parameter_bytes: int,
    steps: int | None = None,
    seconds: float | None = None,
    bandwidth: float = math.inf,
    ps_bandwidth: float = math.inf,
    sync_ps_bandwidth: float = math.inf,
    duplex: bool = True,
    latency: float = 0.0,
    batch_size: int | None = None,
    model: LogisticRegression | None = None,
    loss_seconds: float = 1.0,
) -> GroupResult:
    """Runs groups of trainers and parameter servers in virtual time, as `HierarchicalStrategy`.

    The nets of a trainer share its device, and all nets of a group its group PSs: each device
    does one thing after the other. Updates are applied as they come (Hogwild). Each group PS
    synchronizes its shard of the parameters by itself.

    Args:
        algorithm: `EASGD`, `ModelAveraging` or `BMUF`; None for groups that are not synchronized.
        mode: "shadow", a `Shadow` or a `Foreground`.
        step: what a step has the devices do; it says how many group PSs a group has.
        groups: how many there are, at least 1.
        trainers_per_group: t, at least 1.
        nets_per_trainer: r, at least 1, the default.
        trainer_flops: what a trainer computes in a second, in all its nets together; positive.
        ps_flops: what a group PS computes in a second; positive.
        compute: gives seconds that a step takes before, by itself, as lookups of tables: of the
            trainer's index, the steps that its nets have begun, and the seconds since training
            began. None (the default): none.
        factor: gives by which that time, and what a step has the trainer do, is multiplied, at
            least 0 and finite; of the same. None (the default): 1.
        sync_ps: how many sync PSs there are; None (the default): 1 with EASGD, else 0.
        parameter_bytes: of a group's copy, at least 0.
        steps: of all nets together, at least 1; None (the default): without end.
        seconds: after which everything stops, positive; None (the default): not before the steps
            are done. One of the two must be given.
        bandwidth: of a trainer's network card, bytes per second in each direction, positive;
            infinite by default.
        ps_bandwidth: of a group PS's, in the same way.
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

    >>> from tf_recsync.simulation._hierarchical import GroupStep, simulate_hierarchical
    >>> step = GroupStep(trainer_flop=2e9, ps_flop=(3e9,), ps_bytes=(0,))
    >>> result = simulate_hierarchical(
    ...     None, "shadow", step, groups=2, trainers_per_group=1, trainer_flops=1e10,
    ...     ps_flops=1e10, parameter_bytes=0, steps=20,
    ... )
    >>> round(result.steps_per_second, 6)  # Half a second each, in two groups.
    4.0
    """
    for name, value in (
        ("groups", groups),
        ("trainers_per_group", trainers_per_group),
        ("nets_per_trainer", nets_per_trainer),
    ):
        check_count(name, value, 1, MOST_IN_GROUPS)
    if not isinstance(step, GroupStep):
        raise ValueError(f"step must be a GroupStep, not {step!r}")
    return simulate_groups(
        algorithm,
        mode,
        (lambda trainer, begun, now: 0.0) if compute is None else compute,
        factor,
        groups=groups,
        trainers_per_group=trainers_per_group,
        threads=nets_per_trainer,
        servers=step.servers,
        stages=step.stages(),
        trainer_flops=trainer_flops,
        server_flops=ps_flops,
        sync_ps=sync_ps,
        parameter_bytes=parameter_bytes,
        steps=steps,
        seconds=seconds,
        bandwidth=bandwidth,
        server_bandwidth=ps_bandwidth,
        sync_ps_bandwidth=sync_ps_bandwidth,
        duplex=duplex,
        latency=latency,
        batch_size=batch_size,
        model=model,
        loss_seconds=loss_seconds,
    )
