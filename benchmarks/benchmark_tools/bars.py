"""Bars: what a figure of a result must reach, and whether it does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from benchmark_tools.text import table

__all__ = ["Bar", "bars_table"]


class Bar(NamedTuple):
    """A figure, and what it must reach.

    Attributes:
        name: What it is.
        limit: The bar; None: there is none, and the figure stands there to compare with.
        value: The figure; None: it was not measured.
        at_most: Whether the figure must not be above the bar, instead of not below.
        where: Where the figure comes from: the case that it is of, or over how many it was taken.
    """

    name: str
    limit: float | None
    value: float | None
    at_most: bool
    where: str

    @property
    def reached(self) -> bool | None:
        """Whether the figure reaches the bar; None: there is no bar, or no figure."""
        if self.value is None or self.limit is None:
            return None
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    @property
    def verdict(self) -> str:
        """The same in words; nothing where there is no bar, or no figure."""
        return {True: "reached", False: "NOT REACHED", None: ""}[self.reached]

    def limit_text(self, show: Callable[[Bar, float], str]) -> str:
        """Write what the figure must reach; nothing where there is no bar."""
        if self.limit is None:
            return ""
        return f"{'<=' if self.at_most else '>='} {show(self, self.limit)}"


def bars_table(
    bars: Iterable[Bar],
    show: Callable[[Bar, float], str],
    *,
    show_limit: Callable[[Bar, float], str] | None = None,
    header: tuple[str, str, str] = ("figure", "bar", "where"),
) -> str:
    """Write a line for each bar: limit, figure, verdict, and where the figure comes from.

    Args:
        bars: The bars.
        show: Writes a bar's figure.
        show_limit: Writes its limit; None: `show` does.
        header: What the columns of names, limits and places are called.
    """
    rows = [
        [
            bar.name,
            bar.limit_text(show_limit or show),
            "not measured" if bar.value is None else show(bar, bar.value),
            bar.verdict,
            bar.where,
        ]
        for bar in bars
    ]
    name, limit, where = header
    return table([name, limit, "value", "", where], rows, left=(0, 3, 4))
