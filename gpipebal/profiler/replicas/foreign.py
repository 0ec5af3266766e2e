"""Foreign tensors: what the copy of a layer uses that neither it nor the profile has made.

A layer may reach a weight or a module of others in more ways than its code tells. So its first
forward is watched: what it takes a gradient of, or writes to, is put back at the end of the profile
as it was before.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gpipebal.pipeline.layers.attributes import attributes_of
from gpipebal.pipeline.process.eager import EagerDispatchMode
from gpipebal.pipeline.process.engine_state import nodes_behind
from gpipebal.pipeline.values.tensors import (
    has_storage,
    storage_key,
    storage_keys,
    stored_parts,
)

__all__ = [
    "Kept",
    "Watch",
    "foreign_kept",
    "had_hooks",
    "has_foreign",
    "moves_foreign",
    "note_mover",
]

#: Arguments that normalisation writes to, though its operations do not declare it.
_STATISTICS = frozenset({"running_mean", "running_var"})


class Kept:
    """What is put back when a profile ends.

    Attributes:
        used: By name of a layer, the leaves of others that it uses.
        movers: Names of layers that give a tensor of others new memory, see `moves_foreign`.
        hooked: Leaves with hooks, by ``id``.
    """

    def __init__(self, behind: ExitStack) -> None:
        self.used: dict[str, dict[int, Tensor]] = {}
        self.movers: set[str] = set()
        self.hooked: set[int] = set()
        self._behind = behind
        # They are kept alive, so that nothing else gets their identity.
        self._known: dict[tuple[str, int], Any] = {}

    def use(self, name: str, leaf: Tensor) -> None:
        """Note that a layer uses a leaf of others."""
        self.used.setdefault(name, {})[id(leaf)] = leaf

    def gradient(self, leaf: Tensor) -> None:
        """Keep the gradient of a leaf, and its hooks: they may step it, and are the caller's.

        There are none until the end.
        """
        if not self._is_new("leaf", id(leaf), leaf):
            return
        self._behind.callback(setattr, leaf, "grad", leaf.grad)
        leaf.grad = None
        each: tuple[Any, ...] = (leaf._backward_hooks, leaf._post_accumulate_grad_hooks)
        for hooks in filter(None, each):
            self.hooked.add(id(leaf))
            self._behind.callback(hooks.update, dict(hooks))
            hooks.clear()

    def buffers(self, module: nn.Module) -> None:
        """Keep the buffers of a module, and their values."""
        for name, buffer in module._buffers.items():
            self._behind.callback(module._buffers.__setitem__, name, buffer)
            if buffer is not None:
                self._behind.callback(_put_form_back, buffer, buffer.data)
                parts = stored_parts(buffer)
                for part in parts:
                    if part.is_contiguous() and part.nbytes < part.untyped_storage().nbytes():
                        # The rest, of a flat checkpoint perhaps, is not kept twice.
                        self._behind.callback(part.data.copy_, part.detach().clone())
                    else:
                        self.values(part)
                if not parts and not is_lazy(buffer):  # its memory is a library's, as oneDNN's is
                    self._behind.callback(buffer.data.copy_, buffer.detach().clone())

    def values(self, tensor: Tensor) -> None:
        """Keep the memory of a tensor that is about to be written to."""
        storage = tensor.untyped_storage()
        self.form(tensor)
        if not tensor.is_meta and self._is_new("storage", storage._cdata, storage):
            self._behind.callback(_put_back, storage, storage.clone())

    def form(self, tensor: Tensor) -> None:
        """Keep the sizes of a tensor, and which memory it has; not what is in it."""
        if not tensor._is_view() and self._is_new("form", id(tensor), tensor):
            self._behind.callback(_put_form_back, tensor, tensor.data)

    def _is_new(self, what: str, key: int, value: Any) -> bool:
        is_new = (what, key) not in self._known
        self._known.setdefault((what, key), value)
        return is_new


_kept: ContextVar[Kept | None] = ContextVar("gpipebal_foreign", default=None)


@contextmanager
def foreign_kept() -> Iterator[Kept]:
    """Put back, after a block, what `Watch` has seen in it; yield what can be told of more."""
    # One that cannot be restored does not keep the others from being restored.
    with ExitStack() as behind:
        kept = Kept(behind)
        before = _kept.set(kept)
        behind.callback(_kept.reset, before)
        yield kept


def has_foreign(name: str, layer: nn.Module) -> bool:
    """Tell whether a layer has used parameters, in this profile, that it does not register.

    Args:
        name: Its name.
        layer: The caller's layer.
    """
    kept = _kept.get()
    used = set() if kept is None else set(kept.used.get(name, ()))
    return bool(used - set(map(id, layer.parameters())))


def had_hooks(leaf: Tensor) -> bool:
    """Tell whether a leaf has hooks of the caller, which are off in this profile."""
    kept = _kept.get()
    return kept is not None and id(leaf) in kept.hooked


def moves_foreign(name: str) -> bool:
    """Tell whether a layer has given a tensor new memory, in this profile, that is not its own.

    A sparse tensor that is written to gets new elements; another may be resized. Whoever reads the
    tensor at the same time may read memory that is free by then.

    Args:
        name: Its name.
    """
    kept = _kept.get()
    return kept is not None and name in kept.movers


def note_mover(name: str) -> None:
    """Note that a layer gives a tensor new memory that is not its own, see `moves_foreign`."""
    kept = _kept.get()
    if kept is not None:
        kept.movers.add(name)


class Watch(EagerDispatchMode):
    """Keeps leaves that operations take, and what they write to, unless the layer has or makes it.

    Args:
        name: Name of the layer.
        layer: The layer that runs, a copy.
        given: Its input.
        shares: Whether its parameters have the memory of the caller's.
    """

    def __init__(
        self, name: str, layer: nn.Module, given: Iterable[Any], *, shares: bool = False
    ) -> None:
        super().__init__()
        self._keeper, self._name = _kept.get() or Kept(ExitStack()), name
        inputs = [each for each in given if isinstance(each, Tensor)]
        parameters, others = list(layer.parameters()), [*layer.buffers(), *attributes_of(layer)]
        own = [*inputs, *parameters, *others]
        # Parameters may share the memory of the caller's, but are not the same tensors.
        self._seen = set(map(id, own))
        self._own = set(storage_keys(own))
        self._made = set(storage_keys([*inputs, *others, *(() if shares else parameters)]))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look at what an operation is given, and run it."""
        kwargs = kwargs or {}
        given = _tensors_in((args, kwargs))
        self.take(given)
        before: list[tuple[Tensor, Any]] = []
        for tensor in _written_by(func, args, kwargs):
            parts = [p for p in stored_parts(tensor) if storage_key(p) not in self._made]
            if parts:
                before.append((tensor, _memory_of(tensor)))
            for part in parts:
                self._keeper.values(part)
        result = func(*args, **kwargs)
        if any(known is None or _memory_of(tensor) != known for tensor, known in before):
            self._keeper.movers.add(self._name)
        self._made |= set(storage_keys(_tensors_in(result))).difference(storage_keys(given))
        return result

    def take(self, tensors: Iterable[Tensor]) -> None:
        """Keep the gradients of those that are leaves of others."""
        for tensor in tensors:
            leaf = _leaf_of(tensor)
            if leaf is None or id(leaf) in self._seen:
                continue
            keys = set(storage_keys([leaf]))
            if self._own.isdisjoint(keys):
                if not self._made.isdisjoint(keys):
                    continue
                self._keeper.use(self._name, leaf)
            self._seen.add(id(leaf))
            self._keeper.gradient(leaf)

    def take_behind(self, outputs: Iterable[Any]) -> None:
        """Keep the gradients of leaves that the graph of a layer's output ends at."""
        tensors = [each for each in outputs if isinstance(each, Tensor)]
        self.take([*tensors, *_leaves_behind(tensors)])


def _put_back(storage: torch.UntypedStorage, before: torch.UntypedStorage) -> None:
    """Give a storage its former bytes; numbers that are equal may differ in them, as zeros do."""
    if storage.nbytes() != before.nbytes():
        storage.resize_(before.nbytes())
    now, former = map(_bytes_of, (storage, before))
    if not torch.equal(now, former):
        now.copy_(former)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _put_form_back(tensor: Tensor, before: Tensor) -> None:
    """Give a tensor its former sizes and memory; a sparse one its former elements."""
    if tensor.layout == torch.sparse_coo or (
        has_storage(tensor) and _form_of(tensor) != _form_of(before)
    ):
        tensor.data = before


def _form_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return where the elements of a tensor lie, and what they are."""
    return tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.stride()


def _memory_of(tensor: Tensor) -> tuple[int, int] | None:
    """Return the address and bytes of its memory; None: it has several pieces."""
    if not has_storage(tensor):
        return None
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _leaf_of(tensor: Tensor) -> Tensor | None:
    """Return the leaf that a tensor is; None: it is none.

    Where autograd is off, a view of a leaf may look like a leaf.
    """
    if not (tensor.requires_grad and tensor.is_leaf):
        return None
    try:
        base = tensor._base if tensor._is_view() else tensor
    except RuntimeError:  # a view for derivatives in forward mode only
        base = tensor
    return base if base is not None and base.requires_grad and base.is_leaf else None


def _tensors_in(value: Any) -> list[Tensor]:
    return [each for each in pytree.tree_leaves(value) if isinstance(each, Tensor)]


def _written_by(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation may write to."""
    given = [
        args[place] if place < len(args) else kwargs.get(name) for place, name in _writes_of(func)
    ]
    return _tensors_in(given)


@functools.lru_cache(4096)
def _writes_of(func: Any) -> tuple[tuple[int, str], ...]:
    """Return the arguments that an operation may write to, by place and name."""
    schema = getattr(func, "_schema", None)
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(() if schema is None else schema.arguments)
        if argument.name in _STATISTICS
        or (argument.alias_info is not None and argument.alias_info.is_write)
    )


def _leaves_behind(outputs: Iterable[Tensor]) -> Iterator[Tensor]:
    node: Any
    for node in nodes_behind(output.grad_fn for output in outputs):
        if type(node).__name__ == "AccumulateGrad":
            yield node.variable
