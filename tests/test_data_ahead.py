"""Workers fetch their next batches while they compute (appendix B of the GBA paper)."""

import time

import pytest
from helpers import (
    compiled,
    compute_time,
    mean_output,
    slope_model,
    slow_batches,
    steps_of,
)

import tf_recsync as recsync
from tf_recsync.optimizers import SGD

STEPS = 16
SECONDS = 0.1  # That making a batch takes, and that computing on it takes.


@pytest.fixture(scope="module")
def strategy():
    with recsync.LocalCluster(workers=1, ps=1, processes=0) as cluster:
        yield recsync.AsyncStrategy(cluster)


def seconds_of(strategy, making: float, computing: float, goal: float = float("inf")) -> float:
    """How long an epoch takes; less than `goal`, or the quickest of many: a machine may be busy."""
    model = compiled(strategy, slope_model, lambda: SGD(1.0), mean_output)
    model.fit(slow_batches(1, 0.0), verbose=0)  # So that no tracing is part of what follows.
    took = []
    with compute_time(strategy, computing):
        for number in range(1, 21):
            began = time.monotonic()
            model.fit(slow_batches(STEPS, making), verbose=0)
            took.append(time.monotonic() - began)
            assert steps_of(model) == 1 + number * STEPS
            if took[-1] < goal:
                break
    return min(took)


@pytest.mark.full
def test_the_next_batch_is_made_while_a_worker_computes(strategy):
    # Both times are waits that use no processor.
    least = STEPS * SECONDS
    assert seconds_of(strategy, SECONDS, 0.0) >= least
    assert seconds_of(strategy, 0.0, SECONDS) >= least
    # One after the other they take at least their sum; side by side, the longer of them, and what
    # a busy machine adds.
    assert seconds_of(strategy, SECONDS, SECONDS, 1.6 * least) < 1.6 * least
