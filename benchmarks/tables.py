"""How long large tables take, and how much memory: `--parts` says of what.

`build`, the first values of a table of `--gigabytes` with rows of `--dimension` floats:

- `uniform`, `normal` and `truncated_normal`, by this package's op on one thread, against
  TensorFlow's own, `stock_uniform` and so on, and against `fill`, NumPy's, of memory that is as
  fresh: what memory allows. They take turns, on a twentieth of the table (at most 256 MB); the
  first round warms up. `gigabytes_per_second` is by the clock, `gigabytes_per_core_second` by
  processor time, which other programs hardly change. Ratios are medians of the rounds' ratios of
  processor times.
- `servers`: building an `EmbeddingCollection` of it and Adagrad's accumulators on `--ps` parameter
  servers. `ratio_build_peak` is the largest of the servers' peaks over the bytes of its rows, when
  the layer has been built, `ratio_optimizer_peak` over those of rows, accumulators and versions;
  both without what a server takes before. `coordinator_megabytes` is by how much this process grew.

`files`, the same table and Adagrad's accumulators, on the same servers, saved and restored by
`recsync.checkpoint` ("servers"), by Keras's `save_weights` and `load_weights` ("keras") and by
`tf.train.Checkpoint` ("tensorflow"), once each; and an array as large that NumPy writes to the same
folder. `coordinator_megabytes` and `server_megabytes` are by how much this process and the server
that grew most did meanwhile, at the most. `ratio_keras_save` is Keras's time over ours.

`elsewhere`, a checkpoint of the trained table restored on `--restore_ps` parameter servers of
another cluster, of which a thousand rows are compared with the file's.

`deltas`, checkpoints while a part of the rows changes: each `--touched` share of the rows is named
once in one step, and a delta is saved after it. `ratio_delta_<share>` is the time
that it took to write over that of the full one before.

`export`, the table as `callbacks.Publish` writes it for inference, inside of a model and apart from
it, in full and as a delta of the largest share; and the `serving.TableReader` that serves it:
`open` and `refresh` with all checksums, `open_unverified` without, `lookup` of 4,096 rows at
random, in microseconds. `reader_megabytes` is by how much a process of its own grew that opens the
table and looks up a hundred times, files that are mapped into its memory left out.

`training`, steps of 512 examples on two workers with `callbacks.Checkpoint`, which saves the table
every `--save_seconds`, and without, in turns: `ratio_saving_plain` is the median of the rounds'
ratios of steps a second; `pause_seconds` is how long training stood still for one.

    python benchmarks/tables.py --json=tables.json
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import common
import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import tf_recsync as recsync
from tf_recsync import ops
from tf_recsync.checkpoint.callback import SavedCheckpoint
from tf_recsync.layers import EmbeddingCollection, FeatureConfig, TableConfig
from tf_recsync.publishing import Publication

PARTS = ("build", "files", "elsewhere", "deltas", "export", "training")
VERBS = ("save", "restore")
FLAGS = flags.FLAGS
flags.DEFINE_list("parts", list(PARTS), f"Of {', '.join(PARTS)}.")
flags.DEFINE_float("gigabytes", 1.0, "Of the table's values.", lower_bound=0.001)
flags.DEFINE_integer("dimension", 16, "Of a row.", lower_bound=1)
flags.DEFINE_integer("ps", 4, "Parameter servers, with a shard each.", lower_bound=1)
flags.DEFINE_integer("rounds", 7, "Rounds that count.", lower_bound=1)
flags.DEFINE_integer("restore_ps", 2, "elsewhere: parameter servers.", lower_bound=1)
flags.DEFINE_list(
    "ways",
    ["servers", "keras", "tensorflow"],
    "files: ways to save.",
)
flags.DEFINE_list("touched", ["0.001", "0.01", "0.1"], "Shares of the rows that change.")
flags.DEFINE_float("save_seconds", 30.0, "From one checkpoint to the next.", lower_bound=0.1)
flags.DEFINE_string("json", None, "Gets the printed lines.")

DISTRIBUTIONS = ("uniform", "normal", "truncated_normal")
STOCK = {
    "uniform": tf.random.uniform,
    "normal": tf.random.normal,
    "truncated_normal": tf.random.truncated_normal,
}
_MOST_IN_TURNS = 2**28
_FLOAT = 4  # Bytes.


def rows_of(size: float) -> int:
    """How many rows have so many bytes."""
    return max(FLAGS.ps, round(size / (_FLOAT * FLAGS.dimension)))


def systems(rows: int) -> dict[str, Callable[[], object]]:
    """What is measured in turns, each as a function without arguments."""

    def drawn(distribution):
        return lambda: ops.initial_rows(
            dtype=tf.float32,
            dimension=FLAGS.dimension,
            rows=[rows],
            indices=[0],
            counts=[1],
            distributions=[distribution],
            parameters=[0.0, 1.0],
            seeds=[common.SEED],
        )

    shape = [rows, FLAGS.dimension]

    def filled():
        np.empty(shape, np.float32).fill(1.0)

    ours = {name: drawn(name) for name in DISTRIBUTIONS}
    stock = {f"stock_{name}": lambda f=f: f(shape) for name, f in STOCK.items()}
    return {**ours, **stock, "fill": filled}


def seconds(call: Callable[[], object]) -> tuple[float, float]:
    """By the clock, and of the processor."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu


def measure_values() -> dict[str, float]:
    """Reports each system in turns; returns the ratios."""
    rows = rows_of(min(FLAGS.gigabytes * 1e9 / 20, _MOST_IN_TURNS))
    size = _FLOAT * FLAGS.dimension * rows
    calls = systems(rows)
    rounds = [
        {name: seconds(call) for name, call in calls.items()} for _ in range(FLAGS.rounds + 1)
    ]
    rounds = rounds[1:]
    for name in calls:
        wall, cpu = (statistics.median(r[name][i] for r in rounds) for i in (0, 1))
        common.report(
            {
                "system": name,
                "megabytes": round(size / 1e6),
                "milliseconds": round(1e3 * wall, 2),
                "gigabytes_per_second": round(size / wall / 1e9, 2),
                "gigabytes_per_core_second": round(size / cpu / 1e9, 2),
            }
        )

    def ratio(other: str, ours: str) -> float:
        return round(statistics.median(r[other][1] / r[ours][1] for r in rounds), 3)

    stock = {f"ratio_stock_{name}": ratio(f"stock_{name}", name) for name in DISTRIBUTIONS}
    return {**stock, "ratio_fill_uniform": ratio("fill", "uniform")}


def peak(pid: int) -> int:
    """The most bytes of memory that a process has had so far."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def measure_servers() -> dict[str, float]:
    """Builds the table on servers and reports their memory; returns the ratios."""
    rows = rows_of(FLAGS.gigabytes * 1e9)
    keras.utils.set_random_seed(common.SEED)
    with recsync.LocalCluster(workers=1, ps=FLAGS.ps) as cluster:
        strategy = recsync.AsyncStrategy(cluster)
        pids = [cluster.pid("ps", i) for i in range(FLAGS.ps)]
        before, own = [peak(pid) for pid in pids], peak(os.getpid())

        def largest() -> int:
            return max(peak(pid) - old for pid, old in zip(pids, before, strict=True))

        with strategy.scope():
            start = time.perf_counter()
            table = TableConfig("t", rows, FLAGS.dimension, shards=FLAGS.ps)
            layer = EmbeddingCollection([table], [FeatureConfig("f", "t")])
            layer.build()
            # Whatever a server still has to do for it comes before what is read from it.
            for variable in layer.variables:
                tf.gather(variable.value, [0]).numpy()
            took, built = time.perf_counter() - start, largest()
            recsync.optimizers.Adagrad(0.1).build(layer.trainable_variables)
            complete = largest()
        coordinator = peak(os.getpid()) - own
    shard = rows / FLAGS.ps * FLAGS.dimension * _FLOAT
    versions = rows / FLAGS.ps * 8
    common.report(
        {
            "system": "servers",
            "megabytes": round(table.bytes / 1e6),
            "milliseconds": round(1e3 * took, 2),
            "gigabytes_per_second": round(table.bytes / took / 1e9, 2),
            "shard_megabytes": round(shard / 1e6),
            "built_megabytes": round(built / 1e6),
            "optimizer_megabytes": round(complete / 1e6),
            "coordinator_megabytes": round(coordinator / 1e6),
        }
    )
    return {
        "ratio_build_peak": round(built / shard, 3),
        "ratio_optimizer_peak": round(complete / (2 * shard + versions), 3),
    }


def measure_files() -> dict[str, float]:
    """Saves the table and restores it, in three ways; returns how fast ours is beside others."""
    rows = rows_of(FLAGS.gigabytes * 1e9)
    took, sizes = {}, {}
    with (
        tempfile.TemporaryDirectory() as folder,
        recsync.LocalCluster(workers=1, ps=FLAGS.ps) as cluster,
    ):
        with recsync.AsyncStrategy(cluster).scope():
            model = make_model(rows)
        ways = ways_to_save(model, pathlib.Path(folder))
        for name, (save, restore) in ((name, ways[name]) for name in FLAGS.ways):
            for verb, call in (("save", save), ("restore", restore)):
                system = f"{name}_{verb}"
                found = measured(call, cluster)
                took[system] = found.seconds
                sizes.setdefault(name, sum(f.stat().st_size for f in files_of(folder)))
                common.report(
                    {
                        "system": system,
                        "megabytes": round(sizes[name] / 1e6),
                        **found.report(),
                        "gigabytes_per_second": round(sizes[name] / took[system] / 1e9, 2),
                    }
                )
            for file in files_of(folder):
                file.unlink()
        plain = np.zeros(sizes["servers"] // _FLOAT, np.float32)
        took["numpy_save"], _ = seconds(lambda: np.save(pathlib.Path(folder, "p.npy"), plain))
        common.report(
            {
                "system": "numpy_save",
                "megabytes": round(plain.nbytes / 1e6),
                "milliseconds": round(1e3 * took["numpy_save"], 2),
                "gigabytes_per_second": round(plain.nbytes / took["numpy_save"] / 1e9, 2),
            }
        )
    return {
        **{f"ratio_numpy_{verb}": took["numpy_save"] / took[f"servers_{verb}"] for verb in VERBS},
        **{
            f"ratio_{name}_{verb}": round(took[f"{name}_{verb}"] / took[f"servers_{verb}"], 3)
            for name in FLAGS.ways
            if name != "servers"
            for verb in VERBS
        },
    }


def measure_elsewhere() -> dict[str, float]:
    """Restores the table on another number of servers; returns the largest peak over the share."""
    rows = rows_of(FLAGS.gigabytes * 1e9)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "saved")
        with recsync.LocalCluster(workers=1, ps=FLAGS.ps) as cluster:
            with recsync.AsyncStrategy(cluster).scope():
                model = make_model(rows)
            touch(model, rows, shares()[0], keras.callbacks.Callback())
            recsync.checkpoint.save(path, model)
        with recsync.LocalCluster(workers=1, ps=FLAGS.restore_ps) as cluster:
            with recsync.AsyncStrategy(cluster).scope():
                model = make_model(rows, FLAGS.restore_ps)
            found = measured(lambda: recsync.checkpoint.restore(path, model), cluster)
            size = sum(file.stat().st_size for file in files_of(path))
            common.report(
                {
                    "system": "restore_elsewhere",
                    "megabytes": round(size / 1e6),
                    **found.report(),
                    "gigabytes_per_second": round(size / found.seconds / 1e9, 2),
                }
            )
            first = rows // 2
            saved = recsync.checkpoint.open(path).rows("embeddings/t", first, first + 1000)
            table = keras.Model(model.input, model.get_layer("embeddings").output)
            np.testing.assert_array_equal(table({"f": np.arange(first, first + 1000)}), saved)
    return {"ratio_grown_share": round(found.server / (size / FLAGS.restore_ps), 3)}


def make_model(rows: int, shards: int | None = None) -> keras.Model:
    """The table alone, with an optimizer that has all that it keeps."""
    table = TableConfig("t", rows, FLAGS.dimension, shards=shards or FLAGS.ps)
    ids = keras.Input((), dtype="int64", name="f")
    features = [FeatureConfig("f", "t")]
    layer = EmbeddingCollection([table], features, concatenate=True, name="embeddings")
    model = keras.Model({"f": ids}, keras.layers.Dense(1)(layer({"f": ids})))
    model.compile(recsync.optimizers.Adagrad(0.1), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def ways_to_save(
    model: keras.Model, folder: pathlib.Path
) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """By name, what saves a model to a folder and what restores it from there."""
    weights, ours = folder / "tables.weights.h5", folder / "servers"
    stock = tf.train.Checkpoint(model=model)
    return {
        "servers": (
            lambda: recsync.checkpoint.save(ours, model),
            lambda: recsync.checkpoint.restore(ours, model),
        ),
        "keras": (lambda: model.save_weights(weights), lambda: model.load_weights(weights)),
        "tensorflow": (
            lambda: stock.write(str(folder / "stock" / "tables")),
            lambda: stock.read(str(folder / "stock" / "tables")),
        ),
    }


def touch(
    model: keras.Model, rows: int, share: float, callback: keras.callbacks.Callback, epochs: int = 1
) -> None:
    """Has training name a share of the rows, each once in one step of an epoch."""
    ids = np.random.default_rng(common.SEED).permutation(rows)[: max(1, round(share * rows))]
    data = tf.data.Dataset.from_tensors(({"f": ids}, np.ones((len(ids), 1), np.float32)))
    wait = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: wait_for(callback, epoch)
    )
    model.fit(data, epochs=epochs, callbacks=[callback, wait], verbose=0)


def wait_for(callback: keras.callbacks.Callback, versions: int) -> None:
    """Waits until so many versions are published."""
    while len(getattr(callback, "publications", range(versions))) < versions:
        time.sleep(0.01)


def written(version: SavedCheckpoint | Publication) -> dict[str, float]:
    """How much a checkpoint or a publication has, and how long it took."""
    size = sum(file.stat().st_size for file in files_of(version.path))
    return {
        "rows": version.rows,
        "megabytes": round(size / 1e6, 1),
        "milliseconds": round(1e3 * version.write_seconds, 2),
        "pause_milliseconds": round(1e3 * version.pause_seconds, 2),
    }


def shares() -> list[float]:
    return [float(share) for share in FLAGS.touched]


def measure_deltas() -> dict[str, float]:
    """Saves deltas of more and more rows; returns their times over that of a full one."""
    rows = rows_of(FLAGS.gigabytes * 1e9)
    ratios = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        recsync.LocalCluster(workers=1, ps=FLAGS.ps) as cluster,
    ):
        with recsync.AsyncStrategy(cluster).scope():
            model = make_model(rows)
        for share in shares():
            saving = recsync.callbacks.Checkpoint(
                folder, every_seconds=1e9, full_every=2, resume=False, keep=None
            )
            touch(model, rows, share, saving)
            full, delta = saving.saved
            for saved in (full, delta):
                common.report(
                    {
                        "system": "delta" if saved.is_delta else "full",
                        "share": share if saved.is_delta else 1,
                        **written(saved),
                    }
                )
            ratios[f"ratio_delta_{share:g}"] = round(delta.write_seconds / full.write_seconds, 3)
            for file in files_of(folder):
                file.unlink()
    return ratios


def measure_export() -> dict[str, float]:
    """Publishes the table and serves it; returns times of other forms over that of apart."""
    rows = rows_of(FLAGS.gigabytes * 1e9)
    took = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        recsync.LocalCluster(workers=1, ps=FLAGS.ps) as cluster,
    ):
        with recsync.AsyncStrategy(cluster).scope():
            model = make_model(rows)
        for tables, epochs in (("inside", 1), ("apart", 2)):
            # The first one is due at once, and the second one when the first one is there.
            publish = recsync.callbacks.Publish(
                pathlib.Path(folder, tables), 0.001, tables=tables, full_every=epochs
            )
            found = measured(
                lambda p=publish, e=epochs: touch(model, rows, shares()[-1], p, e), cluster
            )
            for done in publish.publications:
                system = f"{tables}_delta" if done.is_delta else tables
                took[system] = done.write_seconds
                # The memory is that of training, too.
                common.report({"system": system, **found.report(), **written(done)})
        measure_reader(pathlib.Path(folder, "apart"), rows)
    return {
        "ratio_inside_apart": round(took["inside"] / took["apart"], 3),
        "ratio_delta_full": round(took["apart_delta"] / took["apart"], 3),
    }


_SERVING = """
import pathlib, sys
import numpy as np
from tf_recsync.serving import TableReader

def own():
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0])

before = own()
reader = TableReader(sys.argv[1])
random = np.random.default_rng(0)
for _ in range(100):
    reader.lookup("t", random.integers(0, int(sys.argv[2]), 4096))
print(own() - before)
"""


def measure_reader(target: pathlib.Path, rows: int) -> None:
    """Reports what it takes to serve the versions of a target, a full one and a delta."""
    ids = np.random.default_rng(common.SEED).integers(0, rows, (200, 4096))
    full, delta = sorted(path for path in target.iterdir() if path.is_dir())
    aside = target.parent / "aside"
    delta.rename(aside)
    found = {}
    found["open_unverified"], _ = seconds(lambda: recsync.serving.TableReader(target, verify=False))
    found["open"], _ = seconds(lambda: recsync.serving.TableReader(target))
    reader = recsync.serving.TableReader(target)
    aside.rename(delta)
    found["refresh"], _ = seconds(reader.refresh)
    lookups = [seconds(lambda own=own: reader.lookup("t", own))[0] for own in ids]
    environment = {**os.environ, "PYTHONPATH": str(common.ROOT)}
    command = [sys.executable, "-c", _SERVING, str(target), str(rows)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    common.report(
        {
            "system": "reader",
            **{f"{name}_milliseconds": round(1e3 * took, 1) for name, took in found.items()},
            "lookup_microseconds": round(1e6 * statistics.median(lookups), 1),
            "reader_megabytes": round(int(done.stdout) / 1024),
        }
    )


def files_of(folder: str | os.PathLike) -> list[pathlib.Path]:
    return [path for path in pathlib.Path(folder).rglob("*") if path.is_file()]


@dataclasses.dataclass(frozen=True)
class Measured:
    """What something took.

    Attributes:
        seconds: by the clock.
        processor: seconds of this process's processor time.
        coordinator: by how many bytes this process grew meanwhile, at the most.
        server: the same of the server that grew most.
    """

    seconds: float
    processor: float
    coordinator: int
    server: int

    def report(self) -> dict[str, float]:
        """What of it is not told by name and size."""
        return {
            "milliseconds": round(1e3 * self.seconds, 2),
            "coordinator_processor_milliseconds": round(1e3 * self.processor, 1),
            "coordinator_megabytes": round(self.coordinator / 1e6),
            "server_megabytes": round(self.server / 1e6),
        }


def measured(call: Callable[[], object], cluster: recsync.LocalCluster) -> Measured:
    """What a call takes."""
    pids = [os.getpid(), *(cluster.pid("ps", i) for i in range(cluster.ps))]
    for pid in pids:
        pathlib.Path(f"/proc/{pid}/clear_refs").write_text("5")  # Peaks begin anew.
    before = [peak(pid) for pid in pids]
    took, processor = seconds(call)
    own, *servers = (peak(pid) - old for pid, old in zip(pids, before, strict=True))
    return Measured(took, processor, own, max(servers))


class Steps(keras.callbacks.Callback):
    """Counts the steps of workers a second, from the second one on that Keras counts."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            self._began, self._first = time.perf_counter(), self._done

    def on_epoch_end(self, epoch, logs=None):
        self.per_second = (self._done - self._first) / (time.perf_counter() - self._began)

    @property
    def _done(self) -> int:
        return sum(self.model.distribute_strategy.worker_steps(self.model))


def measure_training() -> dict[str, float]:
    """Trains with and without saving, in turns; returns how fast it is with."""
    rows = rows_of(FLAGS.gigabytes * 1e9)
    ids = np.random.default_rng(common.SEED).integers(0, rows, 2**20)
    data = tf.data.Dataset.from_tensor_slices(({"f": ids}, np.ones((len(ids), 1), np.float32)))
    data = data.batch(512).repeat().prefetch(16)
    per_second: dict[str, list[float]] = {"plain": [], "saving": []}
    with (
        tempfile.TemporaryDirectory() as folder,
        recsync.LocalCluster(workers=2, ps=FLAGS.ps) as cluster,
    ):
        strategy = recsync.AsyncStrategy(cluster)
        with strategy.scope():
            model = make_model(rows)
        pauses, writing = [], []
        model.fit(data, steps_per_epoch=100, verbose=0)
        for _ in range(FLAGS.rounds):
            for system in per_second:
                steps = Steps()
                saving = recsync.callbacks.Checkpoint(
                    folder, every_seconds=FLAGS.save_seconds, at_end=False, resume=False
                )
                stop = StopAfter(FLAGS.save_seconds * 2.2)
                own = [steps, stop, saving] if system == "saving" else [steps, stop]
                model.fit(data, steps_per_epoch=10**9, callbacks=own, verbose=0)
                per_second[system].append(steps.per_second)
                pauses += [saved.pause_seconds for saved in saving.saved]
                writing += [saved.write_seconds for saved in saving.saved]
    for system, found in per_second.items():
        common.report({"system": system, "steps_per_second": round(statistics.median(found), 1)})
    pairs = zip(per_second["saving"], per_second["plain"], strict=True)
    return {
        "save_seconds": FLAGS.save_seconds,
        "pause_seconds": round(statistics.median(pauses), 3),
        "write_seconds": round(statistics.median(writing), 3),
        "ratio_saving_plain": round(statistics.median(a / b for a, b in pairs), 3),
    }


class StopAfter(keras.callbacks.Callback):
    """Ends training after a time."""

    def __init__(self, seconds: float):
        super().__init__()
        self._seconds = seconds

    def on_train_begin(self, logs=None):
        self._end = time.perf_counter() + self._seconds

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = time.perf_counter() > self._end


def main(argv: list[str]) -> None:
    common.check_arguments(argv)
    unknown = [part for part in FLAGS.parts if part not in PARTS]
    if unknown:
        raise app.UsageError(f"--parts: {unknown} are not among {list(PARTS)}")
    if "servers" not in FLAGS.ways or not set(FLAGS.ways) <= {"servers", "keras", "tensorflow"}:
        raise app.UsageError(
            f"--ways must have servers, keras and tensorflow at most: {FLAGS.ways}"
        )
    if "build" in FLAGS.parts:
        tf.config.threading.set_intra_op_parallelism_threads(1)
        report_part("build", {**measure_values(), **measure_servers()})
    if "files" in FLAGS.parts:
        report_part("files", measure_files())
    if "elsewhere" in FLAGS.parts:
        report_part("elsewhere", measure_elsewhere())
    if "deltas" in FLAGS.parts:
        report_part("deltas", measure_deltas())
    if "export" in FLAGS.parts:
        report_part("export", measure_export())
    if "training" in FLAGS.parts:
        report_part("training", measure_training())


def report_part(part: str, ratios: dict[str, float]) -> None:
    settings = {name: FLAGS[name].value for name in ("gigabytes", "dimension", "ps", "rounds")}
    common.report({"benchmark": "tables", "part": part, **settings, **ratios})


if __name__ == "__main__":
    app.run(main)
