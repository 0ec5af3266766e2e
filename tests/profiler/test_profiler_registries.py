"""Registries that make their entries when they are asked are not asked by who only looks."""

from __future__ import annotations

from collections import OrderedDict, UserDict, deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpipebal as gb
from gpipebal.contents import contents_of, pairs_of
from gpipebal.profiler.replicas.caches import caches_kept
from gpipebal.profiler.replicas.harmless import left_alone, weights_reached

pytestmark = pytest.mark.timeout(60)

ASKED: list[str] = []
METHODS = ("__getitem__", "__iter__", "__len__", "get", "keys", "values", "items", "copy", "clear")


def _asks(kind: type) -> Any:
    """Return a class derived from a container's whose methods note that they were called."""

    def noted(name: str) -> Any:
        def method(self: Any, *given: Any) -> Any:
            ASKED.append(f"{kind.__name__}.{name}")
            return getattr(super(made, self), name)(*given)

        return method

    writes = ("__setitem__", "__delitem__", "extend")
    names = [name for name in (*METHODS, *writes) if hasattr(kind, name)]
    made: Any = type(f"Asked{kind.__name__}", (kind,), {name: noted(name) for name in names})
    return made


class _Liar:
    """Says what class it has only when it is loaded."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        ASKED.append("__class__")
        return _Liar


_Dict, _Ordered, _List, _Deque = map(_asks, (dict, OrderedDict, list, deque))
FUNCTIONS = OrderedDict.__new__(_Ordered)
OrderedDict.__setitem__(FUNCTIONS, "tanh", (nn.Tanh, {}))


class _Bag:
    """Has its attributes in a registry."""

    def __init__(self) -> None:
        self.__dict__ = _Dict(a=1)


OTHERS = (_Dict(), _List(["a"]), _Deque(["a"]), _Liar(), _Bag())


class _Uses(nn.Module):
    """Names registries, and has some as attributes of its class."""

    known, late = _Dict(relu=nn.ReLU), _Liar()

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y if y.dim() else (FUNCTIONS, OTHERS, self.known, self.late)  # type: ignore[return-value]


@pytest.mark.parametrize("method", ["measure", "estimate"])
def test_a_profile_asks_no_registry(method: Any) -> None:
    """Neither to look at what layers use, nor to put caches back."""
    model, sample = nn.Sequential(_Uses(), nn.Linear(4, 1)), torch.ones(4, 4)
    way: Any = {"timeout": 0, "as_pipeline": False}
    if method == "estimate":
        way = {"rates": "CPU core"}
    ASKED.clear()
    gb.profile_model(model, sample, rows=(), progress=False, method=method, **way)
    assert not ASKED


@pytest.mark.parametrize("deferred", [False, True])
def test_a_step_asks_no_registry_of_a_layer(deferred: bool) -> None:
    """Not even of those that the layer has as attributes."""
    model = nn.Sequential(_Uses(), nn.Linear(4, 1))
    model[0].registries = [FUNCTIONS, *OTHERS]  # type: ignore[assignment]
    model[0].norm = nn.BatchNorm1d(4)
    ASKED.clear()
    pipe = gb.GPipe(model, [1, 1], chunks=2, checkpoint="always", deferred_batch_norm=deferred)
    pipe(torch.ones(4, 4)).sum().backward()
    pipe.close()
    assert not ASKED


def test_a_cache_with_methods_of_its_own_is_as_before() -> None:
    """Its entries are put back without these methods."""
    old, new = torch.ones(1), torch.zeros(1)
    tables, row = _Ordered(a=old, b=old), _List([old])

    def use() -> None:
        tables, row  # noqa: B018

    ASKED.clear()
    with caches_kept([use]):
        OrderedDict.__setitem__(tables, "a", new)
        OrderedDict.__setitem__(tables, "c", new)
        OrderedDict.__delitem__(tables, "b")
        list.append(row, new)
    assert not ASKED
    # Also in the order that an ordered dictionary has beside its entries.
    assert [*tables] == ["a", "b"] and tables["a"] is old and [*row] == [old]


def test_weights_in_registries_are_found() -> None:
    """They are reached as in a plain container."""
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    held = [_Dict(w=weight), _List([weight]), _Deque([weight]), _Ordered(w=weight)]
    for one in held:
        ASKED.clear()
        with left_alone([lambda one=one: one]):
            assert weight.grad is None
        assert weight.grad is not None and weights_reached(lambda one=one: one) == [weight]
        assert not ASKED


def test_contents_are_those_of_the_plain_class() -> None:
    """What is no container has no contents."""
    pairs = pairs_of(type("View", (), {"a": 1}).__dict__)
    assert pairs is not None and ("a", 1) in pairs
    assert contents_of({"a": 1}) == contents_of((1,)) == contents_of(frozenset([1])) == [1]
    assert contents_of(3) is None and contents_of("abc") is None


def test_attributes_in_a_registry_are_found() -> None:
    """An object may have put one in the place of its own dictionary."""
    bag: Any = _Bag()
    wrapped, weight = UserDict[str, Any](), nn.Parameter(torch.ones(1))
    bag.weight = weight
    wrapped.__dict__ = _Dict(data={"a": bag})
    ASKED.clear()
    assert weights_reached(lambda: wrapped) == [weight]
    assert not ASKED
