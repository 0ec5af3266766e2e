"""Layers that differ in what they do not read are alike; all others are told apart."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpipebal as gb
from gpipebal.profiler.replicas.reads import names_read

pytestmark = pytest.mark.timeout(60)


class Placed(nn.Module):
    """A layer that knows its place in a chain."""

    def __init__(self, place: int, use: Callable[[Any, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.place = self.inner.place = place
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return x if self.use is None else self.use(self, x)


class ByDictionary(Placed):
    """Looks at its place by a name that the code does not have."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + vars(self)["pla" + "ce"]


class Copied(Placed):
    """Looks at its place when it is copied."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.doubles = bool(state["place"])

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x * 2.0 if vars(self).get("doubles") else x


class Trained(Placed):
    """Looks at its place when it is put into training mode, as one with frozen statistics does."""

    def train(self, mode: bool = True) -> None:  # type: ignore[override]
        """Return nothing, as many do by mistake."""
        super().train(mode)
        self.inner.train(mode and self.place > 0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh() if self.inner.training else super().forward(x)


class InSlot(Placed):
    """Has its place where its dictionary has not, and is copied with it."""

    __slots__ = ("empty", "place")

    def __init__(self, place: int, use: Any) -> None:
        super().__init__(place, use)
        del self.inner.place

    def __getstate__(self) -> Any:
        return {**vars(self), "place": self.place}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.place = vars(self).pop("place")

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.place


class Found(Placed):
    """Has its attributes found in a way of its own."""

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.place


class InBackward(torch.autograd.Function):
    """Looks at the place of a layer in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Placed) -> Tensor:
        ctx.layer = layer
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient + ctx.layer.inner.place, None


def add_half(layer: Any, x: Tensor) -> Tensor:
    """Add another attribute of a part."""
    return x + layer.inner.half


def only_in(asks: Callable[[], bool]) -> Callable[[Any, Tensor], Tensor]:
    """Look at the place only in some phases."""
    return lambda layer, x: x + layer.place if asks() else x


def in_a_hook(layer: Any, x: Tensor) -> Tensor:
    """Look at the place of a part in its hook."""
    handle = layer.inner.register_forward_hook(lambda inner, _, out: out + inner.place)
    try:
        return layer.inner(x)
    finally:
        handle.remove()


#: Ways to look at the place; the class of layers that looks, and what it does.
READS: dict[str, tuple[type[Placed], Callable[[Any, Tensor], Tensor] | None]] = {
    "by its name": (Placed, lambda layer, x: x + layer.place),
    "of a part": (Placed, lambda layer, x: x + layer.inner.place),
    "by another name": (Placed, lambda layer, x: x + getattr(layer, "pla" + "ce")),
    "whether it is there": (Placed, lambda layer, x: x + 1 if hasattr(layer, "place") else x),
    "by the dictionary": (ByDictionary, None),
    "in its text": (Placed, lambda layer, x: x + len(str(vars(layer)))),
    "of a copy": (Placed, lambda layer, x: x + copy.copy(layer).place),
    "when it is copied": (Copied, None),
    "in a way of its own": (Found, None),
    "in a slot": (InSlot, None),
    "in a hook": (Placed, in_a_hook),
    "in a backward": (Placed, lambda layer, x: InBackward.apply(x, layer)),
    "without a graph": (Placed, only_in(lambda: not torch.is_grad_enabled())),
    "under a checkpoint": (Placed, only_in(gb.is_checkpointing)),
}


def n_run(layers: list[nn.Module], *, training: bool = True) -> int:
    """Return how many layers an estimate runs at one size."""
    profile = gb.profile_model(
        nn.Sequential(nn.Linear(4, 4), *layers).train(training),
        torch.ones(4, 4),
        method="estimate",
        rates="CPU core",
        rows=(),
        progress=False,
    )
    assert len({layer.outputs for layer in profile.layers}) == 1 + len(layers)
    return int(profile.provenance["layers_run"]) - 1


def test_layers_are_alike_if_they_do_not_read_what_differs() -> None:
    """So blocks that know their place, as those of transformers do, are run once for all."""
    assert n_run([Placed(k) for k in range(5)]) == 1
    # Each value counts that is read, also where others differ too and are not.
    layers: list[nn.Module] = [Placed(k, add_half) for k in range(4)]
    for k, layer in enumerate(layers):
        vars(layer.inner)["half"] = k // 2
    assert n_run(layers) == 2


class Recurrent(nn.Module):
    """A residual layer that is recurrent."""

    def __init__(self, kind: type[nn.RNNBase], n_layers: int = 1) -> None:
        super().__init__()
        self.inner = kind(4, 4, n_layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)[0]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_equal_recurrent_layers_are_alike(kind: type[nn.RNNBase]) -> None:
    """They know their weights by weak references too, of which no two are the same."""
    assert n_run([Recurrent(kind) for _ in range(3)]) == 1
    assert n_run([Recurrent(kind, n) for n in (1, 2, 1)]) == 2


class Settings:
    """Tells nothing of what is in it, and no two are the same."""

    def __init__(self, table: Tensor | None = None) -> None:
        self.table = table


def test_objects_that_layers_do_not_read_make_no_difference_unless_tensors_are_in_them() -> None:
    """Adapters of peft keep the arguments that they were made with."""

    def run(use: Callable[[Any, Tensor], Tensor] | None, make: Callable[[int], Settings]) -> int:
        layers: list[nn.Module] = [Placed(k, use) for k in range(3)]
        for k, layer in enumerate(layers):
            vars(layer)["settings"] = {"of this layer": make(k)}
        return n_run(layers)

    assert run(None, lambda k: Settings()) == 1
    assert run(lambda layer, x: x + len(layer.settings), lambda k: Settings()) == 3
    # A table counts as memory, whoever reads it.
    assert run(None, lambda k: Settings(torch.ones(k + 1))) == 3


@pytest.mark.parametrize("name", READS)
def test_layers_that_read_what_differs_are_told_apart(name: str) -> None:
    """In whatever way and at whatever time they look at it."""
    kind, use = READS[name]
    assert n_run([kind(k, use) for k in range(3)]) == 3


def test_layers_are_told_apart_by_what_decides_their_modes() -> None:
    """A model in evaluation mode is profiled as it is trained: copies change their mode."""
    assert n_run([Placed(k) for k in range(3)], training=False) == 1
    layers: list[nn.Module] = [Trained(k) for k in range(3)]
    assert n_run(layers, training=False) == 3
    model = nn.Sequential(nn.Linear(4, 4), *layers).eval()
    brief: dict[str, Any] = {"rows": (), "timeout": 0, "as_pipeline": False, "progress": False}
    for shares in (True, False):
        profile = gb.profile_model(model, torch.ones(4, 4), share_identical=shares, **brief)
        assert [len(layer.saved) for layer in profile.layers[1:]] == [1, 2, 2]


def test_values_that_layers_keep_for_themselves_make_no_difference_to_measurements() -> None:
    """With `share_identical` the first has the times of all; one that reads it is measured."""
    # The layers themselves: the identity of one that is gone may be that of another.
    runs: list[nn.Module] = []

    def noted(layer: Any, x: Tensor) -> Tensor:
        runs.append(layer)
        return x

    def seen(layer: Any, x: Tensor) -> Tensor:
        runs.append(layer)
        return x + layer.place if gb.is_recomputing() else x

    options: dict[str, Any] = {"share_identical": True, "timeout": 0, "progress": False}
    for use, n_measured in ((noted, 1), (seen, 3)):
        runs.clear()
        model = nn.Sequential(nn.Linear(4, 4), *(Placed(k, use) for k in range(3)))
        profile = gb.profile_model(model, torch.ones(4, 4), rows=(1,), **options)
        assert len({layer.forward_time for layer in profile.layers[1:]}) == n_measured
        assert len({layer.saved for layer in profile.layers}) == 4
        assert len({id(layer) for layer in runs}) == n_measured


class Times(nn.Module):
    """Adds up its input several times; how many is a value of a tensor."""

    def __init__(self, n: Tensor) -> None:
        super().__init__()
        self.register_buffer("n", n)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x * k for k in range(int(self.n))]).sum(0)


class InList(Times):
    """Has the tensor in a list."""

    def __init__(self, n: Tensor) -> None:
        super().__init__(n)
        del self.n
        self.of_list = [n]

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x * k for k in range(int(self.of_list[0]))]).sum(0)


class Picks(nn.Module):
    """Picks features by a mask, and makes as many of them again."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.register_buffer("mask", torch.arange(64) < n)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.pad(x[:, self.mask], (0, 64 - int(self.mask.sum())))


@pytest.mark.parametrize("make", [Times, InList], ids=["buffer", "in a list"])
def test_layers_that_count_with_a_tensor_are_told_apart_by_its_value(make: Any) -> None:
    """With `share_identical` each has its own costs, unless the values are the same too."""
    numbers = [1, 40, 1, 40, 7]
    layers = [make(torch.tensor(n)) for n in numbers]
    model = nn.Sequential(nn.Linear(8, 64), *layers)
    options: dict[str, Any] = {"rows": (), "timeout": 0, "progress": False}
    shared = gb.profile_model(model, torch.randn(16, 8), share_identical=True, **options)
    alone = gb.profile_model(model, torch.randn(16, 8), one_at_a_time=True, **options)
    of_shared, of_alone = ([x.forward_peak_bytes for x in p.layers] for p in (shared, alone))
    assert of_shared == of_alone and len(set(of_shared[1:])) == 3
    assert len({layer.forward_time for layer in shared.layers[1:]}) == 3


def test_layers_that_pick_by_a_mask_are_told_apart_by_it() -> None:
    """Otherwise what the first picks would go into the layer behind another."""
    model = nn.Sequential(nn.Linear(8, 64), Picks(48), nn.Linear(64, 64), Picks(16))
    brief: dict[str, Any] = {"rows": (), "timeout": 0, "progress": False}
    shared = gb.profile_model(model, torch.randn(16, 8), share_identical=True, **brief)
    alone = gb.profile_model(model, torch.randn(16, 8), one_at_a_time=True, **brief)
    for one, other in zip(shared.layers, alone.layers, strict=True):
        assert one.forward_peak_bytes == other.forward_peak_bytes
        assert shared.bytes_of(one.saved) == alone.bytes_of(other.saved)


def test_values_that_costs_do_not_depend_on_tell_no_layers_apart() -> None:
    """Floating-point numbers, large tables, and what a normalisation counts."""
    layers: list[nn.Module] = [nn.BatchNorm1d(64) for _ in range(3)]
    for k, norm in enumerate(layers):
        norm.num_batches_tracked.fill_(k)  # type: ignore[operator, union-attr]
        norm.register_buffer("scale", torch.full((3,), float(k)))
        norm.register_buffer("table", torch.full((1 << 17,), k, dtype=torch.int8))
    model = nn.Sequential(nn.Linear(8, 64), *layers)
    brief: dict[str, Any] = {"rows": (), "timeout": 0, "progress": False}
    profile = gb.profile_model(model, torch.randn(16, 8), share_identical=True, **brief)
    assert len({layer.forward_time for layer in profile.layers[1:]}) == 1


def test_modules_are_left_as_they_were() -> None:
    """After a block, also one that fails, attributes are found as before it."""
    layer = Placed(3)
    with pytest.raises(ZeroDivisionError), names_read() as outer, names_read() as inner:
        assert "__getattribute__" in vars(nn.Module)
        assert layer.place == 3 and {"place"} == outer == inner
        1 / 0  # noqa: B018
    assert "__getattribute__" not in vars(nn.Module)
    assert layer.inner.weight is not None and outer == {"place"}


def test_a_way_to_find_attributes_that_is_there_already_stays() -> None:
    """Then all attributes count."""
    before = object.__getattribute__
    nn.Module.__getattribute__ = before  # type: ignore[method-assign]
    try:
        assert n_run([Placed(k) for k in range(3)]) == 3
        assert vars(nn.Module)["__getattribute__"] is before
    finally:
        del nn.Module.__getattribute__
    assert n_run([Placed(k) for k in range(3)]) == 1
