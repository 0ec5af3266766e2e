"""Slots: a pipeline and the plain model of the same layers, made again now and then."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from gpipebal.pipeline import GPipe
from gpipebal.pipeline.randomness.randomness import OwnRandomness
from gpipebal.pipeline.randomness.seeds import draw_seed
from soak_benchmark.layers import CHAINS, WIDTH, Norm, make_chain

#: Steps after which the pipelines of the younger slots are made anew.
LIFETIME = 300


class Slot:
    """One pipeline of one chain, and the plain model that it is compared with.

    Args:
        number: Which slot it is.
        chain: Name of its chain.
        seed: Seed of the soak.
        is_elder: Whether its pipeline lives as long as the soak, and is never closed.
    """

    def __init__(self, number: int, chain: str, seed: int, *, is_elder: bool) -> None:
        self.number = number
        self.chain = chain
        self.is_elder = is_elder
        self.generation = -1
        self._seed = seed

    def begin(self, step: int) -> None:
        """Make the pipeline anew if its time has come; the old one is closed, or dropped."""
        # Not all slots in one step.
        generation = 0 if self.is_elder else (step + 31 * self.number) // LIFETIME
        if generation == self.generation:
            return
        draw = random.Random(f"{self._seed}/{self.number}/{generation}")
        # Drawn even if there is none, because what is drawn next must not depend on it.
        if draw.random() < 0.5:
            self.end()
        self.generation = generation
        n_layers = len(CHAINS[self.chain]())
        cuts = sorted(draw.sample(range(1, n_layers), draw.choice([0, 1, 1, 2, 2, 3])))
        bounds = [0, *cuts, n_layers]
        self.balance = [b - a for a, b in pairwise(bounds)]
        seed = draw.randrange(2**31)
        self.plain = make_chain(self.chain, seed)
        self.is_deferred = draw.random() < 0.5
        self.pipe = GPipe(
            make_chain(self.chain, seed),
            self.balance,
            deferred_batch_norm=self.is_deferred,
            timeout=draw.choice([None, 300.0]),
            threads_per_partition=1,
        )

    def warm_up(self) -> None:
        """Let the workers start."""
        self.pipe.eval()
        with torch.no_grad():
            self.pipe(torch.zeros(1, WIDTH + 1, dtype=torch.float64))
        self.pipe.train()

    def partition_of(self, layer: str) -> int:
        """Return the partition that a layer is in."""
        place = list(self.plain._modules).index(layer)
        return next(j for j in range(len(self.balance)) if place < sum(self.balance[: j + 1]))

    def shake(self, draw: random.Random) -> None:
        """Now and then close the pipeline of a younger slot, or go on with a copy of it."""
        if self.is_elder:
            return
        chance = draw.random()
        if chance < 0.02:
            self.pipe.close()
        elif chance < 0.04:
            self.pipe = copy.deepcopy(self.pipe)

    def rest(self) -> None:
        """Leave nothing that a count of what lives would find: for younger slots, no threads."""
        self.pipe.zero_grad()
        self.plain.zero_grad()
        if not self.is_elder:
            self.pipe.close()

    def end(self) -> None:
        """Close the pipeline, if there is one."""
        if self.generation >= 0:
            self.pipe.close()

    def level(self) -> None:
        """Give the plain model the pipeline's parameters and buffers; clear all gradients."""
        self.plain.load_state_dict(self.pipe.state_dict())
        self.pipe.zero_grad()
        self.plain.zero_grad()

    def run_plain(self, parts: Sequence[Tensor], seed: int) -> Tensor:
        """Run the plain model over micro-batches, with the random numbers of a pipeline."""
        norms = [module for module in self.plain.modules() if isinstance(module, Norm)]
        before = {norm: copy.deepcopy(norm.norm.state_dict()) for norm in norms}
        for norm in norms:
            norm.seen = []
        torch.manual_seed(seed)
        seed = draw_seed()
        outputs = []
        for i, part in enumerate(parts):
            randomness = OwnRandomness(seed, i)
            value: Any = part
            with randomness.watching():
                for k, layer in enumerate(self.plain):
                    randomness.enter_layer(k)
                    value = layer(value)
            outputs.append(value)
        for norm in norms:
            seen, norm.seen = norm.seen, None
            if self.is_deferred and self.plain.training:
                _defer(norm.norm, torch.cat(seen or []), before[norm])
        return torch.cat(outputs)


def _defer(norm: nn.BatchNorm1d, rows: Tensor, before: dict[str, Tensor]) -> None:
    """Let the running statistics be those of one mini-batch of all rows."""
    momentum = norm.momentum or 0.0
    norm.num_batches_tracked = before["num_batches_tracked"] + 1
    # New tensors, because the backward of torch's batch normalisation has the old ones.
    norm.running_mean = before["running_mean"] * (1 - momentum) + rows.mean(0) * momentum
    norm.running_var = before["running_var"] * (1 - momentum) + rows.var(0) * momentum


def make_slots(seed: int) -> list[Slot]:
    """Make two slots for each chain, one of them an elder."""
    return [
        Slot(2 * k + is_elder, chain, seed, is_elder=bool(is_elder))
        for k, chain in enumerate(CHAINS)
        for is_elder in (0, 1)
    ]
