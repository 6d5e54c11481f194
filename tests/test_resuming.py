"""Programs that go on where an earlier one was in its data."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from test_checkpoint_deltas import Waiting

import tf_recsync as recsync
from tf_recsync import checkpoint
from tf_recsync.callbacks import Checkpoint
from tf_recsync.strategies.data_position import DataPosition

BATCHES, EPOCHS = 60, 3


@pytest.fixture
def cluster(clusters):
    return clusters.get(workers=2, ps=2)


class Stop(keras.callbacks.Callback):
    """As if the program died at a batch of an epoch."""

    def __init__(self, epoch, batch):
        super().__init__()
        self._when = epoch, batch
        self._epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self._epoch, batch) >= self._when:
            raise KeyboardInterrupt


def make_model(strategy):
    """Its table counts how often each id was trained on."""
    with strategy.scope():
        ids = keras.Input((1,), dtype="int64")
        rows = keras.layers.Embedding(BATCHES, 1, "zeros")(ids)
        model = keras.Model(ids, keras.layers.Flatten()(rows))
        model.compile(recsync.optimizers.SGD(1.0), loss=lambda _, output: -output)
    return model


def counts_of(model):
    return np.asarray(model.get_weights()[0]).ravel()


def batches(shuffled=False, parts=1, part=0):
    ids = np.arange(part, BATCHES, parts)
    data = tf.data.Dataset.from_tensor_slices((ids[:, np.newaxis], np.zeros((len(ids), 1))))
    return (data.shuffle(BATCHES, seed=3) if shuffled else data).batch(1)


def trained(cluster, folder, make, steps=None, stop=None, epochs=EPOCHS, slowdown=None):
    """A model after a program that ends at `stop`, or that goes on after one."""
    strategy = recsync.AsyncStrategy(cluster)
    recsync.testing.set_compute_time(strategy, 0.005, slowdown)
    model = make_model(strategy)
    callback = Waiting(folder, every_steps=10, keep=None, at_end=stop is None)
    callbacks = [callback, *([] if stop is None else [Stop(*stop)])]

    def fit():
        return model.fit(
            make(strategy), epochs=epochs, steps_per_epoch=steps, verbose=0, callbacks=callbacks
        )

    if stop is None:
        return model, callback, fit()
    with pytest.raises(KeyboardInterrupt):
        fit()
    return model, callback, None


KINDS = [
    "in order",
    "shuffled",
    "by steps",
    "of unknown length",
    "by workers",
    "by workers, endless",
]


@pytest.mark.parametrize("kind", KINDS)
def test_each_epoch_has_each_batch_once_though_workers_had_some_ahead(cluster, tmp_path, kind):
    is_endless = kind == "by workers, endless"
    steps = 25 if kind == "by steps" or is_endless else None

    def make(strategy):
        if "by workers" in kind:
            return strategy.distribute_datasets_from_function(
                lambda context: batches(False, 2, context.input_pipeline_id).repeat(
                    None if is_endless else 1
                )
            )
        data = batches(kind == "shuffled")
        if kind == "of unknown length":
            return data.filter(lambda ids, _: tf.reduce_all(ids >= 0))
        return data if steps is None else data.repeat()

    trained(cluster, tmp_path, make, steps, stop=(1, 17))
    model, callback, history = trained(cluster, tmp_path, make, steps)
    saved = checkpoint.open(callback.restored)
    # In the second epoch, or after it, as workers may be ahead of Keras.
    assert saved.metadata["data"]["batches"] > 0 or saved.metadata["epoch"] == 2
    assert history.epoch == list(range(saved.metadata["epoch"], EPOCHS))
    counts = counts_of(model)
    total = EPOCHS * (steps or BATCHES)
    assert counts.sum() == total
    if is_endless:
        # Each goes through its half of the ids, as far as it comes.
        for own in (counts[::2], counts[1::2]):
            assert np.all(np.diff(own) <= 0) and own[0] - own[-1] <= 1
        return
    expected = np.bincount(np.arange(total) % BATCHES) if steps else np.full(BATCHES, EPOCHS)
    if kind == "by steps":  # Some of the last ones may be left to epochs that never come.
        assert np.abs(counts - expected).max() <= 1
        assert np.abs(counts - expected).sum() <= 2 * 8
    else:
        np.testing.assert_array_equal(counts, expected)
    # Steps of Keras that were done before are neither trained nor saved once more.
    steps_left = total - saved.global_step
    assert len(callback.saved) <= steps_left / 10 + 1


def test_data_of_unknown_length_that_a_program_goes_on_in_begin_anew_when_they_end(
    cluster, tmp_path, caplog
):
    def make(strategy):
        return batches().filter(lambda ids, _: tf.reduce_all(ids >= 0))

    trained(cluster, tmp_path, make, 25, stop=(1, 17), epochs=5)
    model, callback, history = trained(cluster, tmp_path, make, 25, epochs=5)
    assert "The data ended before the epoch had" in caplog.text
    assert history.epoch[-1] == 4
    # The third epoch ended with the data, and the last two had 50 batches of the next pass.
    counts = counts_of(model)
    assert counts.sum() == BATCHES + 50 and counts.min() == 1
    # Workers may have begun with others than the first ones.
    assert counts[:50].sum() >= 2 * 50 - 8


class Shuffled(keras.utils.PyDataset):
    """Batches that `fit` shuffles, unless it is told not to."""

    def __len__(self):
        return BATCHES

    def __getitem__(self, number):
        return np.array([[number]]), np.zeros((1, 1))


CHANGES = ["batch size", "workers", "order", "Keras's order", "steps", "an end"]


@pytest.mark.parametrize("change", CHANGES)
def test_what_can_not_be_gone_on_with_is_said(cluster, clusters, tmp_path, caplog, change):
    def make(strategy):
        if change == "workers":
            return strategy.distribute_datasets_from_function(
                lambda context: batches(
                    False, context.num_input_pipelines, context.input_pipeline_id
                )
            )
        if change == "order":
            tf.random.set_seed(None)  # As in a program that has no seed.
            return batches().shuffle(BATCHES)
        if change == "Keras's order":
            return Shuffled()
        return batches().repeat() if change == "steps" else batches()

    def other(strategy):
        return batches().unbatch().batch(2) if change == "batch size" else make(strategy)

    steps = {"steps": 50, "an end": 50}.get(change)
    # Before workers have done all of the epoch, Keras has heard of a part of it; half a minute
    # where they make their data, so that they go on while this process stands still.
    later = 400.0 if change == "workers" else 60.0
    slow = recsync.testing.ChangingSlowdown([(12, 1.0), (12, later)], unit="steps")
    trained(cluster, tmp_path, make, steps, stop=(0, 22), epochs=1, slowdown=slow)
    second = clusters.get(workers=4, ps=2) if change == "workers" else cluster
    steps = 10 if change == "steps" else steps
    model, callback, _ = trained(second, tmp_path, other, steps, epochs=1)
    begun = checkpoint.open(callback.restored).metadata["data"]["epoch_batches"]
    words = {
        "batch size": "The epoch begins anew, with all of its data: batches had 1 examples, and",
        "workers": "The epoch begins anew, with all of its data: batches came from 2 input pipel",
        "steps": f"{begun} of its steps were done, and now it has fewer",
        "an end": "with steps_per_epoch, Keras begins a dataset anew when it has asked for",
        "order": f"{begun} batches are skipped that were trained on, but the dataset's order is",
        "Keras's order": f"{begun} batches are skipped that were trained on, but Keras shuffles",
    }
    assert words[change] in caplog.text
    rest = {
        "batch size": BATCHES / 2,
        "workers": BATCHES,
        "order": BATCHES - begun,
        "Keras's order": BATCHES - begun,
        "steps": 10,
        "an end": 50,
    }
    assert counts_of(model).sum() == begun + rest[change]


def test_a_position_of_something_else_is_refused(cluster, tmp_path):
    model = make_model(recsync.AsyncStrategy(cluster))
    model.fit(batches().take(2), verbose=0)
    for wrong in (3, {"passes": 0}, {**DataPosition().as_json(), "batches": -1}):
        path = str(tmp_path / "1")
        checkpoint.save(path, model, metadata={"epoch": 0, "data": wrong})
        with pytest.raises(ValueError, match="a position in data must"):
            model.fit(batches().take(2), verbose=0, callbacks=[Checkpoint(tmp_path)])
        tf.io.gfile.rmtree(path)


@pytest.mark.parametrize("kind", ["passes", "steps", "by workers"])
def test_with_everything_the_data_go_back_to_the_checkpoint(cluster, tmp_path, kind):
    strategy = recsync.AsyncStrategy(cluster)
    recsync.testing.set_compute_time(strategy, 0.01)
    model = make_model(strategy)
    callback = Waiting(tmp_path, every_steps=20, recovery="all")
    lost = tf.DeviceSpec.from_string(model.variables[0]._value.device).task

    class Kill(keras.callbacks.Callback):
        kills = 0

        def on_train_batch_end(self, batch, logs=None):
            is_due = len(callback.saved) >= 2 + 4 * self.kills
            if is_due and callback.recoveries == self.kills < 2:
                self.kills += 1
                cluster.kill("ps", lost)
                cluster.restart("ps", lost)

    data, steps, epochs = batches(True).repeat(6), None, 2
    if kind == "steps":
        data, steps, epochs = data.repeat(), 2 * BATCHES, 6
    elif kind == "by workers":
        data = strategy.distribute_datasets_from_function(
            lambda context: batches(False, 2, context.input_pipeline_id).repeat(6)
        )
    logs = model.fit(
        data, steps_per_epoch=steps, epochs=epochs, verbose=0, callbacks=[callback, Kill()]
    )
    assert logs.epoch == list(range(epochs))
    assert callback.recoveries == 2
    counts = counts_of(model)
    assert counts.sum() == 12 * BATCHES == checkpoint.open(callback.saved[-1].path).global_step
    assert np.abs(counts - 12).max() <= 2 and np.abs(counts - 12).sum() <= 2 * 2 * 8


def test_a_generator_goes_on_where_it_is_when_everything_else_goes_back(cluster, tmp_path, caplog):
    strategy = recsync.AsyncStrategy(cluster)
    recsync.testing.set_compute_time(strategy, 0.01)
    model = make_model(strategy)
    callback = Waiting(tmp_path, every_steps=10, recovery="all")
    lost = tf.DeviceSpec.from_string(model.variables[0]._value.device).task
    late = 40  # From here on, batches are made after the loss.

    class Kill(keras.callbacks.Callback):
        has_killed = False

        def on_train_batch_end(self, batch, logs=None):
            if callback.saved and not self.has_killed:
                self.has_killed = True
                cluster.kill("ps", lost)
                cluster.restart("ps", lost)

    def made():
        for number in range(BATCHES):
            while number >= late and not callback.recoveries:
                time.sleep(0.05)
            yield np.array([[number]]), np.zeros((1, 1))

    model.fit(made(), verbose=0, callbacks=[callback, Kill()])
    assert callback.recoveries == 1
    assert "What was trained on since the checkpoint is not trained on again." in caplog.text
    counts = counts_of(model)
    assert counts[late:].tolist() == [1] * (BATCHES - late)
    assert counts.max() == 1


class KillOnce(keras.callbacks.Callback):
    """Kills and restarts a parameter server when an epoch begins or ends."""

    def __init__(self, cluster, model, epoch, at_end):
        super().__init__()
        self._lost = tf.DeviceSpec.from_string(model.variables[0]._value.device).task
        self._cluster, self._epoch, self._at_end = cluster, epoch, at_end

    def _kill(self, epoch, at_end):
        if (epoch, at_end) == (self._epoch, self._at_end):
            self._cluster.kill("ps", self._lost)
            self._cluster.restart("ps", self._lost)

    def on_epoch_begin(self, epoch, logs=None):
        self._kill(epoch, False)

    def on_epoch_end(self, epoch, logs=None):
        self._kill(epoch, True)


def sync_model(cluster):
    strategy = recsync.SyncStrategy(cluster, global_batch_size=2, local_batch_size=1)
    return make_model(strategy)


def test_a_loss_between_epochs_of_steps_leaves_the_next_ones_as_they_are(cluster, tmp_path, caplog):
    model = sync_model(cluster)
    callback = Checkpoint(tmp_path, every_steps=14, keep=None, at_end=False)
    updates = []
    note = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: updates.append(int(model.optimizer.iterations.numpy()))
    )
    history = model.fit(
        batches().repeat(),
        steps_per_epoch=20,
        epochs=4,
        verbose=0,
        callbacks=[callback, note, KillOnce(cluster, model, 0, at_end=True)],
    )
    assert history.epoch == [0, 1, 2, 3]
    assert callback.recoveries == 1
    assert updates[0] == 10 and np.diff(updates[1:]).tolist() == [10, 10]
    assert 10 <= updates[1] <= 20


def test_a_loss_before_the_first_step_of_a_resumed_program_keeps_its_place(cluster, tmp_path):
    model = sync_model(cluster)
    first = Checkpoint(tmp_path, every_steps=10, keep=None, at_end=False)
    recsync.testing.set_compute_time(model.distribute_strategy, 0.005)
    with pytest.raises(KeyboardInterrupt):
        model.fit(batches(True), verbose=0, callbacks=[first, Stop(0, 30)])
    first._wait()

    model = sync_model(cluster)
    second = Checkpoint(tmp_path, every_seconds=1e9)
    epoch = checkpoint.open(checkpoint.latest(tmp_path)).metadata["epoch"]
    model.fit(
        batches(True),
        epochs=2,
        verbose=0,
        callbacks=[second, KillOnce(cluster, model, epoch, at_end=False)],
    )
    assert second.recoveries == 1
    counts = counts_of(model)
    # Of a global batch of two, each has half its weight. A push that was not applied yet, as it
    # had to wait for another one, is in no file.
    assert 2 * BATCHES - 1 <= 2 * counts.sum() <= 2 * BATCHES
    assert np.abs(2 * counts - 2).sum() <= 2 * 8 + 1


@pytest.mark.parametrize("recovery", ["partial", "all"])
def test_a_loss_after_the_last_step_is_said_or_mended(cluster, tmp_path, caplog, recovery):
    model = make_model(recsync.AsyncStrategy(cluster))
    callback = Checkpoint(tmp_path, every_seconds=1e9, recovery=recovery)
    model.fit(batches(), verbose=0, callbacks=[callback, KillOnce(cluster, model, 0, at_end=True)])
    assert callback.recoveries == 1
    about = checkpoint.open(checkpoint.latest(tmp_path)).metadata
    if recovery == "partial":
        assert about["epoch"] == 1
        return
    # It is not said to have more than it has.
    assert about["epoch"] == 0
    assert "start the program again to train on what came after that" in caplog.text
    model, again, history = trained(cluster, tmp_path, lambda strategy: batches(), epochs=1)
    assert history.epoch == [0]
    assert counts_of(model).sum() == BATCHES


def test_what_another_program_left_is_not_what_a_model_goes_back_to(cluster, tmp_path):
    trained(cluster, tmp_path, lambda strategy: batches(), epochs=1)
    model = make_model(recsync.AsyncStrategy(cluster))
    recsync.testing.set_compute_time(model.distribute_strategy, 0.005)
    callback = Checkpoint(tmp_path, every_seconds=1e9, resume=False, recovery="all")
    kill = KillOnce(cluster, model, 1, at_end=False)
    model.fit(batches(), epochs=2, verbose=0, callbacks=[callback, kill])
    assert callback.recoveries == 1
    assert counts_of(model).max() <= 2
