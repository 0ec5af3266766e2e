"""Whether a profile fits a model: one line per layer that has changed, gone, come or moved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gpipebal as gb
from gpipebal.errors import ModelError
from gpipebal.profile import LayerProfile, Profile, ProfileMatch, match_profile
from gpipebal.profile.fingerprint import fingerprint, is_same_layer


def model(**layers: nn.Module) -> nn.Sequential:
    """Return a chain of layers with these names."""
    chain = nn.Sequential()
    for name, layer in layers.items():
        chain.add_module(name, layer)
    return chain


def profile_of(chain: nn.Sequential) -> Profile:
    """Return a profile with the fingerprints of these layers."""
    return Profile(
        tuple(
            LayerProfile(name, type(layer).__name__, 1.0, 1.0, 1.0, fingerprint=fingerprint(layer))
            for name, layer in chain.named_children()
        )
    )


def test_a_profile_matches_its_model() -> None:
    """The model that was profiled matches, also after training and as a pipeline."""
    chain = model(a=nn.Linear(4, 4), b=nn.ReLU(), c=nn.BatchNorm1d(4))
    profile = profile_of(chain)
    nn.init.zeros_(chain.a.weight)  # type: ignore[arg-type]
    found = profile.matches(chain)
    assert found and found == match_profile(profile, chain) == ProfileMatch(3)
    assert str(found) == "all 3 layers match"
    assert profile.matches(gb.GPipe(chain, [2, 1]))


def test_every_difference_has_a_line() -> None:
    """Changed, missing, new and moved layers are each named once."""
    profile = profile_of(
        model(a=nn.Linear(4, 4), b=nn.ReLU(), c=nn.Dropout(0.5), d=nn.Tanh(), e=nn.Sigmoid())
    )
    other = model(
        a=nn.Linear(4, 5), c=nn.Dropout(0.4), e=nn.Sigmoid(), d=nn.Tanh(), f=nn.Linear(1, 1)
    )
    found = profile.matches(other)
    assert not found
    assert (found.changed, found.missing, found.added) == (("a", "c"), ("b",), ("f",))
    assert len(found.moved) == 1 and set(found.moved) <= {"d", "e"}
    assert str(found).splitlines() == [
        "layer 'a' has changed: its class, options, parameters, or which of them are trained",
        "layer 'c' has changed: its class, options, parameters, or which of them are trained",
        "layer 'b' is missing: it was profiled, and the model has it no more",
        "layer 'f' is new: the model has it, and it was not profiled",
        f"layer {found.moved[0]!r} has moved: it is at another place of the chain",
    ]


def test_a_profile_without_fingerprints_matches_by_name() -> None:
    """Given costs know names only: they match, and the text says how."""
    profile = Profile.from_costs([1.0, 2.0])
    found = profile.matches(nn.Sequential(nn.Linear(1, 1), nn.ReLU()))
    assert found and found.unknown == ("0", "1")
    assert str(found) == "all 2 layers match, 2 of them by name only"


@settings(deadline=None)
@given(st.permutations(range(6)))
def test_moved_layers_are_as_few_as_possible(order: list[int]) -> None:
    """What is not said to have moved stands in order, and every permutation but one has moved."""
    profile = Profile.from_costs([1.0] * 6)
    found = profile.matches(model(**{str(k): nn.ReLU() for k in order}))
    stayed = [k for k in order if str(k) not in found.moved]
    assert stayed == sorted(stayed)
    assert bool(found) == (order == sorted(order))
    longest = max(
        sum(1 for _ in run)
        for bits in range(64)
        if (run := [k for n, k in enumerate(order) if bits >> n & 1]) == sorted(run)
    )
    assert len(stayed) == longest


class Holds(nn.Module):
    """Has a buffer, attributes, and some that do not count."""

    def __init__(self, width: int = 4, act: Any = F.relu, **options: Any) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(width))
        self.act = act
        self.options = options
        self._calls = 0


class Settings:
    """Settings that layers share."""

    def __init__(self, heads: int) -> None:
        self.heads = heads


class Answers(dict[str, Any]):
    """Settings that have an answer to any name, as those of many projects do."""

    __getattr__ = dict.get


class Shaped:
    """Settings with a shape, which are no array."""

    def __init__(self, shape: Any, gain: float) -> None:
        self.shape, self.dtype, self.gain = shape, torch.float32, gain


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 4),
    "without bias": lambda: nn.Linear(4, 4, bias=False),
    "wider": lambda: nn.Linear(4, 5),
    "double": lambda: nn.Linear(4, 4).double(),
    "frozen": lambda: nn.Linear(4, 4).requires_grad_(False),
    "nested": lambda: nn.Sequential(nn.Linear(4, 4)),
    "dropout": lambda: nn.Dropout(0.1),
    "more dropout": lambda: nn.Dropout(0.2),
    "one head": lambda: nn.TransformerEncoderLayer(8, 1, 8),
    "two heads": lambda: nn.TransformerEncoderLayer(8, 2, 8),
    "gelu": lambda: nn.TransformerEncoderLayer(8, 1, 8, activation="gelu"),
    "norm first": lambda: nn.TransformerEncoderLayer(8, 1, 8, norm_first=True),
    "buffer": Holds,
    "wider buffer": lambda: Holds(5),
    "method": lambda: Holds(act=torch.Tensor.relu),
    "function": lambda: Holds(act=F.gelu),
    "partial": lambda: Holds(act=partial(F.gelu, approximate="tanh")),
    "option": lambda: Holds(heads=1),
    "other option": lambda: Holds(heads=2),
    "list": lambda: Holds(sizes=[1, 2]),
    "set": lambda: Holds(sizes={1, 2}),
    "settings": lambda: Holds(config=Settings(1)),
    "other settings": lambda: Holds(config=Settings(2)),
    "answers": lambda: Holds(config=Answers(heads=1)),
    "other answers": lambda: Holds(config=Answers(heads=2)),
    "shaped": lambda: Holds(config=Shaped((3,), 1.0)),
    "shaped otherwise": lambda: Holds(config=Shaped((3,), 2.0)),
    "one number as shape": lambda: Holds(config=Shaped(3, 1.0)),
    "table": lambda: Holds(table_of=torch.ones(3)),
    "array": lambda: Holds(table_of=np.ones(3)),
}


def test_fingerprints_tell_layers_apart() -> None:
    """Class, options, attributes, shapes, types and what is frozen count."""
    known = {name: fingerprint(make()) for name, make in LAYERS.items()}
    assert len(set(known.values())) == len(LAYERS)
    assert known == {name: fingerprint(make()) for name, make in LAYERS.items()}


def test_training_changes_no_fingerprint() -> None:
    """Values, gradients, modes, hooks and private attributes do not count."""
    layer = nn.Sequential(Holds(), nn.Linear(4, 4))
    before = fingerprint(layer)
    layer[0]._calls += 1
    layer[0].table.add_(1)
    layer[1](torch.ones(2, 4)).sum().backward()
    layer.eval().register_forward_hook(lambda *_: None)
    assert fingerprint(layer) == before


def test_fingerprints_of_another_version_are_unknown() -> None:
    """They are made in another way: the layer matches by name, and the text says so."""
    chain = model(a=nn.Linear(4, 4), b=nn.ReLU())
    first, second = profile_of(chain).layers
    other = Profile((replace(first, fingerprint="1:0123456789abcdef"), second))
    found = other.matches(chain)
    assert found and found.unknown == ("a",)
    assert is_same_layer(second.fingerprint, nn.ReLU()) is True
    assert is_same_layer(second.fingerprint, nn.Tanh()) is False
    assert is_same_layer("", nn.ReLU()) is None


def test_what_is_no_module_is_refused() -> None:
    """Something without layers is refused with a fix."""
    with pytest.raises(ModelError, match=r"module is not a module: type\(module\)=list.*\nFix: "):
        Profile.from_costs([1.0]).matches([nn.ReLU()])


class Calls(nn.Module):
    """Says which function it calls, with the place of that function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def extra_repr(self) -> str:
        return f"function={self._function}"


def test_places_in_memory_do_not_count() -> None:
    """They are others in each process; what is there does count."""

    def make() -> Callable[[Tensor], Tensor]:
        def square(x: Tensor) -> Tensor:
            return x * x

        return square

    one, same, other = Calls(make()), Calls(make()), Calls(torch.relu)
    assert one.extra_repr() != same.extra_repr()
    assert fingerprint(one) == fingerprint(same) != fingerprint(other)
