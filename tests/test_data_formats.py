"""CSV, Parquet and TFRecord files of the same rows give the same batches."""

import collections
import datetime
import decimal
import gzip
import os
import pathlib
import random
import re
import sys

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from data_files import WRITERS, example, write_csv, write_parquet, write_tfrecord
from helpers import LabelSum, compiled, mean_output

import tf_recsync as recsync
from tf_recsync import data as rd
from tf_recsync.data import _parquet
from tf_recsync.optimizers import SGD
from tf_recsync.strategies import data_parts

COLUMNS = {
    "numeric": (
        rd.NumericColumn("age", mean=40.0, std=10.0, boundaries=(30.0, 50.0)),
        rd.NumericColumn("gain", log1p=True),
    ),
    "categorical": (
        rd.CategoricalColumn("country", vocabulary=("CH", "US", "D E")),
        rd.CategoricalColumn("device", hash_buckets=1000),
        rd.CategoricalColumn("films", hash_buckets=50, multi_hot=True, weights="seen"),
        rd.CategoricalColumn("tags", vocabulary=("a", "b"), multi_hot=True),
    ),
    "crosses": (rd.CrossedColumn(("country", "age_bucket")),),
    "positive": ("1",),
}


def schema(**kwargs) -> rd.Schema:
    arguments = COLUMNS | {
        "label": ("click", "buy"),
        "weight": "weight",
        "timestamp": "time",
    }
    return rd.Schema(**(arguments | kwargs))


# Data sets of few columns are made in less time.
SMALL = rd.Schema(label="click", positive=("1",), weight="weight", timestamp="time")


def rows(count: int, seed: int = 1) -> list[dict]:
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        films = [draw.randrange(5) for _ in range(draw.randrange(4))]
        found.append(
            {
                "unused": 1.5,
                "age": draw.choice([None, 20, 30, 45, 61]),
                "gain": draw.choice([None, 0.0, 0.5, 1234.25]),
                "country": draw.choice([None, "US", "CH", "D E", " US ", "?", "zz"]),
                "device": draw.choice([None, 7, 1234567]),
                "films": films,
                "seen": [draw.choice([0.5, 2.0]) for _ in films],
                "tags": draw.choice([[], ["a"], ["b", "zz", "a"]]),
                "click": draw.randrange(2),
                "buy": draw.randrange(2),
                "weight": draw.choice([0.25, 1.0, 3.0]),
                "time": 1_704_067_200 + draw.randrange(3 * 86_400),
            }
        )
    return found


def batches(dataset: tf.data.Dataset) -> list[list]:
    """The tensors of each batch, ragged ones as lists."""
    return [
        [
            tensor.to_list() if isinstance(tensor, tf.RaggedTensor) else tensor.numpy().tolist()
            for tensor in tf.nest.flatten(batch)
        ]
        for batch in dataset
    ]


def written(folder: pathlib.Path, kind: str, values: list[dict], files: int = 1) -> pathlib.Path:
    """Writes rows to files of a folder of their own, and returns it."""
    folder = folder / kind
    folder.mkdir()
    size = -(-len(values) // files)
    for i in range(files):
        WRITERS[kind](folder / f"{i}", values[i * size : (i + 1) * size])
    return folder


def read(folder: pathlib.Path, kind: str, **kwargs) -> rd.ClickData:
    arguments = {"schema": schema(), "test_fraction": 0.0} | kwargs
    return getattr(rd, kind)(folder, arguments.pop("schema"), **arguments)


def hashed(text: str, buckets: int) -> int:
    return 1 + int(tf.strings.to_hash_bucket_fast(text, buckets - 1))


@pytest.fixture(name="real_data")
def _real_data() -> pathlib.Path:
    default = pathlib.Path(__file__).resolve().parents[1].parent / "shared" / "data"
    root = pathlib.Path(os.environ.get("RECSYNC_DATA", default))
    if not root.is_dir():
        pytest.skip("no real data: set RECSYNC_DATA to the folder that has adult/ and the others")
    return root


@pytest.mark.parametrize("kind", WRITERS)
def test_features_labels_and_weights_are_those_of_a_plain_calculation(tmp_path, kind):
    values = rows(50)
    data = read(written(tmp_path, kind, values, files=2), kind, test_fraction=0.2)
    assert (data.train_rows, data.test_rows) == (40, 10)
    words = {"CH": 2, "US": 3, "D E": 4, None: 0, "?": 0, "zz": 1, " US ": 3}
    bucket = {None: 0, 20: 1, 30: 2, 45: 2, 61: 3}
    found = [*data.train(16), *data.test(16)]
    assert [len(weight) for *_, weight in found] == [16, 16, 8, 10]
    for spec, part in zip(
        tf.nest.flatten(data.spec.input_signature()), tf.nest.flatten(found[0]), strict=True
    ):
        assert (spec.shape.as_list(), spec.dtype) == ([None, *part.shape[1:]], part.dtype)
    place = 0
    for features, labels, weight in found:
        for i in range(len(weight)):
            row = values[place + i]
            age, gain = row["age"], row["gain"]
            expected = [
                0.0 if age is None else (age - 40) / 10,
                0.0 if gain is None else np.log1p(gain),
            ]
            np.testing.assert_allclose(features["numeric"][i], expected, rtol=1e-6)
            country = words[row["country"]]
            assert features["country"][i] == country
            assert features["age_bucket"][i] == bucket[age]
            assert features["country_x_age_bucket"][i] == 4 * country + bucket[age]
            device = row["device"]
            assert features["device"][i] == (0 if device is None else hashed(str(device), 1000))
            films = [hashed(str(film), 50) for film in row["films"]]
            assert features["films"][i].numpy().tolist() == films
            assert features["films_weights"][i].numpy().tolist() == row["seen"]
            tags = [{"a": 2, "b": 3}.get(tag, 1) for tag in row["tags"]]
            assert features["tags"][i].numpy().tolist() == tags
            assert (labels["click"][i, 0], labels["buy"][i, 0]) == (row["click"], row["buy"])
            assert weight[i] == row["weight"]
        place += len(weight)


def test_real_data_give_equal_batches_in_all_formats(tmp_path, real_data):
    text = gzip.decompress((real_data / "criteo_sample" / "train.txt.gz").read_bytes()).decode()
    names = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
    values = []
    for line in text.splitlines()[:1000]:
        fields = [field or None for field in line.split("\t")]
        numbers = [None if field is None else int(field) for field in fields[:14]]
        values.append(dict(zip(names, [*numbers, *fields[14:]], strict=True)))
    described = rd.Schema(
        label="label",
        positive=("1",),
        negative=("0",),
        numeric=tuple(rd.NumericColumn(name, log1p=True) for name in names[1:14]),
        categorical=tuple(rd.CategoricalColumn(name, hash_buckets=10_000) for name in names[14:]),
    )
    found = []
    for kind in WRITERS:
        folder = written(tmp_path, kind, values, files=2)
        data = read(folder, kind, schema=described, test_fraction=0.1)
        found.append([*data.train(256), *data.test(256)])
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            tf.nest.map_structure(np.testing.assert_array_equal, one, other)
    plain = tmp_path / "plain.tsv"
    plain.write_text("".join(line + "\n" for line in text.splitlines()[:1000]))
    data = rd.Criteo(plain, hash_buckets=10_000)
    for one, other in zip(found[0], [*data.train(256), *data.test(256)], strict=True):
        tf.nest.map_structure(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), one, other)


@pytest.mark.parametrize("kind", ["Parquet", "TfRecord"])
def test_people_of_the_census_are_the_same_in_all_formats(tmp_path, real_data, kind):
    adult = rd.adult(real_data / "adult")
    columns = adult.schema.columns
    lines = gzip.decompress((real_data / "adult" / "adult.data.gz").read_bytes()).decode()
    values = []
    for line in lines.splitlines()[:1500]:
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == len(columns) and fields[0].isdecimal():
            values.append(
                {
                    name: int(field) if field.isdecimal() else field
                    for name, field in zip(columns, fields, strict=True)
                }
            )
    data = read(written(tmp_path, kind, values), kind, schema=adult.schema)
    for one, other in zip(adult.train(256).take(5), data.train(256), strict=False):
        tf.nest.map_structure(np.testing.assert_array_equal, one, other)


@pytest.mark.cases("Parquet")
@pytest.mark.parametrize("kind", WRITERS)
def test_shuffling_depends_on_the_seed_and_the_pass_and_keeps_the_rows(tmp_path, kind):
    values = [{"age": i, "click": 1} for i in range(60)]
    numeric = (rd.NumericColumn("age"),)
    plain = rd.Schema(label="click", positive=("1",), numeric=numeric)
    data = read(written(tmp_path, kind, values, files=3), kind, schema=plain)

    def ages(dataset: tf.data.Dataset) -> list[int]:
        return [int(age) for features, _ in dataset for age in features["numeric"][:, 0]]

    dataset = data.train(8, shuffle=10, seed=3)
    first, second = ages(dataset), ages(dataset)
    assert ages(data.train(8)) == sorted(first) == sorted(second) == list(range(60))
    assert first != second
    assert ages(data.train(8, shuffle=10, seed=3)) == first
    assert ages(data.train(8, shuffle=10, seed=4)) != first
    if kind != "Csv":
        # Not only what the buffer holds: files and row groups are in another order, too.
        starts = [ages(data.train(8, shuffle=1, seed=seed))[0] for seed in range(5)]
        assert len(set(starts)) > 1


def test_ids_of_more_than_32_bits_are_kept(tmp_path):
    values = rows(20)
    found = []
    for kind in WRITERS:
        column = rd.CategoricalColumn("country", hash_buckets=1 << 50)
        described = rd.Schema(label="click", positive=("1",), categorical=(column,))
        data = read(WRITERS[kind](tmp_path / kind, values), kind, schema=described)
        found.append([i for features, _ in data.train(8) for i in features["country"].numpy()])
    assert found[0] == found[1] == found[2]
    assert max(found[0]) > 1 << 32


def test_parquet_is_read_by_row_group(tmp_path, monkeypatch):
    values = [{"age": i, "click": 1, "unused": "x" * 100} for i in range(2000)]
    path = write_parquet(tmp_path / "a", values, group=10)
    groups, columns = [], []
    plain = _parquet._read_group

    def counted(pa, wanted, path, group, partitions):
        table = plain(pa, wanted, path, group, partitions)
        groups.append(len(table))
        columns.append(table.column_names)
        return table

    monkeypatch.setattr(_parquet, "_read_group", counted)
    numeric = (rd.NumericColumn("age"),)
    data = rd.Parquet(path, rd.Schema(label="click", positive=("1",), numeric=numeric))
    iterator = iter(data.train(10, shuffle=20, seed=1))
    next(iterator)
    assert 0 < len(groups) < 100 and set(groups) == {10}
    assert columns[0] == ["age", "click"]
    assert sum(len(label) for _, label in iterator) == data.train_rows - 10


def of_words(single, several, words) -> rd.Schema:
    """Two categorical columns of the same words: one has a word, the other a list of them."""
    words = tuple(words)
    return rd.Schema(
        label="click",
        positive=("1",),
        categorical=(
            rd.CategoricalColumn(single, vocabulary=words),
            rd.CategoricalColumn(several, vocabulary=words, multi_hot=True),
        ),
    )


@pytest.mark.parametrize("kind", ["Parquet", "TfRecord"])
def test_floats_have_the_same_texts_as_categories_in_all_formats(tmp_path, kind):
    texts = ["7", "1234567", "1234568", "10000000000", "0", "0.1", "0.33333334", "-2.5", "1e-05"]
    numbers = [np.float32(text).item() for text in texts]
    if kind == "Parquet":
        column = pa.array(np.array([*texts, "nan"], np.float32))
        path = tmp_path / "a"
        lists = pa.array([[value] for value in column.to_pylist()], pa.list_(pa.float32()))
        pq.write_table(pa.table({"x": column, "xs": lists, "click": [1.0] * 10}), path)
    else:
        values = [{"x": x, "xs": [x], "click": 1.0} for x in [*numbers, float("nan")]]
        path = write_tfrecord(tmp_path / "a", values)
    described = of_words("x", "xs", texts)
    ((features, label),) = read(path, kind, schema=described).train(16)
    assert features["x"].numpy().tolist() == [*range(2, 11), 0], "what is no number is missing"
    assert features["xs"].to_list() == [[i] for i in [*range(2, 11), 0]]
    assert label.numpy().tolist() == [[1]] * 10


def test_floats_of_64_and_16_bits_have_their_shortest_texts(tmp_path):
    texts = ("0.1", "1234567.5", "1e+300", "123456789012345.5")
    halves = ("0.1", "2", "65504", "0.25")
    columns = {"double": np.array(texts, np.float64), "half": np.array(halves, np.float16)}
    pq.write_table(pa.table({**columns, "click": [1] * 4}), tmp_path / "a")
    described = rd.Schema(
        label="click",
        positive=("1",),
        categorical=(
            rd.CategoricalColumn("double", vocabulary=texts),
            rd.CategoricalColumn("half", vocabulary=halves),
        ),
    )
    ((features, _),) = read(tmp_path / "a", "Parquet", schema=described).train(8)
    assert features["double"].numpy().tolist() == [2, 3, 4, 5]
    assert features["half"].numpy().tolist() == [2, 3, 4, 5]


# --- Malformed rows


def malformed(kind: str) -> list[tuple[dict, str]]:
    """Changes of a row, and what is said of them."""
    changes = [
        ({"click": 2}, "column click: `2` is none of the labels 1, 0"),
        ({"weight": None}, "column weight: `` is no weight of at least 0"),
        ({"seen": [1.0] * 9}, "column seen: has not as many weights as films values"),
    ]
    if kind == "Csv":
        return [
            *changes,
            ({"age": "old"}, "column age: `old` is not a number"),
            ({"click": None}, "column click: `` is none of the labels 1, 0"),
            ({"time": "2024-13-01"}, "column time: `2024-13-01` is no time"),
            ({"time": 1_704_067_200_000}, "column time: `1704067200000` is no time"),
        ]
    return [
        *changes,
        ({"weight": -1.0}, "column weight: `-1` is no weight of at least 0"),
        ({"gain": float("inf")}, "column gain: `inf` is too large"),
        ({"time": None}, "column time: has no time"),
        ({"time": 1_704_067_200_000}, "column time: `1704067200000` is no time in seconds since"),
    ]


@pytest.mark.cases("Parquet")
@pytest.mark.parametrize("kind", WRITERS)
def test_malformed_rows_are_named_or_left_out_and_counted(tmp_path, kind, caplog):
    strict = schema(negative=("0",))
    good = rows(40)
    first, second = list(good[:20]), list(good[20:])
    changes = malformed(kind)
    path = WRITERS[kind](tmp_path / "one", [*good[:12], good[3], *good[12:]])
    dataset = read(path, kind, schema=strict).train(8)
    for i, (change, message) in enumerate(changes):
        row = good[3] | change
        # The data set reads what is there when it is iterated over.
        WRITERS[kind](path, [*good[:12], row, *good[12:]])
        with pytest.raises(tf.errors.InvalidArgumentError) as error:
            list(dataset)
        place = {"Csv": "line 14", "Parquet": "row 13", "TfRecord": "record 13"}[kind]
        if kind == "TfRecord":
            offset = sum(example(row).ByteSize() + 16 for row in good[:12])
            place += f" (byte offset {offset})"
        assert f"malformed row in {path}, {place}" in str(error.value)
        assert message in str(error.value)
        second.insert(2 * i, row)
    folder = tmp_path / "two"
    folder.mkdir()
    paths = [WRITERS[kind](folder / str(i), values) for i, values in enumerate((first, second))]
    expected = batches(read(written(tmp_path, kind, good), kind, schema=strict).train(8))
    data = read(folder, kind, schema=strict, on_error="skip")
    assert data.skipped == {}
    with caplog.at_level("WARNING"):
        for _ in range(2):
            assert batches(data.train(8)) == expected
            assert data.skipped == {str(paths[1]): len(changes)}
    logged = f"Left out {len(changes)} malformed rows: {len(changes)} of {paths[1]}"
    assert [record.getMessage() for record in caplog.records].count(logged) == 2
    shuffled = data.train(8, shuffle=30, seed=1)
    assert sum(len(weight) for *_, weight in shuffled) == 40
    assert data.skipped == {str(paths[1]): len(changes)}


def test_csv_lines_with_other_numbers_of_columns_are_left_out(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('age,click\n1,1\n2\n"3,1\n4,1,5\nx,0\n6,0\n"7",1\n')
    numeric = (rd.NumericColumn("age"),)
    described = rd.Schema(label="click", positive=("1",), numeric=numeric)
    data = rd.Csv(path, described, test_fraction=0, on_error="skip")
    ((features, label),) = data.train(8)
    assert features["numeric"].numpy().tolist() == [[1], [6], [7]]
    assert label.numpy().tolist() == [[1], [0], [1]]
    assert data.skipped == {str(path): 4}


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_an_empty_list_of_any_kind_is_missing(tmp_path, on_error):
    """TensorFlow says of one where a value is wanted, or of another kind, that it is malformed."""
    whole = {"äge": 5, "gain": 1.5, "word": "a", "tags": ["a", "b"], "tag": [1, 2], "n.s": [18, 2]}
    whole["n.s"] += [10, 0, 26, 0, 18, 2, 26, 0]  # As bytes it looks like an empty list itself.
    records = [example(whole | {"click": 1})]
    kinds = ("bytes_list", "float_list", "int64_list")
    for name in whole:
        for kind in kinds:
            record = example({key: value for key, value in whole.items() if key != name})
            record.features.feature["click"].int64_list.value.append(1)
            getattr(record.features.feature[name], kind).SetInParent()
            records.append(record)
    path = tmp_path / "a"
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record.SerializeToString())
    words = [str(i) for i in range(30)]
    described = rd.Schema(
        label="click",
        positive=("1",),
        numeric=(rd.NumericColumn("äge"), rd.NumericColumn("gain")),
        categorical=(
            rd.CategoricalColumn("word", vocabulary=("a",)),
            rd.CategoricalColumn("tags", vocabulary=("a", "b"), multi_hot=True),
            rd.CategoricalColumn("tag", vocabulary=("1", "2"), multi_hot=True),
            rd.CategoricalColumn("n.s", vocabulary=tuple(words), multi_hot=True),
        ),
    )
    data = read(path, "TfRecord", schema=described, on_error=on_error)
    ((features, label),) = data.train(32)
    assert len(label) == len(records)
    assert data.skipped == {}
    found = {
        "äge": features["numeric"][:, 0].numpy().tolist(),
        "gain": features["numeric"][:, 1].numpy().tolist(),
        "word": features["word"].numpy().tolist(),
        **{name: features[name].to_list() for name in ("tags", "tag", "n.s")},
    }
    ids = [int(i) + 2 for i in whole["n.s"]]
    values = {"äge": 5, "gain": 1.5, "word": 2, "tags": [2, 3], "tag": [2, 3], "n.s": ids}
    missing = {"äge": 0, "gain": 0, "word": 0, "tags": [], "tag": [], "n.s": []}
    for i, name in enumerate(whole):
        expected = [values[name]] * len(records)
        expected[1 + 3 * i : 4 + 3 * i] = [missing[name]] * 3
        assert found[name] == expected, name


@pytest.mark.full
def test_records_that_are_no_examples_are_named_or_left_out(tmp_path):
    good = rows(10)
    records = [example(row).SerializeToString() for row in good]
    wrong_type = example(good[0] | {"age": "20"}).SerializeToString()
    several = example(good[0] | {"age": [20, 30]}).SerializeToString()
    path = tmp_path / "a"
    data = dataset = None
    for bad, message in (
        (b"age=20", "is no tf.train.Example"),
        (records[4][:-1], "is no tf.train.Example"),
        (b"\n\x03abc" + records[4], "is no tf.train.Example"),
        (wrong_type, "Key: age"),
        (several, "Key: age"),
    ):
        with tf.io.TFRecordWriter(str(path)) as writer:
            for record in [*records[:4], bad, *records[4:]]:
                writer.write(record)
        if data is None:
            dataset = read(path, "TfRecord").train(8)
            data = read(path, "TfRecord", on_error="skip")
            others = data.train(8)
        with pytest.raises(tf.errors.InvalidArgumentError) as error:
            list(dataset)
        assert f"malformed row in {path}, record 5" in str(error.value)
        assert message in str(error.value)
        if "Example" in message:
            offset = sum(len(record) + 16 for record in records[:4])
            assert f"record 5 (byte offset {offset}): {message}" in str(error.value)
        assert sum(len(weight) for *_, weight in others) == 10
        assert data.skipped == {str(path): 1}


def test_damaged_files_are_named_or_read_up_to_the_damage(tmp_path):
    values = rows(10)
    records = [len(example(row).SerializeToString()) + 16 for row in values]
    path = write_tfrecord(tmp_path / "a", values)
    whole = path.read_bytes()
    offset = sum(records[:6])
    for damaged in (
        whole[: offset + 30],
        whole[: offset + 7],
        whole[: offset + 30] + b"#" + whole[offset + 31 :],
        whole[:offset] + b"#" + whole[offset + 1 :],
    ):
        path.write_bytes(damaged)
        what = rf"{path}' is truncated or corrupted in record 7 \(byte offset {offset}\)"
        with pytest.raises(ValueError, match=what):
            read(path, "TfRecord", schema=SMALL)
        data = read(path, "TfRecord", schema=SMALL, on_error="skip")
        assert sum(len(weight) for *_, weight in data.train(4)) == 6
        assert data.skipped == {str(path): 1}
    path = write_parquet(tmp_path / "b", values, group=5)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(ValueError, match=f"{path}' is no Parquet file, or truncated"):
        read(path, "Parquet", schema=SMALL)
    metadata = pq.read_metadata(pa.BufferReader(whole))
    begin = metadata.row_group(1).column(8).data_page_offset
    path.write_bytes(whole[:begin] + b"\xff" * 12 + whole[begin + 12 :])
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"malformed row group 2 in {path}: "):
        list(read(path, "Parquet", schema=SMALL).train(4))
    data = read(path, "Parquet", schema=SMALL, on_error="skip")
    assert sum(len(weight) for *_, weight in data.train(4)) == 5
    assert data.skipped == {str(path): 5}


def test_decimals_are_the_same_categories_as_other_numbers(tmp_path):
    texts = ["7.00", "0.00", "-7.50", "100.00", None, "12345678901234567890123456789012.10"]
    shown = ["7", "0", "-7.5", "100", None, "12345678901234567890123456789012.1"]
    values = [None if text is None else decimal.Decimal(text) for text in texts]
    decimals = pa.array(values, pa.decimal128(38, 2))
    table = {"click": pa.array(map(decimal.Decimal, ["1.00", "0.00"] * 3), pa.decimal128(10, 2))}
    table |= {"price": decimals, "prices": pa.array([values[:4]] * 6)}
    pq.write_table(pa.table(table), tmp_path / "a")
    described = of_words("price", "prices", [text for text in shown if text is not None])
    ((features, label),) = read(tmp_path / "a", "Parquet", schema=described).train(6)
    assert label.numpy().ravel().tolist() == [1, 0, 1, 0, 1, 0]
    assert features["price"].numpy().tolist() == [2, 3, 4, 5, 0, 6]
    assert features["prices"].to_list() == [[2, 3, 4, 5]] * 6


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_file_with_fewer_records_than_were_counted_is_named(tmp_path, on_error):
    path = write_tfrecord(tmp_path / "a", rows(10))
    dataset = read(path, "TfRecord", schema=SMALL, on_error=on_error).train(4)
    write_tfrecord(path, rows(6))
    message = f"the file {path} ends before record 7, which it had when its records were counted"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        list(dataset)


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_parquet_files_that_have_changed_or_gone_are_named(tmp_path, on_error):
    values = rows(10)
    path = write_parquet(tmp_path / "a", values, group=5)
    dataset = read(path, "Parquet", schema=SMALL, on_error=on_error).train(4)
    changed = f"The file '{path}' has changed since its rows were counted, .*: "
    for written_rows, message in (
        (values[:8], changed + "row group 2 has fewer rows"),
        (values[:5], changed + "it has only 1 row groups"),
        ([{"click": 1, "weight": 1.0}] * 10, changed + "it has no column 'time'"),
    ):
        write_parquet(path, written_rows, group=5)
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            list(dataset)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(tf.errors.InvalidArgumentError, match=changed + "it is no Parquet file"):
        list(dataset)
    path.unlink()
    with pytest.raises(tf.errors.UnknownError, match=f"No such file or directory.*{path}"):
        list(dataset)


def test_parquet_columns_that_have_another_type_now_are_named_or_left_out(tmp_path):
    values = rows(10)
    path = write_parquet(tmp_path / "a", values, group=5)
    dataset = read(path, "Parquet", schema=SMALL).train(4)
    data = read(path, "Parquet", schema=SMALL, on_error="skip")
    write_parquet(path, [row | {"time": [1]} for row in values], group=5)
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"malformed row group 1 in {path}: "):
        list(dataset)
    assert list(data.train(4)) == []
    assert data.skipped == {str(path): 10}


def test_times_of_records_that_are_floats_are_refused(tmp_path):
    path = write_tfrecord(tmp_path / "a", [{"click": 1, "time": 1.7e9, "weight": 1.0}])
    with pytest.raises(ValueError, match="column 'time': must have integers or bytes, and has fl"):
        read(path, "TfRecord", schema=SMALL)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"age": "x"}, r"column 'age' of the file '.*' has the type string; it must have numbers"),
        ({"films": 3}, "column 'films' of the file '.*' has the type int64; it must have lists"),
        ({"time": [1]}, "column 'time' of the file '.*' has the type list<.*; it must have times"),
        ({"click": None}, "column 'click' of the file '.*' has the type null; it must have texts"),
        ({"weight": None}, "column 'weight' of the file '.*' has the type null; it must have num"),
        ({"time": None}, "column 'time' of the file '.*' has the type null; it must have times"),
        ({"country": []}, "column 'country' of the file '.*' has the type list<.*; it must have t"),
    ],
)
def test_parquet_columns_of_other_types_are_named(tmp_path, change, message):
    path = write_parquet(tmp_path / "a", [row | change for row in rows(5)])
    with pytest.raises(ValueError, match=message):
        read(path, "Parquet")


def test_columns_of_which_a_parquet_file_has_no_value_are_missing_there(tmp_path):
    day = [row | {"age": 60, "country": "US", "tags": ["a"]} for row in rows(3)]
    write_parquet(tmp_path / "1", day)
    absent = {"age": None, "gain": None, "country": None, "device": None}
    write_parquet(tmp_path / "2", [row | absent | {"tags": []} for row in day])
    lists = {"films": None, "seen": None, "tags": None}
    write_parquet(tmp_path / "3", [row | absent | lists for row in day])
    assert pq.read_schema(tmp_path / "2").field("tags").type == pa.list_(pa.null())
    assert pq.read_schema(tmp_path / "3").field("films").type == pa.null()
    ((features, *_),) = read(tmp_path, "Parquet").train(9)
    assert features["numeric"][:, 0].numpy().tolist() == [2.0] * 3 + [0.0] * 6
    for name in ("country", "age_bucket"):
        assert features[name].numpy().tolist() == [3] * 3 + [0] * 6
    assert features["tags"].to_list() == [[2]] * 3 + [[]] * 6
    for name in ("films", "films_weights"):
        found = features[name].to_list()
        assert found[:3] == found[3:6] and found[6:] == [[]] * 3


@pytest.mark.parametrize("kind", WRITERS)
def test_no_path_at_all_is_an_error(kind):
    with pytest.raises(FileNotFoundError, match=r"path=\[\]: names no file; it must name at least"):
        read([], kind, schema=SMALL)


def test_columns_that_are_not_there_are_named(tmp_path):
    values = [{"age": 3} for _ in range(5)]
    described = rd.Schema(label="click", positive=("1",))
    for kind, message in (
        ("Csv", "column 'click': must be one of columns=.'age',"),
        ("Parquet", "has 0 columns 'click'; it must have one, and has .'age'."),
        ("TfRecord", "column 'click': must be a feature of the records of"),
    ):
        path = WRITERS[kind](tmp_path / kind, values)
        with pytest.raises(ValueError, match=message):
            read(path, kind, schema=described)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"on_error": "ignore"}, "on_error='ignore': must be one of .'raise', 'skip'"),
        ({"between": (1, 2)}, "between=.1, 2.: must be two datetimes in ascending order"),
        ({"schema": schema(timestamp=None), "between": (1, 2)}, "between=.*: needs Schema"),
    ],
)
def test_wrong_arguments_of_readers_are_named(tmp_path, arguments, message):
    path = write_csv(tmp_path / "a", rows(5))
    with pytest.raises(ValueError, match=message):
        read(path, "Csv", **arguments)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: schema(label=()), r"label=\(\): must be a column"),
        (lambda: schema(label=("a", "a")), "several different ones"),
        (lambda: schema(crosses=(rd.CrossedColumn(("tags", "country")),)), "crosses: 'tags'"),
        (lambda: schema(partitions=("tags",)), "partitions=.*: 'tags' must not be a multi-hot"),
        (lambda: schema(partitions=("seen",)), "partitions=.*: 'seen' must not be a multi-hot"),
        (lambda: rd.CategoricalColumn("a", hash_buckets=5, weights="w"), "needs multi_hot=True"),
        (
            lambda: rd.CategoricalColumn("a", hash_buckets=5, multi_hot=True, separator=""),
            "separator of column 'a'='': must be a string that is not empty",
        ),
        (lambda: schema(separator=None), "separator=None: must be a string"),
        (lambda: schema(missing=("NA", 0)), r"missing=\('NA', 0\): must have texts, not 0"),
    ],
)
def test_wrong_schemas_of_several_values_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_schema_is_the_same_in_another_program(tmp_path):
    for one in (
        schema(),
        SMALL,
        schema(label="click", comment="#", quotechar=None, missing="NA"),
        schema(missing=("NA", "-")),
        rd.Schema(
            label=["click"],
            positive=["1"],
            numeric=[rd.NumericColumn("a", np.float32(0.5), boundaries=np.array([1, 2.5]))],
            categorical=[rd.CategoricalColumn("b", vocabulary=np.array(["x", "y"]))],
            crosses=[rd.CrossedColumn(["a_bucket", "b"])],
            header=np.bool_(True),
        ),
    ):
        one.save(tmp_path / "schema.json")
        assert rd.Schema.load(tmp_path / "schema.json") == one
        assert hash(rd.Schema.load(tmp_path / "schema.json")) == hash(one)
    for wrong in ("", "[]", "{}", '{"numeric": [{"name": 1, "of": 2}]}', '{"label": "a"}'):
        (tmp_path / "schema.json").write_text(wrong)
        with pytest.raises(ValueError, match="schema.json' has no schema"):
            rd.Schema.load(tmp_path / "schema.json")
    with pytest.raises(tf.errors.NotFoundError):
        rd.Schema.load(tmp_path / "other.json")


def test_the_former_name_of_the_schema_goes_on_with_a_warning():
    with pytest.warns(FutureWarning, match="tf_recsync.data calls CsvSchema Schema"):
        assert rd.CsvSchema is rd.Schema


def test_without_pyarrow_it_is_said_how_to_install_it(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "a", rows(5))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"pip install 'tf_recsync\[parquet\]'"):
        read(path, "Parquet")


# --- Times, folders and fitted schemas


@pytest.mark.full
def test_clocks_of_times_may_be_ahead_of_utc_or_behind(tmp_path):
    draw, boundary = random.Random(1), datetime.datetime(2024, 3, 1, tzinfo=datetime.UTC)
    lines, wanted = [], []
    for number in range(200):
        time = boundary + datetime.timedelta(minutes=draw.randrange(-2000, 2000))
        zone = datetime.timezone(datetime.timedelta(minutes=15 * draw.randrange(-48, 56)))
        text = f"{time.astimezone(zone):%Y-%m-%dT%H:%M:%S%z}"
        if number % 2:
            text = f"{text[:-2]}:{text[-2:]}"  # As ISO 8601 has it, with or without a colon.
        assert datetime.datetime.fromisoformat(text) == time
        lines.append(f"0,{number},{text}")
        wanted += [float(number)] if time >= boundary else []
    (tmp_path / "clicks.csv").write_text("\n".join(["click,weight,time", *lines]))
    between = boundary, boundary + datetime.timedelta(days=9)
    data = rd.Csv(tmp_path / "clicks.csv", SMALL, test_fraction=0, between=between)
    assert [float(x) for *_, weight in data.train(8) for x in weight] == wanted
    assert 50 < len(wanted) < 150
    for wrong in ("2024-03-01T00:00:00+24:00", "2024-03-01T00:00:00-01:60"):
        (tmp_path / "clicks.csv").write_text(f"click,weight,time\n0,1,{wrong}")
        data = rd.Csv(tmp_path / "clicks.csv", SMALL, test_fraction=0)
        with pytest.raises(
            tf.errors.InvalidArgumentError, match=re.escape(f"`{wrong}` is no time")
        ):
            list(data.train(8))


def test_a_space_between_values_stands_for_any_number_of_them(tmp_path):
    texts = ["a b", " b   a  c ", "", "?", "c", "a a"]
    text = "\n".join(["click,tags", *(f"1,{text}" for text in texts)])
    (tmp_path / "clicks.csv").write_text(text)
    fitted = rd.Schema.fit(
        tmp_path / "clicks.csv",
        label="click",
        positive=("1",),
        categorical=("tags",),
        multi_hot={"tags": " "},
    )
    assert fitted.categorical[0].vocabulary == ("a", "b", "c")
    features, _ = next(iter(rd.Csv(tmp_path / "clicks.csv", fitted, test_fraction=0).train(9)))
    ids = {"a": 2, "b": 3, "c": 4}
    expected = [[ids[word] for word in text.replace("?", "").split()] for text in texts]
    assert features["tags"].to_list() == expected


def test_a_file_that_is_not_utf8_is_named_with_the_line(tmp_path):
    path = tmp_path / "clicks.csv"
    for line, text in ((1, "click,größe\n1,a"), (3, "click,size\n1,a\n1,groß")):
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(ValueError, match=f"clicks.csv, line {line}: is not UTF-8"):
            rd.Schema.fit(path, label="click", positive=("1",), categorical=("size",))


@pytest.mark.cases("Csv", "Parquet")
@pytest.mark.parametrize("kind", WRITERS)
def test_rows_of_a_period_are_taken_by_their_timestamps(tmp_path, kind):
    values = rows(60)
    day = datetime.datetime(2024, 1, 2)
    between = (day, day + datetime.timedelta(days=1))
    first = day.replace(tzinfo=datetime.UTC).timestamp()
    wanted = [row["weight"] for row in values if first <= row["time"] < first + 86_400]
    as_text = [
        row | {"time": f"{datetime.datetime.fromtimestamp(row['time'], datetime.UTC):{form}}"}
        for row, form in zip(
            values, ["%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S.5Z"] * 30, strict=True
        )
    ]
    typed = [
        row | {"time": datetime.datetime.fromtimestamp(row["time"], datetime.UTC)} for row in values
    ]
    forms = {"number": values, "text": as_text} | ({"typed": typed} if kind == "Parquet" else {})
    for form, written_rows in forms.items():
        path = WRITERS[kind](tmp_path / form, written_rows)
        data = read(path, kind, schema=SMALL, between=between)
        weights = [float(x) for *_, weight in data.train(8) for x in weight]
        assert weights == wanted, form
    assert 10 < len(wanted) < 30


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns", "date32", "date64"])
def test_times_of_parquet_have_any_unit(tmp_path, unit):
    nanos = np.array(["2024-01-01T23:59:59.999999999", "2024-01-02"], "datetime64[ns]")
    column = pa.array(nanos)
    column = column.cast(getattr(pa, unit)() if "date" in unit else pa.timestamp(unit), safe=False)
    pq.write_table(
        pa.table({"click": [1, 0], "weight": [1.0, 2.0], "time": column}), tmp_path / "a"
    )
    day = datetime.datetime(2024, 1, 1)
    between = (day, day + datetime.timedelta(days=1))
    data = read(tmp_path / "a", "Parquet", schema=SMALL, between=between)
    assert [weight.numpy().tolist() for *_, weight in data.train(8)] == [[1.0]]


@pytest.mark.parametrize("kind", WRITERS)
def test_names_of_folders_are_columns_in_all_formats(tmp_path, kind):
    for day in (2, 1):
        folder = tmp_path / f"day=2024-01-0{day}" / f"hour={day}"
        folder.mkdir(parents=True)
        WRITERS[kind](folder / "part", [{"click": 1}] * day)
    (tmp_path / "_SUCCESS").write_text("")
    described = rd.Schema(
        label="click",
        positive=("1",),
        numeric=(rd.NumericColumn("hour"),),
        categorical=(rd.CategoricalColumn("day", vocabulary=("2024-01-01", "2024-01-02")),),
        partitions=("day", "hour"),
    )
    ((features, _),) = read(tmp_path, kind, schema=described).train(8)
    assert features["day"].numpy().tolist() == [2, 3, 3]
    assert features["numeric"].numpy().tolist() == [[1], [2], [2]]


@pytest.mark.cases("Csv", "Parquet")
@pytest.mark.parametrize("kind", WRITERS)
def test_numbers_in_names_of_folders_may_be_missing_or_malformed(tmp_path, kind):
    for name, count in (("3", 1), ("__HIVE_DEFAULT_PARTITION__", 2), ("?", 1)):
        (tmp_path / f"hour={name}").mkdir()
        WRITERS[kind](tmp_path / f"hour={name}" / "part", [{"age": 5, "click": 1}] * count)
    numeric = (rd.NumericColumn("hour", mean=1.0), rd.NumericColumn("age"))
    described = rd.Schema(label="click", positive=("1",), numeric=numeric, partitions=("hour",))
    ((features, _),) = read(tmp_path, kind, schema=described).train(8)
    assert features["numeric"].numpy().tolist() == [[2, 5], [0, 5], [0, 5], [0, 5]]
    (tmp_path / "hour=x").mkdir()
    path = WRITERS[kind](tmp_path / "hour=x" / "part", [{"age": 5, "click": 1}] * 2)
    dataset = read(tmp_path, kind, schema=described).train(8)
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"{path}, .*hour: `x` is not a numb"):
        list(dataset)
    data = read(tmp_path, kind, schema=described, on_error="skip")
    assert [len(label) for _, label in data.train(8)] == [4]
    assert data.skipped == {str(path): 2}


def test_a_fitted_schema_has_several_values_and_weights(tmp_path):
    path = write_csv(tmp_path / "a", rows(40))
    fitted = rd.Schema.fit(
        path,
        label=("click", "buy"),
        positive=("1",),
        numeric=("age",),
        categorical=("tags", "films"),
        hashed={"films": 50},
        multi_hot={"tags": "|", "films": "|"},
        weights={"films": "seen"},
        weight="weight",
        timestamp="time",
    )
    tags, films = fitted.categorical
    assert tags.vocabulary == ("a", "b", "zz")
    assert (films.multi_hot, films.weights, films.size) == (True, "seen", 50)
    for features, labels, weight in rd.Csv(path, fitted, test_fraction=0).train(16):
        assert features["films_weights"].shape[0] == len(labels["buy"]) == len(weight)


# --- On clusters


def click_model(strategy) -> keras.Model:
    def build() -> keras.Model:
        numeric = keras.Input((1,), name="numeric")
        return keras.Model({"numeric": numeric}, keras.layers.Dense(1)(numeric))

    return compiled(strategy, build, lambda: SGD(0.0), mean_output, lambda: [LabelSum()])


CLICKS = rd.Schema(
    label="click", positive=("1",), negative=("0",), numeric=(rd.NumericColumn("age"),)
)


@pytest.mark.cases("Parquet-raise")
@pytest.mark.parametrize(("kind", "on_error"), [("Parquet", "raise"), ("TfRecord", "skip")])
def test_readers_divide_files_and_row_groups(clusters, tmp_path, kind, on_error):
    values = rows(200)
    if on_error == "skip":
        for i in (10, 50, 150):
            values[i] = values[i] | {"click": 5}
    folder = written(tmp_path, kind, values, files=4)
    if on_error == "skip":
        with open(folder / "2", "ab") as file:
            file.write(b"damaged")
    data = read(folder, kind, schema=CLICKS, on_error=on_error)
    cluster = clusters.get(2, 1, readers=2)
    dataset = data.train(8, shuffle=20, seed=1)
    model = click_model(recsync.AsyncStrategy(cluster))
    history = model.fit(dataset, epochs=2, verbose=0).history
    assert history["label_sum"] == [sum(row["click"] % 5 for row in values)] * 2
    assert cluster.data_services.tasks() == 0  # None of it was read here.
    assert data_parts.why_indivisible(data.train(8)) == ""
    logs = "".join(path.read_text() for path in pathlib.Path(cluster.log_dir).glob("reader*"))
    by_file = collections.Counter()
    for line in re.findall(rf"Left out . malformed rows: (.*{folder}.*)", logs):
        for number, file in re.findall(rf"(\d+) of {folder}/(\d)", line):
            by_file[file] += int(number)
    # In both epochs.
    assert by_file == (dict.fromkeys("0123", 2) if on_error == "skip" else {})


@pytest.mark.parametrize("count", [4, 1], ids="{} files".format)
def test_workers_read_files_of_their_own(clusters, tmp_path, count):
    values = rows(120)
    files = sorted(written(tmp_path, "Parquet", values, files=count).iterdir())

    def make(context):
        own = files[context.input_pipeline_id :: context.num_input_pipelines]
        if not own:
            return read(files[:1], "Parquet", schema=CLICKS).train(8).take(0)
        return read(own, "Parquet", schema=CLICKS).train(8)

    strategy = clusters.strategy(2, 1)
    model = click_model(strategy)
    datasets = strategy.distribute_datasets_from_function(make)
    history = model.fit(datasets, verbose=0).history
    assert history["label_sum"] == [sum(row["click"] for row in values)]
