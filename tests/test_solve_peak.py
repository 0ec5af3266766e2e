"""The least peak memory, where what waits for busy neighbours decides."""

from __future__ import annotations

import random
from typing import Any

import gpipebal as gb
from gpipebal.planner import solve


def test_less_freedom_never_has_the_lower_peak() -> None:
    """Where more is open, what is found with less open is looked at too."""
    draw = random.Random(252)
    profile = gb.Profile.from_costs(
        [draw.randint(1, 5) for _ in range(9)],
        saved_bytes=[draw.choice([0, 10]) for _ in range(9)],
        output_bytes=[draw.choice([10, 100, 50]) for _ in range(9)],
        chunks=4,
    )
    options: dict[str, Any] = {"objective": "peak_memory", "devices": [4, 1, 2, 0.5]}
    for checkpoint in ("never", "always"):
        given = solve(profile, 4, checkpoint=checkpoint, **options)
        free = solve(profile, 4, checkpoint=checkpoint, any_order=True, **options)
        auto = solve(profile, 4, checkpoint="auto", any_order=True, **options)
        assert auto.value <= free.value <= given.value
