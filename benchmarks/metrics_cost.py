"""What metrics cost: a training step with and without AUC and NormalizedEntropy.

What is measured: the time of a step of `model.fit` of Wide & Deep (see click_models.py) with this
package's optimizer, in one process:

- `none`: the loss only;
- `auc`: with `tf_recsync.metrics.AUC` (8193 thresholds, its default);
- `auc_of_keras`: with `tf_recsync.metrics.AUC` of Keras's 200 thresholds;
- `normalized_entropy`: with `tf_recsync.metrics.NormalizedEntropy`;
- `both`: with these two, of their defaults;
- `calibration`: with `tf_recsync.metrics.Calibration`;
- `keras_auc`: with keras.metrics.AUC, for comparison.

How: see common.py; eight steps per call, in many short turns. The variants are threads of one
process, and train the same variables with the same optimizer. A line's `cost_percent` is by how
much a step is longer than without metrics, the median of the rounds' pairs, and `cpu_cost_percent`
the same for processor time. The summary's `ratio` is the speed with both metrics over that with
none. The aim is a cost of less than 3 %.

    python benchmarks/metrics_cost.py --batch_size=512 --json=metrics_cost.json
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable

import click_models
import common
import keras
from absl import app, flags, logging

import tf_recsync as recsync

FLAGS = flags.FLAGS
# Differences of a few percent need many short turns.
common.define_flags(rounds=25, round_seconds=0.5)

VARIANTS = {
    "none": (),
    "auc": (recsync.metrics.AUC,),
    "auc_of_keras": (functools.partial(recsync.metrics.AUC, 200, spacing="linear"),),
    "normalized_entropy": (recsync.metrics.NormalizedEntropy,),
    "both": (recsync.metrics.AUC, recsync.metrics.NormalizedEntropy),
    "calibration": (recsync.metrics.Calibration,),
    "keras_auc": (keras.metrics.AUC,),
}


def make_systems(batch_size: int) -> dict[str, Callable[[common.Rounds], None]]:
    """The variants, of one model."""
    data = click_models.make_data(batch_size)
    model = click_models.build_ours(data.spec)
    optimizer = recsync.optimizers.Adagrad(click_models.LEARNING_RATE)
    optimizer.build(model.trainable_variables)

    def run(rounds: common.Rounds, metrics: tuple[Callable[[], keras.metrics.Metric], ...]) -> None:
        variant = keras.Model(model.input, model.output)
        made = [make() for make in metrics]
        click_models.serve_local(rounds, variant, optimizer, data, metrics=made)

    return {name: functools.partial(run, metrics=made) for name, made in VARIANTS.items()}


def cost_percent(ratios: list[float]) -> float:
    """By how much a step is longer, from the speeds' ratios."""
    return round(100 * (1 / statistics.median(ratios) - 1), 2)


def main(argv: list[str]) -> None:
    common.check_arguments(argv, systems=VARIANTS)
    logging.set_verbosity(logging.WARNING)
    for batch_size in common.batch_sizes():
        results = common.compare_variants(make_systems(batch_size), batch_size)
        compared = "none" in results.systems
        for system in results.systems:
            line = results.line(system)
            if compared and system != "none":
                line["cost_percent"] = cost_percent(results.ratios(system, "none"))
                line["cpu_cost_percent"] = cost_percent(results.cpu_ratios(system, "none"))
            common.report(line)
        summary = {"benchmark": "metrics_cost", "batch_size": batch_size}
        if compared and "both" in results.systems:
            summary |= common.summary_of_ratios(results.ratios("both", "none"))
            summary["cost_percent"] = cost_percent(results.ratios("both", "none"))
            summary["cpu_cost_percent"] = cost_percent(results.cpu_ratios("both", "none"))
        common.report({**summary, "rounds": FLAGS.rounds})


if __name__ == "__main__":
    app.run(main)
