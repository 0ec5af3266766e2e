"""Checks of a plan: what makes no sense is refused."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from gpipebal.argument_kinds import annotations_of, check_kind
from gpipebal.errors import BalanceError, ProfileError
from gpipebal.objectives import MINIMISED
from gpipebal.plan.parts import PeakMemory
from gpipebal.records import COUNT, MOST, MOST_CHUNKS, NUMBER, SIZE
from gpipebal.schedule import KNOWN_SCHEDULES, check_count, modes_of

if TYPE_CHECKING:
    from gpipebal.plan.plan import Plan

__all__ = ["check_chunks", "check_consistent", "check_plan", "check_schedule_known"]

#: Whole numbers that are not bytes.
_COUNTS = ("chunks", "rows", "mini_batch_rows")
#: Values of the objective, which may be a function of the caller's.
_OF_ANY_UNIT = ("value", "lower_bound", "equal_split_value")
_STATUSES = ("optimal", "feasible")
_TEXT = "a text"
#: Value and bound may differ by this fraction of the value, by which sums are rounded.
_ROUNDING = 1e-9


def check_chunks(chunks: object) -> int:
    """Return a number of micro-batches that a plan can have.

    Raises:
        BalanceError: not a whole number, fewer than 1, or more than `MOST_CHUNKS`.
    """
    count = check_count("chunks", chunks)
    if count > MOST_CHUNKS:
        raise BalanceError(
            f"plan has too many micro-batches: chunks={count!r:.60} (expected at most "
            f"{MOST_CHUNKS}).\nFix: plan with fewer chunks."
        )
    return count


def check_plan(plan: Plan) -> None:
    """Verify the invariants of a plan.

    Raises:
        BalanceError: counts or modes that make no sense.
        ProfileError: an invalid time, size or text, or an optimum without a proof.
    """
    check_count("partitions", plan.n_partitions)
    modes_of(plan.checkpoint, plan.n_partitions)
    if isinstance(plan.chunks, float):  # in a file, a float is not a count
        raise _bad_value("plan", "chunks", plan.chunks, f"a whole number, 1 to {MOST_CHUNKS}")
    check_chunks(plan.chunks)
    for j, partition in enumerate(plan.partitions):
        check_count(f"layers of partition {j}", len(partition.layers))
        check_kind(f"partitions[{j}].memory", partition.memory, PeakMemory)
        _check_quantities(f"partition {j}", partition)
        _check_quantities(f"memory of partition {j}", partition.memory)
        for text in (*partition.layers, *partition.fingerprints):
            if not isinstance(text, str):
                raise _bad_value(f"partition {j}", "name", text, _TEXT)
        prints, backward = partition.fingerprints, partition.backward_time
        if len(prints) not in (0, len(partition.layers)):
            raise _bad_value(
                f"partition {j}", "fingerprints", prints, "one for each layer, or none"
            )
        if (partition.weight_time or 0.0) > backward * (1 + _ROUNDING):
            expected = f"at most backward_time={backward!r}"
            raise _bad_value(f"partition {j}", "weight_time", partition.weight_time, expected)
    _check_quantities("plan", plan)
    if plan.rows < 1:
        raise ProfileError(
            f"plan has micro-batches without rows: rows={plan.rows} (expected 1 or more).\n"
            "Fix: profile micro-batches of 1 row or more."
        )
    _check_words(plan)
    if plan.lower_bound > plan.value * (1 + _ROUNDING):
        expected = f"at most value={plan.value!r}"
        raise _bad_value("plan", "lower_bound", plan.lower_bound, expected)
    if plan.status == "optimal" and plan.lower_bound < plan.value * (1 - _ROUNDING):
        raise ProfileError(
            f"plan is not proven optimal: status='optimal', lower_bound={plan.lower_bound!r} "
            f"(expected value={plan.value!r}, or status='feasible').\nFix: solve again."
        )
    if not isinstance(plan.provenance, Mapping):
        raise _bad_value("plan", "provenance", plan.provenance, "an object with named values")
    threads = plan.provenance.get("threads")
    if threads is not None and (type(threads) is not int or threads < 1):
        raise _bad_value("provenance", "threads", threads, COUNT)
    order = plan.device_order
    whole = all(type(k) is int for k in order)
    if order and (not whole or sorted(order) != list(range(plan.n_partitions))):
        expected = f"each of 0..{plan.n_partitions - 1} once"
        raise _bad_value("plan", "device_order", order, expected)
    _check_runs(plan)
    _check_sensitivity(plan)


def check_schedule_known(plan: Plan) -> None:
    """Refuse a schedule that can be neither run nor simulated, as a file may not name such a one.

    Raises:
        BalanceError: the plan's partitions cannot have this schedule.
        ProfileError: there is no schedule with this name.
    """
    if plan.schedule not in KNOWN_SCHEDULES:
        expected = f"one of {', '.join(map(repr, KNOWN_SCHEDULES))}"
        raise _bad_value("plan", "schedule", plan.schedule, expected)
    plan.micro_batch_time(0)  # counts the recomputes, for which it has to be made


def check_consistent(plan: Plan) -> None:
    """Refuse a plan whose figures cannot all be true, as a file that was edited may have.

    Raises:
        ProfileError: its value is not that of its objective, or it has no time for its partitions.
    """
    of_objective = {
        "makespan": plan.makespan,
        "bottleneck": plan.bottleneck,
        "peak_memory": plan.peak_bytes,
    }
    value = of_objective.get(plan.objective)
    if value is not None and not math.isclose(plan.value, value, rel_tol=_ROUNDING):
        raise _bad_value("plan", "value", plan.value, f"{plan.objective}={value!r}")
    slowest = max(map(plan.micro_batch_time, range(plan.n_partitions)))
    for name, least in (("bottleneck", slowest), ("makespan", _busiest(plan))):
        found = getattr(plan, name)
        if found < least * (1 - _ROUNDING):
            expected = f"{least!r} or more, by its partitions"
            raise _bad_value("plan", name, found, expected)


def _busiest(plan: Plan) -> float:
    """Return how long the device that works longest in a mini-batch works."""
    busy = dict.fromkeys(plan.devices, 0.0)
    for device, part, n_recomputed in zip(
        plan.devices, plan.partitions, plan.recomputed, strict=True
    ):
        busy[device] += plan.chunks * (part.forward_time + part.backward_time)
        busy[device] += n_recomputed * part.recompute_time
    return max(busy.values())


def _check_words(plan: Plan) -> None:
    """Refuse invalid texts, unknown names, and flags that are neither True nor False."""
    for name, known in (("objective", MINIMISED), ("status", _STATUSES)):
        value = getattr(plan, name)
        if not isinstance(value, str) or value not in known:
            raise _bad_value("plan", name, value, f"one of {', '.join(map(repr, known))}")
    for name in ("schedule", "method"):
        if not isinstance(getattr(plan, name), str):
            raise _bad_value("plan", name, getattr(plan, name), _TEXT)
    rows, most = plan.mini_batch_rows, plan.chunks * plan.rows
    if rows is not None and not 1 <= rows <= most:
        expected = f"1 to {most}: chunks={plan.chunks} of rows={plan.rows}"
        raise _bad_value("plan", "mini_batch_rows", rows, expected)
    for name in ("shared_memory", "gradients_exist", "loss_inside", "overlaps"):
        if not isinstance(getattr(plan, name), bool):
            raise _bad_value("plan", name, getattr(plan, name), "true or false")
    for k, note in enumerate(plan.notes):
        if not isinstance(note, str):
            raise _bad_value("plan", f"notes[{k}]", note, _TEXT)


def _check_runs(plan: Plan) -> None:
    """Refuse runs that are empty, overlap, or are not in one partition."""
    ends = list(accumulate(plan.balance))
    before = 0
    for run in plan.runs:
        end = next((end for end in ends if run.start < end), 0)
        if run.step != 1 or not before <= run.start < run.stop <= end:
            expected = "ranges of layers, ascending, each inside of one partition"
            raise _bad_value("plan", "runs", plan.runs, expected)
        before = run.stop


def _check_sensitivity(plan: Plan) -> None:
    moves = plan.sensitivity
    if moves and len(moves) != plan.n_partitions - 1:
        expected = f"{plan.n_partitions - 1} pairs, one for each cut, or none"
        raise _bad_value("plan", "sensitivity", moves, expected)
    for k, pair in enumerate(moves):
        known = [more for more in pair if more is not None]
        if len(pair) != 2 or not all(_is_number(x, (int, float)) for x in known):
            expected = "two numbers, or null where there is no plan"
            raise _bad_value("plan", f"sensitivity[{k}]", pair, expected)


def _check_quantities(where: str, noun: Any) -> None:
    """Refuse an invalid time or size: bytes are ints, times are finite, neither negative."""
    for name, annotation in annotations_of(noun.__class__).items():
        value = getattr(noun, name)
        kind, _, or_none = annotation.partition(" | ")
        if kind not in ("int", "float") or (value is None and or_none):
            continue
        whole = kind == "int"
        if not _is_number(value, (int,) if whole else (int, float)) or value < 0:
            expected = COUNT if name in _COUNTS else SIZE if whole else NUMBER
            raise _bad_value(where, name, value, expected)
        if value > MOST and name not in _OF_ANY_UNIT:
            raise _too_large(where, name, value)


def _is_number(value: Any, kinds: tuple[type, ...]) -> bool:
    good = isinstance(value, kinds) and not isinstance(value, bool)
    most = sys.float_info.max
    return good and -most <= value <= most and math.isfinite(value)


def _bad_value(where: str, name: str, value: Any, expected: str) -> ProfileError:
    return ProfileError(
        f"{where} has an impossible value: {name}={value!r:.60} (expected {expected}).\n"
        "Fix: solve again."
    )


def _too_large(where: str, name: str, value: float) -> ProfileError:
    if name in _COUNTS:
        return _bad_value(where, name, value, f"{COUNT}, and at most {MOST:.3g}")
    unit, fix = "bytes", "give sizes in bytes"
    if name.endswith(("time", "makespan", "bottleneck")):
        unit, fix = "seconds", "give times in seconds, and speeds of devices near 1"
    return ProfileError(
        f"{where} has a value that is too large: {name}={value!r:.60} (expected at most "
        f"{MOST:.3g} {unit}).\nFix: {fix}."
    )
