"""Where training is in its data, for whoever goes on there in another process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class DataPosition:
    """What of the data of `fit` was trained on.

    Attributes:
        passes: how many passes over the dataset had begun before the one that it is about.
        batches: of that pass, how many were trained on; or lost with workers that make their own.
        epoch_batches: how many steps of the epoch were done, as Keras counts.
        pipelines: of each input pipeline that workers run, the batches of the pass that it had
            given; empty if there is one for all.
        batch_size: examples of a batch; None if that is not known.
    """

    passes: int = 0
    batches: int = 0
    epoch_batches: int = 0
    pipelines: tuple[int, ...] = ()
    batch_size: int | None = None

    def as_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {**dataclasses.asdict(self), "pipelines": list(self.pipelines)}

    @classmethod
    def parsed(cls, about: Any) -> DataPosition:
        """The other way round.

        Raises:
            ValueError: if it is something else.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(about, Mapping) or set(about) != names:
            raise ValueError(f"a position in data must be an object with {sorted(names)}: {about}")
        counts = [about[name] for name in ("passes", "batches", "epoch_batches")]
        size, pipelines = about["batch_size"], about["pipelines"]
        if not isinstance(pipelines, list) or not all(
            isinstance(count, int) and count >= 0
            for count in [*counts, *pipelines, 0 if size is None else size]
        ):
            raise ValueError(f"a position in data must have counts, and not {about}")
        return cls(*counts, tuple(pipelines), size)
