"""Parts: in which part of a step a prediction is off.

A traced step tells when each cell ran. Put in the place of the predicted times one after the
other, the measured ones lead from the predicted step to the measured::

    predicted step                         the schedule placed with predicted times, the optimizer
      + cells      longer cells            the same with the measured mean times of the cells
      + pause      gather and loss         the same with the measured pause between the phases
      + gaps       hand-overs, waits       what the traced schedule took beyond that
      + around     optimizer and the rest  what the step took besides its schedule
    = traced step
"""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean

from gpipebal.plan import Plan
from gpipebal.planner.execution import Execution
from gpipebal.planner.times import step_timeline
from gpipebal.problem import to_bounds
from gpipebal.profile import Profile
from gpipebal.schedule import Schedule, make_schedule
from gpipebal.simulator import Durations, place
from gpipebal.timeline import Timeline
from prediction_benchmark.settings import Setting

PARTS = ("cells", "pause", "gaps", "around")


def explain(
    profile: Profile, plan: Plan, setting: Setting, seconds: float, timeline: Timeline
) -> dict[str, float]:
    """Part the difference between a traced step and its prediction, in seconds.

    Args:
        profile: What the prediction was made from.
        plan: The prediction; it has a step time.
        setting: How the step was run.
        seconds: What the traced step took.
        timeline: Its timeline.

    Returns:
        Seconds by name of the part; they add up to the traced step less the predicted one.
    """
    assert plan.step_time is not None
    order = make_schedule(setting.schedule, plan.n_partitions, plan.chunks, setting.checkpoint)
    predicted = predicted_timeline(profile, plan)
    measured = _means(timeline, order)
    pause = measured_pause = None
    if not setting.loss_inside:
        pause, measured_pause = plan.pause_time, _pause_of(timeline)
    at_first = place(order, _means(predicted, order), pause=pause).makespan
    with_cells = place(order, measured, pause=pause).makespan
    with_pause = place(order, measured, pause=measured_pause).makespan
    around = seconds - timeline.makespan
    return {
        "cells": with_cells - at_first,
        "pause": with_pause - with_cells,
        # Cells of one kind are not all equally long, neither here nor there.
        "gaps": timeline.makespan - with_pause - (predicted.makespan - at_first),
        "around": around - (plan.step_time - predicted.makespan),
    }


def predicted_timeline(profile: Profile, plan: Plan) -> Timeline:
    """Place the step that a plan predicts: its cells take longer while others work."""
    return step_timeline(profile, to_bounds(plan.balance), Execution.of(plan))


def _means(timeline: Timeline, order: Schedule) -> Durations:
    """Take the mean time of each partition's cells of a kind; where it has none, nothing."""
    found = cell_times(timeline, order)
    names = ("forward", "recompute", "backward", "no_grad_forward")
    return Durations(
        **{
            name: tuple(fmean(found.get((name, j)) or [0.0]) for j in range(order.n_partitions))
            for name in names
        }
    )


def cell_times(timeline: Timeline, order: Schedule) -> dict[tuple[str, int], list[float]]:
    """Collect the seconds of the cells of a timeline, by kind and partition.

    A forward that is recomputed later records no graph, and is another kind of cell.
    """
    recomputed = {
        (action.partition, action.micro_batch)
        for row in order.rows
        for action in row
        if action.kind == "R"
    }
    names = {"F": "forward", "R": "recompute", "B": "backward"}
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for event in timeline.events:
        if event.kind not in names:
            continue
        name = names[event.kind]
        if event.kind == "F" and (event.partition, event.micro_batch) in recomputed:
            name = "no_grad_forward"
        found[name, event.partition].append(event.end - event.start)
    return dict(found)


def _pause_of(timeline: Timeline) -> float:
    """Return the seconds from the last forward to the first action after it."""
    until = max(event.end for event in timeline.events if event.kind == "F")
    return max(0.0, min(e.start for e in timeline.events if e.kind in "RB") - until)
