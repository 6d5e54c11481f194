"""What parameter servers know of calls that are under way: how far they are, and their end.

A worker that does the steps of a pass in one call is out of the coordinator's reach meanwhile. Its
row (`step_counts.ROW`) is not: one call of the coordinator to a server that counts global steps
reads, or tells, all workers whose steps it counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tf_recsync.strategies.step_counts import ROW
from tf_recsync.synchronization.remote_values import PackedReader


class CallBoard:
    """Reads and tells rows; of those whose server is gone nothing is known, and nothing told.

    Args:
        size: how many rows there are at most.
    """

    def __init__(self, size: int):
        self._size = size
        self._read = PackedReader([ROW] * size)

        def tell(handles):
            for handle in handles:
                tf.raw_ops.AssignAddVariableOp(resource=handle, value=np.array([0, 1], np.int64))

        with tf.device(None):
            self._tell = tf.function(tell, autograph=False).get_concrete_function(
                [tf.TensorSpec([], tf.resource)] * size
            )

    def applied(self, rows: Sequence[tf.Variable]) -> list[int | None]:
        """The steps that were applied of each."""
        found: list[int | None] = [None] * len(rows)

        def read(device: str, indices: list[int], handles: list[tf.Tensor]) -> None:
            values = self._read(handles, device)
            for i, value in zip(indices, values[: len(indices)], strict=True):
                found[i] = int(value[0])

        self._on_each_server(rows, read)
        return found

    def tell(self, rows: Sequence[tf.Variable]) -> None:
        """Has the calls of these end after the turn that they are in.

        A call that has not begun may miss it: who is still at it after a while is told again.
        """

        def tell(device: str, indices: list[int], handles: list[tf.Tensor]) -> None:
            with tf.device(device):
                self._tell(handles)

        self._on_each_server(rows, tell)

    def _on_each_server(self, rows: Sequence[tf.Variable], action: Callable[..., Any]) -> None:
        """Calls `action(device, indices, handles)`; of handles there are as many as the functions
        were traced for, as to repeat one does no harm."""
        by_device: dict[str, list[int]] = {}
        for i, row in enumerate(rows):
            by_device.setdefault(row.device, []).append(i)
        for device, indices in by_device.items():
            handles = [rows[i].handle for i in indices]
            try:
                action(device, indices, handles + handles[:1] * (self._size - len(handles)))
            except tf.errors.OpError as error:
                # Those who train there find out what is wrong.
                logging.log_every_n_seconds(
                    logging.DEBUG, "calls can't be followed on %s: %s", 10, device, error
                )
