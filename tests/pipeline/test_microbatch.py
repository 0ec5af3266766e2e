"""Scatter and gather."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpipebal.errors import BalanceError, ModelError
from gpipebal.pipeline import gather, scatter
from gpipebal.pipeline.values.parting import chunk_sizes


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@given(rows=st.integers(0, 50), chunks=st.integers(1, 60))
def test_chunk_sizes_are_as_equal_as_possible(rows: int, chunks: int) -> None:
    """Exactly max(1, min(chunks, rows)) sizes add up to the rows and differ by at most one."""
    sizes = chunk_sizes(rows, chunks)
    assert sum(sizes) == rows
    assert len(sizes) == max(1, min(chunks, rows))
    assert max(sizes) - min(sizes) <= 1


@given(rows=st.integers(0, 20), chunks=st.integers(1, 25))
def test_gather_undoes_scatter(rows: int, chunks: int) -> None:
    """A mini-batch survives being parted and joined, in values and in kind."""
    pair = Pair(torch.arange(rows * 3).reshape(rows, 3), torch.arange(rows))
    joined = gather(scatter(pair, chunks))
    assert type(joined) is Pair
    assert torch.equal(joined.left, pair.left)
    assert torch.equal(joined.right, pair.right)


def test_scatter_gives_views() -> None:
    """Parting a mini-batch copies no memory."""
    rows = torch.zeros(4, 2)
    assert {part.untyped_storage().data_ptr() for part in scatter(rows, 3)} == {
        rows.untyped_storage().data_ptr()
    }


def test_leaves_that_are_no_tensors_go_everywhere() -> None:
    """Numbers, texts and None reach every micro-batch as they are."""
    parts = scatter({"x": torch.zeros(2, 1), "scale": 3, "none": None}, 2)
    assert [(part["scale"], part["none"], len(part["x"])) for part in parts] == [(3, None, 1)] * 2


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((torch.zeros(4, 1), torch.zeros(2, 1)), r"leaf \[1\] has 2 along dim 0 \(expected 4"),
        (torch.tensor(1.0), "the tensor has no dimensions"),
        ("text", "input has no tensor with rows: got str"),
        ((), "input has no tensor with rows: got nothing"),
    ],
)
def test_scatter_refuses_what_it_would_cut_short(value: object, message: str) -> None:
    """What cannot be parted by rows is an error that names the leaf, never a silent cut."""
    with pytest.raises(ModelError, match=message):
        scatter(value, 2)


def test_different_rows_are_the_value_error_that_wrong_shapes_are() -> None:
    """Who expects a ValueError for tensors that do not fit one another catches it too."""
    with pytest.raises(ValueError, match="tensors have different rows"):
        scatter((torch.zeros(4, 1), torch.zeros(2, 1)), 2)


def test_gather_refuses_outputs_of_different_structure() -> None:
    """Micro-batches that return different structures cannot be joined."""
    with pytest.raises(ModelError, match="micro-batch 1 gave"):
        gather([torch.zeros(1), (torch.zeros(1), torch.zeros(1))])


def test_gather_refuses_outputs_without_rows() -> None:
    """A scalar per micro-batch cannot be joined along dim 0."""
    with pytest.raises(ModelError, match="one value per row"):
        gather([torch.tensor(1.0), torch.tensor(2.0)])


@pytest.mark.parametrize("chunks", [0, -1, 2.5, "two", None])
def test_scatter_refuses_numbers_that_are_none(chunks: Any) -> None:
    """Micro-batches are counted from 1."""
    with pytest.raises(BalanceError, match=r"chunks is (too small|not a whole number)"):
        scatter(torch.zeros(4, 1), chunks)


def test_scatter_names_its_own_argument() -> None:
    """What divides a tensor without rows is called `dims` there."""
    with pytest.raises(ModelError, match=r"name its dimension in dims \(None"):
        scatter((torch.zeros(4, 1), torch.tensor(1.0)), 2)


def test_gather_refuses_nothing() -> None:
    """Without an output nothing tells what the whole would be."""
    with pytest.raises(ModelError, match="there is nothing to join"):
        gather([])
