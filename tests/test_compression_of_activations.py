"""What travels to placed layers and from them, compressed: `HierarchicalStrategy(compression=…)`."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from test_placement_of_operators import (
    BATCH,
    WIDTH,
    alone,
    compiled,
    crossing,
    dataset,
    graph_of_step,
    operations,
)

import tf_recsync as recsync
from tf_recsync import Compression
from tf_recsync.optimizers import SGD, Adagrad

BATCHES = 12


@pytest.fixture
def cluster(clusters):
    """One trainer, the two servers of its group, and one for tables."""
    return clusters.get(workers=1, ps=3)


def rounded(x, encoding):
    """What arrives of a tensor."""
    if encoding == "bfloat16":
        return tf.cast(tf.cast(x, tf.bfloat16), x.dtype)
    if encoding == "int8" and x.shape[-1] > 1:
        scale = tf.reduce_max(tf.abs(x), -1, keepdims=True) / 127.0
        return tf.math.divide_no_nan(tf.round(tf.math.divide_no_nan(x, scale)) * scale, 1.0)
    return x


class Crossing(keras.layers.Layer):
    """Where a tensor travels in the placed model: it and its gradient arrive rounded.

    With sparsify=.5 the larger half of the gradients does, and of what did not before.
    """

    def __init__(self, compression):
        super().__init__()
        self.compression = compression

    def build(self, shape):
        self.kept = self.add_weight((BATCH, shape[-1]), initializer="zeros", trainable=False)

    def call(self, x):
        @tf.custom_gradient
        def crossing(x):
            return rounded(x, self.compression.activations), self._gradient

        return crossing(x)

    def _gradient(self, gradient):
        if not self.compression.sparsify:
            return rounded(gradient, self.compression.gradients)
        if self.compression.error_feedback:
            gradient += self.kept
        flat = tf.reshape(gradient, [-1])
        count = flat.shape[0] - int(self.compression.sparsify * flat.shape[0])
        largest = tf.math.top_k(tf.abs(flat), count).indices[:, None]
        sent = tf.scatter_nd(largest, tf.gather_nd(flat, largest), flat.shape)
        sent = rounded(tf.reshape(sent, gradient.shape), self.compression.gradients)
        self.kept.assign(gradient - sent)
        return sent


def layers() -> list[keras.layers.Layer]:
    dense = keras.layers.Dense
    return [dense(8, "relu", name="first"), dense(7, "tanh", name="second"), dense(1, name="last")]


# The first layer on one server, the others on another one.
PLACEMENT = {"first": 0, "second": 1, "last": 1}


def plain() -> keras.Model:
    return keras.Sequential([keras.Input((WIDTH,)), *layers()])


def rounding(compression) -> keras.Model:
    """The same model, in one process, that rounds where that one sends."""
    (first, second, last), crossing = layers(), lambda: Crossing(compression)
    parts = [crossing(), first, crossing(), second, last, crossing()]
    return keras.Sequential([keras.Input((WIDTH,), batch_size=BATCH), *parts])


def static(batches) -> tf.data.Dataset:
    return dataset(batches).apply(tf.data.experimental.assert_cardinality(batches))


COMPRESSIONS = {
    "bfloat16": Compression(activations="bfloat16"),
    "int8": Compression(activations="int8"),
    "gradients": Compression(gradients="bfloat16"),
    "int8 and gradients": Compression(activations="int8", gradients="bfloat16"),
    "sparse": Compression(sparsify=0.5, error_feedback=False),
    "feedback": Compression(sparsify=0.5),
    "all": Compression(activations="bfloat16", gradients="bfloat16", sparsify=0.5),
}


def placed(cluster, compression, build=plain, placement=PLACEMENT, batches=BATCHES, **options):
    """A model after a pass under the strategy, and its weights before."""
    keras.utils.set_random_seed(1)
    strategy = alone(cluster, placement, compression=compression)
    with strategy.scope():
        model = compiled(build, lambda: Adagrad(0.05), **options)
    start = model.get_weights()
    model.fit(dataset(batches), verbose=0)
    return model, start


def trainable(model) -> list[np.ndarray]:
    return [v.numpy() for v in model.trainable_variables]


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_training_equals_a_replay_that_rounds_what_travels(cluster, name):
    compression = COMPRESSIONS[name]
    model, start = placed(cluster, compression)
    replay = rounding(compression)
    for variable, value in zip(replay.trainable_variables, start, strict=True):
        variable.assign(value)
    replay.compile(Adagrad(0.05), "mse")
    replay.fit(dataset(BATCHES).map(with_size), verbose=0)
    exact = compiled(plain, lambda: Adagrad(0.05))
    exact.set_weights(start)
    exact.fit(dataset(BATCHES), verbose=0)
    pairs = zip(trainable(model), trainable(replay), trainable(exact), strict=True)
    errors = [(np.abs(a - b).max(), np.abs(a - c).max()) for a, b, c in pairs]
    # A sum in another order may round to a neighbour.
    assert max(e for e, _ in errors) < 0.1 * max(e for _, e in errors), errors
    assert max(e for e, _ in errors) < 2e-4, errors


def with_size(x, y):
    return tf.ensure_shape(x, (BATCH, WIDTH)), y


def test_only_compressed_tensors_travel(cluster):
    wanted = {
        "bfloat16": ({tf.bfloat16}, {tf.float32}),
        "int8 and gradients": ({tf.int8, tf.float32, tf.bfloat16}, set()),
        "feedback": ({tf.float32, tf.uint8}, set()),
    }
    for name in wanted:
        model, _ = placed(cluster, COMPRESSIONS[name], batches=2)
        print(name)
        for t in crossing(graph_of_step(model)):
            print("   ", t.name, t.dtype, t.shape, t.op.type, t.device)
