"""Clusters of thousands of machines, simulated in virtual time.

What decides who waits, and what is applied when, is the C++ code that decides it on real servers.
"""

from tf_recsync.simulation._click_model import ClickModel
from tf_recsync.simulation._result import Evaluation, Result, Times, Utilization
from tf_recsync.simulation._run import run
from tf_recsync.simulation._settings import Network, Server

__all__ = [
    "ClickModel",
    "Evaluation",
    "Network",
    "Result",
    "Server",
    "Times",
    "Utilization",
    "run",
]
