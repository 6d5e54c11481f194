"""Fixtures of more than one test module."""

import gc
import random

import keras
import numpy as np
import pytest
from helpers import Clusters


def pytest_sessionstart(session):
    """What was imported lives as long as the process: collections need not look at it."""
    gc.collect()
    gc.freeze()


# The files that take longest, which go first: at the end of a run with several processes,
# none shall have to wait long for another.
_LONG = (
    "test_async_strategy",
    "test_examples",
    "test_switching",
    "test_hop_strategy",
    "test_hop_examples",
    "test_interactions_on_servers",
    "test_collection_saving",
    "test_mode_failures",
    "test_modes",
)


def pytest_collection_modifyitems(items):
    """Sorts the files, and leaves the order within them as it is."""
    order = {name: number for number, name in enumerate(_LONG)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


@pytest.fixture(scope="session")
def clusters():
    """Local clusters, one at a time, as a process has but one connection; modules share them."""
    clusters = Clusters()
    yield clusters
    clusters.close()


@pytest.fixture(scope="module", autouse=True)
def disconnect_for_others(request):
    """Ends the shared cluster before a module that does not use it.

    The module may connect to one of its own, or make functions that need not be known to servers.
    """
    items = (item for item in request.session.items if item.path == request.path)
    # Not an argument of this fixture: every test would have it among its fixtures then.
    if not any("clusters" in item.fixturenames for item in items):
        request.getfixturevalue("clusters").close()


@pytest.fixture(scope="module", autouse=True)
def leave_nothing_behind():
    """Has TensorFlow forget a module's functions: a connection takes all along, to each server."""
    yield
    keras.utils.clear_session()
    gc.collect()


@pytest.fixture(autouse=True)
def start_alike():
    """Each test begins with the same weights: with some, models learn slowly.

    Keras draws the seeds of initializers from `random`. Not `keras.utils.set_random_seed`: it has
    TensorFlow wait for calls of other threads, with Python's lock held, and a test that ended with
    an error may have left some.
    """
    random.seed(1)
    np.random.seed(1)
