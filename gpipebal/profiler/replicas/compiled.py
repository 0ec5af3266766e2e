"""Layers that `torch.compile` has compiled: which they are, and their copies."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from torch import nn

__all__ = ["compile_alike", "compiled_apart", "is_compiled", "runs_as_written"]

#: How often one layer may be compiled for other sizes, threads and copies while it is measured.
_MOST_COMPILED = 10_000


def is_compiled(layer: nn.Module) -> bool:
    """Tell whether a layer, or a part of it, is compiled: as a wrapper or in place."""
    return any(
        "_orig_mod" in part._modules or part._compiled_call_impl is not None
        for part in layer.modules()
    )


def _calls_compiled(value: Any) -> bool:
    """Tell whether something is a compiled function, or a module that has one as an attribute."""
    parts = value.modules() if isinstance(value, nn.Module) else ()
    several = [value, *(each for part in parts for each in vars(part).values())]
    functions = [each for each in several if isinstance(each, FunctionType)]
    return any(hasattr(each, "_torchdynamo_orig_callable") for each in functions)


@contextmanager
def compiled_apart(objects: Iterable[Any]) -> Iterator[None]:
    """Let compiled layers be compiled as often as measuring needs, and keep none of it afterwards.

    torch gives up compiling code that it has compiled a few times, and copies have the code of the
    caller's layers. After the block, all that torch has compiled in this process is compiled again
    at its next call.

    Args:
        objects: Layers, and functions such as a loss.
    """
    if not any(
        _calls_compiled(each) or (isinstance(each, nn.Module) and is_compiled(each))
        for each in objects
    ):
        yield
        return
    import torch._dynamo
    from torch._dynamo import config

    try:
        with config.patch(
            recompile_limit=max(_MOST_COMPILED, config.recompile_limit),
            accumulated_recompile_limit=max(_MOST_COMPILED, config.accumulated_recompile_limit),
        ):
            yield
    finally:
        torch._dynamo.reset()


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
