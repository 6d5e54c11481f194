"""Hands out the batches of a tf.data.Dataset: each to exactly one worker.

TensorFlow's data service runs the input pipeline, in the coordinator's process or
in readers, and gives every batch to whichever worker asks next, so a faster worker
takes more.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from absl import logging

from tf_recsync.cluster.making_functions import making_functions
from tf_recsync.strategies import data_parts, reshuffling
from tf_recsync.strategies.data_lengths import cardinality_of
from tf_recsync.strategies.data_position import DataPosition
from tf_recsync.strategies.done_batches import DoneBatches, Ranges, rest_of
from tf_recsync.strategies.pass_batches import PassBatches
from tf_recsync.strategies.pass_iterator import empty_batch
from tf_recsync.strategies.registered_dataset import RegisteredDataset, Registrations
from tf_recsync.strategies.worker_datasets import WorkerDatasets
from tf_recsync.strategies.worker_run import WorkerRun


def iterated_here(dataset: tf.data.Dataset, batches: int = -1) -> tf.data.Dataset:
    """The first batches of a dataset, or all (-1), for this process to iterate over.

    An iterator is put where its dataset is; one made before the cluster was connected is on a
    device that has another name now.
    """
    with tf.device("/CPU:0"):
        return dataset.take(batches)


def without_optionals(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """A dataset with None in place of optionals, which Keras makes of a generator's None.

    Keras converts them in each step, but those of workers are this package's.
    """
    spec = dataset.element_spec
    if not any(isinstance(part, tf.OptionalSpec) for part in tf.nest.flatten(spec)):
        return dataset

    def converted(*parts):
        parts = tf.nest.map_structure(
            lambda part: None if isinstance(part, tf.experimental.Optional) else part, parts
        )
        return parts if isinstance(spec, tuple) else parts[0]

    return making_functions(lambda: dataset.map(converted))


@dataclasses.dataclass(eq=False)
class DistributedDataset:
    """What a strategy makes of a user's dataset: its batches, one worker each.

    Attributes:
        registrations: what is registered already, for other calls, and where; it counts passes.
        whole: a batched tf.data.Dataset.
        start_predict: starts the workers on an iterator whose items are
            predictions; None if the dataset is trained or evaluated on.
        steps_per_epoch: an int, or None to run until the dataset ends.
        batch_size: the examples of a batch where they are known, or None.
        first: how many of the dataset's batches count, its first ones; None: all of them. Only the
            coordinator can give the first ones, as it gives all in order with `start_predict`.
        apart: the datasets that workers make, of which `whole` is the first; None if there is one
            for all.
        is_over: whether the call that it was made for has ended.
        is_validation: whether `fit` evaluates on it.
        shall_retry: whether batches that are lost with a worker are done by others, if they can be
            found again.
        given: what the user gave, by which passes are counted; None: that is `whole`.
        pass_length: the batches of a pass where Keras knows them, or None.
        is_shuffled: whether Keras shuffles it anew each time that it begins.
        first_batches: gives the first batches of a Python generator, which can't begin again; None
            if the dataset comes from something else.
        readers: in how many readers it runs; 0: in the coordinator's process, or on workers.
        dataset: the batches of it that count.
    """

    registrations: Registrations
    whole: tf.data.Dataset
    start_predict: Callable[[DistributedIterator], WorkerRun] | None
    steps_per_epoch: int | None
    batch_size: int | None = None
    first: int | None = None
    apart: WorkerDatasets | None = None
    is_over: Callable[[], bool] = lambda: False
    is_validation: bool = False
    shall_retry: bool = False
    given: tf.data.Dataset | None = None
    pass_length: int | None = None
    is_shuffled: bool = False
    first_batches: Callable[[], Iterator[Any]] | None = None

    def __post_init__(self):
        is_here = self.first is not None or self.start_predict is not None
        cluster = self.registrations.cluster
        self.readers = 0 if is_here or self.apart is not None else cluster.readers
        self.dataset = self.whole if self.first is None else self.whole.take(self.first)
        self._registered: RegisteredDataset | None = None
        self._seen = float("inf")  # The steps of the first epoch, as Keras counts.
        self._warned: set[str] = set()  # Of these, in words.

    @property
    def why_not_found_again(self) -> str:
        """Why batches that are lost can't be made once more; "" if they can."""
        if self.first_batches is not None:
            return (
                "a Python generator can't begin again: give a tf.data.Dataset or a "
                "keras.utils.PyDataset"
            )
        return self._why_not_numbered

    @functools.cached_property
    def _why_not_numbered(self) -> str:
        """Why a batch's number does not say which one it is; "" if it does."""
        if self.readers > 1 and self._why_indivisible:
            return (
                "of several readers each reads what nobody else has begun, as the dataset can't be "
                f"divided in an order of its own: {self._why_indivisible}; use one reader, or have "
                "workers make their datasets"
            )
        return self._why_other_order

    @functools.cached_property
    def _why_other_order(self) -> str:
        """Why the batches may come in another order when the dataset begins again; "" if it is
        the same one, as far as that shows."""
        if self.is_shuffled:
            return "Keras shuffles a PyDataset anew each time: call fit with shuffle=False"
        if reshuffling.has_any_order(self.dataset):
            return (
                "the dataset's order is another one each time: give shuffle a seed, or call "
                "keras.utils.set_random_seed, and leave options().deterministic as it is"
            )
        if self.apart is not None and reshuffling.is_reshuffled(self.dataset):
            # Workers count the passes of the pipelines that they have.
            return (
                "the order of datasets that workers make is another one where a worker was started "
                "again: have shuffle not reshuffle in each iteration"
            )
        return ""

    @functools.cached_property
    def _why_indivisible(self) -> str:
        return data_parts.why_indivisible(self.dataset)

    @property
    def keeps_positions(self) -> bool:
        """Whether it is known which of its batches are done, or at least that they are the first
        ones."""
        return self.readers <= 1 or self.is_numbered

    @property
    def can_go_back(self) -> bool:
        """Whether a pass can begin once more where it was."""
        return self.keeps_positions and self.first_batches is None

    def parts_at(self, position: DataPosition) -> int:
        """In how many parts the batches of a pass have numbers that begins at a position."""
        if position.batches:
            return position.parts
        return max(self.readers, 1) if self.is_numbered else 1

    @property
    def is_numbered(self) -> bool:
        """Whether the workers' batches are pairs of a number and a batch."""
        if self.start_predict is not None:
            return True  # Predictions go back into the order of the data by their numbers.
        return self.shall_retry and self.apart is None and not self._why_not_numbered

    @property
    def retries(self) -> bool:
        """Whether batches that are lost with a worker are done by others at the pass's end."""
        if not self.shall_retry or self.why_not_found_again:
            return False
        return not self.is_endless

    @property
    def is_endless(self) -> bool:
        """Whether a pass has no end, where what was lost would be done."""
        return self._cardinality == tf.data.INFINITE_CARDINALITY

    @functools.cached_property
    def _cardinality(self) -> int:
        """Of a pass: its batches, or what tf.data says if nobody knows them."""
        if self.apart is not None:
            return self.apart.cardinality
        known = cardinality_of(self.dataset)
        # Of arrays, Keras alone knows them.
        is_open = known == tf.data.UNKNOWN_CARDINALITY
        return self.pass_length if is_open and self.pass_length is not None else known

    def check_retries(self) -> None:
        """Warns, once, if batches that are lost shall be done by others, and can't be."""
        if self.shall_retry and self.why_not_found_again:
            self._warn_once(
                "Batches that are lost with a worker will not be trained on: %s.",
                self.why_not_found_again,
            )

    def check_position(self) -> None:
        """Warns, once, if nobody can go on where training is, though the position is saved."""
        if not self.keeps_positions:
            self._warn_once(
                "Checkpoints do not have the position in the data, and who goes on from one begins "
                "the epoch anew: %s.",
                self._why_no_position,
            )

    def _warn_once(self, message: str, why: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logging.warning(message, why)

    @property
    def _why_no_position(self) -> str:
        return self._why_not_numbered or (
            'of several readers it is known which batches are done with on_batch_lost="retry"'
        )

    @property
    def element_spec(self) -> Any:
        return self.dataset.element_spec

    @property
    def has_open_end(self) -> bool:
        """Whether an epoch has so many steps, and only their end tells how many the data have."""
        is_open = self._cardinality == tf.data.UNKNOWN_CARDINALITY
        return self.steps_per_epoch is not None and is_open

    @property
    def batches(self) -> float:
        """The batches of an epoch, infinite if their number is not known."""
        asked = self.first if self.steps_per_epoch is None else self.steps_per_epoch
        return self.known_batches if asked is None else asked

    @property
    def pass_batches(self) -> float:
        """The batches of a pass of several epochs, infinite if their number is not known; 0 if each
        epoch is a pass."""
        if self.steps_per_epoch is None:
            return 0.0
        return self.known_batches

    @property
    def known_batches(self) -> float:
        """The batches of a pass, infinite if their number is not known."""
        return float(self._cardinality) if self._cardinality >= 0 else float("inf")

    def batches_of(self, parts: int) -> float:
        """The batches of a pass in so many parts, each of which may end with one that is not full;
        infinite if their number is not known."""
        return self.known_batches if parts == 1 else float("inf")

    @property
    def length(self) -> float:
        """The steps of an epoch, infinite if only its end will tell."""
        # Each reader may end with a batch that is not full, and what a worker makes may
        # depend on the epoch.
        if (self.readers > 1 or self.apart is not None) and self.steps_per_epoch is None:
            return float("inf")
        return self.batches

    @property
    def expected(self) -> float:
        """The steps of an epoch that Keras asks for, infinite if it leaves that to the data."""
        return self._seen if self.batches == float("inf") else self.batches

    def ended(self, steps: int) -> None:
        """The data ended when Keras had asked for so many steps: it won't ask for more again."""
        if self._seen == float("inf"):
            self._seen = steps

    def reachable(self, position: DataPosition, slots: int) -> DataPosition:
        """Where a pass can begin, to go on from a position as well as it can.

        Args:
            position: of an earlier process.
            slots: how many threads call workers.
        """
        if not (position.batches or position.epoch_batches or position.pipelines):
            return position  # The beginning of a pass.
        why = ""
        if position.batch_size != self.batch_size:
            why = f"batches had {position.batch_size} examples, and have {self.batch_size}"
        elif self.apart is None and position.pipelines:
            why = "workers made their own datasets, and there is one for all of them"
        elif self.apart is not None and len(position.pipelines) != slots:
            count = len(position.pipelines)
            why = f"batches came from {count} input pipelines, and now from {slots}"
        elif not self.keeps_positions or (position.parts > 1 and not self.is_numbered):
            why = self._why_no_position
        elif position.parts > 1 and self._why_indivisible:
            why = f"readers had parts of the dataset, and now {self._why_indivisible}"
        elif 0 < self.pass_batches < float("inf"):
            why = (
                "with steps_per_epoch, Keras begins a dataset anew when it has asked for as many "
                "batches as that has; use repeat"
            )
        elif position.parts == 1 and position.epoch_batches > (
            self.steps_per_epoch or self.batches or float("inf")
        ):
            why = f"{position.epoch_batches} of its steps were done, and now it has fewer"
        if why:
            logging.warning("The epoch begins anew, with all of its data: %s.", why)
            return DataPosition(position.passes)
        self.check_order(position)
        return position

    def check_order(self, position: DataPosition) -> None:
        """Warns if what is skipped up to a position need not be what was trained on."""
        if self._why_other_order and position.batches:
            logging.warning(
                "%d batches are skipped that were trained on, but %s.",
                position.batches,
                self._why_other_order,
            )

    def shared(
        self, position: DataPosition | None = None
    ) -> tuple[RegisteredDataset | WorkerDatasets, int]:
        """The data as workers get at it, for a pass that begins; and its number, from 0.

        Args:
            position: where it begins, if that is not the beginning; see `reachable`.
        """
        given = self.whole if self.given is None else self.given
        before = None if position is None else position.passes
        number = self.registrations.next_pass(given, before)
        position = position or DataPosition()
        if self.apart is not None:
            return self.apart, number
        if self.readers:
            self.registrations.end_forgotten_passes()
        parts = self.parts_at(position)
        if position.batches or reshuffling.is_reshuffled(self.dataset):
            return self._register(number, position.prefix, position.done, parts), number
        if self._registered is None:
            kind = (self.is_numbered, self.readers, self.first)
            self._registered = self.registrations.find(self.whole, kind)
            if self._registered is None:
                self._registered = self._register(number, 0, (), parts)
                self.registrations.add(self.whole, kind, self._registered)
        return self._registered, number

    def rest(self, number: int, done: DoneBatches, parts: int) -> RegisteredDataset:
        """The batches of a pass that are not done, as workers get at them.

        Args:
            number: of the pass.
            done: those that are.
            parts: in how many parts they have numbers.
        """
        prefix, beyond = done.ranges
        end = None
        if beyond and beyond[-1][1] == self.batches_of(parts):
            *beyond, (end, _) = beyond  # Nothing behind that is read.
        return self._register(number, prefix, tuple(beyond), parts, end)

    def _register(
        self, number: int, prefix: int, beyond: Ranges, parts: int, end: int | None = None
    ) -> RegisteredDataset:
        # Another thread may take in a server, as one that was lost with some of the batches.
        dataset = making_functions(lambda: self._made(number, prefix, beyond, parts, end))
        return self.registrations.register(dataset, self.readers)

    def _made(
        self, number: int, prefix: int, beyond: Ranges, parts: int, end: int | None
    ) -> tf.data.Dataset:
        """What is to be registered."""
        dataset = self.dataset
        # The servers' names mean nothing to the service: pin nothing.
        with tf.device("/CPU:0"):
            if reshuffling.is_reshuffled(dataset):
                dataset = reshuffling.in_pass(dataset, number)
            if self.readers > 1 or parts > 1:
                dataset = data_parts.without_assertions(dataset)
            if end is not None:
                dataset = dataset.take(end)
            if self.is_numbered and (parts > 1 or self.readers > 1):
                dataset = data_parts.rest_of_parts(dataset, parts, prefix, beyond)
            elif self.readers > 1 and data_parts.pairs_sources(dataset):
                raise ValueError(
                    f"{self.readers} readers would put together by zip what does not belong "
                    "together, as each of its datasets is divided by itself: "
                    f"{self._why_no_position}; make the dataset of one source, use one reader, or "
                    "have workers make their datasets"
                )
            elif prefix or beyond or self.is_numbered:
                dataset = rest_of(dataset, prefix, beyond)
                if not self.is_numbered:
                    dataset = dataset.map(lambda _, batch: batch)
        return dataset

    def local_batches(self) -> Iterator[Any]:
        """Batches in this process, for Keras to see what they look like; at least one."""
        if self.first_batches is not None:
            # A pipeline takes more of the generator than it gives, and nobody would train on that.
            yield from self.first_batches()
            return
        is_empty = True
        for dataset in [self.dataset] if self.apart is None else self.apart.all():
            for batch in iterated_here(dataset):
                is_empty = False
                yield batch
        if is_empty:
            yield self._empty_batch()

    def _empty_batch(self) -> Any:
        """A batch without examples, if models can be built for it."""
        for spec in tf.nest.flatten(self.element_spec, expand_composites=True):
            if spec.shape.rank is None or None in spec.shape[1:]:
                raise ValueError(
                    "the dataset has no batches, and their shapes are not known without one: "
                    f"element_spec={self.element_spec}"
                )
        with tf.device("/CPU:0"):
            return empty_batch(self.element_spec)

    def __iter__(self) -> DistributedIterator:
        return DistributedIterator(self)


class DistributedIterator:
    """One pass over a `DistributedDataset`, run by the workers.

    Keras hands it to the model's train, test or predict function, which puts
    the pass that the workers make into `run`.

    Attributes:
        run: as above; None before.
        failed: a pass that has failed, and whose steps go on in another one; None: there is none.
        skipped: the steps of the first epoch that an earlier process has done.
        batches: of the pass; None before.
        asked: the steps that Keras has asked for already, of an epoch that begins anew; else 0.
        has_run_out: whether its data have ended, which Keras was not told.
        counted: the steps of the pass as Keras counts them, to which each call is a whole one.
    """

    def __init__(self, distributed: DistributedDataset):
        self.distributed = distributed
        self.run: WorkerRun | None = None
        self.failed: WorkerRun | None = None
        self.skipped = 0
        self.batches: PassBatches | None = None
        self.asked = 0
        self.has_run_out = False
        self.counted = 0
        self._local = None

    def __iter__(self) -> DistributedIterator:
        return self

    def __next__(self) -> Any:
        """A predicted batch; else a local batch, for Keras to see what they look like."""
        if self.distributed.start_predict is not None:
            if self.run is None:
                self.run = self.distributed.start_predict(self)
            return self.run.next_result()
        if self._local is None:
            self._local = self.distributed.local_batches()
        return next(self._local)

    def __del__(self):
        # Keras drops the iterator of a pass that it leaves early.
        if self.run is not None:
            self.run.request_stop()
