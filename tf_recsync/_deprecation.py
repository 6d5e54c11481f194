"""Calls as an earlier version took them: they go on for one version, with a warning."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

_PACKAGE = "tf_recsync."


def keywords_after(count: int) -> Callable[[Callable], Callable]:
    """For a constructor whose arguments after the first ones have to be given by name now.

    Args:
        count: how many may be given by position, `self` apart.
    """

    def decorate(init: Callable) -> Callable:
        names = list(inspect.signature(init).parameters)[1:]

        @functools.wraps(init)
        def wrapped(self, *arguments: Any, **named: Any) -> None:
            more = dict(zip(names[count:], arguments[count:], strict=False))
            if more and len(arguments) <= len(names) and not more.keys() & named.keys():
                warn(f"{type(self).__name__} takes {', '.join(more)} by name only")
                named, arguments = {**more, **named}, arguments[:count]
            init(self, *arguments, **named)

        return wrapped

    return decorate


def renamed(old: str, new: str) -> Callable[[Callable], Callable]:
    """For a constructor of which an argument has another name now."""

    def decorate(init: Callable) -> Callable:
        @functools.wraps(init)
        def wrapped(self, *arguments: Any, **named: Any) -> None:
            if old in named and new not in named:
                warn(f"{type(self).__name__} calls {old} {new}")
                named[new] = named.pop(old)
            init(self, *arguments, **named)

        return wrapped

    return decorate


def renamed_method(new: str) -> Callable[[Callable], Callable]:
    """For a method that has another name now."""

    def decorate(method: Callable) -> Callable:
        @functools.wraps(method)
        def wrapped(self, *arguments: Any, **named: Any) -> Any:
            warn(f"{type(self).__name__} calls {method.__name__} {new}")
            return method(self, *arguments, **named)

        return wrapped

    return decorate


def renamed_names(module: str, names: Mapping[str, tuple[str, Any]]) -> Callable[[str], Any]:
    """For the `__getattr__` of a module in which things have other names now.

    Args:
        module: the module's name.
        names: by their old names, the new ones and what has them.
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        new, value = names[name]
        warn(f"{module} calls {name} {new}")
        return value

    return get


def without_strategy(init: Callable) -> Callable:
    """For a callback's constructor: it learns the strategy from the model."""

    @functools.wraps(init)
    def wrapped(self, *arguments: Any, **named: Any) -> None:
        is_first = bool(arguments) and isinstance(arguments[0], tf.distribute.Strategy)
        if is_first or "strategy" in named:
            warn(f"{type(self).__name__} takes no strategy, as it learns it from the model")
            named.pop("strategy", None)
        init(self, *arguments[is_first:], **named)

    return wrapped


def warn(what: str) -> None:
    """Says that what a user wrote is called something else now."""
    message = f"{what}; what you wrote works for one version more."
    # Of whoever called the package, through however many of its functions and decorators.
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, FutureWarning, stacklevel=level)
