"""What an interrupt may leave behind in torch: modes, hooks and switches of thread and process.

A profile enters and leaves modes at every layer. An interrupt may come between any two steps of
Python, also between entering a mode and the block that would leave it. So how torch was found is
remembered, and put back if a profile ends by an exception.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import overrides
from torch.utils import _python_dispatch

from gpipebal.pipeline.process.blocks import all_shared_blocks
from gpipebal.pipeline.process.engine_state import top_saved_tensors_hooks
from gpipebal.pipeline.process.modes import notes, take_off_notes

__all__ = ["torch_state_kept"]

#: Default hooks on saved tensors that may have been left behind, at most.
_MOST_HOOKS = 100

_STACKS = (
    (
        _python_dispatch._get_current_dispatch_mode_stack,
        _python_dispatch._pop_mode,
        _python_dispatch._push_mode,
    ),
    (overrides._get_current_function_mode_stack, overrides._pop_mode, overrides._push_mode),
)


@contextmanager
def torch_state_kept() -> Iterator[None]:
    """Put torch back as it was found if a block ends by an exception, such as an interrupt.

    That is, for this thread: the stacks of dispatch and function modes, default hooks on saved
    tensors, grad mode, autocast and its cache, and the number of threads; for the process: whether
    a dispatch mode is on, the fast path of attention, and what shared blocks have installed.

    Raises:
        KeyboardInterrupt: an interrupt; also where leaving a mode has raised another error since.
    """
    outer, put_back = sys.exc_info()[1], _found()
    try:
        yield
    except BaseException as error:
        for one in put_back:
            with suppress(Exception):  # the others are put back all the same
                one()
        interrupt = _interrupt_before(error, outer)
        if interrupt is None or interrupt is error:
            raise
        raise interrupt from None


def _found() -> list[Callable[[], None]]:
    """Remember how torch is; return what puts it back, each by itself."""
    stacks = [(stack, list(stack[0]())) for stack in _STACKS]
    noted = notes()
    hooks, grad = top_saved_tensors_hooks(), torch.is_grad_enabled()
    threads, fast = torch.get_num_threads(), torch.backends.mha.get_fastpath_enabled()
    has_cache = torch.is_autocast_cache_enabled()
    casts = [(kind, torch.is_autocast_enabled(kind)) for kind in ("cpu", "cuda")]
    blocks = [(one, one.here()) for one in all_shared_blocks()]

    def put_back_threads() -> None:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)

    def put_back_autocast() -> None:
        for kind, is_on in casts:
            torch.set_autocast_enabled(kind, is_on)

    def leave_blocks() -> None:
        for one, n_blocks in blocks:
            one.leave_all_but(n_blocks)

    return [
        *[partial(_put_back_modes, stack, before) for stack, before in stacks],
        partial(_put_back_notes, noted),
        leave_blocks,
        lambda: torch._C._set_grad_enabled(grad),
        put_back_autocast,
        lambda: torch.set_autocast_cache_enabled(has_cache),
        put_back_threads,
        lambda: torch.backends.mha.set_fastpath_enabled(fast),
        lambda: _put_back_hooks(hooks),
    ]


def _put_back_modes(stack: Any, before: list[Any]) -> None:
    """Leave the modes that are on a stack too many, and push those that are missing."""
    modes, pop, push = stack
    now = modes()
    shared = 0
    while shared < min(len(now), len(before)) and now[shared] is before[shared]:
        shared += 1
    for left in range(len(now) - 1, shared - 1, -1):
        # Leaving a mode also puts back what entering it has set.
        with suppress(Exception):
            now[left].__exit__(None, None, None)
        while len(modes()) > left:
            pop()
    for mode in before[shared:]:
        push(mode)


def _put_back_notes(before: list[bool]) -> None:
    """Take the notes of a mode off again that was interrupted before it was on the stack."""
    if not _python_dispatch._get_current_dispatch_mode_stack():
        take_off_notes(before)


def _put_back_hooks(before: Any) -> None:
    """Take default hooks off until those that were there are on top."""
    for _ in range(_MOST_HOOKS):
        top = top_saved_tensors_hooks()
        if top is None or _are_same(top, before):
            break
        torch._C._autograd._pop_saved_tensors_default_hooks()
    if before is not None and top_saved_tensors_hooks() is None:
        torch._C._autograd._push_saved_tensors_default_hooks(*before)


def _are_same(one: Any, other: Any) -> bool:
    return other is not None and all(a is b for a, b in zip(one, other, strict=True))


def _interrupt_before(
    error: BaseException, outer: BaseException | None
) -> KeyboardInterrupt | None:
    """Return the interrupt during which an error came up; None: there was none.

    Args:
        error: The error.
        outer: What the caller was handling already.
    """
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and one is not outer and id(one) not in seen:
        if isinstance(one, KeyboardInterrupt):
            return one
        seen.add(id(one))
        one = one.__cause__ or one.__context__
    return None
