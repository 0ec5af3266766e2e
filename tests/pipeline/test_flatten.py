"""Nested Sequentials are opened, and the model stays the same."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gpipebal as gb
from gpipebal.errors import ModelError
from gpipebal.skip import pop, skippable, stash

#: Chains in chains: each is its layers, a leaf is a number of layers of its own.
nested = st.recursive(
    st.integers(1, 2), lambda inner: st.lists(inner, min_size=0, max_size=4), max_leaves=12
)


def chain_of(tree: list) -> nn.Sequential:
    """Build a Sequential in the form of a tree."""
    parts: list[nn.Module] = []
    for part in tree:
        if isinstance(part, list):
            parts.append(chain_of(part))
        else:
            parts += [nn.Linear(3, 3, dtype=torch.float64) for _ in range(part)]
    return nn.Sequential(*parts)


def leaves_of(module: nn.Module) -> list[nn.Module]:
    """List the layers in the order in which they run."""
    if type(module) is not nn.Sequential:
        return [module]
    return [leaf for child in module for leaf in leaves_of(child)]


@given(st.lists(nested, min_size=1, max_size=4))
@settings(max_examples=60)
def test_the_flat_chain_is_the_same_model(tree: list) -> None:
    """Same layer objects in the same order, same numbers; the nested model is left as it was."""
    model = chain_of(tree)
    keys = list(model.state_dict())
    flat = gb.flatten(model)
    assert [*flat] == leaves_of(model)
    assert list(model.state_dict()) == keys
    assert all(p is q for p, q in zip(flat.parameters(), model.parameters(), strict=True))
    x = torch.randn(2, 3, dtype=torch.float64)
    assert torch.equal(flat(x), model(x))
    assert [*gb.flatten(flat).named_children()] == [*flat.named_children()]


def test_names_are_paths_and_stay_apart() -> None:
    """Names that would be equal are told apart; none hides what a Sequential has itself."""
    deep = nn.Sequential(OrderedDict(b=nn.Tanh(), c=nn.ReLU()))
    model = nn.Sequential(
        OrderedDict([("a_b", nn.Identity()), ("a", deep), ("load_state", nn.Sequential())])
    )
    model.load_state.add_module("dict", nn.Sigmoid())
    flat = gb.flatten(model)
    assert [name for name, _ in flat.named_children()] == ["a_b", "a_b_", "a_c", "load_state_dict_"]
    assert flat.load_state_dict(flat.state_dict()).missing_keys == []


def test_a_chain_that_stands_twice_is_there_twice() -> None:
    """Unlike `named_children`, which would leave the second use out."""
    block = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    model = nn.Sequential(block, nn.ReLU(), block)
    flat = gb.flatten(model)
    assert [*flat] == [*block, model[1], *block]
    x = torch.randn(2, 3)
    torch.testing.assert_close(flat(x), model(x))


class Doubled(nn.Sequential):
    """Has a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Scaled(nn.Sequential):
    """Has a parameter of its own."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.register_parameter("scale", nn.Parameter(torch.ones(1)))


class Reversed(nn.Sequential):
    """Runs its layers in another order."""

    def __iter__(self) -> Iterator[nn.Module]:
        return reversed([*self._modules.values()])  # type: ignore[arg-type]


class Counted(nn.Sequential):
    """Has a buffer of its own."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.register_buffer("count", torch.zeros(1))


def _hooked() -> nn.Sequential:
    layer = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    layer.register_forward_hook(lambda module, inputs, output: output + 1)
    return layer


def _patched() -> nn.Sequential:
    layer = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    plain = layer.forward
    layer.forward = lambda x: plain(x) + 1  # type: ignore[method-assign]
    return layer


def _compiled() -> nn.Sequential:
    layer = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    layer.compile(backend="eager")
    return layer


@pytest.mark.parametrize(
    "layer",
    [
        Doubled(nn.Linear(3, 3), nn.Tanh()),
        Scaled(nn.Linear(3, 3), nn.Tanh()),
        Counted(nn.Linear(3, 3), nn.Tanh()),
        Reversed(nn.Linear(3, 3), nn.Tanh()),
        _hooked(),
        _patched(),
        _compiled(),
    ],
    ids=["forward", "parameter", "buffer", "order", "hook", "patched", "compiled"],
)
def test_what_does_more_than_run_its_layers_stays_closed(layer: nn.Sequential) -> None:
    """Opened, it would not compute the same, or its parameter would not be trained."""
    model = nn.Sequential(nn.Identity(), nn.Sequential(layer))
    flat = gb.flatten(model)
    assert [*flat] == [model[0], layer]


def test_a_subclass_that_only_makes_layers_is_opened() -> None:
    """As blocks are often written."""

    class Block(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(3, 3), nn.ReLU())

    assert [type(layer).__name__ for layer in gb.flatten(nn.Sequential(Block(), Block()))] == [
        "Linear",
        "ReLU",
    ] * 2


def test_skips_between_nested_layers_go_through_partitions() -> None:
    """Closed they are pairs inside of one layer; opened the pipeline may cut between them."""

    @skippable(stash=["x"])
    class Keep(nn.Module):
        def forward(self, x: Tensor):  # type: ignore[no-untyped-def]
            yield stash("x", x)
            return x * 2

    @skippable(pop=["x"])
    class Add(nn.Module):
        def forward(self, x: Tensor):  # type: ignore[no-untyped-def]
            return x + (yield pop("x"))

    model = nn.Sequential(nn.Sequential(Keep(), nn.Tanh()), nn.Sequential(nn.Linear(3, 3), Add()))
    plain = copy.deepcopy(model)
    pipe = gb.GPipe(gb.flatten(model), [1, 2, 1], chunks=2)
    x = torch.randn(4, 3)
    pipe(x).sum().backward()
    plain(x).sum().backward()
    torch.testing.assert_close(pipe(x), plain(x))
    torch.testing.assert_close(model[1][0].weight.grad, plain[1][0].weight.grad)


def test_mode_and_what_stays_behind() -> None:
    """The flat chain is in the model's mode; hooks of the model itself are warned of."""
    model = nn.Sequential(nn.Sequential(nn.Tanh())).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not gb.flatten(model).training
    model.register_forward_hook(lambda module, inputs, output: output)
    with pytest.warns(UserWarning, match="forward hooks of its own"):
        gb.flatten(model)


def test_other_modules_are_refused() -> None:
    """The error says what is expected, as for a pipeline."""
    with pytest.raises(ModelError, match=r"nn\.Sequential"):
        gb.flatten(nn.Linear(3, 3))
    with pytest.raises(ModelError, match="forward of its own"):
        gb.flatten(_patched())
    with pytest.raises(ModelError, match="forward of its own"):
        gb.GPipe(_patched(), [2])
    with pytest.raises(ModelError, match="pipeline already"):
        gb.flatten(gb.GPipe(nn.Sequential(nn.Tanh()), [1]))


@pytest.mark.parametrize("use", [gb.flatten, lambda model: gb.GPipe(model, [1, 1])])
def test_a_chain_with_an_order_of_its_own_is_refused(use: Any) -> None:
    """`nn.Sequential` runs what it iterates over, and a pipeline what it has."""
    model = Reversed(nn.Linear(1, 1), nn.ReLU())
    with pytest.raises(ModelError, match=r"module has a __iter__ of its own: Reversed\.__iter__"):
        use(model)


def test_profiles_tell_of_layers_that_could_be_opened() -> None:
    """A nested chain is one layer: a profile says how to get more."""
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Sequential(nn.Linear(3, 3)))
    hint = "layer '0': nn.Sequential, one layer: gpipebal.flatten(model) lets cuts stand inside"
    for module, expected in ((model, [hint]), (gb.flatten(model), [])):
        profile = gb.profile_model(module, torch.randn(2, 3), timeout=0.0, as_pipeline=False)
        assert [flag for flag in profile.provenance["flags"] if "flatten" in flag] == expected
