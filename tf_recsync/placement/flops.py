"""Floating-point operations of TensorFlow ops, from their shapes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import tensorflow as tf

# They move or describe values, and compute none.
_FREE_NAMES = """
Bitcast BroadcastTo Cast CheckNumerics Concat ConcatV2 Const DynamicPartition DynamicStitch
EnsureShape ExpandDims Fill Gather GatherNd GatherV2 Identity IdentityN InvertPermutation NoOp
OnesLike Pack Pad PadV2 Placeholder PlaceholderWithDefault PreventGradient Range
ReadVariableOp Reshape ResourceGather ReverseV2 ScatterNd Shape ShapeN Size Slice Snapshot
Split SplitV Squeeze StopGradient StridedSlice StridedSliceGrad Tile Transpose Unpack ZerosLike
TensorListFromTensor TensorListGetItem TensorListPopBack TensorListPushBack TensorListReserve
TensorListSetItem TensorListStack TensorScatterUpdate
"""
_FREE = frozenset(_FREE_NAMES.split())
# They read each element of their first input once.
_REDUCTION_NAMES = """
ArgMax ArgMin BiasAddGrad EuclideanNorm L2Loss Max Mean Min Prod SegmentMean SegmentSum Sum
UnsortedSegmentSum
"""
_REDUCTIONS = frozenset(_REDUCTION_NAMES.split())


def elements(tensor: tf.Tensor, unknown: int = 1) -> int:
    """How many elements a tensor has; unknown dimensions count as `unknown`."""
    sizes = (unknown if n is None else n or 1 for n in tensor.shape)
    return math.prod(sizes) if tensor.shape.rank is not None else 1


def count(ops: Iterable[tf.Operation], unknown: int = 1) -> float:
    """Floating-point operations of ops of one graph, with those of the functions they call.

    A multiplication of matrices of [m, k] and [k, n] has 2 m k n. Other ops have one for each
    element of their outputs, or of their input if they reduce it. A loop has as many turns as its
    limit says or as there are tensors in a list that it takes apart; if neither is known, as many
    as the loop before, whose gradient it may be, or 1.

    Args:
        ops: the ops.
        unknown: What dimensions count as that are not known, 1 by default.
    """
    total, turns = 0.0, 1
    for op in ops:
        if op.type in ("While", "StatelessWhile"):
            turns = _turns(op) or turns
            total += turns * _function(op, "body", unknown)
        elif op.type in ("If", "StatelessIf"):
            total += max(_function(op, f"{name}_branch", unknown) for name in ("then", "else"))
        elif op.type in ("PartitionedCall", "StatefulPartitionedCall"):
            total += _function(op, "f", unknown)
        else:
            total += _flops(op, unknown)
    return total


def _turns(loop: tf.Operation) -> int:
    """How many turns a loop has, or 0."""
    # Those with a limit have it as their second variable.
    limit = tf.get_static_value(loop.inputs[1]) if len(loop.inputs) > 1 else None
    if limit is not None and limit.ndim == 0 and limit > 0:
        return int(limit)
    lists = [t.op for t in loop.inputs if t.op.type == "TensorListFromTensor"]
    length = max((_dimension(own.inputs[0], 0) for own in lists), default=0)
    return length if length > 1 else 0  # A gradient may be that of the last turn's output alone.


def needed(ops: Sequence[tf.Operation], results: Sequence[tf.Tensor]) -> list[tf.Operation]:
    """The ops without which the results could not be computed."""
    found = {tensor.op.name for tensor in results}
    for op in reversed(ops):
        if op.name in found:
            found |= {tensor.op.name for tensor in op.inputs}
    return [op for op in ops if op.name in found]


def per_example(ops: Sequence[tf.Operation]) -> tuple[float, float]:
    """What ops have whatever the number of examples is, and for each example besides.

    Args:
        ops: as of `count`; dimensions that are not known are the examples.
    """
    one, two = count(ops, 1), count(ops, 2)
    return 2 * one - two, two - one


def _function(op: tf.Operation, attribute: str, unknown: int) -> float:
    """The operations of a call of one of an op's functions."""
    name = op.get_attr(attribute).name
    return count(op.graph._get_function(name).graph.get_operations(), unknown)


def _flops(op: tf.Operation, unknown: int) -> float:
    kind = op.type
    if kind in _FREE or not any(tensor.dtype.is_floating for tensor in op.outputs):
        return 0.0
    outputs = sum(elements(tensor, unknown) for tensor in op.outputs)
    if kind == "MatMul":
        return (
            2.0
            * outputs
            * _dimension(op.inputs[0], -2 if op.get_attr("transpose_a") else -1, unknown)
        )
    if kind in ("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"):
        return 2.0 * outputs * _dimension(op.inputs[0], -2 if op.get_attr("adj_x") else -1, unknown)
    if kind == "Einsum":
        return _einsum(op, unknown)
    if kind in ("Conv2D", "Conv2DBackpropInput"):
        rows = outputs if kind == "Conv2D" else elements(op.inputs[2], unknown)
        return 2.0 * rows * elements(op.inputs[1], unknown) / _dimension(op.inputs[1], -1)
    if kind == "Conv2DBackpropFilter":
        return 2.0 * elements(op.inputs[2], unknown) * outputs / _dimension(op.outputs[0], -1)
    if kind in _REDUCTIONS:
        return float(elements(op.inputs[0], unknown))
    if kind == "AddN":
        return float((len(op.inputs) - 1) * outputs)
    return float(outputs)


def _dimension(tensor: tf.Tensor, axis: int, unknown: int = 1) -> int:
    if not tensor.shape.rank:
        return 1
    return unknown if tensor.shape[axis] is None else tensor.shape[axis] or 1


def _einsum(op: tf.Operation, unknown: int) -> float:
    """Two for each combination of all labels, where there are two factors."""
    terms = op.get_attr("equation").decode().split("->")[0].replace("...", "").split(",")
    sizes = {}
    for term, tensor in zip(terms, op.inputs, strict=True):
        for axis, letter in enumerate(term[::-1], 1):
            sizes[letter] = max(sizes.get(letter, 1), _dimension(tensor, -axis, unknown))
    return float(len(terms) * math.prod(sizes.values()))
