"""Targets of a step: losses that write to them, and targets that come from a graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from gpipebal.errors import ModelError
from gpipebal.pipeline import GPipe
from gpipebal.pipeline.minibatch.target import Target
from gpipebal.schedule import CHECKPOINT_MODES, SCHEDULES, CheckpointMode

pytestmark = pytest.mark.timeout(60)
MODES = pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
NAMES = pytest.mark.parametrize("schedule", list(SCHEDULES))


def chain() -> nn.Sequential:
    """Make two layers, the same every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).double()


def assert_same_gradients(mine: nn.Module, theirs: nn.Module) -> None:
    """Compare the gradients of all parameters."""
    for left, right in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad)


@MODES
@NAMES
@pytest.mark.parametrize("dims", [0, None])
def test_a_loss_that_writes_to_its_target_writes_once(
    dims: int | None, schedule: str, checkpoint: CheckpointMode
) -> None:
    """Loss and gradients are the plain model's, though the loss is computed again or shared."""

    def loss_fn(output: Tensor, target: dict[str, Tensor]) -> Tensor:
        assert output.shape[1:] == target["mean"].shape[-1:]
        # What it has written is saved for the backward.
        mean = target["mean"].mul_(2).expand_as(output)
        return mse_loss(output / target["deviation"], mean / target["deviation"] * output)

    def make() -> dict[str, Tensor]:
        shape = (5, 2) if dims == 0 else (2,)
        return {"mean": torch.ones(shape).double(), "deviation": torch.full(shape, 3.0).double()}

    inputs, plain = torch.randn(5, 4, dtype=torch.float64), chain()
    expected = loss_fn(plain(inputs), make())
    expected.backward()
    pipe = GPipe(chain(), [1, 1], chunks=3, checkpoint=checkpoint)
    loss = pipe.step(inputs, target=make(), loss_fn=loss_fn, target_dims=dims, schedule=schedule)
    torch.testing.assert_close(loss, expected.detach())
    assert_same_gradients(pipe, plain)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_a_shared_target_stays_as_it_is(context: Callable[[], Any]) -> None:
    """Every micro-batch's loss sees the target that the caller gave."""
    pipe = GPipe(nn.Sequential(nn.Identity()), [1], chunks=4)
    with context():
        target = torch.zeros(())
        loss = pipe.step(
            torch.ones(4, 1),
            target=target,
            target_dims=None,
            loss_fn=lambda y, t: (y * t.add_(1)).mean(),
        )
    assert loss.item() == 1.0
    assert target.item() == 0.0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("inside", [False, True])
def test_what_inference_mode_hides_is_protected(inside: bool, device: str) -> None:
    """A copy made in inference mode counts no versions: what is written to it stays in it."""
    pipe = GPipe(nn.Sequential(nn.Identity()), [1], devices=[device], chunks=4)
    target = {"scale": torch.zeros(()), "shift": torch.ones(())}
    seen: list[tuple[float, float]] = []

    def loss_fn(output: Tensor, target: dict[str, Tensor]) -> Tensor:
        result = (output * target["scale"].add_(1) + target["shift"]).mean()
        seen.append((target["scale"].item(), target["shift"].item()))
        return result

    with torch.inference_mode():
        if inside:
            target = {name: tensor.clone() for name, tensor in target.items()}
        loss = pipe.step(torch.ones(4, 1), target=target, target_dims=None, loss_fn=loss_fn)
    assert loss.item() == 2.0
    assert seen == [(1.0, 1.0)] * 4
    assert (target["scale"].item(), target["shift"].item()) == (0.0, 1.0)


def test_a_loss_that_writes_now_and_then_is_refused() -> None:
    """What could not be protected is an error that names the tensor, and its fix works."""
    calls: list[int] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        calls.append(1)
        return (output - (target.mul_(2) if len(calls) == 2 else target * 2)).square().mean()

    pipe = GPipe(chain(), [1, 1], chunks=3, checkpoint="always")
    inputs, target = torch.ones(3, 4, dtype=torch.float64), torch.ones(3, 2, dtype=torch.float64)
    with pytest.raises(ModelError, match=r"some micro-batches only: the tensor of micro-batch 1"):
        pipe.step(inputs, target=target, loss_fn=loss_fn, schedule="gpipe")
    calls.clear()
    pipe.step(inputs, target=target, loss_fn=lambda y, t: loss_fn(y, t.clone()))


@MODES
@NAMES
@pytest.mark.parametrize("in_place", [False, True])
def test_the_targets_gradient_goes_back_into_its_graph(
    in_place: bool, schedule: str, checkpoint: CheckpointMode
) -> None:
    """A teacher is trained as by the plain model, also if it shares a graph with the input."""

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(output, target.mul_(2) if in_place else target * 2)

    results = []
    for piped in (False, True):
        model = chain()
        before, teacher = nn.Linear(3, 4).double(), nn.Linear(4, 2).double()
        hidden = before(torch.ones(5, 3, dtype=torch.float64)).tanh()
        if piped:
            pipe = GPipe(model, [1, 1], chunks=3, checkpoint=checkpoint)
            pipe.step(hidden, target=teacher(hidden), loss_fn=loss_fn, schedule=schedule)
        else:
            loss_fn(model(hidden), teacher(hidden)).backward()
        results.append(nn.ModuleList([model, before, teacher]))
    assert_same_gradients(results[1], results[0])


@MODES
def test_a_target_alone_may_want_a_gradient(checkpoint: CheckpointMode) -> None:
    """With a frozen model the target's gradient is all that there is; shared ones are sums."""
    model = chain().requires_grad_(False)
    pipe = GPipe(copy.deepcopy(model), [1, 1], chunks=3, checkpoint=checkpoint)
    inputs = torch.randn(5, 4, dtype=torch.float64)
    for shape, dims in (((5, 2), 0), ((2,), None)):
        targets = [torch.ones(shape, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        for _ in range(2):  # gradients accumulate
            mse_loss(model(inputs), targets[0].expand(5, 2)).backward()
            pipe.step(
                inputs,
                target=targets[1],
                target_dims=dims,
                loss_fn=lambda y, t: mse_loss(y, t.expand_as(y)),
            )
        torch.testing.assert_close(targets[1].grad, targets[0].grad)


def test_a_target_may_have_nothing_in_it() -> None:
    """An empty dictionary is a target like others: every micro-batch gets one."""
    seen: list[Any] = []

    def loss_fn(output: Tensor, target: Any) -> Tensor:
        seen.append(target)
        return output.sum()

    for target in ({}, (), []):
        GPipe(chain(), [1, 1], chunks=2, checkpoint="never").step(
            torch.ones(4, 4, dtype=torch.float64), target=target, loss_fn=loss_fn
        )
    assert seen == [{}, {}, (), (), [], []]


def test_tensors_hidden_in_a_target_are_refused() -> None:
    """An object that nobody would part is an error, unless every micro-batch gets all of it."""

    @dataclass
    class Labels:
        values: Tensor

    def loss_fn(output: Tensor, labels: Labels) -> Tensor:
        return mse_loss(output, labels.values.expand_as(output))

    pipe = GPipe(chain(), [1, 1], chunks=2)
    inputs = torch.ones(4, 4, dtype=torch.float64)
    labels = Labels(torch.ones(1, 2, dtype=torch.float64))
    with pytest.raises(ModelError, match=r"the target has tensors inside an object"):
        pipe.step(inputs, target=labels, loss_fn=loss_fn)
    pipe.step(inputs, target=labels, loss_fn=loss_fn, target_dims=None)


def test_numpy_arrays_with_rows_are_refused() -> None:
    """Every micro-batch would get the rows of all, unless that is what is asked for."""
    pipe = GPipe(chain(), [1, 1], chunks=2)
    inputs = torch.ones(4, 4, dtype=torch.float64)

    def loss_fn(output: Tensor, target: Any) -> Tensor:
        rows = target["y"] if isinstance(target, dict) else target
        return output.sum() * len(rows)

    with pytest.raises(ModelError, match=r"it is a numpy array of shape \(4, 2\)") as caught:
        pipe.step(inputs, target=np.ones((4, 2)), loss_fn=loss_fn)
    assert "torch.from_numpy" in str(caught.value) and "target_dims as None" in str(caught.value)
    both = {"y": np.ones(4), "z": torch.ones(4)}
    with pytest.raises(ModelError, match=r"leaf \['y'\] is a numpy array"):
        pipe.step(inputs, target=both, loss_fn=loss_fn)
    pipe.step(inputs, target=both, loss_fn=loss_fn, target_dims={"y": None, "z": 0})
    pipe.step(inputs, target=np.ones(3), loss_fn=loss_fn)  # these are no rows
    pipe.step(inputs, target=np.float64(1), loss_fn=lambda y, _: y.sum())
    with pytest.raises(ModelError, match=r"input cannot be divided: leaf \[1\] is a numpy array"):
        pipe((inputs, np.ones((4, 1))))


def test_one_micro_batch_alone_may_have_numpy_arrays() -> None:
    """Nothing is divided: it gets all rows of them, which are its own."""

    def loss_fn(output: Tensor, target: Any) -> Tensor:
        assert len(target["y"]) == len(output)
        return output.sum()

    class First(nn.Module):
        def forward(self, pair: tuple[Tensor, Any]) -> Tensor:
            assert len(pair[0]) == len(pair[1])
            return pair[0]

    for chunks, rows in ((1, 4), (2, 1)):
        pipe = GPipe(nn.Sequential(First(), nn.Linear(4, 2)), [1, 1], chunks=chunks)
        pair = torch.ones(rows, 4), np.ones((rows, 1))
        assert pipe(pair).shape == (rows, 2)
        for target in ({"y": np.ones(rows)}, {"y": np.ones(rows), "z": torch.ones(rows)}):
            pipe.step(pair, target=target, loss_fn=loss_fn)


def test_a_write_to_a_part_of_the_target_is_one_to_the_whole() -> None:
    """A graph of the caller's that has saved the target refuses to go back, as it would alone."""
    target = torch.ones(4, 1)
    weight = torch.ones(1, requires_grad=True)
    outside = (weight * target).sum()
    pipe = GPipe(nn.Sequential(nn.Linear(2, 1)), [1], chunks=2, checkpoint="never")
    pipe.step(torch.ones(4, 2), target=target, loss_fn=lambda y, t: mse_loss(y, t.sub_(1)))
    assert not target.any()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outside.backward()


@pytest.mark.parametrize(("rows", "chunks"), [(4, 1), (1, 2)])
def test_a_write_to_a_target_without_rows_counts_once(rows: int, chunks: int) -> None:
    """The only micro-batch has the target itself, and its loss may have saved what it wrote."""

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return (output * target.add_(1)).sum()

    inputs, plain = torch.randn(rows, 4, dtype=torch.float64), chain()
    target = torch.ones(2).double()
    loss_fn(plain(inputs), target.clone()).backward()
    pipe = GPipe(chain(), [1, 1], chunks=chunks, checkpoint="never")
    pipe.step(inputs, target=target, loss_fn=loss_fn, target_dims=None, reduction="sum")
    assert_same_gradients(pipe, plain)
    assert target.tolist() == [2, 2]
    assert target._version == 1


@pytest.mark.parametrize("moved", [False, True])
def test_a_write_to_what_was_moved_is_none_to_the_target(moved: bool) -> None:
    """On its way to another device a part has become a copy."""
    whole = torch.ones(4, 2)
    target = Target(whole, 0, [2, 2])
    received = [part.clone() if moved else part for part in target._parts[0]]
    with target.lent(0, received) as given:
        given.add_(1)
    assert whole._version == (0 if moved else 1)
