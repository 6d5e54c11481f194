"""Checks of the documentation that take a built site, or time. `make docs` runs both.

python scripts/check_documentation.py --site=build/docs    # nothing is loaded from the network
python scripts/check_documentation.py --programs           # the programs in docs/ run

A program is what blocks of Python code in a page make up together that have `<!-- program -->` on a
line before the first one, and `<!-- program, continued -->` before the others. It runs in an empty
folder, in a process of its own.
"""

from __future__ import annotations

import argparse
import html.parser
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
BLOCK = re.compile(
    r"^<!-- program(?P<more>, continued)? -->\n+```python\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
# The attributes by which a page loads something. Links that a reader may click on are none of them.
LOADED_BY = {
    "audio": ("src",),
    "embed": ("src",),
    "iframe": ("src",),
    "img": ("src", "srcset"),
    "link": ("href",),
    "object": ("data",),
    "script": ("src",),
    "source": ("src", "srcset"),
    "video": ("src", "poster"),
}


def programs(page: str) -> Iterator[str]:
    """The programs of a page, each whole."""
    program = ""
    for block in BLOCK.finditer(page):
        if not block["more"]:
            if program:
                yield program
            program = ""
        program += block["code"]
    if program:
        yield program


class Loads(html.parser.HTMLParser):
    """Collects what a page loads from the network."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.urls += [
            value
            for name, value in attrs
            if name in LOADED_BY.get(tag, ()) and re.match(r"\s*(https?:)?//", value or "")
        ]


def loads_from_network(site: pathlib.Path) -> list[str]:
    """What pages and style sheets of a built site load from elsewhere, each with its file."""
    found = []
    pages = sorted(site.rglob("*.html"))
    if not pages:
        raise SystemExit(f"{site} has no pages; build the site first: make docs")
    for path in pages:
        loads = Loads()
        loads.feed(path.read_text())
        found += [f"{path}: {url}" for url in loads.urls]
    for path in sorted(site.rglob("*.css")):
        urls = re.findall(r"(?:url\(|@import\s*)[\"']?((?:https?:)?//[^\"')]+)", path.read_text())
        found += [f"{path}: {url}" for url in urls]
    return found


def run_programs(folder: pathlib.Path) -> int:
    """Runs the programs of all pages in a folder; gives how many failed."""
    failed = 0
    for path in sorted(folder.rglob("*.md")):
        for number, program in enumerate(programs(path.read_text()), 1):
            with tempfile.TemporaryDirectory() as empty:
                script = pathlib.Path(empty) / f"{path.stem}_{number}.py"
                script.write_text(program)
                began = time.monotonic()
                result = subprocess.run(
                    [sys.executable, script],
                    cwd=empty,
                    env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    timeout=300,
                )
            name = f"{path.relative_to(ROOT)}, program {number}"
            print(f"{name}: {time.monotonic() - began:.0f} s")
            if result.returncode:
                failed += 1
                print(result.stdout)
                print(f"{name} failed with exit code {result.returncode}")
    return failed


def main() -> None:
    """Runs the checks that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--site", type=pathlib.Path, help="the folder of a built site")
    parser.add_argument("--programs", action="store_true", help="run the programs in docs/")
    arguments = parser.parse_args()
    if arguments.site is None and not arguments.programs:
        parser.error("nothing to check: give --site or --programs")
    if arguments.site is not None:
        found = loads_from_network(arguments.site)
        if found:
            raise SystemExit("The site loads something from the network:\n" + "\n".join(found))
    if arguments.programs and run_programs(ROOT / "docs"):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
