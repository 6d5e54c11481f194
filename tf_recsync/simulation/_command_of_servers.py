"""The arguments of `python -m tf_recsync.simulate` for workers on parameter servers."""

from __future__ import annotations

import argparse
from typing import Any

from tf_recsync import modes, optimizers, staleness
from tf_recsync._checks import check_at_least
from tf_recsync.layers import MeanNormalization
from tf_recsync.simulation._click_model import ClickModel
from tf_recsync.simulation._command_line import (
    add_time,
    given,
    read_as,
    refuse_others,
    slowdown_of,
)
from tf_recsync.simulation._result import Result
from tf_recsync.simulation._run import run
from tf_recsync.simulation._settings import Network, Server, check_number
from tf_recsync.swap import Swap

# What each mode takes besides --local_batch_size, those first that it can't do without.
_MODES: dict[str, tuple[type[modes.ModeConfig], tuple[str, ...]]] = {
    "async": (modes.Async, ()),
    "sync": (modes.Sync, ("global_batch_size",)),
    "bsp": (modes.BSP, ("global_batch_size",)),
    "gba": (modes.GBA, ("global_batch_size", "staleness_tolerance", "decay")),
    "backup": (modes.BackupWorkers, ("backup_workers",)),
    "bounded": (modes.BoundedStaleness, ("staleness_bound",)),
}
_NEEDED = {
    "bsp": ("global_batch_size", "local_batch_size"),
    "gba": ("global_batch_size", "local_batch_size"),
    "backup": ("backup_workers",),
    "bounded": ("staleness_bound",),
}

# What each model takes besides _OF_MODELS.
_MODELS: dict[str, tuple[str, ...]] = {
    "logistic_regression": (),
    "factorization_machine": ("dimension",),
    "wide_deep": ("dimension", "hidden_units", "mean_normalization"),
}
_OF_MODELS = ("features", "vocabulary", "signal", "drift", "day_batches", "evaluations")
_OF_OPTIMIZERS = ("optimizer", "learning_rate", "staleness_baseline", "swap_period")
_OPTIMIZERS = {
    "sgd": optimizers.SGD,
    "adagrad": optimizers.Adagrad,
    "swap_adagrad": optimizers.SwapAdagrad,
}
_LEARNING_RATE = 0.05
_DIMENSION = 4
_HIDDEN_UNITS = (16,)


@read_as("hidden_units", "16,8")
def _hidden_units(text: str) -> tuple[int, ...]:
    return tuple(int(units) for units in text.split(","))


SERVERS_USAGE = "--mode=MODE --workers=N --compute_seconds=S --steps=N"


def add_servers(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of workers on parameter servers."""
    add = parser.add_argument
    add("--mode", choices=_MODES, required=True, help="when workers wait and servers apply")
    add("--workers", type=int, required=True, help="how many workers")
    add("--ps", type=int, default=1, help="how many parameter servers; default 1")
    add("--compute_seconds", type=float, required=True, help="that a step computes")
    add("--steps", type=int, required=True, help="of all workers together")
    add("--warmup_steps", type=int, default=0, help="the first ones, not reported; default 0")
    add("--cooldown_steps", type=int, default=0, help="the last ones, likewise; default 0")
    add("--seed", type=int, default=0, help="of the noise; default 0")
    group = parser.add_argument_group("the mode, as in recsync.modes").add_argument
    group("--local_batch_size", type=int, help="examples of a worker's batch")
    group("--global_batch_size", type=int, help="of sync, bsp, gba: examples applied together")
    group("--staleness_tolerance", type=int, help="of gba, in global steps; default 4")
    group("--decay", choices=("threshold", "inverse_power"), help="of gba; default threshold")
    group("--backup_workers", type=int, help="of backup: how many are not waited for")
    group("--staleness_bound", type=int, help="of bounded: how many batches one may be ahead")
    group = add_time(parser)
    group("--reader_seconds", type=float, default=0.0, help="for a batch; default 0")
    group("--reader_ahead", type=int, default=2, help="batches that are kept ready; default 2")
    group = parser.add_argument_group("the network and the servers").add_argument
    group("--pull_bytes", type=int, default=0, help="of a step, from all servers; default 0")
    group("--push_bytes", type=int, default=0, help="of a step, to all servers; default 0")
    group("--bandwidth", type=float, help="of a link, in bytes per second; default no limit")
    group("--server_bandwidth", type=float, help="of a server's; default --bandwidth")
    group("--latency", type=float, default=0.0, help="of a message, in seconds; default 0")
    group("--workers_per_machine", type=int, default=1, help="that share its links; default 1")
    group("--threads", type=int, default=1, help="of a server; default 1")
    group("--seconds_per_pull", type=float, default=0.0, help="on a server; default 0")
    group("--seconds_per_application", type=float, default=0.0, help="on a server; default 0")
    group("--seconds_per_byte", type=float, default=0.0, help="on a server; default 0")
    group = parser.add_argument_group(
        "what is learned, as in recsync.simulation.ClickModel; by default nothing"
    ).add_argument
    group("--model", choices=_MODELS, help="of made clicks")
    group("--features", type=int, help="categorical ones; default 10")
    group("--vocabulary", type=int, help="the ids of each; default 1000")
    group("--dimension", type=int, help="of factors, but in a logistic_regression; default 4")
    group("--hidden_units", type=_hidden_units, help="of wide_deep, as 16,8; default 16")
    group(
        "--mean_normalization",
        action="store_const",
        const=True,
        help="of wide_deep: local mean-normalization of hidden layers",
    )
    group("--drift", type=float, help="of the clicks from day to day, in radians; default 0")
    group("--day_batches", type=int, help="of a day, of all workers; default 1000")
    group("--signal", type=float, help="how far true logits deviate; default 1")
    group("--evaluations", type=int, help="of the AUC in the course of the run; default 10")
    group("--optimizer", choices=_OPTIMIZERS, help="default adagrad")
    group("--learning_rate", type=float, help="default 0.05")
    group("--staleness_baseline", type=float, help="of InversePower(k=2); default no weights")
    group("--swap_period", type=int, help="of swap_adagrad; default 10000")


def _mode(arguments: argparse.Namespace) -> modes.ModeConfig:
    """The mode that the arguments say; a ValueError if they do not fit it."""
    refuse_others(arguments, "mode", {mode: names for mode, (_, names) in _MODES.items()})
    kind, taken = _MODES[arguments.mode]
    for name in _NEEDED.get(arguments.mode, ()):
        if getattr(arguments, name) is None:
            raise ValueError(f"--mode={arguments.mode} needs --{name}")
    return kind(**given(arguments, (*taken, "local_batch_size")))


def _model(arguments: argparse.Namespace) -> ClickModel | None:
    """What is learned; a ValueError if the arguments do not fit together."""
    options = given(arguments, (*_OF_MODELS, *_MODELS["wide_deep"], *_OF_OPTIMIZERS))
    if arguments.model is None:
        if options:
            raise ValueError(f"--{next(iter(options))} needs --model")
        return None
    refuse_others(arguments, "model", _MODELS)
    taken = _MODELS[arguments.model]
    check_at_least("dimension", options.get("dimension", 1), 1)
    has_layers = "hidden_units" in taken
    return ClickModel(
        dimension=options.get("dimension", _DIMENSION) if "dimension" in taken else 0,
        hidden_units=options.get("hidden_units", _HIDDEN_UNITS) if has_layers else (),
        mean_normalization=MeanNormalization() if arguments.mean_normalization else None,
        optimizer=_optimizer(arguments),
        **{name: value for name, value in options.items() if name in _OF_MODELS},
    )


def _optimizer(arguments: argparse.Namespace) -> optimizers.Optimizer:
    """The optimizer of what is learned."""
    kind = arguments.optimizer or "adagrad"
    options: dict[str, Any] = {}
    if arguments.staleness_baseline is not None:
        options["staleness"] = staleness.InversePower(k=2, baseline=arguments.staleness_baseline)
    if arguments.swap_period is not None:
        if kind != "swap_adagrad":
            raise ValueError(f"--swap_period is of --optimizer=swap_adagrad, not of {kind}")
        options["swap"] = Swap(period=arguments.swap_period)
    rate = _LEARNING_RATE if arguments.learning_rate is None else arguments.learning_rate
    check_number("learning_rate", rate)
    return _OPTIMIZERS[kind](rate, **options)


def run_servers(arguments: argparse.Namespace) -> Result:
    """The result of what the arguments say; a ValueError if something is wrong."""
    return run(
        _mode(arguments),
        workers=arguments.workers,
        ps=arguments.ps,
        compute_seconds=arguments.compute_seconds,
        steps=arguments.steps,
        slowdown=slowdown_of(arguments),
        noise=arguments.noise,
        network=Network(
            bandwidth=arguments.bandwidth,
            server_bandwidth=arguments.server_bandwidth,
            latency=arguments.latency,
            workers_per_machine=arguments.workers_per_machine,
        ),
        server=Server(
            threads=arguments.threads,
            seconds_per_pull=arguments.seconds_per_pull,
            seconds_per_application=arguments.seconds_per_application,
            seconds_per_byte=arguments.seconds_per_byte,
        ),
        pull_bytes=arguments.pull_bytes,
        push_bytes=arguments.push_bytes,
        reader_seconds=arguments.reader_seconds,
        reader_ahead=arguments.reader_ahead,
        warmup_steps=arguments.warmup_steps,
        cooldown_steps=arguments.cooldown_steps,
        model=_model(arguments),
        seed=arguments.seed,
    )
