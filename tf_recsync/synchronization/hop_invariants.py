"""What has to hold while workers of decentralized training run (Hop, section 4 and table 1)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tf_recsync.synchronization.hop_reports import State
from tf_recsync.topology import Topology


class Invariants:
    """Compares what workers tell with the bounds.

    Workers can't be asked at one moment, so all are asked twice, one round after the other.
    Iterations only rise: what is asked in the first round has been no more than it is, and what
    is asked in the second is no less. So there are no false alarms.

    Args:
        topology: who sends to whom.
        bounds: [n, n], how far worker i may be ahead of worker j.
        max_iteration_gap: of the token queues, or None without.
    """

    def __init__(self, topology: Topology, bounds: np.ndarray, max_iteration_gap: int | None):
        self.bounds = bounds
        self.max_iteration_gap = max_iteration_gap
        self._topology = topology

    def violation(
        self, before: Mapping[int, State], after: Mapping[int, State], first: int
    ) -> str | None:
        """What does not hold, in words; None if nothing.

        Args:
            before: the states of the workers that answered in the first round.
            after: those in the second.
            first: the iteration that the epoch began with. Who has not entered it yet is
                about to.
        """
        for ahead, state in before.items():
            for behind, other in after.items():
                gap = state.iteration - max(other.iteration, first)
                if gap > self.bounds[ahead, behind]:
                    return (
                        f"worker {ahead} is in iteration {state.iteration} and worker {behind} in "
                        f"{other.iteration}: further apart than {self.bounds[ahead, behind]:g}"
                    )
        if self.max_iteration_gap is None:
            return None
        # TokenQ(i -> j), of which j tells, holds Iter(i) - Iter(j) + max_ig, less those that are
        # on their way to it.
        for worker, state in before.items():
            neighbors = self._topology.out_neighbors(worker)
            for neighbor, tokens in zip(neighbors, state.tokens, strict=True):
                if neighbor not in after:
                    continue
                theirs = max(after[neighbor].iteration, first)
                most = theirs - max(state.iteration, first) + self.max_iteration_gap
                if tokens > most:
                    return (
                        f"worker {worker} in iteration {state.iteration} has {tokens} tokens of "
                        f"worker {neighbor}, which is in {after[neighbor].iteration}: more than "
                        f"{most}"
                    )
        return None
