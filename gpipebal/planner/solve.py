"""The best plan of a profiled chain, with its proof."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from gpipebal.errors import BalanceError
from gpipebal.plan import Plan
from gpipebal.planner.advice import explain
from gpipebal.planner.devices import DeviceCosts
from gpipebal.planner.layer_rules import LayerKey
from gpipebal.planner.plans import with_sensitivity
from gpipebal.planner.posing import Posed, pose
from gpipebal.planner.question import Options, Size, ask
from gpipebal.planner.search.best import best_of_all
from gpipebal.planner.search.best_plans import best_plans
from gpipebal.planner.times import order_for
from gpipebal.problem import Link, Rules
from gpipebal.profile import Profile
from gpipebal.schedule import Checkpoint, check_count
from gpipebal.solvers import Objective
from gpipebal.solvers.dense import AnyCost
from gpipebal.solvers.dispatch import check_method

if TYPE_CHECKING:
    from typing import Unpack

__all__ = ["posed_of", "select_method", "solve", "top_plans"]


def solve(
    profile: Profile,
    partitions: int,
    *,
    chunks: int | Literal["auto"] | Sequence[int] | None = None,
    checkpoint: Checkpoint | Literal["auto"] = "except_last",
    schedule: str = "gpipe",
    objective: Objective = "makespan",
    devices: Sequence[DeviceCosts] | None = None,
    any_order: bool = False,
    memory_limit: Size | Sequence[Size | None] | None = None,
    reserve: Size | None = None,
    link: Link | None = None,
    pin: Mapping[LayerKey, int] | None = None,
    keep_together: Iterable[tuple[LayerKey, LayerKey]] = (),
    no_cut: Iterable[LayerKey] = (),
    max_layers: int | None = None,
    min_layers: int | None = None,
    rules: Rules | None = None,
    quantile: float | None = None,
    cost: AnyCost | None = None,
    method: str = "auto",
    time_limit: float | None = None,
    loss_inside: bool | None = None,
    shared_memory: bool | None = None,
    gradients_exist: bool = False,
) -> Plan:
    """Find the best way to cut a profiled chain into partitions, with its proof.

    Minimises `objective` over all splits into exactly `partitions` non-empty runs of consecutive
    layers that fit their devices and keep the rules; and, where they are left open, over the
    number of micro-batches, checkpoint modes and the order of devices (under schedules other than
    ``'gpipe'``, modes and order are chosen for the bottleneck first). Among equally good splits it
    takes the one with the smaller bottleneck, then the one with the smaller sum of squares of the
    partitions' times, then the one with the leftmost cuts. But where ``plan.method`` is
    ``'box search'``, ``'integer program'``, ``'schedule search'`` or ``'dense table'``, it takes
    the first that the search meets, which is always the same one.

    Args:
        profile: Costs of the layers for one micro-batch.
        partitions: Number of partitions, 1 to the number of layers.
        chunks: Micro-batches per mini-batch; None: the profile's; several: the best of these;
            ``'auto'``: the best of all numbers whose costs the profile can tell. If the profile was
            taken at several numbers of rows, the mini-batch stays that of the profile, and a
            micro-batch has ``ceil(mini_batch_rows / chunks)`` rows. If it was taken at one number
            of rows only, each micro-batch has the profile's rows, the mini-batch grows with the
            number of micro-batches, and the plan says so.
        checkpoint: Which micro-batches are recomputed: one mode, one for each partition, or
            ``'auto'``: in each partition the fastest mode that fits its device.
        schedule: ``'gpipe'``; ``'1f1b'``, which `GPipe.step` runs as well; or one that only torch
            runs. Under all but ``'gpipe'`` the least makespan is searched for with a simulator
            (`gpipebal.planner.schedules`), and the plan says how far it is from a proven bound.
        objective: ``'makespan'``, the seconds from the first forward to the last backward of a
            mini-batch; ``'bottleneck'``, the largest time of a partition for one micro-batch; or
            ``'peak_memory'``, the largest peak memory of a partition, in bytes.
        devices: The device of each partition: a `Device`; or its speed, 1 for one as fast as the
            profile's and 2 for one twice as fast; or a profile of the same chain taken on it, whose
            times at the same number of rows count. None: all like the profile's.
        any_order: Whether devices may change places; the plan's ``devices`` tell which runs what.
        memory_limit: Memory of a device, as bytes or as a text such as ``'16 GiB'``: one for all,
            or one for each. A partition may need what `reserve` leaves of it. This includes the
            most that may wait for busy neighbours. None: no limit. Where a `Device` has a limit
            too, the lower one counts.
        reserve: Memory that is kept free on every device; None: 0 on CPUs, and on GPUs 512 MiB and
            a twentieth. The plan says how much.
        link: What connects the devices: everything that crosses a cut takes its time, a skip
            connection in every cut that it goes past. None: handing over takes no time.
        pin: The partition of each pinned layer; layers by index or name.
        keep_together: First and last layer of runs; each run is held by one partition.
        no_cut: Layers that stay with the layer before them.
        max_layers: Most layers of a partition.
        min_layers: Fewest layers of a partition.
        rules: Rules of the same kinds as one `Rules`, with layers by index; they are added to the
            five arguments above.
        quantile: Plan with this upper quantile of the measured times, such as 0.9; None: medians.
        cost: Called as ``cost(first, end, partition)``, with `end` one past the last layer: the
            largest of these is minimised instead of `objective`. None or infinity: not allowed.
            It is not asked about runs that rules forbid.
        method: ``'auto'``, or the name of an algorithm: the one that `select_method` names, or one
            that is more general.
        time_limit: Seconds after which an open-ended search stops and returns the best plan found
            so far, with its gap. Each number of micro-batches gets this time for itself. At least
            one way to cut is always tried, except that the integer program may end without any,
            and then raises. As long as no plan is known that fits the limits, everything that may
            lead to one is tried, whatever the time; and if nothing fits, the search for what would
            help may take as long again. Not included in the time: working out the memory of runs
            of layers where there are limits (seconds for thousands of layers), and making the final
            plan (seconds for very many micro-batches); and for the integer program, building it and
            what HiGHS does between two looks at the clock. If these two would take longer than the
            limit, only a bound is worked out, as far as it is known beforehand.
        loss_inside: Whether the last partition computes the loss of each micro-batch, as in
            `GPipe.step`, or the caller computes that of the mini-batch; None: the caller with
            schedule ``'gpipe'``, else the last partition. Its memory counts; its time is not part
            of the makespan, but of the step.
        shared_memory: Whether all partitions live in one memory, which decides how much memory a
            cut costs; None: True if the profile was taken on a CPU.
        gradients_exist: Whether the parameters have gradients before the step, as when those of
            several mini-batches are accumulated, or after ``zero_grad(set_to_none=False)``:
            gradients then take memory from the beginning of the step.

    Returns:
        A `Plan`, whose ``status`` is ``'optimal'`` when ``value == lower_bound``. Its ``notes`` say
        what was assumed.

    Raises:
        BalanceError: an argument that makes no sense, or does not fit the others.
        InfeasibleError: no plan fits; the text says what would help.
        KindError: `profile` is not a Profile.
        ProfileError: the profile does not have the costs that are asked for.
        UnsupportedPlanError: an unknown schedule, or one under which a cost that is asked for is
            not known.

    Complexity:
        O(n + p k log n) for n layers, k partitions and p probes, plus the tie-break; see
        `gpipebal.solvers.split` for p. With limits O(n^2) for their memory (see `RunMemory`), and
        some tens of probes of O(n k) machine words.

    Source:
        See `gpipebal.solvers`.

    Example:
        >>> plan = solve(Profile.from_costs([1.0, 2.0, 3.0, 4.0]), 2, chunks=4)
        >>> plan.balance, plan.status
        ([3, 1], 'optimal')
    """
    options = Options(
        chunks=chunks,
        checkpoint=checkpoint,
        schedule=schedule,
        objective=objective,
        devices=devices,
        any_order=any_order,
        memory_limit=memory_limit,
        reserve=reserve,
        link=link,
        pin=pin,
        keep_together=keep_together,
        no_cut=no_cut,
        max_layers=max_layers,
        min_layers=min_layers,
        rules=rules,
        quantile=quantile,
        cost=cost,
        method=method,
        time_limit=time_limit,
        loss_inside=loss_inside,
        shared_memory=shared_memory,
        gradients_exist=gradients_exist,
    )
    posed = posed_of(profile, partitions, options)
    best = best_of_all(posed)
    if best is None:
        raise explain(posed)
    return with_sensitivity(*best)


def top_plans(profile: Profile, k: int, partitions: int, **options: Unpack[Options]) -> list[Plan]:
    """Find the k best plans, no two with the same balance and number of micro-batches.

    A run can then try them, and keep the one that proves to be fastest.

    Args:
        profile: Costs of the layers for one micro-batch.
        k: How many.
        partitions: As for `solve`.
        options: As for `solve`, except for `method`. The first plan has the `time_limit` for
            itself, and all others together have as much again.

    Returns:
        Plans, best first; fewer than `k` if no more were found. The first is no worse than that of
        `solve`. All of them have the same bound, which holds for every plan: the first is
        ``'optimal'`` if that can be proven, and the gap of each of the others tells how far it is
        from the best. They are the `k` best where each search proves its plan; elsewhere a better
        one may have been left out, but none below the bound.

    Raises:
        BalanceError: as `solve`; a `k` that is not 1 or more; a `method`.
        InfeasibleError, ProfileError, UnsupportedPlanError: as `solve`.

    Complexity:
        Up to K searches for each plan but the first, and K partitions; fewer where many plans are
        equally good. Each takes up to as long as `solve`.

    Source:
        Lawler, "A procedure for computing the K best solutions to discrete optimization problems
        and its application to the shortest path problem", Management Science 18(7), 1972.

    Example:
        >>> profile = Profile.from_costs([1.0, 2.0, 3.0, 4.0], chunks=4)
        >>> [(plan.balance, plan.value) for plan in top_plans(profile, 2, 2)]
        [([3, 1], 102.0), ([2, 2], 114.0)]
    """
    k = check_count("k", k)
    posed = posed_of(profile, partitions, options)
    method = posed[0].question.method
    if method != "auto":
        raise BalanceError(
            f"option does not apply to the next best plans: method={method!r} (expected 'auto': "
            "they are searched for among splits that differ, which takes other algorithms).\n"
            "Fix: method='auto'."
        )
    found = best_plans(posed, k)
    if not found:
        raise explain(posed)
    return [with_sensitivity(*one) for one in found]


def select_method(profile: Profile, partitions: int, **options: Unpack[Options]) -> str:
    """Name the algorithm that `solve` runs for a question; see `gpipebal.solvers.select_method`.

    Args:
        profile: Costs of the layers for one micro-batch.
        partitions: As for `solve`.
        options: As for `solve`.

    Returns:
        One of `gpipebal.solvers.METHODS`, or ``'schedule search'`` or ``'dense table'``; if there
        are several numbers of micro-batches to choose from, the algorithm for the largest.

    Raises:
        BalanceError: as `solve`.

    Example:
        >>> select_method(Profile.from_costs([1.0, 2.0]), 2, chunks=4)
        'two-threshold sweep'
    """
    posed = max(posed_of(profile, partitions, options), key=lambda one: one.chunks)
    question = posed.question
    if question.cost is not None:
        return "dense table"
    if question.is_searched:
        # Raises if the schedule cannot be had.
        order_for(question.schedule, question.n_partitions, posed.chunks, "never")
        return "schedule search"
    return check_method(posed.problem, question.objective, question.method)


def posed_of(profile: Profile, partitions: int, options: Options) -> list[Posed]:
    """Pose the question for each number of micro-batches."""
    question = ask(profile, partitions, options)
    return [pose(question, chunks) for chunks in question.chunks or (None,)]
