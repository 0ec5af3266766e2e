"""What waits for neighbours that are slower than predicted: a plan counts a margin of it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from plan_oracle import MODES, profiles

import gpipebal as gb
from gpipebal.memory import partition_memory
from gpipebal.planner.assemble import CLOCK_MARGIN
from gpipebal.planner.times import step_timeline

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


def test_a_late_neighbour_by_hand() -> None:
    """Partition 0 starts a forward each second, and partition 1 each 1.3 s, if it is behind.

    While partition 0 computes its last output, eighth of eight, it has made seven, and partition 1
    has begun five: at 1, 2.3, 3.6, 4.9 and 6.2 s. As predicted, it has begun six and takes the
    seventh at that moment.
    """
    profile = gb.Profile.from_costs([1.0, 1.0], output_bytes=[100, 0], chunks=8)
    clock = step_timeline(profile, (0, 1, 2), 8, "never", "gpipe", True, None)
    options: Any = {"chunks": 8, "checkpoint": "never", "loss_inside": True}
    exact = partition_memory(profile, (0, 1, 2), timelines=[clock], **options)
    plan = gb.evaluate(profile, [1, 1], **options)
    assert pytest.approx(0.3) == CLOCK_MARGIN
    assert exact[0].waiting == 100
    assert plan.partitions[0].memory.waiting == 200


@settings(max_examples=100, deadline=None, suppress_health_check=SLOW)
@given(
    profiles(),
    st.integers(1, 6),
    st.sampled_from(MODES),
    st.booleans(),
    st.booleans(),
    st.floats(0.0, CLOCK_MARGIN),
    st.data(),
)
def test_one_slow_partition_of_two_is_in_the_plan(
    profile: gb.Profile,
    chunks: int,
    mode: Any,
    inside: bool,
    shared: bool,
    slower: float,
    data: st.DataObject,
) -> None:
    """Whichever of two partitions is slower, by as much as the margin or less: no more is held."""
    assume(profile.n_layers > 1)
    cut = data.draw(st.integers(1, profile.n_layers - 1))
    which = data.draw(st.integers(0, 1))
    bounds = (0, cut, profile.n_layers)
    slowness = [1.0 + slower if j == which else 1.0 for j in range(2)]
    clock = step_timeline(profile, bounds, chunks, mode, "gpipe", inside, None, slowness=slowness)
    given_: Any = {"chunks": chunks, "loss_inside": inside, "shared_memory": shared}
    held = partition_memory(profile, bounds, checkpoint=mode, timelines=[clock], **given_)
    balance = [b - a for a, b in pairwise(bounds)]
    plan = gb.evaluate(profile, balance, checkpoint=mode, **given_)
    for part, peak in zip(plan.partitions, held, strict=True):
        assert peak.total <= part.memory.total
