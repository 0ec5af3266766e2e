"""Copies of buffers that a recomputed micro-batch keeps: found by the profiler, in the memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from counted_memory import count, least_and_most, measured, squares
from estimated import estimate_profile
from torch import Tensor, nn

import gpipebal as gb
from gpipebal.memory import partition_memory
from gpipebal.memory.cell import Cell
from gpipebal.memory.recomputed_runs import with_runs
from gpipebal.pipeline import GPipe, with_recompute
from gpipebal.pipeline.layers.buffers import SMALL, Buffers, BuffersOfRun
from gpipebal.pipeline.layers.modules import Modules
from gpipebal.pipeline.layers.written import ParameterWrites
from gpipebal.planner import recompute_layers

CHUNKS = 12
#: More numbers than a small buffer has.
MANY = SMALL // 4 + 1


class Counter(nn.Module):
    """A layer with large buffers: it adds to one, puts its input into one, and reads one only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(MANY))
        self.register_buffer("latest", torch.zeros(MANY))
        self.register_buffer("mask", torch.ones(MANY + 1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.total += 1.0
            self.latest[:4] = x.detach().mean(0)  # the same each time, if the input is
        return self.linear(x) * self.mask[0]


def statistics() -> nn.Sequential:
    """A chain whose statistics are larger than its micro-batches."""
    wide = 2000
    layers = [nn.Linear(4, wide), nn.BatchNorm1d(wide), nn.Linear(wide, 4), nn.Linear(4, 4)]
    return nn.Sequential(*layers, Counter(), nn.Linear(4, 4))


def test_the_profiler_finds_what_the_executor_keeps() -> None:
    """Small buffers, and large ones that are written to; an estimate sees that too."""
    layers, inputs = statistics(), torch.randn(4 * CHUNKS, 4)
    found = gb.profile_model(
        layers, inputs, chunks=CHUNKS, rows=(), timeout=0, as_pipeline=False, progress=False
    )
    of_norm, of_counter = 2 * 2000 * 4 + 8, 2 * 4 * MANY
    kept = [layer.kept_buffer_bytes for layer in found.layers]
    assert kept == [0, of_norm, 0, 0, of_counter, 0]
    x = torch.randn(4, 4)
    for layer, n_bytes in zip(layers, kept, strict=True):
        buffers = Buffers(Modules([layer]))
        before = buffers.copies()
        copies = buffers.keep()
        x = layer(x)
        copies = copies.with_copies(buffers.note_changed(before))
        assert sum(t.nbytes for t in copies.copies.values() if t is not None) == n_bytes
    given = {"chunks": CHUNKS, "rows": (), "progress": False}
    alone = gb.profile_model(layers, inputs, timeout=0, share_identical=True, **given)
    assert [layer.kept_buffer_bytes for layer in alone.layers] == kept
    estimated = estimate_profile(layers, inputs, rates="CPU core", **given)
    assert [layer.kept_buffer_bytes for layer in estimated.layers] == kept


class Halves(nn.Module):
    """A layer with two buffers in one storage."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.zeros(2, 1000)
        self.register_buffer("mean", both[0])
        self.register_buffer("var", both[1])

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.add_(1.0)  # type: ignore[operator]
        return x * 2


def test_writes_are_looked_for_again_after_a_forward_that_did_not_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If there is no memory for copies of parameters, nothing is known of the buffers yet."""
    layer = nn.Linear(1, 1)
    layer.register_buffer("table", torch.zeros(SMALL))
    buffers = BuffersOfRun(Modules([layer]))
    kept, before = buffers.keep(), buffers.copies()

    def fail(_: ParameterWrites) -> None:
        raise MemoryError

    monkeypatch.setattr(ParameterWrites, "end_forward", fail)
    with pytest.raises(MemoryError):
        buffers.end_forward(kept, before)
    assert buffers.copies().keys() == before.keys() == {(layer, "table")}


def test_buffers_are_copied_one_by_one() -> None:
    """Views of one storage have a copy each."""
    layers, inputs = nn.Sequential(nn.Linear(4, 4), Halves()), torch.randn(8, 4)
    buffers = Buffers(Modules([layers[1]]))
    kept = sum(t.nbytes for t in buffers.keep().copies.values() if t is not None)
    found = gb.profile_model(
        layers, inputs, chunks=2, rows=(), timeout=0, as_pipeline=False, progress=False
    )
    assert found.layers[1].kept_buffer_bytes == kept == 2 * 4000


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_copies_are_counted_for_every_recomputed_micro_batch(checkpoint: str) -> None:
    """Predicted peaks are within 3 % of what lives at once, most of which is copies."""
    torch.manual_seed(0)
    layers, inputs = statistics(), torch.randn(4 * CHUNKS, 4)
    make = torch.optim.SGD
    profile = gb.profile_model(
        layers,
        inputs,
        chunks=CHUNKS,
        loss_fn=squares,
        optimizer=lambda parameters: make(parameters, lr=0.0),
        rows=(),
        timeout=0,
        as_pipeline=False,
        progress=False,
    )
    for way in ("loss(pipe(x))", "gpipe", "1f1b"):
        least, most = least_and_most(profile, [4, 2], checkpoint, way)
        pipe = GPipe(layers, [4, 2], chunks=CHUNKS, checkpoint=checkpoint)
        counted = count(pipe, inputs, way, make(layers.parameters(), lr=0.0))
        for low, n_bytes, high in zip(least, counted, most, strict=True):
            assert low.total / 1.03 <= n_bytes <= high.total * 1.03


def test_copies_last_from_forward_to_recompute_by_hand() -> None:
    """A cell has them while it waits for its recompute, and in both; not in its backward."""
    profile = gb.Profile.from_costs(
        [1.0] * 2, saved_bytes=[100, 100], output_bytes=[10, 10], chunks=4
    )
    layers = tuple(replace(layer, kept_buffer_bytes=1000) for layer in profile.layers)
    with_copies = replace(profile, layers=layers)
    without, cell = (Cell(p, 1, 2, None, False) for p in (profile, with_copies))
    assert cell.held(recomputed=True) == without.held(recomputed=True) + 1000 == 1010
    assert cell.held(recomputed=False) == without.held(recomputed=False)
    for records, more in ((False, 1000), (True, 0)):
        now, before = (
            [m.activations for m in one.forward(records=records, gradients_exist=False)]
            for one in (cell, without)
        )
        assert now == [n_bytes + more for n_bytes in before]
    now, before = (
        [m.activations for m in one.recompute(gradients_exist=False)] for one in (cell, without)
    )
    assert now == [n_bytes + 1000 for n_bytes in before]
    assert list(cell.backward(recomputed=True, gradients_exist=False)) == list(
        without.backward(recomputed=True, gradients_exist=False)
    )
    peaks, plain = (
        partition_memory(p, (0, 1, 2), chunks=4, checkpoint="always")
        for p in (with_copies, profile)
    )
    # At the first recompute all four wait for theirs.
    assert [one.total - two.total for one, two in zip(peaks, plain, strict=True)] == [4000, 4000]


class Table(nn.Module):
    """A layer with a table that a recompute copies, as rotary positions are; its graph saves it."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("table", torch.randn(4, 1000, 1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return torch.tanh(y * self.table.mean(1))


def of_runs() -> nn.Sequential:
    """A chain with tables that are only read, and buffers that are written to."""
    ends = nn.Linear(16, 4), Counter(), nn.Linear(4, 16)
    return nn.Sequential(Table(), Table(), *ends, Table(), Table())


@pytest.mark.parametrize("way", ["loss(pipe(x))", "gpipe", "1f1b"])
@pytest.mark.parametrize("runs", [[range(1, 5)], [range(2), range(5, 7)], [range(7)]], ids=str)
def test_runs_keep_copies_for_every_micro_batch(runs: list[range], way: str) -> None:
    """Runs of layers need what the pipeline then holds, most of which is copies of buffers."""
    layers, inputs = of_runs(), torch.randn(4 * CHUNKS, 16)
    profile = with_runs(measured(layers, inputs, chunks=CHUNKS, loss_fn=squares), runs)
    least, most = least_and_most(profile, [7], "never", way)
    pipe = GPipe(with_recompute(layers, runs), [7], chunks=CHUNKS, checkpoint="never")
    (counted,) = count(pipe, inputs, way, torch.optim.SGD(layers.parameters(), lr=0.0))
    assert least[0].total / 1.03 <= counted <= most[0].total * 1.03


def test_chosen_runs_fit_with_their_copies() -> None:
    """A run that would copy more than it saves is not taken for one that makes room."""
    profile = gb.Profile.from_costs([1.0, 2.0, 3.0], saved_bytes=[50, 50, 50], chunks=4)
    first, *others = profile.layers
    with_table = replace(profile, layers=(replace(first, kept_buffer_bytes=100), *others))
    runs: list[range] = []
    for one in (profile, with_table):
        plan = gb.evaluate(one, [3], checkpoint="never")
        need = plan.partitions[0].memory.total
        chosen = recompute_layers(one, plan, memory_limit=need - 100)
        assert chosen.plan.partitions[0].memory.total <= need - 100
        runs += chosen.runs
    assert runs == [range(1), range(1, 2)]
