"""Clusters of thousands of machines, simulated in virtual time.

What decides who waits, and what is applied when, is the C++ code that decides it on real servers.
"""

from tf_recsync.simulation._calibrate import Calibration, calibrate
from tf_recsync.simulation._click_model import ClickModel
from tf_recsync.simulation._groups import GroupResult
from tf_recsync.simulation._hierarchical import GroupStep
from tf_recsync.simulation._hop import HopResult
from tf_recsync.simulation._learning import LinkUse, LogisticRegression, Loss
from tf_recsync.simulation._result import Evaluation, Result, Times, Utilization
from tf_recsync.simulation._run import run
from tf_recsync.simulation._run_copies import run_hierarchical, run_hop, run_shadow_sync
from tf_recsync.simulation._settings import Network, Server

__all__ = [
    "Calibration",
    "ClickModel",
    "Evaluation",
    "GroupResult",
    "GroupStep",
    "HopResult",
    "LinkUse",
    "LogisticRegression",
    "Loss",
    "Network",
    "Result",
    "Server",
    "Times",
    "Utilization",
    "calibrate",
    "run",
    "run_hierarchical",
    "run_hop",
    "run_shadow_sync",
]
