"""Adam and FTRL against rules in float64 numpy and, where they agree, the stock optimizers."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_recsync as recsync
from tf_recsync import Swap, ops, optimizers, staleness
from tf_recsync.ops.bags import Bags, PackedBags

RNG = np.random.default_rng(17)
SEED = RNG.bit_generator.state
SWAP = Swap(period=4, decay=0.5)
LR = 0.1


@pytest.fixture(autouse=True)
def _seeded():
    RNG.bit_generator.state = SEED


class AdamRule:
    """Adam with moments that every step decays, touched or not: the eager rule."""

    def __init__(self, value, b1=0.9, b2=0.999, epsilon=1e-7):
        self.w = np.array(value, np.float64)
        self.m, self.v = np.zeros_like(self.w), np.zeros_like(self.w)
        self.b1, self.b2, self.epsilon = b1, b2, epsilon

    def decay(self, factor):
        self.v *= factor

    def step(self, gradient, touched, t, lr=LR):
        """Step t; `gradient` is 0 where nothing is touched."""
        self.m = self.b1 * self.m + (1 - self.b1) * gradient
        self.v = self.b2 * self.v + (1 - self.b2) * gradient**2
        alpha = lr * np.sqrt(1 - self.b2**t) / (1 - self.b1**t)
        update = alpha * self.m / (np.sqrt(self.v) + self.epsilon)
        self.w[touched] -= update[touched]


class FtrlRule:
    """FTRL-Proximal; SWAP decays n for all, with z such that no weight moves."""

    def __init__(self, value, l1=0.0, l2=0.0, beta=0.0, power=-0.5):
        self.w = np.array(value, np.float64)
        self.n, self.z = np.full_like(self.w, 0.1), np.zeros_like(self.w)
        self.l1, self.l2, self.beta, self.p = l1, l2, beta, -power

    def decay(self, factor):
        self.z -= ((factor * self.n) ** self.p - self.n**self.p) / LR * self.w
        self.n *= factor

    def step(self, gradient, touched, t, lr=LR):
        n = self.n + gradient**2
        z = self.z + gradient - (n**self.p - self.n**self.p) / lr * self.w
        w = -np.sign(z) * np.maximum(np.abs(z) - self.l1, 0)
        w /= (self.beta + n**self.p) / lr + 2 * self.l2
        for old, new in ((self.n, n), (self.z, z), (self.w, w)):
            old[touched] = new[touched]


FTRL = {"l1": 0.05, "l2": 0.02, "beta": 0.3}
CASES = {
    "adam": (optimizers.Adam, AdamRule, {}, {}),
    "adam, other decays": (
        optimizers.Adam,
        AdamRule,
        {"beta_1": 0.5, "beta_2": 0.75, "epsilon": 1e-3},
        {"b1": 0.5, "b2": 0.75, "epsilon": 1e-3},
    ),
    "ftrl": (optimizers.Ftrl, FtrlRule, {}, {}),
    "ftrl, regularized": (optimizers.Ftrl, FtrlRule, FTRL, FTRL),
    "ftrl, another power": (
        optimizers.Ftrl,
        FtrlRule,
        {"learning_rate_power": -0.75, "l1": 0.1},
        {"power": -0.75, "l1": 0.1},
    ),
}


def make(case, value, **kwargs):
    cls, rule, arguments, rule_arguments = CASES[case]
    return cls(LR, **arguments, **kwargs), rule(value, **rule_arguments)


# Compiled without SWAP as well where nothing else is left out of the rule.
@pytest.mark.parametrize(
    ("case", "swap", "jit"),
    [(case, swap, False) for case in CASES for swap in (None, SWAP)]
    + [(case, SWAP, True) for case in CASES]
    + [("adam, other decays", None, True), ("ftrl, regularized", None, True)],
)
def test_dense_variables_and_rows_follow_the_eager_rule(case, swap, jit):
    values = [RNG.normal(size=(7, 3)), RNG.normal(size=(2, 5))]
    table = keras.Variable(values[0], dtype="float32", name="embeddings")
    dense = keras.Variable(values[1], dtype="float32", name="kernel")
    optimizer, by_row = make(case, values[0], swap=swap)
    _, whole = make(case, values[1])
    optimizer.build([table, dense])

    @tf.function(jit_compile=jit)
    def apply(ids, rows, gradient):
        optimizer.apply([tf.IndexedSlices(rows, ids, tf.constant([7, 3])), gradient])

    for t in range(1, 31):
        ids = RNG.integers(0, 6, 4)  # some twice; most rows wait a few steps; row 6 never comes
        rows = RNG.normal(size=(4, 3)).astype(np.float32)
        gradient = RNG.normal(size=(2, 5)).astype(np.float32)
        apply(tf.constant(ids), tf.constant(rows), tf.constant(gradient))
        summed = np.zeros((7, 3))
        np.add.at(summed, ids, rows)
        for rule, g, touched in ((by_row, summed, np.unique(ids)), (whole, gradient, ...)):
            if swap and t % swap.period == 0:
                rule.decay(swap.decay)
            rule.step(g, touched, t)
    np.testing.assert_allclose(table.numpy(), by_row.w, 2e-4, 2e-5)
    np.testing.assert_allclose(dense.numpy(), whole.w, 2e-4, 2e-5)
    np.testing.assert_array_equal(table.numpy()[6], values[0][6].astype(np.float32))


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("case", ["adam", "ftrl"])
def test_after_the_global_step_was_set_back_moments_and_periods_go_on_from_there(case, jit):
    values = [RNG.normal(size=(3, 2)), RNG.normal(size=(4,))]
    variables = [
        keras.Variable(value, dtype="float32", name=name)
        for value, name in zip(values, ("embeddings", "kernel"), strict=True)
    ]
    optimizer, rules = None, []
    for value in values:
        optimizer, rule = make(case, value, swap=SWAP)
        rules.append(rule)
    optimizer.build(variables)

    @tf.function(jit_compile=jit)
    def apply(rows, gradient):
        optimizer.apply([tf.IndexedSlices(rows, tf.range(3), tf.constant([3, 2])), gradient])

    back = 2 * SWAP.period - 2
    for t in [*range(1, 30), *range(back + 1, 40)]:
        if t == back + 1:
            optimizer.iterations.assign(back)
        gradients = [RNG.normal(size=value.shape).astype(np.float32) for value in values]
        apply(*map(tf.constant, gradients))
        for rule, gradient in zip(rules, gradients, strict=True):
            if t % SWAP.period == 0:
                rule.decay(SWAP.decay)
            rule.step(gradient, ..., t)
    for variable, rule in zip(variables, rules, strict=True):
        np.testing.assert_allclose(variable, rule.w, 2e-4, 2e-5)


@pytest.mark.parametrize("jit", [False, True])
def test_beyond_what_int32_counts_periods_end_and_each_step_is_the_one_after_the_last(jit):
    most = 2**31 - 1
    value = RNG.normal(size=(6, 3))
    table = keras.Variable(value, dtype="float32", name="embeddings")
    optimizer = optimizers.Adam(LR, swap=Swap(period=1, decay=0.5))
    optimizer.build([table])
    state = optimizer.state_of(table)
    first = most - 12
    optimizer.iterations.assign(first)
    for variable in (state.last_periods[0], state.last_steps[0]):
        variable.assign(np.full(6, first))

    @tf.function(jit_compile=jit)
    def step(gradient, ids):
        optimizer.apply([tf.IndexedSlices(gradient, ids, (6, 3))], [table])

    w, m, v = value.astype(np.float32).astype(np.float64), np.zeros((6, 3)), np.zeros((6, 3))
    last = np.full(6, first)
    for t in range(first + 1, most + 13):
        ids = RNG.choice(6, 3, replace=False)
        gradient = RNG.normal(size=(3, 3)).astype(np.float32)
        step(tf.constant(gradient), tf.constant(ids))
        for row, g in zip(ids, gradient, strict=True):
            # The steps that are known to lie between, and the periods that there were.
            steps = t - last[row] if last[row] < most else 1
            periods = min(t, most) - last[row]
            last[row] = min(t, most)
            m[row] = 0.9**steps * m[row] + 0.1 * g
            v[row] = 0.5**periods * 0.999**steps * v[row] + 0.001 * g.astype(np.float64) ** 2
            w[row] -= LR * m[row] / (np.sqrt(v[row]) + 1e-7)
    np.testing.assert_array_equal(state.last_periods[0], last)
    np.testing.assert_array_equal(state.last_steps[0], last)
    assert np.any(last == most)
    np.testing.assert_allclose(table, w, 1e-4, 1e-4)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("jit", [False, True])
def test_adam_that_is_not_lazy_moves_all_rows_as_the_stock_one_does(jit, dtype):
    values = RNG.normal(size=(40, 3))
    table, stock_table = (keras.Variable(values, dtype=dtype, name="embeddings") for _ in "ab")
    optimizer = optimizers.Adam(LR, lazy=False, beta_2=0.9)
    stock = keras.optimizers.Adam(LR, beta_2=0.9)
    for one, variable in ((optimizer, table), (stock, stock_table)):
        one.build([variable])

    @tf.function(jit_compile=jit)
    def apply(ids, rows):
        optimizer.apply([tf.IndexedSlices(rows, ids, tf.constant([40, 3]))])

    for _ in range(20):
        ids = RNG.integers(0, 30, 4)  # some twice; rows from 30 never come
        rows = RNG.normal(size=(4, 3)).astype(dtype)
        apply(tf.constant(ids), tf.constant(rows))
        summed = np.zeros((40, 3))
        np.add.at(summed, ids, rows)
        stock.apply([tf.constant(summed, dtype)])
    np.testing.assert_allclose(table.numpy(), stock_table.numpy(), rtol=1e-5, atol=1e-5)
    state = optimizer.state_of(table)
    assert np.unique(state.last_steps[0].numpy()).tolist() == [20]
    # What moves by itself is no update that others could be stale by.
    assert state.versions.numpy()[30:].sum() == 0 < state.versions.numpy()[:30].sum()


def test_rows_make_up_for_steps_that_brought_no_push():
    values = RNG.normal(size=(5, 2))
    table, stock_table = (keras.Variable(values, dtype="float32", name="embeddings") for _ in "ab")
    optimizer, stock = optimizers.Adam(LR, lazy=False), keras.optimizers.Adam(LR)
    for one, variable in ((optimizer, table), (stock, stock_table)):
        one.build([variable])
    state = optimizer.state_of(table)
    empty = tf.zeros([0], tf.int64)
    for step in range(1, 16):
        gradient = np.zeros((5, 2), np.float32)
        if step in (1, 3, 9, 15):
            gradient[step % 3] = RNG.normal(size=2)
            rows = PackedBags.pack([Bags(tf.constant([step % 3], tf.int64))])
            pushed = tf.constant(gradient[step % 3])
            optimizer.apply_rows([state], pushed, rows, empty, LR, tf.constant(step, tf.int64))
        stock.apply([tf.constant(gradient)])
    np.testing.assert_allclose(table.numpy(), stock_table.numpy(), rtol=1e-5, atol=1e-5)


class StockAdam(keras.optimizers.Adam):
    """Keras's Adam on dense gradients: of a sparse one it squares rows named twice one by one."""

    def apply(self, grads, trainable_variables=None):
        super().apply([tf.convert_to_tensor(g) for g in grads], trainable_variables)


def click_model(layer, optimizer, **options):
    """A compiled model on the mean of three rows of a table."""
    inputs = keras.Input((3,), dtype="int64")
    if isinstance(layer, keras.layers.Embedding):
        pooled = keras.layers.GlobalAveragePooling1D()(layer(inputs))
    else:
        pooled = layer({"id": inputs})["id"]
    model = keras.Model(inputs, keras.layers.Dense(1)(pooled))
    model.compile(optimizer, "mse", **options)
    return model


def sharded_table():
    """24 rows, the even ones on one server and the odd ones on another."""
    table = recsync.layers.TableConfig("rows", 24, 4, "normal", "mean", 2)
    return recsync.layers.EmbeddingCollection(
        [table], [recsync.layers.FeatureConfig("id", "rows")], name="table"
    )


def weights_of(model):
    """The table, and the dense layer's."""
    layer = model.get_layer("table")
    table = layer.get_weights()[0]
    if hasattr(layer, "table_values"):
        table = layer.table_values("rows")
    return [table, *model.layers[-1].get_weights()]


EMBEDDING = {"input_dim": 24, "output_dim": 4, "name": "table"}
STRATEGIES = {
    "async": recsync.AsyncStrategy,
    "sync": lambda cluster: recsync.SyncStrategy(cluster, global_batch_size=16, local_batch_size=8),
}


def models_alike(strategy, make_table=sharded_table):
    """Of our Adam that moves all rows, and of the stock one, with the same weights."""
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = click_model(make_table(), optimizers.Adam(0.02, lazy=False))
    stock = click_model(keras.layers.Embedding(**EMBEDDING), StockAdam(0.02))
    stock.set_weights(weights_of(model))
    return model, stock


@pytest.mark.cases("<lambda>-sync", "sharded_table-async")
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("make_table", [lambda: keras.layers.Embedding(**EMBEDDING), sharded_table])
def test_adam_that_is_not_lazy_on_parameter_servers_is_stock_adam(clusters, make_table, name):
    strategy = STRATEGIES[name](clusters.get(1, 2))
    # Rows from 20 never come, and no row of one of the servers in half of the global batches.
    ids = RNG.integers(0, 10, (128, 3)) * 2 + np.arange(128)[:, None] // 16 % 2
    labels = RNG.normal(size=(128, 1)).astype(np.float32)
    model, stock = models_alike(strategy, make_table)
    before = weights_of(model)[0]
    model.fit(ids, labels, batch_size=8, epochs=2, shuffle=False, verbose=0)
    size = 16 if name == "sync" else 8
    stock.fit(ids, labels, batch_size=size, epochs=2, shuffle=False, verbose=0)
    for got, expected in zip(weights_of(model), stock.get_weights(), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(weights_of(model)[0][20:], before[20:])


@pytest.mark.cases("async")
@pytest.mark.parametrize("name", ["one process", *STRATEGIES])
def test_after_the_global_step_was_set_back_adam_goes_on_as_the_stock_one_does(clusters, name):
    local = tf.distribute.get_strategy()
    strategy = local if name == "one process" else STRATEGIES[name](clusters.get(1, 2))
    ids = RNG.integers(0, 10, (128, 3)) * 2 + np.arange(128)[:, None] // 16 % 2
    labels = RNG.normal(size=(128, 1)).astype(np.float32)
    model, stock = models_alike(strategy)
    for _ in range(2):
        model.fit(ids, labels, batch_size=8, shuffle=False, verbose=0)
        size = 16 if name == "sync" else 8
        stock.fit(ids, labels, batch_size=size, shuffle=False, verbose=0)
        for one in (model, stock):
            one.optimizer.iterations.assign(2)
    for got, expected in zip(weights_of(model), stock.get_weights(), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_the_step_of_a_file_can_be_set_back_before_a_model_is_trained(clusters, tmp_path):
    strategy = recsync.AsyncStrategy(clusters.get(1, 2))
    ids = RNG.integers(0, 20, (64, 3))
    labels = RNG.normal(size=(64, 1)).astype(np.float32)

    def make():
        with strategy.scope():
            return click_model(sharded_table(), optimizers.Adam(0.02, lazy=False))

    model, other = make(), make()
    model.fit(ids, labels, batch_size=8, verbose=0)
    model.save_weights(tmp_path / "a.weights.h5")
    with strategy.scope():
        other.optimizer.build(other.trainable_variables)
    other.load_weights(tmp_path / "a.weights.h5")
    other.optimizer.iterations.assign(0)
    other.fit(ids[:16], labels[:16], batch_size=8, verbose=0)
    for state in other.optimizer.states:
        for steps in state.last_steps:
            np.testing.assert_array_equal(steps.numpy(), np.full(steps.shape, 2))


def test_adam_goes_on_where_the_global_step_is_set_back_within_an_epoch(clusters):
    ids = RNG.integers(0, 20, (256, 3))
    labels = RNG.normal(size=(256, 1)).astype(np.float32)
    model, stock = models_alike(recsync.AsyncStrategy(clusters.get(1, 2)))
    done = []

    def set_back(batch, logs):
        if batch == 15:
            model.get_weights()  # Nobody is in a step from here on.
            done.append(int(model.optimizer.iterations.numpy()))
            model.optimizer.iterations.assign(2)

    def set_back_as_well(batch, logs):
        if batch + 1 == done[0]:
            stock.optimizer.iterations.assign(2)

    for one, action in ((model, set_back), (stock, set_back_as_well)):
        callback = keras.callbacks.LambdaCallback(on_train_batch_end=action)
        one.fit(ids, labels, batch_size=8, shuffle=False, verbose=0, callbacks=[callback])
    assert int(model.optimizer.iterations.numpy()) == 32 - done[0] + 2
    for got, expected in zip(weights_of(model), stock.get_weights(), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_adam_that_is_not_lazy_goes_on_from_servers_checkpoint_in_one_process(clusters, tmp_path):
    ids = RNG.integers(0, 20, (64, 3))
    labels = RNG.normal(size=(64, 1)).astype(np.float32)
    fit = {"batch_size": 8, "shuffle": False, "verbose": 0}
    model, stock = models_alike(recsync.AsyncStrategy(clusters.get(1, 2)))
    model.fit(ids, labels, **fit)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert again.optimizer.get_config()["lazy"] is False
    again.fit(ids[:32], labels[:32], **fit)
    stock.fit(ids, labels, **fit)
    stock.fit(ids[:32], labels[:32], **fit)
    for got, expected in zip(weights_of(again), stock.get_weights(), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_lazy_must_be_true_or_false():
    with pytest.raises(ValueError, match="lazy must be a bool, not 0"):
        optimizers.Adam(lazy=0)


@pytest.mark.parametrize(
    "make_both",
    [
        lambda: (optimizers.Adam(LR), keras.optimizers.Adam(LR)),
        lambda: (
            optimizers.Adam(LR, beta_1=0.8, beta_2=0.9, epsilon=1e-2, weight_decay=0.01),
            keras.optimizers.Adam(LR, beta_1=0.8, beta_2=0.9, epsilon=1e-2, weight_decay=0.01),
        ),
        lambda: (optimizers.Ftrl(LR), keras.optimizers.Ftrl(LR)),
        lambda: (
            optimizers.Ftrl(LR, learning_rate_power=-0.6, initial_accumulator_value=0.3, **FTRL),
            keras.optimizers.Ftrl(
                LR,
                learning_rate_power=-0.6,
                initial_accumulator_value=0.3,
                l1_regularization_strength=0.05,
                l2_regularization_strength=0.02,
                beta=0.3,
            ),
        ),
    ],
)
def test_dense_steps_are_those_of_the_stock_optimizer(make_both):
    # Made here: variables made before a cluster connects are lost to the process.
    ours, stock = make_both()
    value = RNG.normal(size=(4, 5)).astype(np.float32)
    variables = [keras.Variable(value) for _ in range(2)]
    for _ in range(25):
        gradient = tf.constant(RNG.normal(size=(4, 5)), tf.float32)
        ours.apply([gradient], variables[:1])
        stock.apply([gradient], variables[1:])
        np.testing.assert_allclose(variables[0].numpy(), variables[1].numpy(), 1e-4, 1e-5)


def built(case, value, **kwargs):
    optimizer, rule = make(case, value, **kwargs)
    variable = keras.Variable(value, dtype="float32", name="embeddings")
    optimizer.build([variable])
    return optimizer, rule, optimizer.state_of(variable)


def push(optimizer, state, ids, rows, pulled, step):
    optimizer.apply_rows(
        [state],
        tf.constant(np.ravel(rows), tf.float32),
        PackedBags(tf.constant([len(ids)], tf.int64), tf.constant(ids, tf.int64)),
        tf.constant(pulled, tf.int64),
        tf.constant(LR),
        tf.constant(step, tf.int64),
    )


@pytest.mark.parametrize("case", ["adam", "ftrl", "ftrl, regularized"])
def test_lazy_rows_equal_eager_ones_over_long_gaps_of_the_global_step(case):
    value = RNG.normal(size=(20, 2))
    optimizer, rule, state = built(case, value, swap=SWAP)
    t = 0
    for _ in range(60):
        gap = int(RNG.integers(1, 25))
        ids = RNG.permutation(20)[:5]
        rows = RNG.normal(size=(5, 2))
        for step in range(t + 1, t + gap + 1):
            if step % SWAP.period == 0:
                rule.decay(SWAP.decay)
            gradient = np.zeros((20, 2))
            touched = []
            if step == t + gap:
                gradient[ids], touched = rows, ids
            rule.step(gradient, np.array(touched, int), step)
        t += gap
        push(optimizer, state, ids, rows, [], t)
    np.testing.assert_allclose(state.variable.numpy(), rule.w, 5e-4, 5e-5)


@pytest.mark.parametrize("case", ["adam", "ftrl, regularized"])
def test_the_gradient_is_weighted_by_its_staleness_before_it_enters_the_moments(case):
    value = RNG.normal(size=(3, 2))
    optimizer, rule, state = built(case, value, staleness=staleness.InversePower(k=1))
    for t in range(1, 15):
        now = state.versions.numpy()
        ids, rows = [2, 0], RNG.normal(size=(2, 2))
        pulled = np.maximum(now[ids] - RNG.integers(0, 5, 2), 0)
        push(optimizer, state, ids, rows, pulled, t)
        gradient = np.zeros((3, 2))
        gradient[ids] = rows / (now[ids] - pulled + 1)[:, None]
        rule.step(gradient, ids, t)
    np.testing.assert_allclose(state.variable.numpy(), rule.w, 2e-4, 2e-5)


@pytest.mark.parametrize("is_table", [True, False])
@pytest.mark.parametrize("case", ["adam", "ftrl", "ftrl, regularized"])
def test_a_gradient_of_weight_zero_is_no_update_but_its_staleness_counts(case, is_table):
    policy, swap = staleness.Threshold(iota=1), recsync.Swap(period=2, decay=0.5)
    optimizer, _ = make(case, np.ones((1, 2)), staleness=policy, swap=swap)
    name = "embeddings" if is_table else "kernel"
    variable = keras.Variable(RNG.normal(size=(1, 2)), dtype="float32", name=name)
    optimizer.build([variable])
    state = optimizer.state_of(variable)

    def push_one(value, pulled, step):
        if is_table:
            push(optimizer, state, [0], [value], [pulled], step)
        else:
            step = tf.constant(step, tf.int64)
            optimizer.apply_dense([state], tf.constant(value), [pulled], tf.constant(LR), step)

    for step in range(1, 4):
        push_one([0.5, -1.0], step - 1, step)
    kept = [v for v in (variable, *state.beside) if v is not state.counters]
    before = [v.numpy() for v in kept]
    push_one([np.inf, 1.0], 1, 4)  # Of age 2.
    for one, expected in zip(kept, before, strict=True):
        np.testing.assert_array_equal(one, expected)
    found = staleness.Statistics.from_counters([state.counters.numpy()])
    assert (found.count, found.max) == (4, 3)
    push_one([0.5, -1.0], 2, 5)  # Of age 1.
    assert np.ravel(state.versions).tolist() == [4]
    assert not np.array_equal(variable, before[0])


def test_a_late_push_leaves_adams_moments_as_if_it_had_come_in_time():
    value = np.ones((1, 2))
    gradients = {1: [0.5, -1.0], 2: [2.0, 1.0], 3: [-1.0, 0.25]}
    moments = []
    for order in ([1, 2, 3], [1, 3, 2], [3, 2, 1]):
        optimizer, _, state = built("adam", value)
        for t in order:
            push(optimizer, state, [0], [gradients[t]], [0], t)
        moments.append([a.numpy() for a in state.accumulators])
        assert state.last_steps[0].numpy().tolist() == [3]
    for late in moments[1:]:
        np.testing.assert_allclose(late, moments[0], 1e-5)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("power", [-0.5, -0.7])
def test_ftrl_without_any_regularization_gives_zero_where_no_gradient_came(power, jit):
    optimizer = optimizers.Ftrl(LR, learning_rate_power=power, initial_accumulator_value=0.0)
    variable = keras.Variable([0.0, 0.5, 0.0])
    gradient = tf.constant([0.0, 0.0, 2.0])
    for _ in range(2):
        tf.function(lambda: optimizer.apply([gradient], [variable]), jit_compile=jit)()
    # n is 8 after two gradients of 2, z is 2 + 2 and what w's move to its own n takes from it.
    w, n, z = 0.0, 0.0, 0.0
    for _ in range(2):
        z += 2.0 - ((n + 4.0) ** -power - n**-power) / LR * w
        n += 4.0
        w = -z * LR / n**-power
    np.testing.assert_allclose(variable.numpy(), [0.0, 0.0, w], 1e-5)


@pytest.mark.parametrize("rule", ["sgd", "adagrad", "adam", "ftrl"])
def test_rows_of_bfloat16_tables_are_rounded_up_or_down(rule):
    # One step from the same values, in float32: the narrow table holds a number beside it.
    value = tf.cast(RNG.normal(size=(40, 5)), tf.bfloat16)
    wide, narrow = tf.Variable(tf.cast(value, tf.float32)), tf.Variable(value)
    ids, rows = RNG.integers(0, 40, 30), RNG.normal(size=(30, 5))
    cls = {"sgd": optimizers.SGD, "adagrad": optimizers.Adagrad}
    cls |= {"adam": optimizers.Adam, "ftrl": optimizers.Ftrl}
    for variable in (wide, narrow):
        table = keras.Variable(np.zeros((40, 5)), dtype="float32", name="embeddings")
        optimizer = cls[rule](LR)
        optimizer.build([table])
        state = optimizer.state_of(table)
        table._value = variable
        push(optimizer, state, ids, rows, [], 1)
    exact, found = (np.asarray(tf.cast(v, tf.float32)).view(np.uint32) for v in (wide, narrow))
    lower, below = exact >> 16, exact & 0xFFFF
    ups = (found >> 16) - lower
    assert set(ups[below == 0]) <= {0}
    assert set(ups[below > 0]) == {0, 1}
    versions = tf.Variable(tf.range(40, dtype=tf.int64))
    packed, pulled = ops.gather_rows([narrow.handle], [versions.handle], ids, [30])
    np.testing.assert_array_equal(packed, np.ravel(tf.cast(tf.gather(narrow, ids), tf.float32)))
    np.testing.assert_array_equal(pulled, ids)
    packed, _ = ops.gather_rows(
        [narrow.handle], [versions.handle], ids, [30], bags=[0] * 30, bag_counts=[1]
    )
    expected = tf.reduce_sum(tf.gather(tf.cast(narrow, tf.float32), ids), 0)
    np.testing.assert_allclose(packed, expected, 1e-5, 1e-5)


@pytest.mark.parametrize("case", CASES)
def test_they_come_back_from_their_config_and_go_on_from_a_saved_state(case, tmp_path):
    optimizer, _, state = built(case, np.ones((3, 2)), swap=SWAP, nonfinite="skip")
    again, _, other = built(case, np.ones((3, 2)), swap=SWAP, nonfinite="skip")
    back = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(back) is type(optimizer)
    assert back.get_config() == optimizer.get_config()
    push(optimizer, state, [0, 1], np.ones((2, 2)), [], 3)
    store = {}
    optimizer.save_own_variables(store)
    again.load_own_variables(store)
    other.variable.assign(state.variable)
    for o, s in ((optimizer, state), (again, other)):
        push(o, s, [1, 2], np.ones((2, 2)), [], 5)
    np.testing.assert_array_equal(state.variable.numpy(), other.variable.numpy())


@pytest.mark.parametrize(
    ("create", "message"),
    [
        (
            lambda: optimizers.Adam(beta_1=1.0),
            "beta_1 must be .* below 1, not 1.0",
        ),
        (
            lambda: optimizers.Adam(beta_2=-0.1),
            "beta_2 must be .* below 1, not -0.1",
        ),
        (lambda: optimizers.Adam(beta_1=None), "beta_1 must be a finite number .*, not None"),
        (lambda: optimizers.Adam(epsilon="1"), "epsilon must be a finite number .*, not '1'"),
        (lambda: optimizers.Ftrl(l2=True), "l2 must be a finite number .*, not True"),
        (lambda: optimizers.Adam(epsilon=0), "epsilon must be a finite number above 0, not 0"),
        (
            lambda: optimizers.Ftrl(learning_rate_power=0.5),
            "learning_rate_power must be .* at most 0",
        ),
        (lambda: optimizers.Ftrl(l1=-1), "l1 must be a finite number of at least 0, not -1"),
        (
            lambda: optimizers.Ftrl(l2=float("nan")),
            "l2 must be .*, not nan",
        ),
        (lambda: optimizers.Ftrl(beta=-2), "beta must be a finite number of at least 0, not -2"),
        (
            lambda: optimizers.Ftrl(initial_accumulator_value=-1),
            "initial_accumulator_value must be a finite number of at least 0, not -1",
        ),
    ],
)
def test_wrong_arguments_are_refused_by_name(create, message):
    with pytest.raises(ValueError, match=message):
        create()


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("adam", {"beta_1": 1.0}, r"beta_1 must be in \[0, 1\), not 1"),
        ("adam", {"beta_2": -1.0}, r"beta_2 must be in \[0, 1\), not -1"),
        ("ftrl", {"l1": -1.0}, "l1 must be at least 0, not -1"),
        ("ftrl", {"learning_rate": 0.0}, "learning_rate must be positive, not 0"),
        ("ftrl", {"learning_rate_power": 1.0}, "learning_rate_power must be at most 0, not 1"),
    ],
)
@pytest.mark.parametrize("table", [False, True])
def test_the_ops_refuse_what_would_harm_the_state(table, case, changes, message):
    optimizer, _, state = built(case, np.ones((3, 2)))
    if not table:
        variable = keras.Variable(np.ones((3, 2)), dtype="float32", name="kernel")
        optimizer = type(optimizer)(LR)
        optimizer.build([variable])
        state = optimizer.state_of(variable)
    arguments = optimizer._arguments([state], tf.zeros([0], tf.int64), LR, 1)
    arguments |= optimizer._op_arguments(arguments.pop("accumulators")) | changes
    arguments["gradient"] = tf.ones([6])
    if table:
        arguments |= {"indices": [0, 1, 2], "counts": [3]}
    op = getattr(ops, f"{case}_{'rows' if table else 'dense'}")
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        op(**arguments)
    assert np.all(state.versions.numpy() == 0)
    if case == "adam":
        wrong = arguments | optimizer._op_arguments(
            [arguments["momentums"], arguments["velocities"]]
        )
        kept = tf.Variable(tf.zeros([9], tf.int32 if table else tf.int64))
        wrong["last_steps"] = [kept.handle]
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"last_steps must have shape"):
            op(**wrong)


def test_a_row_that_another_counter_trained_for_longer_follows_gradients_under_xla():
    table = keras.Variable(np.ones((2, 3)), dtype="float32", name="embeddings")
    optimizer = optimizers.Adam(LR)
    optimizer.build([table])
    state = optimizer.state_of(table)
    state.last_steps[0].assign([1000, 0])

    @tf.function(jit_compile=True)
    def step(gradient):
        optimizer.apply([tf.IndexedSlices(gradient, tf.range(2), (2, 3))], [table])

    step(tf.ones((2, 3)))
    # Both have no moments yet.
    np.testing.assert_allclose(table, 1 - LR * np.ones((2, 3)), 1e-5)
