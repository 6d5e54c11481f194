"""What the token list and its ops refuse, and the shapes that a graph knows."""

import pytest
import tensorflow as tf

from tf_recsync.ops import tokens as ops
from tf_recsync.synchronization.token_list import TokenList


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repeats": 0}, "repeats"),
        ({"gate": "open"}, "gate"),
        ({"clock_bound": -1}, "clock_bound"),
        ({"clock_bound": 1}, "clock_bound must be 0 with gate=step, not 1"),
        ({"servers": 0}, "servers"),
        ({"workers": 0}, "workers"),
        ({"servers": 2**31 - 1}, "servers must be from 1 to 1048576, not 2147483647"),
        ({"workers": 2**31 - 1}, "workers must be from 1 to 1048576, not 2147483647"),
        ({"shared_name": ""}, "shared_name must not be empty"),
    ],
)
def test_wrong_attributes_are_refused(changes, message):
    good = {"shared_name": "wrong", "repeats": 1, "gate": "step", "workers": 1}
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        ops.token_list(**{**good, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repeats": 2}, "repeats=1.*, not .*repeats=2"),
        ({"gate": "step"}, "gate=none.*, not .*gate=step"),
        ({"servers": 3}, "servers=2.*, not .*servers=3"),
        ({"workers": 5}, "workers=4.*, not .*workers=5"),
    ],
)
def test_a_name_is_not_taken_for_a_list_with_other_options(changes, message):
    options = {"shared_name": "same", "repeats": 1, "gate": "none", "servers": 2, "workers": 4}
    handle = ops.token_list(**options)
    ops.take_token(handle, 3)
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"same is a token list .*{message}"):
        ops.token_list(**(options | changes))
    again = ops.token_list(**options)  # With the same ones it is the same list.
    assert int(ops.take_token(again, 3).index) == 1
    tf.raw_ops.DestroyResourceOp(resource=handle)


LARGEST = 2**63 - 1
WRONG_INPUTS = [
    (ops.take_token, [2], "worker must be from 0 to 1, not 2"),
    (ops.take_token, [-1], "worker must be from 0 to 1, not -1"),
    (ops.take_token, [[0]], r"worker must be a scalar, not \[1\]"),
    (ops.lose_worker, [2], "worker must be from 0 to 1, not 2"),
    (ops.reissue_tokens, [0], r"indices must be a vector, not \[\]"),
    (ops.leave_tokens, [2**40], f"worker must be from 0 to 1, not {2**40}"),
    (ops.report_step, [3, 0], "server must be from 0 to 2, not 3"),
    (ops.report_step, [0, -1], "step must be from 0 to .*, not -1"),
    (ops.report_step, [0, LARGEST], f"step must be from 0 to .*, not {LARGEST}"),
    (ops.report_step, [0, [1]], r"step must be a scalar, not \[1\]"),
    (ops.seek_tokens, [-1], "step must be from 0 to .*, not -1"),
    (ops.seek_tokens, [LARGEST], f"step must be from 0 to .*, not {LARGEST}"),
]


@pytest.mark.parametrize(("op", "arguments", "message"), WRONG_INPUTS)
def test_wrong_inputs_are_refused_and_change_nothing(op, arguments, message):
    tokens = TokenList(repeats=2, gate="step", workers=2, servers=3)
    before = tokens.state()
    arguments = [tf.constant(a, tf.int64) for a in arguments]
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        op(tokens.handle, *arguments)
    assert tokens.state() == before
    if any(a.shape.rank for a in arguments) or op is ops.reissue_tokens:
        with pytest.raises(ValueError, match="rank"):
            tf.function(op).get_concrete_function(tokens.handle, *arguments)


def test_a_handle_of_something_else_is_refused():
    variable = tf.Variable(1.0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="type"):
        ops.take_token(variable.handle, 0)
    tokens = TokenList(repeats=1, gate="none", workers=1)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"list must be one .*\[2\]"):
        ops.take_token(tf.stack([tokens.handle, tokens.handle]), 0)


def test_shapes_are_known_in_a_graph():
    @tf.function(input_signature=[tf.TensorSpec([], tf.resource)])
    def shapes(handle):
        token, loss = ops.take_token(handle, 0), ops.lose_worker(handle, 0)
        for scalar in (*token, loss.lost, ops.reissue_tokens(handle, loss.withheld)):
            assert scalar.shape == []
        assert loss.withheld.shape.as_list() == loss.tickets.shape.as_list() == [None]
        raw = ops.token_list_state(handle)
        assert raw.position.shape == []
        assert raw.held.shape.as_list() == [None, 2]
        assert raw.counts.shape == [4]
        assert raw.waiting_seconds.shape.as_list() == [None]

    shapes.get_concrete_function()
