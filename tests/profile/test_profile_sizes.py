"""Costs at other numbers of rows: measured ones, lines, curves, and what lies beyond."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gpipebal as gb
from gpipebal.errors import ProfileError
from gpipebal.memory import partition_memory
from gpipebal.profile import LayerProfile, Profile, SkipProfile, StepTerms, moments
from gpipebal.profile.fit import (
    SURE,
    TOLERANCE,
    count_at,
    fit_line,
    interpolate,
    peak_at,
    time_at,
)
from gpipebal.profile.layer import MOMENTS
from gpipebal.profile.moments import keep_largest
from gpipebal.profiler.estimate import profile as of_estimate

ROWS = st.lists(st.integers(1, 64), min_size=2, max_size=5, unique=True).map(sorted)
#: Whole numbers of seconds: all sums and products are exact.
LINES = st.tuples(st.integers(0, 50), st.integers(0, 50))


def size(rows: int, **costs: Any) -> Profile:
    """Return a chain of two layers and a skip at this number of rows; all bytes are lines."""
    line = costs.pop("line", (1, 1))
    time = float(line[0] + line[1] * rows)
    layers = tuple(
        LayerProfile(
            name,
            "Layer",
            time,
            2 * time,
            time,
            no_grad_forward_time=time,
            flops=7 * rows,
            parameter_bytes=100,
            gradient_bytes=100,
            outputs=(k + 1,),
            saved=(k, k + 1),
            output_bytes=4 * rows,
            forward_peak_bytes=8 * rows + 3,
            backward_peak_bytes=12 * rows + 100,
            **costs,
        )
        for k, name in enumerate("ab")
    )
    loss = LayerProfile("loss", "f", time, time, time, saved=(2, 3), buffer_bytes=5 * rows)
    return Profile(
        layers,
        storages=(6 * rows, 4 * rows, 4 * rows, 16),
        inputs=(0,),
        rows=rows,
        mini_batch_rows=64,
        chunks=math.ceil(64 / rows),
        step=StepTerms(0.5, loss=loss),
        skips=(SkipProfile("s", 0, 1, (1,)),),
        provenance={"method": "test"},
    )


def several(rows: list[int], **costs: Any) -> Profile:
    """Return a profile of the first size, with the others beside it."""
    first, *others = rows
    return replace(size(first, **costs), other_sizes=tuple(size(n, **costs) for n in others))


#: Bytes that are the same at any number of rows: of parameters, and of what belongs to them.
OF_PARAMETERS = {
    "parameter_bytes",
    "gradient_bytes",
    "buffer_bytes",
    "kept_buffer_bytes",
    "saved_buffer_bytes",
    "optimizer_bytes",
    "optimizer_peak_bytes",
    "optimizer_carried_bytes",
}


def test_all_other_bytes_go_by_the_rows() -> None:
    """Every one that is not a parameter's is scaled, between measured sizes and beyond them."""
    names = {f.name for f in fields(LayerProfile) if f.name.endswith("_bytes")} - OF_PARAMETERS
    sizes = [
        replace(
            found, layers=tuple(replace(la, **dict.fromkeys(names, 8 * n)) for la in found.layers)
        )
        for n in (2, 4)
        for found in [size(n)]
    ]
    profile = replace(sizes[0], other_sizes=(sizes[1],))
    for rows in (1, 2, 3, 4, 8):
        layer = profile.at_rows(rows).layers[0]
        assert {name: getattr(layer, name) for name in names} == dict.fromkeys(names, 8 * rows)


@settings(deadline=None)
@given(ROWS, LINES, st.integers(1, 200))
def test_costs_that_are_lines_are_exact_everywhere(
    rows: list[int], line: tuple[int, int], wanted: int
) -> None:
    """Bytes that are lines in the rows come out exactly, times up to rounding, also beyond."""
    found = several(rows, line=line).at_rows(wanted)
    truth = size(wanted, line=line)
    assert found.storages == truth.storages
    assert (found.rows, found.chunks, found.mini_batch_rows) == (wanted, truth.chunks, 64)
    for a, b in zip(
        (*found.layers, found.step.loss), (*truth.layers, truth.step.loss), strict=True
    ):
        assert a is not None and b is not None
        for name in ("forward_time", "backward_time", "recompute_time", "no_grad_forward_time"):
            if getattr(a, name) is not None or getattr(b, name) is not None:
                assert getattr(a, name) == pytest.approx(getattr(b, name), rel=1e-9, abs=1e-12)
        times = dict.fromkeys(
            ("forward_time", "backward_time", "recompute_time", "no_grad_forward_time"), 0.0
        )
        assert replace(a, **times) == replace(b, **times)
    assert found.inputs == truth.inputs and found.skips == truth.skips
    if wanted not in rows:
        about = found.provenance["at_rows"]
        assert about["from_rows"] == rows and about["interpolated"] == []
        assert about["extrapolated"] is not (rows[0] < wanted < rows[-1])


@settings(deadline=None)
@given(ROWS, st.lists(st.floats(0, 100), min_size=5, max_size=5), st.integers(0, 4))
def test_a_measured_size_comes_back_as_it_was(
    rows: list[int], times: list[float], which: int
) -> None:
    """Whatever the others say, the layers of a measured size are the measured ones."""
    sizes = [size(n, line=(time, 0)) for n, time in zip(rows, times, strict=False)]
    profile = replace(sizes[0], other_sizes=tuple(sizes[1:]))
    asked = sizes[which % len(sizes)]
    found = profile.at_rows(asked.rows)
    assert found.layers == asked.layers and found.storages == asked.storages
    assert found.step.loss == asked.step.loss
    assert "at_rows" not in found.provenance
    assert profile.at_rows(rows[0]) == profile


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 99), st.floats(0, 1e3), st.floats(0, 10)),
        min_size=2,
        max_size=5,
        unique_by=lambda point: point[0],
    ).map(sorted),
    st.integers(1, 300),
    st.integers(1, 300),
)
def test_times_are_never_negative_and_good_fits_never_fall(
    points: list[tuple[int, float, float]], a: int, b: int
) -> None:
    """A time is finite and 0 or more; where the fit is good, more rows never take less time."""
    measured = {rows for rows, _, _ in points}
    (first, good), (second, _) = time_at(points, min(a, b)), time_at(points, max(a, b))
    assert math.isfinite(first) and first >= 0 and second >= 0
    if good and not {a, b} & measured:
        assert first <= second * (1 + 1e-12)


@settings(deadline=None)
@given(ROWS, st.lists(st.floats(0, 1), min_size=5, max_size=5))
def test_the_fit_is_the_best_that_its_bounds_allow(rows: list[int], times: list[float]) -> None:
    """No overhead and slope beside the found ones, neither negative, have smaller squares."""
    points = [(n, time, 1.0) for n, time in zip(rows, times, strict=False)]

    def squares(overhead: float, slope: float) -> float:
        return sum((overhead + slope * n - time) ** 2 for n, time, _ in points)

    overhead, slope = fit_line(points)
    assert overhead >= 0 and slope >= 0
    for d_overhead in (-0.01, 0.0, 0.01):
        for d_slope in (-0.001, 0.0, 0.001):
            beside = max(0.0, overhead + d_overhead), max(0.0, slope + d_slope)
            assert squares(overhead, slope) <= squares(*beside) + 1e-9


def test_a_surer_size_counts_more() -> None:
    """The line passes nearer to a size that varied little than if it had varied much."""

    def miss(spread: float) -> float:
        found, good = time_at([(1, 10.0, 20.0), (3, 40.0, spread), (4, 40.0, 20.0)], 2)
        assert good
        slope = time_at([(1, 10.0, 20.0), (3, 40.0, spread), (4, 40.0, 20.0)], 5)[0] - found
        return abs(found + slope / 3 - 40.0)

    assert miss(10.0) < miss(20.0) < miss(40.0)


def test_a_spread_without_bounds_divides_by_no_zero() -> None:
    """However much sizes varied, they count: a weight as small as that would be 0 in floats."""
    found, is_good = time_at([(1, 1.0, 1e200), (2, 2.0, 1e200)], 3)
    assert is_good and found == pytest.approx(3.0)


def test_a_time_that_is_no_line_is_interpolated() -> None:
    """Where the best line misses by more than the spread and the tolerance, points are joined."""
    points = [(2, 1.0), (4, 1.0), (8, 9.0)]
    steep = [(rows, time, 0.0) for rows, time in points]
    assert time_at(steep, 6) == (5.0, False)
    # The same with a spread that covers the miss is a line with noise.
    assert time_at([(rows, time, 4.0) for rows, time in points], 6)[1]
    # So is one that the tolerance covers.
    near = [(2, 2.0, 0.0), (4, 4.0 * (1 + TOLERANCE / 2), 0.0), (8, 8.0, 0.0)]
    assert time_at(near, 6)[1] and SURE < TOLERANCE
    profile = several([2, 4, 8])
    wide = replace(profile.layers[0], forward_time=100.0)
    bent = replace(profile, layers=(wide, profile.layers[1]))
    assert bent.at_rows(3).provenance["at_rows"]["interpolated"] == ["a"]


def test_beyond_the_measured_sizes_by_hand() -> None:
    """Values go on along the outer line, never fall with the rows, and end at zero at the least."""
    rising, falling = [(2, 20), (4, 60)], [(2, 60), (4, 20)]
    assert [interpolate(rising, rows) for rows in (1, 3, 6)] == [10, 40, 100]
    assert [interpolate([(2, 30), (4, 40)], rows) for rows in (1, 6)] == [25, 50]
    assert [interpolate(falling, rows) for rows in (1, 3, 6)] == [60, 40, 20]
    assert [interpolate([(2, 20)], rows) for rows in (1, 3)] == [10, 30]


@settings(deadline=None)
@given(
    st.dictionaries(st.integers(1, 40), st.integers(0, 200), min_size=2, max_size=4),
    st.integers(1, 99),
    st.integers(0, 300),
    st.booleans(),
)
def test_a_peak_is_never_below_the_line_of_the_nearest_sizes(
    peaks: dict[int, int], rows: int, fixed: int, turns: bool
) -> None:
    """Another sum that may be the largest there can only add to it, however the sizes lie."""
    points = tuple(sorted(peaks.items()))
    assert peak_at(points, rows, fixed, turns=turns) >= count_at(points, rows)
    assert all(peak_at(points, at, fixed, turns=turns) == peak for at, peak in points)


def test_peaks_that_fall_on_one_line_do_not_go_on_along_it() -> None:
    """By hand: another sum is the largest somewhere beyond, and with fewer rows there is more."""
    falling = ((2, 60), (4, 50), (6, 40))
    assert [peak_at(falling, rows) for rows in (1, 3, 12)] == [65, 55, 80]


def test_bytes_that_are_no_line_are_rounded_up() -> None:
    """Between sizes of 10 and 21 bytes lie 15.5: 16 bytes."""
    a, b = (
        Profile.from_costs([1.0], output_bytes=[n], rows=rows) for rows, n in ((2, 10), (4, 21))
    )
    found = replace(a, other_sizes=(b,)).at_rows(3)
    assert found.layers[0].output_bytes == 16 == found.bytes_of(found.layers[0].outputs)


def test_sizes_of_other_storages_are_left_out_of_the_bytes() -> None:
    """Where another algorithm saves other tensors, the nearest size's sets are taken, and said."""
    profile = several([2, 4])
    odd = size(16)
    layers = (replace(odd.layers[0], saved=(0, 1, 4)), odd.layers[1])
    odd = replace(odd, layers=layers, storages=(*odd.storages, 999))
    profile = replace(profile, other_sizes=(*profile.other_sizes, odd))
    found = profile.at_rows(6)
    assert found.storages == size(6).storages
    assert found.provenance["at_rows"]["other_storages_at"] == [16]
    assert profile.at_rows(15).storages[4] == math.ceil(999 * 15 / 16)


def test_what_one_size_does_not_know_is_unknown_between() -> None:
    """A time or peak that was not measured at every size stays unknown."""
    profile = several([2, 4])
    bare = [
        replace(layer, no_grad_forward_time=None, flops=None)
        for layer in profile.other_sizes[0].layers
    ]
    profile = replace(profile, other_sizes=(replace(profile.other_sizes[0], layers=tuple(bare)),))
    assert profile.at_rows(3).layers[0].no_grad_forward_time is None
    assert profile.at_rows(3).layers[0].flops is None


def test_one_size_grows_in_proportion_and_says_so() -> None:
    """From a single size all costs but the parameters go with the rows."""
    found = size(4).at_rows(6)
    assert found.layers[0].forward_time == 7.5 and found.layers[0].parameter_bytes == 100
    assert found.storages == (36, 24, 24, 24)
    assert found.provenance["at_rows"]["method"] == "in proportion"
    assert found.provenance["at_rows"]["extrapolated"] is True


def test_terms_of_the_mini_batch_come_from_the_profile() -> None:
    """The loss over the mini-batch, its storages and the gather do not go by the rows."""
    profile = several([2, 4])
    whole = LayerProfile("loss", "f", 1.0, 2.0, 1.0, saved=(4,), outputs=(5,), buffer_bytes=5 * 64)
    step = replace(profile.step, whole_loss=whole, gathered=(4,), optimizer_time=3.0)
    profile = replace(profile, step=step, storages=(*profile.storages, 256, 8))
    for rows in (3, 4):
        found = profile.at_rows(rows)
        assert found.step.whole_loss is not None
        assert found.storages[:4] == size(rows).storages
        assert found.bytes_of(found.step.gathered) == 256
        assert found.bytes_of(found.step.whole_loss.outputs) == 8
        assert (found.step.loss_time, found.step.gather_time) == (3.0, 0.5)
        assert found.step.optimizer_time == 3.0
    # Outputs that have no gradient have none when they are gathered either.
    others = [replace(other, without_gradient=(0,)) for other in profile.other_sizes]
    frozen = replace(profile, without_gradient=(0, 4), other_sizes=tuple(others)).at_rows(3)
    assert frozen.gradient_bytes_of(frozen.step.gathered) == 0
    assert frozen.gradient_bytes_of((0, 1)) == frozen.storages[1]
    half = profile.at_rows(3, mini_batch_rows=32)
    assert half.step.whole_loss is not None and half.chunks == 11
    assert (half.step.loss_time, half.step.gather_time) == (1.5, 0.25)
    assert half.bytes_of(half.step.gathered) == 128 and half.step.whole_loss.buffer_bytes == 5 * 32
    assert half.step.optimizer_time == 3.0


@pytest.mark.parametrize("rows", [0, -1, 1.5, True, "4", 2**40])
def test_impossible_rows_are_refused_and_the_fix_works(rows: Any) -> None:
    """A number of rows that is none is refused, and the fix is one."""
    with pytest.raises(ProfileError, match="number of rows is not valid: rows=") as caught:
        size(4).at_rows(rows)
    assert str(caught.value).endswith("Fix: rows=1, or more.")
    assert size(4).at_rows(1).rows == 1


def test_numpy_numbers_are_rows() -> None:
    """What comes out of a table is a number of rows like any other."""
    found = size(4).at_rows(np.int64(3), mini_batch_rows=np.int32(12))
    assert found == size(4).at_rows(3, mini_batch_rows=12)
    assert type(found.rows) is type(found.mini_batch_rows) is int


def without_moments(profile: Profile) -> Profile:
    """Return a profile that does not tell the moments of peaks, as those of given costs."""
    unknown: dict[str, Any] = dict.fromkeys(MOMENTS.values(), ())
    layers = tuple(replace(layer, **unknown) for layer in profile.layers)
    others = tuple(map(without_moments, profile.other_sizes))
    return replace(profile, layers=layers, other_sizes=others)


def encoder(width: int, tokens: int, **options: Any) -> tuple[nn.Sequential, torch.Tensor]:
    """Make a chain with a layer whose backward has its peak at the end, or at the beginning."""
    made = nn.TransformerEncoderLayer(width, 4, batch_first=True, **options)
    model = nn.Sequential(nn.Linear(width, width), made, nn.Linear(width, width))
    return model, torch.empty(64, tokens, width)


@pytest.mark.parametrize(("feedforward", "tokens"), [(2, 16), (4, 16), (4, 2)])
@pytest.mark.parametrize("norm_first", [False, True])
def test_peaks_that_fall_before_they_rise_are_not_too_low_at_other_rows(
    feedforward: int, tokens: int, norm_first: bool
) -> None:
    """With few rows they are where gradients are made, with many where most is saved.

    If the moments are known they are right, but for one row, of which torch copies less.
    """
    model, sample = encoder(
        128, tokens, dim_feedforward=feedforward * 128, norm_first=norm_first, dropout=0.0
    )
    options: dict[str, Any] = {"method": "estimate", "rates": "CPU core", "progress": False}
    profile = gb.profile_model(model, sample, chunks=16, **options)
    without = without_moments(profile)
    for rows, off, least, most in ((1, 0.02, 0.98, 1.12), (16, 0, 0.995, 1.2), (32, 0, 0.995, 1.5)):
        exact = gb.profile_model(model, sample, chunks=64 // rows, rows=(), **options)
        ways = product([(0, 1, 3), (0, 2, 3)], [("gpipe", "always"), ("1f1b", "never")])
        for cuts, (schedule, checkpoint) in ways:
            found, bounds, wanted = (
                partition_memory(
                    each, cuts, chunks=64 // rows, checkpoint=checkpoint, schedule=schedule
                )
                for each in (profile.at_rows(rows), without.at_rows(rows), exact)
            )
            for one, bound, other in zip(found, bounds, wanted, strict=True):
                assert one.total == pytest.approx(other.total, rel=off)
                assert least * other.total <= bound.total <= most * other.total


def test_layers_that_are_alike_have_their_moments_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be thousands of moments, and of layers: each kind is kept and looked at once."""
    looked: list[Any] = []
    made: list[Profile] = []
    find, keep = moments._places, moments.keep_largest
    monkeypatch.setattr(moments, "_places", lambda points: looked.append(points) or find(points))
    monkeypatch.setattr(of_estimate, "keep_largest", lambda one: made.append(one) or keep(one))
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(40)))
    gb.profile_model(model, torch.empty(16, 4), chunks=4, method="estimate", rates="CPU core")
    kinds = 3 * len(MOMENTS)  # in the middle of the chain, and at its ends
    assert len(looked) <= kinds
    (profile,) = made
    for size in (profile, *profile.other_sizes):
        held = {id(getattr(layer, name)) for layer in size.layers for name in MOMENTS.values()}
        assert len(held) <= kinds


def test_peaks_that_are_lines_stay_exact_at_other_rows() -> None:
    """Most layers need the more the more rows there are, and gradients as large as ever."""
    layers = [nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64), nn.ReLU()]
    model, sample = nn.Sequential(*layers), torch.empty(64, 64)
    options: dict[str, Any] = {"method": "estimate", "rates": "CPU core", "progress": False}
    profile = gb.profile_model(model, sample, chunks=16, **options)
    for rows in (1, 16, 32):
        exact = gb.profile_model(model, sample, chunks=64 // rows, rows=(), **options)
        for one, other in zip(profile.at_rows(rows).layers, exact.layers, strict=True):
            for name in ("forward_peak_bytes", "backward_peak_bytes", "accumulating_peak_bytes"):
                assert getattr(one, name) == getattr(other, name)


def of_moments(rows: int, *moments: int) -> Profile:
    """Return a layer whose backward has these bytes at some moments."""
    peaks = {peak: max(0, *moments) for peak in MOMENTS}
    told = {name: (0, *moments) for name in MOMENTS.values()}
    layer = LayerProfile("a", "Layer", 1.0, 1.0, 1.0, **peaks, **told)
    return Profile((layer,), rows=rows, mini_batch_rows=64)


def at_sizes(rows: list[int], moments: Any) -> Profile:
    """Return a profile at several sizes; `moments` tells the bytes of each moment from the rows."""
    first, *others = (of_moments(n, *moments(n)) for n in rows)
    return keep_largest(replace(first, other_sizes=tuple(others)))


@settings(deadline=None)
@given(
    ROWS,
    st.lists(st.tuples(st.integers(-50, 50), st.integers(-9, 50)), min_size=1, max_size=8),
    st.integers(1, 200),
)
def test_the_largest_of_moments_that_are_lines_is_exact_everywhere(
    rows: list[int], lines: list[tuple[int, int]], wanted: int
) -> None:
    """Also where another moment than at any measured size is the largest."""

    def moments(n: int) -> list[int]:
        return [fixed + n * more for fixed, more in lines]

    found = at_sizes(rows, moments)
    truth = max(0, *moments(wanted))
    for peak, name in MOMENTS.items():
        assert getattr(found.at_rows(wanted).layers[0], peak) == truth
        assert len(getattr(found.layers[0], name)) <= 1 + len(lines)
    again = Profile.from_dict(found.to_dict())
    assert again == found and again.at_rows(wanted) == found.at_rows(wanted)


def test_few_moments_are_kept() -> None:
    """Those that are the largest at some number of rows."""
    found = at_sizes([2, 4], lambda n: [90 - n, 30 + n, 20 + 5 * n, 10 + 9 * n, 5 * n])
    assert found.layers[0].backward_moments == (88, 28)
    assert found.other_sizes[0].layers[0].backward_moments == (86, 46)


def test_moments_that_are_no_lines_tell_nothing() -> None:
    """Nor do those of a single size, those of sizes that have others, or of a changed peak."""
    bent = at_sizes([2, 4, 8], lambda n: [n * n])
    other = at_sizes([2, 4], lambda n: [n] * n)
    alone = at_sizes([2], lambda n: [n])
    for found in (bent, other, alone):
        sizes = (found, *found.other_sizes)
        assert [getattr(each.layers[0], n) for each in sizes for n in MOMENTS.values()] == [()] * (
            len(MOMENTS) * len(sizes)
        )
    lines = at_sizes([2, 4], lambda n: [10 * n, 100 - n])
    layer = replace(lines.layers[0], backward_peak_bytes=300)
    changed = replace(lines, layers=(layer,)).at_rows(8).layers[0]
    assert changed.backward_peak_bytes >= 96 and changed.accumulating_peak_bytes == 92


def test_a_size_with_other_moments_keeps_its_peak_near_it() -> None:
    """Lines through sizes behind it are not asked there: what it does is something else."""
    few = at_sizes([2, 4, 8, 16], lambda n: [10 * n] if n > 4 else [1000, 20])
    for rows, least in ((1, 500), (3, 1000), (5, 770)):
        assert few.at_rows(rows).layers[0].backward_peak_bytes >= least
    between = at_sizes([2, 4, 8, 16], lambda n: [1000, 20] if n == 4 else [10 * n])
    for rows, least in ((3, 510), (5, 770)):
        assert between.at_rows(rows).layers[0].backward_peak_bytes >= least
    assert [few.at_rows(rows).layers[0].backward_peak_bytes for rows in (12, 32)] == [120, 320]
