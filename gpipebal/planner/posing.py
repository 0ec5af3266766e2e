"""A question about a profile, posed as a problem for the solvers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from gpipebal.errors import BalanceError
from gpipebal.plan import Plan
from gpipebal.planner.devices import DeviceCosts
from gpipebal.planner.execution import Execution, Way
from gpipebal.planner.question import Options, Question, ask
from gpipebal.planner.times import recomputes_for
from gpipebal.problem import Device, Memory, Problem, links_of
from gpipebal.problem.chunking import as_planned, at_chunks
from gpipebal.profile import Profile
from gpipebal.schedule import (
    KNOWN_SCHEDULES,
    SCHEDULES,
    CheckpointMode,
    counted_modes,
    modes_of,
)
from gpipebal.units import count, format_bytes

__all__ = ["Posed", "pose", "posed_as"]


@dataclass(frozen=True)
class Posed:
    """A question at one number of micro-batches.

    Attributes:
        question: What was asked for.
        profile: Costs of the layers at the rows that a micro-batch then has.
        chunks: Micro-batches per mini-batch.
        problem: The problem, with the least memory that partitions need, whatever the others are.
        notes: What a reader should know.
        known: Plans that were found for variants of the question, by what is asked for there.
    """

    question: Question
    profile: Profile
    chunks: int
    problem: Problem
    notes: tuple[str, ...]
    known: dict[str, Plan | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def cautious(self) -> Problem:
        """The problem with the most memory that partitions need, whatever the others are."""
        memory = _memory_of(self.question, self.profile, self.chunks, cautious=True)
        return replace(self.problem, memory=memory)

    def counted(self, modes: Sequence[CheckpointMode]) -> tuple[CheckpointMode, ...]:
        """Return the modes of partitions that count under the schedule."""
        return _counted(self.question, self.chunks, modes)

    def execution(self, way: Way) -> Execution:
        """Return how splits run whose partitions have the modes and devices of a way."""
        question, devices, modes = self.question, self.problem.devices, way.modes
        return Execution(
            chunks=self.chunks,
            checkpoint=modes[0] if len(set(modes)) == 1 else tuple(modes),
            schedule=question.schedule,
            loss_inside=question.loss_inside,
            shared_memory=question.shared_memory,
            gradients_exist=question.gradients_exist,
            devices=None if devices is None else [devices[k] for k in way.order],
            links=self.problem.links,
        )

    @property
    def mini_batch_rows(self) -> int:
        """Rows of the mini-batch: the profile's if it has such micro-batches, or all full ones."""
        return _mini_batch_rows(self.profile, self.chunks)

    @property
    def is_open(self) -> bool:
        """Whether the same cuts can be run in several ways: modes or the order are open."""
        return self.question.checkpoint == "auto" or self.question.any_order


def pose(question: Question, chunks: int | None = None) -> Posed:
    """Pose a question for one number of micro-batches.

    Args:
        question: What was asked for.
        chunks: Micro-batches per mini-batch; None: the profile's.

    Raises:
        BalanceError: a part of the question does not fit the chain.
    """
    profile, notes = at_chunks(question.profile, chunks)
    chunks = profile.chunks if chunks is None else chunks
    devices = _devices_of(question, profile.rows)
    limited = any(device.memory_limit is not None for device in devices or ())
    memory = None
    if limited or question.objective == "peak_memory":
        memory = _memory_of(question, profile, chunks, cautious=False)
    checkpoint = question.checkpoint
    if checkpoint != "auto" and question.schedule != "gpipe" and question.objective != "makespan":
        # Orders of actions tell which recomputes are left out; bottlenecks do not.
        checkpoint = _counted(question, chunks, modes_of(checkpoint, question.n_partitions))
    problem = Problem(
        **profile.layer_times,
        n_partitions=question.n_partitions,
        chunks=chunks,
        checkpoint=checkpoint,
        devices=devices,
        any_order=question.any_order,
        links=None if question.link is None else links_of(profile, question.link),
        memory=memory,
        rules=question.rules,
        n_frozen=profile.n_frozen,
    )
    own = (*question.notes, *notes, *_notes_of(question, profile, chunks, limited=limited))
    return Posed(question, profile, chunks, problem, own)


def _counted(
    question: Question, chunks: int, modes: Sequence[CheckpointMode]
) -> tuple[CheckpointMode, ...]:
    again = recomputes_for(question.schedule, len(modes), chunks, tuple(modes))
    return counted_modes(modes, again)


def _memory_of(question: Question, profile: Profile, chunks: int, *, cautious: bool) -> Memory:
    needs_number = question.schedule != "gpipe" or bool(profile.skips)
    return question.known_memory.of(
        profile,
        chunks=chunks,
        loss_inside=question.loss_inside,
        shared_memory=question.shared_memory,
        most=cautious,
        schedule=question.schedule,
        n_partitions=question.n_partitions if needs_number else 1,
        gradients_exist=question.gradients_exist,
    )


def _mini_batch_rows(profile: Profile, chunks: int) -> int:
    """Return the rows of a mini-batch whose micro-batches have at most a profile's rows."""
    rows = profile.mini_batch_rows
    # With other numbers than the profile's own, all of its one size are full: see `at_chunks`.
    is_parted = profile.chunks == chunks and -(-rows // chunks) == profile.rows
    return rows if is_parted else chunks * profile.rows


def _notes_of(question: Question, profile: Profile, chunks: int, *, limited: bool) -> list[str]:
    notes = []
    rows = _mini_batch_rows(profile, chunks)
    if rows % chunks:
        notes.append(
            f"The mini-batch of {rows} rows has micro-batches of {profile.rows} and of "
            f"{count(rows // chunks, 'row')}; times and memory are those of {profile.rows} for all."
        )
    if KNOWN_SCHEDULES[question.schedule].is_in_parts:
        notes.append(
            "Gradients of weights are taken to be half of the backward of layers that train "
            "parameters: they are not measured by themselves."
        )
    if question.gradients_exist and question.schedule in SCHEDULES:
        notes.append("Memory is that of steps before which the parameters have gradients.")
    limits = question.limits
    if limits is not None:
        given = sorted({n for n in (limits if isinstance(limits, tuple) else [limits]) if n})
        reserves = {limit: question.reserve_of(limit) for limit in given}
        kept = [f"{format_bytes(n)} of {format_bytes(limit)}" for limit, n in reserves.items() if n]
        if kept:
            notes.append(f"Kept in reserve on a device: {', '.join(kept)}.")
    n_unknown = sum(layer.optimizer_bytes is None for layer in profile.layers)
    if limited and n_unknown == profile.n_layers:
        notes.append(
            "The optimizer's state is not known to the profile, and not counted against the limit."
        )
    elif limited and n_unknown:
        notes.append(
            f"The optimizer's state is not known for {count(n_unknown, 'layer')}: partitions with "
            "such a layer count without any."
        )
    if question.checkpoint == "auto" and not limited and question.objective != "peak_memory":
        notes.append("No memory limit was given, so nothing has to be recomputed.")
    return notes


def _devices_of(question: Question, rows: int) -> tuple[Device, ...] | None:
    """Return the devices with their times for micro-batches of `rows` rows, and their limits."""
    places: Sequence[DeviceCosts] | None = question.devices
    if places is None:
        if question.limits is None:
            return None
        places = (Device(),) * question.n_partitions
    limits = question.limits
    of_device = limits if isinstance(limits, tuple) else (limits,) * question.n_partitions
    made: dict[int, Device] = {}
    devices = []
    for j, (place, limit) in enumerate(zip(places, of_device, strict=True)):
        if isinstance(place, Profile):
            # Profiles are large, and mostly one is given for many devices.
            if id(place) not in made:
                made[id(place)] = _device_of(j, place, rows)
            place = made[id(place)]
        elif isinstance(place, Device) and place.times and rows != question.profile.rows:
            raise BalanceError(
                "times of a device are those of other micro-batches: "
                f"devices[{j}] has times, and the profile was taken with "
                f"{count(question.profile.rows, 'row')} (expected {count(rows, 'row')}, as "
                "chunks= asks for).\n"
                "Fix: give the profile of the model on that device, devices=[profile, ...], or the "
                f"number of micro-batches that the profile has, chunks={question.profile.chunks}."
            )
        assert isinstance(place, Device)
        if limit is not None:
            usable = _less_reserve(question, j, limit)
            if place.memory_limit is None or usable < place.memory_limit:
                place = replace(place, memory_limit=usable)
        devices.append(place)
    return tuple(devices)


def _device_of(j: int, profile: Profile, rows: int) -> Device:
    if profile.rows != rows and not profile.other_sizes:
        raise BalanceError(
            f"profile of a device knows other micro-batches only: devices[{j}].rows={profile.rows} "
            f"(expected {rows}, or several sizes).\n"
            f"Fix: profile the model with micro-batches of {rows} rows on each type of device."
        )
    sized = profile if profile.rows == rows else profile.at_rows(rows)
    return Device(**sized.layer_times)


def posed_as(plan: Plan, profile: Profile, options: Options) -> Posed:
    """Pose the question what balances cost under a plan's settings.

    Args:
        plan: The plan.
        profile: What it was made of.
        options: What a plan does not contain, such as devices and links.
    """
    asked: Options = {
        "checkpoint": plan.checkpoint,
        "schedule": plan.schedule,
        "loss_inside": plan.loss_inside,
        "shared_memory": plan.shared_memory,
        "gradients_exist": plan.gradients_exist,
        **options,
    }
    return pose(ask(as_planned(profile, plan), plan.n_partitions, asked), plan.chunks)


def _less_reserve(question: Question, j: int, limit: int) -> int:
    reserve = question.reserve_of(limit)
    if reserve > limit:
        raise BalanceError(
            f"reserve leaves nothing of the memory of device {j}: memory_limit={limit}, "
            f"reserve={reserve} (expected memory_limit of {reserve} or more).\n"
            "Fix: reserve=0 if the limit is what the layers may use."
        )
    return limit - reserve
