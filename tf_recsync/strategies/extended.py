"""Where the variables of a strategy lie."""

from __future__ import annotations

import contextlib
import itertools
import re
import types

import tensorflow as tf

from tf_recsync.cluster import CHIEF, Cluster, processor_of
from tf_recsync.optimizers.base import DEFAULT_TABLES
from tf_recsync.shown_variable import Guard, ShownVariable, arguments_of
from tf_recsync.synchronization.arrangement import Arrangement
from tf_recsync.synchronization.copies import CopiedVariable


class Extended(tf.distribute.StrategyExtended):
    """One replica as far as Keras can see: each worker runs its own.

    Where groups have copies, a variable is what users see of them, in this process, and tables are
    on the embedding PSs; without any, each group has a copy of everything. An only group's
    variables go round robin to its servers, and metrics here: workers keep their own, and on a
    server each reading and each value would be a call.

    Args:
        strategy: the strategy.
        guard: sees to it that calls to what lies on servers end.
        cluster: the connected cluster.
        arrangement: the groups, and the servers that belong to none.
        copies_tables: whether only tables that are placed there lie on embedding PSs.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        guard: Guard,
        cluster: Cluster,
        arrangement: Arrangement,
        copies_tables: bool,
    ):
        super().__init__(strategy)
        self._cluster = cluster
        self._cluster_resolver = cluster.resolver  # `tf.distribute.Strategy` gives it to users.
        self._guard = guard
        self._has_copies = arrangement.has_copies
        self._servers = [processor_of("ps", server) for server in arrangement.embedding_ps]
        self._turns = itertools.cycle(self._servers)  # For what nobody has placed.
        self._copies_tables = copies_tables
        self._sizes = [0] * arrangement.shards  # Elements, of what is copied.

    def placed_on(self, number: int) -> contextlib.AbstractContextManager:
        """A context in which variables are made on one of the servers, counted from 0."""
        return near(types.SimpleNamespace(device=self._servers[number]))

    def _scope(self, strategy):
        self._cluster.check_open()
        return super()._scope(strategy)

    def variable_created_in_scope(self, v: tf.Variable) -> bool:
        # Plain variables of a table's pieces, or of a model that is built while it is traced, know
        # no strategy; but none that is trained is on this process's own device.
        return isinstance(v, CopiedVariable) or tf.DeviceSpec.from_string(v.device).job == "ps"

    def _create_variable(self, next_creator, **kwargs):
        near = kwargs.get("colocate_with")
        device = None if near is None else near.device
        if not self._has_copies:
            if device is None:
                # Keras's metrics alone are read so.
                is_metric = kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ
                device = CHIEF if is_metric else next(self._turns)
            return self._create_on(device, next_creator, **kwargs)
        if device not in self._servers:
            device = None
            is_table = re.fullmatch(DEFAULT_TABLES, kwargs.get("name") or "")
            if self._servers and is_table and not self._copies_tables:
                device = next(self._turns)
        if device is not None:
            return self._create_on(device, next_creator, **kwargs)
        arguments = arguments_of(kwargs)
        with tf.device(CHIEF):
            copied = CopiedVariable(**arguments)
        # Beside what it belongs to, as versions beside their variable; else where there is least.
        least = self._sizes.index(min(self._sizes))
        copied.shard = near.shard if isinstance(near, CopiedVariable) else least
        self._sizes[copied.shard] += copied.shape.num_elements() or 0
        return copied

    def _create_on(self, device: str, next_creator, **kwargs) -> tf.Variable:
        with tf.device(device):
            if not tf.executing_eagerly() or kwargs.get("initial_value") is None:
                return next_creator(**{**kwargs, "colocate_with": None})
            strategy = kwargs.get("distribute_strategy")
            with self._guard.watched():  # Its first value is computed there.
                variable = ShownVariable(**arguments_of(kwargs), distribute_strategy=strategy)
            variable.guard = self._guard
            return variable

    def call_for_each_replica(self, fn, args=(), kwargs=None):
        with tf.distribute.ReplicaContext(self._container_strategy(), replica_id_in_sync_group=0):
            return fn(*args, **(kwargs or {}))

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
        return (CHIEF,)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        return self.worker_devices

    def _in_multi_worker_mode(self) -> bool:
        return False

    def colocate_vars_with(self, colocate_with_variable) -> contextlib.AbstractContextManager:
        # All that a worker has lies on one device.
        return near(colocate_with_variable)


def near(what) -> contextlib.AbstractContextManager:
    """A context in which a strategy makes variables where something lies, by its `device`."""
    return tf.variable_creator_scope(
        lambda create, **kwargs: create(**{**kwargs, "colocate_with": what})
    )
