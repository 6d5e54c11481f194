"""Normalized entropy agrees with the log loss and keeps its state exactly."""

import keras
import numpy as np
import pytest
import reference_statistics
import tensorflow as tf

from tf_recsync.metrics import NormalizedEntropy


@pytest.fixture(name="examples")
def _examples():
    rng = np.random.default_rng(0)
    probabilities = rng.uniform(0.02, 0.9, 1000).astype(np.float32)
    labels = (rng.uniform(size=1000) < probabilities).astype(np.float32)
    return labels, probabilities, rng.uniform(0.1, 3, 1000).astype(np.float32)


def expected(labels, probabilities, weights=None) -> float:
    rate = np.full(len(labels), np.average(labels, weights=weights))
    loss, base = (reference_statistics.log_loss(labels, p, weights) for p in (probabilities, rate))
    return loss / base


@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
@pytest.mark.parametrize("weighted", [False, True])
def test_it_is_the_log_loss_over_the_entropy_of_the_mean_label(examples, shape, weighted):
    labels, probabilities, weights = examples
    weights = weights if weighted else None
    metric = NormalizedEntropy()
    for part in np.split(np.arange(1000), [1, 400]):
        metric.update_state(
            labels[part].reshape(shape),
            probabilities[part].reshape(shape),
            None if weights is None else weights[part],
        )
    value = expected(labels, probabilities, weights)
    assert float(metric.result()) == pytest.approx(value, rel=1e-5)


def test_logits_give_the_same_as_probabilities(examples):
    labels, probabilities, _ = examples
    metric = NormalizedEntropy(from_logits=True)
    metric.update_state(labels, np.log(probabilities) - np.log1p(-probabilities))
    assert float(metric.result()) == pytest.approx(expected(labels, probabilities), rel=1e-5)
    metric.reset_state()
    metric.update_state([1.0, 0.0], [-1000.0, 1000.0])
    assert float(metric.result()) == pytest.approx(1000 / np.log(2), rel=1e-6)


def test_predicting_the_mean_label_gives_one(examples):
    labels = examples[0]
    metric = NormalizedEntropy()
    metric.update_state(labels, np.full(1000, labels.mean()))
    assert float(metric.result()) == pytest.approx(1.0, abs=1e-6)


def test_it_is_zero_before_data_and_nan_while_all_labels_are_equal():
    metric = NormalizedEntropy()
    assert float(metric.result()) == 0.0
    for label in (0.0, 1.0):
        metric.reset_state()
        metric.update_state([label, label], [0.3, 0.4])
        assert np.isnan(float(metric.result()))
    metric.update_state([0.0], [0.3])
    assert np.isfinite(float(metric.result()))


def test_certain_predictions_are_clipped():
    metric = NormalizedEntropy(epsilon=1e-3)
    metric.update_state([1.0, 0.0], [0.0, 0.0])
    loss = -(np.log(1e-3) + np.log1p(-1e-3)) / 2
    assert float(metric.result()) == pytest.approx(loss / np.log(2), rel=1e-5)


def test_states_of_workers_are_merged_by_adding(examples):
    labels, probabilities, weights = examples
    workers = [NormalizedEntropy(), NormalizedEntropy()]
    for worker, part in zip(workers, (slice(300), slice(300, None)), strict=True):
        worker.update_state(labels[part], probabilities[part], weights[part])
    merged = NormalizedEntropy()
    for variables in zip(merged.variables, *(w.variables for w in workers), strict=True):
        variables[0].assign(variables[1] + variables[2])
    value = expected(labels, probabilities, weights)
    assert float(merged.result()) == pytest.approx(value, rel=1e-5)


def test_many_examples_do_not_lose_precision():
    metric = NormalizedEntropy()
    metric.weight_sum.assign(2.0**25)
    metric.label_sum.assign(2.0**23)
    metric.update_state([1.0], [0.5])
    assert float(metric.weight_sum) == 2.0**25 + 1
    assert float(metric.label_sum) == 2.0**23 + 1


def test_it_works_in_a_graph_and_without_state_of_its_own(examples):
    labels, probabilities, _ = examples
    metric = NormalizedEntropy()
    tf.function(metric.update_state)(labels, probabilities)
    assert float(metric.result()) == pytest.approx(expected(labels, probabilities), rel=1e-5)
    state = metric.stateless_update_state(metric.variables, labels[:10], probabilities[:10])
    assert float(state[2]) == 1010
    assert float(metric.weight_sum) == 1000
    zero = metric.stateless_reset_state()
    assert float(metric.stateless_result(zero)) == 0.0


def test_a_model_reports_it(examples):
    labels, probabilities, _ = examples
    model = keras.Sequential([keras.Input((1,)), keras.layers.Identity()])
    model.compile(loss="binary_crossentropy", metrics=[NormalizedEntropy()])
    found = model.evaluate(
        probabilities[:, None], labels[:, None], batch_size=64, verbose=0, return_dict=True
    )
    value = expected(labels, probabilities)
    assert found["normalized_entropy"] == pytest.approx(value, rel=1e-5)


def test_its_configuration_makes_an_equal_metric():
    metric = NormalizedEntropy(name="ne", from_logits=True, epsilon=1e-5, dtype="float64")
    config = keras.saving.serialize_keras_object(metric)
    copy = keras.saving.deserialize_keras_object(config)
    assert isinstance(copy, NormalizedEntropy)
    assert copy.get_config() == metric.get_config()
    assert (copy.name, copy.from_logits, copy.epsilon) == ("ne", True, 1e-5)


def test_wrong_arguments_are_named():
    for wrong in (0.5, 0.0, 1e-50, "1", True):
        with pytest.raises(ValueError, match=f"epsilon must be .* less than 0.5, not {wrong!r}"):
            NormalizedEntropy(epsilon=wrong)
    with pytest.raises(ValueError, match="from_logits must be a bool, not 'no'"):
        NormalizedEntropy(from_logits="no")
    metric = NormalizedEntropy()
    with pytest.raises(ValueError, match="y_pred: has 3 elements, must have 2"):
        metric.update_state([0, 1], [0.1, 0.2, 0.3])
    with pytest.raises(ValueError, match="sample_weight: has 3 elements, must have 2"):
        metric.update_state([0, 1], [0.1, 0.2], [1, 1, 1])
