"""Where training is in its data, for whoever goes on there in another process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tf_recsync.strategies.done_batches import Ranges


@dataclasses.dataclass(frozen=True)
class DataPosition:
    """What of the data of `fit` was trained on.

    Attributes:
        passes: how many passes over the dataset had begun before the one that it is about.
        batches: of that pass, how many were trained on; or, where lost batches are dropped, lost
            with workers that make their own.
        epoch_batches: how many steps of the epoch were done, as Keras counts.
        pipelines: of each input pipeline that workers run, the batches of the pass that it had
            given; empty if there is one for all.
        batch_size: examples of a batch; None if that is not known.
        done: which of them were trained on before others that come first in the order of the data:
            ranges of numbers from 0, each its first one and the one after its last. All the others
            are the first ones of the pass.
        parts: in how many parts the pass has numbers, see data_parts.py.
    """

    passes: int = 0
    batches: int = 0
    epoch_batches: int = 0
    pipelines: tuple[int, ...] = ()
    batch_size: int | None = None
    done: Ranges = ()
    parts: int = 1

    @property
    def prefix(self) -> int:
        """How many batches of the pass were trained on from its first one on, without a gap."""
        return self.batches - sum(end - first for first, end in self.done)

    def as_json(self) -> dict[str, Any]:
        """As a JSON object."""
        done = [list(one) for one in self.done]
        return {**dataclasses.asdict(self), "pipelines": list(self.pipelines), "done": done}

    @classmethod
    def parsed(cls, about: Any) -> DataPosition:
        """The other way round.

        Raises:
            ValueError: if it is something else.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        # Files of earlier versions say nothing of what was done out of order, nor of parts.
        later = {"done", "parts"}
        if not isinstance(about, Mapping) or names - later != set(about) - later:
            raise ValueError(f"a position in data must be an object with {sorted(names)}: {about}")
        counts = [about[name] for name in ("passes", "batches", "epoch_batches")]
        size, pipelines, parts = about["batch_size"], about["pipelines"], about.get("parts", 1)
        if not isinstance(pipelines, list) or not all(
            isinstance(count, int) and count >= 0
            for count in [*counts, *pipelines, 0 if size is None else size]
        ):
            raise ValueError(f"a position in data must have counts, and not {about}")
        if not isinstance(parts, int) or parts < 1:
            raise ValueError(f"parts must be an integer of at least 1: {about}")
        done = _parsed_ranges(about.get("done", []))
        position = cls(*counts, tuple(pipelines), size, done, parts)
        last = position.prefix
        if last < 0:
            raise ValueError(f"done can't have more batches than were trained on: {about}")
        for first, end in position.done:
            if not last < first < end:
                raise ValueError(f"done must be ranges that rise, behind the first ones: {about}")
            last = end
        return position


def _parsed_ranges(about: Any) -> Ranges:
    """Raises a ValueError if it is something else."""
    if not isinstance(about, list) or not all(
        isinstance(one, list) and len(one) == 2 and all(isinstance(n, int) for n in one)
        for one in about
    ):
        raise ValueError(f"done must be a list of pairs of numbers, and not {about}")
    return tuple((first, end) for first, end in about)
