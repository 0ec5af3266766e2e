"""What layers reach past themselves, and what they are given, is after a profile as before."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from profiler.test_profiler_caches import WAYS
from torch import Tensor, nn

import gpipebal as gb
from gpipebal.errors import FileFormatError, ProfileError
from gpipebal.profiler.replicas.replica import stand_ins

pytestmark = pytest.mark.timeout(60)
LAST: contextvars.ContextVar[Tensor | None] = contextvars.ContextVar("LAST", default=None)


class Rope(nn.Module):
    """Keeps a table, a buffer and an entry that it makes in its first forward."""

    cos: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if self.cos is None:
            self.cos = torch.ones(8, 1, device=x.device)
            self.tables["sin"] = self.cos * 2
            self.register_buffer("late", self.cos * 3)
        return x * self.cos[: x.shape[0]] * self.tables["sin"][0] * self.late[0]


class Grows(nn.Module):
    """Has a buffer that it makes as long as its input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.full((3, 1), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        if len(self.table) < len(x):
            self.table.data = torch.full((len(x), 1), 5.0, device=x.device)
        return x * self.table[: len(x)]


def calling(inner: nn.Module) -> nn.Module:
    """Return a layer that calls a module without having it."""

    class Calls(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            called: Tensor = inner(x)
            return called

    return Calls()


@pytest.mark.parametrize("way", WAYS)
def test_a_module_that_layers_call_without_having_it(way: str) -> None:
    """Its attributes, containers and buffers are as before, and the model runs."""
    rope = Rope()
    model = nn.Sequential(nn.Linear(4, 4), calling(rope), nn.Linear(4, 2))
    gb.profile_model(model, torch.randn(8, 4), chunks=2, **WAYS[way])
    assert rope.cos is None and rope.tables == {} and "late" not in rope._buffers
    model(torch.randn(4, 4)).sum().backward()


def test_a_buffer_that_has_grown_gets_its_memory_back() -> None:
    """Its sizes and values are those of before, and no other place is left out because of it."""
    grows = Grows()
    before = grows.table
    address = before.data_ptr()
    model = nn.Sequential(calling(grows), nn.Linear(4, 2))
    gb.profile_model(model, torch.randn(16, 4), chunks=2, timeout=0, as_pipeline=False)
    assert grows.table is before and before.data_ptr() == address
    assert torch.equal(before, torch.full((3, 1), 2.0))


def test_the_trial_runs_on_a_copy_of_the_sample() -> None:
    """A first layer may write to its input where no graph is recorded."""

    class Centers(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            mean = x.mean()
            return x - mean if torch.is_grad_enabled() else x.sub_(mean)

    x = torch.randn(8, 4) + 3
    before = x.clone()
    gb.profile_model(nn.Sequential(Centers(), nn.Linear(4, 2)), x, chunks=2, timeout=0)
    assert torch.equal(x, before)


@pytest.mark.parametrize("way", WAYS)
def test_variables_of_the_callers_context(way: str) -> None:
    """What a layer sets there is not the caller's, whose own value the layer finds."""
    seen: list[bool] = []

    class Sets(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(LAST.get() is mine)
            LAST.set(x.detach())
            return x * 1

    mine = torch.ones(1)
    token = LAST.set(mine)
    try:
        model = nn.Sequential(nn.Linear(4, 4), Sets())
        gb.profile_model(model, torch.randn(8, 4), chunks=2, **WAYS[way])
        assert LAST.get() is mine
        assert any(seen)
    finally:
        LAST.reset(token)


def test_a_layer_with_a_way_to_the_whole_model_is_copied_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parameters of all other layers are shared by copies of what leads there."""

    class Recorder:
        model: nn.Module

        def hook(self, module: nn.Module, given: Any, result: Any) -> None:
            pass

    recorder = Recorder()
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    recorder.model = model
    for layer in model:
        layer.register_forward_hook(recorder.hook)
    known = stand_ins(list(model), torch.device("cpu"))
    assert {p.data_ptr() for p in known.values()} == {p.data_ptr() for p in model.parameters()}
    copied = []
    deepcopy = nn.Parameter.__deepcopy__

    def counted(self: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
        copied.append(self)
        made: nn.Parameter = deepcopy(self, memo)
        return made

    monkeypatch.setattr(nn.Parameter, "__deepcopy__", counted)
    taken = gb.profile_model(model, torch.randn(8, 64), chunks=2, timeout=0, as_pipeline=False)
    assert not copied
    assert [layer.parameter_bytes for layer in taken.layers] == [4 * (64 * 64 + 64)] * 6


@pytest.mark.parametrize("more", [{}, {"one_at_a_time": True}, WAYS["estimate"]])
def test_a_loss_may_write_to_its_input(more: dict[str, Any]) -> None:
    """As it may in a pipeline and in the plain model."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return output.sub_(target).square().mean()

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    options = more if "method" in more else {"timeout": 0, "as_pipeline": False, **more}
    taken = gb.profile_model(
        model, torch.randn(8, 4), chunks=2, loss_fn=loss, target=torch.randn(8, 2), **options
    )
    assert taken.step is not None and taken.step.loss is not None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_between_layers_are_refused(layout: torch.layout) -> None:
    """With one error that says what to do; inside of a layer they are its own matter."""

    class Nests(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nested.as_nested_tensor([x[:3], x[:2]], layout=layout)

    class Pads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nested.to_padded_tensor(x, 0.0)

    model = nn.Sequential(nn.Linear(4, 4), Nests(), Pads())
    with pytest.raises(ProfileError, match="nested tensors between layers cannot be profiled"):
        gb.profile_model(model, torch.randn(8, 4), chunks=2, timeout=0, as_pipeline=False)


@pytest.mark.parametrize("value", [float("nan"), b"x", "\ud800"])
def test_what_could_not_be_read_again_is_not_saved(tmp_path: Any, value: object) -> None:
    """The error says so, and the file that was there is still there."""
    path = tmp_path / "profile.json"
    profile = gb.Profile.from_costs([1.0])
    profile.save(path)
    before = path.read_bytes()
    profile.provenance["note"] = value  # type: ignore[index]
    with pytest.raises(FileFormatError, match="could not be read back"):
        profile.save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


class Adds(nn.Module):
    """Has a buffer of any layout, which it does not use."""

    def __init__(self, buffer: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", buffer)

    def forward(self, x: Tensor) -> Tensor:
        return x * 1


@pytest.mark.parametrize("layout", ["sparse", "csr", "expanded"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_buffers_of_any_layout_behind_a_function(layout: str) -> None:
    """They are left alone, whatever memory they have."""
    if layout == "expanded":
        buffer = torch.ones(1).expand(5)
    else:
        buffer = torch.eye(3).to_sparse() if layout == "sparse" else torch.eye(3).to_sparse_csr()
    inner = Adds(buffer)
    model = nn.Sequential(calling(inner), nn.Linear(4, 2))
    gb.profile_model(model, torch.randn(8, 4), chunks=2, timeout=0, as_pipeline=False)
    assert inner.table is buffer


@pytest.mark.parametrize("write", [torch.Tensor.add_, torch.Tensor.sub_, torch.Tensor.mul_])
def test_a_sparse_buffer_behind_a_function_keeps_its_elements(write: Any) -> None:
    """Also where a layer gives it more of them, or fewer."""

    class Writes(Adds):
        def forward(self, x: Tensor) -> Tensor:
            write(self.table, torch.eye(3).flip(0).to_sparse())
            return x * 1

    inner = Writes(torch.eye(3).to_sparse())
    model = nn.Sequential(calling(inner), nn.Linear(4, 2))
    gb.profile_model(model, torch.randn(8, 4), chunks=2, timeout=0, as_pipeline=False)
    assert torch.equal(inner.table.to_dense(), torch.eye(3))


def _sparse(table: Tensor) -> None:
    table.mul_(torch.eye(4).to_sparse())


def _resized(table: Tensor) -> None:
    table.resize_(4, 4 + len(table))


def _set(table: Tensor) -> None:
    table.set_(torch.ones(4, 4))  # type: ignore[call-overload]


def _counted(table: Tensor) -> None:
    table.add_(1)


@pytest.mark.parametrize("write", [_sparse, _resized, _set, _counted])
@pytest.mark.parametrize("in_loss", [False, True])
def test_no_two_threads_give_a_tensor_new_memory(
    write: Callable[[Tensor], None], in_loss: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One would read what the other has freed: such a layer, or loss, is measured in one thread."""
    monkeypatch.setattr("gpipebal.profiler.measure.visible_cores", lambda: 2)
    inside, at_once = 0, 0
    lock = threading.Lock()

    class Writes(Adds):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal inside, at_once
            with lock:
                inside += 1
                at_once = max(at_once, inside)
            time.sleep(0.002)  # so that two threads would meet
            with lock:
                write(self.table)
                inside -= 1
            return x * 1

    def loss(output: Tensor) -> Tensor:
        return (inner(output) if in_loss else output).sum()

    inner = Writes(torch.eye(4).to_sparse() if write is _sparse else torch.eye(4))
    model = nn.Sequential(nn.ReLU() if in_loss else calling(inner), nn.Linear(4, 2))
    taken = gb.profile_model(
        model,
        torch.randn(8, 4),
        chunks=2,
        partitions=2,
        loss_fn=loss,
        timeout=0,
        as_pipeline=False,
    )
    flags = [flag for flag in taken.provenance["flags"] if "measured in one thread" in flag]
    if write is _counted:
        assert not flags
    else:
        assert at_once == taken.provenance["side_by_side"] == 1
        assert [flag.partition(":")[0] for flag in flags] == [
            "the loss" if in_loss else "layer '0'"
        ]


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
def test_a_buffer_in_the_memory_of_a_library_keeps_its_values() -> None:
    """Also where the profile ends with an error because torch cannot tell what is written."""

    class Writes(Adds):
        def forward(self, x: Tensor) -> Tensor:
            self.table.mul_(2)
            return x * 1

    inner = Writes(torch.eye(3).to_mkldnn())
    model = nn.Sequential(calling(inner), nn.Linear(4, 2))
    with contextlib.suppress(NotImplementedError):
        gb.profile_model(model, torch.randn(8, 4), chunks=2, timeout=0, as_pipeline=False)
    assert torch.equal(inner.table.to_dense(), torch.eye(3))


def test_of_a_buffer_that_is_a_part_of_a_table_that_part_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rest, of a large one, is not copied."""
    clone, sizes = torch.UntypedStorage.clone, list[int]()

    def counted(storage: Any) -> Any:
        sizes.append(storage.nbytes())
        return clone(storage)

    monkeypatch.setattr(torch.UntypedStorage, "clone", counted)
    table = torch.arange(10_000.0)
    inner = Adds(table[3:7])
    model = nn.Sequential(calling(inner), nn.Linear(4, 2))
    gb.profile_model(model, torch.randn(8, 4), chunks=2, timeout=0, as_pipeline=False)
    assert torch.equal(table, torch.arange(10_000.0))
    assert inner.table.data_ptr() == table[3:].data_ptr()
    assert max(sizes, default=0) < table.nbytes


def test_a_graph_of_before_can_still_be_run() -> None:
    """What is put back unchanged is not written to."""

    class Scales(Adds):
        def forward(self, x: Tensor) -> Tensor:
            return x * self.table

    model = nn.Sequential(nn.Linear(4, 4), calling(Scales(torch.full((4,), 2.0))))
    x = torch.randn(8, 4)
    loss = model(x).sum()
    gb.profile_model(model, x, chunks=2, timeout=0, as_pipeline=False)
    loss.backward()


def test_what_identical_layers_read_of_another_is_the_same_for_each() -> None:
    """A gradient that one has left where it reads is not there for the next."""

    class Reads(nn.Module):
        def __init__(self, weight: Tensor) -> None:
            super().__init__()
            self.others = [weight]

        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.linear(x, self.others[0])

    first = nn.Linear(4, 4, bias=False)
    model = nn.Sequential(first, *[Reads(first.weight) for _ in range(3)])
    taken = gb.profile_model(model, torch.randn(8, 4), chunks=2, timeout=0, as_pipeline=False)
    assert len({layer.backward_peak_bytes for layer in taken.layers[1:]}) == 1


def test_compiled_functions_inside_layers_are_compiled_as_before() -> None:
    """A layer that calls one, or a loss that is one, is not a compiled module."""
    limit = torch._dynamo.config.recompile_limit
    called: list[int] = []

    def doubled(x: Tensor) -> Tensor:
        return x * 2

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.function = torch.compile(doubled, backend="eager")

        def forward(self, x: Tensor) -> Tensor:
            called.append(torch._dynamo.config.recompile_limit)
            return x + x.detach().sum() * 0

    model = nn.Sequential(nn.Linear(4, 4), Calls())
    gb.profile_model(model, torch.randn(8, 4), chunks=2, timeout=0, as_pipeline=False)
    assert min(called) > limit == torch._dynamo.config.recompile_limit


OUTSIDE = nn.BatchNorm1d(8)
BY_NAME, IN_ORDER = {"norm": OUTSIDE}, [OUTSIDE]
SPACE = types.SimpleNamespace(norm=OUTSIDE)
PART = functools.partial(lambda module, x: module(x), OUTSIDE)


def normalised(x: Tensor) -> Tensor:
    """Do what scripts have helpers for."""
    return OUTSIDE(x)  # type: ignore[no-any-return]


class ByMethod(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.help(x)

    def help(self, x: Tensor) -> Tensor:
        return OUTSIDE(x)  # type: ignore[no-any-return]


class Decorated(ByMethod):
    @torch.autocast("cpu", enabled=False)
    def forward(self, x: Tensor) -> Tensor:
        return self.help(x)


class ByClass(nn.Module):
    norm = OUTSIDE

    def forward(self, x: Tensor) -> Tensor:
        return type(self).norm(x)  # type: ignore[no-any-return]


class ByProperty(nn.Module):
    @property
    def norm(self) -> nn.Module:
        return OUTSIDE

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)  # type: ignore[no-any-return]


class ByFunction(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return normalised(x)


class ByNames(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return PART(SPACE.norm(BY_NAME["norm"](IN_ORDER[0](x))))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [ByMethod, Decorated, ByClass, ByProperty, ByFunction, ByNames])
def test_modules_that_layers_reach_in_roundabout_ways_are_left_alone(kind: type[nn.Module]) -> None:
    """Statistics and gradients are as before, and the profile says what it does not count."""
    before = {name: value.clone() for name, value in OUTSIDE.state_dict().items()}
    model = nn.Sequential(nn.Linear(8, 8), kind(), nn.Linear(8, 8))
    found = gb.profile_model(
        model, torch.randn(8, 8), chunks=2, timeout=0, as_pipeline=False, progress=False
    )
    torch.testing.assert_close(dict(OUTSIDE.state_dict()), before)
    assert OUTSIDE.weight.grad is None
    assert any("does not register" in flag for flag in found.provenance["flags"])
