"""Tools with which a few cores can stand for many machines, some of them slow or failing."""

from tf_recsync.testing.bandwidth import set_bandwidth
from tf_recsync.testing.compute_time import set_compute_time
from tf_recsync.testing.device_speed import Use, device_use, set_device_speed
from tf_recsync.testing.failures import Failure, FailureSchedule
from tf_recsync.testing.slowdown import (
    ChangingSlowdown,
    RandomSlowdown,
    Slowdown,
    SlowWorkers,
)

__all__ = [
    "ChangingSlowdown",
    "Failure",
    "FailureSchedule",
    "RandomSlowdown",
    "SlowWorkers",
    "Slowdown",
    "Use",
    "device_use",
    "set_bandwidth",
    "set_compute_time",
    "set_device_speed",
]
