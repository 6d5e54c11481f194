"""Flags that choose a cluster and a strategy; shared by the examples."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from absl import app, flags

import tf_recsync as recsync

FLAGS = flags.FLAGS
STRATEGIES = {
    "async": recsync.AsyncStrategy,
    "sync": recsync.SyncStrategy,
    "bsp": recsync.BSPStrategy,
    "gba": recsync.GBAStrategy,
    "backup_workers": recsync.BackupWorkersStrategy,
    "bounded_staleness": recsync.BoundedStalenessStrategy,
}
flags.DEFINE_enum("strategy", "async", ["local", *STRATEGIES], "How to train.")
flags.DEFINE_integer("workers", 2, "Workers of the local cluster.", lower_bound=1)
flags.DEFINE_integer("ps", 1, "Parameter servers of the local cluster.", lower_bound=1)
flags.DEFINE_integer("batch_size", 128, "Examples per step of a worker.", lower_bound=1)
flags.DEFINE_integer(
    "global_batch_size",
    None,
    "sync, bsp, gba: examples that are applied together. sync's default: a batch of each worker.",
    lower_bound=1,
)
flags.DEFINE_integer(
    "staleness_tolerance",
    None,
    "gba: the largest age of a gradient that counts, in global steps.",
    lower_bound=0,
)
flags.DEFINE_integer(
    "backup_workers", 1, "backup_workers: how many are not waited for.", lower_bound=0
)
flags.DEFINE_integer(
    "staleness_bound", 2, "bounded_staleness: steps ahead of the slowest worker.", lower_bound=0
)
flags.DEFINE_float("compute_seconds", None, "On a cluster: artificial compute time per step.")
flags.DEFINE_integer("slow_workers", 0, "How many workers are slow.", lower_bound=0)
flags.DEFINE_float("slow_factor", 4.0, "How many times the compute time of slow workers is.")
flags.DEFINE_string(
    "bind_address", None, "With TF_CONFIG: the address that this process's own servers listen on."
)

# Flags that mean nothing unless another flag has one of some values.
APPLIES: dict[str, tuple[str, list[Any]]] = {
    "workers": ("strategy", [*STRATEGIES]),
    "ps": ("strategy", [*STRATEGIES]),
    "compute_seconds": ("strategy", [*STRATEGIES]),
    "slow_workers": ("strategy", [*STRATEGIES]),
    "slow_factor": ("strategy", [*STRATEGIES]),
    "global_batch_size": ("strategy", ["sync", "bsp", "gba"]),
    "staleness_tolerance": ("strategy", ["gba"]),
    "backup_workers": ("strategy", ["backup_workers"]),
    "staleness_bound": ("strategy", ["bounded_staleness"]),
}
# Those of them that are arguments of strategies.
_OPTIONS = ("global_batch_size", "staleness_tolerance", "backup_workers", "staleness_bound")


def check_flags(applies: dict[str, tuple[str, list[Any]]]) -> None:
    """Refuses flags that would be ignored, and those that lack another one."""
    for name, (other, values) in {**APPLIES, **applies}.items():
        if FLAGS[name].present and FLAGS[other].value not in values:
            raise app.UsageError(
                f"--{name} applies only with --{other}={' or '.join(values)}, "
                f"not with --{other}={FLAGS[other].value}"
            )
    for strategy, name in (
        ("bsp", "global_batch_size"),
        ("gba", "global_batch_size"),
        ("gba", "staleness_tolerance"),
    ):
        if FLAGS.strategy == strategy and FLAGS[name].value is None:
            raise app.UsageError(f"--strategy={strategy} needs --{name}")
    if FLAGS.slow_workers > FLAGS.workers and "TF_CONFIG" not in os.environ:
        raise app.UsageError(
            f"--slow_workers must be at most --workers={FLAGS.workers}, not {FLAGS.slow_workers}"
        )
    if (FLAGS.slow_workers or FLAGS["slow_factor"].present) and not FLAGS.compute_seconds:
        raise app.UsageError("--slow_workers and --slow_factor need --compute_seconds")
    if FLAGS["slow_factor"].present and not FLAGS.slow_workers:
        raise app.UsageError("--slow_factor needs --slow_workers")
    if "TF_CONFIG" in os.environ:
        if FLAGS.strategy == "local":
            raise app.UsageError("--strategy=local can't be used with TF_CONFIG set")
        for name in ("workers", "ps"):
            if FLAGS[name].present:
                raise app.UsageError(f"--{name} can't be used with TF_CONFIG, which names them")
    elif FLAGS.bind_address:
        raise app.UsageError("--bind_address applies only with TF_CONFIG set")


def make_strategy(stack: contextlib.ExitStack) -> Any:
    """The strategy that the flags name, None for `local`; its cluster ends with `stack`."""
    if FLAGS.strategy == "local":
        return None
    if "TF_CONFIG" in os.environ:
        cluster = recsync.cluster_from_tf_config(bind_address=FLAGS.bind_address)
    else:
        cluster = recsync.LocalCluster(workers=FLAGS.workers, ps=FLAGS.ps)
    stack.enter_context(cluster)
    options = {name: FLAGS[name].value for name in _OPTIONS if FLAGS.strategy in APPLIES[name][1]}
    strategy = STRATEGIES[FLAGS.strategy](cluster, local_batch_size=FLAGS.batch_size, **options)
    slowdown = None
    if FLAGS.slow_workers:
        slow = range(cluster.workers - FLAGS.slow_workers, cluster.workers)
        slowdown = recsync.testing.SlowWorkers(FLAGS.slow_factor, slow)
    recsync.testing.set_compute_time(strategy, FLAGS.compute_seconds, slowdown)
    return strategy
