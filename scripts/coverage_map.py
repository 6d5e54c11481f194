"""The map from lines and functions to the tests that reach them, and what reads it.

A map is a dictionary, kept as JSON, compressed with xz:

- `tests`: [id, seconds] for each test. A Python test's id is pytest's; a file's id stands for
  all of its tests; a C++ test's is its source. The id "" stands for what ran between tests,
  such as imports.
- `sets`: sets of tests, each as its first number and the distances from one to the next.
- `python`, `cc`: by file, by line (`lines.json.xz`) or function (`functions.json.xz`), the
  number of a set.
"""

from __future__ import annotations

import ast
import collections
import itertools
import json
import lzma
import pathlib
import re
from collections.abc import Iterable, Mapping

Reached = dict[str, dict[int, set[int]]]  # By file and line, the numbers of tests.
_CC_TEST = re.compile(r"(_test\.cc|_testing\.h)$")


class Recorded:
    """Collects what tests have reached."""

    def __init__(self):
        self.tests: dict[str, int] = {}
        self.seconds: list[float] = []
        self.failed: set[str] = set()
        self._python: Reached = collections.defaultdict(lambda: collections.defaultdict(set))
        self._blocks: dict[str, dict[int, set[int]]] = {}
        self._binaries: dict[str, Mapping[tuple[str, int], list[int]]] = {}

    def add_test(self, name: str, seconds: float = 0.0, passed: bool = True) -> int:
        """The number of a test; the seconds of all calls for one test are added up."""
        number = self.tests.setdefault(name, len(self.tests))
        if number == len(self.seconds):
            self.seconds.append(0.0)
        self.seconds[number] += seconds
        if not passed and name:
            self.failed.add(name)
        return number

    def add_lines(self, test: int, lines: Mapping[str, Iterable[int]]) -> None:
        """Adds lines of Python files that a test has reached."""
        for file, numbers in lines.items():
            for number in numbers:
                self._python[file][number].add(test)

    def add_blocks(self, test: int, binary: str, blocks: Iterable[int]) -> None:
        """Adds blocks of a library or program that a test has reached."""
        of_binary = self._blocks.setdefault(binary, collections.defaultdict(set))
        for block in blocks:
            of_binary[block].add(test)

    def add_binary(self, binary: str, lines: Mapping[tuple[str, int], list[int]]) -> None:
        """Says which blocks of a library or program belong to a line."""
        self._binaries[binary] = lines

    def cc_lines(self) -> Reached:
        """The lines of the C++ part that have code, but for those of tests."""
        found: Reached = collections.defaultdict(lambda: collections.defaultdict(set))
        for binary, lines in self._binaries.items():
            reached = self._blocks.get(binary, {})
            for (file, line), blocks in lines.items():
                if not _CC_TEST.search(file):
                    tests = found[file][line]
                    for block in blocks:
                        tests |= reached.get(block, set())
        return found

    def python_lines(self, statements: Mapping[str, Iterable[int]]) -> Reached:
        """The lines that begin statements, those that no test has reached too."""
        return {
            file: {line: self._python.get(file, {}).get(line, set()) for line in lines}
            for file, lines in statements.items()
        }

    def line_map(self, statements: Mapping[str, Iterable[int]]) -> dict:
        """The map by line; `statements` has the lines of statements by Python file."""
        tests = [[name, round(self.seconds[i], 3)] for name, i in self.tests.items()]
        return encode(tests, self.python_lines(statements), self.cc_lines())

    def totals(self, statements: Mapping[str, Iterable[int]]) -> dict:
        """How many lines there are and were reached, in all and by file."""
        cc = self.cc_lines()
        programs = {i for name, i in self.tests.items() if name.startswith("cc/")}
        parts = {
            "tf_recsync": _count(self.python_lines(statements)),
            "cc": _count(cc),
            "cc_by_cc_tests": _count(cc, lambda tests: bool(tests & programs)),
            "cc_by_python_tests": _count(cc, lambda tests: bool(tests - programs)),
        }
        python = [i for name, i in self.tests.items() if name and i not in programs]
        return {
            **parts,
            "python_tests": len(python),
            "python_seconds": round(sum(self.seconds[i] for i in python), 1),
            "cc_tests": len(programs),
            "failed": sorted(self.failed),
        }


def _count(reached: Reached, is_reached=bool) -> dict:
    files = {}
    for file in sorted(reached):
        lines = reached[file]
        covered = sum(is_reached(tests) for tests in lines.values())
        files[file] = {"lines": len(lines), "covered": covered}
    lines = sum(file["lines"] for file in files.values())
    covered = sum(file["covered"] for file in files.values())
    percent = round(100 * covered / max(1, lines), 2)
    return {"lines": lines, "covered": covered, "percent": percent, "files": files}


def table(totals: Mapping) -> str:
    """The totals to be read: files with the most lines that no test reaches come first."""
    parts = ("tf_recsync", "cc", "cc_by_cc_tests", "cc_by_python_tests")
    text = [f"{'lines':>8} {'reached':>8} {'percent':>8}"]
    for name in parts:
        part = totals[name]
        text.append(f"{part['lines']:8} {part['covered']:8} {part['percent']:8.2f}  {name}")
    for name in parts[:2]:
        text.append("")
        files = totals[name]["files"].items()
        for file, count in sorted(files, key=lambda f: (f[1]["covered"] - f[1]["lines"], f[0])):
            percent = 100 * count["covered"] / max(1, count["lines"])
            text.append(f"{count['lines']:8} {count['covered']:8} {percent:8.2f}  {file}")
    text += ["", f"{totals['python_tests']} Python tests, {totals['python_seconds']} s"]
    text += [f"{totals['cc_tests']} C++ test programs, {len(totals['failed'])} tests failed"]
    return "\n".join(text) + "\n"


def encode(tests: list, python: Mapping, cc: Mapping) -> dict:
    """A map from sets of test numbers, by file and line or function."""
    sets: dict[tuple[int, ...], int] = {}

    def number_of(members: Iterable[int]) -> int:
        return sets.setdefault(tuple(sorted(members)), len(sets))

    parts = [
        {
            file: {str(key): number_of(members) for key, members in sorted(places.items())}
            for file, places in sorted(part.items())
        }
        for part in (python, cc)
    ]
    distances = [[b - a for a, b in itertools.pairwise((0, *members))] for members in sets]
    return {"tests": tests, "sets": distances, "python": parts[0], "cc": parts[1]}


class Map:
    """A map that was read.

    Attributes:
      seconds: Of each test, by its id.
    """

    def __init__(self, encoded: Mapping):
        self._tests = [name for name, _ in encoded["tests"]]
        self.seconds: dict[str, float] = dict(encoded["tests"])
        self._sets = [frozenset(itertools.accumulate(members)) for members in encoded["sets"]]
        self._places = {**encoded["python"], **encoded["cc"]}

    def files(self) -> list[str]:
        """The files that the map knows."""
        return sorted(self._places)

    def places(self, file: str) -> list[str]:
        """The lines, as text, or functions of a file."""
        return list(self._places.get(file, ()))

    def tests(self, file: str, place: str) -> frozenset[str]:
        """The tests that reach a line or function; none if it is not known."""
        number = self._places.get(file, {}).get(place)
        return (
            frozenset(self._tests[i] for i in self._sets[number])
            if number is not None
            else (frozenset())
        )


def read(path: pathlib.Path) -> Map:
    """Reads a map.

    Raises:
      FileNotFoundError: There is none; says how to record one.
    """
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}; scripts/record_coverage.py records it")
    return Map(json.loads(lzma.decompress(path.read_bytes())))


def write(encoded: Mapping, path: pathlib.Path) -> None:
    """Writes a map."""
    text = json.dumps(encoded, separators=(",", ":")).encode()
    path.write_bytes(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))


def by_function(line_map: Mapping, tree: pathlib.Path) -> dict:
    """The map by function, from that by line.

    Tests of the C++ part are whole Python files there. Lines outside of functions belong to
    the function "".
    """
    tests = [tuple(test) for test in line_map["tests"]]
    sets = [set(itertools.accumulate(members)) for members in line_map["sets"]]
    python = _by_function(line_map["python"], sets, tree, python_functions)
    cc = _by_function(line_map["cc"], sets, tree, cc_functions)
    numbers = {name: number for number, (name, _) in enumerate(tests)}
    seconds: collections.Counter[str] = collections.Counter()
    for name, spent in tests:
        seconds[name.partition("::")[0]] += spent
    for file in seconds:
        if file not in numbers:
            numbers[file] = len(tests)
            tests.append((file, round(seconds[file], 3)))
    module = [numbers[name.partition("::")[0]] for name, _ in tests]
    for places in cc.values():
        for name, members in places.items():
            places[name] = {module[i] for i in members}
    return encode([[name, round(spent, 1)] for name, spent in tests], python, cc)


def _by_function(lines: Mapping, sets: list[set[int]], tree: pathlib.Path, functions) -> dict:
    found: dict[str, dict[str, set[int]]] = {}
    for file, numbers in lines.items():
        name_at = functions((tree / file).read_text())
        found[file] = collections.defaultdict(set)
        for line, number in numbers.items():
            found[file][name_at.get(int(line), "")] |= sets[number]
    return found


def python_functions(source: str, whole: bool = False) -> dict[int, str]:
    """The function that each line of a Python file is in, the innermost one.

    Args:
      source: The file's text.
      whole: Whether the definition's first lines and decorators count, too. They run when the
        function is defined, so tests that reach them need not reach it.
    """
    found: dict[int, str] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                name = f"{prefix}{child.name}"
                if not isinstance(child, ast.ClassDef):
                    decorators = [decorator.lineno for decorator in child.decorator_list]
                    first = min([child.lineno, *decorators]) if whole else child.body[0].lineno
                    found.update((line, name) for line in range(first, child.end_lineno + 1))
                visit(child, f"{name}.")
            else:
                visit(child, prefix)

    visit(ast.parse(source), "")
    return found


def cc_functions(source: str) -> dict[int, str]:
    """The function that each line of a C++ file is in, by the layout of clang-format.

    What begins at the margin, or in a class two further to the right, and ends with a closing
    brace there is one; its name is the text before its first parenthesis.
    """
    found: dict[int, str] = {}
    begun: dict[int, tuple[int, str]] = {}  # By indentation: line, and text.
    holders: dict[int, str] = {}
    for number, text in enumerate(source.splitlines(), 1):
        body = text.lstrip()
        indent = len(text) - len(body)
        if not body or body.startswith(("//", "#", "public:", "private:", "protected:")):
            continue
        if body.startswith("}"):
            if indent in begun and indent not in holders:
                line, name = begun.pop(indent)
                found.update((i, name) for i in range(line, number + 1) if i not in found)
            holders = {i: name for i, name in holders.items() if i < indent}
            begun = {i: start for i, start in begun.items() if i < indent}
            continue
        if any(i < indent for i in begun if i not in holders):
            continue  # In a function.
        begun = {i: start for i, start in begun.items() if i < indent or i in holders}
        name = re.sub(r"\s+", " ", body.partition("(")[0].partition("{")[0]).strip()
        prefix = "".join(f"{holders[i]}::" for i in sorted(holders) if i < indent)
        if re.match(r"(template <.*> )?(class|struct|union|enum|namespace|extern)\b", body) and (
            "(" not in body
        ):
            if body.endswith("{"):
                is_class = re.search(r"\b(?:class|struct|union) (?:[A-Z_]+ )*(\w+)", body)
                holders[indent] = is_class[1] if is_class else ""
                if not is_class:
                    del holders[indent]
                else:
                    begun[indent] = (number, name)
            continue
        if body.endswith("}") or body.endswith(";"):
            if "(" in body:
                found[number] = prefix + name
            continue
        if not body.startswith("template"):
            begun[indent] = (number, prefix + name)
    return found
