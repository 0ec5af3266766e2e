"""Arguments of models: checked the same way wherever they come from, and read from words."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from gpipebal.errors import UsageError
from gpipebal.models.catalogue import CATALOGUE, Argument

__all__ = ["check_arguments", "read_word"]

_WORDS = {"yes": True, "true": True, "no": False, "false": False}


def _check_argument(model: str, name: str, value: object, argument: Argument) -> None:
    """Refuse a value that the model cannot be built from.

    Raises:
        UsageError: the value has the wrong type or is out of range.
    """
    if isinstance(argument.default, bool):
        if isinstance(value, bool):
            return
        expected, fix = "True or False", str(argument.default)
    else:
        smallest, step = argument.smallest, argument.multiple_of
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if is_number and value >= smallest and value % step == 0:  # type: ignore[operator]
            return
        expected = f"an integer >= {smallest}" + (f", a multiple of {step}" if step > 1 else "")
        fix = str(argument.default)
        if is_number:
            fix = str(max(smallest, -(-value // step) * step))  # type: ignore[operator]
    raise UsageError(
        f"{model} cannot be built from this: {name}={value!r} (expected {expected}: "
        f"{argument.meaning}).\nFix: {name}={fix}."
    )


def check_arguments(model: str, values: Mapping[str, object]) -> None:
    """Refuse names that the model does not have, and values that it cannot be built from.

    Raises:
        UsageError: a name is not known, or a value has the wrong type or is out of range.
    """
    known = CATALOGUE[model].arguments
    for name, value in values.items():
        if name not in known:
            first, argument = next(iter(known.items()))
            raise UsageError(
                f"{model} has no such argument: {name}={value!r} (expected {', '.join(known)}).\n"
                f"Fix: {first}={argument.default}, or leave {name} out."
            )
        _check_argument(model, name, value, known[name])


def read_word(word: str) -> bool | int | float | str:
    """Read a word as what it looks like: yes or no, a finite number, or else a text.

    Example:
        >>> read_word("2"), read_word("0.5"), read_word("yes"), read_word("2024_01")
        (2, 0.5, True, '2024_01')
    """
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    # Python would also read underscores within numbers, and inf and nan.
    if re.fullmatch(r"\s*[+-]?[0-9]+\s*", word):
        return int(word)
    if re.fullmatch(r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?\s*", word, re.IGNORECASE):
        number = float(word)
        return number if math.isfinite(number) else word
    return word
