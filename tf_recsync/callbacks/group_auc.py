"""The group AUC of a dataset after each epoch."""

from __future__ import annotations

import math

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tf_recsync.metrics.exact import group_auc
from tf_recsync.strategies.distributed_dataset import iterated_here


class GroupAUC(keras.callbacks.Callback):
    """Adds the group AUC (GAUC) of a dataset to each epoch's logs.

    The group AUC is the mean of the areas under the ROC curves of groups, such as users, see
    `recsync.metrics.group_auc`. A Keras metric can't compute it, as it learns nothing of groups.
    After each epoch the model predicts the dataset, under any strategy or none, and the value goes
    to the progress bar and `History`. Put the callback before those that read it. The value is NaN
    if a prediction is, as of a model that has diverged.

    Args:
        dataset: a `tf.data.Dataset` of batches `(inputs, labels)` or `(inputs, labels,
            sample_weight)`, of which inputs are a dict, with an end. It gives its examples in the
            same order each time: it is not shuffled. Their labels, groups and weights are read
            when training begins, and kept in memory. Labels are 0 or 1, [batch] or [batch, 1].
        group: the name of the input that says to which group an example belongs; integers or
            strings, [batch] or [batch, 1].
        name: the name in the logs, "val_gauc" by default.

    Raises:
        ValueError: if an argument is none of these; when training begins, if the dataset is not
            as above; after an epoch, if the model does not predict one number for each example.

    Example:

    >>> import numpy as np
    >>> user = keras.Input((1,), name="user")
    >>> model = keras.Model({"user": user}, keras.layers.Dense(1, "sigmoid")(user))
    >>> model.compile("sgd", "binary_crossentropy")
    >>> inputs, labels = {"user": np.array([[1.0], [1.0], [2.0]])}, np.array([1.0, 0.0, 1.0])
    >>> data = tf.data.Dataset.from_tensor_slices((inputs, labels)).batch(2)
    >>> history = model.fit(data, verbose=0, callbacks=[GroupAUC(data, group="user")])
    >>> history.history["val_gauc"]
    [0.5]
    """

    def __init__(self, dataset: tf.data.Dataset, group: str, name: str = "val_gauc"):
        super().__init__()
        if not isinstance(dataset, tf.data.Dataset):
            kind = type(dataset).__name__
            raise ValueError(f"dataset: is a {kind}, must be a tf.data.Dataset.")
        if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
            raise ValueError("dataset: repeats without an end; it must have one, as by take(steps)")
        inputs, *labels = _parts(dataset.element_spec)
        if not labels:
            raise ValueError(
                f"dataset: gives {dataset.element_spec}, must give (inputs, labels) or "
                "(inputs, labels, sample_weight)."
            )
        names = sorted(inputs) if isinstance(inputs, dict) else inputs
        if not isinstance(inputs, dict) or group not in inputs:
            raise ValueError(f"group={group!r}: must be a key of the dataset's inputs, {names}.")
        self._dataset, self._group, self._name = dataset, group, name
        self._examples: list[np.ndarray] = []
        self._has_told = False

    def on_train_begin(self, logs=None):
        self._has_told = False
        # The same examples for all epochs, in the order in which they are predicted.
        batches = [self._read(batch) for batch in iterated_here(self._dataset)]
        if not batches:
            raise ValueError("dataset: has no batches, must have one at least.")
        for batch in iterated_here(self._dataset, 1):
            if not all(map(np.array_equal, self._read(batch), batches[0])):
                raise ValueError(
                    "dataset: gives its examples in another order each time, must give them in the "
                    "same; don't shuffle it, or with reshuffle_each_iteration=False."
                )
        self._examples = [np.concatenate(parts) for parts in zip(*batches, strict=True)]

    def _read(self, batch) -> tuple[np.ndarray, ...]:
        """Labels, groups and, if there are any, weights of a batch."""
        inputs, labels, *weights = _parts(batch)
        return tuple(
            np.reshape(part, [len(part), math.prod(np.shape(part)[1:])])  # There may be no example.
            for part in (labels, inputs[self._group], *weights)
        )

    def on_epoch_end(self, epoch, logs=None):
        labels, groups, *weights = self._examples
        predictions = self.model.predict(self._dataset, verbose=0)
        if not isinstance(predictions, np.ndarray):
            raise ValueError(
                f"GroupAUC: the model predicts {type(predictions).__name__}, must predict one "
                "number for each example."
            )
        if np.isnan(predictions).any():
            value = float("nan")
            if not self._has_told:
                self._has_told = True
                logging.warning(
                    "%s is NaN: the model predicts NaN after epoch %d.", self._name, epoch
                )
        else:
            value = group_auc(labels, predictions, groups, *weights)
        if logs is not None:
            logs[self._name] = value


def _parts(element) -> tuple:
    """Inputs, labels and weights of a dataset's element, those that there are."""
    parts = element if isinstance(element, tuple) else (element,)
    return parts if len(parts) < 3 or parts[2] is not None else parts[:2]
