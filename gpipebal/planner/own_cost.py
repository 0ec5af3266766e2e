"""A cost of runs that the caller gives, in place of an objective."""

from __future__ import annotations

import inspect
from typing import Any

from gpipebal.errors import BalanceError
from gpipebal.objectives import OBJECTIVES
from gpipebal.solvers.dense import AnyCost

__all__ = ["AnyCost", "check_cost"]


def check_cost(cost: Any) -> AnyCost | None:
    """Return a cost of runs, or None if there is none.

    Raises:
        BalanceError: it cannot be called with a run of layers and its partition.

    Example:
        >>> check_cost(lambda layer: 1)
        Traceback (most recent call last):
        gpipebal.errors.BalanceError: cost cannot be called: too many positional arguments (expected cost(first, end, partition), for the layers from first to end - 1).
        Fix: cost=lambda first, end, partition: end - first, say.
    """  # noqa: E501
    if cost is None:
        return None
    fix = "cost=lambda first, end, partition: end - first, say"
    if callable(cost):
        try:
            inspect.signature(cost).bind(0, 1, 0)
        except TypeError as error:
            what = f"{error}"
        except ValueError:
            return cost  # no readable signature: a call will tell
        else:
            return cost
    else:
        what = f"cost={cost!r:.60}"
        if isinstance(cost, str) and cost in OBJECTIVES:
            fix = f"objective={cost!r}"
    raise BalanceError(
        f"cost cannot be called: {what} (expected cost(first, end, partition), for the layers "
        f"from first to end - 1).\nFix: {fix}."
    )
