"""What keeps the copies of several groups of trainers together, whatever the algorithm."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import tensorflow as tf

from tf_recsync.synchronization.copies import Copies


class Synchronizer(Protocol):
    """Workers with parameters of their own, while they train.

    It makes what workers need, mixes their copies, and is told who is gone. The threads that
    drive the workers call `open`, `lose`, `leave`, `resume`, `pause`, `describe` and `release`, see
    `slots.Crew`.

    Attributes:
        copies: the groups' parameters and what belongs to them.
        fail: ends the pass with an error.
        counts_steps: whether a synchronization is due after a number of steps.
        most_steps: how many steps a call to a worker may have, as a synchronization waits for
            its end; None if none does.
    """

    copies: Copies
    fail: Callable[[Exception], None]
    counts_steps: bool
    most_steps: int | None

    @property
    def there(self) -> list[int]:
        """The groups that have what was made for them, as far as known."""

    def open(self, worker: int) -> None:
        """Makes what a worker needs, in its device scope: at the start, or when it is back."""

    def handles(self, worker: int) -> list[tf.Tensor]:
        """What its steps take, besides what every worker's do."""

    def begin(self) -> None:
        """An epoch begins; nobody is at work."""

    def carry_on(self) -> None:
        """All workers are open, and one of them is about to train."""

    def end(self) -> None:
        """The epoch's steps are done."""

    def steps_until_sync(self, thread: int) -> int | None:
        """The steps of a thread before it synchronizes; None if it need not count them."""

    def training(self, thread: int) -> contextlib.AbstractContextManager:
        """Inside, a thread trains."""

    def trained(self, thread: int, steps: int) -> None:
        """A thread has done so many steps: synchronizes if it is time."""

    def extras(self) -> dict[str, np.ndarray]:
        """What a checkpoint keeps besides the copies, under names without a slash."""

    def restore(
        self, values: Mapping[int, Sequence[np.ndarray]], extras: Mapping[str, np.ndarray]
    ) -> None:
        """Workers go on with these copies, by worker, and extras; nobody may be at work."""

    def lose(self, worker: int) -> None:
        """A worker is gone, and its step with it."""

    def suspend(self, worker: int) -> None:
        """A worker is there, but its group's copy is gone, and its step with it."""

    def lose_group(self, group: int) -> None:
        """A group's copy is gone."""

    def holders_of(self, worker: int) -> Sequence[tuple[str, int]]:
        """The parameter servers, job and index, that hold the copy of a worker's group, if it
        can come back when one was lost."""

    def leave(self, thread: int) -> None:
        """A worker's thread has nothing to do at the moment."""

    def resume(self, thread: int) -> None:
        """A worker's thread that may have left is about to take steps."""

    def release(self) -> None:
        """Ends all waits of workers, with errors."""

    def pause(self) -> contextlib.AbstractContextManager:
        """Inside, no worker calls another."""

    def waits_for(self, seconds: float) -> list[tuple[str, int]]:
        """The servers, job and index, that calls besides the steps have waited for so long."""

    def describe(self) -> str:
        """Who waits for whom, in words."""
