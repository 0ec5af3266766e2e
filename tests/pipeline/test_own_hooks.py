"""What a model has beside its layers, and wrong calls of a pipeline: nothing is lost in silence."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipebal.compat.torchgpipe
from gpipebal.errors import ModelError, PipelineError
from gpipebal.pipeline import GPipe, with_recompute


def chain() -> nn.Sequential:
    """Three layers, the first of which takes a keyword."""
    return nn.Sequential(Scale(), nn.Linear(4, 4), nn.Tanh())


class Scale(nn.Module):
    """Multiply by a factor, or add the two halves of a pair."""

    def forward(self, value: Any, factor: Tensor | None = None) -> Tensor:
        x: Tensor = value if isinstance(value, Tensor) else value[0] + value[1]
        return x if factor is None else x * factor


REGISTER: dict[str, Callable[[nn.Module], Any]] = {
    "forward hooks": lambda m: m.register_forward_hook(lambda *_: None),
    "forward hooks (before)": lambda m: m.register_forward_pre_hook(lambda *_: None),
    "backward hooks": lambda m: m.register_full_backward_hook(lambda *_: None),
    "backward hooks (before)": lambda m: m.register_full_backward_pre_hook(lambda *_: None),
    "state-dict hooks": lambda m: m.register_state_dict_post_hook(lambda *_: None),
    "state-dict hooks (before)": lambda m: m.register_state_dict_pre_hook(lambda *_: None),
    "state-dict hooks (loading)": lambda m: m.register_load_state_dict_pre_hook(lambda *_: None),
    "state-dict hooks (loaded)": lambda m: m.register_load_state_dict_post_hook(lambda *_: None),
}


@pytest.mark.parametrize("kind", REGISTER)
@pytest.mark.parametrize("make", [GPipe, gpipebal.compat.torchgpipe.GPipe])
def test_hooks_of_the_model_itself_are_warned_of(make: Any, kind: str) -> None:
    """The pipeline runs the layers: hooks of what they stand in would never be called."""
    model = chain()
    handle = REGISTER[kind](model)
    with pytest.warns(UserWarning, match=f"has {kind.partition(' (')[0]} of its own"):
        make(model, [1, 2])
    with pytest.warns(UserWarning, match="of its own"):
        make(with_recompute(model, [[1]]), [1, 2])
    if handle is not None:
        handle.remove()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            make(model, [1, 2])


def test_parameters_and_buffers_of_the_model_itself_are_warned_of() -> None:
    """They are in its state dict, and not in the pipeline's."""
    model = chain()
    model.scale = nn.Parameter(torch.ones(()))
    model.register_buffer("steps", torch.zeros(()))
    with pytest.warns(UserWarning, match="parameters or buffers .* 'scale', 'steps'"):
        GPipe(model, [1, 2])


def test_a_model_without_anything_of_its_own_gives_no_warning() -> None:
    """Hooks of layers run, so nobody has to be warned of them."""
    model = chain()
    model[1].register_forward_hook(lambda *_: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GPipe(model, [1, 2])
        GPipe(with_recompute(model, [[1]]), [1, 2])


def test_hooks_of_a_pipeline_see_the_whole_mini_batch() -> None:
    """Registered on the pipeline, as the warning says, they do what they do on the plain model."""
    rows = torch.randn(6, 4)
    seen: dict[str, list[Any]] = {"plain": [], "pipe": []}
    outputs = {}
    for name, model in (("plain", chain()), ("pipe", GPipe(chain(), [1, 2], chunks=3))):
        torch.manual_seed(0)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        found = seen[name]
        model.register_forward_pre_hook(lambda _, args: (2 * args[0],))
        model.register_forward_hook(lambda _, args, output: output + args[0])
        model.register_full_backward_pre_hook(lambda _, gradient: (3 * gradient[0],))
        model.register_full_backward_hook(
            lambda _, ins, outs, found=found: found.append((ins[0], outs[0]))
        )
        model.register_state_dict_post_hook(lambda _, state, *__: state.update(more=1))
        x = rows.clone().requires_grad_()
        outputs[name] = model(x)
        outputs[name].square().sum().backward()
        found += [x.grad, *[p.grad for p in model.parameters()]]
        assert model.state_dict()["more"] == 1
    torch.testing.assert_close(outputs["pipe"], outputs["plain"])
    torch.testing.assert_close(seen["pipe"], seen["plain"])
    assert len(seen["pipe"]) == 4


def test_hooks_of_a_pipeline_do_not_run_in_a_step() -> None:
    """A step has no output of the whole mini-batch that a hook could see."""
    pipe = GPipe(chain(), [1, 2], chunks=3)
    calls: list[int] = []
    pipe.register_forward_hook(lambda *_: calls.append(1))
    pipe.step(torch.randn(6, 4), loss_fn=lambda y: y.sum())
    assert not calls
    pipe(torch.randn(6, 4))
    assert calls == [1]


@pytest.mark.parametrize(
    "method",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
        "register_backward_hook",
    ],
)
def test_views_of_partitions_take_no_hooks(method: str) -> None:
    """`pipe.partitions` is made anew at every look, so a hook on it would be lost."""
    pipe = GPipe(chain(), [1, 2])
    with pytest.raises(PipelineError, match=r"Fix: register the hook on a layer, pipe.partitions"):
        getattr(pipe.partitions[1], method)(lambda *_: None)
    getattr(pipe.partitions[1][0], method)(lambda *_: None)
    assert repr(pipe.partitions[1]).startswith("Sequential(")
    assert isinstance(pipe.partitions[1], nn.Sequential)


@pytest.mark.parametrize("make", [GPipe, gpipebal.compat.torchgpipe.GPipe])
def test_several_inputs_are_refused_and_the_advice_works(make: Any) -> None:
    """Two inputs one after the other get an error that says how to pass them."""
    pipe = make(chain(), [1, 2], chunks=2)
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    with pytest.raises(ModelError, match="a pipeline takes one input: 2 were given") as caught:
        pipe(x, y)
    assert isinstance(caught.value, TypeError)
    assert "Fix: pipe((x, y)) if" in str(caught.value)
    assert "pipe(x, name=y) if" in str(caught.value)
    plain = nn.Sequential(*list(pipe)[1:])
    torch.testing.assert_close(pipe((x, y)), plain(x + y))
    torch.testing.assert_close(pipe(x, factor=y), plain(x * y))


def test_a_step_without_names_is_refused_and_the_advice_works() -> None:
    """Target and loss have names, and a loss there must be."""
    pipe = GPipe(chain(), [1, 2], chunks=2)
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    for others in ((y,), (y, F.mse_loss)):
        with pytest.raises(ModelError, match=r"Fix: pipe.step\(x, target=y, loss_fn=loss_fn\)"):
            pipe.step(x, *others)
    with pytest.raises(ModelError, match=r"Fix: pipe.step\(x, target=y, loss_fn=loss_fn\)"):
        pipe.step(x, y, loss_fn=F.mse_loss)
    for wrong, got in ((None, "loss_fn=None"), (y, r"type\(loss_fn\)=Tensor")):
        with pytest.raises(ModelError, match=f"loss_fn is not a function: {got}"):
            pipe.step(x, target=F.mse_loss, loss_fn=wrong)
    assert all(p.grad is None for p in pipe.parameters())
    loss = pipe.step(x, target=y, loss_fn=F.mse_loss)
    torch.testing.assert_close(loss, F.mse_loss(pipe(x), y).detach())
