"""The pictures of ShadowSync's experiments, in the shape of the paper's figures 5 to 8.

The bars of an NE are those of its difference from S-EASGD's with as many trainers and threads.
"""

from __future__ import annotations

import pathlib
from typing import Any

import mode_runs

Row = dict[str, Any]


def plot(rows: list[Row], path: pathlib.Path) -> None:
    """Draws a row of panels for each experiment that there is.

    Args:
        rows: of the benchmark's JSON list.
        path: of the picture.
    """
    pyplot = mode_runs.plot_module()
    if pyplot is None:
        return
    names = [name for name in _PANELS if any(row["experiment"] == name for row in rows)]
    figure, axes = pyplot.subplots(
        len(names), 3, figsize=(15, 4 * len(names)), layout="constrained", squeeze=False
    )
    for name, line in zip(names, axes, strict=True):
        of = [row for row in rows if row["experiment"] == name]
        for axis, panel in zip(line, _PANELS[name], strict=True):
            panel(axis, of)
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
    axis.set(ylabel="examples per second", title="Figure 5: EPS", ylim=(0, None), xlim=(0, None))


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
    axis.set(ylabel="train NE (bars: less S-EASGD)", title="Figure 5: train NE")


def _eval(axis, rows: list[Row]) -> None:
    _lines(axis, _in_all(rows), "trainers", "eval_ne", _setting)
    axis.set(ylabel="eval NE (bars: less S-EASGD)", title="Figure 5: eval NE")


def _in_all(rows: list[Row]) -> list[Row]:
    """Settings that there are with every number of trainers."""
    numbers = {row["trainers"] for row in rows}
    return [
        row
        for row in rows
        if {other["trainers"] for other in rows if other["setting"] == row["setting"]} == numbers
    ]


def _table_2(axis, rows: list[Row]) -> None:
    """Eval NE of all settings with the number of trainers that has the most of them."""
    counts = [row["trainers"] for row in rows]
    most = max(set(counts), key=counts.count)
    of = [row for row in rows if row["trainers"] == most]
    for i, row in enumerate(of):
        bar = _half_width(row, "eval_ne")
        axis.errorbar([i], [row["eval_ne"][0]], yerr=bar, marker="o", capsize=3)
    axis.set_xticks(range(len(of)), [row["setting"] for row in of], rotation=20, fontsize=8)
    axis.set(ylabel="eval NE (bars: less S-EASGD)", title=f"Table 2: {most} trainers")


def _figure_6(axis, rows: list[Row]) -> None:
    of = [row for row in rows if "MA" in row["setting"] or "BMUF" in row["setting"]]
    _lines(axis, [r for r in of if "alpha" not in r["setting"]], "trainers", "eval_ne", _setting)
    axis.set(ylabel="eval NE (bars: less S-EASGD)", title="Figure 6: shadow and foreground")


def _figure_7_train(axis, rows: list[Row]) -> None:
    of = [row for row in rows if row["setting"].startswith("S-")]
    _lines(axis, of, "trainers", "train_ne", _setting)
    axis.set(ylabel="train NE (bars: less S-EASGD)", title="Figure 7: train NE")


def _figure_7_eval(axis, rows: list[Row]) -> None:
    of = [row for row in rows if row["setting"].startswith("S-")]
    _lines(axis, of, "trainers", "eval_ne", _setting)
    axis.set(ylabel="eval NE (bars: less S-EASGD)", title="Figure 7: eval NE")


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
    axis.set(ylabel="examples per second", title="Figure 8: EPS", ylim=(0, None))


_PANELS = {
    "speed": (_eps, _relative, _gaps),
    "easgd": (_train, _eval, _table_2),
    "decentralized": (_figure_6, _figure_7_train, _figure_7_eval),
    "threads": (_threads_train, _threads_eval, _threads_eps),
}
