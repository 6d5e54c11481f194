"""What the tests of training on a cluster share: clusters, data, models and comparisons."""

from __future__ import annotations

import contextlib
import glob
import itertools
import re
import threading
import time
from collections.abc import Sequence

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import cancellation

import tf_recsync as recsync
from tf_recsync.cluster.local_cluster import stands_still
from tf_recsync.optimizers import Adagrad

ROWS, IDS = 24, 4  # Of the models' embedding table; ids of an example.
BATCH = 16
LOSS = "binary_crossentropy"


class Clusters:
    """Local clusters, one at a time, each kept until another is asked for.

    The one of a test process outlives modules: those that ask for the same one share it, and
    find all of its servers running, whatever was done to them before.
    """

    def __init__(self):
        self._cluster: recsync.LocalCluster | None = None
        self._arguments: dict[str, object] = {}
        self._strategy: recsync.AsyncStrategy | None = None

    def get(self, workers: int, ps: int = 0, **options) -> recsync.LocalCluster:
        """A connected cluster of this size, with these options of `LocalCluster`."""
        arguments = {"workers": workers, "ps": ps, **options}
        if self._cluster is None or self._arguments != arguments:
            self.close()
            # As long as a machine may take that is busy with other tests.
            self._cluster = recsync.LocalCluster(**{"start_timeout": 200.0, **arguments})
            self._arguments = arguments
            self._cluster.connect(timeout=200.0)
        elif self._cluster.log_dir is not None:
            if _start_again(self._cluster):
                self._strategy = None  # It has variables on the servers.
            self._cluster.connect(timeout=200.0)  # Waits until parameter servers can be used.
        return self._cluster

    def strategy(self, workers: int, ps: int) -> recsync.AsyncStrategy:
        """The strategy that tests on this cluster share."""
        cluster = self.get(workers, ps)
        if self._strategy is None or self._strategy.cluster is not cluster:
            self._strategy = recsync.AsyncStrategy(cluster)
        recsync.testing.set_compute_time(self._strategy, None)
        return self._strategy

    def close(self) -> None:
        """Ends the cluster, if there is one: before a test connects to one of its own."""
        if self._cluster is not None:
            self._cluster.close()
        self._cluster = self._strategy = None


def _start_again(cluster: recsync.LocalCluster) -> bool:
    """Has all servers of a cluster run that are paused or have ended; whether some had ended."""
    sizes = {"worker": cluster.workers, "ps": cluster.ps, "reader": cluster.readers}
    servers = [(job, index) for job, size in sizes.items() for index in range(size)]
    for server in servers:
        cluster.resume(*server)
    ended = [server for server in servers if not cluster.is_alive(*server)]
    for server in ended:
        cluster.restart(*server)
    if any(job != "reader" for job, _ in ended):
        cluster.readmit()
    return bool(ended)


def only_stopped_ones_are_silent(
    monkeypatch: pytest.MonkeyPatch, cluster: recsync.LocalCluster
) -> None:
    """Has only servers be found silent in a test that are paused or killed, however short the
    limit for it is.

    On a busy machine others may stand still for a while, too: they get the time that they need to
    answer when they are asked for signs of life.
    """
    ask = cluster.probe

    def is_stopped(job: str, index: int) -> bool:
        return not cluster.is_alive(job, index) or stands_still(cluster.pid(job, index))

    def probe(job: str, index: int):
        deadline = time.monotonic() + 200.0
        while True:
            asked = ask(job, index)
            while asked.is_alive() and not is_stopped(job, index) and time.monotonic() < deadline:
                asked.join(0.1)
            # None of a reader that is late: it is asked again.
            is_late = time.monotonic() >= deadline
            if asked.answered is not None or is_stopped(job, index) or is_late:
                return asked

    monkeypatch.setattr(cluster, "probe", probe)


def wait_until(condition, seconds: float) -> bool:
    """Whether a condition holds within so many seconds; returns as soon as it does."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def taken(action) -> float:
    """Seconds that a call takes."""
    started = time.monotonic()
    action()
    return time.monotonic() - started


def quickest(action, seconds: float) -> float:
    """What a call returns, seconds, or a later one if that was more: a machine may be busy."""
    for _ in range(20):
        took = action()
        if took < seconds:
            break
    return took


def fits_until(condition, model: keras.Model, data: tf.data.Dataset, **options) -> int:
    """Trains on some data again and again until a condition holds; how often.

    What happens beside training, and who has a part in it, is up to the machine. If it never
    happens, the test runs into its time limit.
    """
    for number in itertools.count(1):
        model.fit(data, verbose=0, **options)
        if condition():
            return number


def check_cancelled_before(call) -> None:
    """Checks that an op ends with an error if its step is cancelled before it begins to wait.

    Args:
        call: the op, which would wait for ever, in a function of no arguments.
    """
    begun, is_cancelled = threading.Event(), threading.Event()

    def wait():
        begun.set()
        assert is_cancelled.wait(60)

    @tf.function(input_signature=[], autograph=False)
    def step():
        with tf.control_dependencies([tf.py_function(wait, [], [])]):
            call()

    manager = cancellation.CancellationManager()
    run = manager.get_cancelable_function(step.get_concrete_function())
    errors = []

    def run_step():
        try:
            run()
        except tf.errors.OpError as error:
            errors.append(error)

    thread = threading.Thread(target=run_step, daemon=True)
    thread.start()
    assert begun.wait(60)
    manager.start_cancel()
    is_cancelled.set()
    thread.join(60)
    assert [type(error) for error in errors] == [tf.errors.CancelledError]


def missing(copies: Sequence[object]) -> list[int]:
    """The workers that are lost, by what a strategy's `copies` gives."""
    return [worker for worker, copy in enumerate(copies) if copy is None]


def told_losses(text: str) -> int:
    """How many losses of workers a log tells of: a busy machine may keep others silent, too.

    A worker that is still away when the next pass begins is a loss of that one, too.
    """
    return len(re.findall(r"worker:\d+ (?:was lost|is still away)", text))


def clicks(n: int = 320, seed: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Ids [n, IDS], repeated within a batch and even within an example, and labels [n, 1].

    The last rows of the table are never named.
    """
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, ROWS - 4, (n, IDS)).astype(np.int32)
    logits = 2.0 * np.sin(ids.astype(np.float64)).sum(1, keepdims=True)
    return ids, (rng.random((n, 1)) < 1 / (1 + np.exp(-logits))).astype(np.float32)


def functional(**table) -> keras.Model:
    """Embedding and dense layers; `table` goes to the Embedding."""
    inputs = keras.Input((IDS,), dtype="int32")
    x = keras.layers.Embedding(ROWS, 3, name="table", **table)(inputs)
    x = keras.layers.Dense(8, activation="relu", name="hidden")(keras.layers.Flatten()(x))
    return keras.Model(inputs, keras.layers.Dense(1, "sigmoid", name="out")(x), name="clicks")


def sequential() -> keras.Model:
    """The same, with its variables made only when data come."""
    return keras.Sequential(
        [
            keras.layers.Embedding(ROWS, 3),
            keras.layers.Flatten(),
            keras.layers.Dense(8, "relu"),
            keras.layers.Dense(1, "sigmoid"),
        ]
    )


class Subclassed(keras.Model):
    """The same, as a subclass."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.table = keras.layers.Embedding(ROWS, 3)
        self.flat = keras.layers.Flatten()
        self.hidden = keras.layers.Dense(8, "relu")
        self.out = keras.layers.Dense(1, "sigmoid")

    def call(self, inputs):
        return self.out(self.hidden(self.flat(self.table(inputs))))


class OwnStep(Subclassed):
    """A model with a train_step of its own, as users write them."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return self.finish(loss, y, self(x))

    def finish(self, loss, y, predictions):
        """Updates the metrics; returns what train_step returns."""
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, predictions)
        return {metric.name: metric.result() for metric in self.metrics}


class Tied(keras.Model):
    """Predicts from the same table that it looks up in."""

    def __init__(self):
        super().__init__()
        self.table = keras.layers.Embedding(ROWS, 3)

    def build(self, shape):
        self.table.build(shape)
        super().build(shape)

    def call(self, ids):
        rows = keras.ops.mean(self.table(ids), axis=1)
        scores = rows @ keras.ops.transpose(self.table.embeddings)
        return keras.ops.sigmoid(keras.ops.max(scores, axis=1, keepdims=True))


class CallCounter(keras.layers.Layer):
    """Counts the steps that it is trained in."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, inputs, training=False):
        if training:
            self.calls.assign_add(1.0)
        return inputs


class LabelSum(keras.metrics.Metric):
    """The exact sum of the labels of all batches, or of a power of them; their number with 0."""

    def __init__(self, name="label_sum", power=1):
        super().__init__(name=name, dtype="float64")
        self.power = power
        self.total = self.add_variable((), initializer="zeros", dtype="float64", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        labels = keras.ops.cast(y_true, "float64")
        if self.power == 0:
            # Known before there is a batch, if all batches have one size.
            self.total.assign_add(keras.ops.cast(keras.ops.size(labels), "float64"))
        else:
            self.total.assign_add(keras.ops.sum(keras.ops.power(labels, self.power)))

    def result(self):
        return self.total + 0.0  # The variable itself would have changed when Keras reads its logs.


def slope_model(units: int = 1) -> keras.Model:
    """A linear model on inputs of 1: with `mean_output` as loss, every gradient is exactly 1."""
    inputs = keras.Input((1,))
    dense = keras.layers.Dense(units, use_bias=False, kernel_initializer="zeros", name="slope")(
        inputs
    )
    return keras.Model(inputs, dense)


def mean_output(y_true, y_pred):
    """A loss with gradient 1: one step of SGD(lr) takes exactly lr off the slope."""
    return keras.ops.mean(y_pred)


def adagrad() -> Adagrad:
    """The usual optimizer; to be made in a strategy's scope."""
    return Adagrad(0.1)


def compiled(
    strategy, build=functional, make=adagrad, loss=LOSS, metrics=lambda: [], **kwargs
) -> keras.Model:
    """Builds and compiles a model in the strategy's scope."""
    with strategy.scope():
        model = build()
        model.compile(make(), loss, metrics=metrics(), **kwargs)
    return model


def dataset(n: int = 320, batch: int = BATCH) -> tf.data.Dataset:
    """`clicks` in batches."""
    return tf.data.Dataset.from_tensor_slices(clicks(n)).batch(batch)


def wait_for_file(path: str) -> tf.Operation:
    """An op that waits until there is a file: in a server's process, where there is no Python."""

    def is_missing(turn):
        # Which TensorFlow must not take for a constant.
        name = tf.strings.join([path, tf.strings.substr(tf.strings.as_string(turn), 0, 0)])
        return tf.equal(tf.size(tf.io.matching_files(name)), 0)

    def wait(turn):
        with tf.control_dependencies([recsync.ops.delay(tf.constant(0.01))]):
            return turn + 1

    return tf.group(tf.while_loop(is_missing, wait, [tf.constant(0)]))


def slow_batches(number: int, seconds: float) -> tf.data.Dataset:
    """Batches of a single 1, each of which takes so long to make, one after the other."""

    def make(_):
        tf.py_function(lambda: time.sleep(seconds), [], [])
        return tf.ones([1, 1]), tf.ones([1, 1])

    shapes = tf.TensorShape([1, 1])
    return tf.data.Dataset.range(number).map(
        lambda number: tuple(tf.ensure_shape(part, shapes) for part in make(number))
    )


def held_back(data: tf.data.Dataset, first: int, is_ready, each=60.0) -> tf.data.Dataset:
    """The batches of a dataset, those from `first` on only when `is_ready()`, or after a minute.

    So there is something left to be trained on then, however late this process finds out.

    Args:
        data: the dataset.
        first: the number of the first one that waits.
        is_ready: asked by a thread of the pipeline.
        each: for how many seconds each waits at most; few where what is to happen may wait for
            workers that wait for it, as to read variables.
    """
    deadlines: list[float] = []

    def wait() -> None:
        now = time.monotonic()
        if not deadlines:
            deadlines.append(now + 60.0)
        wait_until(is_ready, min(each, deadlines[0] - now))

    def later(*batch):
        with tf.control_dependencies([tf.py_function(wait, [], [])]):
            return tf.nest.map_structure(tf.identity, batch)

    return data.take(first).concatenate(data.skip(first).map(later))


def numbered(kind: str):
    """(dataset of 400 examples that are labelled with their numbers, arguments of fit)."""
    numbers = np.arange(400, dtype=np.float32)[:, None]
    inputs = clicks(400)[0]
    whole = tf.data.Dataset.from_tensor_slices((inputs, numbers))
    if kind == "arrays":
        return (inputs, numbers), {"batch_size": 16}
    if kind == "static shapes":
        return (whole.batch(16, drop_remainder=True),), {}
    if kind == "unknown length":
        return (whole.filter(lambda x, y: y[0] >= 0).batch(16),), {}
    return (whole.batch(16),), {}


def gated(event: threading.Event) -> tf.data.Dataset:
    """The batches of `numbered`, the second half of which is slow until an event is set.

    So something is left to be trained on then, though Keras may count more slowly than a small
    model trains. They come all the same: whoever sets it may wait for steps that wait for them.
    """
    inputs, numbers = numbered("arrays")[0]

    def batches():
        for first in range(0, len(inputs), BATCH):
            if first >= len(inputs) // 2:
                event.wait(0.5)
            yield inputs[first : first + BATCH], numbers[first : first + BATCH]

    specs = tf.TensorSpec([BATCH, IDS], tf.int32), tf.TensorSpec([BATCH, 1], tf.float32)
    dataset = tf.data.Dataset.from_generator(batches, output_signature=specs)
    return dataset.apply(tf.data.experimental.assert_cardinality(len(inputs) // BATCH))


def sums() -> list[LabelSum]:
    """Metrics that tell which of the numbered examples were seen."""
    return [LabelSum(), LabelSum("squares", power=2), LabelSum("examples", power=0)]


def steps_of(model: keras.Model) -> int:
    """The global step."""
    return int(model.optimizer.iterations.numpy())


def state_of(model: keras.Model) -> dict[str, np.ndarray]:
    """Everything that the optimizer keeps, by name; counters of automatic names left out."""
    variables = model.optimizer.variables
    return {re.sub(r"_\d+(?=_|/|$)", "", v.path): v.numpy() for v in variables}


def assert_close(a, b, tolerance: float = 2e-5) -> None:
    """Compares lists of arrays."""
    for one, other in zip(a, b, strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


@contextlib.contextmanager
def compute_time(strategy: recsync.AsyncStrategy, seconds: float, slowdown=None):
    """Inside, every training step takes that much longer, and some longer still."""
    recsync.testing.set_compute_time(strategy, seconds, slowdown)
    try:
        yield
    finally:
        recsync.testing.set_compute_time(strategy, None)


def events(folder) -> dict[tuple[str, str], list]:
    """The TensorBoard events of a folder: by plugin and tag, scalars as floats."""
    found = {}
    for path in glob.glob(f"{folder}/*tfevents*"):
        for record in tf.data.TFRecordDataset(path):
            for value in tf.compat.v1.Event.FromString(record.numpy()).summary.value:
                plugin = value.metadata.plugin_data.plugin_name
                array = tf.make_ndarray(value.tensor)
                array = float(array) if plugin == "scalars" else array
                found.setdefault((plugin, value.tag), []).append(array)
    return found


class Slopes(keras.callbacks.Callback):
    """Puts the weight of `slope_model` into the logs."""

    def on_epoch_end(self, epoch, logs=None):
        logs["slope"] = float(self.model.get_layer("slope").kernel.numpy()[0, 0])


class AtBatch(keras.callbacks.Callback):
    """Calls `action()` once, when `batch` of an epoch is finished."""

    def __init__(self, batch: int, action):
        super().__init__()
        self._batch = batch
        self._action = action

    def on_train_batch_end(self, batch, logs=None):
        if self._action is not None and batch >= self._batch:
            action, self._action = self._action, None
            action()


class UntilAllGoOn(keras.callbacks.Callback):
    """Ends training when each worker has done some steps more.

    Args:
        then: gets the steps that each had done, when it shall be waited for.
    """

    def __init__(self, then: list[int]):
        super().__init__()
        self._then = then

    def on_train_batch_end(self, batch, logs=None):
        if self._then:
            done = self.model.distribute_strategy.worker_steps(self.model)
            more = [now - before for now, before in zip(done, self._then, strict=True)]
            if min(more) > 2:
                self.model.stop_training = True


def rated_by_users() -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Inputs "user" and "x" of 60 examples, labels and weights."""
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 2, 60).astype(np.float32)
    inputs = {"user": rng.integers(0, 9, 60).astype(np.float32), "x": rng.random((60, 1))}
    return inputs, labels, rng.uniform(0.1, 2, 60)


def model_of_users() -> keras.Model:
    """A model of `rated_by_users`, which looks at "x" alone."""
    inputs = {"user": keras.Input((), name="user"), "x": keras.Input((1,), name="x")}
    return keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(inputs["x"]))


def check_group_auc(strategy, make_optimizer) -> None:
    """Checks that the callback GroupAUC, and Calibration, do what they are for."""
    with strategy.scope():
        model = model_of_users()
        model.compile(make_optimizer(), LOSS, weighted_metrics=[recsync.metrics.Calibration()])
    inputs, labels, weights = rated_by_users()
    data = tf.data.Dataset.from_tensor_slices((inputs, labels, weights)).batch(8)
    callback = recsync.callbacks.GroupAUC(data, "user")
    history = model.fit(
        data, epochs=2, validation_data=data, callbacks=[callback], verbose=0
    ).history
    predictions = model.predict(data, verbose=0)
    expected = recsync.metrics.group_auc(labels, predictions, inputs["user"], weights)
    assert len(history["val_gauc"]) == 2
    assert history["val_gauc"][-1] == np.float64(expected)
    calibration = (predictions[:, 0] * weights).sum() / (labels * weights).sum()
    assert abs(history["val_calibration"][-1] / calibration - 1) < 1e-5


def end_of(device: str) -> str:
    """Who has a device: a server's number, or "worker"."""
    return device.partition("/job:ps/replica:0/task:")[2][:1] or "worker"


def live_operations(last: Sequence[tf.Operation]) -> set[tf.Operation]:
    """The operations of a graph that `last` depends on, and these."""
    live: set[tf.Operation] = set()
    pending = list(last)
    while pending:
        op = pending.pop()
        if op not in live:
            live.add(op)
            pending += [*(tensor.op for tensor in op.inputs), *op.control_inputs]
    return live


class Gossip(recsync.Algorithm):
    """A synchronizer of a user's: trainers meet in random pairs, and both take their mean."""

    def sync(self, trainers, center):
        count = len(trainers)
        values = [trainer.read() for trainer in trainers]
        order = tf.random.shuffle(tf.range(count))
        place = tf.argsort(order)
        for i, trainer in enumerate(trainers):
            # Of an odd number, the last one is alone.
            partner = order[tf.minimum(tf.bitwise.bitwise_xor(place[i], 1), count - 1)]
            with trainer.on():
                met = tf.switch_case(
                    partner,
                    [
                        lambda trainer=trainer, j=j: trainer.get(values[j], trainers[j])
                        for j in range(count)
                    ],
                )
            trainer.move(met, 0.5)
