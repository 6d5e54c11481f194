"""Pooling on the server and gradients of pooled vectors, against loops over bags in numpy."""

import re

import numpy as np
import pytest
import tensorflow as tf
from test_update_ops import RNG, SEED, Rule, State, push, summed

from tf_recsync import ops, staleness

INVALID = tf.errors.InvalidArgumentError


@pytest.fixture(autouse=True)
def _seeded():
    RNG.bit_generator.state = SEED


def random_bags(counts, bag_counts):
    """Sorted random bags of each table, concatenated."""
    parts = [np.sort(RNG.integers(0, b, n)) for n, b in zip(counts, bag_counts, strict=True)]
    return np.concatenate(parts).astype(np.int32)


def gather(states, ids, counts, **pooling):
    return ops.gather_rows(
        [s.value.handle for s in states],
        [s.version.handle for s in states],
        ids,
        tf.constant(counts, tf.int64),
        **pooling,
    )


def pooled(value, ids, bags, scales, count):
    out = np.zeros((count, *value.shape[1:]))
    for row, bag, scale in zip(ids, bags, scales, strict=True):
        out[bag] += scale * value[row]
    return out


@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_bag_is_the_sum_of_its_rows_times_their_scales(scaled, index):
    shapes, counts, bag_counts = [(9, 3), (5,), (40, 2, 2)], [20, 0, 700], [7, 3, 90]
    states = [State(RNG.normal(size=s), table=True) for s in shapes]
    for state in states:
        state.version.assign(RNG.integers(0, 99, state.version.shape))
    ids = [RNG.integers(0, s[0], n) for s, n in zip(shapes, counts, strict=True)]
    bags = random_bags(counts, bag_counts)
    scales = RNG.normal(size=sum(counts)).astype(np.float32) if scaled else np.ones(sum(counts))
    packed, versions = gather(
        states,
        np.concatenate(ids).astype(index),
        counts,
        bags=bags,
        scales=scales.astype(np.float32) if scaled else None,
        bag_counts=bag_counts,
    )
    ends = np.cumsum(counts)[:-1]
    expected = [
        pooled(state.value.numpy(), *parts).ravel()
        for state, *parts in zip(
            states, ids, np.split(bags, ends), np.split(scales, ends), bag_counts, strict=True
        )
    ]
    np.testing.assert_allclose(packed, np.concatenate(expected), 1e-5, 1e-5)
    own = [s.version.numpy()[i] for s, i in zip(states, ids, strict=True)]
    np.testing.assert_array_equal(versions, np.concatenate(own))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_gathered_without_versions(dtype):
    tables = [tf.Variable(tf.cast(RNG.normal(size=s), dtype)) for s in [(9, 3), (200, 2)]]
    counts, bag_counts = [20, 700], [7, 90]
    ids = [RNG.integers(0, t.shape[0], n) for t, n in zip(tables, counts, strict=True)]
    bags, scales = random_bags(counts, bag_counts), RNG.normal(size=720).astype(np.float32)
    arguments = np.concatenate(ids), tf.constant(counts, tf.int64)
    pooling = {"bags": bags, "scales": scales, "bag_counts": bag_counts}
    versions = [tf.Variable(tf.zeros(t.shape[:1], tf.int64)) for t in tables]
    handles = [t.handle for t in tables]
    for options in ({}, pooling):
        packed, pulled = ops.gather_rows(handles, [], *arguments, **options)
        expected, _ = ops.gather_rows(handles, [v.handle for v in versions], *arguments, **options)
        np.testing.assert_array_equal(packed, expected)
        assert pulled.shape == (0,)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("pooling", ["none", "scales", "bags", "both"])
def test_the_gradient_of_a_gather_is_that_of_stock_ops_and_knows_its_bags(pooling, graph):
    tables = [tf.Variable(RNG.normal(size=s), dtype=tf.float32) for s in [(9, 3), (30, 2)]]
    counts, bag_counts = [20, 50], [7, 11]
    bags = random_bags(counts, bag_counts) if pooling in ("bags", "both") else None
    scales = RNG.normal(size=70).astype(np.float32) if pooling in ("scales", "both") else None
    options = {"bags": bags, "scales": scales, "bag_counts": None if bags is None else bag_counts}
    ids = [RNG.integers(0, t.shape[0], n) for t, n in zip(tables, counts, strict=True)]
    vectors = counts if bags is None else bag_counts
    upstream = RNG.normal(size=vectors[0] * 3 + vectors[1] * 2).astype(np.float32)

    def gradients():
        with tf.GradientTape() as tape:
            tape.watch([t.handle for t in tables])
            packed, _ = ops.gather_rows(
                [t.handle for t in tables],
                [],
                np.concatenate(ids),
                tf.constant(counts, tf.int64),
                **options,
            )
            loss = tf.reduce_sum(packed * upstream)
        found = tape.gradient(loss, [t.handle for t in tables])
        lookups = [ops.lookup_of(g) for g in found]
        assert all(ops.lookup_of(tf.IndexedSlices(g.values, g.indices)) is None for g in found)
        return [tf.convert_to_tensor(g) for g in found], [flat for flat, _ in lookups]

    found, flat = (tf.function(gradients) if graph else gradients)()
    np.testing.assert_array_equal(tf.concat(flat, 0), upstream)
    every = np.ones(70) if scales is None else scales
    own_bags = np.concatenate([np.arange(n) for n in counts]) if bags is None else bags
    parts = np.split(upstream, [vectors[0] * 3])
    for i, (table, gradient) in enumerate(zip(tables, found, strict=True)):
        part = slice(0, 20) if i == 0 else slice(20, 70)
        expected = np.zeros(table.shape)
        wide = parts[i].reshape(-1, table.shape[1])
        np.add.at(expected, ids[i], wide[own_bags[part]] * every[part, None])
        np.testing.assert_allclose(gradient, expected, 1e-5, 1e-5)


def test_bags_without_any_row_are_zeros():
    states = [State(np.ones((4, 3)), table=True), State(np.ones((4, 2)), table=True)]
    packed, versions = gather(
        states, np.zeros([0], np.int64), [0, 0], bags=np.zeros([0], np.int32), bag_counts=[2, 1]
    )
    assert packed.numpy().tolist() == [0.0] * 8
    assert versions.shape == (0,)
    packed, versions = gather(states, np.zeros([0], np.int64), [0, 0])
    assert packed.shape == versions.shape == (0,)


def test_scales_without_bags_weigh_every_row():
    state = State(RNG.normal(size=(6, 3)), table=True)
    ids, scales = np.array([4, 0, 4]), np.array([2.0, -1.0, 0.5], np.float32)
    packed, _ = gather([state], ids, [3], scales=scales)
    np.testing.assert_allclose(packed, (state.value.numpy()[ids] * scales[:, None]).ravel())


@pytest.mark.parametrize("dtype", [tf.float32, tf.float16])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("rule", ["sgd", "adagrad"])
def test_the_gradient_of_a_bag_reaches_each_of_its_rows_times_its_scale(rule, scaled, dtype):
    values = [RNG.normal(size=(9, 3)), RNG.normal(size=(30, 2))]
    states, rules = (
        [State(v, table=True) for v in values],
        [Rule(v, rule == "adagrad") for v in values],
    )
    for _ in range(15):
        counts, bag_counts = [20, int(RNG.integers(0, 900))], [7, 100]
        ids = [RNG.integers(0, len(v), n) for v, n in zip(values, counts, strict=True)]
        bags = random_bags(counts, bag_counts)
        scales = RNG.normal(size=sum(counts)).astype(np.float32)
        parts = [
            tf.cast(0.1 * RNG.normal(size=(b, v.shape[1])), dtype)
            for b, v in zip(bag_counts, values, strict=True)
        ]
        push(
            rule,
            states,
            tf.concat([tf.reshape(p, [-1]) for p in parts], 0),
            ids=np.concatenate(ids),
            counts=tf.constant(counts, tf.int64),
            bags=bags,
            scales=scales if scaled else None,
            bag_counts=bag_counts,
        )
        ends = counts[:1]
        for one, own, bag, scale, part in zip(
            rules, ids, np.split(bags, ends), np.split(scales, ends), parts, strict=True
        ):
            expanded = tf.cast(part, tf.float64).numpy()[bag]
            if scaled:
                expanded = expanded * scale[:, None]
            for row, g in summed(own, expanded).items():
                one.update(row, g)
    for one, state in zip(rules, states, strict=True):
        one.check(state, 1e-4)


def test_the_staleness_of_a_pooled_row_is_that_of_its_oldest_pull():
    state = State(np.zeros((3, 1)), table=True)
    state.version.assign([5, 5, 5])
    # Row 0 comes in both bags, pulled at 4 and at 2.
    push(
        "sgd",
        state,
        [1.0, 1.0],
        pulled=[4, 5, 2],
        ids=[0, 1, 0],
        bags=[0, 0, 1],
        bag_counts=[2],
    )
    assert state.counters[:3].numpy().tolist() == [2, 4 + 1, 16 + 1]
    assert state.version.numpy().tolist() == [6, 6, 5]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("has_bags", [False, True])
def test_pooling_has_the_gradient_of_a_stock_gather_and_sum(has_bags, scaled):
    shapes, counts = [(5, 3), (4, 2)], [6, 3]
    bag_counts = [4, 2] if has_bags else counts
    states = [State(RNG.normal(size=s), table=True) for s in shapes]
    ids = [RNG.integers(0, s[0], n) for s, n in zip(shapes, counts, strict=True)]
    bags = random_bags(counts, bag_counts)
    scales = RNG.normal(size=9).astype(np.float32) if scaled else None
    arguments = {"bags": bags, "bag_counts": bag_counts} if has_bags else {}
    slope = RNG.normal(size=sum(b * s[1] for b, s in zip(bag_counts, shapes, strict=True)))

    @tf.function
    def gradients():
        with tf.GradientTape() as tape:
            for state in states:
                tape.watch(state.value)
            packed, _ = gather(states, np.concatenate(ids), counts, scales=scales, **arguments)
            loss = tf.reduce_sum(packed * slope.astype(np.float32))
        return tape.gradient(loss, [s.value for s in states])

    start = 0
    own_bags = np.split(bags, counts[:1]) if has_bags else [np.arange(n) for n in counts]
    own_scales = np.split(np.ones(9) if scales is None else scales, counts[:1])
    for i, gradient in enumerate(gradients()):
        end = start + bag_counts[i] * shapes[i][1]
        expected = np.zeros(shapes[i])
        part = slope[start:end].reshape(bag_counts[i], -1)
        np.add.at(expected, ids[i], part[own_bags[i]] * own_scales[i][:, None])
        np.testing.assert_allclose(tf.convert_to_tensor(gradient), expected, 1e-5, 1e-5)
        start = end


GOOD = {"bags": [0, 0, 2], "scales": [1.0, 1.0, 1.0], "bag_counts": [3]}


@pytest.mark.parametrize("what", ["gather", "push"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bags": [0, 2, 1]}, r"bags\[2\] = 1 is not in \[2, 3\)"),
        ({"bags": [-1, 0, 0]}, r"bags\[0\] = -1 is not in \[0, 3\)"),
        ({"bags": [0, 0, 3]}, r"bags\[2\] = 3 is not in \[0, 3\)"),
        ({"bags": [0, 0]}, r"bags must have shape \[3\] with these bag_counts, not \[2\]"),
        ({"bags": np.zeros([0], np.int32)}, r"bags must have shape \[3\] .*, not \[0\]"),
        ({"bags": [[0, 0, 0]]}, r"bags must have shape \[3\] .*, not \[1,3\]|rank"),
        (
            {"bag_counts": np.zeros([0], np.int64)},
            r"bags must have shape \[0\] with empty bag_counts",
        ),
        ({"bag_counts": [3, 3]}, r"bag_counts must have shape \[1\] or \[0\], not \[2\]"),
        ({"bag_counts": [-1]}, r"bag_counts\[0\] = -1 is not in \[0, "),
        ({"bag_counts": [2**40]}, r"bag_counts\[0\] = 1099511627776 is not in \[0, "),
        ({"scales": [1.0]}, r"scales must have shape \[3\] or \[0\], not \[1\]"),
        ({"scales": [[1.0] * 3]}, r"scales must have shape \[3\] .*, not \[1,3\]|rank"),
    ],
)
def test_bad_bags_are_refused_by_name_and_change_nothing(what, changes, message):
    states = [State(np.ones((4, 2)), table=True)]
    before = states[0].everything()
    arguments = GOOD | changes
    with pytest.raises(INVALID) as failure:
        if what == "gather":
            gather(states, [0, 3, 3], [3], **arguments)
        else:
            push("adagrad", states, tf.ones([6]), ids=[0, 3, 3], **arguments)
    assert re.search(message, str(failure.value)), failure.value
    for old, new in zip(before, states[0].everything(), strict=True):
        np.testing.assert_array_equal(old, new)
    push("adagrad", states, tf.ones([6]), ids=[0, 3, 3], **GOOD)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("table", [False, True])
class TestNonfinite:
    """A gradient with a bad value in the second of three variables or rows."""

    def states(self, table):
        if table:
            return [State(np.ones((3, 2)), table=True)]
        return [State(np.ones(2)) for _ in range(3)]

    def push(self, states, table, bad, nonfinite):
        gradient = tf.constant([1.0, 1.0, 1.0, bad, 1.0, 1.0])
        ids = [0, 1, 2] if table else None
        push("adagrad", states, gradient, ids=ids, nonfinite=nonfinite)

    def test_is_applied_by_default_like_any_other(self, table, bad):
        states = self.states(table)
        self.push(states, table, bad, "apply")
        values = np.concatenate([np.ravel(s.value) for s in states])
        assert np.isnan(values).tolist() == [False, False, False, True, False, False]
        assert sum(int(np.sum(s.version)) for s in states) == 3

    def test_is_left_out_and_counted_with_skip(self, table, bad):
        states, good = self.states(table), self.states(table)
        self.push(states, table, bad, "skip")
        self.push(good, table, 1.0, "skip")
        expected = np.concatenate([np.reshape(s.value, (-1, 2)) for s in good])
        expected[1] = 1.0
        values = np.concatenate([np.reshape(s.value, (-1, 2)) for s in states])
        np.testing.assert_array_equal(values, expected)
        versions = np.concatenate([np.reshape(s.version, -1) for s in states])
        assert versions.tolist() == [1, 0, 1]
        assert [int(s.counters[staleness.SKIPPED]) for s in states] == ([1] if table else [0, 1, 0])
        assert sum(int(s.counters[0]) for s in states) == 2

    def test_is_refused_with_its_place_and_nothing_applied_with_error(self, table, bad):
        states = self.states(table)
        before = [v for s in states for v in s.everything()]
        place = "table 0, row 1" if table else "variable 1 is not finite: its element 1"
        with pytest.raises(INVALID, match=f"gradient of {place}"):
            self.push(states, table, bad, "error")
        for old, new in zip(before, [v for s in states for v in s.everything()], strict=True):
            np.testing.assert_array_equal(old, new)
        self.push(states, table, 1.0, "error")


def test_the_sum_of_a_row_decides_whether_it_is_finite():
    state = State(np.ones((2, 1)), table=True)
    huge = float(np.finfo(np.float32).max)
    push("sgd", state, [huge, huge, 1.0], ids=[0, 0, 1], nonfinite="skip")
    assert state.version.numpy().tolist() == [0, 1]


def test_an_unknown_way_with_bad_gradients_is_refused():
    with pytest.raises(INVALID, match="nonfinite must be apply, skip or error, not drop"):
        push("sgd", State([1.0]), [1.0], nonfinite="drop")
