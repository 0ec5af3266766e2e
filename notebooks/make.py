"""Run every notebook from top to bottom, and write it with its outputs beside its text.

The text (``NN-name.py``, in jupytext's percent format) is what is edited; the ``.ipynb`` is made
from it:

    pip install '.[notebooks]'
    python notebooks/make.py            # all of them
    python notebooks/make.py 03 05      # some
"""

from __future__ import annotations

import base64
import io
import sys
import time
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from PIL import Image

HERE = Path(__file__).parent


def smaller(picture: str) -> str:
    """Store a picture with 128 colours: a third of the bytes, and no difference to see."""
    with Image.open(io.BytesIO(base64.b64decode(picture))) as image:
        small = image.convert("RGB").quantize(128, dither=Image.Dither.NONE)
    buffer = io.BytesIO()
    small.save(buffer, format="PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def joined(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put what was printed in a row into one output: in how many pieces it came is chance."""
    found: list[dict[str, Any]] = []
    for output in outputs:
        last = found[-1] if found else {}
        if output["output_type"] == "stream" and last.get("name") == output["name"]:
            last["text"] += output["text"]
        else:
            found.append(output)
    return found


def tidy(notebook: NotebookNode) -> None:
    """Take out what changes from run to run without saying anything: it makes diffs large."""
    for k, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{k}"
        cell.get("metadata", {}).pop("execution", None)
        if "outputs" in cell:
            cell["outputs"] = joined(cell["outputs"])
    notebook.metadata.pop("language_info", None)
    # The one that ran it may have another name on each machine.
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata["kernelspec"] = kernel


def main(chosen: list[str]) -> None:
    """Make the notebooks whose names begin with one of these; none: all."""
    texts = sorted(HERE.glob("[0-9][0-9]-*.py"))
    for start in chosen:
        if not any(path.name.startswith(start) for path in texts):
            names = ", ".join(path.stem for path in texts)
            sys.exit(f"no notebook's name begins with {start!r}.\nFix: one of {names}.")
    for path in texts:
        if chosen and not path.name.startswith(tuple(chosen)):
            continue
        started = time.perf_counter()
        notebook = jupytext.read(path)
        NotebookClient(notebook, timeout=600, resources={"metadata": {"path": HERE}}).execute()
        for cell in notebook.cells:
            for output in cell.get("outputs", ()):
                data = output.get("data", {})
                if "image/png" in data:
                    data["image/png"] = smaller(data["image/png"])
        tidy(notebook)
        target = path.with_suffix(".ipynb")
        nbformat.write(notebook, target)
        seconds, size = time.perf_counter() - started, target.stat().st_size / 1024
        print(f"{target.name}: {len(notebook.cells)} cells, {seconds:.0f} s, {size:.0f} KiB")


if __name__ == "__main__":
    main(sys.argv[1:])
