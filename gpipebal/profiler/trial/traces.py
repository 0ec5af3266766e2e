"""What a trial's traces tell about cells of each kind, compared with the sums over their layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from gpipebal.problem import to_bounds
from gpipebal.profile import Profile
from gpipebal.profiler.trial.sharing import TracedCell, overlaps, pressure
from gpipebal.schedule import CheckpointMode
from gpipebal.simulator import durations_of
from gpipebal.timeline import KIND_NAMES, Event, Timeline

__all__ = [
    "KINDS",
    "MOST_FACTOR",
    "Traced",
    "alone_factors",
    "cells_of",
    "factor_of",
    "positions",
    "pressures_of",
    "seconds_of_cells",
    "sums_of_layers",
    "turn_factor",
    "turn_factors",
    "within_reason",
]

#: Factors are between this and its inverse. Next to others, a cell of small operations may take
#: several times as long as in the rounds.
MOST_FACTOR = 4.0
#: The layers of a cell must take this many times its overhead for the cell to tell anything.
LEAST_WORK = 3.0
#: Fields of `Durations` that a profile's layers have times for.
KINDS = ("forward", "no_grad_forward", "recompute", "backward")
#: Kinds of events that are cells.
WORK = "FRB"
#: Position of a cell: right after its own kind of work, where it turns from the other kind, or as
#: the first one of its kind in a step. A recompute counts as a forward.
STRAIGHT, TURNED, FIRST = "straight", "turned", "first"
#: Kinds of one pressure.
_PRESSES_AS = {name: "backward" if name == "backward" else "forward" for name in KINDS}


@dataclass
class Traced:
    """Steps that were run in one way.

    Attributes:
        mode: Which micro-batches were recomputed.
        inside: Whether the last partition computed the loss. With one partition, forwards and
            backwards then alternate, as with 1F1B.
        n_partitions: Partitions of the pipeline.
        steps: Seconds and timeline of each.
    """

    mode: CheckpointMode
    inside: bool
    n_partitions: int
    steps: list[tuple[float, Timeline]]


def seconds_of_cells(ways: Sequence[Traced]) -> dict[tuple[str, int], list[float]]:
    """Collect the seconds of cells by kind and partition: of `STRAIGHT` ones if there are any."""
    found: dict[str, dict[tuple[str, int], list[float]]]
    found = {position: defaultdict(list) for position in (STRAIGHT, TURNED, FIRST)}
    for way in ways:
        if way.inside:
            continue  # the loss is in the last partition's cells
        for _, timeline in way.steps:
            for j, of_partition in _by_position(timeline, way.mode).items():
                for (name, position), seconds in of_partition.items():
                    found[position][name, j] += seconds
    return {**found[FIRST], **found[TURNED], **found[STRAIGHT]}


def positions(events: Sequence[Event]) -> list[str]:
    """Return the position of each event: `STRAIGHT`, `TURNED` or `FIRST`.

    Recomputes count as forwards, and are never `FIRST`; as a rule they come after backwards, so for
    them it is the place after a forward that counts as `TURNED`. A backward right after its
    recompute is not `FIRST` either: what it needs has just been made again. Each partition is taken
    by itself, as if it had a device of its own.

    Example:
        >>> row = [("F", 0, 0, 1), ("F", 1, 1, 2), ("B", 1, 2, 4), ("R", 0, 4, 5), ("B", 0, 5, 7)]
        >>> positions([Event(0, *event) for event in row])
        ['first', 'straight', 'first', 'straight', 'turned']
    """
    found = [STRAIGHT] * len(events)
    before: dict[int, str] = {}
    seen: set[tuple[int, str]] = set()
    for k in sorted(range(len(events)), key=lambda k: events[k].start):
        event = events[k]
        if event.kind not in WORK:
            continue
        behind = before.get(event.partition, "B")
        is_first = (event.partition, event.kind) not in seen
        if is_first and (event.kind == "F" or (event.kind == "B" and behind != "R")):
            found[k] = FIRST
        elif (behind == "B") == (event.kind == "F"):
            found[k] = TURNED
        seen.add((event.partition, event.kind))
        before[event.partition] = event.kind
    return found


def turn_factors(
    ways: Sequence[Traced], of_loss: Mapping[str, float] | None = None
) -> dict[str, float] | None:
    """Find how many times as long cells take where they turn or come first.

    The machine's speed varies by more than this effect. So each cell is compared with others of its
    own step; or, where forwards and backwards alternate, with those of the adjacent step in which
    they do not.

    Args:
        ways: Those in one partition, where only the cell before makes a difference.
        of_loss: Seconds that a loss which does nothing adds to a cell of a kind.

    Returns:
        By kind, the factor where it turns from the other kind of work (for a recompute, which as a
        rule comes after a backward: where it comes after a forward); and, under the kind prefixed
        with ``first_``, the factor of the first one of a step. None: there was nothing to compare
        with.
    """
    ratios: dict[str, list[float]] = defaultdict(list)
    usual: dict[str, list[float]] = defaultdict(list)
    straight_on = [way for way in ways if not way.inside and way.mode == "never"]
    for way in ways:
        others = straight_on[0].steps if way.inside and straight_on else way.steps
        extra = (of_loss or {}) if way.inside else {}
        for (_, timeline), (_, other) in zip(way.steps, others, strict=True):
            straight = {
                name: median(seconds)
                for (name, position), seconds in _by_position(other, way.mode).get(0, {}).items()
                if position == STRAIGHT
            }
            for (name, position), seconds in _by_position(timeline, way.mode).get(0, {}).items():
                more = extra.get(name, 0.0)
                if position == STRAIGHT:
                    usual[name] += seconds
                elif straight.get(name, 0.0) > LEAST_WORK * more:
                    if position == TURNED:
                        ratios[name].append((median(seconds) - more) / straight[name])
                    elif not way.inside:
                        # With 1F1B less runs between a first one and the step before.
                        ratios[f"first_{name}"].append(median(seconds) / straight[name])
    if not ratios:
        return None
    found = {name: within_reason(median(each)) for name, each in ratios.items()}
    for name in ("forward", "backward"):
        found.setdefault(f"first_{name}", found.get(name, 1.0))
        found.setdefault(name, found[f"first_{name}"])
    found.setdefault("first_no_grad_forward", 1.0)
    found.setdefault("recompute", 1.0)
    # In one partition no forward without a graph turns, and the first one of a step does record a
    # graph. One that turns is taken to need as many more seconds as one with a graph.
    longer = 1.0
    if usual["forward"] and usual["no_grad_forward"] and median(usual["no_grad_forward"]) > 0:
        longer = median(usual["forward"]) / median(usual["no_grad_forward"])
    found["no_grad_forward"] = within_reason(1.0 + (found["forward"] - 1.0) * longer)
    return found


def turn_factor(turns: Mapping[str, float] | None, name: str, position: str) -> float:
    """Look up how many times as long a cell of a kind takes in a position than in `STRAIGHT`."""
    if not turns or position == STRAIGHT:
        return 1.0
    return turns[name if position == TURNED else f"first_{name}"]


def cells_of(timeline: Timeline, mode: CheckpointMode) -> Iterator[tuple[Event, str, str]]:
    """Yield the cells of a step, each with its kind and its position."""
    events = timeline.events
    for event, position in zip(events, positions(events), strict=True):
        name = kind_of(event.kind, mode)
        if name is not None:
            yield event, name, position


def _by_position(
    timeline: Timeline, mode: CheckpointMode
) -> dict[int, dict[tuple[str, str], list[float]]]:
    """Collect the seconds of a step's cells, for each partition by kind and position."""
    found: dict[int, dict[tuple[str, str], list[float]]] = defaultdict(lambda: defaultdict(list))
    for event, name, position in cells_of(timeline, mode):
        found[event.partition][name, position].append(event.end - event.start)
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
    turns: Mapping[str, float] | None,
) -> dict[str, float]:
    """Find the pressure of each kind of work that is in `slow`; what is not known is left out.

    A forward runs the same operations with or without a graph, and again when it is recomputed, so
    all three have one pressure. (Recomputes by themselves tell little: most of the time they run
    next to backwards.)
    """
    cells: dict[str, list[TracedCell]] = {"forward": [], "backward": []}
    for way in ways:
        if way.inside:
            continue
        for _, timeline in way.steps:
            for name, cell in _compared(timeline, way.mode, predicted, slow, overheads, turns):
                if name != "recompute":
                    cells[_PRESSES_AS[name]].append(cell)
    found: dict[str, float] = {}
    # Backwards run next to recomputes too: so the pressure of forwards is found first.
    for name in ("forward", "backward"):
        one = pressure(cells[name], name, found)
        if one is not None:
            found[name] = one
    return {name: found[like] for name in slow if (like := _PRESSES_AS[name]) in found}


def _compared(
    timeline: Timeline,
    mode: CheckpointMode,
    predicted: Mapping[str, Sequence[float]],
    slow: Mapping[str, float],
    overheads: Mapping[str, float],
    turns: Mapping[str, float] | None,
) -> list[tuple[str, TracedCell]]:
    """Compare the cells of a step with what they would take alone; with the kind of each."""
    found = []

    def presses_as(kind: str) -> str | None:
        name = kind_of(kind, mode)
        return None if name is None else _PRESSES_AS[name]

    cells = list(cells_of(timeline, mode))
    beside = overlaps([event for event, _, _ in cells], presses_as)
    for (event, name, position), others in zip(cells, beside, strict=True):
        if name not in slow:
            continue
        known = predicted[name][event.partition]
        # A cell that takes next to nothing tells nothing.
        if known > LEAST_WORK * overheads[name]:
            seconds = (event.end - event.start) / turn_factor(turns, name, position)
            seconds = max(0.0, seconds - overheads[name])
            found.append((name, TracedCell(seconds / (slow[name] * known), others)))
    return found


def factor_of(times: Sequence[float], predicted: Sequence[float], overhead: float) -> float:
    """Divide the times of a kind of cell, less their overhead, by the sums over their layers.

    Cells whose layers do next to nothing tell nothing about these: their factor is 1.
    """
    measured = sum(max(0.0, time - overhead) for time in times)
    if not measured or sum(predicted) < LEAST_WORK * overhead * len(times):
        return 1.0
    return within_reason(measured / sum(predicted))


def within_reason(factor: float) -> float:
    """Limit a factor to what is plausible: from the inverse of `MOST_FACTOR` to `MOST_FACTOR`."""
    return min(max(factor, 1 / MOST_FACTOR), MOST_FACTOR)


def kind_of(kind: str, mode: CheckpointMode) -> str | None:
    """Return the field of `Durations` that an event's time belongs to; None: it has none."""
    if kind == "F" and mode == "always":
        return "no_grad_forward"
    # The fields are called what the kinds are.
    return KIND_NAMES[kind] if kind in WORK else None


def sums_of_layers(profile: Profile, balance: Sequence[int]) -> dict[str, tuple[float, ...]]:
    """Add up the times of the layers of each partition."""
    sums = durations_of(profile, to_bounds(balance))
    return {name: getattr(sums, name) for name in KINDS}
