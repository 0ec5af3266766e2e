"""Which algorithm answers which question."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, assert_never

from gpipebal.argument_kinds import check_kind, is_word
from gpipebal.errors import BalanceError
from gpipebal.objectives import Objective, TimeObjective, check_objective
from gpipebal.problem import Problem, to_balance
from gpipebal.problem.checks import check_time_limit
from gpipebal.schedule import CheckpointMode
from gpipebal.solvers.deadline import NO_DEADLINE, Deadline
from gpipebal.solvers.filling.always import solve_makespan_always
from gpipebal.solvers.filling.bottleneck import solve_bottleneck
from gpipebal.solvers.filling.makespan import solve_makespan
from gpipebal.solvers.infeasible import explain_infeasible
from gpipebal.solvers.integer_program import solve_integer_program
from gpipebal.solvers.sets.any_mode import solve_any_mode
from gpipebal.solvers.sets.boxes import least_makespan
from gpipebal.solvers.sets.levels import MOST_STATES, Levels, count_states
from gpipebal.solvers.sets.peak import least_peak
from gpipebal.solvers.sets.reachability import BestPath, Path, Search
from gpipebal.solvers.sets.staircase import least_bottleneck, least_sum

__all__ = [
    "METHODS",
    "Split",
    "check_method",
    "find",
    "select_method",
    "split",
]

#: Names of the algorithms; ``'auto'`` stands for the one that `select_method` names.
METHODS = (
    "auto",
    "bisection",
    "two-threshold sweep",
    "pareto program",
    "set bisection",
    "set sweep",
    "box search",
    "peak bisection",
    "integer program",
)

#: Algorithms that also answer when devices, links, limits or rules make runs differ.
GENERAL = ("set bisection", "set sweep", "box search")

#: With more runs than this the integer program takes too long to close a gap.
_FEW_RUNS = 3_000


@dataclass(frozen=True)
class Split:
    """A way to cut a chain into partitions, and how good it is proven to be.

    Attributes:
        bounds: Where partitions begin and end: 0, the cuts, number of layers.
        value: What was minimised: in the unit of the problem's times, or bytes.
        lower_bound: No split into as many partitions has a smaller value, in the same unit.
        method: Name of the algorithm.
        modes: Checkpoint mode of each partition.
        order: Device of each partition, as an index into the problem's devices.
    """

    bounds: tuple[int, ...]
    value: float
    lower_bound: float
    method: str
    modes: tuple[CheckpointMode, ...] = ()
    order: tuple[int, ...] = ()

    @property
    def status(self) -> Literal["optimal", "feasible"]:
        """``'optimal'`` if `value` equals `lower_bound`, else ``'feasible'``."""
        return "optimal" if self.lower_bound >= self.value else "feasible"

    @property
    def balance(self) -> list[int]:
        """Number of layers in each partition, as a new list."""
        return to_balance(self.bounds)

    @property
    def gap(self) -> float:
        """How far `value` may be from the optimum, as a fraction of it; 0 for a value of 0."""
        return (self.value - self.lower_bound) / self.value if self.value else 0.0

    def with_bound(self, lower_bound: float) -> Split:
        """Return the same split with another bound, which no split's value is below."""
        return replace(self, lower_bound=min(lower_bound, self.value))


def split(
    problem: Problem,
    objective: Objective = "makespan",
    method: str = "auto",
    *,
    time_limit: float | None = None,
) -> Split:
    """Split a chain into partitions in the provably best way.

    Minimises `objective` over all splits into exactly ``problem.n_partitions`` non-empty runs of
    consecutive layers that fit their devices and keep the rules; and, where the problem leaves
    them open, over checkpoint modes and orders of devices. Ties are broken by the smallest
    bottleneck, then by the least sum of squared partition times (forward + recompute +
    backward), then by the leftmost cuts (lexicographically smallest bounds). ``'box search'`` and
    ``'integer program'`` take the first they meet instead, and ``'pareto program'`` leaves the
    squares out where there are too many to compare (see `gpipebal.solvers.filling.paths`), and the
    set methods round them where very many are close (see `gpipebal.solvers.sets.evenness`). Either
    way, the same problem always gives the same split, unless a time limit ended the search.

    Args:
        problem: Times of the layers, number of partitions, chunks, checkpoint mode; devices,
            links, memory, rules.
        objective: ``'makespan'``, first start to last end of a mini-batch; ``'bottleneck'``,
            the time of the slowest partition for one micro-batch; or ``'peak_memory'``, the
            largest number of bytes that a partition needs.
        method: ``'auto'``, or the name of an algorithm: the one that `select_method` names, or a
            more general one that is slower.
        time_limit: Seconds after which ``'box search'``, ``'set bisection'`` and ``'integer
            program'`` return the best split so far, with the bound so far, and leave ties as they
            are. The others end by themselves.

    Returns:
        A Split; its status is ``'optimal'`` unless the time limit, HiGHS' tolerance or a partition
        that has to wait for its last recompute (see `select_method`) left a gap.

    Raises:
        BalanceError: an objective or a method that does not exist or does not apply, or a time
            limit that is none.
        InfeasibleError: no split fits the devices and keeps the rules.

    Complexity:
        For N layers and K partitions: O(P K log N) with P about 2 to 18 for ``'bottleneck'``, and
        up to some hundred for ``'makespan'``; and for the tie-break O(w l) for w places that cuts
        can take and l ends of each partition, in few operations, or O(w log N), or about ten times
        O(N log N). See the modules of `gpipebal.solvers`.

    Example:
        >>> problem = Problem([1, 2, 3, 4], [2, 4, 6, 8], [1, 2, 3, 4], n_partitions=2, chunks=8)
        >>> best = split(problem)
        >>> best.balance, best.value, best.status, best.method
        ([3, 1], 198, 'optimal', 'two-threshold sweep')
    """
    found = find(problem, objective, method, time_limit=time_limit)
    if found is None:
        raise explain_infeasible(problem)
    return found


def find(
    problem: Problem,
    objective: Objective = "makespan",
    method: str = "auto",
    *,
    time_limit: float | None = None,
) -> Split | None:
    """Do what `split` does, and return None if no split fits the devices and keeps the rules."""
    used = check_method(problem, objective, method)
    deadline = Deadline(check_time_limit(time_limit))
    if objective == "peak_memory":
        peak = least_peak(problem)
        return None if peak is None else split_of(peak[1], peak[0], peak[0], used)
    if used in ("bisection", "two-threshold sweep", "pareto program"):
        return _plain(problem, objective, used)
    levels = Levels(problem, stateless=used == "integer program")
    if used == "integer program":
        best = solve_integer_program(problem, objective, deadline)
    elif objective == "makespan" and (problem.modes is None or "always" in problem.modes):

        def solve(levels: Levels) -> BestPath | None:
            # Where the last partition is charged for its recompute, what is passed once differs.
            method = "box search" if levels.early else used
            return solve_levels(method, levels, deadline)

        best = solve_any_mode(levels, solve)
        if best is not None and method == "auto":
            best = _closed(problem, best, deadline)
    elif objective == "makespan" or objective == "bottleneck":
        best = solve_levels(used, levels, deadline)
    else:
        assert_never(objective)
    if best is None:
        return None
    numbers = (problem.to_time(best.value), problem.to_time(best.lower_bound))
    return split_of(best.path, *numbers, used)


def _closed(problem: Problem, best: BestPath, deadline: Deadline) -> BestPath:
    """Close the gap that a visible recompute has left, as far as HiGHS can on a short chain.

    Returns:
        The better of the answer and that of HiGHS, with the better of their bounds.
    """
    n_runs = problem.n_layers**2 * problem.n_partitions // 2
    if best.lower_bound >= best.value or n_runs > _FEW_RUNS or deadline.is_up:
        return best
    try:
        other = solve_integer_program(problem, "makespan", deadline)
    except BalanceError:
        return best  # it is too large after all, or nothing was found in time
    assert other is not None
    bound = max(best.lower_bound, other.lower_bound)
    if other.value < best.value:
        best = other
    return best._replace(lower_bound=min(bound, best.value))


def check_method(problem: Problem, objective: Objective, method: str) -> str:
    """Return the algorithm that a method stands for.

    Raises:
        BalanceError: it does not exist, or does not solve the problem.
    """
    applies = applicable(problem, objective)
    if not is_word(method, "auto", *applies):
        raise BalanceError(
            f"method does not solve this problem: method={method!r:.60} (expected 'auto' or "
            f"{' or '.join(map(repr, applies))} for objective={objective!r}, "
            f"checkpoint={problem.checkpoint!r}; "
            f"all methods: {', '.join(map(repr, METHODS))}).\n"
            "Fix: method='auto'."
        )
    return applies[0] if method == "auto" else method


def select_method(problem: Problem, objective: Objective = "makespan") -> str:
    """Name the algorithm that `split` runs for a problem.

    Where partitions differ only in their layers: ``'bisection'`` of one threshold, for the
    bottleneck, and for the makespan with one chunk; ``'two-threshold sweep'`` for the makespan,
    unless every micro-batch is recomputed; ``'pareto program'`` if every one is, which begins with
    a sweep that mostly suffices.

    With devices, links, memory, rules, frozen layers before recomputed ones or several modes:
    ``'set bisection'`` for the bottleneck; ``'set sweep'`` for the makespan, if what is passed once
    is the same for every split, and ``'box search'`` if not, or if some partition recomputes every
    micro-batch: the latter may leave a gap (see `gpipebal.solvers.sets.any_mode`), of which on
    short chains HiGHS closes what it can. ``'integer program'`` where too many kinds of devices may
    take any order. ``'peak bisection'`` for the peak memory.

    Raises:
        BalanceError: an objective that does not exist, or for which the problem lacks something.

    Example:
        >>> select_method(Problem.from_costs([1, 2, 3], 2), "bottleneck")
        'bisection'
    """
    return applicable(problem, objective)[0]


def applicable(problem: Problem, objective: Objective) -> list[str]:
    """List the algorithms that solve a problem, the one that `select_method` names first.

    Raises:
        BalanceError: as `select_method`.
    """
    check_kind("problem", problem, Problem, "problem = Problem(forward, backward, recompute, n)")
    check_objective(objective)
    n_states = count_states(problem)
    if objective == "peak_memory":
        if problem.memory is None:
            raise BalanceError(
                "peak memory of partitions is not known: memory=None (expected a Memory where "
                "objective='peak_memory').\nFix: memory=layer_memory(...)."
            )
        if n_states > MOST_STATES:
            raise BalanceError(
                "devices are of too many kinds to be put into any order: any_order=True with "
                f"{n_states} states (expected {MOST_STATES} or fewer where "
                "objective='peak_memory').\nFix: any_order=False, or equal limits and speeds."
            )
        return ["peak bisection"]
    is_always = "always" in (problem.modes or ())
    if objective == "bottleneck":
        plain, general = "bisection", ["set bisection"]
    elif objective == "makespan":
        plain = "pareto program" if is_always else "two-threshold sweep"
        plain = "bisection" if problem.chunks == 1 else plain
        is_sum = not is_always and _passes_the_same(problem)
        general = ["set sweep", "box search"] if is_sum else ["box search"]
    else:
        assert_never(objective)
    return [
        *([plain] if problem.is_plain else []),
        *(general if n_states <= MOST_STATES else []),
        "integer program",
    ]


def _passes_the_same(problem: Problem) -> bool:
    """Tell whether what is passed once is the same for every split."""
    costs = problem.costs
    return len(costs.types) == 1 and not any(costs.send) and not any(costs.give_back)


def _plain(problem: Problem, objective: TimeObjective, method: str) -> Split:
    if objective == "bottleneck":
        solve = solve_bottleneck
    elif objective == "makespan":
        solve = solve_makespan_always if problem.checkpoint == "always" else solve_makespan
    else:
        assert_never(objective)
    bounds, value, lower_bound = solve(problem)
    numbers = problem.to_time(value), problem.to_time(lower_bound)
    order = tuple(range(problem.n_partitions))
    return Split(bounds, *numbers, method, problem.modes or (), order)


def solve_levels(method: str, levels: Levels, deadline: Deadline = NO_DEADLINE) -> BestPath | None:
    """Run one of the general algorithms; None if there is no split."""
    search, problem = Search(levels), levels.problem
    repeats = problem.chunks - 1
    if method == "box search":
        return least_makespan(search, repeats, deadline)
    if method == "set bisection":
        return least_bottleneck(search, deadline)
    found = least_sum(search, repeated=repeats > 0)
    if found is None:
        return None
    sums = problem.costs.types[0]
    value = sums.forward[-1] + sums.backward[-1] + repeats * found[0]
    return BestPath(value, value, found[1])


def split_of(path: Path, value: float, lower_bound: float, method: str) -> Split:
    return Split(path.bounds, value, min(lower_bound, value), method, path.modes, path.order)
