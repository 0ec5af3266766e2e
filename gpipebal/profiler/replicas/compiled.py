"""What `torch.compile` has compiled: layers and functions, and copies of such layers."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from torch import nn

__all__ = ["compile_alike", "compiled_apart", "is_compiled", "runs_as_written"]

#: How often one layer may be compiled for other sizes, threads and copies while it is measured.
_MOST_COMPILED = 10_000


def is_compiled(value: Any) -> bool:
    """Tell whether a module itself is compiled, as a wrapper or in place; or whether a function is.

    Example:
        >>> is_compiled(nn.Linear(1, 1)), is_compiled(len)
        (False, False)
    """
    if issubclass(type(value), nn.Module):
        return "_orig_mod" in value._modules or value._compiled_call_impl is not None
    return (
        issubclass(type(value), FunctionType)
        and hasattr(value, "_torchdynamo_orig_callable")
        # One that is kept from being compiled has the same attribute.
        and not hasattr(value, "_torchdynamo_disable")
    )


@contextmanager
def compiled_apart() -> Iterator[None]:
    """Let code be compiled as often as measuring needs, and keep none of it afterwards.

    torch gives up compiling code that it has compiled a few times. Copies have the code of the
    caller's layers, and call the same compiled functions, wherever these are. If something was
    compiled in the block, all that torch has compiled in this process is compiled again at its next
    call. Where torch's compiler is not loaded nothing is compiled, and it stays so.
    """
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is None:
        yield
        return
    config, before = dynamo.config, _frames_compiled(dynamo)
    try:
        with config.patch(
            recompile_limit=max(_MOST_COMPILED, config.recompile_limit),
            accumulated_recompile_limit=max(_MOST_COMPILED, config.accumulated_recompile_limit),
        ):
            yield
    finally:
        if _frames_compiled(dynamo) != before:
            dynamo.reset()


def _frames_compiled(dynamo: Any) -> int:
    """Return how often torch has compiled something, or tried to, in this process."""
    frames: int = dynamo.utils.counters["frames"]["total"]
    return frames


def compile_alike(layer: nn.Module, copied: nn.Module) -> None:
    """Compile a copy in place, in the same way, if the original was, by ``layer.compile()``.

    A copy of a module loses this; only wrappers (``torch.compile(layer)``) are copied with it.
    """
    for theirs, mine in zip(layer.modules(), copied.modules(), strict=True):
        if theirs._compiled_call_impl is None:
            continue
        compiler = _compiler_of(theirs._compiled_call_impl)
        if compiler is not None:
            mine._compiled_call_impl = compiler(mine._call_impl)


def runs_as_written(layer: nn.Module) -> bool:
    """Tell whether copies of a layer run uncompiled, though it is compiled itself."""
    return any(
        part._compiled_call_impl is not None and _compiler_of(part._compiled_call_impl) is None
        for part in layer.modules()
    )


def _compiler_of(compiled: Any) -> Callable[..., Any] | None:
    """Find what made a compiled function: only this tells its backend and options."""
    try:
        compiler = inspect.getclosurevars(compiled).nonlocals.get("self")
    except (TypeError, ValueError):
        return None
    return compiler if callable(compiler) else None
