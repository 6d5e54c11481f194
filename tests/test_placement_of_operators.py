"""Operators run where their weights are: `HierarchicalStrategy(placement=…)` with `model.fit`."""

import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import AtBatch, live_operations, mean_output, slope_model, wait_for_file

import tf_recsync as recsync
from tf_recsync.optimizers import SGD, Adagrad, Adam, SwapAdagrad
from tf_recsync.strategies.operators import Operators
from tf_recsync.synchronization.units import by_weights, units_of

WIDTH, BATCH = 6, 16


class Nothing(recsync.Algorithm):
    """Groups that nobody keeps together, so that they train as if they were alone."""

    def sync(self, trainers, center):
        pass


@pytest.fixture
def cluster(clusters):
    """One trainer, the two servers of its group, and one for tables."""
    return clusters.get(workers=1, ps=3)


def alone(cluster, placement, **options):
    settings = {"groups": 1, "trainers_per_group": 1, "ps_per_group": 2}
    return recsync.HierarchicalStrategy(
        cluster,
        Nothing(),
        placement=placement,
        mode=recsync.Shadow(min_interval=1000.0),
        **{**settings, **options},
    )


def examples(batches: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(5)
    x = random.normal(size=(batches * BATCH, WIDTH)).astype(np.float32)
    return x, (x.sum(1, keepdims=True) > 0).astype(np.float32)


def dataset(batches: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(examples(batches)).batch(BATCH)


def two_layers() -> keras.Model:
    layers = keras.layers
    return keras.Sequential([keras.Input((WIDTH,)), layers.Dense(8, "relu"), layers.Dense(1)])


def compiled(build, make_optimizer, **options) -> keras.Model:
    model = build()
    if not model.built:
        model(np.zeros((1, WIDTH), np.float32))
    model.compile(make_optimizer(), "mse", **options)
    return model


def trained(strategy, build, make_optimizer=lambda: Adagrad(0.05), batches=6, **options):
    """A model after a pass under a strategy, and what one process makes of the same start."""
    with strategy.scope():
        model = compiled(build, make_optimizer, **options)
    local = compiled(build, make_optimizer)
    local.set_weights(model.get_weights())
    start = local.get_weights()
    model.fit(dataset(batches), verbose=0)
    local.fit(dataset(batches), verbose=0)
    assert any(np.abs(a - b).max() > 1e-3 for a, b in zip(start, local.get_weights(), strict=True))
    return model, local


def on_servers(build, make_optimizer=lambda: Adagrad(0.05), servers=2):
    """A placement that has all layers of the next model on servers, as evenly as may be."""
    keras.utils.clear_session()
    model = compiled(build, make_optimizer)
    tables = [v for part in model.layers for v in part.weights if "collection" in part.name]
    units = units_of(model, tables)
    found = by_weights(units, servers, True, [model.optimizer])
    keras.utils.clear_session()
    return {unit.path: where for unit, where in found}


def assert_same(model, local, tolerance=1e-5):
    for one, other in zip(model.get_weights(), local.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def graph_of_step(model) -> tf.Graph:
    """What the workers of the first group run."""
    of_steps = next(iter(model.train_function._functions.values()))
    graph = of_steps[min(of_steps)]._once._concrete.graph
    # It calls the steps, and reports.
    (name,) = {
        op.get_attr("f").name for op in graph.get_operations() if "PartitionedCall" in op.type
    }
    return graph._functions[name].graph


def operations(graph) -> set[tf.Operation]:
    """Those that a step runs."""
    return live_operations([*graph.control_outputs, *(tensor.op for tensor in graph.outputs)])


def crossing(graph) -> list[tf.Tensor]:
    """The tensors that travel between devices, but for what is reported, and resources, which are
    only named."""
    return [
        tensor
        for op in operations(graph)
        for tensor in op.inputs
        if tensor.device != op.device
        and op.type != "RecsyncReport"
        and tensor.dtype not in (tf.resource, tf.variant)
        and tensor.op.type not in ("Const", "Placeholder")
    ]


def assert_only_activations_travel(model) -> None:
    """All that crosses has the batch's dimension, or next to no elements; no weight has either."""
    for tensor in crossing(graph_of_step(model)):
        assert tensor.shape.num_elements() in (None, 0, 1, 2), (tensor, tensor.consumers())


OPTIMIZERS = {
    "Adagrad": lambda: Adagrad(0.05),
    "SwapAdagrad": lambda: SwapAdagrad(0.05, swap=recsync.Swap(period=7, decay=0.9)),
    "Adam": lambda: Adam(0.01),
}


@pytest.mark.cases("SwapAdagrad")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_placed_layers_train_as_unplaced_ones_and_as_one_process(cluster, name):
    placement = on_servers(two_layers, OPTIMIZERS[name])
    placed, local = trained(alone(cluster, placement), two_layers, OPTIMIZERS[name], batches=50)
    assert_same(placed, local)
    unplaced, local = trained(alone(cluster, "trainers"), two_layers, OPTIMIZERS[name], batches=50)
    assert_same(unplaced, local)


class Subclassed(keras.Model):
    """Layers of default names, one of them without weights."""

    def __init__(self):
        super().__init__()
        self.parts = [keras.layers.Dense(8), keras.layers.Dense(7)]
        self.last = keras.layers.Dense(1)
        self.activation = keras.layers.ReLU()

    def call(self, inputs):
        for part in self.parts:
            inputs = self.activation(part(inputs))
        return self.last(inputs)


class Scaled(keras.layers.Layer):
    """A layer with weights of its own, a function, a gradient and a loss of its own."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")
        self.inner = keras.layers.Dense(shape[-1], use_bias=False)
        self.inner.build(shape)
        self.seen = self.add_weight(shape=(5,), initializer="zeros", trainable=False, name="seen")
        self.last = self.add_weight(shape=(5,), initializer="zeros", trainable=False, name="last")

    def call(self, inputs, training=False):
        @tf.custom_gradient
        def half_slope(x):
            return tf.identity(x), lambda upstream: 0.5 * upstream

        @tf.function(autograph=False)
        def scaled(x):
            return half_slope(x) * tf.convert_to_tensor(self.scale)

        if training:
            self.seen.assign_add(tf.ones([5]))
            self.last.assign(tf.repeat(tf.reduce_mean(inputs), 5))
        self.add_loss(0.1 * keras.ops.sum(keras.ops.square(self.scale)))
        positive = tf.reduce_sum(inputs) > 0
        return tf.cond(positive, lambda: self.inner(scaled(inputs)), lambda: scaled(inputs))


class Shares(keras.layers.Layer):
    """A layer with a kernel of another one."""

    def __init__(self, kernel):
        super().__init__()
        self.kernel = kernel

    def call(self, inputs):
        return inputs @ self.kernel


def chain(*layers) -> keras.Model:
    return keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(1)])


def called_twice() -> keras.Model:
    inputs = keras.Input((WIDTH,))
    dense = keras.layers.Dense(WIDTH, "tanh", kernel_regularizer="l2")
    return keras.Model(inputs, keras.layers.Dense(1)(dense(dense(inputs)) + dense(2.0 * inputs)))


def nested() -> keras.Model:
    inputs = keras.Input((WIDTH,))
    inner = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(5), keras.layers.ReLU()])
    return keras.Model(inputs, keras.layers.Dense(1)(inner(inputs)))


def with_operations() -> keras.Model:
    inputs = keras.Input((WIDTH,))
    one = keras.layers.Dense(5)(inputs)
    two = keras.layers.Dense(5)(keras.ops.sin(one))
    both = keras.layers.Concatenate()([keras.ops.relu(one) * two, keras.layers.Add()([one, two])])
    return keras.Model(inputs, keras.layers.Dense(1)(both))


def tied() -> keras.Model:
    inputs = keras.Input((WIDTH,))
    first = keras.layers.Dense(5)
    first.build((None, WIDTH))
    second = Shares(first.kernel)
    return keras.Model(inputs, keras.layers.Dense(1)(first(inputs) + second(2.0 * inputs)))


LAYERS = {
    "subclassed model": Subclassed,
    "nested model": nested,
    "layer called twice, with a regularizer": called_twice,
    "operations between layers": with_operations,
    "layers that share a variable": tied,
    "BatchNormalization": lambda: chain(
        keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.ReLU()
    ),
    "MeanNormalization": lambda: chain(
        keras.layers.Dense(8, bias_initializer="ones"),
        recsync.layers.MeanNormalization(),
        keras.layers.ReLU(),
    ),
    "LayerNormalization": lambda: chain(keras.layers.Dense(8), keras.layers.LayerNormalization()),
    "custom layer": lambda: chain(keras.layers.Dense(8), Scaled()),
    "frozen layer": lambda: chain(keras.layers.Dense(8, trainable=False), keras.layers.Dense(5)),
    "GRU": lambda: chain(keras.layers.Reshape((2, WIDTH // 2)), keras.layers.GRU(5)),
    "attention": lambda: with_attention(),
}


def with_attention() -> keras.Model:
    inputs = keras.Input((WIDTH,))
    x = keras.layers.Reshape((2, WIDTH // 2))(inputs)
    x = keras.layers.MultiHeadAttention(2, 3)(x, x)
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(x)))


@pytest.mark.cases("layers that share a variable", "GRU")
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_of_every_kind_run_on_servers(cluster, kind):
    placement = on_servers(LAYERS[kind], lambda: SGD(0.05))
    model, local = trained(alone(cluster, placement), LAYERS[kind], lambda: SGD(0.05))
    assert_same(model, local)
    assert_only_activations_travel(model)


CLIPPING = {
    "clipnorm": lambda: Adagrad(0.05, clipnorm=0.3),
    "clipvalue": lambda: Adagrad(0.05, clipvalue=0.05),
    "global_clipnorm": lambda: Adagrad(0.05, global_clipnorm=0.3),
    "weight_decay": lambda: Adagrad(0.05, weight_decay=0.1),
}


@pytest.mark.cases("global_clipnorm", "weight_decay")
@pytest.mark.parametrize("kind", CLIPPING)
def test_what_lies_between_a_gradient_and_its_update_is_on_the_server(cluster, kind):
    placement = on_servers(called_twice, CLIPPING[kind])
    model, local = trained(alone(cluster, placement), called_twice, CLIPPING[kind])
    assert_same(model, local)
    assert_only_activations_travel(model)


GLOBAL = {"global_batch_size": 2 * BATCH, "local_batch_size": BATCH}


@pytest.mark.cases("sigmoid-columns", "softmax-0")
@pytest.mark.parametrize("how", [0, "columns", "rows"])
@pytest.mark.parametrize("last", ["sigmoid", "softmax"])
def test_a_loss_of_probabilities_is_computed_with_their_logits(cluster, last, how):
    """As Keras does: a probability that rounds to 1 has no gradient, its logit has one."""
    sizes = {"binary_crossentropy": 40.0, "categorical_crossentropy": 200.0}
    loss = "binary_crossentropy" if last == "sigmoid" else "categorical_crossentropy"

    def build():
        inputs = keras.Input((WIDTH,))
        bias = keras.initializers.Constant([sizes[loss], 0.0])
        outputs = keras.layers.Dense(2, last, bias_initializer=bias, name="last")(inputs)
        outputs = keras.layers.Dropout(0.0)(outputs)  # It gives what it gets.
        model = keras.Model(inputs, outputs)
        model.compile(SGD(1.0), loss)
        return model

    keras.utils.set_random_seed(3)
    local = build()
    with alone(cluster, {"last": how}).scope():
        model = build()
    model.set_weights(local.get_weights())
    x, _ = examples(2)
    y = np.tile(np.array([[0.0, 1.0]], np.float32), (len(x), 1))  # It is certain of the other.
    histories = [m.fit(x, y, BATCH, verbose=0, shuffle=False).history for m in (local, model)]
    assert histories[0]["loss"][0] > 15  # Of probabilities it is 16 at most.
    np.testing.assert_allclose(histories[1]["loss"], histories[0]["loss"], rtol=1e-5)
    assert local.get_weights()[1][0] < sizes[loss] - 0.9
    assert_same(model, local)


def test_what_travels_passes_an_artificial_link(cluster):
    strategy = alone(cluster, on_servers(two_layers, servers=1), ps_per_group=1)
    recsync.testing.set_bandwidth(strategy, 1e8)
    model, local = trained(strategy, two_layers)
    assert_same(model, local)
    passing = [op for op in operations(graph_of_step(model)) if op.type == "RecsyncTransfer"]
    # There and back: what comes in, what goes out, its gradient; and the learning rate, twice.
    assert len(passing) == 5


class Penalized(keras.Model):
    """Keeps the gradient of what it gives by what it gets small, in a step of its own."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                outputs = self(x, training=True)
            slopes = inner.gradient(outputs, x)
            penalty = tf.reduce_mean(tf.reduce_sum(tf.square(slopes), 1))
            loss = self.compute_loss(x, y, outputs) + penalty
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def penalized() -> keras.Model:
    inputs = keras.Input((WIDTH,), name="x")
    x = keras.layers.Dense(8, "tanh", name="a")(inputs)
    x = keras.layers.Dense(7, "softplus", name="b")(x)
    return Penalized(inputs, keras.layers.Dense(1, "softplus", name="c")(x))


PLACES_OF_PENALIZED = {
    "crosses": {"a": 0, "b": 1, "c": 0},
    "one server": {"a": 0, "b": 0, "c": 0},
    "one on the trainer": {"a": 1, "c": 0},
    "divided": {"a": "columns", "b": "rows", "c": 1},
    "divided, whole between": {"a": "rows", "b": 1, "c": "rows"},
}


@pytest.mark.cases("crosses", "divided")
@pytest.mark.parametrize("places", PLACES_OF_PENALIZED)
def test_gradients_of_gradients_are_those_of_one_process(cluster, places):
    strategy = alone(cluster, PLACES_OF_PENALIZED[places])
    model, local = trained(strategy, penalized, lambda: SGD(0.1), batches=3)
    assert_same(model, local)


@pytest.mark.parametrize("how", ["slow", "compressed"])
def test_gradients_of_gradients_go_back_over_what_becomes_of_messages_on_their_way(cluster, how):
    options = {"compression": recsync.Compression(sparsify=1e-6)} if how == "compressed" else {}
    strategy = alone(cluster, {"a": 0, "b": 0, "c": 1}, **options)
    if how == "slow":
        recsync.testing.set_bandwidth(strategy, 1e8)
        recsync.testing.set_device_speed(strategy, 1e9, job="ps")
    model, local = trained(strategy, penalized, lambda: SGD(0.1), batches=3)
    assert_same(model, local)


def named() -> keras.Model:
    inputs = keras.Input((WIDTH,))
    x = keras.layers.Dense(8, "relu", name="first")(inputs)
    x = keras.layers.Dense(7, "relu", name="second")(x)
    return keras.Model(inputs, keras.layers.Dense(1, name="last")(x))


@pytest.mark.full
def test_a_buffer_collects_gradients_of_placed_layers_and_of_others(cluster):
    found = []
    for placed in ([], ["second"], ["first", "second", "last"]):
        strategy = alone(cluster, dict.fromkeys(placed, 0), aggregation=recsync.modes.GBA(**GLOBAL))
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = compiled(named, lambda: Adagrad(0.05))
        model.fit(dataset(8), verbose=0)
        (report,) = strategy.aggregation(model)
        found.append([report.global_step, *model.get_weights()])
        assert report.global_step == 4
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.full
def test_tables_stay_on_their_servers_and_lookups_on_trainers(cluster):
    def build():
        ids = keras.Input((2,), dtype="int64", name="ids")
        vectors = recsync.layers.EmbeddingCollection(
            [recsync.layers.TableConfig("things", 20, 4)],
            [recsync.layers.FeatureConfig("ids", table="things")],
            concatenate=True,
        )({"ids": ids})
        x = keras.layers.Dense(5, "relu")(vectors)
        return keras.Model({"ids": ids}, keras.layers.Dense(1)(x))

    random = np.random.default_rng(1)
    ids = random.integers(0, 20, (6 * BATCH, 2))
    data = tf.data.Dataset.from_tensor_slices(({"ids": ids}, ids[:, :1] / 20.0)).batch(BATCH)
    found = []
    for placement in ("trainers", on_servers(build)):
        keras.utils.clear_session()
        strategy = alone(cluster, placement)
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = build()
            model.compile(Adagrad(0.1), "mse")
        model.fit(data, verbose=0)
        found.append(model.get_weights())
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    devices = {op.device for op in operations(graph_of_step(model)) if op.type == "MatMul"}
    assert devices == {f"/job:ps/replica:0/task:{i}/device:CPU:0" for i in (0, 1)}


def test_the_plan_says_where_layers_run_and_their_variables_are(cluster):
    plan = {"first": 1, "second": None, "last": 1}
    model, local = trained(alone(cluster, plan), named)
    assert_same(model, local)
    for name in ("first", "last"):
        layer = model.get_layer(name)
        state = model.optimizer.state_of(layer.kernel)
        for variable in [layer.kernel, layer.bias, *state.beside]:
            assert variable._value.shard == 1
    devices = [op.device for op in operations(graph_of_step(model)) if op.type == "MatMul"]
    # Forward, and two gradients; of the first layer one.
    assert sorted(devices) == [""] * 3 + ["/job:ps/replica:0/task:1/device:CPU:0"] * 5


def test_servers_get_about_as_many_weights_each_and_neighbours_stay_together(cluster):
    def build():
        sizes = (8, 8, 8, 8)
        return chain(*(keras.layers.Dense(size, "relu") for size in sizes))

    model, local = trained(alone(cluster, on_servers(build)), build)
    assert_same(model, local)
    shards = [layer.kernel._value.shard for layer in model.layers]
    assert shards == sorted(shards) and shards[0] == 0 and shards[-1] == 1
    sizes = [0, 0]
    for variable in model.weights:
        sizes[variable._value.shard] += int(np.prod(variable.shape))
    assert max(sizes) - min(sizes) <= 8 * 9


def test_models_are_evaluated_saved_and_trained_on_as_before(cluster, tmp_path):
    strategy = alone(cluster, on_servers(LAYERS["BatchNormalization"]))
    with strategy.scope():
        model = compiled(LAYERS["BatchNormalization"], lambda: Adagrad(0.05), metrics=["mae"])
    logs = model.fit(dataset(6), validation_data=dataset(3), epochs=2, verbose=0).history
    assert logs["loss"][1] < logs["loss"][0]
    loss, _ = model.evaluate(dataset(3), verbose=0)
    assert loss == pytest.approx(logs["val_loss"][-1], rel=1e-5)
    predictions = model.predict(dataset(3), verbose=0)
    model.save(tmp_path / "model.keras")
    alike = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(alike.predict(examples(3)[0], verbose=0), predictions, 1e-4, 1e-5)
    assert int(model.optimizer.iterations.numpy()) == int(alike.optimizer.iterations) == 12
    assert "call" not in model.layers[0].__dict__


def test_staleness_is_counted_by_the_updates_between_reading_and_updating(clusters, tmp_path):
    placement = on_servers(slope_model, servers=1)
    sizes = {"groups": 2, "trainers_per_group": 2, "ps_per_group": 1}
    strategy = alone(clusters.get(workers=4, ps=6), placement, **sizes)
    has_read, are_done = str(tmp_path / "read"), str(tmp_path / "done")

    def first_reads_and_updates_last(labels, outputs):
        """The loss, whose gradient is 1; the labels say which trainer's it is."""

        def wait_for_others():
            with tf.control_dependencies([outputs, tf.io.write_file(has_read, "")]):
                return tf.group(wait_for_file(are_done))

        is_first = tf.equal(labels[0, 0], 0.0)
        waited = tf.cond(is_first, wait_for_others, lambda: tf.group(wait_for_file(has_read)))

        @tf.custom_gradient
        def held(outputs):
            def gradient(upstream):
                with tf.control_dependencies([waited]):
                    return tf.identity(upstream)

            return tf.identity(outputs), gradient

        return mean_output(labels, held(outputs))

    with strategy.scope():
        model = slope_model()
        model.compile(SGD(0.5), first_reads_and_updates_last)
    batches = [1, 4, 0, 0]

    def dataset_fn(context):
        worker = context.input_pipeline_id
        ones = np.ones((batches[worker], 4, 1), np.float32)
        return tf.data.Dataset.from_tensor_slices((ones, worker * ones))

    data = strategy.distribute_datasets_from_function(dataset_fn)
    model.fit(data, verbose=0, callbacks=[AtBatch(3, lambda: pathlib.Path(are_done).touch())])
    # The first trainer read before the other one's four updates, and updated after them.
    assert strategy.staleness(model).dense.histogram == ((1, 4), (5, 1))
    np.testing.assert_allclose(model.get_weights()[0], [[-2.5]])


class WithLogarithm(keras.layers.Layer):
    """Has a second output, whose gradient nobody uses, and which is not finite."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")
        self.unused = self.add_weight(shape=(shape[-1],), initializer="ones", name="unused")

    def call(self, inputs):
        return inputs * self.scale, keras.ops.log(0 * inputs * self.unused)


def with_logarithm() -> keras.Model:
    x = keras.Input((WIDTH,))
    return keras.Model(x, keras.layers.Dense(1)(WithLogarithm()(x)[0]))


@pytest.mark.full
def test_an_output_that_no_loss_uses_has_no_gradient(cluster):
    placement = on_servers(with_logarithm, lambda: Adam(0.01))
    model, local = trained(alone(cluster, placement), with_logarithm, lambda: Adam(0.01))
    assert_same(model, local)
    assert np.isfinite(model.get_weights()[0]).all()
    (unused,) = [s for s in model.optimizer.states if s.variable.name == "unused"]
    assert not np.any(unused.versions._value.read_value())


class Captures(keras.Model):
    """Gives a layer a tensor otherwise than as an argument."""

    class Inner(keras.layers.Layer):
        """Uses what is set from outside."""

        context = None

        def build(self, shape):
            self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

        def call(self, inputs):
            return inputs * self.scale * (1.0 if self.context is None else self.context)

    def __init__(self):
        super().__init__()
        self.first, self.inner = keras.layers.Dense(WIDTH), Captures.Inner(name="inner")
        self.last = keras.layers.Dense(1)

    def call(self, inputs):
        self.inner.context = keras.ops.sum(self.first(inputs))
        result = self.last(self.inner(inputs))
        self.inner.context = None
        return result


def test_a_layer_that_uses_a_tensor_it_is_not_given_is_refused_by_name(cluster):
    strategy = alone(cluster, on_servers(Captures))
    with strategy.scope():
        model = compiled(Captures, lambda: Adagrad(0.05))
    with pytest.raises(ValueError, match="inner uses the tensor .* not one of its arguments"):
        model.fit(dataset(2), verbose=0)


class Rooted(keras.layers.Layer):
    """The gradient of one weight is infinite, that of the other one finite."""

    def build(self, shape):
        self.bias = self.add_weight(shape=(shape[-1],), initializer="zeros", name="bias")
        self.root = self.add_weight(shape=(shape[-1],), initializer="zeros", name="root")

    def call(self, inputs):
        return keras.ops.sqrt(self.root) * inputs + self.bias


def test_of_a_gradient_that_is_not_finite_nothing_of_the_push_is_applied(cluster):
    def build():
        return keras.Sequential([keras.Input((WIDTH,)), Rooted(), keras.layers.Dense(1)])

    strategy = alone(cluster, on_servers(build, servers=1), ps_per_group=1)
    with strategy.scope():
        model = compiled(
            build,
            lambda: Adagrad(0.05, nonfinite="error"),
        )
    before = model.get_weights()
    with pytest.raises(tf.errors.InvalidArgumentError, match="root"):
        model.fit(dataset(1), verbose=0)
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)


def three_layers() -> keras.Model:
    layers = keras.layers
    names = [("bottom", 8, "relu"), ("middle", 8, None), ("top", 1, None)]
    parts = [layers.Dense(n, activation, name=name) for name, n, activation in names]
    return keras.Sequential([keras.Input((WIDTH,), name="x"), *parts], name="net")


def test_an_operator_plan_says_where_layers_run_and_where_the_others_have_their_weights(cluster):
    graph = recsync.OperatorPlan.step_graph(three_layers(), batch_size=BATCH)
    operators = {unit.name: None for unit in graph.units} | {"net/bottom": 1, "net/top": 0}
    weights = {"net/bottom": 1, "net/middle": 1, "net/top": 0}
    resources = recsync.placement.Resources(trainers=1, servers=2)
    strategy = alone(cluster, recsync.OperatorPlan(graph, resources, operators, weights))
    model, local = trained(strategy, three_layers)
    assert_same(model, local)
    found = {v.path.rpartition("/")[0]: v._value.shard for v in model.trainable_variables}
    assert found == weights
    # The trainer is one of the places; the other products are those of gradients.
    products = [op for op in operations(graph_of_step(model)) if op.type == "MatMul"]
    assert len({op.device for op in products}) == 3


def test_models_that_share_a_layer_have_its_weights_where_each_of_them_places_it(
    cluster, monkeypatch
):
    def build():
        inputs, shared = keras.Input((WIDTH,)), keras.layers.Dense(8, "relu", name="shared")
        heads = [keras.layers.Dense(1, name=f"head_{i}") for i in range(2)]
        return [keras.Model(inputs, head(shared(inputs))) for head in heads]

    def fit(models):
        for model, size in zip([*models, models[0]], (16, 16, 8), strict=True):
            # With batches of another size, the first model's steps are traced anew.
            data = tf.data.Dataset.from_tensor_slices(examples(3)).batch(size, drop_remainder=True)
            model.fit(data, verbose=0)
        return [model.get_weights() for model in models]

    # The first one has it run on the trainer, and its weights on the first server.
    plans = [{"shared": None, "head_0": 0}, {"shared": 1, "head_1": 1}]
    monkeypatch.setattr(Operators, "searched", lambda self, model, batches: plans.pop(0))
    strategy = alone(cluster, "auto")
    with strategy.scope():
        models = build()
        for model in models:
            model.compile(Adagrad(0.05), "mse")
    local = build()
    for model, other in zip(local, models, strict=True):
        model.compile(Adagrad(0.05), "mse")
        model.set_weights(other.get_weights())
    for found, expected in zip(fit(models), fit(local), strict=True):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    for number, model in enumerate(models):
        (handle, *_) = model.train_function.synchronizer.copies.handles(0)
        assert f"/task:{number}/" in handle.device
    assert not plans


def test_a_plan_for_groups_of_another_size_is_refused(cluster):
    graph = recsync.OperatorPlan.step_graph(three_layers(), batch_size=BATCH)
    plan = recsync.OperatorPlan.search(graph, recsync.placement.Resources(trainers=2, servers=1))
    with pytest.raises(
        ValueError, match="plan for trainers=2, servers=1 and nets_per_trainer=1, b"
    ):
        alone(cluster, plan)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("servers", 'placement must be "trainers", "auto", an OperatorPlan, .*not \'servers\''),
        (
            {"dense": 2},
            "from 0 to 1 with ps_per_group=2, .* or None; not .dense.: 2",
        ),
        ({"dense": True}, "or None; not 'dense': True"),
        ({1: 0}, "the path of a layer, a str.* not 1: 0"),
    ],
)
def test_a_wrong_placement_is_refused(cluster, wrong, message):
    with pytest.raises(ValueError, match=message):
        alone(cluster, wrong)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"nowhere": 0}, "placement names \\['nowhere'\\], .*; it has \\['dense"),
        ({"shares": 0}, "must put .* on one server, as they share variables, not on"),
    ],
)
def test_a_plan_that_does_not_fit_the_model_is_refused_before_training(cluster, plan, message):
    keras.utils.clear_session()
    strategy = alone(cluster, plan)
    with strategy.scope():
        model = compiled(tied, lambda: Adagrad(0.05))
    with pytest.raises(ValueError, match=message):
        model.fit(dataset(2), verbose=0)
