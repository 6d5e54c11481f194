"""Models of one program, and of none with a cluster, that go on with what others have saved."""

import keras
import numpy as np
import tensorflow as tf

import tf_recsync as recsync
from tf_recsync.layers import EmbeddingCollection, FeatureConfig, TableConfig

ROWS, STEPS = 50, 4


def make_model():
    """Its layers get automatic names."""
    ids = keras.Input((), dtype="int64", name="ids")
    tables = [TableConfig("ads", ROWS, 4), TableConfig("sites", ROWS, 4)]
    features = [FeatureConfig("ids", "ads"), FeatureConfig("others", "sites")]
    pooled = EmbeddingCollection(tables, features, concatenate=True)({"ids": ids, "others": ids})
    model = keras.Model({"ids": ids}, keras.layers.Dense(1, "sigmoid")(pooled))
    model.compile(recsync.optimizers.Adagrad(0.1), "binary_crossentropy")
    return model


def dataset():
    ids = np.random.default_rng(1).integers(0, ROWS, STEPS * 16)
    return tf.data.Dataset.from_tensor_slices(({"ids": ids}, np.ones((STEPS * 16, 1)))).batch(16)


def check_goes_on_alike(first, second):
    for model in (first, second):
        model.fit(dataset(), verbose=0)
    assert int(first.optimizer.iterations) == int(second.optimizer.iterations) == 2 * STEPS
    for mine, theirs in zip(first.get_weights(), second.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_second_model_whose_layers_have_other_names_loads_the_weights(tmp_path):
    path = str(tmp_path / "model.weights.h5")
    first, second = make_model(), make_model()
    collections = [model.layers[1].name for model in (first, second)]
    assert collections[0] != collections[1]
    first.fit(dataset(), verbose=0)
    first.save_weights(path)
    second.load_weights(path)
    check_goes_on_alike(first, second)


def test_what_was_loaded_and_not_trained_is_saved_with_the_optimizer_s_state(tmp_path):
    paths = [str(tmp_path / name) for name in ("first.weights.h5", "again.weights.h5")]
    first, between, second = make_model(), make_model(), make_model()
    first.fit(dataset(), verbose=0)
    first.save_weights(paths[0])
    between.load_weights(paths[0])
    between.save_weights(paths[1])
    second.load_weights(paths[1])
    check_goes_on_alike(first, second)


def test_a_checkpoint_is_restored_before_the_first_step_without_a_cluster(tmp_path):
    first, second = make_model(), make_model()
    first.fit(dataset(), verbose=0)
    path = tf.train.Checkpoint(model=first).save(str(tmp_path / "clicks"))
    status = tf.train.Checkpoint(model=second).restore(path)
    second.fit(dataset(), verbose=0)
    status.assert_existing_objects_matched()
    first.fit(dataset(), verbose=0)
    for mine, theirs in zip(first.get_weights(), second.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
