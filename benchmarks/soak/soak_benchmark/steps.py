"""One step: a pipeline is run, in one of many ways, and compared with the plain model."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import gpipebal as gb
from gpipebal import simulator
from gpipebal.pipeline import measure_memory
from soak_benchmark.faults import LOSS, Place, Record, visit, wire
from soak_benchmark.layers import WIDTH
from soak_benchmark.slots import Slot
from soak_benchmark.specs import Spec, expected_visits

#: Largest difference, as a share of the largest value, or of 1 if that is larger.
TOLERANCE = 1e-9

#: Of the steps that move the parameters.
_RATE = 0.05


class SoakError(AssertionError):
    """Something that a pipeline promises did not hold."""


class Tally:
    """What a soak has done.

    Attributes:
        ways: Steps by way.
        faults: Faults that happened, by kind and phase.
        checks: Checks that held.
    """

    def __init__(self) -> None:
        self.ways: Counter[str] = Counter()
        self.faults: Counter[tuple[str, str]] = Counter()
        self.checks: Counter[str] = Counter()

    def check(self, name: str, holds: bool, found: object = "") -> None:
        """Count a check that holds; raise otherwise."""
        if not holds:
            raise SoakError(f"{name}: {found}")
        self.checks[name] += 1

    def record(self) -> dict[str, Any]:
        """Return what is stored."""
        return {
            "ways": dict(self.ways.most_common()),
            "faults": [
                {"kind": kind, "phase": phase, "times": times}
                for (kind, phase), times in sorted(self.faults.items())
            ],
            "checks": dict(self.checks.most_common()),
        }


class _Batch:
    """One mini-batch with its target; every row has its number in the last column."""

    def __init__(self, spec: Spec, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        rows = sum(spec.sizes)
        self.x = torch.randn(rows, WIDTH + 1, dtype=torch.float64, generator=generator)
        self.x[:, -1] = torch.arange(rows)
        self.target = torch.randn(rows, WIDTH, dtype=torch.float64, generator=generator)
        self.sizes = list(spec.sizes)
        self.x.requires_grad_(spec.input_grad)

    def twin(self) -> _Batch:
        """Return the same with an input of its own."""
        twin = _Batch.__new__(_Batch)
        twin.x = self.x.detach().clone().requires_grad_(self.x.requires_grad)
        twin.target, twin.sizes = self.target, self.sizes
        return twin


def _loss(output: Tensor, target: Tensor) -> Tensor:
    """Take the mean square over the rows; inside a pipeline it is noted, and can fail."""
    visit(LOSS, output)
    return wire(LOSS, (output[:, :-1] - target).square().mean(), output)


def run_step(spec: Spec, slot: Slot, tally: Tally) -> None:
    """Run a step and check what came out; after one that failed, run a sound one at once.

    Raises:
        SoakError: a check does not hold.
    """
    tally.ways[spec.way] += 1
    slot.level()
    pipe = slot.pipe
    pipe.chunks, pipe.checkpoint = spec.chunks, list(spec.checkpoint)
    if spec.way == "two threads":
        _two_threads(spec, slot, tally)
    elif spec.plans:
        _faulty(spec, slot, tally)
    else:
        _sound(spec, slot, tally)
    if spec.plans:
        slot.level()
        _sound(replace(spec, way="call", plans={}), slot, tally)
        tally.checks["usable at once after a fault"] += 1


def _attempt(
    spec: Spec, slot: Slot, batch: _Batch, record: Record
) -> tuple[Any, BaseException | None]:
    """Run a mini-batch in the way of the spec; return what came out, and what was raised."""
    try:
        with record.watching():
            return _RUNS.get(spec.way, _call)(spec, slot, batch), None
    except SoakError:
        raise
    except BaseException as error:
        return None, error


def _call(spec: Spec, slot: Slot, batch: _Batch) -> Tensor:
    output: Tensor = slot.pipe(batch.x)
    return _backward(spec, batch, output)


def _backward(spec: Spec, batch: _Batch, output: Tensor) -> Tensor:
    """Run the loss, and the backward in the way of the spec."""
    loss = (output[:, :-1] - batch.target).square().mean()
    twice = spec.way == "two backwards"
    if spec.way == "inputs alone":
        (batch.x.grad,) = torch.autograd.grad(loss, batch.x)
    elif spec.way != "no_grad":
        loss.backward(retain_graph=twice)
    if twice:
        loss.backward()
    return loss.detach()


def _step(spec: Spec, slot: Slot, batch: _Batch) -> Tensor:
    return slot.pipe.step(batch.x, target=batch.target, loss_fn=_loss, schedule=spec.schedule)


def _without_gradients(spec: Spec, slot: Slot, batch: _Batch) -> Tensor:
    with torch.no_grad():
        return _call(spec, slot, batch)


def _in_eval_mode(spec: Spec, slot: Slot, batch: _Batch) -> Tensor:
    slot.pipe.eval()
    try:
        return _call(spec, slot, batch)
    finally:
        slot.pipe.train()


def _traced(spec: Spec, slot: Slot, batch: _Batch) -> Tensor:
    with gb.trace(slot.pipe) as recorder:
        loss = _call(spec, slot, batch)
    found = sorted((e.partition, e.kind, e.micro_batch) for e in recorder.timeline.events)
    if found != sorted(tuple(action) for action in spec.actions()):
        raise SoakError(f"the trace has other actions than the schedule: {found}")
    return loss


def _metered(spec: Spec, slot: Slot, batch: _Batch) -> Tensor:
    with measure_memory(slot.pipe) as meter:
        loss = _call(spec, slot, batch)
    if not all(peak > 0 for peak in meter.peak_bytes):
        raise SoakError(f"the meter counted nothing: {meter.peak_bytes}")
    return loss


_RUNS: dict[str, Callable[[Spec, Slot, _Batch], Tensor]] = {
    "step gpipe": _step,
    "step 1f1b": _step,
    "no_grad": _without_gradients,
    "eval": _in_eval_mode,
    "traced": _traced,
    "metered": _metered,
}


def _sound(spec: Spec, slot: Slot, tally: Tally) -> None:
    """Run a mini-batch in which nothing goes wrong, and compare all of it."""
    mine = _Batch(spec, spec.seed)
    theirs = mine.twin()
    record = Record(spec.sizes, {})
    torch.manual_seed(spec.seed)
    loss, error = _attempt(spec, slot, mine, record)
    if error is not None:
        raise SoakError(f"a sound step raised {error!r}") from error
    expected = _plain(spec, slot, theirs, spec.seed)
    tally.check("loss", _close(loss, expected), (loss, expected))
    _compare_gradients(spec, slot, [mine], [theirs], tally)
    _compare_buffers(slot, tally)
    tally.check("input untouched", torch.equal(mine.x.detach(), theirs.x.detach()))
    if spec.way not in ("eval", "no_grad"):
        visits = expected_visits(spec, slot)
        tally.check("visits", dict(record.visits) == visits, _difference(record, visits))
    if spec.trains and spec.way not in ("inputs alone", "eval", "no_grad"):
        with torch.no_grad():
            for parameter in slot.pipe.parameters():
                assert parameter.grad is not None
                parameter -= _RATE * parameter.grad


def _plain(spec: Spec, slot: Slot, batch: _Batch, seed: int) -> Tensor:
    """Do with the plain model what was done with the pipeline."""
    slot.plain.train(spec.way != "eval")
    with torch.set_grad_enabled(spec.way != "no_grad"):
        output = slot.run_plain(batch.x.split(batch.sizes), seed)
        loss = _backward(spec, batch, output)
    slot.plain.train()
    return loss


def _faulty(spec: Spec, slot: Slot, tally: Tally) -> None:
    """Run a mini-batch in which something goes wrong, and look at what the caller gets."""
    record = Record(spec.sizes, spec.plans)
    torch.manual_seed(spec.seed)
    _, error = _attempt(spec, slot, _Batch(spec, spec.seed), record)
    _check_fault(spec, slot, record, error, tally)


def _check_fault(
    spec: Spec, slot: Slot, record: Record, error: BaseException | None, tally: Tally
) -> None:
    # The graph of a failed backward leads to the record, and the error's traceback to the graph:
    # a circle through C++ that Python cannot find. It is cut here, because it is ours.
    fired, record.fired = record.fired, []
    tally.check("the fault happens", bool(fired), (spec.plans, error))
    for place, planned in fired:
        tally.faults["SIGINT" if planned is None else type(planned).__name__, place.phase] += 1
    place, planned = next((f for f in fired if f[1] is error), fired[0])
    if planned is None:
        tally.check("the interrupt arrives", type(error) is KeyboardInterrupt, repr(error))
    else:
        tally.check("the error itself arrives", error is planned, (fired, repr(error)))
        notes = "\n".join(getattr(error, "__notes__", []))
        for wanted in _notes_of(place, slot):
            tally.check("its notes say where", wanted in notes, (wanted, notes))
        for other, _ in fired:
            if other != place:
                wanted = "also failed: " + _notes_of(other, slot)[0]
                tally.check("the other fault is in the notes", wanted in notes, (wanted, notes))
                _check_order(place, other, spec, slot, tally)
    tally.check("nothing runs after the end", not record.late, record.late)
    same = _are_equal(slot.pipe.parameters(), slot.plain.parameters())
    tally.check("parameters untouched by a fault", same)
    # Of two threads the other one has moved them.
    if slot.is_deferred and place.phase == "forward" and spec.way != "two threads":
        same = _are_equal(slot.pipe.buffers(), slot.plain.buffers())
        tally.check("deferred statistics untouched by a failed forward", same)


def _notes_of(place: Place, slot: Slot) -> list[str]:
    """Return what the notes of an error from a place have to say."""
    last = len(slot.balance) - 1
    partition = last if place.layer == LOSS else slot.partition_of(place.layer)
    notes = [f"in partition {partition}, {place.phase} of micro-batch {place.micro_batch}"]
    if place.phase != "backward":
        notes.append("in the loss" if place.layer == LOSS else f"in layer {place.layer!r}")
    return notes


def _check_order(first: Place, other: Place, spec: Spec, slot: Slot, tally: Tally) -> None:
    """Of two failed forwards the one that the schedule has first is raised."""
    if LOSS not in (first.layer, other.layer) and first.phase == other.phase == "forward":
        starts = _forward_starts(spec)
        partitions = [slot.partition_of(place.layer) for place in (first, other)]
        cycles = [
            (starts[partition, place.micro_batch], partition)
            for partition, place in zip(partitions, (first, other), strict=True)
        ]
        tally.check("the first failed forward is raised", cycles[0] < cycles[1], (first, other))


def _forward_starts(spec: Spec) -> dict[tuple[int, int], float]:
    """Tell when each partition's forward of each micro-batch starts if all actions are alike."""
    every = (1.0,) * len(spec.checkpoint)
    timeline = simulator.place(spec.make_schedule(), simulator.Durations(every, every, every))
    return {(e.partition, e.micro_batch): e.start for e in timeline.events if e.kind == "F"}


def _two_threads(spec: Spec, slot: Slot, tally: Tally) -> None:
    """Let two threads use one pipeline at once; a fault of one must not reach the other."""
    mine = [_Batch(spec, spec.seed + k) for k in range(2)]
    theirs = [batch.twin() for batch in mine]
    records = [Record(spec.sizes, spec.plans if k == 0 else {}) for k in range(2)]
    results: list[Any] = [None, None]

    def use(k: int) -> None:
        try:
            results[k] = _attempt(spec, slot, mine[k], records[k])
        except BaseException as error:
            results[k] = None, error

    threads = [threading.Thread(target=use, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sound = [1] if spec.plans else [0, 1]
    for k in sound:
        loss, error = results[k]
        if error is not None:
            raise SoakError(f"a sound step beside another raised {error!r}") from error
        expected = _plain(spec, slot, theirs[k], spec.seed)
        tally.check("loss beside another", _close(loss, expected), (loss, expected))
        visits = expected_visits(spec, slot)
        tally.check("visits", dict(records[k].visits) == visits, _difference(records[k], visits))
    if spec.plans:
        # Parameters have a part of the other's gradients too; the input has only its own.
        tally.check("input gradient beside a fault", _close(mine[1].x.grad, theirs[1].x.grad))
        _check_fault(spec, slot, records[0], results[0][1], tally)
    else:
        _compare_gradients(spec, slot, mine, theirs, tally)


def _compare_gradients(
    spec: Spec, slot: Slot, mine: Sequence[_Batch], theirs: Sequence[_Batch], tally: Tally
) -> None:
    for k, (left, right) in enumerate(zip(mine, theirs, strict=True)):
        tally.check("input gradient", _close(left.x.grad, right.x.grad), f"input {k}")
    for (name, p), q in zip(slot.pipe.named_parameters(), slot.plain.parameters(), strict=True):
        tally.check("gradient", _close(p.grad, q.grad), (name, p.grad, q.grad))


def _compare_buffers(slot: Slot, tally: Tally) -> None:
    for (name, p), q in zip(slot.pipe.named_buffers(), slot.plain.buffers(), strict=True):
        tally.check("buffer", _close(p, q), (name, p, q))


def _are_equal(mine: Iterable[Tensor], theirs: Iterable[Tensor]) -> bool:
    return all(torch.equal(p, q) for p, q in zip(mine, theirs, strict=True))


def _close(mine: Tensor | None, theirs: Tensor | None) -> bool:
    if mine is None or theirs is None:
        return mine is theirs
    limit = TOLERANCE * max(1.0, theirs.abs().max().item())
    return mine.shape == theirs.shape and (mine - theirs).abs().max().item() <= limit


def _difference(record: Record, visits: dict[Place, int]) -> list[tuple[Place, int, int]]:
    places = sorted({*record.visits, *visits})
    return [
        (place, record.visits[place], visits.get(place, 0))
        for place in places
        if record.visits[place] != visits.get(place, 0)
    ]
