"""What the tests of gpipebal.plots draw, and how they judge a layout."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from gpipebal.plan import PartitionPlan, PeakMemory, Plan
from gpipebal.profile import Profile
from gpipebal.schedule import CheckpointMode
from gpipebal.simulator import simulate
from gpipebal.timeline import Timeline


@cache
def make_case(
    n_layers: int,
    n_partitions: int,
    chunks: int,
    checkpoint: CheckpointMode = "except_last",
    scale: float = 1e-3,
) -> tuple[Profile, Plan]:
    """Make a profile with uneven costs, and a plan that cuts it into equally many layers."""
    forward = [scale * (1 + index * 7 % 5) for index in range(n_layers)]
    sizes = [1000 * (1 + index * 3 % 4) for index in range(n_layers)] if scale else None
    profile = Profile.from_costs(
        forward, rows=2, chunks=chunks, parameter_bytes=sizes, saved_bytes=sizes
    )
    cuts = [n_layers * j // n_partitions for j in range(n_partitions + 1)]
    partitions = []
    for start, end in pairwise(cuts):
        layers = profile.layers[start:end]
        partitions.append(
            PartitionPlan(
                layers=tuple(layer.name for layer in layers),
                fingerprints=("",) * len(layers),
                forward_time=sum(layer.forward_time for layer in layers),
                backward_time=sum(layer.backward_time for layer in layers),
                recompute_time=sum(layer.recompute_time for layer in layers),
                memory=PeakMemory(parameters=sum(layer.parameter_bytes for layer in layers)),
            )
        )
    plan = Plan(
        partitions=tuple(partitions),
        chunks=chunks,
        rows=2,
        checkpoint=checkpoint,
        schedule="gpipe",
        objective="makespan",
        value=0.0,
        lower_bound=0.0,
        status="optimal",
        method="given",
        makespan=0.0,
        bottleneck=0.0,
    )
    return profile, replace(plan, makespan=simulate(plan).makespan)


def measured_from(timeline: Timeline) -> Timeline:
    """Turn a prediction into a measurement that is a tenth slower and starts late."""
    events = tuple(
        event._replace(start=0.5 + 1.1 * event.start, end=0.5 + 1.1 * event.end)
        for event in timeline.events
    )
    return Timeline(events, timeline.n_partitions, "measured")


def texts_of(ax: Axes) -> list[Text]:
    """Collect what an axes shows as text, without ticks that lie outside of its limits."""
    texts: list[Text] = [*ax.texts, ax.title, ax.xaxis.label, ax.yaxis.label]
    texts += [ax._left_title]  # type: ignore[attr-defined]  # there is no public way to it
    legend = ax.get_legend()
    texts += legend.get_texts() if legend else []
    for axis, limits in ((ax.xaxis, ax.get_xlim()), (ax.yaxis, ax.get_ylim())):
        low, high = sorted(limits)
        texts += [
            tick.label1
            for tick in axis.get_major_ticks()
            if low <= tick.get_loc() <= high  # type: ignore[attr-defined]  # not in the stubs
        ]
    return [text for text in texts if text.get_visible() and text.get_text().strip()]


def check_layout(figure: Figure) -> None:
    """Verify that nothing lies outside of a figure, and that no two texts of an axes overlap."""
    figure.draw_without_rendering()
    width, height = figure.get_size_inches()
    used = figure.get_tightbbox()
    assert used is not None
    assert used.x0 >= 0
    assert used.y0 >= 0
    assert used.x1 <= width
    assert used.y1 <= height
    for ax in figure.axes:
        texts = texts_of(ax)
        if not texts:
            continue
        x0, y0, x1, y1 = np.transpose([text.get_window_extent().extents for text in texts])
        widths = np.minimum.outer(x1, x1) - np.maximum.outer(x0, x0)
        heights = np.minimum.outer(y1, y1) - np.maximum.outer(y0, y0)
        # Boxes of neighbours may touch: they have a margin around the letters.
        overlaps = np.argwhere(np.triu(np.minimum(widths, heights) >= 2, 1))
        pairs = [(texts[i].get_text(), texts[j].get_text()) for i, j in overlaps]
        assert not pairs, f"{pairs[0][0]!r} and {pairs[0][1]!r} overlap"
