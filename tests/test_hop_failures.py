"""Workers of decentralized training that are killed, come back, or stand still."""

import dataclasses
import os
import re
import signal
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_recsync as recsync
from tf_recsync import topology
from tf_recsync.ops.hop import FOREVER
from tf_recsync.synchronization.hop import HopGroup

WORKERS, BATCH, WIDTH = 8, 4, 3


@pytest.fixture
def cluster():
    with recsync.LocalCluster(workers=WORKERS, inter_op_threads=24) as cluster:
        cluster.connect()
        yield cluster


def make_model(strategy):
    recsync.testing.set_compute_time(strategy, 0.02)
    with strategy.scope():
        model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(1, "sigmoid")])
        model.compile(
            keras.optimizers.SGD(0.1, momentum=0.9), "binary_crossentropy", steps_per_execution=2
        )
    return model


def dataset(examples=4000):
    random = np.random.default_rng(1)
    x = random.normal(size=(examples, WIDTH)).astype(np.float32)
    y = (x.sum(1, keepdims=True) > 0).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)


def wait_for(condition, seconds=60.0):
    """Returns when the condition holds, or when it has taken too long."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)


class Once(keras.callbacks.Callback):
    """Does something once, when a number of batches is done."""

    def __init__(self, batch, action):
        super().__init__()
        self._batch = batch
        self._action = action

    def on_train_batch_end(self, batch, logs=None):
        if batch >= self._batch and self._action is not None:
            action, self._action = self._action, None
            action()


class Watch(keras.callbacks.Callback):
    """Notes the reports of all workers now and then."""

    def __init__(self, strategy):
        super().__init__()
        self._strategy = strategy
        self._calls = 0
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self._calls += 1
        if self._calls % 8 == 0:
            self.seen.append(self._strategy.workers(self.model))

    def assert_nothing_went_back(self):
        for before, after in zip(self.seen[:-1], self.seen[1:], strict=True):
            for worker, (then, now) in enumerate(zip(before, after, strict=True)):
                for name, value in dataclasses.asdict(then).items():
                    assert getattr(now, name) >= value, (worker, name)


def test_with_backup_workers_the_others_go_on_when_a_worker_is_killed(cluster, caplog):
    strategy = recsync.HopStrategy(
        cluster, topology.ring_based(WORKERS), 4, backup_workers=1, check_invariants=True
    )
    model = make_model(strategy)
    seen = {}

    def kill():
        seen["killed at"] = strategy.workers(model)[5].iteration
        cluster.kill("worker", 5)

    history = model.fit(dataset(2400), verbose=0, callbacks=[Once(60, kill)]).history
    assert np.isfinite(history["loss"][0])
    # The others went on, further than its neighbors could have with it.
    reports = strategy.workers(model)
    others = [report.iteration for worker, report in enumerate(reports) if worker != 5]
    assert min(others) > seen["killed at"] + 10
    assert "Worker 5 was lost; workers 1, 4 and 6 go on without it" in caplog.text
    assert len(strategy.copies(model)) == WORKERS - 1


@pytest.mark.parametrize(
    ("gap", "staleness_bound", "tellings_too_late"),
    [(4, None, 0), (4, 3, 0), (60, None, 2)],
    ids=["without bound", "with bound", "while neighbors go on"],
)
def test_a_worker_that_is_back_in_mid_epoch_takes_part_again(
    cluster, caplog, monkeypatch, gap, staleness_bound, tellings_too_late
):
    tell, chosen = HopGroup._tell_neighbors, []

    def tell_late(group, worker, since, until):
        if until == FOREVER:
            chosen.append(since)
            if len(chosen) <= tellings_too_late:
                wait_for(lambda: group._iteration(4) >= since)
        return tell(group, worker, since, until)

    monkeypatch.setattr(HopGroup, "_tell_neighbors", tell_late)
    strategy = recsync.HopStrategy(
        cluster,
        topology.ring_based(WORKERS),
        gap,
        backup_workers=1,
        staleness_bound=staleness_bound,
        check_invariants=True,
    )
    model = make_model(strategy)
    seen = {}

    def kill():
        # The others can come this far without it.
        wait_for(lambda: strategy.workers(model)[5].updates_used > 0)
        seen["used"] = strategy.workers(model)[5].updates_used
        cluster.kill("worker", 5)

    def restart():
        cluster.restart("worker", 5)
        wait_for(lambda: "worker:5 is back and takes part again" in caplog.text)
        seen["back at"] = max(report.iteration for report in strategy.workers(model))

    def finish():
        # All go on together, further than the others could with a worker that stands still.
        def slowest():
            return min(report.iteration for report in strategy.workers(model))

        wait_for(lambda: slowest() > seen["back at"] + 20)
        model.stop_training = True

    # More than is done before the worker is back.
    watch = Watch(strategy)
    callbacks = [watch, Once(60, kill), Once(200, restart), Once(204, finish)]
    history = model.fit(dataset(100_000), verbose=0, callbacks=callbacks).history
    assert np.isfinite(history["loss"][0])
    watch.seen.append(strategy.workers(model))
    watch.assert_nothing_went_back()
    assert watch.seen[-1][5].updates_used > seen["used"] > 0
    iterations = [report.iteration for report in watch.seen[-1]]
    assert min(iterations) > seen["back at"] + 20
    assert len(strategy.copies(model)) == WORKERS
    # Its neighbors passed the iterations that were chosen for it first.
    assert len(chosen) > tellings_too_late
    # And do so in the next epoch.
    model.fit(dataset(400), verbose=0)
    assert min(report.iteration for report in strategy.workers(model)) > max(iterations)


@pytest.mark.parametrize("seconds", [0.0, 2.0], ids=["lost at once", "calls made again before"])
def test_a_worker_whose_connection_breaks_comes_back_though_it_lived(
    cluster, caplog, monkeypatch, seconds
):
    lose = HopGroup.lose
    noticed = threading.Event()

    def lose_late(group, worker):
        noticed.set()
        time.sleep(seconds)  # The loops of its edges call on it meanwhile, and it answers.
        lose(group, worker)

    monkeypatch.setattr(HopGroup, "lose", lose_late)
    strategy = recsync.HopStrategy(
        cluster, topology.ring_based(WORKERS), 4, backup_workers=1, check_invariants=True
    )
    model = make_model(strategy)
    seen = {}

    def cut():
        # Between two calls of its steps the worker is not missed: it goes on by a new connection.
        while not noticed.is_set():
            cluster.cut_off("worker", 5)
            noticed.wait(0.1)
        wait_for(lambda: "worker:5 is back and takes part again" in caplog.text)
        seen["back at"] = max(report.iteration for report in strategy.workers(model))

    def finish():
        wait_for(lambda: strategy.workers(model)[5].iteration > seen["back at"] + 20)
        model.stop_training = True

    model.fit(dataset(100_000), verbose=0, callbacks=[Once(60, cut), Once(64, finish)])
    assert "Worker 5 was lost; workers 1, 4 and 6 go on without it" in caplog.text
    iterations = [report.iteration for report in strategy.workers(model)]
    assert min(iterations) > seen["back at"]
    assert max(iterations) - min(iterations) <= 4 * WORKERS // 2
    assert len(strategy.copies(model)) == WORKERS
    assert all(cluster.is_alive("worker", worker) for worker in range(WORKERS))


def test_without_backup_workers_training_ends_with_an_error_that_names_who_waits(cluster):
    strategy = recsync.HopStrategy(cluster, topology.ring(WORKERS))
    model = make_model(strategy)
    began = time.monotonic()
    with pytest.raises(
        RuntimeError,
        match="worker 3 was lost, and worker 2 can't go on without worker 3: its in-neighbors "
        "are workers 1 and 3, and it has backup_workers=0",
    ):
        model.fit(dataset(), verbose=0, callbacks=[Once(40, lambda: cluster.kill("worker", 3))])
    assert time.monotonic() - began < 60
    # When it is back the same model trains on.
    cluster.restart("worker", 3)
    cluster.readmit()
    history = model.fit(dataset(400), verbose=0).history
    assert np.isfinite(history["loss"][0])


# What a log entry of a stall says of a worker that waits for worker 6.
WAITS = re.compile(
    r"worker [57] \(iteration (\d+)\) has been waiting for "
    r"(?:updates of iteration (\d+)|tokens to enter iteration (\d+), given in iteration (\d+),) "
    r"for [\d.]+ s, of (?:worker 6|workers \d and 6|workers 6 and \d)"
)


def test_a_worker_that_stands_still_is_named_with_what_is_awaited_of_it(cluster, caplog):
    gap = 2
    strategy = recsync.HopStrategy(cluster, topology.ring(WORKERS), gap, stall_seconds=1.0)
    model = make_model(strategy)
    stood_at = []

    def stalls():
        # The first lines may be of the others alone: on a busy machine they, too, wait for long.
        lines = [record.message for record in caplog.records if "stalls" in record.message]
        return [line for line in lines if "worker 6 does not answer" in line and WAITS.search(line)]

    def pause():
        stood_at.append(strategy.workers(model)[6].iteration)
        caplog.clear()
        pid = cluster.pid("worker", 6)
        os.kill(pid, signal.SIGSTOP)
        wait_for(stalls)
        os.kill(pid, signal.SIGCONT)
        model.stop_training = True

    # More than is done before all wait for the worker.
    model.fit(dataset(8000), verbose=0, callbacks=[Once(8, pause)])
    assert stalls(), caplog.text
    for line in stalls():
        for found in WAITS.finditer(line):
            own, updates, entered, given = (n and int(n) for n in found.groups())
            # Before it, they had sent what it needed to get there.
            assert own >= stood_at[0] - 1
            if updates is not None:
                assert updates == own
            else:
                assert (entered, given) == (own + 1, own + 1 - gap)


def test_training_fails_when_no_worker_is_left(cluster):
    strategy = recsync.HopStrategy(
        cluster, topology.complete(WORKERS), 4, backup_workers=7, worker_timeout=3.0
    )
    model = make_model(strategy)

    def kill_all():
        for worker in range(WORKERS):
            os.kill(cluster.pid("worker", worker), signal.SIGKILL)

    with pytest.raises(RuntimeError, match="no worker has been reachable for 3 s"):
        model.fit(dataset(), verbose=0, callbacks=[Once(40, kill_all)])
