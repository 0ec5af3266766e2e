"""Chain: replicas of layers that run one micro-batch, layer by layer or in one piece.

Layer by layer, every layer is a small autograd graph of its own, cut off at detached inputs, as a
pipeline cuts at its partitions. What a layer stashes for a later one bypasses the chain, and is cut
in the same way: a popped value is a further input of its layer, a stashed one a further output.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gpipebal.errors import ModelError
from gpipebal.pipeline.process.caller import without_autocast
from gpipebal.pipeline.process.phase import phase
from gpipebal.pipeline.values.dims import Dim
from gpipebal.pipeline.values.gradients import without_the_rest
from gpipebal.pipeline.values.microbatch import Call, check_travels, flatten, unflatten
from gpipebal.profiler.chain.clock import Clock, Span
from gpipebal.profiler.chain.failures import (
    backward_failed,
    forward_failed,
    shapes_of,
    whole_backward_failed,
)
from gpipebal.profiler.chain.gradients import from_before, needs_gradient
from gpipebal.profiler.chain.outputs import dims_of_leaves
from gpipebal.profiler.chain.value import (
    Record,
    SkipEnds,
    Value,
    as_leaves,
    cloned,
    random_gradients,
    roots_of,
    take_gradients,
)
from gpipebal.profiler.replicas.foreign import Watch
from gpipebal.skip.tracker import Key, Skips, using

__all__ = ["Chain", "RoundStoppedError"]


class RoundStoppedError(Exception):
    """A round was told to stop before its next layer."""


class Chain:
    """Replicated layers, or a run of them.

    Args:
        names: Names of the layers.
        layers: Replicas of the layers.
        device: Where they are.
        start: The input of the first layer; its tensors are on the device.
        routes: Skips of the whole chain.
        first: Index of the first layer in the whole chain.
        only_inputs: Whether a backward must make gradients of nothing but the inputs.
        out_dims: Dimension along which the outputs of several micro-batches are joined, if the last
            of these layers gives the output of the chain; as `GPipe` takes it.

    Attributes:
        only_inputs: As given.
        shares: Whether the parameters have the memory of the caller's when `find_written` runs.
        has_skips: Whether there are skips in the whole chain.
        pops: For each layer, the skips that it pops, in the order of their leaves in its input.
        stashes: For each layer, the skips that it stashes for later layers.
        written: For each layer, which of its inputs (popped ones count after the others) it writes
            to. Those are copied before the layer runs, and the copy is not clocked.
        stop: Set from outside to end a round before its next layer.
        within: Makes the context in which a layer's own code runs, forward and backward.
    """

    shares = False

    def __init__(
        self,
        names: Sequence[str],
        layers: Sequence[nn.Module],
        device: torch.device,
        start: Value,
        *,
        routes: SkipEnds | None = None,
        first: int = 0,
        only_inputs: bool = False,
        out_dims: Any = None,
    ) -> None:
        self.names = names
        self.layers = list(layers)
        self.device = device
        self.start = start
        self.first = first
        self.written: list[frozenset[int]] = [frozenset()] * len(names)
        self.stop = threading.Event()
        self.clock = Clock(device)
        self.within: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.only_inputs, self.has_skips = only_inputs, bool(routes)
        self._out_dims = out_dims
        self.pops: list[list[Key]] = [[] for _ in names]
        self.stashes: list[list[Key]] = [[] for _ in names]
        for key, (source, destination) in (routes or {}).items():
            if source == destination:
                continue  # both ends are inside one layer
            if 0 <= source - first < len(names):
                self.stashes[source - first].append(key)
            if 0 <= destination - first < len(names):
                self.pops[destination - first].append(key)

    def inputs(self, k: int, value: Value) -> list[Any]:
        """Return the leaves that go into layer k: its input, then what it pops."""
        return value.leaves_with(self.pops[k])

    def outputs(self, k: int, value: Value) -> list[Any]:
        """Return the leaves that came out of layer k: its output, then what it stashed."""
        return value.leaves_with(self.stashes[k])

    def gradients(self, k: int, value: Value) -> list[Tensor | None]:
        """Make random gradients for what came out of layer k.

        Raises:
            BalanceError: the dimensions of the output do not fit.
        """
        dims: list[Dim] = []
        if k == len(self.layers) - 1:
            dims = dims_of_leaves(self._out_dims, value.leaves, value.structure)
        return random_gradients(self.outputs(k, value), dims)

    def prepare(
        self,
        k: int,
        value: Value,
        *,
        wants: bool,
        protect: bool = False,
        inside: bool = False,
    ) -> tuple[list[Any], list[Any]]:
        """Cut off the inputs of layer k, and copy those that it writes to, or, with `protect`, all.

        Args:
            k: Index of the layer.
            value: What goes into it.
            wants: Whether the gradients of its inputs are wanted.
            protect: Whether to copy all inputs.
            inside: Whether the inputs are not to be leaves, but as another layer would give them:
                their gradients go on to that, and are not kept.

        Returns:
            The leaves of autograd (with `inside` what stands for them), and what the layer is to be
            given.
        """
        torch.clear_autocast_cache()  # a block that was made before has a cache of its own
        inputs = as_leaves(self.inputs(k, value), wants=wants and self.first + k > 0)
        if inside:
            inputs = from_before(inputs)
        places = range(len(inputs)) if protect else self.written[k]
        return inputs, cloned(inputs, places, value.views)

    def call(
        self,
        k: int,
        given: list[Any],
        value: Value,
        *,
        spans: list[Span] | None = None,
    ) -> Value:
        """Run layer k; clock it if `spans` are given.

        Args:
            k: Index of the layer.
            given: Its input, from `prepare`. Emptied, to hold nothing that the layer frees.
            value: Gives the structure of the input, and the skips that pass the layer.
            spans: Its time is appended here.

        Raises:
            ProfileError: the layer failed; names it, its input and the original error.
            RoundStoppedError: `stop` is set.
        """
        self._check_stop()
        with self.within():  # values of the caller's own classes are taken apart by their own code
            return self._called(k, given, value, spans)

    def _called(self, k: int, given: list[Any], value: Value, spans: list[Span] | None) -> Value:
        shapes = shapes_of(given)
        arrived, start = {}, len(value.leaves)
        for key in self.pops[k]:
            leaves, structure = value.skips[key]
            arrived[key] = unflatten(given[start : start + len(leaves)], structure)
            start += len(leaves)
        whole = unflatten(given[: len(value.leaves)], value.structure)
        given.clear()
        skips = Skips(arrived)
        arrived.clear()
        try:
            with using(skips):
                begin = self.clock.begin()
                output = _call(self.layers[k], whole)
                end = self.clock.end()
            del whole
            check_travels(output, self.names[k], cut=True)
        except (ModelError, RoundStoppedError):
            raise
        except Exception as error:
            raise forward_failed(error, self.names[k], self.first + k, shapes) from error
        if spans is not None:
            spans.append((begin, end))
        passed = Value.of(output)
        left = skips.take_all()
        passed.skips = {
            key: waiting for key, waiting in value.skips.items() if key not in self.pops[k]
        }
        passed.skips.update({key: flatten(left[key]) for key in self.stashes[k]})
        return passed

    def find_written(self, k: int, value: Value) -> bool:
        """Run layer k, and note in `written` which inputs it writes to.

        What it uses of others is put back when the profile ends, see `Watch`.

        Args:
            k: Index of the layer, a copy; it shares nothing with the model's, or `shares` is set.
            value: What goes into it.

        Returns:
            Whether it writes to its own parameters, as some embeddings do.

        Raises:
            ProfileError: the layer failed.
        """
        layer = self.layers[k]
        parameters = [parameter._version for parameter in layer.parameters()]
        inputs, given = self.prepare(k, value, wants=True, protect=True)
        copies = list(given)
        versions = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in copies]
        with Watch(self.names[k], layer, [*inputs, *copies], shares=self.shares) as watch:
            passed = self.call(k, given, value)
            watch.take_behind(self.outputs(k, passed))
        self.written[k] = frozenset(
            i
            for i, leaf in enumerate(copies)
            if isinstance(leaf, Tensor) and leaf._version != versions[i]
        )
        return parameters != [parameter._version for parameter in layer.parameters()]

    def record(self, spans: list[Span] | None = None) -> tuple[list[Record], Value]:
        """Run the layers with a graph for each; return what their backwards need."""
        tape: list[Record] = []
        value = self.start
        for k in range(len(self.layers)):
            inputs, given = self.prepare(k, value, wants=True)
            popped = {key: len(value.skips[key][0]) for key in self.pops[k]}
            value = self.call(k, given, value, spans=spans)
            tape.append(Record(inputs, popped, self.outputs(k, value)))
        return tape, value

    def forget(self, spans: list[Span] | None = None) -> None:
        """Run the layers without a graph, as a micro-batch that is recomputed later."""
        value = self.start
        with torch.no_grad(), phase(checkpointing=True):
            for k in range(len(self.layers)):
                _, given = self.prepare(k, value, wants=False)
                value = self.call(k, given, value, spans=spans)

    def recompute(self, spans: list[Span] | None = None) -> tuple[list[Record], Value]:
        """Do what `record` does, once more, in the backward."""
        with phase(recomputing=True):
            return self.record(spans)

    def backward(self, tape: list[Record], end: Value, spans: list[Span | None]) -> None:
        """Run the backward of every layer, the last one first; `tape` is used up.

        Args:
            tape: What the forward left for the backward.
            end: The output of the last layer; its gradients are random.
            spans: The times are appended, the first layer's first; None: it had nothing to do.
        """
        last = len(self.layers) - 1
        gradients = self.gradients(last, end)[: len(end.leaves)]
        waiting = {key: random_gradients(leaves) for key, (leaves, _) in end.skips.items()}
        end.leaves, end.skips = [], {}
        found: list[Span | None] = []
        while tape:
            k = len(tape) - 1
            record = tape.pop()
            for key in self.stashes[k]:
                gradients += waiting.pop(key)
            roots = roots_of(record.outputs, gradients)
            begin = self.clock.begin()
            had_work = self.run_backward(roots, record.inputs, self.names[k])
            found.append((begin, self.clock.end()) if had_work else None)
            received = take_gradients(record.inputs)
            for key, n_leaves in reversed(record.popped.items()):
                received, waiting[key] = received[: -n_leaves or None], received[-n_leaves:]
                if not n_leaves:
                    waiting[key] = []
            gradients = received
            del record, roots, received
        spans += found[::-1]

    def whole(self, *, grad: bool = True) -> tuple[Span, Span | None]:
        """Run the layers as one graph; return the time of its forward and of its backward.

        Args:
            grad: Whether to record the graph; without one there is no backward.
        """
        torch.clear_autocast_cache()
        with torch.set_grad_enabled(grad):
            inputs = as_leaves(self.start.leaves, wants=self.first > 0)
            # A layer may write to the output of earlier ones.
            places = range(len(inputs)) if any(self.written) else ()
            given = cloned(inputs, places, self.start.views)
            arrived = {
                key: unflatten(as_leaves(leaves, wants=self.first > 0), structure)
                for key, (leaves, structure) in self.start.skips.items()
            }
            value = unflatten(given, self.start.structure)
            del given, inputs
            skips = Skips(arrived)
            arrived = {}
            with using(skips):
                begin = self.clock.begin()
                for k, layer in enumerate(self.layers):
                    self._check_stop()
                    try:
                        value = _call(layer, value)
                    except Exception as error:
                        shapes = shapes_of(flatten(value)[0])
                        raise forward_failed(
                            error, self.names[k], self.first + k, shapes
                        ) from error
                forward = (begin, self.clock.end())
        if not grad:
            return forward, None
        leaves, structure = flatten(value)
        dims = dims_of_leaves(self._out_dims, leaves, structure)
        for key, left in skips.take_all().items():
            if key not in self.start.skips:
                leaves += flatten(left)[0]
        del value
        roots = roots_of(leaves, random_gradients(leaves, dims))
        del leaves
        begin = self.clock.begin()
        had_work = self.run_backward(roots, [], None)
        return forward, (begin, self.clock.end()) if had_work else None

    def run_backward(
        self, roots: list[tuple[Tensor, Tensor]], inputs: Sequence[Any], layer: str | None
    ) -> bool:
        """Run a backward of one layer, or of the whole chain; tell whether there was one.

        Args:
            roots: Tensors to start from, with their gradients.
            inputs: The layer's input; gradients of leaves of autograd are kept in them.
            layer: Name of the layer; None: the whole chain.

        Raises:
            ProfileError: the backward failed.
            RoundStoppedError: `stop` is set.
        """
        self._check_stop()
        leaves = [leaf for leaf in inputs if needs_gradient(leaf) and leaf.is_leaf]
        wanted = leaves if self.only_inputs else None
        if not roots or wanted == []:
            return False
        tensors, gradients = [root[0] for root in roots], [root[1] for root in roots]
        try:
            # In this thread, as in a worker, and because the ledger watches this thread.
            with (
                torch.autograd.set_multithreading_enabled(False),
                without_autocast(self.device.type),
                without_the_rest(leaves),
                self.within(),
            ):
                torch.autograd.backward(tensors, gradients, inputs=wanted)
        except Exception as error:
            if layer is None:
                written = zip(self.names, self.written, strict=True)
                raise whole_backward_failed(error, [name for name, at in written if at]) from error
            raise backward_failed(error, layer, shapes_of(inputs)) from error
        return True

    def _check_stop(self) -> None:
        if self.stop.is_set():
            raise RoundStoppedError


def _call(layer: nn.Module, value: Any) -> Any:
    """Call a layer with its input, and with the keyword arguments that the first layer gets."""
    return layer(value.input, **value.keywords) if isinstance(value, Call) else layer(value)
