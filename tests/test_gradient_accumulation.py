"""`gradient_accumulation_steps` of an optimizer, whose gradients servers add up."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_close

import tf_recsync as recsync
from tf_recsync.layers import EmbeddingCollection, FeatureConfig, TableConfig
from tf_recsync.optimizers import SGD, Adagrad, Adam, Ftrl
from tf_recsync.staleness import Statistics

STEPS, BATCHES = 3, 12


def model_of(make, strategy=None):
    with (strategy or tf.distribute.get_strategy()).scope():
        ids = keras.Input((), dtype="int64", name="id")
        inputs = keras.Input((4,), name="x")
        vectors = keras.layers.Embedding(7, 3, name="table")(ids)
        outputs = keras.layers.Dense(1, name="top")(keras.layers.Concatenate()([vectors, inputs]))
        model = keras.Model({"id": ids, "x": inputs}, outputs)
        model.compile(make(), "mse")
    return model


def dataset(batches=BATCHES):
    rng = np.random.default_rng(4)
    n = batches * 8
    x = {"id": rng.integers(0, 7, n), "x": rng.normal(size=(n, 4)).astype(np.float32)}
    y = rng.normal(size=(n, 1)).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(8)


def trained(make, strategy=None, epochs=2):
    keras.utils.set_random_seed(5)
    model = model_of(make, strategy)
    model.fit(dataset(), epochs=epochs, verbose=0, shuffle=False)
    return model


SCHEDULE = keras.optimizers.schedules.PiecewiseConstantDecay([13], [0.3, 0.02])


@pytest.mark.cases("Adam")
@pytest.mark.parametrize(
    "make",
    [
        lambda: SGD(SCHEDULE, gradient_accumulation_steps=STEPS),
        lambda: Adagrad(0.2, gradient_accumulation_steps=STEPS),
        lambda: Adam(0.05, lazy=False, gradient_accumulation_steps=STEPS),
    ],
    ids=["SGD", "Adagrad", "Adam"],
)
def test_a_worker_trains_as_one_process(clusters, make):
    strategy = recsync.AsyncStrategy(clusters.get(workers=1, ps=2))
    mine, theirs = trained(make, strategy), trained(make)
    for own, other in zip(mine.get_weights(), theirs.get_weights(), strict=True):
        assert_close(own, other)
    assert int(mine.optimizer.iterations) == int(theirs.optimizer.iterations) == 8


@pytest.mark.cases("Ftrl-False", "Adam-True")
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("make", [Adagrad, Adam, Ftrl])
def test_rows_that_no_batch_names_stay_in_one_process(make, jit_compile):
    x, y = np.array([0, 1, 0, 2]), np.array([1.0, 2.0, 3.0, 4.0])
    found = []
    for steps in (2, 1):
        keras.utils.set_random_seed(5)
        table = keras.layers.Embedding(6, 3, name="table")
        model = keras.Sequential([keras.Input((), dtype="int64"), table])
        model.add(keras.layers.Lambda(lambda v: keras.ops.sum(v, -1)))
        optimizer = make(0.1, gradient_accumulation_steps=steps if steps > 1 else None)
        model.compile(optimizer, "mse", jit_compile=jit_compile)
        before = table.embeddings.numpy()
        model.fit(x, y, batch_size=4 // steps, shuffle=False, verbose=0)
        (state,) = optimizer.states
        counters = Statistics.from_counters([state.counters.numpy()])
        found.append([table.embeddings, *state.accumulators, state.versions, counters.count])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-5)
    np.testing.assert_array_equal(found[0][0][3:], before[3:])


def test_it_is_refused_in_one_process_for_tables_whose_rows_change_their_keys(clusters):
    def built(strategy):
        with strategy.scope():
            layer = EmbeddingCollection(
                [TableConfig("users", 64, 2, keys="any")], [FeatureConfig("user", "users")]
            )
            layer.build()
            SGD(0.1, gradient_accumulation_steps=2).build(layer.trainable_variables)

    with pytest.raises(ValueError, match="steps must be None in one process for table .*users"):
        built(tf.distribute.get_strategy())
    built(recsync.AsyncStrategy(clusters.get(workers=1, ps=2)))


@pytest.mark.cases("GBA")
@pytest.mark.parametrize("mode", ["async", "sync", "GBA"])
def test_workers_add_up_gradients_in_the_place_of_single_ones(clusters, mode):
    cluster = clusters.get(workers=2, ps=2)
    sizes = {"global_batch_size": 16, "local_batch_size": 8}
    strategy, batches = {
        "async": lambda: (recsync.AsyncStrategy(cluster), 1),
        "sync": lambda: (recsync.SyncStrategy(cluster), 2),
        "GBA": lambda: (recsync.GBAStrategy(cluster, **sizes), 2),
    }[mode]()
    model = model_of(lambda: SGD(0.1, gradient_accumulation_steps=STEPS), strategy)
    assert strategy.mode.capacity == batches
    before = model.evaluate(dataset(), verbose=0)
    history = model.fit(dataset(), epochs=4, verbose=0)
    updates = int(model.optimizer.iterations)
    assert updates == 4 * BATCHES // (STEPS * batches)
    assert history.history["loss"][-1] < before
    # The same with a global batch of as many batches.
    assert model.train_function.mode.capacity == STEPS * batches


def test_a_checkpoint_goes_on_with_single_batches_by_examples(clusters, tmp_path):
    strategy = recsync.AsyncStrategy(clusters.get(workers=1, ps=2), local_batch_size=8)
    model = trained(lambda: SGD(0.1, gradient_accumulation_steps=STEPS), strategy, epochs=1)
    assert model.optimizer.examples_per_step == 8 * STEPS
    path = str(tmp_path / "model.weights.h5")
    model.save_weights(path)
    single = model_of(lambda: SGD(0.1), strategy)
    single.optimizer.build(single.trainable_variables)
    single.load_weights(path)
    assert int(single.optimizer.iterations) == STEPS * int(model.optimizer.iterations) == BATCHES


def test_no_server_keeps_variables_for_it_and_the_configuration_stays(clusters):
    strategy = recsync.AsyncStrategy(clusters.get(workers=1, ps=2))
    model = model_of(lambda: SGD(0.1, gradient_accumulation_steps=STEPS), strategy)
    model.optimizer.build(model.trainable_variables)
    assert not [v.path for v in model.optimizer.variables if "accumulator" in v.path]
    assert model.optimizer.get_config()["gradient_accumulation_steps"] == STEPS


def test_it_is_refused_where_nobody_adds_gradients_up(clusters):
    cluster = clusters.get(workers=2, ps=2)
    make = lambda: SGD(0.1, gradient_accumulation_steps=2)  # noqa: E731
    bounded = model_of(make, recsync.BoundedStalenessStrategy(cluster, staleness_bound=1))
    with pytest.raises(ValueError, match="gradient_accumulation_steps .* wait for one another"):
        bounded.fit(dataset(), verbose=0)
    copies = model_of(make, recsync.ShadowSyncStrategy(cluster, recsync.EASGD(alpha=0.5)))
    with pytest.raises(ValueError, match="gradient_accumulation_steps=2; leave it unset, or use"):
        copies.fit(dataset(), verbose=0)
    parts = [SGD(0.1, gradient_accumulation_steps=2), SGD(0.1)]
    optimizers = keras.optimizers
    different = model_of(
        lambda: recsync.optimizers.MultiOptimizer(
            optimizers.OptimizerMap(parts[0], {"top": parts[1]})
        ),
        recsync.AsyncStrategy(cluster),
    )
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps must be the same .*None, 2"):
        different.fit(dataset(), verbose=0)


@pytest.mark.cases("Adagrad")
@pytest.mark.parametrize("make", [SGD, Adagrad, Adam])
def test_files_are_read_where_gradients_are_added_up_otherwise(clusters, tmp_path, make):
    strategy = recsync.AsyncStrategy(clusters.get(workers=1, ps=2), local_batch_size=8)
    there = trained(lambda: make(0.1, gradient_accumulation_steps=STEPS), strategy, epochs=1)
    path = str(tmp_path / "model.weights.h5")
    there.save_weights(path)
    here = model_of(lambda: make(0.1, gradient_accumulation_steps=STEPS))
    here.optimizer.build(here.trainable_variables)
    here.optimizer.examples_per_step = 8 * STEPS
    here.load_weights(path)
    assert int(here.optimizer.iterations) == int(there.optimizer.iterations)
    for own, other in zip(here.get_weights(), there.get_weights(), strict=True):
        np.testing.assert_array_equal(own, other)
    here.fit(dataset(5), verbose=0)  # Two gradients wait for a third one.
    here.save_weights(path)
    again = model_of(lambda: make(0.1, gradient_accumulation_steps=STEPS))
    again.optimizer.build(again.trainable_variables)
    again.load_weights(path)
    for one, other in zip(again.optimizer.variables, here.optimizer.variables, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy(), err_msg=one.path)
    there.load_weights(path)
    for own, other in zip(here.get_weights(), there.get_weights(), strict=True):
        np.testing.assert_array_equal(own, other)


def test_each_worker_of_a_ring_adds_up_its_own(clusters):
    strategy = recsync.HopStrategy(clusters.get(workers=3, ps=0), recsync.topology.ring(3))
    model = model_of(lambda: SGD(0.1, gradient_accumulation_steps=2), strategy)
    history = model.fit(dataset(), epochs=3, verbose=0)
    assert history.history["loss"][-1] < history.history["loss"][0]


def test_it_can_t_be_changed_behind_the_servers_back(clusters):
    strategy = recsync.AsyncStrategy(clusters.get(workers=1, ps=2))
    model = trained(lambda: SGD(0.1, gradient_accumulation_steps=2), strategy, epochs=1)
    model.optimizer.gradient_accumulation_steps = None
    with pytest.raises(ValueError, match="set to 1 after .* with 2: compile the model again"):
        model.fit(dataset(), verbose=0)
