"""The executor on CUDA: streams, copies, events and the allocator. Skipped without a device."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from chains import run_plain, skip_chain
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import gpipebal as gb
from gpipebal.pipeline import GPipe, measure_memory
from gpipebal.schedule import CHECKPOINT_MODES, SCHEDULES, CheckpointMode
from gpipebal.skip import pop, skippable, stash

# A hang is what these tests look for: a few seconds are enough for any of them.
pytestmark = [pytest.mark.cuda, pytest.mark.timeout(60)]
MODES = pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
CUDA = "cuda:0"


def wide_chain(n_layers: int = 4, width: int = 256) -> nn.Sequential:
    """Make layers that keep a stream busy for a while."""
    layers = [layer for _ in range(n_layers) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*layers).double()


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Let whatever makes the host wait for the device raise, in any thread of the process."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        # It says once that it is a prototype, and has switched the mode by then.
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@MODES
@pytest.mark.parametrize("how", ["call", *SCHEDULES])
@pytest.mark.parametrize("balance", [[8], [4, 4], [2, 2, 2, 2]])
def test_partitions_on_one_device_never_wait_for_each_other_for_ever(
    balance: list[int], how: str, checkpoint: CheckpointMode
) -> None:
    """Every worker runs its backward in its own thread: no deadlock, and the CPU's gradients."""
    plain = wide_chain()
    pipe = GPipe(
        copy.deepcopy(plain),
        balance,
        devices=[CUDA] * len(balance),
        chunks=4,
        checkpoint=checkpoint,
    )
    inputs = torch.randn(32, 256, dtype=torch.float64)
    target = torch.randn(32, 256, dtype=torch.float64)
    mse_loss(run_plain(plain, inputs, 4), target).backward()
    for _ in range(3):
        pipe.zero_grad()
        if how == "call":
            mse_loss(pipe(inputs.to(CUDA)), target.to(CUDA)).backward()
        else:
            pipe.step(inputs, target=target, loss_fn=mse_loss, schedule=how)
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad)


def test_the_device_thread_may_be_busy_with_the_callers_own_graph() -> None:
    """A CUDA graph before and after the pipeline, whose backward runs in torch's device thread."""
    plain = wide_chain().to(CUDA)
    pipe = GPipe(copy.deepcopy(plain), [4, 4], devices=[CUDA, CUDA], chunks=4)
    before, after = nn.Linear(256, 256).double().to(CUDA), nn.Linear(256, 1).double().to(CUDA)
    inputs = torch.randn(16, 256, dtype=torch.float64, device=CUDA, requires_grad=True)
    wanted = (inputs, before.weight, after.weight)
    given = torch.autograd.grad(after(plain(before(inputs).tanh())).sum(), wanted)
    for _ in range(5):
        for tensor in wanted:
            tensor.grad = None
        after(pipe(before(inputs).tanh())).sum().backward()
        for tensor, gradient in zip(wanted, given, strict=True):
            torch.testing.assert_close(tensor.grad, gradient)


@MODES
def test_results_are_ready_for_the_caller_without_a_synchronisation(checkpoint: Any) -> None:
    """Outputs and gradients are read on the caller's stream right away, many times over."""
    plain = wide_chain().to(CUDA)
    pipe = GPipe(copy.deepcopy(plain), [4, 4], devices=[CUDA, CUDA], chunks=4)
    pipe.checkpoint = checkpoint
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in (plain, pipe)]
    for _ in range(20):
        inputs = torch.randn(64, 256, dtype=torch.float64, device=CUDA)
        for model, optimizer in zip((plain, pipe), optimizers, strict=True):
            optimizer.zero_grad()
            output = run_plain(model, inputs, 4) if model is plain else model(inputs)
            output.square().mean().backward()
            optimizer.step()
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_cpu_and_cuda_partitions_mix() -> None:
    """Tensors and gradients cross between a CPU and a CUDA partition; inputs keep their device."""
    plain = skip_chain().double()
    for devices in (["cpu", CUDA], [CUDA, "cpu"]):
        pipe = GPipe(copy.deepcopy(plain), [2, 3], devices=devices, chunks=2)
        mine, theirs = (torch.ones(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
        output = pipe(mine)
        assert output.device.type == pipe.devices[-1].type
        output.square().sum().backward()
        plain.zero_grad()
        run_plain(plain, theirs, 2).square().sum().backward()
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad)


class Away(nn.Module):
    """Hands on its input on the host."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cpu()


@pytest.mark.parametrize("balance", [[4], [2, 2], [1, 3], [3, 1]])
def test_a_layer_may_hand_on_what_is_on_the_host(balance: list[int]) -> None:
    """At a cut and at the end: the gradient goes back to where the output was."""
    plain = nn.Sequential(nn.Linear(8, 8), Away(), nn.Tanh(), Away()).double()
    pipe = GPipe(copy.deepcopy(plain), balance, devices=[CUDA] * len(balance), chunks=2)
    inputs = torch.randn(4, 8, dtype=torch.float64)
    output = pipe(inputs.to(CUDA))
    assert output.device.type == "cpu"
    output.square().sum().backward()
    plain(inputs).square().sum().backward()
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad)


@pytest.mark.parametrize("make", [lambda: 0, lambda: "cuda", lambda: torch.device(CUDA)])
def test_devices_by_index_string_and_object(make: Any) -> None:
    """A device may be given in each of torch's ways."""
    pipe = GPipe(wide_chain(1), [1, 1], devices=[make(), make()])
    assert [device.type for device in pipe.devices] == ["cuda", "cuda"]


def test_an_existing_stream_is_computed_on() -> None:
    """A partition that is given a stream runs its layers there."""
    seen = []

    class Look(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.cuda.current_stream())
            return x

    stream = torch.cuda.Stream()
    pipe = GPipe(nn.Sequential(Look()), [1], devices=[stream], chunks=2)
    pipe(torch.ones(4, 2, device=CUDA))
    assert seen == [stream, stream]
    copy.deepcopy(pipe)(torch.ones(4, 2, device=CUDA))  # a copy has a stream of its own
    assert seen[-1] != stream


@MODES
def test_dropout_is_the_same_in_the_recompute(checkpoint: CheckpointMode) -> None:
    """CUDA random numbers depend on the seed alone, not on balance, mode or stream."""
    results = []
    for balance, mode in (([3], "never"), ([1, 2], checkpoint)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64)).double()
        pipe = GPipe(model, balance, devices=[CUDA] * len(balance), chunks=3)
        pipe.checkpoint = mode  # type: ignore[assignment]
        torch.manual_seed(3)
        pipe(torch.ones(6, 64, dtype=torch.float64, device=CUDA)).square().sum().backward()
        results.append(pipe[0].weight.grad)
    torch.testing.assert_close(results[1], results[0])


class Recurrent(nn.Module):
    """An LSTM with dropout between its two parts, which hands on its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, 64, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]  # type: ignore[no-any-return]


@MODES
def test_dropout_of_recurrent_layers_is_the_same_in_the_recompute(
    checkpoint: CheckpointMode,
) -> None:
    """The process has one state of dropout of cuDNN: other users of it change nothing here."""
    inputs = torch.ones(8, 16, 64, device=CUDA)
    outside = Recurrent().to(CUDA)
    torch.manual_seed(0)
    layers = [Recurrent().to(CUDA), Recurrent().to(CUDA)]
    results = []
    for balance, mode in (([2], "never"), ([1, 1], checkpoint), ([1, 1], checkpoint)):
        model = copy.deepcopy(nn.Sequential(*layers))
        pipe = GPipe(model, balance, devices=[CUDA] * len(balance), chunks=8)
        pipe.checkpoint = mode  # type: ignore[assignment]
        outside(inputs)  # what cuDNN has kept by now is of another generator
        torch.manual_seed(3)
        output = pipe(inputs)
        output.square().sum().backward()
        results.append([output.detach(), *(p.grad for p in model.parameters())])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-3, atol=1e-3)


def test_skips_and_batch_normalisation() -> None:
    """Skips cross streams, and deferred statistics are committed after all of them."""

    @skippable(stash=["x"])
    class Keep(nn.Module):
        def forward(self, x: Tensor) -> Any:
            yield stash("x", x * 2)
            return x

    @skippable(pop=["x"])
    class Add(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x + (yield pop("x"))

    model = nn.Sequential(Keep(), nn.Identity(), nn.BatchNorm1d(8), Add()).double()
    plain = copy.deepcopy(model).to(CUDA)
    pipe = GPipe(model, [1, 1, 2], devices=[CUDA] * 3, chunks=4, deferred_batch_norm=True)
    inputs = torch.randn(16, 8, dtype=torch.float64, device=CUDA)
    pipe(inputs).sum().backward()
    plain(inputs)
    for mine, theirs in zip(pipe.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_trace_has_the_schedules_order_and_copies() -> None:
    """CUDA events give a timeline of every action, and of the copies from the CPU."""
    pipe = GPipe(wide_chain(), [4, 4], devices=[CUDA, CUDA], chunks=4, checkpoint="always")
    with gb.trace(pipe) as recorder:
        pipe(torch.randn(64, 256, dtype=torch.float64)).sum().backward()
    timeline = recorder.timeline
    timeline.check()
    kinds = [event.kind for event in timeline.events]
    assert {kind: kinds.count(kind) for kind in "FRBC"} == {"F": 8, "R": 8, "B": 8, "C": 4}
    assert all(event.end > event.start for event in timeline.events)


def test_the_allocator_sees_what_the_ledger_counts() -> None:
    """The peak of the allocator is that of the counted storages, but for rounding and libraries."""
    pipe = GPipe(wide_chain(8, 1024).float(), [8, 8], devices=[CUDA, CUDA], chunks=4)
    inputs = torch.randn(1024, 1024, device=CUDA)
    pipe(inputs).sum().backward()
    pipe.zero_grad()
    with measure_memory(pipe) as meter:
        pipe(inputs).sum().backward()
    (peak,) = meter.device_peak_bytes.values()
    assert meter.total_peak_bytes <= peak * 1.03


def test_a_fault_on_cuda_leaves_the_pipeline_usable() -> None:
    """An exception in the middle arrives with its notes, and the next mini-batch is right."""
    fail = [True]

    class Fault(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if fail[0]:
                raise ValueError("broken")
            return x

    plain = nn.Sequential(nn.Linear(8, 8), Fault(), nn.Linear(8, 8)).to(CUDA)
    pipe = GPipe(copy.deepcopy(plain), [1, 2], devices=[CUDA, CUDA])
    inputs = torch.randn(4, 8, device=CUDA)
    with pytest.raises(ValueError, match="broken"):
        pipe(inputs)
    fail[0] = False
    pipe(inputs).sum().backward()
    plain(inputs).sum().backward()
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_caller_who_catches_a_fault_comes_behind_what_was_launched(schedule: str) -> None:
    """What cells still add to the statistics is overwritten by what the caller loads then."""
    fail = [False]

    class Late(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if fail[0]:
                torch.cuda._sleep(200_000_000)
            return x

    class Fault(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if fail[0]:
                raise ValueError("broken")
            return x

    model = nn.Sequential(nn.Linear(8, 8), Late(), nn.BatchNorm1d(8), Fault())
    pipe = GPipe(model, [3, 1], devices=[CUDA, CUDA], chunks=1, checkpoint="never")
    inputs = torch.randn(16, 8, device=CUDA)
    pipe.step(inputs, target=inputs, loss_fn=mse_loss, schedule=schedule)
    good = {name: value.clone() for name, value in pipe.state_dict().items()}
    fail[0] = True
    with pytest.raises(ValueError, match="broken"):
        pipe.step(inputs, target=inputs, loss_fn=mse_loss, schedule=schedule)
    pipe.load_state_dict(good)
    torch.cuda.synchronize()
    for name, value in pipe.state_dict().items():
        torch.testing.assert_close(value, good[name], rtol=0, atol=0)


@MODES
def test_a_tied_embedding_with_sparse_gradients(checkpoint: CheckpointMode) -> None:
    """A sparse gradient of two partitions is summed up, and a sparse input handed to all rows."""

    class Product(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            return torch.sparse.mm(pair[1], pair[0])  # type: ignore[no-any-return]

    torch.manual_seed(0)
    table = nn.Embedding(20, 8, sparse=True)

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = table

        def forward(self, x: Tensor) -> Tensor:
            return x + self.table(torch.zeros(x.shape[0], dtype=torch.int64, device=x.device))

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = table

        def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return self.table(pair[0]), pair[1]

    results = []
    words, mix = torch.arange(8) % 5, torch.eye(2).to_sparse()
    for device in ("cpu", CUDA):
        table.zero_grad()
        pipe = GPipe(
            nn.Sequential(First(), Product(), Again()),
            [1, 2],
            devices=[device] * 2,
            chunks=4,
            checkpoint=checkpoint,
            in_dims=(0, None),
        )
        pipe((words.to(device), mix.to(device))).square().sum().backward()
        assert table.weight.grad is not None
        results.append(table.weight.grad.to_dense().cpu())
        pipe.close()
    torch.testing.assert_close(results[1], results[0])


@MODES
def test_tied_parameters_under_autocast_are_cast_by_each_cell(checkpoint: CheckpointMode) -> None:
    """A cast that another cell's stream still makes is not read; the store of torch's is off."""

    class Late(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.cuda._sleep(5_000_000)
            return x

    torch.manual_seed(0)
    shared = nn.Linear(128, 128).to(CUDA)
    model = nn.Sequential(Late(), shared, nn.Tanh(), shared)
    inputs = torch.randn(64, 128, device=CUDA)
    with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
        run_plain(model, inputs, 8).float().square().mean().backward()
    assert shared.weight.grad is not None
    expected = shared.weight.grad.clone()
    pipe = GPipe(model, [3, 1], devices=[CUDA] * 2, chunks=8, checkpoint=checkpoint)
    for _ in range(5):
        pipe.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            output = pipe(inputs)
        output.float().square().mean().backward()
        torch.testing.assert_close(shared.weight.grad, expected, rtol=2e-2, atol=1e-4)


def test_half_precision_with_a_grad_scaler() -> None:
    """float16 autocast and a GradScaler train as on the plain model."""
    plain = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)).to(CUDA)
    pipe = GPipe(copy.deepcopy(plain), [1, 2], devices=[CUDA, CUDA], chunks=2)
    inputs, target = torch.randn(16, 64, device=CUDA), torch.randn(16, 8, device=CUDA)
    for model in (plain, pipe):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda")
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16, cache_enabled=False):
                output = run_plain(model, inputs, 2) if model is plain else model(inputs)
                loss = mse_loss(output.float(), target)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


@MODES
def test_nothing_in_a_step_waits_for_the_device(checkpoint: CheckpointMode) -> None:
    """No operation of forward, recompute or backward synchronises the host with the device."""
    pipe = GPipe(wide_chain(), [4, 4], devices=[CUDA, CUDA], chunks=4, checkpoint=checkpoint)
    inputs = torch.randn(64, 256, dtype=torch.float64, device=CUDA)
    gradient = torch.ones(64, 256, dtype=torch.float64, device=CUDA)
    pipe(inputs).backward(gradient)  # the first one makes workers and finds facts
    with waiting_is_an_error():
        pipe(inputs).backward(gradient)


def test_whoever_waits_for_the_device_is_found_in_a_workers_thread() -> None:
    """What the tests look for is seen where the layers run, and nothing of it is left behind."""

    class Read(nn.Module):
        wanted = False

        def forward(self, x: Tensor) -> Tensor:
            return x * x.sum().item() if Read.wanted else x

    pipe = GPipe(nn.Sequential(nn.Linear(8, 8), Read()), [1, 1], devices=[CUDA, CUDA], chunks=2)
    inputs = torch.randn(4, 8, device=CUDA)
    pipe(inputs)
    Read.wanted = True
    with pytest.raises(RuntimeError, match="synchronizing CUDA"), waiting_is_an_error():
        pipe(inputs)
    assert torch.isfinite(pipe(inputs)).all()


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_inputs_and_targets_of_the_host_wait_for_no_device(schedule: str) -> None:
    """A target in the host's memory is there for the loss while the layers still compute."""
    done: list[torch.cuda.Event] = []
    ahead: list[bool] = []

    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.cuda._sleep(200_000_000)  # a tenth of a second
            done.append(torch.cuda.current_stream().record_event())
            return x

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        ahead.append(not done[-1].query())
        return mse_loss(output, target)

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), Slow())
    pipe = GPipe(model, [1, 2], devices=[CUDA, CUDA], chunks=4, checkpoint="never")
    pipe.step(torch.ones(8, 8), target=torch.ones(8, 8), loss_fn=mse_loss)  # finds facts
    torch.cuda.synchronize()
    for pinned in (False, True):
        inputs, target = torch.ones(8, 8), torch.ones(8, 8)
        if pinned:
            inputs, target = inputs.pin_memory(), target.pin_memory()
        ahead.clear()
        pipe.step(inputs, target=target, loss_fn=loss_fn, schedule=schedule)
        torch.cuda.synchronize()
        assert ahead == [True] * 4


class ToPinned(nn.Module):
    """Hands on what it gets in memory of the host, which a device may still be filling."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(20):
            x = (x @ x.T @ x).tanh()
        return x.to("cpu", non_blocking=True)


@pytest.mark.parametrize("chunks", [1, 4])
def test_an_output_on_the_host_is_whole_when_it_is_joined(chunks: int) -> None:
    """The caller joins micro-batches on the host, which no event of a stream orders."""
    model = nn.Sequential(nn.Linear(256, 256), ToPinned())
    plain = copy.deepcopy(model).to(CUDA)
    x = torch.randn(64, 256, device=CUDA)
    parts = [plain(part) for part in x.chunk(chunks)]
    torch.cuda.synchronize()
    expected = torch.cat(parts)
    pipe = GPipe(model, [1, 1], devices=[CUDA] * 2, chunks=chunks)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(pipe(x), expected.detach())


def test_verify_joins_outputs_on_the_host_when_they_are_there() -> None:
    """It runs the plain model over micro-batches, and joins what these return."""
    model = nn.Sequential(nn.Linear(256, 256), ToPinned())
    pipe = GPipe(copy.deepcopy(model), [1, 1], devices=[CUDA] * 2, chunks=4)
    x = torch.randn(64, 256, device=CUDA)
    with torch.no_grad():
        for _ in range(3):
            assert gb.verify(model, pipe, x).outputs.count == 1


@MODES
@pytest.mark.filterwarnings("error")
def test_the_callers_graph_may_use_a_parameter_on_another_stream(
    checkpoint: CheckpointMode,
) -> None:
    """Of a layer, through a view, forwards and backwards on different streams; nothing warns."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 64)).double()
    plain = copy.deepcopy(model).to(CUDA)
    pipe = GPipe(model, [2, 1], devices=[CUDA] * 2, chunks=4, checkpoint=checkpoint)
    x = torch.randn(64, 64, dtype=torch.double, device=CUDA)

    def loss(out: Tensor, weight: Tensor) -> Tensor:
        return (out + weight.view_as(out)).square().sum() + weight.square().sum()

    loss(plain(x), plain[0].weight).backward()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        found = loss(pipe(x), pipe[0].weight)
    torch.cuda.current_stream().wait_stream(stream)
    found.backward()
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_pinned_memory_may_be_refilled_at_once() -> None:
    """What the pipeline reads of the host's memory it has read when the call returns."""
    pipe = GPipe(wide_chain(2), [2, 2], devices=[CUDA, CUDA], chunks=4)
    buffer = torch.empty(4096, 256, dtype=torch.float64).pin_memory()
    outputs = []
    for value in range(3):
        buffer.fill_(value)
        with torch.no_grad():
            outputs.append(pipe(buffer))
        buffer.fill_(-1.0)
    for value, output in enumerate(outputs):
        expected = pipe(torch.full((1, 256), float(value), dtype=torch.float64))
        torch.testing.assert_close(output, expected.expand_as(output))


@MODES
@pytest.mark.parametrize("how", ["call", *SCHEDULES])
def test_tied_parameters_are_summed_up_in_one_order(how: str, checkpoint: CheckpointMode) -> None:
    """Parameters that layers of two partitions share, and the loss: right, and without warning."""
    torch.manual_seed(0)
    shared = nn.Linear(128, 128)
    plain = nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), nn.Linear(128, 128)).double()

    def loss_of(weight: Tensor) -> Any:
        return lambda y, t: mse_loss(y @ weight, t)

    inputs, target = torch.randn(2, 64, 128, dtype=torch.float64)
    loss_of(plain[0].weight)(plain(inputs), target).backward()
    pipe = GPipe(copy.deepcopy(plain), [2, 2, 1], devices=[CUDA] * 3, chunks=8)
    pipe.checkpoint = checkpoint
    loss_fn = loss_of(pipe[0].weight)
    results = set()
    for _ in range(20):
        pipe.zero_grad()
        if how == "call":
            loss_fn(pipe(inputs.to(CUDA)), target.to(CUDA)).backward()
        else:
            pipe.step(inputs, target=target, loss_fn=loss_fn, schedule=how)
        for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
            assert mine.grad is not None
            torch.testing.assert_close(mine.grad.cpu(), theirs.grad)
        results.add(pipe[0].weight.grad.cpu().numpy().tobytes())  # type: ignore[union-attr]
    assert how == "call" or len(results) == 1


def test_the_average_of_all_mini_batches_is_computed_on_the_device() -> None:
    """Deferred batch normalisation with momentum=None reads no number back."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None))
    pipe = GPipe(model, [1, 1], devices=[CUDA, CUDA], chunks=2, deferred_batch_norm=True)
    inputs = torch.randn(8, 8, device=CUDA)
    gradient = torch.ones(8, 8, device=CUDA)
    pipe(inputs).backward(gradient)
    with waiting_is_an_error():
        pipe(inputs).backward(gradient)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_copies_between_devices_do_not_queue_behind_the_caller() -> None:
    """A copy runs while the default stream of its source is busy with something else."""
    pipe = GPipe(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), [1, 1], chunks=2)
    inputs = torch.ones(4, 8)
    with torch.no_grad():
        expected = pipe(inputs)
        source = torch.ones(4, 8, device="cuda:0")
        lane = pipe._runtime.lanes[1]  # type: ignore[union-attr]
        lane.receive([source], ())  # the first copy makes what later ones use
        torch.cuda.synchronize(0)
        with torch.cuda.device(0):
            torch.cuda._sleep(2_000_000_000)
            busy = torch.cuda.current_stream().record_event()
        (received,) = lane.receive([source], ())
        lane.mark()[0].synchronize()
        assert not busy.query()
    torch.cuda.synchronize(0)
    assert received.device == expected.device
    torch.testing.assert_close(received.cpu(), source.cpu())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@MODES
def test_two_devices(checkpoint: CheckpointMode) -> None:
    """Partitions on two devices give the plain model's gradients."""
    plain = wide_chain()
    pipe = GPipe(copy.deepcopy(plain), [4, 4], chunks=4, checkpoint=checkpoint)
    inputs = torch.randn(32, 256, dtype=torch.float64)
    run_plain(plain, inputs, 4).square().sum().backward()
    output = pipe(inputs)
    assert output.device == torch.device("cuda", 1)
    output.square().sum().backward()
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad)
