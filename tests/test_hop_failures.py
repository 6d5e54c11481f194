"""Workers of decentralized training that are killed, come back, or stand still."""

import dataclasses
import re
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from decentralized_sgd import BATCH, RATE, WIDTH, Recording, recorded, regression, simulate
from helpers import AtBatch, missing, wait_until

import tf_recsync as recsync
from tf_recsync import topology
from tf_recsync.cluster import one_by_one
from tf_recsync.ops import hop
from tf_recsync.ops.hop import FOREVER
from tf_recsync.synchronization import hop_edges
from tf_recsync.synchronization.hop import HopSynchronizer
from tf_recsync.synchronization.hop_exchange import Exchange

pytestmark = pytest.mark.usefixtures("end_calls_of_servers_that_were_cut_off")

WORKERS = 4
SECONDS = 250.0  # That anything may take on a busy machine.


@pytest.fixture
def cluster(clusters):
    return clusters.get(WORKERS)


def make_model(strategy):
    recsync.testing.set_compute_time(strategy, 0.02)
    with strategy.scope():
        model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(1, "sigmoid")])
        model.compile(
            keras.optimizers.SGD(0.1, momentum=0.9), "binary_crossentropy", steps_per_execution=2
        )
    return model


def dataset(batches=100_000):
    """By default more than anybody trains on before `stop_training`."""
    random = np.random.default_rng(1)
    x = random.normal(size=(BATCH * min(batches, 100), WIDTH)).astype(np.float32)
    y = (x.sum(1, keepdims=True) > 0).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).repeat().take(batches)


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
            self.seen.append(self._strategy.hop_report(self.model))

    def assert_nothing_went_back(self):
        for before, after in zip(self.seen[:-1], self.seen[1:], strict=True):
            for worker, (then, now) in enumerate(zip(before, after, strict=True)):
                for name, value in dataclasses.asdict(then).items():
                    assert getattr(now, name) >= value, (worker, name)


def test_with_backup_workers_the_others_go_on_when_a_worker_is_killed(cluster, caplog):
    strategy = recsync.HopStrategy(
        cluster,
        topology.ring_based(WORKERS),
        max_iteration_gap=4,
        backup_workers=1,
        check_invariants=True,
    )
    model = make_model(strategy)
    seen = {}

    def kill():
        seen["killed at"] = strategy.hop_report(model)[3].iteration
        cluster.kill("worker", 3)

    def finish():
        # The others go on, further than its neighbors could have with it.
        def slowest():
            return min(report.iteration for report in strategy.hop_report(model)[:3])

        assert wait_until(lambda: slowest() > seen["killed at"] + 10, SECONDS)
        model.stop_training = True

    callbacks = [AtBatch(20, kill), AtBatch(24, finish)]
    history = model.fit(dataset(), verbose=0, callbacks=callbacks).history
    assert np.isfinite(history["loss"][0])
    reports = strategy.hop_report(model)
    assert min(report.iteration for report in reports[:3]) > seen["killed at"] + 10
    assert "Worker 3 was lost; workers 0, 1 and 2 go on without it" in caplog.text
    assert missing(strategy.copies(model)) == [3]


def test_an_edge_that_is_never_built_holds_up_no_other(cluster, monkeypatch):
    # Its receiver stands still; when that is found out, the others go on without it.
    monkeypatch.setattr(one_by_one, "TURN_SECONDS", 0.1)
    begun, is_stuck, over = hop_edges.Edges._begun, threading.Event(), threading.Event()

    def stuck(taker):
        is_stuck.set()
        over.wait()
        return False

    def standing_still(edges, sender, receiver):
        if (sender, receiver) == (1, 2):
            return stuck
        assert is_stuck.wait(SECONDS)  # No other is built before.
        return begun(edges, sender, receiver)

    monkeypatch.setattr(hop_edges.Edges, "_begun", standing_still)
    strategy = recsync.HopStrategy(
        cluster, topology.ring(WORKERS), backup_workers=1, on_batch_lost="drop"
    )
    model = make_model(strategy)

    def kill():
        assert is_stuck.wait(SECONDS)
        cluster.kill("worker", 2)

    killing = threading.Thread(target=kill)
    killing.start()
    try:
        model.fit(dataset(60), verbose=0)
    finally:
        over.set()
        killing.join()
    assert missing(strategy.copies(model)) == [2]
    assert min(strategy.worker_steps(model)[worker] for worker in (0, 1, 3)) > 0


@pytest.mark.cases("while tokens are carried")
@pytest.mark.parametrize(
    ("gap", "staleness_bound", "tellings_too_late", "is_carried_early"),
    [(4, None, 0, False), (4, 3, 0, False), (60, None, 2, False), (4, None, 0, True)],
    ids=["without bound", "with bound", "while neighbors go on", "while tokens are carried"],
)
def test_a_worker_that_is_back_in_mid_epoch_takes_part_again(
    cluster, caplog, monkeypatch, gap, staleness_bound, tellings_too_late, is_carried_early
):
    tell, chosen = Exchange._tell_neighbors, []

    def tell_late(group, worker, since, until):
        if until == FOREVER:
            chosen.append(since)
            if len(chosen) <= tellings_too_late:
                wait_until(lambda: group._iteration(0) >= since, SECONDS)
        return tell(group, worker, since, until)

    monkeypatch.setattr(Exchange, "_tell_neighbors", tell_late)
    strategy = recsync.HopStrategy(
        cluster,
        topology.complete(WORKERS) if is_carried_early else topology.ring(WORKERS),
        max_iteration_gap=gap,
        backup_workers=1,
        staleness_bound=staleness_bound,
        check_invariants=True,
    )
    model = make_model(strategy)
    seen = {}
    set_neighbor = hop.set_neighbor

    def set_neighbor_late(handle, neighbor, since, until):
        if is_carried_early and until == FOREVER and neighbor != 1:
            # As a worker's thread does that begins a step meanwhile.
            model.train_function.synchronizer.carry_on()
            time.sleep(1.0)
        return set_neighbor(handle, neighbor, since, until)

    monkeypatch.setattr(hop, "set_neighbor", set_neighbor_late)

    def kill():
        # The others can come this far without it.
        wait_until(lambda: strategy.hop_report(model)[1].updates_used > 0, SECONDS)
        seen["used"] = strategy.hop_report(model)[1].updates_used
        cluster.kill("worker", 1)

    def restart():
        cluster.restart("worker", 1)
        assert wait_until(lambda: "worker:1 is back and takes part again" in caplog.text, SECONDS)
        seen["back at"] = max(report.iteration for report in strategy.hop_report(model))

    def finish():
        # All go on together, further than the others could with a worker that stands still.
        def slowest():
            return min(report.iteration for report in strategy.hop_report(model))

        assert wait_until(lambda: slowest() > seen["back at"] + 20, SECONDS)
        model.stop_training = True

    watch = Watch(strategy)
    callbacks = [watch, AtBatch(20, kill), AtBatch(80, restart), AtBatch(84, finish)]
    history = model.fit(dataset(), verbose=0, callbacks=callbacks).history
    assert np.isfinite(history["loss"][0])
    watch.seen.append(strategy.hop_report(model))
    watch.assert_nothing_went_back()
    assert watch.seen[-1][1].updates_used > seen["used"] > 0
    iterations = [report.iteration for report in watch.seen[-1]]
    assert min(iterations) > seen["back at"] + 20
    assert missing(strategy.copies(model)) == []
    # Its neighbors passed the iterations that were chosen for it first.
    assert len(chosen) > tellings_too_late
    # And do so in the next epoch, which ends when they have.

    def end_when_all_are_further(batch, logs):
        now = [report.iteration for report in strategy.hop_report(model)]
        model.stop_training = min(now) > max(iterations)

    ends = keras.callbacks.LambdaCallback(on_train_batch_end=end_when_all_are_further)
    model.fit(dataset(), verbose=0, callbacks=[ends])
    assert min(report.iteration for report in strategy.hop_report(model)) > max(iterations)


@pytest.mark.full
def test_a_worker_comes_back_while_its_neighbor_dies(cluster, caplog, monkeypatch):
    load, killed = HopSynchronizer._load_mean, []

    def load_when_one_is_dead(group, worker, others):
        if not killed:
            killed.append(1)
            cluster.kill("worker", 1)
        return load(group, worker, others)

    monkeypatch.setattr(HopSynchronizer, "_load_mean", load_when_one_is_dead)
    strategy = recsync.HopStrategy(
        cluster, topology.ring(WORKERS), max_iteration_gap=4, backup_workers=1
    )
    model = make_model(strategy)

    def renew():
        cluster.kill("worker", 0)
        cluster.restart("worker", 0)
        assert wait_until(lambda: "worker:0 is back and takes part again" in caplog.text, SECONDS)
        assert wait_until(lambda: "Worker 1 was lost" in caplog.text, SECONDS)

    def finish():
        before = max(report.iteration for report in strategy.hop_report(model))
        there = [0, 2, 3]

        def slowest():
            reports = strategy.hop_report(model)
            return min(reports[worker].iteration for worker in there)

        # Further than they could come if one of them waited for another.
        assert wait_until(lambda: slowest() > before + 20, SECONDS)
        model.stop_training = True

    model.fit(dataset(), verbose=0, callbacks=[AtBatch(20, renew), AtBatch(24, finish)])
    assert missing(strategy.copies(model)) == [1]


def test_when_training_was_stopped_the_steps_in_flight_end_before_anybody_reads(cluster):
    strategy = recsync.HopStrategy(cluster, topology.ring(WORKERS), max_iteration_gap=4)
    model = make_model(strategy)
    recsync.testing.set_compute_time(strategy, 0.3)
    model.fit(dataset(), verbose=0, callbacks=[AtBatch(6, lambda: stop(model))])
    weights = model.get_weights()
    steps = strategy.worker_steps(model)
    time.sleep(0.5)
    assert strategy.worker_steps(model) == steps
    for now, then in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(now, then)
    for copy in strategy.copies(model):
        assert len(copy) == len(weights)
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith(("recsync_hop", "recsync_worker"))]


def stop(model):
    model.stop_training = True


@pytest.mark.parametrize("seconds", [0.0, 2.0], ids=["lost at once", "calls made again before"])
def test_a_worker_whose_connection_breaks_comes_back_though_it_lived(
    cluster, caplog, monkeypatch, seconds
):
    lose = HopSynchronizer.lose
    noticed = threading.Event()

    def lose_late(group, worker):
        noticed.set()
        time.sleep(seconds)  # The loops of its edges call on it meanwhile, and it answers.
        lose(group, worker)

    monkeypatch.setattr(HopSynchronizer, "lose", lose_late)
    strategy = recsync.HopStrategy(
        cluster,
        topology.ring(WORKERS),
        max_iteration_gap=4,
        backup_workers=1,
        check_invariants=True,
    )
    model = make_model(strategy)
    seen = {}

    def cut():
        # Between two calls of its steps the worker is not missed: it goes on by a new connection.
        while not noticed.is_set():
            cluster.cut_off("worker", 1)
            noticed.wait(0.1)
        assert wait_until(lambda: "worker:1 is back and takes part again" in caplog.text, SECONDS)
        seen["back at"] = max(report.iteration for report in strategy.hop_report(model))

    def finish():
        assert wait_until(
            lambda: strategy.hop_report(model)[1].iteration > seen["back at"] + 20, SECONDS
        )
        model.stop_training = True

    model.fit(dataset(), verbose=0, callbacks=[AtBatch(20, cut), AtBatch(24, finish)])
    assert "Worker 1 was lost; workers 0 and 2 go on without it" in caplog.text
    iterations = [report.iteration for report in strategy.hop_report(model)]
    assert min(iterations) > seen["back at"]
    assert max(iterations) - min(iterations) <= 4 * WORKERS // 2
    assert missing(strategy.copies(model)) == []
    assert all(cluster.is_alive("worker", worker) for worker in range(WORKERS))


def test_without_backup_workers_training_ends_with_an_error_that_names_who_waits(cluster):
    # Without the wait for a worker's return.
    strategy = recsync.HopStrategy(cluster, topology.ring(WORKERS), worker_timeout=10_000.0)
    model = make_model(strategy)
    with pytest.raises(
        RuntimeError,
        match="worker 2 was lost, and worker 1 can't go on without worker 2: its in-neighbors "
        "are workers 0 and 2, and it has backup_workers=0",
    ):
        model.fit(dataset(), verbose=0, callbacks=[AtBatch(20, lambda: cluster.kill("worker", 2))])
    # When it is back the same model trains on.
    cluster.restart("worker", 2)
    cluster.readmit()
    history = model.fit(dataset(20), verbose=0).history
    assert np.isfinite(history["loss"][0])


# What a log entry of a stall says of a worker that waits for worker 2.
WAITS = re.compile(
    r"worker [13] \(iteration (\d+)\) has been waiting for "
    r"(?:updates of iteration (\d+)|tokens to enter iteration (\d+), given in iteration (\d+),) "
    r"for [\d.]+ s, of (?:worker 2|workers \d and 2|workers 2 and \d)"
)


def test_a_worker_that_stands_still_is_named_with_what_is_awaited_of_it(cluster, caplog):
    gap = 2
    strategy = recsync.HopStrategy(
        cluster, topology.ring(WORKERS), max_iteration_gap=gap, stall_seconds=0.5
    )
    model = make_model(strategy)
    stood_at = []

    def stalls():
        # The first lines may be of the others alone: on a busy machine they, too, wait for long.
        lines = [record.message for record in caplog.records if "stalls" in record.message]
        return [line for line in lines if "worker 2 does not answer" in line and WAITS.search(line)]

    def pause():
        stood_at.append(strategy.hop_report(model)[2].iteration)
        caplog.clear()
        cluster.pause("worker", 2)
        wait_until(stalls, SECONDS)
        cluster.resume("worker", 2)
        model.stop_training = True

    model.fit(dataset(), verbose=0, callbacks=[AtBatch(8, pause)])
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
        cluster,
        topology.complete(WORKERS),
        max_iteration_gap=4,
        backup_workers=3,
        worker_timeout=1.0,
        silence_timeout=60.0,
    )
    model = make_model(strategy)

    def kill_all():
        for worker in range(WORKERS):
            cluster.kill("worker", worker)

    with pytest.raises(RuntimeError, match="no worker has been reachable for 1 s"):
        model.fit(dataset(), verbose=0, callbacks=[AtBatch(20, kill_all)])


@pytest.mark.full
def test_between_processes_standard_training_is_decentralized_sgd_step_by_step(cluster):
    x, y, batches = regression(WORKERS * 7)
    topo = topology.exponential(WORKERS)
    strategy = recsync.HopStrategy(cluster, topo, check_invariants=True)
    with strategy.scope():
        model = Recording()
        model.compile(keras.optimizers.SGD(RATE), "mse", steps_per_execution=2)
        model((np.zeros(1, np.int64), np.zeros((1, WIDTH), np.float32)))
    start = model.dense.kernel.numpy()[:, 0]
    model.fit(batches, verbose=0)
    at, numbers, histories = recorded(strategy, model)
    steps = min(at)
    assert sum(at) == WORKERS * 7 and steps >= 3
    expected = simulate(topo, x, y, numbers, start, steps)
    for worker in range(WORKERS):
        np.testing.assert_allclose(
            histories[worker][:steps], expected[:, worker], rtol=2e-5, atol=2e-5
        )
