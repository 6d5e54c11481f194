"""Versions published with their tables apart, and `serving.TableReader`, which serves them."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import logging
from helpers import assert_close
from tensorflow.core.protobuf import saved_model_pb2
from test_checkpoint_callback import dataset as one_rows
from test_checkpoint_callback import make_model as ones_model
from test_checkpoint_deltas import rows_of_parts
from test_recovery import KillInTurn, shards_of, slowly
from test_serving import click_inputs, click_model

import tf_recsync as recsync
from tf_recsync import table_reader
from tf_recsync.callbacks import Checkpoint, Publish
from tf_recsync.checkpoint import blocks
from tf_recsync.layers import EmbeddingCollection, FeatureConfig, TableConfig
from tf_recsync.mapped_files import mapped
from tf_recsync.published import TABLES, block_file, parsed_tables
from tf_recsync.serving import TableReader
from tf_recsync.table_reader import _Shard, _Table
from tf_recsync.versions import MARKER

pytestmark = pytest.mark.usefixtures("end_calls_of_servers_that_were_cut_off")

ROWS = {"users": 101, "films": 13}
BATCH = 16


@pytest.fixture
def cluster(clusters):
    return clusters.get(workers=4, ps=4)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of a few rows, as if tables were large."""
    monkeypatch.setattr(blocks, "MOST_BYTES", 400)


class Waiting(Publish):
    """Training goes on when a version is whole: so there is one after each step."""

    def __init__(self, target, **options):
        super().__init__(target, 1e-6, tables="apart", **options)

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, logs)
        self._wait()


def make_model(strategy=None):
    """With two collections that look up the same features, and an input that is no feature."""
    strategy = strategy or tf.distribute.get_strategy()
    shards = len(getattr(strategy, "embedding_ps", None) or (0,))
    with strategy.scope():
        inputs = {
            "user": keras.Input((), dtype="int64", name="user"),
            "seen": keras.Input((None,), dtype="int64", name="seen", ragged=True),
            "age": keras.Input((1,), name="age"),
        }
        ids = {name: inputs[name] for name in ("user", "seen")}
        features = [
            FeatureConfig("user", "users", out_of_range="hash"),
            FeatureConfig("seen", "films", padding=-1),
        ]
        found = [inputs["age"]]
        for name, dimension, dtype in (("deep", 4, "float32"), ("wide", 1, "bfloat16")):
            tables = [
                TableConfig("users", ROWS["users"], dimension, shards=shards, dtype=dtype),
                TableConfig("films", ROWS["films"], dimension, combiner="mean", dtype=dtype),
            ]
            found.append(EmbeddingCollection(tables, features, concatenate=True, name=name)(ids))
        hidden = keras.layers.Dense(3, "tanh")(keras.layers.concatenate(found))
        model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(hidden))
        model.compile(recsync.optimizers.Adagrad(0.5), "binary_crossentropy", jit_compile=False)
    return model


def inputs_of(n, seed):
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 4, n)
    seen = random.integers(-1, ROWS["films"], lengths.sum())
    return {
        "user": tf.constant(random.integers(-9, 999, n)),
        "seen": tf.RaggedTensor.from_row_lengths(tf.constant(seen), lengths),
        "age": tf.constant(random.random((n, 1)), tf.float32),
    }


def data(steps=6, seed=0):
    labels = np.random.default_rng(seed).integers(0, 2, (steps * BATCH, 1)).astype(np.float32)
    both = inputs_of(steps * BATCH, seed), labels
    return tf.data.Dataset.from_tensor_slices(both).batch(BATCH)


def served(version):
    """What a version predicts of some examples."""
    x = inputs_of(40, seed=9)
    vectors = version.vectors({name: x[name] for name in ("user", "seen")})
    assert sorted(vectors) == sorted(
        f"{layer}_{feature}_vectors" for layer in ("deep", "wide") for feature in ("user", "seen")
    )
    return version.model.serve({**vectors, "age": x["age"]}).numpy()


def predicted(model):
    x = tf.data.Dataset.from_tensor_slices(inputs_of(40, seed=9)).batch(40)
    return model.predict(x, verbose=0)


def collections(model):
    return [layer for layer in model.layers if isinstance(layer, EmbeddingCollection)]


STRATEGIES = {
    "a table on each server": lambda c: recsync.AsyncStrategy(c),
    "copies, and tables on servers": lambda c: recsync.ShadowSyncStrategy(c, recsync.EASGD(0.3)),
}


@pytest.mark.parametrize("kind", STRATEGIES)
def test_what_servers_write_is_served_as_the_model_predicts(cluster, tmp_path, kind):
    model = make_model(STRATEGIES[kind](cluster))
    full = Publish(tmp_path / "full", tables="apart")
    chain = Waiting(tmp_path / "chain", full_every=99)
    model.fit(data(), verbose=0, callbacks=[full, chain])
    first, *deltas = chain.publications
    assert [own.is_delta for own in full.publications] == [False]
    assert deltas
    assert not first.is_delta
    assert all(own.is_delta and own.rows < first.rows for own in deltas)
    expected = predicted(model)
    for target, last in (("full", full.publications[0]), ("chain", deltas[-1])):
        reader = TableReader(tmp_path / target)
        assert (reader.version, reader.global_step) == (last.version, last.global_step)
        np.testing.assert_allclose(served(reader.current), expected, rtol=1e-5)
        for layer in collections(model):
            for table, rows in ROWS.items():
                name, ids = f"{layer.name}/{table}", np.arange(rows)[::-1]
                np.testing.assert_array_equal(
                    reader.lookup(name, ids), layer.table_values(table)[ids], name
                )


def test_each_version_of_a_chain_is_that_of_its_moment(tmp_path):
    model, moments = make_model(), []

    class Predict(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            moments.append(model(inputs_of(40, seed=9), training=False))

    publish = Waiting(tmp_path, full_every=3, keep=None, at_end=False)
    model.fit(data(4), verbose=0, callbacks=[publish, Predict()])
    assert [own.is_delta for own in publish.publications] == [False, True, True, False]
    # In the type of the table.
    assert files_bytes(tmp_path / "1") == sum(ROWS.values()) * (4 * 4 + 1 * 2)
    reader = reader_at(tmp_path, 1)
    np.testing.assert_allclose(served(reader.current), moments[0], rtol=1e-5)
    # After one that was not looked at, too.
    for number in (3, 4):
        copy_versions(tmp_path, tmp_path / "until_1", range(1, number + 1))
        assert reader.refresh()
        assert reader.global_step == reader.version == number
        np.testing.assert_allclose(served(reader.current), moments[number - 1], rtol=1e-5)
    assert not reader.refresh()
    assert reader.lookup("wide/users", [3]).dtype == np.float32
    # Whoever operates it may take back a version.
    shutil.rmtree(tmp_path / "until_1" / "4")
    assert reader.refresh()
    np.testing.assert_allclose(served(reader.current), moments[2], rtol=1e-5)


def copy_versions(source, target, numbers):
    for number in numbers:
        shutil.copytree(f"{source}/{number}", f"{target}/{number}", dirs_exist_ok=True)


def reader_at(folder, number, **options):
    """A reader of a folder in which a version is the latest."""
    target = folder / f"until_{number}"
    copy_versions(folder, target, range(1, number + 1))
    return TableReader(target, **options)


def rows_in(path):
    """The rows that the files of a version have, part by part."""
    return rows_of_parts(f"{path}/{TABLES}", parsed_tables(str(path)))


def test_deltas_have_the_rows_that_have_changed_and_no_state_of_the_optimizer(tmp_path):
    model = ones_model(rows=200)
    publish = Waiting(tmp_path, full_every=9, at_end=False)
    model.fit(one_rows(5, 200), verbose=0, callbacks=[publish])
    named = [np.unique(x["ids"]).tolist() for x, _ in one_rows(5, 200)]
    assert [rows_in(own.path) for own in publish.publications] == [
        [list(range(200))],
        *([own] for own in named[1:]),
    ]
    # Rows of three float32, and in deltas their numbers.
    sizes = [files_bytes(own.path) for own in publish.publications]
    assert sizes == [200 * 12] + [len(own) * (12 + 8) for own in named[1:]]
    assert [own.rows for own in publish.publications] == [200] + [len(own) for own in named[1:]]


def test_a_delta_has_all_rows_of_a_table_whose_versions_do_not_tell_what_changes(tmp_path):
    model = ones_model(rows=60)
    model.compile(keras.optimizers.SGD(0.1), loss=lambda y, p: p, jit_compile=False)
    publish = Waiting(tmp_path, full_every=9, at_end=False)
    model.fit(one_rows(2, 60), verbose=0, callbacks=[publish])
    assert [(own.is_delta, own.rows) for own in publish.publications] == [(False, 60), (True, 60)]
    (layer,) = collections(model)
    refreshed = reader_at(tmp_path, 1)
    copy_versions(tmp_path, tmp_path / "until_1", [2])
    assert refreshed.refresh()
    for reader in (refreshed, TableReader(tmp_path)):
        np.testing.assert_array_equal(reader.lookup("ones", range(60)), layer.table_values("ones"))


def files_bytes(path):
    found = tf.io.gfile.glob(f"{path}/{TABLES}/*/*.data*")
    return sum(os.path.getsize(file) for file in found)


def operations_of(path):
    """The kinds of operations that a SavedModel consists of."""
    saved = saved_model_pb2.SavedModel.FromString((path / "saved_model.pb").read_bytes())
    graphs = [meta.graph_def for meta in saved.meta_graphs]
    nodes = [node for graph in graphs for node in graph.node]
    nodes += [n for graph in graphs for f in graph.library.function for n in f.node_def]
    return {node.op for node in nodes}


def test_all_forms_of_input_become_vectors(tmp_path):
    model = click_model()
    model.compile(recsync.optimizers.Adagrad(0.1), "mse", jit_compile=False)
    x = click_inputs()
    examples = tf.data.Dataset.from_tensors((x, tf.constant([[1.0], [0.0], [2.0]])))
    model.fit(examples.repeat(3), verbose=0, callbacks=[Publish(tmp_path, tables="apart")])
    now = TableReader(tmp_path).current
    features = {name: x[name] for name in ("film", "seen", "tags", "words")}
    vectors = now.vectors(features, {"seen": x["weights"]})
    shapes = {name: tuple(own.shape) for name, own in vectors.items()}
    assert shapes == {
        "film_vectors": (3, 4),
        "seen_vectors": (3, 4),
        "seen_rows": (3, None, 4),
        "seen_row_weights": (3, None),
        "tags_vectors": (3, 4),
        "words_vectors": (3, 3, 4),
    }
    expected = model(x, training=False)
    # The mask of a sequence is made of its ids.
    assert_close([now.model.serve({**vectors, "words": x["words"]})], [expected], 1e-5)
    parts = {name: own for name, own in vectors.items() if isinstance(own, tf.Tensor)}
    for name in ("seen_rows", "seen_row_weights"):
        parts |= {name: vectors[name].values, f"{name}_row_splits": vectors[name].row_splits}
    words = x["words"]
    parts |= {"words": words.values, "words_indices": words.indices}
    parts["words_dense_shape"] = words.dense_shape
    by_name = now.model.signatures["serving_default"](**parts)
    assert_close([by_name["output_0"]], [expected], 1e-5)
    operations = operations_of(tmp_path / "1")
    assert "MatMul" in operations
    assert not [name for name in operations if "Recsync" in name]


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """A folder with two full versions, two deltas after each; in each, all rows are the same."""
    folder = tmp_path_factory.mktemp("chain")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "MOST_BYTES", 400)
        for name, rows in (("clicks", 60), ("others", 61)):
            model = ones_model(rows=rows)
            every_row = np.arange(rows).reshape([rows, 1])
            steps = tf.data.Dataset.from_tensors(({"ids": every_row}, np.zeros([rows, 1])))
            publish = Waiting(folder / name, full_every=3, at_end=False)
            model.fit(steps.repeat(6), verbose=0, callbacks=[publish])
            assert [own.is_delta for own in publish.publications] == [False, True, True] * 2
    return folder


def test_who_looks_up_during_a_refresh_sees_one_version_and_later_ones_later(chain, tmp_path):
    rows = {}
    for number in range(1, 7):
        copy_versions(chain / "clicks", tmp_path / "until", [number])
        rows[number] = TableReader(tmp_path / "until").lookup("ones", [0])[0, 0]
    assert len(set(rows.values())) == 6
    number_of = {value: number for number, value in rows.items()}
    target = tmp_path / "clicks"
    copy_versions(chain / "clicks", target, [1])
    reader = TableReader(target)
    is_over, seen, errors = threading.Event(), [[] for _ in range(3)], []
    ids = np.random.default_rng(0).integers(0, 60, 500)

    def look_up(own):
        try:
            while True:
                was_over = is_over.is_set()
                values = reader.lookup("ones", ids)
                assert (values == values[0, 0]).all()
                own.append(number_of[values[0, 0]])
                now = reader.current
                vectors = now.vectors({"ids": ids[:, None]})
                assert number_of[vectors["ids_vectors"].numpy()[7, 1]] == now.version
                if was_over:
                    return
        except BaseException as error:  # Raised in the test's own thread.
            errors.append(error)

    threads = [threading.Thread(target=look_up, args=[own]) for own in seen]
    for thread in threads:
        thread.start()
    for number in range(2, 7):
        copy_versions(chain / "clicks", tmp_path / "new", [number])
        os.rename(tmp_path / "new" / str(number), target / str(number))
        shutil.rmtree(target / str(number - 3), ignore_errors=True)  # It is served on.
        assert reader.refresh()
    is_over.set()
    for thread in threads:
        thread.join()
    assert not errors
    for own in seen:
        assert own == sorted(own)
        assert own[-1] == 6


def change(folder, number, edit):
    """Changes the marker of a version."""
    file = folder / "clicks" / str(number) / MARKER
    index = json.loads(file.read_text())
    edit(index)
    file.write_text(json.dumps(index))


def file_of(folder, number, block=0):
    path = str(folder / "clicks" / str(number))
    found = parsed_tables(path).parts[0].blocks[block].number
    return block_file(path, 0, found)


def cut_off(number):
    def damage(folder):
        os.truncate(file_of(folder, number), os.path.getsize(file_of(folder, number)) - 1)

    return damage


def change_bytes(number):
    def damage(folder):
        with open(file_of(folder, number, 1), "r+b") as file:
            file.seek(4)
            file.write(b"\1")

    return damage


def replace(folder):
    """A version by one of the same number, of another program."""
    shutil.rmtree(folder / "clicks" / "4")
    shutil.copytree(folder / "others" / "4", folder / "clicks" / "4")


def remove_block(folder):
    os.remove(file_of(folder, 5))


def other_tables(folder):
    replace(folder)
    other = json.loads((folder / "clicks" / "4" / MARKER).read_text())["id"]
    change(folder, 5, lambda index: index["base"].update(id=other))


def tables_inside(folder):
    change(folder, 5, lambda index: [index.pop(key) for key in [*index] if key != "global_step"])


def rows_beyond(folder):
    change(folder, 4, lambda i: i["rows"][0]["shards"][0]["piece"].update(offset=1))


def have_words(folder):
    change(folder, 4, lambda index: index["parts"][0].update(rows="sixty"))


def have_bytes(folder):
    (folder / "clicks" / "5" / MARKER).write_bytes(b"\xff\xfe")


def lack_a_block(folder):
    change(folder, 4, lambda index: index["parts"][0]["blocks"].pop())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda f: shutil.rmtree(f / "clicks" / "4"),
            f"/5 is a delta whose full save is missing: .*/5 is based on .*/4, where.* no {MARKER}",
        ),
        (replace, "/5 is based on another checkpoint than the one that is in .*clicks/4"),
        (other_tables, r"5 is based on .*clicks/4, which has other tables: .*\(61, 3\)"),
        (cut_off(4), "clicks/4/tables/part_00000/block_000000.data.* has [0-9]+ bytes, not"),
        (cut_off(5), "clicks/5/tables/part_00000/block_.* has [0-9]+ bytes, not"),
        (change_bytes(4), "clicks/4/tables/part_00000/block_.* is not whole: .*hecksum"),
        (change_bytes(5), "clicks/5/tables/part_00000/block_.* is not whole: .*hecksum"),
        (remove_block, "clicks/5/tables/part_00000/block_.* is missing"),
        (tables_inside, f'5/{MARKER} is no marker of a version that was published with tables="ap'),
        (
            rows_beyond,
            f"4/{MARKER} is no marker .*: table 'rows/ones' has 60 rows of part 0 from 1",
        ),
        (have_words, f"4/{MARKER} is no marker of a version that was published with .*TypeError"),
        (have_bytes, f"5/{MARKER} is no marker of a version .*UnicodeDecodeError"),
        (lack_a_block, f"4/{MARKER} is no marker of a version with tables: part 0 has the blocks"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_reader_refuses_what_is_damaged_and_serves_what_it_had(chain, tmp_path, damage, message):
    copy_versions(chain / "clicks", tmp_path / "clicks", [1, 2, 3])
    reader = TableReader(tmp_path / "clicks")
    before = reader.lookup("ones", np.arange(60))
    shutil.copytree(chain / "others", tmp_path / "others")
    copy_versions(chain / "clicks", tmp_path / "clicks", [4, 5])
    damage(tmp_path)
    with pytest.raises(ValueError, match=message):
        reader.refresh()
    assert (reader.version, reader.current.version) == (3, 3)
    np.testing.assert_array_equal(reader.lookup("ones", np.arange(60)), before)
    with pytest.raises(ValueError, match=message):
        TableReader(tmp_path / "clicks")
    # The next one that is whole is served.
    for number in (4, 5, 6):
        shutil.rmtree(tmp_path / "clicks" / str(number), ignore_errors=True)
    copy_versions(chain / "clicks", tmp_path / "clicks", [4, 5, 6])
    assert reader.refresh()
    assert (reader.lookup("ones", np.arange(60)) < before).all()


def open_files():
    """The files that this process has open; other threads may open and close some meanwhile."""
    files = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            files.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return files


def test_full_rows_are_opened_without_reading_them_and_keep_no_file_open(chain, tmp_path):
    copy_versions(chain / "clicks", tmp_path / "clicks", [1])
    with open(file_of(tmp_path, 1), "r+b") as file:
        file.write(np.float32(7).tobytes())
    reader = TableReader(tmp_path / "clicks", verify=False)
    assert not [file for file in open_files() if file.startswith(str(tmp_path))]
    assert reader.lookup("ones", [0])[0, 0] == 7  # Its checksum is another one.
    # What is in memory is the file.
    with open(file_of(tmp_path, 1), "r+b") as file:
        file.write(np.float32(8).tobytes())
    assert reader.lookup("ones", [0])[0, 0] == 8


def test_a_mapped_file_can_be_read_and_not_written(tmp_path):
    expected = np.arange(12, dtype=np.float32).reshape([6, 2])
    (tmp_path / "rows").write_bytes(expected.tobytes())
    found = mapped(str(tmp_path / "rows"), np.float32, (6, 2))
    (tmp_path / "rows").unlink()
    part = found[2:4]
    del found
    np.testing.assert_array_equal(part, expected[2:4])
    with pytest.raises(ValueError, match="read-only"):
        part[0] = 1
    with pytest.raises(OSError, match="No such file"):
        mapped(str(tmp_path / "rows"), np.float32, (6, 2))
    (tmp_path / "rows").write_bytes(b"1234567")
    with pytest.raises(ValueError, match="rows has 7 bytes, not 8"):
        mapped(str(tmp_path / "rows"), np.float32, (1, 2))


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_found_wherever_they_lie(seed):
    random = np.random.default_rng(seed)
    rows, shards, block = random.integers([1, 1, 1], [50, 5, 9])
    shards = min(rows, shards)
    whole = random.random((rows, 2), np.float32)
    own = []
    for index in range(shards):
        offset = random.integers(0, 4)
        part = np.concatenate([np.full([offset, 2], np.nan), whole[index::shards]])
        own.append(_Shard(offset, block, [part[i : i + block] for i in range(0, len(part), block)]))
    changed = np.flatnonzero(random.random(rows) < 0.3)
    expected = whole.copy()
    expected[changed] = random.random((len(changed), 2), np.float32)
    table = _Table((rows, 2), own, changed, expected[changed])
    ids = random.integers(0, rows, random.integers(0, 60))
    np.testing.assert_array_equal(table.lookup(ids), expected[ids])


def numbers(folder):
    return sorted(int(path.name) for path in folder.iterdir())


def test_what_a_kept_version_is_based_on_is_kept(tmp_path):
    found = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            found.append(numbers(tmp_path))

    publish = Waiting(tmp_path, full_every=3, keep=1)
    ones_model(rows=5).fit(one_rows(7, 5), verbose=0, callbacks=[publish, Look()])
    assert found == [[1], [1, 2], [1, 2, 3], [4], [4, 5], [4, 5, 6], [7]]


def test_a_version_that_is_taken_back_while_others_follow_is_no_base(tmp_path):
    readers, changed = [], []

    class TakeBack(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                readers.append(TableReader(tmp_path))
                shutil.rmtree(tmp_path / "3")
            elif batch == 3:  # It has the number of the one that was taken back.
                changed.append((readers[0].version, readers[0].refresh(), readers[0].refresh()))

    publish = Waiting(tmp_path, full_every=99, at_end=False)
    model = ones_model(rows=5)
    model.fit(one_rows(6, 5), verbose=0, callbacks=[publish, TakeBack()])
    assert [own.version for own in publish.publications] == [1, 2, 3, 3, 4, 5]
    deltas = [own.is_delta for own in publish.publications]
    assert deltas == [False, True, True, False, True, True]
    assert changed == [(3, True, False)]
    (layer,) = collections(model)
    for reader in (readers[0], TableReader(tmp_path)):
        reader.refresh()
        for name, rows in layer.table_rows().items():
            np.testing.assert_array_equal(reader.lookup(name, np.arange(5)), rows.read())


def test_a_copied_version_is_served_as_the_one_that_it_is_a_copy_of(chain, tmp_path):
    reader = reader_at(chain / "clicks", 3)
    target = chain / "clicks" / "until_3"
    before = reader.lookup("ones", [1, 2])
    shutil.copytree(target / "3", target / "9")
    assert reader.refresh() and reader.version == 9
    np.testing.assert_array_equal(reader.lookup("ones", [1, 2]), before)


def test_a_version_that_is_removed_while_it_is_read_is_an_os_error(chain, monkeypatch):
    reader = reader_at(chain / "clicks", 2)
    copy_versions(chain / "clicks", chain / "clicks" / "until_2", [3])

    def gone(*args):
        raise tf.errors.NotFoundError(None, None, "no such file")

    with monkeypatch.context() as patch:
        patch.setattr(table_reader, "chain_of", gone)
        with pytest.raises(OSError, match="can't be read: no such file"):
            reader.refresh()
    assert reader.version == 2
    assert reader.refresh() and reader.version == 3


def test_a_process_may_end_while_a_thread_looks_up(chain):
    program = """
import sys, threading
from tf_recsync.serving import TableReader
reader = TableReader(sys.argv[1], verify=False)
begun = threading.Event()

def look_up():
    while True:
        reader.lookup("ones", [1, 2, 3])
        begun.set()

threading.Thread(target=look_up, daemon=True).start()
begun.wait()
"""
    done = subprocess.run([sys.executable, "-c", program, str(chain / "clicks")], timeout=280)
    assert done.returncode == 0


def test_after_the_loss_of_a_server_the_next_version_is_full(cluster, tmp_path):
    model = ones_model(slowly(recsync.AsyncStrategy(cluster)), 6, shards=2)
    checkpoint = Checkpoint(tmp_path / "checkpoints", every_steps=20)
    kinds = {0: [], 1: []}

    class Noting(Waiting):
        def on_train_batch_end(self, batch, logs=None):
            self._due = 0.0 if len(kinds[checkpoint.recoveries]) < 3 else float("inf")
            super().on_train_batch_end(batch, logs)

        def _written(self, *args):
            super()._written(*args)
            kinds[checkpoint.recoveries].append(self.publications[-1].is_delta)

    class Kill(KillInTurn):
        def on_train_batch_end(self, batch, logs=None):
            if len(kinds[0]) > 2:
                super().on_train_batch_end(batch, logs)

    publish = Noting(tmp_path / "clicks", full_every=999)
    kill = Kill(cluster, checkpoint, shards_of(model)[:1], steps=1)
    model.fit(one_rows(300, 6), verbose=0, callbacks=[checkpoint, publish, kill])
    assert checkpoint.recoveries == 1
    for own in kinds.values():
        assert own == [i > 0 for i in range(len(own))]
    assert kinds[1]
    (layer,) = collections(model)
    reader = TableReader(tmp_path / "clicks")
    np.testing.assert_array_equal(reader.lookup("ones", range(6)), layer.table_values("ones"))


# What is wrong.


def test_wrong_lookups_are_named(chain, tmp_path):
    reader = TableReader(chain / "clicks")
    assert reader.current.shapes == {"rows/ones": (60, 3)}
    assert reader.lookup("ones", []).shape == (0, 3)
    for call, message in (
        (lambda: reader.lookup("twos", [1]), r"table must be one of \['rows/ones'\], not 'twos'"),
        (
            lambda: reader.lookup("ones", [5, 60, -1]),
            "ids must be from 0 to 59, the rows of table ",
        ),
        (lambda: reader.lookup("ones", [-1]), "of table 'ones', not -1"),
        (lambda: reader.lookup("ones", [[1]]), r"ids must be a vector of .*of the shape \(1, 1\)"),
        (lambda: reader.lookup("ones", [0.5]), "ids must be a vector of integers, not float64"),
        (lambda: reader.vectors({}), r"inputs lacks the features \['ids'\]"),
        (lambda: reader.vectors({"a": [1]}), r"features has \['a'\]; the features are \['ids'\]"),
        (lambda: reader.vectors({"ids": [1]}, {"a": [1.0]}), r"weights has \['a'\]; the features"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(tf.errors.InvalidArgumentError, match="feature ids has ids out of range"):
        reader.vectors({"ids": np.array([[60]])})


def test_wrong_arguments_are_refused(tmp_path):
    for call, message in (
        (lambda: Publish("a", tables="outside"), 'tables must be "inside" or "apart", not \'outsi'),
        (lambda: Publish("a", full_every=2), 'full_every=2: must be 1 with tables="inside"'),
        (lambda: Publish("a", tables="apart", full_every=0), "full_every must be an integer of at"),
        (lambda: TableReader("gs://models/clicks"), "must be a folder of this machine, whose file"),
        (lambda: TableReader(3), "target must be the path of a folder, not 3"),
        (lambda: TableReader(tmp_path, verify=1), "verify must be a bool, not 1"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    for target in (tmp_path, tmp_path / "none"):
        with pytest.raises(FileNotFoundError, match=f"target='{target}' has no published version"):
            TableReader(target)


def test_models_whose_tables_can_not_be_apart_are_refused_before_training(tmp_path):
    ids, others = (keras.Input((), dtype="int64", name=name) for name in ("ids", "others"))
    layer = EmbeddingCollection(
        [TableConfig("films", 9, 2)], [FeatureConfig("film", "films")], name="films"
    )
    twice = layer({"film": ids})["film"] + layer({"film": others})["film"]
    age = keras.Input((2,), name="film_vectors")
    for inputs, output, message in (
        ([age], age * 2.0, "the model .* calls no EmbeddingCollection whose tables could be"),
        ([ids, others], twice, "calls the EmbeddingCollection 'films' more than once"),
        ([ids, age], layer({"film": ids})["film"] + age, "would have the name 'film_vectors'"),
    ):
        model = keras.Model(inputs, keras.layers.Dense(1)(output))
        model.compile(recsync.optimizers.SGD(0.1), "mse")
        with pytest.raises(ValueError, match=message):
            model.fit(np.zeros([1, 1]), callbacks=[Publish(tmp_path, tables="apart")], verbose=0)
        assert int(model.optimizer.iterations.numpy()) == 0


def test_a_target_that_servers_do_not_see_is_an_error_before_training(cluster):
    model = ones_model(recsync.AsyncStrategy(cluster))
    publish = Publish("ram://of_this_process/clicks", tables="apart")
    with pytest.raises(OSError, match="what ps:0 writes there this process does not see"):
        model.fit(one_rows(1), verbose=0, callbacks=[publish])
    assert int(model.optimizer.iterations.numpy()) == 0


def test_the_log_says_what_a_version_has(tmp_path, caplog):
    # TensorFlow sets the level that absl knows while it writes a SavedModel.
    before = logging.get_verbosity()
    logging.set_verbosity(logging.INFO)
    try:
        model = ones_model(rows=3)
        model.fit(one_rows(2, 3), verbose=0, callbacks=[Waiting(tmp_path, full_every=2)])
    finally:
        logging.set_verbosity(before)
    assert f"is whole in {tmp_path}/1, with 3 rows of tables: training paused" in caplog.text
    assert f"is whole in {tmp_path}/2, a delta of 1, with 1 rows of tables: trai" in caplog.text
