"""What it costs to record what workers do: training with and without a recording.

What is measured: the steps a second of `model.fit` of Wide & Deep (see click_models.py) under
`AsyncStrategy` with one worker and two parameter servers, while `strategy.record_events` notes what
each step does when, and without it.

How: two models on one cluster, one of which is recorded; short passes in turn. `ratio` is the speed
with a recording to that without, the median of the rounds' pairs; `microseconds` is what a step is
longer.

    python benchmarks/recording.py --json=recording.json
"""

from __future__ import annotations

import contextlib
import statistics
import time

import click_models
import common
import keras
from absl import app, flags, logging

import tf_recsync as recsync

FLAGS = flags.FLAGS
common.define_flags(batch_sizes=[512], rounds=15)
flags.DEFINE_integer("steps", 400, "Of a pass.", lower_bound=16)
flags.DEFINE_integer("steps_per_execution", 16, "Steps of a call.", lower_bound=1)


def main(argv: list[str]) -> None:
    del argv
    logging.set_verbosity(logging.WARNING)
    for batch_size in common.batch_sizes():
        data = click_models.make_data(batch_size)
        batches = click_models.in_memory(data.train(batch_size))
        speeds: dict[str, list[float]] = {"without": [], "recorded": []}
        with recsync.LocalCluster(workers=1, ps=2) as cluster:
            strategy = recsync.AsyncStrategy(cluster)
            models = {name: make_model(strategy, data.spec) for name in speeds}
            for turn in range(FLAGS.rounds + 1):
                for name, model in models.items():
                    recorded = name == "recorded"
                    speed = measure(strategy, model, batches, recorded)
                    if turn > 0:  # The first traces, and warms up.
                        speeds[name].append(speed)
        pairs = list(zip(speeds["recorded"], speeds["without"], strict=True))
        line = common.summary_of_ratios([with_it / without for with_it, without in pairs])
        line["microseconds"] = round(statistics.median(1e6 / w - 1e6 / o for w, o in pairs), 1)
        line["steps_per_second"] = round(statistics.median(speeds["without"]), 1)
        common.report({"benchmark": "recording", "batch_size": batch_size, **line})


def make_model(strategy: recsync.AsyncStrategy, spec: recsync.data.FeatureSpec) -> keras.Model:
    """A compiled model."""
    with strategy.scope():
        model = click_models.build_ours(spec)
        model.compile(
            recsync.optimizers.Adagrad(click_models.LEARNING_RATE),
            "binary_crossentropy",
            steps_per_execution=FLAGS.steps_per_execution,
        )
    return model


def measure(strategy, model: keras.Model, batches, recorded: bool) -> float:
    """The steps a second of a pass."""

    class Timer(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.started = time.monotonic()

        def on_epoch_end(self, epoch, logs=None):
            self.seconds = time.monotonic() - self.started

    timer = Timer()
    with strategy.record_events(model) if recorded else contextlib.nullcontext():
        model.fit(batches, steps_per_epoch=FLAGS.steps, epochs=2, verbose=0, callbacks=[timer])
    return FLAGS.steps / timer.seconds


if __name__ == "__main__":
    app.run(main)
