"""Acting: as which kind of device a thread runs operations on meta tensors, also under autocast.

A layer may turn autocast on or off for the device of its input, ``torch.autocast(x.device.type)``.
In an estimate that is the meta device, for which torch has no autocast: what the layer means is the
device that the estimate is for.
"""

from __future__ import annotations

import threading

import torch

from gpipebal.profiler.estimate.approximate import REASONS

__all__ = ["acting", "note", "put_autocast_back", "replace_autocast"]


class _Acting(threading.local):
    """What a thread acts as; no kind of device outside of estimates.

    Attributes:
        device_type: ``"cpu"`` or ``"cuda"``.
        has_flash: Whether a CUDA device can run flash attention.
        notes: Reasons why memory is approximate, noted as operations run.
    """

    device_type: str | None = None
    has_flash = True
    notes: set[str] | None = None


acting = _Acting()
#: Never another one: a thread may still be in `_init` when the last estimate has ended.
_TORCHS_OWN = torch.autocast.__init__


def note(name: str) -> None:
    """Note one of `REASONS`."""
    if acting.notes is not None:
        acting.notes.add(str(REASONS[name]))


def replace_autocast() -> None:
    """Let autocast for the meta device, where a thread acts as a device, be that for the device."""
    torch.autocast.__init__ = _init  # type: ignore[method-assign]


def put_autocast_back() -> None:
    """Let autocast be torch's own."""
    torch.autocast.__init__ = _TORCHS_OWN  # type: ignore[method-assign]


def _init(
    self: torch.autocast,
    device_type: str,
    dtype: torch.dtype | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
) -> None:
    """Do what torch does; for the meta device, what it does for the estimated one."""
    kind = acting.device_type
    if kind is not None and device_type in ("meta", kind):
        if enabled:
            note("autocast")  # tensors without values are never cast
        if device_type == "meta":
            device_type = kind
            if kind == "cuda" and not torch.cuda.is_available():
                # torch would warn of a device that the layer has not asked for.
                device_type, dtype, enabled = "cpu", None, False
    _TORCHS_OWN(self, device_type, dtype, enabled, cache_enabled)
