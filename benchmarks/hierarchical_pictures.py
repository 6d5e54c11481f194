"""The pictures of Hierarchical Training's experiments, in the shape of the paper's figures."""

from __future__ import annotations

import pathlib
from typing import Any

import mode_runs
import numpy as np

Row = dict[str, Any]


def plot(rows: list[Row], path: pathlib.Path) -> None:
    """Draws a panel for each figure that there are rows of.

    Args:
        rows: of the benchmark's JSON list.
        path: of the picture.
    """
    pyplot = mode_runs.plot_module()
    if pyplot is None:
        return
    panels = []
    for experiment, draw in _PANELS:
        of = [row for row in rows if row["experiment"] == experiment]
        if draw is _loss:
            of = [row for row in of if "curve" in row]
        if of:
            panels.append((draw, of))
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(5 * columns, 4 * lines), layout="constrained", squeeze=False
    )
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    for (draw, of), axis in zip(panels, axes.flat, strict=False):
        draw(axis, of)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _loss(axis, rows: list[Row]) -> None:
    """Figure 7."""
    for row in rows:
        curve = row["relative_loss_percent"]
        axis.plot(np.arange(1, len(curve) + 1) * 100 / len(curve), curve, label=row["setting"])
    axis.set(xlabel="% of the examples", ylabel="train NE, % over EASGD's")
    axis.set_title("Figure 7: relative loss")
    axis.legend(fontsize=8)


def _bars(axis, rows: list[Row], key: str, names: list[str]) -> None:
    """A bar for each setting, with the range of its rounds; pale if the machine was too busy."""
    scale = [row[key] / row["eps"] for row in rows]
    errors = np.array(
        [
            [k * (row["eps"] - row["eps_min"]), k * (row["eps_max"] - row["eps"])]
            for k, row in zip(scale, rows, strict=True)
        ]
    ).T
    bars = axis.bar(range(len(rows)), [row[key] for row in rows], yerr=errors, capsize=4)
    for bar, row in zip(bars, rows, strict=True):
        bar.set_alpha(1.0 if row["counts"] else 0.4)
    axis.set_xticks(range(len(rows)), names, fontsize=8)


def _eps(axis, rows: list[Row]) -> None:
    """Figure 8."""
    _bars(axis, rows, "eps", [f"{row['setting']}\n{row['nodes']} nodes" for row in rows])
    axis.set(ylabel="examples per second", title="Figure 8: EPS")


def _use(axis, rows: list[Row]) -> None:
    """Figure 9, of the setting with the most groups."""
    row = rows[-1]
    names = ["trainers", *(f"PS {j}" for j in range(row["ps"]))]
    places = np.arange(len(names))
    computing = [row["trainer_compute"], *row["ps_compute"]]
    sending = [row["trainer_link"], *row["ps_link"]]
    axis.bar(places - 0.2, computing, 0.4, label="processor")
    axis.bar(places + 0.2, sending, 0.4, label="network")
    axis.set_xticks(places, names, fontsize=8)
    axis.set(ylabel="of the artificial speed", ylim=(0, 1.1))
    axis.set_title(f"Figure 9: use of devices, {row['setting']}")
    axis.legend(fontsize=8)


def _groups(axis, rows: list[Row]) -> None:
    """Figure 10a."""
    first = rows[0]["groups"]
    x = [row["groups"] for row in rows]
    axis.plot(x, [row["relative_to_first"] for row in rows], marker="o", label="measured")
    axis.plot(x, [n / first for n in x], "--", color="gray", label="linear")
    axis.set(xlabel="groups", ylabel="speedup", xlim=(0, None), ylim=(0, None))
    axis.set_title("Figure 10a: groups")
    axis.legend(fontsize=8)


def _nodes(axis, rows: list[Row]) -> None:
    """Figure 10b."""
    x = np.arange(len(rows))
    axis.plot(x, [row["relative_to_first"] for row in rows], marker="o", label="measured")
    axis.plot(x, [row["predicted_relative"] for row in rows], ":", label="by the plans")
    linear = [row["nodes"] / rows[0]["nodes"] for row in rows]
    axis.plot(x, linear, "--", color="gray", label="linear")
    axis.set_xticks(x, [row["setting"] for row in rows])
    axis.set(xlabel="(trainers, group PSs)", ylabel="speedup", ylim=(0, None))
    axis.set_title("Figure 10b: nodes of a group")
    axis.legend(fontsize=8)


def _ablations(axis, rows: list[Row]) -> None:
    """Figure 11."""
    _bars(axis, rows, "relative_to_first", [row["setting"].replace(" ", "\n") for row in rows])
    axis.set(ylabel="EPS over all optimizations'", title="Figure 11: ablations")


def _sync(axis, rows: list[Row]) -> None:
    _bars(axis, rows, "eps", [row["setting"].replace(" ", "\n") for row in rows])
    axis.set(ylabel="examples per second", title="What synchronization costs")


_PANELS = (
    ("easgd", _loss),
    ("easgd", _eps),
    ("easgd", _use),
    ("groups", _groups),
    ("nodes", _nodes),
    ("ablations", _ablations),
    ("sync", _sync),
)
