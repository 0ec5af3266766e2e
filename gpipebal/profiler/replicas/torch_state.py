"""What an interrupt may leave behind in torch: modes, hooks and switches of thread and process.

A profile enters and leaves modes at every layer. An interrupt may come between any two steps of
Python, also between entering a mode and the block that would leave it. So how torch was found is
remembered, and put back at the end whatever happened in between.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import overrides
from torch.utils import _python_dispatch

from gpipebal.pipeline.process.eager import eager_blocks, leave_eager_blocks

__all__ = ["torch_state_kept"]

#: Default hooks on saved tensors that may have been left behind, at most.
_MOST_HOOKS = 100


@contextmanager
def torch_state_kept() -> Iterator[None]:
    """Put torch back as it was found, at the end of a block, in this thread and in the process.

    That is: the stacks of dispatch and function modes, default hooks on saved tensors, grad mode,
    the number of threads, the fast path of attention, and whether compiled code runs.

    Raises:
        KeyboardInterrupt: an interrupt; also where leaving a mode has raised another error since.
    """
    put_back = _found()
    try:
        yield
    except Exception as error:
        interrupt = _interrupt_before(error)
        if interrupt is not None:
            raise interrupt from None
        raise
    finally:
        put_back()


def _found() -> Callable[[], None]:
    """Remember how torch is; return what puts it back."""
    stacks = [
        (modes, list(modes()), pop, push)
        for modes, pop, push in (
            (
                _python_dispatch._get_current_dispatch_mode_stack,
                _python_dispatch._pop_mode,
                _python_dispatch._push_mode,
            ),
            (
                overrides._get_current_function_mode_stack,
                overrides._pop_mode,
                overrides._push_mode,
            ),
        )
    ]
    hooks, grad = _top_hooks(), torch.is_grad_enabled()
    threads, fast = torch.get_num_threads(), torch.backends.mha.get_fastpath_enabled()
    n_eager, stance = eager_blocks(), _stance()

    def put_back() -> None:
        for modes, before, pop, push in stacks:
            now = modes()
            shared = 0
            while shared < min(len(now), len(before)) and now[shared] is before[shared]:
                shared += 1
            for _ in now[shared:]:
                pop()
            for mode in before[shared:]:
                push(mode)
        for _ in range(_MOST_HOOKS):
            if _are_same(_top_hooks(), hooks):
                break
            torch._C._autograd._pop_saved_tensors_default_hooks()
        torch.set_grad_enabled(grad)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.backends.mha.set_fastpath_enabled(fast)
        if leave_eager_blocks(n_eager) and stance is not None and _stance() != stance:
            sys.modules["torch._dynamo"].eval_frame._set_stance(stance)

    return put_back


def _top_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _are_same(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    return all(a is b for a, b in zip(one, other, strict=True))


def _stance() -> Any:
    """Return what torch's compiler does with compiled code; None: it is not loaded."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    return getattr(getattr(dynamo, "eval_frame", None), "_stance", None)


def _interrupt_before(error: BaseException) -> KeyboardInterrupt | None:
    """Return the interrupt that an error came up behind; None: there was none."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        if isinstance(one, KeyboardInterrupt):
            return one
        seen.add(id(one))
        one = one.__cause__ or one.__context__
    return None
