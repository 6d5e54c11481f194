"""The graph of a model's step: operations, bytes and edges against those computed by hand."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_recsync as recsync
from tf_recsync import optimizers
from tf_recsync.layers import EmbeddingCollection, FeatureConfig, MeanNormalization, TableConfig
from tf_recsync.placement import Edge, OperatorPlan, Resources
from tf_recsync.synchronization.units import by_weights, units_of

BATCH = 32


@pytest.fixture(autouse=True)
def _clear_names():
    keras.utils.clear_session()


def dense_flops(inputs, outputs, *, activation=False, first=False, batch=BATCH):
    """Forward: x W + b; backward: the gradients of W, of b, and of x unless that is data."""
    products = 2 if first else 3
    elementwise = 2 + 2 * activation
    return products * 2 * batch * inputs * outputs + elementwise * batch * outputs


def dlrm():
    """A model of the shape of DLRM: bottom MLP, lookups, dot products, top MLP."""
    dense = keras.Input((13,), name="numbers")
    ids = {f"c{i}": keras.Input((), dtype="int64", name=f"c{i}") for i in range(3)}
    bottom = keras.layers.Dense(24, "relu", name="bottom_1")(dense)
    bottom = keras.layers.Dense(8, "relu", name="bottom_2")(bottom)
    rows = EmbeddingCollection(
        [TableConfig(name, 50, 8) for name in ids],
        [FeatureConfig(name, name) for name in ids],
        name="rows",
    )(ids)
    vectors = keras.layers.Concatenate(name="vectors")([bottom, *rows.values()])
    vectors = keras.layers.Reshape((4, 8), name="stacked")(vectors)
    dots = keras.layers.Dot(2, name="dots")([vectors, vectors])
    joined = keras.layers.Concatenate(name="joined")(
        [keras.layers.Flatten(name="flat")(dots), bottom]
    )
    top = keras.layers.Dense(40, "relu", name="top_1")(joined)
    outputs = keras.layers.Dense(1, name="top_2")(top)
    return keras.Model({"numbers": dense, **ids}, outputs)


def edges_of(graph):
    return {(e.source, e.target): (e.forward_bytes, e.backward_bytes) for e in graph.edges}


def test_the_operations_of_a_dlrm_are_those_counted_by_hand():
    graph = OperatorPlan.step_graph(dlrm(), BATCH)
    assert [unit.name for unit in graph.units if unit.kind == "layer"] == [
        *("bottom_1", "bottom_2", "stacked", "dots", "flat", "top_1", "top_2")
    ]
    expected = {
        "bottom_1": dense_flops(13, 24, activation=True, first=True),
        "bottom_2": dense_flops(24, 8, activation=True),
        # [4, 8] x [8, 4] forward, [4, 4] x [4, 8] for each factor's gradient, and their sum.
        "dots": 3 * 2 * BATCH * 4 * 4 * 8 + BATCH * 4 * 8,
        "top_1": dense_flops(24, 40, activation=True),
        "top_2": dense_flops(40, 1),
    }
    for name, flops in expected.items():
        assert graph[name].flops == flops, name
    for name in ("numbers", "c0", "rows", "vectors", "stacked", "flat", "joined", "loss"):
        assert graph[name].flops == 0
    assert graph.flops == sum(expected.values())


def test_units_have_their_kinds_weights_and_activations():
    graph = OperatorPlan.step_graph(dlrm(), BATCH)
    kinds = {unit.name: unit.kind for unit in graph.units}
    assert kinds["rows"] == "lookup" and kinds["numbers"] == kinds["c2"] == "input"
    assert kinds["vectors"] == kinds["joined"] == "interaction" and kinds["loss"] == "loss"
    weights = {unit.name: unit.parameter_bytes for unit in graph.units if unit.parameter_bytes}
    assert weights == {
        "bottom_1": 4 * 24 * (13 + 1),
        "bottom_2": 4 * 8 * (24 + 1),
        "top_1": 4 * 40 * (24 + 1),
        "top_2": 4 * (40 + 1),
    }
    assert graph["top_1"].activation_bytes == 4 * BATCH * 40
    assert graph["rows"].activation_bytes == 4 * BATCH * 3 * 8


def test_edges_have_the_bytes_of_activations_and_of_their_gradients():
    edges = edges_of(OperatorPlan.step_graph(dlrm(), BATCH))
    both = lambda width: (4 * BATCH * width,) * 2  # noqa: E731
    assert edges == {
        ("numbers", "bottom_1"): (4 * BATCH * 13, 0),
        **{(f"c{i}", "rows"): (8 * BATCH, 0) for i in range(3)},
        ("bottom_1", "bottom_2"): both(24),
        ("bottom_2", "vectors"): both(8),
        ("rows", "vectors"): both(3 * 8),
        ("vectors", "stacked"): both(4 * 8),
        ("stacked", "dots"): both(4 * 8),
        ("dots", "flat"): both(16),
        ("flat", "joined"): both(16),
        ("bottom_2", "joined"): both(8),
        ("joined", "top_1"): both(24),
        ("top_1", "top_2"): both(40),
        ("top_2", "loss"): both(1),
    }


def test_rules_put_the_two_mlps_of_a_dlrm_on_servers_and_the_rest_on_the_trainers():
    graph = OperatorPlan.step_graph(dlrm(), BATCH)
    resources = Resources(trainers=2, servers=2)
    plan = OperatorPlan.search(graph, resources, search_seconds=0, splits=False)
    placed = {name: server for name, server in plan.operators.items() if server is not None}
    assert set(placed) == {"bottom_1", "bottom_2", "top_1", "top_2"}
    assert placed["bottom_1"] == placed["bottom_2"] != placed["top_1"] == placed["top_2"]


def test_slots_are_those_of_the_optimizer():
    model = dlrm()
    assert OperatorPlan.step_graph(model, BATCH)["top_1"].slots == 1
    model.compile(optimizers.Adam(1e-3), "mse")
    assert OperatorPlan.step_graph(model, BATCH)["top_1"].slots == 2
    model.compile(optimizers.Adagrad(1e-3, rowwise=True), "mse")  # Of tables: layers are dense.
    assert OperatorPlan.step_graph(model, BATCH)["top_1"].slots == 1
    assert OperatorPlan.step_graph(model, BATCH, slots=0)["top_1"].slots == 0


class Subclass(keras.Model):
    """Layers in lists and nested models, with operations of its own between them."""

    def __init__(self):
        super().__init__(name="net")
        self.first = keras.layers.Dense(16, name="first")
        self.block = keras.Sequential(
            [keras.layers.Dense(16, name="inner"), keras.layers.ReLU(name="relu")], name="block"
        )
        self.rest = [keras.layers.Dense(16, name=f"rest_{i}") for i in range(2)]
        self.top = keras.layers.Dense(1, name="top")
        self.scale = self.add_weight(shape=(16,), name="scale")

    def call(self, inputs):
        hidden = self.block(self.first(inputs["x"]))
        for layer in self.rest:
            hidden = hidden + layer(hidden)
        return self.top(tf.reshape(hidden, [-1, 16]) * self.scale)


def test_a_subclass_is_taken_apart_and_what_no_layer_does_is_a_unit_of_the_trainers():
    model = Subclass()
    model({"x": tf.zeros([4, 8])})
    graph = OperatorPlan.step_graph(
        model, BATCH, inputs={"x": tf.TensorSpec([None, 8], tf.float32)}
    )
    names = [unit.name for unit in graph.units if unit.kind == "layer"]
    # Keras gives layers without weights no longer path.
    assert names == [
        *("net/first", "net/block/inner", "relu", "net/rest_0", "net/rest_1", "net/top")
    ]
    assert graph["net/first"].flops == dense_flops(8, 16, first=True)
    assert graph["net/rest_1"].flops == dense_flops(16, 16)
    others = [unit for unit in graph.units if unit.kind == "operations"]
    # The first sum is connected to the second one, and that to the scaling.
    assert [unit.parameter_bytes for unit in others] == [4 * 16]
    edges = edges_of(graph)
    assert edges["net/block/inner", "relu"] == (4 * BATCH * 16,) * 2
    assert edges["relu", others[0].name] == (4 * BATCH * 16,) * 2
    assert edges["inputs/x", "net/first"] == (4 * BATCH * 8, 0)
    plan = OperatorPlan.search(graph, Resources(trainers=1, servers=2))
    assert all(plan.operators[unit.name] is None for unit in others)
    assert sum(unit.name in plan.weights for unit in others) == 1


def test_a_shared_layer_is_one_unit_with_the_operations_of_all_calls():
    left, right = keras.Input((8,), name="left"), keras.Input((8,), name="right")
    shared = keras.layers.Dense(8, name="shared")
    joined = keras.layers.Add(name="joined")([shared(left), shared(shared(right))])
    graph = OperatorPlan.step_graph(keras.Model([left, right], joined), BATCH)
    assert [unit.name for unit in graph.units] == ["left", "right", "shared", "joined", "loss"]
    assert graph["shared"].parameter_bytes == 4 * 8 * 9
    # Three calls, two of them of data; what they pass to each other does not leave the unit.
    forward = 3 * (2 * BATCH * 8 * 8 + BATCH * 8)
    assert graph["shared"].flops >= forward + 3 * 2 * BATCH * 8 * 8
    assert graph["shared"].flops <= 3 * dense_flops(8, 8)
    assert edges_of(graph)["shared", "joined"] == (2 * 4 * BATCH * 8,) * 2


def test_tied_weights_travel_between_the_units_that_share_them():
    class Tied(keras.layers.Layer):
        def __init__(self, other, **kwargs):
            super().__init__(**kwargs)
            self._other = [other]

        def call(self, inputs):
            return keras.ops.matmul(inputs, keras.ops.transpose(self._other[0].kernel))

    features = keras.Input((8,), name="features")
    encoder = keras.layers.Dense(4, use_bias=False, name="encoder")
    decoded = Tied(encoder, name="decoder")(encoder(features))
    graph = OperatorPlan.step_graph(keras.Model(features, decoded), BATCH)
    assert graph["encoder"].parameter_bytes == 4 * 32 and not graph["decoder"].parameter_bytes
    moved = 4 * (32 + BATCH * 4)
    assert edges_of(graph)["encoder", "decoder"] == (moved, moved)


@keras.saving.register_keras_serializable(package="tests")
class Custom(keras.layers.Layer):
    """A tf.function, a conditional and a gradient of its own."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]), name="kernel")

    def call(self, inputs):
        @tf.custom_gradient
        def doubled(x):
            return 2.0 * x, lambda above: 2.0 * above

        @tf.function
        def multiply(x, kernel):
            return tf.matmul(x, kernel)

        hidden = multiply(doubled(inputs), tf.convert_to_tensor(self.kernel))
        return tf.cond(tf.reduce_sum(hidden) > 0, lambda: tf.exp(hidden), lambda: hidden)


def test_functions_conditionals_and_own_gradients_inside_a_layer_are_counted():
    features = keras.Input((8,), name="features")
    hidden = keras.layers.Dense(8, name="below")(features)
    graph = OperatorPlan.step_graph(keras.Model(features, Custom(name="custom")(hidden)), BATCH)
    matmuls = 3 * 2 * BATCH * 8 * 8
    assert matmuls < graph["custom"].flops < 1.2 * matmuls
    assert [unit.name for unit in graph.units] == ["features", "below", "custom", "loss"]


def test_a_recurrent_layer_has_the_operations_of_all_its_steps():
    sequence = keras.Input((20, 6), name="sequence")
    for unroll in (False, True):
        layer = keras.layers.LSTM(10, unroll=unroll, name=f"lstm_{unroll}")
        graph = OperatorPlan.step_graph(keras.Model(sequence, layer(sequence)), BATCH)
        forward = 20 * 2 * BATCH * 4 * 10 * (6 + 10)
        assert 2 * forward < graph[layer.name].flops < 4 * forward


@pytest.mark.parametrize(
    "layer", [keras.layers.BatchNormalization, keras.layers.LayerNormalization, MeanNormalization]
)
def test_normalization_is_a_unit_with_its_weights_trained_or_not(layer):
    features = keras.Input((8,), name="features")
    own = layer(name="norm")
    hidden = own(keras.layers.Dense(16, name="below")(features))
    dropped = keras.layers.Dropout(0.5, name="dropout")(hidden)
    graph = OperatorPlan.step_graph(keras.Model(features, dropped), BATCH)
    expected = sum(4 * int(np.prod(v.shape)) for v in own.weights)
    assert graph["norm"].parameter_bytes == expected
    assert 2 * BATCH * 16 < graph["norm"].flops < 60 * BATCH * 16
    assert edges_of(graph)["below", "norm"] == (4 * BATCH * 16,) * 2
    assert graph["dropout"].kind == "layer" and graph["dropout"].flops > 0


def test_embeddings_of_keras_are_lookups_and_preprocessing_is_beside_the_data():
    words = keras.Input((5,), dtype="string", name="words")
    hashed = keras.layers.Hashing(100, name="hashing")(words)
    rows = keras.layers.Embedding(100, 4, mask_zero=True, name="rows")(hashed)
    pooled = keras.layers.GlobalAveragePooling1D(name="pooled")(rows)
    graph = OperatorPlan.step_graph(
        keras.Model(words, keras.layers.Dense(1, name="top")(pooled)), BATCH
    )
    kinds = {unit.name: unit.kind for unit in graph.units}
    assert (kinds["hashing"], kinds["rows"], kinds["pooled"]) == ("input", "lookup", "layer")
    assert graph["rows"].parameter_bytes == 0
    assert edges_of(graph)["rows", "pooled"][1] == 4 * BATCH * 5 * 4


class Tower(keras.layers.Layer):
    """Looks rows up, and computes with them."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.rows = keras.layers.Embedding(50, 8, name="embedding")
        self.hidden = keras.layers.Dense(40, "relu", name="hidden")

    def build(self, shape):
        self.rows.build(shape)
        self.hidden.build((None, 8))

    def call(self, ids):
        return self.hidden(keras.ops.mean(self.rows(ids), 1))


@dataclasses.dataclass
class _Table:
    name: str = "films"
    vocabulary_size: int = 50
    embedding_dim: int = 8
    initializer: str = "uniform"
    combiner: str = "sum"


@dataclasses.dataclass
class _Feature:
    name: str
    table: _Table
    input_shape: tuple
    output_shape: tuple


def of_tables_inside(ids):
    """What two layers give that have tables inside, [batch, 48], of ids, [batch, any]."""
    feature = _Feature("film", _Table(), (None, ids.shape[1]), (None, 8))
    films = recsync.layers.DistributedEmbedding({"film": feature}, name="films")
    return keras.layers.Concatenate(name="both")(
        [films({"film": ids})["film"], Tower(name="tower")(ids)]
    )


def test_layers_with_tables_inside_are_taken_apart():
    ids = keras.Input((3,), dtype="int64", name="ids")
    model = keras.Model(ids, keras.layers.Dense(1, name="top")(of_tables_inside(ids)))
    graph = OperatorPlan.step_graph(model, BATCH)
    kinds = {unit.name: unit.kind for unit in graph.units}
    assert kinds["films/films_tables"] == kinds["tower/embedding"] == "lookup"
    weights = {unit.name: unit.parameter_bytes for unit in graph.units if unit.parameter_bytes}
    assert weights == {"tower/hidden": 4 * 40 * 9, "top": 4 * 49}
    assert edges_of(graph)["films/films_tables", "both"] == (4 * BATCH * 8,) * 2


def test_tables_with_keys_are_lookups_whose_gradients_travel():
    layer = EmbeddingCollection(
        [TableConfig("users", 1000, 8, keys="any"), TableConfig("films", 50, 8)],
        [FeatureConfig("user", "users"), FeatureConfig("film", "films")],
        name="rows",
    )
    inputs = {
        "user": keras.Input((), dtype="string", name="user"),
        "film": keras.Input((), dtype="int64", name="film"),
    }
    vectors = keras.layers.Concatenate(name="both")([*layer(inputs).values()])
    model = keras.Model(inputs, keras.layers.Dense(1, name="top")(vectors))
    counts = layer.key_counts()["users"]
    graph = OperatorPlan.step_graph(model, BATCH)
    assert graph["rows"].kind == "lookup"
    assert edges_of(graph)["rows", "both"] == (2 * 4 * BATCH * 8,) * 2
    batch = {"user": np.array(["anna"] * BATCH), "film": np.zeros(BATCH, np.int64)}
    assert OperatorPlan.profile(model, [batch])["top"].flops > 0
    assert layer.key_counts()["users"] == counts  # Nothing was looked up.


def towers(second=lambda: keras.layers.Dense(24, "tanh", name="hidden")) -> keras.Model:
    """Two models in one, whose layers have the same names."""

    def tower(name, layer):
        inputs = keras.Input((6,), name="inputs")
        x = keras.layers.ReLU(name="relu")(layer(inputs))
        return keras.Model(inputs, keras.layers.Dense(4, name="out")(x), name=name)

    first = tower("first", keras.layers.Dense(96, name="hidden"))
    x = keras.Input((6,), name="x")
    both = keras.layers.Add(name="loss")([first(x), tower("second", second())(x)])
    return keras.Model(x, keras.layers.Dense(1, name="top")(both))


def test_layers_of_one_name_have_numbers_and_the_loss_leaves_names_to_layers():
    model = towers()
    graph = OperatorPlan.step_graph(model, BATCH)
    names = [unit.name for unit in graph.units if unit.kind != "input"]
    assert names == [
        *("hidden", "relu", "out", "hidden#2", "relu#2", "out#2", "loss", "top", "loss#2")
    ]
    assert graph["hidden"].parameter_bytes == 4 * 96 * 7
    assert graph["hidden#2"].parameter_bytes == 4 * 24 * 7
    units = {unit.path: unit.layer for unit in units_of(model, [])}
    assert list(units) == ["hidden", "out", "hidden#2", "out#2", "top"]
    assert units["hidden#2"] is model.get_layer("second").get_layer("hidden")


def test_of_layers_of_one_name_the_large_one_is_divided():
    model = towers(lambda: keras.layers.Dense(24, name="hidden", trainable=False))
    model.compile(optimizers.SGD(0.1), "mse")
    found = by_weights(units_of(model, []), 2, True, [model.optimizer])
    divided = [(unit.layer, how) for unit, how in found if isinstance(how, str)]
    assert divided == [(model.get_layer("first").get_layer("hidden"), "columns")]


def test_ragged_and_sparse_ids_are_traced():
    tables = [TableConfig("films", 20, 4)]
    layer = EmbeddingCollection(tables, [FeatureConfig("seen", "films")], name="rows")
    ids = keras.Input((None,), dtype="int64", ragged=True, name="seen")
    outputs = keras.layers.Dense(1, name="top")(layer({"seen": ids})["seen"])
    model = keras.Model({"seen": ids}, outputs)
    graph = OperatorPlan.step_graph(model, BATCH)
    assert edges_of(graph)["rows", "top"] == (4 * BATCH * 4,) * 2
    assert graph["top"].flops == dense_flops(4, 1)


def test_a_measured_graph_has_the_same_units_and_edges_and_as_many_operations_in_all():
    model = dlrm()
    random = np.random.default_rng(0)
    batch = {"numbers": random.normal(size=(BATCH, 13)).astype("float32")}
    batch |= {f"c{i}": random.integers(0, 50, BATCH) for i in range(3)}
    batches = tf.data.Dataset.from_tensors((batch, np.zeros(BATCH))).repeat(3)
    counted, measured = OperatorPlan.step_graph(model, BATCH), OperatorPlan.profile(model, batches)
    assert set(measured.edges) == set(counted.edges)
    assert [u.name for u in measured.units] == [u.name for u in counted.units]
    assert measured.flops == pytest.approx(counted.flops)
    assert all(measured[name].flops == 0 for name in ("rows", "numbers", "c0", "loss"))
    # It copies, and so takes time without computing anything.
    assert measured["joined"].flops > counted["joined"].flops == 0


def test_measuring_leaves_the_model_as_it_was():
    model = dlrm()
    before = model.get_weights()
    data = {"numbers": np.ones((4, 13), "float32")} | {
        f"c{i}": np.zeros(4, "int64") for i in range(3)
    }
    output = model(data)
    OperatorPlan.profile(model, [data])
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    np.testing.assert_array_equal(model(data), output)
    assert not any("call" in layer.__dict__ for layer in model.layers)


def test_layers_that_look_up_in_tables_of_tensorflow_are_not_measured():
    words, numbers = (
        keras.Input((3,), dtype="string", name="words"),
        keras.Input((), name="numbers"),
    )
    ids = keras.layers.StringLookup(vocabulary=["a", "b"], name="ids")(words)
    rows = keras.layers.Flatten()(keras.layers.Embedding(3, 8, name="rows")(ids))
    kinds = keras.layers.IntegerLookup(vocabulary=[3, 5], output_mode="one_hot", name="kinds")
    hot = kinds(keras.layers.Reshape((1,))(keras.ops.cast(numbers, "int64")))
    both = keras.layers.Concatenate(name="both")([rows, hot])
    model = keras.Model([words, numbers], keras.layers.Dense(64, name="top")(both))
    batch = [tf.constant([["a", "b", "c"]] * 8), tf.constant([3.0, 5.0, 7.0, 9.0] * 2)]
    graph = OperatorPlan.profile(model, [batch])
    assert graph["top"].flops > 0 and graph["ids"].flops == graph["kinds"].flops == 0
    assert {unit.name for unit in graph.units} >= {"words", "numbers", "ids", "rows", "kinds"}


class Voted(keras.layers.Layer):
    """Has a table of TensorFlow's, and a weight."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), name="scale")
        pairs = tf.lookup.KeyValueTensorInitializer([1], [2.0], tf.int64, tf.float32)
        self.table = tf.lookup.StaticHashTable(pairs, 0.0)

    def call(self, inputs):
        return self.scale * self.table.lookup(tf.cast(inputs, tf.int64))

    def compute_output_shape(self, shape):
        return shape


def test_a_layer_with_weights_and_such_a_table_is_named():
    inputs = keras.Input((4,), name="x")
    layer = Voted(name="voted")
    layer.build((None, 4))
    model = keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)))
    with pytest.raises(ValueError, match="unit 'voted' can't be measured: .*step_graph counts it"):
        OperatorPlan.profile(model, [np.ones((8, 4), "float32")])


def test_a_larger_layer_takes_more_of_the_measured_time():
    features = keras.Input((256,), name="features")
    # So much larger that no other program on the machine makes up for it.
    hidden = keras.layers.Dense(4096, use_bias=False, name="large")(features)
    outputs = keras.layers.Dense(1, use_bias=False, name="small")(hidden)
    model = keras.Model(features, outputs)
    graph = OperatorPlan.profile(model, [np.ones((256, 256), "float32")] * 3)
    assert graph["large"].flops > 1.2 * graph["small"].flops > 0


def test_what_cannot_be_traced_is_refused():
    with pytest.raises(ValueError, match="must be a keras.Model"):
        OperatorPlan.step_graph(keras.layers.Dense(1), 4)
    with pytest.raises(ValueError, match="must be built"):
        OperatorPlan.step_graph(Subclass(), 4)
    model = Subclass()
    model({"x": tf.zeros([4, 8])})
    with pytest.raises(ValueError, match="inputs: model 'net' has no graph"):
        OperatorPlan.step_graph(model, 4)
    with pytest.raises(ValueError, match="inputs: 3 must be a tensor"):
        OperatorPlan.step_graph(model, 4, inputs={"x": 3})
    with pytest.raises(ValueError, match="batch_size"):
        OperatorPlan.step_graph(dlrm(), 0)
    with pytest.raises(ValueError, match="slots"):
        OperatorPlan.step_graph(dlrm(), 4, slots=-1)
    with pytest.raises(ValueError, match="at least one batch"):
        OperatorPlan.profile(dlrm(), [])
    with pytest.raises(ValueError, match="steps"):
        OperatorPlan.profile(dlrm(), [{}], steps=0)
    sequence = keras.Input((None, 4), name="sequence")
    outputs = keras.layers.Dense(1, name="each")(sequence)
    with pytest.raises(ValueError, match="unit 'sequence': the shape .* complete"):
        OperatorPlan.step_graph(keras.Model(sequence, outputs), 4)
    specs = keras.KerasTensor((None, 7, 4))
    graph = OperatorPlan.step_graph(keras.Model(sequence, outputs), 4, inputs=specs)
    assert edges_of(graph)["sequence", "each"] == (4 * 4 * 7 * 4, 0)
    assert isinstance(graph.edges[0], Edge)
