"""Memory over time: one row per device, what it holds against its limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from gpipebal.argument_kinds import check_kind
from gpipebal.errors import UsageError
from gpipebal.plots.axes import (
    FONT_SIZE,
    LINE_HEIGHT,
    add_headline,
    axes_or_new,
    dashed,
    index_step,
    ink_of,
    note,
    points,
)
from gpipebal.plots.style import (
    FINE,
    NEUTRAL,
    kind_entries,
    kind_style,
    partition_colours,
    scale_seconds,
)
from gpipebal.simulator import MemoryTrack
from gpipebal.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

__all__ = ["plot_memory"]

#: The areas from bottom to top, the shade of each, and its name.
_LAYERS = (
    (("fixed", "gradients"), "F", "parameters and state"),
    (("outputs",), "R", "outputs and loss"),
    (("inputs", "graphs", "weights", "waiting"), "B", "held for backwards"),
    (("transient",), "W", "passing need"),
)
#: Share of a row that stays empty above its limit or its highest peak.
_GAP = 0.14

#: A limit of more than this many times the highest peak is too far away to be drawn.
_FAR = 5

#: Points of the mark at the right of a row that is above its limit.
_MARK = 3.0

#: Inches of a row that is easy to read, and the most inches of a figure.
_ROW = 0.55
_MAX_HEIGHT = 9.0


def plot_memory(
    tracks: Sequence[MemoryTrack],
    *,
    ax: Axes | None = None,
    limit: float | str | Sequence[float | str | None] | None = None,
) -> Axes:
    """Draw what every device holds over time, on one scale, with its peak and its limit.

    With the sizes that `gpipebal.simulator.held_of` gives for a plan, the peaks are those of this
    timeline, without the optimizer's step, which comes after it; a plan counts as much as may wait
    for busy neighbours in any timeline. A loss outside the pipeline is in the last row: gathered
    outputs, what the loss needs, and what stays of both.

    Args:
        tracks: What `gpipebal.simulator.memory_over_time` returned.
        ax: Axes to draw on; None: a new figure.
        limit: Bytes that a device may hold, as a number or a text such as ``'16 GiB'``; one for
            all, or one for each device, None where there is none; drawn as a dashed line in its
            row. Where there are too many rows for that, one limit for all is drawn in the highest
            row, and rows above it are marked. A limit far above all peaks is written, not drawn.

    Raises:
        KindError: `tracks` is not a list of tracks.
        UsageError: there are no tracks, a limit cannot be read, or there is not one per device.

    Example:
        >>> import gpipebal as gb
        >>> from gpipebal.simulator import held_of, memory_over_time
        >>> profile = gb.Profile.from_costs([1.0, 1.0], saved_bytes=[100, 200], chunks=4)
        >>> plan = gb.solve(profile, 2)
        >>> timeline = gb.simulate(plan, pause=0.0)
        >>> plot_memory(memory_over_time(timeline, held_of(profile, plan))).get_xlabel()
        'time [s]'
    """
    make = "tracks=memory_over_time(timeline, held_of(profile, plan))"
    check_kind("tracks", tracks, Sequence, make)
    n = len(tracks)
    if not n:
        raise UsageError(
            f"there is nothing to draw: tracks=() (expected one track per device).\nFix: {make}."
        )
    for j, track in enumerate(tracks):
        check_kind(f"tracks[{j}]", track, MemoryTrack, make)
    limits = _limits(limit, n)
    ax = axes_or_new(ax, 11.0, min(_MAX_HEIGHT, 1.3 + _ROW * n))
    end = max(float(track.times[-1]) for track in tracks)
    factor, unit = scale_seconds(end)
    ax.set_xlim(0, end / factor or 1.0)
    ax.set_ylim(n, 0)
    highest = max(track.peak for track in tracks)
    near = [size if size is not None and size <= _FAR * highest else None for size in limits]
    scale = (1 - _GAP) / max(highest, *(size or 0 for size in near), 1)
    n_partitions = 1 + max((j for track in tracks for j in track.partitions), default=0)
    hues = partition_colours(n_partitions)
    # A device that several partitions share has the colour of none of them.
    colours = [
        hues[track.partitions[0]] if len(track.partitions) == 1 else NEUTRAL for track in tracks
    ]
    fine = points(ax)[1] / n < FINE
    for j, track in enumerate(tracks):
        _draw_track(ax, track, j, colours[j], scale, factor, end, fine)
        ax.axhline(j + 1, color="0.75", linewidth=0.5, zorder=0)
    shown = _shown_rows(ax, tracks)
    _label_rows(ax, tracks, limits, shown)
    ax.set_xlabel(f"time [{unit}]")
    ax.set_ylabel("device" if any(len(track.partitions) > 1 for track in tracks) else "partition")
    labels = {kind: label for kinds, kind, label in _LAYERS if _any_held(tracks, kinds)}
    entries: list[Artist] = list(kind_entries(labels, fine=fine))
    title = f"Memory over time: highest peak {format_bytes(highest)}"
    if any(size is not None for size in limits):
        above = [size is not None and t.peak > size for t, size in zip(tracks, limits, strict=True)]
        entries += _draw_limits(ax, tracks, near, scale, is_dense=len(shown) < n)
        verdict = f"{sum(above)} of {n} above the limit" if any(above) else "all below the limit"
        far = {size for size, drawn in zip(limits, near, strict=True) if size and drawn is None}
        if not any(size is not None for size in near):
            verdict = "all far below the limit"
            verdict += f" of {format_bytes(min(far))}" if len(far) == 1 else ""
        elif far:
            verdict += f" ({', '.join(map(format_bytes, sorted(far)))}: too far above to be drawn)"
        # Without sizes there is no verdict.
        title += f", {verdict}" if highest else ""
        if any(above) and len(shown) < n:
            entries.append(_mark_rows(ax, [j for j in range(n) if above[j]]))
    add_headline(ax, title, entries)
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
    if not end:
        ax.set_xticks([0])
    if not highest:
        note(ax, "no sizes in this profile")
    return ax


def _any_held(tracks: Sequence[MemoryTrack], kinds: Sequence[str]) -> bool:
    """Whether an area needs a legend entry: all do, except outputs that no device holds."""
    return "outputs" not in kinds or any(track.held["outputs"].any() for track in tracks)


def _limits(
    limit: float | str | Sequence[float | str | None] | None, n_devices: int
) -> list[int | None]:
    if limit is None:
        return [None] * n_devices
    if not isinstance(limit, (list, tuple)):
        return [parse_bytes(limit, "limit")] * n_devices  # type: ignore[arg-type]
    if len(limit) != n_devices:
        raise UsageError(
            f"limits and devices differ: len(limit)={len(limit)} (expected {n_devices}, one per "
            "device).\nFix: give one limit for all, or one per device."
        )
    return [
        None if size is None else parse_bytes(size, f"limit[{j}]") for j, size in enumerate(limit)
    ]


def _draw_track(
    ax: Axes,
    track: MemoryTrack,
    row: int,
    colour: tuple[float, float, float],
    scale: float,
    factor: float,
    end: float,
    fine: bool,
) -> None:
    """Draw one device: areas on top of each other, and a dot where the peak is reached."""
    times = np.append(track.times, end) / factor
    below = np.zeros(len(track.times))
    for kinds, shade, _ in _LAYERS:
        if not _any_held([track], kinds):
            continue
        above = below + np.sum([track.held[kind] for kind in kinds], axis=0)
        low, high = (row + 1 - np.append(edge, edge[-1]) * scale for edge in (below, above))
        style = kind_style(colour, shade, fine=fine)
        ax.fill_between(times, low, high, step="post", **style)
        below = above
    size = min(3.5, 0.12 * points(ax)[1] / ax.get_ylim()[0])
    if track.peak and size > 1:
        place = track.peak_time / factor, row + 1 - track.peak * scale
        beside = max(sum(track.at(track.peak_time).values()), _before(track))
        if (track.peak - beside) * scale > _GAP:
            # A peak that lasts no time has no area: a line leads up to the dot.
            ax.vlines(place[0], row + 1, place[1], color=colour, linewidth=0.8)
        ink = ink_of(ax)
        ax.plot(*place, marker="o", markersize=size, color=ink, clip_on=False, zorder=4)


def _before(track: MemoryTrack) -> int:
    """Return the bytes of a track just before its peak."""
    place = int(np.searchsorted(track.times, track.peak_time)) - 1
    return int(track.total[place]) if place >= 0 else 0


def _draw_limits(
    ax: Axes,
    tracks: Sequence[MemoryTrack],
    limits: Sequence[int | None],
    scale: float,
    *,
    is_dense: bool,
) -> list[Line2D]:
    """Draw a line in each row; if rows are too low, a common limit in the highest row only."""
    same = len(set(limits)) == 1
    rows = [j for j, size in enumerate(limits) if size is not None]
    if not rows:
        return []
    if is_dense and same:
        rows = [_highest_row(tracks)]
    # Thinner lines in lower rows, so that they do not hide everything else.
    width = 0.9 if is_dense and same else min(0.9, max(0.3, points(ax)[1] / len(tracks) / 30))
    style = dashed(ax, ink_of(ax), width)
    lines = []
    for j in rows:
        height = j + 1 - (limits[j] or 0) * scale
        lines += ax.plot(ax.get_xlim(), [height, height], **style)
    lines[0].set_label(f"limit {format_bytes(limits[0])}" if same and limits[0] else "limit")
    return lines[:1]


def _mark_rows(ax: Axes, rows: Sequence[int]) -> Artist:
    """Mark rows above their limit at the right edge, also those that have no label."""
    from matplotlib.patches import Rectangle

    ink = ink_of(ax)
    for j in rows:
        place = ax.get_yaxis_transform()
        mark = Rectangle((1.0, j), _MARK / points(ax)[0], 1.0, transform=place, clip_on=False)
        mark.set(facecolor=ink, linewidth=0.0)
        ax.add_artist(mark)
    return Rectangle((0, 0), 1, 1, facecolor=ink, linewidth=0.0, label="above the limit")


def _highest_row(tracks: Sequence[MemoryTrack]) -> int:
    return max(range(len(tracks)), key=lambda j: tracks[j].peak)


def _shown_rows(ax: Axes, tracks: Sequence[MemoryTrack]) -> list[int]:
    """Choose the rows to label: as many as there is room for, and the highest one always."""
    n = len(tracks)
    room, need = points(ax)[1] / n, LINE_HEIGHT * FONT_SIZE
    shown = range(0, n, index_step(room, n, need))
    top = _highest_row(tracks)
    if any(tracks[j].peak == tracks[top].peak for j in shown):
        return list(shown)
    return sorted([top, *(j for j in shown if abs(j - top) * room >= need)])


def _label_rows(
    ax: Axes, tracks: Sequence[MemoryTrack], limits: Sequence[int | None], shown: Sequence[int]
) -> None:
    """Number rows at their left, and write their peaks at their right."""
    ax.set_yticks([j + 0.55 for j in shown], [str(tracks[j].device) for j in shown])
    for j in shown:
        size = limits[j]
        text = format_bytes(tracks[j].peak)
        above = size is not None and tracks[j].peak > size
        ax.annotate(
            f"{text} !" if above else text,
            (1.0, j + 0.55),
            xycoords=("axes fraction", "data"),
            xytext=(_MARK + 3, 0),
            textcoords="offset points",
            ha="left",
            va="center",
            size=FONT_SIZE,
            weight="bold" if above else "normal",
        )
