"""What it costs to find the rows of keys, against hash maps and a gather of rows.

What is measured, in nanoseconds for each key, on one thread:

- `find`: lookups of known keys, drawn evenly from all, in batches;
- `train`: the same as in training, which also counts uses and may insert (`recsync` alone; for
  others it is an insertion of keys that are there);
- `train_mean`: `train` in a table whose keys without a row are looked up as the mean of the others,
  of rows of `--dimension` floats: each call goes on with that mean (`recsync` alone);
- `insert`: insertions of new keys into a map that has room for them;
- `evict`: insertions of new keys into a full table, each of which takes another key's row
  (`recsync` alone);
- `refuse`: lookups in training of new keys that an admission threshold of 3 refuses (`recsync`
  alone).

Systems:

- `recsync`: this package's `KeyTable` (cc/engine/key_table.h);
- `unordered_map` and `flat_hash_map`: those of the standard library and of Abseil (keys.cc), which
  are not safe for threads, evict nothing, and count nothing;
- `tensorflow`: `tf.lookup.experimental.MutableHashTable`, in whose times are those of calling an op
  for each batch;
- `gather`: this package's gather of rows of `--dimension` floats with their versions by row number,
  which is what a lookup by key adds to.

How: in one process, each system in turn within a round; the first round warms up and is not
counted. Ratios are the medians of the rounds' ratios of times, those of others over ours.

    python benchmarks/keys.py --json=keys.json
"""

from __future__ import annotations

import ctypes
import pathlib
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable

import common
import numpy as np
import tensorflow as tf
from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_integer("keys", 2**20, "Keys that are known.", lower_bound=1024)
flags.DEFINE_integer("batch", 2**14, "Keys of a call.", lower_bound=1)
flags.DEFINE_integer("batches", 32, "Calls of a round and kind.", lower_bound=1)
flags.DEFINE_integer("partitions", 64, "Of our table, a power of two.", lower_bound=1)
flags.DEFINE_integer("dimension", 16, "Floats of a row that is gathered.", lower_bound=1)
flags.DEFINE_integer("rounds", 7, "Rounds that count.", lower_bound=1)
flags.DEFINE_string("json", None, "Gets the printed lines.")

NATIVE = (common.OURS, "unordered_map", "flat_hash_map")
STOCK = "tensorflow"
GATHER = "gather"
REFUSING = 3

Times = dict[tuple[str, str], float]  # By system and kind, nanoseconds for each key.


def load() -> ctypes.CDLL:
    """The maps, compiled as the package is."""
    with tempfile.TemporaryDirectory() as folder:
        library = pathlib.Path(folder) / "keys.so"
        sources = [common.ROOT / "benchmarks/keys.cc", common.ROOT / "cc/engine/key_table.cc"]
        options = ["-O3", "-shared", "-fPIC", "-pthread", f"-I{common.ROOT}"]
        options += [f.replace("-I", "-isystem", 1) for f in tf.sysconfig.get_compile_flags()]
        links = tf.sysconfig.get_link_flags()
        subprocess.check_call(["g++", *options, *map(str, sources), *links, "-o", str(library)])
        return ctypes.CDLL(str(library))


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


class Data:
    """Keys that are known, in an order of their own, and others."""

    def __init__(self) -> None:
        random = np.random.default_rng(1)
        looked_up = FLAGS.batches * FLAGS.batch
        drawn = random.integers(
            np.iinfo(np.int64).min, np.iinfo(np.int64).max, FLAGS.keys + looked_up, np.int64
        )
        self.known, self.new = drawn[: FLAGS.keys], drawn[FLAGS.keys :]
        self.positions = random.integers(0, FLAGS.keys, looked_up)
        self.looked_up = self.known[self.positions]
        self.rows = np.empty([2 * FLAGS.keys + looked_up], np.int64)  # More than any call has keys.


def per_key(call: Callable[[np.ndarray], object], keys: np.ndarray) -> float:
    """The nanoseconds for each key of calls with a batch each."""
    batches = np.split(keys, range(FLAGS.batch, len(keys), FLAGS.batch))
    start = time.perf_counter_ns()
    for batch in batches:
        call(batch)
    return (time.perf_counter_ns() - start) / len(keys)


class Native:
    def __init__(self, library: ctypes.CDLL, data: Data) -> None:
        self._library = library
        self._data = data

    def make(self, system: str, rows: int, min_count: int = 1, mean_width: int = 0) -> None:
        self._library.MakeMap(
            NATIVE.index(system),
            *map(ctypes.c_int64, (rows, FLAGS.partitions, min_count, mean_width)),
        )

    def insert(self, keys: np.ndarray) -> None:
        self._library.Insert(pointer(keys), ctypes.c_int64(len(keys)), pointer(self._data.rows))

    def find(self, keys: np.ndarray) -> None:
        self._library.Find(pointer(keys), ctypes.c_int64(len(keys)), pointer(self._data.rows))

    def round(self, system: str) -> Times:
        data = self._data
        # A table whose keys lie unevenly in partitions has room for all of them, too.
        self.make(system, 5 * (FLAGS.keys + len(data.new)) // 4)
        self.insert(data.known)
        expected = data.rows[data.positions]
        self.find(data.looked_up)
        if not np.array_equal(data.rows[: len(expected)], expected):
            raise AssertionError(f"{system} found other rows than it gave")
        times = {"find": per_key(self.find, data.looked_up)}
        times["train"] = per_key(self.insert, data.looked_up)
        times["insert"] = per_key(self.insert, data.new)
        if system == common.OURS:
            self.make(system, FLAGS.keys)
            self.insert(np.concatenate([data.known, data.known + 1]))
            times["evict"] = per_key(self.insert, data.new)
            self.make(system, FLAGS.keys, min_count=REFUSING)
            times["refuse"] = per_key(self.insert, data.new)
            self.make(system, 5 * FLAGS.keys // 4, mean_width=FLAGS.dimension)
            self.insert(data.known)
            times["train_mean"] = per_key(self.insert, data.looked_up)
        return {(system, kind): value for kind, value in times.items()}


def stock_round(data: Data) -> Times:
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, -1)
    table.insert(data.known, np.arange(len(data.known)))

    def insert(keys: np.ndarray) -> None:
        table.insert(keys, data.rows[: len(keys)])

    return {
        (STOCK, "find"): per_key(table.lookup, data.looked_up),
        (STOCK, "train"): per_key(insert, data.looked_up),
        (STOCK, "insert"): per_key(insert, data.new),
    }


class Gather:
    def __init__(self, library: ctypes.CDLL, data: Data) -> None:
        self._library = library
        self._positions = data.positions
        self._values = np.ones([FLAGS.keys, FLAGS.dimension], np.float32)
        self._versions = np.zeros([FLAGS.keys], np.int64)
        self._to = np.empty([FLAGS.batch, FLAGS.dimension], np.float32)
        self._found = np.empty([FLAGS.batch], np.int64)

    def gather(self, rows: np.ndarray) -> None:
        self._library.Gather(
            pointer(self._values),
            pointer(self._versions),
            *map(ctypes.c_int64, self._values.shape),
            pointer(rows),
            ctypes.c_int64(len(rows)),
            pointer(self._to),
            pointer(self._found),
        )

    def round(self) -> Times:
        return {(GATHER, "find"): per_key(self.gather, self._positions)}


def main(argv: list[str]) -> None:
    common.check_arguments(argv)
    library = load()
    data = Data()
    native, gather = Native(library, data), Gather(library, data)

    def one_round() -> Times:
        times: Times = {}
        for system in NATIVE:
            times |= native.round(system)
        return times | stock_round(data) | gather.round()

    one_round()
    rounds = [one_round() for _ in range(FLAGS.rounds)]
    for system in (*NATIVE, STOCK, GATHER):
        line: dict[str, object] = {"system": system}
        for name, kind in rounds[0]:
            if name == system:
                median = statistics.median(times[name, kind] for times in rounds)
                line[f"{kind}_nanoseconds"] = round(median, 1)
        common.report(line)
    ratios = {
        f"ratio_{kind}_{system}": round(
            statistics.median(times[system, kind] / times[common.OURS, kind] for times in rounds),
            2,
        )
        for system, kind in rounds[0]
        if system != common.OURS and kind != "train"
    }
    means = [times[common.OURS, "train_mean"] / times[common.OURS, "train"] for times in rounds]
    ratios["ratio_train_mean_train"] = round(statistics.median(means), 2)
    names = ("keys", "batch", "partitions", "dimension", "rounds")
    settings = {name: getattr(FLAGS, name) for name in names}
    common.report({"benchmark": "keys", **settings, **ratios})


if __name__ == "__main__":
    app.run(main)
