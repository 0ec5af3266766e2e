"""Given costs: what a profile is made of where nothing was measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from numbers import Integral, Real
from typing import Any

from gpipebal.argument_kinds import is_list, of_array, plain_number, whole_number
from gpipebal.errors import ProfileError
from gpipebal.profile.checks import bad_value
from gpipebal.profile.layer import LayerProfile
from gpipebal.records import COUNT
from gpipebal.text import is_whole

__all__ = ["parts_of_costs"]

#: Arguments in seconds, which are floats everywhere; sizes are whole numbers.
_TIMES = {"forward", "backward", "recompute"}


def parts_of_costs(rows: object, chunks: object, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a profile of given costs; see `Profile.from_costs`.

    Args:
        rows: Rows of a micro-batch.
        chunks: Micro-batches.
        columns: Values of the layers, by name of the argument; None: not given.

    Raises:
        ProfileError: one is not a list, or has an entry of another kind; lengths that differ; or a
            count is below 1.
    """
    counts = {name: _count(name, given) for name, given in (("rows", rows), ("chunks", chunks))}
    found = {
        name: _column(name, column)
        for name, column in columns.items()
        if column is not None or name == "forward"
    }
    for name in found.keys() & _TIMES:
        found[name] = [_as_float(time) for time in found[name]]
    times = found["forward"]
    usual: dict[str, list[Any]] = {
        "backward": [2 * time for time in times],
        "recompute": times,
        "names": [str(index) for index in range(len(times))],
    }
    nothing = [0] * len(times)
    every = {name: found.get(name, usual.get(name, nothing)) for name in columns}
    for name, column in every.items():
        if len(column) != len(times):
            raise ProfileError(
                f"costs have different lengths: len({name})={len(column)} "
                f"(expected {len(times)}, as many as forward).\n"
                "Fix: give one value per layer."
            )
    pairs = zip(every["saved_bytes"], every["output_bytes"], strict=True)
    return {
        **counts,
        "layers": tuple(_layers(every)),
        "storages": tuple(n_bytes for pair in pairs for n_bytes in pair),
        "mini_batch_rows": counts["rows"] * counts["chunks"],
        "provenance": {"method": "costs"},
    }


def _layers(columns: Mapping[str, list[Any]]) -> Iterator[LayerProfile]:
    """Yield layers, each of which has two storages: what it saves, and its output."""
    given = 0
    for index, values in enumerate(zip(*columns.values(), strict=True)):
        cost = dict(zip(columns, values, strict=True))
        yield LayerProfile(
            name=cost["names"],
            kind="Layer",
            forward_time=cost["forward"],
            backward_time=cost["backward"],
            recompute_time=cost["recompute"],
            parameter_bytes=cost["parameter_bytes"],
            gradient_bytes=cost["parameter_bytes"],
            saved=(2 * index,),
            outputs=(2 * index + 1,),
            output_bytes=cost["output_bytes"],
            forward_peak_bytes=cost["saved_bytes"] + cost["output_bytes"],
            backward_peak_bytes=given,
        )
        given = cost["output_bytes"]


def _count(name: str, given: object) -> int:
    number = whole_number(given)
    if number is None or number < 1:
        raise bad_value("profile", name, given, COUNT)
    return number


def _column(name: str, column: object) -> list[Any]:
    """Return costs as a list of plain numbers, or names as texts."""
    if not is_list(column, in_order=True):
        raise ProfileError(
            f"costs are not a list: {name}={column!r:.60} (expected one for each layer).\n"
            "Fix: give a list."
        )
    values = list(of_array(column))
    found = [str(value) if name == "names" else _plain(value) for value in values]
    for k, plain in enumerate(found):
        if plain is None:
            raise ProfileError(
                f"cost is not a number: {name}[{k}] is a {type(values[k]).__name__} (expected "
                "an int or a float).\nFix: give numbers."
            )
        if isinstance(plain, str) and not is_whole(plain):
            raise ProfileError(
                f"name is not a text: {name}[{k}]={plain!r} (expected characters that a file "
                "can hold).\nFix: give another name."
            )
    return found


def _as_float(time: float) -> float:
    try:
        return float(time)
    except OverflowError:  # refused later, with its layer, as no finite time
        return math.inf


def _plain(value: object) -> int | float | None:
    """Return a number of any kind, such as numpy's, as Python's; None if it is not one."""
    number = plain_number(value)
    # A NaN is a number, which is refused later, with its layer.
    may_be_nan = isinstance(value, Real) and not isinstance(value, Integral)
    return number if number == number or may_be_nan else None
