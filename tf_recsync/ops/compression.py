"""Activations and gradients in fewer bytes (Hierarchical Training, section 4.2).

They have no gradients: what is encoded is sent beside the differentiated step.
"""

from __future__ import annotations

import tensorflow as tf

from tf_recsync.ops._library import library

for _name in (
    "RecsyncEncodeInt8",
    "RecsyncDecodeInt8",
    "RecsyncCompressGradient",
    "RecsyncRestoreGradient",
):
    tf.no_gradient(_name)


def encode_int8(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Encodes activations in int8, with a scale for each row.

    Args:
        x: float32 [..., columns].

    Returns:
        int8 [..., columns]: x / scale, rounded to the nearest, ties to even; and float32 [...]:
        the scales, max|x| / 127 of each row. The scale of a row with a value that is not finite is
        NaN, so that all of it is NaN when decoded.

    Raises:
        tf.errors.InvalidArgumentError: `x` is a scalar.

    Example:
        >>> codes, scales = encode_int8(tf.constant([[127.0, 1.4], [0.0, 0.0]]))
        >>> codes.numpy().tolist(), scales.numpy().tolist()
        ([[127, 1], [0, 0]], [1.0, 0.0])
    """
    codes, scales = library.recsync_encode_int8(x)
    return codes, scales


def decode_int8(codes: tf.Tensor, scales: tf.Tensor) -> tf.Tensor:
    """Restores what `encode_int8` encoded.

    Args:
        codes: int8 [..., columns].
        scales: float32 [...].

    Returns:
        float32 [..., columns], within half a scale of what was encoded.

    Raises:
        tf.errors.InvalidArgumentError: there is not one scale for each row.

    Example:
        >>> decode_int8(tf.constant([[127, 1]], tf.int8), tf.constant([0.5])).numpy().tolist()
        [[63.5, 0.5]]
    """
    return library.recsync_decode_int8(codes, scales)


def compress_gradient(
    gradient: tf.Tensor,
    *,
    feedback: str | None = None,
    net: tf.Tensor | int = 0,
    sparsify: float = 0.0,
    dtype: tf.DType = tf.float32,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Compresses a gradient g, or g + e, to its largest values.

    With feedback, what is not sent is added to the next gradient: e <- g + e - C(g + e), with C
    the compression, rounding to bfloat16 included (Karimireddy et al. 2019, "Error Feedback Fixes
    SignSGD and other Gradient Compression Schemes").

    Args:
        gradient: float32, of any shape.
        feedback: the name of e on its device, where calls with one name share it; None (the
            default) for none. It begins at 0, anew when the number of gradients changes.
        net: whose gradients they are, an int64 scalar: each net has an e of its own.
        sparsify: the part of the values, those nearest to 0, that is left out, at least 0 (the
            default) and below 1. One value is always sent. Those not finite count as the largest.
        dtype: of what is sent, tf.float32 (the default) or tf.bfloat16.

    Returns:
        uint8 [bytes]: which values are sent, bit i % 8 of byte i / 8 for value i, or [0] if all
        are; and [values]: those, in their order. For `restore_gradient`.

    Raises:
        ValueError: the name is empty.
        tf.errors.InvalidArgumentError: `sparsify` is out of range.

    Example:
        >>> mask, values = compress_gradient(tf.constant([1.0, -5.0, 3.0, 0.5]), sparsify=0.5)
        >>> mask.numpy().tolist(), values.numpy().tolist()
        ([6], [-5.0, 3.0])
        >>> restore_gradient(mask, values, [4]).numpy().tolist()
        [0.0, -5.0, 3.0, 0.0]
    """
    if feedback == "":
        raise ValueError("feedback must not be empty; None is for none")
    mask, values = library.recsync_compress_gradient(
        gradient, tf.cast(net, tf.int64), feedback=feedback or "", sparsify=sparsify, T=dtype
    )
    return mask, values


def restore_gradient(mask: tf.Tensor, values: tf.Tensor, shape: tf.Tensor) -> tf.Tensor:
    """Restores what `compress_gradient` compressed.

    Args:
        mask: uint8 [bytes].
        values: float32 or bfloat16 [values].
        shape: int64 [rank], of the gradient.

    Returns:
        float32 of that shape, 0 where nothing was sent.

    Raises:
        tf.errors.InvalidArgumentError: mask, values and shape do not belong together.
    """
    return library.recsync_restore_gradient(mask, values, tf.cast(shape, tf.int64))
