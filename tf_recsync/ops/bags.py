"""Bags of row ids, and the lookup of their pooled vectors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_recsync.ops import packing


class Bags(NamedTuple):
    """Which rows of a table to look up, and how to pool them.

    Attributes:
        ids: int64 [n], rows of the table.
        bags: int32 [n], the bag of each id, not decreasing; None where every id is a
            bag of its own.
        scales: float32 [n], the weight of each row in its bag's sum; None for 1.
        count: int64 scalar, the number of bags; None where `bags` is None.
    """

    ids: tf.Tensor
    bags: tf.Tensor | None = None
    scales: tf.Tensor | None = None
    count: tf.Tensor | None = None

    @property
    def size(self) -> tf.Tensor:
        """The number of pooled vectors, an int64 scalar."""
        return tf.size(self.ids, out_type=tf.int64) if self.count is None else self.count

    def explicit(self) -> Bags:
        """The same with `bags` and `count`."""
        if self.bags is not None:
            return self
        return self._replace(bags=tf.range(tf.size(self.ids)), count=self.size)

    def where(self, chosen: tf.Tensor) -> Bags:
        """The same bags with some of their ids alone, bool [n]; `bags` must be there."""
        parts = (self.ids, self.bags, self.scales)
        ids, bags, scales = (p if p is None else tf.boolean_mask(p, chosen) for p in parts)
        return Bags(ids, bags, scales, self.count)

    def pool(self, rows: tf.Tensor) -> tf.Tensor:
        """Pools looked-up rows [n, dimension], in stock ops: [bags, dimension]."""
        if self.scales is not None:
            rows *= tf.cast(self.scales, rows.dtype)[:, tf.newaxis]
        if self.bags is None:
            return rows
        return tf.math.unsorted_segment_sum(rows, self.bags, self.count)

    def expand(self, gradient: tf.Tensor) -> tf.Tensor:
        """The gradient of each id's row [n, dimension], of that of the pooled vectors."""
        if self.bags is not None:
            gradient = tf.gather(gradient, self.bags)
        if self.scales is not None:
            narrow = tf.concat([[-1], tf.ones([tf.rank(gradient) - 1], tf.int32)], 0)
            gradient *= tf.reshape(tf.cast(self.scales, gradient.dtype), narrow)
        return gradient


class Computation(NamedTuple):
    """What becomes of vectors that are looked up together, where their tables are.

    Attributes:
        function: `function(vectors, inputs)` gives the result, float32 [count, width], of
            the pooled vectors of each lookup, [bags, dimension], and of `inputs`. It is
            made of stock ops, and closes over no tensors.
        inputs: int64 or float32 vectors.
        count: int64 scalar.
        width: of the result.
    """

    function: Callable[[list[tf.Tensor], list[tf.Tensor]], tf.Tensor]
    inputs: list[tf.Tensor]
    count: tf.Tensor
    width: int


class Request(NamedTuple):
    """What is looked up at once.

    Attributes:
        bags: one for each table.
        computation: what is wanted of their vectors; None where it is the vectors of
            the only table.
    """

    bags: list[Bags]
    computation: Computation | None = None

    @property
    def tensors(self) -> list[tf.Tensor]:
        """All tensors in it."""
        return [leaf for leaf in tf.nest.flatten(self) if isinstance(leaf, tf.Tensor)]

    def replaced(self, tensors: Iterable[tf.Tensor]) -> Request:
        """The same with other tensors, taken in the order of `tensors`."""
        new = iter(tensors)
        return tf.nest.map_structure(
            lambda leaf: next(new) if isinstance(leaf, tf.Tensor) else leaf, self
        )


def merge(parts: list[Bags]) -> Bags:
    """Bags one after the other, as one: those of `parts[1]` are numbered after `parts[0]`'s."""
    if len(parts) == 1:
        return parts[0]
    ids = tf.concat([part.ids for part in parts], 0)
    if all(part.bags is None and part.scales is None for part in parts):
        return Bags(ids)
    full = [part.explicit() for part in parts]
    first = tf.zeros([], tf.int64)
    bags = []
    for part in full:
        bags.append(part.bags + tf.cast(first, tf.int32))
        first += part.count
    return Bags(ids, tf.concat(bags, 0), _joined_scales(full), first)


def _joined_scales(parts: list[Bags]) -> tf.Tensor | None:
    """The scales of all parts, 1 where a part has none; None if no part has any."""
    if all(part.scales is None for part in parts):
        return None
    return tf.concat(
        [tf.ones_like(p.ids, tf.float32) if p.scales is None else p.scales for p in parts], 0
    )


@dataclasses.dataclass(frozen=True)
class PackedBags:
    """Bags of several tables, table after table, as the row-wise ops take them.

    Attributes:
        counts: int64 [tables], how many ids belong to each table.
        ids: int64 [n].
        bags: int32 [n], or None where every id is a bag of its own.
        scales: float32 [n], or None for 1.
        bag_counts: int64 [tables], the bags of each table; None without `bags`.
    """

    counts: tf.Tensor
    ids: tf.Tensor
    bags: tf.Tensor | None = None
    scales: tf.Tensor | None = None
    bag_counts: tf.Tensor | None = None

    @classmethod
    def pack(cls, tables: list[Bags]) -> PackedBags:
        """Packs the bags of each table."""
        if any(t.bags is not None or t.scales is not None for t in tables):
            tables = [t.explicit() for t in tables]
        counts = tf.stack([tf.size(t.ids, out_type=tf.int64) for t in tables])
        ids = tf.concat([t.ids for t in tables], 0)
        if tables[0].bags is None:
            return cls(counts, ids)
        scales = _joined_scales(tables)
        bag_counts = tf.stack([t.count for t in tables])
        return cls(counts, ids, tf.concat([t.bags for t in tables], 0), scales, bag_counts)

    @classmethod
    def join(cls, parts: Sequence[PackedBags]) -> PackedBags:
        """Several, one after the other."""
        if len(parts) == 1:
            return parts[0]
        if any(part.bags is not None for part in parts):
            parts = [part._explicit() for part in parts]

        def joined(name):
            values = [getattr(part, name) for part in parts]
            return None if values[0] is None else tf.concat(values, 0)

        return cls(*(joined(field.name) for field in dataclasses.fields(cls)))

    def _explicit(self) -> PackedBags:
        """The same with bags and scales said, where every id is a bag of its own of scale 1."""
        bags = self.bags
        if bags is None:
            # The bags of a table count from 0.
            bags = tf.cast(tf.ragged.range(self.counts).values, tf.int32)
        scales = tf.ones_like(self.ids, tf.float32) if self.scales is None else self.scales
        return PackedBags(self.counts, self.ids, bags, scales, self.sizes)

    def unpack(self, tables: int) -> list[Bags]:
        """The bags of each table."""

        def split(packed):
            return [None] * tables if packed is None else tf.split(packed, self.counts, num=tables)

        bag_counts = [None] * tables
        if self.bag_counts is not None:
            bag_counts = tf.unstack(self.bag_counts, num=tables)
        parts = (split(self.ids), split(self.bags), split(self.scales), bag_counts)
        return [Bags(*own) for own in zip(*parts, strict=True)]

    @property
    def sizes(self) -> tf.Tensor:
        """How many pooled vectors each table has, int64 [tables]."""
        return self.counts if self.bag_counts is None else self.bag_counts

    def inputs(self) -> dict[str, tf.Tensor]:
        """What the row-wise ops take besides ids and counts."""
        given = {"bags": self.bags, "scales": self.scales, "bag_counts": self.bag_counts}
        return {name: tensor for name, tensor in given.items() if tensor is not None}

    def sent(
        self,
        device: str,
        more: Sequence[tf.Tensor] = (),
        receive: Callable[[tf.Tensor], tf.Tensor] = tf.identity,
    ) -> tuple[PackedBags, list[tf.Tensor]]:
        """A copy on a device, and of `more`, which are int64 or float32 vectors.

        It travels in one tensor, and another one if there are scales.

        Args:
            device: the device.
            more: what travels along.
            receive: copies a tensor to the device of the current scope.
        """
        tables = self.counts.shape[0]
        parts = [[self.counts], [self.ids]]
        if self.bags is not None:
            bags = tf.cast(self.bags, tf.int64)
            parts = [[self.counts], [self.bag_counts], [self.ids, bags]]
        message = packing.pack(parts)
        if more:
            integers = [message, *(_as_integers(tensor) for tensor in more)]
            sizes = tf.stack([tf.size(tensor, out_type=tf.int64) for tensor in integers])
            message = packing.pack([[sizes], integers])
        with tf.control_dependencies(None), tf.device(device):
            message = receive(message)
            arrived = []
            if more:
                sizes, rest = packing.unpack(message, [[len(more) + 1], [-1]])
                message, *integers = tf.split(rest, sizes, num=len(more) + 1)
                arrived = [
                    _from_integers(part, tensor.dtype)
                    for part, tensor in zip(integers, more, strict=True)
                ]
            if self.bags is None:
                counts, ids = packing.unpack(message, [[tables], [-1]])
                return PackedBags(counts, ids), arrived
            scales = None if self.scales is None else receive(self.scales)
            counts, bag_counts, ids_and_bags = packing.unpack(message, [[tables], [tables], [-1]])
            ids, bags = tf.split(ids_and_bags, 2)
            return PackedBags(counts, ids, tf.cast(bags, tf.int32), scales, bag_counts), arrived

    def select(self, tables: list[int], versions: tf.Tensor) -> tuple[PackedBags, tf.Tensor]:
        """Those of some tables, in the order given, and of the versions [n] of all."""
        count = self.counts.shape[0]
        if tables == list(range(count)):
            return self, versions

        def pick(packed):
            if packed is None:
                return None
            parts = tf.split(packed, self.counts, num=count)
            return tf.concat([parts[i] for i in tables], 0)

        picked = PackedBags(
            tf.gather(self.counts, tables),
            pick(self.ids),
            pick(self.bags),
            pick(self.scales),
            None if self.bag_counts is None else tf.gather(self.bag_counts, tables),
        )
        return picked, pick(versions)


def _as_integers(tensor: tf.Tensor) -> tf.Tensor:
    """An int64 or float32 vector as int64, bit by bit."""
    if tensor.dtype == tf.float32:
        tensor = tf.bitcast(tensor, tf.int32)
    return tf.cast(tensor, tf.int64)


def _from_integers(integers: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """What `_as_integers` had."""
    if dtype == tf.float32:
        return tf.bitcast(tf.cast(integers, tf.int32), tf.float32)
    return integers
