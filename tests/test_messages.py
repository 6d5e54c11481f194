"""How often workers and servers write to each other in the steps of a call."""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_close, end_of, live_operations

import tf_recsync as recsync
from tf_recsync.layers import EmbeddingCollection, FeatureConfig, TableConfig
from tf_recsync.strategies.model_variables import OnServers, optimizers_of
from tf_recsync.strategies.worker_functions import trace_steps
from tf_recsync.synchronization.aggregation import Aggregation
from tf_recsync.synchronization.arrangement import one_group
from tf_recsync.synchronization.group_variables import GroupVariables
from tf_recsync.synchronization.lookups import find_lookups
from tf_recsync.synchronization.pull_push import Layout

SERVERS = ("0", "1")


@pytest.fixture
def cluster(clusters):
    return clusters.get(workers=1, ps=2)


def click_model():
    names = ["a", "b"]
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in names}
    layer = EmbeddingCollection(
        [TableConfig(name, 20, 3) for name in names],
        [FeatureConfig(name, name) for name in names],
        concatenate=True,
    )
    hidden = keras.layers.Dense(4, "relu")(layer(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(hidden))
    model.compile(recsync.optimizers.Adagrad(0.1), "binary_crossentropy", steps_per_execution=4)
    return model


def values_of(model):
    (layer,) = [layer for layer in model.layers if isinstance(layer, EmbeddingCollection)]
    dense = [v.numpy() for layer in model.layers[-2:] for v in layer.trainable_variables]
    return [layer.table_values("a"), layer.table_values("b"), *dense]


def clicks(examples):
    rng = np.random.default_rng(1)
    ids = {name: rng.integers(0, 20, examples) for name in ("a", "b")}
    labels = rng.integers(0, 2, (examples, 1)).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((ids, labels)).batch(4)


def messages(function):
    """How many messages there are in a call, by (from, to)."""
    found = set()
    for op in live_operations(function.graph.control_outputs):
        sources = [(tensor.op, tensor.name) for tensor in op.inputs]
        sources += [(before, before.name) for before in op.control_inputs]
        for source, name in sources:
            ends = end_of(source.device), end_of(op.device)
            # Each server gets what is constant, and handles, with the function.
            if ends[0] != ends[1] and source.type not in ("Placeholder", "Const"):
                found.add((name, *ends))
    return collections.Counter((source, to) for _, source, to in found)


@pytest.mark.parametrize("steps", [1, 4])
def test_a_step_is_a_request_an_answer_and_a_push_for_each_server(cluster, steps):
    strategy = recsync.AsyncStrategy(cluster)
    with strategy.scope():
        model = click_model()
        model.optimizer.build(model.trainable_variables)
    layout = Layout.of(model, optimizers_of(model))
    spec = clicks(4).element_spec
    lookups = find_lookups(model, layout, "train_step", spec)
    found = messages(trace_steps(model, layout, "train_step", spec, lookups, steps, None))
    # After the last step of the call, each server says that it is done.
    assert found == {
        **{("worker", server): 2 * steps for server in SERVERS},
        **{(server, "worker"): steps + 1 for server in SERVERS},
    }


def test_a_worker_notes_how_far_a_server_is_before_it_pulls_from_it(cluster):
    # Else another one's step may come between them, and gradients are taken to be fresher.
    strategy = recsync.GBAStrategy(cluster, global_batch_size=8, local_batch_size=4)
    with strategy.scope():
        model = click_model()
        model.optimizer.build(model.trainable_variables)
    (group,) = one_group(1, len(SERVERS)).groups
    layout = Layout.of(model, optimizers_of(model), group)
    states = {optimizer: layout.states_of(optimizer) for optimizer in layout.optimizers}
    variables, home = GroupVariables(group), group.device(0)
    aggregation = Aggregation(strategy.mode, states, variables, home)
    spec = clicks(4).element_spec
    lookups = find_lookups(model, layout, "train_step", spec)
    function = trace_steps(model, layout, "train_step", spec, lookups, 1, None, aggregation)
    types, pulls = ("RecsyncPullDense", "RecsyncGatherRows"), collections.Counter()
    for op in live_operations(function.graph.control_outputs):
        if op.type in types:
            before = {(o.type, o.device) for o in live_operations([op])}
            assert ("RecsyncGradientBufferStep", op.device) in before
            pulls[op.type, end_of(op.device)] += 1
    assert pulls == {(type_, server): 1 for type_ in types for server in SERVERS}


@pytest.mark.full
def test_steps_that_overlap_in_a_call_train_as_one_after_the_other(cluster):
    keras.utils.set_random_seed(2)
    alone = click_model()
    alone.compile(recsync.optimizers.Adagrad(0.1), "binary_crossentropy", run_eagerly=True)
    strategy = recsync.AsyncStrategy(cluster)
    keras.utils.set_random_seed(2)
    with strategy.scope():
        model = click_model()
    steps = 0
    for batches in (3, 4, 6, 9):  # Of which four fit a call.
        data = clicks(4 * batches)
        alone.fit(data, epochs=2, shuffle=False, verbose=0)
        history = model.fit(data, epochs=2, shuffle=False, verbose=0).history
        assert_close(values_of(model), values_of(alone))
        steps += 2 * batches
        assert int(model.optimizer.iterations.numpy()) == steps
        dense = strategy.staleness(model).dense
        assert (dense.mean, dense.max) == (1, 1)
        assert len(history["loss"]) == 2


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_large_table_that_travels_whole_as_nobody_trains_it_is_warned_of_once(
    cluster, caplog, is_compiled
):
    with recsync.AsyncStrategy(cluster).scope():
        ids = keras.Input((), dtype="int64")
        tables = [
            keras.layers.Embedding(rows, 8, name=name, trainable=trainable)
            for name, rows, trainable in (
                ("small", 10, False),
                ("trained", 2**17, True),
                ("frozen", 2**17, False),
            )
        ]
        outputs = keras.layers.Dense(1)(keras.layers.concatenate([table(ids) for table in tables]))
        model = keras.Model(ids, outputs)
        if is_compiled:
            model.compile(recsync.optimizers.SGD(0.1), "mse")
            model.optimizer.build(model.trainable_variables)
    variables = OnServers(model)
    for _ in range(2):
        variables.layout()
    found = [m.split(",")[0] for m in caplog.messages if "is not trained by the model's" in m]
    expected = ["frozen/embeddings"] if is_compiled else ["trained/embeddings", "frozen/embeddings"]
    assert found == expected
