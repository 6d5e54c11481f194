"""Servers, token list and a linear model in numpy, and the package's pieces for the same steps."""

from __future__ import annotations

import contextlib
import dataclasses
import threading

import keras
import numpy as np
import tensorflow as tf

from tf_recsync import staleness
from tf_recsync.ops.bags import Bags, PackedBags
from tf_recsync.optimizers import SGD
from tf_recsync.synchronization.aggregation import Aggregation
from tf_recsync.synchronization.arrangement import Group
from tf_recsync.synchronization.group_variables import GroupVariables
from tf_recsync.synchronization.modes import Mode

RATE = 0.1
WORKERS = 3
TOLERANCE = 1
SIZE = 3  # Of each server's dense variable.
ROWS_OF_TABLE, WIDTH, LOOKUPS = 6, 2, 3  # Of each server's table; rows that an example names.

# As the strategies make them for three workers; `test_mode_inputs` holds them to it.
ROWS = {
    "async": Mode("async"),
    "BSP": Mode("BSP", repeats=4, capacity=4, uses_buffers=True),
    "GBA": Mode(
        "GBA", repeats=3, capacity=3, weight=staleness.Threshold(TOLERANCE), uses_buffers=True
    ),
    "GBA, decayed": Mode(
        "GBA",
        repeats=2,
        capacity=2,
        weight=staleness.InversePower(k=2, baseline=TOLERANCE + 1),
        uses_buffers=True,
    ),
    "sync": Mode("sync", repeats=3, capacity=3, gate="step", drop_late=True, uses_buffers=True),
    "sync, two batches": Mode(
        "sync", repeats=2, capacity=2, gate="step", drop_late=True, uses_buffers=True
    ),
    "backup workers": Mode(
        "backup-worker", repeats=3, capacity=2, gate="step", drop_late=True, uses_buffers=True
    ),
    "bounded staleness": Mode("bounded-staleness", gate="clock", clock_bound=1),
}


@dataclasses.dataclass
class Gradient:
    """Of one server's parameters.

    Attributes:
        dense: `[SIZE]`.
        ids: the rows that were looked up, in which a row may be named again.
        rows: `[ids, WIDTH]`.
    """

    dense: np.ndarray
    ids: np.ndarray
    rows: np.ndarray

    def dense_rows(self) -> np.ndarray:
        """The gradient of the whole table."""
        total = np.zeros((ROWS_OF_TABLE, WIDTH))
        np.add.at(total, self.ids, self.rows)
        return total


class Batch:
    """Examples for a linear model whose parameters are spread over servers.

    It predicts the sum over all servers of inputs @ weights and of the looked-up rows @
    `direction`; the loss is half the mean squared error.
    """

    direction = np.array([1.0, -0.5])

    def __init__(self, rng, servers: int, examples: int = 1):
        self.inputs = rng.normal(size=(servers, examples, SIZE))
        self.ids = rng.integers(0, ROWS_OF_TABLE, (servers, examples, LOOKUPS))
        self.labels = rng.normal(size=examples)

    @staticmethod
    def together(batches: list[Batch]) -> Batch:
        """Some batches as one."""
        whole = Batch.__new__(Batch)
        whole.inputs = np.concatenate([b.inputs for b in batches], axis=1)
        whole.ids = np.concatenate([b.ids for b in batches], axis=1)
        whole.labels = np.concatenate([b.labels for b in batches])
        return whole

    def gradients(self, weights: list, tables: list) -> list[Gradient]:
        """That of the mean loss, for each server."""
        errors = -self.labels
        for x, w, ids, table in zip(self.inputs, weights, self.ids, tables, strict=True):
            errors = errors + x @ w + (table[ids] @ self.direction).sum(axis=1)
        errors = errors / len(errors)
        each = np.repeat(errors, LOOKUPS)[:, None] * self.direction
        return [
            Gradient(errors @ x, ids.ravel(), each)
            for x, ids in zip(self.inputs, self.ids, strict=True)
        ]


@dataclasses.dataclass
class Work:
    """What a worker has in its hands.

    Attributes:
        index, value: its token.
        pulled: for each server the step, the version of the dense variable, and those of
            all rows.
        gradients: for each server.
        ticket: its token's.
    """

    index: int
    value: int
    pulled: list[tuple[int, int, np.ndarray]]
    gradients: list[Gradient]
    ticket: int = 0


class SimulatedServer:
    """One server: its parameters and what it counts."""

    def __init__(self, mode: Mode):
        self.mode = mode
        self.weights, self.table = np.zeros(SIZE), np.zeros((ROWS_OF_TABLE, WIDTH))
        self.step = self.version = 0
        self.row_versions = np.zeros(ROWS_OF_TABLE, int)
        self.pending: list[tuple[np.ndarray, np.ndarray]] = []
        self.included = self.decayed = self.excluded = self.late = 0
        self.ages: list[int] = []
        self.stalenesses: list[int] = []
        self.row_stalenesses: list[int] = []

    def pull(self) -> tuple[int, int, np.ndarray]:
        return self.step, self.version, self.row_versions.copy()

    def weight(self, age: int) -> float:
        if isinstance(self.mode.weight, staleness.Threshold):
            return float(age <= TOLERANCE)
        if isinstance(self.mode.weight, staleness.InversePower):
            return min(1.0, ((TOLERANCE + 1) / (age + 1)) ** 2)
        return 1.0

    def push(self, value: int, pulled: tuple, gradient: Gradient) -> None:
        step, version, row_versions = pulled
        if not self.mode.uses_buffers:
            tau = self.version - version + 1
            self.stalenesses.append(tau)
            self.weights -= RATE / tau * gradient.dense  # SGD's own policy weighs by 1 / tau.
            self.version += 1
            total = gradient.dense_rows()
            for row in np.unique(gradient.ids):
                tau = int(self.row_versions[row] - row_versions[row]) + 1
                self.row_stalenesses.append(tau)
                self.table[row] -= RATE / tau * total[row]
                self.row_versions[row] += 1
            return
        if self.mode.drop_late and value < self.step:
            self.late += 1
            return
        age = max(self.step - value, 0)
        weight = self.weight(age)
        self.included += weight > 0
        self.decayed += 0 < weight < 1
        self.excluded += weight == 0
        self.ages.append(age)
        self.stalenesses.append(self.step - step + 1)
        self.pending.append((weight * gradient.dense, weight * gradient.dense_rows()))
        if len(self.pending) == self.mode.capacity:
            self.weights -= RATE * sum(dense for dense, _ in self.pending) / self.mode.capacity
            self.table -= RATE * sum(rows for _, rows in self.pending) / self.mode.capacity
            self.pending = []
            self.step += 1
            self.version += 1


class Simulation:
    """Servers and token list, in numpy."""

    def __init__(self, mode: Mode, servers: int):
        self.mode = mode
        self.servers = [SimulatedServer(mode) for _ in range(servers)]
        self.next_index = 0
        self.clocks = [0] * WORKERS
        self.waiting: list[int] = []

    def _is_open(self, worker: int) -> bool:
        if self.mode.gate == "step":
            return self.next_index // self.mode.repeats <= self._reached
        if self.mode.gate == "clock":
            return self.clocks[worker] - min(self.clocks) <= self.mode.clock_bound
        return True

    @property
    def _reached(self) -> int:
        """The step that is reached on every server."""
        return min(server.step for server in self.servers)

    def ask(self, worker: int) -> list[tuple[int, int, int]]:
        """A worker asks for a token; who gets one now, as (worker, index, value)."""
        self.waiting.append(worker)
        return self._serve()

    def _serve(self) -> list[tuple[int, int, int]]:
        if self.mode.gate == "step":  # Tokens of steps that are over are of no use.
            self.next_index = max(self.next_index, self._reached * self.mode.repeats)
        served = []
        while True:
            ready = [worker for worker in self.waiting if self._is_open(worker)]
            if not ready:
                return served
            worker = ready[0]
            self.waiting.remove(worker)
            self.clocks[worker] += 1
            served.append((worker, self.next_index, self.next_index // self.mode.repeats))
            self.next_index += 1

    def pull(self, index: int, value: int, batch: Batch) -> Work:
        weights = [server.weights for server in self.servers]
        gradients = batch.gradients(weights, [server.table for server in self.servers])
        return Work(index, value, [server.pull() for server in self.servers], gradients)

    def push(self, work: Work, server: int) -> list[tuple[int, int, int]]:
        """A push arrives at a server; who gets a token because of it."""
        self.servers[server].push(work.value, work.pulled[server], work.gradients[server])
        return self._serve()

    def all_of(self, name: str) -> list:
        """What all servers have noted."""
        return [note for server in self.servers for note in getattr(server, name)]


class Pieces:
    """The same interface on the package's pieces: token list, buffers, optimizers.

    What would be a server's is an optimizer's here, all in this process: each has a dense
    variable and a table, and a buffer of its own.
    """

    def __init__(self, mode: Mode, servers: int = 1, make=None):
        make = make or (lambda: SGD(RATE, staleness=staleness.InversePower(k=1, baseline=1)))
        self.mode = mode
        self.variables, self.tables, self.optimizers = [], [], []
        for number in range(servers):
            layer = keras.layers.Layer(name=f"server_{number}")
            self.variables.append(layer.add_weight((SIZE,), "zeros", name="weights"))
            shape = (ROWS_OF_TABLE, WIDTH)
            self.tables.append(layer.add_weight(shape, "zeros", name="embeddings"))
            self.optimizers.append(make())
            self.optimizers[-1].build([self.variables[-1], self.tables[-1]])
        self.states = [optimizer.states for optimizer in self.optimizers]
        self.device = self.variables[0]._value.device
        self.aggregation = None
        if mode.uses_tokens:  # As the strategies do.
            group = GroupVariables(Group(0, tuple(range(WORKERS)), servers=(0,)))
            self.aggregation = Aggregation(
                mode, {o: o.states for o in self.optimizers}, group, self.device
            )
            self.aggregation.ensure(copies=self)
            self.aggregation.begin()
        self.asked: dict[int, tuple[threading.Thread, list]] = {}

    def ask(self, worker: int) -> None:
        found: list = []
        if self.aggregation is None:
            return

        def take():
            with contextlib.suppress(tf.errors.CancelledError):  # Released at the end.
                start = self.aggregation.start(tf.constant(worker, tf.int64), [self.device])
                found.append(start[self.device])

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        # So that they come in this order.
        while thread.is_alive() and not self.is_waiting(worker):
            thread.join(0.001)
        self.asked[worker] = thread, found

    def is_waiting(self, worker: int) -> bool:
        return worker in dict(self.aggregation._tokens.state().waiting)

    def taken(self, worker: int):
        """The token that a worker has got."""
        thread, found = self.asked.pop(worker)
        thread.join(60)
        assert found, f"worker {worker} waits for a token that it should have"
        return found[0]

    def pull(self, worker: int, batch: Batch) -> Work:
        index = value = ticket = -1
        if self.aggregation is not None:
            index, value, ticket = map(int, self.taken(worker))
        weights = [variable.numpy() for variable in self.variables]
        gradients = batch.gradients(weights, [table.numpy() for table in self.tables])
        pulled = []
        for number, (dense, rows) in enumerate(self.states):
            buffer = self.buffer(number)
            step = int(buffer.step().applied) if buffer else 0
            pulled.append((step, int(dense.versions.numpy()), rows.versions.numpy()))
        return Work(index, value, pulled, gradients, ticket)

    def buffer(self, server: int):
        """That of one of the servers, if the mode has any."""
        if self.aggregation is None:
            return None
        return self.aggregation.buffer(self.device, self.optimizers[server])

    def push(self, work: Work, server: int = 0):
        """What the server gives out, None if it has no buffer; applied already."""
        aggregate = self.collect(work, server)
        if aggregate is not None:
            buffer = self.buffer(server)
            applied = buffer.apply(aggregate, tf.constant(RATE))
            self.aggregation.report_step(buffer, applied)

    def collect(self, work: Work, server: int = 0):
        """Pushes; what a buffer gives out has yet to be applied."""
        gradient, (step, version, row_versions) = work.gradients[server], work.pulled[server]
        dense, table = self.states[server]
        flat = tf.constant(gradient.dense, tf.float32)
        versions = tf.constant([version], tf.int64)
        values = tf.constant(gradient.rows.ravel(), tf.float32)
        rows = PackedBags.pack([Bags(tf.constant(gradient.ids, tf.int64))])
        of_rows = tf.constant(row_versions[gradient.ids], tf.int64)
        if not self.mode.uses_buffers:
            optimizer, rate = self.optimizers[server], tf.constant(RATE)
            number = dense.versions._value + 1
            optimizer.apply_dense([dense], flat, versions, rate, number)
            optimizer.apply_rows([table], values, rows, of_rows, rate, number)
            return None
        return self.buffer(server).push(
            *(work.index, work.value, step, flat, versions, [table], values, rows, of_rows),
            ticket=work.ticket,
        )

    def check_parameters(self, weights: list, tables: list) -> None:
        for mine, theirs in zip([*self.variables, *self.tables], [*weights, *tables], strict=True):
            np.testing.assert_allclose(mine.numpy(), theirs, 1e-4, 1e-5)
