"""Small faults in sources of Python and C++: where there could be some, and finding them again."""

from __future__ import annotations

import ast
import dataclasses
import random
import re
from collections.abc import Iterator, Sequence

_CONTEXT = 3  # Lines that are compared before and after a fault when it is looked for.

_COMPARISONS = {
    **{"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="},
    **{"is": "is not", "is not": "is", "in": "not in", "not in": "in"},
}
_COMPARISON_TEXT = re.compile(r"(not\s+in|is\s+not|<=|>=|==|!=|<|>|in|is)")
_ARITHMETIC = {"+": "-", "-": "+", "*": "+", "/": "*", "//": "*", "%": "+"}
_LOCK = re.compile(r"lock|mutex|condition|changed|making|pausing|asking|building|opening", re.I)
_NOTIFIES = ("notify", "notify_all", "set")
_NOT_DROPPED = ("logging", "warnings", "print")  # Whose calls nobody needs to notice.


@dataclasses.dataclass(frozen=True)
class Fault:
    """A change of a source.

    Attributes:
      file: The path in the tree.
      line: The line at which the changed text begins, from 1.
      column: Its place in the line, counted from the line's indentation.
      before: The text that is replaced; may have several lines.
      after: What replaces it.
      kind: What the fault is.
      context: The lines around those of the fault, without indentation: the `_CONTEXT` before,
        those of the fault itself, and the `_CONTEXT` after.
    """

    file: str
    line: int
    column: int
    before: str
    after: str
    kind: str
    context: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]] = ((), (), ())

    def apply(self, source: str) -> str:
        """The source with the fault."""
        start = _offset(source, self.line, self.column)
        end = start + len(self.before)
        if not self.is_in(source):
            raise ValueError(f"{self.file}:{self.line} does not have {self.before!r}")
        return source[:start] + self.after + source[end:]

    def is_in(self, source: str) -> bool:
        """Whether the text to be replaced is at its place."""
        return source.startswith(self.before, _offset(source, self.line, self.column))


def with_context(fault: Fault, source: str) -> Fault:
    """The fault with the lines around it."""
    return dataclasses.replace(fault, context=_context(fault, source.splitlines(), fault.line))


def locate(fault: Fault, source: str) -> Fault | None:
    """The fault in another version of its file, where lines may have shifted.

    Returns:
      None if nowhere the fault's own lines and one line before and after them are alike, or if
      they are at several places that can't be told apart.
    """
    lines = source.splitlines()
    before, own, after = fault.context
    places = []
    for line in range(1, len(lines) - len(own) + 2):
        there = _context(fault, lines, line)
        if there[1] != own or there[0][-1:] != before[-1:] or there[2][:1] != after[:1]:
            continue
        alike = sum(a == b for a, b in zip(before[::-1], there[0][::-1], strict=False))
        alike += sum(a == b for a, b in zip(after, there[2], strict=False))
        places.append((alike, line))
    places.sort(reverse=True)
    if not places or (len(places) > 1 and places[0][0] == places[1][0]):
        return None
    found = dataclasses.replace(fault, line=places[0][1])
    return found if found.is_in(source) else None


def python_faults(file: str, source: str) -> list[Fault]:
    """The faults that a Python file could have, in its functions."""
    found = []
    visitor = _PythonFaults(source)
    visitor.visit(ast.parse(source))
    for start, end, after, kind in visitor.found:
        found.append(_fault(file, source, start, end, after, kind))
    return found


class _PythonFaults(ast.NodeVisitor):
    """Collects (start, end, what replaces it, kind) of faults, as offsets in the text."""

    def __init__(self, source: str):
        self.found: list[tuple[int, int, str, str]] = []
        self._source = source
        self._lines = source.encode().splitlines(keepends=True)
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._functions = 0

    def _at(self, line: int, column: int) -> int:
        return self._starts[line - 1] + len(self._lines[line - 1][:column].decode())

    def _start(self, node: ast.AST) -> int:
        return self._at(node.lineno, node.col_offset)

    def _end(self, node: ast.AST) -> int:
        return self._at(node.end_lineno, node.end_col_offset)

    def _add(self, start: int, end: int, after: str, kind: str) -> None:
        if self._functions:
            self.found.append((start, end, after, kind))

    def _text(self, node: ast.AST) -> str:
        return self._source[self._start(node) : self._end(node)]

    def _replace(self, node: ast.AST, after: str, kind: str) -> None:
        self._add(self._start(node), self._end(node), after, kind)

    def visit_FunctionDef(self, node):
        self._functions += 1  # Not decorators, annotations and defaults.
        body = node.body
        if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            body = body[1:]
        for statement in body:
            self.visit(statement)
        self._functions -= 1

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_AnnAssign(self, node):
        if node.value is not None:
            self.visit(node.value)

    def visit_JoinedStr(self, node):
        """Nothing in a text is changed."""

    def visit_Compare(self, node):
        left = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            del operator
            start, end = self._end(left), self._start(right)
            match = _COMPARISON_TEXT.search(self._source, start, end)
            if match:
                after = _COMPARISONS[" ".join(match[0].split())]
                self._add(*match.span(), after, "comparison")
            left = right
        self.generic_visit(node)

    def visit_BoolOp(self, node):
        for left, right in zip(node.values, node.values[1:], strict=False):
            match = re.compile(r"\b(and|or)\b").search(
                self._source, self._end(left), self._start(right)
            )
            if match:
                self._add(*match.span(), "or" if match[0] == "and" else "and", "and or")
        self.generic_visit(node)

    def visit_BinOp(self, node):
        texts = [ast.JoinedStr, ast.List, ast.Tuple]
        is_text = any(
            isinstance(side, tuple(texts))
            or (isinstance(side, ast.Constant) and isinstance(side.value, str))
            for side in (node.left, node.right)
        )
        start, end = self._end(node.left), self._start(node.right)
        match = re.compile(r"//|[-+*/%](?![*])").search(self._source, start, end)
        if match and not is_text and "**" not in self._source[start:end]:
            self._add(*match.span(), _ARITHMETIC[match[0]], "operator")
        self.generic_visit(node)

    def visit_UnaryOp(self, node):
        if isinstance(node.op, ast.Not):
            self._replace(node, self._text(node)[3:].lstrip(), "negated condition")
        self.generic_visit(node)

    def visit_If(self, node):
        self._replace(node.test, f"not ({self._text(node.test)})", "negated condition")
        self.generic_visit(node)

    visit_IfExp = visit_If

    def visit_Constant(self, node):
        if isinstance(node.value, int) and not isinstance(node.value, bool):
            self._replace(node, str(node.value + 1), "off by one")

    def visit_With(self, node):
        if all(
            item.optional_vars is None and _LOCK.search(self._text(item.context_expr))
            for item in node.items
        ):
            end = self._end(node.items[-1].context_expr)
            self._add(self._start(node), end, "if True", "dropped lock")
        self.generic_visit(node)

    def visit_Raise(self, node):
        self._replace(node, "pass", "swallowed error")

    def visit_Expr(self, node):
        call = node.value
        if isinstance(call, ast.Constant):
            return
        if isinstance(call, ast.Call):
            function = self._text(call.func)
            is_notification = (
                isinstance(call.func, ast.Attribute)
                and call.func.attr in _NOTIFIES
                and not call.args
            )
            if is_notification:
                self._replace(node, "pass", "dropped notification")
            elif not function.startswith(_NOT_DROPPED):
                self._replace(node, "pass", "dropped statement")
        self.generic_visit(node)

    def visit_AugAssign(self, node):
        self._replace(node, "pass", "dropped statement")
        self.generic_visit(node)

    def visit_Assign(self, node):
        if all(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets):
            self._replace(node, "pass", "dropped statement")
        self.generic_visit(node)


_CC_SPACED = re.compile(r"(?<= )(<=|>=|==|!=|&&|\|\||\+=|-=|<|>|\+|-|\*|/|%)(?= |$)", re.M)
_CC_OPERATORS = {
    **{op: ("comparison", other) for op, other in _COMPARISONS.items() if not op[0].isalpha()},
    **{op: ("operator", other) for op, other in _ARITHMETIC.items() if op != "//"},
    **{"&&": ("and or", "||"), "||": ("and or", "&&")},
    **{"+=": ("operator", "-="), "-=": ("operator", "+=")},
}
_CC_INTEGER = re.compile(r"(?<![\w.'])(\d+)(?![\w.'])")
_CC_LOCK = re.compile(
    r"^ +(?:\w+::)*(?:MutexLock|ExclusiveLocks|tf_shared_lock|RowLock|"
    r"(?:lock_guard|unique_lock)<[^>]*>) \w+[({][^;]*[)}];",
    re.M,
)
_CC_NOTIFY = re.compile(
    r"^ +[\w.\[\]()>-]+(?:\.|->)(?:Signal|SignalAll|notify_one|notify_all)\(\);", re.M
)
_CC_CHECK = re.compile(
    r"^ +(?:OP_REQUIRES(?:_OK)?(?:_ASYNC)?|TF_RETURN_IF_ERROR|RETURN_IF_ERROR)\([^;]*;", re.M
)
_CC_ERROR = re.compile(
    r"\breturn (?:tensorflow::|absl::|errors::)+\w*(?:Error|InvalidArgument|"
    r"FailedPrecondition|Unavailable|NotFound|Aborted|Internal)\([^;]*;"
)
_CC_IF = re.compile(r"\bif \(")
_CC_NOT = re.compile(r"(?<=[( ])!(?=[\w(])")
_CC_CALL = re.compile(r"^ +[A-Za-z_][\w.:\[\]]*(?:->[\w.:\[\]]+)*\([^;]*\);$", re.M)
_CC_ASSIGN = re.compile(r"^ +\*?[A-Za-z_][\w.\[\]]*(?:->[\w.\[\]]+)* [-+*/|&]?= [^;]*;$", re.M)
_CC_STEP = re.compile(r"^ +(?:\+\+|--)[\w.\[\]>-]+;$", re.M)
_CC_BEFORE_STATEMENT = (";", "{", "}", ":")


def mask_cc(source: str) -> str:
    """C++ with blanks for all that is no code: comments, texts, and the preprocessor's lines."""
    pattern = re.compile(
        r"//[^\n]*|/\*.*?\*/|R\"(?P<mark>\w*)\(.*?\)(?P=mark)\"|\"(?:\\.|[^\"\\\n])*\""
        r"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*",
        re.S | re.M,
    )
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), source)


def cc_faults(file: str, source: str) -> list[Fault]:
    """The faults that a C++ file, formatted by clang-format, could have."""
    code = mask_cc(source)
    found = []
    for start, end, after, kind in _cc_faults(code, source):
        text = code[source.rfind("\n", 0, start) + 1 : (source + "\n").index("\n", start)]
        if not re.match(r" *(template|using|static_assert|class|struct|enum)\b", text):
            found.append(_fault(file, source, start, end, after, kind))
    return found


def _cc_faults(code: str, source: str) -> Iterator[tuple[int, int, str, str]]:
    for match in _CC_SPACED.finditer(code):
        if "operator" not in code[max(0, match.start() - 10) : match.start()]:
            kind, after = _CC_OPERATORS[match[0]]
            yield *match.span(), after, kind
    for match in _CC_INTEGER.finditer(code):
        yield *match.span(), str(int(match[0]) + 1), "off by one"
    for match in _CC_NOT.finditer(code):
        yield *match.span(), "", "negated condition"
    for match in _CC_IF.finditer(code):
        end = _closing(code, match.end() - 1)
        condition = source[match.end() : end]
        if end > 0 and ";" not in code[match.end() : end]:
            yield match.end(), end, f"!({condition})", "negated condition"
    for match in _CC_ERROR.finditer(code):
        yield *match.span(), "return absl::OkStatus();", "swallowed error"
    taken = set()
    for pattern, kind in (
        (_CC_LOCK, "dropped lock"),
        (_CC_NOTIFY, "dropped notification"),
        (_CC_CHECK, "swallowed error"),
        (_CC_STEP, "dropped statement"),
        (_CC_ASSIGN, "dropped statement"),
        (_CC_CALL, "dropped statement"),
    ):
        for match in pattern.finditer(code):
            start = match.start() + len(match[0]) - len(match[0].lstrip())
            word = re.match(r"\w*", code[start:])[0]
            if (
                start in taken
                or word in ("return", "delete", "throw", "using", "if", "for", "while", "switch")
                or not code[: match.start()].rstrip().endswith(_CC_BEFORE_STATEMENT)
            ):
                continue
            taken.add(start)
            yield start, match.end(), ";", kind


def _closing(code: str, opening: int) -> int:
    depth = 0
    for place in range(opening, len(code)):
        depth += (code[place] == "(") - (code[place] == ")")
        if depth == 0:
            return place
    return -1


def draw(
    candidates: dict[str, Sequence[Fault]], weights: dict[str, int], random_: random.Random
) -> Iterator[Fault]:
    """Draws faults without an end, each once, and one for a line at most.

    A file is drawn in proportion to its weight, then a kind of fault among those that it could
    have, so that there are rare kinds, too, then one of these.
    """
    left = {file: list(faults) for file, faults in candidates.items() if faults}
    while left:
        files = sorted(left)
        (file,) = random_.choices(files, [max(1, weights.get(file, 1)) for file in files])
        kind = random_.choice(sorted({fault.kind for fault in left[file]}))
        fault = random_.choice([fault for fault in left[file] if fault.kind == kind])
        left[file] = [other for other in left[file] if other.line != fault.line]
        if not left[file]:
            del left[file]
        yield fault


def _fault(file: str, source: str, start: int, end: int, after: str, kind: str) -> Fault:
    line = source.count("\n", 0, start) + 1
    column = start - _offset(source, line, 0)
    return Fault(file, line, column, source[start:end], after, kind)


def _offset(source: str, line: int, column: int) -> int:
    """Where in the text a place is; the column is counted from the indentation."""
    start = 0
    for _ in range(line - 1):
        start = source.index("\n", start) + 1
    while source[start : start + 1] == " ":
        start += 1
    return start + column


def _context(fault: Fault, lines: Sequence[str], line: int) -> tuple:
    end = line + fault.before.count("\n")
    parts = (
        lines[max(0, line - 1 - _CONTEXT) : line - 1],
        lines[line - 1 : end],
        lines[end : end + _CONTEXT],
    )
    return tuple(tuple(text.strip() for text in part) for part in parts)
