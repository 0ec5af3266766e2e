"""Glyphs: names in any script, in fonts that have their characters, or else as escapes."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from gpipebal.text import one_line

__all__ = ["families", "font_settings", "pieces", "written"]

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
    settings = font_settings()
    return [
        char if _family(char, settings) is not None else char.encode("unicode_escape").decode()
        for char in one_line(name)
    ]


def families(text: str) -> list[str]:
    """Return the families of fonts that a text needs, as matplotlib takes them.

    First those of matplotlib's settings, which are used for all characters that they have.
    """
    settings = font_settings()
    others = {_family(char, settings) or "" for char in text} - {""}
    return [*settings[0], *sorted(others)]


def font_settings() -> tuple[Any, ...]:
    """Return the settings that decide on fonts: the families first, then what they stand for."""
    from matplotlib import rcParams
    from matplotlib.font_manager import fontManager

    generic = (rcParams["font.sans-serif"], rcParams["font.serif"], rcParams["font.monospace"])
    names = tuple(map(tuple, generic))
    return tuple(rcParams["font.family"]), names, len(fontManager.ttflist)


@lru_cache(maxsize=4096)
def _family(char: str, settings: tuple[Any, ...]) -> str | None:
    """Return the family that has a character: '' for one of the settings; None: there is none."""
    if any(ord(char) in _of_family(name, settings) for name in settings[0]):
        return ""
    found = (name for name, path in _installed(settings[-1]) if ord(char) in _of_file(path))
    return next(found, None)


@lru_cache(maxsize=64)
def _of_family(family: str, settings: tuple[Any, ...]) -> frozenset[int]:
    """Return the code points that a family has; `settings` say what a generic one stands for."""
    from matplotlib.font_manager import FontProperties, findfont

    try:
        # A list: a single text would be read as a pattern.
        font = FontProperties(family=[family])
        return _of_file(findfont(font, fallback_to_default=False))
    except ValueError:  # not installed
        return frozenset()


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
