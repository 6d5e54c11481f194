"""Training of recommendation models on machines of uneven speed, on TensorFlow."""

from tf_recsync._compatibility import check_tensorflow

check_tensorflow()

from tf_recsync import optimizers, staleness  # noqa: E402
from tf_recsync.swap import Swap  # noqa: E402

__version__ = "0.1.0"

__all__ = ["Swap", "optimizers", "staleness"]
