"""Slowdowns of the artificial compute time: their factors, and what they do to workers."""

import itertools
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import compiled, mean_output, slope_model, steps_of

import tf_recsync as recsync
from tf_recsync.optimizers import SGD
from tf_recsync.testing import ChangingSlowdown, RandomSlowdown, SlowWorkers


def factors(slowdown, workers=1, steps=1, seconds=(0.0,)) -> np.ndarray:
    """[workers, steps, len(seconds)], computed in one graph, as on workers."""

    def factor(one):
        result = slowdown.factor(*one)
        assert result.dtype == tf.float32 and result.shape == []
        return result

    @tf.function(
        input_signature=[tf.TensorSpec([None], d) for d in (tf.int64, tf.int64, tf.float64)],
        autograph=False,
    )
    def all_factors(*columns):
        return tf.map_fn(factor, columns, fn_output_signature=tf.float32)

    asked = zip(*itertools.product(range(workers), range(steps), seconds), strict=True)
    values = all_factors(*(np.array(c, d) for c, d in zip(asked, "qqd", strict=True)))
    return values.numpy().reshape(workers, steps, len(seconds))


# The factors.


def test_the_workers_named_are_slow_and_no_others():
    found = factors(SlowWorkers(4.0, range(3, 8, 4)), workers=9, steps=2)
    assert found[:, 0, 0].tolist() == [1, 1, 1, 4, 1, 1, 1, 4, 1]
    assert np.array_equal(found[:, 1], found[:, 0])
    assert factors(SlowWorkers(4.0, []), workers=2).ravel().tolist() == [1, 1]


def test_random_factors_depend_on_seed_worker_and_step_alone():
    slowdown = RandomSlowdown(3.0, probability=0.25, seed=11)
    found = factors(slowdown, workers=8, steps=250)[:, :, 0]
    assert set(np.unique(found)) == {1.0, 3.0}
    # 2000 draws: four standard deviations of the share are 0.039.
    assert (found == 3.0).mean() == pytest.approx(0.25, abs=0.039)
    # Of no worker alone either (250 draws, 0.11), and none follows another.
    assert np.abs((found == 3.0).mean(1) - 0.25).max() < 0.11
    correlations = np.corrcoef(found)[np.triu_indices(8, 1)]
    assert np.abs(correlations).max() < 4 / np.sqrt(250)
    same = factors(slowdown, workers=8, steps=20, seconds=(0.0, 1.0, 1e9))
    assert np.array_equal(same, np.repeat(found[:, :20, None], 3, axis=2))
    other = factors(RandomSlowdown(3.0, probability=0.25, seed=12), workers=2, steps=250)
    assert abs(np.corrcoef(other[0, :, 0], found[0])[0, 1]) < 4 / np.sqrt(250)


@pytest.mark.parametrize(("probability", "expected"), [(0, 1.0), (1, 7.0)])
def test_probabilities_at_the_ends_are_certain(probability, expected):
    found = factors(RandomSlowdown(7.0, probability), workers=2, steps=20)
    assert np.array_equal(found, np.full_like(found, expected))


def interpolated(points, time):
    """The factor at one time, in plain Python."""
    before = [p for p in points if p[0] <= time]
    after = [p for p in points if p[0] > time]
    if not before or not after:
        return before[-1][1] if before else after[0][1]
    (x0, y0), (x1, y1) = before[-1], after[0]
    return y0 + (y1 - y0) * (time - x0) / (x1 - x0)


def test_a_changing_slowdown_follows_its_points():
    points = [(2, 1.0), (4, 3.0), (4, 5.0), (10, 2.0)]
    times = (0.0, 1.99, 2.0, 3.0, 3.999, 4.0, 5.0, 7.3, 10.0, 1e6)
    found = factors(ChangingSlowdown(points), workers=2, seconds=times)
    expected = [interpolated(points, t) for t in times]
    np.testing.assert_allclose(found[0, 0], expected, rtol=1e-6)
    np.testing.assert_allclose(found[1, 0], expected, rtol=1e-6)
    assert found[0, 0, 5] == 5.0  # The jump.
    periodic = factors(ChangingSlowdown(points, period=12), seconds=[t + 36 for t in times[:-1]])
    np.testing.assert_allclose(periodic[0, 0], expected[:-1], rtol=1e-5)
    in_steps = factors(ChangingSlowdown(points, unit="steps"), steps=12, seconds=(99.0,))
    np.testing.assert_allclose(
        in_steps[0, :, 0], [interpolated(points, s) for s in range(12)], rtol=1e-6
    )
    assert factors(ChangingSlowdown([(5, 2.5)]), seconds=(0.0, 9.0)).ravel().tolist() == [2.5, 2.5]


def test_products_multiply_the_factors():
    parts = [
        SlowWorkers(2.0, [1]),
        RandomSlowdown(3.0, 0.5),
        ChangingSlowdown([(0, 1), (8, 2)], "steps"),
    ]
    product = parts[0] * parts[1] * parts[2]
    one, two, three = (factors(part, workers=2, steps=10) for part in parts)
    np.testing.assert_allclose(factors(product, workers=2, steps=10), one * two * three, rtol=1e-6)
    with pytest.raises(TypeError):
        parts[0] * 2.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SlowWorkers(-1.0, [0]), "a factor must be .* not -1.0"),
        (lambda: SlowWorkers(float("inf"), [0]), "a factor must be a finite .* not inf"),
        (
            lambda: SlowWorkers(2.0, [-1]),
            "each of workers must be .*, got -1",
        ),
        (lambda: SlowWorkers(2.0, [0.5]), r"workers=.*: must have integers, not 0.5"),
        (lambda: RandomSlowdown("2", 0.5), "a factor must be .* not '2'"),
        (lambda: RandomSlowdown(2.0, 1.5), "probability must be .* from 0 to 1, not 1.5"),
        (lambda: RandomSlowdown(2.0, float("nan")), "probability must be .* from 0 to 1, not nan"),
        (lambda: RandomSlowdown(2.0, 0.5, seed=0.5), "seed must be an integer .* got 0.5"),
        (
            lambda: RandomSlowdown(2.0, 0.5, seed=2**63),
            "seed must be an integer from -92",
        ),
        (lambda: SlowWorkers(2.0, 1), r"workers=1: must be a sequence of integers, .* as \(1,\)"),
        (lambda: ChangingSlowdown([]), "points must be at least one"),
        (lambda: ChangingSlowdown([(1, 1), (0, 2)]), "points must be .* in the order of time"),
        (lambda: ChangingSlowdown([(0, -1)]), "a factor must be .* not -1.0"),
        (lambda: ChangingSlowdown([(0, 1, 2)]), "points must be pairs"),
        (lambda: ChangingSlowdown(3), "points must be pairs .* got 3"),
        (lambda: ChangingSlowdown([(0, 1)], "hours"), "unit must be .* got 'hours'"),
        (lambda: ChangingSlowdown([(0, 1)], period=0), "period must be .* above 0, not 0"),
    ],
)
def test_wrong_slowdowns_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_slow_workers_may_be_numbers_of_numpy():
    slow = SlowWorkers(np.float32(2), np.array([1, 3]))
    assert slow.workers == (1, 3) and all(type(worker) is int for worker in slow.workers)


# On workers.


@pytest.fixture
def four(clusters):
    return clusters.strategy(workers=4, ps=2)


def test_wrong_compute_times_are_refused(four):
    slow = SlowWorkers(2.0, [0])
    for arguments, message in (
        ((-0.1,), "seconds must be at least 0 or None, not -0.1"),
        ((float("nan"),), "seconds must be at least 0 or None, not nan"),
        ((0.1, 4.0), "slowdown must be a Slowdown or None, not 4.0"),
        ((None, slow), "slowdown multiplies seconds"),
        ((0.1, SlowWorkers(2.0, [0, 4])), "a slowdown has worker 4, and there are 4: workers must"),
        ((0.1, RandomSlowdown(2.0, 0.5) * SlowWorkers(2.0, [9])), "a slowdown has worker 9"),
    ):
        with pytest.raises(ValueError, match=message):
            recsync.testing.set_compute_time(four, *arguments)
    # A slowdown is told the workers, not the threads that call them.
    algorithm = recsync.EASGD(0.3)
    shadow = recsync.ShadowSyncStrategy(four.cluster, algorithm, threads_per_trainer=2)
    with pytest.raises(ValueError, match="a slowdown has worker 4, and there are 4"):
        recsync.testing.set_compute_time(shadow, 0.1, SlowWorkers(2.0, [4]))


@pytest.fixture
def trained(four):
    """Trains steps with artificial compute time; how many each worker did, and in how long."""

    def train(steps, seconds, slowdown, steps_per_execution=1, callbacks=()):
        model = compiled(
            four,
            slope_model,
            lambda: SGD(1.0),
            mean_output,
            steps_per_execution=steps_per_execution,
        )
        recsync.testing.set_compute_time(four, seconds, slowdown)
        assert four.worker_steps(model) == [0] * 4
        ones = tf.data.Dataset.from_tensors((tf.ones([1, 1]), tf.ones([1, 1]))).repeat(steps)
        began = time.monotonic()
        try:
            model.fit(ones, verbose=0, callbacks=list(callbacks))
        finally:
            recsync.testing.set_compute_time(four, None)
        elapsed = time.monotonic() - began
        assert steps_of(model) == -model.get_weights()[0] == steps
        done = np.array(four.worker_steps(model))
        assert done.sum() == steps
        return done, elapsed

    return train


# What a step takes at least holds on however busy a machine. What it takes at most does not: so
# slow steps are slower by far than a busy machine makes the others.


def test_the_steps_of_a_slow_worker_take_their_time_and_others_do_the_rest(trained):
    done, elapsed = trained(150, 0.05, SlowWorkers(40.0, [3]))
    assert done[3] * 40 * 0.05 <= elapsed
    assert done[:3].max() * 0.05 <= elapsed
    assert done[3] < done[:3].mean() / 2


@pytest.mark.full
def test_several_steps_of_a_call_are_slowed_each(trained):
    done, elapsed = trained(150, 0.05, SlowWorkers(20.0, [0, 2]), steps_per_execution=3)
    assert max(done[0], done[2]) * 20 * 0.05 <= elapsed
    assert done[0] + done[2] < (done[1] + done[3]) / 2


class _Clock(keras.callbacks.Callback):
    """When Keras heard of each step, in seconds since the workers began together: never early."""

    def __init__(self):
        super().__init__()
        self._times = []
        self._began = None

    def on_train_batch_end(self, batch, logs=None):
        self._times.append(tf.timestamp().numpy())
        self._began = self.model.train_function._run.slots[0].pass_began

    @property
    def times(self) -> np.ndarray:
        return np.array(self._times) - self._began


@pytest.mark.full
def test_a_cluster_that_is_busy_for_a_while_is_slow_meanwhile(trained):
    clock = _Clock()
    busy = ChangingSlowdown([(1, 1.0), (1, 20.0), (3, 20.0), (3, 1.0)])
    trained(100, 0.2, busy, callbacks=[clock])
    # What begins from the first second to the third takes 4 s: until the third second only those
    # steps end that began in the first one, six of each worker at most.
    assert (clock.times < 3.0).sum() <= 4 * 6
    # All others would take 76 s if it stayed slow, and take 4 s.
    assert clock.times[-1] < 50.0


@pytest.mark.full
def test_steps_slowed_by_step_number_end_when_the_number_is_reached(trained):
    clock = _Clock()
    first_slow = ChangingSlowdown([(5, 40.0), (5, 1.0)], unit="steps")
    done, _ = trained(200, 0.02, first_slow, callbacks=[clock])
    # The first five of each worker take 0.8 s each, the others 0.02 s.
    times = clock.times
    for steps in done:
        assert times[-1] >= min(steps, 5) * 0.8 + max(steps - 5, 0) * 0.02
    assert times[19] >= 5 * 0.8
    # The rest would take 36 s if they were slow, and takes 1 s.
    assert times[199] - times[19] < 25.0
