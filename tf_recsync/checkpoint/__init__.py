"""Checkpoints of any size: servers write and read the rows of tables that they hold.

`tf_recsync.callbacks.Checkpoint` saves one again and again while `fit` runs.
"""

from tf_recsync.checkpoint.callback import latest_checkpoint as latest
from tf_recsync.checkpoint.restoring import restore
from tf_recsync.checkpoint.saved import Saved, open
from tf_recsync.checkpoint.saving import save

__all__ = ["Saved", "latest", "open", "restore", "save"]
