"""Iterators of workers that leave the data when their pass ends."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import iterator_ops
from tensorflow.python.data.util import structure

_AHEAD = 2  # Batches that a worker keeps beside the one that it computes on.


class PassIterator(iterator_ops.OwnedIterator):
    """An iterator that leaves its data when it is closed, even if something still refers to it.

    TensorFlow's end with the last reference, and the frames of an error's traceback refer to them
    for as long as somebody keeps the error. They would stay in tf.data's service meanwhile, and as
    a service that was started again gives its numbers anew, take batches of a later pass.

    It keeps batches ahead.

    Args:
        dataset: where it is made, it stays.
    """

    def __init__(self, dataset: tf.data.Dataset):
        options = tf.data.Options()
        if dataset.options().autotune.enabled is None:
            # With autotuning, an iterator's end waits up to five seconds for the tuning thread
            # to wake up, and the worker's other calls wait with it.
            options.autotune.enabled = False
        super().__init__(dataset.prefetch(_AHEAD).with_options(options))
        self._nothing: tf.data.Dataset | None = None  # Made once: on a worker, each op is a call.

    def empty(self) -> tf.data.Iterator:
        """An iterator of the same type without batches; call it in the worker's device scope."""
        return iter(self._without_batches())

    def close(self) -> None:
        """Returns when it has left the data; call it in the worker's device scope.

        Raises:
            tf.errors.OpError: the worker can't be reached.
        """
        # There is no op that ends an iterator; one that begins anew ends what it had. Not with
        # its own dataset's take(0), which asks the service whether it knows the dataset.
        tf.raw_ops.MakeIterator(
            dataset=self._without_batches()._variant_tensor, iterator=self._iterator_resource
        )

    def _without_batches(self) -> tf.data.Dataset:
        """A dataset of the same type without elements."""
        if self._nothing is None:
            # In stock ops, since a worker may not have what makes the real batches.
            self._nothing = tf.data.Dataset.from_tensors(empty_batch(self.element_spec)).take(0)
        return self._nothing


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
