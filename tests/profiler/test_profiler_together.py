"""Layers that no two threads can run at once are measured in one, and are afterwards as before."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpipebal as gb
from gpipebal.errors import ProfileError

pytestmark = pytest.mark.timeout(60)

#: Something that a layer, or the loss, does to a tensor that it reaches by a function.
Use = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two threads run rounds, however few cores there are."""
    monkeypatch.setattr("gpipebal.profiler.measure.visible_cores", lambda: 2)


class Calls(nn.Module):
    """Calls a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def profiled(model: nn.Module, **more: Any) -> gb.Profile:
    """Profile a model for two partitions."""
    given = {"timeout": 0, "as_pipeline": False, "rows": (), "chunks": 2, **more}
    return gb.profile_model(model, torch.randn(8, 4), partitions=2, threads=1, **given)


def flags_of(profile: gb.Profile) -> list[str]:
    """Return the flags about threads."""
    return [flag for flag in profile.provenance["flags"] if "one thread" in flag]


def _write_sparse(table: Tensor) -> None:
    table.mul_(torch.eye(4).to_sparse())


class _WritesBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor) -> Tensor:
        ctx.table = table
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        _write_sparse(ctx.table)
        return gradients[0], None


def in_backward(x: Tensor, table: Tensor) -> Tensor:
    """Write in the backward of an autograd function."""
    result: Tensor = _WritesBackward.apply(x, table)
    return result


def in_hook(x: Tensor, table: Tensor) -> Tensor:
    """Write in a hook."""
    y = x * 1
    if y.requires_grad:
        y.register_hook(lambda _: _write_sparse(table))
    return y


def without_graph(x: Tensor, table: Tensor) -> Tensor:
    """Write where no graph is recorded."""
    if not torch.is_grad_enabled():
        _write_sparse(table)
    return x * 1


def in_recompute(x: Tensor, table: Tensor) -> Tensor:
    """Write in a recompute."""
    if gb.is_recomputing():
        _write_sparse(table)
    return x * 1


def by_data(x: Tensor, table: Tensor) -> Tensor:
    """Give a dense tensor new memory without an operation."""
    table.data = torch.full((4, 4), 2.0)
    return x + table[0]


USES = [in_backward, in_hook, without_graph, by_data]


@pytest.mark.parametrize(
    ("use", "in_loss"),
    # Rounds recompute no loss.
    [(in_recompute, False), *((use, in_loss) for use in USES for in_loss in (False, True))],
)
def test_no_two_threads_give_a_tensor_new_memory_in_any_pass(use: Use, in_loss: bool) -> None:
    """One would read what the other has freed; and the tensor has its memory back afterwards."""
    table = torch.eye(4) if use is by_data else torch.eye(4).to_sparse()
    threads = set()

    def used(x: Tensor) -> Tensor:
        threads.add(threading.current_thread().name)
        return use(x, table)

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU() if in_loss else Calls(used), nn.Linear(4, 4))
    taken = profiled(model, loss_fn=lambda y: (used(y) if in_loss else y).sum())
    assert taken.provenance["side_by_side"] == 1
    assert "gpipebal-partition-1" not in threads
    assert [flag.partition(":")[0] for flag in flags_of(taken)] == [
        "the loss" if in_loss else "layer '1'"
    ]
    assert torch.equal(table.to_dense(), torch.eye(4))


def test_a_weight_behind_a_function_gets_its_memory_back() -> None:
    """Its layer gives it new memory without any operation that torch shows."""
    inner = nn.Linear(4, 4)
    before, address = inner.weight.detach().clone(), inner.weight.data_ptr()

    def shrinks(x: Tensor) -> Tensor:
        inner.weight.data = inner.weight.data * 0.5
        result: Tensor = inner(x)
        return result

    profiled(nn.Sequential(Calls(shrinks), nn.Linear(4, 4)))
    assert torch.equal(inner.weight, before)
    assert inner.weight.data_ptr() == address


def test_where_one_thread_was_asked_for_no_flag_blames_a_layer() -> None:
    """Nothing is measured otherwise than it would be anyway."""
    table = torch.eye(4).to_sparse()

    def writes(x: Tensor) -> Tensor:
        _write_sparse(table)
        return x * 1

    model = nn.Sequential(nn.Linear(4, 4), Calls(writes))
    taken = gb.profile_model(
        model, torch.randn(8, 4), chunks=2, partitions=1, timeout=0, as_pipeline=False
    )
    assert taken.provenance["side_by_side"] == 1
    assert not flags_of(taken)


def test_a_tensor_that_stays_where_it_is_may_be_shared() -> None:
    """What is only read, or written in place, is measured in as many threads as anything else."""
    table = torch.zeros(4)
    taken = profiled(nn.Sequential(Calls(lambda x: x + table.add_(1)), nn.Linear(4, 4)))
    assert taken.provenance["side_by_side"] == 2
    assert not flags_of(taken)
    assert not table.any()


def test_layers_that_share_what_moves_are_not_tried_as_a_pipeline() -> None:
    """Two workers would run them at once, which the profile survives."""
    table = torch.eye(4).to_sparse()

    def writes(x: Tensor) -> Tensor:
        _write_sparse(table)
        return x * 1

    def reads(x: Tensor) -> Tensor:
        return torch.sparse.mm(table, x.T).T

    def flags(*layers: nn.Module) -> list[str]:
        taken = profiled(nn.Sequential(*layers), as_pipeline=True)
        assert taken.provenance["side_by_side"] == 1
        found = taken.provenance["flags"]
        return [flag for flag in found if flag.startswith("not tried") and "new memory" in flag]

    linear = nn.Linear(4, 4)
    assert flags(Calls(writes), linear, Calls(reads))
    assert not flags(Calls(writes), linear, nn.ReLU())


def test_a_layer_that_fails_beside_its_copy_is_measured_in_one_thread() -> None:
    """As one that advances a generator of Python's does; a pipeline runs it in one worker only."""

    def busy(x: Tensor) -> Tensor:
        if threading.current_thread().name == "gpipebal-partition-1":
            raise ValueError("generator already executing")
        return x * 1

    taken = profiled(nn.Sequential(nn.Linear(4, 4), Calls(busy)), loss_fn=torch.sum)
    assert taken.provenance["side_by_side"] == 1
    (flag,) = flags_of(taken)
    assert "layer '1'" in flag
    assert "ValueError: generator already executing" in flag
    assert taken.layers[1].forward_time > 0


def test_a_layer_that_fails_in_any_thread_is_the_error() -> None:
    """In one thread it fails again."""

    def fails(x: Tensor) -> Tensor:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("not here")
        return x * 1

    with pytest.raises(ProfileError, match=r"layer '1'.*ValueError: not here") as raised:
        profiled(nn.Sequential(nn.Linear(4, 4), Calls(fails)))
    assert isinstance(raised.value.__cause__, ValueError)
