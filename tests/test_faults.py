"""The faults that scripts/mutation_check.py puts into sources."""

import pathlib
import random
import sys
import textwrap

import pytest

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "scripts"))

import faults  # noqa: E402


def python_edits(body: str) -> set[tuple[str, str]]:
    """(kind, the changed function) of each fault in a function with this body."""
    head = "def f(self, x: int = 1) -> list[int]:\n"
    source = head + textwrap.indent(textwrap.dedent(body), "    ")
    edits = {(fault.kind, fault.apply(source)) for fault in faults.python_faults("f.py", source)}
    for _, changed in edits:
        compile(changed, "f.py", "exec")
    return {(kind, textwrap.dedent(changed.removeprefix(head))) for kind, changed in edits}


@pytest.mark.parametrize(
    "before, expected",
    [
        ("return x < y", {("comparison", "return x <= y")}),
        ("return x is  not None", {("comparison", "return x is None")}),
        ("return (x) not in (y)", {("comparison", "return (x) in (y)")}),
        ("return x or (y)", {("and or", "return x and (y)")}),
        ("return x // y", {("operator", "return x * y")}),
        ("return x * (-y)", {("operator", "return x + (-y)")}),
        ("return 'a%s' % x", set()),
        ("return x ** y", set()),
        ("return x[7]", {("off by one", "return x[8]")}),
        ("return True", set()),
        ("return not (x)", {("negated condition", "return (x)")}),
        ("y = 'ä' + f'{x < 1}'", set()),
        ("y: tuple[int, 3] = x", set()),
        ("raise ValueError(\n    x\n)", {("swallowed error", "pass")}),
        ("self.event.set()", {("dropped notification", "pass")}),
        ("self.event.set(x)", {("dropped statement", "pass")}),
        ("self.x += y", {("dropped statement", "pass")}),
        ("self.x = y", {("dropped statement", "pass")}),
        ("x = y", set()),
        ("logging.info(x)", set()),
        ("'A docstring < 1.'", set()),
    ],
)
def test_a_statement_of_python_can_have_these_faults(before, expected):
    assert python_edits(before) == expected


def test_conditions_are_negated_whole():
    edits = python_edits("if x or g(\n    y\n):\n    pass")
    assert ("negated condition", "if not (x or g(\n    y\n)):\n    pass") in edits


def test_a_lock_is_dropped_but_no_other_context():
    body = "with self._lock, other_mutex:\n    pass"
    assert python_edits(body) == {("dropped lock", "if True:\n    pass")}
    assert python_edits("with open(x):\n    pass") == set()


def test_a_chain_of_comparisons_has_a_fault_for_each():
    assert python_edits("return x < y <= z") == {
        ("comparison", "return x <= y <= z"),
        ("comparison", "return x < y < z"),
    }


def cc_edits(source: str) -> set[tuple[str, str]]:
    """(kind, the changed line) of each fault in a C++ source."""
    found = set()
    for fault in faults.cc_faults("f.cc", source):
        changed = fault.apply(source).splitlines()
        found.add((fault.kind, changed[fault.line - 1].strip()))
    return found


@pytest.mark.parametrize(
    "line, expected",
    [
        (
            "if (x < y) {",
            {("comparison", "if (x <= y) {"), ("negated condition", "if (!(x < y)) {")},
        ),
        ("std::vector<int> x;", set()),
        ("T&& x = F(y);", set()),
        ("template <int N = 1>", set()),
        ("x && y;", {("and or", "x || y;")}),
        ("x = a - b;", {("operator", "x = a + b;"), ("dropped statement", ";")}),
        ("x -= b;", {("operator", "x += b;"), ("dropped statement", ";")}),
        ("const int x = a * b;", {("operator", "const int x = a + b;")}),
        ("int x2 = 0x10 + 1.5f;", {("operator", "int x2 = 0x10 - 1.5f;")}),
        ("int x = 3;", {("off by one", "int x = 4;")}),
        ("return !x;", {("negated condition", "return x;")}),
        ("MutexLock lock(&mu_);", {("dropped lock", ";")}),
        ("changed_.SignalAll();", {("dropped notification", ";")}),
        ("OP_REQUIRES_OK(ctx, Check(x));", {("swallowed error", ";")}),
        ("TF_RETURN_IF_ERROR(Check(x));", {("swallowed error", ";")}),
        (
            "return absl::InvalidArgumentError(x);",
            {("swallowed error", "return absl::OkStatus();")},
        ),
        ("values_.push_back(x);", {("dropped statement", ";")}),
        ("++count_;", {("dropped statement", ";")}),
        ("delete x;", set()),
        ("// x < y && 1", set()),
        ('Log("x < 1");', {("dropped statement", ";")}),
        ("#if x > 1", set()),
        ("#define F(x) \\\n  x < y", set()),
    ],
)
def test_a_line_of_cc_can_have_these_faults(line, expected):
    source = "void F() {\n" + textwrap.indent(line, "  ") + "\n}\n"
    assert cc_edits(source) == expected


def test_a_declaration_that_goes_on_is_no_statement():
    assert cc_edits("void F() {\n  int x =\n      Value(y);\n}\n") == set()


SOURCE = "def f(x):\n    y = x\n    if x < 1:\n        y = 2\n    return y\n"


def fault_in(source: str) -> faults.Fault:
    """The comparison of `SOURCE`."""
    (fault,) = (f for f in faults.python_faults("f.py", source) if f.kind == "comparison")
    return faults.with_context(fault, source)


def test_a_fault_is_found_where_its_lines_have_shifted_and_are_indented():
    fault = fault_in(SOURCE)
    assert (fault.line, fault.column, fault.before, fault.after) == (3, 5, "<", "<=")
    assert faults.locate(fault, SOURCE) == fault
    shifted = "class C:\n\n" + textwrap.indent(SOURCE, "    ")
    found = faults.locate(fault, shifted)
    assert found.line == 5
    assert "        if x <= 1:\n" in found.apply(shifted)


def test_a_fault_is_not_found_where_the_line_its_neighbor_or_the_place_is_another():
    fault = fault_in(SOURCE)
    assert faults.locate(fault, SOURCE.replace("x < 1", "x < 2")) is None
    assert faults.locate(fault, SOURCE.replace("y = x", "y = 0")) is None
    assert faults.locate(fault, SOURCE + SOURCE) is None


def test_lines_further_away_tell_two_places_apart():
    fault = fault_in(SOURCE)
    assert faults.locate(fault, SOURCE.replace("f(x)", "g(x)") + SOURCE).line == 8


def test_faults_are_drawn_once_by_the_seed_with_rare_kinds_among_them():
    many = [faults.Fault("a", line, 0, "<", "<=", "comparison") for line in range(50)]
    many.append(faults.Fault("a", 99, 0, "x", ";", "dropped lock"))
    candidates = {"a": many, "b": [faults.Fault("b", 1, 0, "1", "2", "off by one")]}
    weights = {"a": 10, "b": 1}
    drawn = list(faults.draw(candidates, weights, random.Random(3)))
    assert drawn == list(faults.draw(candidates, weights, random.Random(3)))
    assert sorted(map(hash, drawn)) == sorted(map(hash, [*many, *candidates["b"]]))
    assert "dropped lock" in {fault.kind for fault in drawn[:10]}
