"""A picture of what workers did when."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from tf_recsync._figures import new_figure
from tf_recsync.synchronization.events import Event, row_of

# Waits are light, work is dark; what is not here takes no time. In the order of ACTIVITIES.
_COLORS = {
    "compute": "#33556b",
    "wait for updates": "#d8c0d8",
    "wait for tokens": "#e0b0a0",
    "send": "#7f8fb0",
    "receive": "#a9b5cf",
    "wait for a batch": "#e8d9a9",
    "pull": "#8fb8a8",
    "push": "#5f8f7f",
    "push and pull": "#77a494",
    "synchronize": "#b08040",
}


def draw(path: str, events: Sequence[Event], begin: float, seconds: float) -> None:
    """Draws a stretch of time, with a line for each row of a worker that has something in it.

    Args:
        path: of the picture; its ending says which kind.
        events: what workers did.
        begin: of the stretch, in seconds since the first event.
        seconds: its length.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    first = min((event.begin for event in events), default=0)

    def at(microseconds: int) -> float:
        return 1e-6 * (microseconds - first)

    shown = [e for e in events if at(e.end) >= begin and at(e.begin) <= begin + seconds]
    lines = sorted({(event.worker, *row_of(event)) for event in shown})
    figure = new_figure(10.0, 1.2 + 0.3 * max(len(lines), 1), "Recording.plot")
    axes = figure.subplots()
    bars = collections.defaultdict(list)  # By what was done, and the line.
    for event in shown:
        place = lines.index((event.worker, *row_of(event)))
        bars[event.name, place].append((at(event.begin), at(event.end) - at(event.begin)))
    for name, color in _COLORS.items():
        places = [place for done, place in bars if done == name]
        for place in places:
            label = name if place == places[0] else "_"  # Once in the legend.
            axes.broken_barh(bars[name, place], (place - 0.4, 0.8), color=color, label=label)
    axes.set_yticks(range(len(lines)), [f"worker {worker}, {name}" for worker, *_, name in lines])
    axes.set_xlim(begin, begin + seconds)
    axes.set_ylim(max(len(lines), 1) - 0.5, -0.5)
    axes.set_xlabel("seconds")
    if shown:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=5, frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)
