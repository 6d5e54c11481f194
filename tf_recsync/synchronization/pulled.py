"""Parameters as a worker's step sees them: pulled, with their versions.

Keras reads its variables through a `keras.StatelessScope`. A dense variable is
mapped to the tensor that was pulled; a table to a `PulledTable`, which pulls
the rows that are looked up, when they are looked up, from the server.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.eager import record, tape
from tensorflow.python.util.object_identity import ObjectIdentityDictionary

from tf_recsync.ops.bags import Bags, Request, merge
from tf_recsync.optimizers.base import VariableState


class _Watched:
    """What a gradient tape needs of a variable: a handle to watch."""

    trainable = True

    def __init__(self, handle: tf.Tensor):
        self.handle = handle


def watch(tensor: tf.Tensor) -> None:
    """Has every active gradient tape watch `tensor`, as for a variable read."""
    tape.variable_accessed(_Watched(tensor))


def as_variable(tensor: tf.Tensor, variable: keras.Variable) -> tf.Tensor:
    """Gives a variable's pulled value what is asked of `variable.value`.

    A gradient tape asks for the handle that it watches, here the tensor itself,
    and an optimizer for the id by which it finds what it keeps of the variable.
    """
    tensor.handle = tensor
    tensor._unique_id = variable._value._unique_id
    return tensor


class TableStandIn(tf.__internal__.types.Tensor):
    """Stands for an embedding table where Keras expects its variable's value.

    Args:
        state: the optimizer's state of the table.
    """

    trainable = True

    def __init__(self, state: VariableState):
        self.state = state
        self._stand_ins: list[tf.Tensor] = []  # For its values.

    @property
    def dtype(self) -> tf.DType:
        return tf.float32

    @property
    def shape(self) -> tf.TensorShape:
        return tf.TensorShape(self.state.variable.shape)

    @property
    def name(self) -> str:
        return self.state.variable.path

    @property
    def _unique_id(self) -> str:
        return self.state.variable._value._unique_id

    @property
    def is_keyed(self) -> bool:
        """Whether its ids are keys."""
        return self.state.keyed is not None

    @property
    def is_used_whole(self) -> bool:
        """Whether anything is computed from a stand-in; Keras asks for its shape anyway."""
        return any(stand_in.consumers() for stand_in in self._stand_ins)

    def get_shape(self) -> tf.TensorShape:
        return self.shape

    def sparse_read(self, indices, name=None) -> tf.Tensor:
        """Looks up rows; the protocol by which `tf.gather` knows a variable.

        Args:
            indices: row ids of any shape, int32 or int64.
            name: ignored.
        """
        try:
            indices = tf.convert_to_tensor(indices)
            rows = self.lookup_bags(Bags(tf.cast(tf.reshape(indices, [-1]), tf.int64)))
            shape = tf.concat([tf.shape(indices), self.shape[1:]], 0)
            return tf.ensure_shape(tf.reshape(rows, shape), indices.shape + self.shape[1:])
        except AttributeError as error:
            # tf.gather takes an AttributeError for "not a variable" and would
            # silently pull the whole table instead.
            raise RuntimeError(f"looking up rows of {self.name} failed: {error}") from error

    def lookup_bags(self, bags: Bags) -> tf.Tensor:
        """Looks up pooled vectors, [bags, ...]; what an EmbeddingCollection calls."""
        return self.look_up([self], Request([bags]))

    @staticmethod
    def look_up(tables: Sequence[TableStandIn], request: Request) -> tf.Tensor:
        """Looks up in several tables at once; all are on one server.

        Args:
            tables: the table of each of `request.bags`; only one without a computation.
            request: what is wanted.

        Returns:
            The result of the computation, or the pooled vectors, [bags, ...].
        """
        raise NotImplementedError


@dataclasses.dataclass(eq=False)
class PulledLookup:
    """What was pulled for one lookup.

    Attributes:
        bags: what was looked up.
        values: the pooled vectors, [bags, ...]; still on their server if something is
            computed from them there.
        versions: gives the versions of `bags.ids`, int64 [n]; they stay on the
            server until somebody asks.
        message: the `pull_plan.PullPlan` that pulled it with others; None for a
            lookup by itself.
        number: its place among all lookups that were pulled with it.
        is_whole: whether it is all rows of the table, by their numbers.
    """

    bags: Bags
    values: tf.Tensor
    versions: Callable[[], tf.Tensor]
    message: Any = None
    number: int = 0
    is_whole: bool = False


@dataclasses.dataclass(eq=False)
class Computed:
    """What a server has computed from pooled vectors, and how it is differentiated there.

    Attributes:
        device: the server's.
        vectors: of each lookup, [bags, ...], on the server.
        result: [count, width], on the server.
        tape: recorded how it was computed.
        values: the result, on the worker.
    """

    device: str
    vectors: list[tf.Tensor]
    result: tf.Tensor
    tape: tf.GradientTape
    values: tf.Tensor

    def pull_back(self, gradient: tf.Tensor) -> list[tf.Tensor]:
        """The gradients of the vectors, of that of the result; on the server."""
        with tf.device(self.device):
            gradients = self.tape.gradient(
                self.result,
                self.vectors,
                output_gradients=gradient,
                unconnected_gradients=tf.UnconnectedGradients.ZERO,
            )
            return [tf.convert_to_tensor(g) for g in gradients]


@dataclasses.dataclass(eq=False)
class PulledRequest:
    """What was pulled for one request.

    Attributes:
        lookups: one for each of its bags.
        computed: what was computed from them, or None.
    """

    lookups: list[PulledLookup]
    computed: Computed | None = None


@dataclasses.dataclass(frozen=True)
class GradientPart:
    """The gradient of one lookup.

    Attributes:
        lookup: the lookup.
        values: the gradient of its pooled vectors, [bags, ...].
        source: `values` is item `source[2]` of `source[0].pull_back(source[1])`, a
            `Computed` and the gradient of its result; None if it is anything else.
    """

    lookup: PulledLookup
    values: tf.Tensor
    source: tuple[Computed, tf.Tensor, int] | None = None


class PulledTable(TableStandIn):
    """An embedding table in a worker's step.

    A lookup (`tf.gather`, which is what `keras.layers.Embedding` does, or an
    `EmbeddingCollection`'s) gets what was pulled for it, or pulls it now. The
    gradient is an IndexedSlices whose indices count the pooled vectors of the
    step, in the order of the lookups; `complete` and `resolve` say which they are.

    Args:
        state: the optimizer's state of the table.
        pull: `pull(states, request)` pulls a `PulledRequest`.
        pull_whole: `pull_whole(state)` pulls all rows, a `PulledLookup`; None if the step uses
            the table for lookups alone.
    """

    def __init__(self, state: VariableState, pull: Callable, pull_whole: Callable | None):
        super().__init__(state)
        self._pull = pull
        self._pull_whole = pull_whole
        # What the tape differentiates by; its value is never used.
        self.handle = tf.zeros([])
        self._looked_up = tf.zeros([], tf.int64)
        self._lookups: list[PulledLookup] = []
        self._parts = ObjectIdentityDictionary()  # `GradientPart`s by a gradient's indices.
        self._prefetched: collections.deque[PulledRequest] = collections.deque()

    def prefetched(self, pulled: PulledRequest) -> None:
        """Adds what was pulled for a request to come, of which this is the first table.

        Requests are served in this order.
        """
        self._prefetched.append(pulled)

    @staticmethod
    def look_up(tables, request):
        first = tables[0]
        if first._prefetched:
            pulled = first._prefetched.popleft()
        else:
            pulled = first._pull([table.state for table in tables], request)
        return _differentiable(tables, pulled)

    def __tf_tensor__(self, dtype=None, name=None) -> tf.Tensor:
        """Pulls the whole table, if a layer uses it otherwise than for a lookup.

        Keras asks every table for its shape, by way of its value.
        """
        if self._pull_whole is None:
            self._stand_ins.append(tf.zeros(self.shape, dtype or self.dtype))
            return self._stand_ins[-1]
        if self.state.variable.dtype != "float32":
            raise ValueError(
                f"table {self.name} is used as a whole, not for lookups alone, as by a regularizer "
                "of its layer: under a strategy its dtype must be float32 then, not "
                f"{self.state.variable.dtype}"
            )
        values = _differentiable([self], PulledRequest([self._pull_whole(self.state)]))
        return values if dtype is None else tf.cast(values, dtype)

    def note(self, lookup: PulledLookup) -> Callable:
        """Notes a lookup; gives what makes gradients of its vectors gradients of the table."""
        first, count = self._looked_up, lookup.bags.size
        self._looked_up = first + count
        self._lookups.append(lookup)
        watch(self.handle)

        def gradient_of_table(values, source=None):
            if lookup.is_whole and self.is_keyed:
                raise ValueError(
                    f"table {self.state.keyed.table!r} ({self.name}) is trained as a whole, not "
                    "by lookups alone, as by a regularizer: under a strategy it must have no keys "
                    "then, as what is pushed says keys, not rows; leave it out of the loss"
                )
            positions = tf.range(first, first + count)
            values = tf.reshape(values, [-1, *self.shape[1:]])
            self._parts[positions] = GradientPart(lookup, values, source)
            return tf.IndexedSlices(values, positions)

        return gradient_of_table

    def check(self) -> None:
        """Makes sure, after the step, that nothing was computed from a stand-in."""
        if self.is_used_whole:
            raise RuntimeError(
                f"the step uses table {self.name} as a whole, but did not when it was traced to "
                "find its lookups; a step must do the same each time it is traced"
            )

    def complete(self, gradient: tf.IndexedSlices | tf.Tensor) -> list[GradientPart] | None:
        """The gradients of lookups that, one after the other, are `gradient`.

        None if the gradient is anything else.
        """
        if not isinstance(gradient, tf.IndexedSlices):
            return None
        indices, values = gradient.indices, gradient.values
        # Several lookups' gradients are added up by putting them side by side.
        joined = indices.op.type == "ConcatV2" and indices not in self._parts
        parts = [self._parts.get(i) for i in (_joined(indices) if joined else [indices])]
        if any(part is None for part in parts):
            return None
        if len({id(part.lookup) for part in parts}) < len(parts):
            return None
        found = _joined(values) if joined else [values]
        if [id(value) for value in found] == [id(part.values) for part in parts]:
            return parts
        # Somebody has changed the values, but not what they belong to.
        if joined:
            values = tf.split(values, tf.stack([part.lookup.bags.size for part in parts]))
        return [
            GradientPart(part.lookup, value)
            for part, value in zip(parts, values if joined else [values], strict=True)
        ]

    def resolve(self, gradient) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """A gradient of the table as (values [n, ...], row ids [n], versions [n]).

        Raises:
            TypeError: if the gradient was made dense on its way here, or pooled
                vectors' gradients were mixed.
        """
        if not isinstance(gradient, tf.IndexedSlices):
            raise TypeError(
                f"the gradient of table {self.name} must stay a tf.IndexedSlices until the "
                f"optimizer gets it, not {type(gradient).__name__}"
            )
        parts = self.complete(gradient)
        if parts is not None:
            bags = merge([part.lookup.bags for part in parts])
            versions = tf.concat([part.lookup.versions() for part in parts], 0)
            return bags.expand(gradient.values), bags.ids, versions
        if any(lookup.bags.bags is not None for lookup in self._lookups):
            raise TypeError(
                f"the gradient of table {self.name}, which pools its rows, must reach the "
                "optimizer as the tape returned it"
            )
        ids = tf.gather(tf.concat([k.bags.ids for k in self._lookups], 0), gradient.indices)
        versions = tf.concat([k.versions() for k in self._lookups], 0)
        return gradient.values, ids, tf.gather(versions, gradient.indices)


def _differentiable(tables: Sequence[PulledTable], pulled: PulledRequest) -> tf.Tensor:
    """What was pulled, with gradients of the tables that it was looked up in."""
    computed = pulled.computed
    notes = [table.note(k) for table, k in zip(tables, pulled.lookups, strict=True)]

    def gradient(upstream):
        if computed is None:
            return [notes[0](upstream)]
        # Unless somebody asks for them here, they are computed after the push.
        gradients = computed.pull_back(upstream)
        return [
            note(g, (computed, upstream, i))
            for i, (note, g) in enumerate(zip(notes, gradients, strict=True))
        ]

    values = tf.identity(pulled.lookups[0].values if computed is None else computed.values)
    # Not tf.custom_gradient: TensorFlow keeps what it is given for a graph, and with it the graph,
    # its model and the strategy, as long as the process lives.
    record.record_operation("RecsyncPulled", [values], [t.handle for t in tables], gradient)
    return values


def _joined(tensor: tf.Tensor) -> list[tf.Tensor]:
    """What `tensor` was concatenated from, if it was."""
    return list(tensor.op.inputs)[:-1] if tensor.op.type == "ConcatV2" else []


def unknown_assigned(name: str) -> ValueError:
    """What a step raises that assigns a variable of which workers know nothing."""
    return ValueError(
        f"{name} is assigned in the step and is no variable of the model: its value would be lost; "
        "make it an attribute of the model or of one of its layers"
    )


class PulledScope(keras.StatelessScope):
    """A StatelessScope in which trainable variables have their pulled values.

    Args:
        dense: (variable, pulled tensor) pairs of dense trainable variables.
        tables: `TableStandIn`s.
        others: (variable, tensor) pairs of everything else that may be read and
            assigned in the step: metrics, moving averages, seeds.
        late: variables that are read when the step asks for them.
        trained: those of them that are trained.
        read: gives the value of one of them.
        unread: variables that nobody reads, so that nothing is lost if they are assigned.
    """

    def __init__(self, dense, tables, others, late=(), trained=(), read=None, unread=()):
        # Else what layers add_loss would be dropped.
        super().__init__(state_mapping=[*dense, *others], collect_losses=True)
        for variable, _ in dense:
            as_variable(self.state_mapping[id(variable)], variable)
        self._dense = {id(v) for v in [*(v for v, _ in dense), *trained]}
        self._tables = list(tables)
        self._trainable = self._dense | {id(table.state.variable) for table in tables}
        self._late = {id(variable) for variable in late}
        self._read = read
        self._unread = {id(variable) for variable in unread}
        for table in tables:
            self.state_mapping[id(table.state.variable)] = table

    def __enter__(self):
        # tf.gather recognises a variable by this method, which Keras variables
        # lack; without it a lookup would pull the whole table.
        for table in self._tables:
            table.state.variable.sparse_read = table.sparse_read
        return super().__enter__()

    def __exit__(self, *args, **kwargs):
        for table in self._tables:
            del table.state.variable.sparse_read
        return super().__exit__(*args, **kwargs)

    def get_current_value(self, variable):
        if id(variable) in self._late and id(variable) not in self.state_mapping:
            self.state_mapping[id(variable)] = self._read(variable)
        value = super().get_current_value(variable)
        if id(variable) in self._dense:
            watch(value)
        return value

    def add_update(self, update):
        variable, _ = update
        if id(variable) in self._trainable:
            raise ValueError(
                f"trainable variable {variable.path} is assigned in the training step; under a "
                "parameter-server strategy it can only be changed through the optimizer"
            )
        known = self._late | self._unread | self.state_mapping.keys()
        if id(variable) not in known:
            raise unknown_assigned(variable.path)
        if id(variable) in self._late:
            self.get_current_value(variable)  # What is pushed is by how much it changes.
        super().add_update(update)
