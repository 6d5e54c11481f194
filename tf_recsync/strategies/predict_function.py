"""What Keras calls in place of its own predict function."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import concat

from tf_recsync.cluster import fetch
from tf_recsync.cluster.making_functions import making_functions
from tf_recsync.strategies import watched_calls, worker_functions
from tf_recsync.strategies.distributed_dataset import DistributedIterator
from tf_recsync.strategies.leases import Leases
from tf_recsync.strategies.model_functions import Settings
from tf_recsync.strategies.model_variables import OnServers
from tf_recsync.strategies.pass_batches import PassBatches
from tf_recsync.strategies.slots import Slot
from tf_recsync.strategies.worker_run import WorkerRun
from tf_recsync.strategies.worker_state import WorkerState, initial_values
from tf_recsync.synchronization import links
from tf_recsync.synchronization.pull_push import Layout
from tf_recsync.synchronization.remote_functions import RemoteFunction
from tf_recsync.synchronization.seeds import WorkerSeeds


class PredictFunction:
    """`model.predict_function` under a parameter-server strategy.

    The iterator that Keras takes its batches from gives predictions already, in
    the order of the data; here they are only put together.

    Args:
        model: a model that was built in the strategy's scope.
        settings: of the strategy.
        variables: where its steps find the model's variables.
    """

    def __init__(self, model: keras.Model, settings: Settings, variables: OnServers):
        self._model = model
        self._settings = settings
        self._variables = variables
        self._seeds = WorkerSeeds()
        self._key: Hashable = None
        self._traced: tuple[Callable, Layout] | None = None

    def forget_traced(self) -> None:
        """What the function refers to is made anew: it is traced again before it is used."""
        self._key = self._traced = None

    def __call__(self, batches: list[Any]) -> Any:
        outputs = [
            batch.outputs
            if isinstance(batch, Predicted)
            else self._model.predict_step(batch)  # predict_on_batch
            for batch in batches
        ]
        if len(outputs) == 1:
            return outputs[0]
        return keras.tree.map_structure(lambda *parts: concat(list(parts)), *outputs)

    def _function(self, element_spec: Any) -> tuple[Callable, Layout]:
        """Predicts a batch; and where it finds the variables. Traced where it has changed."""
        bandwidths = self._settings.bandwidths.copy()
        key = self._variables.trace_key(element_spec, bandwidths)
        if key != self._key:
            layout = self._variables.layout()
            with links.limited(bandwidths):
                traced = making_functions(
                    lambda: worker_functions.trace_predict(self._model, layout, element_spec)
                )
            self._key, self._traced = key, (RemoteFunction(traced), layout)
        return self._traced

    def start(self, iterator: DistributedIterator) -> WorkerRun:
        """Starts the workers on a pass; called by the iterator."""
        settings = self._settings
        cluster, unneeded = settings.cluster, self._variables.unneeded(settings.cluster.ps)
        with watched_calls.watched(cluster, settings.silence_timeout, unneeded):
            batches = iterator.batches = PassBatches(iterator.distributed, cluster.workers)
            is_over = iterator.distributed.is_over
            function, layout = self._function(batches.data.element_spec)
            initial = initial_values(layout.private)

        def open_worker(slot: Slot):
            private = self._seeds.values(layout.private, initial, slot.number)
            slot.state = WorkerState(slot.index, None, batches.iterator(slot), private)

        def call(slot: Slot, n: int):
            del n
            try:
                number, outputs = function(slot.state.iterator, *slot.state.inputs)
            except tf.errors.OutOfRangeError:
                return 0, True, None
            specs = tf.nest.map_structure(tf.type_spec_from_value, outputs)
            number, *arrays = fetch([number, *tf.nest.flatten(outputs, expand_composites=True)])
            predicted, number = Predicted(specs, arrays), int(number)
            batches.note(slot, [number])
            return 1, False, (number, predicted)

        run = WorkerRun(
            cluster,
            Leases(1, 1, cluster.workers),
            batches,
            open_worker,
            call,
            lambda: bool(getattr(self._model, "stop_predicting", False)) or is_over(),
            settings.worker_timeout,
            settings.silence_timeout,
            unneeded=unneeded,
            is_reading=True,
            while_waiting=self._model.train_function.tell_observers,
        )
        steps = iterator.distributed.steps_per_epoch
        run.grant(float("inf") if steps is None else steps)
        return run


class Predicted:
    """The outputs of one batch.

    Args:
        specs: their type specs, in their structure.
        arrays: of all tensors that they are made of.
    """

    def __init__(self, specs: Any, arrays: list[np.ndarray]):
        self._specs = specs
        self._arrays = arrays

    @property
    def outputs(self) -> Any:
        """The outputs as tensors of this process."""
        with tf.device("/CPU:0"):
            tensors = [tf.constant(array) for array in self._arrays]
        return tf.nest.pack_sequence_as(self._specs, tensors, expand_composites=True)
