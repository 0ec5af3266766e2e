"""Layers in words: a word is the name of a layer, or else its index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpipebal.errors import UsageError

if TYPE_CHECKING:
    from gpipebal.profile import Profile

__all__ = ["read_layer", "read_pins"]


def read_layer(profile: Profile, rule: str, word: str) -> int | str:
    """Read a layer, for `gpipebal.solve`: a name that the profile has, or else an index.

    Args:
        profile: What the layer is in.
        rule: The argument of `gpipebal.solve` that it is for.
        word: The word.

    Raises:
        UsageError: the word is the name of one layer and the index of another.

    Example:
        >>> from gpipebal.profile import Profile
        >>> profile = Profile.from_costs([1.0] * 3, names=["2", "7", "8"])
        >>> read_layer(profile, "pin", "7"), read_layer(profile, "pin", "1")
        ('7', 1)
    """
    if not word.isdecimal():
        return word
    index, names = int(word), profile.names
    if word not in names:
        return index
    named = [k for k, name in enumerate(names) if name == word]
    if index >= len(names) or named == [index]:
        return word
    other = next(k for k in named if k != index)
    raise UsageError(
        f"word means several layers: {rule} has {word} (expected one meaning: "
        f"layer {other} has this name, and layer {index}, {names[index]!r}, this index).\n"
        f"Fix: gpipebal.solve in Python, whose argument {rule!r} takes {word!r} for the name and "
        f"{index} for the index."
    )


def read_pins(profile: Profile, words: Sequence[str]) -> dict[int | str, int]:
    """Read layers and the partitions that they are pinned to.

    Raises:
        UsageError: one is not ``LAYER=PARTITION``, or a layer is ambiguous or pinned to several
            partitions.
    """
    pins: dict[int | str, int] = {}
    for word in words:
        # A name may hold an equals sign; an index of a partition never does.
        name, equals, partition = word.rpartition("=")
        if not equals or not name or not partition.isdecimal():
            raise UsageError(
                f"pinned layer is not readable: --pin {word} (expected LAYER=PARTITION).\n"
                "Fix: --pin 0=0, say."
            )
        layer, j = read_layer(profile, "pin", name.strip()), int(partition)
        if pins.setdefault(layer, j) != j:
            raise UsageError(
                f"layer is pinned to several partitions: --pin {word} beside --pin "
                f"{layer}={pins[layer]} (expected one of them).\nFix: leave one out."
            )
    return pins
