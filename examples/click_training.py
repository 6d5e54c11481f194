"""Training, testing and reporting of click models; what the programs for them share."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

import keras
import strategy_flags
import tensorflow as tf
from absl import app, flags, logging

import tf_recsync as recsync

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(strategy_flags)  # So that --help has them.
# Files with columns that the schema flags describe, and their readers.
_FILES = {
    "csv": recsync.data.Csv,
    "parquet": recsync.data.Parquet,
    "tfrecord": recsync.data.TfRecord,
}
flags.DEFINE_enum(
    "dataset", "synthetic", ["synthetic", "criteo", "adult", *_FILES], "What to train on."
)
flags.DEFINE_string(
    "data_location",
    None,
    "criteo, csv, parquet, tfrecord: a file, glob or folder; adult: a folder.",
)
flags.DEFINE_string(
    "test_location",
    None,
    "criteo, csv, parquet, tfrecord: the test files. Default: the last tenth of the rows.",
)
flags.DEFINE_integer(
    "hash_buckets",
    100_000,
    "criteo, csv, parquet, tfrecord: the number of ids of each categorical feature, that of a "
    "missing one included.",
    lower_bound=2,
)
flags.DEFINE_string("label", "label", "csv, parquet, tfrecord: the column with the label.")
flags.DEFINE_list("positive", ["1"], "csv, parquet, tfrecord: which of its values mean a click.")
flags.DEFINE_list(
    "numeric",
    [],
    "csv, parquet, tfrecord: the columns of numbers, of which logarithms are taken.",
)
flags.DEFINE_list(
    "categorical", [], "csv, parquet, tfrecord: the columns of categories, at least one."
)
flags.DEFINE_enum(
    "on_error",
    "raise",
    ["raise", "skip"],
    "csv, parquet, tfrecord: what becomes of malformed rows; those skipped are counted in the log.",
)
flags.DEFINE_integer("rows", 500_000, "synthetic: the number of training rows.", lower_bound=1)
flags.DEFINE_integer("test_rows", 100_000, "synthetic: the number of test rows.", lower_bound=1)
flags.DEFINE_list(
    "cardinalities",
    None,
    "synthetic: the number of ids of each categorical feature, like 1000,50,3. Default: those of "
    "26 features like Criteo's. A model of fewer features is built and traced sooner.",
)
flags.DEFINE_integer("epochs", 1, "Passes over the training data.", lower_bound=1)
flags.DEFINE_integer("steps", None, "Steps per epoch. Default: all of the data.", lower_bound=1)
flags.DEFINE_integer(
    "steps_per_execution", 4, "Steps per call to a worker; more save round trips.", lower_bound=1
)
flags.DEFINE_enum("optimizer", "adagrad", ["adagrad", "swap_adagrad", "sgd"], "The optimizer.")
flags.DEFINE_float("deep_learning_rate", 0.1, "Of all but linear parts.", lower_bound=0)
flags.DEFINE_float(
    "initial_accumulator_value",
    1e-5,
    "adagrad, swap_adagrad: what accumulators begin at. Keras's 0.1 holds rows with few clicks.",
    lower_bound=0,
)
flags.DEFINE_integer("swap_period", 10_000, "swap_adagrad: the period in steps.", lower_bound=1)
flags.DEFINE_float("swap_decay", 0.8, "swap_adagrad: the accumulators' factor per period.")
flags.DEFINE_enum(
    "staleness",
    "constant",
    ["constant", "inverse_power"],
    "async, bounded_staleness, shadow_*, fr_*, hop with --ps: the weight of stale gradients.",
)
flags.DEFINE_float("staleness_power", 2.0, "inverse_power: k.")
flags.DEFINE_float("staleness_baseline", 1.0, "inverse_power: the staleness that counts in full.")
flags.DEFINE_float("update_sensitivity", None, "inverse_power: lambda of the paper's Eq. 6.")
flags.DEFINE_string("output_dir", None, "Gets TensorBoard logs, weights and a SavedModel.")
flags.DEFINE_string(
    "publish", None, "Gets versions for inference while the model trains; see docs/operations.md."
)
flags.DEFINE_float(
    "publish_every_seconds", 7200.0, "publish: from one version to the next.", lower_bound=0.001
)
flags.DEFINE_integer("publish_keep", None, "publish: how many versions.", lower_bound=1)
flags.DEFINE_enum(
    "publish_tables",
    "inside",
    ["inside", "apart"],
    "publish: where the tables of embedding collections are: in the model, or in files beside it "
    "that servers write, for recsync.serving.TableReader.",
)
flags.DEFINE_integer(
    "publish_full_every",
    1,
    "publish_tables=apart: every how manyth version is a full one; the others are deltas.",
    lower_bound=1,
)
flags.DEFINE_string(
    "checkpoint",
    None,
    "Gets checkpoints while the model trains; a run that finds some goes on from the latest.",
)
flags.DEFINE_float(
    "checkpoint_every_seconds", 600.0, "checkpoint: from one to the next.", lower_bound=0.001
)
flags.DEFINE_string(
    "restore_from",
    None,
    "Weights and training state to go on from: the --output_dir of an earlier run, on whatever "
    "strategy.",
)
flags.DEFINE_integer("seed", 1, "Of initial weights, shuffling and synthetic data.")

# Flags that mean nothing unless another flag has one of some values.
_APPLIES = {
    "data_location": ("dataset", ["criteo", "adult", *_FILES]),
    "test_location": ("dataset", ["criteo", *_FILES]),
    "hash_buckets": ("dataset", ["criteo", *_FILES]),
    **{
        name: ("dataset", [*_FILES])
        for name in ("label", "positive", "numeric", "categorical", "on_error")
    },
    "rows": ("dataset", ["synthetic"]),
    "test_rows": ("dataset", ["synthetic"]),
    "cardinalities": ("dataset", ["synthetic"]),
    "staleness": ("strategy", ["async", "bounded_staleness", "hop", *strategy_flags.WITH_COPIES]),
    "staleness_power": ("staleness", ["inverse_power"]),
    "staleness_baseline": ("staleness", ["inverse_power"]),
    "update_sensitivity": ("staleness", ["inverse_power"]),
    "initial_accumulator_value": ("optimizer", ["adagrad", "swap_adagrad"]),
    "swap_period": ("optimizer", ["swap_adagrad"]),
    "swap_decay": ("optimizer", ["swap_adagrad"]),
    "publish_full_every": ("publish_tables", ["apart"]),
}
# Flags that mean nothing without another one.
_NEEDS = {
    "publish_every_seconds": "publish",
    "publish_keep": "publish",
    "publish_tables": "publish",
    "checkpoint_every_seconds": "checkpoint",
}
_WEIGHTS = "model.weights.h5"


def check_flags() -> None:
    """Refuses flags that would be ignored."""
    strategy_flags.check_flags(_APPLIES)
    if FLAGS.strategy == "hierarchical":
        by_version = ["hogwild", "async", "bounded_staleness"]
        strategy_flags.check_applies({"staleness": ("aggregation", by_version)})
    for name, needed in _NEEDS.items():
        if FLAGS[name].present and not FLAGS[needed].value:
            raise app.UsageError(f"--{name} applies only with --{needed}")
    if FLAGS.checkpoint and FLAGS.restore_from:
        raise app.UsageError("--restore_from can't be used with --checkpoint, which restores")
    is_without_ps = not FLAGS["ps"].present and "TF_CONFIG" not in os.environ
    if FLAGS.strategy == "hop" and FLAGS["staleness"].present and is_without_ps:
        raise app.UsageError("--staleness applies with --strategy=hop only to tables on --ps")
    if FLAGS.dataset != "synthetic" and not FLAGS.data_location:
        raise app.UsageError(f"--dataset={FLAGS.dataset} needs --data_location")
    if FLAGS.dataset in _FILES and not FLAGS.categorical:
        raise app.UsageError(f"--dataset={FLAGS.dataset} needs --categorical, for the tables")
    if FLAGS.restore_from and not os.path.exists(os.path.join(FLAGS.restore_from, _WEIGHTS)):
        raise app.UsageError(f"--restore_from={FLAGS.restore_from} has no {_WEIGHTS}")
    with strategy_flags.usage_errors():
        make_staleness()
        make_swap()
        _cardinalities()
    strategy_flags.prepare_output_dir()


def _cardinalities() -> list[int] | None:
    """Those that the flag names."""
    if FLAGS.cardinalities is None:
        return None
    if not all(size.isdecimal() and int(size) for size in FLAGS.cardinalities or [""]):
        raise ValueError(
            f"--cardinalities must be integers of at least 1, not {','.join(FLAGS.cardinalities)}"
        )
    return [int(size) for size in FLAGS.cardinalities]


def make_data() -> recsync.data.ClickData:
    """The data set that the flags name."""
    if FLAGS.dataset == "synthetic":
        return recsync.data.Synthetic(
            FLAGS.rows,
            test_rows=FLAGS.test_rows,
            cardinalities=_cardinalities(),
            seed=FLAGS.seed,
        )
    if FLAGS.dataset == "adult":
        return recsync.data.adult(FLAGS.data_location)
    if FLAGS.dataset in _FILES:
        schema = recsync.data.Schema(
            label=FLAGS.label,
            positive=tuple(FLAGS.positive),
            numeric=tuple(recsync.data.NumericColumn(name, log1p=True) for name in FLAGS.numeric),
            categorical=tuple(
                recsync.data.CategoricalColumn(name, hash_buckets=FLAGS.hash_buckets)
                for name in FLAGS.categorical
            ),
        )
        return _FILES[FLAGS.dataset](
            FLAGS.data_location, schema, test_path=FLAGS.test_location, on_error=FLAGS.on_error
        )
    return recsync.data.Criteo(
        FLAGS.data_location, hash_buckets=FLAGS.hash_buckets, test_path=FLAGS.test_location
    )


def make_staleness() -> recsync.staleness.Policy:
    """The weight of stale gradients."""
    if FLAGS.staleness == "constant":
        return recsync.staleness.Constant()
    return recsync.staleness.InversePower(
        k=FLAGS.staleness_power,
        baseline=FLAGS.staleness_baseline,
        update_sensitivity=FLAGS.update_sensitivity,
    )


def make_swap() -> recsync.Swap:
    """The decay of swap_adagrad's accumulators."""
    return recsync.Swap(period=FLAGS.swap_period, decay=FLAGS.swap_decay)


def make_optimizer(learning_rate: float) -> keras.optimizers.Optimizer:
    """One optimizer; parts of a model may have different ones."""
    staleness = make_staleness()
    if FLAGS.optimizer == "sgd":
        return recsync.optimizers.SGD(learning_rate, staleness=staleness)
    options = {
        "initial_accumulator_value": FLAGS.initial_accumulator_value,
        "staleness": staleness,
    }
    if FLAGS.optimizer == "adagrad":
        return recsync.optimizers.Adagrad(learning_rate, **options)
    return recsync.optimizers.SwapAdagrad(learning_rate, swap=make_swap(), **options)


def compile_model(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
    """Compiles a model from features to the click probability."""
    model.compile(
        optimizer=optimizer,
        loss="binary_crossentropy",
        metrics=[
            recsync.metrics.AUC(),
            recsync.metrics.NormalizedEntropy(),
        ],
        steps_per_execution=FLAGS.steps_per_execution,
    )


def uses_package(model: keras.Model) -> bool:
    """Whether a model trains with this package, or with stock Keras for comparison."""
    part = getattr(model.optimizer, "optimizers", [model.optimizer])[0]
    return type(part).__module__.startswith("tf_recsync")


def count_steps(optimizer: keras.optimizers.Optimizer) -> int:
    """The steps taken; the parts of a MultiOptimizer count alike."""
    part = getattr(optimizer, "optimizers", [optimizer])[0]
    return int(part.iterations.numpy())


def save(model: keras.Model, data: recsync.data.ClickData) -> None:
    """Writes what later runs and serving need."""
    model.save_weights(os.path.join(FLAGS.output_dir, _WEIGHTS))
    signature = [data.spec.input_signature()[0]]
    model.export(
        os.path.join(FLAGS.output_dir, "saved_model"), input_signature=signature, verbose=False
    )
    print(f"saved to {FLAGS.output_dir}: {_WEIGHTS}, saved_model, TensorBoard logs")


def run(title: str, make_model: Callable[[recsync.data.FeatureSpec], keras.Model]) -> None:
    """Trains a model as the flags say.

    Args:
        title: the model's name, for the report.
        make_model: builds and compiles it; called in the strategy's scope.
    """
    data = make_data()
    with contextlib.ExitStack() as stack:
        strategy = strategy_flags.make_strategy(stack)
        with strategy.scope() if strategy else contextlib.nullcontext():
            keras.utils.set_random_seed(FLAGS.seed)
            model = make_model(data.spec)
            if FLAGS.restore_from:
                model.optimizer.build(model.trainable_variables)
                model.load_weights(os.path.join(FLAGS.restore_from, _WEIGHTS))
        train(title, model, data, strategy)


class Counts(keras.callbacks.Callback):
    """What this process trains, without what is in the checkpoint from which training goes on.

    It stands behind the callback that restores that.

    Attributes:
        steps_before: those that the model had been trained for.
        skipped: the batches of the first epoch that were done then.
        epochs: those that were trained in, the first one perhaps in part.
    """

    def __init__(self):
        super().__init__()
        self.steps_before = self.skipped = self.epochs = 0

    def on_train_begin(self, logs=None):
        self.steps_before = count_steps(self.model.optimizer)
        # Without a strategy of this package an epoch begins anew.
        self.skipped = getattr(self.model.train_function, "skipped_batches", 0)

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs += 1

    def of_data(self, rows: int) -> tuple[int, int]:
        """Batches and examples, as the flags say how many an epoch has.

        Args:
            rows: of the data.
        """
        batches = -(-rows // FLAGS.batch_size) * self.epochs
        examples = rows * self.epochs
        if FLAGS.steps:
            batches = FLAGS.steps * self.epochs
            examples = batches * FLAGS.batch_size
        skipped = self.skipped if self.epochs else 0
        return batches - skipped, examples - skipped * FLAGS.batch_size


def train(title, model, data, strategy) -> None:
    """Trains, evaluates and reports."""
    dataset = data.train(FLAGS.batch_size, shuffle=50_000, seed=FLAGS.seed)
    if FLAGS.steps:
        dataset = dataset.repeat()
    callbacks = []
    is_hop = FLAGS.strategy == "hop"
    is_shadow = FLAGS.strategy in strategy_flags.WITH_COPIES
    if is_hop:
        callbacks.append(recsync.callbacks.HopReport(FLAGS.output_dir))
    elif is_shadow:
        callbacks.append(recsync.callbacks.ShadowReport(FLAGS.output_dir))
    elif strategy is not None:
        callbacks.append(recsync.callbacks.TrainingReport(FLAGS.output_dir))
    if FLAGS.output_dir:
        callbacks.append(keras.callbacks.TensorBoard(FLAGS.output_dir, write_graph=False))
    if FLAGS.publish:
        callbacks.append(
            recsync.callbacks.Publish(
                FLAGS.publish,
                FLAGS.publish_every_seconds,
                keep=FLAGS.publish_keep,
                input_signature=data.spec.input_signature()[0],
                tables=FLAGS.publish_tables,
                full_every=FLAGS.publish_full_every,
            )
        )
    saving = None
    if FLAGS.checkpoint:
        saving = recsync.callbacks.Checkpoint(
            FLAGS.checkpoint, every_seconds=FLAGS.checkpoint_every_seconds
        )
        callbacks.append(saving)
    if strategy is not None:
        callbacks.append(recsync.callbacks.Status())
    counts = Counts()
    callbacks.append(counts)
    start = time.monotonic()
    model.fit(
        dataset,
        epochs=FLAGS.epochs,
        steps_per_epoch=FLAGS.steps,
        callbacks=callbacks,
        shuffle=False,  # The dataset shuffles itself.
    )
    wall_seconds = time.monotonic() - start
    if FLAGS.output_dir:
        save(model, data)  # Before anything else can fail.
    global_steps = count_steps(model.optimizer) - counts.steps_before
    if is_shadow:
        # The optimizer's count is that of one trainer, or group of them.
        global_steps = strategy.sync_report(model).steps
    batches, examples = counts.of_data(data.train_rows)
    tested = model.evaluate(data.test(FLAGS.batch_size), return_dict=True, verbose=0)
    staleness = None if strategy is None else strategy.staleness(model)
    # Where workers have their own parameters no gradient is stale, but for rows on servers.
    dense = None if is_hop or staleness is None else staleness.dense
    rows = None if staleness is None or (is_hop and not strategy.embedding_ps) else staleness.rows
    figures = {
        "strategy": FLAGS.strategy if uses_package(model) else "stock",
        "dataset": FLAGS.dataset,
        "workers": strategy.cluster.workers if strategy else 1,
        "ps": strategy.cluster.ps if strategy else 0,
        "examples": examples,
        "batches": batches,
        "steps": global_steps,
        "wall_seconds": wall_seconds,
        "examples_per_second": examples / wall_seconds,
        "auc": tested["auc"],
        "log_loss": tested["loss"],
        "normalized_entropy": tested["normalized_entropy"],
        # Without a cluster every gradient is fresh.
        "staleness_mean": dense.mean if dense else 1.0,
        "staleness_p99": dense.quantile(0.99) if dense else 1,
        "staleness_max": dense.max if dense else 1,
        "row_staleness_mean": rows.mean if rows else 1.0,
    }
    if strategy is not None:
        losses = strategy.losses(model)
        waits = strategy.data_wait(model)
        figures["data_wait"] = sum(waits) / len(waits) / wall_seconds
        figures.update(
            lost_workers=losses.workers, lost_steps=losses.steps, lost_batches=losses.batches
        )
    if saving is not None:
        figures.update(
            checkpoints=len(saving.saved),
            checkpoint_pause=max((s.pause_seconds for s in saving.saved), default=0.0),
            recoveries=saving.recoveries,
        )
    copied = is_hop or is_shadow
    pushes = strategy.aggregation(model) if strategy and not copied else None
    if pushes is not None:
        figures.update(
            included=pushes.included,
            excluded=pushes.excluded,
            late=pushes.late,
            lost_tokens=pushes.lost,
            reissued_tokens=pushes.reissued,
            token_age_mean=pushes.age_mean,
            token_age_max=pushes.age_max,
        )
    if is_hop:
        figures.update(strategy_flags.hop_figures(strategy.hop_report(model)))
    if is_shadow:
        figures.update(strategy_flags.shadow_figures(strategy, model))
    report(title, figures, data)
    strategy_flags.write_figures(figures)


def report(title: str, figures: dict, data: recsync.data.ClickData) -> None:
    """Prints the figures for people."""
    copied = "iterations" in figures or "syncs" in figures
    print(
        f"\n{title} on {figures['dataset']}, {figures['strategy']}: "
        f"{figures['workers']} workers, {figures['ps']} ps; {figures['batches']:,} batches, "
        f"{figures['steps']:,} {'iterations' if copied else 'global steps'}"
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
    if "data_wait" in figures:
        print(f"  waiting for data         {100 * figures['data_wait']:.1f} % of the workers' time")
    if figures.get("lost_workers"):
        print(
            f"  lost                     workers {figures['lost_workers']} times, with "
            f"{figures['lost_steps']:,} steps and {figures['lost_batches']:,} batches"
        )
    if "checkpoints" in figures:
        print(
            f"  checkpoints              {figures['checkpoints']} in {FLAGS.checkpoint}; training "
            f"paused for {figures['checkpoint_pause']:.2f} s at most"
        )
    if "iterations" in figures:
        print(strategy_flags.describe_hop(figures))
    if "syncs" in figures:
        print(strategy_flags.describe_shadow(figures))
    if figures.get("included"):
        print(
            f"  pushes on all servers    {figures['included']:,} applied, "
            f"{figures['excluded']:,} excluded, {figures['late']:,} dropped; "
            f"age mean {figures['token_age_mean']:.2f}, max {figures['token_age_max']}"
        )


def start(main: Callable[[list[str]], None]) -> None:
    """Runs a program with little noise in its log."""
    logging.set_verbosity(logging.WARNING)
    tf.get_logger().setLevel("WARNING")
    app.run(main)
