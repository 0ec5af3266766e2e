"""How far a pipeline's results may be from the plain model's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from broken_layers import Scale, in_worker
from torch import Tensor, nn
from verify_cases import rows

import gpipebal as gb
from gpipebal.errors import VerificationError
from gpipebal.pipeline import GPipe
from gpipebal.verification.compare import Comparison, DifferenceError
from gpipebal.verification.task import Outcome, Slot
from gpipebal.verification.tolerance import Tolerance, distance

pytestmark = pytest.mark.timeout(60)


def test_a_model_in_one_precision_is_judged_by_it() -> None:
    """A difference in the last digits passes with rtol alone, and is found with a smaller one."""
    model = nn.Sequential(Scale(), Scale(lambda: 1 + 1e-5 * in_worker())).double()
    pipe = GPipe(model, [1, 1], chunks=2)
    gb.verify(model, pipe, rows(4, 3), rtol=1e-4)
    gb.verify(model, pipe, rows(4, 3), atol=1e-2)
    for tolerances in ({}, {"rtol": 1e-6}, {"atol": 1e-9}):
        with pytest.raises(VerificationError, match="off by"):
            gb.verify(model, pipe, rows(4, 3), **tolerances)


def test_tolerances_follow_dtype_and_size() -> None:
    """Defaults go by dtype, by the tensor's size and by what is around it; integers are exact."""
    ones = torch.ones(2, dtype=torch.float64)
    assert Tolerance().allowed(ones, 1.0) == pytest.approx(2e-7)
    assert Tolerance().allowed(ones * 100, 1000.0) == pytest.approx(1.1e-4)
    assert Tolerance(rtol=0.5, atol=3.0).allowed(ones, 1000.0) == 3.5
    assert Tolerance().allowed(ones.float(), 0.0) == pytest.approx(1.3e-6)
    assert Tolerance(autocast=(torch.bfloat16,)).allowed(ones, 0.0) == pytest.approx(1.6e-2)
    assert Tolerance(rtol=1.0, atol=1.0).allowed(ones.int(), 1.0) == 0


class OtherOrder(nn.Module):
    """Adds in another order if no graph is recorded, as kernels do that torch chooses then."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(32, 64), nn.Linear(64, 32), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).tanh()
        if torch.is_grad_enabled():
            return x + self.norm(self.down(h))
        first = F.linear(h[:, :32], self.down.weight[:, :32], self.down.bias)
        return x + self.norm(first + F.linear(h[:, 32:], self.down.weight[:, 32:]))


def test_gradients_in_half_precision_may_differ_by_a_rounding_of_larger_ones() -> None:
    """A recompute that rounds in another way than its forward passes; a wrong gradient does not."""
    torch.manual_seed(5)
    layers = [OtherOrder() for _ in range(4)]
    model = nn.Sequential(nn.Linear(8, 32), *layers, nn.Linear(32, 3))
    pipe = GPipe(model, [3, 3], chunks=2, checkpoint="always")
    loss: dict[str, Any] = {"target": torch.randint(3, (32,)), "loss_fn": F.cross_entropy}
    x = torch.randn(32, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        report = gb.verify(model, pipe, x, **loss)
        assert report.gradients.difference > 0
        wrong = nn.Sequential(*model, Scale(lambda: 1 + 0.1 * in_worker()))
        with pytest.raises(VerificationError, match="off by"):
            gb.verify(wrong, GPipe(wrong, [3, 4], chunks=2), x, **loss)
    # Values around it count as they are rounded.
    none = torch.zeros(1)
    half = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
    for dtype, rounding in half.items():
        assert Tolerance().allowed(none.to(dtype), 1.0) == rounding
        assert Tolerance(autocast=(dtype,)).allowed(none, 1.0) == rounding
        assert rounding == pytest.approx(torch.finfo(dtype).eps, rel=0.03)


def gradients(**values: float) -> Outcome:
    """Make what a step leaves, with a gradient of one value for each layer."""
    slots = {Slot(f"gradient of {name}", name): torch.tensor([x]) for name, x in values.items()}
    return Outcome(None, [], [], None, True, gradients=slots)


def test_gradients_that_are_rounding_alone_agree() -> None:
    """A gradient may differ by what is tiny beside those that the backward has met before it."""
    expected = gradients(last=1.0, middle=1e-7, first=100.0)
    comparison = Comparison(Tolerance())
    comparison.check(expected, gradients(last=1.0, middle=-1e-7, first=100.0), "a test")
    assert comparison.found["gradients"]["gradient of middle"] == pytest.approx(2.0)
    # The first layer's may be off by more, since it comes after them.
    comparison.check(expected, gradients(last=1.0, middle=1e-7, first=100.001), "a test")
    for found in (
        gradients(last=1.001, middle=1e-7, first=100.0),
        gradients(last=1.0, middle=1e-4, first=100.0),
        gradients(last=1.0, middle=1e-7, first=100.01),
    ):
        with pytest.raises(DifferenceError, match=r"gradient of .* is off"):
            comparison.check(expected, found, "a test")


DISTANCES = {
    "equal": ([1.0, -2.0], [1.0, -2.0], 0.0, 0.0),
    "apart": ([1.0, -4.0], [1.0, -3.0], 1.0, 0.25),
    "empty": ([], [], 0.0, 0.0),
    "from zero": ([0.0], [1.0], 1.0, float("inf")),
    "both NaN and infinite": ([float("nan"), float("inf")], [float("nan"), float("inf")], 0, 0),
    "one NaN": ([1.0, 2.0], [1.0, float("nan")], float("inf"), float("inf")),
    "infinite of another sign": ([float("inf"), 1], [-float("inf"), 1], float("inf"), float("inf")),
    "integers": ([2**60], [2**60 + 1], 1.0, 2.0**-60),
    "truth": ([True, False], [True, True], 1.0, 1.0),
    "complex": ([3 + 4j], [0j], 5.0, 1.0),
}
SMALL = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float32)


@pytest.mark.parametrize("dtype", SMALL)
def test_distance_in_small_dtypes(dtype: torch.dtype) -> None:
    """Every type of floats can be compared, also those that torch cannot compute with."""
    plain, found = (torch.tensor(values).to(dtype) for values in ([2.0, 4.0], [2.0, 3.0]))
    assert distance(plain, plain).absolute == 0
    assert distance(plain, found) == (1.0, 0.25, (1,), 4.0, 3.0)
    assert 0 < Tolerance().allowed(plain, 4.0) < 1


@pytest.mark.parametrize("case", DISTANCES)
def test_distance(case: str) -> None:
    """The largest difference of two tensors, and that as a part of the largest plain value."""
    plain, found, absolute, relative = DISTANCES[case]
    dtype = None if case in ("integers", "truth") else torch.float64
    dtype = torch.complex128 if case == "complex" else dtype
    apart = distance(torch.tensor(plain, dtype=dtype), torch.tensor(found, dtype=dtype))
    assert (apart.absolute, apart.relative) == (absolute, relative)
