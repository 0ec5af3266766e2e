"""Skippable layers: classes whose forward hands values to a later layer, past those in between."""

from __future__ import annotations

import copyreg
import functools
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self, TypeVar

from torch import nn

from gpipebal.errors import ModelError
from gpipebal.skip.driver import Declared, drive
from gpipebal.skip.namespace import Namespace
from gpipebal.skip.tracker import Key

__all__ = ["Skippable", "skippable"]

M = TypeVar("M", bound=nn.Module)


class Skippable:
    """What `skippable` adds to a class of layers: all layers that can stash or pop are of it."""

    #: The names that one class declares, without those that it inherits; every class that
    #: `skippable` made has its own.
    _skip_declared: Declared
    _skip_namespaces: Mapping[str, Namespace | None] = types.MappingProxyType({})

    def stashes(self) -> frozenset[Key]:
        """Return the skips that this layer stashes."""
        return self._skip_keys(_declared(type(self)).stash)

    def pops(self) -> frozenset[Key]:
        """Return the skips that this layer pops."""
        return self._skip_keys(_declared(type(self)).pop)

    def isolate(self, ns: Namespace | None, *, only: Iterable[str] | None = None) -> Self:
        """Move names of this layer into a namespace.

        Args:
            ns: The namespace; both layers of a pair need the same. None: the default one.
            only: The names to move; None: all.

        Returns:
            The layer itself.

        Raises:
            ModelError: `ns` is not a namespace, or the layer does not declare a name in `only`.
        """
        if ns is not None and not isinstance(ns, Namespace):
            raise ModelError(
                f"a layer cannot be isolated without a namespace: type(ns)={type(ns).__name__} "
                "(expected Namespace).\n"
                "Fix: layer.isolate(Namespace())."
            )
        declared = _declared(type(self))
        known = declared.stash | declared.pop
        names = known if only is None else _names("only", only)
        if names - known:
            raise ModelError(
                f"{type(self).__name__} cannot isolate names that it does not declare: "
                f"only={sorted(names - known)} (expected some of {sorted(known)}).\n"
                "Fix: leave these names out of only, or declare them with @skippable."
            )
        # A new mapping, because shallow copies of the layer share the old one.
        self._skip_namespaces = {**self._skip_namespaces, **dict.fromkeys(names, ns)}
        return self

    def _skip_keys(self, names: Iterable[str]) -> frozenset[Key]:
        return frozenset((self._skip_namespaces.get(name), name) for name in names)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickle finds classes by name. `@skippable` leaves the decorated class under its own name;
        # `Keep = skippable(stash=["image"])(Identity)` does not, so a recipe for making the class
        # again goes into the pickle.
        kind, reduced = type(self), super().__reduce_ex__(protocol)
        if not _is_derived(kind) or _is_importable(kind) or not isinstance(reduced, tuple):
            return reduced
        if reduced[:2] != (copyreg.__newobj__, (kind,)):  # type: ignore[attr-defined]
            return reduced  # the class has its own way to be pickled
        declared = kind._skip_declared
        recipe = kind.__bases__[0], sorted(declared.stash), sorted(declared.pop)
        return _blank, recipe, *reduced[2:]


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[type[M]], type[M]]:
    """Let a class of layers hand values to later layers of a chain, past those in between.

    The forward of the class is a generator: ``yield stash(name, value)`` keeps a value,
    ``value = yield pop(name)`` gets it, and ``return output`` ends as usual. A value may be
    anything; gradients flow through tensors. Each forward has to stash and pop every declared
    name once. In a pipeline a value goes straight from the partition that stashes it to the one
    that pops it; without a pipeline it works too.

    The decorated class is a subclass of the original class, under the same name: parameters,
    state-dict keys, hooks, copies and pickles are as before. It has three more methods:
    ``isolate(namespace, only=None)`` moves its names into a `Namespace`, ``stashes()`` and
    ``pops()`` return what it declares. A subclass adds its names to those that it inherits, and a
    second decorator to those of the first. Inside the class, write ``super()`` without arguments,
    since the class's name means the decorated one.

    Args:
        stash: Names that the layer stashes.
        pop: Names that the layer pops.

    Returns:
        A decorator for subclasses of `nn.Module`. The same names for the same class give the same
        decorated class.

    Raises:
        ModelError: a name is not a string, or what is decorated is not a subclass of `nn.Module`.

    Source:
        The interface is that of Kim et al., "torchgpipe: On-the-fly Pipeline Parallelism for
        Training Giant Models", 2020, section 3.3. Differs: the class is derived from instead of
        wrapped, modules inside a layer may be skippable, and values need not be tensors.

    Example:
        >>> import torch
        >>> from gpipebal.skip import pop, skippable, stash
        >>> @skippable(stash=["image"])
        ... class Keep(nn.Module):
        ...     def forward(self, x):
        ...         yield stash("image", x)
        ...         return x
        >>> @skippable(pop=["image"])
        ... class Join(nn.Module):
        ...     def forward(self, x):
        ...         image = yield pop("image")
        ...         return x + image
        >>> model = nn.Sequential(Keep(), nn.ReLU(), Join())
        >>> model(torch.tensor([-1.0, 2.0]))
        tensor([-1.,  4.])
    """
    declared = Declared(_names("stash", stash), _names("pop", pop))

    def decorate(kind: type[M]) -> type[M]:
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise ModelError(
                f"only classes of layers can be skippable: got {kind!r} (expected a subclass of "
                "nn.Module).\n"
                "Fix: put @skippable(stash=[...], pop=[...]) before such a class."
            )
        base, names = kind, declared
        if _is_derived(kind):  # two decorators of one forward, whose names add up
            base, known = kind.__bases__[0], kind._skip_declared  # type: ignore[attr-defined]
            names = Declared(known.stash | declared.stash, known.pop | declared.pop)
        return _derive(base, names)

    return decorate


def _names(argument: str, names: Iterable[str]) -> frozenset[str]:
    # A string is an iterable of strings too, but its letters are not the names.
    is_list = isinstance(names, Iterable) and not isinstance(names, str)
    found = list(names) if is_list else []
    if not is_list or not all(isinstance(name, str) for name in found):
        raise ModelError(
            f"names of skips must be a list of strings: {argument}={names!r}.\n"
            f"Fix: {argument}=['name', ...]."
        )
    return frozenset(found)


def _derive(base: type[M], declared: Declared) -> type[M]:
    """Derive the decorated class, or return the one that was derived before."""
    known: Any
    for known in type.__subclasses__(base):
        if _is_derived(known) and known._skip_declared == declared:
            return known

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = super(kind, self).forward(*args, **kwargs)
        return drive(type(self).__name__, declared, self._skip_namespaces, result)

    body = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_skip_declared": declared,
        "forward": forward,
    }
    kind: Any = type(base.__name__, (base, Skippable), body)
    return kind


def _is_derived(kind: type) -> bool:
    return "_skip_declared" in vars(kind)


def _declared(kind: type) -> Declared:
    """Return all names that a class declares, its own and those that it inherits."""
    every: list[Declared] = [
        vars(base)["_skip_declared"] for base in kind.__mro__ if _is_derived(base)
    ]
    return Declared(
        frozenset(name for declared in every for name in declared.stash),
        frozenset(name for declared in every for name in declared.pop),
    )


def _is_importable(kind: type) -> bool:
    found: Any = sys.modules.get(kind.__module__)
    for part in kind.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is kind


def _blank(base: type[nn.Module], stash: list[str], pop: list[str]) -> Any:
    """Make a layer without contents of a decorated class, given the class that was decorated."""
    kind = skippable(stash, pop)(base)
    return kind.__new__(kind)
