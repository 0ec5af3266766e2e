"""Ctrl-C: the first one raises KeyboardInterrupt, the second ends the process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["INTERRUPTED", "second_interrupt_ends_at_once"]

#: Exit status of an interrupted command.
INTERRUPTED = 130


@contextmanager
def second_interrupt_ends_at_once() -> Iterator[None]:
    """Let the first Ctrl-C raise KeyboardInterrupt, and the second end the process.

    Python runs signal handlers in the main thread between two bytecodes, and that thread may be
    inside a long operation of torch. The number of the signal, though, is written to the wake-up
    file at once, and a thread of its own can act on it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    import socket

    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def watch() -> None:
        seen = 0
        while numbers := reader.recv(64):
            seen += numbers.count(signal.SIGINT)
            if seen >= 2:
                with suppress(OSError):  # it ends even where it cannot say so
                    os.write(2, b"\ngpipebal: stopped at once.\n")
                os._exit(INTERRUPTED)

    watcher = threading.Thread(target=watch, name="gpipebal-interrupts", daemon=True)
    watcher.start()
    old_handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    old_file = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(old_file)
        signal.signal(signal.SIGINT, old_handler)
        writer.close()
        watcher.join()
        reader.close()
