"""A profile says if other programs had the cores while it was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gpipebal as gb
from gpipebal.profiler.describe import BUSY_SHARE
from gpipebal.profiler.times import cores
from gpipebal.profiler.times.cores import CoreWatch

pytestmark = pytest.mark.timeout(60)


def busy_flags(**options: Any) -> list[str]:
    """Profile a small model; return what it says of other programs."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    given: Any = {"chunks": 2, "rows": [], "timeout": 0, "as_pipeline": False, **options}
    profile = gb.profile_model(model, torch.randn(8, 4), **given)
    flags: list[str] = profile.provenance["flags"]
    return [flag for flag in flags if flag.startswith("busy: ")]


@pytest.mark.parametrize("alone", [False, True])
def test_who_had_no_core_half_of_the_time_says_so(
    alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever way it is measured."""
    monkeypatch.setattr(CoreWatch, "share_waited", lambda watch: 0.5)
    (flag,) = busy_flags(one_at_a_time=alone)
    assert flag.startswith("busy: at 4 rows threads had no core for 50% of the time")


@pytest.mark.parametrize("share", [None, 0.0, BUSY_SHARE / 2])
def test_who_had_one_or_cannot_know_says_nothing(
    share: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A little is the system's own work; and not every system tells."""
    monkeypatch.setattr(CoreWatch, "share_waited", lambda watch: share)
    assert busy_flags() == []


def test_what_the_system_says_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second number, in nanoseconds; what is no such file tells nothing."""
    path = tmp_path / "schedstat"
    monkeypatch.setattr(cores, "_PATH", str(path))
    assert CoreWatch().share_waited() is None
    path.write_text("5000000000 0 12\n")
    watch = CoreWatch()
    path.write_text("5000000000 3600000000000 12\n")
    assert watch.share_waited() == 1
    for text in ("", "1", "1 x 2"):
        path.write_text(text)
        assert CoreWatch().share_waited() is None
