"""How the documentation is built: ``python -m sphinx -W --keep-going docs build/docs``.

It needs no network: links into other projects' documentation come from `inventories`, pictures are
drawn by the code beside them (`extensions/directives.py`), and figures in the text come from the
stored results of the benchmarks (`extensions/stored_results.py`).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(HERE / "extensions"))

from benchmark_pages import write_pages  # noqa: E402
from link_inventories import write_inventories  # noqa: E402
from stored_results import figures  # noqa: E402

import gpipebal  # noqa: E402

GENERATED = HERE / "generated"

project = "gpipebal"
author = "the gpipebal authors"
copyright = "the gpipebal authors"
release = version = gpipebal.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "myst_parser",
    "directives",
]
exclude_patterns = ["extensions", "inventories"]

# Markdown: terms with definitions, figures from stored results, links to headings.
myst_enable_extensions = ["deflist", "substitution"]
myst_heading_anchors = 3
myst_substitutions = figures()

# Names in single backticks are links where they name something that has a page.
default_role = "py:obj"
add_module_names = False
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "imported-members": True}
autodoc_typehints = "signature"
autodoc_preserve_defaults = True  # as they are written
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = ["Complexity", "Source"]

# Each inventory lies here as text, so that the build needs no network.
intersphinx_mapping = write_inventories(HERE / "inventories", GENERATED / "inventories")

html_theme = "furo"
html_title = f"gpipebal {release}"
html_show_sphinx = False

write_pages(HERE.parent / "benchmarks", GENERATED / "benchmarks")

# What names in docstrings and signatures are called where they are documented.
ALIASES = {
    "Axes": "matplotlib.axes.Axes",
    "Figure": "matplotlib.figure.Figure",
    "nn.Module": "torch.nn.Module",
    "nn.Sequential": "torch.nn.Sequential",
    "pd.DataFrame": "pandas.DataFrame",
    "torch.cuda.streams.Stream": "torch.cuda.Stream",
    "torch.nn.modules.container.Sequential": "torch.nn.Sequential",
    "torch.nn.modules.module.Module": "torch.nn.Module",
    "torch.optim.optimizer.Optimizer": "torch.optim.Optimizer",
}


def _follow_alias(app: Any, env: Any, node: Any, content: Any) -> Any:
    """Look for a name under the one that it is documented by: `solve` is `gpipebal.solve`."""
    target = node.get("reftarget", "")
    if target in ALIASES:
        # Intersphinx, which comes next, finds it.
        node["reftarget"] = ALIASES[target]
    elif node.get("refdomain") == "py":
        # `GPipe.step`, and what a docstring names by the module where it is defined.
        parts = target.split(".")
        for k, part in enumerate(parts):
            if part in gpipebal.__all__:
                name = ".".join(["gpipebal", *parts[k:]])
                domain, page = env.domains["py"], node.get("refdoc")
                return domain.resolve_xref(env, page, app.builder, "obj", name, node, content)
    return None


# `Layer`s and `.saved` are no markup of reStructuredText: a plural needs a separator, and a name
# that begins with a point would be looked for everywhere.
_PLURAL = re.compile(r"(?<![`:])(`[^\s`](?:[^`\n]*[^\s`])?`)(?=\w)")
_MEMBER = re.compile(r"(?<![`:])`(\.[\w.]+)`(?!`)")


def _as_markup(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Make markup of a docstring that is written to be read in an editor, too."""
    if what in ("property", "attribute") and lines:
        # Else what stands before the colon is taken for a type.
        lines[0] = lines[0].replace(": ", ", ", 1)
    lines[:] = [_PLURAL.sub(r"\1\\ ", _MEMBER.sub(r"``\1``", line)) for line in lines]


def _skip_fields(app: Any, what: str, name: str, thing: Any, skip: bool, options: Any) -> bool:
    """Leave out the fields of named tuples: the class's docstring explains them."""
    return skip or type(thing).__name__ == "_tuplegetter"


def setup(app: Any) -> None:
    """Connect the above with Sphinx; what has priority 400 comes before its own extensions."""
    app.connect("autodoc-process-docstring", _as_markup, priority=400)
    app.connect("autodoc-skip-member", _skip_fields)
    app.connect("missing-reference", _follow_alias, priority=400)
