"""Groups of trainers whose servers exchange parameters beside training (Hop).

Each server of a group is a worker of Hop, which exchanges its shard with the servers of the same
number in the neighboring groups (hop_exchange.py). Here a loop for each of them takes it from one
iteration to the next, as its group's updates are applied; trainers know nothing of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf
from absl import logging

from tf_recsync import ops
from tf_recsync.cluster import Cluster, Server, ask
from tf_recsync.ops import hop
from tf_recsync.synchronization.arrangement import Arrangement, Group
from tf_recsync.synchronization.copies import Copies
from tf_recsync.synchronization.hop import HopSynchronizer
from tf_recsync.synchronization.hop_events import EventLog
from tf_recsync.synchronization.hop_exchange import Exchange
from tf_recsync.synchronization.hop_protocol import Protocol
from tf_recsync.synchronization.hop_reports import WorkerReport
from tf_recsync.synchronization.remote_values import at
from tf_recsync.synchronization.staleness_counts import StalenessCounts
from tf_recsync.synchronization.sync_report import SyncCounts, SyncReport

_LEAVE_SECONDS = 1.0  # After which neighbors don't wait for a group that has nothing to do.
_ATTEMPTS = 5  # At an iteration that fails though everybody is there.
_RETRY_SECONDS = 0.5  # Between two of them.
_JOIN_SECONDS = 60.0
_RELEASE_SECONDS = 5.0
_INTERRUPT_SECONDS = 0.1  # Between two attempts to end what a loop waits for.


@dataclasses.dataclass(eq=False)
class _Loop:
    """What takes a server of a group from one iteration to the next.

    Attributes:
        group: the group's number.
        exchange: that of the server's shard.
        holder: the server, job and index.
        copy: the group's, of which the shard is a part.
        parameters: the handles of the shard's.
        thread: its own.
        least: the steps of the group's trainers before which it need not look whether an iteration
            is due.
        busy_since: when the call began that it is in (time.monotonic()), or None.
        called: whom that call waits for.
    """

    group: int
    exchange: Exchange
    holder: Server
    copy: list[tf.Variable]
    parameters: list[tf.Tensor]
    thread: threading.Thread | None = None
    least: int = 0
    busy_since: float | None = None
    called: tuple[Server, ...] = ()


class GroupHopSynchronizer(HopSynchronizer):
    """The groups of trainers of a model, whose servers exchange parameters; a `Synchronizer`.

    An iteration of a server begins when its group has applied so many updates since it began the
    one before. It sends the parameters as they are then, waits for its neighbors' by Hop's rules,
    and adds to its own what their average differs from what it has sent. So the updates that are
    applied meanwhile stay whole.

    Args:
        protocol: how servers exchange.
        updates: applied updates of an iteration.
        cluster: the connected cluster.
        arrangement: the groups.
        copies: the groups' parameters, and what belongs to them.
        parameters: how many of the copied variables are parameters: the first ones.
        counters: which of the copied variables count the staleness of updates.
        global_step: which of them counts the updates that a group has applied.
        stall_seconds: after which somebody's wait is logged.
        bandwidths: returns artificial bandwidths, in bytes per second by server's device.
        threads: that train for each trainer.
    """

    def __init__(
        self,
        protocol: Protocol,
        updates: int,
        cluster: Cluster,
        arrangement: Arrangement,
        copies: Copies,
        parameters: int,
        counters: Sequence[int],
        global_step: int,
        stall_seconds: float,
        bandwidths: Callable[[], dict[str, float]],
        threads: int,
    ):
        shards = [variable.shard for variable in copies.variables[:parameters]]
        # The numbers of each shard's parameters, in the order of the exchanges.
        self._parameters = {
            shard: [i for i, own in enumerate(shards) if own == shard]
            for shard in sorted(set(shards))
        }
        super().__init__(
            protocol,
            cluster,
            copies,
            tf.float32,
            stall_seconds,
            bandwidths,
            EventLog(),
            list(self._parameters),
        )
        self._updates = updates
        # An iteration is due after some steps, which calls report when they end.
        self._threads = threads
        nets = len(arrangement.groups[0].trainers) * threads
        self.most_steps = max(1, updates // (2 * nets))
        self._cluster = cluster
        self._arrangement = arrangement
        self._global_step = global_step
        self._staleness = StalenessCounts(copies, counters)
        self._counts = SyncCounts(len(arrangement.groups))
        self._elements = sum(v.shape.num_elements() for v in copies.variables[:parameters])
        self._lock = threading.Lock()
        # Of each group: a step of one wakes no loop of the others.
        self._changed = [threading.Condition(self._lock) for _ in arrangement.groups]
        # Guarded by _lock.
        self._ending = True
        self._pauses = 0  # In how many of them everything stands still.
        # Trainers' threads that have nothing to do: lost, or not begun with the epoch.
        self._away: set[int] = set()
        self._steps = [0] * len(arrangement.groups)  # That trainers have reported.
        # Updates that each group had applied when the epoch began, if it has been there since.
        self._applied_before: dict[int, int] = {}
        self._loops: dict[tuple[int, int], _Loop] = {}  # By group and shard.

    # A trainer's life. The threads that drive the workers call these.

    def open(self, worker: int) -> None:
        """Makes what a trainer's group needs: at the start, or when it is back."""
        group = self._arrangement.group_of(worker).index
        if self.copies.is_of_earlier_life(group):
            self.lose_group(group)
        self._open_group(group)

    def holders_of(self, worker: int) -> Sequence[Server]:
        """The servers that hold the copy of a trainer's group, if there are other groups."""
        is_alone = len(self._arrangement.groups) == 1
        return () if is_alone else self._arrangement.group_of(worker).holders

    def handles(self, worker: int) -> list[tf.Tensor]:
        """What a trainer's steps take: its group's copies."""
        return self.copies.handles(self._arrangement.group_of(worker).index)

    def lose(self, worker: int) -> None:
        """A trainer is gone; the others of its group go on."""
        for thread in self._threads_of(worker):
            self.leave(thread)

    def suspend(self, worker: int) -> None:
        """A trainer is there, but its group's server is gone or silent; see `open`."""
        self.lose(worker)
        self._go_on_without(self._arrangement.group_of(worker).index)

    def lose_group(self, group: int) -> None:
        """The copy of a group is gone."""
        try:
            super().lose_group(group)
        finally:
            self._staleness.lost(group)

    def _go_on_without(self, group: int) -> None:
        """Neighbors don't wait for a group, or they can't go on; and its loops end."""
        try:
            super()._go_on_without(group)
        finally:
            with self._lock:
                self._applied_before.pop(group, None)
                for key in [key for key in self._loops if key[0] == group]:
                    del self._loops[key]
                self._changed[group].notify_all()

    def leave(self, thread: int) -> None:
        """A trainer's thread has nothing to do at the moment; if none of its group has, neighbors
        don't wait for it after a while."""
        with self._lock:
            self._away.add(thread)
            self._changed[self._group_of(thread)].notify_all()

    def _threads_of(self, worker: int) -> range:
        return range(worker * self._threads, (worker + 1) * self._threads)

    def _group_of(self, thread: int) -> int:
        return self._arrangement.group_of(thread // self._threads).index

    def resume(self, thread: int) -> None:
        """Does nothing: see `training`."""

    def release(self) -> None:
        """Ends all waits."""
        self._note_end()
        super().release()
        self._end_loops(_RELEASE_SECONDS)

    def waits_for(self, seconds: float) -> list[Server]:
        """The servers, job and index, that loops have waited for so long; most of these wait for
        neighbors themselves."""
        with self._lock:
            since = time.monotonic() - seconds
            busy = [(loop.called, loop.busy_since) for loop in self._loops.values()]
        found = [called for called, began in busy if began is not None and began < since]
        return list(dict.fromkeys(server for called in found for server in called))

    # An epoch.

    def begin(self) -> None:
        """Starts all groups on the same iteration; nobody may be at work."""
        for group in self._arrangement.groups:
            self._open_held(group)
        super().begin()
        # Read here: when a loop begins, its group may have applied updates already.
        copies = {group: self.copies.of(group) for group in self.there}
        applied = {g: self._read_applied(g, copy) for g, copy in copies.items() if copy is not None}
        with self._lock:
            self._ending = False
            self._applied_before = applied
            # Some may have seen the end of their data in an epoch before.
            self._away.update(range(self._arrangement.trainers * self._threads))

    def _open_held(self, group: Group) -> None:
        """Makes what a group needs on its servers, if they are there."""
        worker = group.trainers[0]
        can_wait = group.index not in self.copies.there and self.holders_of(worker)
        # Asked before they are called: one that stands still would hold all others.
        if can_wait and not self._are_reachable(group.index):
            logging.warning("Group %d begins when its servers are back.", group.index)
            if not self.exchanges[0].is_lost(group.index):
                self.lose_group(group.index)
            return
        self.open(worker)

    def carry_on(self) -> None:
        """Starts the loops, if they do not run."""
        super().carry_on()
        copies = {group: self.copies.of(group) for group in self.there}
        with self._lock:
            if self._ending:
                return
            self._counts.begin()
            for group, copy in copies.items():
                if copy is None:
                    continue
                for shard, exchange in zip(self._parameters, self.exchanges, strict=True):
                    loop = self._loops.get((group, shard))
                    if loop is None or not loop.thread.is_alive() or loop.copy is not copy:
                        self._start(group, shard, exchange, copy)

    def _start(self, group: int, shard: int, exchange: Exchange, copy: list[tf.Variable]) -> None:
        holder = self._arrangement.groups[group].holders[shard]
        parameters = [copy[i].handle for i in self._parameters[shard]]
        loop = _Loop(group, exchange, holder, copy, parameters)
        name = f"recsync_hop_loop_{holder[1]}"
        loop.thread = threading.Thread(target=self._run, args=(loop,), name=name, daemon=True)
        self._loops[group, shard] = loop
        loop.thread.start()

    def end(self) -> None:
        """Ends the loops, those of the edges, too; the steps are done."""
        self._note_end()
        self._end_loops(_JOIN_SECONDS)
        super().end()
        self._counts.end()

    def _note_end(self) -> None:
        with self._lock:
            self._ending = True
            for changed in self._changed:
                changed.notify_all()

    def _end_loops(self, seconds: float) -> None:
        """Ends what loops wait for, and waits for their ends, with a limit."""
        deadline = time.monotonic() + seconds
        with self._lock:
            loops = list(self._loops.values())
        while time.monotonic() < deadline:
            for loop in loops:
                loop.thread.join(_INTERRUPT_SECONDS)
            loops = [loop for loop in loops if loop.thread.is_alive()]
            if not loops:
                return
            # Again and again, as one of them may just begin to wait.
            for exchange in self.exchanges:
                exchange.interrupt()

    def training(self, thread: int) -> contextlib.AbstractContextManager:
        """Inside, a trainer trains, and its group takes part."""
        with self._lock:
            if thread in self._away:
                self._away.discard(thread)
                self._changed[self._group_of(thread)].notify_all()
        return contextlib.nullcontext()

    def trained(self, thread: int, steps: int) -> None:
        """A trainer has done so many steps: its group's loops look whether it is time."""
        self._counts.count_steps(steps)
        group = self._group_of(thread)
        with self._lock:
            self._steps[group] += steps
            own = [loop for (number, _), loop in self._loops.items() if number == group]
            if any(self._steps[group] >= loop.least for loop in own):
                self._changed[group].notify_all()

    def report(self) -> SyncReport:
        """What the exchanges have done: the syncs of a group are iterations that it completed."""
        return self._counts.report(len(self.exchanges), self._elements)

    def server_reports(self) -> list[list[WorkerReport]]:
        """What each group's servers have done, those that hold parameters."""
        of_shards = [exchange.reports() for exchange in self.exchanges]
        return [list(of_one) for of_one in zip(*of_shards, strict=True)]

    def counted(self) -> list[list[np.ndarray]]:
        """What each group has counted of staleness; see `StalenessCounts.all`."""
        return self._staleness.all()

    # Inside.

    def _make_copy(self, group: int, values: list[np.ndarray]) -> None:
        self._staleness.begin(values)
        super()._make_copy(group, values)

    def _run(self, loop: _Loop) -> None:
        """Takes a server from one iteration to the next."""
        try:
            with self._cluster.dispatch_scope():
                self._iterate(loop)
        except Exception as error:
            self.fail(error)

    def _iterate(self, loop: _Loop) -> None:
        with self._lock:  # When the iteration before began.
            applied = self._applied_before.get(loop.group)
        is_broken, failures = False, 0  # The latter in a row, with everybody there.
        while self._goes_on(loop):
            try:
                if is_broken:
                    with self._call(loop, *self._all_holders(loop)):
                        loop.exchange.rejoin(loop.group)
                    is_broken = False
                if applied is None:
                    applied = self._applied(loop)
                now = self._wait_for_updates(loop, applied + self._updates)
                if now is None:
                    continue
                applied = now
                self._exchange(loop)
                failures = 0
            except tf.errors.OpError as error:
                if not self._goes_on(loop):
                    return
                is_broken = True
                if self._is_paused(loop):
                    continue  # What it waited for was ended.
                # Of one that is gone the trainers find out.
                if self._answers(loop) and self._goes_on(loop):
                    failures += 1
                    if failures == _ATTEMPTS:
                        raise
                    logging.warning(
                        "An iteration of %s:%d failed, and it takes part anew (%d of %d): %s",
                        *loop.holder,
                        failures,
                        _ATTEMPTS - 1,
                        error.message.partition("\n")[0],
                    )
                self._wait(loop, lambda: False, _RETRY_SECONDS)

    def _goes_on(self, loop: _Loop) -> bool:
        with self._lock:
            return self._is_in_charge(loop)

    def _wait(
        self, loop: _Loop, condition: Callable[[], bool], seconds: float | None = None
    ) -> bool:
        """Waits until a condition holds, or a loop is to end; whether that is so, in time."""
        with self._lock:
            return self._changed[loop.group].wait_for(
                lambda: condition() or not self._is_in_charge(loop), seconds
            )

    def _is_in_charge(self, loop: _Loop) -> bool:
        """Whether a loop is to go on; under _lock."""
        return not self._ending and any(loop is other for other in self._loops.values())

    def _is_idle(self, loop: _Loop) -> bool:
        """Whether no trainer of a loop's group has anything to do; under _lock."""
        trainers = self._arrangement.groups[loop.group].trainers
        return all(self._away.issuperset(self._threads_of(trainer)) for trainer in trainers)

    def _answers(self, loop: _Loop) -> bool:
        """Whether a loop's group gives signs of life soon, and of the life of its copy."""
        return not self.copies.is_of_earlier_life(loop.group) and self._are_reachable(loop.group)

    def _are_reachable(self, group: int) -> bool:
        holders = self._arrangement.groups[group].holders
        return all(probe.reachable for probe in ask(self._cluster, holders))

    def _wait_for_updates(self, loop: _Loop, due: int) -> int | None:
        """Waits until a loop's group has applied updates up to a number, and neighbors count on it.

        Returns:
            How many it has applied; None if the loop is to end.
        """
        while self._goes_on(loop):
            with self._lock:
                reported = self._steps[loop.group]
            applied = self._applied(loop)
            if applied >= due:
                return applied
            with self._lock:
                # No update is applied without a step, and most modes apply one of several steps.
                loop.least = reported + due - applied
            self._wait(loop, lambda: self._is_near(loop) or self._is_idle(loop))
            if not self._wait(
                loop, lambda: self._is_near(loop) or not self._is_idle(loop), _LEAVE_SECONDS
            ):
                self._leave(loop)
        return None

    def _is_near(self, loop: _Loop) -> bool:
        """Whether there are steps enough for an iteration to be due; under _lock."""
        return self._steps[loop.group] >= loop.least

    def _leave(self, loop: _Loop) -> None:
        """A group has nothing to do: its neighbors don't wait for it until it has."""
        with self._call(loop, *self._all_holders(loop)):
            loop.exchange.leave(loop.group)
        self._wait(loop, lambda: not self._is_idle(loop))
        if self._goes_on(loop):
            with self._call(loop, *self._all_holders(loop)):
                loop.exchange.resume(loop.group)

    def _applied(self, loop: _Loop) -> int:
        """How many updates a loop's group has applied."""
        with self._call(loop, self._counting(loop.group)):
            return self._read_applied(loop.group, loop.copy)

    def _counting(self, group: int) -> Server:
        """The server of a group that counts the updates that it has applied."""
        counter = self.copies.variables[self._global_step]
        return self._arrangement.groups[group].holders[counter.shard]

    def _read_applied(self, group: int, copy: list[tf.Variable]) -> int:
        job, index = self._counting(group)
        with at(self._cluster, index, job):
            # Not by numpy: of a scalar from a server that is being cut off it makes a ValueError.
            return int(copy[self._global_step].read_value())

    def _exchange(self, loop: _Loop) -> None:
        """An iteration: sends the parameters, waits for the neighbors', and averages."""
        began = time.monotonic()
        job, index = loop.holder
        with self._call(loop, loop.holder), at(self._cluster, index, job):
            _iteration(len(loop.parameters))(loop.exchange.handle(loop.group), *loop.parameters)
        self._counts.count_sync([loop.group], time.monotonic() - began)

    def _all_holders(self, loop: _Loop) -> list[Server]:
        """Those of all groups that hold a loop's shard."""
        number = self._arrangement.groups[loop.group].holders.index(loop.holder)
        return [group.holders[number] for group in self._arrangement.groups]

    @contextlib.contextmanager
    def _call(self, loop: _Loop, *called: Server) -> Iterator[None]:
        """Inside, a loop calls servers, and may wait for them; not in a pause."""
        with self._lock:
            self._wait_out_pauses(loop)
            loop.called, loop.busy_since = called, time.monotonic()
        try:
            yield
        finally:
            loop.busy_since = None

    def _is_paused(self, loop: _Loop) -> bool:
        """Whether there is a pause; if so, waits for its end."""
        with self._lock:
            is_paused = self._pauses > 0
            self._wait_out_pauses(loop)
            return is_paused

    def _wait_out_pauses(self, loop: _Loop) -> None:
        """Waits until there is no pause, or a loop is to end; under _lock."""
        self._changed[loop.group].wait_for(lambda: not self._pauses or not self._is_in_charge(loop))

    def _becomes_quiet(self) -> bool:
        """Whether no loop calls a server, or will not soon."""
        deadline = time.monotonic() + _INTERRUPT_SECONDS
        while any(loop.busy_since is not None for loop in list(self._loops.values())):
            if time.monotonic() > deadline:
                return False
            time.sleep(_INTERRUPT_SECONDS / 10)
        return True

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Inside, parameters stay as they are, but for what trainers do.

        Iterations under way are cut off if they don't end soon, as they may wait for neighbors.
        """
        with self._lock:
            self._pauses += 1
        try:
            deadline = time.monotonic() + _RELEASE_SECONDS
            while not self._becomes_quiet() and time.monotonic() < deadline:
                for exchange in self.exchanges:
                    exchange.interrupt()
            with super().pause():
                yield
        finally:
            with self._lock:
                self._pauses -= 1
                for changed in self._changed:
                    changed.notify_all()


@functools.cache
def _iteration(parameters: int) -> Callable:
    """An iteration of a server, called there with what it keeps and its parameters' handles.

    It is traced once for each number of parameters, not for each server.
    """

    def iteration(handle, *variables):
        number = hop.next_iteration(handle, variables, tf.float32)
        with tf.control_dependencies([number]):
            sent = ops.snapshot(variables)
            entered = hop.enter(handle, number, sent, send=True)
        with tf.control_dependencies([entered]):
            hop.receive(handle, number, sent, variables, relative=True)

    handles = [tf.TensorSpec([], tf.resource)] * (1 + parameters)
    with tf.device(None):
        return tf.function(iteration, autograph=False).get_concrete_function(*handles)
