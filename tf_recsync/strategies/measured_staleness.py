"""The staleness that servers and groups have counted."""

from __future__ import annotations

import keras
import numpy as np

from tf_recsync import staleness
from tf_recsync.cluster import fetch
from tf_recsync.optimizers import base
from tf_recsync.strategies.model_variables import optimizers_of
from tf_recsync.synchronization.copies import is_copied
from tf_recsync.synchronization.modes import Mode


def measured_staleness(model: keras.Model, mode: Mode, pushes_gradients: bool) -> staleness.Report:
    """See `FitStrategy.staleness`.

    Args:
        model: a model that was compiled in a strategy's scope.
        mode: when pushes are applied inside a group.
        pushes_gradients: whether workers' steps push to what groups have copies of.
    """
    if pushes_gradients:
        parts = optimizers_of(model)
    else:
        parts = base.parts_of(getattr(model, "optimizer", None))
    states = [state for one in parts for state in getattr(one, "states", ())]
    states = [s for s in states if pushes_gradients or not is_copied(s.variable)]
    dense = [state for state in states if not state.is_table]
    synchronizer = getattr(getattr(model, "train_function", None), "synchronizer", None)
    found: dict[str, list[np.ndarray]] = {}
    for state in states:
        # Groups count what is applied to their copies themselves.
        if state.is_table or synchronizer is None or not is_copied(state.variable):
            found[state.variable.path] = [fetch(state.counters._value.read_value())]
    for counts in [] if synchronizer is None else synchronizer.counted():
        for state, counters in zip(dense, counts, strict=True):
            found.setdefault(state.variable.path, []).append(counters)
    of = staleness.Statistics.from_counters
    collected = of([c for s in dense for c in found.get(s.variable.path, [])])
    if mode.uses_buffers:
        live = getattr(getattr(model, "train_function", None), "aggregations", {}).values()
        collected = staleness.Statistics.sum(one.report().staleness for one in live)
    return staleness.Report(
        dense=collected,
        rows=of([c for s in states if s.is_table for c in found[s.variable.path]]),
        variables={path: of(counters) for path, counters in found.items()},
    )
