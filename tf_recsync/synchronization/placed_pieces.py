"""How a worker's step computes with divided layers, while it is traced; see divided.py.

The kernel as the step's tapes know it is never put together: one operation, of which the pieces
are the outputs, stands between, and the gradients of the pieces are its gradient. So what travels
is an input, an output and their gradients. Where a layer divided by rows follows on one divided
by columns, with at most an elementwise activation between them, each server goes on with what it
has.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import keras
import tensorflow as tf
from keras.src import backend
from tensorflow.python.eager import record
from tensorflow.python.util.object_identity import ObjectIdentityDictionary

from tf_recsync.optimizers import base
from tf_recsync.synchronization.divided import (
    LOGITS,
    DividedLayer,
    DividedVariable,
    is_elementwise,
)
from tf_recsync.synchronization.pulled import as_variable

if TYPE_CHECKING:
    from tf_recsync.synchronization.placed import Placed


class PlacedPieces:
    """The divided layers of one step, while it is traced.

    Args:
        variables: those that are divided.
        servers: the step's placed layers.
    """

    def __init__(self, variables: Sequence[DividedVariable], servers: Placed):
        self.variables: Mapping[int, DividedVariable] = {id(v.whole): v for v in variables}
        self._servers = servers
        # Pieces, by what was put together of them: of outputs, and of gradients.
        self._joined = ObjectIdentityDictionary()
        self._gradients = ObjectIdentityDictionary()

    def whole(self, variable: keras.Variable) -> tf.Tensor:
        """Stands for a divided variable; it is put together only if something uses it itself."""
        divided, evidence = self.variables[id(variable)], tf.zeros([])
        pieces = [self._servers.read_with(state.variable, evidence) for state in divided.states]
        with tf.control_dependencies(None):
            joined = tf.identity(pieces[0]) if len(pieces) == 1 else tf.concat(pieces, divided.axis)
        return as_variable(joined, variable)

    def call(
        self,
        divided: DividedLayer,
        inputs: tf.Tensor | tf.SparseTensor,
        training: bool | None = None,
    ) -> tf.Tensor:
        """What `divided.layer.call` does.

        Args:
            divided: the layer.
            inputs: [..., features].
            training: makes no difference.
        """
        del training
        layer, by_columns = divided.layer, divided.how == "columns"
        sizes = divided.sizes
        xs = [inputs] * len(sizes) if by_columns else self._divided_inputs(inputs, sizes)
        kernels = self._pieces(divided.kernel, xs)
        biases = [] if divided.bias is None else self._pieces(divided.bias, xs)
        activation = layer.activation
        activates = by_columns and activation is not None and is_elementwise(activation)

        def piece(x, kernel, bias=None):
            y = keras.ops.matmul(x, tf.cast(kernel, layer.compute_dtype))
            if bias is not None:
                y = keras.ops.add(y, tf.cast(bias, layer.compute_dtype))
            return activation(y) if activates else y

        found = []
        for number, (x, kernel) in enumerate(zip(xs, kernels, strict=True)):
            device = self._servers.device(divided.kernel.states[number].variable)
            weights = [kernel, *biases[number : number + 1]]
            found.append(self._servers.run_on(device, piece, [x], weights))
        outputs = self._join(found) if by_columns else tf.add_n(found)
        return outputs if activates or activation is None else activation(outputs)

    def follow(self, function: Callable, tensor: tf.Tensor) -> tf.Tensor | None:
        """What an elementwise function makes of what servers have pieces of, there.

        None if they have none.
        """
        if tensor not in self._joined:
            return None
        run, where, pieces = self._servers.run_on, self._servers.where, self._joined[tensor]
        return self._join([run(where(piece), function, [piece], []) for piece in pieces])

    def gradients(
        self, variable: keras.Variable, gradient: tf.Tensor
    ) -> list[tuple[base.VariableState, str, tf.Tensor]]:
        """The gradient of a divided variable.

        Args:
            variable: the whole.
            gradient: as a tape returned it.

        Returns:
            For each piece its state, its server and the gradient there.
        """
        divided, found = self.variables[id(variable)], []
        pieces = self._gradient_pieces(divided, gradient)
        for state, piece in zip(divided.states, pieces, strict=True):
            device = self._servers.device(state.variable)
            found.append((state, device, self._servers.lying(piece, device)))
        return found

    def _gradient_pieces(self, divided: DividedVariable, gradient: tf.Tensor) -> list[tf.Tensor]:
        if gradient in self._gradients:
            return self._gradients[gradient]
        if gradient.op.type == "AddN" and not gradient.device:
            # The layer was called several times, or something else uses the whole, too.
            terms = [self._gradient_pieces(divided, term) for term in gradient.op.inputs]
            return [tf.add_n(of_piece) for of_piece in zip(*terms, strict=True)]
        if len(divided.states) == 1:
            return [gradient]
        sizes = [state.variable.shape[divided.axis] for state in divided.states]
        return tf.split(gradient, sizes, divided.axis)

    def _pieces(
        self, divided: DividedVariable, inputs: Sequence[tf.Tensor | tf.SparseTensor]
    ) -> list[tf.Tensor]:
        """The values of the pieces on their servers, differentiable by the whole.

        Args:
            divided: the variable.
            inputs: what each server computes with.
        """
        pieces = []
        for state, tensor in zip(divided.states, inputs, strict=False):
            value = self._servers.read_with(state.variable, tensor)
            with self._servers.beside(value), record.stop_recording():
                pieces.append(tf.identity(value))  # One for each call of the layer.

        def gradient(*upstream):
            parts = [tf.convert_to_tensor(g) for g in upstream]
            # A stand-in, as is the whole.
            joined = (
                tf.identity(parts[0]) if divided.axis is None else tf.concat(parts, divided.axis)
            )
            self._gradients[joined] = parts
            return [joined]

        whole = backend.get_stateless_scope().get_current_value(divided.whole)
        record.record_operation("RecsyncPieces", pieces, [whole], gradient)
        return pieces

    def _divided_inputs(
        self, inputs: tf.Tensor | tf.SparseTensor, sizes: Sequence[int]
    ) -> list[tf.Tensor] | list[tf.SparseTensor]:
        """The features of the input that each server takes."""
        if isinstance(inputs, tf.SparseTensor):
            shape, firsts = inputs.dense_shape, itertools.accumulate(sizes, initial=0)
            examples = tf.zeros_like(shape[:-1])
            return [
                tf.sparse.slice(
                    inputs, tf.concat([examples, [first]], 0), tf.concat([shape[:-1], [size]], 0)
                )
                for first, size in zip(firsts, sizes, strict=False)
            ]
        pieces = self._joined.get(inputs, [])
        if [piece.shape[-1] for piece in pieces] == list(sizes):
            return pieces
        return tf.split(inputs, sizes, -1)

    def _join(self, pieces: list[tf.Tensor]) -> tf.Tensor:
        joined = tf.concat(pieces, -1)
        logits = [getattr(piece, LOGITS, None) for piece in pieces]
        if all(own is not None for own in logits):
            setattr(joined, LOGITS, tf.concat(logits, -1))
        self._joined[joined] = pieces
        return joined
