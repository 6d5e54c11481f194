"""What simulated workers learn where they hold the parameters themselves."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from tf_recsync import _engine
from tf_recsync._checks import check_at_least, check_seed
from tf_recsync.simulation._pictures import FIRST
from tf_recsync.simulation._settings import MOST, check_count, check_number


def check_model(model: LogisticRegression | None) -> None:
    """Raises a ValueError if what copies learn is of another kind."""
    if model is not None and not isinstance(model, LogisticRegression):
        raise ValueError(
            f"model must be a recsync.simulation.LogisticRegression or None, not {model!r}"
        )


MOST_BYTES = 2**40  # Of a message.


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogisticRegression:
    """A small problem that simulated workers learn by gradient descent, from a start of zeros.

    Examples are drawn once: inputs from a normal distribution, labels from a logistic model
    of them. Each step of a worker draws a batch of them.

    Attributes:
        features: the inputs of an example, at least 1. Default 32.
        examples: how many there are, at least 1, and with `features` at most 2 ** 20 numbers.
            Default 4096.
        batch_size: the examples of a step, at least 1. Default 128.
        learning_rate: positive. Default 0.1.
        momentum: of Keras's SGD, from 0 (the default), less than 1; only in decentralized
            training.
        weight_decay: of half the square of each parameter, at least 0. Default 0.
        seed: of the examples and of the batches, from 0 (the default), below 2 ** 64.

    Raises:
        ValueError: if an attribute is wrong.

    Example:

    >>> import tf_recsync as recsync
    >>> recsync.simulation.LogisticRegression(features=8, momentum=0.9).batch_size
    128
    """

    features: int = 32
    examples: int = 4096
    batch_size: int = 128
    learning_rate: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("features", "examples", "batch_size"):
            check_at_least(name, getattr(self, name), 1)
            if getattr(self, name) > 2**20:
                raise ValueError(f"{name} must be at most {2**20}, not {getattr(self, name)}")
        if self.features * self.examples > 2**20:
            raise ValueError(
                f"features * examples must be at most {2**20}, not {self.features * self.examples}"
            )
        check_seed(self.seed)
        check_number("learning_rate", self.learning_rate, positive=True)
        check_number("momentum", self.momentum)
        if self.momentum >= 1:
            raise ValueError(f"momentum must be less than 1, not {self.momentum!r}")
        check_number("weight_decay", self.weight_decay)

    def problem(self) -> _engine.LogisticProblem:
        """The examples, and what computes gradients and losses."""
        return _engine.LogisticProblem(
            examples=self.examples,
            features=self.features,
            batch_size=self.batch_size,
            weight_decay=self.weight_decay,
            seed=self.seed,
        )


@dataclasses.dataclass(frozen=True)
class Loss:
    """The loss at one moment.

    Attributes:
        seconds: of virtual time.
        steps: of all workers, that were done by then.
        loss: of all examples.
    """

    seconds: float
    steps: int
    loss: float


def draw_losses(axes: Any, losses: Sequence[Loss]) -> None:
    """The loss in the course of time."""
    axes.plot([look.seconds for look in losses], [look.loss for look in losses], color=FIRST)
    axes.set_xlabel("virtual seconds")
    axes.set_ylabel("loss")


def seconds_to(losses: tuple[Loss, ...], loss: float) -> float | None:
    """When the loss was first found to be at most this; None if never."""
    return next((look.seconds for look in losses if look.loss <= loss), None)


@dataclasses.dataclass(frozen=True)
class LinkUse:
    """What has passed a machine's network card.

    Attributes:
        sent_bytes: to other machines.
        received_bytes: from other machines.
        seconds: for how long that was passing it, in both directions together.
    """

    sent_bytes: int
    received_bytes: int
    seconds: float


def limits(steps: int | None, seconds: float | None) -> tuple[int, float]:
    """Steps and seconds after which a simulation ends, of arguments one of which may be None.

    Raises:
        ValueError: if one is wrong, or both are None.
    """
    if steps is None and seconds is None:
        raise ValueError("steps or seconds must be given, or training would have no end")
    if steps is not None:
        check_count("steps", steps, 1)
    if seconds is not None:
        check_number("seconds", seconds, positive=True)
    return MOST if steps is None else steps, math.inf if seconds is None else float(seconds)


def checked_bandwidth(name: str, value: float) -> float:
    """A bandwidth or speed, perhaps infinite; a ValueError if it is none."""
    if value != math.inf:
        check_number(name, value, positive=True)
    return float(value)


def table(lines: list[tuple[str, str]]) -> str:
    """Names and values, one pair a line, below each other."""
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)
