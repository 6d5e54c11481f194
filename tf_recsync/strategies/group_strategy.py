"""The strategies' common base: plain Keras `model.fit` on workers and parameter servers."""

from __future__ import annotations

import inspect

import keras
import numpy as np
import tensorflow as tf
from absl import logging
from tensorflow.python.data.experimental.ops import distribute

from tf_recsync import staleness
from tf_recsync.cluster import Cluster
from tf_recsync.strategies import model_functions, worker_functions, worker_run
from tf_recsync.strategies.distributed_dataset import DataService, DistributedDataset
from tf_recsync.synchronization import aggregation
from tf_recsync.synchronization.modes import Mode


class GroupStrategy(tf.distribute.ParameterServerStrategy):
    """One group of workers, which share the parameters on the servers.

    A `tf.distribute.ParameterServerStrategy` on which `model.fit`, `evaluate`
    and `predict` of Keras 3 work: build and compile the model in `scope()`, with
    an optimizer of `tf_recsync.optimizers`, and call them as usual, with a
    batched tf.data.Dataset. Each batch goes to one worker, and a faster worker
    takes more. Metrics are kept by each worker and merged when read.

    The base of the strategies, which differ in their mode: when a worker may start on
    a batch, and when the servers apply what workers push.

    Args:
        cluster: a `LocalCluster`, or what `cluster_from_tf_config` returned, with
            at least one worker and one parameter server.
        mode: a row of the table in `tf_recsync.synchronization.modes`.
        worker_timeout: seconds without any reachable worker after which training
            fails.
        local_batch_size: examples of a batch, or None if that is not known.
        prefetch_lookups: whether a step pulls the rows that the next one looks up.
    """

    pushes_gradients = True  # Optimizers are applied in the workers' steps only.

    def __init__(
        self,
        cluster: Cluster,
        mode: Mode,
        worker_timeout: float,
        local_batch_size: int | None = None,
        prefetch_lookups: bool = False,
    ):
        if not isinstance(prefetch_lookups, bool):
            raise ValueError(f"prefetch_lookups must be a bool, not {prefetch_lookups!r}")
        if not isinstance(worker_timeout, (int, float)) or not worker_timeout > 0:
            raise ValueError(f"worker_timeout must be positive, in seconds, not {worker_timeout!r}")
        if local_batch_size is not None:
            check_at_least("local_batch_size", local_batch_size, 1)
        self._cluster = cluster
        self._mode = mode
        self._local_batch_size = local_batch_size
        self._compute_time: worker_functions.ComputeTime | None = None
        self._bandwidths: dict[str, float] = {}  # By the server's device, artificial.
        super().__init__(cluster.resolver)
        # What variables are colocated with that shall be on a certain server.
        self._anchors = [self._anchor(i) for i in range(cluster.ps)]
        self._data_service = DataService(cluster.host, cluster.workers)
        self._settings = model_functions.Settings(
            cluster=cluster,
            worker_timeout=worker_timeout,
            compute_time=lambda: self._compute_time,
            bandwidths=lambda: dict(self._bandwidths),
            mode=mode,
            home=self._anchors[0].device,
            prefetch_lookups=prefetch_lookups,
        )

    @property
    def mode(self) -> Mode:
        """When workers start and servers apply."""
        return self._mode

    @property
    def examples_per_step(self) -> int | None:
        """The examples of a global step, or None if `local_batch_size` was not given."""
        size = self._local_batch_size
        return None if size is None else size * self._mode.capacity

    @property
    def cluster(self) -> Cluster:
        """The cluster that the strategy runs on."""
        return self._cluster

    def _anchor(self, ps: int) -> tf.Variable:
        with tf.device(f"/job:ps/replica:0/task:{ps}/device:CPU:0"):
            return tf.Variable(0.0, trainable=False)

    def placed_on(self, ps: int):
        """A context in which variables are made on one parameter server.

        Args:
            ps: its task index. Without this context variables go round robin.

        Raises:
            ValueError: if there is no such server.
        """
        if not 0 <= ps < self._cluster.ps:
            raise ValueError(f"ps must be from 0 to {self._cluster.ps - 1}, not {ps!r}")
        anchor = self._anchors[ps]
        return tf.variable_creator_scope(
            lambda create, **kwargs: create(**{**kwargs, "colocate_with": anchor})
        )

    def _connect_to_cluster(self, coordinator_name: str) -> None:
        # Without the base class's device filters, which hide workers from each
        # other, and shared by all strategies on this cluster.
        self._num_workers = self._cluster.workers
        self._num_ps = self._cluster.ps
        self._cluster.connect()

    def experimental_distribute_dataset(self, dataset, options=None):
        """Distributes a dataset; `model.fit` and its like call this.

        Args:
            dataset: a batched `tf.data.Dataset`.
            options: must be None.

        Returns:
            A dataset whose batches go to one worker each.
        """
        if options is not None:
            raise ValueError(f"options must be None, not {options!r}")
        model, verb, steps, length, batch = _keras_caller()
        if model is not None:
            self.attach(model)
        if steps is not None and verb in ("evaluate", "predict"):
            # The first batches, whichever workers they go to.
            dataset, steps = dataset.take(steps), None
        batch = self._batch_size(dataset, batch) if verb == "fit" else None
        start_predict = model.predict_function.start if verb == "predict" else None
        return DistributedDataset(self._data_service, dataset, start_predict, steps, length, batch)

    def _batch_size(self, dataset: tf.data.Dataset, known: int | None) -> int | None:
        """The examples of a dataset's batches, the last one apart; None if they can't be known.

        Args:
            dataset: batches.
            known: what Keras knows of them.

        Raises:
            ValueError: if the strategy was told something else.
        """
        told = self._local_batch_size
        if known is None and told is None:
            with tf.device("/CPU:0"):
                found = int(distribute.compute_batch_size(dataset))
            return found if found > 0 else None
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
            ValueError: if the model or its optimizer was made outside of the scope, or
                can't be trained on parameter servers.
        """
        if model._distribute_strategy is not self:
            raise ValueError(f"model {model.name} was not made inside this strategy's scope()")
        for optimizer in model_functions.optimizers_of(model):
            if optimizer._distribution_strategy is not self:
                raise ValueError(
                    f"optimizer {optimizer.name} was not made inside this strategy's scope()"
                )
        if isinstance(model.train_function, model_functions.TrainFunction):
            return
        if getattr(model, "run_eagerly", False):
            raise ValueError("run_eagerly=True can't be used under this strategy")
        model.train_function = model_functions.TrainFunction(model, self._settings)
        model.test_function = model_functions.TestFunction(model, self._settings)
        model.predict_function = model_functions.PredictFunction(model, self._settings)
        if model.built and model.optimizer is not None and not model.optimizer.built:
            with self.scope():
                model.optimizer.build(model.trainable_variables)

    def staleness(self, model: keras.Model) -> staleness.Report:
        """The staleness measured by the servers since the model's optimizer was built.

        Where servers collect pushes, that of dense variables is in global steps, of each
        push counted since the model began to train here; that of rows, and of single
        variables, is of each application, for the oldest gradient in it.

        Args:
            model: a model that was compiled in this strategy's scope.

        Returns:
            Statistics of the dense variables, of the rows of embedding tables,
            and of each variable.

        Raises:
            RuntimeError: if a parameter server is lost.
        """
        states = [s for o in model_functions.optimizers_of(model) for s in o.states]
        try:
            counters = {s.variable.path: np.asarray(s.counters._value.read_value()) for s in states}
        except tf.errors.OpError as error:
            worker_run.check_parameter_servers(self._cluster, error)
            raise
        of = staleness.Statistics.from_counters
        dense = of(counters[s.variable.path] for s in states if not s.is_table)
        if self._mode.uses_buffers:
            pushes = self.aggregation(model)
            dense = pushes.staleness if pushes is not None else of([])
        return staleness.Report(
            dense=dense,
            rows=of(counters[s.variable.path] for s in states if s.is_table),
            variables={path: of([values]) for path, values in counters.items()},
        )

    def worker_steps(self, model: keras.Model) -> list[int]:
        """How far each worker has got, to see which ones are slow.

        Args:
            model: a model that was compiled in this strategy's scope.

        Returns:
            For each worker, by its index, the training steps that it has finished in the
            pass that runs, or ran last: a call of `fit`. Those in flight do not count.
            All 0 before the model trains.
        """
        if not isinstance(model.train_function, model_functions.TrainFunction):
            return [0] * self._cluster.workers
        return model.train_function.worker_steps()

    def aggregation(self, model: keras.Model) -> aggregation.Report | None:
        """What became of the workers' pushes since the model began to train.

        Args:
            model: a model that was compiled in this strategy's scope.

        Returns:
            Counts of pushes included, decayed, excluded, dropped and lost, ages of
            tokens, staleness in global steps; None before the model trains, and where
            servers apply each push at once and no tokens are used.
        """
        live = getattr(model.train_function, "aggregation", None)
        return None if live is None else live.report()


def check_cluster(strategy: str, cluster: Cluster, workers: int = 1) -> None:
    """Raises a ValueError if a strategy can't run on a cluster."""
    if not isinstance(cluster, Cluster):
        raise ValueError(
            f"cluster must be a LocalCluster or from cluster_from_tf_config, not {cluster!r}"
        )
    if cluster.workers < workers or cluster.ps < 1:
        number = "one worker" if workers == 1 else f"{workers} workers"
        raise ValueError(
            f"{strategy} needs at least {number} and one ps, the cluster has "
            f"workers={cluster.workers} and ps={cluster.ps}"
        )


def check_at_least(name: str, value: int, least: int) -> None:
    """Raises a ValueError if an argument is not an int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an int of at least {least}, not {value!r}")


def _keras_caller() -> tuple[keras.Model | None, str | None, int | None, int | None, int | None]:
    """The model whose fit, evaluate or predict is called, which, its steps, length and batch size.

    Keras tells a strategy nothing of the model it distributes data for, and
    leaves no other place to learn it before the train function is needed.
    """
    steps = length = batch = None
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if hasattr(caller, "steps_per_execution") and hasattr(caller, "data_adapter"):
            # Keras's epoch iterator, which knows the length of shuffled arrays, too.
            steps, length = caller.steps_per_epoch, caller.num_batches
            batch = caller.data_adapter.batch_size
        verb = frame.f_code.co_name
        if isinstance(caller, keras.Model) and verb in ("fit", "evaluate", "predict"):
            return caller, verb, steps, length, batch
        frame = frame.f_back
    logging.warning("Called outside of model.fit, evaluate and predict; use strategy.attach.")
    return None, None, steps, length, batch
