"""Calls that should not be made side by side."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

TURN_SECONDS = 10.0  # How long others wait for one.


class OneByOne:
    """One thread after the other may do something; but nobody waits for one that takes too long.

    Its call may be to a server that stands still, and never end.
    """

    def __init__(self):
        self._changed = threading.Condition()
        self._last: object | None = None  # Whose turn it is, until then (time.monotonic()).
        self._until = 0.0

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Inside, it is this thread's turn; after `TURN_SECONDS` others wait no longer."""
        own = object()
        with self._changed:
            while self._last is not None and (rest := self._until - time.monotonic()) > 0:
                self._changed.wait(rest)
            self._last, self._until = own, time.monotonic() + TURN_SECONDS
        try:
            yield
        finally:
            with self._changed:
                if self._last is own:
                    self._last = None
                    self._changed.notify()
