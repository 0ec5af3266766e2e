"""What lives in the process, and whether it has grown."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from torch import Tensor

#: By how much the median of the last quarter may be above that of the first. Nothing for what a
#: step takes and gives back: tensors, threads, files. The heap grows a little while pipelines meet
#: new kinds of micro-batches, which they remember: less than a hundred bytes per step. Resident
#: memory has besides what the allocator keeps for threads that come and go.
BOUNDS: Mapping[str, float] = {
    "live tensors": 0,
    "Python threads": 0,
    "threads of the process": 0,
    "open files": 0,
    "Python objects": 300,
    "heap in use, KiB": 512,
    "resident memory, KiB": 32 * 1024,
}


class Growth(NamedTuple):
    """How one count went.

    Attributes:
        name: What was counted.
        first: Median over the first quarter.
        last: Median over the last quarter.
        bound: The most that `last` may be above `first`.
    """

    name: str
    first: float
    last: float
    bound: float

    @property
    def is_within(self) -> bool:
        """Whether the bound is kept."""
        return self.last - self.first <= self.bound


def find_growth(samples: Sequence[Mapping[str, float]]) -> list[Growth]:
    """Compare the first and the last quarter of samples.

    Args:
        samples: What `count_all` returned, in order; one at least.
    """
    quarter = max(1, len(samples) // 4)
    return [
        Growth(
            name,
            median(sample[name] for sample in samples[:quarter]),
            median(sample[name] for sample in samples[-quarter:]),
            bound,
        )
        for name, bound in BOUNDS.items()
        if all(name in sample for sample in samples)
    ]


def count_all() -> dict[str, float]:
    """Count what lives; what the system does not tell is left out."""
    gc.collect()
    objects = gc.get_objects()
    counts: dict[str, float] = {
        # By type, because isinstance asks an object for its class, and some answer with work.
        "live tensors": sum(issubclass(type(each), Tensor) for each in objects),
        "Python threads": threading.active_count(),
        "Python objects": len(objects),
    }
    del objects
    process = Path("/proc/self")
    if process.exists():
        pages = int((process / "statm").read_text(encoding="ascii").split()[1])
        counts["threads of the process"] = len(list((process / "task").iterdir()))
        counts["open files"] = len(list((process / "fd").iterdir()))
        counts["resident memory, KiB"] = pages * os.sysconf("SC_PAGE_SIZE") / 1024
    heap = _heap_bytes()
    if heap is not None:
        counts["heap in use, KiB"] = round(heap / 1024, 1)
    return counts


class _MallInfo(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def _heap_bytes() -> int | None:
    """Return the bytes that are allocated and not freed, of all threads; glibc only."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return None
    mallinfo.restype = _MallInfo
    info = mallinfo()
    return int(info.uordblks + info.hblkhd)
