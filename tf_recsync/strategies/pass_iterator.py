"""Iterators of workers that leave the data when their pass ends."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf
from tensorflow.python.data.ops import iterator_ops


class PassIterator(iterator_ops.OwnedIterator):
    """An iterator that leaves its data when it is closed, even if something still refers to it.

    TensorFlow's end with the last reference, and the frames of an error's traceback refer to them
    for as long as somebody keeps the error. They would stay in tf.data's service meanwhile, and as
    a service that was started again gives its numbers anew, take batches of a later pass.

    Args:
        dataset: where it is made, it stays.
        nothing: makes a dataset of the same type without elements.
    """

    def __init__(self, dataset: tf.data.Dataset, nothing: Callable[[], tf.data.Dataset]):
        super().__init__(dataset)
        self._nothing = nothing

    def close(self) -> None:
        """Returns when it has left the data; call it in the worker's device scope.

        Raises:
            tf.errors.OpError: the worker can't be reached.
        """
        # There is no op that ends an iterator; one that begins anew ends what it had. Not with
        # its own dataset's take(0), which asks the service whether it knows the dataset.
        tf.raw_ops.MakeIterator(
            dataset=self._nothing()._variant_tensor, iterator=self._iterator_resource
        )
