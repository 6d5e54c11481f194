"""What staleness and lazy moments do to Adam, in a deep regression and in sequential retrieval.

What is measured: the error of a model on examples that it was not trained on. `--model` says which:

- `deep`, a network of two embeddings and four hidden layers. Its error is a share of the variance
  of what it predicts: 0 is perfect, 1 is no better than the mean.
- `gru`, a GRU that tells a user's next item from those of the batch. Its error is the loss.

In both, half of the rows of a table are rare, and wait for tens of steps between two batches that
name them. The systems:

- `keras_adamw`: `keras.optimizers.AdamW` in one process, each gradient applied so many steps after
  it was computed (`delay`): staleness without anything else of asynchronous training;
- `async`: `recsync.optimizers.Adam`, lazy and not, under `AsyncStrategy`, whose gradients are as
  stale as it has workers, on average;
- `async_inverse_power`: the same with `staleness=InversePower(k=1)`: a weight of 1 / tau;
- `sync`: the same under `SyncStrategy`, which divides `--batch_size` among the workers. With `gru`
  each worker has a batch of that size, and so more examples are seen in as many steps: in half a
  batch there would be half as many items to choose from, which is another loss.

How: each system is trained on the same number of batches, with as many seeds as `--seeds`; `error`
is the median, `errors` are all of them. A worker's step takes `--compute_seconds` at least, so that
workers of one machine overlap.

    python benchmarks/adam_staleness.py --json=adam_staleness.json
    python benchmarks/adam_staleness.py --model=gru --steps=1000 --batch_size=256
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable

import common  # First: it has Python find this project.
import keras
import tensorflow as tf
from absl import app, flags, logging
from adam_models import MODELS

import tf_recsync as recsync

FLAGS = flags.FLAGS
SYSTEMS = ("keras_adamw", "async", "async_inverse_power", "sync")
flags.DEFINE_enum("model", "deep", list(MODELS), "What is trained.")
flags.DEFINE_integer("steps", 1500, "Batches that a system is trained on.", lower_bound=1)
flags.DEFINE_integer("batch_size", 64, "Examples of a batch.", lower_bound=1)
flags.DEFINE_integer("seeds", 3, "Runs of each system.", lower_bound=1)
flags.DEFINE_list("systems", list(SYSTEMS), "What to run.")
flags.DEFINE_list("workers", ["1", "2"], "Numbers of workers.")
flags.DEFINE_list("delays", ["0", "1", "3"], "Steps by which keras_adamw applies gradients late.")
flags.DEFINE_list("learning_rates", ["0.01"], "Learning rates.")
flags.DEFINE_list("beta_1", ["0.9"], "Decays of the first moment.")
flags.DEFINE_float("compute_seconds", 0.005, "Artificial time of a worker's step.", lower_bound=0)
flags.DEFINE_string("json", None, "Gets the printed lines.")

TEST = 8192


class Delayed(keras.optimizers.AdamW):
    """AdamW that applies each gradient `delay` steps after it came."""

    def __init__(self, *args, delay: int, **kwargs):
        super().__init__(*args, **kwargs)
        self._delay = delay

    def build(self, variables):
        super().build(variables)
        zeros = keras.initializers.Zeros()
        self._waiting = [
            [self.add_variable(v.shape, zeros, v.dtype, name="waiting") for v in variables]
            for _ in range(self._delay)
        ]

    def apply(self, grads, trainable_variables=None):
        if not self.built:
            with tf.init_scope():
                self.build(trainable_variables)
        grads = [tf.convert_to_tensor(gradient) for gradient in grads]
        for waiting in self._waiting:
            late = [keras.ops.copy(v) for v in waiting]
            for variable, gradient in zip(waiting, grads, strict=True):
                variable.assign(gradient)
            grads = late
        super().apply(grads, trainable_variables)


def error_of(model: keras.Model, seed: int, batch_size: int, workers: int = 1) -> float:
    """Trains a model with a batch for each of so many workers in a step; its error on others."""
    task = MODELS[FLAGS.model]
    ids, labels = task.data(1000 + seed, FLAGS.steps * batch_size * workers)
    model.fit(ids, labels, batch_size=batch_size, shuffle=False, verbose=0)
    test, wanted = task.data(1, TEST)
    found = model.predict(test, batch_size=FLAGS.batch_size, verbose=0)
    return task.error(found, wanted)


def error_under(
    strategy: tf.distribute.Strategy,
    make: Callable[[], keras.optimizers.Optimizer],
    batch_size: int,
    workers: int,
    seed: int,
) -> float:
    """The same of a model that a strategy trains with a new optimizer."""
    with strategy.scope():
        model = MODELS[FLAGS.model].model(make())
    return error_of(model, seed, batch_size, workers)


def report(make: Callable[[int], float], **line) -> float:
    """Runs a system with each seed, and reports it."""
    errors = []
    for seed in range(FLAGS.seeds):
        keras.utils.set_random_seed(seed)
        errors.append(round(make(seed), 4))
    line["error"] = statistics.median(errors)
    common.report({**line, "errors": errors})
    return line["error"]


def settings() -> list[dict[str, float]]:
    return [
        {"learning_rate": float(rate), "beta_1": float(beta)}
        for rate in FLAGS.learning_rates
        for beta in FLAGS.beta_1
    ]


def run_delayed() -> None:
    for setting in settings():
        for delay in map(int, FLAGS.delays):

            def one(seed, setting=setting, delay=delay):
                model = MODELS[FLAGS.model].model(Delayed(**setting, delay=delay))
                return error_of(model, seed, FLAGS.batch_size)

            report(one, system="keras_adamw", delay=delay, **setting)


def run_workers(workers: int) -> dict[str, float]:
    """The errors of asynchronous training with the first setting."""
    results = {}
    weighed = recsync.staleness.InversePower(k=1)
    with recsync.LocalCluster(workers=workers, ps=1) as cluster:
        asynchronous = recsync.AsyncStrategy(cluster, local_batch_size=FLAGS.batch_size)
        local = FLAGS.batch_size // (workers if MODELS[FLAGS.model].divides else 1)
        sync = recsync.SyncStrategy(
            cluster, global_batch_size=local * workers, local_batch_size=local
        )
        for strategy in (asynchronous, sync):
            recsync.testing.set_compute_time(strategy, FLAGS.compute_seconds)
        systems = {
            "async": (asynchronous, FLAGS.batch_size, 1, {}),
            "async_inverse_power": (asynchronous, FLAGS.batch_size, 1, {"staleness": weighed}),
            "sync": (sync, local, workers, {}),
        }
        for setting in settings():
            for name, (strategy, *sizes, options) in systems.items():
                if name not in FLAGS.systems or (workers == 1 and name != "async"):
                    continue
                for lazy in (True, False):
                    make = functools.partial(
                        recsync.optimizers.Adam, **setting, **options, lazy=lazy
                    )
                    one = functools.partial(error_under, strategy, make, *sizes)
                    line = {"system": name, "workers": workers, "lazy": lazy, **setting}
                    error = report(one, **line)
                    if setting == settings()[0] and name == "async":
                        results[f"error_{workers}_{'lazy' if lazy else 'not_lazy'}"] = error
    return results


def main(argv: list[str]) -> None:
    common.check_arguments(argv)
    logging.set_verbosity(logging.WARNING)
    if unknown := set(FLAGS.systems) - set(SYSTEMS):
        raise app.UsageError(f"--systems must be among {SYSTEMS}, not {sorted(unknown)}")
    if "keras_adamw" in FLAGS.systems:
        run_delayed()
    results: dict[str, float] = {}
    if set(FLAGS.systems) - {"keras_adamw"}:
        for workers in map(int, FLAGS.workers):
            results |= run_workers(workers)
    common.report({"benchmark": "adam_staleness", "steps": FLAGS.steps, **results})


if __name__ == "__main__":
    app.run(main)
