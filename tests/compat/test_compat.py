"""torchgpipe's interface: names, arguments, errors, balance functions, the migration page."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compat_chains import chain, inputs
from torch import Tensor, nn

import gpipebal as gb
from gpipebal.compat import torchgpipe
from gpipebal.compat.torchgpipe import GPipe
from gpipebal.compat.torchgpipe.balance import balance_by_size, balance_by_time, balance_cost
from gpipebal.compat.torchgpipe.batchnorm import DeferredBatchNorm
from gpipebal.compat.torchgpipe.skip import Namespace, pop, skippable, stash, verify_skippables
from gpipebal.errors import GpipebalError, KindError, ModelError

MIGRATION = Path(gb.__file__).parent.parent / "docs" / "migration.md"


# --- Names and argument orders

SIGNATURES: dict[str, tuple[Callable[..., Any], str]] = {
    "GPipe": (
        GPipe,
        "module, balance=None, *, devices=None, chunks=1, checkpoint='except_last', "
        "deferred_batch_norm=False, **settings",
    ),
    "balance_by_time": (
        balance_by_time,
        "partitions, module, sample, *, timeout=1.0, device=None",
    ),
    "balance_by_size": (
        balance_by_size,
        "partitions, module, input, *, chunks=1, param_scale=2.0, device=None",
    ),
    "balance_cost": (balance_cost, "cost, partitions"),
    "DeferredBatchNorm": (
        DeferredBatchNorm,
        "num_features, eps=1e-05, momentum=0.1, affine=True, chunks=1",
    ),
    "convert": (DeferredBatchNorm.convert_deferred_batch_norm, "module, chunks=1"),
    "skippable": (skippable, "stash=(), pop=()"),
    "stash": (stash, "name, tensor"),
    "pop": (pop, "name"),
    "Namespace": (Namespace, ""),
    "verify_skippables": (verify_skippables, "module"),
    "isolate": (skippable()(nn.Identity)().isolate, "ns, *, only=None"),  # type: ignore[operator]
    "is_checkpointing": (torchgpipe.is_checkpointing, ""),
    "is_recomputing": (torchgpipe.is_recomputing, ""),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_stand_in_torchgpipes_order(name: str) -> None:
    """Every documented name takes torchgpipe's arguments, in its order, with its defaults."""
    function, expected = SIGNATURES[name]
    parameters = inspect.signature(function).parameters.values()
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    assert str(inspect.Signature(bare)) == f"({expected})"


def test_a_star_import_gives_torchgpipes_names() -> None:
    """The package exports GPipe and the two questions; its modules are attributes."""
    assert torchgpipe.__all__ == ["GPipe", "is_checkpointing", "is_recomputing"]
    assert torchgpipe.skip.__all__ == [
        "Namespace",
        "pop",
        "skippable",
        "stash",
        "verify_skippables",
    ]
    assert torchgpipe.batchnorm.__all__ == ["DeferredBatchNorm"]
    assert torchgpipe.balance.__all__ == ["balance_by_size", "balance_by_time", "balance_cost"]
    assert gb.compat.torchgpipe is torchgpipe


# --- Arguments and errors

BAD = {
    "no Sequential": (lambda: GPipe(nn.Linear(1, 1), [1]), TypeError, "must be nn.Sequential"),
    "no balance": (lambda: GPipe(chain()), ValueError, "torchgpipe.balance import"),
    "sum": (lambda: GPipe(chain(), [1, 1]), ValueError, "torchgpipe.balance import"),
    "zero entry": (lambda: GPipe(chain(), [0, 3]), ValueError, "torchgpipe.balance import"),
    "no chunks": (lambda: GPipe(chain(), [3], chunks=0), ValueError, "chunks=0"),
    "mode": (
        lambda: GPipe(chain(), [3], checkpoint="some"),
        ValueError,
        "checkpoint is not one of 'always', 'except_last', or 'never'",
    ),
    "few devices": (lambda: GPipe(chain(), [1, 2], devices=["cpu"]), IndexError, "too few"),
    "to": (lambda: GPipe(chain(), [3]).to("cpu"), TypeError, "cannot be moved"),
    "cpu": (lambda: GPipe(chain(), [3]).cpu(), TypeError, "cannot be moved"),
    "no tensor": (lambda: GPipe(chain(), [3])(3), TypeError, "expected Tensor, but got int"),
    "in a tuple": (
        lambda: GPipe(chain(), [3])((inputs(), "x")),
        TypeError,
        "expected Tensor, but got str",
    ),
    "empty": (lambda: GPipe(nn.Sequential(), [])(3), TypeError, "expected Tensor"),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_are_of_torchgpipes_types(case: str) -> None:
    """What torchgpipe refuses is refused with the same builtin, and as a GpipebalError."""
    make, kind, message = BAD[case]
    with pytest.raises(kind, match=message) as caught:
        make()
    assert isinstance(caught.value, GpipebalError)
    assert "Fix: " in str(caught.value)


def test_arguments_in_the_other_order_are_told() -> None:
    """Gpipebal's own functions take the number of partitions last."""
    model, x = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(2, 2)
    for wrong in ((2, model, x), (model, 2, x)):
        for balance_by in (gb.balance_by_time, gb.balance_by_size):
            with pytest.raises(
                KindError, match=r"(?s)partitions is not an int.*module, sample, part"
            ):
                balance_by(*wrong)


def test_sizes_are_measured_on_no_more_copies_than_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes need no partitions side by side: the number of them costs no memory."""
    asked: list[dict[str, Any]] = []

    def profiled(*args: Any, **options: Any) -> gb.Profile:
        asked.append(options)
        return gb.profile_model(*args, **options)

    monkeypatch.setattr("gpipebal.balance.profile_model", profiled)
    model, x = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))), torch.ones(2, 2)
    gb.balance_by_size(model, x, 4)
    gb.balance_by_time(model, x, 4, timeout=0.0)
    assert [options.get("partitions") for options in asked] == [None, 4]


def test_two_inputs_are_a_type_error() -> None:
    """The pipeline takes one positional argument, as torchgpipe's."""
    with pytest.raises(TypeError, match="takes one input"):
        GPipe(chain(), [3])(inputs(), inputs())


def test_an_output_that_is_no_tensor_is_refused() -> None:
    """A last layer that returns something else beside tensors is a TypeError."""

    class Say(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x, "hello"

    with pytest.raises(TypeError, match="expected Tensor, but got str: output"):
        GPipe(nn.Sequential(Say()), [1])(inputs())


def test_arguments_are_converted_as_torchgpipe_does() -> None:
    """Whatever int and str make sense of is taken; surplus devices are dropped."""

    class Mode:
        def __str__(self) -> str:
            return "always"

    mode: Any = Mode()
    balance = (size for size in (1, 2))
    pipe = GPipe(chain(), balance, devices=("cpu",) * 5, chunks="4", checkpoint=mode)  # type: ignore[arg-type]
    assert pipe.balance == [1, 2] and pipe.devices == [torch.device("cpu")] * 2
    assert (pipe.chunks, pipe.checkpoint) == (4, "always")
    assert GPipe(chain(), [3], chunks=42.000).chunks == 42  # type: ignore[arg-type]


def test_an_empty_chain_returns_its_input() -> None:
    """A chain without layers gives back the very object, whatever its dimensions."""
    pipe = GPipe(nn.Sequential(), [])
    for value in (torch.tensor(42), (torch.tensor(42),)):
        assert pipe(value) is value


def test_gpipebals_own_settings_and_verbs_work() -> None:
    """The class is a gpipebal pipeline: further settings, plans, traces and steps."""
    model = chain()
    plan = gb.solve(gb.profile_model(model, inputs(), chunks=2, timeout=0.0), 2)
    pipe = GPipe.from_plan(model, plan)
    assert type(pipe) is GPipe and pipe.balance == plan.balance
    with gb.trace(pipe) as recorder:
        pipe(inputs()).sum().backward()
    assert len(recorder.timelines) == 1
    loss = pipe.step(inputs(), target=inputs(width=2), loss_fn=nn.functional.mse_loss)
    assert loss.dim() == 0
    assert GPipe(chain(), [3], threads_per_partition=1).threads_per_partition == 1


# --- Balance


def test_balance_functions_take_the_number_of_partitions_first() -> None:
    """They are gpipebal's, with the arguments in torchgpipe's order."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    balance = balance_by_time(3, model.eval(), torch.randn(2, 64), timeout=0.0, device="cpu")
    assert balance == [1, 1, 1] and not model.training
    size = balance_by_size(2, model, torch.randn(2, 64), chunks=2, param_scale=100.0)
    assert size == [1, 2]
    assert balance_cost([1, 2, 3, 4, 5, 6], 2) == [4, 2]
    for balance_by in (balance_by_time, balance_by_size):
        with pytest.raises(ValueError, match="device='tpu'"):
            balance_by(2, model, torch.randn(2, 64), device="tpu")  # type: ignore[operator]
        with pytest.raises(ValueError, match="partitions"):
            balance_by(4, model, torch.randn(2, 64))  # type: ignore[operator]
    with pytest.raises(ValueError, match="param_scale"):
        balance_by_size(2, model, torch.randn(2, 64), param_scale=-1.0)
    with pytest.raises(ValueError, match="chunks=0"):
        balance_by_size(2, model, torch.randn(2, 64), chunks=0)
    with pytest.raises(ValueError, match="partitions"):
        balance_cost([42], 0)


def test_balancing_by_time_after_training_is_refused() -> None:
    """A gradient is a ValueError, as in torchgpipe; the advice in it helps."""
    model = nn.Sequential(nn.Linear(3, 3))
    model(torch.randn(2, 3)).sum().backward()
    with pytest.raises(ValueError, match=r"some parameter already has gradient: '0\.weight'"):
        balance_by_time(1, model, torch.randn(2, 3))
    model.zero_grad()
    assert balance_by_time(1, model, torch.randn(2, 3), timeout=0.0) == [1]


# --- The migration page


def test_the_examples_of_the_migration_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page's code runs from top to bottom, and loads what it says it loads."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", MIGRATION.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 5
    names: dict[str, Any] = {}
    exec(compile("\n".join(blocks), "migration.md", "exec"), names)
    old = torch.load("old.pt")
    assert all(key.startswith("partitions.") for key in old)
    torch.testing.assert_close(list(names["model"].state_dict().values()), list(old.values()))
    assert type(names["pipe"]) is gb.GPipe


def test_torchgpipes_import_lines_work_under_the_new_name() -> None:
    """Every import line of the page's table of names finds its name."""
    code = """
        from gpipebal.compat.torchgpipe import GPipe, is_checkpointing, is_recomputing
        from gpipebal.compat.torchgpipe.gpipe import GPipe
        from gpipebal.compat.torchgpipe.balance import balance_by_size, balance_by_time
        from gpipebal.compat.torchgpipe.skip import Namespace, pop, skippable, stash
        from gpipebal.compat.torchgpipe.skip import verify_skippables
        from gpipebal.compat.torchgpipe.batchnorm import DeferredBatchNorm
    """
    exec(inspect.cleandoc(code), {})


def test_balance_functions_name_their_own_order() -> None:
    """Whoever gives gpipebal's order here, or torchgpipe's there, is told the right one."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(2, 4)
    with pytest.raises(KindError, match="in this order: partitions, module, sample"):
        balance_by_time(model, x, 2)  # type: ignore[arg-type]
    with pytest.raises(KindError, match="in this order: partitions, module, input"):
        balance_by_size(model, x, 2)  # type: ignore[arg-type]
    with pytest.raises(KindError, match="in this order: module, sample, partitions"):
        gb.balance_by_time(2, model, x)  # type: ignore[arg-type]
    assert balance_by_time(torch.tensor(2), model, x, timeout=0) == [1, 1]  # type: ignore[arg-type]


def test_costs_may_be_a_tensor_and_are_called_costs() -> None:
    """A tensor is a list; what is no cost is named as the caller gave it."""
    assert balance_cost(torch.tensor([1.0, 2, 3, 4]), 2) == [3, 1]  # type: ignore[arg-type]
    for costs, what in (([1, -1], r"costs\[1\]=-1"), ([1, "x"], r"costs\[1\]='x'"), ([], "empty")):
        with pytest.raises(ValueError, match=what):
            balance_cost(costs, 1)  # type: ignore[arg-type]


def test_a_stash_shows_its_tensor() -> None:
    """By torchgpipe's name, for who drives a forward by hand."""
    x = torch.ones(2)
    assert stash("image", x).tensor is x


def test_arguments_in_gpipebals_order_are_named_by_the_compat_functions() -> None:
    """What is not a module is said to be none."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ModelError):
        balance_by_time(2, torch.ones(2, 2), model)  # type: ignore[arg-type]
