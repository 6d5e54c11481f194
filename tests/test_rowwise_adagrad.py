"""Adagrad with one accumulator for each row: against numpy, on servers, and in files."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_close
from test_collection_saving import by_table

import tf_recsync as recsync
from tf_recsync import ops, staleness, topology
from tf_recsync.layers import EmbeddingCollection, FeatureConfig, TableConfig
from tf_recsync.ops.bags import Bags, PackedBags
from tf_recsync.optimizers import Adagrad, SwapAdagrad

RNG = np.random.default_rng(23)
SEED = RNG.bit_generator.state
RATE, EPSILON = 0.1, 1e-7
SWAP = recsync.Swap(period=4, decay=0.5)


@pytest.fixture(autouse=True)
def _seeded():
    RNG.bit_generator.state = SEED
    keras.utils.set_random_seed(7)


class Rule:
    """A table in float64 numpy; SWAP decays the accumulators of all rows at each period."""

    def __init__(self, value, swap=None):
        self.w, self.v = np.array(value, np.float64), np.full(len(value), 0.1)
        self.swap, self.decayed = swap, np.zeros(len(value), int)

    def step(self, t: int, gradients: dict[int, np.ndarray]):
        """Step t, by the sum of each row's gradients."""
        if self.swap and t % self.swap.period == 0:
            self.v *= self.swap.decay
        for row, gradient in gradients.items():
            self.v[row] += np.mean(np.square(gradient, dtype=np.float64))
            self.w[row] -= RATE * gradient / np.sqrt(self.v[row] + EPSILON)
            if self.swap:
                self.decayed[row] = t // self.swap.period

    def accumulators(self, t: int) -> np.ndarray:
        """As an optimizer has them that decays a row's when it is touched."""
        missed = t // self.swap.period - self.decayed if self.swap else 0
        return self.v / (self.swap.decay if self.swap else 1.0) ** missed


def summed(ids, gradients) -> dict[int, np.ndarray]:
    """The gradient of each row that is named, the gradients of repeated rows summed."""
    ids, gradients = np.asarray(ids), np.asarray(gradients, np.float64)
    return {int(row): gradients[ids == row].sum(0) for row in np.unique(ids)}


@pytest.mark.parametrize(
    ("shape", "swap", "jit", "dtype"),
    [
        ((7, 3), None, False, "float32"),
        *(((7, *row), SWAP, False, "float32") for row in ((3,), (16,), (2, 2), (1,))),
        ((7, 3), SWAP, False, "float64"),
        ((7, 3), None, True, "float32"),
        ((7, 2, 2), SWAP, True, "float32"),
    ],
)
def test_rows_follow_the_rule_and_dense_variables_that_of_adagrad(shape, swap, jit, dtype):
    table = keras.Variable(RNG.normal(size=shape), dtype=dtype, name="embeddings")
    dense = keras.Variable(RNG.normal(size=(2, 5)), dtype=dtype, name="kernel")
    usual = keras.Variable(dense.numpy(), dtype=dtype, name="kernel")
    rule = Rule(table.numpy(), swap)
    optimizer, plain = (Adagrad(RATE, swap=swap, rowwise=rowwise) for rowwise in (True, False))
    optimizer.build([table, dense])
    plain.build([usual])

    @tf.function(jit_compile=jit)
    def apply(ids, rows, gradient):
        optimizer.apply([tf.IndexedSlices(rows, ids, tf.constant(shape)), gradient])
        plain.apply([gradient])

    for t in range(1, 26):
        ids = RNG.integers(0, 6, 4)  # Some twice; most rows wait a few steps; row 6 never comes.
        rows = RNG.normal(size=(4, *shape[1:])).astype(dtype)
        apply(tf.constant(ids), tf.constant(rows), tf.constant(RNG.normal(size=(2, 5)), dtype))
        rule.step(t, summed(ids, rows))
    of_table, of_dense = optimizer.states
    assert of_table.accumulators[0].shape == (7,)
    assert_close([table.numpy()], [rule.w])
    assert_close([of_table.accumulators[0].numpy()], [rule.accumulators(25)])
    assert_close([dense.numpy()], [usual.numpy()], 0)
    assert_close([of_dense.accumulators[0].numpy()], [plain.states[0].accumulators[0].numpy()], 0)


def table_of(value, dtype="float32", **options):
    """An optimizer, and its state of a table."""
    optimizer = Adagrad(RATE, rowwise=True, **options)
    optimizer.build([keras.Variable(value, dtype=dtype, name="embeddings")])
    return optimizer, optimizer.states[0]


def push(optimizer, state, gradient, bags, pulled, step):
    packed = PackedBags.pack([bags])
    versions = tf.constant(pulled, tf.int64)
    flat = tf.reshape(tf.constant(gradient, tf.float32), [-1])
    optimizer.apply_rows([state], flat, packed, versions, RATE, tf.constant(step, tf.int64))


def test_gradients_of_bags_are_summed_and_weighted_before_their_mean_square_is_taken():
    value = RNG.normal(size=(5, 3))
    policy = staleness.InversePower(k=1, update_sensitivity=1.0)
    optimizer, state = table_of(value, swap=SWAP, staleness=policy)
    rule, lengths = Rule(value, SWAP), np.zeros(5)
    for t in range(1, 15):
        now = state.versions.numpy()
        ids = RNG.integers(0, 4, 6)
        pulled = np.maximum(now[ids] - RNG.integers(0, 5, 6), 0)
        scales = RNG.normal(size=6).astype(np.float32)
        gradient = RNG.normal(size=(3, 3))
        bags = np.array([0, 0, 0, 1, 1, 2], np.int32)
        own = Bags(
            tf.constant(ids), tf.constant(bags), tf.constant(scales), tf.constant(3, "int64")
        )
        push(optimizer, state, gradient, own, pulled, t)
        gradients = summed(ids, gradient[bags] * scales[:, None])
        before = rule.w.copy()
        for row in gradients:
            tau = now[row] - pulled[ids == row].min() + 1
            gradients[row] *= policy(tau, last_update=lengths[row])
        rule.step(t, gradients)
        for row in gradients:
            lengths[row] = np.linalg.norm(rule.w[row] - before[row])
    assert_close([state.variable.numpy()], [rule.w], 1e-4)
    assert_close([state.accumulators[0].numpy()], [rule.accumulators(14)], 1e-4)
    assert_close([state.last_updates[0].numpy()], [lengths], 1e-4)


@pytest.mark.parametrize(("dtype", "precision"), [("bfloat16", 2**-7), ("float16", 2**-10)])
def test_a_table_of_a_narrow_type_is_rounded_and_its_accumulators_are_not(dtype, precision):
    value = tf.cast(RNG.normal(size=(4, 6)), dtype)
    optimizer, state = table_of(value, dtype)
    rule = Rule(tf.cast(value, tf.float32).numpy())
    for t in range(1, 6):
        gradient = tf.cast(RNG.normal(size=(2, 6)), dtype)
        optimizer.apply([tf.IndexedSlices(gradient, [1, 3], [4, 6])])
        rule.step(t, summed([1, 3], tf.cast(gradient, tf.float32)))
        found = tf.cast(state.variable.value, tf.float64).numpy()
        # Of the two numbers around the exact one, a bfloat16 table may have either.
        np.testing.assert_allclose(found, rule.w, precision)
        rule.w = found
    assert state.accumulators[0].dtype == "float32"
    assert_close([state.accumulators[0].numpy()], [rule.v], 1e-6)


def test_the_op_refuses_accumulators_of_elements_and_changes_nothing():
    optimizer, state = table_of(np.ones((3, 2)))
    wrong = tf.Variable(tf.ones([3, 2]))
    rows = PackedBags.pack([Bags(tf.constant([1], tf.int64))])
    arguments = optimizer.rows_arguments(
        [state], tf.ones([2]), rows, tf.zeros([0], tf.int64), RATE, tf.constant(1, tf.int64)
    )
    arguments["accumulators"] = [wrong.handle]
    message = r"accumulator must have shape \[3\], not \[3,2\]"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        ops.rowwise_adagrad_rows(epsilon=EPSILON, **arguments)
    arguments["accumulators"] = [state.accumulators[0].value.handle]
    message = r"accumulator must have shape \[3,2\], not \[3\]"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        ops.adagrad_rows(epsilon=EPSILON, **arguments)
    assert_close([state.variable.numpy(), state.versions.numpy()], [np.ones((3, 2)), [0] * 3], 0)


@pytest.mark.parametrize("make", [Adagrad, SwapAdagrad])
def test_it_comes_back_from_its_config_and_is_off_by_default(make):
    assert make.from_config(make(rowwise=True).get_config()).rowwise is True
    config = make().get_config()
    assert config.pop("rowwise") is False
    assert make.from_config(config).rowwise is False  # Of a version that did not know it.


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_rowwise_must_be_true_or_false(value):
    with pytest.raises(ValueError, match=f"rowwise must be a bool, not {value!r}"):
        Adagrad(rowwise=value)


# On servers.

ROWS, WIDTH, BATCH = 24, 4, 8


def compiled(shards: int, rowwise: bool = True, scope=contextlib.nullcontext) -> keras.Model:
    """A model on the mean of three rows of a collection's table or, without shards, a layer's."""
    keras.utils.set_random_seed(7)
    with scope():
        inputs = keras.Input((3,), dtype="int64")
        if shards:
            table = TableConfig("rows", ROWS, WIDTH, "normal", "mean", shards)
            layer = EmbeddingCollection([table], [FeatureConfig("id", "rows")], name="table")
            pooled = layer({"id": inputs})["id"]
        else:
            layer = keras.layers.Embedding(ROWS, WIDTH, "normal", name="table")
            pooled = keras.layers.GlobalAveragePooling1D(name="mean")(layer(inputs))
        model = keras.Model(inputs, keras.layers.Dense(1, name="dense")(pooled))
        optimizer = Adagrad(RATE, rowwise=rowwise, swap=recsync.Swap(period=5, decay=0.5))
        model.compile(optimizer, "mse", jit_compile=False)
        optimizer.build(model.trainable_variables)
    return model


def fit(model, epochs=1, batch=BATCH):
    random = np.random.default_rng(9)
    ids, labels = random.integers(0, 20, (128, 3)), random.normal(size=(128, 1))
    model.fit(ids, labels, batch_size=batch, epochs=epochs, shuffle=False, verbose=0)


def by_name(model, tmp_path) -> dict[str, np.ndarray]:
    """All that is saved, tables whole."""
    found = by_table(model, tmp_path)
    assert any(value.shape == (ROWS,) and value.dtype == np.float32 for value in found.values())
    return found


def assert_alike(model, other, tmp_path, tolerance=2e-5):
    found, expected = by_name(model, tmp_path), by_name(other, tmp_path)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if not name.endswith("step_state"):  # What a step stands for.
            np.testing.assert_allclose(found[name], value, tolerance, tolerance, err_msg=name)


STRATEGIES = {
    "async": recsync.AsyncStrategy,
    "sync": lambda cluster: recsync.SyncStrategy(
        cluster, global_batch_size=2 * BATCH, local_batch_size=BATCH
    ),
    "Hop": lambda cluster: recsync.HopStrategy(cluster, topology.Topology([[1.0]])),
}


@pytest.mark.parametrize(("name", "shards"), [("async", 2), ("sync", 2), ("sync", 0), ("Hop", 0)])
def test_tables_on_two_servers_are_trained_as_in_one_process(clusters, name, shards, tmp_path):
    strategy = STRATEGIES[name](clusters.get(1, 2))
    model = compiled(shards, scope=strategy.scope)
    local = compiled(shards)
    fit(model, 2)
    fit(local, 2, 2 * BATCH if name == "sync" else BATCH)
    assert_alike(model, local, tmp_path)


def test_shadow_sync_has_accumulators_with_the_rows_on_embedding_servers(clusters):
    cluster = clusters.get(1, 2)
    strategy = recsync.ShadowSyncStrategy(cluster, recsync.EASGD(0.3), sync_ps=1)
    model = compiled(1, scope=strategy.scope)
    fit(model)
    (state,) = (state for state in model.optimizer.states if state.is_table)
    (accumulator,) = state.accumulators
    assert accumulator.shape == (ROWS,)
    assert accumulator._value.device == state.variable._value.device
    values = accumulator.numpy()
    assert np.all(values[20:] == np.float32(0.1)) and np.all(values[:20] != np.float32(0.1))


def test_the_memory_of_tables_is_about_half_of_that_with_accumulators_of_elements(clusters):
    strategy = clusters.strategy(1, 2)
    rowwise, whole = (
        strategy.memory(compiled(2, rowwise, strategy.scope))[:2] for rowwise in (True, False)
    )
    for own, other in zip(rowwise, whole, strict=True):
        assert own.tables == other.tables == other.slots == ROWS // 2 * WIDTH * 4
        assert own.slots == 0
        # A version of int64 and a period of int32, too.
        assert own.per_row == other.per_row + ROWS // 2 * 4 == ROWS // 2 * 16


def test_what_two_servers_saved_goes_on_on_three_and_in_one_process(clusters, tmp_path):
    strategy = clusters.strategy(1, 2)
    model = compiled(2, scope=strategy.scope)
    fit(model)
    model.save_weights(tmp_path / "two.weights.h5")
    tf.train.Checkpoint(model=model).write(str(tmp_path / "two"))
    model.save(tmp_path / "two.keras")
    recsync.checkpoint.save(tmp_path / "folder", model)
    expected = by_name(model, tmp_path)
    strategy = clusters.strategy(1, 3)
    models = [compiled(3, scope=strategy.scope), compiled(1)]
    for one in models:
        for load in (
            lambda one=one: one.load_weights(tmp_path / "two.weights.h5"),
            lambda one=one: (
                tf.train.Checkpoint(model=one)
                .read(str(tmp_path / "two"))
                .assert_existing_objects_matched()
            ),
            lambda one=one: recsync.checkpoint.restore(tmp_path / "folder", one),
        ):
            for variable in {id(v): v for v in [*one.variables, *one.optimizer.variables]}.values():
                variable.assign(keras.ops.ones_like(variable))
            load()
            found = by_name(one, tmp_path)
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                np.testing.assert_array_equal(found[name], value, err_msg=name)
    whole = keras.saving.load_model(tmp_path / "two.keras")
    assert whole.optimizer.rowwise is True
    for one in (*models, whole):
        fit(one)
    assert_alike(models[0], models[1], tmp_path)
    assert_alike(whole, models[1], tmp_path)


@pytest.mark.parametrize("shards", [0, 2])
@pytest.mark.parametrize("saved", [True, False])
def test_what_was_saved_with_another_rowwise_is_refused_by_that_name(saved, shards, tmp_path):
    model, other = compiled(shards, saved), compiled(shards, not saved)
    model.save_weights(tmp_path / "all.weights.h5")
    path = tf.train.Checkpoint(model=model).write(str(tmp_path / "all"))
    recsync.checkpoint.save(tmp_path / "folder", model)
    before = [variable.numpy() for variable in other.optimizer.variables]
    message = f"it was saved with rowwise={saved}, Adagrad here has {not saved}"
    with pytest.raises(ValueError, match=message):
        other.load_weights(tmp_path / "all.weights.h5")
    with pytest.raises(ValueError, match=message):
        recsync.checkpoint.restore(tmp_path / "folder", other)
    assert_close([variable.numpy() for variable in other.optimizer.variables], before, 0)
    message = "another model or optimizer than adagrad's(.|\n)*tables with rowwise=True"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        tf.train.Checkpoint(model=other).read(path).expect_partial()
