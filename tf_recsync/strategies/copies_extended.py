"""Where the variables of a strategy lie whose groups of workers have copies of their own."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

import tensorflow as tf

from tf_recsync.cluster import device_of
from tf_recsync.optimizers.base import DEFAULT_TABLES
from tf_recsync.shown_variable import Guard, ShownVariable, arguments_of
from tf_recsync.strategies.fit_strategy import near
from tf_recsync.synchronization.arrangement import Arrangement
from tf_recsync.synchronization.copies import CopiedVariable

_CHIEF = "/job:chief/replica:0/task:0/device:CPU:0"


class CopiesExtended(tf.distribute.StrategyExtended):
    """One replica as far as Keras can see: each worker runs its own.

    Args:
        strategy: the strategy.
        guard: sees to it that calls to what lies on servers end.
        arrangement: the groups. On its embedding PSs there is one copy of each table for all of
            them; without any, each group has a copy of everything.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        guard: Callable[[], Guard],
        arrangement: Arrangement,
    ):
        super().__init__(strategy)
        self._guard = guard
        self._servers = [
            device_of("ps", server) + "/device:CPU:0" for server in arrangement.embedding_ps
        ]
        self._next = 0  # Of the servers, for a table that nobody has placed.
        self._sizes = [0] * arrangement.shards  # Elements, of what is copied.

    def placed_on(self, number: int) -> contextlib.AbstractContextManager:
        """A context in which variables are made on one of the servers, counted from 0."""
        return near(_On(self._servers[number]))

    def _create_variable(self, next_creator, **kwargs):
        del next_creator
        near = kwargs.get("colocate_with")
        device = None if near is None else near.device
        if device not in self._servers:
            device = None
            if self._servers and re.fullmatch(DEFAULT_TABLES, kwargs.get("name") or ""):
                device = self._servers[self._next % len(self._servers)]
                self._next += 1
        arguments = arguments_of(kwargs)
        if device is not None:
            with tf.device(device):
                table = ShownVariable(**arguments)
                table.guard = self._guard()
                return table
        with tf.device(_CHIEF):
            copied = CopiedVariable(**arguments)
        # Beside what it belongs to, as versions beside their variable; else where there is least.
        least = self._sizes.index(min(self._sizes))
        copied.shard = near.shard if isinstance(near, CopiedVariable) else least
        self._sizes[copied.shard] += copied.shape.num_elements() or 0
        return copied

    def _call_for_each_replica(self, fn, args, kwargs):
        with tf.distribute.ReplicaContext(self._container_strategy(), replica_id_in_sync_group=0):
            return fn(*args, **kwargs)

    def call_for_each_replica(self, fn, args=(), kwargs=None):
        return self._call_for_each_replica(fn, args, kwargs or {})

    def _use_merge_call(self) -> bool:
        return False

    def _replica_ctx_all_reduce(self, reduce_op, value, options=None):
        del reduce_op, options
        return value

    def _replica_ctx_update(self, var, fn, args=(), kwargs=None, group=True):
        return self._update(var, fn, args, kwargs or {}, group)

    def _update(self, var, fn, args, kwargs, group):
        result = fn(var, *args, **kwargs)
        return tf.group(result) if group else result

    def _reduce_to(self, reduce_op, value, destinations, options):
        del reduce_op, destinations, options
        return value

    def _get_local_replica_id(self, replica_id_in_sync_group):
        return replica_id_in_sync_group

    def _local_results(self, val):
        return (val,)

    def value_container(self, value):
        return value

    @property
    def _num_replicas_in_sync(self) -> int:
        return 1

    @property
    def worker_devices(self) -> tuple[str, ...]:
        return (_CHIEF,)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        return self.worker_devices

    def _in_multi_worker_mode(self) -> bool:
        return False

    def colocate_vars_with(self, colocate_with_variable) -> contextlib.AbstractContextManager:
        # All that a worker has lies on one device.
        return near(colocate_with_variable)


class _On:
    """Stands for whatever lies on a device."""

    def __init__(self, device: str):
        self.device = device
