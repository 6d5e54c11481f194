"""Pushes and pulls from many threads at once."""

import concurrent.futures
import threading

import keras
import numpy as np
import tensorflow as tf

import tf_recsync as recsync
from tf_recsync import ops, staleness
from tf_recsync.ops.bags import Bags, PackedBags

ROWS, WIDTH, BATCH = 20_000, 16, 8_000


class Table:
    def __init__(self):
        self.value = tf.Variable(tf.zeros([ROWS, WIDTH]))
        self.versions = tf.Variable(tf.zeros([ROWS], tf.int64))
        self.counters = tf.Variable(tf.zeros([staleness.COUNTERS], tf.int64))


def push(tables, ids):
    ops.sgd_rows(
        variables=[t.value.handle for t in tables],
        versions=[t.versions.handle for t in tables],
        counters=[t.counters.handle for t in tables],
        last_periods=[],
        last_updates=[],
        gradient=tf.ones([len(tables) * BATCH * WIDTH]),
        indices=np.tile(ids, len(tables)),
        counts=np.full(len(tables), BATCH, np.int64),
        pulled_versions=tf.zeros([0], tf.int64),
        learning_rate=-1.0,
        global_step=1,
    )


def pull(tables, ids):
    ops.gather_rows(
        [t.value.handle for t in tables],
        [t.versions.handle for t in tables],
        np.tile(ids, len(tables)),
        np.full(len(tables), BATCH, np.int64),
    )


def test_pushes_and_pulls_of_shared_tables_in_any_order_all_end_and_none_is_lost():
    # Rows are spread over the same thread pool by all; whoever waited for a
    # table's lock on a thread of that pool could wait for itself.
    one, other = Table(), Table()
    ids = np.random.default_rng(3).permutation(ROWS)[:BATCH].astype(np.int64)
    pushes = 20
    work = [lambda: push([one], ids)] * 3 + [lambda: push([other, one], ids)] * 3
    work += [lambda: pull([one, other], ids)] * 2

    def repeat(action):
        for _ in range(pushes):
            action()

    threads = [threading.Thread(target=repeat, args=(w,), daemon=True) for w in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert not any(thread.is_alive() for thread in threads)
    # Every push added 1 to each element of each of its rows, and to their versions.
    for table, times in ((one, 6 * pushes), (other, 3 * pushes)):
        expected = np.zeros(ROWS, np.int64)
        expected[ids] = times
        np.testing.assert_array_equal(table.versions.numpy(), expected)
        np.testing.assert_array_equal(table.value.numpy()[:, 0], expected.astype(np.float32))


def test_a_push_is_not_applied_by_halves_when_versions_are_set_back_meanwhile():
    variables = [tf.Variable(tf.zeros([50])) for _ in range(4)]
    versions = [tf.Variable(tf.constant(9, tf.int64)) for _ in variables]
    counters = [tf.Variable(tf.zeros([staleness.COUNTERS], tf.int64)) for _ in variables]
    refused, is_over = 0, threading.Event()

    def set_back():
        while not is_over.is_set():
            for value in (0, 9):
                versions[-1].assign(value)

    thread = threading.Thread(target=set_back, daemon=True)
    thread.start()
    pushes = 1000
    for _ in range(pushes):
        try:
            ops.sgd_dense(
                variables=[v.handle for v in variables],
                versions=[v.handle for v in versions],
                counters=[c.handle for c in counters],
                last_periods=[],
                last_updates=[],
                gradient=tf.ones([4 * 50]),
                pulled_versions=np.full(4, 9),
                learning_rate=-1.0,
                global_step=1,
                hogwild=False,
            )
        except tf.errors.InvalidArgumentError:
            refused += 1
    is_over.set()
    thread.join(60)
    for variable in variables:
        np.testing.assert_array_equal(variable, np.full(50, pushes - refused))


def test_a_periods_decay_is_not_lost_by_hogwilds_updates_that_begin_it_side_by_side():
    size, rounds = 1_000_000, 40
    value = tf.Variable(tf.zeros([size]))
    accumulator = tf.Variable(tf.ones([size]))
    version, period = (tf.Variable(tf.constant(0, tf.int64)) for _ in range(2))
    counters = tf.Variable(tf.zeros([staleness.COUNTERS], tf.int64))
    gradient = tf.zeros([size])

    def update():
        for step in range(1, rounds + 1):
            ops.adagrad_dense(
                variables=[value.handle],
                versions=[version.handle],
                counters=[counters.handle],
                last_periods=[period.handle],
                last_updates=[],
                accumulators=[accumulator.handle],
                gradient=gradient,
                pulled_versions=[0],
                learning_rate=0.1,
                global_step=step,
                swap_period=1,
                swap_decay=0.5,
                hogwild=True,
            )

    # More than cores: one that stands still between reading and writing back is what loses it.
    threads = [threading.Thread(target=update, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    # No gradient adds anything: each period halves what is there.
    np.testing.assert_array_equal(accumulator.numpy(), np.full(size, 0.5**rounds, np.float32))


def test_pushes_side_by_side_that_move_all_rows_take_each_row_to_the_last_step():
    rows, threads, pushes = 3_000, 4, 15
    table = keras.Variable(np.ones((rows, 4), np.float32), name="embeddings")
    optimizer = recsync.optimizers.Adam(0.01, lazy=False)
    optimizer.build([table])
    state = optimizer.state_of(table)
    rng = np.random.default_rng(5)
    named = [rng.integers(0, rows // 2, 200) for _ in range(threads * pushes)]

    def push_those_of(thread):
        for i in range(thread, len(named), threads):
            ids, step = tf.constant(named[i]), tf.constant(i + 1, tf.int64)
            bags, pulled = PackedBags.pack([Bags(ids)]), tf.zeros([len(ids)], tf.int64)
            optimizer.apply_rows([state], tf.ones([len(ids) * 4]), bags, pulled, 0.01, step)

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        list(pool.map(push_those_of, range(threads)))
    assert np.unique(state.last_steps[0].numpy()).tolist() == [len(named)]
    # Only what a push named has a new version.
    expected = sum(np.bincount(np.unique(ids), minlength=rows) for ids in named)
    np.testing.assert_array_equal(state.versions.numpy(), expected)
    values = table.numpy()
    np.testing.assert_array_equal(values[rows // 2 :], 1)
    assert np.all(np.isfinite(values)) and np.all(values[expected > 0] < 1)
