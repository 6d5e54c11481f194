"""What the optimizers share: versions, staleness, SWAP, and the three ways in.

An update reaches a variable in one of three ways, all ending in the same maths:
- local Keras (`update_step`): the gradient is fresh and tau is 1;
- a parameter-server strategy, whose worker step pushes packed gradients with
  the versions that were pulled (`apply_dense`, `apply_rows` on the server);
- inside an XLA-compiled step, which knows no custom ops, in plain TensorFlow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Sequence

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tf_recsync import ops
from tf_recsync import staleness as staleness_lib
from tf_recsync._checks import check_at_least, number
from tf_recsync._instead import instead
from tf_recsync.cluster import fetch
from tf_recsync.embedding.initial_values import seed_of_table
from tf_recsync.embedding.keys import KeyedRows
from tf_recsync.embedding.physical_tables import check_memory
from tf_recsync.ops.bags import Bags, PackedBags
from tf_recsync.optimizers import saving
from tf_recsync.optimizers.global_step import CountsSteps
from tf_recsync.optimizers.plain_update import (
    as_rows,
    has_ops,
    in_xla_context,
    named_rows,
    plain_update,
)
from tf_recsync.shown_variable import guarded, shown
from tf_recsync.swap import Swap
from tf_recsync.synchronization import context

# Keras names the weight of an Embedding layer so.
DEFAULT_TABLES = r"(.*/)?embeddings"
NONFINITE = ("apply", "skip", "error")
NO_PERIOD = -1  # Of cc/engine/swap.h: the first value of what SWAP decays counts from now on.


class Filled(keras.initializers.Constant):
    """One number everywhere, in a single array: Keras's makes two, beside a table as large."""

    def __call__(self, shape, dtype=None):
        return tf.fill(shape, tf.cast(self.value, dtype))


@dataclasses.dataclass(eq=False)
class VariableState:
    """A trained variable and what the optimizer keeps beside it."""

    variable: keras.Variable
    is_table: bool  # updated row by row
    accumulators: list[keras.Variable]
    versions: keras.Variable  # int64, a scalar or [rows]
    counters: keras.Variable  # int64 staleness counters
    # Like versions, but int32 beside rows; empty without SWAP.
    last_periods: list[keras.Variable]
    last_updates: list[keras.Variable]  # float32 like versions; mostly empty
    last_steps: list[keras.Variable]  # like last_periods; empty but for Adam
    # float64 [rows + 2], see cc/engine/row_decay.h; empty unless a table's weights decay lazily
    log_decays: list[keras.Variable] = dataclasses.field(default_factory=list)
    rowwise: bool = False  # whether accumulators are like versions, not like the variable
    accumulator_values: tuple[float, ...] = ()  # the first ones, of a table with keys

    @property
    def width(self) -> int:
        """The elements of a row."""
        return math.prod(self.variable.shape[1:])

    @property
    def keyed(self) -> KeyedRows | None:
        """What finds the rows of keys, if the variable is a table with keys."""
        return getattr(self.variable, "keyed", None)

    @property
    def fresh(self) -> list[tuple[keras.Variable, float]]:
        """What lies beside a row that is given to another key, and its value then."""
        values = [*zip(self.accumulators, self.accumulator_values, strict=True)]
        values += [(variable, float(NO_PERIOD)) for variable in self.last_periods]
        return values + [(variable, 0.0) for variable in (*self.last_updates, *self.last_steps)]

    @property
    def slots(self) -> dict[str, keras.Variable]:
        """What the optimizer keeps beside the variable and saves, by what it is."""
        kind = "row_accumulator" if self.rowwise else "accumulator"
        slots = {f"{kind}_{i}": accumulator for i, accumulator in enumerate(self.accumulators)}
        slots["version"] = self.versions
        more = {
            "last_period": self.last_periods,
            "last_update": self.last_updates,
            "last_step": self.last_steps,
            saving.COUNTERS: [self.counters],
        }
        return slots | {name: variables[0] for name, variables in more.items() if variables}

    @property
    def beside(self) -> list[keras.Variable]:
        """All that the optimizer keeps beside the variable."""
        return [*self.slots.values(), *self.log_decays]


class _OfTensorFlow(tf.__internal__.tracking.AutoTrackable):
    """A variable of TensorFlow, with what the optimizers ask one of Keras for.

    Args:
        variable: the variable.
    """

    def __init__(self, variable: tf.Variable):
        self._value = variable
        self.path = variable.name.partition(":")[0]
        self.shape = tuple(variable.shape)
        self.dtype = variable.dtype.name

    @property
    def value(self) -> tf.Variable:
        """The variable itself."""
        return self._value


def handles(variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
    """The resource handles of variables, whatever scope Keras is in."""
    return [variable._value.handle for variable in variables]


def read_handles(states: Sequence[VariableState]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """The handles of variables and of their versions, by which these are read together."""
    return handles([s.variable for s in states]), handles([s.versions for s in states])


def log_decays_of(states: Sequence[VariableState]) -> dict[str, list]:
    """What ops on rows of these tables are told of their decay."""
    return {
        "log_decays": handles([v for state in states for v in state.log_decays]),
        "decayed": [number for number, state in enumerate(states) if state.log_decays],
    }


class Optimizer(saving.LoadsWhenBuilt, CountsSteps, keras.optimizers.Optimizer):
    """Base class of the optimizers; not used by itself.

    A subclass names its accumulators and provides two ops and the plain rule.

    Args:
        learning_rate: a float, a `keras.optimizers.schedules.LearningRateSchedule`
            (of the global step) or a callable.
        staleness: a policy of `tf_recsync.staleness`; None (the default) is
            `Constant()`. Without a cluster staleness is always 1.
        swap: a `Swap`, or None (the default).
        nonfinite: what becomes of a gradient that holds an infinity or no number:
            "apply" (the default) applies it like any other; "skip" leaves that
            dense variable, or that row of a table, as it is and counts it
            (`tf_recsync.staleness.Statistics.skipped`); "error" refuses the
            whole push with an InvalidArgumentError that names the variable and
            row, which ends training (not with jit_compile: XLA raises no errors). But for
            "apply", clipping takes no account of such gradients.
        seed: an int of at least 0, 0 by default, of the random numbers by which rows of
            bfloat16 tables are rounded after an update: up or down, so that on average
            nothing is lost. They depend on the table's name, the row, how often it was
            updated, and the column, and so are the same however tables are divided.
        tables: a regular expression: a variable whose path it matches in full
            is an embedding table, versioned and updated row by row. The default
            matches what `keras.layers.Embedding` creates.
        name: a str or None.
        **kwargs: as in `keras.optimizers.Optimizer`: weight_decay, clipnorm,
            clipvalue, global_clipnorm, use_ema and so on.

    Raises:
        ValueError: if an argument is wrong.

    Example:

    >>> import tf_recsync as recsync
    >>> optimizer = recsync.optimizers.SGD(0.1, staleness=recsync.staleness.Threshold(iota=3))
    >>> isinstance(optimizer, recsync.optimizers.Optimizer)
    True
    """

    accumulator_names: tuple[str, ...] = ()
    keeps_steps = False  # whether the ops take `last_steps`
    lazy = True  # whether rows that a step does not name stay where they are
    rowwise = False  # whether accumulators of tables have one number for each row

    def __init__(
        self,
        learning_rate: float | Callable,
        *,
        staleness: staleness_lib.Policy | None = None,
        swap: Swap | None = None,
        nonfinite: str = "apply",
        seed: int = 0,
        tables: str = DEFAULT_TABLES,
        name: str | None = None,
        **kwargs,
    ):
        super().__init__(learning_rate=learning_rate, name=name, **kwargs)
        check_at_least("seed", seed, 0)
        if nonfinite not in NONFINITE:
            raise ValueError(f"nonfinite must be one of {NONFINITE}, not {nonfinite!r}")
        if staleness is not None and not isinstance(staleness, staleness_lib.Policy):
            raise ValueError(
                f"staleness must be a policy of tf_recsync.staleness or None, not {staleness!r}"
            )
        if swap is not None and not isinstance(swap, Swap):
            raise ValueError(f"swap must be a tf_recsync.Swap or None, not {swap!r}")
        try:
            self._tables = re.compile(tables)
        except (re.error, TypeError) as error:
            raise ValueError(
                f"tables must be a regular expression, not {tables!r}: {error}"
            ) from None
        if swap is not None and not self.accumulator_names:
            raise ValueError(
                f"swap must be None for {type(self).__name__}, which has no accumulator to decay, "
                f"not {swap!r}"
            )
        if self.weight_decay is not None:
            allowed = "None or at least 0"
            self.weight_decay = number("weight_decay", self.weight_decay, least=0, allowed=allowed)
        self.staleness = staleness or staleness_lib.Constant()
        self.swap = swap
        self.nonfinite = nonfinite
        self.seed = int(seed)
        self._states: list[VariableState] = []
        # Stands for the variables in TensorFlow's checkpoints.
        self._saved_group = tf.__internal__.tracking.AutoTrackable()
        self.wait_for_steps: Callable[[], None] | None = None
        # Where the first step is applied, as models are loaded for more than to train them.
        self._scope_is_checked = False

    # What a subclass provides.

    def accumulator_initializer(self, name: str) -> keras.initializers.Initializer:
        """The initial value of an accumulator."""
        raise NotImplementedError

    def dense_op(self, **kwargs) -> tf.Operation:
        """Calls the op that updates dense variables."""
        raise NotImplementedError

    def rows_op(self, **kwargs) -> tf.Operation:
        """Calls the op that updates rows of a table."""
        raise NotImplementedError

    def plain_rule(self, accumulators, gradient, learning_rate, decay, *, value, step, last_step):
        """The rule in plain TensorFlow: (new accumulators, what to subtract).

        Args:
            accumulators: tensors shaped like the variable; of a table with `rowwise`
                [rows, 1, ...].
            gradient: a tensor like the variable.
            learning_rate: a scalar.
            decay: SWAP's factor, which broadcasts to the variable's shape.
            value: the variable's value.
            step: the global step, an int64 scalar.
            last_step: with `keeps_steps` the global step of the last update,
                which broadcasts too; else None.
        """
        raise NotImplementedError

    # Variables.

    def build(self, variables):
        if self.built:
            return
        # The first step may be traced, and build within it. What a checkpoint is restored to has
        # to have its initial values by then.
        with tf.init_scope():
            self._check_memory(variables)
            self._check_tables(variables)
            # No variables here for what servers accumulate.
            steps = None if self._accumulates_on_servers else self.gradient_accumulation_steps
            with instead(self, "gradient_accumulation_steps", steps):
                super().build(variables)
            self._states = [self._make_state(variable) for variable in variables]
            _warn_of_regularizers(state.variable for state in self._states if state.is_table)
            self._make_step_variable()
            self._load_kept()
            saving.track_variables(self, self._saved_group)

    def _check_tables(self, variables) -> None:
        """Checks that no table has another optimizer of its own."""
        for variable in variables:
            if getattr(variable, "table_optimizer", None) not in (None, self):
                tables = [piece.table for piece in variable.physical_table.pieces]
                raise ValueError(
                    f"the tables {tables} have optimizers of their own, which train them if the "
                    "model is compiled with recsync.optimizers.per_table(optimizer)"
                )

    def _check_memory(self, variables) -> None:
        """Checks that servers hold no more of an `EmbeddingCollection` than it allows."""
        limited = [v for v in variables if getattr(v, "memory_limit", None) is not None]
        for layer in dict.fromkeys(v.collection for v in limited):
            own = [v for v in limited if v.collection == layer]
            tables = [v.physical_table for v in own]
            limit = own[0].memory_limit
            check_memory(layer, tables, limit, self.slots, self.bytes_per_row_overhead)

    def _make_state(self, variable) -> VariableState:
        given = variable
        if not isinstance(variable, keras.Variable):
            variable = _OfTensorFlow(variable)
        named = len(variable.shape) >= 1 and bool(self._tables.fullmatch(variable.path))
        is_table = named or hasattr(variable, "physical_table")
        shape = tuple(variable.shape[:1]) if is_table else ()
        prefix = variable.path.replace("/", "_")

        def beside(name, shape, dtype, initializer="zeros"):
            with self._distribution_strategy.extended.colocate_vars_with(variable.value):
                return self.add_variable(
                    shape=shape, dtype=dtype, initializer=initializer, name=f"{prefix}_{name}"
                )

        rowwise = is_table and self.rowwise
        # Sums of small numbers, which narrow types would lose.
        narrow = ("bfloat16", "float16") if rowwise else ("bfloat16",)
        is_widened = is_table and variable.dtype in narrow

        def accumulator(name):
            initializer = self.accumulator_initializer(name)
            if rowwise or is_widened:
                own_shape = shape if rowwise else tuple(variable.shape)
                dtype = "float32" if is_widened else variable.dtype
                return beside(name, own_shape, dtype, initializer)
            return self.add_variable_from_reference(given, name=name, initializer=initializer)

        accumulators = [accumulator(name) for name in self.accumulator_names]
        uses_last_update = self.staleness.uses_last_update
        # Of periods and steps: a number for each row should take no more than it has to.
        counted = "int32" if is_table else "int64"
        is_keyed = hasattr(variable, "keyed")
        state = VariableState(
            variable=variable,
            is_table=is_table,
            accumulators=accumulators,
            versions=beside("version", shape, "int64"),
            counters=beside("staleness", (staleness_lib.COUNTERS,), "int64"),
            last_periods=[beside("last_period", shape, counted)] if self.swap else [],
            last_updates=[beside("last_update", shape, "float32")] if uses_last_update else [],
            last_steps=[beside("last_step", shape, counted)] if self.keeps_steps else [],
            log_decays=self._make_log_decays(variable, beside) if is_table else [],
            rowwise=rowwise,
            accumulator_values=tuple(
                float(self.accumulator_initializer(name)((), "float32"))
                for name in (self.accumulator_names if is_keyed else ())
            ),
        )
        if is_keyed:
            if self.use_ema:
                raise ValueError(
                    f"use_ema must be False for table {variable.path}, whose ids are keys: a "
                    "row's average would go on when the row is given to another key"
                )
            if self.gradient_accumulation_steps and not self._accumulates_on_servers:
                raise ValueError(
                    f"gradient_accumulation_steps must be None in one process for table "
                    f"{variable.path}, whose ids are keys, not {self.gradient_accumulation_steps}: "
                    "gradients of a row would go to the key that has it when they are applied"
                )
            variable.keyed.state = state
        return state

    def _make_log_decays(self, variable, beside) -> list[keras.Variable]:
        """What lets the rows of a table on a parameter server decay when they are needed."""
        table = shown(variable._value)
        if table is None or "/job:ps/" not in table.device:
            return []
        table.settle()  # What another optimizer has left.
        if self.weight_decay is None or not self._use_weight_decay(variable):
            return []
        if table.log_decays is None:
            # The table's, whichever optimizer updates it.
            logs = table.log_decays = beside("log_decay", (variable.shape[0] + 2,), "float64")
            rounding = self._rounding_of([variable])

            def settle() -> None:
                with tf.device(table.device):
                    handle = logs._value.handle
                    ops.settle_decay([table.handle], [handle], rounding=rounding)

            # Whoever reads or assigns the table as a whole finds all rows as they are by now.
            table.settle = settle
        return [table.log_decays]

    @property
    def _shares_variables(self) -> bool:
        """Whether trainers that count their own steps update the same variables."""
        arrangement = getattr(self._distribution_strategy, "arrangement", None)
        return arrangement is not None and arrangement.has_copies

    def note_step(self, step: int) -> None:
        """Notes how far the global step is that updates go by, as users are about to assign it."""
        if self._known_step is not None:
            self._known_step = max(self._known_step, step)

    @property
    def can_be_set_back(self) -> bool:
        """Whether `set_back` may have something to do."""
        return self.built and self.uses_global_step and not self._shares_variables

    def set_back(self, step: int) -> None:
        """Has what has made later steps than the global step go on there, if users have set it
        back; nobody may be in a step.

        Else pushes would be taken for late ones, for as many steps.

        Args:
            step: the global step that updates go on from.
        """
        if not self.can_be_set_back:
            return
        known, self._known_step = self._known_step, step
        if known is not None and known <= step:
            return
        state = self.step_state
        period = max(step + state.swap_offset, 0) // max(state.swap_period, 1)
        step = max(step + state.update_offset, 0)
        for own in self._states:
            for variables, most in ((own.last_steps, step), (own.last_periods, period)):
                for variable in variables:
                    _limit(variable._value, most)

    @property
    def slots(self) -> int:
        """float32 accumulators for each element of a table, for `plan_placement`."""
        return int(bool(self.use_ema)) if self.rowwise else self.dense_slots

    @property
    def dense_slots(self) -> int:
        """Accumulators for each element of a dense variable, for `OperatorPlan`."""
        return len(self.accumulator_names) + bool(self.use_ema)

    @property
    def bytes_per_row_overhead(self) -> int:
        """Bytes for each row of a table beside those for its elements, for `plan_placement`."""
        last_update = 4 if self.staleness.uses_last_update else 0
        accumulators = 4 * len(self.accumulator_names) if self.rowwise else 0
        log_decay = 8 if self.weight_decay is not None else 0
        per_step = 4 * bool(self.swap) + 4 * self.keeps_steps
        return 8 + per_step + last_update + accumulators + log_decay

    @property
    def states(self) -> tuple[VariableState, ...]:
        """The state of each trained variable, in the order of `build`."""
        return tuple(self._states)

    def state_of(self, variable) -> VariableState:
        """The state of a variable that the optimizer was built with."""
        return self._states[self._get_variable_index(variable)]

    def _save(self, store):
        saving.save_variables(self, store)

    def _load(self, saved):
        saving.load_variables(self, saved)

    def _trackable_children(self, save_type="checkpoint", **kwargs):
        children = super()._trackable_children(save_type, **kwargs)
        if save_type == "savedmodel":
            children.pop("_saved_group", None)
            return children
        # These have the shapes of one placement; the group has them by table.
        for name in ("_variables", "_trainable_variables"):
            children.pop(name, None)
        return children

    # Applying gradients.

    def apply(self, grads, trainable_variables=None):
        push = context.current_push()
        variables = trainable_variables or self._trainable_variables
        if push is None:
            if self._accumulates_on_servers:
                raise ValueError(
                    f"optimizer {self.name} was made in a strategy's scope(), so its gradients can "
                    "only be applied by a worker's step: use fit, of a model that was made in the "
                    "scope(), too; train_on_batch and training loops of your own can't be used"
                )
            if not self._scope_is_checked:
                self._scope_is_checked = True
                _warn_of_forgotten_scope(self.name, variables)
            grads = self._unscaled(grads, variables)
            with instead(self, "loss_scale_factor", None):  # Or Keras would divide them again.
                super().apply(grads, trainable_variables)
        elif not push.is_dry:
            if self._clips:
                grads = push.for_clipping(grads, variables)
            super().apply(grads, trainable_variables)

    def _unscaled(self, grads, variables):
        """The gradients divided by `loss_scale_factor`; Keras can't divide a table's."""
        scale = self.loss_scale_factor
        if scale is None:
            return grads
        return [
            g
            if g is None or self._overwrite_variable_with_gradient(v)
            else keras.ops.divide(g, scale)
            for g, v in zip(grads, variables, strict=True)
        ]

    @property
    def iterations(self):
        """The updates of the parameters so far, as of Keras's optimizers."""
        return self._iterations if self._accumulates_on_servers else super().iterations

    def _backend_apply_gradients(self, grads, trainable_variables):
        if context.current_push() is None:
            super()._backend_apply_gradients(grads, trainable_variables)
            return
        # Each gradient is pushed: the servers add up those of several steps.
        grads = self._clip_gradients(grads)
        self._apply_weight_decay(trainable_variables)
        self._backend_update_step(grads, trainable_variables, self.learning_rate)

    def finalize_variable_values(self, var_list):
        # Keras calls this at the end of fit, which may have been stopped with
        # steps still in flight.
        if self.wait_for_steps is not None:
            self.wait_for_steps()
        super().finalize_variable_values(var_list)

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        push = context.current_push()
        if push is None:
            super()._backend_update_step(grads, trainable_variables, learning_rate)
        else:
            push.push(self, grads, trainable_variables, learning_rate)

    def _use_weight_decay(self, variable):
        # By TensorFlow's name, which has the layers' in it: Keras asks for that in one process.
        return super()._use_weight_decay(getattr(variable, "_value", variable))

    def _apply_weight_decay(self, variables):
        push = context.current_push()
        if push is None:
            super()._apply_weight_decay(variables)
        elif self.weight_decay is not None:
            push.decay_weights([v for v in variables if self._use_weight_decay(v)])

    @property
    def _clips(self) -> bool:
        return bool(self.clipnorm or self.global_clipnorm or self.clipvalue)

    def _clip_gradients(self, grads):
        if not self._clips:
            return grads
        # Norms and limits are those of whole rows: repeated rows come first.
        grads = [sum_repeated_rows(g) if isinstance(g, tf.IndexedSlices) else g for g in grads]
        if self.nonfinite == "apply":
            return self._clipped(grads)
        # What is not applied is in no norm, and no limit makes an infinity a number.
        are_finite = [_at(g, _is_finite, g) for g in grads]
        kept = [_at(g, _where, ok, g, 0.0) for ok, g in zip(are_finite, grads, strict=True)]
        clipped = zip(grads, are_finite, self._clipped(kept), strict=True)
        return [_at(g, _where, ok, own, np.nan) for g, ok, own in clipped]

    def _clipped(self, grads: list) -> list:
        if not self.global_clipnorm:
            clip = super()._clip_gradients
            return [_at(gradient, clip, [gradient])[0] for gradient in grads]
        dtypes = {gradient.dtype for gradient in grads}
        if len(dtypes) == 1:
            # Keras's own would make the gradients of tables dense.
            return tf.clip_by_global_norm(grads, self.global_clipnorm)[0]
        dtype = tf.float64 if tf.float64 in dtypes else tf.float32
        wide = [_at(g, _map_values, g, lambda v: tf.cast(v, dtype)) for g in grads]
        norm = tf.linalg.global_norm(wide)
        scale = tf.minimum(self.global_clipnorm / norm, 1)
        scale += norm - norm  # As above: one that is not finite leaves no gradient so.
        return [_at(g, _map_values, g, lambda v: v * tf.cast(scale, v.dtype)) for g in grads]

    def update_step(self, gradient, variable, learning_rate):
        """Applies a fresh gradient to one variable."""
        state = self.state_of(variable)
        learning_rate = tf.cast(learning_rate, tf.float32)
        step = tf.cast(self.iterations, tf.int64) + 1
        known = ("float32", "bfloat16") if state.is_table else ("float32",)
        device = getattr(state.variable._value, "device", None)
        is_plain = state.variable.dtype not in known or not has_ops(device or "")
        if in_xla_context() or is_plain:
            plain_update(self, state, variable, gradient, learning_rate, step)
        elif state.is_table:
            lookup = ops.lookup_of(gradient)
            if lookup is None:
                values, ids = as_rows(gradient, state.variable.shape)
                if self.gradient_accumulation_steps:
                    named = named_rows(values)
                    values, ids = tf.boolean_mask(values, named), tf.boolean_mask(ids, named)
                lookup = tf.reshape(values, [-1]), Bags(ids)
            values, bags = lookup
            rows = PackedBags.pack([bags])
            self.apply_rows([state], values, rows, no_versions(), learning_rate, step)
        else:
            gradient = tf.reshape(tf.convert_to_tensor(gradient), [-1])
            self.apply_dense([state], gradient, no_versions(), learning_rate, step)

    def decay_weights(
        self, states: Sequence[VariableState], learning_rate: tf.Tensor
    ) -> list[tf.Operation]:
        """Decays weights once, as an update does before its gradient is applied.

        Tables on parameter servers decay row by row, when rows are needed.

        Args:
            states: the `VariableState`s of what decays, all on one device.
            learning_rate: a float32 scalar; 0 where there is no update.

        Returns:
            The operations, none if there is nothing to decay.
        """
        if self.weight_decay is None or not states:
            return []
        whole = [state.variable for state in states if not state.log_decays]
        decay = ops.decay_weights(
            variables=handles(whole),
            log_decays=handles([v for s in states for v in s.log_decays]),
            learning_rate=learning_rate,
            weight_decay=float(self.weight_decay),
        )
        return [decay]

    def apply_dense(
        self,
        states,
        gradient,
        pulled_versions,
        learning_rate,
        global_step,
        *,
        weighted=True,
        hogwild=False,
    ):
        """Applies packed gradients to dense variables of one server.

        Args:
            states: the `VariableState`s, all on one device.
            gradient: [total], float32, bfloat16 or float16: flattened gradients.
            pulled_versions: int64 [len(states)], or empty for fresh gradients.
            learning_rate: a float32 scalar.
            global_step: an int64 scalar, counted from 1.
            weighted: False if the gradients are weighted already: then staleness is
                counted, but the policy is not used.
            hogwild: whether updates of the same variables may run side by side, without
                locks.

        Returns:
            The update's operation.
        """
        return self.dense_op(
            gradient=gradient,
            hogwild=hogwild,
            **self._arguments(states, pulled_versions, learning_rate, global_step, weighted),
        )

    def apply_rows(
        self, states, gradient, rows, pulled_versions, learning_rate, global_step, *, weighted=True
    ):
        """Applies packed gradients to rows of tables of one server.

        Rows that are named more than once are summed first.

        Args:
            states: the tables' `VariableState`s, all on one device.
            gradient: [total], float32, bfloat16 or float16: the gradients of the
                pooled vectors of `rows`, flattened, table after table.
            rows: a `tf_recsync.ops.bags.PackedBags`.
            pulled_versions: int64 [n], or empty for fresh gradients.
            learning_rate: a float32 scalar.
            global_step: an int64 scalar, counted from 1.
            weighted: as in `apply_dense`.

        Returns:
            The update's operation.
        """
        return self.rows_op(
            **self.rows_arguments(
                states, gradient, rows, pulled_versions, learning_rate, global_step, weighted
            )
        )

    def rows_arguments(
        self, states, gradient, rows, pulled_versions, learning_rate, global_step, weighted=True
    ) -> dict:
        """What `rows_op` is called with to apply what `apply_rows` is given."""
        return {
            "gradient": gradient,
            "indices": rows.ids,
            "counts": rows.counts,
            **rows.inputs(),
            **log_decays_of(states),
            "rounding": self._rounding_of([state.variable for state in states]),
            **self._arguments(states, pulled_versions, learning_rate, global_step, weighted),
        }

    def rounding_seed(self, table: str) -> int:
        """The seed of the random numbers by which a table's rows are rounded.

        Args:
            table: its name in an `EmbeddingCollection`, or the path of its variable.
        """
        return seed_of_table(f"rounding {self.seed}", table)

    def _rounding_of(self, variables: Sequence[keras.Variable]) -> list[int]:
        """What ops on rows of these tables are told of how to round them."""
        numbers = []
        for place, variable in enumerate(variables):
            if variable.dtype != "bfloat16":
                continue
            physical = getattr(variable, "physical_table", None)
            if physical is None:
                numbers += [place, 0, 0, 1, self.rounding_seed(variable.path)]
                continue
            for piece in physical.pieces:
                if piece.rows:
                    seed = self.rounding_seed(piece.table)
                    numbers += [place, piece.offset, piece.index, piece.count, seed]
        return numbers

    def _arguments(
        self, states, pulled_versions, learning_rate, global_step, weighted=True
    ) -> dict:
        """What all update ops are called with."""
        policy = self.staleness if weighted else staleness_lib.Constant()
        # What a policy needs to be told is left out where it is not used.
        last_updates = [v for s in states for v in s.last_updates if policy.uses_last_update]
        steps = {"last_steps": handles([v for s in states for v in s.last_steps])}
        variables, versions = read_handles(states)
        return {
            **(steps if self.keeps_steps else {}),
            "variables": variables,
            "accumulators": [
                handles([s.accumulators[i] for s in states])
                for i in range(len(self.accumulator_names))
            ],
            "versions": versions,
            "counters": handles([s.counters for s in states]),
            "last_periods": handles([v for s in states for v in s.last_periods]),
            "last_updates": handles(last_updates),
            "pulled_versions": pulled_versions,
            "learning_rate": learning_rate,
            **self.step_arguments(global_step),
            "nonfinite": self.nonfinite,
            # For its error.
            "names": [s.variable.path for s in states] if self.nonfinite == "error" else [],
            **policy.attributes(),
        }

    def get_config(self):
        config = super().get_config()
        config.update(
            staleness=keras.saving.serialize_keras_object(self.staleness),
            swap=keras.saving.serialize_keras_object(self.swap) if self.swap else None,
            nonfinite=self.nonfinite,
            seed=self.seed,
            tables=self._tables.pattern,
        )
        return config

    @classmethod
    def from_config(cls, config, custom_objects=None):
        config = dict(config)
        for name in ("staleness", "swap"):
            if isinstance(config.get(name), dict):
                config[name] = keras.saving.deserialize_keras_object(
                    config[name], custom_objects=custom_objects
                )
        return super().from_config(config, custom_objects=custom_objects)


def _limit(variable: tf.Variable, most: int) -> None:
    """Has nothing in a variable of integers be larger than `most`."""
    most = tf.constant(min(most, variable.dtype.max), variable.dtype)
    with guarded(variable), tf.device(variable.device):
        # Not by `assign`, which tells those who train it of what users assign.
        value = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
        if fetch(tf.reduce_any(value > most)):
            limited = tf.minimum(value, most)
            tf.raw_ops.AssignVariableOp(resource=variable.handle, value=limited)


def _warn_of_forgotten_scope(name: str, variables: Iterable[keras.Variable]) -> None:
    """Warns if a cluster that this process is connected to will have nothing to do."""
    jobs = {
        tf.DeviceSpec.from_string(device.name).job for device in tf.config.list_logical_devices()
    }
    if len(jobs) == 1 or tf.distribute.has_strategy():
        return
    if any(hasattr(variable.value, "distribute_strategy") for variable in variables):
        return
    logging.warning(
        "The optimizer %s was not made in the scope() of a strategy, though this process is "
        "connected to a cluster: its model trains in this process alone. To train on the cluster, "
        "make the model and compile it inside of strategy.scope().",
        name,
    )


def _warn_of_regularizers(tables: Iterable[keras.Variable]) -> None:
    """Warns of each table with a regularizer: nothing else makes a step as slow without a word."""
    for table in tables:
        if getattr(table, "regularizer", None) is None:
            continue
        physical = getattr(table, "physical_table", None)
        names = [] if physical is None else sorted({piece.table for piece in physical.pieces})
        logging.warning(
            "The table %s%s, %s, has a regularizer (%s): each step computes with all of its rows, "
            "and moves them, not only those that the batch names. On a large table that takes most "
            "of the step. An activity_regularizer of its layer acts on the rows that are looked "
            "up, and so do l1 and l2 of recsync.optimizers.Ftrl.",
            table.path,
            f" (of {', '.join(names)})" if names else "",
            " x ".join(f"{size:,}" for size in table.shape),
            type(table.regularizer).__name__,
        )


def no_versions() -> tf.Tensor:
    """Stands for versions of gradients that are fresh."""
    return tf.zeros([0], tf.int64)


def sum_repeated_rows(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """The same gradient with every row named once."""
    ids, positions = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, positions, tf.size(ids))
    return tf.IndexedSlices(values, ids, gradient.dense_shape)


def _at(gradient, function, *args):
    """What a function returns that is called where a gradient is."""
    push = context.current_push()
    with contextlib.nullcontext() if push is None else push.beside(gradient):
        return function(*args)


def _map_values(gradient, function):
    """A gradient of other values."""
    if isinstance(gradient, tf.IndexedSlices):
        values = function(gradient.values)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return function(gradient)


def _is_finite(gradient) -> tf.Tensor:
    """Whether a gradient is finite, or for each row that it names."""
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.reduce_all(tf.math.is_finite(gradient))
    axes = list(range(1, len(gradient.values.shape)))
    return tf.reduce_all(tf.math.is_finite(gradient.values), axes, keepdims=True)


def _where(is_finite: tf.Tensor, gradient, other: float):
    """A gradient with another value where it is not finite."""
    return _map_values(
        gradient, lambda values: tf.where(is_finite, values, tf.constant(other, values.dtype))
    )


def parts_of(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """The optimizers of a MultiOptimizer, or the optimizer itself."""
    return list(getattr(optimizer, "optimizers", [optimizer]))


def global_step_of(optimizer: keras.optimizers.Optimizer) -> int:
    """The updates of the parameters that an optimizer has made."""
    # A MultiOptimizer counts in its parts only.
    return max(int(part.iterations.numpy()) for part in parts_of(optimizer))
