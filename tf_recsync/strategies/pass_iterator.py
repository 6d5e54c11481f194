"""Iterators of workers that leave the data when their pass ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.data.experimental.ops import data_service_ops
from tensorflow.python.data.ops import dataset_ops, iterator_ops
from tensorflow.python.data.util import structure

from tf_recsync.synchronization.remote_functions import RemoteFunction, traced_once

_AHEAD = 2  # Batches that a worker keeps beside the one that it computes on.


class PassIterator(iterator_ops.OwnedIterator):
    """An iterator that leaves its data when it is closed, even if something still refers to it.

    TensorFlow's end with the last reference, and the frames of an error's traceback refer to them
    for as long as somebody keeps the error. They would stay in tf.data's service meanwhile, and as
    a service that was started again gives its numbers anew, take batches of a later pass.

    It keeps batches ahead.

    Args:
        parts: what `parts_of` gave for the dataset, where the iterator stays.
        element_spec: the dataset's.
        kept: what must not end before it is closed, as a dataset's functions, or its service.
    """

    def __init__(self, parts: Sequence[tf.Tensor], element_spec: Any, kept: Any = None):
        iterator, empty, self._nothing = parts
        super().__init__(components=[iterator], element_spec=element_spec)
        self._empty = iterator_ops.OwnedIterator(components=[empty], element_spec=element_spec)
        self._kept = kept

    @classmethod
    def of(cls, dataset: tf.data.Dataset) -> PassIterator:
        """One over a dataset that has been made in this device scope."""
        spec = dataset.element_spec
        opening = _opening(
            data_service_ops.HashableElementSpec(spec), dataset.options().autotune.enabled
        )
        return cls(opening(dataset._variant_tensor), spec, dataset)

    def empty(self) -> tf.data.Iterator:
        """An iterator of the same type without batches, on the same worker."""
        return self._empty

    def close(self) -> None:
        """Returns when it has left the data; call it in the worker's device scope.

        Raises:
            tf.errors.OpError: the worker can't be reached.
        """
        # There is no op that ends an iterator; one that begins anew ends what it had. Not with
        # its own dataset's take(0), which asks the service whether it knows the dataset.
        tf.raw_ops.MakeIterator(dataset=self._nothing, iterator=self._iterator_resource)
        self._kept = None


@traced_once
def _opening(spec: data_service_ops.HashableElementSpec, autotunes: bool | None) -> RemoteFunction:
    """`parts_of` for a dataset that is there, given as a variant: one call, where each of its ten
    operations by itself is one."""

    def opened(variant):
        return parts_of(dataset_ops._VariantDataset(variant, spec.element_spec), autotunes)

    function = tf.function(opened, autograph=False)
    return RemoteFunction(function.get_concrete_function(tf.TensorSpec([], tf.variant)))


def parts_of(dataset: tf.data.Dataset, autotunes: bool | None = None) -> list[tf.Tensor]:
    """What a `PassIterator` consists of; in a function, one call makes all of it.

    Args:
        dataset: the batches.
        autotunes: what it says itself of that; None if nothing.

    Returns:
        The handles of an iterator over it and of one of the same type without batches, and a
        dataset without batches.
    """
    # With autotuning, an iterator's end waits for the tuning thread to wake up, for the longer the
    # longer the iterator has lived, and the worker's other calls wait with it.
    untuned = tf.data.Options()
    untuned.autotune.enabled = False
    options = untuned if autotunes is None else tf.data.Options()
    iterator = iterator_ops.OwnedIterator(dataset.prefetch(_AHEAD).with_options(options))
    # In stock ops, since a worker may not have what makes the real batches.
    nothing = tf.data.Dataset.from_tensors(empty_batch(dataset.element_spec)).take(0)
    nothing = nothing.with_options(untuned)
    empty = iterator_ops.OwnedIterator(nothing)
    return [iterator._iterator_resource, empty._iterator_resource, nothing._variant_tensor]


def empty_batch(element_spec: Any) -> Any:
    """A batch of a type in which all sizes that the type leaves open are 0."""
    return tf.nest.map_structure(_some, element_spec)


def _some(spec: tf.TypeSpec) -> Any:
    if isinstance(spec, structure.NoneTensorSpec):
        return None
    if spec.shape.rank is None:
        return tf.zeros([], spec.dtype)
    sizes = [size or 0 for size in spec.shape.as_list()]
    if isinstance(spec, tf.RaggedTensorSpec):
        splits = [tf.zeros([sizes[0] + 1], spec.row_splits_dtype)]
        splits += [tf.zeros([1], spec.row_splits_dtype)] * (spec.ragged_rank - 1)
        values = tf.zeros([0, *sizes[spec.ragged_rank + 1 :]], spec.dtype)
        return tf.RaggedTensor.from_nested_row_splits(values, splits)
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensor(
            tf.zeros([0, len(sizes)], tf.int64),
            tf.zeros([0], spec.dtype),
            tf.constant(sizes, tf.int64),
        )
    return tf.zeros(sizes, spec.dtype)
