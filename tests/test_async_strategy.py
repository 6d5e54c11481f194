"""AsyncStrategy: Keras's fit, evaluate and predict on real parameter servers."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    BATCH,
    IDS,
    LOSS,
    ROWS,
    AtBatch,
    CallCounter,
    OwnStep,
    Slopes,
    Subclassed,
    Tied,
    adagrad,
    assert_close,
    check_group_auc,
    clicks,
    compiled,
    compute_time,
    dataset,
    events,
    functional,
    mean_output,
    numbered,
    sequential,
    slope_model,
    state_of,
    steps_of,
    sums,
)

import tf_recsync as recsync
from tf_recsync.optimizers import SGD, Adagrad, Adam, Ftrl, SwapAdagrad

SCHEDULE = keras.optimizers.schedules.ExponentialDecay(0.3, 7, 0.6)


@pytest.fixture(autouse=True)
def _seeded():
    keras.utils.set_random_seed(5)


@pytest.fixture
def one(clusters):
    """A strategy with a single worker, whose gradients are never stale."""
    return clusters.strategy(workers=1, ps=1)


@pytest.fixture
def two(clusters):
    return clusters.strategy(workers=2, ps=2)


def tiny() -> keras.Model:
    """One layer, for tests that are not about the model."""
    inputs = keras.Input((IDS,))
    return keras.Model(inputs, keras.layers.Dense(1, "sigmoid", name="out")(inputs))


def soon_learned(n: int = 320, seed: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """`clicks` whose labels follow from the first id alone."""
    ids, _ = clicks(n, seed)
    return ids, (ids[:, :1] % 2).astype(np.float32)


# With one worker, training is plain Keras to the bit of an operation's rounding.


def check_same_as_local(strategy, make, build=functional, stock=None, data=None, **kwargs):
    """Trains under the strategy, and eagerly here on the same batches from the same weights."""
    model = compiled(strategy, build, make, **kwargs)
    local = build()
    local.set_weights(model.get_weights())
    local.compile((stock or make)(), LOSS, run_eagerly=True)
    data = data or dataset(72)  # 5 batches, the last of them smaller.
    steps = 2 * len(data)
    remote = model.fit(data, epochs=2, verbose=0).history["loss"]
    assert_close(remote, local.fit(data, epochs=2, verbose=0).history["loss"])
    assert_close(model.get_weights(), local.get_weights())
    assert steps_of(model) == steps_of(local) == steps == 10
    if stock is None:  # Accumulators, versions, periods, staleness counters.
        # What a global step stands for is known on a cluster only.
        # Only on a server, what is pending of a table's decay is kept.
        mine, theirs = (
            [
                v
                for v in o.variables
                if v is not o.step_variable
                and not any(v is logs for state in o.states for logs in state.log_decays)
            ]
            for o in (model.optimizer, local.optimizer)
        )
        assert len(mine) > 2 * len(model.trainable_variables)
        assert_close([v.numpy() for v in mine], [v.numpy() for v in theirs])
    report = strategy.staleness(model)
    assert (report.dense.mean, report.dense.max) == (1.0, 1)
    assert (report.rows.mean, report.rows.max) == (1.0, 1)
    assert report.dense.count == steps * sum(
        not v.path.endswith("embeddings") for v in model.trainable_variables
    )
    return model


@pytest.mark.full
def test_a_dataset_may_be_older_than_the_connection(clusters):
    clusters.close()
    data = dataset(96).shuffle(4, seed=1)
    for workers in (2, 1):  # The latter's cluster is that of the tests that follow.
        model = compiled(clusters.strategy(workers, ps=1), tiny)
        model.fit(data, verbose=0)
        assert steps_of(model) == 6
        assert np.isfinite(model.evaluate(data, verbose=0))
        assert model.predict(data, verbose=0).shape == (96, 1)


@pytest.mark.cases("adam that is not lazy, weight_decay", "ftrl, weight_decay", "swap, clipnorm")
@pytest.mark.parametrize(
    "make",
    [
        lambda: Adagrad(SCHEDULE, clipvalue=0.01, weight_decay=0.1),
        lambda: Adam(SCHEDULE, lazy=False, weight_decay=0.1),
        lambda: Ftrl(SCHEDULE, weight_decay=0.1),
        lambda: SGD(SCHEDULE, global_clipnorm=0.1),
        lambda: SwapAdagrad(0.1, swap=recsync.Swap(period=5, decay=0.5), clipnorm=0.05),
    ],
    ids=[
        "schedule, clipvalue, weight_decay",
        "adam that is not lazy, weight_decay",
        "ftrl, weight_decay",
        "schedule, global_clipnorm",
        "swap, clipnorm",
    ],
)
def test_one_worker_trains_like_local_keras(one, make):
    check_same_as_local(one, make)


@pytest.mark.parametrize(
    ("make", "stock"),
    [
        (lambda: Adagrad(SCHEDULE), lambda: keras.optimizers.Adagrad(SCHEDULE, epsilon=1e-7)),
        (
            lambda: SGD(0.3, weight_decay=0.1),
            lambda: keras.optimizers.SGD(0.3, weight_decay=0.1),
        ),
    ],
    ids=["adagrad_schedule", "sgd_weight_decay"],
)
def test_one_worker_trains_like_stock_keras_with_its_own_optimizer(one, make, stock):
    # No row twice in a batch: stock Keras squares repeated rows before it sums them.
    distinct = np.stack([np.random.permutation(20).reshape(5, IDS) for _ in range(5)])
    labels = np.random.randint(0, 2, (5, 5, 1))
    data = tf.data.Dataset.from_tensor_slices((distinct, labels))
    check_same_as_local(one, make, stock=stock, data=data)


def test_several_steps_per_execution_change_nothing_for_one_worker(one):
    check_same_as_local(one, adagrad, steps_per_execution=2)


def test_a_regularizer_on_a_table_acts_on_all_its_rows_and_warns_of_that(one, caplog):
    def build():
        return functional(embeddings_regularizer=keras.regularizers.L2(0.05))

    model = check_same_as_local(one, lambda: SGD(0.3), build)
    # Once by each of the two optimizers.
    assert caplog.text.count(f"The table table/embeddings, {ROWS} x 3, has a regularizer") == 2
    versions = next(v for path, v in state_of(model).items() if path.endswith("embeddings_version"))
    assert (versions > 0).all()  # Of the rows, too, that no batch names.


def test_an_activity_regularizer_of_a_table_acts_on_the_rows_that_are_looked_up(one, caplog):
    def build():
        return functional(activity_regularizer=keras.regularizers.L2(0.05))

    model = check_same_as_local(one, lambda: SGD(0.3), build)
    assert "regularizer" not in caplog.text
    versions = next(v for path, v in state_of(model).items() if path.endswith("embeddings_version"))
    assert (versions[-4:] == 0).all() and (versions[:-4] > 0).any()  # No batch names the last.


def test_tied_weights_get_the_gradients_of_both_uses(one):
    def build():
        model = Tied()
        model.build((None, IDS))
        return model

    model = compiled(one, build, lambda: SGD(0.5))
    local = build()
    local.set_weights(model.get_weights())
    local.compile(keras.optimizers.SGD(0.5), LOSS, run_eagerly=True)
    before = model.get_weights()[0]
    model.fit(dataset(160), verbose=0)
    local.fit(dataset(160), verbose=0)
    assert_close(model.get_weights(), local.get_weights())
    assert not np.allclose(model.get_weights()[0], before, atol=1e-3)


def test_one_worker_keeps_the_moving_statistics_of_local_keras(one):
    def build():
        inputs = keras.Input((IDS,), dtype="int32")
        x = keras.layers.Flatten()(keras.layers.Embedding(ROWS, 3)(inputs))
        x = keras.layers.BatchNormalization(momentum=0.8)(keras.layers.Dense(4)(x))
        x = recsync.layers.MeanNormalization(momentum=0.8)(x + 3.0)
        return keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(x))

    check_same_as_local(one, lambda: SGD(0.05), build)


# Several workers.


@pytest.mark.cases("Subclassed")
@pytest.mark.parametrize("build", [functional, sequential, Subclassed])
def test_models_of_every_kind_train_and_validate(two, build):
    model = compiled(two, build, lambda: Adagrad(0.3), metrics=lambda: ["AUC"])
    x, y = soon_learned()
    validation = soon_learned(960, seed=4)
    history = model.fit(
        *(x, y, BATCH),
        epochs=2,
        validation_data=validation,
        validation_batch_size=240,
        verbose=0,
    ).history
    assert set(history) == {"loss", "AUC", "val_loss", "val_AUC"}
    assert all(len(values) == 2 for values in history.values())
    assert history["loss"][-1] < history["loss"][0]
    assert history["AUC"][-1] > history["AUC"][0]
    assert history["val_AUC"][-1] > 0.5
    assert steps_of(model) == 2 * 20


@pytest.mark.cases("3-kinds1")
@pytest.mark.parametrize(
    ("steps_per_execution", "kinds"),
    [
        (1, ["dataset", "static shapes", "unknown length"]),
        (3, ["arrays", "static shapes", "unknown length"]),
    ],
)
def test_each_batch_of_an_epoch_goes_to_exactly_one_worker(two, steps_per_execution, kinds):
    model = compiled(two, tiny, metrics=sums, steps_per_execution=steps_per_execution, loss="mse")
    numbers = np.arange(400.0)
    for trained, kind in enumerate(kinds):
        data, arguments = numbered(kind)
        history = model.fit(*data, epochs=2, verbose=0, **arguments).history
        assert history["examples"] == [400] * 2, kind
        assert history["label_sum"] == [numbers.sum()] * 2, kind
        assert history["squares"] == [(numbers**2).sum()] * 2, kind
        assert steps_of(model) == 50 * (trained + 1), kind
        evaluated = model.evaluate(*data, verbose=0, return_dict=True, **arguments)
        assert evaluated["label_sum"] == numbers.sum(), kind
        assert evaluated["squares"] == (numbers**2).sum(), kind


def test_logs_of_short_epochs_are_complete(two):
    model = compiled(two, tiny, metrics=sums)
    history = model.fit(*clicks(128), 64, epochs=8, verbose=0).history
    assert history["examples"] == [128] * 8


def test_a_layer_that_counts_its_steps_counts_those_of_all_workers(two):
    def build():
        inputs = keras.Input((IDS,))
        return keras.Model(inputs, keras.layers.Dense(1)(CallCounter(name="counter")(inputs)))

    model = compiled(two, build, loss="mse")
    model.fit(dataset(), epochs=2, verbose=0)
    assert model.get_layer("counter").calls.numpy() == steps_of(model) == 40


@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_steps_per_epoch_of_a_repeated_dataset_and_validation_steps_are_kept_exactly(
    two, steps_per_execution
):
    model = compiled(two, tiny, metrics=sums, steps_per_execution=steps_per_execution)
    (data,), _ = numbered("dataset")
    # The first batches of 25, in each epoch.
    validated = {"validation_data": data, "validation_steps": 4}
    history = model.fit(data.repeat(), epochs=3, steps_per_epoch=20, verbose=0, **validated).history
    assert steps_of(model) == 60
    assert history["examples"] == [20 * 16] * 3
    assert history["val_label_sum"] == [np.arange(4 * 16.0).sum()] * 3
    assert model.evaluate(data.repeat(), steps=7, verbose=0, return_dict=True)["examples"] == 7 * 16


def test_steps_per_epoch_of_a_finite_dataset_go_on_where_the_last_epoch_ended(two):
    model = compiled(two, tiny, metrics=sums, loss="mse")
    (data,), _ = numbered("dataset")
    history = model.fit(data.take(24), epochs=3, steps_per_epoch=8, verbose=0).history
    assert sum(history["label_sum"]) == np.arange(24 * 16.0).sum()
    assert steps_of(model) == 24


def test_metrics_merged_over_workers_are_those_of_one_process(two):
    def metrics():
        ours = [recsync.metrics.AUC(name="area"), recsync.metrics.NormalizedEntropy()]
        ours.append(recsync.metrics.Calibration())
        return ["AUC", *ours, "mae", "binary_accuracy"]

    model = compiled(two, metrics=metrics)
    model.fit(dataset(), verbose=0)
    # On a server, each reading of one would be a call.
    assert {v.value.device.split("/")[1] for v in model.metrics_variables} == {"job:chief"}
    local = functional()
    local.set_weights(model.get_weights())
    local.compile("sgd", LOSS, metrics=metrics(), run_eagerly=True)
    x, y = clicks(333)
    weights = np.linspace(0, 2, 333)
    mine = model.evaluate(x, y, sample_weight=weights, verbose=0, return_dict=True)
    theirs = local.evaluate(x, y, sample_weight=weights, verbose=0, return_dict=True)
    assert mine.keys() == theirs.keys() and len(mine) == 7
    assert mine == pytest.approx(theirs, rel=1e-5)


def test_the_group_auc_of_each_epoch_is_that_of_its_predictions(two):
    check_group_auc(two, adagrad)


def test_predictions_come_in_the_order_of_the_data(two):
    model = compiled(two)
    local = functional()
    local.set_weights(model.get_weights())
    x = clicks(205)[0]
    expected = local.predict(x, verbose=0)
    assert len(np.unique(expected)) > 150
    assert_close([model.predict(x, batch_size=4, verbose=0)], [expected])
    assert_close([model.predict_on_batch(x[:7])], [expected[:7]])


def test_a_model_that_is_not_compiled_predicts_and_may_be_compiled_then(two):
    with two.scope():
        model = tiny()
    ids, labels = clicks(40)
    inputs = ids.astype(np.float32)
    np.testing.assert_allclose(model.predict(inputs, verbose=0), model(inputs), rtol=1e-6)
    with two.scope():
        model.compile(SGD(0.1), LOSS)
    model.fit(inputs, labels, batch_size=8, epochs=1, verbose=0)
    assert sum(two.worker_steps(model)) == 5


def test_a_forgotten_scope_is_warned_of(two, caplog):
    model = tiny()
    model.compile(SGD(0.1), LOSS)
    ids, labels = clicks(8)
    model.fit(ids.astype(np.float32), labels, verbose=0)
    assert "was not made in the scope() of a strategy" in caplog.text
    caplog.clear()
    model = compiled(two, tiny, lambda: SGD(0.1))
    model.fit(ids.astype(np.float32), labels, verbose=0)
    assert "scope()" not in caplog.text


def test_predict_is_traced_once(two):
    traced = []

    class Noting(keras.layers.Dense):
        def call(self, inputs):
            if isinstance(inputs, tf.Tensor):
                traced.append(inputs.shape)
            return super().call(inputs)

    def build():
        return keras.Sequential([keras.Input((3,)), Noting(1)])

    model = compiled(two, build)
    x = np.ones((12, 3), np.float32)
    first = model.predict(x, batch_size=4, verbose=0)
    count = len(traced)
    model.layers[0].kernel.assign(2 * model.layers[0].kernel)
    assert_close([model.predict(x, batch_size=4, verbose=0)], [2 * first])
    assert len(traced) == count


def test_a_number_of_steps_evaluates_and_predicts_the_first_batches(two):
    model = compiled(two)
    local = functional()
    local.set_weights(model.get_weights())
    local.compile("sgd", LOSS, run_eagerly=True)
    loss = local.evaluate(dataset(), steps=7, verbose=0)
    assert model.evaluate(dataset(), steps=7, verbose=0) == pytest.approx(loss, rel=1e-5)
    expected = local.predict(dataset(), steps=3, verbose=0)
    assert expected.shape == (3 * BATCH, 1)
    assert_close([model.predict(dataset(), steps=3, verbose=0)], [expected])


@pytest.mark.full
def test_two_equal_workers_see_a_staleness_of_two(two):
    # Within a call a pull follows the push before it at once, so that the other
    # worker's push falls between a pull and its push, and not beside them. With
    # single steps, two workers in step with each other see 1.5 while they are.
    # Each has one call, and its first step lasts until the other one has begun, too.
    model = compiled(two, steps_per_execution=60)
    first_slow = recsync.testing.ChangingSlowdown([(1, 20.0), (1, 1.0)], unit="steps")
    with compute_time(two, 0.1, first_slow):
        model.fit(dataset(60 * 8, 8), verbose=0)
    report = two.staleness(model)
    assert report.dense.count == 60 * 4
    assert report.dense.mean == pytest.approx(2, rel=0.15)
    assert report.rows.mean < report.dense.mean


def test_moving_statistics_of_two_workers_approach_those_of_the_data(two):
    def build():
        inputs = keras.Input((2,))
        mean_normalized = recsync.layers.MeanNormalization(momentum=0.9, name="mn")(inputs)
        x = keras.layers.BatchNormalization(momentum=0.9, name="bn")(inputs)
        x = keras.layers.Dropout(0.5)(keras.layers.concatenate([x, mean_normalized]))
        return keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(x))

    x = np.random.default_rng(1).normal([4.0, -3.0], [1.0, 2.0], (4096, 2)).astype(np.float32)
    model = compiled(two, build, lambda: SGD(0.01))
    # More than once: what a worker that stands still has pulled at the beginning, far from the
    # data, it may push at the end of an epoch.
    model.fit(x, (x[:, :1] > 4.0).astype(np.float32), batch_size=64, epochs=3, verbose=0)
    for name in ("mn", "bn"):
        moving_mean = model.get_layer(name).moving_mean.numpy()
        assert_close([moving_mean], [[4.0, -3.0]], 0.06)
    assert_close([model.get_layer("bn").moving_variance.numpy()], [[1.0, 4.0]], 0.2)


def test_own_train_steps_and_an_optimizer_for_each_part_train(two):
    def make():
        parts = keras.optimizers.OptimizerMap(SGD(0.3), {".*embeddings": Adagrad(0.3)})
        return recsync.optimizers.MultiOptimizer(parts)

    ids, labels = soon_learned()
    for build, maker in ((OwnStep, lambda: Adagrad(0.3)), (functional, make)):
        model = compiled(two, build, maker, metrics=lambda: ["AUC"])
        history = model.fit(ids, labels, BATCH, epochs=3, verbose=0).history
        assert history["loss"][-1] < history["loss"][0]
        assert history["AUC"][-1] > 0.7
    parts = model.optimizer.optimizers
    assert sorted(type(part).__name__ for part in parts) == ["Adagrad", "SGD"]
    assert [int(part.iterations.numpy()) for part in parts] == [60, 60]


def test_two_models_and_two_strategies_on_one_cluster_do_not_disturb_each_other(two):
    other = recsync.AsyncStrategy(two.cluster)
    models = [
        compiled(strategy, slope_model, lambda: SGD(1.0), mean_output)
        for strategy in (two, two, other)
    ]
    for rounds in range(1, 3):
        for steps, model in zip((3, 5, 7), models, strict=True):
            ones = np.ones((steps, 1))
            model.fit(ones, ones, 1, verbose=0)
            assert steps_of(model) == rounds * steps
    assert [model.get_weights()[0].item() for model in models] == [-6.0, -10.0, -14.0]
    counts = [s.staleness(m).dense.count for s, m in zip((two, two, other), models, strict=True)]
    assert counts == [6, 10, 14]


# Callbacks.


def test_a_scheduled_learning_rate_takes_effect_in_its_epoch(two):
    model = compiled(two, slope_model, lambda: SGD(1.0), mean_output)
    rates = [0.5, 0.25, 0.0, 2.0]
    callbacks = [keras.callbacks.LearningRateScheduler(lambda epoch: rates[epoch]), Slopes()]
    ones = np.ones((40, 1))
    history = model.fit(ones, ones, 4, epochs=4, callbacks=callbacks, verbose=0).history
    assert history["slope"] == [-5.0, -7.5, -7.5, -27.5]
    assert history["learning_rate"] == rates


def test_early_stopping_and_checkpoints_and_tensorboard_work(two, tmp_path):
    model = compiled(two)
    callbacks = [
        keras.callbacks.EarlyStopping("val_loss", min_delta=10.0),
        keras.callbacks.ModelCheckpoint(
            str(tmp_path / "{epoch}.weights.h5"), save_weights_only=True
        ),
        keras.callbacks.TensorBoard(str(tmp_path / "logs"), write_graph=False),
    ]
    history = model.fit(
        dataset(160), epochs=9, validation_data=dataset(64), callbacks=callbacks, verbose=0
    ).history
    assert len(history["loss"]) == 2
    local = functional()
    local.load_weights(tmp_path / "2.weights.h5")
    assert_close(local.get_weights(), model.get_weights(), 0)
    recorded = events(tmp_path / "logs" / "train")
    assert recorded["scalars", "epoch_loss"] == pytest.approx(history["loss"], rel=1e-5)


def test_the_training_report_puts_speed_and_staleness_into_logs_and_tensorboard(two, tmp_path):
    model = compiled(two)
    report = recsync.callbacks.TrainingReport(str(tmp_path))
    before, after = [], []  # The report reads the clock between these two times.

    class Clock(keras.callbacks.Callback):
        def __init__(self, times):
            super().__init__()
            self._times = times

        def on_epoch_begin(self, epoch, logs=None):
            self._times.append(time.monotonic())

        def on_train_batch_end(self, batch, logs=None):
            self._ended = time.monotonic()

        def on_epoch_end(self, epoch, logs=None):
            self._times.append(self._ended)

    # What others do after the last batch is no training.
    waits = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: time.sleep(0.2))
    callbacks = [Clock(before), waits, report, Clock(after)]
    with compute_time(two, 0.02):
        history = model.fit(dataset(), epochs=2, callbacks=callbacks, verbose=0).history
    speeds = ["batches_per_second", "global_steps_per_second"]
    names = [*speeds, "staleness", "staleness_p99", "staleness_max", "lost_steps"]
    recorded = events(tmp_path)
    for name in names:
        assert recorded["scalars", f"recsync/{name}"] == pytest.approx(history[name], rel=1e-5)
    histograms = [tag for plugin, tag in recorded if plugin == "histograms"]
    assert len(histograms) == 1 and "staleness" in histograms[0]
    # TensorBoard shows a tag in one place only.
    assert ("scalars", histograms[0]) not in recorded
    # A push makes one step of the other worker staler, or none if that is in no step.
    for mean, largest in zip(history["staleness"], history["staleness_max"], strict=True):
        assert 1.0 <= mean <= 2.0
        assert (mean > 1.0) == (largest > 1)
    assert history[speeds[0]] == history[speeds[1]]
    assert all(type(steps) is int for steps in history["lost_steps"])
    for epoch, speed in enumerate(history[speeds[0]]):
        begin, end = 2 * epoch, 2 * epoch + 1
        seconds = len(dataset()) / speed
        assert before[end] - after[begin] <= seconds <= after[end] - before[begin]
    assert all(speed <= 2 / 0.02 for speed in history[speeds[0]])
    # Per epoch, each of the same number of updates; together the total.
    assert np.mean(history["staleness"]) == pytest.approx(two.staleness(model).dense.mean)


def test_stopping_in_mid_epoch_ends_fit_soon_and_the_next_fit_works(two):
    model = compiled(two, slope_model, lambda: SGD(1.0), mean_output)

    def stop():
        model.stop_training = True

    ones = np.ones((20_480, 1))  # For 200 seconds, of which far fewer are trained.
    with compute_time(two, 0.02):
        model.fit(ones, ones, 1, epochs=3, callbacks=[AtBatch(5, stop)], verbose=0)
    stopped = steps_of(model)
    assert 5 <= stopped < 10_000
    model.fit(ones[:2048], ones[:2048], 256, verbose=0)
    # No step of the first fit was still on its way when it returned.
    assert steps_of(model) == stopped + 8
    assert model.get_weights()[0] == -(stopped + 8)


@pytest.mark.cases("AsyncStrategy-10-10", "SyncStrategy-9-5")
@pytest.mark.parametrize(
    ("make", "batches", "global_steps"),
    [
        (recsync.AsyncStrategy, 10, 10),
        (recsync.SyncStrategy, 10, 5),
        (recsync.SyncStrategy, 9, 5),  # The last global batch has one local batch.
    ],
)
def test_the_figures_of_a_run_add_up(two, make, batches, global_steps):
    """Though the last call of Keras has less than `steps_per_execution` steps."""
    strategy = make(two.cluster)
    with strategy.scope():
        x = keras.Input((4,))
        hidden = keras.layers.Dense(3, use_bias=False)(x)
        model = keras.Model(x, keras.layers.Dense(1)(hidden))
        model.compile(recsync.optimizers.SGD(0.1), "mse", steps_per_execution=4)
    data = tf.data.Dataset.from_tensor_slices((np.ones((4 * batches, 4)), np.ones(4 * batches)))
    report = recsync.callbacks.TrainingReport()
    history = model.fit(data.batch(4), verbose=0, callbacks=[report]).history
    (per_batch,), (per_step,) = history["batches_per_second"], history["global_steps_per_second"]
    assert per_batch / per_step == pytest.approx(batches / global_steps)
    assert int(model.optimizer.iterations) == global_steps
    assert sum(strategy.worker_steps(model)) == batches
    aggregation = strategy.aggregation(model)
    dense = strategy.staleness(model).dense
    if aggregation is None:
        assert dense.count == batches * len(model.trainable_variables)
    else:
        assert aggregation.included == dense.count == batches * two.cluster.ps
