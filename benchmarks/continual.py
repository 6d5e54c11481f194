"""What the benchmarks of continual training share: days of data, exact AUC, means of seeds.

A model trains on one day's clicks after the other, and after each day is tested on the next day's,
which it has not seen. The clicks are synthetic and drift (`tf_recsync.data.Synthetic`), or are
those of the Adult data set in equal parts, where the click model stays.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tf_recsync as recsync
from tf_recsync.metrics.exact import exact_auc

Features = dict[str, np.ndarray]
# The 0.975 quantile of Student's t distribution for 1, 2, ... degrees of freedom.
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)


class Days:
    """Days of clicks in memory; one more than is trained on.

    Args:
        features: of all days, arrays of `[rows, ...]`.
        labels: float32 `[rows, 1]`.
        spec: of the features.
        days: how many days to train on, at least 1.
        batch_size: examples of a training batch; rows that do not fill one are left out.
    """

    def __init__(
        self,
        features: Features,
        labels: np.ndarray,
        spec: recsync.data.FeatureSpec,
        days: int,
        batch_size: int,
    ):
        self.spec = spec
        self._features = features
        self._labels = labels
        self._rows = len(labels) // (days + 1) // batch_size * batch_size
        self._batch_size = batch_size
        if not self._rows:
            raise ValueError(f"{len(labels)} rows are too few for days={days} and a day to test on")

    @property
    def steps(self) -> int:
        """The batches of a day."""
        return self._rows // self._batch_size

    def part(self, day: int) -> tuple[Features, np.ndarray]:
        """The rows of a day."""
        rows = slice(day * self._rows, (day + 1) * self._rows)
        return {name: values[rows] for name, values in self._features.items()}, self._labels[rows]

    def train(self, day: int) -> tf.data.Dataset:
        """The batches of a day."""
        return tf.data.Dataset.from_tensor_slices(self.part(day)).batch(
            self._batch_size, drop_remainder=True
        )


def synthetic(
    days: int, rows: int, batch_size: int, drift: float, seed: int, **options: Any
) -> Days:
    """Drifting clicks of `rows` a day; see `tf_recsync.data.Synthetic` for the rest."""
    count = days + 1
    data = recsync.data.Synthetic(
        rows * count, test_rows=0, days=count, drift=drift, seed=seed, **options
    )
    return _collect(data, days, batch_size, None)


def adult(location: str, days: int, batch_size: int, seed: int) -> Days:
    """The Adult data set's training part, in random order."""
    return _collect(recsync.data.adult(location), days, batch_size, seed)


def _collect(data: recsync.data.ClickData, days: int, batch_size: int, shuffle: int | None) -> Days:
    batches = list(data.train(8192).as_numpy_iterator())
    order = np.arange(sum(len(labels) for _, labels in batches))
    if shuffle is not None:
        order = np.random.default_rng(shuffle).permutation(order)
    features = {
        name: np.concatenate([part[name] for part, _ in batches])[order] for name in batches[0][0]
    }
    labels = np.concatenate([labels for _, labels in batches])[order]
    return Days(features, labels, data.spec, days, batch_size)


@dataclasses.dataclass(frozen=True)
class Score:
    """How well a model predicts a day.

    Attributes:
        auc: the area under the ROC curve, exact.
        loss: the mean log loss.
    """

    auc: float
    loss: float


class Judge:
    """Tests models on this machine's own processor, without the cluster.

    Args:
        model: one like those to be tested, in no strategy's scope; needs no optimizer.
        folder: for weights on their way.
    """

    def __init__(self, model: keras.Model, folder: pathlib.Path):
        self._model = model
        self._path = folder / "judged.weights.h5"

    def score(self, model: keras.Model, days: Days, day: int) -> Score:
        """How well a model, on a cluster or not, predicts a day."""
        model.save_weights(self._path)
        self._model.load_weights(self._path, skip_mismatch=False)
        features, labels = days.part(day)
        predictions = self._model.predict(features, batch_size=4096, verbose=0)
        clicked, predicted = labels[:, 0], predictions[:, 0]
        return Score(exact_auc(clicked, predicted), log_loss(clicked, predicted))


def log_loss(labels: np.ndarray, predictions: np.ndarray) -> float:
    """The mean log loss of `[rows]` labels and predictions."""
    p = np.clip(predictions.astype(np.float64), 1e-7, 1 - 1e-7)
    return float(-np.mean(labels * np.log(p) + (1 - labels) * np.log1p(-p)))


@dataclasses.dataclass(frozen=True)
class Mean:
    """The mean of a few measurements.

    Attributes:
        mean: the mean.
        half_width: of the 95 % confidence interval (Student's t); None with one measurement.
    """

    mean: float
    half_width: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        """That of one value a seed."""
        n = len(values)
        if n < 2:
            return cls(float(np.mean(values)), None)
        t = _T[n - 2] if n - 2 < len(_T) else 2.0
        return cls(float(np.mean(values)), float(t * np.std(values, ddof=1) / math.sqrt(n)))

    def __format__(self, spec: str) -> str:
        if self.half_width is None:
            return format(self.mean, spec)
        return f"{format(self.mean, spec)} ± {format(self.half_width, spec.lstrip('+'))}"

    def as_list(self) -> list[float]:
        """For JSON: the mean, and the half-width if there is one."""
        values = [self.mean] if self.half_width is None else [self.mean, self.half_width]
        return [round(value, 6) for value in values]
