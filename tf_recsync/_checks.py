"""Checks of arguments that many have.

Numbers are taken of whatever kind, NumPy's scalars among them, and given back as Python's, which
JSON takes. True and False are no numbers.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np

Item = TypeVar("Item")


def check_bool(name: str, value: bool) -> None:
    """Raises a ValueError if an argument is neither True nor False, of whatever kind."""
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name} must be a bool, not {value!r}")


def integer(name: str, value: int, least: int | None = None, most: int | None = None) -> int:
    """An argument as an int; a ValueError if it is no integer, or out of range."""
    if not _is_number(value, numbers.Integral) or not _is_within(value, least=least, most=most):
        allowed = _in_words("an integer", least=least, most=most)
        raise ValueError(f"{name} must be {allowed}, got {value!r}")
    return int(value)


def number(
    name: str,
    value: float,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
    infinite: bool = False,
    allowed: str | None = None,
) -> float:
    """An argument as an int or a float; a ValueError if it is no number, or out of range.

    Args:
        name: of the argument.
        value: of the argument.
        above: the number is greater than this.
        least: the number is this or greater.
        below: the number is less than this.
        most: the number is this or less.
        infinite: whether infinity is a number. NaN is none.
        allowed: what the error says is allowed, where the numbers alone do not say it.
    """
    bounds = {"above": above, "least": least, "below": below, "most": most}
    is_number = _is_number(value, numbers.Real)
    if is_number and not infinite and abs(value) == math.inf and allowed is not None:
        raise ValueError(f"{name} must be finite, and {allowed}, not {value!r}")
    if not (is_number and (infinite or abs(value) < math.inf) and _is_within(value, **bounds)):
        finite = "a number" if infinite else "a finite number"
        raise ValueError(f"{name} must be {allowed or _in_words(finite, **bounds)}, not {value!r}")
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def check_at_least(name: str, value: int, least: int) -> None:
    """Raises a ValueError if an argument is not an integer of at least `least`."""
    integer(name, value, least)


def check_seed(seed: int) -> None:
    """Raises a ValueError unless a seed is an integer of 64 bits, from 0 on."""
    integer("seed", seed, 0)
    if seed >= 2**64:
        raise ValueError(f"seed must be below 2 ** 64, not {seed}")


def check_seconds(name: str, value: float) -> float:
    """Raises a ValueError if an argument is no positive number.

    Returns:
        The seconds, for waits: these take no more than 30 years, and infinity is as many.
    """
    return float(
        min(number(name, value, above=0, infinite=True, allowed="positive, in seconds"), 1e9)
    )


def plain_values(config: Any) -> None:
    """Gives a frozen dataclass Python's values in place of NumPy's, which JSON does not take."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, np.generic):
            object.__setattr__(config, field.name, value.item())


def list_of(name: str, values: Iterable[Item], kind: type[Item]) -> tuple[Item, ...]:
    """What an argument has, each of a kind; a ValueError that names what is of another.

    A text would be its letters, and one object in place of several is more often a mistake.
    """
    if isinstance(values, (str, bytes, kind)):
        hint = f", as ({values!r},)" if isinstance(values, kind) else ""
        raise ValueError(
            f"{name}={values!r}: must be a sequence of {_plural(kind)}, not a single one{hint}."
        )
    if not isinstance(values, Iterable):
        raise ValueError(f"{name}={values!r}: must be a sequence of {_plural(kind)}.")
    found = tuple(values)
    for value in found:
        if not isinstance(value, kind):
            raise ValueError(f"{name}={found!r}: must have {_plural(kind)}, not {value!r}.")
    # NumPy has texts of its own.
    return tuple(map(str, found)) if kind is str else found


def check_text(name: str, value: str) -> None:
    """Raises a ValueError if an argument is no text, or an empty one."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name}={value!r}: must be a string that is not empty.")


def checked_path(path: str | os.PathLike, argument: str = "path", of: str = "folder") -> str:
    """The path of a folder, or of something else, as a str; a ValueError if it is none."""
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise ValueError(f"{argument} must be the path of a {of}, not {path!r}")
    return os.fspath(path)


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_within(value, *, above=None, least=None, below=None, most=None) -> bool:
    # NaN is not: each comparison with it is False.
    return (
        value == value
        and (above is None or value > above)
        and (least is None or value >= least)
        and (below is None or value < below)
        and (most is None or value <= most)
    )


def _in_words(what: str, *, above=None, least=None, below=None, most=None) -> str:
    """What a number has to be: "an integer from 1 to 9", "a finite number above 0"."""
    if least is not None and most is not None:
        return f"{what} from {least} to {most}"
    words = {"above": above, "of at least": least, "below": below, "of at most": most}
    bounds = [f"{word} {bound}" for word, bound in words.items() if bound is not None]
    return " ".join([what, " and ".join(bounds)]) if bounds else what


def _plural(kind: type) -> str:
    names = {str: "texts", numbers.Real: "numbers", numbers.Integral: "integers"}
    return names.get(kind, f"{kind.__name__}s")
