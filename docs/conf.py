"""Settings of Sphinx for the documentation site, which tools/build_docs.py builds."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import cuda_ext

project = "cuda_ext"
release = cuda_ext.__version__
copyright = "cuda_ext contributors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]

myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # a heading after one two levels above: fine on GitHub, and here

default_role = "literal"  # `name` in a docstring, as in the Markdown pages
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autoclass_content = "class"
napoleon_numpy_docstring = False
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"cuda_ext {release}"
html_copy_source = False
html_show_sphinx = False


def mark_programs(app, what, name, obj, options, lines):
    """Indented lines after a line that starts at the margin are a program, as they look in a terminal."""
    marked = []
    for number, line in enumerate(lines):
        before = next((text for text in reversed(marked) if text), "")
        starts = line.startswith("    ") and number > 0 and not lines[number - 1]
        if starts and before and not before.startswith(" ") and not before.endswith("::"):
            marked += ["::", ""]
        marked.append(line)
    lines[:] = marked


def setup(app):
    app.connect("autodoc-process-docstring", mark_programs, priority=100)  # before napoleon adds indented lines
