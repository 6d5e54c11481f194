"""An operator plan as a table and as a picture."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from tf_recsync._figures import new_figure
from tf_recsync.embedding.placement import readable
from tf_recsync.placement.loads import LoadModel

if TYPE_CHECKING:
    from tf_recsync.placement.graph import Unit
    from tf_recsync.placement.plan import OperatorPlan


def label(plan: OperatorPlan, device: int) -> str:
    """What a device is called."""
    return "trainers" if device == plan.resources.servers else f"PS {device}"


def _operator_label(plan: OperatorPlan, unit: str) -> str:
    """Where an operator is."""
    where, servers = plan.operators[unit], plan.resources.servers
    if isinstance(where, str):
        return f"PS {'0' if servers == 1 else f'0-{servers - 1}'}, {where}"
    return label(plan, servers if where is None else where)


def _note(plan: OperatorPlan, unit: Unit) -> str:
    """What else there is to say of where a unit is."""
    if plan.operators[unit.name] is None and unit.name in plan.weights:
        return f"  weights on PS {plan.weights[unit.name]}"
    is_large = unit.parameter_bytes * plan.resources.servers > plan.graph.parameter_bytes
    if is_large and unit.why_whole and plan.resources.servers > 1:
        return f"  whole: it {unit.why_whole}"
    return ""


def table(plan: OperatorPlan) -> str:
    """Units with their devices, operations and traffic, and then the loads of the devices."""
    resources, loads = plan.resources, plan.loads
    model = LoadModel(plan.graph, resources)
    highest = int(loads.seconds.argmax())
    by_processor = loads.processor[highest] >= loads.network[highest]
    lines = [
        f"{_count(len(plan.graph.units), 'unit')} on {_count(resources.servers, 'group PS')} and "
        f"{_count(resources.trainers, 'trainer')} with "
        f"{_count(resources.nets_per_trainer, 'net')} each",
        f"highest load {_milliseconds(plan.highest_load)} a step, of the "
        f"{'processor' if by_processor else 'network'} of {label(plan, highest)}, "
        f"{plan.imbalance:.2f} times the mean",
    ]
    seconds = model.unit_seconds(plan.positions)
    traffic = model.traffic(plan.positions)
    labels = [_operator_label(plan, unit.name) for unit in plan.graph.units]
    width = max(6, *(len(unit.name) for unit in plan.graph.units))
    wide = max(9, *map(len, labels))
    lines.append(f"  {'unit':<{width}}  {'device':<{wide}} {'FLOP':>9} {'bytes':>10} {'share':>10}")
    for u, unit in enumerate(plan.graph.units):
        # Of what all devices do that have a part of it.
        total = seconds.sum(0)[seconds[u] > 0].sum()
        share = seconds[u].sum() / total if total else 0.0
        lines.append(
            f"  {unit.name:<{width}}  {labels[u]:<{wide}} {unit.flops:>9.3g} "
            f"{readable(round(traffic[u])):>10} {share:>10.1%}{_note(plan, unit)}"
        )
    lines.append(
        f"  {'':<{width}}  {'device':<{wide}} {'processor':>9} {'network':>10} {'memory':>10}"
    )
    for device in range(resources.servers + 1):
        lines.append(
            f"  {'':<{width}}  {label(plan, device):<{wide}} "
            f"{_milliseconds(loads.processor[device]):>9} "
            f"{_milliseconds(loads.network[device]):>10} "
            f"{readable(int(loads.memory[device])):>10}"
        )
    return "\n".join(lines)


def draw(plan: OperatorPlan, path: str | os.PathLike[str]) -> None:
    """For each device a bar of its units' processor time beside one of its network time."""
    resources, loads = plan.resources, plan.loads
    model = LoadModel(plan.graph, resources)
    devices = np.arange(resources.servers + 1)
    figure = new_figure(max(5.0, 1.2 * len(devices)), 4.0, "OperatorPlan.plot")
    axes = figure.add_subplot()
    seconds = model.unit_seconds(plan.positions)
    height = np.zeros(len(devices))
    for u, device in zip(*np.nonzero(seconds), strict=True):
        unit, own, bottom = plan.graph.units[u], seconds[u, device], height[device]
        height[device] += own
        axes.bar(
            *(device - 0.2, 1e3 * own, 0.38, 1e3 * bottom),
            **{"color": "#33556b", "edgecolor": "white", "linewidth": 0.5},
        )
        if own > 0.06 * plan.highest_load:
            style = {"color": "white", "fontsize": 6, "ha": "center", "va": "center"}
            axes.text(device - 0.2, 1e3 * (bottom + own / 2), unit.name, **style)
    # What is left is compression.
    axes.bar(devices - 0.2, 1e3 * (loads.processor - height), 0.38, 1e3 * height, color="#8fa9bb")
    axes.bar(devices + 0.2, 1e3 * loads.network, 0.38, color="#b3541e")
    axes.set_xticks(devices, [label(plan, device) for device in devices])
    axes.set_ylabel("milliseconds a step")
    axes.set_title("processor, by units (left), and network (right)", fontsize=10)
    figure.savefig(path, dpi=120)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
