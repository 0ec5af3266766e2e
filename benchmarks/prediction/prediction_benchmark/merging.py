"""Several runs as one result: of each model what one of them has measured."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

from prediction_benchmark import floor


def dates_of(record: dict[str, Any]) -> dict[str, str]:
    """Return on which day each model was measured."""
    about = record["provenance"]
    return {name: about.get("dates", {}).get(name, about["date"]) for name in record["models"]}


def merge(old: dict[str, Any], new: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Choose, for each model, of two runs the one whose steps agree best with each other.

    That is the one with the lower floor, whatever it says of the predictions. A model that only
    one of them has measured is that one's.

    Args:
        old: A result.
        new: A newer one, perhaps of some models only; the result's provenance is its, with the
            minutes, runs and load of both.
        names: The order of the models.

    Raises:
        ValueError: the two were measured on other devices, with other versions, or other rounds.
    """
    abouts = [record["provenance"] for record in (old, new)]
    for key in ("device_name", "devices", "torch", "settings", "rounds", "quick"):
        theirs, ours = (about[key] for about in abouts)
        if ours != theirs:
            raise ValueError(f"results differ in {key}: {ours!r} (expected {theirs!r})")
    chosen = {
        name: new
        if name not in old["models"]
        or (name in new["models"] and _floor_of(new, name) < _floor_of(old, name))
        else old
        for name in names
        if name in old["models"] or name in new["models"]
    }
    loads = [about["other_load"] for about in abouts]
    return {
        # They are measured by themselves.
        **{key: old[key] for key in ("memory", "repeats", "allocator") if key in old},
        **new,
        "provenance": {
            **new["provenance"],
            "minutes": round(sum(about["minutes"] for about in abouts), 2),
            "runs": sum(about["runs"] for about in abouts),
            "other_load": None if None in loads else max(loads),
            "dates": {name: dates_of(record)[name] for name, record in chosen.items()},
            "steadiest": True,
        },
        "models": {name: record["models"][name] for name, record in chosen.items()},
        "rows": [row for name, record in chosen.items() for row in _rows_of(record, name)],
    }


def _rows_of(record: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [row for row in record["rows"] if row["model"] == name]


def _floor_of(record: dict[str, Any], name: str) -> float:
    """Return the mean floor of a model; infinite where it is not known."""
    known = floor.mean_unavoidable(_rows_of(record, name))
    return inf if known is None else known
