"""Synchronization algorithms against numpy, on a scripted schedule."""

import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Gossip

import tf_recsync as recsync
from tf_recsync import ops
from tf_recsync.synchronization.shadow_algorithms import Center, Trainer
from tf_recsync.synchronization.shadow_schedule import Gate

SHAPES = ((3, 4), (5,), ())
SIZES = [12, 5, 1]
ELEMENTS = sum(SIZES)


class Machines:
    """Trainers, and a center in two parts, all in this process."""

    def __init__(self, algorithm, count, start):
        pieces = np.split(start.astype(np.float32), np.cumsum(SIZES)[:-1])
        self.variables = [
            [tf.Variable(p.reshape(s)) for p, s in zip(pieces, SHAPES, strict=True)]
            for _ in range(count)
        ]
        self.states = [
            {k: tf.Variable(v) for k, v in algorithm.states(start.astype(np.float32)).items()}
            for _ in range(count)
        ]
        self.parts = [tf.Variable(part) for part in np.split(start.astype(np.float32), [7])]
        self.traffic = [tf.Variable(np.int64(0)) for _ in self.parts]
        self.algorithm = algorithm

    def sync(self, *members):
        @tf.function(autograph=False)
        def synchronize():
            trainers = [
                Trainer(
                    "",
                    [v.handle for v in self.variables[m]],
                    SIZES,
                    {name: v.handle for name, v in self.states[m].items()},
                )
                for m in members
            ]
            center = Center(self.parts, self.traffic) if self.algorithm.is_central else None
            self.algorithm.sync(trainers, center)

        synchronize()

    def train(self, member, step):
        for variable, part in zip(
            self.variables[member], np.split(step, np.cumsum(SIZES)[:-1]), strict=True
        ):
            variable.assign_add(part.reshape(variable.shape).astype(np.float32))

    def copy(self, member):
        return np.concatenate([v.numpy().ravel() for v in self.variables[member]])


def script(count, rounds, seed=0):
    """Who trains by how much, and who synchronizes."""
    random = np.random.default_rng(seed)
    for _ in range(rounds):
        yield int(random.integers(count)), random.normal(size=ELEMENTS), int(random.integers(count))


def test_easgd_is_the_papers_asymmetric_exchange():
    alpha, start = 0.3, np.linspace(-1, 1, ELEMENTS)
    machines = Machines(recsync.EASGD(alpha), 3, start)
    w, center = np.tile(start, (3, 1)), start.copy()
    for trains, step, syncs in script(3, 20):
        machines.train(trains, step)
        w[trains] += step
        machines.sync(syncs)
        center = (1 - alpha) * center + alpha * w[syncs]
        w[syncs] = (1 - alpha) * w[syncs] + alpha * center
    for member in range(3):
        np.testing.assert_allclose(machines.copy(member), w[member], atol=1e-5)
    parts = np.concatenate([part.numpy() for part in machines.parts])
    np.testing.assert_allclose(parts, center, atol=1e-5)
    # Each of 20 synchronizations carries each element there and back, in 4 bytes.
    assert [int(t.numpy()) for t in machines.traffic] == [20 * 8 * 7, 20 * 8 * (ELEMENTS - 7)]


@pytest.mark.parametrize("count", [1, 2, 5, 23])
def test_model_averaging_moves_all_copies_towards_their_mean(count):
    alpha, start = 0.4, np.linspace(-1, 1, ELEMENTS)
    machines = Machines(recsync.ModelAveraging(alpha), count, start)
    w = np.tile(start, (count, 1))
    for trains, step, _ in script(count, 8):
        machines.train(trains, step)
        w[trains] += step
        machines.sync(*range(count))
        w = (1 - alpha) * w + alpha * w.mean(0)
    for member in range(count):
        np.testing.assert_allclose(machines.copy(member), w[member], atol=1e-5)


@pytest.mark.parametrize(
    ("momentum", "nesterov"),
    [(0.0, False), (0.6, False), (0.6, True)],
    ids=["plain", "momentum", "nesterov"],
)
def test_bmuf_steps_along_the_descent_direction(momentum, nesterov):
    alpha, eta, start = 0.5, 0.7, np.linspace(-1, 1, ELEMENTS)
    machines = Machines(recsync.BMUF(alpha, eta, momentum, nesterov), 3, start)
    w, own, update = np.tile(start, (3, 1)), start.copy(), np.zeros(ELEMENTS)
    for trains, step, _ in script(3, 12):
        machines.train(trains, step)
        w[trains] += step
        machines.sync(0, 1, 2)
        update = momentum * update + eta * (w.mean(0) - own)
        own = own + update
        w = (1 - alpha) * w + alpha * (own + momentum * update * nesterov)
    for member in range(3):
        np.testing.assert_allclose(machines.copy(member), w[member], atol=1e-5)
        np.testing.assert_allclose(machines.states[member]["global"].numpy(), own, atol=1e-5)


def test_bmuf_with_a_step_of_one_is_model_averaging():
    start = np.linspace(-1, 1, ELEMENTS)
    both = [Machines(a, 3, start) for a in (recsync.BMUF(0.3, 1.0), recsync.ModelAveraging(0.3))]
    for trains, step, _ in script(3, 10):
        for machines in both:
            machines.train(trains, step)
            machines.sync(0, 1, 2)
    for member in range(3):
        np.testing.assert_allclose(both[0].copy(member), both[1].copy(member), atol=1e-5)


def test_what_is_learned_during_a_synchronization_survives_times_one_less_alpha():
    start = np.zeros(ELEMENTS)
    learned = np.arange(ELEMENTS, dtype=np.float32)

    class Slow(recsync.Algorithm):
        def sync(self, trainers, center):
            (trainer,) = trainers
            snapshot = trainer.read()
            with tf.control_dependencies([snapshot]):
                machines.train(0, learned)  # Between snapshot and write-back.
            trainer.move(snapshot, 0.25)

    machines = Machines(Slow(), 1, start)
    machines.sync(0)
    np.testing.assert_allclose(machines.copy(0), 0.75 * learned, rtol=1e-6)


@pytest.mark.parametrize("count", [4, 5])
def test_gossip_is_one_small_class(count):
    machines = Machines(Gossip(), count, np.zeros(ELEMENTS))
    for member in range(count):
        machines.train(member, np.full(ELEMENTS, 2.0**member))
    machines.sync(*range(count))
    found = [machines.copy(member)[0] for member in range(count)]
    means = {(2.0**i + 2.0**j) / 2: {i, j} for i in range(count) for j in range(i)}
    pairs = [means[value] for value in sorted(set(found)) if value in means]
    # Everybody has met somebody else, but for one of an odd number, and has what both have.
    assert len(pairs) == count // 2
    assert len(set().union(*pairs)) == 2 * (count // 2)
    assert all(found[i] == found[j] for i, j in map(sorted, pairs))
    assert sum(found) == 2.0**count - 1


def test_an_algorithm_of_ones_own_is_one_small_class():
    """Trainers take over where they agree on the direction, element by element."""

    class Majority(recsync.Algorithm):
        def states(self, start):
            return {"before": start}

        def sync(self, trainers, center):
            values = [trainer.read() for trainer in trainers]
            signs = recsync.all_reduce_mean(
                trainers,
                [tf.sign(v - t.state("before")) for t, v in zip(trainers, values, strict=True)],
            )
            means = recsync.all_reduce_mean(trainers, values)
            for trainer, mean, sign in zip(trainers, means, signs, strict=True):
                with trainer.on():
                    target = tf.where(tf.abs(sign) == 1.0, mean, trainer.state("before"))
                    trainer.set_state("before", target)
                trainer.move(target, 1.0)

    start = np.zeros(ELEMENTS)
    machines = Machines(Majority(), 2, start)
    a, b = np.ones(ELEMENTS), np.where(np.arange(ELEMENTS) % 2, 3.0, -1.0)
    machines.train(0, a)
    machines.train(1, b)
    machines.sync(0, 1)
    expected = np.where(np.arange(ELEMENTS) % 2, 2.0, 0.0)
    for member in range(2):
        np.testing.assert_allclose(machines.copy(member), expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: recsync.EASGD(0.0), r"alpha must be in \(0, 1\], not 0.0"),
        (lambda: recsync.EASGD(1.5), r"alpha must be in \(0, 1\], not 1.5"),
        (lambda: recsync.EASGD(float("nan")), "alpha must be"),
        (lambda: recsync.ModelAveraging(-0.1), "alpha must be"),
        (lambda: recsync.ModelAveraging(True), "alpha must be"),
        (lambda: recsync.BMUF(2.0, 1.0), "alpha must be"),
        (lambda: recsync.BMUF(0.5, 0.0), "eta must be a finite number above 0, not 0.0"),
        (lambda: recsync.BMUF(0.5, "1"), "eta must be a finite number"),
        (
            lambda: recsync.BMUF(0.5, 1.0, momentum=1.0),
            "momentum must be .* below 1",
        ),
        (lambda: recsync.BMUF(0.5, 1.0, nesterov=True), "needs a momentum"),
        (lambda: recsync.BMUF(0.5, 1.0, 0.5, nesterov=1), "nesterov must be a bool"),
        (lambda: recsync.Foreground(), "either gap or per_minute"),
        (lambda: recsync.Foreground(gap=5, per_minute=1), "either gap or per_minute"),
        (lambda: recsync.Foreground(gap=0), "gap must be an integer of at least 1, got 0"),
        (lambda: recsync.Foreground(gap=2.5), "gap must be an int"),
        (lambda: recsync.Foreground(per_minute=0), "per_minute must be a positive number, not 0"),
        (lambda: recsync.Foreground(per_minute=float("inf")), "per_minute must be"),
        (lambda: recsync.Shadow(-1.0), "min_interval must be at least 0, in seconds, not -1.0"),
    ],
)
def test_arguments_out_of_range_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# The ops.


def test_a_snapshot_is_the_variables_side_by_side():
    variables = [tf.Variable(tf.random.normal(shape)) for shape in SHAPES]
    packed = ops.snapshot([v.handle for v in variables])
    expected = np.concatenate([v.numpy().ravel() for v in variables])
    np.testing.assert_array_equal(packed.numpy(), expected)


@pytest.mark.parametrize("hogwild", [True, False])
def test_interpolation_leaves_alone_what_was_read_before(hogwild):
    variable = tf.Variable(np.ones(1000, np.float32))
    before = variable.read_value()
    target = np.zeros(1000, np.float32)
    after = ops.interpolate([variable.handle], target, 0.25, hogwild=hogwild, answer=True)
    np.testing.assert_array_equal(before.numpy(), 1.0)
    np.testing.assert_allclose(variable.numpy(), 0.75)
    np.testing.assert_array_equal(after.numpy(), variable.numpy())


@pytest.mark.parametrize("hogwild", [True, False])
def test_interpolation_moves_variables_of_any_sizes_each_to_its_part(hogwild):
    random = np.random.default_rng(0)
    before = [random.normal(size=n).astype(np.float32) for n in (1, 7, 0, 3001, 2, 100_003)]
    variables = [tf.Variable(value) for value in before]
    target = random.normal(size=sum(map(len, before))).astype(np.float32)
    handles = [variable.handle for variable in variables]
    after = ops.interpolate(handles, target, 0.25, hogwild=hogwild, answer=True)
    expected = 0.75 * np.concatenate(before) + 0.25 * target
    np.testing.assert_allclose(after.numpy(), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(np.concatenate([v.numpy() for v in variables]), after.numpy())


def test_hogwilds_updates_meet_at_a_variable_without_elements():
    empty, large = tf.Variable(tf.zeros([0, 8])), tf.Variable(tf.zeros([2_000_000]))
    handles = [empty.handle, large.handle]
    target = tf.ones([2_000_000])
    errors = []

    def move():
        try:
            for _ in range(20):
                ops.interpolate(handles, target, 0.25, hogwild=True, answer=False)
        except tf.errors.OpError as error:
            errors.append(error)

    threads = [threading.Thread(target=move) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    # Updates at once may lose what others did, but the last one is there.
    assert (large.numpy() >= 0.25).all()
    assert empty.numpy().shape == (0, 8)


@pytest.mark.parametrize("hogwild", [True, False])
def test_an_interpolation_of_one_variable_twice_is_an_error(hogwild):
    variable = tf.Variable(np.ones(4, np.float32))
    with pytest.raises(tf.errors.InvalidArgumentError, match="the same variable is passed twice"):
        ops.interpolate(
            [variable.handle] * 2, np.zeros(8, np.float32), 0.5, hogwild=hogwild, answer=False
        )


@pytest.mark.parametrize(
    ("dtype", "size", "alpha", "message"),
    [
        ("float32", 3, 0.5, "target must hold the variables' 4 elements, not 3"),
        ("float32", 4, 1.5, r"alpha must be in \[0, 1\], not 1.5"),
        ("float32", 4, float("nan"), r"alpha must be in \[0, 1\]"),
        ("float64", 4, 0.5, "variables must be a variable of float, not double"),
    ],
)
def test_wrong_inputs_of_an_interpolation_are_errors(dtype, size, alpha, message):
    variable = tf.Variable(np.ones(4, dtype))
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        ops.interpolate(
            [variable.handle], np.zeros(size, np.float32), alpha, hogwild=True, answer=False
        )
    np.testing.assert_array_equal(variable.numpy(), 1.0)


@pytest.mark.parametrize("rule", ["SGD", "Adagrad", "Adam", "Ftrl"])
def test_hogwilds_updates_of_one_thread_are_the_plain_ones(rule):
    gradient = np.random.default_rng(0).normal(size=700).astype(np.float32)
    results = []
    for hogwild in (False, True):
        optimizer = getattr(recsync.optimizers, rule)(0.1)
        variable = keras.Variable(np.linspace(-1, 1, 700, dtype=np.float32))
        optimizer.build([variable])
        (state,) = optimizer.states
        for step in (1, 2, 3):
            versions = tf.constant([step - 1], tf.int64)
            optimizer.apply_dense(
                [state], gradient, versions, 0.1, tf.constant(step, tf.int64), hogwild=hogwild
            )
        results.append(variable.numpy())
        assert int(state.versions.numpy()) == 3
    np.testing.assert_array_equal(results[0], results[1])


def test_a_gate_lets_all_go_on_together_and_says_who_is_late():
    gate, log = Gate(), []
    gate.begin()
    for thread in range(3):
        gate.enter(thread)
        gate.exit(thread)
    threads = [
        threading.Thread(target=gate.meet, args=(t, lambda: log.append("synchronized")))
        for t in range(2)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 30
    while gate.awaited() != [2] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert gate.awaited() == [2]
    assert log == []
    gate.leave(2)  # Nobody waits for it any more.
    for thread in threads:
        thread.join(30)
    assert log == ["synchronized"]
    assert gate.awaited() == []


def test_a_closed_gate_waits_for_those_inside_and_keeps_others_out():
    gate, log = Gate(), []
    gate.begin()
    gate.enter(0)
    closing = threading.Thread(target=gate.close_for, args=(lambda: log.append("closed"),))
    closing.start()

    def enter():
        gate.enter(1)
        log.append("entered")

    deadline = time.monotonic() + 30
    while not gate._is_closed and time.monotonic() < deadline:
        time.sleep(0.01)
    other = threading.Thread(target=enter)
    other.start()
    other.join(0.2)
    assert log == []
    gate.exit(0)
    closing.join(30)
    other.join(30)
    assert log == ["closed", "entered"]
