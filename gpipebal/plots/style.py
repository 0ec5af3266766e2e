"""Style: colours, shades and units that all pictures share."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from gpipebal.argument_kinds import check_whole
from gpipebal.errors import UsageError
from gpipebal.units import bytes_unit, seconds_unit

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.patches import Patch

__all__ = [
    "FINE",
    "IDLE",
    "NEUTRAL",
    "idle_patch",
    "kind_entries",
    "kind_style",
    "partition_colours",
    "readable_on",
    "scale_bytes",
    "scale_seconds",
]

Colour = tuple[float, float, float]

#: Okabe and Ito's colours, told apart by people with any common form of colour blindness. Their
#: black is left out because text is black; yellow comes last because it is weak on white.
_OKABE_ITO = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#F0E442")

#: Colour of anything that belongs to no partition.
NEUTRAL: Colour = (0.35, 0.38, 0.42)

#: Style of time without work.
IDLE: dict[str, Any] = {"facecolor": (0.5, 0.5, 0.5), "alpha": 0.17, "linewidth": 0.0}

#: How far kinds of work are from their partition's colour to white; others have colours.
_TINTS = {"F": 0.0, "R": 0.165, "I": 0.335, "B": 0.5, "W": 0.72}

#: Points below which bars, cells and rows are fine: no gaps between them, and no hatch.
FINE = 7.0

#: From here on, and below, a unit has a power of ten; some ticks lie above the largest value.
_LARGE = 1e5
_SMALL = 0.1


def partition_colours(n_partitions: int) -> list[Colour]:
    """Return one colour per partition.

    Up to seven partitions get distinct colours that do not depend on how many there are; more
    get steps of a map from dark to light, where neighbours look alike but the order can be seen.

    Source:
        Okabe and Ito, "Color Universal Design", 2008.

    Example:
        >>> partition_colours(3) == partition_colours(5)[:3]
        True
    """
    from matplotlib import colormaps
    from matplotlib.colors import to_rgb

    n_partitions = check_whole("n_partitions", n_partitions)
    if n_partitions <= len(_OKABE_ITO):
        return [to_rgb(name) for name in _OKABE_ITO[:n_partitions]]
    # The last tenth of the map is yellow, which is weak on white.
    viridis = colormaps["viridis"]
    return [to_rgb(viridis(0.9 * j / (n_partitions - 1))) for j in range(n_partitions)]


def kind_style(
    colour: Colour, kind: str, *, fine: bool = False, ink: Any = "black"
) -> dict[str, Any]:
    """Return how a patch of one kind of work looks in the hue of its partition.

    Args:
        colour: Colour of the partition.
        kind: A kind of event; ``C`` and ``H``, copies and launches, have no hue.
        fine: Leave the hatch out, because patches are too small to show it.
        ink: Colour of text beside it: copies have nearly that colour.

    Raises:
        UsageError: there is no style for this kind.
    """
    from matplotlib.colors import to_rgb

    if kind == "R" and not fine:
        # A hatch has the colour of the edge, which itself has no width.
        light = _tint(colour, 0.78)
        return {"facecolor": light, "edgecolor": colour, "linewidth": 0.0, "hatch": "/////"}
    # Light shades next to the grey of idle time would look idle.
    dark = colour[0] / 2, colour[1] / 2, colour[2] / 2
    beside = {"C": _tint(to_rgb(ink), 0.1), "H": NEUTRAL, "O": dark}
    if kind not in beside and kind not in _TINTS:
        raise UsageError(
            f"kind of event has no style: kind={kind!r} (expected one of "
            f"{', '.join((*_TINTS, *beside))}).\n"
            "Fix: give it a tint or a colour in gpipebal/plots/style.py."
        )
    face = beside[kind] if kind in beside else _tint(colour, _TINTS[kind])
    return {"facecolor": face, "edgecolor": face, "linewidth": 0.0}


def kind_entries(
    labels: Mapping[str, str],
    *,
    fine: bool = False,
    ink: Any = "black",
    strips: Collection[str] = (),
) -> list[Artist]:
    """Make legend entries for kinds of work, in a colour that belongs to no partition.

    Args:
        labels: What each kind is called.
        fine: As for `kind_style`.
        ink: As for `kind_style`.
        strips: Kinds that are drawn as thin strips, here too.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    entries: list[Artist] = []
    for kind, label in labels.items():
        style = kind_style(NEUTRAL, kind, fine=fine, ink=ink)
        if kind in strips:
            entries.append(Line2D([], [], color=style["facecolor"], linewidth=2.5, label=label))
        else:
            entries.append(Patch(label=label, **style))
    return entries


def idle_patch() -> Patch:
    """Make the legend entry for time without work."""
    from matplotlib.patches import Patch

    return Patch(label="idle", **IDLE)


def _tint(colour: Colour, share: float) -> Colour:
    red, green, blue = (channel + (1 - channel) * share for channel in colour)
    return red, green, blue


def readable_on(colour: Colour) -> str:
    """Return black or white, whichever has more contrast with a background.

    Source:
        Web Content Accessibility Guidelines 2.1, definitions of relative luminance and of
        contrast ratio; black wins above a luminance of 0.179.
    """
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "black" if luminance > 0.179 else "white"


def scale_seconds(largest: float) -> tuple[float, str]:
    """Return the seconds of one unit, and the unit, that suit values up to `largest`.

    Example:
        >>> scale_seconds(0.25), scale_seconds(2e7)
        ((0.001, 'ms'), (1000000.0, '1e6 s'))
    """
    unit, seconds = seconds_unit(largest)
    return _with_power(largest, seconds, unit)


def scale_bytes(largest: float) -> tuple[float, str]:
    """Return the bytes of one unit, and the unit, that suit values up to `largest`.

    Example:
        >>> scale_bytes(5 * 2**20)
        (1048576, 'MiB')
    """
    unit, n_bytes = bytes_unit(largest)
    return _with_power(largest, n_bytes, unit)


def _with_power(largest: float, factor: float, unit: str) -> tuple[float, str]:
    """Put a power of ten into the unit of values that matplotlib would write one for.

    Matplotlib would put it at the end of the axis, where legends are.
    """
    size = largest / factor
    if not size or _SMALL <= size < _LARGE or not math.isfinite(size):
        return factor, unit
    exponent = max(-306, math.floor(math.log10(size)) // 3 * 3)
    return factor * 10.0**exponent, f"1e{exponent} {unit}"
