"""What workers of decentralized training tell of themselves (Hop)."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tf_recsync.ops import hop

_PARTS = 8  # Of what a worker tells, each with its length in front.
_COUNTS = 12


@dataclasses.dataclass(frozen=True)
class WorkerReport:
    """What a worker has done since training began.

    It goes on where it was when a worker that was lost is back, as far as it was known.

    Attributes:
        iteration: the one that it is in, or was in last; -1 before the first.
        waited_for_updates: seconds.
        waited_for_tokens: seconds; for acknowledgements with notify_ack.
        updates_used: that it has averaged, its own apart.
        stale_updates_dropped: that came too late to be used.
        superseded_updates_dropped: that were there when a newer one of the same sender came.
        sends_saved: updates that it did not send, as they were of no use any more.
        updates_sent: that it did.
        jumps: how often it has skipped iterations.
        iterations_skipped: how many.
    """

    iteration: int = -1
    waited_for_updates: float = 0.0
    waited_for_tokens: float = 0.0
    updates_used: int = 0
    stale_updates_dropped: int = 0
    superseded_updates_dropped: int = 0
    sends_saved: int = 0
    updates_sent: int = 0
    jumps: int = 0
    iterations_skipped: int = 0


@dataclasses.dataclass(frozen=True)
class State:
    """Where a worker stands; see the documentation of `RecsyncHopState`.

    Attributes:
        iteration: -1 before the first one of an epoch.
        phase: of `hop.PHASES`.
        seconds: in this phase.
        missing: the neighbors that it waits for.
        tokens: how many it has of each out-neighbor.
        declined: updates that it did not want, by in-neighbor.
        counts: what it has done since it was made.
        awaited: the iteration that the missing neighbors have to come to: to send an update
            of it or a later one, to enter it, or to have used the updates of it.
    """

    iteration: int
    phase: str
    seconds: float
    missing: tuple[int, ...]
    tokens: tuple[int, ...]
    declined: tuple[int, ...]
    counts: tuple[int, ...]
    awaited: int = -1

    @classmethod
    def of(
        cls,
        iteration: int,
        phase: int,
        seconds: float,
        missing: Sequence[int],
        tokens: Sequence[int],
        declined: Sequence[int],
        counts: Sequence[int],
    ) -> State:
        """Of what the engine tells: an index of `hop.PHASES`, and `HopState::Numbers`."""
        return cls(
            iteration=iteration,
            phase=hop.PHASES[phase],
            seconds=seconds,
            missing=tuple(missing),
            tokens=tuple(tokens),
            declined=tuple(declined),
            counts=tuple(counts[:_COUNTS]),
            awaited=counts[_COUNTS],
        )

    @property
    def lost_events(self) -> int:
        """How many events it could not keep since it was made."""
        return self.counts[-1]


@functools.cache
def look() -> Callable[[tf.Tensor], tf.Tensor]:
    """Tells where a worker stands and what it has done, in one tensor: an answer is one message.

    It is traced once, not for each worker's device. `parse` reads the answer.
    """

    def look(handle):
        state = hop.state(handle)
        with tf.control_dependencies([state.iteration]):
            events = hop.events(handle)
        parts = [
            *(state.iteration, state.phase, state.seconds * 1e6),
            *(state.missing, state.tokens, state.declined, state.counts, events),
        ]
        flat = [tf.reshape(tf.cast(part, tf.int64), [-1]) for part in parts]
        return tf.concat([tf.stack([tf.size(part, tf.int64) for part in flat]), *flat], 0)

    with tf.device(None):
        return tf.function(look, autograph=False).get_concrete_function(
            tf.TensorSpec([], tf.resource)
        )


def parse(told: np.ndarray) -> tuple[State, np.ndarray]:
    """A worker's state, and its events since the last look, [events, 5]."""
    ends = np.cumsum([_PARTS, *told[:_PARTS]])
    parts = np.split(told, ends)[1:-1]
    iteration, phase, micros, missing, tokens, declined, counts = (
        tuple(part.tolist()) for part in parts[:-1]
    )
    state = State.of(iteration[0], phase[0], micros[0] * 1e-6, missing, tokens, declined, counts)
    return state, parts[-1].reshape(-1, 5)


class Reports:
    """The reports of all workers, which outlast the workers.

    Nothing in them goes back, but for an iteration that is restored. Thread-safe.

    Args:
        in_neighbors: of each worker.
    """

    def __init__(self, in_neighbors: Sequence[Sequence[int]]):
        self._senders = [list(senders) for senders in in_neighbors]
        size = len(self._senders)
        self._lock = threading.Lock()
        self._iterations = [WorkerReport.iteration] * size
        self._is_restored = False  # Workers do not know of their iterations yet.
        # The counts of each, and which updates it declined, by sender: up to when it began to
        # count from 0 again, and by now.
        self._counts_before = np.zeros((size, _COUNTS), np.int64)
        self._counts = np.zeros((size, _COUNTS), np.int64)
        self._declined_before = np.zeros((size, size), np.int64)
        self._declined = np.zeros((size, size), np.int64)
        self._sent = np.zeros(size, np.int64)  # Updates, of each.

    def all(self) -> list[WorkerReport]:
        """The reports by worker."""
        with self._lock:
            return [self._report(worker) for worker in range(len(self._senders))]

    def _report(self, worker: int) -> WorkerReport:
        counts = self._counts[worker].tolist()
        return WorkerReport(
            iteration=self._iterations[worker],
            waited_for_updates=counts[6] * 1e-6,
            waited_for_tokens=counts[7] * 1e-6,
            updates_used=counts[1],
            stale_updates_dropped=counts[8],
            superseded_updates_dropped=counts[9],
            sends_saved=int(self._declined[:, worker].sum()) + counts[5],
            updates_sent=int(self._sent[worker]),
            jumps=counts[2],
            iterations_skipped=counts[3],
        )

    def restarted(self, worker: int) -> None:
        """A worker was made anew, and counts from 0."""
        with self._lock:
            self._counts_before[worker] = self._counts[worker]
            self._declined_before[worker] = self._declined[worker]

    def restore(self, iterations: Sequence[int]) -> None:
        """The workers have gone to these iterations; they tell of others until they begin."""
        with self._lock:
            self._is_restored = True
            self._iterations = list(iterations)

    def begin(self) -> None:
        """The workers have begun with an epoch, behind the iterations that they have gone to."""
        with self._lock:
            self._is_restored = False

    def update(self, worker: int, state: State) -> None:
        """Takes over what a worker has told."""
        with self._lock:
            senders = self._senders[worker]
            self._counts[worker] = self._counts_before[worker] + state.counts
            self._declined[worker, senders] = (
                self._declined_before[worker, senders] + state.declined
            )
            if state.iteration >= 0 and not self._is_restored:  # Else it has not begun yet.
                self._iterations[worker] = state.iteration
            # The receivers tell what they declined before the sender tells that it sent.
            own = [worker, *senders]
            sent = self._counts[own, 4] - self._declined[:, own].sum(0)
            self._sent[own] = np.maximum(self._sent[own], sent)
