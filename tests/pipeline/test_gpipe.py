"""The GPipe module: construction, errors, and the interface of a module."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from chains import batchnorm_chain
from torch import Tensor, nn

import gpipebal as gb
from gpipebal.errors import BalanceError, GpipebalError, KindError, PipelineError
from gpipebal.pipeline import GPipe
from gpipebal.pipeline.workers.runtime import Runtime


def chain() -> nn.Sequential:
    """Make a chain of three named layers."""
    return nn.Sequential(OrderedDict(first=nn.Linear(3, 4), act=nn.ReLU(), second=nn.Linear(4, 2)))


class Doubled(nn.Sequential):
    """A chain that does something beside running its layers."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)  # type: ignore[no-any-return]


BAD = {
    "own forward": (
        lambda: GPipe(Doubled(nn.Linear(1, 1)), [1]),
        TypeError,
        "forward of its own: Doubled",
    ),
    "no Sequential": (lambda: GPipe(nn.Linear(1, 1), [1]), TypeError, "must be nn.Sequential"),
    "no balance": (lambda: GPipe(chain()), ValueError, "balance is required"),
    "sum": (lambda: GPipe(chain(), [1, 1]), ValueError, r"sum\(\[1, 1\]\)=2 \(expected 3"),
    "zero entry": (lambda: GPipe(chain(), [0, 3]), ValueError, "impossible entry"),
    "fraction": (lambda: GPipe(chain(), [1.5, 1.5]), ValueError, "impossible entry"),
    "no chunks": (lambda: GPipe(chain(), [3], chunks=0), ValueError, "chunks=0"),
    "odd chunks": (lambda: GPipe(chain(), [3], chunks="x"), ValueError, "not a whole number"),
    "mode": (lambda: GPipe(chain(), [3], checkpoint="some"), ValueError, "expected one of"),
    "few devices": (
        lambda: GPipe(chain(), [1, 2], devices=["cpu"]),
        IndexError,
        "1 for 2 partitions",
    ),
    "auto chunks": (lambda: GPipe(chain(), [3], chunks="auto"), ValueError, r"solve\(profile, pa"),
    "auto modes": (
        lambda: GPipe(chain(), [3], checkpoint="auto"),  # type: ignore[arg-type]
        ValueError,
        "from_plan",
    ),
    "a number": (lambda: GPipe(chain(), 3), ValueError, "balance_by_time"),  # type: ignore[arg-type]
    "a bare torch device": (
        lambda: GPipe(chain(), [1, 2], devices=torch.device("cpu")),  # type: ignore[arg-type]
        ValueError,
        r"devices=\['cpu'\] \* 2",
    ),
    "a bare device": (lambda: GPipe(chain(), [3], devices="cpu"), ValueError, "not a list"),
    "odd device": (lambda: GPipe(chain(), [3], devices=["tpu!"]), ValueError, "not readable"),
    "other device": (lambda: GPipe(chain(), [3], devices=["meta"]), ValueError, "not supported"),
    "threads": (
        lambda: GPipe(chain(), [3], threads_per_partition=0),
        ValueError,
        "threads_per_partition=0",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_get_a_clear_error(case: str) -> None:
    """Every impossible argument is a GpipebalError of the expected builtin kind, with a fix."""
    make, kind, message = BAD[case]
    with pytest.raises(kind, match=message) as caught:
        make()
    assert isinstance(caught.value, GpipebalError)
    assert "Fix: " in str(caught.value)


def test_a_text_is_no_flag() -> None:
    """It would count as true, whatever it says."""
    with pytest.raises(BalanceError, match="neither true nor false: deferred_batch_norm='no'"):
        GPipe(chain(), [1, 1], deferred_batch_norm="no")  # type: ignore[arg-type]


def test_a_model_without_values_is_refused() -> None:
    """A model on the meta device cannot run."""
    with torch.device("meta"):
        model = chain()
    with pytest.raises(ValueError, match="no values"):
        GPipe(model, [3])


def test_settings_are_visible() -> None:
    """Balance, devices, chunks and mode can be read, whole floats count as ints."""
    pipe = GPipe(chain(), (2.0, 1), devices=["cpu", "cpu:0", "cpu"], chunks=4.0)  # type: ignore[arg-type]
    assert (pipe.balance, pipe.chunks, pipe.checkpoint) == ([2, 1], 4, "except_last")
    assert pipe.devices == [torch.device("cpu")] * 2
    assert "balance=[2, 1]" in repr(pipe)


def test_it_is_a_sequence_of_the_callers_own_layers() -> None:
    """len, iteration and indexing see the layers that the caller made."""
    model = chain()
    pipe = GPipe(model, [1, 2])
    assert len(pipe) == 3
    assert list(pipe) == list(model)
    assert pipe[-1] is model.second
    assert [list(dict(part.named_children())) for part in pipe.partitions] == [
        ["first"],
        ["act", "second"],
    ]
    with pytest.raises(IndexError):
        pipe[3]


def test_empty_chain() -> None:
    """A chain without layers gives its input back."""
    pipe = GPipe(nn.Sequential(), [])
    inputs = torch.ones(3, 2)
    assert pipe(inputs) is inputs
    assert len(pipe) == 0


@pytest.mark.parametrize("balance", [[8], [3, 5], [1, 1, 6]])
def test_state_dict_is_the_plain_models(balance: list[int]) -> None:
    """Keys do not depend on the balance: state moves between balances and the plain model."""
    model = batchnorm_chain()
    plain_keys = list(model.state_dict())
    pipe = GPipe(copy.deepcopy(model), balance)
    assert list(pipe.state_dict()) == plain_keys
    assert [name for name, _ in pipe.named_parameters()] == [
        name for name, _ in model.named_parameters()
    ]
    other = GPipe(batchnorm_chain(), [2, 6])
    other.load_state_dict(pipe.state_dict())
    plain = batchnorm_chain()
    plain.load_state_dict(other.state_dict())
    for mine, theirs in zip(plain.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    outer = nn.Sequential(OrderedDict(pipe=pipe))
    assert list(outer.state_dict()) == [f"pipe.{key}" for key in plain_keys]


def test_layers_may_have_the_names_of_settings() -> None:
    """Layers called 'chunks' or 'balance' are layers, and the settings stay settings."""
    model = nn.Sequential(OrderedDict(chunks=nn.Linear(2, 2), balance=nn.Linear(2, 2)))
    pipe = GPipe(model, [1, 1], chunks=2)
    assert (pipe.chunks, pipe.balance) == (2, [1, 1])
    pipe.chunks = 3
    assert pipe.chunks == 3
    assert list(pipe.state_dict()) == [
        "chunks.weight",
        "chunks.bias",
        "balance.weight",
        "balance.bias",
    ]
    pipe(torch.ones(6, 2)).sum().backward()


def test_moving_is_refused_and_changing_dtype_is_not() -> None:
    """Partitions have their own devices; the dtype is everyone's."""
    pipe = GPipe(chain(), [1, 2])
    for move in (pipe.cpu, pipe.cuda, lambda: pipe.to("cpu"), lambda: pipe.to(torch.zeros(1))):
        with pytest.raises(TypeError, match="cannot be moved"):
            move()
    assert pipe.to(torch.double)(torch.ones(2, 3, dtype=torch.double)).dtype == torch.double


def test_a_module_around_a_pipeline_does_not_move_it() -> None:
    """What `to` of an enclosing module would do to the layers is refused; a dtype is not."""
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), [1, 1])
    around = nn.ModuleDict({"pipe": pipe})
    with pytest.raises(TypeError, match="nor a module that it is part of"):
        around.to("meta")
    with pytest.raises(TypeError, match="cannot be moved"):
        around.to_empty(device="meta")
    assert all(tensor.device.type == "cpu" for tensor in pipe.state_dict().values())
    around.to("cpu").double().share_memory()
    assert pipe(torch.ones(4, 2, dtype=torch.float64)).dtype == torch.float64


def test_copies_work_at_any_time() -> None:
    """Deepcopy and pickle after a forward give pipelines that train, apart from the original."""
    pipe = GPipe(chain(), [1, 2], chunks=2)
    inputs = torch.ones(4, 3)
    pipe(inputs).sum().backward()
    stored = io.BytesIO()
    pickle.dump(pipe, stored)
    stored.seek(0)
    for twin in (copy.deepcopy(pipe), pickle.load(stored)):
        torch.testing.assert_close(twin(inputs), pipe(inputs))
        twin(inputs).sum().backward()
        assert twin[0] is not pipe[0]


def test_outputs_may_live_longer_than_the_pipe() -> None:
    """A backward after the last reference to the pipeline is gone still works."""
    model = chain()
    output = GPipe(model, [1, 2], chunks=2)(torch.ones(4, 3))
    gc.collect()
    output.sum().backward()
    assert model.first.weight.grad is not None


def test_a_backward_after_close_is_an_error() -> None:
    """close() ends what a backward would need: a clear error, not a hang."""
    pipe = GPipe(chain(), [1, 2], chunks=2)
    output = pipe(torch.ones(4, 3))
    pipe.close()
    with pytest.raises(RuntimeError, match="the pipeline is closed"):
        output.sum().backward()


def test_closing_ends_the_threads() -> None:
    """close() ends the workers, a later forward starts new ones, collection ends them too."""
    before = set(threading.enumerate())
    pipe = GPipe(chain(), [1, 2], chunks=2)
    pipe(torch.ones(4, 3))
    assert len(set(threading.enumerate()) - before) == 2
    pipe.close()
    pipe.close()
    assert set(threading.enumerate()) <= before
    pipe(torch.ones(4, 3)).sum().backward()
    del pipe
    gc.collect()
    assert set(threading.enumerate()) <= before


def test_a_pipeline_closed_by_another_thread_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that finds the workers in place does not put them back after they have ended."""
    pipe = GPipe(chain(), [1, 2], chunks=2)
    pipe(torch.ones(4, 3))
    has_other_parameters = Runtime.has_other_parameters

    def closed_meanwhile(self: Runtime) -> bool:
        pipe.close()
        return has_other_parameters(self)

    with monkeypatch.context() as patches:
        patches.setattr(Runtime, "has_other_parameters", closed_meanwhile)
        with pytest.raises(RuntimeError, match="the pipeline is closed"):
            pipe(torch.ones(4, 3))
    assert pipe._runtime is None


def test_threads_of_the_process_stay_as_they_were() -> None:
    """Workers have their share of the cores; the caller, and threads started later, their own."""
    torch.set_num_threads(2)
    seen: list[int] = []

    class Look(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(torch.get_num_threads())
            return x

    pipe = GPipe(nn.Sequential(Look(), Look()), [1, 1], threads_per_partition=1)
    pipe(torch.ones(2, 1))
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert (seen, torch.get_num_threads(), later) == ([1, 1], 2, [2])


def test_from_plan_runs_the_plan() -> None:
    """A plan decides balance, chunks, mode and threads."""
    profile = gb.Profile.from_costs([1.0, 1.0, 2.0], names=["first", "act", "second"], chunks=3)
    plan = gb.solve(profile, 2, checkpoint="always")
    pipe = GPipe.from_plan(chain(), plan, threads_per_partition=1)
    assert (pipe.balance, pipe.chunks, pipe.checkpoint) == ([2, 1], 3, "always")


@pytest.mark.parametrize(
    ("name", "value"),
    [("chunks", 8), ("checkpoint", "never"), ("balance", [1, 2]), ("schedule", "1f1b")],
)
def test_from_plan_refuses_what_a_plan_has_itself(name: str, value: Any) -> None:
    """The error says how to get such a plan, or how to do without one; both ways work."""
    profile = gb.Profile.from_costs([1.0, 1.0, 2.0], names=["first", "act", "second"], chunks=3)
    plan = gb.solve(profile, 2, checkpoint="always")
    own: Any = {"threads_per_partition": 1, name: value}
    with pytest.raises(KindError, match=rf"a plan has {name} of its own: {name}=") as error:
        GPipe.from_plan(chain(), plan, **own)
    known: dict[str, Any] = {**vars(gb.planner), "GPipe": GPipe, "profile": profile, "plan": plan}
    fix = str(error.value).partition("\nFix: ")[2].removesuffix(".")
    way, _, other = fix.partition(", whose plan has it; or ")
    found = getattr(eval(way, known), name)
    assert (list(found) if name == "balance" else found) == value
    x, pipe = torch.ones(8, 3), GPipe.from_plan(chain(), plan, threads_per_partition=1)
    known |= {"model": chain(), "pipe": pipe, "x": x, "y": torch.ones(8, 2)}
    made = eval(other, {**known, "loss_fn": nn.functional.mse_loss})
    if name == "schedule":
        assert made.requires_grad is False
    else:
        kept = {"balance": plan.balance, "chunks": 3, "checkpoint": "always", name: value}
        assert {k: getattr(made, k) for k in kept} == {**kept, "balance": list(kept["balance"])}


def test_settings_that_a_pipeline_does_not_have_are_refused() -> None:
    """A schedule is one of `step`; of a slip the name that may be meant is said."""
    schedule: Any = {"schedule": "1f1b"}
    with pytest.raises(KindError, match=r"Fix: pipe\.step\(x, .*schedule='1f1b'\)\."):
        GPipe(chain(), [1, 2], **schedule)
    slip: Any = {"device": "cpu"}
    with pytest.raises(KindError, match=r"GPipe has no argument 'device' .*\nFix: devices="):
        GPipe(chain(), [1, 2], **slip)
    plan = gb.solve(gb.Profile.from_costs([1.0] * 3, names=["first", "act", "second"]), 2)
    with pytest.raises(KindError, match=r"GPipe\.from_plan has no argument 'device' "):
        GPipe.from_plan(chain(), plan, **slip)


@pytest.mark.parametrize("options", [{"loss_inside": True}, {"schedule": "1f1b"}])
def test_a_call_is_warned_of_that_a_limited_plan_is_not_made_for(options: dict[str, Any]) -> None:
    """Once, and only in training: with the loss outside the pipeline it may need more memory."""
    names = ["first", "act", "second"]
    profile = gb.Profile.from_costs([1.0, 1.0, 2.0], names=names, chunks=2)
    plan = gb.solve(profile, 2, memory_limit="1 GiB", **options)
    model = chain()
    pipe = GPipe.from_plan(model, plan, threads_per_partition=1)
    with torch.no_grad():
        pipe(torch.ones(2, 3))
    pipe.eval()(torch.ones(2, 3))
    pipe.train().step(torch.ones(2, 3), loss_fn=torch.sum)
    gb.verify(model, pipe, torch.ones(2, 3), loss_fn=torch.mean)
    pipe.register_forward_pre_hook(lambda *_: None)  # torch calls it another way with hooks
    text = r"memory limit with the loss inside.*pipe\.step\("
    with pytest.warns(UserWarning, match=text) as caught:
        pipe(torch.ones(2, 3))
    assert [warning.filename for warning in caught] == [__file__]
    pipe(torch.ones(2, 3))
    for other in (gb.solve(profile, 2, **options), gb.solve(profile, 2, memory_limit="1 GiB")):
        GPipe.from_plan(chain(), other, threads_per_partition=1)(torch.ones(2, 3))


def test_from_plan_refuses_another_model() -> None:
    """A plan for other layers is refused, and the first difference is named."""
    plan = gb.solve(gb.Profile.from_costs([1.0, 1.0]), 2)
    with pytest.raises(ValueError, match=r"layer 0 is '0' in the plan and 'first' in the module"):
        GPipe.from_plan(chain(), plan)


def test_interpreter_ends_cleanly_with_live_pipes() -> None:
    """A program that ends with a pipeline in a global exits with status 0, and does not hang."""
    program = (
        "import torch; from torch import nn; from gpipebal.pipeline import GPipe\n"
        "pipe = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], chunks=2)\n"
        "pipe(torch.ones(4, 2)).sum().backward()\n"
        "other = pipe(torch.ones(4, 2))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], timeout=100, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_two_pipes_in_two_threads() -> None:
    """Pipelines used from two threads at once do not disturb each other."""
    results: dict[int, torch.Tensor] = {}

    def train(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        for parameter in model.parameters():
            parameter.data.normal_(generator=generator)
        pipe = GPipe(model, [1, 2], chunks=2)
        for _ in range(20):
            pipe(torch.randn(4, 4, generator=generator)).sum().backward()
        assert model[0].weight.grad is not None
        results[seed] = model[0].weight.grad.clone()

    expected = {}
    for seed in (1, 2):
        train(seed)
        expected[seed] = results.pop(seed)
    threads = [threading.Thread(target=train, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in (1, 2):
        torch.testing.assert_close(results[seed], expected[seed])


def test_one_pipe_in_two_threads() -> None:
    """Mini-batches of two threads through one pipeline get their own outputs and gradients."""
    pipe = GPipe(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), [1, 2], chunks=2)
    plain = copy.deepcopy(nn.Sequential(*pipe))
    failures: list[BaseException] = []

    def use(seed: int) -> None:
        try:
            generator = torch.Generator().manual_seed(seed)
            for _ in range(25):
                inputs = torch.randn(4, 4, generator=generator, requires_grad=True)
                (mine,) = torch.autograd.grad(pipe(inputs).sum(), inputs)
                (theirs,) = torch.autograd.grad(plain(inputs).sum(), inputs)
                torch.testing.assert_close(mine, theirs)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_optimizer_state_moves_between_splits() -> None:
    """Model and Adam state saved under one split go on under another, and in the plain model."""
    torch.manual_seed(0)
    inputs, target = torch.randn(6, 4), torch.randn(6, 2)

    def make() -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)
        )

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), target).backward()
            optimizer.step()

    first = GPipe(make(), [1, 3], deferred_batch_norm=True)
    optimizer = torch.optim.Adam(first.parameters(), lr=0.1)
    train(first, optimizer, 3)
    model_state = {name: value.clone() for name, value in first.state_dict().items()}
    optimizer_state = copy.deepcopy(optimizer.state_dict())
    train(first, optimizer, 2)
    for other in (GPipe(make(), [2, 1, 1]), make()):
        other.load_state_dict(model_state)
        again = torch.optim.Adam(other.parameters(), lr=0.1)
        again.load_state_dict(copy.deepcopy(optimizer_state))
        train(other, again, 2)
        for mine, theirs in zip(other.parameters(), first.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_plan_says_which_device_runs_which_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices are given as to `solve`; a plan that changed their order is run in its order."""
    from gpipebal.pipeline.layers import devices as of_devices

    profile = gb.Profile.from_costs([1.0, 4.0], names=["0", "1"])
    plan = gb.solve(profile, 2, chunks=2, devices=[2.0, 1.0], any_order=True)
    assert plan.balance == [1, 1] and plan.devices == (1, 0)
    with monkeypatch.context() as patched:
        patched.setattr(of_devices, "parse_device", lambda device: device)
        assert of_devices.in_order(["fast", "slow"], plan.devices) == ["slow", "fast"]
        assert of_devices.in_order(["fast", "slow"], (0, 1)) == ["fast", "slow"]
        assert of_devices.in_order(None, (0, 1)) is None
        with pytest.raises(gb.GpipebalError, match="too few devices"):
            of_devices.in_order(["fast"], plan.devices)
    pipe = gb.GPipe.from_plan(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), plan)
    assert pipe(torch.ones(4, 2)).shape == (4, 2)


@pytest.mark.parametrize(
    "change",
    [
        lambda part: part.__setitem__(0, nn.ReLU()),
        lambda part: part.__delitem__(0),
        lambda part: part.append(nn.ReLU()),
        lambda part: part.insert(0, nn.ReLU()),
        lambda part: part.extend([nn.ReLU()]),
        lambda part: part.pop(0),
        lambda part: part.add_module("late", nn.ReLU()),
        lambda part: setattr(part, next(iter(dict(part.named_children()))), nn.ReLU()),
        lambda part: setattr(part, next(iter(dict(part.named_children()))), None),
        lambda part: delattr(part, next(iter(dict(part.named_children())))),
        lambda part: setattr(part, "late", nn.ReLU()),
        lambda part: part.register_buffer("late", None),
    ],
)
def test_partitions_cannot_be_changed(change: Callable[[nn.Sequential], object]) -> None:
    """What they show is made anew at every look, so a change would be lost."""
    pipe = GPipe(chain(), [1, 2], chunks=2)
    with pytest.raises(PipelineError, match=r"cannot be changed.*\nFix: pipe\[k\] = layer"):
        change(pipe.partitions[0])
    assert [len(part) for part in pipe.partitions] == [1, 2]
    for own in (pipe.partitions[1][:1], copy.deepcopy(pipe.partitions[0])):
        assert len(own.append(nn.ReLU())) == 2


def test_a_layer_is_replaced_by_its_name() -> None:
    """As in any module."""
    pipe = GPipe(chain(), [1, 2], chunks=2)
    x = torch.ones(4, 3)
    before = pipe(x)
    first = copy.deepcopy(pipe[0])
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.mul_(2.0)
    name = next(iter(dict(pipe.named_children())))
    setattr(pipe, name, first)
    assert pipe.partitions[0][0] is first
    assert not torch.equal(pipe(x), before)
