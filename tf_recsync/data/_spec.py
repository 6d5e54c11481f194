"""What every click data set offers: the description of its features and the common interface."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tf_recsync._checks import check_at_least, check_bool, integer, list_of

NUMERIC = "numeric"


@dataclasses.dataclass(frozen=True)
class FeatureSpec:
    """The features of a data set, enough to build a model for it.

    Every element of a data set is `(features, label)` where `features` is a dict with

    * `"numeric"`: float32 `[batch, len(numeric)]`, the numeric features side by side;
    * one int64 `[batch]` entry per categorical feature, under its name, with ids from 0 up to
      (not including) the number given in `categorical`; for a multi-hot feature an int64
      `tf.RaggedTensor` `[batch, None]` instead,
    * one float32 `tf.RaggedTensor` `[batch, None]` for each feature whose ids have weights, under
      its name and `_weights`,

    and `label` is float32 `[batch, 1]`, 1 for a click, or a dict of these, one for each of several
    labels. Where rows have weights, an element is `(features, label, weight)`, where `weight` is
    float32 `[batch]`.

    Args:
        numeric: Names of the numeric features, in the order of the columns of `"numeric"`.
        categorical: Name of each categorical feature and how many ids it has (at least 1).
        multi_hot: Names of those of which a row has any number of ids. Default none.
        weighted: Names of those of these whose ids have weights. Default none.
        labels: Names of the labels where there are several. Default none: there is one.
        has_weight: Whether rows have weights. Default False.

    Raises:
        ValueError: If a categorical feature is called `"numeric"` or has fewer than one id, or
            names are one text in place of several.

    Example:
        >>> spec = FeatureSpec(numeric=("age",), categorical={"country": 4})
        >>> spec.input_signature()[0]["country"].shape.as_list()
        [None]
    """

    numeric: tuple[str, ...]
    categorical: Mapping[str, int]
    multi_hot: tuple[str, ...] = ()
    weighted: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    has_weight: bool = False

    def __post_init__(self) -> None:
        """Checks the names and sizes, and copies the containers so that they cannot change."""
        for name in ("numeric", "multi_hot", "weighted", "labels"):
            object.__setattr__(self, name, list_of(name, getattr(self, name), str))
        check_bool("has_weight", self.has_weight)
        if not isinstance(self.categorical, Mapping):
            raise ValueError(
                f"categorical={self.categorical!r}: must be a dict of names and sizes."
            )
        sizes = {
            name: integer(f"categorical[{name!r}]", size, 1)
            for name, size in self.categorical.items()
        }
        object.__setattr__(self, "categorical", sizes)
        if NUMERIC in self.categorical:
            raise ValueError(
                f"categorical={self.categorical}: the name {NUMERIC!r} is taken by the numeric "
                "features; give the column another name."
            )
        list_of("categorical", list(sizes), str)

    def input_signature(self, batch_size: int | None = None) -> tuple[Any, ...]:
        """Returns the `tf.TypeSpec`s of `(features, label)`, or of `(features, label, weight)`.

        Args:
            batch_size: The first dimension; None (the default) leaves it open.

        Returns:
            A dict of specs under the names of the features, the spec of the label or a dict of
            those of several labels, and, where rows have weights, that of the weight.
        """
        features = {NUMERIC: tf.TensorSpec([batch_size, len(self.numeric)], tf.float32, NUMERIC)}
        for name in self.categorical:
            if name in self.multi_hot:
                features[name] = tf.RaggedTensorSpec([batch_size, None], tf.int64)
            else:
                features[name] = tf.TensorSpec([batch_size], tf.int64, name)
        for name in self.weighted:
            weights = tf.RaggedTensorSpec([batch_size, None], tf.float32)
            features[f"{name}_weights"] = weights
        label = tf.TensorSpec([batch_size, 1], tf.float32, "label")
        if self.labels:
            label = {name: tf.TensorSpec([batch_size, 1], tf.float32, name) for name in self.labels}
        if not self.has_weight:
            return features, label
        return features, label, tf.TensorSpec([batch_size], tf.float32, "weight")


class ClickData(abc.ABC):
    """A data set with a training part and a test part.

    `Criteo`, `Csv`, `Parquet`, `TfRecord` and `Synthetic` share this interface, so that code which
    trains a model needs to know only `spec`, `train` and `test`.

    Example:

    >>> import tf_recsync as recsync
    >>> data = recsync.data.Synthetic(rows=100, test_rows=10, cardinalities=[5])
    >>> isinstance(data, recsync.data.ClickData), data.train_rows, data.test_rows
    (True, 100, 10)
    """

    @property
    @abc.abstractmethod
    def spec(self) -> FeatureSpec:
        """The names and sizes of the features."""

    @property
    @abc.abstractmethod
    def train_rows(self) -> int:
        """The number of rows of the training part."""

    @property
    @abc.abstractmethod
    def test_rows(self) -> int:
        """The number of rows of the test part; 0 when there is none."""

    @abc.abstractmethod
    def train(self, batch_size: int, shuffle: int = 0, seed: int | None = None) -> tf.data.Dataset:
        """Returns the training part as batches; the last one may be smaller.

        Args:
            batch_size: Rows per batch, at least 1.
            shuffle: Size in rows of the shuffle buffer, such as 100_000; 0 (the default) keeps the
                order of the rows. Every pass over the data set has another order.
            seed: Seed of the shuffling; None (the default) takes another one every time.

        Returns:
            A `tf.data.Dataset` of `(features, label)` as described by `FeatureSpec`.

        Raises:
            ValueError: If `batch_size` or `shuffle` is out of range.
        """

    @abc.abstractmethod
    def test(self, batch_size: int) -> tf.data.Dataset:
        """Returns the test part in order as batches; the last one may be smaller.

        Args:
            batch_size: Rows per batch, at least 1.

        Returns:
            A `tf.data.Dataset` of `(features, label)` as described by `FeatureSpec`.

        Raises:
            ValueError: If `batch_size` is out of range or there is no test part.
        """


def check_batching(batch_size: int, shuffle: int = 0) -> None:
    """Raises ValueError unless `batch_size` is at least 1 and `shuffle` at least 0."""
    check_at_least("batch_size", batch_size, 1)
    if isinstance(shuffle, bool):
        # True would be a buffer of one row, which leaves the order as it is.
        raise ValueError(
            "shuffle must be 0 (off) or the size of the buffer in rows, such as 100_000, not "
            f"{shuffle}"
        )
    check_at_least("shuffle", shuffle, 0)
