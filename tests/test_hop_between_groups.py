"""HierarchicalStrategy with Hop between the groups."""

import pathlib
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from groups import BETWEEN, INSIDE, WORKERS, hierarchical, line, numbers
from helpers import (
    AtBatch,
    fits_until,
    wait_for_file,
    wait_until,
)

import tf_recsync as recsync
from tf_recsync.strategies import server_threads
from tf_recsync.synchronization import hop_groups, loops

pytestmark = pytest.mark.usefixtures("end_calls_of_servers_that_were_cut_off")


@pytest.fixture
def cluster(clusters):
    return clusters.get(workers=WORKERS, ps=6)


def threads_of_hop() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("recsync_hop")]


def test_servers_exchange_their_shards_after_so_many_updates_by_hop(cluster, tmp_path):
    between = recsync.Hop(
        recsync.topology.ring(2), updates_per_iteration=3, check_invariants=True, staleness_bound=1
    )
    options = {"ps_per_group": 2, "output": "mean", "aggregation": INSIDE["GBA"]}
    strategy = hierarchical(cluster, between, **options)
    assert strategy.algorithm is between and strategy.sync_ps == ()
    model = line(strategy)
    assert strategy.hop_report(model) is None
    recsync.testing.set_compute_time(strategy, 0.01)
    history = model.fit(
        numbers(80), epochs=2, verbose=0, callbacks=[recsync.callbacks.ShadowReport()]
    ).history
    epochs = 2

    def have_exchanged() -> bool:
        return min(strategy.sync_report(model).syncs) > 4

    if not have_exchanged():  # On a busy machine.
        epochs += fits_until(have_exchanged, model, numbers(80))
    assert not threads_of_hop()
    first, second = strategy.copies(model)
    for value, a, b in zip(model.get_weights(), first, second, strict=True):
        np.testing.assert_allclose(value, (a + b) / 2, rtol=1e-5, atol=1e-6)
    report, servers = strategy.sync_report(model), strategy.hop_report(model)
    assert report.steps == 80 * epochs and report.elements == 4 and report.sync_ps_bytes == 0
    # Two pushes are an update, and three updates an iteration at least.
    assert sum(report.syncs) <= 80 * epochs / 6
    for group in range(2):
        assert report.syncs[group] > 4
        # A kernel and a bias, each on a server, are exchanged by themselves.
        assert len(servers[group]) == 2
        assert all(server.updates_used > 0 for server in servers[group])
        iterations = [server.iteration for server in servers[group]]
        assert sum(iterations) / 2 >= report.syncs[group] - 1
    assert strategy.average_sync_gap(model) == report.steps / sum(report.syncs)
    assert strategy.average_sync_gap(model, by="bytes") == float("inf")
    # Each group may have begun one iteration of an epoch's before it, with updates of before.
    assert history["average_sync_gap"][1] >= 80 / (80 / 6 + 2)
    assert history["syncs_per_second"][1] > 0
    with pytest.raises(ValueError, match="HopReport can't report on a HierarchicalStrategy; use"):
        model.fit(numbers(4), verbose=0, callbacks=[recsync.callbacks.HopReport()])

    # Groups go on from a checkpoint, with their iterations.
    latest = max(server.iteration for of_group in servers for server in of_group)
    checkpoint = tf.train.Checkpoint(model=model, groups=strategy.worker_states(model))
    path = checkpoint.save(str(tmp_path / "line"))
    other = hierarchical(cluster, between, **options)
    restored = line(other)
    states = other.worker_states(restored)
    tf.train.Checkpoint(model=restored, groups=states).restore(path).assert_consumed()
    for copy, saved in zip(other.copies(restored), (first, second), strict=True):
        for a, b in zip(copy, saved, strict=True):
            np.testing.assert_array_equal(a, b)
    fits_until(lambda: other.hop_report(restored)[0][0].iteration > latest, restored, numbers(40))


def test_updates_of_an_epoch_count_for_an_iteration_of_the_next_one_by_hop(cluster):
    between = recsync.Hop(recsync.topology.ring(2), updates_per_iteration=24)
    strategy = hierarchical(cluster, between)
    model = line(strategy)
    # Of 8 updates of each trainer, 16 of a group: in no epoch are there enough.
    data = strategy.distribute_datasets_from_function(lambda context: numbers(8))
    epochs = 3 * fits_until(
        lambda: min(strategy.sync_report(model).syncs) > 0, model, data, epochs=3
    )
    assert max(strategy.sync_report(model).syncs) <= 16 * epochs // 24


def test_updates_are_those_of_the_parts_of_an_optimizer_that_train_by_hop(cluster):
    def make():
        idle, own = (recsync.optimizers.SGD(0.01) for _ in range(2))
        optimizer_map = keras.optimizers.OptimizerMap(own, {"no such variable": idle})
        return recsync.optimizers.MultiOptimizer(optimizer_map)

    strategy = hierarchical(cluster, BETWEEN["Hop"])
    model = line(strategy, make)
    model.fit(numbers(20), verbose=0)
    fits_until(lambda: min(strategy.sync_report(model).syncs) > 0, model, numbers(20))


def test_hop_goes_on_from_a_checkpoint_of_another_algorithm(cluster, tmp_path):
    easgd = hierarchical(cluster)
    model = line(easgd)
    model.fit(numbers(8), verbose=0)
    checkpoint = tf.train.Checkpoint(model=model, groups=easgd.worker_states(model))
    path = checkpoint.save(str(tmp_path / "line"))
    strategy = hierarchical(cluster, BETWEEN["Hop"])
    restored = line(strategy)
    states = strategy.worker_states(restored)
    tf.train.Checkpoint(model=restored, groups=states).restore(path).assert_consumed()
    np.testing.assert_array_equal(strategy.copies(restored)[1][0], easgd.copies(model)[1][0])
    restored.fit(numbers(8), verbose=0)
    assert strategy.hop_report(restored)[1][0].iteration < 8  # They begin anew.


def test_trainers_wait_for_no_neighbor_by_hop(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(hop_groups, "_LEAVE_SECONDS", 600.0)  # However slow the machine is.
    strategy = hierarchical(cluster, BETWEEN["Hop"])
    recsync.testing.set_compute_time(strategy, 0.03)
    model = line(strategy)
    has_others = str(tmp_path / "others")

    def when_others_are_done(*batch):
        with tf.control_dependencies([wait_for_file(has_others)]):
            return tf.nest.map_structure(tf.identity, batch)

    def dataset_fn(context):
        if context.input_pipeline_id < 2:
            return numbers(40)
        return numbers(4).map(when_others_are_done)

    data = strategy.distribute_datasets_from_function(dataset_fn)
    go_on = AtBatch(79, lambda: pathlib.Path(has_others).touch())
    # If trainers waited for the group that has done nothing, this would not end.
    model.fit(data, verbose=0, callbacks=[go_on])
    assert strategy.worker_steps(model) == [40, 40, 4, 4]
    # The servers of the group that was done first have waited, with all of its updates.
    assert [0 < syncs <= 2 for syncs in strategy.sync_report(model).syncs] == [True, True]


def test_copies_stand_still_while_they_are_read_within_an_epoch_by_hop(cluster):
    # An iteration for each update: without the pause, one of them is always under way.
    strategy = hierarchical(cluster, BETWEEN["Hop"])
    recsync.testing.set_compute_time(strategy, 0.005)
    model, seen = line(strategy), []

    class Reads(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch % 40 == 20:
                before = strategy.copies(self.model)
                time.sleep(0.2)
                seen.append((before, strategy.copies(self.model)))
            goes_on = min(strategy.sync_report(self.model).syncs) > 3
            self.model.stop_training = len(seen) >= 5 and goes_on

    model.fit(numbers(200).repeat(50), verbose=0, callbacks=[Reads()])
    assert len(seen) >= 5
    for before, after in seen:
        for old, new in zip(before, after, strict=True):
            for one, other in zip(old, new, strict=True):
                np.testing.assert_array_equal(one, other)
    assert min(strategy.sync_report(model).syncs) > 3  # And they go on.


def test_nobody_leaves_while_copies_are_read_within_an_epoch_by_hop(cluster, monkeypatch):
    leave, left_in_pause = hop_groups.GroupHopSynchronizer._leave, []

    def noted(synchronizer, loop):
        left_in_pause.append(synchronizer._loops.is_paused)
        leave(synchronizer, loop)

    monkeypatch.setattr(hop_groups.GroupHopSynchronizer, "_leave", noted)
    monkeypatch.setattr(hop_groups, "_LEAVE_SECONDS", 0.1)
    # No iteration is due, so that servers of groups wait for their trainers.
    between = recsync.Hop(recsync.topology.ring(2), updates_per_iteration=10_000)
    strategy = hierarchical(cluster, between)
    model = line(strategy)

    is_paused = []

    def read():
        model.get_weights()
        is_paused.append(model.train_function.synchronizer._loops.is_paused)
        time.sleep(0.5)

    model.fit(numbers(80), verbose=0, callbacks=[AtBatch(40, read)])
    assert is_paused == [True]
    assert not any(left_in_pause)


@pytest.mark.parametrize(("between", "name"), [("Hop", "Hop between groups"), ("EASGD", "EASGD")])
def test_an_optimizer_that_would_undo_the_average_of_groups_is_refused(cluster, between, name):
    strategy = hierarchical(cluster, BETWEEN[between])
    model = line(strategy, lambda: recsync.optimizers.Ftrl(0.1))
    with pytest.raises(ValueError, match=f"optimizer must not be Ftrl under {name}"):
        model.fit(numbers(4), verbose=0)


def test_a_group_without_data_leaves_its_neighbor_going_on_by_hop(cluster, monkeypatch):
    monkeypatch.setattr(hop_groups, "_LEAVE_SECONDS", 0.1)
    strategy = hierarchical(cluster, recsync.Hop(recsync.topology.ring(2)))
    recsync.testing.set_compute_time(strategy, 0.02)
    model = line(strategy)

    def dataset_fn(context):
        return numbers(3) if context.input_pipeline_id >= 2 else numbers(60).repeat(100)

    def end_when_one_has_gone_on(batch, logs):
        first, second = strategy.sync_report(model).syncs
        model.stop_training = first > second + 5

    ends = keras.callbacks.LambdaCallback(on_train_batch_end=end_when_one_has_gone_on)
    data = strategy.distribute_datasets_from_function(dataset_fn)
    model.fit(data, verbose=0, callbacks=[ends])
    first, second = strategy.sync_report(model).syncs
    assert second <= 6 and first > second + 5
    # All take part again in the next epoch.
    fits_until(lambda: strategy.sync_report(model).syncs[1] > second, model, numbers(40))


def test_a_killed_server_of_a_group_ends_training_if_neighbors_wait_for_it_by_hop(cluster):
    strategy = hierarchical(cluster, BETWEEN["Hop"])
    recsync.testing.set_compute_time(strategy, 0.05)
    model = line(strategy)
    message = "group 1 was lost, and group 0 can't go on without group 1: .* backup_workers=0"
    kill = AtBatch(8, lambda: cluster.kill("ps", 1))
    with pytest.raises(RuntimeError, match=message):
        model.fit(numbers(50).repeat(400), verbose=0, callbacks=[kill])
    assert wait_until(lambda: not threads_of_hop(), 100), threads_of_hop()


@pytest.mark.cases("always")
@pytest.mark.parametrize("times", [2, 1000], ids=["twice", "always"])
def test_an_iteration_that_fails_is_made_anew_by_hop(cluster, monkeypatch, caplog, times):
    make, left = hop_groups._iteration, [times]

    def failing(parameters):
        if not left[0]:
            return make(parameters)
        left[0] -= 1
        raise tf.errors.InternalError(None, None, "garbled")

    monkeypatch.setattr(hop_groups, "_iteration", failing)
    monkeypatch.setattr(loops, "RETRY_SECONDS", 0.01)
    strategy = hierarchical(cluster, BETWEEN["Hop"])
    recsync.testing.set_compute_time(strategy, 0.02)
    model = line(strategy)
    if times > 2:
        with pytest.raises(tf.errors.InternalError, match="garbled"):
            model.fit(numbers(400), verbose=0)
    else:

        def end_when_all_have_exchanged(batch, logs):
            model.stop_training = min(strategy.sync_report(model).syncs) > 0

        ends = keras.callbacks.LambdaCallback(on_train_batch_end=end_when_all_have_exchanged)
        model.fit(numbers(4000), verbose=0, callbacks=[ends])
        assert min(strategy.sync_report(model).syncs) > 0
    assert "failed, and it takes part anew (1 of 4): garbled" in caplog.text
    assert wait_until(lambda: not threads_of_hop(), 100), threads_of_hop()


def test_servers_need_threads_for_what_may_wait_on_them_by_hop(cluster, monkeypatch):
    monkeypatch.setattr(server_threads.ops, "server_threads", lambda needed: 7)
    message = "parameter server 0 has 7 threads, and up to 8 calls may wait in it for neighbors"
    with pytest.raises(ValueError, match=message):
        hierarchical(cluster, BETWEEN["Hop"])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"topology": 2}, "topology must be from tf_recsync.topology, not 2"),
        ({"updates_per_iteration": 0}, "updates_per_iteration must be an integer of at least 1"),
        ({"max_iteration_gap": 0}, "max_iteration_gap must be an integer of at least 1"),
        ({"backup_workers": 2}, "backup_workers must be less than the in-neighbors"),
        ({"staleness_bound": -1}, "staleness_bound must be an integer of at least 0"),
        ({"skip": 3}, "skip must be a Skip or None, not 3"),
        ({"protocol": "gossip"}, 'protocol must be "token_queue" or "notify_ack"'),
        ({"protocol": "notify_ack", "backup_workers": 1}, "notify_ack excludes backup workers"),
        ({"check_invariants": 1}, "check_invariants must be a bool, not 1"),
        ({"stall_seconds": 0}, "stall_seconds must be positive"),
    ],
)
def test_what_hop_does_not_know_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        recsync.Hop(**{"topology": recsync.topology.ring(2), **wrong})
