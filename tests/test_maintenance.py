"""`maintenance.Window`: servers are drained and restarted together, and nothing is lost."""

import threading

import keras
import numpy as np
import pytest
from groups import BETWEEN, hierarchical, line, numbers
from helpers import (
    AtBatch,
    compiled,
    fits_until,
    gated,
    held_back,
    missing,
    numbered,
    sums,
    wait_until,
)

import tf_recsync as recsync
from tf_recsync import maintenance
from tf_recsync.maintenance import Drain, Restart, Window

WORKERS, PS = 4, 6
GBA = recsync.modes.GBA(global_batch_size=48, local_batch_size=16)
# Mode inside, and algorithm between groups.
KINDS = {
    "hogwild": (None, recsync.EASGD(0.3)),
    "GBA": (GBA, recsync.EASGD(0.3)),
    "Hop": (None, BETWEEN["Hop"]),  # Without backup workers.
}


@pytest.fixture
def cluster(clusters):
    return clusters.get(workers=WORKERS, ps=PS)


@pytest.fixture(autouse=True)
def have_time_to_return(monkeypatch):
    """As much as a server may need on a busy machine."""
    monkeypatch.setattr(maintenance, "_RETURN_SECONDS", 200.0)


def numbered_model(strategy):
    """Whose metrics tell which of the 400 examples of `numbered` it has seen."""
    return compiled(strategy, loss="mse", metrics=sums)


def assert_all_were_seen(history, epochs):
    numbers = np.arange(400, dtype=np.float64)
    for name, expected in (("label_sum", numbers.sum()), ("squares", (numbers**2).sum())):
        assert history[name] == [expected] * epochs
    assert history["examples"] == [400] * epochs


def from_another_thread(window, *events):
    thread = threading.Thread(target=lambda: [window.request(event) for event in events])
    thread.start()
    thread.join()


class Copies(keras.callbacks.Callback):
    """Notes the parameters of a group, and what belongs to them, after each step.

    Of a group without copies, what it will begin with when its trainers open it, if batches are
    left.
    """

    def __init__(self, group):
        super().__init__()
        self._group = group
        self.noted = []

    def on_train_batch_end(self, batch, logs=None):
        self.model.trainable_variables[0].numpy()  # As of one moment.
        self.noted.append(self.model.train_function.synchronizer.copies.all_values()[self._group])


class Kept(keras.callbacks.Callback):
    """Compares a group's copies before and after what a window has done within an epoch.

    Args:
        before: notes what they were.
        window: the window.
        is_same: whether nothing was held back that was applied then.
    """

    def __init__(self, before, window, is_same):
        super().__init__()
        self._before, self._window, self._is_same = before, window, is_same
        self.compared = threading.Event()

    def on_train_batch_end(self, batch, logs=None):
        if self._window.report and not self.compared.is_set():
            copies = self.model.train_function.synchronizer.copies.all_values()[1]
            for kept, then in zip(copies, self._before.noted[-1], strict=True):
                if self._is_same:
                    np.testing.assert_array_equal(kept, then)
            self.compared.set()


def test_drain_and_restart_are_done_together_at_the_end_of_an_epoch(cluster, caplog):
    strategy = hierarchical(cluster)
    recsync.testing.set_compute_time(strategy, 0.02)
    model = numbered_model(strategy)
    window = Window(within_seconds=600)
    events = Drain(worker=3), Restart("ps", 1)

    request = AtBatch(3, lambda: from_another_thread(window, *events))
    (data,), _ = numbered("datasets")
    history = model.fit(data, epochs=2, verbose=0, callbacks=[request, window]).history
    assert_all_were_seen(history, 2)
    assert not cluster.is_alive("worker", 3)
    assert strategy.worker_steps(model)[3] == 0
    drained, restarted = window.report
    assert (drained.event, restarted.event) == events
    assert drained.began == restarted.began >= drained.requested
    assert {drained.moment, restarted.moment} == {"epoch"}
    assert (drained.is_back, restarted.is_back) == (False, True)
    assert strategy.losses(model).steps == strategy.losses(model).batches == 0
    assert "drain worker:3: after" in str(drained)
    cluster.restart("worker", 3)

    def takes_part():
        assert_all_were_seen(model.fit(data, verbose=0).history, 1)
        return strategy.worker_steps(model)[3] > 0

    assert wait_until(takes_part, 200)


@pytest.mark.cases("GBA", "Hop")
@pytest.mark.parametrize("kind", KINDS)
def test_a_group_goes_on_with_all_that_it_had_within_an_epoch(cluster, kind):
    inside, between = KINDS[kind]
    strategy = hierarchical(cluster, between, aggregation=inside)
    recsync.testing.set_compute_time(strategy, 0.02)
    model = numbered_model(strategy)
    window = Window(within_seconds=1e-6)
    before = Copies(1)
    kept = Kept(before, window, is_same=kind == "hogwild")
    request = AtBatch(2, lambda: window.request(Restart("ps", 1)))
    data = gated(kept.compared)
    history = model.fit(data, verbose=0, callbacks=[request, before, window, kept]).history
    (done,) = window.report
    assert done.moment == "limit"
    assert done.is_back
    assert kept.compared.is_set()
    assert_all_were_seen(history, 1)
    assert strategy.losses(model).batches == 0


def test_others_go_on_while_a_group_s_server_is_started_later_by_hop(cluster):
    strategy = hierarchical(cluster, BETWEEN["Hop"])
    recsync.testing.set_compute_time(strategy, 0.02)
    model = numbered_model(strategy)
    window = Window(within_seconds=1e-6)
    request = AtBatch(2, lambda: window.request(Restart("ps", 1, cluster.kill)))
    later = AtBatch(8, lambda: cluster.restart("ps", 1))
    (data,), _ = numbered("datasets")
    history = model.fit(data, verbose=0, callbacks=[request, window, later]).history
    (done,) = window.report
    assert not done.is_back
    assert_all_were_seen(history, 1)

    def takes_part():
        model.fit(data, verbose=0)
        return all(strategy.worker_steps(model))

    assert wait_until(takes_part, 200)


def test_groups_that_are_restarted_at_once_keep_what_the_algorithm_has_there(cluster):
    algorithm = recsync.BMUF(0.3, eta=0.8, momentum=0.9)
    strategy = hierarchical(cluster, algorithm, mode=recsync.Foreground(gap=5))
    model, window = line(strategy), Window(within_seconds=600)

    def fit(steps, *callbacks):  # Of each trainer.
        data = strategy.distribute_datasets_from_function(lambda context: numbers(steps))
        model.fit(data, verbose=0, callbacks=list(callbacks))
        return model.train_function.synchronizer.extras()

    before = fit(6)
    assert np.all(before["state_update"])
    for ps in (0, 1):
        window.request(Restart("ps", ps))
    after = fit(2, window)  # Without a synchronization.
    assert [done.is_back for done in window.report] == [True, True]
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, name)


@pytest.mark.full
def test_parameter_servers_are_restarted_when_training_stands_still_and_workers_at_its_end(cluster):
    strategy = hierarchical(cluster)
    recsync.testing.set_compute_time(strategy, 0.02)
    model = numbered_model(strategy)
    window = Window(within_seconds=600)
    restarted = []

    def restart(job, index):
        restarted.append((job, index))
        cluster.restart(job, index)

    has_saved = threading.Event()

    def save():
        window.request(Restart("worker", 0, restart))
        window.request(Restart("ps", 0, restart))
        model.get_weights()  # As a checkpoint does.
        has_saved.set()

    callbacks = [AtBatch(2, save), window]
    history = model.fit(gated(has_saved), epochs=2, verbose=0, callbacks=callbacks).history
    assert_all_were_seen(history, 2)
    assert [(done.event.job, done.moment) for done in window.report] == [
        ("ps", "pause"),
        ("worker", "epoch"),
    ]
    assert restarted == [("ps", 0), ("worker", 0)]
    assert all(done.is_back for done in window.report)
    assert all(member.is_there for member in strategy.members())
    assert strategy.losses(model).batches == 0


@pytest.mark.cases("shadow")
@pytest.mark.parametrize("name", ["async", "shadow"])
def test_a_worker_that_is_restarted_before_training_and_at_the_end_of_epochs_takes_part(
    cluster, name
):
    shadow = name == "shadow"
    strategy = (
        recsync.ShadowSyncStrategy(cluster, recsync.ModelAveraging(0.5), threads_per_trainer=2)
        if shadow
        else recsync.AsyncStrategy(cluster)
    )
    recsync.testing.set_compute_time(strategy, 0.02)
    model = numbered_model(strategy)
    window = Window(within_seconds=600)
    window.request(Restart("worker", 1))
    (data,), _ = numbered("datasets")
    request = AtBatch(2, lambda: window.request(Restart("worker", 2)))
    history = model.fit(data, epochs=2, verbose=0, callbacks=[request, window]).history
    assert_all_were_seen(history, 2)
    assert [(done.event.index, done.moment) for done in window.report] == [
        (1, "begin"),
        (2, "epoch"),
    ]
    assert all(member.is_there for member in strategy.members())
    if shadow:
        assert None not in strategy.copies(model)


def test_a_trainer_keeps_its_copy_when_it_is_restarted_and_not_when_it_is_drained(cluster, caplog):
    strategy = recsync.ShadowSyncStrategy(cluster, recsync.ModelAveraging(0.5))
    recsync.testing.set_compute_time(strategy, 0.02)
    model, window = line(strategy), Window(within_seconds=1e-6)

    def request():
        assert strategy.staleness(model).dense.count  # What each has counted by then is known.
        window.request(Restart("worker", 2))

    data = held_back(numbers(80), 40, lambda: window.report, each=0.5)
    model.fit(data, verbose=0, callbacks=[AtBatch(8, request), window])
    (restarted,) = window.report
    assert (restarted.moment, restarted.is_back) == ("limit", True)
    assert "goes on with the parameters of" not in caplog.text
    # Each step of two weights is counted once, also those before the restart.
    steps = strategy.sync_report(model).steps
    assert strategy.staleness(model).dense.count == 2 * steps >= 2 * 80
    window.request(Drain(worker=3))
    model.fit(numbers(20), verbose=0, callbacks=[window])
    assert missing(strategy.copies(model)) == [3]
    # Also those of the one that is gone.
    steps = strategy.sync_report(model).steps
    assert strategy.staleness(model).dense.count == 2 * steps >= 2 * 100
    cluster.restart("worker", 3)
    fits_until(lambda: strategy.worker_steps(model)[3] > 0, model, numbers(40))
    assert "Worker 3 goes on with the parameters of the others" in caplog.text


def test_an_event_that_fails_ends_fit_with_an_error_that_names_it(cluster):
    strategy = recsync.AsyncStrategy(cluster)
    model = numbered_model(strategy)
    window = Window(within_seconds=600)

    def fail(job, index):
        raise OSError(f"no machine for {job} {index}")

    window.request(Drain(3, stop=fail))
    (data,), _ = numbered("datasets")
    with pytest.raises(RuntimeError, match="drain worker:3: no machine for worker 3"):
        model.fit(data, verbose=0, callbacks=[window])
    assert window.report == []
    assert_all_were_seen(model.fit(data, verbose=0, callbacks=[window]).history, 1)


def test_a_process_that_ends_after_its_hook_has_returned_is_not_taken_for_the_next_one(cluster):
    strategy = hierarchical(cluster)
    model, window = numbered_model(strategy), Window(within_seconds=600)
    ended, threads, seen = cluster.pid("ps", 1), [], []

    def restart(job, index):
        later = threading.Timer(2.0, lambda: cluster.restart(job, index))
        later.start()
        threads.append(later)

    window.request(Restart("ps", 1, restart))
    look = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: seen.append(cluster.pid("ps", 1))
    )
    (data,), _ = numbered("datasets")
    history = model.fit(data, epochs=1, verbose=0, callbacks=[window, look]).history
    threads[0].join()
    assert_all_were_seen(history, 1)
    assert [done.is_back for done in window.report] == [True]
    assert seen != [ended]
    assert strategy.losses(model).batches == 0


def test_what_was_requested_beside_an_event_that_fails_is_done(cluster, monkeypatch):
    """A server that nobody has ended after all takes part again."""
    monkeypatch.setattr(maintenance, "_RETURN_SECONDS", 1.0)
    model = numbered_model(recsync.AsyncStrategy(cluster))
    window = Window(within_seconds=600)

    def fail(job, index):
        raise OSError("no machine")

    events = [
        Restart("worker", 1, restart=lambda job, index: None),
        Restart("worker", 2, restart=fail),
        Restart("worker", 3, restart=lambda job, index: None),
    ]
    for event in events:
        window.request(event)
    (data,), _ = numbered("datasets")
    with pytest.raises(RuntimeError, match="restart worker:2: no machine"):
        model.fit(data, verbose=0, callbacks=[window])
    assert [done.event for done in window.report] == events[:1]
    assert_all_were_seen(model.fit(data, verbose=0, callbacks=[window]).history, 1)
    assert [done.event for done in window.report] == [events[0], events[2]]
    assert all(done.is_back for done in window.report)


@pytest.mark.parametrize(
    ("name", "event", "message"),
    [
        ("hierarchical", Restart("ps", 3), "restart ps:3: ps:3 has embedding tables"),
        ("hierarchical", Restart("ps", 5), "restart ps:5: ps:5 has the central copy"),
        ("one group", Restart("ps", 0), "ps:0 has the parameters of the only group"),
        ("async", Restart("ps", 1), "ps:1 has parameters of the model, which nobody else has"),
        ("hierarchical", Restart("ps", 6), "the cluster has ps:0 to ps:5"),
        ("async", Drain(4), "the cluster has worker:0 to worker:3"),
        ("hop", Drain(1), "under a HopStrategy neighbors need each other"),
        ("async", "worker:1", "event must be a Restart or a Drain, not 'worker:1'"),
    ],
)
def test_events_that_would_lose_something_are_refused_when_they_are_requested(
    cluster, name, event, message
):
    make = {
        "async": lambda: recsync.AsyncStrategy(cluster),
        "hierarchical": lambda: hierarchical(cluster),
        "one group": lambda: recsync.HierarchicalStrategy(
            cluster, recsync.EASGD(0.3), groups=1, trainers_per_group=4, ps_per_group=1
        ),
        "hop": lambda: recsync.HopStrategy(cluster, recsync.topology.ring(WORKERS)),
    }
    strategy = make[name]()
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    window = Window(within_seconds=600)
    window.set_model(model)
    with pytest.raises(ValueError, match=message):
        window.request(event)


def test_what_is_requested_twice_or_leaves_no_worker_is_refused(cluster):
    strategy = recsync.AsyncStrategy(cluster)
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    window = Window(within_seconds=600)
    window.set_model(model)
    for worker in range(3):
        window.request(Drain(worker))
    with pytest.raises(ValueError, match="drain worker:3: no worker would be left"):
        window.request(Drain(3))
    with pytest.raises(ValueError, match="restart worker:2: worker:2 is requested already"):
        window.request(Restart("worker", 2))


def test_what_does_not_fit_the_strategy_is_an_error_of_fit():
    window = Window(within_seconds=600)
    window.request(Restart("ps", 0))
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    with pytest.raises(ValueError, match="Window is for servers of a strategy of this package"):
        model.fit(np.ones([2, 1]), np.ones([2, 1]), verbose=0, callbacks=[window])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Window(0), "within_seconds must be positive, in seconds, not 0"),
        (lambda: Restart("reader", 0), 'job must be "worker" or "ps", not \'reader\'; a reader'),
        (lambda: Restart("ps", -1), "index must be an integer of at least 0, got -1"),
        (lambda: Restart("ps", 0, "now"), "restart must be a function of job and index, or None"),
        (lambda: Drain("first"), "worker must be an integer of at least 0, got 'first'"),
        (lambda: Drain(1, stop=3), "stop must be a function of job and index, or None, not 3"),
    ],
)
def test_wrong_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
