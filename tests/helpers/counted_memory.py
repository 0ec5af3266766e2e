"""Memory of partitions, predicted and counted, for layers of which only bytes matter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from nothing_waits import peaks_without_waiting
from torch import Tensor, nn

import gpipebal as gb
from gpipebal.memory import partition_memory
from gpipebal.pipeline import GPipe, measure_memory
from gpipebal.plan import PeakMemory
from gpipebal.problem import to_bounds
from gpipebal.skip import pop, skippable, stash

#: Ways of running a step, with checkpoint modes; 'mixed': another one for each partition.
WAYS: list[tuple[str, Any]] = [
    *[("loss(pipe(x))", mode) for mode in ("always", "except_last", "never", "mixed")],
    *[("gpipe", mode) for mode in ("always", "never")],
    *[("1f1b", mode) for mode in ("always", "except_last", "never", "mixed")],
]


@skippable(stash=["kept"])
class Keep(nn.Module):
    """Stash what it returns."""

    def forward(self, x: Tensor) -> Any:
        yield stash("kept", x)
        return x


@skippable(pop=["kept"])
class Beside(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return torch.cat([x, (yield pop("kept"))], dim=1)


@skippable(pop=["kept"])
class Add(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x + (yield pop("kept"))


def squares(output: Tensor) -> Tensor:
    """Take the mean of squares."""
    return output.square().mean()


def measured(layers: nn.Sequential, inputs: Tensor, **given: Any) -> gb.Profile:
    """Measure as briefly as possible: only bytes matter here."""
    brief: dict[str, Any] = {"rows": (), "timeout": 0, "as_pipeline": False, "progress": False}
    return gb.profile_model(layers, inputs, **{**brief, **given})


def counted(layers: nn.Sequential, balance: list[int], inputs: Tensor, **given: Any) -> list[int]:
    """Return the largest memory of each partition in a step."""
    pipe = GPipe(layers, balance, **given)
    pipe.step(inputs, loss_fn=squares)
    pipe.zero_grad()
    with measure_memory(pipe) as meter:
        pipe.step(inputs, loss_fn=squares)
    pipe.zero_grad()
    return list(meter.peak_bytes)


def least_and_most(
    profile: gb.Profile, balance: list[int], checkpoint: Any, way: str
) -> tuple[list[PeakMemory], list[PeakMemory]]:
    """Return predicted peaks of partitions of one memory, without and with all that can wait."""
    given: Any = {
        "chunks": profile.chunks,
        "checkpoint": checkpoint,
        "schedule": "1f1b" if way == "1f1b" else "gpipe",
        "loss_inside": way != "loss(pipe(x))",
        "shared_memory": True,
    }
    least = peaks_without_waiting(profile, to_bounds(balance), **given)
    return least, list(partition_memory(profile, to_bounds(balance), **given))


def count(
    pipe: GPipe,
    inputs: Tensor,
    way: str,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[[Any], Tensor] = squares,
    *,
    exist: bool = False,
) -> tuple[int, ...]:
    """Count each partition's peak in a step, after one in which facts are found out.

    Args:
        pipe: The pipeline.
        inputs: A mini-batch.
        way: How it is run.
        optimizer: Steps behind it.
        loss_fn: The loss.
        exist: Whether the gradients are kept from step to step.
    """

    def step() -> None:
        if not exist:
            optimizer.zero_grad()
        if way == "loss(pipe(x))":
            output = pipe(inputs)  # which a training loop gives a name
            loss_fn(output).backward()
        else:
            pipe.step(inputs, loss_fn=loss_fn, schedule=way)
        optimizer.step()

    step()
    if not exist:
        optimizer.zero_grad()
    with measure_memory(pipe, optimizer) as meter:
        step()
    pipe.close()
    return meter.peak_bytes
