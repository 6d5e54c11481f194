"""What a regularizer on a table costs is said once."""

import keras
import numpy as np

from tf_recsync import layers, optimizers


def test_a_regularizer_on_a_table_is_warned_of_once_and_no_other(caplog):
    l2 = keras.regularizers.L2(0.01)
    collection = layers.EmbeddingCollection(
        [layers.TableConfig("films", 2000, 4), layers.TableConfig("users", 10, 4)],
        [layers.FeatureConfig("film", "films"), layers.FeatureConfig("user", "users")],
        name="embed",
    )
    table = keras.layers.Embedding(10, 2, embeddings_regularizer=l2, name="plain")
    other = keras.layers.Embedding(10, 2, activity_regularizer=l2, name="other")
    inputs = {name: keras.Input((), dtype="int32") for name in ("film", "user")}
    vectors = [*collection(inputs).values(), table(inputs["user"]), other(inputs["user"])]
    hidden = keras.layers.Dense(1, kernel_regularizer=l2, name="dense")
    model = keras.Model(inputs, hidden(keras.layers.concatenate(vectors)))
    collection.trainable_variables[0].regularizer = l2
    model.compile(optimizers.Adagrad(0.1), "mse", jit_compile=False)
    x = {name: np.arange(8, dtype=np.int32) for name in inputs}
    model.fit(x, np.zeros(8), batch_size=2, epochs=2, verbose=0)
    found = [m for m in caplog.messages if "regularizer" in m]
    (of_plain,) = [m for m in found if "The table plain/embeddings, 10 x 2, has a regular" in m]
    assert "L2" in of_plain
    (of_collection,) = [m for m in found if m is not of_plain]
    assert "(of films, users), 2,010 x 4, has a regularizer" in of_collection
