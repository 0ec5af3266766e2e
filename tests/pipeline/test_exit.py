"""The end of the interpreter, with mini-batches that are under way in daemon threads."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(120)

BEGIN = """
import threading, torch
from torch import nn
from gpipebal.pipeline import GPipe
from gpipebal.pipeline.workers import worker
worker.GRACE = 0.3
started = threading.Event()
class Layer(nn.Module):
    n_calls = 0
    def forward(self, x):
        self.n_calls += 1
        started.set()
        {work}
        return x
layer = Layer()
pipe = GPipe(nn.Sequential(nn.Linear(2, 2), layer), [1, 1], chunks=200)
def call():
    while True:
        pipe(torch.ones(400, 2)).sum().backward()
threading.Thread(target=call, daemon=True).start()
assert started.wait(60)
"""


def end_of(work: str, last: str) -> tuple[int, str, str]:
    """Run a program that ends while a layer is at `work`; `last` runs when all is over."""
    # The last exit function to run is the first that was registered.
    code = f"import atexit\natexit.register(lambda: {last})\n" + BEGIN.format(work=work)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    return done.returncode, done.stdout, done.stderr


def test_a_layer_that_hangs_does_not_keep_the_interpreter() -> None:
    """A daemon thread's call whose worker never comes back is left behind."""
    assert end_of("threading.Event().wait()", "print('end')") == (0, "end\n", "")


def test_only_the_cells_in_progress_are_waited_for() -> None:
    """A mini-batch of many slow cells is stopped at the next one, without a word."""
    code, out, error = end_of("threading.Event().wait(0.1)", "print(layer.n_calls)")
    assert (code, error) == (0, "")
    assert 1 <= int(out) < 100


def test_a_cell_that_computes_is_waited_for() -> None:
    """A worker that uses the processor does not hang, however long it needs."""
    work = (
        "import time; end = time.thread_time() + 1.5\n"
        "        while time.thread_time() < end: torch.ones(999).sum()\n"
        "        print('computed')"
    )
    code, out, error = end_of(work, "print('end')")
    assert (code, error) == (0, "")
    assert out.endswith("computed\nend\n")


WAITING = """
import threading, time, torch
from torch import nn
from gpipebal import is_recomputing
from gpipebal.pipeline import GPipe
from gpipebal.pipeline.workers import worker
worker.GRACE = 0.3
started = threading.Event()
class Hang(nn.Module):
    def forward(self, x):
        if is_recomputing():
            started.set()
            threading.Event().wait()
        return x * 1
class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(1.2)
slow = Slow()
pipe = GPipe(nn.Sequential(nn.Linear(2, 2), Hang()), [1, 1], chunks=2, checkpoint="always")
threading.Thread(target=lambda: pipe(torch.ones(4, 2)).sum().backward(), daemon=True).start()
assert started.wait(60)
"""


def test_a_caller_inside_of_torch_is_not_woken_while_the_interpreter_ends() -> None:
    """It stands in a backward, in C++: Python would end its thread there, and the program abort."""
    done = subprocess.run(
        [sys.executable, "-c", WAITING], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


FAILED = """
import torch
from torch import nn
from gpipebal.pipeline import GPipe
class Way(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x * 1
    @staticmethod
    def backward(ctx, gradient):
        if ctx.fails:
            raise ValueError("in a backward")
        return gradient, None
class Layer(nn.Module):
    def forward(self, x):
        one = Way.apply(x, False)
        return one + Way.apply(x, True)
pipe = GPipe(nn.Sequential(nn.Linear(4, 4), Layer()), [1, 1], chunks=2, checkpoint="never")
try:
    pipe(torch.rand(4, 4)).sum().backward()
except ValueError as error:
    print(error)
{last}
"""


@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("last", ["", "pipe.close()"])
def test_what_a_failed_backward_leaves_is_destroyed_before_the_interpreter_ends(
    last: str, turn: int
) -> None:
    """The other way's node is left in autograd's queue of the worker's thread, and is Python's.

    Several times: without waiting for the thread's end every other program aborts.
    """
    done = subprocess.run(
        [sys.executable, "-c", FAILED.format(last=last)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "in a backward\n", "")
