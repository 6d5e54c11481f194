"""Which calls of `fit` a folder of checkpoints has seen, and which of them are done.

A program that trains on one part of its data after the other, as on days, calls `fit` for each.
When it is started again, the calls that are done have to end at once, and the one in which it died
goes on, whatever came in between. So a checkpoint says in which call it was saved, by a name or by
the number of the call, and which were done before.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import keras

PART, DONE = "part", "done_parts"  # In the metadata of a checkpoint.

Part = int | str  # The number of a call of `fit`, from 1, or the name that it was given.


@dataclasses.dataclass
class Progress:
    """How far a model is in the calls of `fit` that save to one folder.

    Attributes:
        calls: how many have ended in this process.
        last: the part that was begun last; None if there is none.
        done: the names of those before.
        at: the checkpoint that the model is as it was in; None if it was trained since.
        metadata: of the checkpoint that it was restored from.
        is_new: whether nothing was restored or begun.
        unaveraged: optimizers that put no moving averages into weights when this call ends.
    """

    calls: int = 0
    last: Part | None = None
    done: list[str] = dataclasses.field(default_factory=list)
    at: str | None = None
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    is_new: bool = True
    unaveraged: list[keras.optimizers.Optimizer] = dataclasses.field(default_factory=list)

    def restored(self, path: str, metadata: Mapping[str, Any]) -> None:
        """The model was restored from a checkpoint."""
        self.at, self.metadata, self.is_new = path, metadata, False
        self.last = metadata.get(PART)
        self.done = list(metadata.get(DONE, ()))

    def is_done(self, part: Part) -> bool:
        """Whether a part was left for another one."""
        if isinstance(part, str):
            return part in self.done
        return isinstance(self.last, int) and part < self.last

    def is_under_way(self, part: Part) -> bool:
        """Whether the checkpoint that the model is at was saved in this part."""
        # One of another kind says nothing of parts.
        return self.at is not None and self.last in (None, part)

    def begin(self, part: Part) -> None:
        """A part is trained on from now on."""
        if isinstance(self.last, str) and self.last != part:
            self.done.append(self.last)
        self.last, self.is_new = part, False

    def leave_unaveraged(self, optimizers: Iterable[keras.optimizers.Optimizer]) -> None:
        """Has `fit` leave weights as they are, which Keras sets to moving averages at its end.

        What was restored may be of the middle of a later call.
        """
        self.unaveraged = [optimizer for optimizer in optimizers if optimizer.use_ema]
        for optimizer in self.unaveraged:
            optimizer.use_ema = False

    def average_again(self) -> None:
        """Ends that; after a call of `fit` that had an error, the next one that saves here does."""
        for optimizer in self.unaveraged:
            optimizer.use_ema = True
        self.unaveraged = []

    def as_metadata(self) -> dict[str, Any]:
        """What a checkpoint says of it."""
        return {PART: self.last, DONE: list(self.done)}


# Of each model, by folder: objects that save to a folder may be made anew for each call of `fit`.
_known: weakref.WeakKeyDictionary[keras.Model, dict[str, Progress]] = weakref.WeakKeyDictionary()


def progress_of(model: keras.Model, folder: str) -> Progress:
    """How far a model is in the calls of `fit` that save to a folder."""
    return _known.setdefault(model, {}).setdefault(folder, Progress())


def words(part: Part) -> str:
    """What a part is called in messages."""
    return f"part={part!r}" if isinstance(part, str) else f"call {part} of fit"
