"""Backwards of several threads: each finds what its forward had, and leaves nothing behind."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpipebal import is_recomputing
from gpipebal.errors import PipelineError
from gpipebal.pipeline import GPipe
from gpipebal.pipeline.process.process_wide import current_settings, settings_entered
from gpipebal.pipeline.values.places import find_overlaps
from gpipebal.schedule import CheckpointMode

pytestmark = pytest.mark.timeout(120)

flash_allowed = torch.backends.cuda.flash_sdp_enabled


@pytest.fixture(autouse=True)
def settings_stay() -> Iterator[None]:
    """No test may leave the process with other settings."""
    before = current_settings()
    yield
    assert current_settings() == before


class Meet(nn.Module):
    """In a recompute, waits for another thread to be inside too, and looks at the settings."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, list[bool]] = {1: [], 2: []}
        self.first_is_inside, self.second_is_inside = threading.Event(), threading.Event()
        self.first_has_left = threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        if is_recomputing():
            number = int(x.detach()[0, 0])
            if number == 1:
                self.first_is_inside.set()
                assert self.second_is_inside.wait(60)
            else:
                self.second_is_inside.set()
                assert self.first_has_left.wait(60)
            self.seen[number].append(flash_allowed())
        return x * 2


@pytest.mark.parametrize("alike", [True, False])
def test_settings_of_overlapping_backwards(alike: bool) -> None:
    """The first to leave does not take away what the second needs; the last puts all back."""
    pipes = []
    meet = Meet()
    for _ in range(2):
        pipes.append(GPipe(nn.Sequential(meet), [1], chunks=2, checkpoint="always"))
    inputs = [torch.full((4, 1), float(k), requires_grad=True) for k in (1, 2)]
    with sdpa_kernel(SDPBackend.MATH):
        outputs = [pipes[0](inputs[0])]
        outputs += [pipes[1](inputs[1])] if alike else []
    outputs += [] if alike else [pipes[1](inputs[1])]

    def first() -> None:
        outputs[0].sum().backward()
        meet.first_has_left.set()

    threads = [threading.Thread(target=first)]
    threads.append(threading.Thread(target=lambda: outputs[1].sum().backward()))
    threads[0].start()
    assert meet.first_is_inside.wait(60)
    threads[1].start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    # Two that want different things cannot both have them while both are inside.
    assert meet.seen[2] == [not alike] * 2
    assert not alike or meet.seen[1] == [False] * 2
    assert flash_allowed()


def test_settings_that_a_layer_changes_are_left_so() -> None:
    """What was not entered is not put back."""
    before = torch.get_default_dtype()
    try:
        with settings_entered(current_settings()):
            torch.set_default_dtype(torch.float64)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(before)


def test_settings_come_back_after_an_error() -> None:
    """Also if one of several backwards fails."""
    wanted = (torch.float64, *current_settings()[1:])
    with settings_entered(wanted):
        with pytest.raises(ValueError, match="inside"), settings_entered(wanted):
            raise ValueError("inside")
        assert torch.get_default_dtype() == torch.float64
    assert torch.get_default_dtype() == torch.float32


def test_flags_that_torch_has_frozen_are_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.backends.disable_global_flags` refuses assignments, but not blocks."""
    monkeypatch.setattr(torch.backends, "__allow_nonbracketed_mutation_flag", False)
    seen: list[bool] = []

    class Look(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.backends.cudnn.enabled)
            return x * 1

    pipe = GPipe(nn.Sequential(Look()), [1], checkpoint="always")
    x = torch.ones(2, 2, requires_grad=True)
    with torch.backends.cudnn.flags(enabled=False):
        output = pipe(x)
    output.sum().backward()
    assert seen == [False, False]
    assert torch.backends.cudnn.enabled


def test_a_refused_backward_keeps_no_gradient() -> None:
    """Nor does it stop a later one."""
    x = torch.ones(4, 3, requires_grad=True)
    output = GPipe(nn.Sequential(nn.Linear(3, 3)), [1], chunks=2)(x)
    gradient = torch.ones(4, 3)
    gone = weakref.ref(gradient)

    def refused(gradient: Tensor) -> None:
        with pytest.raises(PipelineError, match="create_graph=True"):
            torch.autograd.grad(output, x, gradient, create_graph=True)

    refused(gradient)
    del gradient
    assert gone() is None
    (found,) = torch.autograd.grad(output.sum(), x)
    assert found.shape == x.shape


class Casts(torch.autograd.Function):
    """Notes what autocast would cast to in a backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[torch.dtype]) -> Tensor:
        ctx.seen = seen
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.seen.append(torch.get_autocast_dtype("cpu"))
        return gradient, None


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_backward_casts_to_what_its_forward_did(checkpoint: CheckpointMode) -> None:
    """Not to what a later mini-batch does."""
    seen: list[torch.dtype] = []

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Casts.apply(x, seen)

    pipe = GPipe(nn.Sequential(Layer()), [1], checkpoint=checkpoint)
    x = torch.ones(2, 2, requires_grad=True)
    outputs = []
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype=dtype):
            outputs.append(pipe(x))
    for output in outputs:
        output.sum().backward()
    assert seen == [torch.float16, torch.bfloat16]


class Diagonal(nn.Module):
    """Makes a sparse matrix, whose backward takes nothing but a sparse gradient."""

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(len(x)).expand(2, len(x))
        return torch.sparse_coo_tensor(places, x[:, 0], (len(x), 8), check_invariants=False)


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("out_dims", [0, -2, None])
def test_gradients_of_sparse_outputs_stay_sparse(chunks: int, out_dims: int | None) -> None:
    """They are parted as the outputs were joined."""
    x = torch.arange(5.0).unsqueeze(1).requires_grad_()
    if out_dims is None:
        x = torch.arange(6.0).unsqueeze(1).requires_grad_()
    pipe = GPipe(nn.Sequential(Diagonal(), nn.Identity()), [1, 1], chunks=chunks, out_dims=out_dims)
    output = pipe(x)
    assert output.is_sparse
    (2 * output.to_dense()).sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 2.0))


def test_tensors_whose_memory_nobody_sees_cross_cuts() -> None:
    """As MKL-DNN has them."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no MKL-DNN")
    opaque = torch.ones(2, 2).to_mkldnn()
    x = torch.ones(2)
    assert find_overlaps([opaque, x, x[:1]]) == {1, 2}
