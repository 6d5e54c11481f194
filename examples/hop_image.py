"""Trains a VGG11-style network on images, decentralized: nothing here is about clicks.

    python examples/hop_image.py --workers=4 --topology=ring --steps=40
    python examples/hop_image.py --data_location=cifar-10-batches-bin --workers=8 --epochs=2

With --data_location, a folder with CIFAR-10 in its binary form (data_batch_*.bin and
test_batch.bin: a byte for the label, then 3072 for the picture, in each record). Without,
pictures that are made up: colored stripes of ten directions and widths, with noise.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # Warnings and errors of TensorFlow only.

import keras
import numpy as np
import strategy_flags
import tensorflow as tf
from absl import app, flags, logging

import tf_recsync as recsync

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(strategy_flags)  # So that --help has them.
flags.DEFINE_string("data_location", None, "A folder with CIFAR-10's binary files.")
flags.DEFINE_integer("rows", 4096, "Pictures to make up for training.", lower_bound=1)
flags.DEFINE_integer("epochs", 1, "Passes over the training data.", lower_bound=1)
flags.DEFINE_integer("steps", None, "Steps per epoch. Default: all of the data.", lower_bound=1)
flags.DEFINE_float("width", 0.125, "Channels, as a part of VGG11's.", lower_bound=0.01)
flags.DEFINE_float("learning_rate", 0.05, "Of the parameters.", lower_bound=0)
flags.DEFINE_float("momentum", 0.9, "Of the gradients.", lower_bound=0, upper_bound=1)
flags.DEFINE_float("weight_decay", 1e-4, "Of the parameters, in each step.", lower_bound=0)
flags.DEFINE_integer("seed", 1, "Of initial weights, shuffling and pictures.")
FLAGS.set_default("strategy", "hop")
FLAGS.set_default("workers", 4)
FLAGS.set_default("batch_size", 32)

_SIDE, _CLASSES = 32, 10
_RECORD = 1 + 3 * _SIDE * _SIDE
_VGG11 = (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool")


def read_cifar(pattern: str) -> tuple[np.ndarray, np.ndarray]:
    """Pictures [n, 32, 32, 3], uint8, and labels [n] of CIFAR-10's binary files."""
    files = sorted(pathlib.Path(FLAGS.data_location).glob(pattern))
    if not files:
        raise app.UsageError(f"--data_location={FLAGS.data_location} has no {pattern}")
    records = []
    for path in files:
        content = np.fromfile(path, np.uint8)
        if content.size % _RECORD:
            raise app.UsageError(f"{path}: {content.size} bytes are not records of {_RECORD}")
        records.append(content.reshape(-1, _RECORD))
    records = np.concatenate(records)
    if records[:, 0].max() >= _CLASSES:
        raise app.UsageError(f"--data_location: a label is {records[:, 0].max()}, not 0 to 9")
    return records[:, 1:].reshape(-1, 3, _SIDE, _SIDE).transpose(0, 2, 3, 1), records[:, 0]


def make_up(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The same for stripes; a class has a direction and a width."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, _CLASSES, rows)
    y, x = np.mgrid[:_SIDE, :_SIDE]
    angles = np.pi * (labels % 5) / 5
    waves = np.where(labels < 5, 3.0, 7.0)[:, None, None] / _SIDE
    along = np.cos(angles)[:, None, None] * x + np.sin(angles)[:, None, None] * y
    phase = random.uniform(0, 2 * np.pi, (rows, 1, 1))
    stripes = np.sin(2 * np.pi * waves * along + phase)[..., None]
    colors = random.uniform(0.3, 1.0, (rows, 1, 1, 3))
    pictures = 128 + 60 * stripes * colors + random.normal(0, 40, (rows, _SIDE, _SIDE, 3))
    return np.clip(pictures, 0, 255).astype(np.uint8), labels.astype(np.uint8)


def make_model() -> keras.Model:
    """Builds and compiles the network; under a strategy, call it in its scope."""
    keras.utils.set_random_seed(FLAGS.seed)
    layers = [keras.Input((_SIDE, _SIDE, 3)), keras.layers.Rescaling(1 / 128, offset=-1)]
    for channels in _VGG11:
        if channels == "pool":
            layers.append(keras.layers.MaxPooling2D())
            continue
        filters = max(8, int(channels * FLAGS.width))
        layers.append(keras.layers.Conv2D(filters, 3, padding="same", use_bias=False))
        layers.append(keras.layers.BatchNormalization(momentum=0.9))
        layers.append(keras.layers.ReLU())
    layers += [keras.layers.Flatten(), keras.layers.Dense(_CLASSES, "softmax")]
    model = keras.Sequential(layers)
    model.compile(
        keras.optimizers.SGD(
            FLAGS.learning_rate, momentum=FLAGS.momentum, weight_decay=FLAGS.weight_decay or None
        ),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    strategy_flags.check_flags(strategy_flags.WITHOUT_TABLES)
    if FLAGS["rows"].present and FLAGS.data_location:
        raise app.UsageError("--rows applies only without --data_location")
    if FLAGS.strategy not in ("local", "hop"):
        raise app.UsageError("--strategy must be hop or local: the optimizer is a stock one")
    if FLAGS.data_location:
        (x, y), (x_test, y_test) = read_cifar("data_batch_*.bin"), read_cifar("test_batch.bin")
    else:
        (x, y), (x_test, y_test) = make_up(FLAGS.rows, FLAGS.seed), make_up(1000, FLAGS.seed + 1)
    with contextlib.ExitStack() as stack:
        strategy = strategy_flags.make_strategy(stack)
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = make_model()
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), FLAGS.seed)
        dataset = dataset.batch(FLAGS.batch_size)
        if FLAGS.steps:
            dataset = dataset.repeat()
        start = time.monotonic()
        model.fit(
            dataset,
            epochs=FLAGS.epochs,
            steps_per_epoch=FLAGS.steps,
            callbacks=[recsync.callbacks.HopReport()] if strategy else [],
            shuffle=False,  # The dataset shuffles itself.
        )
        seconds = time.monotonic() - start
        tested = model.evaluate(x_test, y_test, batch_size=250, return_dict=True, verbose=0)
        figures = {
            "strategy": FLAGS.strategy,
            "workers": strategy.cluster.workers if strategy else 1,
            "parameters": int(sum(np.prod(v.shape) for v in model.trainable_variables)),
            "wall_seconds": seconds,
            "accuracy": tested["accuracy"],
            "loss": tested["loss"],
        }
        print(f"\nVGG11-style network of {figures['parameters']:,} parameters, {FLAGS.strategy}")
        print(f"  test accuracy            {figures['accuracy']:.4f}")
        print(f"  seconds                  {seconds:.1f}")
        if strategy is not None:
            figures.update(strategy_flags.hop_figures(strategy.hop_report(model)))
            print(strategy_flags.describe_hop(figures))
        strategy_flags.write_figures(figures)


if __name__ == "__main__":
    logging.set_verbosity(logging.WARNING)
    tf.get_logger().setLevel("WARNING")
    app.run(main)
