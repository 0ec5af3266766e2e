"""Micro-batches: the costs and savings of having more of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from gpipebal.argument_kinds import check_kind
from gpipebal.errors import UsageError
from gpipebal.plan import Plan
from gpipebal.plots.axes import (
    CAPTION_SIZE,
    add_headline,
    axes_or_new,
    fits,
    index_step,
    ink_of,
    note,
    points,
    style_ticks,
    text_width,
)
from gpipebal.plots.style import IDLE, idle_patch, partition_colours, scale_bytes, scale_seconds
from gpipebal.units import count, format_percent, format_seconds, parse_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

__all__ = ["plot_chunks"]


def plot_chunks(
    plans: Sequence[Plan], *, ax: Axes | None = None, limit: float | str | None = None
) -> Axes:
    """Draw time, bubble and peak memory of plans with different numbers of micro-batches.

    A bar is a makespan: the time that devices work on average, and above it the time that they
    wait. The line with dots is the training step, where it is known; the other line, with an axis
    of its own at the right, is the peak memory of the partition that needs most; it has a gap where
    a plan does not know its peak. The bubble is written below each number of micro-batches.

    Args:
        plans: Plans of one mini-batch, in any order. Where their mini-batches have different rows,
            as with a profile that knows one size only, none is named the fastest.
        ax: Axes to draw on; None: a new figure. The right axis is its twin.
        limit: Bytes that a partition may need, as a number or a text such as ``'16 GiB'``; drawn as
            a dashed line along the right axis. Plans whose peak is above it, or not known, are not
            named the fastest.

    Raises:
        KindError: `plans` is not a list of Plans.
        UsageError: there are no plans, or the limit cannot be read.

    Example:
        >>> import gpipebal as gb
        >>> profile = gb.Profile.from_costs([3.0, 1.0, 4.0], rows=8, chunks=2)
        >>> plans = [gb.solve(profile.at_rows(16 // m), 2, chunks=m) for m in (2, 4, 8)]
        >>> plot_chunks(plans).get_ylabel()
        'time [s]'
    """
    make = "plans=[solve(profile, 4, chunks=chunks) for chunks in (4, 8, 16)]"
    check_kind("plans", plans, Iterable, make)
    plans = list(plans)
    if not plans:
        raise UsageError(f"there is nothing to draw: plans=() (expected 1 or more).\nFix: {make}.")
    for k, plan in enumerate(plans):
        check_kind(f"plans[{k}]", plan, Plan, make)
    plans = sorted(plans, key=lambda plan: plan.chunks)
    room = None if limit is None else parse_bytes(limit, "limit")
    n = len(plans)
    ax = axes_or_new(ax, min(12.0, max(5.5, 2.5 + 0.6 * n)), 4.0)
    steps = [plan.step_time for plan in plans if plan.step_time is not None]
    times = steps if len(steps) == n else [plan.makespan for plan in plans]
    peaks = [plan.peak_bytes for plan in plans]
    largest = max(*times, *(plan.makespan for plan in plans), 0.0)
    factor, unit = scale_seconds(largest)
    work = [plan.makespan * (1 - plan.bubble_fraction) / factor for plan in plans]
    idle = [plan.makespan * plan.bubble_fraction / factor for plan in plans]
    time_colour, memory_colour = partition_colours(4)[0], partition_colours(4)[3]
    bars = ax.bar(range(n), work, 0.7, color=time_colour, label="work", alpha=0.75)
    ax.bar(range(n), idle, 0.7, work, **IDLE)
    entries = [bars, idle_patch()]
    if len(steps) == n:
        ink = ink_of(ax)
        entries += ax.plot(
            range(n),
            [time / factor for time in times],
            marker="o",
            markersize=4,
            linewidth=1.2,
            color=ink,
            label="training step",
        )
    ax.set_xlim(-0.6, n - 0.4)
    ax.set_ylim(0, 1.1 * largest / factor or 1.0)
    ax.set_ylabel(f"time [{unit}]")
    if not largest:
        ax.set_yticks([0])
        note(ax, "all times are 0")
    _label_chunks(ax, plans)
    if any(peaks) or room is not None:
        entries += _draw_memory(ax, peaks, room, memory_colour)
    allowed = [k for k, peak in enumerate(peaks) if room is None or _is_within(peak, room)]
    best = min(allowed, key=times.__getitem__, default=None)
    # Plans made by hand may have no rows of the mini-batch: count those of full micro-batches.
    rows = sorted(plan.mini_batch_rows or plan.rows * plan.chunks for plan in plans)
    if rows[0] < rows[-1]:
        title = f"Mini-batches of {rows[0]:,} to {rows[-1]:,} rows"
    elif best is None:
        known = "is known to stay" if None in peaks else "stays"
        title = f"No number of micro-batches {known} below the limit"
    else:
        title = (
            f"Fastest with {count(plans[best].chunks, 'micro-batch')}: "
            f"{format_seconds(times[best])}"
        )
    add_headline(ax, title, entries)
    return ax


def _is_within(peak: int | None, room: int) -> bool:
    return peak is not None and peak <= room


def _label_chunks(ax: Axes, plans: Sequence[Plan]) -> None:
    """Write number and bubble below each bar, as many of them as there is room for."""
    texts = [f"{plan.chunks}\n{format_percent(plan.bubble_fraction)}" for plan in plans]
    need = max(map(text_width, texts)) + 4
    shown = range(0, len(plans), index_step(points(ax)[0] / (len(plans) + 0.2), len(plans), need))
    ax.set_xticks(list(shown), [texts[k] for k in shown])
    ax.set_xlabel("micro-batches per mini-batch, and bubble")


def _draw_memory(
    ax: Axes, peaks: Sequence[int | None], room: int | None, colour: tuple[float, float, float]
) -> list[Line2D]:
    """Draw peaks and their limit along an axis at the right."""
    highest = max(*(peak or 0 for peak in peaks), room or 0)
    factor, unit = scale_bytes(highest)
    right = ax.twinx()
    # A style may ask for a grid: one is enough.
    right.grid(False)
    # Less room than bars have above them: a limit along their tops would seem to be one of time.
    right.set_ylim(0, 1.04 * highest / factor or 1.0)
    entries = []
    if any(peaks):
        entries += right.plot(
            range(len(peaks)),
            [math.nan if peak is None else peak / factor for peak in peaks],
            marker="s",
            markersize=4,
            linewidth=1.2,
            color=colour,
            label="peak memory",
        )
    if room is not None:
        entries.append(
            right.axhline(
                room / factor,
                color=colour,
                linewidth=1.0,
                linestyle=(0, (4, 2)),
                label="limit",
            )
        )
    label = f"peak memory of a partition [{unit}]"
    if not fits(label, points(ax)[1], CAPTION_SIZE):
        label = f"peak memory [{unit}]"
    right.set_ylabel(label, size=CAPTION_SIZE)
    right.spines[["top", "left", "bottom"]].set_visible(False)
    right.spines["right"].set_linewidth(0.6)
    style_ticks(right)
    return entries
