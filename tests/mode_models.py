"""Models that tell which batches were trained together, and what one process makes of them."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tf_recsync.layers import EmbeddingCollection, FeatureConfig, TableConfig

ROWS, IDS, LOCAL = 30, 3, 4  # Of the tables; ids of an example; examples of a batch.
TABLE = "films"


class Ledger(keras.layers.Layer):
    """Notes for each batch the value of a weight that every step makes larger.

    So batches that were computed on the same parameters, and nothing else, have the
    same note, and the notes' order is that of the steps.

    Args:
        batches: how many there are; the input is the batch's number.
    """

    def __init__(self, batches: int, **kwargs):
        super().__init__(**kwargs)
        self.batches = batches

    def build(self, shape):
        self.clock = self.add_weight(shape=(1,), initializer="ones", name="clock")
        self.notes = self.add_weight(
            shape=(self.batches,), initializer="zeros", trainable=False, name="notes"
        )

    def call(self, numbers, training=False):
        self.add_loss(-keras.ops.sum(self.clock))
        if training:
            place = keras.ops.one_hot(numbers[0, 0], self.batches, dtype="float32")
            self.notes.assign_add(place * self.clock)
        return keras.ops.zeros_like(numbers, dtype="float32")


def ledger_model(batches: int) -> keras.Model:
    """Dense layers, a Keras table, and a collection's table of which ragged bags are averaged."""
    number = keras.Input((1,), dtype="int32", name="number")
    ids = keras.Input((IDS,), dtype="int32", name="ids")
    seen = keras.Input((None,), dtype="int64", ragged=True, name="seen")
    vectors = EmbeddingCollection(
        [TableConfig(TABLE, ROWS, 4, "normal", "mean")],
        [FeatureConfig("seen", TABLE)],
        name="collection",
    )({"seen": seen})
    looked_up = keras.layers.Flatten()(keras.layers.Embedding(ROWS, 2, name="table")(ids))
    x = keras.layers.Concatenate()([vectors["seen"], looked_up])
    x = keras.layers.Dense(5, "tanh", name="hidden")(x)
    x = keras.layers.Dense(1, name="out")(x)
    x = keras.layers.Add()([x, Ledger(batches, name="ledger")(number)])
    return keras.Model({"number": number, "ids": ids, "seen": seen}, x)


def small_model() -> keras.Model:
    """A table and a dense layer, of the same data: variables for two servers, and soon traced."""
    inputs = {
        "number": keras.Input((1,), dtype="int32", name="number"),
        "ids": keras.Input((IDS,), dtype="int32", name="ids"),
        "seen": keras.Input((None,), dtype="int64", ragged=True, name="seen"),
    }
    x = keras.layers.Flatten()(keras.layers.Embedding(ROWS, 2, name="table")(inputs["ids"]))
    return keras.Model(inputs, keras.layers.Dense(1, name="out")(x))


class TiedLedger(keras.Model):
    """Uses its table as a whole, too; and a lookup that depends on another."""

    def __init__(self, batches: int):
        super().__init__()
        self.ledger = Ledger(batches, name="ledger")
        self.table = keras.layers.Embedding(ROWS, 2, name="table")
        self.other = keras.layers.Embedding(ROWS, 2, name="other")

    def call(self, inputs, training=None):
        rows = keras.ops.mean(self.table(inputs["ids"]), axis=1)
        scores = rows @ keras.ops.transpose(self.table.embeddings)
        best = keras.ops.argmax(scores, axis=1)
        found = keras.ops.sum(self.other(best), axis=1, keepdims=True)
        top = keras.ops.max(scores, axis=1, keepdims=True)
        return top + found + self.ledger(inputs["number"], training=training)


class Batches:
    """Numbered batches of `LOCAL` examples, for both models.

    Args:
        count: how many.
    """

    def __init__(self, count: int):
        rng = np.random.default_rng(8)
        self.count = count
        self._ids = rng.integers(0, ROWS - 5, (count, LOCAL, IDS)).astype(np.int32)
        lengths = rng.integers(0, 4, (count, LOCAL))
        self._seen = [
            [rng.integers(0, ROWS - 5, n).tolist() for n in lengths[i]] for i in range(count)
        ]
        self._labels = rng.normal(size=(count, LOCAL, 1)).astype(np.float32)

    def together(self, numbers) -> tuple[dict, np.ndarray]:
        """Some batches as one."""
        bags = [bag for number in numbers for bag in self._seen[number]]
        inputs = {
            "number": np.repeat(np.array(numbers, np.int32), LOCAL)[:, None],
            "ids": np.concatenate(self._ids[numbers]),
            "seen": tf.ragged.constant(bags, dtype=tf.int64, ragged_rank=1),
        }
        return inputs, np.concatenate(self._labels[numbers])

    def dataset(self, groups=None) -> tf.data.Dataset:
        """The batches in their order; or one for each group of them."""
        inputs, labels = self.together(np.arange(self.count))
        with tf.device("/CPU:0"):
            whole = tf.data.Dataset.from_tensor_slices((inputs, labels)).batch(LOCAL)
            if groups is None:
                return whole
            sizes = tf.constant([LOCAL * len(group) for group in groups], tf.int64)
            starts = tf.cumsum(sizes, exclusive=True)
            inputs, labels = self.together(np.concatenate(groups))
            inputs = {
                name: value if isinstance(value, tf.RaggedTensor) else tf.constant(value)
                for name, value in inputs.items()
            }
            spans = tf.data.Dataset.from_tensor_slices((starts, starts + sizes))
            return spans.map(
                lambda start, end: (
                    {name: value[start:end] for name, value in inputs.items()},
                    tf.constant(labels)[start:end],
                )
            )


def weights_of(model: keras.Model) -> dict[str, np.ndarray]:
    """All that is trained, by name, wherever it is."""
    values = {}
    for variable in model.trainable_variables:
        if "collection" not in variable.path:
            values["/".join(variable.path.split("/")[-2:])] = variable.numpy()
    for layer in model.layers:
        if isinstance(layer, EmbeddingCollection):
            values[TABLE] = layer.table_values(TABLE)
    return values


def groups_of(model: keras.Model) -> list[np.ndarray]:
    """The numbers of the batches computed on the same parameters, in the order of steps."""
    notes = model.get_layer("ledger").notes.numpy()
    return [np.flatnonzero(notes == note) for note in np.unique(notes[notes > 0])]
