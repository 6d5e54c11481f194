"""Tables whose ids are keys: what lies beside one, and how its rows are found."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tf_recsync import ops
from tf_recsync.cluster import fetch
from tf_recsync.embedding.config import TableConfig
from tf_recsync.embedding.initial_values import DrawnRows
from tf_recsync.embedding.key_rules import Admission, Eviction, partitions_of
from tf_recsync.embedding.physical_tables import PhysicalTable
from tf_recsync.ops.bags import Bags
from tf_recsync.shown_variable import assign_rows, guarded, read_rows, read_untold, shown

_COUNTS = ("calls", "admitted", "refused", "evicted", "expired", "unknown")
_KEY_COUNTS = 8  # Of cc/engine/key_table.h.
_USES_BITS = 24  # The same.
_LIFE_BITS = 40  # Of cc/engine/row_lives.h.
_LEAST_PASSED = 16  # Rows of a pass for the mean, in a lookup.
_ADMITS_ALL = {"min_count": 1, "probability": 1.0}

_are_sorted: contextvars.ContextVar[bool] = contextvars.ContextVar("are_sorted", default=False)


@contextlib.contextmanager
def sorted_entries() -> Iterator[None]:
    """Inside, functions are traced for variables in which rows are in the order of their keys."""
    token = _are_sorted.set(True)
    try:
        yield
    finally:
        _are_sorted.reset(token)


def entries_are_sorted() -> bool:
    """Whether functions are traced for such variables."""
    return _are_sorted.get()


def key_of(ids: tf.Tensor) -> tf.Tensor:
    """The keys that ids are: int64, of strings their 64-bit hash."""
    if ids.dtype != tf.string:
        return tf.cast(ids, tf.int64)
    hashes = tf.bitcast(tf.fingerprint(tf.reshape(ids, [-1]), "farmhash64"), tf.int64)
    return tf.reshape(hashes, tf.shape(ids))


@dataclasses.dataclass(frozen=True)
class KeyCounts:
    """What became of the keys of a table.

    Attributes:
        capacity: for how many keys there is room.
        used: how many keys have rows, those included that were not looked up for too long.
        admitted: how often a key was given a row.
        refused: lookups in training of keys that have no row and were not given one.
        evicted: how many keys lost their rows to others.
        expired: how many keys had not been looked up for too long when they came again.
        unknown: lookups in evaluation and prediction of keys that have no row.

    A lookup is one key of one batch: where every example has one id of a feature, a key counts once
    in a batch, however many examples have it. All but `capacity` and `used` are counted since the
    table was made or, on a server that was lost, since it came back; they are not saved.

    Example:
        >>> from tf_recsync.layers import EmbeddingCollection, FeatureConfig, TableConfig
        >>> layer = EmbeddingCollection(
        ...     [TableConfig("users", rows=3, dimension=4, keys="any")],
        ...     [FeatureConfig("user", "users")],
        ... )
        >>> for user in ("anna", "otto", "mia"):
        ...     vectors = layer({"user": tf.constant([user])}, training=True)
        >>> counts = layer.key_counts()["users"]
        >>> counts.capacity, counts.used, counts.admitted, counts.evicted
        (2, 2, 3, 1)
    """

    capacity: int
    used: int
    admitted: int
    refused: int
    evicted: int
    expired: int
    unknown: int

    def __add__(self, other: KeyCounts) -> KeyCounts:
        mine, others = dataclasses.astuple(self), dataclasses.astuple(other)
        return KeyCounts(*(a + b for a, b in zip(mine, others, strict=True)))


class KeyedRows:
    """The keys of the rows of a shard, and what finds a key's row.

    It lies beside the shard, on the same server.

    Args:
        config: the table.
        physical: the shard.
        drawn: the first values of rows.
        seed: of these.
        add: `add(name, shape, dtype)` makes a variable of zeros beside the shard.

    Attributes:
        entries: int64 [rows, 2], the key of each row, and its usage.
        piece: all rows of the shard's variable, as `TableRows` takes them to be read there.
        state: what the optimizer keeps beside the shard (`VariableState`), or None.
    """

    def __init__(
        self, config: TableConfig, physical: PhysicalTable, drawn: DrawnRows, seed: int, add: Any
    ):
        (piece,) = physical.pieces
        self.piece = dataclasses.replace(piece, index=0, count=1)
        self._piece = piece
        self._config = config
        admission, eviction = config.admission or Admission(), config.eviction or Eviction()
        self._eviction = eviction
        self._place = {
            "partitions": partitions_of(config.rows),
            "shard": piece.index,
            "shards": piece.count,
            "min_count": admission.min_count,
        }
        self._rules = {
            "eviction": eviction.policy,
            "half_life": eviction.ticks("half_life"),
            "max_idle": eviction.ticks("max_idle"),
            "keeps_time": eviction.keeps_time,
            "probability": admission.probability,
            "trains_unknown": config.unknown == "trained",
            "distribution": drawn.distribution,
            "parameters": list(drawn.parameters),
            "seed": seed,
        }
        with tf.init_scope(), tf.device("/CPU:0"):
            sizes = ops.key_sizes(rows=piece.rows, **self._place)
        index, sketch = (int(size) for size in sizes)
        self.entries = add("keys", (piece.rows, 2), "int64")
        self._index = add("key_index", (index,), "int32")
        self._counts = add("key_counts", (_KEY_COUNTS,), "int64")
        self._sketches = [add("key_sketch", (sketch,), "int8")] if sketch else []
        # A row that is next, how many were added up, and their sums (cc/engine/key_mean.h).
        passed = (2 + physical.dimension,)
        self._means = [add("key_mean", passed, "float64")] if config.unknown == "mean" else []
        self._table: keras.Variable | None = None
        self.state: Any = None
        # The states with which rows were given to keys, one after the other: what other optimizers
        # keep beside these rows is not that of their keys any more.
        self._gave: list[weakref.ref] = []

    def attach(self, table: keras.Variable) -> None:
        """Lies beside a variable from now on, as `table.keyed`."""
        self._table = table
        table.keyed = self
        for variable in self.variables:
            variable.beside_table = table
        self.entries.rows_changed = self.forget_index

    def train_with(self, state: Any) -> None:
        """What an optimizer keeps beside the rows begins anew with a row's next key from now on.

        Args:
            state: the optimizer's state of the table.

        Raises:
            ValueError: if rows may have been given to other keys since this one trained the table.
        """
        if any(state is found() for found in self._gave[:-1]):
            raise ValueError(
                f"table {self.table!r} has keys='any', and another model's optimizer has trained "
                "it since this model's did, or keys were written to it with that one, so that this "
                "one does not know to which keys rows were given since: compile this model again, "
                "so that its optimizer begins anew, or train both as one model"
            )
        self.state = state
        self._note_giving()

    def _note_giving(self) -> None:
        """Rows may be given to keys from now on, of which the present state knows alone."""
        if not self._gave or self._gave[-1]() is not self.state:
            self._gave.append(weakref.ref(self.state))

    @property
    def variables(self) -> list[keras.Variable]:
        """All that lies beside the table for this."""
        return [self.entries, self._index, self._counts, *self._sketches, *self._means]

    @property
    def table(self) -> str:
        """The name of the table."""
        return self._config.name

    @property
    def reserved(self) -> int:
        """The number of rows that stand for keys without one: the first ones."""
        return self._place["partitions"] // self._place["shards"]

    def find(
        self,
        keys: tf.Tensor,
        inserts: bool,
        expected: tf.Tensor | None = None,
        admits_all: bool = False,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """The rows of keys; call it in the scope of the shard's device.

        Args:
            keys: int64 [n].
            inserts: whether keys that have no row may be given one, and lookups count.
            expected: int64 [n], versions of the rows that the keys had; None: any will do.
            admits_all: whether keys get rows whatever the table's admission says.

        Returns:
            The rows, int64 [n], and their versions, which a push has to come with.
        """
        # Whoever only looks up needs no more than a model that is exported has.
        state = self.state if inserts or expected is not None else None
        means = self._means if inserts and not admits_all else []
        return self._find(keys, inserts, expected, admits_all, state, means)

    def _find(
        self,
        keys: Any,
        inserts: bool,
        expected: tf.Tensor | None,
        admits_all: bool,
        state: Any,
        means: list[keras.Variable],
        mean_rows: int = _LEAST_PASSED,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        besides = [] if state is None else state.fresh
        return ops.find_rows(
            table=self._table._value.handle,
            entries=self.entries._value.handle,
            index=self._index._value.handle,
            counts=self._counts._value.handle,
            sketches=[] if admits_all else [v._value.handle for v in self._sketches],
            versions=[] if state is None else [state.versions._value.handle],
            beside=[variable._value.handle for variable, _ in besides],
            log_decays=[] if state is None else [v._value.handle for v in state.log_decays],
            means=[variable._value.handle for variable in means],
            keys=keys,
            expected=np.zeros([0], np.int64) if expected is None else expected,
            inserts=inserts,
            beside_values=[value for _, value in besides],
            mean_rows=mean_rows,
            **{**self._place, **self._rules, **(_ADMITS_ALL if admits_all else {})},
        )

    def read(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The keys of those of some rows that have one, and their vectors."""
        entries = read_rows(self.entries._value, first, count)
        vectors = read_rows(self._table._value, first, count)
        has_key = entries[:, 1] != 0
        return entries[has_key, 0], vectors[has_key].astype(np.float32)

    def write(self, keys: np.ndarray, vectors: np.ndarray) -> None:
        """Gives vectors to those keys of this shard that have or get a row, admitted or not."""
        table = self._table._value
        with guarded(table), tf.device(table.device):
            rows, _ = self.find(keys, inserts=True, admits_all=True)
            known = tf.reshape(tf.where(rows >= self.reserved), [-1])
            rows = tf.gather(rows, known)
            tf.raw_ops.ResourceScatterUpdate(
                resource=table.handle,
                indices=rows,
                updates=tf.cast(tf.gather(vectors, known), table.dtype),
            )
            if self.state is not None:
                self._note_giving()
                # By its version a row is known to have changed.
                tf.raw_ops.ResourceScatterAdd(
                    resource=self.state.versions._value.handle,
                    indices=rows,
                    updates=tf.ones_like(rows),
                )

    def known(self, keys: np.ndarray) -> int:
        """How many of some keys of this shard have a row; nobody's lookup, and so not counted."""
        table = self._table._value
        with guarded(table), tf.device(table.device):
            # What is found again is not counted; without versions any will do.
            rows, _ = self._find(keys, False, np.zeros_like(keys), False, None, [])
            return int(fetch(tf.math.count_nonzero(rows >= self.reserved)))

    def renew_mean(self) -> None:
        """Computes anew what keys without a row are looked up as, if it is the mean of the rows."""
        if not self._means:
            return
        self._forget_pass()
        table = self._table._value
        none = np.zeros([0], np.int64)
        with guarded(table), tf.device(table.device):
            found = self._find(none, False, None, True, self.state, self._means, self._piece.rows)
            fetch(found[0])  # Waits for it.

    def owns(self, keys: np.ndarray) -> np.ndarray:
        """Which keys, int64 [n], belong to this shard."""
        with tf.init_scope(), tf.device("/CPU:0"):
            partitions = hashed(keys) % tf.constant(self._place["partitions"], tf.uint64)
            return (
                np.asarray(tf.cast(partitions, tf.int64)) % self._piece.count == self._piece.index
            )

    def forget_index(self) -> None:
        """The entries were set: the next lookup makes the index anew, and begins a pass.

        Until then, there is no time but that of the entries.
        """
        self._forget_pass()
        assign_rows(self._counts._value, 0, np.zeros([1], np.int64))
        _clear(self._index)

    def _forget_pass(self) -> None:
        for mean in self._means:
            _clear(mean)

    def counts(self) -> KeyCounts:
        """What became of this shard's keys; nothing large comes from its server."""
        value = self._counts._value
        with guarded(value):
            with tf.device(value.device):
                used = ops.used_rows(self.entries._value.handle)
            used = int(fetch(used))
        counts = dict(zip(_COUNTS, map(int, read_untold(value)), strict=False))
        del counts["calls"]
        return KeyCounts(self._piece.rows - self.reserved, used, **counts)

    def plain_rows(self, keys: tf.Tensor, entries: Any, values: Any) -> tf.Tensor:
        """The rows of keys of this shard in stock ops, zeros for others: [n, dimension].

        Unless keys without a row are zeros, too, they have the row that stands for them in the
        shard of their partition.

        Args:
            keys: int64 [n].
            entries: the entries as `in_order` puts them.
            values: the shard's values, in the same order.
        """
        own = tf.convert_to_tensor(entries)[self.reserved :]
        places = tf.minimum(tf.searchsorted(own[:, 0], keys), tf.shape(own)[0] - 1)
        found = tf.gather(own, places)
        is_there = (found[:, 0] == keys) & (found[:, 1] != 0)
        places += self.reserved
        if self.unknown != "zeros":
            partition = tf.cast(
                hashed(keys) % tf.constant(self._place["partitions"], tf.uint64), tf.int32
            )
            shards = self._place["shards"]
            places = tf.where(is_there, places, partition // shards)
            is_there |= partition % shards == self._place["shard"]
        rows = tf.cast(tf.gather(values, tf.where(is_there, places, 0)), tf.float32)
        return tf.where(is_there[:, tf.newaxis], rows, 0.0)

    def in_order(self) -> tuple[np.ndarray, np.ndarray]:
        """The entries as `plain_rows` takes them, and the rows of the shard in this order.

        Rows that stand for keys without one come first, then the others by their keys, and those
        that have no key last. Keys that were not looked up for too long have none.
        """
        now = max(int(read_untold(self._counts._value)[0]), self._eviction.now())
        entries = np.array(fetch(self.entries._value.read_value()))
        own = entries[self.reserved :]
        ticks = own[:, 1].view(np.uint64) >> np.uint64(_USES_BITS)
        if self._rules["max_idle"]:
            # The entries may have been read from a file since the last lookup.
            idle = np.maximum(np.uint64(now), ticks.max()) - ticks
            own[idle > self._rules["max_idle"], 1] = 0
        is_free = own[:, 1] == 0
        own[is_free, 0] = np.iinfo(np.int64).max
        order = np.lexsort((is_free, own[:, 0])) + self.reserved
        order = np.concatenate([np.arange(self.reserved), order])
        return entries[order], order

    @property
    def unknown(self) -> str:
        """What keys without a row are looked up as, as `TableConfig` says it."""
        return self._config.unknown


class FoundBags(NamedTuple):
    """Bags of rows that were found for bags of keys.

    Attributes:
        bags: the bags.
        fixed: bags whose vectors are to be added to theirs without a gradient; None where there are
            none.
    """

    bags: Bags
    fixed: Bags | None = None


def found_here(
    value: Any, keyed: KeyedRows, bags: Sequence[Bags], inserts: bool
) -> list[FoundBags]:
    """The rows of all keys that a layer looks up in a shard in this process.

    They are found at once, so that none gets the row of another one.

    Args:
        value: the shard's variable.
        keyed: what finds its rows.
        bags: bags of keys.
        inserts: whether keys that have no row may be given one.
    """
    if not isinstance(value, tf.Variable):
        raise ValueError(
            "a table with keys='any' can't be looked up in Keras's stateless calls, which give it "
            "no variable"
        )
    if (own := shown(value)) is not None:
        own.tell()  # Or training may give rows to other keys before they are read.
    rows, _ = keyed.find(tf.concat([own.ids for own in bags], 0), inserts)
    parts = tf.split(rows, [tf.size(own.ids) for own in bags])
    return [_found(keyed, own, part) for own, part in zip(bags, parts, strict=True)]


def _found(keyed: KeyedRows, bags: Bags, rows: tf.Tensor) -> FoundBags:
    """Bags of the rows that were found for the keys of some bags."""
    bags = bags._replace(ids=rows)
    if keyed.unknown == "trained":
        return FoundBags(bags)
    # Else an optimizer would train the row that stands for keys without one.
    bags, is_known = bags.explicit(), rows >= keyed.reserved
    if keyed.unknown == "mean":
        # Not by scales of 0: some rules also change a row whose gradient is 0.
        return FoundBags(bags.where(is_known), bags.where(~is_known))
    factor = tf.cast(is_known, tf.float32)
    scales = factor if bags.scales is None else bags.scales * factor
    return FoundBags(bags._replace(scales=scales))


def _clear(variable: keras.Variable) -> None:
    """Sets a variable to zeros where it lies: it may be as large as the keys."""
    value = variable._value
    with guarded(value), tf.device(value.device):
        value.assign(tf.zeros(value.shape, value.dtype))


def hashed(keys: tf.Tensor) -> tf.Tensor:
    """MurmurHash3's finalizer of int64 numbers, as the ops have it: uint64."""
    x = tf.bitcast(keys, tf.uint64)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        x = (x ^ tf.bitwise.right_shift(x, tf.constant(33, tf.uint64))) * tf.constant(
            factor, tf.uint64
        )
    return x ^ tf.bitwise.right_shift(x, tf.constant(33, tf.uint64))


def counts_of_tables(model: keras.Model) -> dict[str, KeyCounts]:
    """What became of the keys of a model's tables, by the names of the layer and the table."""
    counts: dict[str, KeyCounts] = {}
    for variable in model.variables:
        keyed = getattr(variable, "keyed", None)
        if keyed is not None:
            name, own = f"{variable.collection}/{keyed.table}", keyed.counts()
            counts[name] = counts[name] + own if name in counts else own
    return counts


def in_same_life(gathered: tf.Tensor, found: tf.Tensor) -> tf.Tensor:
    """Versions that a push has to come with, of rows that were found and then gathered.

    Args:
        gathered: int64 [n], the rows' versions when they were read.
        found: int64 [n], as `KeyedRows.find` gave them: of another life, if the row was given to
            another key meanwhile, or may not be pushed to.
    """
    differs = tf.bitwise.right_shift(
        tf.bitwise.bitwise_xor(gathered, found), tf.constant(_LIFE_BITS, tf.int64)
    )
    return tf.where(differs == 0, gathered, found)


def has_row(versions: tf.Tensor) -> tf.Tensor:
    """Whether a gradient that comes with a version is of a row, not of a key without one.

    Args:
        versions: int64 [n], of keys that were looked up.
    """
    return tf.bitwise.right_shift(versions, tf.constant(_LIFE_BITS, tf.int64)) != 0
