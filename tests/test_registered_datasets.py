"""What a process keeps of the datasets that its models were trained and evaluated on."""

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import compiled, wait_until
from tensorflow.core.framework import dataset_options_pb2
from tensorflow.python.data.experimental.ops import data_service_ops

import tf_recsync as recsync
from tf_recsync.optimizers import SGD
from tf_recsync.strategies import registered_dataset
from tf_recsync.strategies.registered_dataset import _MOST_KEPT


@pytest.fixture(scope="module")
def model(clusters):
    """One whose metric is the mean of what the data have."""

    def build() -> keras.Model:
        numbers = keras.Input((1,))
        same = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        return keras.Model(numbers, same(numbers))

    strategy = recsync.AsyncStrategy(clusters.get(2, 1))
    return compiled(
        strategy,
        build,
        lambda: SGD(0.0),
        lambda y, p: tf.reduce_mean(p, axis=-1),
        lambda: [keras.metrics.MeanMetricWrapper(lambda y, p: p, name="mean")],
    )


def mean(model, data, **options):
    return model.evaluate(data, verbose=0, return_dict=True, **options)["mean"]


def dataset(value, batches=6):
    one = np.full((4, 1), value, np.float32)
    return tf.data.Dataset.from_tensors((one, one)).repeat(batches)


def services(model):
    """How many services run, when those that nobody needs have gone."""
    gc.collect()
    return len(model.distribute_strategy._cluster.data_services)


def test_a_dataset_that_is_used_again_is_sent_once(model):
    data = dataset(3.0)
    before = services(model)
    for _ in range(4):
        assert mean(model, data) == 3.0
    assert services(model) == before + 1
    data = dataset(2.0)
    assert mean(model, data) == 2.0
    assert services(model) == before + 1  # The last one's.


def test_the_first_batches_of_a_dataset_are_sent_once(model, monkeypatch):
    sent, register = [], registered_dataset.Registrations.register

    def register_and_count(*arguments):
        sent.append(arguments)
        return register(*arguments)

    monkeypatch.setattr(registered_dataset.Registrations, "register", register_and_count)
    data = tf.data.Dataset.range(6).map(lambda i: (tf.fill([4, 1], i), tf.ones([4, 1])))
    # Another number of them is another dataset.
    for steps, expected in [(3, 1.0), (5, 2.0), (None, 2.5)] * 2:
        assert mean(model, data, steps=steps) == expected
    assert len(sent) == 3


def test_arrays_are_kept_no_longer_than_a_call(model):
    before = services(model)
    for value in range(4):
        assert mean(model, np.full((64, 1), value), y=np.ones((64, 1))) == value
    assert services(model) <= before + 1  # Keras keeps the last one's iterator.


def test_of_many_datasets_the_last_ones_are_kept(model):
    before = services(model)
    days = [dataset(float(day), 2) for day in range(_MOST_KEPT + 4)]
    for day in range(len(days)):
        assert mean(model, days[day]) == day
    assert services(model) <= before + _MOST_KEPT
    assert mean(model, days[0]) == 0.0


def test_data_that_come_from_a_table_are_those_that_it_has_when_a_call_begins(model):
    with tf.device("/CPU:0"):
        table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)
        ids = tf.data.Dataset.from_tensors(tf.zeros([4, 1], tf.int64)).repeat(3)
        data = ids.map(lambda x: (tf.ensure_shape(table.lookup(x), [4, 1]), tf.ones([4, 1])))
    for value in (1.0, 2.0):
        with tf.device("/CPU:0"):
            table.insert(tf.constant([0], tf.int64), tf.constant([value]))
        assert mean(model, data) == value


def test_no_pipeline_is_left_when_calls_have_ended(model):
    data = dataset(1.0, 1000)
    model.fit(data, steps_per_epoch=3, verbose=0)
    model.evaluate(data, steps=2, verbose=0)
    open_pipelines = model.distribute_strategy._cluster.data_services.tasks
    assert wait_until(lambda: open_pipelines() == 0, 60.0)


def test_a_service_ends_with_the_last_iterator_of_its_dataset(model):
    """Though the pass goes on with another one, as with what was lost of this one."""
    cluster = model.distribute_strategy.cluster
    before = services(model)
    registered = registered_dataset.Registrations(cluster, 60.0).register(dataset(2.0, 3), 0)
    with cluster.dispatch_scope(), tf.device("/job:worker/task:0"):
        iterator = registered.iterator("some pass")
        del registered
        assert services(model) == before + 1
        assert [float(x[0, 0]) for x, _ in iterator] == [2.0] * 3
        iterator.close()
    assert services(model) == before


def test_no_iterator_of_a_pass_is_tuned():
    """The end of one that is, as of one without batches, would keep its worker waiting."""
    spec = data_service_ops.HashableElementSpec(tf.TensorSpec([None, 2]))
    graph = registered_dataset._joining(spec, False, 2)._concrete.graph
    made = [op for op in graph.get_operations() if op.type == "MakeIterator"]
    assert len(made) == 2
    for op in made:
        source = op.inputs[0].op
        assert source.type == "OptionsDataset"
        options = dataset_options_pb2.Options.FromString(source.get_attr("serialized_options"))
        assert options.autotune_options.WhichOneof("optional_enabled")
        assert not options.autotune_options.enabled
