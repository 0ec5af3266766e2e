"""Pictures can be read: lines and numbers on dark areas, narrow gaps, low bars, long names."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import matplotlib.style
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from plot_cases import check_layout, make_case

import gpipebal as gb
from gpipebal.plots import (
    plot_balance,
    plot_chunks,
    plot_memory,
    plot_partitions,
    plot_profile,
    plot_schedules,
    plot_timeline,
    plot_timelines,
)
from gpipebal.plots.axes import new_axes
from gpipebal.plots.style import IDLE, kind_style
from gpipebal.problem import Link
from gpipebal.simulator import held_of, memory_over_time
from gpipebal.timeline import Event, Timeline

MIB = 2**20


def plan_with_transfers() -> gb.Plan:
    """Plan eight equal layers over a slow link: inner partitions hand over twice as much."""
    profile = gb.Profile.from_costs([1e-3] * 8, output_bytes=[MIB] * 8, chunks=4)
    return gb.solve(profile, 4, link=Link(bandwidth=1e9))


def figure_of(ax: Axes) -> Figure:
    """Return the whole figure of an axes."""
    figure = ax.get_figure(root=True)
    assert isinstance(figure, Figure)
    return figure


def pixels_along(ax: Axes, y: float, left: float, right: float) -> np.ndarray:
    """Draw a figure and return the pixels of three rows of it, between two points of its data."""
    canvas = FigureCanvasAgg(figure_of(ax))
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[..., :3] / 255
    (x0, height), (x1, _) = ax.transData.transform([(left, y), (right, y)])
    middle = len(pixels) - 1 - int(height)
    return pixels[middle - 1 : middle + 2, int(x0) + 2 : int(x1) - 1].reshape(-1, 3)


def luminance(colour: Any) -> float:
    """Compute the relative luminance of a colour as the WCAG define it."""
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: Any, other: Any) -> float:
    """Compute the contrast of two colours as the WCAG define it."""
    light, dark = sorted([luminance(one), luminance(other)], reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_total_inside_a_bar_is_readable_on_what_is_below_it() -> None:
    """A number that stands on dark transfers is light."""
    ax = plot_partitions(plan_with_transfers())
    check_layout(figure_of(ax))
    n_inside = 0
    for text, bar in zip(ax.texts, ax.containers[-1], strict=True):
        box, face = text.get_window_extent(), bar.get_window_extent()
        if box.y1 <= face.y1:
            assert box.y0 >= face.y0
            assert contrast(text.get_color(), bar.get_facecolor()[:3]) >= 4.5
            n_inside += 1
    assert n_inside == 2


def test_mean_line_can_be_seen_over_transfers() -> None:
    """Where the mean line crosses a dark bar, it is not dark all along."""
    ax = plot_partitions(plan_with_transfers())
    (line,) = ax.get_lines()
    row = pixels_along(ax, float(line.get_ydata()[0]), 0.6, 1.4)
    brightness = [luminance(pixel) for pixel in row]
    assert max(brightness) > 0.5 and min(brightness) < 0.1


def test_title_of_partitions_is_about_the_bars() -> None:
    """With transfers in the bars, mean and imbalance have them too; without, it is the plan's."""
    plan = plan_with_transfers()
    ax = plot_partitions(plan)
    columns = zip(*([bar.get_height() for bar in kind] for kind in ax.containers), strict=True)
    totals = [sum(column) for column in columns]
    mean = sum(totals) / 4
    assert max(totals) / mean > 1.05 > plan.imbalance
    title = f"Partitions: mean {mean:.2f} ms, imbalance {max(totals) / mean:.3f}"
    assert ax.get_title(loc="left") == title
    work = make_case(24, 4, 8)[1]
    assert plot_partitions(work).get_title(loc="left").endswith(f" {work.imbalance:.3f}")


def test_totals_of_low_bars_stand_above_the_axis() -> None:
    """One partition far above the others leaves bars too low to write into."""
    profile = gb.Profile.from_costs([1e-3] * 15 + [60e-3], chunks=4)
    ax = plot_partitions(gb.solve(profile, 16))
    check_layout(figure_of(ax))
    (line,) = ax.get_lines()
    mean = ax.transData.transform((0, float(line.get_ydata()[0])))[1]
    assert len(ax.texts) == 16
    assert all(text.get_window_extent().y0 > mean for text in ax.texts)


def test_gaps_narrower_than_a_pixel_stay_narrow() -> None:
    """Idle time of a fraction of a pixel makes cells lighter, and none of it is a pixel wide."""
    events = tuple(Event(0, "F", k, k, k + 0.9) for k in range(400))
    row = pixels_along(plot_timeline(Timeline(events, 1)), 0.5, 0, 400)
    idle = 1 - IDLE["alpha"] * (1 - np.array(IDLE["facecolor"]))
    assert np.abs(row - idle).max(axis=1).min() > 0.1


def test_cells_without_gaps_have_no_stripes() -> None:
    """Narrow cells that follow each other at once are one area."""
    events = tuple(Event(0, "F", k, k, k + 1) for k in range(333))
    row = pixels_along(plot_timeline(Timeline(events, 1)), 0.5, 0, 333)
    assert np.ptp(row, axis=0).max() < 0.02


LONG = [f"encoder_block_{i}_self_attention_layer" for i in range(12)]


@pytest.mark.parametrize(
    ("names", "labels", "axis"),
    [
        (LONG, [f"…{i}…" for i in range(12)], "layer"),
        ([f"{name}_number_{i}" for i, name in enumerate(LONG)], None, "layer"),
        ([f"layer{i}ofaverylongmodelindeed" for i in (1, 10, 100)], None, "layer"),
        (["embedding", *LONG], [str(i) for i in range(13)], "layer (index)"),
        (["a" * 40 + "b" * i + "c" * 40 for i in range(1, 4)], ["0", "1", "2"], "layer (index)"),
    ],
    ids=["both ends", "all ends differ", "numbers", "nothing in common", "no words"],
)
def test_labels_of_layers_differ(names: list[str], labels: list[str] | None, axis: str) -> None:
    """Long names are never cut to the same text: what they share goes, or they are numbered."""
    profile = gb.Profile.from_costs([1e-3] * len(names), names=names, chunks=4)
    for ax in (plot_profile(profile), plot_balance(profile, gb.solve(profile, 2))):
        found = [label.get_text() for label in ax.get_xticklabels()]
        assert len(set(found)) == len(names)
        assert labels is None or found == labels
        assert ax.get_xlabel() == axis
        check_layout(figure_of(ax))


def test_names_that_have_room_are_whole() -> None:
    """A few layers with long names keep all of them; in a small picture they are cut."""
    names = LONG[:3]
    profile = gb.Profile.from_costs([1e-3] * len(names), names=names, chunks=4)
    for ax, labels in (
        (plot_profile(profile), names),
        (plot_profile(profile, ax=new_axes(4.0, 3.0)), ["…0…", "…1…", "…2…"]),
    ):
        assert [label.get_text() for label in ax.get_xticklabels()] == labels
        check_layout(figure_of(ax))  # nor is the title of the small one wider than it


def test_limit_can_be_seen_on_what_is_held() -> None:
    """The line of a limit far below the peak stands out from the dark area behind it."""
    profile = gb.Profile.from_costs([1e-3] * 4, parameter_bytes=[100 * MIB] * 4, chunks=4)
    plan = gb.solve(profile, 1)
    tracks = memory_over_time(gb.simulate(plan), held_of(profile, plan))
    ax = plot_memory(tracks, limit=100 * MIB)
    (line,) = (line for line in ax.get_lines() if line.is_dashed())
    right = ax.get_xlim()[1]
    area = pixels_along(ax, 0.95, 0, right)
    row = pixels_along(ax, float(line.get_ydata()[0]), 0, right)
    assert max(contrast(pixel, area[0]) for pixel in row) >= 3


def test_without_sizes_there_is_no_verdict() -> None:
    """Where nothing is known to be held, nobody says that it stays below the limit."""
    profile = gb.Profile.from_costs([1e-3] * 4, chunks=4)
    plan = gb.solve(profile, 2)
    ax = plot_memory(memory_over_time(gb.simulate(plan), held_of(profile, plan)), limit="1 MiB")
    assert ax.get_title(loc="left") == "Memory over time: highest peak 0 B"


def test_note_says_what_is_missing() -> None:
    """A profile that knows outputs has sizes, but none of those that the bars stand for."""
    profile = gb.Profile.from_costs([1e-3] * 4, output_bytes=[MIB] * 4)
    (note,) = plot_profile(profile, by="memory").texts
    assert note.get_text() == "no parameters and nothing saved in this profile"


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns", "ps", "1e-15 s"])
def test_axes_of_short_times_have_their_unit(unit: str) -> None:
    """From seconds to parts of a picosecond the numbers of an axis have a few digits."""
    scale = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "ps": 1e-12}.get(unit, 1e-15)
    ax = plot_profile(gb.Profile.from_costs([4 * scale, 2 * scale]))
    assert ax.get_ylabel() == f"time [{unit}]"
    assert ax.get_ylim()[1] == pytest.approx(1.12 * 12)
    check_layout(figure_of(ax))
    assert not ax.yaxis.get_offset_text().get_text()


def test_few_totals_do_not_take_the_numbers_of_others() -> None:
    """Where one of many partitions has room for its total, all stand there by number alone."""
    profile = gb.Profile.from_costs([1e-3] * 240, chunks=4)
    plan = gb.evaluate(profile, [3] * 63 + [51])
    texts = [text.get_text() for text in plot_balance(profile, plan).texts]
    assert not any("\n" in text for text in texts)
    assert texts == [str(j) for j in range(0, 64, int(texts[1]))]


@pytest.mark.parametrize("chunks", [20, 32, 44, 56, 80])
def test_numbers_of_micro_batches_do_not_end_at_nine(chunks: int) -> None:
    """All of a row have numbers, smaller ones where they then fit, or none has."""
    profile = gb.Profile.from_costs([1e-3] * 2, chunks=chunks)
    ax = plot_timeline(gb.simulate(gb.solve(profile, 2, checkpoint="never")))
    numbers = [text for text in ax.texts if text.get_text().isdigit()]
    found = {text.get_text() for text in numbers}
    assert found == ({str(i) for i in range(chunks)} if chunks < 50 else set())
    assert all(text.get_size() >= 6 for text in numbers)


@pytest.mark.parametrize("style", ["default", "dark_background"])
def test_copies_and_notes_can_be_seen_in_any_style(style: str) -> None:
    """Strips and parts of bars for copies stand out from what is behind them, and notes too."""
    with matplotlib.style.context(style):
        plan = plan_with_transfers()
        for ax in (plot_timeline(gb.simulate(plan)), plot_partitions(plan)):
            legend = ax.get_legend()
            assert legend is not None
            texts = [text.get_text() for text in legend.get_texts()]
            (copy,) = (
                handle.get_color() if hasattr(handle, "get_color") else handle.get_facecolor()[:3]
                for text, handle in zip(texts, legend.legend_handles, strict=True)
                if text in ("copy", "transfer")
            )
            back = np.array(to_rgb(ax.get_facecolor()))
            idle = back + IDLE["alpha"] * (np.array(IDLE["facecolor"]) - back)
            assert contrast(copy, idle) >= 4.5
        (note,) = plot_profile(gb.Profile.from_costs([0.0] * 4)).texts
        assert contrast(note.get_color(), back) >= 4.5


def test_kinds_of_work_look_different_in_low_rows() -> None:
    """Where rows are too low for a hatch, recompute and input gradient differ in shade."""
    shades = [kind_style((0.0, 0.4, 0.7), kind, fine=True)["facecolor"] for kind in "FRIBW"]
    assert all(contrast(one, other) >= 1.2 for one, other in pairwise(shades))


def test_launches_and_copies_are_strips_in_the_legend() -> None:
    """They are drawn as strips, and so no one takes them for forwards or optimizer steps."""
    kinds = {"H": (0, 1), "F": (1, 3), "B": (3, 6), "O": (6, 7), "C": (1, 2)}
    events = tuple(Event(0, kind, 0, start, end) for kind, (start, end) in kinds.items())
    legend = plot_timeline(Timeline(events, 1)).get_legend()
    assert legend is not None
    strips = [
        text.get_text()
        for text, handle in zip(legend.get_texts(), legend.legend_handles, strict=True)
        if isinstance(handle, Line2D)
    ]
    assert sorted(strips) == ["copy", "launch"]


def test_a_grid_is_drawn_once() -> None:
    """A style with grids gives the axis for memory none, which would be at other heights."""
    profile = gb.Profile.from_costs([1e-3] * 6, saved_bytes=[MIB] * 6, rows=8, chunks=4)
    with matplotlib.rc_context({"axes.grid": True}):
        ax = plot_chunks([gb.solve(profile.at_rows(16 // m), 3, chunks=m) for m in (2, 4, 8)])
        left, right = figure_of(ax).axes
    assert left.yaxis.get_gridlines()[0].get_visible()
    assert not right.yaxis.get_gridlines()[0].get_visible()


def test_narrow_axes_break_titles_between_words() -> None:
    """A line of a title is never cut inside of a word."""
    figure = Figure(figsize=(2.4, 2.4), layout="constrained")
    table = gb.compare_schedules(gb.Profile.from_costs([1e-3] * 12, chunks=8), 4)
    title = plot_schedules(table, ax=figure.subplots()).get_title(loc="left")
    assert {"micro-batches,", "checkpoint='never'"} <= set(title.split()) and "\n" in title


def test_the_axis_of_memory_has_a_short_name_where_it_is_low() -> None:
    """A label never is longer than its axis."""
    profile = gb.Profile.from_costs([1e-3] * 6, saved_bytes=[MIB] * 6, rows=8, chunks=4)
    figure = Figure(figsize=(5, 2), layout="constrained")
    plot_chunks([gb.solve(profile.at_rows(8), 3, chunks=2)], ax=figure.subplots())
    figure.draw_without_rendering()
    assert figure.axes[1].get_ylabel() == "peak memory [MiB]"


@pytest.mark.parametrize("dpi", [72, 100, 150])
def test_captions_end_inside_of_the_figure(dpi: int) -> None:
    """Also where letters are wider because there are few dots for them."""
    timeline = gb.simulate(gb.solve(gb.Profile.from_costs([1e-3] * 8, chunks=4), 2))
    name = "runs/bert-large-uncased-whole-word-masking/pipeline/partitions-8/" * 3
    figure = figure_of(plot_timelines({"a": timeline, name: timeline}))
    figure.set_dpi(dpi)
    FigureCanvasAgg(figure).draw()
    (caption,) = (text for text in figure.axes[0].texts if "…" in text.get_text())
    assert caption.get_window_extent().x1 <= figure.bbox.x1


def test_makespans_are_not_compared_with_steps() -> None:
    """Where one plan's step is not known, the fastest is told by the makespans of all."""
    profile = gb.Profile.from_costs([1.0, 1.0, 1.0, 1.0], chunks=4)
    few, many = (gb.solve(profile, 2, chunks=chunks) for chunks in (2, 8))
    object.__setattr__(few, "step_time", 1000 * many.makespan)
    drawn = plot_chunks([few, many])
    alone = plot_chunks([gb.solve(profile, 2, chunks=2), many])
    assert drawn.get_title(loc="left") == alone.get_title(loc="left") != ""
