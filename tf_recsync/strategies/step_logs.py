"""What a step returns to be shown: the results of metrics, merged over workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend


class StepLogs:
    """The logs of a model's steps, computed from metrics that were merged over workers.

    What the model's own `compute_metrics` makes of its metrics, it makes of the merged ones.

    Args:
        model: a built, compiled model.
        method: "train_step" or "test_step".
        element_spec: the type spec of a batch.
    """

    def __init__(self, model: keras.Model, method: str, element_spec: Any):
        self._model = model
        self._method = method
        self._returned: set[str] | None = None  # By the step, once it is traced.
        # What Keras's own steps return, or {m.name: m.result() for m in self.metrics}.
        self._known = {*model.get_metrics_result(), *(metric.name for metric in model.metrics)}
        self._compute: Callable[..., dict[str, tf.Tensor]] | None = None
        if type(model).compute_metrics is not keras.Model.compute_metrics:
            self._compute = _trace(model, element_spec)
            self._known |= set(self._compute.structured_outputs)

    def check(self, logs: Any) -> None:
        """Takes what a step returned when it was traced.

        Raises:
            ValueError: if it can't be computed from merged metrics.
        """
        unknown = set(logs) - self._known if isinstance(logs, dict) else {repr(logs)}
        if unknown:
            raise ValueError(
                f"{type(self._model).__name__}.{self._method} must return the results of the "
                f"model's metrics ({sorted(self._known)}), which can be merged over workers; it "
                f"also returned {sorted(unknown)}. Report them through a keras.metrics.Metric, "
                "or compute them from metrics in compute_metrics."
            )
        self._returned = set(logs)

    def results(self) -> dict[str, Any]:
        """The logs, as numbers, with the metrics' variables as they are now."""
        if self._compute is None:
            found = self._model.get_metrics_result()
        else:
            variables = self._model.metrics_variables
            with tf.device("/CPU:0"):
                found = self._compute(*[tf.constant(np.asarray(v)) for v in variables])
        # As numbers: Keras converts them at each step, and on a server that takes a call each.
        found = keras.tree.map_structure(np.asarray, found)
        # A metric's own name may stand for several results, as that of the compiled ones.
        if self._returned is None or not self._returned <= found.keys():
            return found
        return {name: value for name, value in found.items() if name in self._returned}


class _Merged(keras.StatelessScope):
    """Has metrics keep the values that they were given, whatever they are updated with."""

    def add_update(self, update):
        del update


def _trace(model: keras.Model, element_spec: Any) -> Callable[..., dict[str, tf.Tensor]]:
    """Traces the model's compute_metrics as a function of its metrics' variables."""
    variables = model.metrics_variables

    def symbolic(spec):
        return keras.KerasTensor(spec.shape, spec.dtype.name)

    def compute(*values):
        # Only its shape counts: metrics are not updated.
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(
            tf.nest.map_structure(symbolic, element_spec)
        )
        y_pred = backend.compute_output_spec(model, x, training=False)
        batch = keras.tree.map_structure(_zeros, (x, y, y_pred, sample_weight))
        with _Merged(state_mapping=list(zip(variables, values, strict=True))):
            return model.compute_metrics(*batch)

    specs = [tf.TensorSpec(variable.shape, variable.dtype) for variable in variables]
    with tf.device("/CPU:0"):
        return tf.function(compute, autograph=False).get_concrete_function(*specs)


def _zeros(tensor: Any) -> Any:
    if not isinstance(tensor, keras.KerasTensor):
        return tensor
    return tf.zeros([size or 1 for size in tensor.shape], tensor.dtype)
