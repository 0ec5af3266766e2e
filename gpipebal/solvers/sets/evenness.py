"""The most even of the splits that keep all limits, when nothing is known about what is allowed.

The same choice as in `gpipebal.solvers.tiebreak.choose`, for problems with memory limits, links,
rules or different devices: least sum of squared partition times, then leftmost cuts. A table over
cuts and places, from the right, restricted to places that lie on some split; all ends of all starts
of a cut are compared at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isqrt

import numpy as np

from gpipebal.solvers.sets.levels import Step
from gpipebal.solvers.sets.reachability import Path, Search
from gpipebal.solvers.sets.runs import Option

__all__ = ["most_even"]

#: Larger than any sum of squares.
_NEVER = np.int64(2**62)

#: For each partition: up to so many runs, on the average, are compared with exact numbers.
_MOST_RUNS = 30

#: A run of one level: first layer, end, and the step that runs it.
_Run = tuple[int, int, Step]


def most_even(search: Search, limits: Mapping[str, int]) -> Path | None:
    """Find the leftmost split with the least sum of squared partition times.

    Minimises over all splits that keep `limits`; among the minimisers, takes the
    lexicographically smallest bounds. Times are rounded down to a common unit, so small that the
    largest possible time has as many units as fit, about 2**28: sums of squares are then machine
    integers. Small integers are not rounded. Among the splits that rounding leaves so close that it
    may have decided, exact numbers decide, unless these splits have more than 30 runs for each
    partition.

    Raises:
        TimeIsUpError: the search has no time left.

    Complexity:
        O(w l) for windows of w places in all and partitions of up to l layers.

    Example:
        >>> from gpipebal.problem import Problem
        >>> from gpipebal.solvers.sets.levels import Levels
        >>> search = Search(Levels(Problem([1] * 5, [0] * 5, [0] * 5, 2)))
        >>> most_even(search, {"load": 4}).bounds
        (0, 2, 5)
    """
    found = search.reachable(limits)
    if found is None:
        return None
    _, reached = found
    levels = search.levels
    roomy = isqrt(int(_NEVER) // (4 * levels.n_partitions))
    costs = [option.load for kind in search.used for option in levels.kinds[kind]]
    largest = max(max(cost.ends) - min(cost.starts) for cost in costs)
    shift = max(0, largest.bit_length() - roomy.bit_length() + 1)

    # For each bound and state: places, and the least sum of squares from there on.
    squares: list[dict[int, dict[int, int]]] = [{0: {levels.n_layers: 0}}]
    choices: list[dict[tuple[int, int], tuple[int, Step]]] = []
    for k in range(levels.n_partitions - 1, -1, -1):  # k: partition
        search.check_time()
        here: dict[int, dict[int, int]] = {}
        chosen: dict[tuple[int, int], tuple[int, Step]] = {}
        for step in levels.steps[k]:
            starts = _members(reached[k].get(step.state, 0))
            after = squares[-1].get(step.next_state)
            if not starts or not after:
                continue
            ends = np.array(sorted(after))
            behind = np.array([after[end] for end in ends.tolist()], dtype=np.int64)
            loads = _loads(levels.kinds[step.kind], starts, ends, limits, shift)
            totals = np.where(loads >= 0, loads * loads + behind, _NEVER)
            places = totals.argmin(axis=1)
            best = totals[np.arange(len(starts)), places]
            known = here.setdefault(step.state, {})
            for start, place, total in zip(starts, places.tolist(), best.tolist(), strict=True):
                if total < _NEVER and (
                    start not in known
                    or (total, ends[place]) < (known[start], chosen[step.state, start][0])
                ):
                    known[start] = total
                    chosen[step.state, start] = int(ends[place]), step
        squares.append(here)
        choices.append(chosen)
    path = search.follow(choices, limits)
    if shift:
        kept = _runs_within_rounding(search, path, squares, limits, shift)
        path = path if kept is None else _best_of(search, kept, limits)
    return path


def _runs_within_rounding(
    search: Search,
    path: Path,
    squares: Sequence[Mapping[int, Mapping[int, int]]],
    limits: Mapping[str, int],
    shift: int,
) -> list[list[_Run]] | None:
    """List the runs of splits that may be better than one with the least rounded squares.

    A time is less than one unit above the rounded one, so the squares of the given path exceed the
    rounded ones by less than the sum of twice the rounded times and one. No split whose rounded
    squares exceed those of the path by that is better.

    Returns:
        The runs of each partition; None if they are too many.
    """
    levels, n = search.levels, search.levels.n_partitions
    more = sum(2 * (_time(option, start, end) >> shift) + 1 for option, start, end in path.runs)
    most = squares[-1][0][0] + more
    kept: list[list[_Run]] = []
    # By state and place: the least rounded squares up to there.
    before: dict[int, dict[int, int]] = {0: {0: 0}}
    n_kept = 0
    for k in range(n):
        search.check_time()
        reached: dict[int, dict[int, int]] = {}
        kept.append([])
        for step in levels.steps[k]:
            known, after = before.get(step.state), squares[n - 1 - k].get(step.next_state)
            if not known or not after:
                continue
            starts, ends = sorted(known), np.array(sorted(after))
            loads = _loads(levels.kinds[step.kind], starts, ends, limits, shift)
            so_far = np.array([known[start] for start in starts])[:, None] + loads * loads
            behind = np.array([after[end] for end in ends.tolist()])
            places = np.argwhere((loads >= 0) & (so_far + behind <= most))
            n_kept += len(places)
            if n_kept > _MOST_RUNS * n:
                return None
            here = reached.setdefault(step.next_state, {})
            for row, column in places.tolist():
                end, total = int(ends[column]), int(so_far[row, column])
                here[end] = min(here.get(end, total), total)
                kept[-1].append((starts[row], end, step))
        before = reached
    return kept


def _best_of(search: Search, kept: list[list[_Run]], limits: Mapping[str, int]) -> Path:
    """Find the best split that consists of some runs, with exact numbers."""
    totals: dict[tuple[int, int], int] = {(0, search.levels.n_layers): 0}
    choices: list[dict[tuple[int, int], tuple[int, Step]]] = []
    for runs in reversed(kept):
        here: dict[tuple[int, int], int] = {}
        chosen: dict[tuple[int, int], tuple[int, Step]] = {}
        for start, end, step in runs:
            behind = totals.get((step.next_state, end))
            if behind is None:
                continue
            path = search.path((start, end), [step], limits)
            total = _time(path.options[0], start, end) ** 2 + behind
            key = step.state, start
            if key not in here or (total, end) < (here[key], chosen[key][0]):
                here[key], chosen[key] = total, (end, step)
        totals = here
        choices.append(chosen)
    return search.follow(choices, limits)


def _time(option: Option, start: int, end: int) -> int:
    """Return the time of a run, without the link to it."""
    return option.load.ends[end] - option.load.starts[start]


def _members(places: int) -> list[int]:
    """List the places of a set.

    Example:
        >>> _members(0b1101)
        [0, 2, 3]
    """
    return [place for place, digit in enumerate(bin(places)[:1:-1]) if digit == "1"]


def _loads(
    options: list[Option],
    starts: list[int],
    ends: np.ndarray,
    limits: Mapping[str, int],
    shift: int,
) -> np.ndarray:
    """Return the rounded time of each run on its fastest option; -1 where none is allowed."""
    loads = np.full((len(starts), len(ends)), -1, dtype=np.int64)
    last = int(ends[-1])
    # The fastest option is the first that is allowed, so it is written last.
    for option in reversed(options):
        masks = [option.fits[start] for start in starts]
        for dimension, limit in limits.items():
            around = range(starts[0], starts[-1] + 1)
            (within,) = getattr(option, dimension).within(limit, (around,))
            places = [start - around.start for start in starts]
            masks = [mask & within[at] for mask, at in zip(masks, places, strict=True)]
        n_bytes = last // 8 + 1
        low = (1 << (8 * n_bytes)) - 1
        raw = b"".join((mask & low).to_bytes(n_bytes, "little") for mask in masks)
        table = np.frombuffer(raw, dtype=np.uint8).reshape(len(starts), n_bytes)
        flags = np.unpackbits(table, axis=1, bitorder="little")[:, ends].astype(bool)
        cost = option.load
        base = min(cost.starts[starts[0]], cost.ends[ends[0]])
        heads = [cost.starts[start] - base for start in starts]
        tails = [cost.ends[end] - base for end in ends.tolist()]
        if shift == 0 and max(*heads, *tails) < 2**62:
            of_run = np.array(tails, dtype=np.int64) - np.array(heads, dtype=np.int64)[:, None]
        else:
            exact = np.array(tails, dtype=object) - np.array(heads, dtype=object)[:, None]
            of_run = (exact >> shift).astype(np.int64)
        loads = np.where(flags, of_run, loads)
    return loads
