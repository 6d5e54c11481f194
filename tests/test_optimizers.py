"""The optimizers in plain local Keras follow numpy rules and behave as stock ones do."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_recsync import Swap, optimizers, staleness
from tf_recsync.optimizers.plain_update import has_ops
from tf_recsync.staleness import Constant, InversePower, Rescale, Threshold

RNG = np.random.default_rng(11)
SEED = RNG.bit_generator.state
SMALL_SWAP = Swap(period=3, decay=0.5)
OURS = {
    "sgd": lambda **kw: optimizers.SGD(0.1, **kw),
    "adagrad": lambda **kw: optimizers.Adagrad(0.1, **kw),
    "swap": lambda **kw: optimizers.SwapAdagrad(0.1, swap=SMALL_SWAP, **kw),
}


@pytest.fixture(autouse=True)
def _seeded():
    RNG.bit_generator.state = SEED
    keras.utils.set_random_seed(5)


class Rule:
    """SGD, Adagrad and eager SWAP in float64 numpy; only touched rows are updated."""

    def __init__(self, value, kind):
        self.w, self.kind, self.step = np.array(value, np.float64), kind, 0
        self.v = np.full_like(self.w, 1e-5 if kind == "swap" else 0.1)

    def update(self, gradient, lr, touched=...):
        g = np.asarray(gradient, np.float64)
        self.step += 1
        if self.kind == "swap" and self.step % SMALL_SWAP.period == 0:
            self.v *= SMALL_SWAP.decay
        if self.kind != "sgd":
            self.v[touched] += g[touched] ** 2
            g = g / np.sqrt(self.v + 1e-7)
        self.w[touched] -= lr * g[touched]


def click_model(ids=4, rows=12, name="clicks"):
    inputs = keras.Input((ids,), dtype="int32")
    x = keras.layers.Embedding(rows, 3, name="table")(inputs)
    x = keras.layers.Dense(8, activation="relu", name="hidden")(keras.layers.Flatten()(x))
    return keras.Model(inputs, keras.layers.Dense(1, name="out")(x), name=name)


def clicks(n=48, ids=4, rows=9):
    x = RNG.integers(0, rows, (n, ids))  # rows repeat within a batch; the last three never come
    return x, np.sin(x).sum(1, keepdims=True).astype(np.float32)


def fit(model, optimizer, data=None, epochs=2, **kwargs):
    if optimizer is not None:
        model.compile(optimizer, "mse", **kwargs)
    x, y = clicks() if data is None else data
    return model.fit(x, y, batch_size=8, epochs=epochs, verbose=0, shuffle=False)


def check_same(a, b, tolerance=2e-5):
    for one, other in zip(a, b, strict=True):
        np.testing.assert_allclose(one, other, tolerance, tolerance)


def everything(model):
    return model.get_weights() + [v.numpy() for v in model.optimizer.variables]


@pytest.mark.parametrize("kind", OURS)
def test_dense_variables_follow_the_rule_under_a_schedule(kind):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.3, 5, 0.5)
    optimizer = OURS[kind]()
    optimizer.learning_rate = schedule
    values = [RNG.normal(size=(3, 2)), RNG.normal(size=())]
    variables = [keras.Variable(v) for v in values]
    rules = [Rule(v, kind) for v in values]
    for step in range(20):
        gradients = [RNG.normal(size=v.shape).astype(np.float32) for v in values]
        optimizer.apply([tf.constant(g) for g in gradients], variables)
        for rule, g in zip(rules, gradients, strict=True):
            rule.update(g, 0.3 * 0.5 ** (step / 5))
    check_same([v.numpy() for v in variables], [r.w for r in rules])
    for variable in variables:
        state = optimizer.state_of(variable)
        assert int(state.versions.numpy()) == 20
        assert state.counters.numpy()[:6].tolist() == [20, 20, 20, 1, 0, 20]  # tau is 1


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("kind", OURS)
def test_rows_of_an_embedding_follow_the_rule_with_repeated_ids_summed(kind, jit):
    layer, optimizer = keras.layers.Embedding(10, 2), OURS[kind]()
    layer.build()
    optimizer.build(layer.trainable_variables)
    rule, versions = Rule(layer.embeddings.numpy(), kind), np.zeros(10, np.int64)

    @tf.function(jit_compile=jit)
    def step(ids, slope):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(ids) * slope)
        optimizer.apply(tape.gradient(loss, layer.trainable_variables))

    for _ in range(20):
        ids, slope = RNG.integers(0, 7, (3, 4)), RNG.normal(size=(3, 4, 2)).astype(np.float32)
        step(tf.constant(ids), tf.constant(slope))
        gradient = np.zeros((10, 2))
        np.add.at(gradient, ids, slope)
        rule.update(gradient, 0.1, np.unique(ids))
        versions[np.unique(ids)] += 1
    check_same([layer.embeddings.numpy()], [rule.w])
    state = optimizer.state_of(layer.embeddings)
    np.testing.assert_array_equal(state.versions.numpy(), versions)
    assert state.counters.numpy()[:4].tolist() == [versions.sum()] * 3 + [1]


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("clip", ["clipnorm", "clipvalue", "global_clipnorm"])
def test_clipping_sees_the_sum_of_repeated_rows_and_touches_no_other_row(clip, jit):
    limit = 0.5
    optimizer = optimizers.SGD(1.0, **{clip: limit})
    table = keras.Variable(np.zeros((5, 2)), name="embeddings")
    dense = keras.Variable(np.zeros(3), name="kernel")
    ids, rows = [1, 3, 1, 1], np.array([[1, 2], [0.1, -4], [1, 1], [-2, 2]], np.float32)
    slope = np.array([3.0, 0.0, -0.2], np.float32)
    optimizer.build([table, dense])

    @tf.function(jit_compile=jit)
    def step():
        optimizer.apply(
            [tf.IndexedSlices(tf.constant(rows), tf.constant(ids), [5, 2]), tf.constant(slope)]
        )

    step()
    gradients = [np.zeros((5, 2)), slope.astype(np.float64)]
    np.add.at(gradients[0], ids, rows)
    norms = [np.linalg.norm(g) for g in gradients]
    if clip == "clipvalue":
        expected = [np.clip(g, -limit, limit) for g in gradients]
    else:
        if clip == "global_clipnorm":
            norms = [np.linalg.norm(norms)] * 2
        expected = [g * min(1, limit / n) for g, n in zip(gradients, norms, strict=True)]
    check_same([table.numpy(), dense.numpy()], [-e for e in expected])
    assert optimizer.state_of(table).versions.numpy().tolist() == [0, 1, 0, 1, 0]


STOCK = [
    (optimizers.SGD, keras.optimizers.SGD, {}),
    (optimizers.SGD, keras.optimizers.SGD, {"weight_decay": 0.05}),
    (optimizers.Adagrad, keras.optimizers.Adagrad, {}),
    (optimizers.Adagrad, keras.optimizers.Adagrad, {"weight_decay": 0.05}),
    (
        optimizers.Adagrad,
        keras.optimizers.Adagrad,
        {"epsilon": 1e-3, "initial_accumulator_value": 0.5, "use_ema": True, "ema_momentum": 0.7},
    ),
]


@pytest.mark.parametrize(("ours", "stock", "arguments"), STOCK)
def test_every_step_is_that_of_the_stock_optimizer(ours, stock, arguments):
    values = {"embeddings": (40, 3), "kernel": (3, 4), "bias": (4,)}
    values = {name: RNG.normal(size=shape) for name, shape in values.items()}
    models = []
    for cls in (ours, stock):
        variables = [keras.Variable(v, name=name) for name, v in values.items()]
        optimizer = cls(0.1, **arguments)
        optimizer.build(variables)
        models.append((optimizer, variables))
    for _ in range(12):
        # Each id once a batch: stock Keras squares repeated rows before it sums them.
        ids = tf.constant(RNG.permutation(40)[:32])
        rows, *dense = (
            tf.constant(RNG.normal(size=shape), tf.float32) for shape in ((32, 3), (3, 4), (4,))
        )
        for optimizer, variables in models:
            slices = tf.IndexedSlices(rows, ids, tf.constant([40, 3], tf.int64))
            optimizer.apply([slices, *dense], variables)
        check_same(*([v.numpy() for v in variables] for _, variables in models))


POLICIES = [
    Constant(),
    Threshold(iota=3.0),
    InversePower(k=1.5, baseline=4, normalized=False),
    InversePower(update_sensitivity=0.5, rescale=Rescale(2.0, mean=3.0)),
]


@pytest.mark.parametrize("policy", POLICIES)
def test_optimizers_come_back_from_their_config(policy):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.3, 5, 0.5)
    for optimizer in (
        optimizers.SGD(schedule, staleness=policy, tables="wide|deep", clipnorm=2.0),
        optimizers.Adagrad(
            0.25,
            staleness=policy,
            swap=Swap(7, 0.75),
            epsilon=0.5,
            initial_accumulator_value=0.5,
            weight_decay=0.25,
            name="mine",
        ),
        optimizers.Adagrad(0.25, staleness=policy, nonfinite="skip"),
        optimizers.SwapAdagrad(0.25, staleness=policy, nonfinite="error"),
        optimizers.SwapAdagrad(0.25, swap=Swap(7, 0.75)),
    ):
        config = optimizer.get_config()
        for back in (
            type(optimizer).from_config(optimizer.get_config()),
            keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer)),
            keras.optimizers.deserialize(keras.optimizers.serialize(optimizer)),
        ):
            assert type(back) is type(optimizer)
            assert back.get_config() == config
            assert (back.staleness, back.swap) == (optimizer.staleness, optimizer.swap)
            assert back.name == optimizer.name


@pytest.mark.parametrize(("kind", "eager"), [("sgd", True), ("adagrad", True), ("swap", False)])
def test_a_saved_model_goes_on_training_as_if_it_had_never_stopped(kind, eager, tmp_path):
    policy = InversePower(update_sensitivity=1.0)  # keeps lengths of last updates too
    model, data = click_model(), clicks(16 if eager else 48)
    fit(model, OURS[kind](staleness=policy), data, jit_compile=False, run_eagerly=eager)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    check_same(everything(loaded), everything(model), 0)
    for one in (model, loaded):
        one.run_eagerly = eager
        fit(one, None, data)
    check_same(everything(loaded), everything(model), 1e-6)


@pytest.mark.parametrize(("kind", "built"), [("sgd", False), ("swap", False), ("swap", True)])
def test_saved_weights_load_into_an_optimizer_built_or_not(kind, built, tmp_path):
    eager = (kind, built) != ("swap", False)
    model, other, data = click_model(), click_model(), clicks(16 if eager else 48)
    fit(model, OURS[kind](), data, jit_compile=False, run_eagerly=eager)
    model.save_weights(tmp_path / "saved.weights.h5")
    other.compile(OURS[kind](), "mse", jit_compile=False, run_eagerly=eager)
    if built:
        other.optimizer.build(other.trainable_variables)
    other.load_weights(tmp_path / "saved.weights.h5")
    other.optimizer.build(other.trainable_variables)  # what was loaded is applied here at last
    check_same(everything(other), everything(model), 0)
    for one in (model, other):
        fit(one, None, data)
    check_same(everything(other), everything(model), 1e-6)


def test_loaded_state_waits_for_an_optimizer_that_is_built_inside_a_traced_step(tmp_path):
    variables = [[keras.Variable(np.ones(2, np.float32), name="w")] for _ in range(2)]
    saved, late = OURS["swap"](), OURS["swap"]()
    for _ in range(4):
        saved.apply([tf.ones(2)], variables[0])
    store = {}
    saved.save_own_variables(store)
    late.load_own_variables(store)
    step = tf.function(lambda: late.apply([tf.ones(2)], variables[1]))
    for t in (5, 6):
        step()
        saved.apply([tf.ones(2)], variables[0])
        assert int(late.iterations.numpy()) == t  # neither lost nor loaded at every step
    check_same(*([v.numpy() for v in o.variables] for o in (late, saved)), 1e-6)


SCHEDULE = keras.optimizers.schedules.ExponentialDecay(0.3, 10, 0.9)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [(0.5, SCHEDULE, SCHEDULE(3)), (SCHEDULE, 0.5, 0.5), (0.5, 0.25, 0.5), (0.5, 0.5, 0.5)],
)
def test_a_saved_learning_rate_is_loaded_into_a_number_and_not_into_a_schedule(
    before, after, expected, caplog
):
    rates = before, after
    saved, loaded = (optimizers.Adagrad(rate, name="mine") for rate in rates)
    variables = [[keras.Variable(np.ones(2, np.float32), name="w")] for _ in range(2)]
    for _ in range(3):
        saved.apply([tf.ones(2)], variables[0])
    loaded.build(variables[1])
    store = {}
    saved.save_own_variables(store)
    loaded.load_own_variables(store)
    assert int(loaded.iterations.numpy()) == 3
    np.testing.assert_allclose(loaded.learning_rate.numpy(), np.asarray(expected))
    for slots in zip(*(o.states[0].accumulators for o in (saved, loaded)), strict=True):
        check_same(*([slot.numpy()] for slot in slots), 0)
    told = "learning_rate of mine is 0.5 from now on, as it was saved, and not 0.25"
    assert (told in caplog.text) == (rates == (0.5, 0.25))
    assert ("learning_rate" in caplog.text) == (rates == (0.5, 0.25))


@pytest.mark.parametrize("built", [False, True])
def test_state_of_another_configuration_is_refused_with_a_reason(built, tmp_path):
    model = click_model()
    fit(model, OURS["swap"](), run_eagerly=True, epochs=1)
    model.save_weights(tmp_path / "saved.weights.h5")
    other = click_model()
    other.compile(OURS["adagrad"](), "mse")
    if built:
        other.optimizer.build(other.trainable_variables)
    message = "SwapAdagrad keeps .*last_period.*, Adagrad here accumulator, version"
    with pytest.raises(ValueError, match=message):
        other.load_weights(tmp_path / "saved.weights.h5")
        other.optimizer.build(other.trainable_variables)


def test_compiled_graph_and_eager_training_give_the_same():
    data, results = clicks(), []
    for how in ({"jit_compile": True}, {"jit_compile": False}, {"run_eagerly": True}):
        keras.utils.set_random_seed(2)
        model = click_model()
        fit(model, OURS["swap"](staleness=InversePower(update_sensitivity=1.0)), data, **how)
        results.append(everything(model))
    for other in results[1:]:
        check_same(results[0], other, 1e-4)


@pytest.mark.parametrize(
    ("kind", "policy"), [("sgd", InversePower(update_sensitivity=1.0)), ("adagrad", None)]
)
def test_compiled_graph_and_eager_updates_are_the_same(kind, policy):
    values = [RNG.normal(size=(12, 3)), RNG.normal(size=(4, 2)), RNG.normal(size=2)]
    steps = []
    for _ in range(12):
        ids = RNG.integers(0, 9, 8)
        steps.append([tf.constant(ids), *(RNG.normal(size=s) for s in ((8, 3), (4, 2), (2,)))])
    results = []
    for how in ({"jit_compile": True}, {"jit_compile": False}, None):
        names = ("embeddings", "kernel", "bias")
        variables = [keras.Variable(v, name=n) for v, n in zip(values, names, strict=True)]
        optimizer = OURS[kind](staleness=policy)
        optimizer.build(variables)

        def update(ids, rows, *gradients, optimizer=optimizer):
            slices = tf.IndexedSlices(rows, ids, tf.constant([12, 3], tf.int64))
            optimizer.apply([slices, *gradients])

        update = tf.function(update, **how) if how else update
        for ids, *gradients in steps:
            update(ids, *(tf.constant(g, tf.float32) for g in gradients))
        results.append([v.numpy() for v in (*variables, *optimizer.variables)])
    for other in results[1:]:
        check_same(results[0], other, 1e-4)


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        ("float64", "sgd"),
        ("float64", "swap"),
        ("mixed_bfloat16", "swap"),
        ("mixed_float16", "adagrad"),
    ],
)
def test_models_of_other_precision_learn(dtype, kind):
    before = keras.config.dtype_policy(), keras.config.floatx()
    if dtype == "float64":
        keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)
    try:
        model = click_model()
        losses = fit(model, OURS[kind](), epochs=12, jit_compile=False).history["loss"]
    finally:
        keras.config.set_dtype_policy(before[0])
        keras.config.set_floatx(before[1])
    assert losses[-1] < 0.5 * losses[0]
    expected = "float64" if dtype == "float64" else "float32"
    assert {v.dtype for v in model.trainable_variables} == {expected}


@pytest.mark.parametrize("jit", [False, True])
def test_wide_and_deep_parts_train_with_an_optimizer_each(jit):
    wide, deep = optimizers.SGD(0.1), optimizers.SwapAdagrad(0.1, swap=SMALL_SWAP)
    both = keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(deep, {"table/.*": wide, "out/.*": wide})
    )
    model, data = click_model(), clicks()
    losses = fit(model, both, data, epochs=10, jit_compile=jit).history["loss"]
    assert losses[-1] < 0.5 * losses[0]
    assert [s.variable.path for s in wide.states] == ["table/embeddings", "out/kernel", "out/bias"]
    assert [s.variable.path for s in deep.states] == ["hidden/kernel", "hidden/bias"]
    assert [int(s.versions.numpy()) for s in deep.states] == [60, 60]  # 10 epochs of 6 batches


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("clip", [{"clipnorm": 0.5}, {"clipvalue": 0.5}, {"global_clipnorm": 0.5}])
def test_gradients_that_are_skipped_take_no_part_in_clipping(clip, jit):
    """As the same step without them."""

    def values(rows, slopes):
        table = keras.Variable(np.ones((4, 2)), name="embeddings")
        dense = [keras.Variable(np.ones(2), name=f"kernel_{i}") for i in range(len(slopes))]
        optimizer = optimizers.SGD(0.1, nonfinite="skip", **clip)
        optimizer.build([table, *dense])
        ids, shape = tf.constant(list(rows)), tf.constant([4, 2])
        gradient = tf.IndexedSlices(tf.constant(list(rows.values()), tf.float32), ids, shape)
        step = tf.function(
            lambda: optimizer.apply([gradient, *map(tf.constant, slopes)]), jit_compile=jit
        )
        step()
        skipped = [s.counters.numpy()[staleness.SKIPPED] for s in optimizer.states]
        return [v.numpy() for v in (table, *dense)], skipped

    fine = {0: [3.0, -1.0], 2: [0.2, 2.0]}
    expected, _ = values(fine, [[1.0, -2.0]])
    spoiled = {1: [np.nan, 1.0], **fine, 3: [1.0, np.inf]}
    found, skipped = values(spoiled, [[1.0, -2.0], [np.inf, 1.0]])
    check_same(found, [*expected, np.ones(2)])
    assert skipped == [2, 0, 1]


@pytest.mark.parametrize("clip", ["clipnorm", "global_clipnorm"])
def test_clipped_gradients_that_are_not_finite_are_refused_by_their_own_names(clip):
    variables = [keras.Variable(np.ones(2), name=name) for name in ("fine", "culprit")]
    optimizer = optimizers.SGD(0.1, nonfinite="error", **{clip: 0.5})
    optimizer.build(variables)
    with pytest.raises(tf.errors.InvalidArgumentError, match="culprit"):
        optimizer.apply([tf.constant([9.0, 1.0]), tf.constant([np.nan, 1.0])])


@pytest.mark.parametrize("wide", ["float64", "float32"])
def test_a_norm_of_all_gradients_is_of_those_of_all_types(wide):
    narrow = "float32" if wide == "float64" else "bfloat16"
    variables = [keras.Variable(np.zeros(1), dtype=dtype) for dtype in (wide, narrow)]
    optimizer = optimizers.SGD(1.0, global_clipnorm=1.0)
    optimizer.apply([tf.constant([3.0], wide), tf.constant([4.0], narrow)], variables)
    found = [float(v.numpy()[0]) for v in variables]
    np.testing.assert_allclose(found, [-0.6, -0.8], 1e-2 if narrow == "bfloat16" else 1e-6)


@pytest.mark.parametrize("jit", [False, True])
def test_gradients_of_a_scaled_loss_are_divided_once(jit):
    models = []
    for factor in (None, 4.0):
        keras.utils.set_random_seed(5)
        model = click_model()
        RNG.bit_generator.state = SEED
        optimizer = optimizers.Adagrad(0.1, loss_scale_factor=factor)
        fit(model, optimizer, clicks(), jit_compile=jit)
        assert optimizer.loss_scale_factor == factor
        models.append(model)
    check_same(models[1].get_weights(), models[0].get_weights())


@pytest.mark.parametrize("kind", ["SGD", "Adagrad"])
def test_variables_of_tensorflow_are_trained_as_keras_trains_them(kind):
    found = []
    for module in (optimizers, keras.optimizers):
        variables = [tf.Variable(np.ones(s), dtype=tf.float32, name="v") for s in ((4, 2), (3,))]
        optimizer = getattr(module, kind)(0.1, weight_decay=0.01)
        for step in range(3):
            rows = tf.IndexedSlices(
                tf.ones([1, 2]) * step, tf.constant([step]), tf.constant([4, 2])
            )
            optimizer.apply([rows, tf.constant([1.0, -1.0, step])], variables)
        found.append([v.numpy() for v in variables])
    check_same(*found)
    # A name that says so makes a table of one.
    table = tf.Variable(tf.ones([4, 2]), name="embeddings")
    optimizer = optimizers.Adagrad(0.1)
    optimizer.build([table])
    optimizer.apply([tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1]), tf.constant([4, 2]))])
    assert optimizer.state_of(table).versions.numpy().tolist() == [0, 1, 0, 0]
    store = {}
    optimizer.save_own_variables(store)
    other = optimizers.Adagrad(0.1)
    other.build([table])
    other.load_own_variables(store)
    for one, own in zip(other.variables, optimizer.variables, strict=True):
        np.testing.assert_array_equal(one, own)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("jit", [False, True])
def test_gradients_that_are_not_finite_are_skipped_row_by_row_and_counted(jit, dtype):
    table = keras.Variable(np.ones((4, 2)), name="embeddings", dtype=dtype)
    dense = keras.Variable(np.ones(2), name="kernel", dtype=dtype)
    optimizer = optimizers.SwapAdagrad(0.1, swap=SMALL_SWAP, nonfinite="skip")
    optimizer.build([table, dense])
    gradient = tf.IndexedSlices(
        tf.constant([[1, 1], [np.nan, 1], [1, 1], [np.inf, 1]], dtype), tf.constant([0, 1, 2, 2]),
        tf.constant([4, 2]),
    )  # fmt: skip
    step = tf.function(
        lambda: optimizer.apply([gradient, tf.constant([1, np.inf], dtype)]), jit_compile=jit
    )
    step()
    states = [optimizer.state_of(v) for v in (table, dense)]
    assert [np.sum(s.versions.numpy()) for s in states] == [1, 0]
    assert [s.counters.numpy()[staleness.SKIPPED] for s in states] == [2, 1]
    assert np.all(dense.numpy() == 1)
    assert (table.numpy() == 1).all(1).tolist() == [False, True, True, True]
    statistics = staleness.Statistics.from_counters([s.counters.numpy() for s in states])
    assert (statistics.count, statistics.skipped) == (1, 3)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradients_that_are_not_finite_end_training_with_error(dtype):
    dense = keras.Variable(np.ones(2), name="kernel", dtype=dtype)
    optimizer = optimizers.SGD(0.1, nonfinite="error")
    with pytest.raises(tf.errors.InvalidArgumentError, match="gradient of kernel is not finite"):
        optimizer.apply([tf.constant([1, np.nan], dtype)], [dense])
    with pytest.raises(ValueError, match="nonfinite must be .* with jit_compile"):
        tf.function(lambda: optimizer.apply([tf.ones(2, dtype)]), jit_compile=True)()


def test_the_error_of_a_gradient_that_is_not_finite_names_table_and_row():
    table = keras.Variable(np.ones((4, 2)), name="embeddings", dtype="float32")
    optimizer = optimizers.Adagrad(0.1, nonfinite="error")
    optimizer.build([table])
    gradient = tf.IndexedSlices(
        tf.constant([[1, 1], [np.nan, 1]], "float32"), tf.constant([3, 2]), tf.constant([4, 2])
    )
    message = "gradient of embeddings, row 2 is not finite"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        optimizer.apply([gradient])
    assert np.all(table.numpy() == 1)


def test_updates_of_variables_on_accelerators_use_stock_ops():
    for device in ("", "/CPU:0", "/job:worker/replica:0/task:1/device:CPU:0", "/job:ps/task:0"):
        assert has_ops(device)
    for device in ("/GPU:0", "/job:localhost/replica:0/task:0/device:GPU:1", "/device:TPU:0"):
        assert not has_ops(device)


def test_swap_keeps_learning_after_a_shift_on_which_plain_adagrad_stalls():
    # Online linear regression with noise, whose target flips after many steps.
    long, short = 20_000, 150
    x = RNG.normal(size=(long + short, 3)).astype(np.float32)
    target = np.array([1.0, -2.0, 0.5], np.float32)
    sign = np.where(np.arange(long + short) < long, 1, -1).astype(np.float32)
    y = (x @ target) * sign + RNG.normal(size=long + short).astype(np.float32)

    def distances(optimizer):
        w = keras.Variable(np.zeros(3, np.float32))
        optimizer.build([w])

        @tf.function
        def train(x, y):
            for i in tf.range(tf.shape(y)[0]):
                error = tf.reduce_sum(x[i] * w.value) - y[i]
                optimizer.apply([2 * error * x[i]], [w])

        train(x[:long], y[:long])
        before = np.linalg.norm(w.numpy() - target)
        train(x[long:], y[long:])
        return before, np.linalg.norm(w.numpy() + target)

    plain = distances(optimizers.Adagrad(0.5))
    swap = distances(optimizers.SwapAdagrad(0.5, swap=Swap(period=100, decay=0.5)))
    assert max(plain[0], swap[0]) < 0.3 * np.linalg.norm(target)  # both have learned the first
    assert plain[1] > np.linalg.norm(target)
    assert swap[1] < 0.3 * np.linalg.norm(target)


def test_tables_are_what_the_pattern_matches_in_full():
    shapes = {"embeddings": (4, 2), "embeddings_bias": (4,), "wide": (4, 1), "kernel": (4, 2)}
    variables = [keras.Variable(np.ones(s), name=n) for n, s in shapes.items()]
    for pattern, tables in ((None, ["embeddings"]), ("wide|kern", ["wide"]), ("(?!)", [])):
        optimizer = optimizers.SGD(**({"tables": pattern} if pattern else {}))
        optimizer.build(variables)
        assert [s.variable.name for s in optimizer.states if s.is_table] == tables
        for state in optimizer.states:
            assert state.versions.shape == (state.variable.shape[:1] if state.is_table else ())


@pytest.mark.parametrize("jit", [False, True])
def test_a_dense_gradient_of_a_table_updates_every_row(jit):
    table = keras.Variable(np.ones((3, 2), np.float32), name="embeddings")
    optimizer = OURS["swap"]()
    optimizer.build([table])
    rule = Rule(np.ones((3, 2)), "swap")
    step = tf.function(lambda g: optimizer.apply([g]), jit_compile=jit)
    for _ in range(7):
        gradient = RNG.normal(size=(3, 2)).astype(np.float32)
        step(tf.constant(gradient))
        rule.update(gradient, 0.1)
    check_same([table.numpy()], [rule.w])
    assert optimizer.state_of(table).versions.numpy().tolist() == [7, 7, 7]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optimizers.SGD(staleness="constant"), "staleness must be a policy .*'constant'"),
        (lambda: optimizers.Adagrad(swap=10), "swap must be a tf_recsync.Swap or None, not 10"),
        (
            lambda: optimizers.SGD(nonfinite="drop"),
            r"nonfinite must be one of \('apply', 'skip', 'error'\), not 'drop'",
        ),
        (lambda: optimizers.SGD(tables="("), r"tables must be a regular expression, not '\('"),
        (lambda: optimizers.SGD(tables=None), "tables must be a regular expression, not None"),
        (lambda: optimizers.Adagrad(epsilon=-1), "epsilon must be a finite number above 0, not -1"),
        (
            lambda: optimizers.Adagrad(epsilon=float("nan")),
            "epsilon must be .*, not nan",
        ),
        (
            lambda: optimizers.Adagrad(initial_accumulator_value=-0.1),
            "initial_accumulator_value must be a finite number of at least 0, not -0.1",
        ),
        (lambda: optimizers.SGD(clipnorm=1.0, clipvalue=1.0), "Only one of"),
        (lambda: optimizers.Adagrad(epsilon=float("inf")), "epsilon must be a finite .*, not inf"),
        (lambda: optimizers.SGD(weight_decay="1"), "weight_decay must be None or .*, not '1'"),
        (lambda: Swap(period=5, decay="1"), "decay must be a finite number .*, not '1'"),
        (lambda: Swap(period=0), "period must be an integer of at least 1, got 0"),
        (lambda: Swap(period=2.5), "period must be an integer of at least 1, got 2.5"),
        (lambda: Swap(period=True), "period must be an integer of at least 1, got True"),
        (
            lambda: Swap(period=5, decay=0),
            "decay must be .* of at most 1, not 0",
        ),
        (
            lambda: Swap(period=5, decay=1.01),
            "decay must be .* of at most 1, not 1.01",
        ),
    ],
)
def test_wrong_arguments_are_refused_with_name_value_and_what_is_allowed(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_sgd_has_no_accumulators_and_refuses_swap():
    with pytest.raises((TypeError, ValueError), match="swap"):
        optimizers.SGD(swap=SMALL_SWAP)
