"""The update, pull, normalization and delay ops agree with rules written in numpy."""

import threading

import numpy as np
import pytest
import tensorflow as tf

from tf_recsync import ops

# Count, sum, sum of squares, max; exact buckets; eight an octave; skipped; a window.
COUNTERS = 4 + 32 + 8 * 27 + 1 + 7
EPSILON = 1e-7
FLOATS = [tf.float32, tf.float16, tf.bfloat16]
RNG = np.random.default_rng(7)
SEED = RNG.bit_generator.state


@pytest.fixture(autouse=True)
def _seeded():
    RNG.bit_generator.state = SEED  # each test's numbers are its own, whatever ran before


class State:
    """A variable with all that may live beside it: per row if `table`, else once."""

    def __init__(self, value, table=False):
        value = np.asarray(value, np.float32)
        slots = value.shape[:1] if table else ()
        self.table = table
        self.value = tf.Variable(value)
        self.accumulator = tf.Variable(np.full_like(value, 0.1))
        self.version = tf.Variable(np.zeros(slots, np.int64))
        self.counters = tf.Variable(np.zeros([COUNTERS], np.int64))
        self.period = tf.Variable(np.zeros(slots, np.int32 if table else np.int64))
        self.length = tf.Variable(np.zeros(slots, np.float32))

    def everything(self):
        return [v.numpy() for v in vars(self).values() if isinstance(v, tf.Variable)]

    @property
    def tau(self) -> int:
        """The sum of all staleness counted so far."""
        return int(self.counters[1])


def push(rule, states, gradient, pulled=(), ids=None, lr=0.5, step=1, **changes):
    """Calls an update op: on a table if `ids` are given, else on a list of variables."""
    rows, many = ids is not None, [states] if isinstance(states, State) else states
    period, sensitivity = changes.get("swap_period", 0), changes.get("update_sensitivity", -1)
    arguments = {
        "variables": [s.value.handle for s in many],
        "versions": [s.version.handle for s in many],
        "counters": [s.counters.handle for s in many],
        "last_periods": [s.period.handle for s in many if period],
        "last_updates": [s.length.handle for s in many if sensitivity >= 0],
        "gradient": gradient,
        "pulled_versions": tf.reshape(tf.cast(pulled, tf.int64), [-1]),
        "learning_rate": lr,
        "global_step": step,
    }
    if rule == "adagrad":
        arguments["accumulators"] = [s.accumulator.handle for s in many]
        arguments["epsilon"] = EPSILON
    if rows:
        arguments |= {
            "gradient": tf.reshape(gradient, [-1]),
            "indices": ids,
            "counts": tf.reshape(tf.size(ids, out_type=tf.int64), [1]),
        }
    return getattr(ops, f"{rule}_{'rows' if rows else 'dense'}")(**(arguments | changes))


def pull(state, ids=None):
    if ids is not None:
        shape, ids = tf.shape(ids), tf.reshape(ids, [-1])
        packed, versions = ops.gather_rows(
            [state.value.handle],
            [state.version.handle],
            ids,
            tf.reshape(tf.size(ids, out_type=tf.int64), [1]),
        )
        width = tf.cast(state.value.shape[1:].as_list(), tf.int32)
        return tf.reshape(packed, tf.concat([shape, width], 0)), tf.reshape(versions, shape)
    return ops.pull_dense([state.value.handle], [state.version.handle])


class Rule:
    """SGD and Adagrad with weights and eager SWAP, in float64 numpy."""

    def __init__(self, value, adagrad):
        self.w = np.array(value, np.float64)
        self.v = np.full_like(self.w, 0.1)
        self.adagrad, self.length = adagrad, {}

    def update(self, row, g, rho=1.0, lr=0.5):
        g = rho * np.asarray(g, np.float64)
        if self.adagrad:
            self.v[row] += g * g
            g = g / np.sqrt(self.v[row] + EPSILON)
        self.w[row] -= lr * g
        self.length[row] = np.sqrt(np.sum((lr * g) ** 2))

    def check(self, state, tolerance=2e-5):
        np.testing.assert_allclose(state.value, self.w, tolerance, tolerance)
        if self.adagrad:
            np.testing.assert_allclose(state.accumulator, self.v, tolerance)


def summed(ids, gradient) -> dict:
    """The gradient of every row named, repeated rows summed."""
    ids, gradient = np.asarray(ids), tf.cast(gradient, tf.float64).numpy()
    return {int(row): gradient[ids == row].sum(0) for row in np.unique(ids)}


def expected_counters(taus) -> np.ndarray:
    taus = [int(tau) for tau in taus]
    counters = np.zeros([COUNTERS], np.int64)
    counters[:4] = len(taus), sum(taus), sum(t * t for t in taus), max(taus)
    for tau in taus:
        octave = tau.bit_length() - 1
        eighth = int((tau / 2**octave - 1) * 8)
        counters[4 + (tau if tau < 32 else 32 + 8 * (octave - 5) + eighth)] += 1
    return counters


def random_gradient(shape, dtype=tf.float32):
    return tf.cast(RNG.normal(size=shape), dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rule", ["sgd", "adagrad"])
def test_a_packed_push_updates_every_variable_by_its_own_piece(rule, dtype):
    shapes = [(3, 2), (), (5,), (0, 4), (2, 1, 3)]
    values = [RNG.normal(size=shape) for shape in shapes]
    states = [State(v) for v in values]
    rules = [Rule(v, rule == "adagrad") for v in values]
    for _ in range(20):
        pieces = [random_gradient(shape, dtype) for shape in shapes]
        push(rule, states, tf.concat([tf.reshape(p, [-1]) for p in pieces], 0))
        for one, piece in zip(rules, pieces, strict=True):
            one.update(..., tf.cast(piece, tf.float64))
    for one, state in zip(rules, states, strict=True):
        one.check(state)
        assert state.version.numpy() == 20
        np.testing.assert_array_equal(state.counters, expected_counters([1] * 20))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rule", ["sgd", "adagrad"])
def test_a_dense_push_without_a_gradient_changes_nothing(rule, dtype):
    states = [State([1.0, 2.0]), State(3.0)]
    push(rule, states, tf.ones([3], dtype))
    before = [s.everything() for s in states]
    nothing = tf.zeros([0], dtype)
    for pulled in [(), (0, 0)]:
        push(rule, states, nothing, pulled, swap_period=1, swap_decay=0.5, step=9)
    for old, state in zip(before, states, strict=True):
        for a, b in zip(old, state.everything(), strict=True):
            np.testing.assert_array_equal(a, b)
    with pytest.raises(tf.errors.InvalidArgumentError, match="must hold 2 versions or none, not 1"):
        push(rule, states, nothing, [0])


def test_a_push_of_no_rows_of_several_tables_changes_nothing():
    states = [State(np.ones((4, 3)), table=True), State(np.ones((2, 2)), table=True)]
    before = [s.everything() for s in states]
    none, counts = tf.zeros([0], tf.int64), tf.zeros([2], tf.int64)
    for bag_counts in (none, counts):
        bags = {"counts": counts, "bag_counts": bag_counts}
        push("adagrad", states, tf.zeros([0]), ids=none, **bags)
    for old, state in zip(before, states, strict=True):
        for a, b in zip(old, state.everything(), strict=True):
            np.testing.assert_array_equal(a, b)
    with pytest.raises(tf.errors.InvalidArgumentError, match="must hold the rows' 0 elements"):
        push("adagrad", states, tf.ones([3]), ids=none, counts=counts)


@pytest.mark.parametrize("index", [tf.int32, tf.int64])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rule", ["sgd", "adagrad"])
def test_repeated_rows_of_a_push_are_summed_and_update_their_row_once(rule, dtype, index):
    value = RNG.normal(size=(9, 3))
    state, one = State(value, table=True), Rule(value, rule == "adagrad")
    versions = np.zeros(9, np.int64)
    for _ in range(20):
        ids = RNG.integers(0, 7, 12)  # rows 7 and 8 are never named
        gradient = random_gradient((12, 3), dtype)
        push(rule, state, gradient, ids=tf.constant(ids, index))
        for row, g in summed(ids, gradient).items():
            one.update(row, g)
            versions[row] += 1
    one.check(state)
    np.testing.assert_array_equal(state.version, versions)
    np.testing.assert_array_equal(state.counters, expected_counters([1] * versions.sum()))
    np.testing.assert_array_equal(state.value[7:], value[7:].astype(np.float32))


def test_a_packed_push_updates_rows_of_every_table_by_their_own_piece():
    values = [RNG.normal(size=(5, 2)), RNG.normal(size=(8,)), RNG.normal(size=(3, 2, 2))]
    states, rules = [State(v, table=True) for v in values], [Rule(v, True) for v in values]
    for counts in ([4, 7, 2], [0, 3, 5], [6, 0, 0]):
        ids = [RNG.integers(0, len(v), n) for v, n in zip(values, counts, strict=True)]
        parts = [random_gradient((n, *v.shape[1:])) for v, n in zip(values, counts, strict=True)]
        push(
            "adagrad",
            states,
            tf.concat([tf.reshape(p, [-1]) for p in parts], 0),
            ids=np.concatenate(ids),
            counts=tf.constant(counts, tf.int64),
        )
        for rule, own, part in zip(rules, ids, parts, strict=True):
            for row, g in summed(own, part).items():
                rule.update(row, g)
    for rule, state in zip(rules, states, strict=True):
        rule.check(state)


def test_large_pushes_that_are_spread_over_threads_follow_the_same_rule():
    value = RNG.normal(size=(3000, 16))
    table, dense = State(value, table=True), State(value)
    by_row, whole = Rule(value, True), Rule(value, True)
    for _ in range(3):
        ids, gradient = RNG.integers(0, 3000, 4000), random_gradient((4000, 16))
        push("adagrad", table, gradient, ids=ids)
        for row, g in summed(ids, gradient).items():
            by_row.update(row, g)
        gradient = random_gradient((3000, 16))
        push("adagrad", dense, tf.reshape(gradient, [-1]))
        whole.update(..., gradient)
    by_row.check(table)
    whole.check(dense)


@pytest.mark.parametrize("rule", ["sgd", "adagrad"])
def test_a_push_of_no_rows_changes_nothing(rule):
    state = State(np.ones((4, 2)), table=True)
    before = state.everything()
    push(rule, state, tf.zeros([0, 2]), ids=tf.zeros([0], tf.int64))
    for old, new in zip(before, state.everything(), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("table", [False, True])
def test_tau_of_every_push_is_the_number_of_updates_since_its_pull_counted_with_it(table):
    state = State(np.zeros((3, 2)), table)
    # A and B are workers: "pull" reads values with versions, a number is the tau
    # that the push after it must be counted with.
    script = [
        ("A", "pull"),
        ("B", "pull"),
        ("A", 1),
        ("B", 2),
        ("A", 3),
        ("A", "pull"),
        ("B", 4),
        ("A", 2),
        ("B", "pull"),
        ("B", 1),
        ("B", 2),
        ("A", 5),
    ]
    ids = [2, 0] if table else None
    pulled, shape = {}, (2, 2) if table else (6,)
    for worker, event in script:
        if event == "pull":
            pulled[worker] = pull(state, ids)[1].numpy()
            continue
        before = state.tau
        push("sgd", state, tf.ones(shape), pulled[worker], ids)
        assert state.tau - before == event * (2 if table else 1)
    assert state.version.numpy().tolist() == ([8, 0, 8] if table else 8)


def test_a_version_from_a_file_stays_the_largest_that_there_is():
    most = 2**63 - 1
    state = State([1.0])
    state.version.assign(most - 1)
    for step in (1, 2, 3):
        push("sgd", state, [1.0], pulled=[0], step=step)
        assert state.version.numpy() == state.counters[3].numpy() == most
    assert state.value.numpy() == [-0.5]


def test_rows_have_staleness_of_their_own_and_a_repeated_row_has_its_oldest():
    state = State(np.zeros((3, 1)), table=True)
    for ids in ([0], [0, 1], [0]):
        push("sgd", state, tf.ones((len(ids), 1)), ids=ids)
    before = state.counters.numpy()
    # Versions are 3, 1, 0. Row 0 was pulled at 2, 0 and 1: tau is 3 - 0 + 1.
    push("sgd", state, tf.ones((5, 1)), [2, 1, 0, 0, 1], ids=[0, 1, 0, 2, 0])
    added = state.counters.numpy() - before
    assert added[:3].tolist() == [3, 4 + 1 + 1, 16 + 1 + 1]
    assert state.counters[3].numpy() == 4
    assert state.version.numpy().tolist() == [4, 2, 1]


@pytest.mark.parametrize("table", [False, True])
def test_counters_are_the_moments_and_the_histogram_of_all_taus(table):
    state, taus = State(np.zeros((50, 1)), table), []
    for _ in range(8 if table else 150):
        # Set ahead by hand, so that staleness spans many octaves.
        version = np.full(state.version.shape, 2**21, np.int64)
        state.version.assign(version)
        n = 20 if table else 1
        tau = np.exp(RNG.uniform(0, np.log(2**20), n)).astype(np.int64)
        ids = RNG.permutation(50)[:n] if table else None
        push("sgd", state, tf.zeros((n, 1) if table else (50,)), (2**21 + 1 - tau).tolist(), ids)
        taus += tau.tolist()
    np.testing.assert_array_equal(state.counters, expected_counters(taus))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


POWER = {"staleness_decay": "inverse_power"}
# name: (attributes, rho of tau, the last update's length, deviation and mean so far)
POLICIES = {
    "constant": ({}, lambda tau, *_: 1.0),
    "classic": ({**POWER, "staleness_power": 1.0}, lambda tau, *_: 1 / tau),
    "normalized": ({**POWER, "staleness_baseline": 3.0}, lambda tau, *_: min(1, 3 / tau) ** 2),
    "equation 7": (
        {**POWER, "staleness_baseline": 3.0, "staleness_normalized": False},
        lambda tau, *_: 1.0 if tau <= 3 else tau**-2,
    ),
    "threshold": (
        {"staleness_decay": "threshold", "staleness_iota": 2.0},
        lambda tau, *_: float(tau - 1 <= 2),
    ),
    "sensitivity": (
        {**POWER, "update_sensitivity": 1.5},
        lambda tau, length, *_: min(1, 1 / (tau * sigmoid(1.5 * length))) ** 2,
    ),
    "deviation": (
        {**POWER, "target_deviation": 1.2},
        lambda tau, _, sd, mean: min(1, 1 / (1.2 / sd * tau if sd > 1.2 else tau)) ** 2,
    ),
    "deviation and mean": (
        {**POWER, "target_deviation": 0.7, "target_mean": 1.5},
        lambda tau, _, sd, mean: max(1, 0.7 * (tau - mean) / sd + 1.5 if sd > 0.7 else tau) ** -2,
    ),
    "deviation and mean of the last pushes": (
        {**POWER, "target_deviation": 0.7, "target_mean": 1.5, "deviation_window": 6},
        lambda tau, _, sd, mean: max(1, 0.7 * (tau - mean) / sd + 1.5 if sd > 0.7 else tau) ** -2,
    ),
}


def recent(pushes, window) -> list:
    """The staleness that counts as measured, of lists by push.

    The window moves on by `window` pushes at once, and holds as many of before that.
    """
    first = max(len(pushes) // window - 1, 0) * window
    return [tau for taus in pushes[first:] for tau in taus]


@pytest.mark.parametrize("rule", ["sgd", "adagrad"])
@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_gradient_is_weighted_before_it_enters_the_accumulator(policy, table, rule):
    attributes, rho = POLICIES[policy]
    value = RNG.normal(size=(5, 2))
    state, one, pushes = State(value, table), Rule(value, rule == "adagrad"), []
    updates = np.zeros(5 if table else (), np.int64)
    for step in range(1, 40):
        ids = RNG.integers(0, 5, 4) if table else None
        gradient = random_gradient((4, 2) if table else (10,))
        now = state.version.numpy()[ids] if table else state.version.numpy()[None]
        # As on a larger cluster at first.
        pulled = np.maximum(now - RNG.integers(0, 8 if step < 20 else 4, now.shape), 0)
        push(rule, state, gradient, pulled.tolist(), ids, step=step, **attributes)
        # What was measured before this push counts, for all its rows alike.
        measured = recent(pushes, attributes.get("deviation_window", 1000))
        measured = (np.std(measured), np.mean(measured)) if measured else (0.0, 0.0)
        pushes.append([])
        rows = summed(ids, gradient) if table else {...: np.reshape(gradient, (5, 2))}
        for row, g in rows.items():
            own = (ids == row) if table else [True]
            tau = int((now - pulled + 1)[own].max())
            weight = rho(tau, one.length.get(row, 0.0), *measured)
            pushes[-1].append(tau)
            if weight > 0:
                one.update(row, g, weight)
                updates[row] += 1
    one.check(state, 1e-4)
    np.testing.assert_array_equal(state.version, updates)
    counted = expected_counters([tau for taus in pushes for tau in taus])
    np.testing.assert_array_equal(state.counters[:-7], counted[:-7])
    if policy == "sensitivity":
        lengths = [one.length.get(row, 0) for row in (range(5) if table else [...])]
        np.testing.assert_allclose(np.ravel(state.length), lengths, rtol=1e-4)


@pytest.mark.parametrize("table", [False, True])
def test_lazy_swap_gives_what_decaying_everything_at_every_period_gives(table):
    """5,000 touches of rows, with gaps in the global step; the rule decays eagerly."""
    period, decay, t = 13, 0.9, 0
    value = RNG.normal(size=(40, 2))
    state, one = State(value, table), Rule(value, True)
    for _ in range(500):
        gap = int(RNG.integers(1, 60 if RNG.uniform() < 0.1 else 4))
        for step in range(t + 1, t + gap + 1):
            if step % period == 0:
                one.v *= decay
        t += gap
        ids = RNG.permutation(40)[:10] if table else None
        gradient = random_gradient((10, 2) if table else (80,))
        push("adagrad", state, gradient, ids=ids, step=t, swap_period=period, swap_decay=decay)
        rows = summed(ids, gradient) if table else {...: np.reshape(gradient, (40, 2))}
        for row, g in rows.items():
            one.update(row, g)
    if table:  # a last touch without gradient brings every row up to date
        push(
            "adagrad",
            state,
            tf.zeros((40, 2)),
            ids=range(40),
            step=t,
            swap_period=period,
            swap_decay=decay,
        )
    one.check(state, 1e-4)


@pytest.mark.parametrize("table", [False, True])
def test_a_push_that_arrives_after_a_younger_one_decays_nothing_again(table):
    state, v = State(np.zeros((1, 1)), table), 0.1
    # The periods are 0, 1, 2, then 1, 2 and 0 again (late), 2 and 4.
    steps = {9: 1, 10: 0.5, 25: 0.5, 12: 1, 24: 1, 8: 1, 26: 1, 41: 0.25}
    for step, factor in steps.items():
        push(
            "adagrad",
            state,
            [[1.0]] if table else [1.0],
            [0],  # What is fresh is never late.
            ids=[0] if table else None,
            step=step,
            swap_period=10,
            swap_decay=0.5,
        )
        v = factor * v + 1
        assert state.accumulator.numpy().item() == pytest.approx(v, rel=1e-6)


@pytest.mark.parametrize("shape", [(6,), (2, 3), (0,), ()])
def test_pulls_give_values_with_their_versions(shape):
    table, dense = State(RNG.normal(size=(5, 2, 3)), table=True), State(RNG.normal(size=(2, 2)))
    table.version.assign(range(10, 15))
    dense.version.assign(7)
    ids = RNG.integers(0, 5, shape)
    for index in (tf.int32, tf.int64):
        values, versions = pull(table, tf.constant(ids, index))
        np.testing.assert_array_equal(values, table.value.numpy()[ids])
        np.testing.assert_array_equal(versions, 10 + ids)
    scalar = State(3.0)
    both = [dense, scalar]
    packed, versions = ops.pull_dense(
        [s.value.handle for s in both], [s.version.handle for s in both]
    )
    values, three = ops.unpack(packed, [[4], [1]])
    np.testing.assert_array_equal(values, dense.value.numpy().ravel())
    np.testing.assert_array_equal(three, [3.0])
    assert versions.numpy().tolist() == [7, 0]


def test_a_gather_with_versions_has_the_gradient_of_a_stock_gather():
    state, ids = State(RNG.normal(size=(4, 3)), table=True), [[0, 3], [3, 1]]
    with tf.GradientTape() as tape:
        tape.watch(state.value)
        loss = tf.reduce_sum(pull(state, ids)[0] ** 2)
    gradient = tape.gradient(loss, state.value)
    assert isinstance(gradient, tf.IndexedSlices)
    expected = np.zeros((4, 3))
    np.add.at(expected, np.ravel(ids), 2 * state.value.numpy()[np.ravel(ids)])
    np.testing.assert_allclose(summed(gradient.indices, gradient.values)[3], expected[3], 1e-6)
    # The table's shape comes with it: whoever makes the gradient dense needs it.
    np.testing.assert_allclose(tf.convert_to_tensor(gradient), expected, rtol=1e-6)


@pytest.mark.parametrize("table", [False, True])
def test_no_pull_sees_a_value_without_its_version(table):
    # Every push adds 1 to the values and to their versions. Pushes go on until every thread has
    # done enough, however slowly one gets on.
    state, disagreements = State(np.zeros((256, 64)), table), []
    pushes, pulls = [0] * 2, [0] * 3

    def enough():
        return disagreements or (min(pushes) >= 300 and min(pulls) >= 300)

    def pushing(worker):
        rng = np.random.default_rng(worker)
        while not enough():
            ids = rng.permutation(256) if table else None
            push("sgd", state, tf.ones((256, 64) if table else (256 * 64,)), ids=ids, lr=-1.0)
            pushes[worker] += 1

    def pulling(reader):
        while not enough():
            values, versions = pull(state, range(256) if table else None)
            values = values.numpy().reshape(256, 64)
            if not np.all(values == np.reshape(versions, (-1, 1))):
                disagreements.append((values, versions))
            pulls[reader] += 1

    threads = [threading.Thread(target=pushing, args=(i,), daemon=True) for i in range(2)]
    threads += [threading.Thread(target=pulling, args=(i,), daemon=True) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not disagreements
    assert np.all(state.value == float(sum(pushes)))  # no update was lost
