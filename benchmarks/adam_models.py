"""The models that adam_staleness.py trains, each with its data and what its error is.

`divides` says whether synchronous workers may share a batch among them.
"""

from __future__ import annotations

import keras
import numpy as np


class Deep:
    """A deep regression: two embeddings and four hidden layers."""

    ids, features, divides = 400, 2, True

    def data(self, seed: int, examples: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids, later ones rarer and rarer, and a function of two numbers that each stands for."""
        places = np.random.default_rng(0).uniform(-1, 1, (self.features, self.ids, 2))
        rng = np.random.default_rng(seed)
        ids = (self.ids * rng.random((examples, self.features)) ** 2).astype(np.int32)
        a, b = (places[i, ids[:, i]] for i in range(self.features))
        y = np.sin(3 * a[:, 0] + 2 * b[:, 0]) + np.cos(3 * a[:, 1] * b[:, 1]) * a[:, 0]
        return ids, (y + 0.1 * rng.normal(size=examples))[:, None].astype(np.float32)

    def model(self, optimizer: keras.optimizers.Optimizer) -> keras.Model:
        inputs = keras.Input((self.features,), dtype="int32")
        shifted = inputs + np.arange(self.features, dtype=np.int32) * self.ids
        x = keras.layers.Flatten()(keras.layers.Embedding(self.features * self.ids, 8)(shifted))
        for _ in range(4):
            x = keras.layers.Dense(64, "relu")(x)
        model = keras.Model(inputs, keras.layers.Dense(1)(x))
        model.compile(optimizer, "mse", jit_compile=False)
        return model

    def error(self, found: np.ndarray, wanted: np.ndarray) -> float:
        return float(np.mean((found - wanted) ** 2) / np.var(wanted))


class Gru:
    """Sequential retrieval: a GRU over a user's last ten items tells the next one.

    As the example of that name at keras.io: a table of items below the GRU, a second one of items
    to choose from, and a softmax over those that come next in the same batch. Items are of clusters
    that follow each other, and in each a few are popular. With 256 examples in a batch, half of the
    rows of the second table wait for 25 steps or more between two batches that name them.
    """

    clusters, size, length, width, divides = 60, 50, 10, 32, False

    def data(self, seed: int, examples: int) -> tuple[np.ndarray, np.ndarray]:
        """Items, the next one last, and labels that nothing looks at."""
        after = np.random.default_rng(0).integers(self.clusters, size=(self.clusters, 2))
        rng = np.random.default_rng(seed)
        cluster = rng.integers(self.clusters, size=examples)
        items = []
        for _ in range(self.length + 1):
            # Popularity by Zipf's law.
            rank = ((self.size + 1) ** rng.random(examples)).astype(np.int32) - 1
            items.append(cluster * self.size + rank)
            choice = rng.random(examples)
            moved = np.where(
                choice < 0.9,
                after[cluster, rng.integers(2, size=examples)],
                rng.integers(self.clusters, size=examples),
            )
            cluster = np.where(choice < 0.6, cluster, moved)
        return np.stack(items, axis=1).astype(np.int32), np.zeros((examples, 1), np.float32)

    def model(self, optimizer: keras.optimizers.Optimizer) -> keras.Model:
        inputs = keras.Input((self.length + 1,), dtype="int32")
        items = self.clusters * self.size
        past = keras.layers.Embedding(items, self.width)(inputs[:, :-1])
        query = keras.layers.GRU(self.width)(past)
        candidates = keras.layers.Embedding(items, self.width)(inputs[:, -1])
        scores = keras.ops.matmul(query, keras.ops.transpose(candidates))
        own = keras.ops.sum(query * candidates, axis=-1, keepdims=True)
        losses = keras.ops.logsumexp(scores, axis=-1, keepdims=True) - own
        model = keras.Model(inputs, losses)
        model.compile(optimizer, lambda _, losses: losses, jit_compile=False)
        return model

    def error(self, found: np.ndarray, wanted: np.ndarray) -> float:
        return float(np.mean(found))


MODELS = {"deep": Deep(), "gru": Gru()}
