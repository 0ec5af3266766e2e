"""Drawn profiles of a few layers, and brute force over all plans of one.

The makespan comes from simulating every action of every device and link in Fractions, the memory
from `gpipebal.memory`, which walks through one partition at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise, permutations, product
from typing import Any, NamedTuple

from hypothesis import strategies as st
from nothing_waits import peaks_without_waiting
from oracles import all_bounds
from solvers.whole_oracle import makespan_of

import gpipebal as gb
from gpipebal.memory import partition_memory
from gpipebal.planner.runs.memory import RunMemory
from gpipebal.planner.runs.moments import RowMoment
from gpipebal.profile import LayerProfile, SkipProfile, StepTerms, TieProfile

__all__ = [
    "MODES",
    "Found",
    "Taken",
    "all_plans",
    "check_every_run",
    "holding_its_output",
    "profiles",
]

MODES = ("never", "except_last", "always")
_WAITS = ("n_given", "n_stashed", "n_returned", "n_popped", "n_passed")


@st.composite
def profiles(draw: st.DrawFn, largest: int = 5, shortest: int = 0) -> gb.Profile:
    """Draw a chain whose layers share storages and parameters in any way, with skips and a loss.

    A timeline tells what takes no time at all in no particular order: `shortest` is the least time.
    """
    n = draw(st.integers(1, largest))
    storages = draw(st.lists(st.sampled_from([1, 2, 8, 50, 1000]), min_size=1, max_size=2 * n + 2))

    def some(most: int) -> st.SearchStrategy[tuple[int, ...]]:
        index = st.integers(0, len(storages) - 1)
        return st.lists(index, max_size=most, unique=True).map(tuple)

    few, more = st.sampled_from([0, 0, 10, 300]), st.integers(0, 300)
    unknown = st.none() | more
    time = st.integers(shortest, 9)

    def layer(name: str) -> LayerProfile:
        return LayerProfile(
            name,
            "Layer",
            *(float(draw(time)) for _ in range(3)),
            parameter_bytes=draw(few),
            gradient_bytes=draw(few),
            buffer_bytes=draw(few),
            kept_buffer_bytes=draw(few),
            saved_buffer_bytes=draw(few),
            optimizer_bytes=draw(st.sampled_from([None, 7, 7, 0])),
            outputs=draw(some(2)),
            saved=draw(some(3)),
            handed_through=draw(some(2)),
            output_gradient_bytes=draw(unknown),
            gradient_storages=draw(st.none() | some(2)),
            through_gradient_storages=draw(some(2)),
            output_bytes=draw(few),
            forward_peak_bytes=draw(more),
            no_grad_forward_peak_bytes=draw(unknown),
            written=draw(some(1)),
            written_input_bytes=draw(st.sampled_from([None, 0, 50])),
            backward_peak_bytes=draw(more),
            accumulating_peak_bytes=draw(unknown),
            chained_peak_bytes=draw(unknown),
            chained_accumulating_peak_bytes=draw(unknown),
            copied_bytes=draw(few),
            cut_copied_bytes=draw(few),
            chained_cut_copied_bytes=draw(few),
            stashed_sum_bytes=draw(few),
            optimizer_peak_bytes=draw(unknown),
            optimizer_carried_bytes=draw(few),
        )

    skips = []
    for k in range(draw(st.integers(0, 3))):
        ends = sorted((draw(st.integers(0, n - 1)), draw(st.integers(0, n - 1))))
        gradients = draw(st.none() | some(2))
        skips.append(SkipProfile(str(k), *ends, draw(some(2)), gradients))
    ties = []
    for _ in range(draw(st.integers(0, 2)) if n > 1 else 0):
        users = draw(st.lists(st.integers(0, n - 1), min_size=2, max_size=n, unique=True))
        ties.append(TieProfile(tuple(sorted(users)), 10, draw(st.sampled_from([0, 10, 300]))))
    loss = draw(st.sampled_from(["none", "micro", "whole", "both"]))
    step = StepTerms(
        loss=layer("loss") if loss in ("micro", "both") else None,
        whole_loss=layer("loss") if loss in ("whole", "both") else None,
        gathered=draw(some(1)),
        optimizer_together=draw(st.booleans()),
        optimizer_groups=draw(st.lists(st.tuples(*[few] * n), max_size=2)),
    )
    layers = [layer(str(k)) for k in range(n)]
    # Some layers stash what they return.
    own = [layers[skip.source].outputs for skip in skips]
    skips = [
        replace(skip, storages=outputs) if outputs and draw(st.booleans()) else skip
        for skip, outputs in zip(skips, own, strict=True)
    ]
    inputs = draw(some(2))
    earlier = set(inputs)
    for k, one in enumerate(layers):
        new = set(one.outputs).union(*(s.storages for s in skips if s.source == k)) - earlier
        kept = draw(st.sampled_from([(), (), tuple(sorted(new))]))
        layers[k] = replace(one, kept_outputs=kept)
        earlier.update(new)
    for tie in ties:
        for k in tie.layers:
            layers[k] = replace(
                layers[k],
                parameter_bytes=layers[k].parameter_bytes + tie.parameter_bytes,
                gradient_bytes=layers[k].gradient_bytes + tie.gradient_bytes,
            )
    return gb.Profile(
        tuple(layers),
        tuple(storages),
        inputs,
        common_inputs=inputs[: draw(st.integers(0, len(inputs)))],
        rows=2,
        mini_batch_rows=6,
        chunks=3,
        step=step,
        skips=tuple(skips),
        ties=tuple(ties),
        without_gradient=draw(some(4)),
    )


def holding_its_output(profile: gb.Profile) -> gb.Profile:
    """Return the profile with a last layer that saves what it hands on, as a ReLU does.

    The layers before it need so much in their backwards that these have the highest moment.
    """
    last = profile.layers[-1]
    holds = replace(last, saved=tuple({*last.saved, *last.outputs}))
    before = (replace(one, backward_peak_bytes=2000) for one in profile.layers[:-1])
    return replace(profile, layers=(*before, holds))


class Taken(RunMemory):
    """The memory of runs for which nothing waits."""

    def _moments(self, *given: Any) -> list[RowMoment]:
        nothing = dict.fromkeys(_WAITS, 0)
        return [moment._replace(**nothing) for moment in super()._moments(*given)]


def check_every_run(profile: gb.Profile, mode: Any, given: dict[str, Any]) -> None:
    """Compare the memory of every run of layers with that of its partition, in every split.

    Equal to the byte but for what waits; and with it between the two bounds.
    """
    for n in range(1, profile.n_layers + 1):
        taken, least, most = (
            kind(profile, **given, n_partitions=n, most=most).memory
            for kind, most in ((Taken, True), (RunMemory, False), (RunMemory, True))
        )
        for bounds in all_bounds(profile.n_layers, n):
            without = peaks_without_waiting(profile, bounds, checkpoint=mode, **given)
            exact = partition_memory(profile, bounds, checkpoint=mode, **given)
            for j, (start, end) in enumerate(pairwise(bounds)):
                need, low, high = (
                    int(memory.rows(start, j, mode)[end - start - 1])
                    for memory in (taken, least, most)
                )
                assert need == without[j].total
                assert low <= exact[j].total <= high


class Found(NamedTuple):
    """A plan that can be: what it costs, and what it needs of each device."""

    makespan: Fraction
    bottleneck: Fraction
    peaks: tuple[int, ...]
    bounds: tuple[int, ...]
    modes: tuple[str, ...]
    order: tuple[int, ...]


def all_plans(
    profile: gb.Profile,
    n: int,
    *,
    chunks: int,
    checkpoint: Any,
    speeds: Sequence[Any] | None = None,
    any_order: bool = False,
    link: Any = None,
    loss_inside: bool = False,
    shared_memory: bool = False,
    memory: bool = True,
) -> Iterator[Found]:
    """Enumerate all plans; peaks are with what may wait in each."""
    orders = permutations(range(n)) if any_order else [tuple(range(n))]
    several = list(orders)
    if checkpoint == "auto":
        of_modes: list[Any] = list(product(MODES, repeat=n))
    else:
        of_modes = [(checkpoint,) * n if isinstance(checkpoint, str) else tuple(checkpoint)]
    for bounds in all_bounds(profile.n_layers, n):
        for modes in of_modes:
            peaks: tuple[int, ...] = ()
            if memory:
                needs = partition_memory(
                    profile,
                    bounds,
                    chunks=chunks,
                    checkpoint=modes,
                    loss_inside=loss_inside,
                    shared_memory=shared_memory,
                )
                peaks = tuple(need.total for need in needs)
            for order in several:
                slow = [Fraction(1)] * n
                if speeds is not None:
                    slow = [1 / Fraction(speeds[device]) for device in order]
                yield _found(profile, bounds, modes, order, slow, link, chunks, peaks)


def _found(
    profile: gb.Profile,
    bounds: tuple[int, ...],
    modes: Any,
    order: tuple[int, ...],
    slow: list[Fraction],
    link: Any,
    chunks: int,
    peaks: tuple[int, ...],
) -> Found:
    runs = [profile.layers[a:b] for a, b in pairwise(bounds)]
    columns = [
        [
            factor * sum((Fraction(getattr(layer, name)) for layer in run), Fraction(0))
            for factor, run in zip(slow, runs, strict=True)
        ]
        for name in ("forward_time", "backward_time", "recompute_time")
    ]
    forward, backward, recompute = columns
    recompute = [
        time if _needs_gradient(profile, end) else Fraction(0)
        for time, end in zip(recompute, bounds[1:], strict=True)
    ]
    there = [Fraction(0)] * (len(runs) - 1)
    back = list(there)
    if link is not None:
        for j, cut in enumerate(bounds[1:-1]):
            there[j], back[j] = (Fraction(link.seconds(n)) for n in _crossing(profile, cut))
    of_links = [one + two for one, two in zip(there, back, strict=True)]
    if link is not None and not link.overlaps:
        for j, (one, two) in enumerate(zip(there, back, strict=True)):
            for side in (j, j + 1):
                forward[side] += one
                backward[side] += two
        there = back = [Fraction(0)] * (len(runs) - 1)
        of_links = []
    loads = [
        f + b + (r if mode == "always" or (mode != "never" and chunks > 1) else 0)
        for f, b, r, mode in zip(forward, backward, recompute, modes, strict=True)
    ]
    makespan = makespan_of(forward, backward, recompute, there, back, chunks, modes)
    return Found(makespan, max(loads + of_links), peaks, bounds, tuple(modes), order)


def _needs_gradient(profile: gb.Profile, end: int) -> bool:
    """Whether any layer before this place hands on a value with a gradient, or one not known."""
    if end == profile.n_layers:
        return True
    skips = [skip for skip in profile.skips if skip.source < end]
    handed = [one.outputs for one in profile.layers[:end]] + [one.storages for one in skips]
    return any(not value or set(value) - {*profile.without_gradient} for value in handed)


def _crossing(profile: gb.Profile, cut: int) -> tuple[int, int]:
    """Return the bytes that cross a cut forwards and backwards."""
    layers = profile.layers
    trains = [bool(layer.gradient_bytes) for layer in layers]
    there = set(layers[cut - 1].outputs)
    goes_back = any(trains[:cut]) or not any(trains)
    back = set(there) if goes_back else set()
    for skip in profile.skips:
        if skip.source < cut <= skip.destination:
            there |= set(skip.storages)
            if any(trains[: skip.source + 1]) or not any(trains):
                back |= set(skip.storages)
    second = profile.further_gradients(cut - 1) if goes_back else 0
    return profile.bytes_of(there), profile.bytes_of(back - set(profile.without_gradient)) + second
