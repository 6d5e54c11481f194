"""Messages between workers and servers: several vectors in one, which few copies take apart.

They have no gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tf_recsync.ops._library import library

for _name in ("RecsyncPack", "RecsyncUnpack"):
    tf.no_gradient(_name)


def pack(groups: Sequence[Sequence[tf.Tensor]]) -> tf.Tensor:
    """Puts tensors into one vector.

    Args:
        groups: float32 or int64 tensors of any shapes, all of one type. Those of a group
            follow one another without a gap; there may be gaps between groups.

    Returns:
        The vector, for `unpack`.

    Raises:
        ValueError: there are no tensors.
    """
    pieces = [tensor for group in groups for tensor in group]
    if not pieces:
        raise ValueError(f"groups must have a tensor, got {groups}")
    if len(pieces) == 1:
        return tf.reshape(pieces[0], [-1])
    return library.recsync_pack(pieces, groups=[len(group) for group in groups])


def unpack(packed: tf.Tensor, groups: Sequence[Sequence[int | tf.Tensor]]) -> list[tf.Tensor]:
    """Takes apart what `pack` put together.

    The first piece of a group that has elements shares the memory of `packed`, and so do others
    that lie where a tensor's buffer may.

    Args:
        packed: a vector.
        groups: the sizes of the pieces of each group; that of the last piece may be -1 for
            all the rest. Neighbours may be taken as one piece of their sizes' sum.

    Returns:
        The pieces, vectors.

    Raises:
        tf.errors.InvalidArgumentError: the sizes are not those of the pieces (when it runs).
    """
    sizes = [size for group in groups for size in group]
    all_known = all(isinstance(size, int) for size in sizes)
    if all_known and sizes == [-1]:
        return [packed]
    given = tf.constant(sizes, tf.int64) if all_known else tf.cast(tf.stack(sizes), tf.int64)
    counts = [len(group) for group in groups]
    pieces = library.recsync_unpack(packed, given, N=len(sizes), groups=counts)
    for piece, size in zip(pieces, sizes, strict=True):
        if isinstance(size, int) and size >= 0:
            piece.set_shape([size])
    return pieces


def pull_dense(
    variables: Sequence[tf.Tensor], versions: Sequence[tf.Tensor], others: Sequence[tf.Tensor] = ()
) -> tuple[tf.Tensor, tf.Tensor]:
    """Reads dense variables with their versions, and packs their values with other tensors.

    Args:
        variables: handles of float32 variables.
        versions: handles of their versions, int64 scalar variables.
        others: float32 tensors that go with them.

    Returns:
        What `pack` makes of the values and the others, each in a group of its own; and the
        versions, int64 [variables].
    """
    return library.recsync_pull_dense(variables, versions, others)
