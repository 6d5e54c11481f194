"""Writes the same rows as CSV, Parquet and TFRecord files."""

import pathlib
from collections.abc import Callable, Mapping, Sequence

import pyarrow as pa
import pyarrow.parquet as pq
import tensorflow as tf

Rows = Sequence[Mapping[str, object]]


def write_csv(path: pathlib.Path, rows: Rows) -> pathlib.Path:
    """Writes a header and a line for each row; what is None is missing, lists have bars."""

    def text(value: object) -> str:
        if isinstance(value, list):
            return "|".join(map(text, value))
        return "" if value is None else str(value)

    lines = [",".join(rows[0]), *(",".join(map(text, row.values())) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def write_parquet(path: pathlib.Path, rows: Rows, group: int = 7) -> pathlib.Path:
    """Writes row groups of so many rows."""
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    pq.write_table(pa.table(columns), path, row_group_size=group)
    return path


def write_tfrecord(path: pathlib.Path, rows: Rows) -> pathlib.Path:
    """Writes an `Example` for each row, without features that are None."""
    with tf.io.TFRecordWriter(str(path)) as writer:
        for row in rows:
            writer.write(example(row).SerializeToString())
    return path


def example(row: Mapping[str, object]) -> tf.train.Example:
    """Returns a row as an `Example`."""
    made = tf.train.Example()
    for name, value in row.items():
        values = value if isinstance(value, list) else [] if value is None else [value]
        feature = made.features.feature[name]
        for one in values:
            if isinstance(one, str):
                feature.bytes_list.value.append(one.encode())
            elif isinstance(one, int):
                feature.int64_list.value.append(one)
            else:
                feature.float_list.value.append(one)
    return made


WRITERS: dict[str, Callable[[pathlib.Path, Rows], pathlib.Path]] = {
    "Csv": write_csv,
    "Parquet": write_parquet,
    "TfRecord": write_tfrecord,
}
