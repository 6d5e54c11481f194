"""Interactions on parameter servers, against those of one process and of the worker."""

import contextlib
import functools
import subprocess
import sys
import typing

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_close, end_of, live_operations
from test_interactions import (
    DIMENSION,
    FEATURES,
    ROWS,
    collection,
    configs,
    interactions,
    tables_of,
)

import tf_recsync as recsync
from tf_recsync.embedding.placement import Shard
from tf_recsync.layers import DotInteraction, EmbeddingCollection, FeatureConfig, TableConfig
from tf_recsync.strategies.model_variables import optimizers_of
from tf_recsync.synchronization.lookups import find_lookups
from tf_recsync.synchronization.pull_push import Layout, Step


class InWorker(keras.layers.Layer):
    """The same results, of a collection's plain vectors; the keys come as dense bags."""

    def call(self, vectors):
        film, user, shop = vectors["film"], vectors["user"], vectors["shop"]
        rows = tf.stack([vectors[f"watched_{i}"] for i in range(3)], 1)
        watched = tf.reduce_mean(rows, 1)
        pairs = [(film, watched), (film, user), (watched, user)]
        weights = tf.nn.softmax(0.5 * tf.einsum("bd,bkd->bk", film, rows), axis=1)
        return [
            vectors["day"],
            tf.stack([tf.reduce_sum(a * b, 1) for a, b in pairs], 1),
            tf.einsum("bk,bkd->bd", weights, rows),
            tf.abs(user - shop[:, :1]),
        ]


def click_model(beside: bool, **kwargs) -> keras.Model:
    inputs = {
        name: keras.Input((3,) if name == "watched" else (), dtype="int64", name=name)
        for name in FEATURES
    }
    if beside:
        vectors = list(collection(name="embed", **kwargs)(inputs).values())
    else:
        layer = EmbeddingCollection(
            configs(),
            [FeatureConfig(name, table) for name, table in FEATURES.items() if name != "watched"]
            + [FeatureConfig(f"watched_{i}", "films") for i in range(3)],
            name="embed",
            **kwargs,
        )
        ids = {name: x for name, x in inputs.items() if name != "watched"}
        ids |= {f"watched_{i}": inputs["watched"][:, i] for i in range(3)}
        vectors = InWorker()(layer(ids))
    x = keras.layers.Concatenate()(vectors)
    return keras.Model(inputs, keras.layers.Dense(1, "sigmoid", name="out")(x))


def click_data(n: int = 48) -> tf.data.Dataset:
    rng = np.random.default_rng(4)
    ids = {name: rng.integers(0, ROWS // 2, n) for name in FEATURES}
    ids["watched"] = rng.integers(0, ROWS // 2, (n, 3))
    labels = (rng.random((n, 1)) < 0.4).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((ids, labels)).batch(8, drop_remainder=True)


def compiled(beside, optimizer="SwapAdagrad", clip=None, eager=False, **kwargs) -> keras.Model:
    keras.utils.set_random_seed(3)
    model = click_model(beside, **kwargs)
    own = {"swap": recsync.Swap(period=5, decay=0.5)} if optimizer == "SwapAdagrad" else {}
    made = getattr(recsync.optimizers, optimizer)(0.1, global_clipnorm=clip, **own)
    model.compile(made, "binary_crossentropy", jit_compile=False, run_eagerly=eager)
    return model


def state_of(model):
    return [*tables_of(model.get_layer("embed")).values(), *model.get_layer("out").get_weights()]


class Expected(typing.NamedTuple):
    """What two epochs in this process alone give."""

    state: list[np.ndarray]
    predictions: np.ndarray
    loss: float


@functools.cache
def trained_locally(beside, optimizer="SwapAdagrad", clip=None) -> Expected:
    """Eagerly, as few steps are not worth a trace; as arrays, which outlive a connection."""
    model = compiled(beside, optimizer, clip, eager=True)
    model.fit(click_data(), epochs=2, verbose=0, shuffle=False)
    ((inputs, labels),) = click_data().unbatch().batch(48)
    found = model(inputs, training=False).numpy()
    likelihoods = np.where(labels.numpy() > 0, found, 1 - found)
    return Expected(state_of(model), found, -np.log(likelihoods).mean())


@pytest.mark.cases("SwapAdagrad-0.05")
@pytest.mark.parametrize(
    ("optimizer", "clip"), [("SwapAdagrad", None), ("Adam", None), ("SwapAdagrad", 0.05)]
)
def test_two_servers_train_as_one_process_does_and_as_with_the_worker(clusters, optimizer, clip):
    strategy = clusters.strategy(1, 2)
    local = trained_locally(True, optimizer, clip)
    worker = trained_locally(False, optimizer, clip)
    with strategy.scope():
        model = compiled(True, optimizer, clip)
    plan = model.get_layer("embed").placement
    together = {plan.shards_of(table)[0].ps for table in ("films", "users", "shops")}
    assert len(together) == 1
    assert len(set(plan.loads)) == 2
    initial = state_of(model)
    model.fit(click_data(), epochs=2, verbose=0)
    assert_close(state_of(model), local.state)
    assert_close(state_of(model), worker.state)
    for before, after in zip(initial, state_of(model), strict=True):
        assert np.abs(before - after).max() > 0.005
    # One push a step: every looked-up row was updated once in each.
    assert int(model.optimizer.iterations.numpy()) == 12
    assert_close([model.predict(click_data(), verbose=0)], [local.predictions])
    if optimizer == "Adam":  # Once: the optimizer has no part in it.
        np.testing.assert_allclose(model.evaluate(click_data(), verbose=0), local.loss, rtol=1e-4)


@pytest.mark.full
def test_a_trainer_with_dense_parameters_of_its_own_trains_as_one_process_does(clusters):
    strategy = recsync.ShadowSyncStrategy(
        clusters.get(1, 2), recsync.ModelAveraging(0.3), mode=recsync.Foreground(gap=1000)
    )
    local = trained_locally(True)
    with strategy.scope():
        model = compiled(True)
    model.fit(click_data(), epochs=2, verbose=0)
    assert_close(state_of(model), local.state)
    assert_close([model.predict(click_data(), verbose=0)], [local.predictions])
    assert len(strategy.copies(model)[0]) == 2  # The dense layer's; tables are on the servers.


class OwnStep(keras.Model):
    """Changes the gradients between the tape and the optimizer."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients = [
            tf.IndexedSlices(0.5 * g.values, g.indices, g.dense_shape)
            if isinstance(g, tf.IndexedSlices)
            else 0.5 * g
            for g in gradients
        ]
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {metric.name: metric.result() for metric in self.metrics}


@pytest.mark.full
def test_gradients_that_a_step_changed_are_pushed_as_they_are(clusters):
    strategy = clusters.strategy(1, 2)

    def trained(scope, **options):
        keras.utils.set_random_seed(3)
        with scope:
            plain = click_model(True)
            model = OwnStep(plain.inputs, plain.outputs)
            model.compile(recsync.optimizers.Adam(0.1), "binary_crossentropy", **options)
        model.fit(click_data(), verbose=0, shuffle=False)
        return state_of(model)

    here = trained(contextlib.nullcontext(), run_eagerly=True)
    assert_close(trained(strategy.scope(), jit_compile=False), here)


class ByParameter(keras.layers.Layer):
    """Ids that depend on a parameter: they can't be looked up before the step."""

    def build(self, shape):
        self.offset = self.add_weight(shape=(), initializer="ones", name="offset")

    def call(self, ids):
        return ids + tf.cast(tf.round(tf.stop_gradient(self.offset)), ids.dtype)


def test_ids_that_depend_on_parameters_are_looked_up_when_they_are_known(clusters):
    strategy = clusters.strategy(1, 2)

    def trained(scope, **options):
        keras.utils.set_random_seed(3)
        with scope:
            inputs = {name: keras.Input((), dtype="int64", name=name) for name in FEATURES}
            inputs["watched"] = keras.Input((3,), dtype="int64", name="watched")
            layer = collection(name="embed")
            shifted = ByParameter()(inputs["film"])
            vectors = layer({**inputs, "film": shifted})
            x = keras.layers.Concatenate()(list(vectors.values()))
            model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid", name="out")(x))
            model.compile(recsync.optimizers.Adam(0.1), "binary_crossentropy", **options)
        model.fit(click_data(), verbose=0, shuffle=False)
        return state_of(model)

    here = trained(contextlib.nullcontext(), run_eagerly=True)
    assert_close(trained(strategy.scope(), jit_compile=False), here)


# What travels.

WIDE, KINDS, EXAMPLES = 32, 4, 16


def wide_model(beside: bool) -> keras.Model:
    names = [f"f{i}" for i in range(KINDS)]
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in names}
    dots = DotInteraction("dots", names)
    layer = EmbeddingCollection(
        [TableConfig(f"t{i}", 1000, WIDE) for i in range(KINDS)],
        [FeatureConfig(name, f"t{i}") for i, name in enumerate(names)],
        placement=recsync.plan_placement(
            [TableConfig(f"t{i}", 1000, WIDE) for i in range(KINDS)],
            ps=2,
            together=[[f"t{i}" for i in range(KINDS)]],
        ),
        interactions=[dots] if beside else [],
        name="embed",
    )
    vectors = layer(inputs)
    x = vectors["dots"] if beside else keras.layers.Lambda(dots, (6,))(vectors)
    model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid", name="out")(x))
    model.compile(recsync.optimizers.Adagrad(0.1), "binary_crossentropy", jit_compile=False)
    return model


def traffic(model, batch) -> dict[tuple[str, str], dict[str, list[int]]]:
    """The sizes in bytes of all tensors that go from one device to another in a step.

    By (from, to), and by dtype.
    """
    layout = Layout.of(model, optimizers_of(model))
    spec = tf.nest.map_structure(tf.type_spec_from_value, batch)
    lookups = find_lookups(model, layout, "train_step", spec)
    labels = []

    @tf.function(autograph=False)
    def measured(batch):
        private = [tf.zeros(v.shape, v.dtype) for v in layout.private]
        step = Step(layout, private, lookups, batch, worker=tf.constant(0, tf.int64))
        with step.computing():
            model.train_step(batch)
        _, operations = step.finish()
        sizes = {}
        for op in live_operations(operations):
            for tensor in op.inputs:
                ends = (end_of(tensor.device), end_of(op.device))
                if ends[0] != ends[1] and tensor.op.type not in ("Placeholder", "Const"):
                    with tf.device(tensor.device):
                        size = tf.size(tensor, out_type=tf.int64) * tensor.dtype.size
                    sizes[tensor.name, *ends] = (*ends, tensor.dtype.name), size
        labels.extend(label for label, _ in sizes.values())
        with tf.control_dependencies(operations):
            return [tf.identity(size) for _, size in sizes.values()]

    found: dict = {}
    values = [int(size) for size in measured(batch)]
    for (source, to, dtype), size in zip(labels, values, strict=True):
        found.setdefault((source, to), {}).setdefault(dtype, []).append(size)
    return found


def test_only_results_and_their_gradients_travel(clusters):
    strategy = clusters.strategy(1, 2)
    rng = np.random.default_rng(5)
    ids = {f"f{i}": tf.constant(rng.permutation(1000)[:EXAMPLES]) for i in range(KINDS)}
    batch = ids, tf.constant(rng.integers(0, 2, (EXAMPLES, 1)), tf.float32)
    sizes = {}
    for beside in (True, False):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = wide_model(beside)
            model.optimizer.build(model.trainable_variables)
        tables = str(model.get_layer("embed").placement.shards[0].ps)
        sizes[beside] = traffic(model, batch)
        there, back = sizes[beside]["worker", tables], sizes[beside][tables, "worker"]
        vectors = EXAMPLES * KINDS * WIDE * 4
        results = EXAMPLES * KINDS * (KINDS - 1) // 2 * 4
        # One answer with rows, or results, and one push of their gradients; both with what
        # there is of the dense layer, and a learning rate, and gaps of 60 bytes at most.
        (answered,) = back["float32"]
        (pushed,) = there["float32"]
        for message, least in ((answered, 0), (pushed, 4)):
            dense = message - (results if beside else vectors)
            assert least <= dense <= 4 * (1 + 6 + 1) + 3 * 60
        # The ids, in one message; the worker gets no ids, versions or splits back.
        (asked,) = there["int64"]
        assert 8 * EXAMPLES * KINDS <= asked <= 8 * (EXAMPLES * KINDS + 24)
        assert sum(back.get("int64", [])) <= 16
    totals = [sum(map(sum, by.values())) for by in sizes[True].values()]
    in_worker = [sum(map(sum, by.values())) for by in sizes[False].values()]
    assert sum(totals) < 0.25 * sum(in_worker)


# Saving, exporting, placing.


@pytest.mark.full
def test_what_servers_trained_goes_on_locally_and_back(clusters, tmp_path):
    strategy = clusters.strategy(1, 2)
    with strategy.scope():
        model = compiled(True)
    model.fit(click_data(), epochs=1, verbose=0)
    model.save(tmp_path / "model.keras")
    one = keras.saving.load_model(tmp_path / "model.keras")
    assert_close(state_of(one), state_of(model))
    one.run_eagerly = True
    one.fit(click_data(), epochs=1, verbose=0, shuffle=False)
    with strategy.scope():
        back = keras.saving.load_model(tmp_path / "model.keras")
    back.fit(click_data(), epochs=1, verbose=0)
    assert_close(state_of(one), trained_locally(True).state)
    assert_close(state_of(back), trained_locally(True).state)


@pytest.mark.full
def test_an_exported_model_serves_without_this_package(tmp_path):
    model = compiled(True)
    batch = next(iter(click_data()))[0]
    expected = model(batch, training=False)
    model.export(str(tmp_path / "served"), verbose=False)
    np.savez(tmp_path / "batch.npz", **{name: ids.numpy() for name, ids in batch.items()})
    script = (
        "import sys, numpy as np, tensorflow as tf\n"
        "served = tf.saved_model.load(sys.argv[1] + '/served')\n"
        "batch = dict(np.load(sys.argv[1] + '/batch.npz'))\n"
        "served = served.serve({name: tf.constant(ids) for name, ids in batch.items()})\n"
        "assert 'tf_recsync' not in sys.modules\n"
        "np.save(sys.argv[1] + '/out.npy', served.numpy())\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, cwd=tmp_path)
    assert_close([np.load(tmp_path / "out.npy")], [expected])


@pytest.mark.full
def test_xla_trains_what_the_ops_do():
    model = compiled(True, out_of_range="clip")
    model.compile(recsync.optimizers.Adagrad(0.1), "binary_crossentropy", jit_compile=True)
    assert model.jit_compile
    model.fit(click_data(), verbose=0, shuffle=False)
    reference = compiled(True, optimizer="Adagrad", eager=True)
    reference.fit(click_data(), verbose=0, shuffle=False)
    assert_close(state_of(model), state_of(reference))


def test_a_placement_that_parts_or_splits_tables_is_refused_by_name(clusters):
    strategy = clusters.strategy(1, 2)
    tables = configs()
    parted = recsync.PlacementPlan(
        2, [Shard(t.name, 0, 1, t.rows, i % 2, 1.0) for i, t in enumerate(tables)]
    )
    split = recsync.PlacementPlan(
        2,
        [
            *(Shard("films", i, 2, ROWS // 2, i, 1.0) for i in range(2)),
            *(Shard(t.name, 0, 1, t.rows, 0, 1.0) for t in tables[1:]),
        ],
    )
    for plan, message in (
        (
            parted,
            r"interaction 'crosses'.*one parameter server.*'films' on \[0\], 'users' on \[1\]",
        ),
        (split, r"interaction 'crosses'.*'films' on \[0, 1\], 'users' on \[0\]"),
    ):
        with strategy.scope(), pytest.raises(ValueError, match=message):
            collection(placement=plan).build()
    tables[0] = TableConfig("films", ROWS, DIMENSION, shards=2)
    with pytest.raises(
        ValueError, match=r"interaction 'crosses' of the tables \['films', 'users'\].*shards=2"
    ):
        EmbeddingCollection(
            tables,
            [FeatureConfig(name, table) for name, table in FEATURES.items()],
            interactions=interactions(),
        )


# Ragged bags, and several workers.


def ragged_model(**options) -> keras.Model:
    """Of ragged and weighted bags, in bfloat16."""
    keras.utils.set_random_seed(3)
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in FEATURES}
    inputs["watched"] = keras.Input((None,), dtype="int64", name="watched", ragged=True)
    weights = keras.Input((None,), dtype="float32", name="weights", ragged=True)
    layer = collection(dtype="bfloat16", returned_features=["watched", "day"], name="embed")
    vectors = layer(inputs, {"watched": weights})
    x = keras.layers.Concatenate()(list(vectors.values()))
    x = keras.layers.Dense(1, "sigmoid", name="out")(x)
    model = keras.Model({**inputs, "weights": weights}, x)
    model.compile(recsync.optimizers.Adagrad(0.1), "binary_crossentropy", **options)
    return model


def ragged_data() -> tf.data.Dataset:
    rng = np.random.default_rng(4)
    lengths = rng.integers(0, 5, 240)
    ids = {name: rng.integers(0, ROWS, 240) for name in FEATURES}
    splits = np.concatenate([[0], lengths.cumsum()])
    likes = ids["film"] % 3 == 0
    for name, values in (
        ("watched", rng.integers(0, ROWS, splits[-1])),
        ("weights", rng.uniform(0.5, 2, splits[-1]).astype(np.float32)),
    ):
        ids[name] = tf.RaggedTensor.from_row_splits(values, splits)
    return tf.data.Dataset.from_tensor_slices((ids, likes[:, None].astype(np.float32))).batch(16)


@functools.cache
def loss_before() -> float:
    return ragged_model(run_eagerly=True).evaluate(ragged_data().unbatch().batch(240), verbose=0)


# Two workers come last: they are another cluster than that of the tests before.
@pytest.mark.full
@pytest.mark.parametrize("workers", [1, 2])
def test_any_number_of_workers_learns_from_ragged_and_weighted_bags(clusters, workers):
    strategy = clusters.strategy(workers, 2)
    with strategy.scope():
        model = ragged_model(jit_compile=False)
    model.fit(ragged_data(), epochs=4, verbose=0)
    assert model.evaluate(ragged_data(), verbose=0) < loss_before() - 0.1
    if workers == 1:
        local = ragged_model(jit_compile=False)
        local.fit(ragged_data(), epochs=4, verbose=0, shuffle=False)
        # 8 bits of mantissa.
        np.testing.assert_allclose(
            model.get_layer("embed").table_values("films"),
            local.get_layer("embed").table_values("films"),
            rtol=0.02,
            atol=0.02,
        )
