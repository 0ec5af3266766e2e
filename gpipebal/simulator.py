"""Simulator: place durations on a schedule, each action as early as its order allows.

An action starts when its partition has finished the action before it and when what it needs has
ended: a forward needs the one in the partition before, a recompute its own forward, a backward
its own forward, its recompute if there is one, and the backward in the partition after. Nothing
else costs time: a hand-over between partitions is free::

    # GPipe, 3 partitions, 4 micro-batches, F takes 1 clock, B takes 2: makespan 18 clocks.
    # partition 0  0123......DDCCBBAA
    # partition 1  .0123...DDCCBBAA..
    # partition 2  ..0123DDCCBBAA....
    # bubble_fraction = 18 idle / 54 = (n - 1) / (m + n - 1) = 1/3
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn

from gpipebal.errors import BalanceError, ProfileError, UnsupportedPlanError
from gpipebal.plan import Plan
from gpipebal.schedule import SCHEDULES, Action, Kind, Schedule, make_schedule
from gpipebal.timeline import COMPUTE_KINDS, Event, Timeline

__all__ = ["Durations", "place", "simulate"]

#: An action as a plain tuple: equal to it, with the same hash, and several times faster to make.
_Cell = tuple[int, Kind, int]


@dataclass(frozen=True)
class Durations:
    """Seconds of every partition for one micro-batch; all micro-batches are alike.

    Attributes:
        forward: Seconds of each partition's forward.
        recompute: Seconds of each partition's recompute.
        backward: Seconds of each partition's backward, without recompute.
    """

    forward: tuple[float, ...]
    recompute: tuple[float, ...]
    backward: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("forward", "recompute", "backward"):
            times = getattr(self, name)
            if len(times) != len(self.forward):
                raise ProfileError(
                    f"durations have different lengths: len({name})={len(times)} "
                    f"(expected {len(self.forward)}, as many as forward).\n"
                    "Fix: give one time per partition."
                )
            for j, time in enumerate(times):
                _check_time(f"{name}[{j}]", time)

    @property
    def n_partitions(self) -> int:
        """Number of partitions."""
        return len(self.forward)

    @classmethod
    def of_plan(cls, plan: Plan) -> Durations:
        """Take the times that a plan predicts for its partitions."""
        return cls(
            forward=tuple(part.forward_time for part in plan.partitions),
            recompute=tuple(part.recompute_time for part in plan.partitions),
            backward=tuple(part.backward_time for part in plan.partitions),
        )


def simulate(
    plan: Plan, schedule: Schedule | None = None, *, pause: float | None = None
) -> Timeline:
    """Predict the timeline of one mini-batch of a plan.

    Args:
        plan: Gives the times of its partitions, chunks, checkpoint modes and schedule.
        schedule: Order of the actions; None: the plan's own, ``'gpipe'`` or ``'1f1b'``.
        pause: Seconds between the last forward of all partitions and the first recompute or
            backward, as ``loss(pipe(x)).backward()`` makes them wait; `plan.pause_time` is the
            measured value. None: no wait, partitions turn to their backwards on their own. A
            schedule without phases, such as ``'1f1b'``, cannot have one.

    Returns:
        A Timeline with source ``'simulated'``.

    Raises:
        UnsupportedPlanError: the plan's schedule is none that can be built here.
        BalanceError: the schedule does not fit the plan, or can never finish (with a pause).
        ProfileError: `pause` is negative or not finite.

    Complexity:
        O(n) for n actions.

    Example:
        >>> from gpipebal.plan import PartitionPlan
        >>> parts = [PartitionPlan((name,), (), 1.0, 2.0, 1.0) for name in ("a", "b", "c")]
        >>> plan = Plan(tuple(parts), 4, 1, "never", "gpipe", "makespan", 18.0, 18.0,
        ...             "optimal", "given", makespan=18.0, bottleneck=3.0)
        >>> print(simulate(plan).text_gantt(width=18))
        simulated: makespan 18.0 s, bubble 33.3 % (0-9 forward, r recompute, A-J backward)
        partition 0  0123......DDCCBBAA
        partition 1  .0123...DDCCBBAA..
        partition 2  ..0123DDCCBBAA....
    """
    if schedule is None:
        if plan.schedule not in SCHEDULES:
            raise UnsupportedPlanError(
                f"plan has a schedule that cannot be built: schedule={plan.schedule!r} "
                f"(expected one of {', '.join(map(repr, SCHEDULES))}).\n"
                "Fix: give the order of its actions as schedule=, or solve with schedule='gpipe'."
            )
        schedule = make_schedule(plan.schedule, plan.n_partitions, plan.chunks, plan.checkpoint)
    provenance = {
        "balance": list(plan.balance),
        "chunks": plan.chunks,
        "checkpoint": (
            plan.checkpoint if isinstance(plan.checkpoint, str) else list(plan.checkpoint)
        ),
        "costs": dict(plan.provenance),
    }
    return _place(schedule, Durations.of_plan(plan), pause, provenance)


def place(schedule: Schedule, durations: Durations, *, pause: float | None = None) -> Timeline:
    """Start every action of a schedule as early as its order and its needs allow.

    Args:
        schedule: Order of the actions of each partition.
        durations: Seconds of each partition for one micro-batch.
        pause: Seconds between the last forward of all partitions and the first recompute or
            backward; None: no such wait.

    Returns:
        A Timeline with source ``'simulated'`` and the events in the order of the schedule's rows.

    Raises:
        BalanceError: not as many durations as partitions, an action that is unknown, stands
            twice or in another partition's row, or one that waits for ever: for an action that
            does not exist, or in a circle.
        ProfileError: `pause` is negative or not finite.

    Complexity:
        O(n) for n actions.

    Example:
        >>> from gpipebal.schedule import gpipe_schedule
        >>> durations = Durations(forward=(1.0, 3.0), recompute=(0.0, 0.0), backward=(1.0, 1.0))
        >>> place(gpipe_schedule(2, 2, "never"), durations).makespan
        10.0
    """
    return _place(schedule, durations, pause, {})


def _place(
    schedule: Schedule, durations: Durations, pause: float | None, provenance: Mapping[str, Any]
) -> Timeline:
    n_partitions = schedule.n_partitions
    if durations.n_partitions != n_partitions:
        raise BalanceError(
            f"schedule and durations differ: schedule.n_partitions={n_partitions} "
            f"(expected {durations.n_partitions}, as many as durations).\n"
            f"Fix: make a schedule of {durations.n_partitions} partitions."
        )
    actions = _check_rows(schedule)
    done: dict[_Cell, Event] = {}
    if pause is None:
        _run(schedule.rows, durations, [0.0] * n_partitions, actions, done)
    else:
        _check_time("pause", pause)
        _check_phases(schedule)
        _run(schedule.phase("F"), durations, [0.0] * n_partitions, actions, done)
        barrier = max((event.end for event in done.values()), default=0.0) + pause
        _run(schedule.phase("RB"), durations, [barrier] * n_partitions, actions, done)
    events = tuple(done[action] for row in schedule.rows for action in row)
    order = {"schedule": schedule.name, "pause": pause}
    return Timeline(events, n_partitions, "simulated", {**order, **provenance})


def _run(
    rows: Sequence[Sequence[Action]],
    durations: Durations,
    clocks: list[float],
    actions: Set[_Cell],
    done: dict[_Cell, Event],
) -> None:
    """Place all `rows`, each from its clock on, and add their events to `done`.

    Every partition goes ahead until it needs an action that has no times yet; that action, once
    placed, wakes it. So each action is looked at once, and once more if it had to wait.
    """
    times = {"F": durations.forward, "R": durations.recompute, "B": durations.backward}
    positions = [0] * len(rows)
    waiting: dict[_Cell, list[int]] = {}
    ready = deque(range(len(rows)))
    while ready:
        j = ready.popleft()  # j: partition
        while positions[j] < len(rows[j]):
            action = rows[j][positions[j]]
            start = clocks[j]
            missing = None
            for need in _needs(action, len(rows), actions):
                if need not in done:
                    missing = need
                    break
                start = max(start, done[need].end)
            if missing is not None:
                waiting.setdefault(missing, []).append(j)
                break
            clocks[j] = start + times[action.kind][j]
            done[action] = Event(*action, start, clocks[j])
            positions[j] += 1
            ready.extend(waiting.pop(action, ()))
    stuck = [row[positions[j]] for j, row in enumerate(rows) if positions[j] < len(row)]
    if stuck:
        _refuse(stuck, len(rows), actions, done)


def _needs(action: _Cell, n_partitions: int, actions: Set[_Cell]) -> list[_Cell]:
    """List what must have ended before an action starts, beside the action before it."""
    j, kind, i = action  # j: partition, i: micro-batch
    if kind == "F":
        return [(j - 1, "F", i)] if j > 0 else []
    needs: list[_Cell] = [(j, "F", i)]
    if kind == "B":
        if (j, "R", i) in actions:
            needs.append((j, "R", i))
        if j < n_partitions - 1:
            needs.append((j + 1, "B", i))
    return needs


def _refuse(
    stuck: Sequence[Action], n_partitions: int, actions: Set[_Cell], done: Mapping[_Cell, Event]
) -> NoReturn:
    """Name one of the actions that wait for ever; better one whose need does not exist."""
    waits = []
    for action in stuck:
        missing = next(n for n in _needs(action, n_partitions, actions) if n not in done)
        waits.append((missing in actions, action, Action(*missing)))
    exists, action, need = min(waits)
    why = "which never gets its turn" if exists else "which stands in no row"
    fix = "order every row as gpipe_schedule does." if exists else f"add {need} to its row."
    raise BalanceError(
        f"schedule can never finish: {action} waits for {need}, {why} (expected every action "
        f"after what it needs).\nFix: {fix}"
    )


def _check_rows(schedule: Schedule) -> set[_Cell]:
    """Return all actions, after a check that each is known and stands once, in its own row."""
    seen: set[_Cell] = set()
    for j, row in enumerate(schedule.rows):
        for action in row:
            wrong = None
            if action.kind not in COMPUTE_KINDS:
                wrong = f"is of an unknown kind (expected one of {', '.join(COMPUTE_KINDS)})"
            elif action.partition != j:
                wrong = f"stands in row {j} (expected row {action.partition})"
            elif action in seen:
                wrong = "stands there twice (expected once)"
            if wrong:
                raise BalanceError(
                    f"schedule has a misplaced action: {action} {wrong}.\n"
                    "Fix: make the rows as gpipe_schedule does."
                )
            seen.add(action)
    return seen


def _check_phases(schedule: Schedule) -> None:
    """Refuse a forward after a backward: with a pause each would wait for the other."""
    for row in schedule.rows:
        for before, action in pairwise(row):
            if action.kind == "F" and before.kind != "F":
                raise BalanceError(
                    f"schedule can never finish with a pause: {action} stands after {before}, "
                    "which waits for the last forward (expected all forwards first).\n"
                    "Fix: pause=None."
                )


def _check_time(name: str, time: float) -> None:
    number = isinstance(time, int | float) and not isinstance(time, bool)
    if not number or not math.isfinite(time) or time < 0:
        raise ProfileError(
            f"time is impossible: {name}={time!r} (expected finite seconds, 0 or more).\n"
            "Fix: correct the value, or profile the model again."
        )
