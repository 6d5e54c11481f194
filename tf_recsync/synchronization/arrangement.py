"""Who trains together: groups of trainers, and the servers that hold their parameters.

This is one of the two independent choices of a strategy. Inside a group, trainers share one copy
of the dense parameters, and a mode says when pushes are applied to it. Between groups, a
synchronizer keeps the copies together. Neither knows of the other.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from tf_recsync._checks import check_at_least
from tf_recsync.cluster import Server, processor_of


@dataclasses.dataclass(frozen=True)
class Group:
    """Trainers that share one copy of the dense parameters.

    Attributes:
        index: its number among the groups.
        trainers: the task indices of its workers.
        servers: the task indices of the parameter servers that hold the copy, shard by shard.
            None: its only trainer holds it.

    Raises:
        ValueError: if it has no servers, and not one trainer; or its trainers don't follow each
            other.

    >>> from tf_recsync.synchronization.arrangement import Group
    >>> Group(0, trainers=(0, 1), servers=(2,)).holders
    (('ps', 2),)
    >>> Group(3, trainers=(3,)).holders
    (('worker', 3),)
    """

    index: int
    trainers: tuple[int, ...]
    servers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Checks that it is known who holds the copy, and who takes tokens."""
        if not self.trainers or self.trainers != tuple(
            range(self.trainers[0], self.trainers[0] + len(self.trainers))
        ):
            raise ValueError(f"trainers must be consecutive task indices, not {self.trainers}")
        if not self.servers and len(self.trainers) != 1:
            raise ValueError(
                f"a group of {len(self.trainers)} trainers needs servers that hold its parameters"
            )

    @property
    def holders(self) -> tuple[Server, ...]:
        """Who holds each shard of the copy."""
        if self.servers:
            return tuple(("ps", server) for server in self.servers)
        return (("worker", self.trainers[0]),)

    def device(self, shard: int) -> str:
        """The device of a shard, as its trainers' steps name it: "" is where a step runs."""
        return processor_of("ps", self.servers[shard]) if self.servers else ""


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """All groups, and the servers that belong to none of them.

    Attributes:
        groups: in their order; each has as many shards.
        embedding_ps: the task indices of the servers that hold embedding tables, which there are
            once for all groups; none: each group has a copy of them.
        sync_ps: the task indices of the servers that hold the central copy, if there is one.
    """

    groups: tuple[Group, ...]
    embedding_ps: tuple[int, ...] = ()
    sync_ps: tuple[int, ...] = ()

    @property
    def shards(self) -> int:
        """How many parts a group's copy has."""
        return len(self.groups[0].holders)

    @property
    def has_copies(self) -> bool:
        """Whether groups have copies; else an only group trains the model's own variables."""
        only = self.groups[0]
        return len(self.groups) > 1 or not only.servers or only.servers != self.embedding_ps

    @property
    def trainers(self) -> int:
        """How many there are in all groups."""
        return sum(len(group.trainers) for group in self.groups)

    def group_of(self, worker: int) -> Group:
        """The group that a worker trains in."""
        return self._by_worker[worker]

    @functools.cached_property
    def _by_worker(self) -> dict[int, Group]:
        # Asked for at every call of a worker, of which there may be many.
        return {worker: group for group in self.groups for worker in group.trainers}


def one_group(workers: int, ps: int) -> Arrangement:
    """All workers are one group, on all parameter servers, which hold the tables, too.

    Args:
        workers: how many there are, at least 1.
        ps: how many parameter servers there are, at least 1.
    """
    check_at_least("workers", workers, 1)
    check_at_least("ps", ps, 1)
    servers = tuple(range(ps))
    return Arrangement((Group(0, tuple(range(workers)), servers),), embedding_ps=servers)


def each_worker(
    workers: int, embedding_ps: Sequence[int] = (), sync_ps: Sequence[int] = ()
) -> Arrangement:
    """Every worker is a group of its own, and holds its copy itself.

    Args:
        workers: how many there are, at least 1.
        embedding_ps: see `Arrangement`, like the other one.
        sync_ps: as above.
    """
    check_at_least("workers", workers, 1)
    groups = tuple(Group(worker, (worker,)) for worker in range(workers))
    return Arrangement(groups, tuple(embedding_ps), tuple(sync_ps))


def hierarchical(
    groups: int, trainers: int, servers: int, workers: int, ps: int, sync_ps: int
) -> Arrangement:
    """Groups of some trainers and some parameter servers each.

    Worker w is in group w // trainers. Of the parameter servers, those of the groups come first,
    group by group, then the embedding PSs, and the sync PSs last.

    Args:
        groups: how many there are, at least 1.
        trainers: of each group, at least 1.
        servers: of each group, at least 1.
        workers: all workers of the cluster.
        ps: all parameter servers of the cluster.
        sync_ps: how many of them are sync PSs.

    Raises:
        ValueError: if there are too few servers, or not as many workers as trainers.
    """
    check_at_least("groups", groups, 1)
    check_at_least("trainers_per_group", trainers, 1)
    check_at_least("ps_per_group", servers, 1)
    check_at_least("sync_ps", sync_ps, 0)
    needed = groups * servers + sync_ps
    if needed > ps:
        raise ValueError(
            f"groups={groups} with ps_per_group={servers} and sync_ps={sync_ps} need "
            f"{needed} parameter servers, the cluster has ps={ps}"
        )
    if groups * trainers != workers:
        raise ValueError(
            f"groups={groups} with trainers_per_group={trainers} need {groups * trainers} "
            f"workers, the cluster has workers={workers}"
        )
    made = tuple(
        Group(
            i,
            tuple(range(i * trainers, (i + 1) * trainers)),
            tuple(range(i * servers, (i + 1) * servers)),
        )
        for i in range(groups)
    )
    embedding_ps = tuple(range(groups * servers, ps - sync_ps))
    return Arrangement(made, embedding_ps, tuple(range(ps - sync_ps, ps)))
