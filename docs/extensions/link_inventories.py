"""Links into the documentation of other projects, without a network.

An inventory tells Sphinx where the documentation of a name stands. The published ones are large and
have to be fetched; those in ``inventories/*.txt`` list only the names that are used here. The first
line of a file is the address that the others continue::

    https://docs.pytorch.org/docs/stable/
    torch.nn.Module class generated/torch.nn.Module.html
"""

from __future__ import annotations

import zlib
from pathlib import Path

HEADER = """\
# Sphinx inventory version 2
# Project: {}
# Version:
# The remainder of this file is compressed using zlib.
"""


def read_inventory(path: Path) -> tuple[str, list[tuple[str, str, str]]]:
    """Return the address, and of each name its kind (class, function, ...) and its page."""
    address, *lines = path.read_text(encoding="utf-8").split("\n")
    entries = [line.split(" ") for line in lines if line]
    return address, [(name, kind, page) for name, kind, page in entries]


def write_inventories(folder: Path, out: Path) -> dict[str, tuple[str, str]]:
    """Write all inventories in the form that Sphinx reads; return its setting for them."""
    out.mkdir(parents=True, exist_ok=True)
    mapping = {}
    for path in sorted(folder.glob("*.txt")):
        address, entries = read_inventory(path)
        # The anchor on the page is the name: Sphinx writes that as $.
        lines = "".join(f"{name} py:{kind} 1 {page}#$ -\n" for name, kind, page in entries)
        target = out / f"{path.stem}.inv"
        target.write_bytes(HEADER.format(path.stem).encode() + zlib.compress(lines.encode()))
        mapping[path.stem] = (address, str(target))
    return mapping
