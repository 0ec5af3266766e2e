"""Flags, on which a caller waits for its workers."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from gpipebal.pipeline.workers.inbox import Flag

pytestmark = pytest.mark.timeout(30)


def test_flags_wake_who_waits() -> None:
    """It may be waited for again, and in vain."""
    flag = Flag()
    assert not flag.wait(0.01)
    threading.Timer(0.05, flag.set).start()
    assert flag.wait() and flag.wait(0.0) and flag.wait()
    flag = Flag()
    threading.Timer(0.05, flag.wake).start()
    assert not flag.wait()


def test_a_signal_that_wakes_nobody_is_seen() -> None:
    """Python's handlers run in the main thread, whichever thread the system has interrupted."""

    def interrupt() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        assert waits.wait(20)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)
        assert flag.wait(20)

    flag, waits = Flag(), threading.Event()
    # The system hands the signal to another thread than this one, as if it had come just before.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    worker = threading.Thread(target=interrupt)
    try:
        worker.start()
        with pytest.raises(KeyboardInterrupt):
            waits.set()
            flag.wait()
        assert worker.is_alive()  # nothing else has woken us
    finally:
        flag.set()
        worker.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_timeout_is_kept_by_who_looks_around() -> None:
    """The main thread wakes up more often, and waits as long."""
    begin = time.monotonic()
    assert not Flag().wait(0.7)
    assert time.monotonic() - begin >= 0.7
