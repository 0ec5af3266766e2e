"""Faults in a pipeline: the right error arrives, nothing hangs, and the model is usable again.

Every test runs under a watchdog: a hang is a failure, not a long test.
"""

from __future__ import annotations

import gc
import signal
import threading
import time
import traceback
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipebal.pipeline import GPipe, is_recomputing, with_recompute
from gpipebal.pipeline.minibatch import minibatch
from gpipebal.pipeline.values.lane import Lane
from gpipebal.pipeline.workers import tasks
from gpipebal.schedule import CHECKPOINT_MODES
from gpipebal.verification import verify

pytestmark = pytest.mark.timeout(60)


class OddError(Exception):
    """An exception whose constructor takes what copies of it would not."""

    def __init__(self, left: int, *, right: int) -> None:
        super().__init__(f"{left} and {right}")


class Fault(nn.Module):
    """Raise on demand: in a pass (forward, recompute, backward) of the n-th call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.where = ""
        self.calls = 0
        self.at = 1
        self.error: BaseException = OddError(1, right=2)

    def maybe(self, where: str) -> None:
        if where == self.where:
            self.calls += 1
            if self.calls == self.at:
                raise self.error

    def forward(self, x: Tensor) -> Tensor:
        self.maybe("recompute" if is_recomputing() else "forward")
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: self.maybe("backward"))
        return y


def make(n_layers: int = 4) -> tuple[nn.Sequential, list[Fault]]:
    """Make a chain of layers that can fail."""
    faults = [Fault() for _ in range(n_layers)]
    return nn.Sequential(*faults), faults


def step(pipe: GPipe) -> Tensor:
    """Run a forward and a backward of eight rows."""
    output = pipe(torch.ones(8, 3))
    output.sum().backward()
    return output.detach()


def told_when_closed(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return what is set as soon as a mini-batch lets nothing new start."""
    closed = threading.Event()
    close = minibatch.MiniBatch._close

    def closing(self: minibatch.MiniBatch) -> None:
        close(self)
        closed.set()

    monkeypatch.setattr(minibatch.MiniBatch, "_close", closing)
    return closed


@pytest.mark.parametrize("where", ["forward", "recompute", "backward"])
@pytest.mark.parametrize("layer", [0, 1, 2, 3])
@pytest.mark.parametrize("at", [1, 3])
def test_the_original_error_arrives_with_its_place(where: str, layer: int, at: int) -> None:
    """A fault in any pass of any layer is raised as it is, with notes that say where."""
    model, faults = make()
    pipe = GPipe(model, [1, 2, 1], chunks=4, checkpoint="always")
    expected = step(pipe)
    faults[layer].where, faults[layer].at = where, at
    with pytest.raises(OddError, match="1 and 2") as caught:
        step(pipe)
    assert caught.value is faults[layer].error
    notes = "\n".join(caught.value.__notes__)
    partition = [0, 1, 1, 2][layer]
    assert f"in partition {partition}, {where} of micro-batch" in notes
    if where == "backward":
        assert f"in the backward of layer '{layer}' (layer {layer} of the chain)\n" in notes
    else:
        assert f"in layer '{layer}'" in notes
        assert "maybe" in "".join(traceback.format_exception(caught.value))
    faults[layer].where = ""
    pipe.zero_grad()
    assert torch.equal(step(pipe), expected)


class Keeps(nn.Module):
    """Keeps a tensor in its graph that nobody else has."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[weakref.ref[Any]] = []

    def forward(self, x: Tensor) -> Tensor:
        y = x.tanh()
        self.kept.append(weakref.ref(y.untyped_storage()))
        return y * 2


def test_an_error_keeps_no_graph_alive() -> None:
    """Its traceback leads to the mini-batch, which has let go of what backwards would have used."""
    fault, keeps = Fault(), Keeps()
    fault.where, fault.at = "forward", 3
    pipe = GPipe(nn.Sequential(nn.Linear(3, 3), keeps, fault), [2, 1], chunks=4, checkpoint="never")
    with pytest.raises(OddError) as caught:
        pipe(torch.ones(8, 3))
    assert len(keeps.kept) >= 3
    assert caught.value.__traceback__ is not None
    assert [one() for one in keeps.kept] == [None] * len(keeps.kept)


class EventLane(Lane):
    """A lane that notes which of its marks the caller has waited for."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.marks: list[object] = []
        self.waited: list[object] = []
        self.refuses = False

    def mark(self, leaves: object = ()) -> object:
        if self.refuses:
            raise torch.AcceleratorError("the device is lost")
        self.marks.append([object()])
        return self.marks[-1]

    def wait_for(self, ready: object) -> None:
        pass

    def give_to_caller(self, leaves: object, ready: object) -> None:
        self.waited.append(ready)


@pytest.mark.parametrize("kind", [OddError, KeyboardInterrupt])
def test_a_caller_who_catches_a_fault_comes_behind_what_was_launched(kind: type) -> None:
    """On a device work goes on behind a fault: its streams are waited for, unless it is lost."""
    model, faults = make(2)
    pipe = GPipe(model, [1, 1], chunks=4, checkpoint="never")
    step(pipe)
    assert pipe._runtime is not None
    lanes = pipe._runtime.lanes = [EventLane(), EventLane()]
    for refuses in (False, True):
        lanes[1].refuses = refuses
        faults[1].where, faults[1].calls = "forward", 0
        faults[1].error = OddError(1, right=2) if kind is OddError else kind()
        with pytest.raises(kind):
            pipe(torch.ones(8, 3))
        assert lanes[0].waited[-1] is lanes[0].marks[-1]
        assert refuses or lanes[1].waited[-1] is lanes[1].marks[-1]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError])
@pytest.mark.parametrize("where", ["forward", "recompute", "backward"])
def test_exceptions_of_every_kind_arrive(kind: type[BaseException], where: str) -> None:
    """Exceptions that are no Exception end the mini-batch too, instead of killing a worker."""
    model, faults = make()
    pipe = GPipe(model, [2, 2], chunks=2, checkpoint="always")
    faults[2].where, faults[2].error = where, kind("stop")
    with pytest.raises(kind):
        step(pipe)
    faults[2].where = ""
    step(pipe)


def test_nothing_new_starts_after_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells in progress end; no later cell of the failed mini-batch starts."""
    model, faults = make(2)
    pipe = GPipe(model, [1, 1], chunks=16, checkpoint="never")
    faults[1].where, faults[1].at = "forward", 1
    seen: list[int] = []
    release = told_when_closed(monkeypatch)

    def slow_first(module: nn.Module, args: Any) -> None:
        seen.append(1)
        if len(seen) == 2:
            # Micro-batch 1 is in progress in partition 0 until partition 1 has failed.
            assert release.wait(30)

    faults[0].register_forward_pre_hook(slow_first)
    with pytest.raises(OddError):
        pipe(torch.ones(16, 3))
    assert len(seen) == 2


def test_no_recompute_starts_after_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for nothing that a neighbour sends, and so has to look for itself."""
    model, faults = make(2)
    pipe = GPipe(model, [1, 1], chunks=4, checkpoint="always")
    output = pipe(torch.ones(4, 3))
    inside, closed, ran = threading.Event(), told_when_closed(monkeypatch), list[str]()

    def slow(place: str) -> None:
        ran.append(place)
        if place == "backward":  # of the last micro-batch, until partition 1 has failed
            inside.set()
            assert closed.wait(30)

    def fail(place: str) -> None:
        faults[1].calls += place == "recompute"
        if faults[1].calls == 2:
            assert inside.wait(30)
            raise faults[1].error

    faults[0].maybe, faults[1].maybe = slow, fail  # type: ignore[method-assign]
    with pytest.raises(OddError):
        output.sum().backward()
    assert ran == ["recompute", "backward"]


def test_no_backward_from_a_loss_inside_starts_after_a_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once it has all forwards behind it, the last partition waits for nobody either."""
    model, faults = make(2)
    pipe = GPipe(model, [1, 1], chunks=4, checkpoint="never")
    inside, closed, ran = threading.Event(), told_when_closed(monkeypatch), list[str]()

    def slow(place: str) -> None:
        ran.append(place)
        if ran.count("backward") == 2:  # until partition 0 has failed in its first one
            inside.set()
            assert closed.wait(30)

    def fail(place: str) -> None:
        if place == "backward":
            assert inside.wait(30)
            raise faults[0].error

    faults[0].maybe, faults[1].maybe = fail, slow  # type: ignore[method-assign]
    with pytest.raises(OddError):
        pipe.step(torch.ones(4, 3), loss_fn=torch.sum, reduction="sum", schedule="gpipe")
    assert ran == ["forward"] * 4 + ["backward"] * 2


def test_the_first_failure_in_schedule_order_is_raised() -> None:
    """Of several failures the one that comes first in the schedule arrives, and names the rest."""
    model, faults = make(2)
    both = threading.Barrier(2)
    for fault, text in zip(faults, ("left", "right"), strict=True):
        fault.error = RuntimeError(text)

        def meet(module: nn.Module, args: Any, fault: Fault = fault) -> None:
            fault.calls += 1
            if fault is faults[0] and fault.calls == 2:  # micro-batch 1 in partition 0
                both.wait(30)
                raise fault.error
            if fault is faults[1]:  # micro-batch 0 in partition 1, at the same time
                both.wait(30)
                raise fault.error

        fault.register_forward_pre_hook(meet)
    pipe = GPipe(model, [1, 1], chunks=3, checkpoint="never")
    with pytest.raises(RuntimeError, match="left") as caught:
        pipe(torch.ones(3, 3))
    assert any("also failed: in partition 1" in note for note in caught.value.__notes__)


def test_of_failures_at_one_time_on_the_way_back_the_later_partitions_is_raised() -> None:
    """Backwards come from the last partition: if all took as long, these two ran side by side."""
    model, faults = make(2)
    both = threading.Barrier(2)
    for fault, text, turn in zip(faults, ("left", "right"), (1, 2), strict=True):
        fault.error = RuntimeError(text)

        def meet(place: str, fault: Fault = fault, turn: int = turn) -> None:
            fault.calls += place == "backward"
            if place == "backward" and fault.calls == turn:
                both.wait(30)
                raise fault.error

        fault.maybe = meet  # type: ignore[method-assign]
    pipe = GPipe(model, [1, 1], chunks=3, checkpoint="never")
    with pytest.raises(RuntimeError, match="right") as caught:
        step(pipe)
    assert any("also failed: in partition 0" in note for note in caught.value.__notes__)


def test_failures_that_cannot_be_described_arrive_all_the_same() -> None:
    """An exception that raises when it is read or noted hides neither itself nor another one."""

    class MuteError(Exception):
        def __str__(self) -> str:
            raise ZeroDivisionError

    model, faults = make(2)
    both = threading.Barrier(2)
    mute = MuteError()
    mute.__notes__ = None  # type: ignore[assignment]
    pipe = GPipe(model, [1, 1], chunks=2, checkpoint="never")
    for first, second in ((ValueError("left"), MuteError()), (MuteError(), ValueError("right"))):
        for fault, error in zip(faults, (first, second), strict=True):

            def meet(place: str, fault: Fault = fault, error: Exception = error) -> None:
                fault.calls += 1
                if place == "forward" and fault.calls == 1 + (fault is faults[0]):
                    both.wait(30)
                    raise error

            fault.calls = 0
            fault.maybe = meet  # type: ignore[method-assign]
        with pytest.raises(type(first)) as caught:
            step(pipe)
        assert caught.value is first
        (note,) = [note for note in first.__notes__ if note.startswith("also failed")]
        assert type(second).__name__ in note
    faults[1].maybe = lambda place: None  # type: ignore[method-assign]
    faults[0].where, faults[0].error, faults[0].calls = "backward", mute, 0
    del faults[0].maybe
    with pytest.raises(MuteError):
        step(pipe)
    faults[0].where = ""
    step(pipe)


@pytest.mark.parametrize("refused", ["__str__", "add_note"])
@pytest.mark.parametrize("run", [[], [range(4)]], ids=["layers", "a run"])
def test_errors_that_refuse_to_be_read_or_noted_arrive(refused: str, run: list[range]) -> None:
    """Not even a forward without a graph, or a run of layers, puts another error in their place."""

    def refuse(*_: Any) -> str:
        raise ZeroDivisionError

    error = type("StubbornError", (RuntimeError,), {refused: refuse})("what does not require grad")
    model, faults = make()
    faults[1].where, faults[1].at, faults[1].error = "forward", 2, error
    pipe = GPipe(with_recompute(model, run), [4], chunks=3, checkpoint="always")
    with pytest.raises(type(error)) as caught:
        step(pipe)
    assert caught.value is error
    with pytest.raises(type(error)):
        faults[1].calls = 0
        verify(model, pipe, torch.ones(8, 3))


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_a_failed_backward_cannot_be_repeated(checkpoint: str) -> None:
    """After a fault in the backward a second backward is an error, not a wrong gradient."""
    model, faults = make()
    pipe = GPipe(model, [2, 2], chunks=2, checkpoint=checkpoint)  # type: ignore[arg-type]
    loss = pipe(torch.ones(4, 3)).sum()
    faults[1].where = "backward"
    with pytest.raises(OddError):
        loss.backward(retain_graph=True)
    faults[1].where = ""
    with pytest.raises(RuntimeError, match="ran already"):
        loss.backward()


@pytest.mark.parametrize("where", ["forward", "recompute", "backward"])
def test_ctrl_c_ends_a_mini_batch(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt of the waiting caller ends the mini-batch after the cell in progress."""
    model, faults = make()
    pipe = GPipe(model, [2, 2], chunks=4, checkpoint="always")
    expected = step(pipe)
    inside, closed = threading.Event(), told_when_closed(monkeypatch)
    ran: list[str] = []

    def slow(place: str) -> None:
        ran.append(place)
        if place == where and not inside.is_set():
            inside.set()
            assert closed.wait(30)  # the cell in progress until the interrupt has arrived

    faults[1].maybe = slow  # type: ignore[method-assign]

    def interrupt() -> None:
        assert inside.wait(30)
        signal.raise_signal(signal.SIGINT)

    killer = threading.Thread(target=interrupt)
    killer.start()
    with pytest.raises(KeyboardInterrupt):
        step(pipe)
    killer.join()
    assert ran.count(where) == 1
    pipe.zero_grad()
    assert torch.equal(step(pipe), expected)


def test_ctrl_c_waits_for_a_cell_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that uses the processor is not given up, though no action ends for long."""
    monkeypatch.setattr(tasks, "GRACE", 0.1)
    model, faults = make(2)
    pipe = GPipe(model, [1, 1], chunks=2)
    step(pipe)
    runtime = pipe._runtime

    inside, closed = threading.Event(), told_when_closed(monkeypatch)

    def compute(place: str) -> None:
        if inside.is_set():
            return
        inside.set()
        signal.raise_signal(signal.SIGINT)
        assert closed.wait(30)  # from here on the caller waits for this cell
        until = time.thread_time() + 0.5
        while time.thread_time() < until:
            pass

    faults[1].maybe = compute  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        pipe(torch.ones(8, 3))
    del faults[1].maybe
    step(pipe)
    assert pipe._runtime is runtime


def test_random_faults_leave_no_trace() -> None:
    """After many steps with faults in random places: same gradients, no more threads, no hang."""
    model, faults = make()
    model(torch.ones(8, 3)).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    pipe = GPipe(model, [1, 1, 2], chunks=4, checkpoint="except_last")
    step(pipe)
    threads = set(threading.enumerate())
    generator = torch.Generator().manual_seed(0)

    def pick(n: int) -> int:
        return int(torch.randint(0, n, (), generator=generator))

    n_failed = 0
    for _ in range(150):
        fault = faults[pick(4)]
        fault.calls, fault.at = 0, 1 + pick(4)
        fault.where = ("", "forward", "recompute", "backward")[pick(4)]
        pipe.zero_grad()
        try:
            step(pipe)
        except OddError:
            n_failed += 1
        else:
            for parameter, gradient in zip(model.parameters(), expected, strict=True):
                torch.testing.assert_close(parameter.grad, gradient)
        fault.where = ""
    assert n_failed > 50
    assert set(threading.enumerate()) <= threads


def test_an_interrupt_while_workers_start_leaves_no_thread_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also when it comes right after the workers have met, and wait for their first task."""
    main, interrupts = threading.current_thread(), [KeyboardInterrupt("now")]

    class Barrier(threading.Barrier):
        def wait(self, timeout: float | None = None) -> int:
            place = super().wait(timeout)
            if threading.current_thread() is main and interrupts:
                while self._count:  # type: ignore[attr-defined]
                    time.sleep(0.001)  # until all have left
                raise interrupts.pop()
            return place

    monkeypatch.setattr(threading, "Barrier", Barrier)
    gc.collect()
    before = set(threading.enumerate())
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], chunks=2)
    with pytest.raises(KeyboardInterrupt, match="now"):
        pipe(torch.ones(2, 2))
    gc.collect()
    assert set(threading.enumerate()) <= before
    assert pipe(torch.ones(2, 2)).shape == (2, 2)
    pipe.close()
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("backward", [False, True])
def test_an_interrupt_while_tasks_are_handed_out_waits_for_the_one_that_runs(
    backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that has its task already may work on it before the caller knows of that."""
    runs, ended = threading.Event(), threading.Event()

    class Slow(nn.Module):
        slow = False

        def work(self, *_: Tensor) -> None:
            if self.slow:
                runs.set()
                time.sleep(0.3)
                ended.set()

        def forward(self, x: Tensor) -> Tensor:
            y = 2 * x
            if y.requires_grad and backward:
                y.register_hook(self.work)
            else:
                self.work()
            return y

    slow = Slow()
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), slow), [2], checkpoint="never")
    output = pipe(torch.ones(4, 2))
    assert pipe._runtime is not None
    pool = pipe._runtime.pool

    class Queue:
        """Hands a task out, and is interrupted when the worker has begun with it."""

        def __init__(self, queue: Any) -> None:
            self.put_before = queue.put

        def put(self, task: Any) -> None:
            self.put_before(task)
            assert runs.wait(30)
            raise KeyboardInterrupt

    slow.slow = True
    with monkeypatch.context() as patch:
        patch.setattr(pool, "_queues", [Queue(queue) for queue in pool._queues])
        with pytest.raises(KeyboardInterrupt):
            if backward:
                output.sum().backward()
            else:
                pipe(torch.ones(4, 2))
    assert ended.is_set()
    slow.slow = False
    torch.testing.assert_close(pipe(torch.ones(4, 2)), output)
    pipe.close()


def test_an_interrupt_while_a_pipeline_is_closed_leaves_no_thread_behind() -> None:
    """Every worker is told to end, also if the first of them is when the interrupt comes."""
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], chunks=2)
    pipe(torch.ones(2, 2))
    assert pipe._runtime is not None
    pool = pipe._runtime.pool
    first, interrupts = pool._queues[0], [KeyboardInterrupt("now")]

    class Queue:
        def put(self, task: Any) -> None:
            first.put(task)
            if interrupts:
                raise interrupts.pop()

    pool._queues[0] = Queue()  # type: ignore[call-overload]
    with pytest.raises(KeyboardInterrupt, match="now"):
        pipe.close()
    for thread in pool.threads:
        thread.join(30)
        assert not thread.is_alive()
    assert pipe(torch.ones(2, 2)).shape == (2, 2)
    pipe.close()
