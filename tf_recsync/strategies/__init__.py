"""tf.distribute strategies: presets over groups, aggregators and synchronizers."""

from tf_recsync.strategies.hierarchical_strategy import HierarchicalStrategy
from tf_recsync.strategies.hop_between_groups import Hop
from tf_recsync.strategies.hop_strategy import HopStrategy
from tf_recsync.strategies.presets import (
    AsyncStrategy,
    BackupWorkersStrategy,
    BoundedStalenessStrategy,
    BSPStrategy,
    GBAStrategy,
    SyncStrategy,
)
from tf_recsync.strategies.shadow_strategy import ShadowSyncStrategy

__all__ = [
    "AsyncStrategy",
    "BSPStrategy",
    "BackupWorkersStrategy",
    "BoundedStalenessStrategy",
    "GBAStrategy",
    "HierarchicalStrategy",
    "Hop",
    "HopStrategy",
    "ShadowSyncStrategy",
    "SyncStrategy",
]
