"""What has changed since a commit, which tests that can touch, and a choice among them."""

from __future__ import annotations

import collections
import pathlib
import re
import subprocess
from collections.abc import Iterable, Mapping

import coverage_map

NEW_FILE = None  # Instead of lines, where all lines are new.
Changed = dict[str, set[int] | None]
_INCLUDE = re.compile(r'^#include "(cc/[^"]+)"', re.M)
_HUNK = re.compile(r"^@@ -\d+(?:,\d+)? \+(\d+)(?:,(\d+))? @@", re.M)
_IMPORT = re.compile(r"^\s*(?:from|import)\s+([\w.]+)(?:\s+import\s+\(?([^\n)]*))?", re.M)


def _git(root: pathlib.Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def merge_base(root: pathlib.Path) -> str:
    """Where HEAD left main's upstream, or main; HEAD itself if there is neither."""
    for main in ("main@{upstream}", "origin/main", "main"):
        try:
            return _git(root, "merge-base", main, "HEAD").strip()
        except ValueError:
            continue
    return _git(root, "rev-parse", "HEAD").strip()


def since(root: pathlib.Path, base: str) -> Changed:
    """The lines of this checkout that differ from a commit, by file.

    A line that is gone counts for its neighbors. Files that are gone are not among them.
    """
    changed: Changed = {}
    listed = _git(root, "diff", "--name-status", "--no-renames", "-z", base).split("\0")
    for status, file in zip(listed[::2], listed[1::2], strict=False):
        if status == "A":
            changed[file] = NEW_FILE
        elif status != "D":
            diff = _git(root, "diff", "--unified=0", "--no-renames", base, "--", file)
            changed[file] = changed_lines(diff)
    others = _git(root, "ls-files", "--others", "--exclude-standard", "-z").split("\0")
    changed.update((file, NEW_FILE) for file in others if file)
    return changed


def changed_lines(diff: str) -> set[int]:
    """The new lines of a file's diff without context."""
    found = set()
    for match in _HUNK.finditer(diff):
        first, count = int(match[1]), int(match[2] or 1)
        found.update(range(first, first + count) if count else (first, first + 1))
    return found


def touched_tests(
    root: pathlib.Path, changed: Changed, map_: coverage_map.Map
) -> dict[str, set[str]]:
    """The tests that each changed place can touch; a place is "file" or "file: function".

    Args:
      root: The checkout.
      changed: Its files and lines that have changed.
      map_: Which tests reach which function.
    """
    touched: dict[str, set[str]] = {}
    for file, lines in changed.items():
        path = pathlib.PurePath(file)
        if path.suffix not in (".py", ".cc", ".h"):
            continue
        if file.startswith("tests/") or file == "conftest.py":
            touched[file] = _of_test_file(root, file)
        elif file.startswith("cc/") and path.name.endswith(("_test.cc", "_testing.h")):
            touched[file] = {f for f in dependents(root, file) if _is_cc_test(f)}
        elif file.startswith(("cc/", "tf_recsync/")):
            touched.update(_of_source(root, file, lines, map_))
        elif file.startswith(("examples/", "benchmarks/")):
            touched[file] = _naming(root, path.stem)
    existing: dict[str, bool] = {}
    for tests in touched.values():  # The map may know tests of files that are gone.
        for test in list(tests):
            name = test.partition("::")[0]
            if name not in existing:
                existing[name] = (root / name).exists()
            if not existing[name]:
                tests.remove(test)
    return touched


def dependents(tree: pathlib.Path, file: str) -> set[str]:
    """The C++ files of a tree that include a file, directly or not, and the file itself."""
    including = collections.defaultdict(set)
    for path in (tree / "cc").rglob("*"):
        if path.suffix in (".cc", ".h"):
            for included in _INCLUDE.findall(path.read_text()):
                including[included].add(str(path.relative_to(tree)))
    found, pending = set(), [file]
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending += including[name]
    return found


def _is_cc_test(file: str) -> bool:
    return file.startswith("cc/") and file.endswith("_test.cc")


def _of_source(
    root: pathlib.Path, file: str, lines: set[int] | None, map_: coverage_map.Map
) -> dict[str, set[str]]:
    known = set(map_.places(file))
    source = (root / file).read_text()
    is_cc = file.startswith("cc/")
    if is_cc:
        name_at = coverage_map.cc_functions(source)
    else:
        name_at = coverage_map.python_functions(source, whole=True)
    all_lines = source.splitlines()
    places: dict[str, set[str]] = {}
    for line in range(1, len(all_lines) + 1) if lines is None else sorted(lines):
        text = all_lines[line - 1].strip() if line <= len(all_lines) else ""
        if text and not text.startswith(("#", "//")):
            places.setdefault(name_at.get(line, ""), set())
    unknown = _including(root, file) if is_cc else _importing(root, file)
    found = {}
    for name in places:
        if name and name in known:
            tests = set(map_.tests(file, name))
        elif known:
            tests = set().union(*(map_.tests(file, place) for place in known))
        else:
            tests = set(unknown)
        found[f"{file}: {name}" if name else file] = tests - {""}
    return found


def _of_test_file(root: pathlib.Path, file: str) -> set[str]:
    """A test file itself; for a module that tests share, those that import it, in turn."""
    path = pathlib.PurePath(file)
    if path.name.startswith("test_"):
        return {file}
    if path.name == "conftest.py":
        return {str(p.relative_to(root)) for p in (root / "tests").glob("test_*.py")}
    imports = {
        p.stem: imported_modules(p.read_text()) for p in sorted((root / "tests").glob("*.py"))
    }
    found, pending = set(), [path.stem]
    while pending:
        name = pending.pop()
        for importer, names in imports.items():
            if name in names and importer not in found:
                found.add(importer)
                pending.append(importer)
    if "conftest" in found:
        found.update(name for name in imports if name.startswith("test_"))
    return {f"tests/{name}.py" for name in found if name.startswith("test_")}


def imported_modules(source: str) -> set[str]:
    """The modules that a source imports, with the names it takes from packages."""
    found = set()
    for match in _IMPORT.finditer(source):
        found.add(match[1])
        for name in (match[2] or "").split(","):
            found.add(name.strip().partition(" ")[0])
            found.add(f"{match[1]}.{name.strip().partition(' ')[0]}")
    return found


def _including(root: pathlib.Path, file: str) -> set[str]:
    """The C++ tests that include a file, or the header of a source."""
    header = file.rpartition(".")[0] + ".h"
    return {f for f in dependents(root, file) | dependents(root, header) if _is_cc_test(f)}


def _importing(root: pathlib.Path, file: str) -> set[str]:
    """The test files that import a module of the package by its name, or one that imports it."""
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    sources = {
        str(p.relative_to(root)): imported_modules(p.read_text())
        for folder in ("tf_recsync", "tests")
        for p in sorted((root / folder).rglob("*.py"))
    }
    found, pending = set(), [module]
    while pending:
        name = pending.pop()
        for importer, names in sources.items():
            if name in names and importer not in found:
                found.add(importer)
                importer_module = importer.removesuffix(".py").removesuffix("/__init__")
                pending.append(importer_module.replace("/", "."))
    return {f for f in found if re.match(r"tests/test_[^/]*\.py$", f)}


def _naming(root: pathlib.Path, name: str) -> set[str]:
    """The test files in which a program's name occurs."""
    word = re.compile(rf"\b{re.escape(name)}\b")
    return {
        str(p.relative_to(root))
        for p in (root / "tests").glob("test_*.py")
        if word.search(p.read_text())
    }


def choose(
    touched: Mapping[str, Iterable[str]], seconds: Mapping[str, float], budget: float
) -> list[str]:
    """Tests within a budget that reach every place, then more of them.

    Places with the fewest tests choose first, each the cheapest of its tests, unless one that
    is chosen already reaches it: these may take more time than there is. What is left of the
    budget goes to further tests, in turn from each module, the cheapest first.

    Args:
      touched: The tests of each place.
      seconds: Of each test; one that is not known counts for a second.
      budget: Seconds.

    Returns:
      The tests, sorted; a file alone stands for all its tests.
    """
    cost = {test: seconds.get(test, 1.0) for tests in touched.values() for test in tests}
    order = sorted(cost, key=lambda test: (cost[test], test))
    chosen: set[str] = set()
    for place in sorted(touched, key=lambda place: (len(list(touched[place])), place)):
        tests = set(touched[place])
        if tests and not tests & chosen:
            chosen.add(next(test for test in order if test in tests))
    spent = sum(cost[test] for test in chosen)
    of_module = collections.Counter(test.partition("::")[0] for test in chosen)
    turns = []
    for test in order:
        if test not in chosen:
            module = test.partition("::")[0]
            turns.append((of_module[module], cost[test], test))
            of_module[module] += 1
    for _, seconds_, test in sorted(turns):
        if spent + seconds_ <= budget:
            chosen.add(test)
            spent += seconds_
    return sorted(t for t in chosen if "::" not in t or t.partition("::")[0] not in chosen)
