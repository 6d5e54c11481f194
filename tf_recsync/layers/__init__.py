"""Keras layers."""

from tf_recsync.embedding.config import FeatureConfig, TableConfig
from tf_recsync.embedding.interactions import (
    AttentionPooling,
    BagRows,
    DotInteraction,
    Interaction,
)
from tf_recsync.embedding.key_rules import Admission, Eviction
from tf_recsync.embedding.keys import KeyCounts
from tf_recsync.layers.distributed_embedding import DistributedEmbedding
from tf_recsync.layers.embedding_collection import EmbeddingCollection
from tf_recsync.layers.feature_interactions import Cross, FactorizationMachine
from tf_recsync.layers.mean_normalization import MeanNormalization

__all__ = [
    "Admission",
    "AttentionPooling",
    "BagRows",
    "Cross",
    "DistributedEmbedding",
    "DotInteraction",
    "EmbeddingCollection",
    "Eviction",
    "FactorizationMachine",
    "FeatureConfig",
    "Interaction",
    "KeyCounts",
    "MeanNormalization",
    "TableConfig",
]
