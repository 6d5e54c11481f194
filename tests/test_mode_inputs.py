"""What the strategies of the training modes refuse, before anything runs."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import LOSS, OwnStep, clicks, compiled, dataset, functional
from simulated_modes import ROWS

import tf_recsync as recsync
from tf_recsync.optimizers import SGD, Adam


@pytest.fixture
def three(clusters):
    return clusters.get(workers=3, ps=2)


def test_the_modes_are_the_rows_of_the_table(three):
    assert recsync.AsyncStrategy(three).mode == ROWS["async"]
    assert recsync.SyncStrategy(three).mode == ROWS["sync"]
    sync = recsync.SyncStrategy(three, global_batch_size=8, local_batch_size=4)
    assert sync.mode == ROWS["sync, two batches"]
    assert recsync.BSPStrategy(three, 16, 4).mode == ROWS["BSP"]
    assert recsync.GBAStrategy(three, 12, 4, staleness_tolerance=1).mode == ROWS["GBA"]
    decayed = recsync.GBAStrategy(three, 8, 4, staleness_tolerance=1, decay="inverse_power")
    assert decayed.mode == ROWS["GBA, decayed"]
    assert recsync.BackupWorkersStrategy(three, 1).mode == ROWS["backup workers"]
    assert recsync.BoundedStalenessStrategy(three, 1).mode == ROWS["bounded staleness"]


def test_a_mode_is_the_same_without_a_cluster():
    modes = recsync.modes
    assert modes.Async().on(3) == ROWS["async"]
    assert modes.Sync().on(3) == ROWS["sync"]
    assert modes.Sync(global_batch_size=8, local_batch_size=4).on(3) == ROWS["sync, two batches"]
    assert modes.BSP(global_batch_size=16, local_batch_size=4).on(3) == ROWS["BSP"]
    gba = modes.GBA(global_batch_size=12, local_batch_size=4, staleness_tolerance=1)
    assert gba.on(3) == ROWS["GBA"]
    assert modes.BackupWorkers(backup_workers=1).on(3) == ROWS["backup workers"]
    assert modes.BoundedStaleness(staleness_bound=1).on(3) == ROWS["bounded staleness"]
    with pytest.raises(ValueError, match="workers must be an integer of at least 1, got 0"):
        modes.Async().on(0)


@pytest.mark.parametrize(
    ("options", "weights"),
    [({}, [1, 0]), ({"decay": "inverse_power"}, [1, (5 / 6) ** 2]), ({"decay": "policy"}, None)],
)
def test_gba_tolerates_an_age_of_four_where_nothing_else_is_said(three, options, weights):
    if weights is None:
        options, weights = {"decay": POLICY}, [1 / 25, 1 / 36]
    weight = recsync.GBAStrategy(three, 12, 4, **options).mode.weight
    # The policy's tau is the age plus 1.
    np.testing.assert_allclose([weight(5), weight(6)], weights)


POLICY = recsync.staleness.InversePower(k=2)
LIVELY = recsync.staleness.InversePower(k=2, update_sensitivity=1.0)
RESCALED = recsync.staleness.InversePower(k=2, rescale=recsync.staleness.Rescale(2.0, 1.0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda c: recsync.SyncStrategy(c, global_batch_size=10, local_batch_size=4),
            "global_batch_size must be a multiple of local_batch_size=4, not 10",
        ),
        (
            lambda c: recsync.SyncStrategy(c, global_batch_size=8),
            "local_batch_size must be an integer of at least 1, got None",
        ),
        (
            lambda c: recsync.SyncStrategy(c, local_batch_size=0),
            "local_batch_size must be an integer of at least 1, got 0",
        ),
        (
            lambda c: recsync.BSPStrategy(c, 4, 8),
            "global_batch_size must be a multiple of local_batch_size=8, not 4",
        ),
        (
            lambda c: recsync.BSPStrategy(c, 0, 8),
            "global_batch_size must be an integer of at least 1, got 0",
        ),
        (
            lambda c: recsync.GBAStrategy(c, 9, 4, staleness_tolerance=0),
            "global_batch_size must be a multiple of local_batch_size=4, not 9",
        ),
        (
            lambda c: recsync.GBAStrategy(c, 8, 4, staleness_tolerance=-1),
            "staleness_tolerance must be an integer of at least 0, got -1",
        ),
        (
            lambda c: recsync.GBAStrategy(c, 8, 4, staleness_tolerance=1, decay="exponential"),
            "decay must be 'threshold', 'inverse_power' or a policy.*, not 'exponential'",
        ),
        (
            lambda c: recsync.GBAStrategy(c, 8, 4, staleness_tolerance=1, decay=None),
            "decay must be 'threshold', 'inverse_power' or a policy.*, not None",
        ),
        (
            lambda c: recsync.GBAStrategy(c, 8, 4, staleness_tolerance=1, decay=POLICY),
            "staleness_tolerance must be None with a policy as decay, not 1",
        ),
        (
            lambda c: recsync.GBAStrategy(c, 8, 4, decay=RESCALED),
            "decay must depend on the token's age alone, not InversePower.*Rescale",
        ),
        (
            lambda c: recsync.GBAStrategy(c, 8, 4, decay=LIVELY),
            "decay must depend on the token's age alone, not InversePower",
        ),
        (
            lambda c: recsync.BackupWorkersStrategy(c, 3),
            "backup_workers must be less than the cluster's 3 workers, not 3",
        ),
        (
            lambda c: recsync.BackupWorkersStrategy(c, -1),
            "backup_workers must be an integer of at least 0, got -1",
        ),
        (
            lambda c: recsync.BackupWorkersStrategy(c, True),
            "backup_workers must be an integer of at least 0, got True",
        ),
        (
            lambda c: recsync.BoundedStalenessStrategy(c, -1),
            "staleness_bound must be an integer of at least 0, got -1",
        ),
        (
            lambda c: recsync.BoundedStalenessStrategy(c, 1.5),
            "staleness_bound must be an integer of at least 0, got 1.5",
        ),
    ],
)
def test_arguments_are_refused_by_name(three, make, message):
    with pytest.raises(ValueError, match=message):
        make(three)


MAKERS = {
    "SyncStrategy": recsync.SyncStrategy,
    "BSPStrategy": lambda c: recsync.BSPStrategy(c, 8, 4),
    "GBAStrategy": lambda c: recsync.GBAStrategy(c, 8, 4, staleness_tolerance=0),
    "BackupWorkersStrategy": lambda c: recsync.BackupWorkersStrategy(c, 0),
    "BoundedStalenessStrategy": lambda c: recsync.BoundedStalenessStrategy(c, 0),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("job", ["worker", "ps"])
def test_a_cluster_without_workers_or_servers_is_refused(name, job):
    lacking = recsync.Cluster(
        {job: ["127.0.0.1:9"]}, chief_address="127.0.0.1:9", bind_address="127.0.0.1"
    )
    with pytest.raises(ValueError, match=f"{name} needs at least one worker and one ps.*=0"):
        MAKERS[name](lacking)


def test_data_in_batches_of_another_size_are_refused(three):
    strategy = recsync.GBAStrategy(three, 16, 8, staleness_tolerance=0)
    model = compiled(strategy)
    weights = model.get_weights()
    static = tf.data.Dataset.from_tensor_slices(clicks(64)).batch(16, drop_remainder=True)
    with pytest.raises(ValueError, match="batches have 16 examples, local_batch_size is 8"):
        model.fit(static, verbose=0)
    with pytest.raises(ValueError, match="batches have 32 examples, local_batch_size is 8"):
        model.fit(*clicks(64), verbose=0)
    for before, after in zip(weights, model.get_weights(), strict=True):
        np.testing.assert_array_equal(before, after)
    # What is validated on may come in others.
    model.fit(
        *clicks(64), batch_size=8, validation_data=clicks(64), validation_batch_size=32, verbose=0
    )
    assert int(model.optimizer.iterations.numpy()) == 4


def shadow(cluster):
    return recsync.ShadowSyncStrategy(cluster, recsync.EASGD(0.3))


class Twice(OwnStep):
    def train_step(self, data):
        super().train_step(data)
        return super().train_step(data)


@pytest.mark.parametrize("make", [recsync.SyncStrategy, recsync.AsyncStrategy, shadow])
def test_a_step_that_pushes_twice_is_refused(three, make):
    with pytest.raises(ValueError, match="gradients by adagrad more than once.*sum of the losses"):
        compiled(make(three), Twice).fit(dataset(64), verbose=0)


@pytest.mark.cases("SyncStrategy-table", "GBAStrategy-out")
@pytest.mark.parametrize("layer", ["table", "hidden", "out"])
@pytest.mark.parametrize("mode", ["SyncStrategy", "GBAStrategy"])
def test_layers_frozen_after_compiling_are_refused_with_what_to_do(three, layer, mode):
    strategy = MAKERS[mode](three)
    with strategy.scope():
        model = functional()
        model.compile(SGD(0.1), LOSS)
        model.optimizer.build(model.trainable_variables)
    frozen = model.get_layer(layer)
    frozen.trainable = False
    # Some of a server's variables, or all: a server that gets nothing would stop all.
    before = [v.numpy() for v in frozen.variables]
    data = tf.data.Dataset.from_tensor_slices(clicks(24)).batch(4)
    if layer == "table":
        model.fit(data, verbose=0)  # Rows that nobody looks up need no gradient.
    else:
        with pytest.raises(ValueError, match="trainable = False.*compile again"):
            model.fit(data, verbose=0)
    # As the message says.
    with strategy.scope():
        model.compile(SGD(0.1), LOSS)
    model.fit(data, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 6 // strategy.mode.capacity
    for old, variable in zip(before, frozen.variables, strict=True):
        np.testing.assert_array_equal(old, variable.numpy())


@pytest.mark.parametrize(
    "make",
    [lambda: SGD(0.1, weight_decay=0.1), lambda: Adam(0.1, lazy=False)],
    ids=["decay", "adam"],
)
def test_a_table_that_is_frozen_later_neither_decays_nor_goes_on_moving(three, make):
    strategy = recsync.SyncStrategy(three)
    with strategy.scope():
        inputs = keras.Input((4,), dtype="int32")
        with strategy.placed_on(0):
            tables = [keras.layers.Embedding(24, width, name=f"t{width}") for width in (2, 3)]
            rows = keras.layers.concatenate([table(inputs) for table in tables])
        outputs = keras.layers.Dense(1, "sigmoid")(keras.layers.Flatten()(rows))
        model = keras.Model(inputs, outputs)
        model.compile(make(), LOSS)
    # Rows from 10 on get no gradients.
    data = tf.data.Dataset.from_tensors((np.arange(40).reshape(10, 4) % 10, np.ones((10, 1))))
    model.fit(data.repeat(6), verbose=0)
    tables[0].trainable = False
    with strategy.scope():
        model.compile(model.optimizer, LOSS)
    before = [table.get_weights()[0] for table in tables]
    model.fit(data.repeat(6), verbose=0)
    after = [table.get_weights()[0] for table in tables]
    np.testing.assert_array_equal(after[0], before[0])
    assert np.all(after[1][:10] != before[1][:10])
    # As many steps again, each of which takes away a hundredth of what is there.
    kept = 0.99**2 if model.optimizer.weight_decay else 1.0
    np.testing.assert_allclose(after[1][10:], kept * before[1][10:], 1e-6)


def test_a_server_whose_variables_are_all_frozen_is_refused_too(three):
    strategy = recsync.SyncStrategy(three)
    with strategy.scope():
        inputs = keras.Input((4,), dtype="int32")
        with strategy.placed_on(0):
            table = keras.layers.Embedding(24, 3, name="table")
            rows = table(inputs)
        with strategy.placed_on(1):
            outputs = keras.layers.Dense(1, "sigmoid")(keras.layers.Flatten()(rows))
        model = keras.Model(inputs, outputs)
        model.compile(SGD(0.1), LOSS)
        model.optimizer.build(model.trainable_variables)
    table.trainable = False
    with pytest.raises(ValueError, match=r"\['table/embeddings'\] on .*ps.*task:0.*compile again"):
        model.fit(dataset(64), verbose=0)
