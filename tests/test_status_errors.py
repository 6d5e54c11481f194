"""Errors of TensorFlow's ops, as C++ makes them."""

import sys
import threading

import pytest
import tensorflow as tf
from tensorflow.python.eager import core

from tf_recsync._status_errors import StatusError


def failing():
    tf.raw_ops.Reshape(tensor=[1, 2], shape=[3], name="apart")


def test_an_op_raises_what_it_always_has():
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"with 2 values, .* has 3 \[Op:Reshape\]"
    ) as error:
        failing()
    assert error.value.error_code == tf.errors.INVALID_ARGUMENT
    assert error.value.experimental_payloads is not None


def test_the_constructor_of_what_is_raised_runs_no_python_code():
    # In which another thread may get Python's lock, while TensorFlow holds one of its own.
    assert StatusError.__init__ is Exception.__init__
    assert issubclass(StatusError, core._NotOkStatusException)
    raised = StatusError("it is gone", 14, {})
    assert (raised.message, raised.code, raised.payloads) == ("it is gone", 14, {})
    assert str(raised) == "UnavailableError: it is gone"


def test_threads_that_fail_at_once_all_end():
    def fail():
        for _ in range(200):
            with pytest.raises(tf.errors.InvalidArgumentError):
                failing()
        ended.append(True)

    ended = []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=fail, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert len(ended) == 4
