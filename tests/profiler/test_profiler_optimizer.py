"""Optimizers in profiles: factories and instances, with and without values."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from profiler.test_profiler import profile
from torch import nn

import gpipebal as gb
from gpipebal.errors import ProfileError
from gpipebal.pipeline.observers.ledger import Ledger
from gpipebal.profiler.estimate.terms import estimate_optimizer
from gpipebal.profiler.memory.sparse_gradients import GradientKind
from gpipebal.profiler.step import step
from gpipebal.profiler.step.optimizer import Maker, Optimizers

pytestmark = pytest.mark.timeout(60)


def chain() -> nn.Sequential:
    """A chain with parameters of two shapes in each of two layers."""
    return nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 6))


def profiled(model: nn.Module, optimizer: Any, *, estimate: bool = False) -> gb.Profile:
    """Measure or estimate as little as possible."""
    sample, options = torch.randn(4, 8), {"optimizer": optimizer, "rows": ()}
    if estimate:
        return gb.profile_model(model, sample, method="estimate", progress=False, **options)
    return profile(model, sample, as_pipeline=False, partitions=1, **options)


def state_of(optimizer: torch.optim.Optimizer, layer: nn.Module) -> int:
    """Count the bytes that a real step leaves for a layer."""
    tensors = (v for p in layer.parameters() for v in optimizer.state.get(p, {}).values())
    return sum(v.nbytes for v in tensors if isinstance(v, torch.Tensor))


OPTIMIZERS: dict[str, Any] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "fused": lambda p: torch.optim.Adam(p, fused=True),
    "adafactor": torch.optim.Adafactor,
    "asgd": torch.optim.ASGD,
    "momentum": lambda p: torch.optim.SGD(iter(p), lr=0.1, momentum=0.9),
    "matrices only": lambda p: torch.optim.Adam([x for x in p if x.dim() == 2]),
    "groups": lambda p: torch.optim.SGD(
        [{"params": p[:1], "momentum": 0.9}, {"params": p[1:]}], lr=0.1
    ),
}


def stepped(make: Any, parameters: list[nn.Parameter]) -> Any:
    """Return an optimizer that has made a real step, with gradients of ones."""
    real = make(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    real.step()
    return real


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("estimate", [False, True])
@pytest.mark.parametrize("instance", [False, True])
def test_state_is_that_of_a_real_step(name: str, estimate: bool, instance: bool) -> None:
    """What makes an optimizer, and an optimizer itself, give the bytes that a real step leaves."""
    model, make = chain(), OPTIMIZERS[name]
    parameters = list(model.parameters())
    found = profiled(model, make(parameters) if instance else make, estimate=estimate)
    real = stepped(make, parameters)
    assert [layer.optimizer_bytes for layer in found.layers] == [state_of(real, x) for x in model]
    assert found.step.optimizer_time is not None  # also of those that read values
    assert not [flag for flag in found.provenance["flags"] if "optimizer's time" in flag]


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_the_estimated_time_of_a_step_is_that_of_its_kernels(device_type: str) -> None:
    """A fused one works on each number once; on CUDA a group may be stepped in one launch."""
    parameters = [nn.Parameter(torch.zeros(1000, device="meta")) for _ in range(3)]
    options: dict[str, Any] = {"device_type": device_type, "host_time": None}
    by_bytes = gb.DeviceRates("bytes", {"float32": 1e30}, 1e3, launch_time=0.0, **options)
    by_launches = gb.DeviceRates("launches", {"float32": 1e30}, 1e30, launch_time=1.0, **options)

    def times(make: Any, n: int = 3) -> tuple[float, float]:
        maker = Maker(make, parameters[:n])
        found = [estimate_optimizer(maker, rates) for rates in (by_bytes, by_launches)]
        assert None not in found
        return found[0] or 0.0, found[1] or 0.0

    fused = times(partial(torch.optim.Adam, fused=True))
    # Value, gradient and two means are read, all but the gradient are written.
    assert fused[0] == pytest.approx(3 * 7 * 4.0, rel=0.01)
    together = device_type == "cuda"
    assert fused[1] == (1 if together else 3)
    plain, foreach = (times(partial(torch.optim.Adam, foreach=each)) for each in (False, True))
    assert plain[0] == foreach[0] > fused[0]
    one = times(torch.optim.Adam, 1)[1]
    assert foreach[1] == times(torch.optim.Adam)[1] == (one if together else 3 * one)
    assert plain[1] == 3 * one
    # Adafactor steps one after the other, unless it is told otherwise.
    assert times(torch.optim.Adafactor)[1] == 3 * times(torch.optim.Adafactor, 1)[1]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adafactor])
def test_an_optimizer_like_anothers_has_all_that_the_constructor_sets(kind: Any) -> None:
    """Where there is CUDA a step needs what torch does not keep in a file."""
    parameters = [nn.Parameter(torch.ones(4, 4))]
    theirs = kind(parameters)
    mine = Maker(theirs, parameters).make([0], [nn.Parameter(torch.ones(4, 4))])
    assert not vars(theirs).keys() - vars(mine).keys()


def test_an_optimizer_of_the_model_is_left_alone() -> None:
    """Its state, groups and hooks are as before, and its step is not called."""
    model = chain()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    steps: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)  # puts itself into step()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    schedule.step()
    values = [p.detach().clone() for p in model.parameters()]
    before = [{k: v.clone() for k, v in optimizer.state[p].items()} for p in model.parameters()]
    steps.clear()
    profiled(model, optimizer)
    assert not steps
    for parameter, value, state in zip(model.parameters(), values, before, strict=True):
        assert torch.equal(parameter, value)
        assert all(torch.equal(optimizer.state[parameter][k], v) for k, v in state.items())
    assert [group["lr"] for group in optimizer.param_groups] == [pytest.approx(0.09)]


@pytest.mark.parametrize("estimate", [False, True])
def test_an_optimizer_that_calls_the_model_is_unknown(estimate: bool) -> None:
    """LBFGS has no step of its own: its time and state are unknown, and the profile says so."""
    found = profiled(chain(), torch.optim.LBFGS, estimate=estimate)
    assert found.step.optimizer_time is None
    assert [layer.optimizer_bytes for layer in found.layers] == [None, 0, None]
    assert "a step of LBFGS calls the model" in " ".join(found.provenance["flags"])


def test_of_several_optimizers_only_the_one_that_calls_the_model_is_unknown() -> None:
    """The state of what the others step is known; the time of all of them together is not."""

    def make(parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
        return [torch.optim.LBFGS(parameters[:2]), torch.optim.Adagrad(parameters[2:])]

    found = profiled(chain(), make)
    assert found.step.optimizer_time is None
    assert [layer.optimizer_bytes for layer in found.layers] == [None, 0, 4 * 30 + 2 * 4]
    told = [flag for flag in found.provenance["flags"] if "optimizer's" in flag]
    assert len(told) == 1 and told[0].endswith("a step of LBFGS calls the model")


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (torch.optim.Adam(nn.Linear(2, 2).parameters()), "of other parameters than the model's"),
        (lambda p: torch.optim.Adam(nn.Linear(2, 2).parameters()), "of other parameters"),
        ("adam", r"type\(optimizer\)=str"),
        ([], r"type\(optimizer\)=list"),
        (["adam"], r"type\(optimizer\)=list"),
        (
            lambda p: [torch.optim.SGD(p[:2]), torch.optim.Adam(p)],
            r"two of them step parameter 0(.|\n)*Fix: give each",
        ),
        (lambda p: 3, "it makes a int"),
    ],
)
def test_what_is_no_optimizer_of_the_model_is_refused(optimizer: Any, message: str) -> None:
    """An optimizer of other parameters, and what is none, are refused before anything is run."""
    with pytest.raises(ProfileError, match=message) as caught:
        profiled(chain(), optimizer)
    assert "Fix: " in str(caught.value)


def test_making_stand_ins_needs_no_memory() -> None:
    """Whatever the model's size, the stand-ins for all its parameters have a value or none."""
    parameters = [nn.Parameter(torch.empty(10**4)) for _ in range(10)]
    ledger = Ledger()
    with ledger.watch(0):
        maker = Maker(torch.optim.Adam, parameters)
    assert maker.stepped == [True] * 10
    assert ledger.total_peak < 10**3


def test_one_layer_at_a_time_steps_one_layer() -> None:
    """With an optimizer, too, no more lives than what the largest layer needs with its state."""
    width, n_layers = 64, 24
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(n_layers)))
    sample = torch.randn(4, width)
    ledger = Ledger()
    ledger.hold([sample, *model.parameters()], 0)
    before = ledger.start_peak()
    with ledger.watch(0):
        profile(model, sample, rows=(), one_at_a_time=True, optimizer=torch.optim.Adam)
    layer = 4 * width * (width + 1)
    # Parameters, gradients, two moments, two intermediate results, and as much to flush caches;
    # and stand-ins for two, which are counted here, but have no memory.
    assert ledger.total_peak - before < 11 * layer


class Clocked(torch.optim.SGD):
    """An optimizer that takes a second for each byte; with Nesterov's momentum a hundred."""

    def step(self, closure: Any = None) -> Any:
        """Let the clock go on, by the bytes of what is stepped."""
        for group in self.param_groups:
            of_one = 100 if group["nesterov"] else 1
            CLOCK.now += of_one * sum(p.nbytes for p in group["params"])
        return super().step(closure)


class Clock:
    """A clock that only optimizers move."""

    now = 0.0

    def perf_counter(self) -> float:
        """Return the time."""
        return self.now


CLOCK = Clock()


def two_optimizers(parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Step weights with one optimizer, biases with another that is slow."""
    weights = [p for p in parameters if p.dim() == 2]
    biases = [p for p in parameters if p.dim() == 1]
    return [Clocked(weights), Clocked(biases, momentum=0.9, nesterov=True)]


def two_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Step them with one optimizer, biases in a group that is slow."""
    weights = {"params": [p for p in parameters if p.dim() == 2]}
    biases = {"params": [p for p in parameters if p.dim() == 1], "momentum": 0.9, "nesterov": True}
    return Clocked([weights, biases])


@pytest.mark.parametrize("optimizer", [two_optimizers, two_groups])
@pytest.mark.parametrize("is_alone", [False, True])
def test_of_each_way_to_step_some_parameters_are_stepped_and_scaled_up(
    is_alone: bool, optimizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One may take much longer for a byte than another, so each is scaled up by itself."""
    monkeypatch.setattr(step, "time", CLOCK)
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4), nn.Linear(4, 6))
    of_biases = 4 * (4 + 4 + 6)
    of_weights = sum(4 * p.numel() for p in model.parameters()) - of_biases
    maker = Maker(optimizer, list(model.parameters()))
    one_of = [list(layer.parameters()) for layer in model] if is_alone else None
    for largest in (10**9, 80):
        monkeypatch.setattr(step, "LARGEST_STEPPED", largest)
        seconds = step.measure_optimizer(maker, torch.device("cpu"), one_of=one_of)
        assert seconds == of_weights + 100 * of_biases


def test_tables_with_sparse_gradients_are_scaled_up_by_their_entries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are stepped in another way, whose time has nothing to do with the size of a table."""
    monkeypatch.setattr(step, "time", CLOCK)
    tables = [nn.Embedding(rows, 4, sparse=True).weight for rows in (100, 10)]
    dense = [nn.Parameter(torch.ones(n)) for n in (5, 15)]
    maker = Maker(Clocked, [tables[0], *dense, tables[1]])
    maker.note_gradients({id(tables[0]): GradientKind(1, 2), id(tables[1]): GradientKind(1, 4)})
    for largest, wanted in ((10**9, 1600 + 160 + 80), (1600, 3 * 1600 + 80)):
        monkeypatch.setattr(step, "LARGEST_STEPPED", largest)
        assert step.measure_optimizer(maker, torch.device("cpu")) == wanted


def test_names_of_groups_and_other_rates_are_no_other_way_to_step() -> None:
    """What chooses the algorithm is: names among the options, switches, and numbers that are 0."""
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(4)))
    options: list[dict[str, Any]] = [
        {"name": "a", "lr": 0.1},
        {"name": "b", "lr": 0.2},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
    ]
    groups = [{"params": [p], **own} for p, own in zip(model.parameters(), options, strict=True)]
    maker = Maker(torch.optim.SGD(groups, lr=0.1), list(model.parameters()))
    one, other, *fast = (maker.way_of(place) for place in range(4))
    assert one == other and len({one, *fast}) == 3


class Strange(torch.optim.SGD):
    """Keeps a tensor for each parameter in place of a dictionary."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = torch.zeros_like(parameter)  # type: ignore[assignment]


class CopyOfAdagrad(torch.optim.Optimizer):
    """Steps another optimizer, and has a copy of its state."""

    def __init__(self, parameters: Any) -> None:
        self.inner = torch.optim.Adagrad(parameters)
        super().__init__(self.inner.param_groups, {})
        self.state = dict(self.inner.state)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> Any:
        """Let the other one step."""
        return self.inner.step(closure)


@pytest.mark.parametrize(("optimizer", "n_bytes"), [(Strange, 0), (CopyOfAdagrad, 4 * 4 + 4)])
def test_state_of_frozen_parameters_may_be_kept_in_any_way(optimizer: Any, n_bytes: int) -> None:
    """What is no dictionary is not looked into; what two have counts once."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[0].requires_grad_(False)
    assert Maker(optimizer, list(model.parameters())).idle_bytes(0) == n_bytes


class Wrapped(torch.optim.Optimizer):
    """An optimizer around another one, which keeps the state."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure: Any = None) -> Any:
        """Let the other one step."""
        return self.inner.step(closure)


class Sharing(Wrapped):
    """One whose state is the inner optimizer's, as libraries have them."""

    state = property(lambda self: self.inner.state, lambda self, state: None)  # type: ignore[assignment]


class Several(Wrapped):
    """One that keeps the other one in a list."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        self.all = [inner]
        del self.inner

    def step(self, closure: Any = None) -> Any:
        """Let the other one step."""
        return self.all[0].step(closure)


@pytest.mark.parametrize("kind", [Wrapped, Sharing, Several])
@pytest.mark.parametrize("method", ["measure", "estimate"])
def test_the_state_of_an_optimizer_that_is_wrapped_counts(method: Any, kind: type[Wrapped]) -> None:
    """It is that of the inner one, once."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    settings: dict[str, Any] = {"chunks": 2, "rows": (), "method": method}
    settings |= {"timeout": 0.0, "as_pipeline": False} if method == "measure" else {}
    adam = torch.optim.Adam
    plain, found = (
        gb.profile_model(model, torch.ones(4, 8), optimizer=optimizer, **settings)
        for optimizer in (adam, lambda parameters: kind(adam(parameters)))
    )
    sizes = [layer.optimizer_bytes for layer in found.layers]
    assert sizes == [layer.optimizer_bytes for layer in plain.layers] and any(sizes)


class Joined(torch.optim.Optimizer):
    """Muon for matrices and Adam for the rest; it refuses to be made of only one kind."""

    def __init__(self, parameters: Any) -> None:
        every = list(parameters)
        self.muon = torch.optim.Muon([one for one in every if one.dim() == 2])
        self.adam = torch.optim.Adam([one for one in every if one.dim() != 2])
        super().__init__(every, {})

    def step(self, closure: Any = None) -> Any:
        """Let both step."""
        self.muon.step(closure)
        self.adam.step(closure)


@pytest.mark.parametrize("estimate", [False, True])
@pytest.mark.parametrize("instance", [False, True])
def test_an_optimizer_that_joins_two_is_stepped_for_each_parameter(
    estimate: bool, instance: bool
) -> None:
    """What makes it may fail for a part of the parameters; the state is that of a real step."""
    model = chain()
    parameters = list(model.parameters())
    found = profiled(model, Joined(parameters) if instance else Joined, estimate=estimate)
    real = stepped(Joined, parameters)
    expected = [state_of(real.muon, layer) + state_of(real.adam, layer) for layer in model]
    assert [layer.optimizer_bytes for layer in found.layers] == expected
    assert None not in [layer.optimizer_peak_bytes for layer in found.layers]
    assert found.step.optimizer_time is not None
    assert not any("cannot step" in flag for flag in found.provenance["flags"])


def shared_out(parameters: Any) -> list[torch.optim.Optimizer]:
    """Muon for matrices and Adam for the rest: two optimizers, for two groups of the rest."""
    every = list(parameters)
    rest = [one for one in every if one.dim() != 2]
    groups = [{"params": rest[:1]}, {"params": rest[1:], "amsgrad": True}]
    return [torch.optim.Muon([one for one in every if one.dim() == 2]), torch.optim.Adam(groups)]


@pytest.mark.parametrize("estimate", [False, True])
@pytest.mark.parametrize("instances", [False, True])
def test_optimizers_that_share_the_parameters_out_are_stepped_together(
    estimate: bool, instances: bool
) -> None:
    """The state of each parameter is that which its own optimizer's real step leaves."""
    model = chain()
    parameters = list(model.parameters())
    given = shared_out(parameters) if instances else shared_out
    found = profiled(model, given, estimate=estimate)
    real = shared_out(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    for optimizer in real:
        optimizer.step()
    expected = [sum(state_of(optimizer, layer) for optimizer in real) for layer in model]
    assert [layer.optimizer_bytes for layer in found.layers] == expected
    assert None not in [layer.optimizer_peak_bytes for layer in found.layers]
    assert found.step.optimizer_time is not None
    assert not any("optimizer" in flag for flag in found.provenance["flags"])


def test_a_list_of_one_optimizer_is_that_optimizer() -> None:
    """Also where an optimizer of something else, such as a loss, is beside it."""
    model = chain()
    other = torch.optim.Adam([torch.ones(3)])
    adam = torch.optim.Adam(model.parameters())
    sizes = [
        [layer.optimizer_bytes for layer in profiled(model, given, estimate=True).layers]
        for given in (adam, [adam], [other, adam], lambda p: [torch.optim.Adam(p)])
    ]
    assert sizes == [sizes[0]] * 4 and any(sizes[0])


def test_a_meter_counts_the_state_of_several_optimizers() -> None:
    """They are given as a list, or as what steps them all."""
    pipe = gb.GPipe(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), [1, 1])
    pipe(torch.ones(2, 8)).sum().backward()
    several = shared_out(pipe.parameters())
    for one in several:
        one.step()
    peaks = []
    for given in (several, Optimizers(several), several[:1]):
        pipe.zero_grad()
        with gb.pipeline.measure_memory(pipe, given) as meter:
            pipe(torch.ones(2, 8)).sum().backward()
        peaks.append(meter.peak_bytes)
    assert peaks[0] == peaks[1]
    assert all(more > less for more, less in zip(peaks[0], peaks[2], strict=True))


def test_a_meter_counts_the_state_of_an_optimizer_that_is_wrapped() -> None:
    """With the partition that has the parameter, as for the inner one by itself."""
    pipe = gb.GPipe(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), [1, 1])
    inner = torch.optim.Adam(pipe.parameters())
    pipe(torch.ones(2, 8)).sum().backward()
    inner.step()
    peaks = []
    for optimizer in (inner, Wrapped(inner)):
        pipe.zero_grad()
        with gb.pipeline.measure_memory(pipe, optimizer) as meter:
            pipe(torch.ones(2, 8)).sum().backward()
        peaks.append(meter.peak_bytes)
    assert peaks[0] == peaks[1]
    pipe.zero_grad()
    with gb.pipeline.measure_memory(pipe) as meter:
        pipe(torch.ones(2, 8)).sum().backward()
    assert all(more > less for more, less in zip(peaks[0], meter.peak_bytes, strict=True))
