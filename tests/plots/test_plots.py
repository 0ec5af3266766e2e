"""Tests of gpipebal.plots: every number is drawn, in its colour, and nothing is cut off."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from plot_cases import check_layout, make_case, measured_from
from torch import nn

from gpipebal.errors import KindError, ProfileError, UsageError
from gpipebal.plan import Plan
from gpipebal.planner import evaluate, recompute_layers, solve
from gpipebal.plots import (
    partition_colours,
    plot_balance,
    plot_partitions,
    plot_profile,
    plot_run,
    plot_timeline,
    plot_timelines,
    save_figure,
)
from gpipebal.plots.style import kind_style, readable_on
from gpipebal.problem import Device
from gpipebal.profile import Profile
from gpipebal.profiler import profile_model
from gpipebal.schedule import CheckpointMode
from gpipebal.simulator import durations_of, simulate
from gpipebal.timeline import Event, Timeline
from gpipebal.units import format_bytes, format_seconds

#: Layers, partitions and micro-batches at which pictures become crowded or bare.
SIZES = [(1, 1, 1), (3, 1, 4), (24, 4, 8), (370, 3, 2), (64, 64, 2), (370, 64, 8)]


def make_figure(size: tuple[int, int, int]) -> Figure:
    """Draw a whole run of one of the sizes."""
    profile, plan = make_case(*size)
    predicted = simulate(plan)
    return plot_run(profile, plan, predicted, measured_from(predicted))


def cells_of(ax: Axes) -> int:
    """Count the rectangles of a Gantt chart."""
    collections = [c for c in ax.collections if isinstance(c, PolyCollection)]
    return sum(len(collection.get_paths()) for collection in collections)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_run_is_legible_at_every_size(size: tuple[int, int, int]) -> None:
    """From one layer to 370 and from one partition to 64 nothing is cut off or overlaps."""
    figure = make_figure(size)
    assert len(figure.axes) == 3
    check_layout(figure)


DRAWERS: dict[str, Callable[[Profile, Plan], Axes]] = {
    "profile": lambda profile, plan: plot_profile(profile),
    "profile-memory": lambda profile, plan: plot_profile(profile, by="memory"),
    "balance": plot_balance,
    "balance-memory": lambda profile, plan: plot_balance(profile, plan, by="memory"),
    "partitions": lambda profile, plan: plot_partitions(plan),
    "timeline": lambda profile, plan: plot_timeline(simulate(plan)),
}


@pytest.mark.parametrize("draw", DRAWERS.values(), ids=DRAWERS)
@pytest.mark.parametrize("size", [(3, 1, 1), (24, 4, 8), (370, 64, 2)], ids=str)
def test_single_picture_is_legible(
    draw: Callable[[Profile, Plan], Axes], size: tuple[int, int, int]
) -> None:
    """Every picture makes a figure of its own in which nothing is cut off or overlaps."""
    figure = draw(*make_case(*size)).figure
    assert isinstance(figure, Figure)
    check_layout(figure)


@pytest.mark.parametrize("draw", DRAWERS.values(), ids=DRAWERS)
def test_zero_costs_are_drawn_as_a_note(draw: Callable[[Profile, Plan], Axes]) -> None:
    """Without any time or size there are no bars to see, and the picture says why."""
    ax = draw(*make_case(6, 2, 3, scale=0.0))
    notes = {text.get_text() for text in ax.texts}
    reasons = notes & {"all times are 0", "no parameters and nothing saved in this profile"}
    assert reasons
    # It covers the lines behind it.
    assert all(text.get_bbox_patch() for text in ax.texts if text.get_text() in reasons)
    check_layout(ax.figure)


@pytest.mark.parametrize("draw", DRAWERS.values(), ids=DRAWERS)
def test_given_axes_are_drawn_on_and_returned(draw: Callable[[Profile, Plan], Axes]) -> None:
    """A picture goes onto the axes that the caller gives, also of a part of a figure."""
    profile, plan = make_case(6, 2, 3)
    ax = Figure(layout="constrained").subfigures(1, 2)[1].add_subplot()
    calls: dict[str, Callable[[], Axes]] = {
        "profile": lambda: plot_profile(profile, ax=ax),
        "profile-memory": lambda: plot_profile(profile, ax=ax, by="memory"),
        "balance": lambda: plot_balance(profile, plan, ax=ax),
        "balance-memory": lambda: plot_balance(profile, plan, ax=ax, by="memory"),
        "partitions": lambda: plot_partitions(plan, ax=ax),
        "timeline": lambda: plot_timeline(simulate(plan), ax=ax),
    }
    name = next(name for name, other in DRAWERS.items() if other is draw)
    assert calls[name]() is ax
    figure = ax.get_figure(root=True)
    assert isinstance(figure, Figure)
    check_layout(figure)


def heights_of(ax: Axes) -> list[list[float]]:
    """Return the heights of the bars, one list per kind of work."""
    return [[bar.get_height() for bar in container] for container in ax.containers]


def test_profile_bars_are_its_times() -> None:
    """A layer's bar is its forward and its backward, in the unit that the axis names."""
    profile = Profile.from_costs([0.001, 0.002, 0.003])
    ax = plot_profile(profile)
    assert ax.get_ylabel() == "time [ms]"
    assert heights_of(ax) == [
        pytest.approx([1.0, 2.0, 3.0]),
        pytest.approx([2.0, 4.0, 6.0]),
    ]
    assert ax.get_title(loc="left") == "3 layers, micro-batch of 1 row: 18.0 ms in sum"


def test_profile_bars_are_its_sizes() -> None:
    """By memory a bar is what a layer keeps for the step, and what it saves for its backward."""
    profile = Profile.from_costs([0.0, 0.0], parameter_bytes=[1024, 0], saved_bytes=[0, 3072])
    ax = plot_profile(profile, by="memory")
    assert ax.get_ylabel() == "memory [KiB]"
    # Parameters count twice: with their gradients.
    assert heights_of(ax) == [[2.0, 0.0], [0.0, 3.0]]


def test_the_gradient_of_tied_parameters_counts_once_in_the_title() -> None:
    """As do the parameters themselves."""
    weight = nn.Linear(64, 64)
    model, sample = nn.Sequential(weight, nn.ReLU(), weight), torch.ones(2, 64)
    profile = profile_model(model, sample, rows=(), method="estimate", rates="CPU core")
    layers = profile.layers
    twice = sum(x.parameter_bytes + x.gradient_bytes for x in layers)
    saved = profile.bytes_of({index for layer in layers for index in layer.saved})
    together = format_bytes(twice - profile.ties[0].gradient_bytes + saved)
    assert plot_profile(profile, by="memory").get_title(loc="left").endswith(f"{together} together")


@pytest.mark.parametrize(("checkpoint", "kinds"), [("never", 2), ("always", 3)])
def test_balance_colours_layers_by_partition(checkpoint: CheckpointMode, kinds: int) -> None:
    """All bars of a partition's layers have its hue; recompute is there if the plan does it."""
    profile, plan = make_case(24, 4, 8, checkpoint)
    ax = plot_balance(profile, plan)
    assert [len(container) for container in ax.containers] == [24] * kinds
    colours = partition_colours(4)
    forward = [to_rgb(bar.get_facecolor()) for bar in ax.containers[0]]
    assert forward == [colours[layer // 6] for layer in range(24)]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == (
        ["forward", "recompute", "backward"] if kinds == 3 else ["forward", "backward"]
    )


def test_balance_names_partitions_and_their_totals() -> None:
    """Above the layers stand the partitions with what they take for one micro-batch."""
    profile, plan = make_case(6, 2, 3, "always")
    assert [text.get_text() for text in plot_balance(profile, plan).texts] == [
        "partition 0\n36.0 ms",
        "partition 1\n28.0 ms",
    ]
    assert [text.get_text() for text in plot_balance(profile, plan, by="memory").texts] == [
        "partition 0\n7.81 KiB",
        "partition 1\n6.84 KiB",
    ]


def test_balance_bars_add_up_to_the_totals() -> None:
    """The bars of a partition's layers are as high as its total, recompute included."""
    profile, plan = make_case(24, 4, 8)
    columns = zip(*heights_of(plot_balance(profile, plan)), strict=True)
    layers = [sum(column) / 1e3 for column in columns]
    totals = [sum(layers[6 * j : 6 * j + 6]) for j in range(4)]
    assert totals == pytest.approx([plan.micro_batch_time(j) for j in range(4)])


#: Plans that count with other times than the profile has at its own rows.
OTHER_TIMES: dict[str, Callable[[Profile], Plan]] = {
    "other rows": lambda profile: solve(profile, 3, chunks=8),
    "modes": lambda profile: evaluate(profile, [2, 2, 2], checkpoint=["always", "never", "always"]),
    "devices": lambda profile: solve(profile, 3, devices=[1, 2, 0.5]),
    "quantile": lambda profile: solve(profile, 3, quantile=0.9),
    "runs": lambda profile: (
        recompute_layers(
            profile, solve(profile, 3, checkpoint="never"), memory_limit=900, reserve=0
        ).plan
    ),
    "no time": lambda profile: solve(
        replace(
            profile, layers=tuple(replace(layer, forward_time=0.0) for layer in profile.layers)
        ),
        3,
        devices=[Device(forward=[1.0] * 6, backward=[2.0] * 6, recompute=[1.0] * 6), 1, 1],
    ),
}


@pytest.mark.parametrize("name", OTHER_TIMES)
def test_balance_bars_add_up_to_what_the_plan_counts(name: str) -> None:
    """Whatever the plan counts with, its bars and its totals say the same."""
    costs = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0]
    sizes = {"saved_bytes": [40] * 6, "output_bytes": [1] * 6}
    other = Profile.from_costs([cost / 2 + 0.1 for cost in costs], rows=2, **sizes)
    profile = Profile.from_costs(costs, rows=4, chunks=4, **sizes)
    layers = (replace(layer, forward_spread=0.2, backward_spread=0.1) for layer in profile.layers)
    profile = replace(profile, layers=tuple(layers), other_sizes=(other,))
    plan = OTHER_TIMES[name](profile)
    columns = zip(*heights_of(plot_balance(profile, plan)), strict=True)
    layers_ = [sum(column) for column in columns]
    starts = [sum(plan.balance[:j]) for j in range(4)]
    totals = [sum(layers_[a:b]) for a, b in pairwise(starts)]
    assert totals == pytest.approx([plan.micro_batch_time(j) for j in range(3)])


def test_balance_with_a_narrow_partition_keeps_the_other_names() -> None:
    """A partition of one layer among 370 has no room for a name; the others keep theirs."""
    profile, plan = make_case(370, 2, 2)
    first, second = plan.partitions
    moved = replace(first, layers=(first.layers[0],), fingerprints=("",))
    rest = replace(
        second, layers=first.layers[1:] + second.layers, fingerprints=("",) * (plan.n_layers - 1)
    )
    ax = plot_balance(profile, replace(plan, partitions=(moved, rest)))
    assert [text.get_text().split("\n")[0] for text in ax.texts] == ["partition 1"]
    check_layout(ax.figure)


def test_partitions_bars_are_their_times() -> None:
    """A bar per partition is stacked from its times, with the total above and the mean across."""
    _, plan = make_case(6, 2, 3, "always")
    ax = plot_partitions(plan)
    assert heights_of(ax) == [
        pytest.approx([9.0, 7.0]),
        pytest.approx([9.0, 7.0]),
        pytest.approx([18.0, 14.0]),
    ]
    assert [text.get_text() for text in ax.texts] == ["36.0 ms", "28.0 ms"]
    (mean,) = ax.get_lines()
    assert list(mean.get_ydata()) == pytest.approx([32.0, 32.0])
    assert ax.get_title(loc="left") == "Partitions: mean 32.0 ms, imbalance 1.125"


def test_partition_labels_are_thinned() -> None:
    """64 partitions get every fifth number, and no totals that would not fit."""
    _, plan = make_case(64, 64, 2)
    figure = Figure(figsize=(5, 3), layout="constrained")
    ax = plot_partitions(plan, ax=figure.add_subplot())
    assert [label.get_text() for label in ax.get_xticklabels()] == [str(j) for j in range(0, 64, 5)]
    assert not ax.texts


@pytest.mark.parametrize(
    ("n_layers", "name", "labels", "axis"),
    [
        (3, "conv", ["conv0", "conv1", "conv2"], "layer"),
        (2, "a$b_", ["a$b_0", "a$b_1"], "layer"),
        (25, "blocks.attention", ["blocks.attention0"], "layer"),
        (25, "model.blocks.attention", ["model.blocks.…ntion0"], "layer"),
        (370, "conv", ["0", "20", "40"], "layer (index)"),
    ],
)
def test_layer_labels_fit(n_layers: int, name: str, labels: list[str], axis: str) -> None:
    """Layers are labelled by name, long names are cut in the middle, many layers by index."""
    profile = Profile.from_costs([1.0] * n_layers, names=[f"{name}{i}" for i in range(n_layers)])
    ax = plot_profile(profile)
    assert [label.get_text() for label in ax.get_xticklabels()][: len(labels)] == labels
    assert ax.get_xlabel() == axis
    check_layout(ax.figure)


@pytest.mark.parametrize("draw", [plot_profile, plot_balance], ids=["profile", "balance"])
def test_upright_names_take_nothing_from_the_bars(draw: Any) -> None:
    """Names that stand upright make a picture higher; axes that are given shrink instead."""
    profile, plan = make_case(24, 4, 8)
    names = tuple(f"block_{index}_feedforward" for index in range(24))
    named = replace(
        profile,
        layers=tuple(
            replace(layer, name=name) for layer, name in zip(profile.layers, names, strict=True)
        ),
    )
    rest = () if draw is plot_profile else (solve(named, 4),)
    plain, upright = draw(profile, *(plan,)[: len(rest)]), draw(named, *rest)
    for ax in (plain, upright):
        check_layout(ax.figure)
    heights = [ax.get_window_extent().height for ax in (plain, upright)]
    assert heights[1] == pytest.approx(heights[0], rel=0.05)
    ax = Figure(figsize=(9.0, 3.6), layout="constrained").add_subplot()
    draw(named, *rest, ax=ax)
    assert tuple(ax.figure.get_size_inches()) == (9.0, 3.6)
    assert ax.get_xticklabels()[10].get_text() == "block_10_…orward"


@pytest.mark.parametrize("size", [(3, 1, 1), (24, 4, 8), (64, 64, 8)], ids=str)
def test_timeline_draws_every_event(size: tuple[int, int, int]) -> None:
    """A Gantt chart has one rectangle per event, and one of idle time per partition."""
    timeline = simulate(make_case(*size)[1])
    assert cells_of(plot_timeline(timeline)) == len(timeline.events) + timeline.n_partitions


def test_timeline_rows_have_the_hue_of_their_partition() -> None:
    """A partition has the same colour in a Gantt chart as in the bars."""
    timeline = Timeline((Event(0, "F", 0, 0, 1), Event(1, "F", 0, 1, 3)), 2)
    faces = [
        to_rgb(c.get_facecolor()[0])
        for c in plot_timeline(timeline).collections
        if isinstance(c, PolyCollection)
    ]
    assert faces[-2:] == partition_colours(2)


def test_timeline_numbers_the_cells() -> None:
    """A cell of a forward or backward shows its micro-batch; a recompute is hatched instead."""
    timeline = simulate(make_case(6, 2, 3, "always")[1])
    texts = [text.get_text() for text in plot_timeline(timeline).texts]
    assert sorted(texts[:-1]) == sorted("012" * 4)
    assert texts[-1] == "Predicted: makespan 127 ms, bubble 24.4 %"


def test_timeline_leaves_numbers_out_where_they_do_not_fit() -> None:
    """Cells of 64 rows in 4 inches are too low for numbers, so only the caption is left."""
    ax = Figure(figsize=(6, 4), layout="constrained").add_subplot()
    (caption,) = plot_timeline(simulate(make_case(64, 64, 8)[1]), ax=ax).texts
    assert caption.get_text().startswith("Predicted: makespan")


@pytest.mark.parametrize("swap", [False, True])
def test_prediction_stands_above_measurement(swap: bool) -> None:
    """Two timelines share a time axis, the prediction above, whichever way they are given."""
    predicted = simulate(make_case(6, 2, 3, "always")[1])
    pair = (predicted, measured_from(predicted))
    first, second = pair[::-1] if swap else pair
    ax = plot_timeline(first, beside=second)
    captions = [text for text in ax.texts if "makespan" in text.get_text()]
    assert [text.get_text() for text in captions] == [
        "Predicted: makespan 127 ms, bubble 24.4 %",
        "Measured: makespan 140 ms (+10.0 %), bubble 24.4 %",
    ]
    upper, lower = (text.get_position()[1] for text in captions)
    top, bottom = ax.get_ylim()[1], ax.get_ylim()[0]
    assert top < upper < lower < bottom
    assert ax.get_xlabel() == "time since the first start [ms]"
    assert ax.get_xlim()[1] >= 139.7


def test_timeline_draws_copies_as_thin_bars() -> None:
    """A copy is drawn beside what its partition computes, and named in the legend."""
    timeline = Timeline((Event(0, "F", 0, 0, 2), Event(0, "C", 1, 1, 3)), 1)
    ax = plot_timeline(timeline)
    assert cells_of(ax) == 3
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "forward",
        "copy",
        "idle",
    ]


def test_run_without_measurement_draws_the_prediction() -> None:
    """A plan that was not run has a picture too."""
    profile, plan = make_case(6, 2, 3)
    figure = plot_run(profile, plan, simulate(plan))
    assert len([t for t in figure.axes[2].texts if "makespan" in t.get_text()]) == 1
    assert figure.get_suptitle() == (
        "6 layers on 2 partitions, 3 micro-batches of 2 rows, gpipe, checkpoint='except_last'"
    )


def test_a_prediction_with_the_loss_is_set_beside_the_plan() -> None:
    """Two makespans of one plan are told apart in the picture that has both."""
    profile, plan = make_case(6, 2, 3)
    captions = [
        text.get_text()
        for predicted in (simulate(plan), simulate(plan, pause=plan.makespan))
        for text in plot_run(profile, plan, predicted).axes[2].texts
        if "makespan" in text.get_text()
    ]
    assert captions[0].startswith("Predicted: makespan ")
    assert captions[1].startswith(f"Predicted (plan: {format_seconds(plan.makespan)}): makespan ")


def test_the_optimizer_is_neither_idle_nor_of_a_micro_batch() -> None:
    """Its cells are darker than the forwards', and bear no number."""
    profile, plan = make_case(6, 2, 1)
    bounds = [0, *accumulate(plan.balance)]
    durations = replace(durations_of(profile, bounds), optimizer=(plan.makespan, plan.makespan))
    ax = plot_timeline(simulate(plan, durations=durations))
    numbers = [text.get_text() for text in ax.texts if text.get_text().isdigit()]
    assert numbers == ["0"] * 4  # a forward and a backward of each partition
    colour = partition_colours(1)[0]
    shades = [sum(kind_style(colour, kind)["facecolor"]) for kind in "OFIBW"]
    assert all(b - a > 0.3 for a, b in pairwise(shades)), shades


def test_plan_of_another_model_is_refused() -> None:
    """A plan is drawn with the profile that it was made from, and with no other."""
    profile, plan = make_case(6, 2, 3)
    with pytest.raises(ProfileError, match="different models: 6 and 24 layers"):
        plot_balance(make_case(24, 4, 8)[0], plan)
    other = Profile.from_costs([1.0] * 6, names=["0", "1", "2", "x", "4", "5"])
    with pytest.raises(ProfileError, match="different models: '3' and 'x'"):
        plot_balance(other, plan)
    plot_balance(profile, plan)


@pytest.mark.parametrize("by", ["size", "", None])
def test_unknown_quantity_is_refused(by: Any) -> None:
    """Bars are times or memory; the error says so."""
    with pytest.raises(UsageError, match=r"by=.* \(expected 'time' or 'memory'\)"):
        plot_profile(make_case(6, 2, 3)[0], by=by)


@pytest.mark.parametrize(
    ("name", "start"), [("plan.png", b"\x89PNG"), ("PLAN.PNG", b"\x89PNG"), ("plan.pdf", b"%PDF")]
)
def test_save_figure_writes_the_type_of_the_suffix(tmp_path: Path, name: str, start: bytes) -> None:
    """A picture is written as what its path ends in, and nothing else is left behind."""
    save_figure(make_figure((3, 1, 1)), tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_bytes().startswith(start)


def test_save_figure_takes_axes(tmp_path: Path) -> None:
    """What the functions return is what is saved: the whole figure that the axes are in."""
    save_figure(plot_profile(make_case(3, 1, 1)[0]), tmp_path / "axes.png")
    assert (tmp_path / "axes.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(KindError, match="figure is not a Figure"):
        save_figure("axes", tmp_path / "other.png")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["plan", "plan.xyz", ".png"])
def test_save_figure_refuses_an_unknown_type(tmp_path: Path, name: str) -> None:
    """A path without a known suffix is refused before anything is written; the fix works."""
    figure = make_figure((3, 1, 1))
    with pytest.raises(UsageError, match=r"suffix='.*png") as error:
        save_figure(figure, tmp_path / name)
    assert str(error.value).endswith("Fix: end the path in .png.")
    assert not list(tmp_path.iterdir())
    save_figure(figure, tmp_path / f"{name}x.png")


def test_save_figure_keeps_the_old_file_when_it_fails(tmp_path: Path) -> None:
    """A picture that cannot be drawn leaves what was there before."""
    path = tmp_path / "plan.png"
    path.write_bytes(b"old")
    figure = Figure()
    figure.text(0, 0, r"$\frac{$")
    with pytest.raises(ValueError, match=r"Parse\w*Exception|Expected"):
        save_figure(figure, path)
    assert path.read_bytes() == b"old"
    assert [other.name for other in tmp_path.iterdir()] == ["plan.png"]


def luminance(colour: tuple[float, float, float]) -> float:
    """Compute the relative luminance of a colour as the WCAG define it."""
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


channels = st.floats(min_value=0.0, max_value=1.0)


@given(st.tuples(channels, channels, channels))
def test_text_on_colour_is_readable(colour: tuple[float, float, float]) -> None:
    """Text on any colour has a contrast of 4.5 or more, which accessibility guidelines ask for."""
    light, dark = sorted([luminance(colour), luminance(to_rgb(readable_on(colour)))], reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 4.5


@pytest.mark.parametrize("n_partitions", range(1, 8))
def test_few_partitions_have_distinct_steady_colours(n_partitions: int) -> None:
    """A partition keeps its colour when others are added, and no two have the same."""
    colours = partition_colours(n_partitions)
    assert len(set(colours)) == n_partitions
    assert colours == partition_colours(7)[:n_partitions]


@pytest.mark.parametrize("n_partitions", [8, 16, 64])
def test_many_partitions_go_from_dark_to_light(n_partitions: int) -> None:
    """More partitions than distinct colours are told apart by their order of brightness."""
    brightness = [luminance(colour) for colour in partition_colours(n_partitions)]
    assert all(before < after for before, after in pairwise(brightness))


def test_drawing_leaves_pyplot_alone(tmp_path: Path) -> None:
    """Importing the plots loads no matplotlib, and drawing and saving load no pyplot."""
    code = (
        "import sys, gpipebal.plots as plots\n"
        "from gpipebal.profile import Profile\n"
        "loaded = 'matplotlib' in sys.modules\n"
        "ax = plots.plot_profile(Profile.from_costs([1.0, 2.0]))\n"
        f"plots.save_figure(ax.figure, {str(tmp_path / 'profile.png')!r})\n"
        "print(loaded, 'matplotlib' in sys.modules, 'matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["False", "True", "False"]


def test_ticks_are_whole_numbers_whatever_the_style_says() -> None:
    """The unit on the axis has the power of ten; a second one at its end would be overlooked."""
    with matplotlib.rc_context({"axes.formatter.limits": (-1, 1)}):
        ax = plot_profile(Profile.from_costs([400.0, 300.0, 500.0]))
        figure = ax.get_figure()
        assert figure is not None
        figure.draw_without_rendering()
        assert ax.yaxis.get_offset_text().get_text() == ""


def test_memory_totals_of_a_schedule_without_peaks_are_not_called_peaks() -> None:
    """What only other software runs has a memory of the model, and no peak."""
    profile = make_case(6, 2, 3)[0]
    titles = [
        plot_balance(profile, solve(profile, 2, chunks=3, schedule=name), by="memory").get_title(
            loc="left"
        )
        for name in ("gpipe", "zb_h1")
    ]
    assert titles[0].endswith("and the peak of each partition")
    assert titles[1].endswith("and the model memory of each partition")


def test_names_of_timelines_are_text() -> None:
    """A sweep over numbers is told to name its timelines."""
    timeline = simulate(make_case(6, 2, 3)[1])
    with pytest.raises(KindError, match="name of a timeline is not a str"):
        plot_timelines({4: timeline})  # type: ignore[dict-item]


def test_many_borders_are_not_drawn() -> None:
    """Lines that close would look like bars."""
    for case, n_lines in (((24, 4, 8), 3), ((370, 64, 2), 0)):
        profile, plan = make_case(*case)
        assert len(plot_balance(profile, plan).get_lines()) == n_lines
