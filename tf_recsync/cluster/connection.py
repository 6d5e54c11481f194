"""The connection of this process, the coordinator, to the servers of a cluster."""

import collections
import contextlib
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from absl import logging
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import context

from tf_recsync import _engine
from tf_recsync._checks import check_seconds, integer
from tf_recsync.cluster import (
    data_service,
    grpc_settings,
    left_behind,
    proxies,
    redirections,
    server_defs,
    signs_of_life,
    tf_config,
)
from tf_recsync.cluster.membership import Membership, Server
from tf_recsync.cluster.one_by_one import OneByOne
from tf_recsync.cluster.silence_watch import SilenceWatch

_QUIET_DISCONNECT_SECONDS = 1.0  # How long `close` waits before the servers are stopped.
_DISCONNECT_SECONDS = 4.0  # And after that, before servers that are silent are cut off.
_CUT_SECONDS = 2.0  # And after that.
_FEWER_SECONDS = 60.0  # To connect when the time to wait for all servers is over.
_CHANGE_SECONDS = 5.0  # How long `close` waits for another change of the connection.
_ANSWER_SECONDS = 10.0  # For a server to answer in an attempt.

# The eager context, and with it the connection, belongs to the whole process. Held by whoever
# changes it, see `server_defs`.
_lock = threading.RLock()
_connected: "Cluster | None" = None  # Guarded by _lock.


class Cluster:
    """The servers, `worker`, `ps` and `reader`, that this process coordinates.

    Use `LocalCluster` or `cluster_from_tf_config` to make one. One cluster at a time can be
    connected in a process; close it to connect another.

    Attributes:
      cluster_spec: The servers as `tf.train.ClusterSpec`.
      resolver: The same as a `tf.distribute.cluster_resolver.ClusterResolver`.
      workers: The number of workers.
      ps: The number of parameter servers.
      readers: The number of readers, which run input pipelines. Without any, this process does.
      membership: What each of the servers does, and who is lost.
      watch: Asks servers for which somebody waits for signs of life.
      data_services: Hand the workers their data, from this process.

    Example:

    >>> import tf_recsync as recsync
    >>> with recsync.LocalCluster(workers=2, ps=1, processes=0) as cluster:
    ...     cluster.connect()
    ...     members = recsync.AsyncStrategy(cluster).members()
    >>> [f"{member.job}:{member.index}" for member in members]
    ['worker:0', 'worker:1', 'ps:0']
    """

    def __init__(
        self,
        servers: Mapping[str, Sequence[str]],
        *,
        chief_address: str,
        bind_address: str | None,
    ):
        """Describes a cluster; starts nothing.

        Args:
          servers: Addresses "host:port" of the jobs "worker", "ps" and, optionally, "reader" and
            "chief".
          chief_address: "host:port" at which the servers reach this process.
          bind_address: Numeric address on which TensorFlow's servers in this process listen
            from `connect` on; None leaves it to TensorFlow: all interfaces.
        """
        self._addresses = {job: list(addresses) for job, addresses in servers.items()}
        # TensorFlow's servers are the others.
        self._readers = self._addresses.pop(tf_config.READER, [])
        self._chief_address = chief_address
        self._bind_address = bind_address
        self._closed = False
        self._is_over = False  # Whether `close` has done all that it does.
        self._has_warned = False  # Of what was made before the connection.
        self.workers = len(self._addresses.get("worker", ()))
        self.ps = len(self._addresses.get("ps", ()))
        self.readers = len(self._readers)
        self.membership = Membership(
            {"worker": self.workers, "ps": self.ps, "reader": self.readers}
        )
        self.watch = SilenceWatch(self.membership, lambda server: self.probe(*server))
        self._passes: weakref.WeakSet = weakref.WeakSet()
        self._passes_lock = threading.Lock()
        self._scopes: set[object] = set()  # Dispatch scopes that threads are in.
        # Of each address, what connections to it have at their other end, as far as is known, and
        # what they have ever had: a name may get another address, or none, when its machine is
        # gone.
        self._peers: dict[str, set[signs_of_life.Peer]] = {}
        self._peers_ever: dict[str, set[signs_of_life.Peer]] = {}
        # How often each server was readmitted as if it had been restarted; by job and index.
        self._taken_anew: collections.Counter = collections.Counter()
        self.cluster_spec = tf.train.ClusterSpec(self._addresses)
        self.data_services = data_service.DataServices(self.host)
        # Of threads that have servers build their parts of a function at its first call: side by
        # side, TensorFlow's requests were garbled once in a while.
        self.building = OneByOne()
        self._readers_lock = threading.Lock()
        self._reader_losses: data_service.ReaderLosses | None = None  # Guarded by _readers_lock.
        has_chief = tf_config.CHIEF in self._addresses
        self.resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            self.cluster_spec,
            task_type=tf_config.CHIEF if has_chief else None,
            task_id=0 if has_chief else None,
            rpc_layer="grpc",
        )

    @property
    def host(self) -> str:
        """The name or address by which the servers reach this process."""
        return tf_config.split_address(self._chief_address)[0]

    @property
    def reader_service(self) -> str:
        """The address of the readers' data service, "grpc://host:port"; they have to be there."""
        return f"grpc://{self._readers[0]}"

    @property
    def reader_losses(self) -> data_service.ReaderLosses:
        """Counts the readers that are lost, from when it is asked for the first time.

        Raises:
            RuntimeError: if the cluster is closed.
        """
        with self._readers_lock:
            self.check_open()
            if self._reader_losses is None:
                self._reader_losses = data_service.ReaderLosses(self._readers)
            return self._reader_losses

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def check_open(self) -> None:
        """Raises a RuntimeError if `close` was called."""
        if self._closed:
            raise RuntimeError(
                f"{self} is closed, and what lay on its servers is gone: make a new cluster, a "
                "strategy on it and the model in its scope(), and load what was saved"
            )

    def add_pass(self, run: Any) -> None:
        """Keeps a pass of the workers over data in mind, until it is dropped."""
        with self._passes_lock:
            self._passes.add(run)

    def passes(self) -> list[Any]:
        """The passes that have not been dropped."""
        with self._passes_lock:
            return list(self._passes)

    def connect(self, timeout: float = 60.0, *, min_workers: int | None = None) -> None:
        """Connects this process to the servers as job "chief".

        Connect before you make variables, datasets or other resources: TensorFlow renames
        this process's devices when it connects for the first time, and what was made before
        can no longer be used.

        If this cluster is connected, waits until its parameter servers can be used, also those
        to which a connection has broken meanwhile. If one was started again, `readmit` takes all
        such servers in.

        All servers see each other (no device filters). For the whole process, it sets the
        environment variables `TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE=False` and
        `TF_PS_DISABLE_ASYNC_EXECUTOR_GLOBALLY=True`, without which threads that drive
        different workers block each other, and `GRPC_FAIL_FAST=True`, with which calls to a
        dead server fail with `tf.errors.UnavailableError` at once. If
        `TF_GRPC_WORKER_CACHE_QUEUES` is not set, it sets it to 4, where TensorFlow would have
        64 threads for answers.

        Args:
          timeout: Seconds to wait for the servers to be up, and for TensorFlow to connect to
            them; default 60.
          min_workers: How many workers suffice if the others are not up within `timeout`, after
            which TensorFlow has a minute, or `timeout` again, to connect to those that are; all
            parameter servers and readers have to be. Training begins without those that are
            missing, as if they had been lost, and takes each in when it is up. Default None:
            all workers. For a cluster that is connected it has no meaning.

        Raises:
          RuntimeError: This process is connected to another cluster, this one is closed, its
            bind address comes too late (the server of this process listens elsewhere), a server
            was not up in time, or this process cannot listen at the chief's address; the message
            names it.
          ValueError: `timeout`, `min_workers` or the bind address is wrong.
        """
        timeout = check_seconds("timeout", timeout)
        deadline = time.monotonic() + timeout
        spare = 0
        if min_workers is not None:
            spare = self.workers - integer("min_workers", min_workers, 1, self.workers)
        if not self._connect(timeout, deadline, spare):
            self._reach_parameter_servers(timeout, deadline)

    def start_alone(self) -> None:
        """Starts this process's server, and connects it to nobody yet; see `device_names`."""
        with _lock:
            self._prepare_network()
            server_defs.connect(server_defs.make({}, self._chief_address))

    def _connect(self, timeout: float, deadline: float, spare: int) -> bool:
        """Connects, without `spare` workers at most; False if this cluster is connected."""
        global _connected
        with _lock:
            self.check_open()
            if _connected is self:
                return False
            if _connected is not None:
                raise RuntimeError(
                    f"this process is connected to another cluster, {_connected}, and TensorFlow "
                    "knows one at a time; call close() on that one first"
                )
            server_defs.wait_for_pending(deadline, "connecting", lambda: self._closed)
            current = context.get_server_def()
            if current is not None and not server_defs.is_ours(current):
                raise RuntimeError(
                    "this process is connected to a cluster by other means, like "
                    "tf.distribute.ParameterServerStrategy or "
                    "tf.config.experimental_connect_to_cluster; connect by this cluster only"
                )
            if current is None and not self._has_warned:
                self._has_warned = True
                left_behind.warn()
            self._prepare_network()
            os.environ["TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE"] = "False"
            os.environ["TF_PS_DISABLE_ASYNC_EXECUTOR_GLOBALLY"] = "True"
            grpc_settings.apply()
            servers = self._without([]) | {tf_config.READER: dict(enumerate(self._readers))}
            limit = deadline
            redirections.keep_python_running(connected=True)
            redirections.filter_logs()

            def attempt() -> None:
                nonlocal limit
                missing = signs_of_life.wait_until(
                    self._while_open(signs_of_life.greets), servers, timeout, deadline, spare
                )
                if missing and limit == deadline:
                    limit = time.monotonic() + max(timeout, _FEWER_SECONDS)
                    logging.warning(
                        "Connecting without servers not up within %g s: %s.",
                        timeout,
                        signs_of_life.in_words(missing),
                    )
                present = self._without([("worker", index) for _, index, _ in missing])
                server_def = server_defs.make(present, self._chief_address)
                self._change(lambda: server_defs.connect(server_def), limit, "connecting")

            self._repeat_if_unavailable(attempt, lambda: limit, timeout)
            _connected = self
            self._note_members(all_answer=True)
        self._look_up(self._all_addresses())
        logging.info("Connected to %s.", self)
        return True

    def _reach_parameter_servers(self, timeout: float, deadline: float) -> None:
        """Waits until all run ops for this process.

        After a connection has broken, gRPC lets calls fail for a second and more before it
        connects again.
        """
        self.watch.settle()  # It may be cutting off one that was silent and answers by now.
        missing = range(self.ps)
        while True:
            self.check_open()
            probes = {index: self.probe("ps", index) for index in missing}
            limit = min(deadline, time.monotonic() + _ANSWER_SECONDS)
            for index, probe in probes.items():
                probe.join(max(0.0, limit - time.monotonic()))
                if probe.is_alive():
                    # It stands still, or a machine between has forgotten the connection.
                    self.cut_off("ps", index)
            missing = [index for index, probe in probes.items() if not probe.reachable]
            for index in set(probes).difference(missing):
                self.membership.readmitted(("ps", index))
            if not missing:
                return
            servers = [("ps", i, self._addresses["ps"][i]) for i in missing]
            error = signs_of_life.not_up_error(timeout, servers)
            if any(probe.answered and not probe.reachable for probe in probes.values()):
                # It doesn't know us: it was started again.
                try:
                    self.readmit(
                        max(0.1, min(_ANSWER_SECONDS, deadline - time.monotonic())),
                        without=self._absent_workers(),
                    )
                except (RuntimeError, tf.errors.OpError) as reason:
                    error.__cause__ = reason  # Such as a worker that is not up.
            if time.monotonic() >= deadline:
                raise error
            time.sleep(signs_of_life.RETRY_SECONDS)

    def readmit(
        self,
        timeout: float = 60.0,
        anew: Sequence[tuple[str, int]] = (),
        without: Collection[int | Server] | Callable[[], Collection[Server]] = (),
        *,
        up_timeout: float | None = None,
    ) -> None:
        """Makes servers usable again that were killed and have been started again.

        Resources on the other servers stay; those of a restarted server are lost and have to
        be made anew. Calls of other threads go on meanwhile, if they were dispatched in a
        `dispatch_scope`; TensorFlow waits for the end of those that were not.

        A server that was up all the time can lack functions ("neither a type of a primitive
        operation nor a name of a function registered") that were traced while the connection to
        it was broken: TensorFlow does not send them again. Readmit such a server anew.

        Args:
          timeout: Seconds to wait for all servers to be up and readmitted; default 60.
          anew: Servers, as ("worker" or "ps", index), that are treated as if they had been
            restarted: their resources are lost, and they get all functions again; default none.
          without: Workers, by index, and other servers, as ("ps", index), that need not be up and
            are left out, until they are readmitted; default none. A function tells
            them when no other thread readmits servers any more.
          up_timeout: Seconds of these to wait for servers to be up, at least 0; default all.

        Raises:
          RuntimeError: The cluster is not connected, or a server was not up in time.
          ValueError: `timeout` or `up_timeout` is wrong, or `anew` or `without` names no server of
            the cluster.
          tf.errors.OpError: A server failed meanwhile; try again.
        """
        timeout = check_seconds("timeout", timeout)
        up_timeout = timeout if up_timeout is None else up_timeout
        if not 0 <= up_timeout <= timeout:
            raise ValueError(f"up_timeout must be from 0 to timeout={timeout:g}, got {up_timeout}")
        named = () if callable(without) else without
        left_out = [s if isinstance(s, tuple) else ("worker", s) for s in named]
        self._without(left_out, "without")
        self._without([*left_out, *anew])
        with _lock:
            if _connected is not self:
                raise RuntimeError("readmit needs a connected cluster; call connect() first")
            self.check_open()  # It may be about to be closed.
            if callable(without):
                left_out = list(without())
            present = self._without(left_out, "without")
            reduced = self._without([*left_out, *anew])
            began = time.monotonic()
            deadline, up_deadline = began + timeout, began + up_timeout

            def update() -> None:
                # What is left out forgets all that it had, even if it only can't be reached now.
                self._taken_anew.update(left_out)
                if anew:
                    self._taken_anew.update(anew)
                    # What is left out by the first is new to the second.
                    server_defs.update(server_defs.make(reduced, self._chief_address))
                server_defs.update(server_defs.make(present, self._chief_address))

            def attempt() -> None:
                is_up = self._while_open(signs_of_life.accepts_connections)
                signs_of_life.wait_until(is_up, present, up_timeout, up_deadline)
                self._change(
                    update,
                    deadline,
                    "readmitting servers (a call outside of dispatch_scope() may be in flight)",
                )

            is_done = False
            try:
                self._repeat_if_unavailable(attempt, lambda: deadline, timeout)
                is_done = True
            finally:
                self._note_members(all_answer=is_done)
        self._look_up(self._all_addresses())  # One that was started again may have another one.

    def _change(self, change: Callable[[], None], deadline: float, what: str) -> None:
        """Changes the connection; servers that don't answer are cut off at the deadline."""
        server_defs.run_with_limit(
            change, deadline, what, self._cut_off_silent, lambda: self._closed
        )

    def _while_open(self, is_up: Callable[[str], bool]) -> Callable[[str], bool]:
        """The same, with an error once this cluster is closed."""

        def asked(address: str) -> bool:
            self.check_open()
            return is_up(address)

        return asked

    def life(self, job: str, index: int) -> tuple[int, int]:
        """Which life of a server this process knows; compare it with one of earlier.

        When a server that was started again is readmitted, by whatever thread, it begins another
        life: what was made on it before is gone, though it answers.

        Args:
          job: "worker" or "ps".
          index: Which of them.
        """
        return self.lives(job)[job, index]

    def lives(self, job: str) -> dict[Server, tuple[int, int]]:
        """The same of all servers of a job.

        Args:
          job: "worker" or "ps".
        """
        numbers = signs_of_life.incarnations()
        servers = [(job, index) for index in range(len(self._addresses.get(job, ())))]
        return {server: (numbers.get(server, 0), self._taken_anew[server]) for server in servers}

    def _note_members(self, *, all_answer: bool) -> None:
        """Has the membership know to which servers this process is connected."""
        processes: dict[Server, Hashable] = {("reader", i): i for i in range(self.readers)}
        for server, number in signs_of_life.incarnations().items():
            if server[0] in self._addresses and server[0] != tf_config.CHIEF:
                processes[server] = number, self._taken_anew[server]
        self.membership.connected(processes, all_answer=all_answer)

    def tell_members(self) -> None:
        """Has all know who was lost and who is back, see `Membership.deliver`."""
        with self.dispatch_scope():
            self.membership.deliver()

    def _absent_workers(self) -> list[int]:
        """The workers at whose address nothing listens, and the lost ones that don't answer."""
        workers = [("worker", index) for index in range(self.workers)]
        return [index for _, index in self.absent(workers, self.membership.is_away)]

    def _without(
        self, servers: Sequence[tuple[str, int]], argument: str = "anew"
    ) -> dict[str, dict[int, str]]:
        """The addresses of all other servers, by job and index; `argument` names them."""
        rest = {job: dict(enumerate(addresses)) for job, addresses in self._addresses.items()}
        for job, index in servers:
            if job == tf_config.CHIEF or rest.get(job, {}).pop(index, None) is None:
                raise ValueError(
                    f"{argument} must name servers of {self}, each once, as in ('worker', 0), "
                    f"got {(job, index)!r}"
                )
        return rest

    def _all_addresses(self) -> list[str]:
        """Those of the workers, the parameter servers and the chief."""
        return list(itertools.chain.from_iterable(self._addresses.values()))

    def _look_up(self, addresses: Sequence[str]) -> bool:
        """Learns what connections to addresses have at their other end; whether that is news."""
        is_news = False
        for address, peers in signs_of_life.peers_of_each(addresses).items():
            # Of a name that is gone, nothing: what it had may be another server's now.
            ever = self._peers_ever.get(address, set())
            is_news = is_news or not peers <= ever
            self._peers[address], self._peers_ever[address] = peers, ever | peers
        return is_news

    def cut_off(self, job: str, index: int) -> None:
        """Ends this process's connections to a server that does not answer.

        Calls that wait for it fail with `tf.errors.UnavailableError`. If it answers again, it
        can be used again, and what it has kept is still there.

        Args:
          job: "worker" or "ps".
          index: Which of them.
        """
        self.cut_off_all([(job, index)])

    def cut_off_all(self, servers: Iterable[Server]) -> None:
        """The same for several servers at once.

        Args:
          servers: Of each ("worker" or "ps", index).
        """
        addresses = [self._addresses[job][index] for job, index in servers]
        self._cut_known(addresses)
        # Last: who tells names may be cut off as well, and asking takes long then.
        if self._look_up(addresses):
            self._cut_known(addresses)

    def _cut_known(self, addresses: Sequence[str]) -> None:
        """Ends the connections to what these addresses have, or have had."""
        cut = set().union(*(self._peers_ever.get(address, ()) for address in addresses))
        # An earlier one may be another server's now.
        others = set(self._all_addresses()).difference(addresses)
        kept = set().union(*(self._peers.get(address, ()) for address in others))
        signs_of_life.cut_connections(cut - kept)

    def _repeat_if_unavailable(
        self, attempt: Callable[[], None], deadline: Callable[[], float], timeout: float
    ) -> None:
        """Makes attempts until none fails because a server can't be reached, or time is over.

        gRPC says so for a second after a connection has broken, also of a server that is up again.
        """
        while True:
            try:
                attempt()
                return
            except tf.errors.UnavailableError as error:
                if time.monotonic() >= deadline():
                    missing = signs_of_life.silent(self._without([]))
                    if missing:
                        raise signs_of_life.not_up_error(timeout, missing) from error
                    raise
                self.check_open()
                logging.debug("Once more, as a server could not be reached: %s", error)
            time.sleep(signs_of_life.RETRY_SECONDS)

    def _cut_off_silent(self) -> list[str]:
        """Ends this process's connections to all servers that don't answer; returns their names."""
        silent = signs_of_life.silent(self._without([]))
        self.cut_off_all((job, index) for job, index, _ in silent)
        return [f"{job}:{index}" for job, index, _ in silent]

    def probe(self, job: str, index: int) -> signs_of_life.Probe:
        """Asks a server for a sign of life, in a thread.

        Args:
          job: "worker", "ps" or "reader".
          index: Which of them.
        """
        if job == tf_config.READER:
            return signs_of_life.ReaderProbe(self, self._readers[index])
        return signs_of_life.Probe(self, signs_of_life.device_of(job, index))

    @contextlib.contextmanager
    def dispatch_scope(self) -> Iterator[None]:
        """A scope in which this thread's remote calls hinder no other thread.

        TensorFlow queues calls from all threads behind one default executor; while one of
        them waits in an op, `readmit` and `close` wait for it. In this scope, a thread has a
        synchronous executor of its own. A thread that dispatches steps to a worker stays in
        one scope for all of them.

        Yields:
          None.

        Example:
          ```python
          with cluster.dispatch_scope(), tf.device("/job:worker/task:1"):
              while step_function():
                  pass
          ```
        """
        # Not TensorFlow's executor_scope: at its end it waits for what all other threads have
        # in the default executor, say for a server that stands still.
        context.ensure_initialized()
        handle = context.context()._handle
        own = pywrap_tfe.TFE_NewExecutor(False, True, 0)
        scope = object()
        self._scopes.add(scope)
        before = pywrap_tfe.TFE_ContextGetExecutorForThread(handle)
        pywrap_tfe.TFE_ContextSetExecutorForThread(handle, own)
        try:
            yield
        finally:
            self._scopes.discard(scope)
            pywrap_tfe.TFE_ContextSetExecutorForThread(handle, before)
            pywrap_tfe.TFE_DeleteExecutor(before)  # What refers to it, not the executor.
            try:
                pywrap_tfe.TFE_ExecutorWaitForAllPendingNodes(own)
            except tf.errors.OpError as error:
                # Whoever waited for the call had the error.
                logging.debug("A call in dispatch_scope failed: %s", error)
            pywrap_tfe.TFE_ExecutorClearError(own)
            pywrap_tfe.TFE_DeleteExecutor(own)

    def close(self) -> None:
        """Disconnects from the servers; does nothing the second time.

        The memory and the resources that this process holds on the servers are lost. Its own
        listeners stay confined. Takes some 20 seconds at most. After Ctrl-C, call it again.
        """
        if self._is_over:
            return
        # Before the lock is free: whoever changes the connection, or shall, ends by that.
        self._closed = True
        self._end_passes()
        with _lock:
            if self._is_over:
                return
            try:
                self.data_services.close()
                with self._readers_lock:
                    if self._reader_losses is not None:
                        self._reader_losses.close()
                # A change that still asks servers for something ends while they are there, or
                # never.
                with contextlib.suppress(RuntimeError):
                    server_defs.wait_for_pending(time.monotonic() + _CHANGE_SECONDS, "closing")
                if _connected is self:
                    self._disconnect()
            finally:
                self._stop_servers()
            self._is_over = True

    def _disconnect(self) -> None:
        """Disconnects, and stops the servers meanwhile; under the lock."""
        global _connected
        _connected = None
        redirections.keep_python_running(connected=False)
        # With the chief alone in it: functions are no longer sent to the servers, while
        # variables of this process, and the port of its server, stay for the next cluster.
        server_def = server_defs.make({}, self._chief_address)
        disconnecting = server_defs.Change(lambda: server_defs.connect(server_def))
        with server_defs.left_pending(disconnecting):
            # First while the servers are there, as TensorFlow then logs no errors. If it waits
            # for calls in flight, the end of the servers ends those.
            disconnecting.join(_QUIET_DISCONNECT_SECONDS)
            self._stop_servers()
            disconnecting.join(_DISCONNECT_SECONDS)
            if disconnecting.is_alive():
                self._cut_off_silent()
                disconnecting.join(_CUT_SECONDS)
        if disconnecting.is_alive():
            logging.warning(
                "TensorFlow did not disconnect from %s in time; calls may be in flight.", self
            )
        elif disconnecting.error is not None:
            logging.warning("Disconnecting from %s: %s", self, disconnecting.error)

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *exception_info) -> None:
        self.close()

    def __str__(self) -> str:
        readers = f", readers={self.readers}" if self.readers else ""
        return f"{type(self).__name__}(workers={self.workers}, ps={self.ps}{readers})"

    def _end_passes(self) -> None:
        """Has passes end that somebody has left early, or that other threads wait for."""
        passes = self.passes()
        for run in passes:
            run.fail(RuntimeError(f"{self} was closed in the middle of a pass over the data"))
        deadline = time.monotonic() + _QUIET_DISCONNECT_SECONDS
        for run in passes:
            run.join(max(0.0, deadline - time.monotonic()))

    def _stop_servers(self) -> None:
        """Stops servers that this object started; called by `close`, once and more."""

    def _prepare_network(self) -> None:
        """Has TensorFlow listen where it shall, and call the servers, before it does either."""
        addresses = [*itertools.chain.from_iterable(self._addresses.values()), *self._readers]
        proxies.go_around([self._chief_address, *addresses], self._bind_address)
        confined = _engine.confined_address()
        if self._bind_address is not None:
            redirections.confine_listeners(self._bind_address)
            listens = server_defs.listens_on(self._chief_address)
            if listens in (None, _engine.confined_address()):
                return
            redirections.confine_listeners(confined or "0.0.0.0")
            raise RuntimeError(
                f"bind_address={self._bind_address!r} comes too late: the server of this process "
                f"listens on {listens or 'all interfaces'}, since use_final_device_names or an "
                "earlier cluster started it. Begin a new process, and give bind_address to the "
                "first of these"
            )
        if confined:
            raise RuntimeError(
                f"the listeners of this process are confined to {confined}, where servers "
                "elsewhere cannot reach it; pass bind_address"
            )
        logging.warning(
            "TensorFlow's server in this process listens on all interfaces, without "
            "authentication: whoever reaches %s can run code here. Name one interface with "
            "bind_address.",
            self._chief_address,
        )

    def is_up(self, job: str, index: int) -> bool:
        """Whether a server accepts connections; it may stand still.

        Args:
          job: "worker" or "ps".
          index: Which of them.
        """
        return signs_of_life.accepts_connections(self._addresses[job][index])

    def absent(
        self, servers: Iterable[Server], is_suspect: Callable[[Server], bool] = lambda server: False
    ) -> list[Server]:
        """Those of some workers and parameter servers that are not there.

        Args:
          servers: Which are looked at.
          is_suspect: Of which it does not suffice that they accept connections, as the kernel does
            for a process that stands still: they have to answer. Default: of none.
        """
        addresses = [(job, index, self._addresses[job][index]) for job, index in servers]
        suspects = {address for job, index, address in addresses if is_suspect((job, index))}

        def is_there(address: str) -> bool:
            if address in suspects:
                return signs_of_life.greets(address)
            return signs_of_life.accepts_connections(address)

        missing = signs_of_life.without(is_there, addresses)
        return [(job, index) for job, index, _ in missing]


def cluster_from_tf_config(bind_address: str | None = None) -> Cluster:
    """The cluster that the environment variable `TF_CONFIG` describes, with us as its chief.

    Start the servers with `python -m tf_recsync.server`, each with its own task in TF_CONFIG.

    Args:
      bind_address: Numeric address on which TensorFlow's servers in this process listen from
        `connect` on; "0.0.0.0" for all interfaces. Default None: the chief's host in
        TF_CONFIG if it is a loopback address, else all interfaces, with a warning.

    Returns:
      The cluster; not connected yet.

    Raises:
      ValueError: TF_CONFIG is missing or wrong, this process is not its chief, or it has no
        worker.

    Example:

    >>> import json
    >>> import os
    >>> import tf_recsync as recsync
    >>> jobs = {"chief": ["10.0.0.1:4711"], "worker": ["10.0.0.2:4711"], "ps": ["10.0.0.3:4711"]}
    >>> os.environ["TF_CONFIG"] = json.dumps(
    ...     {"cluster": jobs, "task": {"type": "chief", "index": 0}}
    ... )
    >>> cluster = recsync.cluster_from_tf_config(bind_address="10.0.0.1")
    >>> cluster.workers, cluster.ps
    (1, 1)
    >>> del os.environ["TF_CONFIG"]
    """
    config = tf_config.parse_tf_config(os.environ)
    if config.task_type != tf_config.CHIEF:
        raise ValueError(
            "the task's type in TF_CONFIG must be 'chief' in the program that coordinates, got "
            f"{config.task_type!r}; start the others with python -m tf_recsync.server"
        )
    if len(config.cluster[tf_config.CHIEF]) != 1:
        raise ValueError(
            f"job 'chief' in TF_CONFIG must have one task, got {config.cluster[tf_config.CHIEF]}"
        )
    if "worker" not in config.cluster:
        raise ValueError(
            f"TF_CONFIG must have the job 'worker' with a task, got {sorted(config.cluster)}"
        )
    if bind_address is None:
        bind_address = tf_config.loopback_address(config.own_address)
    return Cluster(config.cluster, chief_address=config.own_address, bind_address=bind_address)
