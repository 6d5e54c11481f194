"""Days of a folder of data are trained on one after the other."""

import datetime
import functools
import pathlib

import pytest
from data_files import WRITERS, write_csv

from tf_recsync import data as rd

SCHEMA = rd.Schema(label="click", positive=("1",), timestamp="time")


def rows(count: int, day: int = 1) -> list[dict]:
    start = datetime.datetime(2024, 1, day, tzinfo=datetime.UTC).timestamp()
    return [{"click": 1, "time": int(start) + i} for i in range(count)]


def read(files: list[str]) -> rd.ClickData:
    return rd.Csv(files, SCHEMA, test_fraction=0)


def counted(days: rd.Days) -> dict[str, int]:
    return {str(day): data.train_rows for day, data in days}


def folders(root: pathlib.Path, name: str = "{}") -> pathlib.Path:
    for day in (3, 1, 2, 5):
        folder = root / name.format(f"2024-01-0{day}")
        folder.mkdir()
        write_csv(folder / "part-0", rows(day))
        write_csv(folder / "part-1", rows(day))
    (root / "notes").mkdir()
    (root / "2024-01-99").mkdir()
    return root


@pytest.mark.parametrize("name", ["{}", "date={}"])
def test_days_are_folders_with_both_ends_in_order(tmp_path, name):
    days = rd.Days(folders(tmp_path, name), "2024-01-01", datetime.date(2024, 1, 3), read)
    assert counted(days) == {"2024-01-01": 2, "2024-01-02": 4, "2024-01-03": 6}
    assert counted(days) == counted(days), "it can be gone through again"
    assert [day.day for day in days.dates] == [1, 2, 3]


def test_days_are_files_with_dates_in_their_names(tmp_path):
    for name, count in (
        ("clicks-2024-01-01.csv", 2),
        ("clicks-2024-01-02-part0.csv", 3),
        ("clicks-2024-01-02-part1.csv", 4),
        ("2024-01-02-clicks-2024-01-02.csv", 5),
        ("12024-01-02.csv", 9),
        (".2024-01-02.csv", 9),
    ):
        write_csv(tmp_path / name, rows(count))
    days = rd.Days(tmp_path, "2024-01-01", "2024-01-02", read)
    assert counted(days) == {"2024-01-01": 2, "2024-01-02": 12}


def test_missing_days_are_named_or_left_out(tmp_path):
    folders(tmp_path)
    with pytest.raises(
        FileNotFoundError, match="no data of 2024-01-04, 2024-01-06; missing='skip'"
    ):
        rd.Days(tmp_path, "2024-01-03", "2024-01-06", read)
    days = rd.Days(tmp_path, "2024-01-03", "2024-01-06", read, missing="skip")
    assert counted(days) == {"2024-01-03": 6, "2024-01-05": 10}
    assert [day.day for day in days.dates] == [3, 5]


def test_a_day_that_is_written_meanwhile_is_found(tmp_path):
    days = rd.Days(folders(tmp_path), "2024-01-03", "2024-01-04", read, missing="skip")
    iterator = iter(days)
    next(iterator)
    write_csv(tmp_path / "2024-01-04.csv", rows(3))
    day, data = next(iterator)
    assert (day.day, data.train_rows) == (4, 3)


@pytest.mark.cases("Parquet")
@pytest.mark.parametrize("kind", WRITERS)
def test_days_are_told_apart_by_timestamps(tmp_path, kind):
    values = [row for day in (1, 3) for row in rows(day, day)]
    WRITERS[kind](tmp_path / "all", values)
    reader = functools.partial(getattr(rd, kind), schema=SCHEMA, test_fraction=0)
    days = rd.Days(tmp_path, "2024-01-01", "2024-01-03", reader, by="timestamp")
    found = {"2024-01-01": 1, "2024-01-02": 0, "2024-01-03": 3}
    batches = {str(day): data.train(4) for day, data in days}
    assert {
        day: sum(len(label) for _, label in dataset) for day, dataset in batches.items()
    } == found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"start": "2024-02-30"}, "start='2024-02-30': must be a date like"),
        ({"end": "20240101"}, "end='20240101': must be a date like"),
        ({"start": "2024-01-03"}, "start=2024-01-03: must not be after end=2024-01-02"),
        ({"missing": "ignore"}, "missing='ignore': must be one of"),
        ({"by": "size"}, "by='size': must be 'name' or 'timestamp'"),
        ({"by": "timestamp", "missing": "skip"}, "can't be known with by='timestamp'"),
    ],
)
def test_wrong_arguments_are_named(tmp_path, arguments, message):
    folders(tmp_path)
    good = {"folder": tmp_path, "start": "2024-01-01", "end": "2024-01-02", "read": read}
    with pytest.raises(ValueError, match=message):
        rd.Days(**(good | arguments))


def test_a_file_with_several_dates_in_its_name_is_refused(tmp_path):
    write_csv(folders(tmp_path) / "clicks-2024-01-01-to-2024-01-03.csv", rows(3))
    with pytest.raises(ValueError, match="to-2024-01-03.csv' has several dates: 2024-01-01, 2024"):
        rd.Days(tmp_path, "2024-01-01", "2024-01-02", read)


def test_folders_and_files_of_the_same_day_are_refused(tmp_path):
    write_csv(folders(tmp_path) / "2024-01-02.csv", rows(3))
    with pytest.raises(ValueError, match="The day 2024-01-02 has several folders, or files, too"):
        rd.Days(tmp_path, "2024-01-01", "2024-01-02", read)
    with pytest.raises(FileNotFoundError, match="No folder"):
        rd.Days(tmp_path / "none", "2024-01-01", "2024-01-02", read)
