"""One forward and backward of a layer under a ledger: what it saves, and its peaks."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from gpipebal.pipeline.layers.attributes import tensors_in
from gpipebal.pipeline.process.engine_state import nodes_behind
from gpipebal.pipeline.process.phase import phase
from gpipebal.pipeline.values.tensors import (
    has_storage,
    plain_parts,
    storage_key,
    storage_keys,
    stored_parts,
)
from gpipebal.profiler.chain.chain import Chain
from gpipebal.profiler.chain.gradients import (
    Begun,
    HandedBack,
    begun_inside,
    handed_back,
    handed_through,
    memory_of,
    used_again,
)
from gpipebal.profiler.chain.value import Value, random_gradients, roots_of
from gpipebal.profiler.memory.device_ledger import Beside, DeviceLedger, Peak
from gpipebal.profiler.memory.own_hooks import OwnHooks, own_hooks_seen
from gpipebal.profiler.replicas.replica import kept_by

__all__ = [
    "BackwardRun",
    "Called",
    "ForwardRun",
    "Given",
    "GivenMemory",
    "Surroundings",
    "backward_in",
    "forward_and_backward",
    "forward_without_graph",
    "largest",
    "own_tensors",
]

#: What holds the gradients that a backward is given: its caller, to the end; or nothing else than
#: the backward, which makes them itself.
Given = Literal["held"] | Begun


class Surroundings(NamedTuple):
    """What is around a layer while it runs.

    Attributes:
        given: What holds the gradients that its backward is given.
        inside: Whether another layer is in front of it, which is given the gradients of the inputs.
        without: Places of outputs whose gradients are left out. The layer is run as it is trained
            all the same: it may ask whether its inputs need a gradient.
        stashed: Places of inputs that are stashed too, if `inside`: a gradient has come for them
            before the backward begins.
    """

    given: Given = "held"
    inside: bool = False
    without: Collection[int] = ()
    stashed: Collection[int] = ()


def forward_without_graph(
    chain: Chain, k: int, value: Value, ledger: DeviceLedger
) -> tuple[list[int], int]:
    """Return the memory of a forward at its moments, and the bytes of the copies made before it."""
    with ledger.watch(0), torch.no_grad(), phase(checkpointing=True):
        peak = Peak(ledger, chain.device)
        _, given = chain.prepare(k, value, wants=False)
        # More than the inputs' own bytes where these have gaps, which copies have too.
        copies, peak = peak.bytes, Peak(ledger, chain.device)
        chain.call(k, given, value)
    return peak.moments(), copies


class Called(NamedTuple):
    """A layer that was called, with what its backward needs.

    Attributes:
        inputs: Leaves of autograd.
        passed: The layer's output.
        outputs: Its leaves, and what the layer has stashed.
    """

    inputs: list[Any]
    passed: Value
    outputs: list[Any]


class ForwardRun(NamedTuple):
    """What there is to know of a forward; storages by key.

    Attributes:
        called: The layer's call.
        moments: Its memory at its moments, in bytes, beyond what existed before.
        saved: Bytes of each storage that was saved.
        constant: Those of them that exist all the time.
        kept_bytes: Bytes of what the layer keeps after its forward, besides its parameters.
    """

    called: Called
    moments: list[int]
    saved: dict[int, int]
    constant: set[int]
    kept_bytes: int


class GivenMemory(NamedTuple):
    """In which memory the gradients are that a layer's backward is given.

    Attributes:
        of: By place of the output, the number of the memory and its bytes. Those that are left out
            have memory of their own.
    """

    of: Mapping[int, tuple[int, int]]

    def bytes_of(self, own: Mapping[int, int]) -> int:
        """Return the bytes of the memory of some of them, whose own bytes are known by place."""
        shared = {self.of[place] for place in own if place in self.of}
        alone = sum(n_bytes for place, n_bytes in own.items() if place not in self.of)
        return alone + sum(n_bytes for _, n_bytes in shared)

    def is_parted(self, own: Mapping[int, int]) -> bool:
        """Tell whether any of them is not all that is in its memory."""
        return any(n_bytes != own.get(place, n_bytes) for place, (_, n_bytes) in self.of.items())


class BackwardRun(NamedTuple):
    """What there is to know of a backward that is over; storages by key.

    Attributes:
        beside: Its memory at its moments, beyond what it began with, without the gradients that it
            was given if nothing else holds them; and which of these live.
        begun: Bytes of those gradients, by place of the output.
        given: Key and bytes of gradients that it was given and others hold, by place of the output.
        hands_back: In which memory each input's gradient is, by place; None: in none of its own.
        through: For each input that was handed through, by place, the key of its storage and the
            place of the output that it is.
        passed_on: Places of such outputs that are inputs, the same tensors.
        has_copied: Whether the gradient that is kept of an input is a copy, apart from those that
            were handed through.
        used_again: Places of inputs whose gradients come in several pieces; found only where there
            are skips.
    """

    beside: Beside
    begun: Mapping[int, int]
    given: Mapping[int, tuple[int, int]]
    hands_back: Mapping[int, HandedBack | None]
    through: Mapping[int, tuple[int, int]]
    passed_on: frozenset[int]
    has_copied: bool
    used_again: frozenset[int]

    @property
    def hands_back_own(self) -> dict[int, bool]:
        """For each input's gradient, by place, whether nothing else holds its memory."""
        return {place: each is not None and each.is_own for place, each in self.hands_back.items()}

    @property
    def outline(self) -> tuple[object, ...]:
        """What makes a difference to others, besides `given`."""
        return self.beside, self.begun, self.hands_back_own

    @property
    def alone(self) -> int:
        """Largest memory where each gradient that it is given has memory of its own."""
        return largest(self.moments(GivenMemory({})))

    def moments(self, memory: GivenMemory) -> list[int]:
        """Return the bytes of each moment where they are in that memory; below 0 if it is freed."""
        sets = {alive for alive, _ in self.beside}
        held = {alive: memory.bytes_of({k: self.begun[k] for k in alive}) for alive in sets}
        whole = memory.bytes_of(self.begun)
        return [rest + held[alive] - whole for alive, rest in self.beside]

    def moments_held(self) -> list[int]:
        """Return the bytes of each moment where others hold all of them to the end."""
        return [rest for _, rest in self.beside]


def largest(moments: Iterable[int]) -> int:
    """Return the largest memory of some moments; the start is one of them, without any."""
    return max(0, max(moments, default=0))


def forward_and_backward(
    chain: Chain, k: int, value: Value, ledger: DeviceLedger, constants: Iterable[Tensor]
) -> tuple[ForwardRun, BackwardRun]:
    """Run forward and backward of a layer that is alone in its partition, and describe both.

    Args:
        chain: A chain with the layer.
        k: Its place in it.
        value: What goes into it.
        ledger: Where memory is counted.
        constants: Tensors that exist all the time.
    """
    with ledger.watch(0):
        forward = _run_forward(chain, k, value, ledger, constants)
        return forward, _run_backward(chain, k, forward.called, ledger, Surroundings())


def backward_in(
    chain: Chain, k: int, value: Value, ledger: DeviceLedger, around: Surroundings
) -> BackwardRun:
    """Run forward and backward of a layer in some surroundings, and describe the backward.

    Args:
        chain: A chain with the layer.
        k: Its place in it.
        value: What goes into it.
        ledger: Where memory is counted.
        around: What is around it.
    """

    def called() -> Called:  # what is only given to the layer does not live until the backward
        inputs, given = chain.prepare(k, value, wants=True, inside=around.inside)
        # As in the run that is described: only what is around the layer differs.
        with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda tensor: tensor):
            passed = chain.call(k, given, value)
        torch.clear_autocast_cache()
        return Called(inputs, passed, chain.outputs(k, passed))

    with ledger.watch(0):
        return _run_backward(chain, k, called(), ledger, around)


def _run_forward(
    chain: Chain, k: int, value: Value, ledger: DeviceLedger, constants: Iterable[Tensor]
) -> ForwardRun:
    packed: dict[int, weakref.ref[Any]] = {}

    def pack(tensor: Tensor) -> Tensor:
        for part in stored_parts(tensor):
            # In the order of saving: what has gone by now may have had the same key.
            packed.pop(storage_key(part), None)
            packed[storage_key(part)] = weakref.ref(part.untyped_storage())
        # Not the tensor itself: an output that its own graph saves would never be freed.
        return tensor.detach()

    inputs, given = chain.prepare(k, value, wants=True)
    before, peak = ledger.live_now(), Peak(ledger, chain.device)
    # Within these hooks, so that they are none of the layer's own.
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        own_hooks_seen() as own_hooks,
    ):
        passed = chain.call(k, given, value)
    torch.clear_autocast_cache()  # what only a cache holds is freed after a cell's forward
    moments = peak.moments()
    outputs = chain.outputs(k, passed)
    layer, born = chain.layers[k], ledger.born_since(before)
    saved = _saved_in_all(layer, outputs, packed, own_hooks, born, ledger)
    constant = saved.keys() & {storage_key(tensor) for tensor in constants}
    live = ledger.live_keys() - constant
    saved = {key: size for key, size in saved.items() if key in live}
    # What it hands on it may keep for longer than the next layer needs it.
    elsewhere = {*saved, *map(storage_key, filter(has_storage, given))}
    kept = [each for each in kept_by(layer) if elsewhere.isdisjoint(storage_keys([each]))]
    kept_bytes = _bytes_of_kept(kept, born)
    called = Called(inputs, passed, outputs)
    return ForwardRun(called, moments, saved, constant, kept_bytes)


def _run_backward(
    chain: Chain, k: int, called: Called, ledger: DeviceLedger, around: Surroundings
) -> BackwardRun:
    inputs, passed, outputs = called
    ends = [None if place in around.without else leaf for place, leaf in enumerate(outputs)]
    made: list[Tensor | None] = [None] * len(ends)
    if around.given == "held":
        made = [
            None if end is None else one
            for end, one in zip(ends, chain.gradients(k, passed), strict=True)
        ]
        roots, begun = roots_of(ends, made), dict[int, int]()
    else:
        roots, begun = begun_inside(ends, ledger.start_beside, around.given)
    given_in = memory_of(made)
    found_again = used_again(inputs, outputs) if chain.has_skips else frozenset[int]()
    come = [leaf if place in around.stashed else None for place, leaf in enumerate(inputs)]
    roots += roots_of(come, random_gradients(come))
    with handed_back(inputs, hold=around.inside or around.given != "held") as back:
        peak = Peak(ledger, chain.device)
        chain.run_backward(roots, inputs, chain.names[k])
    beside = peak.beside()
    through = handed_through(inputs, ends, given_in, back)
    return BackwardRun(
        beside=beside,
        begun=begun,
        given=given_in,
        hands_back=back,
        through=through,
        passed_on=frozenset(
            at for place, (_, at) in through.items() if outputs[at] is inputs[place]
        ),
        has_copied=any(
            each is not None
            and place not in through
            and inputs[place].is_leaf
            and _is_elsewhere(inputs[place].grad, each.key)
            for place, each in back.items()
        ),
        used_again=found_again,
    )


def _saved_in_all(
    layer: nn.Module,
    outputs: Sequence[Any],
    packed: Mapping[int, weakref.ref[Any]],
    own_hooks: OwnHooks,
    born: Collection[int],
    ledger: DeviceLedger,
) -> dict[int, int]:
    """Return the bytes of all storages that the graph of a forward keeps, by key.

    Args:
        layer: The layer that ran.
        outputs: What came out.
        packed: Storages that hooks around the forward saw it save.
        own_hooks: What hooks of its own have packed.
        born: Keys of the storages that the forward has made.
        ledger: Knows their bytes.
    """
    # What is gone was saved for a result that was not used; its key may be another's by now.
    saved = _bytes_of_live(packed)
    handed = {storage_key(leaf) for leaf in outputs if has_storage(leaf)}
    mine = set(storage_keys(own_tensors(layer))) - saved.keys()
    others = set(born) - handed - mine
    for key in filter(others.__contains__, ledger.live_now()):  # in the order of their births
        saved.setdefault(key, ledger.bytes_of(key) or 0)
    for tensor in filter(has_storage, (*_kept_by_functions(outputs), *own_hooks.kept())):
        if storage_key(tensor) not in mine:
            saved.setdefault(storage_key(tensor), tensor.untyped_storage().nbytes())
    return saved


def _bytes_of_kept(kept: Iterable[Tensor], born: Collection[int]) -> int:
    """Return the bytes of what a layer keeps: of parts of what its forward has made, of all of it.

    Args:
        kept: Tensors that it keeps.
        born: Keys of the storages that its forward has made.
    """
    whole, apart = dict[int, int](), 0
    for part in (part for tensor in kept for part in plain_parts(tensor)):
        if has_storage(part) and storage_key(part) in born:
            whole[storage_key(part)] = part.untyped_storage().nbytes()
        else:
            apart += part.nbytes
    return apart + sum(whole.values())


def _is_elsewhere(gradient: Tensor | None, key: int) -> bool:
    """Tell whether a gradient is in other memory than that of a key."""
    return gradient is not None and has_storage(gradient) and storage_key(gradient) != key


def _bytes_of_live(storages: Mapping[int, weakref.ref[Any]]) -> dict[int, int]:
    """Return the bytes of those storages that live, by key."""
    found = {key: reference() for key, reference in storages.items()}
    return {key: storage.nbytes() for key, storage in found.items() if storage is not None}


def _kept_by_functions(outputs: Iterable[Any]) -> Iterator[Tensor]:
    """Yield tensors that the caller's functions keep as attributes of their context.

    Autograd does not know of them: an input among them is older than the forward.
    """
    for node in nodes_behind(leaf.grad_fn for leaf in outputs if isinstance(leaf, Tensor)):
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            yield from tensors_in(vars(node))


def own_tensors(layer: nn.Module) -> tuple[Tensor, ...]:
    """Return what a layer always has: parameters, buffers, tensors kept as attributes."""
    return (*layer.parameters(), *kept_by(layer))
