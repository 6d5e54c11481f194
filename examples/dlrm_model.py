"""The DLRM model (Naumov et al. 2019) for any `tf_recsync.data` data set."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import keras

import tf_recsync as recsync


def build_dlrm(
    spec,
    *,
    embedding_dimension: int = 16,
    bottom_units: Sequence[int] = (64, 32),
    top_units: Sequence[int] = (128, 64),
    kernel_initializer: str = "glorot_uniform",
) -> keras.Model:
    """Builds the model, trainable with any strategy or none.

    A bottom MLP makes a vector of the numeric features; the dot products of all pairs of it and
    the categorical features' vectors, and the vector itself, go into a top MLP.

    Args:
        spec: the data's `tf_recsync.data.FeatureSpec`, with numeric features and at least one
            categorical one.
        embedding_dimension: of all vectors.
        bottom_units: of the bottom MLP's layers before the one that makes the vector.
        top_units: of the top MLP's hidden layers.
        kernel_initializer: of the hidden layers, see `keras.initializers`. With many layers,
            "he_uniform" keeps what goes through them from fading away.

    Returns:
        A model from the features to the click probability, [batch, 1].
    """
    numeric = keras.Input((len(spec.numeric),), name="numeric")
    ids = {name: keras.Input((), dtype="int64", name=name) for name in spec.categorical}
    dense = functools.partial(
        keras.layers.Dense, activation="relu", kernel_initializer=kernel_initializer
    )
    hidden = numeric
    for i, units in enumerate([*bottom_units, embedding_dimension]):
        hidden = dense(units, name=f"bottom_{i}")(hidden)
    embedded = recsync.layers.EmbeddingCollection(
        [
            recsync.layers.TableConfig(name, size, embedding_dimension)
            for name, size in spec.categorical.items()
        ],
        [recsync.layers.FeatureConfig(name, table=name) for name in spec.categorical],
        concatenate=True,
        name="embeddings",
    )(ids)
    count = len(spec.categorical) + 1
    vectors = keras.layers.Concatenate(name="vectors")([hidden, embedded])
    vectors = keras.layers.Reshape((count, embedding_dimension))(vectors)
    products = keras.layers.Dot(axes=(2, 2), name="interactions")([vectors, vectors])
    pairs = [i * count + j for i in range(count) for j in range(i)]
    products = keras.layers.Reshape((count * count,))(products)
    products = keras.ops.take(products, pairs, axis=1)
    hidden = keras.layers.Concatenate(name="top_inputs")([hidden, products])
    for i, units in enumerate(top_units):
        hidden = dense(units, name=f"top_{i}")(hidden)
    click = keras.layers.Dense(1, "sigmoid", name="click")(hidden)
    return keras.Model({"numeric": numeric, **ids}, click, name="dlrm")
