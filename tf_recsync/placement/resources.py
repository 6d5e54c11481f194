"""What a group of Hierarchical Training has to compute and to send with."""

from __future__ import annotations

import dataclasses

from tf_recsync._checks import check_at_least
from tf_recsync.placement.graph import check_amount


@dataclasses.dataclass(frozen=True)
class Resources:
    """The trainers and parameter servers of a group.

    Of each step of a net on a trainer, the parameter servers of the group see as many as there are
    nets in the group: `trainers * nets_per_trainer`.

    Args:
        trainers: Trainers of a group, t, at least 1.
        servers: Parameter servers of a group, p, at least 1.
        nets_per_trainer: Concurrent nets of a trainer, r, at least 1; 1 by default.
        trainer_flops_per_second: FLOP/s that a net has on its trainer, C of a trainer. Where nets
            share the cores of a trainer, its own divided by `nets_per_trainer`. 5e10 by default,
            about what one core does in float32.
        server_flops_per_second: FLOP/s of a server, C of a group PS; 5e10 by default.
        bytes_per_second: Bytes that a device can receive and send in a second, W; 1.25e9 (the
            default) with 10 Gbit/s. The nets of a trainer share it.
        memory_limit: Bytes that each group PS has for weights, accumulators and activations. None
            (the default) sets no limit.
        trainer_memory_limit: Bytes that each trainer has for the activations of its nets. None
            (the default) sets no limit.
        activation_ratio: Bytes of a compressed activation for each byte of a plain one: 1 (the
            default) without compression, .5 with bfloat16.
        gradient_ratio: Bytes of a compressed gradient for each byte of a plain one, 1 by default.
        compression_seconds_per_byte: Processor seconds that it takes at each end of a cut edge to
            compress or restore a plain byte, 0 by default.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> Resources(trainers=3, servers=2, nets_per_trainer=2).nets
        6
    """

    trainers: int
    servers: int
    nets_per_trainer: int = 1
    trainer_flops_per_second: float = 5e10
    server_flops_per_second: float = 5e10
    bytes_per_second: float = 1.25e9
    memory_limit: int | None = None
    trainer_memory_limit: int | None = None
    activation_ratio: float = 1.0
    gradient_ratio: float = 1.0
    compression_seconds_per_byte: float = 0.0

    def __post_init__(self) -> None:
        """Checks the arguments."""
        for argument in ("trainers", "servers", "nets_per_trainer"):
            check_at_least(argument, getattr(self, argument), 1)
        for argument in ("memory_limit", "trainer_memory_limit"):
            if getattr(self, argument) is not None:
                check_at_least(argument, getattr(self, argument), 0)
        for argument in (
            "trainer_flops_per_second",
            "server_flops_per_second",
            "bytes_per_second",
            "activation_ratio",
            "gradient_ratio",
        ):
            check_amount(argument, getattr(self, argument), above=True)
        check_amount("compression_seconds_per_byte", self.compression_seconds_per_byte)

    @property
    def nets(self) -> int:
        """Nets of a group that share a copy of the parameters: t r."""
        return self.trainers * self.nets_per_trainer
