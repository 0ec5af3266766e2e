"""What torch would write in place if no mode watched.

Where a dispatch mode is on, torch takes no tensor for its own, because a mode may have handed out
something else. So two things that it writes in place otherwise get new memory, and one tensor more
exists for a moment: the sum of the gradients of a value that is used more than once, and the
gradient of a layer that picks elements, which is written into zeros. A backward that is watched
thus needs more memory than one that is not. Here such operations are recognised, so that a ledger
can count their result in the place of the operand; what they compute is left as it is.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpipebal.pipeline.process.engine_state import current_backward, current_node
from gpipebal.pipeline.process.modes import ThreadedDispatchMode
from gpipebal.pipeline.values.tensors import has_storage, storage_key

__all__ = ["InPlace"]

_aten = torch.ops.aten

#: What a backward writes into zeros that it has just made.
_WRITES = frozenset(
    {
        _aten.index_put.default,
        _aten.index_add.default,
        _aten.index_fill.int_Scalar,
        _aten.index_fill.int_Tensor,
        _aten.scatter.src,
        _aten.scatter.value,
        _aten.scatter_add.default,
        _aten.masked_scatter.default,
        _aten.put.default,
    }
)

#: What makes zeros.
_ZEROS = frozenset({_aten.zeros.default, _aten.new_zeros.default, _aten.zeros_like.default})

#: What single nodes of the graph write into what they have made before.
_CHAINS = {"BinaryCrossEntropyWithLogitsBackward0": frozenset({_aten.sub.Tensor, _aten.mul.Tensor})}

#: What a chain goes on from in new memory: the gradient of the loss's target, `-self * gradient`.
_NEW = _aten.neg.default


class InPlace:
    """Recognises what torch would do in place, among the operations of a thread, in their order."""

    def __init__(self) -> None:
        # The present node of the graph, and what made the storages that are new since it began.
        self._present: Any = None
        self._made: dict[int, Any] = {}
        self._alone = _holders_of_a_gradient()

    def operand(self, operation: Any, args: Sequence[Any], kwargs: Any) -> Tensor | None:
        """Return the operand that an operation would write to; None: it would not.

        To be called before the operation runs.
        """
        task = current_backward()
        if task is None or torch.is_grad_enabled():
            self._present = None
            return None
        node = current_node()
        name = "" if node is None else node.name()
        present = (task, name, None if node is None else node._sequence_nr())
        # Nodes of two threads may have one number: the later one is then taken for the earlier one,
        # and its sums for its own.
        if present != self._present:
            self._present = present
            self._made.clear()
        if not args or type(args[0]) is not Tensor or not has_storage(args[0]):
            return None
        # One more who holds it, as in `_holders_of_a_gradient`.
        first = args[0]
        key = storage_key(first)
        if operation in _WRITES:
            # The node's own code may hold its zeros more than once. A user's function does not
            # write in place unless it says so: its zeros are held in Python too.
            is_alone = self._made.get(key) in _ZEROS and _holders(first)[0] == self._alone[0]
        elif operation in _CHAINS.get(name, ()):
            is_alone = self._made.get(key, _NEW) is not _NEW and _holders(first) == self._alone
        else:
            # Gradients are added up when a node has ended, and it still is the present one. What an
            # earlier node made is the sum so far. What this one made may be a term of its own
            # formula, for which there is new memory; unless two of its results go one way.
            is_alone = (
                operation is _aten.add.Tensor
                and not kwargs
                and _can_hold(first, args[1])
                and (key not in self._made or _goes_one_way_twice(node))
                and _holders(first) == self._alone
            )
        return first if is_alone else None

    def made(self, operation: Any, tensor: Tensor) -> None:
        """Take note of a tensor that an operation has made."""
        if self._present is not None:
            self._made[storage_key(tensor)] = operation  # keys are used again


def _holders(tensor: Tensor) -> tuple[int, int, int]:
    """Return how many hold a tensor in Python, a tensor in C++, and its storage."""
    private: Any = tensor  # torch does not declare the method
    storage = torch._C._storage_Use_Count(storage_key(tensor))
    return sys.getrefcount(tensor), private._use_count(), storage


def _can_hold(first: Tensor, second: Any) -> bool:
    """Tell whether a gradient has room for its sum with a second one, in a block without gaps."""
    if not isinstance(second, Tensor) or second.layout != torch.strided:
        return False
    size = 1
    for stride, length in sorted(zip(first.stride(), first.shape, strict=True)):
        if length != 1 and stride != size:
            return False
        size *= length
    return (first.shape, first.dtype) == (second.shape, second.dtype)


def _goes_one_way_twice(node: Any) -> bool:
    """Tell whether two results of a node of the graph are gradients of one value."""
    ways = () if node is None else node.next_functions
    known = [way for way in ways if way[0] is not None]
    return len(set(known)) < len(known)


@functools.cache
def _holders_of_a_gradient() -> tuple[int, int, int]:
    """Return `_holders` of the first of two gradients that the engine adds up.

    Zeros, which nothing has, if this torch does not tell.
    """
    found = [(0, 0, 0)]
    if not (hasattr(Tensor, "_use_count") and hasattr(torch._C, "_storage_Use_Count")):
        return found[0]

    class Probe(ThreadedDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func is _aten.add.Tensor:
                first = args[0]
                found.append(_holders(first))
            return func(*args, **(kwargs or {}))

    def add_two_gradients() -> None:
        value = torch.ones(2, device="cpu", requires_grad=True)
        total = value.exp() + value.sin()
        with Probe():
            total.backward(torch.ones(2, device="cpu"))

    # A thread of its own has no modes, hooks or settings of the caller's.
    thread = threading.Thread(target=add_two_gradients, name="gpipebal-probe")
    thread.start()
    thread.join()
    return found[-1]
