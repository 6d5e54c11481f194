"""Many embedding tables in one layer, looked up with one message per server."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from tensorflow.python.eager import tape

from tf_recsync import ops
from tf_recsync._checks import check_bool, list_of
from tf_recsync.embedding import feature_inputs, sequences
from tf_recsync.embedding.bin_packing import plan_placement
from tf_recsync.embedding.checkpoint import SavedRows
from tf_recsync.embedding.config import (
    FeatureConfig,
    TableConfig,
    check_configs,
    checked_memory_limit,
    keys_of,
    name_in_files,
    sharing_optimizers,
    trained_together,
    with_optimizers_of,
)
from tf_recsync.embedding.feature_inputs import Routed, Routes
from tf_recsync.embedding.given_vectors import GivenVectors, LayerVectors, given_vectors
from tf_recsync.embedding.initial_values import DrawnRows, first_values
from tf_recsync.embedding.interaction_lookups import ServerInteractions, server_of, tables_of
from tf_recsync.embedding.interactions import Interaction, result_widths
from tf_recsync.embedding.keys import (
    FoundBags,
    KeyCounts,
    KeyedRows,
    counts_of_tables,
    entries_are_sorted,
    found_here,
    key_of,
)
from tf_recsync.embedding.physical_tables import (
    PhysicalInitializer,
    PhysicalTable,
    check_memory,
    physical_tables,
    shards_of,
)
from tf_recsync.embedding.placement import PlacementPlan
from tf_recsync.embedding.table_rows import TableRows, rows_of_block, saved_array
from tf_recsync.ops.bags import Bags, PackedBags
from tf_recsync.optimizers.plain_update import in_xla_context
from tf_recsync.shown_variable import shown


@keras.saving.register_keras_serializable(package="tf_recsync")
class EmbeddingCollection(keras.layers.Layer):
    """Embedding tables, and the features that are looked up in them.

    Each feature gives every example a bag of ids; the rows that they name are
    pooled by the table's combiner. Under a strategy with parameter servers the
    tables, or their shards, are spread over the servers, which gather and pool;
    one message there and back per server and step carries all collections of a
    model. Without one the same layer runs in this process.

    A large table is split modulo the number of its shards. The pooled vectors of
    a bag whose ids lie in several shards are sums of partial sums, and so may
    differ from those of the unsplit table in the last bits; with one id per
    example they are the same.

    The layer's variables are physical tables: all shards of one dimension on one
    server. An optimizer's `clipnorm` is that of a physical table, and so depends on
    the placement; `global_clipnorm` does not. `table_values` gives single tables,
    and saving and loading go table by table, whatever the placement.

    Args:
        tables: the tables, `TableConfig`s.
        features: the features, `FeatureConfig`s. Several may share a table.
        placement: a `tf_recsync.PlacementPlan` for these tables and as
            many servers as the strategy has. Defaults to None: planned by size when
            the layer is built. A layer made of another's configuration, as in a
            saved model, has its placement where the number of servers is the
            same, and plans anew where it is not.
        memory_limit: bytes that a parameter server has for this layer's tables and
            what the optimizer keeps beside them, or None (the default) for no limit.
            Checked when the layer is built, and again when the optimizer is.
        slots: float32 accumulators that the optimizer will keep for each element, for
            `memory_limit`; `optimizer.slots` says it. Defaults to 1, as Adagrad.
        bytes_per_row_overhead: bytes that it will keep for each row besides, for
            `memory_limit`; `optimizer.bytes_per_row_overhead` says it. Defaults to
            8: a version.
        concatenate: whether to return one tensor instead of a dict. Defaults to
            False.
        interactions: `Interaction`s, functions of several features' vectors that are
            computed beside the tables. Their tables lie whole on one server. None by
            default.
        returned_features: names of the features whose vectors are returned; the others
            need an interaction. Defaults to None: those that no interaction uses.

    Call arguments:
        inputs: a dict from the features' names to their ids, int32 or int64: dense
            [batch] or [batch, k], a tf.RaggedTensor or tf.SparseTensor [batch, any],
            whose entries may come in any order. Ids equal to their feature's `padding` are
            no ids.
        weights: a dict from names of some features to float weights shaped like
            their ids, or None. Those of ragged and sparse ids belong to these one by
            one, example after example; only how many they are is compared. Weights get
            no gradient.

    Returns:
        A dict from the returned features' names to their pooled vectors, [batch,
        dimension], and from the interactions' names to their results, [batch, width];
        with `concatenate`, these side by side in this order. float32, or the layer's
        compute dtype. A feature of a table with `combiner=None` gives a vector for each
        of its ids instead: [batch, length, dimension], with zeros, and a Keras mask that
        is False, where there is no id. The length is that of dense ids, else that of the
        batch's longest example. Of ids [batch], these are [batch, dimension], without a
        mask.

    Raises:
        ValueError: if tables, features and interactions do not fit together, a feature
            is missing or unknown, a table does not fit into the memory, or the tables of
            an interaction are not whole on one server.
        tf.errors.InvalidArgumentError: if ids are out of range (unless the feature's
            `out_of_range` accepts them), or ids, row splits and weights disagree in
            size; it names feature and table.

    Reference: Zheng et al. 2020, "ShadowSync", section 3.1, for splitting and
    placing the tables, and for computing interactions beside them.

    Example:
        >>> import tf_recsync as recsync
        >>> layer = recsync.layers.EmbeddingCollection(
        ...     [recsync.layers.TableConfig("films", rows=100, dimension=4, combiner="mean")],
        ...     [
        ...         recsync.layers.FeatureConfig("film", table="films"),
        ...         recsync.layers.FeatureConfig("watched", table="films"),
        ...     ],
        ... )
        >>> vectors = layer(
        ...     {"film": tf.constant([7, 3]), "watched": tf.ragged.constant([[1, 2, 3], []])}
        ... )
        >>> {name: tuple(vector.shape) for name, vector in vectors.items()}
        {'film': (2, 4), 'watched': (2, 4)}
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        features: Sequence[FeatureConfig],
        placement: PlacementPlan | None = None,
        memory_limit: int | None = None,
        concatenate: bool = False,
        interactions: Sequence[Interaction] | None = None,
        returned_features: Sequence[str] | None = None,
        *,
        slots: int = 1,
        bytes_per_row_overhead: int = 8,
        **kwargs,
    ):
        super().__init__(**kwargs)
        tables = list_of("tables", tables, TableConfig)
        features = list_of("features", features, FeatureConfig)
        interactions = list_of(
            "interactions", () if interactions is None else interactions, Interaction
        )
        if returned_features is not None:
            returned_features = list_of("returned_features", returned_features, str)
        if placement is not None and not isinstance(placement, PlacementPlan):
            raise ValueError(f"placement must be None or a PlacementPlan, not {placement!r}")
        check_bool("concatenate", concatenate)
        check_configs(tables, features)
        tables = sharing_optimizers(tables)
        memory_limit = checked_memory_limit(memory_limit, slots, bytes_per_row_overhead)
        widths = result_widths(interactions, tables, features)
        self._interactions = tuple(zip(interactions, widths, strict=True))
        self._returned_features = returned_features
        returned = _returned(features, interactions, returned_features)
        combiners = {table.name: table.combiner for table in tables}
        self._sequences = tuple(f for f in returned if combiners[f.table] is None)
        self._returned = tuple(f for f in returned if combiners[f.table] is not None)
        if concatenate and self._sequences:
            raise ValueError(
                f"concatenate=True: the tables of the features {[f.name for f in self._sequences]} "
                "have combiner=None, and sequences have no place beside vectors; it must be False"
            )
        self._set_tables(tables)
        self._feature_configs = tuple(features)
        self._given_placement = placement
        self._placement_is_restored = False
        self._memory_limit = memory_limit
        self._row_memory = {"slots": slots, "bytes_per_row_overhead": bytes_per_row_overhead}
        self._concatenate = concatenate
        self._first_values = {table.name: first_values(table) for table in tables}
        self._has_keys = any(table.keys for table in tables)
        _check_keys(tables, self._first_values)
        # Keras compiles steps in one process with XLA if all layers allow it.
        self.supports_jit = not self._refusal_of_xla()
        self._physical: tuple = ()
        self._variables: list[keras.Variable] = []
        self._plan: PlacementPlan | None = None
        self._saved_tables: dict[str, SavedRows] = {}

    def _set_tables(self, tables: Sequence[TableConfig]) -> None:
        self._table_configs = tuple(tables)
        self._by_name = {table.name: table for table in tables}

    @property
    def placement(self) -> PlacementPlan | None:
        """Where the tables are; None before the layer is built."""
        return self._plan

    def build(self, input_shape=None):
        del input_shape
        if self.built:
            return
        strategy = tf.distribute.get_strategy()
        # Only where there are servers to put tables on.
        embedding_ps = getattr(strategy, "embedding_ps", None)
        on_servers = bool(embedding_ps)
        servers = len(embedding_ps) if on_servers else 1
        if embedding_ps == () and not strategy.copies_tables:
            raise ValueError(
                f"layer {self.name} needs an embedding PS for its tables, and the strategy has none"
            )
        if self._has_keys and embedding_ps == () and strategy.copies_tables:
            named = [table.name for table in self._table_configs if table.keys]
            raise ValueError(
                f"layer {self.name}: the tables {named} have keys='any' and must be on embedding "
                "PSs, which the cluster has not: copies of them would give rows to other keys"
            )
        plan = self._given_placement
        if plan is None or (self._placement_is_restored and plan.ps != servers):
            tables = self._table_configs
            if not on_servers:  # One process, whatever the shards.
                tables = [dataclasses.replace(table, shards=None) for table in tables]
            together = [tables_of(i, self._feature_configs) for i, _ in self._interactions]
            plan = plan_placement(
                tables,
                servers,
                memory_limit=self._memory_limit,
                together=together,
                **self._row_memory,
            )
        elif plan.ps != servers:
            raise ValueError(
                f"placement is for {plan.ps} parameter servers, the strategy has {servers}"
            )
        by_server: dict[int, list[tuple[Interaction, int]]] = {}
        for interaction, width in self._interactions:
            ps = server_of(interaction, self._feature_configs, plan)
            by_server.setdefault(ps, []).append((interaction, width))
        self._plan = plan
        self._physical = physical_tables(self._table_configs, plan)
        if self._memory_limit is not None:
            check_memory(self.name, self._physical, self._memory_limit, *self._row_memory.values())
        drawn = {n: v for n, v in self._first_values.items() if isinstance(v, DrawnRows)}
        with _made_at_once():
            seeds = {name: values.draw_seed(name) for name, values in drawn.items()}
        for physical in self._physical:
            initializer = PhysicalInitializer(physical, self._first_values, seeds)
            with _made_at_once(), _placed(physical, on_servers):
                variable = self.add_weight(
                    shape=(physical.rows, physical.dimension),
                    dtype=physical.dtype,
                    initializer=initializer,
                    name=physical.name,
                    autocast=False,
                )
            if physical.keyed:
                self._add_keys(variable, physical, seeds, on_servers)
            variable.physical_table = physical
            variable.collection = self.path
            variable.table_optimizer = self._by_name[physical.pieces[0].table].optimizer
            variable.memory_limit = self._memory_limit
            self._variables.append(variable)
        shards = shards_of(self._physical, self._variables)
        with _made_at_once():
            for name, values in self._first_values.items():
                if name not in drawn:
                    values.write(TableRows(shards[name]))
        self._beside = [ServerInteractions(i, self._feature_configs) for i in by_server.values()]
        self._routes = Routes(
            self._returned,
            self._by_name,
            self._physical,
            [use for beside in self._beside for use in beside.looked_up],
            self._keyed,
        )
        self._sequence_routes = [
            Routes([f], self._by_name, self._physical, keyed=self._keyed) for f in self._sequences
        ]
        self._saved_tables = {
            f"table_{name}": SavedRows(f"table {name!r} of layer {self.name!r}", own, "float32")
            for name, own in shards.items()
        }
        self._saved_tables |= {
            f"keys_{name}": SavedRows(f"the keys of table {name!r}", own, "int64")
            for name, own in self._key_shards().items()
        }
        for name, table in self._saved_tables.items():
            # Restores it, if a checkpoint was read before the layer was built.
            self._handle_deferred_dependencies(name=name, trackable=table)
        self.built = True

    def _add_keys(self, variable, physical: PhysicalTable, seeds, on_servers: bool) -> None:
        """Adds what finds the rows of keys of a shard, beside it."""

        def add(name: str, shape: tuple[int, ...], dtype: str) -> keras.Variable:
            with _made_at_once(), _placed(physical, on_servers):
                return self.add_weight(
                    shape=shape,
                    dtype=dtype,
                    initializer="zeros",
                    name=f"{physical.name}_{name}",
                    trainable=False,
                    autocast=False,
                )

        config, drawn = self._by_name[physical.keyed], self._first_values[physical.keyed]
        KeyedRows(config, physical, drawn, seeds[physical.keyed], add).attach(variable)

    @property
    def _keyed(self) -> list[KeyedRows | None]:
        """Of each physical table what finds the rows of keys; None where ids are rows."""
        return [getattr(variable, "keyed", None) for variable in self._variables]

    def _key_shards(self) -> dict[str, list]:
        """Where the keys of each table with keys are, as `shards_of` tells it of its rows."""
        pairs = [
            (physical, keyed.entries)
            for physical, keyed in zip(self._physical, self._keyed, strict=True)
            if keyed
        ]
        return shards_of([physical for physical, _ in pairs], [entries for _, entries in pairs])

    def key_counts(self) -> dict[str, KeyCounts]:
        """What became of the keys of each table that has `keys="any"`, by the table's name.

        Returns:
            `KeyCounts`: capacity, used, admitted, refused, evicted, expired and unknown. All but
            the first two are counted since the layer was made.

        Example:
            >>> layer = EmbeddingCollection(
            ...     [TableConfig("users", rows=100, dimension=4, keys="any")],
            ...     [FeatureConfig("user", "users")],
            ... )
            >>> vectors = layer({"user": tf.constant(["anna", "otto", "anna"])}, training=True)
            >>> layer.key_counts()["users"].used
            2
        """
        self._check_built()
        counts = counts_of_tables(self).items()
        return {name.removeprefix(f"{self.path}/"): own for name, own in counts}

    def read_keys(self, table: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Reads the keys of a table with `keys="any"`, and their vectors, in blocks.

        Args:
            table: the table's name.

        Yields:
            Some keys, int64 [n], and their vectors, float32 [n, dimension]; each key that has a
            row comes once, in no particular order. Of strings the keys are their hashes.

        Raises:
            ValueError: if there is no such table, its ids are the numbers of its rows, or the layer
                is not built.
        """
        return self._read_keys(self._keyed_shards(table))

    @staticmethod
    def _read_keys(
        shards: Sequence[tuple[KeyedRows, TableRows]],
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for keyed, rows in shards:
            told = TableRows([(keyed.entries, keyed.piece)])
            with rows.told(), told.told():
                for begin, end in rows.blocks():
                    keys, vectors = keyed.read(begin, end - begin)
                    if len(keys):
                        yield keys, vectors

    def write_keys(self, table: str, keys: Any, vectors: Any) -> int:
        """Gives vectors to keys of a table with `keys="any"`, such as those of another table.

        Keys that have no row get one, whatever the table's `admission` says. What the optimizer
        keeps beside their rows begins anew with these, and stays with others.

        Args:
            table: the table's name.
            keys: int64 or strings [n], each once.
            vectors: floats [n, dimension].

        Returns:
            How many of the keys have rows now. The others were refused, or lost their rows to keys
            that were written after them, as a table has room for no more.

        Raises:
            ValueError: if there is no such table, its ids are the numbers of its rows, keys are
                neither integers nor strings or one occurs twice, there is not a vector for each
                key, or the layer is not built.

        Example:
            >>> def layer_of(rows):
            ...     layer = EmbeddingCollection(
            ...         [TableConfig("users", rows, dimension=2, keys="any")],
            ...         [FeatureConfig("user", "users")],
            ...     )
            ...     layer.build()
            ...     return layer
            >>> old, new = layer_of(100), layer_of(200)
            >>> old.write_keys("users", ["anna", "otto"], [[1.0, 2.0], [3.0, 4.0]])
            2
            >>> for keys, vectors in old.read_keys("users"):
            ...     written = new.write_keys("users", keys, vectors)
            >>> new({"user": tf.constant(["otto"])})["user"].numpy()
            array([[3., 4.]], dtype=float32)
        """
        shards = self._keyed_shards(table)
        keys = _different_keys(keys)
        vectors = np.asarray(vectors, np.float32)
        expected = (len(keys), self._by_name[table].dimension)
        if vectors.shape != expected:
            raise ValueError(f"vectors have shape {vectors.shape}, must have {expected}")
        written = 0
        for keyed, rows in shards:
            rows.settle(are_noted=True)
            own = np.flatnonzero(keyed.owns(keys))
            block = rows_of_block(4 * expected[1])
            blocks = [own[begin : begin + block] for begin in range(0, len(own), block)]
            for some in blocks:
                keyed.write(keys[some], vectors[some])
            keyed.renew_mean()
            # Later blocks may have taken rows of keys that earlier ones wrote.
            written += sum(keyed.known(keys[some]) for some in blocks)
        return written

    def _check_built(self) -> None:
        if not self.built:
            raise ValueError(f"layer {self.name!r} is not built: call it, or build()")

    def _keyed_shards(self, table: str) -> list[tuple[KeyedRows, TableRows]]:
        """What finds the keys of each shard of a table, and the shard's rows by themselves."""
        self._check_built()
        found = [
            (keyed, TableRows([(variable, keyed.piece)]))
            for variable, keyed in zip(self._variables, self._keyed, strict=True)
            if keyed is not None and keyed.table == table
        ]
        if not found:
            keyed_tables = [own.name for own in self._table_configs if own.keys]
            raise ValueError(f"table {table!r} is not among those with keys='any', {keyed_tables}")
        return found

    def _trackable_children(self, save_type="checkpoint", **kwargs):
        children = super()._trackable_children(save_type, **kwargs)
        if save_type == "savedmodel":
            # Exported models keep the variables that their functions use.
            children.pop("_saved_tables", None)
            return children
        return {**children, **self._saved_tables}

    def call(self, inputs, weights=None, training=False):
        read = feature_inputs.read(self._feature_configs, self._by_name, inputs, weights)
        features = {f.name: own for f, own in zip(self._feature_configs, read, strict=True)}
        given = given_vectors()
        if given is not None:
            if self._has_keys:
                raise ValueError(
                    f"layer {self.name}: tables with keys='any' can't be apart from the model"
                )
            return self._of_given(features, given)
        values = [variable.value for variable in self._variables]
        # In a worker's step a stand-in is there for the table on its server.
        pulled = all(hasattr(value, "look_up") for value in values)
        # Stock ops alone: an exported model serves without this package.
        plain = not pulled and (in_xla_context() or not training)
        if plain and in_xla_context() and (refusal := self._refusal_of_xla()):
            raise ValueError(f"layer {self.name}: {refusal}")
        if self._has_keys and not pulled:
            plain = entries_are_sorted()
        ways = [(self._routes, features)] if self._returned or self._beside else []
        ways += [
            (routes, {f.name: sequences.singles(features[f.name])})
            for f, routes in zip(self._sequences, self._sequence_routes, strict=True)
        ]
        routed = [None if plain else routes.route(ids) for routes, ids in ways]
        if self._has_keys and not (pulled or plain):
            routed = self._with_rows([routes for routes, _ in ways], routed, values, bool(training))
        together = len(ways) - len(self._sequences)
        parts = self._parts(features, values, routed[0], pulled) if together else []
        found = self._side_by_side(features, parts)
        if self._concatenate:
            return found
        for feature, (routes, ids), own in zip(
            self._sequences, ways[together:], routed[together:], strict=True
        ):
            if plain:
                vectors, _ = routes.plain(ids, values)
            else:
                vectors = _assembled(routes, own, values, pulled)
            vectors = sequences.arrange(vectors, features[feature.name])
            found[feature.name] = tf.cast(vectors, self.compute_dtype)
        return {name: found[name] for name, _ in self._outputs()}

    def _refusal_of_xla(self) -> str:
        """Why XLA may not compile lookups; "" if it may."""
        if self._has_keys:
            return (
                "it has a table with keys='any', which XLA can't compile: compile the model with "
                "jit_compile=False"
            )
        # XLA leaves checks out, and such ids would name rows of other tables.
        unchecked = [f.name for f in self._feature_configs if f.out_of_range == "error"]
        if unchecked:
            return (
                f"the features {unchecked} have out_of_range='error', and XLA raises no errors: "
                "it must be 'clip' or 'hash', or compile the model with jit_compile=False"
            )
        return ""

    def _with_rows(
        self, routes: list[Routes], routed: list[Routed], values: Sequence[Any], inserts: bool
    ) -> list[Routed]:
        """What is looked up in this process, with the rows of keys in the place of these."""
        numbers = [n for way in routes for n in (*way.looked_up, *way.tables_alone)]
        bags = [own for way in routed for own in (*way.bags, *way.alone)]
        for number, keyed in enumerate(self._keyed):
            places = [place for place, n in enumerate(numbers) if n == number]
            if keyed is None or not places:
                continue
            found = found_here(values[number], keyed, [bags[place] for place in places], inserts)
            for place, own in zip(places, found, strict=True):
                bags[place] = own
        rest = iter(bags)
        return [
            dataclasses.replace(
                way, bags=[next(rest) for _ in way.bags], alone=[next(rest) for _ in way.alone]
            )
            for way in routed
        ]

    def _of_given(self, features, given: GivenVectors):
        """What the layer returns, of vectors that were looked up elsewhere."""
        dimensions = {f.name: self._by_name[f.table].dimension for f in self._feature_configs}
        vectors = LayerVectors(given, self, dimensions, features)
        parts = [vectors.pooled(feature) for feature in self._returned]
        parts += [vectors.interactions(beside) for beside in self._beside]
        found = self._side_by_side(features, parts)
        if self._concatenate:
            return found
        for feature in self._sequences:
            found[feature.name] = tf.cast(vectors.sequence(feature), self.compute_dtype)
        return {name: found[name] for name, _ in self._outputs()}

    def compute_mask(self, inputs, previous_mask=None):
        """Masks of the sequences, where they are shorter than others or have padding."""
        del previous_mask
        if not self._sequences:
            return None
        masks = {f.name: sequences.SequenceMask(f)(inputs[f.name]) for f in self._sequences}
        return {name: masks.get(name) for name, _ in self._outputs()}

    def _parts(self, features, values, routed, pulled: bool) -> list[tf.Tensor]:
        """Pooled vectors of the returned features, and results of each server's interactions."""
        if routed is not None:
            return self._looked_up(features, routed, values, pulled)
        vectors, alone = self._routes.plain(features, values)
        parts = [] if vectors is None else [vectors]
        for beside in self._beside:
            own, alone = alone[: len(beside.looked_up)], alone[len(beside.looked_up) :]
            parts.append(beside.compute(features, own))
        return parts

    def _side_by_side(self, features, parts: list[tf.Tensor]):
        """Pooled vectors and results: by name, or with `concatenate` side by side."""
        if not parts:
            return {}
        batch = next(iter(features.values())).batch
        parts = [tf.ensure_shape(part, [batch, part.shape[1]]) for part in parts]
        vectors = tf.cast(tf.concat(parts, 1), self.compute_dtype)
        columns = [(f.name, self._by_name[f.table].dimension) for f in self._returned]
        columns += [(n, w) for b in self._beside for n, w in zip(b.names, b.widths, strict=True)]
        outputs = self._outputs()
        if self._concatenate and columns == outputs:
            return vectors
        # Interactions come server by server.
        parts = tf.split(vectors, [width for _, width in columns], axis=1)
        found = {name: part for (name, _), part in zip(columns, parts, strict=True)}
        return tf.concat([found[name] for name, _ in outputs], 1) if self._concatenate else found

    def _looked_up(self, features, routed, values, pulled: bool) -> list[tf.Tensor]:
        """The returned features' vectors, and each server's interactions."""
        parts = []
        if self._returned:
            parts.append(_assembled(self._routes, routed, values, pulled))
        first = 0
        for beside in self._beside:
            own = slice(first, first + len(beside.looked_up))
            first = own.stop
            tables, bags = self._routes.tables_alone[own], routed.alone[own]
            if pulled:
                request = beside.request(features, bags, routed.batch)
                parts.append(values[tables[0]].look_up([values[i] for i in tables], request))
            else:
                vectors = look_up([values[i] for i in tables], bags)
                parts.append(beside.compute(features, vectors))
        return parts

    def _outputs(self) -> list[tuple[str, int]]:
        """The name and the width of each output, in their order."""
        own = {f.name for f in (*self._returned, *self._sequences)}
        outputs = [
            (f.name, self._by_name[f.table].dimension)
            for f in self._feature_configs
            if f.name in own
        ]
        return outputs + [(interaction.name, width) for interaction, width in self._interactions]

    def save_own_variables(self, store):
        """Saves the tables by their names, so that they can be loaded on other servers."""
        for name, rows in self._saved_rows().items():
            rows.save(store, name_in_files(name))

    def load_own_variables(self, store):
        tables = self._saved_rows()

        def found_as(name: str) -> str | None:
            # Files of development versions may have a slash.
            return next((own for own in (name_in_files(name), name) if own in store), None)

        saved = {n: saved_array(store, own) for n in tables if (own := found_as(n)) is not None}
        for name, table in self._by_name.items():
            if (found_as(keys_of(name)) is not None) != bool(table.keys):
                there, here = ("none", "keys='any'") if table.keys else ("keys='any'", "none")
                raise ValueError(
                    f"table {name!r} of layer {self.name!r}: the saved one has {there}, this one "
                    f"{here}; write_keys gives vectors to keys"
                )
        for name, rows in tables.items():
            found = tuple(saved[name].shape) if name in saved else None
            if found != rows.shape:
                raise ValueError(
                    f"table {name!r} of layer {self.name!r} has shape {rows.shape}, "
                    f"the saved one has {found}"
                )
        for name, rows in tables.items():
            rows.load(saved[name])

    def _saved_rows(self) -> dict[str, TableRows]:
        """What is saved, by name: the rows of tables, and their keys."""
        keys = {keys_of(name): TableRows(own) for name, own in self._key_shards().items()}
        return {**self.table_rows("float32"), **keys}

    def table_rows(self, dtype: str | None = None) -> dict[str, TableRows]:
        """The rows of each table, by its name.

        Args:
            dtype: in which rows are read; None (the default) for that of the table.
        """
        shards = shards_of(self._physical, self._variables)
        return {name: TableRows(own, dtype) for name, own in shards.items()}

    @property
    def table_configs(self) -> tuple[TableConfig, ...]:
        """The tables, as they were given."""
        return self._table_configs

    @property
    def feature_configs(self) -> tuple[FeatureConfig, ...]:
        """The features, as they were given."""
        return self._feature_configs

    def table_values(self, table: str) -> np.ndarray:
        """All rows of one table, wherever they are.

        Args:
            table: the table's name.

        Returns:
            float32 [rows, dimension].

        Raises:
            ValueError: if there is no such table, or the layer is not built.
        """
        self._check_built()
        if table not in self._by_name:
            raise ValueError(f"table {table!r} is not among {list(self._by_name)}")
        return self.table_rows("float32")[table].read()

    def compute_output_spec(self, inputs, weights=None, training=False):
        del training
        feature_inputs.check_symbolic(self._feature_configs, self._by_name, inputs, weights)
        batch = _batch_of(inputs)
        outputs = self._outputs()
        if self._concatenate:
            width = sum(width for _, width in outputs)
            return keras.KerasTensor((batch, width), dtype=self.compute_dtype)
        own = {f.name for f in self._sequences}
        shapes = {
            name: sequences.shape_of(inputs[name], width) if name in own else (batch, width)
            for name, width in outputs
        }
        return {
            name: keras.KerasTensor(shape, dtype=self.compute_dtype)
            for name, shape in shapes.items()
        }

    def get_config(self):
        config = super().get_config()
        config.update(
            tables=[keras.saving.serialize_keras_object(t) for t in self._table_configs],
            trained_together=trained_together(self._table_configs),
            features=[keras.saving.serialize_keras_object(f) for f in self._feature_configs],
            placement=self._given_placement
            and keras.saving.serialize_keras_object(self._given_placement),
            memory_limit=self._memory_limit,
            concatenate=self._concatenate,
            interactions=[keras.saving.serialize_keras_object(i) for i, _ in self._interactions],
            returned_features=self._returned_features and list(self._returned_features),
            **self._row_memory,
        )
        return config

    @classmethod
    def from_config(cls, config):
        config = dict(config)
        for name in ("tables", "features", "interactions"):
            own = config.get(name, [])  # Older models have no interactions.
            config[name] = [keras.saving.deserialize_keras_object(c) for c in own]
        if isinstance(config.get("placement"), dict):
            config["placement"] = keras.saving.deserialize_keras_object(config["placement"])
        together = config.pop("trained_together", None)  # Older models have none.
        layer = cls(**config)
        layer._restored(config["tables"], together)
        return layer

    def _restored(
        self, tables: Sequence[TableConfig], together: Sequence[Sequence[str]] | None
    ) -> None:
        """Says that the layer is made of a saved one: it may be placed on other servers.

        Args:
            tables: its tables, each with an optimizer of its own.
            together: the names of those that one optimizer trains; None: those whose are equal.
        """
        if together is not None:
            self._set_tables(with_optimizers_of(tables, together))
        self._placement_is_restored = True


def _placed(physical: PhysicalTable, on_servers: bool) -> contextlib.AbstractContextManager:
    """Inside, variables are made where a physical table lies."""
    if on_servers:
        return tf.distribute.get_strategy().placed_on(physical.ps)
    # Only processors have the ops that find the rows of keys.
    return tf.device("/CPU:0") if physical.keyed else contextlib.nullcontext()


@contextlib.contextmanager
def _made_at_once() -> Iterator[None]:
    """Inside, variables are made and written at once.

    Keras builds a model that it has no graph of in a scope without state, and would make them
    when this context is left: in any scope then, and without what is written to them afterwards.
    """
    name = "stateless_scope"
    outer = global_state.get_global_attribute(name)
    with tf.init_scope():
        global_state.set_global_attribute(name, None)
        try:
            yield
        finally:
            global_state.set_global_attribute(name, outer)


def _assembled(routes, routed, values, pulled: bool) -> tf.Tensor:
    """The vectors of features that are looked up together, side by side."""
    tables = [values[i] for i in routes.looked_up]
    if pulled:
        pooled = [v.lookup_bags(b) for v, b in zip(tables, routed.bags, strict=True)]
    else:
        pooled = look_up(tables, routed.bags)
    vectors = ops.assemble(
        routed.batch, pooled, routed.slots, routed.sources, dimensions=routes.dimensions
    )
    return tf.ensure_shape(vectors, [None, sum(routes.dimensions)])


def look_up(tables: Sequence[Any], bags: Sequence[Bags | FoundBags]) -> list[tf.Tensor]:
    """Looks up bags in tables of this process: float32 [bags, dimension] for each.

    Args:
        tables: variables, or what stands for them.
        bags: what to look up in each of them.
    """
    found = [own if isinstance(own, FoundBags) else FoundBags(own) for own in bags]
    pooled = _pooled(tables, [own for own, _ in found])
    fixed = {number: own for number, (_, own) in enumerate(found) if own is not None}
    if fixed:
        vectors = _pooled([tables[number] for number in fixed], list(fixed.values()))
        for number, own in zip(fixed, vectors, strict=True):
            pooled[number] += tf.stop_gradient(own)
    return pooled


def _pooled(tables: Sequence[Any], bags: Sequence[Bags]) -> list[tf.Tensor]:
    """The sums of rows of tables, by bags of rows."""
    if not all(isinstance(t, tf.Variable) and "GPU" not in t.device for t in tables):
        # What stands for a variable in Keras's stateless calls, or where the op has no kernel.
        return [
            b.pool(tf.cast(tf.gather(t, b.ids), tf.float32))
            for t, b in zip(tables, bags, strict=True)
        ]
    for table in tables:
        tape.variable_accessed(table)  # The op reads it by its handle.
        if shown(table) is not None and tf.executing_eagerly():
            table.tell()
    packed = PackedBags.pack(list(bags))
    vectors, _ = ops.gather_rows(
        [table.handle for table in tables], [], packed.ids, packed.counts, **packed.inputs()
    )
    widths = [table.shape[1] for table in tables]
    pooled = tf.split(vectors, packed.sizes * tf.constant(widths, tf.int64), num=len(tables))
    return [tf.reshape(v, [-1, width]) for v, width in zip(pooled, widths, strict=True)]


def _different_keys(given: Any) -> np.ndarray:
    """Keys that are given, as int64; a ValueError if they can't be keys, or one occurs twice."""
    ids = tf.reshape(tf.convert_to_tensor(given), [-1])
    if not (ids.dtype.is_integer or ids.dtype == tf.string) and len(ids):
        raise ValueError(f"keys must be int64 or strings, not {ids.dtype.name}: {given!r}")
    keys = np.asarray(key_of(ids))
    _, first, times = np.unique(keys, return_index=True, return_counts=True)
    if len(first) < len(keys):
        place = first[times.argmax()]
        key = np.asarray(ids[place]).item()
        raise ValueError(f"keys must be different, but {key!r} occurs {times.max()} times")
    return keys


def _check_keys(tables: Sequence[TableConfig], values: Mapping[str, Any]) -> None:
    """Raises ValueError if the rows of a table with keys have values that nobody can draw."""
    for table in tables:
        if table.keys and not isinstance(values[table.name], DrawnRows):
            raise ValueError(
                f"table {table.name!r}: initializer must be one of Keras's that draws values with "
                "keys='any', as the row of a key is not known before, not "
                f"{type(table.initializer).__name__}"
            )


def _returned(
    features: Sequence[FeatureConfig],
    interactions: Sequence[Interaction],
    names: Sequence[str] | None,
) -> tuple[FeatureConfig, ...]:
    """The features whose vectors are returned."""
    used = {name for interaction in interactions for name in interaction.features}
    if names is None:
        return tuple(feature for feature in features if feature.name not in used)
    known = [feature.name for feature in features]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"returned_features has unknown features {unknown}; there are {known}")
    unused = [name for name in known if name not in used and name not in names]
    if unused:
        raise ValueError(
            f"returned_features={list(names)}: the features {unused} are neither returned nor used "
            "by an interaction; remove them or return them"
        )
    return tuple(feature for feature in features if feature.name in names)


def _batch_of(inputs: Mapping[str, Any]) -> int | None:
    return next(iter(inputs.values())).shape[0]
