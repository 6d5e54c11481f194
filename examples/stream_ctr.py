"""Trains a click model on an endless stream of raw ids, in tables that keep the useful ones.

The stream is made up. Its ids are strings that nobody has numbered; few are frequent and most are
rare. New ones appear all the time, and old ones fade. A table has room for `--rows` of them.

    python examples/stream_ctr.py --rows=20000 --epochs=5
    python examples/stream_ctr.py --rows=20000 --min_count=3 --policy=least_frequent \
        --half_life=2000 --strategy=gba --workers=4 --ps=2 --global_batch_size=1024 --minutes=10

After each epoch it says what became of the keys, how well the model predicts what comes next in
the stream, and what memory the parameter servers have. At the end it exports the model, and scores
some raw ids with what it has exported.

The same stream with ids that are numbered, for comparison, in a table with a row for each that the
steps of training and tests have, which is why they have to be known:

    python examples/stream_ctr.py --ids=numbers --rows=60000

On a real cluster, start `python -m tf_recsync.server` on its machines and run this script, with
TF_CONFIG set, as the coordinator (see docs/cluster.md).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import tempfile
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # Warnings and errors of TensorFlow only.

import keras
import numpy as np
import strategy_flags
import tensorflow as tf
from absl import app, flags, logging

import tf_recsync as recsync
from tf_recsync.layers import Admission, EmbeddingCollection, Eviction, FeatureConfig, TableConfig

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(strategy_flags)  # So that --help has them.
flags.DEFINE_enum(
    "ids",
    "strings",
    ["strings", "numbers"],
    "Whether ids are raw strings, in tables with keys, or the numbers of rows.",
)
flags.DEFINE_integer("rows", 20_000, "Rows of each of the two tables.", lower_bound=2)
flags.DEFINE_integer("min_count", 1, "How often an id must come to get a row.", lower_bound=1)
flags.DEFINE_enum(
    "policy",
    "least_recent",
    ["least_recent", "least_frequent"],
    "Which id loses its row to another one when a table is full.",
)
flags.DEFINE_integer(
    "half_life", None, "least_frequent: steps after which lookups count half.", lower_bound=1
)
flags.DEFINE_integer(
    "max_idle", None, "Steps without a lookup after which an id is forgotten.", lower_bound=1
)
flags.DEFINE_enum(
    "unknown", "zeros", ["zeros", "trained", "mean"], "What ids without a row are looked up as."
)
flags.DEFINE_integer(
    "active_ids", 20_000, "How many ids each feature has at a time.", lower_bound=2
)
flags.DEFINE_float(
    "new_ids_per_step", 10.0, "How many of these are replaced in a step.", lower_bound=0.001
)
flags.DEFINE_integer("epochs", None, "How many epochs. Default: 3.", lower_bound=1)
flags.DEFINE_float(
    "minutes", None, "Or for how long; the epoch in progress is finished.", lower_bound=0
)
flags.DEFINE_integer("steps_per_epoch", 500, "Batches from a report to the next.", lower_bound=1)
flags.DEFINE_integer(
    "test_steps", 200, "Batches that follow, to test on after each epoch.", lower_bound=1
)
flags.DEFINE_integer(
    "steps_per_execution", 4, "Steps per call to a worker; more save round trips.", lower_bound=1
)
flags.DEFINE_integer("dimension", 8, "Of the ids' vectors.", lower_bound=1)
flags.DEFINE_float("learning_rate", 0.1, "Of Adagrad.", lower_bound=0)
flags.DEFINE_string("output_dir", None, "Gets TensorBoard logs and the exported model.")
flags.DEFINE_integer("seed", 1, "Of the stream and of initial weights.")

# Flags that mean nothing unless another flag has one of some values.
_APPLIES = {
    **{
        name: ("ids", ["strings"])
        for name in ("min_count", "policy", "half_life", "max_idle", "unknown")
    },
    "minutes": ("ids", ["strings"]),  # There are new ids all the time.
}
_FEATURES = {"user": "users", "ad": "ads"}  # Each with its table.
_SCORED = 20  # Examples whose scores by the exported model are reported.


class Stream:
    """Clicks of users on ads, without an end, of which every part can be made by itself.

    A feature has a number of places, whose frequencies are those of Zipf's law. Each place has one
    id after the other: an id gets more frequent for the time that the stream takes to replace all
    ids once, and less frequent for as long. What makes people click is a hidden number of each id.

    Args:
        batch_size: examples in a step.
        active_ids: places of a feature.
        new_ids_per_step: how many ids are new in each step, on average.
        are_strings: whether ids are strings, or numbers from 0.
        seed: of everything.
    """

    def __init__(
        self,
        batch_size: int,
        active_ids: int,
        new_ids_per_step: float,
        are_strings: bool,
        seed: int,
    ):
        self._batch_size, self._active_ids = batch_size, active_ids
        self._life = active_ids / new_ids_per_step
        self._are_strings, self._seed = are_strings, seed

    def most_ids(self, steps: int) -> int:
        """What the numbers of all ids in the first steps are below."""
        # As `_ids` has them: of all places, ids before those that the last step has at most.
        most_before = math.ceil((steps - 1) / self._life) + 1
        return (most_before + 1) * self._active_ids

    def batches(self, begin: int = 0, steps: int | None = None) -> tf.data.Dataset:
        """Batches of features and labels from a step on; None for `steps`: without an end."""
        return self._mapped(begin, steps, lambda features, label, _: (features, label))

    def best_auc(self, begin: int, steps: int) -> float:
        """The AUC of who knows the hidden numbers, on these batches."""
        pairs = list(self._mapped(begin, steps, lambda _, label, truth: (label, truth)))
        labels, truths = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
        return recsync.metrics.exact_auc(labels, truths)

    def _mapped(self, begin: int, steps: int | None, choose: Any) -> tf.data.Dataset:
        numbers = tf.data.Dataset.counter(begin)
        if steps is not None:
            numbers = numbers.take(steps)
        return numbers.map(lambda step: choose(*self._batch(step)), tf.data.AUTOTUNE)

    def _batch(self, step: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor, tf.Tensor]:
        """Features, labels and the probability of a click, for a step of any program."""
        features, logit = {}, tf.fill([self._batch_size], -1.0)
        for number, name in enumerate(_FEATURES):
            ids = self._ids(step, number)
            strings = tf.strings.join([f"{name}-", tf.strings.as_string(ids)])
            features[name] = strings if self._are_strings else ids
            hidden = tf.strings.to_hash_bucket_strong(strings, 1 << 20, key=[self._seed, number])
            logit += 3.0 * (tf.cast(hidden, tf.float32) / (1 << 19) - 1.0)
        truth = tf.sigmoid(logit)
        drawn = self._uniform(step, 2 * len(_FEATURES), tf.float32)
        return features, tf.cast(drawn < truth, tf.float32), truth

    def _ids(self, step: tf.Tensor, number: int) -> tf.Tensor:
        """The ids of a feature in a step's examples: int64 [batch]."""
        # float64, as steps are many.
        places = tf.floor(self._active_ids ** self._uniform(step, 2 * number, tf.float64)) - 1.0
        # An id is looked up as of a moment in the time that it takes to replace all ids.
        moment = tf.cast(step, tf.float64) / self._life - self._uniform(
            step, 2 * number + 1, tf.float64
        )
        # Places have new ids at different times.
        phase = places * 0.6180339887498949
        ids_before = tf.floor(moment + phase - tf.floor(phase)) + 1.0
        return tf.cast(ids_before * self._active_ids + places, tf.int64)

    def _uniform(self, step: tf.Tensor, number: int, dtype: tf.DType) -> tf.Tensor:
        """Random numbers from 0 to 1, for each example of a step."""
        seed = tf.stack([tf.constant(self._seed * 64 + number, tf.int64), step])
        return tf.random.stateless_uniform([self._batch_size], seed, dtype=dtype)


class Report(keras.callbacks.Callback):
    """After each epoch, prints what became of the keys; ends training when its time is over.

    Args:
        stream: what is trained on.
        strategy: with which; None for none.

    Attributes:
        epochs: the figures of all epochs.
    """

    def __init__(self, stream: Stream, strategy: Any):
        super().__init__()
        self._stream, self._strategy = stream, strategy
        self._begin = time.monotonic()
        self.epochs: list[dict[str, Any]] = []

    def on_epoch_end(self, epoch, logs=None):
        del logs
        begin = (epoch + 1) * FLAGS.steps_per_epoch
        tested = self.model.evaluate(
            self._stream.batches(begin, FLAGS.test_steps), return_dict=True, verbose=0
        )
        memory = self._strategy.memory(self.model) if self._strategy else []
        figures = {
            "epoch": epoch + 1,
            "steps": begin,
            "seconds": time.monotonic() - self._begin,
            "auc": tested["auc"],
            "best_auc": self._stream.best_auc(begin, FLAGS.test_steps),
            "tables": {n: dataclasses.asdict(counts) for n, counts in self._tables().items()},
            "memory": [{**dataclasses.asdict(own), "total": own.total} for own in memory],
        }
        self.epochs.append(figures)
        print(
            f"\nepoch {figures['epoch']}, {begin:,} steps: AUC {figures['auc']:.4f} on what comes "
            f"next   (the best possible: {figures['best_auc']:.4f})"
        )
        for name, counts in figures["tables"].items():
            print(
                f"  {name}: {counts['used']:,} of {counts['capacity']:,} rows used; "
                f"{counts['admitted']:,} admitted, {counts['refused']:,} lookups refused, "
                f"{counts['evicted']:,} evicted, {counts['expired']:,} expired, "
                f"{counts['unknown']:,} lookups unknown in tests"
            )
        for own in memory:
            if own.job == "ps":
                print(f"  {own}")
        if FLAGS.minutes is not None and figures["seconds"] >= 60 * FLAGS.minutes:
            self.model.stop_training = True

    def _tables(self) -> dict[str, recsync.layers.KeyCounts]:
        if self._strategy is not None:
            return self._strategy.tables(self.model)
        layer = self.model.get_layer("embeddings")
        return {f"{layer.name}/{name}": counts for name, counts in layer.key_counts().items()}


def check_flags() -> None:
    """Refuses flags that would be ignored."""
    strategy_flags.check_flags(_APPLIES)
    if FLAGS.epochs is not None and FLAGS.minutes is not None:
        raise app.UsageError("--epochs and --minutes exclude each other")
    is_without_ps = not FLAGS["ps"].present and "TF_CONFIG" not in os.environ
    if FLAGS.strategy == "hop" and is_without_ps:
        raise app.UsageError("--strategy=hop needs --ps, where the tables are")
    if FLAGS.ids == "numbers":
        steps = epochs() * FLAGS.steps_per_epoch + FLAGS.test_steps
        most = make_stream().most_ids(steps)
        if FLAGS.rows < most:
            raise app.UsageError(
                f"--rows must be at least {most} with --ids=numbers, as the ids of {steps} steps "
                f"go up to {most - 1}, not {FLAGS.rows}"
            )
    with strategy_flags.usage_errors():
        make_table("users")
    strategy_flags.prepare_output_dir()


def epochs() -> int:
    """For how many epochs the model trains, if it does not end before."""
    return FLAGS.epochs or (3 if FLAGS.minutes is None else 1_000_000_000)


def make_stream() -> Stream:
    """The stream that the flags describe."""
    return Stream(
        FLAGS.batch_size,
        FLAGS.active_ids,
        FLAGS.new_ids_per_step,
        are_strings=FLAGS.ids == "strings",
        seed=FLAGS.seed,
    )


def make_table(name: str) -> TableConfig:
    """One of the tables."""
    if FLAGS.ids == "numbers":
        return TableConfig(name, FLAGS.rows, FLAGS.dimension)
    return TableConfig(
        name,
        FLAGS.rows,
        FLAGS.dimension,
        keys="any",
        admission=Admission(FLAGS.min_count),
        eviction=Eviction(FLAGS.policy, half_life=FLAGS.half_life, max_idle=FLAGS.max_idle),
        unknown=FLAGS.unknown,
    )


def make_model() -> keras.Model:
    """Builds and compiles the model; under a strategy, call it in its scope."""
    keras.utils.set_random_seed(FLAGS.seed)
    dtype = "string" if FLAGS.ids == "strings" else "int64"
    inputs = {name: keras.Input((), dtype=dtype, name=name) for name in _FEATURES}
    vectors = EmbeddingCollection(
        [make_table(table) for table in _FEATURES.values()],
        [FeatureConfig(name, table) for name, table in _FEATURES.items()],
        concatenate=True,
        name="embeddings",
    )(inputs)
    hidden = keras.layers.Dense(32, "relu")(vectors)
    model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(hidden), name="stream")
    model.compile(
        # Accumulators that begin at 0.1 would hold rows with few clicks.
        recsync.optimizers.Adagrad(FLAGS.learning_rate, initial_accumulator_value=1e-5),
        "binary_crossentropy",
        metrics=[recsync.metrics.AUC()],
        steps_per_execution=FLAGS.steps_per_execution,
    )
    return model


def make_callbacks(strategy: Any) -> list[keras.callbacks.Callback]:
    """What belongs to the strategy, and what writes TensorBoard's logs."""
    callbacks: list[keras.callbacks.Callback] = []
    if FLAGS.strategy == "hop":
        callbacks.append(recsync.callbacks.HopReport(FLAGS.output_dir))
    elif FLAGS.strategy in strategy_flags.WITH_COPIES:
        callbacks.append(recsync.callbacks.ShadowReport(FLAGS.output_dir))
    elif strategy is not None:
        callbacks.append(recsync.callbacks.TrainingReport(FLAGS.output_dir))
    if FLAGS.output_dir:
        callbacks.append(keras.callbacks.TensorBoard(FLAGS.output_dir, write_graph=False))
    return callbacks


def score_with_export(model: keras.Model, stream: Stream, step: int) -> dict[str, list[Any]]:
    """Exports the model, and scores what comes next by what was exported, and by the model."""
    examples, _ = next(iter(stream.batches(step, 1).unbatch().batch(_SCORED)))
    with contextlib.ExitStack() as stack:
        folder = FLAGS.output_dir or stack.enter_context(tempfile.TemporaryDirectory())
        path = os.path.join(folder, "exported")
        recsync.export_model(model, path)
        served = tf.saved_model.load(path)
        exported = served.serve(examples)
    predicted = model.predict(tf.data.Dataset.from_tensors(examples), verbose=0)
    return {
        **{
            name: tf.strings.as_string(ids).numpy().astype(str).tolist()
            for name, ids in examples.items()
        },
        "exported": exported.numpy()[:, 0].tolist(),
        "predicted": predicted[:, 0].tolist(),
    }


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    check_flags()
    stream = make_stream()
    with contextlib.ExitStack() as stack:
        strategy = strategy_flags.make_strategy(stack)
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = make_model()
        report = Report(stream, strategy)
        start = time.monotonic()
        model.fit(
            stream.batches(),
            epochs=epochs(),
            steps_per_epoch=FLAGS.steps_per_epoch,
            callbacks=[*make_callbacks(strategy), report],
            shuffle=False,  # There is no end to shuffle up to.
            verbose=0,
        )
        seconds = time.monotonic() - start
        steps = report.epochs[-1]["steps"]
        scores = score_with_export(model, stream, steps)
    print(f"\n{steps * FLAGS.batch_size / seconds:,.0f} examples per second, tests included")
    for user, ad, score in zip(*(scores[n] for n in (*_FEATURES, "exported")), strict=True):
        print(f"  {user}, {ad}: {score:.4f}")
    if FLAGS.output_dir:
        print(f"saved to {FLAGS.output_dir}: exported, TensorBoard logs")
    strategy_flags.write_figures(
        {
            "strategy": FLAGS.strategy,
            "ids": FLAGS.ids,
            "workers": strategy.cluster.workers if strategy else 1,
            "ps": strategy.cluster.ps if strategy else 0,
            "examples": steps * FLAGS.batch_size,
            "wall_seconds": seconds,
            "epochs": report.epochs,
            "scores": scores,
        }
    )


if __name__ == "__main__":
    logging.set_verbosity(logging.WARNING)
    tf.get_logger().setLevel("WARNING")
    app.run(main)
