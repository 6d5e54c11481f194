"""How fast copies of parameters are moved towards others, against the speed of memory.

What is measured: own <- (1 - alpha) own + alpha target, of `--megabytes` of parameters in several
variables, as ShadowSync's synchronization does it (Zheng et al. 2021, algorithms 2 to 4):

- `recsync`: this package's fused op, beside which training may go on;
- `sync_ps`: the same as the sync PSs' copy is moved: alone on its variables, and with what it has
  become as an answer, so that it writes twice;
- `tensorflow`: the same with stock ops: the parameters are read and packed, interpolated, split and
  assigned;
- `plain_loop`: a plain C++ loop over arrays (plain_loop.cc), which reads both and writes one: what
  memory allows.

How: in one process, each system in turn within a round; the first round warms up and is not
counted. `ratio_plain_loop` and `ratio_tensorflow` are the medians of the rounds' ratios of speeds,
ours over theirs, and `ratio_sync_ps_plain_loop` is that of the sync PSs' form;
`gigabytes_per_second` counts three passes over the parameters, whatever a system really moves.

    python benchmarks/interpolation.py --json=interpolation.json
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable

import common
import numpy as np
import plain_loop
import tensorflow as tf
from absl import app, flags

from tf_recsync import ops

FLAGS = flags.FLAGS
flags.DEFINE_integer("megabytes", 64, "Of parameters.", lower_bound=1)
flags.DEFINE_integer("calls", 10, "Interpolations of a round.", lower_bound=1)
flags.DEFINE_integer("rounds", 15, "Rounds that count.", lower_bound=1)
flags.DEFINE_integer("threads", 2, "Threads of the op pool and of the loop.", lower_bound=1)
flags.DEFINE_string("json", None, "Gets the printed lines.")

ALPHA = 0.3
PARTS = (8, 4, 2, 1, 1)  # Of the parameters: the sizes of variables, in sixteenths.
STOCK = "tensorflow"
LOOP = "plain_loop"
SYNC_PS = "sync_ps"


def variables() -> list[tf.Variable]:
    elements = FLAGS.megabytes * 2**18
    return [tf.Variable(tf.random.normal([elements * part // 16])) for part in PARTS]


def target_of(own: list[tf.Variable]) -> tf.Tensor:
    return tf.random.normal([sum(v.shape.num_elements() for v in own)])


def ours(hogwild: bool, answer: bool) -> Callable[[], None]:
    own = variables()
    target = target_of(own)

    @tf.function
    def run(target):
        handles = [variable.handle for variable in own]
        for _ in range(FLAGS.calls):
            ops.interpolate(handles, target, ALPHA, hogwild=hogwild, answer=answer)

    return lambda: run(target)


def stock() -> Callable[[], None]:
    own = variables()
    target = target_of(own)
    sizes = [variable.shape.num_elements() for variable in own]

    @tf.function
    def run(target):
        for _ in range(FLAGS.calls):
            packed = tf.concat([variable.read_value() for variable in own], 0)
            moved = (1 - ALPHA) * packed + ALPHA * target
            for variable, part in zip(own, tf.split(moved, sizes), strict=True):
                variable.assign(part)

    return lambda: run(target)


def loop() -> Callable[[], None]:
    run = plain_loop.load().PlainInterpolation
    random = np.random.default_rng(1)
    own, target = random.normal(size=[2, FLAGS.megabytes * 2**18]).astype(np.float32)

    def call():
        for _ in range(FLAGS.calls):
            run(
                *(ctypes.c_void_p(array.ctypes.data) for array in (own, target)),
                ctypes.c_int64(own.size),
                ctypes.c_float(ALPHA),
                ctypes.c_int(FLAGS.threads),
            )

    return call


def seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) / FLAGS.calls


def main(argv: list[str]) -> None:
    common.check_arguments(argv)
    tf.config.threading.set_intra_op_parallelism_threads(FLAGS.threads)
    runs = {
        common.OURS: ours(hogwild=True, answer=False),
        SYNC_PS: ours(hogwild=False, answer=True),
        STOCK: stock(),
        LOOP: loop(),
    }
    for run in runs.values():
        run()
    rounds = [{name: seconds(run) for name, run in runs.items()} for _ in range(FLAGS.rounds)]
    settings = {"megabytes": FLAGS.megabytes, "threads": FLAGS.threads, "rounds": FLAGS.rounds}
    for name in runs:
        median = statistics.median(r[name] for r in rounds)
        common.report(
            {
                "system": name,
                "milliseconds": round(1e3 * median, 3),
                "gigabytes_per_second": round(3 * FLAGS.megabytes * 2**20 / median / 1e9, 2),
            }
        )
    ratios = {
        f"ratio_{other}": round(statistics.median(r[other] / r[common.OURS] for r in rounds), 3)
        for other in (STOCK, LOOP)
    }
    ratios["ratio_sync_ps_plain_loop"] = round(
        statistics.median(r[LOOP] / r[SYNC_PS] for r in rounds), 3
    )
    common.report({"benchmark": "interpolation", **settings, **ratios})


if __name__ == "__main__":
    app.run(main)
