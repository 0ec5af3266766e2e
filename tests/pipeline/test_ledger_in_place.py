"""The ledger against torch's own allocator, which no mode watches: the peaks of backwards."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from benchmark_tools.allocator import mark, peaks_between_marks
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from gpipebal.pipeline.observers import in_place
from gpipebal.pipeline.observers.ledger import Ledger

N = 1000
HALF = torch.arange(0, N, 2)
#: A number or two that an operation makes of its own.
SMALL = 64


class Custom(torch.autograd.Function):
    """A user's own function, whose backward adds up and writes as a user would."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, _ = ctx.saved_tensors
        (gradient,) = gradients
        picked = torch.zeros(N).index_add(0, HALF, gradient[: N // 2])
        return gradient + x, (gradient * 1 + gradient * 2) + picked


class WithConstants(torch.autograd.Function):
    """A user's function of two constants, whose backward has torch add up terms of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a)
        return x * a * b

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (a,) = ctx.saved_tensors
        return F.hinge_embedding_loss(gradients[0], a, reduction="none"), None, None


def hooked(x: Tensor) -> Tensor:
    """A value with a hook that adds to its gradient."""
    value = x * 1
    value.register_hook(lambda gradient: gradient + x.detach() * 2)
    return value * 2


def spread(x: Tensor) -> Tensor:
    """A formula of torch's own that adds up what it has computed."""
    deviation, mean = torch.std_mean(x * 1)
    return deviation * 2 + mean * 3


LAYERS: dict[str, Callable[[Tensor], Tensor]] = {
    "gather": lambda x: x.gather(0, HALF),
    "index": lambda x: x[HALF],
    "index, a list": lambda x: x[[1, 2, 3]],
    "index_select": lambda x: x.index_select(0, HALF),
    "take": lambda x: x.take(HALF),
    "sort": lambda x: x.sort()[0],
    "topk": lambda x: x.topk(10)[0],
    "largest": lambda x: x.view(10, -1).max(0)[0],
    "median": lambda x: x.view(10, -1).median(0)[0],
    "trace": lambda x: x.view(25, 40).trace(),
    "two uses": lambda x: x.exp() + x.sin(),
    "three uses": lambda x: x.exp() + x.sin() + x.cos(),
    "two uses of a result": lambda x: (lambda h: h.exp() + h.sin())(x * 2),
    "three scaled uses": lambda x: (lambda h: h * 2 + h * 3 + h * 4)(x * 2),
    "residual": lambda x: x + x.exp(),
    "residual, block first": lambda x: x.exp() + x,
    "square": lambda x: (lambda h: h * h)(x * 2),
    "square of the input": lambda x: x * x,
    "joined with itself": lambda x: torch.cat([x, x, x.exp()]),
    "halves": lambda x: (lambda h: h[:500] * h[500:] + h[:500])(x * 2),
    "split": lambda x: sum((part.sum() for part in x.tensor_split(3)), torch.zeros(())),
    "normalised residual": lambda x: (lambda h: h + F.layer_norm(h, (N,)))(x * 2),
    "attention": lambda x: F.softmax(x.view(50, 20) @ x.view(20, 50), -1) @ x.view(50, 20),
    "loss of two classes": lambda x: F.binary_cross_entropy_with_logits(x, torch.ones(N)),
    "weighted loss of two classes": lambda x: F.binary_cross_entropy_with_logits(
        x, torch.ones(N), pos_weight=torch.full((N,), 2.0)
    ),
    "loss of two classes, by a trained target": lambda x: F.binary_cross_entropy_with_logits(
        x, (x * 1).sigmoid()
    ),
    # These add up and write in new memory, whoever watches.
    "a user's function": lambda x: Custom.apply(x * 1, x.detach().requires_grad_() * 1),
    "a user's function of constants": lambda x: WithConstants.apply(
        x * 1, torch.ones(N), torch.ones(N)
    ),
    "a hook": hooked,
    "standard deviation and mean": spread,
    "logarithm of a sum": lambda x: torch.logaddexp(x * 2, x * 3),
    "interpolation": lambda x: torch.lerp(x, x * 2, x * 3),
}


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_a_backward_needs_what_it_needs_unwatched(layer: Callable[[Tensor], Tensor]) -> None:
    """Also where torch writes in place only if no mode is on."""
    assert counted(layer) == pytest.approx(allocated(layer), abs=SMALL)


def test_what_is_counted_is_not_what_is_computed() -> None:
    """Gradients are the same to the last bit, also of a leaf that has one already."""
    gradients = []
    for watched in (False, True):
        x = torch.linspace(0, 1, N).requires_grad_()
        ledger = Ledger()
        for layer in LAYERS.values():
            if watched:
                with ledger.watch(0):
                    layer(x).sum().backward()
            else:
                layer(x).sum().backward()
        assert x.grad is not None
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_nothing_is_lost_or_left_when_it_is_over() -> None:
    """The gradient remains; operands whose place was taken are not taken away again."""
    ledger, x = Ledger(), torch.rand(N, requires_grad=True)
    ledger.hold([x], 0)
    with ledger.watch(0):
        for _ in range(3):
            (x.exp() + x.sin() + x[HALF].sum()).sum().backward()
    assert ledger.live == [2 * x.nbytes]


def test_with_a_graph_of_the_gradient_nothing_is_in_place() -> None:
    """`create_graph=True` needs new memory, with a mode and without one."""
    ledger, x = Ledger(), torch.rand(N, requires_grad=True)
    with ledger.watch(0):
        total = (x.exp() + x.sin()).sum()
        before = ledger.start_peak()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of a cycle that the next line ends
            total.backward(create_graph=True)
    x.grad = None
    assert ledger.total_peak - before >= 3 * x.nbytes


def test_a_torch_that_does_not_tell_counts_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no one can say who holds a tensor, its result has its own place: too much."""
    monkeypatch.setattr(in_place, "_holders_of_a_gradient", lambda: (0, 0, 0))
    for name in "gather", "loss of two classes", "three scaled uses":
        assert counted(LAYERS[name]) >= allocated(LAYERS[name]) + 4 * N - SMALL


def counted(layer: Callable[[Tensor], Tensor]) -> int:
    """Return the peak of a backward by the ledger, in bytes."""
    ledger, x = Ledger(), torch.linspace(0, 1, N).requires_grad_()
    ledger.hold([x], 0)
    with ledger.watch(0):
        output = layer(x)
        gradient = torch.ones_like(output)
        before = ledger.start_peak()
        output.backward(gradient)
    return ledger.total_peak - before


def allocated(layer: Callable[[Tensor], Tensor]) -> int:
    """Return the same from what torch's allocator reports."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as report:
        x = torch.linspace(0, 1, N).requires_grad_()
        output = layer(x)
        gradient = torch.ones_like(output)
        mark()
        output.backward(gradient)
        mark()
    return peaks_between_marks(report)[1]
