"""A cost of runs that the caller gives, in place of an objective."""

from __future__ import annotations

import inspect
import math
import sys
from numbers import Rational
from typing import Any

from gpipebal.argument_kinds import plain_number
from gpipebal.errors import BalanceError
from gpipebal.objectives import OBJECTIVES
from gpipebal.solvers.dense import AnyCost

__all__ = ["check_cost", "cost_of_run"]


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


def cost_of_run(cost: AnyCost, first: int, end: int, partition: int) -> float | None:
    """Ask what a run of layers costs; None where it is not allowed.

    Ints and Fractions stay what they are, so that they are compared exactly.

    Raises:
        BalanceError: the answer is no cost.

    Example:
        >>> cost_of_run(lambda first, end, partition: end - first, 0, 3, 0)
        3
    """
    found: Any = cost(first, end, partition)
    if found is None:
        return None
    call = f"cost({first}, {end}, {partition})={found!r:.40}"
    number = _number(found)
    if number is None:
        raise BalanceError(
            f"cost of a run is not a number: {call} (expected a number up to "
            f"{sys.float_info.max:.3g}, infinity or None).\n"
            "Fix: return None for what is not allowed."
        )
    if number < 0:
        raise BalanceError(
            f"cost of a run is negative: {call} (expected 0 or more).\n"
            "Fix: return None for what is not allowed."
        )
    return None if number == math.inf else number


def _number(found: Any) -> float | None:
    """Return a cost, an int or a Fraction as it is; None if it is no number, or exceeds a float."""
    plain = plain_number(found)
    if plain != plain:
        return None
    # Whole numbers and fractions are compared exactly; others, such as numpy's, may not know how
    # to be compared with the largest float.
    number: Any = found if isinstance(found, Rational) else float(found)
    return None if number != number or sys.float_info.max < number < math.inf else number
