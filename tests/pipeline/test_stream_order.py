"""What runs on one stream comes behind what it needs of others, seen without a CUDA device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from chains import skip_chain
from stream_order import HOST, Cards
from torch import Tensor, nn

from gpipebal.pipeline import GPipe, with_recompute
from gpipebal.pipeline.values import lane
from gpipebal.pipeline.values.lane import CudaLane
from gpipebal.schedule import CHECKPOINT_MODES, SCHEDULES
from gpipebal.skip import pop, skippable, stash

# Autocast for CUDA, which torch.utils.checkpoint turns off, warns where there is none.
pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'"),
]
MODES = pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
HOW = pytest.mark.parametrize("how", ["call", *SCHEDULES])
ONE, TWO, THREE = (torch.device("cuda", index) for index in range(3))


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Cards:
    """Let there be three cards."""
    return Cards(monkeypatch, 3)


@skippable(stash=["kept"])
class Keep(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("kept", x * 2)
        return x


@skippable(pop=["kept"])
class Add(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x + (yield pop("kept"))


def plain() -> nn.Sequential:
    """Layers that keep their output, write to their input, draw, or hand on a view."""
    last = nn.Sequential(nn.Linear(4, 4), nn.Unflatten(1, (2, 2)), nn.Flatten())
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Tanh(), last)


def skips() -> nn.Sequential:
    """A value goes past a partition."""
    return nn.Sequential(Keep(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), Add())


def norms() -> nn.Sequential:
    """Statistics are written to in a forward, or read and written when all of them are over."""
    layers = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4), nn.BatchNorm1d(4)]
    return nn.Sequential(*layers)


def tied() -> nn.Sequential:
    """Two partitions have one weight."""
    shared = nn.Linear(4, 4)
    return nn.Sequential(shared, nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), shared)


def runs() -> nn.Sequential:
    """Parts of partitions are recomputed by themselves."""
    return with_recompute(plain(), [[0, 1], [3]])


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean of squares, for an output of any width."""
    return (output - target).square().mean()


def train(pipe: GPipe, how: str, place: torch.device) -> None:
    """Take a few steps, each with a mini-batch that comes from the caller's own graph."""
    before = nn.Linear(4, 4).to(place)
    parameters = [*before.parameters(), *pipe.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)
    for _ in range(3):
        optimizer.zero_grad()
        inputs, target = before(torch.randn(8, 4).to(place)), torch.randn(8, 1)
        if how == "call":
            loss_of(pipe(inputs).tanh(), target.to(pipe.devices[-1])).backward()
        else:
            pipe.step(inputs, target=target, loss_fn=loss_of, schedule=how)
        optimizer.step()
    pipe.close()


@MODES
@HOW
@pytest.mark.parametrize(
    ("devices", "place"),
    [([ONE] * 3, ONE), ([ONE, TWO, ONE], TWO), ([ONE, TWO, THREE], HOST)],
    ids=["one card", "two cards", "three cards"],
)
@pytest.mark.parametrize("make", [plain, skips, norms, tied, runs, skip_chain])
def test_work_comes_behind_what_it_needs(
    make: Callable[[], nn.Sequential],
    devices: list[torch.device],
    place: torch.device,
    how: str,
    checkpoint: Any,
    cards: Cards,
) -> None:
    """In every action, and for the caller: no memory is read too early, nor given away."""
    if make is tied and place != ONE:
        pytest.skip("a parameter is on one card")
    for deferred in [False, True] if make is norms else [False]:
        pipe = GPipe(
            make(),
            [2, 1, 2],
            devices=devices,
            chunks=4,
            checkpoint=checkpoint,
            deferred_batch_norm=deferred,
        )
        with cards.watching():
            train(pipe, how, place)
    assert cards.errors == []


@pytest.mark.parametrize("devices", [[ONE] * 3, [ONE, TWO, ONE]], ids=["one card", "two cards"])
@pytest.mark.parametrize("name", ["wait_for", "follow_caller", "mark", "give_to_caller"])
@HOW
def test_a_wait_that_is_forgotten_is_found(
    how: str,
    name: str,
    devices: list[torch.device],
    cards: Cards,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is looked for is seen, and each of these is needed."""
    monkeypatch.setattr(CudaLane, name, lambda *_: ())
    pipe = GPipe(plain(), [2, 1, 2], devices=devices, chunks=4)
    with cards.watching():
        train(pipe, how, HOST)  # no stream of the caller's has made the mini-batch
    assert any("does not wait" in error for error in cards.errors)


@pytest.mark.parametrize("devices", [[ONE] * 2, [ONE, TWO]], ids=["one card", "two cards"])
@pytest.mark.parametrize("forgotten", [False, True])
def test_memory_that_is_given_away_too_early_is_found(
    forgotten: bool, devices: list[torch.device], cards: Cards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partition makes its third output when the next one has taken the first and let go of it."""
    begun = threading.Semaphore(0)

    class Ahead(nn.Module):
        n_calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.n_calls += 1
            if self.n_calls > 2:
                assert begun.acquire(timeout=30)
            return x * 2

    class Behind(nn.Module):
        n_calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.n_calls += 1
            if self.n_calls > 1:
                begun.release()
            return x + 1

    if forgotten:
        monkeypatch.setattr(lane, "record_stream", lambda tensor, stream: None)
    pipe = GPipe(nn.Sequential(Ahead(), Behind()), [1, 1], devices=devices, chunks=4)
    with cards.watching(), torch.no_grad():
        pipe(torch.ones(8, 4))
    pipe.close()
    assert bool(cards.errors) == forgotten
    assert all("may be given memory" in error for error in cards.errors)


class Fault(nn.Module):
    """Fails with the third micro-batch, in its forward or in its backward."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when = when
        self.left = 3

    def fail(self, _: Tensor) -> None:
        self.left -= 1
        if not self.left:
            raise ValueError("broken")

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        if self.when == "forward":
            self.fail(y)
        elif y.requires_grad:
            y.register_hook(self.fail)
        return y


@pytest.mark.parametrize("devices", [[ONE] * 3, [ONE, TWO, ONE]], ids=["one card", "two cards"])
@pytest.mark.parametrize("when", ["forward", "backward"])
@HOW
def test_a_caller_comes_behind_what_a_failed_step_has_launched(
    how: str, when: str, devices: list[torch.device], cards: Cards
) -> None:
    """Parameters, their gradients and buffers may be overwritten at once."""
    pipe = GPipe(nn.Sequential(*norms(), Fault(when)), [2, 2, 2], devices=devices, chunks=4)
    with cards.watching():
        with pytest.raises(ValueError, match="broken"):
            train(pipe, how, ONE)
        with torch.no_grad():
            for one in [*pipe.parameters(), *pipe.buffers()]:
                one.zero_()
                if one.grad is not None:
                    one.grad.zero_()
    pipe.close()
    assert cards.errors == []
