"""The ways to use a number of devices, and the micro-batches to try for each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from gpipebal.plan.checks import check_chunks
from gpipebal.profile import Profile

__all__ = ["divisors", "sized_profiles"]

#: Most numbers of micro-batches that are tried for each number of replicas.
_MOST_CANDIDATES = 20


def divisors(number: int) -> list[int]:
    """Return what divides a number, in ascending order.

    Example:
        >>> divisors(12)
        [1, 2, 3, 4, 6, 12]
    """
    small = [k for k in range(1, math.isqrt(number) + 1) if number % k == 0]
    return sorted({*small, *(number // k for k in small)})


def sized_profiles(
    profile: Profile, replicas: int, chunks: int | str | Sequence[int] | None
) -> Iterator[Profile]:
    """Yield the profile of the replica that has most rows, for each size of micro-batches to try.

    Args:
        profile: Costs of the layers.
        replicas: How many share the mini-batch.
        chunks: Micro-batches of each; None: as many as the profile's rows of one need.
    """
    share = -(-profile.mini_batch_rows // replicas)
    for rows, count in _sizes_to_try(profile, share, chunks):
        sized = profile.at_rows(rows, mini_batch_rows=share)
        yield sized if count is None else replace(sized, chunks=count)


def _sizes_to_try(
    profile: Profile, share: int, chunks: int | str | Sequence[int] | None
) -> Iterator[tuple[int, int | None]]:
    """Yield the rows of a micro-batch and the number of micro-batches, for a replica's rows.

    None: the profile's own, or as many as those rows need.
    """
    if chunks is None:
        yield min(profile.rows, share), None
        return
    if chunks != "auto":
        several = chunks if isinstance(chunks, (list, tuple, range)) else (chunks,)
        counts = dict.fromkeys(min(check_chunks(one), share) for one in several)
        yield from ((-(-share // count), count) for count in counts)
        return
    sizes = [profile.rows, *(other.rows for other in profile.other_sizes)]
    found = {-(-share // number) for number in range(1, share + 1)}
    known = [rows for rows in found if min(sizes) <= rows <= max(sizes)]
    known = sorted(known or [min(profile.rows, share)], reverse=True)
    # Spread over all of them where they are many.
    step = max(1, -(-len(known) // _MOST_CANDIDATES))
    yield from ((rows, -(-share // rows)) for rows in known[::step])
