"""Which layer's backward failed: named in the error, although nothing watches the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from gpipebal import GPipe
from gpipebal.pipeline.process import engine_state

MODES = ("never", "except_last", "always")


class OddError(Exception):
    """What the layers below raise."""


class _Raise(Function):
    """Hand a tensor on; the backward raises, and there is nothing that it has saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise OddError


class Raises(nn.Module):
    """Fail in the backward of a function written in Python."""

    def forward(self, x: Tensor) -> Tensor:
        return _Raise.apply(x)


class Hooked(nn.Module):
    """Fail in a hook of a tensor inside the layer, between operations that save something."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.tanh()
        if y.requires_grad:
            y.register_hook(self._fail)
        return y.sigmoid()

    def _fail(self, gradient: Tensor) -> Tensor:
        raise OddError


class Adds(nn.Module):
    """Save nothing at all."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def notes_of(pipe: GPipe, rows: int = 4, **step: Any) -> str:
    """Run a step that fails, and return what stands under the error."""
    with pytest.raises(OddError) as caught:
        if step:
            pipe.step(torch.ones(rows, 3), **step)
        else:
            pipe(torch.ones(rows, 3)).sum().backward()
    return "\n".join(caught.value.__notes__)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [Raises, Hooked])
@pytest.mark.parametrize("place", [1, 2, 3, 4])
def test_the_layer_is_named(bad: type[nn.Module], place: int, mode: str) -> None:
    """Wherever it is, between layers that save something, and whatever is recomputed."""
    layers: list[nn.Module] = [nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.ReLU()]
    layers.insert(place, bad())
    pipe = GPipe(nn.Sequential(*layers), [2, 3], chunks=2, checkpoint=mode)
    assert f"in the backward of layer '{place}' (layer {place} of the chain)\n" in notes_of(pipe)


def test_layers_that_save_nothing_are_all_named() -> None:
    """A hook that fails between layers that save nothing may be of each of them."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), Adds(), Adds(), nn.Linear(3, 3))

    def fail(gradient: Tensor) -> Tensor:
        raise OddError

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(fail)

    layers[2].register_forward_hook(hook)
    notes = notes_of(GPipe(layers, [5], chunks=2, checkpoint="never"))
    assert (
        "in the backward of layer '3' (layer 3 of the chain) or before it, down to "
        "layer '1' (layer 1 of the chain)\n" in notes
    )


def test_the_loss_is_named() -> None:
    """The loss inside the last partition comes behind its layers."""
    pipe = GPipe(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), [1, 1], chunks=2)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return _Raise.apply((output - target).square().mean())

    assert "in the backward of the loss\n" in notes_of(pipe, target=torch.zeros(4, 3), loss_fn=loss)


def test_a_kept_graph_tells_nothing() -> None:
    """With `retain_graph` nothing is freed: partition and micro-batch are still noted."""
    pipe = GPipe(nn.Sequential(nn.Linear(3, 3), Raises()), [1, 1], chunks=2, checkpoint="never")
    output = pipe(torch.ones(4, 3)).sum()
    with pytest.raises(OddError) as caught:
        output.backward(retain_graph=True)
    notes = "\n".join(caught.value.__notes__)
    assert "in the backward of" not in notes
    assert "in partition 1, backward of micro-batch" in notes


def test_saved_tensor_hooks_are_not_called_to_find_out() -> None:
    """What was packed stays packed once the backward has failed."""
    unpacked: list[Any] = []

    def unpack(packed: Any) -> Any:
        unpacked.append(packed)
        return packed

    layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Tanh(), Raises())
    pipe = GPipe(layers, [4], checkpoint="never")
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
        assert "in the backward of layer '3'" in notes_of(pipe)
    assert not unpacked


def test_without_numbers_of_nodes_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that does not number its nodes, or does it otherwise, costs the name alone."""
    monkeypatch.setattr(engine_state, "next_node", lambda: None)
    pipe = GPipe(nn.Sequential(nn.Linear(3, 3), Raises()), [1, 1], chunks=2)
    notes = notes_of(pipe)
    assert "in the backward of" not in notes
    assert "in partition 1" in notes


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("late", [False, True])
def test_a_hook_of_a_parameter_may_be_of_its_layer(place: int, late: bool) -> None:
    """It runs behind its layer's backward, so the layer before may be in question too."""

    def fail(given: Tensor) -> None:
        raise OddError

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    weight = model[place].weight
    if late:
        weight.register_post_accumulate_grad_hook(fail)
    else:
        weight.register_hook(fail)
    notes = notes_of(GPipe(model, [2, 1], chunks=4, checkpoint="never"))
    named = f"in the backward of layer '{place}' (layer {place} of the chain)"
    before = " or before it, down to layer '0' (layer 0 of the chain)" if place else ""
    assert f"{named}{before}\n" in notes


@pytest.mark.parametrize(("sizes", "chunks"), [([3], 2), ([1, 2], 1)])
def test_values_from_a_graph_of_the_callers_own(sizes: list[int], chunks: int) -> None:
    """Several backwards lead into it: an error that says so if it has saved anything."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    pipe, x = GPipe(model, sizes, chunks=chunks, checkpoint="never"), torch.randn(4, 3)
    base = torch.randn(24, requires_grad=True)

    def loss(module: nn.Module, make: Callable[[Tensor], Tensor]) -> Tensor:
        parts = make(base).split([p.numel() for p in model.parameters()])
        pairs = zip(model.named_parameters(), parts, strict=True)
        values = {name: part.view(p.shape) for (name, p), part in pairs}
        return torch.func.functional_call(module, values, (x,)).sum()  # type: ignore[no-any-return]

    with pytest.raises(RuntimeError, match="a second time") as caught:
        loss(pipe, torch.tanh).backward()
    assert any("pass its gradient on" in note for note in caught.value.__notes__)
    for make, keep in ((torch.tanh, True), (torch.neg, False)):
        (expected,) = torch.autograd.grad(loss(model, make), base)
        base.grad = None
        loss(pipe, make).backward(retain_graph=keep)
        torch.testing.assert_close(base.grad, expected)
