"""One layer at a time: measure a model that need not fit the device.

A layer comes to the device with its parameters, is examined and measured there at every size of
micro-batch, and leaves again. Its output waits on the host. So there is never more on the device
than one layer with its gradients, its input, and what it makes of that. In return, the effects of
neighbours on each other are not seen, and there is no run of the whole chain to compare with.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from gpipebal.errors import GpipebalError
from gpipebal.pipeline.process.eager import run_eagerly
from gpipebal.profiler.chain.chain import Chain
from gpipebal.profiler.chain.failures import is_out_of_memory, left_out, memory_for
from gpipebal.profiler.chain.moving import value_to
from gpipebal.profiler.chain.numbers import Arrived
from gpipebal.profiler.chain.value import SkipEnds, Value
from gpipebal.profiler.replicas.identity import Alike
from gpipebal.profiler.replicas.reads import names_read
from gpipebal.profiler.replicas.replica import replicate
from gpipebal.profiler.survey import Survey, Trail, Twin, known_for_others
from gpipebal.profiler.times.rounds import Pace, Subject, Times
from gpipebal.profiler.training import Training
from gpipebal.skip.tracker import Key
from gpipebal.units import count

__all__ = ["SizeWalk", "join_times", "walk_alone"]

_HOST = torch.device("cpu")


@dataclass
class SizeWalk:
    """How far one size of micro-batch has come along the chain.

    Attributes:
        rows: Its rows.
        trail: What was found out about the layers so far; what goes into the next one is on the
            host.
        times: For each layer so far, its times.
    """

    rows: int
    trail: Trail
    times: list[Times] = field(default_factory=list)

    @classmethod
    def start(
        cls, rows: int, value: Value, device: torch.device, main: SizeWalk | None = None
    ) -> SizeWalk:
        """Begin with what goes into the first layer, on the host.

        A pipeline on another device is given a copy of each micro-batch, which has no gaps.

        Args:
            rows: Its rows.
            value: What goes into the first layer.
            device: Where layers run.
            main: The micro-batch's own size, which passes each layer first; None: this is it.
        """
        if device.type != _HOST.type:
            with memory_for(f"a micro-batch of {count(rows, 'row')}"):
                dense = [
                    leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in value.leaves
                ]
                value = replace(value, leaves=dense)
        known = known_for_others(main.trail.memory, main.rows) if main else ()
        return cls(rows, Trail.start(value, known))

    def repeat(self, twin: Twin) -> None:
        """Go on after a layer that is like one that was measured."""
        self.trail.repeat(twin)
        self.times.append(self.times[twin.layer])

    def survey(self, routes: SkipEnds, device: torch.device) -> Survey:
        """Return the findings, once all layers are done."""
        with memory_for("the output"):
            self.trail.arrived = moved(self.trail.arrived, device)
        return self.trail.end(routes)


def walk_alone(
    training: Training,
    walks: list[SizeWalk],
    device: torch.device,
    pace: Pace,
    *,
    share: bool,
    all_sizes: bool,
) -> list[str]:
    """Take every size of micro-batch along the chain, layer by layer.

    Args:
        training: The chain, and how it is trained.
        walks: The sizes, the micro-batch's own first. Sizes at which a layer fails are removed.
        device: Where to measure.
        pace: How long to go on with each layer.
        share: Whether layers that are alike are measured once.
        all_sizes: Whether a layer may not fail at any size.

    Returns:
        Flags: the sizes that were given up, and why.

    Raises:
        GpipebalError: a layer failed at the micro-batch's own size, or, with `all_sizes`, at any.
    """
    twins = Alike[Twin](training.modules if share else (), by_value=True)
    bench = _Bench(training, walks, device, pace, all_sizes)
    for k in range(len(training.layers)):
        kinds = [training.kind_of_input(k, walk.trail.arrived) for walk in walks if share]
        shares = share and None not in kinds
        keys = list(enumerate(kinds)) if shares else []
        known = [twin for key in keys if (twin := twins.find(k, key)) is not None]
        # For all sizes or for none, because they are measured in turns.
        if shares and len(known) == len(walks):
            for walk, twin in zip(walks, known, strict=True):
                walk.repeat(twin)
        else:
            before = [walk.trail.arrived.numbers for walk in walks]
            reads = bench.pass_layer(k, notes_reads=shares and twins.differ[k])
            if len(walks) < len(before):
                twins.forget()  # they are numbered by size
            elif shares:
                for walk, key, numbers in zip(walks, keys, before, strict=True):
                    twins.add(k, key, Twin(k, numbers, walk.trail.arrived), reads)
        pace.told()
    return bench.notes


@dataclass
class _Bench:
    """The device, to which one layer comes after the other; see the arguments of `walk_alone`.

    Attributes:
        notes: Flags: the sizes that were given up, and why.
    """

    training: Training
    walks: list[SizeWalk]
    device: torch.device
    pace: Pace
    all_sizes: bool
    notes: list[str] = field(default_factory=list)

    def pass_layer(self, k: int, *, notes_reads: bool) -> set[str] | None:
        """Examine and measure a layer at all sizes, and go on after it.

        Returns:
            Which of its attributes it has read; None: that is not noted.
        """
        name, module = self.training.names[k], self.training.modules[k]
        # A copy of its own: it does no harm if a layer writes to its parameters.
        replica = replicate([name], [module], self.device, private=(0,))[0]
        subjects: dict[int, Subject] = {}
        with _reading(notes_reads) as reads:
            if not self.training.keep_modes:
                replica.train()  # what its parts do then may depend on its options
            for i, walk in enumerate(self.walks):
                # Its input comes to the device for every round: only one size is there at a time.
                start = walk.trail.arrived.value
                chain = self.training.chain_of(k, replica, self.device, start)
                if subjects:
                    chain.written = subjects[0].chain.written
                try:
                    self._survey(walk.trail, chain, finds_written=not subjects)
                    if reads is not None:
                        # It may read more when it is recomputed, as it will be clocked.
                        with _brought(chain):
                            chain.recompute()
                except GpipebalError as error:
                    self._give_up(i, error)
                else:
                    subjects[i] = Subject(chain)
        for i, times in _rounds(subjects, self.pace, self._give_up).items():
            self.walks[i].times.append(times)
        self.walks[:] = [self.walks[i] for i in subjects]
        return reads

    def _survey(self, trail: Trail, chain: Chain, *, finds_written: bool) -> None:
        """Find out all about a layer that needs no repeats, and go on after it.

        Args:
            trail: Has its input.
            chain: The layer.
            finds_written: Whether to find out the inputs that it writes to.
        """
        with memory_for(f"the input of layer {chain.names[0]!r}"):
            arrived = moved(trail.arrived, self.device, only=chain.pops[0])
        if finds_written:
            chain.find_written(0, arrived.value)
        trail.pass_layer(chain, 0, arrived)
        trail.arrived = moved(trail.arrived, _HOST)

    def _give_up(self, i: int, error: GpipebalError) -> None:
        # Only its text is kept: its traceback holds all that the layer had made.
        if self.all_sizes or not i:
            raise error
        self.notes.append(left_out(self.walks[i].rows, error))


@contextmanager
def _reading(wanted: bool) -> Iterator[set[str] | None]:
    """Note what a layer reads in a block, if that is wanted.

    A compiler would take what notes for a part of the layer, so the layer runs as it was written.
    """
    if not wanted:
        yield None
        return
    with run_eagerly(), names_read() as names:
        yield names


def _rounds(
    subjects: dict[int, Subject], pace: Pace, give_up: Callable[[int, GpipebalError], None]
) -> dict[int, Times]:
    """Measure a layer at every size, in turns; its input comes to the device for that.

    Args:
        subjects: The layer at each size, 0 being the micro-batch's own. A size that was examined,
            but fails here, where more memory is needed, is removed.
        pace: How long to go on.
        give_up: Called with such a size; may raise.
    """

    def runs(i: int, times: Times) -> bool:
        try:
            with _brought(subjects[i].chain):
                times.run_round(subjects[i], whole=False)
        except GpipebalError as error:
            if not is_out_of_memory(error):
                raise  # it did not fail when it was examined
            del subjects[i]
            give_up(i, error)
            return False
        return True

    found = {i: Times() for i in list(subjects) if runs(i, Times())}  # warms up
    done, deadline = 0, math.inf
    while done < pace.least or (done < pace.most and time.perf_counter() < deadline):
        started = time.perf_counter()
        found = {i: times for i, times in found.items() if runs(i, times)}
        if not done:
            deadline = started + pace.limit_of(found[0].forward[0][0] + found[0].backward[0][0])
        done += 1
    for layer in subjects[0].chain.layers:
        for parameter in layer.parameters():
            parameter.grad = None
    return found


@contextmanager
def _brought(chain: Chain) -> Iterator[None]:
    """Bring the input of a layer to the device for a block."""
    on_host = chain.start
    with memory_for(f"the input of layer {chain.names[0]!r}"):
        chain.start = value_to(on_host, chain.device, only=chain.pops[0])
    try:
        yield
    finally:
        chain.start = on_host


def join_times(layers: Sequence[Times]) -> Times:
    """Make one table of the times of layers that were measured alone, some more often."""
    joined = Times()
    for item in fields(Times):
        columns = [getattr(times, item.name) for times in layers]
        most = max(len(column) for column in columns)
        rows = getattr(joined, item.name)
        for i in range(most):
            rows.append([column[i][0] if i < len(column) else math.nan for column in columns])
    return joined


def moved(arrived: Arrived, device: torch.device, only: Sequence[Key] | None = None) -> Arrived:
    """Bring a value to a device, with all skips that wait, or only some of them."""
    return Arrived(value_to(arrived.value, device, only), arrived.numbers, arrived.skips)
