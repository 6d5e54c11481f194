"""What TensorFlow's gRPC reads from a process's environment when the process starts a server."""

from __future__ import annotations

import os


def apply() -> None:
    """Sets it for servers of tasks, and for the one by which this process calls them.

    A call fails at once when the server that it goes to is gone. And the answers to a server's
    calls come by four queues, each with a thread, instead of 64: a server calls few others, about
    once a step, and tensors come over the transport's connections. Whoever has set the number of
    queues keeps it.
    """
    os.environ["GRPC_FAIL_FAST"] = "True"
    os.environ.setdefault("TF_GRPC_WORKER_CACHE_QUEUES", "4")
