"""Memory of what layers output and keep: a buffer or parameter that goes on to later layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from counted_memory import count, least_and_most, measured, squares
from estimated import estimate_profile
from torch import Tensor, nn

import gpipebal as gb
from gpipebal.memory import partition_memory
from gpipebal.memory.recomputed_runs import with_runs
from gpipebal.pipeline import GPipe
from gpipebal.skip import pop, skippable, stash

pytestmark = pytest.mark.timeout(120)

WIDTH, CHUNKS, ROWS = 16, 8, 64
#: Bytes of a table, which is larger than all else.
TABLE = 4000 * WIDTH * 4


class First(nn.Module):
    """Returns a table that it keeps, or a part of it, with its output."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.lin, self.way = nn.Linear(WIDTH, WIDTH), way
        table = torch.randn(4000, WIDTH)
        if way == "parameter":
            self.table = nn.Parameter(table)
        elif way == "attribute":
            self.table = table
        else:
            self.register_buffer("table", table)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.lin(x), self.table[:100] if self.way == "part" else self.table


class Between(nn.Module):
    """Uses the table, and hands it on."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, table = value
        return self.lin(x) * table[: len(x)], table


class Last(Between):
    """Uses the table alone."""

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(value)[0]


@skippable(stash=["table"])
class Stashes(nn.Module):
    """Stashes the table, past the layers between."""

    def __init__(self) -> None:
        super().__init__()
        self.first = First("buffer")

    def forward(self, x: Tensor) -> Any:
        x, table = self.first(x)
        yield stash("table", table)
        return x


@skippable(pop=["table"])
class Pops(nn.Module):
    """Uses the table that was stashed."""

    def __init__(self) -> None:
        super().__init__()
        self.last = Last()

    def forward(self, x: Tensor) -> Any:
        return self.last((x, (yield pop("table"))))


def chain(way: str) -> nn.Sequential:
    """Four layers; the first has the table, which the last uses, and mostly all between."""
    torch.manual_seed(0)
    if way == "stash":
        between = [nn.Linear(WIDTH, WIDTH) for _ in "ab"]
        return nn.Sequential(Stashes(), *between, Pops())
    return nn.Sequential(First(way), Between(), Between(), Last())


def loss_of(output: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """Take the mean of squares of the output alone."""
    return squares(output if isinstance(output, Tensor) else output[0])


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("way", ["buffer", "part", "attribute", "parameter", "stash"])
def test_plans_count_what_a_layer_keeps_and_outputs_once(way: str, checkpoint: Any) -> None:
    """In one memory it is where it is, however many micro-batches and partitions have it."""
    layers, inputs = chain(way), torch.randn(ROWS, WIDTH)
    given: Any = {"chunks": CHUNKS, "loss_fn": loss_of}
    profile = measured(layers, inputs, **given)
    for balance in ([4], [2, 2], [1, 1, 2]):
        pipe = GPipe(layers, balance, chunks=CHUNKS, checkpoint=checkpoint)
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.0)
        for schedule in ("gpipe", "1f1b"):
            counted = count(pipe, inputs, schedule, optimizer, loss_of)
            predicted = least_and_most(profile, balance, checkpoint, schedule)
            for low, high, n_bytes in zip(*predicted, counted, strict=True):
                assert 0.97 * low.total <= n_bytes <= 1.03 * high.total, (balance, schedule)


@pytest.mark.parametrize("way", ["buffer", "stash"])
def test_all_ways_to_profile_know_what_layers_keep(way: str) -> None:
    """It is a storage of the output like others, so that links send it."""
    layers, inputs = chain(way), torch.randn(ROWS, WIDTH)
    brief: Any = {"chunks": CHUNKS, "rows": (), "progress": False}
    for profile in (
        measured(layers, inputs, chunks=CHUNKS),
        gb.profile_model(layers, inputs, timeout=0, share_identical=True, **brief),
        estimate_profile(layers, inputs, rates="CPU core", **brief),
    ):
        (table,) = profile.layers[0].kept_outputs
        assert profile.keepers == {table: 0} and profile.storages[table] == TABLE
        names = profile.skips[0].storages if way == "stash" else profile.layers[1].outputs
        assert table in names
        assert gb.Profile.from_dict(profile.to_dict()) == profile
        # At other numbers of rows it is as large.
        assert profile.at_rows(2).storages[table] == TABLE


def test_a_table_that_is_made_anew_is_another_for_each_micro_batch() -> None:
    """Though the layer keeps the last one."""

    class Makes(First):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            self.table = torch.ones_like(self.table)
            return super().forward(x)

    layers = nn.Sequential(Makes("buffer"), Last())
    assert measured(layers, torch.randn(ROWS, WIDTH), chunks=CHUNKS).keepers == {}


def handed_on() -> gb.Profile:
    """Three layers, the first of which keeps 1000 bytes that it outputs, and the others save."""
    profile = gb.Profile.from_costs(
        [1.0] * 3, output_bytes=[1000, 1000, 10], saved_bytes=[0] * 3, chunks=CHUNKS
    )
    first, second, third = profile.layers
    table, other = first.outputs[0], second.outputs[0]
    first = replace(first, kept_outputs=(table,))
    second = replace(second, outputs=(table,), saved=(table,))
    third = replace(third, saved=(table,))
    return replace(profile, layers=(first, second, third), without_gradient=(table, other))


def test_partitions_without_it_have_copies_by_hand() -> None:
    """Where partitions do not share a memory; the one with the layer that keeps it has none."""
    profile = handed_on()

    def activations(bounds: tuple[int, ...], shared: bool) -> list[int]:
        peaks = partition_memory(
            profile, bounds, chunks=CHUNKS, checkpoint="never", shared_memory=shared
        )
        return [peak.activations for peak in peaks]

    for bounds in ((0, 3), (0, 1, 3), (0, 2, 3), (0, 1, 2, 3)):
        assert activations(bounds, True) == [0] * (len(bounds) - 1)
    assert activations((0, 3), False) == [0]
    assert activations((0, 1, 3), False) == [0, 1000 * CHUNKS]
    assert activations((0, 2, 3), False) == [0, 1000 * CHUNKS]


def test_a_recompute_makes_no_other_by_hand() -> None:
    """Layers that are recomputed by themselves need less where the first of them keeps it."""
    profile = handed_on()
    first = replace(profile.layers[0], kept_outputs=())
    without = replace(profile, layers=(first, *profile.layers[1:]))
    kept, made = (with_runs(one, [range(2)]).layers[1] for one in (profile, without))
    assert kept.backward_peak_bytes == made.backward_peak_bytes - 1000
