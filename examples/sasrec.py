"""SASRec: attention over the sequence of what a user has watched tells what comes next.

Kang and McAuley 2018, "Self-Attentive Sequential Recommendation". The table gives sequences of
vectors (`combiner=None`), with a mask where they end. The data are made up: most users go on from
an item to one of its two successors.

    python examples/sasrec.py
    python examples/sasrec.py --strategy=sync --workers=4 --ps=2
"""

from __future__ import annotations

import gallery
import keras
import numpy as np

import tf_recsync as recsync
from tf_recsync.layers import EmbeddingCollection, FeatureConfig, TableConfig

ITEMS, LENGTH, DIMENSION, PADDING = 200, 8, 32, -1


def make_examples(count: int, rng: np.random.Generator) -> gallery.Examples:
    """What users have watched, filled up with -1 in front, and what they watched next."""
    successors = rng.integers(0, ITEMS, (ITEMS, 2))
    sequences = np.empty((count, LENGTH + 1), np.int64)
    sequences[:, 0] = rng.integers(0, ITEMS, count)
    for i in range(LENGTH):
        following = successors[sequences[:, i], rng.integers(0, 2, count)]
        anything = rng.integers(0, ITEMS, count)
        sequences[:, i + 1] = np.where(rng.random(count) < 0.8, following, anything)
    watched = sequences[:, :-1]
    missing = rng.integers(0, LENGTH - 1, count)[:, None]
    return {"watched": np.where(np.arange(LENGTH) < missing, PADDING, watched)}, sequences[:, -1]


def make_model() -> keras.Model:
    """Builds and compiles the model."""
    watched = keras.Input((LENGTH,), dtype="int64", name="watched")
    sequence = EmbeddingCollection(
        [TableConfig("items", ITEMS, DIMENSION, "glorot_uniform", combiner=None)],
        [FeatureConfig("watched", "items", padding=PADDING)],
    )({"watched": watched})["watched"]
    places = keras.layers.Embedding(LENGTH, DIMENSION)(keras.ops.arange(LENGTH))
    hidden = sequence + places[None]
    is_there = keras.ops.not_equal(watched, PADDING)[:, None, :]
    attention = keras.layers.MultiHeadAttention(2, DIMENSION // 2)
    attended = attention(hidden, hidden, attention_mask=is_there, use_causal_mask=True)
    hidden = keras.layers.LayerNormalization()(hidden + attended)
    forward = keras.layers.Dense(DIMENSION)(keras.layers.Dense(64, "relu")(hidden))
    hidden = keras.layers.LayerNormalization()(hidden + forward)
    logits = keras.layers.Dense(ITEMS)(hidden[:, -1])
    model = keras.Model({"watched": watched}, logits, name="sasrec")
    model.compile(
        recsync.optimizers.Adam(0.003),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseTopKCategoricalAccuracy(2, name="hit_rate")],
    )
    return model


if __name__ == "__main__":
    gallery.run(make_model, make_examples, "hit_rate", expected=0.8)
