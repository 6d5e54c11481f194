"""EmbeddingCollections and their optimizers: memory, copies, checkpoints, on any number of servers."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_close, steps_of
from test_embedding_collection import click_data, click_model, collection, tables_of

import tf_recsync as recsync
from tf_recsync.layers import EmbeddingCollection, FeatureConfig, TableConfig

TABLES = [TableConfig("films", 40, 4, "normal"), TableConfig("users", 25, 2, "normal")]
VALUES = 40 * 4 * 4 + 25 * 2 * 4


@pytest.fixture(autouse=True)
def _seeded():
    keras.utils.set_random_seed(3)


# Memory.


@pytest.mark.parametrize(
    ("make", "slots", "overhead"),
    [
        (lambda **k: recsync.optimizers.SGD(0.1, **k), 0, 8),
        (lambda **k: recsync.optimizers.Adagrad(0.1, **k), 1, 8),
        (lambda **k: recsync.optimizers.Adagrad(0.1, use_ema=True, **k), 2, 8),
        (lambda **k: recsync.optimizers.Adam(0.1, swap=recsync.Swap(3, 0.5), **k), 2, 24),
        (
            lambda **k: recsync.optimizers.Ftrl(
                0.1,
                swap=recsync.Swap(3, 0.5),
                staleness=recsync.staleness.InversePower(update_sensitivity=1.0),
                **k,
            ),
            2,
            20,
        ),
    ],
)
def test_an_optimizer_says_what_it_keeps_and_a_layer_counts_it(make, slots, overhead):
    optimizer = make()
    assert (optimizer.slots, optimizer.bytes_per_row_overhead) == (slots, overhead)
    needed = VALUES * (1 + slots) + 65 * overhead
    layer = collection(memory_limit=needed, slots=slots, bytes_per_row_overhead=overhead)
    layer.build()
    optimizer.build(layer.trainable_variables)
    held = [v for v in optimizer.variables if len(v.shape) and "staleness" not in v.path]
    assert sum(v.value.numpy().nbytes for v in [*layer.variables, *held]) == needed
    assert layer.placement.memory.tolist() == [needed]
    with pytest.raises(ValueError, match=f"memory_limit={needed - 1}"):
        collection(memory_limit=needed - 1, slots=slots, bytes_per_row_overhead=overhead).build()


def test_an_optimizer_that_keeps_more_than_the_layer_counted_is_refused():
    layer = collection(memory_limit=2 * VALUES + 65 * 8)
    layer.build()
    recsync.optimizers.Adagrad(0.1).build(layer.trainable_variables)
    message = (
        f"server 0 would hold {3 * VALUES + 65 * 16} bytes .* memory_limit={2 * VALUES + 65 * 8}.*"
        f"'films' with {40 * (4 * 4 * 3 + 16)} bytes there .with slots=2, bytes_per_row_overhead=16"
    )
    with pytest.raises(ValueError, match=message):
        recsync.optimizers.Adam(0.1).build(layer.trainable_variables)


def test_the_memory_of_a_given_placement_is_checked():
    plan = recsync.plan_placement(TABLES, ps=1)
    collection(placement=plan, memory_limit=2 * VALUES + 65 * 8).build()
    with pytest.raises(ValueError, match="server 0 .* table 'films' with 1600 bytes"):
        collection(placement=plan, memory_limit=2 * VALUES + 65 * 8 - 1).build()


def test_memory_splits_tables_over_servers(clusters):
    strategy = clusters.strategy(1, 2)
    with strategy.scope():
        whole = collection()
        whole.build()
        split = collection(memory_limit=1120)
        split.build()
    assert max(split.placement.memory) <= 1120
    assert len(split.placement.shards) >= len(whole.placement.shards)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"slots": -1}, "slots=-1: must be at least 0"),
        ({"bytes_per_row_overhead": -8}, "bytes_per_row_overhead=-8"),
        ({"memory_limit": 0}, "memory_limit=0"),
    ],
)
def test_wrong_memory_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        collection(**arguments)


# Copies.


def skewed_plan(ps: int) -> recsync.PlacementPlan:
    """Not what would be planned by size: films are split, and users are on the first server."""
    return recsync.plan_placement(
        [TableConfig("films", 40, 4, shards=ps), TABLES[1]], ps, {"films": 1, "users": 9}
    )


def test_copies_keep_a_given_placement_where_it_fits(clusters, tmp_path):
    strategy = clusters.strategy(1, 2)
    plan = skewed_plan(2)
    with strategy.scope():
        planned = collection()
        planned.build()
        assert planned.placement != plan
        model = click_model(collection("mean", placement=plan, name="embed"))
        model.compile(recsync.optimizers.Adagrad(0.1), "mse")
    model.fit(click_data(), epochs=1, verbose=0)
    model.save(tmp_path / "model.keras")
    with strategy.scope():
        copies = [
            keras.models.clone_model(model),
            keras.saving.load_model(tmp_path / "model.keras"),
        ]
    for copy in copies:
        assert copy.get_layer("embed").placement == plan
        assert copy.get_layer("embed").get_config() == model.get_layer("embed").get_config()
    assert_close(tables_of(copies[1]), tables_of(model))
    copies[1].fit(click_data(), epochs=1, verbose=0)

    strategy = clusters.strategy(1, 3)
    local = keras.saving.load_model(tmp_path / "model.keras")
    assert local.get_layer("embed").placement.ps == 1
    with strategy.scope():
        other = keras.saving.load_model(tmp_path / "model.keras")
    assert other.get_layer("embed").placement.ps == 3
    assert_close(tables_of(other), tables_of(local))
    # Saved again, it still knows the placement that was given.
    assert other.get_layer("embed").get_config()["placement"]["config"]["ps"] == 2
    other.fit(click_data(), epochs=1, verbose=0)
