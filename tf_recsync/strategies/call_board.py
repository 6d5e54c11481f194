"""What parameter servers know of calls that are under way: how far they are, and their end.

A worker that does the steps of a pass in one call is out of the coordinator's reach meanwhile. Its
row on a board is not, on the server that counts its steps: that has how many steps were applied
and what the worker reports of itself (`ops.worker_board`). One call of the coordinator reads, or
tells, all workers whose rows a server has.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from tf_recsync import ops
from tf_recsync.cluster import CHIEF, Cluster, Server
from tf_recsync.synchronization.remote_functions import RemoteFunction, traced_once
from tf_recsync.synchronization.remote_values import padded, to_send

_keys = itertools.count()  # Of rows, of which no two of a process have the same.


@dataclasses.dataclass(frozen=True)
class Row:
    """A worker's row on a board.

    Attributes:
        board: that board.
        key: by which it is read and told.
        handle: of the resource; the row goes with it.
    """

    board: CallBoard
    key: int
    handle: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Reading:
    """What a board had when it was read.

    Attributes:
        applied: the steps that were applied of each row, by their keys.
        reports: what was reported since the last reading, as bytes, of those rows that have.
    """

    applied: dict[int, int]
    reports: dict[int, np.ndarray]


class CallBoard:
    """A board on a server, as long as that lives.

    Args:
        device: the server's.

    Attributes:
        device: as above.
        server: the server.

    Raises:
        tf.errors.OpError: if the server is gone.
    """

    def __init__(self, device: str):
        self.device = device
        self.server = _server_of(device)
        with tf.device(device):
            self._handle = ops.worker_board()

    def add_row(self) -> Row:
        """Makes a row.

        Raises:
            tf.errors.OpError: if the server is gone, like the others.
        """
        key = next(_keys)
        # Not by a function that is called here: TensorFlow crashes when such a one returns a
        # handle of another process's.
        with tf.device(self.device):
            return Row(self, key, ops.board_row(self._handle, to_send(np.int64(key))))

    def read(self) -> Reading:
        """Reads all rows, and takes what was reported."""
        with tf.device(CHIEF):
            return _parsed(np.array(_reader()(self._handle)))

    def tell(self, rows: Sequence[Row]) -> None:
        """Has the calls of these end after the turn that they are in.

        A call that has not begun may miss it: who is still at it after a while is told again.
        """
        self._tell({row.key: (1, 0) for row in rows})

    def forget(self, known: Mapping[int, int]) -> None:
        """Has workers forget the numbers of batches that are known.

        Args:
            known: how many of the first, by rows' keys.
        """
        self._tell({key: (0, count) for key, count in known.items()})

    def _tell(self, told: Mapping[int, tuple[int, int]]) -> None:
        columns = [[key, *values] for key, values in told.items()]
        # Numbers go along with a call that is made here: by itself, each array would be two.
        with tf.device(CHIEF):
            _teller()(self._handle, to_send(np.array(columns, np.int64).T))


class CallBoards:
    """The boards of a model's steps, one on each server that counts some; thread-safe.

    Args:
        cluster: the connected cluster.
    """

    def __init__(self, cluster: Cluster):
        self._cluster = cluster
        self._lock = threading.Lock()
        self._boards: dict[tuple[str, int], CallBoard] = {}

    def add_row(self, device: str) -> Row:
        """Makes a row on a server's board, which is made anew when the server is another one.

        Raises:
            tf.errors.OpError: if the server is gone.
        """
        board = self._at(device)
        try:
            return board.add_row()
        except tf.errors.OpError:
            with self._lock:  # Who tries again may find another server there.
                self._boards = {k: own for k, own in self._boards.items() if own is not board}
            raise

    def _at(self, device: str) -> CallBoard:
        key = device, self._cluster.membership.life(_server_of(device))
        with self._lock:
            board = self._boards.get(key)
        if board is not None:
            return board
        made = CallBoard(device)
        with self._lock:
            for other in [k for k in self._boards if k[0] == device and k[1] < key[1]]:
                del self._boards[other]
            return self._boards.setdefault(key, made)


def _server_of(device: str) -> Server:
    spec = tf.DeviceSpec.from_string(device)
    return spec.job, spec.task


@traced_once
def _teller() -> RemoteFunction:
    """A function of a board's handle and what workers are told: `[3, rows]`, as the op takes it."""

    def tell(board, told):
        ops.tell_workers(board, *tf.unstack(told))

    specs = tf.TensorSpec([], tf.resource), tf.TensorSpec([3, None], tf.int64)
    return RemoteFunction(tf.function(tell, autograph=False).get_concrete_function(*specs))


@traced_once
def _reader() -> RemoteFunction:
    """A function of a board's handle, which reads it where it is and brings what it has here."""

    def read(board):
        message = ops.read_board(board)
        with tf.device(CHIEF):
            return tf.identity(message)

    return RemoteFunction(
        tf.function(read, autograph=False).get_concrete_function(tf.TensorSpec([], tf.resource))
    )


def _parsed(message: np.ndarray) -> Reading:
    """What a message of `ops.read_board` says."""
    count = int(message[:8].view(np.int64)[0])
    begin = 8 + 24 * count
    applied, reports = {}, {}
    for key, steps, size in message[8:begin].view(np.int64).reshape(count, 3).tolist():
        applied[key] = steps
        if size >= 0:
            reports[key] = message[begin : begin + size]
            begin += padded(size)
    return Reading(applied, reports)
