"""Layers run where a search finds it best: `HierarchicalStrategy(placement="auto")`."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import logging
from test_placement_of_operators import (
    BATCH,
    WIDTH,
    alone,
    assert_same,
    compiled,
    dataset,
    graph_of_step,
    operations,
    trained,
)
from test_step_graph import of_tables_inside, towers

import tf_recsync as recsync
from tf_recsync.optimizers import SGD, Adagrad, Adam
from tf_recsync.placement import OperatorPlan, Resources


@pytest.fixture
def cluster(clusters):
    """One trainer, the two servers of its group, and one for tables."""
    return clusters.get(workers=1, ps=3)


@pytest.fixture(autouse=True)
def _clear_names():
    keras.utils.clear_session()


@pytest.fixture
def logged(monkeypatch):
    """What is said of a placement, by level."""
    found = []
    for level in ("info", "warning"):

        def note(text, *args, level=level):
            if text.startswith("Layers of") or text == "%s":
                found.append((level, text % args))

        monkeypatch.setattr(logging, level, note)
    return found


def wide() -> keras.Model:
    dense = keras.layers.Dense
    parts = [dense(256, name="up"), keras.layers.ReLU(name="relu"), dense(96, "relu", name="down")]
    parts += [dense(96, "relu", name="next"), dense(1, name="last")]
    return keras.Sequential([keras.Input((WIDTH,), name="x"), *parts], name="net")


@pytest.mark.cases("auto")
@pytest.mark.parametrize("splits", ["auto", "off"])
def test_layers_run_by_the_plan_that_a_search_finds(cluster, tmp_path, logged, splits):
    strategy = alone(cluster, "auto", splits=splits)
    with strategy.scope():
        model = compiled(wide, lambda: Adam(0.01))
    assert strategy.operator_plan(model) is None
    local = compiled(wide, lambda: Adam(0.01))
    local.set_weights(model.get_weights())
    # It saves before the first step, which needs to know what lies where.
    saving = [recsync.callbacks.Checkpoint(tmp_path)] if splits == "off" else []
    model.fit(dataset(6), callbacks=saving, verbose=0)
    local.fit(dataset(6), verbose=0)
    assert_same(model, local, tolerance=1e-4)
    plan = strategy.operator_plan(model)
    graph = OperatorPlan.step_graph(local, BATCH)
    searched = OperatorPlan.search(graph, Resources(1, 2), splits=splits == "auto")
    assert plan.operators == searched.operators and plan.weights == searched.weights
    assert plan.graph["net/down"].slots == 2
    assert logged == [("info", f"Layers of net are placed by a search.\n{plan}")]
    # 24,576 of 36,000 weights.
    divided = {"net/down": "rows"} if splits == "auto" else {}
    assert plan.divided == divided
    placed = {n: w for n, w in plan.operators.items() if isinstance(w, int)}
    assert placed  # Weights are more than activations.
    for unit in plan.weights:
        assert model.get_layer(unit.split("/")[1]).kernel._value.shard == plan.weights[unit]
    devices = {op.device for op in operations(graph_of_step(model)) if op.type == "MatMul"}
    servers = {*placed.values()} if splits == "off" else {0, 1}
    found = {int(d.split("task:")[1].split("/")[0]) for d in devices if d}
    assert found == servers
    model.fit(dataset(2), verbose=0)  # The plan stays.
    assert strategy.operator_plan(model) is plan and len(logged) == 1


def test_a_layer_whose_weights_are_less_than_its_activations_stays_on_the_trainers(cluster):
    def tiny():
        return keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(1, name="only")])

    strategy = alone(cluster, "auto", splits="off")
    with strategy.scope():
        model = compiled(tiny, lambda: Adagrad(0.05))
    # No batch size is known, but for what shapes say.
    data = dataset(4).map(lambda x, y: (tf.ensure_shape(x, (BATCH, WIDTH)), y))
    model.fit(data, verbose=0)
    plan = strategy.operator_plan(model)
    # 56 bytes of weights and 128 of activations travel, instead of 384 of inputs.
    ((name, home),) = plan.weights.items()
    assert plan.operators[name] is None
    assert model.layers[-1].kernel._value.shard == model.layers[-1].bias._value.shard == home
    products = [op.device for op in operations(graph_of_step(model)) if op.type == "MatMul"]
    assert products == ["", ""]


def sequences() -> keras.Model:
    inputs = keras.Input((None, 3), name="steps")
    hidden = keras.layers.Dense(5, name="each")(inputs)
    return keras.Model(inputs, keras.layers.Dense(1, name="top")(keras.layers.GRU(4)(hidden)))


@pytest.mark.full
def test_a_model_whose_step_can_not_be_counted_is_divided_by_its_weights(cluster, logged):
    strategy = alone(cluster, "auto", local_batch_size=BATCH)
    with strategy.scope():
        model = sequences()
        model.compile(SGD(0.1), "mse")

    def steps(x, y):
        examples = tf.shape(x)[0]
        return tf.reshape(x, tf.stack([examples, tf.size(x) // (3 * examples), 3])), y

    model.fit(dataset(2).map(steps), verbose=0)
    assert strategy.operator_plan(model) is None
    ((level, text),) = logged
    assert level == "warning"
    assert "are placed by their weights alone" in text and "is not known; give inputs" in text
    shards = [layer.kernel._value.shard for layer in model.layers if hasattr(layer, "kernel")]
    assert shards == [0, 1]


def tied() -> keras.Model:
    inputs = keras.Input((WIDTH,))
    first = keras.layers.Dense(64, name="first")
    first.build((None, WIDTH))

    class Shares(keras.layers.Layer):
        def __init__(self):
            super().__init__(name="shares")
            self.kernel = first.kernel

        def call(self, inputs):
            return keras.ops.tanh(inputs @ self.kernel)

    return keras.Model(inputs, keras.layers.Dense(1)(first(inputs) + Shares()(inputs)))


def test_tables_frozen_layers_and_layers_that_share_weights_train_as_in_one_process(cluster):
    def with_frozen():
        parts = [keras.layers.Dense(64, trainable=False), keras.layers.Dense(64, "tanh")]
        parts += [keras.layers.Dropout(0.0), keras.layers.BatchNormalization()]
        return keras.Sequential([keras.Input((WIDTH,)), *parts, keras.layers.Dense(1)], name="net")

    for build in (tied, with_frozen):
        strategy = alone(cluster, "auto")
        model, local = trained(strategy, build, lambda: SGD(0.01))
        assert_same(model, local)
    assert strategy.operator_plan(model) is not None

    ids = np.random.default_rng(1).integers(0, 20, (4 * BATCH, 2))
    inputs = {"ids": ids, "user": ids[:, 0]}
    data = tf.data.Dataset.from_tensor_slices((inputs, ids[:, :1] / 20.0)).batch(BATCH)

    def with_tables():
        ids = keras.Input((2,), dtype="int64", name="ids")
        inputs = {"ids": ids, "user": keras.Input((), dtype="int64", name="user")}
        vectors = recsync.layers.EmbeddingCollection(
            [
                recsync.layers.TableConfig("things", 20, 4),
                recsync.layers.TableConfig("users", 100, 4, keys="any"),
            ],
            [
                recsync.layers.FeatureConfig("ids", table="things"),
                recsync.layers.FeatureConfig("user", table="users"),
            ],
            concatenate=True,
        )(inputs)
        vectors = keras.layers.Concatenate()([vectors, of_tables_inside(ids)])
        x = keras.layers.Dense(200, "relu", name="large")(vectors)
        return keras.Model(inputs, keras.layers.Dense(40, name="top")(x))

    found = []
    for placement in ("trainers", "auto"):
        strategy = alone(cluster, placement)
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = with_tables()
            model.compile(Adagrad(0.1), "mse")
        model.fit(data, verbose=0)
        found.append([variable.numpy() for variable in model.trainable_variables])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    plan = strategy.operator_plan(model)
    assert plan.divided == {"large": "columns"}
    assert {*plan.divided, *plan.weights} == {"large", "top", "tower/hidden"}
    assert {unit.kind for unit in plan.graph.units} >= {"lookup", "input", "layer"}


def test_layers_of_one_name_are_placed_by_a_search_each_for_itself(cluster):
    strategy = alone(cluster, "auto")
    model, local = trained(strategy, towers, lambda: SGD(0.05))
    assert_same(model, local)
    plan = strategy.operator_plan(model)
    assert plan.divided == {"hidden": "columns", "relu": "columns"}
    hidden = model.get_layer("second").get_layer("hidden")
    assert hidden.kernel._value.shard == plan.weights["hidden#2"]


def test_a_plan_knows_the_compression_and_one_of_nothing_is_only_said(cluster, logged):
    compression = recsync.Compression(activations="int8", gradients="bfloat16")
    strategy = alone(cluster, "auto", compression=compression)
    with strategy.scope():
        model = compiled(wide, lambda: Adagrad(0.05))
    model.fit(dataset(2), verbose=0)
    assert strategy.operator_plan(model).resources == Resources(
        1,
        2,
        activation_ratio=0.25,
        gradient_ratio=0.5,
        compression_seconds_per_byte=compression.seconds_per_byte,
    )
    tiny = recsync.Compression(activations="bfloat16")
    strategy = alone(cluster, "auto", ps_per_group=1, compression=tiny)
    with strategy.scope():
        model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(1)], name="tiny")
        model.compile(SGD(0.1), "mse")
    model.fit(dataset(2), verbose=0)
    assert strategy.operator_plan(model).divided == {}
    assert "would do nothing: placement has no layer of tiny run on a server" in logged[-1][1]


def test_what_needs_the_placement_before_there_are_data_has_the_batch_from_the_strategy(
    cluster, logged
):
    for size in (BATCH, None):
        keras.utils.clear_session()
        strategy = alone(cluster, "auto", local_batch_size=size)
        with strategy.scope():
            model = compiled(wide, lambda: Adagrad(0.05))
            model.optimizer.build(model.trainable_variables)
        strategy.worker_states(model)
        plan = strategy.operator_plan(model)
        if size:
            graph = OperatorPlan.step_graph(model, BATCH)
            assert plan == OperatorPlan.search(graph, plan.resources)
        else:
            assert plan is None
            assert "the number of examples of a batch is not known; give" in logged[-1][1]
