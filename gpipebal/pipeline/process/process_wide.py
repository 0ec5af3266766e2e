"""Settings that torch has once for the whole process, and that a recompute needs as they were.

They decide which numbers come out: the default dtype, and which kernels an operation may choose
from, which under dropout draw different masks. A mini-batch's forward and backward run under those
of its forward, entered by the caller's thread for all workers. Mini-batches of several threads may
overlap in any order; so a phase that ends puts back what another one inside wants, and the last one
puts back what was set before the first. Only if the phases inside want different settings, one of
them runs under the wrong ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.backends import cuda

from gpipebal.pipeline.process.forks import in_child, open_in_child

__all__ = ["Settings", "current_settings", "settings_entered"]

#: The value of each setting.
Settings = tuple[Any, ...]

#: How to read and to write each. Two have no public way: an order of kernels, and a flag that
#: torch.backends.cudnn refuses to set once `torch.backends.disable_global_flags` was called.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    (torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order),
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
)

# A signal handler or a destructor may run a phase of its own in the middle of a change.
_changing = open_in_child(threading.RLock())
#: What each phase inside wants, in the order in which they began.
_inside: list[list[Settings]] = []
#: What was set before the first of them.
_outside: Settings = ()


def current_settings() -> Settings:
    """Read the settings."""
    return tuple(read() for read, _ in _SETTINGS)


@contextmanager
def settings_entered(wanted: Settings) -> Iterator[None]:
    """Run a block under some settings; afterwards they are what they were, or what others want.

    What a layer has set meanwhile is not put back, except for the choice of kernels: layers that
    choose them for a block, at the same time in several partitions, may leave any of their choices.
    """
    global _outside
    mine = [wanted]  # a list, so that no other is the same
    try:
        with _changing:
            now = current_settings()
            if not _inside:
                _outside = now
            _inside.append(mine)
            if now != wanted:
                for (_, write), is_now, value in zip(_SETTINGS, now, wanted, strict=True):
                    if is_now != value:
                        write(value)
        yield
    finally:
        try:
            _leave(mine)
        except BaseException:  # an interrupt came in between
            _leave(mine)
            raise


def _leave(mine: list[Settings]) -> None:
    """Leave a phase; harmless when repeated."""
    (wanted,) = mine
    with _changing:
        _inside[:] = [other for other in _inside if other is not mine]
        after = _inside[-1][0] if _inside else _outside
        now = current_settings()
        if now != after:
            columns = zip(_SETTINGS, now, wanted, after, strict=True)
            for (_, write), is_now, value, then in columns:
                is_kernel = write is not torch.set_default_dtype and not _inside
                if is_now != then and (is_now == value or is_kernel):
                    write(then)


def _leave_others() -> None:
    """Put back, in a forked child, what was set before the phases: their threads are not there."""
    if _inside:
        _inside.clear()
        for (read, write), value in zip(_SETTINGS, _outside, strict=True):
            if read() != value:
                write(value)


in_child(_leave_others)
