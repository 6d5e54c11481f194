"""What `fit` says when a worker's call fails by the user's own doing."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_recsync as recsync
from tf_recsync.cluster import messages

PACKAGE = messages._PACKAGE
FRAMES = f"""Graph execution error:

Detected at node MatMul defined at (most recent call last):
  File "/home/me/train.py", line 3, in <module>

  File "{PACKAGE}strategies/train_function.py", line 76, in __call__

  File "/home/me/layers.py", line 12, in call

  File "{PACKAGE}synchronization/pull_push.py", line 9, in finish

Detected at node MatMul defined at (most recent call last):
<stack traces unavailable>
"""
SAID = "indices[1] = 7 is not a row of [0, 5)\nand a second line"
FIRST = "2 root error(s) found.\n  (0) INVALID_ARGUMENT:  "
AGAIN = (
    "\nAdditional GRPC error information from remote target /job:worker while calling /Enqueue:\n"
    ':UNKNOWN:Error {grpc_message:"indices[1] = 7 \\n"} [Op:__inference_loop_5]'
)


def said_by(message: str) -> str:
    error = tf.errors.InvalidArgumentError(None, None, message)
    plain = messages.plain(error, 3)
    assert type(plain) is tf.errors.InvalidArgumentError
    return plain.message


@pytest.mark.parametrize(
    "message",
    [
        SAID,
        f"{SAID}\n\t [[{{{{node MatMul}}}}]]\n\t [[while/body/_1]]{AGAIN}",
        f"{FIRST}{SAID}\n\t [[{{{{node a}}}}]]{AGAIN}",
        f"{FIRST}{SAID}\n\t [[a]]\n  (1) CANCELLED:  {SAID}",
    ],
)
def test_an_error_says_once_what_is_wrong_and_on_which_worker(message):
    assert said_by(message) == f"On worker:3: {SAID}"
    made_at = 'The operation was made at: File "/home/me/layers.py", line 12, in call'
    assert said_by(FRAMES + message) == f"On worker:3: {SAID}\n{made_at}"


@pytest.fixture
def strategy(clusters):
    return recsync.AsyncStrategy(clusters.get(workers=2, ps=2))


def fit(strategy, ids, labels) -> str:
    """Trains, which fails; returns what the error says."""
    with strategy.scope():
        inputs = keras.Input((1,), dtype="int64")
        rows = keras.layers.Embedding(5, 4, name="rows")(inputs)
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))
        model.compile(recsync.optimizers.Adagrad(0.1, nonfinite="error"), "mse")
    data = tf.data.Dataset.from_tensor_slices((ids, labels)).batch(4)
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        model.fit(data, verbose=0)
    error = raised.value
    assert error.__cause__ is None
    assert error.__suppress_context__ or error.__context__ is None
    return error.message


def test_an_error_of_a_server_names_the_variable_and_nothing_that_the_user_has_not_made(strategy):
    ids, labels = np.zeros((16, 1), np.int64), np.ones((16, 1), np.float32)
    labels[9] = np.nan
    # Of a step several variables have such a gradient; one of them is told.
    message = fit(strategy, ids, labels)
    assert message.startswith(("On worker:0: gradient of ", "On worker:1: gradient of "))
    is_of_row = message.endswith("gradient of rows/embeddings, row 0 is not finite")
    assert is_of_row or "is not finite: its" in message
    assert len(message.splitlines()) == 1
    ids[9], labels[9] = 7, 1
    message = fit(strategy, ids, labels)
    assert "indices[1] = 7 is not a row of [0, 5)" in message and len(message.splitlines()) == 1
