"""Layers whose parameters are made of several tensors, such as quantised ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from random_chains import Apply
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import gpipebal as gb
from gpipebal.errors import ProfileError
from gpipebal.pipeline.observers.ledger import Ledger
from gpipebal.pipeline.values.tensors import bytes_of, plain_parts
from gpipebal.verification.tolerance import distance

aten = torch.ops.aten


class Quantised(Tensor):
    """Whole numbers and a scale; it knows few operations."""

    @staticmethod
    def __new__(cls, whole: Tensor, scale: Tensor) -> Quantised:
        """Make it without memory of its own."""
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, whole.shape, dtype=scale.dtype, device=whole.device
        )

    def __init__(self, whole: Tensor, scale: Tensor) -> None:
        self.whole, self.scale = whole, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Name the tensors that it is made of."""
        return ["whole", "scale"], None

    def dequantize(self) -> Tensor:
        """Return the values."""
        return self.whole * self.scale

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run what it knows."""
        if func in (aten.detach.default, aten.clone.default, aten.alias.default):
            return cls(*(func(part, *args[1:], **(kwargs or {})) for part in _parts(args[0])))
        if func is aten._to_copy.default:
            return cls(args[0].whole.clone(), args[0].scale.clone())
        if func in (aten.t.default, aten.mm.default, aten.addmm.default):
            args = pytree.tree_map_only(Quantised, Quantised.dequantize, args)
            return func(*args, **(kwargs or {}))
        raise NotImplementedError(f"Quantised knows no {func}")


def _parts(tensor: Quantised) -> tuple[Tensor, Tensor]:
    return tensor.whole, tensor.scale


def _model() -> nn.Sequential:
    """Return a chain with a quantised layer between two that are trained."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 2))
    quantised = Quantised(torch.randint(-8, 8, (4, 4), dtype=torch.int8), torch.tensor(0.1))
    model[1].weight = nn.Parameter(quantised, requires_grad=False)
    return model


def test_a_pipeline_of_quantised_layers_is_verified() -> None:
    """Values are compared by what they stand for."""
    model = _model()
    pipe = gb.GPipe(model, [1, 2], chunks=2)
    assert gb.verify(model, pipe, torch.randn(4, 4)).outputs.count == 1


def test_values_of_quantised_tensors_are_compared() -> None:
    """One step of the scale apart is that far apart."""
    whole = torch.randint(-8, 8, (4, 4), dtype=torch.int8)
    other = whole.clone()
    other[1, 2] += 1
    scale = torch.tensor(0.5, dtype=torch.float64)
    apart = distance(Quantised(whole, scale), Quantised(other, scale))
    assert (apart.absolute, apart.place) == (0.5, (1, 2))
    assert distance(Quantised(whole, scale), Quantised(whole.clone(), scale)).absolute == 0


@pytest.mark.parametrize(
    ("one", "other"), [(1.0, 1.0 + 1e-12), (2**40, 2**40 + 1), (1 + 1j, 1 + 4j)]
)
def test_values_of_wrapped_tensors_are_compared_as_they_are(one: Any, other: Any) -> None:
    """A class that is not quantised keeps its precision, and is not cast."""
    dtype = {float: torch.float64, int: torch.int64, complex: torch.complex128}[type(one)]
    pair = [TwoTensor(*[torch.full((2,), x, dtype=dtype)] * 2) for x in (one, other)]
    assert distance(*pair).absolute == pytest.approx(abs(other - one), rel=1e-3)


class Steps(nn.Module):
    """Write to its own quantised weight, one step in each forward."""

    def __init__(self) -> None:
        super().__init__()
        quantised = Quantised(torch.zeros(4, 4, dtype=torch.int8), torch.tensor(0.1))
        self.weight = nn.Parameter(quantised, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Count, and return the input."""
        self.weight.whole.add_(1)  # type: ignore[attr-defined]
        return x * 1


def test_quantised_layers_are_measured() -> None:
    """They are copied, and compared with their copies part by part: what writes is found."""
    model = nn.Sequential(*_model(), Steps())
    found = gb.profile_model(
        model, torch.randn(4, 4), chunks=2, rows=(), timeout=0.0, as_pipeline=False
    )
    assert found.n_layers == 4
    assert not model[3].weight.whole.any()


def test_an_estimate_names_the_layer_that_cannot_be_made_without_memory() -> None:
    """Not every class of tensors can."""
    with pytest.raises(ProfileError, match=r"(?s)layer '1' has a tensor .*Fix: method='measure'"):
        gb.profile_model(_model(), torch.randn(4, 4), chunks=2, method="estimate")


def _jagged(x: Tensor) -> Tensor:
    """Work on the rows as one jagged tensor of two, and return plain rows."""
    nested = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 2, len(x)]))
    return (nested * nested.sin()).values()


def _sparse(x: Tensor) -> Tensor:
    """Keep a sparse copy for the backward."""
    return torch.sparse.mm(x.detach().to_sparse(), x.t()).t()


@pytest.mark.parametrize("way", [_jagged, _sparse])
def test_what_layers_save_in_other_tensors_counts(way: Any) -> None:
    """The plain tensors of nested and sparse ones are theirs, in the profile and in the meter."""
    model = nn.Sequential(nn.Linear(64, 64), Apply(way))
    x = torch.randn(64, 64)
    found = gb.profile_model(model, x, chunks=1, rows=(), timeout=0.0, as_pipeline=False)
    assert found.bytes_of(found.layers[1].saved) >= x.nbytes
    pipe = gb.GPipe(model, [2], checkpoint="never")
    with gb.pipeline.measure_memory(pipe) as meter:
        output = pipe(x)
        held = meter.ledger.live[0]
        del output
    # Beside parameters: the input, what the second layer is given and what it saves.
    assert held >= sum(p.nbytes for p in model.parameters()) + 2 * x.nbytes


class Jagged(nn.Module):
    """Work on pieces of the rows, as one jagged tensor or as they are."""

    def __init__(self, as_jagged: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.as_jagged = as_jagged

    def forward(self, x: Tensor) -> Tensor:
        """Apply the linear layer to pieces of 16 features, and leave out what is negative."""
        pieces = x.reshape(-1, 16)
        if not self.as_jagged:
            return self.linear(pieces).relu().view_as(x)
        ends = torch.tensor([0, 2, len(pieces)])
        nested = torch.nested.nested_tensor_from_jagged(pieces, ends)
        return self.linear(nested).relu().values().view_as(x)  # type: ignore[no-any-return]


def test_jagged_tensors_that_layers_save_are_their_values() -> None:
    """A layer that saves its input and its output as jagged tensors shares them with the chain."""
    found, plain = (
        gb.profile_model(
            nn.Sequential(nn.Linear(64, 64), Jagged(as_jagged), nn.Linear(64, 64)),
            torch.randn(64, 64),
            rows=(),
            timeout=0.0,
            as_pipeline=False,
        )
        for as_jagged in (True, False)
    )
    (row_ends,) = set(found.layers[1].saved) - set(plain.layers[1].saved)
    assert found.bytes_of([row_ends]) < 64
    assert set(plain.layers[1].saved) < set(found.layers[1].saved)


class Matrix(nn.Module):
    """Multiply by a sparse matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.eye(8).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        return torch.sparse.mm(self.matrix, x)


def test_sparse_parameters_are_profiled() -> None:
    """Their bytes are those of their indices and values."""
    model = nn.Sequential(nn.Linear(3, 3), Matrix())
    found = gb.profile_model(model, torch.randn(8, 3), rows=(), timeout=0.0, as_pipeline=False)
    assert found.layers[1].parameter_bytes == 8 * (2 * 8 + 4)


def test_jagged_tensors_that_share_only_where_rows_begin_are_not_aliases() -> None:
    """A later partition may write to one of them."""

    def two(x: Tensor) -> tuple[Tensor, Tensor]:
        nested = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 2, len(x)]))
        return nested, nested.sin()

    def write(pair: tuple[Tensor, Tensor]) -> Tensor:
        one, other = pair
        return (one.mul_(2) + other).values()

    model = nn.Sequential(nn.Linear(4, 4), Apply(two), Apply(write))
    x = torch.randn(6, 4)
    expected = model(x)
    pipe = gb.GPipe(model, [2, 1], checkpoint="never")
    torch.testing.assert_close(pipe(x), expected)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no processes")
def test_distributed_tensors_have_the_parts_of_this_process() -> None:
    """What else they are made of is no tensor."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        spread = torch.distributed.tensor.distribute_tensor(torch.ones(4, 4), mesh)
        assert bytes_of(spread) == 64 and [part.shape for part in plain_parts(spread)] == [(4, 4)]
        ledger = Ledger()
        ledger.hold([spread], 0)
        assert ledger.live == [64]
    finally:
        torch.distributed.destroy_process_group()


class Looks(nn.Module):
    """Multiplies by a quantised buffer."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.randint(-8, 8, (4, 4), dtype=torch.int8)
        self.register_buffer("table", Quantised(whole, torch.tensor(0.1)))

    def forward(self, x: Tensor) -> Tensor:
        """Return the products."""
        return x @ self.table.dequantize()


class Rounds(torch.optim.Optimizer):
    """Keeps its averages in whole numbers, as optimizers for large models do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        """Make the averages."""
        for parameter in self.param_groups[0]["params"]:
            whole = torch.zeros_like(parameter, dtype=torch.int8)
            scale = torch.ones((), device=parameter.device)
            self.state[parameter].setdefault("average", Quantised(whole, scale))


def test_tensors_count_with_what_they_are_made_of() -> None:
    """Tied parameters, buffers that a recompute has copies of, and the optimizer's state."""
    model = nn.Sequential(*_model(), nn.Linear(2, 4), nn.Linear(4, 4, bias=False), Looks())
    model[4].weight = model[1].weight
    found = gb.profile_model(
        model,
        torch.randn(4, 4),
        chunks=2,
        optimizer=Rounds,
        rows=(),
        timeout=0.0,
        as_pipeline=False,
    )
    n_bytes = 16 + 4
    (tie,) = found.ties
    assert (tie.layers, tie.parameter_bytes, tie.gradient_bytes) == ((1, 4), n_bytes, 0)
    assert found.layers[5].buffer_bytes == found.layers[5].kept_buffer_bytes == n_bytes
    assert found.layers[0].optimizer_bytes == n_bytes + 4 + 4
    assert found.matches(model)
