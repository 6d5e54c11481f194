"""What the coordinator reads of workers, and makes there: variables and logs, in a call each."""

import numpy as np
import pytest
import tensorflow as tf

from tf_recsync import ops
from tf_recsync.cluster import CHIEF, processor_of
from tf_recsync.strategies.worker_state import WorkerState
from tf_recsync.synchronization.remote_values import (
    PackedReader,
    assign_variables,
    make_variables,
    on_worker,
)

WORKERS = 3
DEVICE = CHIEF  # Of the state whose answers are late: there, calls are fast.
VALUES = [
    np.array([[1, 2, 3]], np.int64),
    np.array(0.5, np.float32),
    np.array([True, False, True]),
    np.array([[0.25], [8.0]], np.float64),
    np.zeros([0, 4], np.float32),
    np.array([1.5, -2.0, 3.0], tf.bfloat16.as_numpy_dtype),
]


@pytest.fixture
def cluster(clusters):
    cluster = clusters.get(workers=WORKERS, ps=1)
    cluster.connect()
    return cluster


def made_on(job: str, index: int) -> list[tf.Variable]:
    """Variables with the values, plus the server's number where that can be added."""
    with tf.device(processor_of(job, index)):
        return [tf.Variable(on_worker(of_server(value, index))) for value in VALUES]


def of_server(value: np.ndarray, index: int) -> np.ndarray:
    return value if value.dtype == bool else (value + index).astype(value.dtype)


def handles(variables) -> list[tf.Tensor]:
    return [variable.handle for variable in variables]


def assert_of(values, index: int) -> None:
    for value, expected in zip(values, VALUES, strict=True):
        expected = of_server(expected, index)
        assert value.dtype == expected.dtype and value.flags.writeable
        np.testing.assert_array_equal(value, expected)


def test_variables_of_any_types_are_read_as_they_are(cluster):
    servers = [("worker", 0), ("worker", 2), ("ps", 0)]
    reader = PackedReader(made_on(*servers[0]))
    for job, index in servers:
        assert_of(reader(handles(made_on(job, index))), index)
    assert reader([]) == []


def test_variables_of_any_types_are_made_and_assigned_in_one_call(cluster):
    device = processor_of("worker", 1)
    with tf.device(device):
        (constant, *made), _ = make_variables([np.array(5), *VALUES], constants=1)
        reader = PackedReader([tf.Variable(on_worker(value)) for value in VALUES])
    assert constant.numpy() == 5
    assert_of(reader(made), 0)
    with tf.device(device):
        assign_variables(made, [of_server(value, 3) for value in VALUES])
        assign_variables([], [])
    assert_of(reader(made), 3)


def test_a_worker_that_is_lost_is_an_error_and_one_that_is_back_is_read_again(cluster):
    variables = made_on("worker", 1)
    reader = PackedReader(variables)
    reader(handles(variables))
    cluster.kill("worker", 1)
    with pytest.raises(tf.errors.OpError):
        reader(handles(variables))
    cluster.restart("worker", 1)
    cluster.readmit(timeout=200.0)
    assert_of(reader(handles(made_on("worker", 1))), 1)


def test_what_is_not_of_numbers_can_not_be_read_as_bytes():
    number, text = tf.Variable([1.0]), tf.Variable(["a"])
    packed = ops.read_packed([number.handle], [np.array([2]), np.array([[3, 4]])])
    assert packed.shape == [8 + 3 * 8]
    with pytest.raises(tf.errors.InvalidArgumentError, match="numbers, not of string"):
        ops.read_packed([number.handle, text.handle], [])
    with pytest.raises(tf.errors.OpError):
        ops.read_packed([ops.worker_log()], [])


class Worker:
    """A worker's state with a log, and what is noted of the batches that it does."""

    def __init__(self):
        self.state = WorkerState(0, None, None, [np.zeros([], np.float32)], log=True)
        self._reader = PackedReader([tf.Variable(np.zeros(2, np.int64)), tf.Variable(0.0)], True)
        self.noted: list[int] = []
        self._steps = 0

    def do(self, *batches: int) -> None:
        """Trains on batches; what its metric accumulates is how many these are."""
        _, _, counts, _, log, metric = self.state.inputs
        for batch in batches:
            ops.note_batch(log, np.int64(batch))
            self._steps += 1
            tf.raw_ops.AssignVariableOp(resource=counts, value=np.array([self._steps, 7]))
            tf.raw_ops.AssignVariableOp(resource=metric, value=np.float32(self._steps))

    def answer(self):
        """What it answers now."""
        return self._reader.read(self.state.asked(1, DEVICE))

    def take(self, answer, is_report=False) -> float | None:
        """What is merged of an answer; None if nothing is."""
        merged = []
        self.state.take(
            answer, lambda numbers: self.noted.extend(numbers.tolist()), merged.append, is_report
        )
        return float(merged[0][0]) if merged else None


@pytest.fixture
def worker(cluster):
    with tf.device(DEVICE):
        yield Worker()


def test_each_batch_is_noted_once_whichever_answer_comes_first(worker):
    worker.do(4, 9)
    early = worker.answer()
    worker.do(2)
    late = worker.answer()
    assert worker.take(late) == 3 and worker.take(early) == 3
    assert worker.noted == [4, 9, 2]
    worker.do(5)
    assert worker.take(worker.answer()) == 4
    assert worker.noted == [4, 9, 2, 5]
    assert worker.state.waited == 7


def test_a_report_of_before_metrics_were_reset_is_not_merged(worker):
    worker.do(4, 9)
    early = worker.answer()
    worker.state.reset_metrics = True
    assert worker.take(early, is_report=True) is None
    worker.state.steps = 2
    worker.state.reset([np.float32(0.0)])
    assert worker.take(early, is_report=True) is None
    assert not worker.state.is_known
    worker.do(2)
    assert worker.take(worker.answer(), is_report=True) == 3
    # Of two that come in the wrong order, the later counts.
    assert worker.take(early, is_report=True) == 3
    worker.state.steps = 3
    assert worker.state.is_known
    assert worker.noted == [4, 9, 2]


def test_a_worker_forgets_batches_that_are_known_and_late_answers_do_no_harm(worker):
    rng = np.random.default_rng(5)
    done, waiting, sizes = 0, [], []
    for _ in range(200):
        more = int(rng.integers(0, 40))
        worker.do(*range(done, done + more))
        done += more
        waiting.append(worker.answer())
        sizes.append(len(waiting[-1].numbers))
        if rng.random() < 0.2:  # An answer is lost.
            waiting.pop(int(rng.integers(len(waiting))))
        while len(waiting) > 3:
            worker.take(waiting.pop(int(rng.integers(len(waiting)))))
    worker.take(worker.answer())
    assert worker.noted == list(range(done))
    assert done > 3000 and max(sizes) < 1200


def test_nothing_counts_of_a_worker_that_was_given_up(worker):
    worker.do(1)
    answer = worker.answer()
    worker.state.settle()
    assert worker.take(answer) is None and worker.noted == []
