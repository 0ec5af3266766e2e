"""Weights that layers compute once for several uses, in blocks of `parametrize.cached`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator

from torch import nn
from torch.nn.utils import parametrize

__all__ = ["forget_cached_weights"]


def forget_cached_weights(modules: Iterable[nn.Module]) -> None:
    """Drop what torch's cache has of the weights of modules, from the graph of another pass.

    The cache is one for all threads, and is emptied when no thread is in such a block any more:
    with layers in several partitions some thread nearly always is.
    """
    cache = parametrize._cache
    if not cache:
        return
    ids = {name for module in modules for name in _names_in_cache(module)}
    for key in [key for key in cache.copy() if key[0] in ids]:
        cache.pop(key, None)


def _names_in_cache(module: nn.Module) -> Iterator[int]:
    """Return the ``id`` that the cache has a module's weights under; for a copy, the original's."""
    yield id(module)
    if parametrize.is_parametrized(module):
        for name in module.parametrizations:  # type: ignore[union-attr]
            # A copy has the original's class, whose functions read and write the cache.
            read = getattr(type(module), name, None)
            if not isinstance(read, property) or read.fget is None:
                continue  # the module has an attribute of that name for something else
            found = inspect.getclosurevars(read.fget).nonlocals
            through = found.get("get_cached_parametrization")
            if through is not None:
                yield id(inspect.getclosurevars(through).nonlocals.get("module"))
