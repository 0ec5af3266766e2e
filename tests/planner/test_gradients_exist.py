"""Steps before which gradients exist: accumulated over mini-batches, or cleared and kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import gpipebal as gb
from gpipebal.cli import main
from gpipebal.memory import partition_memory
from gpipebal.pipeline import GPipe, measure_memory
from gpipebal.simulator import held_of, memory_over_time

PROFILE = gb.Profile.from_costs(
    [1.0] * 4, parameter_bytes=[100, 10, 10, 50], saved_bytes=[40] * 4, chunks=2
)


def test_by_hand() -> None:
    """The graphs of both micro-batches are 160 bytes; gradients are there beside them, or later.

    Without, the first partition is highest in the second backward, with one graph and its 110
    bytes of gradients; the second in the first backward, one layer on its way, with the 50 bytes
    of the layer before.
    """
    found = []
    for exist in (False, True):
        plan = gb.evaluate(PROFILE, [2, 2], checkpoint="never", gradients_exist=exist)
        assert plan.gradients_exist == exist
        assert ("before which the parameters have gradients" in str(plan)) == exist
        found.append([part.memory.total for part in plan.partitions])
    assert found == [[110 + 80 + 110, 60 + 120 + 50], [110 + 160 + 110, 60 + 160 + 60]]


def test_a_limit_counts_them() -> None:
    """What just fits without does not with them, and what a plan says it keeps."""
    plan = gb.solve(PROFILE, 2, checkpoint="never", objective="peak_memory")
    limit = max(part.memory.total for part in plan.partitions)
    gb.solve(PROFILE, 2, checkpoint="never", memory_limit=limit)
    with pytest.raises(gb.errors.InfeasibleError) as refused:
        gb.solve(PROFILE, 2, checkpoint="never", memory_limit=limit, gradients_exist=True)
    assert refused.value.shortage is not None
    enough = limit + refused.value.shortage
    fits = gb.solve(PROFILE, 2, checkpoint="never", memory_limit=enough, gradients_exist=True)
    assert max(part.memory.total for part in fits.partitions) == enough
    chosen = gb.planner.recompute_layers(PROFILE, fits, memory_limit=enough - 1)
    assert chosen.plan.gradients_exist
    assert max(part.memory.total for part in chosen.plan.partitions) < enough
    assert gb.compare_rules(PROFILE, fits).rows[0].peak_bytes is not None


@pytest.mark.parametrize("balance", [[2, 2], [3, 1], [1, 3]])
def test_tied_parameters_are_bounded(balance: list[int]) -> None:
    """Each partition sums its gradients up for itself, beside those that exist."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)])
    model[3].weight = model[1].weight = model[0].weight
    inputs = torch.randn(8, 64)
    profile = gb.profile_model(
        model, inputs, chunks=4, rows=(), timeout=0, as_pipeline=False, progress=False
    )
    predicted = partition_memory(
        profile,
        (0, balance[0], 4),
        chunks=4,
        checkpoint="never",
        shared_memory=True,
        gradients_exist=True,
    )
    pipe = GPipe(model, balance, chunks=4, checkpoint="never")
    pipe(inputs).sum().backward()
    with measure_memory(pipe) as meter:
        pipe(inputs).sum().backward()
    for peak, n_bytes in zip(predicted, meter.peak_bytes, strict=True):
        # No more than what waits at the cut, and a gradient of the tied weights, too much.
        assert 0.97 * n_bytes <= peak.total <= n_bytes + 64 * 64 * 4 + inputs.nbytes


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The switch reaches the plan, of the best balance and of a given one; files keep it."""
    PROFILE.save(tmp_path / "profile.json")
    for how in (["-n", "2"], ["--balance", "2,2"]):
        path = tmp_path / "plan.json"
        words = ["solve", str(tmp_path / "profile.json"), *how, "-o", str(path)]
        assert main([*words, "--gradients-exist"]) == 0
        assert gb.Plan.load(path).gradients_exist
        path.unlink()
        assert main(words) == 0
        assert not gb.Plan.load(path).gradients_exist
        path.unlink()
    capsys.readouterr()


def test_memory_over_time_begins_with_them() -> None:
    """And never has fewer."""
    plan = gb.solve(PROFILE, 2, checkpoint="never", gradients_exist=True)
    timeline = gb.simulate(plan)
    tracks = memory_over_time(timeline, held_of(PROFILE, plan))
    for track, part in zip(tracks, plan.partitions, strict=True):
        assert track.peak == part.memory.total
        assert track.total[0] == part.memory.parameters + part.memory.gradients
