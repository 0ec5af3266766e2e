"""One moment of a step, in bytes by what they are for."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Moment", "height"]


class Moment(NamedTuple):
    """Bytes at one moment of a step, in addition to parameters, buffers and optimizer state."""

    activations: int
    gradients: int = 0
    transient: int = 0
    outputs: int = 0
    waiting: int = 0


def height(moment: Moment) -> tuple[int, int]:
    """Order moments by their sum; of equal ones, the one with more activations comes later."""
    return sum(moment), moment.activations
