"""Dimensions other than 0, tensors without rows, and keyword arguments."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from gpipebal.errors import BalanceError, ModelError
from gpipebal.pipeline import GPipe, gather, scatter
from gpipebal.pipeline.values.dims import spread_dims
from gpipebal.pipeline.values.microbatch import flatten
from gpipebal.schedule import CHECKPOINT_MODES

pytestmark = pytest.mark.timeout(60)
MODES = pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
KINDS = [dict, OrderedDict, lambda pairs: defaultdict(int, pairs)]


class Attend(nn.Module):
    """Mix positions by a table that every row shares; sequence first, rows along dim 1."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        value, table = pair
        return self.linear(torch.einsum("st,trc->src", table, value)).tanh(), table


class First(nn.Module):
    """Keep the first of two."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0]


@MODES
def test_rows_along_another_dimension_and_a_tensor_without_rows(checkpoint: Any) -> None:
    """Splitting along dim 1 and giving all micro-batches one table gives the plain gradients."""
    torch.manual_seed(0)
    plain = nn.Sequential(Attend(), Attend(), First())
    pipe = GPipe(
        copy.deepcopy(plain), [1, 2], chunks=3, checkpoint=checkpoint, in_dims=(1, None), out_dims=1
    )
    results = []
    for model in (plain, pipe):
        value = torch.linspace(-1, 1, 4 * 7 * 3, dtype=torch.float64).view(4, 7, 3)
        table = torch.linspace(0, 1, 16, dtype=torch.float64).view(4, 4)
        value.requires_grad_()
        table.requires_grad_()
        output = model((value, table))
        output.square().sum().backward()
        parameters = [parameter.grad for parameter in model.parameters()]
        results.append([output.detach(), value.grad, table.grad, *parameters])
    for mine, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(mine, theirs)


def test_an_in_place_layer_does_not_harm_a_shared_tensor() -> None:
    """What goes to all micro-batches is the same for each, with and without gradients."""

    class Bump(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            return pair[0] * pair[1].add_(1)

    pipe = GPipe(nn.Sequential(Bump(), nn.Identity()), [1, 1], chunks=4, in_dims=(0, None))
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            for _ in range(2):
                shared = torch.ones(3)
                assert pipe((torch.ones(4, 3), shared)).unique().tolist() == [2.0]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("balance", [[2], [1, 1]])
def test_a_shared_tensor_that_is_handed_on_is_not_harmed(balance: list[int], context: Any) -> None:
    """A later partition that writes to what all micro-batches share writes to a copy."""

    class Pass(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return pair

    class Bump(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            return pair[0] * pair[1].add_(1)

    pipe = GPipe(nn.Sequential(Pass(), Bump()), balance, chunks=4, in_dims=(0, None))
    with context():
        for _ in range(2):
            shared = torch.zeros(1)
            assert pipe((torch.ones(4), shared)).tolist() == [1.0] * 4
            assert shared.item() == 0.0


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("balance", [[3], [1, 2]])
def test_a_shared_tensor_that_is_written_to_in_some_calls_only(
    balance: list[int], context: Any
) -> None:
    """No micro-batch may see what another has written: refused once, and then looked at again."""

    class Add(nn.Module):
        def forward(self, given: tuple[Tensor, Tensor, int]) -> Tensor:
            x, table, times = given
            for _ in range(times):
                table.mul_(2)
            return x + table

    model = nn.Sequential(nn.Identity(), Add(), nn.Identity())
    pipe = GPipe(model, balance, chunks=4, in_dims=(0, None, None), checkpoint="never")
    x = torch.zeros(4, 2)
    with context():
        assert pipe((x, torch.ones(2), 0)).unique().tolist() == [1.0]
        if context is not torch.inference_mode:  # there they count no writes, and are copied
            with pytest.raises(ModelError, match="was written to while layer"):
                pipe((x, torch.ones(2), 1))
        for times in (1, 0):
            assert pipe((x, torch.ones(2), times)).unique().tolist() == [2.0**times]


@MODES
def test_parts_with_gaps_are_named_where_a_view_fails(checkpoint: Any) -> None:
    """A part along dim 1 has gaps, which the mini-batch has not."""

    class Flat(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(-1, x.shape[2])

    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.transpose(0, 1).view(-1)

    pipe = GPipe(
        nn.Sequential(Flat(), nn.Identity()), [1, 1], chunks=2, checkpoint=checkpoint, in_dims=1
    )
    with pytest.raises(RuntimeError, match="view size is not compatible") as caught:
        pipe(torch.ones(3, 4, 5))
    assert any("reshape() instead of view()" in note for note in caught.value.__notes__)
    # Where a layer makes the gaps itself, the parts have nothing to do with it.
    pipe = GPipe(nn.Sequential(Own(), nn.Identity()), [1, 1], chunks=2, checkpoint=checkpoint)
    with pytest.raises(RuntimeError, match="view size is not compatible") as caught:
        pipe(torch.ones(3, 4))
    assert not any("instead of view()" in note for note in caught.value.__notes__)


def test_under_no_grad_outputs_need_no_gradient() -> None:
    """Whatever a layer does inside: the cells are gone when the call returns."""

    class Energy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                return x.detach().requires_grad_().square()

    model = nn.Sequential(nn.Identity(), Energy())
    with torch.no_grad():
        assert model(torch.ones(2)).requires_grad
        assert not GPipe(model, [1, 1], chunks=2)(torch.ones(2)).requires_grad


def test_outputs_without_rows_are_stacked() -> None:
    """With out_dims=None each micro-batch's tensor stays, and its gradient finds its way back."""

    class Mean(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x.mean()

    pipe = GPipe(nn.Sequential(nn.Identity(), Mean()), [1, 1], chunks=2, out_dims=(0, None))
    inputs = torch.arange(6.0, requires_grad=True)
    output, means = pipe(inputs)
    assert output.tolist() == [0, 1, 2, 3, 4, 5]
    assert means.tolist() == [1, 4]
    (means * torch.tensor([3.0, 6.0])).sum().backward()
    assert inputs.grad is not None
    assert inputs.grad.tolist() == [1, 1, 1, 2, 2, 2]


def test_keyword_arguments_reach_the_first_layer() -> None:
    """They are parted like the input, by `keyword_dims` where it names them; no other layer's."""
    seen = []

    class Scale(nn.Module):
        def forward(self, x: Tensor, *, by: Tensor, plus: Tensor, flag: bool = False) -> Tensor:
            seen.append((tuple(x.shape), tuple(by.shape), tuple(plus.shape), flag))
            return x * by + plus

    pipe = GPipe(
        nn.Sequential(Scale(), nn.Linear(2, 2)), [1, 1], chunks=2, keyword_dims={"plus": None}
    )
    by = torch.full((4, 1), 2.0, requires_grad=True)
    plus = torch.zeros(2, requires_grad=True)
    output = pipe(torch.ones(4, 2), by=by, plus=plus, flag=True)
    output.sum().backward()
    assert set(seen) == {((2, 2), (2, 1), (2,), True)}
    expected = pipe[1].weight.sum().item()  # type: ignore[operator, union-attr]
    assert by.grad is not None
    assert plus.grad is not None
    torch.testing.assert_close(by.grad, torch.full((4, 1), expected))
    torch.testing.assert_close(plus.grad.sum(), torch.tensor(4 * expected))
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        pipe(torch.ones(4, 2), by=by, plus=plus, other=1)


def test_errors_name_the_leaf_and_the_argument() -> None:
    """A dimension that does not fit says which, where, and what would fit."""
    value = {"x": torch.zeros(4, 2), "mask": torch.zeros(3, 2)}
    with pytest.raises(ModelError, match=r"leaf \['mask'\] has 3 along dim 0 \(expected 4"):
        scatter(value, 2)
    assert len(scatter(value, 2, {"x": 0, "mask": None})) == 2
    with pytest.raises(ModelError, match=r"leaf \['x'\] has shape \(4, 2\) \(expected rows along"):
        scatter(value, 2, {"x": 2, "mask": None})
    with pytest.raises(BalanceError, match=r"dims does not fit: dims=\(0, 1\) for a value of the"):
        scatter(value, 2, (0, 1))
    with pytest.raises(BalanceError, match="does not fit"):
        scatter(value, 2, {"x": True, "mask": 0})
    with pytest.raises(ModelError, match="no tensor with rows"):
        scatter(value, 2, None)
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2)), [1], chunks=2, in_dims={"x": 0})
    with pytest.raises(BalanceError, match="in_dims does not fit"):
        pipe(torch.zeros(4, 2))
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2)), [1], chunks=2, out_dims=(0, 0))
    with pytest.raises(BalanceError, match="out_dims does not fit"):
        pipe(torch.zeros(4, 2))


def test_errors_name_leaves_of_classes_that_check_what_they_are_made_of() -> None:
    """A class whose objects cannot be made of anything but tensors is named like any other."""
    packed = pack_sequence([torch.ones(length, 2) for length in (3, 1)])
    with pytest.raises(ModelError, match=r"leaf \['words'\]\[1\] has 3 along dim 0 \(expected 4"):
        scatter({"words": packed, "x": torch.zeros(4, 2)}, 2)
    parts = scatter({"words": packed, "x": torch.zeros(3, 2)}, 2, {"words": None, "x": 0})
    assert [part["words"].data.shape for part in parts] == [(4, 2), (4, 2)]
    with pytest.raises(BalanceError, match=r"dims does not fit: dims=\(0, 1\) .*PackedSequence"):
        scatter({"words": packed}, 2, (0, 1))


@given(st.integers(1, 9), st.integers(1, 12), st.integers(-3, 2))
@settings(deadline=None)
def test_gather_undoes_scatter_along_any_dimension(rows: int, chunks: int, dim: int) -> None:
    """Parting along a dimension and joining along it gives the same tensor."""
    shape = [2, 3, 4]
    shape[dim] = rows
    tensor = torch.arange(float(torch.Size(shape).numel())).view(shape)
    parts = scatter(tensor, chunks, dim)
    assert len(parts) == min(chunks, rows)
    assert torch.equal(gather(parts, dim), tensor)


@pytest.mark.parametrize("make", KINDS)
def test_dims_of_dictionaries_go_by_keys_and_not_by_their_order(make: Any) -> None:
    """Dimensions of inputs, outputs and targets belong to the names beside them, also nested."""

    class Two(NamedTuple):
        first: Any
        second: Any

    x, y = torch.arange(8.0).view(4, 2), torch.arange(12.0).view(3, 4)
    seen: list[Any] = []

    class Look(nn.Module):
        def forward(self, value: Any) -> Any:
            seen.append(value.second)
            return {"x": value.second["x"] * 1, "y": value.second["y"] * 1}

    value = Two(x, make([("x", x), ("y", y)]))
    pipe = GPipe(
        nn.Sequential(Look()),
        [1],
        chunks=2,
        in_dims=Two(0, make([("y", 1), ("x", 0)])),
        out_dims={"y": 1, "x": 0},
    )
    output = pipe(value)
    assert [(part["x"].shape, part["y"].shape) for part in seen] == [((2, 2), (3, 2))] * 2
    assert torch.equal(output["x"], x) and torch.equal(output["y"], y)

    def loss_fn(out: Any, target: Any) -> Tensor:
        assert target["x"].shape == (2, 2) and target["y"].shape == (3, 2)
        return out.sum()

    linear = GPipe(nn.Sequential(nn.Linear(2, 1)), [1], chunks=2)
    linear.step(x, target=value.second, target_dims=make([("y", 1), ("x", 0)]), loss_fn=loss_fn)


@st.composite
def values_and_dims(draw: st.DrawFn, depth: int = 3) -> tuple[Any, Any, list[Any]]:
    """Draw a pytree, dimensions for it, and the dimension of each of its leaves in order."""
    if depth == 0 or draw(st.booleans()):
        dim = draw(st.sampled_from([0, 1, None]))
        return draw(st.sampled_from([(0, dim, [dim]), ((0, [0]), dim, [dim, dim])]))
    below = draw(st.lists(values_and_dims(depth=depth - 1), min_size=0, max_size=3))
    expected = [dim for _, _, dims in below for dim in dims]
    kind = draw(st.sampled_from([tuple, list, "dict"]))
    if kind != "dict":
        return kind(v for v, _, _ in below), kind(d for _, d, _ in below), expected
    names = "abc"[: len(below)]
    pairs = draw(st.permutations([(name, d) for name, (_, d, _) in zip(names, below, strict=True)]))
    value = draw(st.sampled_from(KINDS))(
        [(n, v) for n, (v, _, _) in zip(names, below, strict=True)]
    )
    return value, draw(st.sampled_from(KINDS))(pairs), expected


@given(values_and_dims())
@settings(deadline=None)
def test_dims_belong_to_names_whatever_the_classes_of_dictionaries(drawn: Any) -> None:
    """Each leaf gets the dimension beside its own name, also if it is named in another class."""
    value, dims, expected = drawn
    assert spread_dims(dims, flatten(value)[1], "in_dims") == expected


def test_dims_may_be_whole_numbers_of_any_kind() -> None:
    """As everywhere else; a bool is none."""
    structure = flatten((0, {"a": 0}))[1]
    assert spread_dims(np.int64(1), structure, "in_dims") == [1, 1]
    assert spread_dims((np.int32(2), None), structure, "in_dims") == [2, None]
    for wrong in (True, 1.0, (0, 1.0)):
        with pytest.raises(BalanceError, match="in_dims does not fit"):
            spread_dims(wrong, structure, "in_dims")


def test_dims_with_other_keys_are_refused() -> None:
    """A name that the value does not have fits nothing."""
    pipe = GPipe(nn.Sequential(nn.Identity()), [1], chunks=2, in_dims={"x": 0, "z": 1})
    with pytest.raises(BalanceError, match="in_dims does not fit"):
        pipe({"x": torch.ones(4, 2), "y": torch.ones(3, 4)})
