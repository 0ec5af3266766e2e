"""Times of the solver and of other rules, interleaved; and how far those are off."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from statistics import median
from typing import Any

from gpipebal.problem import Problem
from gpipebal.solvers import split
from gpipebal.solvers.bisection import floor, smallest_limit
from solver_benchmark.chains import RANDOM, Chain, draw
from solver_benchmark.peers import Peer, TooSlowError, limited

#: Micro-batches of the problems.
CHUNKS = 32
#: A turn is repeated until it has taken so many seconds, or so often.
LEAST_SECONDS, MOST_REPEATS = 0.02, 200
#: Layers and partitions of the small chains of which many are drawn.
GAP_SIZES = ((24, 4), (50, 8), (100, 8), (200, 16), (100, 32))

Row = dict[str, Any]


def time_all(
    sizes: Sequence[tuple[int, int]],
    kinds: Sequence[str],
    peers: Mapping[str, Peer],
    *,
    rounds: int,
    limit: float,
    told: Callable[[str], None],
) -> list[Row]:
    """Time every kind of chain at every size; return a row for each.

    A rule that did not end in time for a chain is not tried on longer ones with as many or more
    partitions: its row says so.
    """
    rows: list[Row] = []
    for kind in kinds:
        lost: dict[str, list[tuple[int, int]]] = {name: [] for name in peers}
        for n_layers, n_partitions in sizes:
            slow = {
                name
                for name, sizes_lost in lost.items()
                if any(n <= n_layers and k <= n_partitions for n, k in sizes_lost)
            }
            tried = {name: peer for name, peer in peers.items() if name not in slow}
            row = _time_one(kind, n_layers, n_partitions, tried, rounds, limit)
            for name in peers:
                if name in slow:
                    row["peers"][name] = {"seconds": None, "tried": False}
                elif row["peers"][name]["seconds"] is None:
                    lost[name].append((n_layers, n_partitions))
            rows.append(row)
            told(f"{kind} {n_layers}/{n_partitions}: {1e3 * row['bottleneck']['seconds']:.2f} ms")
    return rows


def _time_one(
    kind: str,
    n_layers: int,
    n_partitions: int,
    peers: Mapping[str, Peer],
    rounds: int,
    limit: float,
) -> Row:
    chain = draw(kind, n_layers)
    both = chain.both
    problem = make_problem(chain, n_partitions)
    best = split(problem, "bottleneck")
    sums = problem.load_sums
    ours: dict[str, Callable[[], object]] = {
        "reading": lambda: read(both),
        "problem": lambda: make_problem(chain, n_partitions),
        "value": lambda: least_bottleneck(sums, n_partitions),
        "bottleneck": lambda: split(problem, "bottleneck"),
        "makespan": lambda: split(problem, "makespan"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in (*ours, *peers)}
    balances: dict[str, list[int]] = {}
    for turn in range(rounds):
        for name, run in ours.items():
            seconds[name].append(_clock(run))
        for name, peer in peers.items():
            # Once is enough where it takes long; and once too late is too late.
            if turn and (not seconds[name] or seconds[name][0] > limit / rounds):
                continue
            timed = _time_peer(peer, both, n_partitions, limit)
            if timed is not None:
                seconds[name].append(timed[0])
                balances[name] = timed[1]
    row: Row = {"kind": kind, "n_layers": n_layers, "n_partitions": n_partitions, "peers": {}}
    for name in ours:
        row[name] = {"seconds": min(seconds[name]), "median": median(seconds[name])}
    assert least_bottleneck(sums, n_partitions) == best.value
    row["bottleneck"]["gap"] = best.gap
    row["makespan"]["gap"] = split(problem, "makespan").gap
    for name in peers:
        found = balances.get(name)
        row["peers"][name] = {
            "seconds": min(seconds[name], default=None),
            "tried": True,
            "excess": None if found is None else _excess(both, found, best.value),
        }
    return row


def _time_peer(
    peer: Peer, costs: Sequence[int], n_partitions: int, limit: float
) -> tuple[float, list[int]] | None:
    """Return the seconds of a rule and the balance that it finds; None: none within the limit."""
    try:
        with limited(limit):
            start = time.perf_counter()
            balance = peer(costs, n_partitions)
            first = time.perf_counter() - start
            if first >= LEAST_SECONDS:
                return first, balance
            return min(first, _clock(lambda: peer(costs, n_partitions))), balance
    except (TooSlowError, IndexError):
        return None


def least_bottleneck(sums: Sequence[int], n_partitions: int) -> int:
    """Return the least bottleneck, proven, of whichever split has it."""
    return smallest_limit(sums, sums, n_partitions, at_least=floor(sums, n_partitions)).value


def read(costs: Sequence[int]) -> tuple[list[int], int]:
    """Look at every cost once: what a solver in Python cannot do without."""
    return list(accumulate(costs)), max(costs)


def make_problem(chain: Chain, n_partitions: int) -> Problem:
    """Pose the problem and add up its prefix sums, which all solvers share."""
    zeros = (0,) * len(chain.forward)
    problem = Problem(chain.forward, chain.backward, zeros, n_partitions, CHUNKS, "never")
    assert problem.load_sums[-1] >= 0 and problem.recompute_sums[-1] == 0
    return problem


def _clock(run: Callable[[], object]) -> float:
    """Return the seconds of one call, from as many as take long enough to tell."""
    repeats = 0
    start = time.perf_counter()
    while True:
        run()
        repeats += 1
        passed = time.perf_counter() - start
        if passed >= LEAST_SECONDS or repeats == MOST_REPEATS:
            return passed / repeats


def gaps(
    peers: Mapping[str, Peer], draws: Mapping[str, int], sizes: Sequence[tuple[int, int]]
) -> list[Row]:
    """See how far rules are above the optimum over many small chains."""
    rows = []
    for kind in RANDOM:
        for n_layers, n_partitions in sizes:
            row: Row = {"kind": kind, "n_layers": n_layers, "n_partitions": n_partitions}
            for name, peer in peers.items():
                found = []
                for seed in range(1, draws[name] + 1):
                    costs = draw(kind, n_layers, seed).both
                    best = split(Problem.from_costs(costs, n_partitions), "bottleneck").value
                    try:
                        with limited(5.0):
                            found.append(_excess(costs, peer(costs, n_partitions), best))
                    except (TooSlowError, IndexError):
                        found.append(None)
                answers = [excess for excess in found if excess is not None]
                row[name] = {
                    "draws": len(found),
                    "no_answer": len(found) - len(answers),
                    "mean": sum(answers) / len(answers),
                    "worst": max(answers),
                    "optimal": sum(excess == 0 for excess in answers),
                }
            rows.append(row)
    return rows


def bottleneck_of(costs: Sequence[int], balance: Sequence[int]) -> int | None:
    """Return the largest sum of a partition; None if the balance is none."""
    if sum(balance) != len(costs) or min(balance) < 1:
        return None
    sums = [0, *accumulate(costs)]
    return max(sums[b] - sums[a] for a, b in pairwise([0, *accumulate(balance)]))


def _excess(costs: Sequence[int], balance: Sequence[int], best: float) -> float | None:
    """Return how far a balance is above the optimum, as a fraction; None if it is none."""
    value = bottleneck_of(costs, balance)
    return None if value is None else value / best - 1
