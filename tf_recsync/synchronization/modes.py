"""The training modes of a group of workers, as one table.

A mode says when a worker may start on a batch, and when the servers apply what
workers push. n is the number of workers, M the batches of a global batch, s the
server's global step and k a push's token:

| mode | token repeats | applied together | weight | a worker may start when |
|---|---|---|---|---|
| async | 1 | 1 | of the optimizer, rho(tau) | at once |
| BSP | M | M | 1 | at once |
| GBA | M | M | of the token's age s - k | at once |
| sync | M | M | 1 | step k is reached on every server |
| backup workers (b) | n | n - b | 1; late pushes are dropped | step k is reached on every server |
| bounded staleness (b1) | 1 | 1 | of the optimizer | it is at most b1 batches ahead |

Hogwild is async in which dense variables are updated side by side, without locks.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from tf_recsync import staleness
from tf_recsync.ops.tokens import Gate

LastGlobalBatch = Literal["weigh", "drop"]


@dataclasses.dataclass(frozen=True)
class Mode:
    """A row of the table.

    Attributes:
        name: its name.
        repeats: how many tokens of the token list have the same value.
        capacity: how many pushes a server applies together, as their mean.
        gate: what a worker waits for before it starts on a batch: "none", "step"
            (its token's value is reached on every server) or "clock" (it is at
            most `clock_bound` batches ahead of the slowest).
        clock_bound: of the gate "clock".
        weight: the weight of a push by its token's age, in buffers; the policy's tau
            is the age plus 1. Without buffers the optimizer's own policy weighs by
            the staleness of versions.
        drop_late: whether pushes of steps that are over are dropped.
        uses_buffers: whether servers collect pushes; else they apply each at once.
        hogwild: whether pushes to dense variables are applied side by side, without locks.
        last_global_batch: what becomes of what buffers still hold at the end of an epoch.
            "weigh": it is applied at its share of a global batch. "drop": it is left out.

    Raises:
        ValueError: if `last_global_batch` is something else.
    """

    name: str
    repeats: int = 1
    capacity: int = 1
    gate: Gate = "none"
    clock_bound: int = 0
    weight: staleness.Policy = staleness.Constant()
    drop_late: bool = False
    uses_buffers: bool = False
    hogwild: bool = False
    last_global_batch: LastGlobalBatch = "weigh"

    def accumulating(self, batches: int) -> Mode:
        """The mode with so many batches in the place of one, whose gradients servers add up.

        Args:
            batches: an int of at least 1; 1 is the mode itself.

        Raises:
            ValueError: if workers would wait for one another's single batches.
        """
        if batches == 1:
            return self
        if self.gate == "clock":
            raise ValueError(
                f"gradient_accumulation_steps of the optimizer must be None in the mode "
                f"{self.name}, in which workers wait for one another's single batches, "
                f"not {batches}"
            )
        return dataclasses.replace(
            self,
            repeats=self.repeats * batches,
            capacity=self.capacity * batches,
            uses_buffers=True,
            hogwild=False,
        )

    @property
    def uses_tokens(self) -> bool:
        """Whether workers take tokens."""
        return self.uses_buffers or self.gate != "none"


def check_last_global_batch(value: str) -> None:
    """Raises a ValueError unless it says what becomes of a global batch that is not full."""
    if value not in get_args(LastGlobalBatch):
        raise ValueError(f"last_global_batch must be 'weigh' or 'drop', not {value!r}")
