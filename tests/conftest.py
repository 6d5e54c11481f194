"""Fixtures of more than one test module."""

import faulthandler
import gc
import os
import random
import sys
from collections.abc import Callable
from typing import IO

import hypothesis
import numpy as np
import pytest

# Not TensorFlow: with several processes, the one that hands out the tests runs none.


# An example takes as long as the machine lets it, and so does drawing one.
hypothesis.settings.register_profile(
    "at any speed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("at any speed")


_WATCH = pytest.StashKey[Callable[[], None]]()  # Begins anew to watch the test that runs.
_STDERR = pytest.StashKey[IO[str]]()  # What the process had before tests' output was captured.


def pytest_configure(config):
    """Opens where the traceback of a test that does not end is written to, and seen."""
    config.stash[_STDERR] = os.fdopen(os.dup(sys.__stderr__.fileno()), "w")
    if not hasattr(config, "workerinput"):  # Of several processes, the one that reports.
        config.pluginmanager.register(_Failures(config.stash[_STDERR]))


class _Failures:
    """Names what fails as it does: a run that is cut off has no summary at its end."""

    def __init__(self, stderr):
        self._stderr = stderr

    def pytest_runtest_logreport(self, report):
        if report.failed:
            reason = getattr(report.longrepr, "reprcrash", None) or report.longrepr
            reason = str(getattr(reason, "message", reason)).strip().partition("\n")[0]
            print(f"\n{report.nodeid} ({report.when}): {reason}", file=self._stderr, flush=True)


def pytest_sessionstart(session):
    """Graphs are made of many objects that stay: looking for those that do not takes a twentieth of
    the time, and each module ends with a collection."""
    gc.set_threshold(50_000, 20, 20)


# The files that go first. What takes long does, as none of several processes shall have to wait
# long for another at the end; and a process that takes one file after the other finds the cluster
# that it needs more often, if those that share one stand together.
_FIRST = (
    *(
        "test_tutorials",
        "test_examples",
        "test_hop_examples",
        "test_readers",
        "test_data_wait",
        "test_cluster",
    ),
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


@pytest.hookimpl(tryfirst=True)  # Before tests are left out by their marks.
def pytest_collection_modifyitems(config, items):
    """Sorts the files, leaves the order within them as it is, and marks the cases left out."""
    order = {name: number for number, name in enumerate(_FIRST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))
    missing = _mark_other_cases(items)
    if missing and not any("::" in argument for argument in config.args):
        raise pytest.UsageError("`pytest.mark.cases` names what is no case: " + "; ".join(missing))


def _mark_other_cases(items: list[pytest.Item]) -> list[str]:
    """Marks as "full" the cases that a test's mark "cases" does not name; gives names of none."""
    unseen: dict[str, set[str]] = {}  # By the test.
    for item in items:
        marker = item.get_closest_marker("cases")
        if marker is None:
            continue
        names = unseen.setdefault(item.nodeid.partition("[")[0], set(marker.args))
        names.discard(item.callspec.id)
        if item.callspec.id not in marker.args:
            item.add_marker("full")
    return [f"{test}: {sorted(names)}" for test, names in unseen.items() if names]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Ends the process, whose other tests another one takes over, if a test does not end.

    What pytest-timeout raises, a thread that waits inside of TensorFlow never gets to see.
    """
    marker = item.get_closest_marker("timeout")
    seconds = marker.args[0] if marker and marker.args else float(item.config.getini("timeout"))
    item.config.stash[_WATCH] = lambda: faulthandler.dump_traceback_later(
        seconds + 60.0, exit=True, file=item.config.stash[_STDERR]
    )
    item.config.stash[_WATCH]()
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_exception_interact(node):
    """Goes on watching a test that has failed: pytest stops to, and its fixtures may not end."""
    if _WATCH in node.config.stash:
        node.config.stash[_WATCH]()


@pytest.fixture(scope="module")
def end_calls_of_servers_that_were_cut_off(clusters):
    """For modules that pause servers or cut them off: the cluster ends with the module.

    Calls to such a server may never end, and forgetting a module's functions waits for all.
    """
    yield
    clusters.close()


@pytest.fixture(scope="module", autouse=True)
def leave_nothing_behind(request):
    """Has TensorFlow forget a module's functions: a connection takes all along, to each server.

    Not after a test that failed: TensorFlow would wait, with Python's lock held, for calls that
    the test has left, and they may never end.
    """
    failed, clusters = request.session.testsfailed, request.getfixturevalue("clusters")
    yield
    if request.session.testsfailed > failed:
        clusters.close()
        return
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
