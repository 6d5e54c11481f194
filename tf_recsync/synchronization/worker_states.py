"""Every worker's parameters, and what synchronizes them, in a checkpoint."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tf_recsync.synchronization.copies import Copies
from tf_recsync.synchronization.synchronizer import Synchronizer

_FORMAT = 1

# The copies by group, and what a synchronizer keeps besides.
Parsed = tuple[dict[int, list[np.ndarray]], dict[str, np.ndarray]]


class WorkerStates(tf.train.experimental.PythonState):
    """What a `tf.train.Checkpoint` keeps of workers that have parameters of their own.

    Args:
        synchronizer: gives what keeps the copies together.
        variables: gives all variables of the model and its optimizer, in an order that does not
            depend on which layers are trained.
        watched: returns a context in which calls to a server that is silent end.
    """

    def __init__(
        self,
        synchronizer: Callable[[], Synchronizer],
        variables: Callable[[], Sequence[tf.Variable]],
        watched: Callable[[], contextlib.AbstractContextManager],
    ):
        self._synchronizer = synchronizer
        self._variables = variables
        self._watched = watched

    def serialize(self) -> bytes:
        """All copies, and what belongs to them; `tf.train.Checkpoint` calls this."""
        synchronizer = self._synchronizer()
        with self._watched():
            values = synchronizer.copies.all_values()  # First: within an epoch, it lets steps end.
            extras = synchronizer.extras()
        arrays = {
            "format": np.int64(_FORMAT),
            "workers": np.array(sorted(values), np.int64),
            # Of one that does not answer there is no copy.
            "groups": np.int64(len(synchronizer.copies.groups)),
            "places": self._places(synchronizer.copies),
            **extras,
        }
        for worker, copies in values.items():
            for i, copy in enumerate(synchronizer.copies.whole(copies)):
                # Types of TensorFlow's own, as bfloat16, numpy would not read again.
                serialized = tf.io.serialize_tensor(copy).numpy()
                arrays[f"{worker}/{i}"] = np.frombuffer(serialized, np.uint8)
        out = io.BytesIO()
        np.savez(out, **arrays)
        return out.getvalue()

    def deserialize(self, value: bytes) -> None:
        """Takes all of it over; `tf.train.Checkpoint` calls this.

        Raises:
            ValueError: if it is of other variables than are copied here.
        """
        self.restore(self.parsed(value))

    def parsed(self, value: bytes) -> Parsed:
        """What `serialize` gave; nothing is changed.

        Raises:
            ValueError: if it is of other variables than are copied here.
        """
        copied = self._synchronizer().copies
        variables = copied.seen
        with np.load(io.BytesIO(value)) as arrays:
            if int(arrays["format"]) != _FORMAT:
                raise ValueError(
                    f"workers' states have the format {int(arrays['format'])}, not {_FORMAT}"
                )
            workers = arrays["workers"].tolist()
            extras = {name: arrays[name] for name in arrays.files if "/" not in name}
            count = len(arrays.files) - len(extras)
            if count != len(workers) * len(variables):
                raise ValueError(
                    f"the checkpoint holds {count} copies of {len(workers)} workers, each of which "
                    f"has {len(variables)} variables of the model and its optimizer here"
                )
            places = self._places(copied)
            if not np.array_equal(extras.get("places", places), places):  # Older ones lack it.
                raise ValueError(
                    "the checkpoint holds copies of a model of which other layers are trained: "
                    "`trainable` of each layer must be, before compile, what it was there"
                )
            values = {}
            for worker in workers:
                copies = [_read(arrays[f"{worker}/{i}"], v) for i, v in enumerate(variables)]
                values[worker] = copied.divided(copies)
        return values, extras

    def restore(self, parsed: Parsed) -> None:
        """Takes over what `parsed` gave; nobody may be at work."""
        with self._watched():
            self._synchronizer().restore(*parsed)

    def _places(self, copies: Copies) -> np.ndarray:
        """Where each copied variable is among the model's and its optimizer's that are copied.

        Copies have those first that were trained when they were made.
        """
        copied = {id(variable) for variable in copies.seen}
        known = [id(variable) for variable in self._variables() if id(variable) in copied]
        number = {variable: i for i, variable in enumerate(known)}
        return np.array([number[id(variable)] for variable in copies.seen], np.int64)


def _read(serialized: np.ndarray, variable: tf.Variable) -> np.ndarray:
    try:
        copy = tf.io.parse_tensor(serialized.tobytes(), variable.dtype).numpy()
    except tf.errors.InvalidArgumentError as error:
        raise ValueError(
            f"the checkpoint holds copies of {variable.name} of another dtype than "
            f"{variable.dtype.name}: {error.message}"
        ) from error
    if not variable.shape.is_compatible_with(copy.shape):
        raise ValueError(
            f"the checkpoint holds copies of {variable.name} of the shape {copy.shape}, not "
            f"{tuple(variable.shape)}"
        )
    return copy
