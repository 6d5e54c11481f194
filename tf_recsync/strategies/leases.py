"""Which steps of a pass are still to be done, and how many of them a call to a worker has."""

from __future__ import annotations

import sys

_CALL_SECONDS = 0.25
_CALL_SECONDS_EACH = 0.02
_FEWEST = 4  # Units of a call of several: that they are repeated costs messages, too.
_ENDLESS = 1 << 40  # Units of a call that goes on until it is told to end.


def call_seconds(threads: int) -> float:
    """How long calls of many steps last.

    So short that nobody waits for a call's end, and so long that calls cost little: those of many
    threads, which are made by one process, last longer.

    Args:
        threads: that call workers.
    """
    return max(_CALL_SECONDS, _CALL_SECONDS_EACH * threads)


def call_limit(threads: int) -> float:
    """How many seconds may pass until a call does no more steps; see `call_seconds`."""
    return 2 * call_seconds(threads)


class Leases:
    """The steps of a pass, which threads take for the calls that they make.

    Whoever owns it guards it by a lock.

    Args:
        unit: a call has so many steps, or that times 4, 8, 16, ...; the last one may have fewer.
        most: so many at most; None if that depends on how long they take.
        threads: how many there are.
        can_end: whether a call can be told to end. Then those of short steps have as many as there
            are, which others get if they have none: default False.
        completed: how many steps count as done already; default 0.

    Attributes:
        completed: how many steps are done, in calls that have ended.
        known: how many are known to be, those of calls that go on included. This process asks at
            each step, so it is not a sum over threads.
        granted: how many are to be done; infinite: all that there are.
        is_held: whether nobody gets any.
        seconds: how long a call lasts, if one step does not take longer.
        limit: see `call_limit`.
    """

    def __init__(
        self, unit: int, most: int | None, threads: int, can_end: bool = False, completed: int = 0
    ):
        self.completed = self.known = completed
        self.is_held = False
        self.seconds = call_seconds(threads)
        self.limit = call_limit(threads)
        self._unit = unit
        self._can_end = can_end
        self._most = sys.maxsize if most is None else most
        self._shares = [unit] * threads  # The steps of each one's next call, unless few are left.
        self._are_short = [False] * threads  # Whether each one's steps are.
        self.granted: float = completed
        self._taken = completed

    def go_on(self, other: Leases, more: int) -> None:
        """Takes over what another pass over the same data had granted and done.

        Args:
            other: of a pass that has failed.
            more: how many steps it had done besides, in calls that did not end.
        """
        self.completed = self.known = self._taken = other.completed + more
        self.granted = other.granted

    @property
    def is_settled(self) -> bool:
        """Whether nobody is at any steps."""
        return self._taken == self.completed

    @property
    def is_done(self) -> bool:
        """Whether all steps that were granted are done."""
        return self.completed >= self.granted and self.is_settled

    def share(self, thread: int) -> int:
        """How many steps a thread's next call has, unless few are left; if calls can be told to
        end, how many it does while such a call would last."""
        return self._shares[thread]

    @property
    def are_taken(self) -> bool:
        """Whether somebody is at all steps that are not done."""
        return self._taken >= self.granted and not self.is_settled

    def grant(self, steps: float) -> None:
        """So many more steps are to be done; float("inf"): all that there are."""
        self.granted += steps

    def take(self, thread: int) -> int:
        """The steps of a thread's next call; 0 if there are none at the moment."""
        free = self.granted - self._taken
        if free <= 0 or self.is_held:
            return 0
        steps: float = self._shares[thread]
        if self._can_end and self._are_short[thread]:
            steps = _ENDLESS * self._unit
        if free < float("inf"):
            # Others, who may be faster, shall be busy until the last of them.
            steps = min(steps, int(free) // (2 * len(self._shares)))
        taken = int(min(self._rounded(steps), free))
        self._taken += taken
        return taken

    def give_back(self, taken: int, done: int = 0, seen: int = 0) -> None:
        """A call has ended, with so many of its steps done, of which so many had been seen."""
        self._taken -= taken - done
        self.completed += done
        self.known += done - seen

    def count(self, more: int) -> None:
        """So many more steps turn out to be done, which nobody is at; or fewer, if it is below 0:
        these are to be done again."""
        self._taken += more
        self.completed += more
        self.known += more

    def adapt(self, thread: int, taken: int, done: int, seconds: float) -> None:
        """Chooses how many steps a thread's next call has.

        Args:
            thread: its number.
            taken: the steps that its last call had.
            done: how many of them it has done.
            seconds: how long that took.
        """
        share = self._shares[thread]
        self._are_short[thread] = seconds < self.seconds * max(done, 1)
        if taken >= share or seconds > self.seconds:
            # Not many more at once, since this call may have been a lucky one.
            most = _FEWEST if share == self._unit else 2
            fits = min(most, self.seconds / max(seconds, 1e-9))
            self._shares[thread] = self._rounded(min(max(done, 1) * fits, self._most))

    def seen(self, thread: int, more: int, done: int, seconds: float) -> None:
        """A thread's call, which goes on, is seen to have done so many more steps than before, and
        so many in so many seconds."""
        self.known += more
        if done > 0:
            fits = self.seconds / max(seconds, 1e-9)
            self._shares[thread] = self._rounded(min(done * fits, self._most))

    def _rounded(self, steps: float) -> int:
        """So many steps or fewer, those of one unit at least, times a power of two.

        Each number that a worker gets is a tensor there.
        """
        units = int(steps) // self._unit
        return self._unit << (units.bit_length() - 1) if units >= _FEWEST else self._unit
