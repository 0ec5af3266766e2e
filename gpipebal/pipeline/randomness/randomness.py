"""Random numbers that do not depend on threads, on the order of cells, or on the balance.

torch has one default generator per device for the whole process. Workers that drew from it side by
side would get numbers in an order that depends on timing: another result in every run, and a
recompute that differs from its forward. So a layer that draws gets numbers from a generator of its
own, seeded by (mini-batch, layer, micro-batch): the same for forward and recompute, and the same
for every balance. The mini-batch's seed comes from the default generator (`seeds`), so that
`torch.manual_seed` works as usual.

The operation gets that generator as an argument, if it or one of its overloads takes one. The few
that take none (fused attention and recurrent kernels with dropout) read the process's default
generator, which is lent our state for as long as they run. A generator that a layer passes
explicitly is left alone in the forward; a recompute draws from copies of it in the states that it
had then.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpipebal.errors import ModelError
from gpipebal.pipeline.process.engine_state import current_backward, is_transformed
from gpipebal.pipeline.process.forks import open_in_child
from gpipebal.pipeline.randomness.lent import run_with_default
from gpipebal.pipeline.randomness.random_ops import (
    catch_random_operations,
    current_draw,
)
from gpipebal.pipeline.randomness.seeds import MiniBatchSeed, cell_seed

__all__ = [
    "OwnRandomness",
    "States",
    "current_randomness",
    "new_seed",
]

#: The generators that layers passed explicitly and their states, one for each draw, in order.
States = list[tuple[torch.Generator, Tensor]]

# For a generator that layers of two partitions share: its state is noted and drawn from in one go.
_given_generators = open_in_child(threading.Lock())


class OwnRandomness:
    """Random numbers of one micro-batch, from a generator of its own for each layer.

    Args:
        seed: Seed of the mini-batch.
        micro_batch: Which micro-batch it is.
        states: Where to note the states of generators that layers pass explicitly; None: nowhere.
        again: Whether to draw from those states, as they were noted, instead.

    Attributes:
        layer: The layer whose generators these are.
        draws: How often each layer has drawn from these generators, if it has.
    """

    def __init__(
        self,
        seed: int | MiniBatchSeed,
        micro_batch: int,
        states: States | None = None,
        *,
        again: bool = False,
    ) -> None:
        self._seed = seed
        self._micro_batch = micro_batch
        self._states = states
        self._again = again
        self._task: int | None = None
        self._n_given = 0
        self._n_inside = 0
        self.layer: int | str = 0
        self._backward_of: int | None = None
        self.draws: dict[int | str, int] = {}
        self._generators: dict[tuple[torch.device, int | str], torch.Generator] = {}

    def watching(self) -> AbstractContextManager[Any]:
        """Let the random operations of this thread and block draw here."""
        self._task = current_backward()
        return catch_random_operations(self._draw)

    def enter_layer(self, layer: int | str) -> None:
        """Switch to the generators of a layer, given by its place in the whole chain."""
        self.layer = layer
        self._n_inside = 0
        if self._generators:
            self._generators = {}

    def check_draws(self, forward: Mapping[int | str, int]) -> None:
        """Make sure that these are the numbers of a forward, whose draws are given.

        A layer that drew nothing this time has no wrong numbers: it may have kept what it drew.

        Raises:
            ModelError: a layer drew more often than in the forward, or less often.
        """
        for layer, n in self.draws.items():
            if forward.get(layer, 0) != n:
                raise ModelError(
                    "a checkpointed micro-batch cannot be recomputed: random numbers are drawn "
                    f"{n} times by layer {layer} of the chain, the loss being one more (expected "
                    f"{forward.get(layer, 0)} times, as in its forward: these are other ones).\n"
                    "Fix: let it draw the same in every pass (what is drawn once, such as first "
                    "values, by one forward of the layer before training), or checkpoint='never'."
                )

    def from_start(self, states: States, *, again: bool = False) -> OwnRandomness:
        """Return the numbers of this micro-batch as before any layer, to be drawn a second time.

        Args:
            states: As for the class.
            again: As for the class.
        """
        return OwnRandomness(self._seed, self._micro_batch, states, again=again)

    def enter_backward(self, partition: int) -> None:
        """Switch to the generators of a cell's backward."""
        self._backward_of = partition
        self.enter_layer(f"backward of partition {partition}")

    def seed_inside(self) -> Callable[[], int]:
        """Return a function that makes the seed for a mini-batch of a pipeline inside the layer."""
        self._n_inside += 1
        layer, check = f"{self.layer}, pipeline {self._n_inside}", self._check_not_run_again
        # Read now, and checked when the seed is wanted: the pipeline may draw nothing.
        grad = torch.is_grad_enabled()

        def make() -> int:
            check(grad)
            return cell_seed(int(self._seed), layer, self._micro_batch)

        return make

    def _draw(self, operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        way = _way_of(operation)
        given = way.given(args, kwargs)
        if given is not None and not _is_default(given):
            return self._draw_from_given(given, way, args, kwargs)
        if way.run is not operation and not _draws(operation, args, kwargs):
            return operation(*args, **kwargs)
        self._check_not_run_again(torch.is_grad_enabled())
        device = _device_of(args, kwargs)
        if device.type == "meta":
            return operation(*args, **kwargs)
        # Values of a parameter, as in a lazy layer, are drawn once: no recompute draws them again.
        if args and isinstance(args[0], nn.Parameter) and _writes_to_first(operation):
            generator = self._generator(device, f"{self.layer}, parameters")
        else:
            self.draws[self.layer] = self.draws.get(self.layer, 0) + 1
            generator = self._generator(device, self.layer)
        # An operation with a generator cannot be mapped by vmap: torch would run it row by row.
        # And nested tensors take no generator.
        if way.run is None or is_transformed() or _has_nested(args):
            return run_with_default(generator, operation, args, kwargs)
        return way.call(generator, args, kwargs)

    def _draw_from_given(
        self, generator: torch.Generator, way: _Way, args: Any, kwargs: Any
    ) -> Any:
        states = self._states
        if states is None or not self._again:
            with _given_generators:
                if states is not None:
                    states.append((generator, generator.get_state()))
                return way.call(generator, args, kwargs)
        known, state = states[self._n_given] if self._n_given < len(states) else (None, None)
        self._n_given += 1
        if known is generator and state is not None:
            copy = torch.Generator(generator.device)
            copy.set_state(state)
            return way.call(copy, args, kwargs)
        # A layer may make one anew in each pass, and then seeds it alike.
        if state is None or not torch.equal(generator.get_state(), state):
            raise ModelError(
                "a checkpointed micro-batch cannot be recomputed: a layer draws from a "
                "torch.Generator of its own otherwise than in its forward.\n"
                "Fix: let the layer draw the same in every pass, or checkpoint='never'."
            )
        return way.call(generator, args, kwargs)

    def _check_not_run_again(self, grad: bool) -> None:
        if grad and current_backward() not in (None, self._task):
            whose = "" if self._backward_of is None else f" of partition {self._backward_of}"
            raise ModelError(
                f"a layer{whose} draws random numbers while it is run "
                "again in a backward, by torch.utils.checkpoint or the like, which could not make "
                "them those of the forward.\n"
                "Fix: let the pipeline recompute, GPipe(..., checkpoint='always') or "
                "gpipebal.pipeline.with_recompute, and not the layer itself."
            )

    def _generator(self, device: torch.device, layer: int | str) -> torch.Generator:
        generator = self._generators.get((device, layer))
        if generator is None:
            generator = torch.Generator(device)
            generator.manual_seed(cell_seed(int(self._seed), layer, self._micro_batch))
            self._generators[device, layer] = generator
        return generator


def current_randomness() -> OwnRandomness | None:
    """Return the source of this thread's random numbers; None: torch's generators."""
    owner = getattr(current_draw(), "__self__", None)
    return owner if isinstance(owner, OwnRandomness) else None


def new_seed() -> MiniBatchSeed:
    """Return the seed of a mini-batch that this thread begins, perhaps inside a layer."""
    outer = current_randomness()
    return MiniBatchSeed(None if outer is None else outer.seed_inside())


class _Way(NamedTuple):
    """How a random operation is given a generator.

    Attributes:
        run: Takes the operation's arguments and ``generator=``; None: there is no such overload.
        place: Where the operation itself takes a generator by position.
    """

    run: Callable[..., Any] | None
    place: int | None

    def given(self, args: Any, kwargs: dict[str, Any]) -> torch.Generator | None:
        """Return the generator that the caller of the operation passed."""
        found = kwargs.get("generator")
        if found is None and self.place is not None and self.place < len(args):
            found = args[self.place]
        return found

    def call(self, generator: torch.Generator, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run the operation with a generator."""
        assert self.run is not None
        if self.place is not None and self.place < len(args):
            return self.run(*args[: self.place], generator, *args[self.place + 1 :], **kwargs)
        return self.run(*args, **{**kwargs, "generator": generator})


@functools.cache
def _way_of(operation: Any) -> _Way:
    if operation is torch.ops.aten.native_dropout.default:
        return _Way(_dropout, None)
    arguments = operation._schema.arguments
    for place, argument in enumerate(arguments):
        if argument.name == "generator":
            return _Way(operation, None if argument.kwarg_only else place)
    wanted = [(argument.name, str(argument.type)) for argument in arguments]
    packet = operation._overloadpacket
    for name in packet.overloads():
        overload = getattr(packet, name)
        others = [(argument.name, str(argument.type)) for argument in overload._schema.arguments]
        rest = [each for each in others if each[0] != "generator"]
        if len(rest) < len(others) and rest == wanted:
            return _Way(overload, None)
    return _Way(None, None)


def _dropout(
    input: Tensor, p: float, train: bool | None, *, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Do what `native_dropout` does, which dropout runs on CUDA, but with a generator."""
    if input.device.type == "cuda" and p < 1 and hasattr(torch.ops.aten, "_fused_dropout"):
        # The same kernel; its mask has the same bytes, with another dtype.
        output, mask = torch.ops.aten._fused_dropout(input, 1 - p, generator=generator)
        return output, mask.view(torch.bool)
    mask = torch.empty_like(input, dtype=torch.bool).bernoulli_(1 - p, generator=generator)
    return input * mask * (1 / (1 - p) if p < 1 else 0.0), mask


def _is_default(generator: torch.Generator) -> bool:
    # The dispatcher hands over the default generators in new Python objects.
    is_cuda = generator.device.type == "cuda"
    defaults = torch.cuda.default_generators if is_cuda else (torch.default_generator,)
    return any(generator._cdata == default._cdata for default in defaults)  # type: ignore[attr-defined]


@functools.cache
def _writes_to_first(operation: Any) -> bool:
    alias = operation._schema.arguments[0].alias_info
    return alias is not None and alias.is_write


#: Arguments that, if they are 0 or False, keep an operation from drawing at all.
_SWITCHES = ("dropout_p", "dropout", "p", "train", "training")


@functools.cache
def _switches_of(operation: Any) -> list[tuple[int, str, Any]]:
    """Return place, name and default of the arguments that may keep an operation from drawing."""
    if operation.namespace != "aten":
        return []  # what the arguments of other libraries' operations mean is not known
    return [
        (place, argument.name, argument.default_value if argument.has_default_value() else None)
        for place, argument in enumerate(operation._schema.arguments)
        if argument.name in _SWITCHES
    ]


def _draws(operation: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Tell whether this call draws: attention and recurrent kernels draw only with dropout."""
    for place, name, default in _switches_of(operation):
        value = args[place] if place < len(args) else kwargs.get(name, default)
        if isinstance(value, (bool, int, float)) and not value:
            return False
    return True


def _has_nested(args: Any) -> bool:
    return any(isinstance(argument, Tensor) and argument.is_nested for argument in args)


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
