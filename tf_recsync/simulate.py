"""Simulates a cluster: `python -m tf_recsync.simulate`.

Prints a table of what `recsync.simulation` gives, and writes it as JSON and as a picture:

    python -m tf_recsync.simulate --mode=gba --workers=800 --ps=100 --compute_seconds=0.5 \\
        --local_batch_size=512 --global_batch_size=51200 --noise=0.2 --steps=20000 \\
        --json=gba.json --plot=gba.png
    python -m tf_recsync.simulate --strategy=hop --topology=ring_based:16 --compute_seconds=0.5 \\
        --steps=1600 --backup_workers=1 --random_slowdown=6:0.0625
    python -m tf_recsync.simulate --strategy=shadowsync --trainers=20 --compute_seconds=0.1 \\
        --parameter_bytes=50000000 --bandwidth=1.25e9 --steps=10000
    python -m tf_recsync.simulate --strategy=hierarchical --groups=4 --trainers_per_group=6 \\
        --trainer_flop=1e9 --ps_flop=3e9,3e9 --trainer_flops=1e11 --ps_flops=1e11 \\
        --parameter_bytes=50000000 --bandwidth=1.25e9 --steps=1000

Each strategy has arguments of its own: `--strategy=hop --help` lists Hop's. All figures are
simulated. Exit codes: 0; 2 for wrong arguments, with a line that says which.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tf_recsync._figures import new_figure
from tf_recsync.simulation import _command_of_copies as copies
from tf_recsync.simulation._command_line import Parser, Result, add_outputs
from tf_recsync.simulation._command_of_servers import SERVERS_USAGE, add_servers, run_servers
from tf_recsync.simulation._result import as_json
from tf_recsync.testing import Slowdown
from tf_recsync.topology import Topology


@dataclasses.dataclass(frozen=True)
class _Strategy:
    """What the program knows of a strategy.

    Attributes:
        usage: the arguments that a run needs.
        add: adds its arguments to a parser.
        run: what runs it.
        add_outputs: adds arguments to the group of outputs.
        write: writes what those say.
    """

    usage: str
    add: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Result]
    add_outputs: Callable[[Callable[..., Any]], None] = lambda add: None
    write: Callable[[argparse.Namespace, Any], None] = lambda arguments, result: None


_STRATEGIES = {
    "ps": _Strategy(SERVERS_USAGE, add_servers, run_servers),
    "hop": _Strategy(
        copies.HOP_USAGE,
        copies.add_hop,
        copies.run_hop_of,
        copies.add_hop_outputs,
        copies.write_hop,
    ),
    "shadowsync": _Strategy(copies.SHADOW_USAGE, copies.add_shadow, copies.run_shadow_of),
    "hierarchical": _Strategy(
        copies.HIERARCHICAL_USAGE, copies.add_hierarchical, copies.run_hierarchical_of
    ),
}


def _add_strategy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--strategy",
        choices=_STRATEGIES,
        default="ps",
        help="ps (the default): workers on parameter servers; hop: HopStrategy; shadowsync: "
        "ShadowSyncStrategy; hierarchical: HierarchicalStrategy",
    )


def _parser(name: str) -> argparse.ArgumentParser:
    """The parser of one strategy's arguments."""
    strategy = _STRATEGIES[name]
    parser = Parser(
        prog="python -m tf_recsync.simulate",
        usage=f"%(prog)s --strategy={name} {strategy.usage} [what is below]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_strategy(parser)
    strategy.add(parser)
    strategy.add_outputs(add_outputs(parser))
    return parser


def _for_json(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments that were given or have a default, as JSON has them."""
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    return {
        name: str(value) if isinstance(value, Slowdown | Topology | pathlib.Path) else value
        for name, value in given.items()
    }


def _check_outputs(arguments: argparse.Namespace) -> None:
    """What comes to an end after minutes shall not fail then.

    Raises:
        ValueError: if a file can't be written.
        ImportError: if there is to be a picture, and matplotlib is not installed.
    """
    for output in ("json", "plot", "timeline"):
        path = getattr(arguments, output, None)
        if path is None:
            continue
        if not path.parent.is_dir():
            raise ValueError(f"--{output}={path}: there is no folder {path.parent}")
        if path.is_dir():
            raise ValueError(f"--{output}={path}: that is a folder, not a file")
    if arguments.plot is not None:
        known = new_figure(1.0, 1.0, "--plot").canvas.get_supported_filetypes()
        ending = arguments.plot.suffix[1:].lower()
        if ending and ending not in known:
            raise ValueError(
                f"--plot={arguments.plot}: the ending must be one of {', '.join(sorted(known))}"
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program.

    Args:
        argv: its arguments. Default None: those of this process.

    Returns:
        The exit code, see the module's documentation.
    """
    of_strategy = Parser(add_help=False, allow_abbrev=False)
    _add_strategy(of_strategy)
    name = of_strategy.parse_known_args(argv)[0].strategy
    parser = _parser(name)
    arguments = parser.parse_args(argv)
    try:
        _check_outputs(arguments)
        result = _STRATEGIES[name].run(arguments)
        sys.stdout.write(f"{result}\n")
        if arguments.json is not None:
            content = {"arguments": as_json(_for_json(arguments)), **result.as_dict()}
            text = json.dumps(content, indent=2, allow_nan=False)
            arguments.json.write_text(f"{text}\n", encoding="utf-8")
        if arguments.plot is not None:
            result.plot(arguments.plot)
        _STRATEGIES[name].write(arguments, result)
    except (ImportError, OSError, ValueError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
