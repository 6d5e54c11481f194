"""Checkpoints whose tables servers write and read: saved, opened and restored between fits."""

import json
import math
import re
import resource
import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from groups import hierarchical
from hypothesis import given
from hypothesis import strategies as st

import tf_recsync as recsync
from tf_recsync import checkpoint
from tf_recsync.checkpoint import blocks, restoring
from tf_recsync.checkpoint.index import INDEX, WEIGHTS
from tf_recsync.embedding import table_rows
from tf_recsync.embedding.physical_tables import Piece
from tf_recsync.layers import EmbeddingCollection, FeatureConfig, TableConfig
from tf_recsync.strategies.watched_calls import CallGuard

pytestmark = pytest.mark.usefixtures("end_calls_of_servers_that_were_cut_off")

ROWS = {"ads": 101, "sites": 13}
BATCH, STEPS = 16, 6
MEAN = recsync.ModelAveraging(0.3)
NEVER = recsync.Foreground(gap=1_000_000)


@pytest.fixture
def cluster(clusters):
    return clusters.get(workers=4, ps=4)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of a few rows, as if tables were large."""
    monkeypatch.setattr(blocks, "MOST_BYTES", 400)


def with_swap():
    return recsync.optimizers.Adagrad(0.1, swap=recsync.Swap(period=3))


def adagrad():
    return recsync.optimizers.Adagrad(0.1)


def make_model(strategy=None, shards=1, optimizer=with_swap, rows=None, units=1):
    keras.utils.set_random_seed(1)
    strategy = strategy or tf.distribute.get_strategy()
    rows = {**ROWS, **(rows or {})}
    tables = [TableConfig(name, count, 4, shards=shards) for name, count in rows.items()]
    with strategy.scope():
        ids = {name: keras.Input((2,), dtype="int64", name=name) for name in rows}
        layer = EmbeddingCollection(
            tables,
            [FeatureConfig(name, name) for name in rows],
            concatenate=True,
        )
        hidden = keras.layers.Dense(units, "tanh")(layer(ids))
        model = keras.Model(ids, keras.layers.Dense(1, "sigmoid")(hidden))
        model.compile(optimizer(), "binary_crossentropy")
    return model


def data(seed=0, steps=STEPS):
    random = np.random.default_rng(seed)
    x = {name: random.integers(0, rows, (steps * BATCH, 2)) for name, rows in ROWS.items()}
    return x, random.integers(0, 2, (steps * BATCH, 1)).astype(np.float32)


def fit(model, seed=0, **options):
    x, y = data(seed)
    return model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, **options)


def state_of(model):
    """All that a model and its optimizer have, as one process has it."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(folder, model)
        saved = checkpoint.open(folder)
        tables = {name.partition("/")[2]: saved.rows(name) for name in saved.shapes}
    dense = [w for w in model.weights if not hasattr(w, "physical_table")]
    return tables, [np.asarray(w) for w in dense], int(model.optimizer.iterations)


def check_equal(one, other):
    (tables, dense, step), (other_tables, other_dense, other_step) = one, other
    assert step == other_step
    assert tables.keys() == other_tables.keys()
    for name, values in tables.items():
        np.testing.assert_array_equal(values, other_tables[name], name)
    for values, others in zip(dense, other_dense, strict=True):
        np.testing.assert_array_equal(values, others)


def test_what_was_not_lost_stays_though_another_loss_ends_the_recovery(tmp_path, monkeypatch):
    model = make_model()
    fit(model)
    checkpoint.save(tmp_path / "first", model)
    fit(model, 1)
    expected, lost = state_of(model), model.weights[-1]
    load = restoring.load_weights

    def load_and_lose(*args):
        load(*args)
        raise tf.errors.UnavailableError(None, None, "another server is gone")

    with monkeypatch.context() as patch:
        patch.setattr(restoring, "load_weights", load_and_lose)
        with pytest.raises(tf.errors.UnavailableError):
            restoring.restore_lost(str(tmp_path / "first"), model, [lost._value])
    assert np.any(lost != expected[1][-1])
    lost.assign(expected[1][-1])
    check_equal(state_of(model), expected)


@pytest.mark.parametrize("ps", [0, 2])
def test_staleness_is_not_counted_twice_when_a_server_of_several_is_restored(cluster, tmp_path, ps):
    strategy = recsync.AsyncStrategy(cluster)
    model = make_model(strategy, 4)
    fit(model)
    checkpoint.save(tmp_path / "first", model)
    states = [s for s in model.optimizer.states if hasattr(s.variable, "physical_table")]
    counters = {state.variable.physical_table.ps: state.counters for state in states}
    assert sorted(counters) == [0, 1, 2, 3]
    total, lost = strategy.staleness(model).rows.count, counters[ps].numpy()[0]
    assert 0 < lost < total
    there = [v._value for v in [*model.variables, *model.optimizer.variables]]
    gone = [v for v in there if f"ps/replica:0/task:{ps}/" in v.device]
    assert any(v is counters[ps]._value for v in gone)
    restoring.restore_lost(str(tmp_path / "first"), model, gone)
    assert strategy.staleness(model).rows.count == total - lost


@given(st.data())
def test_each_row_goes_where_the_new_division_has_it(data):
    rows = data.draw(st.integers(1, 40))
    counts = [data.draw(st.integers(1, min(6, rows))) for _ in range(2)]
    offsets = [data.draw(st.integers(0, 5)) for _ in range(2)]
    whole = np.arange(rows)

    def pieces(count, offset):
        for index in range(count):
            own = len(whole[index::count])
            yield Piece("t", index, count, own, offset)

    block = data.draw(st.integers(1, 9))
    for target in pieces(counts[1], offsets[1]):
        new = np.full(offsets[1] + target.rows, -1)
        for source in pieces(counts[0], offsets[0]):
            old = np.full(offsets[0] + source.rows + 2, -2)
            old[source.offset : source.offset + source.rows] = source.take(whole)
            move = blocks.Move(0, source, None, target)
            for begin in range(0, len(old), block):
                found = move.slices(begin, min(begin + block, len(old)))
                if found is not None:
                    own, to = found
                    new[to] = old[begin : begin + block][own]
        np.testing.assert_array_equal(new[target.offset :], target.take(whole))


def test_a_checkpoint_goes_on_without_a_cluster_as_if_nothing_had_been_saved(tmp_path):
    first = make_model()
    fit(first)
    checkpoint.save(tmp_path / "first", first, metadata={"day": 3})
    second = make_model()
    assert checkpoint.restore(tmp_path / "first", second) == {"day": 3}
    check_equal(state_of(first), state_of(second))
    for model in (first, second):
        fit(model, seed=1)
    check_equal(state_of(first), state_of(second))


@pytest.mark.cases("(3, 2)")
@pytest.mark.parametrize("shards", [(1, 3), (3, 2), (4, 1)], ids=str)
def test_tables_are_restored_however_they_are_divided(cluster, tmp_path, shards):
    before, after = shards
    strategy = recsync.AsyncStrategy(cluster)
    first = make_model(strategy, before)
    fit(first)
    checkpoint.save(tmp_path / "first", first)
    rows = json.loads((tmp_path / "first" / INDEX).read_text())["rows"]
    assert {len(own["shards"]) for own in rows} == {before}
    assert len(list(tmp_path.glob("first/part_00000/*.index"))) > 1
    second = make_model(strategy, after)
    fit(second, seed=2)
    checkpoint.restore(tmp_path / "first", second)
    check_equal(state_of(first), state_of(second))


def test_copies_of_other_variables_than_here_are_left_out_with_a_warning(
    clusters, tmp_path, caplog
):
    def hop(ps):
        cluster = clusters.get(workers=2, ps=ps, processes=0)
        return recsync.HopStrategy(cluster, recsync.topology.ring(2))

    first = make_model(hop(ps=0))
    fit(first)
    checkpoint.save(tmp_path / "first", first)
    expected = state_of(first)
    copies = first.distribute_strategy.copies(first)
    assert not np.array_equal(copies[0][-1], copies[1][-1])
    # There is one number more that is copied with a learning rate than with a schedule.
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1000, 0.5)

    def with_schedule():
        return recsync.optimizers.Adagrad(schedule, swap=recsync.Swap(period=3))

    for ps, optimizer in ((0, with_schedule), (2, with_swap)):
        caplog.clear()
        strategy = hop(ps)
        second = make_model(strategy, optimizer=optimizer)
        checkpoint.restore(tmp_path / "first", second)
        assert "do not fit this strategy and cluster: the checkpoint holds" in caplog.text
        check_equal(state_of(second), expected)
        for own in strategy.copies(second):
            np.testing.assert_array_equal(own[-1], expected[1][-1])


@pytest.mark.full
def test_no_row_of_a_table_passes_through_this_process(cluster, tmp_path, monkeypatch):
    model = make_model(recsync.AsyncStrategy(cluster), 4)
    fit(model)
    for name in ("read_rows", "assign_rows"):
        monkeypatch.delattr(table_rows, name)
    checkpoint.save(tmp_path / "clicks", model)
    checkpoint.restore(tmp_path / "clicks", model)


def test_an_opened_checkpoint_gives_any_rows(cluster, tmp_path):
    model = make_model(recsync.AsyncStrategy(cluster), 3)
    fit(model)
    checkpoint.save(tmp_path / "clicks", model, metadata={"day": "monday"})
    saved = checkpoint.open(tmp_path / "clicks")
    assert saved.metadata == {"day": "monday"}
    assert saved.global_step == STEPS
    (layer,) = (own for own in model.layers if isinstance(own, EmbeddingCollection))
    for table, rows in ROWS.items():
        values = layer.table_values(table)
        name = f"{layer.name}/{table}"
        assert saved.shapes[name] == (rows, 4)
        for begin, end in ((0, None), (5, 11), (rows - 1, rows), (7, 7)):
            np.testing.assert_array_equal(saved.rows(name, begin, end), values[begin:end])
        assert saved.rows(f"{name}/version").sum() > 0
        assert saved.shapes[f"{name}/accumulator"] == (rows, 4)
    saved.verify()
    with pytest.raises(ValueError, match=re.escape(f"name must be one of ['{layer.name}/ads'")):
        saved.rows("ads")
    with pytest.raises(ValueError, match="begin and end must be from 0 to 13, .* not 4 and 14"):
        saved.rows(f"{layer.name}/sites", 4, 14)


def test_a_model_that_is_not_compiled_takes_the_weights_alone(tmp_path):
    model = make_model()
    fit(model)
    checkpoint.save(tmp_path / "clicks", model)
    other = make_model()
    for_inference = keras.Model(other.inputs, other.outputs)
    checkpoint.restore(tmp_path / "clicks", for_inference)
    x, _ = data()
    np.testing.assert_array_equal(model.predict(x, verbose=0), for_inference.predict(x, verbose=0))


def test_of_several_optimizers_some_may_have_nothing_to_do(tmp_path):
    def optimizer():
        parts = {".*": recsync.optimizers.Adagrad(0.1)}
        unused = recsync.optimizers.SGD(0.1)
        return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(unused, parts))

    model, other = make_model(optimizer=optimizer), make_model(optimizer=optimizer)
    fit(model)
    checkpoint.save(tmp_path / "clicks", model)
    checkpoint.restore(tmp_path / "clicks", other)
    np.testing.assert_array_equal(model.get_weights()[0], other.get_weights()[0])


# What is wrong.


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model without a cluster, and the folder that it was saved to."""
    folder = tmp_path_factory.mktemp("saved") / "clicks"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "MOST_BYTES", 400)
        model = make_model()
        fit(model)
        checkpoint.save(folder, model)
    return model, folder


def copied(folder, to):
    for file in (f for f in folder.rglob("*") if f.is_file()):
        (to / file.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
        (to / file.relative_to(folder)).write_bytes(file.read_bytes())
    return to


BLOCK = "part_00000/block_000001.data-00000-of-00001"


def truncate(folder):
    (folder / BLOCK).write_bytes((folder / BLOCK).read_bytes()[:-1])


def change(folder):
    content = bytearray((folder / BLOCK).read_bytes())
    content[20] ^= 1
    (folder / BLOCK).write_bytes(bytes(content))


def change_dense(folder):
    content = bytearray((folder / WEIGHTS).read_bytes())
    content[-20] ^= 1
    (folder / WEIGHTS).write_bytes(bytes(content))


def swap_blocks(folder):
    """The last block of the part is shorter than the others."""
    last = max((folder / "part_00000").glob("*.index")).name.removesuffix(".index")
    for suffix in (".index", ".data-00000-of-00001"):
        name = folder / "part_00000" / f"block_000001{suffix}"
        name.write_bytes((folder / "part_00000" / f"{last}{suffix}").read_bytes())
    index = json.loads((folder / INDEX).read_text())
    index["parts"][0]["blocks"][1]["bytes"] = (folder / BLOCK).stat().st_size
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda f: (f / INDEX).unlink(), FileNotFoundError, "is no checkpoint: it has no index"),
        (lambda f: (f / INDEX).write_text("{}"), ValueError, f"{INDEX} is no index of a check"),
        (lambda f: (f / INDEX).write_text('{"format": 7}'), ValueError, "has the format 7, not 1"),
        (lambda f: (f / BLOCK).unlink(), ValueError, f"{BLOCK} is missing"),
        (truncate, ValueError, f"{BLOCK} has [0-9]+ bytes, not [0-9]+: it is cut off"),
        (change, ValueError, f"{BLOCK} is not whole: .*hecksum"),
        (change_dense, ValueError, f"{WEIGHTS} is not what was written: its checksum"),
        (lambda f: (f / WEIGHTS).unlink(), ValueError, f"{WEIGHTS} is missing"),
        (swap_blocks, ValueError, f"{BLOCK} has field_0 of the shape .*: it belongs to another"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(
    saved, tmp_path, damage, error, message
):
    model, folder = saved
    damage(copied(folder, tmp_path / "copy"))
    other = make_model()
    fit(other, seed=5)
    before = state_of(other)
    with pytest.raises(error, match=message):
        checkpoint.restore(tmp_path / "copy", other)
    check_equal(state_of(other), before)
    with pytest.raises(error, match=message):
        checkpoint.open(tmp_path / "copy").verify()


@pytest.mark.parametrize(
    ("different", "message"),
    [
        ({"units": 2}, r"dense.*/kernel, float32 \[8, 1\], of the checkpoint is .*\[8, 2\], here"),
        ({"rows": {"ads": 102}}, r"'ads' are \[\(101, 4\)\] in the checkpoint, \[\(102, 4\)\]"),
        ({"rows": {"new": 7}}, "of another model"),
        ({"optimizer": adagrad}, "keeps accumulator, version, last_peri"),
        (
            {"optimizer": lambda: keras.optimizers.SGD(0.1)},
            "Adagrad of variables of the shapes .* is SGD",
        ),
    ],
    ids=["layer", "table", "another table", "slots", "optimizer"],
)
def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(saved, different, message):
    _, folder = saved
    other = make_model(**different)
    before = other.get_weights()
    with pytest.raises(ValueError, match=message):
        checkpoint.restore(folder, other)
    for value, expected in zip(other.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, expected)


def test_wrong_arguments_are_refused(saved, tmp_path):
    model, folder = saved
    with pytest.raises(FileExistsError, match="is there already, and is no empty folder"):
        checkpoint.save(folder, model)
    assert (folder / INDEX).exists()
    for call in (checkpoint.save, checkpoint.restore):
        with pytest.raises(ValueError, match="path must be the path of a folder, not 3"):
            call(3, model)
        with pytest.raises(ValueError, match="must be a keras.Model that has been built"):
            call(tmp_path / "new", keras.Sequential([keras.layers.Dense(1)]))
    with pytest.raises(ValueError, match="metadata must be a dict of what JSON has, not {'x': {1}"):
        checkpoint.save(tmp_path / "new", model, metadata={"x": {1}})
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file/new' can't be written: .*; it must be a folder"):
        checkpoint.save(tmp_path / "file" / "new", model)


def test_a_full_folder_is_an_error_and_leaves_nothing(saved, tmp_path):
    model, _ = saved
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="can't be written"):
            checkpoint.save(tmp_path / "full", model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "full").exists()


def test_a_folder_that_a_server_does_not_share_is_refused(cluster):
    # Each process has a file system in memory of its own.
    model = make_model(recsync.AsyncStrategy(cluster), 4)
    with pytest.raises(OSError, match=r"what ps:0 writes there this process does not see"):
        checkpoint.save("ram://of_this_process/clicks", model)


def test_a_server_that_dies_while_it_writes_is_named_and_nothing_is_left(
    cluster, tmp_path, monkeypatch
):
    model = make_model(recsync.AsyncStrategy(cluster), 4)
    fit(model)
    write = blocks.Source.write

    def kill_and_write(source, path, number, block):
        if "task:2" in source.device and block == 1:
            cluster.kill("ps", 2)
        return write(source, path, number, block)

    monkeypatch.setattr(blocks.Source, "write", kill_and_write)
    with pytest.raises(RuntimeError, match="parameter server ps:2 was lost"):
        checkpoint.save(tmp_path / "clicks", model)
    assert not (tmp_path / "clicks").exists()


def test_a_server_that_stands_still_is_named(cluster, tmp_path):
    def attempt(folder):
        model = make_model(recsync.AsyncStrategy(cluster, silence_timeout=2.0), 4)
        fit(model)
        checkpoint.save(folder, model)
        assert isinstance(model.variables[0]._value.guard, CallGuard)
        cluster.pause("ps", 1)
        try:
            checkpoint.restore(folder, model)
        finally:
            cluster.resume("ps", 1)

    for number in range(20):  # On a busy machine, another one may be silent by itself.
        with pytest.raises(RuntimeError, match=r"parameter server ps:\d has not answered") as error:
            attempt(tmp_path / f"clicks-{number}")
        if "ps:1 " in str(error.value):
            break
        cluster.connect(timeout=200.0)
    assert "parameter server ps:1 has not answered" in str(error.value)


def test_a_blocks_rows_fill_it():
    source = blocks.Source(tuple(make_model().layers[2].variables[:1]))
    part = source.part()
    assert part.block == 400 // 16
    assert math.ceil(part.rows / part.block) > 1


# Last: one of these has a cluster of its own.

STRATEGIES = {
    "GBA": lambda c: recsync.GBAStrategy(c, 2 * BATCH, BATCH, staleness_tolerance=4),
    "ShadowSync": lambda c: recsync.ShadowSyncStrategy(c, MEAN, mode=NEVER),
    "Hop": lambda c: recsync.HopStrategy(c, recsync.topology.ring(4)),
    "groups": lambda c: hierarchical(c, MEAN, mode=NEVER),
    "Hop without servers": lambda c: recsync.HopStrategy(c, recsync.topology.ring(4)),
}


@pytest.mark.cases("ShadowSync")
@pytest.mark.parametrize("kind", STRATEGIES)
def test_every_strategy_goes_on_with_what_it_had(clusters, tmp_path, kind):
    cluster = clusters.get(workers=4, ps=0 if kind == "Hop without servers" else 4)

    def made():
        strategy = STRATEGIES[kind](cluster)
        places = len(strategy.embedding_ps) or 1
        return strategy, make_model(strategy, places, adagrad)

    strategy, model = made()
    fit(model)
    checkpoint.save(tmp_path / "clicks", model)
    before = state_of(model)
    copies = strategy.copies(model) if hasattr(strategy, "copies") else []
    fit(model, seed=1)
    other_strategy, other = made()
    for restored in (model, other):
        checkpoint.restore(tmp_path / "clicks", restored)
        check_equal(state_of(restored), before)
    if copies:
        for own, saved in zip(other_strategy.copies(other), copies, strict=True):
            for value, expected in zip(own, saved, strict=True):
                np.testing.assert_array_equal(value, expected)
    fit(other, seed=1)
    # And in one process, as to look at it.
    local = make_model(optimizer=adagrad)
    checkpoint.restore(tmp_path / "clicks", local)
    np.testing.assert_array_equal(state_of(local)[0]["ads"], before[0]["ads"])
