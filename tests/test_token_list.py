"""The token list's ops and its Python class, against simulations and over real servers."""

import gc
import random
import re
import threading
import time

import pytest
import tensorflow as tf
from helpers import check_cancelled_before
from tensorflow.python.eager import cancellation

from tf_recsync.ops import tokens as ops
from tf_recsync.synchronization.token_list import TokenList, TokenListState

HANDLE = tf.TensorSpec([], tf.resource)


class Call(threading.Thread):
    """A call in a thread of its own; keeps what it returned or raised."""

    def __init__(self, function, *args):
        super().__init__(daemon=True)
        self._function, self._args = function, args
        self.result = self.error = None
        self.start()

    def run(self):
        try:
            self.result = self._function(*self._args)
        except Exception as error:
            self.error = error

    def index(self) -> int:
        """The index of the token that it took."""
        self.join(30)
        assert not self.is_alive()
        assert self.error is None, self.error
        return int(self.result.index)


def waiting_take(tokens: TokenList, worker: int, call=None) -> Call:
    """A take that waits already."""
    before = len(tokens.state().waiting)
    waiting = Call(call or tokens.take, worker)
    deadline = time.monotonic() + 30
    while len(tokens.state().waiting) == before:
        assert waiting.is_alive() and time.monotonic() < deadline, waiting.error
        time.sleep(0.005)
    return waiting


class Simulation:
    """The rules, for takes that need not wait."""

    def __init__(self, repeats, gate, workers, servers, clock_bound):
        self.repeats, self.gate, self.bound = repeats, gate, clock_bound
        self.workers, self.servers = range(workers), servers
        self.seek(0)

    def seek(self, step):
        self.steps = [step] * self.servers
        self.free = list(range(step * self.repeats, step * self.repeats + 2000))
        self.held = {w: [] for w in self.workers}
        self.lost = {w: 0 for w in self.workers}  # And not back.
        self.clocks = {w: 0 for w in self.workers}
        self.live = set(self.workers)

    def useful(self, index):
        return self.gate != "step" or index // self.repeats >= min(self.steps)

    def slowest(self, worker):
        """The slowest live clock, as it would be with this worker's take."""
        live = self.live or {worker}
        return min(self.clocks[w] for w in live)

    def take(self, worker):
        """The index, or None if the worker would have to wait."""
        index = next(i for i in self.free if self.useful(i))
        clock = self.clocks[worker] if worker in self.live else self.slowest(worker)
        if self.gate == "step" and index // self.repeats > min(self.steps):
            return None
        if self.gate == "clock" and clock - self.slowest(worker) > self.bound:
            return None
        self.free.remove(index)
        self.live.add(worker)
        self.lost[worker] = 0
        self.clocks[worker] = clock + 1
        kept = self.held[worker] if self.gate == "step" else []
        self.held[worker] = [*kept, index]
        return index

    def lose(self, worker):
        """How many are gone, and how many are to be handed out again."""
        held, gone = [i for i in self.held[worker] if self.useful(i)], self.lost[worker]
        self.leave(worker)
        if self.gate != "step":
            self.lost[worker] = gone + len(held)
            return self.lost[worker], 0
        self.free = sorted(self.free + held)
        return 0, len(held)

    def leave(self, worker):
        self.held[worker] = []
        self.lost[worker] = 0
        self.live.discard(worker)

    def report_step(self, server, step):
        self.steps[server] = max(step, self.steps[server])

    def check(self, state: TokenListState):
        assert list(state.steps) == self.steps
        assert state.clocks == tuple(self.clocks.values())
        assert state.live == tuple(w in self.live for w in self.workers)
        held = {w: tuple(filter(self.useful, sorted(self.held[w]))) for w in self.workers}
        assert state.held == {w: indices for w, indices in held.items() if indices}
        first = next(i for i in self.free if self.useful(i))
        assert min([*state.reissues, state.position]) == first


@pytest.mark.parametrize("in_function", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("gate", ["none", "step", "clock"])
def test_random_calls_follow_the_simulation(gate, in_function):
    options = {"repeats": 3, "gate": gate, "workers": 3, "servers": 2}
    options["clock_bound"] = 2 if gate == "clock" else 0
    tokens, simulation = TokenList(**options), Simulation(**options)
    int64 = tf.TensorSpec([], tf.int64)

    def op(function, *specs):
        def traced(*arguments):
            result = function(*arguments)
            return None if isinstance(result, tf.Operation) else result

        return tf.function(traced, input_signature=specs) if in_function else function

    take, lose = op(tokens.take, int64), op(tokens.lose, int64)
    leave, seek = op(tokens.leave, int64), op(tokens.seek, int64)
    reissue = op(tokens.reissue, tf.TensorSpec([None], tf.int64))
    report_step = op(tokens.report_step, int64, int64)
    choose = random.Random(gate)
    taken = lost = reissued = 0
    for _ in range(600):
        worker, event = choose.randrange(3), choose.randrange(100)
        if event < 60:
            expected = simulation.take(worker)
            if expected is None:
                continue
            token = take(worker)
            assert (int(token.index), int(token.value)) == (expected, expected // 3)
            taken += 1
        elif event < 68:
            known = simulation.lost[worker]
            loss = lose(worker)
            withheld = loss.withheld.numpy().tolist()
            assert (int(loss.lost), len(withheld)) == simulation.lose(worker)
            assert int(reissue(loss.withheld)) == len(withheld)
            lost, reissued = lost + int(loss.lost) - known, reissued + len(withheld)
        elif event < 72:
            leave(worker)
            simulation.leave(worker)
        elif event < 98:
            server = choose.randrange(2)
            step = max(0, simulation.steps[server] + choose.randrange(-1, 3))
            report_step(server, step)
            simulation.report_step(server, step)
        else:
            step = choose.randrange(10)
            seek(step)
            simulation.seek(step)
        state = tokens.state()
        simulation.check(state)
        assert (state.taken, state.lost, state.reissued) == (taken, lost, reissued)
    assert taken > 100
    assert (lost, reissued) > (0, 0)


def test_threads_that_take_several_tokens_per_call_get_each_once():
    workers, servers, repeats, calls = 4, 2, 4, 25
    tokens = TokenList(repeats=repeats, gate="step", workers=workers, servers=servers)
    pushes = [tf.Variable(0, dtype=tf.int64) for _ in range(servers)]

    @tf.function
    def work(worker):
        taken = []
        for _ in range(3):
            taken.append(tokens.take(worker))
            for server in range(servers):
                # A server applies whenever all tokens of its step have arrived.
                with tf.control_dependencies([taken[-1].value]):
                    count = pushes[server].assign_add(1, read_value=False)
                with tf.control_dependencies([count]):
                    tokens.report_step(server, pushes[server].read_value() // repeats)
        return tf.stack([t.index for t in taken]), tf.stack([t.value for t in taken])

    def run(worker):
        results = [work(tf.constant(worker, tf.int64)) for _ in range(calls)]
        tokens.leave(worker)
        return [tf.concat(parts, 0).numpy().tolist() for parts in zip(*results, strict=True)]

    threads = [Call(run, worker) for worker in range(workers)]
    everything = []
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), tokens.state().describe()
        indices, values = thread.result
        assert indices == sorted(indices)
        assert values == [index // repeats for index in indices]
        everything += indices
    assert sorted(everything) == list(range(workers * calls * 3))
    assert set(tokens.state().steps) == {workers * calls * 3 // repeats}


@pytest.mark.parametrize("bound", [0, 2])
def test_no_thread_gets_farther_ahead_than_the_clock_bound(bound):
    workers, takes = 4, 60
    tokens = TokenList(repeats=1, gate="clock", clock_bound=bound, workers=workers)
    started = [0] * workers  # At least the clock that the list has.

    @tf.function
    def take(worker):
        return tokens.take(worker)

    def run(worker):
        ahead = []
        for clock in range(takes):
            started[worker] += 1
            take(tf.constant(worker, tf.int64))
            ahead.append(clock - min(started))
        return ahead

    threads = [Call(run, worker) for worker in range(workers)]
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), tokens.state().describe()
        assert max(thread.result) <= bound
    assert tokens.state().clocks == (takes,) * workers


def test_waiting_takes_are_served_in_the_order_they_came():
    tokens = TokenList(repeats=1, gate="step", workers=4)
    tokens.take(0)
    threads = [waiting_take(tokens, worker) for worker in (2, 1, 3)]
    assert [worker for worker, _ in tokens.state().waiting] == [2, 1, 3]
    for i, thread in enumerate(threads, 1):
        tokens.report_step(0, i)
        assert thread.index() == i


def test_a_cancelled_take_gets_nothing():
    tokens = TokenList(repeats=1, gate="step", workers=3)
    tokens.take(0)

    @tf.function(input_signature=[tf.TensorSpec([], tf.int64)])
    def take(worker):
        return tokens.take(worker)

    manager = cancellation.CancellationManager()
    cancelable = manager.get_cancelable_function(take.get_concrete_function())
    first = waiting_take(tokens, 1, lambda worker: cancelable(tf.constant(worker, tf.int64)))
    second = waiting_take(tokens, 2)
    manager.start_cancel()
    first.join(30)
    assert isinstance(first.error, tf.errors.CancelledError)
    assert [worker for worker, _ in tokens.state().waiting] == [2]
    tokens.report_step(0, 1)
    assert second.index() == 1
    with pytest.raises(tf.errors.CancelledError):
        cancelable(tf.constant(1, tf.int64))
    assert tokens.state().waiting == ()


def test_a_take_whose_step_is_cancelled_before_it_gets_nothing():
    tokens = TokenList(repeats=1, gate="step", workers=2)
    tokens.take(0)
    check_cancelled_before(lambda: tokens.take(1).index)
    assert tokens.state().waiting == ()
    tokens.report_step(0, 1)
    assert int(tokens.take(0).index) == 1  # Nobody else has got it.


@pytest.mark.parametrize("gate", ["none", "step", "clock"])
def test_whoever_got_no_answer_asks_again_for_what_went_with_a_worker(gate):
    bound = {"clock_bound": 4} if gate == "clock" else {}
    tokens = TokenList(repeats=4, gate=gate, workers=2, **bound)
    tokens.take(1)
    taken = [int(tokens.take(0).ticket) for _ in range(2)]
    tokens.lose(0)  # The answer does not arrive.
    loss = tokens.lose(0)
    if gate == "step":
        assert loss.tickets.numpy().tolist() == taken
        assert int(tokens.reissue(loss.withheld)) == 2
    else:
        assert (loss.tickets.numpy().tolist(), int(loss.lost)) == (taken[1:], 1)
    tokens.take(0)
    assert not set(tokens.lose(0).tickets.numpy()) & set(taken)


@pytest.mark.parametrize("method", ["lose", "leave"])
def test_a_waiting_worker_that_is_gone_is_answered(method):
    tokens = TokenList(repeats=2, gate="step", workers=2)
    tokens.take(0)
    tokens.take(1)
    waiting = waiting_take(tokens, 1)
    loss = getattr(tokens, method)(1)
    if method == "lose":
        assert (tokens.state().reissues, tokens.state().withheld) == ((), (1,))
        # Its own token is put back, but not for its own, waiting take.
        assert int(tokens.reissue(loss.withheld)) == 1
        assert (tokens.state().reissues, tokens.state().withheld) == ((1,), ())
    waiting.join(30)
    assert isinstance(waiting.error, tf.errors.CancelledError)
    assert "worker 1 was lost or left" in str(waiting.error)
    assert tokens.state().live == (True, False)


def test_seeking_while_a_worker_waits_is_refused():
    tokens = TokenList(repeats=1, gate="step", workers=2)
    tokens.take(0)
    waiting = waiting_take(tokens, 1)
    with pytest.raises(tf.errors.FailedPreconditionError, match="step 5 while workers wait"):
        tokens.seek(5)
    tokens.lose(1)
    waiting.join(30)
    tokens.seek(5)
    assert (tokens.state().position, tokens.state().live) == (5, (True, True))


def test_deleting_a_list_ends_takes_and_later_ones_do_not_find_it():
    tokens = TokenList(repeats=1, gate="step", workers=2)
    tokens.take(0)
    handle = tokens.handle
    waiting = waiting_take(tokens, 1, lambda worker: ops.take_token(handle, worker))
    del tokens
    gc.collect()
    waiting.join(30)
    assert isinstance(waiting.error, tf.errors.CancelledError)
    assert "token list was destroyed" in str(waiting.error)
    with pytest.raises(tf.errors.NotFoundError):
        ops.take_token(handle, 0)


def test_lists_of_one_name_are_the_same_and_must_have_the_same_options():
    options = {"repeats": 2, "gate": "clock", "workers": 2, "servers": 1, "clock_bound": 3}
    first = ops.token_list("shared", **options)
    again = ops.token_list("shared", **options)
    assert int(ops.take_token(first, 0).index) == 0
    assert int(ops.take_token(again, 0).index) == 1
    for name, value in (("repeats", 3), ("workers", 1), ("servers", 2), ("clock_bound", 4)):
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"shared .*{name}={value}"):
            ops.token_list("shared", **{**options, name: value})
    with pytest.raises(tf.errors.InvalidArgumentError, match="shared .*not .*gate=none"):
        ops.token_list("shared", **{**options, "gate": "none", "clock_bound": 0})
    tf.raw_ops.DestroyResourceOp(resource=first)
    # The name is free again.
    assert int(ops.take_token(ops.token_list("shared", **options), 0).index) == 0


def state(**changes) -> TokenListState:
    values = {
        "repeats": 4,
        "gate": "step",
        "clock_bound": 0,
        "position": 12,
        "steps": (2, 3),
        "clocks": (3, 3, 4),
        "live": (True, True, True),
        "held": {0: (8, 11), 2: (9,)},
        "reissues": (),
        "withheld": (),
        "waiting": ((1, 12.34),),
        "taken": 12,
        "reissued": 0,
        "lost": 0,
        "skipped": 0,
    }
    return TokenListState(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"waiting": ()}, "no worker waits for a token"),
        (
            {},
            "worker 1 (12.3 s) waits for step 3 (token 12) on server 0 (at step 2); of step 2, "
            "at work: worker 0 (has token 8 and token 11) and worker 2 (has token 9)",
        ),
        (
            {"live": (False, True, True), "waiting": ((1, 2.0), (2, 1.0)), "steps": (2, 2)},
            "worker 1 (2.0 s) and worker 2 (1.0 s) wait for step 3 (token 12) on server 0 (at "
            "step 2) and server 1 (at step 2); of step 2, no worker is at work",
        ),
        (
            {"held": {2: (9,)}, "live": (False, True, True), "withheld": (8, 11)},
            "worker 1 (12.3 s) waits for step 3 (token 12) on server 0 (at step 2); of step 2, "
            "at work: worker 2 (has token 9); token 8 and token 11 of lost workers not handed on "
            "yet",
        ),
        (
            {"gate": "clock", "clock_bound": 1, "clocks": (3, 5, 3), "live": (True,) * 3},
            "worker 1 (clock 5) has waited 12.3 s for worker 0 and worker 2 (clock 3), "
            "clock_bound=1",
        ),
    ],
)
def test_a_state_says_who_waits_for_whom(changes, words):
    assert state(**changes).describe() == words


# Over real servers.

PS = "/job:ps/replica:0/task:0/device:CPU:0"


@pytest.fixture
def cluster(clusters):
    return clusters.get(workers=2, ps=1)


def on_worker(cluster, function):
    """The same, called in a thread on a worker with the list's handle and its number."""

    def call(handle, worker):
        with cluster.dispatch_scope(), tf.device(f"/job:worker/task:{worker}"):
            return function(handle, tf.constant(worker, tf.int64))

    return call


@tf.function(input_signature=[HANDLE, tf.TensorSpec([], tf.int64)])
def take_two(handle, worker):
    first = ops.take_token(handle, worker)
    return tf.identity(first.index), ops.take_token(handle, worker)


@tf.function(input_signature=[HANDLE, tf.TensorSpec([], tf.int64)])
def report_one(handle, worker):
    ops.report_step(handle, 0, 1)
    return worker


def test_takes_wait_on_the_server_until_another_worker_reports(cluster):
    tokens = TokenList(repeats=1, gate="step", workers=2, device=PS)
    assert tokens.handle.device == PS
    take = on_worker(cluster, take_two)
    waiting = waiting_take(tokens, 0, lambda worker: take(tokens.handle, worker)[1])
    state = tokens.state()
    assert state.held == {0: (0,)}
    assert re.fullmatch(
        r"worker 0 \(\d+\.\d s\) waits for step 1 \(token 1\) on server 0 \(at step 0\); "
        r"of step 0, at work: worker 1 \(has no token\)",
        state.describe(),
    )
    on_worker(cluster, report_one)(tokens.handle, 1)
    assert waiting.index() == 1


def test_a_take_on_the_server_ends_when_its_worker_is_given_up(cluster):
    tokens = TokenList(repeats=1, gate="step", workers=2, device=PS)
    take = on_worker(cluster, take_two)
    waiting = waiting_take(tokens, 0, lambda worker: take(tokens.handle, worker))
    loss = tokens.lose(0)
    assert (int(loss.lost), loss.withheld.numpy().tolist()) == (0, [0])
    tokens.reissue(loss.withheld)
    waiting.join(30)
    assert isinstance(waiting.error, tf.errors.CancelledError)
    assert int(tokens.take(1).index) == 0


def test_a_take_on_the_server_ends_when_the_list_is_deleted(cluster):
    with tf.device(PS):
        tokens = TokenList(repeats=1, gate="step", workers=2)
    assert tokens.handle.device == PS
    handle = tokens.handle
    take = on_worker(cluster, take_two)
    waiting = waiting_take(tokens, 1, lambda worker: take(handle, worker))
    del tokens
    gc.collect()
    waiting.join(30)
    assert isinstance(waiting.error, tf.errors.CancelledError)
    with pytest.raises(tf.errors.NotFoundError):
        ops.take_token(handle, 0)


def test_a_killed_worker_is_lost_and_its_token_goes_to_the_other(cluster):
    tokens = TokenList(repeats=2, gate="step", workers=2, device=PS)
    take = on_worker(cluster, take_two)
    tokens.take(1)
    # Token 1 is worker 0's, and it waits for token 2.
    waiting = waiting_take(tokens, 0, lambda worker: take(tokens.handle, worker))
    cluster.kill("worker", 0)
    waiting.join(30)
    assert isinstance(waiting.error, tf.errors.OpError)
    assert int(tokens.reissue(tokens.lose(0).withheld)) == 1
    assert tokens.state().waiting == ()
    assert int(tokens.take(1).index) == 1


def test_deleting_a_list_is_quiet_when_its_server_is_gone(clusters, cluster, monkeypatch):
    raised = []
    monkeypatch.setattr("sys.unraisablehook", raised.append)
    lists = [TokenList(repeats=1, gate="none", workers=1, device=PS) for _ in range(2)]
    cluster.kill("ps", 0)
    lists.pop()
    gc.collect()
    clusters.close()
    lists.pop()
    gc.collect()
    assert raised == []
