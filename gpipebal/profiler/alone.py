"""One layer at a time: measure a model that need not fit the device.

A layer comes to the device with its parameters, is examined and measured there at every size of
micro-batch, and leaves again. Its output waits on the host. So there is never more on the device
than one layer with its gradients, its input, and what it makes of that. In return, the effects of
neighbours on each other are not seen, and there is no run of the whole chain to compare with.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from gpipebal.errors import GpipebalError
from gpipebal.pipeline.process.eager import run_eagerly
from gpipebal.profiler.chain.chain import Chain
from gpipebal.profiler.chain.failures import is_out_of_memory, left_out, memory_for
from gpipebal.profiler.chain.gradients import needs_gradient
from gpipebal.profiler.chain.moving import value_to
from gpipebal.profiler.chain.numbers import Arrived, Numbers, distinct_numbers
from gpipebal.profiler.chain.value import SkipEnds, Value
from gpipebal.profiler.memory.layer_memory import LayerMemory, number_gradients
from gpipebal.profiler.memory.storages import measure_layer_memory
from gpipebal.profiler.replicas.identity import Alike
from gpipebal.profiler.replicas.reads import names_read
from gpipebal.profiler.replicas.replica import replicate
from gpipebal.profiler.survey import Survey, describe_skips, flops_of
from gpipebal.profiler.times.rounds import Pace, Subject, Times
from gpipebal.skip.tracker import Key
from gpipebal.units import count

__all__ = ["SizeWalk", "join_times", "walk_alone"]

_HOST = torch.device("cpu")


@dataclass
class SizeWalk:
    """How far one size of micro-batch has come along the chain.

    Attributes:
        rows: Its rows.
        arrived: What goes into the next layer, on the host.
        numbers: Numbers of its storages.
        inputs: Storages of the chain's input.
        memory: Memory of the layers so far.
        flops: Floating-point operations of the layers so far.
        times: For each layer so far, its times.
        skips: Storages of the skips so far.
    """

    rows: int
    arrived: Arrived
    numbers: Numbers
    inputs: tuple[int, ...]
    memory: list[LayerMemory] = field(default_factory=list)
    flops: list[int | None] = field(default_factory=list)
    times: list[Times] = field(default_factory=list)
    skips: dict[Key, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def start(cls, rows: int, value: Value, device: torch.device) -> SizeWalk:
        """Begin with what goes into the first layer, on the host.

        A pipeline on another device is given a copy of each micro-batch, which has no gaps.
        """
        if device.type != _HOST.type:
            with memory_for(f"a micro-batch of {count(rows, 'row')}"):
                dense = [
                    leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in value.leaves
                ]
                value = replace(value, leaves=dense)
        numbers = Numbers()
        arrived = Arrived.first(value, numbers)
        return cls(rows, arrived, numbers, arrived.storages)

    def survey(self, routes: SkipEnds, device: torch.device) -> Survey:
        """Return the findings, once all layers are done."""
        with memory_for("the output"):
            outputs = moved(self.arrived, device)
        gradients = number_gradients(self.memory, routes, self.numbers)
        skips = describe_skips(routes, self.skips, gradients)
        return Survey(self.memory, self.flops, self.numbers, self.inputs, outputs, skips, gradients)


@dataclass
class _Twin:
    """What was measured of a layer, for others like it: its index, and its output."""

    index: int
    inputs: list[int | None]
    outputs: Arrived


def walk_alone(
    names: Sequence[str],
    modules: Sequence[nn.Module],
    routes: SkipEnds,
    walks: list[SizeWalk],
    device: torch.device,
    *,
    share: bool,
    all_sizes: bool,
    pace: Pace,
    keep_modes: bool = True,
    out_dims: Any = None,
) -> list[str]:
    """Take every size of micro-batch along the chain, layer by layer.

    Args:
        names: Names of the layers.
        modules: The caller's layers.
        routes: Their skips.
        walks: The sizes, the micro-batch's own first. Sizes at which a layer fails are removed.
        device: Where to measure.
        share: Whether layers that are alike are measured once.
        all_sizes: Whether a layer may not fail at any size.
        pace: How long to go on with each layer.
        keep_modes: Whether parts of layers stay in training or evaluation mode; else all are
            trained.
        out_dims: Dimension along which the outputs of the last layer are joined; see `Chain`.

    Returns:
        Flags: the sizes that were given up, and why.

    Raises:
        GpipebalError: a layer failed at the micro-batch's own size, or, with `all_sizes`, at any.
    """
    twins = Alike[_Twin](modules if share else (), by_value=True)
    notes: list[str] = []

    def give_up(i: int, error: GpipebalError) -> None:
        # Only its text is kept: its traceback holds all that the layer had made.
        if all_sizes or not i:
            raise error
        notes.append(left_out(walks[i].rows, error))

    for k, (name, module) in enumerate(zip(names, modules, strict=True)):
        dims = out_dims if k == len(names) - 1 else None
        shares = share and not any(k in ends for ends in routes.values())  # skips have names
        keys = [(i, _kind(walk.arrived, k, dims)) for i, walk in enumerate(walks)] if shares else []
        known = [twin for key in keys if (twin := twins.find(k, key)) is not None]
        # For all sizes or for none, because they are measured in turns.
        if shares and len(known) == len(walks):
            for walk, twin in zip(walks, known, strict=True):
                _repeat(walk, twin)
        else:
            # A copy of its own: it does no harm if a layer writes to its parameters.
            replica = replicate([name], [module], device, private=(0,))[0]
            before = [list(walk.arrived.numbers) for walk in walks]
            subjects: dict[int, Subject] = {}
            with _reading(shares and twins.differ[k]) as reads:
                if not keep_modes:
                    replica.train()  # what its parts do then may depend on its options
                for i, walk in enumerate(walks):
                    try:
                        written = subjects[0].chain.written if subjects else None
                        subjects[i] = _survey_layer(
                            walk,
                            k,
                            name,
                            replica,
                            routes,
                            device,
                            dims,
                            written,
                            recomputes=reads is not None,
                        )
                    except GpipebalError as error:
                        give_up(i, error)
            for i, times in _rounds(subjects, pace, give_up).items():
                walks[i].times.append(times)
            if len(subjects) < len(walks):
                twins.forget()  # they are numbered by size
                walks[:] = [walks[i] for i in subjects]
            elif shares:
                for walk, key, numbers in zip(walks, keys, before, strict=True):
                    twins.add(k, key, _Twin(k, numbers, walk.arrived), reads)
            del replica, subjects
        pace.told()
    return notes


def _survey_layer(
    walk: SizeWalk,
    k: int,
    name: str,
    replica: nn.Module,
    routes: SkipEnds,
    device: torch.device,
    out_dims: Any,
    written: list[frozenset[int]] | None,
    *,
    recomputes: bool,
) -> Subject:
    """Find out all about a layer that needs no repeats, and go on after it.

    The inputs that it writes to are found out at the first size, when `written` is None. With
    `recomputes` it is also recomputed, as it will be clocked: only then it may read more.
    """
    popped = [key for key, (_, destination) in routes.items() if destination == k]
    on_host = walk.arrived.value
    with memory_for(f"the input of layer {name!r}"):
        arrived = moved(walk.arrived, device, only=popped)
    start = arrived.value
    chain = Chain([name], [replica], device, start, routes=routes, first=k, out_dims=out_dims)
    if written is None:
        chain.find_written(0, start)
    else:
        chain.written = written
    flops = flops_of(chain, 0, start)
    memory, passed = measure_layer_memory(chain, 0, arrived, walk.numbers)
    walk.memory.append(memory)
    walk.flops.append(flops)
    for key in chain.stashed(0):
        walk.skips[key] = distinct_numbers(passed.skips[key])
    walk.arrived = moved(passed, _HOST)
    # Its input comes again for every round: only one size is on the device at a time.
    chain.start = on_host
    if recomputes:
        with _brought(chain):
            chain.recompute()
    return Subject(chain)


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
            _round(subjects[i], times)
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


def _round(subject: Subject, times: Times) -> None:
    with _brought(subject.chain):
        times.run_round(subject, whole=False)


@contextmanager
def _brought(chain: Chain) -> Iterator[None]:
    """Bring the input of a layer to the device for a block."""
    on_host = chain.start
    with memory_for(f"the input of layer {chain.names[0]!r}"):
        chain.start = value_to(on_host, chain.device, only=chain.popped(0))
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


def _kind(arrived: Arrived, k: int, out_dims: Any) -> Hashable:
    """Return a key that layers share if what goes into them is alike."""
    same = {number: place for place, number in reversed(list(enumerate(arrived.numbers)))}
    inputs = tuple(
        (type(leaf), leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad, same[number])
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided
        else repr(leaf)
        for leaf, number in zip(arrived.value.leaves, arrived.numbers, strict=True)
    )
    value = arrived.value
    return inputs, str(value.structure), value.views, k == 0, str(out_dims)


def _repeat(walk: SizeWalk, twin: _Twin) -> None:
    """Go on after a layer that is like one that was measured."""
    known = dict(zip(twin.inputs, walk.arrived.numbers, strict=True))
    known[None] = None

    def own(number: int | None) -> int | None:
        if number not in known:
            assert number is not None
            known[number] = walk.numbers.new(walk.numbers.bytes[number])
        return known[number]

    memory = walk.memory[twin.index]
    handed = [own(number) for number in twin.outputs.numbers]
    walk.memory.append(
        replace(
            memory,
            outputs=distinct_numbers(handed),
            saved=distinct_numbers([own(number) for number in memory.saved]),
            handed_through=distinct_numbers([own(number) for number in memory.handed_through]),
            kept_outputs=distinct_numbers([own(number) for number in memory.kept_outputs]),
            written=distinct_numbers([own(number) for number in memory.written]),
        )
    )
    walk.flops.append(walk.flops[twin.index])
    walk.times.append(walk.times[twin.index])
    value = twin.outputs.value
    walk.numbers.note(handed, map(needs_gradient, value.leaves))
    handed_on = replace(value, skips=walk.arrived.value.skips)
    walk.arrived = Arrived(handed_on, handed, walk.arrived.skips)


def moved(arrived: Arrived, device: torch.device, only: Sequence[Key] | None = None) -> Arrived:
    """Bring a value to a device, with all skips that wait, or only some of them."""
    return Arrived(value_to(arrived.value, device, only), arrived.numbers, arrived.skips)
