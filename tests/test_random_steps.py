"""Random numbers in steps: what is drawn is used as drawn, and is drawn anew each time."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_recsync as recsync
from tf_recsync.layers import EmbeddingCollection, FeatureConfig, TableConfig
from tf_recsync.strategies.model_variables import optimizers_of
from tf_recsync.strategies.recovery import make_anew
from tf_recsync.synchronization.lookups import find_lookups
from tf_recsync.synchronization.pull_push import Layout

IDS = 1000


@pytest.fixture
def cluster(clusters):
    return clusters.get(workers=1, ps=2)


class Masked(keras.Model):
    """Looks up ids of which it hides some, in a table whose row i is i."""

    def __init__(self, is_collection=False, hide=None):
        super().__init__()
        self.is_collection = is_collection
        self.hide = hide or (lambda ids: tf.random.uniform(tf.shape(ids)) < 0.5)
        rows = np.arange(IDS, dtype=np.float32)[:, None]
        if is_collection:
            table = TableConfig("ids", IDS, 1, initializer=rows)
            self.table = EmbeddingCollection([table], [FeatureConfig("ids", "ids")])
        else:
            self.table = keras.layers.Embedding(IDS, 1, weights=[rows])

    def call(self, ids):
        return self.table({"ids": ids})["ids"] if self.is_collection else self.table(ids)

    def train_step(self, data):
        ids = tf.where(self.hide(data), tf.zeros_like(data), data)
        with tf.GradientTape() as tape:
            rows = self(ids)
            loss = tf.reduce_mean(rows)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        others = tf.not_equal(tf.reshape(rows, [-1]), tf.cast(ids, tf.float32))
        return {
            "hidden": tf.reduce_mean(tf.cast(ids == 0, tf.float32)),
            "others": tf.reduce_mean(tf.cast(others, tf.float32)),
        }


def masked(strategy, steps=1, **options):
    with strategy.scope():
        model = Masked(**options)
        model.compile(recsync.optimizers.SGD(0.0), steps_per_execution=steps)
        model(tf.zeros([1], tf.int64))
    return model


def ids_of(examples):
    ids = np.random.default_rng(1).integers(1, IDS, examples)
    return tf.data.Dataset.from_tensor_slices(ids).batch(64, drop_remainder=True)


@pytest.mark.parametrize("is_collection", [False, True])
@pytest.mark.parametrize(("steps", "prefetches"), [(1, False), (2, True)])
def test_a_step_gets_the_rows_of_the_ids_that_it_draws(cluster, is_collection, steps, prefetches):
    strategy = recsync.AsyncStrategy(cluster, prefetch_lookups=prefetches)
    model = masked(strategy, steps, is_collection=is_collection)
    logs = model.fit(ids_of(4 * 64), verbose=0).history
    assert 0.3 < logs["hidden"][0] < 0.7
    assert logs["others"] == [0]


def test_ids_are_found_before_the_step_unless_they_are_drawn(cluster):
    @tf.function
    def drawn(ids):
        return tf.cond(ids[0] > 0, lambda: tf.random.uniform(tf.shape(ids)) < 0.5, lambda: ids > 0)

    @tf.function
    def checked(ids):
        tf.debugging.assert_less(ids, np.int64(IDS))
        return tf.map_fn(lambda one: one > 500, ids, fn_output_signature=tf.bool)

    strategy = recsync.AsyncStrategy(cluster)
    for hide, count in ((drawn, 0), (checked, 1)):
        model = masked(strategy, hide=hide)
        model.optimizer.build(model.trainable_variables)
        layout = Layout.of(model, optimizers_of(model))
        spec = ids_of(64).element_spec
        assert len(find_lookups(model, layout, "train_step", spec).tables) == count


class Drawing(keras.Model):
    """Its metrics are the means of what its steps draw and of the squares."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw
        self.dense = keras.layers.Dense(1)
        self.drawn = keras.metrics.Mean(name="drawn")
        self.squared = keras.metrics.Mean(name="squared")

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        drawn = self.draw()
        self.drawn.update_state(drawn)
        self.squared.update_state(drawn**2)
        return super().train_step(data)


def drawing(strategy, draw):
    with strategy.scope():
        model = Drawing(draw)
        model.compile(recsync.optimizers.SGD(0.0), "mse")
        model(tf.zeros([1, 2]))
    return model


def batches(count):
    return tf.data.Dataset.from_tensors((np.ones((4, 2)), np.ones((4, 1)))).repeat(count)


def hop(cluster):
    return recsync.HopStrategy(cluster, recsync.topology.ring(2))


@pytest.mark.parametrize("make", [recsync.AsyncStrategy, hop])
def test_each_step_draws_other_numbers_without_a_seed(clusters, make):
    strategy = make(clusters.get(workers=2, ps=2 * (make is not hop)))
    model = drawing(strategy, lambda: keras.random.uniform(()))
    logs = model.fit(batches(40), verbose=0).history
    variance = logs["squared"][0] - logs["drawn"][0] ** 2
    assert 0.02 < variance < 0.16  # Of uniform numbers 1/12.


@pytest.mark.parametrize("make", [recsync.AsyncStrategy, hop])
def test_what_the_model_does_not_know_can_not_be_assigned(clusters, make):
    strategy = make(clusters.get(workers=2, ps=2 * (make is not hop)))
    other = keras.Variable(0.0, name="other")

    def count():
        other.assign_add(1.0)
        return tf.zeros([])

    model = drawing(strategy, count)
    with pytest.raises(ValueError, match="other.* is assigned in the step and is no variable of"):
        model.fit(batches(2), verbose=0)


class AlwaysDropout(keras.layers.Dropout):
    """Drops not in training alone."""

    def call(self, inputs):
        return super().call(inputs, training=True)


@pytest.mark.parametrize("make", [recsync.AsyncStrategy, hop])
def test_random_layers_drop_others_in_each_pass_and_in_each_batch(clusters, make):
    strategy = make(clusters.get(workers=2, ps=2 * (make is not hop)))
    with strategy.scope():
        inputs = keras.Input((64,))
        outputs = keras.layers.Dense(1, kernel_initializer="ones")(AlwaysDropout(0.5)(inputs))
        model = keras.Model(inputs, outputs)
        model.compile(recsync.optimizers.SGD(0.0), "mse")
    data = tf.data.Dataset.from_tensors((np.random.normal(size=(4, 64)), np.zeros((4, 1))))
    fits = [model.fit(data, epochs=2, verbose=0).history["loss"] for _ in range(2)]
    losses = [*fits[0], *fits[1], *(model.evaluate(data, verbose=0) for _ in range(2))]
    # Those of evaluation may be those of training.
    assert len(set(losses[:4])) == 4
    assert losses[4] != losses[5]
    predicted = [model.predict(data.repeat(4), verbose=0) for _ in range(2)]
    assert len(np.unique(np.concatenate(predicted))) == 2 * 4 * 4


def test_layers_whose_seeds_were_lost_with_a_server_draw_other_numbers_than_each_other(cluster):
    with recsync.AsyncStrategy(cluster).scope():
        dropouts = [keras.layers.Dropout(0.5, name=f"dropout_{i}") for i in range(4)]
        model = keras.Sequential([keras.Input((100,)), *dropouts])
    states = [layer.seed_generator.state for layer in dropouts]
    before = [state.numpy() for state in states]
    made = make_anew(model, [("ps", 1)])
    is_lost = [any(state._value is one for one in made) for state in states]
    assert sorted(is_lost) == [False, False, True, True]
    for lost, state, own in zip(is_lost, states, before, strict=True):
        assert lost or np.array_equal(state.numpy(), own)
    masks = [layer(np.ones([1, 100]), training=True).numpy().ravel() for layer in dropouts]
    for i, one in enumerate(masks):
        for other in masks[:i]:
            assert not np.array_equal(one, other)
