"""The profiler: what it measures, and that it leaves the model alone."""

from __future__ import annotations

import copy
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from chains import batchnorm_chain, skip_chain
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gpipebal as gb
from gpipebal.errors import GpipebalError
from gpipebal.profiler.step.optimizer import Maker
from gpipebal.profiler.step.state import optimizer_needs
from gpipebal.profiler.times import progress, rounds

pytestmark = pytest.mark.timeout(60)


def profile(model: nn.Module, sample: Any, **options: Any) -> gb.Profile:
    """Measure as little as possible, without a bar."""
    return gb.profile_model(model, sample, timeout=0, progress=False, **options)


def state_of(model: nn.Module) -> list[Any]:
    """Everything of a model, and of torch, that measuring must not change."""
    return [
        [p.detach().clone() for p in model.parameters()],
        [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        [b.clone() for b in model.buffers()],
        [(m.training, len(m._forward_hooks), len(m._backward_hooks)) for m in model.modules()],
        [(p.device, p.requires_grad, p._version) for p in model.parameters()],
        [id(p) for p in model.parameters()],
        torch.default_generator.get_state(),
        torch.get_num_threads(),
    ]


def same(left: Any, right: Any) -> bool:
    """Compare nested lists of tensors and other values, bit by bit."""
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and torch.equal(left, right)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 4),
    "batchnorm": lambda: nn.BatchNorm1d(4),
    "in place": lambda: nn.ReLU(inplace=True),
    "dropout": lambda: nn.Dropout(0.5),
    "frozen": lambda: nn.Linear(4, 4).requires_grad_(False),
    "identity": lambda: nn.Identity(),
    "nested": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()),
}


@settings(max_examples=15, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=5),
    training=st.booleans(),
    gradients=st.booleans(),
    chunks=st.integers(1, 3),
)
def test_profiling_leaves_the_model_bit_identical(
    kinds: list[str], training: bool, gradients: bool, chunks: int
) -> None:
    """Parameters, gradients, buffers, flags, hooks, random state and threads are as before."""
    model = nn.Sequential(*(LAYERS[kind]() for kind in kinds)).train(training)
    model[0].register_forward_hook(lambda *_: None)
    if gradients:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    sample = torch.randn(8, 4)
    before = state_of(model)
    try:
        result = profile(model, sample, chunks=chunks)
        assert result.names == tuple(str(k) for k in range(len(kinds)))
    except GpipebalError as error:
        # torch itself cannot train an in-place layer behind one that needs its output.
        assert "the backward of the whole chain failed" in str(error)
    assert same(state_of(model), before)


@pytest.mark.parametrize("end", ["error", "interrupt"])
def test_a_profile_that_ends_early_leaves_the_model_alone(end: str) -> None:
    """A layer that raises, or Ctrl-C, ends the profile; model and threads are as before."""
    came, interrupts = threading.Event(), [signal.SIGINT]

    def interrupted(*_: Any) -> None:
        came.set()
        raise KeyboardInterrupt

    class Late(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Late.calls += 1
            if Late.calls > 3:
                if end == "error":
                    raise RuntimeError("no more")
                if threading.current_thread() is not threading.main_thread():
                    # One thread sends one, and is at work until it has arrived.
                    with suppress(IndexError):
                        signal.raise_signal(interrupts.pop())
                        assert came.wait(30)
            return x

    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Late())
    sample = torch.randn(8, 4)
    before = state_of(model)
    running = set(threading.enumerate())
    handler = signal.signal(signal.SIGINT, interrupted)
    try:
        with pytest.raises(KeyboardInterrupt if end == "interrupt" else GpipebalError):
            gb.profile_model(model, sample, timeout=20.0)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert came.is_set() == (end == "interrupt")
    assert same(state_of(model), before)
    assert set(threading.enumerate()) <= running


def test_times_come_from_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward times are differences of the clock, per layer, as medians."""
    now = threading.local()

    def clock() -> float:
        now.time = getattr(now, "time", 100.0)
        return now.time

    class Costly(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
            ctx.seconds = seconds
            now.time = clock() + seconds
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            now.time = clock() + 3 * ctx.seconds
            return gradient, None

    class Layer(nn.Module):
        def __init__(self, seconds: float) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.seconds = seconds

        def forward(self, x: Tensor) -> Tensor:
            return Costly.apply(x * self.weight, self.seconds)

    monkeypatch.setattr(rounds.time, "perf_counter", clock)
    model = nn.Sequential(Layer(0.5), Layer(0.25), Layer(2.0))
    result = profile(model, torch.ones(4, 1), threads=1)
    assert [layer.forward_time for layer in result.layers] == [0.5, 0.25, 2.0]
    assert [layer.backward_time for layer in result.layers] == [1.5, 0.75, 6.0]
    assert [layer.forward_spread for layer in result.layers] == [0.0, 0.0, 0.0]


def test_bytes_of_known_layers() -> None:
    """Parameters, gradients, outputs and saved storages are the hand count, to the byte."""
    model = nn.Sequential(
        nn.Linear(8, 16),  # saves its input
        nn.ReLU(),  # saves its output
        nn.Linear(16, 4, bias=False),  # saves its input: what ReLU saved
        nn.BatchNorm1d(4),  # saves its input and two statistics
        nn.Identity(),  # saves nothing
    )
    model[2].requires_grad_(False)
    result = profile(model, torch.randn(6, 8), chunks=2)
    rows, size = 3, 4
    assert result.rows == rows
    layers = result.layers
    assert [x.parameter_bytes for x in layers] == [size * 144, 0, size * 64, size * 8, 0]
    assert [x.gradient_bytes for x in layers] == [size * 144, 0, 0, size * 8, 0]
    assert [x.buffer_bytes for x in layers] == [0, 0, 0, size * 8 + 8, 0]
    assert [x.output_bytes for x in layers] == [size * rows * n for n in (16, 16, 4, 4, 4)]
    saved = [result.bytes_of(x.saved) for x in layers]
    assert saved == [size * rows * 8, size * rows * 16, 0, size * rows * 4 + 2 * size * 4, 0]
    # The chain's input is what the first layer saves; Identity hands on what it was given.
    assert layers[0].saved == result.inputs
    assert layers[4].outputs == layers[3].outputs


def test_neighbours_share_a_storage() -> None:
    """What one layer hands on and both save is one storage, not two."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh())
    layers = profile(model, torch.randn(2, 4)).layers
    assert layers[1].saved == layers[1].outputs == layers[2].saved


def test_in_place_layers_are_measured() -> None:
    """An in-place layer keeps its own result, and what it was given belongs to nobody."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    result = profile(model, torch.randn(2, 4))
    assert result.layers[1].saved == result.layers[2].saved
    assert result.bytes_of(result.layers[1].saved) == 2 * 4 * 4


def test_frozen_layers_have_no_backward_before_the_first_trainable_one() -> None:
    """Nothing goes backward through layers that no gradient is wanted of."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    model[0].requires_grad_(False)
    result = profile(model, torch.randn(2, 4))
    assert [bool(layer.saved) for layer in result.layers] == [False, False, True, True]


def test_tuples_and_integers() -> None:
    """Chains of tuples, and chains that take integers, are measured."""
    assert profile(skip_chain(), torch.randn(4, 4)).n_layers == 5
    model = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(12, 2))
    result = profile(model, torch.randint(0, 10, (4, 3)), chunks=2)
    assert result.layers[0].output_bytes == 2 * 3 * 4 * 4


def test_step_terms() -> None:
    """Loss, gather and optimizer are measured when they are given, else unknown."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    plain = profile(model, torch.randn(6, 4), chunks=3)
    assert plain.step.loss_time is None and plain.step.optimizer_time is None
    assert plain.layers[0].optimizer_bytes is None
    full = profile(
        model,
        torch.randn(6, 4),
        chunks=3,
        loss_fn=nn.functional.cross_entropy,
        target=torch.zeros(6, dtype=torch.long),
        optimizer=torch.optim.Adam,
    )
    assert full.step.loss_time and full.step.optimizer_time and full.step.gather_time
    # Adam keeps two moments of each value, and a step counter of each tensor.
    assert full.layers[0].optimizer_bytes == 2 * 4 * 40 + 2 * 4


@pytest.mark.parametrize(
    ("make", "bytes_per_value"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 4),
        (lambda p: torch.optim.RMSprop(p), 4),
        (lambda p: torch.optim.AdamW(p), 8),
    ],
)
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_optimizer_state_is_that_of_the_real_one(
    make: Any, bytes_per_value: int, device_type: str
) -> None:
    """The state found on stand-ins is what a real step leaves, without touching the model.

    On CUDA most step all parameters at once, and keep the same.
    """
    parameters = [nn.Parameter(torch.ones(5, 3)), nn.Parameter(torch.ones(7))]
    found = optimizer_needs(Maker(make, parameters), device_type)
    real = make(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    real.step()
    counted = [
        sum(v.nbytes for v in real.state[p].values() if isinstance(v, Tensor)) for p in parameters
    ]
    assert found.state == counted
    assert abs(counted[0] - 15 * bytes_per_value) <= 4


BAD = {
    "two arguments": (
        lambda: profile(nn.Sequential(nn.Bilinear(2, 2, 1)), (torch.ones(2, 2), torch.ones(2, 2))),
        r"missing 1 required positional argument: 'input2'\nFix: let its forward take one argument",
    ),
    "no chain": (lambda: profile(nn.Linear(1, 1), torch.ones(2, 1)), "must be nn.Sequential"),
    "no layers": (lambda: profile(nn.Sequential(), torch.ones(2, 1)), "no layers"),
    "wrong shape": (
        lambda: profile(nn.Sequential(nn.Identity(), nn.Linear(3, 1)), torch.ones(2, 5)),
        r"layer '1' \(layer 1\) failed on a micro-batch of shape \(2, 5\) torch.float32.*"
        r"\nFix: give a sample and .* be trained with: model\(sample\) should run\.",
    ),
    "list of layers as a layer": (
        lambda: profile(nn.Sequential(nn.ModuleList([nn.Tanh()])), torch.ones(2, 1)),
        r"ModuleList.*\nFix: make layers of the modules in it: nn.Sequential\(first, \*blocks",
    ),
    "recurrent layer as it is": (
        lambda: profile(nn.Sequential(nn.GRU(3, 3), nn.Linear(3, 1)), torch.ones(2, 2, 3)),
        r"must be Tensor, not tuple\nFix: let the layer take the tuple, or the one before it",
    ),
    "recurrent layers in a row": (
        lambda: profile(nn.Sequential(nn.GRU(3, 3), nn.GRU(3, 3)), torch.ones(2, 2, 3)),
        r"'tuple' object .*\nFix: let the layer take the tuple, or the one before it",
    ),
    "convolution of a tuple": (
        lambda: profile(nn.Sequential(_Wrapped(tuple), nn.Conv1d(1, 1, 1)), torch.ones(2, 1, 3)),
        r"got \(tuple, (?s:.*)\nFix: let the layer take the tuple, or the one before it",
    ),
    "convolution of a list": (
        lambda: profile(nn.Sequential(_Wrapped(list), nn.Conv1d(1, 1, 1)), torch.ones(2, 1, 3)),
        r"got \(list, (?s:.*)\nFix: give a sample and a number of chunks",
    ),
    "target too": (
        lambda: profile(nn.Sequential(nn.Linear(3, 1)), [torch.ones(2, 3), torch.ones(2)]),
        r"must be Tensor, not list\nFix: give as sample only the input, without the target",
    ),
    "no rows": (lambda: profile(nn.Sequential(nn.Tanh()), torch.tensor(1.0)), "no dimensions"),
    "chunks": (lambda: profile(nn.Sequential(nn.Tanh()), torch.ones(2), chunks=0), "chunks=0"),
    "threads": (lambda: profile(nn.Sequential(nn.Tanh()), torch.ones(2), threads=0), "threads=0"),
    "timeout": (
        lambda: gb.profile_model(nn.Sequential(nn.Tanh()), torch.ones(2), timeout=-1),
        "timeout=-1",
    ),
    "device": (
        lambda: profile(nn.Sequential(nn.Tanh()), torch.ones(2), device="cuda:99"),
        "does not exist",
    ),
    "meta": (
        lambda: profile(nn.Sequential(nn.Linear(2, 2, device="meta")), torch.ones(2, 2)),
        "has no values to measure with",
    ),
    "loss": (
        lambda: profile(nn.Sequential(nn.Tanh()), torch.ones(2), loss_fn=lambda y: y.nothing),
        "the loss failed: AttributeError",
    ),
    "no tensor": (
        lambda: profile(nn.Sequential(_Nothing()), torch.ones(2)),
        "layer '0' returned no tensor",
    ),
}


class _Wrapped(nn.Module):
    """Returns its input in a tuple or a list."""

    def __init__(self, kind: Callable[[list[Tensor]], Any]) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        return self.kind([x])


class _Nothing(nn.Module):
    def forward(self, x: Tensor) -> str:
        return "nothing"


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_get_a_clear_error(case: str) -> None:
    """What cannot be measured is a GpipebalError that names it and says the fix."""
    make, message = BAD[case]
    with pytest.raises(GpipebalError, match=message) as caught:
        make()
    assert "Fix: " in str(caught.value)


def test_progress_is_silent_in_pipes(capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing is printed where standard error is not a terminal, and a bar where it is wanted."""
    with progress.progress_bar("measuring", 3, None) as told:
        told()
    assert capfd.readouterr() == ("", "")
    with progress.progress_bar("measuring", 3, True) as told:
        told()
    shown = capfd.readouterr().err
    # Steps for which there was no time are not missed at the end.
    assert "measuring" in shown and "3/3" in shown


def test_profiles_of_equal_models_have_equal_memory() -> None:
    """Everything but the times is the same from one profile to the next."""
    model = batchnorm_chain()
    left, right = (profile(copy.deepcopy(model), torch.randn(4, 2, 8, 8)) for _ in range(2))
    assert left.storages == right.storages
    for one, other in zip(left.layers, right.layers, strict=True):
        assert (one.saved, one.outputs, one.fingerprint) == (
            other.saved,
            other.outputs,
            other.fingerprint,
        )
        assert one.backward_peak_bytes == other.backward_peak_bytes
