"""What to say when a layer fails while it is measured: which one, on what input, what helps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gpipebal.errors import ProfileError
from gpipebal.units import count

__all__ = [
    "alone_already",
    "backward_failed",
    "forbids_hooks",
    "forward_failed",
    "is_out_of_memory",
    "left_out",
    "memory_for",
    "shapes_of",
    "whole_backward_failed",
]

_ONE_AT_A_TIME = "with one_at_a_time=True, or "
_LESS_MEMORY = f"profile {_ONE_AT_A_TIME}with more chunks, or on a larger device."
_TRAIN_FIRST = "make the plain model train first: model(sample).sum().backward()."


def shapes_of(leaves: Sequence[Any]) -> str:
    """Describe the tensors of a value by shape and dtype."""
    return ", ".join(
        f"{tuple(leaf.shape)} {leaf.dtype}" if isinstance(leaf, Tensor) else repr(leaf)
        for leaf in leaves
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether the device had no memory left, by an error or by the error that caused it."""
    cause = error.__cause__ or error
    # A CPU's allocator has no kind of error of its own.
    on_cpu = isinstance(cause, RuntimeError) and "DefaultCPUAllocator" in str(cause)
    return on_cpu or isinstance(cause, (torch.OutOfMemoryError, MemoryError))


def alone_already(error: ProfileError) -> ProfileError:
    """Remove the advice to measure one layer at a time, where that has been done."""
    return ProfileError(str(error).replace(_ONE_AT_A_TIME, ""))


def forbids_hooks(error: BaseException) -> bool:
    """Tell whether a function of torch.func ran, which forbids hooks on what is saved."""
    return "yet support saved tensor hooks" in str(error)


def left_out(rows: int, error: Exception) -> str:
    """Say why a size of micro-batch is not measured."""
    return f"not measured at {count(rows, 'row')}: {str(error).splitlines()[0]}"


@contextmanager
def memory_for(what: str) -> Iterator[None]:
    """Say what there is no memory for, where it is not a layer that needs it.

    Raises:
        ProfileError: there is not enough memory.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise ProfileError(f"no memory is left for {what}: {error}\nFix: {_LESS_MEMORY}") from error


def forward_failed(error: Exception, name: str, index: int, shapes: str) -> ProfileError:
    """Name the layer whose forward failed."""
    fix = "give a sample and a number of chunks that the model can be trained with."
    if is_out_of_memory(error):
        fix = _LESS_MEMORY
    if not index and "does not require grad" in str(error):
        fix = (
            "let the layer begin with x = x.detach().requires_grad_(): what goes into a chain is "
            "data, and is profiled without a gradient, also where the sample has one."
        )
    if "more than 1 value per channel" in str(error):
        fix = (
            "give fewer chunks or a larger sample, so that every micro-batch has 2 rows or more, "
            "and no 1 in rows: batch normalisation cannot train on one value per channel."
        )
    if forbids_hooks(error):
        fix = (
            "let the layer differentiate by torch.autograd.grad(..., create_graph=True) in place "
            "of torch.func; or give costs of your own, gpipebal.Profile.from_costs(forward=[...]): "
            "no profile can look at what torch.func.grad, vjp, jacrev and hessian save."
        )
    return ProfileError(
        f"layer {name!r} (layer {index}) failed on a micro-batch of shape {shapes}: "
        f"{type(error).__name__}: {error}\nFix: {fix}"
    )


def backward_failed(error: Exception, name: str, shapes: str) -> ProfileError:
    """Name the layer whose backward failed."""
    fix = _LESS_MEMORY if is_out_of_memory(error) else _TRAIN_FIRST
    return ProfileError(
        f"the backward of layer {name!r}, on a micro-batch of shape {shapes}, failed: "
        f"{type(error).__name__}: {error}\nFix: {fix}"
    )


def whole_backward_failed(error: Exception, writers: Sequence[str]) -> ProfileError:
    """Say why the backward of the whole chain fails though those of single layers run.

    Args:
        error: The original error.
        writers: Names of the layers that write to their input.
    """
    fix = _LESS_MEMORY if is_out_of_memory(error) else _TRAIN_FIRST
    if writers and "inplace" in str(error):
        fix = (
            f"let layer {', '.join(map(repr, writers))}, which writes to its input, make a result "
            "of its own: the layer before it needs what it has handed on."
        )
    return ProfileError(
        f"the backward of the whole chain failed: {type(error).__name__}: {error}\nFix: {fix}"
    )
