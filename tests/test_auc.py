"""AUC agrees with Keras and with its definition, and counts as many examples as there are."""

import functools

import keras
import numpy as np
import pytest
import reference_statistics
import tensorflow as tf

from tf_recsync.metrics import AUC, Calibration, NormalizedEntropy


@pytest.fixture(name="examples")
def _examples():
    rng = np.random.default_rng(0)
    probabilities = rng.uniform(0.0, 0.9, 1000).astype(np.float32)
    probabilities[:20] = np.linspace(0, 1, 20)  # Thresholds themselves, with 20 of them.
    labels = (rng.uniform(size=1000) < probabilities).astype(np.float32)
    return labels, probabilities, rng.uniform(0.1, 3, 1000).astype(np.float32)


@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("num_thresholds", [2, 20, 200])
def test_it_is_that_of_keras(examples, shape, weighted, num_thresholds):
    labels, probabilities, weights = examples
    weights = weights if weighted else None
    metric = AUC(num_thresholds, spacing="linear")
    stock = keras.metrics.AUC(num_thresholds)
    for part in np.split(np.arange(1000), [1, 400]):
        batch = labels[part].reshape(shape), probabilities[part].reshape(shape)
        for one in (metric, stock):
            one.update_state(*batch, None if weights is None else weights[part])
    assert float(metric.result()) == pytest.approx(float(stock.result()), abs=1e-5)


def _calibrated(mean, deviation):
    """Logits around a mean, and clicks as likely as they say."""
    rng = np.random.default_rng(0)
    logits = rng.normal(mean, deviation, 20_000)
    return (rng.random(20_000) < 1 / (1 + np.exp(-logits))).astype(np.float32), logits


def _apart(mean, distance):
    """Logits around a mean, which click or not by the distance between the two kinds."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 20_000)
    return labels, mean + distance * (labels + 0.5 * rng.normal(size=20_000))


CONCENTRATED = {
    "clicks of one in a hundred": _calibrated(-4.6, 1.0),
    "clicks of one in a hundred, hardly told apart": _calibrated(-4.6, 0.1),
    "clicks of one in ten thousand": _calibrated(-9.2, 1.0),
    "all near .999": _apart(6.9, 0.3),
    "all near .01, told apart": _apart(-4.6, 0.05),
    "near .001 and .999": _apart(-6.9, 13.8),
}


@pytest.mark.parametrize("from_logits", [False, True])
@pytest.mark.parametrize("which", CONCENTRATED)
def test_concentrated_predictions_are_told_apart(which, from_logits):
    labels, logits = CONCENTRATED[which]
    probabilities = (1 / (1 + np.exp(-logits))).astype(np.float32)
    metric = AUC(from_logits=from_logits)
    metric.update_state(labels, logits if from_logits else probabilities)
    exact = reference_statistics.auc(labels, logits if from_logits else probabilities)
    assert float(metric.result()) == pytest.approx(exact, abs=1e-3)


@pytest.mark.parametrize("spacing", ["linear", "logit"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_with_many_thresholds_it_is_the_exact_one(examples, dtype, spacing):
    labels, probabilities, weights = examples
    metric = AUC(num_thresholds=1_000_000, spacing=spacing)
    metric.update_state(labels, probabilities.astype(dtype), weights)
    exact = reference_statistics.auc(labels, probabilities, weights)
    assert float(metric.result()) == pytest.approx(exact, abs=1e-5)


def test_logits_give_the_same_as_probabilities(examples):
    labels, probabilities, weights = examples
    logits = np.log(probabilities + 1e-9) - np.log(1 + 1e-9 - probabilities)
    of_logits, metric = AUC(from_logits=True, spacing="linear"), AUC(spacing="linear")
    of_logits.update_state(labels, logits, weights)
    metric.update_state(labels, tf.sigmoid(logits), weights)
    np.testing.assert_allclose(of_logits.buckets, metric.buckets)


def test_a_single_weight_is_that_of_all(examples):
    labels, probabilities, _ = examples
    metric = AUC()
    metric.update_state(labels, probabilities, 2.0)
    assert float(tf.reduce_sum(metric.buckets)) == 2000.0


def test_it_is_zero_where_there_is_nothing_to_tell_apart():
    metric = AUC()
    assert float(metric.result()) == 0.0
    metric.update_state([1.0, 1.0], [0.3, 0.4])
    assert float(metric.result()) == 0.0
    metric.update_state([0.0], [0.1])
    assert float(metric.result()) == 1.0


def test_predictions_that_are_no_numbers_are_left_out():
    metric = AUC()
    metric.update_state([1.0, 0.0, 1.0], [np.nan, 0.2, 0.3])
    assert float(tf.reduce_sum(metric.buckets)) == 2.0
    assert float(metric.result()) == 1.0


def test_many_examples_do_not_lose_precision():
    metric = AUC()
    metric.buckets.assign(tf.fill(metric.buckets.shape, tf.constant(2.0**25, tf.float64)))
    metric.update_state([1.0], [0.5])
    assert float(tf.reduce_max(metric.buckets)) == 2.0**25 + 1


def test_states_of_workers_are_merged_by_adding(examples):
    labels, probabilities, weights = examples
    workers = [AUC(), AUC()]
    for worker, part in zip(workers, (slice(300), slice(300, None)), strict=True):
        worker.update_state(labels[part], probabilities[part], weights[part])
    merged, whole = AUC(), AUC()
    merged.buckets.assign(workers[0].buckets + workers[1].buckets)
    whole.update_state(labels, probabilities, weights)
    assert float(merged.result()) == pytest.approx(float(whole.result()), abs=1e-6)


@pytest.mark.cases("AUC-True", "NormalizedEntropy-True", "Calibration-False")
@pytest.mark.parametrize("from_logits", [False, True])
@pytest.mark.parametrize(
    "make",
    [AUC, functools.partial(AUC, 200, spacing="linear"), NormalizedEntropy, Calibration],
    ids=["AUC", "AUC of linear spacing", "NormalizedEntropy", "Calibration"],
)
def test_xla_adds_the_same_as_the_op(examples, make, from_logits):
    labels, probabilities, weights = examples
    predictions = 4 * probabilities - 2 if from_logits else probabilities
    one, other = make(from_logits=from_logits), make(from_logits=from_logits)
    for sample_weight in (None, 0.5, weights):
        one.update_state(labels, predictions, sample_weight)
        tf.function(other.update_state, jit_compile=True)(labels, predictions, sample_weight)
    for mine, theirs in zip(one.variables, other.variables, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)
    result = tf.function(other.result, jit_compile=True)()
    assert float(result) == pytest.approx(float(one.result()), rel=1e-6)
    if isinstance(other, AUC):
        other.reset_state()
        tf.function(other.update_state, jit_compile=True)([1.0, 0.0], [np.nan, 0.0])
        assert float(tf.reduce_sum(other.buckets)) == 1.0


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_model_reports_it(examples, jit_compile):
    labels, probabilities, _ = examples
    model = keras.Sequential([keras.Input((1,)), keras.layers.Identity()])
    model.compile(
        loss="binary_crossentropy",
        metrics=[AUC(200, spacing="linear"), keras.metrics.AUC(name="stock")],
        jit_compile=jit_compile,
    )
    found = model.evaluate(
        probabilities[:, None], labels[:, None], batch_size=64, verbose=0, return_dict=True
    )
    assert found["auc"] == pytest.approx(found["stock"], abs=1e-5)


def test_its_configuration_makes_an_equal_metric():
    metric = AUC(
        name="area", num_thresholds=50, from_logits=True, dtype="float64", spacing="linear"
    )
    config = keras.saving.serialize_keras_object(metric)
    copy = keras.saving.deserialize_keras_object(config)
    assert isinstance(copy, AUC)
    assert copy.get_config() == metric.get_config()
    assert (copy.name, copy.num_thresholds, copy.from_logits) == ("area", 50, True)
    assert copy.spacing == "linear"


@pytest.mark.parametrize("wrong", [1, 0, -5, 2**24 + 1, 2.5, True, "200"])
def test_wrong_numbers_of_thresholds_are_named(wrong):
    with pytest.raises(ValueError, match=f"num_thresholds must be .* from 2 .*, got {wrong!r}"):
        AUC(num_thresholds=wrong)


def test_arguments_after_the_thresholds_go_by_name():
    assert AUC(np.int64(200)).get_config()["num_thresholds"] == 200
    with pytest.warns(FutureWarning, match="AUC takes from_logits by name only"):
        assert AUC(200, True).from_logits
    with pytest.raises(ValueError, match="from_logits must be a bool, not 'ROC'"):
        AUC(200, from_logits="ROC")


@pytest.mark.parametrize("wrong", ["log", None, 2])
def test_wrong_spacings_are_named(wrong):
    with pytest.raises(ValueError, match=f"spacing={wrong!r}: must be 'logit' or 'linear'"):
        AUC(spacing=wrong)


def test_wrong_numbers_of_examples_are_named():
    metric = AUC()
    with pytest.raises(ValueError, match="y_pred: has 3 elements, must have 2"):
        metric.update_state([0, 1], [0.1, 0.2, 0.3])
    with pytest.raises(ValueError, match="sample_weight: has 3 elements, must have 2"):
        metric.update_state([0, 1], [0.1, 0.2], [1, 1, 1])
