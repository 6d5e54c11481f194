"""What workers did when, for timelines and for reports of how they spend their time."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tf_recsync._checks import check_seconds, checked_path, number
from tf_recsync.ops.events import ACTIVITIES


class Event(NamedTuple):
    """Something that a worker did.

    Attributes:
        worker: its index.
        activity: what it did, an index into `tf_recsync.ops.events.ACTIVITIES`.
        begin: when it began, in microseconds since the Unix epoch, by the worker's clock.
        end: when it ended.
        iteration: the number of the worker's step, from 0 in each pass over the data; under a
            `HopStrategy` its iteration, which goes on; -1 where it is part of no step.
        neighbor: the worker with which it exchanged an update; -1 where there is none.
        thread: which thread of the worker did it, from 0; of a synchronization, the shard.
    """

    worker: int
    activity: int
    begin: int
    end: int
    iteration: int
    neighbor: int
    thread: int = 0

    @property
    def name(self) -> str:
        """What it did, in words."""
        return ACTIVITIES[self.activity]


class Total(NamedTuple):
    """What a worker has done again and again.

    Attributes:
        count: how often, as far as it has ended.
        seconds: for how long, all in all.
    """

    count: int
    seconds: float


class Recordings:
    """The recordings of what the workers of a model do. Thread-safe."""

    def __init__(self):
        self._lock = threading.Lock()
        self._recordings: list[Recording] = []

    @property
    def are_made(self) -> bool:
        """Whether somebody records."""
        with self._lock:
            return bool(self._recordings)

    def record(
        self,
        limit: int,
        collect: Callable[[], object],
        failed: Callable[[], object] | None = None,
    ) -> Recording:
        """Begins a recording; see `record_events` of strategies.

        Args:
            limit: how many events it keeps.
            collect: has the workers tell what they have done up to now.
            failed: is called when training has failed.
        """
        collect()  # What was before is nobody's.
        recording = Recording(limit, collect, failed or (lambda: None), self._drop)
        with self._lock:
            self._recordings.append(recording)
        return recording

    def add(self, worker: int, events: np.ndarray, lost: int, thread: int = 0) -> None:
        """A worker has told what it did.

        Args:
            worker: which one.
            events: [events, 5]: an `Event` each, without the worker and the thread.
            lost: how many are missing among them, as there were too many at once.
            thread: of the worker, that did it.
        """
        is_known = (events[:, 0] >= 0) & (events[:, 0] < len(ACTIVITIES))
        events, lost = events[is_known], lost + np.count_nonzero(~is_known)
        with self._lock:
            if not self._recordings or len(events) + lost == 0:
                return
            rows = np.full((len(events), len(Event._fields)), worker, np.int64)
            rows[:, 1:-1] = events
            rows[:, -1] = thread
            for recording in self._recordings:
                recording._add(worker, rows, lost)

    def add_sync(self, worker: int, seconds: float, shard: int) -> None:
        """A synchronization has ended just now.

        Args:
            worker: the first trainer of the group whose copy it was.
            seconds: that it took.
            shard: of the copy.
        """
        end = int(time.time() * 1e6)
        event = [ACTIVITIES.index("synchronize"), end - int(seconds * 1e6), end, -1, -1]
        self.add(worker, np.array([event]), 0, shard)

    def tell(self) -> None:
        """There is nothing to pass on while all goes well; see `model_functions.Observer`."""

    def failed(self) -> None:
        """Training or evaluation ends with an error: tells those who record."""
        with self._lock:
            recordings = list(self._recordings)
        for recording in recordings:
            recording._failed()

    def _drop(self, recording: Recording) -> None:
        with self._lock:
            if recording in self._recordings:
                self._recordings.remove(recording)


class Recording:
    """What workers do, from when it was made to `stop`; from a strategy's `record_events`.

    A context manager that stops at its end. Thread-safe.

    Attributes:
        limit: how many events are kept, the latest ones.
    """

    def __init__(
        self,
        limit: int,
        collect: Callable[[], object],
        failed: Callable[[], object],
        drop: Callable[[Recording], None],
    ):
        self.limit = limit
        self._collect = collect  # Of one that was stopped, nothing is collected.
        self._failed = failed
        self._drop = drop
        self._lock = threading.Lock()
        self._parts: deque[np.ndarray] = deque()
        self._count = 0
        self._lost = 0
        # Of each worker, by activity: how often, and for how many microseconds.
        self._sums: dict[int, np.ndarray] = {}

    def events(self) -> Iterator[Event]:
        """What was done so far, by worker's report; it need not be in the order of time."""
        self._collect()
        with self._lock:
            parts = list(self._parts)
        return (Event(*row) for part in parts for row in part.tolist())

    def totals(self) -> dict[int, dict[str, Total]]:
        """How often and for how long workers have done what, also in events no longer kept.

        Returns:
            For each worker that has told something, the totals of each activity, by its name;
            those of its threads are added up. Activities may overlap.
        """
        self._collect()
        with self._lock:
            sums = {worker: of_one.tolist() for worker, of_one in sorted(self._sums.items())}
        return {
            worker: {
                name: Total(int(count), 1e-6 * micros)
                for name, count, micros in zip(ACTIVITIES, *of_one, strict=True)
            }
            for worker, of_one in sums.items()
        }

    def plot(
        self, path: str | os.PathLike[str], *, begin: float = 0.0, seconds: float = 1.0
    ) -> None:
        """Draws a stretch of time, with what each worker did in it.

        Args:
            path: of the picture; its ending says which kind, such as ".png".
            begin: of the stretch, in seconds since the first event, at least 0. Defaults to 0.
            seconds: its length, positive. Defaults to 1.

        Raises:
            ValueError: if `begin` or `seconds` is wrong.
            ImportError: if matplotlib is not installed (the extra `plot`).
        """
        from tf_recsync.synchronization import event_picture

        check_seconds("seconds", seconds)
        path = checked_path(path, of="file")
        number("begin", begin, least=0, allowed="at least 0, in seconds")
        event_picture.draw(path, list(self.events()), begin, seconds)

    @property
    def lost(self) -> int:
        """How many events are not there: there were more than `limit`, or too many at once."""
        with self._lock:
            return self._lost

    def stop(self) -> None:
        """Ends the recording; what was recorded stays."""
        collect, self._collect = self._collect, lambda: None
        collect()
        self._drop(self)

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *exception_info: object) -> None:
        self.stop()

    def _add(self, worker: int, rows: np.ndarray, lost: int) -> None:
        took = rows[:, 3] - rows[:, 2]
        weights = (np.ones(len(rows)), took)
        sums = np.stack([np.bincount(rows[:, 1], w, len(ACTIVITIES)) for w in weights])
        with self._lock:
            self._lost += lost
            self._sums[worker] = self._sums.get(worker, 0.0) + sums
            if len(rows) > 0:
                self._parts.append(rows)
                self._count += len(rows)
            while self._count > self.limit:
                excess = min(self._count - self.limit, len(self._parts[0]))
                first = self._parts.popleft()
                if excess < len(first):
                    self._parts.appendleft(first[excess:])
                self._count -= excess
                self._lost += excess


# The rows of a worker: what can happen at the same time is in different ones, as viewers can't
# show spans of a row that overlap without containing each other.
_ROWS = ("step", "send", "receive", "data", "synchronization")
_ROW_OF = {
    "send": "send",
    "receive": "receive",
    "wait for a batch": "data",
    "synchronize": "synchronization",
}


def write_trace(
    path: str | os.PathLike[str],
    workers: int,
    events: Callable[[], Iterable[Sequence[int]]],
    lost: int = 0,
) -> None:
    """Writes what workers did into a file of Chrome's traces; see `callbacks.Timeline`.

    Args:
        path: of the file.
        workers: how many there are.
        events: gives them, as `Recording.events` does; called twice.
        lost: how many are missing.
    """
    with open(path, "w") as file:
        file.write('{"displayTimeUnit": "ms",\n')
        file.write(f'"otherData": {{"lost_events": {lost}}},\n"traceEvents": [')
        for number, event in enumerate(_trace(workers, events)):
            # One by one: there may be a great many.
            file.write(",\n" if number else "\n")
            json.dump(event, file)
        file.write("\n]}\n")


def _trace(workers: int, events: Callable[[], Iterable[Sequence[int]]]) -> Iterator[dict]:
    """The events in the form of Chrome's traces."""
    first: int | None = None
    rows: set[tuple[int, int, str]] = set()  # Of all that there are, with their workers.
    for event in map(Event._make, events()):
        first = event.begin if first is None else min(first, event.begin)
        rows.add((event.worker, *row_of(event)))
    for worker in range(workers):
        yield _named("process_name", worker, 0, f"worker {worker}")
    for worker, thread, name in sorted(rows):
        yield _named("thread_name", worker, thread, name)
    for event in map(Event._make, events()):
        about = {}
        if event.iteration >= 0:
            about["iteration"] = event.iteration
        if event.neighbor >= 0:
            about["neighbor"] = event.neighbor
        yield {
            "name": event.name,
            "cat": "recsync",
            "ph": "X",
            "ts": event.begin - (first or 0),
            # What takes no time would not be seen.
            "dur": max(event.end - event.begin, 1),
            "pid": event.worker,
            "tid": row_of(event)[0],
            "args": about,
        }


def row_of(event: Event) -> tuple[int, str]:
    """The row of its worker in which an event stands, beneath those of lower numbers; its name."""
    row = _ROW_OF.get(event.name, "step")
    number = event.thread * len(_ROWS) + _ROWS.index(row)
    return number, f"{row} {event.thread}" if event.thread else row


def _named(kind: str, process: int, row: int, name: str) -> dict:
    return {"name": kind, "ph": "M", "pid": process, "tid": row, "args": {"name": name}}
