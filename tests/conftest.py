"""Fixtures of more than one test module."""

import gc

import keras
import pytest
from helpers import Clusters


def pytest_sessionstart(session):
    """What was imported lives as long as the process: collections need not look at it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def clusters():
    """Local clusters, one at a time, ended with the module: a process has but one connection."""
    clusters = Clusters()
    yield clusters
    clusters.close()


@pytest.fixture(scope="module", autouse=True)
def leave_nothing_behind():
    """Has TensorFlow forget a module's functions: a connection takes all along, to each server."""
    yield
    keras.utils.clear_session()
    gc.collect()
