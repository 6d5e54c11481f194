"""The token list and the gradient buffers of a group that trains in a mode.

Its trainers take tokens from one list, on one of its servers. Each server
has a gradient buffer for each optimizer, for the variables that it holds.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import tensorflow as tf
from absl import logging

from tf_recsync import staleness
from tf_recsync.cluster import fetch, reason
from tf_recsync.cluster.making_functions import making_functions
from tf_recsync.ops.bags import PackedBags
from tf_recsync.ops.gradient_buffer import Aggregate, Revoked
from tf_recsync.ops.tokens import Token
from tf_recsync.optimizers import base
from tf_recsync.synchronization.at_once import AtOnce
from tf_recsync.synchronization.gradient_buffer import GradientBuffer, State
from tf_recsync.synchronization.group_variables import GroupVariables
from tf_recsync.synchronization.modes import Mode
from tf_recsync.synchronization.token_list import TokenList, TokenListState

# What a lost worker's function still does on the servers ends within this time, in seconds.
_ECHO_SECONDS = 0.5
_APPLY_SECONDS = 2.0  # The longest that the application of a step may take then.


@dataclasses.dataclass(frozen=True)
class Report:
    """What became of the workers' pushes.

    A push to several servers counts on each of them.

    Attributes:
        global_step: the applications of the server that is ahead.
        included: pushes applied with a weight above 0.
        decayed: those of them with a weight below 1.
        excluded: pushes that counted but whose weight was 0.
        late: pushes dropped because their step was over, or their worker had been lost.
        spent: tokens of lost workers that some servers had and others not, where they count as
            pushes without gradients.
        abandoned: pushes, counted above, that a pass that ended with an exception left
            in the buffers, and that the next pass dropped; also those that were there when
            a global step was loaded.
        left_over: pushes, counted above, that did not fill a global batch at the end of an
            epoch and were left out (`last_global_batch="drop"`).
        lost: tokens that were lost with a worker.
        reissued: tokens of lost workers that others got.
        age_mean: the mean age of the tokens pushed; 0 is fresh.
        age_max: the largest.
        staleness: the staleness of the parameters that gradients were computed on, in
            global steps; 1 is fresh.
    """

    global_step: int
    included: int
    decayed: int
    excluded: int
    late: int
    spent: int
    abandoned: int
    left_over: int
    lost: int
    reissued: int
    age_mean: float
    age_max: int
    staleness: staleness.Statistics

    @classmethod
    def of(cls, states: Sequence[State], **others: int) -> Report:
        """The report of what buffers have counted.

        Args:
            states: theirs.
            **others: the attributes that buffers do not count.
        """
        counted = ("included", "decayed", "excluded", "late", "spent", "age_sum")
        sums = {name: sum(getattr(state, name) for state in states) for name in counted}
        age_sum = sums.pop("age_sum")
        return cls(
            **sums,
            **others,
            age_mean=age_sum / max(sums["included"] + sums["excluded"], 1),
            age_max=max((state.age_max for state in states), default=0),
            staleness=staleness.Statistics.sum(state.staleness for state in states),
        )


@dataclasses.dataclass(frozen=True)
class Counted:
    """What buffers and token lists have counted, the latest last, also those that were lost.

    Attributes:
        parts: of each that was made, what its buffers and its token list had counted when they
            were last asked.
        abandoned: see `Report`.
        left_over: see there.
    """

    parts: tuple[tuple[list[State], TokenListState], ...] = ()
    abandoned: int = 0
    left_over: int = 0

    def report(self) -> Report:
        """What became of the pushes."""
        latest = self.parts[-1][0] if self.parts else []
        return Report.of(
            [state for states, _ in self.parts for state in states],
            global_step=max((state.step for state in latest), default=0),
            abandoned=self.abandoned,
            left_over=self.left_over,
            lost=sum(tokens.lost for _, tokens in self.parts),
            reissued=sum(tokens.reissued for _, tokens in self.parts),
        )


class Aggregation(AtOnce):
    """The token list and the gradient buffers of one model, for one group of trainers.

    Args:
        mode: when workers start and servers apply; one that uses tokens.
        states: of the variables, for each optimizer that the model trains with.
        variables: where the group's are.
        home: the device that keeps the token list.
        can_come_back: whether training goes on when a server is lost that keeps some of this.
        before: what another one has counted, whose place this takes.
    """

    takes_tokens = True

    def __init__(
        self,
        mode: Mode,
        states: Mapping[base.Optimizer, Sequence[base.VariableState]],
        variables: GroupVariables,
        home: str,
        can_come_back: bool = False,
        before: Counted = Counted(),
    ):
        self.mode = mode
        # The group's copies. Before the first, steps are traced with what lies in this process, as
        # the group's server may be away.
        self._made_for: object = object()
        self._can_come_back = can_come_back
        # What buffers and the token list had counted when they were last asked, and what those
        # had that were lost.
        self._known: tuple[list[State], TokenListState] | None = None
        self._parts_before = before.parts
        self._abandoned, self._left_over = before.abandoned, before.left_over
        # A part of a `MultiOptimizer` that trains nothing makes no steps.
        self._states = {optimizer: own for optimizer, own in states.items() if own}
        # The group's step when all began to go on from it, and each optimizer's own.
        self._begun = 0, dict.fromkeys(self._states, 0)
        self._variables = variables
        self._home = home
        self._trainers = variables.group.trainers
        with tf.device(None):
            self._make(made_on="/CPU:0")

    def _make(self, made_on: str | None = None) -> None:
        """Makes the token list and the buffers, all on one device, or each on its server."""
        mode, variables = self.mode, self._variables
        buffers: list[_Buffer] = []
        if mode.uses_buffers:
            for optimizer, of_optimizer in self._states.items():
                by_device: dict[str, list[base.VariableState]] = {}
                for state in of_optimizer:
                    by_device.setdefault(variables.device(state.variable), []).append(state)
                for device, states in by_device.items():
                    number = len(buffers)
                    buffers.append(_Buffer(number, optimizer, device, states, mode, made_on))
        tokens = TokenList(
            repeats=mode.repeats,
            gate=mode.gate,
            workers=len(self._trainers),
            servers=max(len(buffers), 1),
            clock_bound=mode.clock_bound,
            device=made_on or self._home,
        )
        self.buffers, self._tokens = buffers, tokens  # Not earlier, as others may look at them.
        # Tickets of tokens that were taken away, which not all servers know of.
        self._revoked: set[int] = set()
        self._withheld: set[int] = set()  # Tokens that were, and that nobody may have yet.
        # By what they do and what that was traced for, the latest.
        self._traced: dict[str, tuple[str, Callable]] = {}

    @property
    def handles(self) -> list[tf.Tensor]:
        """Of all that steps use, in an order that stays when it is made anew."""
        return [self._tokens.handle, *(b.handle for b in self.buffers)]

    def ensure(self, copies: object | None) -> None:
        """Makes all that steps use when the group has its copies, and anew if these were made
        anew, as a server was lost that kept some of both.

        What it had counted since it was last asked is gone with it.
        """
        if not self.is_made_for(copies):
            self._parts_before, self._known = self.counted.parts, None
            self._make()
            self.begin()
            self.release()  # Nobody waits for one that has not taken a token yet.
        self._made_for = copies  # Not earlier: if that fails, it is done again.

    def is_made_for(self, copies: object | None) -> bool:
        """Whether what steps use was made for these copies of the group."""
        return self._made_for is copies

    # In the workers' steps.

    def start(self, worker: tf.Tensor, devices: Iterable[str]) -> dict[str, Token]:
        """Takes a token, when the mode lets the worker start; see `AtOnce.start`."""
        reached = {}
        worker = tf.identity(worker)  # Only a worker that has a batch takes one.
        # The worker's index is all that the token waits for, and the token all that
        # the servers wait for.
        with tf.control_dependencies(None):
            with tf.device(self._home):
                # As one tensor: each is a message to each server.
                token = tf.stack(self._tokens.take(self._place(worker)))
            for device in devices:
                with tf.device(device):
                    reached[device] = Token(*tf.unstack(tf.identity(token), len(Token._fields)))
        return reached

    def _place(self, worker: int | tf.Tensor) -> int | tf.Tensor:
        """A worker's place in its group: tokens are taken by it."""
        first = self._trainers[0]
        return worker - first if first else worker

    @property
    def devices(self) -> set[str]:
        """The servers that have buffers."""
        return {buffer.device for buffer in self.buffers}

    def buffer(self, device: str, optimizer: base.Optimizer) -> _Buffer | None:
        """The buffer of a server for an optimizer; None where pushes are applied at once."""
        return next((b for b in self.buffers_of(device) if b.optimizer is optimizer), None)

    def buffers_of(self, device: str) -> list[_Buffer]:
        """All buffers of a server."""
        return [buffer for buffer in self.buffers if buffer.device == device]

    def report_step(self, buffer: _Buffer, applied: tf.Tensor) -> list[tf.Operation]:
        """Tells the token list how far a server is, if somebody may wait for it."""
        if self.mode.gate != "step":
            return []
        with tf.device(self._home):
            return [self._tokens.report_step(buffer.number, applied)]

    def apply(self, buffer: _Buffer, aggregate: Aggregate, rate: tf.Tensor) -> list[tf.Operation]:
        """Applies what a buffer gave out, if it did, and has it counted.

        Args:
            buffer: the buffer.
            aggregate: what it gave out.
            rate: the learning rate, a float32 scalar.

        Returns:
            The operations.
        """
        # Before others may start on the next step, which may read it.
        counted = self._count_step(buffer, aggregate)
        applied = buffer.apply(aggregate, rate, counted)
        return [*self.report_step(buffer, applied), applied.op]

    def _count_step(self, buffer: _Buffer, aggregate: Aggregate) -> list[tf.Operation]:
        """Counts what a buffer gave out in its optimizer's global step, if it is the one whose
        applications that counts."""
        iterations = buffer.optimizer._iterations
        owner = self._variables.device(iterations)
        mine = [b for b in self.buffers if b.optimizer is buffer.optimizer]
        if buffer is not next((b for b in mine if b.device == owner), mine[0]):
            return []
        with tf.device(owner):
            one = tf.cast(aggregate.ready, iterations._value.dtype)
            return [iterations._value.assign_add(one, read_value=False)]

    # In the coordinator.

    def begin(self) -> None:
        """Has tokens and buffers go on at the global step of the optimizer that is ahead; nobody
        may be in a step."""
        # Without buffers there is no step to refer to, and clocks begin anew.
        steps = self._own_steps() if self.mode.uses_buffers else {}
        step = max(steps.values(), default=0)
        self._begun = step, steps
        pending = self._pending()
        if pending:
            # They may be of other parameters than those of now.
            logging.warning(
                "%d pushes are dropped: of a pass that ended with an exception, or from before "
                "a global step was loaded.",
                pending,
            )
            self._abandoned += pending
        for buffer in self.buffers:
            buffer.restore(step)
        self._tokens.seek(step)
        self._withheld.clear()

    def flush(self) -> None:
        """Applies or drops what the buffers still hold, and has all go on with as many steps done.

        Nobody may be in a step.
        """
        if not self.buffers:
            return
        pending = self._pending()
        if pending and self.mode.last_global_batch == "weigh":
            self._on_servers("flush", self._trace_flush)()
        elif pending:
            self._left_over += pending
            for buffer in self.buffers:
                buffer.restore(buffer.state().step)
        begun, steps = self._begun
        done = max(state.step for state in self._ask()) - begun
        for optimizer in self._states:
            own = self._own_step(optimizer)
            # Not by `assign`, which tells those who train it of what users assign.
            step = tf.constant(steps[optimizer] + done, own.dtype)
            tf.raw_ops.AssignVariableOp(resource=own.handle, value=step)
        self.begin()

    def _own_steps(self) -> dict[base.Optimizer, int]:
        """The group's global step of each optimizer at the moment."""
        found = fetch([self._own_step(one).read_value() for one in self._states])
        return dict(zip(self._states, map(int, found), strict=True))

    def _own_step(self, optimizer: base.Optimizer) -> tf.Variable:
        """The group's global step of an optimizer."""
        return self._variables.own(optimizer._iterations)

    def _pending(self) -> int:
        """The pushes that the buffers hold."""
        return sum(buffer.state().pending for buffer in self.buffers)

    def _on_servers(self, name: str, trace: Callable, *specs: tf.TensorSpec) -> Callable:
        """What this process has servers do, as a function of tensors of `specs`."""
        # Whoever asks may be in the scope of a device that is gone.
        with tf.device(None):
            key = repr([o.traced_state for o in self._states if o.built])
            if name not in self._traced or self._traced[name][0] != key:
                function = tf.function(trace, autograph=False)
                # Others may be about to take in the server that was lost.
                traced = making_functions(lambda: function.get_concrete_function(*specs))
                self._traced[name] = key, self._variables.on_own(traced)
        return self._traced[name][1]

    def _trace_flush(self) -> None:
        for buffer in self.buffers:
            rate = buffer.own_rate()
            buffer.apply(buffer.flush(), rate)  # `flush` counts the steps itself.

    def _trace_spend(self, value: tf.Tensor, indices: tf.Tensor, ticket: tf.Tensor) -> None:
        for buffer in self.buffers:
            rate = buffer.own_rate()
            self.apply(buffer, buffer.spend(value, indices, ticket), rate)

    def lose(self, worker: int) -> None:
        """Takes a worker that is gone out of the token list, so that nobody waits for it.

        Steps that it was to apply are lost with it, but counted as applied, as others
        wait for them. It takes half a second or more to see which those are.
        """
        held = self._take_away(worker)
        if not self.buffers or not (held or self._has_taken(worker)):
            return
        self._hand_on()  # Others may wait for that.
        time.sleep(_ECHO_SECONDS)
        # If it was the connection that was lost, its last call has gone on for a moment.
        self.forget(worker)

    def forget(self, worker: int) -> None:
        """Takes a worker's tokens away; it is one of those that others wait for with its next.

        What it has pushed with them and has not arrived yet is dropped when it does.
        """
        self._take_away(worker)
        self._hand_on()
        self._settle()

    def _take_away(self, worker: int) -> bool:
        """Takes a worker's tokens away; whether it had any."""
        # The thread that finds out may be in the device scope of the lost worker.
        with tf.device(self._home):
            loss = fetch(self._tokens.lose(self._place(worker)))
        tickets = set(loss.tickets.tolist())
        new = tickets - self._revoked
        # Until all servers know: if one does not answer, they are told the next time.
        self._revoked |= tickets
        self._withheld.update(loss.withheld.tolist())
        if new:
            logging.warning("worker:%d took %d tokens with it.", worker, len(new))
        return bool(tickets)

    def _hand_on(self) -> None:
        """Has tokens that were taken away be handed out again, but for those that a server has.

        Whoever got one of these would push in vain and not know it. Servers that lack it count it
        as a push without gradients.
        """
        if not self._withheld:
            return
        tickets = sorted(self._revoked)
        found = [_revoked(buffer, tickets) for buffer in self.buffers]
        steps = [int(revoked.step) for revoked in found]
        has = [set(revoked.taken.tolist()) for revoked in found]
        reached = min(steps)
        # Of a step that is over somewhere, a token that was not needed there is needed nowhere.
        again = {i for i in self._withheld if i // self.mode.repeats >= max(steps)}
        again.difference_update(*has)
        spent = {i for i in self._withheld if i // self.mode.repeats == reached}
        spent.intersection_update(set().union(*has))
        if any(s == reached and not spent <= mine for s, mine in zip(steps, has, strict=True)):
            number = tf.TensorSpec([], tf.int64)
            specs = number, tf.TensorSpec([None], tf.int64), number
            spend = self._on_servers("spend", self._trace_spend, *specs)
            with tf.device(None):
                # By the ticket, a step that this completes and does not apply is found (`_settle`).
                arguments = [reached, sorted(spent), tickets[0]]
                spend(*(tf.constant(argument, tf.int64) for argument in arguments))
        with tf.device(self._home):
            reissued = int(fetch(self._tokens.reissue(np.array(sorted(again), np.int64))))
        self._withheld.clear()
        logging.info("%d tokens are handed out again; servers have %d.", reissued, len(spent))

    def _has_taken(self, worker: int) -> bool:
        """Whether a worker has taken a token since all began."""
        with tf.device(self._home):
            return self._tokens.state().clocks[self._place(worker)] > 0

    def _settle(self) -> None:
        """Revokes the tickets of tokens that were taken away on all servers, and marks steps as
        applied that pushes with them have completed, and that who pushed was to apply.

        All others are applied by workers that are there, however long it takes them.
        """
        tickets, buffers = sorted(self._revoked), self.buffers
        if not tickets or not buffers:
            return
        deadline = time.monotonic() + _APPLY_SECONDS
        while True:
            steps = [(b, step) for b in buffers for step in _revoked(b, tickets).unapplied]
            if not steps or time.monotonic() >= deadline:
                break
            time.sleep(_ECHO_SECONDS / 5)  # Servers may be about to.
        for buffer, step in steps:
            buffer.mark_applied(step)
            logging.warning(
                "%s: step %d was given out and not applied: it is lost with a worker.",
                buffer.device,
                step,
            )
        if self.mode.gate == "step":
            for buffer in buffers:
                # The worker may not have come to say so of what is applied, either.
                applied = buffer.state().applied
                with tf.device(self._home):
                    self._tokens.report_step(buffer.number, applied)
        self._revoked.difference_update(tickets)

    def release(self) -> None:
        """Ends the waits of all workers for tokens, with errors: after a pass that has failed."""
        if self.mode.gate != "none":
            with tf.device(self._home):
                for place in range(len(self._trainers)):
                    self._tokens.leave(place)

    def leave(self, worker: int) -> None:
        """Takes a worker that has nothing to do at the moment out of those that others wait for.

        One that takes a token is one of them again.
        """
        if self.mode.gate == "clock":
            with tf.device(self._home):
                self._tokens.leave(self._place(worker))

    def describe(self) -> str:
        """Who waits for whom, in words."""
        try:
            return self._tokens.state().describe()
        except tf.errors.OpError as error:
            return f"the token list on {self._home} does not answer: {reason(error)}"

    def report(self) -> Report:
        """What became of the pushes so far; while a server is away, as far as it was known.

        Raises:
            tf.errors.OpError: if a server is lost without which nobody goes on.
        """
        try:
            self._ask()
        except tf.errors.OpError:
            if not self._can_come_back:
                raise
        return self.counted.report()

    def _ask(self) -> list[State]:
        """What the buffers have counted; from now on it is known."""
        states = [buffer.state() for buffer in self.buffers]
        self._known = states, self._tokens.state()
        return states

    @property
    def counted(self) -> Counted:
        """What was counted so far, as far as it is known."""
        known = () if self._known is None else (self._known,)
        return Counted((*self._parts_before, *known), self._abandoned, self._left_over)


def _revoked(buffer: _Buffer, tickets: Sequence[int]) -> Revoked:
    """Drops pushes with these tickets that come from now on; see `GradientBuffer.revoke`."""
    return fetch(buffer.revoke(np.array(tickets, np.int64)))


def _only_if(condition: tf.Tensor, make: Callable[[], tf.Operation]) -> tf.Operation:
    """An operation that is run where a condition holds."""

    def run():
        with tf.control_dependencies([make()]):
            return tf.constant(True)

    return tf.cond(condition, run, lambda: tf.constant(False)).op


def _of_some(
    aggregate: Aggregate, tables: Sequence[base.VariableState], which: Sequence[bool]
) -> Aggregate:
    """What a buffer gave out of some of its tables."""
    rows = aggregate.rows
    of_rows = tf.repeat(which, rows.counts)
    elements = [table.width for table in tables]
    of_values = tf.repeat(which, rows.counts * tf.constant(elements, tf.int64))
    versions = aggregate.row_versions  # Of all rows, or none.
    return aggregate._replace(
        values=tf.boolean_mask(aggregate.values, of_values),
        rows=PackedBags(tf.boolean_mask(rows.counts, which), tf.boolean_mask(rows.ids, of_rows)),
        row_versions=tf.boolean_mask(versions, of_rows[: tf.size(versions)]),
    )


class _Buffer(GradientBuffer):
    """The gradient buffer of one server for one optimizer.

    Attributes:
        number: its number among those of the model.
        optimizer: the optimizer.
        device: the server.
        dense: the states of the dense variables, in the order of their gradients.
        tables: the states of the tables.
    """

    def __init__(
        self,
        number: int,
        optimizer: base.Optimizer,
        device: str,
        states: Sequence[base.VariableState],
        mode: Mode,
        made_on: str | None,
    ):
        self.number = number
        self.optimizer = optimizer
        dense = [state for state in states if not state.is_table]
        tables = [state for state in states if state.is_table]
        options = mode.capacity, mode.weight, mode.drop_late
        super().__init__(device, dense, tables, *options, made_on)

    def own_rate(self) -> tf.Tensor:
        """The learning rate as it is without a push, a float32 scalar."""
        with tf.device("/CPU:0"):
            return tf.cast(self.optimizer.learning_rate, tf.float32)

    def apply(
        self, aggregate: Aggregate, rate: tf.Tensor, counted: Sequence[tf.Operation] = ()
    ) -> tf.Tensor:
        """Applies what the buffer gave out, if it did, on its server.

        Args:
            aggregate: what it gave out.
            rate: the learning rate, a float32 scalar.
            counted: what else belongs to the step, for those who wait for it.

        Returns:
            The step up to which all is applied.
        """
        with tf.device(self.device):
            operations = [*counted, *self._decay(aggregate, rate)]
            if self.dense:
                operations.append(
                    self.optimizer.apply_dense(
                        self.dense,
                        aggregate.dense,
                        aggregate.dense_versions,
                        rate,
                        aggregate.step,
                        weighted=False,
                    )
                )
            operations += self._apply_rows(aggregate, rate)
            with tf.control_dependencies(operations):
                return self.applied(aggregate)

    def _apply_rows(self, aggregate: Aggregate, rate: tf.Tensor) -> list[tf.Operation]:
        # What is frozen gets no gradients, but would move by its moments.
        trained = [table.variable.trainable for table in self.tables]
        if not any(trained):
            return []
        tables = list(itertools.compress(self.tables, trained))
        if not all(trained):
            aggregate = _of_some(aggregate, self.tables, trained)

        def apply_rows():
            return self.optimizer.apply_rows(
                tables,
                aggregate.values,
                aggregate.rows,
                aggregate.row_versions,
                rate,
                aggregate.step,
                weighted=False,
            )

        # Without rows there would be nothing to update, but for rows that move at each step.
        return [apply_rows() if self.optimizer.lazy else _only_if(aggregate.ready, apply_rows)]

    def _decay(self, aggregate: Aggregate, rate: tf.Tensor) -> list[tf.Operation]:
        """Decays weights once for each step, before its update, as one process does."""
        optimizer = self.optimizer
        if optimizer.weight_decay is None:
            return []
        states = [s for s in [*self.dense, *self.tables] if s.variable.trainable]
        decayed = [state for state in states if optimizer._use_weight_decay(state.variable)]
        return optimizer.decay_weights(decayed, tf.where(aggregate.ready, rate, 0.0))
