"""Eager code: let compiled layers run as they were written, for a while.

Code that watches single operations cannot see into compiled code. Worse, a function that
`torch.compile` first meets under a dispatch mode is never compiled again, in the whole process:
watching would change what is watched.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any

import torch

from gpipebal.pipeline.process.blocks import SharedBlocks
from gpipebal.pipeline.process.modes import ThreadedDispatchMode

__all__ = ["EagerDispatchMode", "run_eagerly"]

# The stance belongs to the process. What it was, and what changes it until it is left.
_before: Any = None
_stance: Any = None


def run_eagerly() -> AbstractContextManager[None]:
    """Run compiled code as it was written, in all threads, for as long as a block runs.

    What is compiled stays compiled, and runs compiled again after the block. Where nothing was ever
    compiled, torch's compiler is not even imported.
    """
    return _blocks.inside()


class EagerDispatchMode(ThreadedDispatchMode):
    """A dispatch mode in which compiled code runs as it was written.

    It is given an operation that runs functions (flex attention, `torch.cond`) as a single one:
    torch turns the mode off while the functions run.
    """

    supports_higher_order_operators = True

    def __enter__(self) -> Any:
        return _blocks.enter_with(super().__enter__)

    def __exit__(self, *error: Any) -> None:
        _blocks.leave_with(super().__exit__, *error)


def _install() -> bool:
    global _before, _stance
    if "torch._dynamo" not in sys.modules:
        return False
    _before = _present()
    _stance = torch.compiler.set_stance("force_eager")
    return True


def _remove() -> None:
    global _before, _stance
    if _stance is not None:
        _stance.__exit__(None, None, None)
    elif _before is not None and _before != _present():
        # Interrupted between setting it and knowing of it.
        sys.modules["torch._dynamo"].eval_frame._set_stance(_before)
    _stance = _before = None


def _present() -> Any:
    """Return what torch's compiler, which is loaded, does with compiled code."""
    return getattr(sys.modules["torch._dynamo"].eval_frame, "_stance", None)


_blocks = SharedBlocks(_install, _remove)
