"""What a worker takes to find out which rows of which servers the ids of a batch are.

What is measured: microseconds for a batch, on one thread, in which each feature has an id for each
example and a table of its own, divided among `shards` servers. Small ids are more frequent.

- `recsync`: this package's `IdRouter` (cc/engine/id_router.h), as the op of a worker calls it;
- `numpy`: `np.unique` of each feature's ids, which lists the different ones and their positions,
  and their division by shards.

How: in one process, the systems in turn within a round; the first round warms up and is not
counted. `ratio` is the median of the rounds' ratios of times, that of numpy over ours.

    python benchmarks/routing.py --shards=1,2,20,200 --json=routing.json
"""

from __future__ import annotations

import ctypes
import pathlib
import subprocess
import tempfile
import time

import common
import numpy as np
from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_list("shards", ["1", "2", "20", "200"], "The numbers of servers.")
flags.DEFINE_integer("features", 26, "Features.", lower_bound=1)
flags.DEFINE_integer("batch", 512, "Examples.", lower_bound=1)
flags.DEFINE_integer("rows", 100_000, "Of a table.", lower_bound=1)
flags.DEFINE_integer("times", 100, "Batches of a round.", lower_bound=1)
flags.DEFINE_integer("rounds", 7, "Rounds that count.", lower_bound=1)
flags.DEFINE_string("json", None, "Gets the printed lines.")


def load() -> ctypes.CDLL:
    """The router, compiled as the package is."""
    with tempfile.TemporaryDirectory() as folder:
        library = pathlib.Path(folder) / "routing.so"
        source = common.ROOT / "benchmarks/routing.cc"
        options = ["-std=c++17", "-O3", "-fno-math-errno", "-shared", "-fPIC", f"-I{common.ROOT}"]
        subprocess.check_call(["g++", *options, str(source), "-o", str(library)])
        found = ctypes.CDLL(str(library))
        found.Route.restype = ctypes.c_double
        return found


def route(library: ctypes.CDLL, ids: np.ndarray, shards: int) -> tuple[float, np.ndarray]:
    """The seconds of a batch, and how many rows are listed of each shard."""
    listed = np.empty([shards], np.int64)
    features, batch = ids.shape
    sizes = map(ctypes.c_int64, (features, batch, FLAGS.rows, shards, FLAGS.times))
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (ids, listed)]
    seconds = library.Route(pointers[0], *sizes, pointers[1])
    if seconds < 0:
        raise AssertionError("ids are out of range")
    return seconds, listed


def route_by_numpy(ids: np.ndarray, shards: int) -> tuple[float, np.ndarray]:
    """The same."""
    began = time.perf_counter()
    listed = np.zeros([shards], np.int64)
    for own in ids:
        different, _ = np.unique(own, return_inverse=True)
        listed += np.bincount(different % shards, minlength=shards)
    return time.perf_counter() - began, listed


def main(argv: list[str]) -> None:
    common.check_arguments(argv)
    library = load()
    drawn = np.random.default_rng(1).random([FLAGS.features, FLAGS.batch])
    ids = (drawn**4 * FLAGS.rows).astype(np.int64)
    for shards in map(int, FLAGS.shards):
        times = []
        for _ in range(FLAGS.rounds + 1):
            ours, listed = route(library, ids, shards)
            numpy, expected = route_by_numpy(ids, shards)
            np.testing.assert_array_equal(listed, expected)
            times.append((ours, numpy))
        ours, numpy = (round(1e6 * s, 1) for s in np.median(times[1:], axis=0).tolist())
        line = {"benchmark": "routing", "shards": shards, "features": FLAGS.features}
        line |= {"batch_size": FLAGS.batch, "recsync_us": ours, "numpy_us": numpy}
        ratios = [numpy / ours for ours, numpy in times[1:]]
        common.report(line | common.summary_of_ratios(ratios))


if __name__ == "__main__":
    app.run(main)
