"""Sizes of micro-batches that do not fit the device, simulated by layers that say so."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpipebal as gb
from gpipebal.errors import ProfileError
from gpipebal.profiler.chain import value

WAYS = pytest.mark.parametrize("way", [{}, {"one_at_a_time": True}], ids=["whole", "alone"])
PLACES = ("forward", "backward", "later forward")
#: More calls with 4 rows than any way needs before its first round that counts.
LATE = 12


class Limited(nn.Linear):
    """A layer that finds no memory for more than 2 rows, in a certain place.

    It notes whether what it had made by then is still there when it runs the next time.
    """

    held: weakref.ref[Tensor] | None = None
    leaks: tuple[bool, ...] = ()
    place = ""
    n_large = 0
    failure: type[Exception] = torch.OutOfMemoryError

    def forward(self, x: Tensor) -> Tensor:
        if Limited.held is not None:
            Limited.leaks += (Limited.held() is not None,)
            Limited.held = None
        made: Tensor = super().forward(x)
        if len(x) <= 2:
            return made
        Limited.n_large += 1
        if Limited.place == "backward":
            if made.requires_grad:
                Limited.held = weakref.ref(made)
                made.register_hook(_refuse)
        elif Limited.n_large > (LATE if Limited.place == "later forward" else 0):
            Limited.held = weakref.ref(made)
            raise Limited.failure("out of memory")
        return made


def _refuse(gradient: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("out of memory")


class LimitedLoss:
    """A loss that finds no memory for more than 2 rows once it has been looked at."""

    n_large = 0
    given: weakref.ref[Tensor] | None = None
    leaks: tuple[bool, ...] = ()

    def __call__(self, output: Tensor) -> Tensor:
        if LimitedLoss.given is not None:
            LimitedLoss.leaks += (LimitedLoss.given() is not None,)
            LimitedLoss.given = None
        if len(output) > 2:
            LimitedLoss.n_large += 1
            if LimitedLoss.n_large > LATE:
                LimitedLoss.given = weakref.ref(output)
                raise torch.OutOfMemoryError("out of memory")
        return output.square().mean()


@pytest.fixture(autouse=True)
def counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let every test begin at nothing."""
    for name, start in {"place": "", "leaks": (), "held": None, "n_large": 0}.items():
        monkeypatch.setattr(Limited, name, start)
    for name, start in {"leaks": (), "given": None, "n_large": 0}.items():
        monkeypatch.setattr(LimitedLoss, name, start)
    yield


def profiled(
    way: dict[str, Any], *layers: nn.Module, n_rows: int = 4, **options: Any
) -> gb.Profile:
    """Profile layers on a sample, in two micro-batches; 4 rows are the other size of 2."""
    model, sample = nn.Sequential(nn.Linear(4, 4), *layers), torch.ones(n_rows, 4)
    return gb.profile_model(model, sample, chunks=2, progress=False, **way, **options)


def is_left_out(profile: gb.Profile, rows: int = 4) -> bool:
    """Tell whether a profile says that a size is not measured, and has none of it."""
    flags = profile.provenance["flags"]
    sizes = [other.rows for other in profile.other_sizes]
    return rows not in sizes and any(f"not measured at {rows} rows" in note for note in flags)


@WAYS
@pytest.mark.parametrize("place", PLACES)
def test_a_size_that_does_not_fit_is_left_out(place: str, way: dict[str, Any]) -> None:
    """The profile says so; nothing of the failed run is kept while others are measured."""
    Limited.place = place
    profile = profiled(way, Limited(4, 4), nn.Linear(4, 4))
    assert profile.rows == 2 and is_left_out(profile)
    leaks = Limited.leaks
    if Limited.held is not None:  # time was up, and it did not run again
        leaks += (Limited.held() is not None,)
    assert leaks and not any(leaks)
    if place == "later forward":
        assert Limited.n_large > LATE


@WAYS
def test_identical_layers_are_right_behind_a_size_that_was_left_out(way: dict[str, Any]) -> None:
    """Of the sizes 1, 2 and 4 the last one goes; the others keep their numbers."""
    Limited.place = "forward"
    layers = [nn.Linear(4, 4), Limited(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]
    profile = profiled(way, *layers, share_identical=True)
    plain = profiled(way, *[nn.Linear(4, 4) for _ in layers])
    assert is_left_out(profile)
    for mine, theirs in zip(profile.layers, plain.layers, strict=True):
        assert (mine.output_bytes, mine.backward_peak_bytes) == (
            theirs.output_bytes,
            theirs.backward_peak_bytes,
        )


@WAYS
@pytest.mark.parametrize("place", PLACES[::2])
def test_a_size_that_was_asked_for_must_fit(place: str, way: dict[str, Any]) -> None:
    """No part of what `rows=` names is left out."""
    Limited.place = place
    with pytest.raises(ProfileError, match="out of memory"):
        profiled({**way, "rows": [1, 4]}, Limited(4, 4))


@WAYS
def test_other_failures_of_later_rounds_are_raised(
    way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only memory is a reason to leave a size out that could be looked at."""
    Limited.place = "later forward"
    monkeypatch.setattr(Limited, "failure", ValueError)
    with pytest.raises(ProfileError, match="ValueError"):
        profiled(way, Limited(4, 4))


@WAYS
def test_a_loss_that_does_not_fit_leaves_its_size_out(way: dict[str, Any]) -> None:
    """Its input is not kept either."""
    profile = profiled(way, loss_fn=LimitedLoss())
    assert profile.step.loss is not None
    assert is_left_out(profile)
    assert LimitedLoss.leaks and not any(LimitedLoss.leaks)


@WAYS
@pytest.mark.parametrize("place", PLACES[:2])
def test_a_micro_batch_that_does_not_fit_names_the_layer(place: str, way: dict[str, Any]) -> None:
    """There is nothing to measure then."""
    Limited.place = place
    advice = "with more" if way.get("one_at_a_time") else "with one_at_a_time=True"
    with pytest.raises(
        ProfileError, match=rf"layer '1'.*\n?.*out of memory.*\nFix: profile {advice}"
    ):
        profiled(way, Limited(4, 4), n_rows=8)


@WAYS
def test_no_memory_for_a_gradient_is_named(
    way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a backward starts from is the profiler's own: the error says what it is."""

    def refuse(like: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(value.torch, "randn_like", refuse)  # type: ignore[attr-defined]
    with pytest.raises(ProfileError, match=r"no memory is left for the gradient .*\nFix: profile"):
        profiled(way)


@WAYS
def test_no_memory_for_a_copy_is_named(
    way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So is what a layer that writes to its input is given."""
    clone = Tensor.clone

    def refuse(tensor: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        if tensor.shape == (2, 5):
            raise torch.OutOfMemoryError("out of memory")
        return clone(tensor, *arguments, **keywords)

    monkeypatch.setattr(Tensor, "clone", refuse)
    with pytest.raises(ProfileError, match=r"no memory is left for a copy .*\nFix: profile"):
        profiled(way, nn.Linear(4, 5), nn.ReLU(inplace=True))
