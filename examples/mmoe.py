"""MMoE: two tasks that share experts, each with a gate of its own.

Ma et al. 2018, "Modeling Task Relationships in Multi-task Learning with Multi-gate
Mixture-of-Experts". The data are made up: users click, and those who click may buy, for reasons
that are partly others.

    python examples/mmoe.py
    python examples/mmoe.py --strategy=async --workers=4 --ps=2
"""

from __future__ import annotations

import gallery
import keras
import numpy as np

import tf_recsync as recsync
from tf_recsync.layers import EmbeddingCollection, FeatureConfig, TableConfig

FEATURES = {"user": 1000, "item": 500}
TASKS = ("click", "purchase")
DIMENSION, EXPERTS = 8, 4


def make_examples(count: int, rng: np.random.Generator) -> gallery.Examples:
    """Clicks of users on items, and what they bought."""
    ids = {name: rng.integers(0, rows, count) for name, rows in FEATURES.items()}
    hidden = {name: rng.normal(size=(rows, 3)) for name, rows in FEATURES.items()}
    user, item = (hidden[name][own] for name, own in ids.items())
    click = gallery.drawn(gallery.sigmoid(user[:, 0] + item[:, 0] + user[:, 1] - 0.5), rng)
    purchase = gallery.drawn(gallery.sigmoid(user[:, 0] + item[:, 2] + user[:, 2] - 0.5), rng)
    return ids, {"click": click, "purchase": click * purchase}


def make_model() -> keras.Model:
    """Builds and compiles the model."""
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in FEATURES}
    vectors = EmbeddingCollection(
        [TableConfig(name, rows, DIMENSION) for name, rows in FEATURES.items()],
        [FeatureConfig(name, name) for name in FEATURES],
        concatenate=True,
    )(inputs)
    experts = keras.ops.stack(
        [keras.layers.Dense(16, "relu")(vectors) for _ in range(EXPERTS)], axis=1
    )
    outputs = {}
    for task in TASKS:
        gate = keras.layers.Dense(EXPERTS, "softmax", name=f"{task}_gate")(vectors)
        mixed = keras.ops.sum(gate[:, :, None] * experts, axis=1)
        tower = keras.layers.Dense(16, "relu")(mixed)
        outputs[task] = keras.layers.Dense(1, "sigmoid", name=task)(tower)
    model = keras.Model(inputs, outputs, name="mmoe")
    model.compile(
        recsync.optimizers.Adagrad(0.1, initial_accumulator_value=1e-5),
        {task: "binary_crossentropy" for task in TASKS},
        metrics={task: [recsync.metrics.AUC(name="auc")] for task in TASKS},
    )
    return model


if __name__ == "__main__":
    gallery.run(make_model, make_examples, "purchase_auc", expected=0.83)
