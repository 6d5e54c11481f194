"""Makes the notebooks of docs/tutorials/ from the programs beside them, with what these print.

python scripts/run_tutorials.py                       # all, one after the other
python scripts/run_tutorials.py --only=quick_start    # one of them
python scripts/run_tutorials.py --execute-only        # without writing: whether all run
python scripts/run_tutorials.py --check               # whether notebooks have their programs' cells

A tutorial is a Python program in jupytext's percent format, `docs/tutorials/<name>.py`, and a
notebook `<name>.ipynb` with the same cells and their outputs, which the site shows. The program is
what people edit. It runs in an empty folder, in a process of its own. A cell that writes to the
standard error stream is an error: no warning gets into a notebook.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import sys
import tempfile
import time

import jupytext
import nbclient
import nbformat

ROOT = pathlib.Path(__file__).resolve().parent.parent
TUTORIALS = ROOT / "docs" / "tutorials"
SECONDS = 300  # That a tutorial may take on a busy machine; a minute is usual.
KILOBYTES = 300  # That a notebook may have.


def names() -> list[str]:
    """The names of all tutorials."""
    return sorted(path.stem for path in TUTORIALS.glob("*.py"))


def program(name: str) -> nbformat.NotebookNode:
    """A tutorial's program as a notebook without outputs."""
    return jupytext.read(TUTORIALS / f"{name}.py", fmt="py:percent")


def execute(name: str) -> nbformat.NotebookNode:
    """Runs a tutorial; gives its notebook, which depends on nothing but the cells and outputs."""
    notebook = program(name)
    # The same numbers on all processors, and no message that says that they may differ.
    os.environ.update(TF_ENABLE_ONEDNN_OPTS="0", TF_CPP_MIN_LOG_LEVEL="2", PYTHONPATH=str(ROOT))
    with tempfile.TemporaryDirectory() as empty:
        nbclient.NotebookClient(
            notebook,
            timeout=SECONDS,
            kernel_name="python3",
            coalesce_streams=True,
            extra_arguments=["--log-level=ERROR"],  # Not that it listens without encryption, too.
            resources={"metadata": {"path": empty}},
        ).execute()
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        cell.metadata = nbformat.NotebookNode()
        for output in cell.get("outputs", []):
            if output.get("name") == "stderr":
                raise SystemExit(f"{name}, cell {number}: wrote to stderr:\n{output.text}")
            output.pop("metadata", None) if output.output_type == "stream" else None
    notebook.metadata.pop("language_info", None)
    return notebook


def write(name: str, notebook: nbformat.NotebookNode) -> None:
    """Writes a tutorial's notebook, unless something in it should not be there."""
    nbformat.validate(notebook)
    text = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    machine = re.search(rf"{re.escape(tempfile.gettempdir())}/|{re.escape(str(ROOT))}", text)
    if machine:
        raise SystemExit(f"{name}: an output has a path of this machine, at {machine.start()}.")
    if len(text) > KILOBYTES * 1000:
        raise SystemExit(f"{name}: {len(text) // 1000} kB are more than {KILOBYTES}.")
    (TUTORIALS / f"{name}.ipynb").write_text(text)


def differs(name: str) -> str:
    """How a notebook differs from its program; '' if it does not."""
    path = TUTORIALS / f"{name}.ipynb"
    if not path.exists():
        return "there is no notebook"
    ours, theirs = (
        [(cell.cell_type, cell.source) for cell in notebook.cells]
        for notebook in (program(name), nbformat.read(path, as_version=4))
    )
    if len(ours) != len(theirs):
        return f"the program has {len(ours)} cells, the notebook {len(theirs)}"
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if mine != other:
            return f"cell {number} is another one in the notebook"
    return ""


def main() -> None:
    """Does what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=names(), help="the name of one tutorial")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--execute-only", action="store_true", help="write nothing")
    group.add_argument("--check", action="store_true", help="compare programs with notebooks")
    arguments = parser.parse_args()
    chosen = [arguments.only] if arguments.only else names()
    if arguments.check:
        found = [f"{name}: {text}" for name in chosen if (text := differs(name))]
        if found:
            raise SystemExit(
                "\n".join(["Run scripts/run_tutorials.py, as notebooks are outdated:", *found])
            )
        return
    for name in chosen:
        began = time.monotonic()
        try:
            notebook = execute(name)
        except nbclient.exceptions.CellExecutionError as error:
            print(error, file=sys.stderr)
            raise SystemExit(f"{name} failed.") from None
        if not arguments.execute_only:
            write(name, notebook)
        print(f"docs/tutorials/{name}: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
