"""A trial: the measured layers run for a few steps as the pipeline that they are measured for.

Layers are clocked one by one, with a clock and a cut between them; a partition runs them in one
piece, in a worker's thread, beside neighbours that do something else at the moment. What that
changes no single layer tells. So on a CPU the replicas run as a `GPipe` of as many partitions as
will work side by side, cut where the bottleneck is least, and its traces are set beside the sums
over the layers::

    time of a cell = overhead + factor * sum over its layers

The overhead is that of cells of a pipeline whose layers do next to nothing; the factors, one for
each kind of cell, are what then remains while all partitions work. The same chain in one
partition tells how much faster a cell is while the others wait (`gpipebal.profiler.sharing`), and
how much slower behind the other kind of work, which has filled the caches: in the middle of a step
with 1F1B, and at the beginning of its forwards and backwards. What a step takes beside its cells,
on the way in and out, is learned too.
"""

from __future__ import annotations

import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from gpipebal.pipeline.gpipe import GPipe
from gpipebal.pipeline.loss import call_loss
from gpipebal.pipeline.microbatch import flatten, unflatten
from gpipebal.pipeline.trace import trace
from gpipebal.problem import Problem
from gpipebal.profile import Profile
from gpipebal.profiler.batch import Batch
from gpipebal.profiler.data import Data
from gpipebal.profiler.findings import Trial, read_trial
from gpipebal.profiler.traces import KINDS, Traced, kind_of
from gpipebal.profiler.value import as_leaves
from gpipebal.schedule import CheckpointMode
from gpipebal.solvers import split

__all__ = ["LEAST_TRIAL_SECONDS", "MOST_CHUNKS", "Setting", "run_trial"]

#: Rounds, after each way of running has warmed up; more where they take less than these seconds.
MOST_ROUNDS = 8
#: How fast partitions work side by side changes every some tenths of a second.
LEAST_TRIAL_SECONDS = 3.0
#: Steps that count in each way's turn. The one before them finds what another way left in the
#: caches, and does not: training runs in one way only. Where there are no seconds at all, one step
#: has to do.
TURN_STEPS = 3
#: Steps of the pipeline that does next to nothing.
OVERHEAD_ROUNDS = 6
#: Micro-batches of a trial at most: more fill the pipeline no more than these.
MOST_CHUNKS = 8
#: Modes that have cells of all kinds between them; and, if there is anything to train, the loss in
#: the last partition, so that forwards and backwards may take turns.
_HOW: tuple[tuple[CheckpointMode, bool], ...] = (
    ("never", False),
    ("always", False),
    ("never", True),
)


@dataclass(frozen=True)
class Setting:
    """How to try a profile out.

    Attributes:
        layers: The layers by name; they get gradients.
        data: A mini-batch and its target.
        loss_fn: The loss; None: the sum of the outputs stands for it.
        n_partitions: Partitions, at most one per layer.
        n_threads: Intra-operation threads of each.
    """

    layers: OrderedDict[str, nn.Module]
    data: Data
    loss_fn: Callable[..., Tensor] | None
    n_partitions: int
    n_threads: int

    @property
    def chunks(self) -> int:
        """Micro-batches."""
        return len(self.data.sizes)


@dataclass
class _Way(Traced):
    """One way of running a step, and what was seen of it."""

    pipe: GPipe

    def run(self, setting: Setting) -> None:
        """Run a step with gradients that start anew, as behind ``zero_grad()``."""
        for parameter in self.pipe.parameters():
            parameter.grad = None
        with trace(self.pipe) as recorder:
            started = time.perf_counter()
            if self.inside:
                self.pipe.step(
                    loss_fn=_nothing_of, schedule=self.schedule, **setting.data.of_step()
                )
            else:
                _run_outside(self.pipe, setting)
            seconds = time.perf_counter() - started
        self.steps.append((seconds, recorder.timeline))


def run_trial(profile: Profile, setting: Setting, seconds: float) -> Trial:
    """Run a few steps, and compare them with what the profile says of them.

    Args:
        profile: What was measured, layer by layer.
        setting: What to run.
        seconds: How long, about; every way of running warms up, and has a turn at least; with 0
            seconds a step.

    Returns:
        What it told. Whatever a layer or the loss raises is raised on.
    """
    n = min(setting.n_partitions, profile.n_layers)
    overheads, of_loss = _overheads(n, setting)
    balance = _balance(profile, n)
    module = nn.Sequential(setting.layers)
    cuts = [balance]
    if n > 1 and setting.chunks > 1:
        cuts.append((profile.n_layers,))
    trains = any(layer.gradient_bytes for layer in profile.layers)
    ways: list[_Way] = []
    try:
        for cut in cuts:
            for mode, inside in _HOW if trains else _HOW[:-1]:
                ways.append(_way_of(module, cut, mode, inside, setting))
        for way in ways:
            way.run(setting)  # the first warms up: threads are started, facts found out
            way.steps.clear()
        started = time.perf_counter()
        rounds, limit = 0, seconds
        while not rounds or time.perf_counter() < started + limit:
            for together in _in_turns(ways):
                for way in together * bool(seconds):
                    way.run(setting)
                    way.steps.pop()
                for way in together * (TURN_STEPS if seconds else 1):
                    way.run(setting)
            rounds += 1
            if rounds >= MOST_ROUNDS:
                limit = min(seconds, LEAST_TRIAL_SECONDS)
    finally:
        for way in ways:
            way.pipe.close()
            for parameter in way.pipe.parameters():
                parameter.grad = None
    return read_trial(profile, balance, setting.chunks, rounds, ways, overheads, of_loss)


def _in_turns(ways: Sequence[_Way]) -> list[list[_Way]]:
    """Group ways whose steps take turns: those in one partition are compared step by step."""
    alone = [way for way in ways if way.n_partitions == 1 and way.mode == "never"]
    return [[way] for way in ways if way not in alone] + [alone] * bool(alone)


def _balance(profile: Profile, n_partitions: int) -> tuple[int, ...]:
    problem = Problem(**profile.layer_times, n_partitions=n_partitions)
    return split(problem, "bottleneck").balance


def _overheads(n_partitions: int, setting: Setting) -> tuple[dict[str, float], dict[str, float]]:
    """Find the seconds of a cell of each kind whose layer does next to nothing.

    And how many more it takes with a loss behind it that does nothing.
    """
    module = nn.Sequential(*(nn.Linear(1, 1, device="cpu") for _ in range(n_partitions)))
    nothing = replace(
        setting,
        layers=OrderedDict(module.named_children()),
        data=Data(Batch.sample(torch.zeros(setting.chunks, 1, device="cpu")), [1] * setting.chunks),
        loss_fn=None,
    )
    found: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for mode, inside in _HOW:
        way = _way_of(module, [1] * n_partitions, mode, inside, nothing)
        try:
            for _ in range(OVERHEAD_ROUNDS + 1):
                way.run(nothing)
        finally:
            way.pipe.close()
        for _, timeline in way.steps[1:]:
            for event in timeline.events:
                name = kind_of(event.kind, mode)
                if name is not None and (not inside or event.partition == n_partitions - 1):
                    found[name, inside].append(event.end - event.start)
    times = {name: median(found[name, False]) for name in KINDS}
    more = {name: median(found[name, True]) - times[name] for name in ("forward", "backward")}
    return times, {name: max(0.0, time) for name, time in more.items()}


def _way_of(
    module: nn.Sequential,
    balance: Sequence[int],
    mode: CheckpointMode,
    inside: bool,
    setting: Setting,
) -> _Way:
    """Make a way of running; with the loss inside forwards and backwards take turns."""
    pipe = GPipe(
        module,
        balance,
        devices=["cpu"] * len(balance),
        chunks=setting.chunks,
        checkpoint=mode,
        threads_per_partition=setting.n_threads,
        **setting.data.dims(),
    )
    schedule = "1f1b" if inside else "gpipe"
    return _Way(mode, inside, len(balance), [], pipe, schedule=schedule)


def _run_outside(pipe: GPipe, setting: Setting) -> None:
    """Run forward, loss and backward as a caller does, but leave parameters of the loss alone."""
    sample, keywords = setting.data.sample.call()
    output = pipe(sample, **keywords)
    leaves, structure = flatten(output)
    ends = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not ends:
        return
    gradients: Sequence[Tensor | None] = [torch.ones_like(end) for end in ends]
    if setting.loss_fn is not None:
        cut = as_leaves(leaves, wants=True)
        target = setting.data.target_of(setting.data.sizes)
        loss = call_loss(setting.loss_fn, unflatten(cut, structure), target)
        inputs = [leaf for leaf in cut if isinstance(leaf, Tensor) and leaf.requires_grad]
        gradients = torch.autograd.grad(loss, inputs, allow_unused=True)
    # A loss may leave an output alone.
    used = [pair for pair in zip(ends, gradients, strict=True) if pair[1] is not None]
    if used:
        torch.autograd.backward([end for end, _ in used], [gradient for _, gradient in used])


class _Nothing(torch.autograd.Function):
    """A number that depends on tensors, each of which gets a gradient of ones."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.like = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        return torch.zeros((), device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            torch.ones(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like
        )


def _nothing_of(output: Any, target: Any = None) -> Tensor:
    """Stand for a loss that takes no time; its gradients are those of the other ways."""
    leaves = [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor)]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    # What nothing depends on is no loss to take a gradient of, and the step says so.
    return _Nothing.apply(*wanted) if wanted else torch.zeros((), device="cpu")
