"""verify leaves everything of its caller as it is, and refuses what it cannot compare."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import skip_layers
import torch
from broken_layers import in_worker
from chains import batchnorm_chain
from torch import Tensor, nn
from verify_cases import dropouts, make, rows

import gpipebal as gb
from gpipebal.errors import BalanceError, DeviceError, ModelError, VerificationError
from gpipebal.pipeline import GPipe
from gpipebal.skip.tracker import current

pytestmark = pytest.mark.timeout(60)


def snapshot(model: nn.Module, pipe: GPipe, sample: Tensor) -> list[Any]:
    """Return everything of the caller that could change."""
    state = [tensor.clone() for tensor in (*model.state_dict().values(), sample.detach())]
    gradients = [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [
        *state,
        *gradients,
        sample.grad,
        torch.get_rng_state(),
        *(torch.as_tensor(part) for part in np.random.get_state()[1:]),
        random.getstate(),
        [module.training for module in (*model.modules(), *pipe.modules())],
        [parameter.requires_grad for parameter in model.parameters()],
        [id(module) for module in (*model.modules(), *pipe.modules())],
        [type(module) for module in (*model.modules(), *pipe.modules())],
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        {thread.name for thread in threading.enumerate()},
        id(pipe._runtime),
    ]


class Noise(nn.Module):
    """Draws from generators that no pipeline can rule."""

    def forward(self, x: Tensor) -> Tensor:
        return x + random.random() + np.random.rand()


@pytest.mark.parametrize("fault", [None, "weight", "noise", "error"])
@pytest.mark.parametrize("ran", [False, True])
def test_nothing_of_the_caller_changes(fault: str | None, ran: bool) -> None:
    """State, gradients, modes, random states and workers are the same to the bit afterwards."""

    class Fail(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if threading.current_thread() is not threading.main_thread():
                raise OSError("broken")
            return x

    model = batchnorm_chain().double()
    model.insert(7, nn.Dropout())
    model.append({"noise": Noise(), "error": Fail()}.get(str(fault), nn.Identity()))
    model[3].eval()
    model[0].bias.requires_grad_(False)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    sample = rows(6, 2, 8, 8, grad=True)
    pipe = GPipe(copy.deepcopy(model) if fault == "weight" else model, [4, 6], chunks=3)
    if fault == "weight":
        with torch.no_grad():
            pipe[0].weight.add_(1)
    if ran and fault != "error":
        with torch.no_grad():
            pipe(sample)
    loss = nn.Linear(3, 1, dtype=torch.float64)
    before = snapshot(model, pipe, sample)

    def run() -> None:
        gb.verify(model, pipe, sample, loss_fn=nn.Sequential(loss, Total()))

    if fault is None:
        run()
    else:
        with pytest.raises(OSError if fault == "error" else VerificationError):
            run()
    after = snapshot(model, pipe, sample)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old, new) if isinstance(old, Tensor) else old == new
    assert loss.weight.grad is None


class Total(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


def test_an_input_with_a_graph_gets_no_gradient() -> None:
    """An input that the caller has computed is used as a leaf; its graph is not touched."""
    model, pipe, leaf = make("dropout")
    leaf.requires_grad_()
    assert gb.verify(model, pipe, (leaf * 2)).gradients.count == 5
    assert leaf.grad is None


def test_skips_of_a_failed_run_are_not_left_behind() -> None:
    """A plain model that fails between stash and pop leaves nothing in the caller's thread."""
    keeper, giver = skip_layers.keep("image"), skip_layers.give("image")
    model = nn.Sequential(keeper, nn.Linear(4, 4), giver).double()
    with pytest.raises(RuntimeError, match="shapes"):
        gb.verify(model, GPipe(model, [2, 1]), rows(4, 3))
    assert current().take_all() == {}


def test_a_layer_that_fails_in_the_pipeline_alone_keeps_its_error() -> None:
    """What a layer raises comes through, with a note that says in which run."""

    class Fail(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if in_worker() is self.training:
                raise OSError("broken")
            return x

    model = nn.Sequential(nn.Linear(3, 3), Fail()).double()
    threads = set(threading.enumerate())
    for training, where in ((True, "in pipe(sample); the plain"), (False, "in the plain model,")):
        model.train(training)
        with pytest.raises(OSError, match="broken") as caught:
            gb.verify(model, GPipe(model, [1, 1]), rows(4, 3))
        assert any(note.startswith(where) for note in caught.value.__notes__)
        # The error holds the copy, but its workers have ended.
        assert set(threading.enumerate()) <= threads


class Stubborn(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise OSError("no copies")


BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no pipeline": (
        lambda: gb.verify(dropouts(), dropouts(), rows(4, 3)),  # type: ignore[arg-type]
        ModelError,
        r"type\(pipe\)=Sequential",
    ),
    "no chain": (
        lambda: gb.verify(nn.Linear(3, 3), GPipe(dropouts(), [5]), rows(4, 3)),
        ModelError,
        "must be nn.Sequential",
    ),
    "target without loss": (
        lambda: gb.verify(dropouts(), GPipe(dropouts(), [5]), rows(4, 3), target=rows(4, 2)),
        ModelError,
        "loss_fn=None",
    ),
    "negative": (
        lambda: gb.verify(dropouts(), GPipe(dropouts(), [5]), rows(4, 3), rtol=-1),
        BalanceError,
        "rtol=-1",
    ),
    "not a number": (
        lambda: gb.verify(dropouts(), GPipe(dropouts(), [5]), rows(4, 3), atol=float("nan")),
        BalanceError,
        "atol=nan",
    ),
    "no loss": (
        lambda: gb.verify(*make("dropout"), loss_fn=lambda y: y),
        ModelError,
        "loss_fn returned no loss",
    ),
    "no copy": (
        lambda: gb.verify(nn.Sequential(Stubborn(3, 3)), GPipe(dropouts(), [5]), rows(4, 3)),
        ModelError,
        "the model cannot be copied.*OSError: no copies",
    ),
    "no values": (
        lambda: gb.verify(dropouts().to("meta"), GPipe(dropouts(), [5]), rows(4, 3)),
        DeviceError,
        "has no values",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_get_a_clear_error(case: str) -> None:
    """What cannot be compared is refused, with a fix."""
    run, kind, message = BAD[case]
    with pytest.raises(kind, match=message) as caught:
        run()
    assert "Fix: " in str(caught.value)
