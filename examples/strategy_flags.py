"""Flags that choose a cluster and a strategy; shared by the examples."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
from collections.abc import Iterator
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
MODES = {
    "hogwild": recsync.modes.Hogwild,
    "async": recsync.modes.Async,
    "sync": recsync.modes.Sync,
    "bsp": recsync.modes.BSP,
    "gba": recsync.modes.GBA,
    "backup_workers": recsync.modes.BackupWorkers,
    "bounded_staleness": recsync.modes.BoundedStaleness,
}
COMPRESSIONS = {
    "none": None,
    "bfloat16": recsync.Compression(activations="bfloat16", gradients="bfloat16"),
    "int8": recsync.Compression(activations="int8", gradients="bfloat16"),
}
# In the background, and in the foreground.
SHADOW = ["shadow_easgd", "shadow_ma", "shadow_bmuf"]
FOREGROUND = ["fr_easgd", "fr_ma", "fr_bmuf"]
SHADOW_SYNC = [*SHADOW, *FOREGROUND]
WITH_SYNC_PS = ["shadow_easgd", "fr_easgd"]
WITH_COPIES = [*SHADOW_SYNC, "hierarchical"]  # That are synchronized.
CLUSTER_STRATEGIES = [*STRATEGIES, "hop", *WITH_COPIES]
TOPOLOGIES = {
    name: getattr(recsync.topology, name)
    for name in ("ring", "ring_based", "double_ring", "complete", "star", "exponential")
}
flags.DEFINE_enum("strategy", "async", ["local", *CLUSTER_STRATEGIES], "How to train.")
flags.DEFINE_integer("workers", 2, "Workers of the local cluster.", lower_bound=1)
flags.DEFINE_integer(
    "ps",
    1,
    "Parameter servers of the local cluster; shadow_*, fr_*, hop: the embedding PSs, of which hop "
    "has none by default: workers have copies of the tables then; hierarchical: those of the "
    "groups, then the embedding PSs, and the sync PSs.",
    lower_bound=1,
)
flags.DEFINE_integer(
    "readers",
    0,
    "Processes of the local cluster that run the input pipeline; 0: this process does.",
    lower_bound=0,
)
flags.DEFINE_enum(
    "transport",
    "recsync",
    ["recsync", "grpc"],
    "How servers of the local cluster fetch tensors from each other; see docs/cluster.md.",
)
flags.DEFINE_integer("batch_size", 128, "Examples per step of a worker.", lower_bound=1)
flags.DEFINE_string("metrics_json", None, "Gets the figures that the program ends with.")
flags.DEFINE_integer(
    "global_batch_size",
    None,
    "sync, bsp, gba: examples that are applied together. sync's default: a batch of each worker.",
    lower_bound=1,
)
flags.DEFINE_integer(
    "staleness_tolerance",
    None,
    "gba: the largest age of a gradient that counts, in global steps. Default: 4.",
    lower_bound=0,
)
flags.DEFINE_integer(
    "backup_workers",
    None,
    "backup_workers, hop: how many are not waited for. Default: 1; hop: 0.",
    lower_bound=0,
)
flags.DEFINE_integer(
    "staleness_bound",
    None,
    "bounded_staleness: steps ahead of the slowest worker, 2 by default. hop: of how many "
    "iterations ago a neighbor's parameters may be; by default of none.",
    lower_bound=0,
)
flags.DEFINE_enum(
    "topology", "ring_based", [*TOPOLOGIES], "hop, also between groups: who sends to whom."
)
flags.DEFINE_integer(
    "max_iteration_gap",
    5,
    "hop, also between groups: iterations ahead of a neighbor; 0: no token queues.",
    lower_bound=0,
)
flags.DEFINE_integer(
    "max_jump", 1, "hop: iterations that a slow worker goes forward at a time.", lower_bound=1
)
flags.DEFINE_integer(
    "jump_trigger", 0, "hop: a worker jumps if further behind than this.", lower_bound=0
)
flags.DEFINE_enum(
    "order", "parallel", ["parallel", "serial"], "hop: send while computing, or after."
)
flags.DEFINE_enum(
    "protocol", "token_queue", ["token_queue", "notify_ack"], "hop: what bounds the gap."
)
flags.DEFINE_integer("groups", 2, "hierarchical: how many groups there are.", lower_bound=1)
flags.DEFINE_integer(
    "trainers_per_group", 1, "hierarchical: how many of the workers.", lower_bound=1
)
flags.DEFINE_integer(
    "ps_per_group", 1, "hierarchical: parameter servers of each group.", lower_bound=1
)
flags.DEFINE_integer(
    "nets_per_trainer", 1, "hierarchical: nets that each trainer trains at a time.", lower_bound=1
)
flags.DEFINE_string(
    "placement",
    "trainers",
    "hierarchical: whether dense layers run on the trainers, or (auto) where a search finds it "
    "best; or the file of an OperatorPlan.",
)
flags.DEFINE_enum(
    "compression",
    "none",
    [*COMPRESSIONS],
    "hierarchical with --placement: how activations travel to layers on servers; unless it is none "
    "their gradients travel as bfloat16.",
)
flags.DEFINE_enum(
    "aggregation",
    "hogwild",
    [*MODES],
    "hierarchical: the mode inside a group, with the flags of the strategy of that name.",
)
flags.DEFINE_enum(
    "algorithm",
    "easgd",
    ["easgd", "ma", "bmuf", "hop"],
    "hierarchical: how groups are synchronized.",
)
flags.DEFINE_integer(
    "updates_per_iteration",
    1,
    "Hop between groups: an exchange after so many updates of a group.",
    lower_bound=1,
)
flags.DEFINE_integer(
    "backup_groups", 0, "Hop between groups: how many neighbors are not waited for.", lower_bound=0
)
flags.DEFINE_float("alpha", 0.3, "shadow_*, fr_*, hierarchical: the elastic parameter, in (0, 1].")
flags.DEFINE_float("eta", 1.0, "BMUF: the step size of the global parameters.")
flags.DEFINE_integer(
    "sync_gap", None, "fr_*: a synchronization after so many steps of a thread.", lower_bound=1
)
flags.DEFINE_float(
    "sync_per_minute",
    None,
    "fr_*: or so many a minute. Default: a gap of 5 for fr_easgd, 1 a minute for the others.",
)
flags.DEFINE_integer(
    "sync_ps",
    1,
    "EASGD: servers for the central copy; with TF_CONFIG, and in groups, the last ones.",
    lower_bound=1,
)
flags.DEFINE_integer(
    "threads", 1, "shadow_*, fr_*: threads that train a worker's copy.", lower_bound=1
)
flags.DEFINE_float(
    "compute_seconds", None, "On a cluster: artificial compute time per step.", lower_bound=0
)
flags.DEFINE_integer("slow_workers", 0, "How many workers are slow.", lower_bound=0)
flags.DEFINE_float("slow_factor", 4.0, "How many times the compute time of slow workers is.")
flags.DEFINE_string(
    "bind_address", None, "With TF_CONFIG: the address that this process's own servers listen on."
)
flags.DEFINE_float(
    "connect_seconds", 60.0, "With TF_CONFIG: for how long servers are waited for.", lower_bound=0.1
)
flags.DEFINE_integer(
    "min_workers",
    None,
    "With TF_CONFIG: how many workers suffice after that; the others take part when they are up. "
    "Default: all.",
    lower_bound=1,
)

# Flags that mean nothing unless another flag has one of some values.
APPLIES: dict[str, tuple[str, list[Any]]] = {
    "workers": ("strategy", CLUSTER_STRATEGIES),
    "ps": ("strategy", CLUSTER_STRATEGIES),
    "readers": ("strategy", CLUSTER_STRATEGIES),
    "transport": ("strategy", CLUSTER_STRATEGIES),
    "groups": ("strategy", ["hierarchical"]),
    "trainers_per_group": ("strategy", ["hierarchical"]),
    "ps_per_group": ("strategy", ["hierarchical"]),
    "nets_per_trainer": ("strategy", ["hierarchical"]),
    "placement": ("strategy", ["hierarchical"]),
    "compression": ("strategy", ["hierarchical"]),
    "aggregation": ("strategy", ["hierarchical"]),
    "algorithm": ("strategy", ["hierarchical"]),
    "updates_per_iteration": ("strategy", ["hierarchical"]),
    "backup_groups": ("strategy", ["hierarchical"]),
    "alpha": ("strategy", WITH_COPIES),
    "eta": ("strategy", ["shadow_bmuf", "fr_bmuf", "hierarchical"]),
    "sync_gap": ("strategy", FOREGROUND),
    "sync_per_minute": ("strategy", FOREGROUND),
    "sync_ps": ("strategy", [*WITH_SYNC_PS, "hierarchical"]),
    "threads": ("strategy", SHADOW_SYNC),
    "compute_seconds": ("strategy", CLUSTER_STRATEGIES),
    "slow_workers": ("strategy", CLUSTER_STRATEGIES),
    "slow_factor": ("strategy", CLUSTER_STRATEGIES),
    "global_batch_size": ("strategy", ["sync", "bsp", "gba", "hierarchical"]),
    "staleness_tolerance": ("strategy", ["gba", "hierarchical"]),
    "backup_workers": ("strategy", ["backup_workers", "hop", "hierarchical"]),
    "staleness_bound": ("strategy", ["bounded_staleness", "hop", "hierarchical"]),
    "topology": ("strategy", ["hop", "hierarchical"]),
    "max_iteration_gap": ("protocol", ["token_queue"]),
    "max_jump": ("strategy", ["hop"]),
    "jump_trigger": ("strategy", ["hop"]),
    "order": ("strategy", ["hop"]),
    "protocol": ("strategy", ["hop"]),
}
# Of programs whose models have no tables that servers could hold.
WITHOUT_TABLES = {"ps": ("strategy", [*STRATEGIES, *WITH_COPIES])}
# The defaults of flags that have others elsewhere.
_DEFAULTS = {"backup_workers": 1, "staleness_bound": 2}
# Those of them that are arguments of modes.
_OPTIONS = ("global_batch_size", "staleness_tolerance", "backup_workers", "staleness_bound")
# In groups.
_APPLIES_IN_GROUPS: dict[str, tuple[str, list[Any]]] = {
    **{n: ("aggregation", [m for m in APPLIES[n][1] if m in MODES]) for n in _OPTIONS},
    "eta": ("algorithm", ["bmuf"]),
    "sync_ps": ("algorithm", ["easgd"]),
    "alpha": ("algorithm", ["easgd", "ma", "bmuf"]),
    **{
        name: ("algorithm", ["hop"])
        for name in ("topology", "max_iteration_gap", "updates_per_iteration", "backup_groups")
    },
}


def check_flags(applies: dict[str, tuple[str, list[Any]]]) -> None:
    """Refuses flags that would be ignored, that lack another one, or fail after training."""
    check_applies({**APPLIES, **applies})
    if FLAGS.strategy == "hierarchical":
        check_applies(_APPLIES_IN_GROUPS)
        if COMPRESSIONS[FLAGS.compression] is not None and FLAGS.placement == "trainers":
            raise app.UsageError(
                f"--compression={FLAGS.compression} needs --placement=auto, or the file of an "
                "OperatorPlan"
            )
    if FLAGS["max_iteration_gap"].present and FLAGS.strategy not in ("hop", "hierarchical"):
        raise app.UsageError("--max_iteration_gap applies only with --strategy=hop or hierarchical")
    if FLAGS["jump_trigger"].present and FLAGS.max_jump == 1:
        raise app.UsageError("--jump_trigger applies only with --max_jump")
    if _mode() in ("bsp", "gba") and FLAGS.global_batch_size is None:
        flag = "strategy" if FLAGS.strategy in STRATEGIES else "aggregation"
        raise app.UsageError(f"--{flag}={_mode()} needs --global_batch_size")
    if FLAGS.sync_gap is not None and FLAGS.sync_per_minute is not None:
        raise app.UsageError("--sync_gap and --sync_per_minute exclude each other")
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
        for name in ("workers", "ps", "readers", "transport"):
            if FLAGS[name].present:
                raise app.UsageError(f"--{name} is the servers' affair with TF_CONFIG set")
    else:
        for name in ("bind_address", "connect_seconds", "min_workers"):
            if FLAGS[name].present:
                raise app.UsageError(f"--{name} applies only with TF_CONFIG set")
    with usage_errors():
        _slowdown(FLAGS.workers)
        if FLAGS.strategy in WITH_COPIES:
            _algorithm()
            _schedule()
        # With TF_CONFIG only the cluster tells how many workers there are.
        in_groups = FLAGS.strategy == "hierarchical"
        if in_groups:
            _placement()
        if in_groups or (FLAGS.strategy in STRATEGIES and "TF_CONFIG" not in os.environ):
            workers = FLAGS.trainers_per_group if in_groups else FLAGS.workers
            MODES[_mode()](**_mode_options()).on(workers)
        if FLAGS.strategy == "hop" and "TF_CONFIG" not in os.environ:
            TOPOLOGIES[FLAGS.topology](FLAGS.workers)
    if FLAGS.metrics_json:
        _check_can_be_written("metrics_json", "file")


def check_applies(applies: dict[str, tuple[str, list[Any]]]) -> None:
    """Refuses flags that mean nothing unless another flag has one of some values."""
    for name, (other, values) in applies.items():
        if FLAGS[name].present and FLAGS[other].value not in values:
            raise app.UsageError(
                f"--{name} applies only with --{other}={' or '.join(values)}, "
                f"not with --{other}={FLAGS[other].value}"
            )


def prepare_output_dir() -> None:
    """Makes the folder of --output_dir, if there is one; refuses it if it can't be used."""
    if not FLAGS.output_dir:
        return
    if importlib.util.find_spec("tensorboard") is None:
        raise app.UsageError(
            "--output_dir needs the package tensorboard, for its logs: "
            "pip install 'tf_recsync[tensorboard]'"
        )
    with contextlib.suppress(OSError):
        os.makedirs(FLAGS.output_dir, exist_ok=True)
    _check_can_be_written("output_dir", "folder")


def _check_can_be_written(name: str, kind: str) -> None:
    """Refuses a flag that does not name a "file" or a "folder" that this process can write."""
    path = FLAGS[name].value
    written = path if os.path.exists(path) else os.path.dirname(path) or "."
    if os.path.isdir(path) != (kind == "folder") or not os.access(written, os.W_OK):
        raise app.UsageError(f"--{name}={path} must be a {kind} that this program can write")


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Inside, what the package refuses is an error of the command line."""
    try:
        yield
    except ValueError as error:
        raise app.UsageError(str(error)) from error


def _mode() -> str:
    """The mode inside a group: of all workers, if there are no others."""
    return FLAGS.aggregation if FLAGS.strategy == "hierarchical" else FLAGS.strategy


def _mode_options() -> dict[str, Any]:
    """What the mode depends on."""
    options = {
        name: _DEFAULTS.get(name) if FLAGS[name].value is None else FLAGS[name].value
        for name in _OPTIONS
        if _mode() in APPLIES[name][1]
    }
    return {**options, "local_batch_size": FLAGS.batch_size}


def _slowdown(workers: int) -> recsync.testing.Slowdown | None:
    """The slow ones of so many workers: the last."""
    if not FLAGS.slow_workers:
        return None
    slow = range(max(workers - FLAGS.slow_workers, 0), workers)
    return recsync.testing.SlowWorkers(FLAGS.slow_factor, slow)


def make_strategy(stack: contextlib.ExitStack) -> Any:
    """The strategy that the flags name, None for `local`; its cluster ends with `stack`."""
    if FLAGS.strategy == "local":
        return None
    if "TF_CONFIG" in os.environ:
        cluster = recsync.cluster_from_tf_config(bind_address=FLAGS.bind_address)
        stack.enter_context(cluster)
        with usage_errors():
            cluster.connect(FLAGS.connect_seconds, min_workers=FLAGS.min_workers)
    else:
        ps = 0 if FLAGS.strategy == "hop" and not FLAGS["ps"].present else FLAGS.ps
        ps += FLAGS.sync_ps if FLAGS.strategy in WITH_SYNC_PS else 0
        cluster = recsync.LocalCluster(
            workers=FLAGS.workers, ps=ps, readers=FLAGS.readers, transport=FLAGS.transport
        )
        stack.enter_context(cluster)
    if FLAGS.strategy == "hop":
        strategy = _make_hop(cluster)
    elif FLAGS.strategy in SHADOW_SYNC:
        with usage_errors():
            strategy = recsync.ShadowSyncStrategy(
                cluster,
                _algorithm(),
                mode=_schedule(),
                threads_per_trainer=FLAGS.threads,
                sync_ps=FLAGS.sync_ps if FLAGS.strategy in WITH_SYNC_PS else 0,
                local_batch_size=FLAGS.batch_size,
            )
    elif FLAGS.strategy == "hierarchical":
        with usage_errors():
            strategy = recsync.HierarchicalStrategy(
                cluster,
                _algorithm(),
                groups=FLAGS.groups,
                trainers_per_group=FLAGS.trainers_per_group,
                ps_per_group=FLAGS.ps_per_group,
                nets_per_trainer=FLAGS.nets_per_trainer,
                aggregation=MODES[FLAGS.aggregation](**_mode_options()),
                mode=_schedule(),
                sync_ps=FLAGS.sync_ps if FLAGS.algorithm == "easgd" else 0,
                placement=_placement(),
                compression=COMPRESSIONS[FLAGS.compression],
            )
    else:
        with usage_errors():
            strategy = STRATEGIES[FLAGS.strategy](cluster, **_mode_options())
    slowdown = _slowdown(cluster.workers)
    recsync.testing.set_compute_time(strategy, FLAGS.compute_seconds, slowdown)
    return strategy


def _placement() -> Any:
    """Where layers run."""
    if FLAGS.placement in ("trainers", "auto"):
        return FLAGS.placement
    try:
        return recsync.OperatorPlan.load(FLAGS.placement)
    except OSError as error:
        raise ValueError(
            f'--placement must be "trainers", "auto" or the file of an OperatorPlan: {error}'
        ) from error


def _make_hop(cluster: recsync.Cluster) -> recsync.HopStrategy:
    gap = FLAGS.max_iteration_gap or None
    skip = recsync.Skip(FLAGS.max_jump, FLAGS.jump_trigger) if FLAGS.max_jump > 1 else None
    with usage_errors():
        return recsync.HopStrategy(
            cluster,
            TOPOLOGIES[FLAGS.topology](cluster.workers),
            max_iteration_gap=gap if FLAGS.protocol == "token_queue" else None,
            backup_workers=FLAGS.backup_workers or 0,
            staleness_bound=FLAGS.staleness_bound,
            skip=skip,
            order=FLAGS.order,
            protocol=FLAGS.protocol,
        )


def _kind() -> str:
    """The name of the algorithm that keeps copies together."""
    return FLAGS.strategy.partition("_")[2] or FLAGS.algorithm


def _algorithm() -> recsync.Algorithm | recsync.Hop:
    """How copies are synchronized."""
    if _kind() == "hop":
        return recsync.Hop(
            TOPOLOGIES[FLAGS.topology](FLAGS.groups),
            updates_per_iteration=FLAGS.updates_per_iteration,
            max_iteration_gap=FLAGS.max_iteration_gap or None,
            backup_workers=FLAGS.backup_groups,
        )
    if _kind() == "easgd":
        return recsync.EASGD(FLAGS.alpha)
    if _kind() == "ma":
        return recsync.ModelAveraging(FLAGS.alpha)
    return recsync.BMUF(FLAGS.alpha, FLAGS.eta)


def _schedule() -> recsync.Shadow | recsync.Foreground:
    """When copies are synchronized."""
    if FLAGS.strategy not in FOREGROUND:
        return recsync.Shadow()
    if FLAGS.sync_gap is None and FLAGS.sync_per_minute is None:
        return recsync.Foreground(**({"gap": 5} if _kind() == "easgd" else {"per_minute": 1}))
    return recsync.Foreground(gap=FLAGS.sync_gap, per_minute=FLAGS.sync_per_minute)


def shadow_figures(
    strategy: recsync.ShadowSyncStrategy | recsync.HierarchicalStrategy, model: Any
) -> dict[str, Any]:
    """What synchronization has done, for a report."""
    report = strategy.sync_report(model)
    return {
        "syncs": report.syncs,
        "syncs_per_second": report.syncs_per_second,
        "average_sync_gap": strategy.average_sync_gap(model),
        "average_sync_gap_by_bytes": strategy.average_sync_gap(model, by="bytes"),
        "sync_ps_bytes": report.sync_ps_bytes,
    }


def describe_shadow(figures: dict[str, Any]) -> str:
    """Those figures, for people."""
    if not any(figures["syncs"]):
        return (
            "  synchronizations         none: training ended before the first one was due; each "
            "trainer, or group of them, has parameters of its own"
        )
    return (
        f"  synchronizations         {min(figures['syncs']):,} to {max(figures['syncs']):,} for "
        f"each copy, {figures['syncs_per_second']:.1f} per second; average sync gap "
        f"{figures['average_sync_gap']:.1f} steps"
    )


def hop_figures(workers: list[Any]) -> dict[str, Any]:
    """What the workers did, for a report."""
    return {
        "iterations": [worker.iteration + 1 for worker in workers],
        "waiting_seconds_mean": sum(w.waited_for_updates + w.waited_for_tokens for w in workers)
        / len(workers),
        "updates_used": sum(worker.updates_used for worker in workers),
        "stale_updates_dropped": sum(worker.stale_updates_dropped for worker in workers),
        "sends_saved": sum(worker.sends_saved for worker in workers),
        "jumps": sum(worker.jumps for worker in workers),
        "iterations_skipped": sum(worker.iterations_skipped for worker in workers),
    }


def describe_hop(figures: dict[str, Any]) -> str:
    """Those figures, for people."""
    iterations = figures["iterations"]
    return (
        f"  iterations               {min(iterations):,} to {max(iterations):,} a worker, "
        f"{figures['iterations_skipped']:,} skipped in {figures['jumps']:,} jumps; "
        f"waited {figures['waiting_seconds_mean']:.1f} s on average\n"
        f"  updates                  {figures['updates_used']:,} used, "
        f"{figures['stale_updates_dropped']:,} too late, {figures['sends_saved']:,} not sent"
    )


def write_figures(figures: dict[str, Any]) -> None:
    """Writes a program's figures to --metrics_json, if that is given."""
    if FLAGS.metrics_json:
        with open(FLAGS.metrics_json, "w") as file:
            json.dump(_finite(figures), file, indent=2, allow_nan=False)
            file.write("\n")


def _finite(value: Any) -> Any:
    """The same with None for what is no finite number, which JSON does not know."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
