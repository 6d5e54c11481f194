"""Variables that this process shows to users while workers train them."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops


class ShownVariable(resource_variable_ops.ResourceVariable):
    """A variable whose owner is told before this process reads it.

    Attributes:
        before_read: is called before an eager read, and before it is written to a checkpoint;
            None: there is nobody to tell.
        check: is called before that, and raises an error if it can't be read any more.
    """

    before_read: Callable[[], None] | None = None
    check: Callable[[], None] | None = None

    def tell(self) -> None:
        """Tells the owner that the variable is about to be read."""
        if not tf.executing_eagerly():
            return
        if self.check is not None:
            self.check()
        if self.before_read is not None:
            self.before_read()

    def _read_variable_op(self, no_copy: bool = False) -> tf.Tensor:
        self.tell()
        return super()._read_variable_op(no_copy)

    def _serialize_to_tensors(self):
        # What reads it is traced if a checkpoint's variables lie on several servers.
        with tf.init_scope():
            self.tell()
        return super()._serialize_to_tensors()


def shown(variable: tf.Variable) -> ShownVariable | None:
    """The variable behind what a `tf.distribute` strategy may have put around it; None if it is
    of another kind."""
    variable = getattr(variable, "_v", variable)
    return variable if isinstance(variable, ShownVariable) else None


def create(
    check: Callable[[], None], next_creator: Callable[..., tf.Variable], **kwargs
) -> tf.Variable:
    """For `tf.variable_creator_scope`: makes such a variable where TensorFlow's own would be.

    Args:
        check: the variable's.
        next_creator: is called where a variable is not to be made at once.
        **kwargs: what creators get.
    """
    if not tf.executing_eagerly() or kwargs.get("initial_value") is None:
        return next_creator(**kwargs)
    variable = ShownVariable(
        **arguments_of(kwargs), distribute_strategy=kwargs.get("distribute_strategy")
    )
    variable.check = check
    return variable


def arguments_of(kwargs: dict) -> dict:
    """Those of a creator's arguments that a variable's constructor takes."""
    return {name: kwargs[name] for name in _ARGUMENTS if name in kwargs}


_ARGUMENTS = (
    *("initial_value", "trainable", "validate_shape", "name", "dtype", "constraint"),
    *("synchronization", "aggregation", "shape"),
)
