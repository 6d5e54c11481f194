"""Boards, on which servers have how far workers are and what these report."""

import gc
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import AtBatch, compiled, compute_time, held_back, mean_output, slope_model, wait_until

import tf_recsync as recsync
from tf_recsync import ops
from tf_recsync.cluster import processor_of
from tf_recsync.optimizers import SGD
from tf_recsync.strategies.call_board import CallBoard, CallBoards
from tf_recsync.synchronization.remote_values import PackedReader

PS = processor_of("ps", 0)


@pytest.fixture
def cluster(clusters):
    cluster = clusters.get(workers=2, ps=1)
    cluster.connect()
    return cluster


def test_one_call_reads_what_all_rows_have_and_each_report_once(cluster):
    board = CallBoard(PS)
    first, second = board.add_row(), board.add_row()
    with tf.device(PS):
        for _ in range(3):
            ops.count_step(first.handle)
        ops.report(second.handle, np.array([1, 2, 3], np.uint8))
        ops.report(first.handle, np.zeros([0], np.uint8))  # It is not time yet.
    reading = board.read()
    assert reading.applied == {first.key: 3, second.key: 0}
    assert {key: report.tolist() for key, report in reading.reports.items()} == {
        second.key: [1, 2, 3]
    }
    assert board.read().reports == {}
    assert board.read().applied == reading.applied


def test_workers_are_told_to_end_and_what_is_known_of_them(cluster):
    board = CallBoard(PS)
    first, second = board.add_row(), board.add_row()
    board.tell([second])
    board.tell([first, second])
    board.forget({first.key: 7})
    board.forget({first.key: 5})  # A late one.
    assert ops.read_row(first.handle).numpy().tolist() == [1, 7]
    assert ops.read_row(second.handle).numpy().tolist() == [2, 0]


def test_a_row_goes_with_its_handle(cluster):
    board = CallBoard(PS)
    first, second = board.add_row(), board.add_row()
    key = second.key
    del first
    gc.collect()
    assert wait_until(lambda: list(board.read().applied) == [key], 30)


def test_a_server_that_was_started_again_gets_another_board(clusters):
    cluster = clusters.get(workers=2, ps=2)
    cluster.connect()
    boards, device = CallBoards(cluster), processor_of("ps", 1)
    row = boards.add_row(device)
    board = row.board
    assert boards.add_row(device).board is board
    assert boards.add_row(PS).board.device == PS
    cluster.kill("ps", 1)
    with pytest.raises(tf.errors.OpError):
        board.read()
    with pytest.raises(tf.errors.OpError):
        boards.add_row(device)
    cluster.membership.lost(("ps", 1), None, "in a test")
    cluster.restart("ps", 1)
    cluster.readmit(timeout=30.0)
    other = boards.add_row(device)
    assert other.board is not board
    assert other.board.read().applied == {other.key: 0}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda board, row: ops.board_row(board, [1, 2]), "key must be a scalar"),
        (
            lambda board, row: ops.report(row, np.zeros([2, 2], np.uint8)),
            "message must be a vector",
        ),
        (
            lambda board, row: ops.tell_workers(board, [1], [1, 1], [1]),
            "ends and known must have 1 elements as keys, not 2 and 1",
        ),
        (
            lambda board, row: ops.report_is_due(ops.worker_log(), seconds=-1.0),
            "at least 0, not -1",
        ),
    ],
)
def test_wrong_inputs_are_refused_by_name(call, message):
    board = ops.worker_board()
    row = ops.board_row(board, 1)
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        call(board, row)


def test_a_report_is_due_at_first_and_when_its_time_has_come():
    log = ops.worker_log()
    assert ops.report_is_due(log, seconds=1e9)
    assert not ops.report_is_due(log, seconds=1e9)
    time.sleep(0.02)
    assert ops.report_is_due(log, seconds=0.01)
    assert not ops.report_is_due(log, seconds=1e9)


class Mean(keras.metrics.Mean):
    """Of the outputs, whatever the labels."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(y_pred * 0 + y_true)


def numbered(batches):
    """Batches of the labels 1, 2, 3 and so on."""
    labels = tf.data.Dataset.range(1, batches + 1)
    return labels.map(lambda n: (tf.ones([2, 1]), tf.fill([2, 1], tf.cast(n, tf.float32))))


def model_of(strategy):
    """A model of which each step of a batch takes 1 off the weight."""
    with strategy.scope():
        model = slope_model()
        model.compile(SGD(1.0), mean_output, metrics=[Mean(name="label")])
    return model


def test_all_is_known_at_the_end_of_an_epoch_though_workers_are_hardly_read(cluster, monkeypatch):
    read, epochs = [], []
    strategy = recsync.AsyncStrategy(cluster)
    model = model_of(strategy)
    model.fit(numbered(64), verbose=0)  # Traced by now.
    asked = PackedReader.read
    monkeypatch.setattr(PackedReader, "read", lambda *args: read.append(1) or asked(*args))

    class Count(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            epochs.append(len(read))

    history = model.fit(
        numbered(300), steps_per_epoch=100, epochs=3, verbose=0, callbacks=[Count()]
    )
    epochs.append(len(read))
    # Each worker is read when it is opened, and at most once in an epoch, to show something soon.
    assert epochs[3] - epochs[1] <= 2 * 2
    total = np.cumsum([100 * value for value in history.history["label"]])
    assert total[-1] == pytest.approx(300 * 301 / 2)
    assert sum(strategy.worker_steps(model)) == 300


def test_what_workers_report_is_shown_and_known_where_a_call_has_one_step(cluster):
    strategy = recsync.AsyncStrategy(cluster)
    model = model_of(strategy)
    shown = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            shown.append(logs["label"])
            if batch == 16:
                cluster.kill("worker", 1)

    data = held_back(numbered(30), 28, lambda: strategy.losses(model).workers)
    with compute_time(strategy, 0.4):
        model.fit(data, callbacks=[Look()], verbose=0)
    # Means of what comes one after the other, but for what Keras shows before it is known.
    assert len(set(shown)) > 5 and 0 < shown[16] <= 17
    losses = strategy.losses(model)
    assert losses.workers == 1 and losses.repeated <= 4
    cluster.restart("worker", 1)


def test_what_a_lost_worker_has_reported_counts(cluster):
    """As for its last half second, nobody knows of it, and others do those batches again."""
    strategy = recsync.AsyncStrategy(cluster)
    model = model_of(strategy)
    model.fit(numbered(64), verbose=0)
    kill = AtBatch(600, lambda: cluster.kill("worker", 1))
    data = held_back(numbered(1000), 990, lambda: strategy.losses(model).workers)
    with compute_time(strategy, 0.004):
        history = model.fit(data, callbacks=[kill], verbose=0)
    losses = strategy.losses(model)
    assert losses.workers == 1
    # More would be again what it has done since it was opened, some 300.
    assert losses.repeated < 200
    assert sum(strategy.worker_steps(model)) == 1000 + losses.repeated
    mean = history.history["label"][0]
    assert mean == pytest.approx(500.5, rel=0.05)
    cluster.restart("worker", 1)


def test_workers_forget_numbers_of_batches_that_are_known(cluster, monkeypatch):
    monkeypatch.setattr("tf_recsync.strategies.worker_state._FORGET", 16)
    forgotten = []
    forget = CallBoard.forget
    monkeypatch.setattr(
        CallBoard,
        "forget",
        lambda board, known: forgotten.append(dict(known)) or forget(board, known),
    )
    strategy = recsync.AsyncStrategy(cluster)
    model = compiled(strategy, slope_model, lambda: SGD(1.0), mean_output)
    with compute_time(strategy, 0.01):
        model.fit(numbered(400), verbose=0)
    assert forgotten
    assert all(count >= 16 for known in forgotten for count in known.values())
    assert float(model.get_weights()[0].item()) == -400
