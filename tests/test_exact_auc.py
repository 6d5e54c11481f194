"""Exact AUC and group AUC are what counting pairs one by one gives."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import model_of_users, rated_by_users

from tf_recsync.callbacks import GroupAUC
from tf_recsync.metrics import exact_auc, group_auc


def by_pairs(labels, predictions, weights):
    """The share of pairs of a 1 and a 0 in the right order, ties a half; None without pairs."""
    won = total = 0.0
    for i in np.flatnonzero(labels == 1):
        for j in np.flatnonzero(labels == 0):
            both = weights[i] * weights[j]
            total += both
            won += both * (np.sign(predictions[i] - predictions[j]) + 1) / 2
    return won / total if total else None


def by_groups(labels, predictions, groups, weights):
    areas = {}
    for group in set(groups.tolist()):
        own = groups == group
        area = by_pairs(labels[own], predictions[own], weights[own])
        if area is not None:
            areas[group] = area, weights[own].sum()
    areas, weights = zip(*areas.values(), strict=True)
    return np.average(areas, weights=weights)


@pytest.fixture(name="examples")
def _examples():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 120)
    groups = rng.integers(0, 25, 120)  # Some with one label only.
    weights = np.where(rng.random(120) < 0.1, 0.0, rng.uniform(0.1, 3, 120))
    return labels, np.round(rng.random(120) + 0.3 * labels, 1), groups, weights


@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
@pytest.mark.parametrize("weighted", [False, True])
def test_they_are_what_counting_pairs_gives(examples, weighted, shape):
    labels, predictions, groups, weights = examples
    given = weights.reshape(shape) if weighted else None
    weights = weights if weighted else np.ones(120)
    own = labels.reshape(shape), predictions.reshape(shape)
    expected = by_pairs(labels, predictions, weights)
    assert exact_auc(*own, given) == pytest.approx(expected, abs=1e-12)
    expected = by_groups(labels, predictions, groups, weights)
    assert group_auc(*own, groups.reshape(shape), given) == pytest.approx(expected, abs=1e-12)


def test_groups_may_have_names(examples):
    labels, predictions, groups, _ = examples
    names = np.array([f"user {group}" for group in groups])
    expected = group_auc(labels, predictions, groups)
    assert group_auc(labels, predictions, names) == pytest.approx(expected)
    assert group_auc(labels, predictions, names.astype(object)) == pytest.approx(expected)
    alone = group_auc(labels, predictions, np.zeros(120))
    assert alone == pytest.approx(exact_auc(labels, predictions))


def test_groups_of_one_label_are_left_out():
    labels, predictions, groups = [1, 1, 1, 0, 0], [0.1, 0.2, 0.3, 0.4, 0.2], [7, 7, 8, 8, 8]
    assert group_auc(labels, predictions, groups) == 0.5
    # One whose clicks weigh nothing has no area either.
    assert np.isnan(group_auc(labels, predictions, groups, [1, 1, 0, 1, 1]))


def test_there_is_none_without_both_labels():
    for labels in ([], [0, 0], [1]):
        predictions = np.zeros(len(labels))
        assert np.isnan(exact_auc(labels, predictions))
        assert np.isnan(group_auc(labels, predictions, predictions))


def test_lists_tensors_and_booleans_do():
    labels, predictions = tf.constant([[False], [True]]), tf.constant([[0.25], [0.5]])
    assert exact_auc(labels, predictions) == exact_auc([0, 1], [1, 2]) == 1.0
    assert group_auc(labels, predictions, tf.constant(["a", "a"])) == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": [0, 2]}, "labels: has 2, must be 0 or 1"),
        ({"labels": [0, np.nan]}, "labels: has nan, must be 0 or 1"),
        ({"labels": [[0, 1]]}, r"labels: has shape \(1, 2\), must be \[n\] or \[n, 1\]"),
        ({"predictions": [0.1]}, "predictions: has 1 elements, must have 2 as labels has"),
        ({"predictions": [0.1, np.nan]}, "predictions: has NaN, must be numbers"),
        ({"groups": [1, 2, 3]}, "groups: has 3 elements, must have 2"),
        ({"sample_weight": [1.0, -1.0]}, "sample_weight: has -1.0, must be finite and at least 0"),
        ({"sample_weight": [1.0, np.inf]}, "sample_weight: has inf, must be"),
        ({"sample_weight": 1.0}, r"sample_weight: has shape \(\), must be"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    arguments = {"labels": [0, 1], "predictions": [0.1, 0.2], "groups": [1, 1], **changes}
    with pytest.raises(ValueError, match=message):
        group_auc(**arguments)
    if "groups" not in changes:
        del arguments["groups"]
        with pytest.raises(ValueError, match=message):
            exact_auc(**arguments)


def compiled():
    model = model_of_users()
    model.compile("sgd", "binary_crossentropy")
    return model


def data(*parts) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(parts).batch(16)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_callback_adds_that_of_each_epoch_though_batches_may_be_empty(weighted):
    model, (inputs, labels, weights) = compiled(), rated_by_users()
    weights = [weights] if weighted else []
    expected = []
    after = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: expected.append(
            group_auc(labels, model.predict(inputs, verbose=0), inputs["user"], *weights)
        )
    )
    whole = data(inputs, labels, *weights)
    empty = whole.take(1).map(lambda *batch: tf.nest.map_structure(lambda part: part[:0], batch))
    callback = GroupAUC(whole.take(1).concatenate(empty).concatenate(whole.skip(1)), "user")
    best = keras.callbacks.EarlyStopping("val_gauc", mode="max", patience=9)
    history = model.fit(
        inputs, labels, epochs=3, verbose=0, callbacks=[callback, after, best]
    ).history
    assert history["val_gauc"] == pytest.approx(expected) and len(expected) == 3
    assert best.best == max(expected)


def test_the_value_of_a_model_that_has_diverged_is_nan_and_training_goes_on(caplog):
    inputs, labels, _ = rated_by_users()
    model = compiled()
    model.set_weights([np.full(w.shape, np.nan) for w in model.get_weights()])
    callback = GroupAUC(data(inputs, labels), "user")
    history = model.fit(inputs, labels, epochs=2, verbose=0, callbacks=[callback]).history
    assert np.isnan(history["val_gauc"]).tolist() == [True, True]
    assert caplog.text.count("val_gauc is NaN") == 1


def test_the_callback_names_what_it_can_not_use():
    inputs, labels, _ = rated_by_users()
    wrong = [
        (inputs, "user", "dataset: is a dict, must be a tf.data.Dataset"),
        (data(inputs, labels), "film", r"group='film': must be a key .*\['user', 'x'\]"),
        (data(labels, labels), "user", "group='user': must be a key"),
        (data(inputs), "user", "must give \\(inputs, labels\\)"),
        (data(inputs, labels).repeat(), "user", "repeats without an end"),
    ]
    for dataset, group, message in wrong:
        with pytest.raises(ValueError, match=message):
            GroupAUC(dataset, group)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.unbatch().shuffle(60).batch(16), "in another order each time"),
        (lambda d: d.take(0), "has no batches"),
    ],
)
def test_the_callback_refuses_data_that_it_can_not_match_with_predictions(change, message):
    model, (inputs, labels, _) = compiled(), rated_by_users()
    callback = GroupAUC(change(data(inputs, labels)), "user")
    with pytest.raises(ValueError, match=message):
        model.fit(inputs, labels, verbose=0, callbacks=[callback])
