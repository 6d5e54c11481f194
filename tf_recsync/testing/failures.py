"""Servers that fail, and come back, on a schedule."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import keras
from absl import logging

from tf_recsync._checks import integer, number
from tf_recsync.cluster import LocalCluster


class Failure(NamedTuple):
    """One entry of a `FailureSchedule`; a plain tuple will do.

    Attributes:
        when: a number of seconds or of steps, see `FailureSchedule`.
        action: "kill", "restart", "stop" (the process stays, and does not answer) or
            "continue".
        job: "worker", "ps" or "reader".
        index: which of them.
    """

    when: float
    action: str
    job: str
    index: int


class FailureSchedule(keras.callbacks.Callback):
    """Kills, restarts, stops and continues servers of a local cluster at set times.

    A context manager: the times are seconds since its beginning, and its end drops
    what is not due yet. With `unit="steps"` they are steps of training finished by all
    workers together since then, and the schedule has to be among the callbacks of
    `fit` as well, inside the `with` block.

    Events happen one after the other, in a thread of their own; one that takes its
    time (a restart takes seconds) delays the next. A restarted worker is
    readmitted by the `fit` that goes on; after `fit`, call `cluster.readmit()`.

    A stopped worker holds up whoever asks it for its metrics, like the progress bar and
    the callbacks of `fit`, though not the steps of the others, until it is given up (after a
    minute by default). So no steps are counted meanwhile, and it is stopped and continued by
    seconds only.

    Args:
        cluster: a cluster whose servers are in processes of their own. If several
            are in one, they fail together.
        events: (when, action, job, index) tuples, as of `Failure`, in any order.
        unit: "seconds" (default) or "steps".

    Attributes:
        happened: the events that have happened, in their order, each with the
            seconds since the beginning at which it was complete.

    Raises:
        ValueError: if an argument is wrong.
        RuntimeError: by the end of the `with` block, or by `fit` if the schedule is among
            its callbacks: an event failed; or steps were never counted, as the schedule
            was not among the callbacks.

    Example:

    ```python
    events = [(5.0, "kill", "worker", 1), (8.0, "restart", "worker", 1)]
    with recsync.testing.FailureSchedule(cluster, events):
        model.fit(dataset)
    ```
    """

    def __init__(
        self,
        cluster: LocalCluster,
        events: Sequence[Failure | tuple[float, str, str, int]],
        unit: str = "seconds",
    ):
        super().__init__()
        if not isinstance(cluster, LocalCluster):
            raise ValueError(f"cluster must be a LocalCluster, got {cluster!r}")
        if unit not in ("seconds", "steps"):
            raise ValueError(f"unit must be 'seconds' or 'steps', got {unit!r}")
        self._actions = {
            "kill": cluster.kill,
            "restart": cluster.restart,
            "stop": cluster.pause,
            "continue": cluster.resume,
        }
        self._unit = unit
        # Stable: events of one time happen in the order in which they are named.
        self._events = sorted(
            (self._checked(cluster, event) for event in events), key=lambda event: event.when
        )
        self._changed = threading.Condition()
        # All below is guarded by _changed.
        self._thread: threading.Thread | None = None
        self._ended = False
        self._error: Exception | None = None
        self._began = 0.0
        self._steps = 0  # Finished by all workers.
        self._earlier_steps = 0  # Of earlier epochs.
        self._counts = False
        self.happened: list[tuple[float, Failure]] = []

    def _checked(self, cluster: LocalCluster, event) -> Failure:
        try:
            failure = Failure(*event)
        except TypeError:
            raise ValueError(
                f"events must be (when, action, job, index) tuples, got {event!r}"
            ) from None
        number(f"the time of the event {event!r}", failure.when, least=0)
        if failure.action not in self._actions:
            raise ValueError(f"an event's action must be one of {[*self._actions]}, got {event!r}")
        sizes = {"worker": cluster.workers, "ps": cluster.ps, "reader": cluster.readers}
        if self._unit == "steps" and failure.action in ("stop", "continue"):
            raise ValueError(
                f"{failure.action!r} needs unit='seconds': fit counts no steps while a server is "
                f"stopped; got {event!r}"
            )
        if not sizes.get(failure.job):
            raise ValueError(f"an event must name a server of {cluster}, got {event!r}")
        integer(f"the index of the event {event!r}", failure.index, 0, sizes[failure.job] - 1)
        return failure

    def __enter__(self) -> FailureSchedule:
        with self._changed:
            if self._thread is not None:
                raise RuntimeError("a FailureSchedule can be used once; make another one")
            self._began = time.monotonic()
            self._thread = threading.Thread(target=self._run, name="recsync_failures", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join()  # For an event that is happening; each has a limit of its own.
        left = self._events[len(self.happened) :]
        if left and self._error is None:
            logging.info("The schedule ended before %s.", left)
        if kind is None:
            self._check()
            if self._unit == "steps" and not self._counts:
                raise RuntimeError(
                    "FailureSchedule(unit='steps') has counted no steps: give it to fit among "
                    "its callbacks"
                )
        elif self._error is not None:
            logging.error("A scheduled failure has failed itself: %s", self._error)

    # Keras's side.

    def on_train_begin(self, logs=None) -> None:
        with self._changed:
            if self._thread is None or self._ended:
                raise RuntimeError("use a FailureSchedule's `with` block around fit")

    def on_epoch_begin(self, epoch, logs=None) -> None:
        with self._changed:
            self._earlier_steps = self._steps

    def on_train_batch_end(self, batch, logs=None) -> None:
        with self._changed:
            self._counts = True
            self._steps = self._earlier_steps + batch + 1
            self._changed.notify_all()
        self._check()

    def on_train_end(self, logs=None) -> None:
        self._check()

    def _check(self) -> None:
        """Raises what went wrong in the thread, in whichever thread asks first."""
        with self._changed:
            error, self._error = self._error, None
        if error is not None:
            raise RuntimeError(f"a scheduled failure has failed itself: {error}") from error

    # The thread's side.

    def _run(self) -> None:
        for event in self._events:
            if not self._wait_until_due(event):
                return
            try:
                self._actions[event.action](event.job, event.index)
            except Exception as error:  # Raised by `_check`.
                with self._changed:
                    self._error = error
                return
            with self._changed:
                self.happened.append((time.monotonic() - self._began, event))
            logging.info("%s %s:%d, as scheduled.", event.action, event.job, event.index)

    def _wait_until_due(self, event: Failure) -> bool:
        """Waits for an event's time; False if the schedule has ended."""
        with self._changed:
            while not self._ended:
                if self._unit == "steps":
                    remaining, timeout = event.when - self._steps, None
                else:
                    remaining = timeout = self._began + event.when - time.monotonic()
                if remaining <= 0:
                    return True
                self._changed.wait(timeout)
            return False
