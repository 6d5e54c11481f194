"""Memory, copies and checkpoints of EmbeddingCollections, on any number of servers."""

import contextlib
import dataclasses
import json
import pathlib
import typing

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_close, steps_of
from test_embedding_collection import ROWS, click_data, click_model, collection, tables_of

import tf_recsync as recsync
from tf_recsync.embedding import table_rows
from tf_recsync.embedding.table_rows import TableRows
from tf_recsync.layers import EmbeddingCollection, FeatureConfig, TableConfig

TABLES = [TableConfig("films", 40, 4, "normal"), TableConfig("users", 25, 2, "normal")]
VALUES = 40 * 4 * 4 + 25 * 2 * 4
STEPS = 6  # Of an epoch of `click_data`.


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
        (lambda **k: recsync.optimizers.Adagrad(0.1, rowwise=True, **k), 0, 12),
        (lambda **k: recsync.optimizers.Adagrad(0.1, rowwise=True, use_ema=True, **k), 1, 12),
        (lambda **k: recsync.optimizers.Adam(0.1, swap=recsync.Swap(3, 0.5), **k), 2, 16),
        (
            lambda **k: recsync.optimizers.Ftrl(
                0.1,
                swap=recsync.Swap(3, 0.5),
                staleness=recsync.staleness.InversePower(update_sensitivity=1.0),
                **k,
            ),
            2,
            16,
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
    of_no_row = ("staleness", "step_state")
    held = [v for v in optimizer.variables if len(v.shape) and not v.path.endswith(of_no_row)]
    assert sum(v.value.numpy().nbytes for v in [*layer.variables, *held]) == needed
    assert layer.placement.memory.tolist() == [needed]
    with pytest.raises(ValueError, match=f"memory_limit={needed - 1}"):
        collection(memory_limit=needed - 1, slots=slots, bytes_per_row_overhead=overhead).build()


def test_an_optimizer_that_keeps_more_than_the_layer_counted_is_refused():
    layer = collection(memory_limit=2 * VALUES + 65 * 8)
    layer.build()
    recsync.optimizers.Adagrad(0.1).build(layer.trainable_variables)
    message = (
        f"server 0 would hold {3 * VALUES + 65 * 12} bytes .* memory_limit={2 * VALUES + 65 * 8}.*"
        f"'films' with {40 * (4 * 4 * 3 + 12)} bytes there .with slots=2, bytes_per_row_overhead=12"
    )
    with pytest.raises(ValueError, match=message):
        recsync.optimizers.Adam(0.1).build(layer.trainable_variables)


def test_the_memory_of_a_given_placement_is_checked():
    plan = recsync.plan_placement(TABLES, ps=1)
    collection(placement=plan, memory_limit=2 * VALUES + 65 * 8).build()
    with pytest.raises(ValueError, match="server 0 .* table 'films' with 1600 bytes"):
        collection(placement=plan, memory_limit=2 * VALUES + 65 * 8 - 1).build()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"slots": -1}, "slots must be an integer of at least 0, got -1"),
        ({"bytes_per_row_overhead": -8}, "bytes_per_row_overhead must be .*, got -8"),
        ({"memory_limit": 0}, "memory_limit must be None or a number of bytes, at least 1, not 0"),
        ({"placement": "auto"}, "placement must be None or a PlacementPlan, not 'auto'"),
        ({"concatenate": "no"}, "concatenate must be a bool, not 'no'"),
        ({"returned_features": "film"}, "returned_features='film': must be a sequence of texts"),
    ],
)
def test_wrong_memory_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        collection(**arguments)


def test_iterators_of_tables_and_features_are_read_once():
    own = collection()
    parts = iter(own.table_configs), iter(own.feature_configs)
    layer = recsync.layers.EmbeddingCollection(*parts, interactions=None)
    assert (layer.table_configs, layer.feature_configs) == (own.table_configs, own.feature_configs)


# Checkpoints.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layer_restores_itself_before_or_after_it_is_built(tmp_path, dtype):
    layer = collection(dtype=dtype)
    layer.build()
    tf.train.Checkpoint(layer=layer).write(str(tmp_path / "layer"))
    for built in (True, False):
        other = collection(dtype=dtype)
        if built:
            other.build()
        status = tf.train.Checkpoint(layer=other).read(str(tmp_path / "layer"))
        other.build()
        status.assert_consumed()
        assert_close(
            [other.table_values(t) for t in ROWS], [layer.table_values(t) for t in ROWS], 0
        )


def test_a_table_whose_size_was_counted_by_numpy_is_saved_and_restored(tmp_path):
    def made():
        largest = np.array([3, 8, 5]).max()
        table = TableConfig("users", largest + 1, np.int32(2), "normal", shards=np.int64(1))
        ids = keras.Input((), dtype="int64")
        rows = EmbeddingCollection([table], [FeatureConfig("user", "users")])({"user": ids})["user"]
        model = keras.Model(ids, recsync.layers.Cross(np.int64(2))(rows))
        model.compile(recsync.optimizers.Adagrad(0.1, seed=np.int64(3)), "mse")
        return model

    model = made()
    users = np.arange(9)
    model.fit(users, np.ones((9, 2)), verbose=0)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    recsync.checkpoint.save(tmp_path / "checkpoint", model)
    others = [keras.models.load_model(tmp_path / "model.keras"), made(), made()]
    others[1].load_weights(tmp_path / "model.weights.h5")
    recsync.checkpoint.restore(tmp_path / "checkpoint", others[2])
    for other in others:
        assert_close([other(users)], [model(users)], 0)


@pytest.mark.parametrize(
    "config",
    [
        recsync.layers.Admission(np.int64(3)),
        recsync.layers.Eviction(max_idle=np.int64(9)),
        recsync.data.CategoricalColumn("a", hash_buckets=np.int64(9)),
        recsync.data.CrossedColumn(("a", "b"), np.int64(9)),
        recsync.modes.Async(local_batch_size=np.int64(9)),
        recsync.layers.Admission(probability=np.float32(0.5)),
        recsync.Swap(period=np.int64(9), decay=np.float32(0.5)),
        recsync.staleness.Rescale(np.float32(1), window=np.int64(9)),
    ],
    ids=lambda config: type(config).__name__,
)
def test_numbers_of_numpy_do_not_keep_a_configuration_from_being_saved(config):
    about = dataclasses.asdict(config)
    assert json.loads(json.dumps(about)) == json.loads(json.dumps(about, default=int))


def test_a_checkpoint_of_other_tables_names_the_table(tmp_path):
    layer = collection()
    layer.build()
    tf.train.Checkpoint(layer=layer).write(str(tmp_path / "layer"))
    other = EmbeddingCollection(
        [TableConfig("films", 41, 4), TABLES[1]],
        [FeatureConfig("film", "films"), FeatureConfig("user", "users")],
        name="embed",
    )
    other.build()
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"table 'films' of layer 'embed' has shape \[41, 4\]"
    ):
        tf.train.Checkpoint(layer=other).read(str(tmp_path / "layer"))


def test_an_exported_model_keeps_what_it_looks_up_and_no_more(tmp_path):
    names = ("film", "seen", "user")
    inputs = {name: keras.Input((2,), dtype="int64", name=name) for name in names}
    layer = collection("mean", name="embed", concatenate=True)
    model = keras.Model(inputs, layer(inputs))
    model.compile(recsync.optimizers.Adagrad(0.1), "mse", jit_compile=False)
    data = {name: tf.constant([[1, 2], [3, 4]], tf.int64) for name in inputs}
    model.fit(data, np.zeros((2, 10)), verbose=0)
    for save in ("export", "saved_model"):
        folder = str(tmp_path / save)
        if save == "export":
            model.export(folder, verbose=False)
            loaded = tf.saved_model.load(folder)  # Keeps the variables while they are used.
            served = loaded.serve(data)
        else:
            call = tf.function(lambda x: model(x, training=False))
            signature = call.get_concrete_function(
                {name: tf.TensorSpec([None, 2], tf.int64, name=name) for name in inputs}
            )
            tf.saved_model.save(model, folder, signature)
            loaded = tf.saved_model.load(folder)
            (served,) = loaded.signatures["serving_default"](**data).values()
        np.testing.assert_allclose(served, model(data, training=False), 1e-6, 1e-6, err_msg=save)
        graph = (tmp_path / save / "saved_model.pb").read_bytes()
        assert b"Recsync" not in graph, save
        saved = [name for name, _ in tf.train.list_variables(folder + "/variables/variables")]
        assert not any("saved_tables" in name or "values" in name for name in saved), (save, saved)


# From two servers to three. What two servers train is saved in every way at once, as the process
# has but one connection: the tests on two servers come first, all others read the files.


def skewed_plan(ps: int) -> recsync.PlacementPlan:
    """Not what would be planned by size: films are split, and users are on the first server."""
    return recsync.plan_placement(
        [TableConfig("films", 40, 4, shards=ps), TABLES[1]], ps, {"films": 1, "users": 9}
    )


def compiled(layer, optimizer="SwapAdagrad", eager=False) -> keras.Model:
    model = click_model(layer)
    options = {"swap": recsync.Swap(period=5, decay=0.5)} if optimizer == "SwapAdagrad" else {}
    make = getattr(recsync.optimizers, optimizer)
    policy = recsync.staleness.InversePower(update_sensitivity=1.0)
    made = make(0.1, staleness=policy, **options)
    model.compile(made, "mse", jit_compile=False, run_eagerly=eager)
    return model


def by_table(model: keras.Model, folder) -> dict[str, np.ndarray]:
    """All values that Keras saves of a model: tables, and what the optimizer keeps, by table."""
    model.save_weights(folder / "all.weights.h5")
    found = {}
    with h5py.File(folder / "all.weights.h5") as file:
        file.visititems(
            lambda name, item: (
                found.update({name: item[()]}) if isinstance(item, h5py.Dataset) else None
            )
        )
    # Has the names of this model's layers.
    return {name: value for name, value in found.items() if not name.endswith("/signature")}


def write(model, path):
    return tf.train.Checkpoint(model=model).write(str(path))


def read(model, path):
    return tf.train.Checkpoint(model=model).read(str(path))


def assert_same(found: dict, expected: dict):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


class StopAfter(keras.callbacks.Callback):
    """Ends training as a lost machine would."""

    def __init__(self, epochs: int):
        super().__init__()
        self._epochs = epochs

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self._epochs:
            raise InterruptedError


class Trained(typing.NamedTuple):
    """What a model was, and its files, after two epochs on two servers."""

    folder: pathlib.Path
    tables: list[np.ndarray]
    values: dict[str, np.ndarray]
    layer_config: dict


@pytest.fixture(scope="module")
def trained(clusters, tmp_path_factory) -> dict[str, Trained]:
    """By the optimizer's name; the files are checkpoints of TensorFlow and of Keras."""
    strategy = clusters.strategy(1, 2)
    found = {}
    for optimizer in ("SwapAdagrad", "Adam", "Ftrl"):
        folder = tmp_path_factory.mktemp(optimizer)
        keras.utils.set_random_seed(3)
        with strategy.scope():
            layer = collection("mean", 2, placement=skewed_plan(2), name="embed")
            model = compiled(layer, optimizer)
        callbacks = [
            keras.callbacks.BackupAndRestore(folder / "backup"),
            keras.callbacks.ModelCheckpoint(folder / "last.weights.h5", save_weights_only=True),
            keras.callbacks.ModelCheckpoint(folder / "last.keras"),
            StopAfter(2),
        ]
        with pytest.raises(InterruptedError):
            model.fit(click_data(), epochs=3, verbose=0, callbacks=callbacks)
        assert steps_of(model) == 2 * STEPS
        write(model, folder / "two")
        config = model.get_layer("embed").get_config()
        found[optimizer] = Trained(folder, tables_of(model), by_table(model, folder), config)
    return found


def test_memory_splits_tables_over_servers(clusters):
    strategy = clusters.strategy(1, 2)
    with strategy.scope():
        whole = collection()
        whole.build()
        split = collection(memory_limit=1120)
        split.build()
    assert max(split.placement.memory) <= 1120
    assert len(split.placement.shards) >= len(whole.placement.shards)


@pytest.mark.full
def test_copies_keep_a_given_placement_where_it_fits(clusters, trained):
    strategy = clusters.strategy(1, 2)
    plan = skewed_plan(2)
    _, tables, _, config = trained["SwapAdagrad"]
    with strategy.scope():
        planned = collection()
        planned.build()
        assert planned.placement != plan
        loaded = keras.saving.load_model(trained["SwapAdagrad"].folder / "last.keras")
        copies = [keras.models.clone_model(loaded), loaded]
    for copy in copies:
        assert copy.get_layer("embed").placement == plan
        assert copy.get_layer("embed").get_config() == config
    assert_close(tables_of(loaded), tables)
    loaded.fit(click_data(), epochs=1, verbose=0)
    assert steps_of(loaded) == 3 * STEPS


@pytest.mark.cases("Ftrl")
@pytest.mark.parametrize("optimizer", ["SwapAdagrad", "Adam", "Ftrl"])
def test_a_checkpoint_goes_from_two_servers_to_three_and_to_none(
    clusters, trained, tmp_path, optimizer
):
    two, _, expected, _ = trained[optimizer]
    assert any("version" in name and value.max() > 1 for name, value in expected.items())

    strategy = clusters.strategy(1, 3)
    local = compiled(collection("mean", name="embed"), optimizer, eager=True)
    with strategy.scope():
        other = compiled(collection("mean", 3, name="embed"), optimizer)
    models = ((local, contextlib.nullcontext), (other, strategy.scope))
    for model, scope in models:  # Before their optimizers are built.
        status = read(model, two / "two")
        status.assert_existing_objects_matched()
        with scope():
            model.optimizer.build(model.trainable_variables)
        if model is local:
            status.assert_consumed()
        assert_same(by_table(model, tmp_path), expected)
    # Both go on alike.
    other.fit(click_data(), epochs=1, verbose=0)
    local.fit(click_data(), epochs=1, verbose=0, shuffle=False)
    assert steps_of(other) == 3 * STEPS
    assert_close(tables_of(other), tables_of(local))
    write(other, tmp_path / "three")
    of_three = by_table(other, tmp_path)
    read(local, tmp_path / "three")
    assert_same(by_table(local, tmp_path), of_three)
    # And back, now that they are built and have been trained.
    for model, _ in models:
        read(model, two / "two").assert_existing_objects_matched()
        assert_same(by_table(model, tmp_path), expected)


@pytest.mark.full
def test_a_checkpoint_of_whole_tables_is_read_by_several_servers(clusters, tmp_path):
    """As this process writes it, and as earlier versions did for servers."""
    strategy = clusters.strategy(1, 3)
    here = compiled(collection("mean", name="embed"))
    here.optimizer.build(here.trainable_variables)
    write(here, tmp_path / "here")
    with strategy.scope():
        there = compiled(collection("mean", 3, name="embed"))
        there.optimizer.build(there.trainable_variables)
    read(there, tmp_path / "here").assert_existing_objects_matched()
    assert_same(by_table(there, tmp_path), by_table(here, tmp_path))
    # Tensors have the same names and shapes, however they were written.
    write(there, tmp_path / "there")
    saved = [tf.train.load_checkpoint(str(tmp_path / name)) for name in ("here", "there")]
    shapes = [reader.get_variable_to_shape_map() for reader in saved]
    names = [name for name in shapes[0] if name.endswith("/values")]
    assert len(names) >= 4
    for name in names:
        assert shapes[0][name] == shapes[1][name]
        first, second = (reader.get_tensor(name) for reader in saved)
        np.testing.assert_array_equal(first, second, err_msg=name)


def test_rows_in_a_checkpoint_do_not_pass_through_this_process(clusters, tmp_path):
    strategy = clusters.strategy(1, 3)

    def layer_of(rows):
        layer = EmbeddingCollection(
            [TableConfig("t", rows, 16, "uniform", shards=3)], [FeatureConfig("id", "t")]
        )
        layer.build()
        return layer

    with strategy.scope():
        layer, small = layer_of(1_500_001), tf.train.Checkpoint(layer=layer_of(150_001))
    checkpoint = tf.train.Checkpoint(layer=layer)
    own = pathlib.Path("/proc/self")

    def memory(name):
        return int((own / "status").read_text().partition(f"{name}:")[2].split()[0]) / 1024

    some = [layer.table_values("t")[::99_999]]
    for _ in range(3):  # What threads keep that have had none of it before.
        small.write(str(tmp_path / "small"))
        small.read(str(tmp_path / "small")).assert_existing_objects_matched()
    (own / "clear_refs").write_text("5")  # The peak is what is there now.
    before = memory("VmRSS")
    checkpoint.write(str(tmp_path / "c"))
    for value in (variable._value for variable in layer.variables):
        with tf.device(value.device):
            value.assign(tf.zeros(value.shape, value.dtype))
    checkpoint.read(str(tmp_path / "c")).assert_existing_objects_matched()
    assert memory("VmHWM") < before + 45  # MB, of 92.
    some.append(layer.table_values("t")[::99_999])
    np.testing.assert_array_equal(*some)


@pytest.mark.full
def test_weights_are_written_to_a_file_and_read_from_it_in_blocks(
    clusters, trained, tmp_path, monkeypatch
):
    """So that no process needs the memory of a whole table."""
    folder, tables, expected, _ = trained["Adam"]
    strategy = clusters.strategy(1, 2)
    with strategy.scope():
        # Divided otherwise: a block's rows lie on both servers.
        model = compiled(collection("mean", 2, name="embed"), "Adam")
        model.optimizer.build(model.trainable_variables)
    monkeypatch.setattr(table_rows, "BLOCK_BYTES", 7 * 4 * 4)
    passed = []  # The bytes of each block.
    write, read = TableRows.write, TableRows._read

    def counted_write(rows, begin, values):
        passed.append(values.nbytes)
        write(rows, begin, values)

    def counted_read(rows, begin, end):
        values = read(rows, begin, end)
        passed.append(values.nbytes)
        return values

    monkeypatch.setattr(TableRows, "write", counted_write)
    monkeypatch.setattr(TableRows, "_read", counted_read)
    model.load_weights(folder / "last.weights.h5")
    assert_same(by_table(model, tmp_path), expected)
    assert 0 < max(passed) <= 7 * 4 * 4
    assert_close(tables_of(model), tables)
    # In memory it is whole: there is no need for blocks.
    model.save(tmp_path / "whole.keras")
    assert_close(tables_of(keras.saving.load_model(tmp_path / "whole.keras")), tables)


def model_of_tables(*names: str) -> keras.Model:
    tables = [TableConfig(name, 5 + i, 2, "normal") for i, name in enumerate(names)]
    features = [FeatureConfig(f"of_{i}", table.name) for i, table in enumerate(tables)]
    ids = {feature.name: keras.Input((), dtype="int64", name=feature.name) for feature in features}
    layer = EmbeddingCollection(tables, features, concatenate=True, name="embed")
    return keras.Model(ids, layer(ids))


@pytest.mark.parametrize("ending", ["weights.h5", "keras", "own"])
def test_the_name_of_a_table_may_have_slashes_and_begin_with_another_s(tmp_path, ending):
    names = ("user/films", "user", "/users", "users")
    model = model_of_tables(*names)
    path = tmp_path / f"slash.{ending}"
    values = {name: model.get_layer("embed").table_values(name) for name in names}
    if ending == "keras":
        model.save(path)
        model = keras.saving.load_model(path)
    elif ending == "own":
        recsync.checkpoint.save(path, model)
        recsync.checkpoint.restore(path, model := model_of_tables(*names))
    else:
        model.save_weights(path)
        model.set_weights([np.zeros_like(v) for v in model.get_weights()])
        model.load_weights(path)
    for name, expected in values.items():
        np.testing.assert_array_equal(model.get_layer("embed").table_values(name), expected)
    with pytest.raises(ValueError, match=r"tables 'a/b' and 'a\|b': in files 'a\|b'"):
        model_of_tables("a/b", "a|b")


def test_files_are_read_in_which_a_table_s_name_has_a_slash(tmp_path):
    model = model_of_tables("users", "user/films")
    model.save_weights(tmp_path / "older.weights.h5")
    with h5py.File(tmp_path / "older.weights.h5", "r+") as file:
        found = []
        file.visit(lambda name: found.append(name) if name.endswith("user|films") else None)
        (name,) = found
        file.move(name, name.replace("|", "/"))
    other = model_of_tables("users", "user/films")
    other.load_weights(tmp_path / "older.weights.h5")
    for one, own in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(one, own)


@pytest.mark.full
def test_backup_and_restore_goes_on_with_more_servers(clusters, trained):
    strategy = clusters.strategy(1, 3)
    with strategy.scope():
        again = compiled(collection("mean", name="embed"))
    backup = keras.callbacks.BackupAndRestore(trained["SwapAdagrad"].folder / "backup")
    again.fit(click_data(), epochs=3, verbose=0, callbacks=[backup])
    assert steps_of(again) == 3 * STEPS

    keras.utils.set_random_seed(3)
    undisturbed = compiled(collection("mean", name="embed"), eager=True)
    undisturbed.fit(click_data(), epochs=3, verbose=0, shuffle=False)
    assert_close(tables_of(again), tables_of(undisturbed))


@pytest.mark.cases("True")
@pytest.mark.parametrize("weights_only", [True, False])
def test_model_checkpoints_are_loaded_with_more_servers(clusters, trained, tmp_path, weights_only):
    folder, tables, expected, config = trained["SwapAdagrad"]
    strategy = clusters.strategy(1, 3)
    with strategy.scope():
        if weights_only:
            again = compiled(collection("mean", name="embed"))
            again.load_weights(folder / "last.weights.h5")
            again.optimizer.build(again.trainable_variables)
        else:
            again = keras.saving.load_model(folder / "last.keras")
    assert_close(tables_of(again), tables, 0)
    assert_same(by_table(again, tmp_path), expected)
    if not weights_only:
        local = keras.saving.load_model(folder / "last.keras")
        assert local.get_layer("embed").placement.ps == 1
        assert_close(tables_of(local), tables, 0)
        assert again.get_layer("embed").placement.ps == 3
        # Saved again, it still knows the placement that was given.
        assert config["placement"]["config"]["ps"] == 2
        assert again.get_layer("embed").get_config() == config
    again.fit(click_data(), epochs=1, verbose=0)
    assert steps_of(again) == 3 * STEPS
