"""Configuration of Sphinx: `make docs` builds the site into build/docs, without network."""

from __future__ import annotations

import pathlib
import re
import sys

from sphinx.application import Sphinx

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import tf_recsync  # noqa: E402

project = "tf_recsync"
author = "The authors of tf_recsync"
project_copyright = author
version = release = tf_recsync.__version__

extensions = [
    "myst_nb",  # Markdown as myst_parser has it, and notebooks.
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["pictures"]
root_doc = "index"
highlight_language = "text"  # Of blocks that name none.

# Pages are Markdown, which a code host shows, too.
myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]
myst_links_external_new_tab = False

# Notebooks are shown with the outputs that they have; scripts/run_tutorials.py runs them.
nb_execution_mode = "off"

# Docstrings are in Google's style. What stands in single backticks is code, and a link where it
# names something that the reference has.
default_role = "py:obj"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
# Not "members": it would take the place of the lists that pages have.
autodoc_default_options = {
    "imported-members": True,
    "show-inheritance": True,
}
autodoc_member_order = "groupwise"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_inherit_docstrings = False  # Keras's and TensorFlow's documentation has theirs.
autoclass_content = "both"  # Some describe arguments in the constructor.
python_maximum_signature_line_length = 88
add_module_names = False

html_theme = "furo"
html_title = f"tf_recsync {version}"
html_static_path = []
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
pygments_dark_style = "github-dark"

# Pages whose text is that of a file elsewhere in the repository. In docs/ each is a link to it, for
# those who read the folder itself.
TEXT_OF = {
    "benchmark_results": "benchmarks/results.md",
    "changelog": "CHANGELOG.md",
    "contributing": "CONTRIBUTING.md",
}


def _with_text_of_files(app: Sphinx, page: str, source: list[str]) -> None:
    """Puts in the texts of `TEXT_OF`, and has links to these files lead to their pages."""
    if page in TEXT_OF:
        folder = pathlib.PurePosixPath(TEXT_OF[page]).parent
        source[0] = re.sub(
            r"\]\((?![a-z]+:|#)([^)]+)\)",
            lambda link: f"]({_from_docs(folder / link[1])})",
            (ROOT / TEXT_OF[page]).read_text(),
        )
    for name, file in TEXT_OF.items():
        up = "../" * (page.count("/") + 1)
        source[0] = source[0].replace(f"]({up}{file}", f"]({'../' * page.count('/')}{name}.md")
    source[0] = source[0].replace("](../README.md", "](index.md")


def _from_docs(path: pathlib.PurePosixPath) -> str:
    """A path from the repository's root, as a path from docs/."""
    text = str(path)
    return text.removeprefix("docs/") if text.startswith("docs/") else f"../{text}"


def _with_fences(
    app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]
) -> None:
    """Makes blocks of code of what docstrings have between fences, as Markdown has them."""
    indent: int | None = None  # Of the fence, within a block.
    for number, line in enumerate(lines):
        stripped = line.strip()
        if stripped.startswith("```"):
            if indent is None:
                indent = len(line) - len(line.lstrip())
                language = stripped.removeprefix("```") or "text"
                lines[number] = f"{' ' * indent}.. code-block:: {language}\n"
            else:
                indent = None
                lines[number] = ""
        elif indent is not None and line:
            lines[number] = "    " + line
    # "`Tensor`s" is written as Markdown has it; reStructuredText needs something in between.
    plural = re.compile(r"(?<![\w`])(`[^`]+`)(?=[A-Za-z])")
    lines[:] = [
        part if part.lstrip().startswith((">>>", "...")) else plural.sub(r"\1\\ ", part)
        for line in lines
        for part in line.split("\n")
    ]


def setup(app: Sphinx) -> None:
    """Sphinx calls this once."""
    app.connect("source-read", _with_text_of_files)
    app.connect("autodoc-process-docstring", _with_fences, priority=100)  # Before napoleon.
