"""Several readers, each with a part of the data: which batches were trained on is known."""

import contextlib
import os
import socket
import time
from concurrent import futures

import grpc
import hypothesis
import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import AtBatch, compute_time
from hypothesis import strategies as st
from test_readers import ready
from test_resuming import Stop
from test_retried_batches import BATCHES, Sum, after, batches, counts_of, make_model

import tf_recsync as recsync
from tf_recsync import checkpoint
from tf_recsync.callbacks import Checkpoint
from tf_recsync.cluster.data_service import ReaderLosses
from tf_recsync.strategies import reshuffling
from tf_recsync.strategies.data_lengths import cardinality_of
from tf_recsync.strategies.data_parts import (
    PART_BATCHES,
    pairs_sources,
    rest_of_parts,
    why_indivisible,
)
from tf_recsync.strategies.data_position import DataPosition
from tf_recsync.strategies.done_batches import DoneBatches


def numbered(parts_of_batches):
    """What a dataset of parts has, if these are its batches."""
    return {
        part * PART_BATCHES + number: batch
        for part, own in enumerate(parts_of_batches)
        for number, batch in enumerate(own)
    }


def found(dataset):
    pairs = [(int(number), np.asarray(batch).tolist()) for number, batch in dataset]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


@hypothesis.given(st.integers(1, 4), st.sets(st.integers(0, 19)), st.integers(0, 3))
@hypothesis.settings(deadline=None, max_examples=10)
def test_what_is_left_of_parts_keeps_its_numbers(parts, done, prefix):
    dataset = tf.data.Dataset.range(20).map(lambda x: x * 10).batch(2)
    own = [np.arange(part, 20, parts) * 10 for part in range(parts)]
    expected = numbered([rows[i : i + 2].tolist() for i in range(0, len(rows), 2)] for rows in own)
    numbers = list(expected)
    is_done = DoneBatches(min(prefix, len(own[0]) // 2))
    is_done.add([numbers[i] for i in done if i < len(numbers)])
    first, beyond = is_done.ranges
    gone = [range(first), *(range(*pair) for pair in beyond)]
    left = {n: batch for n, batch in expected.items() if not any(n in pair for pair in gone)}
    assert found(rest_of_parts(dataset, parts, first, beyond)) == left


def test_parts_have_the_same_order_each_time_and_another_one_in_each_pass(tmp_path):
    for index in range(6):
        (tmp_path / f"{index}.txt").write_text("".join(f"{index} {i}\n" for i in range(5)))
    dataset = tf.data.Dataset.list_files(str(tmp_path / "*.txt"), seed=1)
    dataset = dataset.interleave(tf.data.TextLineDataset, cycle_length=2, num_parallel_calls=2)
    dataset = dataset.shuffle(4, seed=2).batch(4).prefetch(1)
    passes = [
        [found(rest_of_parts(reshuffling.in_pass(dataset, number), 2, 0, ())) for _ in range(2)]
        for number in (1, 2)
    ]
    for first, second in passes:
        assert first == second
        lines = [line.decode() for batch in first.values() for line in batch]
        assert sorted(lines) == sorted(f"{a} {b}" for a in range(6) for b in range(5))
    assert passes[0][0] != passes[1][0]


@pytest.mark.parametrize(
    ("dataset", "why"),
    [
        (tf.data.Dataset.range(4).repeat(), "without an end"),
        (
            tf.data.experimental.CsvDataset("rows.csv", [tf.int32]),
            "begins with CSVDatasetV2",
        ),
        (tf.data.Dataset.random(3).take(4), "begins with RandomDataset"),
        (tf.data.Dataset.zip(tf.data.Dataset.range(4), tf.data.Dataset.random(3)), ""),
        # A zip as well, of random numbers and a counter: each part would be all of it.
        (tf.data.Dataset.random(3).enumerate().take(4), "not with elements to be divided"),
        (
            tf.data.Dataset.choose_from_datasets(
                [tf.data.Dataset.range(4)] * 2, tf.data.Dataset.range(2).repeat(4)
            ),
            "DirectedInterleaveDataset",
        ),
        (tf.data.Dataset.range(4).concatenate(tf.data.Dataset.range(3)).batch(2), ""),
        (tf.data.TextLineDataset(["a", "b"]).batch(2), ""),
    ],
)
def test_what_has_no_parts_says_why(dataset, why):
    assert why in why_indivisible(dataset) and bool(why) == bool(why_indivisible(dataset))


def opened(data, interleave=False):
    """Data of which tf.data does not know how many they are."""
    make = data.interleave if interleave else data.flat_map
    return make(lambda *_: tf.data.Dataset.range(2))


ENDLESS = {
    "repeat at the end": lambda data: data.repeat(),
    "interleave": lambda data: opened(data.repeat(), True),
    "batches of it": lambda data: (
        opened(data.repeat()).shuffle(4).batch(2).map(lambda x: x).prefetch(1)
    ),
    "filter": lambda data: data.repeat().filter(lambda x: x > 1),
    "unbatch": lambda data: data.repeat().batch(2).filter(lambda x: True).unbatch(),
    "enumerate": lambda data: opened(data.repeat()).enumerate(),
    "concatenate": lambda data: opened(data).concatenate(opened(data.repeat())),
    "take of all": lambda data: opened(data.repeat()).take(-1),
    "random": lambda data: opened(tf.data.Dataset.random(1)),
    "sample": lambda data: tf.data.Dataset.sample_from_datasets([opened(data.repeat())] * 2),
}
ENDING = {
    "take": lambda data: opened(data.repeat()).take(3),
    "take before": lambda data: opened(data.repeat().take(3)),
    "take_while": lambda data: data.repeat().take_while(lambda x: x < 2),
    "zip": lambda data: tf.data.Dataset.zip(opened(data.repeat()), opened(data)),
    "no repeat": lambda data: opened(data),
    "choose": lambda data: tf.data.Dataset.choose_from_datasets(
        [opened(data.repeat())] * 2, data.take(2)
    ),
}


@pytest.mark.parametrize("kind", [*ENDLESS, *ENDING])
def test_data_without_an_end_are_known_wherever_they_repeat(kind):
    dataset = {**ENDLESS, **ENDING}[kind](tf.data.Dataset.range(4))
    assert (cardinality_of(dataset) == tf.data.INFINITE_CARDINALITY) == (kind in ENDLESS)
    assert ("without an end" in why_indivisible(dataset)) == (kind in ENDLESS)
    if kind in ENDING:
        assert len(list(dataset)) <= 16


def test_what_zip_puts_together_stays_together_in_parts():
    words = tf.data.Dataset.from_tensor_slices([[1, 2], [3, 4], [5, 6]]).unbatch()
    dataset = tf.data.Dataset.zip(words.map(lambda x: 10 * x), words).concatenate(
        tf.data.Dataset.from_tensors((70, 7))
    )
    batches = found(rest_of_parts(dataset.map(lambda a, b: tf.stack([a, b])).batch(2), 2, 0, ()))
    pairs = [tuple(pair) for batch in batches.values() for pair in batch]
    assert sorted(pairs) == [(10 * i, i) for i in range(1, 8)]
    # The only element that comes behind is the first of its source.
    assert batches[PART_BATCHES] == [[20, 2], [40, 4]]


def test_a_part_has_no_elements_by_random_numbers_of_its_own():
    """As Keras shuffles arrays: whichever reader has the parts, and if one has several."""
    tf.random.set_seed(5)
    order = tf.data.Dataset.range(1).map(lambda _: tf.random.shuffle(tf.range(20), seed=3))
    indices = order.flat_map(lambda all: tf.data.Dataset.from_tensor_slices(all).batch(4))
    values = tf.data.Dataset.from_tensors(tf.range(20) * 10).repeat()
    dataset = tf.data.Dataset.zip(indices, values).map(lambda i, all: tf.gather(all, i))
    assert why_indivisible(dataset) == "" and not pairs_sources(dataset)
    parts = rest_of_parts(dataset, 2, 0, ())
    for _ in range(3):
        values = [value for batch in found(parts).values() for value in batch]
        assert sorted(values) == [10 * i for i in range(20)]
    both = tf.data.Dataset.zip(indices, tf.data.Dataset.range(5)).map(lambda i, j: i)
    assert "ZipDataset behind random numbers" in why_indivisible(both)


@pytest.mark.parametrize(
    ("dataset", "pairs"),
    [
        (tf.data.Dataset.zip(*[tf.data.TextLineDataset("a")] * 2), True),
        (tf.data.TextLineDataset("a").enumerate().batch(2), False),
        (tf.data.Dataset.zip(*[tf.data.Dataset.from_tensors([1, 2]).unbatch()] * 2), True),
        (tf.data.Dataset.zip(tf.data.TextLineDataset("a"), tf.data.Dataset.from_tensors(1)), False),
        (tf.data.Dataset.range(3).concatenate(tf.data.Dataset.range(3)), False),
    ],
)
def test_what_must_not_be_divided_by_its_sources_is_known(dataset, pairs):
    assert pairs_sources(dataset) == pairs


@pytest.mark.parametrize("parts", [0, "2", None])
def test_a_position_with_other_parts_is_refused(parts):
    about = DataPosition(parts=3).as_json()
    assert DataPosition.parsed(about).parts == 3
    with pytest.raises(ValueError, match="parts must be an integer of at least 1"):
        DataPosition.parsed({**about, "parts": parts})
    del about["parts"]  # As earlier versions wrote it.
    assert DataPosition.parsed(about).parts == 1


# Readers.


def option_to(port, level, option):
    """An option of this process's one connection to a port of this machine."""
    values = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            connection = socket.socket(fileno=int(name))
            try:
                if connection.getpeername()[1:2] == (port,):  # Others have names of text.
                    values.append(connection.getsockopt(level, option))
            finally:
                connection.detach()
    (value,) = values
    return value


def test_connections_to_readers_that_have_ended_are_counted():
    def start(port=0):
        server = grpc.server(futures.ThreadPoolExecutor(1))
        port = server.add_insecure_port(f"127.0.0.1:{port}")
        server.start()
        return server, port

    def expect(count):
        deadline = time.monotonic() + 30
        while losses.count != count:
            assert time.monotonic() < deadline, losses.count
            time.sleep(0.01)

    (first, port), (other, other_port) = start(), start()
    losses = ReaderLosses([f"127.0.0.1:{port}", f"127.0.0.1:{other_port}"])
    try:
        assert losses.begin() == 0
        # A machine that is gone closes nothing: its silence is noticed.
        for number in (port, other_port):
            assert option_to(number, socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert 10 <= option_to(number, socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 60
        first.stop(None)
        expect(1)
        first, _ = start(port)
        assert losses._connections[0]._is_there.wait(60)  # Again.
        assert losses.begin() == 1
        first.stop(None)
        other.stop(None)
        expect(3)
    finally:
        losses.close()
        for server in (first, other):
            server.stop(None)


@pytest.fixture
def cluster(clusters):
    return ready(clusters.get(2, 1, readers=2))


def slow(data, seconds=0.01):
    """The same, each batch of which takes so long to make."""
    return data.map(lambda ids, label: (after(seconds, ids), label))


@pytest.mark.parametrize("job", ["worker", "reader"])
def test_what_is_lost_with_a_worker_or_a_reader_is_trained_on(clusters, job):
    # On a busy machine a reader may have given all that it has before it dies.
    assert any(is_trained_on(ready(clusters.get(2, 1, readers=2)), job) for _ in range(10))


def is_trained_on(cluster, job) -> bool:
    """Whether something is lost with a reader; what is lost with any server is trained on."""
    strategy = recsync.AsyncStrategy(cluster)
    model = make_model(strategy)
    lost = AtBatch(10, lambda: (cluster.kill(job, 1), cluster.restart(job, 1)))
    # So slow that readers have batches left when it dies, however late Keras counts.
    data = slow(batches().shuffle(BATCHES, seed=3), 0.1)
    with compute_time(strategy, 0.01):
        model.fit(data, epochs=2, callbacks=[lost], verbose=0)
    assert lost._action is None
    counts, losses = counts_of(model), strategy.losses(model)
    assert losses.batches == 0
    assert counts.min() == 2
    if job == "reader":  # Which batches workers had is known.
        assert counts.max() == 2 and losses.workers == 0
    else:
        assert losses.repeated <= counts.sum() - 2 * BATCHES <= losses.repeated + losses.steps
    return losses.retried > 0 or job == "worker"


def test_an_evaluation_counts_each_batch_once_though_a_reader_dies(cluster):
    model = make_model(recsync.AsyncStrategy(cluster), [Sum()])
    killed = []

    class Kill(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            if batch == 6 and not killed:
                killed.append(cluster.kill("reader", 1))
                cluster.restart("reader", 1)

    total = model.evaluate(slow(batches(24), 0.05), callbacks=[Kill()], return_dict=True, verbose=0)
    assert killed
    assert total["sum"] == (4**24 - 1) / 3  # Each digit is a 1.


@pytest.mark.cases("3")
@pytest.mark.parametrize("readers", [0, 3])
def test_a_program_goes_on_after_what_was_trained_on_with_any_number_of_readers(
    clusters, tmp_path, readers
):
    def fit(cluster, stop):
        strategy = recsync.AsyncStrategy(cluster)
        model = make_model(strategy)
        saving = Checkpoint(tmp_path, every_steps=10, keep=None, at_end=stop is None)
        ends = pytest.raises(KeyboardInterrupt) if stop else contextlib.nullcontext()
        with compute_time(strategy, 0.02), ends:
            model.fit(
                batches().shuffle(BATCHES, seed=3),
                epochs=2,
                callbacks=[saving, *([Stop(*stop)] if stop else [])],
                verbose=0,
            )
        return model, saving

    fit(ready(clusters.get(2, 1, readers=2)), stop=(0, 31))
    model, saving = fit(ready(clusters.get(2, 1, readers=readers)), stop=None)
    # Of the first program: the one that it had begun to write may have been completed since.
    assert saving.restored is not None
    saved = checkpoint.open(saving.restored).metadata
    # In the first epoch, or after it, as workers may be ahead of Keras.
    assert saved["epoch"] == 1 or (saved["data"]["parts"], saved["epoch"]) == (2, 0)
    np.testing.assert_array_equal(counts_of(model), np.full(BATCHES, 2))


def test_zip_of_several_sources_without_parts_is_refused(cluster):
    model = make_model(recsync.AsyncStrategy(cluster))
    pairs = batches().map(lambda ids, label: ids), batches().map(lambda ids, label: label)
    with pytest.raises(ValueError, match="2 readers would put together by zip .* without an end"):
        model.fit(tf.data.Dataset.zip(*pairs).repeat(), steps_per_epoch=4, verbose=0)
    model.fit(tf.data.Dataset.zip(*pairs), verbose=0)
    np.testing.assert_array_equal(counts_of(model), np.ones(BATCHES))


@pytest.mark.parametrize("is_last", [True, False], ids=["at the end", "in between"])
def test_data_without_an_end_have_no_parts_which_is_said(cluster, tmp_path, caplog, is_last):
    data = batches().repeat()
    if not is_last:
        data = data.flat_map(lambda *batch: tf.data.Dataset.from_tensors(batch))
    strategy = recsync.AsyncStrategy(cluster)
    model = make_model(strategy)
    lost = AtBatch(4, lambda: cluster.kill("worker", 1))
    callbacks = [lost, Checkpoint(tmp_path, every_steps=10)]
    with compute_time(strategy, 0.01):
        model.fit(data, steps_per_epoch=20, epochs=2, callbacks=callbacks, verbose=0)
    for text in (
        "Batches that are lost with a worker will not be trained on",
        "Checkpoints do not have the position in the data",
    ):
        assert caplog.text.count(text) == 1
    assert caplog.text.count("use one reader, or have workers make their datasets") == 2
    cluster.restart("worker", 1)
