"""Training of recommendation models on machines of uneven speed, on TensorFlow."""

from tf_recsync._compatibility import check_tensorflow as _check_tensorflow

_check_tensorflow()

from tf_recsync import (  # noqa: E402
    _status_errors,
    callbacks,
    checkpoint,
    data,
    layers,
    maintenance,
    metrics,
    modes,
    optimizers,
    placement,
    serving,
    simulation,
    staleness,
    testing,
    topology,
)
from tf_recsync.cluster import (  # noqa: E402
    Cluster,
    LocalCluster,
    Member,
    MemberState,
    cluster_from_tf_config,
    use_final_device_names,
)
from tf_recsync.compression import Compression  # noqa: E402
from tf_recsync.embedding.bin_packing import plan_placement  # noqa: E402
from tf_recsync.embedding.placement import PlacementPlan  # noqa: E402
from tf_recsync.embedding.profile import profile_costs  # noqa: E402
from tf_recsync.placement import OperatorPlan  # noqa: E402
from tf_recsync.serving import export_model  # noqa: E402
from tf_recsync.strategies import (  # noqa: E402
    AsyncStrategy,
    BackupWorkersStrategy,
    BoundedStalenessStrategy,
    BSPStrategy,
    GBAStrategy,
    HierarchicalStrategy,
    Hop,
    HopStrategy,
    ShadowSyncStrategy,
    SyncStrategy,
)
from tf_recsync.swap import Swap  # noqa: E402
from tf_recsync.synchronization.hop_protocol import Skip  # noqa: E402
from tf_recsync.synchronization.shadow_algorithms import (  # noqa: E402
    BMUF,
    EASGD,
    Algorithm,
    ModelAveraging,
    all_reduce_mean,
)
from tf_recsync.synchronization.shadow_schedule import Foreground, Shadow  # noqa: E402
from tf_recsync.versions import latest_published  # noqa: E402

_status_errors.register()

__version__ = "0.1.0"

__all__ = [
    "Algorithm",
    "AsyncStrategy",
    "BMUF",
    "BSPStrategy",
    "BackupWorkersStrategy",
    "BoundedStalenessStrategy",
    "Cluster",
    "Compression",
    "EASGD",
    "Foreground",
    "GBAStrategy",
    "HierarchicalStrategy",
    "Hop",
    "HopStrategy",
    "LocalCluster",
    "Member",
    "MemberState",
    "ModelAveraging",
    "OperatorPlan",
    "PlacementPlan",
    "Shadow",
    "ShadowSyncStrategy",
    "Skip",
    "Swap",
    "SyncStrategy",
    "all_reduce_mean",
    "callbacks",
    "checkpoint",
    "cluster_from_tf_config",
    "data",
    "export_model",
    "latest_published",
    "layers",
    "maintenance",
    "metrics",
    "modes",
    "optimizers",
    "placement",
    "plan_placement",
    "profile_costs",
    "serving",
    "simulation",
    "staleness",
    "testing",
    "topology",
    "use_final_device_names",
]
