"""Gradients of inputs, each in memory of its own size.

A layer's backward may make one gradient for several values and hand back parts of it, as that of a
concatenation does. Autograd copies such a part for a leaf, unless the part lies without gaps, as
that of a single row does. Then the leaf would keep the whole until its own gradient is used up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor

from gpipebal.pipeline.values.tensors import has_storage

__all__ = ["without_the_rest"]


@contextmanager
def without_the_rest(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Copy gradients that are parts of larger ones as soon as a backward hands them to leaves.

    Args:
        leaves: Leaves of autograd; those that a layer has cut off since (`detach_`) get none.
    """
    hooks = [
        leaf.register_post_accumulate_grad_hook(_copy_part) for leaf in leaves if leaf.requires_grad
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _copy_part(leaf: Tensor) -> None:
    """Replace the gradient of a leaf by a copy, if its memory holds more."""
    gradient = leaf.grad
    if gradient is None or not has_storage(gradient):
        return
    if gradient.untyped_storage().nbytes() > gradient.nbytes:
        leaf.grad = gradient.clone()
