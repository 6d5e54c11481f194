"""The Wide & Deep model (Cheng et al. 2016) for any `tf_recsync.data` data set."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras


def build_wide_deep(
    spec,
    *,
    embedding_dimension: int = 16,
    hidden_units: Sequence[int] = (256, 128, 64),
    normalization: Callable[[], keras.layers.Layer] | None = None,
) -> keras.Model:
    """Builds the model: plain Keras, trainable with any strategy or none.

    Args:
        spec: the data's `tf_recsync.data.FeatureSpec`.
        embedding_dimension: of the deep part's embeddings.
        hidden_units: of the deep part's dense layers.
        normalization: makes a layer to place between each dense layer and its
            activation; None for none.

    Returns:
        A model from the features to the click probability, [batch, 1].
    """
    numeric = keras.Input((len(spec.numeric),), name="numeric")
    inputs = {"numeric": numeric}
    wide = [keras.layers.Dense(1, name="wide_numeric")(numeric)]
    deep = [numeric]
    for name, size in spec.categorical.items():
        ids = keras.Input((), dtype="int64", name=name)
        inputs[name] = ids
        wide.append(
            keras.layers.Embedding(size, 1, embeddings_initializer="zeros", name=f"wide_{name}")(
                ids
            )
        )
        deep.append(keras.layers.Embedding(size, embedding_dimension, name=f"deep_{name}")(ids))
    hidden = keras.layers.Concatenate(name="deep_inputs")(deep)
    for i, units in enumerate(hidden_units):
        hidden = keras.layers.Dense(units, name=f"deep_dense_{i}")(hidden)
        if normalization is not None:
            hidden = normalization()(hidden)
        hidden = keras.layers.ReLU(name=f"deep_relu_{i}")(hidden)
    wide.append(keras.layers.Dense(1, name="deep_output")(hidden))
    logit = keras.layers.Add(name="logit")(wide)
    click = keras.layers.Activation("sigmoid", name="click")(logit)
    return keras.Model(inputs, click, name="wide_deep")


# The paths of the wide part's variables, for an optimizer of their own.
WIDE_VARIABLES = "wide_.*"
