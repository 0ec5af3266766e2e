"""Text: columns that stand below each other, for a terminal."""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = ["aligned"]


def aligned(
    rows: Sequence[Sequence[str]], left: Collection[int] = (0,), gap: str = "  "
) -> list[str]:
    """Write rows of cells as lines, each column as wide as its widest cell.

    Args:
        rows: Rows of equally many cells, the headings first.
        left: Columns whose cells begin at the left; the others end at the right, as numbers do.
        gap: What stands between two columns.

    Returns:
        One line per row, without spaces at its end.

    Example:
        >>> aligned([["layer", "time"], ["a", "12.0 ms"]])
        ['layer     time', 'a      12.0 ms']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        gap.join(
            cell.ljust(width) if k in left else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
