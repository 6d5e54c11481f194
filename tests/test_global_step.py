"""What a global step stands for: conversions by hand, and local training that goes on elsewhere."""

import itertools
import random
import warnings
from fractions import Fraction

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import logging
from helpers import assert_close

import tf_recsync as recsync
from tf_recsync.optimizers.global_step import StepState


@pytest.fixture(autouse=True)
def _seeded():
    keras.utils.set_random_seed(7)


@pytest.fixture
def logged(monkeypatch):
    """What is logged, by level."""
    found = {"info": [], "warning": []}
    for level, lines in found.items():
        monkeypatch.setattr(
            logging, level, lambda message, *args, lines=lines: lines.append(message % args)
        )
    return found


def state_with(examples: int, period: int, capacity: int = 1) -> StepState:
    return StepState.new(examples, capacity, recsync.Swap(period), schedule=0)


@pytest.mark.parametrize(
    ("examples", "period", "step", "to", "new_step", "new_period", "offset"),
    [
        (64, 100, 250, 64, 250, 100, 0),
        # Four local batches, to one: all is four times as many.
        (64, 100, 250, 16, 1000, 400, 0),
        (16, 400, 1000, 64, 250, 100, 0),
        # A step is 2 1/3 of the others: rounded.
        (16, 7, 21, 48, 7, 2, 3 * 2 - 7),
        (48, 2, 7, 16, 21, 6, 3 * 6 + 3 - 21),
        # 1.75 steps of 4 are rounded to 2; the period that they are in stays the first.
        (16, 4, 7, 64, 2, 1, 1 - 2),
        # A period is at least one step.
        (16, 10, 35, 1600, 0, 1, 3),
        # A half is rounded up: 2.5 to 3.
        (16, 5, 5, 32, 3, 3, 0),
    ],
)
def test_steps_and_periods_are_converted(examples, period, step, to, new_step, new_period, offset):
    before = state_with(examples, period)
    found, after = before.converted(step, to, capacity=3)
    assert (found, after.swap_period, after.swap_offset) == (new_step, new_period, offset)
    assert (after.examples, after.capacity, after.period_given) == (to, 3, period)
    # Rows keep the numbers of their last periods.
    assert (found + after.swap_offset) // after.swap_period == step // period
    # Applications stay what they are.
    assert found + after.update_offset == step


def test_over_random_chains_no_period_is_skipped_or_counted_twice():
    rng = random.Random(3)
    for _ in range(300):
        state, step = state_with(rng.randint(1, 200), rng.randint(1, 60)), 0
        number = 0
        for _ in range(6):
            for _ in range(rng.randint(0, 150)):
                step += 1
                new = (step + state.swap_offset) // state.swap_period
                assert new - number in (0, 1)
                number = new
            examples = rng.randint(1, 200)
            done = (step + state.swap_offset) % state.swap_period / state.swap_period
            step, state = state.converted(step, examples, 1)
            assert (step + state.swap_offset) // state.swap_period == number
            # And it is as far into its period, to a step.
            now = (step + state.swap_offset) % state.swap_period / state.swap_period
            assert abs(now - done) <= 1 / state.swap_period


def test_where_all_divides_decays_come_at_the_same_examples():
    period = 12 * 64  # Examples.
    state, step, examples, decays = state_with(64, 12), 0, 0, []
    number = 0
    for size in (64, 16, 32, 128, 64, 256):
        step, state = state.converted(step, size, 1)
        for _ in range(10 * 256 // size):
            step, examples = step + 1, examples + size
            if (step + state.swap_offset) // state.swap_period > number:
                number += 1
                decays.append(examples)
        assert (state.swap_offset, step * size) == (0, examples)
    assert decays == list(range(period, examples + 1, period))


def test_there_and_back_again_nothing_has_changed():
    rng = random.Random(4)
    for _ in range(100):
        start = state_with(rng.randint(1, 500), rng.randint(1, 1000))
        step, state = 0, start
        for _ in range(8):
            step, state = state.converted(step, rng.randint(1, 500), rng.randint(1, 9))
            state = StepState.from_array(state.array)
        step, state = state.converted(step, start.examples, start.capacity)
        assert state == start


def test_another_period_takes_effect_in_the_period_that_is_on():
    state = state_with(16, 100)
    after = state.with_period(250, 10)
    assert (after.swap_period, after.period_given) == (10, 10)
    assert (250 + after.swap_offset) // 10 == 2
    assert (254 + after.swap_offset) // 10 == 2 and (255 + after.swap_offset) // 10 == 3
    # Given in steps of 16 examples, it is converted as ever.
    assert after.converted(250, 32, 1)[1].swap_period == 5


def test_states_are_saved_exactly():
    _, state = state_with(10**6, 10**7 + 1).converted(10**12, 999_983, 7)
    state = StepState.from_array(state.array)
    assert state.period == Fraction((10**7 + 1) * 10**6, 999_983)
    assert state.array.dtype == np.int64 and state.array.shape == (StepState.SIZE,)


# Plain local Keras.

X = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
Y = (X @ np.array([[1.0], [-2.0], [0.5]])).astype(np.float32)
OPTIMIZERS = {
    "Adagrad": lambda **kwargs: recsync.optimizers.Adagrad(0.5, **kwargs),
    "Adam": lambda **kwargs: recsync.optimizers.Adam(0.1, **kwargs),
    "Ftrl": lambda **kwargs: recsync.optimizers.Ftrl(0.5, **kwargs),
}


def local(make, examples=None, build=True, **kwargs) -> keras.Model:
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(2, name="hidden"), keras.layers.Dense(1)]
    )
    model.compile(make(), "mse", **kwargs)
    if examples is not None:
        model.optimizer.examples_per_step = examples
    if build:
        model.optimizer.build(model.trainable_variables)
    return model


def fit(model, steps, batch=16):
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(batch).repeat().take(steps)
    model.fit(data, verbose=0)


def switched(model, path, make, **kwargs) -> keras.Model:
    """The model's state, loaded by another one."""
    model.save_weights(path)
    other = local(make, **kwargs)
    other.load_weights(path)
    return other


def step_of(model) -> int:
    return int(model.optimizer.iterations.numpy())


@pytest.mark.cases("Ftrl")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_as_if_steps_were_counted_as_before(tmp_path, name):
    def make(period=8):
        return OPTIMIZERS[name](swap=recsync.Swap(period, 0.5))

    path = tmp_path / "a.weights.h5"
    model = local(make, examples=16)
    fit(model, 22)
    model.save_weights(path)

    # 22 steps are 44 now; a period of 8 is one of 16, 6/8 of which are over. That period
    # is another number in the same steps: the same as 16 in the old ones. By hand: from here on
    # a period takes 16 steps, and the third one begins in 4.
    fit_by_hand = local(lambda: make(16))
    fit_by_hand.load_weights(path)
    state = fit_by_hand.optimizer.step_state
    assert (state.swap_period, 22 + state.swap_offset) == (16, 2 * 16 + 12)
    fit(fit_by_hand, 12)

    for build, jit in itertools.product([False, True], repeat=2):
        other = local(make, examples=8, build=build, jit_compile=jit)
        other.load_weights(path)
        if build:
            assert step_of(other) == 44
        fit(other, 12)
        assert step_of(other) == 56, (build, jit)
        assert_close(other.get_weights(), fit_by_hand.get_weights(), 1e-6 if not jit else 1e-5)


def test_without_swap_adam_is_as_if_nothing_had_been_switched(tmp_path):
    make = OPTIMIZERS["Adam"]
    model = local(make, examples=64)
    fit(model, 5)
    other = switched(model, tmp_path / "a.weights.h5", make, examples=16)
    assert step_of(other) == 20
    for _ in range(2):
        fit(model, 3)
        fit(other, 3)
        assert_close(other.get_weights(), model.get_weights(), 1e-6)
        other = switched(other, tmp_path / "a.weights.h5", make, examples=48)


def test_a_schedule_goes_on_where_it_was(tmp_path):
    def make(steps=1000):
        schedule = keras.optimizers.schedules.PolynomialDecay(1.0, steps, 0.0)
        return recsync.optimizers.SGD(schedule)

    def rate(model):
        return float(model.optimizer.learning_rate)

    model = local(make, examples=64)
    fit(model, 10)
    assert rate(model) == pytest.approx(0.99)
    other = switched(model, tmp_path / "a.weights.h5", make, examples=16)
    assert (step_of(other), rate(other)) == (40, pytest.approx(0.99))
    fit(other, 40)
    assert rate(other) == pytest.approx(0.98)
    # A schedule that the user has changed is one of the steps that are now.
    changed = switched(other, tmp_path / "b.weights.h5", lambda: make(100), examples=16)
    assert (step_of(changed), rate(changed)) == (80, pytest.approx(0.2))
    back = switched(other, tmp_path / "b.weights.h5", make, examples=64)
    assert (step_of(back), rate(back)) == (20, pytest.approx(0.98))


def test_a_schedule_goes_on_by_updates_where_one_process_adds_up_as_many_examples(tmp_path):
    def make(batches=None):
        schedule = keras.optimizers.schedules.PolynomialDecay(0.1, 40, 0.0)
        return recsync.optimizers.SGD(schedule, gradient_accumulation_steps=batches)

    model = local(make, examples=64)
    fit(model, 10, batch=64)
    other = switched(model, tmp_path / "a.weights.h5", lambda: make(4), examples=64)
    assert (step_of(other), float(other.optimizer.learning_rate)) == (10, pytest.approx(0.075))
    # All data are a global batch: four batches of 16 are as one of 64.
    fit(model, 10, batch=64)
    fit(other, 40, batch=16)
    assert (step_of(other), float(other.optimizer.learning_rate)) == (20, pytest.approx(0.05))
    assert_close(other.get_weights(), model.get_weights(), 1e-5)


def test_a_schedule_of_the_users_own_needs_no_configuration(tmp_path):
    class Halving(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return 0.5 ** (1.0 + keras.ops.cast(step, "float32"))

    model = local(lambda: recsync.optimizers.SGD(Halving()), examples=64)
    before = model.get_weights()
    fit(model, 2, batch=64)
    rate = [float(model.optimizer.learning_rate)]
    other = switched(
        model, tmp_path / "a.weights.h5", lambda: recsync.optimizers.SGD(Halving()), examples=64
    )
    assert [step_of(other), float(other.optimizer.learning_rate)] == [2, *rate] == [2, 0.125]
    assert not np.allclose(other.get_weights()[0], before[0])


def test_a_changed_period_replaces_the_saved_one_and_says_so(tmp_path, logged):
    def make(period):
        return recsync.optimizers.Adagrad(0.1, swap=recsync.Swap(period))

    model = local(lambda: make(4), examples=16)
    fit(model, 6)
    other = switched(model, tmp_path / "a.weights.h5", lambda: make(100), examples=8)
    state = other.optimizer.step_state
    assert (state.swap_period, state.period_given) == (100, 100)
    assert (step_of(other) + state.swap_offset) == 1 * 100 + 50
    assert any("Swap(period=100)" in line and "given as 4" in line for line in logged["info"])
    assert logged["warning"] == []


def test_what_is_converted_is_logged(tmp_path, logged):
    make = lambda: recsync.optimizers.SwapAdagrad(0.1, name="mine")  # noqa: E731
    model = local(make, examples=16)
    fit(model, 6)
    switched(model, tmp_path / "a.weights.h5", make, examples=8)
    assert logged["info"] == [
        "mine goes on in steps of 8 examples (16 before): step 6 is step 12; SWAP's period is "
        "20000 steps, in the checkpoint 10000 steps."
    ]


def test_the_same_steps_convert_and_log_nothing(tmp_path, logged):
    make = lambda: recsync.optimizers.SwapAdagrad(0.1)  # noqa: E731
    for examples in (None, 16):
        model = local(make, examples=examples)
        fit(model, 6)
        other = switched(model, tmp_path / "a.weights.h5", make, examples=examples)
        assert (step_of(other), other.optimizer.examples_per_step) == (6, examples)
        state = model.optimizer.step_state
        assert other.optimizer.step_state == state
    assert logged == {"info": [], "warning": []}


def test_a_model_that_was_traced_for_another_period_has_to_be_compiled_again(tmp_path, logged):
    make = lambda: recsync.optimizers.SwapAdagrad(0.1)  # noqa: E731
    model = local(make, examples=16)
    fit(model, 6)
    other = local(make, examples=8)
    fit(other, 2)
    model.save_weights(tmp_path / "a.weights.h5")
    other.load_weights(tmp_path / "a.weights.h5")
    (line,) = logged["warning"]
    assert "compile it again" in line
    other.compile(other.optimizer, "mse")
    fit(other, 2)
    other.optimizer.examples_per_step = 8
    assert len(logged["warning"]) == 1


@pytest.mark.parametrize("examples", [0, -1, 2.0, True, "16"])
def test_examples_of_a_step_are_a_positive_integer(examples):
    optimizer = recsync.optimizers.Adagrad(0.1)
    with pytest.raises(ValueError, match="examples_per_step must be an integer of at least 1"):
        optimizer.examples_per_step = examples
    assert optimizer.examples_per_step is None


# Checkpoints of something else.


def hidden_units(units):
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(units, name="hidden"), keras.layers.Dense(1)]
    )
    model.compile(recsync.optimizers.Adagrad(0.1), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


OTHERS = {
    "another optimizer": (
        lambda: local(OPTIMIZERS["Ftrl"]),
        lambda: local(OPTIMIZERS["Adam"]),
        "Ftrl keeps accumulator, linear, version, staleness of each variable, Adam here "
        "momentum, velocity, version, last_step, staleness",
    ),
    "with and without SWAP": (
        lambda: local(OPTIMIZERS["Adagrad"]),
        lambda: local(lambda: recsync.optimizers.SwapAdagrad(0.1)),
        "keeps accumulator, version, staleness of each variable, SwapAdagrad here accumulator, "
        "version, last_period, staleness",
    ),
    "another model": (
        lambda: hidden_units(5),
        lambda: hidden_units(4),
        r"hidden/kernel \[3, 5\] of the checkpoint is \S*hidden/kernel \[3, 4\] here",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_checkpoint_of_something_else_is_refused_and_the_difference_named(tmp_path, name):
    make_saved, make_loaded, message = OTHERS[name]
    make_saved().save_weights(tmp_path / "a.weights.h5")
    loaded = make_loaded()
    store: dict = {}
    make_saved().optimizer.save_own_variables(store)
    before = [v.numpy() for v in loaded.optimizer.variables]
    with pytest.raises(ValueError, match=message):
        loaded.optimizer.load_own_variables(_Store(store))
    for variable, value in zip(loaded.optimizer.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    with pytest.raises(ValueError, match="could not be loaded"):
        loaded.load_weights(tmp_path / "a.weights.h5")


class _Store(dict):
    """As Keras's, whose items are read by [()]."""

    def __getitem__(self, name):
        return np.asarray(super().__getitem__(name))


def test_what_was_saved_before_training_is_loaded_without_a_state(tmp_path, logged):
    make = OPTIMIZERS["Adagrad"]
    model = local(make, build=False)
    model.save(tmp_path / "compiled.keras")
    uncompiled = keras.Sequential([keras.Input((3,)), *model.layers])
    uncompiled.save_weights(tmp_path / "uncompiled.weights.h5")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = keras.models.load_model(tmp_path / "compiled.keras")
    fit(loaded, 2)
    assert step_of(loaded) == 2
    other = local(make)
    other.load_weights(tmp_path / "uncompiled.weights.h5")
    assert_close(other.get_weights(), model.get_weights(), 0)
    assert all("holds no state of adagrad" in line for line in logged["warning"])
    assert len(logged["warning"]) == 2
