"""Simulates workers on parameter servers: `python -m tf_recsync.simulate`.

Prints a table of what `recsync.simulation.run` gives, and writes it as JSON and as a picture:

    python -m tf_recsync.simulate --mode=gba --workers=800 --ps=100 --compute_seconds=0.5 \\
        --local_batch_size=512 --global_batch_size=51200 --noise=0.2 --steps=20000 \\
        --json=gba.json --plot=gba.png

All figures are simulated. Exit codes: 0; 2 for wrong arguments, with a line that says which.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from tf_recsync import modes, optimizers, simulation, staleness
from tf_recsync._checks import check_at_least
from tf_recsync.simulation._settings import check_number
from tf_recsync.swap import Swap
from tf_recsync.testing import ChangingSlowdown, RandomSlowdown, Slowdown, SlowWorkers

_EXIT_WRONG_ARGUMENTS = 2

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


_MODELS = ("logistic_regression", "factorization_machine")
_OF_MODELS = ("features", "vocabulary", "signal", "evaluations")
_OF_OPTIMIZERS = ("optimizer", "learning_rate", "staleness_baseline", "swap_period")
_OPTIMIZERS = {
    "sgd": optimizers.SGD,
    "adagrad": optimizers.Adagrad,
    "swap_adagrad": optimizers.SwapAdagrad,
}
_LEARNING_RATE = 0.05
_DIMENSION = 4


class _Parser(argparse.ArgumentParser):
    """One whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(_EXIT_WRONG_ARGUMENTS, f"tf_recsync simulate: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m tf_recsync.simulate",
        usage="%(prog)s --mode=MODE --workers=N --compute_seconds=S --steps=N [what is below]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
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
    group = parser.add_argument_group("what takes time, as in recsync.testing").add_argument
    group("--noise", type=float, default=0.0, help="sigma of the lognormal noise; default 0")
    group(
        "--slow_workers",
        metavar="FACTOR:W,W",
        type=_slow_workers,
        help="those with these indices take so many times as long, as 4:0,1,2",
    )
    group(
        "--random_slowdown",
        metavar="FACTOR:P",
        type=_random_slowdown,
        help="any step takes so many times as long with this probability, as 5:0.02",
    )
    group(
        "--changing_slowdown",
        metavar="T:FACTOR,...",
        type=_changing_slowdown,
        help="the factor of all at these times in seconds, and lines between, as 0:1,30:4,60:1",
    )
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
    group("--dimension", type=int, help="of a factorization_machine; default 4")
    group("--signal", type=float, help="how far true logits deviate; default 1")
    group("--evaluations", type=int, help="of the AUC in the course of the run; default 10")
    group("--optimizer", choices=_OPTIMIZERS, help="default adagrad")
    group("--learning_rate", type=float, help="default 0.05")
    group("--staleness_baseline", type=float, help="of InversePower(k=2); default no weights")
    group("--swap_period", type=int, help="of swap_adagrad; default 10000")
    group = parser.add_argument_group("what becomes of the result").add_argument
    group("--json", type=pathlib.Path, help="a file for the figures, with the arguments")
    group("--plot", type=pathlib.Path, help="a file for a picture, as gba.png; needs matplotlib")
    return parser


def _given(name: str, allowed: str) -> Callable[[Callable[[str], Slowdown]], Callable]:
    """Has an argument that can't be read, or is out of range, be refused with what is allowed."""

    def decorate(parse: Callable[[str], Slowdown]) -> Callable[[str], Slowdown]:
        def parsed(text: str) -> Slowdown:
            try:
                return parse(text)
            except ValueError as error:
                raise argparse.ArgumentTypeError(
                    f"{name} must be like {allowed}, not {text!r}: {error}"
                ) from None

        return parsed

    return decorate


@_given("slow_workers", "4:0,1,2")
def _slow_workers(text: str) -> Slowdown:
    multiple, _, workers = text.partition(":")
    return SlowWorkers(float(multiple), [int(worker) for worker in workers.split(",")])


@_given("random_slowdown", "5:0.02")
def _random_slowdown(text: str) -> Slowdown:
    multiple, _, probability = text.partition(":")
    return RandomSlowdown(float(multiple), float(probability))


@_given("changing_slowdown", "0:1,30:4,60:1")
def _changing_slowdown(text: str) -> Slowdown:
    pairs = [point.split(":") for point in text.split(",")]
    return ChangingSlowdown([(float(time), float(multiple)) for time, multiple in pairs])


def _mode(arguments: argparse.Namespace) -> modes.ModeConfig:
    """The mode that the arguments say; a ValueError if they do not fit it."""
    kind, taken = _MODES[arguments.mode]
    of_modes = {name for _, names in _MODES.values() for name in names}
    for name in sorted(of_modes.difference(taken)):
        if getattr(arguments, name) is not None:
            having = [mode for mode, (_, names) in _MODES.items() if name in names]
            raise ValueError(
                f"--{name} is of --mode={' or '.join(having)}, not of --mode={arguments.mode}"
            )
    for name in _NEEDED.get(arguments.mode, ()):
        if getattr(arguments, name) is None:
            raise ValueError(f"--mode={arguments.mode} needs --{name}")
    given = {name: getattr(arguments, name) for name in (*taken, "local_batch_size")}
    return kind(**{name: value for name, value in given.items() if value is not None})


def _model(arguments: argparse.Namespace) -> simulation.ClickModel | None:
    """What is learned; a ValueError if the arguments do not fit together."""
    given = {
        name: getattr(arguments, name)
        for name in (*_OF_MODELS, "dimension", *_OF_OPTIMIZERS)
        if getattr(arguments, name) is not None
    }
    if arguments.model is None:
        if given:
            raise ValueError(f"--{next(iter(given))} needs --model")
        return None
    is_machine = arguments.model == "factorization_machine"
    if arguments.dimension is not None and not is_machine:
        raise ValueError(f"--dimension is not of --model={arguments.model}")
    check_at_least("dimension", given.get("dimension", 1), 1)
    return simulation.ClickModel(
        dimension=given.get("dimension", _DIMENSION) if is_machine else 0,
        optimizer=_optimizer(arguments),
        **{name: value for name, value in given.items() if name in _OF_MODELS},
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


def _run(arguments: argparse.Namespace) -> simulation.Result:
    """The result of what the arguments say; a ValueError if something is wrong."""
    slowdowns = [arguments.slow_workers, arguments.random_slowdown, arguments.changing_slowdown]
    slowdown: Slowdown | None = None
    for one in slowdowns:
        if one is not None:
            slowdown = one if slowdown is None else slowdown * one
    return simulation.run(
        _mode(arguments),
        workers=arguments.workers,
        ps=arguments.ps,
        compute_seconds=arguments.compute_seconds,
        steps=arguments.steps,
        slowdown=slowdown,
        noise=arguments.noise,
        network=simulation.Network(
            bandwidth=arguments.bandwidth,
            server_bandwidth=arguments.server_bandwidth,
            latency=arguments.latency,
            workers_per_machine=arguments.workers_per_machine,
        ),
        server=simulation.Server(
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


def _for_json(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments that were given or have a default, as JSON has them."""
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    return {
        name: str(value) if isinstance(value, Slowdown | pathlib.Path) else value
        for name, value in given.items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program.

    Args:
        argv: its arguments. Default None: those of this process.

    Returns:
        The exit code, see the module's documentation.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        result = _run(arguments)
        sys.stdout.write(f"{result}\n")
        if arguments.json is not None:
            content = {"arguments": _for_json(arguments), **result.as_dict()}
            arguments.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        if arguments.plot is not None:
            result.plot(arguments.plot)
    except (ImportError, OSError, ValueError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
