"""Other people's rules, from their own packages, each with a limit of seconds."""

from __future__ import annotations

import contextlib
import io
import signal
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

#: Takes costs and a number of partitions; returns the number of layers in each.
Peer = Callable[[Sequence[int], int], list[int]]
NAMES = ("torchgpipe", "deepspeed")


class TooSlowError(Exception):
    """A rule did not end in time."""


def peers() -> dict[str, Peer]:
    """Return the rules that are installed."""
    found: dict[str, Peer] = {}
    # Both talk while they are imported.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(ImportError):
        from torchgpipe.balance import balance_cost

        found["torchgpipe"] = lambda costs, n: list(balance_cost(list(costs), n))
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(ImportError):
        from deepspeed.runtime.utils import partition_balanced

        def deepspeed(costs: Sequence[int], n: int) -> list[int]:
            bounds = [int(place) for place in partition_balanced(list(costs), n)]
            return [end - start for start, end in pairwise(bounds)]

        found["deepspeed"] = deepspeed
    return found


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TooSlowError in what runs longer; in the main thread only."""

    def stop(*_: Any) -> None:
        raise TooSlowError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
