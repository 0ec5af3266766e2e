"""What a question without an answer lacks: how much memory, in which split, and in which words."""

from __future__ import annotations

from collections.abc import Sequence

from gpipebal.errors import BalanceError, ProfileError
from gpipebal.plan import Plan
from gpipebal.plan.text import layer_range
from gpipebal.planner.execution import Way
from gpipebal.planner.plans import fits, plan_of_way
from gpipebal.planner.posing import Posed, pose
from gpipebal.planner.question import Question
from gpipebal.planner.search.all_ways import all_ways
from gpipebal.planner.search.best import MOST_WAYS, best_of, least_peak_plan
from gpipebal.problem import Problem
from gpipebal.solvers.sets.levels import in_order_if_large
from gpipebal.solvers.sets.peak import Lack, least_shortage
from gpipebal.solvers.sets.reachability import Path
from gpipebal.units import format_bytes

__all__ = [
    "about_waiting",
    "is_found",
    "least_with_waiting",
    "limit_as_given",
    "named_layers",
    "shortage_of",
    "to_explain",
]


def shortage_of(posed: Posed) -> tuple[int, Path] | None:
    """Return the least that is lacking, with its split; None if no memory would help."""
    return least_shortage(to_explain(posed)) if posed.problem.is_limited else None


def to_explain(posed: Posed) -> Problem:
    """Return the problem that a shortage is of: with the most that may wait."""
    return in_order_if_large(posed.cautious)


def about_waiting(posed: Posed, lack: int) -> str:
    """Say how much of a shortage is only due to what may wait for other partitions."""
    without = least_shortage(in_order_if_large(posed.problem))
    if without is None or without[0] >= lack:
        return ""
    text = " With the least that may have to wait for other partitions"
    if without[0] > 0:
        least = format_bytes(without[0])
        return f"{text} it would lack {least}; how much that is depends on all cuts."
    # What may wait depends on all cuts; of many plans, not all that might fit are tried,
    # and other ones if there is time.
    seconds = posed.question.time_limit
    if all_ways(posed, MOST_WAYS) is None:
        tried = "those tried" if seconds is None else f"those tried within time_limit={seconds:g}"
        return f"{text} some splits fit, but none of {tried} does with what may wait in its own."
    return f"{text} some splits fit, but none does with what may wait in its own."


def least_with_waiting(posed: Posed) -> tuple[Lack, Plan] | None:
    """Find the partition that lacks most where the largest peak is least, with what may wait there.

    Returns:
        That partition and its plan; None: devices have several limits.
    """
    limit, *others = set(posed.problem.limits)
    plan = None if limit is None or others else least_peak_plan(posed)
    if limit is None or plan is None:
        return None
    totals = [partition.memory.total for partition in plan.partitions]
    j = max(range(len(totals)), key=totals.__getitem__)
    start = sum(plan.balance[:j])
    return Lack(j, plan.places[j], limit, totals[j], start, start + plan.balance[j]), plan


def is_found(question: Question, known: Plan | None) -> bool:
    """Whether a plan is found for a question, with what may wait in it.

    Args:
        question: The question.
        known: A plan of another question that may fit for this one, and is tried first.
    """
    try:
        all_posed = [pose(question, chunks) for chunks in question.chunks or (None,)]
        if known is not None and any(_fits_for(posed, known) for posed in all_posed):
            return True
        return any(best_of(posed).plan is not None for posed in all_posed)
    except (BalanceError, ProfileError):
        return False


def _fits_for(posed: Posed, plan: Plan) -> bool:
    """Whether a question is answered by the way of a plan that was made for other limits."""
    return posed.chunks == plan.chunks and fits(plan_of_way(posed, Way.of(plan)))


def limit_as_given(question: Question, device: int, limit: int) -> int:
    """Return the limit as it was given, with the reserve; the limit of a `Device` has none."""
    limits = question.limits
    of_device = limits[device] if isinstance(limits, tuple) else limits
    if of_device is None or of_device - question.reserve_of(of_device) != limit:
        return limit
    return of_device


def named_layers(names: Sequence[str], start: int, end: int) -> str:
    """Say which layers of the chain these are; names that are only numbers say nothing more.

    Example:
        >>> named_layers(["a", "b", "c"], 0, 2), named_layers(["0", "1", "2"], 2, 3)
        ('layers 0 to 1 (a .. b)', 'layer 2')
    """
    numbers = f"layer {start}" if end - start == 1 else f"layers {start} to {end - 1}"
    if list(names[start:end]) == [str(k) for k in range(start, end)]:
        return numbers
    return f"{numbers} ({layer_range(names[start:end])})"
