"""Oracles for the simulator: random schedules that can finish, and times found the slow way."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from itertools import pairwise

from hypothesis import strategies as st

from gpipebal.schedule import Action, Schedule
from gpipebal.simulator import Durations

Cell = tuple[int, str, int]
Span = tuple[float, float]

#: Times that hit each other often, and times that never do.
SECONDS = st.one_of(st.integers(0, 3).map(float), st.floats(0.0, 100.0))


def needs_of(action: Cell, cells: set[Cell], n_partitions: int, *, late: bool) -> list[Cell]:
    """Write down what an action needs, wherever it stands."""
    j, kind, i = action
    back = [(j + 1, kind, i) for kind in "BI" if (j + 1, kind, i) in cells]
    return {
        "F": [(j - 1, "F", i)] if j else [],
        "R": [(j, "F", i), *(back if late else [])],
        "B": [(j, "F", i), *back],
        "I": [(j, "F", i), *back],
        "W": [(j, "I", i)],
    }[kind] + ([(j, "R", i)] if kind in "BI" and (j, "R", i) in cells else [])


@st.composite
def schedules(draw: st.DrawFn, *, whole: bool = False) -> Schedule:
    """Draw any schedule that can finish, of cells in an order that respects what they need.

    Partitions are on any devices; `whole`: one on each device, in order.
    """
    n_partitions, chunks = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    n_devices = n_partitions if whole else draw(st.integers(1, n_partitions))
    devices = list(range(n_partitions))
    if not whole:
        others = st.lists(
            st.integers(0, n_devices - 1),
            min_size=n_partitions - n_devices,
            max_size=n_partitions - n_devices,
        )
        devices = draw(st.permutations([*range(n_devices), *draw(others)]))
    cells: set[Cell] = set()
    for j in range(n_partitions):
        for i in range(chunks):
            cells.add((j, "F", i))
            cells |= {(j, kind, i) for kind in draw(st.sampled_from(["B", "RB", "IW", "RIW"]))}
    rows: list[list[Action]] = [[] for _ in range(n_devices)]
    done: set[Cell] = set()
    while len(done) < len(cells):
        ready = sorted(
            cell
            for cell in cells - done
            if done.issuperset(needs_of(cell, cells, n_partitions, late=True))
        )
        cell = draw(st.sampled_from(ready))
        done.add(cell)
        rows[devices[cell[0]]].append(Action(*cell))  # type: ignore[arg-type]  # a kind
    return Schedule("drawn", tuple(map(tuple, rows)), None if whole else tuple(devices))


@st.composite
def durations_for(draw: st.DrawFn, n_partitions: int, *, more: bool = True) -> Durations:
    """Draw times for partitions, and maybe transfers, a host and what else there can be."""

    def column() -> tuple[float, ...]:
        return tuple(draw(st.lists(SECONDS, min_size=n_partitions, max_size=n_partitions)))

    names = ["no_grad_forward", "input_gradient", "weight_gradient"]
    names += ["forward_transfer", "backward_transfer"]
    names += ["forward_after_backward", "no_grad_forward_after_backward"]
    names += ["recompute_after_forward", "backward_after_forward"]
    names += ["first_forward", "first_no_grad_forward", "first_backward"]
    chosen = draw(st.lists(st.sampled_from(names), unique=True)) if more else []
    return Durations(column(), column(), column(), **{name: column() for name in chosen})


def seconds_of(
    action: Cell, cells: set[Cell], durations: Durations, before: Cell | None, first: bool
) -> float:
    """Look up how long an action takes behind the one before it on its device.

    It may be the first of its kind on its device.
    """
    j, kind, i = action
    again = kind == "F" and (j, "R", i) in cells and durations.no_grad_forward is not None
    behind_forward = before is not None and before[1] in "FR"
    turned = None
    if first and kind == "F" and again:
        turned = durations.first_no_grad_forward
    elif first and kind == "F":
        turned = durations.first_forward
    elif first and kind == "B" and before is not None and before[1] != "R":
        turned = durations.first_backward
    if turned is not None:
        return turned[j]
    if kind == "F" and not behind_forward:
        turned = durations.forward_after_backward
        if again:
            turned = durations.no_grad_forward_after_backward
    elif kind == "R" and behind_forward:
        turned = durations.recompute_after_forward
    elif kind == "B" and behind_forward:
        turned = durations.backward_after_forward
    if turned is not None:
        return turned[j]
    if kind == "F" and (j, "R", i) in cells and durations.no_grad_forward is not None:
        return durations.no_grad_forward[j]
    half = durations.backward[j] / 2
    given_in, given_weight = durations.input_gradient, durations.weight_gradient
    if given_in is not None:
        half_in = given_in[j]
    elif given_weight is not None:
        half_in = max(0.0, durations.backward[j] - given_weight[j])
    else:
        half_in = half
    rest = max(0.0, durations.backward[j] - half_in)
    half_weight = given_weight[j] if given_weight is not None else rest
    return {
        "F": durations.forward[j],
        "R": durations.recompute[j],
        "B": durations.backward[j],
        "I": half_in,
        "W": half_weight,
    }[kind]


def first_ones(schedule: Schedule) -> set[Cell]:
    """Return the first forward and the first backward of each device."""
    found: set[Cell] = set()
    for row in schedule.rows:
        for kind in "FB":
            found.update([tuple(action) for action in row if action.kind == kind][:1])  # type: ignore[misc]  # tuples
    return found


def longest_paths(
    schedule: Schedule, durations: Durations, *, late: bool, overlap: bool
) -> dict[Cell, Span]:
    """Find when every action runs: it starts at the end of the longest path that leads to it."""
    placement, n_partitions = schedule.placement, schedule.n_partitions
    cells: set[Cell] = {tuple(action) for row in schedule.rows for action in row}  # type: ignore[misc]  # tuples
    before: dict[Cell, Cell] = {}
    firsts = first_ones(schedule)
    on_link: dict[tuple[int, int], list[Cell]] = defaultdict(list)

    def moved(source: Cell) -> float:
        """How long what an action made travels."""
        j, kind, _ = source
        to = j + 1 if kind == "F" else j - 1
        if kind in "RW" or not 0 <= to < n_partitions or placement[to] == placement[j]:
            return 0.0
        table = durations.forward_transfer if kind == "F" else durations.backward_transfer
        return table[to] if table is not None else 0.0

    for row in schedule.rows:
        for first, second in pairwise(row):
            before[tuple(second)] = tuple(first)
        for action in row:
            if moved(action) > 0:
                on_link[action.partition, 1 if action.kind == "F" else -1].append(tuple(action))

    @cache
    def arrival(source: Cell) -> float:
        """When what an action made has gone over its link, behind what went before."""
        end = span(source)[1]
        if not overlap:
            return end + moved(source)
        if moved(source) == 0:
            return end
        queue = on_link[source[0], 1 if source[1] == "F" else -1]
        place = queue.index(source)
        free = arrival(queue[place - 1]) if place else 0.0
        return max(free, end) + moved(source)

    @cache
    def span(action: Cell) -> Span:
        start = 0.0
        if action in before:
            start = span(before[action])[1] + (0.0 if overlap else moved(before[action]))
        for need in needs_of(action, cells, n_partitions, late=late):
            across = need[0] != action[0]
            start = max(start, arrival(need) if across else span(need)[1])
        if not overlap:
            sources = [n for n in needs_of(action, cells, n_partitions, late=False)]
            start += sum(moved(n) for n in sources if n[0] != action[0])
        first = action in firsts
        return start, start + seconds_of(action, cells, durations, before.get(action), first)

    # In an order that can run, so that no recursion goes deep.
    return {cell: span(cell) for cell in sorted(cells, key=lambda cell: cell[2])}
