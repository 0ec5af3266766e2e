"""The machine and the moment: what a result was measured on, with, and beside."""

from __future__ import annotations

import datetime
import os
import platform
import time
from pathlib import Path
from typing import Any

from solver_benchmark.peers import version

__all__ = ["OtherLoad", "provenance"]


def provenance() -> dict[str, Any]:
    """Tell when, where and with what."""
    packages = ("gpipebal", "numpy", "scipy", "torchgpipe", "deepspeed", "torch")
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {
            "python": platform.python_version(),
            **{package: version(package) for package in packages},
        },
    }


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


class OtherLoad:
    """How much of the machine's cores somebody else used, from here to `share`. Linux only."""

    def __init__(self) -> None:
        self._busy, self._own, self._clock = _busy_seconds(), _own_seconds(), time.monotonic()

    def share(self) -> float | None:
        """Return the share, 0 to 1, with what a hypervisor took; None where it is unknown."""
        now = _busy_seconds()
        if now is None or self._busy is None:
            return None
        seconds = (now - self._busy) - (_own_seconds() - self._own)
        cores = os.cpu_count() or 1
        return max(0.0, seconds / ((time.monotonic() - self._clock) * cores))


def _busy_seconds() -> float | None:
    """Return the seconds that all cores together were not idle."""
    path = Path("/proc/stat")
    if not path.exists():
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = map(
        int, path.read_text(encoding="utf-8").splitlines()[0].split()[1:]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    return sum(os.times()[:4])
