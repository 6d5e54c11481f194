"""What the programs of the gallery share: flags, training, and what is expected."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # Warnings and errors of TensorFlow only.

import keras
import numpy as np
import strategy_flags
import tensorflow as tf
from absl import app, flags, logging

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(strategy_flags)  # So that --help has them.
flags.DEFINE_integer("examples", 40_000, "Examples to train on.", lower_bound=1000)
flags.DEFINE_integer("epochs", 3, "How often.", lower_bound=1)
flags.DEFINE_integer("seed", 1, "Of the data and of initial weights.")

_TESTED = 10_000  # Examples that are not trained on.

# Features and labels, the examples one after the other.
Examples = tuple[dict[str, Any], Any]


def run(
    make_model: Callable[[], keras.Model],
    make_examples: Callable[[int, np.random.Generator], Examples],
    figure: str,
    expected: float,
    measure: Callable[[keras.Model, Examples], float] | None = None,
) -> None:
    """Trains a model on the strategy that flags choose, and says how good it is.

    Args:
        make_model: builds and compiles it.
        make_examples: makes so many examples.
        figure: the name of what says how good it is.
        expected: its value with the flags' defaults.
        measure: computes it; None for the model's metric of that name.
    """

    def main(argv: list[str]) -> None:
        if len(argv) > 1:
            raise app.UsageError(f"unexpected arguments: {argv[1:]}")
        strategy_flags.check_flags({})
        rng = np.random.default_rng(FLAGS.seed)
        features, labels = make_examples(FLAGS.examples + _TESTED, rng)
        train, test = (
            tf.nest.map_structure(lambda array, part=part: array[part], (features, labels))
            for part in (slice(0, FLAGS.examples), slice(FLAGS.examples, None))
        )
        batches, test_batches = (
            tf.data.Dataset.from_tensor_slices(part).batch(FLAGS.batch_size)
            for part in (train, test)
        )
        with contextlib.ExitStack() as stack:
            strategy = strategy_flags.make_strategy(stack)
            keras.utils.set_random_seed(FLAGS.seed)
            with strategy.scope() if strategy else contextlib.nullcontext():
                model = make_model()
            model.fit(batches, epochs=FLAGS.epochs, shuffle=False, verbose=2)
            if measure is None:
                value = float(model.evaluate(test_batches, verbose=0, return_dict=True)[figure])
            else:
                value = measure(model, test)
        print(
            f"{figure} {value:.4f} on {_TESTED:,} other examples (with the flags' defaults it is "
            f"about {expected:.2f})"
        )
        strategy_flags.write_figures({"figure": figure, "value": value, "expected": expected})

    logging.set_verbosity(logging.WARNING)
    tf.get_logger().setLevel("WARNING")
    app.run(main)


def drawn(probabilities: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Labels [n, 1] that are 1 with these probabilities."""
    return (rng.random(len(probabilities)) < probabilities)[:, None].astype(np.float32)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """The probabilities of these logits."""
    return 1 / (1 + np.exp(-logits))
