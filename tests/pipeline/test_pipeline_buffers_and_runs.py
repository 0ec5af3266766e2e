"""Pipelines: shared buffers, copies, and recomputed runs inside of partitions."""

from __future__ import annotations

import copy
import pickle
import random
import threading
import time

import pytest
import torch
from torch import Tensor, nn

from gpipebal import is_recomputing
from gpipebal.errors import BalanceError, ModelError, PipelineTimeoutError
from gpipebal.pipeline import GPipe, convert_deferred_batch_norm, with_recompute
from gpipebal.schedule import CheckpointMode

pytestmark = pytest.mark.timeout(120)

MODES = pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])


class Count(nn.Module):
    """Counts in a buffer."""

    def __init__(self, n: Tensor) -> None:
        super().__init__()
        self.register_buffer("n", n)

    def forward(self, x: Tensor) -> Tensor:
        self.n.add_(1)
        return x * 1


class Scale(nn.Module):
    """Multiplies by a buffer."""

    def __init__(self, n: Tensor) -> None:
        super().__init__()
        self.register_buffer("n", n)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.n.clone()


@MODES
@pytest.mark.parametrize("runs", [[], [[0, 1, 2]]])
def test_a_buffer_of_two_modules_is_one_in_a_recompute(
    checkpoint: CheckpointMode, runs: list[list[int]]
) -> None:
    """What one writes the other reads, as in the forward."""
    n = torch.zeros(())
    linear = nn.Linear(1, 1, bias=False)
    model = with_recompute(nn.Sequential(linear, Count(n), Scale(n)), runs)
    pipe = GPipe(model, [3], chunks=2, checkpoint=checkpoint)
    output = pipe(torch.ones(2, 1))
    output.sum().backward(retain_graph=True)
    assert linear.weight.grad is not None and linear.weight.grad.item() == 3.0  # 1 + 2
    output.sum().backward()
    assert linear.weight.grad.item() == 6.0
    assert n.item() == 2.0


def test_deferred_batch_norm_of_what_is_compiled_is_refused() -> None:
    """A copy of a compiled module runs the original; converted first, it is deferred."""
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    compiled = torch.compile(block, backend="eager")
    with pytest.raises(ModelError, match="compiled, or whose forward was replaced"):
        GPipe(nn.Sequential(compiled, nn.ReLU()), [1, 1], chunks=2, deferred_batch_norm=True)
    patched = nn.BatchNorm1d(4)
    plain = patched.forward
    patched.forward = lambda x: plain(x) + 1  # type: ignore[method-assign]
    with pytest.raises(ModelError, match="BatchNorm1d runs the original"):
        convert_deferred_batch_norm(nn.Sequential(patched))
    # Compiled in place, it is converted uncompiled.
    norm = nn.BatchNorm1d(4)
    norm.compile(backend="eager")
    pipe = GPipe(nn.Sequential(nn.Linear(4, 4), norm), [1, 1], chunks=2, deferred_batch_norm=True)
    pipe(torch.randn(8, 4))
    assert norm.num_batches_tracked is not None and norm.num_batches_tracked.item() == 1


@pytest.mark.skipif(not hasattr(nn.Module, "compile"), reason="this torch compiles no modules")
def test_a_copy_of_a_compiled_pipeline_is_its_own() -> None:
    """It does not call the original."""
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2)), [1])
    pipe.compile(backend="eager")
    for twin in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        twin(torch.ones(2, 2)).sum().backward()
        assert twin[0].weight.grad is not None and pipe[0].weight.grad is None


def test_runs_inside_of_a_layer_are_refused() -> None:
    """Their layers would draw the random numbers of others."""
    body = with_recompute(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)), [[0], [1]])
    with pytest.raises(BalanceError, match=r"inside of layer '1'.*\nFix: open that layer first"):
        GPipe(nn.Sequential(nn.Identity(), body), [2])


class Masked(nn.Module):
    """Uses a buffer, and takes its time in recomputes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("mask", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        if is_recomputing():
            time.sleep(random.random() * 0.005)
        return self.layer(x) * self.mask


def test_a_buffer_in_runs_of_two_partitions_stays_the_same_tensor() -> None:
    """Their recomputes overlap, and must not lend it twice."""
    layer = Masked()
    mask = layer.mask
    model = with_recompute(nn.Sequential(layer, layer), [[0], [1]])
    pipe = GPipe(model, [1, 1], chunks=20, checkpoint="never")
    for _ in range(3):
        pipe(torch.ones(20, 3)).sum().backward()
        assert layer.mask is mask


def test_a_run_that_hangs_in_its_recompute_gives_the_buffers_back() -> None:
    """At once, and not when it wakes up."""
    wake = threading.Event()

    class Hang(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.register_buffer("n", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.n.add_(1)
            if is_recomputing():
                wake.wait()
            return self.layer(x).tanh()

    layer = Hang()
    n = layer.n
    model = with_recompute(nn.Sequential(layer), [[0]])
    # The first such step may take longer than the timeout: torch imports what it needs.
    first = with_recompute(nn.Sequential(nn.Linear(2, 2)), [[0]])
    GPipe(first, [1], checkpoint="never")(torch.ones(2, 2)).sum().backward()
    pipe = GPipe(model, [1], chunks=2, checkpoint="never", timeout=1.0)
    output = pipe(torch.ones(2, 2))
    assert pipe._runtime is not None
    threads = pipe._runtime.pool.threads
    with pytest.raises(PipelineTimeoutError):
        output.sum().backward()
    assert layer.n is n and n.item() == 2.0
    n.fill_(7.0)
    wake.set()
    for thread in threads:
        thread.join(20)
    assert layer.n is n and n.item() == 7.0


def test_outputs_that_cannot_be_joined_are_named() -> None:
    """With one micro-batch as with several."""

    class Sum(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum(1)

    class Trim(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, : int(x.max())]

    for chunks in (1, 2):
        pipe = GPipe(nn.Sequential(Sum()), [1], chunks=chunks, out_dims=1)
        with pytest.raises(ModelError, match="rows along dim 1"):
            pipe(torch.ones(4, 3))
    x = torch.tensor([[1.0, 1.0, 1.0], [3.0, 3.0, 3.0]])
    for out_dims in (0, None):
        pipe = GPipe(nn.Sequential(Trim()), [1], chunks=2, out_dims=out_dims)
        with pytest.raises(ModelError, match=r"shape \(1, 3\) in micro-batch 1"):
            pipe(x)


def test_deferred_statistics_of_two_threads_are_all_there() -> None:
    """Each mini-batch moves the running mean, whenever the other ends."""
    norm = nn.BatchNorm1d(1, momentum=0.01)
    pipe = GPipe(nn.Sequential(norm, nn.Identity()), [1, 1], chunks=2, deferred_batch_norm=True)
    x = torch.tensor([[0.0], [2.0], [0.0], [2.0]])

    def run() -> None:
        with torch.no_grad():
            for _ in range(60):
                pipe(x)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert norm.running_mean is not None and norm.num_batches_tracked is not None
    assert norm.num_batches_tracked.item() == 120
    assert norm.running_mean.item() == pytest.approx(1 - 0.99**120, rel=1e-4)
