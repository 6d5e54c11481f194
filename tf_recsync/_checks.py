"""Checks of arguments that many have."""

from __future__ import annotations

import numpy as np


def check_at_least(name: str, value: int, least: int) -> None:
    """Raises a ValueError if an argument is not an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


def check_seconds(name: str, value: float) -> None:
    """Raises a ValueError if an argument is no positive number."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not value > 0:
        raise ValueError(f"{name} must be positive, in seconds, not {value!r}")
