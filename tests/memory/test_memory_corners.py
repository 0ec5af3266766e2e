"""Memory in corners: what no clock explains is in the plan, whoever made it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from counted_memory import squares
from estimate_models import Apply
from estimated import estimate_profile
from nothing_waits import peaks_without_waiting
from torch import Tensor, nn

import gpipebal as gb
from gpipebal.memory import partition_memory
from gpipebal.memory.layer_peaks import first_forward_peak
from gpipebal.pipeline import GPipe, measure_memory
from gpipebal.problem import to_bounds
from gpipebal.profiler.chain.chain import Chain
from gpipebal.profiler.chain.value import Value
from gpipebal.skip import pop, skippable, stash

pytestmark = pytest.mark.timeout(120)

Maker = Callable[..., torch.optim.Optimizer]


def compared(
    model: nn.Sequential,
    inputs: Tensor,
    balance: Sequence[int],
    *,
    chunks: int = 1,
    checkpoint: Any = "never",
    inside: bool = True,
    optimizer: Maker | None = None,
) -> list[tuple[int, int, int]]:
    """Return for each partition what is counted, what it needs at least, and what is planned."""
    make = optimizer or functools.partial(torch.optim.SGD, lr=1e-3)
    profile = gb.profile_model(
        model, inputs, chunks=chunks, loss_fn=squares, optimizer=make, rows=(), timeout=0,
        as_pipeline=False, progress=False,
    )  # fmt: skip
    given: dict[str, Any] = {
        "chunks": chunks, "checkpoint": checkpoint, "loss_inside": inside, "shared_memory": True,
    }  # fmt: skip
    bounds = to_bounds(balance)
    least = peaks_without_waiting(profile, bounds, **given)
    most = partition_memory(profile, bounds, **given)
    pipe = GPipe(model, balance, chunks=chunks, checkpoint=checkpoint)
    stepper = make(list(model.parameters()))

    def step() -> None:
        stepper.zero_grad()
        if inside:
            pipe.step(inputs, loss_fn=squares)
        else:
            output = pipe(inputs)
            squares(output).backward()
        stepper.step()

    step()
    stepper.zero_grad()
    with measure_memory(pipe, stepper) as meter:
        step()
    pipe.close()
    totals = zip(meter.peak_bytes, least, most, strict=True)
    return [(counted, one.total, other.total) for counted, one, other in totals]


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.Adam,
        functools.partial(torch.optim.Adam, amsgrad=True),
        functools.partial(torch.optim.Adam, foreach=True),
        torch.optim.Adagrad,
        torch.optim.RMSprop,
        torch.optim.Adadelta,
        torch.optim.RAdam,
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    ],
)
def test_the_step_of_one_parameter_leaves_something_to_the_next(optimizer: Maker) -> None:
    """Layers without a small parameter between: the most is exact to the loss's numbers."""
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(2)))
    ((counted, planned, _),) = compared(model, torch.randn(8, 128), [2], optimizer=optimizer)
    assert abs(planned - counted) <= 64


def test_what_is_left_is_on_the_device_where_it_was_made() -> None:
    """A partition behind a large parameter does not have what the step of that leaves."""
    sizes = (16, 256, 256, 16, 16)
    layers = [nn.Linear(*ends, bias=False) for ends in itertools.pairwise(sizes)]
    model = nn.Sequential(*layers[:2], nn.ReLU(), *layers[2:])
    for counted, planned, _ in compared(
        model, torch.randn(8, 16), [2, 3], optimizer=torch.optim.Adam
    ):
        assert 0.97 * counted <= planned <= 1.03 * counted


class Pair(nn.Module):
    """Makes two values of its input, of which the second is wide."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(8, 8), nn.Linear(8, 512)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.narrow(x), self.wide(x)


class Beside(nn.Module):
    """Works on the first of two values."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.layer(value[0]), value[1]


class Total(nn.Module):
    """Adds up two values."""

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        return value[0] + value[1].mean(1, keepdim=True)


def test_a_gradient_handed_through_is_copied_at_the_beginning() -> None:
    """It is there while every layer of the partition runs backwards."""
    wide = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 8))
    model = nn.Sequential(Pair(), Beside(nn.Linear(8, 8)), Beside(wide), Total())
    found = compared(model, torch.randn(96, 8), [1, 2, 1])
    assert found[1][0] == found[1][1]


@skippable(stash=["kept"])
class Stash(nn.Module):
    """Stashes what nobody else has."""

    def forward(self, x: Tensor) -> Any:
        yield stash("kept", x.tanh())
        return x


@skippable(pop=["kept"])
class Pop(nn.Module):
    """Adds what was stashed."""

    def forward(self, x: Tensor) -> Any:
        kept = yield pop("kept")
        return x + kept


def test_a_gradient_of_a_stash_for_later_partitions_is_not_freed() -> None:
    """The backward of the layer that stashed it has it all the time, wherever the layer is.

    The other gradient of the value is freed, and the plan counts that too: once too often.
    """
    model = nn.Sequential(nn.Linear(8, 256), Stash(), nn.Tanh(), Pop())
    counted, planned, _ = compared(model, torch.randn(256, 8), [3, 1])[0]
    assert planned == counted + 256 * 256 * 4


class Flags(nn.Module):
    """Makes a wide tensor of integers beside its input."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, (x[:, :1] > 0).long().expand(-1, 256).contiguous()


class Widen(nn.Module):
    """Drops the second of two values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 256)

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        return self.linear(value[0])


@pytest.mark.parametrize("chunks", [2, 8])
def test_what_waits_for_a_recompute_waits_beside_the_loss(chunks: int) -> None:
    """The caller computes the loss while an earlier partition's input is still kept."""
    model = nn.Sequential(Flags(), Beside(nn.Linear(16, 16)), Widen())
    found = compared(
        model, torch.randn(32 * chunks, 16), [1, 1, 1], chunks=chunks,
        checkpoint=["never", "always", "never"], inside=False,
    )  # fmt: skip
    counted, _, most = found[2]
    assert 0.99 * counted <= most <= 1.03 * counted


@pytest.mark.parametrize("first", [nn.Flatten(), nn.Identity(), nn.Unflatten(1, (2, 4))])
def test_a_chain_may_write_to_what_it_was_handed(first: nn.Module) -> None:
    """A layer hands its input on, the next one writes to it: runs leave no trace in it."""
    layers = [first, nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8, 8)]
    inputs = torch.randn(6, 8)
    before = inputs.clone()
    chain = Chain(
        [str(k) for k in range(len(layers))], layers, torch.device("cpu"), Value.of(inputs)
    )
    chain.written = [frozenset(), frozenset({0}), frozenset(), frozenset()]
    chain.whole()
    chain.whole(grad=False)
    assert torch.equal(inputs, before)
    profile = gb.profile_model(
        nn.Sequential(*layers),
        inputs,
        chunks=2,
        timeout=0,
        as_pipeline=False,
        progress=False,
        loss_fn=squares,
    )
    assert profile.n_layers == 4


def keep(name: str, of: Callable[[Tensor], Tensor] = lambda x: x) -> nn.Module:
    """Make a layer that stashes what `of` makes of its input, and hands the input on."""

    def forward(self: nn.Module, x: Tensor) -> Any:
        yield stash(name, of(x))
        return x

    return skippable(stash=[name])(type("Kept", (nn.Module,), {"forward": forward}))()


def use(name: str, together: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    """Make a layer that pops a value, and returns what it makes of this and its input."""

    def forward(self: nn.Module, x: Tensor) -> Any:
        value = yield pop(name)
        return together(x, value)

    return skippable(pop=[name])(type("Used", (nn.Module,), {"forward": forward}))()


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_gradients_of_one_tensor_are_summed_up_when_the_backward_begins(
    checkpoint: str, inside: bool
) -> None:
    """Two layers stash one tensor for a later partition: the sum is there from the beginning."""
    wide = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 8))
    add = [use(name, lambda x, value: x + value.mean(1, keepdim=True)) for name in "abc"]
    model = nn.Sequential(
        nn.Linear(8, 256), *map(keep, "abc"), nn.Linear(256, 8), wide, *add, nn.Linear(8, 8)
    )
    for balance in ([6, 4], [5, 1, 4]):
        found = compared(model, torch.randn(96, 8), balance, checkpoint=checkpoint, inside=inside)
        assert abs(found[0][0] - found[0][1]) <= 64, balance


class Room(nn.Module):
    """Needs much memory in its forward, of which nothing stays."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.new_zeros(64 * x.numel())[0]


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_skip_that_a_later_layer_writes_to_is_copied_at_the_beginning(checkpoint: str) -> None:
    """Its copy is there while layers before that one run forward, where it comes from elsewhere."""
    write = use("kept", lambda x, value: value.mul_(2).mean(1, keepdim=True) + x)
    way_there = [nn.Linear(8, 256), nn.Tanh(), keep("kept", lambda x: x * 3), nn.Linear(256, 16)]
    model = nn.Sequential(*way_there, Room(), nn.Linear(16, 16), write, nn.Linear(16, 8))
    for balance in ([4, 4], [3, 5], [4, 2, 2]):
        found = compared(model, torch.randn(64, 8), balance, checkpoint=checkpoint)
        for counted, _, most in found[1:]:
            assert 0.99 * counted <= most <= 1.05 * counted, balance


@pytest.mark.parametrize("first", [nn.Identity(), nn.Unflatten(1, (16, 16))])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_an_input_that_a_later_layer_writes_to_is_copied_at_the_beginning(
    checkpoint: str, first: nn.Module
) -> None:
    """The first layers of a partition hand it on, and the next one writes to it."""
    rest = [nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(256, 8)]
    model = nn.Sequential(nn.Linear(8, 256), first, *rest)
    counted, planned, _ = compared(model, torch.randn(64, 8), [1, 4], checkpoint=checkpoint)[1]
    assert 0.99 * counted <= planned <= 1.03 * counted


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize("chunks", [1, 3])
def test_a_weight_that_each_forward_makes_counts_once_more_as_an_attribute(
    chunks: int, checkpoint: str
) -> None:
    """Alone it is held where its micro-batch has ended: in the optimizer's step, for example."""
    layers = [nn.utils.weight_norm(nn.Linear(128, 128)) for _ in range(3)]
    model, weight = nn.Sequential(*layers), 4 * 128 * 128
    inputs = torch.randn(4 * chunks, 128)
    for make in (torch.optim.Adam, torch.optim.SGD):
        for inside in (True, False):
            found = compared(
                model, inputs, [3], chunks=chunks, checkpoint=checkpoint, inside=inside,
                optimizer=make,
            )  # fmt: skip
            ((counted, planned, _),) = found
            assert counted - 64 <= planned <= 1.02 * counted + (3 * weight if chunks > 1 else 0)


@skippable(stash=["early"])
class StashEarly(nn.Module):
    """Sends something around the layers between."""

    def forward(self, x: Tensor) -> Any:
        yield stash("early", x.cos())
        return x.sin()


@skippable(pop=["early"])
class BesideEarly(nn.Module):
    """Returns its input, and beside it what it pops: it makes nothing."""

    def forward(self, x: Tensor) -> Any:
        early = yield pop("early")
        return x, early


def test_what_a_first_layer_pops_and_hands_on_is_there_already() -> None:
    """Behind a cut it comes in from another partition: its forward does not make it."""
    model = nn.Sequential(
        StashEarly(), nn.Tanh(), BesideEarly(), Apply(lambda both: both[0] * both[1])
    )
    profile = estimate_profile(model, torch.rand(4, 8, requires_grad=True), chunks=1)
    for k in (2, 3):
        # As in a profile that does not know which inputs are written to.
        layer = replace(profile.layers[k], written_input_bytes=None)
        for records in (False, True):
            peak = first_forward_peak(profile, k, layer, records)
            assert peak == layer.forward_peak_bytes == (0 if k == 2 else 128)
