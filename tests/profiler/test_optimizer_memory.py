"""What the optimizer's step needs: predicted from stand-ins, counted in a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import gpipebal as gb
from gpipebal.memory.partitions import cells_of, optimizer_peak
from gpipebal.pipeline import measure_memory
from gpipebal.pipeline.observers.ledger import Ledger
from gpipebal.planner import evaluate
from gpipebal.problem import to_bounds
from gpipebal.profiler.memory.sparse_gradients import GradientKind
from gpipebal.profiler.step import state as of_step
from gpipebal.profiler.step.optimizer import Maker
from gpipebal.profiler.step.state import optimizer_needs


def in_groups(
    parameters: Sequence[nn.Parameter], *, together: Sequence[bool]
) -> torch.optim.Optimizer:
    """Step every second parameter in one group, the rest in another one: each at once or not."""
    groups = [
        {"params": parameters[k::2], "weight_decay": float(k), "foreach": at_once}
        for k, at_once in enumerate(together)
    ]
    return torch.optim.AdamW(groups)


OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "adam": torch.optim.Adam,
    "adam together": partial(torch.optim.Adam, foreach=True),
    "adam fused": partial(torch.optim.Adam, fused=True),
    "amsgrad": partial(torch.optim.AdamW, amsgrad=True),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "groups together": partial(in_groups, together=[True, True]),
    "weights together": partial(in_groups, together=[True, False]),
    "biases together": partial(in_groups, together=[False, True]),
}
Factory = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


def wide() -> nn.Sequential:
    """Layers whose parameters are far larger than what flows through them, of several sizes."""
    return nn.Sequential(
        nn.Linear(8, 300), nn.Linear(300, 200), nn.Linear(200, 4), nn.Linear(4, 100), nn.Tanh()
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("balance", [(2, 3), (4, 1)])
def test_a_step_of_the_optimizer_is_counted(name: str, balance: tuple[int, int]) -> None:
    """The peak of a partition with large parameters is the one that is counted."""
    optimizer: Factory = OPTIMIZERS[name]
    model, sample = wide(), torch.randn(4, 8)
    profile = gb.profile_model(
        model,
        sample,
        chunks=2,
        rows=(),
        optimizer=optimizer,
        timeout=0,
        progress=False,
        as_pipeline=False,
    )
    plan = evaluate(profile, balance, chunks=2, checkpoint="never", shared_memory=True)
    pipe = gb.GPipe(model, balance, devices=["cpu"] * 2, chunks=2, checkpoint="never")
    stepper = optimizer(list(pipe.parameters()))

    def step() -> None:
        stepper.zero_grad()
        pipe(sample).sum().backward()
        stepper.step()

    step()
    stepper.zero_grad()
    with measure_memory(pipe, stepper) as meter:
        step()
    # The first partition has the large layers. Adam also makes something of a bias or two.
    assert plan.partitions[0].memory.total == pytest.approx(meter.peak_bytes[0], rel=0.005)


@pytest.mark.parametrize("kind", ["made of all", "to be made", "frozen later"])
def test_state_of_frozen_parameters_counts(kind: str) -> None:
    """Adagrad makes state of all that it is given; Adam keeps that of a layer frozen later."""
    model = nn.Sequential(nn.Linear(8, 300), nn.Linear(300, 200), nn.Linear(200, 4))
    sample = torch.randn(4, 8)
    of_layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in model]
    if kind == "frozen later":
        optimizer: Any = torch.optim.Adam(model.parameters())
        model(sample).sum().backward()
        optimizer.step()
        wanted = [8 * n + 8 for n in of_layers]  # two values, and the number of steps of each
        model[1].requires_grad_(False)
    else:
        model[1].requires_grad_(False)
        optimizer = torch.optim.Adagrad
        if kind == "made of all":
            optimizer = optimizer(model.parameters())
        wanted = [4 * n + 8 for n in of_layers]
    for method in ("measure", "estimate"):
        options: dict[str, Any] = {} if method == "estimate" else {"timeout": 0, "progress": False}
        profile = gb.profile_model(
            model, sample, chunks=2, rows=(), optimizer=optimizer, method=method, **options
        )
        assert [layer.optimizer_bytes for layer in profile.layers] == wanted


@pytest.mark.parametrize(
    ("device_type", "together", "n_bytes"), [("cpu", False, 80), ("cuda", True, 40)]
)
def test_devices_step_in_their_own_way(device_type: str, together: bool, n_bytes: int) -> None:
    """Adam makes two intermediate results of a parameter on a CPU, and one in one go on CUDA."""
    parameters = [nn.Parameter(torch.zeros(10)) for _ in range(3)]
    found = optimizer_needs(Maker(torch.optim.Adam, parameters), device_type)
    # One after the other, a result of the one before is still there.
    left = 0 if together else 40
    assert (found.together, found.peaks) == (together, [n_bytes] * 3)
    assert found.state == [84] * 3
    assert (found.left, found.before) == ([0, left, left], [None, 0, 1])


def test_groups_leave_nothing_to_each_other() -> None:
    """They are stepped one after the other; a frozen parameter is not stepped."""
    parameters = [nn.Parameter(torch.zeros(10), requires_grad=k != 1) for k in range(5)]
    groups = [{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.5}]
    found = optimizer_needs(Maker(torch.optim.Adam(groups), parameters), "cpu")
    assert (found.left, found.before) == ([0, 0, 40, 0, 40], [None, None, 0, None, 3])


def test_what_is_stepped_at_once_adds_up_in_its_group() -> None:
    """Groups, and optimizers, come one after the other; the largest step counts."""
    model = nn.Sequential(*(nn.Linear(20, 20) for _ in range(3)))

    def make(parameters: Sequence[nn.Parameter]) -> Any:
        matrices = [one for one in parameters if one.dim() == 2]
        biases = [one for one in parameters if one.dim() == 1]
        return [torch.optim.Adam(matrices, foreach=True), torch.optim.Adam(biases)]

    found = gb.profile_model(
        model,
        torch.ones(2, 20),
        rows=(),
        optimizer=make,
        method="estimate",
        rates="CPU core",
        progress=False,
    )
    assert not found.step.optimizer_together
    # One intermediate result for each matrix; of the biases one after the other makes its own.
    assert found.step.optimizer_groups == ((1600, 1600, 1600),)
    for balance in ([3], [1, 2]):
        cells = cells_of(found, to_bounds(balance), False, False)
        assert [optimizer_peak(cell) for cell in cells] == [1600 * n for n in balance]


def test_frozen_parameters_are_not_stepped() -> None:
    """A parameter without a gradient has no state and no intermediate results."""
    parameters = [nn.Parameter(torch.zeros(10)), nn.Parameter(torch.zeros(9), requires_grad=False)]
    found = optimizer_needs(Maker(torch.optim.Adam, parameters), "cpu")
    assert found.peaks[1] == 0
    assert found.state == [84, 0]


class Curious(torch.optim.SGD):
    """Reads values."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad.sum().item() > 0:
                    self.state[parameter]["sum"] = torch.zeros(3)


class Refusing(torch.optim.SGD):
    """Steps nothing that it is given here."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        raise RuntimeError("these are no parameters of mine")


class Deciding(torch.optim.SGD):
    """Keeps more where all of a gradient is large."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                n_kept = 3 if parameter.grad.min().item() > 0.5 else 1
                self.state[parameter]["kept"] = torch.zeros(n_kept)


class Thorough(torch.optim.SGD):
    """Reads a value of each of many elements."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                for part in parameter.grad.split(2**22):
                    self.state[parameter]["last"] = torch.full((2,), part.sum().item())


def test_who_needs_values_steps_stand_ins_with_memory() -> None:
    """Of too many there are none: what is read is guessed, and a part tells if that decides."""
    huge = nn.Parameter(torch.zeros(2**28, device="meta"))
    for parameter in (nn.Parameter(torch.zeros(10)), huge):
        found = optimizer_needs(Maker(Curious, [parameter]), "cpu")
        assert found.state == [12] and not found.why
    for kind in (Deciding, Thorough):
        found = optimizer_needs(Maker(kind, [huge]), "cpu")
        assert found.state == [None] and "it decides by values" in found.why[kind.__name__]


@pytest.mark.parametrize("shape", [(2**14, 2**15), (2**29,), (4, 2**13, 2**14)])
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.ASGD])
def test_the_needs_of_large_parameters_are_known_without_values(
    kind: Any, foreach: bool, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those of a step with values, as a smaller parameter of this kind shows."""
    make = partial(kind, foreach=foreach)
    huge = Maker(make, [nn.Parameter(torch.zeros(shape, device="meta"))])
    n = huge.parameters[0].numel()
    wanted = 4 * n + 12  # a mean of all values, and three numbers
    if kind is torch.optim.Adafactor:  # means of rows and of columns, and the number of steps
        means = n // shape[-1] + n // shape[-2] if len(shape) > 1 else n
        wanted = 4 * means + 4
    needs = optimizer_needs(huge, "cpu")
    assert needs.state == [wanted] and not needs.why
    small = Maker(make, [nn.Parameter(torch.zeros([max(4, n // 1024) for n in shape]))])
    found = []
    for largest in (2**28, 0):
        monkeypatch.setattr(of_step, "LARGEST_STEPPED", largest)
        found.append(optimizer_needs(small, "cpu"))
    assert found[0] == found[1]


def test_of_several_optimizers_only_the_one_that_cannot_step_is_unknown() -> None:
    """The state of the others is known, layer by layer, and a plan says where it is not."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4, bias=False))

    def make(parameters: Sequence[nn.Parameter]) -> Any:
        return [Refusing(parameters[:1]), torch.optim.SGD(parameters[1:], lr=0.1, momentum=0.9)]

    found = as_measured(model, torch.ones(4, 4), make)
    assert [layer.optimizer_bytes for layer in found.layers] == [None, 0, 64]
    assert [layer.optimizer_peak_bytes for layer in found.layers] == [None, 0, 0]
    told = [flag for flag in found.provenance["flags"] if "optimizer" in flag]
    assert len(told) == 1 and "Refusing cannot step" in told[0] and "no parameters" in told[0]
    plan = gb.solve(found, 2, memory_limit=10**6)
    assert plan.partitions[1].memory.optimizer == 64
    assert "not known for 1 layer" in " ".join(plan.notes)
    assert "Peak memory of partition 0 does not count optimizer state" in str(plan)


# --- sparse gradients -----------------------------------------------------------------------------


def as_measured(model: nn.Module, sample: torch.Tensor, optimizer: Any) -> gb.Profile:
    """Profile memory, and as little else as possible."""
    options: dict[str, Any] = {"timeout": 0, "progress": False, "as_pipeline": False}
    return gb.profile_model(model, sample, chunks=2, rows=(), optimizer=optimizer, **options)


def recommender() -> nn.Sequential:
    """A table with sparse gradients, and a layer with dense ones."""
    return nn.Sequential(nn.EmbeddingBag(50, 8, mode="sum", sparse=True), nn.Linear(8, 2))


def table_apart(parameters: Sequence[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Step the table as its gradients ask for it, and the rest as usual."""
    return [torch.optim.SparseAdam(parameters[:1]), torch.optim.Adam(parameters[1:])]


TABLE = 50 * 8 * 4
SPARSE_OPTIMIZERS: dict[str, tuple[Any, list[int]]] = {
    "sparse adam": (table_apart, [2 * TABLE, 2 * 18 * 4 + 2 * 4]),
    # In the long run it has an entry, and its place, for each row.
    "momentum": (partial(torch.optim.SGD, momentum=0.9), [TABLE + 50 * 8, 18 * 4]),
    "adagrad": (torch.optim.Adagrad, [TABLE + 4, 18 * 4 + 2 * 4]),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", SPARSE_OPTIMIZERS)
@pytest.mark.parametrize("kind", ["class", "instance", "estimate"])
def test_the_state_of_a_table_with_sparse_gradients(name: str, kind: str) -> None:
    """Stand-ins get gradients that are sparse where those of the layers are."""
    model, (make, wanted) = recommender(), SPARSE_OPTIMIZERS[name]
    sample = torch.randint(50, (8, 3))
    if kind == "estimate":
        found = gb.profile_model(model, sample, chunks=2, optimizer=make, method="estimate")
    else:
        found = as_measured(
            model, sample, make if kind == "class" else make(list(model.parameters()))
        )
    assert [layer.optimizer_bytes for layer in found.layers] == wanted
    assert not [flag for flag in found.provenance["flags"] if "cannot step stand-ins" in flag]
    if kind != "estimate":
        assert found.step.optimizer_time is not None


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_a_sparse_step_needs_memory_for_the_rows_of_the_mini_batch() -> None:
    """Not for all rows of the table; and a table of which only some are stepped has the same."""
    peaks, states = [], []
    for rows in (4_000, 40_000, 400_000):
        model = nn.Sequential(nn.EmbeddingBag(rows, 64, mode="sum", sparse=True))
        found = as_measured(model, torch.arange(48).view(8, 6), torch.optim.SparseAdam)
        (layer,) = found.layers
        peaks.append(layer.optimizer_peak_bytes or 0)
        states.append(layer.optimizer_bytes)
    assert states == [2 * 4 * 64 * rows for rows in (4_000, 40_000, 400_000)]
    assert 48 * 64 * 4 < peaks[0] < 8 * 48 * 64 * 4
    assert len(set(peaks)) == 1


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    ("rows", "entries"), [(6_000, 40), (6_000, 400), (6_000, 3_000), (6_000, 9_000), (10, 9_000)]
)
@pytest.mark.parametrize("make", [torch.optim.SparseAdam, torch.optim.Adagrad])
def test_a_part_of_a_table_tells_of_all_of_it(
    make: Any, rows: int, entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the mini-batch has few entries or more than there are rows."""
    table = nn.Parameter(torch.zeros(rows, 8))
    maker = Maker(make, [table])
    maker.note_gradients({id(table): GradientKind(1, entries)})
    whole = optimizer_needs(maker, "cpu")
    of_all = bytes_in_step(maker)
    monkeypatch.setattr(of_step, "LARGEST_TABLE", 2**14)
    in_part = optimizer_needs(maker, "cpu")
    assert in_part.state == whole.state and not in_part.why and not whole.why
    assert in_part.peaks == [pytest.approx(whole.peaks[0], rel=0.01)]
    assert bytes_in_step(maker) < of_all / 3


def bytes_in_step(maker: Maker) -> int:
    """Count what lives at most while stand-ins are stepped."""
    ledger = Ledger()
    with ledger.watch(0):
        optimizer_needs(maker, "cpu")
    return ledger.total_peak


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    ("make", "least"), [(torch.optim.SGD, 3), (torch.optim.Adagrad, 5), (torch.optim.SparseAdam, 7)]
)
def test_the_estimated_time_of_a_sparse_step_is_that_of_its_rows(make: Any, least: int) -> None:
    """However many rows the table has: at least each of their values is read, and those written."""
    rates = gb.DeviceRates("plain", {"float32": 1e30}, 1e6, launch_time=0.0, host_time=None)
    for n_words in (24, 24_000):
        times = set()
        for rows in (50_000, 1_000_000):
            with torch.device("meta"):
                model = nn.Sequential(nn.EmbeddingBag(rows, 8, mode="sum", sparse=True))
                words = torch.ones(8, n_words // 8, dtype=torch.long)
            options: dict[str, Any] = {"optimizer": make, "method": "estimate", "rates": rates}
            times.add(gb.profile_model(model, words, **options).step.optimizer_time)
        once = n_words * 8 * 4 / 1e6
        assert max(times) == pytest.approx(min(times), rel=1e-6)
        assert least * once < min(times) < 60 * once


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_a_table_that_is_used_densely_too_has_a_dense_gradient() -> None:
    """The sum of a sparse and a dense gradient is dense: Adam steps it, SparseAdam does not."""

    class Scores(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight.t()

    table = nn.Embedding(10, 4, sparse=True)
    model = nn.Sequential(table, Scores(table.weight))
    adam, sparse = (
        as_measured(model, torch.arange(6), kind)
        for kind in (torch.optim.Adam, torch.optim.SparseAdam)
    )
    assert [layer.optimizer_bytes for layer in adam.layers] == [2 * 160 + 4, 0]
    assert [layer.optimizer_bytes for layer in sparse.layers] == [None, 0]
