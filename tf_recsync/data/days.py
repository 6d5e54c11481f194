"""Data by day, for training that goes on with each new day."""

import collections
import datetime
import os
import re
from collections.abc import Callable, Iterator, Sequence

from tf_recsync._checks import checked_path
from tf_recsync.data import _spec, _text

_DATE = re.compile(r"(?<![0-9])[0-9]{4}-[0-9]{2}-[0-9]{2}(?![0-9])")
_MISSING = ("raise", "skip")
_ONE_DAY = datetime.timedelta(days=1)

Date = datetime.date | str


class Days:
    """The days of a folder of data, one after the other.

    A day is a folder named like `2024-01-31` or `date=2024-01-31` (of whatever name before the
    equals sign), or the files that have its date in their names, like `clicks-2024-01-31.csv.gz`.
    Without names of days, a day is made of the rows with its timestamp (`by="timestamp"`).

    Iterating gives pairs of a `datetime.date` and that day's `ClickData`, which is made when it is
    its turn: days that are written meanwhile are found, as long as they are there when their turn
    comes. With `missing="raise"` all days have to be there at the beginning.

    Args:
        folder: The folder.
        start: The first day, a `datetime.date` or a text like `2024-01-31`.
        end: The last day, which is one of them.
        read: Makes the `ClickData` of a day of a list of its folder or files, like
            `lambda files: Parquet(files, schema, test_fraction=0)`. With `by="timestamp"` it is
            called with the folder and, by name, `between`, as readers take it, like
            `functools.partial(Parquet, schema=schema, test_fraction=0)`.
        missing: What becomes of days without data: `"raise"` (the default) raises an error that
            names them, `"skip"` leaves them out. With `by="timestamp"` it is not known which days
            have no data, and `missing` can't be given.
        by: What says of which day data are: `"name"` (the default) or `"timestamp"`: a row's
            `Schema.timestamp`, in UTC.

    Raises:
        FileNotFoundError: If there is no such folder, or days are missing; the message names them.
        ValueError: If an argument is out of range, a day has both a folder and files, or a file has
            several dates in its name.

    Example:
        >>> import pathlib, tempfile
        >>> from tf_recsync.data import Csv, Schema
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> for day in ("2024-01-30", "2024-01-31", "2024-02-01"):
        ...     (folder / f"date={day}").mkdir()
        ...     _ = (folder / f"date={day}" / "part-0.csv").write_text("age,click\\n30,1\\n")
        >>> schema = Schema(label="click", positive=("1",))
        >>> days = Days(
        ...     folder, "2024-01-31", "2024-02-01", lambda day: Csv(day, schema, test_fraction=0)
        ... )
        >>> [(str(day), data.train_rows) for day, data in days]
        [('2024-01-31', 1), ('2024-02-01', 1)]
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        start: Date,
        end: Date,
        read: Callable[..., _spec.ClickData],
        *,
        missing: str = "raise",
        by: str = "name",
    ) -> None:
        """See the class."""
        self._folder = checked_path(folder, "folder")
        self._read = read
        self._skips = missing == "skip"
        self._by_name = by == "name"
        if not callable(read):
            raise ValueError(f"read must be a function of paths, not {read!r}")
        first, last = _date("start", start), _date("end", end)
        if first > last:
            raise ValueError(f"start={start}: must not be after end={end}.")
        if missing not in _MISSING:
            raise ValueError(f"missing={missing!r}: must be one of {_MISSING}.")
        if by not in ("name", "timestamp"):
            raise ValueError(f"by={by!r}: must be 'name' or 'timestamp'.")
        if self._skips and not self._by_name:
            raise ValueError("missing='skip': can't be known with by='timestamp'.")
        if not os.path.isdir(self._folder):
            raise FileNotFoundError(f"No folder {self._folder!r}.")
        self._dates = [first + i * _ONE_DAY for i in range((last - first).days + 1)]
        if self._by_name and not self._skips:
            found = self._paths()
            absent = [str(date) for date in self._dates if date not in found]
            if absent:
                raise FileNotFoundError(
                    f"The folder {self._folder!r} has no data of {', '.join(absent)}; "
                    "missing='skip' leaves such days out."
                )

    @property
    def dates(self) -> tuple[datetime.date, ...]:
        """The days in order; with `missing="skip"` those that have data now."""
        if not self._skips:
            return tuple(self._dates)
        found = self._paths()
        return tuple(date for date in self._dates if date in found)

    def __iter__(self) -> Iterator[tuple[datetime.date, _spec.ClickData]]:
        """Gives each day and its data."""
        for date in self._dates:
            if not self._by_name:
                midnight = datetime.datetime.combine(date, datetime.time(), datetime.UTC)
                between = (midnight, midnight + _ONE_DAY)
                yield date, self._read(self._folder, between=between)
                continue
            paths = self._paths().get(date)
            if paths:
                yield date, self._read(paths)
            elif not self._skips:
                raise FileNotFoundError(f"The folder {self._folder!r} has no data of {date} now.")

    def _paths(self) -> dict[datetime.date, list[str]]:
        """Returns the folder or the files of each day that has some."""
        folders: dict[datetime.date, list[str]] = collections.defaultdict(list)
        files: dict[datetime.date, list[str]] = collections.defaultdict(list)
        for name in sorted(os.listdir(self._folder)):
            path = os.path.join(self._folder, name)
            if _text.is_hidden(name):
                continue
            if not os.path.isdir(path):
                dates = _dates_in(_DATE.findall(name))
                if len(dates) > 1:
                    raise ValueError(
                        f"The name of the file {path!r} has several dates: "
                        f"{', '.join(map(str, sorted(dates)))}; a file must be of one day."
                    )
                for date in dates:
                    files[date].append(path)
            elif _text.has_files(path):
                for date in _dates_in([name.rpartition("=")[2]]):
                    folders[date].append(path)
        for date, paths in folders.items():
            both = [*paths, *files.get(date, [])]
            if len(both) > 1:
                raise ValueError(f"The day {date} has several folders, or files, too: {both}.")
        return {**files, **folders}


def _date(argument: str, value: Date) -> datetime.date:
    if isinstance(value, datetime.datetime):
        return value.date()
    if isinstance(value, datetime.date):
        return value
    if isinstance(value, str) and _DATE.fullmatch(value) and _dates_in([value]):
        return datetime.date.fromisoformat(value)
    raise ValueError(f"{argument}={value!r}: must be a date like '2024-01-31'.")


def _dates_in(texts: Sequence[str]) -> set[datetime.date]:
    """Returns the different dates that texts are; texts that are none are left out."""
    dates = set()
    for text in texts:
        if _DATE.fullmatch(text):
            try:
                dates.add(datetime.date.fromisoformat(text))
            except ValueError:
                continue
    return dates
