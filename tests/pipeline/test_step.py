"""A training step inside the pipeline: the loss in the last partition, gpipe and 1f1b."""

from __future__ import annotations

import copy
import itertools
import weakref
from typing import Any

import pytest
import torch
from chains import batchnorm_chain, skip_chain
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import gpipebal as gb
from gpipebal.errors import BalanceError, ModelError, PipelineError
from gpipebal.pipeline import GPipe
from gpipebal.schedule import SCHEDULES

pytestmark = pytest.mark.timeout(60)
NAMES = pytest.mark.parametrize("schedule", list(SCHEDULES))


def assert_same_gradients(mine: nn.Module, theirs: nn.Module) -> None:
    """Compare all gradients and buffers of two models."""
    for left, right in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert (left.grad is None) == (right.grad is None)
        if left.grad is not None:
            torch.testing.assert_close(left.grad, right.grad)
    for left, right in zip(mine.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(left, right)


@NAMES
@given(
    cuts=st.sets(st.integers(1, 4)),
    chunks=st.integers(1, 6),
    rows=st.integers(1, 7),
    modes=st.lists(st.sampled_from(["always", "except_last", "never"]), min_size=5, max_size=5),
)
@settings(deadline=None, max_examples=25)
def test_a_step_is_the_loss_over_the_mini_batch(
    schedule: str, cuts: set[int], chunks: int, rows: int, modes: list[Any]
) -> None:
    """Loss, gradients and the input's gradient are those of `loss_fn(pipe(x), y).backward()`."""
    torch.manual_seed(0)
    plain = skip_chain().double()
    bounds = [0, *sorted(cuts), 5]
    balance = [end - start for start, end in itertools.pairwise(bounds)]
    pipe = GPipe(copy.deepcopy(plain), balance, chunks=chunks, checkpoint=modes[: len(balance)])
    target = torch.randn(rows, 2, dtype=torch.float64)
    inputs = [torch.ones(rows, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    for _ in range(2):  # gradients accumulate
        expected = mse_loss(plain(inputs[0]), target)
        expected.backward()
        loss = pipe.step(inputs[1], target=target, loss_fn=mse_loss, schedule=schedule)
        torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    assert_same_gradients(pipe, plain)
    pipe.close()


@NAMES
def test_sums_and_losses_without_a_target(schedule: str) -> None:
    """A loss that adds up is not weighted; a loss may do without a target."""
    model = skip_chain().double()
    plain = copy.deepcopy(model)
    pipe = GPipe(model, [2, 3], chunks=3)
    inputs = torch.randn(7, 4, dtype=torch.float64)
    loss = pipe.step(inputs, loss_fn=lambda y: y.square().sum(), reduction="sum", schedule=schedule)
    expected = plain(inputs).square().sum()
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    assert_same_gradients(pipe, plain)


@NAMES
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_batch_normalisation_sees_each_micro_batch_once(schedule: str, checkpoint: Any) -> None:
    """Buffers after a step are those after `loss(pipe(x)).backward()`, deferred or not."""
    for deferred in (False, True):
        torch.manual_seed(0)
        pipes = []
        for _ in range(2):
            torch.manual_seed(0)
            pipes.append(
                GPipe(
                    batchnorm_chain().double(),
                    [3, 3, 2],
                    chunks=3,
                    checkpoint=checkpoint,
                    deferred_batch_norm=deferred,
                )
            )
        inputs = torch.randn(5, 2, 8, 8, dtype=torch.float64)
        target = torch.randn(5, 3, dtype=torch.float64)
        mse_loss(pipes[0](inputs), target).backward()
        pipes[1].step(inputs, target=target, loss_fn=mse_loss, schedule=schedule)
        assert_same_gradients(pipes[1], pipes[0])


class Centred(nn.Module):
    """A loss that moves its centre towards what it has seen, and keeps the last of that."""

    centre: Tensor
    queue: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("queue", torch.zeros(10_000, 2, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, y: Tensor) -> Tensor:
        loss = (y - self.centre).square().sum() + (y.sum(0) * self.queue.sum(0)).sum()
        with torch.no_grad():
            self.centre.mul_(0.9).add_(y.mean(0), alpha=0.1)
            self.queue[self.calls] = y[0]
            self.calls += 1
        return loss


@NAMES
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_the_buffers_of_a_loss_see_each_micro_batch_once(schedule: str, checkpoint: Any) -> None:
    """A recompute calls the loss with its buffers as they were, and leaves no trace in them."""
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    pipe = GPipe(copy.deepcopy(plain), [2, 1], chunks=3, checkpoint=checkpoint)
    mine, theirs = Centred(), Centred()
    for _ in range(2):
        pipe.step(x, loss_fn=mine, reduction="sum", schedule=schedule)
        torch.stack([theirs(plain(part)) for part in x.tensor_split(3)]).sum().backward()
    assert_same_gradients(pipe, plain)
    assert_same_gradients(mine, theirs)


def squares(y: Tensor) -> Tensor:
    """Leave the output alone."""
    return y.square().sum()


def doubled_squares(y: Tensor) -> Tensor:
    """Write to the output."""
    return y.mul_(2).square().sum()


@NAMES
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("kind", ["functions", "modules", "modes"])
def test_another_loss_may_write_to_an_output_that_is_the_input(
    schedule: str, checkpoint: Any, kind: str
) -> None:
    """What is known about one loss is not taken to hold for another, or for another mode of it."""
    dropout = nn.Sequential(nn.Dropout(0.0, inplace=True), nn.Linear(2, 1).double())
    losses: dict[str, tuple[Any, Any]] = {
        "functions": (squares, doubled_squares),
        "modules": (
            nn.Sequential(nn.Tanh(), nn.Linear(2, 1)).double(),
            nn.Sequential(nn.ReLU(inplace=True), nn.Linear(2, 1)).double(),
        ),
        "modes": (dropout, dropout),
    }
    first, second = losses[kind]
    plain = nn.Sequential(nn.Linear(4, 2), nn.Identity()).double()
    pipe = GPipe(copy.deepcopy(plain), [1, 1], chunks=2, checkpoint=checkpoint)
    x = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(2, 4)
    dropout.eval()
    for loss_fn in (first, second, first):
        pipe.step(x, loss_fn=loss_fn, reduction="sum", schedule=schedule)
        torch.stack([loss_fn(plain(row)).sum() for row in x.split(1)]).sum().backward()
        dropout.train()
    assert_same_gradients(pipe, plain)


class Rarely(nn.Module):
    """A loss that adds to a large buffer in every second call."""

    memory: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(20_000, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, y: Tensor) -> Tensor:
        loss = y.square().sum() * (1 + self.memory[0])
        with torch.no_grad():
            self.calls += 1
            if self.calls % 2 == 0:
                self.memory.add_(1)
        return loss


def test_a_loss_that_writes_to_a_large_buffer_at_times_works_the_second_time() -> None:
    """What a step finds out about the buffers of a loss is known to the next one."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).double()
    pipe = GPipe(copy.deepcopy(plain), [1, 1], chunks=4, checkpoint="always")
    mine, theirs = Rarely(), Rarely()
    x = torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(4, 4)
    with pytest.raises(ModelError, match="run the mini-batch again"):
        pipe.step(x, loss_fn=mine, reduction="sum")
    pipe.zero_grad()
    mine.load_state_dict(theirs.state_dict())
    for _ in range(2):
        pipe.step(x, loss_fn=mine, reduction="sum")
        torch.stack([theirs(plain(row)) for row in x.split(1)]).sum().backward()
    assert_same_gradients(pipe, plain)
    assert_same_gradients(mine, theirs)


class Shifted(nn.Module):
    """Add a buffer, which moves or not."""

    shift: Tensor

    def __init__(self, shift: Tensor, by: float) -> None:
        super().__init__()
        self.register_buffer("shift", shift)
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        shifted = x + self.shift
        with torch.no_grad():
            if self.by:
                self.shift.add_(self.by)
        return shifted


class Total(nn.Module):
    """Add up squares."""

    def forward(self, y: Tensor) -> Tensor:
        return y.square().sum()


@NAMES
@pytest.mark.parametrize(("of_layer", "of_loss"), [(1.0, 0.0), (0.0, 1.0), (0.0, 0.0)])
@pytest.mark.parametrize("place", [0, 2])
def test_a_buffer_that_the_loss_shares_with_a_layer(
    schedule: str, of_layer: float, of_loss: float, place: int
) -> None:
    """In the last partition one may write to it; elsewhere no order would be kept: refused."""
    shift = torch.zeros(2, dtype=torch.float64)
    layers: list[nn.Module] = [nn.Linear(2, 2), nn.Linear(2, 2)]
    layers.insert(place, Shifted(shift, of_layer))
    plain = nn.Sequential(*layers).double()
    loss = Shifted(shift, of_loss)
    mine, theirs = copy.deepcopy((plain, loss)), (plain, loss)
    pipe = GPipe(mine[0], [1, 2], chunks=3, checkpoint="always")
    x = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(3, 2)

    def step() -> None:
        pipe.step(x, loss_fn=nn.Sequential(mine[1], Total()), reduction="sum", schedule=schedule)

    if place == 0 and (of_layer or of_loss):
        with pytest.raises(ModelError, match="written to by two partitions: 'shift' of a Shifted"):
            step()
        return
    step()
    for row in x.split(1):
        theirs[1](plain(row)).square().sum().backward()
    assert_same_gradients(pipe, plain)


def test_dropout_does_not_depend_on_the_schedule() -> None:
    """One seed gives one set of masks, in a step of any schedule and in the plain call."""
    results = []
    for schedule in (None, *SCHEDULES):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)).double()
        pipe = GPipe(model, [2, 1], chunks=3, checkpoint="always")
        inputs = torch.ones(6, 4, dtype=torch.float64)
        torch.manual_seed(5)
        if schedule is None:
            pipe(inputs).square().mean().backward()
        else:
            pipe.step(inputs, loss_fn=lambda y: y.square().mean(), schedule=schedule)
        results.append(pipe[0].weight.grad)
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])


def test_without_gradients_a_step_is_the_loss_alone() -> None:
    """Under no_grad nothing is added to the gradients; a frozen model is refused with a fix."""
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), [1, 1], chunks=2)
    inputs, target = torch.ones(4, 2), torch.ones(4, 1)
    with torch.no_grad():
        loss = pipe.step(inputs, target=target, loss_fn=mse_loss)
        torch.testing.assert_close(loss, mse_loss(pipe(inputs), target))
    assert pipe[0].weight.grad is None
    pipe.requires_grad_(False)
    with pytest.raises(PipelineError, match="loss needs no gradient"):
        pipe.step(inputs, target=target, loss_fn=mse_loss)
    pipe[1].requires_grad_(True)
    pipe.step(inputs, target=target, loss_fn=mse_loss)
    assert pipe[0].weight.grad is None
    assert pipe[1].weight.grad is not None


def test_gradients_flow_into_the_graph_before_the_pipeline() -> None:
    """An input that was computed hands its gradient on to what it was computed from."""
    weight = torch.ones(2, requires_grad=True)
    pipe = GPipe(nn.Sequential(nn.Identity(), nn.Identity()), [1, 1], chunks=2)
    pipe.step(torch.ones(4, 2) * weight, loss_fn=torch.sum, reduction="sum")
    assert weight.grad is not None
    assert weight.grad.tolist() == [4.0, 4.0]


def test_bad_losses_and_targets_are_refused() -> None:
    """A loss that is none, a target of other rows, an unknown schedule: errors with a fix."""
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), [1, 1], chunks=2)
    inputs, target = torch.ones(4, 2), torch.ones(4, 1)
    with pytest.raises(ModelError, match=r"loss_fn returned no loss: got shape \(2, 1\)") as caught:
        pipe.step(inputs, loss_fn=torch.square)
    assert "in the loss" in caught.value.__notes__
    for wrong in (lambda y: y.sum().item(), lambda y: (y.sum(), y)):
        with pytest.raises(ModelError, match=r"got (float|tuple)") as caught:
            pipe.step(inputs, loss_fn=wrong)  # type: ignore[arg-type]
        assert "return the tensor alone" in str(caught.value)
    with pytest.raises(BalanceError, match=r"target has other rows than the input: 3 \(expected 4"):
        pipe.step(inputs, target=target[:3], loss_fn=mse_loss)
    with pytest.raises(BalanceError, match="reduction does not exist"):
        pipe.step(inputs, loss_fn=torch.sum, reduction="max")  # type: ignore[arg-type]
    for name in ("2f2b", ""):
        with pytest.raises(gb.GpipebalError, match=f"schedule cannot be built: schedule='{name}'"):
            pipe.step(inputs, loss_fn=torch.sum, schedule=name)
    loss = pipe.step(inputs, target=target, loss_fn=mse_loss)
    assert torch.isfinite(loss)


@NAMES
def test_a_failure_in_a_step_leaves_the_pipeline_usable(schedule: str) -> None:
    """A loss that raises for one micro-batch: its own type arrives, and the next step works."""
    pipe = GPipe(nn.Sequential(*[nn.Linear(2, 2) for _ in range(3)]), [1, 1, 1], chunks=5)
    calls = []

    def fail_once(output: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise KeyError("broken")
        return output.sum()

    with pytest.raises(KeyError, match="broken") as caught:
        pipe.step(torch.ones(5, 2), loss_fn=fail_once, schedule=schedule)
    notes = " ".join(caught.value.__notes__)
    assert "in the loss in partition 2, forward of micro-batch" in notes
    pipe.zero_grad()
    pipe.step(torch.ones(5, 2), loss_fn=fail_once, reduction="sum", schedule=schedule)
    assert pipe[0].weight.grad is not None


@pytest.mark.parametrize(("schedule", "most"), [("gpipe", [6, 6, 6]), ("1f1b", [3, 2, 1])])
def test_micro_batches_in_flight(schedule: str, most: list[int]) -> None:
    """1f1b holds at most n - j micro-batches in partition j, gpipe holds all of them."""
    live: list[set[int]] = [set(), set(), set()]
    peaks = [0, 0, 0]

    class Hold(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, place: int) -> Tensor:
            kept = x.clone()
            ctx.save_for_backward(kept)
            live[place].add(id(kept))
            weakref.finalize(kept, live[place].discard, id(kept))
            peaks[place] = max(peaks[place], len(live[place]))
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            return gradient, None

    class Keep(nn.Module):
        def __init__(self, place: int) -> None:
            super().__init__()
            self.place = place
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return Hold.apply(self.linear(x), self.place)

    pipe = GPipe(nn.Sequential(*map(Keep, range(3))), [1, 1, 1], chunks=6, checkpoint="never")
    pipe.step(torch.ones(6, 2), loss_fn=torch.sum, schedule=schedule)
    assert all(mine <= bound for mine, bound in zip(peaks, most, strict=True))
    assert schedule == "1f1b" or peaks == most
    assert live == [set(), set(), set()]


def test_only_one_micro_batchs_output_exists_at_a_time() -> None:
    """The output of the last layer dies before the next micro-batch's is made (1f1b)."""
    alive: list[weakref.ref[Tensor]] = []

    def loss(output: Tensor) -> Tensor:
        assert not any(reference() is not None for reference in alive)
        alive.append(weakref.ref(output))
        return output.exp().sum()

    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 9)), [1, 1], chunks=4)
    pipe.checkpoint = "never"
    pipe.step(torch.ones(8, 2), loss_fn=loss, schedule="1f1b")
    assert len(alive) == 4


def test_a_traced_step_follows_its_schedule() -> None:
    """The timeline of a step has the schedule's actions, in each partition in its order."""
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], chunks=3)
    for schedule, make in SCHEDULES.items():
        with gb.trace(pipe) as recorder:
            pipe.step(torch.ones(3, 2), loss_fn=torch.sum, schedule=schedule)
        for j, row in enumerate(make(2, 3, "except_last").rows):
            events = [e for e in recorder.timeline.events if e.partition == j]
            assert [(e.kind, e.micro_batch) for e in events] == [action[1:] for action in row]


def test_a_scaled_loss_gives_scaled_gradients() -> None:
    """`loss_fn` may return what a GradScaler makes of the loss; unscaling gives plain ones."""
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    pipe = GPipe(copy.deepcopy(plain), [1, 1], chunks=2)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    inputs, target = torch.ones(4, 2), torch.ones(4, 1)
    pipe.step(inputs, target=target, loss_fn=lambda y, t: scaler.scale(mse_loss(y, t)))
    mse_loss(plain(inputs), target).backward()
    torch.testing.assert_close(pipe[0].weight.grad, plain[0].weight.grad * 1024)  # type: ignore[operator]
    scaler.unscale_(optimizer)
    assert_same_gradients(pipe, plain)
    scaler.step(optimizer)
    scaler.update()


@NAMES
def test_a_loss_that_is_a_part_of_something_large_is_kept_alone(schedule: str) -> None:
    """What it is a part of is gone before the next micro-batch has as much."""
    made: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def loss_of(output: Tensor) -> Tensor:
        alive.append(sum(one() is not None for one in made))
        terms = torch.cat([output.sum().view(1), output.new_zeros(1000)])
        made.append(weakref.ref(terms.untyped_storage()))
        return terms[0]

    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], chunks=4)
    loss = pipe.step(torch.ones(8, 2), loss_fn=loss_of, reduction="sum", schedule=schedule)
    assert loss.untyped_storage().nbytes() == loss.nbytes
    assert len(made) >= 4 and not any(alive)
