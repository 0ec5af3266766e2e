"""What the step of an optimizer needs: the state that it keeps, and temporary memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from operator import eq
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpipebal.pipeline.meter import optimizer_states
from gpipebal.pipeline.observers.ledger import Ledger
from gpipebal.pipeline.values.tensors import bytes_of
from gpipebal.profiler.chain.failures import said
from gpipebal.profiler.memory.sparse_gradients import gradient_like
from gpipebal.profiler.step.alike import global_hooks_left_out
from gpipebal.profiler.step.guessed import found_by_guesses
from gpipebal.profiler.step.optimizer import Maker, Optimizers
from gpipebal.profiler.step.step import LARGEST_STEPPED
from gpipebal.units import format_bytes

__all__ = [
    "CALLS_MODEL",
    "LARGEST_TABLE",
    "OptimizerNeeds",
    "optimizer_needs",
    "over_table",
    "second_step",
]

#: At most this many bytes of a table with a sparse gradient are stepped to find its memory, and of
#: a larger parameter whose values are guessed.
LARGEST_TABLE = 2**22
#: Why nothing is known of an optimizer that needs a closure.
CALLS_MODEL = "a step calls the model"

_Found = TypeVar("_Found")


class OptimizerNeeds(NamedTuple):
    """What an optimizer keeps, and what its step needs temporarily.

    Attributes:
        state: For each parameter, the bytes of its state; None: they are not known.
        peaks: Largest memory of the step of each parameter, alone, beyond what existed before;
            None: it is not known.
        left: For each parameter, bytes that the step of the parameter before left until its own
            step is over.
        before: For each parameter, the place of that parameter: the previous one of the same group;
            None: there is none.
        at_once: For each parameter, its group if that is stepped at once, so that `peaks` of its
            parameters add up; None: it is stepped by itself.
        why: Why some bytes are not known, by the name of the optimizer.
    """

    state: list[int | None]
    peaks: list[int | None]
    left: list[int]
    before: list[int | None]
    at_once: list[Any]
    why: dict[str, str]

    @property
    def together(self) -> bool:
        """Whether all parameters are stepped at once."""
        own = zip(self.at_once, self.peaks, strict=True)
        groups = {group for group, n_bytes in own if n_bytes or group is not None}
        return len(groups) == 1 and None not in groups


def optimizer_needs(maker: Maker, device_type: str) -> OptimizerNeeds:
    """Find the bytes of state that an optimizer keeps for each parameter, and those of its step.

    The optimizer takes a step on stand-ins, one for each kind (shape, strides, dtype, options,
    gradient). What many mini-batches have sparse gradients for is each place of a parameter. For
    parameters that it does not step, what it has already counts.

    A second step shows what it needs besides parameters, gradients and state. Optimizers of torch
    step a whole group at once on CUDA (``foreach``), and one after the other on a CPU, unless they
    are told otherwise. One after the other, the last intermediate result of a parameter may live
    until the next parameter has its own.

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
    at_once = [maker.group_of(k) if step.together else None for k, step in enumerate(found)]
    return OptimizerNeeds(
        [step.state_bytes for step in found],
        [step.peak_bytes for step in found],
        left,
        before,
        at_once,
        {maker.name_of(place): step.why for place, step in enumerate(found) if step.why},
    )


class _Step(NamedTuple):
    """What a step on one parameter keeps, needs, and leaves until the next parameter's.

    Where the optimizer cannot step a stand-in, `why` says why, and the bytes are None.
    """

    state_bytes: int | None = 0
    peak_bytes: int | None = 0
    together: bool = False
    left_bytes: int = 0
    why: str = ""


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
    whole, step = maker.parameters[place].detach(), partial(_step_alone, maker, place, device_type)
    ways: list[Callable[[], _Step]]
    if place in maker.sparse:  # torch does not work with sparse tensors without values
        ways = [partial(_step_table, maker, place, device_type)]
    else:
        ways = [partial(step, whole, on) for on in ("meta", "cpu")]
        if bytes_of(whole) > LARGEST_STEPPED:
            ways[1:] = [partial(_step_guessed, step, whole)]
    why = ""
    for way in ways:
        try:
            return way()
        except Exception as error:
            why = said(error)
    return _Step(None, None, why=why)


def _step_guessed(step: Callable[[Tensor, str], _Step], whole: Tensor) -> _Step:
    """Step a stand-in without memory for a parameter too large for one with values."""
    found = found_by_guesses(step, whole, LARGEST_TABLE, eq)
    if found is not None:
        return found
    n_bytes = format_bytes(bytes_of(whole))
    return _Step(None, None, why=f"it decides by values, and of a parameter there are {n_bytes}")


def _step_table(maker: Maker, place: int, device_type: str) -> _Step:
    """Step a stand-in for a parameter with a sparse gradient: a large one has fewer rows."""
    table, kind = maker.parameters[place].detach(), maker.sparse[place]

    def step(rows: int, entries: int) -> _Step:
        return _step_alone(maker, place, device_type, table[:rows], "cpu", entries)

    found = over_table(table, kind.n_entries, step, _on_line)
    few = _most_rows(table) // 2
    if kind.n_entries <= few:
        return found
    # What is kept is for all rows, however many entries there are.
    return found._replace(state_bytes=over_table(table, few, step, _on_line).state_bytes)


def _most_rows(table: Tensor) -> int:
    """Return how many rows of a table a stand-in has at most."""
    of_row = max(1, bytes_of(table) // max(1, len(table)))
    return max(4, LARGEST_TABLE // of_row)


def over_table(
    table: Tensor,
    n_entries: int,
    of_part: Callable[[int, int], _Found],
    on_line: Callable[[_Found, _Found, float], _Found],
) -> _Found:
    """Find what a step costs on a table with a sparse gradient, from steps on smaller ones.

    All costs are a line in the rows, as long as there are enough for the mini-batch. If that has
    many entries, rows and entries are fewer in one ratio, and all costs are a line in that.

    Args:
        table: The table.
        n_entries: Entries of its gradient.
        of_part: Tells what a step costs on so many rows, with so many entries.
        on_line: Goes on from one such cost to another one, and then so many times as far.
    """
    most = _most_rows(table)

    def at(rows: int, entries: int) -> _Found:
        if rows <= most:
            return of_part(rows, entries)
        less, more = (of_part(n, entries) for n in (most // 2, most))
        return on_line(less, more, (rows - most) / (most - most // 2))

    if 2 * n_entries <= most:
        return at(len(table), n_entries)
    few = most // 2
    less, more = (at(max(1, len(table) * n // n_entries), n) for n in (few // 2, few))
    return on_line(less, more, (n_entries - few) / (few - few // 2))


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
    maker: Maker, place: int, device_type: str, like: Tensor, on: str, entries: int = 0
) -> _Step:
    """Step one stand-in, and two, to see what the first leaves; arguments as of `second_step`."""

    def step(n_stand_ins: int) -> _Step:
        second = second_step(maker, [place] * n_stand_ins, device_type, like, on, entries)
        together = any(group.get("foreach") for group in second.stepper.param_groups)
        ledger = Ledger()
        ledger.hold([*second.stand_ins, *second.gradients, *second.state], 0)
        before = ledger.start_peak()
        with global_hooks_left_out(), ledger.watch(0):
            second.stepper.step()
        # A fused step is one kernel, and makes nothing in between.
        peak = 0 if second.is_fused else ledger.total_peak - before
        return _Step(sum(map(bytes_of, second.state)), peak, together)

    one = step(1)
    if one.together or not one.peak_bytes:
        return one
    return one._replace(left_bytes=max(0, (step(2).peak_bytes or 0) - one.peak_bytes))


class SecondStep(NamedTuple):
    """All that there is before an optimizer's second step.

    Attributes:
        stepper: The optimizer.
        stand_ins: Its parameters.
        gradients: Their gradients.
        state: What it keeps from the first step on.
        is_fused: Whether the caller's step is fused.
    """

    stepper: Optimizer | Optimizers
    stand_ins: list[nn.Parameter]
    gradients: list[Tensor]
    state: list[Tensor]
    is_fused: bool


def second_step(
    maker: Maker, places: Sequence[int], device_type: str, like: Tensor, on: str, entries: int
) -> SecondStep:
    """Step stand-ins for one parameter, or for a part of it, a first time.

    Args:
        maker: Makes the optimizer.
        places: The place of the parameter, once for each stand-in.
        device_type: Type of the device that the parameter will be on.
        like: What they are like.
        on: The device that they are on.
        entries: How many entries their gradients have, if these are sparse.
    """
    kind = maker.sparse.get(places[0])
    if kind is not None:
        kind = kind._replace(n_entries=entries)
    stand_ins = [nn.Parameter(torch.zeros_like(like, device=on)) for _ in places]
    for stand_in in stand_ins:
        # What is kept of earlier mini-batches is for all rows that they had.
        stand_in.grad = gradient_like(kind, stand_in, whole=True)
    stepper, is_fused = maker.make_plain(places, stand_ins, device_type)
    with global_hooks_left_out():
        stepper.step()  # makes its state
    gradients = [gradient_like(kind, stand_in) for stand_in in stand_ins]
    for stand_in, gradient in zip(stand_ins, gradients, strict=True):
        stand_in.grad = gradient
    state = [
        value
        for states in optimizer_states(stepper)
        for stand_in in stand_ins
        for value in states.get(stand_in, {}).values()
        if isinstance(value, Tensor)
    ]
    return SecondStep(stepper, stand_ins, gradients, state, is_fused)
