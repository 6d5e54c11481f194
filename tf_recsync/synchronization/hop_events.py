"""What workers of decentralized training did, for a timeline (Hop)."""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from tf_recsync.ops import hop


class EventLog:
    """What the workers of a model did, for as long as somebody records it.

    Thread-safe.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._recordings: list[Recording] = []
        self._lost: dict[int, int] = {}  # Events that each worker could not keep, so far.

    def record(
        self,
        limit: int,
        collect: Callable[[], object],
        failed: Callable[[], object] | None = None,
    ) -> Recording:
        """Begins a recording; see `HopStrategy.record_events`.

        Args:
            limit: how many events it keeps.
            collect: has the workers tell what they have done up to now.
            failed: is called when training has failed.
        """
        collect()  # What was before is nobody's.
        recording = Recording(limit, collect, failed, self._drop)
        with self._lock:
            self._recordings.append(recording)
        return recording

    def add(self, worker: int, events: np.ndarray, lost: int) -> None:
        """A worker has told what it did.

        Args:
            worker: which one.
            events: [events, 5], without the worker.
            lost: how many it could not keep since it began.
        """
        with self._lock:
            newly_lost = lost - self._lost.get(worker, 0)
            self._lost[worker] = lost
            if not self._recordings:
                return
            rows = np.insert(events, 0, worker, axis=1)
            for recording in self._recordings:
                recording._add(rows, newly_lost)

    def restarted(self, worker: int) -> None:
        """A worker counts from 0 again."""
        with self._lock:
            self._lost.pop(worker, None)

    def fail(self) -> None:
        """Training has failed: tells those who record."""
        with self._lock:
            recordings = list(self._recordings)
        for recording in recordings:
            if recording._failed is not None:
                recording._failed()

    def _drop(self, recording: Recording) -> None:
        with self._lock:
            if recording in self._recordings:
                self._recordings.remove(recording)


class Recording:
    """What workers do, from when it was made to `stop`; from `HopStrategy.record_events`.

    A context manager that stops at its end. Thread-safe.

    Attributes:
        limit: how many events are kept, the latest ones.
    """

    def __init__(
        self,
        limit: int,
        collect: Callable[[], object],
        failed: Callable[[], object] | None,
        drop: Callable[[Recording], None],
    ):
        self.limit = limit
        self._collect: Callable[[], object] | None = collect
        self._failed = failed
        self._drop = drop
        self._lock = threading.Lock()
        self._parts: deque[np.ndarray] = deque()
        self._count = 0
        self._lost = 0

    def events(self) -> Iterator[tuple[int, ...]]:
        """What was done so far, by worker's report; it need not be in the order of time.

        Returns:
            (worker, what, begin, end, iteration, neighbor or -1) of each event: `what` is an
            index into `tf_recsync.ops.hop.SPANS`, times are microseconds since the Unix epoch.
        """
        collect = self._collect
        if collect is not None:
            collect()
        with self._lock:
            parts = list(self._parts)
        return (tuple(row) for part in parts for row in part.tolist())

    @property
    def lost(self) -> int:
        """How many events are not there: there were more than `limit`, or too many at once."""
        with self._lock:
            return self._lost

    def stop(self) -> None:
        """Ends the recording; what was recorded stays."""
        collect, self._collect = self._collect, None
        if collect is not None:
            collect()
        self._drop(self)

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *exception_info: object) -> None:
        self.stop()

    def _add(self, rows: np.ndarray, lost: int) -> None:
        with self._lock:
            self._lost += lost
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


def write_trace(
    path: str | os.PathLike[str],
    workers: int,
    events: Callable[[], Iterable[tuple[int, ...]]],
    lost: int = 0,
) -> None:
    """Writes what workers did into a file of Chrome's traces; see `callbacks.HopTimeline`.

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


def _trace(workers: int, events: Callable[[], Iterable[tuple[int, ...]]]) -> Iterator[dict]:
    """The events in the form of Chrome's traces."""
    for worker in range(workers):
        yield _named("process_name", worker, 0, f"worker {worker}")
        for row, name in enumerate(("step", "send", "receive")):
            yield _named("thread_name", worker, row, name)
    first = min((event[2] for event in events()), default=0)
    for worker, span, begin, end, iteration, neighbor in events():
        name = hop.SPANS[span]
        about = {"iteration": iteration}
        if neighbor >= 0:
            about["neighbor"] = neighbor
        yield {
            "name": name,
            "cat": "hop",
            "ph": "X",
            "ts": begin - first,
            # What takes no time would not be seen.
            "dur": max(end - begin, 1),
            "pid": worker,
            "tid": {"send": 1, "receive": 2}.get(name, 0),
            "args": about,
        }


def _named(kind: str, process: int, row: int, name: str) -> dict:
    return {"name": kind, "ph": "M", "pid": process, "tid": row, "args": {"name": name}}
