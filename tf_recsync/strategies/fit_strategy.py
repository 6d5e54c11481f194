"""What strategies need so that plain Keras `model.fit` runs on them."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import threading
import time
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any, get_args

import keras
import tensorflow as tf
from absl import logging
from tensorflow.python.data.experimental.ops import distribute

from tf_recsync import _engine, staleness
from tf_recsync._checks import check_at_least
from tf_recsync.cluster import Cluster, Member
from tf_recsync.cluster.silence_watch import silence_limit
from tf_recsync.embedding.keys import KeyCounts, counts_of_tables
from tf_recsync.strategies import checks, model_functions, train_function, watched_calls
from tf_recsync.strategies.checks import OnBatchLost
from tf_recsync.strategies.distributed_dataset import DistributedDataset, without_optionals
from tf_recsync.strategies.extended import Extended
from tf_recsync.strategies.measured_staleness import measured_staleness
from tf_recsync.strategies.model_variables import OnServers
from tf_recsync.strategies.predict_function import PredictFunction
from tf_recsync.strategies.registered_dataset import Registrations
from tf_recsync.strategies.server_memory import ServerMemory, memory_of
from tf_recsync.strategies.slots import Losses
from tf_recsync.strategies.worker_datasets import DatasetFunction, WorkerDatasets
from tf_recsync.synchronization.arrangement import Arrangement
from tf_recsync.synchronization.events import Recording, Recordings
from tf_recsync.synchronization.modes import Mode

_ASK_SECONDS = 0.2  # How often it is looked whether Keras has left.


class FitStrategy(tf.distribute.Strategy):
    """A strategy that `fit`, `evaluate` and `predict` run on.

    Keras asks a strategy to distribute the dataset, and calls the model's train, test and
    predict functions with an iterator over it. Those are put in place when the dataset is
    distributed.

    Args:
        cluster: the cluster.
        local_batch_size: examples of a batch, or None if that is not known.
        worker_timeout: see `model_functions.Settings`, like the rest; `check_timeouts` comes
            before.
        silence_timeout: as above, or None, which follows `worker_timeout`.
        on_batch_lost: as above.
        arrangement: as above.
        mode: as above.
        prefetch_lookups: as above.
    """

    pushes_gradients = False  # Whether workers' steps push, instead of applying an optimizer.
    linked_jobs: tuple[str, ...] = ("ps",)  # Whose links may be limited, those of steps first.
    computing_jobs: tuple[str, ...] = ("worker",)  # Whose servers may have artificial speeds.
    threads_per_worker = 1  # That train.
    # Whether tables that nobody places on a server are copied although there are embedding PSs,
    # and those of collections where there are none.
    copies_tables = False

    def __init__(
        self,
        cluster: Cluster,
        local_batch_size: int | None,
        worker_timeout: float,
        silence_timeout: float | None,
        on_batch_lost: OnBatchLost,
        arrangement: Arrangement,
        mode: Mode,
        prefetch_lookups: bool = False,
    ):
        if on_batch_lost not in get_args(OnBatchLost):
            raise ValueError(f'on_batch_lost must be "retry" or "drop", not {on_batch_lost!r}')
        cluster.connect()
        limit = silence_limit(silence_timeout, worker_timeout)
        self._guard = watched_calls.CallGuard(cluster, limit)
        self._recordings: weakref.WeakKeyDictionary[keras.Model, Recordings]
        self._recordings = weakref.WeakKeyDictionary()
        # What a model was trained by last: it may have been compiled again since.
        self._trained: weakref.WeakKeyDictionary[
            keras.Model, weakref.ReferenceType[train_function.TrainFunction]
        ]
        self._trained = weakref.WeakKeyDictionary()
        with self._guard.watched():
            self._check_servers(cluster, arrangement)
        super().__init__(Extended(self, self._guard, cluster, arrangement, self.copies_tables))
        self._cluster = cluster
        self._arrangement = arrangement
        self._local_batch_size = local_batch_size
        self._registrations = Registrations(cluster, limit)
        self._has_warned_of_threads = False
        self.renewals = 0  # How often variables were made anew, whose old handles nobody may use.
        self._settings = model_functions.Settings(
            cluster=cluster,
            worker_timeout=worker_timeout,
            silence_timeout=limit,
            on_batch_lost=on_batch_lost,
            arrangement=arrangement,
            mode=mode,
            prefetch_lookups=prefetch_lookups,
        )

    def watched(self, model: keras.Model | None = None) -> contextlib.AbstractContextManager[None]:
        """Inside, calls of this process to a server that is silent end with an error.

        Args:
            model: the model that calls are for: only servers that it needs count. None (the
                default): all servers do.
        """
        function = getattr(model, "train_function", None)
        is_known = isinstance(function, model_functions.Steps)
        return self._guard.watched(function.unneeded() if is_known else ())

    @property
    def cluster(self) -> Cluster:
        """The cluster that the strategy runs on."""
        return self._cluster

    @property
    def arrangement(self) -> Arrangement:
        """The groups of workers, and the parameter servers of each."""
        return self._arrangement

    @property
    def mode(self) -> Mode:
        """When the workers of a group start, and when its servers apply what they push."""
        return self._settings.mode

    def mode_of(self, model: keras.Model) -> Mode:
        """The same for a model whose optimizer may have servers add up several batches."""
        function = getattr(model, "train_function", None)
        return function.mode if isinstance(function, model_functions.Steps) else self.mode

    @property
    def embedding_ps(self) -> tuple[int, ...]:
        """The task indices of the parameter servers on which embedding tables are placed."""
        return self._arrangement.embedding_ps

    def placed_on(self, ps: int) -> contextlib.AbstractContextManager:
        """A context in which variables are made on one embedding PS, once for all workers.

        Without it, those of an only group go to its servers in turn.

        Args:
            ps: its place among `embedding_ps`.

        Raises:
            ValueError: if there is no such server.
        """
        count = len(self.embedding_ps)
        if not count:
            raise ValueError(f"ps must be an embedding PS, not {ps!r}: there are none")
        if ps not in range(count):
            raise ValueError(
                f"ps must be from 0 to {count - 1}, not {ps!r}: there are {count} embedding PSs"
            )
        return self.extended.placed_on(ps)

    @property
    def examples_per_step(self) -> int | None:
        """The examples of a global step, or None if `local_batch_size` was not given."""
        size = self._local_batch_size
        return None if size is None else size * self.mode.capacity

    def experimental_distribute_dataset(self, dataset, options=None):
        """Distributes a dataset; `model.fit` and its like call this.

        Args:
            dataset: a batched `tf.data.Dataset`, or what `distribute_datasets_from_function`
                returned.
            options: must be None.

        Returns:
            A dataset whose batches go to one worker each.

        Raises:
            ValueError: if the dataset has single examples in place of batches, or datasets that
                workers make can't be used so.
        """
        _check_options(options)
        caller = _keras_caller()
        if isinstance(dataset, tf.data.Dataset):
            dataset = self._made_by_one_thread(dataset, caller.adapter)
            checks.check_is_batched(dataset)
            dataset = without_optionals(dataset)
        if caller.model is not None:
            self.attach(caller.model)
            if caller.verb == "fit":
                # Of an earlier call's callbacks.
                caller.model.train_function.recovery = None
                caller.model.train_function.go_on_at(None)
        apart = None
        if isinstance(dataset, WorkerDatasets):
            self._check_worker_datasets(dataset, caller)
            apart, dataset = dataset, dataset.first()
        verb, steps, given = caller.verb, caller.steps, caller.arguments.get("x")
        pass_length = getattr(caller.adapter, "num_batches", None)
        # Keras shuffles what it knows the length of.
        is_shuffled = isinstance(given, keras.utils.PyDataset) and pass_length is not None
        is_shuffled = is_shuffled and bool(caller.arguments.get("shuffle"))
        first = None
        if apart is None and steps is not None and verb not in (None, "fit"):
            # The first batches, whichever workers they go to.
            pass_length = None if pass_length is None else min(pass_length, steps)
            first, steps = steps, None
        known = getattr(caller.adapter, "batch_size", None)
        batch = self._batch_size(dataset, known) if verb == "fit" else None
        start_predict = caller.model.predict_function.start if verb == "predict" else None
        found = DistributedDataset(
            self._registrations,
            dataset,
            start_predict,
            steps,
            batch,
            first,
            apart,
            caller.is_over,
            caller.verb == "validate",
            verb != "fit" or self._settings.on_batch_lost == "retry",
            # With class_weight Keras makes another dataset of it in each call.
            given if isinstance(given, tf.data.Dataset) else None,
            pass_length,
            is_shuffled,
            getattr(caller.adapter, "generator", None) if inspect.isgenerator(given) else None,
        )
        if verb == "fit" and caller.model is not None:
            # Callbacks may need the placement before the first step.
            caller.model.train_function.know_batches(found)
        return found

    def distribute_datasets_from_function(
        self, dataset_fn: DatasetFunction, options=None
    ) -> WorkerDatasets:
        """Has every worker make its batches itself, as in `tf.distribute`.

        Each worker runs an input pipeline of its own, in its process, on its part of the data:
        nothing is read or parsed in one place for all, and no batch crosses the network. But
        nobody takes over what a slow worker has left. One that was lost and comes back
        goes on after the batches that it had, or begins anew if its dataset has no end; if it is
        not back when the others have ended, one of these does its part. With
        `steps_per_epoch`, faster workers do more of the steps, and so more of their parts.

        With `ShadowSyncStrategy(threads_per_trainer=m)` there are m pipelines for each worker,
        one for each thread.

        Args:
            dataset_fn: `dataset_fn(context)` returns the batched `tf.data.Dataset` of the
                pipeline `context.input_pipeline_id` of `context.num_input_pipelines`, see
                `tf.distribute.InputContext`. All are of one type. It is called in this process:
                under the device of its worker when a pass begins there for the first time, and
                also without, for the type of the batches, their number, and a first batch if the
                model is not built. What the dataset needs, like lookup tables or other datasets,
                has to be made in it. Python in the dataset (`py_function`, `from_generator`) runs
                in this process all the same. `tf.data.AUTOTUNE` means the number of cores: tuning
                is off unless `options().autotune.enabled` says otherwise, for with it a pass takes
                up to five seconds to end.
            options: must be None.

        Returns:
            What to give to `fit` and `evaluate`, also as `validation_data`. If the datasets have
            no end, or an epoch shall be shorter, with `steps_per_epoch`: the steps of all workers.

        Raises:
            ValueError: if `dataset_fn` is no function that returns a dataset.

        Example:

        ```python
        def dataset_fn(context):
            files = tf.data.Dataset.list_files("/data/day_0/*.tfrecord", shuffle=False)
            files = files.shard(context.num_input_pipelines, context.input_pipeline_id)
            rows = tf.data.TFRecordDataset(files).shuffle(100_000)
            return rows.batch(512).map(parse, num_parallel_calls=tf.data.AUTOTUNE)

        model.fit(strategy.distribute_datasets_from_function(dataset_fn), epochs=3)
        ```
        """
        _check_options(options)
        return WorkerDatasets(
            self._cluster, dataset_fn, self._pipelines(), self.num_replicas_in_sync
        )

    def _pipelines(self) -> int:
        return self._cluster.workers * self.threads_per_worker

    def _check_worker_datasets(self, datasets: WorkerDatasets, caller: _Caller) -> None:
        """Raises a ValueError if they are not for this, or Keras would ignore what is beside."""
        if datasets.cluster is not self._cluster or datasets.pipelines != self._pipelines():
            raise ValueError(
                f"the datasets were made for {datasets.cluster} and {datasets.pipelines} input "
                f"pipelines, this strategy has {self._cluster} and {self._pipelines()}: make them "
                "by its own distribute_datasets_from_function"
            )
        if caller.verb == "predict":
            raise ValueError(
                "predict needs a dataset or arrays: of datasets that workers make, the order of "
                "the predictions is open"
            )
        for name in ("y", "sample_weight", "class_weight"):
            if caller.arguments.get(name) is not None:
                raise ValueError(
                    f"{name} can't be given beside datasets from a function: have dataset_fn "
                    "return (inputs, targets, sample weights)"
                )
        if caller.steps is None and datasets.cardinality == tf.data.INFINITE_CARDINALITY:
            steps = {"fit": "steps_per_epoch", "validate": "validation_steps"}
            raise ValueError(
                f"{steps.get(caller.verb, 'steps')} must be given: the datasets of dataset_fn "
                "have no end"
            )

    def _made_by_one_thread(self, dataset: tf.data.Dataset, adapter: Any) -> tf.data.Dataset:
        """A dataset, of a `keras.utils.PyDataset` one whose batches are made one after the other.

        Keras's queue for several threads keeps batches of a pass that was left for the next one,
        and can't be asked between two epochs: it takes for granted that nobody reads ahead.

        Args:
            dataset: what the adapter has made.
            adapter: Keras's, of the data; or None.
        """
        if getattr(adapter, "enqueuer", None) is None:
            return dataset
        if not self._has_warned_of_threads:
            self._has_warned_of_threads = True
            logging.warning(
                "One thread of this process makes the batches of the PyDataset, whatever its "
                "workers and use_multiprocessing are; use a tf.data.Dataset for more."
            )
        adapter.enqueuer = None
        return adapter.get_tf_dataset()

    def _batch_size(self, dataset: tf.data.Dataset, known: int | None) -> int | None:
        """The examples of a dataset's batches, the last one apart; None if they can't be known.

        Args:
            dataset: batches.
            known: what Keras knows of them.

        Raises:
            ValueError: if the strategy was told something else.
        """
        told = self._local_batch_size
        if known is None:
            with tf.device("/CPU:0"):
                found = int(distribute.compute_batch_size(dataset))
            known = found if found > 0 else None
        if None not in (known, told) and known != told:
            raise ValueError(
                f"the dataset's batches have {known} examples, local_batch_size is {told}"
            )
        return told or known

    def attach(self, model: keras.Model) -> None:
        """Has a model's `fit`, `evaluate` and `predict` run on this strategy's workers.

        Called by themselves; call it only if they could not find the model.

        Args:
            model: a model that was built in this strategy's `scope()`.

        Raises:
            ValueError: if the model, one of its layers or its optimizer was made outside of the
                scope, or can't be trained on parameter servers, or it was compiled with what can't
                be used under a strategy.
        """
        self._cluster.check_open()
        checks.check_made_in_scope(self, model)
        self._check_optimizer(model)
        check_at_least("steps_per_execution", model.steps_per_execution, 1)
        if _is_jit_compiled(model):
            raise ValueError(
                "jit_compile=True can't be used under this strategy, as XLA can't compile what a "
                "worker's step pulls and pushes; leave it unset"
            )
        if isinstance(model.train_function, model_functions.Steps):
            return
        if getattr(model, "run_eagerly", False):
            raise ValueError("run_eagerly=True can't be used under this strategy")
        before = self._trained.get(model, lambda: None)()
        if before is not None:
            before.leave()
        self._put_functions(model)
        self._trained[model] = weakref.ref(model.train_function)
        if model in self._recordings:
            self._recordings_of(model)
        # A model that defines no `build` says that it is built when that was called, whatever its
        # layers are; Keras builds these when it has a batch.
        is_built = all(layer.built for layer in model._flatten_layers())
        optimizer = getattr(model, "optimizer", None)  # `predict` needs no compiled model.
        if is_built and optimizer is not None and not optimizer.built:
            with self.scope():
                optimizer.build(model.trainable_variables)

    def worker_steps(self, model: keras.Model) -> list[int]:
        """How far each worker has got, to see which ones are slow.

        Args:
            model: a model that was compiled in this strategy's scope.

        Returns:
            For each worker, by its index, the training steps that it has finished in the
            pass that runs, or ran last: a call of `fit`. Those in flight do not count.
            All 0 before the model trains.
        """
        if not isinstance(model.train_function, model_functions.Steps):
            return [0] * self._cluster.workers
        return model.train_function.worker_steps()

    def staleness(self, model: keras.Model) -> staleness.Report:
        """The staleness measured since the model's optimizer was built.

        Where servers collect pushes, that of dense variables is in global steps of the group, of
        each push counted since the model began to train here; that of rows, and of single
        variables, is of each application, for the oldest gradient in it. What a worker has a copy
        of that it updates alone, as under a `HopStrategy`, is never stale, and not counted.

        Args:
            model: a model that was compiled in this strategy's scope.

        Returns:
            Statistics of the dense variables, which is that inside a group, of the rows of
            embedding tables, and of each variable.

        Raises:
            RuntimeError: if a parameter server is lost, or silent for `silence_timeout` seconds.
        """
        with self._guard.watched():
            return measured_staleness(model, self.mode_of(model), self.pushes_gradients)

    def memory(self, model: keras.Model) -> list[ServerMemory]:
        """The memory that a model takes on each server, and that of the servers' processes.

        Before an `EmbeddingCollection` is built, `PlacementPlan.memory` tells the bytes of its
        tables.

        Args:
            model: a built model that was compiled in this strategy's scope. What the optimizer
                keeps counts from when it is built, at the latest by `fit`.

        Returns:
            For the parameter servers and then the workers, the bytes of tables, of what the
            optimizer keeps beside them, of all else, and what the process was measured to have.

        Raises:
            ValueError: if the model is not built.

        Example:

        ```python
        for server in strategy.memory(model):
            print(server)  # "ps:0 96.0 MiB (tables 61.0, slots 30.5, ...), resident 471.2 MiB"
        ```
        """
        if not model.built:
            raise ValueError(f"model {model.name} must be built: call it, or give it an Input")
        with self._guard.watched():
            return memory_of(model, self._cluster, self._arrangement)

    def tables(self, model: keras.Model) -> dict[str, KeyCounts]:
        """What became of the keys of a model's tables with `keys="any"`.

        Args:
            model: a model that was compiled in this strategy's scope.

        Returns:
            By the name of the table, after that of its layer and a slash, for how many keys there
            is room, how many have rows, and how many were admitted, refused, evicted, had expired
            or were unknown since the table was made, as `recsync.layers.KeyCounts`.

        Raises:
            RuntimeError: if a parameter server is lost, or silent for `silence_timeout` seconds.

        Example:

        ```python
        for name, counts in strategy.tables(model).items():
            print(name, counts.used, "of", counts.capacity, "rows, evicted:", counts.evicted)
        ```
        """
        with self._guard.watched():
            return counts_of_tables(model)

    def data_wait(self, model: keras.Model) -> list[float]:
        """How long workers have waited for data, to see whether it comes fast enough.

        Args:
            model: a model that was compiled in this strategy's scope.

        Returns:
            For each worker, by its index, the seconds that its training steps have waited for
            their batches, in all calls of `fit` so far; with several threads for a worker, the
            mean of theirs. Known at the end of an epoch, and as of two calls ago before;
            what a worker had waited since then is lost with it.

        Example:

        ```python
        before = sum(strategy.data_wait(model))
        started = time.monotonic()
        model.fit(dataset)
        share = (sum(strategy.data_wait(model)) - before) / cluster.workers
        share /= time.monotonic() - started  # Of the workers' time.
        ```
        """
        if not isinstance(model.train_function, model_functions.Steps):
            return [0.0] * self._cluster.workers
        return model.train_function.data_wait()

    def record_events(
        self,
        model: keras.Model,
        limit: int = 1_000_000,
        failed: Callable[[], object] | None = None,
    ) -> Recording:
        """Records what workers do when; `callbacks.Timeline` makes a file of it.

        While somebody records, workers note what their steps do, from the beginning of the next
        epoch on; those of a `HopStrategy` note most of it always. Nothing is kept while nobody
        records.

        Args:
            model: a model that was compiled in this strategy's scope.
            limit: how many events are kept, the latest ones, at 56 bytes each; an int of at
                least 1. A step is four or five of them; a worker's iteration under a
                `HopStrategy` is four, and two for each of its neighbors.
            failed: is called when training or evaluation fails, perhaps more than once, before
                the error is raised; default None. What it raises takes the error's place.

        Returns:
            A recording, to be stopped when it is enough; also a context manager.

        Raises:
            ValueError: if `limit` is wrong, or the model is from elsewhere.

        Example:

        ```python
        with strategy.record_events(model) as recording:
            model.fit(dataset)
        for event in recording.events():
            print(event.worker, event.name, event.end - event.begin)  # Microseconds.
        print(recording.totals()[0]["compute"].seconds)  # Of worker 0, all in all.
        ```
        """
        check_at_least("limit", limit, 1)
        self.attach(model)

        def collect() -> None:
            # None, if the model was compiled again and has not trained since.
            if isinstance(model.train_function, model_functions.Steps):
                model.train_function.collect_events()

        return self._recordings_of(model).record(limit, collect, failed)

    def _recordings_of(self, model: keras.Model) -> Recordings:
        """The recordings of a model, which go on when it is compiled again."""
        # What was made for training has those of the first function.
        recordings = self._recordings.setdefault(model, model.train_function.recordings)
        model.train_function.recordings = recordings
        for function in (model.train_function, model.test_function):
            function.observers.add(recordings)
        return recordings

    def losses(self, model: keras.Model) -> Losses:
        """What was lost with workers that died or fell silent while the model trained.

        Args:
            model: a model that was compiled in this strategy's scope.

        Returns:
            How often a worker was lost, and the steps and batches that it took with it, in
            all calls of `fit` so far.

        Example:

        ```python
        model.fit(dataset)
        print(strategy.losses(model).batches, "batches were not trained on")
        ```
        """
        if not isinstance(model.train_function, model_functions.Steps):
            return Losses()
        return model.train_function.losses

    def describe_waits(self, model: keras.Model) -> str:
        """Who waits for whom while a model trains, in words, to see what holds a run up.

        In modes in which workers wait for each other, the parameter server that hands out tokens is
        asked, and under a `HopStrategy` each worker.

        Args:
            model: a model that was compiled in this strategy's scope.

        Returns:
            A text such as "worker 0 (2.1 s) waits for step 7 (token 14) on server 0 (at step 6); of
            step 6, at work: worker 3 (has token 13)"; empty where nobody ever waits for anybody,
            or nothing trains.

        Raises:
            RuntimeError: if a parameter server is lost, or silent for `silence_timeout` seconds.

        Example:

        ```python
        print(strategy.describe_waits(model))  # In a callback.
        ```
        """
        function = getattr(model, "train_function", None)
        if not isinstance(function, model_functions.Steps):
            return ""
        with self._guard.watched():
            return function.describe_waits()

    def members(self) -> tuple[Member, ...]:
        """What each server of the cluster does at the moment, as far as is known here.

        A lost worker shows as such until it takes part again; see also
        `recsync.callbacks.WorkerEvents`. Nobody is asked for it.

        Returns:
            The workers, then the parameter servers and the readers, each with its state and for
            how many seconds it has been in it.

        Example:

        ```python
        for member in strategy.members():
            print(member)  # Such as "worker:1 lost for 12 s".
        ```
        """
        return self._cluster.membership.members()

    def _check_servers(self, cluster: Cluster, arrangement: Arrangement) -> None:
        """Raises a ValueError if servers have not what the strategy needs; calls are watched."""

    def _put_functions(self, model: keras.Model) -> None:
        """Gives a model its train, test and predict functions."""
        raise NotImplementedError

    def _put_reading_functions(self, model: keras.Model, variables: OnServers) -> None:
        """The last two of these.

        Args:
            model: a model that was built in the strategy's scope.
            variables: where their steps find its variables.
        """
        model.test_function = model_functions.TestFunction(model, self._settings, variables)
        model.predict_function = PredictFunction(model, self._settings, variables)

    def _check_optimizer(self, model: keras.Model) -> None:
        """Raises a ValueError if the model's optimizer can't be used."""
        raise NotImplementedError


def _is_jit_compiled(model: keras.Model) -> bool:
    """Whether a user asks for it, in compile or later; Keras does not under a strategy."""
    compiled = getattr(model, "_compile_config", None)
    if compiled is not None and compiled.config.get("jit_compile") is True:
        return True
    return bool(model.jit_compile)


def _check_options(options) -> None:
    if options is not None:
        raise ValueError(f"options must be None, not {options!r}")


@dataclasses.dataclass(frozen=True)
class _Caller:
    """Who wants data to be distributed, as far as that shows.

    Attributes:
        model: whose fit, evaluate or predict it is; None if it is none of them.
        verb: which of them; "validate" if fit evaluates.
        steps: what its `steps` or `steps_per_epoch` says, or None.
        adapter: what Keras makes the dataset of the data with, and may know their batches and the
            examples of each by; None outside of these.
        arguments: what Keras makes its epoch iterator of.
        is_over: whether that call has ended, in whatever way.
    """

    model: keras.Model | None = None
    verb: str | None = None
    steps: int | None = None
    adapter: Any = None
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    is_over: Callable[[], bool] = lambda: False


class _IsOver:
    """Whether a call that was on this thread's stack has ended, in whatever way.

    An error that leaves `fit` tells nobody else, and the frames of its traceback refer to Keras's
    iterator for as long as somebody keeps it, as notebooks do.

    Args:
        frame: the call's; it is not kept.
    """

    def __init__(self, frame: types.FrameType):
        self._call = (threading.get_ident(), id(frame), frame.f_code)
        self._is_over = False
        self._asked = time.monotonic()

    def __call__(self) -> bool:
        # Every worker's thread asks, between all of its calls.
        if not self._is_over and time.monotonic() - self._asked > _ASK_SECONDS:
            self._asked = time.monotonic()
            self._is_over = not _engine.is_on_stack(*self._call)
        return self._is_over


def _keras_caller() -> _Caller:
    """Who called.

    Keras tells a strategy nothing of the model it distributes data for, and
    leaves no other place to learn it before the train function is needed.
    """
    found = _Caller()
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if hasattr(caller, "steps_per_execution") and hasattr(caller, "data_adapter"):
            # Keras's epoch iterator, whose adapter knows the length of shuffled arrays, too.
            found = dataclasses.replace(
                found,
                steps=caller.steps_per_epoch or None,  # As Keras takes 0.
                adapter=caller.data_adapter,
                arguments=frame.f_locals.get("kwargs", {}),
            )
        verb = frame.f_code.co_name
        if isinstance(caller, keras.Model) and verb in ("fit", "evaluate", "predict"):
            if verb == "fit" and "epoch_iterator" in frame.f_locals:
                verb = "validate"  # What is trained on has been distributed.
            return dataclasses.replace(found, model=caller, verb=verb, is_over=_IsOver(frame))
        frame = frame.f_back
    logging.warning("Called outside of model.fit, evaluate and predict; use strategy.attach.")
    return found


def check_reported(name: str, strategy: tf.distribute.Strategy) -> None:
    """Raises a ValueError if what has this name can't report on a strategy of another package."""
    if not isinstance(strategy, FitStrategy):
        raise ValueError(
            f"{name} can't report on a {type(strategy).__name__}; it is none of this package's"
        )
