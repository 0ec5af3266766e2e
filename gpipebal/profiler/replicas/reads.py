"""Reads: which attributes of modules code has looked at while it ran.

A layer may know its place in a model, as blocks of transformers do (`layer_idx`), and not look at
it: only its cache would. Code that looks at the same values does the same, so layers that differ in
nothing else cost the same. What code will look at cannot be told from its text; what it has looked
at can, because every way to an attribute leads through `__getattribute__`, also that to all of them
at once, `__dict__`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

from torch import nn

from gpipebal.pipeline.process.blocks import SharedBlocks

__all__ = ["EVERYTHING", "names_read", "reads_unseen"]

#: The name that stands for all: who looks at this can look at everything.
EVERYTHING = "__dict__"
#: What of torch looks at it only to find parameters, buffers and submodules.
_TORCHS: frozenset[CodeType] = frozenset(
    function.__code__
    for function in (
        nn.Module.__getattr__,
        nn.Module.__setattr__,
        nn.Module.__setstate__,
        nn.Module.register_buffer,
        nn.Module.register_parameter,
    )
)
#: What of ours does, to find tensors.
_OURS = ("gpipebal.profiler.", "gpipebal.pipeline.layers.attributes")
#: By one of these a class may have its attributes looked at in a way of its own, or be copied so.
_OWN_WAYS = frozenset(
    (
        "__getattribute__",
        "__deepcopy__",
        "__reduce__",
        "__reduce_ex__",
        "__getstate__",
        "__setstate__",
    )
)
_KNOWN_PACKAGES = frozenset({"torch", "builtins", "gpipebal"})
#: What the blocks that run have noted, in whichever thread.
_open: list[set[str]] = []


@contextmanager
def names_read() -> Iterator[set[str]]:
    """Note which attributes of modules are read in a block, in all threads.

    Yields:
        Receives their names; `EVERYTHING` where code can have looked at all of them.

    Example:
        >>> layer = nn.Dropout()
        >>> with names_read() as names:
        ...     output = layer(nn.Parameter())
        >>> "p" in names, "training" in names, EVERYTHING in names
        (True, True, False)
    """
    names: set[str] = set()
    _blocks.enter()
    try:
        if nn.Module.__getattribute__ is not _noting:
            names.add(EVERYTHING)  # somebody else's is in its place
        _open.append(names)
        yield names
    finally:
        _open[:] = [one for one in _open if one is not names]
        _blocks.leave()


def reads_unseen(layer: nn.Module) -> bool:
    """Tell whether attributes of a layer can be read in a way that `names_read` does not see.

    Its classes may say themselves how they are found, or how it is copied.
    """
    kinds = {kind for module in layer.modules() for kind in type(module).__mro__}
    return any(
        not _OWN_WAYS.isdisjoint(vars(kind))
        for kind in kinds
        if str(kind.__module__).partition(".")[0] not in _KNOWN_PACKAGES
    )


def _noting(self: nn.Module, name: str) -> Any:
    """Do what Python does, and note it."""
    if name != EVERYTHING or _looks_further(sys._getframe(1)):
        for names in _open:
            names.add(name)
    return super(nn.Module, self).__getattribute__(name)


def _looks_further(frame: Any) -> bool:
    """Tell whether code that has asked for all attributes can look at any of them."""
    home = str(frame.f_globals.get("__name__", ""))
    return frame.f_code not in _TORCHS and not home.startswith(_OURS)


def _install() -> bool:
    if "__getattribute__" in vars(nn.Module):
        return False
    nn.Module.__getattribute__ = _noting  # type: ignore[assignment, method-assign]
    return True


def _remove() -> None:
    if vars(nn.Module).get("__getattribute__") is _noting:
        del nn.Module.__getattribute__


_blocks = SharedBlocks(_install, _remove)
