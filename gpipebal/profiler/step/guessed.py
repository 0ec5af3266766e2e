"""Values that an optimizer reads of stand-ins which have none: they are guessed.

Some optimizers read a norm, or a number of their state, to compute with it. Which number that is
changes neither what they keep nor how long they take, unless they decide by it: that is tried on a
part of the parameter, with and without values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from gpipebal.pipeline.process.modes import ThreadedDispatchMode
from gpipebal.pipeline.values.tensors import bytes_of

__all__ = ["ValuesGuessed", "found_by_guesses", "part_of"]

_Found = TypeVar("_Found")

_READ = torch.ops.aten._local_scalar_dense.default


class ValuesGuessed(ThreadedDispatchMode):
    """A context in which each number that is read of a tensor without values is 1.

    Attributes:
        n_read: How many were read so far.

    Example:
        >>> with ValuesGuessed() as guessed:
        ...     norm = torch.empty(3, device="meta").norm().item()
        >>> norm, guessed.n_read
        (1.0, 1)
    """

    def __init__(self) -> None:
        super().__init__()
        self.n_read = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _READ and args[0].is_meta:
            self.n_read += 1
            return torch.ones((), dtype=args[0].dtype, device="cpu").item()
        return func(*args, **(kwargs or {}))


def part_of(tensor: Tensor, n_bytes: int) -> Tensor:
    """Return a part of a tensor of at most so many bytes; its longest dimensions are cut.

    Example:
        >>> part_of(torch.zeros(64, 6), 128).shape
        torch.Size([4, 6])
    """
    while bytes_of(tensor) > n_bytes and max(tensor.shape, default=1) > 1:
        longest = max(range(tensor.dim()), key=tensor.shape.__getitem__)
        tensor = tensor.narrow(longest, 0, -(-tensor.shape[longest] // 2))
    return tensor


def found_by_guesses(
    step: Callable[[Tensor, str], _Found],
    whole: Tensor,
    n_bytes: int,
    are_alike: Callable[[_Found, _Found], bool],
) -> _Found | None:
    """Find what a step costs on a parameter, where what the optimizer reads of it is guessed.

    Args:
        step: Tells what a step on a stand-in costs, given what that is like and its device.
        whole: The parameter.
        n_bytes: At most so many bytes of it are stepped with values.
        are_alike: Tells whether two steps cost the same.

    Returns:
        What it costs; None: the optimizer decides by the values. It does not if a part costs the
        same with and without them, and as many values are read of the part as of the whole.
    """
    with ValuesGuessed() as of_whole:
        found = step(whole, "meta")
    if not of_whole.n_read:
        return found
    part = part_of(whole, n_bytes)
    with ValuesGuessed() as of_part:
        guessed = step(part, "meta")
    is_same = are_alike(guessed, step(part, "cpu")) and of_part.n_read == of_whole.n_read
    return found if is_same else None
