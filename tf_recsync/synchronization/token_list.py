"""The token list of a group, on one of its servers (GBA, section 4.1)."""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import Sequence

import tensorflow as tf

from tf_recsync.cluster import fetch
from tf_recsync.ops import tokens
from tf_recsync.synchronization.resource_deleter import ResourceDeleter


class TokenList:
    """Hands out tokens to workers, one for every batch that they have got.

    Token i (i = 0, 1, ...) has value floor(i / repeats), the global step that its gradient is
    meant for. Tokens are handed out in ascending order, each once. All workers are live at the
    start, with clock 0; one that was lost or has left takes part again from its next `take`,
    with the clock of the slowest live worker.

    The list lives on a server until this object is deleted. The methods may be called in eager
    code and in a `tf.function`, there they run one after the other, as traced. The op functions
    in `tf_recsync.ops.tokens` take `handle` instead, also as an argument of a function.

    >>> import tf_recsync as recsync
    >>> from tf_recsync.synchronization.token_list import TokenList
    >>> tokens = TokenList(repeats=2, gate="step", workers=2)
    >>> [int(tokens.take(worker).value) for worker in (0, 1)]
    [0, 0]
    >>> tokens.report_step(server=0, step=1)
    >>> token = tokens.take(0)
    >>> int(token.index), int(token.value)
    (2, 1)
    >>> tokens.state().describe()
    'no worker waits for a token'

    Args:
        repeats: how many tokens have the same value, at least 1.
        gate: when a worker may take a token. "none": at once. "step": when the next token's
            value is not above the smallest step that all servers have reported; tokens whose
            value is below that step are skipped. "clock": when the worker's clock, the number
            of tokens that it has taken, is at most `clock_bound` ahead of the slowest live
            worker's.
        workers: how many workers take tokens, at least 1.
        servers: how many servers report their steps, at least 1; 1 by default.
        clock_bound: of the gate "clock", at least 0; 0 by default.
        device: the name of the device that keeps the list; by default that of the surrounding
            `tf.device` scope, or this process.

    Attributes:
        handle: the list's handle, a resource scalar. It does not keep the list alive.

    Raises:
        tf.errors.InvalidArgumentError: if an argument is not allowed.
    """

    def __init__(
        self,
        *,
        repeats: int,
        gate: tokens.Gate,
        workers: int,
        servers: int = 1,
        clock_bound: int = 0,
        device: str | None = None,
    ):
        self._repeats, self._gate, self._clock_bound = repeats, gate, clock_bound
        # tf.device(None) would undo the surrounding scope.
        scope = contextlib.nullcontext() if device is None else tf.device(device)
        with tf.init_scope(), scope:
            self.handle = tokens.token_list(
                f"recsync_token_list_{uuid.uuid4().hex}",
                repeats=repeats,
                gate=gate,
                workers=workers,
                servers=servers,
                clock_bound=clock_bound,
            )
        self._deleter = ResourceDeleter(self.handle, self.handle.device)

    def take(self, worker: int | tf.Tensor) -> tokens.Token:
        """Takes the next token when the gate opens for a worker; waits until then.

        Args:
            worker: an int64 scalar, from 0 to workers - 1.

        Raises:
            tf.errors.CancelledError: if the call is cancelled, the worker is lost or leaves, or
                the list is deleted meanwhile.
            tf.errors.NotFoundError: if the list was deleted before.
        """
        return tokens.take_token(self.handle, worker)

    def lose(self, worker: int | tf.Tensor) -> tokens.Loss:
        """Takes a worker that is gone out of the list.

        Its waiting takes are cancelled, and nobody waits for its clock any more. With the gate
        "step", all tokens that it took and whose value is not below the smallest step are
        withheld, until `reissue` names them. With the other gates the last token that it took is
        lost.

        Args:
            worker: an int64 scalar, from 0 to workers - 1. Of one that is gone already the result
                is the same again, until its tokens are reissued or it is back.
        """
        return tokens.lose_worker(self.handle, worker)

    def reissue(self, indices: Sequence[int] | tf.Tensor) -> tf.Tensor:
        """Has tokens of lost workers be the next to be handed out.

        Args:
            indices: int64 [n], their places in the list. No server has them: it would leave the
                second push out. Those that are not withheld have no effect.

        Returns:
            How many they were, an int64 scalar.
        """
        return tokens.reissue_tokens(self.handle, indices)

    def leave(self, worker: int | tf.Tensor) -> tf.Operation | None:
        """Takes a worker that has come to the end of its data out of the list.

        Args:
            worker: an int64 scalar, from 0 to workers - 1. All its pushes have arrived.
        """
        return tokens.leave_tokens(self.handle, worker)

    def report_step(self, server: int | tf.Tensor, step: int | tf.Tensor) -> tf.Operation | None:
        """Tells the list how many applications a server has finished.

        Args:
            server: an int64 scalar, from 0 to servers - 1.
            step: an int64 scalar of at least 0; ignored unless it is above earlier ones.
        """
        return tokens.report_step(self.handle, server, step)

    def seek(self, step: int | tf.Tensor) -> tf.Operation | None:
        """Goes on as a new list in which all servers have reached a step.

        The next token is the first one of value `step`; all workers are live, with clock 0,
        and hold nothing. Only the counts stay.

        Args:
            step: an int64 scalar of at least 0.

        Raises:
            tf.errors.FailedPreconditionError: if a worker waits for a token.
        """
        return tokens.seek_tokens(self.handle, step)

    def state(self) -> TokenListState:
        """Where the list stands, and who waits; only in eager code."""
        raw = fetch(tokens.token_list_state(self.handle))
        values = tokens.RawState(*(array.tolist() for array in raw))
        held: dict[int, tuple[int, ...]] = {}
        for worker, index in values.held:
            held[worker] = (*held.get(worker, ()), index)
        taken, reissued, lost, skipped = values.counts
        return TokenListState(
            repeats=self._repeats,
            gate=self._gate,
            clock_bound=self._clock_bound,
            position=values.position,
            steps=tuple(values.steps),
            clocks=tuple(values.clocks),
            live=tuple(values.live),
            held=held,
            reissues=tuple(values.reissues),
            withheld=tuple(values.withheld),
            waiting=tuple(zip(values.waiting_workers, values.waiting_seconds, strict=True)),
            taken=taken,
            reissued=reissued,
            lost=lost,
            skipped=skipped,
        )


@dataclasses.dataclass(frozen=True)
class TokenListState:
    """Where a token list stands.

    Attributes:
        repeats: as the list was made.
        gate: as the list was made.
        clock_bound: as the list was made.
        position: the first index that was never handed out.
        steps: the step that each server has reported.
        clocks: the clock of each worker.
        live: of each worker, False if it was lost or has left.
        held: by worker, the indices of the tokens that it holds, ascending; only workers that
            hold one. With the gate "step" a worker holds all tokens that it took and whose
            value is not below the smallest step, else the last one, unless it waits for the
            next.
        reissues: indices that will be handed out next, ascending.
        withheld: indices of lost workers' tokens that nobody gets before `reissue`, ascending.
        waiting: (worker, seconds that it has waited), in the order they came.
        taken: how many tokens were handed out, the reissued ones each time.
        reissued: how many went back to the front after a worker was lost.
        lost: how many were gone with a worker.
        skipped: how many were useless and never handed out (again).
    """

    repeats: int
    gate: tokens.Gate
    clock_bound: int
    position: int
    steps: tuple[int, ...]
    clocks: tuple[int, ...]
    live: tuple[bool, ...]
    held: dict[int, tuple[int, ...]]
    reissues: tuple[int, ...]
    withheld: tuple[int, ...]
    waiting: tuple[tuple[int, float], ...]
    taken: int
    reissued: int
    lost: int
    skipped: int

    def describe(self) -> str:
        """Who waits for whom, in words, for an error message."""
        if not self.waiting:
            return "no worker waits for a token"
        if self.gate == "clock":
            return "; ".join(self._describe_clock(*waiting) for waiting in self.waiting)
        return self._describe_step()

    def _describe_clock(self, worker: int, seconds: float) -> str:
        slowest = min(c for c, live in zip(self.clocks, self.live, strict=True) if live)
        others = [
            f"worker {other}"
            for other, (clock, live) in enumerate(zip(self.clocks, self.live, strict=True))
            if live and clock == slowest
        ]
        return (
            f"worker {worker} (clock {self.clocks[worker]}) has waited {seconds:.1f} s for "
            f"{_listed(others)} (clock {slowest}), clock_bound={self.clock_bound}"
        )

    def _describe_step(self) -> str:
        index = self.reissues[0] if self.reissues else self.position
        step = index // self.repeats
        waiting = [f"worker {worker} ({seconds:.1f} s)" for worker, seconds in self.waiting]
        servers = [f"server {s} (at step {at})" for s, at in enumerate(self.steps) if at < step]
        busy = []
        for worker, live in enumerate(self.live):
            if live and worker not in dict(self.waiting):
                held = [f"token {index}" for index in self.held.get(worker, ())]
                busy.append(f"worker {worker} (has {_listed(held) or 'no token'})")
        at_work = f"at work: {_listed(busy)}" if busy else "no worker is at work"
        verb = "wait" if len(waiting) > 1 else "waits"
        lost = [f"token {index}" for index in self.withheld]
        withheld = f"; {_listed(lost)} of lost workers not handed on yet" if lost else ""
        return (
            f"{_listed(waiting)} {verb} for step {step} (token {index}) on {_listed(servers)}; "
            f"of step {min(self.steps)}, {at_work}{withheld}"
        )


def _listed(words: list[str]) -> str:
    """The words with commas, and an "and" before the last one."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"
