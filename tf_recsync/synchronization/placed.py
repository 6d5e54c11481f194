"""What a worker's step runs on the servers that hold its weights, while the step is traced.

A placed layer's call is made under its server's device and a gradient tape of its own, and its
gradients are computed there, too. For the tape of the step it is one operation, from what comes in
and the weights to what goes out. So activations and their gradients travel, weights and theirs
don't; and what one placed layer gives another on the same server stays there. With a compression
what travels is encoded beside what made it, and decoded where it arrives.

Reference: sections 3.1.1 and 3.2.2 of the Hierarchical Training paper, where the net's graph is
transformed for that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend
from tensorflow.python.eager import record
from tensorflow.python.util.object_identity import ObjectIdentityDictionary

from tf_recsync import ops
from tf_recsync._instead import instead
from tf_recsync.compression import Compression
from tf_recsync.optimizers import base
from tf_recsync.synchronization import context, links, speeds
from tf_recsync.synchronization.divided import (
    LOGITS,
    DividedLayer,
    DividedVariable,
    is_elementwise,
)
from tf_recsync.synchronization.encoded import Encoder, Kind, Message
from tf_recsync.synchronization.placed_pieces import PlacedPieces
from tf_recsync.synchronization.pulled import as_variable


@dataclasses.dataclass(frozen=True)
class PlacedLayers:
    """The layers of a model that run on servers, as the steps of a group have it.

    Attributes:
        layers: each with the device that it runs on.
        divided: layers of which each of some servers has a piece.
        followers: layers and operations without weights, which run where their inputs are.
        devices: of the variables of placed layers, and of pieces, by their ids.
        compression: of what travels to them and from them; None for none.
        name: different from that of any other model.
    """

    layers: tuple[tuple[keras.layers.Layer, str], ...] = ()
    divided: tuple[DividedLayer, ...] = ()
    followers: tuple[keras.Operation, ...] = ()
    devices: Mapping[int, str] = dataclasses.field(default_factory=dict)
    compression: Compression | None = None
    name: str = ""

    @property
    def divided_variables(self) -> list[DividedVariable]:
        """Those of the layers of which servers have pieces."""
        return [variable for layer in self.divided for variable in layer.variables]

    @property
    def divided_states(self) -> dict[int, tuple[base.VariableState, ...]]:
        """The states of the pieces of variables that are divided, by the ids of these."""
        return {id(variable.whole): variable.states for variable in self.divided_variables}


NO_LAYERS = PlacedLayers()

# Two models that are traced at the same time may share layers.
_running = threading.RLock()


class Placed:
    """The placed layers of one step, while it is traced.

    Args:
        layers: which ones.
        variables: the model's; those of placed layers are looked for among them.
        states: of those that are trained.
        after: `after(device)` gives what must be there before anything is read on a server.
        batch: the step's batch.
        worker: the worker's index, an int64 scalar on the worker.

    Attributes:
        variables: those of placed layers, the pieces of divided ones included.
        trained: those of them that are trained.
        wholes: variables that are divided.
    """

    def __init__(
        self,
        layers: PlacedLayers,
        variables: Sequence[keras.Variable],
        states: Sequence[base.VariableState],
        after: Callable[[str], list[tf.Tensor]],
        batch: Any,
        worker: tf.Tensor,
    ):
        self._layers = layers
        # Some only run layers without weights.
        self._servers = {*layers.devices.values(), *(device for _, device in layers.layers)}
        self._states = {id(state.variable): state for state in states}
        self.variables = [v for v in variables if id(v) in layers.devices]
        self.trained = [v for v in self.variables if id(v) in self._states]
        self._after = after
        self._graph = tf.compat.v1.get_default_graph()
        self._values: dict[int, tf.Tensor] = {}  # What was read, by the variable's id.
        self._versions: dict[int, tf.Tensor] = {}  # int64 [1], likewise.
        # What lies on a server of what others know as tensors, by these.
        self._there = ObjectIdentityDictionary()
        # What was sent to servers, by it, and then by the device and what it was encoded as.
        self._sent = ObjectIdentityDictionary()
        # What travels in place of tensors, or None, by these, and then by what they are.
        self._messages = ObjectIdentityDictionary()
        self._worker = worker
        self._encoder = Encoder(layers.compression, batch, layers.name)
        self.wholes = [variable.whole for variable in layers.divided_variables]
        self._pieces = PlacedPieces(layers.divided_variables, self)
        self._arrived: list[tf.Tensor] = []  # What came in for the layer that runs.
        self._is_inside = False  # Whether one runs.

    # Variables.

    def has(self, variable: keras.Variable) -> bool:
        """Whether it is a placed layer's, or is divided."""
        return id(variable) in self._layers.devices or id(variable) in self._pieces.variables

    def device(self, variable: keras.Variable) -> str | None:
        """The device of a variable of a placed layer; None of others."""
        return self._layers.devices.get(id(variable))

    def read(self, variable: keras.Variable) -> tf.Tensor:
        """A variable's value on its server, the same in all of the step.

        It is read when what its layer computes with is there, and not before.
        """
        if id(variable) in self._pieces.variables:
            return self._pieces.whole(variable)
        if id(variable) in self._values:
            return self._values[id(variable)]
        device, state = self.device(variable), self._states.get(id(variable))
        after = [*self._after(device), *(t for t in self._arrived if t.device == device)]
        # A layer may read it in a loop, or in a function of its own.
        with self._graph.as_default(), _on(device), tf.control_dependencies(after):
            if state is None:
                value = variable._value.read_value()
            else:
                packed, self._versions[id(variable)] = ops.pull_dense(*base.read_handles([state]))
                value = as_variable(tf.reshape(packed, variable.shape), variable)
        self._values[id(variable)] = value
        self._there[value] = value
        return value

    def read_with(self, variable: keras.Variable, tensor: tf.Tensor | tf.SparseTensor) -> tf.Tensor:
        """A variable's value on its server, read when a tensor has arrived there."""
        device, parts = self.device(variable), tf.nest.flatten(tensor, expand_composites=True)
        with record.stop_recording():
            self._arrived = [self._brought(part, device, "activation") for part in parts]
        value, self._arrived = self.read(variable), []
        return value

    def where(self, tensor: tf.Tensor) -> str:
        """The server where what others know as a tensor was computed."""
        return self._there[tensor].device

    def gradients(
        self, variable: keras.Variable, gradient: tf.Tensor
    ) -> list[tuple[base.VariableState, str, tf.Tensor]]:
        """The gradient of a variable that is placed or divided, where it is.

        Args:
            variable: one of a layer on servers.
            gradient: as a tape returned it.

        Returns:
            For it, or each of its pieces, the state, the server and the gradient there.
        """
        if id(variable) in self._pieces.variables:
            return self._pieces.gradients(variable, gradient)
        device = self.device(variable)
        return [(self._states[id(variable)], device, self.lying(gradient, device))]

    def version(self, state: base.VariableState) -> tf.Tensor:
        """The version that was read with a trained variable, int64 [1], on its server."""
        self.read(state.variable)  # Now, if its gradient is of something else.
        return self._versions[id(state.variable)]

    @property
    def moving(self) -> list[tuple[keras.Variable, tf.Tensor]]:
        """The variables that are not trained, as moving averages, with their values as read."""
        others = [v for v in self.variables if id(v) not in self._states]
        return [(v, self._values[id(v)]) for v in others if id(v) in self._values]

    def beside(self, tensor: Any) -> contextlib.AbstractContextManager:
        """A context in which operations are where a tensor is, if that is such a server."""
        device = getattr(tensor, "device", "")
        return _on(device) if device in self._servers else contextlib.nullcontext()

    # Layers.

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Inside, placed layers run on their servers, and so do their regularizers."""
        with _running, contextlib.ExitStack() as stack:
            for layer, device in self._layers.layers:
                stack.enter_context(instead(layer, "call", self._placed(layer.call, device)))
            for divided in self._layers.divided:
                call = functools.partial(self._pieces.call, divided)
                layer = divided.layer
                stack.enter_context(instead(layer, "call", self._call(layer.call, call)))
            for follower in self._layers.followers:
                call = functools.partial(self._follow, follower.call)
                stack.enter_context(instead(follower, "call", self._call(follower.call, call)))
            for variable in self.variables:
                if getattr(variable, "regularizer", None) is not None:
                    device = self.device(variable)
                    regularizer = self._placed(variable.regularizer, device)
                    stack.enter_context(instead(variable, "_regularizer", regularizer))
            yield

    def _placed(self, function: Callable, device: str) -> Callable:
        """A function as it runs on a server."""
        return self._call(
            function, lambda *args, **kwargs: self._run(device, function, args, kwargs)
        )

    def _follow(self, function: Callable, *args, **kwargs) -> Any:
        """Runs the call of what has no weights where its inputs are, if they are together."""
        device = self._common_device((args, kwargs))
        if device is not None:
            return self._run(device, function, args, kwargs)
        if is_elementwise(getattr(function, "__self__", None)) and len(args) == 1 and not kwargs:
            found = self._pieces.follow(function, args[0])
            if found is not None:
                return found
        return function(*args, **kwargs)

    def _call(self, function: Callable, instead_of_it: Callable) -> Callable:
        """What a layer's call is while the step is traced.

        Args:
            function: the call as it is.
            instead_of_it: what runs in the step itself.
        """

        def call(*args, **kwargs):
            # Another thread may use the model, and a loop or a function of the model's own has a
            # graph for which the step's tape is not.
            is_step = getattr(context.current_push(), "placed", None) is self
            graph = tf.compat.v1.get_default_graph()
            if self._is_inside or not is_step or graph is not self._graph:
                return function(*args, **kwargs)
            with instead(self, "_is_inside", True):
                return instead_of_it(*args, **kwargs)

        return call

    def _common_device(self, arguments: Any) -> str | None:
        """The server where all tensors of arguments are, if they are on one."""
        tensors = _tensors(tf.nest.flatten(arguments, expand_composites=True))
        devices = {self._there[x].device if x in self._there else "" for x in tensors}
        return devices.pop() or None if len(devices) == 1 else None

    def run_on(
        self,
        device: str,
        function: Callable,
        inputs: Sequence[tf.Tensor],
        weights: Sequence[tf.Tensor],
    ) -> tf.Tensor:
        """Runs a function of inputs and of weights that are there on a server."""
        return self._run(device, lambda *xs: function(*xs, *weights), tuple(inputs), {}, weights)

    def _run(
        self,
        device: str,
        function: Callable,
        args: tuple,
        kwargs: dict,
        weights: Sequence[tf.Tensor] = (),
    ) -> Any:
        """Runs a function on a server, as one operation for the tapes of the step.

        Args:
            device: the server's.
            function: runs it.
            args: its arguments, wherever they are.
            kwargs: likewise.
            weights: what else it uses of which there are gradients, on the server.
        """
        given = tf.nest.flatten((args, kwargs), expand_composites=True)
        arrived = self._arrivals(_tensors(given), device)
        moved = [arrived[id(x)][1] if tf.is_tensor(x) else x for x in given]
        # Without a batch nothing may happen.
        self._arrived = _tensors(moved) or [self._brought(tf.zeros([]), device)]
        losses = backend.get_stateless_scope().losses
        known = len(losses)
        with _on(device), tf.GradientTape(persistent=True) as tape:
            tape.watch([*_floating(moved), *weights])
            args, kwargs = tf.nest.pack_sequence_as((args, kwargs), moved, expand_composites=True)
            made = len(self._graph.get_operations())
            result = function(*args, **kwargs)
        self._arrived = []
        weights = [*weights, *_handles(tape)]
        new = self._graph.get_operations()[made:]
        self._check_captured(new, function, [*moved, *weights])
        flat = tf.nest.flatten(result, expand_composites=True)
        # Of a probability the loss is computed with its logits, which Keras leaves there. What only
        # passes through has those that it came with.
        came_with = {id(own): getattr(x, LOGITS, None) for x, own in arrived.values()}
        made_here = {op.name for op in new}
        of_logits, logits = [], []
        for x in _tensors(flat):
            own = None if id(x) in came_with else getattr(x, LOGITS, None)
            if own is not None and (own.op.name in made_here or id(own) in came_with):
                of_logits.append(x)
                logits.append(own)
        there = [*_tensors(flat), *logits]
        with record.stop_recording():
            computed = speeds.on_server(device, there, new, _tensors(moved))
            done = iter(computed)
            shown = [self._shown(next(done), "activation") if tf.is_tensor(x) else x for x in flat]
            shown_logits = [self._shown(x, "activation") for x in done]
        for one, own in zip(computed, there, strict=True):
            _record_same(one, own)
        by_id = {id(x): own for x, own in zip(flat, shown, strict=True)}
        for x in _tensors(flat):
            if came_with.get(id(x)) is not None:
                setattr(by_id[id(x)], LOGITS, came_with[id(x)])
        for x, own in zip(of_logits, shown_logits, strict=True):
            setattr(by_id[id(x)], LOGITS, own)
        inputs = [pair for pair in arrived.values() if _is_differentiable(pair[0])]
        # Of a loss that the layer adds the number travels, and its gradient is computed there.
        outputs = zip(
            [*shown, *shown_logits, *losses[known:]], [*flat, *logits, *losses[known:]], strict=True
        )
        for output in outputs:
            if _floating(output):
                self._record(tape, device, inputs, weights, *output)
        return tf.nest.pack_sequence_as(result, shown, expand_composites=True)

    def _check_captured(
        self, made: Sequence[tf.Operation], function: Callable, known: Sequence[tf.Tensor]
    ) -> None:
        """Makes sure that all through which gradients flow came in as arguments.

        Args:
            made: the operations of what ran.
            function: what ran.
            known: its arguments, and the variables that it has read.

        Raises:
            ValueError: if it has used another tensor of the step.
        """
        new = {op.name for op in made}
        allowed = {id(tensor) for tensor in [*known, *self._values.values()]}
        for op in made:
            for tensor in op.inputs:
                if tensor.op.name in new or id(tensor) in allowed:
                    continue
                if _floating([tensor]) and record.should_record_backprop([tensor]):
                    owner = getattr(function, "__self__", function)
                    raise ValueError(
                        f"{getattr(owner, 'name', owner)} uses the tensor {tensor.name}, which is "
                        "not one of its arguments: no gradient would reach it where the layer runs "
                        "on a server; make it an argument, or have `placement` leave the layer on "
                        "the trainers"
                    )

    def _record(
        self,
        tape: tf.GradientTape,
        device: str,
        inputs: Sequence[tuple[tf.Tensor, tf.Tensor]],
        weights: Sequence[tf.Tensor],
        output: tf.Tensor,
        result: tf.Tensor,
    ) -> None:
        """Has the tapes of the step know how one output was computed, as one operation.

        Each is one by itself: of an operation with several, tapes give those that nobody uses
        gradients of zeros, which are not the same as none.

        Args:
            tape: the one that recorded it.
            device: the server's.
            inputs: each as others know it, and on the server.
            weights: that it was computed with, or what stands for them.
            output: as others know it.
            result: the same on the server.
        """
        known, there = [x for x, _ in inputs], [x for _, x in inputs]
        # Without those of a regularizer, which are its inputs.
        weights = [w for w in weights if all(w is not x for x in there)]

        def gradient(upstream):
            upstream = self.lying(upstream, device, "gradient")
            made = len(self._graph.get_operations())
            with _on(device):
                gradients = tape.gradient(result, [*there, *weights], output_gradients=upstream)
                gradients = [None if g is None else tf.convert_to_tensor(g) for g in gradients]
            with record.stop_recording():
                own, of_weights = speeds.gradients_on_server(
                    device,
                    gradients[: len(there)],
                    gradients[len(there) :],
                    self._graph.get_operations()[made:],
                    [upstream],
                )
                shown = [None if g is None else self._shown(g, "gradient") for g in own]
            done = [*own, *of_weights]
            for one, other in [*zip(done, gradients, strict=True), *zip(shown, own, strict=True)]:
                if one is not None:
                    _record_same(one, other)
            return [*shown, *of_weights]

        record.record_operation("RecsyncPlaced", [output], [*known, *weights], gradient)

    def _arrivals(
        self, given: Sequence[tf.Tensor], device: str
    ) -> dict[int, tuple[tf.Tensor, tf.Tensor]]:
        """Each tensor, and what it is on a server, with its mask; by the tensors' ids."""
        found: dict[int, tuple[tf.Tensor, tf.Tensor]] = {}
        for tensor in given:
            there = self._arrival(tensor, device, "activation")
            if any(there is other for i, (_, other) in found.items() if i != id(tensor)):
                with _on(device):
                    there = tf.identity(there)  # Its gradient is another one.
            mask = backend.get_keras_mask(tensor)
            if mask is not None and there is not tensor:
                backend.set_keras_mask(there, self._brought(mask, device))
            found[id(tensor)] = tensor, there
        return found

    def _arrival(self, tensor: tf.Tensor, device: str, kind: Kind) -> tf.Tensor:
        """A tensor on a server as `_brought` has it, which tapes know as the same.

        So there are gradients of what is computed of it on the server by itself, as of gradients
        that are computed there: those of the layer's outputs are of what others know.
        """
        with record.stop_recording():
            there = self._brought(tensor, device, kind)
        if there is not self._there.get(tensor, tensor):  # Else tapes know how it was computed.
            _record_same(there, tensor)
        return there

    def _brought(self, tensor: tf.Tensor, device: str, kind: Kind = "other") -> tf.Tensor:
        """A tensor on a server; it is sent there once."""
        there = self._there.get(tensor)
        if there is not None and there.device == device:
            return there
        message = self._message(tensor if there is None else there, kind)
        sent = self._sent.setdefault(tensor, {})
        key = device, "other" if message is None else kind
        if key not in sent:
            if message is not None:
                with _on(device):
                    brought = message.restored([links.received(p) for p in message.parts])
            else:
                # From the worker only if there is a batch; from another server directly.
                source = tf.identity(tensor) if there is None else links.passed(there)
                with _on(device):
                    brought = links.received(source)
            sent[key] = brought
        return sent[key]

    def _shown(self, there: tf.Tensor, kind: Kind = "other") -> tf.Tensor:
        """What others get of a tensor on a server; it travels only if somebody uses it."""
        message = self._message(there, kind)
        if message is None:
            tensor = links.arrived(links.passed(there))
        else:
            tensor = message.restored([links.arrived(part) for part in message.parts])
        self._there[tensor] = there
        mask = backend.get_keras_mask(there)
        if mask is not None:
            backend.set_keras_mask(tensor, self._shown(mask))
        return tensor

    def _message(self, tensor: tf.Tensor, kind: Kind) -> Message | None:
        """What travels in place of a tensor, wherever it goes; None if it goes as it is.

        Args:
            tensor: where it was computed.
            kind: what it is.
        """
        messages = self._messages.setdefault(tensor, {})
        if kind not in messages:
            net = self._worker
            if self._encoder.has_feedback(kind) and tensor.device in self._servers:
                net = self._brought(net, tensor.device)
            with self.beside(tensor):
                message = self._encoder.message(tensor, kind, net)
            if message is not None:  # From a server it passes the link.
                passed = tuple(map(links.passed, message.parts))
                message = dataclasses.replace(message, parts=passed)
            messages[kind] = message
        return messages[kind]

    # Gradients.

    def lying(self, gradient: Any, device: str, kind: Kind = "other") -> tf.Tensor:
        """A gradient on a server: what was computed there is added up there.

        Args:
            gradient: as a tape returned it.
            device: the server's.
            kind: "gradient" if it is one of an activation.
        """
        gradient = tf.convert_to_tensor(gradient)
        if gradient.device == device:
            return gradient
        if gradient.op.type != "AddN" or gradient.device:
            return self._arrival(gradient, device, kind)
        there = [t for t in gradient.op.inputs if self._lies(t, device)]
        others = [t for t in gradient.op.inputs if not self._lies(t, device)]
        if not there:
            return self._arrival(gradient, device, kind)
        terms = [self.lying(t, device, kind) for t in there]
        if others:
            terms.append(self._arrival(tf.add_n(others), device, kind))
        with _on(device):
            return tf.add_n(terms)

    def _lies(self, tensor: tf.Tensor, device: str) -> bool:
        """Whether a tensor lies on a server, or a part of the sum that it is."""
        if tensor.device == device or tensor in self._there:
            return self._there.get(tensor, tensor).device == device
        is_sum = tensor.op.type == "AddN" and not tensor.device
        return is_sum and any(self._lies(t, device) for t in tensor.op.inputs)


@contextlib.contextmanager
def _on(device: str) -> Iterator[None]:
    """Inside, operations are a server's, and wait for nothing that happens on the worker."""
    with tf.control_dependencies(None), tf.device(device):
        yield


def _tensors(flat: Sequence[Any]) -> list[tf.Tensor]:
    return [x for x in flat if tf.is_tensor(x)]


def _is_differentiable(tensor: tf.Tensor) -> bool:
    return tensor.dtype.is_floating or tensor.dtype.is_complex


def _floating(flat: Sequence[Any]) -> list[tf.Tensor]:
    """The tensors that have gradients."""
    return [x for x in _tensors(flat) if _is_differentiable(x)]


def _record_same(tensor: tf.Tensor, other: tf.Tensor) -> None:
    """Has tapes take a tensor for another one, whatever has become of this on its way."""
    if tensor is not other and _is_differentiable(tensor):
        record.record_operation("RecsyncSame", [tensor], [other], lambda upstream: [upstream])


def _handles(tape: tf.GradientTape) -> list[tf.Tensor]:
    """What stands for the variables that a tape has watched."""
    return [watched.handle for watched in tape.watched_variables()]
