"""Workers that exchange parameters with their neighbors (Hop).

The protocol itself is in cc/engine/hop_worker.h, and hop_edges.py carries parcels along the
edges. Here each worker gets what it keeps beside its parameters, and neighbors learn who has
left, is lost, or is back. Who has the parameters themselves, hop.py knows.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf
from absl import logging

from tf_recsync.cluster import Cluster, Server, device_of, fetch, is_reachable
from tf_recsync.ops import hop
from tf_recsync.synchronization.events import Recordings
from tf_recsync.synchronization.hop_edges import Edges
from tf_recsync.synchronization.hop_invariants import Invariants
from tf_recsync.synchronization.hop_protocol import Protocol
from tf_recsync.synchronization.hop_reports import Reports, State, WorkerReport, look, parse
from tf_recsync.synchronization.loops import JOIN_SECONDS
from tf_recsync.synchronization.remote_values import at
from tf_recsync.synchronization.resource_deleter import ResourceDeleter

_ANSWER_SECONDS = 2.0
_WATCH_SECONDS = 1.0  # Between two looks at all workers.
_CHECK_SECONDS = 0.05  # When the bounds are checked, at least.
_CHECK_REST = 4.0  # And so many times as long as it took: a fifth of a thread's time at most.
_MARGIN = 2  # Iterations until a worker that is back can take part, at least.


class Exchange:
    """The workers of one exchange of parameters, while they train.

    A worker, in the sense of the paper, is whoever holds parameters and averages them with its
    neighbors': a worker of the cluster, or a server with a part of its group's copy.

    Args:
        protocol: how they exchange.
        cluster: the connected cluster.
        holders: the server, job and index, that holds each worker's parameters.
        noun: what a worker of this exchange is called, "worker" or "group".
        dtype: of the parameters.
        is_current: whether a worker's holder has lived on since it got its parameters.
        stall_seconds: after which somebody's wait is logged.
        bandwidths: returns artificial bandwidths, in bytes per second by holder's device.
        events: gets what workers did.
        joining: held while workers take part again, one at a time, or all begin.
        fail: is called with what ends training.
    """

    def __init__(
        self,
        protocol: Protocol,
        cluster: Cluster,
        holders: Sequence[Server],
        noun: str,
        dtype: tf.DType,
        is_current: Callable[[int], bool],
        stall_seconds: float,
        bandwidths: Callable[[], dict[str, float]],
        recordings: Recordings,
        joining: threading.RLock,
        fail: Callable[[Exception], None],
    ):
        self._protocol = protocol
        self._topology = protocol.topology
        self._invariants = Invariants(
            protocol.topology, protocol.bounds(), protocol.max_iteration_gap
        )
        self._cluster = cluster
        self._holders = list(holders)
        self._noun = noun
        self._is_current = is_current
        self._stall_seconds = stall_seconds
        self._fail = fail
        self._lock = threading.RLock()
        self._told = threading.Condition(self._lock)
        self._tellers = 0  # Threads that tell neighbors who takes part no more.
        self._handles: dict[int, tf.Tensor] = {}
        self._deleters: dict[int, ResourceDeleter] = {}
        self._first = 0  # The iteration that the epoch began with.
        self._lost: set[int] = set()
        self._left: dict[int, int] = {}  # And in which iteration.
        self._resuming: set[int] = set()  # They have left and take part again soon.
        self._ending = False
        self._all_there = True  # As long as that, the bounds hold.
        self._edges = Edges(
            cluster,
            self._holders,
            dtype,
            lambda: dict(self._living()),
            self._answers,
            fail,
        )
        self._joining = joining
        self._monitor: threading.Thread | None = None
        self._stop_monitor = threading.Event()
        self._recordings = recordings
        self._lost_events: dict[int, int] = {}  # That each worker could not keep, so far.
        workers = range(protocol.topology.size)
        self._reports = Reports([protocol.topology.in_neighbors(worker) for worker in workers])
        # Since when (time.monotonic()) calls are under way, and to which servers.
        self._calls: dict[object, tuple[float, Server]] = {}
        self._asking = threading.Lock()
        # The latest question to each worker, and the handle that it was about.
        self._asked: dict[int, tuple[tf.Tensor, threading.Thread]] = {}
        self._bandwidths = bandwidths

    def count_on(self, other: Exchange) -> None:
        """Goes on with what another one has counted, whose place it takes."""
        # What workers of before might still tell the other one is not counted here.
        self._reports, other._reports = other._reports, self._reports

    def handle(self, worker: int) -> tf.Tensor:
        """The handle of what a worker keeps beside its parameters."""
        with self._lock:
            return self._handles[worker]

    @property
    def there(self) -> list[int]:
        """The workers that are not lost, as far as known."""
        return [worker for worker, _ in self._living()]

    @property
    def is_ending(self) -> bool:
        """Whether no epoch is under way, or its end."""
        return self._ending

    def has(self, worker: int) -> bool:
        """Whether a worker has what it needs, and is not lost."""
        with self._lock:
            return worker in self._handles and worker not in self._lost

    def is_lost(self, worker: int) -> bool:
        """Whether a worker is lost, as far as known."""
        with self._lock:
            return worker in self._lost

    def has_left(self, worker: int) -> bool:
        """Whether a worker had nothing to do any more in this epoch, when it was last heard of."""
        with self._lock:
            return worker in self._left

    # A worker's life. The threads that drive the workers call these.

    def make(self, worker: int) -> None:
        """Makes what a worker needs that begins with the epoch, or with the next one."""
        with self._at(worker):
            self._make(worker, self._first)
        with self._joining, self._lock:
            # They went before there was somebody to tell; see `_void_bounds`, too.
            own = self._neighbors(worker)
            for gone in self._lost | self._left.keys():
                about = gone if gone in own else worker
                until = self._takes_part_until(gone)
                with self._at(worker):
                    hop.set_neighbor(self._handles[worker], about, 0, until)

    def lose(self, worker: int) -> None:
        """A worker is gone: its neighbors don't wait for it."""
        with self._lock:
            self._lost.add(worker)
            self._all_there = False
            deleter = self._deleters.pop(worker, None)
            if deleter is not None:
                deleter.forget()
                self._edges.leave(worker, self._handles[worker])
            self._tellers += 1
        self._tell_of_end(worker)

    def sources(self, worker: int) -> list[int]:
        """Whose parameters a worker takes that is back: its in-neighbors', or those there are."""
        senders = set(self._topology.in_neighbors(worker))
        there = self.there
        return [w for w in there if w in senders and w not in self._left] or there

    def renew(self, worker: int) -> None:
        """Has edges from and to a lost worker that is back begin anew, when it joins."""
        with self._edges.renew(worker):
            pass  # It is no living one since it was lost.

    def leave(self, worker: int) -> None:
        """A worker has nothing to do at the moment: its neighbors don't wait for it.

        Nothing need have been made for it: training goes on after a loss, and its data had ended.
        """
        with self._lock:
            if worker in self._lost:
                return
            handle = self._handles.get(worker)
        # Not under the lock: the server may be silent.
        iteration = -1 if handle is None else self._iteration(worker)
        with self._lock:
            if worker in self._lost or self._handles.get(worker) is not handle:
                return
            self._left[worker] = iteration
            self._all_there = False
            self._tellers += 1
        self._tell_of_end(worker)

    def resume(self, worker: int) -> None:
        """A worker that has left in this epoch takes steps again: its neighbors count on it.

        It had batches ahead when no steps were left, and others found no batches for theirs.
        """
        with self._joining:
            with self._lock:
                if worker not in self._left or worker in self._lost:
                    return
            self.rejoin(worker)

    def rejoin(self, worker: int) -> None:
        """A worker takes part anew with the parameters that it has, in a later iteration.

        It had left, or nobody knows what became of a call that is a part of its iteration.

        Raises:
            tf.errors.UnavailableError: if it is lost.
        """
        with self._joining:
            self._check_not_lost(worker)
            self._states()  # What it has counted up to now.
            with self._lock:
                bounds_held, self._all_there = self._all_there, False
            if bounds_held:
                self._void_bounds()
            try:
                with self._edges.renew(worker), self._lock:
                    self._resuming.add(worker)
                there = set(self.there)
                others = [w for w in self._neighbors(worker) if w in there]
                first = self.join(worker, others, is_back=False)
            finally:
                with self._lock:
                    self._resuming.discard(worker)
                if self.is_lost(worker):
                    self.lose(worker)  # Meanwhile: its neighbors have heard something else since.
            self._check_not_lost(worker)
            logging.info("%s goes on from iteration %d.", self._name(worker), first)
            self.carry_on()

    def _check_not_lost(self, worker: int) -> None:
        if self.is_lost(worker):
            raise self._was_lost(worker)

    def _was_lost(self, worker: int) -> tf.errors.UnavailableError:
        return tf.errors.UnavailableError(None, None, f"{self._noun} {worker} was lost")

    def release(self) -> None:
        """Ends all waits, with errors."""
        self._start_no_more()
        for worker, handle in self._living():
            with self._at(worker), contextlib.suppress(tf.errors.OpError):
                hop.interrupt(handle)
        self._edges.end()

    def interrupt(self) -> None:
        """Ends what workers wait for at this moment."""
        self._edges.everywhere(hop.interrupt)

    def pause(self) -> contextlib.AbstractContextManager:
        """Inside, no worker calls another, while a server is taken into the cluster again."""
        return self._edges.pause()

    def describe(self) -> str:
        """Who waits for whom, in words."""
        return self._describe(self._states())

    def _describe(self, states: dict[int, State]) -> str:
        parts = []
        for worker, _ in self._living():
            if worker not in states:
                parts.append(f"{self._noun} {worker} does not answer")
        for worker, state in states.items():
            if state.missing:
                missing = listed(state.missing, self._noun)
                parts.append(
                    f"{self._noun} {worker} (iteration {state.iteration}) has been {state.phase} "
                    f"{self._awaited(state)} for {state.seconds:.1f} s, of {missing}"
                )
        return "; ".join(parts) or f"no {self._noun} waits for a neighbor"

    def _awaited(self, state: State) -> str:
        """Which iteration's updates, tokens or acknowledgements a worker waits for."""
        # Who skips iterations, or takes older updates, may be served by one of a later iteration.
        later = " or later" if self._protocol.skip or self._protocol.staleness_bound else ""
        if state.phase != "waiting for tokens":
            return f"of iteration {state.awaited}{later}"
        entered = max(state.iteration, self._first) + 1
        return f"to enter iteration {entered}{later}, given in iteration {state.awaited}{later},"

    # An epoch.

    def begin(self, restored: int | None) -> None:
        """Starts all workers on the same iteration; nobody may be at work.

        Args:
            restored: the latest iteration of a checkpoint that they go on from, or None.
        """
        # A worker that takes part again meanwhile would keep its neighbors' iterations of before,
        # and they would not count on it: it is in this epoch altogether, or not yet.
        with self._joining:
            self._begin(restored)

    def _begin(self, restored: int | None) -> None:
        known = [state.iteration for state in self._states().values()]
        self._edges.begin(self._bandwidths())
        with self._lock:
            # What they tell is of the epoch before, and would be taken for news of this one.
            self._until_all_are_told()
            self._ending = False
            self._left.clear()
            self._all_there = not self._lost
            if restored is not None:
                known = [restored]
            else:
                known += [report.iteration for report in self._reports.all()]
            self._first = max([-1, *known]) + 1
            for worker, handle in self._living():
                with self._at(worker):
                    hop.begin(handle, self._first)
            self._reports.begin()
        if self._lost:
            self._void_bounds()
        for worker in sorted(self._lost):
            self._tell_neighbors(worker, 0, -1)

    def carry_on(self) -> None:
        """Starts the loops of the edges, if they do not run."""
        with self._lock:
            if self._ending:
                return
            there = set(self.there)
            for sender, receiver in self._pairs():
                if {sender, receiver} <= there:
                    self._edges.start(sender, receiver)
            if self._monitor is None or not self._monitor.is_alive():
                self._stop_monitor.clear()
                self._monitor = threading.Thread(
                    target=self._watch, name="recsync_hop_monitor", daemon=True
                )
                self._monitor.start()

    def end(self) -> None:
        """Ends the loops of the edges when all is told; the workers are done."""
        self._start_no_more()
        self._edges.end()
        deadline = time.monotonic() + JOIN_SECONDS
        self._edges.join(deadline)
        if self._monitor is not None:
            self._monitor.join(max(0.0, deadline - time.monotonic()))
        self._monitor = None
        self._states()

    def _start_no_more(self) -> None:
        # Not while another thread starts loops: it has seen that the epoch goes on, and would start
        # a monitor in the place of one that has ended meanwhile.
        with self._lock:
            self._ending = True
            self._stop_monitor.set()

    def restore(self, iterations: Sequence[int]) -> None:
        """Workers have gone to these iterations, by a checkpoint, and learn it when all begin."""
        self._reports.restore(iterations)

    def reports(self) -> list[WorkerReport]:
        """What each worker has done; of one that is lost, as far as it was known."""
        self._states()
        return self._reports.all()

    # Inside.

    @contextlib.contextmanager
    def _at(self, worker: int) -> Iterator[None]:
        """Inside, this thread calls on a worker's holder."""
        job, index = self._holders[worker]
        call = object()
        with at(self._cluster, index, job):
            self._calls[call] = time.monotonic(), self._holders[worker]
            try:
                yield
            finally:
                del self._calls[call]

    def waits_for(self, seconds: float) -> list[Server]:
        """The servers that calls have waited for so long, but for those of steps and edges."""
        since = time.monotonic() - seconds
        return [server for began, server in list(self._calls.values()) if began < since]

    def _name(self, worker: int) -> str:
        """A worker's, at the beginning of a sentence."""
        return f"{self._noun.capitalize()} {worker}"

    def _make(self, worker: int, first: int) -> None:
        handle = self._protocol.make(worker)
        hop.begin(handle, first)
        with self._lock:
            self._lost_events.pop(worker, None)
            self._reports.restarted(worker)
            self._handles[worker] = handle
            self._deleters[worker] = ResourceDeleter(handle, handle.device)

    def join(self, worker: int, others: Sequence[int], is_back: bool = True) -> int:
        """Has a worker with parameters take part in an epoch under way; under _joining.

        Args:
            worker: nobody counts on it.
            others: it begins behind their iterations.
            is_back: whether it was lost; else it stays so if it is lost meanwhile.

        Returns:
            The iteration that it begins with.

        Raises:
            tf.errors.UnavailableError: if it was lost meanwhile.
        """
        margin = _MARGIN
        first = max([self._first - 1, *self._iterations(others).values()]) + margin
        while True:
            with self._at(worker):
                self._make(worker, first)
            with self._lock:
                self._until_all_are_told()  # Else they might hear last that it is gone.
            now = self._tell_neighbors(worker, first, hop.FOREVER)
            latest = max(now.values(), default=-1)
            if latest < first:
                break
            # Somebody has been faster, and would be again and again.
            margin *= 2
            first = latest + margin
        told: dict[int, int] = {}

        def tell_of_neighbors() -> None:
            for neighbor in self._neighbors(worker):
                since = max(now.get(neighbor, 0), 0)
                while told.get(neighbor) != (until := self._takes_part_until(neighbor)):
                    told[neighbor] = until
                    is_live = until == hop.FOREVER
                    with self._at(worker):
                        own = self.handle(worker)
                        hop.set_neighbor(own, neighbor, since if is_live else 0, until)

        # Before anybody carries something to it: what had come it would forget.
        tell_of_neighbors()
        with self._lock:
            if worker not in self._deleters:
                raise self._was_lost(worker)
            # From now on it is told itself of neighbors that leave or are lost.
            if is_back:
                self._lost.discard(worker)
            self._left.pop(worker, None)
        tell_of_neighbors()
        return first

    def _takes_part_until(self, worker: int) -> int:
        with self._lock:
            return -1 if worker in self._lost else self._left.get(worker, hop.FOREVER)

    def _iterations(self, workers: Sequence[int]) -> dict[int, int]:
        """Where workers stand; of one that is gone as well, nothing."""
        found = {}
        for worker in workers:
            with contextlib.suppress(tf.errors.OpError):
                found[worker] = self._iteration(worker)
        return found

    def _iteration(self, worker: int) -> int:
        with self._at(worker):
            return int(fetch(hop.state(self.handle(worker)).iteration))

    def _tell_of_end(self, worker: int) -> None:
        """Tells a worker's neighbors that it takes part no more; see `_tellers`."""
        told = None
        try:
            self._void_bounds()
            # One that has left may be lost while they are told, and another thread tell them of it.
            while told != (until := self._takes_part_until(worker)):
                told = until
                self._tell_neighbors(worker, 0, until)
        finally:
            with self._told:
                self._tellers -= 1
                self._told.notify_all()

    def _until_all_are_told(self) -> None:
        """Waits until neighbors know who takes part no more; under _lock, which it gives back."""
        self._told.wait_for(lambda: self._tellers == 0)

    def _tell_neighbors(self, worker: int, since: int, until: int) -> dict[int, int]:
        """Tells a worker's neighbors when it takes part; returns their iterations."""

        def tell(neighbor: int) -> int:
            with self._at(neighbor):
                handle = self.handle(neighbor)
                return int(fetch(hop.set_neighbor(handle, worker, since, until)))

        iterations = {}
        for neighbor in self._neighbors(worker):
            is_gone = neighbor in self._lost and neighbor not in self._left
            if is_gone or neighbor not in self._handles:
                continue
            told = self._edges.call(neighbor, functools.partial(tell, neighbor))
            if told is not None:
                iterations[neighbor] = told
        return iterations

    def _void_bounds(self) -> None:
        """Has all workers forget bounds that hold as long as nobody is gone.

        Such bounds follow from paths over others, so it comes before neighbors of the one that is
        gone go on without it. Nobody is called where there are none.
        """
        if not self._protocol.uses_paths:
            return

        def void(worker: int, handle: tf.Tensor) -> None:
            with self._at(worker):
                hop.set_neighbor(handle, worker, 0, -1)  # Itself: it is no neighbor of its own.

        for worker, handle in self._living():
            self._edges.call(worker, functools.partial(void, worker, handle))

    def _neighbors(self, worker: int) -> list[int]:
        topology = self._topology
        return sorted({*topology.in_neighbors(worker), *topology.out_neighbors(worker)})

    def _pairs(self) -> list[tuple[int, int]]:
        """All (sender, receiver) of parcels: updates along edges, tokens against them."""
        return [(i, j) for i in range(self._topology.size) for j in self._neighbors(i)]

    def _living(self) -> list[tuple[int, tf.Tensor]]:
        with self._lock:
            gone = self._lost | self._resuming
            return [(w, h) for w, h in sorted(self._handles.items()) if w not in gone]

    def _answers(self, worker: int) -> bool:
        """Whether a worker gives signs of life, and of the one that its copies are of."""
        return self._is_current(worker) and is_reachable(device_of(*self._holders[worker]))

    def _states(self) -> dict[int, State]:
        """The states of the workers that answer in time; takes what they have done along."""
        found: dict[int, State] = {}

        def ask(worker: int, handle: tf.Tensor) -> None:
            job, index = self._holders[worker]
            try:
                with at(self._cluster, index, job):
                    state, events = parse(fetch(look()(handle)))
            except tf.errors.OpError:
                return  # It is lost, which its own thread finds out.
            with self._lock:
                if self._handles.get(worker) is not handle:
                    return  # It was lost, and is back as another.
                lost = state.lost_events - self._lost_events.get(worker, 0)
                self._lost_events[worker] = state.lost_events
                self._recordings.add(worker, events, lost)
                self._reports.update(worker, state)
                found[worker] = state

        # A worker that stands still shall not keep us from asking the others.
        with self._asking:
            for worker, handle in self._living():
                about, asked = self._asked.get(worker, (None, None))
                # Of one that was killed the answer may never come; it may be back by now.
                if about is not handle or not asked.is_alive():
                    asked = threading.Thread(target=ask, args=(worker, handle), daemon=True)
                    asked.start()
                    self._asked[worker] = handle, asked
            deadline = time.monotonic() + _ANSWER_SECONDS
            for worker, (_, thread) in self._asked.items():
                if worker not in self._lost:
                    thread.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            return dict(sorted(found.items()))

    def _watch(self) -> None:
        """Logs long waits, collects events, and checks the bounds if they are to be checked."""
        logged = -self._stall_seconds
        checks = self._protocol.check_invariants
        pause = _CHECK_SECONDS if checks else _WATCH_SECONDS
        while not self._stop_monitor.wait(pause):
            began = time.monotonic()
            try:
                before = self._states() if checks else {}
                states = self._states()
                if checks:
                    self._check(before, states)
                    took = time.monotonic() - began
                    pause = min(max(_CHECK_SECONDS, _CHECK_REST * took), _WATCH_SECONDS)
            except Exception as error:
                self._fail(error)
                return
            longest = max((s.seconds for s in states.values() if s.missing), default=0.0)
            now = time.monotonic()
            if longest > self._stall_seconds and now - logged > self._stall_seconds:
                logged = now
                logging.warning("Decentralized training stalls: %s", self._describe(states))

    def _check(self, before: dict[int, State], after: dict[int, State]) -> None:
        """Raises a RuntimeError if what workers told in two rounds breaks the bounds."""
        found = self._invariants.violation(before, after, self._first)
        # Bounds hold while nobody has left; who leaves is noted before anybody is told.
        if found is not None and self._all_there:
            raise RuntimeError(f"{found}, which is a bug")


def listed(workers: Sequence[int], noun: str = "worker") -> str:
    """Workers in words: "workers 1, 2 and 5"."""
    names = [str(worker) for worker in workers]
    if len(names) == 1:
        return f"{noun} {names[0]}"
    return f"{noun}s {', '.join(names[:-1])} and {names[-1]}" if names else "nobody"
