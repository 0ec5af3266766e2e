"""Whether a profile fits a model: one line per layer that has changed, gone, come or moved."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gpipebal as gb
from gpipebal.errors import ModelError
from gpipebal.profile import LayerProfile, Profile, ProfileMatch, match_profile
from gpipebal.profile.fingerprint import fingerprint


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
        "layer 'a' has changed: another class, other options or parameters",
        "layer 'c' has changed: another class, other options or parameters",
        "layer 'b' is missing: it was profiled, and the model has it no more",
        "layer 'f' is new: the model has it, and it was not profiled",
        f"layer {found.moved[0]!r} has moved: it stands in another place of the chain",
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


def test_fingerprints_tell_layers_apart() -> None:
    """Class, options, shapes, types and what is frozen count; values of parameters do not."""
    layers = [
        nn.Linear(4, 4),
        nn.Linear(4, 4, bias=False),
        nn.Linear(4, 5),
        nn.Linear(4, 4).double(),
        nn.Linear(4, 4).requires_grad_(False),
        nn.Sequential(nn.Linear(4, 4)),
        nn.Dropout(0.1),
        nn.Dropout(0.2),
    ]
    assert len({fingerprint(layer) for layer in layers}) == len(layers)
    assert fingerprint(nn.Linear(4, 4)) == fingerprint(layers[0])


def test_what_is_no_module_is_refused() -> None:
    """Something without layers is refused with a fix."""
    with pytest.raises(ModelError, match=r"module is no module: type\(module\)=list.*\nFix: "):
        Profile.from_costs([1.0]).matches([nn.ReLU()])
