"""What the documentation promises: docstrings of all public names, and links that lead somewhere.

Nothing is imported, as the sources say it all: so this takes a second or two.
"""

from __future__ import annotations

import ast
import functools
import json
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
    "simulation",
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


def bases(module: str, node: ast.ClassDef) -> list[tuple[str, ast.ClassDef]]:
    """The base classes of a class that are of this package, each with its module."""
    found = (definition(module, ast.unparse(base).rpartition(".")[2]) for base in node.bases)
    return [
        base for base in found if base and isinstance(base[1], ast.ClassDef) and base[1] is not node
    ]


def method(module: str, node: ast.ClassDef, *names: str) -> ast.FunctionDef | None:
    """A method of a class, or of a class of this package that it inherits from."""
    for child in node.body:
        if isinstance(child, ast.FunctionDef) and child.name in names:
            return child
    for base in bases(module, node):
        inherited = method(*base, *names)
        if inherited is not None:
            return inherited
    return None


def is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(d) for d in node.decorator_list)


def fields(module: str, node: ast.ClassDef) -> list[str]:
    """The fields of a data class, inherited ones too."""
    found = []
    for base in bases(module, node):
        found += fields(*base)
    if is_dataclass(node):
        for child in node.body:
            if isinstance(child, ast.AnnAssign) and "ClassVar" not in ast.unparse(child.annotation):
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
        found = re.search(rf"^{title}:\n((?:  .*\n|\n)+)", text + "\n", re.MULTILINE)
        if found:
            return found[1]
    return ""


def lacks(module: str, node: ast.AST) -> list[str]:
    """What a docstring lacks; that of a class may have what it takes in the constructor's."""
    text = docstring(node)
    if not text:
        return ["a docstring"]
    if isinstance(node, ast.ClassDef):
        constructor = method(module, node, "__init__")
        text += "\n\n" + (docstring(constructor) if constructor else "")
    found = []
    described = section(text, "Args", "Attributes")
    for name in takes(module, node):
        if not re.search(
            rf"^ {{2,4}}(?:.*, )?{name}(?:, .*)?(?: \(.*\))?:", described, re.MULTILINE
        ):
            found.append(f"{name} among its Args")
    if raises(module, node) and not section(text, "Raises"):
        found.append("Raises")
    if isinstance(node, ast.FunctionDef) and gives(node) and not section(text, "Returns", "Yields"):
        found.append("Returns")
    return found


def has_example(node: ast.AST) -> bool:
    """Whether a docstring has an example of which the doctests run something."""
    lines = re.findall(r"^ *>>> (.*)$", docstring(node), re.MULTILINE)
    idle = re.compile(r"import |from |.*# doctest: \+SKIP")
    return any(not idle.match(line) for line in lines)


# Names whose docstring has no example that could run by itself, and why.
WITHOUT_EXAMPLE = {
    # What the package returns, and nobody makes; the functions that return it have examples.
    "tf_recsync.callbacks.Publication": "data",
    "tf_recsync.callbacks.SavedCheckpoint": "data",
    "tf_recsync.checkpoint.Saved": "data",
    "tf_recsync.layers.BagRows": "data",
    "tf_recsync.maintenance.Done": "data",
    "tf_recsync.placement.DeviceLoads": "data",
    "tf_recsync.serving.TableVersion": "data",
    "tf_recsync.simulation.Evaluation": "data",
    "tf_recsync.simulation.GroupResult": "data",
    "tf_recsync.simulation.HopResult": "data",
    "tf_recsync.simulation.LinkUse": "data",
    "tf_recsync.simulation.Loss": "data",
    "tf_recsync.simulation.Result": "data",
    "tf_recsync.simulation.Times": "data",
    "tf_recsync.simulation.Utilization": "data",
    "tf_recsync.staleness.Report": "data",
    "tf_recsync.staleness.Statistics": "data",
    "tf_recsync.testing.Use": "data",
    "tf_recsync.testing.Failure": "data that users make; a plain tuple will do",
    "tf_recsync.all_reduce_mean": "only an Algorithm can call it; that class has the example",
    "tf_recsync.use_final_device_names": "must come before anything else that a process does",
    "tf_recsync.testing.FailureSchedule": "kills servers, which takes seconds",
}
# Of these, arguments are not described: nobody makes them.
MADE_BY_THE_PACKAGE = {"tf_recsync.placement.DeviceLoads", "tf_recsync.serving.TableVersion"}


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_name_says_what_it_takes_gives_and_raises(name):
    found = [] if name in MADE_BY_THE_PACKAGE else lacks(*PUBLIC[name])
    assert not found, f"the docstring of {name} lacks {', '.join(found)}"


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_name_has_an_example_that_the_doctests_run(name):
    _, node = PUBLIC[name]
    assert has_example(node) != (name in WITHOUT_EXAMPLE), (
        f"{name} has an example, and needs no exception"
        if has_example(node)
        else f"the docstring of {name} has no example"
    )


def test_exceptions_are_public_names():
    assert PUBLIC.keys() >= WITHOUT_EXAMPLE.keys() | MADE_BY_THE_PACKAGE


def is_abstract_or_override(module: str, node: ast.ClassDef, name: str) -> bool:
    """Whether a base class says what a method is: one of another package, or one of this one."""
    if len(bases(module, node)) < len(node.bases):
        return True
    for defined in bases(module, node):
        inherited = method(*defined, name)
        if (inherited and docstring(inherited)) or is_abstract_or_override(*defined, name):
            return True
    return False


def test_public_methods_have_docstrings_or_override_some_that_have():
    lacking = [
        f"{name}.{child.name}"
        for name, (module, node) in PUBLIC.items()
        if isinstance(node, ast.ClassDef)
        for child in node.body
        if isinstance(child, ast.FunctionDef) and not child.name.startswith("_")
        # A serialized object's two methods are Keras's.
        if child.name not in ("get_config", "from_config")
        if not docstring(child) and not is_abstract_or_override(module, node, child.name)
    ]
    assert not lacking


def documents() -> list[pathlib.Path]:
    """All pages, and the documents at the top of the repository."""
    return sorted([*ROOT.glob("*.md"), *pages()])


def pages() -> list[pathlib.Path]:
    """All pages of the site: Markdown and notebooks."""
    return [path for path in (ROOT / "docs").rglob("*") if path.suffix in (".md", ".ipynb")]


def text_of(document: pathlib.Path) -> str:
    """A document as Markdown; of a notebook its cells of text."""
    if document.suffix == ".md":
        return document.read_text()
    cells = json.loads(document.read_text())["cells"]
    return "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


def without_code(text: str) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(document: pathlib.Path) -> set[str]:
    """What links to a page's headings are called, as a code host and the site make them."""
    headings = re.findall(r"^#+ (.*)$", without_code(text_of(document)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(document: pathlib.Path) -> list[str]:
    """The links of a page within the repository."""
    found = re.findall(r"\]\(([^)\s]+)\)", without_code(text_of(document)))
    return [link for link in found if not re.match(r"[a-z]+:", link)]


def test_links_between_documents_lead_to_files_and_headings_that_exist():
    dead = []
    for document in documents():
        for link in links(document):
            path, _, anchor = link.partition("#")
            target = (document.parent / path).resolve() if path else document
            if not target.exists() or (anchor and anchor not in anchors(target)):
                dead.append(f"{document.relative_to(ROOT)}: {link}")
    assert not dead


def test_documents_that_the_code_names_exist():
    names = set()
    for folder in ("tf_recsync", "examples", "benchmarks", "scripts", "cc", "tests"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".cc", ".h", ".sh"):
                names |= set(re.findall(r"\bdocs/\w+\.md\b", path.read_text()))
    assert names
    assert not [name for name in sorted(names) if not (ROOT / name).exists()]


def test_every_page_is_in_the_contents_of_the_site():
    listed = {ROOT / "docs" / "index"}
    for page in pages():
        for contents in re.findall(r"```{toctree}\n(.*?)```", text_of(page), re.DOTALL):
            names = [line for line in contents.split("\n") if line and not line.startswith(":")]
            listed |= {page.parent / name for name in names}
    assert {page.with_suffix("") for page in pages()} == listed


def test_the_reference_has_every_public_name():
    pages = "".join(p.read_text() for p in (ROOT / "docs" / "reference").glob("*.md"))
    modules = set(re.findall(r"^\.\. automodule:: (\S+)$", pages, re.MULTILINE))
    single = re.findall(r"^\.\. auto(?:class|function):: (\S+)$", pages, re.MULTILINE)
    covered = {f"{module}.{name}" for module in modules for name in names_of(module)} | set(single)
    nodes = {PUBLIC[name][1] for name in covered & PUBLIC.keys()}
    nodes |= {found[1] for name in covered if (found := definition(*name.rsplit(".", 1)))}
    assert not [name for name, (_, node) in PUBLIC.items() if node not in nodes]


def members_shown(page: pathlib.Path) -> dict[str, set[str]]:
    """What a page of the reference shows of each class that it names: a list, or all."""
    shown = {}
    found = re.findall(
        r"^\.\. autoclass:: (\S+)(\n   :members:.*)?$", page.read_text(), re.MULTILINE
    )
    for name, option in found:
        _, _, listed = option.partition(":members:")
        shown[name] = {member.strip() for member in listed.split(",")} - {""}
        if option and not shown[name]:
            _, node = definition(*name.rsplit(".", 1))
            own = (child for child in node.body if isinstance(child, ast.FunctionDef))
            shown[name] = {child.name for child in own if not child.name.startswith("_")}
    return shown


def test_lists_of_members_in_the_reference_name_what_there_is_and_are_heeded():
    pages = list((ROOT / "docs" / "reference").glob("*.md"))
    lists = re.findall(
        r"^\.\. autoclass:: (\S+)\n   :members: (.+)$",
        "".join(page.read_text() for page in pages),
        re.MULTILINE,
    )
    assert lists
    for name, listed in lists:
        _, node = definition(*name.rsplit(".", 1))
        own = {child.name for child in node.body if isinstance(child, ast.FunctionDef)}
        assert set(listed.split(", ")) <= own, name
    # Sphinx takes a default in the place of lists.
    assert not re.search(r"^    .members.:", (ROOT / "docs" / "conf.py").read_text(), re.MULTILINE)
    for page in pages:
        modules = re.findall(r"^\.\. automodule:: .*\n(.*)$", page.read_text(), re.MULTILINE)
        assert set(modules) <= {"   :members:"}, page


def test_the_reference_has_what_pages_use_of_strategies():
    shown = members_shown(ROOT / "docs" / "reference" / "strategies.md")
    users = [page for page in pages() if page.stem != "internals"]
    used = set(re.findall(r"\bstrategy\.(\w+)", "".join(page.read_text() for page in users)))
    assert "staleness" in used
    # TensorFlow's own.
    assert used - set().union(*shown.values()) == {"scope"}


def test_the_first_program_of_the_site_is_that_of_the_readme():
    (program,) = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.S | re.M
    )
    assert f"```python\n{program}```" in (ROOT / "docs" / "index.md").read_text()


def test_the_changelog_begins_with_the_version_of_the_package():
    (version,) = re.findall(r'^__version__ = "(.*)"$', source_of(PACKAGE).read_text(), re.MULTILINE)
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first[1] == version
