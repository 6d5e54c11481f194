"""Which servers the eager context, and so this process, is connected to.

TensorFlow has one connection a process, and changes it without a time limit. One change is made at
a time: whoever makes one, or waits for one, holds the connection's lock (`connection._lock`).
"""

import contextlib
import copy
import errno
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import tensorflow as tf
from tensorflow.core.protobuf import tensorflow_server_pb2
from tensorflow.python.eager import context

from tf_recsync import _engine
from tf_recsync.cluster import redirections
from tf_recsync.cluster.tf_config import CHIEF, split_address

_MOST_CALLS = 5  # Of a change, that have to be ended.
_CALL_SECONDS = 0.5  # For each of them, before it is ended.
_LOOK_SECONDS = 0.5  # Between two looks at whether to wait no longer.

_own: tensorflow_server_pb2.ServerDef | None = None  # The last that we set.
_listens_on = ""  # Where this process's server was told to listen as it started; "": everywhere.
_pending: list[threading.Thread] = []  # Changes that nobody waits for any more.


def is_ours(server_def: tensorflow_server_pb2.ServerDef) -> bool:
    """Whether it was set here, not by other means."""
    return server_def == _own


class Change(threading.Thread):
    """Changes the connection in a thread of its own, for TensorFlow offers no time limit.

    Those that were left go first, as two at the same time may end the process.
    """

    def __init__(self, change: Callable[[], None]):
        super().__init__(name="tf_recsync_connection", daemon=True)
        self._change = change
        self._earlier = tuple(_pending)
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        for earlier in self._earlier:
            earlier.join()
        try:
            self._change()
        except Exception as error:  # Raised or logged by whoever waits.
            self.error = error


@contextlib.contextmanager
def left_pending(change: Change) -> Iterator[None]:
    """Keeps a change in mind that outlives the waiting for it inside: the next one waits for it."""
    try:
        yield
    finally:  # Also after Ctrl-C.
        if change.is_alive():
            _pending.append(change)


def _never() -> bool:
    return False


def _join(thread: threading.Thread, deadline: float, is_over: Callable[[], bool]) -> None:
    while thread.is_alive() and (left := deadline - time.monotonic()) > 0 and not is_over():
        thread.join(min(left, _LOOK_SECONDS))


def wait_for_pending(deadline: float, what: str, is_over: Callable[[], bool] = _never) -> None:
    """Waits for changes that were left; what they have set counts when they have ended.

    Args:
        deadline: until when, in seconds of time.monotonic().
        what: for messages.
        is_over: whether to wait no longer, whatever the deadline.
    """
    while _pending:
        _join(_pending[0], deadline, is_over)
        if _pending[0].is_alive():
            raise RuntimeError(f"{what}: an earlier change of the connection has not ended yet")
        del _pending[0]


def run_with_limit(
    change: Callable[[], None],
    deadline: float,
    what: str,
    end_waits: Callable[[], list[str]],
    is_over: Callable[[], bool] = _never,
) -> None:
    """Runs `change`, after one that is still going on, until `deadline` at most.

    Args:
        change: as of `Change`.
        deadline: in seconds of time.monotonic().
        what: for messages.
        end_waits: ends calls to servers that do not answer, and returns these, in words. So a
            change that runs out of time fails, instead of keeping all later ones waiting.
        is_over: as of `wait_for_pending`.
    """
    wait_for_pending(deadline, what, is_over)
    thread = Change(change)
    silent: list[str] = []
    with left_pending(thread):
        _join(thread, max(deadline, time.monotonic() + 1.0), is_over)
        for _ in range(_MOST_CALLS):  # A call that is ended may be followed by another.
            if not thread.is_alive():
                break
            silent = end_waits() or silent
            thread.join(_CALL_SECONDS)
    if not thread.is_alive():
        if thread.error is None:
            return
        if not silent:
            raise thread.error
    names = f"; {', '.join(silent)} did not answer" if silent else ""
    raise RuntimeError(f"{what}: TensorFlow did not finish in time{names}") from thread.error


def make(
    servers: Mapping[str, Sequence[str] | Mapping[int, str]], chief_address: str
) -> tensorflow_server_pb2.ServerDef:
    """The definition of these servers, with this process as their chief."""
    session_config = copy.deepcopy(context.context().config)
    if "worker" in servers:  # As tf.config.experimental_connect_to_cluster does.
        session_config.experimental.collective_group_leader = "/job:worker/replica:0/task:0"
    spec = tf.train.ClusterSpec({**servers, CHIEF: [chief_address]})
    return tensorflow_server_pb2.ServerDef(
        cluster=spec.as_cluster_def(),
        job_name=CHIEF,
        task_index=0,
        protocol="grpc",
        default_session_config=session_config,
    )


def listens_on(chief_address: str) -> str | None:
    """Where this process's server listens that `connect` would keep for a chief.

    Args:
        chief_address: The chief's, "host:port".

    Returns:
        A numeric address, "" for all interfaces, or None if there is no such server.
    """
    current = context.get_server_def()
    return None if current is None or _chief_of(current) != chief_address else _listens_on


def connect(server_def: tensorflow_server_pb2.ServerDef) -> None:
    """Connects the eager context; keeps the chief's server if its address stays.

    Raises:
        RuntimeError: the chief's server can't listen.
        tf.errors.OpError: a server failed meanwhile.
    """
    global _own, _listens_on
    eager_context = context.context()
    current = eager_context.get_server_def()
    try:
        if listens_on(_chief_of(server_def)) is not None:
            update(server_def)
        else:
            # TensorFlow's first connection keeps Python's lock until all servers have answered,
            # a later one does not: the first is to nobody.
            alone = make({}, _chief_of(server_def))
            try:
                eager_context.set_server_def(alone)
                eager_context.ensure_initialized()
            except tf.errors.UnknownError as error:  # It doesn't say what keeps the server away.
                refusal = redirections.refusal_to_listen(split_address(_chief_of(server_def))[1])
                if refusal is None:
                    raise
                raise _not_listening(_chief_of(server_def), refusal) from error
            _listens_on = _engine.confined_address()
            update(server_def)
    except Exception:
        # The context stores the new one before it connects; it shall not keep a wrong one.
        eager_context._server_def = _own = current
        raise


def update(server_def: tensorflow_server_pb2.ServerDef) -> None:
    """Tells the servers of each other, and those that are new of this process."""
    global _own
    _own = server_def  # The context stores it, too, before it connects.
    try:
        context.context().update_server_def(server_def)
    finally:
        # If a server fails meanwhile, TensorFlow keeps them, also on one that was started again.
        forget_numbers()


def forget_numbers() -> None:
    """Has TensorFlow send its tensors of Python's numbers anew, which it keeps on each server.

    If a server has lost them, or a connection broke while they were sent, calls would name tensors
    that it does not have, again and again.
    """
    context.context()._clear_caches()


def _not_listening(address: str, refusal: OSError) -> RuntimeError:
    """What the user is told if this process can't listen at the chief's address."""
    hint = {
        errno.EADDRINUSE: "; another process has the port, perhaps an earlier run of the program",
        errno.EADDRNOTAVAIL: "; the bind address must be an address of this machine",
    }.get(refusal.errno, "")
    host = _engine.confined_address() or "all interfaces"
    return RuntimeError(
        f"the coordinator, chief:0 ({address}), cannot listen on port {split_address(address)[1]} "
        f"of {host}: {refusal.strerror}{hint}"
    )


def _chief_of(server_def: tensorflow_server_pb2.ServerDef) -> str:
    return tf.train.ClusterSpec(server_def.cluster).task_address(CHIEF, 0)
