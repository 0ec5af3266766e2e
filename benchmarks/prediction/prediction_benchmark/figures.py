"""Figures: what a stored result says about the predictions, and whether it is good enough."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from statistics import fmean, median
from typing import Any

from benchmark_tools.bars import Bar
from scipy.stats import spearmanr

from prediction_benchmark import floor
from prediction_benchmark.parts import PARTS

FORMAT = "gpipebal-benchmark-prediction"
VERSION = 1

Row = dict[str, Any]


def bars(record: dict[str, Any]) -> list[Bar]:
    """Compute the figures that have a bar, and those that stand beside them."""
    rows: list[Row] = record["rows"]
    by_model = {name: [row for row in rows if row["model"] == name] for name in record["models"]}
    repeats = record.get("repeats")
    return [
        *_bars_of_times(rows),
        *_bars_of_memory(rows),
        *_bars_of_choices(by_model),
        *(_bars_of_repeats(repeats["models"]) if repeats else ()),
    ]


def _bars_of_times(rows: list[Row]) -> list[Bar]:
    everywhere = f"over {len(rows)} plans"
    times = errors(rows)
    farthest, worst = max(zip(map(abs, times), rows, strict=True), key=itemgetter(0))
    most_unavoidable = max(floor.all_unavoidable(rows), default=None)
    before, at_q1 = errors(rows, "start"), errors(rows, of="q1")
    return [
        Bar("step time, mean absolute error", 0.05, mean_absolute(times), True, everywhere),
        _beside("mean of a perfect prediction", floor.mean_unavoidable(rows), everywhere),
        Bar("step time, farthest off", 0.12, farthest, True, describe(worst)),
        _beside("farthest of a perfect prediction", most_unavoidable, everywhere),
        _beside("mean, by a profile of some minutes before", mean_absolute(before), everywhere),
        _beside("mean, of steps at the first quartile", mean_absolute(at_q1), everywhere),
    ]


def _bars_of_memory(rows: list[Row]) -> list[Bar]:
    found = [(error, row) for row in rows for error in memory_errors([row])]
    mean = mean_absolute([error for error, _ in found])
    under, where_under = min(found, key=itemgetter(0))
    over, where_over = max(found, key=itemgetter(0))
    everywhere = f"over {len(found)} partitions"
    return [
        Bar("peak memory, mean absolute error", 0.02, mean, True, everywhere),
        Bar("peak memory, farthest under", -0.01, under, False, describe(where_under)),
        _beside("peak memory, farthest over", over, describe(where_over)),
    ]


def _bars_of_choices(by_model: dict[str, list[Row]]) -> list[Bar]:
    """Compute how well plans are told from each other: their ranks, and the choices made."""

    def of_models(figure: Callable[[list[Row]], float | None]) -> list[tuple[float, str]]:
        found = ((figure(rows), name) for name, rows in by_model.items())
        return [(value, name) for value, name in found if value is not None]

    def in_halves(rows: list[Row]) -> float | None:
        return floor.regret_in_halves(best_predicted(rows), rows)

    unknown = None, ""
    lowest, where_lowest = min(of_models(rank), default=unknown)
    most, where_most = max(of_models(regret))
    by_half = max(of_models(floor.regret_between_halves), default=unknown)
    planned = [pair for rows in by_model.values() for pair in regrets_within(rows)]
    mean = fmean(value for value, _ in planned) if planned else None
    worst, row = max(planned, key=itemgetter(0), default=(None, None))
    everywhere = f"over {len(planned)} settings with chunks > 1"
    planners = "planner's balance over best measured"
    return [
        Bar("rank correlation, lowest of a model", 0.97, lowest, False, where_lowest),
        _beside("rank of a perfect prediction", *min(of_models(floor.best_rank), default=unknown)),
        Bar("chosen plan over best measured, worst model", 0.03, most, True, where_most),
        _beside("plan chosen by half of the steps", *by_half),
        _beside(
            "chosen plan over best of a half, in the other",
            *max(of_models(in_halves), default=unknown),
        ),
        _beside(f"{planners}, mean", mean, everywhere),
        _beside(f"{planners}, worst", worst, "" if row is None else describe(row)),
    ]


def _bars_of_repeats(models: dict[str, Any]) -> list[Bar]:
    """Compute how well profiles of one model agree, and work that is always the same."""
    value, where = max(
        (floor.far_from_median(floor.partition_times(times)), f"{name}, partition {j}")
        for name, about in models.items()
        for j, times in enumerate(about["partitions"])
    )
    bars = [Bar("repeated profiles, farthest from their median", 0.03, value, True, where)]
    for kind in next(iter(models.values()))["work"]:
        times = (
            (floor.far_from_median(about["work"][kind]), name) for name, about in models.items()
        )
        bars.append(_beside(f"{kind} in the same turns", *max(times)))
    return bars


def _beside(name: str, value: float | None, where: str) -> Bar:
    """Return a line without a bar: what to compare the figure above it with."""
    return Bar(f"  {name}", None, value, True, where)


def describe(row: Row) -> str:
    """Name a plan in a few words."""
    balance = ", ".join(map(str, row["balance"]))
    return f"{row['model']}, {row['way']}, chunks={row['chunks']}, {row['checkpoint']}, [{balance}]"


def errors(rows: Iterable[Row], by: str = "same minutes", of: str = "median") -> list[float]:
    """Return predicted over measured step time, less one, of each plan.

    Args:
        rows: The plans.
        of: Which of a plan's steps: the ``'median'``, or the first or third quartile.
        by: Which profile predicts: ``'same minutes'``, the median of those at the beginning of each
            round; ``'start'``, taken before any step of any model was measured; or ``'one
            profile'``, of those the one of 4 micro-batches, at other numbers of rows where needed.
    """
    return [row["predicted"][by] / row["seconds"][of] - 1 for row in rows]


def memory_errors(rows: Iterable[Row]) -> list[float]:
    """Return predicted over counted peak, less one, of each partition of each plan."""
    return [
        predicted / counted - 1
        for row in rows
        for predicted, counted in zip(*row["memory"].values(), strict=True)
    ]


def share_under(found: Sequence[float], limit: float = 0.01) -> float:
    """Return the share of errors that are below zero by more than a limit."""
    return sum(error < -limit for error in found) / len(found)


def within(rows: Sequence[Row]) -> list[list[Row]]:
    """Part plans into settings: of one there differs only the balance."""

    def key(row: Row) -> tuple[str, str, int, str]:
        return row["model"], row["way"], row["chunks"], row["checkpoint"]

    return [list(group) for _, group in groupby(sorted(rows, key=key), key=key)]


def rank(rows: Sequence[Row]) -> float | None:
    """Return Spearman's rank correlation of predicted and measured step times; None: too few."""
    predicted = [row["predicted"]["same minutes"] for row in rows]
    measured = [row["seconds"]["median"] for row in rows]
    if min(len(set(predicted)), len(set(measured))) < 2:
        return None
    return float(spearmanr(predicted, measured).statistic)


def ranks_within(rows: Sequence[Row]) -> list[float]:
    """Return the rank correlation of each setting with several micro-batches.

    With one micro-batch nothing overlaps, so that all balances are predicted to take equally long.
    """
    found = [rank(group) for group in within(rows) if group[0]["chunks"] > 1]
    return [value for value in found if value is not None]


def best_predicted(rows: Iterable[Row]) -> Row:
    """Return the plan that is predicted to be best."""
    return min(rows, key=lambda row: row["predicted"]["same minutes"])


def regret(rows: Sequence[Row]) -> float:
    """Return the measured time of the plan that is predicted to be best over the best, less one."""
    return _over_best(best_predicted(rows), rows)


def regrets_within(rows: Sequence[Row]) -> list[tuple[float, Row]]:
    """Return the planner's balance over the best in each setting with several micro-batches."""
    return [
        (_over_best(row, group), row)
        for group in within(rows)
        for row in group
        if row["source"] == "planner" and row["chunks"] > 1
    ]


def _over_best(chosen: Row, rows: Iterable[Row]) -> float:
    best = min(row["seconds"]["median"] for row in rows)
    return float(chosen["seconds"]["median"] / best - 1)


def spread(rows: Iterable[Row]) -> float:
    """Return the median over plans of their quartiles' distance from each other, by the median."""
    return median(
        (row["seconds"]["q3"] - row["seconds"]["q1"]) / row["seconds"]["median"] for row in rows
    )


def drift(model: dict[str, Any]) -> float | None:
    """Return how much longer the layers took in the last profile than in the first."""
    first, last = (_layers_time(model["profiles"][moment]) for moment in ("start", "end"))
    return None if first is None or last is None else last / first - 1


def disagreement(model: dict[str, Any]) -> float | None:
    """Return how far the profile of a round is at most from the median of all rounds."""
    known = [_layers_time(of_round) for of_round in model["profiles"]["rounds"]]
    times = [time for time in known if time is not None]
    if not times:
        return None
    return max(abs(time / median(times) - 1) for time in times)


def _layers_time(of_moment: dict[str, Any]) -> float | None:
    """Return the seconds of all layers for a quarter of the mini-batch."""
    totals = of_moment.get("4")
    return None if totals is None else float(totals["forward"] + totals["backward"])


def mean_parts(rows: Sequence[Row]) -> dict[str, float]:
    """Return by how much each part is longer than predicted, by the traced step; means."""
    return {name: fmean(row["parts"][name] / row["traced"] for row in rows) for name in PARTS}


def median_parts(rows: Sequence[Row]) -> dict[str, float]:
    """Return by how many seconds each part is longer than predicted; medians."""
    return {name: median(row["parts"][name] for row in rows) for name in PARTS}


def cell_ratios(rows: Iterable[Row]) -> dict[str, float]:
    """Return measured over predicted time of cells of each kind; medians over plans."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for kind, by_partition in row["cells"].items():
            pairs = [pair for pair in by_partition if pair is not None]
            predicted, measured = map(sum, zip(*pairs, strict=True))
            if predicted:
                found.setdefault(kind, []).append(measured / predicted)
    return {kind: median(ratios) for kind, ratios in found.items()}


def mean_absolute(values: Sequence[float]) -> float:
    """Return the mean of errors, whichever way they go."""
    return fmean(map(abs, values))
