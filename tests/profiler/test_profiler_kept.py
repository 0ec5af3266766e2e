"""What layers keep beside parameters, in the profiler's bytes: attributes, buffers, contexts."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from profiler.test_profiler_memory import F, I, profile
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import gpipebal as gb
from gpipebal.pipeline.layers.buffers import SMALL
from gpipebal.profiler.memory.own_hooks import own_hooks_seen

pytestmark = pytest.mark.timeout(60)


class _Leaves(nn.Module):
    """Leaves a large tensor behind: as an attribute, in a list, or in a buffer's place."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.where = where
        self.last: Any = None
        if where != "attribute" and where != "list":
            self.register_buffer("kept", torch.zeros(4, 80) if where == "buffer" else None)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lin(x)
        large = (y.detach() * 2).repeat(1, 10)
        if self.where == "attribute":
            self.last = large
        elif self.where == "list":
            self.last = [large]
        else:
            self.kept = large
        return y


@pytest.mark.parametrize("method", ["measure", "estimate"])
@pytest.mark.parametrize("where", ["attribute", "list", "buffer", "no buffer yet"])
def test_what_a_forward_leaves_behind_is_there_once(where: str, method: str) -> None:
    """It is not saved by every micro-batch; one stays, as a buffer does that it may replace."""
    model = nn.Sequential(nn.Linear(8, 8), _Leaves(where))
    options: dict[str, Any] = (
        {"timeout": 0, "as_pipeline": False} if method == "measure" else {"rates": "A100"}
    )
    found = gb.profile_model(
        model, torch.ones(16, 8), chunks=4, rows=(), method=method, progress=False, **options
    )
    layer = found.layers[1]
    assert layer.buffer_bytes == 4 * 80 * F
    assert found.bytes_of(layer.saved) == 4 * 8 * F  # the input alone


class _OnlyOnce(nn.Module):
    """Keeps a table that it makes in its first forward, as an attribute or a buffer."""

    def __init__(self, *, registered: bool) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        if registered:
            self.register_buffer("table", None)
        else:
            self.table = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.zeros(100, 8)
        y: Tensor = self.lin(x) + self.table[: len(x)]
        return y


@pytest.mark.parametrize("method", ["measure", "estimate"])
@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("has_run", [True, False])
def test_tables_that_are_made_once_count(method: str, registered: bool, has_run: bool) -> None:
    """A table is memory of its layer, whether the caller's model has it already or not."""
    model = nn.Sequential(nn.Linear(8, 8), _OnlyOnce(registered=registered))
    if has_run:
        model(torch.ones(16, 8))
    options: dict[str, Any] = (
        {"timeout": 0, "as_pipeline": False} if method == "measure" else {"rates": "A100"}
    )
    found = gb.profile_model(
        model, torch.ones(16, 8), chunks=4, rows=(), method=method, progress=False, **options
    )
    assert found.layers[1].buffer_bytes == 100 * 8 * F


def test_a_table_of_several_layers_counts_once() -> None:
    """It belongs to the first layer that keeps it, as a buffer does."""
    layers = [nn.Linear(8, 8) for _ in range(3)]
    table = torch.zeros(100)
    for layer in layers:
        layer.table = table
    found = profile(nn.Sequential(*layers), torch.ones(4, 8))
    assert [layer.buffer_bytes for layer in found.layers] == [100 * F, 0, 0]


def test_layers_with_sparse_buffers_are_measured() -> None:
    """What has no storage of its own counts by its parts."""
    layer = nn.Linear(8, 8)
    layer.register_buffer("mask", torch.eye(8).to_sparse())
    found = profile(nn.Sequential(layer), torch.ones(4, 8))
    assert found.layers[0].buffer_bytes == 8 * F + 2 * 8 * I


class _Writes(nn.Module):
    """Writes to a large buffer, or puts another in its place."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.lin, self.how = nn.Linear(8, 8), how
        self.register_buffer("large", torch.zeros(SMALL // F + 1))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "in place":
            self.large.mul_(0.5).add_(1)
        elif self.how == "replaced":
            self.large = self.large * 0.5 + 1
        y: Tensor = self.lin(x)
        return y


@pytest.mark.parametrize("method", ["measure", "estimate"])
@pytest.mark.parametrize("how", ["in place", "replaced", "read"])
def test_large_buffers_are_kept_for_recomputes_if_they_change(how: str, method: str) -> None:
    """Estimates see it too, by the count of writes."""
    options: dict[str, Any] = (
        {"timeout": 0, "as_pipeline": False} if method == "measure" else {"rates": "A100"}
    )
    found = gb.profile_model(
        nn.Sequential(_Writes(how)), torch.ones(4, 8), rows=(), method=method, **options
    )
    assert found.layers[0].kept_buffer_bytes == (0 if how == "read" else SMALL + F)
    assert found.layers[0].buffer_bytes == SMALL + F


class _OnContext(torch.autograd.Function):
    """Keeps its input as an attribute, which autograd never hears of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        s = ctx.x.sigmoid()
        return gradient * (s + ctx.x * s * (1 - s))


class _Swish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _OnContext.apply(x)
        return y


@pytest.mark.parametrize("method", ["measure", "estimate"])
def test_inputs_on_the_context_of_a_function_are_saved(method: str) -> None:
    """Though no hook sees them; the layer's input is one storage with what came before."""
    options: dict[str, Any] = (
        {"timeout": 0, "as_pipeline": False} if method == "measure" else {"rates": "A100"}
    )
    found = gb.profile_model(
        nn.Sequential(nn.Linear(8, 8), _Swish(), nn.Linear(8, 2)),
        torch.ones(4, 8),
        rows=(),
        method=method,
        progress=False,
        **options,
    )
    first, second, _ = found.layers
    assert second.saved == first.outputs
    assert found.bytes_of(second.saved) == 4 * 8 * F


_WAYS = ("keyword", "closure", "partial", "hooks")


class _Hooked(nn.Module):
    """Computes inside of hooks of its own, which see what would be saved."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.how = how

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.lin(x))

    def forward(self, x: Tensor) -> Any:
        if self.how == "save_on_cpu":
            with torch.autograd.graph.save_on_cpu():
                return self.inner(x)
        if self.how == "hooks":
            with torch.autograd.graph.saved_tensors_hooks(lambda t: [t], lambda kept: kept[0]):
                return self.inner(x)
        given: dict[str, Any] = {"x": x} if self.how == "keyword" else {}
        ways = {"closure": lambda: self.inner(x), "partial": functools.partial(self.inner, x)}
        return checkpoint(ways.get(self.how, self.inner), use_reentrant=False, **given)


#: An estimate has no values that could be taken to the CPU.
_BOTH = [(how, way) for how in _WAYS for way in ("measure", "estimate")]


@pytest.mark.parametrize(("how", "method"), [*_BOTH, ("save_on_cpu", "measure")])
def test_what_a_layers_own_hooks_keep_is_saved(how: str, method: str) -> None:
    """A checkpoint keeps its input, however it is given; other hooks may leave tensors as they are.

    The output of a hyperbolic tangent is saved too.
    """
    model = nn.Sequential(nn.Linear(8, 8), _Hooked(how))
    options: dict[str, Any] = (
        {"timeout": 0, "as_pipeline": False} if method == "measure" else {"rates": "CPU core"}
    )
    found = gb.profile_model(
        model, torch.ones(16, 8), rows=(), method=method, progress=False, **options
    )
    rows = found.rows
    kept = found.bytes_of(found.layers[1].saved)
    output = 0 if how in ("keyword", "closure", "partial") else rows * 8 * F
    assert kept == rows * 8 * F + output
    assert saved_tensors_hooks.__enter__.__module__ == "torch.autograd.graph"


def test_what_others_do_where_hooks_are_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is done meanwhile too, and not taken away."""
    entered, plain = list[Any](), saved_tensors_hooks.__enter__

    def enter(self: saved_tensors_hooks) -> None:
        entered.append(self)
        plain(self)

    monkeypatch.setattr(saved_tensors_hooks, "__enter__", enter)
    with own_hooks_seen(), saved_tensors_hooks(lambda t: t, lambda t: t) as _:
        assert len(entered) == 1
    assert saved_tensors_hooks.__enter__ is enter


def test_hooks_that_have_packed_nothing_keep_nothing() -> None:
    """Nor does what was packed for a result that was not used."""
    x = torch.ones(4, requires_grad=True)
    with own_hooks_seen() as own:
        with saved_tensors_hooks(lambda t: t.clone(), lambda kept: kept + x):
            x.detach().sin()
        assert own.kept() == []
        with saved_tensors_hooks(lambda t: [t], lambda kept: kept[0]):
            y = x.sin()
        assert [tensor is x for tensor in own.kept()] == [True]
        y.sum().backward()
        del y
        assert own.kept() == []
