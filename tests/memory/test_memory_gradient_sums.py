"""Gradients that come back on several ways are added up: plans must count the sums where they are.

Which layer makes a sum, and in what memory, depends on which gradient comes first, and on whether
anything else holds it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from counted_memory import Add, Beside, Keep, counted, measured, squares
from torch import Tensor, nn

from gpipebal.planner import evaluate
from gpipebal.skip import skippable, stash

pytestmark = pytest.mark.timeout(120)
COLUMNS, WIDE, ROWS = 32, 256, 48
#: What the numbers of losses may need besides.
FEW = 64


@skippable(stash=["kept"])
class KeepOwn(nn.Sequential):
    """Stash what it makes and returns."""

    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        yield stash("kept", x)
        return x


class Residual(nn.Module):
    """Use the input twice."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.relu()


class Squared(nn.Module):
    """Use it three times: the first part of its gradient is the one that comes in."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x * x


class WithInput(nn.Sequential):
    """Return a result beside the input."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), x


class Join(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return torch.cat(pair, dim=1)


class Sum(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1]


class ScaledSum(Sum):
    """Add two values, with a weight of many elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, WIDE))

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return super().forward(pair) + self.weight.mean(dim=0)


class Halves(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = x.chunk(2, dim=1)
        return first, second


class OnFirst(nn.Sequential):
    """Work on one of two values."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return super().forward(pair[0]), pair[1]


class WithOnes(nn.Module):
    """Put constants beside the input."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x.new_ones(len(x), WIDE)], dim=1)


def ends(n_out: int, *between: nn.Module) -> list[nn.Module]:
    """Put layers of `WIDE` columns between two that have few."""
    return [nn.Linear(COLUMNS, WIDE), *between, nn.Linear(n_out, 8)]


def block_after_a_skip() -> list[nn.Module]:
    """Two parts of a block's gradient come after that of a skip from its input."""
    return ends(2 * WIDE, Keep(), Residual(), nn.Tanh(), Beside())


def block_before_an_addition() -> list[nn.Module]:
    """The same, where the gradient of the skip has memory of its own by then."""
    return ends(WIDE, Keep(), Squared(), nn.LayerNorm(WIDE), Add())


def own_result_added() -> list[nn.Module]:
    """The gradients of a result and of a skip are one tensor."""
    return ends(WIDE, nn.Tanh(), KeepOwn(nn.Linear(WIDE, WIDE)), Add())


def result_of_no_parameters_added() -> list[nn.Module]:
    """The same, of a layer without parameters."""
    return ends(WIDE, KeepOwn(nn.Tanh()), Add(), nn.Tanh())


def parts_of_one_memory() -> list[nn.Module]:
    """Two gradients are parts of one; the one that is used up first stays."""
    return ends(2 * WIDE, WithInput(Residual()), Join(), nn.Tanh())


def sum_of_parts() -> list[nn.Module]:
    """A partition begins with a sum whose gradient is a part."""
    return ends(2 * WIDE, WithInput(nn.Tanh()), Sum(), WithOnes())


def sum_of_parts_behind_parameters() -> list[nn.Module]:
    """The same, where gradients of its parameters hide the copies if they exist already."""
    return ends(2 * WIDE, WithInput(nn.Tanh()), ScaledSum(), WithOnes())


def half_handed_through() -> list[nn.Module]:
    """One half of a value is handed through from the cut, and its gradient is still a part."""
    return ends(WIDE, Halves(), OnFirst(nn.Tanh()), Join())


#: And how many values more than are counted plans may have where they are cut at worst.
CHAINS = {
    block_after_a_skip: 0,
    block_before_an_addition: 1,
    own_result_added: 0,
    result_of_no_parameters_added: 0,
    parts_of_one_memory: 2,
    sum_of_parts: 2,
    sum_of_parts_behind_parameters: 2,
    half_handed_through: 0,
}


def check(layers: nn.Sequential, inputs: Tensor, checkpoint: str, more: int) -> None:
    """Compare plans with counts, wherever the chain is cut; they may be `more` bytes higher."""
    n = len(layers)
    profile = measured(layers, inputs, loss_fn=squares)
    for balance in [[n], *([k, n - k] for k in range(1, n))]:
        plan = evaluate(profile, balance, checkpoint=checkpoint, loss_inside=True)
        found = counted(layers, balance, inputs, chunks=1, checkpoint=checkpoint)
        for partition, n_bytes in zip(plan.partitions, found, strict=True):
            planned = partition.memory.total
            # More or less may wait for a neighbour.
            least = planned - partition.memory.waiting - more
            assert least - FEW <= n_bytes <= planned + FEW, (balance, planned - n_bytes)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("make", CHAINS)
def test_sums_are_counted_where_they_are(make: Any, checkpoint: str) -> None:
    """Plans predict what is counted, or little more, wherever the chain is cut."""
    inputs = torch.randn(ROWS, COLUMNS)
    check(nn.Sequential(*make()), inputs, checkpoint, CHAINS[make] * ROWS * WIDE * 4)


def test_a_part_with_gaps_is_copied_by_the_layer_that_is_given_it() -> None:
    """Linear layers join rows and tokens; a part of a concatenation of tokens has to be copied."""
    layers = ends(WIDE, Keep(), nn.Linear(WIDE, WIDE), Beside())
    check(nn.Sequential(*layers), torch.randn(ROWS, 4, COLUMNS), "never", ROWS * 4 * WIDE * 4)
