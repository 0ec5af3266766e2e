"""torchgpipe's skip connections: `skippable` wraps the user's layer, kept at ``.module``.

So state-dict keys are torchgpipe's. Everything else is `gpipebal.skip`'s: what a wrapper stashes
and pops, and how a pipeline carries it from one partition to another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

import gpipebal.skip
from gpipebal.errors import ModelError
from gpipebal.skip import Namespace, pop
from gpipebal.skip.skippable import Skippable

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]


class stash(gpipebal.skip.stash):  # noqa: N801 - read as a verb: `yield stash("image", x)`
    """Yielded by the forward of a skippable layer: keep a value for the layer that pops it.

    Args:
        name: A name that the layer has declared.
        tensor: The value; None is a value too.
    """

    __slots__ = ()

    def __init__(self, name: str, tensor: Any) -> None:
        super().__init__(name, tensor)

    @property
    def tensor(self) -> Any:
        """The value, by torchgpipe's name."""
        return self.value


def skippable(
    stash: Iterable[str] = (), pop: Iterable[str] = ()
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Let a class of layers hand values to later layers, past those in between.

    The class is replaced by one of the same name whose instances hold one of the user's class at
    ``.module``. Names and forwards are as for `gpipebal.skip.skippable`, and so is ``isolate``.

    Args:
        stash: Names that the layer stashes.
        pop: Names that the layer pops.

    Returns:
        A decorator for a subclass of `nn.Module`.

    Raises:
        ModelError: a name is not a string, or what is decorated is not a class of modules.

    Example:
        >>> import torch
        >>> from gpipebal.compat.torchgpipe.skip import pop, skippable, stash
        >>> @skippable(stash=["image"])
        ... class Keep(nn.Linear):
        ...     def forward(self, x):
        ...         yield stash("image", x)
        ...         return super().forward(x)
        >>> keep = Keep(3, 3)
        >>> keep, list(keep.state_dict())
        (@skippable(Keep(in_features=3, out_features=3, bias=True)), \
['module.weight', 'module.bias'])
    """
    derive = gpipebal.skip.skippable(stash, pop)

    def wrap(kind: type[nn.Module]) -> type[nn.Module]:
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            return derive(kind)  # which refuses it

        class Wrapper(nn.Module):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__()
                self.module = kind(*args, **kwargs)

            def forward(self, *args: Any, **kwargs: Any) -> Any:
                # A generator, if the user's forward yields; `derive` makes a class that drives it.
                return self.module(*args, **kwargs)

            def __repr__(self) -> str:
                return f"@skippable({self.module})"

        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            setattr(Wrapper, name, getattr(kind, name))
        return derive(Wrapper)

    return wrap


def verify_skippables(module: nn.Sequential) -> None:
    """Make sure that every skip of a chain is stashed once, and popped once by a later layer.

    Args:
        module: The chain; its direct children are the layers.

    Raises:
        ModelError: something does not pair up; the error lists all that does not, in torchgpipe's
            words (a TypeError).
    """
    try:
        gpipebal.skip.verify_skippables(module)
    except ModelError as error:
        problems = list(_problems(module)) if isinstance(module, nn.Sequential) else []
        if not problems:
            raise
        raise ModelError(
            "one or more pairs of stash and pop do not match:\n\n"
            + "\n".join(f"* {problem}" for problem in problems)
            + f"\n\n{error}"
        ) from None


def _problems(module: nn.Sequential) -> Iterator[str]:
    """Say what is wrong with the skips of a chain's direct children."""
    stashed, popped = set(), set()
    for layer_name, layer in module.named_children():
        if not isinstance(layer, Skippable):
            continue
        both = layer.stashes() & layer.pops()
        for _, name in sorted(both):
            yield f"{layer_name!r} declared {name!r} both as stashable and as poppable"
        for key in sorted(layer.stashes() - both):
            if key in stashed:
                yield f"{layer_name!r} redeclared {key[1]!r} as stashable"
            stashed.add(key)
        for key in sorted(layer.pops() - both):
            if key in popped:
                yield f"{layer_name!r} redeclared {key[1]!r} as poppable"
            elif key not in stashed:
                yield f"{layer_name!r} declared {key[1]!r} as poppable but it was not stashed"
            popped.add(key)
    for _, name in sorted(stashed - popped):
        yield f"no module declared {name!r} as poppable but stashed"
