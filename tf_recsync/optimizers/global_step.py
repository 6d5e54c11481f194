"""What an optimizer's global step stands for, and how it goes on in another training mode.

The global step counts applications: a local batch under asynchronous training, a global
batch under synchronous training and GBA. So when a checkpoint goes on in another mode,
everything that is stated in steps is converted by examples, and what the user has stated
stays as it is.
"""

from __future__ import annotations

import dataclasses
import json
import math
import zlib
from fractions import Fraction

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tf_recsync._checks import integer
from tf_recsync.cluster import fetch
from tf_recsync.shown_variable import read_untold
from tf_recsync.swap import Swap

_LARGEST = 10**9  # Of a denominator: fractions are saved as two int64.


@dataclasses.dataclass(frozen=True)
class StepState:
    """What a global step stands for, and what is counted in steps.

    Attributes:
        examples: the examples of a global step, or 0 if they are not known.
        capacity: the local batches of a global step.
        period_given: the period of the user's `Swap`; 0 without.
        period: that period in the current steps, exactly.
        swap_offset: added to the global step before SWAP's periods are counted in it.
        schedule_given: a checksum of the user's learning-rate schedule; 0 without.
        schedule_scale: the steps of that schedule in one global step.
        update_offset: the applications so far, less the global step. Adam refers to
            them: a switch adds no gradients to its moments, and takes none out.

    Example:

    >>> state = StepState.new(examples=64, capacity=4, swap=Swap(period=10), schedule=0)
    >>> step, state = state.converted(35, examples=16, capacity=1)
    >>> step, state.swap_period, state.swap_offset
    (140, 40, 0)
    """

    examples: int
    capacity: int
    period_given: int
    period: Fraction
    swap_offset: int
    schedule_given: int
    schedule_scale: Fraction
    update_offset: int

    SIZE = 10  # Of the array that it is saved as.

    @classmethod
    def new(
        cls, examples: int, capacity: int, swap: Swap | None, schedule: int, scale: int = 1
    ) -> StepState:
        """That of an optimizer that has made no step."""
        period = swap.period if swap else 0
        return cls(examples, capacity, period, Fraction(period), 0, schedule, Fraction(scale), 0)

    @classmethod
    def from_array(cls, array: np.ndarray) -> StepState:
        """What `array` gave."""
        values = map(int, array)
        # In the order in which fields have them.
        return cls(
            *(
                Fraction(next(values), next(values)) if field.type == "Fraction" else next(values)
                for field in dataclasses.fields(cls)
            )
        )

    @property
    def array(self) -> np.ndarray:
        """int64 [SIZE], for checkpoints: the fields, fractions as two numbers."""
        values: list[int] = []
        for value in (getattr(self, field.name) for field in dataclasses.fields(self)):
            if isinstance(value, Fraction):
                values += value.limit_denominator(_LARGEST).as_integer_ratio()
            else:
                values.append(value)
        return np.array(values, np.int64)

    @property
    def swap_period(self) -> int:
        """SWAP's period in force, in global steps: at least 1, or 0 without SWAP."""
        return max(1, _round(self.period)) if self.period_given else 0

    def converted(self, step: int, examples: int, capacity: int) -> tuple[int, StepState]:
        """The global step and this in steps of another number of examples, both known.

        SWAP's period goes on with its number, and as far into it.
        """
        ratio = Fraction(self.examples, examples)
        new_step = _round(step * ratio)
        state = dataclasses.replace(
            self,
            examples=examples,
            capacity=capacity,
            period=self.period * ratio,
            schedule_scale=self.schedule_scale / ratio,
            update_offset=self.update_offset + step - new_step,
        )
        return new_step, state._continuing(self, step, new_step)

    def with_period(self, step: int, period: int) -> StepState:
        """The same with another period given, in current steps; SWAP goes on as in `converted`."""
        state = dataclasses.replace(self, period_given=period, period=Fraction(period))
        return state._continuing(self, step, step)

    def _continuing(self, before: StepState, old_step: int, step: int) -> StepState:
        """This with an offset by which SWAP's periods go on as `before` had them."""
        if not before.period_given:
            return self
        number, done = divmod(old_step + before.swap_offset, before.swap_period)
        done = _round(Fraction(done * self.swap_period, before.swap_period))
        done = min(done, self.swap_period - 1)
        return dataclasses.replace(self, swap_offset=number * self.swap_period + done - step)


class CountsSteps:
    """What the optimizers have to do with the global step; mixed into their base class."""

    _examples_here = 0  # Of a global step, where that is known.
    step_variable: keras.Variable | None = None  # See `step_state`.
    _own_state: StepState | None = None  # The last that did not come from a checkpoint.
    _traced_for: tuple | None = None  # The `traced_state` of the last trace.
    # The largest step that updates have gone by since `set_back`; None if it is not known.
    _known_step: int | None = 0

    @property
    def uses_global_step(self) -> bool:
        """Whether an update depends on the global step."""
        return self.swap is not None or self.keeps_steps

    @property
    def examples_per_step(self) -> int | None:
        """The examples of a global step, or None if they are not known.

        Under a strategy of this package it follows from the batch size. Without one, say
        it to have the global step converted when a checkpoint is loaded that was made in
        another mode, or will be:

        ```python
        model.optimizer.examples_per_step = 512
        model.load_weights("gba.weights.h5")
        ```

        Raises:
            ValueError: when set under such a strategy, or to anything but a positive int.
        """
        if self.step_variable is not None:
            return self.step_state.examples or None
        return self._known_examples() or None

    @examples_per_step.setter
    def examples_per_step(self, examples: int) -> None:
        if self._accumulates_on_servers:
            raise ValueError(
                f"examples_per_step can't be set to {examples!r} under this strategy: pass it "
                "local_batch_size"
            )
        self.count_steps_of(integer("examples_per_step", examples, 1))

    @property
    def step_state(self) -> StepState:
        """What a global step stands for; of a built optimizer."""
        # Also while a function is traced, which is then made for this state.
        with tf.init_scope():
            array = read_untold(self.step_variable._value)
        # It is empty within the function that makes the variable, and sets it at its end.
        return StepState.from_array(array) if array.size else self._own_state

    @property
    def traced_state(self) -> tuple:
        """What a traced update is made for; if it changes, functions must be traced anew."""
        state = self.step_state
        swap = (state.swap_period, state.swap_offset) if self.swap else ()
        offset = state.update_offset if self.keeps_steps else 0
        return (*swap, offset, state.schedule_scale if state.schedule_given else 1)

    def count_steps_of(self, examples: int | None = None) -> None:
        """Has the global step count applications of this optimizer's strategy from now on.

        Converts what came from a checkpoint of another mode, and does nothing if there is
        nothing to convert; nobody may be in a step.

        Args:
            examples: those of a step, or None for what is known already.
        """
        self._examples_here = examples or self._examples_here
        if self.step_variable is None:
            return
        before, step = self.step_state, self.finished_steps
        new_step, after = self._going_on(before, step)
        if after != before:
            self._assign(before, step, after, new_step)
        self._own_state = after
        if not self._accumulates_on_servers and self._traced_for not in (None, self.traced_state):
            logging.warning(
                "SWAP's period, or a step that %s counts from, has changed since the model was "
                "trained: compile it again before you train on.",
                self.name,
            )

    def load_steps(self, saved: np.ndarray) -> None:
        """Takes over a saved `step_state`, and goes on in steps of this optimizer's strategy.

        A strategy that is not told how many examples a batch has learns it at fit.
        """
        if saved.shape != (StepState.SIZE,):
            raise ValueError(f"step_state must have shape [{StepState.SIZE}], not {saved.shape}")
        self.step_variable.assign(saved)
        self._known_step = None
        if self._known_examples() or not self._accumulates_on_servers:
            self.count_steps_of()

    def step_arguments(self, global_step: tf.Tensor) -> dict:
        """What the update ops are told of the global step, and of SWAP's period in it."""
        if not self.uses_global_step:
            return {"global_step": global_step}
        if not tf.executing_eagerly():
            self._traced_for = self.traced_state
        state = self.step_state
        shift = state.update_offset if self.keeps_steps else 0
        arguments = {"global_step": global_step + shift if shift else global_step}
        if self.swap:
            arguments.update(
                swap_period=state.swap_period,
                swap_decay=self.swap.decay,
                swap_offset=state.swap_offset - shift,
            )
        return arguments

    def _assign(self, before: StepState, step: int, after: StepState, new_step: int) -> None:
        if new_step != step:
            self._iterations.assign(new_step * self.batches_counted)
        self.step_variable.assign(after.array)
        if step == 0:
            return
        changes = [f"step {step} is step {new_step}"] if new_step != step else []
        if after.swap_period != before.swap_period:
            changes.append(
                f"SWAP's period is {after.swap_period} steps, in the checkpoint "
                f"{before.swap_period} steps"
            )
        if changes:
            logging.info(
                "%s goes on in steps of %s examples (%s before): %s.",
                self.name,
                after.examples or "unknown",
                before.examples or "unknown",
                "; ".join(changes),
            )

    def _going_on(self, before: StepState, step: int) -> tuple[int, StepState]:
        """The global step and what it stands for, in steps of this optimizer's strategy."""
        examples, capacity = self._known_examples(), self._capacity()
        after = dataclasses.replace(before, capacity=capacity)
        if examples and before.examples:
            # Another batch size of the same training is the user's own change.
            is_loaded = before != self._own_state
            if examples != before.examples and is_loaded:
                step, after = before.converted(step, examples, capacity)
            else:
                after = dataclasses.replace(after, examples=examples)
        else:
            is_same = capacity == before.capacity
            if not is_same and step > 0:
                logging.warning(
                    "The global step of %s is not converted: one was %s, and is %s. To have it, "
                    "SWAP's period and the learning-rate schedule converted by examples, give "
                    "local_batch_size to the strategies (without one: set "
                    "optimizer.examples_per_step), before saving too.",
                    self.name,
                    _in_words(before.examples, before.capacity),
                    _in_words(examples, capacity),
                )
            after = dataclasses.replace(
                after, examples=examples or (before.examples if is_same else 0)
            )
        if self.swap and self.swap.period != before.period_given:
            after = after.with_period(step, self.swap.period)
            logging.info(
                "Swap(period=%d) of %s replaces the checkpoint's period, which was given as %d.",
                *(self.swap.period, self.name, before.period_given),
            )
        # Where users have set the step back, what is counted from before it begins with it.
        after = dataclasses.replace(
            after,
            swap_offset=max(after.swap_offset, -step),
            update_offset=max(after.update_offset, -step),
        )
        schedule = _checksum(self._learning_rate)
        if schedule != before.schedule_given:
            # Keras counts a schedule's steps in batches, not in updates of accumulated ones.
            scale = Fraction(self.accumulated_batches)
            after = dataclasses.replace(after, schedule_given=schedule, schedule_scale=scale)
        return step, after

    def _make_step_variable(self) -> None:
        """Makes the variable that checkpoints keep `step_state` in."""
        schedule = _checksum(self._learning_rate)
        counts = self._known_examples(), self._capacity()
        state = StepState.new(*counts, self.swap, schedule, self.accumulated_batches)
        self._own_state = state
        self.step_variable = self.add_variable(
            shape=(StepState.SIZE,),
            dtype="int64",
            initializer=lambda shape, dtype=None: tf.constant(state.array),
            name="step_state",
        )

    def _known_examples(self) -> int:
        told = getattr(self._distribution_strategy, "examples_per_step", None)
        return told * self.accumulated_batches if told else self._examples_here

    def _capacity(self) -> int:
        mode = getattr(self._distribution_strategy, "mode", None)
        return (1 if mode is None else mode.capacity) * self.accumulated_batches

    @property
    def accumulated_batches(self) -> int:
        """How many batches are added up in the place of one, on the servers or here."""
        return self.gradient_accumulation_steps or 1

    @property
    def batches_counted(self) -> int:
        """By how much Keras's counter rises for a global step: it counts batches in one process."""
        return 1 if self._accumulates_on_servers else self.accumulated_batches

    @property
    def finished_steps(self) -> int:
        """The global steps that are done."""
        counted = fetch(self._iterations._value.read_value())
        return int(counted) // self.batches_counted

    @property
    def _accumulates_on_servers(self) -> bool:
        return getattr(self._distribution_strategy, "pushes_gradients", False)

    def _get_current_learning_rate(self):
        schedule = self._learning_rate
        if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule) and self.built:
            scale = self.step_state.schedule_scale
            if scale == 1:
                return schedule(self.iterations)
            batches = self._iterations
            if self._accumulates_on_servers:  # As of the last of several batches.
                batches = (batches + 1) * self.accumulated_batches - 1
            # In the precision that schedules compute in.
            step = keras.ops.cast(batches, "float32")
            return schedule(step * float(scale / self.accumulated_batches))
        return super()._get_current_learning_rate()


def _in_words(examples: int, capacity: int) -> str:
    batches = "1 local batch" if capacity == 1 else f"{capacity} local batches"
    return f"{batches} ({examples or 'an unknown number of'} examples)"


def _checksum(learning_rate) -> int:
    """A number that tells one learning-rate schedule from another; 0 for what is none."""
    if not isinstance(learning_rate, keras.optimizers.schedules.LearningRateSchedule):
        return 0
    try:
        config = keras.saving.serialize_keras_object(learning_rate)
    except (NotImplementedError, TypeError):
        # Only whole models need the configuration of a user's own one.
        own = type(learning_rate)
        config = {"module": own.__module__, "name": own.__qualname__}
    return 1 + zlib.crc32(json.dumps(config, sort_keys=True, default=repr).encode())


def _round(number: Fraction) -> int:
    """The nearest int; a half goes up."""
    return math.floor(number + Fraction(1, 2))
