"""Skippable layers without a pipeline: values, gradients, errors, the class and its copies."""

from __future__ import annotations

import abc
import copy
import inspect
import pickle
import traceback
from typing import Any

import pytest
import torch
from skip_layers import (
    Hourglass,
    Identity,
    Keep,
    KeepA,
    KeepRemade,
    does,
    give,
    hourglass,
    keep,
    layer,
    run,
)
from torch import Tensor, nn

from gpipebal.errors import GpipebalError
from gpipebal.skip import Namespace, pop, skippable, stash, verify_skippables
from gpipebal.skip.skippable import Skippable
from gpipebal.skip.tracker import Skips, current, using

# --- Values and gradients


def test_skips_equal_passing_by_hand() -> None:
    """Outputs and gradients are those of the model that passes its images on by hand."""
    model = hourglass()
    verify_skippables(model)
    reference = Hourglass(copy.deepcopy(model))
    x = torch.randn(4, 3, dtype=torch.float64)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    output, expected = model(mine), reference(theirs)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-14)
    output.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-14)
    for ours, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, other.grad, rtol=1e-12, atol=1e-14)
    assert current().take_all() == {}


VALUES = [None, 7, "word", (torch.ones(2), (None, torch.zeros(1, dtype=torch.int64))), [1]]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_any_value_travels(value: Any) -> None:
    """A value is popped as the object that was stashed, whatever it is."""
    assert nn.Sequential(keep("a", lambda x: value), nn.ReLU(), give("a"))(torch.ones(1)) is value


def test_a_stashed_tensor_may_go_unused_or_detached() -> None:
    """Gradients are right where the popped tensor is not used, or used without its graph."""
    for use in (lambda x, value: x * 2, lambda x, value: x * value.detach()):
        x = torch.full((2,), 2.0, dtype=torch.float64, requires_grad=True)
        nn.Sequential(keep("a"), give("a", use))(x).sum().backward()
        assert x.grad.tolist() == [2.0, 2.0]


def test_forward_takes_keywords_and_hooks_run() -> None:
    """Arguments reach the forward, and hooks see the output and not the generator."""
    model, seen = Keep(), []
    model.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model.register_forward_hook(lambda module, args, output: seen.append(output))
    x = torch.ones(2, 3)
    output = model(x, scale=3.0)
    torch.testing.assert_close(output, torch.tanh(model.linear(x + 1) * 3.0))
    assert seen[0] is output


def test_a_layer_that_declares_nothing_needs_no_yield() -> None:
    """A plain forward is allowed, and so is a generator without a result."""
    assert layer(lambda x: x + 1)(1) == 2

    def forward(x: Any) -> Any:
        yield stash("a", x)

    assert layer(forward, stash=["a"])(1) is None


def test_a_decorator_for_generators_may_stand_between() -> None:
    """torch.no_grad on the forward of a skippable layer works as on any generator."""

    @torch.no_grad()
    def forward(x: Tensor) -> Any:
        yield stash("a", x * 2)
        return x * 3

    model = nn.Sequential(layer(forward, stash=["a"]), give("a"))
    assert not model(torch.ones(1, requires_grad=True)).requires_grad


# --- Errors


ERRORS = {
    "not stashed": (run(does(), stash=["a", "b"]), RuntimeError, r"not stashed=\['a', 'b'\]"),
    "not popped": (run(lambda x: x, pop=["a"]), RuntimeError, r"not popped=\['a'\]"),
    "undeclared stash": (
        run(does(stash("b", 1)), stash=["a"]),
        RuntimeError,
        r"cannot stash a skip that it does not declare: name='b' \(expected one of \['a'\]\)",
    ),
    "undeclared pop": (run(does(pop("b"))), RuntimeError, "cannot pop a skip that it does not"),
    "stashed instead": (run(does(stash("a", 1)), pop=["a"]), RuntimeError, "not declare"),
    "nothing to pop": (run(does(pop("a")), pop=["a"]), RuntimeError, "'a' has not been stashed"),
    "twice": (
        run(does(stash("a", 1), stash("a", 1)), stash=["a"]),
        RuntimeError,
        "cannot stash a skip twice: name='a'",
    ),
    "odd request": (run(does("a"), stash=["a"]), TypeError, "is not a skip: type=str"),
    "odd name": (lambda: pop(1), TypeError, "name=1"),
    "odd name stashed": (lambda: stash(None, 1), TypeError, "name=None"),
    "no list": (lambda: skippable(stash="image"), TypeError, "stash='image'"),
    "no strings": (lambda: skippable(pop=[1]), TypeError, r"pop=\[1\]"),
    "no parentheses": (lambda: skippable(Identity), TypeError, "list of strings: stash=<class"),
    "no class": (lambda: skippable()(Identity()), TypeError, "only classes of layers"),
    "no module": (lambda: skippable()(dict), TypeError, "only classes of layers"),
    "unknown only": (
        lambda: Keep().isolate(Namespace(), only=["image", "i"]),
        TypeError,
        r"only=\['i'\] \(expected some of \['image'\]\)",
    ),
    "only is not a list": (
        lambda: Keep().isolate(Namespace(), only="image"),
        TypeError,
        "only='image",
    ),
    "no namespace": (lambda: Keep().isolate("ns"), TypeError, r"type\(ns\)=str"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_are_clear(case: str) -> None:
    """Each misuse is a GpipebalError of the builtin kind that users expect, with a fix."""
    call, kind, message = ERRORS[case]
    with pytest.raises(kind, match=message) as caught:
        call()
    assert isinstance(caught.value, GpipebalError)
    assert "\nFix: " in str(caught.value)


def test_popping_twice_is_a_clear_error() -> None:
    """A second pop of one name says so, and what to do."""
    model = nn.Sequential(keep("a"), layer(does(pop("a"), pop("a")), pop=["a"]))
    with pytest.raises(RuntimeError, match="cannot pop a skip twice: name='a'"):
        model(1)


def test_the_suggested_fix_works() -> None:
    """Declaring what the error says makes the layer run."""
    with pytest.raises(RuntimeError, match=r"@skippable\(stash=\['a', 'b'\]\)"):
        run(does(stash("a", 1), stash("b", 1)), stash=["b"])()
    assert run(does(stash("a", 1), stash("b", 1)), stash=["a", "b"])() == 1


def test_an_error_shows_the_line_that_asked_and_lets_the_layer_clean_up() -> None:
    """The error passes through the forward: its finally runs, its line is in the traceback."""
    ended = []

    def forward(x: Any) -> Any:
        try:
            yield pop("missing")
        finally:
            ended.append(True)

    with pytest.raises(RuntimeError) as caught:
        run(forward, pop=["missing"])()
    assert ended == [True]
    lines = [frame.line for frame in traceback.extract_tb(caught.tb)]
    assert 'yield pop("missing")' in lines


def test_a_layer_may_answer_an_error() -> None:
    """A forward that catches the error of a pop goes on; it still must pop what it declares."""

    def forward(x: Any) -> Any:
        try:
            yield pop("a")
        except RuntimeError:
            yield stash("b", x)
        return x

    with pytest.raises(RuntimeError, match=r"not popped=\['a'\]"):
        run(forward, stash=["b"], pop=["a"])()
    assert current().load((None, "b")) == 1


@pytest.mark.parametrize("error", [KeyError("k"), StopIteration(), KeyboardInterrupt()])
def test_errors_of_a_layer_keep_their_type(error: BaseException) -> None:
    """What a forward raises comes out as it was (a StopIteration as Python makes it of one)."""

    def forward(x: Any) -> Any:
        yield stash("a", x)
        raise error

    kind = RuntimeError if isinstance(error, StopIteration) else type(error)
    with pytest.raises(kind) as caught:
        run(forward, stash=["a"])()
    assert error in (caught.value, caught.value.__cause__)


def test_an_interrupt_between_two_steps_closes_the_forward() -> None:
    """If saving a value is interrupted, the forward is ended there, and not some time later."""
    ended = []

    class Interrupted(Skips):
        def save(self, key: Any, value: Any) -> None:
            raise KeyboardInterrupt

    def forward(x: Any) -> Any:
        try:
            yield stash("a", x)
        finally:
            ended.append(True)

    with using(Interrupted()), pytest.raises(KeyboardInterrupt) as caught:
        run(forward, stash=["a"])()
    # The traceback still holds the forward, so it was not the end of its last reference.
    assert caught.tb is not None and ended == [True]


# --- The class


def test_the_decorated_class_is_a_subclass_of_the_same_name() -> None:
    """Names, docstring, signature, isinstance and state-dict keys are the plain class's."""
    assert (Keep.__name__, Keep.__qualname__, Keep.__module__) == ("Keep", "Keep", "skip_layers")
    assert Keep.__doc__ == "Keep an image for later."
    assert list(inspect.signature(Keep.forward).parameters) == ["self", "x", "scale"]
    assert list(Keep().state_dict()) == ["linear.weight", "linear.bias"]
    assert repr(Keep()).startswith("Keep(")
    assert issubclass(KeepA, Identity) and isinstance(KeepA(), Identity)
    assert isinstance(Keep(), Skippable) and isinstance(KeepA(), Skippable)
    assert not isinstance(Identity(), Skippable)
    assert not isinstance(nn.Sequential(Keep()), Skippable)


def test_stashes_and_pops_are_the_declared_names() -> None:
    """They are keys of namespace and name; isolate moves all names, or only some."""
    model = skippable(stash=["a", "b"], pop=["c"])(Identity)()
    assert model.stashes() == {(None, "a"), (None, "b")}
    assert model.pops() == {(None, "c")}
    first, second = Namespace(), Namespace()
    assert model.isolate(first) is model
    assert (model.stashes(), model.pops()) == ({(first, "a"), (first, "b")}, {(first, "c")})
    model.isolate(second, only=["c"]).isolate(None, only=iter(["b"]))
    assert (model.stashes(), model.pops()) == ({(first, "a"), (None, "b")}, {(second, "c")})
    assert skippable(stash=["a"])(Identity)().stashes() == {(None, "a")}


def test_isolating_a_copy_leaves_the_original_alone() -> None:
    """Shallow and deep copies have namespaces of their own."""
    ns = Namespace()
    model = Keep().isolate(ns)
    for copied in (copy.copy(model), copy.deepcopy(model)):
        assert copied.stashes() == {(ns, "image")}
        copied.isolate(Namespace())
        assert model.stashes() == {(ns, "image")}


def test_one_class_decorated_twice_gives_two_classes() -> None:
    """Other names give an independent class; the same names give the same one."""
    other = skippable(pop=["a"])(Identity)
    assert other is not KeepA and not issubclass(other, KeepA)
    assert nn.Sequential(KeepA(), nn.ReLU(), other())(torch.tensor(2.0)) == 4.0
    assert skippable(stash=("a", "a"))(Identity) is KeepA


def test_names_of_two_decorators_add_up() -> None:
    """One above the other they are about one forward, whatever their order."""

    class Both(nn.Module):
        def forward(self, x: Tensor) -> Any:
            yield stash("b", x * 2)
            return x + (yield pop("a"))

    stacked = skippable(stash=["b"])(skippable(pop=["a"])(Both))
    assert stacked is skippable(pop=["a"], stash=["b"])(Both)
    assert stacked is skippable(pop=["a"])(skippable(stash=["b"])(Both))
    model = nn.Sequential(KeepA(), nn.ReLU(), stacked(), give("b", torch.add))
    assert model(torch.tensor(2.0)) == 8.0


def test_a_subclass_adds_its_names() -> None:
    """A subclass inherits the names and the forward; decorated, it has both classes' names."""

    class Louder(Keep):  # type: ignore[valid-type, misc]
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    @skippable(stash=["shape"])
    class Wider(Louder):
        def forward(self, x: Tensor) -> Any:
            yield stash("shape", x.shape)
            return super().forward(x)

    assert Louder().stashes() == {(None, "image")}
    model, x = Wider(), torch.ones(2, 3)
    assert model.stashes() == {(None, "image"), (None, "shape")}
    torch.testing.assert_close(model(x), torch.tanh(model.linear(x)) * 2)
    assert current().take_all().keys() == model.stashes()


def test_a_class_with_a_metaclass_can_be_skippable() -> None:
    """An abstract base class of layers works like any other."""

    class Abstract(nn.Module, abc.ABC):
        @abc.abstractmethod
        def value(self) -> int: ...

        def forward(self, x: Any) -> Any:
            yield stash("a", self.value())
            return x

    kind = skippable(stash=["a"])(Abstract)
    with pytest.raises(TypeError, match="abstract"):
        kind()
    concrete = type("Concrete", (kind,), {"value": lambda self: 5})
    assert nn.Sequential(concrete(), give("a"))(1) == 5


@pytest.mark.parametrize("kind", [Keep, KeepA, nn.Sequential])
def test_pickles_and_deep_copies_work(kind: type[nn.Module]) -> None:
    """A copied model has the same classes and keys, and pairs as the original does."""
    ns = Namespace()
    model = (
        hourglass()
        if kind is nn.Sequential
        else nn.Sequential(kind().isolate(ns), nn.Linear(3, 3).requires_grad_(False))
    )
    model.train(False)[0].register_buffer("state", torch.ones(1))
    x = torch.ones(1, 3, dtype=next(model.parameters()).dtype)
    twins = [pickle.loads(pickle.dumps(model, protocol)) for protocol in (2, 5)]
    for twin in (*twins, copy.deepcopy(model), copy.copy(model)):
        assert [type(module) for module in twin.modules()] == [type(m) for m in model.modules()]
        assert list(twin.state_dict()) == list(model.state_dict())
        assert not twin.training and twin[0].stashes() == model[0].stashes()
        torch.testing.assert_close(twin(x), model(x))
        current().take_all()


def test_a_class_may_have_its_own_way_to_be_copied() -> None:
    """A __reduce__ of the class itself is respected."""
    model = KeepRemade()
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert type(twin) is KeepRemade and twin.remade


def test_a_local_class_can_be_copied_and_says_why_it_cannot_be_pickled() -> None:
    """Deepcopy needs no name; pickle names the class that it cannot find."""
    model = keep("a")
    assert type(copy.deepcopy(model)) is type(model)
    with pytest.raises((pickle.PicklingError, AttributeError), match="Layer"):
        pickle.dumps(model)
