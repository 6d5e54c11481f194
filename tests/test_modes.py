"""The training modes on clusters: what is trained, against one process on the global batches."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import LabelSum, compiled, compute_time, mean_output, slope_model
from mode_models import (
    LOCAL,
    Batches,
    TiedLedger,
    groups_of,
    ledger_model,
    small_model,
    weights_of,
)

import tf_recsync as recsync
from tf_recsync.optimizers import SGD, Adagrad, Adam, SwapAdagrad

SCHEDULE = keras.optimizers.schedules.ExponentialDecay(0.2, 2, 0.5)


@pytest.fixture
def three(clusters):
    return clusters.get(workers=3, ps=2)


@pytest.fixture
def one(clusters):
    return clusters.get(workers=1, ps=2, processes=0)


def trained(strategy, build, make, batches, epochs, steps, seconds=0.01, **kwargs):
    """(model, its weights after each epoch) of training with steps of differing length."""
    keras.utils.set_random_seed(3)
    weights = []
    with strategy.scope():
        model = build(batches.count)
        model.compile(make(), "mse", **kwargs)
    slowdown = seconds and recsync.testing.RandomSlowdown(5.0, probability=0.3)
    recsync.testing.set_compute_time(strategy, seconds, slowdown)
    note = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: weights.append(weights_of(model))
    )
    model.fit(batches.dataset(), epochs=epochs, steps_per_epoch=steps, callbacks=[note], verbose=0)
    return model, weights


def check_is_one_process(build, make, batches, groups, full, weights, tolerance=2e-5):
    """One process that trains on each of the groups as one batch has the same weights.

    Args:
        build: builds the model.
        make: makes the optimizer.
        batches: the data.
        groups: for each epoch, the numbers of the batches of each step.
        full: how many a whole global batch has.
        weights: after each epoch.
    """
    keras.utils.set_random_seed(3)
    local = build(batches.count)
    local.compile(make(), "mse", run_eagerly=True)
    for steps, expected in zip(groups, weights, strict=True):
        for group, (inputs, labels) in zip(steps, batches.dataset(steps), strict=True):
            with tf.GradientTape() as tape:
                loss = local.compute_loss(inputs, labels, local(inputs, training=True))
                loss *= len(group) / full
            variables = local.trainable_variables
            local.optimizer.apply(tape.gradient(loss, variables), variables)
        mine = weights_of(local)
        assert sorted(mine) == sorted(expected)
        for name, value in mine.items():
            np.testing.assert_allclose(
                expected[name], value, rtol=tolerance, atol=tolerance, err_msg=name
            )


def check_counts(strategy, model, pushes, steps):
    """The report's counts are those of the pushes, on each server."""
    report = strategy.aggregation(model)
    servers = len(model.train_function.aggregations[0].buffers)
    assert servers == 2
    counted = report.included + report.excluded
    assert counted + report.late == pushes * servers
    assert report.staleness.count == counted
    assert report.decayed <= report.included
    assert report.global_step == int(model.optimizer.iterations.numpy()) == steps
    assert (report.lost, report.reissued, report.spent) == (0, 0, 0)
    return report


SYNC = {
    "adagrad, a batch of each worker": ({}, ledger_model, lambda: Adagrad(0.1), {}),
    "swap, a batch more than workers": (
        {"global_batch_size": 4 * LOCAL, "local_batch_size": LOCAL},
        ledger_model,
        lambda: SwapAdagrad(0.1, swap=recsync.Swap(period=2, decay=0.5)),
        {},
    ),
    "adam, a batch less than workers": (
        {"global_batch_size": 2 * LOCAL, "local_batch_size": LOCAL},
        ledger_model,
        lambda: Adam(0.05),
        {},
    ),
    "weight decay, a schedule, two steps a call": (
        {},
        ledger_model,
        lambda: SGD(SCHEDULE, weight_decay=0.1),
        {"steps_per_execution": 2},
    ),
    "a table used as a whole, lookups that depend on lookups": (
        {},
        TiedLedger,
        lambda: Adagrad(0.1),
        {},
    ),
}


@pytest.mark.cases(
    "swap, a batch more than workers",
    "weight decay, a schedule, two steps a call",
    "a table used as a whole, lookups that depend on lookups",
)
@pytest.mark.parametrize("case", SYNC)
def test_synchronous_training_is_that_of_one_process(three, case):
    sizes, build, make, options = SYNC[case]
    strategy = recsync.SyncStrategy(three, **sizes)
    m = strategy.mode.capacity
    steps = 7
    batches = Batches(2 * steps)
    model, weights = trained(strategy, build, make, batches, 2, steps, **options)
    groups = groups_of(model)
    # Whole global batches, and what is left of them at the end of an epoch.
    epoch = [m] * (steps // m) + [steps % m] * (steps % m > 0)
    assert [len(group) for group in groups] == epoch * 2
    groups = [groups[: len(epoch)], groups[len(epoch) :]]
    check_is_one_process(build, make, batches, groups, m, weights)
    report = check_counts(strategy, model, 14, 2 * len(epoch))
    assert (report.late, report.excluded, report.age_max) == (0, 0, 0)
    assert (report.staleness.mean, report.staleness.max) == (1.0, 1)


def gba(cluster):
    return recsync.GBAStrategy(cluster, 4 * LOCAL, LOCAL, staleness_tolerance=9)


@pytest.mark.parametrize(
    ("make", "options"), [(gba, {}), (recsync.AsyncStrategy, {"steps_per_execution": 2})]
)
def test_an_epoch_in_which_the_data_end_has_all_steps_and_metrics_of_what_there_is(
    three, make, options
):
    def ones(count):
        return np.ones((count * LOCAL, 1), np.float32), np.ones((count * LOCAL, 1), np.float32)

    def dataset(count):
        return tf.data.Dataset.from_tensor_slices(ones(count)).batch(LOCAL)

    strategy = make(three)
    capacity, updates, expected = strategy.mode.capacity, [], []
    model = compiled(
        strategy, slope_model, lambda: SGD(0.1), mean_output, lambda: [LabelSum("n", 0)], **options
    )
    note = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: updates.append(
            (logs["n"] / LOCAL, int(model.optimizer.iterations.numpy()))
        )
    )
    with pytest.warns(UserWarning, match="ran out of data"):
        for steps, data in [
            (4, {"x": dataset(10), "epochs": 5}),
            (10, {"x": dataset(6), "epochs": 2}),
            # Keras alone knows how many batches they make.
            (10, dict(zip("xy", ones(6), strict=True), batch_size=LOCAL, epochs=2)),
        ]:
            model.fit(**data, steps_per_epoch=steps, callbacks=[note], verbose=0)
        for data in [{"x": dataset(6)}, dict(zip("xy", ones(6), strict=True), batch_size=LOCAL)]:
            found = model.evaluate(**data, steps=10, verbose=0, return_dict=True)
            assert found["n"] == 6 * LOCAL
    total = 0
    for batches in [4, 4, 2, 4, 4, 6, 6, 6, 6]:
        total += -(-batches // capacity)
        expected.append((batches, total))
    assert updates == expected
    if capacity > 1:
        assert strategy.aggregation(model).abandoned == 0


def test_updates_that_are_left_out_are_counted_where_servers_collect_pushes(three):
    def build():
        # Their variables have the same path.
        inputs = keras.Input((1,))
        return keras.Model(inputs, slope_model()(inputs) + slope_model()(inputs))

    strategy = recsync.SyncStrategy(three)
    model = compiled(strategy, build, lambda: SGD(0.1, nonfinite="skip"), mean_output)
    inputs = np.ones((6 * LOCAL, 1), np.float32)
    inputs[0] = np.nan  # All of its global batch counts for nothing.
    model.fit(inputs, np.ones_like(inputs), LOCAL, shuffle=False, verbose=0)
    np.testing.assert_allclose(model.get_weights(), -0.1, rtol=1e-6)
    report = strategy.staleness(model)
    assert report.dense.skipped == 2
    (variable,) = report.variables.values()
    assert (variable.count, variable.skipped) == (2, 2)


SLOWNESS = 12.0  # Of a slow worker, in steps of the others.


def slow(strategy, worker=2, multiple=SLOWNESS):
    recsync.testing.set_compute_time(
        strategy, 0.02, recsync.testing.SlowWorkers(multiple, [worker])
    )


def quick_fit(strategy, batches, **kwargs):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = small_model()
        model.compile(Adagrad(0.1), "mse")
    model.fit(batches.dataset(), verbose=0, **kwargs)
    return model


def fit_until(seen, strategy, batches, **kwargs):
    """(model, how many times it was trained on the batches).

    Which worker gets its gradient in when is up to the machine: on a busy one, a single fit may
    not have what the test is about.

    Args:
        seen: of the model, whether its training has had that by now.
    """
    model, times = quick_fit(strategy, batches, **kwargs), 1
    while not seen(model):
        # What others do meanwhile may take long, but not ever longer.
        slow(strategy, multiple=SLOWNESS * 2**times)
        model.fit(batches.dataset(), verbose=0, **kwargs)
        times += 1
    return model, times


def test_gba_leaves_out_what_a_slow_worker_pushes_too_late(three):
    strategy = recsync.GBAStrategy(three, 3 * LOCAL, LOCAL, staleness_tolerance=1)
    slow(strategy)

    def seen(model):
        report = strategy.aggregation(model)
        # What is pushed to one server is pushed to the other.
        return report.excluded >= 2 and report.staleness.max > 2

    model, times = fit_until(seen, strategy, Batches(60))
    report = check_counts(strategy, model, 60 * times, 20 * times)
    assert report.age_max > 1
    assert report.late == 0
    assert 0 < report.age_mean < report.age_max


def test_gba_with_a_policy_decays_what_is_old(three):
    decay = recsync.staleness.InversePower(k=1, baseline=1)
    strategy = recsync.GBAStrategy(three, 3 * LOCAL, LOCAL, decay=decay)
    slow(strategy)
    model, times = fit_until(
        lambda model: strategy.aggregation(model).decayed >= 2, strategy, Batches(45)
    )
    report = check_counts(strategy, model, 45 * times, 15 * times)
    assert report.excluded == 0


def test_bsp_counts_what_is_stale_in_full(three):
    strategy = recsync.BSPStrategy(three, 3 * LOCAL, LOCAL)
    slow(strategy)
    model, times = fit_until(
        lambda model: strategy.aggregation(model).staleness.max > 2, strategy, Batches(45)
    )
    report = check_counts(strategy, model, 45 * times, 15 * times)
    assert (report.excluded, report.decayed, report.late) == (0, 0, 0)


def test_backup_workers_drop_what_comes_late_and_nothing_is_stale(three):
    strategy = recsync.BackupWorkersStrategy(three, 1)
    slow(strategy)
    model, times = fit_until(
        # Two or more pushes, on two servers.
        lambda model: strategy.aggregation(model).late >= 4,
        strategy,
        Batches(60),
    )
    steps = int(model.optimizer.iterations.numpy())
    report = check_counts(strategy, model, 60 * times, steps)
    assert (report.staleness.max, report.age_max, report.excluded) == (1, 0, 0)
    # Two pushes a step; in the last one of a fit, perhaps, one.
    assert steps * 4 - 2 * times <= report.included <= steps * 4
    assert 20 * times <= steps <= 30 * times


def test_nobody_is_further_ahead_than_the_bound(three):
    bound = 2
    strategy = recsync.BoundedStalenessStrategy(three, bound)
    slow(strategy)
    gaps = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            state = self.model.train_function.aggregations[0]._tokens.state()
            live = [
                clock for clock, is_live in zip(state.clocks, state.live, strict=True) if is_live
            ]
            if live:  # All have left at the end.
                gaps.append(max(live) - min(live))

    # Who is at the bound may take one more token.
    model, times = fit_until(
        lambda model: max(gaps) > bound, strategy, Batches(40), callbacks=[Look()]
    )
    assert max(gaps) == bound + 1
    staleness = strategy.staleness(model).dense
    # While a worker is in a step, each of the two others takes part from bound + 1 batches
    # behind it to bound + 1 ahead, and pushes the one that it had.
    assert 1 < staleness.max <= 1 + 2 * (2 * (bound + 1) + 1)
    assert int(model.optimizer.iterations.numpy()) == 40 * times
    report = strategy.aggregation(model)
    assert (report.included, report.global_step, report.lost) == (0, 0, 0)


def test_without_slow_workers_bounded_staleness_is_lockstep_with_a_bound_of_0(three):
    strategy = recsync.BoundedStalenessStrategy(three, 0)
    with compute_time(strategy, 0.01):
        model = quick_fit(strategy, Batches(30))
    assert strategy.staleness(model).dense.max <= 1 + 2 * 3
    assert int(model.optimizer.iterations.numpy()) == 30


def test_asynchronous_training_uses_no_tokens(three):
    strategy = recsync.AsyncStrategy(three)
    assert strategy.aggregation(quick_fit(strategy, Batches(6))) is None


# Last, as it is another cluster.


MODES = {
    "BSP": lambda c, m: recsync.BSPStrategy(c, m * LOCAL, LOCAL),
    "GBA": lambda c, m: recsync.GBAStrategy(c, m * LOCAL, LOCAL, staleness_tolerance=0),
    "sync": lambda c, m: recsync.SyncStrategy(
        c, global_batch_size=m * LOCAL, local_batch_size=LOCAL
    ),
}


@pytest.mark.cases("GBA-3")
@pytest.mark.parametrize(("mode", "m"), [("GBA", 3), ("BSP", 2), ("GBA", 1)])
def test_a_single_worker_computes_global_batches_as_one_process_does(one, mode, m):
    strategy = MODES[mode](one, m)
    batches = Batches(8)

    def make():
        return SwapAdagrad(0.1, swap=recsync.Swap(period=2, decay=0.5))

    model, weights = trained(strategy, ledger_model, make, batches, 1, None, seconds=None)
    groups = groups_of(model)
    assert [len(group) for group in groups] == [m] * (8 // m) + [8 % m] * (8 % m > 0)
    check_is_one_process(ledger_model, make, batches, [groups], m, weights)
    report = check_counts(strategy, model, 8, -(-8 // m))
    assert (report.included, report.age_max, report.staleness.max) == (16, 0, 1)


def test_what_does_not_fill_a_global_batch_can_be_left_out(one):
    strategy = recsync.GBAStrategy(
        one, 3 * LOCAL, LOCAL, staleness_tolerance=0, last_global_batch="drop"
    )
    batches = Batches(8)
    model, weights = trained(
        strategy, ledger_model, lambda: Adagrad(0.1), batches, 2, None, seconds=None
    )
    whole = [[0, 1, 2], [3, 4, 5]]
    check_is_one_process(ledger_model, lambda: Adagrad(0.1), batches, [whole] * 2, 3, weights)
    report = strategy.aggregation(model)
    assert (report.global_step, report.left_over) == (4, 2 * 2 * 2)  # On two servers.


def test_a_last_batch_of_fewer_examples_counts_as_a_whole_one(one):
    strategy = MODES["sync"](one, 3)
    model = compiled(strategy, slope_model, lambda: SGD(0.5), mean_output)
    inputs = np.random.default_rng(2).normal(size=(5 * LOCAL - 1, 1)).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((inputs, np.zeros_like(inputs))).batch(LOCAL)
    model.fit(data, verbose=0)
    # The gradient of each batch is the mean of its inputs, and a global batch has three.
    means = [inputs[i : i + LOCAL].mean() for i in range(0, len(inputs), LOCAL)]
    assert len(means) == 5
    np.testing.assert_allclose(model.get_weights()[0], [[-0.5 * sum(means) / 3]], rtol=1e-5)
    report = strategy.aggregation(model)
    assert (report.global_step, report.left_over) == (2, 0)


def test_another_fate_of_the_last_global_batch_is_refused():
    with pytest.raises(ValueError, match="last_global_batch must be 'weigh' or 'drop', not 'pad'"):
        recsync.modes.Sync(last_global_batch="pad")
