"""What the scripts have in common: their options, and what becomes of a result."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from benchmark_tools.text import write_readme

__all__ = ["is_same_file", "parser_of", "publish"]


def parser_of(doc: str | None, stored: Path) -> argparse.ArgumentParser:
    """Make a parser with the options that all have: the result file, and only the tables.

    Args:
        doc: The script's docstring; its first line is the description.
        stored: The file whose result the README shows.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=stored, help="result file (%(default)s)")
    parser.add_argument("--readme", action="store_true", help="only write the README's tables")
    return parser


def publish(out: Path, stored: Path, blocks: Mapping[str, str]) -> None:
    """Print the first block of a result, and put all of them into the README beside `stored`.

    The README is left alone if `out` is another file: a trial is no result to publish.
    """
    print(next(iter(blocks.values())))
    if is_same_file(out, stored):
        write_readme(stored.with_name("README.md"), blocks, stored.name)


def is_same_file(one: Path, other: Path) -> bool:
    """Whether two paths lead to the same file, which need not exist."""
    return one.resolve() == other.resolve()
