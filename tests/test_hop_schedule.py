"""The ideal schedule that benchmarks/hop.py compares with, against schedules made by hand."""

import importlib.util
import pathlib

import numpy as np
import pytest

from tf_recsync import topology

PATH = pathlib.Path(__file__).resolve().parent.parent / "benchmarks" / "hop_schedule.py"
NEVER = np.nan  # An iteration that was skipped.


@pytest.fixture(scope="module")
def hop_schedule():
    spec = importlib.util.spec_from_file_location("hop_schedule", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Two workers that send to each other. A step takes the first 1 s, the second 3 s or, where
# iterations are skipped, 5 s. When each enters its iterations:
CASES = {
    # After its first iteration the fast one waits for each of the other's.
    "standard": (5, {}, 3, [0, 1, 3, 6, 9, 12], [0, 3, 6, 9, 12, 15]),
    "without tokens": (None, {}, 3, [0, 1, 3, 6, 9, 12], [0, 3, 6, 9, 12, 15]),
    # The fast one needs nobody, and may enter 3 when the other is in 1.
    "backup": (2, {"backup_workers": 1}, 3, [0, 1, 2, 3, 6, 9], [0, 3, 6, 9, 12, 15]),
    # With an update of the iteration before it goes on: after 2 it needs that of 1.
    "staleness": (5, {"staleness_bound": 1}, 3, [0, 1, 2, 3, 6, 9], [0, 3, 6, 9, 12, 15]),
    # Tokens are the tighter bound.
    "both": (
        *(2, {"staleness_bound": 4, "backup_workers": 1}, 3),
        *([0, 1, 2, 3, 6, 9], [0, 3, 6, 9, 12, 15]),
    ),
    # It sends nothing before the other has used what it sent.
    "notify-ack": (None, {"notify_ack": True}, 3, [0, 3, 6, 9, 12, 15], [0, 3, 6, 9, 12, 15]),
    # After 5 s the slow one is 4 behind: it goes 3 forward, the most that it may, and the fast
    # one, which waits in 4, may go on to 7. At 10 s again.
    "skip": (
        *(4, {"backup_workers": 1, "max_jump": 3}, 5),
        *([0, 1, 2, 3, 4, 5, 6, 7, 10], [0, NEVER, NEVER, 5, NEVER, NEVER, 10, NEVER, NEVER]),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_ideal_schedule_is_the_one_made_by_hand(hop_schedule, name):
    gap, options, slow, *expected = CASES[name]
    graph = topology.from_edges(2, [(0, 1), (1, 0)])
    schedule = hop_schedule.Schedule(
        graph, gap, lambda worker, step: float(slow if worker else 1), **options
    )
    np.testing.assert_array_equal(schedule.run(len(expected[0])), expected)


def test_a_worker_of_varying_speed_holds_up_its_neighbors_only(hop_schedule):
    # A ring of four of 1 s a step; the first step of worker 0 takes 4 s.
    schedule = hop_schedule.Schedule(
        topology.ring(4), 5, lambda worker, step: 4.0 if (worker, step) == (0, 0) else 1.0
    )
    times = schedule.run(4)
    # Its neighbors wait for its iteration 1, and worker 2 for theirs of 2.
    assert times.tolist() == [[0, 4, 5, 6], [0, 1, 4, 5], [0, 1, 2, 4], [0, 1, 4, 5]]


def test_the_mean_iteration_is_that_of_the_second_half(hop_schedule):
    times = np.array([[0, 1, 3, 6, 9, 12], [0, NEVER, NEVER, 5, NEVER, 11]])
    assert hop_schedule.iteration_seconds(times) == 3.0
    # One with too few entries there is measured over all that it has.
    times = np.array([[0, 1, 3, 6, 9, 12], [0, NEVER, 8, NEVER, NEVER, 10]])
    assert hop_schedule.iteration_seconds(times) == (3.0 + 2.0) / 2
