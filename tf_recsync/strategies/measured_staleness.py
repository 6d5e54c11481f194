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
    copied = [state for state in states if is_copied(state.variable)]
    function = getattr(model, "train_function", None)
    synchronizer = getattr(function, "synchronizer", None)
    found: dict[int, list[np.ndarray]] = {}  # By the variables' ids: two may have one path.
    for state in states:
        # Groups count what is applied to their copies themselves.
        if synchronizer is None or not is_copied(state.variable):
            found[id(state.variable)] = [fetch(state.counters._value.read_value())]
    for counts in [] if synchronizer is None else synchronizer.counted():
        for state, counters in zip(copied, counts, strict=True):
            found.setdefault(id(state.variable), []).append(counters)

    of = staleness.Statistics.from_counters

    def counted(is_table: bool) -> staleness.Statistics:
        own = [found.get(id(s.variable), []) for s in states if s.is_table == is_table]
        return of([counters for of_one in own for counters in of_one])

    collected = counted(is_table=False)
    if mode.uses_buffers:
        # Buffers know how stale pushes are, and variables how many updates were left out.
        left_out = np.zeros([staleness.COUNTERS], np.int64)
        left_out[staleness.SKIPPED] = collected.skipped
        reports = getattr(function, "aggregation_reports", list)
        pushes = [report.staleness for report in reports()]
        collected = staleness.Statistics.sum([*pushes, of([left_out])])
    by_path: dict[str, list[np.ndarray]] = {}
    for state in states:
        by_path.setdefault(state.variable.path, []).extend(found.get(id(state.variable), []))
    return staleness.Report(
        dense=collected,
        rows=counted(is_table=True),
        variables={path: of(counters) for path, counters in by_path.items() if counters},
    )
