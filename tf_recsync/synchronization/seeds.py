"""From which states the steps of workers draw random numbers."""

from __future__ import annotations

import collections
import contextlib
import random
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR

from tf_recsync._instead import instead
from tf_recsync.cluster import CHIEF
from tf_recsync.shown_variable import ShownVariable, arguments_of

_MOST_DRAWN = 2**24  # A layer draws once a step, as a rule: so much seeds of two passes differ.


def is_seed(variable: keras.Variable) -> bool:
    """Whether a variable is the state of a random generator, which must differ by worker."""
    return variable.path.endswith("seed_generator_state")


def drawn_state() -> np.ndarray:
    """The state with which a layer's generator begins that was given no seed, as Keras draws it."""
    return np.array([random.randint(1, 10**9), 0], np.int64)


class WorkerSeeds:
    """What workers begin with of what they keep for themselves: seeds that were not used yet.

    Neither by another worker, nor by the same one in another pass, or before it was lost. In a
    program that begins with the same weights and loses no workers they are the same again.
    """

    def __init__(self) -> None:
        self._opened: collections.Counter[int] = collections.Counter()

    def values(
        self,
        variables: Sequence[keras.Variable],
        initial: Sequence[np.ndarray],
        worker: int,
        steps: int = 0,
    ) -> list[np.ndarray]:
        """The values that a worker is opened with.

        Args:
            variables: what it keeps.
            initial: their values, in this process.
            worker: its number.
            steps: that the model has trained, also in an earlier process.
        """
        values = [np.array(value) for value in initial]
        opened = self._opened[worker]
        self._opened[worker] += 1
        for variable, value in zip(variables, values, strict=True):
            if is_seed(variable):
                value[0] += 7919 * (worker + 1)
                value[1] += (steps + opened) * _MOST_DRAWN
        return values


def generator_of_steps() -> keras.random.SeedGenerator:
    """A generator for what draws without a seed: Keras's own belongs to no model, but a thread.

    It is made in this process, whatever scope Keras is in, and as `keras.utils.set_random_seed`
    has it. What is drawn later is the same as without it.
    """
    aside = random.Random()
    aside.setstate(random.getstate())

    def here(_, **kwargs):
        with tf.device(CHIEF):
            return ShownVariable(**arguments_of(kwargs))

    with tf.init_scope(), tf.variable_creator_scope(here):
        return keras.random.SeedGenerator(aside.randint(1, 10**9))


def drawing_from(
    generator: keras.random.SeedGenerator | None,
) -> contextlib.AbstractContextManager[None]:
    """Inside, what draws without a seed draws from this one; from Keras's own if it is None."""
    if generator is None:
        return contextlib.nullcontext()
    return instead(global_state.GLOBAL_STATE_TRACKER, GLOBAL_SEED_GENERATOR, generator)
