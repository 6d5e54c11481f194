"""How the steps of a pass are divided into calls, in virtual time."""

import heapq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_recsync.strategies.leases import Leases, call_seconds


class Workers:
    """Threads that take steps and do them.

    Args:
        leases: the steps.
        seconds: of a step, by thread: a number, or a function of the time.
        overhead: seconds of each call, besides.
    """

    def __init__(self, leases: Leases, seconds, overhead: float = 0.002):
        self.leases = leases
        self.taken: list[list[int]] = [[] for _ in seconds]
        self.done = [0] * len(seconds)
        self.now = 0.0
        self._seconds = seconds
        self._overhead = overhead

    def do(self, steps: float, end: float = float("inf")) -> float:
        """Does so many steps, of data with so many; returns when each thread was done."""
        self.leases.grant(steps)
        began, left = self.now, end
        idle, busy = list(range(len(self._seconds))), []
        while idle or busy:
            for thread in list(idle):
                taken = self.leases.take(thread)
                if taken:
                    idle.remove(thread)
                    self.taken[thread].append(taken)
                    seconds = self._seconds[thread]
                    each = seconds(self.now) if callable(seconds) else seconds
                    # A call ends at its limit, after one step at least.
                    fit = max(1, int(2 * self.leases.seconds / each)) if each else taken
                    done = min(taken, fit)
                    until = self.now + self._overhead + done * each
                    heapq.heappush(busy, (until, thread, taken, done, self.now))
            if not busy:
                break
            self.now, thread, taken, done, called = heapq.heappop(busy)
            has_ended, done = done > left, int(min(done, left))
            left -= done
            self.done[thread] += done
            self.leases.adapt(thread, taken, done, self.now - called)
            self.leases.give_back(taken, done)
            if not has_ended:
                idle.append(thread)
        return self.now - began


def is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def test_calls_grow_until_they_last_a_quarter_of_a_second_and_shrink_towards_the_end():
    workers = Workers(Leases(1, None, threads=2), [0.001, 0.001])
    workers.do(3000)
    assert workers.leases.completed == sum(workers.done) == 3000
    for taken in workers.taken:
        assert taken[:7] == [1, 4, 8, 16, 32, 64, 128]
        assert 2 not in taken  # To repeat so few costs more than a call.
        assert max(taken) == 128 and all(map(is_power_of_two, taken))
        assert taken[-1] == 1


def test_calls_of_long_steps_have_one_step_each():
    workers = Workers(Leases(1, None, threads=2), [0.3, 2.0])
    workers.do(20)
    assert set(workers.taken[0] + workers.taken[1]) == {1}


def test_calls_of_many_threads_last_longer():
    workers = Workers(Leases(1, None, threads=100), [0.1] * 100)
    workers.do(100_000)
    assert call_seconds(100) == 2.0
    assert max(workers.taken[0]) == 16


def test_a_call_has_whole_multiples_of_the_steps_that_keras_counts_at_once():
    workers = Workers(Leases(5, None, threads=2), [0.001, 0.001])
    workers.do(1003)
    everything = workers.taken[0] + workers.taken[1]
    assert sum(everything) == 1003
    assert [n for n in everything if n % 5] == [3]
    assert all(is_power_of_two(n // 5) for n in everything if n != 3)


def test_calls_may_have_a_largest_number_of_steps():
    workers = Workers(Leases(4, 4, threads=1), [0.001])
    workers.do(400)
    assert set(workers.taken[0]) == {4}


def test_one_slow_call_does_not_make_the_next_ones_short_for_good():
    # As by a machine that stands still for a moment: a step takes a second.
    workers = Workers(Leases(1, None, threads=1), [lambda t: 1.0 if 1 < t < 1.2 else 0.001])
    workers.do(2000)
    assert 1 in workers.taken[0][8:]
    assert workers.taken[0].count(128) > 5


def test_steps_that_nobody_may_begin_are_begun_later():
    leases = Leases(1, None, threads=1)
    leases.grant(10)
    leases.is_held = True
    assert leases.take(0) == 0 and leases.is_settled and not leases.is_done
    leases.is_held = False
    assert leases.take(0) == 1 and not leases.is_settled
    leases.give_back(1)
    assert leases.completed == 0 and leases.is_settled and not leases.is_done


def test_data_of_unknown_length_are_done_to_their_end():
    workers = Workers(Leases(1, None, threads=3), [0.001, 0.002, 0.05])
    workers.do(float("inf"), end=5000)
    assert workers.leases.completed == sum(workers.done) == 5000
    assert workers.leases.is_settled and not workers.leases.is_done


@settings(max_examples=300, deadline=None)
@given(
    seconds=st.lists(st.sampled_from([0.0005, 0.003, 0.02, 0.1, 0.7]), min_size=1, max_size=9),
    steps=st.lists(st.integers(1, 4000), min_size=1, max_size=3),
    unit=st.sampled_from([1, 3, 8]),
)
def test_each_step_is_done_once_and_nobody_waits_long_for_the_last_worker(seconds, steps, unit):
    leases = Leases(unit, None, threads=len(seconds))
    workers = Workers(leases, seconds)
    for number, epoch in enumerate(steps, 1):
        before = list(map(len, workers.taken))
        took = workers.do(epoch)
        assert leases.is_done and leases.completed == sum(steps[:number]) == sum(workers.done)
        calls = sum(map(len, workers.taken)) - sum(before)
        ideal = epoch / sum(1 / each for each in seconds)
        # What calls cost, and then one call, or a unit, of the slowest.
        slack = 0.002 * calls + 2 * leases.seconds + unit * max(seconds)
        assert took <= ideal + slack


@pytest.mark.parametrize("threads,seconds", [(1, 0.25), (12, 0.25), (64, 1.28)])
def test_how_long_a_call_lasts(threads, seconds):
    assert call_seconds(threads) == pytest.approx(seconds)


def test_calls_of_short_steps_that_can_be_told_to_end_have_all_steps_there_are():
    leases = Leases(1, None, threads=2, can_end=True)
    leases.grant(float("inf"))
    assert leases.take(0) == 1
    leases.adapt(0, 1, 1, 0.01)
    leases.give_back(1, 1)
    taken = leases.take(0)
    assert taken > 1e9 and not leases.are_taken
    leases.seen(0, 100, 100, 1.0)
    assert leases.share(0) == 16  # Of 25, a power of two.
    # It was told to end, or the data have ended.
    leases.adapt(0, taken, 500, 5.0)
    leases.give_back(taken, 500)
    assert leases.completed == 501 and leases.is_settled
    # A step may take longer than others wait.
    leases.adapt(0, 1, 1, 2.0)
    assert leases.take(0) == 1


def test_of_a_known_number_of_steps_one_thread_takes_half_of_an_equal_share():
    leases = Leases(1, None, threads=2, can_end=True)
    leases.grant(1000)
    for thread in range(2):
        assert leases.take(thread) == 1
        leases.adapt(thread, 1, 1, 0.001)
        leases.give_back(1, 1)
    assert leases.take(0) == 128
    leases.give_back(128, 28)  # It was told to end, and others get the rest.
    rest = []
    while taken := leases.take(1):
        rest.append(taken)
    assert leases.are_taken and sum(rest) == 970 and rest == sorted(rest, reverse=True)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_steps_that_are_known_are_those_of_ended_calls_and_those_seen_in_others(data):
    threads = data.draw(st.integers(1, 4))
    leases = Leases(1, None, threads, can_end=True)
    leases.grant(100)
    ended, seen = 0, [0] * threads
    for thread in data.draw(st.lists(st.integers(0, threads - 1), max_size=30)):
        taken = leases.take(thread)
        # A worker that is lost may have done fewer than were seen; later others turn out to be.
        for more in data.draw(st.lists(st.integers(0, 5), max_size=3)):
            seen[thread] += more
            leases.seen(thread, more, seen[thread], 0.1)
            assert leases.known == ended + sum(seen)
        if data.draw(st.booleans()):
            done = data.draw(st.integers(0, taken))
            leases.give_back(taken, done, seen[thread])
            found = data.draw(st.integers(-done, 2))
            leases.count(found)
            ended, seen[thread] = ended + done + found, 0
        assert leases.known == ended + sum(seen) and leases.completed == ended
    other = Leases(1, None, threads)
    other.go_on(leases, 3)
    assert other.known == other.completed == ended + 3
