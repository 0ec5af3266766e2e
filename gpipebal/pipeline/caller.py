"""What a worker thread takes over from the thread that called the pipeline.

Threads inherit none of torch's thread-local settings, so each cell runs inside the settings that
the caller had when the mini-batch went in: autocast, inference mode, the default device of
``with torch.device(...)``, the default dtype, hooks on saved tensors, context variables. Recompute
and backward use the forward's settings too, because the forward decides which numbers must come
out again; also of what torch has once for the whole process, such as the default dtype and which
kernels attention may choose from, which under dropout draw different masks.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.backends import cuda, cudnn
from torch.utils._device import DeviceContext

__all__ = ["CallerState"]

#: How to read and to set what torch has once for the whole process.
_PROCESS_WIDE: tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    (lambda: cudnn.enabled, lambda it: setattr(cudnn, "enabled", it)),
)


@dataclass(frozen=True)
class CallerState:
    """Settings of torch, taken from one thread to be used in others, or later.

    Attributes:
        autocast: For each type of device, the dtype that autocast casts to there, and whether it
            is on.
        process_wide: Values of `_PROCESS_WIDE`.
    """

    grad_enabled: bool
    inference_mode: bool
    autocast: tuple[tuple[str, torch.dtype, bool], ...]
    device: torch.device | None
    process_wide: tuple[Any, ...]
    saved_tensors_hooks: tuple[Any, Any] | None
    variables: contextvars.Context = field(repr=False)

    @classmethod
    def capture(cls, device_types: tuple[str, ...]) -> CallerState:
        """Read the settings of the current thread, with autocast for `device_types`."""
        return cls(
            grad_enabled=torch.is_grad_enabled(),
            inference_mode=torch.is_inference_mode_enabled(),
            autocast=tuple(
                (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
                for kind in device_types
            ),
            device=_default_device(),
            process_wide=tuple(read() for read, _ in _PROCESS_WIDE),
            saved_tensors_hooks=_top_saved_tensors_hooks(),
            variables=contextvars.copy_context(),
        )

    @contextmanager
    def entered(self, *, grad: bool) -> Iterator[None]:
        """Run a block under these settings, recording a graph only if `grad` is set."""
        with ExitStack() as stack:
            if self.inference_mode:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(grad))
            for kind, dtype, is_on in self.autocast:
                # For the layers that turn it on by themselves; every cell sets it in its thread.
                torch.set_autocast_dtype(kind, dtype)
                if not is_on:
                    continue
                # torch keeps casts of parameters for the whole process, and forgets them when any
                # thread leaves its autocast: a cell might read one that another stream still makes,
                # and how often it casts would go by the clock.
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))
            if self.device is not None:
                stack.enter_context(self.device)
            if self.saved_tensors_hooks is not None:
                stack.enter_context(
                    torch.autograd.graph.saved_tensors_hooks(*self.saved_tensors_hooks)
                )
            yield

    def backward_entered(self) -> AbstractContextManager[Any]:
        """Return a context for a backward: of these settings, torch's takes the default device."""
        return nullcontext() if self.device is None else self.device

    @contextmanager
    def process_wide_entered(self) -> Iterator[None]:
        """Run a block under those of these settings that torch has once for the whole process.

        They are entered by the caller's thread, for all workers.
        """
        with ExitStack() as stack:
            for (read, write), value in zip(_PROCESS_WIDE, self.process_wide, strict=True):
                now = read()
                if now != value:
                    stack.callback(write, now)
                    write(value)
            yield


def _default_device() -> torch.device | None:
    # torch has no public way to read the innermost `with torch.device(...)` of a thread;
    # get_default_device would also answer 'cpu' where nothing was set.
    for mode in reversed(torch.overrides._get_current_function_mode_stack()):
        if isinstance(mode, DeviceContext):
            return mode.device
    return None


def _top_saved_tensors_hooks() -> tuple[Any, Any] | None:
    # Private: the only way to read hooks that the caller's `with saved_tensors_hooks` set.
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top(True) if top is not None else None
