"""Glyphs: names in any script, in fonts that have their characters, or else as escapes."""

from __future__ import annotations

import re
from contextlib import suppress
from functools import lru_cache

from gpipebal.text import one_line

__all__ = ["families", "pieces", "written"]

#: Fonts whose glyphs are boxes for everything, are at other code points, or are pictures.
_UNUSABLE = re.compile(r"Last ?Resort|^cm[a-z]+\d+$|^STIX(NonUnicode|Size)|Emoji|Color")


def written(name: str) -> str:
    r"""Write a name in one line, with escapes for characters that no installed font has.

    Example:
        >>> written("a\nb \U0010ffff")
        'a b \\U0010ffff'
    """
    return "".join(pieces(name))


def pieces(name: str) -> list[str]:
    """Return how each character of a name is written: as itself, or as an escape."""
    own = _own_characters()
    return [
        char if _has(own, char) or _other_family(char) else char.encode("unicode_escape").decode()
        for char in one_line(name)
    ]


def families(text: str) -> list[str]:
    """Return the families of fonts that a text needs, as matplotlib takes them.

    First those of matplotlib's settings, which are used for all characters that they have.
    """
    from matplotlib import rcParams

    own = _own_characters()
    others = {_other_family(char) for char in text if not _has(own, char)}
    return [*rcParams["font.family"], *sorted(name for name in others if name is not None)]


def _own_characters() -> list[frozenset[int]]:
    """Return the code points that each family of the settings has; none if it is not installed."""
    from matplotlib import rcParams
    from matplotlib.font_manager import FontProperties, findfont

    found = []
    for family in rcParams["font.family"]:
        # A list: a single text would be read as a pattern.
        font = FontProperties(family=[family])
        with suppress(ValueError):
            found.append(_of_file(findfont(font, fallback_to_default=False)))
    return found


def _has(own: list[frozenset[int]], char: str) -> bool:
    return any(ord(char) in characters for characters in own)


def _other_family(char: str) -> str | None:
    """Return the family of an installed font that has a character; None: there is none."""
    from matplotlib.font_manager import fontManager

    fonts = _installed(len(fontManager.ttflist))
    return next((name for name, path in fonts if ord(char) in _of_file(path)), None)


@lru_cache(maxsize=2)
def _installed(n_fonts: int) -> list[tuple[str, str]]:
    """Return families and their files: matplotlib's own first, then Noto's, others by name."""
    from matplotlib.font_manager import fontManager

    default = fontManager.defaultFamily["ttf"]
    fonts = sorted(
        (
            # For fonts that lack plain letters, matplotlib warns that it uses others.
            (entry.weight != 400, entry.name != default, not entry.name.startswith("Noto Sans")),
            entry.name,
            entry.fname,
        )
        for entry in fontManager.ttflist
        if entry.style == "normal"
        and entry.weight in range(300, 501)
        and not _UNUSABLE.search(entry.name)
    )
    return [(name, path) for _, name, path in fonts]


@lru_cache(maxsize=1024)
def _of_file(path: str) -> frozenset[int]:
    from matplotlib.font_manager import get_font

    try:
        return frozenset(get_font(path).get_charmap())
    except (RuntimeError, OSError):  # damaged
        return frozenset()
