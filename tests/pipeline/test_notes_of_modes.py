"""What torch notes for the process of dispatch modes, where threads are in modes side by side."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from chains import Calls
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from gpipebal import GPipe
from gpipebal.pipeline import measure_memory
from gpipebal.pipeline.observers.ledger import Ledger
from gpipebal.pipeline.process import modes

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("overlap", ["handed over", "inside"])
def test_modes_of_two_threads_leave_no_note_of_themselves(overlap: str) -> None:
    """Torch notes for the process that a mode is on, and puts back what each mode found."""
    ledger, before = Ledger(2), modes.notes()
    first, second = ledger.watch(0), ledger.watch(1)
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        one.submit(first.__enter__).result()
        other.submit(second.__enter__).result()
        assert all(modes.notes())
        ways = [(one, first), (other, second)]
        for thread, mode in ways if overlap == "handed over" else reversed(ways):
            thread.submit(mode.__exit__, None, None, None).result()
    assert modes.notes() == before == [False] * 3


def test_memory_of_a_step_leaves_no_note_of_a_mode() -> None:
    """Its workers are in a mode each, at once."""
    layer = nn.Linear(4, 4)
    pipe = GPipe(nn.Sequential(*[copy.deepcopy(layer) for _ in range(4)]), [2, 2], chunks=4)
    for _ in range(20):
        with measure_memory(pipe):
            pipe(torch.ones(8, 4)).sum().backward()
        assert not any(modes.notes())


class Quiet(TorchDispatchMode):
    """What torch is in while it calls compiled code for the first time."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Loud(Quiet):
    """What any other tool is in."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return False


def _overlapping(kind: type[TorchDispatchMode]) -> GPipe:
    """Make a pipeline with a mode in each worker: entered and left one after the other.

    The second is torch's while it compiles.
    """
    first_on, second_on, first_off = (threading.Event() for _ in range(3))

    class First(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] == 1:  # the second micro-batch
                with kind():
                    first_on.set()
                    assert second_on.wait(30)
                first_off.set()
            return x * 1

    class Second(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] == 2:
                assert first_on.wait(30)
                with FakeTensorMode():
                    second_on.set()
                    assert first_off.wait(30)
            return x * 1

    return GPipe(nn.Sequential(First(), Second()), [1, 1], chunks=2, checkpoint="never")


@pytest.mark.parametrize("kind", [Quiet, Loud])
@pytest.mark.parametrize("how", ["call", "step", "no_grad"])
def test_modes_of_layers_in_two_workers_leave_no_note(
    kind: type[TorchDispatchMode], how: str
) -> None:
    """As those that torch enters to compile and to call compiled code."""
    pipe, x = _overlapping(kind), torch.ones(3, 2, requires_grad=True)
    if how == "step":
        pipe.step(x, loss_fn=torch.sum)
    else:
        with torch.set_grad_enabled(how == "call"):
            pipe(x)
    assert modes.notes() == [False] * 3


def test_the_callers_own_mode_stays_noted() -> None:
    """Around a pipeline, and in a thread beside it from before; left, it leaves no note either."""
    with Loud():
        _overlapping(Quiet)(torch.ones(3, 2))
        assert modes.notes() == [True] * 3
    assert modes.notes() == [False] * 3
    mode = Loud()
    with ThreadPoolExecutor(1) as other:
        other.submit(mode.__enter__).result()
        _overlapping(Quiet)(torch.ones(3, 2))
        assert modes.notes() == [True] * 3
        other.submit(mode.__exit__, None, None, None).result()
    assert modes.notes() == [False] * 3


def test_a_mode_of_the_caller_that_ends_the_last_of_two_mini_batches_stays_noted() -> None:
    """The first one, of another thread, began before the mode, and found no note."""
    inside, leave = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        assert leave.wait(30)

    with ThreadPoolExecutor(1) as other:
        first = other.submit(GPipe(nn.Sequential(Calls(wait)), [1]), torch.ones(1, 1))
        assert inside.wait(30)

        def end_first() -> None:
            leave.set()
            first.result()

        with Loud():
            GPipe(nn.Sequential(Calls(end_first)), [1])(torch.ones(1, 1))
            assert modes.notes() == [True] * 3
    assert modes.notes() == [False] * 3


@pytest.mark.filterwarnings("ignore")  # torch's own compiler warns of its own parts
@pytest.mark.skipif(
    torch.__version__ < (2, 12), reason="torch before 2.12 cannot compile in several threads"
)
def test_compilations_in_two_workers_leave_no_note() -> None:
    """One compiles while the other calls, for the first time, what was compiled before."""
    called, compiling, over = (threading.Event() for _ in range(3))

    @torch.library.custom_op("gpipebal_tests::wait", mutates_args=())
    def wait(x: Tensor) -> Tensor:
        if x.shape[0] == 1:  # the second micro-batch
            called.set()
            assert compiling.wait(60)
        return x.clone()

    @wait.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        compiling.set()
        assert over.wait(60)
        return graph

    first = torch.compile(wait, backend="aot_eager", dynamic=False)
    second = torch.compile(torch.sin, backend=aot_autograd(fw_compiler=backend))

    class First(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = first(x)
            if x.shape[0] == 1:
                over.set()
            return y

    class Second(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert called.wait(60)
            return second(x)  # type: ignore[no-any-return]

    torch._dynamo.reset()
    pipe = GPipe(nn.Sequential(First(), Second()), [1, 1], chunks=2)
    try:
        with torch.no_grad():
            pipe(torch.ones(3, 2))
    finally:
        torch._dynamo.reset()
    assert modes.notes() == [False] * 3
