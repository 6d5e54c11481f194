"""Compressed activations and gradients against numpy, and messages that don't fit."""

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as np_st

from tf_recsync import ops
from tf_recsync.compression import Compression

INVALID = tf.errors.InvalidArgumentError
FLOATS = st.floats(-(2.0**60), 2.0**60, width=32).filter(lambda x: x == 0 or abs(x) > 1e-20)


def arrays(least=0):
    shapes = np_st.array_shapes(min_dims=1, max_dims=3, min_side=least, max_side=20)
    return np_st.arrays(np.float32, shapes, elements=FLOATS)


@given(arrays())
@settings(deadline=None, max_examples=100)
def test_int8_is_within_half_a_step_of_each_rows_largest_value(x):
    codes, scales = ops.encode_int8(x)
    assert codes.dtype == tf.int8 and scales.shape == x.shape[:-1]
    largest = np.abs(x).max(-1, initial=0)
    np.testing.assert_array_equal(scales, largest / np.float32(127))
    back = ops.decode_int8(codes, scales).numpy()
    assert (np.abs(back - x) <= 0.5001 * largest[..., None] / 127).all()
    expected = np.rint(x.astype(np.float64) / np.where(largest, largest, 1)[..., None] * 127)
    assert np.abs(codes.numpy() - expected).max(initial=0) <= 1


def test_rows_are_encoded_alike_by_several_threads():
    x = np.random.default_rng(0).normal(size=(3000, 257)).astype(np.float32)
    codes, scales = ops.encode_int8(x)
    for r in (0, 1499, 2999):
        alone, scale = ops.encode_int8(x[r])
        np.testing.assert_array_equal(codes[r], alone)
        assert scales[r] == scale
    largest = np.abs(x).max(-1, keepdims=True) / 127
    assert (np.abs(ops.decode_int8(codes, scales) - x) <= 0.5001 * largest).all()


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_nan_and_others_are_not(odd):
    back = ops.decode_int8(*ops.encode_int8(np.float32([[1, odd, 2], [1, 2, 3]]))).numpy()
    assert np.isnan(back[0]).all() and np.isfinite(back[1]).all()


def compressed_by_numpy(x, sparsify, dtype):
    """What is sent of x, 0 elsewhere."""
    flat = x.ravel()
    kept = max(flat.size - int(np.float32(sparsify) * np.float64(flat.size)), min(flat.size, 1))
    order = np.argsort(-np.abs(flat), kind="stable")[:kept]
    sent = np.zeros_like(flat)
    sent[order] = flat[order].astype(dtype).astype(np.float32)
    return sent.reshape(x.shape)


DTYPES = {tf.float32: np.float32, tf.bfloat16: ml_dtypes.bfloat16}


@given(arrays(), st.sampled_from([0.0, 0.3, 0.5, 0.9, 0.999]), st.sampled_from(list(DTYPES)))
@settings(deadline=None, max_examples=100)
def test_the_largest_gradients_are_sent(g, sparsify, dtype):
    mask, values = ops.compress_gradient(g, sparsify=sparsify, dtype=dtype)
    assert values.dtype == dtype
    back = ops.restore_gradient(mask, values, g.shape)
    np.testing.assert_array_equal(back, compressed_by_numpy(g, sparsify, DTYPES[dtype]))
    assert len(mask) == (0 if len(values) == g.size else -(-g.size // 8))


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("sparsify", [0.0, 0.9])
def test_error_feedback_equals_a_replay_in_numpy(dtype, sparsify):
    random = np.random.default_rng(1)
    options = {"feedback": f"replay_{dtype.name}_{sparsify}", "sparsify": sparsify, "dtype": dtype}

    @tf.function
    def step(g):
        mask, values = ops.compress_gradient(g, **options)
        return ops.restore_gradient(mask, values, tf.shape(g))

    error = np.zeros([], np.float32)
    for batch in (16, 16, 16, 9, 9):
        shape = (batch, 7)
        if error.shape != shape:  # Another batch size begins anew.
            error = np.zeros(shape, np.float32)
        g = random.normal(size=shape).astype(np.float32)
        sent = compressed_by_numpy(g + error, sparsify, DTYPES[dtype])
        np.testing.assert_array_equal(step(tf.constant(g)), sent)
        error = g + error - sent


def test_each_name_and_net_has_a_feedback():
    g = np.float32([4, 3])
    for sent in (4.0, 6.0):
        for name, net in [("first", 0), ("second", 0), ("first", tf.constant(1, tf.int64))]:
            _, values = ops.compress_gradient(g, feedback=name, net=net, sparsify=0.5)
            assert values == sent
    assert ops.compress_gradient(g, sparsify=0.5)[1] == 4.0
    with pytest.raises(ValueError, match="feedback must not be empty"):
        ops.compress_gradient(g, feedback="")
    with pytest.raises(tf.errors.InvalidArgumentError, match="net must be one number"):
        ops.compress_gradient(g, feedback="first", net=[0, 1])


def test_shapes_are_inferred():
    @tf.function
    def both(x):
        codes, scales = ops.encode_int8(x)
        restored = ops.restore_gradient(*ops.compress_gradient(x), [4, 5])
        assert (codes.shape, scales.shape) == ([None, 3, 5], [None, 3])
        assert ops.decode_int8(codes, scales).shape == [None, 3, 5]
        assert restored.shape == [4, 5]

    both.get_concrete_function(tf.TensorSpec([None, 3, 5]))


BAD = {
    "x must be": lambda: ops.encode_int8(np.float32(1)),
    "codes must be": lambda: ops.decode_int8(np.int8(1), np.float32(1)),
    "scales must have shape": lambda: ops.decode_int8(np.zeros((2, 3), np.int8), np.zeros(3, "f")),
    "sparsify must be": lambda: ops.compress_gradient(np.float32([1]), sparsify=1.0),
    "sparsify must be at": lambda: ops.compress_gradient(np.float32([1]), sparsify=float("nan")),
    "mask must have 2 bytes": lambda: restored([1], [1.0], [9]),
    "mask must have 1 bytes": lambda: restored([], [1.0], [2]),
    "mask must name": lambda: restored([3], [1.0], [8]),
    "mask must name as many of 3": lambda: restored([9], [1.0, 2.0], [3]),
    "mask must be a vector": lambda: restored([[1]], [1.0], [8]),
    "values must be a vector": lambda: restored([1], [[1.0]], [8]),
    "mask must have .* for": lambda: restored([1], [1.0], [2**40, 2**20]),
    "(?i)dimension|shape|negative|overflow": lambda: restored([1], [1.0], [2**40, 2**40]),
    "(?i)dimension|shape|negative": lambda: restored([1], [1.0], [-1]),
}


def restored(mask, values, shape):
    return ops.restore_gradient(np.array(mask, np.uint8), np.array(values, np.float32), shape)


@pytest.mark.parametrize("message", BAD)
def test_messages_that_do_not_fit_are_refused(message):
    with pytest.raises(INVALID, match=message):
        BAD[message]()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"activations": "int4"}, "activations='int4'"),
        ({"gradients": "int8"}, "gradients='int8'.*sensitive to lower precision.*section 4.2"),
        ({"gradients": "float16"}, "gradients='float16'"),
        ({"sparsify": 1.0}, "sparsify must be .* below 1, not 1.0"),
        ({"sparsify": -0.1}, "sparsify must be .*, not -0.1"),
        ({"sparsify": float("nan")}, "sparsify must be .*, not nan"),
        ({"sparsify": True}, "sparsify must be .*, not True"),
        ({"error_feedback": 1}, "error_feedback must be a bool, not 1"),
    ],
)
def test_bad_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Compression(**arguments)


def test_settings_are_values():
    assert Compression() == Compression("none", "none", 0.0, True)
    assert not Compression(activations="int8").compresses_gradients
    assert Compression(sparsify=0.5).compresses_gradients


@pytest.mark.parametrize(
    ("settings", "ratios", "nanoseconds"),
    [
        ({}, (1, 1), 0),
        ({"activations": "bfloat16"}, (0.5, 1), 0.02),
        ({"activations": "int8", "gradients": "bfloat16"}, (0.25, 0.5), 0.0625),
        ({"sparsify": 0.9}, (1, 1 / 32 + 0.1), 0.3),
        ({"gradients": "bfloat16", "sparsify": 0.5}, (1, 1 / 32 + 0.25), 0.3),
    ],
)
def test_plans_learn_what_a_compression_saves_and_takes(settings, ratios, nanoseconds):
    compression = Compression(**settings)
    found = (compression.activation_ratio, compression.gradient_ratio)
    assert found == pytest.approx(ratios)
    assert 1e9 * compression.seconds_per_byte == pytest.approx(nanoseconds)
