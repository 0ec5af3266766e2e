"""What travels: the value between two partitions, as leaves and their shape.

Between partitions a value travels as a `Packet`: its leaves (tensors and anything else, in the
order of the pytree), the pytree's shape, and for every leaf whether a gradient has to come back.
A cell that takes skip connections besides its input gets one packet joined from all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from itertools import islice
from types import GeneratorType
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from gpipebal.contents import attributes_in, contents_of, pairs_of, slots_in
from gpipebal.errors import ModelError
from gpipebal.pipeline.values.tensors import copy_of

__all__ = [
    "Call",
    "Packet",
    "check_nothing_hidden",
    "check_travels",
    "children_of",
    "copied",
    "detached",
    "flatten",
    "form_of",
    "have_same_places",
    "join_packets",
    "name_of_leaf",
    "split_packet",
    "uncounted",
    "unflatten",
    "which_need_gradient",
]


class Packet(NamedTuple):
    """A value between two partitions, cut off from autograd.

    Attributes:
        leaves: Leaves of the pytree; tensors are detached.
        structure: How `unflatten` puts them together.
        needs_gradient: One flag per leaf: the tensor's gradient is wanted back.
        ready: Events that the receiver waits for before it reads the tensors.
        overlaps: Indices of leaves that have memory in common with another value on its way.
    """

    leaves: list[Any]
    structure: pytree.TreeSpec
    needs_gradient: list[bool]
    ready: Sequence[Any] = ()
    overlaps: frozenset[int] = frozenset()

    def as_leaves(self, *, grad: bool = True) -> list[Any]:
        """Return the leaves for one pass through layers; what these set on them stays in that pass.

        With `grad`, those that need a gradient are leaves of autograd.
        """
        return [
            leaf.detach().requires_grad_(grad and needs) if isinstance(leaf, Tensor) else leaf
            for leaf, needs in zip(self.leaves, self.needs_gradient, strict=True)
        ]


class Call(NamedTuple):
    """The input of a pipeline that was called with keyword arguments."""

    input: Any
    keywords: Mapping[str, Any]


def flatten(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Take a pytree apart into its leaves and its shape; named tuples keep their type."""
    return pytree.tree_flatten(value)


def unflatten(leaves: Sequence[Any], structure: pytree.TreeSpec) -> Any:
    """Put a pytree together again."""
    return pytree.tree_unflatten(list(leaves), structure)


def detached(leaves: Sequence[Any]) -> list[Any]:
    """Return the leaves, the tensors cut off from autograd."""
    return [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def copied(leaves: Sequence[Any], which: Collection[int]) -> list[Any]:
    """Return the leaves, with copies of the tensors at the given indices."""
    return [
        copy_of(leaf) if k in which and isinstance(leaf, Tensor) else leaf
        for k, leaf in enumerate(leaves)
    ]


def uncounted(leaves: Sequence[Any]) -> set[int]:
    """Return the indices of the tensors that count no writes, which were made in inference mode."""
    return {k for k, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_inference()}


def which_need_gradient(leaves: Sequence[Any]) -> list[bool]:
    """Tell of each leaf whether it is a tensor that needs a gradient."""
    return [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]


def name_of_leaf(structure: pytree.TreeSpec, index: int) -> str:
    """Say where a leaf is in its pytree, as one would write it in Python.

    Example:
        >>> _, structure = flatten({"x": 0, "masks": (1, 2)})
        >>> name_of_leaf(structure, 2), name_of_leaf(flatten(0)[1], 0)
        ("leaf ['masks'][1]", 'the tensor')
    """
    path = []
    while not structure.is_leaf():
        children = children_of(structure)
        k = 0
        while index >= children[k].num_leaves:
            index -= children[k].num_leaves
            k += 1
        path.append(_keys(structure, len(children))[k])
        structure = children[k]
    return f"leaf {pytree.keystr(tuple(path))}" if path else "the tensor"


def have_same_places(structure: pytree.TreeSpec, other: pytree.TreeSpec) -> bool:
    """Tell whether every leaf of a pytree has the same place in another.

    Example:
        >>> _, structure = flatten({"x": 0, "masks": (1, 2)})
        >>> have_same_places(structure, flatten({"x": 0, "masks": [3, 4]})[1])
        True
        >>> have_same_places(structure, flatten({"masks": (1, 2), "x": 0})[1])
        False
    """
    with suppress(Exception):  # what a class adds to the shape need not be comparable
        if structure == other:
            return True
    return [*_places(structure)] == [*_places(other)]


def _places(structure: pytree.TreeSpec) -> Iterator[str]:
    """Yield the place of every leaf, as `name_of_leaf` writes it."""
    if structure.is_leaf():
        yield ""
        return
    children = children_of(structure)
    for key, child in zip(_keys(structure, len(children)), children, strict=True):
        name = pytree.keystr((key,))
        for place in _places(child):
            yield name + place


def children_of(structure: pytree.TreeSpec) -> list[pytree.TreeSpec]:
    """Return the branches of a pytree's shape."""
    # Older torch has no method for that.
    return list(getattr(structure, "children", lambda: structure.children_specs)())


def _keys(structure: pytree.TreeSpec, n_children: int) -> list[Any]:
    """Return the keys of the uppermost branches of a pytree."""
    keys: list[Any] = []
    with suppress(Exception):  # a class that checks what it is made of, as torch's packed sequences
        node = pytree.SUPPORTED_NODES[structure.type].unflatten_fn(
            range(n_children), structure.context
        )
        keys = [path[0] for path, _ in pytree.tree_flatten_with_path(node)[0]]
    if len(keys) == n_children:
        return keys
    # A class that has told torch no keys: the outputs of transformers keep their names here.
    names = structure.context
    if isinstance(names, list | tuple) and [*map(type, names)] == [str] * n_children:
        return [pytree.MappingKey(name) for name in names]
    return [pytree.SequenceKey(k) for k in range(n_children)]


def form_of(structure: pytree.TreeSpec, leaf: Any) -> str:
    """Write a pytree of this shape whose leaves are all the same.

    Example:
        >>> form_of(flatten({"x": 0, "masks": (1, 2)})[1], "*")
        "{'x': '*', 'masks': ('*', '*')}"
    """
    try:
        return repr(unflatten([leaf] * structure.num_leaves, structure))
    except Exception:  # as above
        return repr(structure)


def join_packets(packets: Sequence[Packet]) -> Packet:
    """Make one packet of several: its value is the list of theirs."""
    value = [unflatten(packet.leaves, packet.structure) for packet in packets]
    leaves, structure = flatten(value)
    needs = [needs for packet in packets for needs in packet.needs_gradient]
    overlaps: set[int] = set()
    start = 0
    for packet in packets:
        overlaps.update(start + k for k in packet.overlaps)
        start += len(packet.leaves)
    return Packet(leaves, structure, needs, (), frozenset(overlaps))


def split_packet(packet: Packet) -> list[Packet]:
    """Undo `join_packets` on a packet whose value is a list."""
    packets, start = [], 0
    for part in unflatten(packet.leaves, packet.structure):
        leaves, structure = flatten(part)
        end = start + len(leaves)
        needs = packet.needs_gradient[start:end]
        overlaps = frozenset(k - start for k in packet.overlaps if start <= k < end)
        packets.append(Packet(leaves, structure, needs, packet.ready, overlaps))
        start = end
    return packets


#: How deep objects are searched for tensors, and how many of them for one value.
_DEPTH, _MOST = 4, 1000

# A module's parameters are leaves of autograd everywhere: it may cross a cut.
_PLAIN = (bool, int, float, complex, str, bytes, type, nn.Module, torch.dtype, torch.device)


def find_hidden_tensor(leaves: Sequence[Any]) -> tuple[type, str] | None:
    """Find an object among the leaves that has a tensor inside, however it keeps it.

    Objects inside objects are searched too, to a small depth. What a function has in its closure,
    or an iterator has yet to yield, cannot be found.

    Returns:
        The object's type and the way in, its attribute or element; None if there is none.
    """
    for leaf in leaves:
        if leaf is None or isinstance(leaf, (Tensor, *_PLAIN)):
            continue
        left = [_MOST]
        for way, value in islice(_parts(leaf), _MOST):
            if _holds_tensor(value, _DEPTH, left):
                return type(leaf), way
    return None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Return what an object that is not a pytree is made of, each with the way to it."""
    pairs = pairs_of(value)
    if pairs is not None:
        for key, element in pairs:
            yield f"element [{key!r}]", element
    elif issubclass(type(value), (set, frozenset)):
        for element in contents_of(value) or ():
            yield "an element", element
    else:
        for index, element in enumerate(contents_of(value) or ()):
            yield f"element [{index}]", element
    for name, attribute in (*dict.items(attributes_in(value)), *slots_in(value)):
        yield f"attribute {name!r}", attribute


def _holds_tensor(value: Any, depth: int, left: list[int]) -> bool:
    if isinstance(value, Tensor):
        return True
    left[0] -= 1
    if value is None or isinstance(value, _PLAIN) or depth == 0 or left[0] <= 0:
        return False
    return any(_holds_tensor(part, depth - 1, left) for _, part in islice(_parts(value), left[0]))


def check_nothing_hidden(leaves: Sequence[Any], where: str) -> None:
    """Refuse objects with tensors in them: these would not be divided, moved or differentiated.

    Tensors with attributes of their own are refused too: parts and copies do not have those.

    Raises:
        ModelError: there is one.
    """
    for leaf in leaves:
        if type(leaf) is Tensor and leaf.__dict__:
            _check_no_attributes(leaf, where)
    hidden = find_hidden_tensor(leaves)
    if hidden is not None:
        kind, way = hidden
        fix = "pass its tensors as a tuple or a dict"
        if is_dataclass(kind):
            fix += f"; or register the class, torch.export.register_dataclass({kind.__name__})"
        elif issubclass(kind, Mapping):
            fix += ", such as dict(value)"
        raise ModelError(
            f"{where} has tensors inside an object that is not a pytree: {way} of a "
            f"{kind.__name__} (expected tensors in tuples, lists, dicts or named tuples, and not "
            "in other classes, or subclasses of these).\n"
            f"Fix: {fix}."
        )


def _check_no_attributes(tensor: Tensor, where: str) -> None:
    """Refuse attributes that a program has set on a plain tensor; torch's begin with ``_``."""
    attributes = vars(tensor)
    own = [name for name in attributes if not name.startswith("_")]
    if own and "_is_buffer" not in attributes:  # an `nn.Buffer` knows whether it is persistent
        raise ModelError(
            f"{where} has a tensor with attributes that would be lost: {', '.join(own)} (expected "
            "none, because the tensor is divided, or goes on as another object).\n"
            "Fix: pass their values beside the tensor: in a tuple or a dict, as a skip connection, "
            "or as keyword arguments of the pipeline."
        )


def check_travels(value: Any, layer: str, *, cut: bool) -> None:
    """Refuse a value without a tensor: it cannot go on to the next layer as a micro-batch.

    Args:
        value: What the layer returned.
        layer: Its name.
        cut: Whether it is taken apart after this layer. Inside a partition a tensor may go on in
            an object that torch cannot take apart.

    Raises:
        ModelError: `value` holds no tensor, or hides it.
    """
    if isinstance(value, Tensor):
        return
    leaves, _ = flatten(value)
    if any(isinstance(leaf, Tensor) for leaf in leaves):
        return
    if cut:
        check_nothing_hidden(leaves, f"the output of layer {layer!r}")
    elif find_hidden_tensor(leaves) is not None:
        return
    fix = "let the layer return its result as tensors"
    if isinstance(value, GeneratorType):  # the forward has a yield, as that of a skippable has
        fix = (
            "decorate the layer's class, @skippable(stash=[...], pop=[...]), if it stashes or pops"
        )
    raise ModelError(
        f"layer {layer!r} returned no tensor: got {type(value).__name__} "
        f"(expected a tensor or a tuple of tensors).\nFix: {fix}."
    )
