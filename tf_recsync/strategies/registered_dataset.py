"""Datasets in tf.data's service, which runs their pipelines here or in readers."""

from __future__ import annotations

import dataclasses
import threading
import uuid
import weakref
from collections.abc import Callable
from concurrent import futures
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.data.experimental.ops import data_service_ops
from tensorflow.python.data.experimental.service import _pywrap_server_lib

from tf_recsync.cluster import Cluster
from tf_recsync.cluster.data_service import DataService
from tf_recsync.strategies import data_errors, reshuffling
from tf_recsync.strategies.pass_iterator import PassIterator, parts_of
from tf_recsync.synchronization.remote_functions import RemoteFunction, traced_once
from tf_recsync.synchronization.remote_values import to_send

_REFRESH_MILLISECONDS = 50  # How often a worker asks whether a pass has ended.
_MOST_KEPT = 8  # Datasets, and kinds of each; each has threads of its own in this process.

# Whether the batches of what is registered have numbers, in how many readers it runs, and how many
# of the dataset's batches it has, from the first on; None: all.
Kind = tuple[bool, int, int | None]


@dataclasses.dataclass(eq=False)
class RegisteredDataset:
    """A dataset in the service; each pass over it is a job that workers share.

    Attributes:
        address: of the service, as workers reach it.
        name: the dataset's in the service.
        element_spec: of its batches.
        workers: how many share a pass.
        readers: in how many readers it runs; 0: in the coordinator's process.
        service: in this process, which lives as long as this; None if it is the readers'.
    """

    address: str
    name: str
    element_spec: Any
    workers: int
    readers: int
    service: DataService | None = None

    def __post_init__(self):
        self.address = self.address.removeprefix("grpc://")

    def is_known(self) -> bool:
        """Whether the service knows the dataset; one that was started again does not."""
        try:
            _pywrap_server_lib.TF_DATA_GetDataServiceMetadataByID(self.name, self.address, "grpc")
        except RuntimeError as error:
            if "not found" not in str(error):
                raise
            return False
        return True

    def iterator(self, job: str) -> PassIterator:
        """Joins a pass, to take what nobody has had; call it under the worker's device scope.

        Args:
            job: the pass, by its name.
        """
        joins = _joining(
            data_service_ops.HashableElementSpec(self.element_spec),
            # Of several readers, each gets the next element of the source that nobody has.
            self.readers > 1,
            # Two requests overtake each other now and then; a single worker
            # shall see the order of the data, and can do with one.
            1 if self.workers == 1 and self.readers < 2 else 2,
        )
        # Sent anew each time: TensorFlow takes a tensor that it has once sent to a worker for
        # sent, also if the connection broke meanwhile.
        names = to_send(np.array([self.address, self.name, job], object))
        # Others may go on with another dataset meanwhile, and without its service it would wait for
        # ever.
        return PassIterator(joins(names), self.element_spec, kept=self)


@traced_once
def _joining(
    spec: data_service_ops.HashableElementSpec, is_divided: bool, requests: int
) -> RemoteFunction:
    """What a worker runs to join a pass: in one call, where each operation by itself is one.

    Args:
        spec: of the batches.
        is_divided: whether several readers divide the dataset.
        requests: for batches, at a time.

    Returns:
        A function of the service's address and the names of the dataset and the pass, a string
        [3], which returns what a `PassIterator` is made of.
    """
    policy = tf.data.experimental.service.ShardingPolicy

    def join(names):
        address, name, job = tf.unstack(names, num=3)
        # The public from_dataset_id lacks the refresh interval, and with its
        # second every pass would end a second late.
        dataset = data_service_ops._from_dataset_id(
            processing_mode=policy.DYNAMIC if is_divided else policy.OFF,
            service=("grpc", address),
            dataset_id=name,
            element_spec=spec.element_spec,
            job_name=job,
            max_outstanding_requests=requests,
            task_refresh_interval_hint_ms=_REFRESH_MILLISECONDS,
        )
        return parts_of(dataset)

    function = tf.function(join, autograph=False)
    return RemoteFunction(function.get_concrete_function(tf.TensorSpec([3], tf.string)))


class Registrations:
    """Registers datasets with a cluster's data service, which then runs their pipelines, and counts
    the passes over them.

    To register a dataset anew takes memory which TensorFlow does not give back: each operation that
    makes a part of it has a name of its own, and stays in a cache. Of those that were used last a
    few are kept for later calls that use the same ones, as long as the user has them.

    Thread-safe. What calls readers raises a RuntimeError if the first one does not answer.

    Args:
        cluster: the cluster.
        reader_timeout: seconds to wait for the first reader.

    Attributes:
        cluster: as above.
    """

    def __init__(self, cluster: Cluster, reader_timeout: float):
        self.cluster = cluster
        self._reader_timeout = reader_timeout
        self._lock = threading.Lock()
        # By the dataset, and by the kind, those used last at the end. No callback of ours: it
        # might run while this thread has the lock. Guarded by _lock.
        self._kept: weakref.WeakKeyDictionary[tf.data.Dataset, dict[Kind, RegisteredDataset]] = (
            weakref.WeakKeyDictionary()
        )
        # Passes over datasets; as long as somebody has these.
        self._passes: weakref.WeakKeyDictionary[tf.data.Dataset, int] = weakref.WeakKeyDictionary()

    def next_pass(self, dataset: tf.data.Dataset, number: int | None = None) -> int:
        """How many passes over a dataset there were before this one.

        Args:
            dataset: the user's.
            number: how many there were, if this one goes on with one of them; None: it is new.
        """
        with self._lock:
            if number is None:
                number = self._passes.get(dataset, 0)
            self._passes[dataset] = number + 1
            return number

    def register(self, dataset: tf.data.Dataset, readers: int) -> RegisteredDataset:
        """Registers a dataset.

        Args:
            dataset: batches.
            readers: in how many readers it runs; 0: in this process.
        """
        if readers == 0:
            # A service keeps what was registered, and with it arrays, for as long as it lives.
            service = self.cluster.data_services.new()
            registered = self._register(dataset, service.own_address, service.address, 0)
            registered.service = service
            return registered
        address = self.cluster.reader_service
        return self._ask_readers(lambda: self._register(dataset, address, address, readers))

    def _register(
        self, dataset: tf.data.Dataset, own_address: str, address: str, readers: int
    ) -> RegisteredDataset:
        """Registers with the service, which this process and workers reach by these addresses."""
        # The servers' names mean nothing to the service: pin nothing.
        with tf.device("/CPU:0"):
            # By a name of our own: a service that was started again would give a number anew.
            name = f"recsync_{uuid.uuid4().hex}"
            tf.data.experimental.service.register_dataset(
                own_address, dataset, compression=None, dataset_id=name
            )
        return RegisteredDataset(address, name, dataset.element_spec, self.cluster.workers, readers)

    def end_forgotten_passes(self) -> None:
        """Ends passes over data that readers no longer know, before another one begins.

        A service that was started again gives its numbers anew, and the iterators of an earlier
        pass would take the batches of the next one that has its numbers.
        """
        for run in [run for run in self.cluster.passes() if run.readers and run.is_open]:
            if not self._ask_readers(run.data.is_known):
                run.fail(data_errors.forgotten())
                run.stop()

    def _ask_readers(self, call: Callable[[], Any]) -> Any:
        """Calls the data service, with a limit: TensorFlow waits without one, and deaf to
        signals."""
        answer: futures.Future[Any] = futures.Future()

        def ask() -> None:
            try:
                with self.cluster.dispatch_scope():
                    answer.set_result(call())
            except Exception as error:  # Raised by the one who waits.
                answer.set_exception(error)

        threading.Thread(target=ask, name="recsync_ask_readers", daemon=True).start()
        futures.wait([answer], self._reader_timeout)
        if not answer.done():
            raise RuntimeError(
                f"reader:0 ({self.cluster.reader_service}) has not answered for "
                f"{self._reader_timeout:.0f} s; start it again"
            )
        return answer.result()

    def find(self, dataset: tf.data.Dataset, kind: Kind) -> RegisteredDataset | None:
        """What is registered of a dataset; None if nothing is, or its service has forgotten it.

        Args:
            dataset: the user's.
            kind: what `add` was told.
        """
        with self._lock:
            registered = self._kept.get(dataset, {}).get(kind)
            if registered is None:
                return None
            kinds = self._kept.pop(dataset)
            kinds[kind] = kinds.pop(kind)
            self._kept[dataset] = kinds
        if registered.readers and not self._ask_readers(registered.is_known):
            return None
        return registered

    def add(self, dataset: tf.data.Dataset, kind: Kind, registered: RegisteredDataset) -> None:
        """Keeps what is registered of a dataset, unless it might be another one the next time."""
        if _has_resources(dataset):
            return
        with self._lock:
            kinds = [*self._kept.pop(dataset, {}).items(), (kind, registered)]
            self._kept[dataset] = dict(kinds[-_MOST_KEPT:])
            for oldest in list(self._kept)[:-_MOST_KEPT]:
                del self._kept[oldest]


def _has_resources(dataset: tf.data.Dataset) -> bool:
    """Whether functions of a dataset use what may change, as a table: it is sent as it is then."""
    functions = (own for found in reshuffling.with_sources(dataset) for own in found._functions())
    return any(t.dtype == tf.resource for own in functions for t in own.function.captured_inputs)
