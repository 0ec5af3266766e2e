"""Layers that change, keep state or want gradients for themselves: as in the plain model."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from chains import run_plain
from skip_layers import Join, Keep
from torch import Tensor, nn

import gpipebal as gb
from gpipebal.errors import DuplicateLayerError, PipelineError
from gpipebal.pipeline import GPipe, trace
from gpipebal.pipeline.layers.buffers import SMALL
from gpipebal.pipeline.values.tensors import are_equal, bytes_of, copy_of, plain_parts
from gpipebal.schedule import CHECKPOINT_MODES, CheckpointMode

pytestmark = pytest.mark.timeout(120)
MODES = pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)


def nested() -> nn.Sequential:
    """A chain with a place inside its first layer that can be filled later."""
    first = nn.Sequential(nn.Linear(4, 4), nn.Identity())
    return nn.Sequential(first, nn.Sequential(nn.Linear(4, 4), nn.Identity())).double()


def same_step(pipe: GPipe, plain: nn.Module, inputs: Tensor) -> None:
    """Compare gradients and buffers after a step with those of the plain model."""
    for model in (pipe, plain):
        model.zero_grad()
    pipe(inputs).square().sum().backward()
    run_plain(plain, inputs, pipe.chunks).square().sum().backward()
    for (name, mine), theirs in zip(pipe.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, msg=name)
    for (name, own), other in zip(pipe.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(own, other, msg=name)


@MODES
def test_a_module_inside_a_layer_is_replaced(checkpoint: CheckpointMode) -> None:
    """A module put into a layer after the first step has its state, and counts, like the others."""
    plain = nested()
    pipe = GPipe(copy.deepcopy(plain), [1, 1], chunks=4, checkpoint=checkpoint)
    inputs = torch.randn(8, 4, dtype=torch.double)
    same_step(pipe, plain, inputs)
    for model in (pipe, plain):
        model[0][1] = nn.BatchNorm1d(4).double()  # type: ignore[index, operator, union-attr]
    same_step(pipe, plain, inputs)
    loss = pipe(inputs).sum()
    with torch.no_grad():
        pipe[0][1].weight.mul_(3)  # type: ignore[index, union-attr, operator]
    if checkpoint != "never":
        with pytest.raises(RuntimeError, match="partition 0 cannot be recomputed: since"):
            loss.backward()


def test_a_module_replaced_between_forward_and_backward() -> None:
    """A recompute would run another module than its forward did: refused."""
    pipe = GPipe(nested(), [1, 1], chunks=2, checkpoint="always")
    loss = pipe(torch.ones(4, 4, dtype=torch.double)).sum()
    pipe[1][1] = nn.Tanh()  # type: ignore[operator]
    with pytest.raises(RuntimeError, match="partition 1 cannot be recomputed: since"):
        loss.backward()


@MODES
def test_parameters_that_are_tied_later(checkpoint: CheckpointMode) -> None:
    """A parameter that a second partition gets after the first step is summed up as tied."""
    plain = nested()
    pipe = GPipe(copy.deepcopy(plain), [1, 1], chunks=4, checkpoint=checkpoint)
    inputs = torch.randn(8, 4, dtype=torch.double)
    same_step(pipe, plain, inputs)
    pool = pipe._started().pool
    for model in (pipe, plain):
        model[1][0].weight = model[0][0].weight  # type: ignore[index, operator, union-attr]
    same_step(pipe, plain, inputs)
    assert pipe._started().pool is pool


def test_parameters_that_are_tied_later_across_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter that comes to stand on two devices is refused at the next mini-batch."""
    pipe = GPipe(nested(), [1, 1])
    pipe(torch.ones(2, 4, dtype=torch.double))
    object.__setattr__(pipe, "devices", [torch.device("cpu"), torch.device("meta")])
    pipe[1][0].weight = pipe[0][0].weight  # type: ignore[index, operator, union-attr]
    with pytest.raises(DuplicateLayerError, match="a parameter stands twice in the chain"):
        pipe(torch.ones(2, 4, dtype=torch.double))


@pytest.mark.parametrize("later", [False, True])
def test_a_layer_that_is_taken_away_is_missed(later: bool) -> None:
    """Who takes it behind the pipeline's back is told at the next mini-batch, first or not."""
    pipe, inputs = GPipe(nested(), [1, 1]), torch.ones(2, 4, dtype=torch.double)
    if later:
        pipe(inputs)
    pipe._modules["1"] = None
    with pytest.raises(PipelineError, match=r"taken from a pipeline: it has 1 \(expected 2"):
        pipe(inputs)
    del pipe._modules["1"]
    assert [len(part) for part in pipe.partitions] == [1, 0]
    with pytest.raises(PipelineError, match=r"taken from a pipeline: it has 1 \(expected 2"):
        pipe(inputs)


def test_skips_that_are_put_into_layers_later() -> None:
    """A skip between modules inside of layers is routed from the mini-batch after it was made."""
    plain = nested()
    pipe = GPipe(copy.deepcopy(plain), [1, 1], chunks=2)
    inputs = torch.randn(4, 4, dtype=torch.double)
    same_step(pipe, plain, inputs)
    kept = Keep(4).double()
    for model, keep in ((pipe, kept), (plain, copy.deepcopy(kept))):
        model[0][1], model[1][1] = keep, Join()  # type: ignore[index, operator]
    same_step(pipe, plain, inputs)


class Cache(nn.Module):
    """Add a mask from a table that grows with the input, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor
        self.register_buffer("table", torch.arange(SMALL, dtype=torch.double), persistent=False)
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.double))

    def forward(self, x: Tensor) -> Tensor:
        if self.table.numel() < SMALL + x.shape[1]:
            self.table = torch.arange(SMALL + x.shape[1], dtype=torch.double)
        return x * self.weight * self.table[: x.shape[1]]


@MODES
def test_a_large_cache_that_grows(checkpoint: CheckpointMode) -> None:
    """A large buffer in whose place a layer puts a larger one is no reason to refuse anything."""
    plain = nn.Sequential(Cache(), nn.Identity())
    pipe = GPipe(copy.deepcopy(plain), [1, 1], chunks=2, checkpoint=checkpoint)
    for width in (2, 2, 5, 3, 9):
        same_step(pipe, plain, torch.randn(4, width, dtype=torch.double))
        # And it is copied for no recompute: nobody writes to it.
        assert not any(p.buffers._written for p in pipe._started().partitions)


class Moving(nn.Module):
    """Put another tensor into the place of a large buffer in every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Tensor
        self.register_buffer("seen", torch.ones(SMALL, dtype=torch.double))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen * 2
        return x * self.seen[0]


@MODES
def test_a_large_buffer_that_is_replaced_every_time(checkpoint: CheckpointMode) -> None:
    """A recompute sees the tensor that its forward saw, and leaves the latest in its place."""
    plain = nn.Sequential(nn.Linear(3, 3).double(), Moving())
    pipe = GPipe(copy.deepcopy(plain), [1, 1], chunks=3, checkpoint=checkpoint)
    for _ in range(2):
        same_step(pipe, plain, torch.randn(6, 3, dtype=torch.double))


@MODES
def test_lazy_layers_with_buffers(checkpoint: CheckpointMode) -> None:
    """Running statistics of a lazy batch normalisation are right from the first mini-batch on."""
    linear = nn.Linear(3, 4).double()
    plain, mine = (
        nn.Sequential(copy.deepcopy(linear), nn.LazyBatchNorm1d(dtype=torch.double))
        for _ in range(2)
    )
    pipe = GPipe(mine, [1, 1], chunks=2, checkpoint=checkpoint)
    for _ in range(2):
        same_step(pipe, plain, torch.randn(6, 3, dtype=torch.double))


def test_lazy_batch_normalisation_is_not_deferred_silently() -> None:
    """It cannot be deferred before it has its channels, and says so."""
    with pytest.warns(UserWarning, match="lazy batch normalisation is left as it is"):
        GPipe(nn.Sequential(nn.LazyBatchNorm1d()), [1], deferred_batch_norm=True)


class Force(nn.Module):
    """Return minus the gradient of an energy by the input, which it lets require one."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            if not x.requires_grad:
                x.requires_grad_()
            energy = self.energy(x).tanh().sum()
            (gradient,) = torch.autograd.grad(energy, x, create_graph=True)
        return -gradient


@MODES
@pytest.mark.parametrize("how", ["call", "gpipe", "1f1b"])
def test_a_first_layer_that_wants_the_gradient_of_its_input(
    checkpoint: CheckpointMode, how: str
) -> None:
    """Force fields train in every mode; nobody else gets the gradient that the layer asked for."""
    plain = nn.Sequential(Force(), nn.Linear(3, 1)).double()
    inputs = torch.randn(6, 3, dtype=torch.double)
    for balance in ([2], [1, 1]):
        pipe = GPipe(copy.deepcopy(plain), balance, chunks=3, checkpoint=checkpoint)
        plain.zero_grad()
        plain(inputs.clone()).square().mean().backward()
        if how == "call":
            pipe(inputs).square().mean().backward()
        else:
            pipe.step(inputs, loss_fn=lambda y: y.square().mean(), schedule=how)
        for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
        assert not inputs.requires_grad


@pytest.mark.parametrize("name", ["_runtime", "_recorder", "_ledger", "_streams"])
def test_layers_with_the_names_of_the_pipelines_own_attributes(name: str) -> None:
    """A layer may be called as anything in the pipeline is, and is neither lost nor in the way."""
    layers: OrderedDict[str, Any] = OrderedDict(a=nn.Linear(2, 2))
    layers[name] = nn.Linear(2, 2)
    pipe = GPipe(nn.Sequential(layers), [1, 1], chunks=2)
    with trace(pipe) as recorder:
        pipe(torch.ones(4, 2)).sum().backward()
    assert recorder.timeline.events
    pipe.close()
    assert pipe[1] is layers[name]
    assert copy.deepcopy(pipe)(torch.ones(4, 2)).shape == (4, 2)
    assert layers[name].weight.grad is not None


@pytest.mark.parametrize("name", ["chunks", "balance", "_runtime"])
def test_layers_with_the_names_of_settings_are_replaced(name: str) -> None:
    """What is put in the place of a layer is that layer, and no setting."""
    layers = OrderedDict({"a": nn.Linear(2, 2), name: nn.Linear(2, 2)})
    pipe = GPipe(nn.Sequential(layers), [1, 1], chunks=2)
    pipe(torch.ones(4, 2))
    pipe[1] = head = nn.Linear(2, 3)
    assert pipe(torch.ones(4, 2)).shape == (4, 3)
    assert pipe[1] is head and (pipe.chunks, pipe.balance) == (2, [1, 1])


class CutOff(nn.Module):
    """Cut the input off from its graph, in place, and train what comes after it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.detach_())


@MODES
def test_a_first_layer_that_cuts_its_input_off(checkpoint: CheckpointMode) -> None:
    """Nothing goes back to the partition before, as in the plain model."""
    plain = nn.Sequential(nn.Linear(3, 3), CutOff()).double()
    pipe = GPipe(copy.deepcopy(plain), [1, 1], chunks=2, checkpoint=checkpoint)
    inputs = torch.randn(6, 3, dtype=torch.double)
    for model in (plain, pipe):
        model(inputs).square().mean().backward()
    assert pipe[0].weight.grad is None and plain[0].weight.grad is None
    for mine, theirs in zip(pipe[1].parameters(), plain[1].parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


class Graph(nn.Module):
    """Mix rows by a sparse matrix, as graph networks do."""

    def __init__(self, layout: Any, n: int) -> None:
        super().__init__()
        # Made of indices: the dense matrix would have 200 MB for the large ones.
        places, values = torch.arange(n).repeat(2, 1), 2 * torch.ones(n).double()
        diagonal = torch.sparse_coo_tensor(places, values, check_invariants=True).coalesce()
        self.register_buffer("adjacency", diagonal.to_sparse(layout=layout))
        self.linear = nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.adjacency @ self.linear(x[0])
        return mixed[None]


@MODES
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc], ids=str)
@pytest.mark.parametrize("n", [3, 5000])
@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support:UserWarning")
def test_sparse_buffers(checkpoint: CheckpointMode, layout: Any, n: int) -> None:
    """Kept for the recompute like others, and counted: small ones and large ones."""
    plain, other = (nn.Sequential(Graph(layout, n), nn.Tanh(), Graph(layout, n)) for _ in range(2))
    for parameter, same in zip(other.parameters(), plain.parameters(), strict=True):
        parameter.data.copy_(same.data)
    pipe = GPipe(other, [2, 1], chunks=2, checkpoint=checkpoint)
    same_step(pipe, plain, torch.randn(2, n, 4, dtype=torch.double))
    if checkpoint == "always":
        profile = gb.profile_model(
            plain, torch.randn(2, n, 4).double(), chunks=2, timeout=0, as_pipeline=False
        )
        buffer = plain[0].adjacency
        assert isinstance(buffer, Tensor)
        # torch makes the indices of a compressed layout as a part of something larger.
        held = sum(part.untyped_storage().nbytes() for part in plain_parts(buffer))
        assert profile.layers[0].buffer_bytes == held >= bytes_of(buffer) > 8 * n


def test_what_is_not_a_number_in_a_shared_buffer_has_not_been_written_to() -> None:
    """Two partitions read a buffer that is not equal to itself."""

    class Reads(nn.Module):
        def __init__(self, buffer: Tensor) -> None:
            super().__init__()
            self.register_buffer("buffer", buffer)

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.nan_to_num(self.buffer)

    buffer = torch.tensor([1.0, float("nan"), 2.0, -0.0])
    pipe = GPipe(nn.Sequential(Reads(buffer), Reads(buffer)), [1, 1], chunks=2)
    assert pipe(torch.zeros(2, 4)).tolist() == [[2.0, 0.0, 4.0, 0.0]] * 2


def test_equal_elements() -> None:
    """Shapes, layouts, dtypes and devices count, and which places are not numbers."""
    one, nan = torch.tensor([1.0, 2.0]), torch.tensor([1.0, float("nan")])
    assert are_equal(one, one.clone()) and are_equal(nan, nan.clone())
    assert are_equal(nan.to_sparse(), nan.clone().to_sparse())
    unlike = [one[:1], one.to_sparse(), one.double(), one.to("meta")]
    for other in (nan, *unlike, None, torch.tensor([1.0, 3.0])):
        assert not are_equal(one, other)
    assert not are_equal(nan, nan.flip(0))
    assert not are_equal(one.to_sparse(), torch.tensor([1.0, 0.0]).to_sparse())


@pytest.mark.parametrize(
    "dtype", ["float4_e2m1fn_x2", "float8_e4m3fn", "complex32", "uint16", "uint4"]
)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_large_buffers_of_any_dtype(dtype: str) -> None:
    """Those that torch cannot compare or copy, such as weights of four bits, are both too."""
    kind = getattr(torch, dtype, None)
    if kind is None:
        pytest.skip("a torch without this dtype")
    raw = torch.arange(1 << 18).remainder(100).to(torch.uint8).view(8, -1)
    packed, other = raw.view(kind), raw.flip(1).view(kind)
    layer = nn.Linear(2, 2)
    layer.register_buffer("packed", packed)
    pipe = GPipe(nn.Sequential(layer, nn.Linear(2, 2)), [1, 1], chunks=2)
    pipe(torch.ones(4, 2)).sum().backward()
    assert bytes_of(packed) > SMALL
    assert are_equal(packed, copy_of(packed)) and are_equal(packed.T, copy_of(packed).T)
    assert are_equal(packed[:, ::2], copy_of(packed[:, ::2]))
    assert not are_equal(packed, other)
