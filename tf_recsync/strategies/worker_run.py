"""Drives the workers through one pass over a dataset, by one thread or more for each.

A thread calls its worker again and again with as many steps as fit one call.
A worker that is lost takes its batches with it and is admitted again when it
is back; the others go on.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from absl import logging

from tf_recsync.cluster import Cluster, Probe, is_reachable
from tf_recsync.strategies import data_errors
from tf_recsync.strategies.holders import Holders
from tf_recsync.strategies.silence_watch import SilenceWatch, suspicious_after
from tf_recsync.strategies.slots import Crew, Losses, Slot, State
from tf_recsync.strategies.watched_calls import (
    check_parameter_servers,
    end_calls_to,
    silent_parameter_server,
)
from tf_recsync.synchronization.arrangement import Server

if TYPE_CHECKING:
    from tf_recsync.strategies.distributed_dataset import RegisteredDataset
    from tf_recsync.strategies.worker_datasets import WorkerDatasets

_STALL_SECONDS = 60.0  # After which a wait is logged, again and again.
_RETRY_SECONDS = 0.5  # Between attempts to readmit a lost worker.
_READMIT_SECONDS = 20.0  # For an attempt, once its server is up.
_LEAVE_SECONDS = 10.0  # For the workers to leave a pass that failed, at most.
_START_SECONDS = 120.0  # How long workers wait for each other at the start.
_MOST_BREAKS = 5  # Connections to a living worker that break without a call in between.


class WorkerRun:
    """One pass of all workers over a dataset.

    Args:
        cluster: the connected cluster.
        open_worker: `open_worker(slot)`, called in the worker's thread and
            device scope, makes `slot.state` (iterators and so on), anew after a
            worker was lost.
        call: `call(slot, n)` runs at most n steps and returns (steps done,
            whether the dataset has ended, a result or None).
        steps_per_call: how many steps one call may run.
        should_stop: asked between calls; True ends the pass early.
        worker_timeout: seconds without any worker after which the run fails.
        silence_timeout: seconds without a sign of life after which a server is given up.
        crew: is told which workers are lost or have nothing to do, so that the
            others don't wait for them, and can say who waits for whom; None if no
            worker ever waits for another.
        threads: how many threads call each worker, each with a slot of its own.
        spared: parameter servers that none of its steps needs, beside what the crew says.
        data: as workers get at it. Readers may have parts of it: then the cluster knows the
            pass. None if it is the coordinator's in any case.
    """

    def __init__(
        self,
        cluster: Cluster,
        open_worker: Callable[[Slot], None],
        call: Callable[[Slot, int], tuple[int, bool, Any]],
        steps_per_call: int,
        should_stop: Callable[[], bool],
        worker_timeout: float,
        silence_timeout: float,
        crew: Crew | None = None,
        threads: int = 1,
        data: RegisteredDataset | WorkerDatasets | None = None,
        spared: Iterable[Server] = (),
    ):
        self.data = data
        self._readers = 0 if data is None else data.readers
        self._cluster = cluster
        self._crew = crew
        self._open_worker = open_worker
        self._call = call
        self._steps_per_call = steps_per_call
        self._should_stop = should_stop
        self._worker_timeout = worker_timeout
        self._suspicious_after = suspicious_after(silence_timeout)
        self._leave_seconds = min(_LEAVE_SECONDS, silence_timeout)
        self._changed = threading.Condition()
        # All below is guarded by _changed.
        self._granted: float = 0.0
        self._taken = 0
        self._completed = 0
        self._is_held = False
        self._progressed = time.monotonic()  # When a step was done.
        self._longest_call = 0.0  # In seconds, of those that ended.
        self._stopped = False
        self._error: Exception | None = None
        self._gave_up_reader = self._gave_up_server = False
        self._holders = Holders(cluster, crew, spared)
        self._opened = 0
        self._began: float | None = None  # When all were open.
        self._finished_parts = 0  # Threads that have seen the end of the dataset.
        self._live = cluster.workers * threads  # Threads that have not finished.
        self._losses = Losses()
        self._actions: list[Callable[[], None]] = []  # When no thread is at work any more.
        self._results: dict[int, Any] = {}
        self._next_result = 0
        self._without_worker_since: float | None = None
        self._lost: set[int] = set()  # Workers that were lost and have not taken part since.
        # Of which workers, in which life of theirs, it was said that they were lost.
        self._told: set[tuple[int, tuple[int, int] | None]] = set()
        self._opening = [threading.Lock() for _ in range(cluster.workers)]
        self.slots = [Slot(i, i // threads) for i in range(cluster.workers * threads)]
        self._threads = [
            threading.Thread(
                target=self._drive, args=(slot,), name=f"recsync_worker_{slot.number}", daemon=True
            )
            for slot in self.slots
        ]
        self._watch = SilenceWatch(cluster, self._suspects, self._give_up, silence_timeout)
        for thread in self._threads:
            thread.start()
        cluster.add_pass(self)

    # The coordinator's side.

    def grant(self, steps: float) -> None:
        """Lets the workers run `steps` more steps (float("inf"): to the end)."""
        with self._changed:
            self._granted += steps
            self._changed.notify_all()

    @property
    def readers(self) -> int:
        """How many readers may have parts of its data."""
        return self._readers

    @property
    def is_open(self) -> bool:
        """Whether workers have not left it: they run steps, or wait for steps to be granted."""
        with self._changed:
            return self._live > 0

    @property
    def completed(self) -> int:
        """Steps finished so far."""
        with self._changed:
            return self._completed

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
        with self._leaving(), self._changed:
            self._wait_until(lambda: self._completed >= steps or self._idle())
            return not self._idle()

    def next_result(self) -> Any:
        """The result with the next number.

        Raises:
            StopIteration: when there are no more.
        """
        with self._leaving(), self._changed:
            self._wait_until(lambda: self._next_result in self._results or self._idle())
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
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Ends the pass with an error that somebody else has found."""
        with self._changed:
            if self._error is None:
                self._error = error
            self._stopped = True
            self._changed.notify_all()

    def when_done(self, action: Callable[[], None]) -> None:
        """Calls `action` when no thread is at work any more, in one of them, or here."""
        with self._changed:
            if self._live > 0:
                self._actions.append(action)
                return
        action()

    def expect_loss(self, worker: int) -> None:
        """If a worker's next call fails it is lost, also if it answers by then."""
        for slot in self.slots:
            if slot.index == worker:
                slot.silent = True

    def stop(self) -> None:
        """Ends the pass; waits for the calls in flight, with a limit."""
        self.request_stop()
        self.join(_STALL_SECONDS)

    def join(self, seconds: float) -> None:
        """Waits until the workers' threads have ended, for so many seconds at most."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

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
            self._is_held = True
            if self._error is None:
                self._wait_until(lambda: self._taken == self._completed or self._idle())

    def go_on(self) -> None:
        """Workers begin steps again."""
        with self._changed:
            self._is_held = False
            self._changed.notify_all()

    def settle(self) -> None:
        """Waits for the calls in flight of a pass that was stopped, with a limit."""
        if self._should_stop():
            self.stop()

    def _idle(self) -> bool:
        """Whether nothing runs and nothing will, unless more is granted."""
        if self._error is not None or self._live == 0:
            return True
        return self._completed >= self._granted and self._taken == self._completed

    def _wait_until(self, done: Callable[[], bool]) -> None:
        last = (self._completed, time.monotonic())
        while not done():
            self._changed.wait(timeout=1.0)
            now = time.monotonic()
            if self._completed != last[0]:
                last = (self._completed, now)
            elif now - last[1] > _STALL_SECONDS:
                last = (self._completed, now)
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
                    self._error = self._error or RuntimeError(message)
                    self._stopped = True
        if self._error is not None:
            self._stopped = True
            self._changed.notify_all()
            raise self._error

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
            since = slot.busy_since
            if slot.lost:
                parts.append(f"worker:{slot.index} is lost")
            elif since is not None:
                parts.append(f"worker:{slot.index} is in a call for {now - since:.0f} s")
        if self._crew is not None:
            parts.append(self._crew.describe())
        return ", ".join(parts) or "all workers are idle"

    # The watch's side.

    def _suspects(self) -> list[Server]:
        """The servers that may be silent: workers in long calls, and whom these may wait for."""
        with self._changed:
            now = time.monotonic()
            # As its thread sets it at any time, it is read once.
            busy = [(slot.index, slot.busy_since) for slot in self.slots]
            workers = [
                ("worker", index)
                for index, since in busy
                if since is not None and now - since > self._suspicious_after
            ]
        servers = []
        if workers:
            servers += [("ps", i) for i in range(self._cluster.ps)]
            servers += [("reader", i) for i in range(self._readers)]
        others = [] if self._crew is None else self._crew.waits_for(self._suspicious_after)
        return [*workers, *servers, *others]

    def _give_up(self, server: Server, seconds: float) -> None:
        """Has the calls fail that wait for a server that does not answer."""
        job, index = server
        if job == "reader":
            self._give_up_reader(index, seconds)
            return
        callers = None
        if server in self._holders.all:
            logging.warning("%s:%d has not answered for %.0f s.", job, index, seconds)
            callers = self._holders.give_up(server)
        elif job == "ps":
            self._gave_up_server = True
            self.fail(silent_parameter_server(index, seconds))
        else:
            self.expect_loss(index)
            logging.warning("worker:%d has not answered for %.0f s.", index, seconds)
        end_calls_to(self._cluster, job, index, callers)

    def _give_up_reader(self, index: int, seconds: float) -> None:
        with self._changed:
            # While others have batches, training goes on; a call may just be long.
            limit = max(seconds, 2 * self._longest_call)
            is_stuck = time.monotonic() - self._progressed >= limit
            waiting = {slot.index for slot in self.slots if slot.busy_since is not None}
        message = (
            f"reader:{index} has not answered for {seconds:.0f} s, and may have batches left; "
            "start it again"
        )
        if is_stuck:
            self._gave_up_reader = True
            self.fail(RuntimeError(message))
            for worker in waiting:
                self._cluster.cut_off("worker", worker)
        else:
            logging.warning("%s.", message)

    # The threads' side.

    def _drive(self, slot: Slot) -> None:
        try:
            with self._cluster.dispatch_scope(), tf.device(slot.device):
                try:
                    self._drive_in_scope(slot)
                finally:
                    self._close(slot, slot.state)
        except Exception as error:  # Handed to whoever waits.
            with self._changed:
                if self._error is None:
                    self._error = error
        finally:
            with self._changed:
                self._live -= 1
                actions: list[Callable[[], None]] = []
                if self._live == 0:
                    self._watch.end()
                    actions, self._actions = self._actions, []
                slot.running = False
                slot.busy_since = None
                self._changed.notify_all()
            if self._error is not None:
                self._release()
            for action in actions:
                action()

    def _release(self) -> None:
        """Has workers that wait for one whose step has failed end, too."""
        if self._crew is None:
            return
        while True:
            with self._changed:
                if self._live == 0:
                    return
            try:
                self._crew.release()
            except tf.errors.OpError as error:
                # What keeps the list is gone, and with it all waits.
                logging.debug("waits could not be ended: %s", error)
                return
            with self._changed:
                self._changed.wait_for(lambda: self._live == 0, timeout=_RETRY_SECONDS)

    def _drive_in_scope(self, slot: Slot) -> None:
        opened = self._guarded(slot, lambda: self._open(slot)) is not None
        if opened:
            self._tell_back(slot)
        with self._changed:
            # All start together, so that the first to be ready does not run alone.
            self._opened += 1
            self._changed.notify_all()
            deadline = time.monotonic() + _START_SECONDS
            # One that could not open ends the pass for all.
            while (
                self._opened < len(self.slots)
                and not (self._stopped or self._error)
                and time.monotonic() < deadline
            ):
                self._changed.wait(timeout=1.0)
            if self._began is None:
                self._began = time.time()
            slot.pass_began = self._began
        while True:
            if not opened:
                if not self._readmit(slot):
                    return
                opened = True
            n = self._take(wait=False)
            if n is None:
                self._leave(slot)
                n = self._take()
                if n and self._crew is not None:
                    resumed = self._guarded(slot, lambda: self._crew.resume(slot.number))
                    if resumed is None:
                        self._give_back(n, lost=False)
                        opened = False
                        continue
            if n == 0:
                self._leave(slot)
                return
            called = time.monotonic()
            outcome = self._guarded(slot, lambda n=n: self._call(slot, n))
            if outcome is None:
                slot.lost_steps += n
                self._give_back(n, lost=True)
                opened = False
                continue
            done, ended, result = outcome[0]
            self._account(n, done, result, time.monotonic() - called)
            slot.breaks = 0
            if ended:
                self._leave(slot)
                with self._changed:
                    self._finished_parts += 1
                return  # Its own part has ended; others may hold batches still.

    def _open(self, slot: Slot) -> None:
        # Tensors of Python's numbers TensorFlow caches: of two threads that send the same one
        # to a worker, one would use it there before the other has sent it.
        with self._opening[slot.index]:
            before = slot.state
            slot.life = self._cluster.life("worker", slot.index)
            slot.holder_lives = self._holders.lives(slot.index)
            try:
                self._open_worker(slot)
            finally:
                # Not earlier: the service ends a pass that all have left.
                if slot.state is not before:
                    self._close(slot, before)

    def _close(self, slot: Slot, state: State | None) -> None:
        if state is None:
            return
        slot.busy_since = time.monotonic()
        try:
            state.close(is_reachable=not slot.lost)
        except tf.errors.OpError as error:
            logging.debug("worker:%d is gone, and its iterator with it: %s", slot.index, error)

    def _leave(self, slot: Slot) -> None:
        if self._crew is not None:
            self._guarded(slot, lambda: self._crew.leave(slot.number))

    def _take(self, wait: bool = True) -> int | None:
        """Takes steps to run; 0 when the pass is over.

        While none are granted it waits, or returns None.
        """
        with self._changed:
            while True:
                if self._stopped or self._should_stop() or self._error is not None:
                    return 0
                free = self._granted - self._taken
                if free > 0 and not self._is_held:
                    n = int(min(free, self._steps_per_call))
                    self._taken += n
                    return n
                if not wait:
                    return None
                self._changed.wait(timeout=1.0)

    def _account(self, taken: int, done: int, result: Any, seconds: float) -> None:
        with self._changed:
            self._longest_call = max(self._longest_call, seconds)
            self._taken -= taken - done
            self._completed += done
            self._progressed = time.monotonic()
            if result is not None:
                number, value = result
                self._results[number] = value
            self._changed.notify_all()

    def _give_back(self, taken: int, lost: bool) -> None:
        """A call's steps were not done, or were lost with its worker."""
        with self._changed:
            self._taken -= taken
            if lost:
                self._losses += Losses(steps=taken)
            self._changed.notify_all()

    def _guarded(self, slot: Slot, action: Callable[[], Any]) -> tuple[Any] | None:
        """Runs `action`; None if the worker was lost meanwhile."""
        slot.busy_since = time.monotonic()
        try:
            return (action(),)
        except tf.errors.OpError as error:
            self._diagnose(slot, error)
            return None
        finally:
            slot.busy_since = None

    def _diagnose(self, slot: Slot, error: tf.errors.OpError) -> None:
        """Returns if the worker is lost; else raises what really is wrong."""
        if self._cluster.is_closed or self._gave_up_server:
            return  # Nobody needs to know more, and to ask might take long.
        check_parameter_servers(self._cluster, error, self._holders.all)
        if self._readers:
            data_errors.check(error)
        if self._holders.is_one_lost(slot.index, slot.holder_lives):
            self._lose_slot(slot, is_worker_lost=False)
            return
        is_same = slot.life == self._cluster.life("worker", slot.index)
        if not slot.silent and is_same and is_reachable(slot.device):
            forgotten = _is_unknown_function(error)
            unavailable = isinstance(error, tf.errors.UnavailableError)
            broken = forgotten or unavailable or _is_unknown_tensor(error)
            if not broken or slot.breaks == _MOST_BREAKS:
                raise error
            slot.breaks += 1
            slot.forgotten = forgotten
        reason = f"{type(error).__name__}: {error.message.partition(chr(10))[0]}"
        with self._changed:
            is_told = slot.index in self._lost or (slot.index, slot.life) in self._told
            is_away = slot.index in self._cluster.away  # Since a pass before, if it is not told.
            self._told.add((slot.index, slot.life))
        if is_told:
            logging.info("worker:%d is still away (%s).", slot.index, reason)
        elif is_away:
            logging.warning("worker:%d is still away; the others begin without it.", slot.index)
        elif not slot.life[0]:  # It was not up when this process connected.
            logging.warning("worker:%d is not up yet; the others begin without it.", slot.index)
        else:
            logging.warning(
                "worker:%d was lost in the middle of a pass (%s); the batches in its hands are "
                "lost, the others go on.",
                slot.index,
                reason,
            )
        self._lose_slot(slot, is_worker_lost=True)

    def _lose_slot(self, slot: Slot, is_worker_lost: bool) -> None:
        """A worker's thread can't go on: it is gone, or what it trains on."""
        with self._changed:
            slot.lost = True
            # The worker is lost when the last of its threads has noticed.
            if self._has_live_thread(slot.index):
                return
        if self._crew is not None and is_worker_lost:
            try:
                self._crew.lose(slot.index)
            except tf.errors.OpError:
                # What it trained on may go meanwhile; then it is lost when that is back.
                if not self._holders.is_one_lost(slot.index, slot.holder_lives):
                    raise
                is_worker_lost = False
        if self._crew is not None and not is_worker_lost:
            self._crew.suspend(slot.index)
        with self._changed:
            slot.without_holder = not is_worker_lost
            if is_worker_lost:
                self._cluster.away.add(slot.index)
                if slot.index not in self._lost:
                    self._lost.add(slot.index)
                    self._losses += Losses(workers=1)
            if all(s.lost for s in self.slots) and self._without_worker_since is None:
                self._without_worker_since = time.monotonic()

    def _has_live_thread(self, worker: int) -> bool:
        """Whether a thread of a worker is at work, and has not found it lost."""
        return any(s.index == worker and s.running and not s.lost for s in self.slots)

    def _readmit(self, slot: Slot) -> bool:
        """Waits until a lost worker is back, and opens it; False when the pass is over."""
        while True:
            with self._changed:
                self._changed.wait(timeout=_RETRY_SECONDS)
                if self._is_over():
                    return False
            if not self._is_back(slot):
                continue
            with self._changed:
                slot.lost = slot.silent = False
                self._without_worker_since = None
            if self._guarded(slot, lambda: self._open(slot)) is not None:
                self._tell_back(slot)
                return True

    def _tell_back(self, slot: Slot) -> None:
        """A worker takes part; if it was lost, in this pass or one before, it is back."""
        with self._changed:
            was_away = slot.index in self._cluster.away | self._lost
            self._cluster.away.discard(slot.index)
            self._lost.discard(slot.index)
            self._told.discard((slot.index, slot.life))
        if was_away:
            logging.warning("worker:%d is back and takes part again.", slot.index)

    def _is_over(self) -> bool:
        """Whether a lost worker that comes back would find nothing to do; under _changed."""
        others = any(s.running and not s.lost for s in self.slots)
        nothing_left = self._finished_parts > 0 and not others
        return self._stopped or self._should_stop() or self._error is not None or nothing_left

    def _is_back(self, slot: Slot) -> bool:
        """Whether a lost worker runs ops again; readmits one that was restarted."""
        if not self._holders.are_back(slot.index, self._ask_server, self._take_in):
            return False
        if slot.without_holder:
            if self._ask(slot).reachable:
                return True
            # It went while what it trained on was away: nobody was told so far.
            logging.warning("worker:%d was lost, too; the others go on.", slot.index)
            self._lose_slot(slot, is_worker_lost=True)
        if slot.silent:
            probe = self._ask(slot)
            if probe.reachable or not probe.answered:
                return probe.reachable
            # It answers that it doesn't know us: it was started again.
        if self._has_live_thread(slot.index):
            # Another one has readmitted it, or will find out that it is lost, too.
            return self._ask(slot).reachable
        if not self._cluster.is_up("worker", slot.index):
            return False
        if not self._take_in(("worker", slot.index), slot.forgotten):
            return False
        slot.forgotten = False
        return self._ask(slot).reachable

    def _take_in(self, server: Server, is_new: bool = False) -> bool:
        """Readmits a server, without others that are away; whether that was possible.

        Args:
            server: which one.
            is_new: whether it shall be taken for one that was started again.
        """
        with self._changed:
            away = [("worker", s.index) for s in self.slots if s.lost]
        away = sorted({*away, *self._holders.all} - {server})
        try:
            without = [other for other in away if not self._cluster.is_up(*other)]
            pause = contextlib.nullcontext() if self._crew is None else self._crew.pause()
            with pause:
                self._cluster.readmit(_READMIT_SECONDS, [server] if is_new else [], without)
        except (RuntimeError, tf.errors.OpError) as error:
            logging.log_every_n_seconds(
                logging.INFO, "%s:%d is not back yet: %s", 30, *server, error
            )
            return False
        return True

    def _ask(self, slot: Slot) -> Probe:
        """Asks a worker for a sign of life; waits for it, with a limit."""
        return self._ask_server("worker", slot.index)

    def _ask_server(self, job: str, index: int) -> Probe:
        """Asks a server for a sign of life; waits for it, with a limit."""
        probe = self._cluster.probe(job, index)
        deadline = time.monotonic() + _READMIT_SECONDS
        with self._changed:
            while probe.is_alive() and not self._is_over():
                if time.monotonic() >= deadline:
                    self._cluster.cut_off(job, index)
                    break
                self._changed.wait(timeout=0.1)
        return probe


def _is_unknown_function(error: tf.errors.OpError) -> bool:
    """Whether a server has not got a function: it was traced while the connection was broken."""
    if isinstance(error, tf.errors.FailedPreconditionError):  # The function of a dataset.
        return "Could not find required function definition" in error.message
    return isinstance(error, tf.errors.NotFoundError) and "name of a function" in error.message


def _is_unknown_tensor(error: tf.errors.OpError) -> bool:
    """Whether a server has not got a tensor: it was readmitted while the call was made."""
    return isinstance(error, tf.errors.InvalidArgumentError) and (
        "Unable to find the relevant tensor remote_handle" in error.message
    )
