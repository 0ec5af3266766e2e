"""Why no plan fits, and what would: advice that names a value is tried before it is given."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from gpipebal.errors import BalanceError, InfeasibleError, ProfileError
from gpipebal.plan.text import layer_range
from gpipebal.planner.devices import DeviceCosts
from gpipebal.planner.posing import Posed, pose
from gpipebal.planner.question import Question
from gpipebal.planner.search.all_ways import all_ways
from gpipebal.planner.search.best import MOST_WAYS
from gpipebal.planner.times import order_for
from gpipebal.problem import Device, Problem, Rules
from gpipebal.problem.chunking import chunk_candidates
from gpipebal.solvers import find
from gpipebal.solvers.dispatch import check_method
from gpipebal.solvers.infeasible import no_split_by_rules
from gpipebal.solvers.sets.levels import in_order_if_large
from gpipebal.solvers.sets.peak import least_shortage, worst_lack
from gpipebal.solvers.sets.reachability import Path
from gpipebal.units import format_bytes

__all__ = ["explain", "has_plan", "named_layers", "with_more"]

#: Most partitions that are advised, as a multiple of the number that was asked for.
_MOST_TIMES = 4


#: What keeps tied parameters possible where their layers are not in one partition.
_TIED = " (partitions that share a parameter may be on one device; or untie it)"

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
    seconds = question.time_limit
    question = replace(question, until=None if seconds is None else time.monotonic() + seconds)
    if question.cost is not None:
        return InfeasibleError(
            "no split is allowed: cost is None or infinite for a partition of every split, or "
            f"limits and rules forbid it (expected {question.n_partitions} runs that are allowed)."
            "\nFix: another number of partitions, or allow more runs."
        )
    shortages = [(_shortage(posed), k) for k, posed in enumerate(all_posed)]
    known = [(short[0], k, short[1]) for short, k in shortages if short is not None]
    if not known:
        return _without_shortage(all_posed[0], question)
    lack, k, path = min(known, key=lambda one: one[:2])
    posed = all_posed[k]
    j, device, limit, peak, start, end = worst_lack(_to_explain(posed), path)
    helps = _helps(question, lack)
    waits = _about_waiting(posed, lack)
    return InfeasibleError(
        f"partition {j} does not fit its device: memory_limit={_given(question, device, limit)} "
        f"(expected {format_bytes(lack)} more). The closest split gives it "
        f"{named_layers(posed.profile.names, start, end)}: it needs {format_bytes(peak)}, and "
        f"{format_bytes(limit)} may be used.{waits}\nFix: {'; or '.join(helps)}.",
        partition=j,
        shortage=lack,
    )


def _helps(question: Question, lack: int) -> list[str]:
    """List changes that help against a lack of memory."""
    ways = (_other_modes, _loss_by_micro_batch, _more_chunks, _more_partitions)
    # More memory first, and whatever the time: all that has to be known for that is known already.
    groups = [
        (4, _more_memory(replace(question, until=None), lack)),
        *((k, way(question)) for k, way in enumerate(ways)),
    ]
    found = _tried([*groups, (5, _looser(question))], question)
    return found or ["a smaller model, or fewer rows in a mini-batch"]


def _tried(
    groups: Iterable[tuple[int, Iterator[tuple[str, Question]]]], question: Question
) -> list[str]:
    """List the changes that help, as far as there is time to try them.

    Args:
        groups: Changes in the order in which they are tried, with their place among all.
        question: The question, which knows when time is up.
    """
    found = list[tuple[int, str]]()
    is_late = False
    try:
        for place, changes in groups:
            for text, other in changes:
                if has_plan(other):
                    found.append((place, text))
    except _OutOfTimeError:
        is_late = True
    helps = [text for _, text in sorted(found, key=lambda one: one[0])]
    if is_late:
        helps.append(_more_time(question, "what else helps" if helps else "what helps"))
    return helps


def _more_time(question: Question, what: str) -> str:
    return f"more time to see {what} (time_limit={question.time_limit:g} was given)"


def named_layers(names: Sequence[str], start: int, end: int) -> str:
    """Say which layers of the chain these are; names that are only numbers say nothing more.

    Example:
        >>> named_layers(["a", "b", "c"], 0, 2), named_layers(["0", "1", "2"], 2, 3)
        ('layers 0 to 1 (a .. b)', 'layer 2')
    """
    numbers = f"layer {start}" if end - start == 1 else f"layers {start} to {end - 1}"
    if list(names[start:end]) == [str(k) for k in range(start, end)]:
        return numbers
    return f"{numbers} ({layer_range(names[start:end])})"


def _about_waiting(posed: Posed, lack: int) -> str:
    """Say how much of a shortage is only due to what may wait for busy neighbours."""
    without = least_shortage(in_order_if_large(posed.problem))
    if without is None or without[0] >= lack:
        return ""
    text = " Without values that may have to wait for busy neighbours"
    if without[0] > 0:
        least = format_bytes(without[0])
        return f"{text} it would lack {least}; how many wait depends on timing."
    # What waits depends on timing; of many plans, not all that might fit by their own are tried,
    # and other ones if there is time.
    seconds = posed.question.time_limit
    if all_ways(posed, MOST_WAYS) is None:
        tried = "those tried" if seconds is None else f"those tried within time_limit={seconds:g}"
        return f"{text} some splits fit, but none of {tried} does with what waits in its steps."
    return f"{text} some splits fit, but none does with what waits in its own steps."


def _to_explain(posed: Posed) -> Problem:
    return in_order_if_large(posed.cautious if posed.problem.is_limited else posed.problem)


def _shortage(posed: Posed) -> tuple[int, Path] | None:
    """Return the least that is lacking, with its split; None if no memory would help."""
    return least_shortage(_to_explain(posed)) if posed.problem.is_limited else None


def _given(question: Question, device: int, limit: int) -> int:
    """Return the limit as it was given, with the reserve; the limit of a `Device` has none."""
    limits = question.limits
    of_device = limits[device] if isinstance(limits, tuple) else limits
    if of_device is None or of_device - question.reserve_of(of_device) != limit:
        return limit
    return of_device


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
    short = _shortage(pose(free, posed.chunks))
    more = () if short is None else _more_memory(free, short[0])
    for limit, other in more:
        if has_plan(other):
            return f"{text}, and {limit}"
    return "fewer partitions, or a smaller model"


class _OutOfTimeError(Exception):
    """No more advice is looked for."""


def _is_late(question: Question) -> bool:
    return question.until is not None and time.monotonic() > question.until


def has_plan(question: Question) -> bool:
    """Whether a changed question has a plan, whatever waits for busy neighbours."""
    for chunks in question.chunks or (None,):
        if _is_late(question):
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
    if not question.profile.other_sizes:
        return
    most = max(question.chunks or (question.profile.chunks,))
    try:
        candidates = [m for m in chunk_candidates(question.profile) if m > most]
    except (BalanceError, ProfileError):
        return
    for checkpoint in dict.fromkeys((question.checkpoint, "auto")):
        for chunks in candidates:
            changed = replace(question, chunks=(chunks,), checkpoint=checkpoint)
            if has_plan(changed):
                mode = "" if checkpoint == question.checkpoint else ", checkpoint='auto'"
                yield f"chunks={chunks}{mode}", changed
                return


def _more_partitions(question: Question) -> Iterator[tuple[str, Question]]:
    """Find the fewest partitions with which something fits, on devices like those there are."""
    rules = question.rules or Rules()
    alike = question.devices is None and not isinstance(question.limits, tuple)
    if rules.pinned or not alike:
        return
    n = question.n_partitions
    last = min(rules.most_partitions(question.profile.n_layers), _MOST_TIMES * n)
    checkpoints: Sequence[object] = ("auto",)
    if isinstance(question.checkpoint, str):
        checkpoints = dict.fromkeys((question.checkpoint, "auto"))  # type: ignore[assignment]
    for checkpoint in checkpoints:
        low, high = n, last
        changed = replace(question, checkpoint=checkpoint)  # type: ignore[arg-type]
        if high <= low or not has_plan(replace(changed, n_partitions=high)):
            continue
        # Not every device more helps, but the number that is found has been tried.
        while high - low > 1:
            middle = (low + high) // 2
            if has_plan(replace(changed, n_partitions=middle)):
                high = middle
            else:
                low = middle
        mode = "" if checkpoint == question.checkpoint else ", checkpoint='auto'"
        yield f"partitions={high}{mode}", replace(changed, n_partitions=high)
        return


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
