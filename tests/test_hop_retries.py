"""Calls from worker to worker that fail: they are made again, and training is as without."""

import collections
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from decentralized_sgd import RATE, WIDTH, Recording, recorded, regression, simulate
from helpers import wait_until

import tf_recsync as recsync
from tf_recsync import topology
from tf_recsync.ops import hop
from tf_recsync.synchronization import hop_edges, loops
from tf_recsync.synchronization.hop_exchange import Exchange

WORKERS = 4
GARBLED = tf.errors.InternalError(None, None, "Unable to parse request\nof some worker")

# What `RecsyncHopState` counts.
COUNTS = (
    *("iterations", "used", "jumps", "skipped", "sent", "replaced"),
    *("waiting_for_updates", "waiting_for_tokens"),
    *("unusable", "superseded", "queued", "lost_events", "awaited"),
)


@pytest.fixture(scope="module")
def cluster(clusters):
    return clusters.get(WORKERS, processes=0)


class Failing:
    """Calls along edges of which some fail, in several places one after the other.

    Args:
        places: where an edge's calls fail in turn: at "once", when the parcel was "collected", when
            its update was "delivered", when the call has "ended", or not at all (None); or it is
            "given up", and goes on to wait for a parcel all the same.
        edges: the (sender, receiver) whose calls fail; None for all.
        error: what they fail with.
        cluster: needed for calls that are given up.
    """

    def __init__(self, monkeypatch, places, edges=None, error=GARBLED, cluster=None):
        self.waits_ended = []  # Of calls that were given up, with which error.
        self._cluster = cluster
        self.calls = collections.Counter()  # By edge, without those that build.
        self.failed = collections.Counter()  # By place.
        self._places = places
        self._edges = edges
        self._error = error
        self._lock = threading.Lock()
        # Else an edge makes but one call, until it fails.
        monkeypatch.setattr(hop_edges, "TURNS_PER_CALL", 1)
        make = hop_edges.carry_function
        monkeypatch.setattr(
            hop_edges, "carry_function", lambda *args: lambda *call: self._call(make(*args), *call)
        )

    def _call(self, carry, source, sender, target, receiver, *limits):
        edge = int(sender), int(receiver)
        if edge[1] < 0:
            return carry(source, sender, target, receiver, *limits)
        with self._lock:
            place = self._places[self.calls[edge] % len(self._places)]
            self.calls[edge] += 1
        if place is None or (self._edges is not None and edge not in self._edges):
            return carry(source, sender, target, receiver, *limits)
        if place == "ended" and not carry(source, sender, target, receiver, *limits):
            return False
        if place in ("collected", "delivered"):
            parcel = hop.collect(source, receiver, tf.float32)
            if not parcel.open:
                return False
            if place == "delivered":
                number, iteration = parcel.number, parcel.iteration
                if hop.ask(target, sender, number, parcel.progress, iteration):
                    hop.deliver(target, sender, number, iteration, parcel.update)
        if place == "given up":
            threading.Thread(target=self._wait, args=(source, edge[0], receiver)).start()
        with self._lock:
            self.failed[place] += 1
        raise self._error

    def _wait(self, source, sender, receiver):
        with hop_edges.at(self._cluster, sender):
            try:
                hop.collect(source, receiver, tf.float32)
            except tf.errors.CancelledError as error:
                with self._lock:
                    self.waits_ended.append(error.message)


def trained(cluster, topo, seconds=None, iterations=12, **options):
    """A strategy and a model after some iterations, its data, and how it began."""
    x, y, dataset = regression(WORKERS * iterations)
    strategy = recsync.HopStrategy(cluster, topo, check_invariants=True, **options)
    recsync.testing.set_compute_time(strategy, seconds)
    with strategy.scope():
        model = Recording()
        model.compile(keras.optimizers.SGD(RATE), "mse", steps_per_execution=2)
        model((np.zeros(1, np.int64), np.zeros((1, WIDTH), np.float32)))
    start = model.dense.kernel.numpy()[:, 0]
    model.fit(dataset, verbose=0)
    return strategy, model, x, y, start


@pytest.mark.cases("serial", "notify_ack")
@pytest.mark.parametrize(
    "options",
    [{}, {"order": "serial"}, {"max_iteration_gap": 2}, {"protocol": "notify_ack"}],
    ids=["parallel", "serial", "with tokens", "notify_ack"],
)
def test_with_calls_that_fail_training_is_decentralized_sgd_step_by_step(
    cluster, monkeypatch, caplog, options
):
    # Three in a row, and one by one.
    places = ["collected", "delivered", "once", None, "ended", None, None, "delivered", None]
    monkeypatch.setattr(loops, "RETRY_SECONDS", 0.01)
    failing = Failing(monkeypatch, places)
    topo = topology.ring(WORKERS)
    strategy, model, x, y, start = trained(cluster, topo, **options)
    assert min(failing.failed[place] for place in places if place) >= WORKERS
    warning = (
        "A call from worker:1 to worker:2 failed and is made again (3 of 4): "
        "Unable to parse request"
    )
    assert warning in [record.message for record in caplog.records]
    at, numbers, histories = recorded(strategy, model)
    steps = min(at)
    assert steps >= 3
    expected = simulate(topo, x, y, numbers, start, steps, options.get("order") == "serial")
    for worker in range(WORKERS):
        np.testing.assert_allclose(
            histories[worker][:steps], expected[:, worker], rtol=2e-5, atol=2e-5
        )


def test_a_loop_that_fails_before_its_first_call_is_begun_again(cluster, monkeypatch):
    monkeypatch.setattr(loops, "RETRY_SECONDS", 0.01)
    begun, failed = hop_edges.Edges._begun, set()

    def failing_once(edges, sender, receiver):
        if (sender, receiver) not in failed:
            failed.add((sender, receiver))
            raise tf.errors.UnavailableError(None, None, "Connection reset by peer")
        return begun(edges, sender, receiver)

    monkeypatch.setattr(hop_edges.Edges, "_begun", failing_once)
    topo = topology.ring(WORKERS)
    strategy, model, x, *_ = trained(cluster, topo)
    assert failed == set(topo.edges)
    assert sum(strategy.worker_steps(model)) == len(x)


def test_what_workers_are_told_of_each_other_is_told_again_when_a_call_has_failed(
    cluster, monkeypatch
):
    monkeypatch.setattr(loops, "RETRY_SECONDS", 0.01)
    strategy, model, *_ = trained(cluster, topology.ring(WORKERS), iterations=2)
    (exchange,) = strategy._synchronizer(model).exchanges
    made = collections.Counter()

    def failing_once(name):
        call = getattr(hop, name)

        def fails(handle, *arguments):
            key = name, tf.DeviceSpec.from_string(handle.device).task, *arguments
            made[key] += 1
            if made[key] == 1:
                raise tf.errors.UnavailableError(None, None, "Connection reset by peer")
            return call(handle, *arguments)

        monkeypatch.setattr(hop, name, fails)

    for name in ("hold", "set_neighbor", "interrupt"):
        failing_once(name)
    with exchange.pause():
        pass
    expected = {("hold", worker, held): 2 for worker in range(WORKERS) for held in (True, False)}
    # A pause does not wait for ever for those who stand still.
    assert wait_until(lambda: made == expected, 200), made
    assert sorted(exchange._tell_neighbors(0, 0, hop.FOREVER)) == [1, 3]
    # One that only its connection was lost of: what it kept would wait for others, and be kept.
    handle = exchange.handle(2)
    exchange.lose(2)

    def is_destroyed() -> bool:
        try:
            with hop_edges.at(cluster, 2):
                hop.state(handle)
        except tf.errors.NotFoundError:
            return True
        return False

    assert wait_until(is_destroyed, 200)
    assert made["interrupt", 2] == 2


def test_a_loop_goes_on_when_somebody_did_not_answer_for_a_while(cluster, monkeypatch):
    # Nobody else might begin it again: the others may have no steps left.
    monkeypatch.setattr(loops, "RETRY_SECONDS", 0.01)
    answers, silent = Exchange._answers, collections.Counter()

    def then_answers(exchange, worker):
        silent[worker] += 1
        return silent[worker] > 3 and answers(exchange, worker)

    begun = collections.Counter()
    start = hop_edges.Edges._run

    def counted(edges, sender, receiver):
        begun[sender, receiver] += 1
        start(edges, sender, receiver)

    monkeypatch.setattr(Exchange, "_answers", then_answers)
    monkeypatch.setattr(hop_edges.Edges, "_run", counted)
    failing = Failing(monkeypatch, ["once", "once", "once", None, None, None])
    topo = topology.ring(WORKERS)
    strategy, model, x, *_ = trained(cluster, topo)
    assert failing.failed["once"] >= WORKERS and min(silent.values()) > 3
    assert begun == dict.fromkeys(topo.edges, 1)
    assert sum(strategy.worker_steps(model)) == len(x)


def test_a_call_that_was_given_up_and_waits_still_hinders_nobody(cluster, monkeypatch):
    # As when a connection breaks, and the worker does not hear of it. The call that is given up
    # has begun to wait when it is made again, and there is nothing to carry yet.
    monkeypatch.setattr(loops, "RETRY_SECONDS", 0.1)
    failing = Failing(monkeypatch, ["given up", None, None], cluster=cluster)
    topo = topology.ring(WORKERS)
    strategy, model, x, y, start = trained(cluster, topo, seconds=0.3)
    assert failing.failed["given up"] >= WORKERS
    assert any("was cancelled" in message for message in failing.waits_ended)
    at, numbers, histories = recorded(strategy, model)
    expected = simulate(topo, x, y, numbers, start, min(at), False)
    for worker in range(WORKERS):
        np.testing.assert_allclose(
            histories[worker][: min(at)], expected[:, worker], rtol=2e-5, atol=2e-5
        )


@pytest.mark.parametrize("options", [{"staleness_bound": 2}, {"backup_workers": 1}])
def test_with_calls_that_fail_every_update_counts_once(cluster, monkeypatch, options):
    monkeypatch.setattr(loops, "RETRY_SECONDS", 0.01)
    places = ["delivered", "collected", "ended", None]
    failing = Failing(monkeypatch, places)
    strategy, model, *_ = trained(cluster, topology.ring(WORKERS), max_iteration_gap=4, **options)
    assert min(failing.failed[place] for place in places if place) >= WORKERS
    sent = come = 0
    for worker in range(WORKERS):
        with hop_edges.at(cluster, worker):
            state = hop.state(strategy._synchronizer(model).handle(worker))
        counts = dict(zip(COUNTS, state.counts.numpy().tolist(), strict=True))
        # Each was sent to two neighbors, once.
        assert 0 < counts["sent"] + counts["replaced"] <= 2 * counts["iterations"]
        sent += counts["sent"]
        come += sum(counts[name] for name in ("used", "unusable", "superseded", "queued"))
        come += int(tf.reduce_sum(state.declined))
    # The very last ones may not have got there.
    assert sent - 2 * WORKERS <= come <= sent


def test_a_call_that_fails_again_and_again_ends_training_with_its_error(cluster, monkeypatch):
    monkeypatch.setattr(loops, "RETRY_SECONDS", 0.01)
    _, model, *_ = trained(cluster, topology.ring(WORKERS), iterations=2)
    dataset = regression(WORKERS * 12)[2]
    for error, attempts in (
        (GARBLED, loops.ATTEMPTS),
        (tf.errors.UnavailableError(None, None, "Connection reset"), loops.ATTEMPTS),
        (tf.errors.InvalidArgumentError(None, None, "It does not fit"), 1),
        (tf.errors.FailedPreconditionError(None, None, "Further apart than it may be"), 1),
        (tf.errors.ResourceExhaustedError(None, None, "Too many"), 1),
    ):
        with monkeypatch.context() as patch:
            failing = Failing(patch, ["collected"], edges=[(1, 2)], error=error)
            with pytest.raises(type(error), match=error.message.partition("\n")[0]):
                model.fit(dataset, verbose=0)
        assert failing.calls[1, 2] == attempts, error


def test_the_wait_for_the_next_attempt_ends_with_training(cluster, monkeypatch):
    monkeypatch.setattr(loops, "RETRY_SECONDS", 600.0)
    # Without tokens nobody waits for what the receiver of an edge tells its sender.
    one_way = topology.from_edges(WORKERS, [(i, (i + 1) % WORKERS) for i in range(WORKERS)])
    failing = Failing(monkeypatch, ["once"], edges=[(1, 0)])
    trained(cluster, one_way, max_iteration_gap=None)
    assert failing.calls[1, 0] == 1
    assert "recsync_hop_1_0" not in [thread.name for thread in threading.enumerate()]
