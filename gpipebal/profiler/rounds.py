"""Rounds: the clocked work of a profile.

A round sends one micro-batch through the whole chain and back, as a pipeline's worker does: the
output of a layer is the warm input of the next, everything that the backward needs stays alive
until its turn, and gradients add up. Two kinds of rounds take turns. A *layered* round cuts the
graph at every layer and clocks each; a *whole* round clocks the chain as one graph. Cutting has a
price of its own (a call into autograd per layer), and the whole rounds tell how high it is.

On a CPU as many threads run rounds side by side as partitions will work side by side, because they
share caches, memory bandwidth and the interpreter: all their times count.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gpipebal.errors import ModelError, ProfileError
from gpipebal.pipeline.microbatch import check_travels, flatten, unflatten

__all__ = [
    "Chain",
    "RoundStoppedError",
    "Rounds",
    "Tape",
    "as_leaves",
    "backward_gradients",
    "protect",
]


class RoundStoppedError(Exception):
    """A round was told to stop before its next layer."""


@dataclass
class Tape:
    """What a layered forward leaves for its backward: per layer, leaves in and tensors out."""

    inputs: list[list[Any]] = field(default_factory=list)
    outputs: list[list[Any]] = field(default_factory=list)


class Chain:
    """Replicated layers that run one micro-batch, layer by layer or as a whole.

    Args:
        names: Names of the layers.
        layers: Replicas of the layers.
        sample: One micro-batch, on the device.
        device: Where the layers are.

    Attributes:
        written: For each layer, the leaves of its input that it writes to. Those are copied
            before the layer runs, and the copy is not clocked.
        output_structure: Pytree of the last layer's output, once a round has run.
        stop: Set from outside to end a round before its next layer.
    """

    def __init__(
        self,
        names: Sequence[str],
        layers: Sequence[nn.Module],
        sample: Any,
        device: torch.device,
    ) -> None:
        self.names = names
        self.layers = layers
        self.device = device
        self.sample = flatten(sample)
        self.written: list[frozenset[int]] = [frozenset()] * len(names)
        self.output_structure: Any = None
        self.stop = threading.Event()
        self._clock: Callable[[], Any] = _cuda_clock if device.type == "cuda" else time.perf_counter

    def find_written(self, copy_of: Callable[[int], nn.Module]) -> set[int]:
        """Run a copy of every layer once, and note in `written` which inputs it writes to.

        Args:
            copy_of: Makes a copy of a layer that shares nothing with it.

        Returns:
            The layers that write to their own parameters, as some embeddings do.

        Raises:
            ProfileError: a layer failed.
        """
        leaves, structure = self.sample
        writers = set()
        for k in range(len(self.names)):
            layer = copy_of(k)
            parameters = [parameter._version for parameter in layer.parameters()]
            inputs = [protect(leaf) for leaf in as_leaves(leaves, wants=k > 0)]
            versions = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in inputs]
            output = self.call(k, inputs, structure, layer)
            if parameters != [parameter._version for parameter in layer.parameters()]:
                writers.add(k)
            self.written[k] = frozenset(
                i
                for i, leaf in enumerate(inputs)
                if isinstance(leaf, Tensor) and leaf._version != versions[i]
            )
            leaves, structure = flatten(output)
        return writers

    def layered(self) -> tuple[list[Any], list[Any]]:
        """Run a layered round; return forward and backward times of every layer.

        The times are pairs of points of the clock; `seconds_of` turns them into seconds.
        """
        forward: list[Any] = []
        backward: list[Any] = []
        tape = self.record(forward)
        gradients = backward_gradients(tape.outputs[-1])
        for _ in range(len(self.layers)):
            inputs, outputs = tape.inputs.pop(), tape.outputs.pop()
            roots = [
                (leaf, gradient)
                for leaf, gradient in zip(outputs, gradients, strict=True)
                if isinstance(leaf, Tensor) and leaf.requires_grad and gradient is not None
            ]
            start = self._clock()
            self.run_backward(roots, self.names[len(tape.inputs)])
            backward.append((start, self._clock()))
            gradients = [leaf.grad if isinstance(leaf, Tensor) else None for leaf in inputs]
            for leaf in inputs:
                if isinstance(leaf, Tensor):
                    leaf.grad = None
            del inputs, outputs, roots
        return forward, backward[::-1]

    def record(self, times: list[Any] | None = None) -> Tape:
        """Run the layered forward with a graph per layer."""
        tape = Tape()
        leaves, structure = self.sample
        for k in range(len(self.layers)):
            inputs = as_leaves(leaves, wants=k > 0)
            given = [
                protect(leaf) if i in self.written[k] else leaf for i, leaf in enumerate(inputs)
            ]
            start = self._clock()
            output = self.call(k, given, structure)
            if times is not None:
                times.append((start, self._clock()))
            leaves, structure = flatten(output)
            tape.inputs.append(inputs)
            tape.outputs.append(leaves)
            del given, output
        self.output_structure = structure
        return tape

    def whole(self) -> tuple[Any, Any]:
        """Run the chain as one graph; return its forward and its backward time."""
        leaves, structure = self.sample
        given = [protect(leaf) if k in self.written[0] else leaf for k, leaf in enumerate(leaves)]
        start = self._clock()
        for k in range(len(self.layers)):
            output = self.call(k, given, structure)
            given, structure = flatten(output)
        forward = (start, self._clock())
        gradients = backward_gradients(given)
        roots = [(o, g) for o, g in zip(given, gradients, strict=True) if g is not None]
        del given, output, gradients
        start = self._clock()
        self.run_backward(roots, None)
        return forward, (start, self._clock())

    def run_backward(self, roots: Sequence[tuple[Tensor, Tensor]], layer: str | None) -> None:
        """Run a backward of one layer, or of the whole chain.

        Args:
            roots: Tensors to start from, with their gradients.
            layer: Name of the layer; None: the whole chain.

        Raises:
            ProfileError: the backward failed.
            RoundStoppedError: `stop` is set.
        """
        self._check_stop()
        if not roots:
            return
        try:
            torch.autograd.backward([root[0] for root in roots], [root[1] for root in roots])
        except Exception as error:
            where = "the whole chain" if layer is None else f"layer {layer!r}"
            raise ProfileError(
                f"the backward of {where} failed: {type(error).__name__}: {error}\n"
                "Fix: make the plain model train first: model(sample).sum().backward()."
            ) from error

    def call(
        self, k: int, leaves: Sequence[Any], structure: Any, layer: nn.Module | None = None
    ) -> Any:
        """Run layer k, or another in its place.

        Raises:
            ProfileError: the layer failed; names it, its input and the original error.
            RoundStoppedError: `stop` is set.
        """
        self._check_stop()
        try:
            output = (self.layers[k] if layer is None else layer)(unflatten(leaves, structure))
            check_travels(output, self.names[k])
        except ModelError:
            raise
        except Exception as error:
            shapes = ", ".join(
                f"{tuple(leaf.shape)} {leaf.dtype}" if isinstance(leaf, Tensor) else repr(leaf)
                for leaf in leaves
            )
            raise ProfileError(
                f"layer {self.names[k]!r} (layer {k}) failed on a micro-batch of shape {shapes}: "
                f"{type(error).__name__}: {error}\n"
                "Fix: give a sample and a number of chunks that the model can be trained with."
            ) from error
        return output

    def _check_stop(self) -> None:
        if self.stop.is_set():
            raise RoundStoppedError


@dataclass
class Rounds:
    """Measured times, in seconds: of every layer, and of the chain as a whole.

    Attributes:
        forward: For each layered round, the forward time of every layer.
        backward: For each layered round, the backward time of every layer.
        whole_forward: The forward time of each whole round.
        whole_backward: The backward time of each whole round.
    """

    forward: list[list[float]] = field(default_factory=list)
    backward: list[list[float]] = field(default_factory=list)
    whole_forward: list[float] = field(default_factory=list)
    whole_backward: list[float] = field(default_factory=list)

    def run(
        self,
        chain: Chain,
        *,
        deadline: float,
        least: int,
        most: int,
        told: Callable[[], None],
    ) -> None:
        """Run rounds until the deadline: at least `least`, at most `most` of each kind.

        A round is a layered one followed by a whole one; `told` is called after each.
        """
        done = 0
        while done < least or (done < most and time.perf_counter() < deadline):
            forward, backward = chain.layered()
            whole_forward, whole_backward = chain.whole()
            self.forward.append(_seconds_of(forward))
            self.backward.append(_seconds_of(backward))
            self.whole_forward += _seconds_of([whole_forward])
            self.whole_backward += _seconds_of([whole_backward])
            done += 1
            told()

    def add(self, other: Rounds) -> None:
        """Take over another thread's times."""
        self.forward += other.forward
        self.backward += other.backward
        self.whole_forward += other.whole_forward
        self.whole_backward += other.whole_backward


def backward_gradients(outputs: Sequence[Any]) -> list[Tensor | None]:
    """Make gradients to start a backward with: random, as small as a mean loss makes them."""
    return [
        torch.randn_like(leaf) / max(1, leaf.numel())
        if isinstance(leaf, Tensor) and leaf.requires_grad
        else None
        for leaf in outputs
    ]


def as_leaves(leaves: Sequence[Any], *, wants: bool) -> list[Any]:
    """Cut tensors off from the graph; with `wants`, those that had a gradient get one again."""
    return [
        leaf.detach().requires_grad_(
            leaf.requires_grad and wants and (leaf.is_floating_point() or leaf.is_complex())
        )
        if isinstance(leaf, Tensor)
        else leaf
        for leaf in leaves
    ]


def protect(leaf: Any) -> Any:
    """Copy a tensor that a layer would write to."""
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _cuda_clock() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds_of(pairs: Sequence[tuple[Any, Any]]) -> list[float]:
    if pairs and not isinstance(pairs[0][0], float):
        for _, end in pairs:
            end.synchronize()
        return [max(0.0, start.elapsed_time(end) / 1e3) for start, end in pairs]
    return [end - start for start, end in pairs]
