"""Limits with which the partitions of a plan fit, in the words of `recompute_layers`."""

from __future__ import annotations

from collections.abc import Sequence

from gpipebal.plan import Plan
from gpipebal.planner.advice import with_more
from gpipebal.planner.posing import Posed

__all__ = ["larger_limits"]


def larger_limits(posed: Posed, plan: Plan, lacks: Sequence[int]) -> str:
    """Write the limits that leave each partition some bytes more, as the caller gives them.

    A partition may have two, one of its device's own: the lower one counts. Those that are large
    enough already are not named.

    Args:
        posed: The plan as a question, in the order of its partitions.
        plan: The plan.
        lacks: How many bytes more each partition has to be allowed, some of them above 0.
    """
    question, limits = posed.question, posed.question.limits
    each = limits if isinstance(limits, tuple) else (limits,) * plan.n_partitions
    own = tuple(getattr(device, "memory_limit", None) for device in question.devices or ())
    needed = [(limit or 0) + lack for limit, lack in zip(posed.problem.limits, lacks, strict=True)]

    def enough(limit: int, need: int) -> int:
        usable = limit - question.reserve_of(limit)
        return with_more(question, limit, max(0, need - usable))

    pairs = list(zip(each, needed, strict=True))
    more = tuple(None if limit is None else enough(limit, need) for limit, need in pairs)
    pairs = list(zip(own, needed, strict=False))
    more_own = tuple(None if limit is None else max(limit, need) for limit, need in pairs)
    texts = []
    if more != each and isinstance(limits, int):
        texts.append(f"memory_limit={max(limit or 0 for limit in more)}")
    elif more != each:
        reserve = "" if question.reserve is None else f", reserve={question.reserve}"
        texts.append(f"memory_limit={_as_given(plan, more)}{reserve}")
    if more_own != own:
        texts.append(f"devices with memory_limit={_as_given(plan, more_own)}, in their order")
    return " and ".join(texts)


def _as_given(plan: Plan, of_partitions: Sequence[int | None]) -> list[int | None]:
    """Put what partitions have into the order in which the devices were given."""
    given = dict(zip(plan.places, of_partitions, strict=True))
    return [given[k] for k in range(plan.n_partitions)]
