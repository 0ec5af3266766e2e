"""A trial: the measured layers run for a few steps as the pipeline that they are measured for.

Layers are clocked one by one, with a clock and a cut between them. A partition runs them in one
piece, in a worker's thread, next to neighbours that do other work at the same time. The effect of
this cannot be seen in single layers. So on a CPU the replicas run as a `GPipe` of as many
partitions as will work side by side, cut where the bottleneck is least, and its traces are compared
with the sums over the layers::

    time of a cell = overhead + factor * sum over its layers

The overhead is that of cells of a pipeline whose layers do next to nothing; the factors, one for
each kind of cell, are what then remains while all partitions work. The same chain in one partition
tells how much faster a cell is while the others wait (see `sharing`), and how much
slower it is after the other kind of work, which has filled the caches: as the first one of a step,
and in the middle of 1F1B. What a step takes in addition to its cells, on the way in and out, is
learned too.
"""

from __future__ import annotations

import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor, nn

from gpipebal.pipeline.gpipe import GPipe
from gpipebal.pipeline.minibatch.loss import call_loss
from gpipebal.pipeline.process.caller import without_autocast
from gpipebal.pipeline.trace import trace
from gpipebal.pipeline.values.microbatch import flatten, unflatten
from gpipebal.problem import Problem
from gpipebal.profile import Profile
from gpipebal.profiler.chain.batch import Batch
from gpipebal.profiler.chain.data import Data
from gpipebal.profiler.chain.gradients import needs_gradient
from gpipebal.profiler.chain.value import as_leaves
from gpipebal.profiler.step.step import BEYOND_CACHES
from gpipebal.profiler.trial.findings import Trial, read_trial
from gpipebal.profiler.trial.traces import KINDS, Traced, cells_of, sums_of_layers
from gpipebal.schedule import CheckpointMode
from gpipebal.solvers import split

__all__ = [
    "LEAST_TRIAL_SECONDS",
    "MOST_TRIAL_CHUNKS",
    "Setting",
    "chunks_in_time",
    "run_trial",
]

#: Rounds; more where they take less than these seconds.
MOST_ROUNDS = 8
#: The speed of partitions that work side by side changes every few tenths of a second.
LEAST_TRIAL_SECONDS = 3.0
#: Steps that count in each way's turn, if there is time. The one before them does not: it warms up,
#: and finds in the caches and in the allocator what another cut left there.
TURN_STEPS = 3
#: Steps of the pipeline that does next to nothing.
OVERHEAD_ROUNDS = 6
#: Most micro-batches of a trial: more of them do not fill the pipeline any better.
MOST_TRIAL_CHUNKS = 8
#: Where time is short, this many for each partition: with fewer, partitions mostly wait.
LEAST_PER_PARTITION = 2
#: Modes, which together have cells of all kinds; and whether the last partition computes the loss,
#: which needs something to train.
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
        loss_fn: The loss; None: the sum of the outputs is used instead.
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
    """One way of running a step, with its traces."""

    pipe: GPipe
    loss: _NoLoss

    def run(self, setting: Setting, elsewhere: Tensor | None = None) -> None:
        """Run a step that begins without gradients, as after ``zero_grad()``."""
        if elsewhere is not None:
            # After an optimizer's step the caches hold what it went through.
            elsewhere.fill_(0.0)
        for parameter in self.pipe.parameters():
            parameter.grad = None
        with trace(self.pipe) as recorder:
            started = time.perf_counter()
            sample, keywords = setting.data.sample.call()
            if self.inside:
                # The loss takes no target, so no target is divided in the cells.
                schedule = "1f1b" if self.n_partitions == 1 else "gpipe"
                self.pipe.step(sample, keywords=keywords, loss_fn=self.loss, schedule=schedule)
            else:
                output = self.pipe(sample, **keywords)
                self.loss.used = _go_back(output, setting)
            seconds = time.perf_counter() - started
        self.steps.append((seconds, recorder.timeline))


def chunks_in_time(profile: Profile, n_partitions: int, chunks: int, seconds: float) -> int:
    """Return how many micro-batches a trial may have, so that every way has its turn in time.

    Args:
        profile: What was measured, layer by layer.
        n_partitions: Partitions of the trial.
        chunks: The most.
        seconds: How long the trial may take.

    Returns:
        Where even the fewest take longer, these: `LEAST_PER_PARTITION` for each partition.
    """
    n = min(n_partitions, profile.n_layers)
    least = min(chunks, LEAST_PER_PARTITION * n)
    fitting = (m for m in range(chunks, least, -1) if 2 * _seconds_once(profile, n, m) <= seconds)
    return next(fitting, least)


def _seconds_once(profile: Profile, n_partitions: int, chunks: int) -> float:
    """Return about how long it takes to run every way once: in n partitions, and in one."""
    sums = sums_of_layers(profile, (profile.n_layers,))
    forward, without_graph, recompute, backward = (sums[name][0] for name in KINDS)
    forwards = {"never": forward, "always": without_graph + recompute}
    cells = sum(forwards[mode] + backward for mode, _ in _HOW)
    n = n_partitions
    return cells * ((chunks + n - 1) / n + (chunks if n > 1 < chunks else 0))


def run_trial(profile: Profile, setting: Setting, seconds: float) -> Trial:
    """Run a few steps, and compare them with what the profile predicts.

    Args:
        profile: What was measured, layer by layer.
        setting: What to run.
        seconds: About how long; every way of running has at least two steps, of which one counts.

    Returns:
        What the trial told. Errors of a layer or the loss are passed on.
    """
    n = min(setting.n_partitions, profile.n_layers)
    overheads, of_loss = _overheads(n, setting)
    balance = _balance(profile, n)
    module = nn.Sequential(setting.layers)
    cuts = [balance]
    if n > 1 and setting.chunks > 1:
        cuts.append([profile.n_layers])
    loss = _NoLoss()
    elsewhere = _elsewhere(profile)
    once = _seconds_once(profile, n, setting.chunks)
    n_steps = min(TURN_STEPS, max(1, int(seconds / once) - 1)) if once else TURN_STEPS
    ways: list[_Way] = []
    started, rounds, limit = time.perf_counter(), 0, seconds
    try:
        for cut in cuts:
            ways += [_way_of(module, cut, mode, inside, setting, loss) for mode, inside in _HOW]
        # As long as another round is likely to fit.
        while not rounds or (time.perf_counter() - started) * (rounds + 1) < limit * rounds:
            for group in _in_turns(ways):
                running: list[_Way] = []
                for way in group:
                    # The first way of all tells whether there is something to train.
                    if any(loss.used) or not way.inside:
                        way.run(setting, elsewhere)
                        way.steps.pop()
                        running.append(way)
                for way in running * n_steps:
                    way.run(setting, elsewhere)
            rounds += 1
            if rounds >= MOST_ROUNDS:
                limit = min(seconds, LEAST_TRIAL_SECONDS)
    finally:
        for way in ways:
            way.pipe.close()
            for parameter in way.pipe.parameters():
                parameter.grad = None
    ran = [way for way in ways if way.steps]
    return read_trial(profile, balance, setting.chunks, rounds, ran, overheads, of_loss)


def _elsewhere(profile: Profile) -> Tensor | None:
    """Return as much memory as an optimizer's step goes through; no more than caches hold."""
    if not profile.step.optimizer_time:
        return None
    sizes = [2 * layer.gradient_bytes + (layer.optimizer_bytes or 0) for layer in profile.layers]
    n_values = min(sum(sizes), BEYOND_CACHES) // 4
    return torch.empty(n_values, dtype=torch.float32, device="cpu")


def _in_turns(ways: Sequence[_Way]) -> list[list[_Way]]:
    """Group ways whose steps take turns: those that `turn_factors` compares step by step."""
    groups: dict[tuple[int, CheckpointMode, bool], list[_Way]] = defaultdict(list)
    for way in ways:
        groups[way.n_partitions, way.mode, way.inside and way.n_partitions > 1].append(way)
    return list(groups.values())


def _balance(profile: Profile, n_partitions: int) -> list[int]:
    problem = Problem(**profile.layer_times, n_partitions=n_partitions)
    return split(problem, "bottleneck").balance


def _overheads(n_partitions: int, setting: Setting) -> tuple[dict[str, float], dict[str, float]]:
    """Find the seconds of a cell of each kind whose layer does next to nothing.

    And how many more it takes with a loss after it that does nothing, while no other cell works.
    """
    row = torch.zeros(setting.chunks, 1, device="cpu")
    nothing = replace(setting, data=Data(Batch.sample(row), [1] * setting.chunks), loss_fn=None)

    def seconds_of(n: int, mode: CheckpointMode, inside: bool) -> dict[str, list[float]]:
        module = nn.Sequential(*(nn.Linear(1, 1, device="cpu") for _ in range(n)))
        way = _way_of(module, [1] * n, mode, inside, nothing, _NoLoss())
        try:
            for _ in range(OVERHEAD_ROUNDS + 1):
                way.run(nothing)
        finally:
            way.pipe.close()
        found: dict[str, list[float]] = defaultdict(list)
        for _, timeline in way.steps[1:]:
            for event, name, _ in cells_of(timeline, mode):
                found[name].append(event.end - event.start)
        return found

    modes = [seconds_of(n_partitions, mode, inside) for mode, inside in _HOW if not inside]
    times = {
        name: median(time for cells in modes for time in cells.get(name, ())) for name in KINDS
    }
    without, with_loss = (seconds_of(1, "never", inside) for inside in (False, True))
    more = {name: median(cells) - median(without[name]) for name, cells in with_loss.items()}
    return times, {name: max(0.0, time) for name, time in more.items()}


def _way_of(
    module: nn.Sequential,
    balance: Sequence[int],
    mode: CheckpointMode,
    inside: bool,
    setting: Setting,
    loss: _NoLoss,
) -> _Way:
    pipe = GPipe(
        module,
        balance,
        devices=["cpu"] * len(balance),
        chunks=setting.chunks,
        checkpoint=mode,
        threads_per_partition=setting.n_threads,
        **setting.data.dims(),
    )
    return _Way(mode, inside, len(balance), [], pipe, loss)


def _go_back(output: Any, setting: Setting) -> tuple[bool, ...]:
    """Run loss and backward as a caller does, but leave parameters of the loss alone.

    Returns:
        For each tensor of the output that requires a gradient, whether the loss gives it one.
    """
    leaves, structure = flatten(output)
    ends = list(filter(needs_gradient, leaves))
    if not ends:
        return ()
    gradients: Sequence[Tensor | None]
    if setting.loss_fn is None:
        gradients = [torch.ones_like(end) for end in ends]
    else:
        cut = as_leaves(leaves, wants=True)
        target = setting.data.target_of(setting.data.sizes)
        loss = call_loss(setting.loss_fn, unflatten(cut, structure), target)
        inputs = [*filter(needs_gradient, cut)]
        with without_autocast("cpu"):
            gradients = torch.autograd.grad(loss, inputs, allow_unused=True)
    # A loss may leave an output alone.
    used = [pair for pair in zip(ends, gradients, strict=True) if pair[1] is not None]
    if used:
        torch.autograd.backward([end for end, _ in used], [gradient for _, gradient in used])
    return tuple(gradient is not None for gradient in gradients)


class _NoLoss:
    """A loss that takes no time, inside a pipeline: outputs get gradients that exist already.

    Attributes:
        used: For each tensor of the output that requires a gradient, whether the real loss gives it
            one: if so, it gets ones.
    """

    def __init__(self) -> None:
        self.used: tuple[bool, ...] = ()
        self._ones: dict[tuple[Any, ...], Tensor] = {}

    def __call__(self, output: Any) -> Tensor:
        ends = list(filter(needs_gradient, flatten(output)[0]))
        # One micro-batch may have fewer of them.
        if len(self.used) == len(ends) and any(self.used):
            ends = [end for end, used in zip(ends, self.used, strict=True) if used]
        if not ends:
            return torch.zeros((), device="cpu")
        gradients = [self._like(end) for end in ends]
        return cast("Tensor", _WithGradients.apply(gradients, *ends))

    def _like(self, end: Tensor) -> Tensor:
        key = (end.shape, end.stride(), end.dtype, end.device)
        if key not in self._ones:
            self._ones[key] = torch.ones_like(end)
        return self._ones[key]


class _WithGradients(torch.autograd.Function):
    """Returns a number whose backward returns given gradients."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *ends: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros((), device=ends[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.gradients)
