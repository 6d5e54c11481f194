"""Figures of the papers on training with copies, simulated: Hop, ShadowSync, hierarchical training.

    python scripts/results_with_copies.py --output=docs/results

writes hop.json, shadowsync.json and hierarchical.json with their pictures; everything in them is
simulated. Each says what was fitted to the paper, and what the simulation predicts with that.
`--seeds` are averaged; a part that is there already is not computed again, unless it is removed.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import sys
from collections.abc import Callable, Iterable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path[:0] = [str(folder) for folder in pathlib.Path(__file__).resolve().parents[:2]]

import kept_results  # noqa: E402

import tf_recsync as recsync  # noqa: E402
from tf_recsync import topology  # noqa: E402
from tf_recsync._figures import new_figure  # noqa: E402
from tf_recsync.placement import Edge, OperatorPlan, Resources, StepGraph, Unit  # noqa: E402
from tf_recsync.simulation._compute import ComputeTime  # noqa: E402
from tf_recsync.simulation._groups import GroupResult  # noqa: E402
from tf_recsync.simulation._hierarchical import GroupStep, simulate_hierarchical  # noqa: E402
from tf_recsync.simulation._hop import HopResult, simulate_hop  # noqa: E402
from tf_recsync.simulation._learning import LogisticRegression  # noqa: E402
from tf_recsync.simulation._shadow import simulate_shadow  # noqa: E402
from tf_recsync.strategies.hop_checks import checked_protocol  # noqa: E402
from tf_recsync.testing import RandomSlowdown, SlowWorkers  # noqa: E402
from tf_recsync.testing.slowdown import Slowdown  # noqa: E402

Row = kept_results.Row

_GIGABIT = 125e6  # Bytes per second.
_VGG11_BYTES = 4 * 9_200_000  # On CIFAR-10.
_HOP_SECONDS = 3.43  # Of an iteration without slow workers: section 7.3.5.
_HOP_MACHINES = [worker // 4 for worker in range(16)]
# The paper's SVM has the logistic loss, too; a smaller learning rate makes its way visible.
_HOP_MODEL = LogisticRegression(
    features=64, examples=8192, learning_rate=0.02, momentum=0.9, weight_decay=1e-7
)
_HOP_TARGET = 0.5  # Of a loss that begins with 0.69 and ends at 0.44.


def main() -> None:
    """Writes what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--iterations", type=int, default=300, help="Of each of Hop's workers.")
    parts: dict[str, kept_results.Part] = {
        "hop": (hop, draw_hop),
        "shadowsync": (shadowsync, draw_shadowsync),
        "hierarchical": (hierarchical, draw_hierarchical),
    }
    kept_results.write(parser, "results_with_copies.py", parts)


# Hop.


def hop(seeds: int, iterations: int) -> Row:
    """Figures 12 and 14 to 20 of Luo et al. 2019."""
    graphs = {
        "ring": topology.ring(16),
        "ring-based": topology.ring_based(16),
        "double-ring": topology.double_ring(16),
    }

    def random(seed: int) -> Slowdown:
        return RandomSlowdown(6.0, 1 / 16, seed=seed)

    def one(seed: int) -> Slowdown:
        return SlowWorkers(4.0, [seed % 16])

    def none(seed: int) -> None:
        return None

    def run(figure: str, name: str, graph: topology.Topology, slow: Callable, **how) -> Row:
        given = {"machines": _HOP_MACHINES, "compute": _HOP_SECONDS, **how}
        results = [_hop_run(graph, slow(seed), seed, iterations, **given) for seed in range(seeds)]
        return {"figure": figure, "graph": graph.name, "setting": name, **_hop_means(results)}

    rows = []
    for graph in graphs.values():
        rows.append(run("12", "no slowdown", graph, none))
        rows.append(run("12", "random slowdown", graph, random))
    for name in ("ring-based", "double-ring"):
        for setting, how in (
            ("standard", {}),
            ("backup worker", {"backups": 1}),
            ("staleness bound 5", {"staleness": 5}),
        ):
            rows.append(run("14-17", setting, graphs[name], random, **how))
    for setting, how in (
        ("standard", {}),
        ("backup worker", {"backups": 1}),
        ("skip at most 2", {"backups": 1, "skip": recsync.Skip(max_jump=2)}),
        ("skip at most 10", {"backups": 1, "skip": recsync.Skip(max_jump=10)}),
    ):
        rows.append(run("18-19", setting, graphs["ring-based"], one, **how))
    # Eight workers on three machines, where messages take longer than computing.
    uneven = {"machines": [0, 0, 0, 1, 1, 1, 2, 2], "compute": 1.0}
    for graph in (topology.ring_based(8), topology.hierarchical([3, 3, 2])):
        rows.append(run("20", "uneven machines", graph, none, **uneven))
    return {
        "paper": "Luo et al. 2019, Hop",
        "fitted": f"compute time {_HOP_SECONDS} s, of an iteration without slow workers (section "
        "7.3.5); in figure 20 1 s, so that messages take longer",
        "given": "16 workers on 4 machines, 1 Gbit/s, updates of VGG11, 6x at a probability of "
        "1/16, or one worker 4x; max_iteration_gap 5",
        "predicted": "all else; the loss is that of a logistic regression, not of the paper's",
        "target_loss": _HOP_TARGET,
        "rows": rows,
    }


def _hop_run(
    graph: topology.Topology,
    slowdown: Slowdown | None,
    seed: int,
    iterations: int,
    *,
    machines: list[int],
    compute: float,
    backups: int = 0,
    staleness: int | None = None,
    skip: recsync.Skip | None = None,
) -> HopResult:
    protocol = checked_protocol(graph, 5, backups, staleness, skip, "parallel", "token_queue", True)
    return simulate_hop(
        protocol,
        ComputeTime(compute, graph.size, slowdown, noise=0.05, seed=seed),
        steps=iterations * graph.size,
        machines=machines,
        bandwidth=_GIGABIT,
        latency=1e-4,
        update_bytes=_VGG11_BYTES,
        model=_HOP_MODEL,
        loss_seconds=2.0,
    )


def _hop_means(results: Iterable[HopResult]) -> Row:
    results = list(results)
    reached = [result.seconds_to(_HOP_TARGET) for result in results]
    by_steps = [
        next((look.steps for look in result.losses if look.loss <= _HOP_TARGET), None)
        for result in results
    ]
    for result in results:
        if (result.largest_gaps > result.bounds).any():
            raise RuntimeError("the bounds of table 1 do not hold")
    looks = results[0].losses
    return {
        "seconds_per_iteration": _mean(result.seconds_per_iteration for result in results),
        "seconds_to_target": None if None in reached else _mean(reached),
        "steps_to_target": None if None in by_steps else _mean(by_steps),
        "last_loss": _mean(result.losses[-1].loss for result in results),
        "largest_gap": max(int(result.largest_gaps.max()) for result in results),
        "iterations_skipped": _mean(
            sum(report.iterations_skipped for report in result.hop_report) for result in results
        ),
        "losses": [
            [round(look.seconds, 3), round(look.loss, 5)]
            for look in looks[:: len(looks) // 100 + 1]
        ],
    }


def draw_hop(found: Row, path: str) -> None:
    """Losses over time, and the time of an iteration."""
    figure = new_figure(13.0, 8.0, "results_with_copies.py")
    (first, second, third), (fourth, fifth, sixth) = figure.subplots(2, 3)
    rows = found["rows"]

    def curves(axes: Any, title: str, wanted: Callable[[Row], bool], label: Callable) -> None:
        for row in filter(wanted, rows):
            times, losses = zip(*row["losses"], strict=True)
            axes.plot(times, losses, label=label(row), linewidth=1.2)
        axes.axhline(found["target_loss"], color="#888888", linewidth=0.6)
        axes.set_xlim(0, 700)
        axes.set_xlabel("virtual seconds")
        axes.set_ylabel("loss")
        axes.set_title(title, fontsize=9)
        axes.legend(fontsize=7)

    curves(
        first,
        "figure 12: heterogeneity",
        lambda row: row["figure"] == "12",
        lambda row: f"{row['graph']}, {row['setting']}",
    )
    for axes, graph in ((second, "ring_based"), (third, "double_ring")):
        curves(
            axes,
            f"figures 14 and 17: random slowdown, {graph}",
            lambda row, graph=graph: row["figure"] == "14-17" and row["graph"] == graph,
            lambda row: row["setting"],
        )
    curves(
        fourth,
        "figure 19: one worker 4x",
        lambda row: row["figure"] == "18-19",
        lambda row: row["setting"],
    )
    _bars(
        fifth,
        "figures 16 to 18: seconds of an iteration",
        {
            f"{row['figure']} {row['setting']}": row["seconds_per_iteration"]
            for row in rows
            if row["figure"] in ("14-17", "18-19") and row["graph"] == "ring_based"
        },
    )
    curves(
        sixth,
        "figure 20: eight workers on three machines",
        lambda row: row["figure"] == "20",
        lambda row: row["graph"],
    )
    figure.suptitle("simulated: Hop", fontsize=11)
    figure.savefig(path, dpi=110)


# ShadowSync.


def shadowsync(seeds: int, iterations: int) -> Row:
    """Table 2 and figures 5 and 8 of Zheng et al. 2021."""
    del iterations
    step, batch, bandwidth = 0.05, 200, 1.25e9
    # 14 trainers with a gap of 5 are what two sync PSs' network cards let pass.
    size = round(5 * 2 * bandwidth * step / (14 * 24))
    easgd = recsync.EASGD(alpha=0.5)
    modes = {
        "S-EASGD": "shadow",
        "FR-EASGD-5": recsync.Foreground(gap=5),
        "FR-EASGD-30": recsync.Foreground(gap=30),
    }

    def run(trainers: int, mode: Any, seed: int, sync_ps: int = 2, **how) -> GroupResult:
        return simulate_shadow(
            how.pop("algorithm", easgd),
            mode,
            ComputeTime(step, trainers, noise=0.2, seed=seed),
            trainers=trainers,
            threads_per_trainer=how.pop("threads", 24),
            sync_ps=sync_ps,
            parameter_bytes=size,
            sync_ps_bandwidth=bandwidth,
            bandwidth=bandwidth,
            latency=5e-5,
            batch_size=batch,
            **how,
        )

    speeds = []
    for name, mode in modes.items():
        for trainers in range(5, 21):
            results = [run(trainers, mode, seed, seconds=5.0) for seed in range(seeds)]
            speeds.append(
                {
                    "figure": "5",
                    "setting": name,
                    "trainers": trainers,
                    "examples_per_second": _mean(r.examples_per_second for r in results),
                    "average_sync_gap": _mean(r.average_sync_gap for r in results),
                }
            )
    # With one sync PS, 11 trainers go as fast as its network card lets them.
    results = [run(11, "shadow", seed, sync_ps=1, seconds=5.0) for seed in range(seeds)]
    gap = {
        "table": "2",
        "setting": "S-EASGD",
        "trainers": 11,
        "average_sync_gap": _mean(r.average_sync_gap for r in results),
    }
    threads = [
        {
            "figure": "8",
            "trainers": trainers,
            "threads": count,
            "examples_per_second": _mean(
                run(
                    trainers,
                    "shadow",
                    seed,
                    1,
                    threads=count,
                    seconds=5.0,
                    memory_seconds=step / 24,
                ).examples_per_second
                for seed in range(seeds)
            ),
        }
        for trainers in (5, 10)
        for count in (1, 12, 24, 32, 64)
    ]
    return {
        "paper": "Zheng et al. 2021, ShadowSync",
        "fitted": f"{size} bytes of parameters for steps of {step} s of {batch} examples and cards "
        "of 10 Gbit/s, so that FR-EASGD-5 has its knee at 14 trainers (figure 5); in figure 8 the "
        "memory serves 24 threads",
        "predicted": "the other speeds of figure 5, where curves bend, and the average sync gap "
        "(5.21 in table 2, of another model)",
        "rows": [*speeds, gap, *threads],
    }


def draw_shadowsync(found: Row, path: str) -> None:
    """Speeds by trainers and by threads."""
    figure = new_figure(9.0, 4.0, "results_with_copies.py")
    first, second = figure.subplots(1, 2)
    rows = found["rows"]
    for name in ("S-EASGD", "FR-EASGD-5", "FR-EASGD-30"):
        mine = [r for r in rows if r.get("figure") == "5" and r["setting"] == name]
        first.plot(
            [r["trainers"] for r in mine], [r["examples_per_second"] for r in mine], label=name
        )
    first.set_xlabel("trainers")
    first.set_ylabel("EPS")
    first.set_title("figure 5: two sync PSs", fontsize=9)
    first.legend(fontsize=8)
    for trainers in (5, 10):
        mine = [r for r in rows if r.get("figure") == "8" and r["trainers"] == trainers]
        second.plot(
            [r["threads"] for r in mine],
            [r["examples_per_second"] for r in mine],
            label=f"{trainers} trainers",
        )
    second.set_xlabel("threads of a trainer")
    second.set_ylabel("EPS")
    second.set_title("figure 8", fontsize=9)
    second.legend(fontsize=8)
    figure.suptitle("simulated: ShadowSync", fontsize=11)
    figure.savefig(path, dpi=110)


# Hierarchical training.


def hierarchical(seeds: int, iterations: int) -> Row:
    """Figure 10 of Huang et al. 2021."""
    del seeds, iterations  # Nothing is by chance.
    graph = _click_model(batch=200)

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
            "trainers_busy": _mean(result.trainers_busy),
            "average_sync_gap": result.average_sync_gap,
        }

    return {
        "paper": "Huang et al. 2021, Hierarchical Training",
        "fitted": "nothing: the model is a made-up one of the paper's kind, as that does not tell "
        "operations and bytes of its own; placed by OperatorPlan.search",
        "predicted": "that groups scale linearly, and devices of a group less",
        "rows": [
            *(row("10a", groups, 6) for groups in (2, 4, 6, 8, 10)),
            *(row("10b", 8, size) for size in (2, 4, 6, 8, 10)),
        ],
    }


def _click_model(batch: int) -> StepGraph:
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


def draw_hierarchical(found: Row, path: str) -> None:
    """Speedups by groups, and by the devices of a group."""
    figure = new_figure(9.0, 4.0, "results_with_copies.py")
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


def _mean(values: Iterable[float]) -> float:
    return round(statistics.fmean(values), 6)


def _bars(axes: Any, title: str, values: dict[str, float]) -> None:
    """Values by their names, from top to bottom."""
    axes.barh(range(len(values)), list(values.values()), color="#33556b")
    axes.set_yticks(range(len(values)), list(values), fontsize=7)
    for i, value in enumerate(values.values()):
        axes.text(value, i, f" {value:.4g}", va="center", fontsize=7)
    axes.invert_yaxis()
    axes.set_title(title, fontsize=9)


if __name__ == "__main__":
    main()
