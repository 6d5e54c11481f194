"""Checkpoints between two full ones, which have only the rows that changed since the one before."""

import dataclasses
import itertools
import json
import shutil
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
import test_checkpoint_callback as ones
from helpers import held_back
from hypothesis import given, settings
from hypothesis import strategies as st
from test_checkpoint import (
    BATCH,
    STEPS,
    STRATEGIES,
    adagrad,
    check_equal,
    copied,
    data,
    make_model,
    state_of,
    with_swap,
)
from test_recovery import KillInTurn, shards_of, slowly

import tf_recsync as recsync
from tf_recsync import checkpoint, ops
from tf_recsync.callbacks import Checkpoint
from tf_recsync.checkpoint import blocks, writing_rows
from tf_recsync.checkpoint.deltas import Chain
from tf_recsync.checkpoint.index import INDEX, WEIGHTS, Base, Rows, parsed
from tf_recsync.checkpoint.saving import Writer
from tf_recsync.embedding.physical_tables import Piece

pytestmark = pytest.mark.usefixtures("end_calls_of_servers_that_were_cut_off")


@pytest.fixture
def cluster(clusters):
    return clusters.get(workers=4, ps=4)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of a few rows, as if tables were large."""
    monkeypatch.setattr(blocks, "MOST_BYTES", 400)


class Waiting(Checkpoint):
    """Training goes on when a checkpoint is whole: so each one is saved that is due."""

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, logs)
        self._wait()


def rows_in(path):
    """The rows that the files of a checkpoint have, part by part."""
    return rows_of_parts(path, parsed(str(path)))


def rows_of_parts(path, index):
    """The rows that files of parts have, of which an index tells."""
    found = []
    for number, part in enumerate(index.parts):
        reader = blocks.BlockReader(str(path), number, part, blocks.HERE)
        own = []
        for block in part.blocks:
            rows, _ = reader.read(block, [0])
            own += range(*part.bounds(block.number)) if rows is None else rows.numpy().tolist()
        found.append(own)
    assert sum(map(len, found)) == index.written
    return found


# What the parts of it do.


@settings(deadline=None)
@given(st.data())
def test_any_rows_go_where_the_new_division_has_them(data):
    rows = data.draw(st.integers(1, 40))
    whole = np.arange(rows)

    def piece():
        count = data.draw(st.integers(1, min(6, rows)))
        index = data.draw(st.integers(0, count - 1))
        return Piece("t", index, count, len(whole[index::count]), data.draw(st.integers(0, 5)))

    source, target = piece(), piece()
    of_part = st.integers(0, source.offset + source.rows + 3)
    asked = np.array(data.draw(st.lists(of_part, unique=True)), np.int64)
    places = {int(row): target.offset + i for i, row in enumerate(target.take(whole))}
    expected = {}
    for row in asked:
        if source.offset <= row < source.offset + source.rows:
            of_table = int(source.take(whole)[row - source.offset])
            if of_table in places:
                expected[int(row)] = places[of_table]
    move = blocks.Move(0, source, None, target)
    own, to = (values.numpy() for values in move.places(tf.constant(asked)))
    assert dict(zip(asked[own].tolist(), to.tolist(), strict=True)) == expected


def test_the_rows_are_found_whose_versions_differ():
    versions, saved = (tf.Variable(tf.constant(v, tf.int64)) for v in ([3, 1, 2, 5], [3, 0, 7, 4]))

    def changed(begin, end, versions=versions, saved=saved):
        return ops.changed_rows(versions.handle, saved.handle, begin, end)

    assert changed(0, 4).numpy().tolist() == [1, 2, 3]
    assert changed(2, 3).numpy().tolist() == [2]
    assert changed(4, 4).numpy().tolist() == []
    short, matrix, floats = tf.Variable([1]), tf.Variable(np.zeros([4, 1], int)), tf.Variable([1.0])
    unassigned = tf.Variable(np.zeros([2], np.int64))
    for call, message in (
        (lambda: changed(0, 5), "end must be from 0 to 4, not 5"),
        (lambda: changed(-1, 2), "begin must be from 0 to 2, not -1"),
        (lambda: changed(3, 2), "begin must be from 0 to 2, not 3"),
        (lambda: changed([0], 2), "begin must be a scalar|must be rank 0"),
        (lambda: changed(0, 1, saved=short), "saved must be a variable of int64, not int32"),
        (lambda: changed(0, 1, saved=unassigned), r"saved must have shape \[4\], not \[2\]"),
        (lambda: changed(0, 1, versions=floats), "versions must be a variable of int64, not float"),
        (lambda: changed(0, 1, versions=matrix), r"versions must be a vector, not \[4,1\]"),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            call()


def test_the_next_one_is_full_after_so_many_and_after_one_that_was_not_saved():
    chain = Chain(3)
    bases = []
    for number in range(1, 11):
        base = chain.begin([])
        bases.append(None if base is None else int(base.folder))
        if number != 5:
            chain.end(Base(str(number), ""), [])
    assert bases == [None, 1, 2, None, 4, None, 6, 7, None, 9]
    assert chain.begin([Rows("a", (1,), ())]) is None
    always = Chain(1)
    assert always.versions is None
    for _ in range(3):
        assert always.begin([]) is None
        always.end(Base("1", ""), [])


# What is in a chain of them.

KINDS = {
    "one process": (lambda c: None, with_swap),
    "a GPU": (lambda c: None, with_swap),
    "async": (lambda c: recsync.AsyncStrategy(c), with_swap),
    "GBA": (STRATEGIES["GBA"], adagrad),
    "ShadowSync": (STRATEGIES["ShadowSync"], adagrad),
}


def check_is_restored(path, model, *others):
    """A restored chain is as a full save of the same moment."""
    before = state_of(model)
    saved = checkpoint.open(path)
    saved.verify()
    assert saved.base is not None
    for name in saved.shapes:
        np.testing.assert_array_equal(saved.rows(name), before[0][name.partition("/")[2]], name)
        np.testing.assert_array_equal(saved.rows(name, 3, 9), saved.rows(name)[3:9])
    for other in (model, *others):
        checkpoint.restore(path, other)
        check_equal(state_of(other), before)


@pytest.mark.cases("one process", "GBA")
@pytest.mark.parametrize("kind", KINDS)
def test_a_chain_is_restored_as_what_is_saved_as_a_whole(request, tmp_path, monkeypatch, kind):
    make, optimizer = KINDS[kind]
    places = 1 if kind in ("one process", "a GPU") else 4
    cluster = request.getfixturevalue("cluster") if places > 1 else None
    if kind == "a GPU":
        # What stock ops do there, as far as that is to be seen without one.
        monkeypatch.setattr(blocks, "_is_trained_alone", lambda device: True)
    if cluster is not None:
        monkeypatch.setattr(blocks, "MOST_BYTES", 1600)  # Fewer blocks take less time.
    model = make_model(make(cluster), places, optimizer)
    callback = Waiting(tmp_path, every_steps=STEPS, full_every=3, keep=None)
    x, y = data()
    # With servers, the first one is saved before training begins.
    epochs = 3 if cluster is None else 2
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, epochs=epochs, callbacks=[callback])
    assert [saved.is_delta for saved in callback.saved] == [False, True, True]
    rows = [saved.rows for saved in callback.saved]
    assert rows[0] == 101 + 13
    assert all(0 < own < rows[0] for own in rows[1:])
    divided = [make_model(make(cluster), 3, optimizer)] if kind == "async" else []
    check_is_restored(callback.saved[-1].path, model, *divided, make_model(optimizer=optimizer))


def test_rows_that_decay_are_as_of_the_last_of_a_chain(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "MOST_BYTES", 1600)

    def decaying():
        return recsync.optimizers.Adagrad(0.1, weight_decay=0.5)

    model = make_model(recsync.AsyncStrategy(cluster), 4, decaying)
    callback = Waiting(tmp_path, every_steps=STEPS, full_every=3, keep=None)
    x, y = data()
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, epochs=2, callbacks=[callback])
    assert [saved.is_delta for saved in callback.saved] == [False, True, True]
    # Not those that no push has named since, though all have decayed.
    assert all(0 < saved.rows < 101 + 13 for saved in callback.saved[1:])
    saved, (tables, _, _) = checkpoint.open(callback.saved[-1].path), state_of(model)
    local = make_model(optimizer=decaying)
    for restored in (local, model):
        checkpoint.restore(saved.path, restored)
        for name, values in state_of(restored)[0].items():
            np.testing.assert_allclose(values, tables[name], 1e-6, err_msg=name)
    for name in saved.shapes:
        expected = tables[name.partition("/")[2]]
        np.testing.assert_allclose(saved.rows(name), expected, 1e-6, err_msg=name)


UNTOLD = {
    "all rows decay": lambda: recsync.optimizers.Adagrad(0.1, weight_decay=0.01),
    "steps move all rows": lambda: recsync.optimizers.Adam(0.1, lazy=False),
    "averages": lambda: recsync.optimizers.Adagrad(0.1, use_ema=True),
    "no versions": lambda: keras.optimizers.SGD(0.1),
}


@pytest.mark.cases("steps move all rows", "no versions")
@pytest.mark.parametrize("kind", UNTOLD)
def test_a_table_is_whole_whose_versions_do_not_tell_what_changes(tmp_path, kind):
    model = make_model(optimizer=UNTOLD[kind])
    callback = Waiting(tmp_path, every_steps=5, full_every=2)
    x, y = data()
    model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[callback])
    assert [(saved.is_delta, saved.rows) for saved in callback.saved] == [(False, 114), (True, 114)]
    check_is_restored(callback.saved[-1].path, model, make_model(optimizer=UNTOLD[kind]))


def test_only_rows_that_have_changed_are_written(tmp_path):
    model = ones.make_model(rows=200)
    callback = Waiting(tmp_path, every_steps=3, full_every=5, keep=None, at_end=False)
    random = np.random.default_rng(5)
    ids = np.minimum(random.geometric(0.02, (15, ones.BATCH, 1)) - 1, 199)
    both = {"ids": ids.reshape([-1, 1])}, np.zeros([ids.size, 1], np.float32)
    steps = tf.data.Dataset.from_tensor_slices(both).batch(ones.BATCH)
    model.fit(steps, verbose=0, callbacks=[callback])
    assert [rows_in(saved.path) for saved in callback.saved] == [
        [list(range(200))],
        *([np.unique(ids[i : i + 3]).tolist()] for i in range(3, 15, 3)),
    ]
    for saved in callback.saved[1:]:
        (part,) = parsed(saved.path).parts
        assert 1 <= len(part.blocks) < part.count
        files = list((tmp_path / saved.path).glob("part_00000/*.index"))
        assert len(files) == len(part.blocks)
        assert part.is_partial
    for saved in callback.saved:
        assert checkpoint.open(saved.path).rows("rows/ones/version").shape == (200,)


def push(model, *rows):
    ids = np.array(rows).reshape([-1, 1])
    model.fit({"ids": ids}, np.zeros([len(rows), 1], np.float32), verbose=0, batch_size=1)


def test_what_is_pushed_while_a_delta_is_written_is_in_the_next_one(tmp_path, monkeypatch):
    model = ones.make_model(rows=9)
    model.optimizer.build(model.trainable_variables)
    writer, chain = Writer(model), Chain(99)

    def save(number):
        folder, read = str(tmp_path / str(number)), writer.read()
        index = writer.write(folder, read, chain.versions, chain.begin(read.rows))
        (tmp_path / str(number) / INDEX).write_text(json.dumps(index.as_json()))
        chain.end(Base(str(number), index.id), index.rows)
        return [row for part in rows_in(folder) for row in part]

    assert save(1) == list(range(9))
    push(model, 3, 5)
    copied_as_it_is = blocks.Source._copied

    def copy(*args):
        push(model, 3, 7)  # 3 was found, and is copied as it is by now; 7 was not.
        copied = copied_as_it_is(*args)
        push(model, 5)
        return copied

    with monkeypatch.context() as patch:
        patch.setattr(blocks.Source, "_copied", copy)
        assert save(2) == [3, 5]
    assert save(3) == [5, 7]
    assert save(4) == []
    versions = {
        number: checkpoint.open(tmp_path / str(number)).rows("rows/ones/version").tolist()
        for number in (1, 2, 3, 4)
    }
    assert versions[1] == [0] * 9
    assert versions[2] == [0, 0, 0, 2, 0, 1, 0, 0, 0]
    assert versions[3] == versions[4] == [0, 0, 0, 2, 0, 2, 0, 1, 0]
    checkpoint.restore(tmp_path / "3", model)
    assert save(5) == []
    # Versions may be lower than what was saved.
    checkpoint.restore(tmp_path / "2", model)
    assert save(6) == [5, 7]
    assert checkpoint.open(tmp_path / "6").rows("rows/ones/version").tolist() == versions[2]


@pytest.mark.cases("ShadowSync")
@pytest.mark.parametrize("mode", ["async", "GBA", "ShadowSync"])
def test_each_row_is_of_one_moment_in_all_of_a_chain(cluster, tmp_path, mode):
    rows = 1 if mode == "GBA" else 40
    strategy = ones.MODES[mode](cluster)
    recsync.testing.set_compute_time(strategy, 0.01)
    model = ones.make_model(strategy, rows)
    callback = Checkpoint(tmp_path, every_steps=20, keep=None, full_every=3)
    model.fit(ones.dataset(200, rows), verbose=0, callbacks=[callback])
    kinds = [saved.is_delta for saved in callback.saved]
    assert kinds == [i % 3 != 0 for i in range(len(kinds))]
    assert len(kinds) >= 2
    updates = [ones.check_rows(saved.path) for saved in callback.saved]
    assert updates == sorted(updates)
    assert updates[-1] == (100 if rows == 1 else 200)
    restored = ones.make_model(ones.MODES[mode](cluster), rows)
    checkpoint.restore(checkpoint.latest(tmp_path), restored)
    np.testing.assert_array_equal(restored.get_weights()[0], model.get_weights()[0])


# What is kept, and what is left of what fails.


def numbers(folder):
    return sorted(int(path.name) for path in folder.iterdir())


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        (1, [[1], [1, 2], [1, 2, 3], [4], [4, 5], [4, 5, 6], [7]]),
        (2, [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [4, 5], [4, 5, 6], [4, 5, 6, 7]]),
        (None, [list(range(1, last + 1)) for last in range(1, 8)]),
    ],
)
def test_what_a_kept_one_is_based_on_is_kept(tmp_path, keep, expected):
    found = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            found.append(numbers(tmp_path))

    callbacks = [Waiting(tmp_path, every_steps=1, full_every=3, keep=keep), Look()]
    ones.make_model(rows=5).fit(ones.dataset(7, 5), verbose=0, callbacks=callbacks)
    assert found == expected
    for number in numbers(tmp_path):
        ones.check_rows(tmp_path / str(number))


def test_each_fit_begins_with_a_full_one_and_so_does_what_follows_a_failure(tmp_path, monkeypatch):
    model = ones.make_model(rows=5)
    callback = Waiting(tmp_path, every_steps=1, full_every=9, keep=2)
    for _ in range(2):
        model.fit(ones.dataset(3, 5), verbose=0, callbacks=[callback])
    write = blocks.Source.write

    def fail(source, path, number, block):
        written = write(source, path, number, block)  # So its versions have been noted.
        if callback.saved[-1].path.endswith("8"):
            raise OSError("no room")
        return written

    with monkeypatch.context() as patch:
        patch.setattr(blocks.Source, "write", fail)
        with pytest.raises(RuntimeError, match=r"no room; .*/8 is whole.*start the program again"):
            model.fit(ones.dataset(3, 5), verbose=0, callbacks=[callback])
    model.fit(ones.dataset(2, 5), verbose=0, callbacks=[callback])
    kinds = [saved.is_delta for saved in callback.saved]
    assert kinds == [False, True, True, False, True, True, False, True, False, True]
    assert numbers(tmp_path) == [9, 10]
    assert ones.check_rows(tmp_path / "10") == 3 + 3 + 3 + 2


class Sets(keras.callbacks.Callback):
    """Has rows set after the second batch."""

    def __init__(self, action):
        super().__init__()
        self._action = action

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            self._action(self.model)


def saved_good(folder, value):
    """A checkpoint of a model whose rows have had no update."""
    model = ones.make_model(rows=5)
    model.set_weights([np.full([5, 3], value)])
    model.optimizer.build(model.trainable_variables)
    checkpoint.save(folder / "good", model)
    return folder / "good"


def test_the_checkpoint_after_another_one_was_restored_within_fit_is_full(tmp_path):
    good, model = saved_good(tmp_path, 7.0), ones.make_model(rows=5)
    callback = Waiting(tmp_path / "own", every_steps=2, full_every=9, keep=None)
    sets = Sets(lambda model: checkpoint.restore(good, model))
    # After two more updates the row has the version again that was saved before.
    data = {"ids": np.zeros([6, 1])}, np.zeros([6, 1])
    model.fit(*data, batch_size=1, verbose=0, callbacks=[callback, sets])
    assert [saved.is_delta for saved in callback.saved] == [False, False, True]
    for saved, updates in zip(callback.saved, (2, 2, 4), strict=True):
        restored = ones.make_model(rows=5)
        checkpoint.restore(saved.path, restored)
        begin = 1.0 if saved is callback.saved[0] else 7.0
        expected = np.full([5, 3], begin)
        # The gradient of each is 1, and accumulators begin with 0.1.
        expected[0] -= np.sum(0.1 / np.sqrt(0.1 + np.arange(1, updates + 1)))
        np.testing.assert_allclose(restored.get_weights()[0], expected, rtol=1e-5)


def test_the_checkpoint_after_a_table_on_servers_was_assigned_is_full(cluster, tmp_path):
    model = ones.make_model(recsync.AsyncStrategy(cluster), rows=5, shards=1)
    callback = Waiting(tmp_path, every_steps=2, full_every=9, keep=None)
    sets = Sets(lambda model: model.set_weights([np.full([5, 3], 7.0)]))
    model.fit(ones.dataset(6), verbose=0, callbacks=[callback, sets])  # Of the first row.
    # The first one was saved when training began.
    assert [saved.is_delta for saved in callback.saved] == [False, True, False, True]
    rows = checkpoint.open(callback.saved[-1].path).rows("rows/ones")
    np.testing.assert_array_equal(rows[1:], 7.0)


def test_what_is_being_written_while_rows_are_set_is_written_anew(tmp_path, monkeypatch):
    good, model = saved_good(tmp_path, 1.0), ones.make_model(rows=5)
    is_set = threading.Event()
    write = blocks.Source.write

    def write_when_rows_are_set(*args):
        assert is_set.wait(300)
        return write(*args)

    def restore(model):
        checkpoint.restore(good, model)
        is_set.set()

    monkeypatch.setattr(blocks.Source, "write", write_when_rows_are_set)
    callback = Checkpoint(tmp_path / "own", every_steps=1, keep=None)
    model.fit(ones.dataset(2), verbose=0, callbacks=[callback, Sets(restore)])
    assert checkpoint.open(callback.saved[0].path).global_step == 0
    assert numbers(tmp_path / "own") == [1]


def test_what_can_not_be_written_is_an_error_though_rows_were_set_meanwhile(tmp_path, monkeypatch):
    good, model = saved_good(tmp_path, 1.0), ones.make_model(rows=5)
    is_set = threading.Event()

    def fail(*args):
        assert is_set.wait(300)
        raise OSError("no space left")

    def restore(model):
        checkpoint.restore(good, model)
        is_set.set()

    monkeypatch.setattr(blocks.Source, "write", fail)
    callback = Checkpoint(tmp_path / "own", every_steps=1)
    with pytest.raises(RuntimeError, match="could not be written.*no space left"):
        model.fit(ones.dataset(2), verbose=0, callbacks=[callback, Sets(restore)])


def test_a_program_that_sets_rows_all_the_time_has_full_checkpoints(tmp_path, monkeypatch):
    sets = itertools.count()
    monkeypatch.setattr(writing_rows, "assignments_of", lambda variable: next(sets))
    callback = Waiting(tmp_path, every_steps=1, full_every=5, keep=None)
    ones.make_model(rows=5).fit(ones.dataset(9), verbose=0, callbacks=[callback])
    assert len(callback.saved) >= 2 and not any(saved.is_delta for saved in callback.saved)


@pytest.mark.full
def test_a_program_that_is_killed_while_it_writes_a_delta_goes_on_from_the_one_before(
    tmp_path, request
):
    ones.kill_while_it_writes(tmp_path, request, full_every=5, saved=2)
    left, *whole = sorted(path.name for path in tmp_path.iterdir())
    assert left.startswith(".publishing-3-") and whole == ["1", "2"]
    assert checkpoint.open(checkpoint.latest(tmp_path)).base == str(tmp_path / "1")
    updates = ones.check_rows(checkpoint.latest(tmp_path))
    assert updates >= 2
    callback = Waiting(tmp_path, every_steps=2, full_every=5)
    ones.make_model().fit(ones.dataset(3), verbose=0, callbacks=[callback])
    assert callback.restored == str(tmp_path / "2")
    assert [saved.is_delta for saved in callback.saved] == [False, True]
    assert numbers(tmp_path) == [3, 4]
    assert ones.check_rows(tmp_path / "4") == updates + 3


def test_a_server_is_restored_from_a_chain_and_the_next_one_is_full(cluster, tmp_path, caplog):
    kinds = {0: [], 1: []}  # Whether each one is a delta, by how often a server was lost before.

    class Noting(Waiting):
        def _written(self, *args):
            super()._written(*args)
            kinds[self.recoveries].append(self.saved[-1].is_delta)

    model = ones.make_model(slowly(recsync.AsyncStrategy(cluster)), 6, shards=2)
    callback = Noting(tmp_path, every_steps=20, full_every=99, keep=1)
    kill = KillInTurn(cluster, callback, shards_of(model)[:1], steps=70)
    # Some batches are left when it is back, and some more when one is saved.
    data = held_back(ones.dataset(200, 6), 100, lambda: callback.recoveries, each=0.2)
    data = held_back(data, 150, lambda: kinds[1], each=0.2)
    model.fit(data, verbose=0, callbacks=[callback, kill])
    assert callback.recoveries == 1
    for own in kinds.values():
        assert len(own) > 1
        assert own == [i > 0 for i in range(len(own))]
    for number in numbers(tmp_path):
        ones.check_rows(tmp_path / str(number))
    assert checkpoint.open(checkpoint.latest(tmp_path)).base is not None
    # Said once, or once more if the server was gone again, not after each batch.
    assert caplog.text.count("A checkpoint is put off") <= 2


# What is wrong.


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """A folder with a full one and two deltas, and one of another table."""
    folder = tmp_path_factory.mktemp("chain")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "MOST_BYTES", 400)
        for name, rows in (("clicks", 60), ("others", 61)):
            callback = Waiting(folder / name, every_steps=10, full_every=3, keep=None, at_end=False)
            model = ones.make_model(rows=rows)
            model.fit(ones.dataset(30, rows), verbose=0, callbacks=[callback])
    return folder


def change(folder, number, edit):
    """Changes the index of one of the chain."""
    file = folder / "clicks" / str(number) / INDEX
    index = json.loads(file.read_text())
    edit(index)
    file.write_text(json.dumps(index))


def replace_base(folder):
    shutil.rmtree(folder / "clicks" / "2")
    copied(folder / "clicks" / "1", folder / "clicks" / "2")


def have_a_circle(folder):
    own = json.loads((folder / "clicks" / "3" / INDEX).read_text())["id"]
    change(folder, 1, lambda index: index.update(base={"folder": "3", "id": own}))


def take_other_tables(folder):
    shutil.rmtree(folder / "clicks" / "1")
    copied(folder / "others" / "1", folder / "clicks" / "1")
    other = json.loads((folder / "clicks" / "1" / INDEX).read_text())["id"]
    change(folder, 2, lambda index: index["base"].update(id=other))


def block_of(folder, number, block):
    return folder / "clicks" / str(number) / "part_00000" / f"block_{block:06d}"


def cut_off(folder):
    file = block_of(folder, 1, 0).with_suffix(".data-00000-of-00001")
    file.write_bytes(file.read_bytes()[:-1])


def change_middle(folder):
    number = parsed(str(folder / "clicks" / "2")).parts[0].blocks[0].number
    file = block_of(folder, 2, number).with_suffix(".data-00000-of-00001")
    content = bytearray(file.read_bytes())
    content[5] ^= 1
    file.write_bytes(bytes(content))


def swap_blocks(folder):
    """Two that are as long."""
    found: dict = {}
    for block in parsed(str(folder / "clicks" / "3")).parts[0].blocks:
        key = block.rows, block.bytes
        if key in found:
            one, other = (block_of(folder, 3, n) for n in (found[key], block.number))
            for suffix in (".index", ".data-00000-of-00001"):
                other.with_suffix(suffix).write_bytes(one.with_suffix(suffix).read_bytes())
            return
        found[key] = block.number
    raise AssertionError("no two blocks have as many rows")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda f: shutil.rmtree(f / "clicks" / "1"),
            f"clicks/3 is a delta whose full save is missing: .*/2 is based on .*/1, .* no {INDEX}",
        ),
        (
            lambda f: (f / "clicks" / "2" / INDEX).unlink(),
            f"a delta whose full save is missing: .*/3 is based on .*/2, where there is no {INDEX}",
        ),
        (replace_base, "/3 is based on another checkpoint than the one that is in .*clicks/2"),
        (have_a_circle, "/1 is based on another checkpoint than the one that is in .*clicks/3"),
        (take_other_tables, r"3 is based on .*clicks/1, which has other tables: .*\(61, 3\)"),
        (cut_off, "clicks/1/part_00000/block_000000.data.* has [0-9]+ bytes, not"),
        (change_middle, "clicks/2/part_00000/block_.* is not whole: .*hecksum"),
        (swap_blocks, "clicks/3/.* has other rows than some from [0-9]+ to [0-9]+, in their order"),
        (lambda f: (f / "clicks" / "1" / WEIGHTS).unlink(), f"clicks/1/{WEIGHTS} is missing"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_damaged_chain_is_refused_and_changes_nothing(chain, tmp_path, damage, message):
    damage(copied(chain, tmp_path))
    model = ones.make_model(rows=60)
    model.optimizer.build(model.trainable_variables)
    before = model.get_weights()
    with pytest.raises(ValueError, match=message):
        checkpoint.restore(tmp_path / "clicks" / "3", model)
    for value, expected in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, expected)
    with pytest.raises(ValueError, match=message):
        checkpoint.open(tmp_path / "clicks" / "3").verify()


def test_a_chain_is_found_whatever_path_leads_to_it(chain, tmp_path, monkeypatch):
    (tmp_path / "latest").symlink_to(chain / "clicks" / "3")
    monkeypatch.chdir(chain / "clicks" / "3")
    for path in (".", tmp_path / "latest", f"{chain}/clicks/3/"):
        assert checkpoint.open(path).base == str(chain / "clicks" / "2")
        ones.check_rows(path)
    assert checkpoint.open("../1").base is None


def test_wrong_arguments_are_refused(tmp_path):
    for wrong in (0, -1, 1.5, True, "2", None):
        with pytest.raises(ValueError, match="full_every must be an integer of at least 1"):
            Checkpoint(tmp_path, full_every=wrong)


def test_the_log_says_what_a_delta_has(chain, tmp_path, caplog):
    caplog.set_level("INFO", "absl")
    callback = Waiting(tmp_path, every_steps=2, full_every=2)
    ones.make_model(rows=3).fit(ones.dataset(4, 3), verbose=0, callbacks=[callback])
    full, delta = (dataclasses.astuple(saved)[-2:] for saved in callback.saved)
    assert full == (3, False)
    assert delta[1]
    assert f"is whole in {tmp_path}/1, with 3 rows of tables: training paused" in caplog.text
    assert f"is whole in {tmp_path}/2, a delta of 1, with {delta[0]} rows of tab" in caplog.text
