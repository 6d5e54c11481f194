"""CSV files as other programs write them: quotes, byte order marks, gzip, folders of partitions."""

import codecs
import collections
import csv
import gzip
import io
import pathlib
import random

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_recsync import data as rd
from tf_recsync.data import _errors, _fields, _text
from tf_recsync.optimizers import SGD

UNCLOSED = "a field is not closed on its line"


def schema(**kwargs) -> rd.Schema:
    arguments = {
        "columns": ("word", "click"),
        "label": "click",
        "positive": ("1",),
        "categorical": (rd.CategoricalColumn("word", vocabulary=("a", "b, c", 'd "e"', "ü,")),),
    }
    return rd.Schema(**(arguments | kwargs))


def words(path: pathlib.Path, **kwargs) -> list[int]:
    batches = rd.Csv(path, schema(**kwargs), test_fraction=0).train(2).as_numpy_iterator()
    return [int(i) for features, _ in batches for i in features["word"]]


def split_in_graph(
    lines: list[bytes] | list[str], separator: str, columns: int, encoding: str = "utf-8"
) -> list[list[str]]:
    where = _errors.Location(["file"], tf.range(len(lines), dtype=tf.int64))
    checks = _errors.Checks(where)
    names = [str(i) for i in range(columns)]
    found = _fields.split_columns(tf.constant(lines), separator, names, checks, '"').numpy()
    return [[field.decode(encoding).strip() for field in line] for line in found]


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
@pytest.mark.parametrize("separator", [",", "\t", "|"])
def test_lines_are_split_as_the_csv_module_splits_them(separator, encoding):
    draw = random.Random(3)
    by_columns = collections.defaultdict(list)
    unclosed = []
    for _ in range(3000):
        line = "".join(draw.choices(f'""{separator}{separator},ab ü', k=draw.randrange(12)))
        file = io.StringIO(f"{line}\nnext")
        read = list(csv.reader(file, delimiter=separator, skipinitialspace=True))
        expected = [field.strip() for field in read[0]] or [""]
        if len(read) == 1 and line.strip(" "):
            # The field goes on with the next line.
            unclosed.append(line)
            expected = None
        else:
            by_columns[len(expected)].append((line, expected))
        assert _fields.split_line(line, separator, '"') == expected, line
    for columns, found in by_columns.items():
        lines = [line.encode(encoding) for line, _ in found]
        fields = split_in_graph(lines, separator, columns, encoding)
        for (line, expected), got in zip(found, fields, strict=True):
            assert got == expected, line
    for line in unclosed[:5]:
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"file, line 1: {UNCLOSED}"):
            split_in_graph([b"a", line.encode(encoding)], separator, 1, encoding)


def test_separators_may_have_several_characters_beside_quotes():
    line = '"a||b"||c|d||"e"'
    expected = ["a||b", "c|d", "e"]
    assert _fields.split_line(line, "||", '"') == expected
    assert split_in_graph([line, "a||b||c"], "||", 3) == [expected, ["a", "b", "c"]]


def test_quoted_fields_may_hold_separators_quotes_and_bytes_that_are_not_utf8(tmp_path):
    path = tmp_path / "a.csv"
    rows = ['a,1\n"a",0\n"b, c",1\n"d ""e""", 0\n', '"ü,",1\n']
    path.write_bytes("".join(rows).encode() + b'"\xff,",0\n')
    assert words(path) == [2, 2, 3, 4, 5, 1]
    with pytest.raises(tf.errors.InvalidArgumentError, match="a.csv, line 3, column 3"):
        words(path, quotechar=None)


def test_a_quoted_line_break_is_an_error_that_names_the_line(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('a,1\n"b\nc",1\n')
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        words(path)
    assert f"malformed row in {path}, line 2: {UNCLOSED}" in str(error.value)
    with pytest.raises(ValueError, match=f"a.csv, line 2: {UNCLOSED}"):
        rd.Schema.fit(
            path, columns=["w", "click"], label="click", positive=["1"], categorical=["w"]
        )


def test_a_first_line_that_is_malformed_is_as_another_row(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xff,1\na,0\n"b, c",1\n')
    assert words(path) == [1, 2, 3]
    path.write_text('"b,1\na,0\n')
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        words(path)
    assert f"malformed row in {path}, line 1: {UNCLOSED}" in str(error.value)
    data = rd.Csv(path, schema(), test_fraction=0, on_error="skip")
    ((features, _),) = data.train(2)
    assert features["word"].numpy().tolist() == [2]
    assert data.skipped == {str(path): 1}
    with pytest.raises(ValueError, match=f"malformed row in {path}, line 1: {UNCLOSED}"):
        words(path, header=True)


@pytest.mark.parametrize("first", ["", "# exported on 2024-01-01"])
def test_a_first_line_without_names_is_an_error_where_columns_are_taken_from_it(tmp_path, first):
    path = tmp_path / "a.csv"
    path.write_text(f"{first}\nword,click\na,0\nb,1\n")
    message = f"The first line of {path} is blank or a comment; it must have the columns' names"
    with pytest.raises(ValueError, match=message):
        words(path, columns=(), comment="#")
    with pytest.raises(ValueError, match=message):
        rd.Schema.fit(path, label="click", positive=["1"], categorical=["word"], comment="#")
    with pytest.raises(ValueError, match=message):
        words(path, header=True, comment="#")


@pytest.mark.parametrize("is_zipped", [False, True])
def test_a_byte_order_mark_is_no_part_of_the_first_column(tmp_path, is_zipped):
    pack = gzip.compress if is_zipped else bytes
    for name, text in (("a", "a,1\na,0\n"), ("b", "a,0\n\na,1\n"), ("c", "word,click\na,0\n")):
        (tmp_path / name).write_bytes(pack(codecs.BOM_UTF8 + text.encode()))
    assert words(tmp_path) == [2] * 5
    fitted = rd.Schema.fit(tmp_path / "c", label="click", positive=["1"], categorical=["word"])
    assert fitted.columns == ("word", "click") and fitted.categorical[0].vocabulary == ("a",)


def test_several_texts_may_mean_a_missing_value(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("x,word,tags,click\n1,a,b|NA,1\nNA,\\N,-,0\n-,NA,b,0\n3,,,1\n\\N,c,c|b,0\n")
    missing = ["NA", "-", "\\N"]
    schema = rd.Schema.fit(
        path,
        label="click",
        positive=["1"],
        numeric=["x"],
        categorical=["word", "tags"],
        multi_hot={"tags": "|"},
        missing=missing,
    )
    assert schema.missing == ("NA", "-", "\\N") and schema.numeric[0].mean == 2
    assert [column.vocabulary for column in schema.categorical] == [("a", "c"), ("b", "c")]
    ((features, _),) = list(rd.Csv(path, schema).train(5))
    assert features["numeric"].numpy()[:, 0].tolist() == [-1, 0, 0, 1, 0]
    assert features["word"].numpy().tolist() == [2, 0, 0, 0, 3]
    assert features["tags"].to_list() == [[2, 0], [], [2], [], [3, 2]]


def zipped(rows: int = 3000) -> bytes:
    draw = np.random.default_rng(0)
    return gzip.compress("".join(f"{draw.random()},1\n" for _ in range(rows)).encode())


def broken_files() -> dict[str, tuple[bytes, str]]:
    whole = zipped()
    half = len(whole) // 2
    return {
        "in the middle": (whole[:half], "truncated"),
        "in the header": (whole[:5], "truncated"),
        "before the checksum": (whole[:-8], "truncated"),
        "another checksum": (whole[:-8] + b"1234" + whole[-4:], "corrupted"),
        "other bytes": (whole[:half] + bytes(100) + whole[half + 100 :], "corrupted"),
    }


@pytest.mark.parametrize("kind", broken_files())
def test_a_broken_gzip_file_is_named_at_once(tmp_path, kind):
    data, what = broken_files()[kind]
    (tmp_path / "a.csv.gz").write_bytes(zipped())
    path = tmp_path / "b.csv.gz"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"^The file '{path}' is {what}: "):
        rd.Csv(tmp_path, schema())
    # A row that was made of other bytes may be met first.
    with pytest.raises(ValueError, match=f"{path}'? ?(is {what}: |, line )"):
        rd.Schema.fit(
            path, columns=["w", "click"], label="click", positive=["1"], categorical=["w"]
        )


def test_a_file_that_was_truncated_after_its_lines_were_counted_is_named(clusters, tmp_path):
    """TensorFlow would take it for a shorter one."""
    path = tmp_path / "a.csv.gz"
    path.write_bytes(zipped())
    dataset = rd.Csv(path, schema(), test_fraction=0).train(100)
    path.write_bytes(zipped()[:20_000])
    message = f"the file {path} ends before line "
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        list(dataset)
    with clusters.strategy(1, 1).scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(SGD(), "mse")
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        model.fit(dataset.map(lambda _, label: (tf.reshape(label, [-1, 1]), label)), verbose=0)


@pytest.mark.parametrize(
    ("pattern", "found"), [("*", ["a", "b"]), ("[ab_]*", ["a", "b"]), ("_*", ["_SUCCESS", "_a"])]
)
def test_patterns_stand_for_hidden_files_only_if_they_begin_like_them(tmp_path, pattern, found):
    for name in ("_SUCCESS", "_a", ".b", "b", "a"):
        (tmp_path / name).write_text("")
    files = _text.find_files(tmp_path / pattern)
    assert files == [str(tmp_path / name) for name in found]


def test_names_of_folders_are_columns(tmp_path):
    for day, hour, rows in (("2024-01-02", "7", "a,1\n"), ("2024-01-01", "%37+", "a,1\na,0\n")):
        folder = tmp_path / f"day={day}" / f"hour={hour}"
        folder.mkdir(parents=True)
        (folder / "part.csv").write_text(rows)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "text").write_text("not read")
    fitted = rd.Schema.fit(
        tmp_path,
        columns=["word", "click"],
        label="click",
        positive=["1"],
        categorical=["word", "day", "hour"],
        partitions=["day", "hour"],
        crosses=[rd.CrossedColumn(("day", "word"))],
    )
    assert fitted.categorical[1].vocabulary == ("2024-01-01", "2024-01-02")
    assert fitted.categorical[2].vocabulary == ("7", "7+")  # %37 stands for 7.
    (features, _), *_ = rd.Csv(tmp_path, fitted, test_fraction=0).train(3)
    assert features["day"].numpy().tolist() == [2, 2, 3]
    assert features["hour"].numpy().tolist() == [3, 3, 2]
    pattern = tmp_path / "day=2024-01-02" / "*" / "*.csv"
    (features, _), *_ = rd.Csv(pattern, fitted, test_fraction=0).train(3)
    assert features["day"].numpy().tolist() == [3]
    with pytest.raises(FileNotFoundError):
        rd.Csv(tmp_path / "notes" / "nothing", fitted)
    (tmp_path / "part.csv").write_text("a,1\n")
    with pytest.raises(ValueError, match=r"part.csv' is in no folder 'day=...'; every file must"):
        rd.Csv(tmp_path, fitted)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"quotechar": "''"}, "quotechar=\"''\": must be None or one character"),
        ({"quotechar": ","}, "quotechar=','"),
        ({"partitions": ("word",)}, r"partitions=\('word',\): 'word' must not be one of columns"),
        ({"partitions": ("day",), "label": "x"}, r"'x': must be .* or partitions=\('day',\)"),
    ],
)
def test_bad_quotes_and_partitions_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        schema(**arguments)
