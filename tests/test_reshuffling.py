"""Datasets that shuffle: anew in each epoch, and alike in each program."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_recsync as recsync
from tf_recsync.strategies import reshuffling

NUMBERS = np.arange(1, 13)


@pytest.fixture
def cluster(clusters):
    return clusters.get(1, 1)


class Order(keras.metrics.Metric):
    """The labels as the digits of a number, in the order in which they came."""

    def __init__(self):
        super().__init__(name="order", dtype="float64")
        self.digits = self.add_variable((), initializer="zeros", dtype="float64", name="digits")

    def update_state(self, y_true, y_pred, sample_weight=None):
        label = keras.ops.cast(keras.ops.reshape(y_true, []), "float64")
        self.digits.assign(self.digits * 16.0 + label)

    def result(self):
        return self.digits + 0.0  # The variable itself has other digits when logs are read.


def digits(code):
    return tuple(int(digit, 16) for digit in f"{int(code):x}")


def orders(cluster, dataset, fits=1, epochs=2, **options):
    """The order in which one worker trained on the numbers, in each epoch of each fit."""
    with recsync.AsyncStrategy(cluster).scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(recsync.optimizers.SGD(0.0), "mse", metrics=[Order()])
    found = []
    for _ in range(fits):
        history = model.fit(dataset, epochs=epochs, verbose=0, **options).history
        parts = [history["order"], *([history["val_order"]] if "val_order" in history else [])]
        found += [sum(map(digits, codes), ()) for codes in zip(*parts, strict=True)]
    for order in found:
        assert sorted(order) == NUMBERS.tolist()
    return found


def numbers(shuffle):
    """The numbers, shuffled by a function of the dataset, each a batch."""
    dataset = shuffle(tf.data.Dataset.from_tensor_slices(NUMBERS))
    return dataset.map(lambda label: (tf.ones([1]), tf.reshape(label, [1]))).batch(1)


def test_a_seeded_shuffle_has_another_order_in_each_epoch_and_the_same_in_each_program(cluster):
    def dataset():
        return numbers(lambda data: data.shuffle(12, seed=1))

    found = orders(cluster, dataset(), fits=2)
    assert len(set(found)) == 4
    assert orders(cluster, dataset(), fits=2) == found


def test_each_call_of_fit_with_class_weight_goes_on_with_other_orders(cluster):
    weights = {label: 1.0 for label in range(13)}
    data = numbers(lambda data: data.shuffle(12, seed=1))
    assert len(set(orders(cluster, data, fits=2, class_weight=weights))) == 4


def test_parts_of_one_shuffle_for_training_and_for_validation_have_nothing_in_common(cluster):
    data = numbers(lambda data: data.shuffle(12, seed=1))
    found = orders(cluster, data.take(8), fits=2, validation_data=data.skip(8))
    assert len(set(found)) == 4  # Each has all numbers, of both parts together, once.


def test_a_seed_of_the_program_makes_it_reproducible_and_no_more(cluster):
    def found():
        keras.utils.set_random_seed(5)
        return orders(cluster, numbers(lambda data: data.shuffle(12)))

    try:
        first = found()
        assert len(set(first)) == 2
        assert found() == first
    finally:
        tf.compat.v1.set_random_seed(None)


def test_without_a_seed_and_where_users_ask_for_one_order_all_is_as_in_tensorflow(cluster):
    tf.compat.v1.set_random_seed(None)  # That of another test would be a part of all others.
    one = orders(
        cluster, numbers(lambda data: data.shuffle(12, seed=1, reshuffle_each_iteration=False))
    )
    assert len(set(one)) == 1
    unseeded = numbers(lambda data: data.shuffle(12))
    assert len(set(orders(cluster, unseeded, fits=2))) == 4
    assert not reshuffling.is_reshuffled(unseeded)


def drawn(label):
    """The same label, in a way that draws a random number."""
    return label + tf.random.uniform([], 0, 1, tf.int64)


PIPELINES = {
    "a random map": lambda data: data.map(drawn),
    "a generator": lambda _: tf.data.Dataset.from_generator(
        lambda: iter(NUMBERS), output_signature=tf.TensorSpec([], tf.int64)
    ),
}


@pytest.mark.parametrize("kind", PIPELINES)
def test_a_pipeline_with_state_is_shuffled_anew_in_each_epoch_too(cluster, kind):
    found = orders(cluster, numbers(lambda data: PIPELINES[kind](data).shuffle(12, seed=1)))
    assert len(set(found)) == 2


def test_two_shuffles_and_random_numbers_are_drawn_anew_in_each_pass():
    def drawn(number):
        data = tf.data.Dataset.range(50).shuffle(50, seed=3).shuffle(4, seed=3)
        random = tf.data.Dataset.random(seed=3, rerandomize_each_iteration=True)
        dataset = tf.data.Dataset.zip(data, random)
        assert reshuffling.is_reshuffled(dataset)
        in_pass = reshuffling.in_pass(dataset, number)
        assert in_pass.element_spec == dataset.element_spec
        assert in_pass.cardinality() == dataset.cardinality()
        return np.array(list(in_pass.as_numpy_iterator()))

    first, second = drawn(1), drawn(2)
    for place in range(2):
        assert not np.array_equal(first[:, place], second[:, place])
    np.testing.assert_array_equal(drawn(1), first)
    assert set(first[:, 0]) == set(range(50))


def shuffled(seed, **options):
    return tf.data.Dataset.range(4).shuffle(4, seed=seed, **options)


IN_FUNCTIONS = {
    "interleave": lambda outer, seed: outer.interleave(lambda _: shuffled(seed)),
    "one order": lambda outer, seed: outer.interleave(
        lambda _: shuffled(seed, reshuffle_each_iteration=False)
    ),
    "nested": lambda outer, seed: outer.flat_map(
        lambda _: tf.data.Dataset.range(2).flat_map(lambda _: shuffled(seed))
    ),
    "cond": lambda outer, seed: outer.flat_map(
        lambda x: tf.cond(x > 0, lambda: shuffled(seed), lambda: tf.data.Dataset.range(4))
    ),
    "random": lambda outer, seed: outer.flat_map(lambda _: tf.data.Dataset.random(seed).take(2)),
    "nested map": lambda outer, seed: outer.flat_map(
        lambda _: tf.data.Dataset.range(2).map(lambda x: tf.random.uniform([], seed=seed))
    ),
    "what is faster": lambda outer, seed: outer.flat_map(
        lambda _: tf.data.Dataset.range(4).map(
            lambda x: x, num_parallel_calls=2, deterministic=None if seed else False
        )
    ),
}


@pytest.mark.parametrize("kind", IN_FUNCTIONS)
def test_order_that_functions_of_datasets_leave_open_is_noticed(kind):
    tf.compat.v1.set_random_seed(None)  # That of another test would be a part of all others.
    outer = tf.data.Dataset.range(3)
    assert reshuffling.has_any_order(IN_FUNCTIONS[kind](outer, None))
    assert not reshuffling.has_any_order(IN_FUNCTIONS[kind](outer, 5))
    assert not reshuffling.has_any_order(outer.flat_map(lambda _: tf.data.Dataset.range(4)))


def test_a_dataset_that_can_not_be_described_keeps_its_order_and_says_so(caplog):
    with tf.device("/CPU:0"):
        counter = tf.Variable(0)
        dataset = tf.data.Dataset.range(4).shuffle(4, seed=1).map(lambda x: (x, counter + 1))
        options = tf.data.Options()
        options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.FAIL
        dataset = dataset.with_options(options)
        assert reshuffling.in_pass(dataset, 1) is dataset
    assert "keeps its order in each epoch" in caplog.text
