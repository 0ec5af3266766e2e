"""Planned faults: what is raised where, and a record of everything that a mini-batch runs.

A layer finds the record of its mini-batch in a context variable, which a pipeline carries into its
workers. Every row of the value has its own number in the last column, so a layer knows which
micro-batch it works on without asking the pipeline.
"""

from __future__ import annotations

import signal
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpipebal.pipeline import is_recomputing

#: The name of the loss where layers have theirs.
LOSS = "loss"

#: A fault that no layer raises: the process gets SIGINT while the layer runs.
INTERRUPT = "SIGINT"


class Place(NamedTuple):
    """Where a mini-batch can be: a layer, a phase and a micro-batch."""

    layer: str
    phase: str
    micro_batch: int


class OddError(Exception):
    """An exception that cannot be copied by calling its class with its message."""

    def __init__(self, left: int, *, right: int) -> None:
        super().__init__(f"{left} and {right}")


#: What a layer raises, by the name of the fault.
ERRORS: Mapping[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError("planned"),
    "OddError": lambda: OddError(1, right=2),
    "MemoryError": lambda: MemoryError("planned"),
    "KeyboardInterrupt": lambda: KeyboardInterrupt("planned"),
    "SystemExit": lambda: SystemExit("planned"),
}

#: The record of the mini-batch that this thread works on; None: nobody watches.
current: ContextVar[Record | None] = ContextVar("current", default=None)

# An interrupt has been sent; it has been received.
_wanted, _arrived = threading.Event(), threading.Event()


class Record:
    """What one mini-batch has run, and what is to go wrong in it.

    Args:
        sizes: Rows of each micro-batch.
        plans: Name of the fault at each place that has one.

    Attributes:
        visits: How often each place was run.
        fired: The faults that have happened; the error is None for an interrupt.
        late: Places that were run after the mini-batch was over.
    """

    def __init__(self, sizes: Sequence[int], plans: Mapping[Place, str]) -> None:
        self.visits: Counter[Place] = Counter()
        self.fired: list[tuple[Place, BaseException | None]] = []
        self.late: list[Place] = []
        self._plans = dict(plans)
        self._ends = list(accumulate(sizes))
        self._is_over = False
        self._counting = threading.Lock()

    def micro_batch_of(self, row: int) -> int:
        """Return the micro-batch that a row of the mini-batch is in."""
        return bisect_right(self._ends, row)

    def visit(self, place: Place) -> None:
        """Note that a place runs, and let its fault happen, if one is planned: once."""
        with self._counting:
            if self._is_over:
                self.late.append(place)
            self.visits[place] += 1
            plan = self._plans.pop(place, None)
            if plan is None:
                return
            error = None if plan == INTERRUPT else ERRORS[plan]()
            self.fired.append((place, error))
        if error is not None:
            raise error
        _interrupt_caller()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Let the mini-batch that begins in this block be recorded here."""
        token = current.set(self)
        try:
            yield
        finally:
            current.reset(token)
            self._is_over = True


def _interrupt_caller() -> None:
    """Send the main thread, which waits for this one, an interrupt; return when it has it."""
    _arrived.clear()
    _wanted.set()
    for _ in range(3000):
        # Again and again, because Python misses a signal that comes right before it falls asleep.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        if _arrived.wait(0.01):
            return
    raise TimeoutError("the interrupt did not reach the main thread")


@contextmanager
def interruptible() -> Iterator[None]:
    """Let the planned interrupts raise KeyboardInterrupt in the main thread, once each."""

    def handle(number: int, frame: Any) -> None:
        if _wanted.is_set():
            _wanted.clear()
            _arrived.set()
            sent[0] = time.monotonic()
            raise KeyboardInterrupt("sent")
        # One that was sent again, or the user, who wants an end?
        if time.monotonic() - sent[0] > 1:
            raise KeyboardInterrupt

    sent = [0.0]
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def visit(layer: str, x: Tensor) -> None:
    """Note that a layer, or the loss, runs on `x`."""
    record = current.get()
    if record is not None:
        phase = "recompute" if is_recomputing() else "forward"
        record.visit(Place(layer, phase, record.micro_batch_of(int(x[0, -1]))))


def wire(layer: str, y: Tensor, x: Tensor) -> Tensor:
    """Let the backward of `y`, which the layer made of `x`, be noted too."""
    record = current.get()
    if record is None or not y.requires_grad:
        return y
    place = Place(layer, "backward", record.micro_batch_of(int(x[0, -1])))
    wired: Tensor = _Wire.apply(y, record, place)
    return wired


class _Wire(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, record: Record, place: Place) -> Tensor:
        ctx.record, ctx.place = record, place
        return y.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.record.visit(ctx.place)
        return gradient, None, None
