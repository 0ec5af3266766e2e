"""What a pipeline holds is gone with it, at once: nothing waits for the garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipebal.pipeline import GPipe, measure_memory, trace, with_recompute
from gpipebal.pipeline.minibatch.minibatch import MiniBatch
from gpipebal.schedule import CHECKPOINT_MODES, CheckpointMode
from gpipebal.skip import pop, skippable, stash

pytestmark = pytest.mark.timeout(60)
MODES = pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
#: What torch says when a layer writes to its input.
REFUSAL = "leaf Variable that requires grad is being used in an in-place operation"


@skippable(stash=["kept"])
class Keep(nn.Module):
    def forward(self, x: Tensor) -> Generator[stash, None, Tensor]:
        yield stash("kept", x)
        return x * 2


@skippable(pop=["kept"])
class Take(nn.Module):
    def forward(self, x: Tensor) -> Generator[pop, Tensor, Tensor]:
        return x + (yield pop("kept"))


class Fails(nn.Module):
    """Fails for a single row, as if it had written to its input."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            raise RuntimeError(f"a {REFUSAL}")
        return x * 1


def chain() -> list[nn.Module]:
    """Make layers with all that a pipeline looks after: skips, buffers, random numbers."""
    layers = [nn.Linear(3, 3), Keep(), nn.BatchNorm1d(3), nn.Dropout(), Take(), nn.Linear(3, 3)]
    return [*layers, nn.Linear(3, 3)]


def tied() -> list[nn.Module]:
    """Make layers that share a parameter across partitions."""
    layers = chain()
    layers[-1].weight = layers[0].weight
    return layers


def recomputed() -> list[nn.Module]:
    """Make layers of which some are recomputed by themselves."""
    return list(with_recompute(nn.Sequential(*chain()), [[2, 3]])._modules.values())


@pytest.fixture(autouse=True)
def _no_garbage_collector() -> Any:
    # What torch loads when it is first used for this makes circles of its own.
    nn.Sequential(*recomputed())(torch.ones(4, 3)).sum().backward()
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@MODES
@pytest.mark.parametrize("make", [chain, tied, recomputed])
@pytest.mark.parametrize("how", ["call", "step", "1f1b", "no_grad", "watched"])
def test_layers_are_gone_with_their_pipeline(
    checkpoint: CheckpointMode, make: Callable[[], list[nn.Module]], how: str
) -> None:
    """So their memory is free for the next model."""

    def run() -> list[weakref.ref[Any]]:
        pipe = GPipe(nn.Sequential(*make()), [2, 2, 3], chunks=2, checkpoint=checkpoint)
        x = torch.randn(6, 3)
        for _ in range(2):
            if how == "call":
                pipe(x).sum().backward()
            elif how == "no_grad":
                with torch.no_grad():
                    pipe(x)
            elif how == "watched":
                with trace(pipe), measure_memory(pipe):
                    pipe(x).sum().backward()
            else:
                pipe.step(x, loss_fn=torch.mean, schedule=how.replace("step", "gpipe"))
        pipe.close()  # no worker is still on its way back
        return [weakref.ref(one) for one in (pipe, *pipe.modules(), *pipe.parameters())]

    assert [one() for one in run() if one() is not None] == []


@MODES
def test_layers_are_gone_after_an_error(checkpoint: CheckpointMode) -> None:
    """The error is the only thing that holds what was at work."""

    def run() -> list[weakref.ref[Any]]:
        layers = [nn.Linear(3, 3), Fails(), nn.Linear(3, 3)]
        pipe = GPipe(nn.Sequential(*layers), [1, 2], chunks=2, checkpoint=checkpoint)
        pipe(torch.randn(6, 3)).sum().backward()
        for _ in range(2):
            with pytest.raises((RuntimeError, TypeError)) as caught:
                pipe(torch.randn(3, 3))
            del caught
        pipe.close()
        return [weakref.ref(one) for one in (pipe, *pipe.modules())]

    assert [one() for one in run() if one() is not None] == []


@MODES
@pytest.mark.parametrize("how", ["backward", "kept", "forward"])
def test_a_mini_batch_is_gone_with_its_output(
    checkpoint: CheckpointMode, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its graphs and inputs, whether a backward has run or not."""
    begun: list[weakref.ref[MiniBatch]] = []
    forward = MiniBatch.forward

    def noted(self: MiniBatch) -> None:
        begun.append(weakref.ref(self))
        forward(self)

    monkeypatch.setattr(MiniBatch, "forward", noted)
    pipe = GPipe(nn.Sequential(*chain()), [2, 2, 3], chunks=2, checkpoint=checkpoint)
    for _ in range(2):
        output = pipe(torch.randn(6, 3)).sum()
        if how != "forward":
            output.backward(retain_graph=how == "kept")
        del output
    pipe.close()
    assert [one() for one in begun] == [None, None]
