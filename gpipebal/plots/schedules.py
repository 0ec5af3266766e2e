"""Schedules side by side, as bars."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpipebal.argument_kinds import check_kind
from gpipebal.plots.axes import (
    FONT_SIZE,
    add_headline,
    axes_or_new,
    fits,
    ink_of,
    note,
    points,
    text_width,
)
from gpipebal.plots.glyphs import families, written
from gpipebal.plots.style import IDLE, idle_patch, partition_colours, scale_seconds
from gpipebal.simulator import ScheduleRow, ScheduleTable
from gpipebal.units import count, format_bytes, format_percent, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_schedules"]

#: Inches of a bar with its gap.
_ROW = 0.36


def plot_schedules(table: ScheduleTable, *, ax: Axes | None = None) -> Axes:
    """Draw the makespan of every schedule: the mean time that devices work, and that they wait.

    After each bar come makespan, bubble and, where sizes are known, the highest peak of memory.
    `plot_timelines` draws the timelines themselves.

    Args:
        table: What `gpipebal.compare_schedules` returned.
        ax: Axes to draw on; None: a new figure.

    Raises:
        KindError: `table` is not a ScheduleTable.

    Example:
        >>> import gpipebal as gb
        >>> table = gb.compare_schedules(gb.Profile.from_costs([1.0] * 8, chunks=8), 4)
        >>> plot_schedules(table).get_xlabel()
        'makespan [s]'
    """
    check_kind("table", table, ScheduleTable, "table = compare_schedules(profile, n_devices)")
    rows = table.rows
    ax = axes_or_new(ax, 9.0, 1.3 + _ROW * len(rows))
    longest = max((row.makespan or 0.0 for row in rows), default=0.0)
    factor, unit = scale_seconds(longest)
    names = [_name(row) for row in rows]
    ax.set_yticks(range(len(rows)), names, parse_math=False, family=families("".join(names)))
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_xlabel(f"makespan [{unit}]")
    # The names take their space from the axes, whose width decides on all other texts.
    figure = ax.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()
    width = points(ax)[0]
    texts = _texts(rows, width)
    room = max((text_width(text) for text in texts), default=0.0) + 8
    share = max(0.2, 1 - room / max(width, 1.0))
    ax.set_xlim(0, longest / factor / share or 1.0)
    blue = partition_colours(1)[0]
    for k, (row, text) in enumerate(zip(rows, texts, strict=True)):
        makespan = (row.makespan or 0.0) / factor
        idle = makespan * (row.bubble_fraction or 0.0)
        ax.barh(k, makespan - idle, 0.7, color=blue, alpha=0.75)
        ax.barh(k, idle, 0.7, makespan - idle, **IDLE)
        ax.annotate(
            text,
            (makespan, k),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            size=FONT_SIZE,
            color=ink_of(ax),
        )
    if not longest:
        ax.set_xticks([0])
        if not any(texts):
            note(ax, "all times are 0")
    from matplotlib.patches import Patch

    work = Patch(facecolor=blue, alpha=0.75, label="work")
    title = (
        f"Schedules: {count(table.n_devices, 'device')}, {count(table.chunks, 'micro-batch')}, "
        f"checkpoint={table.checkpoint!r}"
    )
    add_headline(ax, title, [work, idle_patch()])
    # Lines of a grid between the rows would strike out the texts after the bars.
    ax.grid(False, axis="y")
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
    return ax


def _name(row: ScheduleRow) -> str:
    each = row.partitions_per_device
    name = written(row.schedule)
    return name if each == 1 else f"{name}, {each} each"


def _texts(rows: tuple[ScheduleRow, ...], width: float) -> list[str]:
    """Choose the texts after the bars: all that is known, or what leaves the bars enough space."""
    # A profile without sizes gives peaks of 0, which mean nothing.
    with_peaks = any(row.peak_bytes for row in rows)
    choices: list[list[str]] = [[], [], [], []]
    for row in rows:
        if row.makespan is None:
            for texts in choices:
                texts.append("cannot be made")
            continue
        makespan, bubble = format_seconds(row.makespan), format_percent(row.bubble_fraction or 0.0)
        has_peak = with_peaks and row.peak_bytes is not None
        peak = f", peak {format_bytes(row.peak_bytes or 0)}" if has_peak else ""
        for texts, text in zip(
            choices,
            (f"{makespan}, bubble {bubble}{peak}", f"{makespan}, {bubble}", makespan, ""),
            strict=True,
        ):
            texts.append(text)
    return next(
        (texts for texts in choices if all(fits(text, 0.55 * width) for text in texts)), choices[-1]
    )
