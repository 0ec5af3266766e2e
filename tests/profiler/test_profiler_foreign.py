"""What layers use that no name leads to is after a profile as before, and is told of."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import gpipebal as gb
from gpipebal.errors import ProfileError
from gpipebal.profiler.replicas.foreign import Watch, foreign_kept, has_foreign

pytestmark = pytest.mark.timeout(60)
MEASURE: dict[str, Any] = {"timeout": 0, "as_pipeline": False, "rows": (), "progress": False}
ESTIMATE: dict[str, Any] = {"method": "estimate", "rows": (), "progress": False}


def outside() -> nn.Sequential:
    """Return a module that layers of a model use, and that it does not have."""
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))


def among_many(value: object) -> dict[Any, Any]:
    """Return a dictionary that is too large to be searched, with a value in it."""
    return {**{n: None for n in range(2000)}, "a": value}


OUTSIDE = outside()


class Holder:
    module = OUTSIDE

    @classmethod
    def get(cls) -> nn.Module:
        return cls.module


class Slotted:
    __slots__ = ("module",)

    def __init__(self, module: nn.Module) -> None:
        self.module = module


@dataclasses.dataclass
class Record:
    module: nn.Module


class Descriptor:
    def __get__(self, owner: object, kind: type) -> nn.Module:
        return globals()["OUTSIDE"]


def helper(x: Tensor) -> Tensor:
    """Call a module that is its attribute."""
    return helper.module(x)


helper.module = OUTSIDE
RECORD, SLOTTED = Record(OUTSIDE), Slotted(OUTSIDE)
QUEUE = collections.deque([OUTSIDE])
USERS = collections.UserDict({"a": OUTSIDE})
CHAINED = collections.ChainMap({"a": OUTSIDE})
MANY = among_many(OUTSIDE)
REFERENCE, WEAKLY = weakref.ref(OUTSIDE), weakref.WeakValueDictionary({"a": OUTSIDE})
VARIABLE: contextvars.ContextVar[Any] = contextvars.ContextVar("VARIABLE", default=OUTSIDE)


@functools.lru_cache
def remembered() -> nn.Module:
    """Return what is found nowhere else."""
    return globals()["OUTSIDE"]


class Layer(nn.Module):
    described = Descriptor()

    def __init__(self, find: Callable[[Layer], Callable[[Tensor], Tensor]] | None = None) -> None:
        super().__init__()
        self.own = nn.Linear(8, 8)
        self.find = find

    @functools.cached_property
    def kept(self) -> nn.Module:
        return globals()["OUT" + "SIDE"]

    def inner(self, x: Tensor) -> Tensor:
        return globals()["OUTSIDE"](x)

    def __getattr__(self, name: str) -> Any:
        return globals()["OUTSIDE"] if name == "elsewhere" else super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        x = self.own(x)
        return x if self.find is None else self.find(self)(x)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return OUTSIDE(self.own(x))


class Inherits(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Called(Base):
    def __call__(self, x: Tensor) -> Tensor:
        return OUTSIDE(self.own(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x)


class Tables(nn.Module):
    ways: ClassVar[dict[str, Any]] = {"usual": Layer.inner}

    def forward(self, x: Tensor) -> Tensor:
        return self.ways["usual"](self, x)


def local_class() -> Callable[[Layer], Any]:
    """Return what finds the module in a class of a closure."""

    class Local:
        module = OUTSIDE

    return lambda layer: Local.module


def local_iterator() -> Callable[[Layer], Any]:
    """Return what finds the module by an iterator of a closure."""
    endless: Iterator[Any] = itertools.cycle([OUTSIDE])
    return lambda layer: next(endless)


FOUND: dict[str, Callable[[], nn.Module]] = {
    "super": Inherits,
    "call": Called,
    "table in the class": Tables,
    "cached property": lambda: Layer(lambda layer: layer.kept),
    "getattr": lambda: Layer(lambda layer: getattr(layer, "in" + "ner")),
    "__getattr__": lambda: Layer(lambda layer: layer.elsewhere),
    "descriptor": lambda: Layer(lambda layer: layer.described),
    "class method": lambda: Layer(lambda layer: Holder.get()),
    "dataclass": lambda: Layer(lambda layer: RECORD.module),
    "slots": lambda: Layer(lambda layer: SLOTTED.module),
    "deque": lambda: Layer(lambda layer: QUEUE[0]),
    "UserDict": lambda: Layer(lambda layer: USERS["a"]),
    "ChainMap": lambda: Layer(lambda layer: CHAINED["a"]),
    "many entries": lambda: Layer(lambda layer: MANY["a"]),
    "of a function": lambda: Layer(lambda layer: helper),
    "globals": lambda: Layer(lambda layer: globals()["OUTSIDE"]),
    "weak reference": lambda: Layer(lambda layer: REFERENCE()),
    "weak values": lambda: Layer(lambda layer: WEAKLY["a"]),
    "context variable": lambda: Layer(lambda layer: VARIABLE.get()),
    "remembered": lambda: Layer(lambda layer: remembered()),
    "class of a closure": lambda: Layer(local_class()),
    "iterator of a closure": lambda: Layer(local_iterator()),
}


@pytest.mark.parametrize("way", FOUND)
def test_a_module_that_no_name_leads_to_is_left_alone(way: str) -> None:
    """Gradients are the same tensors with the same values, statistics have the same bits."""
    remembered()
    torch.manual_seed(0)
    OUTSIDE[0].weight.grad = gradient = torch.randn(8, 8)
    values = gradient.clone()
    before = {name: value.clone() for name, value in OUTSIDE.state_dict().items()}
    layer = FOUND[way]()
    model = nn.Sequential(nn.Linear(8, 8), layer, nn.Linear(8, 8))
    try:
        found = gb.profile_model(model, torch.randn(8, 8), **MEASURE)
        assert OUTSIDE[0].weight.grad is gradient and torch.equal(gradient, values)
        assert OUTSIDE[0].bias.grad is None and OUTSIDE[1].weight.grad is None
        for name, value in OUTSIDE.state_dict().items():
            assert torch.equal(value, before[name]), name
        assert any("'1': uses parameters" in flag for flag in found.provenance["flags"])
    finally:
        OUTSIDE.zero_grad()


@pytest.mark.parametrize("more", [{"one_at_a_time": True}, {"share_identical": True}, {}])
def test_however_it_is_measured(more: dict[str, Any]) -> None:
    """Layers one at a time, or all of them side by side with a trial."""
    before = OUTSIDE[1].running_mean.clone()
    model = nn.Sequential(nn.Linear(8, 8), Layer(lambda layer: QUEUE[0]), nn.Linear(8, 8))
    found = gb.profile_model(model, torch.randn(8, 8), chunks=2, timeout=0, progress=False, **more)
    assert OUTSIDE[0].weight.grad is None and torch.equal(OUTSIDE[1].running_mean, before)
    assert [flag for flag in found.provenance["flags"] if "'1': uses parameters" in flag]


def test_a_loss_that_no_name_leads_from() -> None:
    """It may need the whole mini-batch, too."""
    before = OUTSIDE[1].running_mean.clone()

    def loss(output: Tensor) -> Tensor:
        if len(output) < 8:
            raise ValueError("all rows are needed")
        return globals()["OUTSIDE"](output).sum()

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    gb.profile_model(model, torch.randn(8, 8), chunks=2, loss_fn=loss, **MEASURE)
    assert OUTSIDE[0].weight.grad is None and torch.equal(OUTSIDE[1].running_mean, before)


def test_a_layer_that_fails_leaves_nothing_behind() -> None:
    """Nor does one before it."""
    before = OUTSIDE[1].running_mean.clone()
    OUTSIDE[0].weight.grad = gradient = torch.ones(8, 8)
    values = gradient.clone()

    def fails(x: Tensor) -> Tensor:
        raise ValueError("in the middle")

    model = nn.Sequential(Layer(lambda layer: QUEUE[0]), Layer(lambda layer: fails))
    try:
        with pytest.raises(ProfileError, match="in the middle"):
            gb.profile_model(model, torch.randn(8, 8), **MEASURE)
        assert OUTSIDE[0].weight.grad is gradient and torch.equal(gradient, values)
        assert torch.equal(OUTSIDE[1].running_mean, before)
    finally:
        OUTSIDE.zero_grad()


def test_a_gradient_in_the_backward_of_a_function_of_the_layers() -> None:
    """The class of the function leads to what its backward uses."""
    inner = nn.Linear(8, 8)

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            with torch.enable_grad():
                inner(torch.ones(1, 8)).sum().backward()
            return gradient

    def applied(x: Tensor) -> Tensor:
        result: Tensor = Own.apply(x)
        return result

    class Applies(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return applied(x)

    model = nn.Sequential(nn.Linear(8, 8), Applies())
    for way in (MEASURE, ESTIMATE):
        gb.profile_model(model, torch.randn(8, 8), **way)
        assert inner.weight.grad is None


def test_a_meta_weight_keeps_its_gradient() -> None:
    """An estimate adds none to it."""
    with torch.device("meta"):
        inner, model = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), Layer())
    kept = among_many(inner)
    model[1].find = lambda layer: kept["a"]
    gb.profile_model(model, torch.empty(8, 8, device="meta"), **ESTIMATE)
    assert inner.weight.grad is None


class Zeros(nn.Module):
    """Writes the other zero to a buffer of another module."""

    def __init__(self, buffer: Callable[[], Tensor], through_data: bool) -> None:
        super().__init__()
        self.buffer, self.through_data = buffer, through_data

    def forward(self, x: Tensor) -> Tensor:
        found = self.buffer()
        (found.data if self.through_data else found).abs_()
        return x + found.detach().clone()


@pytest.mark.parametrize("through_data", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_buffers_have_the_same_bits(through_data: bool, named: bool) -> None:
    """The two zeros are equal numbers."""
    inner = nn.BatchNorm1d(8)
    assert inner.running_mean is not None
    inner.running_mean.fill_(-0.0)
    many = among_many(inner.running_mean)
    layer = Zeros((lambda: inner.running_mean) if named else (lambda: many["a"]), through_data)
    model = nn.Sequential(nn.Linear(8, 8), layer, nn.Linear(8, 8))
    gb.profile_model(model, torch.randn(8, 8), **MEASURE)
    assert torch.signbit(inner.running_mean).all()


def test_memory_is_put_back_whole() -> None:
    """A view may be written to, and a storage may have grown."""
    many = among_many(torch.arange(8.0))
    many["b"] = torch.arange(3.0)

    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            many["a"][2:3].fill_(7)
            many["a"][5:].unsqueeze(0).mul_(2)
            many["b"].resize_(100).fill_(1)
            return x * 1

    address = many["a"].data_ptr()
    gb.profile_model(nn.Sequential(nn.Linear(8, 8), Writes()), torch.randn(8, 8), **MEASURE)
    assert torch.equal(many["a"], torch.arange(8.0)) and many["a"].data_ptr() == address
    assert many["b"].shape == (3,) and torch.equal(many["b"], torch.arange(3.0))


def test_what_a_layer_makes_or_is_given_is_its_own() -> None:
    """Its parameters, its input, and tensors that it makes."""
    layer = nn.Linear(4, 4)
    given = torch.ones(2, 4, requires_grad=True)
    layer.weight.grad = torch.ones(4, 4)
    with foreign_kept():
        with Watch("one", layer, [given]) as watch:
            made = torch.ones(4, requires_grad=True)
            watch.take_behind([layer(given) * made])
        assert not has_foreign("one", nn.Linear(4, 4))
        assert layer.weight.grad is not None
        with Watch("two", nn.Linear(1, 1), []) as watch:
            watch.take_behind([layer(given)])
        assert has_foreign("two", nn.Linear(4, 4)) and layer.weight.grad is None
    assert torch.equal(layer.weight.grad, torch.ones(4, 4))


def test_a_view_of_a_parameter_is_no_parameter_of_others() -> None:
    """Spectral normalisation takes views of its weight without a graph."""
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
    model = nn.Sequential(nn.Linear(8, 8), layer)
    found = gb.profile_model(model, torch.randn(8, 8), **MEASURE)
    assert not [flag for flag in found.provenance["flags"] if "does not register" in flag]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("how", ["vmap", "jvp", "functional", "checkpoint", "as it is"])
def test_what_torch_does_with_a_weight_of_others(how: str) -> None:
    """Transforms, a checkpoint that hides the graph, and a weight that is the output."""
    inner, queue = nn.Linear(8, 8), among_many(None)
    queue["a"] = inner
    ways: dict[str, Callable[[Tensor], Any]] = {
        "vmap": lambda x: torch.vmap(queue["a"])(x),
        "jvp": lambda x: torch.func.jvp(queue["a"], (x,), (x,))[1],
        "functional": lambda x: torch.func.functional_call(
            queue["a"], dict(queue["a"].named_parameters()), (x,)
        ),
        "checkpoint": lambda x: torch.utils.checkpoint.checkpoint(
            queue["a"], x, use_reentrant=True
        ),
        "as it is": lambda x: queue["a"].weight,
    }

    class Uses(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = ways[how](x)
            return result

    model = nn.Sequential(nn.Linear(8, 8), Uses())
    # Side by side, threads would share torch's one level of forward mode.
    found = gb.profile_model(model, torch.randn(8, 8), partitions=1, **MEASURE)
    assert inner.weight.grad is None
    assert [flag for flag in found.provenance["flags"] if "does not register" in flag]


def test_a_loss_that_writes_to_its_own_parameters() -> None:
    """Its copy shares their memory, which is put back."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 8, max_norm=0.1)

        def forward(self, output: Tensor) -> Tensor:
            return (self.table(torch.arange(len(output))) * output).mean()

    loss = Loss()
    before = loss.table.weight.detach().clone()
    gb.profile_model(nn.Sequential(nn.Linear(8, 8)), torch.randn(8, 8), loss_fn=loss, **MEASURE)
    assert torch.equal(loss.table.weight, before)


@pytest.mark.parametrize("named", [False, True])
def test_an_optimizer_in_the_backward_of_a_weight_of_others(named: bool) -> None:
    """It takes no step, another hook does not run either, and both are there afterwards."""
    inner = nn.Linear(8, 8)
    stepper = torch.optim.SGD([inner.weight], lr=1.0, momentum=0.9)
    many, steps = among_many(inner), []
    gradients: list[Tensor] = []

    def step(weight: Tensor) -> None:
        steps.append(weight.grad)
        stepper.step()

    inner.weight.register_post_accumulate_grad_hook(step)
    inner.weight.register_hook(gradients.append)
    before = inner.weight.detach().clone()
    layer = Layer((lambda layer: inner) if named else (lambda layer: many["a"]))
    model = nn.Sequential(nn.Linear(8, 8), layer)
    gb.profile_model(model, torch.randn(8, 8), **MEASURE)
    assert not steps and not gradients
    assert not stepper.state and torch.equal(inner.weight, before)
    model(torch.randn(8, 8)).sum().backward()
    assert len(steps) == len(gradients) == 1 and not torch.equal(inner.weight, before)
