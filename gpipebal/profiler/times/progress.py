"""Progress bars: shown on a terminal, silent in files and pipes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["progress_bar"]


@contextmanager
def progress_bar(title: str, total: int, show: bool | None) -> Iterator[Callable[[], None]]:
    """Show a bar while a block runs; yield a callable to call after each of `total` steps.

    Args:
        title: What is being done.
        total: Steps to 100 %, at most.
        show: True or False; None: only if the standard error is a terminal.

    Yields:
        A callable that may be called from any thread.
    """
    visible = _is_terminal() if show is None else show
    if not visible or sys.stderr is None:
        yield lambda: None
        return
    from tqdm.auto import tqdm

    bar = tqdm(total=total, desc=title, leave=False, file=sys.stderr)
    moving = threading.Lock()

    def advance() -> None:
        with moving:
            bar.update()

    try:
        yield advance
        bar.update(total - bar.n)  # time may have been up before all steps were done
        bar.refresh()
    finally:
        bar.close()


def _is_terminal() -> bool:
    """Tell whether the standard error is a terminal; it may be None, a logger's, or closed."""
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):
        return False
