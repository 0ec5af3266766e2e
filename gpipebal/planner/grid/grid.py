"""`solve_grid`: how many devices make one pipeline, and how many pipelines share the rows.

With n devices one can have one pipeline of n partitions, n replicas of the whole model, or anything
between: d replicas of a pipeline with k partitions, on d times k devices. Every replica works on
its share of the rows. When a partition has its gradients, they are added up with those of the same
partition of the other replicas::

    # 6 devices: 1 x 6, 2 x 3, 3 x 2, 6 x 1 (replicas x partitions)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpipebal.argument_kinds import check_kind, row_of
from gpipebal.errors import BalanceError, GpipebalError
from gpipebal.plan import Plan
from gpipebal.planner.grid.options import check_applies, checked_options
from gpipebal.planner.grid.refusals import no_plan, of_grid, other_counts
from gpipebal.planner.grid.replicated import Additions, Replicated, best_replicated
from gpipebal.planner.grid.ways import divisors, sized_profiles
from gpipebal.planner.quantiles import at_quantile
from gpipebal.planner.question import Options
from gpipebal.planner.solve import posed_of, solve
from gpipebal.problem import Link
from gpipebal.problem.link import check_link
from gpipebal.profile import Profile
from gpipebal.schedule import check_count
from gpipebal.text import aligned
from gpipebal.units import count, format_bytes, format_percent, format_seconds

if TYPE_CHECKING:
    from typing import Unpack

    import pandas as pd

__all__ = ["GridRow", "GridTable", "solve_grid"]

#: Most splits that are looked at for each number of micro-batches.
_MOST_TRIED = 40


@dataclass(frozen=True)
class GridRow:
    """One way to use the devices, and what it would cost.

    Attributes:
        replicas: How many pipelines share the rows.
        partitions: How many partitions each of them has.
        plan: The plan of one replica; None: there is none. Its value is the makespan. This may not
            be the least makespan: with another split gradients may be added up earlier.
        time: Seconds of the mini-batch: until every partition has worked and added up its
            gradients. Without loss and optimizer.
        all_reduce_time: Seconds of the longest addition of gradients.
        waiting_time: How much of `time` comes after the last backward.
        lower_bound: Seconds that no plan for this many replicas can beat, with any of the numbers
            of micro-batches that were tried.
        refusal: Why there is no plan; empty if there is one.
    """

    replicas: int
    partitions: int
    plan: Plan | None = None
    time: float | None = None
    all_reduce_time: float | None = None
    waiting_time: float | None = None
    lower_bound: float | None = None
    refusal: str = ""

    @property
    def status(self) -> str | None:
        """``'optimal'`` if no plan takes less time, else ``'feasible'``; None without a plan."""
        if self.time is None:
            return None
        return "optimal" if self.lower_bound == self.time else "feasible"

    @property
    def gap(self) -> float | None:
        """How far the time can be from the least, as a fraction of it; None without a plan."""
        if self.time is None or self.lower_bound is None:
            return None
        return (self.time - self.lower_bound) / self.time if self.time else 0.0


@dataclass(frozen=True)
class GridTable:
    """All ways to use the devices; printed, it is a table.

    Attributes:
        rows: The fastest first; those without a plan last.
        n_devices: Number of devices.
        mini_batch_rows: Rows that all replicas have together.
    """

    rows: tuple[GridRow, ...]
    n_devices: int
    mini_batch_rows: int

    @property
    def best(self) -> GridRow:
        """The fastest."""
        return self.rows[0]

    def row(self, replicas: int) -> GridRow:
        """Return the row for a number of replicas.

        Raises:
            UsageError: there is none.
        """
        return row_of(self.rows, "replicas", replicas)

    def to_frame(self) -> pd.DataFrame:
        """Return one row per way: counts, seconds, bytes."""
        import pandas as pd

        lines = []
        for row in self.rows:
            plan = row.plan
            lines.append(
                {
                    "replicas": row.replicas,
                    "partitions": row.partitions,
                    "chunks": None if plan is None else plan.chunks,
                    "rows": None if plan is None else plan.rows,
                    "time": row.time,
                    "makespan": None if plan is None else plan.makespan,
                    "all_reduce_time": row.all_reduce_time,
                    "waiting_time": row.waiting_time,
                    "gap": row.gap,
                    "peak_bytes": None if plan is None else _peak(plan),
                    "refusal": row.refusal,
                }
            )
        return pd.DataFrame(lines)

    def __str__(self) -> str:
        names = ["replicas", "partitions", "micro-batches", "time", "all-reduce", "bubble"]
        lines = [[*names, "peak memory"]]
        notes = []
        for row in self.rows:
            counts = [str(row.replicas), str(row.partitions)]
            plan = row.plan
            if plan is None or row.time is None or row.all_reduce_time is None:
                lines.append([*counts, *["-"] * 5])
                notes.append(f"{row.replicas} x {row.partitions}: {row.refusal}")
                continue
            lines.append(
                [
                    *counts,
                    f"{plan.chunks} of {count(plan.rows, 'row')}",
                    format_seconds(row.time),
                    format_seconds(row.all_reduce_time),
                    format_percent(plan.bubble_fraction),
                    format_bytes(_peak(plan)),
                ]
            )
        title = (
            f"{count(self.n_devices, 'device')}, mini-batch of {count(self.mini_batch_rows, 'row')}"
        )
        return "\n".join([title, *aligned(lines, left=()), *notes])


def solve_grid(
    profile: Profile,
    n_devices: int,
    *,
    replica_link: Link | None = None,
    **options: Unpack[Options],
) -> GridTable:
    """Find the best plan for every number of replicas, and set them side by side.

    Minimises, for each number of replicas, the time until every partition has worked and has added
    up its gradients, over all splits that keep limits and rules. The mini-batch is always that of
    the profile. Each of d replicas has one d-th of its rows (if they do not divide evenly, the
    largest part counts); all devices are alike.

    Args:
        profile: Costs of the layers. Smaller micro-batches than the profile's are predicted with
            `Profile.at_rows`, which takes several measured sizes to do well.
        n_devices: Number of devices.
        replica_link: What connects the same partition of different replicas; None: adding up
            gradients takes no time. Each pair of replicas uses its own.
        options: As for `solve`: checkpoint modes, memory limit for every device, `link` between
            partitions, layers that stay together; but nothing about single partitions. `chunks`
            are those of each replica; None: the fewest with which micro-batches have no more rows
            than in the profile; several: the best of these; ``'auto'``: the best of up to 20
            numbers. With a `method` or a `time_limit` only the makespan is searched for, and cuts
            are moved from there; the bound is then that of the makespan plus the addition of
            gradients after it.

    Returns:
        A table, the fastest first, each row with a bound that tells how far it may be from the
        best. Numbers of replicas without a plan are in it too, with the reason.

    Raises:
        BalanceError: a count that is not 1 or more, or an option that does not apply.
        InfeasibleError: no number of replicas has a plan that fits; the text says what would help,
            for the number that lacks least.
        KindError: `profile` is not a Profile, or an option that does not exist.
        ProfileError: the profile does not tell what is asked for.

    Complexity:
        As `solve`, for every divisor of the number of devices (and number of micro-batches), and
        for every split that `gpipebal.planner.grid.replicated.best_replicated` looks at.

    Source:
        The ring is Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
        workstations", JPDC 69(2), 2009. Differs: a partition begins as soon as its own gradients
        are complete, while those before it still work.

    Example:
        >>> profile = Profile.from_costs([1.0] * 4, parameter_bytes=[100] * 4, rows=2, chunks=8)
        >>> table = solve_grid(profile, 4, replica_link=Link(100.0), checkpoint="never")
        >>> [(row.replicas, row.partitions, row.time) for row in table.rows]
        [(4, 1, 30.0), (2, 2, 32.0), (1, 4, 33.0)]
    """
    check_kind("profile", profile, Profile)
    n_devices = check_count("n_devices", n_devices)
    check_applies(options)
    check_link("replica_link", replica_link)
    quantile = options.get("quantile")
    if quantile is not None:
        # Taken before the rows of micro-batches are chosen, as in `solve`.
        profile = at_quantile(profile, quantile)
        options = {**options, "quantile": None}
    options = checked_options(profile, options)
    most = profile.n_layers * profile.mini_batch_rows
    if n_devices > most:
        raise BalanceError(
            f"devices are more than the mini-batch can use: n_devices={n_devices} (expected at "
            f"most {most}: {count(profile.n_layers, 'layer')} for each of "
            f"{count(profile.mini_batch_rows, 'row')}).\n"
            f"Fix: {other_counts(profile, n_devices, options)}"
        )
    errors: list[tuple[int, GpipebalError]] = []
    rows = [
        _best(profile, replicas, n_devices // replicas, replica_link, options, errors)
        for replicas in divisors(n_devices)
    ]
    rows.sort(key=lambda row: (row.time is None, row.time or 0.0, row.replicas))
    if rows[0].plan is None:
        refusals = [f"{row.replicas} x {row.partitions}: {row.refusal}" for row in rows]
        raise no_plan(profile, n_devices, refusals, errors, options)
    return GridTable(tuple(rows), n_devices, profile.mini_batch_rows)


def _best(
    profile: Profile,
    replicas: int,
    partitions: int,
    replica_link: Link | None,
    options: Options,
    errors: list[tuple[int, GpipebalError]],
) -> GridRow:
    """Find the fastest plan of one number of replicas; add what `solve` refuses to `errors`."""
    if replicas > profile.mini_batch_rows:
        why = (
            f"the mini-batch has {count(profile.mini_batch_rows, 'row')} for "
            f"{count(replicas, 'replica')}."
        )
        return GridRow(replicas, partitions, refusal=why)
    if partitions > profile.n_layers:
        why = (
            f"the chain has {count(profile.n_layers, 'layer')} for "
            f"{count(partitions, 'partition')}."
        )
        return GridRow(replicas, partitions, refusal=why)
    rest: Options = {**options, "chunks": None}
    plain = rest.get("method", "auto") == "auto" and rest.get("time_limit") is None
    additions = Additions(profile, replicas, replica_link)
    best: Replicated | None = None
    bound = math.inf
    refusal = ""
    for sized in sized_profiles(profile, replicas, options.get("chunks")):
        try:
            plan = solve(sized, partitions, **rest)
        except GpipebalError as error:
            refusal = refusal or of_grid(str(error).replace("\n", " "), replicas)
            errors.append((replicas, error))
            continue
        (posed,) = posed_of(sized, partitions, rest)
        most = _MOST_TRIED if plain else 0
        found = best_replicated(
            posed, plan, additions, most, math.inf if best is None else best.time
        )
        bound = min(bound, found.lower_bound)
        if best is None or found.time < best.time:
            best = found
    if best is None:
        return GridRow(replicas, partitions, refusal=refusal)
    return GridRow(
        replicas=replicas,
        partitions=partitions,
        plan=best.plan,
        time=best.time,
        all_reduce_time=max(best.additions),
        waiting_time=best.time - best.plan.makespan,
        lower_bound=min(bound, best.time),
    )


def _peak(plan: Plan) -> int:
    return max(part.memory.total for part in plan.partitions)
