"""DeepFM: a factorization machine and a deep network over the same vectors.

Guo et al. 2017, "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction". The data
are made up: whether a user clicks on an item depends on the product of their hidden vectors, and on
the hour.

    python examples/deepfm.py
    python examples/deepfm.py --strategy=gba --workers=4 --ps=2 --global_batch_size=256
"""

from __future__ import annotations

import gallery
import keras
import numpy as np

import tf_recsync as recsync
from tf_recsync.layers import (
    EmbeddingCollection,
    FactorizationMachine,
    FeatureConfig,
    TableConfig,
)

FEATURES = {"user": 300, "item": 200, "hour": 24}
DIMENSION, HIDDEN = 8, 2


def make_examples(count: int, rng: np.random.Generator) -> gallery.Examples:
    """Clicks of users on items."""
    ids = {name: rng.integers(0, rows, count) for name, rows in FEATURES.items()}
    hidden = {name: rng.normal(size=(rows, HIDDEN)) for name, rows in FEATURES.items()}
    user, item = (hidden[name][ids[name]] for name in ("user", "item"))
    logits = 1.5 * (user * item).sum(1) + hidden["hour"][ids["hour"], 0] - 1.0
    return ids, gallery.drawn(gallery.sigmoid(logits), rng)


def make_model() -> keras.Model:
    """Builds and compiles the model."""
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in FEATURES}
    # Vectors, and a weight for each id: the model's linear part.
    vectors, weights = (
        EmbeddingCollection(
            [TableConfig(name, rows, dimension) for name, rows in FEATURES.items()],
            [FeatureConfig(name, name) for name in FEATURES],
            concatenate=True,
            name=part,
        )(inputs)
        for part, dimension in (("vectors", DIMENSION), ("weights", 1))
    )
    pairs = FactorizationMachine()(keras.layers.Reshape((len(FEATURES), DIMENSION))(vectors))
    deep = vectors
    for units in (64, 32):
        deep = keras.layers.Dense(units, "relu")(deep)
    linear = keras.ops.sum(weights, axis=1, keepdims=True)
    logits = keras.layers.Dense(1)(deep) + pairs + linear
    model = keras.Model(inputs, keras.ops.sigmoid(logits), name="deepfm")
    model.compile(
        recsync.optimizers.Adagrad(0.1, initial_accumulator_value=1e-5),
        "binary_crossentropy",
        metrics=[recsync.metrics.AUC(name="auc")],
    )
    return model


if __name__ == "__main__":
    gallery.run(make_model, make_examples, "auc", expected=0.85)
