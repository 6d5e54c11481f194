"""Checks of arguments that many have."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import numpy as np


def check_at_least(name: str, value: int, least: int) -> None:
    """Raises a ValueError if an argument is not an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


def plain_integers(config: Any) -> None:
    """Gives a frozen dataclass Python's integers in place of NumPy's, which JSON does not take."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, np.integer):
            object.__setattr__(config, field.name, int(value))


def check_seed(seed: int) -> None:
    """Raises a ValueError unless a seed is an integer of 64 bits, from 0 on."""
    check_at_least("seed", seed, 0)
    if seed >= 2**64:
        raise ValueError(f"seed must be below 2 ** 64, not {seed}")


def check_seconds(name: str, value: float) -> None:
    """Raises a ValueError if an argument is no positive number."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not value > 0:
        raise ValueError(f"{name} must be positive, in seconds, not {value!r}")


def checked_path(path: str | os.PathLike, argument: str = "path") -> str:
    """The path of a folder as a str; a ValueError that names the argument if it is none."""
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise ValueError(f"{argument} must be the path of a folder, not {path!r}")
    return os.fspath(path)
