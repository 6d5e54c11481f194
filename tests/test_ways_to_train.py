"""Ways to train that Keras's users write: with one worker as in one process, and with two."""

from __future__ import annotations

import functools
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_recsync as recsync
from tf_recsync.layers import EmbeddingCollection, FeatureConfig, TableConfig

EXAMPLES, BATCH, ROWS, LENGTH = 96, 8, 30, 5


@functools.cache
def data():
    random = np.random.default_rng(0)
    inputs = {
        "id": random.integers(0, ROWS, EXAMPLES),
        "ids": random.integers(1, ROWS, (EXAMPLES, LENGTH)),
        "x": random.normal(size=(EXAMPLES, 3)).astype(np.float32),
    }
    for ids in inputs["ids"]:
        ids[random.integers(1, LENGTH + 1) :] = 0
    clicks = random.integers(0, 2, (EXAMPLES, 1)).astype(np.float32)
    weights = random.uniform(0.5, 2.0, EXAMPLES).astype(np.float32)
    return inputs, clicks, weights


def adagrad():
    return recsync.optimizers.Adagrad(0.1)


def collection(feature: str, combiner: str | None) -> Callable:
    """Looks a feature up in a table; ids that are 0 are padding of sequences."""
    layer = EmbeddingCollection(
        [TableConfig("t", rows=ROWS, dimension=4, combiner=combiner, initializer="uniform")],
        [FeatureConfig(feature, table="t", padding=None if combiner else 0)],
    )
    return lambda ids: layer({feature: ids})[feature]


def click(hidden):
    return keras.layers.Dense(1, activation="sigmoid", name="click")(hidden)


def built(outputs: Callable, kind: type[keras.Model] = keras.Model) -> keras.Model:
    """A model of one id and some numbers, which makes outputs of a hidden layer."""
    inputs = {"id": keras.Input((), dtype="int64"), "x": keras.Input((3,))}
    vectors = [collection("id", "sum")(inputs["id"]), inputs["x"]]
    hidden = keras.layers.Dense(4, activation="tanh")(keras.layers.Concatenate()(vectors))
    return kind(inputs, outputs(hidden))


def sequence(layer: Callable, look_up: Callable) -> keras.Model:
    """A model of a sequence of ids."""
    inputs = {"ids": keras.Input((LENGTH,), dtype="int64"), "x": keras.Input((3,))}
    hidden = keras.layers.Concatenate()([layer(look_up(inputs["ids"])), inputs["x"]])
    model = keras.Model(inputs, click(hidden))
    model.compile(adagrad(), "binary_crossentropy")
    return model


def several_outputs():
    def outputs(hidden):
        return {"click": click(hidden), "time": keras.layers.Dense(1, name="time")(hidden)}

    model = built(outputs)
    losses = {"click": "binary_crossentropy", "time": "mse"}
    model.compile(
        adagrad(),
        losses,
        loss_weights={"click": 1.0, "time": 0.3},
        metrics={"time": ["mae"]},
        weighted_metrics={"click": ["accuracy"]},
    )
    return model


class AddsLoss(keras.layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x


def regularized():
    def outputs(hidden):
        hidden = keras.layers.Dense(3, activity_regularizer="l2")(AddsLoss()(hidden))
        return click(hidden)

    model = built(outputs)
    model.compile(adagrad(), "binary_crossentropy", metrics=["accuracy"])
    return model


class OwnLoss(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean(keras.ops.square(y - y_pred) * (1 + y_pred))


class OwnStep(keras.Model):
    """Returns its losses as they are, as TensorFlow Recommenders' models do."""

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = keras.ops.mean(keras.losses.binary_crossentropy(y, predicted))
            regularization = 0.01 * keras.ops.mean(keras.ops.square(predicted))
            total = loss + regularization
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(total, variables), variables, strict=True))
        return {"loss": loss, "regularization_loss": regularization, "total_loss": total}


def with_own(kind: type[keras.Model]) -> keras.Model:
    model = built(click, kind)
    model.compile(adagrad())
    return model


def in_bfloat16():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = built(click)
    finally:
        keras.config.set_dtype_policy(before)
    model.compile(adagrad(), "binary_crossentropy")
    return model


def attention(vectors):
    attended = keras.layers.MultiHeadAttention(2, 3)(vectors, vectors)
    return keras.layers.GlobalAveragePooling1D()(attended)


def masked_embedding(ids):
    return keras.layers.Embedding(ROWS, 4, mask_zero=True)(ids)


WAYS = {
    "several outputs, sample_weight": several_outputs,
    "add_loss, class_weight": regularized,
    "compute_loss": functools.partial(with_own, OwnLoss),
    "train_step": functools.partial(with_own, OwnStep),
    "mixed_bfloat16": in_bfloat16,
    "GRU": lambda: sequence(keras.layers.GRU(3), collection("ids", None)),
    "LSTM, Keras's Embedding": lambda: sequence(keras.layers.LSTM(3), masked_embedding),
    "MultiHeadAttention": lambda: sequence(attention, collection("ids", None)),
}


def trained(way: str) -> tuple[dict[str, list[float]], list[np.ndarray]]:
    """The history and the weights of a model that is trained in a way, from the same seeds."""
    inputs, clicks, weights = data()
    keras.utils.set_random_seed(1)
    model = WAYS[way]()
    names = set(model.input)
    x = {name: values for name, values in inputs.items() if name in names}
    y, options = clicks, {}
    if way == "several outputs, sample_weight":
        y = {"click": clicks, "time": 2 * clicks - 0.5}
        options["sample_weight"] = {"click": weights, "time": weights[::-1]}
    elif way == "add_loss, class_weight":
        options["class_weight"] = {0: 1.0, 1: 3.0}
    fitted = model.fit(x, y, batch_size=BATCH, epochs=3, shuffle=False, verbose=0, **options)
    return fitted.history, model.get_weights()


@pytest.fixture(params=[1, 2], ids=["one worker", "two workers"], scope="module")
def cluster(request, clusters):
    return clusters.get(request.param, 1)


@pytest.mark.parametrize("way", WAYS)
def test_one_worker_trains_as_one_process_does_and_two_learn(cluster, way):
    with recsync.AsyncStrategy(cluster).scope():
        history, weights = trained(way)
    if cluster.workers == 2:
        # A step's own losses are those of the last batches.
        name = "loss" if way != "train_step" else "regularization_loss"
        assert len(history[name]) == 3 and np.isfinite(history[name]).all()
        if way != "train_step":
            assert history["loss"][-1] < history["loss"][0]
        return
    expected, expected_weights = trained(way)
    assert history.keys() == expected.keys()
    tolerance = {"rtol": 2e-2} if way == "mixed_bfloat16" else {"rtol": 1e-5, "atol": 1e-6}
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, **tolerance, err_msg=name)
    for own, other in zip(weights, expected_weights, strict=True):
        np.testing.assert_allclose(own, other, **tolerance)


class SaysItIsBuilt(keras.Model):
    """A model without a `build` of its own, whose layers are built when it is called."""

    def __init__(self):
        super().__init__()
        self.look_up = EmbeddingCollection([TableConfig("t", ROWS, 4)], [FeatureConfig("id", "t")])
        self.click = keras.layers.Dense(1, activation="sigmoid")

    def call(self, inputs):
        return self.click(self.look_up({"id": inputs["id"]})["id"])


def test_layers_of_a_model_whose_build_was_called_are_built_before_they_train(clusters):
    strategy = recsync.AsyncStrategy(clusters.get(workers=2, ps=1))
    inputs, clicks, _ = data()
    with strategy.scope():
        model = SaysItIsBuilt()
        with pytest.warns(UserWarning, match="does not have a `build"):
            model.build({"id": (None,)})
        model.compile(adagrad(), "binary_crossentropy")
    batches = tf.data.Dataset.from_tensor_slices(({"id": inputs["id"]}, clicks)).batch(BATCH)
    losses = model.fit(batches, epochs=3, verbose=0, shuffle=False).history["loss"]
    assert losses[-1] < losses[0]
    assert len(model.optimizer.states) == len(model.trainable_variables) == 3


class OwnMetrics(keras.Model):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        found = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**found, "twice": 2 * found["loss"]}


@pytest.mark.parametrize("steps", [1, 2], ids=["one step a call", "two steps a call"])
@pytest.mark.parametrize("kind", [keras.Model, OwnMetrics], ids=["", "compute_metrics"])
def test_a_part_of_a_batch_may_be_none(clusters, kind, steps):
    cluster = clusters.get(1, 1)
    inputs, clicks, _ = data()
    inputs = {name: inputs[name] for name in ("id", "x")}
    batches = tf.data.Dataset.from_tensor_slices((inputs, clicks)).batch(BATCH)
    with_none = batches.map(lambda x, y: (x, y, None))

    def trained(batches, **options):
        keras.utils.set_random_seed(1)
        model = built(click, kind)
        model.compile(adagrad(), "binary_crossentropy", **options)
        history = model.fit(batches, epochs=2, shuffle=False, verbose=0).history
        tested = model.evaluate(batches, verbose=0, return_dict=True)
        return history, tested, model.predict(batches, verbose=0)

    with recsync.AsyncStrategy(cluster).scope():
        found = trained(with_none, steps_per_execution=steps)
    expected = trained(batches, run_eagerly=True)
    assert found[0].keys() == expected[0].keys() and found[1].keys() == expected[1].keys()
    for own, other in zip(found[:2], expected[:2], strict=True):
        for name in own:
            np.testing.assert_allclose(own[name], other[name], rtol=1e-4)
    np.testing.assert_allclose(found[2], expected[2], rtol=1e-4)
    if steps > 1 and kind is keras.Model:
        with recsync.AsyncStrategy(cluster, prefetch_lookups=True).scope():
            found = trained(with_none, steps_per_execution=steps)
        # Rows lack the update of the step before.
        np.testing.assert_allclose(found[0]["loss"], expected[0]["loss"], rtol=0.1)


class OutputsOfAllKinds(keras.Model):
    """Predicts of an id what has another length for each example."""

    def predict_step(self, batch):
        ids = tf.range(tf.shape(batch["id"])[0])
        ragged = tf.RaggedTensor.from_row_lengths(tf.repeat(batch["x"], ids, axis=0), ids)
        sparse = tf.sparse.from_dense(batch["x"])
        return {"ragged": ragged, "sparse": sparse, "number": tf.size(ids), "plain": batch["id"]}


@pytest.mark.parametrize("steps", [1, 3], ids=["one step a call", "three steps a call"])
def test_outputs_may_be_ragged_or_sparse_or_numbers(clusters, steps):
    cluster = clusters.get(2, 1)
    batches = tf.data.Dataset.from_tensor_slices(data()[0]).batch(BATCH)

    def predicted(**options):
        model = built(click, OutputsOfAllKinds)
        model.compile(adagrad(), "mse", **options)
        found = model.predict(batches, verbose=0)
        ragged, sparse = found.pop("ragged"), found.pop("sparse")
        found["rows"], found["row lengths"] = ragged.values.numpy(), ragged.row_lengths().numpy()
        return {**found, "dense": tf.sparse.to_dense(sparse).numpy()}

    with recsync.AsyncStrategy(cluster).scope():
        found = predicted(steps_per_execution=steps)
    expected = predicted()
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def slope(**options):
    """A model whose loss tells how many steps it has done."""
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((1,)), layer])
    model.compile(recsync.optimizers.SGD(0.01), "mse", **options)
    return model


@pytest.mark.parametrize("by_workers", [False, True], ids=["dataset", "of workers"])
@pytest.mark.parametrize("batches", [10, 8], ids=["within an epoch", "with an epoch"])
def test_data_of_unknown_length_begin_anew_when_they_end(clusters, batches, by_workers):
    def make(context=None):
        ones = tf.data.Dataset.from_tensors((tf.ones([1, 1]), tf.ones([1, 1]))).repeat(batches)
        return ones.filter(lambda x, y: tf.reduce_all(x > 0))

    def trained(data):
        steps = {"steps_per_epoch": 4, "validation_steps": 4}
        with pytest.warns(UserWarning, match="ran out of data"):
            history = model.fit(data, validation_data=data, epochs=5, verbose=0, **steps).history
        return history["loss"], history["val_loss"], model.get_weights()[0].item()

    strategy = recsync.AsyncStrategy(clusters.get(1, 1))
    with strategy.scope():
        model = slope()
    found = trained(strategy.distribute_datasets_from_function(make) if by_workers else make())
    assert strategy.worker_steps(model) == [8]
    assert int(model.optimizer.iterations) == 2 * 8 + (batches - 8)
    # In a graph, the step without a batch may count in Keras's metrics.
    model = slope(run_eagerly=True)
    for own, other in zip(found, trained(make()), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-6)


class LossOfOutputs(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        assert y is None
        return keras.ops.mean(keras.ops.square(y_pred))


def test_each_batch_of_a_generator_counts_though_a_part_is_none(clusters):
    inputs, _, weights = data()

    def made():
        for first in range(0, EXAMPLES, BATCH):
            batch = slice(first, first + BATCH)
            yield {name: inputs[name][batch] for name in ("id", "x")}, None, weights[batch]

    def trained():
        keras.utils.set_random_seed(1)
        model = with_own(LossOfOutputs)
        losses = [model.fit(made(), verbose=0).history["loss"][0] for _ in range(2)]
        return *losses, model.evaluate(made(), verbose=0), model.predict(made(), verbose=0)

    with recsync.AsyncStrategy(clusters.get(1, 1)).scope():
        found = trained()
    for own, other in zip(found, trained(), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-4)


class OfTexts(keras.Model):
    """A model whose inputs are numbers as texts."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, texts):
        return self.dense(tf.strings.to_number(texts))


def test_a_generator_may_yield_texts(clusters):
    def made():
        for first in range(0, 8, 2):
            numbers = np.arange(first, first + 2, dtype=np.float32).reshape(2, 1)
            yield tf.strings.as_string(numbers), numbers

    def trained():
        keras.utils.set_random_seed(1)
        model = OfTexts()
        model.compile(recsync.optimizers.SGD(0.01), "mse")
        return model.fit(made(), verbose=0).history["loss"][0]

    with recsync.AsyncStrategy(clusters.get(1, 1)).scope():
        found = trained()
    np.testing.assert_allclose(found, trained(), rtol=1e-4)
