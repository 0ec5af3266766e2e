"""What a layer's own hooks on saved tensors keep.

`torch.utils.checkpoint.checkpoint` and `torch.autograd.graph.save_on_cpu` are blocks that set such
hooks. Of several such blocks torch asks the innermost, so hooks around the whole layer do not see
what is saved inside. What hooks have made of a tensor, and what they need to give it back, lives as
long as the graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from gpipebal.pipeline.process.blocks import SharedBlocks
from gpipebal.profiler.replicas.harmless import tensors_reached

__all__ = ["OwnHooks", "own_hooks_seen"]


class _Packed:
    """What a hook has made of a tensor, and the hook that gives this back.

    Args:
        value: What it has made.
        unpack: The hook.
    """

    def __init__(self, value: Any, unpack: Callable[[Any], Tensor]) -> None:
        self.value, self.unpack = value, unpack


class OwnHooks:
    """What hooks have packed."""

    def __init__(self) -> None:
        self._packed: list[weakref.ref[_Packed]] = []

    def around(self, hooks: saved_tensors_hooks) -> tuple[Any, Any]:
        """Return hooks that do the same, and note it."""
        pack, unpack = hooks.pack_hook, hooks.unpack_hook

        def noted(tensor: Tensor) -> _Packed:
            packed = _Packed(pack(tensor), unpack)
            self._packed.append(weakref.ref(packed))
            return packed

        return noted, lambda packed: packed.unpack(packed.value)

    def kept(self) -> list[Tensor]:
        """Return the tensors that are kept by what is still packed, or that its hooks use."""
        alive = [packed for packed in (one() for one in self._packed) if packed is not None]
        found = {id(one): one for packed in alive for one in tensors_reached([packed.value])}
        # Blocks have few hooks, and pack much.
        hooks = {id(packed.unpack): packed.unpack for packed in alive}
        found |= {id(one): one for hook in hooks.values() for one in tensors_reached(hook)}
        return list(found.values())


_seen_by: ContextVar[OwnHooks | None] = ContextVar("gpipebal_own_hooks", default=None)
# What torch does, or whoever has put something in its place.
_enter = saved_tensors_hooks.__enter__


@contextmanager
def own_hooks_seen() -> Iterator[OwnHooks]:
    """See, in this thread, what the hooks pack that code in a block sets.

    Example:
        >>> import torch
        >>> x = torch.ones(2, requires_grad=True)
        >>> with own_hooks_seen() as own, saved_tensors_hooks(lambda t: [t], lambda t: t[0]):
        ...     y = x.sin()
        >>> [tensor is x for tensor in own.kept()]
        [True]
    """
    own = OwnHooks()
    _blocks.enter()
    before = _seen_by.set(own)
    try:
        yield own
    finally:
        _seen_by.reset(before)
        _blocks.leave()


def _seen_enter(self: saved_tensors_hooks) -> None:
    own = _seen_by.get()
    if own is None:
        return _enter(self)
    before = self.pack_hook, self.unpack_hook
    try:
        self.pack_hook, self.unpack_hook = own.around(self)
        return _enter(self)
    finally:
        self.pack_hook, self.unpack_hook = before


def _install() -> None:
    global _enter
    _enter = saved_tensors_hooks.__enter__
    saved_tensors_hooks.__enter__ = _seen_enter  # type: ignore[method-assign]


def _remove() -> None:
    if saved_tensors_hooks.__enter__ is _seen_enter:
        saved_tensors_hooks.__enter__ = _enter  # type: ignore[method-assign]


_blocks = SharedBlocks(_install, _remove)
