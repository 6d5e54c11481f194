"""How many rows a second are read from CSV, TFRecord and Parquet files.

What is measured: whole passes over the same made-up click log, which has the layout of Criteo's (a
label, 13 numbers with decimals and 26 columns of 8 hexadecimal digits, with ids as skewed), as
`recsync.data.Csv`, `TfRecord` and `Parquet` read it, from files in the page cache: in the order of
the rows (`plain`), and through a shuffle buffer of `--shuffle` rows (`shuffled`).

How: in one process, each format in turn within a round; the first round warms up and is not
counted. `ratio_parquet_csv` and the others are medians of the rounds' ratios of rows a second, and
`ratio_cpu_parquet_csv` of rows a second of processor time, which other programs hardly change;
`open_seconds` is how long the reader takes to be made, which counts rows, and `megabytes` how large
the files are. `cpu_us` is the processor time of a row.

    python benchmarks/data_formats.py --json=data_formats.json
"""

from __future__ import annotations

import csv
import pathlib
import statistics
import tempfile
import time

import common
import machine
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tensorflow as tf
from absl import app, flags

import tf_recsync as recsync

FLAGS = flags.FLAGS
flags.DEFINE_integer("rows", 100_000, "Of the log.", lower_bound=1)
flags.DEFINE_integer("files", 4, "That the rows are divided among.", lower_bound=1)
flags.DEFINE_integer("batch_size", 512, "Rows of a batch.", lower_bound=1)
flags.DEFINE_integer("row_group", 25_000, "Rows of a row group.", lower_bound=1)
flags.DEFINE_integer("shuffle", 10_000, "Rows of the shuffle buffer.", lower_bound=1)
flags.DEFINE_integer("rounds", 5, "Rounds that count.", lower_bound=1)
flags.DEFINE_string("json", None, "Gets the printed lines.")

NUMBERS = [f"I{i}" for i in range(1, 14)]
CATEGORIES = [f"C{i}" for i in range(1, 27)]
READERS = {
    "csv": recsync.data.Csv,
    "tfrecord": recsync.data.TfRecord,
    "parquet": recsync.data.Parquet,
}
ORDERS = ("plain", "shuffled")


def make_columns(rows: int, seed: int) -> dict[str, list]:
    """The columns of a file."""
    draw = np.random.default_rng(seed)
    columns: dict[str, list] = {"label": draw.integers(0, 2, rows).tolist()}
    for name in NUMBERS:
        columns[name] = draw.exponential(100, rows).round(2).tolist()
    for name in CATEGORIES:
        ids = np.minimum(draw.zipf(1.3, rows), 1 << 31)
        columns[name] = [f"{number * 2_654_435_761 % (1 << 32):08x}" for number in ids.tolist()]
    return columns


def write_example_file(path: pathlib.Path, columns: dict[str, list]) -> None:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for row in zip(*columns.values(), strict=True):
            example = tf.train.Example()
            for name, value in zip(columns, row, strict=True):
                feature = example.features.feature[name]
                if isinstance(value, str):
                    feature.bytes_list.value.append(value.encode())
                elif isinstance(value, int):
                    feature.int64_list.value.append(value)
                else:
                    feature.float_list.value.append(value)
            writer.write(example.SerializeToString())


def write_files(folder: pathlib.Path) -> None:
    """Writes the log in each format, to a folder of this name."""
    for name in READERS:
        (folder / name).mkdir()
    for number in range(FLAGS.files):
        columns = make_columns(-(-FLAGS.rows // FLAGS.files), common.SEED + number)
        part = f"part-{number}"
        with open(folder / "csv" / part, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(zip(*columns.values(), strict=True))
        write_example_file(folder / "tfrecord" / part, columns)
        pq.write_table(pa.table(columns), folder / "parquet" / part, row_group_size=FLAGS.row_group)


def make_schema() -> recsync.data.Schema:
    return recsync.data.Schema(
        label="label",
        positive=("1",),
        negative=("0",),
        numeric=tuple(recsync.data.NumericColumn(name, log1p=True) for name in NUMBERS),
        categorical=tuple(
            recsync.data.CategoricalColumn(name, hash_buckets=100_000) for name in CATEGORIES
        ),
    )


def read_all(dataset: tf.data.Dataset) -> int:
    """How many rows there are; all batches are made, and left to TensorFlow."""
    count = dataset.reduce(0, lambda rows, batch: rows + tf.size(batch[1]))
    return int(count)


def main(argv: list[str]) -> None:
    common.check_arguments(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_files(folder)
        schema = make_schema()
        datasets, lines = {}, []
        for format_name, reader in READERS.items():
            started = time.perf_counter()
            data = reader(folder / format_name, schema, test_fraction=0.0)
            opened = time.perf_counter() - started
            size = sum(path.stat().st_size for path in (folder / format_name).iterdir())
            lines.append({"open_seconds": round(opened, 3), "megabytes": round(size / 1e6, 1)})
            datasets[format_name, "plain"] = data.train(FLAGS.batch_size)
            datasets[format_name, "shuffled"] = data.train(
                FLAGS.batch_size, shuffle=FLAGS.shuffle, seed=common.SEED
            )
        rounds = []
        for _ in range(FLAGS.rounds + 1):
            speeds = {}
            for system, dataset in datasets.items():
                started, cpu = time.perf_counter(), machine.cpu_seconds([])
                rows = read_all(dataset)
                seconds = time.perf_counter() - started
                speeds[system] = rows / seconds, (machine.cpu_seconds([]) - cpu) / rows
            rounds.append(speeds)
    measured = rounds[1:]
    for format_name, line in zip(READERS, lines, strict=True):
        for order in ORDERS:
            found = [speeds[format_name, order] for speeds in measured]
            common.report(
                {
                    "system": format_name,
                    "order": order,
                    "rows_per_second": round(statistics.median(speed for speed, _ in found)),
                    "cpu_us": round(1e6 * statistics.median(cpu for _, cpu in found), 2),
                    **line,
                }
            )
    ratios = {}
    for other in ("tfrecord", "parquet"):
        for order, suffix in (("plain", ""), ("shuffled", "_shuffled")):
            pairs = [(speeds[other, order], speeds["csv", order]) for speeds in measured]
            by_clock = statistics.median(ours[0] / csvs[0] for ours, csvs in pairs)
            by_cpu = statistics.median(csvs[1] / ours[1] for ours, csvs in pairs)
            ratios[f"ratio_{other}_csv{suffix}"] = round(by_clock, 3)
            ratios[f"ratio_cpu_{other}_csv{suffix}"] = round(by_cpu, 3)
    settings = {
        "rows": FLAGS.rows,
        "batch_size": FLAGS.batch_size,
        "row_group": FLAGS.row_group,
        "shuffle": FLAGS.shuffle,
        "rounds": FLAGS.rounds,
    }
    common.report({"benchmark": "data_formats", **settings, **ratios})


if __name__ == "__main__":
    app.run(main)
