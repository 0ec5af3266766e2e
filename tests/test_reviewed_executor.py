"""Faults that reading the executor found: aliases, given-up workers, interrupts, ties, lengths."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipebal.errors import ModelError, PipelineError, PipelineTimeoutError
from gpipebal.pipeline import GPipe
from gpipebal.pipeline.inbox import Flag
from gpipebal.pipeline.minibatch import MiniBatch
from gpipebal.schedule import CheckpointMode
from gpipebal.skip import pop, skippable, stash

pytestmark = pytest.mark.timeout(60)
MODES = pytest.mark.parametrize("checkpoint", ["never", "always"])


class Does(nn.Module):
    """A layer that does what a function does."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Any) -> Any:
        return self.function(value)


@skippable(stash=["s"])
class Keep(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("s", x)
        return x


@skippable(pop=["s"])
class Join(nn.Module):
    def forward(self, x: Tensor) -> Any:
        s = yield pop("s")
        return x + 10 * s


def with_skip() -> nn.Sequential:
    """Return a chain that stashes what it hands on, and writes to it later."""
    return nn.Sequential(nn.Linear(3, 3), Keep(), nn.Identity(), nn.ReLU(inplace=True), Join())


def with_pair() -> nn.Sequential:
    """Return a chain that hands a tensor on twice, and writes to one of the two."""
    return nn.Sequential(
        nn.Linear(3, 3),
        Does(lambda x: (x, x)),
        Does(lambda pair: pair),
        Does(lambda pair: (pair[0].mul_(2), pair[1])),
        Does(sum),  # of the pair
    )


@MODES
@pytest.mark.parametrize("make", [with_skip, with_pair])
@pytest.mark.parametrize("balance", [[5], [2, 3], [3, 2], [2, 1, 2], [2, 1, 1, 1], [2, 2, 1]])
def test_a_write_to_what_another_value_shares_is_refused_or_right(
    make: Callable[[], nn.Sequential], balance: list[int], checkpoint: CheckpointMode
) -> None:
    """Also where a partition in between only hands the value on."""
    plain = make()
    pipe = GPipe(copy.deepcopy(plain), balance, chunks=2, checkpoint=checkpoint)
    x = torch.randn(4, 3)
    expected = plain(x)
    expected.square().sum().backward()
    for _ in range(2):
        pipe.zero_grad()
        try:
            output = pipe(x)
        except ModelError as error:
            assert "writes to a tensor whose memory is also that" in str(error)
            continue
        output.square().sum().backward()
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(pipe[0].weight.grad, plain[0].weight.grad)


@pytest.mark.parametrize("chunks", [1, 2])
def test_outputs_do_not_share_memory(chunks: int) -> None:
    """A write to one of them is not seen in the other, however many micro-batches there are."""
    layer = nn.Linear(3, 3)
    pipe = GPipe(nn.Sequential(layer, Does(lambda h: (h, h[:, :2]))), [2], chunks=chunks)
    one, other = pipe(torch.ones(2, 3))
    one.mul_(2)
    loss = other.sum()
    loss.backward()
    assert loss.item() == pytest.approx(layer(torch.ones(2, 3))[:, :2].sum().item())
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad[:2], torch.full((2, 3), 2.0))


class Slow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not x.any():
            time.sleep(1.0)
        return x * 1


def test_a_mini_batch_on_workers_that_were_given_up_ends() -> None:
    """Whoever waits behind one that hangs is told, too."""
    pipe = GPipe(nn.Sequential(Slow(), nn.Identity()), [2], timeout=0.5)
    pipe(torch.ones(2, 2))
    raised: dict[str, BaseException] = {}

    def run(name: str, x: Tensor) -> None:
        try:
            pipe(x)
        except BaseException as error:
            raised[name] = error

    first = threading.Thread(target=run, args=("first", torch.zeros(2, 2)))
    second = threading.Thread(target=run, args=("second", torch.ones(2, 2)), daemon=True)
    first.start()
    time.sleep(0.4)
    second.start()
    first.join(20)
    second.join(20)
    assert not second.is_alive()
    assert isinstance(raised["first"], PipelineTimeoutError)
    assert "second" not in raised or isinstance(raised["second"], PipelineError)
    torch.testing.assert_close(pipe(torch.ones(2, 2)), torch.ones(2, 2))


def test_sums_of_an_interrupted_backward_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A retained graph that is gone through again gives its gradient once."""
    layer = nn.Linear(4, 4)
    pipe = GPipe(nn.Sequential(nn.Sequential(layer, nn.Tanh()), layer), [1, 1], chunks=2)
    loss = pipe(torch.randn(4, 4)).sum()
    loss.backward(retain_graph=True)
    assert layer.weight.grad is not None
    expected = layer.weight.grad.clone()

    def interrupted(self: MiniBatch) -> None:
        raise KeyboardInterrupt

    pipe.zero_grad()
    with monkeypatch.context() as patch:
        patch.setattr(MiniBatch, "_take_input_gradients", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loss.backward(retain_graph=True)
    pipe.zero_grad()
    loss.backward()
    torch.testing.assert_close(layer.weight.grad, expected)


def test_ties_that_are_found_anew_keep_their_hooks() -> None:
    """However often another parameter is replaced, a tied one is caught once."""
    layer = nn.Linear(2, 2)
    pipe = GPipe(nn.Sequential(layer, nn.Linear(2, 2), layer), [1, 1, 1])
    losses, users = [], []
    for _ in range(4):
        pipe[1].weight = nn.Parameter(torch.ones(2, 2))
        losses.append(pipe(torch.ones(2, 2)).sum())
        losses[-1].backward()
        assert pipe._runtime is not None
        users.append(pipe._runtime.tied._users[layer.weight])
    assert all(user is users[0] for user in users)


class Unbind(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> list[Tensor]:
        return list(self.layer(x).unbind(0))


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_as_many_outputs_as_rows(checkpoint: CheckpointMode) -> None:
    """Micro-batches of unequal sizes may hand on different numbers of tensors."""
    model = nn.Sequential(Unbind(), Does(torch.stack))
    pipe = GPipe(model, [1, 1], chunks=2, checkpoint=checkpoint)
    for _ in range(3):
        pipe.zero_grad()
        pipe(torch.ones(5, 3)).sum().backward()
        torch.testing.assert_close(model[0].layer.weight.grad, torch.full((3, 3), 5.0))


def test_flags_wake_who_waits() -> None:
    """It may be waited for again, and in vain."""
    flag = Flag()
    assert not flag.wait(0.01)
    threading.Timer(0.05, flag.set).start()
    assert flag.wait() and flag.wait(0.0) and flag.wait()
