"""Variables that this process shows to users while workers train them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from tf_recsync.cluster import fetch


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
    """A variable whose owner is told before this process reads or assigns it.

    Attributes:
        before_read: is called before an eager read, and before it is written to a checkpoint;
            None: there is nobody to tell.
        before_assign: is called before this process assigns it, or restores it from a checkpoint;
            None: there is nobody to tell.
        settle: brings it up to date, where steps leave some of what they do for later; it is
            called before this process reads or assigns the variable.
        log_decays: a variable beside it with what `settle` applies; None: there is none.
        guard: sees to it that no call to the variable's server waits for ever; None: nobody does.
        assignments: how often this process has set it, or rows of it without new versions.
    """

    assignments = 0

    log_decays: Any = None
    before_read: Callable[[], object] | None = None
    before_assign: Callable[[], object] | None = None
    guard: Guard | None = None
    settle: Callable[[], None] = staticmethod(lambda: None)

    @contextlib.contextmanager
    def told(self, settled: bool = True):
        """Inside, the owner knows that the variable is read.

        Args:
            settled: whether it is brought up to date for that.
        """
        if not tf.executing_eagerly():
            yield
            return
        with self.guarded():
            if self.before_read is not None:
                self.before_read()
            if settled:
                self.settle()
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

    def numpy(self) -> np.ndarray:
        """The value, as TensorFlow's does; the server keeps nothing of the call (`fetch`)."""
        if not tf.executing_eagerly():
            return super().numpy()
        # A copy, and a number if it is one: users change arrays, and look numbers up.
        return fetch(self.read_value()).copy()[()]

    def __int__(self) -> int:
        return int(self.numpy())

    def __float__(self) -> float:
        return float(self.numpy())

    def tell_of_assignment(self, are_noted: bool = False) -> None:
        """Tells the owner that this process is about to set it; it is up to date then.

        Args:
            are_noted: whether only rows are set, and these get new versions. Default False.
        """
        self.assignments += not are_noted
        with self.guarded():
            if self.before_assign is not None:
                self.before_assign()
            self.settle()

    def _about_to_change(self) -> None:
        if tf.executing_eagerly():
            self.tell_of_assignment()

    def assign(self, *args, **kwargs):
        """As TensorFlow's; does not wait for ever for a server that is silent."""
        with self.guarded():
            self._about_to_change()
            return super().assign(*args, **kwargs)

    def assign_add(self, *args, **kwargs):
        """As TensorFlow's, likewise."""
        with self.guarded():
            self._about_to_change()
            return super().assign_add(*args, **kwargs)

    def assign_sub(self, *args, **kwargs):
        """As TensorFlow's, likewise."""
        with self.guarded():
            self._about_to_change()
            return super().assign_sub(*args, **kwargs)

    def guarded(self) -> contextlib.AbstractContextManager:
        """Inside, calls to its server end if that is silent."""
        if self.guard is None or not tf.executing_eagerly():
            return contextlib.nullcontext()
        return self.guard.watched()

    def make_anew(self) -> None:
        """Makes it again on its server, whose process is another one; all its elements are 0.

        Functions that were traced before refer to what was there, and can't be called any more.
        """
        name, unique = self._handle_name.removesuffix(":0"), self._unique_id
        with self.guarded(), tf.device(self.device):
            handle = resource_variable_ops.eager_safe_variable_handle(
                initial_value=tf.zeros([], self.dtype),
                shape=self.shape,
                shared_name=None,
                name=name,
                graph_mode=False,
            )
            zeros = tf.zeros(self.shape, self.dtype)
            tf.raw_ops.AssignVariableOp(resource=handle, value=zeros)
        # As the constructor does.
        handle._parent_trackable = weakref.ref(self)
        handle._name = self._handle_name
        handle._unique_id = unique
        self._handle = handle

    def _serialize_to_tensors(self):
        # What reads it is traced if a checkpoint's variables lie on several servers.
        with tf.init_scope():
            self.tell()
        return super()._serialize_to_tensors()

    def _restore_from_tensors(self, restored_tensors):
        with tf.init_scope():
            self.tell_of_assignment()
        return super()._restore_from_tensors(restored_tensors)


def shown(variable: tf.Variable) -> ShownVariable | None:
    """The variable itself; None if it is of another kind."""
    return variable if isinstance(variable, ShownVariable) else None


def tell_of_assignment(variable: tf.Variable, are_noted: bool = False) -> None:
    """Tells a variable's owner that this process is about to set it, whatever kind it is of."""
    if isinstance(variable, ShownVariable):
        variable.tell_of_assignment(are_noted)
    else:
        variable.assignments = assignments_of(variable) + (not are_noted)


def assignments_of(variable: tf.Variable) -> int:
    """How often this process has told that it sets a variable, but for rows with new versions."""
    return getattr(variable, "assignments", 0)


def guarded(variable: tf.Variable) -> contextlib.AbstractContextManager:
    """Inside, calls to a variable's server end if that is silent, whatever kind it is of."""
    found = shown(variable)
    return contextlib.nullcontext() if found is None else found.guarded()


def read_untold(variable: tf.Variable) -> np.ndarray:
    """The value of a variable as it is: those who train it are not told, and do not wait.

    Args:
        variable: any variable, on whatever server; does not wait for ever for one that is silent.
    """
    if shown(variable) is None:
        return fetch(variable.read_value())
    with guarded(variable):
        value = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
        return fetch(value)


def read_rows(variable: tf.Variable, first: int, count: int) -> np.ndarray:
    """Some rows of a variable that follow one another; the others stay where they are.

    Args:
        variable: any variable, on whatever server, whose owner has been told; does not wait for
            ever for one that is silent.
        first: the first of the rows.
        count: how many they are.
    """
    # Arrays: tensors of Python's numbers are shared among threads, on servers as well.
    bounds = [np.asarray(number, np.int64) for number in (first, first + count, 1)]
    with guarded(variable):
        with tf.device(variable.device):
            indices = tf.range(*bounds)
            rows = tf.raw_ops.ResourceGather(
                resource=variable.handle, indices=indices, dtype=variable.dtype
            )
        return fetch(rows)


def assign_rows(variable: tf.Variable, first: int, values: np.ndarray) -> None:
    """Sets rows of a variable that follow one another, in place; the others stay as they are.

    Args:
        variable: any variable, on whatever server; does not wait for ever for one that is silent.
        first: the first of the rows.
        values: [rows, ...] of the variable's dtype.
    """
    with guarded(variable):
        tf.raw_ops.ResourceStridedSliceAssign(
            ref=variable.handle,
            begin=[first],
            end=[first + len(values)],
            strides=[1],
            value=values,
        )


def arguments_of(kwargs: dict) -> dict:
    """Those of a creator's arguments that a variable's constructor takes."""
    return {name: kwargs[name] for name in _ARGUMENTS if name in kwargs}


_ARGUMENTS = (
    *("initial_value", "trainable", "validate_shape", "name", "dtype", "constraint"),
    *("synchronization", "aggregation", "shape"),
)
