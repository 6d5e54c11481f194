"""What `compute_metrics` of a user's model makes of metrics, under the strategies."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_recsync as recsync
from tf_recsync import topology

WORKERS, BATCHES = 2, 6


@pytest.fixture(scope="module")
def cluster(clusters):
    return clusters.get(WORKERS, 1)


STRATEGIES = {
    "Async": recsync.AsyncStrategy,
    "Hop": lambda cluster: recsync.HopStrategy(cluster, topology.ring(WORKERS)),
    "ShadowSync": lambda cluster: recsync.ShadowSyncStrategy(cluster, recsync.EASGD(0.3)),
}


class Model(keras.Model):
    """Leaves one metric out in training, changes one, and derives one of two others."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")
        self.sums = [keras.metrics.Sum(name="labels"), keras.metrics.Sum(name="squares")]
        self.top = keras.metrics.Mean(name="top")

    def call(self, x):
        return self.dense(x)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.sums[0].update_state(y)
        self.sums[1].update_state(y * y)
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        results.pop("top")
        results["squares"] = keras.ops.sqrt(results["squares"])
        # No sum over workers of such: it has to be computed from sums over all.
        results["share"] = self.sums[0].result() / self.sums[1].result()
        return results


def dataset_of(labels):
    y = np.asarray(labels, np.float32)[:, None]
    return tf.data.Dataset.from_tensor_slices((np.ones_like(y), y)).batch(4)


def dataset():
    return dataset_of(np.arange(1.0, BATCHES * 4 + 1))


@pytest.mark.parametrize("kind", STRATEGIES)
def test_logs_are_what_compute_metrics_makes_of_merged_metrics(cluster, kind):
    with STRATEGIES[kind](cluster).scope():
        model = Model()
        model.compile(recsync.optimizers.SGD(0.0), "mse")
    history = model.fit(dataset(), validation_data=dataset(), epochs=2, verbose=0).history
    labels = np.arange(1.0, BATCHES * 4 + 1)
    expected = {
        "labels": labels.sum(),
        "squares": np.sqrt((labels**2).sum()),
        "share": labels.sum() / (labels**2).sum(),
        "loss": np.mean((labels - 1.0) ** 2),
    }
    assert set(history) == {*expected, *(f"val_{name}" for name in expected)}
    for name, value in expected.items():
        np.testing.assert_allclose(history[name], [value, value], rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(history[f"val_{name}"], [value, value], rtol=1e-5)


class Numbers(keras.Model):
    """Returns numbers that are no metrics, one under the name of a metric that it does not use."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(self(x, training=True) - y))
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss, "examples": tf.shape(x)[0], "is_full": tf.shape(x)[0] == 4}

    def test_step(self, data):
        logs = super().test_step(data)
        return {**logs, "largest": keras.ops.max(data[1])}


@pytest.mark.parametrize("kind", STRATEGIES)
def test_numbers_that_a_step_returns_are_those_of_each_workers_last_step(cluster, kind):
    with STRATEGIES[kind](cluster).scope():
        model = Numbers()
        model.compile(recsync.optimizers.SGD(0.0), "mse")
    last = dataset_of([3.0] * 3)
    # Only one worker has a batch.
    history = model.fit(last, validation_data=last, epochs=2, verbose=0).history
    expected = {"loss": 4.0, "examples": 3, "is_full": 0, "val_loss": 4.0, "val_largest": 3.0}
    assert history == {name: [value, value] for name, value in expected.items()}
    # Each has some; no metric: that would be the mean over all batches.
    history = model.fit(dataset_of([1.0] * 40 + [2.0] * 8), verbose=0).history
    assert history["examples"] == [4] and history["is_full"] == [1]
    assert history["loss"][0] in (0.5, 1.0)  # The last two batches may be one worker's, or not.


class Conditional(Numbers):
    """Updates a metric in a branch, and returns a number under the name of a compiled one.

    Where a step's variables are tensors, as on parameter servers, a branch can't assign them.
    """

    def __init__(self):
        super().__init__()
        self.mean = keras.metrics.Mean(name="mean")

    def train_step(self, data):
        logs = super().train_step(data)
        y = data[1]
        if isinstance(self.distribute_strategy, recsync.HopStrategy):
            tf.cond(y[0, 0] > 0, lambda: self.mean.update_state(y) or 0, lambda: 0)
        else:
            self.mean.update_state(y)
        # With the names of all metrics and no others, Keras takes their results.
        return {**logs, "mean": self.mean.result(), "mae": tf.constant(0.5)}


@pytest.mark.parametrize("kind", ["Async", "Hop"])
def test_metrics_that_branches_update_are_merged_and_unused_names_are_numbers(cluster, kind):
    with STRATEGIES[kind](cluster).scope():
        model = Conditional()
        model.compile(recsync.optimizers.SGD(0.0), "mse", metrics=["mae"])
    y = np.arange(1.0, BATCHES * 4 + 1)
    history = model.fit(dataset(), verbose=0).history
    np.testing.assert_allclose(history["mean"], [y.mean()], rtol=1e-6)
    assert history["mae"] == [0.5]


def test_a_name_may_be_a_number_in_one_fit_and_a_metric_in_the_next(cluster):
    class Changing(Numbers):
        def __init__(self):
            super().__init__()
            self.average = keras.metrics.Mean(name="average")

        def train_step(self, data):
            logs = super().train_step(data[:2])
            if len(data) == 2:
                return {**logs, "average": tf.constant(7.0)}
            self.average.update_state(data[1])
            return {"average": self.average.result()}

    with recsync.AsyncStrategy(cluster).scope():
        model = Changing()
        model.compile(recsync.optimizers.SGD(0.0))
    assert model.fit(dataset(), verbose=0).history["average"] == [7.0]
    weighted = dataset().map(lambda x, y: (x, y, tf.ones([tf.shape(x)[0]])))
    history = model.fit(weighted, verbose=0).history
    assert history == {"average": [np.arange(1.0, BATCHES * 4 + 1).mean()]}


@pytest.mark.parametrize("value", [None, "text", [1.0, 2.0], keras.metrics.Mean(name="m")])
def test_what_is_no_number_is_refused_by_name(cluster, value):
    class Other(Numbers):
        def train_step(self, data):
            return {**super().train_step(data), "other": value}

    with recsync.AsyncStrategy(cluster).scope():
        model = Other()
        model.compile(recsync.optimizers.SGD(0.0))
    with pytest.raises(ValueError, match=r"it returned \['other'\]. Report"):
        model.fit(dataset(), verbose=0)


def test_a_step_that_leaves_a_metric_out_has_no_value_for_it(cluster):
    class Leaving(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            logs = super().train_step(data)
            return {"loss": logs["loss"]}

    with recsync.AsyncStrategy(cluster).scope():
        model = Leaving()
        model.compile(recsync.optimizers.SGD(0.0), "mse", metrics=["mae"])
    history = model.fit(dataset(), validation_data=dataset(), verbose=0).history
    assert set(history) == {"loss", "val_loss", "val_mae"}


def test_metrics_that_are_never_reset_go_on_from_epoch_to_epoch(cluster):
    class Batches(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="batches")
            self.total = self.add_weight(shape=(), initializer="zeros", name="total")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.total.assign_add(1.0)

        def result(self):
            return self.total + 0.0

        def reset_state(self):
            pass

    with recsync.AsyncStrategy(cluster).scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(recsync.optimizers.SGD(0.0), "mse", metrics=[Batches()])
    data, steps = dataset().repeat(), BATCHES
    history = model.fit(data, steps_per_epoch=steps, epochs=3, verbose=0).history
    assert history["batches"] == [BATCHES, 2 * BATCHES, 3 * BATCHES]
    options = {"validation_data": data, "validation_steps": 2, "epochs": 2}
    history = model.fit(data, steps_per_epoch=steps, verbose=0, **options).history
    # The same metric counts the batches of the validation.
    assert history["batches"] == [4 * BATCHES, 5 * BATCHES + 2]
    assert history["val_batches"] == [4 * BATCHES + 2, 5 * BATCHES + 4]
