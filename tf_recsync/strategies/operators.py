"""Where the layers of a model run in a group, and what of it a strategy's arguments say."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from numbers import Integral
from typing import Any

from tf_recsync.compression import Compression
from tf_recsync.placement import OperatorPlan
from tf_recsync.synchronization.units import Plan


@dataclasses.dataclass(frozen=True)
class Operators:
    """Where layers run, and what becomes of that which travels to them.

    Attributes:
        placement: which of a model's layers with dense weights run on their group's servers; see
            `units.planned`.
        others: where layers without weights run, by their paths; those that are not named run where
            their inputs are, and so do "columns".
        homes: the numbers of the servers that hold the variables of layers that run on trainers,
            by the layers' paths; others are wherever there is room.
        splits: whether the placement "auto" divides large layers.
        compression: of what travels to layers on servers and from them; None for none.
    """

    placement: Plan | str = "trainers"
    others: Plan = dataclasses.field(default_factory=dict)
    homes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    splits: bool = True
    compression: Compression | None = None


def checked_operators(
    placement: Any, splits: Any, compression: Any, trainers: int, servers: int, nets: int
) -> Operators:
    """Raises a ValueError if an argument of `HierarchicalStrategy` is wrong.

    Args:
        placement: its argument, like the next two.
        splits: see there.
        compression: see there.
        trainers: of a group.
        servers: of a group.
        nets: of a trainer.
    """
    others: Plan = {}
    homes: dict[str, int] = {}
    if isinstance(placement, OperatorPlan):
        _check_size(placement, trainers, servers, nets)
        placement, others, homes = _layers_of(placement)
    placement = _checked_placement(placement, servers)
    if splits not in ("auto", "off"):
        raise ValueError(f'splits must be "auto" or "off", not {splits!r}')
    compression = _checked_compression(compression, placement, nets)
    return Operators(placement, others, homes, splits == "auto", compression)


def _checked_placement(placement: Any, servers: int) -> Plan | str:
    """Which layers run on servers, by their paths; raises a ValueError if an argument is wrong.

    Args:
        placement: "trainers", "auto" or a mapping.
        servers: of a group.
    """
    if isinstance(placement, str) and placement in ("trainers", "auto"):
        return placement
    if not isinstance(placement, Mapping):
        raise ValueError(
            'placement must be "trainers", "auto", an OperatorPlan, or a mapping from paths of '
            f"layers to numbers of servers, not {placement!r}"
        )
    for path, number in placement.items():
        is_number = isinstance(number, Integral) and not isinstance(number, bool)
        is_word = number is None or isinstance(number, str) and number in ("columns", "rows")
        if not isinstance(path, str) or not (is_word or is_number and 0 <= number < servers):
            raise ValueError(
                f"placement must give the path of a layer, a str, the number of a server of its "
                f'group, from 0 to {servers - 1} with ps_per_group={servers}, "columns", "rows" '
                f"or None; not {path!r}: {number!r}"
            )
    return {path: int(n) if isinstance(n, Integral) else n for path, n in placement.items()}


def _checked_compression(
    compression: Any, placement: Plan | str, nets_per_trainer: int
) -> Compression | None:
    """How activations are compressed; raises a ValueError if an argument is wrong.

    Args:
        compression: a Compression or None.
        placement: as `_checked_placement` returned it.
        nets_per_trainer: as the strategy has it.
    """
    if compression is None:
        return None
    if not isinstance(compression, Compression):
        raise ValueError(f"compression must be None or a Compression, not {compression!r}")
    if placement == "trainers":
        raise ValueError(
            f'compression={compression} would do nothing with placement="trainers": it is of '
            "activations that travel to layers on servers"
        )
    if nets_per_trainer > 1 and compression.sparsify > 0 and compression.error_feedback:
        raise ValueError(
            f"compression={compression} has error feedback, which goes only with "
            f"nets_per_trainer=1, not {nets_per_trainer}: nets of a trainer can't keep apart yet "
            "what they have not sent; set error_feedback=False or sparsify=0"
        )
    return compression


def _check_size(plan: OperatorPlan, trainers: int, servers: int, nets: int) -> None:
    """Raises a ValueError if a plan is for groups of another size."""
    of = plan.resources
    if (of.trainers, of.servers, of.nets_per_trainer) != (trainers, servers, nets):
        raise ValueError(
            f"placement is a plan for trainers={of.trainers}, servers={of.servers} and "
            f"nets_per_trainer={of.nets_per_trainer}, but trainers_per_group={trainers}, "
            f"ps_per_group={servers} and nets_per_trainer={nets}"
        )


def _layers_of(plan: OperatorPlan) -> tuple[Plan, Plan, dict[str, int]]:
    """Where a plan has the layers run that have dense weights, and the others.

    And the servers of weights that it has trainers pull; all by the layers' paths.
    """
    units = [unit for unit in plan.graph.units if not unit.pinned]
    owners = [unit.name for unit in units if unit.parameter_bytes]
    others = {unit.name: plan.operators[unit.name] for unit in units if not unit.parameter_bytes}
    homes = {name: plan.weights[name] for name in owners if plan.operators[name] is None}
    return {name: plan.operators[name] for name in owners}, others, homes
