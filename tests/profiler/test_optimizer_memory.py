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
from gpipebal.planner import evaluate
from gpipebal.problem import to_bounds
from gpipebal.profiler.step.optimizer import Maker
from gpipebal.profiler.step.step import StandInsError, optimizer_peaks, optimizer_state_bytes


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
    found = optimizer_peaks(Maker(torch.optim.Adam, parameters), device_type)
    assert found is not None
    # One after the other, a result of the one before is still there.
    left = 0 if together else 40
    assert (found.together, found.bytes) == (together, [n_bytes] * 3)
    assert (found.left, found.before) == ([0, left, left], [None, 0, 1])


def test_groups_leave_nothing_to_each_other() -> None:
    """They are stepped one after the other; a frozen parameter is not stepped."""
    parameters = [nn.Parameter(torch.zeros(10), requires_grad=k != 1) for k in range(5)]
    groups = [{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.5}]
    found = optimizer_peaks(Maker(torch.optim.Adam(groups), parameters), "cpu")
    assert found is not None
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
    found = optimizer_peaks(Maker(torch.optim.Adam, parameters), "cpu")
    assert found is not None and found.bytes[1] == 0
    state = optimizer_state_bytes(Maker(torch.optim.Adam, parameters))
    assert state is not None and state[0] > 0 and state[1] == 0


def test_an_optimizer_that_needs_values_is_not_known() -> None:
    """What cannot step stand-ins has an unknown peak, and an unknown state."""

    class Curious(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad.sum().item() > 0:
                        parameter.data.zero_()

    parameters = [nn.Parameter(torch.zeros(10))]
    with pytest.raises(StandInsError, match="item"):
        optimizer_peaks(Maker(Curious, parameters), "cpu")
    with pytest.raises(StandInsError, match="item"):
        optimizer_state_bytes(Maker(Curious, parameters))
