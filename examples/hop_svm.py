r"""Trains a linear classifier with log loss, decentralized: the SVM of the Hop paper.

    python examples/hop_svm.py --data_location=DATA --workers=8 --topology=ring_based \
        --backup_workers=1 --max_iteration_gap=4 --epochs=3

DATA is a file in LIBSVM's format, or a folder with a training file (`NAME.train`, `NAME.tr`
or the only other one) and a test file (`NAME.test` or `NAME.t`), plain or gzip. Without a test
file, the figures are those of the training data, and are called so.
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
flags.DEFINE_string("data_location", None, "A LIBSVM file, or a folder with two.", required=True)
flags.DEFINE_string("test_location", None, "The test file, if data_location is a file.")
flags.DEFINE_integer("epochs", 1, "Passes over the training data.", lower_bound=1)
flags.DEFINE_integer("steps_per_execution", 4, "Steps per call to a worker.", lower_bound=1)
flags.DEFINE_float("learning_rate", 0.1, "Of the parameters.", lower_bound=0)
flags.DEFINE_float("momentum", 0.9, "Of the gradients.", lower_bound=0, upper_bound=1)
flags.DEFINE_float("weight_decay", 1e-7, "Times half the squares, added to the loss.")
flags.DEFINE_string("output_dir", None, "Gets TensorBoard logs, weights and a timeline.")
flags.DEFINE_integer("seed", 1, "Of initial weights and shuffling.")
FLAGS.set_default("strategy", "hop")
FLAGS.set_default("workers", 8)


def find_files() -> tuple[str, str | None]:
    """The training and the test file, if there is one."""
    is_folder = os.path.isdir(FLAGS.data_location)
    if FLAGS.test_location and is_folder:
        raise app.UsageError(
            f"--test_location applies only if --data_location is a file, not the folder "
            f"{FLAGS.data_location}, in which both are looked for"
        )
    if FLAGS.test_location or os.path.isfile(FLAGS.data_location):
        return FLAGS.data_location, FLAGS.test_location
    if not is_folder:
        raise app.UsageError(f"--data_location={FLAGS.data_location} is no file and no folder")
    names = sorted(p for p in pathlib.Path(FLAGS.data_location).iterdir() if p.is_file())
    tests = [p for p in names if p.name.removesuffix(".gz").endswith((".test", ".t"))]
    trains = [p for p in names if p.name.removesuffix(".gz").endswith((".train", ".tr"))]
    trains = trains or [p for p in names if p not in tests]
    if len(trains) != 1 or len(tests) != 1:
        raise app.UsageError(
            f"--data_location={FLAGS.data_location} must have one training file and one test "
            f"file, not {[p.name for p in names]}; or name the two files with --data_location "
            "and --test_location"
        )
    return str(trains[0]), str(tests[0])


def make_model(features: int) -> keras.Model:
    """Builds and compiles the classifier; under a strategy, call it in its scope."""
    keras.utils.set_random_seed(FLAGS.seed)
    regularizer = keras.regularizers.L2(FLAGS.weight_decay / 2) if FLAGS.weight_decay else None
    model = keras.Sequential(
        [
            keras.Input((features,)),
            keras.layers.Dense(1, "sigmoid", kernel_regularizer=regularizer, name="svm"),
        ]
    )
    model.compile(
        keras.optimizers.SGD(FLAGS.learning_rate, momentum=FLAGS.momentum),
        "binary_crossentropy",
        metrics=["accuracy"],
        steps_per_execution=FLAGS.steps_per_execution,
    )
    return model


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    strategy_flags.check_flags(strategy_flags.WITHOUT_TABLES)
    if FLAGS.strategy not in ("local", "hop"):
        raise app.UsageError("--strategy must be hop or local: the optimizer is a stock one")
    strategy_flags.prepare_output_dir()
    train_file, test_file = find_files()
    x, y = recsync.data.load_libsvm(train_file)
    x_test, y_test = recsync.data.load_libsvm(test_file or train_file)
    # The highest features may be missing in one of the files.
    features = max(x.shape[1], x_test.shape[1])
    x, x_test = (np.pad(part, ((0, 0), (0, features - part.shape[1]))) for part in (x, x_test))
    with contextlib.ExitStack() as stack:
        strategy = strategy_flags.make_strategy(stack)
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = make_model(features)
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), FLAGS.seed)
        callbacks = []
        if FLAGS.output_dir:
            callbacks.append(keras.callbacks.TensorBoard(FLAGS.output_dir, write_graph=False))
        if strategy is not None:
            callbacks.insert(0, recsync.callbacks.HopReport(FLAGS.output_dir))
            if FLAGS.output_dir:
                path = os.path.join(FLAGS.output_dir, "timeline.json")
                callbacks.append(recsync.callbacks.Timeline(path))
        start = time.monotonic()
        model.fit(
            dataset.batch(FLAGS.batch_size),
            epochs=FLAGS.epochs,
            callbacks=callbacks,
            shuffle=False,  # The dataset shuffles itself.
        )
        seconds = time.monotonic() - start
        if FLAGS.output_dir:  # Before anything else can fail.
            model.save_weights(os.path.join(FLAGS.output_dir, "model.weights.h5"))
            timeline = ", timeline.json" if strategy else ""
            print(f"saved to {FLAGS.output_dir}: weights, TensorBoard logs{timeline}")
        tested = model.evaluate(x_test, y_test, batch_size=1024, return_dict=True, verbose=0)
        figures = {
            "strategy": FLAGS.strategy,
            "workers": strategy.cluster.workers if strategy else 1,
            "examples": len(x) * FLAGS.epochs,
            "wall_seconds": seconds,
            "examples_per_second": len(x) * FLAGS.epochs / seconds,
            "tested_on": "test data" if test_file else "training data",
            "accuracy": tested["accuracy"],
            "log_loss": tested["loss"],
        }
        if strategy is not None:
            figures["topology"] = strategy.topology.name
            figures["spectral_gap"] = strategy.topology.spectral_gap
            figures.update(strategy_flags.hop_figures(strategy.hop_report(model)))
        report(figures)
        strategy_flags.write_figures(figures)


def report(figures: dict) -> None:
    """Prints the figures for people."""
    how = figures["strategy"]
    if "topology" in figures:
        how += f", {figures['topology']} (spectral gap {figures['spectral_gap']:.3f})"
    print(f"\nLinear classifier with log loss, {how}: {figures['workers']} workers")
    of = figures["tested_on"].removesuffix(" data")
    print(f"  {f'{of} accuracy':<25}{figures['accuracy']:.4f}")
    print(f"  {f'{of} log loss':<25}{figures['log_loss']:.4f}")
    print(f"  examples per second      {figures['examples_per_second']:,.0f}")
    if "iterations" in figures:
        print(strategy_flags.describe_hop(figures))


if __name__ == "__main__":
    logging.set_verbosity(logging.WARNING)
    tf.get_logger().setLevel("WARNING")
    app.run(main)
