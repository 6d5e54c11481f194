"""The readers give what a plain parse of the files gives, and say where a line is malformed."""

import collections
import dataclasses
import gzip
import math
import os
import pathlib

import numpy as np
import pytest
import reference_statistics
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_recsync import data as rd
from tf_recsync.data import _records, _text

Row = list[str]


@pytest.fixture(name="real_data")
def _real_data() -> pathlib.Path:
    default = pathlib.Path(__file__).resolve().parents[1].parent / "shared" / "data"
    root = pathlib.Path(os.environ.get("RECSYNC_DATA", default))
    if not root.is_dir():
        pytest.skip("no real data: set RECSYNC_DATA to the folder that has adult/ and the others")
    return root


def criteo_row(label: object = 0, integers: str = "1", category: str = "ab") -> Row:
    return [str(label), *[integers] * 13, *[category] * 26]


def write(path: pathlib.Path, rows: list[Row], separator: str = "\t") -> pathlib.Path:
    text = "".join(separator.join(row) + "\n" for row in rows)
    # Lone surrogates make bytes that are not UTF-8.
    path.write_bytes(text.encode(errors="surrogatepass"))
    return path


def collect(dataset: tf.data.Dataset) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns all features, and the labels as `[n]`."""
    batches = list(dataset.as_numpy_iterator())
    names = batches[0][0]
    features = {name: np.concatenate([batch[0][name] for batch in batches]) for name in names}
    return features, np.concatenate([batch[1] for batch in batches])[:, 0]


def labels_in_order(dataset: tf.data.Dataset) -> list[int]:
    return collect(dataset)[0]["numeric"][:, 0].round(3).tolist()


def assert_same(one, other) -> None:
    np.testing.assert_array_equal(one[1], other[1])
    for name, values in one[0].items():
        np.testing.assert_array_equal(values, other[0][name], err_msg=name)


# --- Criteo


def test_criteo_rows_are_those_of_a_plain_parse(real_data):
    path = real_data / "criteo_sample" / "train.txt.gz"
    text = gzip.decompress(path.read_bytes()).decode()
    rows = [line.split("\t") for line in text.removesuffix("\n").split("\n")]
    # So many buckets that different texts have different ids.
    data = rd.Criteo(path, hash_buckets=2**40, test_fraction=0.2)
    assert (data.train_rows, data.test_rows) == (8000, 2000)
    train, test = collect(data.train(777)), collect(data.test(512))
    features = {name: np.concatenate([train[0][name], test[0][name]]) for name in train[0]}
    labels = np.concatenate([train[1], test[1]])
    np.testing.assert_array_equal(labels, [float(row[0]) for row in rows])
    expected = [[math.log1p(max(int(x or 0), 0)) for x in row[1:14]] for row in rows]
    np.testing.assert_allclose(features["numeric"], expected, rtol=1e-6)
    assert min(int(x or 0) for row in rows for x in row[1:14]) < 0, "the sample has negatives"
    for i in range(26):
        ids, texts = features[f"C{i + 1}"], [row[14 + i] for row in rows]
        assert [x == 0 for x in ids] == [text == "" for text in texts]
        assert len(set(zip(ids, texts, strict=True))) == len(set(ids)) == len(set(texts))


def test_criteo_ids_stay_below_the_number_of_buckets_of_their_column(tmp_path):
    rows = [criteo_row(category=f"{i:x}") for i in range(200)]
    buckets = list(range(2, 28))
    data = rd.Criteo(write(tmp_path / "a", rows), hash_buckets=buckets, test_fraction=0)
    features, _ = collect(data.train(64))
    for i, size in enumerate(buckets):
        assert set(features[f"C{i + 1}"]) == set(range(1, size))
        assert data.spec.categorical[f"C{i + 1}"] == size


def test_the_elements_are_as_the_spec_says(tmp_path):
    synthetic = rd.Synthetic(10, cardinalities=[3, 4], test_rows=10)
    criteo = rd.Criteo(write(tmp_path / "a", [criteo_row()] * 10))
    for data in (synthetic, criteo):
        for dataset in (data.train(4), data.train(4, shuffle=5), data.test(4)):
            assert dataset.element_spec[0].keys() == data.spec.input_signature()[0].keys()
            for spec, found in zip(
                tf.nest.flatten(data.spec.input_signature()),
                tf.nest.flatten(dataset.element_spec),
                strict=True,
            ):
                assert (spec.shape.as_list(), spec.dtype) == (found.shape.as_list(), found.dtype)


def test_the_last_tenth_over_all_files_is_the_test_part(tmp_path):
    write(tmp_path / "a.tsv", [criteo_row(integers=str(i)) for i in range(12)])
    lines = "".join("\t".join(criteo_row(integers=str(i))) + "\n" for i in range(12, 30))
    # Gzip whatever its name, blank lines, and the ends of lines of another system.
    text = "\n" + lines.replace("\n", "\r\n \n", 17)
    (tmp_path / "b.tsv").write_bytes(gzip.compress(text.encode()))
    (tmp_path / ".hidden").write_text("no rows here")
    numbers = np.log1p(np.arange(30)).round(3)
    for path in (tmp_path, tmp_path / "*.tsv"):
        data = rd.Criteo(path)
        assert (data.train_rows, data.test_rows) == (27, 3)
        np.testing.assert_allclose(labels_in_order(data.train(7)), numbers[:27], atol=2e-3)
        np.testing.assert_allclose(labels_in_order(data.test(2)), numbers[27:], atol=2e-3)


def test_a_separate_test_file_leaves_all_rows_for_training(tmp_path):
    train = write(tmp_path / "a", [criteo_row()] * 5)
    data = rd.Criteo(train, test_path=write(tmp_path / "b", [criteo_row(1)] * 3))
    assert (data.train_rows, data.test_rows) == (5, 3)
    assert collect(data.test(2))[1].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: ["2", *row[1:]], "column label: `2` is neither 0 nor 1"),
        (lambda row: ["", *row[1:]], "column label: `` is neither 0 nor 1"),
        (lambda row: [*row[:3], "1.5", *row[4:]], "column I3: `1.5` is not an integer"),
        (lambda row: [*row[:13], "9" * 40, *row[14:]], "column I13: `99"),
        (lambda row: [*row[:13], "\ud83d", *row[14:]], "column I13: `\N{REPLACEMENT CHARACTER}"),
        (lambda row: row[:20], "column C7: found 20 columns instead of 40"),
        (lambda row: [*row, "x"], "column 41: found 41 columns instead of 40"),
    ],
)
def test_a_malformed_criteo_line_is_named(tmp_path, change, message):
    rows = [criteo_row() for _ in range(20)]
    write(tmp_path / "a.tsv", rows)
    rows[12] = change(rows[12])
    rows.insert(5, [""])
    bad = write(tmp_path / "b.tsv", rows)
    dataset = rd.Criteo(tmp_path, test_fraction=0).train(8, shuffle=100)
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        list(dataset)
    assert f"malformed row in {bad}, line 14, {message}" in str(error.value)


def test_a_path_without_files_is_named_at_once(tmp_path):
    for path in (tmp_path / "day_*.tsv", tmp_path / "none.tsv", tmp_path):
        with pytest.raises(FileNotFoundError, match=path.name.replace("*", r"\*")):
            rd.Criteo(path)


def test_wrong_arguments_are_named(tmp_path):
    path = write(tmp_path / "a", [criteo_row()] * 10)
    (tmp_path / "empty").write_text("\n\n")
    for call, message in (
        (lambda: rd.Criteo(tmp_path / "empty"), "empty' has no rows"),
        (
            lambda: rd.Criteo(path, hash_buckets=1),
            "hash_buckets must be .* at least 2, got 1",
        ),
        (lambda: rd.Criteo(path, hash_buckets=[5, 5]), r"hash_buckets=\[5, 5\]"),
        (
            lambda: rd.Criteo(path, test_fraction=1.0),
            "test_fraction must be .* below 1, not 1.0",
        ),
        (lambda: rd.Criteo(path).train(0), "batch_size must be an integer of at least 1, got 0"),
        (lambda: rd.Criteo(path).train(True), "batch_size must be an integer .*, got True"),
        (lambda: rd.Criteo(path).test(2.0), "batch_size must be an integer .*, got 2.0"),
        (lambda: rd.Criteo(path).train(1, shuffle=-1), "shuffle must be an integer of at least 0"),
        (
            lambda: rd.Criteo(path).train(1, "2"),
            "shuffle must be an integer .* got '2'",
        ),
        (lambda: rd.Synthetic(9).train(1, True), "shuffle must be .* rows, such as 100_000, not T"),
        (lambda: rd.Criteo(3), "path must be the path of a file or a folder, not 3"),
        (lambda: rd.Criteo(path, test_path=3), "test_path must be the path of a file or a folder"),
        (lambda: rd.Csv(path, "schema.json"), "schema must be a Schema, not 'schema.json'"),
        (lambda: rd.Parquet(path, None), "schema must be a Schema, not None"),
        (lambda: rd.adult(None), "location must be the path of a folder, not None"),
        (lambda: rd.FeatureSpec("age", {}), r"numeric='age': must be a sequence .* as \('age',\)"),
        (lambda: rd.FeatureSpec((), {"a": 2}, has_weight=1), "has_weight must be a bool, not 1"),
        (lambda: rd.FeatureSpec((), ["a"]), r"categorical=\['a'\]: must be a dict"),
        (lambda: rd.Criteo(path, test_fraction=0).test(1), "no test part"),
        (lambda: rd.FeatureSpec((), {"numeric": 3}), "'numeric' is taken"),
        (
            lambda: rd.FeatureSpec((), {"a": 0}),
            r"categorical\['a'\] must be .* 1, got 0",
        ),
        (lambda: rd.Synthetic(0), "rows must be an integer from 1 to 2147483648, got 0"),
        (
            lambda: rd.Synthetic(1, cardinalities=[0]),
            "each of cardinalities must be .* got 0",
        ),
        (lambda: rd.Synthetic(1, base_rate=1), "base_rate must be .* above 0 and below 1, not 1"),
        (lambda: rd.Synthetic(1, signal=float("nan")), "signal must be a finite number of at leas"),
        (lambda: rd.Synthetic(1, zipf="1"), "zipf must be a finite number of at least 0, not '1'"),
        (lambda: rd.Synthetic(10, days=3), "days=3: must divide rows=10"),
        (lambda: rd.Synthetic(10, drift=1.5), "drift must be a finite number from 0 to 1, not 1.5"),
        (lambda: rd.Synthetic(10, days=2).day(2, 4), "day must be an integer from 0 to 1, got 2"),
        (lambda: rd.Synthetic(1, test_rows=0).best_auc(), "test_rows=0"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_shuffling_keeps_the_rows_and_changes_their_order_with_every_pass(tmp_path):
    path = write(tmp_path / "a", [criteo_row(integers=str(i)) for i in range(50)])
    data = rd.Criteo(path, test_fraction=0)
    dataset = data.train(8, shuffle=50, seed=3)
    first, second = labels_in_order(dataset), labels_in_order(dataset)
    assert sorted(first) == sorted(second) == labels_in_order(data.train(8))
    assert first != second
    assert labels_in_order(data.train(8, shuffle=50, seed=3)) == first


@pytest.mark.full
def test_the_readers_run_in_a_worker_of_the_data_service(tmp_path):
    criteo = rd.Criteo(write(tmp_path / "a", [criteo_row(i % 2) for i in range(40)]))
    write(tmp_path / "b.csv", [["x", "y"], ["a", "1"], ["b", "0"], ["a", "1"]], ",")
    schema = rd.Schema.fit(tmp_path / "b.csv", label="y", positive=["1"], categorical=["x"])
    csv = rd.Csv(tmp_path / "b.csv", schema, test_fraction=0)
    service = tf.data.experimental.service
    dispatcher = service.DispatchServer()
    address = dispatcher.target.split("://")[1]
    worker = service.WorkerServer(service.WorkerConfig(dispatcher_address=address))
    for data in (criteo, csv, rd.Synthetic(50, cardinalities=[4], test_rows=1)):
        served = data.train(16).apply(
            service.distribute(service.ShardingPolicy.DYNAMIC, dispatcher.target)
        )
        assert_same(collect(served), collect(data.train(16)))
    del worker, dispatcher


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.booleans(), max_size=8).filter(any), min_size=1, max_size=4), st.data())
def test_parts_hold_just_the_rows_asked_for(kinds, draw):
    """Files are lists that say for each line whether it is a row."""
    files, rows = [], []
    for number, lines in enumerate(kinds):
        ignored = np.array([i for i, is_row in enumerate(lines) if not is_row], dtype=np.int64)
        files.append(_text.TextFile(str(number), "", 0, len(lines), ignored))
        rows += [(str(number), i) for i, is_row in enumerate(lines) if is_row]
    first = draw.draw(st.integers(0, len(rows)))
    last = draw.draw(st.integers(first, len(rows)))
    found = [
        (part.file.path, skip + line)
        for part in _records.parts_of(files, first, last)
        for skip, lines in [part.file.lines_of(part.first, part.last)]
        for line in range(lines)
        if skip + line not in part.file.ignored
    ]
    assert found == rows[first:last]


# --- CSV with a schema

CSV_ROWS = [
    ["20", "100", "red", "CH", "yes"],
    ["30", "0", "blue", "?", "no"],
    ["", "0", "red", "US", "no"],
    ["50", "1e2", "green", "FR", "yes"],
]


def fit(path: pathlib.Path, **kwargs) -> rd.Schema:
    arguments = {
        "columns": ["age", "gain", "colour", "country", "click"],
        "label": "click",
        "positive": ["yes"],
        "negative": ["no"],
        "numeric": ["age", "gain"],
        "categorical": ["colour", "country"],
        "log1p": ["gain"],
        "buckets": {"age": 2},
        "hashed": {"country": 50},
        "crosses": [rd.CrossedColumn(("colour", "age_bucket")), rd.CrossedColumn(("colour",) * 2)],
    }
    return rd.Schema.fit(path, **(arguments | kwargs))


def test_csv_features_follow_from_the_schema(tmp_path):
    path = write(tmp_path / "a.csv", CSV_ROWS, ", ")
    schema = fit(path)
    assert schema.categorical[0].vocabulary == ("blue", "green", "red")
    assert schema.numeric[0].boundaries == (30.0,)
    assert schema.spec.categorical == {
        "colour": 5,
        "country": 50,
        "age_bucket": 3,
        "colour_x_age_bucket": 15,
        "colour_x_colour": 25,
    }
    new = write(tmp_path / "b.csv", [["30.5", "?", "black", " US ", "no"]], ",")
    data = rd.Csv(path, schema, test_path=new)
    features, labels = collect(data.train(3))
    ages, gains = np.array([20, 30, 50]), np.log1p([100, 0, 0, 100])
    scaled = (ages - ages.mean()) / ages.std()
    expected = np.stack([[*scaled[:2], 0, scaled[2]], (gains - gains.mean()) / gains.std()], axis=1)
    np.testing.assert_allclose(features["numeric"], expected, atol=1e-6)
    assert features["colour"].tolist() == [4, 2, 4, 3]
    assert features["age_bucket"].tolist() == [1, 2, 0, 2]
    assert features["colour_x_age_bucket"].tolist() == [4 * 3 + 1, 2 * 3 + 2, 4 * 3, 3 * 3 + 2]
    assert features["country"][1] == 0 and len(set(features["country"])) == 4
    assert labels.tolist() == [1, 0, 0, 1]
    unseen, _ = collect(data.test(3))
    assert (unseen["colour"][0], unseen["age_bucket"][0], unseen["numeric"][0, 1]) == (1, 2, 0)
    assert unseen["country"][0] == features["country"][2]


def test_spaces_around_texts_do_not_count_in_files_nor_in_a_schema(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("39, CH, >50K\n50,US , <=50K\n31, na, >50K\n")
    schema = rd.Schema(
        columns=("age", "country", "income"),
        label="income",
        positive=(" >50K",),
        negative=("<=50K\t",),
        missing=" na ",
        categorical=(rd.CategoricalColumn("country", vocabulary=(" CH", "US\n")),),
    )
    features, labels = collect(rd.Csv(path, schema, test_fraction=0).train(3))
    assert labels.tolist() == [1, 0, 1]
    assert features["country"].tolist() == [2, 3, 0]
    schema.save(tmp_path / "schema")
    assert rd.Schema.load(tmp_path / "schema") == schema


def test_a_hashed_cross_depends_on_all_of_its_columns_however_large_they_are(tmp_path):
    sizes = {"user": 2**62, "film": 2**30, "country": 200}
    rows = [[f"{i}", f"{i % 3}", f"{i % 7}", "1"] for i in range(42)]
    path = write(tmp_path / "a.csv", [[*sizes, "y"], *rows], ",")
    crosses = [
        rd.CrossedColumn(("country", "user"), hash_buckets=2**60),
        rd.CrossedColumn(("user", "film", "country"), hash_buckets=1000),
        rd.CrossedColumn(("country", "film"), hash_buckets=1000),
    ]
    schema = rd.Schema.fit(
        path, label="y", positive=["1"], categorical=list(sizes), hashed=sizes, crosses=crosses
    )
    features, _ = collect(rd.Csv(path, schema, test_fraction=0).train(42))
    users, films, countries = (features[name].astype(object) for name in sizes)

    def fingerprints(texts, buckets):
        return [int(tf.strings.to_hash_bucket_fast(text, buckets)) for text in texts]

    for name, texts, buckets in (
        ("country_x_user", map("{},{}".format, countries, users), 2**60),
        ("user_x_film_x_country", map("{},{},{}".format, users, films, countries), 1000),
        # Those that have numbers are hashed by these.
        ("country_x_film", map(str, countries * 2**30 + films), 1000),
    ):
        assert features[name].tolist() == fingerprints(texts, buckets)
    # A schema without buckets must have a number for each combination.
    numbered = dataclasses.replace(schema, crosses=(rd.CrossedColumn(("country", "film")),))
    features, _ = collect(rd.Csv(path, numbered, test_fraction=0).train(42))
    assert features["country_x_film"].tolist() == (countries * 2**30 + films).tolist()
    message = f"hash_buckets=0 of cross 'user_x_film': .* {2**92} combinations, more than 2..63"
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(schema, crosses=(rd.CrossedColumn(("user", "film")),))


@pytest.mark.parametrize("log1p", [[], ["x"]], ids=["as it is", "log1p"])
def test_a_constant_column_is_not_scaled(tmp_path, log1p):
    path = tmp_path / "a.csv"
    path.write_text("y,x\n" + "1,0.7\n" * 100)
    schema = rd.Schema.fit(path, label="y", positive=["1"], numeric=["x"], log1p=log1p)
    assert schema.numeric[0].std == 1.0


def test_white_space_beyond_ascii_is_a_part_of_a_word_in_files_that_are_fitted_and_read(tmp_path):
    path = tmp_path / "a.csv"
    rows = ["y,x\u00a0,z", "1,CH\u00a0,a |b\u2003", "0, US\t,b\u2003"]
    path.write_text("\n".join(rows), encoding="utf-8")
    schema = rd.Schema.fit(
        path, label="y", positive=["1"], categorical=["x", "z"], multi_hot={"z": "|"}
    )
    words = [("CH\u00a0", "US"), ("a", "b\u2003")]
    assert [column.vocabulary for column in schema.categorical] == words
    ((features, _),) = rd.Csv(path, schema, test_fraction=0).train(2).as_numpy_iterator()
    assert features["x"].tolist() == [2, 3]
    assert [ids.tolist() for ids in features["z"]] == [[2, 3], [3]]


def test_a_header_is_recognised_and_checked(tmp_path):
    plain = write(tmp_path / "plain.csv", CSV_ROWS, ",")
    names = ["age", "gain", "colour", "country", "click"]
    headed = write(tmp_path / "headed.csv", [names, *CSV_ROWS], ", ")
    schema = fit(headed, columns=None)
    assert schema.columns == tuple(names)
    assert rd.Csv(headed, schema, test_fraction=0).train_rows == 4
    with pytest.raises(ValueError, match="plain.csv' begins with"):
        rd.Csv(plain, schema)
    schema = fit(plain)
    first, second = (rd.Csv(path, schema, test_fraction=0) for path in (plain, headed))
    assert_same(collect(first.train(3)), collect(second.train(3)))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (["2x", "0", "red", "US", "no"], "column age: `2x` is not a number"),
        (["2e38", "9e99", "red", "US", "no"], "column gain: `9e99` is too large"),
        (["nan", "0", "red", "US", "no"], "column age: `nan` is not a number"),
        (["2", "0", "red", "no"], "column click: found 4 columns instead of 5"),
        (["2", "0", "red", "US", "no", ""], "column 6: found 6 columns instead of 5"),
        (["2", "0", "red", "US", "maybe"], "column click: `maybe` is none of the labels yes, no"),
    ],
)
def test_a_malformed_csv_line_is_named(tmp_path, row, message):
    path = write(tmp_path / "a.csv", CSV_ROWS, ",")
    schema = fit(path)
    bad = write(tmp_path / "bad.csv", [list(schema.columns), *CSV_ROWS, row], ", ")
    message = f"malformed row in {bad}, line 6, {message}"
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        list(rd.Csv(bad, schema, test_fraction=0).train(2))
    assert message in str(error.value)
    if "labels" not in message:
        with pytest.raises(ValueError) as failure:
            fit(bad)
        assert message == str(failure.value)


def test_wrong_schemas_are_named(tmp_path):
    path = write(tmp_path / "a.csv", CSV_ROWS, ",")
    for call, message in (
        (lambda: fit(path, label="x"), "column 'x'"),
        (lambda: fit(path, log1p=["colour"]), "log1p"),
        (lambda: fit(path, buckets={"age": 1}), r"buckets\['age'\] must be .* at least 2, got 1"),
        (lambda: fit(path, crosses=[rd.CrossedColumn(("colour", "age"))]), "crosses: 'age'"),
        (lambda: fit(path, positive=[]), "positive"),
        (lambda: fit(path, positive="yes"), r"positive='yes': .* as \('yes',\)"),
        (lambda: fit(path, positive=(1,)), r"positive=\(1,\): must have texts, not 1"),
        (lambda: fit(path, numeric="age"), r"numeric='age': .* as \('age',\)"),
        (lambda: fit(path, hashed=["country"]), r"hashed=\['country'\]: must be None or a dict"),
        (lambda: rd.Schema(label="y", positive="10"), "positive='10'"),
        (
            lambda: rd.Schema(label="y", positive=("1",), numeric=("age",)),
            r"numeric=\('age',\): must have NumericColumns, not 'age'",
        ),
        (lambda: rd.Schema(label=None, positive=("1",)), "label=None: must be a sequence of texts"),
        (lambda: rd.Schema(label="y", positive=("1",), header=1), "header must be a bool, not 1"),
        (lambda: rd.Schema.load(None), "path must be the path of a file, not None"),
        (lambda: rd.NumericColumn(None), "name=None: must be a string that is not empty"),
        (lambda: rd.NumericColumn("a", std=0), "std of column 'a' must be .* above 0, not 0"),
        (lambda: rd.NumericColumn("a", mean=float("nan")), "mean of column 'a' must be a finite"),
        (lambda: rd.NumericColumn("a", mean="4"), "mean of column 'a' must be a finite .* not '4'"),
        (lambda: rd.NumericColumn("a", boundaries="12"), "boundaries of .*='12': must be a seq"),
        (lambda: rd.NumericColumn("a", log1p="no"), "log1p of column 'a' must be a bool, not 'no'"),
        (lambda: rd.NumericColumn("a", boundaries=(2, 1)), "boundaries"),
        (lambda: rd.CategoricalColumn("a"), "vocabulary or hash_buckets"),
        (lambda: rd.CategoricalColumn("a", vocabulary=("x", "x")), "duplicates"),
        (lambda: rd.CategoricalColumn("a", vocabulary=("x", " x")), "duplicates"),
        (lambda: rd.CategoricalColumn("a", "red"), r"vocabulary of .* as \('red',\)"),
        (lambda: rd.CategoricalColumn("a", (1, 2)), "vocabulary of .*: must have texts, not 1"),
        (lambda: rd.CategoricalColumn("a", hash_buckets=1), "hash_buckets of at least 2"),
        (lambda: rd.CategoricalColumn("a", hash_buckets=-5), "hash_buckets of column 'a' must be"),
        (lambda: rd.CategoricalColumn("a", hash_buckets="9"), "hash_buckets of .* integer .* '9'"),
        (lambda: rd.CategoricalColumn("a", hash_buckets=9.5), "hash_buckets of .* integer .* 9.5"),
        (lambda: rd.CrossedColumn("color"), r"columns='color': .* as \('color',\)"),
        (lambda: rd.CrossedColumn(("a", "b"), 9.5), "hash_buckets must be an integer .* got 9.5"),
        (lambda: rd.CrossedColumn(("a",)), "two columns"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_labels_of_which_none_is_positive_are_logged_with_their_values(tmp_path, caplog):
    path = write(tmp_path / "a.csv", CSV_ROWS, ",")
    caplog.set_level("WARNING", logger="absl")
    fit(path)
    assert "positive" not in caplog.text
    schema = fit(path, positive=["Yes"], negative=())
    assert "label='click' has the values ['no', 'yes'], and positive=('Yes',)" in caplog.text
    _, labels = collect(rd.Csv(path, schema, test_fraction=0).train(4))
    assert labels.tolist() == [0, 0, 0, 0]


# --- Adult


def test_adult_is_read_in_either_form(real_data, tmp_path):
    data = rd.adult(real_data / "adult")
    assert (data.train_rows, data.test_rows) == (32561, 16281)
    for name, ending in (("adult.data", ""), ("adult.test", ".")):
        packed = (real_data / "adult" / f"{name}.gz").read_bytes()
        _, *rows = gzip.decompress(packed).decode().split("\n")
        # As the data are distributed: no header, a remark, and full stops after the test labels.
        remark = "|1x3 Cross validator\n" if ending else ""
        text = remark + "\n".join(row + ending if row else "" for row in rows) + "\n"
        (tmp_path / name).write_text(text)
    original = rd.adult(tmp_path)
    assert original.schema.numeric == data.schema.numeric
    train, test = collect(data.train(4096)), collect(data.test(4096))
    assert_same(collect(original.train(1000)), train)
    assert_same(collect(original.test(1000)), test)

    fields = [row.split(", ") for row in rows if row]
    assert test[1].tolist() == [float(row[-1] == ">50K") for row in fields]
    for position, name in ((1, "workclass"), (6, "occupation"), (13, "native-country")):
        words = {c.name: c.vocabulary for c in data.schema.categorical}[name]
        expected = [0 if r[position] == "?" else words.index(r[position]) + 2 for r in fields]
        assert test[0][name].tolist() == expected
    age = next(c for c in data.schema.numeric if c.name == "age")
    buckets = np.digitize([float(row[0]) for row in fields], age.boundaries) + 1
    np.testing.assert_array_equal(test[0]["age_bucket"], buckets)
    np.testing.assert_allclose(train[0]["numeric"].mean(axis=0), 0, atol=1e-4)
    np.testing.assert_allclose(train[0]["numeric"].std(axis=0), 1, atol=1e-4)


def test_a_linear_model_of_the_adult_features_predicts_well(real_data):
    data = rd.adult(real_data / "adult")
    parts = [collect(data.train(4096)), collect(data.test(4096))]
    ids = [np.stack([part[0][name] for name in data.spec.categorical], axis=1) for part in parts]
    train, test = reference_statistics.one_hot(ids)
    weights = reference_statistics.logistic_regression(train, parts[0][1].ravel())
    assert reference_statistics.auc(parts[1][1].ravel(), test @ weights[:-1]) > 0.912


def test_a_missing_adult_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="adult.data"):
        rd.adult(tmp_path)


# --- Synthetic


def test_a_synthetic_row_depends_on_the_seed_and_its_number_only():
    sizes = [7, 1000, 1]
    one = rd.Synthetic(1000, cardinalities=sizes, test_rows=300, seed=5)
    two = rd.Synthetic(2000, cardinalities=sizes, test_rows=300, seed=5)
    first = collect(one.train(64))
    longer = collect(two.train(333))
    assert_same(first, ({k: v[:1000] for k, v in longer[0].items()}, longer[1][:1000]))
    assert_same(collect(one.test(100)), collect(two.test(7)))
    shuffled = collect(one.train(64, shuffle=1000, seed=1))
    assert not np.array_equal(shuffled[0]["numeric"], first[0]["numeric"])
    order, expected = (np.lexsort(part[0]["numeric"].T) for part in (shuffled, first))
    np.testing.assert_array_equal(shuffled[0]["C2"][order], first[0]["C2"][expected])
    np.testing.assert_array_equal(shuffled[1][order], first[1][expected])
    other = collect(rd.Synthetic(1000, cardinalities=sizes, seed=6).train(64))
    assert not np.array_equal(other[0]["C2"], first[0]["C2"])


def test_synthetic_rows_are_all_different_and_none_is_in_both_parts():
    data = rd.Synthetic(20_000, test_rows=20_000, cardinalities=[5])
    parts = [collect(dataset)[0]["numeric"] for dataset in (data.train(4096), data.test(4096))]
    assert len(np.unique(np.concatenate(parts), axis=0)) == 40_000


def test_the_default_synthetic_set_has_the_shape_of_criteo_and_its_base_rate():
    data = rd.Synthetic(60_000, test_rows=40_000)
    assert len(data.spec.numeric) == 13 and len(data.spec.categorical) == 26
    assert max(data.spec.categorical.values()) == 100_000
    features, labels = collect(data.train(4096))
    assert labels.mean() == pytest.approx(0.25, abs=0.01)
    for name, size in data.spec.categorical.items():
        assert features[name].min() >= 0 and features[name].max() < size
    assert (features["numeric"] == 0).mean() == pytest.approx(0.1, abs=0.005)
    assert features["numeric"].mean() == pytest.approx(0.9, abs=0.01)
    assert np.abs(np.corrcoef(features["numeric"].T) - np.eye(13)).max() < 0.03


@pytest.mark.parametrize("exponent", [0.0, 1.0, 1.3])
def test_synthetic_ids_follow_the_zipf_distribution(exponent):
    data = rd.Synthetic(200_000, cardinalities=[1000], zipf=exponent, test_rows=0)
    counts = collections.Counter(collect(data.train(4096))[0]["C1"].tolist())
    found = np.array(sorted(counts.values(), reverse=True)) / 200_000
    assert len(counts) > 900
    # The continuous power law: rank r has the mass between r and r + 1.
    edges = np.arange(1, 1002.0)
    mass = np.log(edges) if exponent == 1 else edges ** (1 - exponent) / (1 - exponent)
    expected = np.diff(mass) / (mass[-1] - mass[0])
    np.testing.assert_allclose(found[:5], expected[:5], rtol=0.25 if exponent == 0 else 0.03)


def test_the_days_are_equal_parts_of_the_training_rows():
    data = rd.Synthetic(120, cardinalities=[5, 9], days=3, drift=0.2, test_rows=0)
    features, labels = collect(data.train(50))
    for day in range(3):
        part = slice(40 * day, 40 * (day + 1))
        expected = {name: values[part] for name, values in features.items()}
        assert_same(collect(data.day(day, 7)), (expected, labels[part]))


def test_without_drift_all_days_are_alike_and_drift_leaves_the_first_day_as_it_is():
    sizes = [5, 9]
    plain = rd.Synthetic(120, cardinalities=sizes, test_rows=30)
    days = rd.Synthetic(120, cardinalities=sizes, test_rows=30, days=3)
    assert_same(collect(plain.train(50)), collect(days.train(50)))
    assert_same(collect(plain.test(50)), collect(days.test(50)))
    drifting = rd.Synthetic(120, cardinalities=sizes, test_rows=30, days=3, drift=0.7)
    assert_same(collect(plain.train(40).take(1)), collect(drifting.day(0, 40)))


def test_drift_makes_click_models_less_alike_from_day_to_day():
    # The test part is the day after the last; its features do not depend on the day. Many features,
    # as few ids' effects in two click models may be alike by chance.
    def logits(days):
        one = rd.Synthetic(
            60, cardinalities=[100] * 50, zipf=0.3, test_rows=5000, days=days, drift=0.25
        )
        p = one.click_probabilities().astype(np.float64)
        return np.log(p / (1 - p))

    first = logits(1)
    for later, apart in ((2, 1), (3, 2), (4, 3)):
        correlation = np.corrcoef(first, logits(later))[0, 1]
        # Day 1 and days 2, 3 and 4; day 4 is that of another click model.
        expected = np.cos(np.pi / 2 * 0.25 * apart)
        assert correlation == pytest.approx(expected, abs=0.1)


def test_the_best_values_are_those_of_the_true_probabilities():
    data = rd.Synthetic(10, test_rows=50_000, cardinalities=[20, 3000])
    _, labels = collect(data.test(4096))
    scores = data.click_probabilities()
    assert data.best_auc() == pytest.approx(reference_statistics.auc(labels, scores), abs=1e-6)
    base = reference_statistics.log_loss(labels, np.full(len(labels), labels.mean()))
    expected = reference_statistics.log_loss(labels, scores) / base
    assert data.best_normalized_entropy() == pytest.approx(expected, abs=1e-6)
    for low in np.arange(0, 1, 0.2):
        inside = (scores >= low) & (scores < low + 0.2)
        assert labels[inside].mean() == pytest.approx(scores[inside].mean(), abs=0.03)
    without_signal = rd.Synthetic(10, test_rows=20_000, cardinalities=[20], signal=0)
    assert without_signal.best_auc() == pytest.approx(0.5)


def test_a_linear_model_comes_close_to_the_best_auc_where_there_are_no_interactions():
    data = rd.Synthetic(30_000, test_rows=20_000, cardinalities=[4, 10, 30], interactions=0)
    parts = [collect(data.train(4096)), collect(data.test(4096))]
    ids = [np.stack([part[0][f"C{i}"] for i in (1, 2, 3)], axis=1) for part in parts]
    train, test = (
        np.hstack([encoded, part[0]["numeric"]])
        for encoded, part in zip(reference_statistics.one_hot(ids), parts, strict=True)
    )
    weights = reference_statistics.logistic_regression(train, parts[0][1].ravel())
    auc = reference_statistics.auc(parts[1][1].ravel(), test @ weights[:-1])
    assert data.best_auc() - 0.005 < auc < data.best_auc() + 0.002
