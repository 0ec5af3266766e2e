"""torchgpipe's interface: skip connections with a wrapped layer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from compat_chains import inputs
from torch import Tensor, nn

from gpipebal.compat.torchgpipe import GPipe
from gpipebal.compat.torchgpipe.skip import Namespace, pop, skippable, stash, verify_skippables
from gpipebal.schedule import CHECKPOINT_MODES


@skippable(stash=["image"])
class Keep(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Any:
        yield stash("image", self.linear(x))
        return torch.tanh(x)


@skippable(pop=["image"])
class Join(nn.Module):
    def forward(self, x: Tensor) -> Any:
        image = yield pop("image")
        return x * image


def hourglass() -> nn.Sequential:
    """A chain with two skips of one name, one around the other."""
    outer, inner = Namespace(), Namespace()
    return nn.Sequential(
        Keep(3).isolate(outer),  # type: ignore[operator]
        Keep(3).isolate(inner),  # type: ignore[operator]
        nn.Linear(3, 3),
        Join().isolate(inner),  # type: ignore[operator]
        Join().isolate(outer, only=["image"]),  # type: ignore[operator]
    ).double()


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("balance", [[5], [1, 4], [2, 3], [1, 1, 1, 2]])
def test_wrapped_layers_are_routed_in_a_pipeline(balance: list[int], checkpoint: str) -> None:
    """Outputs and gradients are the plain model's wherever the chain is cut."""
    model = hourglass()
    plain = copy.deepcopy(model)
    pipe = GPipe(model, balance, chunks=2, checkpoint=checkpoint)
    mine, theirs = (x := inputs(4)).clone().requires_grad_(), x.clone().requires_grad_()
    output, expected = pipe(mine), torch.cat([plain(part) for part in theirs.split(2)])
    torch.testing.assert_close(output, expected)
    output.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad)
    for ours, other in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, other.grad)


def test_the_wrapped_layer_is_a_module_of_its_wrapper() -> None:
    """Keys gain `.module.`, the repr says what is wrapped, and the class keeps its name."""
    keep = Keep(2)
    assert Keep.__name__ == "Keep" and type(keep.module).__name__ == "Keep"
    assert list(keep.state_dict()) == ["module.linear.weight", "module.linear.bias"]
    assert repr(Join()) == "@skippable(Join())"
    pipe = GPipe(hourglass(), [1, 4])
    assert next(iter(pipe.state_dict())) == "partitions.0.0.module.linear.weight"
    twin = copy.deepcopy(keep)
    assert type(twin) is Keep and twin.module.linear is not keep.module.linear


def test_stash_takes_its_tensor_by_name() -> None:
    """`stash(name=..., tensor=...)` is torchgpipe's, also for None."""

    @skippable(stash=["image"], pop=[])
    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> Any:
            yield stash(name="image", tensor=None)
            return x

    @skippable(pop=["image"])
    class Take(nn.Module):
        def forward(self, x: Tensor) -> Any:
            image = yield pop(name="image")
            return x if image is None else -x

    x = inputs()
    torch.testing.assert_close(GPipe(nn.Sequential(Nothing(), Take()), [1, 1])(x), x)


def test_forwards_that_break_their_word_are_runtime_errors() -> None:
    """Not doing what is declared, and doing what is not, are RuntimeErrors."""
    idle = skippable(stash=["image"])(nn.Identity)()
    with pytest.raises(RuntimeError, match="not stashed"):
        idle(inputs())

    @skippable()
    class Undeclared(nn.Module):
        def forward(self, x: Tensor) -> Any:
            yield stash("image", x)

    with pytest.raises(RuntimeError, match="cannot stash"):
        Undeclared()(inputs())
    with pytest.raises(RuntimeError, match="has not been stashed"):
        Join().isolate(Namespace())(inputs())  # type: ignore[operator]


def test_decorated_things_must_be_modules() -> None:
    """What is not a class of modules is refused."""
    with pytest.raises(TypeError, match="only classes of"):
        skippable()(int)  # type: ignore[arg-type]


PROBLEMS = {
    "no module declared 'image' as poppable but stashed": lambda: [Keep(1)],
    "'0' declared 'image' as poppable but it was not stashed": lambda: [Join()],
    "'1' redeclared 'image' as stashable": lambda: [Keep(1), Keep(1), Join()],
    "'2' redeclared 'image' as poppable": lambda: [Keep(1), Join(), Join()],
    "'0' declared 'a' both as stashable and as poppable": lambda: [
        skippable(stash=["a"], pop=["a"])(nn.Identity)()
    ],
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_pairs_that_do_not_match_are_named_in_torchgpipes_words(problem: str) -> None:
    """`verify_skippables` says what torchgpipe's does, and a pipeline refuses the chain too."""
    model = nn.Sequential(*PROBLEMS[problem]())
    with pytest.raises(TypeError, match="do not match") as caught:
        verify_skippables(model)
    assert f"* {problem}\n" in str(caught.value)
    with pytest.raises(TypeError, match="skips do not pair up"):
        GPipe(model, [len(model)])
    verify_skippables(hourglass())


def test_pairs_inside_layers_are_verified_too() -> None:
    """Skippable modules below a layer count, which torchgpipe did not see."""
    with pytest.raises(TypeError, match="which no layer pops") as caught:
        verify_skippables(nn.Sequential(nn.Sequential(Keep(1))))
    assert "do not match" not in str(caught.value)
    with pytest.raises(TypeError, match=r"must be nn\.Sequential"):
        verify_skippables(nn.Linear(1, 1))  # type: ignore[arg-type]
