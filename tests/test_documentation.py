"""What the documentation promises: docstrings of all public names, and links that lead somewhere.

Nothing is imported, as the sources say it all: so this takes a second or two.
"""

from __future__ import annotations

import ast
import functools
import pathlib
import re
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = "tf_recsync"
PUBLIC_MODULES = [
    "",
    "callbacks",
    "checkpoint",
    "cluster",
    "data",
    "layers",
    "maintenance",
    "metrics",
    "modes",
    "optimizers",
    "placement",
    "serving",
    "staleness",
    "strategies",
    "testing",
    "topology",
]


@functools.cache
def parsed(path: pathlib.Path) -> ast.Module:
    """The tree of a source."""
    return ast.parse(path.read_text())


def source_of(module: str) -> pathlib.Path:
    """The file of a module, given its full name."""
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def names_of(module: str) -> list[str]:
    """What `__all__` of a module says."""
    for node in parsed(source_of(module)).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    raise AssertionError(f"{module} has no __all__")


def definition(module: str, name: str) -> tuple[str, ast.AST] | None:
    """The module that defines a name, and its class or function; None for a module or a value."""
    path = source_of(module)
    if not path.exists():
        return None
    for node in parsed(path).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
            for alias in node.names:
                if (alias.asname or alias.name) == name and node.module != module:
                    return definition(node.module, alias.name)
    return None


def public() -> dict[str, tuple[str, ast.AST]]:
    """All public classes and functions by their names, each once."""
    found: dict[ast.AST, tuple[str, str]] = {}
    for module in PUBLIC_MODULES:
        full = f"{PACKAGE}.{module}".rstrip(".")
        for name in names_of(full):
            defined = definition(full, name)
            if defined is not None:
                found.setdefault(defined[1], (f"{full}.{name}", defined[0]))
    return {name: (module, node) for node, (name, module) in found.items()}


PUBLIC = public()


def docstring(node: ast.AST) -> str:
    return ast.get_docstring(node) or ""


def method(module: str, node: ast.ClassDef, *names: str) -> ast.FunctionDef | None:
    """A method of a class, or of a class of this package that it inherits from."""
    for child in node.body:
        if isinstance(child, ast.FunctionDef) and child.name in names:
            return child
    for base in node.bases:
        defined = definition(module, ast.unparse(base).rpartition(".")[2])
        if defined and isinstance(defined[1], ast.ClassDef):
            inherited = method(*defined, *names)
            if inherited is not None:
                return inherited
    return None


def is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(d) for d in node.decorator_list)


def fields(module: str, node: ast.ClassDef) -> list[str]:
    """The fields of a data class, inherited ones too."""
    found = []
    for base in node.bases:
        defined = definition(module, ast.unparse(base).rpartition(".")[2])
        if defined and isinstance(defined[1], ast.ClassDef):
            found += fields(*defined)
    if is_dataclass(node):
        for child in node.body:
            if isinstance(child, ast.AnnAssign) and "ClassVar" not in ast.unparse(child.annotation):
                if "init=False" not in (ast.unparse(child.value) if child.value else ""):
                    found.append(ast.unparse(child.target))
    return [name for name in dict.fromkeys(found) if not name.startswith("_")]


def arguments(function: ast.FunctionDef) -> list[str]:
    """The names of what a function takes."""
    taken = function.args
    names = [a.arg for a in [*taken.posonlyargs, *taken.args, *taken.kwonlyargs]]
    return [name for name in names if name not in ("self", "cls") and not name.startswith("_")]


def takes(module: str, node: ast.AST) -> list[str]:
    """What a function or the constructor of a class takes."""
    if isinstance(node, ast.FunctionDef):
        return arguments(node)
    constructor = method(module, node, "__init__")
    return arguments(constructor) if constructor else fields(module, node)


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a function but those of functions within it."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            yield child
            yield from own_nodes(child)


def raises(module: str, node: ast.AST) -> bool:
    """Whether a function, or the constructor of a class, raises something itself."""
    if isinstance(node, ast.ClassDef):
        own = [c for c in node.body if isinstance(c, ast.FunctionDef)]
        constructors = [c for c in own if c.name in ("__init__", "__post_init__", "__new__")]
        return any(raises(module, c) for c in constructors)
    return any(isinstance(n, ast.Raise) and n.exc is not None for n in own_nodes(node))


def gives(function: ast.FunctionDef) -> bool:
    """Whether a function returns something."""
    return function.returns is not None and ast.unparse(function.returns) not in (
        "None",
        "NoReturn",
    )


def section(text: str, *titles: str) -> str:
    """A section of a docstring in Google's style, '' if there is none."""
    for title in titles:
        found = re.search(rf"^{title}:\n((?:    .*\n|\n)+)", text + "\n", re.MULTILINE)
        if found:
            return found[1]
    return ""


def missing(module: str, node: ast.AST) -> list[str]:
    """What a docstring lacks."""
    text = docstring(node)
    if not text:
        return ["docstring"]
    lacks = []
    described = section(text, "Args", "Attributes")
    for name in takes(module, node):
        if not re.search(
            rf"^    (?:.*, )?\*?\*?{name}(?:, .*)?(?: \(.*\))?:", described, re.MULTILINE
        ):
            lacks.append(f"Args: {name}")
    if raises(module, node) and not section(text, "Raises"):
        lacks.append("Raises")
    if isinstance(node, ast.FunctionDef) and gives(node) and not section(text, "Returns", "Yields"):
        lacks.append("Returns")
    return lacks
