"""The soak: steps one after the other, and counts of what lives between them."""

from __future__ import annotations

import faulthandler
import random
import sys
import threading
import time
from contextlib import nullcontext
from typing import Any

from benchmark_tools.machine import provenance

from soak_benchmark.faults import interruptible
from soak_benchmark.growth import count_all, find_growth
from soak_benchmark.slots import Slot, make_slots
from soak_benchmark.specs import draw_spec
from soak_benchmark.steps import SoakError, Tally, run_step

FORMAT, VERSION = "gpipebal-soak", 1

#: Points of the stored curves.
_POINTS = 50


def soak(
    steps: int,
    *,
    seed: int = 0,
    first: int = 0,
    every: int = 100,
    hang_after: float | None = None,
    progress: Any = None,
) -> dict[str, Any]:
    """Run the steps.

    Args:
        steps: How many.
        seed: Decides every step.
        first: Number of the first step; the pipelines of that time are made for it.
        every: Steps between two counts of what lives.
        hang_after: Seconds that one step may take, before the stacks of all threads are shown and
            the process ends; None: nobody looks.
        progress: Called with the number of steps so far, whenever there is a count.

    Returns:
        The record of the soak. Whether something has grown is for `find_growth` to say.

    Raises:
        SoakError: a step did not do what it should; it names the step.
    """
    tally = Tally()
    slots = make_slots(seed)
    samples: list[dict[str, float]] = []
    started = time.monotonic()
    slowest = 0.0
    main = threading.current_thread() is threading.main_thread()
    try:
        for slot in slots:
            slot.begin(first)
            slot.warm_up()
        with interruptible() if main else nullcontext():
            for number in range(first, first + steps):
                if hang_after is not None:
                    faulthandler.dump_traceback_later(hang_after, exit=True, file=sys.__stderr__)
                slowest = max(slowest, _seconds_of(seed, number, slots, tally))
                done = number - first + 1
                if done % every == 0:
                    for slot in slots:
                        slot.rest()
                    samples.append({"step": done, **count_all()})
                    if progress is not None:
                        progress(done)
    finally:
        faulthandler.cancel_dump_traceback_later()
        for slot in slots:
            slot.end()
    return {
        "format": FORMAT,
        "version": VERSION,
        "provenance": {**provenance(), "seed": seed, "first": first, "every": every},
        "steps": steps,
        "minutes": round((time.monotonic() - started) / 60, 2),
        "slowest_step_seconds": round(slowest, 3),
        **tally.record(),
        "growth": [growth._asdict() for growth in find_growth(samples)] if samples else [],
        "samples": len(samples),
        "curves": _thinned(samples),
    }


def _seconds_of(seed: int, number: int, slots: list[Slot], tally: Tally) -> float:
    """Run a step; return its seconds."""
    begun = time.monotonic()
    for slot in slots:
        slot.begin(number)
    spec = draw_spec(seed, number, slots)
    slot = slots[spec.slot]
    slot.shake(random.Random(f"{seed}/{number}/shake"))
    try:
        run_step(spec, slot, tally)
    except BaseException as error:
        text = (
            f"step {number} of seed {seed} failed: {error}\n"
            f"the step: {spec}\nits pipeline: chain {slot.chain!r}, balance {slot.balance}, "
            f"deferred {slot.is_deferred}, elder {slot.is_elder}\n"
            f"Again: make.py --seed {seed} --first {number} --steps 1; if that succeeds, what was "
            f"before matters: make.py --seed {seed} --steps {number + 1}"
        )
        if isinstance(error, SoakError):
            raise SoakError(text) from error
        error.add_note(text)
        raise
    return time.monotonic() - begun


def _thinned(samples: list[dict[str, float]]) -> dict[str, list[float]]:
    """Keep at most `_POINTS` of the samples, the first and the last among them, by name."""
    if not samples:
        return {}
    n_kept = min(_POINTS, len(samples))
    last = len(samples) - 1
    kept = [samples[round(k * last / max(1, n_kept - 1))] for k in range(n_kept)]
    return {name: [sample[name] for sample in kept] for name in kept[0]}
