"""Sizes of micro-batches that do not fit the device, simulated by layers that say so."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpipebal as gb
from gpipebal.errors import ProfileError
from gpipebal.profiler import measure
from gpipebal.profiler.chain import chain, value

WAYS = pytest.mark.parametrize("way", [{}, {"one_at_a_time": True}], ids=["whole", "alone"])
PLACES = ("forward", "backward", "later forward")
#: More calls with 4 rows than any way needs before its first round that counts.
LATE = 12


class Held:
    """What runs that failed had by then, and whether it is still there when it must be gone.

    That is, when the same thread runs the next time, or any other once that thread has ended. Of
    threads that measure side by side one may run while another, which has failed, lets go of what
    it had.
    """

    def __init__(self) -> None:
        self._had: dict[threading.Thread, weakref.ref[Tensor]] = {}
        self.leaks: list[bool] = []

    def note(self, tensor: Tensor) -> None:
        """Note what a run of this thread has, which fails."""
        self._had[threading.current_thread()] = weakref.ref(tensor)

    def look(self, *, all_over: bool = False) -> None:
        """Note whether what must be gone is still there; `all_over`: no thread runs any more."""
        here = threading.current_thread()
        for thread in list(self._had):
            if all_over or thread is here or not thread.is_alive():
                had = self._had.pop(thread, None)
                if had is not None:  # no other thread has looked at it in between
                    self.leaks.append(had() is not None)

    def is_let_go(self) -> bool:
        """Tell, after the profile, whether something has failed, and nothing of it was kept."""
        self.look(all_over=True)
        return bool(self.leaks) and not any(self.leaks)


class Limited(nn.Linear):
    """A layer that finds no memory for more than 2 rows, in a certain place."""

    held = Held()
    place = ""
    n_large = 0
    failure: type[Exception] = torch.OutOfMemoryError

    def forward(self, x: Tensor) -> Tensor:
        Limited.held.look()
        made: Tensor = super().forward(x)
        if len(x) <= 2:
            return made
        Limited.n_large += 1
        if Limited.place == "backward":
            if made.requires_grad:
                Limited.held.note(made)
                made.register_hook(_refuse)
        elif Limited.n_large > (LATE if Limited.place == "later forward" else 0):
            Limited.held.note(made)
            raise Limited.failure("out of memory")
        return made


def _refuse(gradient: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("out of memory")


class LimitedLoss:
    """A loss that finds no memory for more than 2 rows once it has been looked at."""

    held = Held()
    n_large = 0

    def __call__(self, output: Tensor) -> Tensor:
        LimitedLoss.held.look()
        if len(output) > 2:
            LimitedLoss.n_large += 1
            if LimitedLoss.n_large > LATE:
                LimitedLoss.held.note(output)
                raise torch.OutOfMemoryError("out of memory")
        return output.square().mean()


@pytest.fixture(autouse=True)
def counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let every test begin at nothing."""
    monkeypatch.setattr(Limited, "place", "")
    for kind in (Limited, LimitedLoss):
        monkeypatch.setattr(kind, "held", Held())
        monkeypatch.setattr(kind, "n_large", 0)
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
    assert Limited.held.is_let_go()
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
    assert LimitedLoss.held.is_let_go()


@pytest.mark.parametrize("of_loss", [False, True], ids=["layer", "loss"])
def test_of_threads_side_by_side_each_lets_go_of_its_own(
    of_loss: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a thread that has failed still has all, another one runs on."""
    first: list[threading.Thread] = []
    another_ran = threading.Event()
    failed, look = chain.forward_failed, Held.look

    def late(*arguments: Any) -> ProfileError:
        if not first:
            first.append(threading.current_thread())
            assert another_ran.wait(60)
        return failed(*arguments)

    def noted(held: Held, **keywords: Any) -> None:
        look(held, **keywords)
        if first and threading.current_thread() is not first[0]:
            another_ran.set()

    monkeypatch.setattr(chain, "forward_failed", late)
    monkeypatch.setattr(Held, "look", noted)
    monkeypatch.setattr(measure, "visible_cores", lambda: 2)
    Limited.place = "" if of_loss else "later forward"
    layers, loss = ([], LimitedLoss()) if of_loss else ([Limited(4, 4)], None)
    # With time for all rounds the other thread goes on for as long as this one has not ended.
    way = {"threads": 1, "partitions": 2, "timeout": 1000, "as_pipeline": False}
    profile = profiled(way, *layers, loss_fn=loss)
    assert profile.provenance["side_by_side"] == 2 and is_left_out(profile)
    assert another_ran.is_set() and first[0] is not threading.current_thread()
    assert (LimitedLoss if of_loss else Limited).held.is_let_go()


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


@pytest.mark.parametrize("failure", [torch.OutOfMemoryError, RuntimeError])
def test_outputs_that_do_not_fit_together_are_not_measured(
    failure: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured is kept, on CUDA and on a CPU, whose errors are of another kind."""
    join = torch.cat

    def refuse(tensors: Any, *arguments: Any, **keywords: Any) -> Tensor:
        if len(tensors) == 2 and tensors[0].shape == (2, 5):
            raise failure("DefaultCPUAllocator: out of memory")
        return join(tensors, *arguments, **keywords)

    monkeypatch.setattr(torch, "cat", refuse)
    profile = profiled({"rows": ()}, nn.Linear(4, 5), loss_fn=torch.mean)
    assert profile.step.loss is not None and profile.step.whole_loss is None
    (flag,) = [each for each in profile.provenance["flags"] if "gathered" in each]
    assert flag.endswith("the gathered output and its loss: did not fit the device")


@WAYS
def test_an_optimizer_that_does_not_fit_is_not_timed(way: dict[str, Any]) -> None:
    """Its copies or its step may be too large; what was measured is kept."""

    class Large(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            if self.param_groups[0]["params"][0].device.type == "cpu":
                raise torch.OutOfMemoryError("out of memory")

    profile = profiled({**way, "rows": ()}, optimizer=Large)
    assert profile.step.optimizer_time is None
    assert profile.layers[0].optimizer_bytes == 0
    assert (
        "the optimizer's time is not known: no memory for its step" in (profile.provenance["flags"])
    )


class NoGaps(torch.autograd.Function):
    """Takes no gradients with gaps."""

    held = Held()
    failure: type[Exception] = RuntimeError

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        NoGaps.held.look()
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        if not gradient.is_contiguous():
            NoGaps.held.note(gradient)
            raise NoGaps.failure("gradient has gaps")
        return gradient * 2


class Refusing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return NoGaps.apply(x)  # type: ignore[no-any-return]


class Longer(nn.Module):
    """Put more rows behind the input: its gradient is a part of a larger one, without gaps."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, torch.ones_like(x)])[: len(x)].tanh()


@WAYS
@pytest.mark.parametrize("failure", [RuntimeError, torch.OutOfMemoryError])
@pytest.mark.parametrize("is_given_parts", [False, True])
def test_gradients_with_gaps_may_be_refused(
    is_given_parts: bool,
    failure: type[Exception],
    way: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a kernel, or for want of memory, which is told if the chain has any; nothing is kept."""
    monkeypatch.setattr(NoGaps, "held", Held())
    monkeypatch.setattr(NoGaps, "failure", failure)
    behind = Longer() if is_given_parts else nn.Linear(4, 4)
    profile = profiled(way, Refusing(), behind, rows=(), timeout=0, as_pipeline=False)
    assert NoGaps.held.is_let_go()
    told = [flag for flag in profile.provenance["flags"] if "parts of larger ones" in flag]
    is_told = is_given_parts and failure is torch.OutOfMemoryError
    assert ["layer '1'" in flag for flag in told] == [True] * is_told
