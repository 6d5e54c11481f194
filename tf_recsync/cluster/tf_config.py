"""Reads and checks the `TF_CONFIG` environment variable."""

import dataclasses
import ipaddress
import json
from collections.abc import Mapping

_JOBS = ("chief", "worker", "ps", "reader")
CHIEF = "chief"  # The coordinator.
READER = "reader"  # Serves data; no TensorFlow server, so it is no device.


@dataclasses.dataclass(frozen=True)
class TFConfig:
    """What `TF_CONFIG` says: the cluster, and which task of it this process is.

    Attributes:
      cluster: Addresses, "host:port", of the tasks of each job.
      task_type: The job of this process.
      task_index: Its index in that job.
    """

    cluster: dict[str, list[str]]
    task_type: str
    task_index: int

    @property
    def servers(self) -> dict[str, list[str]]:
        """The addresses of the tasks that run TensorFlow's servers: all but the readers."""
        return {job: addresses for job, addresses in self.cluster.items() if job != READER}

    @property
    def own_address(self) -> str:
        """The address, "host:port", of this process's task."""
        return self.cluster[self.task_type][self.task_index]


def split_address(address: str) -> tuple[str, int]:
    """Splits "host:port" or "[ipv6]:port".

    Args:
      address: The address.

    Returns:
      The host, without brackets, and the port.

    Raises:
      ValueError: `address` has no host, or no port from 1 to 65535.

    Example:
      >>> split_address("[::1]:4711")
      ('::1', 4711)
    """
    host, separator, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ValueError(
            f'address must be "host:port" with a port from 1 to 65535, got {address!r}'
        )
    return host, int(port)


def parse_tf_config(
    environ: Mapping[str, str],
    *,
    job_name: str | None = None,
    task_index: int | None = None,
) -> TFConfig:
    """Reads `TF_CONFIG`.

    Args:
      environ: Where the variable is, say `os.environ`.
      job_name: Overrides the task's type in the variable; default None.
      task_index: Overrides the task's index in the variable; default None.

    Returns:
      The checked configuration. The job "evaluator" is left out of the cluster.

    Raises:
      ValueError: The variable is missing, is no JSON, describes no cluster with the
        task in it, or has one address for two tasks.

    Example:
      >>> parse_tf_config({"TF_CONFIG": '{"cluster": {"worker": ["10.0.0.1:4711"]}, '
      ...                               '"task": {"type": "worker", "index": 0}}'})
      TFConfig(cluster={'worker': ['10.0.0.1:4711']}, task_type='worker', task_index=0)
    """
    text = environ.get("TF_CONFIG", "")
    if not text.strip():
        raise ValueError(
            "the environment variable TF_CONFIG must be set to JSON like "
            '{"cluster": {"chief": ["host:port"], "worker": ["host:port", ...], '
            '"ps": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}'
        )
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"TF_CONFIG must be JSON ({error}), got {text!r}") from error
    if not isinstance(config, dict):
        raise ValueError(f"TF_CONFIG must be a JSON object, got {text!r}")
    cluster = _parse_cluster(config.get("cluster"))

    task = config.get("task", {})
    if not isinstance(task, dict):
        raise ValueError(f'"task" in TF_CONFIG must be an object, got {task!r}')
    task_type = job_name if job_name is not None else task.get("type")
    if task_type not in cluster:
        raise ValueError(
            f'the task\'s type in TF_CONFIG must be a job of its "cluster", '
            f"one of {sorted(cluster)}, got {task_type!r}"
        )
    index = task_index if task_index is not None else task.get("index")
    if isinstance(index, str) and index.isdecimal():  # Some launchers quote it.
        index = int(index)
    size = len(cluster[task_type])
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < size:
        raise ValueError(
            f"the task's index in TF_CONFIG must be an integer from 0 to {size - 1} "
            f"for job {task_type!r}, got {index!r}"
        )
    return TFConfig(cluster, task_type, index)


def _parse_cluster(cluster: object) -> dict[str, list[str]]:
    if not isinstance(cluster, dict) or not cluster:
        raise ValueError(
            f'"cluster" in TF_CONFIG must be an object with the jobs {_JOBS}, got {cluster!r}'
        )
    result = {}
    tasks: dict[tuple[str, int], str] = {}  # By their addresses.
    for job, addresses in cluster.items():
        if job == "evaluator":  # Not a part of the training cluster.
            continue
        if job not in _JOBS:
            raise ValueError(
                f'the jobs of "cluster" in TF_CONFIG must be among {_JOBS}, got {job!r}'
            )
        if not isinstance(addresses, list) or not all(isinstance(a, str) for a in addresses):
            raise ValueError(
                f'job {job!r} in TF_CONFIG must be a list of "host:port", got {addresses!r}'
            )
        for index, address in enumerate(addresses):
            try:
                parts = split_address(address)
            except ValueError as error:
                raise ValueError(f"job {job!r} in TF_CONFIG: {error}") from error
            if parts in tasks:
                raise ValueError(
                    f"each task in TF_CONFIG must have an address of its own, but {address!r} is "
                    f"that of {tasks[parts]} and {job}:{index}"
                )
            tasks[parts] = f"{job}:{index}"
        if addresses:
            result[job] = list(addresses)
    return result


def loopback_address(address: str) -> str | None:
    """The numeric loopback address that a task's address names, if it names one.

    Args:
      address: "host:port" of the task.

    Returns:
      The host if it is a numeric loopback address, "127.0.0.1" for "localhost", None
      for all others.

    Example:
      >>> loopback_address("127.0.0.1:4711"), loopback_address("10.0.0.1:4711")
      ('127.0.0.1', None)
    """
    host, _ = split_address(address)
    if host == "localhost":
        return "127.0.0.1"
    try:
        return host if ipaddress.ip_address(host).is_loopback else None
    except ValueError:  # A name.
        return None
