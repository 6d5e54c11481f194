"""The gradient buffer of one parameter server, as the coordinator owns it."""

from __future__ import annotations

import dataclasses
import math
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

from tf_recsync import staleness
from tf_recsync.cluster import fetch
from tf_recsync.ops import gradient_buffer as buffer_ops
from tf_recsync.ops.bags import PackedBags
from tf_recsync.optimizers import base
from tf_recsync.synchronization.resource_deleter import ResourceDeleter


@dataclasses.dataclass(frozen=True)
class State:
    """What a gradient buffer has counted since it was made.

    Attributes:
        step: the steps that it has given out: the global step of its server.
        applied: the step up to which all of them are applied.
        pending: pushes that wait for the others of their step.
        included: pushes of a weight above 0.
        decayed: pushes of a weight above 0 and below 1.
        excluded: pushes of weight 0, which were counted and added nothing.
        late: pushes dropped because their step was over, or their worker had been lost.
        duplicates: pushes dropped because their token was taken already.
        spent: tokens counted without a push, as other servers had taken them of a worker that was
            lost.
        applications: steps given out since it was made.
        age_sum: of the pushes counted (those included and excluded), the sum of the ages of
            their tokens: the step minus the token's value.
        age_max: the largest of these.
        staleness: of the pushes counted: the step minus that of the parameters
            pulled, plus 1.
    """

    step: int
    applied: int
    pending: int
    included: int
    decayed: int
    excluded: int
    late: int
    duplicates: int
    spent: int
    applications: int
    age_sum: int
    age_max: int
    staleness: staleness.Statistics


# What the op puts before its staleness counters is in the order of `State`.
_COUNTS = len(dataclasses.fields(State)) - 1


class GradientBuffer:
    """Collects the pushes to one server, and gives them out as one step.

    When `capacity` pushes have come, it gives out sum(weight * gradient) / capacity,
    clears, and adds one to its step. The weight depends on the age of the push's
    token, the buffer's step minus the token's value (0 if that is negative): it is
    `weight` at tau = age + 1.

    | mode | capacity | weight | drop_late |
    |---|---|---|---|
    | BSP | M | Constant() | False |
    | GBA | M | Threshold(iota) | False |
    | sync of n workers | n | Constant() | True |
    | Hop-BW with b backups | n - b | Constant() | True |

    The buffer is a resource of the server. It is destroyed with this object; if
    the server is gone, it is gone with it. The methods may be called eagerly or in
    a `tf.function`, from any thread.

    Reference: Su et al. 2022, "GBA: A Tuning-free Approach to Switch between
    Synchronous and Asynchronous Training for Recommendation Models", section 4.1.

    Args:
        device: the device that holds the variables, a str.
        dense: the states of the dense variables; a push brings the gradients of
            all of them or of none.
        tables: the states of the tables.
        capacity: how many pushes make a step, an int of at least 1.
        weight: a policy of `tf_recsync.staleness` that depends on the age alone;
            None (the default) for `Constant()`.
        drop_late: whether a push whose token value is less than the step is dropped
            and not counted, and so is a token that the step has taken already. False by
            default.
        made_on: the device where it lies, if functions are only to be traced with it, a str;
            None (the default) for `device`.

    Attributes:
        handle: the handle that the ops take; the buffer lives as long as this object.

    Raises:
        ValueError: for a weight that depends on more than the age.
        tf.errors.InvalidArgumentError: for a capacity out of range.

    Example:

    >>> buffer = GradientBuffer("/CPU:0", dense=[], tables=[], capacity=2)
    >>> [bool(buffer.push(token, 0, pulled_step=0).ready) for token in range(2)]
    [False, True]
    >>> buffer.state().step
    1
    """

    def __init__(
        self,
        device: str,
        dense: Sequence[base.VariableState],
        tables: Sequence[base.VariableState],
        capacity: int,
        weight: staleness.Policy | None = None,
        drop_late: bool = False,
        made_on: str | None = None,
    ):
        self.device = device
        self.dense = list(dense)
        self.tables = list(tables)
        made_on = device if made_on is None else made_on
        with context.eager_mode(), tf.device(made_on):
            self.handle = buffer_ops.gradient_buffer(
                f"recsync_gradient_buffer_{uuid.uuid4().hex}",
                capacity=capacity,
                divisor=capacity,
                weight=weight or staleness.Constant(),
                drop_late=drop_late,
                dense_size=sum(math.prod(state.variable.shape) for state in dense),
                dense_count=len(dense),
                table_rows=[state.variable.shape[0] for state in tables],
                table_widths=[state.width for state in tables],
            )
        self._deleter = ResourceDeleter(self.handle, made_on)

    def step(self) -> buffer_ops.BufferStep:
        """How far it is; see `tf_recsync.ops.gradient_buffer.gradient_buffer_step`."""
        return self._call(buffer_ops.gradient_buffer_step)

    def push(
        self,
        token_index: int | tf.Tensor,
        token_value: int | tf.Tensor,
        pulled_step: int | tf.Tensor,
        dense: tf.Tensor | None = None,
        dense_versions: tf.Tensor | None = None,
        tables: Sequence[base.VariableState] = (),
        values: tf.Tensor | None = None,
        rows: PackedBags | None = None,
        row_versions: tf.Tensor | None = None,
        ticket: int | tf.Tensor = 0,
    ) -> buffer_ops.Aggregate:
        """Pushes the gradients of one batch; gives out the step that they complete.

        Args:
            token_index: int64 scalar, the token's place in its list.
            token_value: int64 scalar, the step that the batch is meant for.
            pulled_step: int64 scalar, `step().applied` when the parameters were pulled.
            dense: float32 [total], the gradients of all dense variables, flattened,
                one after the other; None for none.
            dense_versions: int64 [dense variables], as pulled; None for fresh
                gradients. All pushes of a step must do alike.
            tables: the states of the tables that `rows` are of.
            values: float32, the gradients of the pooled vectors of `rows`,
                flattened, table after table; needed with `tables`.
            rows: what was looked up in `tables`; needed with them.
            row_versions: int64 [n], of `rows.ids`; None for fresh gradients. All
                pushes of a step must do alike.
            ticket: int64 scalar, the token's, by which `revoke` knows the push; 0 (the default)
                for none.

        Returns:
            An `Aggregate`: hand it to the optimizer's `apply_dense` and
            `apply_rows`, whether it is ready or not, and then to `applied`.

        Raises:
            ValueError: if one of `tables` is not the buffer's.
            tf.errors.InvalidArgumentError: for an input out of range or of another
                shape; the buffer is as before then.
        """
        unknown = [state.variable.path for state in tables if state not in self.tables]
        if unknown:
            raise ValueError(f"tables must be tables of the buffer, not {', '.join(unknown)}")
        return self._aggregate(
            buffer_ops.push_to_buffer,
            token_index,
            token_value,
            pulled_step,
            dense,
            dense_versions,
            [self.tables.index(state) for state in tables],
            values,
            rows,
            row_versions,
            ticket,
        )

    def flush(self) -> buffer_ops.Aggregate:
        """Gives out the pushes that are there, though they are fewer than a step has.

        Their sum is divided by `capacity`: each weighs as in a step that is full. Without
        pushes nothing is ready, and no step is counted.
        """
        return self._aggregate(buffer_ops.flush_buffer)

    def applied(self, aggregate: buffer_ops.Aggregate) -> tf.Tensor:
        """Notes that what was given out is applied; nothing if it was not ready.

        Returns:
            The step up to which all are applied now, an int64 scalar.
        """
        return self._call(buffer_ops.buffer_applied, aggregate.ready, aggregate.step)

    def mark_applied(self, step: int | tf.Tensor) -> tf.Tensor:
        """Notes that a step is applied, or lost; nothing if that is noted already.

        Args:
            step: int64 scalar, one that was given out.

        Returns:
            The step up to which all are applied now, an int64 scalar.
        """
        return self._call(buffer_ops.buffer_applied, True, step)

    def spend(
        self,
        token_value: int | tf.Tensor,
        token_indices: Sequence[int] | tf.Tensor,
        ticket: int | tf.Tensor,
    ) -> buffer_ops.Aggregate:
        """Counts tokens that other servers have taken, and nobody will push any more.

        Each that this one has not taken is a push without gradients.

        Args:
            token_value: int64 scalar, that of the tokens; if it is not the buffer's step, nothing
                happens.
            token_indices: int64 [n], their places in their list.
            ticket: int64 scalar, a revoked one: `revoke` tells of the step that they complete,
                until it is applied.

        Returns:
            The step that they complete, as `push` does.

        Raises:
            tf.errors.InvalidArgumentError: if the buffer counts late pushes.
        """
        return self._aggregate(buffer_ops.spend_tokens, token_value, token_indices, ticket)

    def revoke(self, tickets: Sequence[int] | tf.Tensor) -> buffer_ops.Revoked:
        """Drops pushes with these tickets that come from now on: who took the tokens is gone.

        Args:
            tickets: int64 [n], as pushed.

        Returns:
            The steps that earlier pushes with them have completed and that are not applied yet,
            and those of their tokens that it has.
        """
        return self._call(buffer_ops.revoke_tickets, tickets)

    def restore(self, step: int | tf.Tensor) -> tf.Operation:
        """Sets the step, all of it applied, and drops what is pending.

        Args:
            step: int64 scalar, at least 0: that of the parameters, as after loading
                a checkpoint. No application may be in progress.
        """
        return self._call(buffer_ops.restore_buffer, step)

    def state(self) -> State:
        """What it has counted; eager only."""
        counters = fetch(self._call(buffer_ops.gradient_buffer_state))
        measured = staleness.Statistics.from_counters([counters[_COUNTS:]])
        return State(*counters[:_COUNTS].tolist(), staleness=measured)

    def _call(self, op: Callable, *arguments: Any) -> Any:
        with tf.device(self.device):
            return op(self.handle, *arguments)

    def _aggregate(self, op: Callable, *arguments: Any) -> buffer_ops.Aggregate:
        aggregate = self._call(op, *arguments)
        aggregate.rows.counts.set_shape([len(self.tables)])
        return aggregate
