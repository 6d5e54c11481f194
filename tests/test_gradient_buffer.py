"""Pushes to a gradient buffer and one update agree with an update by the mean gradient."""

import gc
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from test_update_ops import COUNTERS, expected_counters

from tf_recsync import staleness
from tf_recsync.ops import gradient_buffer as buffer_ops
from tf_recsync.ops.bags import Bags, PackedBags
from tf_recsync.optimizers import SGD, Adagrad, Adam
from tf_recsync.synchronization.gradient_buffer import GradientBuffer

CPU = "/CPU:0"
OPTIMIZERS = [lambda: SGD(0.5), lambda: Adagrad(0.5), lambda: Adam(0.1)]
# The rows and widths of the tables, and the shapes of the dense variables.
TABLES = [(12, 4), (5, 1)]
DENSE = [(3, 2), (2,)]


class Model:
    """Dense variables and tables with an optimizer; the same values each time."""

    def __init__(self, make=OPTIMIZERS[1]):
        rng = np.random.default_rng(5)

        def variable(shape, name):
            # A layer, so that a table's path is that of an Embedding.
            layer = keras.layers.Layer(name=name.split("/")[0])
            value = rng.normal(size=shape)
            return layer.add_weight(
                shape=shape, initializer=lambda *_, **__: value, name=name.split("/")[1]
            )

        self.dense = [variable(shape, f"d{i}/kernel") for i, shape in enumerate(DENSE)]
        self.tables = [variable(shape, f"t{i}/embeddings") for i, shape in enumerate(TABLES)]
        self.optimizer = make()
        self.optimizer.build([*self.dense, *self.tables])
        self.dense_states = [self.optimizer.state_of(v) for v in self.dense]
        self.table_states = [self.optimizer.state_of(v) for v in self.tables]

    def buffer(self, capacity, **options):
        return GradientBuffer(CPU, self.dense_states, self.table_states, capacity, **options)

    def apply(self, aggregate):
        """As a parameter server does, whether a step is ready or not."""
        rate = tf.constant(self.optimizer.learning_rate.numpy(), tf.float32)
        a = aggregate
        self.optimizer.apply_dense(self.dense_states, a.dense, a.dense_versions, rate, a.step)
        self.optimizer.apply_rows(self.table_states, a.values, a.rows, a.row_versions, rate, a.step)

    def apply_mean(self, pushes, divisor):
        """Plain Keras: the sum of gradients, made in numpy, divided."""
        dense = [np.zeros(shape) for shape in DENSE]
        tables = [np.zeros(shape) for shape in TABLES]
        named = [set() for _ in TABLES]
        for push in pushes:
            for total, gradient in zip(dense, push.dense, strict=True):
                total += gradient
            for t, (ids, gradient, bags, scales) in push.rows.items():
                for p, row in enumerate(ids):
                    tables[t][row] += scales[p] * gradient[bags[p]]
                    named[t].add(row)
        slices = []
        for total, rows in zip(tables, named, strict=True):
            ids = np.array(sorted(rows), np.int64)
            slices.append(tf.IndexedSlices(tf.constant(total[ids] / divisor, tf.float32), ids))
        gradients = [tf.constant(total / divisor, tf.float32) for total in dense]
        self.optimizer.apply([*gradients, *slices], [*self.dense, *self.tables])

    def expect_equal(self, other, but=()):
        for a, b in zip(self.optimizer.variables, other.optimizer.variables, strict=True):
            if not re.search("|".join(["iteration", *but]), a.path):
                np.testing.assert_allclose(a, b, 1e-5, 1e-6, err_msg=a.path)
        for a, b in zip([*self.dense, *self.tables], [*other.dense, *other.tables], strict=True):
            np.testing.assert_allclose(a, b, 1e-5, 1e-6)


class RandomPush:
    """The gradients of a batch: rows repeated, in bags with scales, of some of the tables."""

    def __init__(self, seed, tables=(0, 1)):
        rng = np.random.default_rng(seed)
        self.dense = [rng.normal(size=shape) for shape in DENSE]
        self.rows = {}
        for t in tables:
            rows, width = TABLES[t]
            bags = np.sort(rng.integers(0, 4, 9))
            self.rows[t] = (
                rng.integers(0, rows, 9),
                rng.normal(size=(4, width)),
                bags,
                rng.uniform(0.5, 2, 9),
            )

    def arguments(self, model, versions=0):
        bags = [
            Bags(
                tf.constant(ids, tf.int64),
                tf.constant(bags, tf.int32),
                tf.constant(scales, tf.float32),
                tf.constant(len(gradient), tf.int64),
            )
            for ids, gradient, bags, scales in self.rows.values()
        ]
        arguments = {
            "dense": tf.constant(np.concatenate([g.ravel() for g in self.dense]), tf.float32),
            "dense_versions": tf.fill([len(DENSE)], tf.cast(versions, tf.int64)),
        }
        if self.rows:
            packed = PackedBags.pack(bags)
            arguments |= {
                "tables": [model.table_states[t] for t in self.rows],
                "values": tf.constant(
                    np.concatenate([g.ravel() for _, g, _, _ in self.rows.values()]), tf.float32
                ),
                "rows": packed,
                "row_versions": tf.fill([tf.size(packed.ids)], tf.cast(versions, tf.int64)),
            }
        return arguments


def push_all(model, buffer, pushes, value=0, first=0):
    """Pushes with tokens of one value; applies what comes out each time."""
    aggregates = []
    for i, push in enumerate(pushes):
        arguments = push.arguments(model)
        aggregates.append(buffer.push(first + i, value, buffer.step().applied, **arguments))
        model.apply(aggregates[-1])
        buffer.applied(aggregates[-1])
    return aggregates


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_m_pushes_are_one_update_by_their_mean(make):
    model, plain = Model(make), Model(make)
    buffer = model.buffer(4)
    before = model.optimizer.variables[2].numpy()
    pushes = [RandomPush(seed) for seed in range(4)]
    aggregates = push_all(model, buffer, pushes[:3])
    # Nothing was ready, and what was applied is nothing.
    assert not any(a.ready for a in aggregates)
    assert [a.step.numpy() for a in aggregates] == [1, 1, 1]
    model.expect_equal(plain)
    np.testing.assert_array_equal(model.optimizer.variables[2], before)
    (last,) = push_all(model, buffer, pushes[3:], first=3)
    assert last.ready and last.step.numpy() == 1
    assert buffer.step().applied.numpy() == 1
    plain.apply_mean(pushes, 4)
    model.expect_equal(plain)
    # Each was updated once, by gradients of staleness 1.
    for state in [*model.dense_states, *model.table_states]:
        assert state.versions.numpy().max() == 1
        assert state.counters.numpy()[3] == 1


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_excluded_pushes_leave_their_weight_in_the_divisor(make):
    model, plain = Model(make), Model(make)
    buffer = model.buffer(3, weight=staleness.Threshold(iota=1))
    for step in range(2):
        pushes = [RandomPush(10 * step + i) for i in range(3)]
        push_all(model, buffer, pushes, value=step)
        plain.apply_mean(pushes, 3)
    # At step 2 a token of value 0 has age 2.
    pushes = [RandomPush(seed) for seed in (30, 31, 32)]
    push_all(model, buffer, pushes[:1], value=0)
    push_all(model, buffer, pushes[1:2], value=1)
    push_all(model, buffer, pushes[2:], value=2)
    if isinstance(model.optimizer, SGD):
        # Rows that were pulled at version 0 each time have another tau.
        plain.apply_mean(pushes[1:], 3)
        model.expect_equal(plain, but=["staleness"])
    state = buffer.state()
    assert (state.included, state.decayed, state.excluded) == (8, 0, 1)
    assert (state.age_sum, state.age_max) == (3, 2)
    assert state.applications == state.step == state.applied == 3


def test_the_oldest_versions_pulled_make_the_staleness():
    model = Model()
    buffer = model.buffer(2)
    for step in range(3):
        push_all(model, buffer, [RandomPush(1), RandomPush(1)], value=step)
    for versions in (3, 1):  # pulled now, and two updates ago
        last = buffer.push(0, 3, 3, **RandomPush(1).arguments(model, versions))
    assert last.dense_versions.numpy().tolist() == [1, 1]
    assert set(last.row_versions.numpy()) == {1}
    model.apply(last)
    for state in model.dense_states:
        np.testing.assert_array_equal(state.counters, expected_counters([1, 2, 3, 3]))


def test_a_push_may_have_some_of_the_tables_or_only_rows_or_nothing():
    model, plain = Model(), Model()
    buffer = model.buffer(4)
    pushes = [RandomPush(1), RandomPush(2, tables=[1]), RandomPush(3, tables=[1, 0])]
    push_all(model, buffer, pushes)
    nothing = buffer.push(3, 0, 0)
    assert nothing.ready
    model.apply(nothing)
    plain.apply_mean(pushes, 4)
    model.expect_equal(plain)
    # Without a dense gradient no dense variable is updated.
    rows = RandomPush(4).arguments(model)
    del rows["dense"], rows["dense_versions"]
    for token in range(4):
        last = buffer.push(token, 1, 1, **rows)
    assert last.dense.shape == last.dense_versions.shape == [0]
    model.apply(last)
    assert [s.versions.numpy().max() for s in model.dense_states] == [1, 1]
    assert [s.versions.numpy().max() for s in model.table_states] == [2, 2]


def test_rows_come_once_each_in_the_order_of_their_first_push():
    model = Model()
    buffer = model.buffer(2)
    for ids in ([7, 3, 7], [0, 3]):
        last = buffer.push(
            0,
            0,
            0,
            tables=model.table_states[:1],
            values=tf.ones([4 * len(ids)]),
            rows=PackedBags(tf.constant([len(ids)], tf.int64), tf.constant(ids, tf.int64)),
        )
    assert last.rows.ids.numpy().tolist() == [7, 3, 0]
    assert last.rows.counts.numpy().tolist() == [3, 0]
    assert last.values.numpy().tolist() == [1.0] * 8 + [0.5] * 4
    assert last.row_versions.shape == [0]


def test_pushes_weigh_in_a_flush_as_in_a_full_step():
    model, plain = Model(), Model()
    buffer = model.buffer(8)
    pushes = [RandomPush(1), RandomPush(2), RandomPush(3)]
    push_all(model, buffer, pushes)
    last = buffer.flush()
    assert last.ready and last.step.numpy() == 1
    model.apply(last)
    assert buffer.applied(last).numpy() == 1
    plain.apply_mean(pushes, 8)
    model.expect_equal(plain)
    # There is nothing left, and no step in that.
    nothing = buffer.flush()
    assert not nothing.ready
    model.apply(nothing)
    assert buffer.applied(nothing).numpy() == 1
    model.expect_equal(plain)
    assert buffer.state().step == 1


def test_late_pushes_and_tokens_taken_twice_are_dropped_if_asked():
    model, plain = Model(), Model()
    buffer = model.buffer(2, drop_late=True)
    pushes = [RandomPush(seed) for seed in range(4)]
    push_all(model, buffer, [pushes[0], pushes[1]])
    push_all(model, buffer, [RandomPush(7)], value=0)  # late
    push_all(model, buffer, [pushes[2]], value=1, first=2)
    push_all(model, buffer, [RandomPush(8)], value=1, first=2)  # a duplicate
    state = buffer.state()
    assert (state.late, state.duplicates, state.included, state.pending) == (1, 1, 3, 1)
    push_all(model, buffer, [pushes[3]], value=1, first=3)
    plain.apply_mean(pushes[:2], 2)
    plain.apply_mean(pushes[2:], 2)
    # Pushed with version 0 both times, the second are one update older.
    model.expect_equal(plain, but=["staleness"])


def test_spent_tokens_complete_a_step_with_what_others_have_pushed():
    model, plain = Model(), Model()
    buffer = model.buffer(3, drop_late=True)
    push = RandomPush(0)
    push_all(model, buffer, [push])
    assert not buffer.spend(0, [0, 1], 4).ready  # It has the first.
    assert not buffer.spend(1, [2], 4).ready  # Not of its step.
    last = buffer.spend(0, [2], 4)
    assert last.ready and last.step.numpy() == 1
    # Until it is applied, it can be found.
    assert buffer.revoke([4]).unapplied.numpy().tolist() == [1]
    model.apply(last)
    buffer.applied(last)
    assert buffer.revoke([4]).unapplied.numpy().tolist() == []
    plain.apply_mean([push], 3)
    model.expect_equal(plain)
    state = buffer.state()
    assert (state.step, state.spent, state.included, state.pending) == (1, 2, 1, 0)


def test_a_buffer_tells_what_it_has_of_one_who_is_gone():
    buffer = GradientBuffer(CPU, [], [], capacity=2, drop_late=True)
    buffer.push(1, 0, 0, ticket=5)
    found = buffer.revoke([4, 5])
    assert [t.numpy().tolist() for t in found] == [[], [1], 0]
    buffer.push(0, 0, 0, ticket=6)
    found = buffer.revoke([5, 6])
    assert [t.numpy().tolist() for t in found] == [[1], [0, 1], 1]


def test_decayed_pushes_are_weighted_by_the_age_of_their_token():
    model, plain = Model(OPTIMIZERS[0]), Model(OPTIMIZERS[0])
    buffer = model.buffer(1, weight=staleness.InversePower(k=1, baseline=2))
    buffer.restore(7)
    push = RandomPush(1)
    model.apply(buffer.push(0, 4, 7, **push.arguments(model)))  # of age 3: tau is 4
    plain.apply_mean([push], 2)
    model.expect_equal(plain)
    assert buffer.state().decayed == 1


def test_the_state_tells_what_was_counted():
    buffer = GradientBuffer(CPU, [], [], capacity=2)
    tokens = [(0, 0), (0, 0), (1, 0), (1, 1), (0, 1)]  # value, pulled step
    for index, (value, pulled) in enumerate(tokens):
        buffer.push(index, value, pulled)
    state = buffer.state()
    assert (state.step, state.applied, state.pending, state.applications) == (2, 0, 1, 2)
    assert (state.included, state.decayed, state.excluded) == (5, 0, 0)
    assert (state.late, state.duplicates) == (0, 0)
    # Pushed at steps 0, 0, 1, 1, 2.
    assert state.staleness == staleness.Statistics.from_counters(
        [expected_counters([1, 1, 2, 1, 2])]
    )
    assert (state.age_sum, state.age_max) == (2, 2)
    assert buffer_ops.gradient_buffer_state(buffer.handle).shape == [12 + COUNTERS]


def test_a_restored_buffer_goes_on_from_its_step():
    buffer = GradientBuffer(CPU, [], [], capacity=2)
    buffer.push(0, 0, 0)
    buffer.restore(40)
    assert buffer.step() == buffer_ops.BufferStep(40, 40)
    buffer.push(1, 40, 40)
    last = buffer.push(2, 40, 40)
    assert last.ready and last.step.numpy() == 41
    assert buffer.step() == buffer_ops.BufferStep(41, 40)
    assert buffer.applied(last).numpy() == 41
    assert buffer.state().applications == 1


def test_a_function_keeps_the_order_of_pushes_and_reads():
    buffer = GradientBuffer(CPU, [], [], capacity=1)

    @tf.function
    def steps():
        read = []
        for token in range(5):
            read.append(buffer.step().applied)
            buffer.applied(buffer.push(token, 0, 0))
        return tf.stack(read)

    assert steps().numpy().tolist() == [0, 1, 2, 3, 4]
    assert steps().numpy().tolist() == [5, 6, 7, 8, 9]


def test_shapes_are_known_while_tracing():
    model = Model()
    buffer = model.buffer(2)
    shapes = {}

    @tf.function(input_signature=[tf.TensorSpec([None])])
    def step(dense):
        aggregate = buffer.push(0, 0, 0, dense=dense)
        shapes.update(
            {name: getattr(aggregate, name).shape.as_list() for name in ("ready", "step", "dense")}
        )
        shapes["counts"] = aggregate.rows.counts.shape.as_list()
        shapes["read"] = buffer.step().applied.shape.as_list()
        return aggregate.dense

    step(tf.zeros([8]))
    assert shapes == {"ready": [], "step": [], "dense": [None], "counts": [2], "read": []}
    assert step(tf.ones([8])).numpy().tolist() == [0.5] * 8


def test_a_buffer_is_destroyed_with_its_object():
    buffer = GradientBuffer(CPU, [], [], capacity=2)
    handle = buffer.handle
    assert buffer_ops.gradient_buffer_step(handle).step.numpy() == 0
    del buffer
    gc.collect()
    with pytest.raises(tf.errors.NotFoundError):
        buffer_ops.gradient_buffer_step(handle)


def test_workers_push_to_the_buffer_of_a_server(clusters):
    cluster = clusters.get(workers=2, ps=1)
    cluster.connect()
    with tf.device("/job:ps/task:0"):
        model = Model()
    ps = model.dense[0].value.device
    assert "ps" in ps
    buffer = GradientBuffer(ps, model.dense_states, model.table_states, capacity=2)
    gradients = [RandomPush(1), RandomPush(2)]

    @tf.function
    def step(token, dense, ids, values):
        pulled = buffer.step()
        rows = PackedBags(tf.size(ids, out_type=tf.int64)[tf.newaxis], ids)
        aggregate = buffer.push(
            token,
            pulled.step,
            pulled.applied,
            dense=dense,
            tables=model.table_states[:1],
            values=values,
            rows=rows,
        )
        with tf.device(ps):
            rate = tf.constant(0.5)
            a = aggregate
            applied = [
                model.optimizer.apply_dense(
                    model.dense_states, a.dense, a.dense_versions, rate, a.step
                ),
                model.optimizer.apply_rows(
                    model.table_states, a.values, a.rows, a.row_versions, rate, a.step
                ),
            ]
            with tf.control_dependencies(applied):
                return buffer.applied(aggregate)

    done = []
    for worker, push in enumerate(gradients):
        arguments = push.arguments(model)
        values = tf.ones([12])
        with tf.device(f"/job:worker/task:{worker}"):
            ids = tf.constant([3, worker, 3], tf.int64)
            done.append(int(step(tf.constant(worker, tf.int64), arguments["dense"], ids, values)))
    assert done == [0, 1]
    state = buffer.state()
    assert (state.step, state.applied, state.included, state.pending) == (1, 1, 2, 0)

    plain = Model()
    for push, worker in zip(gradients, range(2), strict=True):
        push.rows = {0: (np.array([3, worker, 3]), np.ones((3, 4)), np.arange(3), np.ones(3))}
    plain.apply_mean(gradients, 2)
    for a, b in zip([*model.dense, *model.tables], [*plain.dense, *plain.tables], strict=True):
        np.testing.assert_allclose(a, b, 1e-5, 1e-6)


def test_a_buffer_whose_server_is_gone_goes_quietly(clusters, monkeypatch):
    cluster = clusters.get(workers=2, ps=1)
    cluster.connect()
    buffers = [GradientBuffer("/job:ps/task:0", [], [], capacity=2)]
    assert buffers[0].state().step == 0
    cluster.kill("ps", 0)
    raised = []
    monkeypatch.setattr("sys.unraisablehook", raised.append)
    buffers.clear()
    gc.collect()
    assert not raised
