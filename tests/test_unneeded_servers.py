"""A dead parameter server that has nothing of a model is no reason for what happens to it."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import AtBatch, UntilAllGoOn
from test_checkpoint_callback import dataset, make_model
from test_recovery import ROWS, paced, servers_of, slowly

import tf_recsync as recsync
from tf_recsync import checkpoint
from tf_recsync.callbacks import Checkpoint
from tf_recsync.checkpoint import saving

pytestmark = pytest.mark.usefixtures("end_calls_of_servers_that_were_cut_off")


@pytest.fixture
def cluster(clusters):
    return clusters.get(workers=4, ps=4)


def unneeded_by(model, cluster):
    """The last server that has no variable of a model."""
    return max(set(range(cluster.ps)) - set(servers_of(model)))


def then_a_wrong_id(steps):
    """Batches of which the last one names a row that the table does not have."""
    return dataset(steps, ROWS).concatenate(
        dataset(1).map(lambda x, y: ({"ids": x["ids"] + ROWS}, y))
    )


@pytest.mark.parametrize("with_checkpoint", [True, False])
def test_a_users_error_is_told_at_once_and_as_it_is(cluster, tmp_path, with_checkpoint):
    model = make_model(slowly(recsync.AsyncStrategy(cluster)), ROWS, shards=2)
    dead = unneeded_by(model, cluster)
    # To wait for the server would take as long as the test may at most.
    callbacks = [Checkpoint(tmp_path, ps_timeout=600.0)] if with_checkpoint else []
    # After the first checkpoint, and before a step.
    kill = keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: cluster.kill("ps", dead))
    callbacks.append(kill)
    with pytest.raises(tf.errors.InvalidArgumentError, match="6"):
        model.fit(then_a_wrong_id(60), verbose=0, callbacks=callbacks)
    assert not cluster.is_alive("ps", dead)

    # And if the step can't be traced.
    class Wrong(keras.losses.Loss):
        def call(self, y_true, y_pred):
            raise tf.errors.NotFoundError(None, None, "no such loss")

    model.compile(model.optimizer, Wrong())
    with pytest.raises(tf.errors.NotFoundError, match="no such loss"):
        model.fit(dataset(4, ROWS), verbose=0, callbacks=callbacks)


def test_a_worker_that_dies_meanwhile_takes_part_again(cluster):
    strategy = slowly(recsync.AsyncStrategy(cluster))
    model = make_model(strategy, ROWS, shards=2)
    dead = unneeded_by(model, cluster)
    then = []

    def kill_both():
        cluster.kill("ps", dead)
        cluster.kill("worker", 1)
        cluster.restart("worker", 1)
        then.extend(strategy.worker_steps(model))

    logs = model.fit(
        dataset(100, ROWS).repeat(),
        steps_per_epoch=100_000,
        verbose=0,
        callbacks=[AtBatch(10, kill_both), UntilAllGoOn(then)],
    )
    assert np.isfinite(logs.history["loss"]).all()
    assert strategy.losses(model).workers == 1
    assert not cluster.is_alive("ps", dead)
    # And it needs the server neither to predict nor to evaluate.
    assert np.isfinite(model.evaluate(dataset(8, ROWS), verbose=0))
    assert model.predict(dataset(8, ROWS), verbose=0).shape == (16, 1)


def test_training_goes_on_without_it_when_one_that_is_needed_is_back(cluster, tmp_path):
    model = make_model(slowly(recsync.AsyncStrategy(cluster)), ROWS, shards=2)
    dead, needed = unneeded_by(model, cluster), servers_of(model)[-1]
    callback = Checkpoint(tmp_path, every_steps=10, ps_timeout=250.0)

    def kill_both():
        cluster.kill("ps", dead)
        cluster.kill("ps", needed)
        threading.Timer(0.3, cluster.restart, ["ps", needed]).start()

    data = paced(dataset(300, ROWS), 300, callback, 1)
    logs = model.fit(data, verbose=0, callbacks=[callback, AtBatch(12, kill_both)])
    assert callback.recoveries == 1
    assert np.isfinite(logs.history["loss"]).all()
    assert not cluster.is_alive("ps", dead)


def test_checkpoints_are_saved_and_what_they_fail_of_is_told_as_it_is(cluster, tmp_path):
    model = make_model(recsync.AsyncStrategy(cluster), ROWS, shards=2)
    model.fit(dataset(4, ROWS), verbose=0)
    cluster.kill("ps", unneeded_by(model, cluster))
    checkpoint.save(tmp_path / "whole", model)
    with pytest.raises(tf.errors.ResourceExhaustedError, match="full"), saving.calls_of(model):
        raise tf.errors.ResourceExhaustedError(None, None, "the disk is full")
    # One that it needs is.
    needed = servers_of(model)[0]
    cluster.kill("ps", needed)
    with pytest.raises(RuntimeError, match=f"ps:{needed} was lost"):
        checkpoint.save(tmp_path / "not", model)
