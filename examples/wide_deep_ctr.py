"""Trains a Wide & Deep click model, on this machine or on a cluster.

On this machine alone, or on a cluster of servers on it:

    python examples/wide_deep_ctr.py --dataset=synthetic --strategy=local
    python examples/wide_deep_ctr.py --dataset=adult --data_location=DIR --strategy=async \
        --workers=4 --ps=2 --optimizer=swap_adagrad --staleness=inverse_power

On a real cluster, start `python -m tf_recsync.server` on its machines and run
this script, with TF_CONFIG set, as the coordinator (see docs/cluster.md).
"""

from __future__ import annotations

import contextlib
import json
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # Warnings and errors of TensorFlow only.

import keras
import tensorflow as tf
from absl import app, flags, logging
from wide_deep_model import WIDE_VARIABLES, build_wide_deep

import tf_recsync as recsync

FLAGS = flags.FLAGS
flags.DEFINE_enum("dataset", "synthetic", ["synthetic", "criteo", "adult"], "What to train on.")
flags.DEFINE_string("data_location", None, "criteo: a file, glob or folder; adult: a folder.")
flags.DEFINE_string(
    "test_location", None, "criteo: the test files. Default: the last tenth of the rows."
)
flags.DEFINE_integer("rows", 500_000, "synthetic: the number of training rows.", lower_bound=1)
flags.DEFINE_enum("strategy", "async", ["local", "async"], "How to train.")
flags.DEFINE_integer("workers", 2, "Workers of the local cluster.", lower_bound=1)
flags.DEFINE_integer("ps", 1, "Parameter servers of the local cluster.", lower_bound=1)
flags.DEFINE_integer("epochs", 1, "Passes over the training data.", lower_bound=1)
flags.DEFINE_integer("steps", None, "Steps per epoch. Default: all of the data.", lower_bound=1)
flags.DEFINE_integer("batch_size", 128, "Examples per step.", lower_bound=1)
flags.DEFINE_integer(
    "steps_per_execution", 4, "Steps per call to a worker; more save round trips.", lower_bound=1
)
flags.DEFINE_enum("optimizer", "adagrad", ["adagrad", "swap_adagrad", "sgd"], "The optimizer.")
flags.DEFINE_float("deep_learning_rate", 0.1, "Of the deep part.", lower_bound=0)
flags.DEFINE_float("linear_learning_rate", 0.1, "Of the wide part.", lower_bound=0)
flags.DEFINE_integer("swap_period", 10_000, "swap_adagrad: the period in steps.", lower_bound=1)
flags.DEFINE_float("swap_decay", 0.8, "swap_adagrad: the accumulators' factor per period.")
flags.DEFINE_enum(
    "staleness", "constant", ["constant", "inverse_power"], "async: the weight of stale gradients."
)
flags.DEFINE_float("staleness_power", 2.0, "inverse_power: k.")
flags.DEFINE_float("staleness_baseline", 1.0, "inverse_power: the staleness that counts in full.")
flags.DEFINE_float("update_sensitivity", None, "inverse_power: lambda of the paper's Eq. 6.")
flags.DEFINE_bool("mean_normalization", False, "Local mean-normalization in the deep part.")
flags.DEFINE_float("compute_seconds", None, "async: artificial compute time per step.")
flags.DEFINE_string("output_dir", None, "Gets TensorBoard logs, weights and a SavedModel.")
flags.DEFINE_integer("seed", 1, "Of initial weights, shuffling and synthetic data.")
flags.DEFINE_string(
    "bind_address", None, "With TF_CONFIG: the address that this process's own servers listen on."
)
flags.DEFINE_bool("tf", False, "Use stock TensorFlow and Keras only, for comparison (local).")
flags.DEFINE_string("metrics_json", None, "Gets the final figures.")

# Flags that mean nothing unless another flag has one of some values.
_APPLIES = {
    "data_location": ("dataset", ["criteo", "adult"]),
    "test_location": ("dataset", ["criteo"]),
    "rows": ("dataset", ["synthetic"]),
    "workers": ("strategy", ["async"]),
    "ps": ("strategy", ["async"]),
    "compute_seconds": ("strategy", ["async"]),
    "staleness": ("strategy", ["async"]),
    "staleness_power": ("staleness", ["inverse_power"]),
    "staleness_baseline": ("staleness", ["inverse_power"]),
    "update_sensitivity": ("staleness", ["inverse_power"]),
    "swap_period": ("optimizer", ["swap_adagrad"]),
    "swap_decay": ("optimizer", ["swap_adagrad"]),
}


def check_flags() -> None:
    """Refuses flags that would be ignored."""
    for name, (other, values) in _APPLIES.items():
        if FLAGS[name].present and FLAGS[other].value not in values:
            raise app.UsageError(
                f"--{name} applies only with --{other}={' or '.join(values)}, "
                f"not with --{other}={FLAGS[other].value}"
            )
    if FLAGS.dataset != "synthetic" and not FLAGS.data_location:
        raise app.UsageError(f"--dataset={FLAGS.dataset} needs --data_location")
    if FLAGS.tf and FLAGS.strategy != "local":
        raise app.UsageError("--tf needs --strategy=local: stock Keras has no model.fit on servers")
    if FLAGS.tf and FLAGS.optimizer == "swap_adagrad":
        raise app.UsageError("--tf has no --optimizer=swap_adagrad: it is not part of stock Keras")
    if FLAGS.tf and FLAGS.mean_normalization:
        raise app.UsageError("--tf has no --mean_normalization: it is not part of stock Keras")
    if "TF_CONFIG" in os.environ:
        if FLAGS.strategy == "local":
            raise app.UsageError("--strategy=local can't be used with TF_CONFIG set")
        for name in ("workers", "ps"):
            if FLAGS[name].present:
                raise app.UsageError(f"--{name} can't be used with TF_CONFIG, which names them")
    elif FLAGS.bind_address:
        raise app.UsageError("--bind_address applies only with TF_CONFIG set")


def make_data() -> recsync.data.ClickData:
    """The data set that the flags name."""
    if FLAGS.dataset == "synthetic":
        return recsync.data.Synthetic(FLAGS.rows, seed=FLAGS.seed)
    if FLAGS.dataset == "adult":
        return recsync.data.adult(FLAGS.data_location)
    return recsync.data.Criteo(FLAGS.data_location, test_path=FLAGS.test_location)


def make_optimizer(learning_rate: float) -> keras.optimizers.Optimizer:
    """One optimizer; the wide and the deep part may have different ones."""
    if FLAGS.tf:
        stock = {"adagrad": keras.optimizers.Adagrad, "sgd": keras.optimizers.SGD}
        return stock[FLAGS.optimizer](learning_rate)
    staleness = recsync.staleness.Constant()
    if FLAGS.staleness == "inverse_power":
        staleness = recsync.staleness.InversePower(
            k=FLAGS.staleness_power,
            baseline=FLAGS.staleness_baseline,
            update_sensitivity=FLAGS.update_sensitivity,
        )
    if FLAGS.optimizer == "sgd":
        return recsync.optimizers.SGD(learning_rate, staleness=staleness)
    if FLAGS.optimizer == "adagrad":
        return recsync.optimizers.Adagrad(learning_rate, staleness=staleness)
    swap = recsync.Swap(period=FLAGS.swap_period, decay=FLAGS.swap_decay)
    return recsync.optimizers.SwapAdagrad(learning_rate, swap=swap, staleness=staleness)


def make_model(spec: recsync.data.FeatureSpec) -> keras.Model:
    """Builds and compiles the model; under a strategy, call it in its scope."""
    keras.utils.set_random_seed(FLAGS.seed)
    normalization = recsync.layers.MeanNormalization if FLAGS.mean_normalization else None
    # With --tf, what anyone writes without this package.
    model = build_wide_deep(spec, normalization=normalization, collections=not FLAGS.tf)
    optimizer = make_optimizer(FLAGS.deep_learning_rate)
    if FLAGS.linear_learning_rate != FLAGS.deep_learning_rate:
        optimizer = keras.optimizers.MultiOptimizer(
            keras.optimizers.OptimizerMap(
                optimizer, {WIDE_VARIABLES: make_optimizer(FLAGS.linear_learning_rate)}
            )
        )
    model.compile(
        optimizer=optimizer,
        loss="binary_crossentropy",
        metrics=[
            keras.metrics.AUC(num_thresholds=1000, name="auc"),
            recsync.metrics.NormalizedEntropy(),
        ],
        steps_per_execution=FLAGS.steps_per_execution,
    )
    return model


def make_cluster() -> recsync.Cluster:
    """The cluster in TF_CONFIG, or one of real servers on this machine."""
    if "TF_CONFIG" in os.environ:
        return recsync.cluster_from_tf_config(bind_address=FLAGS.bind_address)
    return recsync.LocalCluster(workers=FLAGS.workers, ps=FLAGS.ps)


def count_steps(optimizer: keras.optimizers.Optimizer) -> int:
    """The steps taken; the parts of a MultiOptimizer count alike."""
    part = getattr(optimizer, "optimizers", [optimizer])[0]
    return int(part.iterations.numpy())


def save(model: keras.Model, data: recsync.data.ClickData) -> None:
    """Writes what later runs and serving need."""
    model.save_weights(os.path.join(FLAGS.output_dir, "model.weights.h5"))
    signature = [data.spec.input_signature()[0]]
    model.export(
        os.path.join(FLAGS.output_dir, "saved_model"), input_signature=signature, verbose=False
    )
    print(f"saved to {FLAGS.output_dir}: model.weights.h5, saved_model, TensorBoard logs")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    check_flags()
    data = make_data()
    with contextlib.ExitStack() as stack:
        strategy = None
        cluster = None
        scope = contextlib.nullcontext()
        if FLAGS.strategy == "async":
            cluster = stack.enter_context(make_cluster())
            strategy = recsync.AsyncStrategy(cluster)
            recsync.testing.set_compute_time(strategy, FLAGS.compute_seconds)
            scope = strategy.scope()
        with scope:
            model = make_model(data.spec)
        train(model, data, strategy, cluster)


def train(model, data, strategy, cluster) -> None:
    """Trains, evaluates and reports."""
    dataset = data.train(FLAGS.batch_size, shuffle=50_000, seed=FLAGS.seed)
    if FLAGS.steps:
        dataset = dataset.repeat()
    callbacks = []
    if strategy is not None:
        callbacks.append(recsync.callbacks.TrainingReport(strategy, FLAGS.output_dir))
    if FLAGS.output_dir:
        callbacks.append(keras.callbacks.TensorBoard(FLAGS.output_dir, write_graph=False))
    start = time.monotonic()
    model.fit(
        dataset,
        epochs=FLAGS.epochs,
        steps_per_epoch=FLAGS.steps,
        callbacks=callbacks,
        shuffle=False,  # The dataset shuffles itself.
    )
    wall_seconds = time.monotonic() - start
    steps = count_steps(model.optimizer)
    examples = steps * FLAGS.batch_size if FLAGS.steps else data.train_rows * FLAGS.epochs
    tested = model.evaluate(data.test(FLAGS.batch_size), return_dict=True, verbose=0)
    staleness = None if strategy is None else strategy.staleness(model)
    figures = {
        "strategy": "stock" if FLAGS.tf else FLAGS.strategy,
        "dataset": FLAGS.dataset,
        "workers": cluster.workers if cluster else 1,
        "ps": cluster.ps if cluster else 0,
        "examples": examples,
        "steps": steps,
        "wall_seconds": wall_seconds,
        "examples_per_second": examples / wall_seconds,
        "auc": tested["auc"],
        "log_loss": tested["loss"],
        "normalized_entropy": tested["normalized_entropy"],
        # Without a cluster every gradient is fresh.
        "staleness_mean": staleness.dense.mean if staleness else 1.0,
        "staleness_p99": staleness.dense.quantile(0.99) if staleness else 1,
        "staleness_max": staleness.dense.max if staleness else 1,
        "row_staleness_mean": staleness.rows.mean if staleness else 1.0,
    }
    report(figures, data)
    if FLAGS.metrics_json:
        with open(FLAGS.metrics_json, "w") as file:
            json.dump(figures, file, indent=2)
            file.write("\n")
    if FLAGS.output_dir:
        save(model, data)


def report(figures: dict, data: recsync.data.ClickData) -> None:
    """Prints the figures for people."""
    print(
        f"\nWide & Deep on {figures['dataset']}, {figures['strategy']}: "
        f"{figures['workers']} workers, {figures['ps']} ps, {figures['steps']} steps"
    )
    best = ""
    if isinstance(data, recsync.data.Synthetic):
        best = f"   (the best possible: {data.best_auc():.4f})"
    print(f"  test AUC                 {figures['auc']:.4f}{best}")
    if best:
        best = f"   (the best possible: {data.best_normalized_entropy():.4f})"
    print(f"  test normalized entropy  {figures['normalized_entropy']:.4f}{best}")
    print(f"  test log loss            {figures['log_loss']:.4f}")
    print(f"  examples per second      {figures['examples_per_second']:,.0f}")
    print(
        f"  staleness                mean {figures['staleness_mean']:.2f}, "
        f"p99 {figures['staleness_p99']}, max {figures['staleness_max']} (dense); "
        f"mean {figures['row_staleness_mean']:.2f} (embedding rows)"
    )


if __name__ == "__main__":
    logging.set_verbosity(logging.WARNING)
    tf.get_logger().setLevel("WARNING")
    app.run(main)
