"""Datasets that workers make for themselves, each its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from keras.src.trainers.data_adapters.data_adapter import DataAdapter

from tf_recsync.cluster import CHIEF, Cluster
from tf_recsync.strategies.data_lengths import cardinality_of
from tf_recsync.strategies.pass_iterator import PassIterator, empty_batch
from tf_recsync.strategies.reshuffling import with_sources

DatasetFunction = Callable[[tf.distribute.InputContext], tf.data.Dataset]


class WorkerDatasets(DataAdapter):
    """What `strategy.distribute_datasets_from_function` returns; give it to `fit` and `evaluate`.

    There is an input pipeline for each worker, or for each of its threads if several train on it.
    Workers keep their pipelines, and with them what these keep (`cache`, the state of `shuffle`),
    until they die.

    Keras takes it as it is, since it is a data adapter, and has the strategy distribute it.

    Args:
        cluster: the workers.
        make: the user's function.
        pipelines: how many there are.
        replicas_in_sync: what the function is told of them.

    Attributes:
        cluster: as above.
        pipelines: as above.
    """

    readers = 0

    def __init__(
        self, cluster: Cluster, make: DatasetFunction, pipelines: int, replicas_in_sync: int
    ):
        if not callable(make):
            raise ValueError(f"dataset_fn must be a function of an InputContext, not {make!r}")
        self.cluster = cluster
        self.pipelines = pipelines
        self._make = make
        self._replicas_in_sync = replicas_in_sync
        self._making = threading.RLock()  # The user's function need not be thread-safe.
        # On the workers, by their index and the pipeline's number.
        self._made: dict[tuple[int, int], tf.data.Dataset] = {}
        self._cardinality: int | None = None
        self._first = self._local(0)

    @property
    def element_spec(self) -> Any:
        """The type of a batch."""
        return self._first.element_spec

    @property
    def cardinality(self) -> int:
        """The batches of all pipelines, or `tf.data.INFINITE_CARDINALITY` or the like."""
        if self._cardinality is None:
            total = 0
            for number in range(self.pipelines):
                dataset = self._local(number) if number else self._first
                batches = cardinality_of(dataset)
                if batches < 0:
                    total = batches
                    break
                total += batches
            self._cardinality = total
        return self._cardinality

    def __iter__(self) -> Iterator[Any]:
        """Raises a TypeError: there is nobody to iterate but workers."""
        # Keras comes here if the model belongs to no strategy.
        raise TypeError(
            "what distribute_datasets_from_function returned is for fit and evaluate of a model "
            "that was made in the strategy's scope()"
        )

    # What workers do.

    def iterator(
        self, worker: int, part: int, parts: int, taken: int, skipped: int = 0
    ) -> PassIterator:
        """Begins a pass over some of the pipelines; call it under the worker's device scope.

        Args:
            worker: its index.
            part: which of them: those of one worker's thread; that of another worker if that is
                lost.
            parts: how many threads there are, at most one for each pipeline.
            taken: their batches that the thread had in this pass before it was lost.
            skipped: those before that are not to be trained on again.
        """
        of_part = self.pipelines // parts
        keys = [(worker, number) for number in range(part * of_part, (part + 1) * of_part)]
        try:
            return self._iterator(keys, taken, skipped)
        except tf.errors.OpError:
            # They are gone if the worker was started again since they were made. All are dropped.
            if not any([self._made.pop(key, None) for key in keys]):
                raise
        return self._iterator(keys, taken, skipped)

    def empty(self) -> PassIterator:
        """One without batches, for a worker whose part of the data others go through."""
        nothing = tf.data.Dataset.from_tensors(empty_batch(self.element_spec)).take(0)
        return PassIterator.of(nothing)

    def _iterator(self, keys: Sequence[tuple[int, int]], taken: int, skipped: int) -> PassIterator:
        dataset = self._chained(keys)
        # Where there is an end, each batch has its turn once.
        if self.cardinality != tf.data.INFINITE_CARDINALITY:
            skipped += taken
        if skipped:
            dataset = dataset.skip(skipped)
        return PassIterator.of(dataset)

    def _chained(self, keys: Sequence[tuple[int, int]]) -> tf.data.Dataset:
        """Some of the pipelines as one, on the worker."""
        with self._making:
            for key in keys:
                if key not in self._made:
                    self._made[key] = self._checked(key[1])
        chained = self._made[keys[0]]
        for key in keys[1:]:
            chained = chained.concatenate(self._made[key])
        return chained

    def _checked(self, number: int) -> tf.data.Dataset:
        try:
            dataset = self._dataset(number)
        except tf.errors.OpError:
            self._check_is_whole(self._local(number))
            raise
        self._check_is_whole(dataset)
        if not _is_subtype(dataset.element_spec, self.element_spec):
            raise ValueError(
                "dataset_fn must return datasets of one type: that of input pipeline 0 has the "
                f"element_spec {self.element_spec}, that of {number} {dataset.element_spec}"
            )
        return dataset

    # What the coordinator does.

    def _check_is_whole(self, dataset: tf.data.Dataset) -> None:
        """Raises a ValueError if a dataset uses one that the function has not made."""
        first = list(_parts(self._first))
        if any(one is other for one in _parts(dataset) for other in first):
            raise ValueError(
                "dataset_fn uses a dataset that was made outside of it, which the coordinator's "
                "process has and workers have not: make all datasets inside of dataset_fn, or give "
                "a dataset to fit as it is"
            )

    def _local(self, number: int) -> tf.data.Dataset:
        with self._making, tf.device(CHIEF):
            return self._dataset(number)

    def _dataset(self, number: int) -> tf.data.Dataset:
        context = tf.distribute.InputContext(self.pipelines, number, self._replicas_in_sync)
        dataset = self._make(context)
        if not isinstance(dataset, tf.data.Dataset):
            raise ValueError(f"dataset_fn must return a tf.data.Dataset, not {dataset!r}")
        return dataset

    def first(self) -> tf.data.Dataset:
        """The first pipeline, in this process."""
        return self._first

    def all(self) -> Iterator[tf.data.Dataset]:
        """All pipelines, in this process; made when they are asked for."""
        yield self._first
        for number in range(1, self.pipelines):
            yield self._local(number)

    # What Keras asks a data adapter for.

    def get_tf_dataset(self) -> WorkerDatasets:
        """Itself: Keras then has the strategy distribute it."""
        return self

    @property
    def num_batches(self) -> int | None:
        """The batches of all pipelines, or None if their number is not known."""
        return self.cardinality if self.cardinality >= 0 else None

    @property
    def batch_size(self) -> int | None:
        """The examples of a batch if its type tells, else None."""
        return tf.nest.flatten(self.element_spec)[0].shape[0]

    @property
    def has_partial_batch(self) -> None:
        """Not known."""
        return None

    @property
    def partial_batch_size(self) -> None:
        """Not known."""
        return None


def _parts(dataset: tf.data.Dataset) -> Iterator[Any]:
    """What a dataset is made of: datasets, and the tensors of those that its functions use."""
    for found in with_sources(dataset):
        yield found
        for function in found._functions():
            yield from (t for t in function.function.captured_inputs if t.dtype == tf.variant)


def _is_subtype(one: Any, other: Any) -> bool:
    """Whether batches of the first type are of the second one, too."""
    try:
        tf.nest.assert_same_structure(one, other)
    except (TypeError, ValueError):
        return False
    pairs = zip(tf.nest.flatten(one), tf.nest.flatten(other), strict=True)
    return all(mine.is_subtype_of(theirs) for mine, theirs in pairs)
