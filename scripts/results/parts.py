"""What the modules with the papers' figures share."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from kept_results import Row

PROGRAM = "results_with_copies.py"

__all__ = ["PROGRAM", "Row", "draw_bars", "mean"]


def mean(values: Iterable[float]) -> float:
    """The mean, in as many digits as a file keeps."""
    return round(statistics.fmean(values), 6)


def draw_bars(axes: Any, title: str, values: dict[str, float]) -> None:
    """Values by their names, from top to bottom."""
    axes.barh(range(len(values)), list(values.values()), color="#33556b")
    axes.set_yticks(range(len(values)), list(values), fontsize=7)
    for i, value in enumerate(values.values()):
        axes.text(value, i, f" {value:.4g}", va="center", fontsize=7)
    axes.margins(x=0.2)  # For the numbers.
    axes.invert_yaxis()
    axes.set_title(title, fontsize=9)
