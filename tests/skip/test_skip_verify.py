"""The layout of skips: which chains pair up, which do not and why, and where the pairs are."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from skip_layers import Identity
from torch import nn

from gpipebal.errors import GpipebalError
from gpipebal.skip import Namespace, skippable, verify_skippables
from gpipebal.skip.layout import find_skips
from gpipebal.skip.tracker import Skips, using

NS = Namespace()


def ends(stash: str = "", pop: str = "", ns: Namespace | None = None) -> nn.Module:
    """Make a layer that stashes and pops these names of one letter."""
    return skippable(stash=list(stash), pop=list(pop))(Identity)().isolate(ns)


def chain(**layers: nn.Module) -> nn.Sequential:
    """Make a chain of named layers."""
    return nn.Sequential(OrderedDict(layers))


GOOD = {
    "no skips": (chain(a=nn.ReLU()), {}),
    "empty": (chain(), {}),
    "a pair": (chain(a=ends("x"), b=nn.ReLU(), c=ends(pop="x")), {(None, "x"): (0, 2)}),
    "crossing pairs": (
        chain(a=ends("xy"), b=ends("z", "x"), c=ends(pop="yz")),
        {(None, "x"): (0, 1), (None, "y"): (0, 2), (None, "z"): (1, 2)},
    ),
    "handed on under other names": (
        chain(a=ends("x"), b=ends("y", "x"), c=ends(pop="y")),
        {(None, "x"): (0, 1), (None, "y"): (1, 2)},
    ),
    "one name, two namespaces": (
        chain(a=ends("x"), b=ends("x", ns=NS), c=ends(pop="x"), d=ends(pop="x", ns=NS)),
        {(None, "x"): (0, 2), (NS, "x"): (1, 3)},
    ),
    "nested": (
        chain(
            a=nn.Sequential(nn.ReLU(), nn.Sequential(ends("x"))),
            b=nn.ReLU(),
            c=nn.ModuleList([ends(pop="x")]),
        ),
        {(None, "x"): (0, 2)},
    ),
    "both ends in one layer": (
        chain(a=nn.ReLU(), b=nn.Sequential(ends("x"), ends(pop="x"))),
        {(None, "x"): (1, 1)},
    ),
}


@pytest.mark.parametrize("case", GOOD)
def test_pairs_are_found(case: str) -> None:
    """A chain whose skips pair up is accepted, and each skip has the layers of its two ends."""
    model, skips = GOOD[case]
    verify_skippables(model)
    assert find_skips(model._modules) == skips


def test_skips_are_found_in_the_order_of_the_chain() -> None:
    """The order is by the layer that stashes, then namespace and name, in every run."""
    late, early = ends("zxy", ns=NS), ends("yx")
    pops = [ends(pop="zxy", ns=NS), ends(pop="yx")]
    layers = {str(k): layer for k, layer in enumerate([late, early, *pops])}
    names = [name for _, name in find_skips(layers)]
    assert names == ["x", "y", "z", "x", "y"]


BAD = {
    "both": (chain(a=ends("x", "x")), ["layer 'a' both stashes and pops 'x'"]),
    "stashed again": (
        chain(a=ends("x"), b=ends("x"), c=ends(pop="x")),
        ["layer 'b' stashes 'x' again, after layer 'a'"],
    ),
    "popped again": (
        chain(a=ends("x"), b=ends(pop="x"), c=ends(pop="x")),
        ["layer 'c' pops 'x' again, after layer 'b'"],
    ),
    "never stashed": (chain(a=ends(pop="x")), ["layer 'a' pops 'x', which no layer stashes"]),
    "stashed later": (
        chain(a=ends(pop="x"), b=ends("x")),
        ["layer 'a' pops 'x', which layer 'b' stashes only later"],
    ),
    "popped too early and rightly": (
        chain(a=ends(pop="x"), b=ends("x"), c=ends(pop="x")),
        ["layer 'a' pops 'x', which layer 'b' stashes only later"],
    ),
    "never popped": (chain(a=ends("x")), ["layer 'a' stashes 'x', which no layer pops"]),
    "a pair used again": (
        chain(a=ends("x"), b=ends(pop="x"), c=ends("x"), d=ends(pop="x")),
        [
            "layer 'c' stashes 'x' again, after layer 'a'",
            "layer 'd' pops 'x' again, after layer 'b'",
        ],
    ),
    "other namespaces": (
        chain(a=ends("x"), b=ends(pop="x", ns=NS)),
        [
            "layer 'a' stashes 'x', which no layer pops",
            f"layer 'b' pops 'x' of {NS!r}, which no layer stashes",
        ],
    ),
    "nested": (
        chain(a=nn.Sequential(ends(pop="x"), nn.Sequential(ends("x"), ends("x")))),
        [
            "layer 'a' (its '0') pops 'x', which layer 'a' (its '1.0') stashes only later",
            "layer 'a' (its '1.1') stashes 'x' again, after layer 'a' (its '1.0')",
        ],
    ),
    "all at once": (
        chain(s=ends("xy", "w"), z=ends("x", "v"), c=ends("u", "uy"), a=ends("v", "y")),
        [
            "layer 's' stashes 'x', which no layer pops",
            "layer 's' pops 'w', which no layer stashes",
            "layer 'z' stashes 'x' again, after layer 's'",
            "layer 'z' pops 'v', which layer 'a' stashes only later",
            "layer 'c' both stashes and pops 'u'",
            "layer 'a' pops 'y' again, after layer 'c'",
        ],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_all_problems_are_listed(case: str) -> None:
    """Each problem has a bullet that names the layer and the skip, in the order of the chain."""
    model, problems = BAD[case]
    with pytest.raises(TypeError, match=f"do not pair up: problems={len(problems)} ") as caught:
        verify_skippables(model)
    assert isinstance(caught.value, GpipebalError)
    first, *bullets, fix = str(caught.value).splitlines()
    assert bullets == [f"* {problem}" for problem in problems]
    assert fix.startswith("Fix: ") and first.endswith(").")


def test_the_suggested_fix_works() -> None:
    """A namespace for both layers of a pair lets a name be used again."""
    layers = [ends("x"), ends(pop="x"), ends("x"), ends(pop="x")]
    with pytest.raises(TypeError, match=r"layer.isolate\(namespace\) on both layers of a pair"):
        verify_skippables(nn.Sequential(*layers))
    namespace = Namespace()
    for end in layers[2:]:
        end.isolate(namespace)
    verify_skippables(nn.Sequential(*layers))


def test_a_layer_that_stands_twice_counts_twice() -> None:
    """The same object in two places would stash twice in a forward."""
    keep = ends("x")
    with pytest.raises(TypeError, match="layer '1' stashes 'x' again, after layer '0'"):
        verify_skippables(nn.Sequential(keep, keep, ends(pop="x")))


def test_find_skips_says_what_verify_says() -> None:
    """The same error, with the names of the layers."""
    model = chain(first=ends("x"))
    with pytest.raises(TypeError, match="layer 'first' stashes 'x'") as found:
        find_skips({"first": model[0]})
    with pytest.raises(TypeError) as verified:
        verify_skippables(model)
    assert str(found.value) == str(verified.value)


def test_a_layer_that_was_taken_out_counts_for_nothing() -> None:
    """A child of a Sequential may be None."""
    model = chain(a=ends("x"), b=ends("x"), c=ends(pop="x"))
    model.register_module("b", None)
    verify_skippables(model)


def test_only_a_sequential_can_be_verified() -> None:
    """Without a chain there is no order to judge by."""
    with pytest.raises(TypeError, match=r"must be nn\.Sequential: type"):
        verify_skippables(ends("x"))  # type: ignore[arg-type]


# --- Any layout

Layout = list[list[tuple[str, str, bool]]]
"""Modules of each layer of a chain: what it stashes, what it pops, and whether in NS."""


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Draw a chain that pairs up, and put modules in that mostly spoil it."""
    n_layers = draw(st.integers(1, 5))
    layout: Layout = [[] for _ in range(n_layers)]
    for isolated in (False, True):
        for name in draw(st.sets(st.sampled_from("ab"))):
            first = draw(st.integers(0, n_layers - 1))
            second = draw(st.integers(first, n_layers - 1))
            layout[first].append((name, "", isolated))
            layout[second].append(("", name, isolated))
    odd = st.tuples(st.sampled_from(["", "a", "ab"]), st.sampled_from(["", "b"]), st.booleans())
    for module in draw(st.lists(odd, max_size=2)):
        layer = layout[draw(st.integers(0, n_layers - 1))]
        layer.insert(draw(st.integers(0, len(layer))), module)
    return layout


def build(layout: Layout, nest: Sequence[bool]) -> nn.Sequential:
    """Build the chain; a layer of one module is that module, or a container of it."""
    layers: list[nn.Module] = []
    for modules, nested in zip(layout, nest, strict=True):
        made = [ends(*names, ns=NS if isolated else None) for *names, isolated in modules]
        if len(made) == 1 and not nested:
            layers += made
        else:
            layers.append(nn.Sequential(nn.Sequential(*made[:1]), *made[1:]))
    return nn.Sequential(*layers)


def expected(layout: Layout) -> dict[tuple[Namespace | None, str], tuple[int, int]] | None:
    """Say independently where the pairs are; None: they do not pair up."""
    order = [(index, module) for index, modules in enumerate(layout) for module in modules]
    if any(set(stash) & set(pop) for _, (stash, pop, _) in order):
        return None
    pairs = {}
    for isolated in (False, True):
        for name in "ab":
            stashed = [k for k, (_, m) in enumerate(order) if m[2] == isolated and name in m[0]]
            popped = [k for k, (_, m) in enumerate(order) if m[2] == isolated and name in m[1]]
            if not stashed and not popped:
                continue
            if len(stashed) != 1 or len(popped) != 1 or stashed > popped:
                return None
            pairs[NS if isolated else None, name] = (order[stashed[0]][0], order[popped[0]][0])
    return pairs


@given(layouts(), st.lists(st.booleans(), min_size=5, max_size=5))
def test_any_layout(layout: Layout, nest: list[bool]) -> None:
    """A chain is accepted if and only if each skip has one stash and one later pop."""
    model = build(layout, nest[: len(layout)])
    pairs = expected(layout)
    if pairs is None:
        with pytest.raises(TypeError, match="do not pair up"):
            verify_skippables(model)
        return
    verify_skippables(model)
    assert find_skips(model._modules) == pairs


@given(layouts())
def test_what_is_accepted_runs(layout: Layout) -> None:
    """A chain that pairs up runs without an error, and leaves no skip behind."""
    if expected(layout) is None:
        return
    model = build(layout, [False] * len(layout))
    skips = Skips()
    with using(skips):
        output = model(torch.ones(1, dtype=torch.int64))
    assert skips.take_all() == {}
    # A popped value is added to the input: how often the first one is in the last one.
    count, kept = 1, {}
    for stash, pop, isolated in (module for modules in layout for module in modules):
        count += sum(kept.pop((isolated, name)) for name in pop)
        kept |= {(isolated, name): count for name in stash}
    assert output.item() == count
