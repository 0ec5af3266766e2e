"""Rounds: the clocked work of a profile.

A round sends one micro-batch through the chain in three ways, as a pipeline's workers do: the
output of a layer is the warm input of the next, everything that the backward needs stays alive
until its turn, and gradients add up.

* *Layer by layer*: a forward with a graph, the loss, and the backward.
* *Checkpointed*: a forward without a graph, then the recompute and the backward.
* *Whole*: forward and backward of the chain as one graph, and a forward without one. Cutting has a
  cost of its own (a call into autograd per layer), and this tells how high it is.
* *From idle*, on CUDA, in the first rounds: layer by layer, each beginning when the device is done
  with all before. So the host never waits for room in the device's queue, and its time is that of
  launching. It is more than for the chain in one piece, unless the host has to wait there.

The rounds of all sizes of micro-batches take turns, so that a slow minute of the machine slows all
alike. On a CPU, as many threads run rounds side by side as partitions will work side by side,
because they share caches, memory bandwidth and the interpreter: all their times count.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial

import torch

from gpipebal.errors import ProfileError
from gpipebal.pipeline.process.caller import CallerState
from gpipebal.pipeline.values.lane import Lane
from gpipebal.pipeline.workers.inbox import Flag
from gpipebal.pipeline.workers.worker import WorkerPool
from gpipebal.profiler.chain.chain import Chain, RoundStoppedError
from gpipebal.profiler.chain.clock import Span, host_seconds_of, seconds_of
from gpipebal.profiler.chain.failures import is_out_of_memory
from gpipebal.profiler.chain.value import Value, as_leaves
from gpipebal.profiler.times.cores import CoreWatch

__all__ = ["Pace", "Subject", "Times", "run_side_by_side"]

#: Sizes other than the micro-batch's own are measured once in this many rounds.
OTHERS_EVERY = 3
#: Rounds in which the host's time is measured.
HOST_ROUNDS = 3


@dataclass
class Subject:
    """What one thread sends one size of micro-batch through.

    Attributes:
        chain: The layers.
        loss: The loss over a micro-batch; None: not measured.
    """

    chain: Chain
    loss: Chain | None = None

    def begin(self) -> None:
        """Let rounds run, also after a `stop`."""
        for chain in (self.chain, self.loss):
            if chain is not None:
                chain.stop.clear()

    def stop(self) -> None:
        """End the round in progress before its next layer."""
        for chain in (self.chain, self.loss):
            if chain is not None:
                chain.stop.set()


@dataclass(frozen=True)
class Pace:
    """How long to go on.

    Attributes:
        limit_of: Tells from the seconds of a forward and backward of one micro-batch how long the
            rounds may take, from now on.
        least: Rounds, whatever the limit.
        most: Rounds, whatever the time.
        told: Called after each round of the chain, or, one layer at a time, after each layer; from
            any thread.
    """

    limit_of: Callable[[float], float]
    least: int
    most: int
    told: Callable[[], None]


@dataclass
class Times:
    """Measured seconds of one size of micro-batch; one entry per round.

    Attributes:
        forward: Of every layer's forward, with a graph.
        recompute: Of every layer's recompute, in the backward.
        without_graph: Of every layer's forward without a graph.
        backward: Of every layer's backward; two entries per round.
        host_forward: What the host needs to launch a forward; empty on a CPU.
        host_backward: What the host needs to launch a backward; empty on a CPU.
        host_whole_forward: What the host needs to launch the chain in one piece; empty on a CPU.
        host_whole_backward: The same for its backward.
        whole_forward: Of the chain in one piece.
        whole_backward: Of the chain in one piece.
        whole_without_graph: Of the chain in one piece.
        loss_forward: Of the loss; empty if there is none.
        loss_backward: Of the loss.
        loss_without_graph: Of the loss.
        waited: Share of the round in which the thread had no core, as far as the system tells; one
            entry in each.
    """

    forward: list[list[float]] = field(default_factory=list)
    recompute: list[list[float]] = field(default_factory=list)
    without_graph: list[list[float]] = field(default_factory=list)
    backward: list[list[float]] = field(default_factory=list)
    host_forward: list[list[float]] = field(default_factory=list)
    host_backward: list[list[float]] = field(default_factory=list)
    host_whole_forward: list[float] = field(default_factory=list)
    host_whole_backward: list[float] = field(default_factory=list)
    whole_forward: list[float] = field(default_factory=list)
    whole_backward: list[float] = field(default_factory=list)
    whole_without_graph: list[float] = field(default_factory=list)
    loss_forward: list[float] = field(default_factory=list)
    loss_backward: list[float] = field(default_factory=list)
    loss_without_graph: list[float] = field(default_factory=list)
    waited: list[list[float]] = field(default_factory=list)

    def add(self, other: Times) -> None:
        """Take over another thread's times."""
        for item in fields(self):
            getattr(self, item.name).extend(getattr(other, item.name))

    def run_round(self, subject: Subject, *, whole: bool = True) -> None:
        """Run one round and note its times; `whole`: also those of the chain in one piece."""
        chain, loss, cores = subject.chain, subject.loss, CoreWatch()
        forward: list[Span] = []
        recompute: list[Span] = []
        without: list[Span] = []
        backward: list[list[Span | None]] = [[], []]
        tape, end = chain.record(forward)
        if loss is not None:
            self.run_loss(loss, end)
        chain.backward(tape, end, backward[0])
        chain.forget(without)
        chain.backward(*chain.recompute(recompute), backward[1])
        self.forward.append(seconds_of(forward))
        self.recompute.append(seconds_of(recompute))
        self.without_graph.append(seconds_of(without))
        self.backward += [seconds_of(spans) for spans in backward]
        on_host = chain.device.type == "cuda" and len(self.host_forward) < HOST_ROUNDS
        if on_host:
            self.run_from_idle(chain)
        if whole:
            in_one_piece, backwards = chain.whole()
            if on_host:
                self.host_whole_forward += host_seconds_of([in_one_piece])
                self.host_whole_backward += host_seconds_of([backwards])
            without_graph, _ = chain.whole(grad=False)
            self.whole_forward += seconds_of([in_one_piece])
            self.whole_backward += seconds_of([backwards])
            self.whole_without_graph += seconds_of([without_graph])
        if (share := cores.share_waited()) is not None:
            self.waited.append([share])

    def run_from_idle(self, chain: Chain) -> None:
        """Note what the host needs to launch each layer on a device with nothing else to do."""
        forward: list[Span] = []
        backward: list[Span | None] = []
        chain.clock.from_idle = True
        try:
            chain.backward(*chain.record(forward), backward)
        finally:
            chain.clock.from_idle = False
        self.host_forward.append(host_seconds_of(forward))
        self.host_backward.append(host_seconds_of(backward))

    def run_loss(self, loss: Chain, end: Value) -> None:
        """Run the loss after the last layer, and note its times.

        Args:
            loss: The loss as a chain.
            end: The output of the last layer.
        """
        loss.start = Value(as_leaves(end.leaves, wants=True), end.structure)
        forward: list[Span] = []
        without: list[Span] = []
        backward: list[Span | None] = []
        try:
            loss.backward(*loss.record(forward), backward)
            loss.forget(without)
        finally:
            loss.start.leaves = []
        self.loss_forward += seconds_of(forward)
        self.loss_backward += seconds_of(backward)
        self.loss_without_graph += seconds_of(without)


class _MeasuringLane(Lane):
    """A lane whose thread works on the stream that the caller works on."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def enter_thread(self) -> None:
        if self._stream is not None:
            torch.cuda.set_device(self.device)
            torch.cuda.set_stream(self._stream)


class _Rounds:
    """Rounds in several threads, and what the threads share.

    Each thread writes its own times and its own count of rounds; all read the counts, so that a
    thread that is ahead goes on and no thread is measured without the others.

    Args:
        subjects: For each thread, what it sends each size of micro-batch through.
        pace: How long to go on.
        all_sizes: Whether there must be enough memory for every size.
    """

    def __init__(self, subjects: Sequence[Sequence[Subject]], pace: Pace, all_sizes: bool) -> None:
        self._subjects, self._pace, self._all_sizes = subjects, pace, all_sizes
        for sizes in subjects:
            for subject in sizes:
                subject.begin()
        self._times = [[Times() for _ in sizes] for sizes in subjects]
        self._done = [0] * len(subjects)
        self._ended = [Flag() for _ in subjects]
        self._too_large: set[int] = set()
        self._failures: list[BaseException] = []

    def work(self, k: int, state: CallerState) -> None:
        """Do all rounds of a thread; never raises.

        Args:
            k: Which thread this is.
            state: Settings of the caller.
        """
        try:
            with replace(state, inference_mode=False).entered(grad=True):
                self._warm_up(k)
                self._measure(k)
        except RoundStoppedError:
            pass  # another thread failed, or the caller was interrupted
        except BaseException as error:
            self._failures.append(error)
            self.stop()
        finally:
            self._done[k] = max(self._done[k], self._pace.most)
            self._ended[k].set()

    def wait(self) -> None:
        """Wait until all threads have ended."""
        for flag in self._ended:
            flag.wait()

    def stop(self) -> None:
        """Let each thread end its round before the next layer."""
        for sizes in self._subjects:
            for subject in sizes:
                subject.stop()

    def results(self) -> list[Times | None]:
        """Return the times of all threads together for each size; None: not enough memory.

        Raises:
            ProfileError: a layer failed.
        """
        if self._failures:
            raise self._failures[0]
        together = [Times() for _ in self._times[0]]
        for of_thread in self._times:
            for times, measured in zip(together, of_thread, strict=True):
                times.add(measured)
        return [None if size in self._too_large else times for size, times in enumerate(together)]

    def _warm_up(self, k: int) -> None:
        """Run a round that does not count: after it gradients exist, and libraries are ready.

        At other sizes the chain in one piece is left out: it is warm by the time it runs.
        """
        for size in range(len(self._subjects[k])):
            self._run_round(k, size, Times(), whole=not size)

    def _measure(self, k: int) -> None:
        done, pace = self._done, self._pace
        deadline = math.inf
        while done[k] < pace.least or (min(done) < pace.most and time.perf_counter() < deadline):
            started = time.perf_counter()
            for size in range(1 if done[k] % OTHERS_EVERY else len(self._subjects[k])):
                self._run_round(k, size, self._times[k][size])
            if not done[k]:
                # The first round tells how long a round takes; it counts.
                first = self._times[k][0]
                seconds = first.whole_forward[0] + first.whole_backward[0]
                deadline = started + pace.limit_of(seconds)
            done[k] += 1
            pace.told()

    def _run_round(self, k: int, size: int, times: Times, *, whole: bool = True) -> None:
        if size in self._too_large:
            return
        try:
            times.run_round(self._subjects[k][size], whole=whole)
        except ProfileError as error:
            if self._all_sizes or not size or not is_out_of_memory(error):
                raise
            self._too_large.add(size)


def run_side_by_side(
    subjects: Sequence[Sequence[Subject]],
    pace: Pace,
    *,
    n_threads: int | None,
    state: CallerState,
    all_sizes: bool = False,
) -> list[Times | None]:
    """Run rounds in several threads, each with its share of the cores.

    Args:
        subjects: For each thread, what it sends each size of micro-batch through; the first size
            is measured in every round, the others in every third.
        pace: How long to go on.
        n_threads: Intra-operation threads of each; None: as they are.
        state: Settings of the caller.
        all_sizes: Whether there must be enough memory for every size.

    Returns:
        The times of all threads together, for each size; None: there was not enough memory for
        that size, though there was for the first.

    Raises:
        ProfileError: a layer failed.
    """
    rounds = _Rounds(subjects, pace, all_sizes)
    lanes = [_MeasuringLane(sizes[0].chain.device) for sizes in subjects]
    pool = WorkerPool(lanes, [n_threads] * len(subjects))
    try:
        pool.submit(
            [partial(state.variables.copy().run, rounds.work, k, state) for k in range(len(lanes))]
        )
        rounds.wait()
    finally:
        # Also when interrupted: the layers in progress finish, then the threads end.
        rounds.stop()
        pool.close()
    return rounds.results()
