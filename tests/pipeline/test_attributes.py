"""Tensors that layers keep as attributes: found where they are, in no more time than that takes."""

from __future__ import annotations

from collections import OrderedDict, deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipebal import GPipe
from gpipebal.pipeline import measure_memory
from gpipebal.pipeline.layers.attributes import attributes_of, tensors_in

T = torch.ones(3)


class _Refuses:
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("not now")


@pytest.mark.parametrize(
    ("value", "found"),
    [
        pytest.param(T, 1, id="tensor"),
        pytest.param([T, (T, {"a": T})], 3, id="nested"),
        pytest.param(OrderedDict(a=deque([T])), 1, id="deque"),
        pytest.param(SimpleNamespace(inner=SimpleNamespace(t=T)), 1, id="object"),
        pytest.param(nn.Linear(2, 2), 0, id="layer"),
        pytest.param(lambda: T, 0, id="function"),
        pytest.param(_Refuses(), 0, id="object that refuses"),
        pytest.param("text", 0, id="text"),
        pytest.param(list(range(5000)), 0, id="long list"),
    ],
)
def test_tensors_are_found_in_containers_and_objects(value: Any, found: int) -> None:
    """Not in modules and functions, whose they are, nor in what refuses or is too long."""
    assert len(list(tensors_in(value))) == found


def test_values_that_hold_themselves_end() -> None:
    """Each container is looked into once, however many ways lead to it."""
    own: list[Any] = [T]
    own += [own] * 60
    shared: list[Any] = [T]
    for _ in range(4):
        shared = [shared] * 500
    assert len(list(tensors_in(own))) == 1
    assert len(list(tensors_in(shared))) == 1
    many = [SimpleNamespace(others=[SimpleNamespace() for _ in range(500)]) for _ in range(500)]
    assert list(tensors_in(many)) == []


class _Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.tables = {"one": torch.zeros(100)}

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lin(x) + self.tables["one"][0]
        return y


def test_attributes_count_in_metered_runs() -> None:
    """Parameters, buffers and attributes are all there before the first micro-batch."""
    layer = _Keeps()
    assert [tensor.numel() for tensor in attributes_of(layer)] == [100]
    peaks = []
    for keeps in (True, False):
        if not keeps:
            layer.tables = {"one": torch.zeros(())[None]}
        pipe = GPipe(nn.Sequential(nn.Linear(4, 4), layer), [1, 1], chunks=2)
        with measure_memory(pipe) as meter, torch.no_grad():
            pipe(torch.ones(4, 4))
        peaks.append(meter.peak_bytes[1])
        pipe.close()
    assert peaks[0] - peaks[1] == 99 * 4
