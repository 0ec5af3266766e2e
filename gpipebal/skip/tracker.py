"""Skips on their way: where values wait between the layer that stashes and the one that pops.

That place depends on the thread: a pipeline gives each cell a place of its own with `using`;
outside a pipeline every thread has one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from gpipebal.errors import PipelineError
from gpipebal.skip.namespace import Namespace

__all__ = ["Key", "Skips", "current", "describe", "using"]

#: What a skip is known by in a chain: its namespace (None: the default one) and its name.
Key = tuple[Namespace | None, str]


def describe(key: Key) -> str:
    """Name a skip in an error."""
    namespace, name = key
    return repr(name) if namespace is None else f"{name!r} of {namespace!r}"


class Skips:
    """Values that have been stashed and not yet popped.

    Nothing here is locked: one thread uses it at a time.

    Args:
        values: Values that are on their way already.
    """

    def __init__(self, values: Mapping[Key, Any] | None = None) -> None:
        self._values: dict[Key, Any] = dict(values or {})

    def save(self, key: Key, value: Any) -> None:
        """Stash a value.

        Raises:
            PipelineError: the last value of this key has not been popped yet.
        """
        if key in self._values:
            raise PipelineError(
                f"skip {describe(key)} is stashed again before it was popped.\n"
                "Fix: give each pair of layers its own name, or its own namespace: "
                "layer.isolate(namespace) on both layers."
            )
        self._values[key] = value

    def load(self, key: Key) -> Any:
        """Pop a value: return it and forget it.

        Raises:
            PipelineError: there is none.
        """
        if key not in self._values:
            waiting = ", ".join(describe(other) for other in sorted(self._values)) or "none"
            raise PipelineError(
                f"skip {describe(key)} has not been stashed: it is not among the skips on their "
                f"way ({waiting}).\n"
                "Fix: let an earlier layer of the same chain stash it in the same forward, in the "
                "same namespace; verify_skippables(model) shows what does not pair up."
            )
        return self._values.pop(key)

    def take_all(self) -> dict[Key, Any]:
        """Return what has not been popped, and forget it."""
        values, self._values = self._values, {}
        return values


class _OwnSkips(Skips):
    """A thread's own skips, outside of every `using`.

    Where a forward begins and ends is not known, so a value that a failed one left behind can only
    be noticed when its key is stashed again: it is out of date, and is replaced.
    """

    def save(self, key: Key, value: Any) -> None:
        """Stash a value, in place of one that an earlier forward left behind."""
        self._values[key] = value


class _Place(threading.local):
    def __init__(self) -> None:
        self.skips: Skips = _OwnSkips()


_place = _Place()


def current() -> Skips:
    """Return where layers stash and pop in this thread.

    Returns:
        The skips of the innermost `using`; outside of all, the thread's own. There, a value that a
        failed forward left behind stays until its key is stashed again, or until
        ``current().take_all()``.
    """
    return _place.skips


@contextmanager
def using(skips: Skips) -> Iterator[None]:
    """Let layers stash into and pop from `skips`, in this thread and this block."""
    before = _place.skips
    _place.skips = skips
    try:
        yield
    finally:
        _place.skips = before
