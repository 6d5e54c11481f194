"""What one coordinator costs with more and more workers: processor time, memory, and waits.

Each number of workers is a cluster of its own, with a coordinator of its own. The workers train a
tiny model on data that they make themselves (`distribute_datasets_from_function`), and each step
takes an artificial time, so that they overlap on a few cores as machines of their own would.

Columns and keys, for each number of workers:

- `start_seconds`: from nothing to servers that the coordinator is connected to;
- `first_seconds`: from the begin of `fit` until each worker has done a step, its tracing included;
- `pass_seconds`: how long a call of `fit` takes, but the first, in which each worker has one batch,
  and `pass_ms`: the coordinator's processor time for each worker in it, in milliseconds;
- `steps_per_second`: of all workers together, and `of_ideal`, that over what the artificial time
  alone would allow; much below 0.9, the machine is the bottleneck;
- `coordinator_ms`: the coordinator's processor time, in milliseconds a step, while they train;
- `coordinator_share`: of one core;
- `worker_kilobytes`: the coordinator's memory that each worker takes;
- `threads_per_worker`: of the coordinator;
- `stop_seconds`: from `stop_training` until `fit` returns;
- `noticed_seconds`: from the death of a process of servers until the first of its workers counts
  as lost.

With `--strategy=shadowsync` workers train copies, which EASGD keeps together in the background;
`syncs_per_second` are those of all workers together.

    python benchmarks/coordinator.py --workers=16,64,256 --json=coordinator.json
    python benchmarks/coordinator.py --workers=8,32 --strategy=shadowsync
"""

from __future__ import annotations

import json
import os
import pathlib
import resource
import signal
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

import common  # noqa: F401  Finds the package.
import keras
import machine
import tensorflow as tf
from absl import app, flags

import tf_recsync as recsync

FLAGS = flags.FLAGS
flags.DEFINE_list("workers", ["16", "64", "256"], "The numbers of workers.")
flags.DEFINE_integer("ps", 2, "Parameter servers.", lower_bound=1)
flags.DEFINE_integer("processes", 4, "Processes of the servers.", lower_bound=2)
flags.DEFINE_float("compute_seconds", 0.125, "Artificial compute time of a step.", lower_bound=0)
flags.DEFINE_float("seconds", 15.0, "How long processor time is measured.", lower_bound=1)
flags.DEFINE_enum("strategy", "async", ["async", "shadowsync"], "How the workers train.")
flags.DEFINE_string("json", None, "Gets the results, a list of objects.")
flags.DEFINE_integer("only", None, "Used by the benchmark itself: one number of workers.")

_LIMIT_SECONDS = 120.0  # Of each wait.
_PASSES = 5  # That are measured.


def make_model() -> keras.Model:
    """A model that needs next to nothing."""
    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile(recsync.optimizers.SGD(0.01), "mse")
    return model


def make_data(_: tf.distribute.InputContext) -> tf.data.Dataset:
    """Batches without an end, on whichever worker asks."""
    return tf.data.Dataset.from_tensors((tf.ones([8, 4]), tf.ones([8, 1]))).repeat()


def measure_passes(model: keras.Model, workers: int) -> tuple[float, float]:
    """Trains on a batch for each worker, again and again.

    Returns:
        Seconds for a pass, and of the coordinator's processor for each worker; medians.
    """
    rows = tf.data.Dataset.from_tensors((tf.ones([4]), tf.ones([1]))).repeat(8 * workers).batch(8)
    figures = []
    for _ in range(_PASSES + 1):  # The first one traces the step.
        usage, began = machine.cpu_seconds([]), time.monotonic()
        model.fit(rows, verbose=0)
        seconds = time.monotonic() - began
        figures.append((seconds, (machine.cpu_seconds([]) - usage) / workers))
    seconds, used = zip(*figures[1:], strict=True)
    return statistics.median(seconds), statistics.median(used)


class Watcher(keras.callbacks.Callback):
    """Measures while `fit` runs, in a thread beside it.

    Args:
        cluster: the cluster.
        strategy: the strategy.
    """

    def __init__(self, cluster: recsync.LocalCluster, strategy: Any):
        super().__init__()
        self.results: dict[str, float] = {}
        self.error: BaseException | None = None
        self._cluster = cluster
        self._strategy = strategy
        self._stopped = 0.0

    def on_train_begin(self, logs: Any = None) -> None:
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def on_train_end(self, logs: Any = None) -> None:
        self.results["stop_seconds"] = time.monotonic() - self._stopped

    def _run(self) -> None:
        try:
            self._measure()
        except BaseException as error:
            self.error = error
        finally:
            self._stopped = time.monotonic()
            self.model.stop_training = True

    def _measure(self) -> None:
        steps = self.model.train_function.worker_steps
        wait(lambda: min(steps()) > 0, "steps of all workers")
        self.results["first_seconds"] = time.monotonic() - self._began
        time.sleep(3.0)  # Calls that grow have grown.
        usage, begin, before = machine.cpu_seconds([]), time.monotonic(), sum(steps())
        syncs = self._syncs()
        self.results["threads"] = threading.active_count()
        time.sleep(FLAGS.seconds)
        # Of calls in flight nobody knows: a second more or less does not show.
        seconds, done = time.monotonic() - begin, sum(steps()) - before
        used = machine.cpu_seconds([]) - usage
        self.results["steps_per_second"] = done / seconds
        self.results["syncs_per_second"] = (self._syncs() - syncs) / seconds
        self.results["coordinator_ms"] = 1e3 * used / max(done, 1)
        self.results["coordinator_share"] = used / seconds
        self.results["kilobytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        # Worker 0 shares its process with parameter servers.
        last = self._cluster.workers - 1
        killed = time.monotonic()
        os.kill(self._cluster.pid("worker", last), signal.SIGKILL)
        lost = recsync.MemberState.LOST
        members = self._strategy.members
        wait(lambda: any(m.state is lost for m in members()), "a loss")
        self.results["noticed_seconds"] = time.monotonic() - killed

    def _syncs(self) -> int:
        if not isinstance(self._strategy, recsync.ShadowSyncStrategy):
            return 0
        return sum(self._strategy.sync_report(self.model).syncs)


def wait(condition, what: str) -> None:
    """Waits, with a limit.

    Raises:
        RuntimeError: it took too long.
    """
    end = time.monotonic() + _LIMIT_SECONDS
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(f"no {what} within {_LIMIT_SECONDS:g} s")
        time.sleep(0.05)


def measure(workers: int) -> dict[str, Any]:
    """Runs a cluster with so many workers."""
    recsync.LocalCluster(workers=1, ps=1).close()  # The template from which servers are forked.
    kilobytes, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    cluster = recsync.LocalCluster(
        workers, FLAGS.ps, processes=FLAGS.processes, start_timeout=300.0
    )
    if FLAGS.strategy == "async":
        strategy = recsync.AsyncStrategy(cluster)
    else:
        strategy = recsync.ShadowSyncStrategy(cluster, recsync.EASGD(0.3), sync_ps=1)
    started = time.monotonic() - began
    recsync.testing.set_compute_time(strategy, FLAGS.compute_seconds)
    with strategy.scope():
        model = make_model()
    pass_seconds, pass_used = measure_passes(model, workers)
    watcher = Watcher(cluster, strategy)
    data = strategy.distribute_datasets_from_function(make_data)
    model.fit(data, steps_per_epoch=10**9, verbose=0, callbacks=[watcher])
    if watcher.error is not None:
        raise watcher.error
    found = watcher.results
    cluster.close()
    ideal = workers / FLAGS.compute_seconds if FLAGS.compute_seconds else float("inf")
    return {
        "benchmark": "coordinator",
        "strategy": FLAGS.strategy,
        "workers": workers,
        "start_seconds": started,
        "first_seconds": found["first_seconds"],
        "pass_seconds": pass_seconds,
        "pass_ms": 1e3 * pass_used,
        "steps_per_second": found["steps_per_second"],
        "of_ideal": found["steps_per_second"] / ideal,
        "syncs_per_second": found["syncs_per_second"],
        "coordinator_ms": found["coordinator_ms"],
        "coordinator_share": found["coordinator_share"],
        "worker_kilobytes": (found["kilobytes"] - kilobytes) / workers,
        "threads_per_worker": found["threads"] / workers,
        "stop_seconds": found["stop_seconds"],
        "noticed_seconds": found["noticed_seconds"],
    }


def main(argv: list[str]) -> None:
    if FLAGS.only is not None:
        print("RESULT " + json.dumps(measure(FLAGS.only)), flush=True)
        return
    results = []
    for workers in map(int, FLAGS.workers):
        command = [sys.executable, __file__, f"--only={workers}", *argv[1:]]
        names = ("ps", "processes", "compute_seconds", "seconds", "strategy")
        command += [f"--{name}={FLAGS[name].value}" for name in names]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        line = next(li for li in done.stdout.splitlines() if li.startswith("RESULT "))
        results.append(json.loads(line.removeprefix("RESULT ")))
        shown = {k: v for k, v in results[-1].items() if not isinstance(v, str)}
        print(", ".join(f"{k} {v:.4g}" for k, v in shown.items()))
    if FLAGS.json is not None:
        pathlib.Path(FLAGS.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    app.run(main)
