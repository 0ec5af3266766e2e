"""Tables of text, and their place in a README."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from gpipebal.files import atomic_path
from gpipebal.text import aligned

__all__ = [
    "Column",
    "block",
    "columns",
    "fill_in",
    "gib",
    "other_load",
    "percent",
    "percent_or_unknown",
    "section",
    "signed",
    "table",
    "write_readme",
]

Row = TypeVar("Row")
#: A column of a table: its heading, and what a row has there.
Column = tuple[str, Callable[[Row], str]]


def fill_in(text: str, blocks: Mapping[str, str], source: str = "results.json") -> str:
    """Put blocks between the marks of a README.

    A mark is ``<!-- NAME: results.json -->`` before, ``<!-- end of NAME -->`` after it. `source`
    is the file that the blocks are made from.

    Raises:
        ValueError: a mark is not there, or more than once.

    Example:
        >>> fill_in("a <!-- x: results.json -->old<!-- end of x --> b", {"x": "new"}).split()
        ['a', '<!--', 'x:', 'results.json', '-->', 'new', '<!--', 'end', 'of', 'x', '-->', 'b']
    """
    for name, content in blocks.items():
        begin, end = f"<!-- {name}: {source} -->", f"<!-- end of {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"expected the marks {begin!r} and {end!r} once each")
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{content}\n{end}{rest.split(end)[1]}"
    return text


def write_readme(path: Path, blocks: Mapping[str, str], source: str = "results.json") -> None:
    """Put blocks into a README file; see `fill_in`."""
    text = fill_in(path.read_text(encoding="utf-8"), blocks, source)
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def block(text: str) -> str:
    """Set text off as it is.

    Example:
        >>> block("a b").split()
        ['```', 'a', 'b', '```']
    """
    return f"```\n{text}\n```"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[int] = ()) -> str:
    """Write columns of equal width; those in `left` begin at the same place, others end there.

    Example:
        >>> print(table(["name", "n"], [["a", "10"], ["bc", "5"]], left=[0]))
        name   n
        a     10
        bc     5
    """
    return "\n".join(aligned([header, *rows], left))


def columns(
    rows: Iterable[Row], described: Sequence[Column[Row]], *, left: Sequence[int] = ()
) -> str:
    """Write a line for each row, by a description of the columns: see `table`.

    Example:
        >>> print(columns([3, 12], [("n", str), ("n * n", lambda n: str(n * n))]))
         n  n * n
         3      9
        12    144
    """
    lines = [[cell(row) for _, cell in described] for row in rows]
    return table([heading for heading, _ in described], lines, left=left)


def section(heading: str, text: str) -> str:
    """Set text off as it is, under a heading."""
    return f"### {heading}\n\n{block(text)}"


def gib(n_bytes: float | None) -> str:
    """Write bytes in GiB, to a hundredth; None is a dash.

    Example:
        >>> gib(3 * 2**29), gib(None)
        ('1.50', '-')
    """
    return "-" if n_bytes is None else f"{n_bytes / 2**30:.2f}"


def percent(fraction: float | None) -> str:
    """Write a fraction to a tenth of a percent; None is a dash.

    Example:
        >>> percent(0.125), percent(-0.0001), percent(None)
        ('12.5%', '0.0%', '-')
    """
    return "-" if fraction is None else _unsigned_zero(f"{fraction:.1%}")


def signed(fraction: float | None) -> str:
    """Write the same so that over is told from under.

    Example:
        >>> signed(0.02), signed(-0.02), signed(-0.0001)
        ('+2.0%', '-2.0%', '0.0%')
    """
    return "-" if fraction is None else _unsigned_zero(f"{fraction:+.1%}")


def _unsigned_zero(text: str) -> str:
    """Take the sign off what rounds to nothing."""
    return text.lstrip("+-") if float(text[:-1]) == 0 else text


def percent_or_unknown(fraction: float | None) -> str:
    """Write a fraction to a tenth of a percent; None is unknown, as the load of others may be.

    Example:
        >>> percent_or_unknown(0.0123), percent_or_unknown(None)
        ('1.2 %', 'unknown')
    """
    return "unknown" if fraction is None else f"{100 * fraction:.1f} %"


def other_load(share: float | None) -> str:
    """Write what `machine.OtherLoad` found, for a README's *Environment*."""
    return f"other programs' share of the cores meanwhile: {percent_or_unknown(share)}"
