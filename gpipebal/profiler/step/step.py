"""What the step of an optimizer costs: its time, its state, and what it needs temporarily."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpipebal.errors import ProfileError
from gpipebal.pipeline.meter import optimizer_states
from gpipebal.pipeline.observers.ledger import Ledger
from gpipebal.pipeline.values.tensors import bytes_of
from gpipebal.profiler.chain.clock import synchronize
from gpipebal.profiler.chain.failures import said
from gpipebal.profiler.memory.sparse_gradients import gradient_like
from gpipebal.profiler.step.alike import global_hooks_left_out
from gpipebal.profiler.step.optimizer import Maker
from gpipebal.units import format_bytes

__all__ = [
    "CALLS_MODEL",
    "OptimizerPeaks",
    "OptimizerState",
    "measure_optimizer",
    "median_time",
    "optimizer_peaks",
    "optimizer_state_bytes",
]

#: Repeats of each term; the median counts.
REPEATS = 5
#: At most this many bytes of parameters are stepped; for more, the time is scaled up.
LARGEST_STEPPED = 2**28
#: At most this many bytes of a table with a sparse gradient are stepped to find its memory.
LARGEST_TABLE = 2**22
#: Why nothing is known of an optimizer that needs a closure.
CALLS_MODEL = "a step calls the model"
#: Bytes that no cache holds: writing this many leaves nothing else in it.
BEYOND_CACHES = 2**26


class OptimizerState(NamedTuple):
    """What an optimizer keeps.

    Attributes:
        bytes: For each parameter, the bytes of its state; None: they are not known.
        why: Why some are not known, by the name of the optimizer.
    """

    bytes: list[int | None]
    why: dict[str, str]


def optimizer_state_bytes(maker: Maker) -> OptimizerState:
    """Find the bytes of state that an optimizer keeps for each parameter.

    The optimizer takes a step on stand-ins, one for each kind (shape, strides, dtype, options,
    gradient). What many mini-batches have sparse gradients for is each place of a parameter. For
    parameters that it does not step, what it has already counts.

    Args:
        maker: Makes the optimizer. The model's parameters are not changed.
    """
    found = _steps(maker, "cpu")
    return OptimizerState([step.state_bytes for step in found], _reasons(maker, found))


class OptimizerPeaks(NamedTuple):
    """What an optimizer's step needs temporarily.

    Attributes:
        bytes: Largest memory of the step of each parameter, alone, beyond what existed before;
            None: it is not known.
        left: For each parameter, bytes that the step of the parameter before left until its own
            step is over.
        before: For each parameter, the place of that parameter: the previous one of the same group;
            None: there is none.
        at_once: For each parameter, its group if that is stepped at once, so that `bytes` of its
            parameters add up; None: it is stepped by itself.
        why: Why some bytes are not known, by the name of the optimizer.
    """

    bytes: list[int | None]
    left: list[int]
    before: list[int | None]
    at_once: list[Any]
    why: dict[str, str]

    @property
    def together(self) -> bool:
        """Whether all parameters are stepped at once."""
        own = zip(self.at_once, self.bytes, strict=True)
        groups = {group for group, n_bytes in own if n_bytes or group is not None}
        return len(groups) == 1 and None not in groups


def optimizer_peaks(maker: Maker, device_type: str) -> OptimizerPeaks:
    """Find the bytes that an optimizer's step needs besides parameters, gradients and state.

    The optimizer takes a second step on stand-ins. Optimizers of torch step a whole group at once
    on CUDA (``foreach``), and one after the other on a CPU, unless they are told otherwise. One
    after the other, the last intermediate result of a parameter may live until the next parameter
    has its own.

    Args:
        maker: Makes the optimizer. The model's parameters are not changed.
        device_type: Type of the device that they will be on.
    """
    found = _steps(maker, device_type)
    left: list[int] = []
    before: list[int | None] = []
    # Groups are stepped one after the other, and nothing is left from one group to the next.
    latest: dict[Any, int] = {}
    for place, is_stepped in enumerate(maker.stepped):
        earlier = latest.get(maker.group_of(place)) if is_stepped else None
        before.append(earlier)
        left.append(0 if earlier is None else found[earlier].left_bytes)
        if is_stepped:
            latest[maker.group_of(place)] = place
    peaks = [step.peak_bytes for step in found]
    # Of an optimizer whose groups are not known there is one.
    groups = [maker.group_of(place) or () for place in range(len(found))]
    at_once = [g if step.together else None for g, step in zip(groups, found, strict=True)]
    return OptimizerPeaks(peaks, left, before, at_once, _reasons(maker, found))


class _Step(NamedTuple):
    """What a step on one parameter keeps, needs, and leaves until the next parameter's.

    Where the optimizer cannot step a stand-in, `why` says why, and the bytes are None.
    """

    state_bytes: int | None = 0
    peak_bytes: int | None = 0
    together: bool = False
    left_bytes: int = 0
    why: str = ""


class _Part(NamedTuple):
    """The first rows of a table, and how many entries its sparse gradient has."""

    rows: int
    entries: int


def _reasons(maker: Maker, found: Sequence[_Step]) -> dict[str, str]:
    return {maker.name_of(place): step.why for place, step in enumerate(found) if step.why}


def _steps(maker: Maker, device_type: str) -> list[_Step]:
    known: dict[Any, _Step] = {}
    found = []
    for place, is_stepped in enumerate(maker.stepped):
        if not is_stepped:
            found.append(_Step(maker.idle_bytes(place)))
            continue
        kind = maker.kind_of(place)
        if kind not in known:
            known[kind] = _try_step(maker, place, device_type)
        found.append(known[kind])
    return found


def _try_step(maker: Maker, place: int, device_type: str) -> _Step:
    """Step a stand-in without memory, or, because some optimizers read values, one on the CPU."""
    if maker.needs_closure_at(place):
        return _Step(None, None, why=CALLS_MODEL)
    if place in maker.sparse:  # torch does not work with sparse tensors without values
        ways = [partial(_step_table, maker, place, device_type)]
    else:
        ways = [partial(_step_alone, maker, place, device_type, on=on) for on in ("meta", "cpu")]
    why, n_bytes = "", bytes_of(maker.parameters[place])
    for way in ways:
        if why and n_bytes > LARGEST_STEPPED:
            why = f"it reads values, and of a parameter there are {format_bytes(n_bytes)}"
            break
        try:
            return way()
        except Exception as error:
            why = said(error)
    return _Step(None, None, why=why)


def _step_table(maker: Maker, place: int, device_type: str) -> _Step:
    """Step a stand-in for a parameter with a sparse gradient: a large one has fewer rows.

    All bytes are then a line in the rows, as long as there are enough for the mini-batch. If that
    has many entries, rows and entries are fewer in one ratio, and all bytes are a line in that.
    """
    table, kind = maker.parameters[place], maker.sparse[place]
    of_row = max(1, bytes_of(table) // max(1, len(table)))
    most = max(4, LARGEST_TABLE // of_row)

    def step(rows: int, entries: int) -> _Step:
        part = _Part(rows, entries)
        if rows <= most:
            return _step_alone(maker, place, device_type, on="cpu", part=part)
        less, more = (step(n, entries) for n in (most // 2, most))
        return _on_line(less, more, (rows - most) / (most - most // 2))

    if 2 * kind.n_entries <= most:
        return step(len(table), kind.n_entries)
    few = most // 2
    less, more = (step(max(1, len(table) * n // kind.n_entries), n) for n in (few // 2, few))
    found = _on_line(less, more, (kind.n_entries - few) / (few - few // 2))
    # What is kept is for all rows, however many entries there are.
    return found._replace(state_bytes=step(len(table), few).state_bytes)


def _on_line(less: _Step, more: _Step, times: float) -> _Step:
    """Go on from one step to another one, and then so many times as far."""

    def at(one: int | None, other: int | None) -> int:
        assert one is not None and other is not None
        return max(other, other + math.ceil((other - one) * times))

    return more._replace(
        state_bytes=at(less.state_bytes, more.state_bytes),
        peak_bytes=at(less.peak_bytes, more.peak_bytes),
        left_bytes=at(less.left_bytes, more.left_bytes),
    )


def _step_alone(
    maker: Maker, place: int, device_type: str, *, on: str, part: _Part | None = None
) -> _Step:
    one = _step_some(maker, [place], device_type, on, part)
    if one.together or not one.peak_bytes:
        return one
    two = _step_some(maker, [place, place], device_type, on, part)
    return one._replace(left_bytes=max(0, (two.peak_bytes or 0) - one.peak_bytes))


def _step_some(
    maker: Maker, places: Sequence[int], device_type: str, on: str, part: _Part | None
) -> _Step:
    """Step stand-ins for parameters, each for the one in its place, or for a part of it."""
    stand_ins: list[nn.Parameter] = []
    kinds = [maker.sparse.get(place) for place in places]
    if part is not None:
        kinds = [None if one is None else one._replace(n_entries=part.entries) for one in kinds]
    for place, kind in zip(places, kinds, strict=True):
        parameter = maker.parameters[place].detach()
        stand_in = parameter if part is None else parameter[: part.rows]
        stand_ins.append(nn.Parameter(torch.zeros_like(stand_in, device=on)))
        # What is kept of earlier mini-batches is for all rows that they had.
        stand_ins[-1].grad = gradient_like(kind, stand_ins[-1], whole=True)
    stepper, is_fused = maker.make_plain(places, stand_ins, device_type)
    together = any(group.get("foreach") for group in stepper.param_groups)
    with global_hooks_left_out():
        stepper.step()  # makes its state
    for stand_in, kind in zip(stand_ins, kinds, strict=True):
        if kind is not None:
            stand_in.grad = gradient_like(kind, stand_in)
    state = [
        value
        for states in optimizer_states(stepper)
        for stand_in in stand_ins
        for value in states.get(stand_in, {}).values()
        if isinstance(value, Tensor)
    ]
    ledger = Ledger()
    ledger.hold([*stand_ins, *(stand_in.grad for stand_in in stand_ins), *state], 0)
    before = ledger.start_peak()
    with global_hooks_left_out(), ledger.watch(0):
        stepper.step()
    # A fused step is one kernel, and makes nothing in between.
    peak = 0 if is_fused else ledger.total_peak - before
    return _Step(sum(map(bytes_of, state)), peak, together)


def measure_optimizer(
    maker: Maker,
    device: torch.device,
    *,
    one_of: Sequence[Sequence[nn.Parameter]] | None = None,
) -> float:
    """Return the seconds of an optimizer's step, on copies of the parameters.

    Where only some parameters are stepped, the time of all is scaled up from them: by the bytes
    that a step works on, and by itself for each way in which parameters are stepped.

    Args:
        maker: Makes the optimizer. The model's parameters are not changed.
        device: Where they will be.
        one_of: The parameters of each layer: step only those of the layer with most to step, and
            use no more memory than they need. None: all, or enough of them to tell.

    Raises:
        ProfileError: the optimizer failed.
    """
    places = [place for place, is_stepped in enumerate(maker.stepped) if is_stepped]
    shares: dict[Any, list[int]] = {}
    is_whole = one_of is None and _bytes_in(maker, places) <= LARGEST_STEPPED
    for place in places:
        shares.setdefault(None if is_whole else maker.way_of(place), []).append(place)
    return sum((_time_of_share(maker, share, device, one_of) for share in shares.values()), 0.0)


def _time_of_share(
    maker: Maker,
    places: Sequence[int],
    device: torch.device,
    one_of: Sequence[Sequence[nn.Parameter]] | None,
) -> float:
    """Return the seconds of a step on the parameters in these places; see `measure_optimizer`."""
    chosen: list[int] = []
    left = LARGEST_STEPPED
    for place in places if one_of is None else ():
        n_bytes = bytes_of(maker.parameters[place])
        if not chosen or n_bytes <= left:
            chosen.append(place)
            left -= n_bytes
    for layer in one_of or ():
        own = set(map(id, layer))
        those = [place for place in places if id(maker.parameters[place]) in own]
        chosen = max(chosen, those, key=lambda some: _bytes_in(maker, some))
    n_bytes = _bytes_in(maker, chosen)
    try:
        copies = (maker.parameters[place].detach().to(device, copy=True) for place in chosen)
        stepped = [nn.Parameter(copied) for copied in copies]
        stepper, kinds = maker.make(chosen, stepped), [maker.sparse.get(k) for k in chosen]

        def prepare() -> None:
            for kind, parameter in zip(kinds, stepped, strict=True):
                parameter.grad = gradient_like(kind, parameter)
            # Before a step there is a backward of the whole model: nothing is left in the caches.
            elsewhere.fill_(0.0)

        def run_step() -> None:
            stepper.step()
            stepper.zero_grad()

        beyond = BEYOND_CACHES if one_of is None else min(BEYOND_CACHES, n_bytes)
        elsewhere = torch.empty(beyond // 4, dtype=torch.float32, device=device)
        with global_hooks_left_out():
            seconds = median_time(run_step, device, prepare)
    except Exception as error:
        raise ProfileError(
            f"the optimizer failed: {said(error)}\n"
            "Fix: give a callable that makes an optimizer of a list of parameters, such as "
            "lambda parameters: torch.optim.SGD(parameters, lr=0.1)."
        ) from error
    done = _worked_on(maker, chosen)
    return seconds * _worked_on(maker, places) / done if done else seconds


def _bytes_in(maker: Maker, places: Sequence[int]) -> int:
    return sum(bytes_of(maker.parameters[place]) for place in places)


def _worked_on(maker: Maker, places: Sequence[int]) -> int:
    """Return the bytes of parameters; of those with sparse gradients only the entries' bytes."""
    found = 0
    for place in places:
        parameter, kind = maker.parameters[place], maker.sparse.get(place)
        found += bytes_of(parameter) if kind is None else kind.bytes_for(parameter)
    return found


def median_time(
    work: Callable[[], Any], device: torch.device, prepare: Callable[[], None] = lambda: None
) -> float:
    """Clock some work; `prepare` runs before each repeat, and is not clocked."""
    prepare()
    work()
    times = []
    for _ in range(REPEATS):
        prepare()
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)
