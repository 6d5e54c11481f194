"""Why a call failed: errors as TensorFlow words them, of servers that are played here."""

import pytest
import tensorflow as tf

from tf_recsync.cluster import diagnosis, making_functions
from tf_recsync.cluster.diagnosis import Cause, diagnose
from tf_recsync.cluster.membership import Membership

WORKER, PS = ("worker", 0), ("ps", 0)


class Played:
    """A cluster of a worker and a parameter server."""

    ps = 1

    def __init__(self):
        self.membership = Membership({"worker": 1, "ps": 1})
        self.membership.connected({WORKER: 1, PS: 1}, all_answer=True)


@pytest.fixture
def gone(monkeypatch):
    """The servers that can't be reached."""
    servers: set[str] = set()
    monkeypatch.setattr(diagnosis, "is_reachable", lambda device: device not in servers)
    return servers


def error(kind, message):
    return kind(None, None, message)


@tf.function(autograph=False)
def doubled(x):
    return 2 * x


TRACED = doubled.get_concrete_function(tf.TensorSpec([])).name.decode()
UNREGISTERED = "Op type not registered '{}' in binary running on vm. Make sure the Op and Kernel"

CAUSES = [
    (error(tf.errors.UnavailableError, "Socket closed"), Cause.TRANSIENT),
    (
        error(
            tf.errors.InvalidArgumentError,
            "Unable to find the relevant tensor remote_handle: Op ID: 3",
        ),
        Cause.TRANSIENT,
    ),
    (
        error(
            tf.errors.InvalidArgumentError,
            "Client for target /job:worker/replica:0/task:1 not found.",
        ),
        Cause.TRANSIENT,
    ),
    (
        error(
            tf.errors.InvalidArgumentError,
            "Resource input tensor contains an invalid device. This might happen when the client "
            "has connected to a different cluster, or some remote workers have been restarted.",
        ),
        Cause.TRANSIENT,
    ),
    (
        error(
            tf.errors.InvalidArgumentError,
            "/job:worker/replica:0/task:2/device:CPU:0 unknown device. [Op:Identity] name:",
        ),
        Cause.TRANSIENT,
    ),
    (
        error(
            tf.errors.AbortedError,
            "Unable to find a context_id matching the specified one (12). Perhaps the worker was "
            "restarted, or the context was GC'd?",
        ),
        Cause.TRANSIENT,
    ),
    (error(tf.errors.InternalError, "Unable to parse request"), Cause.TRANSIENT),
    (error(tf.errors.InternalError, "Unable to parse the user's file"), Cause.USER),
    (error(tf.errors.InvalidArgumentError, "/job:mine/task:0 unknown device."), Cause.USER),
    (
        error(
            tf.errors.NotFoundError,
            "'__inference_steps_5' is neither a type of a primitive operation nor a name of a "
            "function registered in binary",
        ),
        Cause.FORGOTTEN,
    ),
    (
        error(
            tf.errors.InternalError,
            "Can't find a function: node={{node PartitionedCall}} = PartitionedCall[Tin=[]]",
        ),
        Cause.FORGOTTEN,
    ),
    (
        error(
            tf.errors.FailedPreconditionError,
            "Could not find required function definition __inference_Dataset_map_3",
        ),
        Cause.FORGOTTEN,
    ),
    (
        error(
            tf.errors.NotFoundError, "On worker:1: Failed to find function '__inference_steps_8'"
        ),
        Cause.FORGOTTEN,
    ),
    (error(tf.errors.InvalidArgumentError, UNREGISTERED.format(TRACED)), Cause.FORGOTTEN),
    (error(tf.errors.InvalidArgumentError, UNREGISTERED.format("UsersOwnOp")), Cause.USER),
    (error(tf.errors.InvalidArgumentError, "indices[0] = 9 is not in [0, 4)"), Cause.USER),
    (error(tf.errors.NotFoundError, "clicks.csv; No such file or directory"), Cause.USER),
]


@pytest.mark.parametrize(("raised", "cause"), CAUSES)
def test_where_all_are_there_the_error_says_what_it_is(gone, raised, cause):
    found = diagnose(Played(), raised, {WORKER: 0})
    assert found.cause is cause
    assert found.server == (None if cause is Cause.USER else WORKER)


@pytest.mark.parametrize(("raised", "_"), CAUSES)
def test_who_is_gone_explains_any_error(gone, raised, _):
    gone.add("/job:worker/replica:0/task:0")
    assert diagnose(Played(), raised, {WORKER: 0}).server == WORKER
    gone.add("/job:ps/replica:0/task:0")
    assert diagnose(Played(), raised, {WORKER: 0}).cause is Cause.LOST_PS
    found = diagnose(Played(), raised, {PS: 0, WORKER: 0}, spared=[PS])
    assert (found.cause, found.server) == (Cause.LOST_SERVER, PS)


def test_a_server_that_answers_in_another_life_is_lost_to_the_call(gone):
    cluster = Played()
    cluster.membership.lost(WORKER, None, "in a test")
    cluster.membership.readmitted(WORKER)
    found = diagnose(cluster, CAUSES[0][0], {WORKER: 0})
    assert (found.cause, found.server) == (Cause.LOST_SERVER, WORKER)


def test_a_server_that_is_taken_in_again_while_it_is_asked_is_lost_to_the_call(monkeypatch):
    cluster = Played()

    def taken_in_meanwhile(device):
        if device.startswith("/job:worker"):
            cluster.membership.lost(WORKER, None, "in a test")
            cluster.membership.readmitted(WORKER)
        return True

    monkeypatch.setattr(diagnosis, "is_reachable", taken_in_meanwhile)
    found = diagnose(cluster, error(tf.errors.AbortedError, "It was"), {WORKER: 0})
    assert (found.cause, found.server) == (Cause.LOST_SERVER, WORKER)


def test_functions_are_made_again_where_a_server_was_left_out_just_then(monkeypatch):
    monkeypatch.setattr(making_functions, "_RETRY_SECONDS", 0.0)
    left_out = "Client for target /job:ps/replica:0/task:0 not found."
    errors = [error(tf.errors.InvalidArgumentError, left_out)] * 2

    def make():
        if errors:
            raise errors.pop()
        return "made"

    assert making_functions.making_functions(make) == "made"


@pytest.mark.parametrize(
    ("message", "calls"),
    [("Client for target /job:ps/replica:0/task:0 not found.", 10), ("Incompatible shapes", 1)],
)
def test_functions_that_can_not_be_made_raise_an_error(monkeypatch, message, calls):
    monkeypatch.setattr(making_functions, "_RETRY_SECONDS", 0.0)
    asked = []

    def make():
        asked.append(True)
        raise error(tf.errors.InvalidArgumentError, message)

    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        making_functions.making_functions(make)
    assert len(asked) == calls
