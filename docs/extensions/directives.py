"""Directives of the documentation: pictures, help of commands, constants.

A picture is drawn by the code that stands beside it::

    ```{picture} bubble
    :alt: What somebody who cannot see the picture should know.
    :caption: What to look at.

    import gpipebal as gb
    ...
    ax = gb.plots.plot_timeline(timeline)
    ```

The code is run by every build. It leaves axes called ``ax``; their figure becomes the picture, and
the code stands below it, to be tried with other numbers.

``{command-help} run`` shows what the command prints. ``{constants} gpipebal.schedule`` lists what
stands in ``__all__`` and is neither class, function nor module: autodoc finds that only where it is
defined.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from content import comment_of, constants_of, draw, help_of, text_of
from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.docutils import SphinxDirective

FOLDER = "generated/pictures"


class Picture(SphinxDirective):
    """Run code, show the picture, and show the code."""

    required_arguments = 1
    has_content = True
    option_spec = {  # noqa: RUF012
        "alt": directives.unchanged_required,
        "caption": directives.unchanged_required,
    }

    def run(self) -> list[nodes.Node]:
        """Return the picture, its caption and its code."""
        from gpipebal.plots import save_figure

        name, code = self.arguments[0], "\n".join(self.content)
        folder = Path(self.env.srcdir) / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        try:
            save_figure(draw(code, name), folder / f"{name}.svg")
        except Exception as error:
            raise self.error(f"picture {name!r} cannot be drawn: {error!r}") from error
        pages_with_pictures(self.env).add(self.env.docname)
        figure = nodes.figure("", nodes.image(uri=f"/{FOLDER}/{name}.svg", alt=self.options["alt"]))
        caption, messages = self.parse_inline(self.options["caption"])
        figure += nodes.caption("", "", *caption)
        listing = nodes.literal_block(code, code, language="python")
        return [figure, nodes.paragraph("", "Try it:"), listing, *messages]


class CommandHelp(SphinxDirective):
    """Show the help of a command; without a name, that of gpipebal itself."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the text."""
        text = help_of(self.arguments[0] if self.arguments else "")
        return [nodes.literal_block(text, text, language="text")]


class Constants(SphinxDirective):
    """List the constants of a module."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return an entry for each constant."""
        module = self.arguments[0]
        lines = ["```{eval-rst}"]
        for name, value in constants_of(module).items():
            comment = re.sub(r"(?<!`)`([^`]+)`(?=\w)", r"`\1`\\ ", comment_of(module, name))
            text = text_of(value)
            lines += [f".. py:data:: {name}", f"   :module: {module}", ""]
            lines += [f"   {comment}", ""] if comment else []
            lines += [f"   ``{text}``", ""] if text else []
        return self.parse_text_to_nodes("\n".join([*lines, "```"]))


def pages_with_pictures(env: BuildEnvironment) -> set[str]:
    """Return the names of the pages that have pictures."""
    if not hasattr(env, "gpipebal_pictures"):
        env.gpipebal_pictures = set()
    pages: set[str] = env.gpipebal_pictures
    return pages


def _outdated(app: Sphinx, env: BuildEnvironment, *_: object) -> list[str]:
    """Draw all pictures again: what draws them may have changed, though the page did not."""
    return sorted(pages_with_pictures(env) & env.found_docs)


def setup(app: Sphinx) -> dict[str, Any]:
    """Make the directives known to Sphinx."""
    app.add_directive("picture", Picture)
    app.add_directive("command-help", CommandHelp)
    app.add_directive("constants", Constants)
    app.connect("env-get-outdated", _outdated)
    return {"version": "1", "parallel_read_safe": False, "parallel_write_safe": True}
