"""What torch has once for the whole process, where layers of several partitions touch it."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from chains import Calls
from torch import Tensor, nn
from torch.backends import cuda
from torch.nn.utils import parametrize

from gpipebal import GPipe
from gpipebal.pipeline import with_recompute
from gpipebal.pipeline.minibatch.minibatch import MiniBatch
from gpipebal.pipeline.randomness import lent, seeds
from gpipebal.pipeline.randomness.seeds import MiniBatchSeed
from gpipebal.schedule import CHECKPOINT_MODES, CheckpointMode

MODES = pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)


def masks_of(pipe: GPipe, steps: int) -> tuple[int, int]:
    """Return how many different dropout masks, and numbers of the caller, so many steps have."""
    x = torch.ones(16, 8, requires_grad=True)
    masks, drawn = set(), set()
    for _ in range(steps):
        output = pipe(x)
        masks.add(tuple((output == 0).flatten().tolist()))
        drawn.add(float(torch.rand(())))
        output.sum().backward()
    return len(masks), len(drawn)


class Rewound(torch.autograd.Function):
    """Leave in the backward the state of the generator that was there in the forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.state = torch.get_rng_state()
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        torch.set_rng_state(ctx.state)
        return gradient


class Rewinds(nn.Module):
    """Do what the last of several partitions with `torch.utils.checkpoint` may do."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Rewound.apply(x)
        return result


@MODES
def test_layers_that_leave_an_old_state_of_the_generator(checkpoint: CheckpointMode) -> None:
    """Seeds go on, and what the caller draws."""
    model = nn.Sequential(Rewinds(), nn.Dropout())
    assert masks_of(GPipe(model, [1, 1], checkpoint=checkpoint), 12) == (12, 12)


def test_layers_that_seed_the_generator_for_a_block() -> None:
    """The seed of a mini-batch does not come from inside of the block."""

    def fork() -> None:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            torch.rand(3)

    assert masks_of(GPipe(nn.Sequential(Calls(fork), nn.Dropout()), [2]), 12) == (12, 12)


def test_two_mini_batches_that_begin_with_one_state() -> None:
    """Those of two threads have seeds of their own, and the generator goes on for both."""
    torch.manual_seed(3)
    one, two, three = MiniBatchSeed(None), MiniBatchSeed(None), MiniBatchSeed(None)
    with one.in_phase(), two.in_phase():
        assert int(one) != int(two)
    with three.in_phase():
        assert int(three) not in (int(one), int(two))
    assert not seeds._under_way
    torch.manual_seed(3)
    again = MiniBatchSeed(None)
    with again.in_phase():
        assert int(again) == int(one)
    state = torch.get_rng_state()
    with again.in_phase():
        assert int(again) == int(one)
    with MiniBatchSeed(None).in_phase():
        pass
    assert torch.equal(torch.get_rng_state(), state)


class Bounded(nn.Module):
    """Keep a weight between -1 and 1, by a function whose graph keeps its result."""

    def forward(self, weight: Tensor) -> Tensor:
        return torch.tanh(weight)


class Cell(nn.Module):
    """Use a weight several times, and compute it once."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        parametrize.register_parametrization(self.linear, "weight", Bounded())

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            return torch.tanh(self.linear(torch.tanh(self.linear(x))))


@MODES
@pytest.mark.parametrize("how", ["call", "gpipe", "1f1b"])
@pytest.mark.parametrize("is_copy", [False, True])  # torch's cache knows a copy as its original
def test_weights_that_are_cached_meanwhile(
    checkpoint: CheckpointMode, how: str, is_copy: bool
) -> None:
    """As where another partition is inside of such a block: each pass computes its own weight."""
    model = nn.Sequential(Cell(), Cell(), Cell()).double()
    plain = copy.deepcopy(model)
    if is_copy:
        model = copy.deepcopy(model)
    x, y = torch.randn(2, 6, 8, dtype=torch.double)
    nn.functional.mse_loss(plain(x), y).backward()
    pipe = GPipe(model, [1, 1, 1], chunks=3, checkpoint=checkpoint)
    for _ in range(2):  # in the first, forwards have graphs in every mode
        pipe.zero_grad()
        with parametrize.cached():
            if how == "call":
                nn.functional.mse_loss(pipe(x), y).backward()
            else:
                pipe.step(x, target=y, loss_fn=nn.functional.mse_loss, schedule=how)
        for one, two in zip(pipe.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, two.grad)


@MODES
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_weights_that_runs_and_losses_cache(checkpoint: CheckpointMode, schedule: str) -> None:
    """A recompute of a run computes them again, and so does the loss of the next micro-batch."""

    class Loss(Cell):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.mse_loss(super().forward(x), y)

    model, loss = nn.Sequential(Cell(), Cell()).double(), Loss().double()
    plain = copy.deepcopy(nn.ModuleList([model, loss]))
    x, y = torch.randn(2, 6, 8, dtype=torch.double)
    plain[1](plain[0](x), y).backward()
    pipe = GPipe(with_recompute(model, [[0], [1]]), [1, 1], chunks=3, checkpoint=checkpoint)
    with parametrize.cached():
        pipe.step(x, target=y, loss_fn=loss, schedule=schedule)
    for one, two in zip([*model.parameters(), *loss.parameters()], plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)


@pytest.mark.parametrize("runs", [[[2, 3]], [[0], [2]]])
def test_weights_that_a_layer_before_a_run_has_cached(runs: list[list[int]]) -> None:
    """The run is the same layer again: its forward caches what its recompute will."""
    twice = torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8, dtype=torch.double))
    model = nn.Sequential(twice, nn.Tanh(), twice, nn.Tanh())
    plain, x = copy.deepcopy(model), torch.randn(6, 8, dtype=torch.double)
    plain(x).square().mean().backward()
    pipe = GPipe(with_recompute(model, runs), [4], chunks=3, checkpoint="never")
    with parametrize.cached():
        pipe.step(x, loss_fn=lambda y: y.square().mean())
    for one, two in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)


def test_an_attribute_that_is_called_as_torchs_parametrizations() -> None:
    """A layer may have layers of that name, while another has weights in torch's cache."""

    class Own(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.parametrizations = nn.ModuleDict({"a": nn.Linear(8, 8)})

        def forward(self, x: Tensor) -> Tensor:
            return self.parametrizations["a"](super().forward(x))  # type: ignore[no-any-return]

    norm = torch.nn.utils.parametrizations.weight_norm
    model = nn.Sequential(norm(nn.Linear(8, 8)), Own(), norm(nn.Linear(8, 8)))
    pipe = GPipe(model, [1, 2], chunks=2, checkpoint="always")
    with parametrize.cached():
        pipe(torch.randn(4, 8)).sum().backward()


@pytest.mark.parametrize("how", ["call", "gpipe", "no_grad"])
def test_kernels_that_layers_leave_switched_off(how: str) -> None:
    """As blocks of `sdpa_kernel` do that several partitions leave in any order."""
    before = cuda.math_sdp_enabled(), cuda.flash_sdp_enabled()

    def leave() -> None:
        cuda.enable_math_sdp(False)
        cuda.enable_flash_sdp(False)

    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), Calls(leave)), [1, 1], chunks=2)
    try:
        if how == "call":
            pipe(torch.ones(4, 2)).sum().backward()
        elif how == "gpipe":
            pipe.step(torch.ones(4, 2), loss_fn=torch.sum)
        else:
            with torch.no_grad():
                pipe(torch.ones(4, 2))
        assert (cuda.math_sdp_enabled(), cuda.flash_sdp_enabled()) == before
    finally:
        cuda.enable_math_sdp(before[0])
        cuda.enable_flash_sdp(before[1])


@pytest.mark.parametrize("how", ["call", "step", "backward"])
def test_an_interrupt_while_gradients_are_off(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes while torch enters `no_grad` does not leave the caller without gradients."""
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], chunks=2)
    x = torch.ones(4, 2)
    output = pipe(x)

    def interrupted(*_: object) -> None:
        torch.set_grad_enabled(False)
        raise KeyboardInterrupt

    monkeypatch.setattr(MiniBatch, "_take_input_gradients", interrupted)
    monkeypatch.setattr(MiniBatch, "forward", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            if how == "call":
                pipe(x)
            elif how == "step":
                pipe.step(x, loss_fn=torch.sum)
            else:
                output.sum().backward()
        assert torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)
    monkeypatch.undo()
    pipe.zero_grad()
    pipe.step(x, loss_fn=torch.sum)
    assert all(parameter.grad is not None for parameter in pipe.parameters())


def test_a_seed_that_is_set_again_begins_anew() -> None:
    """What another thread draws behind it is not taken for an old state of the first time."""

    def draw() -> None:
        thread = threading.Thread(target=lambda: drawn.append(float(torch.rand(()))))
        thread.start()
        thread.join()

    pipe = GPipe(nn.Sequential(Calls(draw)), [1])
    found = []
    for _ in range(2):
        drawn: list[float] = []
        torch.manual_seed(5)
        for _ in range(3):
            pipe(torch.ones(1, 1))
        found.append(drawn)
    assert len(set(found[0])) == 3
    assert found[1] == found[0]


def test_an_operation_that_hangs_does_not_hold_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has borrowed the default generator, in a worker that was given up, say."""
    monkeypatch.setattr(seeds, "_PATIENCE", 0.01)
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Dropout()), [1, 1])
    held, over = threading.Event(), threading.Event()

    def hang() -> None:
        with lent.default_generators:
            held.set()
            over.wait(30)

    thread = threading.Thread(target=hang)
    thread.start()
    try:
        assert held.wait(30)
        pipe(torch.ones(2, 2)).sum().backward()
    finally:
        over.set()
        thread.join()
    assert is_free(lent.default_generators) and not seeds._under_way


def is_free(lock: Any) -> bool:
    """Tell whether another thread could take a lock."""
    found: list[bool] = []

    def take() -> None:
        found.append(lock.acquire(blocking=False))
        if found[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return found[0]


def test_an_interrupt_right_after_the_generators_were_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are free again: a later operation that borrows them would wait for ever."""

    class Interrupted:
        is_over = False

        def acquire(self, timeout: float) -> bool:
            found = lent.default_generators.acquire(timeout=timeout)
            if not self.is_over:
                self.is_over = True
                raise KeyboardInterrupt
            return found

        def release(self) -> None:
            lent.default_generators.release()

    monkeypatch.setattr(seeds, "default_generators", Interrupted())
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Dropout()), [1, 1])
    with pytest.raises(KeyboardInterrupt):
        pipe(torch.ones(2, 2))
    assert is_free(lent.default_generators)
    pipe(torch.ones(2, 2)).sum().backward()
