"""The executor on CUDA where something is settled for the process, or lies on the other side."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from gpipebal.pipeline import GPipe

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(120)]
CUDA = "cuda:0"

_ORDER = """
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attend
from gpipebal import GPipe

class Attend(nn.Module):
    def forward(self, x):
        return attend(x, x, x)

x = torch.randn(4, 2, 16, 64, device="cuda:0", dtype=torch.bfloat16, requires_grad=True)
if {piped}:
    pipe = GPipe(nn.Sequential(Attend(), Attend()), [1, 1], devices=["cuda:0"] * 2, chunks=2)
    pipe(x).sum().backward()
else:
    attend(x, x, x).sum().backward()
print(torch._C._get_sdp_priority_order())
"""


def test_the_order_of_attention_kernels_is_what_torch_chooses() -> None:
    """It does so at the first attention of a process, which may be in the middle of a step."""
    found = [
        subprocess.run(
            [sys.executable, "-c", _ORDER.format(piped=piped)],
            check=True,
            timeout=100,
            capture_output=True,
            text=True,
        ).stdout
        for piped in (False, True)
    ]
    assert found[0] == found[1]


class ToCuda(nn.Module):
    """Computes on the host, and hands on what a copy to the card is still filling."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x).pin_memory().to(CUDA, non_blocking=True)
        for _ in range(20):
            y = (y @ y.T @ y).tanh()
        return y


@pytest.mark.parametrize("last", [False, True])
def test_a_partition_of_the_host_may_hand_on_what_is_on_a_card(last: bool) -> None:
    """Neither the next partition nor the caller reads it before it is there."""
    layers: list[nn.Module] = [ToCuda()] if last else [ToCuda(), nn.Linear(256, 256)]
    plain = nn.Sequential(*layers)
    devices = ["cpu"] if last else ["cpu", CUDA]
    pipe = GPipe(copy.deepcopy(plain), [1] * len(layers), devices=devices, chunks=4)
    if not last:
        plain[1].to(CUDA)
    x = torch.randn(64, 256)
    with torch.no_grad():
        parts = [plain(part) for part in x.chunk(4)]
        torch.cuda.synchronize()
        expected = torch.cat(parts)
        for _ in range(3):
            with torch.cuda.stream(torch.cuda.Stream(CUDA)):
                found = pipe(x)
                torch.cuda.current_stream().synchronize()
            torch.testing.assert_close(found, expected)


def test_a_partition_of_the_host_gets_gradients_of_what_it_put_on_a_card() -> None:
    """It does not read them before the caller's stream has made them."""

    class Move(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.to(CUDA)

    def late(gradient: Tensor) -> Tensor:
        torch.cuda._sleep(20_000_000)
        return gradient * 2

    plain = nn.Linear(64, 64)
    pipe = GPipe(nn.Sequential(copy.deepcopy(plain), Move()), [1, 1], devices=["cpu"] * 2, chunks=4)
    x = torch.randn(64, 64)
    (2 * plain(x).square().sum()).backward()
    for _ in range(3):
        pipe.zero_grad()
        with torch.cuda.stream(torch.cuda.Stream(CUDA)):
            output = pipe(x)
            output.register_hook(late)
            output.square().sum().backward()
        for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("grad", [False, True])
def test_a_partition_of_the_host_may_have_its_loss_on_a_card(grad: bool) -> None:
    """The caller adds up the losses of micro-batches on a stream of its own."""
    model = nn.Linear(64, 64)

    def late_loss(output: Tensor, target: Tensor) -> Tensor:
        output, target = output.to(CUDA), target.to(CUDA)
        torch.cuda._sleep(10_000_000)
        return mse_loss(output, target)

    pipe = GPipe(nn.Sequential(copy.deepcopy(model)), [1], devices=["cpu"], chunks=4)
    x, target = torch.randn(64, 64), torch.randn(64, 64)
    expected = mse_loss(model(x), target).detach()
    for _ in range(3):
        with torch.set_grad_enabled(grad), torch.cuda.stream(torch.cuda.Stream(CUDA)):
            loss = pipe.step(x, target=target, loss_fn=late_loss)
            torch.cuda.current_stream().synchronize()
        assert loss.is_cuda
        torch.testing.assert_close(loss.cpu(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("alone", [True, False])
def test_a_loss_in_pinned_memory_is_there_when_it_is_added_up(alone: bool) -> None:
    """The caller adds up the losses of micro-batches on the host; one may be a part of several."""
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))

    def late_loss(output: Tensor, target: Tensor) -> Tensor:
        torch.cuda._sleep(10_000_000)
        loss = mse_loss(output, target)
        if alone:
            return loss.to("cpu", non_blocking=True)
        return torch.stack([loss, loss + 1]).to("cpu", non_blocking=True)[0]

    pipe = GPipe(copy.deepcopy(model), [1, 1], devices=[CUDA] * 2, chunks=4)
    x, target = torch.randn(64, 256), torch.randn(64, 256)
    expected = mse_loss(model(x), target).detach()
    for _ in range(3):
        loss = pipe.step(x.to(CUDA), target=target.to(CUDA), loss_fn=late_loss)
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
