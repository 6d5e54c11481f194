"""Finds out, before a step is traced, which rows it will look up.

A model looks up its tables one after the other, and each lookup alone would
cost a message to a server and back. So the step is traced once with stand-ins
for all parameters, to see which ids it looks up in which table. Ids that depend
on the batch alone can be computed first, and the rows of all tables of a server
pulled in one message.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from absl import logging
from tensorflow.python.framework import op_def_registry

from tf_recsync.ops.bags import Request
from tf_recsync.optimizers.base import VariableState
from tf_recsync.synchronization import context
from tf_recsync.synchronization.pulled import PulledScope, TableStandIn
from tf_recsync.synchronization.seeds import drawing_from

# Of the ops with a state, those that do not change it, nor give something else when run again.
_READS = {
    *("Assert", "PrintV2"),
    *("HashTableV2", "LookupTableFindV2", "LookupTableSizeV2"),
    *("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VarHandleOp", "VariableShape"),
}


@dataclasses.dataclass(frozen=True)
class Lookups:
    """The lookups of a step that depend on its batch alone, not on random numbers either.

    Attributes:
        tables: the indices of each request's tables, in the order of the requests.
        requests: computes them from a batch's flattened tensors.
        whole: the indices of tables that are used otherwise than for lookups;
            None if that is not known.
        inserts: whether keys that have no row in their table may be given one.
    """

    tables: tuple[tuple[int, ...], ...] = ()
    requests: Callable[..., list[Request]] = lambda *_: []
    whole: frozenset[int] | None = None
    inserts: bool = False


class _DryTable(TableStandIn):
    """A table that notes what is looked up in it."""

    def __init__(self, state: VariableState, found: list, index: int):
        super().__init__(state)
        self._found = found
        self._index = index
        self.handle = tf.compat.v1.placeholder(tf.float32, [])

    @staticmethod
    def look_up(tables, request):
        first, computation = tables[0], request.computation
        first._found.append((tuple(table._index for table in tables), request))
        row = first.shape[1:] if computation is None else [computation.width]
        return tf.compat.v1.placeholder(tf.float32, [None, *row])

    def __tf_tensor__(self, dtype=None, name=None):
        self._stand_ins.append(tf.compat.v1.placeholder(dtype or tf.float32, self.shape))
        return self._stand_ins[-1]


class _DryPush:
    """Where a step ends that is only looked at: nothing is pushed."""

    is_dry = True


def find_lookups(model: keras.Model, layout, method: str, element_spec: Any) -> Lookups:
    """Traces a step of the model with stand-ins to find its lookups.

    Args:
        model: a built model.
        layout: its `pull_push.Layout`.
        method: the name of the model's method that takes a batch.
        element_spec: the type spec of a batch.

    Returns:
        The lookups that can be computed first; none if the step can't be traced
        this way: then its tables are looked up one by one.
    """
    inserts = method == "train_step"
    if not layout.tables:
        return Lookups(inserts=inserts)
    found: list[tuple[tuple[int, ...], Request]] = []
    whole: set[int] = set()

    def dry_step(*flat):
        data = tf.nest.pack_sequence_as(element_spec, flat, expand_composites=True)

        def stand_in(variable):
            return variable, tf.compat.v1.placeholder(variable.dtype, variable.shape)

        tables = [_DryTable(state, found, i) for i, state in enumerate(layout.tables)]
        scope = PulledScope(
            dense=[stand_in(variable) for variable in layout.dense_variables],
            tables=tables,
            others=[stand_in(v) for v in [*layout.private, *layout.shared]],
            unread=layout.unread,
        )
        with context.pushing(_DryPush()), scope, drawing_from(layout.unseeded):
            getattr(model, method)(data)
        whole.update(i for i, table in enumerate(tables) if table.is_used_whole)
        return tf.zeros([])

    specs = tf.nest.flatten(element_spec, expand_composites=True)
    try:
        wrapped = tf.compat.v1.wrap_function(dry_step, specs)
    except Exception as error:  # A user's own step may do anything with its gradients.
        logging.info(
            "%s.%s can't be traced dry, its tables are looked up one by one: %s",
            model.name,
            method,
            error,
        )
        return Lookups(inserts=inserts)
    batch = wrapped.inputs[: len(specs)]
    # What is bound at each call, as the table of a StringLookup, a pruned function would not have.
    bound_late = {id(t) for t in wrapped.graph.deferred_internal_captures}
    known = {t.op.name for t in wrapped.inputs if id(t) not in bound_late}

    def computable(request):
        return all(_depends_only_on(t, known) for t in request.tensors)

    # A request is recognised by its place among those of its tables.
    late = {i for tables, request in found if not computable(request) for i in tables}
    while more := {i for tables, _ in found if late.intersection(tables) for i in tables} - late:
        late |= more
    early = [(tables, request) for tables, request in found if not late.intersection(tables)]
    if not early:
        return Lookups(whole=frozenset(whole), inserts=inserts)
    pruned = wrapped.prune(batch, [t for _, request in early for t in request.tensors])

    def compute(*flat):
        tensors = iter(pruned(*flat))
        return [request.replaced(tensors) for _, request in early]

    return Lookups(tuple(tables for tables, _ in early), compute, frozenset(whole), inserts)


def _depends_only_on(tensor: tf.Tensor, known: set[str]) -> bool:
    """Whether a tensor can be computed from the inputs of the graph that have these names.

    And so that it is the same each time: what is drawn at random, the step draws again.
    """
    pending = [tensor.op]
    seen = set()
    while pending:
        op = pending.pop()
        if op.name in seen or op.name in known:
            continue
        seen.add(op.name)
        if op.type == "Placeholder" or _varies(op.node_def, op.graph):
            return False
        pending += [t.op for t in op.inputs] + list(op.control_inputs)
    return True


def _varies(node: tf.compat.v1.NodeDef, graph: tf.Graph) -> bool:
    """Whether an op may give something else when it is run again, as one that draws numbers."""
    op_def = op_def_registry.get(node.op)
    if op_def is None:
        return True
    if not op_def.is_stateful or node.op in _READS:
        return False
    called = [attr.func.name for attr in node.attr.values() if attr.HasField("func")]
    called += [f.name for attr in node.attr.values() for f in attr.list.func]
    functions = [graph._get_function(name) for name in called]
    if not functions or None in functions:  # Of what is not known here, who knows.
        return True
    inner = [node for function in functions for node in function.cached_definition.node_def]
    return any(_varies(node, graph) for node in inner)
