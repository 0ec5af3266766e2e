"""Several runs as one result: of each model what one of them has measured."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

from prediction_benchmark import floor

__all__ = ["dates_of", "merge", "merge_allocator", "merge_steadier"]


def dates_of(record: dict[str, Any]) -> dict[str, str]:
    """Return on which day each model was measured."""
    about = record["provenance"]
    return {name: about.get("dates", {}).get(name, about["date"]) for name in record["models"]}


def merge(old: dict[str, Any], new: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Put models that were measured anew into an older result.

    Args:
        old: The older result.
        new: The newer one; its provenance holds, with the minutes, runs and load of both.
        names: The order of the models.

    Raises:
        ValueError: the two were measured on other devices, with other versions, or other rounds.
    """
    for key in ("device_name", "devices", "torch", "settings", "rounds", "quick"):
        ours, theirs = new["provenance"][key], old["provenance"][key]
        if ours != theirs:
            raise ValueError(f"results differ in {key}: {ours!r} (expected {theirs!r})")
    rows = [row for row in old["rows"] if row["model"] not in new["models"]] + new["rows"]
    about = {**old["models"], **new["models"]}
    dates = dates_of(old) | dates_of(new)
    loads = [record["provenance"]["other_load"] for record in (old, new)]
    minutes = [record["provenance"]["minutes"] for record in (old, new)]
    return {
        # They are measured by themselves.
        **{key: old[key] for key in ("memory", "repeats", "allocator") if key in old},
        **new,
        "provenance": {
            **new["provenance"],
            "minutes": round(sum(minutes), 2),
            "runs": sum(record["provenance"]["runs"] for record in (old, new)),
            "other_load": None if None in loads else max(loads),
            "dates": {name: dates[name] for name in names if name in about},
        },
        "models": {name: about[name] for name in names if name in about},
        "rows": sorted(rows, key=lambda row: names.index(row["model"])),
    }


def merge_steadier(
    old: dict[str, Any], new: dict[str, Any], names: Sequence[str]
) -> dict[str, Any]:
    """Choose, for each model, of two runs the one whose steps agree best with each other.

    That is the one with the lower floor, whatever it says of the predictions.

    Args:
        old: A result.
        new: A newer one, perhaps of some models only.
        names: The order of the models.

    Raises:
        ValueError: as `merge`.
    """
    steadier = {
        name: about
        for name, about in new["models"].items()
        if _floor_of(new, name) < _floor_of(old, name)
    }
    rows = [row for row in new["rows"] if row["model"] in steadier]
    merged = merge(old, {**new, "models": steadier, "rows": rows}, names)
    return {**merged, "provenance": {**merged["provenance"], "steadiest": True}}


def _floor_of(record: dict[str, Any], name: str) -> float:
    """Return the mean floor of a model; infinite where it was not measured."""
    rows = [row for row in record["rows"] if row["model"] == name]
    known = floor.mean_unavoidable(rows)
    return inf if known is None else known


def merge_allocator(
    old: dict[str, Any], new: dict[str, Any], names: Sequence[str]
) -> dict[str, Any]:
    """Put models whose allocator was asked anew into an older answer.

    Args:
        old: The older answer, with ``provenance`` and ``rows``.
        new: The newer one; its provenance holds, with the runs of both.
        names: The order of the models.

    Raises:
        ValueError: the two are of other devices, or of other versions.
    """
    for key in ("device_name", "cuda", "torch", "settings"):
        ours, theirs = new["provenance"][key], old["provenance"][key]
        if ours != theirs:
            raise ValueError(f"answers differ in {key}: {ours!r} (expected {theirs!r})")
    anew = {row["model"] for row in new["rows"]}
    rows = [row for row in old["rows"] if row["model"] not in anew] + new["rows"]
    runs = sum(answer["provenance"]["runs"] for answer in (old, new))
    return {
        "provenance": {**new["provenance"], "runs": runs},
        "rows": sorted(rows, key=lambda row: names.index(row["model"])),
    }
