"""What layers have without registering it: recomputes leave no trace in it, or are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from chains import run_plain
from torch import Tensor, nn

from gpipebal import is_recomputing
from gpipebal.errors import ModelError
from gpipebal.pipeline import GPipe, with_recompute
from gpipebal.pipeline.layers.attributes import unregistered_in
from gpipebal.schedule import CHECKPOINT_MODES, CheckpointMode

pytestmark = pytest.mark.timeout(60)
MODES = pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)


class Box:
    """Anything that has something."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside


class Hidden(nn.Module):
    """Runs a module that torch does not find."""

    def __init__(self, module: nn.Module, how: str) -> None:
        super().__init__()
        self.how = how
        self.kept = {"list": [module], "dict": {"m": (module,)}, "object": Box(module)}[how]

    @property
    def module(self) -> nn.Module:
        kept: Any = self.kept
        found = {"list": lambda: kept[0], "dict": lambda: kept["m"][0]}
        module: nn.Module = found.get(self.how, lambda: kept.inside)()
        return module

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.module(x)
        return y


class Counting(nn.Module):
    """Counts rows, and multiplies by their number."""

    n: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        self.n.add_(len(x))
        return x * self.n[:3].clone()


@MODES
@pytest.mark.parametrize("how", ["list", "dict", "object"])
@pytest.mark.parametrize("kind", ["norm", "small", "large"])
def test_buffers_of_unregistered_modules(checkpoint: CheckpointMode, how: str, kind: str) -> None:
    """A recompute starts from the buffers of its forward, and the forwards count once."""
    inside = {"norm": lambda: nn.BatchNorm1d(3), "small": lambda: Counting(3)}
    layer = Hidden(inside.get(kind, lambda: Counting(20_000))(), how)
    model = nn.Sequential(nn.Linear(3, 3), layer, nn.Linear(3, 3))
    plain, x = copy.deepcopy(model), torch.randn(8, 3)
    pipe = GPipe(model, [2, 1], chunks=4, checkpoint=checkpoint)
    for _ in range(2):
        pipe(x).square().sum().backward()
        run_plain(plain, x, 4).square().sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    other: Any = plain[1]
    for one, same in zip(layer.module.buffers(), other.module.buffers(), strict=True):
        torch.testing.assert_close(one, same)


@pytest.mark.parametrize("how", ["call", "alone"])
@pytest.mark.parametrize("kind", ["norm", "small", "large"])
def test_buffers_of_unregistered_modules_in_a_run(how: str, kind: str) -> None:
    """So does the recompute of a run, with a pipeline and without."""
    inside = {"norm": lambda: nn.BatchNorm1d(3), "small": lambda: Counting(3)}
    layer = Hidden(inside.get(kind, lambda: Counting(20_000))(), "list")
    model = nn.Sequential(nn.Linear(3, 3), layer, nn.Linear(3, 3))
    plain, x = copy.deepcopy(model), torch.randn(8, 3)
    chain: Any = with_recompute(model, [[1, 2]])
    run = chain if how == "alone" else GPipe(chain, [1, 2], chunks=1, checkpoint="never")
    for _ in range(2):
        run(x).square().sum().backward()
        plain(x).square().sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    other: Any = plain[1]
    for one, same in zip(layer.module.buffers(), other.module.buffers(), strict=True):
        torch.testing.assert_close(one, same)


def test_unregistered_modules_of_several_partitions_are_left_alone() -> None:
    """One that is another layer, or that two partitions have, may be running there."""
    norm, both = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    layers = [Hidden(norm, "list"), Hidden(both, "dict"), norm, Hidden(both, "object")]
    assert unregistered_in(layers[:2]) == [both, norm]
    assert unregistered_in(layers[:1]) == unregistered_in([nn.Sequential(layers[0])]) == [norm]
    assert unregistered_in(layers[2:]) == [both]
    pipe = GPipe(nn.Sequential(nn.Linear(3, 3), *layers), [3, 2], chunks=2, checkpoint="never")
    pipe(torch.randn(4, 3)).sum().backward()
    assert [list(part.unregistered) for part in pipe._runtime.partitions] == [[], []]  # type: ignore[union-attr]


class Shared(nn.Module):
    """Counts through an object that has its buffer too."""

    n: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(3))
        self.box = Box(self.n)

    def forward(self, x: Tensor) -> Tensor:
        self.box.inside.add_(1)
        return x * self.n.clone()


@pytest.mark.parametrize("where", ["partition", "run", "loss"])
def test_writes_to_a_buffer_by_another_way_are_refused(where: str) -> None:
    """The recompute has a copy in the buffer's place, which the object does not see."""
    layers = nn.Sequential(nn.Linear(3, 3), nn.Identity() if where == "loss" else Shared())
    loss = Shared() if where == "loss" else nn.Identity()
    chain = with_recompute(layers, [[1]] if where == "run" else [])
    pipe = GPipe(chain, [1, 1], chunks=2, checkpoint="never" if where == "run" else "always")
    total = nn.Sequential(loss, Sum())
    with pytest.raises(ModelError, match="has written to buffer 'n' of a Shared by another way"):
        pipe.step(torch.randn(4, 3), loss_fn=total, reduction="sum")


class Sum(nn.Module):
    """Adds up."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum()


def test_parts_of_one_tensor_have_one_count_of_writes() -> None:
    """Another partition may have the others, and write to its own during a recompute."""
    fused = torch.zeros(2, 3)

    class Count(nn.Module):
        n: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("n", fused[0])

        def forward(self, x: Tensor) -> Tensor:
            self.n.add_(1)
            if is_recomputing():
                fused[1].add_(1)  # as the other partition's worker would
            return x * self.n.clone()

    pipe = GPipe(nn.Sequential(nn.Linear(3, 3), Count()), [1, 1], chunks=4, checkpoint="always")
    pipe(torch.randn(8, 3)).sum().backward()
    assert fused.tolist() == [[4.0] * 3] * 2
