"""Forked children: what other threads held or had begun when the process forked is over there."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipebal.pipeline import GPipe
from gpipebal.pipeline.process import process_wide
from gpipebal.pipeline.process.blocks import SharedBlocks, all_shared_blocks
from gpipebal.pipeline.randomness import lent, seeds

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork"),
]


def answer_of_child(answer: Callable[[], object]) -> str:
    """Return what a forked child answers; nothing, if it hangs."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        try:
            os.write(writer, str(answer()).encode())
        except BaseException as error:
            os.write(writer, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    try:
        return os.read(reader, 10_000).decode()
    finally:
        os.close(reader)
        os.waitpid(child, 0)


def locks_of_process() -> list[Any]:
    """Find the locks that the executor has once for the process."""
    kinds = type(threading.Lock()), type(threading.RLock())
    modules = [one for name, one in sys.modules.items() if name.startswith("gpipebal.pipeline")]
    found = [one for module in modules for one in vars(module).values() if isinstance(one, kinds)]
    once = {id(lock): lock for lock in (*found, *(one._lock for one in all_shared_blocks()))}
    return list(once.values())


class Aside:
    """Another thread that does something until it is told that the child has answered."""

    def __init__(self, work: Callable[[Aside], None]) -> None:
        self.is_there, self._is_over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=work, args=(self,))

    def wait(self) -> None:
        """Say that it is where it should be, and wait."""
        self.is_there.set()
        assert self._is_over.wait(40)

    def __enter__(self) -> None:
        self._thread.start()
        assert self.is_there.wait(30)

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


def test_locks_that_another_thread_holds_are_open_in_a_child() -> None:
    """A child can run a pipeline forward, whatever its parent's threads were in the middle of."""
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], chunks=2)
    x = torch.ones(4, 2)
    with torch.no_grad():
        expected = pipe(x)

    def hold(aside: Aside) -> None:
        with ExitStack() as stack:
            for lock in locks_of_process():
                stack.enter_context(lock)
            aside.wait()

    def again() -> bool:
        with torch.no_grad():
            return torch.equal(pipe(x), expected)

    assert len(locks_of_process()) > 5
    with Aside(hold):
        assert answer_of_child(again) == "True"


def test_a_lock_that_the_forking_thread_holds_is_its_own_in_a_child() -> None:
    """An operation that forks while it draws returns in the child too, and opens the lock there."""

    def hold(aside: Aside) -> None:
        with lent.default_generators:
            aside.wait()

    def go_on() -> str:
        with lent.default_generators:
            pass
        lent.default_generators.release()
        # So it is open for others.
        with Aside(hold):
            return "opened"

    with lent.default_generators:
        assert answer_of_child(go_on) == "opened"


def test_a_backward_in_a_child_is_refused() -> None:
    """A graph of the parent's workers raises in a child, which has none of them."""
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], chunks=2)
    output = pipe(torch.ones(2, 2))
    assert "forked child" in answer_of_child(output.sum().backward)


def test_a_backward_of_another_thread_does_not_hold_a_child() -> None:
    """Its graph belongs to the parent: the child's error comes at once."""
    output: list[Tensor] = []

    class Waits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            y.register_hook(lambda gradient: aside.wait())
            return y

    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), Waits()), [1, 1])
    output.append(pipe(torch.ones(2, 2)).sum())
    aside = Aside(lambda _: output[0].backward(retain_graph=True))
    with aside:
        assert "forked child" in answer_of_child(output[0].backward)


def test_a_phase_of_another_thread_is_over_in_a_child() -> None:
    """Settings that it had put in place for its time are what they were before."""

    class Waits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            y.register_hook(lambda gradient: aside.wait())
            return y

    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), Waits()).double(), [1, 1])
    torch.set_default_dtype(torch.float64)
    try:
        output = pipe(torch.ones(2, 2))
    finally:
        torch.set_default_dtype(torch.float32)
    aside = Aside(lambda _: output.sum().backward())

    def answer() -> object:
        notes = process_wide._inside, seeds._under_way, lent._noting
        return torch.get_default_dtype(), [len(one) for one in notes]

    with aside:
        assert torch.get_default_dtype() == torch.float64
        assert answer_of_child(answer) == "(torch.float32, [0, 0, 0])"
    assert torch.get_default_dtype() == torch.float32


def test_blocks_of_other_threads_are_over_in_a_child() -> None:
    """What they need is removed there, unless the thread that forks needs it too."""
    done: list[str] = []
    blocks = SharedBlocks(lambda: done.append("installed"), lambda: done.append("removed"))

    def work(aside: Aside) -> None:
        blocks.enter()
        aside.wait()
        blocks.leave()

    with Aside(work):
        assert answer_of_child(lambda: (done, blocks.here())) == "(['installed', 'removed'], 0)"
        blocks.enter()
        assert answer_of_child(lambda: (done, blocks.here())) == "(['installed'], 1)"
        blocks.leave()
    assert done == ["installed", "removed"]
