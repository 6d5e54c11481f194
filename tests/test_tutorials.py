"""Tutorials: programs and notebooks are pairs, and the programs run as they are."""

import json
import pathlib
import re

import pytest
from programs import ROOT, run

TUTORIALS = ROOT / "docs" / "tutorials"
NAMES = sorted(path.stem for path in TUTORIALS.iterdir() if path.suffix in (".py", ".ipynb"))


def cells_of_program(text: str) -> list[tuple[str, str]]:
    """The kinds and texts of cells of a program in the percent format."""
    head, *cells = re.split(r"^# %%(.*)\n", text, flags=re.MULTILINE)
    assert re.fullmatch(r"(#.*\n)*\n*", head), "what stands before the first cell is no program"
    found = []
    for kind, cell in zip(cells[::2], cells[1::2], strict=True):
        assert kind in ("", " [markdown]")
        if kind:
            lines = cell.strip().split("\n")
            assert all(line.startswith("# ") or line == "#" for line in lines)
            found.append(("markdown", "\n".join(line[2:] for line in lines)))
        else:
            found.append(("code", cell.strip()))
    return found


def notebook(name: str) -> dict:
    """What the file of a notebook has."""
    return json.loads((TUTORIALS / f"{name}.ipynb").read_text())


def outputs(name: str) -> list[dict]:
    """All outputs of a notebook."""
    return [output for cell in notebook(name)["cells"] for output in cell.get("outputs", [])]


@pytest.mark.parametrize("name", sorted(set(NAMES)))
def test_a_program_and_its_notebook_have_the_same_cells(name):
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in notebook(name)["cells"]]
    assert cells == cells_of_program((TUTORIALS / f"{name}.py").read_text())


@pytest.mark.parametrize("name", sorted(set(NAMES)))
def test_a_notebook_has_its_outputs_and_a_plot_and_nothing_of_a_machine(name):
    assert all(
        cell["execution_count"] for cell in notebook(name)["cells"] if cell["cell_type"] == "code"
    )
    assert any("image/png" in output.get("data", {}) for output in outputs(name))
    texts = [output["text"] for output in outputs(name) if output["output_type"] == "stream"]
    text = "".join("".join(lines) for lines in texts)
    # What a cell shows besides is a picture: the text of an object has its address.
    shown = [output["data"] for output in outputs(name) if "data" in output]
    assert all("image/png" in data for data in shown)
    here = pathlib.Path(__file__).parents[1]
    assert text and str(here) not in text
    assert not re.search(r"/tmp/|/home/|/root/|warning:|\x08", text, re.IGNORECASE)
    assert all(output.get("name") != "stderr" for output in outputs(name))


@pytest.mark.cases("quick_start")
@pytest.mark.parametrize("name", ["quick_start", "your_own_click_log"])
def test_a_tutorial_runs_as_a_plain_program(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # Where it writes files.
    monkeypatch.setenv("MPLBACKEND", "agg")
    done = run(TUTORIALS / f"{name}.py", timeout=500)
    assert done.returncode == 0, done.stderr
    # It prints what the notebook shows, up to figures that differ from run to run.
    printed = [
        "".join(output["text"]) for output in outputs(name) if output["output_type"] == "stream"
    ]
    without_figures = [
        re.sub(r"[\d., ]+([mu]?s/step)?", " ", text) for text in ("".join(printed), done.stdout)
    ]
    assert without_figures[0] == without_figures[1]
