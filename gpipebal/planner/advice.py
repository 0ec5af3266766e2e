"""Why no plan fits, and what would: every piece of advice is tried before it is given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gpipebal.errors import BalanceError, InfeasibleError, ProfileError
from gpipebal.planner.chunking import chunk_candidates
from gpipebal.planner.posing import Posed, pose
from gpipebal.planner.question import Question
from gpipebal.problem import Problem
from gpipebal.solvers import explain_infeasible, find
from gpipebal.solvers.levels import MOST_STATES, Levels, count_states, memory_limits
from gpipebal.solvers.peak import least_shortage, peaks_of
from gpipebal.units import format_bytes

__all__ = ["explain"]

#: Most partitions that are advised, as a multiple of those that were asked for.
_MOST_TIMES = 4


def explain(posed: Posed) -> InfeasibleError:
    """Say which partition lacks how much memory, and what would help.

    Args:
        posed: A question without an answer, at one number of micro-batches.

    Returns:
        An error whose text names the partition that lacks most, in the split that lacks least,
        and changes of the arguments of `solve` with which it has been seen to find a plan.

    Complexity:
        That of the least shortage, and a search for each thing that might help.
    """
    question = posed.question
    if question.cost is not None:
        return InfeasibleError(
            "no split is allowed: cost is None or infinite for a partition of every split, or "
            f"limits and rules forbid it (expected {question.n_partitions} runs that are allowed)."
            "\nFix: another number of partitions, or allow more runs."
        )
    problem = posed.cautious if posed.is_limited else posed.problem
    problem = replace(problem, any_order=False) if _is_large(problem) else problem
    short = least_shortage(problem) if posed.is_limited else None
    if short is None or short[0] <= 0:
        return _without_shortage(posed, short is not None)
    lack, path = short
    peaks = peaks_of(problem, path)
    limits = memory_limits(problem)
    order = Levels(problem).devices_of(path.groups)
    lacks = [
        -1 if (limit := limits[device]) is None else peak - limit
        for device, peak in zip(order, peaks, strict=True)
    ]
    j = lacks.index(max(lacks))
    device = order[j]
    limit = limits[device]
    assert limit is not None
    start, end = path.bounds[j : j + 2]
    names = posed.profile.names
    run = names[start] if end - start == 1 else f"{names[start]} .. {names[end - 1]}"
    helps = [text for text, other in _changes(question, lack) if _has_plan(other)]
    if not helps:
        helps = ["a smaller model, or fewer rows in a mini-batch"]
    return InfeasibleError(
        f"partition {j} does not fit its device: memory_limit={_given(question, device, limit)} "
        f"(expected {format_bytes(lack)} more, in the split that lacks least: layers {start} to "
        f"{end - 1}, {run}, need {format_bytes(peaks[j])}, and {format_bytes(limit)} may be used)."
        f"\nFix: {'; or '.join(helps)}.",
        partition=j,
        shortage=lack,
    )


def _is_large(problem: Problem) -> bool:
    return count_states(problem) > MOST_STATES


def _given(question: Question, device: int, limit: int) -> int:
    """Return the limit as it was given, with the reserve."""
    limits = question.limits
    of_device = limits[device] if isinstance(limits, tuple) else limits
    return limit if of_device is None else of_device


def _without_shortage(posed: Posed, waits: bool) -> InfeasibleError:
    if not waits:
        return explain_infeasible(posed.problem)
    # Everything fits with the most that can wait, so a plan was found: not reached.
    return InfeasibleError(
        "no plan was found: memory_limit is kept by some split only for some clocks (expected a "
        "larger limit).\nFix: checkpoint='auto', or a little more memory."
    )


def _has_plan(question: Question) -> bool:
    """Whether a changed question has a plan, whatever waits for busy neighbours."""
    for chunks in question.chunks or (None,):
        try:
            posed = pose(question, chunks)
            problem = posed.cautious if posed.is_limited else posed.problem
            if _is_large(problem):
                problem = replace(problem, any_order=False)
            if find(problem, "bottleneck") is not None:
                return True
        except (BalanceError, ProfileError):
            continue
    return False


def _changes(question: Question, lack: int) -> Iterator[tuple[str, Question]]:
    """Think of changes that might help, by what the caller has to write."""
    for mode in ("auto", "except_last", "always", "never"):
        if mode != question.checkpoint:
            yield f"checkpoint={mode!r}", replace(question, checkpoint=mode)
    yield from _more_chunks(question)
    yield from _more_partitions(question)
    yield from _more_memory(question, lack)
    rules = question.rules
    if rules is not None:
        looser = {
            "no_cut": replace(rules, no_cut=()),
            "keep_together": replace(rules, keep_together=()),
            "pin": replace(rules, pin=()),
            "max_layers": replace(rules, max_layers=None),
        }
        for name, fewer in looser.items():
            if fewer != rules:
                yield f"without {name}", replace(question, rules=fewer)


def _more_chunks(question: Question) -> Iterator[tuple[str, Question]]:
    """Find the fewest micro-batches with which something fits."""
    if not question.profile.other_sizes:
        return
    most = max(question.chunks or (question.profile.chunks,))
    try:
        candidates = [m for m in chunk_candidates(question.profile) if m > most]
    except (BalanceError, ProfileError):
        return
    for checkpoint in (question.checkpoint, "auto"):
        for chunks in candidates:
            changed = replace(question, chunks=(chunks,), checkpoint=checkpoint)
            if _has_plan(changed):
                mode = "" if checkpoint == question.checkpoint else ", checkpoint='auto'"
                yield f"chunks={chunks}{mode}", changed
                return


def _more_partitions(question: Question) -> Iterator[tuple[str, Question]]:
    """Find the fewest partitions with which something fits, on devices like those there are."""
    pinned = question.rules is not None and question.rules.pin
    alike = question.devices is None and not isinstance(question.limits, tuple)
    if pinned or not alike:
        return
    n = question.n_partitions
    last = min(question.profile.n_layers, _MOST_TIMES * n)
    checkpoints: Sequence[object] = ("auto",)
    if isinstance(question.checkpoint, str):
        checkpoints = dict.fromkeys((question.checkpoint, "auto"))  # type: ignore[assignment]
    for checkpoint in checkpoints:
        low, high = n, last
        changed = replace(question, checkpoint=checkpoint)  # type: ignore[arg-type]
        if high <= low or not _has_plan(replace(changed, n_partitions=high)):
            continue
        # More devices need not help at every step, but what is found has been tried.
        while high - low > 1:
            middle = (low + high) // 2
            if _has_plan(replace(changed, n_partitions=middle)):
                high = middle
            else:
                low = middle
        mode = "" if checkpoint == question.checkpoint else ", checkpoint='auto'"
        yield f"partitions={high}{mode}", replace(changed, n_partitions=high)
        return


def _more_memory(question: Question, lack: int) -> Iterator[tuple[str, Question]]:
    limits = question.limits
    if isinstance(limits, int):
        reserve = question.reserve_of(limits)
        if reserve >= lack:
            yield f"reserve={reserve - lack}", replace(question, reserve=reserve - lack)
        more = _with_more(question, limits, lack)
        yield f"memory_limit={more}", replace(question, limits=more)
    elif limits is not None:
        more_each = tuple(
            None if one is None else _with_more(question, one, lack) for one in limits
        )
        yield f"memory_limit={list(more_each)}", replace(question, limits=more_each)


def _with_more(question: Question, limit: int, lack: int) -> int:
    needed = limit - question.reserve_of(limit) + lack
    while limit - question.reserve_of(limit) < needed:
        limit += needed - (limit - question.reserve_of(limit))
    return limit
