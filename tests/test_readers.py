"""Input pipelines that run in readers, processes of their own."""

import contextlib
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    AtBatch,
    clicks,
    compiled,
    dataset,
    functional,
    mean_output,
    only_stopped_ones_are_silent,
    slope_model,
    steps_of,
    wait_for_file,
    wait_until,
)
from started_servers import OwnServer, Server
from test_cluster import is_running

import tf_recsync as recsync
from tf_recsync import ops
from tf_recsync.cluster import data_service, local_cluster
from tf_recsync.optimizers import SGD
from tf_recsync.strategies import data_parts, registered_dataset
from tf_recsync.strategies.distributed_dataset import DistributedDataset

pytestmark = pytest.mark.usefixtures("end_calls_of_servers_that_were_cut_off")

SILENCE = 3.0  # Seconds after which a reader is given up.


@pytest.fixture(params=[1, 2], ids=["one reader", "two readers"], scope="module")
def readers(request):
    """How many; of the module, so that tests with the same number follow each other."""
    return request.param


@pytest.fixture
def cluster(clusters, readers):
    return ready(clusters.get(2, 1, readers=readers))


@pytest.fixture
def two_readers(clusters):
    return ready(clusters.get(2, 1, readers=2))


def ready(cluster):
    """The cluster, once readers answer that began anew as the first one was started again."""
    for index in range(cluster.readers):
        assert wait_until(lambda index=index: answers(cluster, index), 200.0)
    return cluster


def answers(cluster, index):
    probe = cluster.probe("reader", index)
    probe.join()
    return probe.reachable


class Sum(keras.metrics.Metric):
    """The sum of the labels, and their number."""

    def __init__(self):
        super().__init__(name="sum")
        self.total = self.add_weight(shape=(2,), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        y_true = keras.ops.cast(y_true, "float32")
        count = keras.ops.cast(keras.ops.size(y_true), "float32")
        self.total.assign_add(keras.ops.stack([keras.ops.sum(y_true), count]))

    def result(self):
        return self.total[0]


def numbered(count: int, batch: int, seconds: float = 0.0, late=None) -> tf.data.Dataset:
    """Inputs of 1, labelled with their numbers.

    Args:
        count: how many.
        batch: the size of a batch.
        seconds: how long a batch takes to make.
        late: the path of a file that all but the first 20 batches wait for.
    """

    def make(numbers):
        waits = [ops.delay(tf.constant(seconds, tf.float32))]
        if late is not None:
            is_late = numbers[0] >= 20 * batch
            waits.append(tf.cond(is_late, lambda: wait_for_file(str(late)), tf.no_op))
        with tf.control_dependencies(waits):
            numbers = tf.cast(numbers[:, tf.newaxis], tf.float32)
        return tf.ones_like(numbers), numbers

    return tf.data.Dataset.range(count).batch(batch).map(make)


def counting_model(strategy, **kwargs):
    return compiled(
        strategy, slope_model, lambda: SGD(1.0), mean_output, metrics=lambda: [Sum()], **kwargs
    )


class When(keras.callbacks.Callback):
    """Has an action run in a thread of its own when an epoch has come to a step."""

    def __init__(self, step, action):
        super().__init__()
        self._step = step
        self._action = action
        self._threads = []

    def on_train_batch_end(self, batch, logs=None):
        if batch == self._step:
            self._threads.append(threading.Thread(target=self._action))
            self._threads[-1].start()

    def join(self):
        """Waits until it is done."""
        while self._threads:
            self._threads.pop().join()


# First, as the service then is new and has numbers yet that a new one gives again.
@pytest.mark.cases("two readers")
def test_the_first_reader_knows_what_was_handed_out_and_without_it_training_ends(cluster):
    model = counting_model(recsync.AsyncStrategy(cluster))
    callback = When(10, lambda: cluster.restart("reader", 0))
    for _ in range(2):
        # What raised it is kept, and with its traceback all that it has to do with.
        with pytest.raises(RuntimeError, match="reader:0 was started again, and has forgotten"):
            model.fit(numbered(4000, 4, 0.05), callbacks=[callback], verbose=0)
        callback.join()
        for _ in range(2):
            assert model.fit(numbered(40, 4), verbose=0).history["sum"] == [40 * 39 / 2]


@pytest.mark.cases("one reader-1", "two readers-3")
@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_every_example_is_trained_on_once_in_each_epoch(cluster, steps_per_execution):
    model = counting_model(recsync.AsyncStrategy(cluster), steps_per_execution=steps_per_execution)
    # Two readers end with a batch each that is not full.
    fit = dict(epochs=3, verbose=0, validation_data=numbered(57, 4))
    history = model.fit(numbered(101, 8), **fit).history
    assert history["sum"] == [101 * 100 / 2] * 3
    assert history["val_sum"] == [57 * 56 / 2] * 3
    assert steps_of(model) in [3 * 13 + i for i in range(4)]
    assert cluster.data_services.tasks() == 0  # The coordinator ran none of it.
    # By count: steps of one pass after another.
    model.fit(numbered(101, 8).repeat(), steps_per_epoch=7, epochs=4, verbose=0)


def test_predictions_come_in_the_order_of_the_data(cluster):
    model = compiled(recsync.AsyncStrategy(cluster))
    data = dataset()
    model.fit(data, verbose=0)
    local = functional()
    local.set_weights(model.get_weights())
    ids, labels = clicks()
    # Also of data that readers have.
    np.testing.assert_allclose(
        model.predict(data, verbose=0), local.predict(ids, verbose=0), rtol=1e-5
    )
    # Also with labels of which not even the rank is known.
    unknown = dataset().map(
        lambda x, y: (x, tf.raw_ops.PlaceholderWithDefault(input=y, shape=None))
    )
    assert unknown.element_spec[1].shape.rank is None
    assert model.predict(unknown, verbose=0).shape == (len(labels), 1)
    # So do the first batches, if only these count.
    model = counting_model(recsync.AsyncStrategy(cluster))
    tested = model.evaluate(numbered(101, 8), steps=3, return_dict=True, verbose=0)
    assert tested["sum"] == 24 * 23 / 2
    tested = model.evaluate(numbered(101, 8), return_dict=True, verbose=0)
    assert tested["sum"] == 101 * 100 / 2


@pytest.mark.parametrize("in_order", [[True, False], [False, True]])
def test_readers_run_what_was_predicted_with_before_and_none_of_predictions(two_readers, in_order):
    data, registrations = numbered(40, 4), registered_dataset.Registrations(two_readers, 60.0)
    for here in in_order * 2:
        distributed = DistributedDataset(
            registrations,
            data,
            start_predict=None,
            steps_per_epoch=None,
            first=10 if here else None,
            shall_retry=True,
        )
        registered, _ = distributed.shared()
        assert registered.readers == (0 if here else 2)


def test_arrays_are_trained_on_as_without_readers(cluster):
    ids, labels = clicks()
    losses = []
    for strategy in (recsync.AsyncStrategy(cluster), None):
        keras.utils.set_random_seed(3)
        model = functional() if strategy is None else compiled(strategy, make=lambda: SGD(0.0))
        if strategy is None:
            model.compile(SGD(0.0), "binary_crossentropy", run_eagerly=True)
        history = model.fit(ids, labels, batch_size=16, epochs=2, verbose=0).history
        losses.append(history["loss"])
    # Rows come in another order, on weights that stay.
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_a_dataset_that_calls_python_is_refused(cluster):
    model = counting_model(recsync.AsyncStrategy(cluster))
    ones = tf.TensorSpec([1, 1], tf.float32)
    rows = tf.data.Dataset.from_generator(
        lambda: ((np.ones([1, 1]), np.ones([1, 1])) for _ in range(8)),
        output_signature=(ones, ones),
    )
    with pytest.raises(ValueError, match="dataset must not call Python .from_generator"):
        model.fit(rows, verbose=0)
    assert len(model.fit(numbered(40, 4), verbose=0).history["sum"]) == 1


def asserting(count, after):
    """A dataset that asserts its number of batches, as the readers of text files do."""
    batches = numbered(count, 4).apply(tf.data.experimental.assert_cardinality(-(-count // 4)))
    return after(batches.prefetch(2)).with_options(tf.data.Options())


def test_a_dataset_that_asserts_its_cardinality_can_be_divided(cluster):
    model = counting_model(recsync.AsyncStrategy(cluster))
    data = asserting(101, lambda batches: batches.prefetch(1))
    assert model.fit(data, epochs=2, verbose=0).history["sum"] == [101 * 100 / 2] * 2
    # Before other transformations, in what a function makes, and one behind another.
    data = asserting(101, lambda batches: batches.map(lambda x, y: (x, y)))
    assert model.fit(data, verbose=0).history["sum"] == [101 * 100 / 2]

    def two(number):
        rows = tf.data.Dataset.range(2 * number, 2 * number + 2)
        return rows.apply(tf.data.experimental.assert_cardinality(2))

    data = tf.data.Dataset.range(40).flat_map(two)
    for _ in range(2):
        data = data.apply(tf.data.experimental.assert_cardinality(80))
    data = data.map(lambda number: (tf.ones([1]), tf.cast(tf.fill([1], number), tf.float32)))
    assert model.fit(data.batch(4), verbose=0).history["sum"] == [80 * 79 / 2]


def test_what_can_not_be_divided_is_refused(two_readers, tmp_path):
    model = counting_model(recsync.AsyncStrategy(two_readers))
    # The rows of a file come one after the other.
    path = tmp_path / "rows.txt"
    path.write_text("1\n" * 40)
    lines = tf.data.experimental.CsvDataset(str(path), [tf.int32])
    lines = lines.batch(4).map(lambda number: (tf.ones([4, 1]),) * 2)
    with pytest.raises(ValueError, match="dataset can't be divided among several readers"):
        model.fit(lines, verbose=0)


def test_a_dataset_of_unknown_length_is_trained_on_whole_in_each_epoch(cluster):
    model = counting_model(recsync.AsyncStrategy(cluster), steps_per_execution=2)
    # How many batches there are differs from pass to pass, if each reader has a part.
    data = numbered(101, 8).filter(lambda x, y: True)
    fit = dict(epochs=4, verbose=0, validation_data=numbered(57, 4).filter(lambda x, y: True))
    history = model.fit(data, **fit).history
    assert history["sum"] == [101 * 100 / 2] * 4
    assert history["val_sum"] == [57 * 56 / 2] * 4
    for _ in range(2):
        assert model.evaluate(data, return_dict=True, verbose=0)["sum"] == 101 * 100 / 2


def test_options_stay_where_an_assertion_goes():
    options = tf.data.Options()
    options.threading.private_threadpool_size = 3
    data = asserting(101, lambda batches: batches).with_options(options)
    assert int(data.cardinality()) == 26
    kept = data_parts.without_assertions(data)
    assert kept.options().threading.private_threadpool_size == 3
    assert kept.cardinality() == tf.data.UNKNOWN_CARDINALITY or int(kept.cardinality()) == 26
    other = numbered(8, 4)
    assert data_parts.without_assertions(other) is other


# Readers that die.


@pytest.mark.parametrize("on_batch_lost", ["retry", "drop"])
def test_a_reader_that_is_started_again_goes_on_with_what_nobody_has_had(
    two_readers, on_batch_lost
):
    model = counting_model(recsync.AsyncStrategy(two_readers, on_batch_lost=on_batch_lost))
    batches, batch = 120, 4

    data = numbered(batches * batch, batch, 0.02)
    # It is killed first.
    callback = When(20, lambda: two_readers.restart("reader", 1))
    history = model.fit(data, callbacks=[callback], verbose=0).history
    callback.join()
    everything = sum(range(batches * batch))
    if on_batch_lost == "retry":  # What was in its hands, too.
        assert (history["sum"], steps_of(model)) == ([everything], batches)
        return
    # What was in its hands is lost: at most a batch in the making, and those made ahead.
    assert everything - 30 * batch * batches * batch <= history["sum"][0] <= everything
    # The last one of each of the two may have fewer examples.
    assert batches - 30 <= steps_of(model) <= batches + 1
    history = model.fit(data, verbose=0).history
    assert history["sum"][0] == everything


def test_other_readers_are_started_again_with_the_first_one(two_readers):
    pids = [two_readers.pid("reader", index) for index in range(2)]
    log = two_readers.log_dir / "reader-1.log"
    starts = log.read_text().count("listening on")
    two_readers.restart("reader", 0)
    assert wait_until(lambda: two_readers.pid("reader", 1) != pids[1], 200.0)
    assert wait_until(lambda: answers(two_readers, 1), 200.0)
    assert wait_until(lambda: log.read_text().count("listening on") == starts + 1, 200.0)
    assert two_readers.is_alive("reader", 1)
    assert not is_running(pids[0]) and not is_running(pids[1])
    # It is found where it now is.
    pid = two_readers.pid("reader", 1)
    two_readers.kill("reader", 1)
    assert not two_readers.is_alive("reader", 1) and not is_running(pid)
    two_readers.restart("reader", 1)
    assert answers(two_readers, 1)


def test_a_reader_that_is_gone_with_its_part_of_the_data_ends_training(
    two_readers, monkeypatch, tmp_path
):
    only_stopped_ones_are_silent(monkeypatch, two_readers)
    model = counting_model(
        recsync.AsyncStrategy(two_readers, worker_timeout=1.0, silence_timeout=SILENCE)
    )
    is_killed = tmp_path / "is killed"
    callback = AtBatch(10, lambda: (two_readers.kill("reader", 1), is_killed.touch()))
    with pytest.raises(RuntimeError, match="reader:1 has not answered for .* start it again"):
        model.fit(numbered(400, 4, 0.05, is_killed), callbacks=[callback], verbose=0)
    two_readers.restart("reader", 1)
    assert model.fit(numbered(40, 4), verbose=0).history["sum"] == [40 * 39 / 2]


def test_without_its_first_reader_training_does_not_begin(cluster, monkeypatch):
    only_stopped_ones_are_silent(monkeypatch, cluster)
    model = counting_model(
        recsync.AsyncStrategy(cluster, worker_timeout=1.0, silence_timeout=SILENCE)
    )
    data = numbered(40, 4)
    cluster.kill("reader", 0)
    with pytest.raises(RuntimeError, match=r"reader:0 \(grpc://127.* has not answered for 3 s"):
        model.fit(data, verbose=0)
    cluster.restart("reader", 0)
    assert model.fit(data, verbose=0).history["sum"] == [40 * 39 / 2]


@pytest.mark.cases("one reader-True", "two readers-False")
@pytest.mark.parametrize("is_one_pass", [False, True])
def test_a_first_reader_that_was_started_again_does_not_mistake_one_dataset_for_another(
    cluster, is_one_pass
):
    model = counting_model(recsync.AsyncStrategy(cluster))
    evaluated = []

    class Restart(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                cluster.restart("reader", 0)
                # Another dataset is the first that the new one hears of.
                result = model.evaluate(numbered(24, 4), return_dict=True, verbose=0)
                evaluated.append(result["sum"])

    # All epochs together are a pass, which goes on around the evaluation, or each is one.
    data, steps = (numbered(40, 4).repeat(), 5) if is_one_pass else (numbered(40, 4), None)
    fit = dict(steps_per_epoch=steps, epochs=2, verbose=0)
    with pytest.raises(RuntimeError, match="reader:0 was started again, and has forgotten"):
        model.fit(data, callbacks=[Restart()], **fit)
    assert evaluated == [24 * 23 / 2]
    assert model.fit(numbered(40, 4), verbose=0).history["sum"] == [40 * 39 / 2]


@pytest.mark.cases("one reader")
def test_a_reader_that_hangs_ends_training(cluster, monkeypatch, tmp_path):
    only_stopped_ones_are_silent(monkeypatch, cluster)
    model = counting_model(
        recsync.AsyncStrategy(cluster, worker_timeout=1.0, silence_timeout=SILENCE)
    )
    is_paused = tmp_path / "is paused"
    callback = When(10, lambda: (cluster.pause("reader", 0), is_paused.touch()))
    with pytest.raises(RuntimeError, match="reader:0 has not answered for"):
        # Another reader goes on with its part.
        model.fit(numbered(600, 4, 0.05, is_paused), callbacks=[callback], verbose=0)
    callback.join()
    cluster.resume("reader", 0)
    assert model.fit(numbered(40, 4), verbose=0).history["sum"] == [40 * 39 / 2]


# Clusters with readers.


@pytest.fixture
def server(tmp_path):
    """Starts servers by hand: `server(cluster, job, index, *flags)` gives the process."""
    with contextlib.ExitStack() as stack:

        def start(cluster, job, index, *flags, kind=Server):
            return stack.enter_context(kind(tmp_path, cluster, job, index, *flags))

        yield start


@pytest.mark.full
def test_readers_start_in_any_order_and_end_at_sigterm(server):
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(local_cluster._reserve_port()) for _ in range(2)]
        addresses = [f"127.0.0.1:{port.getsockname()[1]}" for port in ports]
        cluster = {"worker": ["127.0.0.1:1"], "reader": addresses}
        # This one replaces its process itself.
        waiting = server(cluster, "reader", 1, kind=OwnServer)
        assert waiting.says("Waiting for reader:0")
        first = server(cluster, "reader", 0)
        for index, process in ((0, first), (1, waiting)):
            ready = f"tf_recsync server reader:{index} listening on {addresses[index]}\n"
            assert process.says(ready)
        again = server(cluster, "reader", 0)
        assert again.wait(60.0) == 98
        taken = f"reader:0 cannot listen on {addresses[0]}: another process has the port"
        assert taken in again.output()
        late = server({**cluster, "reader": ["127.0.0.1:2", "127.0.0.1:3"]}, "reader", 1)
        assert late.says("Waiting for reader:0")
        # Without the first one, the others begin anew, and have nothing left of before.
        before = waiting.output()
        first.kill()
        assert wait_until(
            lambda: "Waiting for reader:0" in waiting.output().removeprefix(before), 200.0
        )
        first = server(cluster, "reader", 0)
        ready = f"tf_recsync server reader:1 listening on {addresses[1]}\n"
        assert wait_until(lambda: ready in waiting.output().removeprefix(before), 200.0)
        for process in (waiting, first, late):
            process.terminate()
            assert process.wait(60.0) == 0


def test_a_reader_that_cannot_listen_says_where(server):
    # An address of nobody, kept for documentation.
    foreign = server({"reader": ["192.0.2.1:45671"]}, "reader", 0, "--bind_address=192.0.2.1")
    assert foreign.wait(60.0) == 1
    assert "reader:0 cannot listen on 192.0.2.1:45671: " in foreign.output()
    assert "Traceback" not in foreign.output()


@pytest.mark.cases("two readers-3")
@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_threads_of_trainers_share_what_readers_hand_out(cluster, steps_per_execution):
    strategy = recsync.ShadowSyncStrategy(cluster, recsync.EASGD(0.3), threads_per_trainer=2)
    model = counting_model(strategy, steps_per_execution=steps_per_execution)
    losses = model.fit(numbered(400, 8), epochs=2, verbose=0).history["sum"]
    assert losses == [400 * 399 / 2] * 2


def test_readers_of_one_process_do_not_wait_for_each_other(server):
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(local_cluster._reserve_port()) for _ in range(2)]
        addresses = [f"127.0.0.1:{port.getsockname()[1]}" for port in ports]
        both = server({"reader": addresses}, "reader", 0, "--tasks=reader:1,reader:0")
        for index in (1, 0):
            ready = f"tf_recsync server reader:{index} listening on {addresses[index]}\n"
            assert both.says(ready)


@pytest.mark.parametrize("readers", [1, 2])
def test_a_pass_that_is_left_early_ends_on_all_readers(readers):
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(local_cluster._reserve_port()) for _ in range(readers)]
        addresses = [f"127.0.0.1:{port.getsockname()[1]}" for port in ports]
    servers = [data_service.Reader(addresses, index, None) for index in range(readers)]
    endless = tf.data.Dataset.range(10).repeat()
    tf.data.experimental.service.register_dataset(
        f"grpc://{addresses[0]}", endless, compression=None, dataset_id="endless"
    )
    registered = registered_dataset.RegisteredDataset(
        f"grpc://{addresses[0]}",
        "endless",
        endless.element_spec,
        workers=2,
        readers=readers,
    )

    def wait_for(tasks):
        expected = [tasks] * readers
        assert wait_until(
            lambda: [server._worker._num_tasks() for server in servers] == expected, 60.0
        )

    iterator = registered.iterator("some pass")
    for _ in range(20):
        next(iterator)
    wait_for(1)
    iterator.close()
    wait_for(0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(readers=-1), "readers must be an integer of at least 0, got -1"),
        (dict(readers=1.0), "readers must be an integer of at least 0, got 1.0"),
        (dict(readers=1, processes=0), "readers must be 0 with processes=0"),
    ],
)
def test_bad_numbers_of_readers_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        recsync.LocalCluster(workers=1, **arguments)
