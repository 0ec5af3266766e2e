"""Why no number of replicas has a plan, and what would help: tried before it is advised."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from gpipebal.errors import BalanceError, GpipebalError, InfeasibleError
from gpipebal.planner.advice import has_plan
from gpipebal.planner.grid.ways import sized_profiles
from gpipebal.planner.question import Options, ask
from gpipebal.planner.solve import solve
from gpipebal.problem import Rules
from gpipebal.profile import Profile
from gpipebal.units import count

__all__ = ["no_plan", "of_grid", "other_counts"]

#: Most pairs of replicas and partitions that are tried for advice.
_MOST_TRIED = 100


def no_plan(
    profile: Profile,
    n_devices: int,
    refusals: Sequence[str],
    errors: Sequence[tuple[int, Any]],
    options: Options,
) -> GpipebalError:
    """Say why no number of replicas has a plan, and what would help.

    Args:
        profile: Costs of the layers.
        n_devices: Number of devices.
        refusals: A line for each number of replicas.
        errors: What `solve` has refused: the replicas, and its error.
        options: Those that were given.
    """
    reasons = "\n".join(f"  {refusal}" for refusal in refusals)
    text = (
        f"no number of replicas has a plan: devices={n_devices} (expected one that fits, of "
        f"replicas x partitions)\n{reasons}\nFix: "
    )
    if not errors:
        return BalanceError(text + other_counts(profile, n_devices, options))
    lacking = [one for one in errors if isinstance(one[1], InfeasibleError)]
    if lacking:
        replicas, least = min(lacking, key=lambda one: one[1].shortage or 0)
        return InfeasibleError(text + _advice(least, replicas), least.partition, least.shortage)
    replicas, error = errors[0]
    if all(str(other) == str(error) for _, other in errors):
        return error  # it holds for any number of replicas
    return BalanceError(text + _advice(error, replicas))


def of_grid(refusal: str, replicas: int) -> str:
    """Reword the advice for a grid: more partitions are more devices; another schedule is left out.

    Example:
        >>> of_grid("partitions=2; or schedule='1f1b'; or memory_limit=5.", 3)
        'n_devices=6; or memory_limit=5.'
    """
    what, fix, advice = refusal.rpartition("Fix: ")
    changes = advice.removesuffix(".").split("; or ")
    kept = [change for change in changes if "schedule=" not in change]
    kept = kept or ["a smaller model, or fewer rows in a mini-batch"]
    end = "." if advice.endswith(".") else ""
    return re.sub(
        r"\bpartitions=(\d+)",
        lambda found: f"n_devices={replicas * int(found[1])}",
        f"{what}{fix}{'; or '.join(kept)}{end}",
    )


def _advice(error: GpipebalError, replicas: int) -> str:
    return of_grid(str(error).rpartition("Fix: ")[2], replicas)


def other_counts(profile: Profile, n_devices: int, options: Options) -> str:
    """Say with which number of devices, or rows, replicas and partitions can share them."""
    return f"{'; or '.join(_other_counts(profile, n_devices, options))}."


def _other_counts(profile: Profile, n_devices: int, options: Options) -> list[str]:
    ways = _nearest_ways(profile, n_devices, options)
    works = (way for way in ways[:_MOST_TRIED] if _fits(profile, *way, options))
    replicas, partitions = next(works, ways[0])
    nearest = f"n_devices={replicas * partitions}"
    try:
        if not _fits(profile, replicas, partitions, options):
            sized = next(sized_profiles(profile, replicas, options.get("chunks")))
            solve(sized, partitions, **_one_of(options))
    except GpipebalError as error:
        if not isinstance(error, InfeasibleError) and options.get("method", "auto") != "auto":
            # The method is in the way of every number: what helps is seen without it.
            free = _other_counts(profile, n_devices, {**options, "method": "auto"})
            return [f"{also}, and method='auto'" for also in free]
        also = _advice(error, replicas).partition("; or ")[0].rstrip(".")
        return [also if "n_devices=" in also else f"{nearest}, and {also}"]
    return [nearest, *_more_rows(profile, n_devices, options)]


def _nearest_ways(profile: Profile, n_devices: int, options: Options) -> list[tuple[int, int]]:
    """Return replicas and partitions whose product is near a number of devices, the nearest first.

    Example:
        >>> _nearest_ways(Profile.from_costs([1.0] * 3, chunks=2), 5, {})[:2]
        [(2, 2), (2, 3)]
    """
    most = profile.mini_batch_rows
    ways = {
        (min(max(replicas, 1), most), partitions)
        for partitions in _partitions_by_rules(profile.n_layers, options)
        # With one row for each replica they need least memory.
        for replicas in (n_devices // partitions, n_devices // partitions + 1, most)
    }
    return sorted(ways, key=lambda way: (abs(way[0] * way[1] - n_devices), way[0] * way[1], way))


def _partitions_by_rules(n_layers: int, options: Options) -> range:
    """Return the numbers of partitions that rules may leave a split into: all that do are in it."""
    rules = options.get("rules") or Rules()
    fewest = -(-n_layers // min(rules.longest, n_layers))
    most = rules.most_partitions(n_layers)
    return range(fewest, most + 1) if fewest <= most else range(1, n_layers + 1)


def _more_rows(profile: Profile, n_devices: int, options: Options) -> Iterator[str]:
    """Yield the smallest mini-batch with which the devices can be used, one row a replica."""
    for partitions in reversed(_partitions_by_rules(profile.n_layers, options)):
        replicas, rest = divmod(n_devices, partitions)
        if rest or not replicas:
            continue
        try:
            larger = replace(profile, mini_batch_rows=max(replicas, profile.mini_batch_rows))
        except GpipebalError:
            return  # no mini-batch has so many rows
        if _fits(larger, replicas, partitions, options):
            yield f"a mini-batch of {count(replicas, 'row')}"
            return


def _fits(profile: Profile, replicas: int, partitions: int, options: Options) -> bool:
    """Whether replicas of a pipeline of so many partitions have a plan."""
    try:
        return any(
            has_plan(ask(sized, partitions, _one_of(options)))
            for sized in sized_profiles(profile, replicas, options.get("chunks"))
        )
    except GpipebalError:
        return False


def _one_of(options: Options) -> Options:
    """Return the options for one replica whose profile has its number of micro-batches."""
    return {**options, "chunks": None}
