"""Compiled layers are measured compiled, and looked at as they were written."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from profiler.test_profiler import profile
from random_chains import Apply
from torch import Tensor, nn

import gpipebal as gb
from gpipebal.pipeline import measure_memory
from gpipebal.pipeline.process.eager import EagerDispatchMode, run_eagerly
from gpipebal.profiler.replicas.harmless import uses_compiled

pytestmark = [
    pytest.mark.timeout(200),
    # torch 2.11 dies when a second thread compiles, with or without a pipeline.
    pytest.mark.skipif(
        torch.__version__ < (2, 12), reason="torch before 2.12 cannot compile in several threads"
    ),
    # torch's own compiler warns of its own parts.
    pytest.mark.filterwarnings("ignore"),
]


class Block(nn.Module):
    """A layer worth compiling."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).relu()


class Calls:
    """A backend that counts the calls of what it compiled, by what goes on at the moment."""

    def __init__(self) -> None:
        self.now = "nothing"
        self.counts: collections.Counter[str] = collections.Counter()

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.counts[self.now] += 1
            return graph(*args)

        return run

    def __deepcopy__(self, memo: Any) -> Calls:
        return self  # a copy of a wrapper has a copy of its backend

    def count(self, what: str, work: Callable[[], Any]) -> int:
        """Do some work; return how often compiled code was called for it."""
        self.now = what
        work()
        return self.counts[what]


@pytest.fixture
def calls() -> Iterator[Calls]:
    """Start without compiled code, and leave none behind."""
    torch._dynamo.reset()
    yield Calls()
    torch._dynamo.reset()


def wrapped(calls: Calls) -> nn.Sequential:
    """A chain with a layer that ``torch.compile(layer)`` made."""
    return nn.Sequential(torch.compile(Block(), backend=calls), nn.Tanh())


def in_place(calls: Calls) -> nn.Sequential:
    """A chain with a layer on which ``layer.compile()`` was called."""
    model = nn.Sequential(Block(), nn.Tanh())
    model[0].compile(backend=calls)
    return model


@pytest.mark.parametrize("make", [wrapped, in_place])
@pytest.mark.parametrize("way", [{"partitions": 1}, {"one_at_a_time": True}])
@pytest.mark.parametrize("first", ["profile", "training"])
def test_compiled_layers_stay_compiled(
    make: Callable[[Calls], nn.Sequential], way: dict[str, Any], first: str, calls: Calls
) -> None:
    """Compiled code runs before, during and after a profile, whichever comes first."""
    model, sample = make(calls), torch.randn(4, 4)
    if first == "training":
        assert calls.count("before", lambda: model(sample)) == 1
    options = {"rows": (), "as_pipeline": False, **way}
    # To warm up and to measure: with a graph twice and without one, each time; not to look.
    assert calls.count("during", lambda: profile(model, sample, **options)) >= 6
    assert calls.count("after", lambda: [model(sample) for _ in range(3)]) == 3


def test_what_is_counted_is_that_of_the_code_as_written(calls: Calls) -> None:
    """Bytes and operations are those of the plain layer, and the profile says so."""
    plain = nn.Sequential(Block(), nn.Tanh())
    options = {"rows": (), "as_pipeline": False, "partitions": 1}
    expected, found = (
        profile(model, torch.randn(4, 4), **options) for model in (plain, in_place(calls))
    )
    for ours, theirs in zip(found.layers, expected.layers, strict=True):
        assert (ours.saved, ours.flops) == (theirs.saved, theirs.flops)
        assert ours.backward_peak_bytes == theirs.backward_peak_bytes
    (flag,) = (flag for flag in found.provenance["flags"] if "compiled" in flag)
    assert flag.startswith("layer '0': memory and operations are those of the code as written")


@pytest.mark.parametrize("first", ["metering", "training"])
def test_a_metered_pipeline_stays_compiled(first: str, calls: Calls) -> None:
    """No compiled code runs in a metered step, and all of it behind, whichever comes first."""
    pipe = gb.GPipe(wrapped(calls), [1, 1], devices=["cpu"] * 2, chunks=2)

    def step() -> None:
        pipe(torch.randn(4, 4)).sum().backward()

    def metered() -> None:
        with measure_memory(pipe) as meter:
            step()
        assert meter.total_peak_bytes > 0

    if first == "training":
        # Two micro-batches, of which the first is checkpointed and runs twice.
        assert calls.count("before", step) == 3
    assert calls.count("metered", metered) == 0
    assert calls.count("after", step) == 3


def test_code_is_eager_until_the_last_block_ends(calls: Calls) -> None:
    """Blocks of two threads may end in any order: the first begins, the last puts back."""
    model, sample = wrapped(calls), torch.randn(4, 4)
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with _Nothing():
            inside.set()
            assert leave.wait(60)

    thread = threading.Thread(target=other)
    try:
        with run_eagerly():
            thread.start()
            assert inside.wait(60)
        assert calls.count("one left", lambda: model(sample)) == 0
    finally:
        leave.set()
        thread.join()
    assert calls.count("none left", lambda: model(sample)) == 1


class _Nothing(EagerDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_profile_leaves_compilation_as_it_was() -> None:
    """Copies have the code of the layers, which torch would soon compile no more."""
    compiled = [0]

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        compiled[0] += 1
        return graph.forward

    layers = [torch.compile(Block(), backend=backend) for _ in range(3)]
    model, x = nn.Sequential(*layers), torch.randn(8, 4)
    limits = torch._dynamo.config.recompile_limit
    taken = gb.profile_model(model, x, chunks=2, timeout=0)
    assert torch._dynamo.config.recompile_limit == limits
    assert not [flag for flag in taken.provenance["flags"] if "uncompiled" in flag]
    compiled[0] = 0
    model(x).sum().backward()
    assert compiled[0] >= 1


#: Kinds of layers that call one function, and for how many of them torch is told to compile it.
N_KINDS, MOST_KINDS = 5, 3


def _called(calls: Calls) -> nn.Sequential:
    """Layers of more kinds than torch compiles one function for, and that call one function."""
    halve = torch.compile(lambda x: x / 2, backend=calls, dynamic=False)

    class Halved(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return halve(super().forward(x))  # type: ignore[no-any-return]

    return nn.Sequential(*[Halved(k, k + 1) for k in range(2, 2 + N_KINDS)])


def _decorated(calls: Calls) -> nn.Sequential:
    """The same, of a class whose forward is compiled."""

    class Halved(nn.Linear):
        @torch.compile(backend=calls, dynamic=False)
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / 2

    return nn.Sequential(*[Halved(k, k + 1) for k in range(2, 2 + N_KINDS)])


def _helped(calls: Calls) -> nn.Sequential:
    """The same, of a class with another method that is compiled."""

    class Halved(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return self.halve(super().forward(x))

        @torch.compile(backend=calls, dynamic=False)
        def halve(self, x: Tensor) -> Tensor:
            return x / 2

    return nn.Sequential(*[Halved(k, k + 1) for k in range(2, 2 + N_KINDS)])


@pytest.mark.parametrize("make", [_called, _decorated, _helped])
@pytest.mark.parametrize("way", [{}, {"one_at_a_time": True}])
def test_functions_that_layers_call_stay_compiled(
    make: Callable[[Calls], nn.Sequential],
    way: dict[str, Any],
    calls: Calls,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As compiled layers do: every kind is measured compiled, and can be compiled afterwards."""
    model, sample = make(calls), torch.randn(4, 2)
    taken = []
    options = {"rows": (), "partitions": 1, **way}
    with torch._dynamo.config.patch(recompile_limit=MOST_KINDS):
        calls.count("during", lambda: taken.append(profile(model, sample, **options)))
        assert "recompile_limit" not in caplog.text
        # As without a profile.
        assert calls.count("after", lambda: model(sample)) == MOST_KINDS
    # To warm up and to measure: with a graph twice and without one, each time.
    assert calls.counts["during"] >= 6 * len(model)
    (flag,) = (flag for flag in taken[0].provenance["flags"] if "compiled" in flag)
    assert flag.startswith(
        f"{N_KINDS} layers, the first is '0': memory and operations are those of"
    )


def test_a_profile_in_which_nothing_is_compiled_keeps_what_was() -> None:
    """The memory of compiled code is cleared only if the copies have filled it."""
    compiled = [0]

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        compiled[0] += 1
        return graph.forward

    other = torch.compile(lambda x: x / 2, backend=backend)
    other(torch.ones(3))
    options = {"rows": (), "as_pipeline": False, "partitions": 1}
    taken = profile(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(4, 4), **options)
    other(torch.ones(3))
    assert compiled == [1]
    assert not [flag for flag in taken.provenance["flags"] if "compiled" in flag]


@pytest.mark.parametrize("kept_from", [False, True])
def test_functions_that_are_kept_from_being_compiled_are_not_flagged(kept_from: bool) -> None:
    """Torch marks them in the same way."""
    halve: Callable[[Tensor], Tensor] = lambda x: x / 2  # noqa: E731
    wrap = torch.compiler.disable if kept_from else torch.compile
    layer = Apply(wrap(halve))
    assert uses_compiled(nn.Sequential(layer)) != kept_from
