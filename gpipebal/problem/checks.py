"""Numbers that a problem is posed with, made plain or refused."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from numbers import Integral

import numpy as np

from gpipebal.argument_kinds import check_list, plain_number
from gpipebal.errors import BalanceError

__all__ = [
    "check_bytes",
    "check_flag",
    "check_limit",
    "check_time_limit",
    "check_times",
    "largest_denominator",
    "scaled",
]


#: More bytes than this no device has, nor do the integers of arrays hold more.
_MOST_BYTES = 2**63 - 1


def check_flag(name: str, value: object) -> bool:
    """Return True or False, and refuse values that are only truthy or falsy, such as ``'no'``.

    Raises:
        BalanceError: it is neither.

    Example:
        >>> check_flag("any_order", False)
        False
    """
    if isinstance(value, (bool, np.bool_)) or (isinstance(value, Integral) and value in (0, 1)):
        return bool(value)
    raise BalanceError(
        f"{name} is neither true nor false: {name}={value!r:.60} (expected a bool).\n"
        f"Fix: {name}=True or {name}=False."
    )


def check_times(name: str, values: Sequence[float], what: str = "layer") -> tuple[float, ...]:
    """Return times as plain ints and floats, or say which layer has none.

    Raises:
        BalanceError: a time that is negative, infinite, NaN or no number.
        KindError: they are not a list.
    """
    given = times = check_list(name, values)
    kinds = set(map(type, times))
    if not kinds <= {int, float}:
        times = tuple(map(plain_number, times))
    if times and not _are_times(times, kinds):
        k = next(k for k, time in enumerate(times) if not 0 <= time < math.inf)
        raise BalanceError(
            f"{name} time of {what} {k} is not a time: {name}[{k}]={given[k]!r} "
            "(expected a finite number, 0 or more).\n"
            f"Fix: measure that {what} again, or give 0 if it costs nothing."
        )
    return times


def largest_denominator(times: Sequence[float]) -> int:
    """Find the power of two that makes all times whole numbers.

    Example:
        >>> largest_denominator([0.5, 0.375, 3])
        8
    """
    floats = [time for time in times if type(time) is float]
    if not floats:
        return 1
    # A float is an odd number times a power of two; the smallest of these powers decides.
    parts, exponents = np.frexp(np.array(floats))
    wholes = (parts * 2.0**53).astype(np.int64)
    # The lowest bit that is set, and its place; of 0 there is none, and 0 is whole.
    lowest = np.where(wholes != 0, wholes & -wholes, 1).astype(np.float64)
    places = np.frexp(lowest)[1] - 1
    needed = np.where(wholes != 0, 53 - exponents - places, 0)
    return 1 << max(int(needed.max()), 0)


def scaled(times: Sequence[float], scale: int, ints: bool = False) -> Iterable[int]:
    """Multiply times by a power of two that makes them whole numbers.

    If `ints` says that all of them are ints, they are returned as they are.

    Example:
        >>> list(scaled([0.5, 0.375, 3], 8))
        [4, 3, 24]
    """
    if ints:
        return times  # type: ignore[return-value]
    if scale == 1:
        return map(int, times)
    kinds = set(map(type, times))
    # Multiplying a float by a power of two is exact if the result is a float at all.
    if kinds == {float} and scale <= 2**1000 and max(times) <= sys.float_info.max / scale:
        return map(int, map(float(scale).__mul__, times))
    ratios = (time.as_integer_ratio() for time in times)
    return (top * (scale // low) for top, low in ratios)


def check_bytes(name: str, value: object) -> int:
    """Return a number of bytes as an int.

    Raises:
        BalanceError: it is negative, or no whole number.
    """
    number = plain_number(value)
    if not (0 <= number < math.inf and number == int(number)):
        raise BalanceError(
            f"{name} is not a number of bytes: {name}={value!r:.60} (expected an int of 0 or "
            f"more).\nFix: {name}={2**30} for a GiB, or {name}=None for none."
        )
    return int(number)


def check_limit(name: str, value: object) -> int:
    """Return a memory limit, or a part of one, in bytes.

    Raises:
        BalanceError: it is negative, more than any device has, or no whole number.
    """
    limit = check_bytes(name, value)
    if limit > _MOST_BYTES:
        raise BalanceError(
            f"{name} is more than any device has: {name}={value!r:.60} (expected at most "
            f"{_MOST_BYTES} bytes).\nFix: {name}={2**34} for 16 GiB, say."
        )
    return limit


def check_time_limit(seconds: object) -> float | None:
    """Return a time limit as a float; None: no limit, as for infinity and more than a float holds.

    Raises:
        BalanceError: it is negative, or no number.

    Example:
        >>> check_time_limit(60), check_time_limit(10**400)
        (60.0, None)
    """
    if seconds is None:
        return None
    number = plain_number(seconds)
    if number >= 0:
        return None if number > sys.float_info.max else float(number)
    raise BalanceError(
        f"time_limit is not a time: time_limit={seconds!r:.60} (expected seconds, 0 or more).\n"
        "Fix: time_limit=60, or time_limit=None for as long as it takes."
    )


def _are_times(times: tuple[float, ...], kinds: set[type]) -> bool:
    if kinds == {int}:
        return min(times) >= 0
    # A sum never lets a NaN pass; `min` and `max` do or do not, depending on its place.
    if kinds == {float} and sum(times) < math.inf:
        return min(times) >= 0
    return all(0 <= time < math.inf for time in times)
