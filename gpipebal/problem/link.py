"""A link between devices, in the words of a user, and what it makes of a profile's sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

from gpipebal.errors import BalanceError
from gpipebal.kinds import check_kind
from gpipebal.problem.checks import plain_number
from gpipebal.problem.parts import Links
from gpipebal.profile import Profile

__all__ = ["Link", "check_link", "links_of"]


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


def check_link(name: str, link: object) -> Link | None:
    """Return a link or None, and refuse all else.

    Raises:
        BalanceError: it is neither.
    """
    if link is None or isinstance(link, Link):
        return link
    raise BalanceError(
        f"{name} is none: {name}={link!r:.60} (expected a Link).\n"
        f"Fix: {name}=Link(bandwidth=16e9), in bytes per second."
    )


def links_of(profile: Profile, link: Link) -> Links:
    """Return what handing one micro-batch over each cut takes.

    A cut is crossed by the output of the layer before it and by all skip connections that go past
    it, each storage once; and backwards by the gradients of those that have something to train
    before them.

    Example:
        >>> profile = Profile.from_costs([1.0, 1.0], output_bytes=[100, 0])
        >>> links_of(profile, Link(bandwidth=50.0)).forward
        (2.0,)
    """
    check_kind("profile", profile, Profile)
    check_kind("link", link, Link, "link=Link(bandwidth=16e9)")
    layers = profile.layers
    trained = list(accumulate((bool(layer.gradient_bytes) for layer in layers), max, initial=False))
    # Costs that were only given do not tell what can be trained.
    known = trained[-1]
    sent, returned = [], []
    for cut in range(1, profile.n_layers):
        forward = set(layers[cut - 1].outputs)
        goes_back = trained[cut] or not known
        backward = set(forward) if goes_back else set()
        further = profile.further_gradients(cut - 1) if goes_back else 0
        for skip in profile.skips:
            if skip.source < cut <= skip.destination:
                forward.update(skip.storages)
                if trained[skip.source + 1] or not known:
                    backward.update(skip.storages)
        sent.append(profile.bytes_of(forward))
        returned.append(profile.gradient_bytes_of(backward) + further)
    there, back = (list(map(link.seconds, sizes)) for sizes in (sent, returned))
    return Links(there, back, link.overlaps)
