"""The question that `solve` is asked, checked and put into one object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

from gpipebal.argument_kinds import check_kind, check_options, is_word, of_array
from gpipebal.errors import BalanceError, UnsupportedPlanError, UsageError
from gpipebal.memory.loss import is_loss_inside
from gpipebal.objectives import MINIMISED, Objective, Quantity, check_objective
from gpipebal.plan.checks import check_chunks
from gpipebal.planner.devices import DeviceCosts, check_shared_devices, devices_asked
from gpipebal.planner.layer_rules import LayerKey, join_rules
from gpipebal.planner.own_cost import check_cost
from gpipebal.planner.quantiles import at_quantile, quantile_of
from gpipebal.planner.runs.memory import KnownMemory
from gpipebal.planner.times import runnable
from gpipebal.problem import RULE_NAMES, Device, Link, Rules
from gpipebal.problem.checks import check_flag, check_limit, check_time_limit
from gpipebal.problem.chunking import chunk_candidates
from gpipebal.problem.fits import check_any_order, check_enough_layers
from gpipebal.problem.link import check_link
from gpipebal.profile import Profile
from gpipebal.schedule import (
    SCHEDULES,
    Checkpoint,
    check_checkpoint,
    check_count,
    check_known_schedule,
    modes_of,
    shares_devices,
)
from gpipebal.solvers.deadline import NO_DEADLINE, Deadline
from gpipebal.solvers.dense import AnyCost
from gpipebal.units import parse_bytes

__all__ = [
    "Options",
    "Question",
    "Size",
    "ask",
    "check_memory_limit",
    "default_reserve",
]

#: Bytes, or a text such as ``'16 GiB'``.
Size = int | str


class Options(TypedDict, total=False):
    """The keyword arguments of `solve`, which explains them."""

    chunks: int | Literal["auto"] | Sequence[int] | None
    checkpoint: Checkpoint | Literal["auto"]
    schedule: str
    objective: Objective
    devices: Sequence[DeviceCosts] | None
    any_order: bool
    memory_limit: Size | Sequence[Size | None] | None
    reserve: Size | None
    link: Link | None
    pin: Mapping[LayerKey, int] | None
    keep_together: Iterable[tuple[LayerKey, LayerKey]]
    no_cut: Iterable[LayerKey]
    max_layers: int | None
    min_layers: int | None
    rules: Rules | None
    quantile: float | None
    cost: AnyCost | None
    method: str
    time_limit: float | None
    loss_inside: bool | None
    shared_memory: bool | None
    gradients_exist: bool


@dataclass(frozen=True)
class Question:
    """What is asked for; `gpipebal.planner.posing` turns it into problems.

    Attributes:
        profile: Costs of the layers, at the quantile that was asked for.
        n_partitions: Number of partitions.
        chunks: Numbers of micro-batches to choose from; None: the profile's.
        checkpoint: One mode, one for each partition, or ``'auto'``.
        schedule: Name of the schedule.
        objective: What is minimised, unless there is a `cost`.
        devices: The device of each partition; None: all like the profile's.
        any_order: Whether they may change places.
        limits: Memory limit of each device, before the reserve; None: none at all. A single one
            is for every device, however many there are.
        reserve: Bytes kept free on every device; None: the default of its type.
        link: What connects the devices; None: handing over costs nothing.
        rules: Where cuts may not be, and which layers belong where.
        cost: A cost of runs that takes the place of the objective; None: none.
        method: Name of an algorithm, or ``'auto'``.
        time_limit: Seconds for an open-ended search; None: as long as it takes.
        loss_inside: Whether the last partition computes the loss.
        shared_memory: Whether all partitions live in one memory.
        gradients_exist: Whether the parameters have gradients before the step.
        notes: What a reader should know.
        known_memory: What is known about the memory of the profile's layers, for this question and
            for changed copies of it.
        deadline: When no more advice is looked for.
    """

    profile: Profile
    n_partitions: int
    chunks: tuple[int, ...] | None
    checkpoint: Checkpoint | Literal["auto"]
    schedule: str
    objective: Objective
    devices: tuple[DeviceCosts, ...] | None
    any_order: bool
    limits: int | tuple[int | None, ...] | None
    reserve: int | None
    link: Link | None
    rules: Rules | None
    cost: AnyCost | None
    method: str
    time_limit: float | None
    loss_inside: bool
    shared_memory: bool
    gradients_exist: bool
    notes: tuple[str, ...]
    known_memory: KnownMemory = field(default_factory=KnownMemory, compare=False, repr=False)
    deadline: Deadline = field(default=NO_DEADLINE, compare=False, repr=False)

    @property
    def minimised(self) -> Quantity:
        """What is minimised: the objective, or the cost that takes its place."""
        return self.objective if self.cost is None else "cost"

    @property
    def is_searched(self) -> bool:
        """Whether splits have to be simulated: for the makespan, but not GPipe's."""
        return self.schedule != "gpipe" and self.minimised == "makespan"

    def reserve_of(self, limit: int) -> int:
        """Return what is kept free on a device of this memory."""
        if self.reserve is not None:
            return self.reserve
        return default_reserve(self.profile.provenance.get("device_type"), limit)


def default_reserve(device_type: object, limit: int) -> int:
    """Return the bytes that are kept free on a device unless the caller says otherwise.

    On a CPU none. On a GPU 512 MiB for the context and what libraries keep, and a twentieth of the
    memory for what the allocator cannot use because it is fragmented: a cautious guess, not a
    measurement. A profile of given costs has no device, and no reserve.

    Example:
        >>> default_reserve("cpu", 2**30), default_reserve("cuda", 20 * 2**30) / 2**30
        (0, 1.5)
    """
    return 0 if device_type != "cuda" else 2**29 + limit // 20


def ask(profile: Profile, partitions: int, options: Options) -> Question:
    """Check the arguments of `solve`.

    Raises:
        BalanceError: one that makes no sense.
        KindError: `profile` is not a Profile.
        ProfileError: the profile does not have the costs that they need.
    """
    check_kind("profile", profile, Profile)
    check_options(options, Options.__annotations__, "solve")
    n_partitions = check_count("partitions", partitions)
    check_enough_layers("partitions", n_partitions, profile.n_layers)
    given: Mapping[str, Any] = options
    notes: list[str] = []
    quantile = options.get("quantile")
    if quantile is not None:
        profile = at_quantile(profile, quantile)
    taken = quantile_of(profile)
    if taken != 0.5:
        notes.append(f"Times are upper quantiles ({taken:g}) of the measured spread, not medians.")
    schedule = check_known_schedule(options.get("schedule", "gpipe"))
    inside = is_loss_inside(schedule, options.get("loss_inside"))
    shared = options.get("shared_memory")
    shared = profile.shares_memory if shared is None else check_flag("shared_memory", shared)
    checkpoint = _checkpoint(options.get("checkpoint", "except_last"), n_partitions)
    objective = options.get("objective", "makespan")
    check_objective(objective)
    devices = devices_asked(options.get("devices"), profile, n_partitions, quantile)
    own_limits = any(
        isinstance(one, Device) and one.memory_limit is not None for one in devices or ()
    )
    limited = own_limits or options.get("memory_limit") is not None
    _check_memory_known(schedule, limited=limited or objective == "peak_memory")
    any_order = options.get("any_order")
    any_order = any_order is not None and check_flag("any_order", any_order)
    check_any_order(any_order, devices)
    if shares_devices(schedule) and devices is not None:
        check_shared_devices(schedule, devices, any_order=any_order)
    cost = check_cost(options.get("cost"))
    asked = options.get("chunks")
    chunks = _chunks(asked, profile, "cost" if cost is not None else objective)
    if chunks is not None and isinstance(asked, str):
        chunks = runnable(chunks, schedule, n_partitions)
    if cost is not None and (checkpoint == "auto" or any_order):
        raise BalanceError(
            f"a cost of runs leaves nothing else open: checkpoint={checkpoint!r}, "
            f"any_order={any_order} (expected modes and devices that are given, where cost is).\n"
            "Fix: checkpoint='except_last' and any_order=False; the cost may count both."
        )
    limits, reserve = _limits(options, n_partitions)
    question = Question(
        profile=profile,
        n_partitions=n_partitions,
        chunks=chunks,
        checkpoint=checkpoint,
        schedule=schedule,
        objective=objective,
        devices=devices,
        any_order=any_order,
        limits=limits,
        reserve=reserve,
        link=check_link("link", options.get("link")),
        rules=join_rules(
            profile, options.get("rules"), **{name: given.get(name) for name in RULE_NAMES}
        ),
        cost=cost,
        method=options.get("method", "auto"),
        time_limit=check_time_limit(options.get("time_limit")),
        loss_inside=inside,
        shared_memory=shared,
        gradients_exist=check_flag("gradients_exist", options.get("gradients_exist", False)),
        notes=tuple(notes),
    )
    _check_method(question)
    return question


def _checkpoint(asked: Any, n_partitions: int) -> Checkpoint | Literal["auto"]:
    if isinstance(asked, str) and asked == "auto":
        return "auto"
    modes: Checkpoint = of_array(asked)
    check_checkpoint(modes, or_auto=True)
    return modes if isinstance(modes, str) else modes_of(tuple(modes), n_partitions)


def _limits(
    options: Options, n_partitions: int
) -> tuple[int | tuple[int | None, ...] | None, int | None]:
    """Return the memory limits, and what is to be kept free of each."""
    limits = check_memory_limit(options.get("memory_limit"), n_partitions)
    reserve = options.get("reserve")
    if reserve is None:
        return limits, None
    if limits is None:
        raise BalanceError(
            f"reserve is taken off a limit, and there is none: reserve={reserve!r:.60}, "
            "memory_limit=None (expected a limit where a reserve is given; that of a Device has "
            "none).\nFix: reserve=None, or memory_limit='16 GiB'."
        )
    return limits, _size("reserve", reserve)


def _check_method(question: Question) -> None:
    """Refuse a method where there is no choice; solvers say whether others apply."""
    only = "schedule search" if question.is_searched else "dense table"
    if not is_word(question.method, "auto", only) and (
        question.is_searched or question.cost is not None
    ):
        why = f"schedule={question.schedule!r}" if question.is_searched else "cost"
        raise BalanceError(
            f"method does not apply where {why} is given: method={question.method!r:.60} (expected "
            f"'auto' or {only!r}).\nFix: method='auto'."
        )


def _check_memory_known(schedule: str, *, limited: bool) -> None:
    if limited and schedule not in SCHEDULES:
        raise UnsupportedPlanError(
            f"memory is not known under this schedule: schedule={schedule!r} (expected one of "
            f"{', '.join(map(repr, SCHEDULES))} where memory counts).\n"
            "Fix: schedule='1f1b', or no memory limit, of devices neither, and "
            "objective='makespan'."
        )


def _chunks(chunks: Any, profile: Profile, minimised: Quantity) -> tuple[int, ...] | None:
    if chunks is None:
        return None
    chunks = of_array(chunks)
    if is_word(chunks, "auto"):
        found = tuple(chunk_candidates(profile))
    elif isinstance(chunks, (list, tuple, range)):
        found = tuple(dict.fromkeys(map(check_chunks, chunks)))
        if not found:
            raise BalanceError(
                "chunks leave no choice: chunks=[] (expected one or more numbers of micro-batches)"
                ".\nFix: chunks=None for the profile's."
            )
        if len(found) > 1:
            chunk_candidates(profile)  # raises where the profile cannot compare them
    else:
        return (check_chunks(chunks),)
    if len(found) > 1 and not MINIMISED[minimised].compares_chunks:
        raise BalanceError(
            f"numbers of micro-batches cannot be compared by the {minimised}: chunks={chunks!r} "
            "(expected one number: that of one micro-batch is smaller the more there are).\n"
            "Fix: objective='makespan', or one number of chunks."
        )
    return found


def check_memory_limit(
    memory_limit: Size | Sequence[Size | None] | None, n_partitions: int
) -> int | tuple[int | None, ...] | None:
    """Return a limit in bytes, for all devices or one for each.

    Raises:
        BalanceError: it is not a size, or not one for each partition.
    """
    if memory_limit is None:
        return None
    memory_limit = of_array(memory_limit)
    if isinstance(memory_limit, (list, tuple)):
        if len(memory_limit) != n_partitions:
            raise BalanceError(
                f"memory limits are too many or too few: len(memory_limit)={len(memory_limit)} "
                f"(expected partitions={n_partitions}).\n"
                "Fix: one limit per device, None for no limit; or one for all."
            )
        return tuple(
            None if one is None else _size(f"memory_limit[{j}]", one)
            for j, one in enumerate(memory_limit)
        )
    return _size("memory_limit", memory_limit)


def _size(name: str, size: Any) -> int:
    try:
        return check_limit(name, parse_bytes(size, name) if isinstance(size, str) else size)
    except UsageError as error:
        raise BalanceError(str(error)) from None
