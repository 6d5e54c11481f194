"""What asynchronous training does to a model's quality, and what helps: six small experiments.

Those of Liu and Zhao 2021, "Asynchronous Stochastic Gradient Descent for Extreme-Scale
Recommender Systems", and one of the GBA paper (Su et al. 2022), with up to 32 workers. A small
model trains on days of synthetic clicks that drift, and after each day is tested on the next day's
clicks. As in the papers, days are trained on after others: variants go on from a checkpoint, which
the middle number of workers (8 of 2, 8 and 32) trained for a day. So they don't depend on how
the first steps happened to go, when a model has everything to learn and staleness harms at random.

- staleness (figure 3): its distribution for some numbers of equal workers.
- weights (figure 5): with the most workers, stale gradients counted in full, weighed by 1 / tau
  (linear), and by InversePower with k=2 and the middle number of workers as the baseline
  (normalized); and what that number of workers reaches, the paper's "expected". The paper has
  3,000 workers and a baseline of 1,000. A baseline far below the number of workers takes nearly
  all weight from all gradients: Adagrad makes up for that in the long run only, when its
  accumulators have forgotten their initial value.
- normalization (figure 6): MeanNormalization or not, with the middle number and the most workers,
  gradients weighed as in "normalized" above; batches of four times the size, as means of fewer
  examples say little.
- swap (figure 7): Adagrad, SWAP with a period of a fifth of a day, and Adagrad whose accumulators
  decay at each step, as much in a period as with SWAP. With a smaller learning rate and more drift
  than elsewhere: accumulators that only grow do no harm while steps are large for what is to learn.
- global_batch (figure 8 of the GBA paper): a model trains synchronously for `--sync_days`; from
  that checkpoint it goes on synchronously and with GBA: with some numbers of workers at the same
  global batch, their local batches the smaller the more there are; then with the same number of
  workers and other local batches, and so other global batches. All hyper-parameters stay. The
  speed is that of equal workers whose compute time is in proportion to their local batch.
- from_scratch: what the first steps do. With the middle number of workers, GBA from initial weights
  and GBA after `--sync_days` of synchronous training, against synchronous training throughout; the
  days compared are the same. Whether it is staleness, `--iota=0` and `--slow=1` tell.

Differences are those to the first line of each experiment with the same seed (clicks and initial
weights); given are means and 95 % confidence intervals over the seeds, and the worst seed.

With its defaults it takes about half an hour on two cores; for narrower intervals:

    python benchmarks/async_quality.py --workers=2,4,8,16,32 --seeds=5 --json=async_quality.json
"""

from __future__ import annotations

import pathlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import common
import continual
import keras
import mode_runs
import numpy as np
import quality_laboratory
from absl import app, flags, logging
from quality_laboratory import Laboratory, Variant, make_days, middle, numbers
from quality_pictures import plot, show

import tf_recsync as recsync

FLAGS = flags.FLAGS
quality_laboratory.define_flags()
flags.adopt_module_key_flags(quality_laboratory)  # So that --help has them.
EXPERIMENTS = ("staleness", "weights", "normalization", "swap", "global_batch", "from_scratch")
flags.DEFINE_list("experiments", list(EXPERIMENTS), "Those to run.")
flags.DEFINE_integer("days", 3, "Days that variants train on.", lower_bound=1)
flags.DEFINE_integer("swap_days", 5, "Those of the experiment swap.", lower_bound=1)
flags.DEFINE_float("swap_drift", 0.15, "Of the clicks of swap, per day.", lower_bound=0)
flags.DEFINE_float("swap_learning_rate", 0.1, "Of Adagrad in swap.", lower_bound=0)
flags.DEFINE_integer("sync_days", 2, "Days before the switch in global_batch.", lower_bound=1)

SWAP_DECAY = 0.8  # Of a period, the paper's choice.
PERIODS = 5  # Of SWAP, in a day.


def adagrad(**options: Any) -> Callable[[], keras.optimizers.Optimizer]:
    """Makes Adagrad, with `--learning_rate` unless there is another in the options."""
    return lambda: recsync.optimizers.Adagrad(**{"learning_rate": FLAGS.learning_rate, **options})


def normalized() -> recsync.staleness.Policy:
    """The weight of stale gradients, normalized to the middle number of workers."""
    return recsync.staleness.InversePower(k=2, baseline=middle())


def staleness(laboratory: Laboratory) -> list[dict[str, Any]]:
    """Its distribution for each number of workers."""
    rows = []
    for workers in numbers():
        variant = Variant(f"{workers} workers", workers, adagrad())
        measured = laboratory.measure_staleness(variant)
        rows.append(
            {
                "benchmark": "async_quality",
                "experiment": "staleness",
                "variant": variant.name,
                "workers": workers,
                "mean": round(measured.mean, 3),
                "deviation": round(measured.deviation, 3),
                "quantile_99": measured.quantile(0.99),
                "max": measured.max,
                "histogram": [[int(tau), int(count)] for tau, count in measured.histogram],
            }
        )
    return rows


def weights(laboratory: Laboratory) -> list[dict[str, Any]]:
    """Weights of stale gradients."""
    most = numbers()[-1]
    linear = recsync.staleness.InversePower(k=1, baseline=1)
    reference = Variant(f"no weights, {middle()} workers", middle(), adagrad())
    return compare(
        laboratory,
        "weights",
        [
            Variant("no weights", most, adagrad()),
            Variant("linear", most, adagrad(staleness=linear)),
            Variant("normalized", most, adagrad(staleness=normalized())),
            reference,
        ],
        FLAGS.days,
        lambda variant: reference,
    )


def normalization(laboratory: Laboratory) -> list[dict[str, Any]]:
    """Mean-normalization of hidden layers."""
    local = 4 * FLAGS.batch_size

    def variant(workers: int, on: bool, **options: Any) -> Variant:
        name = f"{workers} workers{', MeanNormalization' if on else ''}"
        return Variant(name, workers, adagrad(**options), "async", local, on)

    variants = [
        variant(workers, on, staleness=normalized())
        for workers in dict.fromkeys([numbers()[-1], middle()])
        for on in (False, True)
    ]
    return compare(
        laboratory,
        "normalization",
        variants,
        FLAGS.days,
        lambda other: variant(middle(), other.normalization),
    )


def swap(laboratory: Laboratory) -> list[dict[str, Any]]:
    """SWAP, and decay at each step."""
    period = max(1, FLAGS.rows // FLAGS.batch_size // PERIODS)
    most = numbers()[-1]
    swaps = {
        "Adagrad": None,
        "SWAP": recsync.Swap(period, SWAP_DECAY),
        "decay at each step": recsync.Swap(1, SWAP_DECAY ** (1 / period)),
    }

    def first(variant: Variant) -> Variant:
        # With its own optimizer: SWAP keeps more in checkpoints than Adagrad does.
        return Variant(f"{variant.name}, {middle()} workers", middle(), variant.optimizer)

    return compare(
        laboratory,
        "swap",
        [
            Variant(name, most, adagrad(learning_rate=FLAGS.swap_learning_rate, swap=swap))
            for name, swap in swaps.items()
        ],
        FLAGS.swap_days,
        first,
        drift=FLAGS.swap_drift,
    )


def global_batch(laboratory: Laboratory) -> list[dict[str, Any]]:
    """Local and global batches of GBA, after synchronous training."""
    workers = middle()
    size = workers * FLAGS.batch_size
    sync = Variant(f"sync, {workers} x {FLAGS.batch_size} = {size}", workers, adagrad(), "sync")
    variants = [
        Variant(f"{n} x {size // n} = {size}", n, adagrad(), "gba", size // n) for n in numbers()
    ]
    for local in (FLAGS.batch_size // 4, FLAGS.batch_size * 4):
        name = f"{workers} x {local} = {workers * local}"
        variants.append(Variant(name, workers, adagrad(), "gba", local))
    # Those on one cluster after each other, that of the first synchronous days first.
    variants.sort(key=lambda variant: (variant.workers != workers, variant.workers))
    return compare(
        laboratory,
        "global_batch",
        [sync, *variants],
        FLAGS.days,
        lambda variant: sync,
        FLAGS.sync_days,
        smallest=min(variant.batch_size for variant in variants),
    )


def from_scratch(laboratory: Laboratory) -> list[dict[str, Any]]:
    """GBA in the first steps, and after synchronous training."""
    sync, scratch, later = (
        Variant(name, middle(), adagrad(), mode)
        for name, mode in (
            ("sync", "sync"),
            ("GBA from scratch", "gba"),
            ("GBA after sync", "gba"),
        )
    )
    return compare(
        laboratory,
        "from_scratch",
        [sync, later, scratch],
        FLAGS.days,
        lambda variant: None if variant is scratch else sync,
        FLAGS.sync_days,
    )


def compare(
    laboratory: Laboratory,
    experiment: str,
    variants: Sequence[Variant],
    days: int,
    first: Callable[[Variant], Variant | None],
    first_days: int = 1,
    *,
    drift: float | None = None,
    smallest: int | None = None,
) -> list[dict[str, Any]]:
    """Trains variants with all seeds; the objects of an experiment.

    Args:
        laboratory: where they are trained.
        experiment: its name.
        variants: the first is what others are compared with.
        days: how many each is trained on.
        first: what trains before a variant goes on; None: it does so itself.
        first_days: for how many days.
        drift: of the clicks; None for `--drift`.
        smallest: the smallest local batch, to measure speeds too; None for no speeds.
    """
    if drift is None:
        drift = FLAGS.drift
    rows: list[dict[str, Any]] = []
    which = range(first_days, first_days + days)
    starts: list[Sequence[pathlib.Path | None]] = []
    for variant in variants:
        before = first(variant)
        if before is None:
            starts.append([None] * FLAGS.seeds)
        else:
            starts.append(laboratory.starts(before, first_days, which.stop, drift))
    for variant, paths in zip(variants, starts, strict=True):
        system = laboratory.system(variant)
        runs = []
        for seed, path in enumerate(paths):
            clicks = make_days(which.stop, drift, seed, variant.batch_size)
            trained = which if path is not None else range(which.stop)
            scores = laboratory.train(system, variant, seed, clicks, trained, path)
            runs.append(scores[-days:])
            aucs = " ".join(f"{auc:.4f}" for auc in runs[-1])
            print(f"{experiment}, {variant.name}, seed {seed + 1}: {aucs}", file=sys.stderr)
        baseline = np.array(rows[0]["auc_of_seeds"]) if rows else np.array(runs)
        auc = np.array(runs)
        row = {
            "benchmark": "async_quality",
            "experiment": experiment,
            "variant": variant.name,
            "mode": variant.mode,
            "workers": variant.workers,
            "local_batch": variant.batch_size,
            "global_batch": variant.global_batch,
            "seeds": FLAGS.seeds,
            "auc": np.round(auc.mean(axis=0), 5).tolist(),
            "last_auc": continual.Mean.of(auc[:, -1]).as_list(),
            "mean_auc": continual.Mean.of(auc.mean(axis=1)).as_list(),
            "difference": continual.Mean.of(auc[:, -1] - baseline[:, -1]).as_list(),
            "mean_difference": continual.Mean.of((auc - baseline).mean(axis=1)).as_list(),
            "worst_difference": round(float((auc - baseline)[:, -1].min()), 6),
            "auc_of_seeds": np.round(auc, 6).tolist(),
        }
        if smallest is not None:
            speed = laboratory.measure_speed(system, variant, smallest)
            row["queries_per_second"] = round(speed, 1)
        rows.append(row)
    return rows


def main(argv: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    common.check_arguments(argv, needs_one=True, experiments=EXPERIMENTS)
    run = {
        "staleness": staleness,
        "weights": weights,
        "normalization": normalization,
        "swap": swap,
        "global_batch": global_batch,
        "from_scratch": from_scratch,
    }
    results: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        laboratory = Laboratory(pathlib.Path(folder))
        laboratory.cluster(numbers()[0])  # Connects before any data are made.
        for experiment in FLAGS.experiments:
            results[experiment] = run[experiment](laboratory)
            show(experiment, results[experiment])
            mode_runs.write_json(FLAGS.json, [row for rows in results.values() for row in rows])
        laboratory.close()
    png = mode_runs.png_path(FLAGS.png, FLAGS.json)
    if png is not None:
        plot(results, png)


if __name__ == "__main__":
    app.run(main)
