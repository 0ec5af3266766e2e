"""Memory of what is a part of something larger: parameters, buffers and attributes of layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from counted_memory import count, least_and_most, measured, squares
from estimated import estimate_profile
from torch import Tensor, nn

import gpipebal as gb
from gpipebal.pipeline import GPipe
from gpipebal.pipeline.observers.ledger import Ledger
from gpipebal.pipeline.observers.shares import share_out
from gpipebal.profiler.replicas.owned import bytes_of_loss, own_bytes

pytestmark = pytest.mark.timeout(120)

WIDTH, CHUNKS = 64, 4
#: Bytes of one weight.
WEIGHT = WIDTH * WIDTH * 4


class Product(nn.Module):
    """Multiplies its input by a weight, with a table as a buffer or as an attribute."""

    def __init__(self, weight: Tensor, buffer: Tensor | None = None, attribute: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.register_buffer("table", buffer)
        self.other = attribute

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x @ self.weight
        return y


class Leaves(Product):
    """Leaves a column of a wide result behind."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        self.other = y.detach().repeat(1, 40)[:, :1]
        return y


def weights(n: int) -> Tensor:
    """Make several weights in one tensor."""
    return torch.randn(n, WIDTH, WIDTH) * 0.1


def one_part() -> list[nn.Module]:
    """Nothing else has the seven other parts."""
    return [Product(weights(1)[0]), Product(weights(8)[3]), nn.Tanh(), Product(weights(1)[0])]


def flat() -> list[nn.Module]:
    """All parameters are parts of one tensor."""
    return [Product(weight) for weight in weights(4)]


def with_gaps() -> list[nn.Module]:
    """Half of the tensor is in no layer."""
    return [Product(weight) for weight in weights(8)[::2]]


def columns() -> list[nn.Module]:
    """Parts that lie between each other."""
    return [Product(weight) for weight in weights(4).permute(1, 2, 0).contiguous().unbind(2)]


def buffers() -> list[nn.Module]:
    """Views of one table, which have rows in common."""
    table = torch.randn(800, WIDTH)
    return [Product(weights(1)[0], buffer=table[: 8 * k + 8]) for k in range(4)]


def whole_tables() -> list[nn.Module]:
    """Several views of all of one table."""
    table = torch.randn(800, WIDTH)
    return [Product(weights(1)[0], buffer=table.view(-1, 2**k)) for k in range(4)]


def attributes() -> list[nn.Module]:
    """Parts of a table in lists, and a part of a weight in another layer."""
    table = torch.randn(800, WIDTH)
    first = Product(weights(3)[1])
    return [first, *(Product(weights(1)[0], attribute=[table[:8], first.weight[0]]) for _ in "ab")]


def leaving() -> list[nn.Module]:
    """What a forward leaves behind is a part of what it has made."""
    return [Leaves(weights(1)[0]) for _ in range(4)]


CASES: list[Callable[[], list[nn.Module]]] = [
    *(one_part, flat, with_gaps, columns, buffers, whole_tables, attributes, leaving)
]


@pytest.mark.parametrize("make", CASES)
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, None])
def test_plans_count_the_larger_tensor_once(make: Any, optimizer: Any) -> None:
    """As memory holds it, in one partition and in several; estimates do the same."""
    torch.manual_seed(0)
    layers = nn.Sequential(*make())
    inputs = torch.randn(8 * CHUNKS, WIDTH)
    given: Any = {"chunks": CHUNKS, "loss_fn": squares, "optimizer": optimizer, "rows": ()}
    profile = measured(layers, inputs, **given)
    estimated = estimate_profile(layers, inputs, rates="CPU core", progress=False, **given)
    for name in ("parameter_bytes", "gradient_bytes", "buffer_bytes"):
        both = [[getattr(layer, name) for layer in one.layers] for one in (profile, estimated)]
        assert both[0] == both[1]
    n = len(layers)
    for balance in ([n], [2, n - 2], [1, 1, n - 2]):
        pipe = GPipe(layers, balance, chunks=CHUNKS, checkpoint="never")
        make_optimizer = optimizer or torch.optim.SGD
        counted = count(pipe, inputs, "gpipe", make_optimizer(layers.parameters(), lr=0.0))
        predicted = least_and_most(profile, balance, "never", "gpipe")
        for low, high, n_bytes in zip(*predicted, counted, strict=True):
            assert 0.99 * low.total <= n_bytes <= 1.01 * high.total, balance


def test_each_layer_has_its_parts_and_the_first_the_rest() -> None:
    """By hand; what a pipeline moves to another device are the parts alone."""
    layers = one_part()
    parts = with_gaps()
    here = [own["parameter_bytes"] for own in own_bytes([*layers, *parts], "cpu")]
    assert here == [WEIGHT, 8 * WEIGHT, 0, WEIGHT, 5 * WEIGHT, WEIGHT, WEIGHT, WEIGHT]
    moved = [own["parameter_bytes"] for own in own_bytes([*layers, *parts], "cuda")]
    assert moved == [WEIGHT, WEIGHT, 0, *[WEIGHT] * 5]
    gradients = [own["gradient_bytes"] for own in own_bytes([*layers, *parts], "cpu")]
    assert gradients == moved
    table = 800 * WIDTH * 4
    assert [own["buffer_bytes"] for own in own_bytes(whole_tables(), "cpu")] == [table, 0, 0, 0]
    with torch.device("meta"):
        later = with_gaps()
    for device_type, first in (("cpu", 5 * WEIGHT), ("cuda", WEIGHT)):
        assert own_bytes(later, device_type)[0]["parameter_bytes"] == first


def test_moving_a_part_copies_the_part() -> None:
    """A pipeline moves layers by `nn.Module.to`."""
    layer = Product(weights(8)[3], buffer=torch.zeros(100, 4)[::10, :1]).to("meta")
    assert layer.weight.untyped_storage().nbytes() == WEIGHT
    assert layer.table.untyped_storage().nbytes() == 10 * 4


def test_a_loss_counts_what_layers_do_not_have() -> None:
    """Of a tensor that its parts and those of layers fill, its own."""
    halves = weights(2)
    layers, loss = [Product(halves[0])], Product(halves[1], buffer=weights(2)[0])
    assert bytes_of_loss(loss, layers, "cpu")["parameter_bytes"] == 3 * WEIGHT
    assert bytes_of_loss(loss, layers, "cuda")["parameter_bytes"] == 2 * WEIGHT


def test_tied_parameters_may_lie_in_what_another_layer_has() -> None:
    """A profile of such layers is one; the tied gradients are there once."""
    whole = weights(1)
    first, second = Product(whole[0]), Product(whole[0])
    layers = nn.Sequential(first, second, second)
    assert first.weight is not second.weight
    profile = measured(layers, torch.ones(8, WIDTH), chunks=CHUNKS)
    assert [layer.parameter_bytes for layer in profile.layers] == [WEIGHT, 0, 0]
    assert [tie.layers for tie in profile.ties] == [(1, 2)]
    assert profile.matches(layers)
    assert gb.Profile.from_dict(profile.to_dict()) == profile


def test_shares_add_up_to_the_storage() -> None:
    """Whatever the parts have in common; one that repeats an element has no more than that."""
    table = torch.zeros(4, 2)
    tensors = [("a", table[:2]), ("b", table[1:3]), ("c", table), ("b", table[0]), ("a", table[3])]
    (shared,) = share_out(tensors).values()
    assert shared.by_owner == {"a": 16, "b": 16, "c": 0}
    (shared,) = share_out([("b", table[:1]), ("a", table[3]), ("c", table[3])]).values()
    assert shared.by_owner == {"b": 16, "a": 8, "c": 8}
    (shared,) = share_out([("a", torch.zeros(1).expand(100))]).values()
    assert shared.by_owner == {"a": 4}


def test_a_ledger_charges_each_owner_with_its_parts() -> None:
    """Until the storage is gone; what is made of a part is the owner's who keeps the part."""
    ledger, table = Ledger(3), torch.zeros(4, 2)
    parts = [table[0], table[2]]
    ledger.keep([(1, parts[0]), (2, parts[1]), (0, None)])
    assert ledger.live == ledger.peaks == [0, 24, 8]
    assert [ledger.owner_of(part) for part in (*parts, table[3])] == [1, 2, 1]
    ledger.hold(parts, 0)
    assert ledger.live == [0, 24, 8]
    with ledger.watch(0, follow=True):
        made = parts[1] + 1
    assert ledger.live == [0, 24, 16]
    del made, parts, table
    assert ledger.live == [0, 0, 0]
