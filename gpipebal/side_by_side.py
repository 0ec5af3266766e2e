"""Side by side: plans and timelines of one model in one table, and predicted against measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from gpipebal.argument_kinds import check_kind, check_mapping
from gpipebal.errors import BalanceError, UsageError
from gpipebal.plan import Plan
from gpipebal.planner import training_step
from gpipebal.profile import Profile
from gpipebal.simulator import simulate
from gpipebal.text import aligned
from gpipebal.timeline import COMPUTE_KINDS, KIND_NAMES, Timeline
from gpipebal.units import count, format_bytes, format_change, format_percent, format_seconds

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["CellTime", "Compared", "SideBySide", "set_side_by_side"]


@dataclass(frozen=True)
class Compared:
    """One plan or timeline of a comparison; seconds, fractions and bytes of one mini-batch.

    Attributes:
        name: Its name in the table.
        kind: ``'plan'``, ``'simulated'`` or ``'measured'``.
        balance: Layers in each partition; None: not known.
        chunks: Number of micro-batches.
        makespan: From the first start to the last end.
        bubble_fraction: Idle share of all devices' time.
        imbalance: Largest busy time of a device over the mean one.
        step_time: Predicted training step; None: not known.
        peak_bytes: Predicted peak memory of the partition that needs most; None: not known.
    """

    name: str
    kind: str
    balance: list[int] | None = field(hash=False)
    chunks: int
    makespan: float
    bubble_fraction: float
    imbalance: float
    step_time: float | None = None
    peak_bytes: int | None = None


#: The most partitions of a balance that are written out.
_MOST_SHOWN = 8

#: Where the figures of a plan differ from those in the plan's own text: by its own times, or by the
#: times of a profile.
_BY_PLANS = (
    "A plan stands for the timeline of its layers' own times, which its makespan is made of, with "
    "the loss between the phases if the others have it. The profile that it was made from knows "
    "more of a training step: name it too."
)
_BY_PROFILE = (
    "A plan stands for the training step that the profile predicts, without its optimizer."
)
_BY_SIMULATED = (
    "A plan stands for the timeline of its layers' own times, as the simulated timelines are, with "
    "the loss between the phases if these have it."
)
_ALSO_SIMULATED = "Simulated timelines are of the layers' own times, not of a training step."
_IMBALANCE = (
    "Imbalance is of a device's work in the whole mini-batch; that of a plan by itself, of one "
    "micro-batch."
)


@dataclass(frozen=True)
class CellTime:
    """Mean seconds of one kind of cell of a partition, in the first and in the last timeline."""

    partition: int
    kind: str
    first: float
    last: float


@dataclass(frozen=True)
class SideBySide:
    """Plans and timelines of one model; printed, it is a table.

    Attributes:
        rows: What is compared, in the order given; all are compared with the first.
        cells: If a prediction and a measurement were given, how long each kind of cell took
            in both; else empty.
        timelines: The timelines, by name: those given, and those that the plans predict.
        why_no_cells: Why a prediction and a measurement have no cells in common; empty: they have
            some, or one of the two was not given.
        by_profile: Whether the plans' predictions are of a training step, from a profile.
        other_layers: The plans whose layers are not those of the first plan.
        doubts: What timelines tell of being of another model than the plans, in sentences.
    """

    rows: tuple[Compared, ...]
    cells: tuple[CellTime, ...]
    timelines: Mapping[str, Timeline]
    why_no_cells: str = ""
    by_profile: bool = False
    other_layers: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()

    def to_frame(self) -> pd.DataFrame:
        """Return one row per plan or timeline; balances are tuples, for `groupby`."""
        import pandas as pd

        frame = pd.DataFrame([asdict(row) for row in self.rows])
        return frame.assign(balance=frame["balance"].map(tuple, na_action="ignore"))

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        return {
            "rows": [asdict(row) for row in self.rows],
            "cells": [asdict(cell) for cell in self.cells],
            "why_no_cells": self.why_no_cells,
            "by_profile": self.by_profile,
            "other_layers": list(self.other_layers),
            "doubts": list(self.doubts),
        }

    def __str__(self) -> str:
        first = self.rows[0]
        lines = [["", "kind", "chunks", "makespan", "against the first", "bubble", "imbalance"]]
        lines[0] += ["training step", "peak memory", "balance"]
        for row in self.rows:
            lines.append(
                [
                    row.name,
                    row.kind,
                    str(row.chunks),
                    format_seconds(row.makespan),
                    "" if row is first else _change(first.makespan, row.makespan),
                    format_percent(row.bubble_fraction),
                    f"{row.imbalance:.3f}",
                    "-" if row.step_time is None else format_seconds(row.step_time),
                    "-" if row.peak_bytes is None else format_bytes(row.peak_bytes),
                    "-" if row.balance is None else _short(row.balance),
                ]
            )
        text = aligned(lines, left=(0, 1, 9))
        if any(row.kind == "plan" for row in self.rows):
            text += ["", *self._about_plans(), _IMBALANCE]
        if self.other_layers:
            first_plan = next(row.name for row in self.rows if row.kind == "plan")
            text.append(
                f"Note: {', '.join(self.other_layers)}: layers differ from those of {first_plan}, "
                "so this compares models, not splits of one."
            )
        text += [f"Note: {doubt}" for doubt in self.doubts]
        if self.cells:
            rows = [["partition", "cell", "predicted", "measured", "measured is"]]
            rows += [
                [
                    str(cell.partition),
                    KIND_NAMES[cell.kind],
                    format_seconds(cell.first),
                    format_seconds(cell.last),
                    _change(cell.first, cell.last),
                ]
                for cell in self.cells
            ]
            text += ["", *aligned(rows, left=(1,))]
        if self.why_no_cells:
            text += ["", f"Cells are not compared: {self.why_no_cells}."]
        return "\n".join(text)

    def _about_plans(self) -> list[str]:
        """Say what a plan's row is of, and where that is not what others are of."""
        given = [self.timelines[row.name] for row in self.rows if row.kind != "plan"]
        if self.by_profile:
            return [_BY_PROFILE, *[_ALSO_SIMULATED] * any(map(_is_of_layers, given))]
        return [_BY_SIMULATED if _are_of_layers(given) else _BY_PLANS]


def set_side_by_side(
    nouns: Mapping[str, Plan | Timeline], profile: Profile | None = None
) -> SideBySide:
    """Set plans and timelines of one model side by side.

    A plan stands for the timeline that it predicts. With a profile that is the timeline of the
    training step; see `gpipebal.planner.training_step`. Without one, and beside simulated timelines
    alone, it is the timeline of the layers' own times, as `simulate` has it. It has the pause for
    the loss between the phases if one of the timelines to compare with has it too.

    Args:
        nouns: Plans and timelines, by the name that each has in the table.
        profile: The profile that the plans were made from; None: it is not available.

    Raises:
        BalanceError: a plan was made from other costs than the profile's.
        UsageError: there is nothing to compare, or the numbers of layers differ.

    Example:
        >>> from gpipebal.planner import evaluate
        >>> profile = Profile.from_costs([1.0, 1.0, 2.0], chunks=4)
        >>> both = {str(b): evaluate(profile, b, checkpoint="never") for b in ([1, 2], [2, 1])}
        >>> [(row.name, row.makespan) for row in set_side_by_side(both).rows]
        [('[1, 2]', 39.0), ('[2, 1]', 30.0)]
    """
    for name, noun in check_mapping("nouns", nouns, "nouns={'a': plan, 'b': timeline}").items():
        if not isinstance(noun, Plan):
            check_kind(f"nouns[{name!r}]", noun, Timeline)
    if len(nouns) < 2:
        raise UsageError(
            f"there is nothing to compare with: {len(nouns)} of plans and timelines (expected 2 or "
            "more).\nFix: name another plan or timeline of the same model."
        )
    layers = {name: sum(balance) for name, noun in nouns.items() if (balance := _balance(noun))}
    if profile is not None:
        check_kind("profile", profile, Profile)
        layers["the profile"] = profile.n_layers
        if not any(isinstance(noun, Plan) for noun in nouns.values()):
            raise UsageError(
                "a profile is used with a plan, and there is none: "
                f"{count(len(nouns), 'timeline')} (expected a plan too).\n"
                "Fix: name a plan too, or leave the profile out."
            )
    if len(set(layers.values())) > 1:
        sizes = ", ".join(f"{name}: {n}" for name, n in layers.items())
        raise UsageError(
            f"plans and timelines are of different models: layers {sizes} (expected as many in "
            "all).\nFix: compare those of one model."
        )
    given = [noun for noun in nouns.values() if isinstance(noun, Timeline)]
    has_pause = any(map(_has_pause, given))
    if _are_of_layers(given):
        profile = None  # a plan's training step has other times than they have
    timelines = {
        name: noun if isinstance(noun, Timeline) else _predicted(name, noun, profile, has_pause)
        for name, noun in nouns.items()
    }
    rows = tuple(_row(name, noun, timelines[name]) for name, noun in nouns.items())
    plans = {name: noun for name, noun in nouns.items() if isinstance(noun, Plan)}
    of_plans = list(plans.values())
    others = tuple(name for name, plan in plans.items() if _differ(plan, of_plans[0]))
    predicted = next((name for name in nouns if timelines[name].source == "simulated"), None)
    measured = next((name for name in nouns if timelines[name].source == "measured"), None)
    why, cells = "", tuple[CellTime, ...]()
    if predicted is not None and measured is not None:
        why = _why_no_cells(timelines[predicted], nouns[predicted], timelines[measured])
        cells = () if why else _cells(timelines[predicted], timelines[measured])
    return SideBySide(
        rows,
        cells,
        timelines,
        why_no_cells=why,
        by_profile=profile is not None,
        other_layers=others,
        doubts=tuple(_doubts(nouns, of_plans)),
    )


def _differ(plan: Plan, first: Plan) -> bool:
    """Tell whether a layer has another name, or another fingerprint.

    Fingerprints of different versions, and missing ones, tell nothing.
    """
    prints, of_first = (
        [each for part in one.partitions for each in part.fingerprints] for one in (plan, first)
    )
    changed = any(
        a != b and a.partition(":")[0] == b.partition(":")[0]
        for a, b in zip(prints, of_first, strict=False)
    )
    return changed or plan.names != first.names


def _doubts(nouns: Mapping[str, Plan | Timeline], plans: Sequence[Plan]) -> Iterator[str]:
    """Say which timelines may be of another model than the plans, as far as they tell."""
    profiles = [_told_apart(plan.provenance) for plan in plans]
    for name, noun in nouns.items():
        if isinstance(noun, Plan) or not plans:
            continue
        if noun.n_partitions not in {plan.n_partitions for plan in plans}:
            number = count(noun.n_partitions, "partition")
            yield f"{name} has {number}, as no plan here: another split, or another model."
        costs = noun.provenance.get("costs")
        if isinstance(costs, Mapping) and _told_apart(costs) not in profiles:
            yield f"{name} has the costs of another profile than the plans, or another model's."


def _told_apart(provenance: Mapping[str, Any]) -> list[Any]:
    """Return what tells profiles apart; other entries change with chunks and quantiles."""
    return [provenance.get(name) for name in ("method", "device", "date")]


def _predicted(name: str, plan: Plan, profile: Profile | None, has_pause: bool) -> Timeline:
    if profile is None:
        return simulate(plan, pause=plan.pause_time if has_pause else None)
    try:
        return training_step(profile, plan)
    except BalanceError as error:
        what = str(error).splitlines()[0]
        raise BalanceError(f"{name}: {what}\nFix: leave the profile out, or that plan.") from error


def _are_of_layers(timelines: Sequence[Timeline]) -> bool:
    """Whether all that is to be compared with plans was simulated from layers' own times."""
    return bool(timelines) and all(map(_is_of_layers, timelines))


def _is_of_layers(timeline: Timeline) -> bool:
    """Whether it was simulated from a plan: a training step's timeline does not name the costs."""
    return timeline.source == "simulated" and "costs" in timeline.provenance


def _has_pause(timeline: Timeline) -> bool:
    """Whether a loss was computed between the phases, as far as it can be told."""
    if timeline.source == "measured":
        return not timeline.provenance.get("loss_inside", False)
    return bool(timeline.provenance.get("pause"))


def _row(name: str, noun: Plan | Timeline, timeline: Timeline) -> Compared:
    plan = noun if isinstance(noun, Plan) else None
    return Compared(
        name=name,
        kind="plan" if plan else timeline.source,
        balance=_balance(noun),
        chunks=timeline.chunks,
        makespan=timeline.makespan,
        bubble_fraction=timeline.bubble_fraction,
        imbalance=timeline.imbalance,
        step_time=plan.step_time if plan else None,
        peak_bytes=plan.peak_bytes if plan else None,
    )


def _balance(noun: Plan | Timeline) -> list[int] | None:
    if isinstance(noun, Plan):
        return noun.balance
    found = noun.provenance.get("balance")
    good = isinstance(found, (list, tuple)) and all(type(size) is int for size in found)
    return list(found) if good and found else None


def _loss_inside(noun: Plan | Timeline) -> bool | None:
    """Tell whether the last partition computes the loss; None: it cannot be told."""
    if isinstance(noun, Plan):
        return noun.loss_inside
    found = noun.provenance.get("loss_inside")
    return found if isinstance(found, bool) else None


def _why_no_cells(predicted: Timeline, of_predicted: Plan | Timeline, measured: Timeline) -> str:
    """Say why two timelines do not have the same cells; empty if they have.

    The prediction may be that of a plan, which is `of_predicted` then, and else itself.
    """
    for what, one, other in (
        ("partitions", predicted.n_partitions, measured.n_partitions),
        ("micro-batches", predicted.chunks, measured.chunks),
    ):
        if one != other:
            return f"{one} {what} were predicted, {other} measured"
    balances = _balance(of_predicted), _balance(measured)
    if balances[0] and balances[1] and balances[0] != balances[1]:
        return f"balance {_short(balances[0])} was predicted, {_short(balances[1])} measured"
    insides = _loss_inside(of_predicted), _loss_inside(measured)
    if None not in insides and insides[0] != insides[1]:
        places = ["inside the pipeline" if inside else "outside of it" for inside in insides]
        return f"the loss is {places[0]} in the prediction and {places[1]} in the measurement"
    if not (predicted.tells_micro_batches and measured.tells_micro_batches):
        return "a timeline without detail does not tell micro-batches"
    return ""


def _cells(predicted: Timeline, measured: Timeline) -> tuple[CellTime, ...]:
    """Compare a prediction with a measurement of the same cells."""
    before, after = _mean_times(predicted), _mean_times(measured)
    return tuple(
        CellTime(*place, before[place], after[place])
        for place in sorted(before, key=lambda place: (place[0], COMPUTE_KINDS.index(place[1])))
        if place in after
    )


def _mean_times(timeline: Timeline) -> dict[tuple[int, str], float]:
    times: dict[tuple[int, str], list[float]] = {}
    for event in timeline.events:
        if event.kind in COMPUTE_KINDS:
            times.setdefault((event.partition, event.kind), []).append(event.end - event.start)
    return {place: sum(found) / len(found) for place, found in times.items()}


def _change(before: float, after: float) -> str:
    return format_change(after / before - 1) if before else "-"


def _short(balance: list[int]) -> str:
    """Write a balance; if there are many partitions only the first ones."""
    shown = ",".join(map(str, balance[:_MOST_SHOWN]))
    return f"[{shown}]" if len(balance) <= _MOST_SHOWN else f"[{shown},...]"
