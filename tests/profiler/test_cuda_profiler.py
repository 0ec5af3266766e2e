"""Profiles on CUDA, and the memory that plans predict of them. Skipped without a device."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from profiler.test_optimizer_memory import OPTIMIZERS, wide
from profiler.test_profiler_ways import memory_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import gpipebal as gb
from gpipebal.pipeline import GPipe, measure_memory
from gpipebal.planner import evaluate
from gpipebal.schedule import CHECKPOINT_MODES

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(120)]
CUDA = "cuda:0"
MIB = 2**20
#: Rows of a micro-batch, and width of a layer: 4 MiB each for a weight and a value.
WIDE = 1024
#: What the allocator may round up, for the few tensors that are there at once.
ROUNDING = 16 * 512


def profile(model: nn.Module, sample: Any, **options: Any) -> gb.Profile:
    """Measure as little as possible."""
    return gb.profile_model(model, sample, **{"timeout": 0, "progress": False, **options})


def small() -> nn.Sequential:
    """A chain of small layers of several kinds."""
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))


def large(n_layers: int = 4) -> nn.Sequential:
    """A chain whose weights and values are all of 4 MiB: the allocator splits its blocks evenly."""
    pairs = [(nn.Linear(WIDE, WIDE, bias=False), nn.Tanh()) for _ in range(n_layers)]
    return nn.Sequential(*[layer for pair in pairs for layer in pair])


class Recurrent(nn.Module):
    """An LSTM that hands on its outputs alone."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]  # type: ignore[no-any-return]


def scattered(model: nn.Sequential) -> nn.Sequential:
    """Give every parameter memory of its own."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


@pytest.mark.parametrize("model_device", ["cpu", CUDA])
def test_layers_have_times_of_the_device_and_of_the_host(model_device: str) -> None:
    """The first CUDA device is the default; every layer with work has both times."""
    model = small().to(model_device)
    found = profile(model, torch.randn(8, 8), chunks=2)
    assert found.provenance["device_type"] == "cuda"
    assert found.provenance["one_at_a_time"] == (model_device == "cpu")
    assert [other.rows for other in found.other_sizes]
    for layer in found.layers:
        assert layer.forward_time > 0 and layer.backward_time > 0
        assert layer.forward_host_time is not None and layer.forward_host_time > 0
        assert layer.backward_host_time is not None and layer.backward_host_time > 0


@pytest.mark.parametrize("way", [{}, {"one_at_a_time": True}, {"share_identical": True}])
def test_memory_is_what_the_allocator_says(way: dict[str, Any]) -> None:
    """Known tensors have their bytes, the allocator's rounding aside."""
    model = large(2).to(CUDA)
    found = profile(model, torch.randn(2 * WIDE, WIDE), chunks=2, rows=(), **way)
    one = 4 * MIB
    for k, layer in enumerate(found.layers):
        is_linear, has_gradient = k % 2 == 0, k > 0
        assert layer.parameter_bytes == layer.gradient_bytes == (one if is_linear else 0)
        assert layer.output_bytes == one
        # Saved is the input of a product, and the output of a tanh.
        assert found.bytes_of(layer.saved) == one
        backward = one * (is_linear + has_gradient)
        for name, n_bytes in (
            ("forward_peak_bytes", one),
            ("no_grad_forward_peak_bytes", one),
            ("backward_peak_bytes", backward),
            ("accumulating_peak_bytes", backward),
        ):
            assert n_bytes <= getattr(layer, name) <= n_bytes + ROUNDING, (k, name)


def test_what_a_library_keeps_from_its_first_call_on_is_no_layers() -> None:
    """A workspace that stays is the device's; one that is needed in every call is the layer's."""
    kept: list[Tensor] = []

    class Work(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
            return x + 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            if not kept:
                kept.append(gradient.new_empty(64 * MIB))
            gradient.new_empty(MIB)
            return gradient * 2

    class Library(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Work.apply(x)  # type: ignore[no-any-return]

    model = nn.Sequential(nn.Linear(8, 8), Library()).to(CUDA)
    found = profile(model, torch.randn(4, 8), rows=())
    assert 4 * MIB <= found.layers[1].backward_peak_bytes < 8 * MIB


@pytest.mark.parametrize("make", [small, lambda: nn.Sequential(Recurrent(), nn.Linear(8, 4))])
def test_layers_alone_have_the_memory_that_they_have_in_the_chain(
    make: Callable[[], nn.Sequential],
) -> None:
    """One at a time, and of identical ones only one: the same bytes and storages."""
    model = make().to(CUDA)
    sample = torch.randn(8, 8) if isinstance(model[0], nn.Linear) else torch.randn(8, 5, 8)
    options: dict[str, Any] = {"chunks": 2, "rows": (2,), "loss_fn": lambda y: y.square().mean()}
    whole = profile(model, sample, **options)
    for way in ({"one_at_a_time": True}, {"share_identical": True}):
        found = memory_of(profile(model, sample, **options, **way))
        for mine, theirs in zip(found, memory_of(whole), strict=True):
            assert mine == theirs


@pytest.mark.parametrize("model_device", ["cpu", CUDA])
@pytest.mark.parametrize("way", [{}, {"one_at_a_time": True}, {"share_identical": True}])
@pytest.mark.parametrize("in_one_piece", [False, True])
def test_weights_of_recurrent_layers_are_measured_in_one_piece(
    in_one_piece: bool, way: dict[str, Any], model_device: str
) -> None:
    """They are never compacted in a call (a warning, so an error); the model's stay put."""
    model = nn.Sequential(nn.Linear(8, 8), Recurrent(), nn.Linear(8, 4)).to(model_device)
    if not in_one_piece:
        scattered(model)
    before = [parameter.data_ptr() for parameter in model.parameters()]
    found = profile(model, torch.randn(6, 5, 8), chunks=2, rows=(), device=CUDA, **way)
    assert found.layers[1].forward_time > 0
    assert [parameter.data_ptr() for parameter in model.parameters()] == before
    if in_one_piece:
        model.to(CUDA)(torch.randn(6, 5, 8, device=CUDA)).sum().backward()


def test_a_pipeline_runs_recurrent_layers_in_one_piece() -> None:
    """Layers that are moved to their device, or are there already, have their weights together."""
    for model in (Recurrent(), scattered(nn.Sequential(Recurrent()).to(CUDA))[0]):
        pipe = GPipe(nn.Sequential(nn.Linear(8, 8), model), [1, 1], devices=[CUDA, CUDA], chunks=2)
        pipe(torch.randn(4, 5, 8)).sum().backward()


@pytest.mark.parametrize("model_device", ["cpu", CUDA])
def test_a_profile_leaves_the_model_and_the_device_as_they_were(model_device: str) -> None:
    """Parameters, buffers, gradients, modes, random numbers and the model's memory stay."""
    model = nn.Sequential(*small(), nn.Dropout(0.5)).to(model_device)
    model[1].eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    places = [parameter.data_ptr() for parameter in model.parameters()]
    random = torch.cuda.get_rng_state(0)
    profile(
        model,
        torch.randn(8, 8),
        chunks=2,
        loss_fn=lambda y: y.square().mean(),
        optimizer=torch.optim.Adam(model.parameters()),
    )
    assert torch.equal(torch.cuda.get_rng_state(0), random)
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training and not model[1].training


@pytest.mark.parametrize("model_device", ["cpu", CUDA])
@pytest.mark.parametrize("instance", [False, True])
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.Adafactor])
def test_the_loss_and_the_optimizer_have_terms(
    make: type[torch.optim.Optimizer], instance: bool, model_device: str
) -> None:
    """A step's terms are measured on the device, of a factory and of an optimizer."""
    model = small().to(model_device)
    found = profile(
        model,
        torch.randn(8, 8),
        chunks=2,
        rows=(),
        loss_fn=cross_entropy,
        target=torch.randint(4, (8,)),
        optimizer=make(model.parameters()) if instance else make,
    )
    step = found.step
    for loss in (step.loss, step.whole_loss):
        assert loss is not None and loss.forward_time > 0 and loss.backward_time > 0
    assert step.gather_time is not None and step.gather_time > 0
    assert step.optimizer_time is not None and step.optimizer_time > 0
    assert all(layer.optimizer_bytes is not None for layer in found.layers)
    if make is torch.optim.Adam:
        assert step.optimizer_together
        assert found.layers[0].optimizer_bytes == 2 * found.layers[0].parameter_bytes + 2 * 4


def test_a_balance_by_time_runs() -> None:
    """From the model on the host to a pipeline on the device, with the defaults."""
    model = nn.Sequential(*small(), *small()[2:3], nn.Linear(4, 4))
    balance = gb.balance_by_time(model, torch.randn(8, 8), 2, chunks=2, timeout=0.1)
    assert len(balance) == 2 and sum(balance) == len(model)
    pipe = GPipe(model, balance, devices=[CUDA, CUDA], chunks=2)
    pipe(torch.randn(8, 8)).sum().backward()


@pytest.mark.parametrize("way", [{}, {"one_at_a_time": True}])
def test_a_profile_works_on_the_callers_stream(way: dict[str, Any]) -> None:
    """Layers run on the stream that is current where the profile is asked for."""
    seen: set[int] = set()

    class Look(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.add(torch.cuda.current_stream().cuda_stream)
            return x * 2

    model = nn.Sequential(nn.Linear(8, 8), Look()).to(CUDA)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for place in (stream, None):
        seen.clear()
        with nullcontext() if place is None else torch.cuda.stream(place):
            current = torch.cuda.current_stream().cuda_stream
            found = profile(model, torch.randn(4, 8, device=CUDA), **way)
        assert seen == {current}
        assert all(layer.forward_time > 0 for layer in found.layers)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_of_the_optimizer_is_counted(name: str) -> None:
    """The peak of a partition whose optimizer's step is the largest moment."""
    model, sample, optimizer = wide().to(CUDA), torch.randn(4, 8), OPTIMIZERS[name]
    plan = evaluate(
        profile(model, sample, chunks=2, rows=(), optimizer=optimizer),
        [4, 1],
        checkpoint="never",
        shared_memory=True,
    )
    pipe = GPipe(model, [4, 1], devices=[CUDA, CUDA], chunks=2, checkpoint="never")
    stepper = optimizer(list(pipe.parameters()))

    def step() -> None:
        stepper.zero_grad()
        pipe(sample).sum().backward()
        stepper.step()

    step()
    stepper.zero_grad()
    with measure_memory(pipe, stepper) as meter:
        step()
    assert plan.partitions[0].memory.total == pytest.approx(meter.peak_bytes[0], rel=0.02)


def allocated_peak(pipe: GPipe, how: str, inputs: Tensor, target: Tensor) -> int:
    """Return what the allocator had for a step at most, beside what others have."""

    def step() -> None:
        if how == "call":
            output = pipe(inputs)  # which a training loop gives a name
            mse_loss(output, target).backward()
        else:
            pipe.step(inputs, target=target, loss_fn=mse_loss, schedule=how)
        torch.cuda.synchronize()

    step()  # finds facts; libraries get their workspaces
    pipe.zero_grad()
    gc.collect()
    own = sum(tensor.nbytes for tensor in (*pipe.parameters(), inputs, target))
    others = torch.cuda.memory_allocated() - own
    torch.cuda.reset_peak_memory_stats()
    step()
    pipe.close()
    return torch.cuda.max_memory_allocated() - others


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("how", ["call", "gpipe", "1f1b"])
def test_the_allocator_has_the_peak_that_a_plan_predicts(how: str, checkpoint: Any) -> None:
    """Alone on a device, a partition's memory is the predicted within 3 %; several share theirs.

    Their peaks need not come at the same time: all of them are the most that the device can need
    together, and the largest, with the parameters of the others, is the least. What waits for a
    neighbour may not have waited.
    """
    model = large().to(CUDA)
    inputs, target = torch.randn(2, 4 * WIDE, WIDE, device=CUDA)
    inputs, target = inputs.clone(), target.clone()
    found = profile(model, inputs, chunks=4, rows=(), loss_fn=mse_loss, target=target)
    for balance in ([8], [4, 4], [2, 4, 2]):
        plan = evaluate(
            found,
            balance,
            checkpoint=checkpoint,
            schedule="1f1b" if how == "1f1b" else "gpipe",
            loss_inside=how != "call",
            shared_memory=True,
        )
        predicted = [partition.memory for partition in plan.partitions]
        devices = [CUDA] * len(balance)
        pipe = GPipe(model, balance, devices=devices, chunks=4, checkpoint=checkpoint)
        measured = allocated_peak(pipe, how, inputs, target)
        most = sum(memory.total for memory in predicted)
        parameters = sum(memory.parameters for memory in predicted)
        least = max(
            memory.total - memory.waiting + parameters - memory.parameters for memory in predicted
        )
        assert least / 1.03 <= measured <= most * 1.03, (balance, least / MIB, measured / MIB)
        if len(balance) == 1:
            assert measured == pytest.approx(most, rel=0.03)
