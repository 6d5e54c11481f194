"""The memory that a model takes on each server, against sums by hand and the system's figures."""

import keras
import pytest

import tf_recsync as recsync
from tf_recsync.optimizers import SwapAdagrad

ROWS, WIDTH = 1_000_000, 8


@pytest.fixture
def cluster(clusters):
    return clusters.get(workers=2, ps=2)


def click_model(strategy, shards: int) -> keras.Model:
    with strategy.scope():
        ids = keras.Input((), dtype="int64", name="id")
        vectors = recsync.layers.EmbeddingCollection(
            [recsync.layers.TableConfig("table", ROWS, WIDTH, shards=shards)],
            [recsync.layers.FeatureConfig("id", table="table")],
            concatenate=True,
        )({"id": ids})
        model = keras.Model({"id": ids}, keras.layers.Dense(4, name="dense")(vectors))
        optimizer = SwapAdagrad(0.1, swap=recsync.Swap(period=10, decay=0.5))
        model.compile(optimizer, "mse")
        optimizer.build(model.trainable_variables)
    return model


def test_tables_and_what_lies_beside_their_rows_are_counted_where_they_are(cluster):
    strategy = recsync.AsyncStrategy(cluster)
    model = click_model(strategy, 2)
    first, second, *workers = strategy.memory(model)
    assert [(m.job, m.index) for m in (first, second)] == [("ps", 0), ("ps", 1)]
    for server in (first, second):
        # Half of the rows: values and accumulators of float32, versions of int64, periods of int32.
        assert server.tables == server.slots == ROWS // 2 * WIDTH * 4
        assert server.per_row == ROWS // 2 * 12
        total = server.tables + server.slots + server.per_row + server.dense
        assert server.total == total
        assert server.resident > server.total  # With TensorFlow, and what tests before have left.
    # A kernel [8, 4] and a bias [4], each with accumulators, a version, a period, counters.
    assert 2 * 36 * 4 < first.dense + second.dense < 64 << 10
    assert all(worker.total == 0 and worker.resident > 0 for worker in workers)
    assert str(first).startswith(
        "ps:0 36.2 MiB (tables 15.3, slots 15.3, per_row 5.7, dense 0.0), "
    )


def small_model(strategy) -> keras.Model:
    with strategy.scope():
        return keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])


def test_copies_are_counted_with_those_who_hold_them_and_the_center_on_sync_servers(cluster):
    strategy = recsync.ShadowSyncStrategy(cluster, recsync.EASGD(0.3), sync_ps=1)
    model = click_model(strategy, 1)
    embedding, sync, *workers = strategy.memory(model)
    assert embedding.tables == ROWS * WIDTH * 4
    assert (sync.tables, sync.dense) == (0, 36 * 4)
    assert len({worker.dense for worker in workers}) == 1
    assert 2 * 36 * 4 < workers[0].dense < 64 << 10


def test_a_server_that_is_gone_has_no_measured_memory_and_a_model_has_to_be_built(cluster):
    strategy = recsync.AsyncStrategy(cluster)
    with strategy.scope(), pytest.raises(ValueError, match="must be built"):
        strategy.memory(keras.Sequential([keras.layers.Dense(1)]))
    cluster.kill("worker", 1)
    try:
        *others, last = strategy.memory(small_model(strategy))
        assert (last.job, last.index, last.resident) == ("worker", 1, None)
        assert "resident not known" in str(last)
        assert all(server.resident > 0 for server in others)
    finally:
        cluster.restart("worker", 1)
