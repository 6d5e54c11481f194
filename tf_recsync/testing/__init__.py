"""Tools with which a few cores can stand for many machines."""

from tf_recsync.testing.compute_time import set_compute_time

__all__ = ["set_compute_time"]
