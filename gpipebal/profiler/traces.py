"""What the traces of a trial tell of the cells of each kind, beside the sums over their layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from gpipebal.problem import to_bounds
from gpipebal.profile import Profile
from gpipebal.profiler.sharing import TracedCell, overlaps, pressure
from gpipebal.schedule import CheckpointMode
from gpipebal.simulator import durations_of
from gpipebal.timeline import Event, Timeline

__all__ = [
    "KINDS",
    "MOST_FACTOR",
    "Traced",
    "alone_factors",
    "factor_of",
    "kind_of",
    "pressures_of",
    "seconds_of_cells",
    "sums_of_layers",
    "turn_factors",
    "turned",
    "within_reason",
]

#: Factors are within this of 1. Beside others a cell of small operations may take several times as
#: long as in the rounds.
MOST_FACTOR = 4.0
#: Layers of a cell must take this many times its overhead to be told anything of.
LEAST_WORK = 3.0
#: Fields of `Durations`, and what a profile's layers tell for them.
KINDS = ("forward", "no_grad_forward", "recompute", "backward")
#: Kinds of events that are cells.
WORK = "FRB"
#: Kinds of one pressure.
_PRESSES_AS = {
    "forward": "forward",
    "no_grad_forward": "forward",
    "recompute": "forward",
    "backward": "backward",
}


@dataclass
class Traced:
    """Steps that were run in one way.

    Attributes:
        mode: Which micro-batches were recomputed.
        inside: Whether the last partition computed the loss.
        n_partitions: Partitions of the pipeline.
        steps: Seconds and timeline of each.
    """

    mode: CheckpointMode
    inside: bool
    n_partitions: int
    steps: list[tuple[float, Timeline]]


def seconds_of_cells(ways: Sequence[Traced]) -> dict[tuple[str, int], list[float]]:
    """Collect the seconds of the cells by kind and partition, without turns if there are others."""
    straight, behind_other = _by_turn(ways)
    return {**behind_other, **straight}


def turned(events: Sequence[Event]) -> list[bool]:
    """Say of each event whether the other kind of work stands before it; of a recompute: its own.

    Recomputes belong to the forwards. The first forward of a step is behind the backwards of the
    step before; recomputes stand behind backwards as a rule.

    Example:
        >>> row = [("F", 0, 0, 1), ("F", 1, 1, 2), ("B", 1, 2, 4), ("R", 0, 4, 5), ("B", 0, 5, 7)]
        >>> turned([Event(0, *event) for event in row])
        [True, False, True, False, True]
    """
    found = [False] * len(events)
    before: dict[int, bool] = {}
    for k in sorted(range(len(events)), key=lambda k: events[k].start):
        event = events[k]
        if event.kind not in WORK:
            continue
        behind_forward = before.get(event.partition, False)
        found[k] = not behind_forward if event.kind == "F" else behind_forward
        before[event.partition] = event.kind != "B"
    return found


def turn_factors(ways: Sequence[Traced]) -> dict[str, float] | None:
    """Find how many times as long cells take behind the other kind of work, by kind.

    Args:
        ways: Those in one partition: nothing but the cell before makes a difference there.

    Returns:
        The factor of a recompute, which stands behind a backward as a rule, is that behind a
        forward. None: there were no others to compare with.
    """
    straight, behind_other = _by_turn(ways)
    found = {}
    for name in KINDS:
        usual, other = straight.get((name, 0)), behind_other.get((name, 0))
        if usual and other and median(usual) > 0 and median(other) > 0:
            found[name] = within_reason(median(other) / median(usual))
    return {name: found.get(name, 1.0) for name in KINDS} if found else None


def _by_turn(ways: Sequence[Traced]) -> list[dict[tuple[str, int], list[float]]]:
    """Collect the seconds of the cells by kind and partition: straight on, and in turns."""
    found: list[dict[tuple[str, int], list[float]]] = [defaultdict(list), defaultdict(list)]
    for way in ways:
        if way.inside:
            continue  # the loss is in the last partition's cells: those tell of it too
        for _, timeline in way.steps:
            events = timeline.events
            for event, turn in zip(events, turned(events), strict=True):
                name = kind_of(event.kind, way.mode)
                if name is not None:
                    found[turn][name, event.partition].append(event.end - event.start)
    return [dict(each) for each in found]


def alone_factors(
    predicted: Mapping[str, Sequence[float]],
    of_chain: Mapping[tuple[str, int], Sequence[float]],
    overheads: Mapping[str, float],
) -> dict[str, float]:
    """Compare cells of the whole chain, which work alone, with the sums over its layers."""
    return {
        name: factor_of([median(of_chain[name, 0])], [sum(predicted[name])], overheads[name])
        for name in KINDS
        if of_chain.get((name, 0))
    }


def pressures_of(
    ways: Sequence[Traced],
    predicted: Mapping[str, Sequence[float]],
    slow: Mapping[str, float],
    overheads: Mapping[str, float],
    turns: Mapping[str, float],
) -> dict[str, float]:
    """Find the pressure of each kind of work that is in `slow`; what is not known is left out.

    A forward runs the same operations whether it records a graph or not, and once more when it is
    recomputed, so all three have one pressure. (Recomputes by themselves tell little: they run
    beside backwards most of the time.)
    """
    cells: dict[str, list[TracedCell]] = {"forward": [], "backward": []}
    for way in ways:
        if way.inside:
            continue
        for _, timeline in way.steps:
            for name, cell in _cells_of(timeline, way.mode, predicted, slow, overheads, turns):
                if name != "recompute":
                    cells[_PRESSES_AS[name]].append(cell)
    found: dict[str, float] = {}
    # Backwards run beside recomputes too: forwards come first.
    for name in ("forward", "backward"):
        one = pressure(cells[name], name, found)
        if one is not None:
            found[name] = one
    return {name: found[like] for name in slow if (like := _PRESSES_AS[name]) in found}


def _cells_of(
    timeline: Timeline,
    mode: CheckpointMode,
    predicted: Mapping[str, Sequence[float]],
    slow: Mapping[str, float],
    overheads: Mapping[str, float],
    turns: Mapping[str, float],
) -> list[tuple[str, TracedCell]]:
    """Set the cells of a step beside what they would take alone; with the kind of each."""
    cells = []

    def presses_as(kind: str) -> str | None:
        name = kind_of(kind, mode)
        return None if name is None else _PRESSES_AS[name]

    events = timeline.events
    beside = overlaps(events, presses_as)
    for event, others, turn in zip(events, beside, turned(events), strict=True):
        name = kind_of(event.kind, mode)
        if name is None or name not in slow:
            continue
        known = predicted[name][event.partition]
        # What takes next to nothing tells nothing.
        if known > LEAST_WORK * overheads[name]:
            seconds = (event.end - event.start) / (turns.get(name, 1.0) if turn else 1.0)
            seconds = max(0.0, seconds - overheads[name])
            cells.append((name, TracedCell(seconds / (slow[name] * known), others)))
    return cells


def factor_of(times: Sequence[float], predicted: Sequence[float], overhead: float) -> float:
    """Divide the times of a kind of cell, less their overhead, by the sums over their layers.

    Cells whose layers do little more than nothing tell nothing of them: their factor is 1.
    """
    measured = sum(max(0.0, time - overhead) for time in times)
    if not measured or sum(predicted) < LEAST_WORK * overhead * len(times):
        return 1.0
    return within_reason(measured / sum(predicted))


def within_reason(factor: float) -> float:
    """Keep a factor to what is believed: within `MOST_FACTOR` of 1."""
    return min(max(factor, 1 / MOST_FACTOR), MOST_FACTOR)


def kind_of(kind: str, mode: CheckpointMode) -> str | None:
    """Return which field of `Durations` an event's time belongs to; None: to none."""
    names = {"F": "forward", "R": "recompute", "B": "backward"}
    if kind == "F" and mode == "always":
        return "no_grad_forward"
    return names.get(kind)


def sums_of_layers(profile: Profile, balance: Sequence[int]) -> dict[str, tuple[float, ...]]:
    """Add up the times of the layers of each partition."""
    sums = durations_of(profile, to_bounds(balance))
    return {name: getattr(sums, name) for name in KINDS}
