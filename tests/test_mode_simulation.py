"""Each row of the table of modes against a simulation in numpy of the same interleaving."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from simulated_modes import (
    RATE,
    ROWS,
    ROWS_OF_TABLE,
    SIZE,
    WIDTH,
    WORKERS,
    Batch,
    Gradient,
    Pieces,
    Simulation,
    Work,
)

from tf_recsync import staleness
from tf_recsync.optimizers import SGD, Adagrad
from tf_recsync.synchronization.gradient_buffer import GradientBuffer
from tf_recsync.synchronization.modes import Mode

# No strategy makes it: buffers of one push, whose weight is that of BSP.
ROWS_AND_MORE = {**ROWS, "a buffer of one": Mode("BSP", uses_buffers=True)}


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("row", ROWS_AND_MORE)
def test_a_mode_does_what_its_row_says(row, servers):
    mode = ROWS_AND_MORE[row]
    rng = np.random.default_rng(servers)
    simulation, pieces = Simulation(mode, servers), Pieces(mode, servers)
    # One worker is slow: it is chosen less often.
    speeds = np.array([0.45, 0.45, 0.1])
    # A worker's work, twice, and the servers that it has yet to push to.
    working: dict[int, tuple[Work, Work, list[int]]] = {}
    most_ahead = 0

    def start(served):
        for worker, index, value in served:
            batch = Batch(rng, servers)
            mine, theirs = simulation.pull(index, value, batch), pieces.pull(worker, batch)
            if mode.uses_tokens:
                assert (theirs.index, theirs.value) == (index, value)
            for one, other in zip(mine.pulled, theirs.pulled, strict=True):
                assert one[:2] == other[:2]
                if not mode.uses_buffers:
                    np.testing.assert_array_equal(one[2], other[2])
            working[worker] = mine, theirs, rng.permutation(servers).tolist()

    for _ in range(120 * servers):
        worker = int(rng.choice(WORKERS, p=speeds))
        if worker in simulation.waiting:
            assert pieces.is_waiting(worker)
            continue
        if worker in working:
            mine, theirs, places = working[worker]
            place = places.pop()
            if not places:
                del working[worker]
            pieces.push(theirs, place)
            start(simulation.push(mine, place))
        else:
            pieces.ask(worker)
            start(simulation.ask(worker))
        pieces.check_parameters(
            [server.weights for server in simulation.servers],
            [server.table for server in simulation.servers],
        )
        most_ahead = max(most_ahead, max(simulation.clocks) - min(simulation.clocks))

    stalenesses = simulation.all_of("stalenesses")
    if mode.uses_tokens:
        report = pieces.aggregation.report()
        for name in ("included", "decayed", "excluded", "late"):
            assert getattr(report, name) == sum(getattr(s, name) for s in simulation.servers), name
        assert report.global_step == max(server.step for server in simulation.servers)
        pieces.aggregation.release()
    if mode.uses_buffers:
        ages = simulation.all_of("ages")
        assert report.age_max == max(ages)
        np.testing.assert_allclose(report.age_mean, np.mean(ages))
        check_statistics(report.staleness, stalenesses)
    else:
        dense, rows = (
            staleness.Statistics.from_counters([s.counters.numpy() for s in states])
            for states in zip(*pieces.states, strict=True)
        )
        check_statistics(dense, stalenesses)
        check_statistics(rows, simulation.all_of("row_stalenesses"))
    # What makes the row differ from others has happened.
    excluded, decayed, late = (
        sum(getattr(server, name) for server in simulation.servers)
        for name in ("excluded", "decayed", "late")
    )
    assert (excluded > 0) == (row == "GBA")
    assert (decayed > 0) == (row == "GBA, decayed")
    assert (late > 0) == (row == "backup workers")
    assert (max(stalenesses) > 1) == (mode.gate != "step")
    if mode.gate == "clock":
        assert most_ahead == mode.clock_bound + 1


def check_statistics(measured: staleness.Statistics, expected: list[int]) -> None:
    assert (measured.count, measured.max) == (len(expected), max(expected))
    np.testing.assert_allclose(measured.mean, np.mean(expected))


def sgd_in_numpy(parameters: list, gradients: list, slots: list) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter -= RATE * gradient


def adagrad_in_numpy(parameters: list, gradients: list, slots: list) -> None:
    if not slots:
        slots += [np.full(p.shape, 0.1) for p in parameters]  # Keras's default.
    for parameter, gradient, slot in zip(parameters, gradients, slots, strict=True):
        slot += gradient**2
        parameter -= RATE * gradient / np.sqrt(slot + 1e-7)


@pytest.mark.parametrize(
    ("make", "rule"),
    [(lambda: SGD(RATE), sgd_in_numpy), (lambda: Adagrad(RATE), adagrad_in_numpy)],
    ids=["SGD", "Adagrad"],
)
def test_gba_is_training_on_global_batches_if_every_pull_follows_the_apply_before_it(make, rule):
    servers, rng = 2, np.random.default_rng(4)
    pieces = Pieces(ROWS["GBA"], servers, make)
    weights = [np.zeros(SIZE) for _ in range(servers)]
    tables = [np.zeros((ROWS_OF_TABLE, WIDTH)) for _ in range(servers)]
    slots: list = []
    for step in range(12):
        batches = [Batch(rng, servers, examples=4) for _ in range(WORKERS)]
        works = []
        for worker, batch in enumerate(batches):
            pieces.ask(worker)
            works.append(pieces.pull(worker, batch))
        # The pushes of the three come in another order each time and on each server.
        arrivals = [(w, server) for w in range(WORKERS) for server in range(servers)]
        for worker, server in rng.permutation(arrivals).tolist():
            pieces.push(works[worker], server)
        whole = Batch.together(batches).gradients(weights, tables)
        gradients = [*(g.dense for g in whole), *(g.dense_rows() for g in whole)]
        rule([*weights, *tables], gradients, slots)
        pieces.check_parameters(weights, tables)
        assert [work.value for work in works] == [step] * WORKERS
    report = pieces.aggregation.report()
    assert (report.global_step, report.included, report.age_max) == (12, 12 * 3 * 2, 0)


def of_ones(index: int, value: int, dense=(1.0, 1.0, 1.0), ticket: int = 0) -> Work:
    """Work of gradients that are given, pulled at the beginning."""
    rows = np.zeros((0, WIDTH))
    pulled = (0, 0, np.zeros(ROWS_OF_TABLE, int))
    return Work(index, value, [pulled], [Gradient(np.array(dense), np.zeros(0, int), rows)], ticket)


def with_a_token(pieces: Pieces, worker: int) -> Work:
    """The same, with the token that a worker gets next."""
    pieces.ask(worker)
    index, value, ticket = map(int, pieces.taken(worker))
    return of_ones(index, value, ticket=ticket)


def given_out(pieces: Pieces):
    """(worker, ticket, what its buffer gave out) of the push that completes the first step."""
    for number in range(pieces.mode.capacity):
        worker = number % WORKERS
        work = with_a_token(pieces, worker)
        aggregate = pieces.collect(work)
    return worker, work.ticket, aggregate


def test_a_flush_is_a_step_of_what_is_there_and_all_go_on_from_it():
    pieces = Pieces(ROWS["sync"])
    (variable,), (optimizer,) = pieces.variables, pieces.optimizers
    for worker, gradient in enumerate(([1.0, 2.0, 0.0], [3.0, 4.0, 0.0])):
        pieces.ask(worker)
        token = pieces.taken(worker)
        assert (int(token.index), int(token.value)) == (worker, 0)
        pieces.push(of_ones(worker, 0, gradient))
    np.testing.assert_array_equal(variable.numpy(), [0.0, 0.0, 0.0])
    pieces.aggregation.flush()
    # Two of the three of a step.
    np.testing.assert_allclose(variable.numpy(), [-RATE * 4 / 3, -RATE * 6 / 3, 0.0], 1e-6)
    assert int(optimizer.iterations.numpy()) == 1
    pieces.aggregation.flush()
    assert int(optimizer.iterations.numpy()) == 1
    # The next token is the first of the next step.
    pieces.ask(0)
    token = pieces.taken(0)
    assert (int(token.index), int(token.value)) == (3, 1)


@pytest.mark.parametrize("row", ["sync", "BSP"])
def test_a_step_that_a_lost_worker_was_to_apply_does_not_stop_the_others(row):
    pieces = Pieces(ROWS[row])
    buffer = pieces.buffer(0)
    worker, _, aggregate = given_out(pieces)
    assert bool(aggregate.ready)  # And nobody applies it.
    others = [w for w in range(WORKERS) if w != worker]
    pieces.ask(others[0])
    assert pieces.is_waiting(others[0]) == (row == "sync")
    pieces.aggregation.lose(worker)
    token = pieces.taken(others[0])
    # Not the lost worker's, whose step is over on the server.
    assert int(token.value) == 1
    state = buffer.state()
    assert (state.step, state.applied) == (1, 1)
    # If it is applied after all, that is no error.
    applied = buffer.apply(aggregate, tf.constant(RATE))
    assert int(applied) == 1


def test_a_server_that_does_not_answer_is_told_the_next_time_which_steps_are_lost(monkeypatch):
    pieces = Pieces(ROWS["sync"])
    buffer = pieces.buffer(0)
    worker, ticket, aggregate = given_out(pieces)
    assert bool(aggregate.ready)  # And nobody applies it.
    revoke, asked = GradientBuffer.revoke, []

    def fail_once(self, tickets):
        asked.append(list(tickets))
        if len(asked) == 1:
            raise tf.errors.UnavailableError(None, None, "Socket closed")
        return revoke(self, tickets)

    monkeypatch.setattr(GradientBuffer, "revoke", fail_once)
    with pytest.raises(tf.errors.UnavailableError):
        pieces.aggregation.lose(worker)
    assert buffer.state().applied == 0
    pieces.aggregation.forget(worker)  # As when it is opened again: it holds nothing by now.
    assert buffer.state().applied == 1
    assert asked[0] == asked[-1] == [ticket]


def test_what_a_lost_worker_has_pushed_and_arrives_late_is_dropped_and_pushed_by_another():
    pieces = Pieces(ROWS["sync"])
    buffer, work = pieces.buffer(0), {}
    for worker in range(WORKERS):
        work[worker] = with_a_token(pieces, worker)
    lost = WORKERS - 1
    pieces.aggregation.lose(lost)
    for worker in range(WORKERS - 1):
        assert not bool(pieces.collect(work[worker]).ready)
    # It would complete the step, which nobody would apply.
    assert not bool(pieces.collect(work[lost]).ready)
    again = with_a_token(pieces, 0)
    assert (again.index, again.value) == (work[lost].index, 0)
    assert again.ticket != work[lost].ticket
    pieces.push(again)
    state = buffer.state()
    assert (state.step, state.applied, state.late, state.included) == (1, 1, 1, WORKERS)


@pytest.mark.parametrize("row", ["sync", "BSP"])
def test_a_step_that_a_living_worker_applies_slowly_is_not_taken_for_lost_with_another(row):
    pieces = Pieces(ROWS[row])
    buffer = pieces.buffer(0)
    worker, _, aggregate = given_out(pieces)
    assert bool(aggregate.ready)  # Its server is still about to apply it.
    pieces.aggregation.lose((worker + 1) % WORKERS)
    state = buffer.state()
    assert (state.step, state.applied) == (1, 0)
    pieces.ask(worker)
    if row == "sync":
        assert pieces.is_waiting(worker)  # It does not get the lost worker's, which had pushed.
    applied = buffer.apply(aggregate, tf.constant(RATE))
    pieces.aggregation.report_step(buffer, applied)
    pieces.taken(worker)
    assert buffer.state().applied == 1


def slopes_of(pieces: Pieces) -> list[float]:
    """How many gradients of 1 the weights of each server were trained on."""
    found = [np.unique(variable.numpy()) for variable in pieces.variables]
    assert all(len(values) == 1 for values in found)
    return [round(float(values[0]) / -RATE * pieces.mode.capacity, 4) for values in found]


def of_ones_on(pieces: Pieces, worker: int) -> Work:
    """Work for all servers, with the token that a worker gets next."""
    work = with_a_token(pieces, worker)
    servers = len(pieces.variables)
    return dataclasses.replace(
        work, pulled=work.pulled * servers, gradients=work.gradients * servers
    )


@pytest.mark.parametrize("is_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("arrived", [0, 1, 2])
def test_all_that_others_push_counts_wherever_a_lost_workers_push_has_arrived(arrived, is_last):
    pieces = Pieces(ROWS["sync"], 2)
    work = [of_ones_on(pieces, worker) for worker in range(WORKERS)]
    lost, others = work[2], work[:2]

    def push_others():
        for mine in others:
            for server in range(2):
                pieces.push(mine, server)

    if is_last:
        push_others()
    for server in range(arrived):
        pieces.push(lost, server)
    pieces.aggregation.lose(2)
    for server in range(2):  # What was on its way.
        pieces.collect(lost, server)
    if not is_last:
        push_others()
    again = of_ones_on(pieces, 0)
    if arrived == 0:
        assert (again.index, again.value) == (2, 0)
        for server in range(2):
            pieces.push(again, server)
        assert slopes_of(pieces) == [3, 3]
    else:
        assert (again.index, again.value) == (3, 1)
        # The other server's step lacks the lost one's, whose batch others train on again.
        assert slopes_of(pieces) == [3, 3 if arrived == 2 else 2]
    for number, optimizer in enumerate(pieces.optimizers):
        state = pieces.buffer(number).state()
        assert (state.step, state.applied) == (1, 1)
        # Workers' steps count otherwise; nobody's push completed this one.
        is_spent_last = is_last and arrived == 1 and number == 1
        assert int(optimizer.iterations.numpy()) == is_spent_last
    report = pieces.aggregation.report()
    reissued, spent = int(arrived == 0), int(arrived == 1)
    assert (report.reissued, report.spent, report.late) == (reissued, spent, 2)
    assert report.included == 6 - spent


def test_a_token_that_one_server_did_not_need_is_needed_nowhere():
    pieces = Pieces(ROWS["backup workers"], 2)
    work = [of_ones_on(pieces, worker) for worker in range(WORKERS)]
    for mine in work[:2]:
        pieces.push(mine, 0)
    pieces.push(work[0], 1)
    pieces.aggregation.lose(2)
    pieces.ask(0)
    assert pieces.is_waiting(0)  # For the second one's.
    pieces.push(work[1], 1)
    assert int(pieces.taken(0).value) == 1
    report = pieces.aggregation.report()
    assert (report.reissued, report.spent, report.late, report.included) == (0, 0, 0, 4)


def test_a_server_that_does_not_answer_keeps_a_token_from_being_handed_out(monkeypatch):
    pieces = Pieces(ROWS["sync"], 2)
    work = [of_ones_on(pieces, worker) for worker in range(WORKERS)]
    pieces.push(work[2], 0)
    revoke = GradientBuffer.revoke

    def fail(self, tickets):
        if self is pieces.buffer(0):
            raise tf.errors.UnavailableError(None, None, "Socket closed")
        return revoke(self, tickets)

    with monkeypatch.context() as failing, pytest.raises(tf.errors.UnavailableError):
        failing.setattr(GradientBuffer, "revoke", fail)
        pieces.aggregation.lose(2)
    pieces.ask(0)
    assert pieces.is_waiting(0)
    pieces.aggregation.forget(2)  # As when it is opened again.
    for mine in work[:2]:
        for server in range(2):
            pieces.push(mine, server)
    assert int(pieces.taken(0).value) == 1
    assert slopes_of(pieces) == [3, 2]
