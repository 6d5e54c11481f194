"""From which states the steps of workers draw random numbers."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR

from tf_recsync.cluster import CHIEF
from tf_recsync.shown_variable import ShownVariable, arguments_of


def is_seed(variable: keras.Variable) -> bool:
    """Whether a variable is the state of a random generator, which must differ by worker."""
    return variable.path.endswith("seed_generator_state")


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


@contextlib.contextmanager
def drawing_from(generator: keras.random.SeedGenerator | None) -> Iterator[None]:
    """Inside, what draws without a seed draws from this one; from Keras's own if it is None."""
    if generator is None:
        yield
        return
    before = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, generator)
    try:
        yield
    finally:
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, before)
