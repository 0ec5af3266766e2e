"""A ledger of live tensor memory: who holds how many bytes, now and at most.

The memory of a tensor is its storage, and tensors share storages, so the ledger counts storages:
born when an operation returns one that did not exist before, gone when torch frees it. Every
storage is charged to one owner, a partition; only what several partitions keep parts of, as models
with all parameters in one tensor do, is shared out among them. What an operation uses inside and
frees before it returns (a library's workspace) is not seen, on any device.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gpipebal.pipeline.observers.in_place import InPlace
from gpipebal.pipeline.observers.shares import Shared, place_in_storage, share_out
from gpipebal.pipeline.process.eager import EagerDispatchMode
from gpipebal.pipeline.values.tensors import has_storage, plain_parts, storage_key

__all__ = ["Ledger"]


class Ledger:
    """Live bytes by owner.

    Args:
        n_owners: Owners are numbered from 0.

    Attributes:
        live: Bytes that each owner holds now.
        peaks: The most that each owner held at one time.
        total_peak: The most that all owners together held at one time.
    """

    def __init__(self, n_owners: int = 1) -> None:
        self.live = [0] * n_owners
        self.peaks = [0] * n_owners
        self.total_peak = 0
        self._entries: dict[int, tuple[int, int]] = {}
        self._kept: set[int] = set()
        # Storages that several owners keep, with the bytes of each and where their tensors begin.
        self._shared: dict[int, tuple[dict[int, int], dict[int, int]]] = {}
        # Each tells when its storage dies. They go with the ledger, perhaps before a storage does.
        self._references: dict[int, weakref.ref[Any]] = {}
        self._self = weakref.ref(self)
        # Storages die in any thread and at any allocation, also inside these methods.
        self._lock = threading.RLock()

    def keep(self, tensors: Iterable[tuple[int, Any]]) -> None:
        """Charge tensors to owners that keep them from now on, whoever holds or keeps them later.

        What tensors of several owners lie in is shared out among these, as `share_out` does it.

        Args:
            tensors: Owners and their tensors; anything that is not a tensor is skipped.
        """
        owned = ((owner, tensor) for owner, tensor in tensors if isinstance(tensor, Tensor))
        for key, shared in share_out(owned).items():
            with self._lock:
                if key not in self._kept:
                    self._leave(key)
                    self._kept.add(key)
                    self._charge(key, shared)

    def hold(self, tensors: Iterable[Any], owner: int) -> None:
        """Charge tensors to an owner, taking them over from whoever held them.

        Args:
            tensors: The tensors; anything that is not a tensor is skipped.
            owner: Number of the owner.
        """
        for tensor in tensors:
            for part in _with_storage(tensor):
                self._enter(part, owner, take_over=True)

    def bytes_of(self, key: int) -> int | None:
        """Return the bytes of a live storage, None if it is not in the ledger."""
        with self._lock:
            entry = self._entries.get(key)
        return None if entry is None else entry[1]

    def live_keys(self) -> set[int]:
        """Return the keys of all live storages in the ledger."""
        with self._lock:
            return set(self._entries)

    def live_now(self) -> dict[int, object]:
        """Return what is live, for `born_since`."""
        with self._lock:
            return dict(self._references)

    def born_since(self, before: Mapping[int, object]) -> set[int]:
        """Return the keys of live storages that were not among those; keys are reused."""
        with self._lock:
            return {key for key, one in self._references.items() if before.get(key) is not one}

    def start_peak(self) -> int:
        """Let the peaks start again from now; return the bytes that are live in total."""
        with self._lock:
            self.peaks = list(self.live)
            self.total_peak = sum(self.live)
            return self.total_peak

    def watch(self, owner: int, *, follow: bool = False) -> TorchDispatchMode:
        """Return a context that charges storages born in it, in this thread, to an owner.

        Compiled code runs in it as it was written: the bytes are those of eager code.

        Args:
            owner: Number of the owner.
            follow: Whether what an operation makes of a tensor in the ledger is charged to that
                tensor's owner instead: what an optimizer makes of a parameter, for example.
        """
        return _Watch(self, owner, follow)

    def owner_of(self, tensor: Tensor) -> int | None:
        """Return the owner of a tensor's storage; None: it has none.

        Of a storage that several owners keep: of the tensor that begins where this one does.
        """
        key = storage_key(tensor)
        with self._lock:
            entry, shared = self._entries.get(key), self._shared.get(key)
        if entry is None or shared is None:
            return None if entry is None else entry[0]
        return shared[1].get(place_in_storage(tensor), entry[0])

    def replace(self, former: Tensor, tensor: Tensor) -> None:
        """Charge a new tensor to the owner of another one, which does not count any more.

        The other one leaves first, so that no peak has both.
        """
        key = storage_key(former)
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._leave(key)
                self._enter(tensor, entry[0], take_over=False)

    def _enter(self, tensor: Tensor, owner: int, *, take_over: bool) -> bool:
        """Charge a tensor to an owner; return whether it is counted from now on."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                if not take_over or entry[0] == owner or key in self._kept:
                    return False
                n_bytes = entry[1]
                self.live[entry[0]] -= n_bytes
            else:
                n_bytes = storage.nbytes()
                self._refer_to(key, storage)
            self._entries[key] = (owner, n_bytes)
            self._add(owner, n_bytes)
        return entry is None

    def _add(self, owner: int, n_bytes: int) -> None:
        self.live[owner] += n_bytes
        self.peaks[owner] = max(self.peaks[owner], self.live[owner])
        self.total_peak = max(self.total_peak, sum(self.live))

    def _refer_to(self, key: int, storage: torch.UntypedStorage) -> None:
        # torch keeps the storage's Python object as long as the storage lives.
        self._references[key] = weakref.ref(storage, partial(_leave, self._self, key))

    def _charge(self, key: int, shared: Shared[int]) -> None:
        """Charge a storage, which is not in the ledger, to its owners."""
        by_owner = shared.by_owner
        self._refer_to(key, shared.storage)
        self._entries[key] = (shared.first, sum(by_owner.values()))
        if len(by_owner) > 1:
            self._shared[key] = by_owner, shared.owners_at
        for owner, n_bytes in by_owner.items():
            self._add(owner, n_bytes)

    def _leave(self, key: int) -> None:
        with self._lock:
            self._references.pop(key, None)
            self._kept.discard(key)
            entry, shared = self._entries.pop(key, None), self._shared.pop(key, None)
            if entry is not None:
                for owner, n_bytes in [entry] if shared is None else shared[0].items():
                    self.live[owner] -= n_bytes


def _leave(ledger: weakref.ref[Ledger], key: int, _: weakref.ref[Any]) -> None:
    known = ledger()
    if known is not None:
        known._leave(key)


class _Watch(EagerDispatchMode):
    def __init__(self, ledger: Ledger, owner: int, follow: bool) -> None:
        super().__init__()
        self._ledger = ledger
        self._owner = owner
        self._follow = follow
        self._in_place = InPlace()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        written = self._in_place.operand(func, args, kwargs)
        # Before it runs: one in place gives a sparse tensor other parts.
        owners = self._owners_of(args[0]) if self._follow and args else []
        result = func(*args, **(kwargs or {}))
        if written is not None:
            self._ledger.replace(written, result)
            self._in_place.made(func, result)
        for k, leaf in enumerate(_leaves(result)):
            for part in _with_storage(leaf):
                # An operation on a list gives a list: each result goes where its operand is.
                owner = owners[min(k, len(owners) - 1)] if owners else self._owner
                if self._ledger._enter(part, owner, take_over=False):
                    self._in_place.made(func, part)
        return result

    def _owners_of(self, operands: Any) -> list[int]:
        """Return the owner of an operation's first operand; if it is a list, of each element."""
        # All that a sparse tensor is made of has one owner.
        parts = (_with_storage(leaf)[:1] for leaf in _leaves(operands))
        found = [self._ledger.owner_of(one) for first in parts for one in first]
        return [self._owner if owner is None else owner for owner in found]


def _with_storage(leaf: Any) -> Sequence[Tensor]:
    """Return what of a leaf has a storage: itself, or the parts of a sparse or a wrapping one."""
    if type(leaf) is Tensor and has_storage(leaf):
        return (leaf,)
    return (
        [one for one in plain_parts(leaf) if has_storage(one)] if isinstance(leaf, Tensor) else ()
    )


def _leaves(value: Any) -> Sequence[Any]:
    """Return the leaves of a value; every operation calls this, mostly with a tensor."""
    return (value,) if isinstance(value, Tensor) else pytree.tree_leaves(value)
