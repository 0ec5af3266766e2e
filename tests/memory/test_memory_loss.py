"""A loss that is a module: its parameters and their gradients are on the last partition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipebal as gb
from gpipebal.memory.cell import Cell
from gpipebal.memory.loss import around_loss, loss_of_micro_batch
from gpipebal.pipeline import GPipe, measure_memory
from gpipebal.pipeline.layers.buffers import SMALL

pytestmark = pytest.mark.timeout(120)

WIDTH, CLASSES, ROWS = 32, 300, 24
WAYS: dict[str, dict[str, Any]] = {
    "measured": {"timeout": 0, "as_pipeline": False},
    "alone": {"timeout": 0, "one_at_a_time": True},
    "estimated": {"method": "estimate", "rates": "CPU core"},
}


class Projected(nn.Module):
    """A loss with the projection onto classes inside."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("weights", torch.ones(CLASSES))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Compute the loss."""
        return F.cross_entropy(self.head(output), target, weight=self.weights)


def chain() -> nn.Sequential:
    """Return a few small layers."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


def data() -> tuple[Tensor, Tensor]:
    """Return a mini-batch with its target."""
    return torch.randn(ROWS, WIDTH), torch.randint(CLASSES, (ROWS,))


@pytest.fixture(scope="module", params=WAYS.values(), ids=WAYS)
def by_way(request: pytest.FixtureRequest) -> gb.Profile:
    """Profile the chain with the loss in each way once."""
    sample, target = data()
    given: dict[str, Any] = {"target": target, "progress": False, **request.param}
    return gb.profile_model(chain(), sample, chunks=4, loss_fn=Projected(), **given)


@pytest.mark.parametrize("exist", [False, True])
def test_parameters_of_the_loss_are_counted(by_way: gb.Profile, exist: bool) -> None:
    """With gradients of earlier steps and without, inside and outside, at other micro-batches."""
    sample, target = data()
    loss = Projected()
    for chunks in (4, 2, 8):
        for inside in (False, True):
            for mode in ("never", "always"):
                model = chain()
                pipe = GPipe(model, [3], chunks=chunks, checkpoint=mode)
                for _ in range(2):
                    if not exist:
                        loss.zero_grad()
                        model.zero_grad()
                    with measure_memory(pipe) as meter:
                        for own in (*loss.parameters(), *loss.buffers()):
                            meter.ledger.keep([(0, own), (0, own.grad)])
                        if inside:
                            pipe.step(sample, target=target, loss_fn=loss)
                        else:
                            output = pipe(sample)
                            value = loss(output, target)
                            value.backward()
                            del output, value
                plan = gb.evaluate(
                    by_way,
                    [3],
                    checkpoint=mode,
                    chunks=chunks,
                    loss_inside=inside,
                    gradients_exist=exist,
                )
                planned, counted = plan.partitions[0].memory.total, meter.peak_bytes[0]
                assert 0.99 * counted <= planned <= 1.03 * counted, (chunks, inside, mode)
                pipe.close()


def test_gradients_of_the_loss_do_not_grow_with_its_rows(by_way: gb.Profile) -> None:
    """A loss of the mini-batch, brought to a micro-batch, has all of them."""
    step, n_bytes = by_way.step, 4 * (WIDTH * CLASSES + CLASSES)
    assert step.whole_loss is not None
    more = step.whole_loss.backward_peak_bytes - n_bytes
    known_whole = replace(by_way, step=replace(step, loss=None), other_sizes=())
    of_micro_batch = loss_of_micro_batch(known_whole)
    assert more > 0
    assert of_micro_batch.backward_peak_bytes == n_bytes + -(-more // 4)


@pytest.mark.parametrize("chunks", [1, 4])
def test_gradients_of_the_loss_are_there_while_the_optimizer_steps(
    by_way: gb.Profile, chunks: int
) -> None:
    """After the backwards they exist in any case, whether they did before the step or not."""
    profile = by_way.at_rows(ROWS // chunks, mini_batch_rows=ROWS)
    cell = Cell(profile, 0, 3, None, False)
    first, later = (around_loss(cell, chunks, 0, gradients_exist=exist) for exist in (False, True))
    n_bytes = 4 * (WIDTH * CLASSES + CLASSES)
    assert later.always - first.always == n_bytes
    assert first.after - later.after == n_bytes
    assert first.stays - later.stays == n_bytes


def test_buffers_of_the_loss_are_counted() -> None:
    """A recomputed micro-batch keeps a copy of those that the loss writes to, and of small ones."""

    class Centred(Projected):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("centre", torch.zeros(400, CLASSES))
            self.register_buffer("table", torch.ones(600, CLASSES))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            with torch.no_grad():
                self.centre += self.table.mean()
            return super().forward(output, target) + self.centre.mean()

    sample, target = data()
    loss = Centred()
    assert min(loss.centre.nbytes, loss.table.nbytes) > SMALL
    for way in WAYS.values():
        profile = gb.profile_model(
            chain(), sample, chunks=4, loss_fn=loss, target=target, progress=False, **way
        )
        assert profile.step.loss is not None
        assert profile.step.loss.kept_buffer_bytes == loss.centre.nbytes + loss.weights.nbytes
        for mode in ("never", "except_last", "always"):
            model = chain()
            pipe = GPipe(model, [1, 2], chunks=4, checkpoint=mode)
            plan = gb.evaluate(profile, [1, 2], checkpoint=mode, loss_inside=True)
            for _ in range(2):
                loss.zero_grad()
                model.zero_grad()
                with measure_memory(pipe) as meter:
                    for own in (*loss.parameters(), *loss.buffers()):
                        meter.ledger.keep([(1, own), (1, own.grad)])
                    pipe.step(sample, target=target, loss_fn=loss)
            planned = plan.partitions[1].memory.total
            assert 0.99 * meter.peak_bytes[1] <= planned <= 1.03 * meter.peak_bytes[1], (way, mode)
            pipe.close()


@pytest.mark.parametrize("method", ["measure", "estimate"])
def test_what_a_loss_shares_with_layers_counts_once(method: Any) -> None:
    """A parameter of a layer is the layer's."""
    model = chain()
    profile = gb.profile_model(
        model, data()[0], loss_fn=lambda output: output.sum(), method=method, progress=False
    )
    assert profile.step.loss is not None and profile.step.loss.parameter_bytes == 0

    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.other = nn.Linear(WIDTH, 2, bias=False), model[0].weight

        def forward(self, output: Tensor) -> Tensor:
            return self.own(F.linear(output, self.other)).sum()

    profile = gb.profile_model(model, data()[0], loss_fn=Shares(), method=method, progress=False)
    for one in (profile.step.loss, profile.step.whole_loss):
        assert one is not None
        assert (one.parameter_bytes, one.gradient_bytes) == (8 * WIDTH, 8 * WIDTH)


def with_constants(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    """Compare with one part of the target, and use the other, which has no rows."""
    wanted, constants = target
    return (output - wanted).square().mean() + constants.sum()


def profile_with_constants(rows: int, chunks: int, **how: Any) -> gb.Profile:
    """Profile a layer whose target is mostly constants: 40 kB beside 32 bytes for each row."""
    options: dict[str, Any] = {"rows": (), "progress": False, "loss_fn": with_constants}
    options |= {"target": (torch.randn(rows, 8), torch.randn(10_000)), "target_dims": (0, None)}
    model, sample = nn.Sequential(nn.Linear(8, 8)), torch.randn(rows, 8)
    return gb.profile_model(model, sample, chunks=chunks, **options, **how)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(("chunks", "others"), [(16, 4), (4, 16)])
def test_parts_of_a_target_without_rows_do_not_grow_with_them(
    way: dict[str, Any], chunks: int, others: int
) -> None:
    """Whether the loss is measured, scaled up, or asked for at other rows and micro-batches."""
    constants, row = 4 * 10_000, 4 * 8
    profile = profile_with_constants(4 * chunks, chunks, **way)
    loss, whole = profile.step.loss, profile.step.whole_loss
    assert loss is not None and whole is not None
    assert loss.buffer_bytes == constants + 4 * row
    assert whole.buffer_bytes == constants + 4 * chunks * row
    other = profile.at_rows(8, mini_batch_rows=8 * others)
    loss, whole = other.step.loss, other.step.whole_loss
    assert loss is not None and whole is not None
    assert loss.buffer_bytes == constants + 8 * row
    assert whole.buffer_bytes == constants + 8 * others * row
    cell = Cell(profile, 0, 1, None, shared_memory=True)
    assert around_loss(cell, others, 0).always == constants + 4 * others * row
