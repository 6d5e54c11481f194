"""The all-reduce of ShadowSync's decentralized algorithms, against TensorFlow's collectives.

What is measured: the mean of a vector of each worker, on each worker, in one tf.function that the
coordinator calls:

- `recsync`: workers exchange pieces directly (`recsync.all_reduce_mean`);
- `collectives`: `CollectiveReduceV2` as a ring.

How: workers are processes of a local cluster; both take turns, in reverse order every other round.
Both read a variable of each worker and assign one; what they compute is checked first. `ratio` is
the median of the rounds' ratios of speeds, ours over theirs.

Speed is not the only difference. When a worker dies, TensorFlow's collectives stay aborted on the
workers that are left ("Restart your program to reset"), and when it comes back they can take down
healthy servers; a direct exchange among those that are left works at once.

    python benchmarks/all_reduce.py --workers=4 --json=all_reduce.json
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import common
import numpy as np
import tensorflow as tf
from absl import app, flags
from tensorflow.python.ops import collective_ops

import tf_recsync as recsync
from tf_recsync.synchronization.shadow_algorithms import Trainer

FLAGS = flags.FLAGS
flags.DEFINE_integer("workers", 4, "Workers, a process each.", lower_bound=2)
flags.DEFINE_list("elements", ["1000", "100000", "1000000", "10000000"], "Of the vectors.")
flags.DEFINE_integer("rounds", 9, "Rounds that count.", lower_bound=1)
flags.DEFINE_integer("megabytes", 20, "That a worker reduces in a turn, about.", lower_bound=1)
flags.DEFINE_string("json", None, "Gets the printed lines.")

STOCK = "collectives"
_MOST_CALLS = 10


def on_each(devices: list[str], value: Callable[[int], tf.Tensor]) -> list[tf.Variable]:
    """A variable on each device, from its number."""
    made = []
    for i, device in enumerate(devices):
        with tf.device(device):
            made.append(tf.Variable(value(i)))
    return made


def ours(devices: list[str], sources: list[tf.Variable], targets: list[tf.Variable]) -> Callable:
    size = sources[0].shape.num_elements()

    def reduce():
        trainers = [Trainer(device, [], [size], {}) for device in devices]
        values = []
        for trainer, source in zip(trainers, sources, strict=True):
            with trainer.on():
                values.append(source.read_value())
        means = recsync.all_reduce_mean(trainers, values)
        for trainer, target, mean in zip(trainers, targets, means, strict=True):
            with trainer.on():
                target.assign(mean, read_value=False)

    return tf.function(reduce, autograph=False)


def stock(
    devices: list[str], sources: list[tf.Variable], targets: list[tf.Variable], instance: int
) -> Callable:
    # Without tokens of their own, the function would run the ops one after the other, each of
    # which waits for the next.
    tokens = on_each(devices, lambda _: tf.zeros([]))

    def reduce():
        for device, source, target, token in zip(devices, sources, targets, tokens, strict=True):
            with tf.device(device):
                mean = collective_ops.all_reduce_v2(
                    source.read_value(),
                    group_size=tf.constant(len(devices)),
                    group_key=tf.constant(1),
                    instance_key=tf.constant(instance),
                    merge_op="Add",
                    final_op="Div",
                    communication_hint="RING",
                    timeout=60.0,
                    ordering_token=token.handle,
                )
                target.assign(mean, read_value=False)

    return tf.function(reduce, autograph=False)


def check(name: str, run: Callable, targets: list[tf.Variable]) -> None:
    """Runs twice, and looks at what came of it: the mean of 1, 2, ..."""
    for target in targets:
        target.assign(tf.zeros(target.shape))
    run()
    run()
    expected = (len(targets) + 1) / 2
    for target in targets:
        found = target.numpy()
        if not np.allclose(found, expected):
            raise RuntimeError(f"{name}: the mean must be {expected}, not {found}")


def compare(runs: dict[str, Callable], calls: int) -> dict[str, list[float]]:
    """Seconds of a call, for each round."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(FLAGS.rounds):
        for name in runs if number % 2 == 0 else reversed(runs):
            start = time.perf_counter()
            for _ in range(calls):
                runs[name]()
            seconds[name].append((time.perf_counter() - start) / calls)
    return seconds


def main(argv: list[str]) -> None:
    common.check_arguments(argv)
    with recsync.LocalCluster(workers=FLAGS.workers) as cluster:
        cluster.connect()
        devices = [f"/job:worker/replica:0/task:{i}/device:CPU:0" for i in range(FLAGS.workers)]
        for instance, elements in enumerate(int(number) for number in FLAGS.elements):
            sources = on_each(devices, lambda i, n=elements: tf.fill([n], i + 1.0))
            targets = on_each(devices, lambda _, n=elements: tf.zeros([n]))
            runs = {
                common.OURS: ours(devices, sources, targets),
                STOCK: stock(devices, sources, targets, instance + 1),
            }
            for name, run in runs.items():
                check(name, run, targets)
            calls = max(1, min(_MOST_CALLS, FLAGS.megabytes * 2**18 // elements))
            seconds = compare(runs, calls)
            for name in runs:
                milliseconds = round(1e3 * statistics.median(seconds[name]), 3)
                common.report({"system": name, "elements": elements, "milliseconds": milliseconds})
            pairs = zip(seconds[STOCK], seconds[common.OURS], strict=True)
            common.report(
                {
                    "benchmark": "all_reduce",
                    "elements": elements,
                    "workers": FLAGS.workers,
                    **common.summary_of_ratios([theirs / mine for theirs, mine in pairs]),
                }
            )


if __name__ == "__main__":
    app.run(main)
