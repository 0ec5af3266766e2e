"""Why no split exists, and what would make one exist: every piece of advice is tried first."""

from __future__ import annotations

from dataclasses import replace

from gpipebal.argument_kinds import check_kind
from gpipebal.errors import InfeasibleError
from gpipebal.problem import Problem, Rules
from gpipebal.solvers.sets.levels import Levels, in_order_if_large
from gpipebal.solvers.sets.peak import least_shortage, worst_lack
from gpipebal.solvers.sets.reachability import Search
from gpipebal.units import count, format_bytes

__all__ = ["explain_infeasible", "no_split_by_rules"]


def explain_infeasible(problem: Problem) -> InfeasibleError:
    """Say why a problem has no split, and what would help.

    Returns:
        An error that names the partition that lacks memory, and how much, in the split whose worst
        partition lacks least; and changes of the request with which there is a split.

    Complexity:
        That of `least_shortage`, and one probe for each thing that might help.

    Example:
        >>> from gpipebal.problem import Device, layer_memory
        >>> memory = layer_memory([0, 0], [10, 20], [1, 1], chunks=4)
        >>> devices = [Device(memory_limit=30), Device(memory_limit=30)]
        >>> print(
        ...     explain_infeasible(Problem([1, 1], [1, 1], [1, 1], 2, 4, "never", devices,
        ...                                memory=memory))
        ... )
        partition 1 does not fit its device: memory_limit=30 (expected 80 or more, in the split that lacks least: layers 1 to 1 need 80 B, the limit is 30 B).
        Fix: checkpoint='auto'; or checkpoint='except_last'; or checkpoint='always'; or 50 B more on every device (memory_limit=80).
    """  # noqa: E501
    check_kind("problem", problem, Problem, "problem = Problem(forward, backward, recompute, n)")
    problem = in_order_if_large(problem)
    short = least_shortage(problem) if problem.is_limited else None
    helps = [name for name, other in _changes(problem) if _has_split(other)]
    if short is None and _is_due_to_memory(problem):
        helps = helps if problem.is_limited else []  # what was tried counts no memory then
        return InfeasibleError(
            f"memory leaves no split into {count(problem.n_partitions, 'partition')}: each has a "
            "run that its rows leave out, as fitting no device (expected all runs of a split).\n"
            f"Fix: {'; or '.join(helps or ['another number of partitions', 'longer rows'])}."
        )
    if short is None:
        if not helps:
            without = replace(problem, rules=None)
            helps = ["rules=None" if _has_split(without) else "fewer partitions"]
        return InfeasibleError(f"{no_split_by_rules(problem)}\nFix: {'; or '.join(helps)}.")
    lack, path = short
    j, _, limit, peak, start, end = worst_lack(problem, path)
    if len(set(problem.limits)) == 1:
        helps.append(f"{format_bytes(lack)} more on every device (memory_limit={limit + lack})")
    else:
        # What is written may be less than what is lacking.
        exactly = "" if lack < 1024 else f" (+{lack} bytes)"
        helps.append(f"{format_bytes(lack)}{exactly} more on every device")
    return InfeasibleError(
        f"partition {j} does not fit its device: memory_limit={limit} (expected {peak} or "
        f"more, in the split that lacks least: layers {start} to {end - 1} need "
        f"{format_bytes(peak)}, the limit is {format_bytes(limit)}).\n"
        f"Fix: {'; or '.join(helps)}.",
        partition=j,
        shortage=lack,
    )


def no_split_by_rules(problem: Problem) -> str:
    """Say that rules leave no split, and which rules."""
    what = ", ".join((problem.rules or Rules()).stated())
    return (
        f"rules leave no split into {count(problem.n_partitions, 'partition')}: {what} "
        f"(expected a split of {problem.n_layers} layers that keeps them)."
    )


def _is_due_to_memory(problem: Problem) -> bool:
    """Tell whether rows of memory leave out every split, whatever the limits and the rules are."""
    if problem.is_limited:
        return least_shortage(replace(problem, rules=None)) is None
    # Without a limit memory counts only if its peak is what is minimised.
    return _has_split(problem)


def _changes(problem: Problem) -> list[tuple[str, Problem]]:
    """List changes that might help, each with what the caller has to write."""
    changes = list[tuple[str, Problem]]()
    if problem.memory is not None and problem.is_limited:
        for mode in ("auto", "except_last", "always", "never"):
            if mode != problem.checkpoint:
                changed = replace(problem, checkpoint=mode)
                changes.append((f"checkpoint={mode!r}", changed))
        alike = problem.memory.alike == "all" and len(set(problem.devices or ())) == 1
        one_mode = isinstance(problem.checkpoint, str)
        if alike and one_mode and not (problem.rules and problem.rules.pinned):
            assert problem.devices is not None
            for n in range(problem.n_partitions + 1, problem.n_layers + 1):
                devices = (problem.devices[0],) * n
                more = replace(problem, n_partitions=n, devices=devices)
                if _has_split(more):
                    changes.append((f"{n} partitions", more))
                    break
                if n > 4 * problem.n_partitions:
                    break
    if problem.rules is not None:
        changes += [
            (words, replace(problem, rules=rules))
            for _, words, rules in problem.rules.loosened(
                problem.n_layers, lambda rules: _has_split(replace(problem, rules=rules))
            )
        ]
    return changes


def _has_split(problem: Problem) -> bool:
    return Search(Levels(in_order_if_large(problem))).probe({}) is not None
