"""What has trained can be forgotten: a process may train many models, one after the other."""

import gc
import threading
import time
import weakref

import keras
import pytest
from helpers import BATCH, IDS, ROWS, compiled, dataset, functional
from tensorflow.python.eager import context

import tf_recsync as recsync
from tf_recsync.layers import EmbeddingCollection, FeatureConfig, TableConfig


def collected() -> keras.Model:
    """A model of clicks with an `EmbeddingCollection`, which normalizes the mean of each batch."""
    ids = keras.Input((IDS,), dtype="int32")
    pooled = EmbeddingCollection(
        [TableConfig("table", ROWS, 3, combiner="sum")],
        [FeatureConfig("ids", "table")],
        concatenate=True,
    )({"ids": ids})
    hidden = recsync.layers.MeanNormalization()(keras.layers.Dense(4, "relu")(pooled))
    return keras.Model(ids, keras.layers.Dense(1, "sigmoid")(hidden))


MAKERS = {
    "async": (recsync.AsyncStrategy, functional),
    "async with prefetched lookups": (
        lambda cluster: recsync.AsyncStrategy(cluster, prefetch_lookups=True),
        collected,
    ),
    "sync": (recsync.SyncStrategy, collected),
    "gba": (
        lambda cluster: recsync.GBAStrategy(cluster, 2 * BATCH, BATCH, staleness_tolerance=4),
        functional,
    ),
    "hop": (
        lambda cluster: recsync.HopStrategy(cluster, recsync.topology.ring(2)),
        functional,
    ),
    "shadow": (
        lambda cluster: recsync.ShadowSyncStrategy(cluster, recsync.EASGD(0.3)),
        collected,
    ),
}


def forget_until(done, seconds: float = 100.0) -> None:
    """Has Python and Keras forget: threads that end meanwhile may hold what they used last."""
    keras.utils.clear_session()
    deadline = time.monotonic() + seconds
    gc.collect()
    while not done() and time.monotonic() < deadline:
        time.sleep(0.2)
        gc.collect()


@pytest.mark.cases("gba", "hop")
@pytest.mark.parametrize("name", MAKERS)
def test_nothing_refers_to_a_trained_model_and_its_strategy(clusters, name, tmp_path):
    cluster = clusters.get(workers=2, ps=2)
    maker, build = MAKERS[name]

    def train():
        strategy = maker(cluster)
        model = compiled(strategy, build, steps_per_execution=2)
        model.fit(dataset(96), validation_data=dataset(32), verbose=0)
        model.predict(dataset(32), verbose=0)
        model.save_weights(tmp_path / "model.weights.h5")
        return [weakref.ref(o) for o in (strategy, model, model.optimizer, model.layers[-1])]

    left = train()
    forget_until(lambda: not any(reference() for reference in left))
    assert [reference() for reference in left] == [None] * len(left)


def kept() -> tuple[int, int]:
    """Functions that a connection takes along to each server, and threads."""
    names = context.context().list_function_names()
    # Those that wrap an op, one for each kind of op, are no model's.
    return sum(not name.startswith("__wrapped__") for name in names), threading.active_count()


def test_training_again_leaves_no_more_functions_and_threads(clusters):
    cluster = clusters.get(workers=2, ps=2)

    def train():
        compiled(recsync.AsyncStrategy(cluster), functional).fit(dataset(64), verbose=0)

    train()
    forget_until(lambda: False, 2.0)
    functions, threads = kept()
    for _ in range(3):
        train()
    forget_until(lambda: kept()[0] <= functions and kept()[1] <= threads)
    assert kept()[0] <= functions
    assert kept()[1] <= threads
