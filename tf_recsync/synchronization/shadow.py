"""Trainers with copies of their own, synchronized beside training (ShadowSync).

What a synchronization does is the algorithm's (shadow_algorithms.py), when it is done the
schedule's (shadow_schedule.py). Here trainers get what they need, loops call the one at the
times of the other, and it is seen to that none waits for one that is gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf
from absl import logging
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from tf_recsync.cluster import Cluster, Probe, device_of
from tf_recsync.synchronization import links
from tf_recsync.synchronization.copies import Copies
from tf_recsync.synchronization.remote_values import on_worker
from tf_recsync.synchronization.shadow_algorithms import Algorithm, Center, Trainer
from tf_recsync.synchronization.shadow_schedule import Foreground, Gate, Shadow

_ATTEMPTS = 5  # At a synchronization that fails though everybody is there.
_RETRY_SECONDS = 0.2
_JOIN_SECONDS = 60.0
_PAUSE_SECONDS = 10.0
_ANSWER_SECONDS = 3.0  # For a sign of life.
_ASK_AGAIN_SECONDS = 5.0  # Between two questions to one that gave none.
_CHIEF = "/job:chief/replica:0/task:0/device:CPU:0"
# Servers build their parts of a function at the first call, one after the other.
_building = threading.Lock()


@dataclasses.dataclass(frozen=True)
class SyncReport:
    """What synchronization has done since the model began to train.

    Attributes:
        syncs: of each trainer, those that it took part in.
        seconds: of each trainer, the time that they took.
        steps: of all threads of all trainers, those that they have finished.
        trained_seconds: the seconds that trainers trained: the length of all epochs.
        elements: the parameters that are synchronized.
        sync_ps_bytes: what the sync PSs have received and sent, as they have counted.
    """

    syncs: list[int]
    seconds: list[float]
    steps: int
    trained_seconds: float
    elements: int
    sync_ps_bytes: int

    @property
    def syncs_per_second(self) -> float:
        """Of all trainers together."""
        return sum(self.syncs) / self.trained_seconds if self.trained_seconds else 0.0


class ShadowGroup:
    """The trainers of a model, while it trains; a `Synchronizer`.

    Args:
        algorithm: how copies are synchronized.
        schedule: when.
        cluster: the connected cluster.
        copies: the trainers' parameters, and what belongs to them.
        parameters: how many of the copied variables are parameters: the first ones.
        counters: which of the copied variables count the staleness of updates.
        sync_ps: the task indices of the sync PSs.
        threads: of each trainer.
        bandwidths: returns artificial bandwidths, in bytes per second by server's device.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        schedule: Shadow | Foreground,
        cluster: Cluster,
        copies: Copies,
        parameters: int,
        counters: Sequence[int],
        sync_ps: Sequence[int],
        threads: int,
        bandwidths: Callable[[], dict[str, float]],
    ):
        self.copies = copies
        self.fail: Callable[[Exception], None] = _raise
        self._algorithm = algorithm
        self._schedule = schedule
        self._cluster = cluster
        self._sync_ps = list(sync_ps)
        self._threads = threads
        self._bandwidths = bandwidths
        self._parameters = parameters
        self._sizes = [v.shape.num_elements() for v in copies.variables[:parameters]]
        self._counters = list(counters)
        # What each trainer had counted when it was last asked, and those that were lost.
        self._counted: dict[int, list[np.ndarray]] = {}
        self._counted_before: list[list[np.ndarray]] = []
        self._lock = threading.RLock()
        # Of each trainer that is not lost: the algorithm's vectors, by name.
        self._there: dict[int, dict[str, tf.Variable]] = {}
        self._lost: set[int] = set()
        # Those of them that gave no sign of life, and when they were last asked for one.
        self._absent: dict[int, float] = {}
        self._has_begun = False
        # The algorithm's vectors of trainers while there is no other trainer to have them from.
        self._first_states: dict[str, np.ndarray] = {}
        self._restored: dict[str, np.ndarray] | None = None  # The extras of a checkpoint.
        # The copies of a checkpoint of other trainers, and their mean.
        self._merged: tuple[list[list[np.ndarray]], list[np.ndarray]] | None = None
        self._parts: list[tf.Variable] = []  # Of the center.
        self._traffic: list[tf.Variable] = []
        self._functions: dict[tuple[int, ...], Callable] = {}
        self._called: set[tuple[int, ...]] = set()
        self._limits: dict[str, float] = {}
        self._gate = Gate()
        self._since: dict[int, int] = {}  # Iterations since the last synchronization, by thread.
        self._due: dict[int, float] = {}  # When a trainer's next one is due, or all trainers'.
        self._pausing = threading.Lock()  # One pause at a time.
        self._changed = threading.Condition()
        # Guarded by _changed.
        self._ending = True
        self._away: set[int] = set()  # Threads that have nothing to do.
        self._is_paused = False
        # When each synchronization under way began, and of whom; by its thread.
        self._calls: dict[int, tuple[float, tuple[int, ...]]] = {}
        self._loops: dict[int, threading.Thread] = {}
        self._syncs = [0] * cluster.workers
        self._seconds = [0.0] * cluster.workers
        self._steps = 0
        self._trained = 0.0
        self._began: float | None = None

    # A trainer's life. The threads that drive the workers call these.

    def open(self, worker: int) -> None:
        """Makes what a trainer needs, in its device scope: at the start, or when it is back."""
        # Only one thread of a worker opens it at a time.
        with self._lock:
            if worker in self._there:
                return
            was_lost = worker in self._lost
        if was_lost:
            self._come_back(worker)
        else:
            self.copies.ensure(worker)
        states = {
            name: tf.Variable(on_worker(value), trainable=False)
            for name, value in self._current_states().items()
        }
        with self._lock:
            self._there[worker] = states
            self._lost.discard(worker)
            self._absent.pop(worker, None)

    def handles(self, worker: int) -> list[tf.Tensor]:
        """What a trainer's steps take: its copies."""
        return self.copies.handles(worker)

    def lose(self, worker: int) -> None:
        """A trainer is gone; the others go on."""
        with self._lock:
            self._there.pop(worker, None)
            self._absent.pop(worker, None)
            self._lost.add(worker)
            self.copies.drop(worker)
            # The next one's server has to build its parts of functions again.
            self._called.clear()
            if worker in self._counted:
                self._counted_before.append(self._counted.pop(worker))
        for thread in range(worker * self._threads, (worker + 1) * self._threads):
            self.leave(thread)

    def leave(self, thread: int) -> None:
        """A thread has nothing to do at the moment; loops end with the last one."""
        self._gate.leave(thread)
        with self._changed:
            self._away.add(thread)
            self._changed.notify_all()

    def release(self) -> None:
        """Ends all waits."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        self._gate.end()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Inside, no trainer calls another server to synchronize."""
        with self._pausing:
            with self._changed:
                self._is_paused = True
                if not self._changed.wait_for(lambda: not self._calls, _PAUSE_SECONDS):
                    logging.warning(
                        "Synchronizations did not end within %g s.",
                        _PAUSE_SECONDS,
                    )
            try:
                yield
            finally:
                with self._changed:
                    self._is_paused = False
                    self._changed.notify_all()

    def waits_for(self, seconds: float) -> list[tuple[str, int]]:
        """The servers, job and index, that synchronizations have waited for so long."""
        with self._changed:
            since = time.monotonic() - seconds
            late = [members for began, members in self._calls.values() if began < since]
        servers = [("ps", ps) for ps in self._sync_ps] if late else []
        return [*servers, *(("worker", worker) for members in late for worker in members)]

    def describe(self) -> str:
        """Who waits for whom, in words."""
        late = self._gate.awaited()
        if not late:
            return "no trainer waits for another"
        names = [f"worker {t // self._threads}, thread {t % self._threads}" for t in late]
        return f"threads wait to synchronize with {'; '.join(names)}"

    # An epoch.

    def begin(self) -> None:
        """Makes ready for an epoch; nobody may be at work."""
        limits = self._bandwidths()
        with self._lock:
            if limits != self._limits:
                self._functions.clear()
                self._called.clear()
            self._limits = limits
            self._follow_users()
        self._gate.begin()
        with self._changed:
            self._ending = False
            self._away.clear()

    def carry_on(self) -> None:
        """Starts the loops, if they do not run."""
        with self._changed:
            if self._ending:
                return
            if self._began is None:
                self._began = time.monotonic()
            if not self._parameters:
                return
            if isinstance(self._schedule, Foreground) and (
                self._algorithm.is_central or self._schedule.gap is not None
            ):
                return  # The trainers' threads see to it.
            for key in sorted(self._there) if self._algorithm.is_central else [-1]:
                loop = self._loops.get(key)
                if loop is None or not loop.is_alive():
                    self._loops[key] = threading.Thread(
                        target=self._loop, args=(key,), name=f"recsync_shadow_{key}", daemon=True
                    )
                    self._loops[key].start()

    def end(self) -> None:
        """Ends the loops; the steps are done."""
        self.release()
        deadline = time.monotonic() + _JOIN_SECONDS
        for loop in list(self._loops.values()):
            loop.join(max(0.0, deadline - time.monotonic()))
        self._loops.clear()
        if self._began is not None:
            self._trained += time.monotonic() - self._began
            self._began = None

    def report(self) -> SyncReport:
        """What synchronization has done."""
        trained = self._trained
        if self._began is not None:
            trained += time.monotonic() - self._began
        return SyncReport(
            syncs=list(self._syncs),
            seconds=list(self._seconds),
            steps=self._steps,
            trained_seconds=trained,
            elements=sum(self._sizes),
            sync_ps_bytes=sum(int(np.asarray(v.read_value())) for v in self._traffic),
        )

    def counted(self) -> list[list[np.ndarray]]:
        """What each trainer has counted of the staleness of updates, those that were lost included.

        Returns:
            For each of them, an array for each of the counters; of a trainer that does not
            answer, and of one that was lost, what is known.
        """
        for worker in self.copies.workers:
            # One that is lost its own threads find out.
            with contextlib.suppress(tf.errors.OpError, KeyError):
                values = self.copies.values(worker)
                with self._lock:
                    if worker not in self._lost:
                        self._counted[worker] = [values[i] for i in self._counters]
        with self._lock:
            return [*self._counted_before, *self._counted.values()]

    def extras(self) -> dict[str, np.ndarray]:
        """What a checkpoint keeps besides the copies: the center, and the algorithm's vectors."""
        if self._restored is not None:
            return dict(self._restored)  # Nobody has trained since.
        kept = {f"state_{name}": value for name, value in self._current_states().items()}
        if self._parts:
            kept["center"] = self._center()
        return kept

    def restore(
        self, values: Mapping[int, Sequence[np.ndarray]], extras: Mapping[str, np.ndarray]
    ) -> None:
        """Trainers go on with these copies, and this center; nobody may be at work.

        Args:
            values: by worker. If there were more or fewer, all begin with the mean.
            extras: as above; those of another algorithm are left out.
        """
        workers = range(self._cluster.workers)
        if values and set(values) != set(workers):
            logging.warning(
                "The checkpoint holds the parameters of %d trainers, and there are %d: all of "
                "them begin with the mean.",
                len(values),
                len(workers),
            )
            mean = self.copies.mean(list(values.values()))
            self._merged = [list(copy) for copy in values.values()], mean
            values = dict.fromkeys(workers, mean)
        if values:
            self.copies.load(values)
        with self._lock:
            self._restored = {
                name: value
                for name, value in extras.items()
                if name == "center" or name.startswith("state_")
            }

    # In the foreground: the trainers' threads call these.

    def steps_until_sync(self, thread: int) -> int | None:
        """The iterations of a thread before it synchronizes; None if it need not count them."""
        gap = getattr(self._schedule, "gap", None)
        return None if gap is None else gap - self._since.get(thread, 0)

    @contextlib.contextmanager
    def training(self, thread: int) -> Iterator[None]:
        """Inside, a thread trains."""
        with self._changed:
            self._away.discard(thread)
        if isinstance(self._schedule, Shadow) or self._algorithm.is_central:
            yield
            return
        self._gate.enter(thread)
        try:
            yield
        except BaseException:
            # Nobody shall wait for it, also as long as its trainer's other threads live.
            self._gate.leave(thread)
            raise
        self._gate.exit(thread)

    def trained(self, thread: int, steps: int) -> None:
        """A thread has done so many iterations: synchronizes if it is time."""
        with self._changed:
            self._steps += steps
        if isinstance(self._schedule, Shadow) or not self._parameters:
            return
        worker = thread // self._threads
        if self._schedule.gap is not None:
            self._since[thread] = self._since.get(thread, 0) + steps
            if self._since[thread] < self._schedule.gap:
                return
            self._since[thread] = 0
            if self._algorithm.is_central:
                self._sync_surely(worker)
            else:
                self._gate.meet(thread, lambda: self._sync_surely(-1))
        elif self._algorithm.is_central and self._is_due(worker):
            self._sync_surely(worker)

    def _is_due(self, worker: int) -> bool:
        """Whether a trainer has to synchronize now; then it is some thread's turn, once."""
        now = time.monotonic()
        with self._lock:
            due = self._due.setdefault(worker, now + self._schedule.interval)
            if now < due:
                return False
            # After a break, as between epochs, none are made up for.
            late = now - due > self._schedule.interval
            self._due[worker] = (now if late else due) + self._schedule.interval
            return True

    # Inside.

    def _loop(self, key: int) -> None:
        """Synchronizes one trainer, or with a key of -1 all, again and again."""
        interval = (
            self._schedule.min_interval
            if isinstance(self._schedule, Shadow)
            else self._schedule.interval
        )
        device = device_of("worker", max(key, 0))
        with self._cluster.dispatch_scope(), tf.device(device):
            is_foreground = isinstance(self._schedule, Foreground)
            if key not in self._due:
                self._due[key] = time.monotonic() + (interval if is_foreground else 0.0)
            try:
                while self._wait_until_due(key):
                    self._due[key] = time.monotonic() + interval
                    if key >= 0 and key not in self._there:
                        return
                    if is_foreground:
                        self._gate.close_for(lambda: self._sync_surely(key))
                    else:
                        self._sync_surely(key)
            except tf.errors.OpError as error:
                # Said, or the trainer's own threads find out.
                logging.debug("A loop of synchronizations ends: %s", error)
            except Exception as error:
                # As of an algorithm that can't be traced.
                self.fail(error)

    def _wait_until_due(self, key: int) -> bool:
        """Whether a loop's next synchronization is due; False if it is to end."""

        def is_over() -> bool:
            everybody = self._cluster.workers * self._threads
            return self._ending or len(self._away) == everybody

        with self._changed:
            rest = max(0.0, self._due[key] - time.monotonic())
            self._changed.wait_for(is_over, min(rest, threading.TIMEOUT_MAX))
            return not is_over()

    def _may_try_again(self, key: int, error: tf.errors.OpError, failures: int) -> bool:
        """Whether a synchronization that failed, for so many times in a row, is made again."""
        if self._ending:
            return False
        asked = [Probe(self._cluster, device_of("ps", ps)) for ps in self._sync_ps]
        _wait_for_answers(asked)
        for ps, probe in zip(self._sync_ps, asked, strict=True):
            # One that only is silent may be busy: that is the silence watch's to judge.
            if not probe.is_alive() and not probe.reachable:
                self.fail(
                    RuntimeError(
                        f"sync PS ps:{ps} was lost, and its part of the central copy with it; "
                        "start it again and load a checkpoint into a new model"
                    )
                )
                return False
        members = [key] if key >= 0 else self._members()
        gone = [worker for worker in members if not self._answers(worker)]
        if gone and key >= 0:
            return False  # The trainer's own threads find out.
        # With all-reduce they may wait for this very synchronization: the others go on without.
        self._absent.update(dict.fromkeys(gone, time.monotonic()))
        if not gone:
            if failures >= _ATTEMPTS:
                self.fail(error)
                return False
            logging.warning(
                "A synchronization failed and is made again (%d of %d): %s",
                failures,
                _ATTEMPTS - 1,
                error.message.partition("\n")[0],
            )
        self._rest()
        return not self._ending

    def _rest(self) -> None:
        """Waits for a moment."""
        with self._changed:
            self._changed.wait_for(lambda: self._ending, _RETRY_SECONDS)

    def _answers(self, worker: int) -> bool:
        """Whether a trainer gives a sign of life soon."""
        probe = Probe(self._cluster, device_of("worker", worker))
        _wait_for_answers([probe])
        return probe.reachable

    def _members(self) -> list[int]:
        """The trainers that are there and give signs of life."""
        for worker, asked in list(self._absent.items()):
            if time.monotonic() - asked > _ASK_AGAIN_SECONDS:
                if self._answers(worker):
                    self._absent.pop(worker, None)
                else:
                    self._absent[worker] = time.monotonic()
        return [worker for worker in sorted(self._there) if worker not in self._absent]

    def _sync_all(self) -> None:
        members = self._members()
        if members:
            # Called here, for a call ends when the connection to any of the members does.
            with tf.device(_CHIEF):
                self._sync(members)
        else:
            self._rest()  # Until one is back.

    def _sync_surely(self, key: int) -> None:
        """Synchronizes one trainer, or with a key of -1 all that are left, if need be again."""
        failures = 0
        while True:
            try:
                if key >= 0:
                    self._sync([key])
                else:
                    self._sync_all()
                return
            except tf.errors.OpError as error:
                absent = len(self._absent)
                failures += 1
                if not self._may_try_again(key, error, failures):
                    raise
                if len(self._absent) > absent:
                    failures = 0  # That was why.

    def _sync(self, members: Sequence[int]) -> None:
        """Synchronizes once, from this thread, in the device scope of the first member."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_paused or self._ending)
            if self._ending:
                return
            began = time.monotonic()
            self._calls[threading.get_ident()] = began, tuple(members)
        try:
            with self._lock:
                if any(worker not in self._there for worker in members):
                    return
                handles = [h for worker in members for h in self._handles(worker)]
                function = self._function(members)
                is_new = tuple(members) not in self._called
            with _building if is_new else contextlib.nullcontext():
                function(*handles)
            self._called.add(tuple(members))
            seconds = time.monotonic() - began
            with self._changed:
                for worker in members:
                    self._syncs[worker] += 1
                    self._seconds[worker] += seconds
        finally:
            with self._changed:
                del self._calls[threading.get_ident()]
                self._changed.notify_all()

    def _handles(self, worker: int) -> list[tf.Tensor]:
        states = self._there[worker]
        parameters = self.copies.handles(worker)[: self._parameters]
        return [*parameters, *(states[name].handle for name in sorted(states))]

    def _function(self, members: Sequence[int]) -> Callable:
        """What synchronizes these trainers; of the handles of all of them."""
        # One for any trainer where they synchronize by themselves.
        key = () if self._algorithm.is_central else tuple(members)
        if key in self._functions:
            return self._functions[key]
        names = sorted(self._first_states)
        each = self._parameters + len(names)
        devices = [device_of("worker", w) + "/device:CPU:0" for w in key] or [""]

        def sync(*handles):
            trainers = []
            for i, device in enumerate(devices):
                own = handles[i * each : (i + 1) * each]
                states = dict(zip(names, own[self._parameters :], strict=True))
                parameters = own[: self._parameters]
                trainers.append(Trainer(device, parameters, self._sizes, states))
            center = Center(self._parts, self._traffic) if self._parts else None
            self._algorithm.sync(trainers, center)

        specs = [tf.TensorSpec([], tf.resource)] * (each * len(devices))
        with tf.device(None), links.limited(self._limits):
            function = tf.function(sync, autograph=False).get_concrete_function(*specs)
        self._functions[key] = function
        return function

    def _follow_users(self) -> None:
        """Begins with the parameters as users see them, or takes over what they assigned.

        What came from a checkpoint takes the place of both.
        """
        if not self._parameters:
            return
        if self._merged is not None:
            self._begin_with_merged()
        self._follow_assignments()
        if self._restored is None:
            return
        restored, self._restored = self._restored, None
        # A checkpoint of another algorithm has no center, or other vectors.
        start = self._packed()
        states = {
            name: restored.get(f"state_{name}", value)
            for name, value in self._checked_states(start).items()
        }
        self._set(restored.get("center", start), states)

    def _begin_with_merged(self) -> None:
        """All trainers begin with the mean of a checkpoint's.

        What users see is that of one of its trainers, perhaps: the checkpoint of the model
        writes that after the trainers' states were read. What they have assigned themselves
        stays.
        """
        (copies, mean), self._merged = self._merged, None
        values = []
        for i, shown in enumerate(self.copies.shown):
            is_of_checkpoint = any(np.array_equal(shown, copy[i]) for copy in copies)
            values.append(mean[i] if is_of_checkpoint else shown)
        self.copies.load(dict.fromkeys(range(self._cluster.workers), values))

    def _packed(self) -> np.ndarray:
        """The parameters as users see them, one after the other."""
        shown = self.copies.shown[: self._parameters]
        return np.concatenate([np.ravel(value) for value in shown]).astype(np.float32)

    def _checked_states(self, start: np.ndarray) -> dict[str, np.ndarray]:
        """The algorithm's vectors for a trainer that begins with these parameters."""
        states = self._algorithm.states(start)
        for name, value in states.items():
            if "/" in name:
                raise ValueError(
                    f"{type(self._algorithm).__name__}.states must give names without a slash, "
                    f"not {name!r}"
                )
            if np.shape(value) != start.shape or np.asarray(value).dtype != np.float32:
                raise ValueError(
                    f"{type(self._algorithm).__name__}.states must give float32 arrays of "
                    f"{start.size} elements; {name!r} has the shape {np.shape(value)} and the "
                    f"type {np.asarray(value).dtype}"
                )
        return states

    def _follow_assignments(self) -> None:
        start = self._packed()
        is_assigned = any(self.copies.assigned[: self._parameters])
        if not self._parts and self._algorithm.is_central:
            for ps, (first, last) in zip(self._sync_ps, self._ranges(), strict=True):
                with tf.device(device_of("ps", ps) + "/device:CPU:0"):
                    # Not a variable of the strategy, in whose scope this may be.
                    self._parts.append(ResourceVariable(start[first:last], trainable=False))
                    self._traffic.append(ResourceVariable(np.int64(0), trainable=False))
        if is_assigned or not self._has_begun:
            self._set(start, self._checked_states(start))
        self._has_begun = True

    def _set(self, center: np.ndarray, states: dict[str, np.ndarray]) -> None:
        """Sets the sync PSs' copy, if there is one, and the vectors of every trainer."""
        self._first_states = states
        for part, (first, last) in zip(self._parts, self._ranges(), strict=True):
            part.assign(center[first:last])
        for worker, own in self._there.items():
            with self._cluster.dispatch_scope(), tf.device(device_of("worker", worker)):
                for name, value in states.items():
                    own[name].assign(on_worker(value))

    def _center(self) -> np.ndarray:
        """The sync PSs' copy."""
        return np.concatenate([np.asarray(part.read_value()) for part in self._parts])

    def _ranges(self) -> list[tuple[int, int]]:
        """Which elements each sync PS has."""
        total, count = sum(self._sizes), len(self._sync_ps)
        if not count:
            return []
        bounds = [total * i // count for i in range(count + 1)]
        return list(zip(bounds, bounds[1:], strict=False))

    def _current_states(self) -> dict[str, np.ndarray]:
        """The algorithm's vectors for a trainer that has none: another's, if there is one."""
        with self._lock:
            others = list(self._there.items())
        for worker, states in others:
            # One that is lost its own threads find out.
            with (
                contextlib.suppress(tf.errors.OpError),
                self._cluster.dispatch_scope(),
                tf.device(device_of("worker", worker)),
            ):
                self._first_states = {n: np.asarray(v.read_value()) for n, v in states.items()}
                break
        return self._first_states

    def _come_back(self, worker: int) -> None:
        """A lost trainer begins with the mean of the others, or with what users see."""
        with self._lock:
            others = list(self._there)
        taken = []
        for other in others:
            # One that is lost its own threads find out.
            with contextlib.suppress(tf.errors.OpError, KeyError):
                taken.append(self.copies.values(other))
        values = self.copies.mean(taken) if taken else list(self.copies.shown)
        if self._parts:
            # The center has what the lost one had learned, too.
            pieces = np.split(self._center(), np.cumsum(self._sizes)[:-1])
            for i, piece in enumerate(pieces):
                values[i] = piece.reshape(self.copies.variables[i].shape)
        for i in self._counters:
            values[i] = np.zeros_like(values[i])
        self.copies.make(worker, values)
        logging.warning(
            "Worker %d goes on with the parameters of %s.",
            worker,
            "the sync PSs" if self._parts else "the other trainers",
        )


def _wait_for_answers(probes: Sequence[Probe]) -> None:
    """Waits for servers that were asked for a sign of life, not for long."""
    deadline = time.monotonic() + _ANSWER_SECONDS
    for probe in probes:
        probe.join(max(0.0, deadline - time.monotonic()))


def _raise(error: Exception) -> None:
    raise error
