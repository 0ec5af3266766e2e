"""What no plan may be."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import fields
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from gpipebal.errors import BalanceError, ProfileError
from gpipebal.plan.parts import PeakMemory
from gpipebal.schedule import check_count, modes_of

if TYPE_CHECKING:
    from gpipebal.plan.plan import Plan

__all__ = ["check_chunks", "check_plan"]

#: More micro-batches than this are a mistake, and their schedule would fill the memory.
MOST_CHUNKS = 2**20

#: Quantities that may be unknown.
_OPTIONAL = (
    *("optimizer", "step_time", "pause_time", "equal_split_value", "memory_limit", "weight_time"),
)
#: Quantities that are whole numbers, beside those of `PeakMemory`.
_WHOLE = ("chunks", "rows", "memory_limit")
#: Those of them that are no bytes.
_COUNTS = ("chunks", "rows")
#: Values of what is minimised, which may be a function of the caller's.
_OF_ANY_UNIT = ("value", "lower_bound", "equal_split_value")
#: What has numbers in it and is none.
_OTHERS = ("sensitivity",)
#: Seconds and bytes are at most so many.
_MOST = 2**63 - 1
#: A proof is one although sums are rounded, by this fraction of the value.
_ROUNDING = 1e-9


def check_chunks(chunks: object) -> int:
    """Return a number of micro-batches that a plan can have.

    Raises:
        BalanceError: no whole number, fewer than 1, or more than anybody can mean.
    """
    count = check_count("chunks", chunks)
    if count > MOST_CHUNKS:
        raise BalanceError(
            f"plan has too many micro-batches: chunks={count} (expected at most {MOST_CHUNKS}).\n"
            "Fix: plan with fewer chunks."
        )
    return count


def check_plan(plan: Plan) -> None:
    """Verify the invariants of a plan.

    Raises:
        BalanceError: counts or modes that make no sense.
        ProfileError: a time, a size or a text that is none, or an optimum without a proof.
    """
    check_count("partitions", plan.n_partitions)
    modes_of(plan.checkpoint, plan.n_partitions)
    check_chunks(plan.chunks)
    for j, partition in enumerate(plan.partitions):
        check_count(f"layers of partition {j}", len(partition.layers))
        _check_quantities(f"partition {j}", partition)
        _check_quantities(f"memory of partition {j}", partition.memory)
        for text in (*partition.layers, *partition.fingerprints):
            if not isinstance(text, str):
                raise _bad_value(f"partition {j}", "name", text)
    _check_quantities("plan", plan)
    if plan.rows < 1:
        raise ProfileError(
            f"plan has micro-batches without rows: rows={plan.rows} (expected 1 or more).\n"
            "Fix: profile micro-batches of 1 row or more."
        )
    for name in ("schedule", "objective", "method"):
        if not isinstance(getattr(plan, name), str):
            raise _bad_value("plan", name, getattr(plan, name))
    for name in ("shared_memory", "gradients_exist", "loss_inside", "overlaps"):
        if not isinstance(getattr(plan, name), bool):
            raise _bad_value("plan", name, getattr(plan, name))
    if plan.lower_bound > plan.value * (1 + _ROUNDING):
        raise _bad_value("plan", "lower_bound", plan.lower_bound)
    if plan.status not in ("optimal", "feasible"):
        raise _bad_value("plan", "status", plan.status)
    if plan.status == "optimal" and plan.lower_bound < plan.value * (1 - _ROUNDING):
        raise ProfileError(
            f"plan is not proven optimal: status='optimal', lower_bound={plan.lower_bound!r} "
            f"(expected value={plan.value!r}, or status='feasible').\nFix: solve again."
        )
    threads = plan.provenance.get("threads") if isinstance(plan.provenance, Mapping) else ""
    if threads is not None and (type(threads) is not int or threads < 1):
        raise _bad_value("provenance", "threads", threads)
    order = plan.device_order
    whole = all(type(k) is int for k in order)
    if order and (not whole or sorted(order) != list(range(plan.n_partitions))):
        raise _bad_value("plan", "device_order", order)
    for note in plan.notes:
        if not isinstance(note, str):
            raise _bad_value("plan", "notes", note)
    _check_runs(plan)
    _check_sensitivity(plan)


def _check_runs(plan: Plan) -> None:
    """Refuse runs that are empty, overlap, or are not in one partition."""
    ends = list(accumulate(plan.balance))
    before = 0
    for run in plan.runs:
        end = next((end for end in ends if run.start < end), 0)
        if run.step != 1 or not before <= run.start < run.stop <= end:
            raise _bad_value("plan", "runs", plan.runs)
        before = run.stop


def _check_sensitivity(plan: Plan) -> None:
    moves = plan.sensitivity
    if moves and len(moves) != plan.n_partitions - 1:
        raise _bad_value("plan", "sensitivity", moves)
    for pair in moves:
        known = [more for more in pair if more is not None]
        if len(pair) != 2 or not all(_is_number(x, (int, float)) for x in known):
            raise _bad_value("plan", "sensitivity", pair)


def _check_quantities(where: str, noun: Any) -> None:
    """Refuse a time or a size that is none: bytes are ints, times are finite, neither negative."""
    all_whole = isinstance(noun, PeakMemory)
    for item in fields(noun):
        value, name = getattr(noun, item.name), item.name
        whole = all_whole or name in _WHOLE
        if name in _OTHERS or ("float" not in str(item.type) and not whole):
            continue
        if value is None and name in _OPTIONAL:
            continue
        kinds = (int,) if whole else (int, float)
        if not _is_number(value, kinds) or value < 0:
            raise _bad_value(where, name, value)
        if value > _MOST and name not in _OF_ANY_UNIT:
            raise _too_large(where, name, value)


def _is_number(value: Any, kinds: tuple[type, ...]) -> bool:
    good = isinstance(value, kinds) and not isinstance(value, bool)
    most = sys.float_info.max
    return good and -most <= value <= most and math.isfinite(value)


def _bad_value(where: str, name: str, value: Any) -> ProfileError:
    return ProfileError(f"{where} has an impossible value: {name}={value!r}.\nFix: solve again.")


def _too_large(where: str, name: str, value: float) -> ProfileError:
    if name in _COUNTS:
        return _bad_value(where, name, value)
    unit, fix = "bytes", "give sizes in bytes"
    if name.endswith(("time", "makespan", "bottleneck")):
        unit, fix = "seconds", "give times in seconds, and speeds of devices near 1"
    return ProfileError(
        f"{where} has a value that is too large: {name}={value!r} (expected at most {_MOST:.3g} "
        f"{unit}).\nFix: {fix}."
    )
