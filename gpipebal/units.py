"""Seconds, bytes and counts as people read them: the only place where units are written or read.

Inside gpipebal every time is a float in seconds and every size an int in bytes.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from fractions import Fraction

from gpipebal.errors import UsageError

__all__ = [
    "bytes_unit",
    "count",
    "format_bytes",
    "format_change",
    "format_percent",
    "format_seconds",
    "not_shown",
    "parse_bytes",
    "seconds_unit",
    "slowest",
]

_UNITS_PER_SECOND = {"ps": 1e12, "ns": 1e9, "us": 1e6, "ms": 1e3, "s": 1.0}
_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_BYTES_PER_UNIT = {
    "": 1,
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "pib": 2**50,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}


def format_seconds(seconds: float) -> str:
    """Write a duration with three significant digits and the unit that suits it.

    Example:
        >>> format_seconds(0.0123), format_seconds(2.5), format_seconds(4e-9), format_seconds(0.0)
        ('12.3 ms', '2.50 s', '4.00 ns', '0 s')
    """
    if not math.isfinite(seconds):
        return f"{seconds} s"
    if seconds == 0:
        return "0 s"
    if not 0.9995e-12 <= abs(seconds) < 1e9:
        return f"{seconds:.2e} s"
    unit, _ = seconds_unit(seconds)
    return f"{_three_digits(seconds * _UNITS_PER_SECOND[unit])} {unit}"


def seconds_unit(seconds: float) -> tuple[str, float]:
    """Return the unit in which `format_seconds` writes a duration, and its length in seconds.

    Example:
        >>> seconds_unit(0.0123), seconds_unit(2.5)
        (('ms', 0.001), ('s', 1.0))
    """
    if 0.9995e-12 <= abs(seconds) < 1e9:
        for unit, per_second in _UNITS_PER_SECOND.items():
            # It follows from what is shown: 999.5 us rounds to 1000 of them, which is 1.00 ms.
            if abs(float(_three_digits(seconds * per_second))) < 1000:
                return unit, 1 / per_second
    return "s", 1.0


def format_bytes(n_bytes: float) -> str:
    """Write a size in binary units with three significant digits.

    Example:
        >>> format_bytes(512), format_bytes(1536), format_bytes(3 * 2**30)
        ('512 B', '1.50 KiB', '3.00 GiB')
    """
    unit, size = bytes_unit(n_bytes)
    value = float(n_bytes) / size
    return f"{value:.0f} B" if unit == "B" else f"{_three_digits(value)} {unit}"


def bytes_unit(n_bytes: float) -> tuple[str, int]:
    """Return the unit in which `format_bytes` writes a size, and how many bytes it has.

    Example:
        >>> bytes_unit(512), bytes_unit(5 * 2**20)
        (('B', 1), ('MiB', 1048576))
    """
    value, exponent = abs(float(n_bytes)), 0
    # 1023.5 of a unit would round to 1024 of them: one more division reads better.
    while value >= (1023.5 if exponent else 1024) and exponent < len(_BINARY_UNITS) - 1:
        value /= 1024
        exponent += 1
    return _BINARY_UNITS[exponent], 1024**exponent


def format_percent(fraction: float) -> str:
    """Write a fraction of one as a percentage with one decimal.

    Example:
        >>> format_percent(0.1234)
        '12.3 %'
    """
    # z: a number that rounds to 0 has no sign.
    return f"{100 * fraction:z.1f} %"


def format_change(fraction: float) -> str:
    """Write a change, as a fraction of one, as a percentage with one decimal and its sign.

    Example:
        >>> format_change(0.1234), format_change(-0.0001)
        ('+12.3 %', '0.0 %')
    """
    return f"{100 * fraction:+z.1f} %".replace("+0.0 %", "0.0 %")


def count(number: int, noun: str) -> str:
    """Write a number with its noun, which takes an s unless the number is 1.

    Example:
        >>> count(1, "partition"), count(3, "micro-batch"), count(2500, "row")
        ('1 partition', '3 micro-batches', '2,500 rows')
    """
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def slowest(times: Sequence[float], n_shown: int) -> list[int]:
    """Choose the rows with the most time for a table, in their order; of equal ones the first.

    Example:
        >>> slowest([1.0, 4.0, 2.0, 1.0], 3)
        [0, 1, 2]
    """
    by_time = sorted(range(len(times)), key=lambda k: -times[k])
    return sorted(by_time[: max(0, n_shown)])


def not_shown(noun: str, times: Sequence[float], n_shown: int, *, with_share: bool = False) -> str:
    """Say how many rows a table of the `slowest` leaves out, and perhaps their share of all time.

    Example:
        >>> not_shown("layer", [1.0, 4.0, 2.0], 2), not_shown("partition", [3.0, 3.0, 3.0], 1)
        ('1 layer with less time not shown', '2 partitions with no more time not shown')
    """
    in_order = sorted(times, reverse=True)
    is_less = not n_shown or in_order[n_shown] < in_order[n_shown - 1]
    less = "less" if is_less else "no more"
    text = f"{count(len(times) - n_shown, noun)} with {less} time not shown"
    if with_share:
        share = sum(in_order[n_shown:]) / (sum(times) or 1.0)
        text += f": together {format_percent(share)}"
    return text


def parse_bytes(text: float | str, name: str = "size") -> int:
    """Read a size: a number of bytes, or a number with a unit (``'16 GiB'``, ``'500MB'``).

    Raises:
        UsageError: the text is not a size; the error calls it by its `name`.

    Example:
        >>> parse_bytes("16 GiB") == 16 * 2**30, parse_bytes(42)
        (True, 42)
    """
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        if 0 <= text < math.inf and text == int(text):
            return int(text)
    elif isinstance(text, str):
        match = re.fullmatch(r"\s*(\d{1,400}(?:\.\d{1,400})?)\s*([a-zA-Z]*)\s*", text)
        if match is not None and match.group(2).lower() in _BYTES_PER_UNIT:
            # Not a float, which has no whole bytes above 2**53.
            size = Fraction(match.group(1)) * _BYTES_PER_UNIT[match.group(2).lower()]
            if size <= sys.float_info.max:
                return round(size)
    raise UsageError(
        f"{name} is not readable: {name}={text!r:.60} (expected bytes, or a number with a unit).\n"
        "Fix: write it as '16 GiB', '500 MB' or a number of bytes."
    )


def _three_digits(value: float) -> str:
    size = abs(value)
    if size >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"
