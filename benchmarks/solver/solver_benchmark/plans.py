"""Whole questions to `solve`, timed; and what plans gain on stored profiles, as predicted."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from gpipebal.planner import solve
from gpipebal.planner.question import Options
from gpipebal.planner.schedules.search import search_schedule
from gpipebal.planner.thumb_comparison import compare_rules
from gpipebal.problem import Problem
from gpipebal.profile import Profile
from gpipebal.simulator import weight_shares
from solver_benchmark.chains import draw

#: Numbers of partitions; micro-batches are four for each.
PARTITIONS = (2, 4, 8, 16)
SCHEDULES = ("1f1b", "interleaved_1f1b", "zb_h1")

Row = dict[str, Any]
#: Rows of the mini-batches that are drawn.
_ROWS = 240


def joint(rounds: int) -> list[Row]:
    """Time questions that leave checkpoint modes or numbers of micro-batches open."""
    rows = []
    for name, n_layers, n_partitions, auto_chunks, limit in (
        ("200 layers / 8 partitions, memory and modes", 200, 8, False, 50e-3),
        ("1,000 layers / 64 partitions, memory and modes", 1_000, 64, False, 1.5),
        ("200 layers / 8 partitions, chunks='auto' of 20", 200, 8, True, 1.0),
    ):
        profile = _with_memory(n_layers, auto_chunks)
        free = solve(profile, n_partitions, checkpoint="never")
        most = max(part.memory.total for part in free.partitions)
        # About half of what it would take without checkpoints: some partitions need them.
        options: Options = {"checkpoint": "auto", "memory_limit": int(0.55 * most)}
        if auto_chunks:
            options = {"chunks": "auto"}
        seconds = []
        for _ in range(rounds):
            start = time.perf_counter()
            plan = solve(profile, n_partitions, **options)
            seconds.append(time.perf_counter() - start)
        rows.append(
            {
                "name": name,
                "limit": limit,
                "seconds": median(seconds),
                "gap": plan.gap,
                "status": plan.status,
                "method": plan.method,
                "modes": sorted(set(plan.modes)),
                "chunks": plan.chunks,
            }
        )
    return rows


def _with_memory(n_layers: int, several_sizes: bool) -> Profile:
    """Draw a chain with bytes, at 20 numbers of micro-batches if it has several sizes."""
    rng = random.Random(n_layers)
    chain = draw("lognormal", n_layers)
    forward = [1e-9 * time for time in chain.forward]
    backward = [1e-9 * time for time in chain.backward]
    saved, output = ([rng.randrange(2**10, 2**20) for _ in forward] for _ in range(2))
    parameters = [rng.randrange(2**22) for _ in forward]

    def of_rows(rows: int) -> Profile:
        # An overhead of a tenth of a millisecond, and so much per row.
        return Profile.from_costs(
            [1e-4 + rows / 8 * time for time in forward],
            [1e-4 + rows / 8 * time for time in backward],
            parameter_bytes=parameters,
            saved_bytes=[rows * n // 8 for n in saved],
            output_bytes=[rows * n // 8 for n in output],
            rows=rows,
            chunks=_ROWS // rows,
        )

    if not several_sizes:
        return of_rows(8)
    sizes = [of_rows(rows) for rows in (_ROWS // 21, _ROWS // 8, _ROWS)]
    return replace(sizes[1], other_sizes=(sizes[0], sizes[2]))


def _of_one_size(path: Path) -> Profile:
    """Load a profile so that more micro-batches are a larger mini-batch, not smaller ones."""
    return replace(Profile.load(path), other_sizes=())


def plans(folder: Path, names: str = "*.json") -> list[Row]:
    """Compare the plan of every stored profile with the rules of thumb."""
    rows = []
    for path in sorted(folder.glob(names)):
        profile = _of_one_size(path)
        for n_partitions in PARTITIONS:
            if n_partitions > profile.n_layers:
                continue
            plan = solve(profile, n_partitions, chunks=4 * n_partitions, checkpoint="never")
            # The rule is slow on long chains, never endless on these.
            table = compare_rules(profile, plan, patience=600.0)
            rows.append(
                {
                    "profile": path.stem,
                    "n_layers": profile.n_layers,
                    "n_partitions": n_partitions,
                    "chunks": plan.chunks,
                    "makespan": plan.makespan,
                    "status": plan.status,
                    "above": {row.rule: row.above_plan for row in table.rows if row.rule != "plan"},
                }
            )
    return rows


def searches(folder: Path) -> list[Row]:
    """Search the best split of every stored profile under other schedules."""
    rows = []
    for path in sorted(folder.glob("*.json")):
        profile = _of_one_size(path)
        for n_partitions in PARTITIONS[1:]:
            for schedule in SCHEDULES:
                if n_partitions > profile.n_layers:
                    continue
                problem = Problem(
                    **profile.layer_times,
                    n_partitions=n_partitions,
                    chunks=4 * n_partitions,
                    checkpoint="never",
                )
                shares = weight_shares(profile)
                start = time.perf_counter()
                found = search_schedule(problem, schedule, weight_share=shares)
                seconds = time.perf_counter() - start
                plain = search_schedule(problem, schedule, weight_share=shares, most_trials=1)
                assert found is not None and plain is not None  # nothing is limited
                rows.append(
                    {
                        "profile": path.stem,
                        "n_layers": profile.n_layers,
                        "n_partitions": n_partitions,
                        "chunks": problem.chunks,
                        "schedule": schedule,
                        "status": found.status,
                        "gap": found.gap,
                        "gain": 1 - found.value / plain.value,
                        "seconds": seconds,
                    }
                )
    return rows
