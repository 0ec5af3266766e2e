"""What a worker thread takes over from the thread that called the pipeline.

Threads inherit none of torch's thread-local settings, so each cell runs inside the settings that
the caller had when the mini-batch went in: autocast, inference mode, the default device of
``with torch.device(...)``, the default dtype, hooks on saved tensors, context variables. A
recompute uses the forward's settings too, because it has to reproduce the forward's numbers; a
backward uses the default device, and those settings that torch has once for the whole process
(`process_wide`), but runs without autocast, as torch advises.
"""

from __future__ import annotations

import contextvars
import functools
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch.utils._device import DeviceContext

from gpipebal.pipeline.process.engine_state import top_saved_tensors_hooks
from gpipebal.pipeline.process.process_wide import Settings, current_settings

__all__ = ["CallerState", "warn_caller", "whole_call", "without_autocast"]


@dataclass(frozen=True)
class CallerState:
    """Settings of torch, taken from one thread to be used in others, or later.

    Attributes:
        autocast: For each type of device, the dtype that autocast casts to there, and whether it
            is on.
        process_wide: What torch has once for the whole process.
    """

    grad_enabled: bool
    inference_mode: bool
    autocast: tuple[tuple[str, torch.dtype, bool], ...]
    device: torch.device | None
    process_wide: Settings
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
            process_wide=current_settings(),
            saved_tensors_hooks=top_saved_tensors_hooks(),
            variables=contextvars.copy_context(),
        )

    def entered(self, *, grad: bool) -> AbstractContextManager[Any]:
        """Return a context under these settings, which records a graph only if `grad` is set."""
        self._set_autocast_dtypes()
        mode = torch.enable_grad() if grad else torch.no_grad()
        # Every cell enters it, and mostly there is nothing else to set.
        return self._entered_with_others(mode) if self._has_others else mode

    @cached_property
    def _has_others(self) -> bool:
        casts = any(is_on for _, _, is_on in self.autocast)
        is_set = self.device is not None or self.saved_tensors_hooks is not None
        return self.inference_mode or casts or is_set

    @contextmanager
    def _entered_with_others(self, mode: AbstractContextManager[Any]) -> Iterator[None]:
        with ExitStack() as stack:
            if self.inference_mode:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(mode)
            for kind, dtype, is_on in self.autocast:
                # torch keeps casts of parameters for the whole process, and forgets them when any
                # thread leaves its autocast: a cell might read one that another stream still makes,
                # and how often it casts would depend on timing.
                if is_on:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))
            if self.device is not None:
                stack.enter_context(self.device)
            if self.saved_tensors_hooks is not None:
                stack.enter_context(
                    torch.autograd.graph.saved_tensors_hooks(*self.saved_tensors_hooks)
                )
            yield

    def backward_entered(self) -> AbstractContextManager[Any]:
        """Return a context for a backward: of these settings it has only the default device."""
        self._set_autocast_dtypes()
        return nullcontext() if self.device is None else self.device

    def _set_autocast_dtypes(self) -> None:
        """Let layers that turn autocast on by themselves cast to what the caller would.

        Never undone: the thread is a worker's, each of whose cells does this.
        """
        for kind, dtype, _ in self.autocast:
            torch.set_autocast_dtype(kind, dtype)


@contextmanager
def without_autocast(kind: str) -> Iterator[None]:
    """Turn autocast off for a block that runs a backward, as it is off in one of a worker.

    Args:
        kind: The kind of device that the block works on.
    """
    has_autocast = torch.amp.autocast_mode.is_autocast_available(kind)  # the meta device has none
    is_on = has_autocast and torch.is_autocast_enabled(kind)
    try:
        if is_on:
            torch.set_autocast_enabled(kind, False)
        yield
    finally:
        if is_on:
            torch.set_autocast_enabled(kind, True)


_Function = TypeVar("_Function", bound=Callable[..., Any])


def whole_call(function: _Function) -> _Function:
    """Wrap a function so that a caller of the pipeline sees it as one step.

    `torch.compile` around it compiles neither it nor what it calls: that would take the pipeline's
    own nodes in autograd's graph apart. And an interrupt that comes while torch enters or leaves a
    block without gradients cannot leave the caller in it.
    """
    # Not functools.cache, of which torch's compiler warns whoever compiles the call.
    uncompiled: list[Any] = []

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        # Where nothing was compiled it is not loaded: loading takes a second.
        if "torch._dynamo" not in sys.modules:
            run: Callable[..., Any] = function
        else:
            if not uncompiled:
                uncompiled.append(torch.compiler.disable(function))
            run = uncompiled[0]
        grad = torch.is_grad_enabled()
        try:
            return run(*arguments, **keywords)
        except BaseException:
            if torch.is_grad_enabled() != grad:
                torch.set_grad_enabled(grad)
            raise

    return call  # type: ignore[return-value]


def warn_caller(text: str) -> None:
    """Warn at the line outside of gpipebal and torch that has led here.

    How many calls are between depends on the way, and, where torch is on it, on hooks and on
    whether its compiler is loaded.
    """
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and _is_within(frame):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def _is_within(frame: types.FrameType) -> bool:
    home = str(frame.f_globals.get("__name__", ""))
    return home.partition(".")[0] in ("gpipebal", "torch")


def _default_device() -> torch.device | None:
    # torch has no public way to read the innermost `with torch.device(...)` of a thread;
    # get_default_device would also answer 'cpu' where nothing was set.
    for mode in reversed(torch.overrides._get_current_function_mode_stack()):
        if isinstance(mode, DeviceContext):
            return mode.device
    return None
