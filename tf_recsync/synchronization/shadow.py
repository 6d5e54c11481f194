"""Groups of trainers with copies of their own, synchronized beside training (ShadowSync).

What a synchronization does is the algorithm's (shadow_algorithms.py), with what the groups have
(shadow_trainers.py); when it is done is the schedule's (shadow_schedule.py). Here loops and the
trainers' threads call the one at the times of the other, and it is seen to that none waits for one
that is gone.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf

from tf_recsync.cluster import CHIEF, Cluster, Server, ask, device_of
from tf_recsync.synchronization.arrangement import Arrangement
from tf_recsync.synchronization.copies import Copies
from tf_recsync.synchronization.loops import JOIN_SECONDS, Loops
from tf_recsync.synchronization.shadow_algorithms import Algorithm
from tf_recsync.synchronization.shadow_schedule import Foreground, Gate, Shadow
from tf_recsync.synchronization.shadow_trainers import Trainers, Turns
from tf_recsync.synchronization.sync_report import SyncReport
from tf_recsync.synchronization.synchronizer import Synchronizer

_LEAST_TRAINING = 0.1  # Between synchronizations of all, as a part of the time of one.
_ASK_AGAIN_SECONDS = 5.0  # Between two questions to one that gave none.
# How long a server synchronizes in one call: the calls of all, which one process makes, shall be
# few, but each is waited for at the end of an epoch.
_TURNS_SECONDS_EACH = 0.02
_LEAST_TURNS_SECONDS, _MOST_TURNS_SECONDS = 0.05, 5.0
_ALL = -1  # In the place of a group: all that are there, at once.

_Key = tuple[int, int]  # A group, or all, and a shard.


class ShadowSynchronizer(Synchronizer):
    """The groups of trainers of a model, while it trains.

    Args:
        algorithm: how copies are synchronized.
        schedule: when.
        cluster: the connected cluster.
        arrangement: the groups, and the sync PSs.
        copies: the groups' parameters, and what belongs to them.
        parameters: how many of the copied variables are parameters: the first ones.
        counters: which of the copied variables count the staleness of updates.
        threads: of each trainer.
        bandwidths: returns artificial bandwidths, in bytes per second by server's device.
    """

    has_waits = True

    def __init__(
        self,
        algorithm: Algorithm,
        schedule: Shadow | Foreground,
        cluster: Cluster,
        arrangement: Arrangement,
        copies: Copies,
        parameters: int,
        counters: Sequence[int],
        threads: int,
        bandwidths: Callable[[], dict[str, float]],
    ):
        super().__init__(arrangement, copies, threads, counters)
        self._sync_ps = arrangement.sync_ps
        self._trainers = Trainers(
            algorithm, cluster, copies, parameters, self._staleness, self._sync_ps, bandwidths
        )
        self._is_shadow = isinstance(schedule, Shadow)
        # Iterations or seconds from one synchronization to the next.
        self._gap: int | None = None if self._is_shadow else schedule.gap
        self._interval = schedule.min_interval if self._is_shadow else schedule.interval
        self.counts_steps = self._gap is not None
        self.most_steps = None if self._is_shadow or self.counts_steps else 1
        self._is_central = algorithm.is_central
        self._cluster = cluster
        # Groups that are there and gave no sign of life, and when they were last asked for one.
        self._absent: dict[int, float] = {}
        self._gate = Gate()
        self._since: dict[int, int] = {}  # Iterations since the last synchronization, by thread.
        self._due: dict[_Key, float] = {}  # When the next synchronization is due.
        self._loops = Loops("recsync_shadow", cluster, lambda error: self.fail(error))
        self._turns: Turns | None = None  # Of a loop's call.
        if self._is_shadow and self._is_central:
            loops = len(arrangement.groups) * len(self._trainers.shards)
            seconds = max(_LEAST_TURNS_SECONDS, _TURNS_SECONDS_EACH * loops)
            if self._interval < seconds:
                self._turns = Turns(min(seconds, _MOST_TURNS_SECONDS), self._interval)
        # Guarded by the loops' lock.
        self._away: set[int] = set()  # Threads that have nothing to do.
        self._lost: set[int] = set()  # Workers.

    @property
    def there(self) -> list[int]:
        """The groups that are not lost, as far as known."""
        return self._trainers.there

    # A trainer's life. The threads that drive the workers call these.

    def open(self, worker: int) -> None:
        """Makes what a trainer's group needs: at the start, or when it is back."""
        super().open(worker)
        with self._loops.lock:
            self._lost.discard(worker)

    def _open_group(self, group: int) -> None:
        if self._trainers.open(group):
            self._absent.pop(group, None)

    def holders_of(self, worker: int) -> Sequence[tuple[str, int]]:
        """The servers that hold the copy of a trainer's group, if others have what it needs."""
        group = self._arrangement.group_of(worker)
        is_alone = len(self._arrangement.groups) == 1 and not self._is_central
        return group.holders if group.servers and not is_alone else ()

    def lose(self, worker: int) -> None:
        """A trainer is gone, and what it held; the others go on."""
        with self._loops.lock:
            self._lost.add(worker)
        super().lose(worker)

    def lose_group(self, group: int) -> None:
        """The copy of a group is gone."""
        self._trainers.lose(group)
        self._absent.pop(group, None)

    def put_aside(self, group: int) -> None:
        """Keeps what a group has here, as its servers are about to end."""
        self._trainers.put_aside(group)

    def leave(self, thread: int) -> None:
        """A thread has nothing to do at the moment; when none has, loops wait."""
        self._gate.leave(thread)
        with self._loops.lock:
            self._away.add(thread)
            self._loops.notify()

    def release(self) -> None:
        """Ends all waits."""
        self._loops.end()
        self._gate.end()

    def pause(self) -> contextlib.AbstractContextManager:
        """Inside, no trainer calls another server to synchronize."""
        return self._loops.pause()

    def waits_for(self, seconds: float) -> list[Server]:
        """The servers, job and index, that synchronizations have waited for so long."""
        return self._loops.waits_for(seconds)

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
        self._trainers.begin()
        super().begin()
        self._gate.begin()
        with self._loops.lock:
            self._away.clear()
        self._loops.begin()

    def carry_on(self) -> None:
        """Starts the loops, if they do not run."""
        if self._loops.is_ending:
            return
        super().carry_on()
        if not self._trainers.elements:
            return
        if not self._is_shadow and (self._is_central or self.counts_steps):
            return  # The trainers' threads see to it.
        groups = self._trainers.there if self._is_central else [_ALL]
        shards = self._trainers.shards
        if not self._is_shadow:
            shards = shards[:1]  # One loop sees to all, while nobody trains.
        for key in ((group, shard) for group in groups for shard in shards):
            self._loops.start(key, functools.partial(self._loop, key))

    def end(self) -> None:
        """Ends the loops, and synchronizations in flight; the steps are done."""
        self.release()
        self._loops.join(time.monotonic() + JOIN_SECONDS)
        super().end()
        # Nobody can ask a sync PS any more that is lost before the next epoch.
        with contextlib.suppress(tf.errors.OpError):
            self._counts.note_bytes(self._trainers.sync_ps_bytes())

    def report(self) -> SyncReport:
        """What synchronization has done."""
        trainers = self._trainers
        self._counts.note_bytes(trainers.sync_ps_bytes())
        return self._counts.report(len(trainers.shards), trainers.elements)

    def extras(self) -> dict[str, np.ndarray]:
        """What a checkpoint keeps besides the copies: the center, and the algorithm's vectors."""
        return self._trainers.extras()

    def restore(
        self, values: Mapping[int, Sequence[np.ndarray]], extras: Mapping[str, np.ndarray]
    ) -> None:
        """Groups go on with these copies, and this center; see `Trainers.restore`."""
        super().restore(values, extras)
        self._trainers.restore(extras)

    # In the foreground: the trainers' threads call these.

    def steps_until_sync(self, thread: int) -> int | None:
        """The iterations of a thread before it synchronizes; None if it need not count them."""
        return None if self._gap is None else self._gap - self._since.get(thread, 0)

    @contextlib.contextmanager
    def training(self, thread: int) -> Iterator[None]:
        """Inside, a thread trains."""
        with self._loops.lock:
            if thread in self._away:
                self._away.discard(thread)
                self._loops.notify()
        if self._is_shadow or self._is_central:
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
        super().trained(thread, steps)
        if self._is_shadow or not self._trainers.elements:
            return
        group = self._number_of(thread // self._threads)
        if self._gap is not None:
            self._since[thread] = self._since.get(thread, 0) + steps
            if self._since[thread] < self._gap:
                return
            self._since[thread] = 0
            if self._is_central:
                self._sync_shards(group)
            else:
                self._gate.meet(thread, lambda: self._sync_shards(_ALL))
        elif self._is_central and self._is_due(group):
            self._sync_shards(group)

    def _sync_shards(self, group: int) -> None:
        """Synchronizes all shards of a group, or of all, one after the other."""
        for shard in self._trainers.shards:
            self._sync_surely(group, shard)

    def _is_due(self, group: int) -> bool:
        """Whether a group has to synchronize now; then it is some thread's turn, once."""
        now = time.monotonic()
        key = group, 0
        with self._loops.lock:
            due = self._due.setdefault(key, now + self._interval)
            if now < due:
                return False
            # After a break, as between epochs, none are made up for.
            late = now - due > self._interval
            self._due[key] = (now if late else due) + self._interval
            return True

    # Inside.

    def _loop(self, key: _Key) -> None:
        """Synchronizes a shard of one group, or of all, again and again."""
        group, shard = key
        self._due.setdefault(key, time.monotonic() + (0.0 if self._is_shadow else self._interval))
        while self._wait_until_due(key):
            began = time.monotonic()
            self._due[key] = began + self._interval
            if not self._is_shadow:
                self._gate.close_for(lambda: self._sync_shards(group))
                # Between those that take longer than the interval, too, threads train.
                ended = time.monotonic()
                rest = _LEAST_TRAINING * (ended - began)
                self._due[key] = max(self._due[key], ended + rest)
            elif group == _ALL or self._trains(group):
                is_recorded = self._counts.is_recorded()
                self._sync_surely(group, shard, None if is_recorded else self._turns)
            else:
                self._loops.rest()  # Until one of its trainers is back.

    def _trains(self, group: int) -> bool:
        """Whether a group is there, and has trainers; if not, its copy would hold others back."""
        with self._loops.lock:
            is_left = not self._lost.issuperset(self._arrangement.groups[group].trainers)
        return is_left and group in self._trainers.there

    def _wait_until_due(self, key: _Key) -> bool:
        """Waits until a loop's next synchronization is due, and somebody trains; False: it ends."""
        everybody = self._arrangement.trainers * self._threads

        def is_over() -> bool:
            return not self._loops.goes_on(key)

        if not self._loops.wait(is_over, self._due[key] - time.monotonic()):
            self._loops.wait(lambda: is_over() or len(self._away) < everybody)
        return self._loops.goes_on(key)

    def _may_try_again(self, group: int, error: tf.errors.OpError, failures: int) -> bool:
        """Whether a synchronization that failed, for so many times in a row, is made again."""
        if self._loops.is_ending:
            return False
        asked = ask(self._cluster, [("ps", ps) for ps in self._sync_ps])
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
        members = self._members() if group == _ALL else [group]
        gone = [member for member in members if not self.copies.answers(member)]
        if gone and group != _ALL:
            return False  # The trainers' own threads find out.
        # With all-reduce they may wait for this very synchronization: the others go on without.
        self._absent.update(dict.fromkeys(gone, time.monotonic()))
        if not gone:
            what = "A synchronization failed and is made again"
            return self._loops.may_try_again(what, error, failures)
        self._loops.rest()
        return not self._loops.is_ending

    def _members(self) -> list[int]:
        """The groups that train and give signs of life."""
        for group, asked in list(self._absent.items()):
            if time.monotonic() - asked > _ASK_AGAIN_SECONDS:
                if self.copies.answers(group):
                    self._absent.pop(group, None)
                else:
                    self._absent[group] = time.monotonic()
        there = self._trainers.there
        return [group for group in there if group not in self._absent and self._trains(group)]

    def _sync_surely(self, group: int, shard: int, turns: Turns | None = None) -> None:
        """Synchronizes a shard of one group, or of all that are left, if need be again."""
        failures = 0
        while True:
            try:
                members = self._members() if group == _ALL else [group]
                if members:
                    self._sync(members, shard, turns)
                else:
                    self._loops.rest()  # Until one is back.
                return
            except tf.errors.OpError as error:
                absent = len(self._absent)
                failures += 1
                if not self._may_try_again(group, error, failures):
                    raise
                if len(self._absent) > absent:
                    failures = 0  # That was why.

    def _sync(self, members: Sequence[int], shard: int, turns: Turns | None) -> None:
        """Synchronizes a shard, from this thread."""
        holders = [holder for i in members for holder in self._arrangement.groups[i].holders]
        device = CHIEF  # A call ends when the connection to any of the members does.
        if self._is_central:
            device = device_of(*holders[shard])
        with self._loops.call([*(("ps", ps) for ps in self._sync_ps), *holders]):
            if self._loops.is_ending:
                return
            with tf.device(device):
                times, seconds = self._trainers.sync(members, shard, turns)
            if times:
                self._counts.count_sync(members, seconds, times, shard)
