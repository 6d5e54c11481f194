"""How workers of decentralized training exchange parameters (Hop)."""

from __future__ import annotations

import dataclasses
import functools
import uuid
from typing import Any

import numpy as np
import tensorflow as tf

from tf_recsync._checks import integer
from tf_recsync.ops import hop
from tf_recsync.topology import Topology, gap_bounds

MOST = 2**20  # Iterations, and updates in a queue; kMostEntries of cc/engine/limits.h.


def checked_iterations(name: str, value: int, least: int) -> int:
    """A number of iterations, from `least` to `MOST`; a ValueError if an argument is none."""
    if integer(name, value, least) > MOST:
        raise ValueError(f"{name} must be at most {MOST}, got {value}")
    return int(value)


@dataclasses.dataclass(frozen=True)
class Skip:
    """When a slow worker skips iterations (Hop, section 5).

    A worker that is behind all its out-neighbors goes forward to the slowest of them, at
    most; it first averages what its in-neighbors have sent in the iteration before that one.
    To get there they may need its tokens, so that it goes forward by `max_iteration_gap + 1`
    iterations at most, or by so many more as an update may be old (`staleness_bound`).

    Attributes:
        max_jump: how many iterations it goes forward at a time at most, from 2 to 2**20; 1
            would be the next iteration.
        trigger: it jumps only if it is behind by more iterations than this, from 0 to 2**20.
            Default 0.

    Raises:
        ValueError: if an attribute is wrong.

    >>> from tf_recsync.synchronization.hop_protocol import Skip
    >>> Skip(max_jump=10)
    Skip(max_jump=10, trigger=0)
    """

    max_jump: int
    trigger: int = 0

    def __post_init__(self):
        checked_iterations("max_jump", self.max_jump, 2)
        checked_iterations("trigger", self.trigger, 0)


@dataclasses.dataclass(frozen=True)
class Protocol:
    """How workers exchange parameters; checked by `HopStrategy`.

    Attributes:
        topology: who sends to whom.
        max_iteration_gap: of the token queues, or None without.
        backup_workers: of each worker.
        staleness_bound: or None if updates must be of the receiver's own iteration.
        skip: or None if nobody skips iterations.
        is_serial: whether a worker sends what it has computed, instead of what it computes
            on.
        notify_ack: whether acknowledgements take the place of token queues.
        check_invariants: whether iterations are compared with the bounds while they run.
    """

    topology: Topology
    max_iteration_gap: int | None
    backup_workers: tuple[int, ...]
    staleness_bound: int | None
    skip: Skip | None
    is_serial: bool
    notify_ack: bool
    check_invariants: bool

    def bounds(self) -> np.ndarray:
        """[n, n], read-only: how far worker i can be ahead of worker j."""
        return self._bounds

    @functools.cached_property
    def _bounds(self) -> np.ndarray:
        bounds = gap_bounds(
            self.topology,
            self.max_iteration_gap,
            backup_workers=self.backup_workers,
            staleness_bound=self.staleness_bound,
            notify_ack=self.notify_ack,
        )
        bounds.setflags(write=False)
        return bounds

    @property
    def uses_paths(self) -> bool:
        """Whether workers keep to bounds that follow from paths over others: void without these."""
        has_allowance = self.max_iteration_gap is not None or self.notify_ack
        return self.check_invariants or not has_allowance

    def make(self, worker: int) -> tf.Tensor:
        """Makes what a worker keeps beside its parameters, on the device of the scope."""
        return hop.worker(shared_name=f"recsync_hop_{uuid.uuid4().hex}", **self.options(worker))

    def _ahead(self, worker: int) -> list[float]:
        """How far each of a worker's in-neighbors can be ahead of it."""
        return [self.bounds()[s, worker] for s in self.topology.in_neighbors(worker)]

    def slots(self, worker: int) -> int:
        """How many iterations a worker's queue may have updates of: with token queues as in
        section 4.2, else as far as a sender can be ahead (section 4.1)."""
        return 1 + (self.max_iteration_gap or int(max([1.0, *self._ahead(worker)])))

    def options(self, worker: int) -> dict[str, Any]:
        """How a worker takes part, by the names of the attributes of `RecsyncHopWorker`."""
        topology, slots = self.topology, self.slots(worker)
        senders = topology.in_neighbors(worker)
        ahead = self._ahead(worker) if self.check_invariants else []
        return {
            "in_neighbors": senders,
            "weights": [float(topology.weights[sender, worker]) for sender in senders],
            "out_neighbors": topology.out_neighbors(worker),
            "max_iteration_gap": self.max_iteration_gap or 0,
            "slots": slots,
            "capacity": slots * (len(senders) + 1),
            "backup_workers": self.backup_workers[worker],
            "staleness_bound": -1 if self.staleness_bound is None else self.staleness_bound,
            "max_jump": 1 if self.skip is None else self.skip.max_jump,
            "jump_trigger": 0 if self.skip is None else self.skip.trigger,
            "notify_ack": self.notify_ack,
            "gap_bounds": [int(a) if np.isfinite(a) else -1 for a in ahead],
        }
