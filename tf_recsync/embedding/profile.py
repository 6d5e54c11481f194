"""What looking tables up costs, measured."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_recsync import ops
from tf_recsync._checks import check_at_least, list_of
from tf_recsync.embedding import feature_inputs, sequences
from tf_recsync.embedding.bin_packing import plan_placement
from tf_recsync.embedding.config import FeatureConfig, TableConfig, check_configs
from tf_recsync.embedding.physical_tables import physical_tables
from tf_recsync.ops.bags import Bags, PackedBags, merge
from tf_recsync.optimizers.base import Optimizer, no_versions

Call = Callable[[], object]

# What else runs on a core slows it down to the half, for milliseconds or for seconds. So all tables
# are measured by turns, and what slows them all down hardly changes their proportions.
_ROUNDS = 8
_PASSES = 4  # Measurements in a round, of which the fastest one counts.


def profile_costs(
    tables: Sequence[TableConfig],
    features: Sequence[FeatureConfig],
    batches: Iterable[Any],
    lookup: Callable[[str, np.ndarray], object] | None = None,
    *,
    optimizer: Optimizer | None = None,
    steps: int = 20,
) -> dict[str, float]:
    """Measures what the lookups in each table cost, for `plan_placement`.

    The first batches of the data are looked up in each table by the kernels that parameter servers
    run, gathering and pooling, in this process; with an `optimizer`, the table is updated too. What
    is measured is the time of one processor, which depends little on what else the machine does;
    tables are measured by turns, several times, and the mean counts. Finding the rows that ids
    belong to is the workers' task, and is not measured, nor is the network. Of a table with keys,
    servers find the rows: that is not measured either.

    Tables are not allocated in full: a stand-in of zeros has the rows that the batches name and no
    others, in random order, and lives only while it is measured.

    Reference: Zheng et al. 2020, "ShadowSync: Performing Synchronization in the Background for
    Highly Scalable Distributed Training", section 3.1: profiling with a small subset of the data.

    Args:
        tables: The tables, under different names.
        features: The features looked up in them; every table has at least one.
        batches: At least one batch, as the model gets them: a `tf.data.Dataset`, or any iterable.
            A batch is a mapping with the ids of each feature under its name, in any form that
            `EmbeddingCollection` takes, or a tuple that begins with one, as in
            `(features, labels)`. Other entries are ignored.
        lookup: Measures a lookup of your own instead: it is called with the name of a table and
            the ids, an array of one dimension, and must return only when the lookup is done; what
            it returns is ignored. Ids are integers, or bytes where a table with keys gets strings.
            None (the default) measures our kernels.
        optimizer: An optimizer of this package, whose updates are measured too; it is not changed.
            None (the default) measures lookups alone.
        steps: How many batches to take, at least 1; 20 by default.

    Returns:
        Seconds per batch, under the name of each table: the mean, or the median with `lookup`.

    Raises:
        ValueError: If tables and features do not belong together, there is no batch, a batch
            lacks a feature or has ids that are neither integers nor, for a table with keys,
            strings, an argument is out of range, or a strategy's scope is active (variables would
            be made on servers).
        tf.errors.InvalidArgumentError: If ids are out of range and the feature does not accept
            them.

    Example:
        >>> from tf_recsync import optimizers
        >>> tables = [TableConfig("users", 10**9, 4), TableConfig("films", 100, 4)]
        >>> features = [FeatureConfig("user", "users"), FeatureConfig("watched", "films")]
        >>> watched = np.arange(512 * 30).reshape(512, 30) % 100
        >>> data = tf.data.Dataset.from_tensors(
        ...     ({"user": 10**6 * np.arange(512), "watched": watched}, np.zeros(512))
        ... )
        >>> costs = profile_costs(tables, features, data, optimizer=optimizers.Adagrad(0.1))
        >>> costs["films"] > costs["users"]  # 30 rows for an example, not 1
        True
    """
    tables = list_of("tables", tables, TableConfig)
    features = list_of("features", features, FeatureConfig)
    check_configs(tables, features)
    check_at_least("steps", steps, 1)
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"optimizer={optimizer!r}: must be an optimizer of tf_recsync.optimizers or None."
        )
    if optimizer is not None and lookup is not None:
        raise ValueError("optimizer: must be None where a lookup of your own is measured.")
    if tf.distribute.has_strategy():
        raise ValueError("profile_costs must be called outside of a strategy's scope.")
    taken = [_features_of(batch) for batch in itertools.islice(batches, steps)]
    if not taken:
        raise ValueError("batches: there must be at least one batch.")
    has_keys = {table.name: table.keys is not None for table in tables}
    for number, batch in enumerate(taken):
        for feature in features:
            _check_ids(batch, feature.name, number, has_keys[feature.table])
    if lookup is not None:
        return _time_lookup(tables, features, taken, lookup)
    bags = {}
    seconds = {table.name: 0.0 for table in tables}
    with tf.device("/CPU:0"), _one_thread():
        for table in tables:
            own = [feature for feature in features if feature.table == table.name]
            bags[table.name] = _bags(table, own, taken)
        for _ in range(_ROUNDS):
            for table in tables:
                seconds[table.name] += _time_kernels(table, bags[table.name], optimizer)
    # Were the requests too small to be seen, the difference could be below 0.
    return {name: max(total, 0.0) / (_ROUNDS * len(taken)) for name, total in seconds.items()}


def _features_of(batch: Any) -> Mapping[str, Any]:
    features = batch[0] if isinstance(batch, tuple) else batch
    if not isinstance(features, Mapping):
        raise ValueError(
            "batches: a batch must be a mapping from features to ids, or a tuple that begins with "
            f"one, not {type(features).__name__}."
        )
    return features


def _check_ids(batch: Mapping[str, Any], feature: str, number: int, has_keys: bool) -> None:
    if feature not in batch:
        raise ValueError(f"batch {number}: the feature {feature!r} is not among {list(batch)}.")
    dtype = tf.as_dtype(_flat(batch[feature]).dtype)
    if not (dtype.is_integer or (has_keys and dtype == tf.string)):
        allowed = "integers or strings" if has_keys else "integers"
        hint = "" if dtype != tf.string else "; a table with keys='any' takes strings"
        raise ValueError(
            f"batch {number}: the ids of the feature {feature!r} must be {allowed}, not "
            f"{dtype.name}{hint}."
        )


def _flat(ids: Any) -> np.ndarray:
    """The ids of a feature in a batch, as one dimension; strings as bytes."""
    if isinstance(ids, tf.RaggedTensor):
        ids = ids.flat_values
    elif isinstance(ids, tf.SparseTensor):
        ids = ids.values
    return np.asarray(tf.convert_to_tensor(ids)).ravel()


def _ids(batch: Mapping[str, Any], feature: FeatureConfig) -> np.ndarray:
    """The ids of a feature in a batch that are looked up, as one dimension."""
    ids = _flat(batch[feature.name])
    padding = feature.padding
    if isinstance(padding, str):
        padding = padding.encode()
    return ids if padding is None else ids[ids != padding]


def _time_lookup(tables, features, batches, lookup) -> dict[str, float]:
    """The median seconds of a lookup of the caller's; it ignores the first, slower ones."""
    seconds: dict[str, list[float]] = {table.name: [] for table in tables}
    for batch in batches:
        for table in seconds:
            own = [_ids(batch, feature) for feature in features if feature.table == table]
            ids = np.concatenate(own)
            start = time.perf_counter()
            lookup(table, ids)
            seconds[table].append(time.perf_counter() - start)
    return {table: statistics.median(times) for table, times in seconds.items()}


def _bags(table: TableConfig, features: list[FeatureConfig], batches) -> list[Bags]:
    """What each batch looks up in a table, in a table of just the rows that they name."""
    by_name = {table.name: table}
    physical = physical_tables([table], plan_placement([_unsplit(table)], 1))
    # Sequences are looked up feature by feature, each id by itself.
    groups = [features] if table.combiner is not None else [[feature] for feature in features]
    groups = [(own, feature_inputs.Routes(own, by_name, physical)) for own in groups]
    requests = []
    for batch in batches:
        parts = []
        for features, routes in groups:
            inputs = {feature.name: batch[feature.name] for feature in features}
            read = feature_inputs.read(features, by_name, inputs, None)
            if table.combiner is None:
                read = [sequences.singles(own) for own in read]
            routed = routes.route({f.name: own for f, own in zip(features, read, strict=True)})
            parts.append(routed.bags[0])
        requests.append(merge(parts))
    ids = [request.ids.numpy() for request in requests]
    named, compact = np.unique(np.concatenate(ids), return_inverse=True)
    # In their own order, neighbours in the stand-in would be rows far apart in the table.
    places = np.random.default_rng(0).permutation(len(named))[compact]
    places = np.split(places, np.cumsum([len(own) for own in ids])[:-1])
    return [
        request._replace(ids=tf.constant(own, tf.int64))
        for request, own in zip(requests, places, strict=True)
    ]


def _unsplit(table: TableConfig) -> TableConfig:
    return TableConfig(table.name, table.rows, table.dimension, dtype=table.dtype)


def _time_kernels(table: TableConfig, batches: list[Bags], optimizer: Optimizer | None) -> float:
    """Seconds of the lookups in a table and, with an optimizer, of its updates."""
    rows = 1 + max((int(tf.reduce_max(b.ids)) for b in batches if b.ids.shape[0]), default=0)
    variable = keras.Variable(np.zeros((rows, table.dimension)), dtype=table.dtype, name=table.name)
    seconds = _time_gather(variable, batches)
    if optimizer is not None:
        config = {**optimizer.get_config(), "tables": ".*", "learning_rate": 0.01}
        own = type(optimizer).from_config(config)
        own.build([variable])
        seconds += _time_updates(own, batches)
    return seconds


def _time_gather(variable: keras.Variable, requests: list[Bags]) -> float:
    """Seconds of all lookups."""
    versions = keras.Variable(np.zeros(variable.shape[0]), dtype="int64")

    def gather(bags: PackedBags) -> Call:
        inputs = [variable.value.handle], [versions.value.handle], bags.ids, bags.counts
        return lambda: ops.gather_rows(*inputs, **bags.inputs())

    return _fastest(gather, [merge(requests)])


def _time_updates(optimizer: Optimizer, requests: list[Bags]) -> float:
    """Seconds of a push for each request."""
    state = optimizer.states[0]
    width = state.variable.shape[1]
    rate, step = tf.constant(0.01), tf.constant(1, tf.int64)

    def update(bags: PackedBags) -> Call:
        gradient = tf.fill([int(bags.sizes[0]) * width], 1e-3)
        arguments = optimizer.rows_arguments([state], gradient, bags, no_versions(), rate, step)
        return lambda: optimizer.rows_op(**arguments)

    return _fastest(update, requests)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Inside, kernels that this thread calls run in it alone.

    The operating system counts the time of other threads late: when they stop, or at a tick.
    """
    before = ops.limit_parallelism(1)
    try:
        yield
    finally:
        ops.limit_parallelism(before)


def _fastest(prepare: Callable[[PackedBags], Call], requests: list[Bags]) -> float:
    """Processor seconds of a call for each request, less those of as many for nothing."""
    nothing = prepare(PackedBags.pack([Bags(tf.zeros([0], tf.int64))]))
    calls = [prepare(PackedBags.pack([request])) for request in requests]

    def measure(call: Call) -> float:
        start = time.thread_time()
        call()
        return time.thread_time() - start

    # What disturbs the least disturbed of as many calls disturbs both alike.
    times = np.array(
        [[(measure(call), measure(nothing)) for call in calls] for _ in range(_PASSES)]
    ).min(0)
    return float((times[:, 0] - times[:, 1]).sum())
