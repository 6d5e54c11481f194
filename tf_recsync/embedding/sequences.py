"""Features whose rows are not combined: sequences of vectors, and their masks."""

from __future__ import annotations

import keras
import tensorflow as tf

from tf_recsync.embedding import feature_inputs
from tf_recsync.embedding.config import FeatureConfig
from tf_recsync.embedding.feature_inputs import FeatureInput


def singles(own: FeatureInput) -> FeatureInput:
    """The ids of a feature, each as an example of its own."""
    return FeatureInput(own.ids, 1, None, None, None)


def shape_of(ids, dimension: int) -> tuple[int | None, ...]:
    """The static shape of the sequences of symbolic ids."""
    if len(ids.shape) == 1:
        return (ids.shape[0], dimension)
    length = None if ids.ragged or ids.sparse else ids.shape[1]
    return (ids.shape[0], length, dimension)


def arrange(vectors: tf.Tensor, own: FeatureInput) -> tf.Tensor:
    """Puts the vectors of a feature's ids where its ids were.

    Args:
        vectors: [n, dimension], of the ids that are left without padding.
        own: the feature's ids.

    Returns:
        [batch, length, dimension], zeros where there is no id; [batch, dimension] of ids
        that came as [batch]. The length is that of the longest example.
    """
    given = own.given or own
    dimension = vectors.shape[1]
    if own.kept is not None:
        shape = tf.stack([tf.size(given.ids, tf.int64), dimension])
        vectors = tf.scatter_nd(own.kept[:, tf.newaxis], vectors, shape)
        vectors = tf.ensure_shape(vectors, [None, dimension])
    if given.is_vector:
        return tf.ensure_shape(vectors, [given.batch, dimension])
    arranged = _in_rows(vectors, given)
    return tf.ensure_shape(arranged, [given.batch, given.length or None, dimension])


@keras.saving.register_keras_serializable(package="tf_recsync")
class SequenceMask(keras.Operation):
    """Where there are ids: a Keras mask, bool [batch, length]; None if they are everywhere.

    An operation, as Keras makes the masks of symbolic tensors a part of the model.

    Args:
        feature: the feature whose ids it is called with.
    """

    def __init__(self, feature: FeatureConfig):
        super().__init__()
        self.feature = feature

    def call(self, ids):
        given = feature_inputs.read_given(self.feature, ids)
        padding = self.feature.padding
        if given.is_vector or (given.splits is None and padding is None):
            return None
        there = tf.ones_like(given.ids, tf.bool)
        if padding is not None:
            there = tf.logical_not(feature_inputs.is_padding(given.ids, padding))
        return tf.ensure_shape(_in_rows(there, given), [given.batch, given.length or None])

    def compute_output_spec(self, ids):
        return keras.KerasTensor(shape_of(ids, 1)[:-1], "bool")

    def __call__(self, ids):
        is_symbolic = isinstance(ids, keras.KerasTensor)
        if is_symbolic and (len(ids.shape) == 1 or self._is_everywhere(ids)):
            return None
        return super().__call__(ids)

    def _is_everywhere(self, ids: keras.KerasTensor) -> bool:
        return self.feature.padding is None and shape_of(ids, 1)[1] is not None

    def get_config(self):
        return {"feature": keras.saving.serialize_keras_object(self.feature)}

    @classmethod
    def from_config(cls, config):
        return cls(keras.saving.deserialize_keras_object(config["feature"]))


def _in_rows(values: tf.Tensor, given: FeatureInput) -> tf.Tensor:
    """Values of all ids, example by example, filled up with zeros: [batch, length, ...]."""
    if given.splits is None:
        return tf.reshape(values, [-1, given.length, *values.shape[1:]])
    return tf.RaggedTensor.from_row_splits(values, given.splits, validate=False).to_tensor()
