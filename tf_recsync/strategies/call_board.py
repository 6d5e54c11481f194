"""What parameter servers know of calls that are under way: how far they are, and their end.

A worker that does the steps of a pass in one call is out of the coordinator's reach meanwhile. Its
row (`step_counts.ROW`) is not: one call of the coordinator to a server that counts global steps
reads, or tells, all workers whose steps it counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tf_recsync.strategies.step_counts import ROW
from tf_recsync.synchronization.remote_functions import RemoteFunction, traced_once
from tf_recsync.synchronization.remote_values import PackedReader


class CallBoard:
    """Reads and tells rows.

    Args:
        size: how many rows there are at most.
    """

    def __init__(self, size: int):
        self._size = size
        self._read = PackedReader([ROW] * size)

    def applied(self, rows: Sequence[tf.Tensor]) -> list[int]:
        """The steps that were applied of each of these handles; all rows are on one server.

        Raises:
            tf.errors.OpError: if the server is gone.
        """
        values = self._read(self._padded(rows))
        return [int(value[0]) for value in values[: len(rows)]]

    def tell(self, device: str, rows: Sequence[tf.Tensor]) -> None:
        """Has the calls of these end after the turn that they are in; all rows are on this device.

        A call that has not begun may miss it: who is still at it after a while is told again.

        Raises:
            tf.errors.OpError: if the server is gone.
        """
        with tf.device(device):
            _teller(self._size)(*self._padded(rows))

    def _padded(self, rows: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """As many handles as the functions were traced for; to repeat one does no harm."""
        handles = list(rows)
        return handles + handles[:1] * (self._size - len(handles))


@traced_once
def _teller(size: int) -> RemoteFunction:
    """A function of so many handles of rows, which tells all of them."""

    def tell(*handles):
        for handle in handles:
            tf.raw_ops.AssignAddVariableOp(resource=handle, value=np.array([0, 1], np.int64))

    specs = [tf.TensorSpec([], tf.resource)] * size
    return RemoteFunction(tf.function(tell, autograph=False).get_concrete_function(*specs))
