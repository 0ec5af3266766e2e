"""Edges of profiles: losses that write, frozen layers alone, caches, counts of other types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from estimated import estimate_profile
from torch import Tensor, nn

import gpipebal as gb
from gpipebal.cli import _is_users_own
from gpipebal.errors import BalanceError, ProfileError

CACHE: dict[int, Tensor] = {}


class Positions(nn.Module):
    """A layer that keeps a table outside of itself."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] not in CACHE:
            CACHE[x.shape[1]] = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)
        return x + CACHE[x.shape[1]]


@pytest.mark.parametrize("way", [{}, {"one_at_a_time": True}, {"method": "estimate"}])
def test_a_loss_that_writes_to_its_target_leaves_the_callers_alone(way: dict[str, Any]) -> None:
    """It works on copies; the caller's target is not even counted as written to."""
    target = torch.zeros(8, 3)

    def loss_fn(output: Tensor, wanted: Tensor) -> Tensor:
        return (output - wanted.add_(1)).square().mean()

    if "method" not in way:
        way = {**way, "timeout": 0.0}
    gb.profile_model(
        nn.Sequential(nn.Linear(4, 3)), torch.ones(8, 4), chunks=2, loss_fn=loss_fn,
        target=target, **way,
    )  # fmt: skip
    assert target._version == 0 and not target.any()


def test_the_optimizers_time_alone_is_that_of_what_it_steps() -> None:
    """A large frozen layer does not make the step free."""
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 2))
    model[0].requires_grad_(False)
    profile = gb.profile_model(
        model, torch.ones(4, 64), chunks=2, rows=(), timeout=0.0, one_at_a_time=True,
        optimizer=torch.optim.SGD,
    )  # fmt: skip
    assert profile.step.optimizer_time is not None and profile.step.optimizer_time > 0


def test_estimates_leave_caches_without_meta_tensors() -> None:
    """Also where the estimate is asked for by its own name."""
    CACHE.clear()
    model = nn.Sequential(nn.Linear(4, 4), Positions())
    estimate_profile(model, torch.ones(2, 4))
    assert not any(table.is_meta for table in CACHE.values())
    assert model(torch.ones(2, 4)).isfinite().all()


def test_estimates_refuse_what_tells_how_to_measure() -> None:
    """A trial as a pipeline is a measurement."""
    with pytest.raises(ProfileError, match="as_pipeline has no meaning"):
        gb.profile_model(
            nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4), method="estimate", as_pipeline=False
        )


def test_counts_of_numpy_are_counts() -> None:
    """They become plain numbers; a flag is not a count, and none is below 1."""
    profile = gb.Profile.from_costs([1.0, 2.0], rows=np.int64(2), chunks=np.int32(4))
    assert (profile.rows, profile.chunks, type(profile.chunks)) == (2, 4, int)
    with pytest.raises(ProfileError, match="chunks=True"):
        gb.Profile.from_costs([1.0], chunks=True)
    with pytest.raises(ProfileError, match="chunks=0 "):
        gb.Profile.from_costs([1.0], chunks=0)


@pytest.mark.parametrize("flag", ["share_identical", "one_at_a_time"])
def test_flags_of_numpy_are_flags(flag: str, tmp_path: Path) -> None:
    """The profile has them as plain values, which a file can hold."""
    given: dict[str, Any] = {flag: np.True_, "rows": (), "timeout": 0.0, "progress": np.False_}
    profile = gb.profile_model(nn.Sequential(nn.Linear(2, 2)), torch.ones(2, 2), **given)
    profile.save(tmp_path / "profile.json")
    assert gb.Profile.load(tmp_path / "profile.json") == profile
    assert profile.provenance["one_at_a_time"] is True


def test_too_few_layers_are_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the number of partitions is found out."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("gpipebal.balance.profile_model", lambda *a, **k: pytest.fail("measured"))
    for balance in (gb.balance_by_time, gb.balance_by_size):
        with pytest.raises(BalanceError, match="fewer layers than partitions: partitions=2"):
            balance(nn.Sequential(nn.Linear(2, 2)), torch.ones(2, 2))


def test_memory_that_is_missing_is_no_fault_of_the_users_code() -> None:
    """A layer's own exception is; both are profile errors."""
    no_room = "[enforce fail] DefaultCPUAllocator: can't allocate memory"
    for cause, expected in (
        (torch.OutOfMemoryError("no room"), False),
        (RuntimeError(no_room), False),
        (MemoryError(), False),
        (RuntimeError("a shape does not fit"), True),
        (KeyError("x"), True),
    ):
        error = ProfileError("layer '0' failed")
        error.__cause__ = cause
        assert _is_users_own(error) is expected
