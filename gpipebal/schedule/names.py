"""Names of schedules, as people write them."""

from __future__ import annotations

__all__ = ["spelled"]

#: Names without capitals, dashes, spaces and underscores, and names of families of schedules of
#: which only one is known here.
_MEANT = {
    "gpipe": "gpipe",
    "gpipeinorder": "gpipe_in_order",
    "1f1b": "1f1b",
    "interleaved1f1b": "interleaved_1f1b",
    "interleaved": "interleaved_1f1b",
    "zbh1": "zb_h1",
    "zerobubble": "zb_h1",
}


def spelled(name: object) -> object:
    """Return the name of a schedule as it is spelled here; anything else unchanged.

    Example:
        >>> spelled("Interleaved1F1B"), spelled("zero-bubble"), spelled("dualpipe")
        ('interleaved_1f1b', 'zb_h1', 'dualpipe')
    """
    if not isinstance(name, str):
        return name
    letters = name.lower().translate(str.maketrans("", "", "-_ "))
    return _MEANT.get(letters, name)
