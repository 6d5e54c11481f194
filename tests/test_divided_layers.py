"""Dense layers of which each server of a group has a piece: `placement={"path": "columns"}`."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import AtBatch, UntilAllGoOn, fits_until
from test_placement_of_operators import (
    BATCH,
    OPTIMIZERS,
    WIDTH,
    alone,
    assert_same,
    compiled,
    crossing,
    dataset,
    examples,
    graph_of_step,
    operations,
    trained,
)

import tf_recsync as recsync
from tf_recsync.optimizers import SGD, Adagrad

HIDDEN, OUT = 9, 5
PLANS = {
    "up and down": {"net/up": "columns", "net/down": "rows"},
    "apart": {"net/up": "rows", "net/down": "columns"},
    "beside whole ones": {"net/up": "columns", "net/down": 1, "net/last": 0},
}


@pytest.fixture
def cluster(clusters):
    """One trainer, the two servers of its group, and one for tables."""
    return clusters.get(workers=1, ps=3)


def up_and_down(between=None) -> keras.Model:
    layers = keras.layers
    parts = [
        layers.Dense(HIDDEN, None if between else "relu", name="up"),
        *([between] if between else []),
        layers.Dense(OUT, "softmax", name="down"),
        layers.Dense(1, name="last"),
    ]
    return keras.Sequential([keras.Input((WIDTH,)), *parts], name="net")


def widths(model) -> list[int]:
    """Of all that travels and has an example's dimension, how many features it has."""
    tensors = crossing(graph_of_step(model))
    found = [t.shape for t in tensors if t.shape.rank == 2 and t.shape[0] is None]
    # All else is counts and versions: no weights, and no gradients of any.
    others = [t.shape for t in tensors if t.shape.rank != 2 or t.shape[0] is not None]
    assert all(shape.num_elements() in (None, 0, 1, 2) for shape in others), others
    return sorted(shape[1] for shape in found)


@pytest.mark.cases("up and down-Adagrad", "apart-Adam", "beside whole ones-SwapAdagrad")
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("plan", PLANS)
def test_divided_layers_train_as_in_one_process(cluster, plan, name):
    model, local = trained(alone(cluster, PLANS[plan]), up_and_down, OPTIMIZERS[name], batches=50)
    assert_same(model, local)
    for one, other in zip(model.optimizer.states, local.optimizer.states, strict=True):
        # Users see one variable of the whole shape, and what belongs to it likewise.
        counts = [one.versions, *one.last_periods, *one.last_steps]
        for a, b in zip(
            [*one.accumulators, *counts],
            [*other.accumulators, other.versions, *other.last_periods, *other.last_steps],
            strict=True,
        ):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)


def of_sparse() -> keras.Model:
    inputs = keras.Input((WIDTH,), sparse=True, name="x")
    parts = [
        keras.layers.Dense(n, "tanh", name=name)(inputs)
        for name, n in [("by_columns", 40), ("by_rows", 2), ("whole", 3)]
    ]
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(parts)))
    model.compile(SGD(0.1), "mse")
    return model


OF_SPARSE = {
    "by name": {"by_columns": "columns", "by_rows": "rows", "whole": 1},
    "auto": "auto",
}


@pytest.mark.parametrize("placement", OF_SPARSE)
def test_layers_with_sparse_input_are_divided(cluster, placement):
    strategy = alone(cluster, OF_SPARSE[placement], local_batch_size=BATCH)
    x, y = examples(4)
    x = np.where(x > 0, x, 0.0)
    data = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(x), y)).batch(BATCH)
    with strategy.scope():
        model = of_sparse()
    local = of_sparse()
    local.set_weights(model.get_weights())
    for one in (model, local):
        one.fit(data, verbose=0)
    assert_same(model, local)
    found = {op.device for op in operations(graph_of_step(model)) if op.type == "Tanh"}
    assert len(found - {""}) == 2


@pytest.mark.parametrize(
    "between", [None, keras.layers.ReLU, lambda: keras.layers.Activation("tanh")]
)
def test_what_lies_between_two_that_fit_together_stays_on_the_servers(cluster, between):
    def build():
        return up_and_down(between and between())

    model, local = trained(alone(cluster, PLANS["up and down"]), build)
    assert_same(model, local)
    # For each server, there and back: the input (it has no gradient), and the sum's part.
    assert widths(model) == sorted(2 * [WIDTH, OUT, OUT])


def planned(operators, build=up_and_down) -> recsync.OperatorPlan:
    """A plan with layers where it is said, or on the trainers."""
    keras.utils.clear_session()
    graph = recsync.OperatorPlan.step_graph(build(), BATCH)
    operators = {unit.name: operators.get(unit.name) for unit in graph.units}
    weights = {u.name: 1 for u in graph.units if u.parameter_bytes and operators[u.name] is None}
    keras.utils.clear_session()
    return recsync.OperatorPlan(
        graph, recsync.placement.Resources(trainers=1, servers=2), operators, weights
    )


def tanh_between() -> keras.Model:
    return up_and_down(keras.layers.Activation("tanh", name="between"))


IN_PLANS = {
    "together": (
        {"net/up": "columns", "between": "columns", "net/down": "rows", "net/last": 0},
        ["/task:0", "/task:1"],
    ),
    "between on the trainers": (
        {"net/up": "columns", "between": None, "net/down": "rows", "net/last": 1},
        [""],
    ),
    "between on a server": ({"net/up": 1, "between": 0, "net/down": "columns"}, ["/task:0"]),
    "columns after a server": ({"net/up": 0, "between": 0, "net/down": "columns"}, ["/task:0"]),
}


@pytest.mark.cases("together", "columns after a server")
@pytest.mark.parametrize("name", IN_PLANS)
def test_a_plan_in_pieces_is_run_and_sends_what_it_says(cluster, name):
    operators, places = IN_PLANS[name]
    plan = planned(operators, tanh_between)
    model, local = trained(alone(cluster, plan), tanh_between)
    assert_same(model, local)
    found = {op.device for op in operations(graph_of_step(model)) if op.type == "Tanh"}
    assert len(found) == len(places)
    assert all(any(place in device for device in found) for place in places)
    # Of the last layer's softmax and the loss on the trainer, only the weights are pulled.
    pulled = 2 * sum(
        plan.graph[name].parameter_bytes for name in plan.weights if plan.operators[name] is None
    )
    sent = plan.loads.network.sum() * plan.resources.bytes_per_second / 2 - pulled
    tensors = [t for t in crossing(graph_of_step(model)) if t.shape.rank == 2]
    columns = sum(t.shape[1] for t in tensors if t.shape[0] is None)
    assert 4 * BATCH * columns == pytest.approx(sent)


def test_what_does_not_fit_together_goes_by_way_of_the_trainer(cluster):
    model, local = trained(alone(cluster, PLANS["apart"]), up_and_down)
    assert_same(model, local)
    pieces = [OUT // 2, OUT - OUT // 2]
    # The first one's input in two, the parts of its sum, and the same for their gradients; the sum
    # to both servers of the second one, and its gradients from there; its output in two, likewise.
    assert widths(model) == sorted([*2 * [WIDTH // 2], *8 * [HIDDEN], *2 * pieces])


def test_softmax_is_of_whole_rows(cluster):
    def build():
        return up_and_down(keras.layers.Activation("softmax"))

    model, local = trained(alone(cluster, PLANS["up and down"]), build)
    assert_same(model, local)


class Twice(keras.Model):
    """A layer that is called twice, on inputs of two ranks."""

    def __init__(self):
        super().__init__(name="net")
        self.up = keras.layers.Dense(WIDTH, "relu", name="up")
        self.last = keras.layers.Dense(1, name="last")

    def call(self, inputs):
        one = self.up(inputs)
        other = self.up(keras.ops.expand_dims(one, 1))
        return self.last(keras.ops.squeeze(other, 1) + one)


@pytest.mark.parametrize("how", ["columns", "rows"])
def test_a_layer_that_is_called_twice_has_both_gradients(cluster, how):
    model, local = trained(alone(cluster, {"net/up": how}), Twice)
    assert_same(model, local)


def test_only_layers_with_more_than_a_servers_part_of_the_weights_are_divided_by_default(cluster):
    found = {}
    for splits in ("auto", "off"):
        with alone(cluster, "auto", splits=splits).scope():
            model = compiled(up_and_down, lambda: Adagrad(0.05))
        model.fit(dataset(1), verbose=0)
        found[splits] = widths(model)
    # 63 of 119 elements are of `up`, 50 of `down`.
    assert WIDTH in found["auto"] and HIDDEN // 2 in found["auto"]
    assert HIDDEN // 2 not in found["off"]


@pytest.mark.parametrize(
    ("aggregation", "batches"),
    [
        (recsync.modes.Sync(), 1),
        (recsync.modes.GBA(global_batch_size=2 * BATCH, local_batch_size=BATCH), 2),
    ],
)
def test_buffers_collect_pieces_whose_weights_decay(cluster, aggregation, batches):
    def make_optimizer():
        return Adagrad(0.05, weight_decay=0.01)

    strategy = alone(cluster, PLANS["up and down"], aggregation=aggregation)
    with strategy.scope():
        model = compiled(up_and_down, make_optimizer)
    local = compiled(up_and_down, make_optimizer)
    local.set_weights(model.get_weights())
    model.fit(dataset(8), verbose=0)
    # A global batch has so many local ones, all computed on the same parameters.
    data = tf.data.Dataset.from_tensor_slices(examples(8)).batch(batches * BATCH)
    local.fit(data, verbose=0)
    assert_same(model, local)


def test_compressed_pieces_learn(cluster):
    compression = recsync.Compression(activations="bfloat16", gradients="bfloat16")
    strategy = alone(cluster, PLANS["up and down"], compression=compression)
    model, local = trained(strategy, up_and_down)
    assert_same(model, local, tolerance=2e-2)


def test_what_is_saved_of_pieces_goes_on_whole_and_the_other_way_round(cluster, tmp_path):
    divided, local = trained(alone(cluster, PLANS["up and down"]), up_and_down)
    path = str(tmp_path / "whole.weights.h5")
    divided.save_weights(path)
    with alone(cluster, PLANS["apart"]).scope():
        other = compiled(up_and_down, lambda: Adagrad(0.05))
    other.load_weights(path)
    assert_same(other, local)
    for model in (divided, other, local):
        model.fit(dataset(3), verbose=0)
    assert_same(divided, local)
    assert_same(other, local)
    divided.get_layer("up").kernel.assign(np.full((WIDTH, HIDDEN), 0.1))
    local.get_layer("up").kernel.assign(np.full((WIDTH, HIDDEN), 0.1))
    for model in (divided, local):
        model.fit(dataset(2), verbose=0)
    assert_same(divided, local)


@pytest.mark.full
def test_a_central_copy_of_pieces_goes_on_whole(clusters, tmp_path):
    """Its elements are in the order of the whole, however they are divided."""
    cluster = clusters.get(workers=2, ps=5)
    options = {"groups": 2, "trainers_per_group": 1, "ps_per_group": 2}

    def made(placement):
        strategy = recsync.HierarchicalStrategy(
            cluster, recsync.EASGD(0.5), placement=placement, **options
        )
        with strategy.scope():
            return strategy, compiled(up_and_down, lambda: Adagrad(0.05))

    strategy, model = made(PLANS["up and down"])
    model.fit(dataset(20), verbose=0)
    copies = strategy.copies(model)
    assert [w.shape for w in copies[1]] == [w.shape for w in model.get_weights()]
    states = strategy.worker_states(model)
    path = tf.train.Checkpoint(model=model, workers=states).write(str(tmp_path / "checkpoint"))
    extras = model.train_function.synchronizer.extras()
    other_strategy, other = made(PLANS["apart"])
    workers = other_strategy.worker_states(other)
    tf.train.Checkpoint(model=other, workers=workers).read(path).assert_consumed()
    found = other.train_function.synchronizer.extras()
    np.testing.assert_array_equal(found["center"], extras["center"])
    for one, restored in zip(copies, other_strategy.copies(other), strict=True):
        for a, b in zip(one, restored, strict=True):
            np.testing.assert_array_equal(a, b)
    other.fit(dataset(1), verbose=0)


def test_pieces_are_exchanged_by_hop(clusters):
    cluster = clusters.get(workers=2, ps=5)
    strategy = recsync.HierarchicalStrategy(
        cluster,
        recsync.Hop(recsync.topology.ring(2), updates_per_iteration=2),
        groups=2,
        trainers_per_group=1,
        ps_per_group=2,
        placement=PLANS["up and down"],
    )
    with strategy.scope():
        model = compiled(up_and_down, lambda: Adagrad(0.05))
    before = model.evaluate(dataset(4), verbose=0)
    x, _ = examples(1)

    def are_close():
        kernels = [copy[0] for copy in strategy.copies(model)]
        return np.abs(x @ kernels[0] - x @ kernels[1]).max() < 1.0

    # After an epoch that one of them has had for itself they need not be.
    fits_until(are_close, model, dataset(40))
    assert model.evaluate(dataset(4), verbose=0) < before


@pytest.mark.parametrize(
    ("change", "optimizer", "message"),
    [
        ({"kernel_regularizer": "l2"}, {}, "has a kernel_regularizer"),
        ({"trainable": False}, {}, "is not trained"),
        ({}, {"global_clipnorm": 1.0}, "with global_clipnorm=1.0"),
        ({"units": 1}, {}, "has 1 columns for 2 servers"),
    ],
)
def test_a_layer_that_can_not_be_divided_is_refused_by_name(cluster, change, optimizer, message):
    def build():
        layer = keras.layers.Dense(**{"units": 4, "name": "up", **change})
        return keras.Sequential([keras.Input((WIDTH,)), layer, keras.layers.Dense(1)], name="net")

    strategy = alone(cluster, {"net/up": "columns"})
    with strategy.scope():
        model = compiled(build, lambda: Adagrad(0.05, **optimizer))
    with pytest.raises(
        ValueError, match=f"placement can't divide net/up by columns: it .*{message}"
    ):
        model.fit(dataset(1), verbose=0)
    with alone(cluster, "auto").scope():
        model = compiled(build, lambda: Adagrad(0.05, **optimizer))
    model.fit(dataset(1), verbose=0)  # "auto" has it whole.


def test_a_wrong_splits_is_refused(cluster):
    with pytest.raises(ValueError, match='splits must be "auto" or "off", not True'):
        alone(cluster, "auto", splits=True)


class Penalized(keras.Model):
    """Its own step has a penalty of a kernel, and doubles the gradients."""

    def __init__(self):
        super().__init__(name="net")
        self.up = keras.layers.Dense(HIDDEN, "relu", name="up")
        self.last = keras.layers.Dense(1, name="last")

    def call(self, inputs):
        return self.last(self.up(inputs))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predictions = self(x, training=True)
            loss = self.compute_loss(x, y, predictions)
            loss += 0.1 * tf.reduce_sum(tf.square(self.up.kernel))
        weights = self.trainable_weights
        gradients = tape.gradient(loss, [weight.value for weight in weights])
        self.optimizer.apply([2.0 * gradient for gradient in gradients], weights)
        return self.compute_metrics(x, y, predictions)


@pytest.mark.parametrize("how", ["columns", "rows"])
def test_what_a_step_of_the_users_own_does_with_the_whole_counts(cluster, how):
    model, local = trained(alone(cluster, {"net/up": how}), Penalized)
    assert_same(model, local)


def test_a_lost_server_gets_its_pieces_back(clusters):
    cluster = clusters.get(workers=2, ps=5)
    strategy = recsync.HierarchicalStrategy(
        cluster,
        recsync.EASGD(0.3),
        groups=2,
        trainers_per_group=1,
        ps_per_group=2,
        placement=PLANS["up and down"],
    )
    recsync.testing.set_compute_time(strategy, 0.05)
    with strategy.scope():
        model = compiled(up_and_down, lambda: Adagrad(0.05))
    then: list[int] = []

    def start():
        then.extend(strategy.worker_steps(model))
        cluster.restart("ps", 1)

    callbacks = [
        AtBatch(10, lambda: cluster.kill("ps", 1)),
        AtBatch(30, start),
        UntilAllGoOn(then),
    ]
    model.fit(dataset(50).repeat(400), verbose=0, callbacks=callbacks)
    first, second = strategy.copies(model)
    assert [w.shape for w in second] == [w.shape for w in model.get_weights()]
    assert all(np.isfinite(w).all() for w in [*first, *second])
