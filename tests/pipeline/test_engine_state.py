"""The private functions of torch's engine answer what the executor relies on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

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
