"""How what travels between the devices of a group is compressed."""

from __future__ import annotations

import dataclasses
from typing import Literal

_ACTIVATIONS = ("none", "bfloat16", "int8")
_GRADIENTS = ("none", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Compression:
    """How activations and their gradients are compressed on edges between devices.

    Reference: Huang et al. 2021, "Hierarchical Training: Scaling Deep Recommendation Models on
    Large CPU Clusters", section 4.2.

    Args:
        activations: "none" (the default); "bfloat16", half of the bytes; or "int8", a quarter,
            with a float32 scale, max|x| / 127, for each row. Rows of one value travel as they are.
        gradients: "none" (the default) or "bfloat16". Not "int8".
        sparsify: The part of the values of a gradient, those nearest to 0, that is not sent; at
            least 0 (the default) and below 1.
        error_feedback: Whether what is not sent of a gradient is added to the next one: e <- g + e
            - C(g + e) for each net and edge (Karimireddy et al. 2019). True by default; without
            `sparsify` gradients are only rounded, each by itself.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> Compression(activations="int8", gradients="bfloat16").compresses_gradients
        True
    """

    activations: Literal["none", "bfloat16", "int8"] = "none"
    gradients: Literal["none", "bfloat16"] = "none"
    sparsify: float = 0.0
    error_feedback: bool = True

    def __post_init__(self) -> None:
        """Checks the arguments."""
        if self.activations not in _ACTIVATIONS:
            raise ValueError(f"activations={self.activations!r}: must be one of {_ACTIVATIONS}.")
        if self.gradients == "int8":
            raise ValueError(
                "gradients='int8': must be 'none' or 'bfloat16'. Gradients between parts of a "
                "model are extremely sensitive to lower precision (Huang et al. 2021, section "
                "4.2), so only activations are sent in int8."
            )
        if self.gradients not in _GRADIENTS:
            raise ValueError(f"gradients={self.gradients!r}: must be one of {_GRADIENTS}.")
        number = isinstance(self.sparsify, (int, float)) and not isinstance(self.sparsify, bool)
        if not number or not 0 <= self.sparsify < 1:
            raise ValueError(f"sparsify={self.sparsify!r}: must be at least 0 and below 1.")
        if not isinstance(self.error_feedback, bool):
            raise ValueError(f"error_feedback={self.error_feedback!r}: must be True or False.")

    @property
    def compresses_gradients(self) -> bool:
        """Whether gradients are changed at all."""
        return self.gradients != "none" or self.sparsify > 0
