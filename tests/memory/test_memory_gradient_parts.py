"""Gradients that are parts of larger ones hold these: plans must count them for as long as that."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from counted_memory import Add, Beside, Keep, counted, measured, squares
from torch import Tensor, nn

import gpipebal as gb
from gpipebal.pipeline.values.tensors import storage_key
from gpipebal.planner import evaluate
from gpipebal.profile import SkipProfile
from gpipebal.profile.gradients import GradientMemory
from gpipebal.profiler.chain.gradients import begun_inside, handed_back
from gpipebal.skip import Namespace, pop, skippable, stash

pytestmark = pytest.mark.timeout(120)
#: Columns of a narrow value and of a wide one.
NARROW, WIDE = 32, 512
#: What the numbers of losses may need besides.
FEW = 64


class Work(torch.autograd.Function):
    """Needs much memory in its backward, and no gradient of its own is as large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        room = gradient.new_zeros(40 * WIDE * len(gradient))
        return gradient * 2 + room[0]


class Busy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Work.apply(x)  # type: ignore[no-any-return]


class Two(nn.Module):
    """Make two values."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.tanh(), x.sigmoid()


class WorkBeside(nn.Module):
    """Work on one of two values; put constants beside the other, which goes back first."""

    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        first, second = value
        return Work.apply(first), WithOnes()(second)


class Join(nn.Module):
    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        return torch.cat(value, dim=1)


class WithOnes(nn.Module):
    """Put constants beside the input."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x.new_ones(len(x), WIDE)], dim=1)


def skip_beside() -> list[nn.Module]:
    """The gradient of a narrow skip is a part of that of a wide concatenation."""
    ns = Namespace()
    way_there = [nn.Linear(NARROW, NARROW), Keep().isolate(ns), Busy(), nn.Linear(NARROW, WIDE)]
    return [*way_there, Beside().isolate(ns), nn.Linear(WIDE + NARROW, 8)]


@skippable(stash=["other"])
class KeepOther(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("other", x)
        return x


@skippable(pop=["kept", "other"])
class BesideTwo(nn.Module):
    def forward(self, x: Tensor) -> Any:
        kept, other = (yield pop("kept")), (yield pop("other"))
        return torch.cat([x, kept, other], dim=1)


def two_skips_beside() -> list[nn.Module]:
    """The gradients of two skips are parts of one, and wait for different layers."""
    way_there = [nn.Linear(NARROW, NARROW), Keep(), Busy(), KeepOther(), Busy()]
    return [*way_there, nn.Linear(NARROW, WIDE), BesideTwo(), nn.Linear(WIDE + 2 * NARROW, 8)]


def skip_added() -> list[nn.Module]:
    """The gradient of a skip is that of the sum itself."""
    ns = Namespace()
    way_there = [nn.Linear(NARROW, WIDE), Keep().isolate(ns), Busy(), nn.Linear(WIDE, WIDE)]
    return [*way_there, Add().isolate(ns), nn.Linear(WIDE, 8)]


def added_at_the_peak() -> list[nn.Module]:
    """The same, with nothing that needs more than the addition and what is around it."""
    ns = Namespace()
    way_there = [nn.Linear(NARROW, WIDE), Keep().isolate(ns), nn.Tanh(), nn.Tanh()]
    return [*way_there, Add().isolate(ns), nn.Tanh(), nn.Linear(WIDE, 8)]


def beside_at_the_peak() -> list[nn.Module]:
    """The same, with a concatenation."""
    way_there = [nn.Linear(NARROW, WIDE), nn.Tanh(), Keep(), nn.Tanh()]
    return [*way_there, Beside(), nn.Linear(2 * WIDE, 8)]


def constants_beside() -> list[nn.Module]:
    """The gradient of a narrow value is a part of that of a wide concatenation."""
    return [nn.Linear(NARROW, NARROW), Busy(), WithOnes(), nn.Linear(WIDE + NARROW, 8)]


def handed_on() -> list[nn.Module]:
    """The same, through layers that hand on the gradients that they are given."""
    layers = [nn.Linear(NARROW, NARROW), Busy(), nn.Identity(), nn.Unflatten(1, (NARROW, 1))]
    return [*layers, nn.Flatten(), WithOnes(), nn.Linear(WIDE + NARROW, 8)]


def busy_before(kept: int, value: int, joins: type[nn.Module]) -> list[nn.Module]:
    """A value and a skip are joined, and the layer that made the value has the peak."""
    ns = Namespace()
    joined = kept + value if joins is Beside else value
    way_there = [nn.Linear(NARROW, kept), Keep().isolate(ns), nn.Linear(kept, value), Busy()]
    return [*way_there, joins().isolate(ns), nn.Linear(joined, 8)]


def wide_value_beside() -> list[nn.Module]:
    """The gradient of the value is nearly all of the concatenation's."""
    return busy_before(NARROW, WIDE, Beside)


def wide_skip_beside() -> list[nn.Module]:
    """The gradient of the value is a small part of the concatenation's."""
    return busy_before(WIDE, NARROW, Beside)


def value_handed_on() -> list[nn.Module]:
    """The gradient of the value is nearly all of the concatenation's, and other layers get it."""
    *way_there, joined, last = busy_before(NARROW, WIDE, Beside)
    return [*way_there, nn.Identity(), nn.Unflatten(1, (WIDE, 1)), nn.Flatten(), joined, last]


def narrow_value_handed_on() -> list[nn.Module]:
    """The same, where it is a small part of the concatenation's, and then a part of that."""
    *way_there, joined, last = busy_before(WIDE, NARROW, Beside)
    last = nn.Linear(last.in_features + WIDE, 8)
    return [*way_there, nn.Identity(), WithOnes(), nn.Identity(), joined, last]


def value_added() -> list[nn.Module]:
    """The gradients of value and skip are one."""
    return busy_before(WIDE, WIDE, Add)


def added_inside_a_part() -> list[nn.Module]:
    """The gradient of a sum is a part of that of a concatenation, and both terms hold all of it."""
    ns = Namespace()
    way_there = [nn.Linear(NARROW, NARROW), Keep().isolate(ns), nn.Linear(NARROW, WIDE)]
    way_there += [nn.Linear(WIDE, NARROW), Add().isolate(ns), WithOnes()]
    return [*way_there, nn.Linear(WIDE + NARROW, 8)]


@skippable(pop=["other"])
class BesideOther(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return torch.cat([x, (yield pop("other"))], dim=1)


def inner_waits_longer() -> list[nn.Module]:
    """A concatenation inside another one, whose own skip is narrow and waits longest."""
    way_there = [nn.Linear(NARROW, NARROW), Keep(), Busy(), nn.Linear(NARROW, WIDE), KeepOther()]
    way_there += [nn.Linear(WIDE, NARROW), Beside(), nn.Identity(), BesideOther()]
    return [*way_there, nn.Linear(2 * NARROW + WIDE, 8)]


def outer_waits_longer() -> list[nn.Module]:
    """The same, where the gradients of both skips are in one memory: it counts once."""
    way_there = [nn.Linear(NARROW, WIDE), KeepOther(), nn.Linear(WIDE, NARROW), Keep(), Busy()]
    return [*way_there, Beside(), BesideOther(), nn.Linear(2 * NARROW + WIDE, 8)]


class Along(nn.Module):
    """Work on the first of two values, and hand the other through."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.layer(value[0]), value[1]


def one_of_two_values() -> list[nn.Module]:
    """Of two values that are joined, the gradient of one is handed through and holds the whole."""
    way_there = [nn.Linear(NARROW, NARROW), Two(), Along(Busy()), Along(nn.Linear(NARROW, WIDE))]
    return [*way_there, Join(), nn.Linear(WIDE + NARROW, 8)]


def one_of_two_beside_a_skip() -> list[nn.Module]:
    """The value beside a skip is one of several tensors."""
    way_there = [nn.Linear(NARROW, NARROW), Keep(), Busy(), nn.Linear(NARROW, WIDE), Two()]
    return [*way_there, Along(nn.Linear(WIDE, NARROW)), JoinAll(), nn.Linear(2 * NARROW + WIDE, 8)]


class Total(nn.Module):
    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        return value[0] + value[1]


def two_in_one() -> list[nn.Module]:
    """The gradients of two values are one; a partition copies that of its own input."""
    return [
        nn.Linear(NARROW, WIDE),
        Two(),
        Along(Busy()),
        nn.Identity(),
        Total(),
        nn.Linear(WIDE, 8),
    ]


@skippable(pop=["kept"])
class JoinAll(nn.Module):
    def forward(self, value: tuple[Tensor, Tensor]) -> Any:
        return torch.cat([*value, (yield pop("kept"))], dim=1)


def used_up_at_once() -> list[nn.Module]:
    """The whole is freed before the backward that was given a part of it needs most."""
    block = nn.Sequential(Busy(), nn.Linear(NARROW, NARROW))
    return [nn.Linear(NARROW, NARROW), block, WithOnes(), nn.Linear(WIDE + NARROW, 8)]


CHAINS = [
    skip_beside,
    two_skips_beside,
    skip_added,
    added_at_the_peak,
    beside_at_the_peak,
    constants_beside,
    handed_on,
    wide_value_beside,
    wide_skip_beside,
    value_handed_on,
    narrow_value_handed_on,
    value_added,
    used_up_at_once,
    added_inside_a_part,
    inner_waits_longer,
    outer_waits_longer,
]
#: Where values of several tensors are divided, plans may count a gradient too much.
NEARLY = [one_of_two_values, one_of_two_beside_a_skip, two_in_one]


@pytest.mark.parametrize("rows", [16, 1])
@pytest.mark.parametrize("make", CHAINS)
def test_parts_hold_the_whole(make: Any, rows: int) -> None:
    """Plans predict what is counted, wherever the chain is cut, also where a part has no gaps."""
    layers = nn.Sequential(*make())
    n = len(layers)
    for chunks in (1, 3):
        inputs = torch.randn(rows * chunks, NARROW)
        profile = measured(layers, inputs, chunks=chunks, loss_fn=squares)
        # With several partitions and micro-batches more or less may wait for a neighbour.
        for balance in [[n], *([k, n - k] for k in range(1, n) if chunks == 1)]:
            for checkpoint in ("never", "always"):
                plan = evaluate(profile, balance, checkpoint=checkpoint, loss_inside=True)
                found = counted(layers, balance, inputs, chunks=chunks, checkpoint=checkpoint)
                for partition, n_bytes in zip(plan.partitions, found, strict=True):
                    memory = partition.memory
                    least = memory.total - memory.waiting
                    assert least - FEW <= n_bytes <= memory.total + FEW, (balance, checkpoint)


def test_gradients_in_one_memory_are_copied_only_at_a_cut() -> None:
    """A profile tells copies of gradients that have memory in common from what layers make."""
    inputs, n_bytes = torch.randn(48, NARROW), 48 * WIDE * 4
    added = measured(nn.Sequential(*added_at_the_peak()), inputs).layers[4]
    beside = measured(nn.Sequential(*beside_at_the_peak()), inputs).layers[4]
    for layer in (added, beside):
        assert layer.backward_peak_bytes == layer.cut_copied_bytes == 2 * n_bytes
    # Of two inputs whose gradient is one tensor, the second takes it over.
    assert added.chained_peak_bytes == added.chained_cut_copied_bytes == n_bytes
    assert beside.chained_cut_copied_bytes == 2 * n_bytes
    others = measured(nn.Sequential(*handed_on()), inputs).layers
    assert [layer.cut_copied_bytes > 0 for layer in others] == [False] * 5 + [True, False]


@pytest.mark.parametrize("make", NEARLY)
def test_values_of_several_tensors_hold_the_whole(make: Any) -> None:
    """Plans predict no less than is counted, and at most one gradient of each value more."""
    layers, inputs = nn.Sequential(*make()), torch.randn(48, NARROW)
    n = len(layers)
    profile = gb.profile_model(
        layers, inputs, chunks=1, rows=(), loss_fn=squares, timeout=0, progress=False
    )
    for balance in [[n], *([k, n - k] for k in range(1, n))]:
        for checkpoint in ("never", "always"):
            plan = evaluate(profile, balance, checkpoint=checkpoint, loss_inside=True)
            found = counted(layers, balance, inputs, chunks=1, checkpoint=checkpoint)
            for partition, n_bytes in zip(plan.partitions, found, strict=True):
                memory = partition.memory
                assert n_bytes <= memory.total + FEW, (balance, checkpoint)
                least = memory.total - memory.waiting - 48 * (WIDE + NARROW) * 4
                assert least <= n_bytes + FEW, (balance, checkpoint)


def added_behind_a_cut() -> list[nn.Module]:
    """A partition is given two values whose gradients are one, and does little else with them."""
    way_there = [nn.Linear(NARROW, NARROW), Two(), nn.Identity(), nn.Identity()]
    return [*way_there, Total(), nn.Linear(NARROW, 8)]


def constants_behind_a_cut() -> list[nn.Module]:
    """What is handed through has a small part of a larger gradient."""
    way_there = [nn.Linear(NARROW, NARROW), Two(), Along(Busy()), Along(nn.Tanh())]
    return [*way_there, Join(), WithOnes(), nn.Linear(WIDE + 2 * NARROW, 8)]


@pytest.mark.parametrize("rows", [48, 1])
@pytest.mark.parametrize(
    "make", [one_of_two_values, two_in_one, added_behind_a_cut, constants_behind_a_cut]
)
def test_what_is_handed_through_from_a_cut_holds_no_whole(make: Any, rows: int) -> None:
    """Its gradient is copied at once, so a partition that begins there needs what is counted."""
    layers, inputs = nn.Sequential(*make()), torch.randn(rows, NARROW)
    profile = measured(layers, inputs, loss_fn=squares)
    assert [bool(layer.through_gradient_storages) for layer in profile.layers[:4]].count(True) > 0
    for k in (2, 3):
        assert profile.layers[k].handed_through
        for checkpoint in ("never", "always"):
            balance = [k, len(layers) - k]
            plan = evaluate(profile, balance, checkpoint=checkpoint, loss_inside=True)
            found = counted(layers, balance, inputs, chunks=1, checkpoint=checkpoint)
            assert abs(plan.partitions[1].memory.total - found[1]) <= FEW, (k, checkpoint)


def test_a_part_is_held_while_other_gradients_are_made() -> None:
    """A backward hands back a part of what it was given, and needs most after that."""
    ends = nn.Linear(NARROW, NARROW), nn.Linear(WIDE + 2 * NARROW, 8)
    layers, inputs = (
        nn.Sequential(ends[0], Two(), WorkBeside(), Join(), ends[1]),
        torch.randn(48, NARROW),
    )
    profile = measured(layers, inputs, loss_fn=squares)
    plan = evaluate(profile, [5], checkpoint="never", loss_inside=True)
    (found,) = counted(layers, [5], inputs, chunks=1, checkpoint="never")
    assert found - FEW <= plan.partitions[0].memory.total <= 1.02 * found


@pytest.mark.parametrize("make", [*CHAINS, *NEARLY])
def test_all_ways_to_profile_know_it(make: Any) -> None:
    """Layers alone, identical ones once, and without memory: the same fields as in the chain."""
    layers, inputs = nn.Sequential(*make()), torch.randn(48, NARROW)
    given: dict[str, Any] = {"chunks": 2, "loss_fn": squares}
    by_chain = measured(layers, inputs, **given, rows=(8, 16))

    def parts(profile: gb.Profile) -> Any:
        flow = profile.gradient_flow
        return flow.memory, flow.given, flow.skips

    for way in ({"one_at_a_time": True}, {"share_identical": True}):
        found = measured(layers, inputs, **given, **way)
        assert parts(found) == parts(by_chain)
    estimated = gb.profile_model(
        layers, inputs, method="estimate", rates="CPU core", rows=(), progress=False, **given
    )
    assert parts(estimated) == parts(by_chain)
    # By the rows.
    for rows in (4, 16, 20):
        there = [one._replace(n_bytes=one.n_bytes * rows // 24) for one in parts(by_chain)[0]]
        assert parts(by_chain.at_rows(rows)) == (tuple(there), *parts(by_chain)[1:])
    assert gb.Profile.from_dict(by_chain.to_dict()) == by_chain


def test_what_the_gradient_of_a_skip_holds() -> None:
    """In a concatenation all of it, for the skip that waits longest; itself, if nobody knows."""
    layers, inputs = nn.Sequential(*two_skips_beside()), torch.randn(48, NARROW)
    profile = measured(layers, inputs)
    kept, other = profile.skips
    assert kept.gradient_storages == other.gradient_storages
    # So are they of the layer before, and of the layer that pops both.
    assert kept.gradient_storages == profile.layers[5].gradient_storages
    assert kept.gradient_storages == profile.layers[6].gradient_storages
    whole, alone = 48 * (WIDE + 2 * NARROW) * 4, 48 * NARROW * 4
    flow = profile.gradient_flow
    (place,) = flow.skips[0]
    memory = flow.memory[place]
    assert memory == GradientMemory(whole, maker=7, lowest_value=5, sources=(1, 3))
    assert [memory.until(first) for first in range(6)] == [1, 1, 3, 3, 5, 5]
    unknown = replace(profile, skips=(SkipProfile("kept", 1, 6, kept.storages),))
    (place,) = unknown.gradient_flow.skips[0]
    assert unknown.gradient_flow.memory[place] == GradientMemory(alone, 6, 6, (1,))


def test_a_gradient_in_the_place_of_one_that_is_gone_is_another() -> None:
    """Two gradients of a backward share their memory only if it is the same while both live."""
    first, second = torch.ones(2, 2, requires_grad=True), torch.ones(5, requires_grad=True)
    place: list[int] = []

    class Part(torch.autograd.Function):
        """Hands back a part of a larger gradient: autograd copies it, and frees the whole."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            whole = gradient.new_zeros(2, 4)
            place.append(storage_key(whole))
            return whole[:, :2]

    class InItsPlace(torch.autograd.Function):
        """Hands back a gradient that lies where the other one has lain."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            elsewhere: list[Tensor] = []
            while storage_key(made := gradient.new_zeros(5)) != place[0]:
                elsewhere.append(made)
                assert len(elsewhere) < 10_000
            return made

    inputs = [first, second]
    with handed_back(inputs, hold=False) as back:
        later = InItsPlace.apply(second).sum()
        # Autograd goes back through what was computed last first.
        (later + Part.apply(first).sum()).backward()
    found = {place: each for place, each in back.items() if each is not None}
    assert {place: (each.n_bytes, each.is_own) for place, each in found.items()} == {
        0: (32, False),
        1: (20, True),
    }
    assert found[0].key != found[1].key


@pytest.mark.parametrize("shape", [(8, 16, 64, 64), (2, 2, 1024), (1, 2, 2, 2, 2, 4096), (90, 70)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_gradients_with_gaps_are_little_larger(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """They have some between any two dimensions, and rows are as aligned as without any."""
    output, found = torch.zeros(shape, dtype=dtype, requires_grad=True), list[Tensor]()
    output.register_hook(found.append)
    ((root, start),), _ = begun_inside([output], lambda made: None, "parts")
    root.backward(start)
    (gradient,) = found
    assert gradient.untyped_storage().nbytes() <= 1.25 * gradient.nbytes
    known = [(n, step) for n, step in zip(shape, gradient.stride(), strict=True) if n > 1]
    for (_, step), (n, inner) in pairwise(known):
        assert step > n * inner
        assert step % math.gcd(n * inner, 16 // dtype.itemsize) == 0
