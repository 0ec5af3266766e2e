"""Predicted memory of what has no gradient, is handed through, or is tied: by hand, and counted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from counted_memory import WAYS, count, least_and_most, squares
from estimated import estimate_profile
from nothing_waits import peaks_without_waiting
from torch import Tensor, nn

import gpipebal as gb
from gpipebal.memory import partition_memory
from gpipebal.memory.cell import Cell
from gpipebal.pipeline import GPipe
from gpipebal.pipeline.observers.ledger import Ledger
from gpipebal.pipeline.values.tensors import bytes_of
from gpipebal.planner import evaluate
from gpipebal.problem import Link
from gpipebal.profile import TieProfile
from gpipebal.profile.ties import find_ties

pytestmark = pytest.mark.timeout(300)

CHUNKS = 4
ROWS = 64 * CHUNKS


class Inner(nn.Module):
    """A layer that is narrow outside and wide inside."""

    def __init__(self, inside: int, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inside), nn.Linear(inside, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Split(nn.Module):
    """Makes two values of its input."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(part(x) for part in self.parts)


class Beside(nn.Module):
    """A layer for the first of two values; the second is handed through."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.layer(value[0]), value[1]


class Join(nn.Module):
    """Adds two values up, after a layer for each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 16)

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        return value[0] + self.layer(value[1].float())


class Head(nn.Module):
    """Projects onto the weight of another layer."""

    def __init__(self, other: nn.Linear | nn.Embedding) -> None:
        super().__init__()
        self.weight = other.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def frozen() -> tuple[nn.Sequential, Tensor]:
    """A chain whose first four layers are not trained."""
    layers = [nn.Linear(16, 8), nn.ReLU(), Inner(512), Inner(256), *map(Inner, (384, 256, 300))]
    for layer in layers[:4]:
        layer.requires_grad_(False)
    return nn.Sequential(*layers), torch.randn(ROWS, 16)


def tokens(second: nn.Module) -> tuple[nn.Sequential, Tensor]:
    """A chain that takes large integers along to its last layer, made of its input by a layer."""
    words = nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(256, 16))
    inside = [Beside(nn.Linear(16, 16)) for _ in range(3)]
    return nn.Sequential(Split(words, second), *inside, Join(64)), torch.randint(0, 50, (ROWS, 64))


class Copy(nn.Module):
    """Gives a copy of what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x.clone()


def handed_through() -> tuple[nn.Sequential, Tensor]:
    """A chain whose widest value goes along, untouched, to the last layer."""
    inside = [Beside(Inner(32, 16)) for _ in range(4)]
    layers = [Split(nn.Linear(16, 16), nn.Linear(16, 300)), *inside, Join(300)]
    return nn.Sequential(*layers), torch.randn(ROWS, 16)


def reshaped() -> tuple[nn.Sequential, Tensor]:
    """A chain that is cut where a wide value is only looked at in another shape."""
    shapes = [nn.Unflatten(1, (20, 20)), nn.Flatten()]
    layers = [nn.Linear(16, 8), nn.Linear(8, 400), *shapes, nn.Linear(400, 8), Inner(64)]
    return nn.Sequential(*layers), torch.randn(ROWS, 16)


def tied() -> tuple[nn.Sequential, Tensor]:
    """A language model in small: it projects onto its embedding."""
    embedding = nn.Embedding(2000, 32)
    layers = [embedding, Inner(64, 32), Inner(64, 32), Inner(64, 32), Head(embedding)]
    return nn.Sequential(*layers), torch.randint(0, 2000, (2 * CHUNKS,))


def tied_thrice() -> tuple[nn.Sequential, Tensor]:
    """A chain that uses one weight in three layers."""
    wide = nn.Linear(200, 200)
    layers = [nn.Linear(16, 200), wide, nn.Tanh(), Head(wide), nn.ReLU(), Head(wide)]
    return nn.Sequential(*layers, nn.Linear(200, 8)), torch.randn(8 * CHUNKS, 16)


CASES: dict[str, tuple[Callable[[], tuple[nn.Sequential, Tensor]], list[list[int]]]] = {
    "frozen": (frozen, [[2, 5], [4, 3], [1, 4, 2]]),
    "tokens of the caller": (lambda: tokens(nn.Identity()), [[2, 3], [4, 1], [1, 2, 2]]),
    "tokens of a layer": (lambda: tokens(Copy()), [[2, 3], [1, 2, 2]]),
    "handed through": (handed_through, [[3, 3], [1, 5], [2, 2, 2]]),
    "reshaped": (reshaped, [[3, 3], [2, 2, 2]]),
    "tied": (tied, [[3, 2], [4, 1], [5]]),
    "tied thrice": (tied_thrice, [[2, 5], [4, 3], [4, 2, 1], [7]]),
}


@pytest.mark.parametrize("case", CASES)
def test_counts_are_what_was_predicted(case: str) -> None:
    """No partition needs 3 % more than predicted, or less than without what waits for others."""
    torch.manual_seed(0)
    make, balances = CASES[case]
    layers, inputs = make()
    parameters = [p for p in dict.fromkeys(layers.parameters()) if p.requires_grad]
    profile = gb.profile_model(
        layers,
        inputs,
        chunks=CHUNKS,
        loss_fn=squares,
        optimizer=torch.optim.Adam(parameters),
        rows=(),
        timeout=0,
        as_pipeline=False,
        progress=False,
    )
    wrong = []
    for balance in balances:
        for way, mode in WAYS:
            modes = [("always", "never", "except_last")[j] for j in range(len(balance))]
            checkpoint = modes if mode == "mixed" else mode
            least, most = least_and_most(profile, balance, checkpoint, way)
            pipe = GPipe(layers, balance, chunks=CHUNKS, checkpoint=checkpoint)
            counted = count(pipe, inputs, way, torch.optim.Adam(parameters, lr=0.0))
            for j, n_bytes in enumerate(counted):
                if not least[j].total / 1.03 <= n_bytes <= most[j].total * 1.03:
                    wrong.append((balance, way, mode, j, least[j].total, n_bytes, most[j].total))
    assert not wrong


class Late(Beside):
    """A layer whose recomputes come late: each after another layer's backward of the next one."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.n_recomputes = self.n_backwards = 0
        self.changed = threading.Condition()

    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        if gb.is_recomputing():
            step, i = divmod(self.n_recomputes, CHUNKS)
            self.n_recomputes += 1
            wanted = step * CHUNKS + min(i + 2, CHUNKS)
            with self.changed:
                assert self.changed.wait_for(lambda: self.n_backwards >= wanted, 60)
        return super().forward(value)

    def went_back(self, _gradient: Tensor) -> None:
        """Note a backward of the other layer."""
        with self.changed:
            self.n_backwards += 1
            self.changed.notify_all()


class Telling(Join):
    """Tells a layer of its backwards."""

    def __init__(self, late: Late) -> None:
        super().__init__(64)
        self.__dict__["late"] = late

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        output = super().forward(value)
        if output.requires_grad:
            output.register_hook(self.late.went_back)
        return output


def test_what_an_earlier_partition_keeps_for_its_recompute_waits() -> None:
    """If it recomputes as late as it can, all of the bound is there, and nothing more.

    Integers that go past need no backward; so the last partition has done with them after its
    forward, and is still charged with those of two micro-batches, beside a gradient.
    """
    torch.manual_seed(0)
    layers, inputs = tokens(Copy())
    profile = gb.profile_model(
        *(layers, inputs),
        **{"chunks": CHUNKS, "loss_fn": squares, "rows": (), "timeout": 0},
        **{"optimizer": torch.optim.Adam, "as_pipeline": False, "progress": False},
    )
    late = Late(nn.Linear(16, 16))
    layers[2], layers[4] = late, Telling(late)
    given: Any = {"chunks": CHUNKS, "checkpoint": "always", "schedule": "1f1b"}
    given["shared_memory"] = True
    nothing, most = (
        peaks(profile, (0, 1, 3, 5), **given)[2]
        for peaks in (peaks_without_waiting, partition_memory)
    )
    ids, gradient = 64 * 64 * 8, 64 * 16 * 4
    assert most.waiting == 2 * ids + gradient
    pipe = GPipe(layers, [1, 2, 2], chunks=CHUNKS, checkpoint="always")
    counted = count(pipe, inputs, "1f1b", torch.optim.Adam(layers.parameters(), lr=0.0))[2]
    assert nothing.total + ids < counted
    assert most.total / 1.001 <= counted <= most.total * 1.001


@pytest.mark.parametrize("case", CASES)
def test_an_estimate_knows_what_a_measurement_does(case: str) -> None:
    """What has no gradient, what is handed through, and ties are found on stand-ins too."""
    layers, inputs = CASES[case][0]()
    given: Any = {"chunks": CHUNKS, "loss_fn": squares, "rows": (), "progress": False}
    measured = gb.profile_model(layers, inputs, timeout=0, as_pipeline=False, **given)
    alone = gb.profile_model(layers, inputs, timeout=0, share_identical=True, **given)
    estimated = estimate_profile(layers, inputs, rates="CPU core", **given)
    for other in (alone, estimated):
        assert other.without_gradient == measured.without_gradient
        assert other.ties == measured.ties
        for ours, theirs in zip(other.layers, measured.layers, strict=True):
            assert ours.handed_through == theirs.handed_through
            assert ours.copied_bytes == theirs.copied_bytes


def test_what_the_profiler_tells_of_values() -> None:
    """Integers and values before the first trained layer have no gradient; views hand theirs on."""
    profile = estimate_profile(*frozen(), rows=(), progress=False)
    handed = {storage for layer in profile.layers[:4] for storage in layer.outputs}
    assert set(profile.without_gradient) == handed | set(profile.inputs)
    assert profile.gradient_bytes_of(profile.layers[4].outputs) == ROWS * 8 * 4
    profile = estimate_profile(*tokens(Copy()), rows=(), progress=False)
    ids = profile.layers[0].outputs[1]
    assert set(profile.without_gradient) == {ids, *profile.inputs}
    profile = estimate_profile(*handed_through(), rows=(), progress=False)
    wide = profile.layers[0].outputs[1]
    assert [layer.handed_through for layer in profile.layers] == [(), *[(wide,)] * 4, ()]
    # Cut at each layer, its gradient is copied, though one that is only looked at is not.
    assert profile.layers[1].copied_bytes == ROWS * 300 * 4
    profile = estimate_profile(*reshaped(), rows=(), progress=False)
    value = profile.layers[1].outputs
    assert [layer.handed_through for layer in profile.layers[2:4]] == [value, value]
    assert profile.layers[2].copied_bytes == 0


class Asks(Beside):
    """Takes another way where the value that it hands through needs no gradient."""

    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        assert value[1].requires_grad or not torch.is_grad_enabled()
        return super().forward(value)


@pytest.mark.parametrize("way", [{"timeout": 0}, {"method": "estimate", "rates": "CPU core"}])
def test_layers_may_ask_whether_what_they_hand_through_needs_a_gradient(
    way: dict[str, Any],
) -> None:
    """A profile looks at them as they are trained, and finds what it finds without the question."""
    plain, sample = handed_through()
    asking, _ = handed_through()
    for k in range(1, 5):
        asking[k] = Asks(asking[k].layer)
    found = [
        gb.profile_model(model, sample, rows=(), progress=False, **way) for model in (plain, asking)
    ]
    for one, other in zip(found[0].layers, found[1].layers, strict=True):
        assert (one.handed_through, one.copied_bytes) == (other.handed_through, other.copied_bytes)
        assert one.chained_peak_bytes == other.chained_peak_bytes
        assert one.backward_peak_bytes == other.backward_peak_bytes


def test_what_the_profiler_tells_of_ties() -> None:
    """Parameters that the same layers share stand together; a frozen one has no gradients."""
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    second.bias.requires_grad_(False)
    layers = nn.Sequential(first, second, Head(first), second, first)
    found = estimate_profile(layers, torch.ones(4, 8), rows=(), progress=False).ties
    assert found == (
        TieProfile((0, 2, 4), 8 * 8 * 4, 8 * 8 * 4),
        TieProfile((0, 4), 8 * 4, 8 * 4),
        TieProfile((1, 3), 8 * 8 * 4 + 8 * 4, 8 * 8 * 4),
    )


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("kind", ["coo", "csr", "csc", "bsr", "bsc"])
def test_tied_sparse_parameters_have_the_bytes_of_their_parts(kind: str) -> None:
    """As the profiler counts them in the layers that have them."""
    block = ((2, 2),) if kind.startswith("bs") else ()
    weight = nn.Parameter(getattr(torch.eye(8), f"to_sparse_{kind}")(*block), requires_grad=False)
    layers = [nn.Module(), nn.Module()]
    for layer in layers:
        layer.register_parameter("weight", weight)
    assert find_ties(layers) == (TieProfile((0, 1), bytes_of(weight), 0),)


def chain() -> gb.Profile:
    """Four layers with 1000 bytes of parameters each, that save 100 and hand on 10."""
    return gb.Profile.from_costs(
        [1.0] * 4,
        parameter_bytes=[1000] * 4,
        saved_bytes=[100] * 4,
        output_bytes=[10] * 4,
        chunks=CHUNKS,
    )


def cell(profile: gb.Profile, first: int, end: int, *, shared: bool = False) -> Cell:
    """Return the cells of a run of layers."""
    return Cell(profile, first, end, None, shared)


def test_a_cell_without_a_gradient_keeps_nothing_by_hand() -> None:
    """Where no output has a gradient nothing waits for a backward; else inputs without one do."""
    profile = replace(chain(), without_gradient=(1, 3))  # outputs of the first two layers
    before = cell(profile, 1, 2)
    assert (before.held(recomputed=False), before.held(recomputed=True)) == (0, 0)
    assert [sum(m) for m in before.backward(recomputed=False, gradients_exist=False)] == [0]
    assert [sum(m) for m in before.recompute(gradients_exist=False)] == [0]
    behind = cell(profile, 2, 3)
    assert (behind.held(recomputed=False), behind.held(recomputed=True)) == (100, 10)
    # The gradient of its output, 10, and none of its input.
    assert [m.transient - 10 for m in behind.backward(recomputed=False, gradients_exist=False)] == [
        10
    ]
    assert cell(chain(), 2, 3).held(recomputed=False) == 110
    # In one memory the receiver is charged with what a graph before it holds.
    layers = list(profile.layers)
    layers[1] = replace(layers[1], saved=(2, 3))
    profile = replace(profile, layers=tuple(layers))
    assert cell(profile, 2, 3, shared=True).held(recomputed=False) == 110


def test_the_callers_input_counts_once_in_one_memory() -> None:
    """Where the mini-batch is handed through, later partitions hold none, or copies of it."""
    profile = chain()
    layers = [replace(layer, outputs=(*layer.outputs, 8)) for layer in profile.layers]
    profile = replace(profile, layers=tuple(layers), storages=(*profile.storages, 500), inputs=(8,))
    assert cell(profile, 1, 2, shared=True).held(recomputed=True) == 10
    assert cell(profile, 1, 2).held(recomputed=True) == 510
    given: Any = {"chunks": CHUNKS, "checkpoint": "always"}
    peaks = peaks_without_waiting(profile, (0, 2, 4), **given)
    one = peaks_without_waiting(profile, (0, 2, 4), **given, shared_memory=True)
    # At the peak one is through.
    assert peaks[1].activations - one[1].activations == (CHUNKS - 1) * 500
    assert peaks[0].activations == one[0].activations == CHUNKS * 500 + 100


def test_what_is_handed_through_to_the_end_comes_back_once() -> None:
    """Its gradient is the one that the backward started from, which stays to the end anyway."""
    profile = chain()
    layers = list(profile.layers)
    layers[0] = replace(layers[0], outputs=(1,))
    layers[1] = replace(layers[1], outputs=(1,), saved=())
    known = replace(layers[1], handed_through=(1,), backward_peak_bytes=10, copied_bytes=10)
    anew = replace(profile, layers=(layers[0], layers[1], *layers[2:]))
    through = replace(profile, layers=(layers[0], known, *layers[2:]))

    def transients(profile: gb.Profile, first: int) -> list[int]:
        moments = cell(profile, first, 2).backward(recomputed=False, gradients_exist=True)
        return [moment.transient for moment in moments]

    # Ten that it starts from; ten that the second layer makes; those flow into the first.
    assert transients(anew, 0) == [20, 20]
    assert transients(through, 0) == [10, 10]
    # Where it goes from cut to cut it is copied.
    assert transients(through, 1) == [20]


def test_tied_gradients_by_hand() -> None:
    """One gradient for each partition; one that waits, and a sum or a copy for a moment."""
    profile = replace(chain(), ties=(TieProfile((0, 2, 3), 600, 600),))

    def walk(first: int, end: int, *, exist: bool) -> list[tuple[int, int]]:
        moments = cell(profile, first, end).backward(recomputed=False, gradients_exist=exist)
        return [(moment.gradients, moment.transient - 10 * (end < 4)) for moment in moments]

    # From the last layer on; layer 3 makes 1000 bytes, of which 600 wait for layer 2, which adds
    # only 400; there a sum comes into being beside its terms, or, in a partition that is not the
    # only one, a copy. Ten flow between layers, and ten are the gradient of an input.
    assert walk(2, 4, exist=False) == [(0, 10), (1000, 10 + 10 + 600)]
    assert walk(2, 4, exist=True) == [(1400, 10), (1400 + 600, 10 + 10 + 600)]
    assert walk(3, 4, exist=False) == [(0, 10 + 600)]
    assert walk(3, 4, exist=True) == [(1000, 10)]
    assert walk(1, 2, exist=True) == [(1000, 10)]
    # At the optimizer's step only the first partition's is left.
    last, whole = cell(profile, 2, 4), cell(profile, 0, 4)
    assert (last.all_gradients, last.gradients_of_step) == (1400, 800)
    assert (whole.all_gradients, whole.gradients_of_step) == (2800, 2800)


def test_a_transfer_back_takes_what_has_a_gradient() -> None:
    """Nothing goes back over a cut where nothing has a gradient."""
    profile = replace(chain(), without_gradient=(1,))
    plan = evaluate(profile, [1, 1, 2], link=Link(bandwidth=10.0))
    assert [p.receive_time for p in plan.partitions] == [0.0, 1.0, 1.0]
    assert [p.return_time for p in plan.partitions] == [0.0, 1.0, 0.0]


def test_what_is_kept_stays_with_its_owner() -> None:
    """A ledger charges another owner with what he is given, unless the first one keeps it."""
    ledger, given, kept = Ledger(2), torch.ones(2), torch.ones(3)
    ledger.hold([given], 0)
    ledger.keep([(0, kept)])
    ledger.hold([given, kept], 1)
    assert ledger.live == [12, 8]
    del kept
    assert ledger.live == [0, 8]
