"""Random numbers that do not depend on threads, on the order of cells, or on the balance.

torch has one default generator per device for the whole process. Workers that drew from it side by
side would get numbers in the order of the clock: another result in every run, and a recompute that
differs from its forward. So a layer that draws gets numbers from a generator of its own, seeded by
(mini-batch, layer, micro-batch): the same for forward and recompute, and the same for every
balance. The mini-batch's seed is drawn from the default generator of the caller, so that
`torch.manual_seed` rules as usual; a mini-batch that draws nothing leaves it as it was.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gpipebal.errors import ModelError
from gpipebal.pipeline.random_ops import catch_random_operations

__all__ = ["MiniBatchSeed", "OwnRandomness", "cell_seed", "draw_seed"]

# Operations without a generator argument draw from a default generator: one at a time.
_default_generators = threading.Lock()


def draw_seed() -> int:
    """Draw a mini-batch's seed from the default CPU generator."""
    return int(torch.randint(0, 2**62, (), dtype=torch.int64, device="cpu"))


def cell_seed(seed: int, layer: int | str, micro_batch: int) -> int:
    """Mix a mini-batch's seed with a layer and a micro-batch into a seed of 63 bits."""
    text = f"{seed}/{layer}/{micro_batch}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


class MiniBatchSeed:
    """The seed of a mini-batch, drawn when the first of its cells needs it."""

    def __init__(self) -> None:
        self._value: int | None = None
        self._drawing = threading.Lock()

    def __int__(self) -> int:
        with self._drawing:
            if self._value is None:
                self._value = draw_seed()
            return self._value


class OwnRandomness:
    """Random numbers of one micro-batch, from a generator of its own for each layer.

    Args:
        seed: Seed of the mini-batch.
        micro_batch: Which micro-batch it is.

    Attributes:
        drew: Whether any random operation ran inside `watching`.
    """

    __slots__ = ("_backward_of", "_generators", "_layer", "_micro_batch", "_seed", "drew")

    def __init__(self, seed: int | MiniBatchSeed, micro_batch: int) -> None:
        self.drew = False
        self._seed = seed
        self._micro_batch = micro_batch
        self._layer: int | str = 0
        self._backward_of: int | None = None
        self._generators: dict[torch.device, torch.Generator] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Let the random operations of this thread and block draw here."""
        with catch_random_operations(self._draw):
            yield

    def enter_layer(self, layer: int | str) -> None:
        """Turn to the generators of a layer, given by its place in the whole chain."""
        self._layer = layer
        if self._generators:
            self._generators = {}

    def enter_backward(self, partition: int) -> None:
        """Turn to the generators of a cell's backward."""
        self._backward_of = partition
        self.enter_layer(f"backward of partition {partition}")

    def _draw(self, operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if kwargs.get("generator") is not None:
            return operation(*args, **kwargs)
        takes = any(argument.name == "generator" for argument in operation._schema.arguments)
        if not takes and not _draws(operation, args, kwargs):
            return operation(*args, **kwargs)
        if self._backward_of is not None and torch.is_grad_enabled():
            raise ModelError(
                f"a layer of partition {self._backward_of} draws random numbers while it is run "
                "again in a backward, by torch.utils.checkpoint or the like, which could not make "
                "them those of the forward.\n"
                "Fix: let the pipeline recompute, GPipe(..., checkpoint='always'), and not the "
                "layer itself."
            )
        self.drew = True
        device = _device_of(args, kwargs)
        if device.type == "meta":
            return operation(*args, **kwargs)
        generator = self._generator(device)
        if takes:
            return operation(*args, **{**kwargs, "generator": generator})
        return _run_with_default(generator, operation, args, kwargs)

    def _generator(self, device: torch.device) -> torch.Generator:
        generator = self._generators.get(device)
        if generator is None:
            generator = torch.Generator(device)
            generator.manual_seed(cell_seed(int(self._seed), self._layer, self._micro_batch))
            self._generators[device] = generator
        return generator


#: Arguments that, if they are 0 or False, keep an operation from drawing at all.
_SWITCHES = ("dropout_p", "dropout", "p", "train", "training")


def _draws(operation: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Tell whether this call draws: attention and recurrent kernels do only with dropout."""
    for place, argument in enumerate(operation._schema.arguments):
        if argument.name in _SWITCHES:
            if place < len(args):
                value = args[place]
            else:
                value = kwargs.get(
                    argument.name, argument.default_value if argument.has_default_value() else None
                )
            if isinstance(value, (bool, int, float)) and not value:
                return False
    return True


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


def _run_with_default(generator: torch.Generator, operation: Any, args: Any, kwargs: Any) -> Any:
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
            return operation(*args, **kwargs)
        finally:
            generator.set_state(default.get_state())
            default.set_state(before)
