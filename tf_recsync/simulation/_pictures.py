"""What the pictures of simulated results have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tf_recsync import staleness

FIRST, SECOND = "#33556b", "#b3541e"  # Colors.


def draw_staleness(axes: Any, statistics: staleness.Statistics, of: str) -> None:
    """A histogram of the staleness of pushes or updates; `of` names them."""
    edges, counts = np.array(statistics.histogram, float).reshape(-1, 2).T
    # Buckets are exact below 32, and eight for each power of two beyond.
    widths = np.maximum(1.0, 2.0 ** (np.floor(np.log2(np.maximum(edges, 1.0))) - 3))
    widths[edges < 32] = 1.0
    axes.bar(edges + 0.5 - widths, counts / widths, widths, align="edge", color=FIRST)
    axes.set_xlabel(f"staleness: mean {statistics.mean:.5g}")
    axes.set_ylabel(of)


def draw_shares(axes: Any, shares: Mapping[str, float], label: str) -> None:
    """Shares by their names, from top to bottom."""
    names = list(shares)
    axes.barh(range(len(names)), [shares[name] for name in names], color=SECOND)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel(label)


def draw_numbers(axes: Any, numbers: Sequence[float], of: str, label: str) -> None:
    """A number of each worker or trainer."""
    axes.bar(range(len(numbers)), numbers, color=FIRST)
    axes.set_xlabel(of)
    axes.set_ylabel(label)
