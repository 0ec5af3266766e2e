"""What to say when a layer fails while it is measured: which one, on what input, what helps."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpipebal.errors import ProfileError
from gpipebal.units import count

__all__ = [
    "alone_already",
    "backward_failed",
    "first_line_of",
    "forbids_hooks",
    "forward_failed",
    "is_out_of_memory",
    "left_out",
    "line_of",
    "memory_for",
    "runs_functions",
    "said",
    "shapes_of",
    "text_of",
    "whole_backward_failed",
]

_ONE_AT_A_TIME = "with one_at_a_time=True, or "
_LESS_MEMORY = f"profile {_ONE_AT_A_TIME}with more chunks, or on a larger device."
_TRAIN_FIRST = "make the plain model train first: model(sample).sum().backward()."


#: How errors name a tuple that was given; those of convolutions also name tuples that they take.
_GIVEN_TUPLE = re.compile(r"Tensor, not tuple|'tuple'|got \(tuple|to tuple")

#: Of an error's text, so many lines and characters are passed on.
_MOST_LINES, _MOST_CHARACTERS = 20, 2000


def said(error: BaseException) -> str:
    """Write the kind of an error and what it says; of a long text the beginning.

    Example:
        >>> said(ValueError("no such token")), said(AssertionError())
        ('ValueError: no such token', 'AssertionError')
    """
    kind, lines = type(error).__name__, text_of(error).rstrip().splitlines()
    text = "\n".join(lines[:_MOST_LINES])
    is_cut = len(lines) > _MOST_LINES or len(text) > _MOST_CHARACTERS
    return f"{kind}: {text[:_MOST_CHARACTERS]}{' ...' * is_cut}" if text else kind


def text_of(error: BaseException) -> str:
    """Return what an error says; nothing if its own text fails."""
    try:
        return str(error)
    except Exception:
        return ""


def first_line_of(error: BaseException) -> str:
    """Return the first line of what an error says; where it says nothing, its kind."""
    return text_of(error).partition("\n")[0] or type(error).__name__


def line_of(error: BaseException) -> str:
    """Say in which line of a layer's own code an error came up; nothing if it has none."""
    for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in ("torch", "gpipebal", "contextlib"):
            return f" in line {line} of {Path(frame.f_code.co_filename).name}"
    return ""


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
    on_cpu = isinstance(cause, RuntimeError) and "DefaultCPUAllocator" in text_of(cause)
    return on_cpu or isinstance(cause, (torch.OutOfMemoryError, MemoryError))


def alone_already(error: ProfileError) -> ProfileError:
    """Remove the advice to measure one layer at a time, where that has been done."""
    return ProfileError(text_of(error).replace(_ONE_AT_A_TIME, ""))


def forbids_hooks(error: BaseException) -> bool:
    """Tell whether a function of torch.func ran, which forbids hooks on what is saved."""
    return "yet support saved tensor hooks" in text_of(error)


def runs_functions(error: BaseException) -> bool:
    """Tell whether an operation that runs functions (`torch.cond`) could not be looked into."""
    text = text_of(error).lower()
    return any(kind in text for kind in ("higherorderop", "higher order op", "faketensormode"))


def left_out(rows: int, error: Exception) -> str:
    """Say why a size of micro-batch is not measured."""
    return f"not measured at {count(rows, 'row')}: {first_line_of(error)}"


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
        text = f"no memory is left for {what}: {said(error)}\nFix: {_LESS_MEMORY}"
        raise ProfileError(text) from error


def forward_failed(error: Exception, name: str, index: int, shapes: str) -> ProfileError:
    """Name the layer whose forward failed."""
    # What a data loader gives has the target beside the input.
    sample = "a sample" if index else "as sample only the input, without the target (target=),"
    fix = (
        f"give {sample} and a number of chunks that the model can be trained with: "
        "model(sample) should run."
    )
    is_of_kind = isinstance(error, (TypeError, AttributeError))
    if index and is_of_kind and _GIVEN_TUPLE.search(text_of(error)):
        fix = (
            "let the layer take the tuple, or the one before it return only what this one takes: "
            "torch's recurrent layers and attention return tuples."
        )
    if is_out_of_memory(error):
        fix = _LESS_MEMORY
    if not index and "does not require grad" in text_of(error):
        fix = (
            "let the layer begin with x = x.detach().requires_grad_(): what goes into a chain is "
            "data, and is profiled without a gradient, also where the sample has one."
        )
    if "more than 1 value per channel" in text_of(error):
        fix = (
            "give fewer chunks or a larger sample, so that every micro-batch has 2 rows or more, "
            "and no 1 in rows: batch normalisation cannot train on one value per channel."
        )
    if isinstance(error, NotImplementedError) and '"forward" function' in text_of(error):
        fix = (
            "make layers of the modules in it: nn.Sequential(first, *blocks, last), where blocks "
            "is an nn.ModuleList."
        )
    if isinstance(error, TypeError) and "forward() missing " in text_of(error):
        fix = (
            "let its forward take one argument, such as a tuple of several: what goes into a layer "
            "is one value. Only the first layer may have others too, by their names, in keywords."
        )
    if forbids_hooks(error):
        fix = (
            "let the layer differentiate by torch.autograd.grad(..., create_graph=True) in place "
            "of torch.func; or give costs of your own, gpipebal.Profile.from_costs(forward=[...]): "
            "no profile can look at what torch.func.grad, vjp, jacrev and hessian save."
        )
    if runs_functions(error) and not is_out_of_memory(error):
        fix = (
            "give costs of your own, gpipebal.Profile.from_costs(forward=[...]): no profile can "
            "look at what torch.cond saves for a backward."
        )
    return ProfileError(
        f"layer {name!r} (layer {index}) failed on a micro-batch of shape {shapes}: "
        f"{said(error)}\nFix: {fix}"
    )


def backward_failed(error: Exception, name: str, shapes: str) -> ProfileError:
    """Name the layer whose backward failed."""
    fix = _LESS_MEMORY if is_out_of_memory(error) else _TRAIN_FIRST
    return ProfileError(
        f"the backward of layer {name!r}, on a micro-batch of shape {shapes}, failed: "
        f"{said(error)}\nFix: {fix}"
    )


def whole_backward_failed(error: Exception, writers: Sequence[str]) -> ProfileError:
    """Say why the backward of the whole chain fails though those of single layers run.

    Args:
        error: The original error.
        writers: Names of the layers that write to their input.
    """
    fix = _LESS_MEMORY if is_out_of_memory(error) else _TRAIN_FIRST
    if writers and "inplace" in text_of(error):
        fix = (
            f"let layer {', '.join(map(repr, writers))}, which writes to its input, make a result "
            "of its own: the layer before it needs what it has handed on."
        )
    return ProfileError(f"the backward of the whole chain failed: {said(error)}\nFix: {fix}")
