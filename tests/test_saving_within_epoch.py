"""What is read, saved or loaded within an epoch, while workers train, is of one moment."""

import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import wait_until

import tf_recsync as recsync

WORKERS, PS = 3, 4
BATCH, BATCHES = 4, 36
ROWS = 6
ASYNC = ["async", "bounded", "sync", "backup", "gba"]
COPIES = ["shadow", "all-reduce", "hop", "groups"]
SHARDS = {"hop": 0, "groups": 0}  # Where there is no server for collections' tables alone.
# Of what is saved: all in each way that workers train in, and each other form of file once.
SAVED = [
    *((name, form) for name in ASYNC for form in ("weights.h5", "checkpoint")),
    *(("gba", form) for form in ("keras", "ModelCheckpoint")),
]


@pytest.fixture(scope="module")
def cluster(clusters):
    return clusters.get(WORKERS, PS)


def make_strategy(name, cluster):
    # How many batches are left at the end of the epoch depends on how many came late, or were
    # dropped; the gradient of what does not fill a global batch would not be 1.
    kept = {"last_global_batch": "drop"}
    batches = {"local_batch_size": BATCH, "global_batch_size": 2 * BATCH, **kept}
    make = {
        "async": lambda: recsync.AsyncStrategy(cluster),
        "bounded": lambda: recsync.BoundedStalenessStrategy(cluster, 1),
        "sync": lambda: recsync.SyncStrategy(cluster, **batches),
        "backup": lambda: recsync.BackupWorkersStrategy(cluster, 1, **kept),
        "gba": lambda: recsync.GBAStrategy(cluster, staleness_tolerance=100, **batches),
        "shadow": lambda: recsync.ShadowSyncStrategy(
            cluster, recsync.EASGD(0.3), threads_per_trainer=2, sync_ps=1, output="mean"
        ),
        "all-reduce": lambda: recsync.ShadowSyncStrategy(
            cluster, recsync.ModelAveraging(0.5), mode=recsync.Foreground(gap=2), output="mean"
        ),
        "hop": lambda: recsync.HopStrategy(
            cluster, recsync.topology.ring(WORKERS), max_iteration_gap=2, check_invariants=True
        ),
        "groups": lambda: recsync.HierarchicalStrategy(
            cluster,
            recsync.EASGD(0.3),
            groups=WORKERS,
            trainers_per_group=1,
            ps_per_group=1,
            output="mean",
        ),
    }
    return make[name]()


class Sum(keras.layers.Layer):
    """Adds up its inputs and its variables: the gradient of each element is 1."""

    def build(self, input_shape):
        del input_shape
        self.parts = [self.add_weight(shape=(4,), initializer="zeros") for _ in range(3)]

    def call(self, inputs):
        return keras.ops.sum(inputs, -1, keepdims=True) + sum(map(keras.ops.sum, self.parts))


def make_model(shards=1):
    ids = keras.Input((ROWS,), dtype="int64")
    if shards == 0:
        table = keras.layers.Flatten()(keras.layers.Embedding(ROWS, 2, "zeros")(ids))
    else:
        table = recsync.layers.EmbeddingCollection(
            [recsync.layers.TableConfig("rows", ROWS, 2, initializer="zeros", shards=shards)],
            [recsync.layers.FeatureConfig("ids", "rows")],
            name="tables",
        )({"ids": ids})["ids"]
    model = keras.Model(ids, Sum()(table))
    optimizer = recsync.optimizers.Adagrad(0.1, staleness=recsync.staleness.Constant())
    model.compile(optimizer, loss=lambda y, p: p)
    optimizer.build(model.trainable_variables)
    return model


class Every(keras.callbacks.Callback):
    """Calls `look` after each fourth batch; the second half of the data is slow until it has
    looked once, as Keras may count more slowly than a small model trains, and the last third of
    them until `is_over` is set, if that is given."""

    def __init__(self, look, is_over=None):
        super().__init__()
        self._look = look
        self._has_looked = threading.Event()
        self._is_over = is_over or self._has_looked

    def on_train_batch_end(self, batch, logs=None):
        if batch % 4 == 3:
            self._look(self.model)
            self._has_looked.set()

    def dataset(self) -> tf.data.Dataset:
        ids = tf.TensorSpec([BATCH, ROWS], tf.int64)
        return tf.data.Dataset.from_generator(
            self._batches, output_signature=(ids, tf.TensorSpec([BATCH, 1]))
        )

    def _batches(self):
        for i in range(BATCHES):
            if i >= BATCHES // 2:
                # Whoever looks waits for workers that wait for this.
                late = i >= BATCHES - BATCHES // 6
                (self._is_over if late else self._has_looked).wait(0.5)
            yield np.tile(np.arange(ROWS), (BATCH, 1)), np.zeros((BATCH, 1))


def fit(model, strategy, look, *before, is_over=None):
    recsync.testing.set_compute_time(strategy, 0.03)
    callback = Every(look, is_over)
    model.fit(callback.dataset(), verbose=0, callbacks=[*before, callback])
    assert sum(strategy.worker_steps(model)) == BATCHES


def updates_of(model) -> set[tuple[int, bool]]:
    """How many updates each element has had by its accumulator, and whether its weight and its
    version tell the same."""
    found = set()
    for state in model.optimizer.states:
        weights, sums = (np.asarray(v._value) for v in (state.variable, state.accumulators[0]))
        for weight, sum_ in zip(weights.flat, sums.flat, strict=True):
            count = round(sum_ - 0.1)
            expected = -0.1 * sum((0.1 + i) ** -0.5 for i in range(1, count + 1))
            found.add((count, bool(abs(weight - expected) < 1e-3)))
    return found


@pytest.mark.cases("gba-checkpoint", "gba-ModelCheckpoint")
@pytest.mark.parametrize(("name", "form"), SAVED)
def test_all_in_a_file_is_of_as_many_updates(name, form, cluster, tmp_path):
    strategy = make_strategy(name, cluster)
    with strategy.scope():
        model = make_model(shards=2)
    paths, callbacks = [], []

    def save(model):
        path = str(tmp_path / f"{len(paths)}.{form}")
        if form == "checkpoint":
            tf.train.Checkpoint(model=model).write(path)
        elif form == "weights.h5":
            model.save_weights(path)
        elif form == "keras":
            model.save(path)
        else:
            path = str(tmp_path / f"{4 * len(paths) + 4}.weights.h5")
        paths.append(path)

    if form == "ModelCheckpoint":
        path = str(tmp_path / "{batch}.weights.h5")
        callbacks.append(keras.callbacks.ModelCheckpoint(path, save_weights_only=True, save_freq=4))
    fit(model, strategy, save, *callbacks)
    restored = make_model()
    counts = []
    for path in paths:
        if form == "checkpoint":
            tf.train.Checkpoint(model=restored).read(path).assert_consumed()
        else:
            restored.load_weights(path)
        ((count, is_consistent),) = updates_of(restored)
        assert is_consistent
        # The global step, too, though a callback that only looks at it stops nobody.
        assert count == int(restored.optimizer.iterations)
        counts.append(count)
    assert len(counts) == BATCHES // 4
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


@pytest.mark.cases("async-weights.h5", "bounded-weights.h5", "sync-weights.h5", "gba-checkpoint")
@pytest.mark.parametrize("form", ["weights.h5", "checkpoint"])
@pytest.mark.parametrize("name", ASYNC)
def test_training_goes_on_from_what_is_loaded_within_an_epoch(name, form, cluster, tmp_path):
    strategy = make_strategy(name, cluster)
    with strategy.scope():
        model = make_model(shards=2)
    path, counts = str(tmp_path / f"first.{form}"), []
    has_loaded = threading.Event()

    def count() -> int:
        ((updates, is_consistent),) = updates_of(model)
        assert is_consistent
        assert updates == int(model.optimizer.iterations.numpy())
        return updates

    def save_and_load(model):
        checkpoint = tf.train.Checkpoint(model=model)
        save, load = checkpoint.write, checkpoint.read
        if form == "weights.h5":
            save, load = model.save_weights, model.load_weights
        if not counts:
            save(path)
            counts.append(count())
        elif not has_loaded.is_set() and model.optimizer.iterations.numpy() > counts[0]:
            load(path)
            counts.append(count())
            has_loaded.set()

    fit(model, strategy, save_and_load, is_over=has_loaded)
    saved, loaded = counts
    assert saved == loaded < count() < saved + BATCHES


def test_pushes_are_dropped_when_a_file_of_the_same_global_step_is_loaded(cluster, tmp_path):
    # As when the loss is NaN: what is not applied yet may be as well. All batches of the epoch
    # would fill a global batch.
    sizes = {"local_batch_size": BATCH, "global_batch_size": BATCHES * BATCH}
    strategy = recsync.GBAStrategy(cluster, last_global_batch="drop", **sizes)
    with strategy.scope():
        model = make_model()
    path, has_loaded = str(tmp_path / "first.weights.h5"), threading.Event()

    def save_and_load(model):
        if not has_loaded.is_set():
            model.save_weights(path)
            model.load_weights(path)
            has_loaded.set()

    fit(model, strategy, save_and_load, is_over=has_loaded)
    assert updates_of(model) == {(0, True)}
    report, servers = strategy.aggregation(model), len(model.train_function.aggregations[0].buffers)
    assert report.abandoned >= 4 * servers  # It was loaded after four batches.
    assert report.abandoned + report.left_over == BATCHES * servers


@pytest.mark.cases("hop", "groups")
@pytest.mark.parametrize("name", COPIES)
def test_copies_stand_still_while_they_are_read_and_go_on_after(name, cluster):
    strategy = make_strategy(name, cluster)
    with strategy.scope():
        model = make_model(SHARDS.get(name, 1))
    seen = []

    def read_twice(model):
        first = strategy.worker_states(model).serialize()
        weights = model.get_weights()
        time.sleep(0.1)
        for weight, again in zip(weights, model.get_weights(), strict=True):
            np.testing.assert_array_equal(weight, again)
        assert strategy.worker_states(model).serialize() == first
        seen.append(np.mean(weights[-1]))

    fit(model, strategy, read_twice)
    assert seen[0] > seen[-1]


@pytest.mark.cases("shadow", "groups")
@pytest.mark.parametrize("name", COPIES)
def test_copies_are_read_as_they_are_in_each_epoch_of_a_pass(name, cluster):
    strategy = make_strategy(name, cluster)
    with strategy.scope():
        model = make_model(SHARDS.get(name, 1))
    seen = []

    class Read(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(model.get_weights())

    callback = Every(lambda model: None)
    model.fit(callback.dataset(), steps_per_epoch=9, epochs=2, verbose=0, callbacks=[Read()])
    # Not as they were at the end of the epoch before: every step changes their mean.
    before, *within = [weights[-1] for weights in seen[8:17]]
    assert not any(np.array_equal(weights, before) for weights in within)


@pytest.mark.parametrize("name", ["shadow", "all-reduce"])
def test_tables_stand_still_with_the_copies_though_they_are_read_first(name, cluster):
    strategy = make_strategy(name, cluster)
    with strategy.scope():
        model = make_model()
    table = next(v for v in model.variables if "/job:ps/" in v._value.device)

    def read_twice(model):
        first = table.numpy()
        time.sleep(0.1)
        np.testing.assert_array_equal(table.numpy(), first)

    fit(model, strategy, read_twice)


def test_what_another_thread_reads_stops_nobody(cluster):
    strategy = make_strategy("sync", cluster)
    with strategy.scope():
        model = make_model()
    is_over = threading.Event()
    reads = []

    def read():
        while not is_over.is_set():
            reads.append(model.get_weights())

    thread = threading.Thread(target=read)
    thread.start()
    try:
        fit(model, strategy, lambda model: wait_until(lambda: len(reads) > 1, 60))
    finally:
        is_over.set()
        thread.join()
    assert len(reads) > 1
