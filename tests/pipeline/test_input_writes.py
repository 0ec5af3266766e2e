"""Layers that begin to write to the input of their partition, or stop, while a model trains."""

from __future__ import annotations

import copy
from collections.abc import Generator

import pytest
import torch
from torch import Tensor, nn

from gpipebal.errors import ModelError
from gpipebal.pipeline import GPipe
from gpipebal.schedule import CHECKPOINT_MODES, CheckpointMode
from gpipebal.skip import pop, skippable, stash

pytestmark = pytest.mark.timeout(60)
MODES = pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
HEADS = pytest.mark.parametrize("head", [0, 1])
SCHEDULES = pytest.mark.parametrize("schedule", [None, "1f1b"])


class Double(nn.Module):
    """Doubles its input, in place once it is told to."""

    in_place = False

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2) if self.in_place else x * 2


def model_with(layer: nn.Module, head: int) -> nn.Sequential:
    """Return a chain whose layer number `head` is this one."""
    layers = [nn.Linear(3, 3), nn.Linear(3, 3)]
    return nn.Sequential(*layers[:head], layer, *layers[head:])


def train(pipe: GPipe, x: Tensor, schedule: str | None) -> Tensor:
    """Run a step without an optimizer; return the gradient of the last layer."""
    pipe.zero_grad()
    if schedule is None:
        pipe(x).square().sum().backward()
    else:
        pipe.step(x, loss_fn=lambda y: y.square().sum(), reduction="sum", schedule=schedule)
    gradient = pipe[-1].weight.grad
    assert isinstance(gradient, Tensor)
    return gradient


def gradient_of(plain: nn.Sequential, x: Tensor) -> Tensor:
    """Return what `train` should."""
    plain = copy.deepcopy(plain)
    plain.zero_grad()
    plain(x.clone()).square().sum().backward()
    gradient = plain[-1].weight.grad
    assert isinstance(gradient, Tensor)
    return gradient


@MODES
@HEADS
@SCHEDULES
@pytest.mark.parametrize("nested", [False, True])
def test_a_dropout_in_place_may_begin_later(
    checkpoint: CheckpointMode, head: int, schedule: str | None, nested: bool
) -> None:
    """It says beforehand that it may write: no step fails, and the mini-batch stays as it is."""
    drop = nn.Dropout(0.0, inplace=True)
    layer = nn.Sequential(drop, nn.Identity()) if nested else drop
    balance = [1, 2] if head else [2, 1]
    pipe = GPipe(model_with(layer, head), balance, chunks=3, checkpoint=checkpoint)
    x = torch.randn(6, 3)
    before = x.clone()
    for drop.p in (0.0, 1.0, 0.0, 1.0):
        gradient = train(pipe, x, schedule)
        assert torch.equal(x, before)
        torch.testing.assert_close(gradient, gradient_of(nn.Sequential(*pipe), x))


@MODES
@HEADS
@SCHEDULES
def test_a_layer_that_begins_to_write_is_named_once(
    checkpoint: CheckpointMode, head: int, schedule: str | None
) -> None:
    """The step in which it is noticed fails; from then on it may write, or not, as it likes."""
    double = Double()
    balance = [1, 2] if head else [2, 1]
    pipe = GPipe(model_with(double, head), balance, chunks=3, checkpoint=checkpoint)
    x = torch.randn(6, 3)
    train(pipe, x, schedule)
    double.in_place = True
    with pytest.raises(ModelError, match=rf"layer '{head}'.*\nFix: run the mini-batch again"):
        train(pipe, x.clone(), schedule)
    before = x.clone()
    for in_place in (True, False, True):
        double.in_place = in_place
        gradient = train(pipe, x, schedule)
        assert torch.equal(x, before)
        torch.testing.assert_close(gradient, gradient_of(nn.Sequential(*pipe), x))


@pytest.mark.parametrize("head", [0, 1, 2, 3, 4])
def test_a_writer_behind_views_is_named(head: int) -> None:
    """The layers that pass the input on are not blamed; far behind, one of several is."""
    double = Double()
    layers = [nn.Flatten() for _ in range(head)]
    pipe = GPipe(nn.Sequential(*layers, double, nn.Linear(3, 3)), [head + 2], checkpoint="never")
    train(pipe, torch.randn(6, 3), None)
    double.in_place = True
    named = "while layer '2'.* or one after it ran: by it, or by .* another partition"
    if head < 2:
        named = f"while layer '{head}'.* ran: by it, or by .* another partition"
    with pytest.raises(ModelError, match=named):
        train(pipe, torch.randn(6, 3), None)


@MODES
def test_a_write_to_what_is_also_a_skip_is_refused(checkpoint: CheckpointMode) -> None:
    """A copy would hide it from the layer that pops the skip."""

    @skippable(stash=["kept"])
    class Keep(nn.Module):
        def forward(self, x: Tensor) -> Generator[stash, None, Tensor]:
            y = x * 1
            yield stash("kept", y)
            return y

    @skippable(pop=["kept"])
    class Take(nn.Module):
        def forward(self, x: Tensor) -> Generator[pop, Tensor, Tensor]:
            return x + (yield pop("kept"))

    drop = nn.Dropout(0.0, inplace=True)
    layers = [Keep(), drop, Take(), nn.Linear(3, 3)]
    pipe = GPipe(nn.Sequential(*layers), [1, 3], chunks=2, checkpoint=checkpoint)
    train(pipe, torch.randn(6, 3), None)
    drop.p = 0.5
    for _ in range(3):
        with pytest.raises(ModelError, match="partition 1"):
            train(pipe, torch.randn(6, 3), None)


class Clamp(nn.Module):
    """Limits its parameter, without asking autograd, once it is told to."""

    limited = False

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.given: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.given.append(x.data_ptr())
        return x * (self.weight.clamp_(max=1) if self.limited else self.weight)


REFUSED = "a leaf Variable that requires grad"


def test_a_parameter_that_torch_refuses_to_change_gives_torchs_error() -> None:
    """At first it may have been the input; when the layers are looked at again it is not."""
    clamp = Clamp()
    pipe = GPipe(nn.Sequential(clamp, nn.Linear(3, 3)), [2], checkpoint="never")
    x = torch.ones(6, 3, requires_grad=True)
    train(pipe, x, None)
    clamp.limited = True
    with pytest.raises(ModelError, match="probably to an input"):
        train(pipe, x, None)
    with pytest.raises(RuntimeError, match=REFUSED):
        train(pipe, x, None)
    # So the input is not copied any more, once the layers have been looked at.
    clamp.limited = False
    train(pipe, x, None)
    clamp.given.clear()
    train(pipe, x, None)
    assert clamp.given == [x.data_ptr()]


def test_an_input_without_a_gradient_is_not_what_torch_refuses_to_change() -> None:
    """Nothing but a parameter can be meant: torch's own error comes at once."""
    clamp = Clamp()
    pipe = GPipe(nn.Sequential(clamp, nn.Linear(3, 3)), [2], checkpoint="never")
    x = torch.ones(6, 3)
    train(pipe, x, None)
    clamp.limited = True
    for _ in range(2):
        with pytest.raises(RuntimeError, match=REFUSED):
            train(pipe, x, None)


def test_a_refused_write_of_another_layer_says_nothing_of_the_input() -> None:
    """A layer that may have written to the input gets a copy, whatever others are refused."""
    double, clamp = Double(), Clamp()
    layers = [nn.Linear(3, 3), double, clamp, nn.Linear(3, 3)]
    pipe = GPipe(nn.Sequential(*layers), [1, 3], checkpoint="never")
    train(pipe, torch.ones(6, 3), None)
    double.in_place = True
    with pytest.raises(ModelError, match=r"layer '1'.* probably to an input"):
        train(pipe, torch.ones(6, 3), None)
    double.in_place, clamp.limited = False, True
    with pytest.raises(RuntimeError, match=REFUSED):
        train(pipe, torch.ones(6, 3), None)
    clamp.limited = False
    train(pipe, torch.ones(6, 3), None)
    double.in_place = True
    train(pipe, torch.ones(6, 3), None)
