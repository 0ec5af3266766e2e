"""Random numbers that do not depend on threads, on the order of cells, or on the balance.

torch has one default generator per device for the whole process. Workers that drew from it side by
side would get numbers in the order of the clock: another result in every run, and a recompute that
differs from its forward. So a layer that draws gets numbers from a generator of its own, seeded by
(mini-batch, layer, micro-batch): the same for forward and recompute, and the same for every
balance. The mini-batch's seed is drawn from the default generator of the caller, so that
`torch.manual_seed` rules as usual.

Watching every operation costs time, so it is done once: the first micro-batch of a new kind runs
with all layers watched, after that only the layers that drew.
"""

from __future__ import annotations

import hashlib
import threading
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["OwnRandomness", "cell_seed", "draw_seed"]

# Operations without a generator argument draw from a default generator: one at a time.
_default_generators = threading.Lock()


def draw_seed() -> int:
    """Draw a mini-batch's seed from the default CPU generator."""
    return int(torch.randint(0, 2**62, (), dtype=torch.int64, device="cpu"))


def cell_seed(seed: int, layer: int, micro_batch: int) -> int:
    """Mix a mini-batch's seed with a layer and a micro-batch into a seed of 63 bits."""
    text = f"{seed}/{layer}/{micro_batch}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


class OwnRandomness(TorchDispatchMode):
    """Let the random operations of a block draw from generators of its own.

    Attributes:
        drew: Whether any random operation ran inside the block.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.drew = False
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        self.drew = True
        if kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        generator = self._generator(_device_of(args, kwargs))
        if generator is None:
            return func(*args, **kwargs)
        if any(argument.name == "generator" for argument in func._schema.arguments):
            return func(*args, **{**kwargs, "generator": generator})
        return _run_with_default(generator, func, args, kwargs)

    def _generator(self, device: torch.device) -> torch.Generator | None:
        if device.type == "meta":
            return None
        if device not in self._generators:
            generator = torch.Generator(device)
            generator.manual_seed(self._seed)
            self._generators[device] = generator
        return self._generators[device]


def _device_of(args: Any, kwargs: dict[str, Any]) -> torch.device:
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, torch.Tensor):
            device = argument.device
            break
    else:
        device = torch.device(kwargs.get("device") or "cpu")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "cpu" else device


def _run_with_default(generator: torch.Generator, func: Any, args: Any, kwargs: Any) -> Any:
    # The operation reads the process's default generator: lend it our state, then restore.
    device = generator.device
    default = (
        torch.cuda.default_generators[device.index]
        if device.type == "cuda"
        else torch.default_generator
    )
    with _default_generators:
        before = default.get_state()
        default.set_state(generator.get_state())
        try:
            return func(*args, **kwargs)
        finally:
            generator.set_state(default.get_state())
            default.set_state(before)
