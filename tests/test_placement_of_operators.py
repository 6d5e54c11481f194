"""Operators run where their weights are: `HierarchicalStrategy(placement=…)` with `model.fit`."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import live_operations

import tf_recsync as recsync
from tf_recsync.optimizers import SGD, Adagrad, Adam, SwapAdagrad

WIDTH, BATCH = 6, 16


class Nothing(recsync.Algorithm):
    """Groups that nobody keeps together, so that they train as if they were alone."""

    def sync(self, trainers, center):
        pass


@pytest.fixture
def cluster(clusters):
    """One trainer, the two servers of its group, and one for tables."""
    return clusters.get(workers=1, ps=3)


def alone(cluster, placement="auto", **options):
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


def assert_same(model, local, tolerance=1e-5):
    for one, other in zip(model.get_weights(), local.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def graph_of_step(model) -> tf.Graph:
    """What the workers of the first group run."""
    ((functions, _),) = model.train_function._functions.values()
    of_steps = next(iter(functions.values()))
    return of_steps[min(of_steps)]._once._concrete.graph


def crossing(graph) -> list[tf.Tensor]:
    """The tensors that travel between devices, but for resources, which are only named."""
    last = [*graph.control_outputs, *(tensor.op for tensor in graph.outputs)]
    return [
        tensor
        for op in live_operations(last)
        for tensor in op.inputs
        if tensor.device != op.device
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


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_placed_layers_train_as_unplaced_ones_and_as_one_process(cluster, name):
    placed, local = trained(alone(cluster), two_layers, OPTIMIZERS[name], batches=50)
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

    def call(self, inputs, training=False):
        @tf.custom_gradient
        def half_slope(x):
            return tf.identity(x), lambda upstream: 0.5 * upstream

        @tf.function(autograph=False)
        def scaled(x):
            return half_slope(x) * tf.convert_to_tensor(self.scale)

        if training:
            self.seen.assign_add(tf.ones([5]))
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


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_of_every_kind_run_on_servers(cluster, kind):
    model, local = trained(alone(cluster), LAYERS[kind], lambda: SGD(0.05))
    assert_same(model, local)
    assert_only_activations_travel(model)


CLIPPING = {
    "clipnorm": lambda: Adagrad(0.05, clipnorm=0.3),
    "clipvalue": lambda: Adagrad(0.05, clipvalue=0.05),
    "global_clipnorm": lambda: Adagrad(0.05, global_clipnorm=0.3),
    "weight_decay": lambda: Adagrad(0.05, weight_decay=0.1),
}


@pytest.mark.parametrize("kind", CLIPPING)
def test_what_lies_between_a_gradient_and_its_update_is_on_the_server(cluster, kind):
    model, local = trained(alone(cluster), called_twice, CLIPPING[kind])
    assert_same(model, local)
    assert_only_activations_travel(model)
