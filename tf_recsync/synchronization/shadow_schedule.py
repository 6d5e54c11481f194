"""When trainers synchronize: in a loop of their own, or as a part of training."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

from tf_recsync._checks import check_at_least, number


@dataclasses.dataclass(frozen=True)
class Shadow:
    """Synchronization in the background, in a loop that knows nothing of training.

    Args:
        min_interval: seconds from one synchronization's begin to the next one's, at least.
            Default 0: as fast as the network goes.

    Raises:
        ValueError: if that is negative.

    Example:

    >>> import tf_recsync as recsync
    >>> recsync.Shadow(min_interval=0.5)
    Shadow(min_interval=0.5)
    """

    min_interval: float = 0.0

    def __post_init__(self):
        number("min_interval", self.min_interval, least=0, allowed="at least 0, in seconds")


@dataclasses.dataclass(frozen=True)
class Foreground:
    """Synchronization as a part of training, which waits for it; for comparison.

    Give one of the two:

    Args:
        gap: every so many iterations of each worker thread, an int of at least 1. With a
            central algorithm the thread synchronizes by itself; with others all threads of all
            trainers wait for each other.
        per_minute: so many times a minute, positive. With a central algorithm one thread of
            each trainer does it; with others all threads stop meanwhile.

    Raises:
        ValueError: if not exactly one is given, or it is not allowed.

    Example:

    >>> import tf_recsync as recsync
    >>> recsync.Foreground(per_minute=30).interval  # Seconds.
    2.0
    """

    gap: int | None = None
    per_minute: float | None = None

    def __post_init__(self):
        if (self.gap is None) == (self.per_minute is None):
            raise ValueError(
                f"Foreground needs either gap or per_minute, not gap={self.gap!r} and "
                f"per_minute={self.per_minute!r}"
            )
        if self.gap is not None:
            check_at_least("gap", self.gap, 1)
        if self.per_minute is not None:
            number("per_minute", self.per_minute, above=0, allowed="a positive number")

    @property
    def interval(self) -> float | None:
        """Seconds between two synchronizations, or None with a gap."""
        return None if self.per_minute is None else 60.0 / self.per_minute


class Gate:
    """Stops all threads of all trainers while a synchronization goes on in the foreground.

    Threads are numbers. One takes part from its first `pass_through` on until it leaves.
    """

    def __init__(self):
        self._changed = threading.Condition()
        # Guarded by _changed.
        self._members: set[int] = set()
        self._inside: set[int] = set()
        self._waiting: set[int] = set()
        self._meetings = 0
        self._is_closed = False
        self._is_open_for_good = False

    def begin(self) -> None:
        """Nobody takes part yet."""
        with self._changed:
            self._members.clear()
            self._inside.clear()
            self._waiting.clear()
            self._is_closed = self._is_open_for_good = False

    def end(self) -> None:
        """Lets everybody go, for good."""
        with self._changed:
            self._is_open_for_good = True
            self._changed.notify_all()

    def enter(self, thread: int) -> None:
        """A thread is about to train; waits while the gate is closed."""
        with self._changed:
            self._members.add(thread)
            self._changed.wait_for(lambda: self._is_open_for_good or not self._is_closed)
            self._inside.add(thread)

    def exit(self, thread: int) -> None:
        """A thread has stopped to train, for the moment."""
        with self._changed:
            self._inside.discard(thread)
            self._changed.notify_all()

    def leave(self, thread: int) -> None:
        """Nobody has to wait for a thread any more."""
        with self._changed:
            self._members.discard(thread)
            self._inside.discard(thread)
            self._waiting.discard(thread)
            self._changed.notify_all()

    def close_for(self, action: Callable[[], None]) -> None:
        """Waits until nobody trains, and acts while nobody may."""
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: self._is_open_for_good or not self._inside)
        try:
            if not self._is_open_for_good:
                action()
        finally:
            with self._changed:
                self._is_closed = False
                self._changed.notify_all()

    def meet(self, thread: int, action: Callable[[], None]) -> None:
        """Waits until all members have come; one of them acts before all go on."""
        with self._changed:
            self._waiting.add(thread)
            meeting = self._meetings

            def is_over() -> bool:
                has_left = thread not in self._members
                return self._meetings != meeting or self._is_open_for_good or has_left

            def have_all_come() -> bool:
                return self._members <= self._waiting and not self._is_closed

            self._changed.wait_for(lambda: is_over() or have_all_come())
            if is_over():
                return
            self._is_closed = True
        try:
            action()
        finally:
            with self._changed:
                self._meetings += 1
                self._waiting.clear()
                self._is_closed = False
                self._changed.notify_all()

    def awaited(self) -> list[int]:
        """The threads that others wait for."""
        with self._changed:
            return sorted(self._members - self._waiting) if self._waiting else []
