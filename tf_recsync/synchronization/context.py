"""Which push is being traced in this thread, if any.

An optimizer that applies gradients asks here whether it runs inside a worker's
step, where gradients are pushed to servers, or in plain local Keras.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Protocol

from tf_recsync._instead import instead


class Push(Protocol):
    """Where an optimizer's gradients go."""

    # Only to see what a step does: gradients go nowhere, and nothing else is asked of it.
    is_dry: bool

    def for_clipping(self, grads: Any, variables: Any) -> Any:
        """The same gradients: of tables with every row named once, and where they are clipped."""

    def beside(self, gradient: Any) -> contextlib.AbstractContextManager:
        """A context in which operations are where a gradient is."""

    def push(self, optimizer: Any, grads: Any, variables: Any, learning_rate: Any) -> None:
        """Sends gradients, with the versions that they were computed on."""

    def decay_weights(self, variables: Any) -> None:
        """Has variables' weights decay with the push that follows."""


_local = threading.local()


def current_push() -> Push | None:
    """The push that this thread traces, or None."""
    return getattr(_local, "push", None)


def pushing(push: Push) -> contextlib.AbstractContextManager[None]:
    """Makes `push` the current one."""
    return instead(_local, "push", push)
