"""Draws the pictures of internals.md; the states of a server are those of the code.

python docs/draw_pictures.py            # writes docs/pictures/*.svg
"""

from __future__ import annotations

import pathlib
import sys

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "tf_recsync"  # The same file each time.
matplotlib.rcParams["svg.fonttype"] = "none"
import matplotlib.patches as patches  # noqa: E402
import matplotlib.pyplot as plt  # noqa: E402

from tf_recsync.cluster.membership import MOVES, TRANSITIONS, MemberState  # noqa: E402

FOLDER = pathlib.Path(__file__).parent / "pictures"
BLUE, ORANGE, GREEN, GREY = "#c6dbef", "#fdd0a2", "#c7e9c0", "#eeeeee"


def figure(width: float, height: float) -> plt.Axes:
    """An empty page, one unit of which is an inch."""
    _, axes = plt.subplots(figsize=(width, height))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    axes.set_position([0, 0, 1, 1])
    return axes


def save(name: str) -> None:
    """Writes the current picture."""
    plt.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})
    plt.close()


def box(axes: plt.Axes, x, y, width, height, text="", color="white", edge="black", **options):
    """A box with rounded corners around a point, and a text in it."""
    corner = (x - width / 2, y - height / 2)
    style = "round,pad=0,rounding_size=0.08"
    axes.add_patch(
        patches.FancyBboxPatch(
            corner, width, height, boxstyle=style, facecolor=color, edgecolor=edge, zorder=2
        )
    )
    options = {"ha": "center", "va": "center", "fontsize": 9, "zorder": 3, **options}
    axes.text(x, y, text, **options)


def arrow(axes: plt.Axes, start, end, text="", bend=0.0, at=0.5, style="-|>", **options) -> None:
    """An arrow from point to point, with a text beside it."""
    axes.annotate(
        "",
        end,
        start,
        zorder=2,
        arrowprops={
            "arrowstyle": style,
            "connectionstyle": f"arc3,rad={bend}",
            "color": options.pop("color", "black"),
            "linestyle": options.pop("linestyle", "-"),
            "shrinkA": 2,
            "shrinkB": 2,
        },
    )
    x, y = (a + at * (b - a) for a, b in zip(start, end, strict=True))
    dx, dy = options.pop("shift", (0.0, 0.0))
    options = {"ha": "center", "va": "center", "fontsize": 8, "zorder": 4, **options}
    if text:
        background = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.text(x + dx, y + dy, text, bbox=background, **options)


def draw_axes() -> None:
    """The two choices of a strategy."""
    axes = figure(10, 5.6)
    axes.text(5, 5.4, "between groups", ha="center", va="center", fontsize=11, weight="bold")
    axes.text(
        0.2,
        2.6,
        "inside a group",
        ha="center",
        va="center",
        rotation=90,
        fontsize=11,
        weight="bold",
    )
    columns = [
        (1.95, "nothing: there is one group"),
        (4.95, "EASGD, MA, BMUF: ShadowSync's loops"),
        (8.15, "Hop: an exchange with neighbors"),
    ]
    for x, text in columns:
        axes.text(x, 5.05, text, ha="center", va="center", fontsize=9)
    axes.plot([0.5, 9.9], [4.88, 4.88], color="black", linewidth=1)
    rows = [
        (3.85, "trainers share a copy\non the group's servers:\nany mode of recsync.modes"),
        (1.35, "one trainer, which\nholds its copy:\nits own optimizer"),
    ]
    for y, text in rows:
        axes.text(0.62, y, text, ha="center", va="center", fontsize=8, rotation=90)
    axes.plot([0.5, 9.9], [2.55, 2.55], color="grey", linewidth=0.8)

    def shared(x: float, y: float, number: int = 0) -> None:
        box(axes, x, y, 1.25, 1.35, color=GREY, edge="grey")
        for dx in (-0.3, 0.3):
            box(axes, x + dx, y + 0.4, 0.5, 0.3, "worker", BLUE, fontsize=7)
            box(axes, x + dx, y - 0.4, 0.5, 0.3, "PS", ORANGE, fontsize=7)
            arrow(axes, (x + dx, y + 0.25), (x, y - 0.02), style="<|-|>")
        axes.text(x, y - 0.12, "pull, push", ha="center", va="center", fontsize=6.5, zorder=4)

    def alone(x: float, y: float) -> None:
        box(axes, x, y, 0.7, 0.5, "worker\n+ copy", GREEN, fontsize=7)

    shared(1.95, 4.0)
    axes.text(1.95, 2.95, "AsyncStrategy, SyncStrategy,\nGBAStrategy, …", ha="center", fontsize=9)
    for x in (4.2, 5.7):
        shared(x, 4.0)
        arrow(axes, (x, 3.32), (4.95, 3.12), style="<|-|>", color="firebrick")
    box(axes, 4.95, 3.0, 1.5, 0.24, "sync PS, or all-reduce", ORANGE, fontsize=7)
    axes.text(4.95, 2.66, "HierarchicalStrategy", ha="center", fontsize=9)
    for x in (7.4, 8.9):
        shared(x, 4.0)
    arrow(axes, (8.03, 3.6), (8.27, 3.6), style="<|-|>", color="firebrick")
    axes.text(8.15, 2.95, "HierarchicalStrategy\nwith recsync.Hop", ha="center", fontsize=9)

    axes.text(1.95, 1.4, "(plain Keras)", ha="center", fontsize=9, color="grey")
    for x in (4.2, 5.7):
        alone(x, 1.8)
        arrow(axes, (x, 1.55), (4.95, 1.2), style="<|-|>", color="firebrick")
    box(axes, 4.95, 1.05, 1.5, 0.3, "sync PS, or all-reduce", ORANGE, fontsize=7)
    axes.text(4.95, 0.5, "ShadowSyncStrategy", ha="center", fontsize=9)
    spots = [(7.4, 1.3), (8.15, 2.0), (8.9, 1.3)]
    for spot in spots:
        alone(*spot)
    arrow(axes, (7.62, 1.55), (7.85, 1.8), style="<|-|>", color="firebrick")
    arrow(axes, (8.45, 1.8), (8.68, 1.55), style="<|-|>", color="firebrick")
    arrow(axes, (7.78, 1.3), (8.52, 1.3), style="<|-|>", color="firebrick")
    axes.text(8.15, 0.5, "HopStrategy", ha="center", fontsize=9)
    axes.text(
        5.2,
        0.15,
        "Embedding tables lie once on embedding PSs, whatever the two choices are.",
        ha="center",
        fontsize=8,
        style="italic",
    )
    save("two_axes")


def draw_life() -> None:
    """The states of a server: an arrow for each move and transition of the code."""
    axes = figure(9.5, 5.2)
    places = {
        MemberState.JOINING: (1.6, 3.9),
        MemberState.READY: (3.5, 3.9),
        MemberState.WORKING: (5.6, 4.5),
        MemberState.IDLE: (5.6, 3.3),
        MemberState.DONE: (2.55, 2.9),
        MemberState.SUSPECT: (8.3, 3.9),
        MemberState.ABSENT: (1.6, 1.0),
        MemberState.READMITTING: (4.2, 1.0),
        MemberState.LOST: (7.6, 1.0),
    }
    box(axes, 3.65, 3.75, 6.3, 2.5, color="#f7fbff", edge="grey")
    axes.text(0.65, 4.8, "there", fontsize=9, color="grey", style="italic")
    axes.text(
        3.65, 4.8, "what the threads that drive a worker do", fontsize=8, color="grey", ha="center"
    )
    for state, (x, y) in places.items():
        is_away = state in (MemberState.LOST, MemberState.ABSENT, MemberState.READMITTING)
        color = ORANGE if is_away else GREY if state is MemberState.SUSPECT else BLUE
        box(axes, x, y, 1.25, 0.42, state.name, color, fontsize=8)
    # Where arrows leave the box of all that are there, for None in the table.
    edge = {MemberState.SUSPECT: (6.8, 3.9), MemberState.LOST: (6.4, 2.5)}
    half = (0.63, 0.21)

    def ends(a, b):
        (x1, y1), (x2, y2) = places[a], places[b]
        if abs(x2 - x1) > 1.2:
            sign = 1 if x2 > x1 else -1
            return (x1 + sign * half[0], y1), (x2 - sign * half[0], y2)
        sign = 1 if y2 > y1 else -1
        return (x1, y1 + sign * half[1]), (x2, y2 - sign * half[1])

    for source, targets in MOVES.items():
        for target in targets:
            start, end = ends(source, target)
            arrow(axes, start, end, bend=-0.18)
    for event, changes in TRANSITIONS.items():
        for source, target in changes.items():
            if source is None:
                x, y = edge[target]
                start = (x, y)
                end = (
                    places[target][0] - (half[0] if target is MemberState.SUSPECT else 0.3),
                    places[target][1] + (0.1 if target is MemberState.SUSPECT else half[1]),
                )
            elif target is None:
                x, y = places[source]
                is_suspect = source is MemberState.SUSPECT
                start = (x - half[0], y - 0.1) if is_suspect else (x - 0.25, y + half[1])
                end = (6.8, 3.7) if is_suspect else (min(x - 0.25, 5.6), 2.5)
            else:
                start, end = ends(source, target)
                if (source, target) == (MemberState.READMITTING, MemberState.LOST):
                    start, end = (start[0], start[1] - 0.12), (end[0], end[1] - 0.12)
            shift = (0.0, 0.0)
            if source is MemberState.SUSPECT and target is None:
                shift = (0.0, -0.17)
            elif target is MemberState.SUSPECT:
                shift = (0.0, 0.17)
            elif source is MemberState.LOST and target is None:
                shift = (-0.35, -0.15)
            elif source is None:
                shift = (0.15, 0.1)
            arrow(axes, start, end, event, color="firebrick", shift=shift, fontsize=7.5)
    axes.text(
        4.75,
        0.35,
        "Each loss begins the next life: what is of an earlier one is refused by its number.",
        ha="center",
        fontsize=8,
        style="italic",
    )
    save("life_of_a_server")


def draw_pass() -> None:
    """How a pass runs: calls that go on until others have nothing to do, and are told to end."""
    axes = figure(10, 4.9)
    lanes = {"coordinator": 3.9, "worker:0": 2.8, "worker:1 (slower)": 1.7, "servers": 0.5}
    for name, y in lanes.items():
        axes.text(0.1, y, name, fontsize=9, va="center")
        axes.plot([1.5, 9.8], [y, y], color="lightgrey", linewidth=1, zorder=0)
    # (beginning, steps that it may do, steps that it does) of each call.
    calls = {
        "worker:0": [(1.6, 1, 1), (2.05, 16, 16), (7.6, 1, 1), (8.1, 1, 1)],
        "worker:1 (slower)": [(1.6, 1, 1), (2.5, 16, 6), (7.7, 1, 1)],
    }
    widths = {"worker:0": 0.3, "worker:1 (slower)": 0.8}
    for name, of_one in calls.items():
        y, width = lanes[name], widths[name]
        for x, asked, done in of_one:
            for i in range(done):
                left = x + 0.05 + i * width
                box(axes, left + width / 2, y, 0.86 * width, 0.3, "", BLUE)
                arrow(
                    axes,
                    (left + width / 2, y - 0.16),
                    (left + width / 2, lanes["servers"] + 0.1),
                    style="<|-|>",
                    color="lightsteelblue",
                )
            right = x + 0.05 + done * width
            arrow(axes, (x, lanes["coordinator"]), (x + 0.05, y + 0.16), color="firebrick")
            arrow(axes, (right, y + 0.16), (right + 0.03, lanes["coordinator"]), color="grey")
            axes.text(
                (x + right) / 2,
                y + 0.28,
                f"{done}" if done == asked else f"{done} of {asked}",
                fontsize=7.5,
                ha="center",
                zorder=5,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
            )
    for x in (2.2, 2.5, 2.9, 3.5, 4.4, 5.6, 6.6):
        arrow(
            axes,
            (x, lanes["coordinator"]),
            (x, lanes["servers"] + 0.1),
            style="<|-",
            color="darkseagreen",
        )
    arrow(axes, (6.97, lanes["coordinator"]), (7.0, lanes["servers"] + 0.1), color="darkorange")
    box(
        axes,
        5.65,
        lanes["servers"],
        8.3,
        0.24,
        "pull, push, and the workers' rows: steps applied, told to end",
        ORANGE,
        fontsize=8,
    )
    for x, y, text in [
        (5.6, 4.65, "A call says how many steps at most (red), and returns when it ends (grey)."),
        (4.3, 4.2, "rows are read (green):\nhow far calls are"),
        (7.3, 4.2, "worker:0 has nothing to do:\nthe other call is told to end (orange)"),
    ]:
        axes.text(x, y, text, ha="center", va="center", fontsize=8)
    save("a_pass")


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    draw_axes()
    draw_life()
    draw_pass()
    return 0


if __name__ == "__main__":
    sys.exit(main())
