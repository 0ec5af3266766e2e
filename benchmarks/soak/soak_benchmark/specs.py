"""What a step does: drawn from the seed of the soak and the number of the step alone."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from gpipebal.pipeline.values.parting import chunk_sizes
from gpipebal.schedule import CHECKPOINT_MODES, Action, Schedule, make_schedule
from soak_benchmark.faults import ERRORS, INTERRUPT, LOSS, Place
from soak_benchmark.slots import Slot

#: How a step is run, and how often.
WAYS = {
    "call": 24,
    "step gpipe": 16,
    "step 1f1b": 18,
    "two backwards": 8,
    "inputs alone": 5,
    "eval": 5,
    "no_grad": 6,
    "traced": 6,
    "metered": 4,
    "two threads": 8,
}

#: The share of steps in which something goes wrong, of those that can fail.
FAULTY = 0.25

#: Ways in which nothing is made to go wrong.
_SOUND = ("inputs alone", "eval", "no_grad", "metered")

_PHASES = {"F": "forward", "R": "recompute", "B": "backward"}


@dataclass(frozen=True)
class Spec:
    """One step.

    Attributes:
        number: Which step it is.
        slot: The slot that it uses.
        way: How it is run, one of `WAYS`.
        sizes: Rows of each micro-batch.
        chunks: Micro-batches asked for.
        checkpoint: The mode of each partition.
        input_grad: Whether the input needs a gradient.
        plans: Name of the fault at each place that has one.
        seed: Seed of its numbers.
        trains: Whether the parameters move if it succeeds.
    """

    number: int
    slot: int
    way: str
    sizes: tuple[int, ...]
    chunks: int
    checkpoint: tuple[Any, ...]
    input_grad: bool
    plans: dict[Place, str]
    seed: int
    trains: bool

    @property
    def schedule(self) -> str:
        """The schedule that the pipeline follows."""
        return "1f1b" if self.way == "step 1f1b" else "gpipe"

    @property
    def has_loss(self) -> bool:
        """Whether the pipeline computes the loss."""
        return self.way.startswith("step ")

    def make_schedule(self) -> Schedule:
        """Make the schedule of the actions that a pipeline in training mode runs."""
        return make_schedule(
            self.schedule, len(self.checkpoint), len(self.sizes), list(self.checkpoint)
        )

    def actions(self) -> list[Action]:
        """List these actions, one partition after the other."""
        return [action for row in self.make_schedule().rows for action in row]


def draw_spec(seed: int, number: int, slots: list[Slot]) -> Spec:
    """Draw a step."""
    draw = random.Random(f"{seed}/{number}")
    slot = draw.choice(slots)
    way = draw.choices(list(WAYS), list(WAYS.values()))[0]
    if way == "two threads" and slot.chain == "dropout":
        way = "call"  # which thread draws its seed first is nobody's to say
    chunks = draw.randint(1, 4)
    least = 3 * chunks if slot.chain == "norm" else 1
    sizes = chunk_sizes(draw.randint(least, least + 6), chunks)
    spec = Spec(
        number=number,
        slot=slot.number,
        way=way,
        sizes=tuple(sizes),
        chunks=chunks,
        checkpoint=tuple(draw.choices(CHECKPOINT_MODES, k=len(slot.balance))),
        input_grad=way == "inputs alone" or draw.random() < 0.5,
        plans={},
        seed=draw.randrange(2**31),
        trains=draw.random() < 0.5,
    )
    if way not in _SOUND and draw.random() < FAULTY:
        _plan(spec, slot, draw)
    return spec


def _plan(spec: Spec, slot: Slot, draw: random.Random) -> None:
    """Choose where and how the step fails; now and then in two partitions at about one time."""
    places = list(expected_visits(spec, slot))
    phase = draw.choice(sorted({place.phase for place in places}))
    places = [place for place in places if place.phase == phase]
    first = draw.choice(places)
    # Which thread is interrupted is not to choose: always the main one.
    interrupts = spec.way != "two threads"
    spec.plans[first] = draw.choice([*ERRORS, INTERRUPT] if interrupts else list(ERRORS))
    near = [
        place
        for place in places
        if LOSS not in (place.layer, first.layer)
        and slot.partition_of(place.layer) != slot.partition_of(first.layer)
        and (phase != "forward" or _cycle(place, slot) == _cycle(first, slot))
    ]
    if near and spec.plans[first] != INTERRUPT and draw.random() < 0.3:
        spec.plans[draw.choice(near)] = draw.choice(list(ERRORS))


def _cycle(place: Place, slot: Slot) -> int:
    """Return when a forward would run if each took as long as any other."""
    return place.micro_batch + slot.partition_of(place.layer)


def expected_visits(spec: Spec, slot: Slot) -> dict[Place, int]:
    """Return how often every layer runs if nothing goes wrong, by the schedule alone."""
    layers: list[list[str]] = [[] for _ in slot.balance]
    for name in slot.plain._modules:
        layers[slot.partition_of(name)].append(name)
    if spec.has_loss:
        layers[-1].append(LOSS)
    visits = {}
    for partition, kind, i in spec.actions():
        times = 2 if spec.way == "two backwards" and kind != "F" else 1
        for layer in layers[partition]:
            visits[Place(layer, _PHASES[kind], i)] = times
    return visits
