"""The forms in which a collection's features come, and the way from ids to rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_recsync import ops
from tf_recsync.embedding.config import FeatureConfig, TableConfig
from tf_recsync.embedding.key_rules import partitions_of
from tf_recsync.embedding.keys import KeyedRows, hashed, key_of
from tf_recsync.embedding.physical_tables import PhysicalTable
from tf_recsync.ops.bags import Bags


@dataclasses.dataclass(frozen=True)
class FeatureInput:
    """The ids of one feature, example after example.

    Attributes:
        ids: int32 or int64 [n].
        length: the ids of an example; 0 where they differ.
        splits: int64 [batch + 1], where each example's ids begin; None with a length.
        weights: float32 [n], or None.
        batch: the static batch size, or None.
        is_vector: whether the ids came as [batch].
        kept: int64 [n], where these ids are among those of `given`; None without padding.
        given: what it was before padding was left out; None without.
    """

    ids: tf.Tensor
    length: int
    splits: tf.Tensor | None
    weights: tf.Tensor | None
    batch: int | None
    is_vector: bool = False
    kept: tf.Tensor | None = None
    given: FeatureInput | None = None

    @property
    def is_single(self) -> bool:
        """Whether every example has one id, of weight 1."""
        return self.length == 1 and self.weights is None

    def without(self, padding: int | str) -> FeatureInput:
        """The same without the ids that are equal to a number, or to a string's key."""
        count = tf.size(self.ids, tf.int64)
        counts = tf.logical_not(is_padding(self.ids, padding))
        kept = tf.reshape(tf.where(counts), [-1])
        splits = self.splits
        if splits is None:
            splits = tf.range(0, count + 1, self.length)
        before = tf.concat([[0], tf.cumsum(tf.cast(counts, tf.int64))], 0)
        return FeatureInput(
            tf.gather(self.ids, kept),
            0,
            tf.gather(before, splits),
            None if self.weights is None else tf.gather(self.weights, kept),
            self.batch,
            self.is_vector,
            kept,
            self,
        )


def check_names(
    features: Sequence[FeatureConfig],
    inputs: Mapping[str, Any],
    weights: Mapping[str, Any] | None,
) -> None:
    """Raises ValueError unless there are inputs for all features, and no others."""
    names = [feature.name for feature in features]
    if not isinstance(inputs, Mapping):
        raise ValueError(f"inputs must be a dict of the features {names}, not {inputs!r}")
    for argument, given in (("inputs", inputs), ("weights", weights or {})):
        unknown = sorted(set(given) - set(names))
        if unknown:
            raise ValueError(f"{argument} has unknown features {unknown}; the features are {names}")
    missing = [name for name in names if name not in inputs]
    if missing:
        raise ValueError(f"inputs lacks the features {missing}")


def check_symbolic(
    features: Sequence[FeatureConfig],
    tables: Mapping[str, TableConfig],
    inputs: Mapping[str, keras.KerasTensor],
    weights: Mapping[str, keras.KerasTensor] | None,
) -> None:
    """Checks what the layer is called with when a model is built.

    Raises:
        ValueError: if a feature is missing or unknown, or has a wrong type or shape.
    """
    check_names(features, inputs, weights)
    for feature in features:
        ids, own = inputs[feature.name], (weights or {}).get(feature.name)
        wrong = _wrong(feature)
        _check_dtype(feature, tables[feature.table].keys is not None, tf.as_dtype(ids.dtype))
        if len(ids.shape) not in (1, 2):
            raise wrong(f"ids must be [batch] or [batch, k], not {ids.shape}")
        if own is None:
            continue
        _check_weighable(feature, tables[feature.table])
        if not tf.as_dtype(own.dtype).is_floating:
            raise wrong(f"weights must be floats, not {own.dtype}")
        if len(own.shape) != len(ids.shape):
            raise wrong(f"the weights are {own.shape}, the ids {ids.shape}")


def _wrong(feature: FeatureConfig) -> Callable[[str], ValueError]:
    """Makes errors that name a feature."""
    return lambda what: ValueError(f"feature {feature.name!r} of table {feature.table!r}: {what}")


def _check_dtype(feature: FeatureConfig, has_keys: bool, dtype: tf.DType) -> None:
    allowed = "int32, int64 or strings" if has_keys else "int32 or int64"
    if not (dtype.is_integer or (has_keys and dtype == tf.string)):
        hint = "" if dtype != tf.string else "; a table with keys='any' takes strings"
        raise _wrong(feature)(f"ids must be {allowed}, not {dtype.name}{hint}")
    if feature.padding is None or isinstance(feature.padding, str) == (dtype == tf.string):
        return
    raise _wrong(feature)(f"padding={feature.padding!r} can't be among ids of {dtype.name}")


def _check_weighable(feature: FeatureConfig, table: TableConfig) -> None:
    if table.combiner is None:
        raise _wrong(feature)(
            "weights are for ids whose rows are combined, and its table has combiner=None; "
            "multiply the sequence that it gives"
        )


def read(
    features: Sequence[FeatureConfig],
    tables: Mapping[str, TableConfig],
    inputs: Mapping[str, Any],
    weights: Mapping[str, Any] | None,
) -> list[FeatureInput]:
    """Reads what the layer is called with.

    Raises:
        ValueError: if a feature is missing or unknown, or has a wrong type or shape.
    """
    check_names(features, inputs, weights)
    weights = weights or {}
    for feature in features:
        if weights.get(feature.name) is not None:
            _check_weighable(feature, tables[feature.table])
    read = [
        _read(f, tables[f.table].keys is not None, inputs[f.name], weights.get(f.name))
        for f in features
    ]
    if any(tables[feature.table].combiner is None for feature in features):
        # The op compares those that it looks up together.
        for feature, own in zip(features, read, strict=True):
            if None not in (own.batch, read[0].batch) and own.batch != read[0].batch:
                raise _wrong(feature)(
                    f"has {own.batch} examples, feature {features[0].name!r} has {read[0].batch}"
                )
    # The ops take one type of ids.
    dtype = tf.int32 if all(r.ids.dtype == tf.int32 for r in read) else tf.int64
    read = [dataclasses.replace(r, ids=tf.cast(r.ids, dtype)) for r in read]
    return [
        own if feature.padding is None else own.without(feature.padding)
        for feature, own in zip(features, read, strict=True)
    ]


def read_given(feature: FeatureConfig, ids: Any) -> FeatureInput:
    """Reads the ids of one feature, padding included; raises ValueError as `read` does."""
    return _read(feature, True, ids, None)


def is_padding(ids: tf.Tensor, padding: int | str) -> tf.Tensor:
    """Which ids are equal to a number, or are the key of a string."""
    # The number may be beyond int32.
    stands = key_of(tf.constant(padding)) if isinstance(padding, str) else padding
    return tf.cast(ids, tf.int64) == stands


def _read(feature: FeatureConfig, has_keys: bool, ids: Any, weights: Any) -> FeatureInput:
    wrong, is_vector = _wrong(feature), False
    if isinstance(ids, tf.SparseTensor):
        if ids.shape.rank != 2:
            raise wrong(f"sparse ids must be [batch, any], not {ids.shape}")
        if weights is not None and not isinstance(weights, tf.SparseTensor):
            raise wrong("the weights of sparse ids must be sparse")
        batch, rows = ids.shape[0], ids.dense_shape[0]
        # They may come in any order; what is in order costs next to nothing.
        ids = tf.sparse.reorder(ids)
        values = ids.values
        flat_weights = None if weights is None else tf.sparse.reorder(weights).values
        splits = tf.RaggedTensor.from_value_rowids(
            values, ids.indices[:, 0], nrows=rows, validate=False
        ).row_splits
        length = 0
    elif isinstance(ids, tf.RaggedTensor):
        if ids.shape.rank != 2:
            raise wrong(f"ragged ids must be [batch, any], not {ids.shape}")
        if weights is not None and not isinstance(weights, tf.RaggedTensor):
            raise wrong("the weights of ragged ids must be ragged")
        values, splits, length, batch = ids.values, ids.row_splits, 0, ids.shape[0]
        flat_weights = None if weights is None else weights.values
    else:
        ids = tf.convert_to_tensor(ids)
        if ids.shape.rank not in (1, 2):
            raise wrong(f"dense ids must be [batch] or [batch, k], not {ids.shape}")
        values, splits, batch, is_vector = _flat(ids), None, ids.shape[0], ids.shape.rank == 1
        length = 1 if ids.shape.rank == 1 else (ids.shape[1] or 0)
        if length == 0:
            # Keras, too, builds a model of ragged inputs with dense ones of unknown k.
            k = tf.shape(ids, tf.int64)[1]
            splits = tf.range(tf.shape(ids, tf.int64)[0] + 1) * k
        flat_weights = None
        if weights is not None:
            weights = tf.convert_to_tensor(weights)
            if not weights.shape.is_compatible_with(ids.shape):
                raise wrong(f"the weights are {weights.shape}, the ids {ids.shape}")
            flat_weights = _flat(weights)
    _check_dtype(feature, has_keys, values.dtype)
    if values.dtype == tf.string:
        values = key_of(values)
    if flat_weights is not None:
        if not flat_weights.dtype.is_floating:
            raise wrong(f"weights must be floats, not {flat_weights.dtype.name}")
        flat_weights = tf.stop_gradient(tf.cast(flat_weights, tf.float32))
    if splits is not None:
        splits = tf.cast(splits, tf.int64)
    return FeatureInput(values, length, splits, flat_weights, batch, is_vector)


def _flat(tensor: tf.Tensor) -> tf.Tensor:
    # Dozens of ops in each step that do nothing take their time, too.
    return tensor if tensor.shape.rank == 1 else tf.reshape(tensor, [-1])


@dataclasses.dataclass(frozen=True)
class Routed:
    """What a batch looks up.

    Attributes:
        batch: the batch size, an int64 scalar.
        bags: those of each of `Routes.looked_up`.
        slots: where each of their vectors goes.
        sources: the vector of each slot, where several take the same.
        alone: the bags of each feature that is looked up by itself.
    """

    batch: tf.Tensor
    bags: list[Bags]
    slots: list[tf.Tensor]
    sources: list[tf.Tensor]
    alone: list[Bags]


class Routes:
    """The way from the features' ids to rows of physical tables and back to vectors.

    Args:
        features: the features that are looked up together, table by table.
        tables: the tables, by name.
        physical: the physical tables that hold them.
        alone: features of tables of one shard that are looked up by themselves, and
            whether their vectors are pooled.
        keyed: of each physical table what finds the rows of keys, or None.

    Attributes:
        dimensions: the dimensions of `features`.
        looked_up: the numbers of the physical tables that `features` are looked up in.
        tables_alone: the number of the physical table of each of `alone`.
    """

    def __init__(
        self,
        features: Sequence[FeatureConfig],
        tables: Mapping[str, TableConfig],
        physical: Sequence[PhysicalTable],
        alone: Sequence[tuple[FeatureConfig, bool]] = (),
        keyed: Sequence[KeyedRows | None] = (),
    ):
        self._features = features
        self._keyed = keyed
        self._alone = alone
        self._tables = tables
        self.dimensions = [tables[f.table].dimension for f in features]
        places: dict[str, dict[int, tuple[int, int]]] = {}
        for number, table in enumerate(physical):
            for piece in table.pieces:
                places.setdefault(piece.table, {})[piece.index] = (number, piece.offset)
        # For each table, the physical table and first row of each shard.
        self._shards = {name: [own[i] for i in sorted(own)] for name, own in places.items()}
        self.looked_up = sorted({n for f in features for n, _ in self._shards[f.table]})
        self.tables_alone = [self._shards[f.table][0][0] for f, _ in alone]

    def route(self, inputs: Mapping[str, FeatureInput]) -> Routed:
        """What to look up.

        Args:
            inputs: the features' ids, by name.
        """
        together = len(self.looked_up)
        count = together + len(self._alone)
        features = [*self._features, *(f for f, _ in self._alone)]
        tables = [self._tables[f.table] for f in features]
        data = [inputs[f.name] for f in features]
        # Rows that are not pooled are summed by nobody.
        pools = [True] * len(self._features) + [is_pooled for _, is_pooled in self._alone]
        combiners = [
            (table.combiner if is_pooled else None) or "sum"
            for table, is_pooled in zip(tables, pools, strict=True)
        ]
        shards = [
            [(self.looked_up.index(number), offset) for number, offset in self._shards[f.table]]
            for f in self._features
        ]
        for i, (feature, _) in enumerate(self._alone):
            shards.append([(together + i, self._shards[feature.table][0][1])])
        has_bags = [False] * together + [True] * len(self._alone)
        has_scales = [False] * count
        for own, combiner, places in zip(data, combiners, shards, strict=True):
            scaled = own.weights is not None or (own.length != 1 and combiner != "sum")
            for number, _ in places:
                has_bags[number] |= not own.is_single
                has_scales[number] |= scaled
        batch, rows, bags, scales, slots, sources = ops.route_ids(
            ids=[own.ids for own in data],
            splits=[own.splits for own in data if own.splits is not None],
            weights=[own.weights for own in data if own.weights is not None],
            P=count,
            features=[f.name for f in features],
            tables=[t.name for t in tables],
            table_rows=[t.rows for t in tables],
            lengths=[own.length for own in data],
            weighted=[own.weights is not None for own in data],
            combiners=combiners,
            out_of_range=[f.out_of_range for f in features],
            partitions=[partitions_of(t.rows) if t.keys else 0 for t in tables],
            shard_counts=[len(places) for places in shards],
            shard_tables=[number for places in shards for number, _ in places],
            shard_offsets=[offset for places in shards for _, offset in places],
            has_bags=has_bags,
            has_scales=has_scales,
        )
        requests = [
            Bags(
                rows[i],
                bags[i] if has_bags[i] else None,
                scales[i] if has_scales[i] else None,
                tf.size(slots[i], out_type=tf.int64) if has_bags[i] else None,
            )
            for i in range(together)
        ]
        alone = []
        for i in range(together, count):
            position = len(self._features) + i - together
            if data[position].is_single or not pools[position]:
                alone.append(Bags(rows[i]))
                continue
            # By their examples, so that examples without an id get a vector, too.
            first = tf.cast(position * batch, tf.int32)
            examples = tf.gather(slots[i], bags[i]) - first
            alone.append(Bags(rows[i], examples, scales[i] if has_scales[i] else None, batch))
        return Routed(batch, requests, slots[:together], sources[:together], alone)

    def plain(
        self, inputs: Mapping[str, FeatureInput], values: Sequence[Any]
    ) -> tuple[tf.Tensor | None, list[tf.Tensor]]:
        """The same in stock ops.

        Args:
            inputs: the features' ids, by name.
            values: the physical tables' variables.

        Returns:
            The pooled vectors of the features looked up together, [batch, sum of the
            dimensions], or None without any; the vectors of those looked up alone,
            [batch, dimension], or [ids, dimension] if they are not pooled.
        """

        def pooled(feature):
            data, table = inputs[feature.name], self._tables[feature.table]
            return pool(data, table, self._rows(feature, data, values))

        vectors = [pooled(feature) for feature in self._features]
        alone = [
            pooled(feature) if is_pooled else self._rows(feature, inputs[feature.name], values)
            for feature, is_pooled in self._alone
        ]
        return tf.concat(vectors, 1) if vectors else None, alone

    def _rows(self, feature: FeatureConfig, data: FeatureInput, values: Sequence[Any]) -> tf.Tensor:
        """The rows that a feature's ids name, in stock ops: [ids, dimension]."""
        table, shards = self._tables[feature.table], self._shards[feature.table]
        if table.keys:
            found = [(self._keyed[number], values[number]) for number, _ in shards]
            keys = tf.cast(data.ids, tf.int64)
            return tf.add_n([k.plain_rows(keys, k.entries.value, own) for k, own in found])
        ids = in_range(tf.cast(data.ids, tf.int64), feature, table)
        rows = tf.zeros([], tf.float32)
        for index, (number, offset) in enumerate(shards):
            local = offset + ids // len(shards)
            if len(shards) == 1:
                rows = tf.cast(tf.gather(values[number], local), tf.float32)
            else:
                here = ids % len(shards) == index
                own = tf.gather(values[number], tf.where(here, local, 0))
                rows += tf.where(here[:, tf.newaxis], tf.cast(own, tf.float32), 0.0)
        return rows


def in_range(ids: tf.Tensor, feature: FeatureConfig, table: TableConfig) -> tf.Tensor:
    """The rows of the table that ids name, in stock ops."""
    if feature.out_of_range == "clip":
        return tf.clip_by_value(ids, 0, table.rows - 1)
    if feature.out_of_range == "hash":
        return tf.cast(hashed(ids) % tf.constant(table.rows, tf.uint64), tf.int64)
    # The op alone: tf.debugging's make a conditional of each check, and with many features
    # most of what there is to trace.
    check = tf.raw_ops.Assert(
        condition=tf.reduce_all((ids >= 0) & (ids < table.rows)),
        data=[_out_of_range(feature, table), ids],
    )
    # Eagerly, there is none.
    with tf.control_dependencies([] if check is None else [check]):
        return tf.identity(ids)


def _out_of_range(feature: FeatureConfig, table: TableConfig) -> str:
    return (
        f"feature {feature.name} has ids out of range, table {table.name} has rows 0 to "
        f"{table.rows - 1}; out_of_range='clip' or 'hash' would accept them"
    )


def pool(data: FeatureInput, table: TableConfig, rows: tf.Tensor) -> tf.Tensor:
    """Pools looked-up rows in stock ops: [batch, dimension]."""
    if data.is_single:
        return rows
    weights = data.weights if data.weights is not None else tf.ones_like(rows[:, 0])
    if data.given is not None and data.given.length:
        # As below, which XLA can't compile.
        count = tf.size(data.given.ids) // data.given.length
        bags = tf.cast(data.kept, tf.int32) // data.given.length
    elif data.splits is not None:
        count = tf.size(data.splits) - 1
        bags = tf.ragged.row_splits_to_segment_ids(data.splits, out_type=tf.int32)
    else:
        count = tf.size(data.ids) // data.length
        bags = tf.range(tf.size(data.ids)) // data.length
    pooled = tf.math.unsorted_segment_sum(rows * weights[:, tf.newaxis], bags, count)
    if table.combiner == "sum":
        return pooled
    if table.combiner == "mean":
        divisor = tf.math.unsorted_segment_sum(weights, bags, count)
    else:
        divisor = tf.sqrt(tf.math.unsorted_segment_sum(tf.square(weights), bags, count))
    return tf.math.divide_no_nan(pooled, divisor[:, tf.newaxis])
