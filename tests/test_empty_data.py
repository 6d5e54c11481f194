"""Datasets, and workers' parts of them, that have no batches; epochs that end at once."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_recsync as recsync

BATCH, BATCHES = 4, 8


@pytest.fixture(scope="module")
def strategy(clusters):
    return clusters.strategy(2, 1)


def make_model(strategy, is_built, metrics=("mae",)):
    layers = [keras.layers.Dense(1, "sigmoid")]
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), *layers] if is_built else layers)
        model.compile(recsync.optimizers.SGD(0.1), "binary_crossentropy", metrics=list(metrics))
    return model


def dataset(batches=BATCHES):
    examples = BATCHES * BATCH
    arrays = np.ones((examples, 2), np.float32), np.ones((examples, 1), np.float32)
    return tf.data.Dataset.from_tensor_slices(arrays).batch(BATCH).take(batches)


@pytest.mark.parametrize("is_built", [True, False])
def test_an_empty_dataset_gives_no_logs_as_in_keras(strategy, is_built):
    def results(model):
        return [
            model.fit(dataset(0), epochs=2, verbose=0).history,
            model.evaluate(dataset(0), verbose=0),
            list(model.fit(dataset(), validation_data=dataset(0), verbose=0).history),
        ]

    with pytest.warns(UserWarning, match="ran out of data"):
        found = results(make_model(strategy, is_built))
        expected = results(make_model(tf.distribute.get_strategy(), is_built))
    assert found == expected
    assert found == [{}, [], ["loss", "mae"]]


def test_a_model_can_not_be_built_from_an_empty_dataset_of_unknown_shapes(strategy):
    unknown = tf.data.Dataset.from_generator(
        lambda: iter(()), output_signature=(tf.TensorSpec([None, None]), tf.TensorSpec([None, 1]))
    )
    with pytest.raises(ValueError, match="no batches, and their shapes are not known"):
        make_model(strategy, False).fit(unknown, verbose=0)


@pytest.mark.parametrize("is_built", [True, False])
def test_the_first_worker_may_have_no_data(strategy, is_built):
    def part(context):
        return dataset([0, 4][context.input_pipeline_id])

    model = make_model(strategy, is_built)
    model.fit(strategy.distribute_datasets_from_function(part), verbose=0)
    assert sorted(strategy.worker_steps(model)) == [0, 4]


class Last(keras.metrics.Metric):
    """The mean of the last batch's labels, in a variable of each way in which some are merged."""

    def __init__(self):
        super().__init__(name="last")
        self._last = [
            self.add_variable((), "zeros", aggregation=aggregation)
            for aggregation in ("mean", "only_first_replica")
        ]

    def update_state(self, y_true, y_pred, sample_weight=None):
        for last in self._last:
            last.assign(keras.ops.mean(y_true))

    def result(self):
        return keras.ops.stack([last.value for last in self._last])


def test_what_a_worker_without_data_has_of_a_metric_is_not_merged(strategy):
    def part(context):
        return dataset([0, 4][context.input_pipeline_id])

    model = make_model(strategy, True, [Last()])
    data = strategy.distribute_datasets_from_function(part)
    logs = model.evaluate(data, return_dict=True, verbose=0)
    np.testing.assert_array_equal(logs["last"], [1, 1])


def test_an_epoch_that_is_stopped_at_once_has_the_loss_of_its_steps(strategy):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(logs["loss"])
            self.model.stop_training = True

    model, seen = make_model(strategy, True), []
    for _ in range(5):
        # Sooner than the metrics are read again.
        loss = model.fit(dataset(), verbose=0, callbacks=[Stop()]).history["loss"][0]
        assert loss > 0
    assert len(seen) == 5 and min(seen) > 0


def test_0_steps_stand_for_all_of_the_data_as_in_keras(strategy):
    model = make_model(strategy, True)
    expected = model.evaluate(dataset(), verbose=0)
    assert expected[0] > 0
    assert model.evaluate(dataset(), steps=0, verbose=0) == pytest.approx(expected)
    model.fit(dataset(), epochs=2, steps_per_epoch=0, verbose=0)
    assert sum(strategy.worker_steps(model)) == BATCHES
    assert int(model.optimizer.iterations.numpy()) == 2 * BATCHES
