"""How fast activations and gradients are compressed, against copying them and against stock ops.

What is measured, on `--rows` examples of `--columns` activations in float32:

- `encode_int8`, `decode_int8`: this package's ops, with a scale for each row, and the same with
  stock ops, `stock_encode_int8` and `stock_decode_int8`;
- `bfloat16`, `from_bfloat16`: TensorFlow's own cast;
- `sparsify`, `restore`: the largest values of a gradient, of which a part `--sparsify` is left out,
  in bfloat16, with error feedback; and `stock_sparsify`, a tf.math.top_k with a scatter for what is
  left;
- `copy`: a copy of the tensor, what memory allows.

How: in one process, each system in turn within a round; the first round warms up and is not
counted. `gigabytes_per_second` are the bytes that are not compressed over the median time.
`processor_nanoseconds_per_byte` is the median processor time of all threads over these bytes, as
plans count it (`Resources.compression_seconds_per_byte`), which other programs on the machine
hardly change; `Compression.seconds_per_byte` has what `--threads=1` gave. Ratios are medians of the
rounds' ratios of speeds, ours over theirs.

    python benchmarks/compression.py --json=compression.json
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import common
import tensorflow as tf
from absl import app, flags

from tf_recsync import ops

FLAGS = flags.FLAGS
flags.DEFINE_integer("rows", 2048, "Of a batch.", lower_bound=1)
flags.DEFINE_integer("columns", 512, "Activations of an example.", lower_bound=1)
flags.DEFINE_float("sparsify", 0.9, "The part of the gradients that is left out.", 0.0, 0.999)
flags.DEFINE_integer("calls", 10, "Of a round.", lower_bound=1)
flags.DEFINE_integer("rounds", 15, "Rounds that count.", lower_bound=1)
flags.DEFINE_integer("threads", 2, "Threads of the op pool.", lower_bound=1)
flags.DEFINE_string("json", None, "Gets the printed lines.")

PAIRS = ("encode_int8", "decode_int8", "sparsify")


def stock_encode(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    scales = tf.reduce_max(tf.abs(x), -1, keepdims=True) / 127.0
    return tf.cast(tf.round(tf.math.divide_no_nan(x, scales)), tf.int8), scales


def stock_decode(codes: tf.Tensor, scales: tf.Tensor) -> tf.Tensor:
    return tf.cast(codes, tf.float32) * scales


def stock_sparsify(x: tf.Tensor, error: tf.Variable) -> tuple[tf.Tensor, tf.Tensor]:
    flat = tf.reshape(x, [-1]) + error
    kept = flat.shape[0] - int(FLAGS.sparsify * flat.shape[0])
    _, indices = tf.math.top_k(tf.abs(flat), kept, sorted=False)
    values = tf.cast(tf.gather(flat, indices), tf.bfloat16)
    sent = tf.scatter_nd(indices[:, None], tf.cast(values, tf.float32), [flat.shape[0]])
    error.assign(flat - sent)
    return indices, values


def systems() -> dict[str, Callable[[], object]]:
    """What is measured, each as a function without arguments."""
    x = tf.random.stateless_normal([FLAGS.rows, FLAGS.columns], [1, 2])
    codes, scales = ops.encode_int8(x)
    half = tf.cast(x, tf.bfloat16)
    error = tf.Variable(tf.zeros([x.shape.num_elements()]))
    settings = {"sparsify": FLAGS.sparsify, "dtype": tf.bfloat16}
    sent = ops.compress_gradient(x, **settings)
    shape = tf.constant(x.shape, tf.int64)
    encode, decode, sparsify = (
        tf.function(f) for f in (stock_encode, stock_decode, stock_sparsify)
    )
    return {
        "encode_int8": lambda: ops.encode_int8(x),
        "decode_int8": lambda: ops.decode_int8(codes, scales),
        "bfloat16": lambda: tf.cast(x, tf.bfloat16),
        "from_bfloat16": lambda: tf.cast(half, tf.float32),
        "sparsify": lambda: ops.compress_gradient(x, feedback="edge", **settings),
        "restore": lambda: ops.restore_gradient(*sent, shape),
        "stock_encode_int8": lambda: encode(x),
        "stock_decode_int8": lambda: decode(codes, scales[:, None]),
        "stock_sparsify": lambda: sparsify(x, error),
        "copy": lambda: tf.raw_ops.DeepCopy(x=x),
    }


def seconds(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds of a call, and of processor time."""
    start, processor = time.perf_counter(), time.process_time()
    for _ in range(FLAGS.calls):
        call()
    took = time.perf_counter() - start, time.process_time() - processor
    return took[0] / FLAGS.calls, took[1] / FLAGS.calls


def main(argv: list[str]) -> None:
    common.check_arguments(argv)
    tf.config.threading.set_intra_op_parallelism_threads(FLAGS.threads)
    calls = systems()
    for call in calls.values():
        seconds(call)
    rounds = [{name: seconds(call) for name, call in calls.items()} for _ in range(FLAGS.rounds)]
    size = 4 * FLAGS.rows * FLAGS.columns
    for name in calls:
        median, processor = (statistics.median(r[name][n] for r in rounds) for n in (0, 1))
        common.report(
            {
                "system": name,
                "milliseconds": round(1e3 * median, 3),
                "processor_nanoseconds_per_byte": round(1e9 * processor / size, 3),
                "gigabytes_per_second": round(size / median / 1e9, 2),
            }
        )
    ratios = {
        f"ratio_stock_{name}": round(
            statistics.median(r[f"stock_{name}"][0] / r[name][0] for r in rounds), 3
        )
        for name in PAIRS
    }
    settings = {name: FLAGS[name].value for name in ("rows", "columns", "sparsify", "threads")}
    common.report({"benchmark": "compression", **settings, "rounds": FLAGS.rounds, **ratios})


if __name__ == "__main__":
    app.run(main)
