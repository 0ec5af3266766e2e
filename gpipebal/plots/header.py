"""Header: which layers belong to which partition, as a band above an axes of layers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from gpipebal.plots.axes import FONT_SIZE, fits, index_steps, points, text_width
from gpipebal.plots.style import FINE, Colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["HEADER", "draw_header"]

#: Points above the axes for a coloured band, and for it with two lines of text above.
_BAND = 5.0
HEADER = 2.5 * FONT_SIZE + _BAND + 2


def draw_header(
    ax: Axes, balance: Sequence[int], colours: Sequence[Colour], totals: Sequence[str]
) -> None:
    """Mark where partitions begin and end, and write their names and totals above them."""
    from matplotlib.patches import Rectangle
    from matplotlib.transforms import ScaledTranslation

    # Along x in layers, along y in points above the axes.
    raised = ScaledTranslation(0, 2 / 72, ax.figure.dpi_scale_trans)
    above = ax.get_xaxis_transform() + raised
    width, height = points(ax)
    ends = accumulate(balance)
    starts = [end - n_layers - 0.5 for end, n_layers in zip(ends, balance, strict=True)]
    # Close to each other the lines would hide everything else.
    has_lines = width / len(balance) >= 2 * FINE
    for start, n_layers, colour in zip(starts, balance, colours, strict=True):
        if start > 0 and has_lines:
            ax.axvline(start, color="0.75", linewidth=0.6, zorder=0)
        band = Rectangle((start, 1.0), n_layers, _BAND / height, transform=above, clip_on=False)
        band.set(facecolor=colour, linewidth=0.0)
        ax.add_artist(band)
    middles = [start + n_layers / 2 for start, n_layers in zip(starts, balance, strict=True)]
    for j, text in _header_texts(balance, middles, totals, width / sum(balance)).items():
        ax.annotate(
            text,
            (middles[j], 1.0),
            xycoords=ax.get_xaxis_transform(),
            xytext=(0, _BAND + 4),
            textcoords="offset points",
            ha="center",
            va="bottom",
            size=FONT_SIZE,
            linespacing=1.1,
        )


def _header_texts(
    balance: Sequence[int], middles: Sequence[float], totals: Sequence[str], room: float
) -> dict[int, str]:
    """Choose the text above each partition so that no two texts touch.

    Args:
        balance: Layers of each partition.
        middles: Where the partitions' texts are centred, in layers.
        totals: Total of each partition, as text.
        room: Points of one layer.
    """
    widths = [n_layers * room for n_layers in balance]
    texts = {}
    for j, (width, total) in enumerate(zip(widths, totals, strict=True)):
        names = (f"partition {j}\n{total}", f"{j}\n{total}", str(j))
        texts[j] = next((name for name in names if fits(name, width)), str(j))
    if 2 * sum("\n" in text for text in texts.values()) >= len(texts):
        # A text that fits its own partition touches no other; a few narrow partitions have none.
        # The empty second line keeps a number off the line where others have their total.
        lines = {j: text if "\n" in text else f"{text}\n" for j, text in texts.items()}
        return {j: text for j, text in lines.items() if fits(text, widths[j])}
    texts = {j: str(j) for j in texts}
    for step in index_steps():
        # Numbers alone may be wider than their partition, but must not touch each other.
        ends = [(middles[j] * room, text_width(text) / 2) for j, text in texts.items()]
        if all(b - a >= half_a + half_b for (a, half_a), (b, half_b) in pairwise(ends)):
            break
        texts = {j: str(j) for j in range(0, len(balance), step)}
    return texts
