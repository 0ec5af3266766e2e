"""Axes: sizes, titles, legends and labels that fit the space they have."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from gpipebal.argument_kinds import check_kind
from gpipebal.plots.glyphs import families, pieces, written

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "CAPTION_SIZE",
    "FONT_SIZE",
    "LINE_HEIGHT",
    "ROOM",
    "add_headline",
    "axes_or_new",
    "dashed",
    "fits",
    "index_step",
    "index_steps",
    "label_indices",
    "label_layers",
    "new_axes",
    "note",
    "points",
    "style_ticks",
    "text_width",
]

#: Sizes of fonts in points.
FONT_SIZE = 8.5
CAPTION_SIZE = 9.0
TITLE_SIZE = 10.5

#: Height of a line in font sizes.
LINE_HEIGHT = 1.25

#: Share of a width that a long text may take by `text_width`: with few dots letters are wider.
ROOM = 0.94


def new_axes(width: float, height: float) -> Axes:
    """Make a figure of a size in inches, with one axes, laid out so that nothing is cut off."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    ax = figure.add_subplot()
    # Gives the axes nearly its final size, which decides what fits.
    figure.draw_without_rendering()
    return ax


def axes_or_new(ax: Axes | None, width: float, height: float) -> Axes:
    """Return the axes that were given, or new ones of a size in inches.

    Raises:
        KindError: `ax` is of another kind.
    """
    from matplotlib.axes import Axes

    if ax is None:
        return new_axes(width, height)
    check_kind("ax", ax, Axes, "ax=figure.add_subplot(), or leave it out")
    return ax


def points(ax: Axes) -> tuple[float, float]:
    """Return the width and height of an axes in points, as it is laid out now."""
    box = ax.get_window_extent()
    inch = ax.figure.dpi
    return 72 * box.width / inch, 72 * box.height / inch


def text_width(text: str, size: float = FONT_SIZE) -> float:
    """Measure a text, its longest line, at a font size in points, with a small margin."""
    from matplotlib import rcParams
    from matplotlib.font_manager import fontManager

    # What decides on fonts: the families, and what generic ones stand for.
    generic = (rcParams["font.sans-serif"], rcParams["font.serif"], rcParams["font.monospace"])
    settings = tuple(map(tuple, (rcParams["font.family"], *generic)))
    return _text_width(text, size, (settings, len(fontManager.ttflist)))


@lru_cache(maxsize=4096)
def _text_width(text: str, size: float, settings: object) -> float:
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(family=families(text), size=size)
    lines = [
        text_to_path.get_text_width_height_descent(line, font, False) for line in text.split("\n")
    ]
    return 2 + max(width for width, _, _ in lines)


def ink_of(ax: Axes) -> Any:
    """Return the colour of an axes' text, which can be read on it."""
    return ax.xaxis.label.get_color()


def dashed(ax: Axes, colour: Any, width: float) -> dict[str, Any]:
    """Return the style of a dashed line that can be seen on dark areas and on light ones."""
    # The gaps are filled: a dark line on a dark area would be lost.
    return {
        "color": colour,
        "gapcolor": ax.get_facecolor(),
        "linewidth": width,
        "linestyle": (0, (4, 2)),
    }


def fits(text: str, width: float, size: float = FONT_SIZE) -> bool:
    """Tell whether a text, at a font size, is at most this many points wide."""
    return text_width(text, size) <= width


def add_headline(ax: Axes, title: str, entries: Sequence[Any] = (), below: float = 0.0) -> None:
    """Put a title above an axes and under it, still above the data, a legend.

    The legend is one line where that fits the axes, else a few.

    Args:
        ax: The axes.
        title: Text of the title.
        entries: Handles of the legend.
        below: Points between the axes and the legend that are needed for something else.
    """
    from matplotlib.transforms import ScaledTranslation

    # Lines of a grid, which a style may ask for, are drawn behind the bars and their labels.
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_linewidth(0.6)
    style_ticks(ax)
    ax.xaxis.label.set_fontsize(CAPTION_SIZE)
    ax.yaxis.label.set_fontsize(CAPTION_SIZE)
    width, _ = points(ax)
    legend_height = 0.0
    if entries:
        # An entry is a patch and a text; between two entries there is a gap.
        rooms = [text_width(entry.get_label()) + 1.8 * FONT_SIZE for entry in entries]
        gap = 1.2 * FONT_SIZE
        columns = len(entries)
        if sum(rooms) + gap * (columns - 1) > width:
            columns = max(1, int(width / (max(rooms) + gap)))
        legend_height = 1.6 * FONT_SIZE * -(-len(entries) // columns)
        raised = ScaledTranslation(0, (below + 2) / 72, ax.figure.dpi_scale_trans)
        ax.legend(
            handles=list(entries),
            loc="lower left",
            bbox_to_anchor=(0.0, 1.0),
            bbox_transform=ax.transAxes + raised,
            ncols=columns,
            frameon=False,
            fontsize=FONT_SIZE,
            borderaxespad=0.0,
            borderpad=0.0,
            labelspacing=0.3,
            handlelength=1.3,
            handleheight=0.9,
            handletextpad=0.5,
            columnspacing=1.2,
        )
    pad = 6 + below + legend_height
    longest = int(len(title) * ROOM * width / text_width(title, TITLE_SIZE))
    # A word that is too long for a line sticks out: it is not broken.
    lines = textwrap.fill(title, max(16, longest), break_long_words=False, break_on_hyphens=False)
    ax.set_title(lines, loc="left", fontsize=TITLE_SIZE, pad=pad)


def style_ticks(ax: Axes) -> None:
    """Write ticks small, as plain numbers: a power of ten is in the unit, not at an axis's end."""
    from matplotlib.ticker import ScalarFormatter

    ax.tick_params(labelsize=FONT_SIZE, width=0.6, length=3)
    for axis in (ax.xaxis, ax.yaxis):
        formatter = axis.get_major_formatter()
        if isinstance(formatter, ScalarFormatter):
            formatter.set_scientific(False)
            formatter.set_useOffset(False)


def note(ax: Axes, text: str) -> None:
    """Say in the middle of an axes why it is empty."""
    words = ax.text(
        0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", color=ink_of(ax), size=10
    )
    # Lines behind the text, such as those between partitions, must not strike it out.
    words.set_bbox({"facecolor": ax.get_facecolor(), "linewidth": 0.0, "pad": 2.0})


def index_step(room: float, n_items: int, need: float) -> int:
    """Return 1, 2, 5, 10, 20, ...: every how many items there is room for a label.

    Args:
        room: Points between two neighbouring items.
        n_items: Number of items.
        need: Points that a label needs.

    Example:
        >>> index_step(30.0, 64, 12.0), index_step(4.0, 64, 12.0), index_step(1.0, 370, 18.0)
        (1, 5, 20)
    """
    return next(step for step in index_steps() if step * room >= need or step >= n_items)


def index_steps() -> Iterator[int]:
    """Yield 1, 2, 5, 10, 20, 50, ... without end."""
    for power in itertools.count():
        yield from (10**power, 2 * 10**power, 5 * 10**power)


def label_layers(ax: Axes, names: Sequence[str], *, grow: bool = False) -> None:
    """Label layers 0, 1, ... on the x axis: by name if all names fit, else by index.

    Where not all names have room side by side as they are, they are cut; those that would be cut to
    the same text lose what they have in common instead.

    Args:
        ax: The axes.
        names: Names of the layers.
        grow: Whether the figure may grow by what upright names take from the axes; else they are
            cut shorter.
    """
    room = points(ax)[0] / len(names)
    whole = [written(name) for name in names]
    has_room = all(fits(name, ROOM * room - 3) for name in whole)
    short = whole if has_room else _short_names(names, 20 if grow else 16)
    # A name is not a formula, even if it holds a dollar sign.
    style: dict[str, Any] = {"parse_math": False, "family": families("".join(short))}
    are_upright = not all(fits(name, room - 3) for name in short)
    too_narrow = are_upright and room < LINE_HEIGHT * FONT_SIZE
    if too_narrow or len(set(short)) < len(set(names)):
        label_indices(ax, len(names))
        ax.set_xlabel("layer (index)")
        return
    ax.set_xticks(range(len(names)), short, rotation=90 if are_upright else 0, **style)
    ax.set_xlabel("layer")
    figure = ax.figure.get_figure(root=True)
    if grow and are_upright and figure is not None:
        width, height = figure.get_size_inches()
        upright = max(map(text_width, short)) - LINE_HEIGHT * FONT_SIZE
        figure.set_size_inches(width, height + max(0.0, upright) / 72)
        figure.draw_without_rendering()


def label_indices(ax: Axes, n_items: int) -> None:
    """Label items 0, 1, ... on the x axis by index, as many of them as there is room for."""
    need = text_width(str(n_items - 1)) + 4
    ax.set_xticks(range(0, n_items, index_step(points(ax)[0] / n_items, n_items, need)))


def _short_names(names: Sequence[str], most: int) -> list[str]:
    """Cut names to a number of characters, and keep them apart where that can be done."""
    short = [_shorten(name, most) for name in names]
    if len(set(short)) == len(set(names)):
        return short
    # Whole words only: the 1 is not a common beginning of conv_1 and conv_12.
    prefix = re.sub(r"[^\W_]+$", "", _common_start(names))
    rest = [name[len(prefix) :] for name in names]
    suffix = _common_start([name[::-1] for name in rest])[::-1]
    suffix = re.sub(r"^[^\W_]+", "", suffix)
    left, right = "…" if prefix else "", "…" if suffix else ""
    room = most - len(left) - len(right)
    return [f"{left}{_shorten(name[: len(name) - len(suffix)], room)}{right}" for name in rest]


def _common_start(names: Sequence[str]) -> str:
    columns = zip(*names, strict=False)
    return "".join(column[0] for column in itertools.takewhile(lambda c: len({*c}) == 1, columns))


def _shorten(name: str, most: int) -> str:
    """Write a name, or its beginning and its end, in a number of characters; escapes stay whole."""
    parts = pieces(name)
    ends = list(itertools.accumulate(map(len, parts)))
    if not parts or ends[-1] <= most:
        return "".join(parts)
    first = sum(end <= most - 7 for end in ends)
    last = sum(ends[-1] - start > 6 for start in (0, *ends))
    return f"{''.join(parts[:first])}…{''.join(parts[last:])}"
