"""Tensors that layers and losses use through functions: the same bytes, measured or estimated."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from estimate_models import Apply
from estimated import estimate_profile
from profiler.test_estimate import ON_CPU, assert_same_bytes, measured
from torch import Tensor, nn

import gpipebal as gb
from gpipebal.errors import ProfileError

ROWS, WIDTH, CLASSES = 8, 6, 5
TABLE = torch.rand(32, WIDTH)
FROZEN = nn.Sequential(nn.Linear(CLASSES, 40), nn.BatchNorm1d(40), nn.ReLU()).requires_grad_(False)
WEIGHT = torch.rand(CLASSES)
CRITERION = nn.CrossEntropyLoss(weight=WEIGHT)


def chain(layer: nn.Module) -> nn.Sequential:
    """Put a layer between two others."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), layer, nn.Linear(WIDTH, CLASSES))


def summed(x: Tensor, rows: list[int]) -> Tensor:
    """Decide by the values of a constant, which meets no tensor without values in that."""
    return x * TABLE[rows] if bool(TABLE.min() >= 0) else x


LAYERS: dict[str, Any] = {
    "saved whole": lambda x: x * TABLE[0],
    "a view of a part": lambda x: x + TABLE[4:5] * 2,
    "joined": lambda x: torch.cat([x, TABLE[:1].expand(len(x), WIDTH)], 1)[:, :WIDTH],
    "picked by values": partial(summed, rows=[3]),
    "frozen weight": partial(F.linear, weight=torch.rand(WIDTH, WIDTH)),
    "written to": lambda x: x * TABLE[1].add_(0.0),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_with_constants_need_the_same_memory(name: str) -> None:
    """They exist once, so they are saved by no micro-batch."""
    model, sample = chain(Apply(LAYERS[name])), torch.rand(ROWS, WIDTH)
    settings: dict[str, Any] = {"chunks": 2, "rows": ()}
    before = TABLE.clone()
    estimate = estimate_profile(model, sample, **settings, **ON_CPU)
    assert_same_bytes(estimate, measured(model, sample, **settings))
    assert torch.equal(TABLE, before)


class Weighted:
    """A value between layers that makes its weights itself."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.weights = x, torch.ones(x.shape[-1])


pytree.register_pytree_node(
    Weighted, lambda value: ([value.x], None), lambda leaves, _: Weighted(*leaves)
)


def test_values_of_other_classes_are_put_together_as_on_the_device() -> None:
    """What a class makes of the leaves of a value is without memory, as in a layer."""
    layers = Apply(Weighted), Apply(lambda value: value.x * value.weights)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers, nn.Linear(WIDTH, CLASSES))
    sample, settings = torch.rand(ROWS, WIDTH), {"chunks": 2, "rows": ()}
    estimate = estimate_profile(model, sample, **settings, **ON_CPU)
    assert_same_bytes(estimate, measured(model, sample, **settings))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantised_constants_have_no_stand_ins() -> None:
    """One that is only reached does not matter; one that is used is refused as others are."""
    quantised = torch.quantize_per_tensor(torch.rand(WIDTH), 0.1, 0, torch.qint8)
    reached = chain(Apply(lambda x, table=quantised: x))
    used = chain(Apply(lambda x: x * quantised.dequantize()))
    estimate_profile(reached, torch.rand(ROWS, WIDTH), rows=(), **ON_CPU)
    with pytest.raises(ProfileError, match="'1' cannot be estimated: it uses a tensor"):
        estimate_profile(used, torch.rand(ROWS, WIDTH), rows=(), **ON_CPU)


LOSSES: dict[str, Any] = {
    "closure": lambda output, target: F.cross_entropy(output, target, weight=WEIGHT),
    "partial": partial(F.cross_entropy, weight=WEIGHT),
    "module in a function": lambda output, target: CRITERION(output, target),
    "module": CRITERION,
    "frozen network": lambda output, target: FROZEN(output)[target].square().mean(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_with_constants_need_the_same_memory(name: str) -> None:
    """Class weights and frozen networks are reached by functions too; statistics are kept."""
    model, sample = chain(nn.Tanh()), torch.rand(ROWS, WIDTH)
    settings: dict[str, Any] = {
        "chunks": 2,
        "rows": (),
        "loss_fn": LOSSES[name],
        "target": torch.arange(ROWS) % 2,
    }
    before = {key: value.clone() for key, value in FROZEN.state_dict().items()}
    estimate = estimate_profile(model, sample, **settings, **ON_CPU)
    assert_same_bytes(estimate, measured(model, sample, **settings))
    assert all(torch.equal(before[key], value) for key, value in FROZEN.state_dict().items())


def test_a_constant_is_counted_once_by_a_pipeline_too() -> None:
    """What a plan promises is what a run needs: no micro-batch holds the constant."""
    wide = torch.rand(1, 4000)
    model = nn.Sequential(nn.Linear(WIDTH, 4000), Apply(lambda x: x * wide), nn.Linear(4000, 2))
    sample = torch.rand(ROWS, WIDTH)
    profile = measured(model, sample, chunks=4, rows=())
    plan = gb.evaluate(profile, [2, 1], checkpoint="never")
    pipe = gb.GPipe(model, [2, 1], chunks=4, checkpoint="never")
    for _ in range(2):
        pipe.zero_grad()
        with gb.pipeline.measure_memory(pipe) as meter:
            pipe(sample).sum().backward()
    assert plan.partitions[0].memory.total == meter.peak_bytes[0]


def test_lists_that_pick_elements_count() -> None:
    """A tensor is made of a list of indices, with and without a graph."""
    picked = list(range(0, 2000, 2))

    def put(x: Tensor) -> Tensor:
        y = x.clone()
        y[:, picked] = 0.0
        return y

    model = nn.Sequential(
        nn.Linear(WIDTH, 2000),
        Apply(put),
        Apply(lambda x: x[[1, 0]]),
        Apply(lambda x: x[:, picked]),
    )
    sample = torch.rand(ROWS, WIDTH)
    assert_same_bytes(
        estimate_profile(model, sample, chunks=2, rows=(), **ON_CPU),
        measured(model, sample, chunks=2, rows=()),
    )


def test_small_constants_of_a_loss_are_not_flagged() -> None:
    """Class weights are less than a plan is wrong by anyway."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, CLASSES))
    found = measured(
        model,
        torch.rand(ROWS, 64),
        chunks=2,
        rows=(),
        loss_fn=LOSSES["module in a function"],
        target=torch.zeros(ROWS).long(),
    )
    assert not any("the loss can use" in flag for flag in found.provenance["flags"])
