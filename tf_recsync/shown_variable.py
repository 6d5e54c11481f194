"""Variables that this process shows to users while workers train them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops


class Guard(Protocol):
    """Sees to it that calls to variables' servers end."""

    def watched(self) -> contextlib.AbstractContextManager:
        """Inside, calls to a server that is silent end with an error that names it.

        Raises:
            RuntimeError: if the variables can't be used any more.
        """

    def expect_calls(self) -> None:
        """Calls that are not made inside of `watched` follow, and end if a server is silent."""


class ShownVariable(resource_variable_ops.ResourceVariable):
    """A variable whose owner is told before this process reads it.

    Attributes:
        before_read: is called before an eager read, and before it is written to a checkpoint;
            None: there is nobody to tell.
        guard: sees to it that no call to the variable's server waits for ever; None: nobody does.
    """

    before_read: Callable[[], None] | None = None
    guard: Guard | None = None

    @contextlib.contextmanager
    def told(self):
        """Inside, the owner knows that the variable is read."""
        if not tf.executing_eagerly():
            yield
            return
        with self._guarded():
            if self.before_read is not None:
                self.before_read()
            yield

    def tell(self) -> None:
        """Tells the owner that the variable is about to be read, by a call of somebody else's."""
        with self.told():
            pass
        if self.guard is not None and tf.executing_eagerly():
            self.guard.expect_calls()

    def _read_variable_op(self, no_copy: bool = False) -> tf.Tensor:
        with self.told():
            return super()._read_variable_op(no_copy)

    def assign(self, *args, **kwargs):
        """As TensorFlow's; does not wait for ever for a server that is silent."""
        with self._guarded():
            return super().assign(*args, **kwargs)

    def assign_add(self, *args, **kwargs):
        """As TensorFlow's, likewise."""
        with self._guarded():
            return super().assign_add(*args, **kwargs)

    def assign_sub(self, *args, **kwargs):
        """As TensorFlow's, likewise."""
        with self._guarded():
            return super().assign_sub(*args, **kwargs)

    def _guarded(self) -> contextlib.AbstractContextManager:
        if self.guard is None or not tf.executing_eagerly():
            return contextlib.nullcontext()
        return self.guard.watched()

    def _serialize_to_tensors(self):
        # What reads it is traced if a checkpoint's variables lie on several servers.
        with tf.init_scope():
            self.tell()
        return super()._serialize_to_tensors()


def shown(variable: tf.Variable) -> ShownVariable | None:
    """The variable itself; None if it is of another kind."""
    return variable if isinstance(variable, ShownVariable) else None


def arguments_of(kwargs: dict) -> dict:
    """Those of a creator's arguments that a variable's constructor takes."""
    return {name: kwargs[name] for name in _ARGUMENTS if name in kwargs}


_ARGUMENTS = (
    *("initial_value", "trainable", "validate_shape", "name", "dtype", "constraint"),
    *("synchronization", "aggregation", "shape"),
)
