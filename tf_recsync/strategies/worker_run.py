"""Drives the workers through one pass over a dataset, by one thread or more for each.

A thread calls its worker again and again, with steps that it takes (leases.py).
A worker that is lost takes its batches with it and is admitted again when it
is back; the others go on. When all have seen the end of the data, they go on with
the batches that were lost, if these can be found again (pass_batches.py).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from absl import logging

from tf_recsync.cluster import Cluster, MemberState, Server, ask, messages
from tf_recsync.cluster.data_service import ReaderLosses
from tf_recsync.cluster.diagnosis import Cause, Diagnosis, diagnose
from tf_recsync.cluster.membership import Order
from tf_recsync.cluster.silence_watch import Wait, suspicious_after
from tf_recsync.strategies import data_errors
from tf_recsync.strategies.call_follower import CallFollower
from tf_recsync.strategies.comebacks import Comebacks
from tf_recsync.strategies.leases import Leases
from tf_recsync.strategies.slots import Losses, Slot
from tf_recsync.strategies.watched_calls import (
    give_up_silent,
    how_lost,
    lost_parameter_server,
    silent_parameter_server,
)
from tf_recsync.synchronization.remote_functions import cancellable
from tf_recsync.synchronization.synchronizer import Crew

if TYPE_CHECKING:
    from tf_recsync.strategies.pass_batches import PassBatches
    from tf_recsync.strategies.registered_dataset import RegisteredDataset
    from tf_recsync.strategies.worker_datasets import WorkerDatasets
    from tf_recsync.strategies.worker_state import WorkerState

_STALL_SECONDS = 60.0  # After which a wait is logged, again and again.
_RETRY_SECONDS = 0.5  # Between attempts to readmit a lost worker.
_LEAVE_SECONDS = 10.0  # For the workers to leave a pass that failed, at most.
_CANCEL_SECONDS = 5.0  # For calls that are cancelled then to end, at most.
_START_SECONDS = 120.0  # How long workers wait for each other at the start.
_TELL_SECONDS = 0.5  # Between two looks at what has happened to workers.
_CONNECTS = 5  # Attempts to reach a worker again that is up.
_MOST_BREAKS = 5  # Connections to a living worker that break without a call in between.


class _WorkerLost(Exception):
    """A thread's worker was lost, or has to be opened once more."""


class WorkerRun:
    """One pass of all workers over a dataset.

    Args:
        cluster: the connected cluster.
        leases: the steps of the pass.
        batches: of the pass. Readers may have parts of the data: then the cluster knows the pass.
        open_worker: `open_worker(slot)`, called in the worker's thread and
            device scope, makes `slot.state` (iterators and so on), anew after a
            worker was lost.
        call: `call(slot, n)` runs at most n steps and returns (steps done,
            whether the dataset has ended, a result or None).
        read_rows: reads what the workers of slots have reported; gives the steps that were applied,
            by rows' keys.
        teller_of: the device of the server that has a slot's row on a board, by which long calls
            are followed, and told to end; None if none are.
        note_steps: called with a slot and a number of steps that it has done, as soon as that is
            known.
        should_stop: asked between calls; True ends the pass early.
        worker_timeout: seconds without any worker after which the run fails.
        silence_timeout: seconds without a sign of life after which a server is given up.
        crew: is told which workers are lost or have nothing to do, so that the
            others don't wait for them, and can say who waits for whom; by default
            no worker ever waits for another.
        threads: how many threads call each worker, each with a slot of its own.
        unneeded: parameter servers that none of its steps needs.
        is_reading: whether its steps change nothing: if a connection breaks, nobody else has to
            know.
        while_waiting: is called about twice a second by whoever waits for steps.
        read: reads which batches a slot's worker has done, where they have numbers.
        after: a pass over the same data that has failed, and whose steps go on in this one.
        keeps_data: whether workers go on with the batches that they have if this one fails; then
            `close_kept` or a pass `after` it follows.
        is_another: whether it takes the place of one that has failed: for a second servers may
            refuse connections still.
    """

    def __init__(
        self,
        cluster: Cluster,
        leases: Leases,
        batches: PassBatches,
        open_worker: Callable[[Slot], None],
        call: Callable[[Slot, int], tuple[int, bool, Any]],
        should_stop: Callable[[], bool],
        worker_timeout: float,
        silence_timeout: float,
        crew: Crew | None = None,
        threads: int = 1,
        read: Callable[[Slot], None] = lambda slot: None,
        unneeded: Collection[Server] = (),
        is_reading: bool = False,
        while_waiting: Callable[[], None] = lambda: None,
        read_rows: Callable[[Sequence[Slot]], Mapping[int, int]] = lambda slots: {},
        teller_of: Callable[[Slot], str] | None = None,
        note_steps: Callable[[Slot, int], None] = lambda slot, steps: None,
        after: WorkerRun | None = None,
        keeps_data: Callable[[], bool] = lambda: False,
        is_another: bool = False,
    ):
        self._batches = batches
        self._read = read
        self._cluster = cluster
        self._crew = crew = Crew() if crew is None else crew
        self._open_worker = open_worker
        self._call = call
        self._should_stop = should_stop
        self._worker_timeout = worker_timeout
        self._suspicious_after = suspicious_after(silence_timeout)
        self._leave_seconds = min(_LEAVE_SECONDS, silence_timeout)
        self._changed = threading.Condition()
        # All below is guarded by _changed.
        self._leases = leases
        self._longest_call = 0.0  # In seconds, of those that ended.
        self._stopped = False
        self._error: Exception | None = None
        self._gave_up_reader = self._gave_up_server = False
        workers = range(cluster.workers)
        # Of each worker: the servers that hold what it trains on, where others go on without them.
        self._holders = [list(crew.holders_of(worker)) for worker in workers]
        self._spared = set(unneeded).union(*self._holders)
        self._is_reading = is_reading
        self._is_another = is_another
        self._keeps_data = keeps_data
        self._while_waiting = while_waiting
        self._note_steps = note_steps
        self._read_rows = read_rows
        self._followers: list[CallFollower] = []
        self._comebacks = Comebacks(cluster, crew, self._wait_for_answers, self._spared)
        # Of the others: a process that comes in the place of one has nothing of what it had.
        lives = cluster.lives("ps").items()
        self._needed = {server: life for server, life in lives if server not in self._spared}
        self._opened = 0
        self._began: float | None = None  # When all were open.
        self._round = batches.round
        self._has_lost = False  # Batches, of those of this round that some worker has had.
        self._readers_lost: ReaderLosses | None = None
        self._reader_losses = 0  # How many there were when this round began.
        if batches.retries and batches.data.readers > 1:
            self._readers_lost = cluster.reader_losses
            self._reader_losses = self._readers_lost.begin()
        self._is_deciding = False  # A thread is, about whether there is another round.
        self._is_complete = False  # There is none: no batch is missing.
        self._finished_parts = 0  # Threads that have seen the end of the dataset.
        self._losses = Losses()
        self._actions: list[Callable[[], None]] = []  # When no thread is at work any more.
        self._results: dict[int, Any] = {}
        self._next_result = 0
        self._without_worker_since: float | None = None
        self._begun_without: set[Server] = set()  # That were away when it began.
        self._opening = [threading.Lock() for _ in workers]
        self.slots = [Slot(i, i // threads) for i in range(cluster.workers * threads)]
        self._threads = [
            threading.Thread(
                target=self._drive, args=(slot,), name=f"recsync_worker_{slot.number}", daemon=True
            )
            for slot in self.slots
        ]
        if after is not None:
            self._go_on(after)
        self._find_answering()
        cluster.tell_members()  # What happened before concerns this pass only by who is away.
        cluster.membership.listen(self, Order.TRAINING)
        self._waiting = Wait(self._suspects, self._give_up, silence_timeout)
        cluster.watch.begin(self._waiting)
        for thread in self._threads:
            thread.start()
        if teller_of is not None:
            tellers: dict[str, list[Slot]] = {}
            for slot in self.slots:
                tellers.setdefault(teller_of(slot), []).append(slot)
            self._followers = [
                CallFollower(
                    cluster,
                    read_rows,
                    told,
                    lambda: any(slot.waits for slot in self.slots),
                    self._leases,
                    self._changed,
                    self._shall_end,
                    note_steps,
                    self.fail,
                )
                for told in tellers.values()
            ]
        cluster.add_pass(self)

    def _go_on(self, other: WorkerRun) -> None:
        """Takes over what a pass had that has failed, and whose threads have ended."""
        pairs = zip(self.slots, other.slots, strict=True)
        done, lost = (sum(n) for n in zip(*(own.go_on(o) for own, o in pairs), strict=True))
        self._leases.go_on(other._leases, done)
        self._losses = other.losses + Losses(steps=lost)

    def close_kept(self) -> None:
        """Nobody goes on with the batches that workers have, after it has failed."""
        self._keeps_data = lambda: False  # A thread that ends later leaves none, either.
        if self._error is not None:
            self._cancel()
        for slot in self.slots:
            if slot.kept_data is not None and slot.state is not None:
                slot.kept_data = None
                with self._cluster.dispatch_scope(), tf.device(slot.device):
                    self._close(slot, slot.state)

    def _find_answering(self) -> None:
        """A parameter server without which nobody goes on may be there, though it was given up."""
        away = sorted(self._cluster.membership.away("ps") - self._spared)
        for server, probe in zip(away, ask(self._cluster, away, 1.0), strict=True):
            if probe.reachable:
                self._cluster.membership.readmitted(server)

    # The coordinator's side.

    def grant(self, steps: float) -> None:
        """Lets the workers run `steps` more steps (float("inf"): to the end)."""
        with self._changing():
            self._leases.grant(steps)
        self._ask()

    @property
    def readers(self) -> int:
        """How many readers may have parts of its data."""
        return self._batches.data.readers

    @property
    def data(self) -> RegisteredDataset | WorkerDatasets:
        """What is trained on, as workers get at it."""
        return self._batches.data

    @property
    def is_open(self) -> bool:
        """Whether workers have not left it: they run steps, or wait for steps to be granted."""
        with self._changed:
            return any(slot.running for slot in self.slots)

    @property
    def is_left(self) -> bool:
        """Whether it ends before its data, and not because of an error of its own."""
        with self._changed:
            return self._error is None and self._shall_end()

    @property
    def has_seen_end(self) -> bool:
        """Whether all of its threads have seen the end of the data."""
        with self._changed:
            if self._batches.retries:
                return self._is_complete
            return self._finished_parts == len(self.slots)

    @property
    def granted(self) -> float:
        """Steps that were granted so far."""
        with self._changed:
            return self._leases.granted

    @property
    def completed(self) -> int:
        """Steps finished so far, as far as known."""
        with self._changed:
            return self._leases.known

    @property
    def steps_per_call(self) -> int:
        """How many steps fit into a short call of the worker whose steps are the shortest."""
        with self._changed:
            return max(self._leases.share(slot.number) for slot in self.slots)

    @property
    def seconds(self) -> float:
        """For how long workers have trained; 0 before they have begun together."""
        return 0.0 if self._began is None else time.time() - self._began

    @property
    def losses(self) -> Losses:
        """What was lost so far; of batches it knows nothing."""
        with self._changed:
            return self._losses

    def wait(self, steps: float) -> bool:
        """Waits until `steps` steps are finished, or there is nothing more to wait for.

        Returns:
            True if workers may still be running; False when all granted steps
            are done, the dataset has ended, or the run was stopped.

        Raises:
            Exception: what went wrong on a worker.
        """
        with self._changed:
            if self._leases.known >= steps and self._error is None:
                return not self._idle()  # Most steps of Keras's are done before it asks for them.
        with self._leaving(), self._changed:
            self._wait_until(
                lambda: self._leases.known >= steps or self._idle(), self._while_waiting
            )
            return not self._idle()

    def end_of_data(self) -> None:
        """All steps of the pass are done: waits for those that were lost meanwhile. From now on
        nobody does any again.

        Raises:
            Exception: what went wrong on a worker.
        """
        if not self._batches.retries:
            return
        with self._leaving(), self._changed:
            if self._losses.workers:
                self._wait_until(self._idle, self._while_waiting)
            self._is_complete = True
            self._changed.notify_all()

    def end_of_steps(self) -> None:
        """All steps that were granted are done: has all be known that workers have done. What
        nobody knows of one that is lost is done by others.

        Raises:
            Exception: what went wrong on a worker.
        """

        def unread() -> list[Slot]:
            slots = [s for s in self.slots if s.running and not (s.ended or s.is_counted)]
            return [slot for slot in slots if slot.read_calls != slot.calls]

        with self._leaving(), self._changed:
            while asked := unread():
                for slot in asked:
                    slot.shall_read = True
                self._changed.notify_all()
                self._wait_until(
                    lambda: not any(s.shall_read for s in unread()) or self._error is not None
                )
                self._wait_until(self._idle)

    def next_result(self) -> Any:
        """The result with the next number.

        Raises:
            StopIteration: when there are no more.
        """
        with self._leaving(), self._changed:
            self._wait_until(
                lambda: self._next_result in self._results or self._idle(), self._while_waiting
            )
            if self._next_result in self._results:
                self._next_result += 1
                return self._results.pop(self._next_result - 1)
            if self._results:
                raise RuntimeError(
                    f"batch {self._next_result} was lost with a worker: predictions are "
                    "incomplete; predict again"
                )
            raise StopIteration

    def request_stop(self) -> None:
        """Ends the pass as soon as the calls in flight are finished; does not wait."""
        with self._changing():
            self._stopped = True
        self._look()

    def end_calls(self) -> None:
        """Calls that go on until they are told to end do so, and are made anew; does not wait."""
        for follower in self._followers:
            follower.end_calls()

    def _ask(self) -> None:
        """Steps begin, for which somebody may wait."""
        for follower in self._followers:
            follower.ask()

    def _look(self) -> None:
        """Calls may have to end."""
        for follower in self._followers:
            follower.look()

    def _shall_end(self) -> bool:
        """Whether no more steps shall begin; under _changed."""
        return self._stopped or self._error is not None or self._should_stop()

    def fail(self, error: Exception) -> None:
        """Ends the pass with an error; whoever waits gets the first one."""
        with self._changing():
            self._error = self._error or error
        self._look()

    def when_done(self, action: Callable[[], None]) -> None:
        """Calls `action` when no thread is at work any more, in one of them, or here."""
        with self._changed:
            if self.is_open:
                self._actions.append(action)
                return
        action()

    def stop(self) -> None:
        """Ends the pass; waits for the calls in flight, with a limit."""
        self.request_stop()
        self.join(_STALL_SECONDS)
        if self._error is not None:
            self._cancel()

    def join(self, seconds: float) -> None:
        """Waits until the workers' threads have ended, for so many seconds at most."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _cancel(self) -> None:
        """Ends the calls that are in flight still, with errors: workers may wait for batches that
        never come, and TensorFlow for their calls, with Python's lock held."""
        for slot in self.slots:
            slot.cancellation.start_cancel()
        self.join(_CANCEL_SECONDS)

    @contextlib.contextmanager
    def _leaving(self) -> Iterator[None]:
        """If a pass fails, the workers have left it when the error is raised, with a limit."""
        try:
            yield
        except Exception as error:
            # To leave a reader that does not answer takes until it does, or has ended.
            if error is self._error and not self._gave_up_reader:
                self.request_stop()
                # In a thread, as the server that it calls may be the one that failed.
                threading.Thread(target=self._release, name="recsync_release", daemon=True).start()
                self.join(self._leave_seconds)
                if not self._keeps_data():
                    self._cancel()
            raise
        except BaseException:  # As by Ctrl-C, after which the caller may go on.
            self.request_stop()
            raise

    def hold(self) -> None:
        """Returns when no worker is in a step; none begins one before `go_on` is called.

        Raises:
            Exception: what goes wrong meanwhile.
        """
        with self._changed:
            self._leases.is_held = True
            self._look()
            if self._error is None:
                self._wait_until(lambda: self._leases.is_settled or self._idle())

    def go_on(self) -> None:
        """Workers begin steps again."""
        with self._changing():
            self._leases.is_held = False
        self._ask()

    def leave_again(self) -> None:
        """The crew has begun an epoch, and counts on all: whose data have ended leaves it, too."""
        with self._changed:
            ended = [slot for slot in self.slots if slot.ended]
        for slot in ended:
            self._crew.leave(slot.number)
            if not slot.ended:  # It has resumed meanwhile, for what others have lost.
                self._crew.resume(slot.number)

    def keep_data(self, workers: Iterable[int]) -> None:
        """What workers train on will be made anew: they go on with the batches that they have.

        No call may be in flight.
        """
        for slot in self.slots:
            if slot.index in workers and slot.state is not None and not slot.lost:
                slot.kept_data = self._cluster.membership.life(slot.worker)

    def settle(self) -> None:
        """Waits for the calls in flight of a pass that was stopped, with a limit."""
        if self._should_stop():
            self.stop()

    def _idle(self) -> bool:
        """Whether nothing runs and nothing will, unless more is granted."""
        return self._error is not None or not self.is_open or self._leases.is_done

    def _wait_until(
        self, done: Callable[[], bool], while_waiting: Callable[[], None] = lambda: None
    ) -> None:
        last = (self._leases.known, time.monotonic())
        told = last[1]
        while not done():
            self._changed.wait(timeout=1.0)
            now = time.monotonic()
            if now - told >= _TELL_SECONDS:
                told = now
                with self._unlocked():
                    while_waiting()
            known = self._leases.known
            if known != last[0]:
                last = (known, now)
            elif now - last[1] > _STALL_SECONDS:
                last = (known, now)
                with self._unlocked():
                    logging.warning(
                        "No step has finished for %.0f s: %s", _STALL_SECONDS, self._describe(now)
                    )
            since = self._without_worker_since
            if since is not None and now - since > self._worker_timeout:
                with self._unlocked():
                    message = (
                        f"no worker has been reachable for {self._worker_timeout:g} s "
                        f"(worker_timeout): {self._describe(now)}"
                    )
                if self._without_worker_since is not None:  # Still.
                    self.fail(RuntimeError(message))
        if self._error is not None:
            raise self._error

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Inside, _changed is held, and something is changed for which others may wait."""
        with self._changed:
            yield
            self._changed.notify_all()

    @contextlib.contextmanager
    def _unlocked(self) -> Iterator[None]:
        """Inside, _changed is not held: the servers that are called may be silent, and the watch,
        which ends such calls, needs it."""
        self._changed.release()
        try:
            yield
        finally:
            self._changed.acquire()

    def _describe(self, now: float) -> str:
        parts = []
        for slot in self.slots:
            since = slot.idle_since
            if slot.lost:
                parts.append(f"worker:{slot.index} is lost")
            elif since is not None:
                parts.append(f"worker:{slot.index} is in a call for {now - since:.0f} s")
        parts += filter(None, [self._crew.describe()])
        return ", ".join(parts) or "all workers are idle"

    def describe_waits(self) -> str:
        """Who waits for whom, in words; empty if nobody ever does, or the pass is over."""
        is_over = self._stopped or self._error is not None or not self.is_open
        if is_over or not self._crew.has_waits:
            return ""
        return self._crew.describe()

    # The watch's side.

    def _suspects(self) -> list[Server]:
        """The servers that may be silent: workers in long calls, and whom these may wait for."""
        with self._changed:
            now = time.monotonic()
            idle = [(slot.worker, slot.idle_since) for slot in self.slots]
        limit = self._suspicious_after
        found = [worker for worker, since in idle if since is not None and now - since > limit]
        if found:
            found += self._cluster.membership.servers("ps")
            found += [("reader", i) for i in range(self.readers)]
        return [*found, *self._crew.waits_for(limit)]

    def _give_up(self, server: Server, seconds: float) -> None:
        """Has the calls fail that wait for a server that does not answer."""
        job, index = server
        if job == "reader":
            self._give_up_reader(index, seconds)
            return
        if job == "ps" and server not in self._spared:
            self._gave_up_server = True
            self.fail(silent_parameter_server(index, seconds))
        callers = [worker for worker, holders in enumerate(self._holders) if server in holders]
        give_up_silent(self._cluster, server, seconds, callers if server in self._spared else None)

    def _give_up_reader(self, index: int, seconds: float) -> None:
        with self._changed:
            # While others have batches, training goes on; a call may just be long.
            limit = max(seconds, 2 * self._longest_call)
            progressed = max(slot.progressed for slot in self.slots)
            is_stuck = time.monotonic() - progressed >= limit
            waiting = {slot.index for slot in self.slots if slot.busy_since is not None}
        message = (
            f"reader:{index} has not answered for {seconds:.0f} s, and may have batches left; "
            "start it again"
        )
        if is_stuck:
            self._gave_up_reader = True
            self.fail(RuntimeError(message))
            self._cluster.cut_off_all(("worker", worker) for worker in waiting)
        else:
            logging.warning("%s.", message)

    # The threads' side.

    def _drive(self, slot: Slot) -> None:
        try:
            with self._cluster.dispatch_scope(), tf.device(slot.device):
                try:
                    self._drive_in_scope(slot)
                except Exception as error:
                    self.fail(error)
                    raise
                finally:
                    self._leave_data(slot)
                    self._note(slot, MemberState.DONE)
        except Exception as error:
            self.fail(error)
        finally:
            with self._changing():
                slot.running = False
                slot.busy_since = None
                actions: list[Callable[[], None]] = []
                if not self.is_open:
                    self._cluster.watch.end(self._waiting)
                    actions, self._actions = self._actions, []
            if self._error is not None:
                self._release()
            for action in actions:
                action()

    def _leave_data(self, slot: Slot) -> None:
        """A worker's thread ends."""
        has_data = slot.state is not None and not slot.lost
        if self._error is not None and has_data and self._keeps_data():
            slot.kept_data = self._cluster.membership.life(slot.worker)
        else:
            self._close(slot, slot.state)

    def _release(self) -> None:
        """Has workers that wait for one whose step has failed end, too."""
        while self.is_open:
            self._crew.release()
            if not self._crew.has_waits:
                return
            with self._changed:
                self._changed.wait_for(lambda: not self.is_open, timeout=_RETRY_SECONDS)

    def _drive_in_scope(self, slot: Slot) -> None:
        if slot.state is not None:  # From the pass that this one goes on with.
            self._count_lost(slot)
        if self._batches.retries:
            slot.ended = False  # It sees the end once more, or something was lost.
        if slot.ended:
            membership = self._cluster.membership
            slot.lives = {server: membership.life(server) for server in self._needs(slot)}
            self._leave(slot)  # The crew has begun anew, and counts on all.
            with self._changing():
                self._opened += 1
                self._finished_parts += 1
            return
        is_open = self._opened_at_once(slot)
        with self._changed:
            # All start together, so that the first to be ready does not run alone.
            self._opened += 1
            self._changed.notify_all()
            # One that could not open ends the pass for all.
            self._changed.wait_for(
                lambda: self._opened == len(self.slots) or self._stopped or self._error is not None,
                _START_SECONDS,
            )
            if self._began is None:
                self._began = time.time()
            slot.pass_began = self._began
        goes_on = True
        while goes_on:
            try:
                if is_open:
                    goes_on = self._do_steps(slot)
                else:
                    self._count_lost(slot)
                    is_open = goes_on = self._readmit(slot)
            except _WorkerLost:
                is_open = False

    def _do_steps(self, slot: Slot) -> bool:
        """A thread does the next steps that it gets; False if there are none for it any more.

        Raises:
            _WorkerLost: if the worker was lost meanwhile.
        """
        n = self._take(slot, wait=False)
        has_left = n is None
        if has_left:
            self._leave(slot)
            while (n := self._take(slot)) is None:
                if slot.shall_read:
                    with self._guarded(slot):
                        self._tell(slot)
                else:  # An epoch has begun since, and others do all its steps.
                    self._leave(slot)
        if n == 0:
            self._leave(slot)
            return False
        try:
            with self._guarded(slot):
                if has_left:
                    self._resume(slot)
                self._move(slot, MemberState.WORKING)
        except _WorkerLost:
            self._give_back(slot, n)
            raise
        called = time.monotonic()
        try:
            with cancellable(slot.cancellation), self._guarded(slot):
                done, ended, result = self._call(slot, n)
        except _WorkerLost:
            self._note(slot, MemberState.READY)
            self._account_lost(slot, n)
            raise
        self._note(slot, MemberState.READY)
        self._account(slot, n, done, result, time.monotonic() - called)
        slot.breaks = 0
        slot.has_kept = slot.has_kept and not done
        if not ended:
            return True
        if self._may_be_cut_off(slot):
            logging.info("worker:%d joins its data anew: its iterator has ended", slot.index)
            with self._guarded(slot):
                self._open(slot)
            return True
        # Before it leaves: if an epoch begins meanwhile, one of the two has it leave that.
        with self._changing():
            slot.ended = True
            if self._batches.retries:
                self._batches.ended(slot)
        self._leave(slot)
        if self._has_more(slot):
            with self._guarded(slot):
                self._join(slot)
            return True
        with self._changed:
            self._finished_parts += 1
        return False  # Its own part has ended; others may hold batches still.

    # What was lost is done at the end of the data.

    def _count_lost(self, slot: Slot) -> None:
        """A worker was lost: those of its batches that are not known to be done count as lost."""
        state = slot.state
        if state is not None and self._batches.recounts:
            # Only its connection broke. Without numbers, what it has done would be done again.
            if self._batches.done is not None and not self._cluster.membership.is_away(slot.worker):
                self._try_to_read(slot)
            state.settle()
        with self._changing():
            slot.is_counted = True
            slot.shall_read = False
            if state is not None and self._batches.recounts and not self._is_complete:
                self._has_lost = True
                if self._batches.are_noted:
                    unknown = slot.credited - slot.noted
                    # Its steps are its place in its part of the data; with numbers, what servers
                    # have applied. If the one that counts them was lost, the numbers say more.
                    if self._batches.done is None or unknown < 0:
                        state.steps -= unknown
                    self._credit(slot, -unknown)

    def _try_to_read(self, slot: Slot) -> None:
        """Reads which batches a worker has done; if it is gone, its own thread finds that out."""
        try:
            with slot.busy():
                self._read(slot)
        except tf.errors.OpError as error:
            logging.debug("what worker:%d has done is not known: %s", slot.index, error)

    def _tell(self, slot: Slot) -> None:
        """Reads what a worker has done, for who has asked."""
        self._read(slot)
        with self._changing():
            slot.shall_read, slot.read_calls = False, slot.calls

    def _credit(self, slot: Slot, done: int) -> None:
        """So many more of a worker's steps count as done, or fewer; under _changed."""
        self._leases.count(done)
        slot.credited += done
        retried = done if slot.round else 0
        self._losses += Losses(retried=retried, repeated=max(-done, 0))

    def _has_more(self, slot: Slot) -> bool:
        """Whether a thread that has seen the end of its data goes on with what others have lost;
        returns when that is known."""
        if not self._batches.retries:
            return False
        with self._changed:
            while not (self._shall_end() or self._is_complete):
                if self._round > slot.round:
                    return True
                if not self._is_deciding and all(s.ended or s.is_counted for s in self.slots):
                    self._decide()
                else:
                    self._changed.wait(timeout=1.0)
            return False

    def _decide(self) -> None:
        """All who are there have seen the end of the data: is something missing? Under _changed."""
        self._is_deciding = True
        for slot in self.slots:
            if slot.is_counted:
                slot.kept_data = None  # What it has kept others do now.
        has_lost, self._has_lost = self._has_lost, False
        if self._readers_lost is not None:
            before, self._reader_losses = self._reader_losses, self._readers_lost.count
            has_lost |= self._reader_losses > before
        has_more = False
        try:
            if has_lost or any(slot.is_counted for slot in self.slots):
                with self._unlocked(), tf.device(None):
                    for slot in self.slots if has_lost else []:
                        if slot.ended and slot.state is not None:
                            self._try_to_read(slot)
                    has_more = self._batches.open_rest(self.slots, has_lost)
        finally:
            self._is_deciding = False
        if has_more:
            self._round = self._batches.round
            logging.info("Batches that were lost with workers or readers are trained on now.")
        elif self._batches.has_all_parts:  # Else who has one is back.
            self._is_complete = True
        self._changed.notify_all()

    def _join(self, slot: Slot) -> None:
        """A thread that has seen the end of its data goes on with what others have lost."""
        with self._changed:
            slot.ended, of_round = False, self._round
        slot.state.join(self._batches.iterator(slot))
        self._resume(slot)
        with self._changed:
            slot.round = of_round  # If it was lost meanwhile, that was not in this round.

    def _opened_at_once(self, slot: Slot) -> bool:
        """Opens a worker as the pass begins; False if it is away, and the pass begins without."""
        needs, membership = self._needs(slot), self._cluster.membership
        away = [server for server in needs if not self._comebacks.is_back(server)]
        slot.lives = {server: membership.life(server) for server in needs}
        if not away:
            with contextlib.suppress(_WorkerLost), self._guarded(slot, is_opening=True):
                self._open(slot)
                return True
            return False
        with self._changed:
            # Another pass may be taking one in.
            news = [s for s in away if s not in self._begun_without and membership.is_away(s)]
            self._begun_without.update(news)
        for job, index in news:
            is_new = membership.is_new((job, index))
            there = "is not up yet" if is_new else "is still away"
            others = "the others begin" if job == "worker" else "the other groups begin"
            logging.warning("%s:%d %s; %s without it.", job, index, there, others)
        if slot.worker in news:
            self._count_loss()
            with contextlib.suppress(_WorkerLost), self._guarded(slot):
                self._tell_crew(slot.index)
        self._lose_slot(slot)
        return False

    def _needs(self, slot: Slot) -> list[Server]:
        """The servers without which a worker's thread can't go on; its worker is the last."""
        return [*self._holders[slot.index], slot.worker]

    def _open(self, slot: Slot) -> None:
        membership = self._cluster.membership
        # Tensors of Python's numbers TensorFlow caches: of two threads that send the same one
        # to a worker, one would use it there before the other has sent it.
        with self._opening[slot.index]:
            before = slot.state
            with self._changed:
                slot.round = self._round
                slot.ended = slot.is_counted = False
            # Nobody takes part of whom somebody does not know yet that it was lost: in this order,
            # as one that is lost meanwhile has another life.
            slot.lives = {server: membership.life(server) for server in self._needs(slot)}
            self._cluster.tell_members()
            if membership.join(slot.worker, slot.thread) != slot.lives[slot.worker]:
                raise _over(slot)
            try:
                try:
                    self._open_worker(slot)
                finally:
                    # Not earlier: the service ends a pass that all have left.
                    if slot.state is not before:
                        self._close(slot, before)
                self._move(slot, MemberState.READY)
            except tf.errors.OpError:
                # If somebody has told the crew meanwhile, this has undone it.
                if not membership.are_current(slot.lives):
                    self._tell_crew(slot.index)
                raise
        self._cluster.tell_members()  # It is back, if it was away.

    def _move(self, slot: Slot, state: MemberState) -> None:
        """Has it known what a worker's thread does from now on.

        Raises:
            tf.errors.UnavailableError: if the worker was lost since the thread opened it, or what
                it trains on: whatever the thread has of it is gone.
        """
        is_current = self._cluster.membership.are_current(slot.lives)
        if not self._note(slot, state) or not is_current:
            raise _over(slot)

    def _note(self, slot: Slot, state: MemberState) -> bool:
        """The same; returns whether the worker's life goes on."""
        life = slot.lives.get(slot.worker, -1)
        return self._cluster.membership.move(slot.worker, slot.thread, life, state)

    def _resume(self, slot: Slot) -> None:
        """A thread that had left has steps again."""
        self._move(slot, MemberState.READY)
        self._crew.resume(slot.number)

    def _close(self, slot: Slot, state: WorkerState | None) -> None:
        if state is None:
            return
        slot.busy_since = time.monotonic()
        try:
            state.close(is_reachable=not slot.lost)
        except tf.errors.OpError as error:
            logging.debug("worker:%d is gone, and its iterator with it: %s", slot.index, error)

    def _leave(self, slot: Slot) -> None:
        with self._changed:
            slot.left_at = self._leases.granted
        with contextlib.suppress(_WorkerLost), self._guarded(slot):
            self._crew.leave(slot.number)
        # If its life is over, that shows when it is needed again.
        self._note(slot, MemberState.IDLE)

    def _take(self, slot: Slot, wait: bool = True) -> int | None:
        """Takes steps to run; 0 when the pass is over.

        While none are granted it waits, or returns None; also if somebody asks what its worker has
        done, or others have taken all that were granted since it left: it is to leave once more.
        """
        with self._changed:
            while True:
                slot.waits = False
                if self._shall_end():
                    return 0
                n = self._leases.take(slot.number)
                if n:
                    return n
                if not wait or slot.shall_read or slot.left_at != self._leases.granted:
                    return None
                slot.waits = True
                self._changed.wait(timeout=1.0)

    def _account(self, slot: Slot, taken: int, done: int, result: Any, seconds: float) -> None:
        with self._changed:
            longest = seconds if done <= 1 else min(seconds, self._leases.limit)
            self._longest_call = max(self._longest_call, longest)
            self._leases.adapt(slot.number, taken, done, seconds)
            slot.progressed = time.monotonic()
            if result is not None:
                number, value = result
                self._results[number] = value
        # Last: who waits for a result finds it when no step is left.
        self._give_back(slot, taken, done)

    def _give_back(self, slot: Slot, taken: int, done: int = 0, lost: int = 0) -> None:
        """Of a call's steps so many were done; some may be lost with its worker."""
        with self._changing():
            seen = slot.end_call()
            self._leases.give_back(taken, done, seen)
            slot.credited += done
            self._losses += Losses(steps=lost, retried=done if slot.round else 0)
        self._note_steps(slot, max(done - seen, 0))

    def _account_lost(self, slot: Slot, taken: int) -> None:
        """A worker was lost in a call; counts what servers know of it."""
        done, lost = 0, taken
        if slot.state is not None:
            is_gone = any(map(self._cluster.membership.is_away, self._holders[slot.index]))
            limit = 0.0 if is_gone or self._gave_up_server else self._leases.limit
            with slot.busy():
                done, lost = slot.state.account_lost(
                    taken, slot.progress, limit, lambda: self._read_rows(self._beside(slot))
                )
        if not self._batches.retries:
            slot.lost_steps += lost
        self._give_back(slot, taken, done, lost)

    def _beside(self, slot: Slot) -> list[Slot]:
        """The slots whose workers report to the same server: who reads one's reports, takes all."""
        states = [(other, other.state) for other in self.slots if other.state is not None]
        board = slot.state.row.board
        return [o for o, state in states if state.row is not None and state.row.board is board]

    @contextlib.contextmanager
    def _guarded(self, slot: Slot, is_opening: bool = False) -> Iterator[None]:
        """Inside, a thread calls servers.

        Raises:
            _WorkerLost: if the worker was lost meanwhile, or has to be opened once more.
        """
        with slot.busy():
            try:
                yield
                return
            except tf.errors.OpError as error:
                self._diagnose(slot, error, is_opening)
        raise _WorkerLost

    def _diagnose(self, slot: Slot, error: tf.errors.OpError, is_opening: bool) -> None:
        """Returns if the worker is lost; else raises what really is wrong."""
        if self._cluster.is_closed or self._gave_up_server:
            return  # Nobody needs to know more, and to ask might take long.
        found = diagnose(self._cluster, error, slot.lives, self._spared)
        if self._is_reading and found == Diagnosis(Cause.LOST_SERVER, slot.worker):
            found = self._second_look(slot, error, found)
        if found.cause is Cause.LOST_PS:
            raise lost_parameter_server(self._cluster, found.server) from error
        if self.readers:
            data_errors.check(error)
        is_cancelled = isinstance(error, tf.errors.CancelledError)
        if found.cause is Cause.USER and is_cancelled and self._may_be_cut_off(slot):
            logging.info("worker:%d joins its data anew: %s", slot.index, messages.reason(error))
            self._lose_slot(slot)
            return
        if found.cause is Cause.USER:
            raise messages.plain(error, slot.index) from None
        if found.cause is not Cause.LOST_SERVER:
            if slot.breaks == _MOST_BREAKS:
                raise messages.plain(error, slot.index) from None
            slot.breaks += 1
        reason = f"{type(error).__name__}: {messages.reason(error)}"
        # For a second a worker refuses to connect to a server of its group that is up again, too:
        # if nothing has begun there, the worker need not count as lost.
        is_other = bool(self._holders[slot.index]) or self._is_another
        is_early = is_opening and is_other and slot.breaks < _MOST_BREAKS
        if found.cause is Cause.TRANSIENT and (self._is_reading or is_early):
            logging.info("The connection to worker:%d broke (%s).", slot.index, reason)
        else:
            self._cluster.membership.lost(
                found.server,
                slot.lives[found.server],
                how_lost(found.server, reason),
                is_forgetful=found.cause is Cause.FORGOTTEN,
            )
        self._cluster.tell_members()
        self._lose_slot(slot)

    def _may_be_cut_off(self, slot: Slot) -> bool:
        """Whether the worker's iterator may have ended with a call of the pass before.

        One that waits for a batch when its call is cancelled gives none any more: it says once that
        it was cancelled, perhaps to the call that nobody hears of, and then that the data have
        ended.
        """
        with self._changed:
            is_over = self._shall_end()
        if is_over or not slot.has_kept:
            return False
        slot.has_kept = False  # It gets another one, whose errors and whose end are the data's.
        return True

    def _second_look(self, slot: Slot, error: tf.errors.OpError, found: Diagnosis) -> Diagnosis:
        """Whether a worker that can't be reached is gone: others may have what is lost with it.

        gRPC refuses a connection that broke for a second.
        """
        membership = self._cluster.membership
        broken = Diagnosis(Cause.TRANSIENT, slot.worker)
        for _ in range(_CONNECTS):
            if not membership.are_current(slot.lives) or not self._cluster.is_up(*slot.worker):
                return found
            if self._wait_for_answers(_RETRY_SECONDS):
                return broken  # If it is gone, whoever trains finds that out.
            again = diagnose(self._cluster, error, slot.lives, self._spared)
            if again != found:
                return broken if again.cause is Cause.USER else again
        return found

    def _lose_slot(self, slot: Slot) -> None:
        """A worker's thread can't go on: it is gone, or what it trains on."""
        with self._changed:
            slot.lost = True
            if all(s.lost for s in self.slots) and self._without_worker_since is None:
                self._without_worker_since = time.monotonic()

    # Membership tells, in whichever thread has noticed.

    def lost(self, server: Server, is_news: bool) -> None:
        """A server is gone: nobody waits for it, as long as the pass goes on."""
        job, index = server
        if not self.is_open:
            return
        if server in self._needed and self._cluster.life(*server) != self._needed[server]:
            # Somebody has taken the next one in, and who calls it may take the error for another.
            self.fail(lost_parameter_server(self._cluster, server))
        if job == "worker" and is_news:
            self._count_loss()
        for slot in self.slots if job == "worker" and self._batches.recounts else []:
            # Of a worker that only fell silent, nothing counts as done from now on: where pushes
            # have tickets they have no effect, and else others may do its batch a second time.
            if slot.index == index and slot.state is not None:
                slot.state.settle()
        try:
            if job == "worker":
                self._tell_crew(index)
            for worker, holders in enumerate(self._holders):
                if server in holders:
                    self._crew.suspend(worker)
        except Exception as error:  # As of neighbors that can't go on without it.
            self.fail(error)

    def back(self, server: Server) -> None:
        """Does nothing: its own threads see to it."""

    def _tell_crew(self, worker: int) -> None:
        """A worker is gone, or what it trains on: then nothing can be told there."""
        if any(map(self._cluster.membership.is_away, self._holders[worker])):
            self._crew.suspend(worker)
        else:
            self._crew.lose(worker)

    def _count_loss(self) -> None:
        with self._changed:
            self._losses += Losses(workers=1)
        if not self._is_reading:
            self._batches.distributed.check_retries()

    def _readmit(self, slot: Slot) -> bool:
        """Waits until a lost worker is back, and opens it; False when the pass is over.

        Raises:
            _WorkerLost: if it is lost once more.
        """
        are_back = False
        while not are_back:
            with self._changed:
                self._changed.wait(timeout=_RETRY_SECONDS)
                if self._is_over():
                    return False
            # All of them, as each may take a while.
            are_back = all([self._comebacks.is_back(server) for server in self._needs(slot)])
        with self._changed:
            slot.lost = False
            self._without_worker_since = None
        with self._guarded(slot, is_opening=True):
            self._open(slot)
        return True

    def _wait_for_answers(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(self._is_over, timeout=seconds)

    def _is_over(self) -> bool:
        """Whether a lost worker that comes back would find nothing to do; under _changed."""
        others = any(s.running and not s.lost for s in self.slots)
        nothing_left = self._is_complete or (self._finished_parts > 0 and not others)
        return self._shall_end() or nothing_left


def _over(slot: Slot) -> tf.errors.UnavailableError:
    """The error of a thread whose worker's life is over."""
    return tf.errors.UnavailableError(
        None, None, f"worker:{slot.index}, or what it trains on, was lost meanwhile"
    )
