"""Follows the calls of a pass that last until they are told to end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf
from absl import logging

from tf_recsync.cluster import Cluster
from tf_recsync.strategies.call_board import CallBoard, Row
from tf_recsync.strategies.leases import Leases
from tf_recsync.strategies.slots import Slot

_LOOK_SECONDS = 0.1  # How often it is looked whether calls have to end.
# How often it is read how far they are: the first time, later on at most, if not more often than
# calls would end by themselves, and as a share of the time since somebody last waited for the
# steps in flight, or granted some.
_READ_SECONDS = (0.02, 1.0, 0.1)
_AGAIN_SECONDS = 0.5  # After which a call is told again: it may not have begun before.


class CallFollower:
    """One thread, which ends with the pass: for each server that has rows, as it may be silent.

    It notes in the slots how far their calls are, takes what workers report, and has calls end when
    nobody may be in a step, when others have nothing to do, or when there are better functions to
    call.

    Args:
        cluster: the cluster.
        read: reads what the workers of slots have reported; gives the steps that were applied, by
            rows' keys.
        slots: of the pass's threads, those with rows there.
        are_waiting: whether some of all threads wait for steps; called with `changed` held.
        leases: the steps that they take.
        changed: guards both, and is told of progress.
        is_over: whether the pass shall end; called with `changed` held.
        note: called with a slot and the number of steps that it is seen to have done since.
        fail: ends the pass with an error.
    """

    def __init__(
        self,
        cluster: Cluster,
        read: Callable[[Sequence[Slot]], Mapping[int, int]],
        slots: Sequence[Slot],
        are_waiting: Callable[[], bool],
        leases: Leases,
        changed: threading.Condition,
        is_over: Callable[[], bool],
        note: Callable[[Slot, int], None],
        fail: Callable[[Exception], None],
    ):
        self._cluster = cluster
        self._read_rows = read
        self._are_waiting = are_waiting
        self._slots = slots
        self._leases = leases
        self._changed = changed
        self._is_over = is_over
        self._note = note
        self._fail = fail
        self._read_at = self._asked_at = 0.0
        self._ending: set[tuple[int, int]] = set()  # Slots' numbers, and those of their calls.
        self._look = threading.Event()
        threading.Thread(target=self._run, name="recsync_calls", daemon=True).start()

    def look(self) -> None:
        """Something has changed that calls may have to end for."""
        self._look.set()

    def ask(self) -> None:
        """Somebody is about to wait for steps: it shall soon be known that they are done."""
        self._asked_at = time.monotonic()
        self.look()

    def end_calls(self) -> None:
        """The calls in flight end, and others begin; does not wait."""
        with self._changed:
            self._ending = {(slot.number, slot.calls) for slot in self._in_flight()}
        self.look()

    def _run(self) -> None:
        try:
            with self._cluster.dispatch_scope():
                while True:
                    self._look.wait(min(_LOOK_SECONDS, self._period))
                    self._look.clear()
                    with self._changed:
                        if not any(slot.running for slot in self._slots):
                            return
                    try:
                        self._read()
                        self._tell()
                    # The latter of numpy, for what comes from a server that is being cut off.
                    except (tf.errors.OpError, ValueError) as error:
                        # Those who train there find out what is wrong.
                        logging.log_every_n_seconds(
                            logging.DEBUG, "calls can't be followed: %s", 10, error
                        )
        except Exception as error:
            self._fail(error)

    @property
    def _period(self) -> float:
        """Seconds between two looks at how far calls are."""
        first, last, share = _READ_SECONDS
        last = min(last, self._leases.seconds)  # To read what many workers report costs more.
        return min(last, max(first, share * (time.monotonic() - self._asked_at)))

    def _in_flight(self) -> list[Slot]:
        """The calls of several steps; under _changed."""
        return [s for s in self._slots if s.call > 1 and s.state is not None]

    def _read(self) -> None:
        """Notes how far calls are; what workers report is of interest in each call."""
        now = time.monotonic()
        if now - self._read_at < self._period:
            return
        with self._changed:
            calls = [(slot, slot.calls, slot.state) for slot in self._in_flight()]
            is_at_work = any(slot.call for slot in self._slots)
        if not is_at_work:
            return
        # Of all of them: what others have reported before is taken with it.
        applied = self._read_rows(self._slots)
        self._read_at = now = time.monotonic()
        news = []
        with self._changed:
            for slot, number, state in calls:
                steps = applied.get(state.row.key)
                if steps is not None and slot.call and slot.calls == number:
                    # The last one counts when its call has ended.
                    more = slot.seen(min(state.in_call(steps), slot.call) - 1, now)
                    self._leases.seen(slot.number, more, slot.progress, now - slot.called)
                    news.append((slot, more))
            self._changed.notify_all()
        for slot, more in news:
            self._note(slot, more)

    def _tell(self) -> None:
        """Has calls end that shall."""
        with self._changed:
            now = time.monotonic()
            due = [s for s in self._due() if now - s.told >= _AGAIN_SECONDS]
            for slot in due:
                slot.told = now
            rows: dict[CallBoard, list[Row]] = {}
            for slot in due:
                rows.setdefault(slot.state.row.board, []).append(slot.state.row)
        for board, own in rows.items():
            board.tell(own)

    def _due(self) -> list[Slot]:
        """The calls that shall end; under _changed."""
        calls = self._in_flight()
        if self._leases.is_held or self._is_over():
            return calls
        # Others can do a part of what is left of a long one.
        can_share = self._leases.are_taken and self._are_waiting()
        share = self._leases.share
        return [
            slot
            for slot in calls
            if (slot.number, slot.calls) in self._ending
            or (can_share and slot.call - slot.progress > share(slot.number))
        ]
