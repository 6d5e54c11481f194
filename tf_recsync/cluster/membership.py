"""Who of a cluster's servers is there, lost or coming back: the one place that knows.

What happens to a server comes in as an event, from whoever notices it first. Each change follows a
table of transitions, and what is of an earlier life of a server is refused by that life's number.
Listeners are told of losses and returns, one event at a time and in a fixed order.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import threading
import time
import weakref
from collections.abc import Hashable, Mapping
from typing import Protocol

from absl import logging

Server = tuple[str, int]  # Job and index.


class MemberState(enum.Enum):
    """What a server is doing, as far as this process knows.

    Example:

    >>> import tf_recsync as recsync
    >>> recsync.MemberState.LOST.value
    'lost'
    """

    ABSENT = "absent"  # It was not up when this process connected.
    READY = "ready"  # It has what it needs, and is in no step.
    JOINING = "joining"  # It gets what it needs for a pass.
    WORKING = "working"  # It is in a call of some steps.
    IDLE = "idle"  # No steps are left for it at the moment.
    DONE = "done"  # Its part of the pass is over.
    SUSPECT = "suspect"  # Somebody waits for it, and it has not answered yet.
    LOST = "lost"  # It is gone, or has been silent for too long.
    READMITTING = "readmitting"  # It was seen again, and is taken into the cluster.


AWAY = frozenset({MemberState.ABSENT, MemberState.LOST, MemberState.READMITTING})

# What a thread that drives a worker may do next.
MOVES: Mapping[MemberState, frozenset[MemberState]] = {
    MemberState.JOINING: frozenset({MemberState.READY, MemberState.DONE}),
    MemberState.READY: frozenset({MemberState.WORKING, MemberState.IDLE, MemberState.DONE}),
    MemberState.WORKING: frozenset({MemberState.READY, MemberState.DONE}),
    MemberState.IDLE: frozenset({MemberState.READY, MemberState.DONE}),
    MemberState.DONE: frozenset({MemberState.JOINING}),
}

# What may happen to a server, whatever its threads do. None: it is there, and does what they do.
TRANSITIONS: Mapping[str, Mapping[MemberState | None, MemberState | None]] = {
    "suspected": {None: MemberState.SUSPECT},
    "answered": {MemberState.SUSPECT: None},
    "lost": {None: MemberState.LOST, MemberState.SUSPECT: MemberState.LOST},
    "readmitting": {
        MemberState.LOST: MemberState.READMITTING,
        MemberState.ABSENT: MemberState.READMITTING,
    },
    "refused": {MemberState.READMITTING: MemberState.LOST},
    "readmitted": {MemberState.READMITTING: None, MemberState.LOST: None, MemberState.ABSENT: None},
}

# Of several threads on one worker, the first of these that any is in says what the worker does.
_BUSIEST = (
    MemberState.WORKING,
    MemberState.JOINING,
    MemberState.READY,
    MemberState.IDLE,
    MemberState.DONE,
)


@dataclasses.dataclass(frozen=True)
class Member:
    """A server of a cluster at one moment; see `strategy.members()`.

    Attributes:
        job: "worker", "ps" or "reader".
        index: its task index, from 0.
        state: what it does.
        seconds: for how long it has been in this state.
        life: rises with every loss; 0 before the first.

    Example:

    >>> import tf_recsync as recsync
    >>> str(recsync.Member("worker", 1, recsync.MemberState.LOST, seconds=12.0, life=1))
    'worker:1 lost for 12 s'
    """

    job: str
    index: int
    state: MemberState
    seconds: float
    life: int

    @property
    def is_there(self) -> bool:
        """Whether it can be used."""
        return self.state not in AWAY

    def __str__(self) -> str:
        return f"{self.job}:{self.index} {self.state.value} for {self.seconds:.0f} s"


class Order(enum.IntEnum):
    """In which order listeners are told of an event."""

    TRAINING = 0  # Those whom others wait for: tokens, then the synchronizer with its copies.
    REPORTS = 1


class Listener(Protocol):
    """Is told of losses and returns, in the thread that delivers them."""

    def lost(self, server: Server, is_news: bool) -> None:
        """A server is gone: nobody may wait for it.

        Args:
            server: which one.
            is_news: whether it had taken part since it was lost before.
        """

    def back(self, server: Server) -> None:
        """A server that was away takes part again."""


@dataclasses.dataclass
class _Record:
    """What is known of a server.

    Attributes:
        away: its state of those that are not its threads', or None.
        since: when its state last changed.
        life: see `Member`.
        process: tells one process behind its address from the next.
        ending: the process that is about to end, and does not count as back; or None.
        threads: what each thread that drives it does, in this life.
        silent_seconds: for how long it did not answer, if it was lost by that.
        is_forgetful: whether it lacks functions, and has to be taken in as if it were new.
        is_returning: whether it was away, and nobody was told that it is back.
        untold: how many times it was lost of which somebody has not been told yet.
    """

    away: MemberState | None
    since: float
    life: int = 0
    process: Hashable = None
    ending: Hashable = None
    threads: dict[Hashable, MemberState] = dataclasses.field(default_factory=dict)
    silent_seconds: float = 0.0
    is_forgetful: bool = False
    is_returning: bool = False
    untold: int = 0

    @property
    def state(self) -> MemberState:
        if self.away is not None:
            return self.away
        threads = set(self.threads.values())
        return next((state for state in _BUSIEST if state in threads), MemberState.READY)


class Membership:
    """The states of all servers of a cluster; thread-safe, and never calls a server itself.

    Args:
        servers: how many there are of each job.
    """

    def __init__(self, servers: Mapping[str, int]):
        now = time.monotonic()
        self._lock = threading.Lock()
        # Guarded by _lock, like the next two.
        self._records = {
            (job, index): _Record(MemberState.ABSENT, now)
            for job, count in servers.items()
            for index in range(count)
        }
        # Servers that are back, or were lost: with words for it, if that is news.
        self._events: collections.deque[tuple[Server, str | None, bool]] = collections.deque()
        self._listeners: list[tuple[Order, weakref.ref[Listener]]] = []
        self._delivering = threading.RLock()  # One event at a time.

    # What is known.

    def servers(self, *jobs: str) -> list[Server]:
        """All servers of these jobs; they stay the same."""
        return [server for server in self._records if server[0] in jobs]

    def away(self, job: str) -> set[Server]:
        """Those of a job that can't be used at the moment."""
        with self._lock:
            return {server for server in self.servers(job) if self._records[server].away in AWAY}

    def members(self, job: str | None = None) -> tuple[Member, ...]:
        """The servers of a job, or of all, at this moment."""
        with self._lock:
            now = time.monotonic()
            return tuple(
                Member(*server, record.state, now - record.since, record.life)
                for server, record in self._records.items()
                if job in (None, server[0])
            )

    def is_away(self, server: Server) -> bool:
        """Whether a server can't be used at the moment."""
        with self._lock:
            return self._records[server].state in AWAY

    def life(self, server: Server) -> int:
        """The number of a server's life, or, while it is away, of the next one."""
        with self._lock:
            return self._records[server].life

    @property
    def lives(self) -> dict[Server, int]:
        """The same of all servers."""
        with self._lock:
            return {server: record.life for server, record in self._records.items()}

    @property
    def lives_begun(self) -> int:
        """How many lives all servers have begun together: it grows whenever one is lost."""
        with self._lock:
            return sum(record.life for record in self._records.values())

    def are_current(self, lives: Mapping[Server, int]) -> bool:
        """Whether servers live as they did, and are there."""
        with self._lock:
            return all(self._is_current(server, life) for server, life in lives.items())

    def _is_current(self, server: Server, life: int) -> bool:
        record = self._records[server]
        return record.life == life and record.away not in AWAY

    def is_new(self, server: Server) -> bool:
        """Whether this process has never been connected to a server."""
        with self._lock:
            return self._records[server].process is None

    def silent_seconds(self, server: Server) -> float:
        """For how long a server that is away did not answer; 0 if it is away for another reason."""
        with self._lock:
            return self._records[server].silent_seconds

    def is_forgetful(self, server: Server) -> bool:
        """Whether a server that is away has to be taken in as if it were new."""
        with self._lock:
            return self._records[server].is_forgetful

    # What happens to servers. Each event says whether that changed anything.

    def connected(self, processes: Mapping[Server, Hashable], *, all_answer: bool) -> None:
        """This process is connected to these servers, and to no others.

        One that was there and is no longer, or whose process is another one, is lost by that; of
        those that are there, those that were away are back.

        Args:
            processes: what tells one process behind a server's address from the next.
            all_answer: whether they have all just answered.
        """
        with self._lock:
            is_first = all(record.process is None for record in self._records.values())
        for server in list(self._records):
            process = processes.get(server)
            with self._lock:
                record = self._records[server]
                is_same = process is not None and record.process in (None, process)
                if process is not None:
                    record.process = process
                    if is_first:
                        record.away = None
                # Whoever takes it in says so.
                is_coming = record.away is MemberState.READMITTING
            if not is_same:
                self.lost(server, None, "since this process last called it")
            if process is not None and all_answer and not is_coming:
                self.readmitted(server)

    def ending(self, server: Server) -> None:
        """The present process of a server is about to end: until it has, it is not back."""
        with self._lock:
            self._records[server].ending = self._records[server].process

    def stays(self, server: Server) -> None:
        """The process of a server that was about to end does not."""
        with self._lock:
            self._records[server].ending = None

    def suspected(self, server: Server) -> bool:
        """Somebody waits for a server, and it has not answered yet."""
        with self._lock:
            return self._pass("suspected", server)

    def answered(self, server: Server) -> bool:
        """A server that was suspected has given a sign of life."""
        with self._lock:
            return self._pass("answered", server)

    def lost(
        self,
        server: Server,
        life: int | None,
        how: str,
        *,
        silent_seconds: float = 0.0,
        is_forgetful: bool = False,
    ) -> bool:
        """A server is gone, and its life over; listeners are told by `deliver`.

        Args:
            server: which one.
            life: the life that is over; one that is over already is no news. None: the present.
            how: in words, for the log.
            silent_seconds: for how long it did not answer, if that is why.
            is_forgetful: whether it lacks functions, though it answers.

        Returns:
            Whether that was not known.
        """
        with self._lock:
            record = self._records[server]
            if life not in (None, record.life) or not self._pass("lost", server):
                return False
            record.life += 1
            record.threads.clear()
            record.silent_seconds, record.is_forgetful = silent_seconds, is_forgetful
            is_news = not record.is_returning
            record.is_returning = False
            record.untold += 1
            self._events.append((server, how, is_news))
            return True

    def readmitting(self, server: Server) -> bool:
        """Whoever asks takes a server in, if nobody else does; `refused` or `readmitted` follows.

        Returns:
            Whether it is theirs to take in.
        """
        with self._lock:
            return self._pass("readmitting", server)

    def refused(self, server: Server) -> bool:
        """A server could not be taken in."""
        with self._lock:
            if not self._pass("refused", server):
                return False
            record = self._records[server]
            if record.process is None:
                record.away = MemberState.ABSENT  # As before: it has never been there.
            return True

    def readmitted(self, server: Server) -> bool:
        """A server that was away can be used again, unless its process is about to end."""
        with self._lock:
            record = self._records[server]
            is_ending = record.ending is not None and record.ending == record.process
            if is_ending or not self._pass("readmitted", server):
                return False
            record.silent_seconds, record.is_forgetful = 0.0, False
            record.is_returning = server[0] == "worker"  # Until it takes part.
            if not record.is_returning:
                self._events.append((server, None, True))
            return True

    def _pass(self, event: str, server: Server) -> bool:
        record = self._records[server]
        if record.away not in TRANSITIONS[event]:
            return False
        record.away = TRANSITIONS[event][record.away]
        record.since = time.monotonic()
        return True

    # What threads that drive workers do.

    def join(self, server: Server, thread: Hashable) -> int | None:
        """A thread begins to make what it needs on a worker.

        Returns:
            The life that all which is made belongs to; None if the worker is away, or somebody
            does not know yet that it was.
        """
        with self._lock:
            record = self._records[server]
            if record.away in AWAY or record.untold:
                return None
            # Those of passes that are over are forgotten.
            threads = record.threads.items()
            record.threads = {t: state for t, state in threads if state is not MemberState.DONE}
            record.threads[thread] = MemberState.JOINING
            record.since = time.monotonic()
            return record.life

    def move(self, server: Server, thread: Hashable, life: int, state: MemberState) -> bool:
        """A thread goes on to another state.

        Args:
            server: the worker that it drives.
            thread: which one.
            life: the worker's when the thread joined.
            state: what it does from now on.

        Returns:
            False if that life is over: what the thread has is gone, and it has to join again.

        Raises:
            RuntimeError: if it may not do that next, which is a bug.
        """
        with self._lock:
            record = self._records[server]
            if not self._is_current(server, life) or thread not in record.threads:
                return False
            before = record.threads[thread]
            if state is not before and state not in MOVES[before]:
                raise RuntimeError(
                    f"a thread on {server} was {before.value}, then {state.value}, which is a bug"
                )
            was = record.state
            record.threads[thread] = state
            if record.state is not was:
                record.since = time.monotonic()
            if before is MemberState.JOINING and state is MemberState.READY and record.is_returning:
                record.is_returning = False
                self._events.append((server, None, True))
            return True

    # Those who are told.

    def listen(self, listener: Listener, order: Order) -> None:
        """Has somebody told of losses and returns, as long as anybody else refers to it."""
        with self._lock:
            self._listeners = [(o, ref) for o, ref in self._listeners if ref() is not None]
            self._listeners.append((order, weakref.ref(listener)))
            self._listeners.sort(key=lambda entry: entry[0])

    def deliver(self) -> None:
        """Tells listeners of all that has happened; when it returns they know.

        Listeners may call servers: whoever calls this is to be watched, and may hold no lock that
        they take.
        """
        with self._delivering:
            while True:
                with self._lock:
                    if not self._events:
                        return
                    server, how, is_news = self._events.popleft()
                    listeners = [ref() for _, ref in self._listeners]
                try:
                    if how is None:
                        logging.warning("%s:%d is back and takes part again.", *server)
                    elif is_news:
                        logging.warning("%s:%d was lost %s.", *server, how)
                    else:
                        logging.info("%s:%d is still away: it was lost %s.", *server, how)
                    for listener in filter(None, listeners):
                        try:
                            if how is None:
                                listener.back(server)
                            else:
                                listener.lost(server, is_news)
                        except Exception:
                            # The others have to know all the same.
                            logging.exception("%r could not be told of %s:%d.", listener, *server)
                finally:  # By Ctrl-C, too, after which the server may be needed.
                    if how is not None:
                        with self._lock:
                            self._records[server].untold -= 1
