"""AsyncStrategy when things go wrong: refused models, errors in user code, lost servers."""

import gc
import signal
import sys
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    IDS,
    LOSS,
    ROWS,
    AtBatch,
    OwnStep,
    clicks,
    compiled,
    compute_time,
    dataset,
    functional,
    held_back,
    mean_output,
    slope_model,
    steps_of,
    wait_until,
)

import tf_recsync as recsync
from tf_recsync import callbacks as callbacks_
from tf_recsync.optimizers import SGD
from tf_recsync.staleness import InversePower
from tf_recsync.strategies import comebacks, registered_dataset


@pytest.fixture
def two(clusters):
    return clusters.strategy(workers=2, ps=2)


@pytest.fixture
def mortal(two):
    """For tests that kill servers; a worker that the last one killed is started again."""
    return two


def check_trains(strategy):
    """The strategy still works, on all its workers."""
    model = compiled(strategy, slope_model, lambda: SGD(1.0), mean_output)
    ones = np.ones((30, 1))
    model.fit(ones, ones, 1, verbose=0)
    assert model.get_weights()[0] == -30


# What can't work is refused, with the reason.


def test_arguments_of_the_strategy_are_checked(two):
    lacking = recsync.Cluster(
        {"worker": ["127.0.0.1:9"]}, chief_address="127.0.0.1:9", bind_address="127.0.0.1"
    )
    with pytest.raises(ValueError, match="at least one worker and one ps.*ps=0"):
        recsync.AsyncStrategy(lacking)
    for wrong in (None, "localhost:2222", two.cluster.resolver):
        with pytest.raises(ValueError, match="cluster must be a LocalCluster"):
            recsync.AsyncStrategy(wrong)
    for wrong in (0, -1.0, "soon", None):
        with pytest.raises(ValueError, match="worker_timeout"):
            recsync.AsyncStrategy(two.cluster, worker_timeout=wrong)
    for wrong in (0, -1.0, "soon"):
        with pytest.raises(ValueError, match="silence_timeout must be positive, in seconds"):
            recsync.AsyncStrategy(two.cluster, silence_timeout=wrong)
    for wrong in ("ignore", None, True):
        with pytest.raises(ValueError, match='on_batch_lost must be "retry" or "drop", not'):
            recsync.AsyncStrategy(two.cluster, on_batch_lost=wrong)
    for wrong in (-0.1, "long"):
        with pytest.raises(ValueError, match="seconds must be at least 0"):
            recsync.testing.set_compute_time(two, wrong)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: "adam", "tf_recsync.optimizers.*not keras.*Adam"),
        (lambda: keras.optimizers.Adagrad(0.1), "tf_recsync.optimizers.*not keras.*Adagrad"),
        (lambda: SGD(0.1, use_ema=True), "use_ema"),
        (lambda: SGD(0.1, loss_scale_factor=2.0), "loss_scale_factor"),
        (
            lambda: keras.optimizers.LossScaleOptimizer(SGD(0.1)),
            r"mixed_float16: use mixed_bfloat16.* or compile\(..., auto_scale_loss=False\)",
        ),
        (
            lambda: SGD(0.1, gradient_accumulation_steps=3, staleness=InversePower()),
            "gradient_accumulation_steps and staleness .*=3, staleness=InversePower",
        ),
    ],
)
def test_optimizers_that_can_not_work_are_refused(two, make, message):
    model = compiled(two, make=make)
    with pytest.raises(ValueError, match=message):
        model.fit(dataset(), verbose=0)


def test_moving_averages_that_all_workers_move_too_far_are_named_once(two, caplog):
    def build():
        layers = [
            keras.layers.BatchNormalization(momentum=0.6, name="quick"),
            keras.layers.BatchNormalization(momentum=0.6, name="frozen", trainable=False),
            keras.layers.BatchNormalization(momentum=0.9, name="slow"),
            keras.layers.Dense(1),
        ]
        return keras.Sequential([keras.Input((1,)), *layers])

    model, ones = compiled(two, build, lambda: SGD(0.1), "mse"), np.ones((8, 1), np.float32)
    for _ in range(2):
        model.fit(ones, ones, batch_size=4, verbose=0)
    named = [record.getMessage() for record in caplog.records if "momentum" in record.msg]
    (told,) = named
    assert "Layer quick has momentum=0.6, but each of 2 workers" in told
    assert "by 80 % of the difference" in told and "With momentum=0.8 they" in told


def test_models_and_optimizers_from_outside_of_the_scope_are_refused(two):
    outside = functional()
    with two.scope():
        outside.compile(SGD(0.1), LOSS)
        with pytest.raises(ValueError, match="model clicks was not made inside.*scope"):
            two.attach(outside)
    with pytest.raises(ValueError, match="sgd was made in .* fit, of a model that was made in the"):
        outside.fit(dataset(), verbose=0)
    optimizer = SGD(0.1)
    with pytest.raises(ValueError, match="optimizer sgd was not made inside.*scope"):
        compiled(two, make=lambda: optimizer).fit(dataset(), verbose=0)


def test_layers_from_outside_of_the_scope_are_refused(two):
    outside = keras.layers.Dense(1, name="outside")
    outside.build((None, 2))
    model = compiled(two, lambda: keras.Sequential([keras.Input((2,)), outside]))
    ones = np.ones((4, 2))
    with pytest.raises(ValueError, match="variable outside/kernel of model .* not made inside"):
        model.fit(ones, ones[:, :1], verbose=0)
    np.testing.assert_array_equal(outside.bias, [0])


def test_datasets_of_single_examples_are_refused(two):
    model = compiled(two, slope_model, lambda: SGD(1.0), mean_output)
    single = tf.data.Dataset.from_tensor_slices((np.ones((30, 1)), np.ones(30)))
    with pytest.raises(ValueError, match=r"must have batches.*shape=\(\).*call dataset.batch"):
        model.fit(single, verbose=0)
    model.fit(single.batch(1), verbose=0)
    assert model.get_weights()[0] == -30


def test_options_of_models_that_can_not_work_are_refused(two):
    constrained = compiled(two, lambda: functional(embeddings_constraint="non_neg"))
    with pytest.raises(ValueError, match="constraint of table/embeddings"):
        constrained.fit(dataset(), verbose=0)
    with pytest.raises(ValueError, match="run_eagerly"):
        compiled(two, run_eagerly=True).fit(dataset(), verbose=0)
    message = "steps_per_execution must be an integer of at least 1, got 'auto'"
    with pytest.raises(ValueError, match=message):
        compiled(two, steps_per_execution="auto").fit(dataset(), verbose=0)
    with pytest.raises(ValueError, match="jit_compile=True can't be used.*XLA"):
        compiled(two, jit_compile=True).fit(dataset(), verbose=0)
    later = compiled(two)
    later.jit_compile = True
    with pytest.raises(ValueError, match="jit_compile=True can't be used.*XLA"):
        later.fit(dataset(), verbose=0)
    with pytest.raises(ValueError, match="float32.*table/embeddings.*float16"):
        compiled(two, lambda: functional(dtype="float16")).fit(dataset(), verbose=0)


@pytest.mark.parametrize("used_before", [False, True])
def test_training_on_single_batches_is_refused(two, used_before):
    model = compiled(two)
    if used_before:
        model.fit(dataset(64), verbose=0)
    weights = model.get_weights()
    with pytest.raises(ValueError, match="train_on_batch"):
        model.train_on_batch(*clicks(16))
    for before, after in zip(weights, model.get_weights(), strict=True):
        np.testing.assert_array_equal(before, after)


class ExtraLogs(OwnStep):
    def finish(self, loss, y, predictions):
        return {**super().finish(loss, y, predictions), "losses": tf.stack([loss, loss])}


class NoGradients(OwnStep):
    def train_step(self, data):
        x, y = data
        return self.finish(self.compute_loss(x, y, self(x)), y, self(x))


class Assigns(OwnStep):
    def train_step(self, data):
        logs = super().train_step(data)
        self.out.bias.assign(self.out.bias * 0.5)
        return logs


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (ExtraLogs, r"it returned \['losses'\].*keras.metrics.Metric"),
        (NoGradients, "NoGradients.train_step applied no gradients.*apply_gradients"),
        (Assigns, "trainable variable .*bias is assigned"),
    ],
)
def test_train_steps_that_can_not_work_are_refused(two, build, message):
    with pytest.raises(ValueError, match=message):
        compiled(two, build).fit(dataset(), verbose=0)


# Errors in user code reach the user.


def test_an_id_out_of_range_is_an_error_of_fit(two):
    ids, labels = clicks(320)
    ids[200, IDS - 1] = ROWS
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"{ROWS}"):
        compiled(two).fit(ids, labels, 16, verbose=0)
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"{ROWS}"):
        compiled(two).predict(ids, 16, verbose=0)
    check_trains(two)


def test_an_error_of_the_dataset_is_an_error_of_fit(two):
    def check(ids, label):
        tf.debugging.assert_less(ids[0], 5, message="the eleventh example is odd")
        return ids, label

    ids, labels = clicks(320)
    ids[:, 0] = 0
    ids[200, 0] = 7
    broken = tf.data.Dataset.from_tensor_slices((ids, labels)).map(check).batch(8)
    model = compiled(two)
    for call in (model.fit, model.evaluate):
        with pytest.raises(tf.errors.InvalidArgumentError, match="the eleventh example is odd"):
            call(broken, verbose=0)
    check_trains(two)


def test_an_error_in_a_callback_ends_fit_and_the_next_fit_works(two):
    def fail():
        raise KeyError("a user's mistake")

    model = compiled(two, slope_model, lambda: SGD(1.0), mean_output)
    ones = np.ones((400, 1))
    with compute_time(two, 0.02), pytest.raises(KeyError, match="a user's mistake"):
        model.fit(ones, ones, 1, callbacks=[AtBatch(3, fail)], verbose=0)
    check_trains(two)


@pytest.mark.parametrize("steps_per_epoch", [None, 20])
def test_the_pipeline_of_a_pass_that_was_left_ends(two, steps_per_epoch):
    left = threading.Event()

    def endless():
        try:
            while True:
                yield np.ones((1, 1), np.float32), np.ones((1, 1), np.float32)
        finally:
            left.set()

    spec = tf.TensorSpec((1, 1))
    ones = tf.data.Dataset.from_generator(endless, output_signature=(spec, spec))
    model = compiled(two, slope_model, lambda: SGD(1.0), mean_output)
    stop = AtBatch(10, lambda: setattr(model, "stop_training", True))
    model.fit(ones, epochs=2, steps_per_epoch=steps_per_epoch, callbacks=[stop], verbose=0)
    deadline = time.monotonic() + 60
    while not (left.is_set() and two.cluster.data_services.tasks() == 0):
        assert time.monotonic() < deadline, two.cluster.data_services.tasks()
        gc.collect()  # Keras's iterator is part of a cycle.
        time.sleep(0.1)


# Servers die.


def long_fit(strategy, steps, seconds, callbacks, is_ready=None):
    """Trains `steps` steps of `seconds` each; returns how many were done.

    Every step takes exactly 1 off the only weight. What was not done counts as lost; what was lost
    is done again, if the strategy shall.
    The second half of the batches is made when `is_ready()`; by default, when a worker is lost.
    """
    model = compiled(strategy, slope_model, lambda: SGD(1.0), mean_output)
    ones = tf.data.Dataset.from_tensors((tf.ones([1, 1]), tf.ones([1, 1]))).repeat(steps)
    ones = held_back(ones, steps // 2, is_ready or (lambda: strategy.losses(model).workers))
    with compute_time(strategy, seconds):
        model.fit(ones, callbacks=callbacks, verbose=0)
    assert model.get_weights()[0] == -steps_of(model)
    losses = strategy.losses(model)
    # The last step of a lost worker may have reached the servers, and counts as lost all the same.
    least = steps - losses.batches + losses.repeated
    assert least <= steps_of(model) <= least + losses.steps
    assert losses.repeated <= losses.retried
    assert losses.workers == 1
    assert losses.steps <= 1  # None if it had done all of its call.
    return steps_of(model)


LOST = 6  # A worker holds few batches: the one in its step, and those fetched ahead.


@pytest.mark.parametrize("fails_again", [False, True], ids=["at once", "when it begins again"])
def test_a_worker_that_is_killed_and_restarted_takes_part_again(
    mortal, caplog, monkeypatch, fails_again
):
    cluster = mortal.cluster
    restarting = []

    def kill():
        cluster.kill("worker", 1)
        thread = threading.Thread(target=cluster.restart, args=("worker", 1))
        thread.start()
        restarting.append(thread)

    iterator = registered_dataset.RegisteredDataset.iterator
    failures = []

    def failing_once(registered, *part):
        if fails_again and restarting and not failures:
            failures.append(1)
            raise tf.errors.UnavailableError(None, None, "connection reset")
        return iterator(registered, *part)

    monkeypatch.setattr(registered_dataset.RegisteredDataset, "iterator", failing_once)
    told = []

    def tell(worker, event):
        assert threading.current_thread() is threading.main_thread()
        told.append((event, worker, state_of(mortal, worker)))

    events = callbacks_.WorkerEvents(
        on_worker_lost=lambda worker: tell(worker, "lost"),
        on_worker_back=lambda worker: tell(worker, "back"),
    )
    callbacks = [AtBatch(10, kill), events]
    done = long_fit(mortal, 80, 0.02, callbacks, lambda: "worker:1 is back" in caplog.text)
    restarting[0].join()
    assert len(failures) == fails_again
    assert done >= 80  # What was lost is done at the end.
    assert caplog.text.count("worker:1 was lost") == 1
    assert "worker:1 is back" in caplog.text
    assert "worker:0" not in caplog.text
    (lost, gone, is_gone), (back, returned, state) = told
    assert (lost, gone, back, returned) == ("lost", 1, "back", 1)
    # It may be on its way by the time that somebody is told.
    assert is_gone in ("lost", "readmitting", "joining")
    assert state in ("ready", "working", "idle", "done")
    check_trains(mortal)


def state_of(strategy, worker):
    (state,) = (m.state for m in strategy.members() if (m.job, m.index) == ("worker", worker))
    return state.value


@pytest.mark.parametrize("workers", [[1], [0, 1]], ids=["one of two", "all"])
def test_what_is_raised_when_a_worker_is_lost_ends_training(mortal, workers):
    told = []

    def end(worker):
        told.append(worker)
        raise ValueError(f"not without worker {worker}")

    def kill():
        for worker in workers:
            mortal.cluster.kill("worker", worker)

    model = compiled(mortal, slope_model, lambda: SGD(1.0), mean_output)
    ones = tf.data.Dataset.from_tensors((tf.ones([1, 1]), tf.ones([1, 1]))).repeat()
    with pytest.raises(ValueError, match="not without worker"), compute_time(mortal, 0.02):
        model.fit(
            ones,
            steps_per_epoch=100_000,
            callbacks=[AtBatch(10, kill), callbacks_.WorkerEvents(on_worker_lost=end)],
            verbose=0,
        )
    assert len(told) == 1
    assert state_of(mortal, *told) == "lost"
    assert {m.job for m in mortal.members()} == {"worker", "ps"}


@pytest.mark.full
def test_variables_can_be_read_when_a_worker_is_lost_while_another_reads(mortal):
    """As to save them: steps are held meanwhile, in which the loss is noticed."""
    seen = []

    class Reads(AtBatch):
        def on_train_batch_end(self, batch, logs=None):
            super().on_train_batch_end(batch, logs)
            seen.append(self.model.get_weights())

    model = compiled(mortal, slope_model, lambda: SGD(1.0), mean_output)
    ones = tf.data.Dataset.from_tensors((tf.ones([1, 1]), tf.ones([1, 1]))).repeat(60)
    ones = held_back(ones, 30, lambda: mortal.losses(model).workers, each=0.5)
    events = callbacks_.WorkerEvents(on_worker_lost=lambda _: seen.append(model.get_weights()))
    kill = Reads(10, lambda: mortal.cluster.kill("worker", 1))
    with compute_time(mortal, 0.02):
        model.fit(ones, callbacks=[kill, events], verbose=0)
    assert mortal.losses(model).workers == 1
    assert len(seen) > 20


def test_worker_events_are_functions():
    with pytest.raises(ValueError, match="on_worker_back must be a function of a worker's index"):
        callbacks_.WorkerEvents(on_worker_back=[])


def test_fit_completes_on_the_other_workers_when_one_stays_away(mortal, caplog):
    strategy = recsync.AsyncStrategy(mortal.cluster, on_batch_lost="drop")
    kill = AtBatch(10, lambda: mortal.cluster.kill("worker", 1))
    done = long_fit(strategy, 60, 0.02, [kill])
    assert 60 - LOST <= done <= 60
    # Before, one that the last test had killed may have come back.
    _, lost, afterwards = caplog.text.partition("worker:1 was lost in the middle of a pass")
    assert lost
    assert "is back" not in afterwards


def test_nobody_waits_for_a_worker_that_has_died_unseen_when_another_one_is_back(
    mortal, monkeypatch
):
    cluster, take_in = mortal.cluster, comebacks.Comebacks._take_in

    def kill_then_take_in(self, server):
        if cluster.is_alive("worker", 0):
            cluster.kill("worker", 0)
        return take_in(self, server)

    monkeypatch.setattr(comebacks, "_READMIT_SECONDS", 1000.0)
    monkeypatch.setattr(comebacks.Comebacks, "_take_in", kill_then_take_in)
    model = compiled(mortal, slope_model, lambda: SGD(1.0), mean_output)
    ones = np.ones((8, 1))
    cluster.kill("worker", 1)
    model.fit(ones, ones, 1, verbose=0)
    cluster.restart("worker", 1)
    model.fit(ones, ones, 1, verbose=0)
    assert not cluster.is_alive("worker", 0)
    assert mortal.worker_steps(model)[1] > 0


def test_training_ends_at_once_when_a_worker_cannot_begin(mortal, monkeypatch):
    model = compiled(mortal)
    iterator = registered_dataset.RegisteredDataset.iterator

    def failing(registered, *part):
        if "worker_1" in threading.current_thread().name:
            raise tf.errors.InternalError(None, None, "no memory")
        return iterator(registered, *part)

    monkeypatch.setattr(registered_dataset.RegisteredDataset, "iterator", failing)
    with pytest.raises(tf.errors.InternalError, match="no memory"):
        model.fit(dataset(), verbose=0)
    # The other worker, too, has left the pass.
    threads = model.train_function._run._threads
    assert wait_until(lambda: not any(thread.is_alive() for thread in threads), 100.0)
    monkeypatch.undo()
    model.fit(dataset(), verbose=0)


def test_workers_stop_when_fit_is_interrupted_while_it_waits_for_them(mortal):
    model = compiled(mortal, slope_model, lambda: SGD(1.0), mean_output)
    ones = tf.data.Dataset.from_tensors((tf.ones([2, 1]), tf.ones([2, 1]))).repeat(1000)
    main = threading.main_thread().ident

    def names(frame):
        while frame is not None:
            yield frame.f_code.co_name
            frame = frame.f_back

    def is_in_step():
        states = [slot.state for slot in model.train_function._run.slots]
        return any(state is not None and state._has_begun for state in states)

    def interrupt():
        # A step takes seconds. Elsewhere, an interruption would be Keras's matter.
        while not ("_wait_until" in names(sys._current_frames()[main]) and is_in_step()):
            time.sleep(0.01)
        signal.pthread_kill(main, signal.SIGINT)

    # Who starts tests in the background may have them ignore it.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with compute_time(mortal, 5.0), pytest.raises(KeyboardInterrupt) as kept:
            threading.Thread(target=interrupt).start()
            model.fit(ones, verbose=0)
    finally:
        signal.signal(signal.SIGINT, handler)
    # The traceback keeps the pass alive, and there is data for minutes.
    assert kept.traceback
    threads = model.train_function._run._threads
    assert wait_until(lambda: not any(thread.is_alive() for thread in threads), 120.0)
    assert -1000 < model.get_weights()[0].item() < 0


def test_training_fails_when_no_worker_is_left(mortal):
    strategy = recsync.AsyncStrategy(mortal.cluster, worker_timeout=1.0, silence_timeout=60.0)

    def kill():
        killed.append(time.monotonic())
        mortal.cluster.kill("worker", 0)
        mortal.cluster.kill("worker", 1)

    killed = []
    message = r"for 1 s \(worker_timeout\): worker:0 is lost.*worker:1 is lost"
    with pytest.raises(RuntimeError, match=message):
        long_fit(strategy, 20_000, 0.05, [AtBatch(10, kill)], lambda: True)
    assert time.monotonic() - killed[0] > 1.0


def test_training_fails_when_a_parameter_server_is_lost(clusters, mortal):
    kill = AtBatch(10, lambda: mortal.cluster.kill("ps", 0))
    with pytest.raises(RuntimeError, match="parameter server ps:0 was lost.*checkpoint"):
        long_fit(mortal, 20_000, 0.05, [kill], lambda: True)
    clusters.close()


# What a callback raises.

STRATEGIES = {
    "async": recsync.AsyncStrategy,
    "GBA": lambda cluster: recsync.GBAStrategy(cluster, 2, 1),
    "ShadowSync": lambda cluster: recsync.ShadowSyncStrategy(cluster, recsync.EASGD(0.3)),
    "Hop": lambda cluster: recsync.HopStrategy(cluster, recsync.topology.ring(2)),
}


@pytest.mark.cases("async", "Hop")
@pytest.mark.parametrize("kind", STRATEGIES)
def test_workers_stop_when_a_callback_raises_though_the_traceback_is_kept(clusters, kind):
    strategy = STRATEGIES[kind](clusters.get(workers=2, ps=2))
    model = compiled(strategy, slope_model, lambda: SGD(1.0), mean_output)

    def fail():
        raise KeyError("as of a user's mistake")

    ones = np.ones((20_480, 1))  # For 200 seconds, and longer on a busy machine.
    with compute_time(strategy, 0.02), pytest.raises(KeyError) as kept:
        model.fit(ones, ones, 1, callbacks=[AtBatch(5, fail)], verbose=0)

    def at_work():
        names = (thread.name for thread in threading.enumerate())
        return [n for n in names if n.startswith(("recsync_worker_", "recsync_hop_"))]

    # What synchronizes workers beside their steps, too.
    assert wait_until(lambda: not at_work(), 60.0), at_work()
    assert sum(strategy.worker_steps(model)) < 10_000
    assert kept.traceback  # As a notebook does.
