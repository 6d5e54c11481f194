"""Programs that call `fit` again and again, as for each day, and go on where they were."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_recsync as recsync
from tf_recsync import checkpoint
from tf_recsync.callbacks import Checkpoint

BATCH, BATCHES = 2, 16
DAYS = ["2024-05-01", "2024-05-02", "2024-05-03"]


def make_model(strategy=None, **options):
    """Each batch moves the weight of its number by one, less as often as it was seen."""
    with (strategy or tf.distribute.get_strategy()).scope():
        model = keras.Sequential(
            [
                keras.Input((len(DAYS) * BATCHES,)),
                keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
            ]
        )
        model.compile(recsync.optimizers.SGD(1.0, **options), loss=lambda y, p: p)
    return model


def data_of(day):
    numbers = DAYS.index(day) * BATCHES + np.arange(BATCHES).repeat(BATCH)
    both = np.eye(len(DAYS) * BATCHES, dtype=np.float32)[numbers], np.zeros([len(numbers), 1])
    return tf.data.Dataset.from_tensor_slices(both).batch(BATCH)


def seen(model):
    """How often each batch was trained on, [days, batches]."""
    return -model.get_weights()[0].reshape(len(DAYS), BATCHES)


class Dies(keras.callbacks.Callback):
    """Ends a program in the middle of an epoch."""

    def __init__(self, day, epoch=0):
        super().__init__()
        self.day, self.epoch = day, epoch
        self.now = self.epochs = None

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.now, self.epochs) == (self.day, self.epoch) and batch >= 2:
            raise KeyboardInterrupt


def train(model, days, make, epochs=1, dies=None):
    """A program: `make` gives the callback of a day; returns the epochs that each day has had."""
    had = {}
    for day in days:
        callbacks = [make(day)]
        if dies is not None:
            dies.now = day
            callbacks.append(dies)
        history = model.fit(data_of(day), epochs=epochs, verbose=0, callbacks=callbacks)
        had[day] = history.epoch
    return had


def makers(folder, **options):
    """Ways to make the callbacks of a program, by name."""
    shared = Checkpoint(folder, **options)
    return {
        "one for all days": lambda day: shared,
        "one for each day": lambda day: Checkpoint(folder, **options),
        "one for each day, with its name": lambda day: Checkpoint(folder, part=day, **options),
        "a folder for each day": lambda day: Checkpoint(folder / day, **options),
    }


WAYS = list(makers("folder"))


@pytest.mark.parametrize("way", WAYS)
def test_all_days_are_trained_on_once_however_callbacks_are_made(tmp_path, way):
    model = make_model()
    assert train(model, DAYS, makers(tmp_path)[way]) == {day: [0] for day in DAYS}
    np.testing.assert_array_equal(seen(model), 1)


@pytest.mark.cases("a folder for each day")
@pytest.mark.parametrize("way", WAYS)
def test_a_program_that_died_goes_through_the_days_and_does_what_is_left(
    clusters, tmp_path, way, caplog
):
    cluster = clusters.get(workers=2, ps=2)
    options = {"every_steps": 1, "keep": None}
    strategy = recsync.AsyncStrategy(cluster)
    first = make_model(strategy)
    # So that workers are not through all of a day before Keras has counted its third batch.
    recsync.testing.set_compute_time(strategy, 0.3)
    with pytest.raises(KeyboardInterrupt):
        train(first, DAYS, makers(tmp_path, **options)[way], dies=Dies(DAYS[1]))
    second = make_model(recsync.AsyncStrategy(cluster))
    had = train(second, DAYS, makers(tmp_path, **options)[way])
    assert had == {DAYS[0]: [], DAYS[1]: [0], DAYS[2]: [0]}
    np.testing.assert_array_equal(seen(second), 1)
    assert caplog.text.count("This call of fit trains on nothing") == 1
    # All is done for another one.
    third = make_model()
    assert train(third, DAYS, makers(tmp_path, **options)[way]) == {day: [] for day in DAYS}
    np.testing.assert_array_equal(seen(third), 1)


def test_a_second_model_goes_on_with_the_callbacks_of_the_first(tmp_path):
    callbacks = {day: Checkpoint(tmp_path, part=day, every_steps=1, keep=None) for day in DAYS}
    with pytest.raises(KeyboardInterrupt):
        train(make_model(), DAYS, callbacks.get, dies=Dies(DAYS[1]))
    second = make_model()
    assert train(second, DAYS, callbacks.get) == {DAYS[0]: [], DAYS[1]: [0], DAYS[2]: [0]}
    np.testing.assert_array_equal(seen(second)[[0, 2]], 1)
    assert callbacks[DAYS[0]].restored is not None


def test_days_that_are_done_leave_weights_whose_averages_are_kept_as_they_were(tmp_path):
    options = {"use_ema": True, "ema_momentum": 0.5}
    make = makers(tmp_path, every_steps=1, keep=None)[WAYS[2]]
    with pytest.raises(KeyboardInterrupt):
        train(make_model(**options), DAYS, make, dies=Dies(DAYS[2]))
    saved, second = make_model(**options), make_model(**options)
    checkpoint.restore(checkpoint.latest(tmp_path), saved)
    assert train(second, DAYS[:2], make) == {DAYS[0]: [], DAYS[1]: []}
    np.testing.assert_array_equal(seen(second), seen(saved))
    # What follows is averaged: each batch of the last day counts less than 1.
    assert train(second, DAYS[2:], make) == {DAYS[2]: [0]}
    assert 0 < seen(second)[2, -1] < 1


@pytest.mark.full
def test_each_day_may_have_a_program_of_its_own_that_is_started_again(tmp_path):
    def program(day, dies=None):
        model = make_model()
        with pytest.raises(KeyboardInterrupt) if dies else contextlib.nullcontext():
            make = makers(tmp_path, every_steps=1, keep=None)[WAYS[2]]
            return seen(model), train(model, [day], make, epochs=2, dies=dies), seen(model)
        return None

    assert program(DAYS[0])[1] == {DAYS[0]: [0, 1]}
    program(DAYS[1], Dies(DAYS[1], epoch=1))
    before, had, after = program(DAYS[1])
    np.testing.assert_array_equal(before, 0)
    assert had == {DAYS[1]: [1]}  # Without a strategy the epoch begins anew, see `Checkpoint`.
    np.testing.assert_array_equal(after[0], 2)
    assert program(DAYS[2])[1] == {DAYS[2]: [0, 1]}
    found = checkpoint.open(checkpoint.latest(tmp_path)).metadata
    assert (found["part"], found["done_parts"]) == (DAYS[2], DAYS[:2])
    for day in DAYS:  # None of them has anything left.
        _, had, after = program(day)
        assert had == {day: []}
        np.testing.assert_array_equal(after[2], 2)


def test_a_part_that_can_t_be_is_refused(tmp_path):
    for part in ("", 3, b"day"):
        with pytest.raises(ValueError, match="part must be a name or None, not"):
            Checkpoint(tmp_path, part=part)
    for name in ("part", "done_parts"):
        with pytest.raises(ValueError, match=f"metadata can't have '{name}'"):
            Checkpoint(tmp_path, metadata={name: 1})


def test_checkpoints_in_folders_with_other_names_are_spoken_of(tmp_path, caplog):
    model = make_model()
    checkpoint.save(tmp_path / "2024-05-01", model)
    checkpoint.save(tmp_path / "001", model)
    assert checkpoint.latest(tmp_path) is None
    assert "has checkpoints in 001, 2024-05-01, but" in caplog.text
    assert "names are numbers without leading zeros" in caplog.text
    checkpoint.save(tmp_path / "1", model)
    assert checkpoint.latest(tmp_path) == str(tmp_path / "1")
