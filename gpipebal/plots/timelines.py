"""Timelines as Gantt charts: one row per device, time from left to right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from gpipebal.argument_kinds import check_kind
from gpipebal.errors import UsageError
from gpipebal.plots.axes import (
    CAPTION_SIZE,
    FONT_SIZE,
    LINE_HEIGHT,
    ROOM,
    add_headline,
    axes_or_new,
    fits,
    index_step,
    ink_of,
    note,
    points,
    text_width,
)
from gpipebal.plots.glyphs import families, pieces
from gpipebal.plots.style import (
    FINE,
    IDLE,
    NEUTRAL,
    Colour,
    idle_patch,
    kind_entries,
    kind_style,
    partition_colours,
    readable_on,
    scale_seconds,
)
from gpipebal.timeline import EVENT_KINDS, KIND_NAMES, Event, Timeline, kind_of
from gpipebal.units import format_change, format_percent, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_pair", "plot_timeline", "plot_timelines", "timeline_height"]

_NAMES = {"simulated": "Predicted", "measured": "Measured"}

#: Where in a row the strips of events lie that overlap with the device's work, by their track.
_BESIDE = {"host": 0.06, "copies": 0.8}

#: Start and duration of each cell, in the unit of the time axis.
Spans = list[tuple[float, float]]

#: Height of a row that is easy to read, and of the space above each timeline, in inches.
_ROW = 0.3
_GAP = 0.3
#: Characters of a name that are looked at; more fit in no figure.
_LONGEST = 300
_MAX_HEIGHT = 9.0

#: Smallest size of a number that can be read, in points.
_SMALLEST = 6.0


def plot_timeline(
    timeline: Timeline, *, ax: Axes | None = None, beside: Timeline | None = None
) -> Axes:
    """Draw a timeline, or two on one time axis, with makespan and bubble written above.

    A cell holds the number of its micro-batch where the longest number fits. Both timelines start
    at their first event.

    Args:
        timeline: What to draw.
        ax: Axes to draw on; None: a new figure.
        beside: Another timeline, to compare; a prediction is drawn above a measurement.

    Raises:
        KindError: `timeline` or `beside` is not a Timeline.

    Example:
        >>> import gpipebal as gb
        >>> profile = gb.Profile.from_costs([3.0, 1.0, 4.0], chunks=4)
        >>> plan = gb.solve(profile, 2)
        >>> plot_timeline(gb.simulate(plan)).get_xlabel()
        'time since the first start [s]'
    """
    check_kind("timeline", timeline, Timeline)
    if beside is not None:
        check_kind("beside", beside, Timeline)
    return plot_pair(timeline, beside, ax=ax)


def plot_pair(
    timeline: Timeline,
    beside: Timeline | None,
    *,
    ax: Axes | None = None,
    planned: float | None = None,
) -> Axes:
    """Draw a timeline, or two: see `plot_timeline`.

    Args:
        timeline: What to draw.
        beside: Another one, or None.
        ax: Axes to draw on; None: a new figure.
        planned: Makespan of the plan, written next to that of a prediction with more in it (the
            loss).
    """
    shown = [timeline] if beside is None else [timeline, beside]
    # Sorting is stable: two of one source keep their order.
    in_order = sorted(shown, key=lambda item: item.source == "measured")
    named = []
    for item in in_order:
        name = _NAMES[item.source]
        if planned is not None and item.source == "simulated":
            text = format_seconds(planned)
            name += f" (plan: {text})" if text != format_seconds(item.makespan) else ""
        named.append((name, item))
    return _draw(named, ax)


def plot_timelines(timelines: Mapping[str, Timeline], *, ax: Axes | None = None) -> Axes:
    """Draw timelines below each other on one time axis, such as those of several schedules.

    Above each are its name, makespan and bubble, and by how much it is longer than the first.

    Args:
        timelines: What to draw, by name, from top to bottom.
        ax: Axes to draw on; None: a new figure.

    Raises:
        KindError: `timelines` is not a mapping to Timelines.
        UsageError: there is none.

    Example:
        >>> import gpipebal as gb
        >>> profile = gb.Profile.from_costs([3.0, 1.0, 4.0], chunks=4)
        >>> plan = gb.solve(profile, 2)
        >>> timelines = {name: gb.simulate(plan, name) for name in ("gpipe", "1f1b")}
        >>> plot_timelines(timelines).get_xlabel()
        'time since the first start [s]'
    """
    make = "timelines={'gpipe': simulate(plan)}"
    check_kind("timelines", timelines, Mapping, make)
    if not timelines:
        raise UsageError(
            f"there is nothing to draw: timelines={{}} (expected 1 or more).\nFix: {make}."
        )
    for name, timeline in timelines.items():
        check_kind("name of a timeline", name, str, "timelines={'4 micro-batches': timeline}")
        check_kind(f"timelines[{name!r}]", timeline, Timeline)
    return _draw(list(timelines.items()), ax)


def _draw(named: list[tuple[str, Timeline]], ax: Axes | None) -> Axes:
    shown = [timeline for _, timeline in named]
    ax = axes_or_new(ax, 11.0, timeline_height(*shown))
    makespan = max(item.makespan for item in shown)
    factor, unit = scale_seconds(makespan)
    # The margin keeps the line at the end of the makespan inside.
    ax.set_xlim(0, 1.003 * makespan / factor or 1.0)
    gap, row = _heights(ax, shown)
    positions: list[list[float]] = []
    # A partition has one colour in all of them.
    colours = partition_colours(max(item.n_partitions for item in shown))
    top = 0.0
    for name, item in named:
        top += gap
        _draw_rows(ax, item, top, row, factor, colours)
        caption = _caption(name, item, shown[0], points(ax)[0])
        text = ax.text(0, top, caption, ha="left", va="bottom", size=CAPTION_SIZE, parse_math=False)
        text.set_fontfamily(families(caption))
        text.set_in_layout(False)  # it is no wider than the axes
        positions.append([top + j + 0.5 for j in range(item.n_devices)])
        top += item.n_devices
    ax.set_ylim(top + 0.2, 0)
    step = index_step(row, max(map(len, positions)), LINE_HEIGHT * FONT_SIZE)
    labels = [(place, str(j)) for group in positions for j, place in enumerate(group)]
    labels = [(place, text) for place, text in labels if int(text) % step == 0]
    ax.set_yticks([place for place, _ in labels], [text for _, text in labels])
    if not makespan:
        ax.set_xticks([0])
        has_events = any(len(item.events) for item in shown)
        note(ax, "all times are 0" if has_events else "nothing happens here")
    ax.set_xlabel(f"time since the first start [{unit}]")
    several = any(item.devices is not None for item in shown)
    ax.set_ylabel("device" if several else "partition")
    kinds = {event.kind for item in shown for event in item.events}
    entries = kind_entries(
        {kind: name for kind, name in KIND_NAMES.items() if kind in kinds},
        fine=row < FINE,
        ink=ink_of(ax),
        strips=[kind.letter for kind in EVENT_KINDS if not kind.computes],
    )
    title = "Timeline of one mini-batch" if len(shown) == 1 else "Timelines of one mini-batch"
    add_headline(ax, title, [*entries, idle_patch()])
    # Captions begin where the axis would run, and rows need no marks.
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
    return ax


def timeline_height(*timelines: Timeline) -> float:
    """Return the inches that a figure of these timelines needs; rows shrink above a limit."""
    rows = sum(timeline.n_devices for timeline in timelines)
    return min(_MAX_HEIGHT, 1.2 + _GAP * len(timelines) + _ROW * rows)


def _heights(ax: Axes, shown: list[Timeline]) -> tuple[float, float]:
    """Return the space for a caption, in heights of a row, and the height of a row in points."""
    height = points(ax)[1]
    gap = min(72 * _GAP, 0.4 * height / len(shown))
    row = (height - gap * len(shown)) / sum(item.n_devices for item in shown)
    return gap / row, row


def _caption(name: str, timeline: Timeline, first: Timeline, width: float) -> str:
    """Summarise a timeline in one line of at most `width` points, compared with the first shown."""
    makespan = format_seconds(timeline.makespan)
    if timeline is not first and first.makespan:
        change = timeline.makespan / first.makespan - 1
        makespan += f" ({format_change(change)})"
    bubble = format_percent(timeline.bubble_fraction)
    parts = pieces(name)
    whole = (
        f"{''.join(parts)}: {text}"
        for text in (
            f"makespan {makespan}, bubble {bubble}",
            f"{makespan}, bubble {bubble}",
            makespan,
        )
    )
    texts = (
        *(whole if len(parts) <= _LONGEST else ()),
        *(f"{short}: {makespan}" for short in _shorter(parts)),
        makespan,
    )
    return next((text for text in texts if fits(text, ROOM * width, CAPTION_SIZE)), makespan)


def _shorter(name: Sequence[str]) -> Iterator[str]:
    """Yield a name with more and more of its middle left out: a path's end says the most."""
    kept = min(len(name) - 2, _LONGEST)
    while kept > 2:
        yield f"{''.join(name[: kept // 3])}…{''.join(name[kept // 3 - kept :])}"
        kept -= max(1, kept // 20)


def _draw_rows(
    ax: Axes,
    timeline: Timeline,
    top: float,
    row: float,
    factor: float,
    colours: Sequence[Colour],
) -> None:
    """Draw one timeline, its partition 0 at height `top`, times divided by `factor`."""
    cells: dict[tuple[int, str], list[Event]] = {}  # of each partition and kind
    for event in timeline.events:
        cells.setdefault((event.partition, event.kind), []).append(event)
    fine = row < FINE
    gap = 0.0 if fine else 0.06
    origin, end = timeline.start, timeline.makespan / factor
    for j in range(timeline.n_devices):
        ax.broken_barh([(0, end)], (top + j + gap, 1 - 2 * gap), snap=False, **IDLE)
    for (partition, kind), events in cells.items():
        j = timeline.placement[partition]
        spans = [((e.start - origin) / factor, (e.end - e.start) / factor) for e in events]
        style = kind_style(colours[partition], kind, fine=fine, ink=ink_of(ax))
        # Edges stay where they are: moved to whole pixels, gaps narrower than a pixel would vanish
        # here and be a pixel wide there.
        style["snap"] = False
        bars = _joined(spans, ax.get_xlim()[1] / points(ax)[0])
        if not kind_of(kind).computes:
            # A strip at the edge: these run during the device's work, not instead of it.
            strip = top + j + _BESIDE[kind_of(kind).track]
            ax.broken_barh(bars, (strip, 0.14), zorder=3, **style)
            continue
        ax.broken_barh(bars, (top + j + gap, 1 - 2 * gap), **style)
        if not fine:
            _draw_borders(ax, spans, top + j + gap, top + j + 1 - gap)
        if not fine and timeline.tells_micro_batches:
            _draw_numbers(ax, events, spans, top + j + 0.5, row, readable_on(style["facecolor"]))
    ax.vlines(end, top, top + timeline.n_devices, color=NEUTRAL, linewidth=0.8)


def _joined(spans: Spans, point: float) -> Spans:
    """Let each cell that ends where the next one starts reach under it, by a point at most.

    Two edges within one pixel, each drawn half, would let through what is behind them.
    """
    if not spans:
        return spans
    joined = [
        (start, duration + min(point, following[1]))
        if abs(following[0] - start - duration) < 0.01 * point
        else (start, duration)
        for (start, duration), following in pairwise(spans)
    ]
    return [*joined, spans[-1]]


def _draw_borders(ax: Axes, spans: Spans, top: float, bottom: float) -> None:
    """Separate wide cells from the cells before them by a line in the background's colour."""
    per_unit = points(ax)[0] / ax.get_xlim()[1]
    starts = [start for start, duration in spans if duration * per_unit > FINE]
    ax.vlines(starts, top, bottom, color=ax.get_facecolor(), linewidth=0.6)


def _draw_numbers(
    ax: Axes, events: list[Event], spans: Spans, middle: float, row: float, colour: str
) -> None:
    """Write micro-batches into the cells that have room.

    Not into those that belong to none, as the optimizer's, nor where a hatch would make them
    unreadable.
    """
    size = min(FONT_SIZE, 0.7 * row)
    kind = kind_of(events[0].kind)
    if size < _SMALLEST or kind.letter == "R" or not kind.has_micro_batch:
        return
    per_unit = points(ax)[0] / ax.get_xlim()[1]
    # Smaller numbers, if the longest then fits, and none if it does not: numbers that stop at 9
    # would look as if there were no more.
    usual = median(duration for _, duration in spans) * per_unit
    longest = max((str(event.micro_batch) for event in events), key=len)
    size = next((s for s in (size, 7.5, 7.0, 6.5, _SMALLEST) if fits(longest, usual, s)), size)
    needed = text_width(longest, size) / per_unit
    for event, (start, duration) in zip(events, spans, strict=True):
        if duration >= needed:
            ax.text(
                start + duration / 2,
                middle,
                str(event.micro_batch),
                ha="center",
                va="center_baseline",
                size=size,
                color=colour,
            )
