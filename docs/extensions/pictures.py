"""Pictures that are drawn by the code that stands beside them.

In a page::

    ```{picture} bubble
    :alt: What somebody who cannot see the picture should know.
    :caption: What to look at.

    import gpipebal as gb
    ...
    ax = gb.plots.plot_timeline(timeline)
    ```

The code is run by every build. It leaves axes called ``ax``; their figure becomes the picture, and
the code stands below it, to be tried with other numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.docutils import SphinxDirective

FOLDER = "generated/pictures"


def draw(code: str, name: str) -> Any:
    """Run the code of a picture and return the figure that it drew.

    Args:
        code: What stands in the page.
        name: Name of the picture, for errors.

    Raises:
        NameError: the code leaves no ``ax``.
    """
    names: dict[str, Any] = {}
    exec(compile(code, f"picture {name}", "exec"), names)
    if "ax" not in names:
        raise NameError(f"the code of picture {name!r} leaves no axes called ax")
    return names["ax"].figure


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
        self.add_name(figure)
        listing = nodes.literal_block(code, code, language="python")
        return [figure, nodes.paragraph("", "Try it:"), listing, *messages]


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
    """Make ``{picture}`` known to Sphinx."""
    app.add_directive("picture", Picture)
    app.connect("env-get-outdated", _outdated)
    return {"version": "1", "parallel_read_safe": False, "parallel_write_safe": True}
