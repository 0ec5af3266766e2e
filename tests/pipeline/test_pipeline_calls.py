"""How a pipeline is called: by name, from compiled code, with a class for a loss."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from gpipebal import GPipe
from gpipebal.compat.torchgpipe import GPipe as OldGPipe
from gpipebal.errors import BalanceError, ModelError, PipelineError


def make() -> GPipe:
    """Return a pipeline of two partitions."""
    return GPipe(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), [2, 1], chunks=2)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile looks at a loss's
def test_a_compiled_pipeline_runs_as_it_is() -> None:
    """`torch.compile` around it changes nothing, nor around a step, and warns of nothing in it."""
    pipe, x = make(), torch.randn(6, 8)
    expected = pipe(x)
    expected.sum().backward()
    gradients = [parameter.grad for parameter in pipe.parameters()]
    pipe.zero_grad()
    found = torch.compile(pipe, backend="eager")(x)
    found.sum().backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close([parameter.grad for parameter in pipe.parameters()], gradients)

    @torch.compile(backend="eager")
    def train(x: Tensor) -> Tensor:
        pipe.zero_grad()
        loss = pipe(x).sum()
        loss.backward()
        return loss.detach() + pipe.step(x, loss_fn=torch.sum, reduction="sum")

    for _ in range(2):
        torch.testing.assert_close(train(x), 2 * expected.sum().detach())
    torch.testing.assert_close(
        [parameter.grad for parameter in pipe.parameters()], [2 * g for g in gradients]
    )


def test_a_pipeline_alone_loads_no_compiler() -> None:
    """Which takes a second, and nobody has asked for it."""
    code = (
        "import sys, torch\nfrom torch import nn\nfrom gpipebal import GPipe\n"
        "pipe = GPipe(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), [1, 1])\n"
        "pipe(torch.ones(2, 2)).sum().backward()\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_pipeline_is_not_exported() -> None:
    """The plain model is."""
    with pytest.raises(PipelineError, match="export the plain model"):
        torch.export.export(make(), (torch.randn(6, 8),), strict=False)


def test_a_graph_of_a_pipeline_is_refused() -> None:
    """That of `make_fx` would return the output of its example, whatever it is given."""
    pipe, x = GPipe(nn.Sequential(nn.Linear(3, 3)), [1], chunks=2), torch.ones(2, 3)
    traces: list[Callable[[], object]] = [
        lambda: make_fx(pipe)(x),
        lambda: make_fx(pipe, tracing_mode="fake")(x),
        lambda: make_fx(pipe, pre_dispatch=True)(x),
        lambda: make_fx(lambda x: pipe.step(x, loss_fn=Tensor.sum))(x),
        lambda: torch.fx.symbolic_trace(pipe),
    ]
    for trace in traces:
        with pytest.raises(PipelineError, match="a pipeline cannot be traced"):
            trace()
    assert pipe(x).shape == (2, 3)


def test_a_pipeline_is_not_run_on_fake_tensors() -> None:
    """Workers are not in the mode: a layer would fail in the middle of torch."""
    pipe = GPipe(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), [1, 1], chunks=2)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(torch.ones(2, 3))
        with pytest.raises(PipelineError, match="under a FakeTensorMode"):
            pipe(fake)
    assert pipe(torch.ones(2, 3)).shape == (2, 3)


class Masked(nn.Module):
    """Take a keyword argument that has the name of a pipeline's own."""

    def forward(self, x: Tensor, input: Tensor | None = None) -> Tensor:
        return x if input is None else x * input


@pytest.mark.parametrize("kind", [GPipe, OldGPipe])
def test_an_input_by_name(kind: type[GPipe]) -> None:
    """It may be called `input`, and so may an argument of the first layer."""
    pipe = kind(nn.Sequential(Masked()), [1], chunks=2)
    x = torch.arange(6.0).reshape(3, 2)
    assert torch.equal(pipe(input=x), x)
    assert torch.equal(pipe(x, input=x), x * x)


@pytest.mark.parametrize("keywords", [{}, {"mask": torch.ones(2)}])
def test_no_input(keywords: dict[str, Tensor]) -> None:
    """What was given instead is named, with the ways to give one."""
    with pytest.raises(ModelError, match=r"none was given(, but mask by name)? \(") as caught:
        make()(**keywords)
    assert "Fix: pipe(x), or pipe(x, mask=mask);" in str(caught.value)


def test_a_loss_that_is_a_class() -> None:
    """The fix makes one of it."""
    with pytest.raises(ModelError, match="loss_fn is a class: loss_fn=MSELoss") as caught:
        make().step(torch.ones(2, 8), target=torch.ones(2, 4), loss_fn=nn.MSELoss)
    assert str(caught.value).endswith("Fix: loss_fn=MSELoss().")


def test_a_balance_of_no_layers() -> None:
    """An empty module has an empty balance."""
    with pytest.raises(BalanceError, match=r"module has no layers: balance=\[1\] \(expected \[\]"):
        GPipe(nn.Sequential(), [1])
    assert len(GPipe(nn.Sequential(), [])) == 0
