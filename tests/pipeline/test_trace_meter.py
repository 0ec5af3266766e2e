"""Watching a pipeline: traces and memory meters."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpipebal as gb
from gpipebal.errors import KindError
from gpipebal.pipeline import GPipe, measure_memory, trace
from gpipebal.pipeline.observers.ledger import Ledger
from gpipebal.pipeline.observers.recorder import MiniBatchRecord
from gpipebal.pipeline.process import eager
from gpipebal.pipeline.process.blocks import all_shared_blocks
from gpipebal.pipeline.values.lane import Lane
from gpipebal.schedule import CHECKPOINT_MODES, CheckpointMode, gpipe_schedule

WIDTH = 64
ROWS = 32
LINEAR = 4 * (WIDTH * WIDTH + WIDTH)  # bytes of a linear layer
CHUNK = 4 * ROWS * WIDTH  # bytes of one micro-batch


def linear_chain(n_layers: int = 4) -> nn.Sequential:
    """Make a chain of linear layers of one width."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(n_layers)))


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_trace_sees_every_action_in_schedule_order(checkpoint: CheckpointMode) -> None:
    """A measured timeline has exactly the schedule's actions, in its order, per partition."""
    pipe = GPipe(linear_chain(), [1, 3], chunks=3, checkpoint=checkpoint)
    with trace(pipe) as recorder:
        for _ in range(2):
            pipe(torch.ones(6, WIDTH)).sum().backward()
    pipe(torch.ones(6, WIDTH))
    assert len(recorder.timelines) == 2
    timeline = recorder.timeline
    rows = gpipe_schedule(2, 3, checkpoint).rows
    for j in range(2):
        events = sorted((e for e in timeline.events if e.partition == j), key=lambda e: e.start)
        assert [(e.kind, e.micro_batch) for e in events] == [
            (a.kind, a.micro_batch) for a in rows[j]
        ]
    timeline.check()
    assert timeline.source == "measured"


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_trace_tells_what_ran_as_a_simulation_does(schedule: str) -> None:
    """Balance, schedule, chunks and modes of a measurement stand where a prediction has them."""
    model, sample = linear_chain(), torch.ones(6, WIDTH)
    profile = gb.Profile.from_costs([1.0] * 4, rows=2, chunks=3)
    plan = gb.solve(profile, 2, checkpoint=["always", "never"], schedule=schedule)
    pipe = GPipe.from_plan(model, plan)
    with trace(pipe) as recorder:
        pipe.step(sample, loss_fn=torch.sum, schedule=schedule)
    predicted = gb.simulate(plan).provenance
    told = recorder.timeline.provenance
    alike = {name: predicted[name] for name in ("schedule", "balance", "chunks", "checkpoint")}
    assert told == {**alike, "loss_inside": True}


def test_partitions_work_at_the_same_time() -> None:
    """Cells of two partitions are in progress at once, in the forward and in the backward."""
    meetings = {"forward": 0, "backward": 0}
    barriers = {name: threading.Barrier(2) for name in meetings}
    counting = threading.Lock()

    def meet(name: str) -> None:
        # Returns only if the other partition's worker is here too, or after a while without it.
        try:
            barriers[name].wait(timeout=5)
        except threading.BrokenBarrierError:
            barriers[name].reset()
            return
        with counting:
            meetings[name] += 1

    class Meet(nn.Module):
        def __init__(self, first: bool) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.first = first
            self.n_forward = self.n_backward = 0

        def forward(self, x: Tensor) -> Tensor:
            # Micro-batch 1 in partition 0 meets micro-batch 0 in partition 1, and mirrored.
            if self.n_forward == (1 if self.first else 0):
                meet("forward")
            self.n_forward += 1
            y = self.linear(x)
            y.register_hook(lambda gradient: self.hook())
            return y

        def hook(self) -> None:
            if self.n_backward == (0 if self.first else 1):
                meet("backward")
            self.n_backward += 1

    pipe = GPipe(nn.Sequential(Meet(True), Meet(False)), [1, 1], chunks=2, checkpoint="never")
    pipe(torch.ones(2, 2)).sum().backward()
    assert meetings == {"forward": 2, "backward": 2}


def test_nothing_traced_is_an_error() -> None:
    """A recorder without a mini-batch says so, and a pipe has one trace at a time."""
    pipe = GPipe(linear_chain(), [2, 2])
    with trace(pipe) as recorder, pytest.raises(RuntimeError, match="traced already"), trace(pipe):
        pass
    with pytest.raises(RuntimeError, match="nothing was traced"):
        _ = recorder.timeline


def test_ledger_counts_storages_once() -> None:
    """Views count nothing, owners can change, and freed memory is gone."""
    ledger = Ledger(2)
    with ledger.watch(0):
        tensor = torch.zeros(100)
        view = tensor[10:]
        copy = tensor.clone()
    assert ledger.live == [800, 0]
    ledger.hold([view], 1)
    assert ledger.live == [400, 400]
    del tensor, view
    assert ledger.live == [400, 0]
    del copy
    assert (ledger.live, ledger.peaks, ledger.total_peak) == ([0, 0], [800, 400], 800)


def test_ledger_goes_before_the_storages_it_counts() -> None:
    """Storages that live on keep no ledger, and die in peace when it is gone."""
    ledger = Ledger()
    with ledger.watch(0):
        tensor = torch.zeros(100)
    assert ledger.live == [400]
    known = weakref.ref(ledger)
    del ledger
    assert known() is None
    again = Ledger()
    again.hold([tensor], 0)
    del tensor
    assert (again.live, again.peaks) == ([0], [400])


def test_of_two_meters_the_one_that_began_first_may_end_first() -> None:
    """Compiled code runs as written until both have ended, and then compiled again."""
    pipes = [GPipe(linear_chain(2), [1, 1]) for _ in range(2)]
    first, second = map(measure_memory, pipes)
    before = [blocks.here() for blocks in all_shared_blocks()]
    first.__enter__()
    meter = second.__enter__()
    first.__exit__(None, None, None)
    assert eager._blocks.here() > before[all_shared_blocks().index(eager._blocks)]
    pipes[1](torch.ones(2, WIDTH)).sum().backward()
    second.__exit__(None, None, None)
    assert [blocks.here() for blocks in all_shared_blocks()] == before
    assert meter.total_peak_bytes > 0


def test_figures_of_a_meter_are_those_of_its_block() -> None:
    """A mini-batch that began in the block may end after it."""
    pipe = GPipe(linear_chain(), [2, 2], chunks=2)
    with measure_memory(pipe) as meter:
        output = pipe(torch.ones(2 * ROWS, WIDTH))
    found = meter.peak_bytes, meter.total_peak_bytes
    output.sum().backward()
    assert (meter.peak_bytes, meter.total_peak_bytes) == found
    with measure_memory(pipe) as whole:
        pipe(torch.ones(2 * ROWS, WIDTH)).sum().backward()
    assert whole.total_peak_bytes > meter.total_peak_bytes


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, "sgd", [torch.optim.SGD]])
def test_only_optimizers_have_states_to_count(optimizer: Any) -> None:
    """A class of optimizers is none."""
    pipe = GPipe(linear_chain(), [2, 2])
    with (
        pytest.raises(KindError, match=r"optimizer is not an optimizer: got .*\nFix: optimizer="),
        measure_memory(pipe, optimizer),
    ):
        pass


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("kind", ["momentum", "sparse adam"])
def test_what_a_sparse_step_makes_counts_with_the_table(kind: str) -> None:
    """Sparse state and intermediate results belong to the partition of their parameter."""
    rows, width = 500, 16
    table = nn.EmbeddingBag(rows, width, mode="sum", sparse=True)
    pipe = GPipe(nn.Sequential(table, nn.Linear(width, 1)), [1, 1], chunks=2)
    optimizer: Any = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    if kind == "sparse adam":
        parameters = list(pipe.parameters())
        optimizer = torch.optim.SparseAdam(parameters[:1])
    sample = torch.arange(rows).view(-1, 10)
    seen = []
    for _ in range(3):
        optimizer.zero_grad()
        with measure_memory(pipe, optimizer) as meter:
            pipe(sample).sum().backward()
            optimizer.step()
        seen.append(meter.peak_bytes)
    n_bytes = 4 * rows * width
    # Table, gradient, state.
    assert all(of_table > 3 * n_bytes for of_table, _ in seen)
    # Its input and output, and what is as small.
    assert all(of_rest < n_bytes for _, of_rest in seen)


def test_memory_of_never_holds_every_micro_batch() -> None:
    """Without checkpointing a partition holds all it saves for every micro-batch, and little more.

    A linear layer saves its input: partition 0 holds the mini-batch and the inputs of its second
    layer; partition 1 holds what it received and the inputs of its second layer.
    """
    chunks = 4
    pipe = GPipe(linear_chain(), [2, 2], chunks=chunks, checkpoint="never")
    inputs = torch.ones(chunks * ROWS, WIDTH)
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.grad = torch.zeros_like(parameter)
    with measure_memory(pipe) as meter:
        pipe(inputs).sum().backward()
    static = 2 * 2 * LINEAR
    held = 2 * chunks * CHUNK
    # Beyond: gradients that arrive and leave, those of one layer's parameters; on partition 0
    # outputs that wait for a busy neighbour, on partition 1 the gathered output.
    for j in range(2):
        beyond = meter.peak_bytes[j] - static - held
        assert 0 <= beyond <= 2 * CHUNK + LINEAR + (3 if j == 1 else 1) * chunks * CHUNK


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_predicted_memory_is_the_measured_one(checkpoint: CheckpointMode) -> None:
    """Each partition's predicted peak is within a few percent of the count of live storages."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 4, 3, padding=1),
        nn.Flatten(),
        nn.Linear(4 * 256, 10),
    )
    inputs = torch.randn(16, 3, 16, 16)
    profile = gb.profile_model(
        model, inputs, chunks=4, loss_fn=lambda y: y.square().mean(), timeout=0, as_pipeline=False
    )
    plan = gb.solve(profile, 2, checkpoint=checkpoint)
    pipe = GPipe.from_plan(model, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        pipe(inputs).square().mean().backward()
        optimizer.step()

    step()
    optimizer.zero_grad()
    with measure_memory(pipe, optimizer) as meter:
        step()
    # A tensor (or gradient) at the cut that waits for a busy neighbour is still charged to the
    # sender: that much depends on the clock.
    late = 4 * profile.layers[plan.balance[0] - 1].output_bytes
    for partition, measured in zip(plan.partitions, meter.peak_bytes, strict=True):
        predicted = partition.memory.total
        assert 0.95 * measured - late <= predicted <= 1.05 * measured + late


def test_copies_between_devices_are_recorded() -> None:
    """A tensor from another device is a copy with a start and an end; one at home is none."""
    lane = Lane(torch.device("meta"))
    spans: list[tuple[float, float]] = []
    received = lane.receive([torch.ones(2), 7, torch.ones(2, device="meta")], (), spans)
    assert [getattr(leaf, "device", None) for leaf in received] == [lane.device, None, lane.device]
    assert len(spans) == 1
    assert spans[0][0] <= spans[0][1]
    lane.receive([received[0]], (), spans)
    assert len(spans) == 1
    record = MiniBatchRecord(2, {})
    record.add(1, "F", 0, 1.0, 3.0)
    record.add(1, "C", 1, 2.0, 2.5)
    assert [str(event) for event in record.timeline().events] == ["1F0", "1C1"]


def test_what_layers_replace_is_not_kept_by_the_count() -> None:
    """An attribute of the step before lives until the layer has another one, and no longer."""

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias, self.last = nn.Parameter(torch.zeros(1)), torch.zeros(1)

        def forward(self, x: Tensor) -> Tensor:
            y = x + self.bias
            self.last = y.detach()
            return y

    model = nn.Sequential(*[Keeps() for _ in range(4)])
    pipe = GPipe(model, [4], checkpoint="never")
    peaks = []
    for _ in range(3):
        old = weakref.ref(model[1].last)
        with measure_memory(pipe) as meter:
            pipe.step(torch.randn(8, 64), loss_fn=lambda output: output.mean())
            assert old() is None
        peaks.append(meter.peak_bytes)
    assert peaks[1] == peaks[2]
