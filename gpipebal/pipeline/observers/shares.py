"""Shares of storages: whose memory it is that tensors of several owners lie in.

Tensors may be parts of a larger one (`nn.Parameter(fused[0])`, `table[:8]`), of which memory then
holds all. Each owner is charged with the elements of its tensors, and the first one with what is in
none of them: so that all shares together are the storage, and the owners of a storage that is full
of their tensors have no more than these.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from gpipebal.pipeline.values.tensors import has_storage, plain_parts, storage_key

__all__ = ["Shared", "place_in_storage", "share_out"]

Owner = TypeVar("Owner")


@dataclass
class Shared(Generic[Owner]):
    """A storage, and who is charged with how much of it.

    Attributes:
        storage: The storage.
        first: The first of its owners.
        left: Bytes that no tensor has claimed yet.
        claimed: Bytes that tensors have claimed, by owner.
        owners_at: Owners of tensors, by the byte of the storage at which these begin.
    """

    storage: torch.UntypedStorage
    first: Owner
    left: int
    claimed: dict[Owner, int] = field(default_factory=dict)
    owners_at: dict[int, Owner] = field(default_factory=dict)

    @property
    def by_owner(self) -> dict[Owner, int]:
        """Bytes of each owner, which together are those of the storage."""
        return {**self.claimed, self.first: self.claimed[self.first] + self.left}


def share_out(tensors: Iterable[tuple[Owner, Tensor]]) -> dict[int, Shared[Owner]]:
    """Share out the storages of tensors among the owners of these; return them by their keys.

    A tensor that several owners have belongs to the first of them. Where tensors have elements in
    common, later ones claim what is left of the storage.

    Args:
        tensors: Tensors with their owners, in an order that decides who is the first. Those without
            a storage are left out.

    Example:
        >>> fused = torch.zeros(4, 2)
        >>> (shared,) = share_out([("a", fused[0]), ("b", fused[1])]).values()
        >>> shared.by_owner
        {'a': 24, 'b': 8}
    """
    found: dict[int, Shared[Owner]] = {}
    seen: dict[int, Tensor] = {}
    for owner, tensor in tensors:
        if id(tensor) in seen:
            continue
        seen[id(tensor)] = tensor
        for part in plain_parts(tensor):
            if has_storage(part):
                storage = part.untyped_storage()
                one = Shared(storage, owner, storage.nbytes())
                one = found.setdefault(storage_key(part), one)
                share = min(part.nbytes, one.left)
                one.left -= share
                one.claimed[owner] = one.claimed.get(owner, 0) + share
                one.owners_at.setdefault(place_in_storage(part), owner)
    return found


def place_in_storage(tensor: Tensor) -> int:
    """Return the byte of its storage at which a tensor begins."""
    return int(tensor.storage_offset()) * tensor.element_size()
