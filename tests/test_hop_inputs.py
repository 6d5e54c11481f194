"""What the ops of decentralized training refuse."""

import pathlib
import threading
import time

import numpy as np
import pytest
import tensorflow as tf
from helpers import check_cancelled_before

from tf_recsync.ops import hop

INVALID = tf.errors.InvalidArgumentError
HUGE = 2**62


def worker(name, **changes):
    good = {
        "in_neighbors": [1, 2],
        "weights": [0.25, 0.25],
        "out_neighbors": [1],
        "max_iteration_gap": 3,
        "slots": 4,
        "capacity": 12,
    }
    return hop.worker(shared_name=name, **{**good, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shared_name": ""}, "shared_name must not be empty"),
        ({"weights": [0.5]}, "weights must be one for each of the 2 in-neighbors, not 1"),
        ({"gap_bounds": [1]}, "gap_bounds must be one for each of the 2 in-neighbors, or none"),
        ({"backup_workers": 3}, "backup_workers must be less than .* itself included, 3, not 3"),
        ({"in_neighbors": [1, 1]}, "neighbors must be different numbers from 0 on, not 1, 1"),
        ({"out_neighbors": [-1]}, "neighbors must be different numbers from 0 on, not -1"),
        ({"max_iteration_gap": 0, "backup_workers": 1}, "need token queues"),
        ({"max_iteration_gap": 0, "max_jump": 2}, "need token queues"),
        ({"notify_ack": True}, "notify_ack excludes token queues"),
        ({"notify_ack": True, "max_iteration_gap": 0, "staleness_bound": 2}, "notify_ack excl"),
        ({"slots": HUGE}, "slots must be at most"),
        ({"capacity": HUGE}, "capacity must be at most"),
        ({"max_iteration_gap": HUGE}, "max_iteration_gap must be at most"),
        ({"staleness_bound": HUGE}, "staleness_bound must be at most"),
        ({"slots": 0}, "slots"),
        ({"staleness_bound": -2}, "staleness_bound"),
    ],
)
def test_wrong_attributes_are_refused(changes, message):
    with pytest.raises(INVALID, match=message):
        worker(**{"name": changes.pop("shared_name", "wrong"), **changes})


UPDATE = np.ones(3, np.float32)
MATRIX = np.ones((2, 2), np.float32)
WRONG_INPUTS = {
    "begin before 0": (lambda w: hop.begin(w, -1), "first must be from 0 to"),
    "begin too late": (lambda w: hop.begin(w, HUGE), "first must be from 0 to"),
    "begin twice at once": (lambda w: hop.begin(w, [0, 1]), "first must be a scalar"),
    "enter before 0": (lambda w: hop.enter(w, -1, UPDATE, send=True), "iteration must be from 0"),
    "enter too late": (lambda w: hop.enter(w, HUGE, UPDATE, send=True), "iteration must be from 0"),
    "enter with a matrix": (
        lambda w: hop.enter(w, 0, MATRIX, send=True),
        "update must be a vector, not \\[2,2\\]",
    ),
    "deliver a matrix": (lambda w: hop.deliver(w, 1, 1, 0, MATRIX), "update must be a vector"),
    "receive before 0": (
        lambda w: hop.receive(w, -1, UPDATE, [variable().handle], relative=True),
        "iteration must be from 0",
    ),
    "tell nobody": (lambda w: hop.ask(w, -1, 1, 0, 0), "neighbor must be from 0"),
    "tell too much": (lambda w: hop.ask(w, 1, 1, HUGE, 0), "progress must be from -1"),
    "ask too much": (lambda w: hop.ask(w, 1, 1, 0, HUGE), "iteration must be from -1"),
    "deliver of nobody": (lambda w: hop.deliver(w, -1, 1, 0, UPDATE), "neighbor must be from 0"),
    "deliver of a stranger": (lambda w: hop.deliver(w, 7, 1, 0, UPDATE), "7 is not an in-neighbor"),
    "deliver the past": (lambda w: hop.deliver(w, 1, 1, -1, UPDATE), "iteration must be from 0"),
    "deliver the future": (
        lambda w: hop.deliver(w, 1, 1, HUGE, UPDATE),
        "iteration must be from 0",
    ),
    "collect for a stranger": (
        lambda w: hop.collect(w, tf.constant(7, tf.int64), tf.float32),
        "worker 7 is no neighbor",
    ),
    "ask before the first": (lambda w: hop.ask(w, 1, -1, 0, 0), "number must be from 0"),
    "deliver before the first": (
        lambda w: hop.deliver(w, 1, 0, 0, UPDATE),
        "number must be from 1",
    ),
    "carry before the first": (lambda w: hop.carried(w, 1, -1, 0, 0), "number must be from 0"),
    "carry nothing": (lambda w: hop.carried(w, -2, 1, 0, 0), "neighbor must be from -1"),
    "carry since ever": (lambda w: hop.carried(w, 1, 1, 0, -1), "began must be from 0"),
    "set nobody": (lambda w: hop.set_neighbor(w, -1, 0, 0), "neighbor must be from 0"),
    "set before 0": (lambda w: hop.set_neighbor(w, 1, -1, 0), "since must be from 0"),
    "set for less than nothing": (lambda w: hop.set_neighbor(w, 1, 0, -2), "until must be from -1"),
    "hold in part": (lambda w: hop.hold(w, [True, False]), "held must be a scalar"),
}


def variable(value=(0.0, 0.0, 0.0), dtype=tf.float32):
    return tf.Variable(np.array(value), dtype=dtype)


@pytest.mark.parametrize("name", WRONG_INPUTS)
def test_wrong_inputs_are_refused(name):
    call, message = WRONG_INPUTS[name]
    handle = worker("inputs")
    hop.begin(handle, 0)
    with pytest.raises(INVALID, match=message):
        call(handle)
    tf.raw_ops.DestroyResourceOp(resource=handle)


def received(updates, variables, base=UPDATE, **changes):
    """A worker in iteration 0 that averages these updates of its two in-neighbors."""
    handle = worker("averages", **changes)
    hop.begin(handle, 0)
    try:
        hop.next_iteration(handle, [v.handle for v in variables], tf.float32)
        hop.enter(handle, 0, UPDATE, send=True)
        for sender, update in zip((1, 2), updates, strict=True):
            hop.deliver(handle, sender, 1, 0, update)
        hop.receive(handle, 0, base, [v.handle for v in variables], relative=True)
    finally:
        tf.raw_ops.DestroyResourceOp(resource=handle)


def test_updates_are_averaged_relative_to_what_was_sent():
    one, two = variable([1.0, 2.0]), variable([3.0])
    received([[5.0, 1.0, 1.0], [1.0, 9.0, 1.0]], [one, two])
    np.testing.assert_allclose(one.numpy(), [1 + 0.25 * 4, 2 + 0.25 * 8])
    np.testing.assert_allclose(two.numpy(), [3.0])


@pytest.mark.parametrize(
    ("updates", "make", "base", "message"),
    [
        (
            [UPDATE, [1.0]],
            lambda: [variable()],
            UPDATE,
            "worker 2 sent .* have 3 elements",
        ),
        ([UPDATE, np.ones(3)], lambda: [variable()], UPDATE, "worker 2 sent"),
        ([UPDATE, UPDATE], lambda: [variable()], [1.0], "base must have the 3 .* not 1"),
        ([UPDATE, UPDATE], lambda: [variable(dtype=tf.float64)], UPDATE, "variables"),
        (
            [np.ones(6, np.float32)] * 2,
            lambda: [variable()] * 2,
            np.ones(6, np.float32),
            "passed twice",
        ),
    ],
    ids=["short", "another type", "short base", "variables of another type", "one variable twice"],
)
def test_updates_that_do_not_fit_are_refused_and_change_nothing(updates, make, base, message):
    variables = make()
    before = [v.numpy() for v in variables]
    with pytest.raises(INVALID, match=message):
        received(updates, variables, base)
    for v, value in zip(variables, before, strict=True):
        np.testing.assert_array_equal(v.numpy(), value)


def test_a_queue_that_is_too_full_says_that_this_is_a_bug():
    handle = worker("full", capacity=1)
    hop.begin(handle, 0)
    hop.deliver(handle, 1, 1, 0, UPDATE)
    with pytest.raises(tf.errors.ResourceExhaustedError, match="1 updates wait .* which is a bug"):
        hop.deliver(handle, 2, 1, 0, UPDATE)
    tf.raw_ops.DestroyResourceOp(resource=handle)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda w: hop.deliver(w, 2, 1, 3, UPDATE),
            "worker 0, in iteration 0, hears of worker 2, which is in iteration 3: "
            "3 iterations ahead, and 1 is the bound",
        ),
        (lambda w: hop.ask(w, 1, 1, 2, -1), "hears of worker 1, .* 2 iterations ahead, and 1 is"),
        (
            lambda w: [hop.deliver(w, 1, number, 1, UPDATE) for number in (1, 2, 3)],
            "worker 0, in iteration 0, has 3 updates in its queue of worker 1, .* 2 is the bound",
        ),
        (
            lambda w: hop.enter(w, 2, UPDATE, send=True),
            "worker 0, in iteration 2, has 2 tokens of worker 1, which is in iteration -1 as far "
            "as it was told; 0 would be right",
        ),
    ],
    ids=[
        "an update from too far",
        "an announcement",
        "two updates of an iteration",
        "no tokens taken",
    ],
)
def test_broken_invariants_are_found_where_they_are_checked(call, message):
    handle = worker("broken", gap_bounds=[1, 1])
    hop.begin(handle, 0)
    hop.enter(handle, 0, UPDATE, send=True)
    with pytest.raises(tf.errors.FailedPreconditionError, match=message + ".* which is a bug"):
        call(handle)
    # The trainer goes no further.
    with pytest.raises(tf.errors.FailedPreconditionError, match="which is a bug"):
        hop.enter(handle, 1, UPDATE, send=True)
    tf.raw_ops.DestroyResourceOp(resource=handle)


def waiting_for_tokens():
    handle, own = worker("cancelled", max_iteration_gap=1), variable()
    hop.begin(handle, 0)
    hop.enter(handle, 0, UPDATE, send=True)
    return handle, lambda: hop.next_iteration(handle, [own.handle], tf.float32)


def waiting_for_acknowledgements():
    handle = worker("cancelled", notify_ack=True, max_iteration_gap=0)
    hop.begin(handle, 0)
    hop.enter(handle, 0, UPDATE, send=False)
    hop.send(handle, UPDATE)
    hop.enter(handle, 1, UPDATE, send=False)
    return handle, lambda: hop.send(handle, UPDATE)


def waiting_for_updates():
    handle, own = worker("cancelled"), variable()
    hop.begin(handle, 0)
    hop.enter(handle, 0, UPDATE, send=True)
    return handle, lambda: hop.receive(handle, 0, UPDATE, [own.handle], relative=True)


@pytest.mark.parametrize(
    "make", [waiting_for_tokens, waiting_for_acknowledgements, waiting_for_updates]
)
def test_an_op_whose_step_is_cancelled_before_it_does_not_wait(make):
    handle, call = make()
    check_cancelled_before(call)
    state = hop.state(handle)
    assert state.missing.numpy().tolist() == []
    tf.raw_ops.DestroyResourceOp(resource=handle)


def test_the_state_names_the_iteration_that_is_waited_for():
    handle = worker("waits", staleness_bound=1)
    hop.begin(handle, 4)
    hop.enter(handle, 4, UPDATE, send=True)
    assert hop.state(handle).counts[-1] == -1
    v = variable()
    cancelled = []

    def wait():
        with pytest.raises(tf.errors.CancelledError):
            hop.receive(handle, 5, UPDATE, [v.handle], relative=True)
        cancelled.append(True)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    while hop.state(handle).phase != hop.PHASES.index("waiting for updates"):
        time.sleep(0.01)
    state = hop.state(handle)
    assert (state.missing.numpy().tolist(), int(state.counts[-1])) == ([1, 2], 4)
    hop.interrupt(handle)
    waiting.join()
    assert cancelled
    tf.raw_ops.DestroyResourceOp(resource=handle)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": [0.5, 0.25]}, r"weights=\[0.25, 0.25\], not \[0.5, 0.25\]"),
        ({"out_neighbors": [1, 2]}, r"out_neighbors=\[1\], not \[1, 2\]"),
        ({"max_iteration_gap": 2}, "max_iteration_gap=3, not 2"),
        ({"capacity": 13}, "capacity=12, not 13"),
        ({"staleness_bound": 1}, "staleness_bound=-1, not 1"),
        ({"gap_bounds": [1, 1]}, r"gap_bounds=\[\], not \[1, 1\]"),
    ],
)
def test_a_name_is_not_taken_for_a_worker_with_other_options(changes, message):
    handle = worker("same")
    hop.begin(handle, 5)
    with pytest.raises(INVALID, match=f"shared_name same is a worker with {message}"):
        worker("same", **changes)
    again = worker("same")  # With the same ones it is the same worker, where it was.
    hop.enter(again, 5, UPDATE, send=False)
    assert int(hop.state(handle).iteration) == 5
    tf.raw_ops.DestroyResourceOp(resource=handle)


def test_a_destroyed_worker_and_the_updates_in_its_queue_are_freed():
    def resident():
        status = pathlib.Path("/proc/self/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024

    large = tf.ones([8 << 20])  # 32 MB
    small = variable()

    def round_of_training():
        handle = worker("freed", slots=8, weights=[0.5], in_neighbors=[1])
        hop.begin(handle, 0)
        hop.deliver(handle, 1, 1, 0, UPDATE)
        hop.deliver(handle, 1, 2, 1, large * 2.0)  # A tensor of its own, which stays.
        # The last wait of the worker: what it held on to, nobody would let go.
        hop.receive(handle, 0, UPDATE, [small.handle], relative=True)
        tf.raw_ops.DestroyResourceOp(resource=handle)

    round_of_training()
    before = resident()
    for _ in range(10):
        round_of_training()
    assert resident() < before + 100  # MB; all of them would be 320.


def test_what_was_destroyed_is_not_found():
    handle = worker("gone")
    tf.raw_ops.DestroyResourceOp(resource=handle)
    with pytest.raises(tf.errors.NotFoundError):
        hop.begin(handle, 0)


def test_shapes_are_checked_while_tracing():
    handle = tf.TensorSpec([], tf.resource)

    def two_at_once(worker):
        return hop.ask(worker, [1, 2], *[tf.constant(0, tf.int64)] * 3)

    with pytest.raises(ValueError, match="rank 0"):
        tf.function(two_at_once).get_concrete_function(handle)
    state = tf.function(hop.state).get_concrete_function(handle)
    assert state.output_shapes.iteration == [] and state.output_shapes.counts == [13]
