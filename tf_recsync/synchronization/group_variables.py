"""A model's variables as a group of trainers has them: the model's own, or a copy of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_recsync.synchronization.arrangement import Group
from tf_recsync.synchronization.copies import Copies, device_for, is_copied
from tf_recsync.synchronization.remote_functions import RemoteFunction


class GroupVariables:
    """Where a group's variables are.

    Args:
        group: the group.
        copies: where it has its copies; None if the model's variables are its own.
    """

    def __init__(self, group: Group, copies: Copies | None = None):
        self.group = group
        self._copies = copies
        self._shards = {} if copies is None else copies.shards
        known = [] if copies is None else copies.variables
        self._numbers = {id(variable): i for i, variable in enumerate(known)}

    def device(self, variable: keras.Variable) -> str:
        """The device that holds the group's; "" for where a step runs."""
        return device_for(variable, self.group, self._shards)

    def own(self, variable: keras.Variable) -> tf.Variable:
        """The group's own, to be read and assigned; it has to have one."""
        value = variable._value
        if not is_copied(variable):
            return value
        copies = self._copies.of(self.group.index)
        if copies is None:
            raise tf.errors.UnavailableError(None, None, f"{self.group} has no copies")
        return copies[self._numbers[id(value)]]

    def on_own(self, concrete: Callable) -> Callable[..., Any]:
        """Has a concrete function of tensors use the group's variables."""
        if self._copies is None:
            return concrete
        replaced = [variable.handle for variable in self._copies.variables]
        function = RemoteFunction(concrete, replaced)
        return lambda *tensors: function(*tensors, *self._copies.handles(self.group.index))
