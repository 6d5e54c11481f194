"""Calibration is predicted clicks over clicks, of any parts of the data."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_recsync.metrics import Calibration


@pytest.fixture(name="examples")
def _examples():
    rng = np.random.default_rng(0)
    labels = (rng.random(500) < 0.2).astype(np.float32)
    return labels, rng.random(500).astype(np.float32), rng.uniform(0, 3, 500).astype(np.float32)


@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
@pytest.mark.parametrize("weighted", [False, True])
def test_it_is_the_sum_of_predictions_over_the_sum_of_labels(examples, weighted, shape):
    labels, predictions, weights = examples
    metric = Calibration()
    for part in np.split(np.arange(500), [1, 400]):
        batch = labels[part].reshape(shape), predictions[part].reshape(shape)
        metric.update_state(*batch, weights[part] if weighted else None)
    used = weights.astype(np.float64) if weighted else np.ones(500)
    expected = (predictions * used).sum() / (labels * used).sum()
    assert float(metric.result()) == pytest.approx(expected, rel=1e-6)


def test_logits_give_the_same_as_probabilities(examples):
    labels, predictions, weights = examples
    one, other = Calibration(), Calibration(from_logits=True)
    one.update_state(labels, predictions, weights)
    other.update_state(labels, np.log(predictions) - np.log1p(-predictions), weights)
    assert float(other.result()) == pytest.approx(float(one.result()), rel=1e-5)


def test_it_is_zero_before_any_data_and_infinite_without_clicks():
    metric = Calibration()
    assert float(metric.result()) == 0.0
    metric.update_state([0.0], [0.5])
    assert float(metric.result()) == np.inf
    metric.update_state([1.0], [0.5], 2.0)
    assert float(metric.result()) == 0.75


def test_many_examples_do_not_lose_precision():
    metric = Calibration()
    metric.sums.assign([2.0**25, 2.0**25])
    metric.update_state([1.0], [0.5])
    np.testing.assert_array_equal(metric.sums, [2.0**25 + 0.5, 2.0**25 + 1])


def test_a_model_reports_it(examples):
    labels, predictions, _ = examples
    model = keras.Sequential([keras.Input((1,)), keras.layers.Identity()])
    model.compile(loss="binary_crossentropy", metrics=[Calibration()])
    found = model.evaluate(predictions[:, None], labels[:, None], verbose=0, return_dict=True)
    assert found["calibration"] == pytest.approx(predictions.sum() / labels.sum(), rel=1e-5)


def test_its_configuration_makes_an_equal_metric():
    metric = Calibration(name="ratio", from_logits=True, dtype="float64")
    copy = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(metric))
    assert isinstance(copy, Calibration)
    assert copy.get_config() == metric.get_config()
    assert (copy.name, copy.from_logits) == ("ratio", True)


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="from_logits must be a bool, not 1"):
        Calibration(from_logits=1)
    with pytest.raises(ValueError, match="y_pred: has 3 elements, must have 2"):
        Calibration().update_state([0, 1], tf.constant([0.1, 0.2, 0.3]))
