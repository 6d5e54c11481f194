"""What Hop's queues and edges cost, against TensorFlow's own means for the same.

Three measurements, each of two systems that take turns; the first round warms up:

- `queue`: updates of 16 floats go into a worker's update queue and out again, 8 of an iteration,
  in a loop inside of one function; the stock system has a `tf.queue.FIFOQueue`, which passes
  references, too. Ours includes what an iteration has beside: entering it, and the average.
- `average`: `--copies` models of `--megabytes` go into the queue, come out and are averaged into a
  variable; the stock system dequeues them with `dequeue_many` and assigns their `reduce_mean`.
  `of_memory_speed` compares the bytes that one pass reads and writes per second with those of
  numpy's copy of an array of this size.
- `transfer`: models of `--megabytes` go from one server to another on this machine, over TCP: ours
  as an edge carries them, with the questions and answers of the protocol; the stock system is a
  function that reads a variable on one server and passes it on to the other.

Ratios are the speed of ours over that of the stock system in a round; their median is reported.

    python benchmarks/hop_queues.py --json=hop_queues.json
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import common  # First: it has Python find this project.
import numpy as np
import tensorflow as tf
from absl import app, flags

import tf_recsync as recsync
from tf_recsync.cluster import device_of
from tf_recsync.ops import hop
from tf_recsync.synchronization import hop_edges

FLAGS = flags.FLAGS
MEASUREMENTS = ("queue", "average", "transfer")
flags.DEFINE_list("measurements", list(MEASUREMENTS), "What to run.")
flags.DEFINE_integer("rounds", 7, "Rounds that count.", lower_bound=1)
flags.DEFINE_integer("iterations", 2000, "queue: of a turn.", lower_bound=1)
flags.DEFINE_integer("copies", 4, "average: of the model.", lower_bound=1)
flags.DEFINE_integer("megabytes", 50, "average, transfer: of a model.", lower_bound=1)
flags.DEFINE_string("json", None, "Gets the printed lines.")

STOCK = "tensorflow"
SENDERS, FLOATS = 8, 16  # queue.
PARCELS = hop_edges.PARCELS_PER_TURN  # transfer: of a turn.
_names = itertools.count()


def hop_worker(in_neighbors: int = 0, out_neighbors: int = 0) -> tf.Tensor:
    """What a worker keeps, without token queues, so that it waits for updates only."""
    return hop.worker(
        shared_name=f"benchmark_{next(_names)}",
        in_neighbors=range(1, 1 + in_neighbors),
        weights=[1 / (1 + in_neighbors)] * in_neighbors,
        out_neighbors=range(1, 1 + out_neighbors),
        slots=2,
        capacity=2 * (1 + in_neighbors),
    )


def looped(body: Callable[[tf.Tensor], object], iterations: int) -> Callable[[], None]:
    """A function that runs `body(i)`, an int64 scalar, again and again."""

    @tf.function(autograph=False, jit_compile=False)
    def loop():
        def step(i):
            with tf.control_dependencies([body(i)]):
                return i + 1

        zero = tf.constant(0, tf.int64)
        tf.while_loop(lambda i: i < iterations, step, [zero], parallel_iterations=1)

    return loop


def averaging(update: tf.Tensor, senders: int, iterations: int) -> Callable[[], None]:
    """Iterations of a worker that gets updates from so many senders, by reference."""
    handle = hop_worker(in_neighbors=senders)
    variable = tf.Variable(tf.zeros_like(update))

    def body(i):
        iteration = hop.next_iteration(handle, [variable.handle], update.dtype)
        nothing = tf.zeros([0], update.dtype)
        last = hop.enter(handle, iteration, nothing, send=False)
        for sender in range(1, 1 + senders):
            with tf.control_dependencies([last]):
                neighbor = tf.constant(sender, tf.int64)
                last = hop.deliver(handle, neighbor, iteration + 1, iteration, update)
        with tf.control_dependencies([last]):
            return hop.receive(handle, iteration, nothing, [variable.handle], relative=False)

    loop = looped(body, iterations)

    def run():
        hop.begin(handle, 0)
        loop()

    run.kept = handle, variable
    return run


def stock_queue(update: tf.Tensor) -> Callable[[], None]:
    """As many enqueues and dequeues."""
    queue = tf.queue.FIFOQueue(2 * SENDERS, [update.dtype], [update.shape])

    def body(i):
        for _ in range(SENDERS):
            queue.enqueue(update)
        taken = [queue.dequeue() for _ in range(SENDERS)]
        return tf.group(*taken)

    run = looped(body, FLAGS.iterations)
    run.kept = queue
    return run


def stock_average(update: tf.Tensor) -> Callable[[], None]:
    """Enqueues, dequeues in one, and averages."""
    queue = tf.queue.FIFOQueue(2 * FLAGS.copies, [update.dtype], [update.shape])
    variable = tf.Variable(tf.zeros_like(update))

    def body(i):
        for _ in range(FLAGS.copies):
            queue.enqueue(update)
        mean = tf.reduce_mean(queue.dequeue_many(FLAGS.copies), 0)
        return tf.raw_ops.AssignVariableOp(resource=variable.handle, value=mean)

    run = looped(body, 1)
    run.kept = queue, variable
    return run


def compare(ours: Callable[[], None], stock: Callable[[], None]) -> dict[str, list[float]]:
    """Seconds of each turn."""
    seconds: dict[str, list[float]] = {common.OURS: [], STOCK: []}
    for turn in range(FLAGS.rounds + 1):
        for system, run in ((common.OURS, ours), (STOCK, stock)):
            if hasattr(run, "prepare"):
                run.prepare()
            start = time.perf_counter()
            run()
            if turn > 0:
                seconds[system].append(time.perf_counter() - start)
    return seconds


def report(measurement: str, seconds: dict[str, list[float]], figure, **more) -> None:
    """A line for each system, and a summary."""
    for system, times in seconds.items():
        median = statistics.median(times)
        common.report({"system": system, "measurement": measurement, **figure(median)})
    pairs = zip(seconds[STOCK], seconds[common.OURS], strict=True)
    ratios = common.summary_of_ratios([stock / ours for stock, ours in pairs])
    common.report({"benchmark": "hop_queues", "variant": measurement, **ratios, **more})


def measure_queue() -> None:
    update = tf.ones([FLOATS])
    seconds = compare(averaging(update, SENDERS, FLAGS.iterations), stock_queue(update))
    updates = FLAGS.iterations * SENDERS
    report("queue", seconds, lambda s: {"microseconds_per_update": round(1e6 * s / updates, 3)})


def model() -> tf.Tensor:
    return tf.random.normal([FLAGS.megabytes * 2**18])


def copy_seconds(update: tf.Tensor) -> float:
    """Of an array of this size, in numpy, the median."""
    source, target = update.numpy(), update.numpy().copy()
    times = []
    for _ in range(FLAGS.rounds):
        start = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure_average() -> None:
    update = model()
    seconds = compare(averaging(update, FLAGS.copies, 1), stock_average(update))
    # One pass reads the copies and the worker's own parameters, and writes those.
    passes = FLAGS.copies + 2
    ours = statistics.median(seconds[common.OURS])
    report(
        "average",
        seconds,
        lambda s: {"milliseconds": round(1e3 * s, 2)},
        of_memory_speed=round(passes * copy_seconds(update) / 2 / ours, 3),
    )


def carried(cluster: recsync.Cluster) -> Callable[[], None]:
    """Models go from worker 0 to worker 1 as an edge carries them."""
    with hop_edges.at(cluster, 0):
        source = hop_worker(out_neighbors=1)
        update = model()
    with hop_edges.at(cluster, 1):
        target = hop.worker(
            shared_name=f"benchmark_{next(_names)}",
            in_neighbors=[0],
            weights=[0.5],
            out_neighbors=[],
            slots=PARCELS + 1,
            capacity=2 * (PARCELS + 1),
        )
    carry = hop_edges.carry_function(update.dtype, False)
    ends = tf.constant(0, tf.int64), tf.constant(1, tf.int64)
    limit = tf.constant(hop_edges.NO_LIMIT, tf.float64)
    one_turn = tf.constant(1, tf.int64)

    def run():
        with hop_edges.at(cluster, 0):
            carry(source, ends[0], target, ends[1], limit, limit, one_turn)

    def prepare():
        with hop_edges.at(cluster, 1):
            hop.begin(target, 0)
        with hop_edges.at(cluster, 0):
            hop.begin(source, 0)
            for iteration in range(PARCELS):
                hop.enter(source, tf.constant(iteration, tf.int64), update, send=True)

    def check():
        with hop_edges.at(cluster, 1):
            waiting = int(hop.state(target).counts[10])
        if waiting != PARCELS:
            raise RuntimeError(f"{waiting} of {PARCELS} models have come")

    run.prepare, run.check = prepare, check
    return run


def passed_on(cluster: recsync.Cluster) -> Callable[[], None]:
    """A variable of worker 0 is read and passed on to worker 1, as often."""
    devices = [device_of("worker", worker) for worker in (0, 1)]
    with tf.device(devices[0]):
        variable = tf.Variable(model())

    @tf.function(autograph=False, jit_compile=False)
    def pass_on():
        last = []
        for _ in range(PARCELS):
            with tf.control_dependencies(last), tf.device(devices[0]):
                value = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
            with tf.device(devices[1]):
                # Of the first element only the use makes TensorFlow send the whole.
                last = [tf.raw_ops.Assert(condition=tf.size(value) > 0, data=[value], summarize=0)]

    def run():
        with hop_edges.at(cluster, 0):
            pass_on()

    return run


def measure_transfer() -> None:
    with recsync.LocalCluster(workers=2, inter_op_threads=16) as cluster:
        cluster.connect()
        ours = carried(cluster)
        seconds = compare(ours, passed_on(cluster))
        ours.check()
    sent = PARCELS * FLAGS.megabytes
    report("transfer", seconds, lambda s: {"megabytes_per_second": round(sent / s, 1)})


def main(argv: list[str]) -> None:
    unknown = set(FLAGS.measurements) - set(MEASUREMENTS)
    if len(argv) > 1 or unknown:
        raise app.UsageError(f"unknown: {argv[1:] or sorted(unknown)}")
    # A process connects once, and its devices are renamed then: the cluster comes first.
    for name, measure in (
        ("transfer", measure_transfer),
        ("queue", measure_queue),
        ("average", measure_average),
    ):
        if name in FLAGS.measurements:
            measure()


if __name__ == "__main__":
    app.run(main)
