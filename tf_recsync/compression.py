"""How what travels between the devices of a group is compressed."""

from __future__ import annotations

import dataclasses
from typing import Literal

from tf_recsync._checks import check_bool, number, plain_values

_ACTIVATIONS = ("none", "bfloat16", "int8")
_GRADIENTS = ("none", "bfloat16")
# Processor seconds for each byte that is not compressed, the mean of encoding and decoding: by
# benchmarks/compression.py --threads=1, on a core of an AMD EPYC at 2048 rows of 512 values.
_SECONDS_PER_BYTE = {"none": 0.0, "bfloat16": 0.04e-9, "int8": 0.085e-9}
_SECONDS_PER_SPARSE_BYTE = 0.6e-9


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
        plain_values(self)
        number("sparsify", self.sparsify, least=0, below=1)
        check_bool("error_feedback", self.error_feedback)

    @property
    def compresses_gradients(self) -> bool:
        """Whether gradients are changed at all."""
        return self.gradients != "none" or self.sparsify > 0

    @property
    def activation_ratio(self) -> float:
        """Bytes of a compressed activation for each plain byte, for `Resources`.

        Without the scales of int8, four bytes for each row.
        """
        return {"none": 1.0, "bfloat16": 0.5, "int8": 0.25}[self.activations]

    @property
    def gradient_ratio(self) -> float:
        """Bytes of a compressed gradient for each plain byte, for `Resources`.

        With `sparsify` a bit for each value says whether it is sent.
        """
        value = 0.5 if self.gradients == "bfloat16" else 1.0
        return 1 / 32 + (1 - self.sparsify) * value if self.sparsify else value

    @property
    def seconds_per_byte(self) -> float:
        """Processor seconds at each end of an edge for each plain byte, for `Resources`.

        The mean of activations and gradients, as measured by `benchmarks/compression.py`: 0.04 ns
        in bfloat16, 0.085 ns in int8, 0.6 ns with `sparsify`.
        """
        sparse = self.sparsify > 0
        gradients = _SECONDS_PER_SPARSE_BYTE if sparse else _SECONDS_PER_BYTE[self.gradients]
        return (_SECONDS_PER_BYTE[self.activations] + gradients) / 2
