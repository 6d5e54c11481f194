"""Fixtures of more than one test module."""

import faulthandler
import gc
import random
import sys

import hypothesis
import numpy as np
import pytest

# Not TensorFlow: with several processes, the one that hands out the tests runs none.


# An example takes as long as the machine lets it, and so does drawing one.
hypothesis.settings.register_profile(
    "at any speed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("at any speed")


def pytest_sessionstart(session):
    """Graphs are made of many objects that stay: looking for those that do not takes a twentieth of
    the time, and each module ends with a collection."""
    gc.set_threshold(50_000, 20, 20)


# The files that go first. What takes long does, as none of several processes shall have to wait
# long for another at the end; and a process that takes one file after the other finds the cluster
# that it needs more often, if those that share one stand together.
_FIRST = (
    *("test_examples", "test_hop_examples", "test_readers", "test_data_wait", "test_cluster"),
    *("test_hierarchical_strategy", "test_hop_between_groups", "test_scripted_groups"),
    *("test_placement_of_operators",),
    *("test_shadow_strategy", "test_preprocessing_layers", "test_saving_within_epoch"),
    *("test_copies", "test_shadow_failures"),
    *("test_modes", "test_mode_failures"),
    *("test_mode_inputs", "test_lost_between_epochs", "test_hop_failures"),
    *("test_hop_strategy", "test_hop_slow_workers", "test_hop_tables", "test_hop_retries"),
    *("test_hop_reports", "test_hop_invariants", "test_hop_bandwidth", "test_hop_arguments"),
    *("test_async_strategy", "test_async_failures", "test_silent_servers", "test_forgetting"),
    *("test_async_saving", "test_switching", "test_transport", "test_slowdown", "test_bandwidth"),
    *("test_interactions_on_servers", "test_embedding_collection"),
    *("test_collection_saving", "test_initial_values", "test_sequences", "test_serving"),
    *("test_prefetch", "test_messages", "test_profile", "test_worker_datasets"),
    *("test_broken_connections", "test_gradient_buffer", "test_token_list"),
    *("test_failure_schedule", "test_shadow_schedule"),
)


def pytest_collection_modifyitems(items):
    """Sorts the files, and leaves the order within them as it is."""
    order = {name: number for number, name in enumerate(_FIRST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Ends the process, whose other tests another one takes over, if a test does not end.

    What pytest-timeout raises, a thread that waits inside of TensorFlow never gets to see.
    """
    marker = item.get_closest_marker("timeout")
    seconds = marker.args[0] if marker and marker.args else float(item.config.getini("timeout"))
    faulthandler.dump_traceback_later(seconds + 60.0, exit=True, file=sys.__stderr__)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


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


@pytest.fixture(scope="module")
def end_calls_of_servers_that_were_cut_off(clusters):
    """For modules that pause servers or cut them off: the cluster ends with the module.

    Calls to such a server may never end, and forgetting a module's functions waits for all.
    """
    yield
    clusters.close()


@pytest.fixture(scope="module", autouse=True)
def leave_nothing_behind():
    """Has TensorFlow forget a module's functions: a connection takes all along, to each server."""
    yield
    import keras

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
