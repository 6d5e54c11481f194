"""The memory that a model takes on each server."""

from __future__ import annotations

import dataclasses
import math

import keras
import tensorflow as tf

from tf_recsync import ops
from tf_recsync.cluster import Cluster, Server, fetch, processor_of
from tf_recsync.optimizers import base
from tf_recsync.strategies.model_variables import copied_variables, variables_of
from tf_recsync.synchronization.arrangement import Arrangement
from tf_recsync.synchronization.copies import CopiedVariable, is_copied


@dataclasses.dataclass(frozen=True)
class ServerMemory:
    """The bytes that a model takes on a server.

    What steps need for a while, such as messages and sums of gradients, is in `resident` only.

    Attributes:
        job: "ps" or "worker".
        index: which one.
        tables: of the values of embedding tables' rows.
        slots: of what the optimizer keeps for each of their elements; nothing with
            `Adagrad(rowwise=True)`.
        per_row: of what it keeps once for each of their rows, such as versions, and accumulators
            with `rowwise`.
        dense: of all else: dense parameters and what belongs to them.
        resident: that the server's process has at the moment, with TensorFlow and all else; None
            if it does not answer. Servers in one process have the same.
    """

    job: str
    index: int
    tables: int
    slots: int
    per_row: int
    dense: int
    resident: int | None

    @property
    def total(self) -> int:
        """All that the model takes there, without what else the process has."""
        return self.tables + self.slots + self.per_row + self.dense

    def __str__(self) -> str:
        parts = ", ".join(f"{n} {getattr(self, n) / 2**20:.1f}" for n in _KINDS)
        measured = "not known" if self.resident is None else f"{self.resident / 2**20:.1f} MiB"
        total = f"{self.total / 2**20:.1f} MiB"
        return f"{self.job}:{self.index} {total} ({parts}), resident {measured}"


_KINDS = ("tables", "slots", "per_row", "dense")


def memory_of(model: keras.Model, cluster: Cluster, arrangement: Arrangement) -> list[ServerMemory]:
    """See `FitStrategy.memory`; call it where calls to servers are watched.

    Args:
        model: a built model.
        cluster: the connected cluster.
        arrangement: the groups, whose holders have copies.
    """
    servers = [*cluster.membership.servers("ps"), *cluster.membership.servers("worker")]
    counted = {server: dict.fromkeys(_KINDS, 0) for server in servers}
    kinds = _kinds(model)
    for value in variables_of(model):
        device = tf.DeviceSpec.from_string(value.device)
        # Copies, and what this process has, are not among them.
        if (device.job, device.task) in counted and not isinstance(value, CopiedVariable):
            counted[device.job, device.task][kinds.get(id(value), "dense")] += _size(value)
    # Of what servers have pieces of, these; they are known when the model has trained.
    synchronizer = getattr(getattr(model, "train_function", None), "synchronizer", None)
    copied = copied_variables(model) if synchronizer is None else synchronizer.copies.variables
    shards = {} if synchronizer is None else synchronizer.copies.shards
    for value in copied:
        shard = shards.get(id(value), value.shard)
        for group in arrangement.groups:
            counted[group.holders[shard]][kinds.get(id(value), "dense")] += _size(value)
    for server in arrangement.sync_ps:
        # The central copy, of float32.
        elements = sum(math.prod(v.shape) for v in model.trainable_variables if is_copied(v))
        counted["ps", server]["dense"] += 4 * elements // len(arrangement.sync_ps)
    return [
        ServerMemory(*server, **counted[server], resident=_resident(server)) for server in servers
    ]


def _kinds(model: keras.Model) -> dict[int, str]:
    """What variables of tables are, by their ids."""
    keys = (v for v in model.variables if hasattr(v, "beside_table"))
    found: dict[int, str] = {id(v._value): "per_row" for v in keys}
    optimizer = getattr(model, "optimizer", None)
    parts = [] if optimizer is None else base.parts_of(optimizer)
    for state in (s for one in parts for s in getattr(one, "states", ()) if s.is_table):
        beside = [v for v in state.beside if v is not state.counters]
        found.update((id(v._value), "per_row") for v in beside)
        if not state.rowwise:
            found.update((id(v._value), "slots") for v in state.accumulators)
        found[id(state.variable._value)] = "tables"
    return found


def _size(value: tf.Variable) -> int:
    return math.prod(value.shape) * value.dtype.size


def _resident(server: Server) -> int | None:
    try:
        with tf.device(processor_of(*server)):
            found = int(fetch(ops.resident_memory()))
    except tf.errors.OpError:
        return None
    return None if found < 0 else found
