"""The training modes when workers die, steps fail and passes are left early."""

import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    IDS,
    ROWS,
    AtBatch,
    clicks,
    compiled,
    compute_time,
    held_back,
    mean_output,
    steps_of,
)

import tf_recsync as recsync
from tf_recsync.optimizers import SGD

MAKERS = {
    "sync": recsync.SyncStrategy,
    "BSP": lambda c, **k: recsync.BSPStrategy(c, 4, 2, **k),
    "backup workers": lambda c, **k: recsync.BackupWorkersStrategy(c, 1, **k),
    "bounded staleness": lambda c, **k: recsync.BoundedStalenessStrategy(c, 1, **k),
    "GBA": lambda c, **k: recsync.GBAStrategy(c, 4, 2, staleness_tolerance=1, **k),
}
LOST = 8  # A worker holds few batches: the one in its step, and those fetched ahead.


@pytest.fixture
def mortal(clusters):
    """A cluster of processes; a worker that the last test killed is started again."""
    return clusters.get(workers=2, ps=2)


def slopes_model() -> keras.Model:
    """A weight on each of two servers; with `mean_output` each one's gradient is exactly 1."""
    inputs = keras.Input((1,))
    outputs = [
        keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", name=name)(inputs)
        for name in ("a", "b")
    ]
    return keras.Model(inputs, keras.layers.Add()(outputs))


def model_of(strategy, **kwargs) -> keras.Model:
    model = compiled(strategy, slopes_model, lambda: SGD(1.0), mean_output, **kwargs)
    devices = {v._value.device for v in model.trainable_variables}
    assert len(devices) == 2
    return model


def ones(steps: int | None) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors((tf.ones([2, 1]), tf.ones([2, 1]))).repeat(steps)


def check_slopes(model, excluded=False, mode=None):
    """Each server has done the same steps, each once, of gradients that were all 1.

    Args:
        model: of `model_of`.
        excluded: whether pushes may have been left out.
        mode: of a model that has trained on what does not fill its global batches; None: it has
            not.
    """
    slopes = np.concatenate([w.ravel() for w in model.get_weights()])
    pushes = model.train_function.aggregations[0]
    if mode is not None and mode.uses_buffers and not excluded:
        # What had reached one server of a lost worker's push counts there alone.
        np.testing.assert_allclose(slopes.sum(), -pushes.report().included / mode.capacity, 1e-6)
    elif excluded:
        assert (slopes <= 0).all()
        assert (slopes >= -steps_of(model) - 1).all()  # A push may reach one of two servers.
    else:
        np.testing.assert_array_equal(slopes, [-steps_of(model)] * 2)


def check_trains(strategy, model=None):
    """The strategy still works, on all its workers.

    Args:
        strategy: the strategy.
        model: trained before, without leaving anything in buffers; a new one by default.
    """
    model = model or model_of(strategy)
    before = steps_of(model)
    model.fit(ones(12), verbose=0)
    check_slopes(model, excluded=True)
    m = strategy.mode.capacity
    assert 12 // strategy.mode.repeats <= steps_of(model) - before <= -(-12 // m)


@pytest.mark.cases("BSP", "bounded staleness")
@pytest.mark.parametrize("mode", MAKERS)
def test_the_others_go_on_when_a_worker_is_killed(mortal, mode, caplog):
    strategy = MAKERS[mode](mortal)
    model = model_of(strategy)
    with compute_time(strategy, 0.03):
        kill = AtBatch(8, lambda: mortal.kill("worker", 1))
        data = held_back(ones(60), 30, lambda: strategy.losses(model).workers)
        model.fit(data, callbacks=[kill], verbose=0)
    assert "worker:1 was lost" in caplog.text
    assert "worker:0" not in caplog.text
    report = strategy.aggregation(model)
    losses, m = strategy.losses(model), strategy.mode.capacity
    assert losses.workers == 1
    assert losses.steps <= 1  # None if it had done all of its call.
    assert losses.batches == 0  # Others have done what was lost, and what nobody knew of.
    # None if it had nothing to do, as this process was late to kill it.
    assert losses.retried <= LOST + losses.repeated
    done = 60 + losses.repeated
    # With buffers a lost push may have reached one server and not the other.
    excluded = mode in ("BSP", "GBA", "bounded staleness")
    # What is left after the loss may not fill the last global batch of a step with two batches.
    check_slopes(model, excluded, strategy.mode)
    if mode == "sync":  # Each server has got each batch.
        assert (np.concatenate(model.get_weights()) * m <= -60 * (1 - 1e-6)).all()
    if mode == "backup workers":  # A step takes one or two batches.
        assert 30 <= steps_of(model) <= done
    else:
        assert 60 // m <= steps_of(model) <= done // m + 1
    if mode in ("sync", "backup workers"):
        assert report.reissued + report.spent <= strategy.mode.repeats
        assert report.lost == 0
    else:
        assert report.lost <= 1
        assert report.reissued == 0
    counted = report.included + report.excluded + report.late
    if mode != "bounded staleness":
        assert 2 * 60 <= counted <= 2 * (done + losses.steps)


@pytest.mark.cases("bounded staleness")
@pytest.mark.parametrize("mode", ["sync", "bounded staleness"])
def test_a_worker_that_comes_back_takes_part_again(mortal, mode, caplog):
    strategy = MAKERS[mode](mortal)
    model = model_of(strategy)
    restarting = []

    def kill():
        mortal.kill("worker", 1)
        thread = threading.Thread(target=mortal.restart, args=("worker", 1))
        thread.start()
        restarting.append(thread)
        caplog.clear()  # A test before may have lost it, too.

    clocks = []

    def look(batch, logs):
        if restarting and "worker:1 is back" in caplog.text:
            state = model.train_function.aggregations[0]._tokens.state()
            clocks.append(state.clocks[1])
            if clocks[-1] > clocks[0] + 5 or len(clocks) > 10_000:
                model.stop_training = True

    after = keras.callbacks.LambdaCallback(on_train_batch_end=look)
    with compute_time(strategy, 0.02):
        model.fit(ones(None), steps_per_epoch=10**6, callbacks=[AtBatch(8, kill), after], verbose=0)
    restarting[0].join()
    assert clocks[-1] > clocks[0] + 5
    # What the pass had pushed when it was stopped may not fill a global batch.
    check_slopes(model, mode == "bounded staleness", strategy.mode)
    check_trains(strategy)


@pytest.mark.cases("backup workers", "GBA")
@pytest.mark.parametrize("mode", MAKERS)
def test_training_fails_when_no_worker_is_left(mortal, mode):
    strategy = MAKERS[mode](mortal, worker_timeout=1.0, silence_timeout=60.0)
    killed = []

    def kill():
        killed.append(time.monotonic())
        mortal.kill("worker", 0)
        mortal.kill("worker", 1)

    model = model_of(strategy)
    message = r"for 1 s \(worker_timeout\): worker:0 is lost.*worker:1 is lost"
    with compute_time(strategy, 0.05), pytest.raises(RuntimeError, match=message):
        model.fit(ones(20_000), callbacks=[AtBatch(8, kill)], verbose=0)
    assert time.monotonic() - killed[0] > 1.0


# Nobody dies.


@pytest.fixture
def three(clusters):
    return clusters.get(workers=3, ps=2)


@pytest.mark.cases("sync", "GBA")
@pytest.mark.parametrize("mode", MAKERS)
def test_a_pass_that_is_stopped_ends_with_all_that_was_pushed(three, mode):
    strategy = MAKERS[mode](three)
    model = model_of(strategy)

    def stop():
        model.stop_training = True

    slowdown = recsync.testing.SlowWorkers(5.0, [2])
    recsync.testing.set_compute_time(strategy, 0.02, slowdown)
    # This process may be late to stop it; all of them would take more than a minute.
    model.fit(ones(8000), callbacks=[AtBatch(7, stop)], verbose=0)
    check_slopes(model, mode == "GBA", strategy.mode)
    assert steps_of(model) < 2000
    slopes = model.get_weights()
    time.sleep(0.3)
    np.testing.assert_array_equal(model.get_weights(), slopes)
    check_trains(strategy, model)


@pytest.mark.cases("GBA")
@pytest.mark.parametrize("mode", ["sync", "bounded staleness", "GBA"])
def test_training_goes_on_after_it_was_interrupted(three, mode):
    strategy = MAKERS[mode](three)
    model = model_of(strategy)

    def interrupt():
        raise KeyboardInterrupt

    with compute_time(strategy, 0.05):
        with pytest.raises(KeyboardInterrupt) as kept:
            model.fit(ones(100), callbacks=[AtBatch(4, interrupt)], verbose=0)
        # The traceback, which a notebook keeps, keeps the pass alive.
        assert kept.traceback
        model.fit(ones(9), callbacks=[], verbose=0)
    assert steps_of(model) >= 9 // strategy.mode.capacity
    check_slopes(model, excluded=mode == "GBA")
    report = strategy.aggregation(model)
    if mode == "sync":  # Of each server's pushes, all are applied or counted as dropped.
        assert report.included == 2 * 3 * steps_of(model) + report.abandoned


@pytest.mark.cases("bounded staleness")
@pytest.mark.parametrize("mode", ["sync", "backup workers", "bounded staleness"])
def test_an_error_of_one_worker_ends_the_waits_of_the_others(three, mode):
    strategy = MAKERS[mode](three)
    ids, labels = clicks(240)
    ids[100, IDS - 1] = ROWS
    model = compiled(strategy)
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"{ROWS}"):
        model.fit(ids, labels, 8, verbose=0)
    before = steps_of(model)
    model.fit(*clicks(96), 8, verbose=0)
    m, r = strategy.mode.capacity, strategy.mode.repeats
    assert 12 // r <= steps_of(model) - before <= -(-12 // m)


@pytest.mark.cases("BSP-3", "bounded staleness-3", "GBA-1")
@pytest.mark.parametrize("per_call", [1, 3])
@pytest.mark.parametrize("mode", MAKERS)
def test_epochs_need_not_be_a_multiple_of_anything(three, mode, per_call):
    strategy = MAKERS[mode](three)
    model = model_of(strategy, steps_per_execution=per_call)
    seen = []
    count = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: seen.append(steps_of(model)))
    model.fit(ones(None), epochs=3, steps_per_epoch=7, callbacks=[count], verbose=0)
    m, r = strategy.mode.capacity, strategy.mode.repeats
    per_epoch = np.diff([0, *seen])
    # A step takes m to r batches; what is left at the end of an epoch makes one more.
    assert (per_epoch >= -(-7 // r)).all(), per_epoch
    assert (per_epoch <= -(-7 // m)).all(), per_epoch
    check_slopes(model, mode == "GBA", strategy.mode)
    model.fit(ones(11), verbose=0)
    assert steps_of(model) - seen[-1] >= -(-11 // r)
    check_slopes(model, mode == "GBA", strategy.mode)
