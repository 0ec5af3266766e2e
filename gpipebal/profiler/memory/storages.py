"""Memory of the layers: the storages that each saves and outputs, and its peaks.

A layer runs alone under a ledger of live storages: without a graph, then with one and its backward,
first where no gradients exist and then where they do. Its saved set is what hooks on saved tensors
see, what custom autograd functions keep as attributes of their context, and what it made and keeps
alive in any other way, without parameters and buffers. What it keeps as an attribute, or in a
buffer's place, exists once, not once for every micro-batch. From layer to layer the numbers of
storages go along with the values, so that what two layers share has one number.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from gpipebal.pipeline.layers.attributes import tensors_in
from gpipebal.pipeline.observers.ledger import Ledger
from gpipebal.pipeline.process.checkpoint import phase
from gpipebal.pipeline.values.tensors import bytes_of, has_storage, plain_parts, storage_key
from gpipebal.profiler.chain.chain import Chain
from gpipebal.profiler.chain.failures import memory_for
from gpipebal.profiler.chain.gradients import (
    begun_inside,
    handed_back,
    handed_through,
    needs_gradient,
    own_gradients,
)
from gpipebal.profiler.chain.numbers import Arrived, Numbers, distinct_numbers, number_of
from gpipebal.profiler.chain.value import Value, as_leaves, roots_of
from gpipebal.profiler.memory.buffers import copies_of_large, kept_buffers
from gpipebal.profiler.memory.layer_memory import ChainedPeak, HandedBack, LayerMemory
from gpipebal.profiler.replicas.harmless import tensors_reached
from gpipebal.profiler.replicas.replica import kept_by

__all__ = ["measure_layer_memory"]

#: What holds the gradients that a backward is given: its caller, to the end; or nothing else than
#: what they are views of; or nothing else at all.
Given = Literal["held", "views", "own"]


def measure_layer_memory(
    chain: Chain, k: int, arrived: Arrived, numbers: Numbers, constants: Sequence[Tensor] = ()
) -> tuple[LayerMemory, Arrived]:
    """Run one layer under a ledger.

    Args:
        chain: A chain with the layer.
        k: Index of the layer in it.
        arrived: What goes into the layer.
        numbers: Numbers of all storages so far; new ones are added.
        constants: Tensors that exist all the time, besides its parameters and buffers.

    Returns:
        Its memory, and its output.
    """
    layer, value = chain.layers[k], arrived.value
    if chain.device.type == "cuda":
        _warm_up(chain, k, value)
    there = (*_own_tensors(layer), *tensors_reached(layer), *constants)
    constants = [part for own in there for part in plain_parts(own)]
    known = _known(chain, k, arrived)
    ledger = _OfDevice(chain.device)
    ledger.hold([*chain.inputs(k, value), *constants], 0)
    for parameter in layer.parameters():
        parameter.grad = None
    with memory_for("copies of large buffers"):
        large = copies_of_large(layer)
    without_graph, copies = _forward_without_graph(chain, k, value, ledger)
    kept = {storage_key(buffer): buffer.nbytes for buffer in kept_buffers(layer, large)}
    del large
    run = _forward_and_backward(chain, k, value, ledger, constants)
    hands_on = _handed_on(chain, k, arrived, run.passed, known, numbers)
    for key, n_bytes in run.saved.items():
        if key not in known:
            known[key] = numbers.new(n_bytes)
    through_numbers = distinct_numbers(known[key] for key, _ in run.through.values())
    saved_numbers = distinct_numbers(known[key] for key in run.saved)
    forward, backward, through = run.forward_peak, run.backward_peak, set(run.through)
    ends = {output for _, output in run.through.values()}
    hands_through = {
        place: output for place, (_, output) in run.through.items() if run.hands_back_own[place]
    }
    saved_buffers, kept_bytes = run.constant & kept.keys(), run.kept_bytes
    n_popped = [len(arrived.skips[key]) for key in chain.popped(k)]
    back = HandedBack.of(run.hands_back, n_popped, len(chain.inputs(k, value)), run.given)
    gradients = sum(bytes_of(leaf) for leaf in run.passed.leaves if needs_gradient(leaf))
    # Their keys are used up: they may be given to new storages from now on.
    del run, known
    hands_on.value = _cut(hands_on.value)

    def backward_again(
        unwanted: Collection[int] = (), given: Given = "held", *, keeps: bool = False
    ) -> tuple[ChainedPeak, dict[int, bool]]:
        """Return other peaks, and which inputs it hands gradients that nothing else holds.

        Without `keeps` the gradients of parameters are dropped.
        """
        again = _forward_and_backward(chain, k, value, ledger, constants, unwanted, gradients=given)
        if not keeps:
            for parameter in layer.parameters():
                parameter.grad = None
        return ChainedPeak(again.backward_peak, again.until_freed), again.hands_back_own

    accumulating, _ = backward_again(keeps=True)
    # In a chain, the gradients that come in are freed, and what is handed through is not copied.
    chained_accumulating, _ = backward_again(ends, "views", keeps=True)
    own_accumulating, _ = backward_again(ends, "own")
    chained, hands_back = backward_again(ends, "views")
    own_chained, hands_back_if_given = backward_again(ends, "own")
    without_copies = backward_again(ends)[0].whole if ends else backward
    memory = LayerMemory(
        outputs=hands_on.storages,
        saved=saved_numbers,
        handed_through=through_numbers,
        output_bytes=sum(numbers.bytes[number] for number in hands_on.storages),
        output_gradient_bytes=gradients,
        forward_peak_bytes=forward,
        no_grad_forward_peak_bytes=without_graph,
        written_input_bytes=copies,
        backward_peak_bytes=backward,
        accumulating_peak_bytes=accumulating.whole,
        chained_peaks=(chained, chained_accumulating),
        own_chained_peaks=(own_chained, own_accumulating),
        # In these runs what is handed through is not handed back at all, also if it is a view.
        hands_back_own={
            place: (hands_back.get(place, False), hands_back_if_given.get(place, False))
            for place in {*hands_back, *through} - hands_through.keys()
        },
        hands_through=hands_through,
        hands_back=back,
        stashes=bool(chain.stashed(k)),
        copied_bytes=max(0, backward - without_copies),
        kept_buffer_bytes=sum(kept.values()),
        saved_buffer_bytes=sum(kept[key] for key in saved_buffers),
        kept_bytes=kept_bytes,
        n_parameters=len(list(layer.parameters())),
    )
    return memory, hands_on


def _handed_on(
    chain: Chain,
    k: int,
    arrived: Arrived,
    passed: Value,
    known: dict[int, int],
    numbers: Numbers,
) -> Arrived:
    """Number a layer's output; `known` has the numbers of its input, by key."""
    hands_on = Arrived(
        passed,
        [number_of(leaf, known, numbers) for leaf in passed.leaves],
        {key: held for key, held in arrived.skips.items() if key in passed.skips},
    )
    for key in chain.stashed(k):
        leaves = passed.skips[key][0]
        hands_on.skips[key] = [number_of(leaf, known, numbers) for leaf in leaves]
        numbers.note(hands_on.skips[key], map(needs_gradient, leaves))
    numbers.note(hands_on.numbers, map(needs_gradient, passed.leaves))
    return hands_on


class _OfDevice(Ledger):
    """A ledger of one kind of device: what a layer moves to another kind does not count."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._type = device.type

    def _enter(self, tensor: Tensor, owner: int, *, take_over: bool) -> bool:
        return tensor.device.type == self._type and super()._enter(
            tensor, owner, take_over=take_over
        )


class _Peak:
    """The largest memory from now on, beyond what exists now.

    On CUDA the allocator sees memory that the ledger does not, for example a library's workspace:
    the larger of the two counts.
    """

    def __init__(self, ledger: Ledger, device: torch.device) -> None:
        self._ledger = ledger
        self._device = device if device.type == "cuda" else None
        self._at_start = ledger.start_peak()
        self._allocated = 0
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)
            self._allocated = torch.cuda.memory_allocated(self._device)

    @property
    def bytes(self) -> int:
        """Bytes of the peak so far."""
        counted = self._ledger.total_peak - self._at_start
        if self._device is None:
            return counted
        return max(counted, torch.cuda.max_memory_allocated(self._device) - self._allocated)


def _warm_up(chain: Chain, k: int, value: Value) -> None:
    """Run a layer once, so that libraries have the memory that they keep from their first call on.

    That memory belongs to the device, and to no layer: cuBLAS has a workspace of some MiB for each
    stream. Memory that is needed in every call is still measured.
    """
    inputs, given = chain.prepare(k, value, wants=True)
    passed = chain.call(k, given, value)
    roots = roots_of(chain.outputs(k, passed), chain.gradients(k, passed))
    chain.run_backward(roots, inputs, chain.names[k])


def _forward_without_graph(chain: Chain, k: int, value: Value, ledger: Ledger) -> tuple[int, int]:
    """Return the largest memory of a forward, and the bytes of the copies made before it."""
    with ledger.watch(0), torch.no_grad(), phase(checkpointing=True):
        peak = _Peak(ledger, chain.device)
        _, given = chain.prepare(k, value, wants=False)
        # More than the inputs' own bytes where these have gaps, which copies have too.
        copies, peak = peak.bytes, _Peak(ledger, chain.device)
        chain.call(k, given, value)
    return peak.bytes, copies


class _Run(NamedTuple):
    """A forward and a backward of a layer; storages by key.

    Attributes:
        forward_peak: Largest memory of the forward, in bytes, beyond what existed before.
        backward_peak: The same for the backward.
        until_freed: The same until the last of the gradients is freed that the backward was given.
        passed: The layer's output.
        saved: Bytes of each storage that was saved.
        constant: Those of them that exist all the time.
        through: For each input that was handed through, by place, the key of its storage and the
            place of the output that it is.
        kept_bytes: Bytes of what the layer keeps after its forward.
        hands_back_own: For each input's gradient, by place, whether nothing else holds its memory.
        hands_back: In which memory each input's gradient is, by place.
        given: Keys of the storages of the gradients that the backward began with.
    """

    forward_peak: int
    backward_peak: int
    until_freed: int
    passed: Value
    saved: dict[int, int]
    constant: set[int]
    through: dict[int, tuple[int, int]]
    kept_bytes: int
    hands_back_own: dict[int, bool]
    hands_back: dict[int, tuple[int, int, int] | None]
    given: frozenset[int]


def _forward_and_backward(
    chain: Chain,
    k: int,
    value: Value,
    ledger: Ledger,
    constants: Iterable[Tensor],
    unwanted: Collection[int] = (),
    *,
    gradients: Given = "held",
) -> _Run:
    """Run forward and backward of a layer.

    Args:
        chain: A chain with the layer.
        k: Its place in it.
        value: What goes into it.
        ledger: Where memory is counted.
        constants: Tensors that exist all the time.
        unwanted: Places of outputs whose gradients are left out. The layer is run as it is trained
            all the same: it may ask whether its inputs need a gradient.
        gradients: What holds the gradients that the backward is given: this function, to the end,
            or the backward alone, until they are used.
    """
    packed: dict[int, weakref.ref[Any]] = {}

    def pack(tensor: Tensor) -> Tensor:
        for part in filter(has_storage, plain_parts(tensor)):
            # In the order of saving: what has gone by now may have had the same key.
            packed.pop(storage_key(part), None)
            packed[storage_key(part)] = weakref.ref(part.untyped_storage())
        # Not the tensor itself: an output that its own graph saves would never be freed.
        return tensor.detach()

    with ledger.watch(0):
        inputs, given = chain.prepare(k, value, wants=True)
        before, peak = ledger.live_now(), _Peak(ledger, chain.device)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            passed = chain.call(k, given, value)
        torch.clear_autocast_cache()  # what only a cache holds is freed after a cell's forward
        forward = peak.bytes
        outputs = chain.outputs(k, passed)
        handed = {storage_key(leaf) for leaf in outputs if has_storage(leaf)}
        # What is gone was saved for a result that was not used; its key may be another's by now.
        saved = _bytes_of_live(packed)
        layer = chain.layers[k]
        mine = {key for tensor in _own_tensors(layer) for key in _keys_of(tensor)} - saved.keys()
        for key in sorted(ledger.born_since(before) - handed - mine):
            saved.setdefault(key, ledger.bytes_of(key) or 0)
        for tensor in filter(has_storage, _kept_by_functions(outputs)):
            if storage_key(tensor) not in mine:
                saved.setdefault(storage_key(tensor), tensor.untyped_storage().nbytes())
        constant = saved.keys() & {storage_key(tensor) for tensor in constants}
        live = ledger.live_keys() - constant
        saved = {key: n_bytes for key, n_bytes in saved.items() if key in live}
        elsewhere = {*saved, *handed, *map(storage_key, filter(has_storage, given))}
        kept = [each for each in kept_by(layer) if elsewhere.isdisjoint(_keys_of(each))]
        freed: list[int] = []
        ends = [None if place in unwanted else leaf for place, leaf in enumerate(outputs)]
        made: list[Tensor | None] = [None] * len(ends)
        if gradients == "held":
            made = [
                None if place in unwanted else one
                for place, one in enumerate(chain.gradients(k, passed))
            ]
            roots, begun = roots_of(ends, made), 0
        else:
            as_views = gradients == "views"
            roots, begun = begun_inside(ends, lambda: freed.append(peak.bytes), as_views)
        through: dict[int, tuple[int, int]] = {}
        with (
            handed_through(inputs, ends, made, through),
            own_gradients(inputs) as are_own,
            handed_back(inputs, hold=gradients != "held") as back,
        ):
            peak = _Peak(ledger, chain.device)
            chain.run_backward(roots, inputs, chain.names[k])
        backward = max(0, peak.bytes - begun)
        until_freed = max(0, freed[0] - begun) if freed else backward
    given_keys = frozenset(storage_key(root[1]) for root in roots if has_storage(root[1]))
    kept_bytes = sum(map(bytes_of, kept))
    found = (forward, backward, until_freed, passed, saved, constant, through, kept_bytes, are_own)
    return _Run(*found, back, given_keys)


def _bytes_of_live(storages: Mapping[int, weakref.ref[Any]]) -> dict[int, int]:
    """Return the bytes of those storages that live, by key."""
    found = {key: reference() for key, reference in storages.items()}
    return {key: storage.nbytes() for key, storage in found.items() if storage is not None}


def _kept_by_functions(outputs: Iterable[Any]) -> Iterator[Tensor]:
    """Yield tensors that the caller's functions keep as attributes of their context.

    Autograd does not know of them: an input among them is older than the forward.
    """
    waiting = [leaf.grad_fn for leaf in outputs if isinstance(leaf, Tensor)]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                yield from tensors_in(vars(node))


def _known(chain: Chain, k: int, arrived: Arrived) -> dict[int, int]:
    """Map the storages of a layer's inputs, by key, to their numbers."""
    held = list(arrived.numbers)
    for key in chain.popped(k):
        held += arrived.skips[key]
    leaves = chain.inputs(k, arrived.value)
    return {
        storage_key(leaf): number
        for leaf, number in zip(leaves, held, strict=True)
        if number is not None
    }


def _cut(value: Value) -> Value:
    """Let go of the graph that a value came from."""
    skips = {
        key: (as_leaves(leaves, wants=True), structure)
        for key, (leaves, structure) in value.skips.items()
    }
    return Value(as_leaves(value.leaves, wants=True), value.structure, skips, value.views)


def _own_tensors(layer: nn.Module) -> tuple[Tensor, ...]:
    """Return what a layer always has: parameters, buffers, tensors kept as attributes."""
    return (*layer.parameters(), *kept_by(layer))


def _keys_of(tensor: Tensor) -> list[int]:
    return [storage_key(part) for part in plain_parts(tensor)]
