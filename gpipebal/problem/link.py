"""A link between devices as a user describes it, and what handing over takes at each cut."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from gpipebal.argument_kinds import check_kind, plain_number
from gpipebal.errors import BalanceError
from gpipebal.problem.checks import check_flag, check_times
from gpipebal.profile import Profile

__all__ = ["Link", "Links", "check_link", "links_of"]


@dataclass(frozen=True)
class Link:
    """The connection of two neighbouring devices; every pair of neighbours has its own.

    Attributes:
        bandwidth: Bytes per second in one direction; `math.inf` where size does not matter.
        latency: Seconds that every copy takes in addition, whatever its size.
        overlaps: Whether copies run at the same time as the computation, as between GPUs. If not,
            each copy keeps the sender busy, and then the receiver, as copies through the host's
            memory do.

    Raises:
        BalanceError: a bandwidth that is not above 0, a latency that is not a time, or `overlaps`
            that is no bool.

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
                f"bandwidth is not above 0: bandwidth={self.bandwidth!r:.60} (expected bytes per "
                "second).\nFix: bandwidth=12e9 for 12 GB/s, say."
            )
        if not 0 <= plain_number(self.latency) <= sys.float_info.max:
            raise BalanceError(
                f"latency is not a time: latency={self.latency!r:.60} (expected seconds, 0 or "
                "more).\nFix: latency=0.0."
            )
        object.__setattr__(self, "overlaps", check_flag("overlaps", self.overlaps))

    def seconds(self, n_bytes: int) -> float:
        """Return the seconds of a copy; a copy of nothing takes none."""
        return self.latency + n_bytes / self.bandwidth if n_bytes else 0.0


@dataclass(frozen=True)
class Links:
    """What it takes to hand one micro-batch from one partition to the next.

    Entry ``p - 1`` belongs to the cut before layer ``p``: there is one entry fewer than there are
    layers. What skip connections carry across a cut is included.

    Attributes:
        forward: Time to pass on what crosses each cut.
        backward: Time to pass its gradient back.
        overlaps: Whether copies run at the same time as the computation. If they do, every cut is a
            machine of its own: it makes one copy at a time, and micro-batches queue for it as they
            do for a device. If they do not, each copy keeps the sender busy, and then the receiver:
            it is added to the times of both, as where data passes through the host's memory.

    Raises:
        BalanceError: a time that is negative, infinite, or no number; `overlaps` that is no bool.
        KindError: times that are not a list.

    Example:
        >>> Links([1.5, 3.5], [1.5, 3.5]).forward
        (1.5, 3.5)
    """

    forward: Sequence[float]
    backward: Sequence[float]
    overlaps: bool = True

    def __post_init__(self) -> None:
        for name in ("forward", "backward"):
            object.__setattr__(self, name, check_times(name, getattr(self, name), "cut"))
        object.__setattr__(self, "overlaps", check_flag("overlaps", self.overlaps))


def check_link(name: str, link: object) -> Link | None:
    """Return a link or None, and refuse any other value.

    Raises:
        BalanceError: the value is neither.
    """
    if link is None or isinstance(link, Link):
        return link
    raise BalanceError(
        f"{name} is not valid: {name}={link!r:.60} (expected a Link).\n"
        f"Fix: {name}=Link(bandwidth=16e9), in bytes per second."
    )


def links_of(profile: Profile, link: Link) -> Links:
    """Return the time that handing one micro-batch over takes at each cut.

    A cut is crossed by the output of the layer before it and by all skip connections that go past
    it, each storage once. In the other direction it is crossed by the gradients of those values
    that depend on a trained layer.

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
