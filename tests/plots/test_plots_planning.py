"""Pictures for planning: memory over time, numbers of micro-batches, schedules side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Annotation
from plot_cases import check_layout, make_case, texts_of

from gpipebal.errors import UsageError
from gpipebal.plan import PeakMemory, Plan
from gpipebal.planner import solve
from gpipebal.plots import (
    partition_colours,
    plot_chunks,
    plot_memory,
    plot_partitions,
    plot_schedules,
    plot_timelines,
)
from gpipebal.plots.style import NEUTRAL
from gpipebal.profile import Profile
from gpipebal.schedule_comparison import compare_schedules
from gpipebal.simulator import (
    CellBytes,
    Durations,
    HeldBytes,
    MemoryTrack,
    ScheduleTable,
    held_of,
    memory_over_time,
    simulate,
)
from gpipebal.timeline import Timeline

#: Layers, partitions and micro-batches at which pictures become crowded or bare.
SIZES = [(1, 1, 1), (24, 4, 8), (370, 64, 2)]


def tracks_of(size: tuple[int, int, int], scale: float = 1e-3) -> tuple[MemoryTrack, ...]:
    """Follow the memory of a simulated case."""
    profile, plan = make_case(*size, "never", scale)
    return memory_over_time(simulate(plan), held_of(profile, plan))


def plans_of(chunks: Sequence[int], *, known: bool = True, memory: int = 1000) -> list[Plan]:
    """Make plans of one mini-batch whose peak memory is `memory` over the micro-batches."""
    plans = []
    for m in chunks:
        plan = make_case(6, 2, m)[1]
        parts = tuple(
            replace(part, memory=PeakMemory(activations=memory // m)) for part in plan.partitions
        )
        step_time = 1.2 * plan.makespan if known else None
        plans.append(replace(plan, partitions=parts, step_time=step_time, rows=64 // m))
    return plans


def figure_of(ax: Axes) -> Figure:
    """Return the whole figure of an axes."""
    figure = ax.get_figure(root=True)
    assert isinstance(figure, Figure)
    return figure


@pytest.mark.parametrize("limit", [None, "1 KiB", "1 MiB"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_memory_is_legible_at_every_size(size: tuple[int, int, int], limit: str | None) -> None:
    """From one partition to 64, above and below a limit, nothing is cut off or overlaps."""
    check_layout(figure_of(plot_memory(tracks_of(size), limit=limit)))


def test_memory_rows_hold_what_the_tracks_hold() -> None:
    """The areas of a row end where the track's total does, on one scale for all rows."""
    tracks = tracks_of((6, 2, 3))
    ax = plot_memory(tracks)
    areas = [c for c in ax.collections if isinstance(c, PolyCollection)]
    assert len(areas) == 3 * len(tracks)
    tops = [min(path.vertices[:, 1].min() for path in areas[k].get_paths()) for k in range(6)]
    heights = [1 - tops[2], 2 - tops[5]]
    first, second = (track.peak for track in tracks)
    assert heights[0] / heights[1] == pytest.approx(first / second)
    assert max(heights) < 1
    assert [to_rgb(areas[k].get_facecolor()[0]) for k in (0, 3)] == partition_colours(2)


def test_memory_says_which_devices_are_above_the_limit() -> None:
    """Peaks above the limit are marked, counted in the title, and below it nothing is."""
    tracks = tracks_of((6, 2, 3))
    low, high = sorted(track.peak for track in tracks)
    assert low < high
    for limit, title in (
        (high, "all below the limit"),
        (low, "1 of 2 above the limit"),
        ([0, 0], "2 of 2 above the limit"),
    ):
        ax = plot_memory(tracks, limit=limit)
        assert ax.get_title(loc="left").endswith(title)
        marked = sum(text.get_text().endswith("!") for text in ax.texts)
        assert marked == int(title[0] if title[0].isdigit() else 0)
        named = [text.get_text().split()[0] for text in ax.get_legend().get_texts()]
        assert "limit" in named
    assert "limit" not in plot_memory(tracks).get_title(loc="left")


# Of many rows, the highest is once the one at an end and once the one beside it, at both ends.
@pytest.mark.parametrize(
    ("n", "high"),
    [
        *[(n, high) for n in (8, 32) for high in (0, 1, -2, -1)],
        *[(2, 0), (2, 1), (64, 1), (64, -1), (128, 0), (128, -2)],
    ],
)
def test_memory_labels_the_highest_row(n: int, high: int) -> None:
    """However many rows there are, the one with the highest peak has its number and its peak."""
    top = high % n
    held = [HeldBytes(recorded=CellBytes(graph=2048 if j == top else 1024)) for j in range(n)]
    tracks = memory_over_time(simulate(make_case(n, n, 2, "never")[1]), held)
    ax = plot_memory(tracks, limit=3072)
    check_layout(figure_of(ax))
    assert str(top) in [label.get_text() for label in ax.get_yticklabels()]
    labels = {text.get_text(): text.xy[1] for text in ax.texts if isinstance(text, Annotation)}
    assert labels["4.00 KiB !"] == top + 0.55
    assert "limit 3.00 KiB" in [text.get_text() for text in ax.get_legend().get_texts()]


@pytest.mark.parametrize("n", [8, 64, 128])
def test_one_limit_of_many_rows_is_one_line(n: int) -> None:
    """Where rows are low, a limit that all have is drawn once, and the rows above it are marked."""
    held = [HeldBytes(recorded=CellBytes(graph=1000 + j)) for j in range(n)]
    tracks = memory_over_time(simulate(make_case(n, n, 2, "never")[1]), held)
    limit = 2 * 1000 + n
    ax = plot_memory(tracks, limit=limit)
    check_layout(figure_of(ax))
    lines = [line for line in ax.get_lines() if line.is_dashed()]
    marks = [patch for patch in ax.patches if isinstance(patch, Rectangle)]
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    if n == 8:
        assert len(lines) == n and not marks
    else:
        assert [int(lines[0].get_ydata()[0])] == [n - 1] and len(lines) == 1
        above = [j for j in range(n) if tracks[j].peak > limit]
        assert [mark.get_y() for mark in marks] == above and above
        assert "above the limit" in names
    several = plot_memory(tracks, limit=[limit + j for j in range(n)])
    assert sum(line.is_dashed() for line in several.get_lines()) == n
    assert "limit" in [text.get_text() for text in several.get_legend().get_texts()]


def test_a_limit_far_away_leaves_the_rows_their_height() -> None:
    """What is held is drawn as if there were no such limit, and the title tells of it."""
    tracks = tracks_of((24, 4, 8))
    far = 100 * 2**30
    plain, ax = plot_memory(tracks), plot_memory(tracks, limit=far)
    for one, other in zip(plain.collections, ax.collections, strict=True):
        assert [path.vertices.tolist() for path in one.get_paths()] == [
            path.vertices.tolist() for path in other.get_paths()
        ]
    assert ax.get_title(loc="left").endswith("all far below the limit of 100 GiB")
    assert not any(line.is_dashed() for line in ax.get_lines())
    mixed = plot_memory(tracks, limit=[far, None, tracks[2].peak, far])
    assert sum(line.is_dashed() for line in mixed.get_lines()) == 1
    title = mixed.get_title(loc="left")
    assert title.endswith("all below the limit (100 GiB: too far above to be drawn)")


def test_memory_of_some_devices_has_the_colours_of_all() -> None:
    """A partition has its own hue in every picture; a device with several has none."""
    tracks = tracks_of((24, 4, 8))
    some = plot_memory(tracks[1:]).collections[0].get_facecolor()
    assert tuple(some[0][:3]) == partition_colours(4)[1]
    shared = [replace(track, partitions=(track.device, track.device + 4)) for track in tracks]
    colours = plot_memory(shared).collections[0].get_facecolor()
    assert tuple(colours[0][:3]) == NEUTRAL


def test_memory_without_sizes_says_so() -> None:
    """Missing sizes give an empty picture with its reason, with times and without."""
    timeline = simulate(make_case(6, 2, 3)[1])
    for tracks in (
        memory_over_time(timeline, [HeldBytes()] * 2),
        tracks_of((6, 2, 3), 0.0),
    ):
        ax = plot_memory(tracks)
        assert "no sizes in this profile" in [text.get_text() for text in ax.texts]
        check_layout(figure_of(ax))


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ([1, 2, 3], r"len\(limit\)=3 \(expected 2"),
        ("much", "limit is not readable"),
        (-1, "limit=-1"),
    ],
)
def test_memory_refuses_limits_that_are_none(limit: Any, message: str) -> None:
    """A limit is a size, one for all or one for each; the error says so."""
    with pytest.raises(UsageError, match=message):
        plot_memory(tracks_of((6, 2, 3)), limit=limit)


@pytest.mark.parametrize("chunks", [[1], [1, 2, 4, 8, 16, 32, 64], range(1, 41)], ids=len)
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("limit", [None, "300 B", 1])
def test_chunks_are_legible(chunks: Sequence[int], known: bool, limit: Any) -> None:
    """One candidate or forty, with step times or without, nothing is cut off or overlaps."""
    ax = plot_chunks(plans_of(chunks, known=known), limit=limit)
    check_layout(figure_of(ax))
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert ("training step" in labels) == known and ("limit" in labels) == (limit is not None)


def test_chunks_bars_are_work_and_idle_time() -> None:
    """A bar is a makespan, its lower part what devices work on average."""
    plans = plans_of([4, 1, 2])
    ax = plot_chunks(plans)
    work, idle = ([bar.get_height() for bar in container] for container in ax.containers)
    by_chunks = [plans[1], plans[2], plans[0]]
    tops = [1e3 * plan.makespan for plan in by_chunks]
    assert [w + i for w, i in zip(work, idle, strict=True)] == pytest.approx(tops)
    shares = [i / top for i, top in zip(idle, tops, strict=True)]
    assert shares == pytest.approx([plan.bubble_fraction for plan in by_chunks])
    labels = [label.get_text().split("\n")[0] for label in ax.get_xticklabels()]
    assert labels == ["1", "2", "4"]


def test_a_memory_limit_does_not_look_like_one_of_time() -> None:
    """Wherever it is, it does not run along the top of the longest bar."""
    plans = plans_of([1, 2, 4])
    ax = plot_chunks(plans, limit="1 GiB")
    (right,) = [other for other in figure_of(ax).axes if other is not ax]
    tallest = max(bar.get_y() + bar.get_height() for bar in ax.patches) / ax.get_ylim()[1]
    line = right.get_lines()[-1].get_ydata()[0] / right.get_ylim()[1]
    assert line - tallest > 0.04


def test_chunks_names_the_fastest_that_fits() -> None:
    """The title names the shortest step among the plans below the limit."""
    plans = plans_of([1, 2, 4])
    times = [plan.step_time for plan in plans]
    assert times == sorted(times, key=lambda time: time or 0.0)
    for limit, name in ((None, "1 micro-batch:"), (500, "2 micro-batches:"), (300, "4 micro")):
        assert name in plot_chunks(plans, limit=limit).get_title(loc="left")
    title = plot_chunks(plans, limit=10).get_title(loc="left")
    assert title == "No number of micro-batches stays below the limit"


def test_unknown_peaks_are_gaps_and_below_no_limit() -> None:
    """A schedule that only other software runs has no peak: no line goes down to 0 there."""
    known, unknown = plans_of([2, 4]), [replace(plan, schedule="zb_h1") for plan in plans_of([8])]
    ax = plot_chunks([*known, *unknown], limit=known[1].peak_bytes)
    (right,) = [other for other in figure_of(ax).axes if other is not ax]
    peaks = right.get_lines()[0].get_ydata()
    assert np.isnan(peaks).tolist() == [False, False, True]
    assert ax.get_title(loc="left").startswith("Fastest with 4 micro-batches")
    ax = plot_chunks(unknown, limit="1 MiB")
    assert ax.get_title(loc="left") == "No number of micro-batches is known to stay below the limit"
    (right,) = [other for other in figure_of(ax).axes if other is not ax]
    assert [line.get_label() for line in right.get_lines()] == ["limit"]


def test_of_mini_batches_of_different_sizes_none_is_the_fastest() -> None:
    """Each of these has micro-batches of two rows: more of them take longer, and do more."""
    plans = [make_case(6, 2, m)[1] for m in (2, 8)]
    assert plot_chunks(plans).get_title(loc="left") == "Mini-batches of 4 to 16 rows"


@pytest.mark.parametrize("rows", [1, 2])
def test_mini_batches_that_grow_are_of_different_sizes(rows: int) -> None:
    """With one known size each micro-batch has all its rows, even where it has only one."""
    profile = Profile.from_costs([3.0, 1.0, 4.0], rows=rows, chunks=4)
    plans = [solve(profile, 2, chunks=chunks) for chunks in (4, 5, 8)]
    title = plot_chunks(plans).get_title(loc="left")
    assert title == f"Mini-batches of {4 * rows} to {8 * rows} rows"


def test_one_mini_batch_in_uneven_micro_batches_has_a_fastest() -> None:
    """Where some micro-batches have fewer rows than others, it is still the same mini-batch."""
    sizes = [Profile.from_costs([1.0, 1.0], rows=rows) for rows in (1, 4, 13)]
    profile = replace(sizes[2], other_sizes=tuple(sizes[:2]), mini_batch_rows=13)
    plans = [solve(profile, 2, chunks=chunks) for chunks in range(1, 14)]
    assert len({plan.rows * plan.chunks for plan in plans}) > 1
    assert plot_chunks(plans).get_title(loc="left").startswith("Fastest with 1 micro-batch:")
    plans.append(solve(profile.at_rows(4, mini_batch_rows=16), 2))
    assert plot_chunks(plans).get_title(loc="left") == "Mini-batches of 13 to 16 rows"


def test_chunks_without_memory_has_one_axis() -> None:
    """Where no sizes are known there is no empty axis for them; zero times are said."""
    ax = plot_chunks(plans_of([1, 2], memory=0))
    assert len(figure_of(ax).axes) == 1
    zero = plot_chunks([make_case(6, 2, m, scale=0.0)[1] for m in (1, 2)])
    assert "all times are 0" in [text.get_text() for text in zero.texts]
    check_layout(figure_of(zero))


def tables() -> list[ScheduleTable]:
    """Compare schedules of few and many devices, with refusals and without times."""
    some, zero = make_case(24, 4, 8)[0], make_case(6, 2, 3, scale=0.0)[0]
    return [
        compare_schedules(some, 4, chunks=8),
        compare_schedules(some, 4, chunks=7, partitions_per_device=(2, 3, 7)),
        compare_schedules(some, 1, chunks=1),
        compare_schedules(zero, 2, chunks=4),
    ]


@pytest.mark.parametrize("table", tables(), ids=["even", "odd", "one", "zero"])
def test_schedules_are_legible(table: ScheduleTable) -> None:
    """Bars with their texts fit the picture, alone and on narrow axes."""
    check_layout(figure_of(plot_schedules(table)))
    ax = Figure(figsize=(4.5, 3.5), layout="constrained").add_subplot()
    assert plot_schedules(table, ax=ax) is ax
    check_layout(figure_of(ax))


def test_schedules_bars_are_makespans() -> None:
    """Each schedule has a bar as long as its makespan, in the order of the table."""
    table = tables()[0]
    ax = plot_schedules(table)
    pairs = [(work[0], idle[0]) for work, idle in zip(*[iter(ax.containers)] * 2, strict=True)]
    lengths = [(work.get_width() + idle.get_width()) / 1e3 for work, idle in pairs]
    assert lengths == pytest.approx([row.makespan for row in table.rows])
    assert ax.get_yticklabels()[0].get_text() == table.best.schedule
    refused = plot_schedules(tables()[1])
    assert "cannot be made" in [text.get_text() for text in refused.texts]


def test_timelines_stand_below_each_other() -> None:
    """Every timeline has its name, makespan and bubble above it, in relation to the first."""
    plan = make_case(6, 2, 4, "never")[1]
    named = {name: simulate(plan, name) for name in ("gpipe", "1f1b", "zb_h1")}
    ax = plot_timelines(named)
    captions = [text.get_text() for text in ax.texts if "makespan" in text.get_text()]
    assert [caption.split(":")[0] for caption in captions] == list(named)
    assert "(" not in captions[0] and all("%), bubble" in caption for caption in captions[1:])
    check_layout(figure_of(ax))
    with pytest.raises(UsageError, match="nothing to draw"):
        plot_timelines({})


def test_a_partition_has_one_colour_in_all_timelines() -> None:
    """Also where one of them has more partitions than there are colours."""
    profile = Profile.from_costs([1.0] * 8, chunks=4)
    few, many = (simulate(solve(profile, n, checkpoint="never")) for n in (4, 8))
    ax = plot_timelines({"few": few, "many": many})
    faces = [
        to_rgb(bars.get_facecolor()[0]) for bars in ax.collections if len(bars.get_facecolor())
    ]
    colours = partition_colours(8)
    # Forwards of the first four partitions are in both.
    assert [faces.count(colour) for colour in colours] == [2] * 4 + [1] * 4


def test_names_of_timelines_are_no_formulas() -> None:
    """A dollar sign in a name is drawn as it is, and a long name is not cut by a measure."""
    timeline = Timeline((), 1)
    ax = plot_timelines({"a$b$c" * 30: timeline})
    assert any("a$b$c" in text.get_text() and not text.get_parse_math() for text in ax.texts)


def check_clear_of_the_mean(plan: Plan) -> None:
    """Verify that between each total and the line of the mean there are two points at least."""
    ax = plot_partitions(plan)
    check_layout(figure_of(ax))
    (line,) = ax.get_lines()
    height = ax.transData.transform((0, float(line.get_ydata()[0])))[1]
    boxes = [t.get_window_extent() for t in texts_of(ax) if t.get_text().endswith("ms")]
    assert boxes
    away = 2 * figure_of(ax).dpi / 72
    assert not any(box.y0 - away < height < box.y1 + away for box in boxes)


@pytest.mark.parametrize("size", [(24, 4, 8), (6, 2, 3), (3, 1, 1)])
def test_totals_keep_clear_of_the_mean_line(size: tuple[int, int, int]) -> None:
    """A total that the mean line would strike out stands inside its bar, or above the line."""
    check_clear_of_the_mean(make_case(*size)[1])


@pytest.mark.parametrize("percent", range(-13, 14))
def test_totals_keep_clear_wherever_the_mean_lies(percent: int) -> None:
    """From far below the top of a bar to far above it, its total does not touch the line."""
    for part in (1.0, 0.3):
        size = 0.1 * (1 + part * percent / 100)
        profile = Profile.from_costs([0.1, 0.1, size], [0.0] * 3, chunks=4)
        check_clear_of_the_mean(solve(profile, 3, checkpoint="never"))


def test_transfers_stand_on_top_of_the_work() -> None:
    """Where a plan counts transfers, a partition's bar has them above its backward."""
    plan = make_case(6, 2, 3, "never")[1]
    first, second = plan.partitions
    parts = (replace(first, return_time=0.004), replace(second, receive_time=0.003))
    ax = plot_partitions(replace(plan, partitions=parts))
    assert [bar.get_height() for bar in ax.containers[-1]] == pytest.approx([4.0, 3.0])
    assert "transfer" in [text.get_text() for text in ax.get_legend().get_texts()]
    assert [text.get_text() for text in ax.texts] == ["31.0 ms", "24.0 ms"]
    assert len(plot_partitions(plan).containers) == 2


def test_memory_draws_on_given_axes() -> None:
    """The pictures go onto the axes that the caller gives."""
    ax = Figure(layout="constrained").subfigures(1, 2)[1].add_subplot()
    assert plot_memory(tracks_of((6, 2, 3)), ax=ax) is ax
    check_layout(figure_of(ax))
    ax = Figure(layout="constrained").add_subplot()
    assert plot_chunks(plans_of([1, 2]), ax=ax) is ax


@pytest.mark.parametrize("draw", [plot_memory, plot_chunks], ids=["memory", "chunks"])
def test_nothing_to_draw_is_refused(draw: Any) -> None:
    """An empty picture is a mistake of the caller's, and the error says what to give."""
    with pytest.raises(UsageError, match=r"there is nothing to draw: .*=\(\)"):
        draw([])


def test_devices_with_several_partitions_are_rows() -> None:
    """Where devices have several partitions, the rows are devices."""
    plan = make_case(8, 4, 4, "never")[1]
    timeline = simulate(plan, "interleaved_1f1b")
    assert Durations.of_plan(plan).n_partitions == 4
    tracks = memory_over_time(timeline, [HeldBytes(recorded=CellBytes(graph=10))] * 4)
    ax = plot_memory(tracks)
    assert ax.get_ylabel() == "device" and len(ax.get_yticks()) == 2


@pytest.mark.parametrize("length", [30, 120, 500])
def test_long_names_take_nothing_from_the_bars(length: int) -> None:
    """A long name, such as a path, is cut in its middle; the picture stays what it is."""
    timeline = simulate(make_case(24, 2, 4)[1])
    name = f"first{'-' * length}\nlast"
    ax, plain = plot_timelines({name: timeline}), plot_timelines({"plan": timeline})
    assert ax.get_window_extent().width == pytest.approx(plain.get_window_extent().width, rel=0.01)
    check_layout(figure_of(ax))
    (caption,) = (text.get_text() for text in ax.texts if "last:" in text.get_text())
    assert caption.startswith("first-") and "\n" not in caption
    assert ("…" in caption) == (length == 500)


def test_limits_are_those_that_a_plan_takes() -> None:
    """A number with a point, and devices without a limit, are drawn as `solve` takes them."""
    tracks = tracks_of((24, 2, 4))
    assert "below the limit" in plot_memory(tracks, limit=1e9).get_title(loc="left")
    ax = plot_memory(tracks, limit=[None, 1])
    assert "1 of 2 above the limit" in ax.get_title(loc="left")
    assert "limit" not in plot_memory(tracks, limit=[None, None]).get_title(loc="left")
    with pytest.raises(UsageError, match=r"limit=0\.5"):
        plot_memory(tracks, limit=0.5)
