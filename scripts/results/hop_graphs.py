"""Hop: three graphs of eight workers that are unevenly divided among machines."""

from __future__ import annotations

from results.hop import TARGET_LOSS, draw_curves, means, run_one
from results.parts import PROGRAM, Row, draw_bars
from tf_recsync import topology
from tf_recsync._figures import new_figure

_MACHINES = [0, 0, 0, 0, 1, 1, 2, 2]
_SECONDS = 1.0  # Of a step, so that messages take longer.
# Figure 21.
_GRAPHS = {
    "a, ring-based": (topology.ring_based(8), 0.6667),
    "b, one gateway": (topology.hierarchical([4, 2, 2], gateways=1), 0.2682),
    "c, two gateways": (topology.hierarchical([4, 2, 2]), 0.2688),
}


def compute(seeds: int, iterations: int) -> Row:
    """Figures 20 and 21 of Luo et al. 2019."""
    rows = []
    for name, (graph, of_paper) in _GRAPHS.items():
        results = [
            run_one(graph, None, seed, iterations, machines=_MACHINES, compute=_SECONDS)
            for seed in range(seeds)
        ]
        rows.append(
            {
                "figure": "20",
                "setting": name,
                "paper_spectral_gap": of_paper,
                "spectral_gap_of_neighbors": round(graph.spectral_gap_of_neighbors, 4),
                "spectral_gap": round(graph.spectral_gap, 4),
                **means(results),
            }
        )
    return {
        "paper": "Luo et al. 2019, Hop",
        "fitted": {"compute_seconds": _SECONDS},
        "fitted_to": "the order of the graphs: messages have to take longer than computing",
        "given": "8 workers on machines of 4, 2 and 2, which the spectral gaps of figure 21 imply; "
        "in the graph b the machines' ring passes one worker of each, in c two; 1 Gbit/s, updates "
        "of VGG11, max_iteration_gap 5",
        "predicted": "the spectral gaps, the time of an iteration and the loss, which is that of a "
        "logistic regression, not of the paper's",
        "target_loss": TARGET_LOSS,
        "differs": "nothing that the paper's text tells",
        "rows": rows,
    }


def draw(found: Row, path: str) -> None:
    """The graphs' times, and their losses by time and by steps."""
    figure = new_figure(13.0, 4.0, PROGRAM)
    times, by_time, by_steps = figure.subplots(1, 3)
    rows = found["rows"]
    draw_bars(
        times,
        "seconds of an iteration",
        {
            f"{row['setting']}\ngap {row['spectral_gap_of_neighbors']:.4f}": row[
                "seconds_per_iteration"
            ]
            for row in rows
        },
    )
    draw_curves(
        by_time, "figure 20: loss by time", rows, lambda row: row["setting"], found["target_loss"]
    )
    by_time.set_xlim(0, max(row["losses"][-1][0] for row in rows))
    for row in rows:
        seconds, losses = zip(*row["losses"], strict=True)
        iterations = [second / row["seconds_per_iteration"] for second in seconds]
        by_steps.plot(iterations, losses, label=row["setting"], linewidth=1.2)
    by_steps.set_xlabel("iterations")
    by_steps.set_ylabel("loss")
    by_steps.set_title("figure 20: loss by iterations", fontsize=9)
    by_steps.legend(fontsize=7)
    figure.suptitle("simulated: graphs of Hop", fontsize=11)
    figure.savefig(path, dpi=110)
