"""Predicted peak memory: against bytes added up by hand, and against a count of what lives."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpipebal as gb
from gpipebal.files import read_record
from gpipebal.memory import partition_memory
from gpipebal.pipeline import GPipe, measure_memory
from gpipebal.plan import PeakMemory
from gpipebal.problem import to_bounds
from gpipebal.profile import StepTerms
from gpipebal.schedule import Checkpoint

pytestmark = pytest.mark.timeout(60)

CHUNKS = 4


def chain_of_known_bytes() -> gb.Profile:
    """Three layers: each saves 100 bytes of its own and hands on 10; parameters 1000."""
    return gb.Profile.from_costs(
        [1.0] * 3,
        parameter_bytes=[1000] * 3,
        saved_bytes=[100] * 3,
        output_bytes=[10] * 3,
        chunks=CHUNKS,
    )


def predict(checkpoint: Checkpoint, schedule: str = "gpipe") -> tuple[PeakMemory, ...]:
    """Predict for one layer per partition."""
    return partition_memory(
        chain_of_known_bytes(),
        (0, 1, 2, 3),
        chunks=CHUNKS,
        checkpoint=checkpoint,
        schedule=schedule,
    )


def test_memory_of_the_middle_partition_by_hand() -> None:
    """What is in flight is up to mode and schedule; the rest is one cell's.

    The peak is in the backward, or as high in the recompute. A cell holds 10 bytes of input and
    100 that its layer saves. The gradient of its output (10) is there, and that of its input (10)
    comes. Gradients of parameters exist in the second backward, when one micro-batch is through.
    """
    expected = {
        ("gpipe", "never"): 3 * 110,
        ("gpipe", "except_last"): 2 * 10 + 110,
        ("gpipe", "always"): 2 * 10 + 110,
        # Two partitions are left from this one on, so two cells are in flight.
        ("1f1b", "never"): 2 * 110,
        ("1f1b", "always"): 10 + 110,
    }
    for (schedule, mode), activations in expected.items():
        peak = predict(mode, schedule)[1]  # type: ignore[arg-type]
        assert peak == PeakMemory(1000, 1000, 0, None, activations, 20, 0), (schedule, mode)


def test_memory_goes_by_the_mode_of_each_partition() -> None:
    """A partition's memory depends on its own mode, not on its neighbours'."""
    mixed = predict(["never", "always", "never"])
    assert (mixed[0], mixed[2]) == (predict("never")[0], predict("never")[2])
    assert mixed[1] == predict("always")[1]


def test_outputs_and_loss_are_on_the_last_partition() -> None:
    """Outputs, loss and gradients count for the mini-batch, or inside for one micro-batch."""
    profile = chain_of_known_bytes()

    def last(loss_bytes: int | None, **options: Any) -> PeakMemory:
        step = StepTerms(loss_bytes=loss_bytes)
        return partition_memory(
            profile.with_step(step), (0, 2, 3), chunks=CHUNKS, checkpoint="never", **options
        )[-1]

    # A small loss comes and goes before the peak of the backward: its gradient stays.
    assert last(10 * CHUNKS).outputs == 10 * CHUNKS
    # A large one is the peak, between the phases, when no gradients exist.
    large = last(8000)
    assert (large.activations, large.gradients, large.transient) == (110 * CHUNKS, 0, 0)
    assert large.outputs == 8000
    # Unknown, it is three times the output.
    assert last(None) == last(3 * 10 * CHUNKS)
    # Inside there is one micro-batch of it at a time; all gradients exist at the second.
    inside = last(8000, schedule="1f1b")
    assert (inside.total, inside.outputs) == (2000 + 110 + 8000 // CHUNKS, 0)
    # Under GPipe the micro-batches behind it hold their outputs, which the loss saves.
    held = last(8000, loss_inside=True)
    assert held.total == 2000 + 110 + 8000 // CHUNKS + 2 * (110 + 10)


def test_memory_parts() -> None:
    """Parameters and gradients count once, and an unknown optimizer is said, not guessed."""
    peak = partition_memory(chain_of_known_bytes(), (0, 3), chunks=CHUNKS, checkpoint="never")[0]
    assert (peak.parameters, peak.gradients, peak.optimizer) == (3000, 3000, None)
    assert peak.total == 6000 + peak.activations + peak.transient + peak.outputs
    assert "does not count optimizer state" in str(gb.solve(chain_of_known_bytes(), 1))


def test_a_cut_in_one_memory_counts_once() -> None:
    """Partitions that share a memory do not both hold the tensor at their cut."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
    profile = gb.profile_model(model, torch.ones(400, 8), chunks=2, timeout=0)
    apart, together = (
        partition_memory(profile, (0, 2, 4), chunks=2, checkpoint="never", shared_memory=shared)
        for shared in (False, True)
    )
    cut = profile.layers[1].output_bytes
    assert apart[0].activations - together[0].activations == 2 * cut
    assert apart[1].activations == together[1].activations


class Wide(nn.Module):
    """A layer that is narrow outside and wide inside, with parameters of several sizes."""

    def __init__(self, inside: int) -> None:
        super().__init__()
        self.up = nn.Linear(8, inside)
        self.norm = nn.BatchNorm1d(inside)
        self.down = nn.Linear(inside, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.norm(self.up(x))))


def narrow_cuts() -> nn.Sequential:
    """A chain that is narrow where it can be cut; what waits for a neighbour is nothing."""
    layers: list[nn.Module] = [nn.Linear(16, 8)]
    for inside in (512, 256, 384):
        layers += [Wide(inside), nn.Linear(8, 320), nn.ReLU(inplace=True), nn.Linear(320, 8)]
    return nn.Sequential(*layers)


def wide_output() -> nn.Sequential:
    """A chain whose output decides its last partition's memory."""
    return nn.Sequential(*narrow_cuts()[:7], nn.Linear(320, 16), nn.Tanh(), nn.Linear(16, 1024))


def squares(output: Tensor) -> Tensor:
    """Take the mean of squares."""
    return output.square().mean()


WAYS: list[tuple[str, Any]] = [
    *[("loss(pipe(x))", mode) for mode in ("always", "except_last", "never", "mixed")],
    *[("gpipe", mode) for mode in ("always", "never")],
    *[("1f1b", mode) for mode in ("always", "except_last", "never", "mixed")],
]


@pytest.mark.parametrize(
    ("model", "balances"), [(narrow_cuts, ([5, 8], [5, 4, 4])), (wide_output, ([5, 5],))]
)
def test_the_formula_is_the_count(model: Any, balances: tuple[list[int], ...]) -> None:
    """Every partition's predicted peak is within 3 % of what lives at once, in every way."""
    torch.manual_seed(0)
    layers = model()
    inputs = torch.randn(192 * CHUNKS, 16)
    make = torch.optim.Adam
    profile = gb.profile_model(
        layers, inputs, chunks=CHUNKS, loss_fn=squares, optimizer=make, timeout=0, progress=False
    )
    wrong = []
    for balance in balances:
        for way, mode in WAYS:
            modes = [("always", "never", "except_last", "never")[j] for j in range(len(balance))]
            checkpoint = modes if mode == "mixed" else mode
            predicted = partition_memory(
                profile,
                to_bounds(balance),
                chunks=CHUNKS,
                checkpoint=checkpoint,
                schedule="1f1b" if way == "1f1b" else "gpipe",
                loss_inside=way != "loss(pipe(x))",
                shared_memory=True,
            )
            pipe = GPipe(layers, balance, chunks=CHUNKS, checkpoint=checkpoint)
            counted = count(pipe, inputs, way, make(layers.parameters()))
            for j, (peak, n_bytes) in enumerate(zip(predicted, counted, strict=True)):
                if abs(peak.total / n_bytes - 1) > 0.03:
                    wrong.append((balance, way, mode, j, peak.total, n_bytes))
    assert not wrong


def count(
    pipe: GPipe, inputs: Tensor, way: str, optimizer: torch.optim.Optimizer
) -> tuple[int, ...]:
    """Count each partition's peak in a step, after one in which facts are found out."""

    def step() -> None:
        optimizer.zero_grad()
        if way == "loss(pipe(x))":
            squares(pipe(inputs)).backward()
        else:
            pipe.step(inputs, loss_fn=squares, schedule=way)
        optimizer.step()

    step()
    optimizer.zero_grad()
    with measure_memory(pipe, optimizer) as meter:
        step()
    pipe.close()
    return meter.peak_bytes


def test_the_benchmarks_tables_are_its_results() -> None:
    """The README of the stored counts says what `results.json` holds, and nothing else."""
    folder = Path(gb.__file__).parent.parent / "benchmarks" / "peak_memory"
    tables = runpy.run_path(str(folder / "peak_memory_tables.py"))
    record = read_record(folder / "results.json", tables["FORMAT"], tables["VERSION"])
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert tables["fill_in"](text, record) == text
