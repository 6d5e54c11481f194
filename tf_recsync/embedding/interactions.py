"""Functions of looked-up vectors, computed beside the tables."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf_recsync._checks import check_text, list_of, number
from tf_recsync.embedding.config import FeatureConfig, TableConfig


class BagRows(NamedTuple):
    """The rows of a feature's bags, before they are pooled.

    Attributes:
        rows: float32 [batch, (ids), dimension], a row for each id.
        weights: float32 [batch, (ids)], the ids' weights; ones where none were given.
    """

    rows: tf.RaggedTensor
    weights: tf.RaggedTensor


@keras.saving.register_keras_serializable(package="tf_recsync")
class Interaction:
    """A function of the vectors of several features, computed where their tables are.

    An `EmbeddingCollection` returns its result beside, or instead of, the features'
    vectors. Under a strategy with parameter servers it is computed and differentiated on
    the server that holds the features' tables, and only its result and the gradient of
    that travel. The collection keeps the tables of an interaction whole and on one server.

    `DotInteraction` and `AttentionPooling` are ready to use; this class takes a function
    of your own. To save models, register it with `keras.saving.register_keras_serializable`.

    Reference: Zheng et al. 2020, "ShadowSync: Performing Synchronization in the Background for
    Highly Scalable Distributed Training", section 3.1 (interactions on embedding PSs).

    Args:
        name: name of the result, not empty, and not that of a feature.
        features: names of the features, at least one, each once.
        function: takes a dict from the features' names to their vectors, float32 [batch,
            dimension], in the order of `features`, and returns float32 [batch, width]. It
            is made of differentiable TensorFlow ops, and is traced without AutoGraph. It
            may use no variables and no other resources: nobody would train them.
        unpooled: names of those features for which it gets `BagRows` instead: the rows
            of each example's ids, not pooled.

    Raises:
        ValueError: if an argument is out of range.

    Example:
        >>> product = Interaction("product", ["user", "film"], lambda v: v["user"] * v["film"])
        >>> product({"user": tf.constant([[2.0, 3.0]]), "film": tf.constant([[1.0, 4.0]])}).numpy()
        array([[ 2., 12.]], dtype=float32)
    """

    def __init__(
        self,
        name: str,
        features: Sequence[str],
        function: Callable[[Mapping[str, Any]], tf.Tensor],
        unpooled: Sequence[str] = (),
    ):
        check_text("name", name)
        self.name = name
        self.features = _names(name, "features", features)
        self.unpooled = _names(name, "unpooled", unpooled)
        if not self.features:
            raise ValueError(f"interaction {name!r}: features=[]: there must be at least one.")
        unknown = [feature for feature in self.unpooled if feature not in self.features]
        if unknown:
            raise ValueError(
                f"interaction {name!r}: unpooled={list(self.unpooled)}: {unknown} must be among "
                f"its features {list(self.features)}."
            )
        if not callable(function):
            raise ValueError(f"interaction {name!r}: function={function!r}: must be callable.")
        self.function = function

    def __call__(self, vectors: Mapping[str, Any]) -> tf.Tensor:
        """Computes the result of the features' vectors: float32 [batch, width]."""
        own = {feature: vectors[feature] for feature in self.features}
        return tf.cast(tf.convert_to_tensor(self.function(own)), tf.float32)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments as a dict that can be written as JSON."""
        return {
            "name": self.name,
            "features": list(self.features),
            "function": keras.saving.serialize_keras_object(self.function),
            "unpooled": list(self.unpooled),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Interaction:
        """Returns the interaction that `get_config` described.

        Args:
            config: what `get_config` returned.

        Returns:
            An interaction that computes the same.

        Raises:
            ValueError: if an argument is out of range, or its function is not registered.
        """
        config = dict(config)
        if isinstance(config.get("function"), dict | str):
            config["function"] = keras.saving.deserialize_keras_object(config["function"])
        return cls(**config)


@keras.saving.register_keras_serializable(package="tf_recsync")
class DotInteraction(Interaction):
    """The dot products of all pairs of its features' pooled vectors.

    Of k features, [batch, k (k - 1) / 2]: those of features 0 and 1, 0 and 2, ..., 1 and 2, ...

    References: Naumov et al. 2019, "Deep Learning Recommendation Model for Personalization and
    Recommendation Systems" (the products); Zheng et al. 2020, "ShadowSync", section 3.1 (where
    they are computed).

    Args:
        name: name of the result, not empty, and not that of a feature.
        features: names of the features, at least two, of tables of one dimension.

    Raises:
        ValueError: if an argument is out of range.

    Example:
        >>> crosses = DotInteraction("crosses", ["user", "film"])
        >>> crosses({"user": tf.constant([[2.0, 3.0]]), "film": tf.constant([[1.0, 4.0]])}).numpy()
        array([[14.]], dtype=float32)
    """

    def __init__(self, name: str, features: Sequence[str]):
        super().__init__(name, features, _dot_products)
        if len(self.features) < 2:
            raise ValueError(
                f"interaction {name!r}: features={list(self.features)}: there must be at least two."
            )

    def get_config(self) -> dict[str, Any]:
        return {"name": self.name, "features": list(self.features)}


@keras.saving.register_keras_serializable(package="tf_recsync")
class AttentionPooling(Interaction):
    """Pools the rows of a feature's bag by how well they fit to another feature's vector.

    [batch, dimension]: the sum of the rows k of the bag, each times the softmax over the bag
    of `scale * q.k`, q being the query's pooled vector. An id of weight w counts as w ids; an
    empty bag gives zeros. The combiner of the keys' table plays no part.

    Reference: Zheng et al. 2020, "ShadowSync", section 3.1 (attention on embedding PSs).

    Args:
        name: name of the result, not empty, and not that of a feature.
        query: name of the feature that gives q.
        keys: name of the feature whose bags are pooled; its table has the query's dimension.
        scale: factor of the products, 1 by default; `dimension ** -0.5` keeps them small.

    Raises:
        ValueError: if an argument is out of range.

    Example:
        >>> taste = AttentionPooling("taste", query="film", keys="watched")
        >>> bag = tf.ragged.constant([[[1.0, 0.0], [0.0, 1.0]]], ragged_rank=1)
        >>> watched = BagRows(bag, tf.ragged.constant([[1.0, 1.0]]))
        >>> taste({"film": tf.constant([[100.0, 0.0]]), "watched": watched}).numpy()
        array([[1., 0.]], dtype=float32)
    """

    def __init__(self, name: str, query: str, keys: str, scale: float = 1.0):
        if query == keys:
            raise ValueError(f"interaction {name!r}: query and keys are both {keys!r}.")
        self.scale = float(number(f"interaction {name!r}: scale", scale))
        function = functools.partial(_attention, query=query, keys=keys, scale=self.scale)
        super().__init__(name, (query, keys), function, unpooled=(keys,))

    def get_config(self) -> dict[str, Any]:
        query, keys = self.features
        return {"name": self.name, "query": query, "keys": keys, "scale": self.scale}


def result_widths(
    interactions: Sequence[Interaction],
    tables: Sequence[TableConfig],
    features: Sequence[FeatureConfig],
) -> list[int]:
    """Checks that interactions fit to tables and features; gives their results' widths.

    Args:
        interactions: the interactions.
        tables: the tables.
        features: the features, whose tables there are.

    Raises:
        ValueError: if a name occurs twice, a feature is missing, a table is to be split, or
            a function fails, uses a variable or returns anything but float [batch, width].
    """
    configs = {table.name: table for table in tables}
    table_of = {feature.name: configs[feature.table] for feature in features}
    names = [feature.name for feature in features]
    widths = []
    for interaction in interactions:
        if interaction.name in names:
            raise ValueError(
                f"interactions: the name {interaction.name!r} is taken already among {names}."
            )
        names.append(interaction.name)
        for feature in interaction.features:
            if feature not in table_of:
                raise ValueError(
                    f"interaction {interaction.name!r}: its feature {feature!r} is not among the "
                    f"features {list(table_of)}."
                )
            if table_of[feature].combiner is None and feature not in interaction.unpooled:
                raise ValueError(
                    f"interaction {interaction.name!r}: the table of its feature {feature!r}, "
                    f"{table_of[feature].name!r}, has combiner=None; it must have one, or the "
                    "feature be among unpooled."
                )
        own = {table_of[feature].name: table_of[feature] for feature in interaction.features}
        for table in own.values():
            if (table.shards or 1) > 1:
                raise ValueError(
                    f"interaction {interaction.name!r} of the tables {list(own)} needs each of "
                    f"them whole on one parameter server, but table {table.name!r} has "
                    f"shards={table.shards}; it must be None or 1."
                )
        widths.append(_width(interaction, {f: table_of[f].dimension for f in interaction.features}))
    return widths


def _width(interaction: Interaction, dimensions: Mapping[str, int]) -> int:
    """The width of an interaction's result, found by tracing its function."""
    specs = {}
    for feature, dimension in dimensions.items():
        specs[feature] = tf.TensorSpec([None, dimension], tf.float32)
        if feature in interaction.unpooled:
            specs[feature] = BagRows(
                tf.RaggedTensorSpec([None, None, dimension], tf.float32, ragged_rank=1),
                tf.RaggedTensorSpec([None, None], tf.float32),
            )
    try:
        traced = tf.function(interaction.__call__, autograph=False).get_concrete_function(specs)
    except Exception as error:  # A user's own function may do anything.
        raise ValueError(
            f"interaction {interaction.name!r}: its function can't be traced on {specs}; it must "
            f"be made of TensorFlow ops and make no variables: {error}"
        ) from error
    if traced.variables or any(tensor.dtype == tf.resource for tensor in traced.captured_inputs):
        held = [variable.name for variable in traced.variables] or "other resources"
        raise ValueError(
            f"interaction {interaction.name!r}: its function must use no variables and no other "
            f"resources, as they would not be trained; it uses {held}."
        )
    shape = traced.output_shapes
    if shape.rank != 2 or shape[0] is not None or not shape[1]:
        raise ValueError(
            f"interaction {interaction.name!r}: its function must return [batch, width] with a "
            f"static width, as by tf.ensure_shape, of a batch of any size, not {shape}."
        )
    return shape[1]


def _dot_products(vectors: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """The products of all pairs, [batch, k (k - 1) / 2]."""
    stacked = tf.stack(list(vectors.values()), axis=1)
    k = len(vectors)
    # Of the upper triangle without the diagonal, row by row.
    pairs = [i * k + j for i in range(k) for j in range(i + 1, k)]
    products = tf.matmul(stacked, stacked, transpose_b=True)
    return tf.gather(tf.reshape(products, [-1, k * k]), pairs, axis=1)


def _attention(vectors: Mapping[str, Any], query: str, keys: str, scale: float) -> tf.Tensor:
    """The weighted sum of each bag's rows, [batch, dimension]."""
    bags = vectors[keys]
    rows, weights = bags.rows.values, bags.weights.values
    bag, count = bags.rows.value_rowids(), bags.rows.nrows()
    score = scale * tf.reduce_sum(tf.gather(vectors[query], bag) * rows, axis=1)
    # The largest score of ids that count, so that no exponential overflows.
    counted = tf.where(weights != 0.0, score, score.dtype.min)
    largest = tf.stop_gradient(tf.math.unsorted_segment_max(counted, bag, count))
    part = weights * tf.exp(tf.minimum(score - tf.gather(largest, bag), 0.0))
    total = tf.math.unsorted_segment_sum(part, bag, count)
    pooled = tf.math.unsorted_segment_sum(part[:, tf.newaxis] * rows, bag, count)
    return tf.math.divide_no_nan(pooled, total[:, tf.newaxis])


def _names(interaction: str, argument: str, names: Sequence[str]) -> tuple[str, ...]:
    found = list_of(f"interaction {interaction!r}: {argument}", names, str)
    if len(set(found)) != len(found):
        raise ValueError(
            f"interaction {interaction!r}: {argument}={names!r}: must be a list of different names."
        )
    return found
