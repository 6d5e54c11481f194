"""Hierarchical training: speeds by groups, and by their devices."""

from __future__ import annotations

import tf_recsync as recsync
from results.parts import PROGRAM, Row, mean
from tf_recsync._figures import new_figure
from tf_recsync.placement import Edge, OperatorPlan, Resources, StepGraph, Unit
from tf_recsync.simulation._hierarchical import GroupStep, simulate_hierarchical


def compute(seeds: int, iterations: int) -> Row:
    """Figure 10 of Huang et al. 2021."""
    del seeds, iterations  # Nothing is by chance.
    graph = click_model(batch=200)

    def row(figure: str, groups: int, size: int) -> Row:
        resources = Resources(
            trainers=size,
            servers=size,
            nets_per_trainer=6,
            trainer_flops_per_second=2e11 / 6,  # Its nets share the trainer.
            server_flops_per_second=2e11,
            bytes_per_second=1.25e9,
        )
        # So many placements, and not for so long, that the plan is the same each time.
        plan = OperatorPlan.search(graph, resources, None, search_placements=20_000)
        result = simulate_hierarchical(
            recsync.EASGD(alpha=0.5),
            recsync.Shadow(min_interval=0.2),
            GroupStep.of(plan),
            groups=groups,
            trainers_per_group=size,
            nets_per_trainer=6,
            trainer_flops=2e11,
            ps_flops=2e11,
            parameter_bytes=graph.parameter_bytes,
            bandwidth=1.25e9,
            ps_bandwidth=1.25e9,
            sync_ps=2,
            sync_ps_bandwidth=1.25e9,
            duplex=False,
            latency=5e-5,
            batch_size=200,
            seconds=2.0,
        )
        return {
            "figure": figure,
            "groups": groups,
            "trainers_and_group_ps": size,
            "examples_per_second": result.examples_per_second,
            "imbalance_of_plan": plan.imbalance,
            "staleness_mean": result.staleness.dense.mean,
            "staleness_max": result.staleness.dense.max,
            "busiest_group_ps": max(result.servers_busy),
            "trainers_busy": mean(result.trainers_busy),
            "average_sync_gap": result.average_sync_gap,
        }

    return {
        "paper": "Huang et al. 2021, Hierarchical Training",
        "fitted": {},
        "fitted_to": "nothing: the model is a made-up one of the paper's kind, as that does not "
        "tell operations and bytes of its own; placed by OperatorPlan.search",
        "predicted": "that groups scale linearly, and devices of a group less",
        "differs": "nothing that the paper's text tells",
        "rows": [
            *(row("10a", groups, 6) for groups in (2, 4, 6, 8, 10)),
            *(row("10b", 8, size) for size in (2, 4, 6, 8, 10)),
        ],
    }


def click_model(batch: int) -> StepGraph:
    """Two towers of dense layers, with what interacts between them."""
    widths = {
        "bottom": [512, 2048, 2048, 1024, 1024, 512, 256],
        "top": [1024, 2048, 2048, 2048, 1024, 1024, 512, 1],
    }
    units, edges, before = [Unit("features", "input", flops=0)], [], "features"
    for part, sizes in widths.items():
        if part == "top":
            units.append(Unit("interaction", "interaction", flops=batch * 4e6))
            edges.append(Edge(before, "interaction", 4 * batch * 256, 4 * batch * 256))
            before = "interaction"
        for i, (wide, narrow) in enumerate(zip(sizes, sizes[1:], strict=False)):
            units.append(
                Unit(
                    f"{part}{i}",
                    "layer",
                    flops=6.0 * batch * wide * narrow,
                    parameter_bytes=4 * (wide + 1) * narrow,
                    activation_bytes=4 * batch * narrow,
                    features_in=wide,
                    features_out=narrow,
                )
            )
            back = 0 if before == "features" else 4 * batch * wide
            edges.append(Edge(before, units[-1].name, 4 * batch * wide, back))
            before = units[-1].name
    units.append(Unit("loss", "loss", flops=0))
    edges.append(Edge(before, "loss", 4 * batch, 4 * batch))
    return StepGraph(units=units, edges=edges)


def draw(found: Row, path: str) -> None:
    """Speedups by groups, and by the devices of a group."""
    figure = new_figure(9.0, 4.0, PROGRAM)
    for axes, name, by, label in zip(
        figure.subplots(1, 2),
        ("10a", "10b"),
        ("groups", "trainers_and_group_ps"),
        ("groups", "trainers, and group PSs, of a group"),
        strict=True,
    ):
        mine = [row for row in found["rows"] if row["figure"] == name]
        numbers = [row[by] for row in mine]
        first = mine[0]["examples_per_second"]
        axes.plot(numbers, [row["examples_per_second"] / first for row in mine], marker="o")
        axes.plot(numbers, [number / numbers[0] for number in numbers], color="#888888", ls=":")
        axes.set_xlabel(label)
        axes.set_ylabel("speedup")
        axes.set_title(f"figure {name}; dotted: linear", fontsize=9)
    figure.suptitle("simulated: hierarchical training", fontsize=11)
    figure.savefig(path, dpi=110)
