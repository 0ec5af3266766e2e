"""Bars: what a figure of a result must reach, and whether it does."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Bar"]


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
