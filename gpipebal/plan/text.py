"""A plan in words: as a table, and explained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from gpipebal.objectives import MINIMISED
from gpipebal.schedule import SCHEDULES
from gpipebal.text import aligned, one_line
from gpipebal.units import count, format_bytes, format_percent, format_seconds

if TYPE_CHECKING:
    from gpipebal.plan.plan import Plan

__all__ = ["above_mean", "explanation", "format_value", "plan_text"]

#: A training step so many times as long as the makespan needs a word on what else takes time.
_FAR_ABOVE = 1.3
#: A rest that is a smaller fraction of the step, or of the peak memory, is not named.
_NEGLIGIBLE = 0.01


def plan_text(plan: Plan) -> str:
    """Write a plan as a headline, a table of its partitions, and what follows from it."""
    return f"{_headline(plan)}\n{_table(plan)}\n{_footer(plan)}"


def format_value(plan: Plan, value: float) -> str:
    """Write a value of the plan's objective, in its unit."""
    return MINIMISED[plan.objective].text_of(value)


def _headline(plan: Plan) -> str:
    proof = "proven optimal" if plan.status == "optimal" else f"within {format_percent(plan.gap)}"
    proof = "given" if plan.method == "given" else proof
    schedule = "" if plan.schedule == "gpipe" else f"schedule={plan.schedule!r}, "
    modes = set(plan.modes)
    checkpoint = f"checkpoint={modes.pop()!r}" if len(modes) == 1 else "checkpoint by partition"
    inside = "loss inside (train with pipe.step), " if _needs_step(plan) else ""
    return (
        f"{count(plan.n_layers, 'layer')} on {count(plan.n_partitions, 'partition')}, "
        f"{count(plan.chunks, 'micro-batch')} of {count(plan.rows, 'row')}, "
        f"{schedule}{inside}{checkpoint}: balance={plan.balance}, "
        f"{plan.objective} {format_value(plan, plan.value)} ({proof})"
    )


def _needs_step(plan: Plan) -> bool:
    """Tell whether the predictions are of `GPipe.step`; a schedule only torch runs has no such."""
    return plan.loss_inside and plan.schedule in SCHEDULES


def _table(plan: Plan) -> str:
    times = [plan.micro_batch_time(j) for j in range(plan.n_partitions)]
    total = sum(times) or 1.0
    mixed = len(set(plan.modes)) > 1
    limited = any(part.memory_limit is not None for part in plan.partitions)
    linked = any(_link_times(plan))
    moved = bool(plan.device_order) or plan.n_devices < plan.n_partitions
    header = ["partition", "layers", ""]
    header += ["device"] if moved else []
    header += ["checkpoint"] if mixed else []
    header += ["forward", "backward"]
    header += ["recompute"] if plan.has_recomputes else []
    header += ["transfers"] if linked else []
    header += [_memory_title(plan)]
    header += ["limit"] if limited else []
    header += ["share of work" if linked else "share"]
    rows = [header]
    for j, part in enumerate(plan.partitions):
        row = [str(j), str(len(part.layers)), layer_range(part.layers)]
        row += [str(plan.devices[j])] if moved else []
        row += [plan.modes[j]] if mixed else []
        row += [format_seconds(part.forward_time), format_seconds(part.backward_time)]
        if plan.has_recomputes:
            row += [format_seconds(part.recompute_time) if plan.recomputed[j] else "-"]
        row += [format_seconds(part.receive_time + part.return_time)] if linked else []
        row += [format_bytes(part.memory.total)]
        if limited:
            limit = "-" if part.memory_limit is None else format_bytes(part.memory_limit)
            row += [f"! {limit}" if j in _too_large(plan) else limit]
        row += [format_percent(times[j] / total)]
        rows.append(row)
    return "\n".join(aligned(rows, left=(2,)))


def _footer(plan: Plan) -> str:
    of_work = " without transfers" if any(_link_times(plan)) else ""
    parts = [
        f"makespan {format_seconds(plan.makespan)}",
        f"bubble {format_percent(plan.bubble_fraction)}",
        f"imbalance {plan.imbalance:.3f}{of_work}",
    ]
    if plan.step_time is not None:
        parts.insert(1, f"training step {format_seconds(plan.step_time)}")
    if plan.gain == 0:
        parts.append("as much as the split into equally many layers")
    elif plan.gain is not None:
        where = "below" if plan.gain >= 0 else "above"
        breaks = ", which breaks a limit or a rule" if _breaks(plan) else ""
        parts.append(
            f"{format_percent(abs(plan.gain))} {where} the split into equally many layers{breaks}"
        )
    lines = ["; ".join(parts)]
    if _too_large(plan):
        over = count(len(_too_large(plan)), "partition")
        verb = "needs" if len(_too_large(plan)) == 1 else "need"
        lines.append(f"! {over} of {plan.n_partitions} {verb} more memory than the limit allows.")
    lines += [*_step(plan), *_runs(plan)]
    lines += [f"Note: {one_line(note)}" for note in plan.notes]
    if not _knows_optimizer(plan):
        lines.append(_no_optimizer(plan))
    return "\n".join(lines)


def _step(plan: Plan) -> Iterator[str]:
    """Say why a step takes less than a part of it, or what takes much time besides that part."""
    if plan.step_time is None:
        return
    step = format_seconds(plan.step_time)
    if plan.step_time < plan.makespan and step != format_seconds(plan.makespan):
        yield (
            "The makespan, by which splits are compared, adds up times of layers by themselves; "
            f"the training step, {step}, is that of layers in a step, where these take less."
        )
    if plan.step_time >= _FAR_ABOVE * plan.makespan > 0:
        beside = {"loss and joining the outputs": plan.pause_time, "optimizer": plan.optimizer_time}
        rest = plan.step_time - plan.makespan - sum(time or 0.0 for time in beside.values())
        if rest > _NEGLIGIBLE * plan.step_time:
            others = ["loss"] if plan.loss_inside else []
            others += ["optimizer"] if plan.optimizer_time is None else []
            others += ["the way to the workers and back", "what actions take besides their layers"]
            others += ["forwards without a graph (if slower)"] * plan.has_recomputes
            beside[", ".join([*others[:-1], f"and {others[-1]}"])] = rest
        parts = [f"{what} {format_seconds(time)}" for what, time in beside.items() if time]
        yield (
            f"The training step, {step}, has more than the makespan, which is of the layers alone: "
            f"{'; '.join(parts)}."
        )


def _no_optimizer(plan: Plan) -> str:
    """Say why the optimizer's state is not counted; the profile has a flag if it was given."""
    flags = plan.provenance.get("flags")
    doubts = flags if isinstance(flags, (list, tuple)) else ()
    is_given = any(str(doubt).startswith("the optimizer's") for doubt in doubts)
    why = "it is not known" if is_given else "it was not given to the profiler"
    without = _without_optimizer(plan)
    where = "" if len(without) == plan.n_partitions else f" of {_partitions(without).lower()}"
    return f"Peak memory{where} does not count optimizer state: {why}."


def _knows_optimizer(plan: Plan) -> bool:
    return not _without_optimizer(plan)


def _without_optimizer(plan: Plan) -> list[int]:
    """List the partitions whose parameters have a state that is not known."""
    memory = [partition.memory for partition in plan.partitions]
    return [j for j, one in enumerate(memory) if one.parameters and one.optimizer is None]


def layer_range(names: Sequence[str]) -> str:
    """Name the first and the last layer of a run."""
    first, last = one_line(names[0]), one_line(names[-1])
    return first if len(names) == 1 else f"{first} .. {last}"


def explanation(plan: Plan) -> str:
    """Say in sentences what a plan is, why, how sure that is, and where it is tight."""
    sentences = [_what(plan), _proof(plan), _makespan(plan), _slowest(plan)]
    sentences += [*_loss(plan), *_step(plan), *_gain(plan), *_memory(plan), *_modes(plan)]
    sentences += [*_runs(plan), *_order(plan)]
    sentences += _moves(plan)
    sentences += map(one_line, plan.notes)
    return "\n".join(sentences)


def _runs(plan: Plan) -> Iterator[str]:
    """Say which layers are recomputed in runs."""
    if plan.runs:
        names = plan.names
        named = [layer_range(names[run.start : run.stop]) for run in plan.runs[:4]]
        more = len(plan.runs) - len(named)
        named += [f"and {more} more"] if more else []
        n_layers = sum(map(len, plan.runs))
        yield (
            f"Recomputed by themselves inside of partitions: {count(n_layers, 'layer')} in "
            f"{count(len(plan.runs), 'run')} ({', '.join(named)})."
        )


def _what(plan: Plan) -> str:
    runs = [
        f"partition {j} runs {count(len(part.layers), 'layer')}, {layer_range(part.layers)}"
        for j, part in enumerate(plan.partitions[:8])
    ]
    more = plan.n_partitions - len(runs)
    runs += [f"and {count(more, 'more partition')} the rest"] if more > 0 else []
    layers, partitions = count(plan.n_layers, "layer"), count(plan.n_partitions, "partition")
    chunks, rows = count(plan.chunks, "micro-batch"), count(plan.rows, "row")
    verb = "is" if plan.n_layers == 1 else "are"
    return (
        f"The {layers} {verb} cut into {partitions}: {'; '.join(runs)}. A mini-batch goes through "
        f"as {chunks} of at most {rows}."
    )


def _proof(plan: Plan) -> str:
    what = MINIMISED[plan.objective].meaning
    value = format_value(plan, plan.value)
    if plan.method == "given":
        return f"The balance was given; {what} is {value}."
    found = f"It makes {what} as small as possible: {value}"
    if plan.status == "optimal":
        return f"{found}. No other plan is better: {one_line(plan.method)} proves it."
    bound = format_value(plan, plan.lower_bound)
    return (
        f"It was chosen for {what}: {value}. No plan is below {bound}, so this one is at most "
        f"{format_percent(plan.gap)} from the best ({one_line(plan.method)})."
    )


def _makespan(plan: Plan) -> str:
    """Say how the makespan was found: only GPipe's has a closed form."""
    how = "a formula" if plan.schedule == "gpipe" else f"a simulation of {plan.schedule!r}"
    return f"The makespan, {format_seconds(plan.makespan)}, comes from {how}."


def _slowest(plan: Plan) -> str:
    """Name what `Plan.bottleneck` is the time of: a partition, or a link."""
    work = [plan.micro_batch_time(j) for j in range(plan.n_partitions)]
    links = _link_times(plan)
    copies = [0.0] * len(work)
    if not plan.overlaps:
        copies = [a + b for a, b in zip([0.0, *links], [*links, 0.0], strict=True)]
    times = [a + b for a, b in zip(work, copies, strict=True)]
    j, slow = times.index(max(times)), "partition"
    what = f"Partition {j} is the slowest, with {format_seconds(times[j])} for a micro-batch"
    if copies[j]:
        parts = f"{format_seconds(work[j])} of work and {format_seconds(copies[j])} of copies"
        what = f"{what} ({parts})"
    what = f"{what}, {above_mean(times):.2f} times the mean"
    if plan.overlaps and max(links, default=0.0) > times[j]:
        j, slow = links.index(max(links)), "link"
        what = (
            f"The link between partitions {j} and {j + 1} is the slowest, with "
            f"{format_seconds(links[j])} to copy a micro-batch there and its gradient back"
        )
    idle = "idle or copying" if any(links) else "idle"
    return (
        f"{what}. Devices are {idle} for {format_percent(plan.bubble_fraction)} of the time, while "
        f"the pipeline fills and drains or waits for the slowest {slow}."
    )


def _link_times(plan: Plan) -> list[float]:
    """Return the seconds to copy a micro-batch and its gradient, for each cut."""
    return [after.receive_time + before.return_time for before, after in pairwise(plan.partitions)]


def above_mean(times: Sequence[float]) -> float:
    """Return how many times the mean the largest time is; 1.0 if all are 0."""
    return max(times) * len(times) / sum(times) if sum(times) else 1.0


def _loss(plan: Plan) -> Iterator[str]:
    if _needs_step(plan):
        yield (
            "The last partition computes the loss of each micro-batch, as in training with "
            "pipe.step(x, target=y, loss_fn=loss_fn): a loss of pipe(x) may need more memory and "
            "take longer."
        )


def _gain(plan: Plan) -> list[str]:
    if plan.gain is None or plan.equal_split_value is None:
        return []
    equal = format_value(plan, plan.equal_split_value)
    if plan.gain < 0:
        but = ", but breaks a limit or a rule" if _breaks(plan) else ""
        return [f"Equally many layers in each partition would give {equal}, which is less{but}."]
    if plan.gain == 0:
        return [f"Equally many layers in each partition would give as much: {equal}."]
    return [
        f"Equally many layers in each partition would give {equal}: this plan is "
        f"{format_percent(plan.gain)} below."
    ]


def _breaks(plan: Plan) -> bool:
    """Tell whether equally many layers would be better than the best that is allowed."""
    equal = plan.equal_split_value
    return plan.method != "given" and equal is not None and equal < plan.lower_bound


def _memory_title(plan: Plan) -> str:
    """Name the memory that a plan tells: under a schedule that only torch runs, it is no peak."""
    return "model memory" if plan.peak_bytes is None else "peak memory"


def _too_large(plan: Plan) -> list[int]:
    """Return the partitions that exceed their limit, as a balance that was given may."""
    if plan.peak_bytes is None:
        return []
    limits = ((j, part.memory_limit) for j, part in enumerate(plan.partitions))
    return [j for j, most in limits if most is not None and plan.partitions[j].memory.total > most]


def _memory(plan: Plan) -> list[str]:
    peaks = [part.memory.total for part in plan.partitions]
    limits = [part.memory_limit for part in plan.partitions]
    limited = [j for j, limit in enumerate(limits) if limit is not None]
    j = max(limited or range(len(peaks)), key=lambda j: peaks[j] - (limits[j] or 0))
    if plan.peak_bytes is None:
        most = format_bytes(max(peaks))
        return [
            f"The model itself takes up to {most} of a partition; how much is needed at the peak "
            f"of {plan.schedule!r} is not predicted."
        ]
    text = f"Partition {j} needs {format_bytes(peaks[j])} at its peak"
    limit = limits[j]
    if limit is None:
        lines = [f"{text}, the most of all; no limit was given."]
    elif peaks[j] > limit:
        lacks = format_bytes(peaks[j] - limit)
        lines = [f"{text} and may use {format_bytes(limit)}: it lacks {lacks}, the most of all."]
    else:
        lines = [f"{text} and may use {format_bytes(limit)}: no other has less room."]
    if (waiting := plan.partitions[j].memory.waiting) > _NEGLIGIBLE * peaks[j]:
        lines.append(
            f"{format_bytes(waiting)} of that is for values that may have to wait for busy "
            "neighbours; a step in which fewer wait needs less."
        )
    return [*lines, *([] if _knows_optimizer(plan) else [_no_optimizer(plan)])]


def _modes(plan: Plan) -> list[str]:
    if not plan.has_recomputes:
        return [] if plan.runs else ["Nothing is recomputed."]
    again = [j for j, count in enumerate(plan.recomputed) if count]
    where = "All partitions" if len(again) == plan.n_partitions else _partitions(again)
    cost = sum(
        count * part.recompute_time
        for count, part in zip(plan.recomputed, plan.partitions, strict=True)
    )
    verbs = ("keeps", "computes") if len(again) == 1 < plan.n_partitions else ("keep", "compute")
    numbers = sorted({plan.recomputed[j] for j in again})
    which = "" if numbers == [plan.chunks] else f"{_either(numbers)} of {plan.chunks} "
    return [
        f"{where} {verbs[0]} only the inputs of {which}micro-batches and {verbs[1]} the rest again "
        f"to save memory, which takes {format_seconds(cost)} of all devices' time."
    ]


def _either(numbers: Sequence[int]) -> str:
    """Write numbers that are in order; if there are many, the least and the largest."""
    if len(numbers) > 2:
        return f"{numbers[0]} to {numbers[-1]}"
    return " or ".join(map(str, numbers))


def _partitions(which: list[int]) -> str:
    *first, last = map(str, which)
    return f"Partitions {', '.join(first)} and {last}" if first else f"Partition {last}"


def _order(plan: Plan) -> list[str]:
    if not plan.device_order:
        return []
    return [f"The devices are used in another order, partition by partition: {list(plan.devices)}."]


def _moves(plan: Plan) -> list[str]:
    ways = ("left", "right")
    # A cut is as decisive as its cheaper move.
    moves = [
        min((more, j, way) for more, way in zip(pair, ways, strict=True) if more is not None)
        for j, pair in enumerate(plan.sensitivity)
        if pair != (None, None)
    ]
    if not moves:
        return []
    cheap, costly = min(moves), max(moves)

    def adds(move: tuple[float, int, str]) -> str:
        more = abs(move[0])
        share = f" ({format_percent(more / plan.value)})" if plan.value else ""
        # Where a plan is not proven to be the best, a move may make it better.
        verb = "takes off" if move[0] < 0 else "adds"
        return f"one layer to the {move[2]} {verb} {format_value(plan, more)}{share}"

    if len(moves) == 1:
        return [f"The cheapest move of the cut after partition {cheap[1]}: {adds(cheap)}."]
    return [
        f"Of all cuts, the one after partition {cheap[1]} is the least decisive: {adds(cheap)}. "
        f"The most decisive is the one after partition {costly[1]}: {adds(costly)}."
    ]
