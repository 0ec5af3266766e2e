"""Text: aligned columns for a terminal, and lists in a sentence."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from dataclasses import fields
from typing import Any

__all__ = ["aligned", "either", "is_whole", "one_line", "short_repr"]

#: A text longer than this fills more than a page.
_LONG = 4000

#: Characters that would end a line in the middle of a cell, steer a terminal (control characters of
#: 7 and of 8 bits), or reverse the text that follows (Unicode's bidirectional controls).
_BREAKS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]+")


def one_line(text: str) -> str:
    r"""Replace line breaks, and all else that does not belong in a line, by spaces.

    Example:
        >>> one_line("a\nb")
        'a b'
    """
    return _BREAKS.sub(" ", text)


def is_whole(text: str) -> bool:
    r"""Whether a text can be written to a file: not if it has a half of a character.

    Example:
        >>> is_whole("äö"), is_whole("\ud800")
        (True, False)
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def aligned(
    rows: Sequence[Sequence[str]], left: Collection[int] = (0,), gap: str = "  "
) -> list[str]:
    """Write rows of cells as lines, each column as wide as its widest cell.

    Args:
        rows: Rows of equally many cells, the headings first.
        left: Columns whose cells begin at the left; the others end at the right, as numbers do.
        gap: Text between two columns.

    Returns:
        One line per row, without spaces at its end; breaks of lines in cells are spaces. Wide
        characters take two places of a terminal, and accents that are characters of their own none.

    Example:
        >>> aligned([["layer", "time"], ["a", "12.0 ms"]])
        ['layer     time', 'a      12.0 ms']
    """
    rows = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(map(_width, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        padded = []
        for k, (cell, width) in enumerate(zip(row, widths, strict=True)):
            space = " " * (width - _width(cell))
            padded.append(cell + space if k in left else space + cell)
        lines.append(gap.join(padded).rstrip())
    return lines


def either(names: Iterable[str]) -> str:
    """List names, one or more, of which one is to be chosen.

    Example:
        >>> either(["gpipe", "1f1b", "zb_h1"])
        'gpipe, 1f1b or zb_h1'
    """
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def _width(text: str) -> int:
    """Count the places that a text takes in a terminal."""
    if text.isascii():
        return len(text)
    marks = ("Mn", "Me", "Cf")
    taking = [each for each in text if unicodedata.category(each) not in marks or each == "\xad"]
    return len(taking) + sum(unicodedata.east_asian_width(each) in "WF" for each in taking)


def short_repr(noun: Any) -> str:
    """Show the fields of a dataclass; where they would fill more than a page, its first line.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(repr=False)
        ... class Costs:
        ...     layers: list[int]
        ...     __repr__ = short_repr
        ...     def __str__(self):
        ...         return f"Costs of {len(self.layers)} layers"
        >>> Costs([1, 2]), Costs([1] * 5000)
        (Costs(layers=[1, 2]), <Costs of 5000 layers>)
    """
    parts = [f"{item.name}={getattr(noun, item.name)!r}" for item in fields(noun) if item.repr]
    whole = f"{type(noun).__name__}({', '.join(parts)})"
    return whole if len(whole) <= _LONG else f"<{str(noun).partition(chr(10))[0]}>"
