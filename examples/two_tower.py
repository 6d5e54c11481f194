"""Two towers: items are retrieved whose vectors are near to a user's.

Yi et al. 2019, "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations": the
other items of a batch are the negatives, and as popular items are among them more often, the
logarithm of an item's frequency (log Q) is taken off its logit. The data are made up: users choose
items near to their own hidden vectors, popular ones more often.

    python examples/two_tower.py
    python examples/two_tower.py --strategy=async --workers=4 --ps=2
"""

from __future__ import annotations

import gallery
import keras
import numpy as np

import tf_recsync as recsync
from tf_recsync.layers import EmbeddingCollection, FeatureConfig, TableConfig

USERS, ITEMS, DIMENSION, NEAREST = 500, 300, 16, 10


def make_examples(count: int, rng: np.random.Generator) -> gallery.Examples:
    """What users chose; the labels are not used."""
    users, items = rng.normal(size=(USERS, 3)), rng.normal(size=(ITEMS, 3))
    popularity = -0.5 * np.log1p(np.arange(ITEMS))
    scores = 2.0 * users @ items.T + popularity
    # The largest of logits to which Gumbel's noise is added is a draw from their softmax.
    user = rng.integers(0, USERS, count)
    item = np.concatenate(
        [
            np.argmax(scores[some] + rng.gumbel(size=(len(some), ITEMS)), axis=1)
            for some in np.array_split(user, max(count // 1000, 1))
        ]
    )
    frequency = np.bincount(item, minlength=ITEMS) / count
    features = {"user": user, "item": item, "log_q": np.log(frequency[item]).astype(np.float32)}
    return features, np.zeros((count, 1), np.float32)


@keras.saving.register_keras_serializable(package="examples")
class Retrieval(keras.Model):
    """Vectors of users and items, and the loss of telling a user's item from a batch's others."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.collection = EmbeddingCollection(
            [
                TableConfig("users", USERS, DIMENSION, "glorot_uniform"),
                TableConfig("items", ITEMS, DIMENSION, "glorot_uniform"),
            ],
            [FeatureConfig("user", "users"), FeatureConfig("item", "items")],
        )
        self.towers = {name: keras.layers.Dense(DIMENSION) for name in ("user", "item")}

    def call(self, inputs):
        vectors = self.collection({name: inputs[name] for name in self.towers})
        return {name: tower(vectors[name]) for name, tower in self.towers.items()}

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        del y, sample_weight, training
        logits = keras.ops.matmul(y_pred["user"], keras.ops.transpose(y_pred["item"]))
        logits -= x["log_q"][None, :]
        # Where an item occurs twice in a batch, it is no negative of itself.
        same = keras.ops.equal(x["item"][:, None], x["item"][None, :])
        own = keras.ops.eye(keras.ops.shape(x["item"])[0])
        logits -= 1e9 * (keras.ops.cast(same, "float32") - own)
        return -keras.ops.mean(keras.ops.sum(own * keras.ops.log_softmax(logits), axis=1))


def make_model() -> keras.Model:
    """Builds and compiles the model."""
    model = Retrieval(name="two_tower")
    model.compile(recsync.optimizers.Adagrad(0.1, initial_accumulator_value=1e-5))
    return model


def recall(model: keras.Model, test: gallery.Examples) -> float:
    """How often an item is among the nearest ten of its user."""
    some = {
        "user": np.arange(max(USERS, ITEMS)) % USERS,
        "item": np.arange(max(USERS, ITEMS)) % ITEMS,
    }
    vectors = model.predict(some, verbose=0)
    scores = vectors["user"][:USERS] @ vectors["item"][:ITEMS].T
    nearest = np.argsort(-scores, axis=1)[:, :NEAREST]
    features, _ = test
    return float((nearest[features["user"]] == features["item"][:, None]).any(1).mean())


if __name__ == "__main__":
    gallery.run(make_model, make_examples, "recall", expected=0.76, measure=recall)
