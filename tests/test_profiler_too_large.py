"""Sizes of micro-batches that do not fit the device, simulated by layers that say so."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpipebal as gb
from gpipebal.errors import ProfileError

WAYS = pytest.mark.parametrize("way", [{}, {"one_at_a_time": True}], ids=["whole", "alone"])
PLACES = ("forward", "backward", "later forward")


class Limited(nn.Linear):
    """A layer that finds no memory for more than 2 rows, in a certain place.

    It notes whether what it had made by then is still there when it runs the next time.
    """

    held: weakref.ref[Tensor] | None = None
    leaks: tuple[bool, ...] = ()
    place = ""
    n_large = 0

    def forward(self, x: Tensor) -> Tensor:
        if Limited.held is not None:
            Limited.leaks += (Limited.held() is not None,)
            Limited.held = None
        made: Tensor = super().forward(x)
        if len(x) <= 2:
            return made
        Limited.n_large += 1
        late = 12 if Limited.place == "later forward" else 0
        if Limited.place == "backward":
            if made.requires_grad:
                made.register_hook(_refuse)
            return made
        if Limited.n_large > late:
            Limited.held = weakref.ref(made)
            raise torch.OutOfMemoryError("out of memory")
        return made


def _refuse(gradient: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("out of memory")


@WAYS
@pytest.mark.parametrize("place", PLACES)
def test_a_size_that_does_not_fit_is_left_out(
    place: str, way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profile says so; nothing of the failed run is kept while others are measured."""
    for name, value in {"place": place, "leaks": (), "held": None, "n_large": 0}.items():
        monkeypatch.setattr(Limited, name, value)
    model = nn.Sequential(nn.Linear(4, 4), Limited(4, 4), nn.Linear(4, 4))
    profile = gb.profile_model(model, torch.ones(4, 4), chunks=2, **way, progress=False)
    assert profile.rows == 2
    assert all(other.rows < 2 for other in profile.other_sizes)
    assert any("not measured at 4 rows" in note for note in profile.provenance["flags"])
    assert not any(Limited.leaks)


@WAYS
@pytest.mark.parametrize("place", PLACES[:2])
def test_a_micro_batch_that_does_not_fit_names_the_layer(
    place: str, way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is nothing to measure then."""
    for name, value in {"place": place, "leaks": (), "held": None, "n_large": 0}.items():
        monkeypatch.setattr(Limited, name, value)
    model = nn.Sequential(nn.Linear(4, 4), Limited(4, 4))
    with pytest.raises(
        ProfileError, match=r"layer '1'.*\n?.*out of memory.*\nFix: profile with one"
    ):
        gb.profile_model(model, torch.ones(8, 4), chunks=2, **way, progress=False)


@WAYS
def test_no_memory_for_a_gradient_is_named(
    way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a backward starts from is the profiler's own: the error says what it is."""
    from gpipebal.profiler import value

    def refuse(like: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(value.torch, "randn_like", refuse)
    with pytest.raises(ProfileError, match=r"no memory is left for the gradient .*\nFix: profile"):
        gb.profile_model(nn.Sequential(nn.Linear(4, 4)), torch.ones(4, 4), **way, progress=False)
