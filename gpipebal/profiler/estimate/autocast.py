"""Autocast inside of layers that are estimated.

A layer may turn autocast on or off for the device of its input, ``torch.autocast(x.device.type)``.
In an estimate that is the meta device, for which torch has no autocast: what the layer means is the
device that the estimate is for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from gpipebal.pipeline.process.blocks import SharedBlocks

__all__ = ["autocast_for"]


class _Estimated(threading.local):
    device_type: str | None = None
    noted: Callable[[], None] | None = None


_estimated = _Estimated()
#: Never another one: a thread may still be in `_init` when the last estimate has ended.
_TORCHS_OWN = torch.autocast.__init__


@contextmanager
def autocast_for(device_type: str, noted: Callable[[], None]) -> Iterator[None]:
    """Let autocast for the meta device, in this thread, be that for a kind of device.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.
        noted: Called when autocast for it is turned on: tensors without values are never cast.
    """
    before = _estimated.device_type, _estimated.noted
    _blocks.enter()
    try:
        _estimated.device_type, _estimated.noted = device_type, noted
        yield
    finally:
        _estimated.device_type, _estimated.noted = before
        _blocks.leave()


def _init(
    self: torch.autocast,
    device_type: str,
    dtype: torch.dtype | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
) -> None:
    """Do what torch does; for the meta device, what it does for the estimated one."""
    kind = _estimated.device_type
    if kind is not None and device_type in ("meta", kind):
        if enabled and _estimated.noted is not None:
            _estimated.noted()
        if device_type == "meta":
            device_type = kind
            if kind == "cuda" and not torch.cuda.is_available():
                # torch would warn of a device that the layer has not asked for.
                device_type, dtype, enabled = "cpu", None, False
    _TORCHS_OWN(self, device_type, dtype, enabled, cache_enabled)


def _install() -> None:
    torch.autocast.__init__ = _init  # type: ignore[method-assign]


def _remove() -> None:
    torch.autocast.__init__ = _TORCHS_OWN  # type: ignore[method-assign]


_blocks = SharedBlocks(_install, _remove)
