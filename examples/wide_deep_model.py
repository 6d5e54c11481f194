"""The Wide & Deep model (Cheng et al. 2016) for any `tf_recsync.data` data set."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras

import tf_recsync as recsync


def build_wide_deep(
    spec,
    *,
    embedding_dimension: int = 16,
    hidden_units: Sequence[int] = (256, 128, 64),
    normalization: Callable[[], keras.layers.Layer] | None = None,
    collections: bool = True,
) -> keras.Model:
    """Builds the model, trainable with any strategy or none.

    Args:
        spec: the data's `tf_recsync.data.FeatureSpec`.
        embedding_dimension: of the deep part's embeddings.
        hidden_units: of the deep part's dense layers.
        normalization: makes a layer to place between each dense layer and its
            activation; None for none.
        collections: whether the embeddings are two `EmbeddingCollection`s, which are
            faster; False for a `keras.layers.Embedding` per feature and part.

    Returns:
        A model from the features to the click probability, [batch, 1].
    """
    numeric = keras.Input((len(spec.numeric),), name="numeric")
    ids = {name: keras.Input((), dtype="int64", name=name) for name in spec.categorical}
    embed = _collections if collections else _layers
    wide_vectors, deep_vectors = embed(spec.categorical, ids, embedding_dimension)
    wide = [keras.layers.Dense(1, name="wide_numeric")(numeric), *wide_vectors]
    hidden = keras.layers.Concatenate(name="deep_inputs")([numeric, *deep_vectors])
    for i, units in enumerate(hidden_units):
        hidden = keras.layers.Dense(units, name=f"deep_dense_{i}")(hidden)
        if normalization is not None:
            hidden = normalization()(hidden)
        hidden = keras.layers.ReLU(name=f"deep_relu_{i}")(hidden)
    wide.append(keras.layers.Dense(1, name="deep_output")(hidden))
    logit = keras.layers.Add(name="logit")(wide)
    click = keras.layers.Activation("sigmoid", name="click")(logit)
    return keras.Model({"numeric": numeric, **ids}, click, name="wide_deep")


def _collections(sizes, ids, dimension):
    """The wide part's terms and the deep part's vectors, from a collection for each part."""

    def collection(name, dimension, initializer):
        return recsync.layers.EmbeddingCollection(
            [recsync.layers.TableConfig(n, s, dimension, initializer) for n, s in sizes.items()],
            [recsync.layers.FeatureConfig(n, table=n) for n in sizes],
            concatenate=True,
            name=name,
        )(ids)

    weights = collection("wide_embeddings", 1, "zeros")
    return (
        [keras.ops.sum(weights, axis=1, keepdims=True)],
        [collection("deep_embeddings", dimension, "uniform")],
    )


def _layers(sizes, ids, dimension):
    """The same from a Keras layer for each feature and part."""

    def embedding(name, size, dimension, initializer):
        return keras.layers.Embedding(size, dimension, initializer, name=name)(
            ids[name.split("_", 1)[1]]
        )

    return (
        [embedding(f"wide_{n}", size, 1, "zeros") for n, size in sizes.items()],
        [embedding(f"deep_{n}", size, dimension, "uniform") for n, size in sizes.items()],
    )


# The paths of the wide part's variables, for an optimizer of their own.
WIDE_VARIABLES = "wide_.*"
