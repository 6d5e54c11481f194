"""Training that goes on after a parameter server was lost, without a new program."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import keras
import tensorflow as tf
from absl import logging

from tf_recsync.cluster import Cluster, Server, reason
from tf_recsync.shown_variable import ShownVariable, shown
from tf_recsync.strategies.comebacks import Comebacks
from tf_recsync.strategies.data_position import DataPosition
from tf_recsync.strategies.distributed_dataset import DistributedIterator
from tf_recsync.strategies.model_variables import variables_of
from tf_recsync.strategies.watched_calls import check_parameter_servers
from tf_recsync.synchronization.seeds import drawn_state, is_seed
from tf_recsync.synchronization.synchronizer import Crew

if TYPE_CHECKING:
    from tf_recsync.strategies.train_function import TrainFunction

_RETRY_SECONDS = 0.5  # Between two looks at whether a server is back.
# For a second after an old connection broke, gRPC refuses the calls of one server to another.
_SETTLE_SECONDS = 1.5
_LOG_SECONDS = 30.0


@dataclasses.dataclass(frozen=True)
class Recovery:
    """How training goes on after a parameter server was lost.

    Attributes:
        restore: `restore(variables)` restores those that were on lost servers, and have been made
            anew; it may set others, too. It returns where in the data training was then, to go back
            there; None: it goes on with what it has.
        timeout: for how many seconds a server is waited for.
        last: what can be restored, in words, for errors.
    """

    restore: Callable[[Sequence[ShownVariable]], DataPosition | None]
    timeout: float
    last: Callable[[], str]


class _ObserverFailed(Exception):
    """What somebody has raised, its cause, who was told of what happens while a server is away."""


Lives = dict[Server, tuple[int, int]]  # See `Cluster.life`.


def lost_servers(cluster: Cluster, spared: set[Server], lives: Lives) -> set[Server]:
    """The parameter servers that are known to be lost, but for those that are spared.

    Args:
        cluster: the connected cluster.
        spared: those that nobody needs, or without which others go on.
        lives: those in which they got what they are to have. One that was started again is there,
            if it was taken in with another one, and has none of that.
    """
    now = cluster.lives("ps")
    away = cluster.membership.away("ps")
    return (away | {server for server in lives if now[server] != lives[server]}) - spared


def find_lost(cluster: Cluster, error: Exception, spared: set[Server], lives: Lives) -> set[Server]:
    """The parameter servers whose loss has led to an error; asks them, so calls are to be watched.

    Args:
        cluster: the connected cluster.
        error: that training has ended with.
        spared: see `lost_servers`.
        lives: see there.
    """
    found = lost_servers(cluster, spared, lives)
    if not found and isinstance(error, (tf.errors.OpError, RuntimeError)):
        try:
            check_parameter_servers(cluster, error, spared)
        except RuntimeError:
            found = lost_servers(cluster, spared, lives)
    return found


def recovered(
    function: TrainFunction, error: Exception, iterator: DistributedIterator | None
) -> bool:
    """Has training go on that has failed as a parameter server was lost.

    Args:
        function: what trains.
        recovery: how it goes on.
        cluster: the connected cluster.
        error: that it has failed with.
        iterator: of the pass; None between two passes.

    Returns:
        False if it has failed for another reason.

    Raises:
        RuntimeError: if a server does not come back in time.
        tf.errors.OpError: if something else goes wrong meanwhile.
        Exception: what an observer raises that is told meanwhile.
    """
    deadline, cluster = time.monotonic() + function.recovery.timeout, function.cluster
    spared: set[Server] | None = None
    while True:
        with function.watched():
            # Once, as long as it is known what was used.
            spared = function.spared() if spared is None else spared
            # Of those that are back and not restored, there is nothing but zeros.
            found = find_lost(cluster, error, spared, function.lives)
            function.unrestored = function.unrestored | found
        if not function.unrestored:
            return False
        try:
            _recover(function, iterator, spared, deadline)
            function.unrestored = set()
            return True
        except _ObserverFailed as failure:  # That ends `fit`, whoever is lost.
            raise failure.__cause__ from None
        except Exception as failure:  # Keras wraps those of servers into its own.
            # Another one may have been lost meanwhile, or the same one again.
            lost = lost_servers(cluster, spared, function.lives)
            if time.monotonic() > deadline or not lost:
                raise
            logging.warning("Recovery begins again: %s", reason(failure))
            error = failure


def _recover(
    function: TrainFunction,
    iterator: DistributedIterator | None,
    spared: set[Server],
    deadline: float,
) -> None:
    lost, cluster, recovery = function.unrestored, function.cluster, function.recovery
    began = time.monotonic()
    logging.warning("Training pauses, as %s was lost; %s.", names_of(lost), recovery.last())
    function.leave_pass(iterator)
    with cluster.dispatch_scope():
        _wait_for(function, deadline, spared)
    lives = cluster.lives("ps")
    # Others that nobody has missed may have been taken in with these.
    lost = function.unrestored = lost | lost_servers(cluster, spared, function.lives)
    function.lives = lives
    with function.watched():
        position = recovery.restore(function.make_anew(lost))
        function.go_on_with_pass(iterator, position)
    seconds = time.monotonic() - began
    logging.warning("Training goes on: %s is back after %.1f s.", names_of(lost), seconds)


def names_of(servers: Iterable[Server]) -> str:
    """Names of servers, for messages."""
    return ", ".join(f"{job}:{index}" for job, index in sorted(servers))


def _wait_for(function: TrainFunction, deadline: float, spared: set[Server]) -> None:
    """Waits until lost servers are up again, and takes them into the cluster.

    Args:
        cluster: the connected cluster.
        servers: the lost ones.
        recovery: how training goes on.
        deadline: until when (time.monotonic).
        spared: those that need not be there.

    Raises:
        RuntimeError: if that takes too long.
        _ObserverFailed: if an observer of the function, which is told meanwhile, raises an error.
    """

    def is_late(seconds: float) -> bool:
        time.sleep(seconds)
        return time.monotonic() > deadline

    recovery = function.recovery
    comebacks = Comebacks(function.cluster, Crew(), is_late, spared)
    waiting = sorted(function.unrestored)
    while waiting := [server for server in waiting if not comebacks.is_back(server)]:
        names = names_of(waiting)
        words = "Training waits for %s, which must be started again."
        logging.log_every_n_seconds(logging.WARNING, words, _LOG_SECONDS, names)
        if is_late(_RETRY_SECONDS):
            raise RuntimeError(
                f"parameter server {names} was lost, and is not back after ps_timeout="
                f"{recovery.timeout:g} s; {recovery.last()}: start it again, then the program"
            )
        try:
            function.tell_observers()
        except Exception as error:
            raise _ObserverFailed from error
    time.sleep(_SETTLE_SECONDS)


def make_anew(model: keras.Model, servers: Iterable[Server]) -> list[ShownVariable]:
    """Makes the variables of a model and its optimizer anew that were on lost servers.

    All their elements are 0, but for the states of random generators, which no checkpoint has:
    these draw new seeds, as layers with equal states would draw the same numbers.
    """
    lost = set(servers)
    found = {id(variable): variable for variable in variables_of(model)}
    # What lets a table decay may have been made by another optimizer.
    tables = [table for table in map(shown, found.values()) if table is not None]
    logs = [table.log_decays._value for table in tables if table.log_decays is not None]
    found.update({id(variable): variable for variable in logs})
    seeds = {id(variable._value) for variable in model.variables if is_seed(variable)}
    made = []
    for variable in found.values():
        spec = tf.DeviceSpec.from_string(variable.device)
        if (spec.job, spec.task) in lost and shown(variable) is not None:
            variable.make_anew()
            if id(variable) in seeds:
                variable.assign(drawn_state())
            made.append(variable)
    return made
