"""Which pass a layer is running in: what `is_checkpointing` and `is_recomputing` answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

__all__ = ["is_checkpointing", "is_recomputing", "phase"]

# Context variables, not thread-local ones: a pipeline inside a layer of another one carries them
# over to its workers.
_checkpointing = ContextVar("checkpointing", default=False)
_recomputing = ContextVar("recomputing", default=False)


def is_checkpointing() -> bool:
    """Tell a layer that this forward keeps no graph and will be run again in the backward.

    Returns:
        True inside the first pass of a checkpointed micro-batch, else False.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from gpipebal import GPipe, is_checkpointing
        >>> class Look(nn.Module):
        ...     def forward(self, x):
        ...         print("first pass" if is_checkpointing() else "recompute")
        ...         return 2 * x
        >>> pipe = GPipe(nn.Sequential(Look()), [1], checkpoint="always")
        >>> pipe(torch.ones(1, 1, requires_grad=True)).sum().backward()
        first pass
        recompute
    """
    return _checkpointing.get()


def is_recomputing() -> bool:
    """Tell a layer that this forward is a repetition, made in the backward.

    A layer that counts its calls or updates a state of its own must do so only where this is False.
    Registered buffers are different: update them in every call, as a recompute restores them.

    Returns:
        True inside the recompute of a checkpointed micro-batch, else False.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from gpipebal import GPipe, is_recomputing
        >>> class Count(nn.Module):
        ...     calls = 0
        ...     def forward(self, x):
        ...         self.calls += not is_recomputing()
        ...         return 2 * x
        >>> count = Count()
        >>> pipe = GPipe(nn.Sequential(count), [1], chunks=2, checkpoint="always")
        >>> pipe(torch.ones(2, 1, requires_grad=True)).sum().backward()
        >>> count.calls
        2
    """
    return _recomputing.get()


def phase(
    *, checkpointing: bool = False, recomputing: bool = False
) -> AbstractContextManager[None]:
    """Return a context in which the two functions answer True where that is set.

    In a pipeline inside another one's layer, the outer one's pass is the inner one's too: what is
    not set stays as it is.
    """
    # Most cells are not checkpointed.
    is_any = checkpointing or recomputing
    return _answering(checkpointing, recomputing) if is_any else nullcontext()


@contextmanager
def _answering(checkpointing: bool, recomputing: bool) -> Iterator[None]:
    before = (
        _checkpointing.set(checkpointing or _checkpointing.get()),
        _recomputing.set(recomputing or _recomputing.get()),
    )
    try:
        yield
    finally:
        _checkpointing.reset(before[0])
        _recomputing.reset(before[1])
