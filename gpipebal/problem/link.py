"""A link between devices, in the words of a user: bandwidth, latency, and whether it overlaps."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gpipebal.errors import BalanceError
from gpipebal.problem.checks import plain_number

__all__ = ["Link"]


@dataclass(frozen=True)
class Link:
    """What connects two neighbouring devices; every two of them have one of these.

    Attributes:
        bandwidth: Bytes per second in one direction; `math.inf` where size does not matter.
        latency: Seconds that a copy takes whatever its size.
        overlaps: Whether copies run beside the computation, as between GPUs. If not, each copy
            keeps the sender busy, and then the receiver, as through the host's memory.

    Raises:
        BalanceError: a bandwidth that is not above 0, or a latency that is no time.

    Example:
        >>> Link(bandwidth=16e9, latency=10e-6).seconds(16_000_000)
        0.00101
    """

    bandwidth: float
    latency: float = 0.0
    overlaps: bool = True

    def __post_init__(self) -> None:
        if not plain_number(self.bandwidth) > 0:
            raise BalanceError(
                f"bandwidth is not above 0: bandwidth={self.bandwidth!r} (expected bytes per "
                "second).\nFix: bandwidth=12e9 for 12 GB/s, say."
            )
        if not 0 <= plain_number(self.latency) < math.inf:
            raise BalanceError(
                f"latency is not a time: latency={self.latency!r} (expected seconds, 0 or more).\n"
                "Fix: latency=0.0."
            )
        if not isinstance(self.overlaps, bool):
            raise BalanceError(
                f"overlaps is neither true nor false: overlaps={self.overlaps!r} (expected a "
                "bool).\nFix: overlaps=True for copies that run beside the computation."
            )

    def seconds(self, n_bytes: int) -> float:
        """Return the time of a copy; of nothing, none."""
        return self.latency + n_bytes / self.bandwidth if n_bytes else 0.0
