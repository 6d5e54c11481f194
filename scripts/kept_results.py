"""What the programs share that write the papers' figures, simulated, into files that are kept."""

from __future__ import annotations

import argparse
import json
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

Row = dict[str, Any]
# What computes a part from the parser's arguments, and what draws it into a file.
Part = tuple[Callable[..., Row], Callable[[Row, str], None]]


def write(parser: argparse.ArgumentParser, program: str, parts: Mapping[str, Part]) -> None:
    """Writes those parts that are not there yet, as JSON, and draws all.

    Args:
        parser: with the arguments that parts are computed with, in their order; `--output` and
            `--seeds`, which comes first, are added.
        program: the name of its file.
        parts: by name.
    """
    numbers = [action.dest for action in parser._actions if action.dest != "help"]
    parser.add_argument("--output", type=pathlib.Path, required=True, help="A folder.")
    parser.add_argument("--seeds", type=int, default=5, help="How many runs are averaged.")
    arguments = vars(parser.parse_args())
    output = arguments["output"]
    output.mkdir(parents=True, exist_ok=True)
    given = {name: arguments[name] for name in ("seeds", *numbers)}
    flags = " ".join(f"--{name}={value:g}" for name, value in given.items())
    for name, (compute, draw) in parts.items():
        path = output / f"{name}.json"
        if not path.exists():
            began = time.monotonic()
            found = {
                "simulated": True,
                "command": f"python scripts/{program} --output=docs/results {flags}",
                **compute(*given.values()),
            }
            path.write_text(json.dumps(found, indent=1) + "\n")
            print(f"{path}: {time.monotonic() - began:.0f} s")
        draw(json.loads(path.read_text()), str(output / f"{name}.png"))
