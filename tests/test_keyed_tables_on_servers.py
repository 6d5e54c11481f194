"""Tables whose ids are keys on servers: every key gets its gradients, and keeps its row."""

import contextlib
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import events, held_back

import tf_recsync as recsync
from tf_recsync import checkpoint
from tf_recsync.callbacks import Checkpoint, TrainingReport
from tf_recsync.embedding import checkpoint as embedding_checkpoint
from tf_recsync.embedding.keys import counts_of_tables
from tf_recsync.embedding.physical_tables import physical_tables
from tf_recsync.layers import Admission, EmbeddingCollection, FeatureConfig, TableConfig
from tf_recsync.optimizers import SGD, Adagrad

pytestmark = pytest.mark.usefixtures("end_calls_of_servers_that_were_cut_off")

BATCH, BATCHES = 4, 60
UNIFORM = keras.initializers.RandomUniform(-1, 1, seed=3)
KEYS = np.random.default_rng(7).integers(-(2**63), 2**63 - 1, 40)
OTHERS = np.arange(40)
MODES = {
    "async": (lambda c: recsync.AsyncStrategy(c), 1),
    "sync": (
        lambda c: recsync.SyncStrategy(c, global_batch_size=2 * BATCH, local_batch_size=BATCH),
        2,
    ),
    "GBA": (lambda c: recsync.GBAStrategy(c, 2 * BATCH, BATCH, staleness_tolerance=1000), 2),
    "Hop": (lambda c: recsync.HopStrategy(c, recsync.topology.ring(2)), 1),
    "ShadowSync": (lambda c: recsync.ShadowSyncStrategy(c, recsync.EASGD(0.3), sync_ps=[1]), 1),
}


def sgd(**options):
    return SGD(1.0, **options)


def adagrad():
    return Adagrad(0.1)


@pytest.fixture
def cluster(clusters):
    return clusters.get(workers=2, ps=2)


def model_of(strategy=None, optimizer=sgd, rows=20_000, dtype="int64", units=0, **options):
    """The gradient of a key's vector is 1 / BATCH for each example that has it.

    With units there is a dense layer, too, on whose output the loss does not depend.
    """
    strategy = strategy or tf.distribute.get_strategy()
    with strategy.scope():
        ids = keras.Input((), dtype=dtype, name="user")
        layer = EmbeddingCollection(
            [TableConfig("users", rows, 2, UNIFORM, keys="any", **options)],
            [FeatureConfig("user", "users")],
            name="keyed",
        )
        vectors = layer({"user": ids})["user"]
        output = keras.ops.sum(vectors, axis=1, keepdims=True)
        if units:
            others = keras.layers.Dense(units)(keras.ops.stop_gradient(vectors))
            output += 0.0 * keras.ops.sum(others, axis=1, keepdims=True)
        model = keras.Model({"user": ids}, output)
        model.compile(optimizer(), loss=lambda y, p: p)
    return model


def dataset(ids) -> tf.data.Dataset:
    both = {"user": ids}, np.zeros((len(ids), 1), np.float32)
    return tf.data.Dataset.from_tensor_slices(both).batch(BATCH)


def some(keys, batches=BATCHES) -> np.ndarray:
    """Keys of so many batches, some of them often; all of them come."""
    rng = np.random.default_rng(2)
    chosen = np.minimum(rng.geometric(0.1, batches * BATCH) - 1, len(keys) - 1)
    chosen[: len(keys)] = range(len(keys))
    return keys[rng.permutation(chosen)]


def scores(model, keys) -> np.ndarray:
    return model.predict(dataset(keys), verbose=0)[:, 0]


def first_scores(keys) -> np.ndarray:
    """What keys score before any update, by a table in this process."""
    model = model_of()
    return model({"user": tf.constant(keys)}, training=True).numpy()[:, 0]


def keyed_tables(model) -> list[keras.Variable]:
    """The shards of a model's table."""
    return [v for v in model.variables if hasattr(v, "keyed")]


def entries_of(model) -> np.ndarray:
    """The keys of a model's table that have rows."""
    entries = np.concatenate([v.keyed.entries.numpy() for v in keyed_tables(model)])
    return entries[entries[:, 1] != 0, 0]


def check_adds_up(model, strategy) -> recsync.layers.KeyCounts:
    (counts,) = strategy.tables(model).values()
    keys = entries_of(model)
    assert len(np.unique(keys)) == len(keys) == counts.used <= counts.capacity
    assert counts.admitted - counts.evicted == counts.used
    return counts


@pytest.mark.cases("async-options0", "Hop-options3", "GBA-options6")
@pytest.mark.parametrize(
    ("mode", "options"),
    [
        *((mode, {}) for mode in MODES),
        # Gradients of a key are summed up on the worker, and pushed by the key.
        ("async", {"global_clipnorm": 1e9}),
        ("GBA", {"clipnorm": 1e9}),
    ],
)
def test_every_key_gets_all_its_gradients(cluster, mode, options):
    make, together = MODES[mode]
    strategy = make(cluster)
    model = model_of(strategy, lambda: sgd(**options), units=int(mode == "Hop"))
    ids = some(KEYS)
    model.fit(dataset(ids), verbose=0)
    counts = np.array([(ids == key).sum() for key in KEYS])
    # Two elements each, and every update is that of so many batches together.
    expected = first_scores(KEYS) - 2 * counts / BATCH / together
    np.testing.assert_allclose(scores(model, KEYS), expected, rtol=1e-4, atol=1e-4)
    found = check_adds_up(model, strategy)
    assert (found.used, found.evicted, found.refused) == (len(KEYS), 0, 0)
    assert scores(model, np.array([5, 6])).tolist() == [0, 0]
    assert strategy.tables(model)["keyed/users"].unknown == 2


@pytest.mark.cases("zeros")
@pytest.mark.parametrize("unknown", ["zeros", "mean"])
def test_keys_without_a_row_count_in_clipping_as_they_do_in_one_process(clusters, unknown):
    ids = some(KEYS)
    models = []
    for strategy in (recsync.AsyncStrategy(clusters.get(workers=1, ps=2)), None):
        options = {"unknown": unknown, "admission": Admission(3), "rows": 64}
        model = model_of(strategy, lambda: sgd(global_clipnorm=0.3), **options)
        model.fit(dataset(ids), verbose=0)
        models.append(model)
        (counts,) = counts_of_tables(model).values()
        assert counts.used < len(KEYS) and counts.refused > 40 and counts.unknown == 0
    np.testing.assert_allclose(*(scores(model, KEYS) for model in models), rtol=1e-5, atol=1e-6)


def test_the_least_recent_keys_leave_a_full_table(cluster, tmp_path):
    strategy = recsync.AsyncStrategy(cluster)
    model = model_of(strategy, adagrad, rows=24, dtype="string")
    names = np.array([f"user {key}" for key in KEYS])
    report = TrainingReport(str(tmp_path))
    history = model.fit(dataset(some(names)), epochs=2, verbose=0, callbacks=[report]).history
    counts = check_adds_up(model, strategy)
    assert (counts.used, counts.capacity) == (23, 23) and counts.evicted > 0
    assert sum(history["keys_evicted"]) == counts.evicted
    assert sum(history["keys_admitted"]) == counts.admitted
    told = {tag for _, tag in events(tmp_path)}
    assert {"recsync/keyed/users/used", "recsync/keys_evicted"} <= told
    found = scores(model, names)
    assert np.count_nonzero(found) == 23
    recsync.serving.export_model(model, tmp_path / "export")
    served = tf.saved_model.load(tmp_path / "export")
    scored = served.serve({"user": tf.constant(names)})[:, 0]
    np.testing.assert_allclose(scored, found, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize(
    ("mode", "options"), [("async", {}), ("async", {"global_clipnorm": 1e9}), ("GBA", {})]
)
def test_keys_without_a_row_are_the_mean_of_their_shard_and_train_nothing(
    cluster, mode, options, tmp_path
):
    strategy = MODES[mode][0](cluster)
    model = model_of(
        strategy, lambda: sgd(**options), rows=8192, unknown="mean", admission=Admission(3)
    )
    model.fit(dataset(np.tile(KEYS, 3)), verbose=0)
    expected = first_scores(KEYS)
    rng = np.random.default_rng(4)
    # Each batch passes by 128 of the 4096 rows of each shard, or more, while others come once each.
    others = rng.integers(-(2**63), 2**63 - 1, 80 * BATCH)
    before = scores(model, KEYS)
    model.fit(dataset(others), verbose=0)
    counts = check_adds_up(model, strategy)
    assert (counts.used, counts.refused) == (len(KEYS), 2 * len(KEYS) + len(others))
    np.testing.assert_array_equal(scores(model, KEYS), before)
    assert (before < expected).all()
    by_shard = [before[table.keyed.owns(KEYS)].mean() for table in keyed_tables(model)]
    assert len(by_shard) == 2 and abs(by_shard[0] - by_shard[1]) > 1e-3
    found = scores(model, others)
    for mean, table in zip(by_shard, keyed_tables(model), strict=True):
        np.testing.assert_allclose(found[table.keyed.owns(others)], mean, rtol=1e-5)
    recsync.serving.export_model(model, tmp_path)
    served = tf.saved_model.load(tmp_path)
    scored = served.serve({"user": tf.constant(others)})[:, 0]
    np.testing.assert_allclose(scored, found, rtol=1e-6)


def test_steps_whose_rows_were_given_away_meanwhile_train_no_other_key(cluster):
    strategy = recsync.AsyncStrategy(cluster)
    # Room for hardly more than the keys of a step, and workers that take turns.
    model = model_of(strategy, rows=2 * BATCH)
    rng = np.random.default_rng(3)
    ids = np.concatenate([rng.permutation(KEYS)[:BATCH] for _ in range(400)])
    model.fit(dataset(ids), verbose=0)
    check_adds_up(model, strategy)
    keys = entries_of(model)
    # Since a key got its row, each of its updates has taken half of 1 off its score.
    updates = 2 * (first_scores(keys) - scores(model, keys))
    np.testing.assert_allclose(updates, np.round(updates), atol=1e-3)
    assert updates.min() >= 0


class LookUp(keras.callbacks.Callback):
    """Looks keys up in this process after each batch."""

    def __init__(self):
        super().__init__()
        self.found = []

    def on_train_batch_end(self, batch, logs=None):
        del batch, logs
        self.found.append(self.model({"user": tf.constant(KEYS)}).numpy()[:, 0])


def test_a_key_that_is_looked_up_while_workers_train_never_has_another_one_s_vector(cluster):
    strategy = recsync.AsyncStrategy(cluster)
    model = model_of(strategy, rows=2 * BATCH)
    rng = np.random.default_rng(3)
    ids = np.concatenate([rng.permutation(KEYS)[:BATCH] for _ in range(400)])
    callback = LookUp()
    model.fit(dataset(ids), verbose=0, callbacks=[callback])
    found = np.array(callback.found)
    # As above; one without a row has zeros.
    updates = np.where(found == 0, 0, 2 * (first_scores(KEYS) - found))
    assert np.count_nonzero(found) > len(found)
    np.testing.assert_allclose(updates, np.round(updates), atol=1e-3)


@pytest.fixture(scope="module")
def saved(clusters, tmp_path_factory):
    """Files of a model of four shards, what keys score with it then, others too, and later on."""
    folder = tmp_path_factory.mktemp("saved")
    strategy = recsync.AsyncStrategy(clusters.get(workers=1, ps=4))
    model = model_of(strategy, adagrad, unknown="mean")
    assert len(model.layers[1].placement.shards) == 4
    model.fit(dataset(some(KEYS)), verbose=0)
    expected = scores(model, KEYS), scores(model, OTHERS)
    assert len(np.unique(expected[1])) == 4  # A mean of each shard.
    model.save_weights(folder / "model.weights.h5")
    model.save(folder / "model.keras")
    checkpoint.save(folder / "own", model)
    files = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    files.write(str(folder / "tf"))
    with small_blocks():
        files.write(str(folder / "blocks"))
    model.fit(dataset(KEYS), verbose=0)
    return folder, expected, scores(model, KEYS)


@contextlib.contextmanager
def small_blocks():
    """Inside, TensorFlow's checkpoints are in blocks of 1024 keys."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(embedding_checkpoint, "BLOCK_BYTES", 1024 * 16)
        yield


@pytest.mark.cases("0-weights", "2-tf", "2-blocks", "3-own")
@pytest.mark.parametrize("way", ["weights", "keras", "own", "tf", "blocks"])
@pytest.mark.parametrize("ps", [0, 2, 3])
def test_keys_keep_their_rows_on_other_numbers_of_servers(clusters, saved, way, ps):
    folder, (expected, means), after = saved
    strategy = tf.distribute.get_strategy()
    if ps:
        strategy = recsync.AsyncStrategy(clusters.get(workers=1, ps=ps))
    model = model_of(strategy, adagrad, unknown="mean")
    with strategy.scope():
        if way == "keras":
            model = keras.models.load_model(folder / "model.keras", compile=False)
            model.compile(adagrad(), loss=lambda y, p: p)
        model.optimizer.build(model.trainable_variables)
    # Other keys than those of the file are gone then.
    model.fit(dataset(OTHERS), verbose=0)
    if way in ("weights", "keras"):
        model.load_weights(folder / "model.weights.h5")
    elif way == "own":
        checkpoint.restore(folder / "own", model)
    else:
        files = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        with small_blocks() if way == "blocks" else contextlib.nullcontext():
            files.read(str(folder / way)).assert_existing_objects_matched()
    np.testing.assert_allclose(scores(model, KEYS), expected, rtol=1e-6)
    np.testing.assert_allclose(scores(model, OTHERS), means, rtol=1e-6)
    assert sorted(entries_of(model)) == sorted(KEYS)
    # No key gets a second row, and all can be pushed to; accumulators are there, but for weights.
    model.fit(dataset(KEYS), verbose=0)
    assert sorted(entries_of(model)) == sorted(KEYS)
    found = scores(model, KEYS)
    if way in ("own", "tf", "blocks"):
        np.testing.assert_allclose(found, after, rtol=1e-5)
    assert (found < expected).all()


@pytest.mark.full
def test_a_chain_of_deltas_has_the_keys_that_came_and_those_that_left_and_the_mean(
    cluster, tmp_path
):
    strategy = recsync.AsyncStrategy(cluster)
    # So that there is time to write several while keys come and go.
    recsync.testing.set_compute_time(strategy, 0.03)
    model = model_of(strategy, adagrad, rows=24, unknown="mean")
    callback = Checkpoint(tmp_path, every_steps=15, full_every=100, keep=None)
    model.fit(dataset(some(KEYS, 200)), verbose=0, callbacks=[callback])
    assert len(callback.saved) > 3
    last = callback.saved[-1].path
    assert checkpoint.open(last).base is not None
    expected, keys = scores(model, KEYS), sorted(entries_of(model))
    left = expected[~np.isin(KEYS, keys)]
    assert left.all() and (left == scores(model, np.array([5]))).all()
    other = model_of(strategy, adagrad, rows=24, unknown="mean")
    checkpoint.restore(last, other)
    np.testing.assert_allclose(scores(other, KEYS), expected, rtol=1e-6)
    assert sorted(entries_of(other)) == keys


def test_a_server_that_dies_comes_back_with_the_keys_of_the_last_checkpoint(cluster, tmp_path):
    strategy = recsync.AsyncStrategy(cluster)
    recsync.testing.set_compute_time(strategy, 0.01)
    model = model_of(strategy, adagrad)
    callback = Checkpoint(tmp_path, every_steps=20, keep=None)

    class Kill(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if len(callback.saved) >= 3 and not callback.recoveries and not self.killed:
                self.killed = True
                cluster.kill("ps", 1)
                threading.Timer(0.2, cluster.restart, ["ps", 1]).start()

        killed = False

    data = held_back(dataset(some(KEYS, 400)), 300, lambda: callback.recoveries)
    model.fit(data, verbose=0, callbacks=[callback, Kill()])
    assert callback.recoveries == 1
    keys = entries_of(model)
    assert sorted(keys) == sorted(KEYS)
    first = first_scores(KEYS)
    assert (scores(model, KEYS) < first).all()
    other = model_of(strategy, adagrad)
    checkpoint.restore(callback.saved[-1].path, other)
    np.testing.assert_allclose(scores(other, KEYS), scores(model, KEYS), rtol=1e-6)


def test_vectors_of_keys_are_written_to_and_read_from_all_servers(cluster):
    strategy = recsync.AsyncStrategy(cluster)
    model = model_of(strategy)
    with strategy.scope():
        model.optimizer.build(model.trainable_variables)
    (layer,) = (own for own in model.layers if own.name == "keyed")
    vectors = np.arange(80.0).reshape(40, 2)
    assert layer.write_keys("users", KEYS, vectors) == 40
    np.testing.assert_array_equal(scores(model, KEYS), vectors.sum(1))
    read = [pair for block in layer.read_keys("users") for pair in zip(*block, strict=True)]
    assert sorted(int(key) for key, _ in read) == sorted(KEYS)
    assert sum(vector.sum() for _, vector in read) == vectors.sum()


def test_a_table_with_keys_that_nobody_trains_is_refused(cluster):
    strategy = recsync.AsyncStrategy(cluster)
    model = model_of(strategy)
    model.get_layer("keyed").trainable = False
    with strategy.scope():
        model.compile(sgd(), loss=lambda y, p: p)
    with pytest.raises(ValueError, match="keyed.*must be trained by the model's optimizer"):
        model.fit(dataset(KEYS), verbose=0)


def test_models_that_share_a_table_with_keys_do_not_train_it_by_turns(cluster):
    strategy = recsync.AsyncStrategy(cluster)
    model = model_of(strategy)
    with strategy.scope():
        other = keras.Model(model.inputs, model.outputs)
        other.compile(sgd(), loss=lambda y, p: p)
    expected = first_scores(KEYS)
    model.fit(dataset(KEYS), verbose=0)
    np.testing.assert_allclose(scores(other, KEYS), expected - 0.5, rtol=1e-4)
    model.fit(dataset(OTHERS), verbose=0)  # New keys; the other one has only predicted.
    other.fit(dataset(KEYS), verbose=0)
    refused = pytest.raises(ValueError, match="'users'.* another model's optimizer has trained it")
    with refused:
        model.fit(dataset(KEYS), verbose=0)
    np.testing.assert_allclose(scores(model, KEYS), expected - 1.0, rtol=1e-4)
    with strategy.scope():
        model.compile(sgd(), loss=lambda y, p: p)
        model.optimizer.build(model.trainable_variables)  # As restoring a checkpoint does.
    layer = next(own for own in model.layers if hasattr(own, "write_keys"))
    layer.write_keys("users", [1_000], np.zeros([1, layer.table_values("users").shape[1]]))
    with refused:  # The row may have been given to another key.
        other.fit(dataset(KEYS), verbose=0)
    model.fit(dataset(KEYS), verbose=0)
    with refused:
        other.fit(dataset(KEYS), verbose=0)
    np.testing.assert_allclose(scores(other, KEYS), expected - 1.5, rtol=1e-4)
    np.testing.assert_allclose(scores(model, OTHERS), first_scores(OTHERS) - 0.5, rtol=1e-4)


class Regularized(keras.Model):
    """A model whose own step has a loss of all rows of its tables."""

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(self(x, training=True))
            loss += sum(tf.nn.l2_loss(v) for v in self.trainable_variables)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def test_a_loss_of_all_rows_of_a_table_with_keys_is_refused_by_name(cluster):
    strategy = recsync.AsyncStrategy(cluster)
    model = model_of(strategy)
    before = [table.numpy() for table in keyed_tables(model)]
    with strategy.scope():
        regularized = Regularized(model.inputs, model.outputs)
        regularized.compile(sgd())
    with pytest.raises(ValueError, match=r"table 'users' \(.*\) is trained as a whole.* no keys"):
        regularized.fit(dataset(OTHERS[:10]), verbose=0)
    for table, values in zip(keyed_tables(model), before, strict=True):
        np.testing.assert_array_equal(table.numpy(), values)


def test_copies_of_a_table_with_keys_are_refused(clusters):
    strategy = recsync.HopStrategy(clusters.get(workers=2, ps=0), recsync.topology.ring(2))
    with pytest.raises(
        ValueError, match=r"\['users'\] have keys='any' and must be on embedding PS"
    ):
        model_of(strategy, keras.optimizers.SGD)


def test_a_placement_with_another_number_of_shards_is_refused():
    plan = recsync.plan_placement([TableConfig("users", 20_000, 2, shards=3)], ps=3)
    table = TableConfig("users", 20_000, 2, keys="any")
    with pytest.raises(ValueError, match="3 shards of table 'users', whose ids are keys: .* power"):
        physical_tables([table], plan)


def test_plans_give_a_table_with_keys_a_power_of_two_of_shards():
    table = TableConfig("users", 20_000, 2, keys="any")
    for ps, shards in ((1, 1), (2, 2), (3, 2), (5, 4), (9, 4)):
        plan = recsync.plan_placement([table], ps=ps)
        assert len(plan.shards) == shards
    # Values and an accumulator, a version, a key and its usage, and what finds it.
    plan = recsync.plan_placement([table], ps=1, bytes_per_row_overhead=8)
    assert plan.shards[0].memory == 20_000 * (2 * 4 * 2 + 8 + 32)
