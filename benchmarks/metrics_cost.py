"""What metrics cost: a training step with and without AUC and NormalizedEntropy.

What is measured: the time of a step of `model.fit` of Wide & Deep (see click_models.py) with this
package's optimizer, in one process (`--strategy=local`) or with AsyncStrategy on 2 workers and 2
parameter servers (`--strategy=async`; there, workers keep the metrics, and the coordinator reads
and merges them about twice a second):

- `none`: the loss only;
- `auc`: with keras.metrics.AUC (200 thresholds, Keras's default);
- `normalized_entropy`: with `tf_recsync.metrics.NormalizedEntropy`;
- `both`.

How: see common.py; eight steps per call. A line's `cost_percent` is by how much a step is longer
than without metrics, the median of the rounds' pairs, and `cpu_cost_percent` the same for processor
time. The summary's `ratio` is the speed with both metrics over that with none. The aim is a cost of
less than 3 %.

    python benchmarks/metrics_cost.py --batch_size=512 --json=metrics_cost.json
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from typing import Any

import common
from absl import app, flags

FLAGS = flags.FLAGS
# Differences of a few percent need many short turns.
common.define_flags(rounds=25, round_seconds=0.5)
flags.DEFINE_enum("strategy", "local", ["local", "async"], "How to train.")

STEPS_PER_EXECUTION = 8
WORKERS = PS = 2


def run_with(rounds: common.Rounds, metrics: tuple[str, ...]) -> None:
    """Trains with metrics."""
    import click_models
    import keras

    import tf_recsync as recsync

    scope: Any = contextlib.nullcontext()
    multiple = STEPS_PER_EXECUTION
    if FLAGS.strategy == "async":
        scope = recsync.AsyncStrategy(click_models.start_cluster(rounds, WORKERS, PS)).scope()
        multiple *= WORKERS
    data = click_models.make_data(rounds.batch_size)
    makers = {"auc": keras.metrics.AUC, "normalized_entropy": recsync.metrics.NormalizedEntropy}
    with scope:
        model = click_models.build_ours(data.spec)
        model.compile(
            recsync.optimizers.Adagrad(click_models.LEARNING_RATE),
            "binary_crossentropy",
            metrics=[makers[name]() for name in metrics],
            steps_per_execution=STEPS_PER_EXECUTION,
            jit_compile=False,
        )
    click_models.serve_fit(rounds, model, data, multiple=multiple)


SYSTEMS = {
    "none": functools.partial(run_with, metrics=()),
    "auc": functools.partial(run_with, metrics=("auc",)),
    "normalized_entropy": functools.partial(run_with, metrics=("normalized_entropy",)),
    "both": functools.partial(run_with, metrics=("auc", "normalized_entropy")),
}


def cost_percent(ratios: list[float]) -> float:
    """By how much a step is longer, from the speeds' ratios."""
    return round(100 * (1 / statistics.median(ratios) - 1), 2)


def main(argv: list[str]) -> None:
    common.check_arguments(argv, SYSTEMS)
    if common.is_system():
        common.be_system(SYSTEMS)
    for batch_size in common.batch_sizes():
        results = common.compare(SYSTEMS, batch_size)
        compared = "none" in results.systems
        for system in results.systems:
            line = results.line(system)
            if compared and system != "none":
                line["cost_percent"] = cost_percent(results.ratios(system, "none"))
                line["cpu_cost_percent"] = cost_percent(results.cpu_ratios(system, "none"))
            common.report(line)
        summary = {
            "benchmark": "metrics_cost",
            "batch_size": batch_size,
            "strategy": FLAGS.strategy,
        }
        if compared and "both" in results.systems:
            summary |= common.summary_of_ratios(results.ratios("both", "none"))
            summary["cost_percent"] = cost_percent(results.ratios("both", "none"))
            summary["cpu_cost_percent"] = cost_percent(results.cpu_ratios("both", "none"))
        common.report({**summary, "rounds": FLAGS.rounds})


if __name__ == "__main__":
    app.run(main)
