"""Many durations on one order: the same makespans as one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipebal.schedule import ALL_SCHEDULES, CHECKPOINT_MODES, order_of
from gpipebal.simulator import Durations, place, trials
from gpipebal.simulator.trials import Candidates, Trials


@settings(max_examples=120, deadline=None)
@given(
    data=st.data(),
    name=st.sampled_from(ALL_SCHEDULES),
    mode=st.sampled_from(CHECKPOINT_MODES),
    transfers=st.booleans(),
    overlap=st.booleans(),
)
def test_makespans_are_those_of_place(
    data: st.DataObject, name: str, mode: Any, transfers: bool, overlap: bool
) -> None:
    """Whatever order and durations, all candidates at once have the makespans of `place`."""
    n_devices = data.draw(st.integers(1, 4))
    chunks = data.draw(st.sampled_from([1, n_devices, 3 * n_devices]))
    order = order_of(name, n_devices, chunks, mode)
    n = order.n_partitions
    seeds = st.integers(0, 2**32 - 1)
    random = np.random.default_rng(data.draw(seeds))
    # Quarters, so that sums are exact whatever the order.
    columns = random.integers(0, 20, (6, data.draw(st.integers(1, 5)), n)) / 4
    columns[3] = np.minimum(columns[3], columns[2])
    into, back = (columns[4], columns[5]) if transfers else (None, None)
    candidates = Candidates(columns[0], columns[1], columns[2], columns[3], into, back)
    found = Trials(order).makespans(candidates, overlap=overlap)
    for k, makespan in enumerate(found):
        durations = Durations(
            *(tuple(column[k].tolist()) for column in columns[:3]),
            weight_gradient=tuple(columns[3][k].tolist()),
            forward_transfer=None if into is None else tuple(into[k].tolist()),
            backward_transfer=None if back is None else tuple(back[k].tolist()),
        )
        assert makespan == place(order, durations, overlap=overlap).makespan


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    name=st.sampled_from(ALL_SCHEDULES),
    transfers=st.booleans(),
    overlap=st.booleans(),
)
def test_other_modes_are_recomputes_that_take_no_time(
    data: st.DataObject, name: str, transfers: bool, overlap: bool
) -> None:
    """In the order of `'always'` every mode of every partition has the makespans of its own."""
    n_devices = data.draw(st.integers(1, 4))
    chunks = data.draw(st.sampled_from([1, n_devices, 3 * n_devices]))
    always = order_of(name, n_devices, chunks, "always")
    n = always.n_partitions
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    forward, recompute, backward, into, back = random.integers(0, 20, (5, 1, n)) / 4
    links = {"forward_transfer": into, "backward_transfer": back} if transfers else {}
    modes = data.draw(st.tuples(*[st.sampled_from(CHECKPOINT_MODES)] * n))
    own = Trials(order_of(name, n_devices, chunks, modes))
    none = np.zeros_like(recompute)
    given_modes = np.array([modes])
    other = Candidates(
        forward,
        np.where(given_modes == "never", none, recompute),
        backward,
        last_recompute=np.where(given_modes == "always", recompute, none),
        **links,
    )
    found = Trials(always).makespans(other, overlap=overlap)
    expected = own.makespans(Candidates(forward, recompute, backward, **links), overlap=overlap)
    assert found.tolist() == expected.tolist()


def test_candidates_go_through_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few numbers may be held at a time, the makespans are the same."""
    trials_of = Trials(order_of("zb_h1", 3, 6))
    random = np.random.default_rng(0)
    forward, recompute, backward = random.random((3, 7, 3))
    candidates = Candidates(forward, recompute, backward)
    whole = trials_of.makespans(candidates)
    monkeypatch.setattr(trials, "MOST_NUMBERS", 1)
    assert trials_of.makespans(candidates).tolist() == whole.tolist()
    nothing = np.empty((0, 3))
    assert trials_of.makespans(Candidates(nothing, nothing, nothing)).shape == (0,)
