"""What looking tables up costs, measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from tf_recsync.embedding.config import FeatureConfig, TableConfig, check_configs


def profile_costs(
    tables: Sequence[TableConfig],
    features: Sequence[FeatureConfig],
    batches: Iterable[Mapping[str, np.ndarray]],
    lookup: Callable[[str, np.ndarray], object],
) -> dict[str, float]:
    """Measures what the lookups in each table cost, for `plan_placement`.

    Each table is looked up once per batch, with the ids of all its features. The median ignores
    the first, slower lookups if there are several batches; ten are usually enough.

    Reference: Zheng et al. 2020, "ShadowSync: Performing Synchronization in the Background for
    Highly Scalable Distributed Training", section 3.1: profiling with a small subset of the data.

    Args:
        tables: The tables, under different names.
        features: The features looked up in them; every table has at least one.
        batches: At least one batch: the integer ids, of any shape, under the name of each
            feature. Other entries are ignored.
        lookup: Called with the name of a table and the ids, an integer array of one dimension.
            It must return only when the lookup is done; what it returns is ignored.

    Returns:
        The median seconds per batch, under the name of each table.

    Raises:
        ValueError: If tables and features do not belong together, there is no batch, or a batch
            lacks a feature or has ids that are no integers.

    Example:
        >>> tables, features = [TableConfig("users", 9, 4)], [FeatureConfig("user", "users")]
        >>> values = np.zeros((9, 4), np.float32)
        >>> batches = [{"user": np.array([1, 8, 8])}] * 10
        >>> costs = profile_costs(tables, features, batches, lambda table, ids: values[ids])
        >>> costs["users"] > 0
        True
    """
    check_configs(tables, features)
    seconds: dict[str, list[float]] = {table.name: [] for table in tables}
    for number, batch in enumerate(batches):
        for table in seconds:
            ids = np.concatenate(
                [
                    _ids(batch, feature.name, number)
                    for feature in features
                    if feature.table == table
                ]
            )
            start = time.perf_counter()
            lookup(table, ids)
            seconds[table].append(time.perf_counter() - start)
    if not seconds[tables[0].name]:
        raise ValueError("batches: there must be at least one batch.")
    return {table: statistics.median(times) for table, times in seconds.items()}


def _ids(batch: Mapping[str, np.ndarray], feature: str, number: int) -> np.ndarray:
    """The ids of a feature in a batch, as one dimension."""
    if feature not in batch:
        raise ValueError(f"batch {number}: the feature {feature!r} is not among {list(batch)}.")
    ids = np.asarray(batch[feature])
    if not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"batch {number}: the ids of the feature {feature!r} must be integers, not {ids.dtype}."
        )
    return ids.ravel()
