"""Maintenance of servers while a model is trained on them: collected, and done together."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

import keras
import tensorflow as tf
from absl import logging

from tf_recsync._checks import check_at_least, check_seconds
from tf_recsync.cluster import Cluster, LocalCluster, Server
from tf_recsync.strategies import HopStrategy
from tf_recsync.strategies.comebacks import Comebacks
from tf_recsync.strategies.fit_strategy import FitStrategy
from tf_recsync.synchronization.synchronizer import Crew

__all__ = [
    "Done",
    "Drain",
    "Restart",
    "Window",
]

_RETURN_SECONDS = 20.0  # For a server that is up to end, and for the next one to be taken in.
_RETRY_SECONDS = 0.2

Hook = Callable[[str, int], None]
Moment = Literal["begin", "epoch", "pause", "limit"]


@dataclasses.dataclass(frozen=True)
class Restart:
    """A server's process ends, and another one takes its place.

    Args:
        job: "worker" or "ps".
        index: its task index.
        restart: `restart(job, index)` ends the server and starts it again, at its address, or has
            somebody else do so. It is called in the thread of `fit`, while no step is in flight.
            If a server is up when it returns, training waits up to 20 seconds for the new process
            to take part, and if the old one has not ended by then, that takes part again. If none
            is up, a new process takes part when it is. None (the default): the `LocalCluster`
            restarts it.

    Raises:
        ValueError: if an argument is wrong.

    Example:

    >>> str(Restart("ps", 1))
    'restart ps:1'
    """

    job: Literal["worker", "ps"]
    index: int
    restart: Hook | None = None

    def __post_init__(self) -> None:
        """Checks what can be checked without a cluster."""
        if self.job not in ("worker", "ps"):
            raise ValueError(
                f'job must be "worker" or "ps", not {self.job!r}; a reader is restarted at any '
                "time, see docs/operations.md"
            )
        check_at_least("index", self.index, 0)
        _check_hook("restart", self.restart)

    @property
    def server(self) -> Server:
        """Job and index."""
        return self.job, self.index

    @property
    def hook(self) -> Hook | None:
        """What the user does it by."""
        return self.restart

    def __str__(self) -> str:
        return f"restart {self.job}:{self.index}"


@dataclasses.dataclass(frozen=True)
class Drain:
    """A worker takes no more batches, and its process ends; the others go on without it.

    When it is started again, it takes part again, as a worker does that was lost.

    Args:
        worker: its task index.
        stop: `stop("worker", worker)` ends its process, or has somebody else do so; called as
            `restart` of a `Restart` is. None (the default): the `LocalCluster` does it.

    Raises:
        ValueError: if an argument is wrong.

    Example:

    >>> str(Drain(worker=3))
    'drain worker:3'
    """

    worker: int
    stop: Hook | None = None

    def __post_init__(self) -> None:
        """Checks what can be checked without a cluster."""
        check_at_least("worker", self.worker, 0)
        _check_hook("stop", self.stop)

    @property
    def server(self) -> Server:
        """Job and index."""
        return "worker", self.worker

    @property
    def hook(self) -> Hook | None:
        """What the user does it by."""
        return self.stop

    def __str__(self) -> str:
        return f"drain worker:{self.worker}"


@dataclasses.dataclass(frozen=True)
class Done:
    """What a `Window` has done; times are seconds of the Unix epoch.

    Attributes:
        event: what was requested.
        moment: when it was done: "begin", when training began; "epoch", at the end of one;
            "pause", while training stood still, as for a publication or a checkpoint; "limit",
            when `within_seconds` were over.
        requested: when it was requested.
        began: when training stood still for it.
        ended: when that was over.
        is_back: whether the server took part again then.
    """

    event: Restart | Drain
    moment: Moment
    requested: float
    began: float
    ended: float
    is_back: bool

    def __str__(self) -> str:
        waited, took = self.began - self.requested, self.ended - self.began
        back = "is back" if self.is_back else "is away"
        return f"{self.event}: after {waited:.1f} s ({self.moment}), in {took:.1f} s; it {back}"


class Window(keras.callbacks.Callback):
    """Collects maintenance of servers, and does it together when it costs least.

    Requests come from any thread, while `fit` runs or before. They are done at the next end of an
    epoch. Those about parameter servers are also done while training stands still anyway, as for
    a publication or a checkpoint within an epoch; so list the window after such callbacks. When
    `within_seconds` are over since the first request, all that were made until then are
    done after the next step.

    Nothing is lost by that. Steps in flight end before, and what servers hold back of a global
    batch is applied, as at the end of an epoch. A group of a `HierarchicalStrategy` whose server
    is restarted, or a worker that is restarted and holds its copy itself, goes on with its own
    parameters and optimizer state, which this process keeps meanwhile, and with the batches that
    its workers have. Only a worker that ends in the middle of a pass over the data takes those
    batches with it that it had fetched ahead, six at most: at the end of a pass there are none.
    What was lost `strategy.losses(model)` counts.

    If an event fails, `fit` ends with an error that names it. Those after it stay requested, for
    the next `fit`; request the one that failed again.

    Reference: Huang et al. 2021, "Hierarchical Training: Scaling Deep Recommendation Models on
    Large CPU Clusters", section 4.3.

    Args:
        within_seconds: seconds after which what was requested is done at the latest.

    Attributes:
        report: a `Done` for each request that was done, in their order.

    Raises:
        ValueError: if `within_seconds` is not positive; by `fit`, if the model's strategy is none
            of this package's, or an event that was requested before does not fit it.

    Example:

    >>> import tf_recsync as recsync
    >>> window = recsync.maintenance.Window(within_seconds=1800)
    >>> window.request(recsync.maintenance.Drain(worker=3))
    >>> window.request(recsync.maintenance.Restart("ps", 1))
    >>> window.report  # `fit`, with `callbacks=[window]`, has done none of them yet.
    []
    """

    def __init__(self, within_seconds: float):
        super().__init__()
        check_seconds("within_seconds", within_seconds)
        self.report: list[Done] = []
        self._within = float(within_seconds)
        self._lock = threading.Lock()
        self._pending: list[tuple[Restart | Drain, float]] = []  # Guarded by _lock; and when.

    def request(self, event: Restart | Drain) -> None:
        """Has an event done at the next opportunity; from any thread.

        Args:
            event: a `Restart` or a `Drain`.

        Raises:
            ValueError: if it can't be done: it names no server of the cluster, or one that has
                what nobody else has, or one that is requested already; or nobody says how. Before
                `fit` is called the first time, no strategy is known: then `fit` raises it.
        """
        if not isinstance(event, (Restart, Drain)):
            raise ValueError(f"event must be a Restart or a Drain, not {event!r}")
        with self._lock:
            pending = [other for other, _ in self._pending]
            if any(other.server == event.server for other in pending):
                raise ValueError(f"event={event}: {_name(event.server)} is requested already")
            if self.model is not None:
                _check(self.model.distribute_strategy, event, pending)
            self._pending.append((event, time.time()))

    def set_model(self, model):
        super().set_model(model)
        strategy = model.distribute_strategy
        if not isinstance(strategy, FitStrategy):
            raise ValueError(
                f"Window is for servers of a strategy of this package, not for a "
                f"{type(strategy).__name__}"
            )
        with self._lock:
            for event, _ in self._pending:
                others = [other for other, _ in self._pending if other is not event]
                _check(strategy, event, others)

    def on_train_begin(self, logs=None):
        self._do("begin", ("ps", "worker"))

    def on_train_batch_end(self, batch, logs=None):
        with self._lock:
            first = min((when for _, when in self._pending), default=float("inf"))
        if time.time() - first >= self._within:
            self._do("limit", ("ps", "worker"))
        elif self.model.train_function.is_held:
            self._do("pause", ("ps",))

    def on_epoch_end(self, epoch, logs=None):
        self._do("epoch", ("ps", "worker"))

    def _do(self, moment: Moment, jobs: Sequence[str]) -> None:
        """Does what was requested for servers of these jobs."""
        with self._lock:
            due = [(event, when) for event, when in self._pending if event.server[0] in jobs]
        if not due:
            return
        began = time.time()
        function, strategy = self.model.train_function, self.model.distribute_strategy
        is_back: list[bool] = []
        try:
            with function.interrupted(), strategy.cluster.dispatch_scope():
                servers = [event.server for event, _ in due]
                workers = [index for job, index in servers if job == "worker"]
                # What a worker has that is drained would be old when it is back.
                restarted = {event.server for event, _ in due if isinstance(event, Restart)}
                drained = set(servers) - restarted
                for group in strategy.arrangement.groups:
                    if restarted.intersection(group.holders):
                        function.put_aside(group.index, workers)
                holders = [one for group in strategy.arrangement.groups for one in group.holders]
                if function.synchronizer is not None and drained.intersection(holders):
                    with function.watched():
                        function.synchronizer.counted()  # What they have counted goes with them.
                for entry in due:
                    event, _ = entry
                    with self._lock:
                        self._pending.remove(entry)
                    with function.watched():
                        _announce(strategy.cluster, event)
                    is_back.append(_done(strategy.cluster, event))
        finally:
            ended = time.time()
            # Of the first ones, if the next has failed.
            for (event, requested), back in zip(due, is_back, strict=False):
                self.report.append(Done(event, moment, requested, began, ended, back))
                logging.info("Maintenance: %s.", self.report[-1])


def _announce(cluster: Cluster, event: Restart | Drain) -> None:
    """A server is about to end: while it answers, others take back what it has of them."""
    # Somebody else may end it later than its hook returns, and others ask for it meanwhile.
    cluster.membership.ending(event.server)
    how = f"as maintenance was requested ({event})"
    cluster.membership.lost(event.server, None, how)
    try:
        cluster.tell_members()
    except BaseException:  # As by Ctrl-C: nobody has ended it.
        cluster.membership.stays(event.server)
        raise


def _done(cluster: Cluster, event: Restart | Drain) -> bool:
    """Does what was requested, while nothing is in flight; whether the server is back."""
    try:
        if event.hook is not None:
            event.hook(*event.server)
        elif isinstance(event, Drain):
            cluster.kill(*event.server)
        else:
            cluster.restart(*event.server)
    except BaseException as error:  # Ctrl-C, too.
        cluster.membership.stays(event.server)
        if not isinstance(error, Exception):
            raise
        raise RuntimeError(f"maintenance failed: {event}: {error}") from error
    if isinstance(event, Drain) or not cluster.is_up(*event.server):
        return False
    comebacks, deadline = Comebacks(cluster, Crew(), _wait), time.monotonic() + _RETURN_SECONDS
    # For a second after the old connection broke, calls to the new process fail, too.
    while not comebacks.is_back(event.server):
        if time.monotonic() >= deadline:
            cluster.membership.stays(event.server)  # If it still answers, nobody has ended it.
            return comebacks.is_back(event.server)
        _wait(_RETRY_SECONDS)
    return True


def _wait(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _check(
    strategy: tf.distribute.Strategy, event: Restart | Drain, pending: Sequence[Restart | Drain]
) -> None:
    """Raises a ValueError if an event can't be done on a strategy's cluster."""
    cluster, (job, index) = strategy.cluster, event.server
    size = cluster.workers if job == "worker" else cluster.ps
    if index >= size:
        raise ValueError(f"event={event}: the cluster has {job}:0 to {job}:{size - 1}")
    if event.hook is None:
        _check_local(cluster, event)
    if job == "ps":
        _check_replaceable(strategy, event)
        return
    if isinstance(strategy, HopStrategy):
        raise ValueError(
            f"event={event}: under a HopStrategy neighbors need each other; end training, do it, "
            "and go on from a checkpoint"
        )
    if isinstance(event, Drain):
        drained = {other.worker for other in pending if isinstance(other, Drain)} | {index}
        if all(m.index in drained or not m.is_there for m in cluster.membership.members("worker")):
            raise ValueError(f"event={event}: no worker would be left")


def _check_local(cluster: Cluster, event: Restart | Drain) -> None:
    """Raises a ValueError if a cluster can't do it itself."""
    argument = "stop" if isinstance(event, Drain) else "restart"
    if not isinstance(cluster, LocalCluster):
        raise ValueError(
            f"event={event}: {argument} must be a function that does it, as only the servers of a "
            "LocalCluster are processes of this program"
        )
    jobs = {"worker": cluster.workers, "ps": cluster.ps}
    others = [(j, i) for j, size in jobs.items() for i in range(size) if (j, i) != event.server]
    pid = cluster.pid(*event.server)
    sharing = [_name(other) for other in others if cluster.pid(*other) == pid]
    if sharing or pid == os.getpid():
        raise ValueError(
            f"event={event}: {_name(event.server)} shares its process with "
            f"{', '.join(sharing) or 'this program'}; make the LocalCluster with processes=None"
        )


def _check_replaceable(strategy: FitStrategy, event: Restart) -> None:
    """Raises a ValueError if a parameter server has what can't be given to another process."""
    arrangement = strategy.arrangement
    index = event.index
    if arrangement.has_copies and any(index in group.servers for group in arrangement.groups):
        if len(arrangement.groups) > 1:
            return
        what = "the parameters of the only group"
    elif index in arrangement.sync_ps:
        what = "the central copy"
    elif arrangement.has_copies:
        what = "embedding tables"
    else:
        what = "parameters of the model"
    raise ValueError(
        f"event={event}: ps:{index} has {what}, which nobody else has; end training, save the "
        "model, restart the server, and load it into a new model"
    )


def _check_hook(name: str, hook: Hook | None) -> None:
    if hook is not None and not callable(hook):
        raise ValueError(f"{name} must be a function of job and index, or None, not {hook!r}")


def _name(server: Server) -> str:
    return f"{server[0]}:{server[1]}"
