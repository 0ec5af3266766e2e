"""The machine and the moment: what a result was made on, with, and beside."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import gpipebal as gb
from gpipebal.pipeline.layers.devices import visible_cores

__all__ = [
    "OtherLoad",
    "Progress",
    "describe",
    "describe_counts",
    "package_version",
    "place",
    "provenance",
    "settings",
    "software",
    "versions",
]

#: Share of the cores that other programs may use before a result is doubtful.
QUIET = 0.02

#: Variables that decide how fast a CPU is, how it takes memory, or how processes talk.
_SETTINGS = ("OMP_", "MKL_", "KMP_", "GOMP_", "MALLOC_", "GLOO_")


def provenance() -> dict[str, Any]:
    """Tell when, where and with what."""
    return {
        **place(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpipebal": gb.__version__,
        "settings": settings(),
    }


def place() -> dict[str, Any]:
    """Tell when and where."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": _cpu_name(),
        "cores": visible_cores(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def settings() -> dict[str, str]:
    """Return the variables of the environment that change times."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(_SETTINGS)}


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Return the versions of Python and of these packages; None: it is not installed."""
    found = {package: package_version(package) for package in packages}
    return {"python": platform.python_version(), **found}


def package_version(package: str) -> str | None:
    """Return the version of an installed package; None: it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe(about: dict[str, Any]) -> list[str]:
    """Write what `provenance` returned as lines of a README."""
    place = f"{about['cpu']}, {about['cores']} cores, {about['system']}, {about['date']}"
    return [place, *software(about)]


def software(about: dict[str, Any]) -> list[str]:
    """Write the versions, and what of the environment changes times."""
    settings = ", ".join(f"{name}={value}" for name, value in about["settings"].items())
    return [
        f"Python {about['python']}, torch {about['torch']}, gpipebal {about['gpipebal']}",
        settings or "no settings of the allocator",
    ]


def describe_counts(about: dict[str, Any]) -> str:
    """Write what `provenance` returned in one line, for what no clock decides."""
    place = f"{about['date']}, {about['cores']} cores ({about['system']})"
    return f"{place}, {software(about)[0]}"


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


class OtherLoad:
    """How much of the machine's cores somebody else used, from here to `share`.

    Another program that takes a core for a moment makes a step of two threads wait; a result that
    was measured beside one is not to be trusted. Linux only. Processes count when they have ended.
    """

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


class Progress:
    """How far a benchmark is, how long it has taken, and what else ran meanwhile."""

    def __init__(self) -> None:
        self._load, self._started = OtherLoad(), time.monotonic()

    def told(self, line: str) -> None:
        """Write a line, behind the seconds so far."""
        seconds = time.monotonic() - self._started
        print(f"{seconds:5.0f} s  {line}", file=sys.stderr, flush=True)

    @property
    def minutes(self) -> float:
        """Minutes so far, as they are stored."""
        return round((time.monotonic() - self._started) / 60, 2)

    def end(self) -> dict[str, float | None]:
        """Return what is stored of it, and tell of a machine that was not quiet."""
        share = self._load.share()
        if share is None or share > QUIET:
            self.told(f"warning: the machine was not quiet, or that is not known: {share}")
        return {"minutes": self.minutes, "other_load": None if share is None else round(share, 4)}


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
