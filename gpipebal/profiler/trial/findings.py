"""What the traces of a trial tell, compared with the sums over the layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any, NamedTuple

from gpipebal.profile import Profile
from gpipebal.profiler.trial.traces import (
    KINDS,
    Traced,
    alone_factors,
    cells_of,
    factor_of,
    pressures_of,
    seconds_of_cells,
    sums_of_layers,
    turn_factor,
    turn_factors,
    within_reason,
)
from gpipebal.schedule import CheckpointMode, make_schedule
from gpipebal.simulator import Durations, place
from gpipebal.simulator.sharing import place_sharing
from gpipebal.timeline import Timeline

__all__ = ["Trial", "read_trial"]


@dataclass
class Trial:
    """What a trial told.

    Attributes:
        balance: How the chain was cut.
        chunks: Micro-batches of its steps.
        rounds: How often each way of running had its turn.
        factors: Measured over predicted time of the cells of a kind while all partitions work, by
            field of `Durations`.
        cell_overhead_time: Seconds that a cell takes in addition to its layers.
        overhead_time: Seconds of a step with the loss after the pipeline that nothing else takes.
        inside_overhead_time: The same with the loss inside; None: there is nothing to train.
        alone: Share of its time that a cell of a kind takes while no other partition works; None:
            not known.
        turns: How many times as long a cell of a kind takes where it turns or comes first, as
            `turn_factors` returns it; None: not known.
    """

    balance: list[int]
    chunks: int
    rounds: int
    factors: dict[str, float]
    cell_overhead_time: float
    overhead_time: float
    inside_overhead_time: float | None
    alone: dict[str, float] | None = None
    turns: dict[str, float] | None = None


def read_trial(
    profile: Profile,
    balance: Sequence[int],
    chunks: int,
    rounds: int,
    ways: Sequence[Traced],
    overheads: Mapping[str, float],
    of_loss: Mapping[str, float] | None = None,
) -> Trial:
    """Compare the traces of a trial with the sums over the layers.

    Args:
        profile: What was measured, layer by layer.
        balance: How the chain was cut.
        chunks: Micro-batches of its steps.
        rounds: How often each way of running had its turn.
        ways: The ways of running with their traces; also those in one partition.
        overheads: Seconds of a cell of each kind whose layer does next to nothing.
        of_loss: Seconds that a loss which does nothing adds to a cell of a kind; None: no time.
    """
    n = len(balance)
    together = [way for way in ways if way.n_partitions == n]
    solo = [way for way in ways if way.n_partitions < n]
    turns = turn_factors([way for way in ways if way.n_partitions == 1], of_loss)
    predicted = sums_of_layers(profile, balance)
    cells = _medians(together, n)
    factors = {name: factor_of(cells[name], predicted[name], overheads[name]) for name in KINDS}
    alone = None
    if solo:
        # One partition recomputes frozen layers too, which those at the beginning do not.
        of_chain = sums_of_layers(profile, (profile.n_layers,))
        slow = alone_factors(of_chain, seconds_of_cells(solo), overheads)
        factors, alone = _apart(predicted, together, slow, factors, overheads, turns)
    beside = _beside_cells(profile, chunks, together, Durations(**cells), turns)
    overhead = max(0.0, median(beside.gaps)) + fmean(overheads.values())
    if alone is not None:
        sums = Durations(
            **{name: tuple(factors[name] * time for time in predicted[name]) for name in KINDS}
        )
        sums = sums if turns is None else sums.turning(turns)
        side_by_side = sums.longer_by(overhead)
        by_themselves = sums.scaled(alone).longer_by(overhead)
        placed = _placed(together, chunks, side_by_side, by_themselves)
        # Whatever the single cells tell, the predicted steps must take as long as those that ran.
        pairs = zip(beside.spans, placed, strict=True)
        ratios = [median(times) / time for times, time in pairs if time]
        scale = within_reason(fmean(ratios)) if ratios else 1.0
        factors = {name: within_reason(factor * scale) for name, factor in factors.items()}
    return Trial(
        balance=list(balance),
        chunks=chunks,
        rounds=rounds,
        factors=factors,
        alone=alone,
        turns=turns,
        cell_overhead_time=overhead,
        overhead_time=max(0.0, median(beside.around)),
        inside_overhead_time=max(0.0, median(beside.inside)) if beside.inside else None,
    )


def _medians(ways: Sequence[Traced], n_partitions: int) -> dict[str, tuple[float, ...]]:
    """Return the median time of each partition's cells of each kind; 0 where there is none."""
    cells = seconds_of_cells(ways)
    return {
        name: tuple(median(cells.get((name, j), [0.0])) for j in range(n_partitions))
        for name in KINDS
    }


def _apart(
    predicted: Mapping[str, Sequence[float]],
    together: Sequence[Traced],
    slow: Mapping[str, float],
    factors: Mapping[str, float],
    overheads: Mapping[str, float],
    turns: Mapping[str, float] | None,
) -> tuple[dict[str, float], dict[str, float]]:
    """Find how long cells take while others work, and what share of that they take alone.

    Args:
        predicted: Sums over the layers, by kind and partition.
        together: The ways in which all partitions worked.
        slow: How long cells take alone, as a multiple of the sums over their layers.
        factors: How long cells take while others work, where `slow` does not tell.
        overheads: Seconds of a cell whose layer does next to nothing.
        turns: How many times as long a cell takes by its position.
    """
    pressures = pressures_of(together, predicted, slow, overheads, turns)
    n = together[0].n_partitions
    alone = {name: 1.0 / (1.0 + (n - 1) * pressures.get(name, 0.0) ** 2) for name in KINDS}
    known = {name: slow[name] / alone[name] for name in pressures}
    return {**factors, **known}, alone


class _Beside(NamedTuple):
    """Seconds of steps in addition to their cells.

    Attributes:
        gaps: Between two cells, for each step with the loss after the pipeline.
        around: Before the first cell, after the last, and between the phases, less what is known
            about the loss; for each of these steps.
        spans: From the first cell to the last, without the pause, for each way and its steps.
        inside: Before the first cell and after the last, for each step with the loss inside.
    """

    gaps: list[float]
    around: list[float]
    spans: list[list[float]]
    inside: list[float]


def _beside_cells(
    profile: Profile,
    chunks: int,
    ways: Sequence[Traced],
    measured: Durations,
    turns: Mapping[str, float] | None,
) -> _Beside:
    """Find out what steps took in addition to their cells, whose median times are known."""
    gaps, around, inside = [], [], []
    spans: list[list[float]] = []
    known = (profile.step.loss_time or 0.0) + (profile.step.gather_time or 0.0)
    known *= chunks / profile.chunks
    for way in ways:
        if way.inside:
            inside += [seconds - timeline.makespan for seconds, timeline in way.steps]
            continue
        order = make_schedule("gpipe", measured.n_partitions, chunks, way.mode)
        spans.append([timeline.makespan - _pause_of(timeline) for _, timeline in way.steps])
        for seconds, timeline in way.steps:
            pause = _pause_of(timeline)
            cells = _means(timeline, way.mode, measured, turns)
            gaps.append(_hand_over(timeline, order, cells, pause))
            around.append(seconds - timeline.makespan + max(0.0, pause - known))
    return _Beside(gaps, around, spans, inside)


def _placed(
    ways: Sequence[Traced], chunks: int, together: Durations, alone: Durations
) -> list[float]:
    """Place a step of each way, without the pause between its phases; return the makespans."""
    n = together.n_partitions
    return [
        place_sharing(
            make_schedule("gpipe", n, chunks, way.mode), together, alone, n, pause=0.0
        ).makespan
        for way in ways
        if not way.inside
    ]


def _means(
    timeline: Timeline,
    mode: CheckpointMode,
    otherwise: Durations,
    turns: Mapping[str, float] | None,
) -> Durations:
    """Take the mean time of each partition's cells of a kind in one step.

    The extra time that is due to a cell's position is left out here, and reported apart.
    """
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for event, name, position in cells_of(timeline, mode):
        factor = turn_factor(turns, name, position)
        found[name, event.partition].append((event.end - event.start) / factor)
    means = replace(
        otherwise,
        **{
            name: tuple(
                sum(found[name, j]) / len(found[name, j]) if found[name, j] else given
                for j, given in enumerate(getattr(otherwise, name))
            )
            for name in KINDS
        },
    )
    return means if turns is None else means.turning(turns)


def _hand_over(timeline: Timeline, order: Any, cells: Durations, pause: float) -> float:
    """Find the time between cells that makes the placed schedule as long as the traced one."""
    without = place(order, cells, pause=pause).makespan
    missing = timeline.makespan - without
    share = 0.01 * max(map(max, (cells.forward, cells.backward)), default=0.0)
    if share <= 0:
        return 0.0
    later = place(order, cells.longer_by(share), pause=pause).makespan
    return missing * share / (later - without)


def _pause_of(timeline: Timeline) -> float:
    """Return the seconds from the last forward to the first action after it."""
    ends = [event.end for event in timeline.events if event.kind == "F"]
    starts = [event.start for event in timeline.events if event.kind in "RB"]
    return max(0.0, min(starts) - max(ends)) if ends and starts else 0.0
