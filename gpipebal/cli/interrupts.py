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

#: Seconds after which a command that has not ended says what it waits for.
PATIENCE = 1.0


@contextmanager
def second_interrupt_ends_at_once() -> Iterator[None]:
    """Let the first Ctrl-C raise KeyboardInterrupt, and the second end the process.

    Python runs signal handlers in the main thread between two bytecodes, and that thread may be
    inside a long operation of torch. The number of the signal, though, is written to the wake-up
    file at once, and a thread of its own can act on it: it says so if the first takes effect late.
    """
    is_main = threading.current_thread() is threading.main_thread()
    # A shell starts what runs in the background with interrupts ignored: they are meant for others.
    if not is_main or signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None):
        yield
        return
    import socket

    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def watch() -> None:
        seen = 0
        while True:
            try:
                numbers = reader.recv(64)
            except TimeoutError:
                reader.settimeout(None)
                _say(b"ending after the work in progress; Ctrl-C again ends at once.")
                continue
            if not numbers:
                return
            seen += numbers.count(signal.SIGINT)
            if seen >= 2:
                _say(b"stopped at once.")
                os._exit(INTERRUPTED)
            if signal.SIGINT in numbers:
                reader.settimeout(PATIENCE)

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


def _say(text: bytes) -> None:
    """Write to standard error, from any thread; where that is impossible, say nothing."""
    with suppress(OSError):
        os.write(2, b"\ngpipebal: " + text + b"\n")
