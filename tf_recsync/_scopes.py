"""Contexts for threads beside that of `fit`."""

from __future__ import annotations

import contextlib

import keras


def dispatch_scope_of(model: keras.Model) -> contextlib.AbstractContextManager:
    """In which a thread's calls hinder no other one's."""
    cluster = getattr(model.distribute_strategy, "cluster", None)
    return contextlib.nullcontext() if cluster is None else cluster.dispatch_scope()
