"""Local training speed: this package's optimizer against the stock Keras one.

What is measured: examples per second of `keras.Model.fit` in one process, Wide & Deep with the 26
categorical features of the Criteo data set (up to 100,000 ids each; embedding dimension 16 and 1,
layers of 256, 128 and 64 units), the same weights and the same batches for every system:

- `recsync`: `tf_recsync.optimizers.Adagrad` (or `SGD`);
- `keras`: `keras.optimizers.Adagrad` (or `SGD`) with the same hyperparameters;
- `no_update`: gradients are computed and dropped. The two others' time per step beyond this one's
  is what their updates cost.

How: the models are compiled with the same loss, no metrics and jit_compile=False. The batches are
made before and kept in memory by `tf.data`. One round fits each system in turn, so that all see the
same machine; the first round warms up (traces, fills the cache) and is not counted. The ratios are
those of a round's pair, and their median is reported. `cpu_ms`, the processor time of a step, and
`cpu_ratio` hardly change when other processes use the machine, as the wall-clock figures do.

Beforehand both systems train a smaller model on batches that name every id at most once, and their
losses are compared. (Only there are they comparable: stock Keras adds up the squares of the
gradients of a row that a batch names twice, this package squares their sum.)

    python benchmarks/local_adagrad.py --rounds=7 --json=local_adagrad.json
"""

from __future__ import annotations

import statistics
import time

import common  # First: it has Python find this project.
import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from wide_deep_model import build_wide_deep

import tf_recsync as recsync

FLAGS = flags.FLAGS
flags.DEFINE_integer("batch_size", 512, "Examples per step.", lower_bound=1)
flags.DEFINE_integer("rounds", 7, "Rounds that count.", lower_bound=1)
flags.DEFINE_integer("steps", 100, "Steps of each system in a round.", lower_bound=1)
flags.DEFINE_enum("optimizer", "adagrad", ["adagrad", "sgd"], "The optimizer.")
flags.DEFINE_string("json", None, "Gets the printed lines.")

LEARNING_RATE = 0.05
CHECKED_STEPS = 20
STOCK = "keras"
NO_UPDATE = "no_update"


@keras.saving.register_keras_serializable(package="benchmarks")
class NoUpdate(keras.optimizers.Optimizer):
    """Counts steps once all gradients are there, and leaves the variables alone."""

    def apply(self, grads, trainable_variables=None):
        if not self.built:
            self.build(trainable_variables)
        computed = [g.values if isinstance(g, tf.IndexedSlices) else g for g in grads]
        # An op that takes them all in: what nothing takes in is not computed.
        tf.raw_ops.Assert(condition=self.iterations >= 0, data=computed, summarize=0)
        self.iterations.assign_add(1)


def make_optimizer(system: str) -> keras.optimizers.Optimizer:
    if system == NO_UPDATE:
        return NoUpdate(LEARNING_RATE)
    module = recsync.optimizers if system == common.OURS else keras.optimizers
    if FLAGS.optimizer == "sgd":
        return module.SGD(LEARNING_RATE)
    # The defaults of both: initial accumulator 0.1, epsilon 1e-7.
    return module.Adagrad(LEARNING_RATE)


def make_model(spec: recsync.data.FeatureSpec, system: str) -> keras.Model:
    """The compiled model; its initial weights are the same for every system."""
    keras.utils.set_random_seed(common.SEED)
    # An Embedding layer per table for every system: the optimizers are compared.
    model = build_wide_deep(
        spec, embedding_dimension=16, hidden_units=(256, 128, 64), collections=False
    )
    model.compile(make_optimizer(system), "binary_crossentropy", jit_compile=False)
    return model


def made_up_batches() -> tuple[recsync.data.FeatureSpec, tf.data.Dataset]:
    """The batches of a round, Criteo-like, in memory after their first use."""
    data = recsync.data.Synthetic(
        rows=FLAGS.steps * FLAGS.batch_size, test_rows=0, seed=common.SEED
    )
    return data.spec, data.train(FLAGS.batch_size).cache().prefetch(2)


def batches_of_unique_ids() -> tuple[recsync.data.FeatureSpec, tf.data.Dataset]:
    """As many features as Criteo has, and batches that name each id at most once."""
    rng = np.random.default_rng(common.SEED)
    ids = 2 * FLAGS.batch_size
    spec = recsync.data.FeatureSpec(
        tuple(f"I{i + 1}" for i in range(13)), {f"C{i + 1}": ids for i in range(26)}
    )
    shape = (CHECKED_STEPS, FLAGS.batch_size)
    features = {"numeric": rng.exponential(size=(*shape, 13)).astype(np.float32)}
    for name in spec.categorical:
        chosen = [rng.permutation(ids)[: FLAGS.batch_size] for _ in range(CHECKED_STEPS)]
        features[name] = np.stack(chosen).astype(np.int64)
    labels = (features["C1"] % 4 == 0).astype(np.float32)[..., np.newaxis]
    return spec, tf.data.Dataset.from_tensor_slices((features, labels))


class Losses(keras.callbacks.Callback):
    """Keeps the mean loss so far, after every step."""

    def __init__(self):
        super().__init__()
        self.values: list[float] = []

    def on_train_batch_end(self, batch, logs=None):
        self.values.append(float(logs["loss"]))


def compare_losses() -> dict:
    """How far the losses of the two systems are apart at worst, relative to the stock one's."""
    spec, batches = batches_of_unique_ids()
    curves = []
    for system in (common.OURS, STOCK):
        losses = Losses()
        make_model(spec, system).fit(
            batches, epochs=3, verbose=0, shuffle=False, callbacks=[losses]
        )
        curves.append(np.array(losses.values))
    return {
        "first_loss": round(float(curves[0][0]), 4),
        "last_loss": round(float(curves[0][-1]), 4),
        "largest_loss_difference": float(np.max(np.abs(curves[0] / curves[1] - 1))),
    }


def seconds_per_step(model: keras.Model, batches: tf.data.Dataset) -> tuple[float, float]:
    """Fits the model once: wall-clock and processor time."""
    wall, processor = time.perf_counter(), time.process_time()
    model.fit(batches, verbose=0, shuffle=False)
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    return wall / FLAGS.steps, processor / FLAGS.steps


def main(argv: list[str]) -> None:
    common.check_arguments(argv)
    losses = compare_losses()
    spec, batches = made_up_batches()
    systems = (common.OURS, STOCK, NO_UPDATE)
    models = {system: make_model(spec, system) for system in systems}
    for system in systems:
        seconds_per_step(models[system], batches)
    rounds = [
        {system: seconds_per_step(models[system], batches) for system in systems}
        for _ in range(FLAGS.rounds)
    ]

    wall, processor = (
        {system: statistics.median(times[system][i] for times in rounds) for system in systems}
        for i in range(2)
    )
    for system in systems:
        common.report(
            {
                "system": system,
                "optimizer": FLAGS.optimizer,
                "batch_size": FLAGS.batch_size,
                "examples_per_second": round(FLAGS.batch_size / wall[system], 1),
                "step_ms": round(1e3 * wall[system], 3),
                "update_ms": round(1e3 * (wall[system] - wall[NO_UPDATE]), 3),
                "cpu_ms": round(1e3 * processor[system], 3),
                "update_cpu_ms": round(1e3 * (processor[system] - processor[NO_UPDATE]), 3),
            }
        )
    ratios, cpu_ratios = ([t[STOCK][i] / t[common.OURS][i] for t in rounds] for i in range(2))
    summary = {
        "benchmark": "local_adagrad",
        "optimizer": FLAGS.optimizer,
        "batch_size": FLAGS.batch_size,
        "steps": FLAGS.steps,
        "rounds": FLAGS.rounds,
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
        "cpu_ratio": round(statistics.median(cpu_ratios), 3),
        # What an optimizer that costs nothing would reach.
        "ratio_bound": round(wall[STOCK] / wall[NO_UPDATE], 3),
        **losses,
    }
    common.report(summary)


if __name__ == "__main__":
    app.run(main)
