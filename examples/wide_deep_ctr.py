"""Trains a Wide & Deep click model, on this machine or on a cluster.

On this machine alone, or on a cluster of servers on it:

    python examples/wide_deep_ctr.py --dataset=synthetic --strategy=local
    python examples/wide_deep_ctr.py --dataset=adult --data_location=DIR --strategy=async \
        --workers=4 --ps=2 --optimizer=swap_adagrad --staleness=inverse_power
    python examples/wide_deep_ctr.py --strategy=gba --workers=4 --ps=2 \
        --global_batch_size=512 --batch_size=128 --staleness_tolerance=2
    python examples/wide_deep_ctr.py --strategy=shadow_easgd --workers=4 --ps=2 --sync_ps=1 \
        --threads=2 --alpha=0.3

On a real cluster, start `python -m tf_recsync.server` on its machines and run
this script, with TF_CONFIG set, as the coordinator (see docs/cluster.md).
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # Warnings and errors of TensorFlow only.

import click_training
import keras
from absl import app, flags
from wide_deep_model import WIDE_VARIABLES, build_wide_deep

import tf_recsync as recsync

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(click_training)  # So that --help has them.
flags.DEFINE_float("linear_learning_rate", 0.1, "Of the wide part.", lower_bound=0)
flags.DEFINE_bool("mean_normalization", False, "Local mean-normalization in the deep part.")
flags.DEFINE_bool("tf", False, "Use stock TensorFlow and Keras only, for comparison (local).")


def check_flags() -> None:
    """Refuses flags that would be ignored."""
    click_training.check_flags()
    if FLAGS.tf and FLAGS.strategy != "local":
        raise app.UsageError("--tf needs --strategy=local: stock Keras has no model.fit on servers")
    if FLAGS.tf and FLAGS.optimizer == "swap_adagrad":
        raise app.UsageError("--tf has no --optimizer=swap_adagrad: it is not part of stock Keras")
    if FLAGS.tf and FLAGS.mean_normalization:
        raise app.UsageError("--tf has no --mean_normalization: it is not part of stock Keras")


def make_optimizer(learning_rate: float) -> keras.optimizers.Optimizer:
    """One optimizer; the wide and the deep part may have different ones."""
    if FLAGS.tf:
        if FLAGS.optimizer == "sgd":
            return keras.optimizers.SGD(learning_rate)
        return keras.optimizers.Adagrad(learning_rate, FLAGS.initial_accumulator_value)
    return click_training.make_optimizer(learning_rate)


def make_model(spec: recsync.data.FeatureSpec) -> keras.Model:
    """Builds and compiles the model; under a strategy, call it in its scope."""
    normalization = recsync.layers.MeanNormalization if FLAGS.mean_normalization else None
    # With --tf, what anyone writes without this package.
    model = build_wide_deep(spec, normalization=normalization, collections=not FLAGS.tf)
    optimizer = make_optimizer(FLAGS.deep_learning_rate)
    if FLAGS.linear_learning_rate != FLAGS.deep_learning_rate:
        module = keras if FLAGS.tf else recsync
        optimizer = module.optimizers.MultiOptimizer(
            keras.optimizers.OptimizerMap(
                optimizer, {WIDE_VARIABLES: make_optimizer(FLAGS.linear_learning_rate)}
            )
        )
    click_training.compile_model(model, optimizer)
    return model


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    check_flags()
    click_training.run("Wide & Deep", make_model)


if __name__ == "__main__":
    click_training.start(main)
