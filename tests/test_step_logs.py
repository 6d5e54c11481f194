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


def dataset():
    y = np.arange(1.0, BATCHES * 4 + 1, dtype=np.float32)[:, None]
    return tf.data.Dataset.from_tensor_slices((np.ones_like(y), y)).batch(4)


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
