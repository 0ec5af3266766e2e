"""Chains of layers of several kinds and lengths, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

#: Numbers of layers and partitions that are timed.
SIZES = tuple(
    (n_layers, n_partitions)
    for n_layers in (100, 200, 1_000, 10_000, 100_000)
    for n_partitions in (8, 64, 512)
    if n_partitions < n_layers
)


class Chain(NamedTuple):
    """Whole nanoseconds of every layer, for one micro-batch."""

    forward: list[int]
    backward: list[int]

    @property
    def both(self) -> list[int]:
        """Forward + backward of every layer: what other rules are given."""
        return [f + b for f, b in zip(self.forward, self.backward, strict=True)]


def _exponential(rng: random.Random, n_layers: int) -> list[float]:
    return [rng.expovariate(1.0) for _ in range(n_layers)]


def _lognormal(rng: random.Random, n_layers: int) -> list[float]:
    return [rng.lognormvariate(0.0, 1.0) for _ in range(n_layers)]


def _noisy(rng: random.Random, n_layers: int) -> list[float]:
    return [rng.gauss(1.0, 0.01) for _ in range(n_layers)]


def _blocks(rng: random.Random, n_layers: int) -> list[float]:
    """Draw an embedding, equal blocks of four layers, and a head: a transformer."""
    block = [1.0, 0.1, 2.0, 0.1]
    middle = [block[k % 4] for k in range(n_layers - 2)]
    return [0.5, *middle, 3.0]


def _dominated(rng: random.Random, n_layers: int) -> list[float]:
    """Draw one layer that takes as long as half of all the others."""
    times = _exponential(rng, n_layers)
    times[rng.randrange(n_layers)] = n_layers / 2
    return times


#: How layers' times are drawn, by name.
KINDS: dict[str, Callable[[random.Random, int], list[float]]] = {
    "exponential": _exponential,
    "lognormal": _lognormal,
    "equal +-1 %": _noisy,
    "transformer": _blocks,
    "one dominates": _dominated,
}
#: Those of which many are drawn to see how far other rules are off.
RANDOM = ("exponential", "lognormal", "equal +-1 %")


def draw(kind: str, n_layers: int, seed: int = 0) -> Chain:
    """Draw a chain; the same seed gives the same one."""
    rng = random.Random(f"{kind} {n_layers} {seed}")
    times = KINDS[kind](rng, n_layers)
    forward = [max(1, round(1e6 * time)) for time in times]
    if kind == "transformer":
        return Chain(forward, [2 * time for time in forward])
    # Backwards take about twice as long, layer by layer a little more or less.
    return Chain(forward, [round(time * rng.uniform(1.5, 2.5)) for time in forward])
