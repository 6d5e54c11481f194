"""What travels to placed layers is compressed: `HierarchicalStrategy(compression=…)`."""

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
    examples,
    graph_of_step,
    on_servers,
    operations,
)

import tf_recsync as recsync
from tf_recsync import Compression, ops
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
        return tf.round(tf.math.divide_no_nan(x, scale)) * scale
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


def chained(inputs, parts) -> keras.Model:
    x = inputs
    for part in parts:
        x = part(x)
    return keras.Model(inputs, x)


def plain() -> keras.Model:
    return chained(keras.Input((WIDTH,)), layers())


def rounding(compression) -> keras.Model:
    """The same model, in one process, that rounds where that one sends."""
    (first, second, last), crossing = layers(), lambda: Crossing(compression)
    parts = [crossing(), first, crossing(), second, last, crossing()]
    return chained(keras.Input((WIDTH,), batch_size=BATCH), parts)


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


@pytest.mark.cases("int8", "sparse", "all")
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
    # Without compression the weights are others.
    assert max(e for e, _ in errors) < 1e-6 < 1e-4 < max(e for _, e in errors), errors


def with_size(x, y):
    return tf.ensure_shape(x, (BATCH, WIDTH)), y


def travelling(model) -> list[tuple[str, int]]:
    """Type and columns of what crosses for each example of a batch: [batch] has 0."""
    tensors = [t for t in crossing(graph_of_step(model)) if t.shape.rank and t.shape[0] is None]
    # A mask of what is sent, and its values, have no columns either.
    return sorted((t.dtype.name, t.shape[-1] if t.shape.rank > 1 else 0) for t in tensors)


# There: the inputs, what the first layer gives the second one, and the outputs. Back: the gradients
# of the latter two.
TRAVELLING = {
    "bfloat16": [
        *(("bfloat16", columns) for columns in (1, 6, 8)),
        *(("float32", columns) for columns in (1, 8)),
    ],
    "int8 and gradients": [
        *(("bfloat16", columns) for columns in (1, 8)),
        *[("float32", 0)] * 2,
        ("float32", 1),  # A code and a scale would be more.
        *(("int8", columns) for columns in (6, 8)),
    ],
    "all": [*[("bfloat16", 0)] * 2, *(("bfloat16", n) for n in (1, 6, 8)), *[("uint8", 0)] * 2],
}


@pytest.mark.parametrize("name", TRAVELLING)
def test_only_what_is_compressed_travels(cluster, name):
    model, _ = placed(cluster, COMPRESSIONS[name], batches=2)
    assert travelling(model) == TRAVELLING[name]


def test_a_server_that_only_runs_a_layer_without_weights_encodes_what_it_sends(cluster):
    def build():
        x = inputs = keras.Input((WIDTH,), name="x")
        tanh = keras.layers.Activation("tanh", name="between")
        for part in (keras.layers.Dense(8, name="first"), tanh, keras.layers.Dense(1, name="last")):
            x = part(x)
        return keras.Model(inputs, x)

    graph = recsync.OperatorPlan.step_graph(build(), batch_size=BATCH)
    operators = {unit.name: None for unit in graph.units}
    operators |= {"first": 0, "between": 1, "last": 0}
    resources = recsync.placement.Resources(trainers=1, servers=2)
    plan = recsync.OperatorPlan(graph, resources, operators)
    model, _ = placed(cluster, COMPRESSIONS["bfloat16"], build, plan, batches=2)
    # The inputs, what the layer between gets and gives, and the outputs; gradients are whole.
    there = [("bfloat16", columns) for columns in (1, 6, 8, 8)]
    assert travelling(model) == [*there, *(("float32", columns) for columns in (1, 8, 8))]


def test_what_travels_compressed_passes_an_artificial_link(cluster):
    placement = on_servers(plain, servers=1)
    strategy = alone(cluster, placement, ps_per_group=1, compression=COMPRESSIONS["int8"])
    recsync.testing.set_bandwidth(strategy, 1e8)
    with strategy.scope():
        model = compiled(plain, lambda: Adagrad(0.05))
    model.fit(dataset(3), verbose=0)
    passing = [op for op in operations(graph_of_step(model)) if op.type == "RecsyncTransfer"]
    found = sorted(op.inputs[0].dtype.name for op in passing)
    # The outputs, their gradient and scales; and the learning rate, twice.
    assert found == ["float32"] * 5 + ["int8"]


def branches() -> keras.Model:
    inputs = keras.Input((WIDTH,))
    twice = keras.layers.Dense(8, name="twice")
    (first, second, third), x = layers(), keras.ops.sin(inputs)
    both = keras.layers.Concatenate()([twice(x), twice(2.0 * x), first(x), second(x)])
    return keras.Model(inputs, third(both))


def test_a_tensor_is_encoded_once_and_travels_once_to_a_place(cluster):
    placement = {"twice": 0, "first": 0, "second": 1}
    model, _ = placed(cluster, COMPRESSIONS["int8"], branches, placement)
    encoders = [op for op in operations(graph_of_step(model)) if op.type == "RecsyncEncodeInt8"]
    # On the trainer x and 2 x; on servers what they give.
    assert sorted(op.device[:21] for op in encoders) == ["", ""] + ["/job:ps/replica:0/tas"] * 4
    # x to both servers, though three layers use it, and 2 x to one.
    assert travelling(model).count(("int8", WIDTH)) == 3


def masked() -> keras.Model:
    inputs = keras.Input((3, WIDTH // 3))
    x = keras.layers.Masking(0.5)(inputs)
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.GRU(5)(x)))


def sequences(x, y):
    x = tf.reshape(x, (-1, 3, WIDTH // 3))
    return tf.where(x > 0.6, 0.5, x), y


def test_masks_travel_as_they_are(cluster):
    compression = COMPRESSIONS["int8 and gradients"]
    strategy = alone(cluster, on_servers(masked), compression=compression)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = masked()
        model.compile(Adagrad(0.05), "mse")
    local = masked()
    local.set_weights(model.get_weights())
    local.compile(Adagrad(0.05), "mse")
    data = dataset(BATCHES).map(sequences)
    for each in (model, local):
        each.fit(data, verbose=0)
    assert ("bool", 3) in travelling(model)
    for one, other in zip(model.get_weights(), local.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=0.02)


def half() -> keras.Model:
    policy = keras.DTypePolicy("mixed_bfloat16")
    parts = [keras.layers.Dense(8, "relu", dtype=policy), keras.layers.Dense(1, dtype=policy)]
    return chained(keras.Input((WIDTH,)), parts)


@pytest.mark.cases("half")
@pytest.mark.parametrize("build", [plain, half])
def test_the_loss_stays_near(cluster, build):
    losses = []
    for compression in (None, COMPRESSIONS["int8 and gradients"], COMPRESSIONS["all"]):
        model, _ = placed(cluster, compression, build, on_servers(build), batches=40)
        losses.append(model.evaluate(dataset(40), verbose=0))
    assert losses[1] < 1.02 * losses[0] and losses[2] < 1.2 * losses[0], losses


def test_each_net_keeps_what_it_has_not_sent(clusters):
    strategy = alone(
        clusters.get(workers=2, ps=3),
        PLACEMENT,
        trainers_per_group=2,
        compression=Compression(sparsify=0.9),
    )
    with strategy.scope():
        model = compiled(plain, lambda: SGD(0.05))
    # Each has batches of its own, so that none is left without.
    data = strategy.distribute_datasets_from_function(lambda context: dataset(BATCHES // 2))
    model.fit(data, verbose=0)
    ((name, device),) = {
        (op.get_attr("feedback").decode(), op.device)
        for op in operations(graph_of_step(model))
        if op.type == "RecsyncCompressGradient" and op.device
    }
    # Of the gradients that the second layer gives the first one, of two trainers, and nobody.
    kept = []
    for net in range(3):
        with tf.device(device):
            zeros = tf.zeros([BATCH, 8])
            kept.append(ops.compress_gradient(zeros, feedback=name, net=net)[1].numpy())
    assert np.any(kept[0]) and np.any(kept[1]) and not np.any(kept[2])
    assert np.any(kept[0] != kept[1])


@pytest.mark.parametrize("sparsify", [0.0, 0.5])
def test_a_last_batch_may_be_smaller(cluster, sparsify):
    compression = Compression(activations="int8", gradients="bfloat16", sparsify=sparsify)
    strategy = alone(cluster, PLACEMENT, compression=compression)
    with strategy.scope():
        model = compiled(plain, lambda: Adagrad(0.05))
    x, y = (array[: 3 * BATCH + 5] for array in examples(4))
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    history = model.fit(data, epochs=3, verbose=0).history["loss"]
    assert history[-1] < history[0]
    assert int(model.optimizer.iterations.numpy()) == 12


def test_a_compression_of_nothing_is_refused(cluster):
    compression = Compression(activations="bfloat16")
    with pytest.raises(ValueError, match='would do nothing with placement="trainers"'):
        alone(cluster, "trainers", compression=compression)
    strategy = alone(cluster, {"first": None}, compression=compression)
    with strategy.scope():
        model = compiled(plain, lambda: Adagrad(0.05))
    with pytest.raises(ValueError, match="='bfloat16'.* would do nothing: placement has no layer"):
        model.fit(dataset(1), verbose=0)


def test_a_wrong_compression_is_refused(cluster):
    with pytest.raises(ValueError, match="compression must be None or a Compression, not 'int8'"):
        alone(cluster, PLACEMENT, compression="int8")


def test_error_feedback_of_several_nets_of_a_trainer_is_refused(cluster):
    with pytest.raises(ValueError, match="goes only with nets_per_trainer=1, not 2"):
        alone(cluster, PLACEMENT, nets_per_trainer=2, compression=Compression(sparsify=0.5))
