"""Layers that were compiled by `torch.compile`, and mixed precision."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from chains import run_plain
from random_chains import Apply
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._higher_order_ops import while_loop
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import gpipebal as gb
from gpipebal.errors import ProfileError
from gpipebal.pipeline import GPipe, measure_memory
from gpipebal.schedule import CHECKPOINT_MODES, CheckpointMode

pytestmark = [
    pytest.mark.timeout(200),
    # torch 2.11 dies when a second thread compiles, with or without a pipeline.
    pytest.mark.skipif(
        torch.__version__ < (2, 12), reason="torch before 2.12 cannot compile in several threads"
    ),
    # torch's own compiler warns of its own parts.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
MODES = pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
BACKENDS = pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)


@pytest.fixture(autouse=True)
def forget_compiled() -> Any:
    """Start every test without compiled code."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def block(dropout: float = 0.0) -> nn.Sequential:
    """Make a layer worth compiling."""
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 8))


@BACKENDS
@MODES
def test_compiled_layers_are_compiled_once(backend: str, checkpoint: CheckpointMode) -> None:
    """Gradients are the plain model's, and further mini-batches of one shape compile nothing."""
    torch.manual_seed(0)
    plain = nn.Sequential(*[block() for _ in range(3)])
    counter = CompileCounterWithBackend(backend)
    compiled = [torch.compile(copy.deepcopy(layer), backend=counter) for layer in plain]
    pipe = GPipe(nn.Sequential(*compiled), [1, 2], chunks=4, checkpoint=checkpoint)
    inputs = torch.randn(8, 8)
    for _ in range(5):
        pipe.zero_grad()
        pipe(inputs).square().sum().backward()
    # With and without a graph, and with an input that needs no gradient: never once per cell. And
    # once in some hundred times torch takes a guard that two threads check at once for failed,
    # which it says itself that it did not expect.
    assert counter.frame_count <= 3 + 1
    run_plain(plain, inputs, 4).square().sum().backward()
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@BACKENDS
def test_compiled_dropout_draws_the_same_in_every_mode_and_balance(backend: str) -> None:
    """Random numbers of compiled code depend on the seed alone, recompute or not."""
    base = nn.Sequential(*[block(0.5) for _ in range(3)])
    results: list[list[Tensor]] = []
    runs: list[tuple[CheckpointMode, list[int]]] = [
        ("never", [3]),
        ("always", [1, 2]),
        ("except_last", [1, 1, 1]),
    ]
    for checkpoint, balance in runs:
        layers = [torch.compile(copy.deepcopy(layer), backend=backend) for layer in base]
        pipe = GPipe(nn.Sequential(*layers), balance, chunks=4, checkpoint=checkpoint)
        for _ in range(2):
            pipe.zero_grad()
            torch.manual_seed(3)
            output = pipe(torch.ones(8, 8))
            output.square().sum().backward()
        results.append(
            [output.detach(), *[p.grad for p in pipe.parameters() if p.grad is not None]]
        )
        pipe.close()
    for other in results[1:]:
        for mine, theirs in zip(other, results[0], strict=True):
            torch.testing.assert_close(mine, theirs)


class Turn(nn.Module):
    """Take one of two ways, by the values of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        turned: Tensor = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
        return turned


class Recurrent(nn.Module):
    """A layer that torch's compiler runs as written in part: the recurrent one in it."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.dropout = nn.LSTM(8, 8, batch_first=True), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Run it, with dropout behind it."""
        return self.dropout(self.recurrent(x)[0])  # type: ignore[no-any-return]


def test_what_draws_for_a_layer_is_not_compiled() -> None:
    """A compiled layer with a recurrent one in it compiles nothing of the pipeline's."""
    pipe = GPipe(nn.Sequential(nn.Linear(8, 8), Recurrent()), [1, 1], chunks=4, checkpoint="never")
    pipe[1].compile(backend="eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            pipe(torch.ones(8, 5, 8)).sum().backward()


def test_compiled_control_flow_works() -> None:
    """Operations that run functions get past what catches random numbers."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), Turn(), Turn())
    run_plain(plain, inputs := torch.randn(8, 8), 4).square().sum().backward()
    layers = [torch.compile(copy.deepcopy(layer), backend="aot_eager") for layer in plain]
    pipe = GPipe(nn.Sequential(*layers), [1, 2], chunks=4, checkpoint="always")
    pipe.zero_grad()
    pipe(inputs).square().sum().backward()
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_profile_says_that_it_cannot_look_into_control_flow() -> None:
    """What `torch.cond` saves for a backward is not shown, so costs have to be given."""
    linear = nn.Linear(8, 8)
    model = nn.Sequential(linear, Apply(lambda x: torch.cond(x.sum() > 0, linear, torch.cos, (x,))))
    with pytest.raises(ProfileError, match=r"(?s)layer '1' .*Fix: .*from_costs"):
        gb.profile_model(model, torch.randn(4, 8), rows=(), timeout=0.0, as_pipeline=False)


def _attend(x: Tensor) -> Tensor:
    """Attend to earlier tokens."""
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128, device="cpu")
    attended: Any = flex_attention(x[:, None], x[:, None], x[:, None], block_mask=mask)
    return attended[:, 0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_flex_attention_works_and_is_measured(compiled: bool) -> None:
    """A profile and a meter take it for one operation; on CPUs torch has its forward only."""
    attend = torch.compile(_attend) if compiled else _attend
    model = nn.Sequential(Apply(attend), nn.Linear(16, 2))
    inputs = torch.randn(4, 128, 16)
    pipe = GPipe(model, [1, 1], chunks=2)
    torch.testing.assert_close(pipe(inputs), model(inputs))
    with measure_memory(pipe) as meter:
        pipe(inputs).sum().backward()
    assert meter.peak_bytes[0] >= 2 * inputs.nbytes
    profile = gb.profile_model(model, inputs, chunks=2, rows=(), timeout=0.0, as_pipeline=False)
    assert profile.layers[0].output_bytes == inputs.nbytes // 2


def test_an_estimate_says_what_to_do_with_control_flow() -> None:
    """It cannot follow operations that run functions."""

    def repeat(x: Tensor) -> Tensor:
        result: Any = while_loop(lambda k, x: k < 3, lambda k, x: (k + 1, x * 2), (start, x))
        return result[1]  # type: ignore[no-any-return]

    start = torch.tensor(0)
    model = nn.Sequential(Apply(repeat), nn.Linear(8, 8))
    inputs = torch.randn(4, 8)
    with pytest.raises(ProfileError, match=r"(?s)given functions, .*Fix: .*method='measure'"):
        gb.profile_model(model, inputs, chunks=2, rows=(), method="estimate")
    profile = gb.profile_model(model, inputs, chunks=2, rows=(), timeout=0.0, as_pipeline=False)
    assert profile.layers[0].output_bytes == inputs.nbytes // 2


@MODES
@pytest.mark.parametrize("step", [False, True])
def test_bfloat16_autocast_gives_the_plain_models_numbers(
    checkpoint: CheckpointMode, step: bool
) -> None:
    """Cells compute in the caller's autocast, forward, recompute and loss.

    Without torch's cache of cast weights: with it the plain model adds up micro-batches in
    bfloat16.
    """
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    pipe = GPipe(copy.deepcopy(plain), [1, 2], chunks=3, checkpoint=checkpoint)
    inputs = torch.randn(6, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        expected = run_plain(plain, inputs, 3)
        expected.float().square().sum().backward()
        assert expected.dtype == torch.bfloat16
        if step:
            pipe.step(inputs, loss_fn=lambda y: y.float().square().sum(), reduction="sum")
        else:
            output = pipe(inputs)
            assert torch.equal(output, expected)
            output.float().square().sum().backward()
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-5)


def test_a_grad_scaler_works_as_on_the_plain_model() -> None:
    """Scaling, unscaling and skipping a step with infinite gradients are torch's own business."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    pipe = GPipe(copy.deepcopy(plain), [1, 1], chunks=2)
    inputs = torch.randn(4, 4)
    values = []
    for model in (plain, pipe):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
        for factor in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale(model(inputs).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        values.append([scaler.get_scale(), *[p.detach().clone() for p in model.parameters()]])
    assert values[0][0] == values[1][0]
    for mine, theirs in zip(values[1][1:], values[0][1:], strict=True):
        torch.testing.assert_close(mine, theirs)
