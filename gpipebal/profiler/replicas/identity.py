"""Identity: whether two layers cost the same for the same input, so that one counts for both."""

from __future__ import annotations

import enum
import hashlib
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from gpipebal.contents import contents_of, pairs_of, slots_in
from gpipebal.pipeline.layers.attributes import tensors_in
from gpipebal.pipeline.values.tensors import bytes_of, has_storage, plain_parts, stored_parts
from gpipebal.profiler.replicas.harmless import tensors_reached
from gpipebal.profiler.replicas.reads import EVERYTHING, reads_unseen

__all__ = ["Alike", "Identity", "identity_of", "kind_of"]

T = TypeVar("T")

#: Attributes of a module that are compared in another way.
_LOOKED_AT = ("_parameters", "_buffers", "_modules")
#: Attributes of attributes are compared to this depth; what lies below counts as the same only if
#: it is the same object.
_DEPTH = 4
_CONTAINERS = frozenset({dict, OrderedDict, list, tuple, set})
#: Whole numbers and truth values may decide what runs: they are compared up to so many bytes.
_SMALL = 1 << 16
_WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)


class Identity(NamedTuple):
    """What decides the costs of a layer, besides its input.

    Attributes:
        form: All but its options.
        options: Those of its attributes that no tensor is in, by name, in the order of its modules:
            they matter only if they are read.
    """

    form: Hashable
    options: tuple[tuple[str, Hashable], ...]

    def options_of(self, names: Collection[str] | None) -> Hashable:
        """Return the options of these names; None: all."""
        return self.options if names is None else tuple(o for o in self.options if o[0] in names)


class Alike(Generic[T]):
    """What is known of layers, each for all that cost the same.

    Args:
        layers: All layers.
        by_value: Whether their tensors have values that they may look at.
    """

    def __init__(self, layers: Sequence[nn.Module], *, by_value: bool = False) -> None:
        self._layers = layers
        self._identities = [identity_of(layer, by_value=by_value) for layer in layers]
        options: dict[Hashable, set[Hashable]] = {}
        for one in self._identities:
            options.setdefault(one.form, set()).add(one.options)
        #: Whether others differ from a layer in their options alone: what it reads then matters.
        self.differ = [len(options[one.form]) > 1 for one in self._identities]
        # By form and key: for the names that a layer has read, what is known by their values.
        self._known: dict[Hashable, dict[frozenset[str] | None, dict[Hashable, T]]] = {}

    def find(self, k: int, key: Hashable) -> T | None:
        """Return what is known of layers like layer k.

        Args:
            k: Index of the layer.
            key: What else its costs depend on.
        """
        layer = self._identities[k]
        for names, known in self._known.get((layer.form, key), {}).items():
            found = known.get(layer.options_of(names))
            if found is not None:
                return found
        return None

    def add(self, k: int, key: Hashable, found: T, names: Collection[str] | None = None) -> None:
        """Add what was found out about layer k.

        Args:
            k: Index of the layer.
            key: What else its costs depend on.
            found: What was found.
            names: Names of the attributes that it has read since it was copied, as `names_read`
                notes them; None: not known, so all of them count.
        """
        layer = self._identities[k]
        if names is None or EVERYTHING in names or reads_unseen(self._layers[k]):
            read = None
        else:
            read = frozenset(name for name, _ in layer.options if name in names)
        known = self._known.setdefault((layer.form, key), {}).setdefault(read, {})
        known[layer.options_of(read)] = found

    def forget(self) -> None:
        """Forget all that is known."""
        self._known.clear()


def identity_of(layer: nn.Module, *, by_value: bool = False) -> Identity:
    """Return what two layers have in common only if they cost the same for the same input.

    That is more than a fingerprint, which leaves out private attributes: it includes classes,
    options, shapes of parameters and buffers and which of them are the same, modes, and every
    attribute. Objects count as equal only if they are one object, as a shared configuration is.

    Args:
        layer: The layer.
        by_value: Whether it includes the values of small tensors of whole numbers or truth values
            too: a layer may count with them, or pick elements by them.
    """
    known: dict[int, int] = {}
    options: list[tuple[str, Hashable]] = []
    kind_of_tensor = _with_values if by_value else _kind_of

    def tensors(module: nn.Module, named: Mapping[str, Tensor | None]) -> Hashable:
        # How many micro-batches a normalisation has seen is nothing that costs depend on.
        kind = _kind_of if isinstance(module, _NormBase) else kind_of_tensor
        return tuple(
            (name, None if t is None else (known.setdefault(id(t), len(known)), *kind(t)))
            for name, t in named.items()
        )

    def attribute(name: str, value: Any) -> Hashable:
        described = _plain(value, _DEPTH, kind_of_tensor)
        if not _is_option(value):
            return name, described
        options.append((name, described))
        return name

    form = tuple(
        (
            path,
            type(module),
            tensors(module, module._parameters),
            tensors(module, module._buffers),
            tuple(
                attribute(name, value)
                for name, value in (*vars(module).items(), *slots_in(module))
                if name not in _LOOKED_AT
            ),
        )
        for path, module in layer.named_modules(remove_duplicate=False)
    )
    return Identity(form, tuple(options))


def kind_of(value: Any) -> Hashable:
    """Return what values have in common only if layers do the same with them.

    Of tensors that is how they look; the values that they have do not count.
    """
    return _plain(value, _DEPTH, _kind_of)


def _is_option(value: Any) -> bool:
    """Tell whether a layer costs the same with any value in place of this one that it never reads.

    Not so if tensors can be reached from it: they count as memory.
    """
    if isinstance(value, _PLAIN):
        return True
    is_empty = type(value) in _CONTAINERS and not value
    if is_empty or callable(value) or isinstance(value, (Tensor, nn.Module)):
        return False
    return not tensors_reached(value) and next(tensors_in(value), None) is None


def _kind_of(tensor: Tensor) -> tuple[Hashable, ...]:
    lies: Hashable = tensor.layout
    if has_storage(tensor):
        lies = tensor.stride()
    elif not tensor.is_nested:  # sparse, or of a class with other tensors in it: these decide, too
        lies = (tensor.layout, *((tuple(part.shape), part.dtype) for part in plain_parts(tensor)))
    # The class of a tensor decides what runs, and so does what is left to be conjugated or negated.
    left = tensor.is_conj(), tensor.is_neg()
    return (type(tensor), tuple(tensor.shape), lies, tensor.dtype, tensor.requires_grad, *left)


def _with_values(tensor: Tensor) -> tuple[Hashable, ...]:
    """Describe a tensor also by its values, if they may steer a layer and are few."""
    kind = _kind_of(tensor)
    if bytes_of(tensor) > _SMALL:
        return kind
    parts = [part for part in stored_parts(tensor) if part.dtype in _WHOLE]
    values = [part.detach().cpu().numpy().tobytes() for part in parts if not part.is_meta]
    return *kind, *(hashlib.sha256(each).digest() for each in values)


def _plain(value: Any, depth: int, of_tensor: Callable[[Tensor], tuple[Hashable, ...]]) -> Hashable:
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        return id(value)
    if isinstance(value, Tensor):
        return "tensor", *of_tensor(value)
    if isinstance(value, weakref.ref):
        # torch's recurrent layers keep such references to their weights.
        referent = value()
        if referent is None or isinstance(referent, Tensor):
            return type(value), _plain(referent, 0, of_tensor)
    pairs = pairs_of(value)
    items = contents_of(value) if pairs is None else [part for pair in pairs for part in pair]
    if depth and items is not None:
        return type(value), tuple(_plain(item, depth - 1, of_tensor) for item in items)
    return id(value)
