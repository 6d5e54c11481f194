"""What the trainers of a group share where its servers apply each push at once: nothing."""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

from tf_recsync.ops.tokens import Token


class AtOnce:
    """A group without a token list and gradient buffers.

    Nobody waits for anybody, and nothing is held back. `Aggregation`, which has both, is one that
    does what is said here.
    """

    takes_tokens = False

    @property
    def handles(self) -> list[tf.Tensor]:
        """Of all that steps use, in an order that stays when it is made anew."""
        return []

    def ensure(self, copies: object | None) -> None:
        """Makes all that steps use, if it was not made for these copies, under the lock of the
        group's openings.

        Args:
            copies: the group's, the same object as long as it has them.
        """

    # In the workers' steps.

    def start(self, worker: tf.Tensor, devices: Iterable[str]) -> dict[str, Token]:
        """Takes a token, when the mode lets the worker start.

        Args:
            worker: the worker's index, an int64 scalar that exists when the worker
                has its batch.
            devices: the servers that the step pulls from or pushes to.

        Returns:
            The token on each of them. What the step pulls there must wait for it.
        """
        return {}

    @property
    def devices(self) -> set[str]:
        """The servers that have buffers."""
        return set()

    # In the coordinator.

    def lose(self, worker: int) -> None:
        """Sees to it that nobody waits for a worker that is gone."""

    def forget(self, worker: int) -> None:
        """Takes a worker's tokens away."""

    def leave(self, worker: int) -> None:
        """A worker has nothing to do at the moment."""


AT_ONCE = AtOnce()
