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
from gpipebal.timeline import Timeline

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
]

#: Factors are within this of 1. Beside others a cell of small operations may take several times as
#: long as in the rounds.
MOST_FACTOR = 4.0
#: Layers of a cell must take this many times its overhead to be told anything of.
LEAST_WORK = 3.0
#: Fields of `Durations`, and what a profile's layers tell for them.
KINDS = ("forward", "no_grad_forward", "recompute", "backward")
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
    """Collect the seconds of the cells by kind and partition."""
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for way in ways:
        for _, timeline in way.steps:
            for event in timeline.events:
                name = kind_of(event.kind, way.mode)
                # The loss inside is in the last partition's cells: those tell of it too.
                if name is not None and not way.inside:
                    found[name, event.partition].append(event.end - event.start)
    return found


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
            for name, cell in _cells_of(timeline, way.mode, predicted, slow, overheads):
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
) -> list[tuple[str, TracedCell]]:
    """Set the cells of a step beside what they would take alone; with the kind of each."""
    cells = []

    def presses_as(kind: str) -> str | None:
        name = kind_of(kind, mode)
        return None if name is None else _PRESSES_AS[name]

    beside = overlaps(timeline.events, presses_as)
    for event, others in zip(timeline.events, beside, strict=True):
        name = kind_of(event.kind, mode)
        if name is None or name not in slow:
            continue
        known = predicted[name][event.partition]
        # What takes next to nothing tells nothing.
        if known > LEAST_WORK * overheads[name]:
            seconds = max(0.0, event.end - event.start - overheads[name])
            cells.append((name, TracedCell(seconds / (slow[name] * known), others)))
    return cells


def factor_of(times: Sequence[float], predicted: Sequence[float], overhead: float) -> float:
    """Divide the times of a kind of cell, less their overhead, by the sums over their layers.

    Cells whose layers do little more than nothing tell nothing of them: their factor is 1.
    """
    measured = sum(max(0.0, time - overhead) for time in times)
    if not measured or sum(predicted) < LEAST_WORK * overhead * len(times):
        return 1.0
    return min(max(measured / sum(predicted), 1 / MOST_FACTOR), MOST_FACTOR)


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
