"""HTML: small tables with bars, as a notebook shows a noun.

No style sheet, no script and no picture: a cell of a notebook keeps only a few kilobytes, and looks
the same in every viewer. Text comes from models and files of other people, so all of it is
escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any, NamedTuple

from gpipebal.text import one_line
from gpipebal.units import count, format_bytes, format_percent, format_seconds, not_shown, slowest

__all__ = ["Bar", "plan_html", "profile_html", "table", "timeline_html"]

#: The most rows of a table: as many as can be read in a cell of a notebook.
_MOST_ROWS = 24

#: Colours of the parts of a bar, in their order, the same in every table; told apart with any
#: colour vision, on white and on black.
_COLOURS = {
    "forward": "#0072B2",
    "recompute": "#E69F00",
    "backward": "#009E73",
    "optimizer": "#CC79A7",
}
_REST = "#8080803c"

#: Width of a whole bar in pixels.
_WIDTH = 160

_CELL = "padding:1px 8px;white-space:nowrap;text-align:"


class Bar(NamedTuple):
    """A cell that is a bar.

    Attributes:
        parts: Length of forward, recompute, backward and optimizer, as fractions of the whole
            width; together at most 1. Those at the end may be left out.
        title: Text shown while the pointer rests on the bar.
        rest: Whether what is left of the width is tinted, as idle time is.
    """

    parts: tuple[float, ...]
    title: str = ""
    rest: bool = False


def table(
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str | Bar]],
    *,
    left: Sequence[int] = (),
    legend: Sequence[str] = (),
    footer: Sequence[str] = (),
) -> str:
    """Write a table.

    Args:
        title: A line above it.
        header: Headings of the columns.
        rows: Their cells.
        left: Columns of text, which begin at the left; numbers end at the right.
        legend: Which parts of the bars to explain.
        footer: Lines below it.

    Example:
        >>> print(table("Times", ["layer", ""], [["<a>", Bar((0.5,))]], left=[0])[-113:])
        <span style="display:inline-block;height:9px;width:80px;background:#0072B2"></span></div>\
</td></tr></table></div>
    """
    pieces = ['<div style="font-size:90%">', f"<div>{escape(title)}</div>"]
    if legend:
        named = "&ensp;".join(
            f'<span style="color:{colour}">&#9632;</span> {escape(name)}'
            for name, colour in _COLOURS.items()
            if name in legend
        )
        pieces.append(f"<div>{named}</div>")
    bars = [k for k in range(len(header)) if any(isinstance(row[k], Bar) for row in rows)]
    heads = "".join(
        f'<th style="{_CELL}{_side(k, (*left, *bars))}">{escape(text)}</th>'
        for k, text in enumerate(header)
    )
    pieces.append(f'<table style="border-collapse:collapse;margin:2px 0"><tr>{heads}</tr>')
    for row in rows:
        cells = "".join(
            f'<td style="{_CELL}{_side(k, left)}">{_content(cell)}</td>'
            for k, cell in enumerate(row)
        )
        pieces.append(f"<tr>{cells}</tr>")
    pieces.append("</table>")
    pieces += [f"<div>{escape(line)}</div>" for line in footer]
    return "".join([*pieces, "</div>"])


def profile_html(profile: Any) -> str:
    """Write a profile: the slowest layers, in the order of the chain, with their times as bars."""
    layers = profile.layers
    times = [layer.time for layer in layers]
    shown, longest = slowest(times, _MOST_ROWS), max(times) or 1.0
    rows: list[list[str | Bar]] = [
        [
            str(k),
            layers[k].name,
            layers[k].kind,
            Bar((layers[k].forward_time / longest, 0.0, layers[k].backward_time / longest)),
            format_seconds(layers[k].forward_time),
            format_seconds(layers[k].backward_time),
            format_bytes(layers[k].parameter_bytes),
            format_bytes(profile.bytes_of(layers[k].saved)),
        ]
        for k in shown
    ]
    footer = []
    if len(shown) < len(layers):
        footer.append(not_shown("layer", times, _MOST_ROWS, with_share=True))
    return table(
        str(profile),
        ["layer", "name", "kind", "time", "forward", "backward", "parameters", "saved"],
        rows,
        left=(1, 2),
        legend=("forward", "backward"),
        footer=footer,
    )


def plan_html(plan: Any) -> str:
    """Write a plan: its partitions, with their times for one micro-batch as bars.

    A bar as wide as its cell is the bottleneck; what is left of the others is their slack.
    """
    parts = plan.partitions
    times = [plan.micro_batch_time(j) for j in range(len(parts))]
    shown, longest = slowest(times, _MOST_ROWS), max(times) or 1.0
    rows: list[list[str | Bar]] = []
    for j in shown:
        part = parts[j]
        recompute = part.recompute_time if plan.recomputed[j] else 0.0
        shares = (part.forward_time, recompute, part.backward_time)
        names = part.layers[0] if len(part.layers) == 1 else f"{part.layers[0]} … {part.layers[-1]}"
        rows.append(
            [
                str(j),
                str(len(part.layers)),
                names,
                Bar(tuple(share / longest for share in shares), rest=True),
                format_seconds(times[j]),
                format_bytes(part.memory.total),
            ]
        )
    title, *text = str(plan).splitlines()
    footer = text[len(parts) + 1 :]
    memory = "model memory" if plan.peak_bytes is None else "peak memory"
    if len(shown) < len(parts):
        footer.insert(0, not_shown("partition", times, _MOST_ROWS))
    return table(
        title,
        ["partition", "layers", "", "time for one micro-batch", "", memory],
        rows,
        left=(2,),
        legend=("forward", "recompute", "backward"),
        footer=footer,
    )


def timeline_html(timeline: Any, kind_of: Callable[[str], Any]) -> str:
    """Write a timeline: how much of the makespan each device spends on what, as bars.

    Args:
        timeline: A Timeline.
        kind_of: Returns what is known about a kind of event: its `name`, and the `column` that it
            counts to, if any.
    """
    n, makespan = timeline.n_devices, timeline.makespan or 1.0
    placement = timeline.placement
    spent = [[0.0] * len(_COLOURS) for _ in range(n)]
    places = {name: place for place, name in enumerate(_COLOURS)}
    beside: dict[str, float] = {}
    for event in timeline.events:
        kind, time = kind_of(event.kind), event.end - event.start
        if kind.column is None:
            beside[kind.name] = beside.get(kind.name, 0.0) + time
        else:
            spent[placement[event.partition]][places[kind.column]] += time
    shown = range(min(n, _MOST_ROWS))
    rows: list[list[str | Bar]] = [
        [
            str(d),
            Bar(tuple(time / makespan for time in spent[d]), rest=True),
            *(format_seconds(time) if time else "-" for time in spent[d][:3]),
            format_percent(max(0.0, 1 - sum(spent[d]) / makespan) if timeline.makespan else 0.0),
        ]
        for d in shown
    ]
    word = "partition" if timeline.devices is None else "device"
    footer = [f"{count(n - len(shown), word)} more"] if len(shown) < n else []
    if beside:
        times = (f"{name} {format_seconds(time)}" for name, time in beside.items())
        footer.append(f"beside the work of the devices: {', '.join(times)}")
    title = (
        f"{timeline.source}: {count(timeline.chunks, 'micro-batch')}, makespan "
        f"{format_seconds(timeline.makespan)}, bubble {format_percent(timeline.bubble_fraction)}"
    )
    named = [name for name, place in places.items() if place < 3 or any(d[place] for d in spent)]
    return table(
        title,
        [word, "share of the makespan", "forward", "recompute", "backward", "idle"],
        rows,
        legend=named,
        footer=footer,
    )


def _side(column: int, left: Sequence[int]) -> str:
    return "left" if column in left else "right"


def _content(cell: str | Bar) -> str:
    if isinstance(cell, str):
        return escape(one_line(cell))
    # Lengths come from files too: a bar never leaves its cell.
    room = 1.0
    spans = []
    for part, colour in zip(cell.parts, _COLOURS.values(), strict=False):
        length = min(max(part, 0.0), room)
        room -= length
        spans.append(
            f'<span style="display:inline-block;height:9px;width:{_WIDTH * length:.3g}px;'
            f'background:{colour}"></span>'
        )
    back = f";background:{_REST}" if cell.rest else ""
    return (
        f'<div title="{escape(cell.title)}" style="width:{_WIDTH}px;text-align:left;'
        f'line-height:0{back}">{"".join(spans)}</div>'
    )
