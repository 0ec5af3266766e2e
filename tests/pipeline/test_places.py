"""Which tensors have memory in common: by every byte, and without comparing pairs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipebal.pipeline.minibatch.new_gradients import NewGradients
from gpipebal.pipeline.values import places
from gpipebal.pipeline.values.places import find_overlaps, find_shared, find_to_part
from gpipebal.pipeline.values.tensors import parts_of

#: Bytes of the storage in which all views lie.
BYTES = 96
MANY = 1000


@st.composite
def views(draw: st.DrawFn, base: Tensor) -> Tensor:
    """Draw any view of a storage: with gaps, across itself, expanded, of any kind of number."""
    kind = [torch.uint8, torch.int16, torch.float32][draw(st.integers(0, 2))]
    whole = base.view(kind)
    n_dims = draw(st.integers(0, 3))
    shape = [draw(st.integers(1, 4)) for _ in range(n_dims)]
    strides = [draw(st.integers(0, 8)) for _ in range(n_dims)]
    reach = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    if reach > whole.numel():
        shape, strides, reach = [1] * n_dims, strides, 1
    return whole.as_strided(shape, strides, draw(st.integers(0, whole.numel() - reach)))


@st.composite
def values(draw: st.DrawFn) -> list[Any]:
    """Draw leaves: views of two storages, pairs of them as one sparse tensor, and others."""
    bases = [torch.zeros(BYTES, dtype=torch.uint8) for _ in range(2)]
    found: list[Any] = []
    for _ in range(draw(st.integers(0, 8))):
        base, other = bases[draw(st.integers(0, 1))], bases[draw(st.integers(0, 1))]
        if draw(st.integers(0, 5)):
            found.append(draw(views(base)))
            continue
        # A sparse tensor whose indices may lie where others do.
        n = draw(st.integers(1, 3))
        indices = base.view(torch.int64).narrow(0, draw(st.integers(0, BYTES // 8 - n)), n)
        entries = other.narrow(0, draw(st.integers(0, BYTES - n)), n)
        found.append(torch.sparse_coo_tensor(indices[None], entries, (9,), check_invariants=False))
    # What has no memory.
    return [*found, *[None, 3, torch.zeros(0)][: draw(st.integers(0, 3))]]


def bytes_in(leaf: Any) -> set[int]:
    """Return the addresses of all bytes of a leaf."""
    found: set[int] = set()
    for part in parts_of(leaf) if isinstance(leaf, Tensor) else ():
        size = part.element_size()
        for at in product(*map(range, part.shape)):
            offset = sum(k * step for k, step in zip(at, part.stride(), strict=True))
            begin = part.data_ptr() + offset * size
            found.update(range(begin, begin + size))
    return found


def meet(leaves: Sequence[Any]) -> list[list[bool]]:
    """Tell of each two leaves whether they have a byte in common."""
    known = [bytes_in(leaf) for leaf in leaves]
    return [[not one.isdisjoint(other) for other in known] for one in known]


@given(values(), st.data())
def test_against_all_bytes(leaves: list[Any], data: st.DataObject) -> None:
    """Every tensor is found that has a byte in common with another one, and no other."""
    n, common = len(leaves), meet(leaves)
    assert find_overlaps(leaves) == {
        k for k in range(n) if any(common[k][j] for j in range(n) if j != k)
    }
    cut = data.draw(st.integers(0, n))
    assert find_shared(leaves[:cut], leaves[cut:]) == {
        k for k in range(cut) if any(common[k][j] for j in range(cut, n))
    }
    # The first stay in any case.
    stays = list(range(cut))
    for k in range(cut, n):
        if not any(common[k][j] for j in stays):
            stays.append(k)
    copied = set(range(cut, n)).difference(stays)
    assert find_to_part(leaves[cut:], leaves[:cut]) == {k - cut for k in copied}


@given(st.data())
def test_of_parts_of_a_matrix(data: st.DataObject) -> None:
    """The same for parts of one tensor, most of which lie side by side in its rows."""
    whole = torch.zeros(3, 4, 5)
    leaves: list[Tensor] = []
    for _ in range(data.draw(st.integers(0, 6))):
        part = whole
        for _ in range(data.draw(st.integers(0, 2))):
            dim = data.draw(st.integers(0, part.dim() - 1))
            start = data.draw(st.integers(0, part.shape[dim] - 1))
            part = part.narrow(dim, start, data.draw(st.integers(1, part.shape[dim] - start)))
        leaves.append(part)
    common = meet(leaves)
    assert find_overlaps(leaves) == {
        k for k, row in enumerate(common) if any(at for j, at in enumerate(row) if j != k)
    }


def many() -> dict[str, tuple[list[Tensor], bool]]:
    """Return many tensors each in one storage, and whether they have memory in common."""
    line, square = torch.zeros(MANY), torch.zeros(3, MANY)
    cube = torch.zeros(2, MANY, 3).transpose(0, 1)
    return {
        "in one place": ([line.detach() for _ in range(MANY)], True),
        "in one place, in other shapes": ([line.view(-1, 1 + k % 2) for k in range(MANY)], True),
        "one behind the other": (list(line.split(1)), False),
        "rows": (list(cube.unbind(1)), False),
        "columns": (list(square.unbind(1)), False),
        "blocks of columns": (list(square.split(2, dim=1)), False),
        "columns of planes": (list(cube.unbind(0)), False),
        "columns, each twice": ([*square.unbind(1), *square.unbind(1)], True),
    }


@pytest.mark.parametrize("kind", many())
def test_many_tensors_are_not_compared_in_pairs(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No two places are compared byte by byte, nor are pairs listed for tensors in one place."""

    def refuse(*_: Any, **__: Any) -> bool:
        raise AssertionError("two places are compared")

    monkeypatch.setattr(np, "shares_memory", refuse)
    leaves, overlap = many()[kind]
    assert places._places_of(leaves).meetings == []
    assert find_overlaps(leaves) == (set(range(len(leaves))) if overlap else set())
    assert len(find_shared(leaves, leaves)) == len(leaves)
    n_places = len({leaf.data_ptr() for leaf in leaves})
    assert len(find_to_part(leaves, [])) == len(leaves) - n_places


def test_new_gradients_in_one_place_are_parted_without_comparing_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sum of many parameters gives all of them one gradient: the first keeps it."""
    monkeypatch.setattr(np, "shares_memory", None)
    rows = [nn.Parameter(torch.randn(2)) for _ in range(50)]
    new = NewGradients()
    new.begin(rows)
    sum(row.unsqueeze(0) for row in rows).backward(torch.ones(1, 2))  # type: ignore[union-attr]
    assert len({row.grad.untyped_storage().data_ptr() for row in rows}) == 1
    new.part_from([])
    found = [row.grad for row in rows]
    assert len({one.untyped_storage().data_ptr() for one in found}) == len(rows)
    assert all(torch.equal(one, torch.ones(2)) for one in found)


def test_a_place_that_nobody_knows_may_be_anywhere() -> None:
    """As before: what keeps its elements elsewhere is taken to meet all in its storage."""
    x = torch.zeros(4)

    class Elsewhere(Tensor):
        def data_ptr(self) -> int:
            return 0

    hidden = x[:1].as_subclass(Elsewhere)
    assert find_overlaps([x[:2], x[2:], hidden]) == {0, 1, 2}
    assert find_shared([x[:2], x[2:]], [hidden]) == {0, 1}
    assert find_to_part([x[:2], hidden, x[2:]], []) == {1}
