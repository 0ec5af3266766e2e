"""The private functions of torch's engine answer what the executor relies on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import get_gradient_edge
from torch.fx.experimental.proxy_tensor import make_fx

from gpipebal.pipeline.process import engine_state


def ask(call: Any) -> tuple[bool, bool]:
    """Run a backward, and return (keeps the graph, runs a leaf that nobody asked for)."""
    answers: list[tuple[bool, bool]] = []
    leaf = torch.ones(1, requires_grad=True)
    node = get_gradient_edge(leaf).node

    class Ask(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            answers.append((engine_state.keeps_graph(), engine_state.will_run(node)))
            return gradient * 2, torch.zeros(1)

    x = torch.ones(3, requires_grad=True)
    call(Ask.apply(x, leaf).sum(), x)
    return answers[0]


@pytest.mark.parametrize("keep", [False, True])
def test_keeping_the_graph_is_seen(keep: bool) -> None:
    """keeps_graph() is what backward() was called with."""
    assert ask(lambda loss, x: loss.backward(retain_graph=keep)) == (keep, True)


def test_gradients_of_inputs_alone_are_seen() -> None:
    """will_run() is False for a leaf that torch.autograd.grad was not asked for."""
    assert ask(lambda loss, x: torch.autograd.grad(loss, x)) == (False, False)


def test_the_backward_and_the_node_that_run_are_seen() -> None:
    """One number for all nodes of a backward, another for the next; and nothing outside."""
    seen: list[tuple[int | None, str]] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    for node in (y.grad_fn, y.sum().grad_fn):
        assert node is not None
    z = y.sum()
    for one in (y, z):
        one.register_hook(
            lambda gradient: seen.append(
                (engine_state.current_backward(), type(engine_state.current_node()).__name__)
            )
        )
    for _ in range(2):
        z.backward(retain_graph=True)
    numbers = [number for number, _ in seen]
    assert None not in numbers and numbers[0] == numbers[1] != numbers[2] == numbers[3]
    assert engine_state.current_backward() is None and engine_state.current_node() is None


def test_nodes_are_numbered_as_they_are_made() -> None:
    """The next node of a thread has the number that is told before."""
    x = torch.ones(2, requires_grad=True)
    for _ in range(3):
        number = engine_state.next_node()
        y = x * 2
        assert y.grad_fn is not None
        assert number is None or number == y.grad_fn._sequence_nr()


def test_hooks_of_the_innermost_block_are_seen() -> None:
    """None outside of all blocks."""
    pack, unpack = (lambda tensor: tensor), (lambda tensor: tensor)
    assert engine_state.top_saved_tensors_hooks() is None
    with torch.autograd.graph.save_on_cpu(), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        assert engine_state.top_saved_tensors_hooks() == (pack, unpack)
    assert engine_state.top_saved_tensors_hooks() is None


def test_transforms_are_seen() -> None:
    """Inside of a function that torch.func transforms, and nowhere else."""
    inside: list[bool] = []

    def double(x: torch.Tensor) -> torch.Tensor:
        inside.append(engine_state.is_transformed())
        return 2 * x

    torch.func.vmap(double)(torch.ones(3))
    double(torch.ones(3))
    assert inside == [True, False]


@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_traces_and_fake_tensors_are_seen(pre_dispatch: bool) -> None:
    """While a graph is recorded, before autograd or after, or nothing really runs."""
    inside: list[tuple[bool, bool]] = []

    def double(x: torch.Tensor) -> torch.Tensor:
        inside.append((engine_state.is_recorded(), engine_state.is_fake()))
        return 2 * x

    make_fx(double, pre_dispatch=pre_dispatch)(torch.ones(3))
    with FakeTensorMode():
        double(torch.ones(3))
    double(torch.ones(3))
    assert inside == [(True, False), (False, True), (False, False)]
