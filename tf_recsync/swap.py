"""SWAP: samples weighted according to period."""

from __future__ import annotations

import dataclasses

import keras

from tf_recsync._checks import integer, number, plain_values


@keras.saving.register_keras_serializable(package="tf_recsync")
@dataclasses.dataclass(frozen=True)
class Swap:
    """Samples weighted according to period, for the accumulators of an optimizer.

    At every global step that is a multiple of `period`, the accumulators are
    multiplied by `decay`: `v_t = lambda_t v_(t-1) + g^2`, where `lambda_t` is
    `decay` at those steps and 1 at all others. Samples of one period count
    alike; a sample from p periods ago counts `decay ** p`. Rows of embedding
    tables are decayed at their next touch, which gives the same numbers.

    Reference: Liu and Zhao 2021, "Asynchronous Stochastic Gradient Descent for
    Extreme-Scale Recommender Systems", Algorithm 2.

    Args:
        period: T, a positive int in global steps: pushes in asynchronous training,
            global batches where they are applied together. When a checkpoint goes on
            in another mode it is converted by examples.
        decay: lambda_0, a float in (0, 1]. Defaults to 0.8, the paper's choice.

    Raises:
        ValueError: if `period` is not an integer of at least 1 or `decay` not in (0, 1].

    Example:

    >>> Swap(period=10_000, decay=0.8)
    Swap(period=10000, decay=0.8)
    """

    period: int
    decay: float = 0.8

    def __post_init__(self) -> None:
        plain_values(self)
        integer("period", self.period, 1)
        number("decay", self.decay, above=0, most=1)

    def get_config(self) -> dict:
        return dataclasses.asdict(self)

    @classmethod
    def from_config(cls, config: dict) -> Swap:
        return cls(**config)
