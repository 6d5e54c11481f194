"""No call to a worker is left behind that waits for a batch that never comes."""

import threading

import numpy as np
import pytest
import tensorflow as tf
from test_retried_batches import BATCHES, make_model

import tf_recsync as recsync
from tf_recsync.callbacks import Checkpoint
from tf_recsync.strategies import worker_run


@pytest.fixture
def cluster(clusters):
    return clusters.get(workers=2, ps=2)


@pytest.mark.parametrize("saves", [False, True], ids=["", "with checkpoints"])
def test_a_fit_that_fails_leaves_no_worker_waiting_for_data(cluster, tmp_path, monkeypatch, saves):
    monkeypatch.setattr(worker_run, "_LEAVE_SECONDS", 0.5)  # That it is waited for.
    strategy = recsync.AsyncStrategy(cluster)
    callbacks = [Checkpoint(tmp_path, every_seconds=1e9)] if saves else []
    model = make_model(strategy)
    goes_on = threading.Event()

    def batches():
        for number in range(100):
            # The eleventh is of a row that there is not; then nothing comes for long.
            yield np.full((1, 1), BATCHES if number == 10 else 0), np.zeros((1, 1))
            if number == 10:
                goes_on.wait(300)

    spec = tf.TensorSpec([1, 1], tf.int64), tf.TensorSpec([1, 1], tf.float64)
    data = tf.data.Dataset.from_generator(batches, output_signature=spec)
    try:
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"{BATCHES}"):
            model.fit(data, verbose=0, callbacks=callbacks)
        for thread in threading.enumerate():
            if thread.name.startswith("recsync_worker_"):
                thread.join(120)
                assert not thread.is_alive()
        assert not goes_on.is_set()
        tf.random.set_seed(7)  # Waits for all calls in flight.
    finally:
        goes_on.set()
    # Workers go on with other data.
    history = model.fit(tf.data.Dataset.from_tensors((np.zeros((1, 1), int), [0.0])), verbose=0)
    assert history.epoch == [0]
