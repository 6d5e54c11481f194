"""The arguments of `python -m tf_recsync.simulate` where copies of the parameters are trained."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable
from typing import Any

from tf_recsync import topology
from tf_recsync.simulation._command_line import (
    add_time,
    given,
    read_as,
    refuse_others,
    slowdown_of,
)
from tf_recsync.simulation._groups import GroupResult
from tf_recsync.simulation._hierarchical import GroupStep
from tf_recsync.simulation._hop import HopResult
from tf_recsync.simulation._learning import LogisticRegression
from tf_recsync.simulation._run_copies import run_hierarchical, run_hop, run_shadow_sync
from tf_recsync.simulation._settings import Network
from tf_recsync.synchronization.hop_protocol import Skip
from tf_recsync.synchronization.shadow_algorithms import BMUF, EASGD, Algorithm, ModelAveraging
from tf_recsync.synchronization.shadow_schedule import Foreground, Shadow

_GRAPHS: dict[str, Callable[..., topology.Topology]] = {
    "ring": topology.ring,
    "ring_based": topology.ring_based,
    "double_ring": topology.double_ring,
    "complete": topology.complete,
    "star": topology.star,
    "exponential": topology.exponential,
    "grid": topology.grid,
    "hierarchical": lambda *machines: topology.hierarchical(machines),
}
_NUMBERS_OF_GRAPHS = {"grid": 2, "hierarchical": None}  # All others have one.

# What each algorithm takes.
_ALGORITHMS: dict[str, tuple[type[Algorithm] | None, tuple[str, ...]]] = {
    "easgd": (EASGD, ("alpha", "sync_ps")),
    "model_averaging": (ModelAveraging, ("alpha",)),
    "bmuf": (BMUF, ("alpha", "eta", "momentum", "nesterov")),
    "none": (None, ()),
}
_OF_MODELS = ("features", "examples", "learning_rate", "weight_decay")

HOP_USAGE = "--topology=NAME:N --compute_seconds=S --steps=N"
SHADOW_USAGE = "--trainers=N --parameter_bytes=N --bandwidth=B --compute_seconds=S --steps=N"
HIERARCHICAL_USAGE = (
    "--groups=N --trainers_per_group=N --parameter_bytes=N --trainer_flop=N --ps_flop=N,N "
    "--trainer_flops=N --ps_flops=N --bandwidth=B --steps=N"
)


@read_as("topology", "ring:16, grid:4,4 or hierarchical:3,3,2")
def _topology(text: str) -> topology.Topology:
    name, _, numbers = text.partition(":")
    if name not in _GRAPHS:
        raise ValueError(f"the graphs are {', '.join(_GRAPHS)}")
    sizes = [int(number) for number in numbers.split(",")]
    count = _NUMBERS_OF_GRAPHS.get(name, 1)
    if count not in (None, len(sizes)):
        raise ValueError(f"{name} takes {count} numbers, not {len(sizes)}")
    return _GRAPHS[name](*sizes)


@read_as("compute_seconds", "0.5, or 0.5,0.5,2 with one for each")
def _each_seconds(text: str) -> float | list[float]:
    numbers = [float(number) for number in text.split(",")]
    return numbers[0] if len(numbers) == 1 else numbers


@read_as("backup_workers", "1, or 1,0,1 with one for each")
def _each_count(text: str) -> int | list[int]:
    numbers = [int(number) for number in text.split(",")]
    return numbers[0] if len(numbers) == 1 else numbers


@read_as("max_iteration_gap", "5, none or default")
def _gap(text: str) -> int | str | None:
    if text == "none":
        return None
    return text if text == "default" else int(text)


@read_as("ps_flop", "2e9,1e9 with one for each group PS")
def _flop(text: str) -> tuple[float, ...]:
    return tuple(float(number) for number in text.split(","))


@read_as("ps_bytes", "4000,4000 with one for each group PS")
def _bytes(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def add_hop(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `run_hop`."""
    add = parser.add_argument
    add(
        "--topology",
        metavar="NAME:N",
        type=_topology,
        required=True,
        help=f"who sends to whom, and how many workers there are, as ring:16, grid:4,4 or "
        f"hierarchical:3,3,2; one of {', '.join(_GRAPHS)}",
    )
    add("--compute_seconds", type=_each_seconds, required=True, help="that a step computes")
    _add_ends(parser, "workers")
    group = parser.add_argument_group("the protocol, as of HopStrategy").add_argument
    group(
        "--max_iteration_gap",
        type=_gap,
        default="default",
        help="of the token queues, or none; by default that of HopStrategy",
    )
    group("--backup_workers", type=_each_count, default=0, help="not waited for; default 0")
    group("--staleness_bound", type=int, help="iterations; default no bounded staleness")
    group("--max_jump", type=int, help="iterations that slow workers skip; default no skipping")
    group("--order", choices=("parallel", "serial"), default="parallel", help="default parallel")
    group(
        "--protocol",
        choices=("token_queue", "notify_ack"),
        default="token_queue",
        help="default token_queue",
    )
    add_time(parser)
    group = _add_network(parser)
    group("--update_bytes", type=int, default=0, help="of an update to a neighbor; default 0")
    group("--workers_per_machine", type=int, default=1, help="that share its links; default 1")
    group = _add_model(parser)
    group("--momentum", type=float, help="default 0")
    group("--target_loss", type=float, help="at which training ends; default at the steps' end")


def run_hop_of(arguments: argparse.Namespace) -> HopResult:
    """The result of what the arguments say; a ValueError if something is wrong."""
    return run_hop(
        arguments.topology,
        max_iteration_gap=arguments.max_iteration_gap,
        backup_workers=arguments.backup_workers,
        staleness_bound=arguments.staleness_bound,
        skip=None if arguments.max_jump is None else Skip(max_jump=arguments.max_jump),
        order=arguments.order,
        protocol=arguments.protocol,
        compute_seconds=arguments.compute_seconds,
        update_bytes=arguments.update_bytes,
        target_loss=arguments.target_loss,
        record_events=arguments.timeline is not None,
        **_common(
            arguments, _network(arguments, workers_per_machine=arguments.workers_per_machine)
        ),
        model=_model(arguments, "momentum"),
    )


def add_hop_outputs(add: Callable[..., Any]) -> None:
    """Adds what else becomes of Hop's result to its group."""
    add("--timeline", type=pathlib.Path, help="a .json file with what workers do when")


def write_hop(arguments: argparse.Namespace, result: HopResult) -> None:
    """Writes that."""
    if arguments.timeline is not None:
        result.write_timeline(arguments.timeline)


def add_shadow(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `run_shadow_sync`."""
    add = parser.add_argument
    add("--trainers", type=int, required=True, help="each with a copy of the parameters")
    add("--threads_per_trainer", type=int, default=1, help="default 1")
    add(
        "--compute_seconds", type=_each_seconds, required=True, help="that a thread's step computes"
    )
    add("--memory_seconds", type=float, default=0.0, help="of a step, alone; default 0")
    _add_ends(parser, "threads")
    _add_synchronization(parser)
    add_time(parser)
    _add_network(parser)("--server_bandwidth", type=float, help="of sync PSs; default --bandwidth")
    _add_model(parser)


def run_shadow_of(arguments: argparse.Namespace) -> GroupResult:
    """The result of what the arguments say; a ValueError if something is wrong."""
    return run_shadow_sync(
        _algorithm(arguments),
        trainers=arguments.trainers,
        threads_per_trainer=arguments.threads_per_trainer,
        compute_seconds=arguments.compute_seconds,
        memory_seconds=arguments.memory_seconds,
        parameter_bytes=arguments.parameter_bytes,
        mode=_schedule(arguments),
        sync_ps=arguments.sync_ps,
        **_common(arguments, _network(arguments, server_bandwidth=arguments.server_bandwidth)),
        model=_model(arguments),
    )


def add_hierarchical(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `run_hierarchical`."""
    add = parser.add_argument
    add("--groups", type=int, required=True, help="each with a copy of the parameters")
    add("--trainers_per_group", type=int, required=True, help="that share its group PSs")
    add("--nets_per_trainer", type=int, default=1, help="that share its device; default 1")
    add("--trainer_flops", type=float, required=True, help="operations a second, of its nets")
    add("--ps_flops", type=float, required=True, help="operations a second, of a group PS")
    _add_ends(parser, "nets")
    group = parser.add_argument_group("what a step does, as GroupStep").add_argument
    group("--trainer_flop", type=float, required=True, help="operations on the trainer")
    group(
        "--ps_flop",
        metavar="N,N",
        type=_flop,
        required=True,
        help="operations on each group PS; so many there are",
    )
    group("--ps_bytes", metavar="N,N", type=_bytes, help="to and from each; default 0")
    group("--lookup_seconds", type=_each_seconds, default=0.0, help="before all else; default 0")
    _add_synchronization(parser)
    add_time(parser)
    _add_network(parser)("--server_bandwidth", type=float, help="of PSs; default --bandwidth")
    _add_model(parser)


def run_hierarchical_of(arguments: argparse.Namespace) -> GroupResult:
    """The result of what the arguments say; a ValueError if something is wrong."""
    count = arguments.ps_bytes
    step = GroupStep(
        trainer_flop=arguments.trainer_flop,
        ps_flop=arguments.ps_flop,
        ps_bytes=(0,) * len(arguments.ps_flop) if count is None else count,
    )
    return run_hierarchical(
        _algorithm(arguments),
        step,
        groups=arguments.groups,
        trainers_per_group=arguments.trainers_per_group,
        nets_per_trainer=arguments.nets_per_trainer,
        trainer_flops=arguments.trainer_flops,
        ps_flops=arguments.ps_flops,
        lookup_seconds=arguments.lookup_seconds,
        parameter_bytes=arguments.parameter_bytes,
        mode=_schedule(arguments),
        sync_ps=arguments.sync_ps,
        **_common(arguments, _network(arguments, server_bandwidth=arguments.server_bandwidth)),
        model=_model(arguments),
    )


def _add_ends(parser: argparse.ArgumentParser, of: str) -> None:
    add = parser.add_argument
    add("--steps", type=int, help=f"of all {of} together; this or --seconds is needed")
    add("--seconds", type=float, help="of virtual time, after which everything stops")
    add("--seed", type=int, default=0, help="of the noise; default 0")


def _add_synchronization(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how copies are synchronized").add_argument
    group("--parameter_bytes", type=int, required=True, help="of a copy")
    group("--algorithm", choices=_ALGORITHMS, default="easgd", help="default easgd")
    group("--alpha", type=float, help="the elastic parameter; default 0.5")
    group("--eta", type=float, help="of bmuf: the step size; default 1")
    group("--momentum", type=float, help="of bmuf; default 0")
    group("--nesterov", action="store_true", default=None, help="of bmuf, with momentum")
    group("--sync_ps", type=int, help="of easgd; default 1")
    group("--min_interval", type=float, help="seconds between two in the background; default 0")
    group("--gap", type=int, help="in the foreground, after so many steps of each")
    group("--per_minute", type=float, help="in the foreground, so often")


def _add_network(parser: argparse.ArgumentParser) -> Callable[..., Any]:
    group = parser.add_argument_group("the network").add_argument
    group("--bandwidth", type=float, help="of a link, in bytes per second; default no limit")
    group("--latency", type=float, default=0.0, help="of a message, in seconds; default 0")
    return group


def _add_model(parser: argparse.ArgumentParser) -> Callable[..., Any]:
    group = parser.add_argument_group(
        "what is learned, as in recsync.simulation.LogisticRegression; by default nothing"
    ).add_argument
    group("--model", choices=("logistic_regression",), help="of made examples")
    group("--batch_size", type=int, help="of a step, also for examples a second without a model")
    group("--features", type=int, help="inputs; default 32")
    group("--examples", type=int, help="that batches are drawn from; default 4096")
    group("--learning_rate", type=float, help="default 0.1")
    group("--weight_decay", type=float, help="default 0")
    group("--loss_seconds", type=float, default=1.0, help="from look to look at it; default 1")
    return group


def _algorithm(arguments: argparse.Namespace) -> Algorithm | None:
    refuse_others(arguments, "algorithm", {name: had for name, (_, had) in _ALGORITHMS.items()})
    kind, taken = _ALGORITHMS[arguments.algorithm]
    if kind is None:
        return None
    defaults = {"alpha": 0.5, "eta": 1.0}
    options = {name: defaults[name] for name in taken if name in defaults}
    options |= given(arguments, taken)
    options.pop("sync_ps", None)
    return kind(**options)


def _schedule(arguments: argparse.Namespace) -> Shadow | Foreground | str:
    foreground = given(arguments, ("gap", "per_minute"))
    if not foreground:
        interval = arguments.min_interval
        return "shadow" if interval is None else Shadow(min_interval=interval)
    if arguments.min_interval is not None:
        raise ValueError(
            f"--min_interval is of the background, and --{next(iter(foreground))} of the foreground"
        )
    return Foreground(**foreground)


def _model(arguments: argparse.Namespace, *others: str) -> LogisticRegression | None:
    """What is learned; `others` are names of attributes besides those of all strategies."""
    options = given(arguments, (*_OF_MODELS, *others))
    if arguments.model is not None:
        return LogisticRegression(**options, **given(arguments, ("batch_size",)))
    if options:
        raise ValueError(f"--{next(iter(options))} needs --model")
    return None


def _network(arguments: argparse.Namespace, **others: Any) -> Network:
    return Network(bandwidth=arguments.bandwidth, latency=arguments.latency, **others)


def _common(arguments: argparse.Namespace, network: Network) -> dict[str, Any]:
    """What all of these simulations take."""
    return {
        "steps": arguments.steps,
        "seconds": arguments.seconds,
        "slowdown": slowdown_of(arguments),
        "noise": arguments.noise,
        "network": network,
        "batch_size": arguments.batch_size,
        "loss_seconds": arguments.loss_seconds,
        "seed": arguments.seed,
    }
