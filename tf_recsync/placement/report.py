"""An operator plan as a table and as a picture."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from tf_recsync._figures import new_figure
from tf_recsync.embedding.placement import readable
from tf_recsync.placement.loads import LoadModel

if TYPE_CHECKING:
    from tf_recsync.placement.plan import OperatorPlan


def label(plan: OperatorPlan, device: int) -> str:
    """What a device is called."""
    return "trainers" if device == plan.resources.servers else f"PS {device}"


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
    devices = model.operators(plan.positions)
    flops = np.array([unit.flops for unit in plan.graph.units])
    total = np.bincount(devices, flops, resources.servers + 1)
    traffic = model.traffic(plan.positions)
    width = max(6, *(len(unit.name) for unit in plan.graph.units))
    lines.append(f"  {'unit':<{width}}  {'device':<9} {'FLOP':>9} {'bytes':>10} {'share':>10}")
    for u, unit in enumerate(plan.graph.units):
        device = devices[u]
        share = flops[u] / total[device] if total[device] else 0.0
        line = (
            f"  {unit.name:<{width}}  {label(plan, device):<9} {flops[u]:>9.3g} "
            f"{readable(round(traffic[u])):>10} {share:>10.1%}"
        )
        if plan.operators[unit.name] is None and unit.name in plan.weights:
            line += f"  weights on PS {plan.weights[unit.name]}"
        lines.append(line)
    lines.append(f"  {'':<{width}}  {'device':<9} {'processor':>9} {'network':>10} {'memory':>10}")
    for device in range(resources.servers + 1):
        lines.append(
            f"  {'':<{width}}  {label(plan, device):<9} "
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
    operators, seconds = model.operators(plan.positions), model.unit_seconds(plan.positions)
    height = np.zeros(len(devices))
    for unit, device, own in zip(plan.graph.units, operators, seconds, strict=True):
        bottom = height[device]
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
