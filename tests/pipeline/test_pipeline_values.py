"""Values that go in, across cuts and out: refused where their gradient would be lost."""

from __future__ import annotations

import collections
import copy
import types
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from random_chains import Apply
from torch import Tensor, nn
from torch.autograd import forward_ad

import gpipebal as gb
from gpipebal.errors import BalanceError, ModelError, PipelineError
from gpipebal.pipeline import GPipe
from gpipebal.pipeline.values.microbatch import find_hidden_tensor

pytestmark = pytest.mark.timeout(60)


class Dict(dict[str, Any]):
    """A mapping that is not a pytree."""


class List(list[Any]):
    """A list that is not a pytree."""


class Tuple(tuple[Any, ...]):
    """A tuple that is not a pytree."""

    __slots__ = ()


class Slots:
    """An object without a dictionary of its own."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class MoreSlots(Slots):
    """A subclass, whose base has the slot."""

    __slots__ = ()


#: Ways to hide a tensor, and what the error calls the place.
HIDDEN: dict[str, tuple[Any, str]] = {
    "attribute": (lambda t: types.SimpleNamespace(x=t), "attribute 'x' of a SimpleNamespace"),
    "list in an attribute": (lambda t: types.SimpleNamespace(x=[1, t]), "attribute 'x'"),
    "dict in an attribute": (lambda t: types.SimpleNamespace(x={"a": t}), "attribute 'x'"),
    "object in an object": (lambda t: types.SimpleNamespace(x=Slots([t])), "attribute 'x'"),
    "slot": (MoreSlots, "attribute 'value' of a MoreSlots"),
    "dict subclass": (lambda t: Dict(a=t), r"element \['a'\] of a Dict"),
    "list subclass": (lambda t: List([0, t]), r"element \[1\] of a List"),
    "tuple subclass": (lambda t: Tuple((t,)), r"element \[0\] of a Tuple"),
    "UserDict": (lambda t: collections.UserDict(a=t), r"element \['a'\] of a UserDict"),
    "set": (lambda t: {t}, "an element of a set"),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_tensors_hidden_in_any_container_are_refused(name: str) -> None:
    """Across a cut their gradient would be lost, and as input they would not be parted."""
    hide, where = HIDDEN[name]
    model = nn.Sequential(nn.Linear(3, 3), Apply(lambda y: (y, hide(y * 2))), Apply(lambda p: p[0]))
    for checkpoint in ("never", "always"):
        pipe = GPipe(model, [2, 1], chunks=2, checkpoint=checkpoint)  # type: ignore[arg-type]
        with pytest.raises(ModelError, match=f"output of partition 0 has tensors inside.*{where}"):
            pipe(torch.ones(4, 3))
    GPipe(model, [1, 2], chunks=2)(torch.ones(4, 3)).sum().backward()
    with pytest.raises(ModelError, match=f"the input has tensors inside.*{where}"):
        GPipe(nn.Sequential(Apply(lambda p: p[0])), [1])((torch.ones(4), hide(torch.ones(4))))


def test_the_fix_for_a_hidden_tensor_works() -> None:
    """A plain dict in place of a subclass of one goes through, and its gradient comes back."""
    linear = nn.Linear(3, 3)
    layers = [linear, Apply(lambda y: {"a": y * 2}), Apply(lambda value: value["a"])]
    GPipe(nn.Sequential(*layers), [2, 1], chunks=2)(torch.ones(4, 3)).sum().backward()
    assert linear.weight.grad is not None


class Table(UserDict[str, Tensor]):
    """A mapping that is not a dict, as libraries have them."""


@dataclass
class Pair:
    """Two tensors."""

    first: Tensor
    second: Tensor


def test_the_fix_for_an_object_with_tensors_is_one_for_its_kind() -> None:
    """A mapping becomes a dict, and a dataclass can be registered; each then goes through."""
    pipe = GPipe(nn.Sequential(Apply(lambda value: value["a"] * 2)), [1], chunks=2)
    table = Table(a=torch.ones(4))
    with pytest.raises(ModelError, match=r"Fix: .* or a dict, such as dict\(value\)\.$"):
        pipe(table)
    assert pipe(dict(table)).sum() == 8
    with pytest.raises(ModelError, match=r"export\.register_dataclass\(Pair\)\.$"):
        pipe(Pair(torch.ones(4), torch.ones(4)))


def test_what_is_not_a_chain_is_named_with_the_chain_inside() -> None:
    """Other libraries have a class `Sequential` too, and many models wrap one of torch's."""

    class Sequential(nn.Module):
        def __init__(self, *layers: nn.Module) -> None:
            super().__init__()
            self.net = nn.Sequential(*layers)

    with pytest.raises(ModelError, match=r"test_pipeline_values\.Sequential\.\n.*module\.net, if"):
        GPipe(Sequential(nn.Linear(2, 2)), [1])
    layers = nn.ModuleList([nn.Sequential(nn.Linear(2, 2))])
    with pytest.raises(ModelError, match=r"in it, module\.get_submodule\('0'\), if"):
        GPipe(layers, [1])

    class Own(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return x

    for module in (nn.Linear(2, 2), nn.ModuleList([Own(nn.Linear(2, 2))]), nn.ModuleList()):
        with pytest.raises(ModelError, match=r"\nFix: .*of its layers \(docs/\S+\)\.$"):
            GPipe(module, [1])


def test_objects_without_tensors_are_let_through() -> None:
    """Settings, modules and large tables of numbers are no tensors, and cost little to look at."""

    class Counted(Dict):
        looked = 0

        def __getitem__(self, key: str) -> Any:
            Counted.looked += 1
            return super().__getitem__(key)

    circle: list[Any] = List()
    circle.append(circle)
    table = Counted({str(k): [k] for k in range(100_000)})
    plain = [table, circle, {1, 2}, types.SimpleNamespace(x=nn.Linear(2, 2)), print, None, "a", 3]
    assert find_hidden_tensor(plain) is None
    assert Counted.looked <= 1000


class Mark(nn.Module):
    """Sets an attribute of a tensor."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        setattr(y, self.name, 10.0)
        return y


class UseMark(nn.Module):
    """Uses it, if there is one."""

    def forward(self, x: Tensor) -> Tensor:
        return x * getattr(x, "scale", 1.0)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_attributes_of_tensors_are_refused_where_they_would_be_lost(checkpoint: Any) -> None:
    """Inside a partition the next layer finds them; at a cut, in or out, no one would."""
    model, x = nn.Sequential(nn.Linear(2, 2), Mark("scale"), UseMark()), torch.ones(4, 2)
    pipe = GPipe(model, [3], chunks=2, checkpoint=checkpoint)
    torch.testing.assert_close(pipe(x), model(x))
    match = "output of partition 0 has a tensor with attributes that would be lost: scale"
    for layers, balance in ((model, [2, 1]), (model[:2], [2])):
        with pytest.raises(ModelError, match=match):
            GPipe(layers, balance, chunks=2, checkpoint=checkpoint)(x)
    x.scale, x._scale = 3.0, 3.0  # type: ignore[attr-defined]
    with pytest.raises(ModelError, match=r"the input has a tensor with attributes .*: scale \("):
        pipe(x)
    with pytest.raises(ModelError, match="the target has a tensor with attributes"):
        pipe.step(torch.ones(4, 2), target=x, loss_fn=nn.functional.mse_loss)
    del x.scale  # type: ignore[attr-defined]
    assert pipe(x).shape == (4, 2)


def test_attributes_that_torch_sets_are_let_through() -> None:
    """They tell what a tensor is, or how it is compiled; those of a parameter are its own."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.row, self.weight = nn.Buffer(torch.ones(2)), nn.Parameter(torch.ones(2))
            self.weight.group = "slow"  # type: ignore[attr-defined]

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return x, self.row, self.weight

    add = Apply(lambda given: given[0] + given[1] + given[2])
    pipe = GPipe(nn.Sequential(Both(), add), [1, 1], chunks=2)
    x = torch.zeros(4, 2)
    torch._dynamo.mark_dynamic(x, 0)  # type: ignore[attr-defined, no-untyped-call]
    assert pipe(x).unique().tolist() == [2.0]
    marked = GPipe(nn.Sequential(Mark("_scale"), nn.Linear(2, 2)), [1, 1], chunks=2)
    assert marked(x).shape == (4, 2)


def test_tangents_are_refused() -> None:
    """Forward-mode differentiation would lose its tangents at the cuts: an error instead."""
    pipe = GPipe(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), [1, 1], chunks=2)
    x = torch.ones(4, 3)
    with forward_ad.dual_level():
        with pytest.raises(PipelineError, match="cannot be differentiated in forward mode"):
            pipe(forward_ad.make_dual(x, torch.ones_like(x)))
        with pytest.raises(PipelineError, match="cannot be differentiated in forward mode"):
            pipe.step(forward_ad.make_dual(x, torch.ones_like(x)), loss_fn=Tensor.sum)
        with pytest.raises(PipelineError, match="a target or a parameter has a tangent"):
            pipe.step(x, target=forward_ad.make_dual(x, x), loss_fn=nn.functional.mse_loss)
        lent = {n: forward_ad.make_dual(p, p) for n, p in pipe.named_parameters()}
        with pytest.raises(PipelineError, match="cannot be differentiated in forward mode"):
            torch.func.functional_call(pipe, lent, (x,))
        assert pipe(x).shape == (4, 3)


def test_transforms_of_torch_func_are_refused() -> None:
    """Workers know nothing of a transform around the call: its gradients would be zeros."""
    pipe = GPipe(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), [1, 1], chunks=2)
    x = torch.ones(4, 3)
    lent = {name: p.detach() for name, p in pipe.named_parameters()}

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(pipe, parameters, (x,)).square().sum()  # type: ignore[no-any-return]

    calls: list[Callable[[], Any]] = [
        lambda: torch.func.grad(loss)(lent),
        lambda: torch.func.vjp(loss, lent),
        lambda: torch.func.jacrev(loss)(lent),
        lambda: torch.func.jvp(loss, (lent,), (lent,)),
        lambda: torch.func.grad(lambda x: pipe(x).sum())(x),
        lambda: torch.func.vmap(pipe)(x[:, None]),
        lambda: torch.func.grad(lambda x: pipe.step(x, loss_fn=Tensor.sum))(x),
    ]
    for call in calls:
        with pytest.raises(PipelineError, match=r"inside of a transform of torch\.func"):
            call()
    assert pipe(x).shape == (4, 3)


class Masked(nn.Module):
    """Take a keyword beside the input."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x if mask is None else x + mask


def test_misspelt_keywords_are_refused() -> None:
    """A name in keyword_dims that the first layer does not take is an error that names those."""
    with pytest.raises(BalanceError, match=r"'maks' \(expected one of 'mask', the keywords of Mas"):
        GPipe(nn.Sequential(Masked()), [1], keyword_dims={"maks": None})
    with pytest.raises(BalanceError, match=r"'mask' \(expected one of none"):
        GPipe(nn.Sequential(nn.ReLU()), [1], keyword_dims={"mask": None})
    pipe = GPipe(nn.Sequential(Masked()), [1], chunks=2, keyword_dims={"mask": None})
    assert pipe(torch.ones(4, 2)).shape == (4, 2)
    assert pipe(torch.ones(4, 2), mask=torch.ones(2)).tolist() == [[2.0, 2.0]] * 4


def test_keywords_that_nobody_can_know_are_let_through() -> None:
    """A first layer that takes any keyword, or whose hook does, may have them all named."""

    class Anything(nn.Module):
        def forward(self, x: Tensor, **keywords: Tensor) -> Tensor:
            return x + sum(keywords.values())

    dims = {"mask": None}
    pipe = GPipe(nn.Sequential(Anything()), [1], chunks=2, keyword_dims=dims)
    assert pipe(torch.ones(4, 2), mask=torch.ones(2)).tolist() == [[2.0, 2.0]] * 4
    layer = nn.ReLU()
    layer.register_forward_pre_hook(
        lambda _module, args, keywords: ((args[0] + keywords["mask"],), {}), with_kwargs=True
    )
    pipe = GPipe(nn.Sequential(layer), [1], chunks=2, keyword_dims=dims)
    assert pipe(torch.ones(4, 2), mask=torch.ones(2)).tolist() == [[2.0, 2.0]] * 4


class Ragged(nn.Module):
    """Cut off the end of the first row."""

    def forward(self, x: Tensor) -> Tensor:
        parts = [x[0, :1], *x[1:]]
        return torch.nested.as_nested_tensor(parts, layout=torch.strided)


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_nested_tensors_are_joined_without_gradients(chunks: int) -> None:
    """Their rows are known, though not their shape."""
    x = torch.ones(4, 3, 2)
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), Ragged()), [1, 1], chunks=chunks)
    with torch.no_grad():
        rows = [len(part) for part in pipe(x).unbind()]
    assert rows == [1, 3, 3, 3] if chunks == 1 else [1, 3, 1, 3]


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_a_shared_input_that_is_written_to(rows: int, mode: Any) -> None:
    """Facts found with one micro-batch, whose input nobody reads again, are not those of more."""
    layer = Apply(lambda pair: pair[0] * pair[1].add_(1))
    pipe = GPipe(nn.Sequential(layer), [1], chunks=4, in_dims=(0, None))
    with mode():
        for n_rows in (rows, 4, 1, 4):
            assert pipe((torch.ones(n_rows), torch.zeros(1))).tolist() == [1.0] * n_rows


def test_outputs_of_different_structure_are_refused() -> None:
    """Micro-batches of one mini-batch that come out in different forms: the error names one."""
    layer = Apply(lambda x: x if x.shape[0] == 2 else (x, x))
    pipe = GPipe(nn.Sequential(layer), [1], chunks=2)
    with pytest.raises(ModelError, match=r"(?s)differ: micro-batch 1 gave .* as micro-batch 0\)"):
        pipe(torch.ones(3, 2))


def test_an_object_inside_a_partition() -> None:
    """What torch cannot take apart is refused at a cut only, and by the profiler."""

    class Wrap(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return Dict(y=self.linear(x))

    model = nn.Sequential(Wrap(), Apply(lambda value: value["y"].tanh()), nn.Linear(4, 4))
    inputs = torch.randn(4, 4)
    torch.testing.assert_close(GPipe(model, [2, 1], chunks=2)(inputs), model(inputs))
    with pytest.raises(ModelError, match="the output of partition 0 has tensors inside"):
        GPipe(model, [1, 2], chunks=2)(inputs)
    with pytest.raises(ModelError, match="the output of layer '0' has tensors inside"):
        gb.profile_model(model, inputs, chunks=2, timeout=0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_what_cannot_be_parted_is_refused() -> None:
    """Sparse and nested tensors have no rows that could be parted; whole they pass."""
    pipe, dense = GPipe(nn.Sequential(Apply(sum_up)), [1], chunks=2), torch.eye(4)
    nested = [torch.nested.nested_tensor([dense], layout=x) for x in (torch.strided, torch.jagged)]
    for tensor in (dense.to_sparse(), *nested):
        with pytest.raises(ModelError, match=r"(?s)cannot be divided: .*expected a dense.*in_dims"):
            pipe((dense, tensor))
    whole = GPipe(nn.Sequential(Apply(sum_up)), [1], chunks=2, in_dims=(0, None))
    assert whole((dense, dense.to_sparse())).tolist() == (dense + 1).tolist()


def sum_up(value: Any) -> Tensor:
    """Add how many elements the second has in a row, all over it."""
    total: Tensor = value[0] + value[1].to_dense().sum(0)
    return total


def test_a_complex_loss_is_refused() -> None:
    """It has no gradient that one could go down, in plain torch neither."""
    pipe = GPipe(nn.Sequential(nn.Linear(4, 4)), [1], chunks=2)
    with pytest.raises(ModelError, match=r"(?s)no real number.*complex64.*Fix: .*absolute value"):
        pipe.step(torch.randn(4, 4), loss_fn=lambda y: y.sum() * 1j)


@pytest.mark.parametrize("checkpoint", ("always", "except_last", "never"))
def test_input_of_inference_mode_may_be_filled_anew_before_the_backward(checkpoint: Any) -> None:
    """It counts no writes, so a recompute works on what a cell has kept of it."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    plain = copy.deepcopy(model)
    with torch.inference_mode():
        x = torch.randn(4, 3)
    plain(x.clone()).square().sum().backward()
    output = GPipe(model, [1, 2], chunks=2, checkpoint=checkpoint)(x)
    with torch.inference_mode():
        x.fill_(7.0)
    output.square().sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_recompute_finds_input_of_inference_mode_with_its_strides() -> None:
    """A layer may ask for them: the copy that a cell keeps has the gaps of the input."""
    seen: list[tuple[bool, tuple[int, ...]]] = []

    class Sees(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((gb.is_recomputing(), x.stride()))
            return x.contiguous() * 1

    model = nn.Sequential(Sees(), nn.Linear(3, 1))
    with torch.inference_mode():
        x = torch.randn(4, 6)[:, ::2]
    GPipe(model, [2], chunks=2, checkpoint="always")(x).sum().backward()
    again = [stride for recomputes, stride in seen if recomputes]
    assert again == [(6, 2), (6, 2)]


@pytest.mark.parametrize("chunks", [1, 2])
def test_output_is_never_a_parameters_memory(chunks: int) -> None:
    """Who writes to an output does not write to a layer."""

    class Hand(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight[: len(x)]

    model = nn.Sequential(Hand())
    output = GPipe(model, [1], chunks=chunks)(torch.ones(4, 3))
    output.mul_(5)
    assert (model[0].weight == 1).all()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_nested_tensors_with_strides_cross_a_cut(checkpoint: Any) -> None:
    """Torch has no place in a graph for the gradient of one: the tensor itself stands for it."""
    rows = Apply(lambda x: torch.nested.as_nested_tensor([row.tanh() for row in x.unsqueeze(1)]))
    model = nn.Sequential(nn.Linear(4, 4), rows, Apply(lambda x: x.to_padded_tensor(0.0)[:, 0]))
    pipe, inputs, found = (
        GPipe(model, [2, 1], chunks=2, checkpoint=checkpoint),
        torch.randn(4, 4),
        [],
    )
    for module in (model, pipe):
        module.zero_grad()
        module(inputs).square().sum().backward()
        found.append([one.grad for one in model.parameters()])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)
