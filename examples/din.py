"""DIN: what a user has watched counts by how well it fits to the item in question.

Zhou et al. 2018, "Deep Interest Network for Click-Through Rate Prediction". The attention is that
of `AttentionPooling`, which is computed beside the table: one vector travels to the worker, and not
the whole history. The data are made up: a user clicks on what is of a kind that they have watched.

    python examples/din.py
    python examples/din.py --strategy=sync --workers=4 --ps=2
"""

from __future__ import annotations

import gallery
import keras
import numpy as np
import tensorflow as tf

import tf_recsync as recsync
from tf_recsync.layers import AttentionPooling, EmbeddingCollection, FeatureConfig, TableConfig

ITEMS, KINDS, MOST_WATCHED, DIMENSION = 200, 10, 8, 16


def make_examples(count: int, rng: np.random.Generator) -> gallery.Examples:
    """Clicks of users, who have watched some items, on others."""
    kinds = rng.integers(0, KINDS, ITEMS)
    item = rng.integers(0, ITEMS, count)
    lengths = rng.integers(1, MOST_WATCHED + 1, count)
    watched = rng.integers(0, ITEMS, (count, MOST_WATCHED))
    is_there = np.arange(MOST_WATCHED) < lengths[:, None]
    # Half of the items are of the kind of something that was watched.
    same = np.where(rng.random(count) < 0.5, watched[:, 0], item)
    item = np.array([rng.choice(np.flatnonzero(kinds == kind)) for kind in kinds[same]])
    fits = ((kinds[watched] == kinds[item][:, None]) & is_there).any(1)
    features = {
        "item": tf.constant(item),
        "watched": tf.RaggedTensor.from_row_lengths(watched[is_there], lengths),
    }
    return features, gallery.drawn(np.where(fits, 0.8, 0.1), rng)


def make_model() -> keras.Model:
    """Builds and compiles the model."""
    inputs = {
        "item": keras.Input((), dtype="int64", name="item"),
        "watched": keras.Input((None,), dtype="int64", ragged=True, name="watched"),
    }
    vectors = EmbeddingCollection(
        [TableConfig("items", ITEMS, DIMENSION, keras.initializers.RandomNormal(stddev=0.3))],
        [FeatureConfig("item", "items"), FeatureConfig("watched", "items")],
        interactions=[AttentionPooling("interest", query="item", keys="watched")],
        returned_features=["item"],
    )(inputs)
    item, interest = vectors["item"], vectors["interest"]
    hidden = keras.ops.concatenate([item, interest, item * interest, item - interest], axis=1)
    for units in (64, 32):
        hidden = keras.layers.Dense(units, "relu")(hidden)
    model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(hidden), name="din")
    model.compile(
        recsync.optimizers.Adagrad(0.1, initial_accumulator_value=1e-5),
        "binary_crossentropy",
        metrics=[recsync.metrics.AUC(name="auc")],
    )
    return model


if __name__ == "__main__":
    gallery.run(make_model, make_examples, "auc", expected=0.81)
