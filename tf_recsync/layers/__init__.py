"""Keras layers."""

from tf_recsync.embedding.config import FeatureConfig, TableConfig
from tf_recsync.embedding.interactions import (
    AttentionPooling,
    BagRows,
    DotInteraction,
    Interaction,
)
from tf_recsync.layers.embedding_collection import EmbeddingCollection
from tf_recsync.layers.mean_normalization import MeanNormalization

__all__ = [
    "AttentionPooling",
    "BagRows",
    "DotInteraction",
    "EmbeddingCollection",
    "FeatureConfig",
    "Interaction",
    "MeanNormalization",
    "TableConfig",
]
