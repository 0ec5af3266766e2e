"""verify: a pipeline that does what the plain model does passes, and the report says what ran."""

from __future__ import annotations

import copy
import itertools
import threading
from typing import Any

import pytest
import torch
from chains import batchnorm_chain
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from verify_cases import CHAINS, dropouts, make, rows

import gpipebal as gb
from gpipebal.pipeline import GPipe
from gpipebal.schedule import CHECKPOINT_MODES
from gpipebal.verification import Agreement

pytestmark = pytest.mark.timeout(60)
MODES = pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)


@MODES
@pytest.mark.parametrize("name", CHAINS)
def test_an_equal_pipeline_passes(name: str, checkpoint: Any) -> None:
    """Outputs, gradients and buffers of every kind of chain are compared, and agree."""
    model, pipe, sample = make(name, checkpoint=checkpoint)
    report = gb.verify(model, pipe, sample)
    n_inputs = isinstance(sample, Tensor) and sample.requires_grad
    assert report.gradients.count == len(list(model.parameters())) + n_inputs
    assert report.buffers.count == len(list(model.buffers()))
    assert report.outputs.count == (2 if name == "integers and a dict" else 1)
    assert report.losses.count == 0
    assert report.runs == ("pipe(sample)",)
    for agreement in (report.outputs, report.gradients, report.buffers):
        assert agreement.difference < 1e-12


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_an_equal_pipeline_passes_for_every_split(data: st.DataObject) -> None:
    """Whatever the rows, chunks, balance, mode and schedule: a correct pipeline passes."""
    cuts = data.draw(st.sets(st.integers(1, 4)))
    edges = [0, *sorted(cuts), 5]
    modes = [data.draw(st.sampled_from(CHECKPOINT_MODES)) for _ in edges[1:]]
    model = dropouts().double()
    pipe = GPipe(
        model,
        [end - start for start, end in itertools.pairwise(edges)],
        chunks=data.draw(st.integers(1, 5)),
        checkpoint=modes,
    )
    report = gb.verify(model, pipe, rows(data.draw(st.integers(1, 6)), 3))
    assert report.gradients.count == 4


@MODES
def test_deferred_batch_normalisation(checkpoint: Any) -> None:
    """The plain model defers its statistics where the pipeline does, and nowhere else."""
    model, pipe, sample = make(
        "batch normalisation", checkpoint=checkpoint, deferred_batch_norm=True
    )
    report = gb.verify(model, pipe, sample, loss_fn=lambda y: y.square().mean())
    assert report.buffers.count == 6
    assert type(model[1]) is nn.BatchNorm2d
    half = nn.Sequential(*list(model)[:4], *list(pipe)[4:])
    gb.verify(half, GPipe(half, [4, 4], chunks=2, checkpoint=checkpoint), sample)
    other = GPipe(model, [4, 4], chunks=2, deferred_batch_norm=True)
    other._modules["1"] = model[1]
    gb.verify(model, other, sample)


def test_eval_mode_and_frozen_models_have_their_modes() -> None:
    """In eval mode dropout is off in both; without gradients the report says why."""
    model, pipe, sample = make("dropout")
    pipe.eval()
    report = gb.verify(model, pipe, sample)
    assert report.gradients.count == 5
    gb.verify(copy.deepcopy(model).train(), pipe, sample)  # the pipeline's modes count
    pipe.train().requires_grad_(False)
    report = gb.verify(model, pipe, sample.detach())
    assert (report.gradients.count, report.without_gradients) == (0, "nothing needs one")
    assert gb.verify(model, pipe, sample).gradients.count == 1
    report = gb.verify(model, pipe, sample.detach(), loss_fn=lambda y: y.mean())
    assert (report.losses.count, report.without_gradients) == (1, "nothing needs one")


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_outputs_and_buffers_are_compared(context: Any) -> None:
    """Under no_grad and inference_mode there are outputs, losses and buffers, no gradients."""
    model, pipe, sample = make("batch normalisation")
    with context():
        report = gb.verify(model, pipe, sample, loss_fn=lambda y: y.mean())
        sample = rows(6, 2, 8, 8)
        assert gb.verify(model, pipe, sample).buffers.count == 6
    assert (report.outputs.count, report.losses.count, report.buffers.count) == (1, 1, 6)
    assert report.without_gradients == "they are switched off"


class Attend(nn.Module):
    """Mix positions by a table that every row shares; sequence first, rows along dim 1."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, value: Tensor, *, table: Tensor, scale: float = 1.0) -> Tensor:
        return self.linear(torch.einsum("st,trc->src", table, value)).tanh() * scale


@MODES
def test_dimensions_and_keywords(checkpoint: Any) -> None:
    """The plain model's input is parted as the pipeline's, and its output joined likewise."""
    model = nn.Sequential(Attend(), nn.Linear(3, 2)).double()
    pipe = GPipe(
        model,
        [1, 1],
        chunks=3,
        checkpoint=checkpoint,
        in_dims=1,
        keyword_dims={"table": None},
        out_dims=1,
    )
    keywords = {"table": rows(4, 4, grad=True), "scale": 2.0}
    report = gb.verify(model, pipe, rows(4, 7, 3, grad=True), keywords=keywords)
    assert report.gradients.count == 6
    target = rows(4, 7, 2)
    report = gb.verify(
        model,
        pipe,
        rows(4, 7, 3),
        keywords=keywords,
        loss_fn=nn.functional.mse_loss,
        target=target,
        target_dims=1,
    )
    assert report.losses.count == 1


def test_values_of_a_class_that_checks_what_it_is_made_of() -> None:
    """Their leaves have names, although no object of the class can be made without tensors."""

    class Pack(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return pack_padded_sequence(x, [x.shape[1]] * len(x), batch_first=True)

    class Both(nn.Module):
        def forward(self, x: Any) -> Any:
            return {"words": x, "padded": pad_packed_sequence(x, batch_first=True)[0]}

    class Grow(nn.Module):
        def forward(self, x: Any) -> Any:
            return {"words": x["words"]._replace(data=x["words"].data * 2), "padded": x["padded"]}

    model = nn.Sequential(nn.Linear(3, 4), Pack(), Both(), Grow()).double()
    pipe = GPipe(model, [2, 1, 1], checkpoint="always")
    report = gb.verify(model, pipe, rows(6, 2, 3))
    assert report.outputs.count == 3  # the words, how many there are at each time, and the padded
    assert report.gradients.count == 2


def test_outputs_without_rows_are_stacked() -> None:
    """out_dims=None stacks the micro-batches' values in both."""

    class Total(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum()

    model = nn.Sequential(nn.Linear(3, 2), Total()).double()
    assert gb.verify(model, GPipe(model, [1, 1], chunks=2, out_dims=None), rows(5, 3))


def test_first_layers_may_write_to_their_input() -> None:
    """An in-place first layer harms neither the comparison nor the caller's input."""
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 2)).double()
    sample = rows(5, 3, grad=True)
    before = sample.detach().clone()
    for context in (torch.enable_grad, torch.no_grad):
        with context():
            gb.verify(model, GPipe(model, [1, 1], chunks=2), sample)
    assert torch.equal(sample, before)


@MODES
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_is_compared_in_the_call_and_in_every_schedule(
    reduction: Any, checkpoint: Any
) -> None:
    """With a loss function, step has the loss and gradients of the plain model too."""
    model, pipe, _ = make("batch normalisation", checkpoint=checkpoint)
    model.append(nn.Dropout()).double()
    pipe = GPipe(model, [2, 3, 4], chunks=4, checkpoint=checkpoint)
    report = gb.verify(
        model,
        pipe,
        rows(7, 2, 8, 8),
        loss_fn=nn.MSELoss(reduction=reduction),
        target=rows(7, 3) if reduction == "mean" else rows(7, 3, grad=True),
        reduction=reduction,
    )
    assert report.runs == (
        "pipe(sample)",
        "pipe.step(sample, schedule='gpipe')",
        "pipe.step(sample, schedule='1f1b')",
    )
    assert (report.losses.count, report.gradients.count) == (1, len(list(model.parameters())))


def test_single_precision_passes_by_default() -> None:
    """The default tolerances let float32 pass, where a bias has a gradient of rounding alone."""
    model = batchnorm_chain()
    sample = torch.randn(16, 2, 8, 8)
    pipe = GPipe(model, [4, 4], chunks=4)
    for scale in (1e-4, 1.0, 1e4):
        gb.verify(model, pipe, sample, loss_fn=lambda y, scale=scale: scale * y.square().mean())
    # Behind normalisation a mean is zero but for rounding, and so are all gradients before.
    model.append(nn.BatchNorm1d(3))
    gb.verify(model, GPipe(model, [4, 5], chunks=4), sample[:9], loss_fn=lambda y: y.mean())


def test_the_plain_model_computes_with_the_threads_of_a_partition() -> None:
    """Sums that are parted by threads are the same to the bit, so that rounding cannot grow."""
    seen = set()

    class Ask(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.add(torch.get_num_threads())
            return x

    model = nn.Sequential(nn.Linear(3, 3), Ask())
    before = torch.get_num_threads()
    gb.verify(model, GPipe(model, [1, 1], threads_per_partition=before + 2), torch.ones(4, 3))
    assert (seen, torch.get_num_threads()) == ({before + 2}, before)


def test_autocast_and_default_device_of_the_caller_hold_for_both() -> None:
    """Under autocast both compute in bfloat16, and gradients may differ by its rounding."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    seen = []
    model[1].register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    sample = torch.randn(12, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("cpu"):
        gb.verify(model, GPipe(model, [1, 2], chunks=4, checkpoint="always"), sample)
    assert set(seen) == {torch.bfloat16}


@pytest.mark.parametrize("loss_fn", [None, torch.mean])
def test_both_go_back_without_autocast(loss_fn: Any) -> None:
    """Workers do in any case, and the plain model has to be compared with that."""
    is_on: list[bool] = []

    class Ask(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            is_on.append(torch.is_autocast_enabled("cpu"))
            return gradient

    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = Ask.apply(x)
            return y

    model = nn.Sequential(nn.Linear(4, 4), Asks(), nn.Linear(4, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        gb.verify(model, GPipe(model, [1, 2], chunks=2), torch.ones(4, 4), loss_fn=loss_fn)
        assert torch.is_autocast_enabled("cpu")
    assert len(is_on) >= 4 and not any(is_on)


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_layer_gets_the_same_values_in_both() -> None:
    """A layer without values before its first forward makes them inside each copy."""
    model = nn.Sequential(nn.LazyLinear(4, dtype=torch.float64), nn.Tanh())
    report = gb.verify(model, GPipe(model, [1, 1], chunks=2), rows(4, 3))
    assert report.gradients.count == 2
    assert torch.nn.parameter.is_lazy(model[0].weight)


class Guarded(nn.Module):
    """Keeps its last result, which has a graph, behind a lock, which cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.lock = threading.Lock()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            self.last = self.inside(x)
            return self.last


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_layers_that_deepcopy_refuses_are_copied(checkpoint: Any) -> None:
    """Layers that keep tensors of a graph, as torch's old weight_norm, or locks; also after use."""
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), Guarded(), nn.Linear(4, 2))
    pipe = gb.GPipe(model, [2, 1], chunks=2, checkpoint=checkpoint)
    x = torch.randn(6, 4)
    pipe(x).sum().backward()
    with pytest.raises((RuntimeError, TypeError)):
        copy.deepcopy(model)
    last = model[1].last
    assert gb.verify(model, pipe, x).outputs.count == 1
    assert model[1].last is last


def test_the_report_reads_well() -> None:
    """Printed, a report says what ran, how much was compared and how well it agrees."""
    model, pipe, sample = make("batch normalisation")
    report = gb.verify(model, pipe, sample, loss_fn=lambda y: y.mean())
    lines = str(report).splitlines()
    assert lines[0] == (
        "The pipeline does what the plain model does over the same micro-batches: pipe(sample), "
        "pipe.step(sample, schedule='gpipe'), pipe.step(sample, schedule='1f1b'); "
        "micro-batches=3, balance=[2, 3, 3]"
    )
    assert [line.split(",")[0] for line in lines[1:]] == [
        "  outputs: 1",
        "  losses: 1",
        "  gradients: 10",
        "  buffers: 6",
    ]
    with torch.no_grad():
        report = gb.verify(model, pipe, sample)
    assert "  gradients: none, they are switched off" in str(report)
    assert str(Agreement.of({"a": 0.0})) == "the same to the bit"
    assert str(Agreement.of({"a": 0.0, "b": 2e-9})) == "largest relative difference 2e-09 (b)"


@pytest.mark.cuda
@MODES
def test_on_cuda(checkpoint: Any) -> None:
    """Two partitions on one CUDA device agree with the plain model on it."""
    model = batchnorm_chain().double()
    model.append(nn.Dropout())
    pipe = GPipe(model, [4, 5], devices=["cuda:0"] * 2, chunks=3, checkpoint=checkpoint)
    before = torch.cuda.get_rng_state(0)
    report = gb.verify(
        model,
        pipe,
        rows(7, 2, 8, 8, grad=True),
        loss_fn=nn.functional.mse_loss,
        target=rows(7, 3).cuda(),
    )
    assert report.gradients.count == len(list(model.parameters())) + 1
    assert torch.equal(torch.cuda.get_rng_state(0), before)
