"""A pipeline that does not come forward says what every worker is doing."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

from gpipebal.errors import PipelineTimeoutError
from gpipebal.pipeline import GPipe, is_recomputing

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Let torch import what its first backward needs, which can take longer than a timeout here."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    GPipe(model, [1, 1], chunks=2)(torch.ones(4, 2)).sum().backward()


class Stuck(nn.Module):
    """Wait until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.gate = threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        assert self.gate.wait(30)
        return self.linear(x)


def hanging(gate: threading.Event, inside: threading.Event) -> Callable[[Tensor], Tensor]:
    """Return a function that does nothing; its first backward tells that it runs, and waits."""

    class Block(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            if not inside.is_set():
                inside.set()
                assert gate.wait(30)
            return gradient

    apply: Callable[[Tensor], Tensor] = Block.apply
    return apply


def wait_for(threads: Iterable[threading.Thread]) -> None:
    """Wait until workers that were given up have ended."""
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


@pytest.mark.parametrize("how", ["call", "step"])
def test_a_stuck_layer_is_named(how: str) -> None:
    """The error names layer, micro-batch and line of the stuck worker, and what others wait for."""
    stuck = Stuck()
    model = nn.Sequential(nn.Linear(2, 2), stuck, nn.Linear(2, 2))
    pipe = GPipe(model, [1, 1, 1], chunks=2, timeout=1.0)
    with pytest.raises(PipelineTimeoutError) as caught:
        if how == "call":
            pipe(torch.ones(4, 2))
        else:
            pipe.step(torch.ones(4, 2), loss_fn=torch.sum, schedule="1f1b")
    text = str(caught.value)
    assert isinstance(caught.value, TimeoutError)
    assert "timeout=1.0 s" in text
    assert "partition 1 runs the forward of micro-batch 0 in layer '1', for " in text
    assert "assert self.gate.wait(30)" in text
    assert "partition 2 waits to start the forward of micro-batch 0, for " in text
    assert "Fix: " in text
    # The next mini-batch gets new workers, and the old ones end once they are let go.
    runtime = pipe._runtime
    assert runtime is not None
    stuck.gate.set()
    pipe.timeout = None
    output = pipe(torch.ones(4, 2))
    output.sum().backward()
    for thread in runtime.pool.threads:
        thread.join(20)
        assert not thread.is_alive()


def test_a_stuck_pipeline_that_another_thread_closes_still_times_out() -> None:
    """Who closes it waits for its workers, but keeps nobody from giving them up."""
    stuck = Stuck()
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), stuck), [1, 1], chunks=1, timeout=1.0)
    pool = pipe._started().pool
    closer = threading.Thread(target=pipe.close, daemon=True)
    stuck.register_forward_pre_hook(lambda *_: closer.start())
    with pytest.raises(PipelineTimeoutError, match="runs the forward of micro-batch 0"):
        pipe(torch.ones(2, 2))
    closer.join(20)
    assert not closer.is_alive() and pool.threads[1].is_alive()
    stuck.gate.set()
    pool.threads[1].join(20)
    assert not pool.threads[1].is_alive()


def test_slow_is_not_stuck() -> None:
    """As long as actions end one after the other, the whole may take longer than the timeout."""
    calls = []

    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            threading.Event().wait(0.25)
            calls.append(1)
            return x

    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), Slow()), [1, 1], chunks=6, timeout=1.0)
    pipe(torch.ones(6, 2)).sum().backward()
    assert len(calls) >= 6


def test_a_backward_that_hangs_is_named_too() -> None:
    """The timeout holds for the backward as well, and the graph is spent afterwards."""
    gate = threading.Event()
    block = hanging(gate, threading.Event())

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return block(x)

    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), Layer()), [1, 1], chunks=1, timeout=1.0)
    output = pipe(torch.ones(2, 2))
    with pytest.raises(PipelineTimeoutError, match="partition 1 runs the backward of micro-batch"):
        output.sum().backward()
    gate.set()
    pipe.timeout = None
    with pytest.raises(RuntimeError, match="ran already"):
        output.sum().backward()
    pipe(torch.ones(2, 2)).sum().backward()
    del pipe, output
    gc.collect()


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_that_come_too_late_are_dropped(tied: bool) -> None:
    """A worker that was given up inside a backward adds nothing when it comes back."""
    gate, inside = threading.Event(), threading.Event()
    gate.set()
    block = hanging(gate, inside)

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return block(x)

    first = nn.Sequential(nn.Linear(2, 2), Layer())
    model = nn.Sequential(first, first[0] if tied else nn.Linear(2, 2))
    inputs = torch.ones(4, 2)
    model(inputs).square().sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    inside.clear()
    pipe = GPipe(model, [1, 1], chunks=2, checkpoint="never", timeout=1.0)
    output = pipe(inputs)
    assert pipe._runtime is not None
    threads = pipe._runtime.pool.threads
    gate.clear()
    with pytest.raises(PipelineTimeoutError):
        output.square().sum().backward()
    pipe.timeout = None
    pipe.zero_grad()
    pipe(inputs).square().sum().backward()
    gate.set()
    wait_for(threads)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    # The threads that are left, and the caller, add as ever.
    model(inputs).square().sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * gradient)


def test_a_loss_that_hangs_in_a_recompute_has_its_own_buffers_back() -> None:
    """As layers have, when the step is given up."""

    class Loss(nn.Module):
        calls: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.gate = threading.Event()

        def forward(self, y: Tensor) -> Tensor:
            assert not is_recomputing() or self.gate.wait(30)
            self.calls += 1
            return y.sum()

    loss = Loss()
    own = loss.calls
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pipe = GPipe(model, [1, 1], chunks=2, checkpoint="always", timeout=1.0)
    pipe(torch.ones(4, 2))  # the runtime whose workers will be given up
    assert pipe._runtime is not None
    threads = pipe._runtime.pool.threads
    with pytest.raises(PipelineTimeoutError):
        pipe.step(torch.ones(4, 2), loss_fn=loss, schedule="gpipe")
    assert loss.calls is own
    assert own.item() == 2
    loss.gate.set()
    wait_for(threads)
    assert loss.calls is own


def test_gradients_of_a_loss_that_come_too_late_are_dropped() -> None:
    """Parameters of a loss inside the pipeline are no exception."""
    gate, inside = threading.Event(), threading.Event()
    block = hanging(gate, inside)

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(()))

        def forward(self, y: Tensor) -> Tensor:
            return block(y + self.bias).square().sum()

    loss = Loss()
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], chunks=2, timeout=1.0)
    pipe(torch.ones(4, 2))  # the runtime whose workers will be given up
    assert pipe._runtime is not None
    threads = pipe._runtime.pool.threads
    with pytest.raises(PipelineTimeoutError):
        pipe.step(torch.ones(4, 2), loss_fn=loss)
    gate.set()
    wait_for(threads)
    assert loss.bias.grad is None


@pytest.mark.parametrize("made", ["in inference mode", "outside", "without values"])
def test_parameters_that_are_in_no_graph_do_not_hide_the_timeout(made: str) -> None:
    """Gradients that could come too late are looked for in the parameters that can get any."""
    stuck = Stuck()
    model = nn.Sequential(nn.Linear(2, 2), stuck)
    if made == "in inference mode":
        with torch.inference_mode():
            model[0] = nn.Linear(2, 2)
    if made == "without values":
        stuck.add_module("unused", nn.LazyLinear(2))
    pipe = GPipe(model, [1, 1], chunks=2, timeout=0.5)
    with torch.inference_mode(made != "without values"), pytest.raises(PipelineTimeoutError):
        pipe(torch.ones(4, 2))
    stuck.gate.set()


@pytest.mark.timeout(120)
def test_the_process_can_end_with_a_worker_that_hangs() -> None:
    """A worker that never comes back does not keep the interpreter from exiting."""
    code = (
        "import threading, torch, gpipebal as gb\n"
        "class Hang(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        threading.Event().wait()\n"
        "pipe = gb.GPipe(torch.nn.Sequential(Hang()), [1], timeout=0.2)\n"
        "try:\n"
        "    pipe(torch.ones(1))\n"
        "except TimeoutError as error:\n"
        "    print('told')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout) == (0, "told\n"), done.stderr


@pytest.mark.parametrize("timeout", [0, -1, "soon", True])
def test_timeouts_that_are_none_are_refused(timeout: object) -> None:
    """A timeout is a time above 0, or None."""
    with pytest.raises(ValueError, match="timeout is not a time"):
        GPipe(nn.Sequential(nn.ReLU()), [1], timeout=timeout)  # type: ignore[arg-type]
