"""Large tables in a `tf.train.Checkpoint`, which servers write and read block by block."""

import contextlib
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from test_collection_saving import assert_same, by_table, compiled, read, write
from test_embedding_collection import click_data, collection

from tf_recsync.embedding import checkpoint
from tf_recsync.layers import EmbeddingCollection, FeatureConfig, TableConfig

OPTIMIZER = "SwapAdagrad"
ROW = 4 * 4  # Bytes of a row of films.


@pytest.fixture(autouse=True)
def _seeded():
    keras.utils.set_random_seed(3)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of seven rows of films: 40 rows are six of them, the last one of which is smaller."""
    monkeypatch.setattr(checkpoint, "BLOCK_BYTES", 7 * ROW)


def layer_of(rows: int, shards: int | None = None, dimension: int = 4) -> EmbeddingCollection:
    table = TableConfig("films", rows, dimension, "uniform", shards=shards)
    layer = EmbeddingCollection([table], [FeatureConfig("film", "films")], name="embed")
    layer.build()
    return layer


def files_of(path: str) -> int:
    """How many files a checkpoint has its values in."""
    path = pathlib.Path(path)
    return len(list(path.parent.glob(f"{path.name}.data-*")))


@pytest.fixture(scope="module")
def trained(clusters, tmp_path_factory):
    """A model of two servers after an epoch, in blocks and whole; and its values by table."""
    folder = tmp_path_factory.mktemp("trained")
    keras.utils.set_random_seed(3)
    with clusters.strategy(1, 2).scope():
        model = compiled(collection("mean", 2, name="embed"), OPTIMIZER)
    model.fit(click_data(), epochs=1, verbose=0)
    write(model, folder / "whole")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checkpoint, "BLOCK_BYTES", 7 * ROW)
        write(model, folder / "blocks")
    assert files_of(folder / "blocks") > files_of(folder / "whole") + 10
    assert not [file for file in folder.iterdir() if file.is_dir()]  # Nothing in between is left.
    return folder, by_table(model, folder)


def test_blocks_have_the_tensors_that_a_checkpoint_without_blocks_has(trained):
    folder, _ = trained
    whole, blocks = (tf.train.load_checkpoint(str(folder / name)) for name in ("whole", "blocks"))
    shapes = whole.get_variable_to_shape_map()
    assert blocks.get_variable_to_shape_map() == shapes
    names = [name for name in shapes if name.endswith("/values")]
    assert any(max(shapes[name]) == 40 for name in names)
    for name in names:
        np.testing.assert_array_equal(blocks.get_tensor(name), whole.get_tensor(name), name)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("servers", [0, 3])
def test_blocks_go_from_two_servers_to_three_and_to_none(clusters, trained, tmp_path, servers):
    folder, expected = trained
    scope = clusters.strategy(1, servers).scope if servers else contextlib.nullcontext
    with scope():
        model = compiled(collection("mean", servers or None, name="embed"), OPTIMIZER)
    status = read(model, folder / "blocks")  # Before the optimizer is built.
    with scope():
        model.optimizer.build(model.trainable_variables)
    status.assert_existing_objects_matched()
    assert_same(by_table(model, tmp_path), expected)
    write(model, tmp_path / "again")
    # What TensorFlow's own saver wrote, as all of it was before there were blocks, is read, too.
    for path in (tmp_path / "again", folder / "whole"):
        model.set_weights([np.zeros_like(value) for value in model.get_weights()])
        read(model, path).assert_existing_objects_matched()
        assert_same(by_table(model, tmp_path), expected)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        (41, tf.errors.InvalidArgumentError, r"table_films.* \[41,4\] .* \[40,4\]"),
        (5, ValueError, r"table 'films' of layer 'embed' of shape \[5, 4\] was saved with"),
    ],
)
def test_blocks_of_another_table_are_an_error_that_names_it(tmp_path, rows, error, message):
    tf.train.Checkpoint(layer=layer_of(40)).write(str(tmp_path / "layer"))
    with pytest.raises(error, match=message):
        tf.train.Checkpoint(layer=layer_of(rows)).read(str(tmp_path / "layer"))


def test_a_block_grows_with_a_table_that_would_have_too_many(monkeypatch):
    def saved(rows):
        return layer_of(rows)._saved_tables["table_films"]

    assert saved(100).block * ROW == checkpoint.BLOCK_BYTES
    monkeypatch.setattr(checkpoint, "BLOCK_BYTES", 7 * ROW)
    assert saved(100).block == 7
    monkeypatch.setattr(checkpoint, "MOST_BLOCKS", 3)
    assert saved(100).block == 34  # Three of them: 34, 34 and 32 rows.
    assert saved(3).block == 7


def test_a_server_needs_memory_for_a_few_blocks_alone(clusters, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "BLOCK_BYTES", 2 << 20)
    strategy = clusters.strategy(1, 2)
    with strategy.scope():
        layer = layer_of(2_000_001, 2, 16)  # 128 MB, in 62 blocks.
        small = tf.train.Checkpoint(layer=layer_of(200_001, 2, 16))  # Seven blocks.
    files = tf.train.Checkpoint(layer=layer)
    expected = layer.table_values("films")[::99_999]
    # The first blocks leave some 60 MB to a server, in its threads' own parts of the heap.
    for _ in range(3):
        small.write(str(tmp_path / "small"))

    processes = [pathlib.Path(f"/proc/{strategy.cluster.pid('ps', i)}") for i in range(2)]

    def memory(process, name):
        return int((process / "status").read_text().partition(f"{name}:")[2].split()[0]) / 1024

    def grown(call):
        """By how much servers grow at most, in MB."""
        for process in processes:
            (process / "clear_refs").write_text("5")  # The peak is what is there now.
        before = [memory(process, "VmRSS") for process in processes]
        call()
        return [memory(p, "VmHWM") - old for p, old in zip(processes, before, strict=True)]

    saved = grown(lambda: files.write(str(tmp_path / "c")))
    for value in (variable._value for variable in layer.variables):
        with tf.device(value.device):
            value.assign(tf.zeros(value.shape))
    restored = grown(lambda: files.read(str(tmp_path / "c")).assert_existing_objects_matched())
    np.testing.assert_array_equal(layer.table_values("films")[::99_999], expected)
    # If all were written at once, it would be 2.5 times its share of 61 MB. It was 2 to 25.
    assert max(saved + restored) < 100
