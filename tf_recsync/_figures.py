"""Pictures without a display, of classes that have a `plot`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float, caller: str) -> Figure:
    """An empty figure of a width and height in inches that `savefig` draws without a display.

    Raises an ImportError that names the caller if matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"{caller} needs matplotlib: pip install 'tf_recsync[plot]'") from error
    figure = Figure(figsize=(width, height), layout="tight")
    FigureCanvasAgg(figure)
    return figure
