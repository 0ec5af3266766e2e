"""Brute force over everything that a problem leaves open: cuts, modes, orders of devices.

Shares no code with what it checks: times are Fractions, and the makespan comes from simulating
every action of every device and every link.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from itertools import pairwise, permutations, product
from typing import Any, NamedTuple

from oracles import all_bounds

from gpipebal.problem import Problem

__all__ = ["Candidate", "candidates", "keeps_rules", "makespan_of"]


class Candidate(NamedTuple):
    """A split with modes and an order of devices, and what splits are ranked by."""

    makespan: Fraction
    bottleneck: Fraction
    squares: Fraction
    bounds: tuple[int, ...]
    peak: int
    modes: tuple[str, ...]
    order: tuple[int, ...]


def candidates(problem: Problem) -> Iterator[Candidate]:
    """Enumerate all that is allowed."""
    n = problem.n_partitions
    orders = list(permutations(range(n))) if problem.any_order else [tuple(range(n))]
    if problem.checkpoint == "auto":
        # Without memory to save, nothing is faster than to recompute nothing.
        some = ("never", "except_last", "always") if problem.memory else ("never", "except_last")
        modes: list[Any] = list(product(some, repeat=n))
    elif isinstance(problem.checkpoint, str):
        modes = [(problem.checkpoint,) * n]
    else:
        modes = [tuple(problem.checkpoint)]
    for bounds in all_bounds(problem.n_layers, n):
        if not keeps_rules(problem, bounds):
            continue
        for order, mode in product(orders, modes):
            peaks = _peaks(problem, bounds, mode)
            limits = [problem.devices[d].memory_limit if problem.devices else None for d in order]
            pairs = zip(peaks, limits, strict=True)
            if any(limit is not None and (p is None or p > limit) for p, limit in pairs):
                continue
            yield _candidate(problem, bounds, mode, order, max((p or 0 for p in peaks), default=0))


def keeps_rules(problem: Problem, bounds: tuple[int, ...]) -> bool:
    """Whether a split keeps the rules of a problem."""
    rules = problem.rules
    if rules is None:
        return True
    cuts = set(bounds[1:-1])
    together = all(not cuts & set(range(one + 1, two + 1)) for one, two in rules.keep_together)
    pinned = all(bounds[j] <= layer < bounds[j + 1] for layer, j in rules.pinned)
    lengths = [end - start for start, end in pairwise(bounds)]
    short = rules.max_layers is None or max(lengths) <= rules.max_layers
    short = short and (rules.min_layers is None or min(lengths) >= rules.min_layers)
    return not cuts & set(rules.no_cut) and together and pinned and short


def _peaks(problem: Problem, bounds: tuple[int, ...], modes: Any) -> list[int | None]:
    if problem.memory is None:
        return [None] * problem.n_partitions
    peaks: list[int | None] = []
    for j, (start, end) in enumerate(pairwise(bounds)):
        row = problem.memory.rows(start, j, modes[j])
        peaks.append(int(row[end - start - 1]) if end - start <= len(row) else None)
    return peaks


def _candidate(
    problem: Problem, bounds: tuple[int, ...], modes: Any, order: tuple[int, ...], peak: int
) -> Candidate:
    columns: list[list[Fraction]] = [[], [], []]
    for (start, end), device_index in zip(pairwise(bounds), order, strict=True):
        times: Any = (problem.forward, problem.backward, problem.recompute)
        slowness = Fraction(1)
        if problem.devices:
            device = problem.devices[device_index]
            slowness = Fraction(device.slowness)
            times = device.times or times
        for column, layers in zip(columns, times, strict=True):
            column.append(slowness * sum(map(Fraction, layers[start:end]), Fraction(0)))
        if end <= problem.n_frozen:
            columns[2][-1] = Fraction(0)
    forward, backward, recompute = columns
    cuts = bounds[1:-1]
    links = problem.links
    there = [Fraction(links.forward[cut - 1]) if links else Fraction(0) for cut in cuts]
    back = [Fraction(links.backward[cut - 1]) if links else Fraction(0) for cut in cuts]
    loads_of_links = [one + two for one, two in zip(there, back, strict=True)]
    if links and not links.overlaps:
        for j, (one, two) in enumerate(zip(there, back, strict=True)):
            for side in (j, j + 1):
                forward[side] += one
                backward[side] += two
        there = back = [Fraction(0)] * len(cuts)
        loads_of_links = []
    loads = [
        f + b + (r if mode == "always" or (mode != "never" and problem.chunks > 1) else 0)
        for f, b, r, mode in zip(forward, backward, recompute, modes, strict=True)
    ]
    makespan = makespan_of(forward, backward, recompute, there, back, problem.chunks, modes)
    squares = sum((load * load for load in loads), Fraction(0))
    return Candidate(makespan, max(loads + loads_of_links), squares, bounds, peak, modes, order)


def makespan_of(
    forward: list[Fraction],
    backward: list[Fraction],
    recompute: list[Fraction],
    there: list[Fraction],
    back: list[Fraction],
    chunks: int,
    modes: Any,
) -> Fraction:
    """Simulate one mini-batch, action by action, on devices and links.

    Each device works through its own list, and so does each link: micro-batches forwards in
    order, gradients in reverse. An action starts when the one before it in the list has ended and
    what it needs is there. A recompute needs nothing.
    """
    last = len(forward) - 1
    machines: list[list[tuple[str, int]]] = []
    for j in range(last + 1):
        row = [("F", i) for i in range(chunks)]
        for i in reversed(range(chunks)):
            if modes[j] == "always" or (modes[j] == "except_last" and i < chunks - 1):
                row.append(("R", i))
            row.append(("B", i))
        machines.append(row)
    before = {
        (kind, i, j): (row[place - 1] if place else None)
        for j, row in enumerate(machines)
        for place, (kind, i) in enumerate(row)
    }

    @cache
    def ends(kind: str, i: int, j: int) -> Fraction:
        needed = [Fraction(0)]
        if kind == "S":  # over the link behind partition j, after the micro-batch before
            needed += [ends("F", i, j)] + ([ends("S", i - 1, j)] if i else [])
            return max(needed) + there[j]
        if kind == "G":  # the gradient, back over the same link
            needed += [ends("B", i, j + 1), ends("S", chunks - 1, j)]
            needed += [ends("G", i + 1, j)] if i < chunks - 1 else []
            return max(needed) + back[j]
        previous = before[kind, i, j]
        if previous is not None:
            needed.append(ends(*previous, j))
        if kind == "F" and j > 0:
            needed.append(ends("S", i, j - 1))
        if kind == "B" and j < last:
            needed.append(ends("G", i, j))
        return max(needed) + {"F": forward, "R": recompute, "B": backward}[kind][j]

    return max(ends(*row[-1], j) for j, row in enumerate(machines))
