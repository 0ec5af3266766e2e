"""Dispatch modes that may be on in several threads at once.

torch notes for the whole process that a dispatch mode is on. Entering a mode remembers the note,
and leaving it puts that back. If the modes of two threads overlap, the one that is left last puts
back the note of the other, which has long been left. Where torch goes by the note, it then treats
every thread as if a mode were on.

There are three notes: that any mode is on, that one is on which is not of torch's compiler, and
that one is on which compiled code may not pass by. A torch that goes by the third never compiles a
function that it first meets under it. (So does torch 2.13 if `inline_torch_dispatch_torch_compile`
of `torch._dynamo.config` is off; by default it looks at the modes of the thread itself.)

torch enters modes too: to compile, where one lock makes threads take turns, and without the lock in
the first call of what was compiled. So two workers that compile may leave the first two notes, and
the third as well if a mode of another kind, such as a meter's, was on meanwhile.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch._C._dynamo import guards
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from gpipebal.pipeline.process.blocks import SharedBlocks

__all__ = ["ThreadedDispatchMode", "no_notes_left", "notes", "take_off_notes"]

_NOTES = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)
#: Notes that were on before the first mode or block of any thread.
_before: list[bool] = []


class ThreadedDispatchMode(TorchDispatchMode):
    """A dispatch mode that leaves no note of itself, whatever modes other threads have on.

    That is so when no thread is in a mode of this kind, or in `no_notes_left`, any more.
    """

    def __enter__(self) -> Any:
        return _blocks.enter_with(super().__enter__)

    def __exit__(self, *error: Any) -> None:
        _blocks.leave_with(super().__exit__, *error)


def no_notes_left() -> AbstractContextManager[None]:
    """Run a block in which other threads work; whatever modes they were in, no note of them stays.

    That is so when no thread is in such a block any more. Notes that were on before are left on.
    """
    return _blocks.inside()


def notes() -> list[bool]:
    """Return what torch notes for the process of dispatch modes."""
    return [getattr(_python_dispatch, name) for name in _NOTES]


def take_off_notes(before: list[bool]) -> None:
    """Take the notes off that were not on before.

    None is put on: another thread may have left its own mode since.
    """
    for name, was_on in zip(_NOTES, before, strict=True):
        if not was_on:
            setattr(_python_dispatch, name, False)
    if not before[-1]:
        guards.set_is_in_mode_without_ignore_compile_internals(False)


def _remember() -> None:
    _before[:] = notes()


def _take_off() -> None:
    # A mode that this thread is still in puts back what it found when it is left.
    if _before and not _python_dispatch._get_current_dispatch_mode_stack():
        take_off_notes(_before)


_blocks = SharedBlocks(_remember, _take_off)
