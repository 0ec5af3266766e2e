"""What layers keep outside of themselves is after a profile what it was before."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpipebal as gb
from gpipebal.errors import ProfileError
from gpipebal.profiler.replicas.caches import caches_kept
from gpipebal.profiler.replicas.harmless import left_alone

pytestmark = pytest.mark.timeout(60)

CPU = gb.DeviceRates(name="cpu", device_type="cpu", flops={"float32": 1e11}, bandwidth=1e10)
WAYS: dict[str, dict[str, Any]] = {
    "estimate": {"method": "estimate", "rates": CPU},
    "measure": {"timeout": 0, "as_pipeline": False},
}
TABLES: dict[int, Any] = {}
CALLS: dict[str, int] = {"table": 0}
LAST: Tensor | None = None


@functools.lru_cache
def _remembered(n: int) -> Tensor:
    return torch.arange(float(n))


class _Remembers(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * _remembered(x.shape[1])


class _InClosure(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        kept: dict[int, Tensor] = {}
        last = None

        def table(n: int) -> Tensor:
            nonlocal last
            if n not in kept:
                kept[n] = torch.arange(float(n))
            last = kept[n]
            return last

        self.table = table

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table(x.shape[1])


class _Globally(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        global LAST
        n = x.shape[1]
        CALLS["table"] += 1
        if n not in TABLES:
            TABLES[n] = [torch.arange(float(n)), "of one length"]
        if LAST is None:
            LAST = torch.ones(n)
        return x * TABLES[n][0] * LAST


class _InClass(nn.Module):
    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if _InClass.table is None:
            _InClass.table = torch.arange(float(x.shape[1]))
        return x * _InClass.table


class _InArgument(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.table(x.shape[1])

    def table(self, n: int, kept: list[Tensor] = []) -> Tensor:  # noqa: B006
        if not kept:
            kept.append(torch.arange(float(n)))
        return kept[0]


class _InObject(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        HOLDERS.setdefault("one", SimpleNamespace(t=torch.arange(float(x.shape[1]))))
        return x * HOLDERS["one"].t


class _InRow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not ROW:
            ROW.append(torch.arange(float(x.shape[1])))
        return x * ROW[0]


def _table(n: int) -> Tensor:
    if not hasattr(_table, "kept"):
        _table.kept = torch.arange(float(n))  # type: ignore[attr-defined]
    found: Tensor = _table.kept  # type: ignore[attr-defined]
    return found


class _InFunction(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * _table(x.shape[1])


class _Undefined(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        global NEW
        try:
            NEW  # type: ignore[has-type]  # noqa: B018
        except NameError:
            NEW = torch.arange(float(x.shape[1]))
        return x * NEW


class _Memo:
    """A memory of its own, with the names of the standard library's."""

    def __init__(self) -> None:
        self.known: dict[int, Tensor] = {}

    def cache_info(self) -> dict[str, int]:
        return {"size": len(self.known)}

    def cache_clear(self) -> None:
        self.known.clear()

    def __call__(self, n: int) -> Tensor:
        if n not in self.known:
            self.known[n] = torch.arange(float(n))
        return self.known[n]


MEMO, HOLDERS, ROW = _Memo(), dict[str, Any](), deque[Tensor]()


class _InMemo(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * MEMO(x.shape[1])


def _left_behind() -> list[Any]:
    """Return what any of these layers keeps."""
    names = [name for name in ("NEW",) if name in globals()]
    function = [_table.kept] if hasattr(_table, "kept") else []  # type: ignore[attr-defined]
    return [*names, *function, *MEMO.known, *HOLDERS, *ROW]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "make", [_InObject, _InRow, _InFunction, _Undefined, _InMemo], ids=lambda make: make.__name__
)
def test_places_of_other_kinds_are_as_before(make: Callable[[], nn.Module], way: str) -> None:
    """Objects, rows, functions, names that are not there yet, memories of another's making."""
    model = nn.Sequential(nn.Linear(8, 8), make())
    gb.profile_model(model, torch.ones(4, 8), rows=(), progress=False, **WAYS[way])
    assert _left_behind() == []
    assert model(torch.ones(4, 8)).device.type == "cpu"
    assert _left_behind() != []
    for place in (MEMO.known, HOLDERS, ROW):
        place.clear()  # type: ignore[attr-defined]
    globals().pop("NEW", None)
    vars(_table).clear()


class _Sealed:
    """Refuses to be looked at and to be changed."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("not now")


class _NoDelete(type):
    def __delattr__(cls, name: str) -> None:
        raise TypeError("sealed")


class _Kept(metaclass=_NoDelete):
    pass


def test_places_that_refuse_keep_nobody_from_theirs() -> None:
    """Objects that raise lead nowhere, and a place that stays changed is the only one."""
    sealed, kept = _Sealed(), dict[str, Any]()

    def use() -> Any:
        return sealed, _Kept, kept

    with caches_kept([use]):
        _Kept.new = torch.ones(1)  # type: ignore[attr-defined]
        kept["new"] = torch.ones(1)
    assert not kept
    type.__delattr__(_Kept, "new")


CACHES: list[Callable[[], nn.Module]] = [_Remembers, _InClosure, _Globally, _InClass, _InArgument]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", CACHES, ids=lambda make: make.__name__)
def test_caches_are_as_before(make: Callable[[], nn.Module], way: str) -> None:
    """The plain model runs after a profile, which has left no tensor behind in any cache."""
    model = nn.Sequential(nn.Linear(8, 8), make())
    before = _remembered.cache_info().currsize
    gb.profile_model(model, torch.ones(4, 8), rows=(), progress=False, **WAYS[way])
    assert (before, TABLES, LAST, _InClass.table) == (0, {}, None, None)
    assert _remembered.cache_info().currsize == 0
    assert model(torch.ones(4, 8)).device.type == "cpu"
    # A second one works with what the model now keeps, and leaves it.
    kept = dict(TABLES)
    if way == "measure":
        gb.profile_model(model, torch.ones(4, 8), rows=(), progress=False, **WAYS[way])
        assert all(TABLES[n] is kept[n] for n in kept)
    TABLES.clear()
    _remembered.cache_clear()
    _InClass.table = None
    _forget_last()


def _forget_last() -> None:
    global LAST
    LAST = None


def test_what_is_no_tensor_goes_on() -> None:
    """Only tensors are put back: a counter beside them counts every call."""
    before = CALLS["table"]
    model = nn.Sequential(_Globally())
    gb.profile_model(model, torch.ones(4, 8), rows=(), progress=False, **WAYS["estimate"])
    assert CALLS["table"] > before


def test_tables_of_before_are_back_and_new_ones_are_gone() -> None:
    """Tensors that were replaced or taken out come back; what was known before is remembered."""
    old, other = torch.ones(1), torch.zeros(1)
    kept: dict[str, Any] = {"a": old, "b": (old, 1), "n": 1}
    row = [old]

    def use() -> None:
        kept, row  # noqa: B018

    with caches_kept([use]):
        kept.update(a=other, c=[other], n=2)
        del kept["b"]
        row[:] = [other, other]
    assert kept["a"] is old and kept["b"][0] is old and "c" not in kept and kept["n"] == 2
    assert len(row) == 1 and row[0] is old


def test_second_profile_of_a_model_waits_for_the_first() -> None:
    """Two at once in two threads find the caller's gradients, and leave them and random numbers."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    x = torch.ones(4, 8)
    model(x).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    state = torch.get_rng_state()
    inside, go_on, second = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        with left_alone([model]):
            inside.set()
            assert go_on.wait(30)

    def other() -> None:
        gb.profile_model(model, x, rows=(), progress=False, timeout=0, as_pipeline=False)
        second.set()

    threads = [threading.Thread(target=first), threading.Thread(target=other)]
    threads[0].start()
    assert inside.wait(30)
    threads[1].start()
    assert not second.wait(0.05)
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert second.is_set()
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.timeout(120)
def test_a_forked_process_waits_for_nobody() -> None:
    """A profile that another thread was taking when the process forked is none of the child's."""
    code = """
import os, threading
from gpipebal.profiler.replicas.harmless import left_alone
inside, done = threading.Event(), threading.Event()
def hold():
    with left_alone([]):
        inside.set()
        done.wait(30)
thread = threading.Thread(target=hold)
thread.start()
inside.wait(30)
child = os.fork()
if not child:
    with left_alone([]):
        os._exit(7)
_, status = os.waitpid(child, 0)
done.set()
print(os.waitstatus_to_exitcode(status))
"""
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True
    )
    assert found.stdout == "7\n"


def test_scripted_layers_are_measured() -> None:
    """What torch.jit made has no forward of its class's, and is measured like any layer."""
    model = nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.Linear(8, 8)), nn.ReLU())
    profile = gb.profile_model(model, torch.ones(4, 8), rows=(), progress=False, timeout=0)
    assert profile.layers[1].parameter_bytes == 4 * (64 + 8)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


model = nn.Sequential(_Block())  # under a global name that is an attribute's too, as in notebooks


def test_attributes_are_no_global_names() -> None:
    """A layer that uses ``self.model`` does not use the global ``model``."""
    profile = gb.profile_model(model, torch.ones(4, 8), rows=(), progress=False, timeout=0)
    assert not any("does not register" in flag for flag in profile.provenance["flags"])


class _MakesParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.inner is None:
            self.inner = nn.Linear(8, 8)
        y: Tensor = self.inner(x)
        return y


@pytest.mark.parametrize("way", WAYS)
def test_layer_that_makes_its_parameters_is_named(way: str) -> None:
    """Its weights would be missing in the profile."""
    with pytest.raises(ProfileError, match=r"layer '1' makes parameters in its first forward: 2"):
        gb.profile_model(
            nn.Sequential(nn.ReLU(), _MakesParameters()), torch.ones(4, 8), rows=(), **WAYS[way]
        )


def test_model_made_in_inference_mode_is_named() -> None:
    """It can never be trained; torch's own words name no layer."""
    with torch.inference_mode():
        frozen = nn.Sequential(nn.Linear(8, 8))
        with pytest.raises(ProfileError, match="layer '0' cannot be trained"):
            gb.profile_model(frozen, torch.ones(4, 8), timeout=0)


def test_sample_of_inference_mode_is_tried_as_a_pipeline() -> None:
    """Such a tensor is copied, so that it can go through a pipeline that trains."""
    with torch.inference_mode():
        sample = torch.ones(4, 8)
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    flags = gb.profile_model(layers, sample, timeout=0, progress=False).provenance["flags"]
    assert not any("inference" in flag.lower() for flag in flags)
