"""The layer that keras-rs calls DistributedEmbedding, on an `EmbeddingCollection`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tf_recsync.embedding.config import FeatureConfig, TableConfig
from tf_recsync.layers.embedding_collection import EmbeddingCollection

# What a feature and a table have in keras-rs.
_FEATURE = ("name", "table", "input_shape", "output_shape")
_TABLE = ("name", "vocabulary_size", "embedding_dim", "initializer", "combiner")


@keras.saving.register_keras_serializable(package="tf_recsync")
@dataclasses.dataclass(frozen=True)
class _Feature:
    """A feature as keras-rs describes it, with its table as this package does."""

    name: str
    table: TableConfig
    input_shape: tuple[int | None, ...]
    output_shape: tuple[int | None, ...]

    @classmethod
    def of(cls, config: Any) -> _Feature:
        """What a feature's configuration says.

        Raises:
            TypeError: if it is none.
        """
        if isinstance(config, cls):
            return config
        _check_has(config, _FEATURE, "feature_configs must hold keras_rs.layers.FeatureConfig")
        table = config.table
        if not isinstance(table, TableConfig):
            _check_has(table, _TABLE, f"the table of feature {config.name!r} must be a TableConfig")
            table = TableConfig(
                table.name,
                rows=table.vocabulary_size,
                dimension=table.embedding_dim,
                initializer=table.initializer,
                combiner=table.combiner,
            )
        return cls(config.name, table, tuple(config.input_shape), tuple(config.output_shape))

    def check(self, inputs: Any) -> None:
        """Checks the shape of the feature's ids.

        Raises:
            ValueError: if it is not the one in its configuration, whatever the batch.
        """
        shape, expected = tuple(inputs.shape), self.input_shape
        pairs = zip(shape[1:], expected[1:], strict=False)
        others = any(None not in pair and pair[0] != pair[1] for pair in pairs)
        if len(shape) != len(expected) or others:
            raise ValueError(
                f"inputs of feature {self.name!r} have shape {shape}, its input_shape is {expected}"
            )

    def get_config(self) -> dict[str, Any]:
        """The arguments, as Keras writes them."""
        config = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**config, "table": keras.saving.serialize_keras_object(self.table)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> _Feature:
        """What `get_config` described."""
        shapes = {name: tuple(config[name]) for name in ("input_shape", "output_shape")}
        table = keras.saving.deserialize_keras_object(config["table"])
        return cls(config["name"], table, **shapes)


@keras.saving.register_keras_serializable(package="tf_recsync")
class DistributedEmbedding(keras.layers.Layer):
    """Takes the place of `keras_rs.layers.DistributedEmbedding` in a model.

    It takes the same configurations, inputs and weights, nested in the same way, and returns the
    same structure. Under a strategy with parameter servers its tables are those of an
    `EmbeddingCollection`, spread over the servers; that layer can do more, and is the one for new
    models. keras-rs itself need not be installed once the configurations are made.

    As in keras-rs on machines without SparseCores, tables train with the model's optimizer: the
    `optimizer` and the `placement` of a table's configuration, and the numbers of ids for a
    partition, have no meaning here. There is no `preprocess`, which keras-rs needs with JAX.
    Ids that a table does not have are an error; XLA could raise none, so Keras does not compile a
    model that has this layer with XLA.

    Args:
        feature_configs: `keras_rs.layers.FeatureConfig`s, nested in dicts, lists and tuples;
            whatever has their attributes will do. The first element of an `input_shape`, the batch,
            may be any here.
        table_stacking: as keras-rs has it, where it says which tables form one; here, tables of
            one dimension on one server always do.
        update_stats: as keras-rs has it, for SparseCores; it has no effect here.
        placement: as of `EmbeddingCollection`, like the next three. None by default.
        memory_limit: bytes that a parameter server has for the tables. None, the default, for any.
        slots: float32 accumulators of an element, for `memory_limit`. 1 by default.
        bytes_per_row_overhead: other bytes of a row, for `memory_limit`. 8 by default.
        **kwargs: go to the Keras layer.

    Call arguments:
        inputs: ids, in the structure of `feature_configs`: integers [batch] or [batch, k], or
            tf.RaggedTensor or tf.SparseTensor [batch, any].

        weights: of the ids, in the same structure and shapes; None, the default, for none.

    Returns:
        Vectors [batch, embedding_dim], in the structure of `feature_configs`.

    Raises:
        TypeError: if `feature_configs` has something else.
        ValueError: if two tables of the same name differ, or inputs have other shapes than their
            features.

    Example:
        >>> import dataclasses
        >>> import tensorflow as tf
        >>> from tf_recsync.layers import DistributedEmbedding
        >>> @dataclasses.dataclass  # Like keras_rs.layers.TableConfig, and FeatureConfig.
        ... class Table:
        ...     name: str
        ...     vocabulary_size: int
        ...     embedding_dim: int
        ...     initializer: str = "uniform"
        ...     combiner: str = "mean"
        >>> @dataclasses.dataclass
        ... class Feature:
        ...     name: str
        ...     table: Table
        ...     input_shape: tuple
        ...     output_shape: tuple
        >>> films = Table("films", vocabulary_size=100, embedding_dim=4)
        >>> layer = DistributedEmbedding(
        ...     {
        ...         "film": Feature("film", films, (None,), (None, 4)),
        ...         "history": [Feature("watched", films, (None, 3), (None, 4))],
        ...     }
        ... )
        >>> vectors = layer(
        ...     {"film": tf.constant([7, 3]), "history": [tf.constant([[1, 2, 3], [4, 5, 6]])]}
        ... )
        >>> tuple(vectors["history"][0].shape)
        (2, 4)
    """

    def __init__(
        self,
        feature_configs: Any,
        *,
        table_stacking: str | Sequence[Any] = "auto",
        update_stats: bool = False,
        placement: Any = None,
        memory_limit: int | None = None,
        slots: int = 1,
        bytes_per_row_overhead: int = 8,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        features = keras.tree.map_structure(_Feature.of, feature_configs)
        flat = keras.tree.flatten_with_path(features)
        names = [feature.name for _, feature in flat]
        if len(set(names)) < len(names):
            names = [".".join(map(str, path)) for path, _ in flat]
        tables: dict[str, TableConfig] = {}
        for _, feature in flat:
            known = tables.setdefault(feature.table.name, feature.table)
            if known != feature.table:
                raise ValueError(
                    f"two tables are named {known.name!r}: {known} and {feature.table}; give each "
                    "a name of its own"
                )
        self._tables = tuple(tables.values())
        # Keras would turn the user's dicts and lists into ones of its own.
        self._features = _Untracked(features)
        self._names = _Untracked(keras.tree.pack_sequence_as(features, names))
        self._of_sparse_cores = {"table_stacking": table_stacking, "update_stats": update_stats}
        self._collection = EmbeddingCollection(
            self._tables,
            [
                FeatureConfig(name, table=feature.table.name)
                for name, (_, feature) in zip(names, flat, strict=True)
            ],
            placement,
            memory_limit,
            slots=slots,
            bytes_per_row_overhead=bytes_per_row_overhead,
            name=f"{self.name}_tables",
            dtype=self.dtype_policy,
        )

    @property
    def collection(self) -> EmbeddingCollection:
        """The layer that has the tables."""
        return self._collection

    def build(self, input_shape=None):
        del input_shape
        self._collection.build()
        self.built = True

    def call(self, inputs, weights=None, training=False):
        ids, weights = self._by_name(inputs, weights)
        return self._nested(self._collection(ids, weights=weights, training=training))

    def compute_output_spec(self, inputs, weights=None, training=False):
        ids, weights = self._by_name(inputs, weights)
        return self._nested(self._collection.compute_output_spec(ids, weights, training))

    def get_embedding_tables(self) -> dict[str, np.ndarray]:
        """All rows of each table, by its name: float32 [vocabulary_size, embedding_dim]."""
        return {
            t.name: self._collection.table_values(t.name) for t in self._collection.table_configs
        }

    def get_config(self):
        config = super().get_config()
        own = self._collection.get_config()
        names = ("placement", "memory_limit", "slots", "bytes_per_row_overhead", "trained_together")
        config.update({name: own[name] for name in names})
        config.update(self._of_sparse_cores)
        # With the optimizers that train the tables, of which some may have come to be equal.
        tables = {table.name: table for table in self._collection.table_configs}
        features = keras.tree.map_structure(
            lambda feature: dataclasses.replace(feature, table=tables[feature.table.name]),
            self._features.value,
        )
        config["feature_configs"] = keras.saving.serialize_keras_object(features)
        return config

    @classmethod
    def from_config(cls, config):
        config = dict(config)
        for name in ("feature_configs", "placement"):
            config[name] = keras.saving.deserialize_keras_object(config[name])
        together = config.pop("trained_together", None)  # Older models have none.
        layer = cls(**config)
        layer._collection._restored(layer._tables, together)
        return layer

    def _by_name(self, inputs: Any, weights: Any) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """The ids of each feature of the collection, and the weights of those that have some."""
        ids: dict[str, Any] = {}
        found: dict[str, Any] = {}

        def take(name: str, feature: _Feature, value: Any) -> None:
            feature.check(value)
            ids[name] = value

        def take_weights(name: str, value: Any) -> None:
            if value is not None:
                found[name] = value

        names = self._names.value
        up_to = keras.tree.map_structure_up_to
        up_to(names, take, names, self._features.value, inputs)
        if weights is not None:
            up_to(names, take_weights, names, weights)
        return ids, found or None

    def _nested(self, vectors: dict[str, Any]) -> Any:
        """Vectors by feature, in the structure of the features."""
        return keras.tree.map_structure(lambda name: vectors[name], self._names.value)


@dataclasses.dataclass(frozen=True)
class _Untracked:
    """Holds a structure as it is in an attribute of a Keras layer."""

    value: Any


def _check_has(config: Any, names: Sequence[str], what: str) -> None:
    missing = [name for name in names if not hasattr(config, name)]
    if missing:
        raise TypeError(f"{what}, not {config!r}, which has no {', '.join(missing)}")
