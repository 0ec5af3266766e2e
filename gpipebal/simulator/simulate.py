"""`simulate`: the predicted timeline of a plan."""

from __future__ import annotations

from gpipebal.argument_kinds import check_kind
from gpipebal.errors import BalanceError
from gpipebal.plan import Plan
from gpipebal.problem.checks import check_flag
from gpipebal.schedule import (
    Order,
    Schedule,
    check_count,
    check_known_schedule,
    order_of,
    partitions_on_each,
)
from gpipebal.simulator.durations import Durations
from gpipebal.simulator.place import place
from gpipebal.timeline import Timeline, outline
from gpipebal.units import count

__all__ = ["simulate"]


def simulate(
    plan: Plan,
    schedule: Schedule | str | None = None,
    detail: bool = True,
    *,
    pause: float | None = None,
    durations: Durations | None = None,
    devices: int | None = None,
    overlap: bool | None = None,
    late_recompute: bool = False,
) -> Timeline:
    """Predict the timeline of one mini-batch of a plan.

    The times are those of the plan's makespan: of its layers and links. Times that only a profile
    knows are in `Plan.step_time`, and not in this timeline: the loss of each micro-batch inside the
    last partition, forwards that take less without a graph, launches by the host, the optimizer.

    Args:
        plan: Gives the times of its partitions, chunks, checkpoint modes and schedule.
        schedule: Order of the actions, or the name of one of
            `gpipebal.schedule.ALL_SCHEDULES`; None: the plan's own.
        detail: Whether every action is an event of its own. If not, actions of one kind that follow
            one another without idle time are one event, and there are no copies and launches:
            figures are the same, and the timeline of thousands of devices is small; see
            `gpipebal.timeline.outline`.
        pause: Seconds between the last forward of all partitions and the first recompute or
            backward, as ``loss(pipe(x)).backward()`` makes them wait; `plan.pause_time` is the
            measured value. None: no wait, each partition begins its backwards on its own. A
            schedule without phases, such as ``'1f1b'``, cannot have one.
        durations: Seconds of each partition, with transfers, launches or the optimizer; None:
            those of the plan, which may have transfers.
        devices: Number of devices, over which a schedule with several partitions on each deals
            them out; None: as many as the schedule is meant for, half as many as partitions with
            ``'interleaved_1f1b'``, for example.
        overlap: Whether transfers overlap with the devices' work; see `place`. None: what the plan
            says.
        late_recompute: Whether a recompute waits for the gradient too; see `place`.

    Returns:
        A Timeline with source ``'simulated'``.

    Raises:
        KindError: `plan` is not a Plan.
        UnsupportedPlanError: the schedule is not known.
        BalanceError: the schedule does not fit the plan, or can never finish (with a pause); or
            `devices` is not a whole number of 1 or more.
        ProfileError: `pause` is negative or not finite.

    Complexity:
        O(n) for n actions. A plan of 1,024 partitions and 4,096 micro-batches takes less than a
        second with GPipe and 1F1B, because named schedules are columns of numbers all the way.

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
    check_kind("plan", plan, Plan)
    if durations is not None:
        fix = "durations=Durations(forward, recompute, backward), one time for each partition"
        check_kind("durations", durations, Durations, fix)
    order: Schedule | Order
    if isinstance(schedule, Schedule):
        if devices is not None:
            raise BalanceError(
                f"a Schedule has its own devices: devices={devices} (expected None).\n"
                "Fix: leave devices out, or give the schedule's name."
            )
        order = schedule
    else:
        order = _order_of_plan(plan, plan.schedule if schedule is None else schedule, devices)
    provenance = {
        "balance": plan.balance,
        "chunks": schedule.chunks if isinstance(schedule, Schedule) else plan.chunks,
        "checkpoint": (
            plan.checkpoint if isinstance(plan.checkpoint, str) else list(plan.checkpoint)
        ),
        "costs": dict(plan.provenance),
    }
    shows_all = check_flag("detail", detail)
    timeline = place(
        order,
        Durations.of_plan(plan) if durations is None else durations,
        pause=pause,
        overlap=plan.overlaps if overlap is None else overlap,
        late_recompute=late_recompute,
        provenance=provenance,
    )
    return timeline if shows_all else outline(timeline)


def _order_of_plan(plan: Plan, name: str, devices: int | None) -> Order:
    name = check_known_schedule(name)
    n = plan.n_partitions
    n_devices = (
        n // partitions_on_each(name, n) if devices is None else check_count("devices", devices)
    )
    if n % n_devices:
        fits = [number for number in range(1, n + 1) if n % number == 0]
        raise BalanceError(
            f"partitions cannot be dealt out evenly: devices={n_devices} (expected one of "
            f"{', '.join(map(str, fits))}, which part the plan's {count(n, 'partition')}).\n"
            f"Fix: devices={fits[-1]}."
        )
    return order_of(
        name, n_devices, plan.chunks, plan.checkpoint, partitions_per_device=n // n_devices
    )
