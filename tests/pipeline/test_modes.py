"""One checkpoint mode per partition, and plans with a schedule and modes."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from chains import run_plain, skip_chain
from torch import Tensor, nn

from gpipebal.errors import BalanceError
from gpipebal.pipeline import GPipe, is_recomputing
from gpipebal.schedule import CHECKPOINT_MODES, modes_of, one_f_one_b_schedule

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("modes", list(itertools.product(CHECKPOINT_MODES, repeat=2)))
def test_each_partition_has_its_mode(modes: tuple[Any, ...]) -> None:
    """Each partition recomputes what its own mode says, and gradients are the plain model's."""
    counts = [0, 0]

    class Count(nn.Module):
        def __init__(self, place: int) -> None:
            super().__init__()
            self.place = place

        def forward(self, x: Tensor) -> Tensor:
            counts[self.place] += is_recomputing()
            return x

    model = nn.Sequential(nn.Linear(3, 3), Count(0), nn.Linear(3, 3), Count(1)).double()
    plain = copy.deepcopy(model[::2])
    pipe = GPipe(model, [2, 2], chunks=4, checkpoint=list(modes))
    inputs = torch.randn(8, 3, dtype=torch.float64)
    pipe(inputs).square().sum().backward()
    assert counts == [{"always": 4, "except_last": 3, "never": 0}[mode] for mode in modes]
    run_plain(plain, inputs, 4).square().sum().backward()
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_modes_that_do_not_fit_are_refused() -> None:
    """Too few modes, or an unknown one, are refused when set and when made."""
    with pytest.raises(BalanceError, match=r"len\(checkpoint\)=1 \(expected 2, one per partition"):
        GPipe(skip_chain(), [2, 3], checkpoint=["never"])
    with pytest.raises(BalanceError, match="checkpoint='sometimes'"):
        GPipe(skip_chain(), [2, 3], checkpoint=["never", "sometimes"])  # type: ignore[list-item]
    pipe = GPipe(skip_chain(), [2, 3], checkpoint=["never", "always"])
    with pytest.raises(BalanceError, match="mode too many or too few"):
        pipe.checkpoint = ["never"]
    pipe.checkpoint = "always"
    assert modes_of(pipe.checkpoint, 2) == ("always", "always")
    with pytest.raises(BalanceError, match="does not exist"):
        pipe.checkpoint = []


def test_1f1b_leaves_out_a_recompute_right_behind_its_forward() -> None:
    """The last partition keeps the graph of the one micro-batch it has, in every mode."""
    drawing = (
        "0F0 0F1 0F2 0R0 0B0 0F3 0R1 0B1 0R2 0B2 0R3 0B3\n"
        "1F0 1F1 1R0 1B0 1F2 1R1 1B1 1F3 1R2 1B2 1R3 1B3\n"
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"
    )
    assert str(one_f_one_b_schedule(3, 4, "always")) == drawing
