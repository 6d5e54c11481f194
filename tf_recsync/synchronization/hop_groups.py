"""Groups of trainers whose servers exchange parameters beside training (Hop).

Each server of a group is a worker of Hop, which exchanges its shard with the servers of the same
number in the neighboring groups (hop_exchange.py). Here a loop for each of them takes it from one
iteration to the next, as its group's updates are applied; trainers know nothing of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from tf_recsync import ops
from tf_recsync.cluster import Cluster, Server, fetch
from tf_recsync.ops import hop
from tf_recsync.synchronization.arrangement import Arrangement
from tf_recsync.synchronization.copies import Copies
from tf_recsync.synchronization.events import Recordings
from tf_recsync.synchronization.hop import ExchangeSynchronizer
from tf_recsync.synchronization.hop_exchange import Exchange
from tf_recsync.synchronization.hop_protocol import Protocol
from tf_recsync.synchronization.hop_reports import WorkerReport
from tf_recsync.synchronization.loops import JOIN_SECONDS, Loops

_LEAVE_SECONDS = 1.0  # After which neighbors don't wait for a group that has nothing to do.
_RELEASE_SECONDS = 5.0


@dataclasses.dataclass(eq=False)
class _Loop:
    """What takes a server of a group from one iteration to the next.

    Attributes:
        group: the group's number.
        shard: the server's.
        exchange: that of the shard.
        holder: the server, job and index.
        copy: the group's, of which the shard is a part.
        parameters: the handles of the shard's.
        least: the steps of the group's trainers before which it need not look whether an iteration
            is due.
    """

    group: int
    shard: int
    exchange: Exchange
    holder: Server
    copy: list[tf.Variable]
    parameters: list[tf.Tensor]
    least: int = 0

    @property
    def key(self) -> tuple[int, int]:
        """What its thread is known by."""
        return self.group, self.shard


class GroupHopSynchronizer(ExchangeSynchronizer):
    """The groups of trainers of a model, whose servers exchange parameters.

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
            arrangement,
            copies,
            copies.variables[:parameters],
            stall_seconds,
            bandwidths,
            Recordings(),
            list(self._parameters),
            threads,
            counters,
        )
        self._updates = updates
        # An iteration is due after some steps, which calls report when they end.
        nets = len(arrangement.groups[0].trainers) * threads
        self.most_steps = max(1, updates // (2 * nets))
        self._global_step = global_step
        self._counting = copies.variables[global_step].shard  # Its number.
        # A step of one group wakes no loop of the others.
        self._loops = Loops(
            "recsync_hop_loop", cluster, lambda error: self.fail(error), len(arrangement.groups)
        )
        self._lock = self._loops.lock
        # Guarded by _lock.
        # Trainers' threads that have nothing to do: lost, or not begun with the epoch.
        self._away: set[int] = set()
        self._steps = [0] * len(arrangement.groups)  # That trainers have reported.
        # By group and shard: updates that the group had applied when the latest iteration that
        # was completed began, or when it was there first.
        self._begun: dict[tuple[int, int], int] = {}
        self._driven: dict[tuple[int, int], _Loop] = {}  # By group and shard.

    # A trainer's life. The threads that drive the workers call these.

    def holders_of(self, worker: int) -> Sequence[Server]:
        """The servers that hold the copy of a trainer's group, if there are other groups."""
        is_alone = len(self._arrangement.groups) == 1
        return () if is_alone else self._arrangement.group_of(worker).holders

    def suspend(self, worker: int) -> None:
        """A trainer is there, but its group's server is gone or silent; see `open`."""
        self.lose(worker)
        self._go_on_without(self._number_of(worker))

    def _go_on_without(self, group: int) -> None:
        """Neighbors don't wait for a group, or they can't go on; and its loops end."""
        try:
            super()._go_on_without(group)
        finally:
            with self._lock:
                self._loops.drop(lambda key: key[0] == group)
                for of_loops in (self._begun, self._driven):
                    for key in [key for key in of_loops if key[0] == group]:
                        del of_loops[key]

    def leave(self, thread: int) -> None:
        """A trainer's thread has nothing to do at the moment; if none of its group has, neighbors
        don't wait for it after a while."""
        with self._lock:
            self._away.add(thread)
            self._loops.notify(self._group_of(thread))

    def _group_of(self, thread: int) -> int:
        return self._number_of(thread // self._threads)

    def release(self) -> None:
        """Ends all waits."""
        self._loops.end()
        super().release()
        self._join(_RELEASE_SECONDS)

    def waits_for(self, seconds: float) -> list[Server]:
        """The servers, job and index, that loops have waited for so long; most of these wait for
        neighbors themselves."""
        return list(dict.fromkeys([*self._loops.waits_for(seconds), *super().waits_for(seconds)]))

    # An epoch.

    def begin(self) -> None:
        """Starts all groups on the same iteration; nobody may be at work."""
        super().begin()
        # Read here: when a loop begins, its group may have applied updates already.
        copies = {group: self.copies.of(group) for group in self.there}
        applied = {g: self._read_applied(g, copy) for g, copy in copies.items() if copy is not None}
        self._loops.begin()
        with self._lock:
            for key in [(group, shard) for group in applied for shard in self._parameters]:
                # Users may have set the global step back.
                now = applied[key[0]]
                self._begun[key] = min(self._begun.get(key, now), now)
            # Some may have seen the end of their data in an epoch before.
            self._away.update(range(self._arrangement.trainers * self._threads))

    def _begin_without(self, group: int) -> None:
        if not self.exchanges[0].is_lost(group):
            self.lose_group(group)

    def carry_on(self) -> None:
        """Starts the loops, if they do not run."""
        if self._loops.is_ending:
            return
        super().carry_on()
        copies = {group: self.copies.of(group) for group in self.there}
        with self._lock:
            if self._loops.is_ending:
                return
            for group, copy in copies.items():
                if copy is None:
                    continue
                for shard, exchange in zip(self._parameters, self.exchanges, strict=True):
                    self._start(group, shard, exchange, copy)

    def _start(self, group: int, shard: int, exchange: Exchange, copy: list[tf.Variable]) -> None:
        before = self._driven.get((group, shard))
        if before is not None and before.copy is not copy:
            self._loops.drop(lambda key: key == before.key)
        holder = self._arrangement.groups[group].holders[shard]
        parameters = [copy[i].handle for i in self._parameters[shard]]
        loop = _Loop(group, shard, exchange, holder, copy, parameters)
        if self._loops.start(loop.key, lambda: self._iterate(loop)):
            self._driven[loop.key] = loop

    def end(self) -> None:
        """Ends the loops, those of the edges, too; the steps are done."""
        self._loops.end()
        self._join(JOIN_SECONDS)
        with self._lock:
            self._driven.clear()
        super().end()

    def _join(self, seconds: float) -> None:
        """Ends what loops wait for, and waits for their ends, with a limit."""
        self._loops.join(time.monotonic() + seconds, self._interrupt)

    def _interrupt(self) -> None:
        for exchange in self.exchanges:
            exchange.interrupt()

    def training(self, thread: int) -> contextlib.AbstractContextManager:
        """Inside, a trainer trains, and its group takes part."""
        with self._lock:
            if thread in self._away:
                self._away.discard(thread)
                self._loops.notify(self._group_of(thread))
        return contextlib.nullcontext()

    def trained(self, thread: int, steps: int) -> None:
        """A trainer has done so many steps: its group's loops look whether it is time."""
        super().trained(thread, steps)
        group = self._group_of(thread)
        with self._lock:
            self._steps[group] += steps
            own = [loop for (number, _), loop in self._driven.items() if number == group]
            if any(self._is_near(loop) for loop in own):
                self._loops.notify(group)

    def server_reports(self) -> list[list[WorkerReport]]:
        """What each group's servers have done, those that hold parameters."""
        of_shards = [exchange.reports() for exchange in self.exchanges]
        return [list(of_one) for of_one in zip(*of_shards, strict=True)]

    # Inside.

    def _iterate(self, loop: _Loop) -> None:
        """Takes a server from one iteration to the next."""
        with self._lock:  # When the iteration before began, maybe in an earlier epoch.
            applied = self._begun.get(loop.key)
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
                with self._lock:
                    if self._loops.is_in_charge(loop.key):
                        self._begun[loop.key] = applied
                failures = 0
            except tf.errors.OpError as error:
                if not self._goes_on(loop):
                    return
                is_broken = True
                if self._loops.is_paused:
                    continue  # What it waited for was ended.
                # Of one that is gone the trainers find out.
                if not self.copies.answers(loop.group):
                    self._loops.rest()
                    continue
                if not self._goes_on(loop):
                    return
                failures += 1
                what = "An iteration of {}:{} failed, and it takes part anew".format(*loop.holder)
                if not self._loops.may_try_again(what, error, failures):
                    return

    def _goes_on(self, loop: _Loop) -> bool:
        return self._loops.goes_on(loop.key)

    def _wait(
        self, loop: _Loop, condition: Callable[[], bool], seconds: float | None = None
    ) -> bool:
        """Waits until a condition holds, or a loop is to end; whether that is so, in time."""
        return self._loops.wait(lambda: condition() or not self._goes_on(loop), seconds, loop.group)

    def _is_idle(self, loop: _Loop) -> bool:
        """Whether no trainer of a loop's group has anything to do; under _lock."""
        trainers = self._arrangement.groups[loop.group].trainers
        return all(self._away.issuperset(self._threads_of(trainer)) for trainer in trainers)

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
            goes_on = self._wait(
                loop, lambda: self._is_near(loop) or not self._is_idle(loop), _LEAVE_SECONDS
            )
            # In a pause, as of a reading, all are idle, and nobody waits for anybody.
            if not goes_on and not self._loops.is_paused:
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
        holders = self._arrangement.groups[loop.group].holders
        with self._call(loop, holders[self._counting]):
            return self._read_applied(loop.group, loop.copy)

    def _read_applied(self, group: int, copy: list[tf.Variable]) -> int:
        with self.copies.at(group, self._counting):
            return int(fetch(copy[self._global_step].read_value()))

    def _exchange(self, loop: _Loop) -> None:
        """An iteration: sends the parameters, waits for the neighbors', and averages."""
        began = time.monotonic()
        with self._call(loop, loop.holder), self.copies.at(loop.group, loop.shard):
            _iteration(len(loop.parameters))(loop.exchange.handle(loop.group), *loop.parameters)
        self._counts.count_sync([loop.group], time.monotonic() - began, shard=loop.shard)

    def _all_holders(self, loop: _Loop) -> list[Server]:
        """Those of all groups that hold a loop's shard."""
        return [group.holders[loop.shard] for group in self._arrangement.groups]

    def _call(self, loop: _Loop, *called: Server) -> contextlib.AbstractContextManager:
        """Inside, a loop calls servers, and may wait for them; not in a pause."""
        return self._loops.call(called, loop.key)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Inside, parameters stay as they are, but for what trainers do.

        Iterations under way are cut off if they don't end soon, as they may wait for neighbors.
        """
        with self._loops.closed():
            self._loops.become_quiet(_RELEASE_SECONDS, self._interrupt)
            with super().pause():
                yield


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
