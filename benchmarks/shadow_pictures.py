"""The pictures of ShadowSync's experiments, in the shape of the paper's figures 5 to 8 and tables.

The bars of an NE are those of its difference from S-EASGD's with as many trainers and threads.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import mode_runs

Row = dict[str, Any]
_LABELS = {
    "train_ne": "train NE (bars: less S-EASGD)",
    "eval_ne": "eval NE (bars: less S-EASGD)",
    "eps": "examples per second",
}


def plot(rows: list[Row], path: pathlib.Path) -> None:
    """Draws a row of panels or two for each experiment that there is.

    Args:
        rows: of the benchmark's JSON list.
        path: of the picture.
    """
    pyplot = mode_runs.plot_module()
    if pyplot is None:
        return
    names = [name for name in _PANELS if any(row["experiment"] == name for row in rows)]
    panels = [(panel, name) for name in names for panel in _PANELS[name]]
    lines = len(panels) // 3
    figure, axes = pyplot.subplots(
        lines, 3, figsize=(15, 4 * lines), layout="constrained", squeeze=False
    )
    for (panel, name), axis in zip(panels, axes.flat, strict=True):
        panel(axis, [row for row in rows if row["experiment"] == name])
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _lines(axis, rows: list[Row], x: str, y: str, group) -> None:
    """A line for each group that has values, with the intervals or ranges that there are.

    Panels of the same rows give a group the same color.
    """
    for number, name in enumerate(dict.fromkeys(group(row) for row in rows)):
        of = [row for row in rows if group(row) == name and row.get(y) is not None]
        if not of:
            continue
        of.sort(key=lambda row: row[x])
        values = [row[y][0] if isinstance(row[y], list) else row[y] for row in of]
        errors = [_half_width(row, y) for row in of]
        if y == "eps":
            errors = [
                [row["eps"] - row["eps_min"] for row in of],
                [row["eps_max"] - row["eps"] for row in of],
            ]
        axis.errorbar(
            [row[x] for row in of],
            values,
            yerr=errors,
            color=f"C{number}",
            marker="o",
            markersize=4,
            capsize=3,
            label=name,
        )
    axis.set_xlabel(x)
    axis.legend(fontsize=8)
    if y == "eps":
        axis.set(xlim=(0, None), ylim=(0, None))


def _half_width(row: Row, y: str) -> float:
    """Of the interval of what a setting's NE is more than S-EASGD's, if there is one.

    Not of the NE itself: clicks of different seeds differ more than settings do.
    """
    less = row.get(f"less_s_easgd_{y.removesuffix('_ne')}", [])
    return less[1] if len(less) == 2 else 0.0


def _setting(row: Row) -> str:
    return row["setting"]


def _eps(axis, rows: list[Row]) -> None:
    """Figure 5, third and fourth panel."""
    _lines(axis, rows, "trainers", "eps", _setting)
    axis.set(ylabel=_LABELS["eps"], title="Figure 5: EPS")


def _relative(axis, rows: list[Row]) -> None:
    _lines(axis, rows, "trainers", "relative_to_no_synchronization", _setting)
    axis.set(ylabel="of EPS without synchronization", title="What synchronization costs")
    axis.set_ylim(0, 1.1)


def _gaps(axis, rows: list[Row]) -> None:
    """Section 4.1.2's sync gaps."""
    _lines(axis, rows, "trainers", "sync_gap", _setting)
    axis.set(ylabel="steps per synchronization", title="Average sync gap", yscale="log")


def _train(axis, rows: list[Row]) -> None:
    _lines(axis, _in_all(rows), "trainers", "train_ne", _setting)
    axis.set(ylabel=_LABELS["train_ne"], title="Figure 5: train NE")


def _eval(axis, rows: list[Row]) -> None:
    _lines(axis, _in_all(rows), "trainers", "eval_ne", _setting)
    axis.set(ylabel=_LABELS["eval_ne"], title="Figure 5: eval NE")


def _in_all(rows: list[Row]) -> list[Row]:
    """Settings that there are with every number of trainers."""
    numbers = {row["trainers"] for row in rows}
    return [
        row
        for row in rows
        if {other["trainers"] for other in rows if other["setting"] == row["setting"]} == numbers
    ]


def _of_most(rows: list[Row]) -> tuple[list[Row], int]:
    """Those with the number of trainers that has the most settings, and this number."""
    counts = [row["trainers"] for row in rows]
    most = max(set(counts), key=counts.count)
    return [row for row in rows if row["trainers"] == most], most


def _dots(part: str) -> Callable[[Any, list[Row]], None]:
    """Table 2's NE of all settings beside each other."""

    def panel(axis, rows: list[Row]) -> None:
        of, trainers = _of_most(rows)
        for i, row in enumerate(of):
            bar = _half_width(row, f"{part}_ne")
            axis.errorbar([i], [row[f"{part}_ne"][0]], yerr=bar, marker="o", capsize=3)
        axis.set_xticks(range(len(of)), [row["setting"] for row in of], rotation=20, fontsize=8)
        axis.set(ylabel=_LABELS[f"{part}_ne"], title=f"Table 2: {trainers} trainers")

    return panel


def _table_2(axis, rows: list[Row]) -> None:
    of, trainers = _of_most(rows)
    cells = [
        [row["quality_sync_gap"], f"{row['train_ne'][0]:.5f}", f"{row['eval_ne'][0]:.5f}"]
        for row in of
    ]
    _table(axis, cells, [row["setting"] for row in of], ["avg sync gap", "train NE", "eval NE"])
    axis.set_title(f"Table 2: {trainers} trainers")


def _table_3(axis, rows: list[Row]) -> None:
    of = _in_all(rows)
    settings = list(dict.fromkeys(row["setting"] for row in of))
    fewest, *others = sorted({row["trainers"] for row in of})
    found = {(row["setting"], row["trainers"]): row for row in of}
    cells, names = [], []
    for trainers in others:
        for part in ("train", "eval"):
            increases = [found[name, trainers][f"increase_percent_{part}"] for name in settings]
            cells.append([f"{increase:.3f} %" for increase in increases])
            names.append(f"{trainers} trainers, {part}")
    _table(axis, cells, names, settings)
    axis.set_title(f"Table 3: increase of NE from {fewest} trainers")


def _table(axis, cells: list[list[Any]], rows: list[str], columns: list[str]) -> None:
    axis.axis("off")
    if cells:
        table = axis.table(
            cells, rowLabels=rows, colLabels=columns, loc="center", edges="horizontal"
        )
        table.auto_set_font_size(False)
        table.set_fontsize(8)
        table.scale(0.75, 1.5)


def _figure_6(y: str) -> Callable[[Any, list[Row]], None]:
    """Shadow and foreground."""

    def panel(axis, rows: list[Row]) -> None:
        of = [row for row in rows if "MA" in row["setting"] or "BMUF" in row["setting"]]
        _lines(axis, [r for r in of if "alpha" not in r["setting"]], "trainers", y, _setting)
        axis.set(ylabel=_LABELS[y], title="Figure 6: shadow and foreground")

    return panel


def _figure_7(y: str) -> Callable[[Any, list[Row]], None]:
    """With sync PSs and without."""

    def panel(axis, rows: list[Row]) -> None:
        of = [row for row in rows if row["setting"].startswith("S-")]
        _lines(axis, of, "trainers", y, _setting)
        axis.set(ylabel=_LABELS[y], title="Figure 7: centralized and decentralized")

    return panel


def _trainers(row: Row) -> str:
    return f"{row['trainers']} trainers"


def _threads_train(axis, rows: list[Row]) -> None:
    _lines(axis, rows, "threads", "train_ne", _trainers)
    axis.set(ylabel="train NE", title="Figure 8: train NE")


def _threads_eval(axis, rows: list[Row]) -> None:
    _lines(axis, rows, "threads", "eval_ne", _trainers)
    axis.set(ylabel="eval NE", title="Figure 8: eval NE")


def _threads_eps(axis, rows: list[Row]) -> None:
    _lines(axis, rows, "threads", "eps", _trainers)
    axis.set(ylabel=_LABELS["eps"], title="Figure 8: EPS")


# Three in a line.
_PANELS = {
    "speed": (_eps, _relative, _gaps),
    "easgd": (_train, _eval, _table_3, _dots("train"), _dots("eval"), _table_2),
    "decentralized": tuple(
        figure(y) for figure in (_figure_6, _figure_7) for y in ("train_ne", "eval_ne", "eps")
    ),
    "threads": (_threads_train, _threads_eval, _threads_eps),
}
