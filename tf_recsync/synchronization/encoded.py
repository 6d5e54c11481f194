"""Activations and gradients of placed layers as they travel, while a step is traced.

Reference: Huang et al. 2021, "Hierarchical Training: Scaling Deep Recommendation Models on Large
CPU Clusters", section 4.2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import tensorflow as tf

from tf_recsync import ops
from tf_recsync.compression import Compression
from tf_recsync.synchronization.batches import tensors_of

# What a tensor is: as it was computed forward, the gradient of that, or anything else.
Kind = Literal["activation", "gradient", "other"]


@dataclasses.dataclass(frozen=True)
class Message:
    """What travels in place of a tensor.

    Attributes:
        parts: what travels, beside the tensor.
        restored: makes of the parts, when they have arrived, what the tensor is taken for.
    """

    parts: tuple[tf.Tensor, ...]
    restored: Callable[[Sequence[tf.Tensor]], tf.Tensor]


class Encoder:
    """Makes messages of what the placed layers of one step send, by a compression.

    Args:
        compression: None for none.
        batch: the step's batch; what does not carry it is not compressed.
        name: of what is kept from step to step, different from that of any other model.
    """

    def __init__(self, compression: Compression | None, batch: Any, name: str):
        self._compression = compression or Compression()
        firsts = {x.shape[0] for x in tensors_of(batch) if x.shape.rank}
        self._sizes = {size for size in firsts if size and size > 1}  # Of 1 all are multiples.
        self._name = name
        self._edges = 0  # That have feedback.

    def has_feedback(self, kind: Kind) -> bool:
        """Whether what is not sent of such a tensor is kept, for each net."""
        compression = self._compression
        return kind == "gradient" and compression.sparsify > 0 and compression.error_feedback

    def message(self, tensor: tf.Tensor, kind: Kind, net: tf.Tensor) -> Message | None:
        """What travels in place of a tensor; None if it travels as it is.

        Args:
            tensor: in whose device scope this is called.
            kind: what it is.
            net: the number of the net whose step it is, an int64 scalar where the tensor is.
        """
        compression = self._compression
        if not tensor.dtype.is_floating or not self._carries_batch(tensor):
            return None
        if kind == "gradient" and compression.sparsify > 0:
            return self._sparse(tensor, net)
        wanted = {"activation": compression.activations, "gradient": compression.gradients}
        encoding = wanted.get(kind, "none")
        if encoding == "bfloat16" and tensor.dtype.size > tf.bfloat16.size:
            return Message(
                (tf.cast(tensor, tf.bfloat16),), lambda parts: tf.cast(parts[0], tensor.dtype)
            )
        # A row of one value is less than its code and scale are.
        if encoding == "int8" and tensor.shape.rank > 1 and tensor.shape[-1] != 1:
            parts = ops.encode_int8(tf.cast(tensor, tf.float32))
            return Message(parts, lambda parts: tf.cast(ops.decode_int8(*parts), tensor.dtype))
        return None

    def _sparse(self, tensor: tf.Tensor, net: tf.Tensor) -> Message:
        """The largest values of a gradient, and of what was not sent of those before."""
        compression = self._compression
        is_half = compression.gradients == "bfloat16" or tensor.dtype == tf.bfloat16
        feedback = None
        if self.has_feedback("gradient"):
            feedback = f"{self._name}/{self._edges}"  # The same in all steps of a model.
            self._edges += 1
        mask, values = ops.compress_gradient(
            tf.cast(tensor, tf.float32),
            feedback=feedback,
            net=net,
            sparsify=compression.sparsify,
            dtype=tf.bfloat16 if is_half else tf.float32,
        )

        def restored(parts: Sequence[tf.Tensor]) -> tf.Tensor:
            gradient = tf.cast(ops.restore_gradient(*parts), tensor.dtype)
            return tf.ensure_shape(gradient, tensor.shape)

        return Message((mask, values, tf.shape(tensor, tf.int64)), restored)

    def _carries_batch(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor has values for each example, as far as its shape tells."""
        if not tensor.shape.rank:  # A scalar, or not known.
            return False
        first = tensor.shape[0]
        return first is None or any(first % size == 0 for size in self._sizes)
