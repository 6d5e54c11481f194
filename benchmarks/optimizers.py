"""Rows per second of the optimizers' updates of embedding tables.

What is measured: pushes of gradients to random rows of one table, each row at most once in a push,
through

- this package's update ops: SGD; Adagrad plain, and with staleness weight and SWAP; Adam; FTRL;
- `tensorflow`: `tf.raw_ops.ResourceSparseApplyAdagradV2` (plain Adagrad, no versions);
- `plain_loop`: Adagrad with staleness weight and SWAP as a plain C++ loop (plain_loop.cc), without
  locks, checks or a search for repeated rows: the traffic that an update can't do without.

How: in one process, each system in turn within a round, so that all see the same machine; the
first round warms up and is not counted. A round of a system is one tf.function with `--pushes`
pushes one after the other (for the plain loop, as many calls). Figures are medians over rounds,
ratios are those of a round's pair. The plain loop's arrays lie in huge pages, as numpy asks for
them (and as the update ops ask for tables; stock TensorFlow doesn't).

    python benchmarks/optimizers.py --rows=1000000 --dimension=16 --threads=2 --json=optimizers.json
"""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # Warnings and errors of TensorFlow only.
ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import keras  # noqa: E402
import numpy as np  # noqa: E402
import plain_loop  # noqa: E402
import tensorflow as tf  # noqa: E402
from absl import app, flags  # noqa: E402

import tf_recsync as recsync  # noqa: E402
from tf_recsync.ops.bags import PackedBags  # noqa: E402

FLAGS = flags.FLAGS
flags.DEFINE_integer("rows", 1_000_000, "Rows of the table.", lower_bound=1)
flags.DEFINE_integer("dimension", 16, "Floats of a row.", lower_bound=1)
flags.DEFINE_integer("batch", 65_536, "Rows of a push, at most --rows.", lower_bound=1)
flags.DEFINE_integer("pushes", 8, "Pushes of each system in a round.", lower_bound=1)
flags.DEFINE_integer("rounds", 7, "Rounds that count.", lower_bound=1)
flags.DEFINE_integer("threads", 2, "Threads of the op pool and of the loop.", lower_bound=1)
flags.DEFINE_string("json", None, "Gets the last line, the summary.")

LEARNING_RATE = 0.05
EPSILON = 1e-7
SWAP = recsync.Swap(period=100, decay=0.8)
FULL = "adagrad_staleness_swap"
STOCK = "tensorflow"
LOOP = "plain_loop"


def optimizers() -> dict[str, recsync.optimizers.Optimizer]:
    stale = {"staleness": recsync.staleness.InversePower(k=2, baseline=4)}
    return {
        "sgd": recsync.optimizers.SGD(LEARNING_RATE),
        "adagrad": recsync.optimizers.Adagrad(LEARNING_RATE),
        FULL: recsync.optimizers.Adagrad(LEARNING_RATE, swap=SWAP, **stale),
        "adam": recsync.optimizers.Adam(LEARNING_RATE),
        "ftrl": recsync.optimizers.Ftrl(LEARNING_RATE),
    }


class Batches:
    """The ids of every push of a round, and a gradient."""

    def __init__(self):
        rng = np.random.default_rng(1)
        ids = [rng.permutation(FLAGS.rows)[: FLAGS.batch] for _ in range(FLAGS.pushes)]
        self.ids = [np.ascontiguousarray(i, np.int64) for i in ids]
        self.gradient = rng.normal(size=(FLAGS.batch, FLAGS.dimension)).astype(np.float32)


def seconds(run: Callable) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def recsync_round(optimizer: recsync.optimizers.Optimizer, batches: Batches) -> Callable[[], float]:
    table = keras.Variable(np.ones((FLAGS.rows, FLAGS.dimension), np.float32), name="embeddings")
    optimizer.build([table])
    state = optimizer.state_of(table)
    gradient = tf.constant(batches.gradient.ravel())
    # Pulled before the round: staleness rises with its pushes.
    pulled = tf.zeros([FLAGS.batch], tf.int64)
    ids = [tf.constant(i) for i in batches.ids]
    step = tf.Variable(1, dtype=tf.int64)
    counts = tf.constant([FLAGS.batch], tf.int64)

    @tf.function
    def run(gradient, pulled, counts, *ids):
        for i in ids:
            now = step.assign_add(1)
            rows = PackedBags(counts, i)
            optimizer.apply_rows([state], gradient, rows, pulled, LEARNING_RATE, now)

    def round_():
        state.versions.value.assign(tf.zeros([FLAGS.rows], tf.int64))
        return seconds(lambda: run(gradient, pulled, counts, *ids))

    return round_


def stock_round(batches: Batches) -> Callable[[], float]:
    table = tf.Variable(np.ones((FLAGS.rows, FLAGS.dimension), np.float32))
    accumulator = tf.Variable(np.full((FLAGS.rows, FLAGS.dimension), 0.1, np.float32))
    gradient = tf.constant(batches.gradient)
    ids = [tf.constant(i) for i in batches.ids]

    @tf.function
    def run(gradient, *ids):
        for i in ids:
            tf.raw_ops.ResourceSparseApplyAdagradV2(
                var=table.handle,
                accum=accumulator.handle,
                lr=LEARNING_RATE,
                epsilon=EPSILON,
                grad=gradient,
                indices=i,
            )

    return lambda: seconds(lambda: run(gradient, *ids))


def loop_round(batches: Batches) -> Callable[[], float]:
    run = plain_loop.load().PlainLoop
    table = np.ones((FLAGS.rows, FLAGS.dimension), np.float32)
    accumulator = np.full_like(table, 0.1)
    versions, periods = np.zeros(FLAGS.rows, np.int64), np.zeros(FLAGS.rows, np.int64)
    pulled = np.zeros(FLAGS.batch, np.int64)
    step = 1

    def pointer(array):
        return ctypes.c_void_p(array.ctypes.data)

    def push_all():
        nonlocal step
        for ids in batches.ids:
            step += 1
            run(
                *map(pointer, (table, accumulator, versions, periods)),
                ctypes.c_int64(FLAGS.dimension),
                *map(pointer, (ids, pulled, batches.gradient)),
                ctypes.c_int64(FLAGS.batch),
                ctypes.c_float(LEARNING_RATE),
                ctypes.c_float(EPSILON),
                ctypes.c_int64(step),
                ctypes.c_int64(SWAP.period),
                ctypes.c_float(SWAP.decay),
                ctypes.c_int(FLAGS.threads),
            )

    def round_():
        versions[:] = 0
        return seconds(push_all)

    return round_


def report(line: dict) -> None:
    print(json.dumps(line), flush=True)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    if FLAGS.batch > FLAGS.rows:
        raise app.UsageError(f"--batch must be at most --rows, {FLAGS.rows}, not {FLAGS.batch}")
    tf.config.threading.set_intra_op_parallelism_threads(FLAGS.threads)
    batches = Batches()
    runs = {name: recsync_round(o, batches) for name, o in optimizers().items()}
    runs |= {STOCK: stock_round(batches), LOOP: loop_round(batches)}
    for run in runs.values():
        run()
    rows = FLAGS.pushes * FLAGS.batch
    rounds = [{name: rows / run() for name, run in runs.items()} for _ in range(FLAGS.rounds)]
    settings = {
        "benchmark": "optimizers",
        "rows": FLAGS.rows,
        "dimension": FLAGS.dimension,
        "batch": FLAGS.batch,
        "threads": FLAGS.threads,
        "rounds": FLAGS.rounds,
    }
    for name in runs:
        rates = [r[name] for r in rounds]
        report(
            settings
            | {
                "system": name,
                "rows_per_second": round(statistics.median(rates)),
                "rows_per_second_min": round(min(rates)),
                "rows_per_second_max": round(max(rates)),
            }
        )

    def ratio(name: str, other: str) -> float:
        return round(statistics.median(r[name] / r[other] for r in rounds), 3)

    summary = settings | {
        f"{FULL}_to_{LOOP}": ratio(FULL, LOOP),
        f"{FULL}_to_{STOCK}": ratio(FULL, STOCK),
        f"adagrad_to_{STOCK}": ratio("adagrad", STOCK),
        f"adam_to_{STOCK}": ratio("adam", STOCK),
        f"ftrl_to_{STOCK}": ratio("ftrl", STOCK),
    }
    report(summary)
    if FLAGS.json:
        pathlib.Path(FLAGS.json).write_text(json.dumps(summary) + "\n")


if __name__ == "__main__":
    app.run(main)
