"""Inputs of exported models, and the dense tensors with names that they consist of."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class InputParts:
    """The dense tensors that an input consists of.

    Args:
        name: the input's name.
        spec: its type.

    Attributes:
        spec: as above.
        specs: those of the tensors, which have names.
    """

    def __init__(self, name: str, spec: tf.TypeSpec):
        self.spec = spec
        if isinstance(spec, tf.RaggedTensorSpec):
            values = [None, *spec.shape[spec.ragged_rank + 1 :]]
            self.specs = [
                tf.TensorSpec(values, spec.dtype, name),
                tf.TensorSpec([None], spec.row_splits_dtype, f"{name}_row_splits"),
            ]
        elif isinstance(spec, tf.SparseTensorSpec):
            rank = spec.shape.rank
            self.specs = [
                tf.TensorSpec([None, rank], tf.int64, f"{name}_indices"),
                tf.TensorSpec([None], spec.dtype, name),
                tf.TensorSpec([rank], tf.int64, f"{name}_dense_shape"),
            ]
        else:
            self.specs = [tf.TensorSpec(spec.shape, spec.dtype, name)]

    def join(self, tensors: list[tf.Tensor]) -> Any:
        """The input that tensors make."""
        if isinstance(self.spec, tf.RaggedTensorSpec):
            return tf.RaggedTensor.from_row_splits(*tensors)
        return tf.SparseTensor(*tensors) if len(tensors) == 3 else tensors[0]


def name_of(path: tuple, spec: tf.TypeSpec, own: str | None = None) -> str:
    """The name of an input: its key, its own, that of its type, or its place."""
    if path and isinstance(path[-1], str):
        return path[-1]
    # The types of ragged and sparse tensors have none.
    name = own or getattr(spec, "name", None)
    return name or "_".join(["input", *map(str, path)])
