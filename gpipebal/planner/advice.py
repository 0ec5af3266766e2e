"""Why no plan fits, and what would: advice that names a value is tried before it is given."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from gpipebal.errors import BalanceError, InfeasibleError, ProfileError
from gpipebal.plan import Plan
from gpipebal.planner.devices import DeviceCosts
from gpipebal.planner.posing import Posed, pose
from gpipebal.planner.question import Question
from gpipebal.planner.shortage import (
    about_waiting,
    is_found,
    least_with_waiting,
    limit_as_given,
    named_layers,
    shortage_of,
    to_explain,
)
from gpipebal.planner.times import order_for
from gpipebal.problem import Device, Rules
from gpipebal.problem.chunking import chunk_candidates
from gpipebal.solvers import find
from gpipebal.solvers.deadline import NO_DEADLINE, Deadline
from gpipebal.solvers.dispatch import check_method
from gpipebal.solvers.infeasible import no_split_by_rules
from gpipebal.solvers.sets.levels import in_order_if_large
from gpipebal.solvers.sets.peak import worst_lack
from gpipebal.units import format_bytes

__all__ = ["explain", "has_plan", "with_more"]

#: Most partitions that are advised, as a multiple of the number that was asked for.
_MOST_TIMES = 4


#: What keeps tied parameters possible where their layers are not in one partition.
_TIED = " (partitions that share a parameter may be on one device; or untie it)"

#: Place of more memory among the changes that help.
_MEMORY = 4

#: What a loss inside the pipeline takes besides another plan.
_STEP = " (and train with pipe.step)"


def explain(all_posed: Sequence[Posed]) -> InfeasibleError:
    """Say which partition lacks how much memory, and what would help.

    Args:
        all_posed: A question without an answer, at each number of micro-batches.

    Returns:
        An error whose text names the partition that lacks most, in the split that lacks least,
        and changes of the arguments of `solve` with which it does find a plan. When the question's
        time limit has passed once more, no further change is tried, except for more memory.

    Complexity:
        That of the least shortage, and a search for each thing that might help.
    """
    question = all_posed[0].question
    question = replace(question, deadline=Deadline(question.time_limit))
    if question.cost is not None:
        return InfeasibleError(
            "no split is allowed: cost is None or infinite for a partition of every split, or "
            f"limits and rules forbid it (expected {question.n_partitions} runs that are allowed)."
            "\nFix: another number of partitions, or allow more runs."
        )
    shortages = [(shortage_of(posed), k) for k, posed in enumerate(all_posed)]
    known = [(short[0], k, short[1]) for short, k in shortages if short is not None]
    if not known:
        return _without_shortage(all_posed[0], question)
    lack, k, path = min(known, key=lambda one: one[:2])
    posed = all_posed[k]
    worst = worst_lack(to_explain(posed), path)
    waits, known_plan = about_waiting(posed, lack), None
    if waits:
        # So much may never wait: of few splits it is known how much may wait in them.
        tried = [(*one, at) for at in all_posed if (one := least_with_waiting(at)) is not None]
        least, plan, at = min(tried, key=lambda one: one[0].peak, default=(worst, None, posed))
        if least.peak - least.limit < lack:
            worst, posed, lack, known_plan = least, at, least.peak - least.limit, plan
            waits = about_waiting(posed, lack)
    j, device, limit, peak, start, end = worst
    helps, given = _helps(question, lack, known_plan), limit_as_given(question, device, limit)
    needs = "may need" if waits else "needs"
    return InfeasibleError(
        f"partition {j} does not fit its device: memory_limit={given} "
        f"(expected {format_bytes(lack)} more). The closest split gives it "
        f"{named_layers(posed.profile.names, start, end)}: it {needs} {format_bytes(peak)}, and "
        f"{format_bytes(limit)} may be used.{waits}\nFix: {'; or '.join(helps)}.",
        partition=j,
        shortage=lack,
    )


def _helps(question: Question, lack: int, plan: Plan | None) -> list[str]:
    """List changes that help against a lack of memory, which is that of a plan if one is known."""
    ways = (_other_modes, _loss_by_micro_batch, _more_chunks, _more_partitions)
    # More memory first, and whatever the time: all that has to be known for that is known already.
    groups = [
        (_MEMORY, _more_memory(replace(question, deadline=NO_DEADLINE), lack)),
        *((k, way(question)) for k, way in enumerate(ways)),
    ]
    found = _tried([*groups, (5, _looser(question))], question, _several(question), plan)
    return found or ["a smaller model, or fewer rows in a mini-batch"]


def _tried(
    groups: Iterable[tuple[int, Iterator[tuple[str, Question]]]],
    question: Question,
    several: Iterable[tuple[str, Question]] = (),
    plan: Plan | None = None,
) -> list[str]:
    """List the changes that help, as far as there is time to try them.

    Args:
        groups: Changes in the order in which they are tried, with their place among all.
        question: The question, which knows when time is up.
        several: What is tried where no change of these helps, other than more memory.
        plan: One that may fit with more memory.
    """
    found = list[tuple[int, str]]()
    is_late = False
    try:
        for place, changes in groups:
            for text, other in changes:
                if has_plan(other) or (place == _MEMORY and is_found(other, plan)):
                    found.append((place, text))
        if all(place == _MEMORY for place, _ in found):
            found += [(_MEMORY - 1, text) for text, _ in several]
    except _OutOfTimeError:
        is_late = True
    helps = [text for _, text in sorted(found, key=lambda one: one[0])]
    if is_late:
        helps.append(_more_time(question, "what else helps" if helps else "what helps"))
    return helps


def _more_time(question: Question, what: str) -> str:
    return f"more time to see {what} (time_limit={question.time_limit:g} was given)"


def _without_shortage(posed: Posed, question: Question) -> InfeasibleError:
    """Say which rules leave no split, by the arguments of `solve`."""
    what = no_split_by_rules(posed.problem)
    helps = _tried([(0, _looser(question)), (1, _fewer_partitions(question))], question)
    if not helps:
        try:
            helps = [_without_rules(posed, question)]
        except _OutOfTimeError:
            helps = [_more_time(question, "what helps")]
    return InfeasibleError(f"{what}\nFix: {'; or '.join(helps)}.")


def _without_rules(posed: Posed, question: Question) -> str:
    """Say what helps where no rule is the only obstacle."""
    rules = question.rules
    assert rules is not None
    text = "without " + " and ".join(name for name, _ in rules.looser())
    free = replace(question, rules=None)
    if has_plan(free):
        return text
    short = shortage_of(pose(free, posed.chunks))
    more = () if short is None else _more_memory(free, short[0])
    for limit, other in more:
        if has_plan(other):
            return f"{text}, and {limit}"
    return "fewer partitions, or a smaller model"


class _OutOfTimeError(Exception):
    """No more advice is looked for."""


def has_plan(question: Question) -> bool:
    """Whether a changed question has a plan, however much may wait for other partitions."""
    for chunks in question.chunks or (None,):
        if question.deadline.is_up:
            raise _OutOfTimeError
        try:
            posed = pose(question, chunks)
            problem = posed.cautious if posed.problem.is_limited else posed.problem
            if question.schedule != "gpipe":
                order_for(question.schedule, question.n_partitions, posed.chunks, "never")
            if not question.is_searched:
                check_method(problem, question.objective, question.method)
            if find(in_order_if_large(problem), "bottleneck") is not None:
                return True
        except (BalanceError, ProfileError):
            continue
    return False


# Changes that might help, each with what the caller has to write.


def _other_modes(question: Question) -> Iterator[tuple[str, Question]]:
    for mode in ("auto", "except_last", "always", "never"):
        if mode == question.checkpoint:
            continue
        changed = replace(question, checkpoint=mode)
        if mode == "auto" and question.method == "auto" and not has_plan(changed):
            return  # then no single mode helps
        yield f"checkpoint={mode!r}", changed


def _loss_by_micro_batch(question: Question) -> Iterator[tuple[str, Question]]:
    """Compute the loss inside, so that the outputs of all micro-batches never exist together."""
    if question.loss_inside:
        return
    inside = replace(question, loss_inside=True)
    yield f"loss_inside=True{_STEP}", inside
    if question.checkpoint != "auto" and not has_plan(inside):
        yield f"loss_inside=True, checkpoint='auto'{_STEP}", replace(inside, checkpoint="auto")


def _looser(question: Question) -> Iterator[tuple[str, Question]]:
    """Drop one rule, or loosen it as little as possible."""
    if question.rules is None:
        return

    def works(rules: Rules) -> bool:
        return has_plan(replace(question, rules=rules))

    for name, words, rules in question.rules.loosened(question.profile.n_layers, works):
        tied = name == "keep_together" and bool(question.profile.ties)
        yield f"{words}{_TIED * tied}", replace(question, rules=rules)


def _fewer_partitions(question: Question) -> Iterator[tuple[str, Question]]:
    """Find the most partitions, fewer than were asked for, that rules leave a split into."""
    if question.devices is None and not isinstance(question.limits, tuple):
        most = (question.rules or Rules()).most_partitions(question.profile.n_layers)
        for n in range(min(question.n_partitions - 1, most), 0, -1):
            fewer = replace(question, n_partitions=n)
            if isinstance(question.checkpoint, str) and has_plan(fewer):
                yield f"partitions={n}", fewer
                return


def _more_chunks(question: Question) -> Iterator[tuple[str, Question]]:
    """Find the fewest micro-batches with which something fits."""
    candidates = _larger_counts(question)
    for also, changed in _also_in_any_mode(question):
        for chunks in candidates:
            more = replace(changed, chunks=(chunks,))
            if has_plan(more):
                yield f"chunks={chunks}{also}", more
                return


def _also_in_any_mode(question: Question) -> Iterator[tuple[str, Question]]:
    """Yield the question itself and, if modes are given, with open ones; and how to write that."""
    yield "", question
    if question.checkpoint != "auto":
        yield ", checkpoint='auto'", replace(question, checkpoint="auto")


def _larger_counts(question: Question) -> list[int]:
    """List more micro-batches than were asked for, in ascending order."""
    if not question.profile.other_sizes:
        return []
    most = max(question.chunks or (question.profile.chunks,))
    try:
        return sorted(m for m in chunk_candidates(question.profile) if m > most)
    except (BalanceError, ProfileError):
        return []


def _more_partitions(question: Question) -> Iterator[tuple[str, Question]]:
    """Find the fewest partitions with which something fits, on devices like those there are."""
    rules = question.rules or Rules()
    alike = question.devices is None and not isinstance(question.limits, tuple)
    if rules.pinned or not alike:
        return
    n = question.n_partitions
    last = min(rules.most_partitions(question.profile.n_layers), _MOST_TIMES * n)
    for also, changed in _also_in_any_mode(question):
        low, high = n, last
        # A mode for each partition says nothing of others.
        one_for_all = isinstance(changed.checkpoint, str)
        if high <= low or not (one_for_all and has_plan(replace(changed, n_partitions=high))):
            continue
        # Not every device more helps, but the number that is found has been tried.
        while high - low > 1:
            middle = (low + high) // 2
            if has_plan(replace(changed, n_partitions=middle)):
                high = middle
            else:
                low = middle
        yield f"partitions={high}{also}", replace(changed, n_partitions=high)
        return


def _several(question: Question) -> Iterator[tuple[str, Question]]:
    """Find the first of several changes together that helps, from the mildest to the strongest."""
    changes = list(_milder(question))
    harder = [
        (words, other, more)
        for more in (_more_partitions, _more_chunks, _more_of_both)
        for words, other in changes
    ]
    for words, other in changes:
        if words and has_plan(other):
            yield _together(question, words, other), other
            return
    for words, other, more in harder:
        for text, changed in more(other):
            yield _together(question, (*words, text), changed), changed
            return


def _milder(question: Question) -> Iterator[tuple[tuple[str, ...], Question]]:
    """Yield what needs neither more devices nor other micro-batches, each with what is before."""
    words: tuple[str, ...] = ()
    if question.checkpoint != "auto":
        words, question = ("checkpoint='auto'",), replace(question, checkpoint="auto")
    if not question.loss_inside:
        words, question = (*words, "loss_inside=True"), replace(question, loss_inside=True)
    yield words, question
    if question.schedule == "gpipe" and question.method == "auto":
        yield (*words, "schedule='1f1b'"), replace(question, schedule="1f1b")


def _together(question: Question, words: Sequence[str], changed: Question) -> str:
    """Write several changes as one piece of advice."""
    needs_step = changed.loss_inside and not question.loss_inside
    return ", ".join(words) + (_STEP if needs_step else "")


def _more_of_both(question: Question) -> Iterator[tuple[str, Question]]:
    """Find the fewest partitions with which the most micro-batches fit."""
    for chunks in _larger_counts(question)[-1:]:
        for text, changed in _more_partitions(replace(question, chunks=(chunks,))):
            yield f"chunks={chunks}, {text}", changed


def _more_memory(question: Question, lack: int) -> Iterator[tuple[str, Question]]:
    limits = question.limits
    larger: list[tuple[str, Question]] = []
    if isinstance(limits, int):
        reserve = question.reserve_of(limits)
        if reserve >= lack:
            yield f"reserve={reserve - lack}", replace(question, reserve=reserve - lack)
        more = with_more(question, limits, lack)
        larger.append((f"memory_limit={more}", replace(question, limits=more)))
    elif limits is not None:
        more_each = tuple(None if one is None else with_more(question, one, lack) for one in limits)
        larger.append((f"memory_limit={list(more_each)}", replace(question, limits=more_each)))
    devices = _with_more_of_their_own(question.devices, lack)
    if devices is not None:
        own = [getattr(device, "memory_limit", None) for device in devices]
        text = f"devices with memory_limit={own}, in their order"
        larger.append((text, replace(question, devices=devices)))
    yield from larger
    if len(larger) == 2 and not any(has_plan(one) for _, one in larger):
        # Of two limits the lower one counts: both are too low.
        texts = [text for text, _ in larger]
        yield " and ".join(texts), replace(larger[0][1], devices=devices)


def _with_more_of_their_own(
    devices: tuple[DeviceCosts, ...] | None, lack: int
) -> tuple[DeviceCosts, ...] | None:
    """Give this much more to devices that have a limit of their own; None if none can have it."""
    try:
        found = tuple(
            replace(device, memory_limit=device.memory_limit + lack)
            if isinstance(device, Device) and device.memory_limit is not None
            else device
            for device in devices or ()
        )
    except BalanceError:
        return None  # more than any device has
    return None if found == (devices or ()) else found


def with_more(question: Question, limit: int, lack: int) -> int:
    """Return a memory limit that leaves `lack` bytes more once the reserve is subtracted."""
    needed = limit - question.reserve_of(limit) + lack
    while limit - question.reserve_of(limit) < needed:
        limit += needed - (limit - question.reserve_of(limit))
    return limit
