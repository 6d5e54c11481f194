"""Lookups that are pulled a step ahead: what they see, and that no batch is lost for them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_recsync as recsync
from tf_recsync.layers import EmbeddingCollection, FeatureConfig, TableConfig

STEPS_PER_CALL = 4


@pytest.fixture
def cluster(clusters):
    return clusters.get(workers=1, ps=2)


def one_row_model(initial, learning_rate):
    """Predicts the one row of its table, whatever its input."""
    ids = keras.Input((), dtype="int32")
    table = keras.layers.Embedding(
        1, 1, embeddings_initializer=keras.initializers.Constant(initial), name="table"
    )
    model = keras.Model(ids, table(ids))
    model.compile(recsync.optimizers.SGD(learning_rate), "mse", steps_per_execution=STEPS_PER_CALL)
    return model


def batches(targets):
    targets = np.asarray(targets, np.float32)[:, None]
    return tf.data.Dataset.from_tensor_slices((np.zeros(len(targets), np.int32), targets)).batch(1)


def test_lookups_miss_the_update_of_the_step_before_and_every_batch_is_trained_on(cluster):
    strategy = recsync.AsyncStrategy(cluster, prefetch_lookups=True)
    rate, row, steps = 0.2, 0.5, 0
    with strategy.scope():
        model = one_row_model(row, rate)
        model.optimizer.build(model.trainable_variables)
    for count in (8, 9, 11, 3):
        targets = np.random.default_rng(count).normal(size=count)
        before = strategy.staleness(model).rows
        model.fit(batches(targets), epochs=1, verbose=0)
        ahead, taus = None, []
        for i, target in enumerate(targets):
            pulled = row if ahead is None else ahead
            taus.append(1 if ahead is None else 2)
            # All but the last step of a call look ahead, before they update.
            ahead = row if i % STEPS_PER_CALL < STEPS_PER_CALL - 1 else None
            row -= rate * 2 * (pulled - target)
        found = model.get_layer("table").get_weights()[0]
        np.testing.assert_allclose(found, [[row]], rtol=1e-5, err_msg=f"{count} batches")
        steps += count
        assert int(model.optimizer.iterations.numpy()) == steps
        rows = strategy.staleness(model).rows.since(before)
        assert (rows.count, rows.max) == (count, max(taus))
        assert rows.mean == pytest.approx(np.mean(taus))


def test_without_it_every_lookup_sees_the_step_before(cluster):
    strategy = recsync.AsyncStrategy(cluster)
    with strategy.scope():
        model = one_row_model(0.5, 0.2)
    model.fit(batches(np.ones(8)), epochs=1, verbose=0)
    assert strategy.staleness(model).rows.max == 1


@pytest.mark.full
def test_it_works_with_bags_on_several_servers_and_where_servers_collect_pushes(cluster):
    strategy = recsync.GBAStrategy(cluster, 8, 4, staleness_tolerance=2, prefetch_lookups=True)
    rng = np.random.default_rng(1)
    with strategy.scope():
        ids = keras.Input((None,), dtype="int64", ragged=True)
        tables = [TableConfig(name, 50, 4, combiner="mean") for name in ("one", "two")]
        layer = EmbeddingCollection(
            tables, [FeatureConfig(t.name, t.name) for t in tables], concatenate=True
        )
        hidden = layer({"one": ids, "two": ids})
        model = keras.Model(ids, keras.layers.Dense(1)(hidden))
        model.compile(recsync.optimizers.Adagrad(0.1), "mse", steps_per_execution=STEPS_PER_CALL)
    bags = tf.ragged.constant([rng.integers(0, 50, rng.integers(0, 4)).tolist() for _ in range(40)])
    labels = rng.normal(size=(40, 1)).astype(np.float32)
    with tf.device("/CPU:0"):
        bags = tf.cast(bags, tf.int64)
        dataset = tf.data.Dataset.from_tensor_slices((bags, labels)).batch(4)
    history = model.fit(dataset, epochs=6, verbose=0).history
    assert history["loss"][-1] < history["loss"][0]
    report = strategy.aggregation(model)
    # Ten batches an epoch, on each of two servers.
    assert report.included + report.excluded == 6 * 10 * 2
    assert int(model.optimizer.iterations.numpy()) == 6 * 5


def test_single_steps_have_nothing_to_prefetch(cluster):
    strategy = recsync.AsyncStrategy(cluster, prefetch_lookups=True)
    with strategy.scope():
        model = one_row_model(0.5, 0.2)
        model.compile(recsync.optimizers.SGD(0.1), "mse")
    with pytest.raises(ValueError, match="prefetch_lookups=True needs steps_per_execution above 1"):
        model.fit(batches(np.ones(4)), verbose=0)


def test_a_value_that_is_no_bool_is_refused(cluster):
    with pytest.raises(ValueError, match="prefetch_lookups must be a bool, not 1"):
        recsync.AsyncStrategy(cluster, prefetch_lookups=1)
