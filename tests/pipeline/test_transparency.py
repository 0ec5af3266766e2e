"""The pipeline gives what the plain model gives over the same micro-batches."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch
from chains import batchnorm_chain, run_plain, skip_chain
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from gpipebal.models.resnet import resnet
from gpipebal.pipeline import GPipe
from gpipebal.schedule import CHECKPOINT_MODES, CheckpointMode

MODES = pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)


def assert_same(
    model: nn.Sequential,
    balance: list[int],
    inputs: Tensor,
    *,
    chunks: int,
    checkpoint: CheckpointMode,
    input_gradient: bool = True,
) -> None:
    """Compare outputs, gradients and buffers of two training steps."""
    plain = copy.deepcopy(model)
    pipe = GPipe(model, balance, chunks=chunks, checkpoint=checkpoint)
    try:
        for _ in range(2):
            mine = inputs.clone().requires_grad_(input_gradient)
            theirs = inputs.clone().requires_grad_(input_gradient)
            output, expected = pipe(mine), run_plain(plain, theirs, chunks)
            torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-12)
            output.square().sum().backward()
            expected.square().sum().backward()
            if input_gradient:
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-12)
            for (name, parameter), other in zip(
                pipe.named_parameters(), plain.parameters(), strict=True
            ):
                assert parameter.grad is not None, name
                torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-9, atol=1e-12)
            for (name, buffer), other_buffer in zip(
                pipe.named_buffers(), plain.buffers(), strict=True
            ):
                torch.testing.assert_close(
                    buffer, other_buffer, rtol=1e-9, atol=1e-12, msg=lambda text, n=name: n + text
                )
    finally:
        pipe.close()


@st.composite
def balances(draw: st.DrawFn, n_layers: int) -> list[int]:
    """Every way to cut a chain."""
    cuts = sorted(draw(st.sets(st.integers(1, n_layers - 1), max_size=3)))
    bounds = [0, *cuts, n_layers]
    return [end - start for start, end in pairwise(bounds)]


@settings(max_examples=25, deadline=None)
@given(
    balance=balances(8),
    rows=st.integers(2, 9),
    chunks=st.integers(1, 5),
    checkpoint=st.sampled_from(CHECKPOINT_MODES),
    input_gradient=st.booleans(),
)
def test_batchnorm_chain_is_the_plain_model(
    balance: list[int], rows: int, chunks: int, checkpoint: CheckpointMode, input_gradient: bool
) -> None:
    """Batch normalisation and in-place layers at any cut change no number and no buffer."""
    torch.manual_seed(rows)
    model = batchnorm_chain().double()
    assert_same(
        model,
        balance,
        torch.randn(rows, 2, 8, 8, dtype=torch.double),
        chunks=chunks,
        checkpoint=checkpoint,
        input_gradient=input_gradient,
    )


@settings(max_examples=25, deadline=None)
@given(
    balance=balances(5),
    rows=st.integers(1, 7),
    chunks=st.integers(1, 5),
    checkpoint=st.sampled_from(CHECKPOINT_MODES),
)
def test_tuples_between_partitions_are_the_plain_model(
    balance: list[int], rows: int, chunks: int, checkpoint: CheckpointMode
) -> None:
    """A tuple that crosses cuts, with an element handed through, gets the right gradients."""
    torch.manual_seed(rows)
    assert_same(
        skip_chain().double(),
        balance,
        torch.randn(rows, 4, dtype=torch.double),
        chunks=chunks,
        checkpoint=checkpoint,
    )


@MODES
def test_small_resnet_is_the_plain_model(checkpoint: CheckpointMode) -> None:
    """Outputs, all gradients and all buffers of a bottleneck ResNet agree to 1e-9."""
    model = resnet((1, 2, 1, 1), num_classes=5, width=4).double()
    n_layers = len(model)
    assert_same(
        model,
        [n_layers // 2, n_layers - n_layers // 2],
        torch.randn(6, 3, 32, 32, dtype=torch.double),
        chunks=3,
        checkpoint=checkpoint,
        input_gradient=False,
    )


class Detach(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


class WithConstants(nn.Module):
    """Return integers, a constant, the same tensor twice, and an unused one."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.argmax(dim=1), torch.ones_like(x), x * 2, x * 2, x.sin()


class UseSome(nn.Module):
    def forward(self, parts: tuple[Tensor, ...]) -> Tensor:
        index, constant, first, second, _unused = parts
        return first * second + constant + index.unsqueeze(1)


def _frozen() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model.requires_grad_(False)
    return model


def _frozen_first() -> nn.Sequential:
    model = _frozen()
    model[2].requires_grad_(True)
    return model


def _embedding() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 3), nn.Tanh())


CHAINS: dict[str, tuple[Callable[[], nn.Sequential], Callable[[], Tensor]]] = {
    "constants": (
        lambda: nn.Sequential(nn.Linear(4, 4), WithConstants(), UseSome(), nn.Linear(4, 2)),
        lambda: torch.randn(5, 4),
    ),
    "detach": (
        lambda: nn.Sequential(nn.Linear(4, 4), Detach(), nn.Linear(4, 4), nn.Linear(4, 2)),
        lambda: torch.randn(5, 4),
    ),
    "frozen": (_frozen, lambda: torch.randn(5, 4)),
    "frozen first": (_frozen_first, lambda: torch.randn(5, 4)),
    "integers in": (_embedding, lambda: torch.randint(0, 7, (5, 3))),
}


@MODES
@pytest.mark.parametrize("case", CHAINS)
@pytest.mark.parametrize("input_gradient", [False, True])
def test_gradients_are_right_or_none(
    case: str, input_gradient: bool, checkpoint: CheckpointMode
) -> None:
    """Constants, integers, detached and frozen parts get the plain gradients or none, anywhere."""
    make, make_inputs = CHAINS[case]
    model, inputs = make(), make_inputs()
    if input_gradient and not inputs.is_floating_point():
        pytest.skip("integers have no gradient")
    plain = copy.deepcopy(model)
    for balance in ([len(model)], [1, len(model) - 1], [2, len(model) - 2]):
        pipe = GPipe(copy.deepcopy(model), balance, chunks=2, checkpoint=checkpoint)
        plain.zero_grad()
        mine = inputs.clone().requires_grad_(input_gradient)
        theirs = inputs.clone().requires_grad_(input_gradient)
        output, expected = pipe(mine), run_plain(plain, theirs, 2)
        torch.testing.assert_close(output, expected)
        assert output.requires_grad == expected.requires_grad
        if expected.requires_grad:
            output.square().sum().backward()
            expected.square().sum().backward()
        assert (mine.grad is None) == (theirs.grad is None)
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad)
        for parameter, other in zip(pipe.parameters(), plain.parameters(), strict=True):
            assert (parameter.grad is None) == (other.grad is None)
            if parameter.grad is not None:
                torch.testing.assert_close(parameter.grad, other.grad)
        pipe.close()


@MODES
def test_gradients_accumulate_over_steps(checkpoint: CheckpointMode) -> None:
    """Two backwards without zero_grad add up, as in the plain model."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    plain = copy.deepcopy(model)
    pipe = GPipe(model, [1, 1], chunks=2, checkpoint=checkpoint)
    for seed in range(3):
        inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
        pipe(inputs).sum().backward()
        plain(inputs).sum().backward()
    torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad)


@MODES
def test_second_backward(checkpoint: CheckpointMode) -> None:
    """retain_graph=True allows a second backward, and without it a second one is an error."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    pipe = GPipe(model, [1, 2], chunks=2, checkpoint=checkpoint)
    loss = pipe(torch.randn(4, 3)).sum()
    loss.backward(retain_graph=True)
    once = model[0].weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(model[0].weight.grad, 2 * once)
    with pytest.raises(RuntimeError, match="ran already"):
        loss.backward()


@MODES
def test_two_threads_go_back_through_one_graph(checkpoint: CheckpointMode) -> None:
    """Backwards of several threads through one graph take turns, each with its gradient."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    plain = copy.deepcopy(model)
    pipe = GPipe(model, [1, 2], chunks=2, checkpoint=checkpoint)
    inputs = torch.randn(4, 3)
    output, expected = pipe(inputs), plain(inputs)
    together = threading.Barrier(4)

    def go_back(thread: int) -> None:
        for turn in range(5):
            together.wait(timeout=60)
            output.backward(torch.full((4, 2), 1.0 + thread + 4 * turn), retain_graph=True)

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(go_back, thread) for thread in range(4)]:
            done.result(timeout=60)
    expected.backward(torch.full((4, 2), sum(1.0 + k for k in range(20))))
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@MODES
def test_gradients_of_inputs_alone(checkpoint: CheckpointMode) -> None:
    """torch.autograd.grad on the input finds its gradient and leaves the parameters' alone."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    plain = copy.deepcopy(model)
    pipe = GPipe(model, [1, 2], chunks=2, checkpoint=checkpoint)
    inputs = torch.randn(4, 3, requires_grad=True)
    (mine,) = torch.autograd.grad(pipe(inputs).sum(), inputs)
    (theirs,) = torch.autograd.grad(plain(inputs).sum(), inputs)
    torch.testing.assert_close(mine, theirs)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_differentiating_twice_is_refused() -> None:
    """create_graph=True gets a clear error instead of a wrong result."""
    pipe = GPipe(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), [1, 1], chunks=2)
    inputs = torch.randn(4, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated: create_graph=True"):
        torch.autograd.grad(pipe(inputs).sum(), inputs, create_graph=True)


def test_no_grad_inference_mode_and_eval() -> None:
    """Without gradients, in inference mode and in eval mode the outputs are the plain ones."""
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    pipe = GPipe(model, [2, 2], chunks=2)
    inputs = torch.randn(6, 3)
    pipe(inputs).sum().backward()
    pipe.eval()
    expected = copy.deepcopy(nn.Sequential(*pipe)).eval()(inputs)
    torch.testing.assert_close(pipe(inputs), expected)
    with torch.no_grad():
        output = pipe(inputs)
    assert not output.requires_grad
    torch.testing.assert_close(output, expected)
    with torch.inference_mode():
        output = pipe(inputs)
    assert output.is_inference()
    torch.testing.assert_close(output.clone(), expected)
    pipe.train()
    pipe(inputs).sum().backward()


@MODES
def test_autocast_reaches_the_workers(checkpoint: CheckpointMode) -> None:
    """Under autocast forward and recompute run in the lower precision, as in the plain model."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    plain = copy.deepcopy(model)
    pipe = GPipe(model, [1, 1], chunks=2, checkpoint=checkpoint)
    inputs = torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, expected = pipe(inputs), run_plain(plain, inputs, 2)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, expected)
    output.float().sum().backward()
    expected.float().sum().backward()
    # The plain model adds the micro-batches' gradients up in bfloat16, the cells in float32.
    torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad, rtol=2e-2, atol=2e-2)


def test_casts_of_parameters_are_each_cells_own() -> None:
    """Torch has one store of them for all threads: what is in it would go by the clock."""
    seen: list[bool] = []

    class Look(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.is_autocast_cache_enabled())
            return x

    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), Look(), nn.Linear(2, 2)), [1, 2], chunks=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pipe(torch.ones(4, 2)).sum().backward()
        assert torch.is_autocast_cache_enabled()
    assert seen and not any(seen)


class _ScaleInBackward(torch.autograd.Function):
    """The identity, whose backward makes a tensor on the default device."""

    made: ClassVar[list[str]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        _ScaleInBackward.made.append(torch.ones(1).device.type)
        return gradients[0]


class _Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _ScaleInBackward.apply(x)  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_the_default_device_reaches_backwards(checkpoint: CheckpointMode) -> None:
    """What a layer's own backward makes is on the caller's default device, as in plain torch."""
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), _Scaled()), [1, 1], chunks=2, checkpoint=checkpoint)
    inputs = torch.ones(4, 2)
    for device in ("meta", "cpu"):
        _ScaleInBackward.made.clear()
        with torch.device(device):
            pipe(inputs).sum().backward()
        assert _ScaleInBackward.made == [device] * 2


def test_the_callers_batch_is_unharmed() -> None:
    """An in-place first layer does not write to the mini-batch that the caller holds."""
    inputs = torch.randn(4, 3)
    before = inputs.clone()
    pipe = GPipe(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 1)), [1, 1], chunks=2)
    pipe(inputs).sum().backward()
    assert torch.equal(inputs, before)


def test_zero_rows() -> None:
    """A mini-batch without rows gives an output without rows."""
    pipe = GPipe(nn.Sequential(nn.Linear(3, 2), nn.ReLU()), [1, 1], chunks=4)
    output = pipe(torch.zeros(0, 3))
    assert output.shape == (0, 2)
    output.sum().backward()


@MODES
def test_kernels_may_be_chosen_as_in_the_forward(checkpoint: CheckpointMode) -> None:
    """Which kernels attention may use stays what it was around the forward, and comes back."""
    seen: list[bool] = []

    class Look(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.backends.cuda.flash_sdp_enabled() or torch.backends.cudnn.enabled)
            return 2 * x

    pipe = GPipe(nn.Sequential(nn.Identity(), Look()), [1, 1], chunks=2, checkpoint=checkpoint)
    inputs = torch.zeros(4, requires_grad=True)
    with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False):
        output = pipe(inputs)
    output.sum().backward()
    n_recomputes = {"always": 2, "except_last": 1, "never": 0}[checkpoint]
    assert seen == [False] * (2 + n_recomputes)
    assert torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cudnn.enabled


def test_a_layer_turns_on_the_autocast_of_the_caller() -> None:
    """A layer's own `torch.autocast` casts to what the caller set, and keeps no cast."""
    seen: list[tuple[torch.dtype, bool]] = []

    class Cast(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu"):
                seen.append((torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()))
                return x @ x

    pipe = GPipe(nn.Sequential(nn.Identity(), Cast()), [1, 1])
    before = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", torch.float16)
    try:
        assert pipe(torch.ones(2, 2)).dtype == torch.float16
    finally:
        torch.set_autocast_dtype("cpu", before)
    assert pipe(torch.ones(2, 2)).dtype == before
    assert seen == [(torch.float16, False), (before, False)]


@MODES
def test_the_default_dtype_is_that_of_the_forward(checkpoint: CheckpointMode) -> None:
    """A layer that makes a new tensor makes it alike in forward and recompute."""

    class Make(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.full((1,), 1 / 3)

    pipe = GPipe(nn.Sequential(nn.Identity(), Make()), [1, 1], chunks=2, checkpoint=checkpoint)
    inputs = torch.zeros(4, requires_grad=True)
    torch.set_default_dtype(torch.float64)
    try:
        output = pipe(inputs)
        assert output.dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    output.sum().backward()
    assert torch.get_default_dtype() == torch.float32
    assert inputs.grad is not None
    assert inputs.grad.tolist() == [1, 1, 1, 1]


def test_weights_can_be_averaged() -> None:
    """A moving average of the weights is that of the plain model, and runs as a pipeline."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    plain, rows = copy.deepcopy(model), torch.randn(6, 4, dtype=torch.double)
    pipe = GPipe(model, [1, 2], chunks=3)
    averages = [
        AveragedModel(each, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for each in (pipe, plain)
    ]
    for each, average in zip((pipe, plain), averages, strict=True):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            each(rows).square().mean().backward()
            optimizer.step()
            average.update_parameters(each)
    torch.testing.assert_close(*(average(rows) for average in averages))
