"""Hop between groups of trainers: its options."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar, Literal

from tf_recsync._checks import check_at_least, check_seconds
from tf_recsync.strategies import hop_checks
from tf_recsync.synchronization.hop_protocol import Protocol, Skip
from tf_recsync.topology import Topology


@dataclasses.dataclass(frozen=True)
class Hop:
    """Hop between the groups of a `HierarchicalStrategy`: an exchange with neighbors, by shard.

    Each server of a group is a worker in the sense of the paper. It exchanges its part of the
    parameters with the server of the same number in each neighboring group. An iteration begins
    when the group has applied `updates_per_iteration` updates since it began the one before: the
    server sends its parameters, waits for those of its in-neighbors, and averages. What is
    applied while it waits is added to the average as it is. Trainers wait for none of this.

    The exchange of a whole model between workers that train it is `HopStrategy`.

    Reference: Luo et al. 2019, "Hop: Heterogeneity-aware Decentralized Training", sections 4
    and 5.

    Args:
        topology: which group sends to which, with which weights: see `tf_recsync.topology`, whose
            workers are the groups here.
        updates_per_iteration: an int of at least 1. Default 1.
        max_iteration_gap: how many iterations a server may be ahead of an out-neighbor, an int of
            at least 1. None: without token queues; the topology bounds the gap. Defaults to 5, and
            to None with "notify_ack".
        backup_workers: an int, or one for each group: less than the in-neighbors of the group,
            itself included. Where there are none and a neighbor's server is lost, training ends
            with an error. Defaults to 0.
        staleness_bound: an int of at least 0, or None (the default): updates must be of the
            receiver's iteration.
        skip: a `Skip`, by which a slow group skips iterations; or None (the default). It needs
            backup workers or a staleness bound.
        protocol: "token_queue" (the default), or "notify_ack", in which a server sends only when
            all out-neighbors have used what it sent before.
        check_invariants: whether iterations and tokens are compared with the bounds of the
            paper's table 1 while training runs. Defaults to False.
        stall_seconds: after how many seconds of waiting a log entry names the group, whom it
            waits for and for which iteration. Defaults to 60.

    Raises:
        ValueError: if an argument is wrong or does not go with another one.

    Example:

    >>> import tf_recsync as recsync
    >>> between = recsync.Hop(recsync.topology.ring(3), updates_per_iteration=4, backup_workers=1)
    >>> between.topology.size, between.max_iteration_gap
    (3, 5)

    Then `recsync.HierarchicalStrategy(cluster, between, groups=3, ...)` trains with it.
    """

    topology: Topology
    _: dataclasses.KW_ONLY
    updates_per_iteration: int = 1
    max_iteration_gap: int | None | Literal["default"] = "default"
    backup_workers: int | Sequence[int] = 0
    staleness_bound: int | None = None
    skip: Skip | None = None
    protocol: Literal["token_queue", "notify_ack"] = "token_queue"
    check_invariants: bool = False
    stall_seconds: float = 60.0

    is_central: ClassVar[bool] = False

    def __post_init__(self):
        hop_checks.check_topology(self.topology)
        check_at_least("updates_per_iteration", self.updates_per_iteration, 1)
        check_seconds("stall_seconds", self.stall_seconds)
        object.__setattr__(self, "max_iteration_gap", self.exchange.max_iteration_gap)

    @functools.cached_property
    def exchange(self) -> Protocol:
        """How servers exchange."""
        return hop_checks.checked_protocol(
            self.topology,
            self.max_iteration_gap,
            self.backup_workers,
            self.staleness_bound,
            self.skip,
            "parallel",
            self.protocol,
            self.check_invariants,
        )
