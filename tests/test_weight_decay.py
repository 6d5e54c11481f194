"""Weight decay of tables on parameter servers, whose rows decay when they are needed."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_recsync as recsync
from tf_recsync import checkpoint, ops
from tf_recsync.layers import EmbeddingCollection, FeatureConfig, TableConfig
from tf_recsync.optimizers import SGD, Adagrad
from tf_recsync.staleness import COUNTERS

ROWS, WIDTH = 30, 3


class Table:
    """A table of ones with all that lives beside it for SGD."""

    def __init__(self, dtype=tf.float32, rows=ROWS):
        self.value = tf.Variable(tf.ones([rows, WIDTH], dtype))
        self.version = tf.Variable(tf.zeros([rows], tf.int64))
        self.counters = tf.Variable(tf.zeros([COUNTERS], tf.int64))
        self.log_decays = tf.Variable(tf.zeros([rows + 2], tf.float64))

    @property
    def decays(self):
        return {"log_decays": [self.log_decays.handle], "decayed": [0]}

    def decay(self, learning_rate, weight_decay):
        logs = [self.log_decays.handle]
        ops.decay_weights([], logs, learning_rate, weight_decay=weight_decay)

    def push(self, ids, gradient, learning_rate, step):
        ops.sgd_rows(
            variables=[self.value.handle],
            versions=[self.version.handle],
            counters=[self.counters.handle],
            last_periods=[],
            last_updates=[],
            gradient=tf.reshape(gradient, [-1]),
            indices=ids,
            counts=[len(ids)],
            pulled_versions=np.zeros([0], np.int64),
            learning_rate=learning_rate,
            global_step=step,
            **self.decays,
        )

    def gather(self, ids):
        packed, _ = ops.gather_rows([self.value.handle], [], ids, [len(ids)], **self.decays)
        return np.reshape(packed, [-1, WIDTH])

    def settle(self):
        ops.settle_decay([self.value.handle], [self.log_decays.handle])


def test_rows_that_decay_when_they_are_needed_are_those_of_the_eager_rule():
    """5,000 touches, a learning rate that varies, and readers in between."""
    random = np.random.default_rng(3)
    table, eager = Table(), np.ones([ROWS, WIDTH])
    for step in range(1, 1001):
        rate = np.float32(random.uniform(0, 0.1))
        ids = random.integers(0, ROWS - 1, 5)  # The last row is never named.
        gradient = random.normal(size=[5, WIDTH]).astype(np.float32)
        table.decay(rate, 0.1)
        table.push(ids, gradient, rate, step)
        eager *= 1 - np.float64(np.float32(0.1)) * rate
        np.subtract.at(eager, ids, rate * gradient.astype(np.float64))
        if step % 250 == 0:
            np.testing.assert_allclose(table.gather(np.arange(ROWS)), eager, 1e-5, 1e-5)
            whole, _ = ops.pull_table(
                table.value.handle, table.version.handle, shape=[ROWS, WIDTH], **table.decays
            )
            np.testing.assert_allclose(whole, eager, 1e-5, 1e-5)
            copied = ops.copy_rows([table.value.handle], [7, 29], dtypes=["float"], **table.decays)
            np.testing.assert_allclose(copied.values[0], eager[[7, 29]], 1e-5, 1e-5)
            np.testing.assert_allclose(copied.log_decay, np.log(eager[-1, 0]), 1e-9)
        if step == 500:
            table.settle()
    assert table.value[-1, 0] > eager[-1, 0] + 0.01  # No push has been to this row.
    table.settle()
    np.testing.assert_allclose(table.value, eager, 1e-5, 1e-5)
    before = table.log_decays.numpy()
    table.settle()
    np.testing.assert_array_equal(table.log_decays, before)


def test_a_table_of_bfloat16_decays_by_as_much():
    table = Table(tf.bfloat16)
    for step in range(1, 501):
        table.decay(0.02, 0.1)
        table.push([0], np.zeros([1, WIDTH], np.float32), 0.02, step)
    np.testing.assert_allclose(table.gather([0, 1]), 0.998**500, 0.05)
    table.settle()
    np.testing.assert_allclose(tf.cast(table.value, tf.float32), 0.998**500, 0.05)


def test_a_table_of_bfloat16_decays_by_as_much_if_it_is_settled_often():
    table = Table(tf.bfloat16)
    starts = np.linspace(1.0, 1.9, ROWS * WIDTH).reshape([ROWS, WIDTH])
    table.value.assign(tf.cast(starts, tf.bfloat16))
    for _ in range(500):
        for _ in range(10):
            table.decay(0.03, 0.01)
        table.settle()
    # On average: each is rounded at random.
    expected = np.mean(starts) * (1 - 0.0003) ** 5000
    np.testing.assert_allclose(np.mean(tf.cast(table.value, tf.float32)), expected, 0.05)
    np.testing.assert_array_equal(table.gather(np.arange(ROWS)), tf.cast(table.value, tf.float32))


def test_variables_that_decay_at_once_are_multiplied():
    dense = tf.Variable([2.0, 4.0])
    narrow = tf.Variable(tf.ones([3], tf.bfloat16))
    ops.decay_weights([dense.handle, narrow.handle], [], 0.5, weight_decay=0.5)
    np.testing.assert_array_equal(dense, [1.5, 3.0])
    np.testing.assert_array_equal(tf.cast(narrow, tf.float32), 0.75)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.decay(10.0, 0.1), r"weight_decay \* learning_rate must be in \[0, 1\)"),
        (lambda t: t.decay(-1.0, 0.1), r"must be in \[0, 1\), not 0.1 \* -1"),
        (lambda t: t.decay(float("nan"), 0.1), "must be in"),
        (
            lambda t: ops.decay_weights([], [t.counters.handle], 0.1, weight_decay=0.1),
            "log_decays must be a variable of double",
        ),
        (
            lambda t: ops.decay_weights([t.version.handle], [], 0.1, weight_decay=0.1),
            "variables must be a variable of float",
        ),
        (
            lambda t: ops.settle_decay([t.value.handle], [Table(rows=7).log_decays.handle]),
            rf"log_decays must have shape \[{ROWS + 2}\] for {ROWS} rows",
        ),
        (
            lambda t: ops.settle_decay([t.value.handle], [t.value.handle]),
            "the same variable is passed twice",
        ),
        (
            lambda t: ops.gather_rows(
                [t.value.handle], [], [0], [1], log_decays=[t.log_decays.handle], decayed=[1]
            ),
            "decayed must be below 1",
        ),
        (
            lambda t: ops.gather_rows(
                [t.value.handle], [], [0], [1], log_decays=[t.log_decays.handle], decayed=[-1]
            ),
            "decayed must name the tables",
        ),
        (
            lambda t: ops.copy_rows([t.value.handle], [0], dtypes=["float"], decayed=[0]),
            "decayed must name the tables of the 0 log_decays",
        ),
        (
            lambda t: ops.copy_rows(
                [t.version.handle],
                [0],
                dtypes=["int64"],
                log_decays=[t.log_decays.handle],
                decayed=[0],
            ),
            "must be a variable of float or bfloat16",
        ),
    ],
)
def test_wrong_inputs_are_errors(call, message):
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        call(Table())


def test_a_negative_weight_decay_is_an_error():
    with pytest.raises(ValueError, match="weight_decay must be None or at least 0, not -0.1"):
        SGD(0.1, weight_decay=-0.1)


# On servers.


def no_gradient(_, outputs):
    return 0.0 * outputs


def model_of_ones(strategy, shards=1, optimizer=lambda: SGD(0.1, weight_decay=0.1), loss=None):
    """An Embedding and a table of a collection, and a dense layer, all of ones."""
    with strategy.scope():
        ids = {name: keras.Input((1,), dtype="int64", name=name) for name in ("a", "b")}
        embedded = keras.layers.Embedding(ROWS, WIDTH, "ones", name="table")(ids["a"])
        collection = EmbeddingCollection(
            [TableConfig("b", ROWS, WIDTH, initializer="ones", shards=shards)],
            [FeatureConfig("b", "b")],
            concatenate=True,
        )
        both = keras.layers.Concatenate()(
            [keras.layers.Flatten()(embedded), collection({"b": ids["b"]})]
        )
        dense = keras.layers.Dense(1, kernel_initializer="ones", use_bias=False, name="top")(both)
        model = keras.Model(ids, dense)
        model.compile(optimizer(), loss or no_gradient)
    return model


def batches(steps, ids=(0,)):
    x = {name: np.resize(ids, [steps, 1]).astype(np.int64) for name in ("a", "b")}
    return tf.data.Dataset.from_tensor_slices((x, np.ones([steps, 1], np.float32))).batch(1)


def check_all(model, expected):
    for weight in model.weights:
        np.testing.assert_allclose(weight, expected, 1e-6, err_msg=weight.path)


class Reader(keras.callbacks.Callback):
    """Reads tables in the middle of an epoch, and saves them in all ways."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder
        self.read: list[tuple[int, list[np.ndarray]]] = []
        self.saved: list[int] = []

    def on_train_batch_end(self, batch, logs=None):
        if batch in (2, 7):
            values = [weight.numpy() for weight in self.model.weights]
            # By then, workers stand still.
            self.read.append((int(self.model.optimizer.iterations), values))
        if batch == 4:
            checkpoint.save(f"{self.folder}/blocks", self.model)
            self.model.save(f"{self.folder}/whole.keras")
            tf.train.Checkpoint(model=self.model).write(f"{self.folder}/objects")
            self.saved.append(int(self.model.optimizer.iterations))


@pytest.fixture(scope="module")
def trained(clusters, tmp_path_factory):
    """A model whose two workers pushed ten times, what was read of it, and where it was saved."""
    strategy = clusters.strategy(workers=2, ps=2)
    model = model_of_ones(strategy, shards=2)
    folder = tmp_path_factory.mktemp("trained")
    reader = Reader(folder)
    recsync.testing.set_compute_time(strategy, 0.03)
    model.fit(batches(10), verbose=0, callbacks=[reader])
    recsync.testing.set_compute_time(strategy, None)
    return model, reader, folder


def test_one_workers_pushes_decay_all_rows_once(clusters):
    model = model_of_ones(clusters.strategy(workers=1, ps=1))
    model.fit(batches(10), verbose=0)
    check_all(model, 0.99**10)
    assert round(float(model.weights[0][ROWS - 1, 0]), 5) == 0.90438


def test_two_workers_pushes_lose_no_decay_and_share_none(trained):
    model, _, _ = trained
    assert int(model.optimizer.iterations) == 10
    check_all(model, 0.99**10)
    # As workers look rows up, and as this process does without a word to anybody.
    predicted = model.predict(batches(4, range(ROWS)), verbose=0)
    np.testing.assert_allclose(predicted, 2 * WIDTH * 0.99**20, 1e-5)
    np.testing.assert_allclose(tf.gather(model.weights[0]._value, [3]), 0.99**10, 1e-6)


def test_who_reads_in_the_middle_of_an_epoch_finds_rows_decayed_up_to_then(trained):
    _, reader, _ = trained
    assert len(reader.read) == 2
    for step, values in reader.read:
        for value in values:
            np.testing.assert_allclose(value, 0.99**step, 1e-6)


WAYS = {
    "blocks": lambda folder, model: checkpoint.restore(folder / "blocks", model),
    "keras": lambda folder, model: model.load_weights(folder / "whole.keras"),
    "objects": lambda folder, model: (
        tf.train.Checkpoint(model=model)
        .read(str(folder / "objects"))
        .assert_existing_objects_matched()
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_saved_tables_are_decayed_and_what_is_restored_decays_from_there(trained, way):
    model, reader, folder = trained
    (step,) = reader.saved
    local = model_of_ones(tf.distribute.get_strategy(), shards=3)
    WAYS[way](folder, local)
    check_all(local, 0.99**step)
    WAYS[way](folder, model)
    check_all(model, 0.99**step)
    model.fit(batches(2), verbose=0)
    check_all(model, 0.99 ** (step + 2))


def test_what_is_assigned_decays_from_there(trained):
    model, _, _ = trained
    model.fit(batches(1), verbose=0)
    for weight in model.weights:
        weight.assign(np.ones(weight.shape))
    model.fit(batches(3, [1]), verbose=0)
    check_all(model, 0.99**3)


def test_gba_decays_once_in_a_global_step(trained):
    cluster = trained[0].distribute_strategy.cluster
    model = model_of_ones(recsync.GBAStrategy(cluster, 2, 1))
    model.fit(batches(10), verbose=0)
    assert int(model.optimizer.iterations) == 5
    check_all(model, 0.99**5)
    assert round(float(model.weights[0][ROWS - 1, 0]), 5) == 0.95099


def test_shadow_sync_decays_tables_on_servers_once_in_a_push(trained):
    cluster = trained[0].distribute_strategy.cluster
    strategy = recsync.ShadowSyncStrategy(
        cluster, recsync.ModelAveraging(0.5), mode=recsync.Foreground(gap=100)
    )
    model = model_of_ones(strategy)
    model.fit(batches(6), verbose=0)
    for weight in model.weights[:2]:
        np.testing.assert_allclose(weight, 0.99**6, 1e-6)


@pytest.mark.parametrize("left_out", ["kernel", "top/", "table", "^kernel"])
def test_tables_that_train_decay_as_in_one_process(clusters, left_out):
    """Gradients, a schedule, and what does not decay: by a variable's name, or a layer's."""

    def make():
        rate = keras.optimizers.schedules.ExponentialDecay(0.3, 3, 0.5)
        optimizer = Adagrad(rate, weight_decay=0.2, rowwise=True)
        optimizer.exclude_from_weight_decay(var_names=[left_out])
        return optimizer

    data = batches(12, [0, 1, 2, 0, 5, 1])
    weights = []
    for strategy in (clusters.strategy(workers=1, ps=1), tf.distribute.get_strategy()):
        model = model_of_ones(strategy, optimizer=make, loss="mse")
        model.fit(data, verbose=0, shuffle=False)
        weights.append(model.get_weights())
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, 1e-5, 1e-6)


def test_what_one_optimizer_left_pending_another_one_finds_applied(clusters):
    strategy = clusters.strategy(workers=2, ps=2)
    model = model_of_ones(strategy)

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyboardInterrupt

    first = model.optimizer
    with pytest.raises(KeyboardInterrupt):
        model.fit(batches(10), verbose=0, callbacks=[Stop()])
    with strategy.scope():
        model.compile(SGD(0.1), no_gradient)  # Without decay.
    model.fit(batches(10), verbose=0)
    decayed = float(np.ravel(model.get_weights()[0])[0])
    assert decayed < 1.0
    check_all(model, decayed)
    # The first one again: what it decays is not decayed twice.
    with strategy.scope():
        model.compile(first, no_gradient)
    model.fit(batches(10), verbose=0)
    check_all(model, decayed * 0.99**10)
