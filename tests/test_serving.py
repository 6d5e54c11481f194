"""Exported models take ragged and sparse ids, and run without this package."""

import pathlib
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_close

import tf_recsync as recsync
from tf_recsync.layers import AttentionPooling, EmbeddingCollection, FeatureConfig, TableConfig
from tf_recsync.serving import Inference

DOCUMENT = pathlib.Path(__file__).resolve().parent.parent / "docs" / "serving.md"


def run_without_the_package(program: str, folder: pathlib.Path) -> str:
    """Runs a program in a process that can't import this package."""
    hidden = "import sys\nsys.modules['tf_recsync'] = None\n"
    result = subprocess.run(
        [sys.executable, "-c", hidden + program],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def test_the_recipe_of_the_documentation_works(tmp_path, monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    # The others are a program of its own, which `make docs` runs.
    train, load, by_name, sequences, publish, serve, *_ = blocks
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(train, str(DOCUMENT), "exec"), names)
    run_without_the_package(load + by_name, tmp_path)
    with pytest.raises(AssertionError, match="tf_recsync"):
        run_without_the_package("import tf_recsync", tmp_path)
    names["film_ids"] = keras.Input((), dtype="int64")
    names["ragged_film_ids"] = keras.Input((None,), dtype="int64", ragged=True)
    exec(compile(sequences, str(DOCUMENT), "exec"), names)
    assert names["taste"].shape == (None, 1, 8)
    exec(compile(publish, str(DOCUMENT), "exec"), names)
    exec(compile(serve, str(DOCUMENT), "exec"), names)
    assert (names["clicks"].shape, names["rows"].shape) == ((2, 1), (3, 8))


def click_model() -> keras.Model:
    """Of all forms of input: pooled, padded, weighted, a sequence, an interaction."""
    inputs = {
        "film": keras.Input((), dtype="int64", name="film"),
        "seen": keras.Input((None,), dtype="int64", name="seen", ragged=True),
        "tags": keras.Input((3,), dtype="int64", name="tags"),
        "words": keras.Input((None,), dtype="int64", name="words", sparse=True),
    }
    weights = keras.Input((None,), dtype="float32", name="weights", ragged=True)
    tables = [
        TableConfig("films", 20, 4, combiner="mean"),
        TableConfig("tags", 9, 4, combiner="sqrtn"),
        TableConfig("words", 30, 4, combiner=None),
    ]
    found = EmbeddingCollection(
        tables,
        [
            FeatureConfig("film", "films"),
            FeatureConfig("seen", "films", padding=0),
            FeatureConfig("tags", "tags", padding=-1),
            FeatureConfig("words", "words", out_of_range="hash"),
        ],
        interactions=[AttentionPooling("taste", "film", "seen")],
        returned_features=["film", "seen", "tags", "words"],
    )(inputs, {"seen": weights})
    found["words"] = keras.layers.GlobalAveragePooling1D()(found["words"])
    vectors = keras.layers.concatenate(list(found.values()))
    return keras.Model({**inputs, "weights": weights}, keras.layers.Dense(1)(vectors))


def click_inputs() -> dict:
    seen = tf.ragged.constant([[3, 0, 4], [], [5]], tf.int64)
    return {
        "film": tf.constant([1, 2, 3], tf.int64),
        "seen": seen,
        "tags": tf.constant([[1, -1, 2], [-1, -1, -1], [3, 4, 5]], tf.int64),
        "words": tf.ragged.constant([[99], [1, 2], [-5, 6, 7]], tf.int64).to_sparse(),
        "weights": seen.with_values(tf.constant([0.5, 9.0, 1.5, 2.0])),
    }


PROGRAM = """
import numpy as np
import tensorflow as tf

with np.load("inputs.npz") as file:
    parts = {name: tf.constant(file[name]) for name in file}
served = tf.saved_model.load("exported")
inputs = {"film": parts["film"], "tags": parts["tags"]}
for name in ("seen", "weights"):
    splits = parts[name + "_row_splits"]
    inputs[name] = tf.RaggedTensor.from_row_splits(parts[name], splits)
inputs["words"] = tf.SparseTensor(
    parts["words_indices"], parts["words"], parts["words_dense_shape"]
)
by_name = served.signatures["serving_default"](**parts)
np.savez("served.npz", served.serve(inputs), *by_name.values())
"""


@pytest.mark.full
@pytest.mark.parametrize("on_servers", [False, True])
def test_all_forms_of_input_are_served_without_this_package(clusters, tmp_path, on_servers):
    strategy = tf.distribute.get_strategy()
    if on_servers:
        strategy = recsync.AsyncStrategy(clusters.get(workers=1, ps=2))
    with strategy.scope():
        model = click_model()
        model.compile(recsync.optimizers.Adagrad(0.1), "mse", jit_compile=False)
    inputs = click_inputs()
    data = tf.data.Dataset.from_tensors((inputs, tf.constant([[1.0], [0.0], [2.0]])))
    model.fit(data.repeat(3), verbose=0)
    recsync.export_model(model, tmp_path / "exported")
    parts = {name: x for name, x in inputs.items() if isinstance(x, tf.Tensor)}
    for name in ("seen", "weights"):
        parts |= {name: inputs[name].values, f"{name}_row_splits": inputs[name].row_splits}
    words = inputs["words"]
    parts |= {"words": words.values, "words_indices": words.indices}
    parts["words_dense_shape"] = words.dense_shape
    np.savez(tmp_path / "inputs.npz", **{name: x.numpy() for name, x in parts.items()})
    run_without_the_package(PROGRAM, tmp_path)
    with np.load(tmp_path / "served.npz") as file:
        expected = model.predict(data, verbose=0)
        assert_close([file["arr_0"], file["arr_1"]], [expected, expected], 1e-5)


class Own(keras.Model):
    """A model of a user's own class."""

    def __init__(self):
        super().__init__()
        tables = [TableConfig("films", 20, 4)]
        self.films = EmbeddingCollection(tables, [FeatureConfig("seen", "films")])

    def call(self, ids):
        return self.films({"seen": ids})["seen"]


def test_a_model_of_ones_own_class_takes_a_signature(tmp_path):
    model, ids = Own(), tf.ragged.constant([[1, 2], []], tf.int64)
    expected = model(ids)
    with pytest.raises(ValueError, match="input_signature=None: must be given for the model 'own"):
        recsync.export_model(model, tmp_path)
    with pytest.raises(ValueError, match="filepath must be the path of a folder, not None"):
        recsync.export_model(model, None)
    spec = tf.RaggedTensorSpec([None, None], tf.int64)
    recsync.export_model(model, tmp_path, input_signature=spec)
    served = tf.saved_model.load(str(tmp_path))
    assert_close([served.serve(ids)], [expected])
    by_name = served.signatures["serving_default"]
    found = by_name(input=ids.values, input_row_splits=ids.row_splits)
    assert_close([found["output_0"]], [expected])


class Lengths(keras.layers.Layer):
    """How many values each example of a ragged input has."""

    def call(self, x):
        return tf.cast(x.row_lengths(), tf.float32)[:, None]

    def compute_output_spec(self, x):
        return keras.KerasTensor((x.shape[0], 1), "float32")


def names_of(folder) -> set[str]:
    """What the inputs of an exported model are called."""
    signature = tf.saved_model.load(str(folder)).signatures["serving_default"]
    return set(signature.structured_input_signature[1])


def test_inputs_that_are_in_no_dict_have_the_names_of_their_keras_inputs(tmp_path):
    user = keras.Input((2,), name="user")
    seen = keras.Input((None,), dtype="int64", ragged=True, name="seen")
    words = keras.Input((5,), sparse=True, name="words")
    films = EmbeddingCollection([TableConfig("films", 9, 4)], [FeatureConfig("seen", "films")])
    parts = [films({"seen": seen})["seen"], Lengths()(seen)]
    model = keras.Model(seen, keras.layers.Dense(1)(keras.layers.concatenate(parts)))
    recsync.export_model(model, tmp_path / "one")
    assert names_of(tmp_path / "one") == {"seen", "seen_row_splits"}
    parts += [user, keras.layers.Dense(2)(words)]
    model = keras.Model(
        [user, [seen, words]], keras.layers.Dense(1)(keras.layers.concatenate(parts))
    )
    recsync.export_model(model, tmp_path / "list")
    of_words = {"words", "words_indices", "words_dense_shape"}
    assert names_of(tmp_path / "list") == {"user", "seen", "seen_row_splits", *of_words}
    given = tf.ones([1, 2]), tf.ragged.constant([[1, 2, 3]], tf.int64), tf.sparse.eye(1, 5)
    served = tf.saved_model.load(str(tmp_path / "list"))
    by_name = served.signatures["serving_default"](
        **{"user": given[0], "seen": given[1].values, "seen_row_splits": given[1].row_splits},
        **{"words": given[2].values, "words_indices": given[2].indices},
        words_dense_shape=given[2].dense_shape,
    )
    assert_close([by_name["output_0"]], [model([given[0], list(given[1:])])])
    apart = Inference(model, tables_apart=True)
    apart.read()
    apart.write(str(tmp_path / "apart"))
    (vectors,) = (own.name for own in apart.given)
    own = {"user", "seen", "seen_row_splits", *of_words}
    assert names_of(tmp_path / "apart") == {*own, vectors}


def test_a_model_of_dense_inputs_alone_is_exported_as_keras_does(tmp_path):
    inputs = keras.Input((3,), dtype="int64", name="tags")
    layer = EmbeddingCollection(
        [TableConfig("tags", 9, 4, combiner="mean")], [FeatureConfig("tags", "tags", padding=-1)]
    )
    model = keras.Model(inputs, layer({"tags": inputs})["tags"])
    ids = tf.constant([[1, 2, -1], [-1, -1, -1]], tf.int64)
    recsync.export_model(model, tmp_path / "ours")
    model.export(tmp_path / "keras", verbose=False)
    for folder in ("ours", "keras"):
        served = tf.saved_model.load(str(tmp_path / folder))
        assert_close([served.serve(ids)], [model(ids)])
        found = served.signatures["serving_default"](tags=ids)
        assert_close([found["output_0"]], [model(ids)])


def test_wrong_arguments_are_named(tmp_path):
    with pytest.raises(ValueError, match="model=.*must be a keras.Model that has been built"):
        recsync.export_model(Own(), tmp_path)
    model = keras.Sequential([keras.Input((1,), name="x"), keras.layers.Dense(1)])
    recsync.export_model(model, tmp_path)
    assert tf.saved_model.load(str(tmp_path)).serve(tf.ones([2, 1])).shape == (2, 1)
    for wrong in ("int64", tf.RaggedTensorSpec([None, None, None], tf.int64, ragged_rank=2)):
        with pytest.raises(ValueError, match="input_signature: has .*must be a tf.TensorSpec"):
            recsync.export_model(model, tmp_path, input_signature={"tags": wrong})
