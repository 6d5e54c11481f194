"""The map of tests by what they reach, and the choice among them; scripts/ has the programs."""

import json
import pathlib
import sys
import textwrap

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "scripts"))
sys.path.append(str(ROOT / "scripts" / "recording"))

import cc_blocks  # noqa: E402
import changes  # noqa: E402
import coverage_map  # noqa: E402
import numpy as np  # noqa: E402

PYTHON = textwrap.dedent(
    """\
    import os

    class Box:
        @property
        def size(self):
            def inner():
                return 1
            return inner()

    def area(
        box,
    ):
        return box.size
    """
)
CC = textwrap.dedent(
    """\
    namespace recsync {

    int Area(const Box& box,
             int scale) {
      if (scale > 0) {
        return 1;
      }
      return 0;
    }

    class ABSL_LOCKABLE Box {
     public:
      int size() const { return size_; }
      void Grow() {
        ++size_;
      }
    };

    }  // namespace recsync
    """
)
SECONDS = {"tests/test_a.py::one": 1.0, "tests/test_a.py::two": 2.0, "tests/test_b.py::one": 5.0}


def small_map() -> dict:
    """Two tests of the file area.py; the second also calls `size`, and a C++ test runs Area."""
    recorded = coverage_map.Recorded()
    one = recorded.add_test("tests/test_a.py::one", 1.0)
    two = recorded.add_test("tests/test_a.py::two", 2.0, passed=False)
    recorded.add_lines(recorded.add_test(""), {"area.py": [1, 3, 4, 5, 10]})
    recorded.add_lines(one, {"area.py": [13]})
    recorded.add_lines(two, {"area.py": [6, 8, 13]})
    recorded.add_binary("ops", {("cc/area.cc", 3): [1], ("cc/area.cc", 6): [7, 8]})
    recorded.add_blocks(one, "ops", [1])
    program = recorded.add_test("cc/engine/area_test.cc", 0.5)
    recorded.add_binary("cc/area_test", {("cc/area.cc", 3): [2], ("cc/area_test.cc", 1): [3]})
    recorded.add_blocks(program, "cc/area_test", [2, 3])
    statements = {"area.py": [1, 3, 4, 5, 6, 7, 8, 10, 13]}
    return {"totals": recorded.totals(statements), "lines": recorded.line_map(statements)}


def test_totals_count_lines_of_statements_and_of_code():
    totals = small_map()["totals"]
    assert totals["tf_recsync"]["files"] == {"area.py": {"lines": 9, "covered": 8}}
    assert totals["cc"] == {
        "lines": 2,
        "covered": 1,
        "percent": 50.0,
        "files": {"cc/area.cc": {"lines": 2, "covered": 1}},
    }
    assert totals["python_tests"] == 2 and totals["python_seconds"] == 3.0
    assert totals["failed"] == ["tests/test_a.py::two"]
    assert "       9        8    88.89  tf_recsync\n" in coverage_map.table(totals)


def test_a_map_is_read_as_it_was_written(tmp_path):
    coverage_map.write(small_map()["lines"], tmp_path / "map.json.xz")
    read = coverage_map.read(tmp_path / "map.json.xz")
    assert read.files() == ["area.py", "cc/area.cc"]
    assert read.tests("area.py", "13") == {"tests/test_a.py::one", "tests/test_a.py::two"}
    assert read.tests("area.py", "7") == set()
    assert read.tests("cc/area.cc", "3") == {"tests/test_a.py::one", "cc/engine/area_test.cc"}
    assert read.seconds["tests/test_a.py::two"] == 2.0
    with pytest.raises(FileNotFoundError, match="record_coverage.py records it"):
        coverage_map.read(tmp_path / "none")


def test_the_map_by_function_has_whole_files_for_cc(tmp_path):
    (tmp_path / "cc").mkdir()
    (tmp_path / "area.py").write_text(PYTHON)
    (tmp_path / "cc/area.cc").write_text(CC)
    by_function = coverage_map.Map(coverage_map.by_function(small_map()["lines"], tmp_path))
    assert by_function.tests("area.py", "area") == {"tests/test_a.py::one", "tests/test_a.py::two"}
    assert by_function.tests("area.py", "Box.size") == {"tests/test_a.py::two"}
    assert by_function.tests("area.py", "") == {""}
    assert by_function.tests("cc/area.cc", "int Area") == {
        "tests/test_a.py",
        "cc/engine/area_test.cc",
    }
    assert by_function.seconds["tests/test_a.py"] == 3.0


def test_lines_of_python_belong_to_the_innermost_function():
    bodies = {6: "Box.size", 7: "Box.size.inner", 8: "Box.size", 13: "area"}
    assert coverage_map.python_functions(PYTHON) == bodies
    whole = coverage_map.python_functions(PYTHON, whole=True)
    assert {line: whole.get(line) for line in (3, 4, 6, 7, 10, 11)} == {
        **{3: None, 4: "Box.size", 6: "Box.size.inner", 7: "Box.size.inner"},
        **{10: "area", 11: "area"},
    }


def test_lines_of_cc_belong_to_functions_by_their_layout():
    area, grow = "int Area", "Box::void Grow"
    assert coverage_map.cc_functions(CC) == {
        **dict.fromkeys(range(3, 10), area),
        **{13: "Box::int size", 14: grow, 15: grow, 16: grow},
    }


def test_lines_belong_to_the_blocks_that_their_instructions_are_in():
    calls, functions = np.array([104, 120, 140, 204]), np.array([100, 200, 300])
    rows = [
        (100, 104, "a.cc", 1),  # What comes before a function's first block, too.
        (104, 130, "a.cc", 2),  # Two blocks.
        (130, 139, "a.cc", 3),
        (200, 202, "a.cc", 4),
        (300, 310, "a.cc", 5),  # A function without a block.
    ]
    first, second, fourth = (104 + 5) // 4, (120 + 5) // 4, (204 + 5) // 4
    assert cc_blocks.lines_of(calls, functions, rows) == {
        ("a.cc", 1): [first],
        ("a.cc", 2): [first, second],
        ("a.cc", 3): [second],
        ("a.cc", 4): [fourth],
    }


def test_a_diff_names_new_lines_and_the_neighbors_of_what_is_gone():
    diff = "@@ -3 +3,2 @@ def f():\n-a\n+b\n+c\n@@ -9,2 +10,0 @@\n-d\n-e\n@@ -20 +19 @@\n-f\n+g\n"
    assert changes.changed_lines(diff) == {3, 4, 10, 11, 19}


def test_imports_are_found_with_the_names_they_take():
    source = (
        "import helpers\nfrom tf_recsync.cluster import link, server as s\nfrom sockets import f"
    )
    assert {"helpers", "tf_recsync.cluster.link", "link", "server", "sockets"} <= (
        changes.imported_modules(source)
    )


def test_changed_functions_lead_to_tests(tmp_path):
    for folder in ("tests", "tf_recsync", "cc/engine"):
        (tmp_path / folder).mkdir(parents=True)
    files = {
        "tf_recsync/area.py": PYTHON + "\ndef fresh():\n    return 2\n",
        "tf_recsync/new.py": "NEW = 1\n",
        "tests/test_a.py": "from tf_recsync import new\nimport helpers\n",
        "tests/test_b.py": "from mode_models import x\n",
        "tests/mode_models.py": "from helpers import y\n",
        "tests/helpers.py": "y = 1\n",
        "cc/engine/box.h": "",
        "cc/area.cc": CC.replace("return 1", "return 2"),
        "cc/engine/box.cc": "int x;\n",
        "cc/engine/area.h": '#include "cc/engine/box.h"\n',
        "cc/engine/area_test.cc": '#include "cc/engine/area.h"\n',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    encoded = json.loads(
        json.dumps(small_map()["lines"]).replace('"area.py"', '"tf_recsync/area.py"')
    )
    map_ = coverage_map.Map(coverage_map.by_function(encoded, tmp_path))
    changed = {
        "tf_recsync/area.py": {8, 16},
        "tf_recsync/new.py": changes.NEW_FILE,
        "tests/helpers.py": {1},
        "cc/area.cc": {6},
        "cc/engine/box.cc": changes.NEW_FILE,
        "README.md": {1},
    }
    both = {"tests/test_a.py::one", "tests/test_a.py::two"}
    assert changes.touched_tests(tmp_path, changed, map_) == {
        "tf_recsync/area.py: Box.size": {"tests/test_a.py::two"},
        "tf_recsync/area.py: fresh": both,
        "tf_recsync/new.py": {"tests/test_a.py"},
        "tests/helpers.py": {"tests/test_a.py", "tests/test_b.py"},
        "cc/area.cc: int Area": {"tests/test_a.py", "cc/engine/area_test.cc"},
        "cc/engine/box.cc": {"cc/engine/area_test.cc"},
    }


def test_every_changed_function_is_reached_within_the_budget_or_without():
    touched = {"f": set(SECONDS), "g": {"tests/test_b.py::one"}, "h": set()}
    assert changes.choose(touched, SECONDS, 1.0) == ["tests/test_b.py::one"]
    assert changes.choose(touched, SECONDS, 6.0) == ["tests/test_a.py::one", "tests/test_b.py::one"]
    assert changes.choose(touched, SECONDS, float("inf")) == sorted(SECONDS)


def test_what_is_left_of_the_budget_goes_to_different_modules():
    names = ["tests/test_a.py::1", "tests/test_a.py::2", "tests/test_b.py::1"]
    seconds = dict(zip(names, (1.0, 2.0, 3.0), strict=True))
    chosen = changes.choose({"f": set(names)}, seconds, 4.0)
    assert chosen == ["tests/test_a.py::1", "tests/test_b.py::1"]
