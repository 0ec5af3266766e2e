"""Several processes that talk to each other, for tests of what is run by torchrun."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

__all__ = ["run_two"]

ROOT = Path(__file__).parents[2]


def run_two(code: str) -> list[str]:
    """Run a script in two processes as torchrun does; return what they print.

    Args:
        code: The script.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        # gloo asks which interface the host's name stands for, which need not have an answer.
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, **place, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        # Together less than the watchdog, behind which nobody would end them.
        until = time.monotonic() + 90
        while time.monotonic() < until:
            codes = [process.poll() for process in processes]
            if None not in codes or any(codes):
                break  # all have ended, or the other one would wait for ever
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
        said = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    return [out for out, _ in said]
