"""Large buffers that layers return: what others read stays as it was when it was sent."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from chains import run_plain
from torch import Tensor, nn

from gpipebal.errors import ModelError
from gpipebal.pipeline import GPipe

pytestmark = pytest.mark.timeout(60)


class Table(nn.Module):
    """Returns a large buffer, and counts in it from some call on."""

    table: Tensor

    def __init__(self, begin: int, returned_from: int = 0) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(20_000))
        self.begin, self.returned_from, self.calls = begin, returned_from, 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        if self.calls > self.begin:
            self.table.add_(1)
        return x, self.table if self.calls > self.returned_from else torch.zeros(20_000)


class Late(nn.Module):
    """Adds the buffer, late enough for the next micro-batch to have been through."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        time.sleep(0.02)
        return pair[0] + pair[1][:2]


def chain(begin: int, returned_from: int = 0) -> nn.Sequential:
    """Return a chain that is cut behind the layer with the buffer."""
    return nn.Sequential(nn.Linear(2, 2), Table(begin, returned_from), Late())


@pytest.mark.parametrize("returned_from", [0, 6])
@pytest.mark.parametrize("grad", [False, True])
def test_a_buffer_that_is_written_to_from_a_later_step_on(grad: bool, returned_from: int) -> None:
    """Copies of it are sent from the first write on, also if it is first returned then."""
    model = chain(4, returned_from)
    plain, inputs = copy.deepcopy(model), torch.randn(4, 2)
    pipe = GPipe(model, [2, 1], chunks=4, checkpoint="never")
    for _ in range(3):
        with torch.set_grad_enabled(grad):
            found, expected = pipe(inputs), run_plain(plain, inputs, 4)
        torch.testing.assert_close(found, expected)
        if grad:
            found.square().sum().backward()
            expected.square().sum().backward()
            torch.testing.assert_close(pipe[0].weight.grad, plain[0].weight.grad)


def test_a_buffer_that_is_written_to_in_the_middle_of_a_mini_batch() -> None:
    """Others may have read what was sent: an error, and right from the next mini-batch on."""
    pipe = GPipe(chain(6), [2, 1], chunks=4)
    inputs = torch.randn(4, 2)
    with torch.no_grad():
        pipe(inputs)
        with pytest.raises(ModelError, match="'table' of a Table was written to while others"):
            pipe(inputs)
        linear, layer = pipe[0], pipe[1]
        expected = [linear(row) + layer.table[0] + k + 1 for k, row in enumerate(inputs)]  # type: ignore[operator, index, union-attr]
        torch.testing.assert_close(pipe(inputs), torch.stack(expected))


def test_buffers_that_the_caller_writes_to_are_sent_as_they_are() -> None:
    """No layer writes to them, so nothing is copied, whatever happens between mini-batches."""
    pipe = GPipe(chain(1000), [2, 1], chunks=4)
    seen: list[Any] = []

    def look(module: nn.Module, given: tuple[Any, ...]) -> None:
        seen.append(given[0][1].data_ptr())

    pipe[2].register_forward_pre_hook(look)
    table = pipe[1].table
    with torch.no_grad():
        for step in range(3):
            pipe(torch.zeros(4, 2))
            table.fill_(step)
            assert pipe[1].table is table
    # The first micro-batch of a kind works on copies of its input.
    assert set(seen[1:]) == {table.data_ptr()}
