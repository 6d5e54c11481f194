"""Groups of workers whose copies are kept together by exchanges with neighbors (Hop).

An exchange, of all copies or of those parts of them that are one shard, is hop_exchange.py's. Here
copies are made, lost and made again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf
from absl import logging

from tf_recsync.cluster import Cluster
from tf_recsync.synchronization.arrangement import Arrangement
from tf_recsync.synchronization.copies import Copies, answered
from tf_recsync.synchronization.events import Recordings
from tf_recsync.synchronization.hop_exchange import Exchange, listed
from tf_recsync.synchronization.hop_protocol import Protocol
from tf_recsync.synchronization.hop_reports import WorkerReport
from tf_recsync.synchronization.sync_report import SyncReport
from tf_recsync.synchronization.synchronizer import Synchronizer
from tf_recsync.topology import Topology


class ExchangeSynchronizer(Synchronizer):
    """Groups that exchange parameters with their neighbors, while they train; the common base.

    Args:
        protocol: how they exchange.
        cluster: the connected cluster.
        arrangement: the groups.
        copies: their parameters and what belongs to them.
        parameters: those of the copied variables that are exchanged, all of one type.
        stall_seconds: after which somebody's wait is logged.
        bandwidths: returns artificial bandwidths, in bytes per second by holder's device.
        recordings: get what workers did.
        shards: the numbers of the shards that are exchanged, each by itself.
        threads: that train for each trainer.
        counters: which of the copied variables count the staleness of updates.

    Attributes:
        exchanges: of each of these shards.
    """

    has_waits = True

    def __init__(
        self,
        protocol: Protocol,
        cluster: Cluster,
        arrangement: Arrangement,
        copies: Copies,
        parameters: Sequence[tf.Variable],
        stall_seconds: float,
        bandwidths: Callable[[], dict[str, float]],
        recordings: Recordings,
        shards: Sequence[int] = (0,),
        threads: int = 1,
        counters: Sequence[int] = (),
    ):
        super().__init__(arrangement, copies, threads, counters)
        self._protocol = protocol
        self._cluster = cluster
        self._elements = sum(variable.shape.num_elements() for variable in parameters)
        self._topology = protocol.topology
        self._noun = "group" if copies.groups[0].servers else "worker"
        self._restored: int | None = None  # The latest iteration of a checkpoint.
        self._joining = threading.RLock()  # One takes part again at a time, or all begin.
        self.exchanges = [
            Exchange(
                protocol,
                cluster,
                [group.holders[shard] for group in copies.groups],
                self._noun,
                parameters[0].dtype,
                copies.are_current,
                stall_seconds,
                bandwidths,
                recordings,
                self._joining,
                lambda error: self.fail(error),
            )
            for shard in shards
        ]

    def count_on(self, other: Synchronizer) -> None:
        """Goes on with what another one has counted, whose place it takes."""
        super().count_on(other)
        for own, before in zip(self.exchanges, other.exchanges, strict=True):
            own.count_on(before)

    @property
    def there(self) -> list[int]:
        """The groups that are not lost, as far as known."""
        return self.exchanges[0].there

    # A group's life. The threads that drive the workers call these.

    def _open_group(self, group: int) -> None:
        has_copy = group in self.copies.there
        if has_copy and all(exchange.has(group) for exchange in self.exchanges):
            return
        if any(exchange.is_lost(group) for exchange in self.exchanges):
            with self._joining:
                try:
                    self._come_back(group)
                except BaseException:
                    # Of all exchanges or of none: the next attempt begins anew.
                    for exchange in self.exchanges:
                        exchange.lose(group)
                    raise
        else:
            self.copies.ensure(group)
            for exchange in self.exchanges:
                exchange.make(group)

    def lose_group(self, group: int) -> None:
        """The copy of a group is gone.

        Raises:
            RuntimeError: if a neighbor has too few backup workers to go on without it.
        """
        super().lose_group(group)
        self._go_on_without(group)

    def put_aside(self, group: int) -> None:
        """Keeps what a group has here, as its servers are about to end; nobody may train it.

        Nobody waits for it: it has left when its servers are lost.
        """
        super().put_aside(group)
        for exchange in self.exchanges:
            exchange.leave(group)

    def _go_on_without(self, group: int) -> None:
        """Neighbors don't wait for a group, until it is opened again; or they can't go on."""
        is_news = not self.exchanges[0].is_lost(group)
        for exchange in self.exchanges:
            exchange.lose(group)
        self._check_neighbors_of(group)
        if is_news:
            receivers = self._topology.out_neighbors(group)
            logging.warning(
                "%s %d was lost; %s %s on without it.",
                self._noun.capitalize(),
                group,
                listed(receivers, self._noun),
                "goes" if len(receivers) == 1 else "go",
            )

    def _check_neighbors_of(self, group: int) -> None:
        """Raises a RuntimeError if a neighbor of a lost group can't go on without it."""
        is_lost, has_left, noun = self.exchanges[0].is_lost, self.exchanges[0].has_left, self._noun
        for receiver in self._topology.out_neighbors(group):
            senders = self._topology.in_neighbors(receiver)
            # Nobody waits for one that had done its part of the epoch.
            gone = [sender for sender in senders if is_lost(sender) and not has_left(sender)]
            backups = self._protocol.backup_workers[receiver]
            if not is_lost(receiver) and len(gone) > backups:
                raise RuntimeError(
                    f"{noun} {group} was lost, and {noun} {receiver} can't go on without "
                    f"{listed(gone, noun)}: its in-neighbors are {listed(senders, noun)}, and it "
                    f"has backup_workers={backups}"
                )

    def release(self) -> None:
        """Ends all waits, with errors."""
        for exchange in self.exchanges:
            exchange.release()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Inside, no worker calls another, while a server is taken into the cluster again."""
        with contextlib.ExitStack() as paused:
            for exchange in self.exchanges:
                paused.enter_context(exchange.pause())
            yield

    def waits_for(self, seconds: float) -> list[tuple[str, int]]:
        """The servers, job and index, that calls about who takes part have waited for so long.

        Who stands still otherwise shows in the steps of its neighbors.
        """
        late = [server for exchange in self.exchanges for server in exchange.waits_for(seconds)]
        return list(dict.fromkeys(late))

    def describe(self) -> str:
        """Who waits for whom, in words."""
        return "; ".join(dict.fromkeys(exchange.describe() for exchange in self.exchanges))

    # An epoch.

    def begin(self) -> None:
        """Starts all groups on the same iteration; nobody may be at work."""
        super().begin()
        with self._joining:
            for exchange in self.exchanges:
                exchange.begin(self._restored)
            self._restored = None  # Not earlier: if one is gone, all begin again.
        # One lost when it had done its part is needed now; one that is back is opened soon.
        is_away = self._cluster.membership.is_away
        for group in range(self._topology.size):
            holders = self.copies.groups[group].holders
            if not self.exchanges[0].is_lost(group) or not any(map(is_away, holders)):
                continue
            if not self.copies.is_loaded(group):  # Else it goes on with that, when it is back.
                self._check_neighbors_of(group)

    def carry_on(self) -> None:
        """Starts the loops of the edges, if they do not run."""
        if not self.exchanges[0].is_ending:
            super().carry_on()
        for exchange in self.exchanges:
            exchange.carry_on()

    def end(self) -> None:
        """Ends the loops of the edges when all is told; the workers are done."""
        for exchange in self.exchanges:
            exchange.end()
        super().end()

    def extras(self) -> dict[str, np.ndarray]:
        """What a checkpoint keeps besides the copies: the iterations, of all shards the latest."""
        reports = [exchange.reports() for exchange in self.exchanges]
        latest = [max(r.iteration for r in of_one) for of_one in zip(*reports, strict=True)]
        return {"iterations": np.array(latest, np.int64)}

    def restore(
        self, values: Mapping[int, Sequence[np.ndarray]], extras: Mapping[str, np.ndarray]
    ) -> None:
        """Groups go on with these copies and from these iterations; nobody may be at work.

        Args:
            values: by group.
            extras: the iterations of all groups; without, as of a checkpoint of another
                algorithm, they begin anew. If there were more or fewer, all begin with the mean.
        """
        iterations = np.asarray(extras.get("iterations", [-1] * self._topology.size)).tolist()
        older = {"groups": len(iterations)} if "iterations" in extras else {}
        super().restore(values, {**older, **extras})
        if len(iterations) != self._topology.size:
            iterations = [max(iterations)] * self._topology.size
        self._restored = max(iterations)
        for exchange in self.exchanges:
            exchange.restore(iterations)

    def report(self) -> SyncReport:
        """What the exchanges have done: the syncs of a group are iterations that it completed."""
        return self._counts.report(len(self.exchanges), self._elements)

    # Inside.

    def _come_back(self, group: int) -> None:
        """A lost group takes its neighbors' parameters, and part from a later iteration on.

        One whose server only fell silent may have its own still.
        """
        source = self.exchanges[0].sources(group)
        is_loaded = self.copies.is_loaded(group)
        has_own = group in self.copies.there
        if not source and not is_loaded and not has_own:
            raise RuntimeError(
                f"{self._noun} {group} is back, but no {self._noun} has parameters for it"
            )
        for exchange in self.exchanges:
            exchange.renew(group)
        if has_own:
            begins_with = "its own parameters"
        elif is_loaded:
            self.copies.ensure(group)
            begins_with = "those of the checkpoint"
        else:
            source = self._load_mean(group, source)
            begins_with = f"the mean parameters of {listed(source, self._noun)}"
        first = [exchange.join(group, source) for exchange in self.exchanges]
        logging.warning(
            "%s %d goes on from iteration %d with %s.",
            self._noun.capitalize(),
            group,
            max(first),
            begins_with,
        )
        self.carry_on()

    def _load_mean(self, group: int, others: Sequence[int]) -> list[int]:
        """Gives a group the mean of others' parameters; returns whose."""
        self.copies.will_make(group)
        taken = dict(answered(others, self.copies.values))
        # If nobody answers any more, what was known of them last.
        values = self.copies.mean(taken.values()) if taken else self.copies.shown
        self._staleness.begin(values)
        self.copies.make(group, values)
        return list(taken)


class HopSynchronizer(ExchangeSynchronizer):
    """The workers of a model in decentralized training: groups that exchange in their steps.

    Args:
        protocol: see `ExchangeSynchronizer`, like the others.
        cluster: as above.
        arrangement: as above.
        copies: as above.
        parameters: as above.
        stall_seconds: as above.
        bandwidths: as above.
        recordings: as above.
    """

    def handle(self, worker: int) -> tf.Tensor:
        """The handle of what a worker keeps beside its parameters."""
        return self.exchanges[0].handle(worker)

    def handles(self, worker: int) -> list[tf.Tensor]:
        """What a worker's steps take: what it keeps beside its parameters, and these."""
        return [self.handle(worker), *super().handles(worker)]

    def lose(self, worker: int) -> None:
        """A worker is gone, and its copy with it; its neighbors go on."""
        self.lose_group(worker)

    def leave(self, worker: int) -> None:
        """A worker has nothing to do at the moment: its neighbors don't wait for it."""
        self.exchanges[0].leave(worker)

    def resume(self, worker: int) -> None:
        """A worker that has left in this epoch takes steps again: its neighbors count on it.

        It had batches ahead when no steps were left, and others found no batches for theirs.
        """
        self.exchanges[0].resume(worker)

    def trained(self, thread: int, steps: int) -> None:
        """A worker has done so many steps, each with its exchange."""
        super().trained(thread, steps)
        self._counts.count_sync([thread], 0.0, steps)

    def reports(self) -> list[WorkerReport]:
        """What each worker has done; of one that is lost, as far as it was known."""
        return self.exchanges[0].reports()

    def report(self) -> SyncReport:
        """What the exchanges have done; their time is what workers have waited in them."""
        waits = [r.waited_for_updates + r.waited_for_tokens for r in self.reports()]
        return dataclasses.replace(super().report(), seconds=waits)


def threads_needed(topology: Topology, worker: int) -> int:
    """How many threads of a worker calls can hold that wait for its neighbors.

    One for its own step, and one for each loop that carries parcels to or from it; and a few
    for calls that do not wait.
    """
    neighbors = {*topology.in_neighbors(worker), *topology.out_neighbors(worker)}
    return 2 * len(neighbors) + 4
