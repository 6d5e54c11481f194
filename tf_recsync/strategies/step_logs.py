"""What a step returns to be shown: metrics' results, merged over workers, and other numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend
from tensorflow.python.data.util import structure


class NewLogged(Exception):
    """Steps return numbers that have no variables: they are to be made, and steps traced anew.

    Attributes:
        names: of the numbers.
    """

    def __init__(self, names: Sequence[str]):
        super().__init__(names)
        self.names = tuple(names)


class Logged:
    """Numbers that steps return and that are no metrics, such as a term of the loss.

    As in one process, what is shown is that of the last step: the mean over workers of that of
    each one's last step.

    Attributes:
        variables: of each, by its name: [2], its value and 1; zeros before a worker's first step.
    """

    def __init__(self):
        self.variables: dict[str, keras.Variable] = {}

    def add(self, names: Iterable[str]) -> None:
        """Makes variables of numbers that have none, in this process."""
        with tf.device("/CPU:0"):
            for name in names:
                self.variables[name] = keras.Variable(
                    np.zeros(2), dtype="float64", trainable=False, name="logged_number"
                )

    def note(self, values: Mapping[str, Any]) -> None:
        """Has a step that is traced keep its numbers."""
        for name, value in values.items():
            value = tf.cast(value, tf.float64)
            self.variables[name].assign(tf.stack([value, tf.ones_like(value)]))

    def results(self, sums: Iterable[np.ndarray]) -> dict[str, np.ndarray]:
        """The means of those that a worker has returned.

        Args:
            sums: of `variables`, over workers.
        """
        pairs = zip(self.variables, sums, strict=True)
        return {name: total / count for name, (total, count) in pairs if count}


class StepLogs:
    """The logs of a model's steps, computed from metrics that were merged over workers.

    What the model's own `compute_metrics` makes of its metrics, it makes of the merged ones.

    Args:
        model: a built, compiled model.
        method: "train_step" or "test_step".
        element_spec: the type spec of a batch.
        logged: what steps return besides metrics, and have returned where they were traced before.
    """

    def __init__(self, model: keras.Model, method: str, element_spec: Any, logged: Logged):
        self._model = model
        self._method = method
        self._logged = logged
        # What the step returns of metrics, once it is traced, and what is none.
        self._metrics: set[str] | None = None
        self._numbers: set[str] = set()
        # What Keras's own steps return, or {m.name: m.result() for m in self.metrics}.
        self._names = [(metric, _names_of(metric)) for metric in model.metrics]
        self._known = {*model.get_metrics_result(), *(n for _, names in self._names for n in names)}
        self._compute: Callable[..., dict[str, tf.Tensor]] | None = None
        if type(model).compute_metrics is not keras.Model.compute_metrics:
            self._compute = _trace(model, element_spec)
            self._known |= set(self._compute.structured_outputs)

    def check(self, logs: Any, is_assigned: Callable[[keras.Variable], bool]) -> None:
        """Takes what a step returned when it was traced; call it where its variables are assigned.

        Args:
            logs: what it returned.
            is_assigned: whether it has assigned a variable of a metric. What has the name of one
                that it has not updated is a number, such as the "loss" of a step that computes it
                by itself.

        Raises:
            NewLogged: if there are numbers among it that have no variables.
            ValueError: if it can't be merged over workers.
        """
        is_dict = isinstance(logs, dict)
        unused = {
            name
            for metric, names in self._names
            if metric.variables and not any(map(is_assigned, metric.variables))
            for name in names
        }
        numbers = {n for n, value in logs.items() if _is_number(value)} if is_dict else set()
        metrics = self._known - (unused & numbers)
        others = {n: v for n, v in logs.items() if n not in metrics} if is_dict else {}
        wrong = sorted(others.keys() - numbers)
        if wrong or not is_dict:
            raise ValueError(
                f"{type(self._model).__name__}.{self._method} must return a dict of the results of "
                f"the model's metrics ({sorted(self._known)}), which are merged over workers, and "
                f"of numbers (scalar tensors); it returned {wrong or repr(logs)}. Report them "
                "through a keras.metrics.Metric, or compute them from metrics in compute_metrics."
            )
        unknown = others.keys() - self._logged.variables
        if unknown:
            raise NewLogged(sorted(unknown))
        self._logged.note(others)
        self._metrics, self._numbers = set(logs) - set(others), set(others)

    def results(self, sums: Iterable[np.ndarray] = ()) -> dict[str, Any]:
        """The logs, with the metrics' variables as they are now.

        Args:
            sums: of the variables of numbers, over workers.
        """
        numbers = self._logged.results(sums)
        logs = {**self._of_metrics(), **{n: v for n, v in numbers.items() if n in self._numbers}}
        # Keras converts them at each step. Tensors of this process, as its own steps return, take
        # it a tenth of the time that numbers take, which it has to find out are none; and tensors
        # on a server would take a call each.
        with tf.device("/CPU:0"):
            return keras.tree.map_structure(lambda value: tf.constant(np.asarray(value)), logs)

    def _of_metrics(self) -> dict[str, Any]:
        if self._compute is None:
            found = self._model.get_metrics_result()
        else:
            variables = self._model.metrics_variables
            with tf.device("/CPU:0"):
                found = self._compute(*[tf.constant(np.asarray(v)) for v in variables])
        # A metric's own name may stand for several results, as that of the compiled ones.
        if self._metrics is None or not self._metrics <= found.keys():
            return found
        return {name: value for name, value in found.items() if name in self._metrics}


class _Merged(keras.StatelessScope):
    """Has metrics keep the values that they were given, whatever they are updated with."""

    def add_update(self, update):
        del update


def _trace(model: keras.Model, element_spec: Any) -> Callable[..., dict[str, tf.Tensor]]:
    """Traces the model's compute_metrics as a function of its metrics' variables."""
    variables = model.metrics_variables

    def symbolic(spec):
        if isinstance(spec, structure.NoneTensorSpec):
            return None
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


def _names_of(metric: keras.Metric) -> set[str]:
    """A metric's name, and those of what it results in, as that of the compiled ones."""
    result = metric.result()
    return {metric.name, *(result if isinstance(result, dict) else ())}


def _is_number(value: Any) -> bool:
    """Whether it is a scalar that can be averaged."""
    if isinstance(value, (str, bytes)) or keras.tree.is_nested(value):
        return False
    try:
        value = tf.convert_to_tensor(value)
    except (TypeError, ValueError):
        return False
    is_numeric = value.dtype.is_floating or value.dtype.is_integer or value.dtype.is_bool
    return is_numeric and value.shape.rank == 0


def _zeros(tensor: Any) -> Any:
    if not isinstance(tensor, keras.KerasTensor):
        return tensor
    return tf.zeros([size or 1 for size in tensor.shape], tensor.dtype)
