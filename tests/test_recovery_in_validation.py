"""Parameter servers that die while `fit` evaluates, with a Checkpoint: training goes on."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from prometheus_client.parser import text_string_to_metric_families
from test_checkpoint_callback import BATCH, NAME, check_rows, dataset, make_model
from test_recovery import ROWS, shards_of, slowly

import tf_recsync as recsync
from tf_recsync import checkpoint
from tf_recsync.callbacks import Checkpoint, Prometheus, Status
from tf_recsync.run_status import RunStatus

pytestmark = pytest.mark.usefixtures("end_calls_of_servers_that_were_cut_off")

VALIDATION, KILLED_AT = 40, 5
EXAMPLES = VALIDATION * BATCH


@pytest.fixture
def cluster(clusters):
    return clusters.get(workers=4, ps=4)


class Validation(keras.callbacks.Callback):
    """Data to evaluate on, whose examples bear their numbers; and a server dies in the middle.

    Of the first pass, half comes when a server has been killed.

    Args:
        kill: does so.

    Attributes:
        data: batches.
        passes: how often they were read.
        batches: of each evaluation, as Keras counts them.
    """

    def __init__(self, kill):
        super().__init__()
        self._kill, self._killed = kill, threading.Event()
        self.passes, self.batches = 0, []
        spec = {"ids": tf.TensorSpec((BATCH, 1), tf.int64)}, tf.TensorSpec((BATCH, 1))
        self.data = tf.data.Dataset.from_generator(self._batches, output_signature=spec)

    def _batches(self):
        for batch, numbers in enumerate(np.arange(EXAMPLES).reshape(-1, BATCH, 1)):
            self.passes += batch == KILLED_AT  # Keras looks at the first one by itself.
            if batch == VALIDATION // 2:
                self._killed.wait(60.0)
            yield {"ids": numbers % ROWS}, numbers.astype(np.float32)

    def on_test_begin(self, logs=None):
        self.batches.append(0)

    def on_test_batch_end(self, batch, logs=None):
        self.batches[-1] = batch + 1
        if batch == KILLED_AT and not self._killed.is_set():
            self._kill()
            self._killed.set()


class Reports(keras.callbacks.Callback):
    """What callbacks report of `fit`, for each epoch, after its validation.

    Attributes:
        callbacks: these; to stand before this one.
        found: whether it runs, and since when.
    """

    def __init__(self, folder):
        super().__init__()
        self._paths = folder / "run.prom", folder / "run.json"
        self.callbacks = [Prometheus(path=self._paths[0]), Status(self._paths[1])]
        self.found = []

    def on_epoch_end(self, epoch, logs=None):
        families = text_string_to_metric_families(self._paths[0].read_text())
        (is_training,) = [f.samples[0].value for f in families if f.name == "recsync_training"]
        self.found.append((is_training, RunStatus.read(self._paths[1]).began))


def kill_and_restart(cluster, server):
    cluster.kill("ps", server)
    threading.Timer(0.3, cluster.restart, ["ps", server]).start()


def count_examples(model):
    """Has a model count the examples that it sees, and add up the numbers that they bear."""

    class Sum(keras.metrics.Metric):
        def __init__(self, term, **kwargs):
            super().__init__(**kwargs)
            self._term = term
            self.total = self.add_weight(shape=(), initializer="zeros", name="total")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.total.assign_add(tf.reduce_sum(self._term(tf.cast(y_true, tf.float32))))

        def result(self):
            return self.total

    with model.distribute_strategy.scope():
        metrics = [Sum(tf.ones_like, name="count"), Sum(tf.identity, name="numbers")]
        model.compile(model.optimizer, loss=lambda y, p: p, metrics=metrics)


STRATEGIES = {
    "async": lambda c: recsync.AsyncStrategy(c),
    "EASGD": lambda c: recsync.ShadowSyncStrategy(c, recsync.EASGD(0.3), sync_ps=[3]),
}


@pytest.mark.parametrize(
    ("kind", "goes_on"),
    [("async", False), ("async", True), ("EASGD", True)],
    ids=["async", "async, by steps", "EASGD, by steps"],
)
def test_validation_begins_anew_and_counts_each_batch_once(
    cluster, tmp_path, kind, goes_on, caplog
):
    strategy = slowly(STRATEGIES[kind](cluster))
    model = make_model(strategy, ROWS, shards=2, units=4)
    count_examples(model)
    lost = shards_of(model)[1]
    callback = Checkpoint(tmp_path, every_steps=20, keep=None)
    validation = Validation(lambda: kill_and_restart(cluster, lost))
    data, reports = validation.data, Reports(tmp_path)
    strategy.record_events(model, failed=lambda: reports.found.append("failed"))
    if goes_on:  # And one knows how long that is.
        data = data.apply(tf.data.experimental.assert_cardinality(VALIDATION))
    logs = model.fit(
        dataset(80 if goes_on else 40, ROWS),
        steps_per_epoch=40 if goes_on else None,
        epochs=2,
        verbose=0,
        validation_data=data,
        callbacks=[callback, validation, *reports.callbacks, reports],
    )
    assert logs.epoch == [0, 1]
    # Nobody is told that training has failed.
    is_training, began = reports.found[0]
    assert is_training == 1 and began > 0 and reports.found == [(is_training, began)] * 2
    assert callback.recoveries == 1
    assert f"Training goes on: ps:{lost} is back after" in caplog.text
    assert validation.passes == 3
    # As if nobody had died: also what Keras tells of each batch, if it knows how many there are.
    assert validation.batches[0] == VALIDATION
    assert validation.batches[1] == VALIDATION or not goes_on
    assert logs.history["val_count"] == [EXAMPLES] * 2
    assert logs.history["val_numbers"] == [EXAMPLES * (EXAMPLES - 1) / 2] * 2
    assert logs.history["count"] == [40 * BATCH] * 2
    for saved in callback.saved:
        check_rows(saved.path)
    # What is evaluated is what there is.
    rows = checkpoint.open(callback.saved[-1].path).rows(f"{NAME}/ones").sum(1)
    loss = np.mean([rows[number % ROWS] for number in range(EXAMPLES)])
    np.testing.assert_allclose(logs.history["val_loss"][-1], loss, rtol=1e-5)


def test_what_evaluates_otherwise_is_told_of_the_loss(cluster, tmp_path):
    strategy = slowly(recsync.AsyncStrategy(cluster))
    model = make_model(strategy, ROWS, shards=2)
    lost = shards_of(model)[1]
    callback = Checkpoint(tmp_path)
    validation = Validation(lambda: kill_and_restart(cluster, lost))
    options = {"validation_data": validation.data, "callbacks": [callback, validation]}
    model.fit(dataset(40, ROWS).repeat(), steps_per_epoch=20, verbose=0, **options)
    assert callback.recoveries == 1
    # The data have no end, so another program goes on with the next of their batches.
    position = checkpoint.open(checkpoint.latest(tmp_path)).metadata["data"]
    assert (position["passes"], position["batches"]) == (0, 20)
    # Nobody has gone on with the batches that workers had: they have left the data.
    assert all(slot.kept_data is None for slot in model.train_function._run.slots)
    validation = Validation(lambda: cluster.kill("ps", lost))
    with pytest.raises(RuntimeError, match=f"server ps:{lost} was lost, and its parameters"):
        model.evaluate(validation.data, verbose=0, callbacks=[validation])
    assert callback.recoveries == 1


def test_an_error_in_validation_is_raised_as_it_is(cluster, tmp_path):
    model = make_model(recsync.AsyncStrategy(cluster), ROWS, shards=2)
    wrong = dataset(1).map(lambda x, y: ({"ids": x["ids"] + ROWS}, y))
    callback = Checkpoint(tmp_path)
    with pytest.raises(tf.errors.InvalidArgumentError, match="6"):
        model.fit(
            dataset(40, ROWS).repeat(),
            steps_per_epoch=20,
            verbose=0,
            validation_data=wrong,
            callbacks=[callback],
        )
    assert callback.recoveries == 0
    # And the model can be trained again.
    assert model.fit(dataset(8, ROWS), verbose=0, callbacks=[callback]).epoch == [0]
