"""Training begins with the workers that are up, and takes in each of the others when it is."""

import contextlib
import json
import logging
import re

import keras
import pytest
import tensorflow as tf
from helpers import AtBatch, compiled, mean_output, slope_model, wait_until
from started_servers import Server

import tf_recsync as recsync
from tf_recsync.cluster import local_cluster

WORKERS = 4
SECONDS = 100.0  # That anything may take on a busy machine.

STRATEGIES = {
    "async": recsync.AsyncStrategy,
    "sync": recsync.SyncStrategy,
    "Hop": lambda cluster: recsync.HopStrategy(
        cluster,
        recsync.topology.complete(WORKERS),
        max_iteration_gap=100_000,
        backup_workers=3,
        staleness_bound=4,
    ),
    "ShadowSync": lambda cluster: recsync.ShadowSyncStrategy(cluster, recsync.EASGD(0.3)),
}


@pytest.fixture
def cluster():
    with recsync.LocalCluster(
        workers=WORKERS, ps=1, processes=WORKERS + 1, start_timeout=200.0
    ) as cluster:
        yield cluster


def connect_without_the_others(cluster):
    """Connects to the one worker that is up, and checks that two are missed.

    Which is up as soon as it answers, and on a busy machine it may not do so within a moment.
    """
    seconds = 0.2
    while True:
        missing = rf"not up within timeout={seconds:g} s: .*worker:1 \("
        with pytest.raises(RuntimeError, match=missing):
            cluster.connect(seconds, min_workers=2)
        with contextlib.suppress(RuntimeError):
            cluster.connect(seconds, min_workers=1)
            return seconds
        seconds *= 2
        assert seconds < SECONDS


def ones():
    return tf.data.Dataset.from_tensors((tf.ones([2, 1]), tf.ones([2, 1]))).repeat()


@pytest.mark.cases("async", "ShadowSync")
@pytest.mark.parametrize("name", STRATEGIES)
def test_workers_join_one_by_one(cluster, name, caplog):
    caplog.set_level(logging.WARNING, "absl")
    for index in (1, 2, 3):
        cluster.kill("worker", index)
    seconds = connect_without_the_others(cluster)
    names = r"worker:1 \(\S+\), worker:2 \(\S+\), worker:3 \("
    without = rf"Connecting without servers not up within {seconds:g} s: {names}"
    assert re.search(without, caplog.text)
    strategy = STRATEGIES[name](cluster)
    optimizers = keras.optimizers if name == "Hop" else recsync.optimizers
    model = compiled(strategy, slope_model, lambda: optimizers.SGD(0.001), mean_output)
    recsync.testing.set_compute_time(strategy, 0.02)

    def join(index):
        def act():
            assert not cluster.is_alive("worker", 3)  # The others do without it.
            cluster.restart("worker", index)
            back = f"worker:{index} is back and takes part again"
            assert wait_until(lambda: back in caplog.text, SECONDS)

        return act

    def stop():
        steps = model.train_function.worker_steps
        assert wait_until(lambda: all(steps()[:3]), SECONDS), steps()
        assert steps()[3] == 0
        model.stop_training = True

    then = [AtBatch(5, join(2)), AtBatch(8, join(1)), AtBatch(9, stop)]
    model.fit(ones(), steps_per_epoch=100_000, callbacks=then, verbose=0)
    assert strategy.losses(model).workers == 3
    assert "worker:3 is not up yet; the others begin without it" in caplog.text


def test_those_of_tf_config_join_when_they_are_started(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.WARNING, "absl")
    with contextlib.ExitStack() as stack:
        worker0, worker1, ps0 = (
            f"127.0.0.1:{stack.enter_context(local_cluster._reserve_port()).getsockname()[1]}"
            for _ in range(3)
        )
        # A process has one address for good, that of its local clusters.
        servers = {"chief": [local_cluster._reserve_chief_address()]}
        servers |= {"worker": [worker0, worker1], "ps": [ps0]}

        def start(job, index):
            return stack.enter_context(Server(tmp_path, servers, job, index))

        for server in (start("worker", 0), start("ps", 0)):
            assert server.says("listening on")
        task = {"type": "chief", "index": 0}
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": servers, "task": task}))
        with recsync.cluster_from_tf_config() as cluster:
            connect_without_the_others(cluster)
            strategy = recsync.AsyncStrategy(cluster)
            model = compiled(
                strategy, slope_model, lambda: recsync.optimizers.SGD(1.0), mean_output
            )
            recsync.testing.set_compute_time(strategy, 0.02)

            def join():
                assert strategy.worker_steps(model)[1] == 0
                start("worker", 1)
                assert wait_until(lambda: strategy.worker_steps(model)[1], SECONDS), caplog.text
                model.stop_training = True

            model.fit(ones(), steps_per_epoch=100_000, callbacks=[AtBatch(3, join)], verbose=0)
            assert "worker:1 is back and takes part again" in caplog.text
            # Each step of either worker takes 1 off the slope.
            assert model.get_weights()[0] == -sum(strategy.worker_steps(model))


def test_min_workers_is_a_number_of_workers_of_the_cluster(cluster):
    for wrong in (0, WORKERS + 1, True, 1.5):
        message = f"min_workers must be .* from 1 to 4, got {wrong}"
        with pytest.raises(ValueError, match=message):
            cluster.connect(min_workers=wrong)
    cluster.connect()
    with pytest.raises(ValueError, match=r"without must name servers .* got \('worker', 4\)"):
        cluster.readmit(without=[4])
