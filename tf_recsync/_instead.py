"""Gives an object another attribute for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def instead(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, an object has another attribute, which its class does not hear of.

    It stands in the object's own dictionary, as Keras would track what is set as an attribute of a
    layer.

    Args:
        owner: the object.
        name: the attribute's.
        value: what it is meanwhile.
    """
    attributes = owner.__dict__
    missing = object()
    before = attributes.get(name, missing)
    attributes[name] = value
    try:
        yield
    finally:
        if before is missing:
            del attributes[name]
        else:
            attributes[name] = before
