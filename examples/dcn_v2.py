"""DCN-v2: a cross network, whose layers multiply features, and a deep network on top.

Wang et al. 2021, "DCN V2: Improved Deep & Cross Network and Practical Lessons for Web-scale
Learning to Rank Systems". The data are made up: whether a user clicks on an item depends on the
product of their hidden numbers, by the device.

    python examples/dcn_v2.py
    python examples/dcn_v2.py --strategy=shadow_easgd --workers=4 --ps=2
"""

from __future__ import annotations

import gallery
import keras
import numpy as np

import tf_recsync as recsync
from tf_recsync.layers import Cross, EmbeddingCollection, FeatureConfig, TableConfig

FEATURES = {"user": 500, "item": 500, "device": 4}
DIMENSION = 8


def make_examples(count: int, rng: np.random.Generator) -> gallery.Examples:
    """Clicks of users on items."""
    ids = {name: rng.integers(0, rows, count) for name, rows in FEATURES.items()}
    hidden = {name: rng.normal(size=rows) for name, rows in FEATURES.items()}
    logits = 2.0 * np.prod([hidden[name][own] for name, own in ids.items()], axis=0)
    logits += hidden["user"][ids["user"]] - 1.0
    return ids, gallery.drawn(gallery.sigmoid(logits), rng)


def make_model() -> keras.Model:
    """Builds and compiles the model."""
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in FEATURES}
    first = EmbeddingCollection(
        [TableConfig(name, rows, DIMENSION) for name, rows in FEATURES.items()],
        [FeatureConfig(name, name) for name in FEATURES],
        concatenate=True,
    )(inputs)
    crossed = first
    for _ in range(3):
        crossed = Cross(rank=12)(first, crossed)
    deep = crossed
    for units in (64, 32):
        deep = keras.layers.Dense(units, "relu")(deep)
    model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(deep), name="dcn_v2")
    model.compile(
        recsync.optimizers.Adagrad(0.1, initial_accumulator_value=1e-5),
        "binary_crossentropy",
        metrics=[recsync.metrics.AUC(name="auc")],
    )
    return model


if __name__ == "__main__":
    gallery.run(make_model, make_examples, "auc", expected=0.76)
