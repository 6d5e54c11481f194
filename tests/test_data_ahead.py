"""Workers fetch their next batches while they compute (appendix B of the GBA paper)."""

import time

import keras
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


def seconds_of(strategy, making: float, computing: float) -> float:
    """How long the steps after the first two of an epoch take."""
    model = compiled(strategy, slope_model, lambda: SGD(1.0), mean_output)
    times = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: times.append((time.perf_counter(), batch))
    )
    with compute_time(strategy, computing):
        model.fit(slow_batches(STEPS, making), callbacks=[note], verbose=0)
    assert steps_of(model) == STEPS
    (begin, first), *_, (end, last) = times
    return (end - begin) * STEPS / (last - first)


def test_the_next_batch_is_made_while_a_worker_computes(strategy):
    # Both times are waits that use no processor. One after the other they take at least their
    # sum; side by side, the longer of them, and what a busy machine adds to each.
    making = seconds_of(strategy, SECONDS, 0.0)
    computing = seconds_of(strategy, 0.0, SECONDS)
    assert making >= 0.9 * STEPS * SECONDS and computing >= 0.9 * STEPS * SECONDS
    assert seconds_of(strategy, SECONDS, SECONDS) < 0.8 * (making + computing)
