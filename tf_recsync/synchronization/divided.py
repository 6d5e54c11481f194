"""Dense layers of which each server of a group has a piece, and computes with it.

A layer is divided by columns: each server has some of the columns of the kernel and gives these
features of the output. Or by rows: each server has some of the rows, takes these features of the
input, and what the servers give is added up. Users see one variable all the same.

Reference: section 4.1 of the Hierarchical Training paper, "FC splits": vertical and horizontal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import keras
import numpy as np

from tf_recsync.optimizers import base
from tf_recsync.synchronization.copies import Pieces

How = Literal["columns", "rows"]

# What Keras calls the logits that an activation has made a tensor of.
LOGITS = "_keras_logits"

# What of these is computed of pieces is the piece of what is computed of the whole.
_ELEMENTWISE = frozenset(
    {
        *("relu", "relu6", "leaky_relu", "elu", "selu", "gelu", "celu", "silu", "hard_silu"),
        *("sigmoid", "hard_sigmoid", "tanh", "softplus", "softsign", "exponential", "linear"),
        *("mish",),
    }
)
_ELEMENTWISE_LAYERS = (keras.layers.ReLU, keras.layers.LeakyReLU, keras.layers.ELU)


def is_elementwise(operation: object) -> bool:
    """Whether an activation, or a layer or operation of a model, acts on each element by itself."""
    if isinstance(operation, keras.layers.Activation):
        operation = operation.activation
    is_layer = type(operation) in _ELEMENTWISE_LAYERS
    module = getattr(operation, "__module__", "")
    is_keras = module.startswith("keras.") and getattr(operation, "__name__", "") in _ELEMENTWISE
    return is_layer or is_keras


def why_whole(layer: keras.layers.Layer, optimizers: Sequence[base.Optimizer]) -> str:
    """Why a layer can't be divided, in words that follow on its name; "" if it can."""
    if type(layer) is not keras.layers.Dense:
        return "is not a keras.layers.Dense itself"
    variables = [v for v in (layer.kernel, layer.bias) if v is not None]
    if [id(v) for v in layer.weights] != [id(v) for v in variables]:
        return "has other variables than a kernel and a bias"
    if not all(variable.trainable for variable in variables):
        return "is not trained"
    for name in ("kernel_regularizer", "bias_regularizer", "activity_regularizer"):
        if getattr(layer, name) is not None:
            return f"has a {name}, which needs the whole"
    for optimizer in optimizers:
        known = {id(state.variable) for state in optimizer.states}
        # One that is not built yet may train all.
        if optimizer.built and not any(id(variable) in known for variable in variables):
            continue
        for name in ("clipnorm", "global_clipnorm", "clipvalue"):
            if getattr(optimizer, name):
                return f"is trained with {name}={getattr(optimizer, name)}, which needs the whole"
        if optimizer.staleness.uses_last_update:
            return "is trained with update_sensitivity, which needs the whole"
        if optimizer.weight_decay is not None and any(
            not optimizer._use_weight_decay(variable) for variable in variables
        ):
            return "has variables that weight_decay leaves out"
    return ""


@dataclasses.dataclass(frozen=True, eq=False)
class DividedVariable:
    """A trained variable of which servers have pieces.

    Attributes:
        whole: as the model has it.
        states: of the pieces, with their own variables; one for each server of a group, in order.
        axis: along which it is divided; None if it is in one piece, on the first server.
        shown: the pieces of it and of all that belongs to it, by the ids of what users see.
    """

    whole: keras.Variable
    states: tuple[base.VariableState, ...]
    axis: int | None
    shown: Mapping[int, Pieces]


@dataclasses.dataclass(frozen=True, eq=False)
class DividedLayer:
    """A Dense layer of which servers have pieces.

    Attributes:
        layer: the layer.
        how: "columns" or "rows" of its kernel.
        kernel: its kernel.
        bias: its bias, or None.
    """

    layer: keras.layers.Dense
    how: How
    kernel: DividedVariable
    bias: DividedVariable | None

    @property
    def variables(self) -> list[DividedVariable]:
        """The kernel and the bias, if there is one."""
        return [self.kernel] if self.bias is None else [self.kernel, self.bias]

    @property
    def sizes(self) -> list[int]:
        """The features of the input, or of the output, that each server has."""
        return [state.variable.shape[self.kernel.axis] for state in self.kernel.states]


def divided_layer(
    layer: keras.layers.Dense, how: How, states: Mapping[int, base.VariableState], servers: int
) -> DividedLayer:
    """Makes the variables of the pieces; call it in the strategy's scope.

    Args:
        layer: one that can be divided, see `why_whole`.
        how: "columns" or "rows".
        states: of trained variables, by the variables' ids.
        servers: of a group, at most as many as the layer has features there.
    """
    kernel = _divided(states[id(layer.kernel)], 1 if how == "columns" else 0, servers)
    bias = None
    if layer.bias is not None:
        # Of sums it is added once.
        bias = _divided(states[id(layer.bias)], 0 if how == "columns" else None, servers)
    return DividedLayer(layer, how, kernel, bias)


def _divided(state: base.VariableState, axis: int | None, servers: int) -> DividedVariable:
    count = 1 if axis is None else servers
    shown: dict[int, Pieces] = {}

    def pieces(variable: keras.Variable, along: int | None) -> list[keras.Variable]:
        """Variables for the pieces of one; where it is not divided each server has all of it."""
        shapes = [list(variable.shape) for _ in range(count)]
        if along is not None:
            bounds = [variable.shape[along] * i // count for i in range(count + 1)]
            for shape, size in zip(shapes, np.diff(bounds), strict=True):
                shape[along] = int(size)
        made = []
        for number, shape in enumerate(shapes):
            # Begins with what users see of the whole.
            piece = keras.Variable(
                "zeros", shape, variable.dtype, variable.trainable, name=variable.name
            )
            piece._value.shard = number
            made.append(piece)
        shown[id(variable._value)] = Pieces(tuple(piece._value for piece in made), along)
        return made

    def each(variables: Sequence[keras.Variable], along: int | None = None) -> list[list]:
        """Of several variables that belong to it, the lists that belong to each piece."""
        made = [pieces(variable, along) for variable in variables]
        return [[of_variable[number] for of_variable in made] for number in range(count)]

    of_pieces = tuple(
        base.VariableState(variable, state.is_table, *others)
        for variable, *others in zip(
            pieces(state.variable, axis),
            each(state.accumulators, axis),
            pieces(state.versions, None),
            pieces(state.counters, None),
            each(state.last_periods),
            each(state.last_updates),
            each(state.last_steps),
            strict=True,
        )
    )
    return DividedVariable(state.variable, of_pieces, axis, shown)
