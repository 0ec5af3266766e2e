"""Words as they were typed: sizes with their units, and layers by their names."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from gpipebal.errors import UsageError
from gpipebal.units import parse_bytes

__all__ = ["LEAST_BYTES", "NOTHING", "SIZES", "Typed", "size_word"]

#: No device has so little memory, and no link is so slow: fewer bytes without a unit are a typing
#: error.
LEAST_BYTES = 2**20

#: Options that are sizes, by their names in Python.
SIZES = ("memory_limit", "reserve")

#: Units that a number of bytes can be a multiple of; of two equally short forms the first is taken.
_UNITS = ("GiB", "MiB", "KiB", "GB", "MB", "kB")
#: From here on sizes are written in MiB, below in KiB: a hundredth is rounded at most.
_LARGE = 100 * 2**20


@dataclass(frozen=True)
class Typed:
    """What was typed, by the values that it became.

    Attributes:
        sizes: Words of sizes, by their bytes.
        layers: Names of layers, by their index.
    """

    sizes: Mapping[int, str] = field(default_factory=dict)
    layers: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, options: argparse.Namespace) -> Typed:
        """Collect what was typed; names of layers are known once the profile has been read."""
        sizes = {}
        for name in SIZES:
            given = getattr(options, name, None) or []
            for word in given if isinstance(given, list) else [given]:
                with suppress(UsageError):  # reported where the size is used
                    sizes[parse_bytes(word)] = word.replace(" ", "")
        return cls(sizes, getattr(options, "typed_layers", {}))


#: For values that were not typed.
NOTHING = Typed()


def size_word(name: str, n_bytes: int, typed: Typed = NOTHING) -> str:
    """Write a size so that it can be read, and typed again.

    Sizes that were not typed and are not a multiple of a unit are rounded: limits up, reserves
    down, so that whatever fits with the size fits with the word.

    Args:
        name: The option, by its name in Python.
        n_bytes: The size.
        typed: What was typed.

    Example:
        >>> size_word("memory_limit", 10485760), size_word("memory_limit", 111704592)
        ('10MiB', '107MiB')
        >>> size_word("reserve", 537395200), size_word("reserve", 0), size_word("reserve", 900)
        ('512MiB', '0', '900B')
    """
    if n_bytes in typed.sizes:
        return typed.sizes[n_bytes]
    if n_bytes < LEAST_BYTES:
        return f"{n_bytes}B" if n_bytes else "0"
    counts = [(n_bytes / parse_bytes(f"1{unit}"), unit) for unit in _UNITS]
    exact = [f"{count:.0f}{unit}" for count, unit in counts if count.is_integer() and count < 1e4]
    if exact:
        return min(exact, key=len)
    unit = "MiB" if n_bytes >= _LARGE else "KiB"
    whole, rest = divmod(n_bytes, parse_bytes(f"1{unit}"))
    return f"{whole + (rest > 0 and name != 'reserve')}{unit}"
