"""Functions as servers are called with them; here this process is the server."""

import pytest
import tensorflow as tf

from tf_recsync.synchronization.remote_functions import RemoteFunction


def remote(function, *specs, replaced=()):
    concrete = tf.function(function, autograph=False).get_concrete_function(*specs)
    return RemoteFunction(concrete, replaced)


def test_others_take_the_place_of_variables_and_results_are_structured():
    own, factor, other = tf.Variable([1.0, 2.0]), tf.Variable(10.0), tf.Variable([3.0, 4.0])

    def function(x):
        return {"sum": own + x, "both": (own * factor, tf.constant("text"))}

    spec = tf.TensorSpec([], tf.float32)
    found = remote(function, spec, replaced=[own.handle])(tf.constant(1.0), other.handle)
    assert found["sum"].numpy().tolist() == [4.0, 5.0]
    product, text = found["both"]
    assert (product.numpy().tolist(), text.numpy()) == ([30.0, 40.0], b"text")


def test_the_end_of_data_is_told_as_it_is_and_errors_with_the_line_that_made_them():
    data = tf.data.Dataset.from_tensor_slices(["1", "wrong"])

    def next_number(iterator):  # TensorFlow finds the lines of functions that have a name.
        return tf.strings.to_number(iterator.get_next())

    function = remote(next_number, tf.data.IteratorSpec(data.element_spec))
    iterator = iter(data)
    assert float(function(iterator)) == 1.0
    with pytest.raises(tf.errors.InvalidArgumentError, match="could not correctly") as raised:
        function(iterator)
    assert __file__ in raised.value.message
    with pytest.raises(tf.errors.OutOfRangeError) as raised:
        function(iterator)
    assert __file__ not in raised.value.message
