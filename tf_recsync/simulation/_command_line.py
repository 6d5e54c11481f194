"""What the arguments of all simulations have in common, of `python -m tf_recsync.simulate`."""

from __future__ import annotations

import argparse
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, Protocol, TypeVar

from tf_recsync.testing import ChangingSlowdown, RandomSlowdown, Slowdown, SlowWorkers

EXIT_WRONG_ARGUMENTS = 2

_T = TypeVar("_T")


class Result(Protocol):
    """What a simulation gives."""

    def as_dict(self) -> dict[str, Any]: ...

    def plot(self, path: str | os.PathLike[str]) -> None: ...


class Parser(argparse.ArgumentParser):
    """One whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        line = " ".join(message.split())
        self.exit(EXIT_WRONG_ARGUMENTS, f"tf_recsync simulate: {line}\n")


def read_as(name: str, example: str) -> Callable[[Callable[[str], _T]], Callable[[str], _T]]:
    """Has an argument that can't be read, or is out of range, be refused with an example."""

    def decorate(parse: Callable[[str], _T]) -> Callable[[str], _T]:
        def parsed(text: str) -> _T:
            try:
                return parse(text)
            except ValueError as error:
                raise argparse.ArgumentTypeError(
                    f"{name} must be like {example}, not {text!r}: {error}"
                ) from None

        return parsed

    return decorate


@read_as("slow_workers", "4:0,1,2")
def _slow_workers(text: str) -> Slowdown:
    multiple, _, workers = text.partition(":")
    return SlowWorkers(float(multiple), [int(worker) for worker in workers.split(",")])


@read_as("random_slowdown", "5:0.02")
def _random_slowdown(text: str) -> Slowdown:
    multiple, _, probability = text.partition(":")
    return RandomSlowdown(float(multiple), float(probability))


@read_as("changing_slowdown", "0:1,30:4,60:1")
def _changing_slowdown(text: str) -> Slowdown:
    pairs = [point.split(":") for point in text.split(",")]
    return ChangingSlowdown([(float(time), float(multiple)) for time, multiple in pairs])


def add_time(parser: argparse.ArgumentParser) -> Callable[..., Any]:
    """Adds what makes steps slower; gives the group's `add_argument`."""
    add = parser.add_argument_group("what takes time, as in recsync.testing").add_argument
    add("--noise", type=float, default=0.0, help="sigma of the lognormal noise; default 0")
    add(
        "--slow_workers",
        metavar="FACTOR:W,W",
        type=_slow_workers,
        help="those with these indices take so many times as long, as 4:0,1,2",
    )
    add(
        "--random_slowdown",
        metavar="FACTOR:P",
        type=_random_slowdown,
        help="any step takes so many times as long with this probability, as 5:0.02",
    )
    add(
        "--changing_slowdown",
        metavar="T:FACTOR,...",
        type=_changing_slowdown,
        help="the factor of all at these times in seconds, and lines between, as 0:1,30:4,60:1",
    )
    return add


def slowdown_of(arguments: argparse.Namespace) -> Slowdown | None:
    """The product of the slowdowns that were given."""
    slowdown: Slowdown | None = None
    for one in (
        arguments.slow_workers,
        arguments.random_slowdown,
        arguments.changing_slowdown,
    ):
        if one is not None:
            slowdown = one if slowdown is None else slowdown * one
    return slowdown


def add_outputs(parser: argparse.ArgumentParser) -> Callable[..., Any]:
    """Adds what becomes of the result; gives the group's `add_argument`."""
    add = parser.add_argument_group("what becomes of the result").add_argument
    add("--json", type=pathlib.Path, help="a file for the figures, with the arguments")
    add("--plot", type=pathlib.Path, help="a file for a picture, as a.png; needs matplotlib")
    return add


def given(arguments: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Those of the arguments that were given, by name."""
    values = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def refuse_others(
    arguments: argparse.Namespace, choice: str, taken: Mapping[str, tuple[str, ...]]
) -> None:
    """Raises a ValueError for an argument that the chosen one of several kinds does not take.

    Args:
        arguments: that were given.
        choice: the name of the argument that says which kind.
        taken: the names of what each kind takes.
    """
    chosen = getattr(arguments, choice)
    for name in sorted({name for names in taken.values() for name in names}):
        if name not in taken[chosen] and getattr(arguments, name) is not None:
            having = [kind for kind, names in taken.items() if name in names]
            raise ValueError(
                f"--{name} is of --{choice}={' or '.join(having)}, not of --{choice}={chosen}"
            )
