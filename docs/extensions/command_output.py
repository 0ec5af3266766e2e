"""Help texts of the command line, as the command prints them.

In a page::

    ```{command-help} run
    ```
"""

from __future__ import annotations

import io
import os
from contextlib import redirect_stdout, suppress
from typing import Any
from unittest import mock

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


def help_of(command: str) -> str:
    """Return what ``gpipebal COMMAND --help`` prints on a terminal of 80 columns."""
    from gpipebal.cli import main

    text = io.StringIO()
    words = [*command.split(), "--help"]
    with mock.patch.dict(os.environ, COLUMNS="80"), redirect_stdout(text), suppress(SystemExit):
        main(words)
    return f"$ gpipebal {' '.join(words)}\n{text.getvalue().rstrip()}"


class CommandHelp(SphinxDirective):
    """Show the help of a command; without a name, that of gpipebal itself."""

    optional_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Return the text."""
        text = help_of(self.arguments[0] if self.arguments else "")
        return [nodes.literal_block(text, text, language="text")]


def setup(app: Sphinx) -> dict[str, Any]:
    """Make ``{command-help}`` known to Sphinx."""
    app.add_directive("command-help", CommandHelp)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
