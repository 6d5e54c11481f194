"""Tables and pictures of async_quality.py."""

from __future__ import annotations

import pathlib
from typing import Any

import continual
import mode_runs
import numpy as np


def show(experiment: str, rows: list[dict[str, Any]]) -> None:
    """Prints the table of an experiment."""
    if experiment == "staleness":
        mode_runs.print_table(
            "Staleness of dense variables, equal workers",
            [
                {
                    "": row["variant"],
                    "mean": f"{row['mean']:.2f}",
                    "deviation": f"{row['deviation']:.2f}",
                    "99 of 100": str(row["quantile_99"]),
                    "max": str(row["max"]),
                }
                for row in rows
            ],
        )
        return

    def points(values: list[float]) -> str:
        mean, *rest = (100 * value for value in values)
        return f"{continual.Mean(mean, rest[0] if rest else None):+.3f}"

    mode_runs.print_table(
        f"{experiment}: AUC of the next day; differences to the first line in points (1 = 0.01), "
        f"{rows[0]['seeds']} seeds, 95 % intervals",
        [
            {
                "": row["variant"],
                "first day": f"{row['auc'][0]:.4f}",
                "last day": f"{row['auc'][-1]:.4f}",
                "difference": points(row["difference"]) if number else "",
                "worst seed": points([row["worst_difference"]]) if number else "",
                "of all days": points(row["mean_difference"]) if number else "",
                **(
                    {"examples/s": f"{row['queries_per_second']:,.0f}"}
                    if "queries_per_second" in row
                    else {}
                ),
            }
            for number, row in enumerate(rows)
        ],
    )


def plot(results: dict[str, list[dict[str, Any]]], path: pathlib.Path) -> None:
    """A picture for each experiment."""
    pyplot = mode_runs.plot_module()
    if pyplot is None:
        return
    count = len(results)
    columns = min(count, 3)
    figure, axes = pyplot.subplots(
        -(-count // columns),
        columns,
        figsize=(5.4 * columns, 4.2 * -(-count // columns)),
        layout="constrained",
        squeeze=False,
    )
    for axis in axes.flat[count:]:
        axis.axis("off")
    for axis, (experiment, rows) in zip(axes.flat, results.items(), strict=False):
        if experiment == "staleness":
            plot_staleness(axis, rows)
        elif experiment == "global_batch":
            plot_batches(axis, rows)
        else:
            for row in rows:
                days = np.arange(1, len(row["auc"]) + 1)
                axis.plot(days, row["auc"], marker="o", markersize=3, label=row["variant"])
            axis.set(xlabel="day", ylabel="AUC of the next day", title=experiment, xticks=days)
            axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def plot_staleness(axis: Any, rows: list[dict[str, Any]]) -> None:
    """The shares of the updates with each staleness."""
    for row in rows:
        taus, counts = np.array(row["histogram"], dtype=float).T
        # The middle of a bucket may be above all that was seen.
        taus = np.minimum(taus, row["max"])
        shares = counts / counts.sum()
        label = f"{row['variant']}: mean {row['mean']:.1f}"
        axis.plot(taus, 100 * shares, marker="o", markersize=3, label=label)
    axis.set(xlabel="staleness", ylabel="% of updates", title="staleness", ylim=(0, None))
    axis.legend(fontsize=8)


def plot_batches(axis: Any, rows: list[dict[str, Any]]) -> None:
    """Speed, and AUC less that of synchronous training, by workers and local batch."""
    order = sorted(rows, key=lambda row: (row["global_batch"], row["workers"]))
    places = np.arange(len(order))
    speeds = [row["queries_per_second"] for row in order]
    axis.bar(places, speeds, color="lightgray")
    axis.set(ylabel="examples per second", title="global_batch")
    axis.set_xticks(places, [row["variant"] for row in order], rotation=25, ha="right", fontsize=8)
    axis.set_xlabel("workers x local batch = global batch")
    auc = axis.twinx()
    # Pairs of the same clicks: from seed to seed they differ by far more than training does.
    means = [continual.Mean(*[*row["mean_difference"], None][:2]) for row in order]
    auc.errorbar(
        places,
        [100 * mean.mean for mean in means],
        yerr=[100 * (mean.half_width or 0.0) for mean in means],
        fmt="o",
        capsize=3,
        color="tab:blue",
    )
    auc.axhline(0.0, color="tab:blue", linestyle="--", linewidth=1)
    auc.set_ylabel("mean AUC after the switch less that of sync, points", color="tab:blue")
    auc.margins(y=0.3)
