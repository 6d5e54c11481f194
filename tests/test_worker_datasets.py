"""strategy.distribute_datasets_from_function: every worker makes its batches itself."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    AtBatch,
    LabelSum,
    UntilAllGoOn,
    compiled,
    compute_time,
    mean_output,
    slope_model,
    steps_of,
    sums,
    wait_for_file,
    wait_until,
)

import tf_recsync as recsync
from tf_recsync.optimizers import SGD

EXAMPLES = 176
BATCH = 8
STEPS = 22  # Of two pipelines.


@pytest.fixture
def cluster(clusters):
    cluster = clusters.get(workers=2, ps=1)
    yield cluster
    if not cluster.is_alive("worker", 1):
        cluster.restart("worker", 1)
        cluster.readmit()


MAKERS = {
    "async": recsync.AsyncStrategy,
    "sync": recsync.SyncStrategy,
    "gba": lambda cluster: recsync.GBAStrategy(cluster, 2 * BATCH, BATCH, staleness_tolerance=4),
    "hop": lambda cluster: recsync.HopStrategy(cluster, recsync.topology.ring(2)),
    "shadow": lambda cluster: recsync.ShadowSyncStrategy(
        cluster, recsync.EASGD(0.3), threads_per_trainer=2
    ),
}


def numbers(context, examples: int = EXAMPLES) -> tf.data.Dataset:
    """This pipeline's part of the numbers from 0, in batches."""
    dataset = tf.data.Dataset.range(examples)
    dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id).batch(BATCH)
    return dataset.map(with_ones)


def with_ones(part: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """A batch of numbers as what the model takes, and as labels."""
    return tf.ones([tf.size(part), 1]), tf.cast(part, tf.float32)[:, None]


def model_of(strategy, metrics=sums, **kwargs) -> keras.Model:
    make = (
        (lambda: keras.optimizers.SGD(1.0)) if isinstance(strategy, recsync.HopStrategy) else None
    )
    return compiled(
        strategy, slope_model, make or (lambda: SGD(1.0)), mean_output, metrics=metrics, **kwargs
    )


def expected(examples: int = EXAMPLES) -> dict[str, float]:
    values = np.arange(examples, dtype=np.float64)
    return {"label_sum": values.sum(), "squares": (values**2).sum(), "examples": examples}


def seen(logs: dict, prefix: str = "") -> dict[str, float]:
    """What the metrics of `sums` say, of an epoch's logs."""
    return {name: float(logs[prefix + name]) for name in expected()}


class Seen(keras.callbacks.Callback):
    """Keeps what was seen in each epoch."""

    def on_train_begin(self, logs=None):
        self.epochs = []

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(seen(logs))


@pytest.mark.cases("gba", "hop")
@pytest.mark.parametrize("mode", MAKERS)
def test_all_batches_of_all_pipelines_are_trained_on_once_an_epoch(cluster, mode):
    strategy = MAKERS[mode](cluster)
    model, callback = model_of(strategy), Seen()
    datasets = strategy.distribute_datasets_from_function(numbers)
    model.fit(datasets, epochs=2, callbacks=[callback], verbose=0)
    assert callback.epochs == [expected()] * 2
    assert cluster.data_services.tasks() == 0  # None of it was made here.
    assert seen(model.evaluate(datasets, return_dict=True, verbose=0)) == expected()


def test_there_is_a_pipeline_for_each_thread_of_a_trainer(cluster):
    contexts = []

    def make(context):
        contexts.append(context)
        return numbers(context)

    strategy = MAKERS["shadow"](cluster)
    model = model_of(strategy, metrics=lambda: [])
    datasets = strategy.distribute_datasets_from_function(make)
    # Of 44 numbers each: 6 batches.
    assert datasets.cardinality == datasets.num_batches == 4 * 6
    model.fit(datasets, verbose=0)
    assert {context.num_input_pipelines for context in contexts} == {4}
    assert {context.input_pipeline_id for context in contexts} == {0, 1, 2, 3}


@pytest.mark.full
def test_several_steps_a_call_and_validation_work_as_with_a_dataset(cluster):
    strategy = recsync.AsyncStrategy(cluster)
    model = model_of(strategy, steps_per_execution=4)
    datasets = strategy.distribute_datasets_from_function(numbers)
    part = strategy.distribute_datasets_from_function(lambda context: numbers(context, 80))
    history = model.fit(datasets, validation_data=part, epochs=2, verbose=0).history
    assert history["val_examples"] == [80.0] * 2
    assert steps_of(model) == 2 * datasets.cardinality
    assert float(model.get_weights()[0].item()) == -2.0 * datasets.cardinality


def test_a_model_that_is_not_built_is_built_from_the_first_pipeline(cluster):
    strategy = recsync.AsyncStrategy(cluster)
    model = compiled(
        strategy,
        lambda: keras.Sequential([keras.layers.Dense(1, kernel_initializer="zeros")]),
        lambda: SGD(1.0),
        mean_output,
    )
    model.fit(strategy.distribute_datasets_from_function(numbers), verbose=0)
    assert model.get_weights()[0].shape == (1, 1)
    assert steps_of(model) == STEPS


def test_endless_datasets_are_trained_on_for_so_many_steps(cluster):
    strategy = recsync.AsyncStrategy(cluster)
    model, callback = model_of(strategy), Seen()
    datasets = strategy.distribute_datasets_from_function(lambda c: numbers(c).repeat())
    assert datasets.cardinality == tf.data.INFINITE_CARDINALITY and datasets.num_batches is None
    model.fit(datasets, steps_per_epoch=7, epochs=2, callbacks=[callback], verbose=0)
    assert [epoch["examples"] for epoch in callback.epochs] == [7 * BATCH] * 2
    assert steps_of(model) == 14
    logs = model.evaluate(datasets, steps=5, return_dict=True, verbose=0)
    assert seen(logs)["examples"] == 5 * BATCH
    with pytest.raises(ValueError, match="steps_per_epoch must be given.* no end"):
        model.fit(datasets, verbose=0)
    with pytest.raises(ValueError, match="^steps must be given"):
        model.evaluate(datasets, verbose=0)
    with pytest.raises(ValueError, match="^validation_steps must be given"):
        model.fit(datasets, steps_per_epoch=1, validation_data=datasets, verbose=0)


def test_datasets_of_unknown_length_are_trained_on_whole(cluster):
    strategy = recsync.AsyncStrategy(cluster)
    model, callback = model_of(strategy), Seen()
    datasets = strategy.distribute_datasets_from_function(
        lambda c: numbers(c).filter(lambda x, y: y[0, 0] >= 0)
    )
    assert datasets.cardinality == tf.data.UNKNOWN_CARDINALITY
    model.fit(datasets, epochs=2, callbacks=[callback], verbose=0)
    assert callback.epochs == [expected()] * 2


def test_a_faster_worker_gets_no_more_data(cluster):
    strategy = recsync.AsyncStrategy(cluster)
    model = model_of(strategy, metrics=lambda: [])
    slow = recsync.testing.SlowWorkers(4.0, [1])
    recsync.testing.set_compute_time(strategy, 0.005, slow)
    model.fit(strategy.distribute_datasets_from_function(numbers), verbose=0)
    assert strategy.worker_steps(model) == [STEPS // 2, STEPS // 2]


class Order(keras.metrics.Metric):
    """Tells orders of the labels apart: a sum weighted with their places."""

    def __init__(self):
        super().__init__(name="order", dtype="float64")
        self.total = self.add_variable((), initializer="zeros", dtype="float64", name="total")
        self.place = self.add_variable((), initializer="zeros", dtype="float64", name="place")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.place.assign_add(1.0)
        labels = keras.ops.sum(keras.ops.cast(y_true, "float64"))
        self.total.assign_add(labels * self.place)

    def result(self):
        return self.total + 0.0


def test_workers_keep_what_their_pipelines_keep(cluster):
    made = []

    def make(context):
        made.append(tf.constant(0).device)
        return numbers(context).cache().shuffle(100, seed=context.input_pipeline_id)

    strategy = recsync.AsyncStrategy(cluster)
    model = model_of(strategy, metrics=lambda: [Order()])
    datasets = strategy.distribute_datasets_from_function(make)
    orders = model.fit(datasets, epochs=3, verbose=0).history["order"]
    assert len(set(orders)) == 3  # As with a dataset, a seed gives each epoch another order.
    assert sum("job:worker" in device for device in made) == 2


def restart_meanwhile(cluster):
    """Kills a worker, and starts it again while training goes on."""
    cluster.kill("worker", 1)
    threading.Thread(target=cluster.restart, args=("worker", 1)).start()


def test_a_worker_killed_in_mid_epoch_takes_part_again(cluster, caplog):
    strategy = recsync.AsyncStrategy(cluster)
    model = model_of(strategy, metrics=lambda: [])
    endless = strategy.distribute_datasets_from_function(lambda c: numbers(c).repeat())

    then = []  # The steps that each had done when the worker was back.

    class WhenItIsBack(AtBatch):
        def on_train_batch_end(self, batch, logs=None):
            super().on_train_batch_end(batch, logs)
            if not then and "worker:1 is back" in caplog.text:
                then.extend(strategy.worker_steps(model))

    callbacks = [WhenItIsBack(10, lambda: restart_meanwhile(cluster)), UntilAllGoOn(then)]
    with compute_time(strategy, 0.05):
        model.fit(endless, steps_per_epoch=100_000, callbacks=callbacks, verbose=0)
    assert strategy.worker_steps(model)[1] > then[1]
    assert strategy.losses(model).workers == 1


def digits(total: float, count: int) -> list[int]:
    """The last digits of a number to the base of 4, from the last on.

    Of a sum of labels 4^0, 4^1 and so on, that is how often there was each, up to three times.
    """
    return [int(total) // 4**i % 4 for i in range(count)]


def test_a_worker_that_is_back_in_mid_epoch_goes_on_after_what_it_had(cluster, caplog, tmp_path):
    batches, is_back = 24, tmp_path / "is back"

    def made(i):
        # Both have something left to do until then, however long it takes.
        late = tf.cond(i >= 12, lambda: wait_for_file(str(is_back)), tf.no_op)
        with tf.control_dependencies([late]):
            return tf.ones([1, 1]), 4.0 ** tf.cast([[i]], tf.float64)

    def make(context):
        part = tf.data.Dataset.range(batches)
        part = part.shard(context.num_input_pipelines, context.input_pipeline_id)
        return part.map(made)

    def tell():
        wait_until(lambda: "worker:1 is back" in caplog.text, 200)
        is_back.touch()

    def restart_and_tell():
        restart_meanwhile(cluster)
        threading.Thread(target=tell).start()

    strategy = recsync.AsyncStrategy(cluster)
    model = model_of(strategy, metrics=lambda: [LabelSum()])

    with compute_time(strategy, 0.5):
        history = model.fit(
            strategy.distribute_datasets_from_function(make),
            callbacks=[AtBatch(2, restart_and_tell)],
            verbose=0,
        ).history
    times = digits(history["label_sum"][0], batches)
    losses = strategy.losses(model)
    assert "worker:1 is back" in caplog.text
    # The step in flight is done again, and may have been counted.
    assert sum(max(n - 1, 0) for n in times) <= losses.steps <= 1
    # What it had counted is lost with it, but for what was read; the last ones it had after.
    assert times[0::2] == [1] * 12 and times[-1] == 1
    assert losses.batches == 0
    assert batches <= steps_of(model) <= batches + losses.steps


def restart(cluster):
    cluster.kill("worker", 1)
    cluster.restart("worker", 1)
    cluster.readmit()


def test_all_pipelines_of_a_worker_that_was_started_again_are_made_anew(cluster):
    strategy = MAKERS["shadow"](cluster)
    model = model_of(strategy)
    datasets = strategy.distribute_datasets_from_function(numbers)
    for _ in range(2):  # Those of a worker's two threads are one here.
        assert seen(model.evaluate(datasets, return_dict=True, verbose=0)) == expected()
        restart(cluster)


def test_workers_that_have_more_go_on_without_those_that_have_none_left(cluster):
    def make(context):
        # Of the 22 batches one has 18.
        first = 18 * BATCH
        part = tf.data.Dataset.range(EXAMPLES)
        part = part.skip(first) if context.input_pipeline_id else part.take(first)
        return part.batch(BATCH).map(with_ones)

    strategy = recsync.SyncStrategy(cluster)
    model, callback = model_of(strategy), Seen()
    model.fit(strategy.distribute_datasets_from_function(make), callbacks=[callback], verbose=0)
    assert callback.epochs == [expected()]
    assert strategy.worker_steps(model) == [18, 4]


def test_a_worker_started_again_between_two_epochs_makes_its_datasets_anew(cluster):
    strategy = recsync.AsyncStrategy(cluster)
    model, callback = model_of(strategy), Seen()
    datasets = strategy.distribute_datasets_from_function(numbers)
    model.fit(datasets, callbacks=[callback], verbose=0)
    assert callback.epochs == [expected()]
    restart(cluster)
    model.fit(datasets, callbacks=[callback], verbose=0)
    assert callback.epochs == [expected()]


def test_workers_wait_for_what_their_pipelines_take(cluster):
    strategy = recsync.AsyncStrategy(cluster)

    batches, seconds = 8, 0.25  # Of a pipeline; that each of them takes to be made.

    def slow(context):
        # By an op that waits, and runs on the worker.
        return numbers(context, 2 * batches * BATCH).map(
            lambda x, y: (recsync.ops.transfer(x, 4 * BATCH / seconds), y)
        )

    model = model_of(strategy, metrics=lambda: [LabelSum()])
    model.fit(strategy.distribute_datasets_from_function(slow), verbose=0)
    # The first ones may be made before a worker begins, and others while it computes, or stands
    # still on a busy machine.
    assert min(strategy.data_wait(model)) > 0.25 * batches * seconds


def test_python_in_the_datasets_runs_in_this_process(cluster):
    strategy, called = recsync.AsyncStrategy(cluster), []

    def take(x):
        called.append(len(x))
        return x

    def make(context):
        python = numbers(context).map(lambda x, y: (tf.numpy_function(take, [x], tf.float32), y))
        return python.map(lambda x, y: (tf.ensure_shape(x, [None, 1]), y))

    model, callback = model_of(strategy), Seen()
    datasets = strategy.distribute_datasets_from_function(make)
    model.fit(datasets, callbacks=[callback], verbose=0)
    assert callback.epochs == [expected()]
    assert sum(called) >= EXAMPLES  # Keras has looked at the first ones.


# What can't work is refused.


@pytest.mark.parametrize(
    "use",
    [
        lambda outside: outside,
        lambda outside: outside.repeat(2),
        lambda outside: tf.data.Dataset.range(2).flat_map(lambda _: outside),
    ],
    ids=["as it is", "transformed", "in a function"],
)
def test_a_dataset_that_was_made_outside_is_refused(cluster, use):
    strategy = recsync.AsyncStrategy(cluster)
    model = compiled(strategy, slope_model, lambda: SGD(0.01), mean_output)
    outside = tf.data.Dataset.range(EXAMPLES).batch(BATCH).map(with_ones)
    own = strategy.distribute_datasets_from_function(lambda _: use(outside))
    with pytest.raises(ValueError, match="made outside of it.*make all datasets inside of"):
        model.fit(own, steps_per_epoch=STEPS, verbose=0)


def test_functions_that_return_no_datasets_are_refused(cluster):
    strategy = recsync.AsyncStrategy(cluster)
    with pytest.raises(ValueError, match="dataset_fn must be a function.*not 3"):
        strategy.distribute_datasets_from_function(3)
    with pytest.raises(ValueError, match="dataset_fn must return a tf.data.Dataset, not None"):
        strategy.distribute_datasets_from_function(lambda context: None)
    with pytest.raises(ValueError, match="options must be None"):
        strategy.distribute_datasets_from_function(numbers, tf.distribute.InputOptions())


def test_pipelines_of_different_types_are_refused(cluster):
    def other_dtype(context):
        dtype = tf.float32 if context.input_pipeline_id == 0 else tf.float64
        return numbers(context).map(lambda x, y: (x, tf.cast(y, dtype)))

    def less_known_shape(context):
        return numbers(context).map(
            lambda *batch: [
                part if context.input_pipeline_id else tf.ensure_shape(part, [BATCH, 1])
                for part in batch
            ]
        )

    strategy = recsync.AsyncStrategy(cluster)
    for make, message in ((other_dtype, "float32.*of 1.*float64"), (less_known_shape, "8.*None")):
        with pytest.raises(ValueError, match=f"(?s)one type.*pipeline 0.*{message}"):
            model_of(strategy).fit(strategy.distribute_datasets_from_function(make), verbose=0)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"y": np.zeros([EXAMPLES, 1])}, "y"),
        ({"sample_weight": np.zeros([EXAMPLES])}, "sample_weight"),
        ({"class_weight": {0: 1.0, 1: 2.0}}, "class_weight"),
    ],
)
def test_what_keras_would_ignore_is_refused(cluster, arguments, name):
    strategy = recsync.AsyncStrategy(cluster)
    datasets = strategy.distribute_datasets_from_function(numbers)
    with pytest.raises(ValueError, match=f"^{name} can't be given beside"):
        model_of(strategy).fit(datasets, **arguments, verbose=0)


def test_datasets_of_another_strategy_or_cluster_are_refused(cluster):
    one, other = recsync.AsyncStrategy(cluster), MAKERS["shadow"](cluster)
    model = model_of(other)
    with pytest.raises(ValueError, match="2 input pipelines, this strategy has .* and 4: make"):
        model.fit(one.distribute_datasets_from_function(numbers), verbose=0)
    same = recsync.SyncStrategy(cluster)  # With as many pipelines: a change of mode.
    model_of(same).fit(one.distribute_datasets_from_function(numbers), verbose=0)


def test_a_model_from_outside_of_the_scope_can_not_use_them(cluster):
    datasets = recsync.AsyncStrategy(cluster).distribute_datasets_from_function(numbers)
    model = slope_model()
    model.compile("sgd", "mse")
    for call in (model.fit, model.evaluate):
        with pytest.raises(TypeError, match="for fit and evaluate of a model that was made in"):
            call(datasets, verbose=0)


def test_a_function_that_failed_once_can_be_tried_again(cluster):
    fails = [True]

    def make(context):
        if context.input_pipeline_id == 1 and fails:
            raise OSError("no such file")
        return numbers(context)

    datasets = recsync.AsyncStrategy(cluster).distribute_datasets_from_function(make)
    with pytest.raises(OSError, match="no such file"):
        _ = datasets.cardinality
    fails.clear()
    assert datasets.cardinality == STEPS


def test_predictions_whose_order_would_be_open_are_refused(cluster):
    strategy = recsync.AsyncStrategy(cluster)
    model = model_of(strategy)
    with pytest.raises(ValueError, match="predict needs a dataset or arrays"):
        model.predict(strategy.distribute_datasets_from_function(numbers), verbose=0)


def test_an_error_in_a_pipeline_ends_training_with_it(cluster):
    def make(context):
        return numbers(context).map(lambda x, y: (tf.debugging.check_numerics(x / 0.0, "row 7"), y))

    strategy = recsync.AsyncStrategy(cluster)
    with pytest.raises(tf.errors.InvalidArgumentError, match="row 7"):
        model_of(strategy).fit(strategy.distribute_datasets_from_function(make), verbose=0)


def test_servers_in_this_process_make_their_batches_too(clusters):
    clusters.close()  # One at a time.
    with recsync.LocalCluster(workers=2, ps=1, processes=0) as cluster:
        strategy = recsync.AsyncStrategy(cluster)
        model, callback = model_of(strategy), Seen()
        datasets = strategy.distribute_datasets_from_function(numbers)
        model.fit(datasets, epochs=2, callbacks=[callback], verbose=0)
        assert callback.epochs == [expected()] * 2
