"""Clusters that tests share, and that examples in docstrings must not meet."""

import gc

import pytest


@pytest.fixture(scope="session")
def clusters():
    """Local clusters, one at a time, as a process has but one connection; modules share them."""
    from helpers import Clusters

    # What was imported lives as long as the process: collections need not look at it.
    gc.collect()
    gc.freeze()
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
